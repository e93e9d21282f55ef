"""XLA does what the plan says: collectives by kind, axes and bytes, and the peak of memory, also under a limit."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh
from oracles import MACHINES, MESHES, SMALL, mesh_of, share_of_free_peak
from sweeps import some

from autoshard import Plan, Topology, autoshard, topology
from autoshard import plan as plan_of
from autoshard.compiled.collectives import read_collectives
from autoshard.model.partitioner.as_jitted import as_jitted
from autoshard.model.xla.backends import CPU
from autoshard.plans.chosen_options import ChosenOptions
from autoshard.program import trace
from autoshard.propagation import rules_for

MODELS = [name for name in SMALL if name != "mlp"]
# Every model once, nearly always where everything is split, on both meshes; the rest of the product is slow.
CHOSEN = {
    *((name, "4x2" if i % 2 else "8", "slow chips") for i, name in enumerate(MODELS) if name != "gpt scan"),
    ("gpt scan", "8", "v5e"),
}
CASES = [
    pytest.param(*case, marks=() if case in CHOSEN else pytest.mark.slow, id="-".join(case))
    for case in ((name, mesh, machine) for name in MODELS for mesh in MESHES if mesh != "1" for machine in MACHINES)
]
TIGHT = [
    pytest.param(name, machine, share, marks=() if chosen else pytest.mark.slow, id=f"{name}-{machine}-{share}")
    for name in MODELS
    for machine in MACHINES
    for share in (0.4, 0.75)
    for chosen in [(name, machine, share) == ("moe", "v5e", 0.4)]
]


def planned(name: str, mesh: str, machine: str, share: float | None = None) -> Plan:
    model, axes = SMALL[name](), MESHES[mesh]
    options = {"mesh": mesh_of(axes), "topology": MACHINES[machine](axes), "donate_argnums": 0, "time_limit": 20}
    if share is not None:
        options["memory"] = share_of_free_peak(model, share, **options)
    return plan_of(model.step, model.state, model.batches(0), **options)


def assert_confirmed(made: Plan) -> None:
    found = made.verify()
    assert found.collectives_agree and found.memory_agrees, f"\n{found}"
    assert found.actual_peak <= made.memory


@pytest.mark.parametrize("name, mesh, machine", CASES)
def test_predictions_are_confirmed(name, mesh, machine):
    assert_confirmed(planned(name, mesh, machine))


@pytest.mark.parametrize("name, machine, share", TIGHT)
def test_memory_limits_are_kept(name, machine, share):
    assert_confirmed(planned(name, "8", machine, share))


OPTIMIZER = optax.adam(1e-3)


def loss_of(params, x, y):
    for w in params:
        x = jnp.tanh(x @ w)
    return jnp.mean((x - y) ** 2)


def update(state, gradients):
    params, opt_state = state
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def accumulating(state, batches):
    """One step on the sum of the batches' gradients."""

    def add(total, batch):
        return jax.tree.map(jnp.add, total, jax.grad(loss_of)(state[0], *batch)), None

    gradients, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, state[0]), batches)
    return update(state, gradients)


def several(state, batches):
    """A step per batch."""

    def once(state, batch):
        return update(state, jax.grad(loss_of)(state[0], *batch)), None

    return jax.lax.scan(once, state, batches)[0]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("step", [accumulating, several])
def test_loops_over_batches_are_confirmed(step, machine):
    """Where parameters are most of the memory: loops sum gradients, and update the state, in place."""
    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 8
    batches = jax.ShapeDtypeStruct((4, 8, 128), jnp.float32)
    state = params, jax.eval_shape(OPTIMIZER.init, params)
    axes = MESHES["8"]
    options = {"mesh": mesh_of(axes), "topology": MACHINES[machine](axes), "donate_argnums": 0}
    assert_confirmed(plan_of(step, state, (batches, batches), **options))


@pytest.mark.parametrize("fault", ["collectives", "peak_bytes"])
def test_the_oracle_sees_a_wrong_prediction(fault):
    made = planned("mlp", "8", "slow chips")
    wrong = {"collectives": made.predicted.collectives[1:], "peak_bytes": made.predicted.peak_bytes // 2}[fault]
    with pytest.raises(AssertionError, match="differs"):
        assert_confirmed(replace(made, predicted=replace(made.predicted, **{fault: wrong})))


@pytest.mark.parametrize("name", some(["cnn", "moe", "gpt scan", "lstm", "gpt"], "moe"))
def test_what_follows_need_not_be_said(name):
    """The compiled program has the same collectives when every inner value is constrained."""
    made = planned(name, "4x2", "slow chips")
    told = replace(made, annotations=replace(made.annotations, implied=()))
    axes = dict(made.mesh.shape)
    (short, few), (full, all_) = (
        (count_constraints(lowered), read_collectives(lowered.compile().as_text(), axes))
        for lowered in (replace(made.lowering, plan=plan)() for plan in (made, told))
    )
    assert short < full
    assert by_kind(few) == by_kind(all_)


@pytest.mark.parametrize("tokens, is_said", [(8, False), (9, True)])
def test_what_may_be_split_unevenly_is_said(tokens, is_said):
    """XLA splits nine tokens in four if what they come from is split so, which no plan does."""

    def step(weight, token, patches):
        x = jnp.concatenate([jnp.broadcast_to(token, (8, tokens - 4, 16)), patches], axis=1)
        return jnp.sum(jnp.tanh(x @ weight))

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (16,), (8, 4, 16))]
    program, mesh = trace(step, tuple(shapes), {}), {"data": 2, "model": 4}
    layouts = {0: (("model",), ()), 1: ((),), 2: (("data",), (), ("model",))}
    formulation, solution = as_jitted(program, rules_for(program), mesh, Topology.of(mesh_of(mesh)), CPU, layouts, {})
    annotations = ChosenOptions(formulation, solution.choice).annotations()
    whole = {value for value, home in annotations.homes.items() if home == (("data",), (), ())}
    assert whole
    assert annotations.implied.isdisjoint(whole) == is_said


@pytest.mark.parametrize("told", [True, False])
def test_sums_that_xla_slices_stay_where_they_are_summed(told):
    """Told of the slices alone, XLA splits a lookup of booleans in a split dim as they are, and moves what it reads."""

    def step(logits, labels):
        logits = jax.lax.with_sharding_constraint(logits, jax.P("x", None, "y"))
        picked = jnp.take_along_axis(logits, labels[..., None], axis=-1)
        return jax.lax.with_sharding_constraint(picked, jax.P("x", "y", None))

    shapes = jax.ShapeDtypeStruct((1024, 2048, 512), jnp.bool_), jax.ShapeDtypeStruct((1024, 2048), jnp.int32)
    axes = {"x": 4, "y": 2}
    made = plan_of(step, *shapes, mesh=AbstractMesh((4, 2), ("x", "y")), topology=topology("h100:1x8", axes))
    assert {(c.kind, c.axes) for c in made.predicted.collectives} == {("reduce_scatter", ("y",))}
    assert list(made.annotations.sums.values()) == [(("x",), (), ())]
    if not told:
        made = replace(made, annotations=replace(made.annotations, sums={}))
    compiled = autoshard(step, mesh=mesh_of(axes), plan=made).lower(*shapes).compile()
    as_planned = {(c.kind, c.axes) for c in read_collectives(compiled.as_text(), axes)} == {("all_reduce", ("y",))}
    assert as_planned == told  # XLA for CPU has no reduce_scatter


def count_constraints(lowered: jax.stages.Lowered) -> int:
    return lowered.as_text().count("sdy.sharding_constraint")


def by_kind(collectives) -> Counter:
    """(kind, axes) -> bytes a step."""
    found = Counter()
    for one in collectives:
        found[one.kind, one.axes] += one.bytes * one.count
    return found
