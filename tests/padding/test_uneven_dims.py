"""`pad="auto"`: dims that devices do not divide are padded inside the step; numbers stay those of one device."""

import functools

import jax
import jax.numpy as jnp
import pytest
from cases import integers, normal
from equality import are_equal, assert_equal
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import ArgumentError, MemoryLimitError, MicrobatchError, Plan, PlanError, autoshard
from autoshard.operations.call import Call
from autoshard.padding.dims import resizing, rewriting
from autoshard.padding.dims.classes import DimClasses
from autoshard.padding.dims.rewriting import UnevenStep
from autoshard.propagation.registry import rule_of

VOCABULARY, HEADS, WIDTH, ROWS, LENGTH = 257, 6, 48, 30, 12


def parameters(layers=1):
    def layer(seed):
        shapes = {"q": (WIDTH, 96), "k": (WIDTH, 96), "v": (WIDTH, 96), "o": (96, WIDTH), "up": (WIDTH, 64)}
        made = {name: 0.3 * normal(*shape, seed=seed + i) for i, (name, shape) in enumerate(shapes.items())}
        return made | {"down": 0.3 * normal(64, WIDTH, seed=seed + 9)}

    stacked = jax.tree.map(lambda *x: jnp.stack(x), *(layer(20 * i) for i in range(layers)))
    return {"embed": normal(VOCABULARY, WIDTH), "layers": stacked, "head": 0.3 * normal(WIDTH, VOCABULARY, seed=1)}


def block(x, p):
    def heads(name):
        return (h @ p[name]).reshape(*x.shape[:2], HEADS, 16)

    h = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-3)
    scores = jnp.einsum("bqhd,bkhd->bhqk", heads("q"), heads("k")) / 4
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, heads("v")).reshape(*x.shape[:2], -1) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None


def loss_of(params, tokens, *, checkpointed=False):
    layer = jax.checkpoint(block) if checkpointed else block
    x, _ = jax.lax.scan(layer, params["embed"][tokens[:, :-1]], params["layers"])
    log_probabilities = jax.nn.log_softmax(x @ params["head"])
    return -jnp.mean(jnp.take_along_axis(log_probabilities, tokens[:, 1:, None], -1))


def train(params, moments, tokens, **how):
    loss, gradients = jax.value_and_grad(functools.partial(loss_of, **how))(params, tokens)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, loss


def arguments(layers=1):
    params = parameters(layers)
    return params, jax.tree.map(jnp.ones_like, params), integers(VOCABULARY, ROWS, LENGTH + 1)


def padded_step(step, mesh, args, members):
    """The flat step with the classes of so many members padded."""
    closed, leaves = jax.make_jaxpr(step)(*args), jax.tree.leaves(args)
    classes = DimClasses(closed)
    chosen = {root: one for root, one in classes.uneven(mesh).items() if one.members in members}
    assert {one.members for one in chosen.values()} == set(members)
    return UnevenStep(closed, classes, chosen, range(len(leaves) - 1))


def with_nan(x, dim, size):
    """Added rows that spoil all that they get into."""
    if size <= x.shape[dim]:
        return jax.lax.slice_in_dim(x, 0, size, axis=dim)
    fill = jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 1
    config = [(0, (size - x.shape[dim]) * (i == dim), 0) for i in range(x.ndim)]
    return jax.lax.pad(x, jnp.asarray(fill, x.dtype), config)


@pytest.fixture
def spoiled(monkeypatch):
    monkeypatch.setattr(rewriting, "resized", lambda x, dim, size: with_nan(jnp.asarray(x), dim, size))
    monkeypatch.setattr(
        rewriting.TwoForms, "has_zeros", property(lambda self: False, lambda self, value: None), raising=False
    )


# classes by their members, mesh, keywords
CHOSEN = [
    ({VOCABULARY}, {"x": 8}, {}),
    ({HEADS}, {"x": 4}, {"checkpointed": True}),
    ({ROWS, HEADS, VOCABULARY}, {"x": 4}, {}),
]


@pytest.mark.parametrize("members, mesh, how", CHOSEN)
def test_added_rows_get_into_no_result(spoiled, members, mesh, how):
    args, step = arguments(), functools.partial(train, **how)
    uneven = padded_step(step, mesh, args, members)
    assert_equal(jax.jit(uneven)(*jax.tree.leaves(args)), jax.tree.leaves(jax.jit(step)(*args)))


def test_a_mask_that_is_forgotten_is_found(spoiled, monkeypatch):
    monkeypatch.setattr("autoshard.padding.operations.Mask.applied", lambda self, array: array)
    args = arguments()
    uneven = padded_step(train, {"x": 8}, args, {VOCABULARY})
    assert not are_equal(jax.jit(uneven)(*jax.tree.leaves(args)), jax.tree.leaves(train(*args)))


def recurrent(w, x):
    """A product over the time behind a loop over it."""

    def loss(w):
        _, made = jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row),) * 2, jnp.zeros_like(x[:, 0]), x.swapaxes(0, 1))
        return jnp.mean((made.swapaxes(0, 1) @ w - x) ** 2)

    return jax.value_and_grad(loss)(w)


def test_turns_are_not_padded(spoiled):
    args = normal(WIDTH, WIDTH) / 8, normal(3, LENGTH, WIDTH, seed=1)
    uneven = padded_step(recurrent, {"x": 8}, args, {LENGTH})
    assert_equal(jax.jit(uneven)(*args), jax.tree.leaves(jax.jit(recurrent)(*args)))


def reductions(x):
    y = jnp.concatenate([x @ x.T, jnp.cumsum(x, 0) @ x.T], 1)
    return (
        *(f(x, axis=0) for f in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin, jnp.mean, jnp.var)),
        jax.nn.logsumexp(y, axis=0),
        jnp.any(y > 1, axis=0),
        jnp.all(y > -9, axis=0),
        jnp.sort(x, axis=0),
        x[::-1] @ x.T,
        y[jnp.array([-1, 3, 29, 30, 31])],
        y.at[jnp.array([2, 29, 31])].add(1.0),
        jnp.take(y, jnp.array([31]), axis=0, mode="clip"),
    )


def test_every_kind_of_reduction_and_index(spoiled):
    x = normal(30, 5)
    uneven = padded_step(reductions, {"x": 8}, (x,), {30})
    assert_equal(jax.jit(uneven)(x), list(reductions(x)))


def spread(x, column):
    """Sums over columns that are all alike, and over what keeps zeros as they are."""
    alike = jnp.broadcast_to(column[:, None], (len(x), len(x)))
    forms = -x, x.T, x[None].astype(jnp.bfloat16), x.reshape(len(x), 1, -1)
    return jnp.exp(x @ x.T - alike) @ x, alike.sum(1), *(form.sum() for form in forms)


@pytest.mark.parametrize("rows", [12, 30])
def test_added_columns_of_a_spread_column_are_summed_nowhere(rows):
    """Added rows are zeros, as in a step that runs."""
    args = 0.3 * normal(rows, 5), normal(rows, seed=1)
    uneven = padded_step(spread, {"x": 8}, args, {rows})
    assert_equal(jax.jit(uneven)(*args), list(spread(*args)))


def head(weights, x, labels):
    def loss_of(weights):
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(x @ weights), labels[:, None], -1))

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


def test_a_step_is_padded_where_that_is_faster():
    """State keeps its shapes, and the predicted collectives are the compiled ones."""
    mesh, args = {"x": 8}, (normal(3, VOCABULARY), normal(4, 3), integers(VOCABULARY, 4))
    step = autoshard(head, mesh=mesh_of(mesh), topology=slow_chips(mesh), pad="auto", fixed={"x": P(), "labels": P()})
    plan = step.plan(*args)
    assert any("from 257 to 264" in one for one in plan.warnings)
    assert tally(plan.predicted.collectives) == tally(plan.verify().collectives)
    assert_equal(step(*args), jax.jit(head)(*args))


def test_padded_dims_and_microbatches():
    """The vocabulary is padded in each microbatch; the batch, whose rows they share, is not."""
    mesh, args = {"x": 8}, (normal(3, VOCABULARY), normal(12, 3), integers(VOCABULARY, 12))
    how = {"mesh": mesh_of(mesh), "topology": slow_chips(mesh), "fixed": {"x": P(), "labels": P()}}
    step = autoshard(head, pad="auto", microbatches=2, **how)
    assert any("from 257 to 264" in one for one in step.plan(*args).warnings)
    assert step.trace(*args).microbatches == 2
    assert_equal(step(*args), jax.jit(head)(*args))
    with pytest.raises(MicrobatchError):
        autoshard(head, pad="auto", microbatches=5, **how).plan(*args)


def test_a_plan_that_is_given_says_what_is_padded(tmp_path):
    """It is of one way to pad, or of the step as written. None advises to pad the batch."""
    shape, args = {"x": 8}, (normal(3, VOCABULARY), normal(30, 3), integers(VOCABULARY, 30))
    how = {"mesh": mesh_of(shape), "topology": slow_chips(shape), "donate_argnums": 0}
    for pad in ("auto", None):
        plan = autoshard(head, **how, pad=pad).plan(*args)
        plan.save(tmp_path / "plan.json")
        step = autoshard(head, **how, pad="auto", plan=Plan.load(tmp_path / "plan.json", how["mesh"]))
        again = step.plan(*args)
        assert again.fingerprint == plan.fingerprint and again.in_shardings == plan.in_shardings
        assert any("pad='auto'" in one for one in again.warnings) == (pad == "auto")
        assert any("pad='batch'" in one for one in plan.warnings) == (pad is None)
    with pytest.raises(PlanError):
        step.plan(normal(3, 129), *args[1:])


def test_all_ways_to_pad_share_the_time_limit(monkeypatch):
    limits = []

    def planned(self, *args, **kwargs):
        limits.append(self._options.time_limit)
        raise MemoryLimitError("", budget=1, needed=2)

    monkeypatch.setattr("autoshard.decorated.ShardedFunction.plan", planned)
    args = normal(3, VOCABULARY), normal(30, 3), integers(VOCABULARY, 30)
    with pytest.raises(MemoryLimitError):
        autoshard(head, mesh=mesh_of({"x": 8}), pad="auto", time_limit=6).plan(*args)
    assert len(limits) > 2 and sum(limits) == pytest.approx(6)


def test_even_dims_stay_as_they_are():
    mesh, x = {"x": 8}, normal(16, 8)
    padded, plain = (
        autoshard(jnp.dot, mesh=mesh_of(mesh), topology=slow_chips(mesh), pad=pad) for pad in ("auto", None)
    )
    assert padded.plan(x, x.T).dumps() == plain.plan(x, x.T).dumps()


def test_shares_of_resized_arrays_are_those_of_the_whole():
    """Every implementation, on arrays that grow and that lose rows."""
    shape = {"x": 4, "y": 2}
    mesh = mesh_of(shape)
    for old, new in ((24, 32), (32, 30)):
        x = normal(old, 8)
        program = autoshard(lambda x, new=new: resizing.resized(x, 0, new), mesh=mesh).trace(x)
        call = Call.of(program.equations[-1], rule_of(program.equations[-1]))
        runs = {
            run.name: run
            for run in call.runs(shape)
            if run.name and {axis for _, axes in run.roles for axis in axes} == {"x", "y"}
        }
        found = jax.jit(lambda x, runs=runs, call=call: [call.on_mesh(run, mesh)(x)[0] for run in runs.values()])(x)
        assert_equal(found, [x[:new] if new < old else jnp.pad(x, [(0, new - old), (0, 0)])] * len(runs))


def test_another_word_is_said():
    with pytest.raises(ArgumentError, match="pad='all'; 'batch' or 'auto' or None is needed"):
        autoshard(lambda x: x, mesh=mesh_of({"x": 8}), pad="all")
