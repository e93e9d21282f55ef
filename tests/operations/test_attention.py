"""Attention: the numbers of `jax.nn.dot_product_attention`, whole and by every implementation, and its collectives."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from equality import are_equal, assert_equal
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import ArgumentError, autoshard
from autoshard.operations.call import Call
from autoshard.ops import attention
from autoshard.ops.attending import rings
from autoshard.propagation.registry import rule_of

SHAPES = ({"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})
T = 48


def arrays(heads=8, shared=4, batch=2, rows=T, keys=T, dtype=jnp.float32):
    sizes = (rows, heads), (keys, shared), (keys, shared)
    return [normal(batch, size, n, 8, seed=i).astype(dtype) for i, (size, n) in enumerate(sizes)]


SEGMENTS = jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 4, (2, T)), 1))
MASK = jnp.asarray(np.random.default_rng(1).random((2, 1, T, T)) > 0.3)
LENGTHS = {"key_value_seq_lengths": jnp.array([40, 3], jnp.int32), "query_seq_lengths": jnp.array([T, 30], jnp.int32)}
LEAST = jnp.zeros((1, 1, T, T)).at[0, 0, 5].set(jnp.finfo(jnp.float32).min)

CASES = {  # arrays, arguments by name
    "causal, heads in groups": (arrays(shared=2), {"is_causal": True}),
    "odd sizes": (arrays(heads=6, shared=3, batch=3, keys=40), {"scale": 0.3}),
    "bias and mask": ([*arrays(), normal(1, 8, T, T, seed=4)], {"mask": MASK}),
    "bias that rows share": ([*arrays(), normal(1, 8, 1, T, seed=4)], {"is_causal": True}),
    "window": (arrays(), {"is_causal": True, "local_window_size": (9, 0)}),
    "window both ways": (arrays(), {"local_window_size": 5}),
    "segments": (arrays(), {"is_causal": True, "segment_ids": SEGMENTS}),
    "lengths": (arrays(), LENGTHS),
    "window over more keys": (arrays(rows=16), {"is_causal": True, "local_window_size": (2, 2)}),
    "a row that bias hides": ([*arrays(), LEAST], {}),
}


def plain(*operands, segment_ids=None, mask=None, **said):
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    return jax.nn.dot_product_attention(*operands, mask=mask, **said)


def with_gradients(function, said, *operands):
    output, pull = jax.vjp(functools.partial(function, **said), *operands)
    weights = jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
    return output, pull(weights.astype(output.dtype))


@pytest.mark.parametrize("case", CASES)
def test_it_is_plain_attention(case):
    operands, said = CASES[case]
    found = jax.jit(functools.partial(with_gradients, attention, said))(*operands)
    assert_equal(found, jax.jit(functools.partial(with_gradients, plain, said))(*operands))


def test_in_bfloat16_it_is_as_exact_as_plain_attention():
    operands, said = arrays(dtype=jnp.bfloat16), {"is_causal": True}
    truth = jax.jit(functools.partial(with_gradients, plain, said))(*(x.astype(jnp.float32) for x in operands))

    def errors(function):
        found = jax.jit(functools.partial(with_gradients, function, said))(*operands)
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(truth), strict=True)
        return np.array([float(jnp.abs(one - other).max()) for one, other in pairs])

    assert (errors(attention) <= 2 * errors(plain)).all()


SECOND = {
    "of a gradient's sum": lambda f: lambda x: jax.grad(lambda x: jnp.sin(jax.grad(f)(x)).sum())(x),
    "forward over reverse": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (jnp.cos(x),))[1],
}


@pytest.mark.parametrize("how", SECOND)
def test_second_derivatives_are_those_of_plain_attention(how):
    query, key, value = arrays()

    def loss(function):
        return lambda x: (function(x, key + x[..., ::2, :], value * x[..., ::2, :], is_causal=True) ** 2).sum()

    found, expected = jax.jit(lambda x: tuple(SECOND[how](loss(f))(x) for f in (attention, plain)))(query)
    assert_equal(found, expected)


@pytest.mark.slow
def test_planned_second_derivatives_are_those_of_plain_attention():
    """Of implementations: their backward passes are differentiated by JAX, statistics with a cotangent included."""
    shape, operands = {"x": 4}, [normal(1, 1024, 1, 8, seed=i) for i in range(3)]

    def second(function):
        return lambda *operands: jax.grad(
            lambda operands: sum(
                jnp.sin(one).sum()
                for one in jax.grad(lambda operands: (function(*operands, is_causal=True) ** 2).sum())(operands)
            )
        )(operands)

    topology = dataclasses.replace(slow_chips(shape), memory_bandwidth=1e11)
    step = autoshard(second(attention), mesh=mesh_of(shape), topology=topology, fixed={"*": P(None, "x")})
    assert any(run.name for run in step.plan(*operands).annotations.runs.values())
    assert_equal(step(*operands), jax.jit(second(plain))(*operands))


def test_in_float64_it_is_as_exact():
    with jax.enable_x64(True):
        query, key, value = (x.astype(jnp.float64) for x in arrays(heads=1, shared=1))
        found, pull = jax.vjp(jax.jit(attention), query, key, value)
        weights = jax.nn.softmax(jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(8))
        assert found.dtype == jnp.float64 and pull(found)[0].dtype == jnp.float64
        assert float(jnp.abs(found - jnp.einsum("bnts,bsnv->btnv", weights, value)).max()) < 1e-14


def test_programs_of_other_variants_have_other_fingerprints():
    """A plan of one is not taken for another, which its implementations could not run."""
    mesh, operands = mesh_of(SHAPES[0]), arrays()
    variants = ({}, {"is_causal": True}, {"is_causal": True, "local_window_size": (9, 0)})
    steps = [functools.partial(with_gradients, attention, said) for said in variants]
    assert len({autoshard(step, mesh=mesh).trace(*operands).fingerprint for step in steps}) == len(variants)


def by_implementation(operands, said, shape, names):
    """Implementation -> output and gradients, each pass run by it; all in one compiled program."""
    mesh = mesh_of(shape)
    program = autoshard(functools.partial(with_gradients, attention, said), mesh=mesh).trace(*operands)
    forward, backward = (Call.of(e, rule_of(e)) for e in program.equations if e.primitive == "operation")
    others = [jnp.asarray(x) for x in operands[3:]]
    others += [said["mask"]] if "mask" in said else []
    others += [said["segment_ids"]] * 2 if "segment_ids" in said else []
    others += [said["key_value_seq_lengths"]] if "key_value_seq_lengths" in said else []
    places = [jnp.arange(x.shape[1], dtype=jnp.int32) for x in operands[:2]]
    inputs = [*operands[:3], *others, *places]
    runs = {}
    for run in forward.runs(shape):
        if run.name in names and all(role in ("heads", "ring", "parts") for role, _ in run.roles):
            runs[run.name] = run  # the last uses the most axes
    assert set(runs) == set(names)

    def computed(*inputs):
        found = {}
        for name, run in runs.items():
            output, statistics = forward.on_mesh(run, mesh)(*inputs)
            weights = jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape).astype(output.dtype)
            given = output, statistics, weights, jnp.zeros_like(statistics)
            found[name] = output, tuple(backward.on_mesh(run, mesh)(*inputs, *given))
        return found

    return jax.jit(computed)(*inputs)


def assert_implementations(case, shape, names):
    operands, said = CASES[case]
    expected = jax.jit(functools.partial(with_gradients, plain, said))(*operands)
    if "query_seq_lengths" in said:
        expected = jax.jit(functools.partial(with_gradients, plain, {**said, "query_seq_lengths": None}))(*operands)
    for found in by_implementation(operands, said, shape, names).values():
        assert_equal(found, expected)


QUICK = [
    ("causal, heads in groups", SHAPES[2], ("ulysses_zigzag",)),
    ("bias that rows share", SHAPES[0], ("ring",)),
    ("segments", SHAPES[1], ("ulysses",)),
    ("window over more keys", SHAPES[0], ("ring", "split_keys")),
]


@pytest.mark.parametrize(("case", "shape", "names"), QUICK, ids=str)
def test_implementations_compute_the_same_numbers(case, shape, names):
    assert_implementations(case, shape, names)


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("case", CASES)
def test_all_implementations_compute_the_same_numbers(case, shape):
    operands, said = CASES[case]
    step = autoshard(functools.partial(with_gradients, attention, said), mesh=mesh_of(shape))
    call = next(e for e in step.trace(*operands).equations if e.primitive == "operation")
    runs = Call.of(call, rule_of(call)).runs(shape)
    names = {run.name for run in runs if run.name and not {role for role, _ in run.roles} - {"heads", "ring", "parts"}}
    assert names & {"ring", "zigzag"} or case == "odd sizes"
    assert_implementations(case, shape, sorted(names))


@pytest.mark.parametrize("is_causal", [False, True])
def test_plans_choose_by_price_and_predict_what_is_compiled(is_causal):
    """One sequence of one head, so that only the sequence can be split; zigzag computes half of what a ring does."""
    shape = {"x": 8}
    operands = [normal(1, 2048, 1, 64, seed=i) for i in range(3)]
    topology = dataclasses.replace(slow_chips(shape), memory_bandwidth=1e11)
    step = functools.partial(with_gradients, attention, {"is_causal": is_causal})
    plan = autoshard(step, mesh=mesh_of(shape), topology=topology, fixed={"*": P(None, "x")}).plan(*operands)
    names = {run.name for run in plan.annotations.runs.values()}
    assert names == {"zigzag"} if is_causal else names <= {"ring", ""}
    assert tally(plan.predicted.collectives) == tally(plan.verify().collectives)


def test_bias_may_be_integers():
    query, key, value = arrays()
    bias = (jnp.arange(T * T) % 7).reshape(1, 1, T, T)
    found, expected = (
        jax.jit(jax.grad(lambda x, f=f: f(x, key, value, bias).sum()))(query) for f in (attention, plain)
    )
    assert_equal(found, expected)


def test_what_does_not_fit_is_said():
    query, key, value = arrays()
    with pytest.raises(ArgumentError, match="no multiple"):
        attention(query[:, :, :3], key[:, :, :2], value[:, :, :2])
    with pytest.raises(ArgumentError, match="do not fit"):
        attention(query, key[:1], value)
    with pytest.raises(ArgumentError, match="does not broadcast"):
        attention(query, key, value, bias=jnp.zeros((3, 1, 1, 1)))
    with pytest.raises(ArgumentError, match="not bool"):
        attention(query, key, value, mask=jnp.zeros((T, T)))
    with pytest.raises(ArgumentError, match="does not broadcast"):
        attention(query, key, value, mask=jnp.ones((1, 1, 1, T, T), bool))
    with pytest.raises(ArgumentError, match="3 or 4 dims"):
        attention(query[0, 0], key[0, 0], value[0, 0])
    for name in ("key_value_seq_lengths", "query_seq_lengths"):
        for lengths in (jnp.array([1, 2, 3]), jnp.ones(2)):
            with pytest.raises(ArgumentError, match=name):
                attention(query, key, value, **{name: lengths})
    for segments in (SEGMENTS[:, 1:], SEGMENTS.astype(jnp.float32), [SEGMENTS], (SEGMENTS, SEGMENTS[:1])):
        with pytest.raises(ArgumentError, match="segment_ids are"):
            attention(query, key, value, segment_ids=segments)


def test_a_fault_is_caught(monkeypatch):
    """Keys that travel the wrong way round: positions are then those of other keys."""
    right = rings._sent_on
    monkeypatch.setattr(rings, "_sent_on", lambda split, tree, by=1: right(split, tree, -by))
    operands, said = CASES["window"]
    expected = jax.jit(functools.partial(with_gradients, plain, said))(*operands)
    assert not are_equal(by_implementation(operands, said, SHAPES[0], ("ring",))["ring"], expected)
