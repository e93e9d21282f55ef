"""The figures of data parallelism, FSDP and tensor parallelism against what those are known to communicate."""

import functools
import itertools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from oracles import SMALL, mesh_of, slow_chips, tally, v5e
from sweeps import some

import autoshard
from autoshard import planning
from autoshard.errors import SolverError
from autoshard.layout import layouts_of, spec_of
from autoshard.plans import alternatives as module
from autoshard.plans.alternatives import PLANNED_ROW, alternatives_of, solutions_of
from autoshard.propagation import rules_for
from autoshard.solver.problem import ForbiddenError

WIDTH, HIDDEN, BATCH = 512, 2048, 65536
F32 = 4  # bytes
ALL = ("x", "y")
SHAPE = {"x": 4, "y": 2}
DEVICES = 8


def step(weights, x):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


WEIGHTS = {
    "down": jax.ShapeDtypeStruct((HIDDEN, WIDTH), np.float32),
    "up": jax.ShapeDtypeStruct((WIDTH, HIDDEN), np.float32),
}
X = jax.ShapeDtypeStruct((BATCH, WIDTH), np.float32)
EACH = WIDTH * HIDDEN * F32  # bytes of a weight


@functools.cache
def alternatives():
    plan = autoshard.plan(step, WEIGHTS, X, mesh=mesh_of(SHAPE), topology=v5e(SHAPE), donate_argnums=0)
    return plan, plan.alternatives


def ours(name):
    """An alternative with inner layouts planned: the second row where `jax.jit` does worse."""
    _, found = alternatives()
    return found.get(f"{name}, {PLANNED_ROW}") or found[name]


def test_data_parallel_only_reduces_gradients_and_the_loss():
    assert tally(ours("data parallel").collectives) == {("all_reduce", ALL): 2 * EACH + F32}


def test_fsdp_gathers_weights_and_scatters_gradients():
    found = tally(ours("FSDP").collectives)
    assert found.pop(("all_gather", ALL)) in (2 * EACH, 3 * EACH)  # the backward pass reads `down` too
    assert found == {("reduce_scatter", ALL): 2 * EACH // DEVICES, ("all_reduce", ALL): F32}


def test_tensor_parallel_is_megatron():
    """Column then row: one all_reduce of activations; the backward pass needs none, since x is data."""
    found = tally(ours("tensor parallel").collectives)
    assert found == {("all_reduce", ALL): BATCH * WIDTH * F32 + found["all_reduce", ALL] % 64}  # and maybe the loss


def test_memory_orders_as_everybody_knows():
    assert ours("FSDP").peak_bytes < ours("data parallel").peak_bytes
    assert ours("data parallel").peak_bytes >= 2 * EACH


@pytest.mark.parametrize(
    "name, topology",
    [
        *itertools.product(["mlp", "tied"], [slow_chips, v5e]),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in itertools.product(["moe", "lstm"], [slow_chips, v5e])),
    ],
)
def test_no_alternative_beats_an_optimal_plan(name, topology):
    model = SMALL[name]()
    plan = autoshard.plan(
        model.step, model.state, model.batches(0), mesh=mesh_of(SHAPE), topology=topology(SHAPE), donate_argnums=0
    )
    assert plan.status == "optimal"
    np.testing.assert_allclose(plan.predicted.step_seconds, plan.cost)
    assert plan.predicted.step_seconds == plan.predicted.compute_seconds + plan.predicted.communication_seconds
    for way, predicted in plan.alternatives.items():
        assert predicted is None or predicted.step_seconds >= plan.cost * (1 - 1e-6), way


def training(cast=np.float32, micro=False, transposed=False):
    """Momentum SGD of an MLP: weights cast first, batches one after the other, or weights stored transposed."""

    def step(state, x):
        weights, moments = state

        def loss(weights, x):
            for w in weights:
                x = jnp.tanh(x @ (w.T if transposed else w).astype(cast))
            return jnp.mean(x.astype(np.float32) ** 2)

        def add(total, x):
            return jax.tree.map(jnp.add, total, jax.grad(loss)(weights, x)), None

        if micro:
            batches = x.reshape(4, -1, x.shape[-1])
            gradients, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, weights), batches)
        else:
            gradients = jax.grad(loss)(weights, x)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments

    weights = [jax.ShapeDtypeStruct((2048, 2048), np.float32)] * 2
    return step, (weights, weights), jax.ShapeDtypeStruct((4096, 2048), cast)


def turned(step, state, batches):
    """Several steps in one call: a loop carries the state."""

    def steps(state, batches):
        return jax.lax.scan(lambda state, batch: (step(state, batch)[:2], None), state, batches)[0]

    return steps, state, jax.ShapeDtypeStruct((4, *batches.shape), batches.dtype)


STEPS = {
    "float32": lambda: training(),
    "weights cast": lambda: training(jnp.bfloat16),
    "batches one after the other": lambda: training(micro=True),
    "cast, batches one after the other": lambda: training(jnp.bfloat16, micro=True),
    "weights transposed": lambda: training(transposed=True),
    "several steps in a loop": lambda: turned(*training()),
}
MESHES = [{"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 8, "y": 1}, {"x": 1, "y": 8}]


def state_bytes(step, state, batch, shape, topology):
    """Alternative -> bytes of the state per device, of all three or it fails."""
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    sharded = autoshard.autoshard(step, mesh=mesh, topology=topology, donate_argnums=0)
    program = sharded.trace(state, batch)
    formulation = planning.formulated(program, rules_for(program), sharded._options)
    solutions = solutions_of(formulation)
    assert set(solutions) == {"data parallel", "FSDP", "tensor parallel"}, alternatives_of(formulation)
    return {
        name: sum(
            formulation.prices.arrays.shard_bytes(
                program.arguments[i], formulation.arguments[i][solution.choice[i]].home
            )
            for i in program.carried
        )
        for name, solution in solutions.items()
    }


def assert_rows(*args):
    found = state_bytes(*args)
    assert found["FSDP"] < 0.25 * found["data parallel"]  # 1/8, and what is too small to split


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_ordinary_steps_have_all_rows(name, shape):
    found = state_bytes(*STEPS[name](), shape, "v5e:4x2")
    assert found["FSDP"] == found["data parallel"] / DEVICES


@pytest.mark.parametrize("name", some(SMALL, "cnn", "gpt remat", "mlp", "moe", "tied"))
def test_models_have_all_rows(name):
    model = SMALL[name]()
    shape = MESHES[(list(SMALL).index(name) + 3) % len(MESHES)]
    assert_rows(model.step, model.state, model.batches(0), shape, v5e(shape))


@pytest.mark.slow
@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("name", SMALL)
def test_models_have_all_rows_on_any_mesh(name, shape):
    model = SMALL[name]()
    assert_rows(model.step, model.state, model.batches(0), shape, v5e(shape))


def odd(batch):
    return lambda: (step, dict(WEIGHTS), X.update(shape=(batch, WIDTH)))


BRANCHED = {  # steps with branches of which a platform takes one
    "solve": lambda a, x: jnp.linalg.solve(a, x),
    "slogdet": lambda a, x: jnp.linalg.slogdet(a)[1] + x.sum(),
    "own": lambda a, x: jax.lax.platform_dependent(a, x, cpu=lambda a, x: a @ x, tpu=lambda a, x: jnp.tanh(a @ x).T.T),
}


@pytest.mark.parametrize("name", BRANCHED)
def test_steps_with_branches_for_platforms_have_rows(name):
    """What another platform computes is idle here, and rules are those of the step as it was traced."""
    shapes = jax.ShapeDtypeStruct((64, 64), np.float32), jax.ShapeDtypeStruct((64, 32), np.float32)
    plan = autoshard.plan(BRANCHED[name], *shapes, mesh=mesh_of(SHAPE))
    assert {"data parallel", "FSDP", "tensor parallel"} <= plan.alternatives.keys()


ABSENT = {  # a step and a mesh -> why there is no row
    "a batch that nothing divides": (
        odd(6), {"x": 4}, dict.fromkeys(("data parallel", "FSDP"), "a batch of 6 splits over no axis")
    ),
    "one device": (
        odd(8), {"x": 1}, dict.fromkeys(("data parallel", "FSDP", "tensor parallel"), "there is one device")
    ),
    "odd weights": (
        lambda: (lambda s, x: ({"w": s["w"] - x.T @ (x @ s["w"])}, x.sum()), {"w": X.update(shape=(3, 5))},
                 X.update(shape=(8, 3))),
        {"x": 4}, {"FSDP": "4 divides no dim of a weight", "tensor parallel": "no axis divides a weight"},
    ),
    "no batch": (
        lambda: (lambda s: {"w": s["w"] * 2}, {"w": X.update(shape=(3, 5))}), SHAPE,
        dict.fromkeys(("data parallel", "FSDP"), "all arguments are state")
        | {"tensor parallel": "no axis divides a weight"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ABSENT)
def test_rows_that_are_absent_say_why(case, tmp_path):
    made, shape, reasons = ABSENT[case]
    fn, *args = made()
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    plan = autoshard.plan(fn, *args, mesh=mesh, topology=v5e(shape), donate_argnums=0)
    assert {name for name, predicted in plan.alternatives.items() if predicted is None} == set(reasons)
    assert plan.absent == reasons
    for name, reason in reasons.items():
        assert re.search(rf"^{name} +{reason}", str(plan), re.MULTILINE)
    loaded = autoshard.Plan.loads(plan.dumps(), mesh)
    assert (loaded.absent, str(loaded)) == (reasons, str(plan))
    before = json.loads(plan.dumps())
    del before["absent"]  # as older files are
    assert set(autoshard.Plan.loads(json.dumps(before), mesh).absent.values()) == {"no such sharding"}


def test_a_row_that_is_not_found_in_time_says_so(monkeypatch):
    monkeypatch.setattr(module, "_SECONDS_PER_ROW", 0.0)

    def too_long(problem, time_limit):
        raise SolverError("no choice was found in 0 s")

    monkeypatch.setattr(module, "solve", too_long)
    plan = autoshard.plan(step, WEIGHTS, X, mesh=mesh_of(SHAPE), topology=v5e(SHAPE), donate_argnums=0)
    assert set(plan.absent.values()) == {"not found in 0 s"} and str(plan).count("not found in 0 s") == 3


def test_a_row_that_is_forbidden_says_so(monkeypatch):
    def forbidden(problem, time_limit):
        raise ForbiddenError("every choice is forbidden")

    monkeypatch.setattr(module, "solve", forbidden)
    plan = autoshard.plan(step, WEIGHTS, X, mesh=mesh_of(SHAPE), topology=v5e(SHAPE), donate_argnums=0)
    assert set(plan.absent.values()) == {"its operations do not fit together"}


def test_what_is_fixed_is_named():
    plan = autoshard.plan(
        step, WEIGHTS, X, mesh=mesh_of(SHAPE), topology=v5e(SHAPE), donate_argnums=0, fixed={"weights/up": P("x", "y")}
    )
    assert set(plan.absent.values()) == {"weights/up does not lie so: it is fixed, or not divided"}


# Whatever is planned or evaluated can be printed.


@settings(max_examples=10, deadline=None, derandomize=True)
@given(st.data())
def test_every_sharding_can_be_printed(data):
    shape = data.draw(st.sampled_from([*MESHES, {"x": 3, "y": 2}]))
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape))
    sizes = data.draw(st.sampled_from([(64, 128, 256), (24, 48, 6), (12, 5, 24)]))
    batch, width, hidden = sizes
    weights = {"down": X.update(shape=(hidden, width)), "up": X.update(shape=(width, hidden))}
    layouts = {name: data.draw(st.sampled_from(layouts_of(weight.shape, shape))) for name, weight in weights.items()}
    specs = (
        {name: spec_of(layout) for name, layout in layouts.items()},
        spec_of(data.draw(st.sampled_from(layouts_of((batch, width), shape)))),
    )
    made = autoshard.evaluate(
        step, weights, X.update(shape=(batch, width)), mesh=mesh, in_shardings=specs, topology=v5e(shape),
        donate_argnums=data.draw(st.sampled_from([(), (0,)])),
    )  # fmt: skip
    assert "Predicted" in str(made) and set(made.absent) == {name for name, x in made.alternatives.items() if x is None}
