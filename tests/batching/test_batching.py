"""What a step computes of each matrix by itself, computed of stacks of matrices: which functions, and their numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import planning
from autoshard.batching import boundary
from autoshard.batching.rewriting import BatchedFunctions
from autoshard.errors import SolverError
from autoshard.plans import alternatives
from autoshard.solver.problem import UndecidedError
from autoshard.tactics import DataParallel, ZeRO

RNG = np.random.default_rng(0)


def matrices(*shapes):
    return [jnp.asarray(RNG.normal(size=shape), jnp.float32) for shape in shapes]


def orthogonal(m, steps=3):
    """Newton-Schulz iterations, as Muon's authors write them."""
    tall = m.shape[0] > m.shape[1]
    x = m.T if tall else m
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


def root_of(statistics):
    """The inverse fourth root, as Shampoo takes it."""
    values, vectors = jnp.linalg.eigh(statistics + 1e-2 * jnp.eye(len(statistics)))
    return (vectors * values**-0.25) @ vectors.T


def muon_leaf_by_leaf(weights, gradients):
    return [w - 0.1 * orthogonal(g) for w, g in zip(weights, gradients, strict=True)]


def muon_of_optax(weights, gradients):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.contrib.muon(1e-2, weight_decay=0.1))
    _, state = optimizer.update(weights, optimizer.init(weights), weights)
    updates, _ = optimizer.update(gradients, state, weights)
    return optax.apply_updates(weights, updates)


def muon_of_a_schedule_per_step(weights, gradients):
    coefficients = ((3.4, -4.7, 2.0), (3.0, -4.0, 1.5), (2.5, -3.0, 1.0))
    optimizer = optax.contrib.muon(1e-2, ns_coeffs=coefficients, adaptive=True)
    _, state = optimizer.update(weights, optimizer.init(weights), weights)
    return optimizer.update(gradients, state, weights)[0]


def shampoo(weights, gradients):
    return [w - 0.1 * root_of(g @ g.T) @ g @ root_of(g.T @ g) for w, g in zip(weights, gradients, strict=True)]


def updates_clipped_together(weights, gradients):
    updates = [orthogonal(g) for g in gradients]
    scale = 1 / jnp.maximum(1.0, sum(jnp.sum(u**2) for u in updates) ** 0.5)
    return [w - scale * u for w, u in zip(weights, updates, strict=True)]


def a_number_per_matrix(weights, gradients):
    return [w - orthogonal(g + jnp.max(w) * g) * jnp.max(w) for w, g in zip(weights, gradients, strict=True)]


def two_results(weights, gradients):
    made = [(orthogonal(g), orthogonal(g) @ jnp.ones((g.shape[1], 2))) for g in gradients]
    return [w + u + jnp.sum(v) for w, (u, v) in zip(weights, made, strict=True)]


def unread_results(weights, gradients):
    """The backward pass leaves equations that nothing reads."""
    both = zip(weights, gradients, strict=True)
    made = [jax.grad(lambda g: jnp.sum(jnp.linalg.cholesky(g @ g.T + 4 * jnp.eye(8)) ** 2))(g) for _, g in both]
    return [w - u for w, u in zip(weights, made, strict=True)]


def in_a_loop(weights, gradients):
    def turn(x, _):
        return 1.5 * x - 0.5 * x @ (x.T @ x), None

    made = [jax.lax.scan(turn, g / jnp.linalg.norm(g), None, length=3)[0] for g in gradients]
    return [w - u for w, u in zip(weights, made, strict=True)]


def one_after_the_other(weights, gradients):
    """Each layer's function is computed of the last one's result: these cannot be one."""
    x = gradients[0]
    for w in weights:
        x = orthogonal(x) + w
    return x


SAME = [(8, 16)] * 3
MIXED = [(8, 16), (16, 8), (8, 16), (12, 12), (16, 8), (12, 12), (8, 24)]
# Function, shapes of its matrices, and how many arrays each group has.
KINDS = [
    (muon_leaf_by_leaf, SAME, [3]),
    (muon_leaf_by_leaf, MIXED, [4, 2]),
    (muon_of_optax, MIXED, [4, 2]),
    (muon_of_a_schedule_per_step, MIXED, [2, 2, 2]),
    (shampoo, SAME, [3]),
    (updates_clipped_together, SAME, [3]),
    (a_number_per_matrix, SAME, [3]),
    (two_results, SAME, [3]),
    (unread_results, SAME, [3]),
    (in_a_loop, SAME, [3]),
]


def batched(function, shapes):
    arguments = dict(enumerate(matrices(*shapes))), dict(enumerate(matrices(*shapes)))

    def step(weights, gradients):
        return function(list(weights.values()), list(gradients.values()))

    closed = jax.make_jaxpr(step)(*arguments)
    return BatchedFunctions.of(closed), jax.tree.leaves(arguments), jax.tree.leaves(jax.jit(step)(*arguments))


@pytest.mark.parametrize(("function", "shapes", "counts"), KINDS, ids=lambda one: getattr(one, "__name__", None))
def test_stacks_compute_the_same(function, shapes, counts):
    found, leaves, expected = batched(function, shapes)
    assert [len(group) for group in found.groups] == counts
    made = jax.jit(jaxpr_as_fun(found.rewritten(4)))(*leaves)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)


def test_functions_of_each_other_stay_apart():
    found, _, _ = batched(one_after_the_other, SAME)
    assert found is None


def test_a_step_without_such_functions_is_one_plan():
    closed = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w) @ w.T)))(*matrices((8, 8), (4, 8)))
    assert BatchedFunctions.of(closed) is None


def test_a_wrong_signature_is_caught():
    """Functions that differ in a number alone are no group."""

    def step(weights, gradients):
        return [
            w - orthogonal((1 + i) * g, steps=1 + i) for i, (w, g) in enumerate(zip(weights, gradients, strict=True))
        ]

    assert batched(step, SAME)[0] is None


def test_numbers_that_vmap_would_draw_otherwise_stay_outside():
    def one(w, seed):
        _, bits = jax.lax.rng_bit_generator(jnp.full(4, seed, jnp.uint32), w.shape)
        return w @ w.T @ (w * bits.astype(jnp.float32))

    def step(seeds, weights):
        return list(map(one, weights, seeds))

    closed = jax.make_jaxpr(step)([jnp.uint32(i) for i in range(3)], matrices(*SAME))
    found = BatchedFunctions.of(closed)
    groups = () if found is None else found.groups
    drawn = [eqn.primitive.name for group in groups for function in group for eqn in function.equations]
    assert "rng_bit_generator" not in drawn


@pytest.mark.parametrize("broken", ["of", "rewritten"])
def test_a_fault_leaves_the_step_as_written_and_is_logged(broken, monkeypatch, caplog):
    def fails(*_):
        raise KeyError("planted")

    monkeypatch.setattr(BatchedFunctions, broken, fails)
    arguments = matrices(*SAME), matrices(*SAME)
    step = autoshard.autoshard(muon_leaf_by_leaf, mesh=jax.sharding.AbstractMesh((2,), ("data",)), topology="v5e:1x2")
    with pytest.raises(KeyError):
        step.plan(*arguments)
    monkeypatch.setattr(boundary, "RAISES_ERRORS", False)
    assert not any("stack" in one for one in step.plan(*arguments).warnings)
    (record,) = [one for one in caplog.records if one.levelname == "WARNING"]
    assert "by a fault of autoshard" in record.message and record.exc_info


def test_stacks_are_as_large_as_mesh_axes_ask():
    found, _, _ = batched(muon_leaf_by_leaf, SAME)
    assert found.multiples({"data": 4, "model": 2}) == (4, 2)  # 8 would more than double the three matrices
    assert found.multiples({"data": 1}) == ()


@pytest.fixture(scope="module")
def unrolled_muon():
    """A step of six unrolled layers with Muon, its arguments, and options; planned for a TPU that is not there."""
    optimizer = optax.contrib.muon(1e-3)
    params = {str(i): jax.ShapeDtypeStruct((1024, 1024), jnp.float32) for i in range(6)}

    def step(state, x):
        params, moments = state

        def loss(params):
            y = x
            for w in params.values():
                y = jnp.tanh(y @ w)
            return jnp.mean(y**2)

        updates, moments = optimizer.update(jax.grad(loss)(params), moments, params)
        return optax.apply_updates(params, updates), moments

    arguments = (params, jax.eval_shape(optimizer.init, params)), jax.ShapeDtypeStruct((4096, 1024), jnp.float32)
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))
    return step, arguments, {"mesh": mesh, "topology": "v5e:2x4", "donate_argnums": 0}


def test_unrolled_muon_is_faster_than_fsdp_by_hand(unrolled_muon):
    """Layers whose number the devices do not divide. The bar is that of stacked layers.

    The limit has room for the 12 MiB of the fastest plan, but not for the temporaries that the chip's own memory holds.
    """
    step, arguments, options = unrolled_muon
    plan = autoshard.plan(step, *arguments, **options, memory="32MiB")
    specs = jax.tree.map(lambda x: P(("data", "model")) if x.ndim == 2 else P(), arguments)
    by_hand = autoshard.evaluate(step, *arguments, in_shardings=specs, **options)
    assert plan.gap < 1e-6 and "in a stack of 8" in plan.warnings[0]
    assert plan.predicted.step_seconds < 0.6 * by_hand.predicted.step_seconds


def test_tactics_hold_in_stacks(unrolled_muon, monkeypatch):
    """State lies as the tactics want it, with and without stacks; what the stacks do is left open."""
    step, arguments, options = unrolled_muon
    tactics = {"tactics": [DataParallel("data", "model"), ZeRO(3)]}
    stacked = autoshard.plan(step, *arguments, **options, **tactics)
    monkeypatch.setattr(BatchedFunctions, "of", lambda closed: None)
    written = autoshard.plan(step, *arguments, **options, **tactics)
    assert any("in a stack of 8" in one for one in stacked.warnings) and stacked.gap < 1e-6
    # Compiled for v5e, 1.30 and 1.67 ms by libtpu's estimate.
    assert stacked.predicted.step_seconds < 0.85 * written.predicted.step_seconds
    weights = [one.spec for one in stacked.arguments if one.name.startswith("state/0")]
    assert weights == [P(("data", "model"))] * 6
    assert weights == [one.spec for one in written.arguments if one.name.startswith("state/0")]


def test_stacks_are_planned_though_it_is_not_known_in_time_whether_the_step_as_written_fits(unrolled_muon, monkeypatch):
    """All variants share the time, and what is proven of the one that is late is proven of all."""
    step, arguments, options = unrolled_muon
    honest, limits, bound = planning.solve_within, [], 1e-4

    def solve_within(formulation, time_limit, *how):
        limits.append(time_limit)
        if is_late(formulation.program):
            raise UndecidedError("none was found in time", bound=bound)
        return honest(formulation, time_limit, *how)

    monkeypatch.setattr(planning, "solve_within", solve_within)
    monkeypatch.setattr(alternatives, "_data_parallel", lambda *_: None)  # as if it did not fit
    is_late = lambda program: not program.stacked  # noqa: E731
    plan = autoshard.plan(step, *arguments, **options, time_limit=20)
    assert "in a stack of 8" in plan.warnings[0] and plan.bound == bound < plan.cost
    assert len(limits) > 1 and set(limits) == {10.0}
    is_late = lambda program: True  # noqa: E731
    with pytest.raises(SolverError, match="none was found in time"):
        autoshard.plan(step, *arguments, **options)
    monkeypatch.undo()
    monkeypatch.setattr(planning, "solve_within", solve_within)
    assert autoshard.plan(step, *arguments, **options).bound == bound


def test_runs_and_is_given_again(tmp_path):
    """Compiled for CPU devices: losses of one device, the collectives that were predicted, and a plan from a file."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    weights, gradients = matrices(*[(64, 128)] * 3), matrices(*[(64, 128)] * 3)
    options = {"mesh": mesh, "topology": "v5e:2x4", "fixed": {"*": P(None, ("data", "model"))}}
    step = autoshard.autoshard(muon_leaf_by_leaf, **options)
    plan = step.plan(weights, gradients)
    assert plan.verify().collectives_agree and "stack of 4" in plan.warnings[0]
    plan.save(tmp_path / "plan.json")
    given = autoshard.autoshard(muon_leaf_by_leaf, mesh=mesh, plan=autoshard.Plan.load(tmp_path / "plan.json", mesh))
    made, expected = given(weights, gradients), muon_leaf_by_leaf(weights, gradients)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-5)
    assert given.plan(weights, gradients).fingerprint == plan.fingerprint
