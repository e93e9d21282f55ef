"""Shardings written by hand: what they are said to cost, and where propagation carries them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models import gpt
from oracles import as_all_reduces, mesh_of, tally, v5e

import autoshard
from autoshard import MeshError
from autoshard.compiled.collectives import read_collectives
from autoshard.propagation import operations

SHAPE = {"data": 4, "model": 2}
MESH = mesh_of(SHAPE)
WIDTH, HIDDEN, BATCH = 16, 64, 256
F32 = 4  # bytes
EACH = WIDTH * HIDDEN * F32  # bytes of a weight
WEIGHTS = {"down": np.ones((HIDDEN, WIDTH), np.float32), "up": np.ones((WIDTH, HIDDEN), np.float32)}
X = np.ones((BATCH, WIDTH), np.float32)


def step(weights, x, scale=1.0):
    def loss_of(weights):
        return jnp.mean((scale * jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def evaluated(in_shardings, **options):
    return autoshard.evaluate(
        step, WEIGHTS, X, mesh=MESH, topology=v5e(SHAPE), in_shardings=in_shardings, donate_argnums=0, **options
    )


BOTH = ("data", "model")
MEGATRON = {"down": P("model"), "up": P(None, "model")}
BY_HAND = {  # in_shardings, collectives
    "nothing": ((None, None), {}),
    "data parallel": ((P(), P(BOTH)), {("all_reduce", BOTH): 2 * EACH + F32}),
    "Megatron": ((MEGATRON, None), {("all_reduce", ("model",)): BATCH * WIDTH * F32}),
    "Megatron and data": (
        (MEGATRON, P("data")),
        {
            ("all_reduce", ("model",)): BATCH * WIDTH * F32 // 4,
            ("all_reduce", ("data",)): 2 * EACH // 2 + F32,
        },
    ),
    "FSDP": (
        ({"down": P(BOTH), "up": P(None, BOTH)}, P(BOTH)),
        {
            ("all_gather", BOTH): 2 * EACH,
            ("all_reduce", BOTH): 2 * EACH + F32,  # and slices of it: XLA for CPU has no reduce_scatter
        },
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_collectives_of_shardings_by_hand(name):
    in_shardings, expected = BY_HAND[name]
    plan = evaluated(in_shardings)
    assert without_the_loss(tally(plan.predicted.collectives)) == without_the_loss(expected)
    assert (plan.status, plan.bound) == ("feasible", 0.0)
    assert plan.verify().collectives_agree, str(plan.verify())


def without_the_loss(found: dict) -> dict:
    """The loss is one number; over which axes it is summed, if any, is left to the machine."""
    return {which: size - size % 64 for which, size in found.items() if size > F32}


def test_the_oracle_tells_shardings_apart():
    found = [without_the_loss(tally(evaluated(specs).predicted.collectives)) for specs, _ in BY_HAND.values()]
    assert all(one != other for i, one in enumerate(found) for other in found[:i])


def test_the_shardings_by_hand_are_the_plans():
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), MEGATRON, is_leaf=lambda x: isinstance(x, P))
    for given in (MEGATRON, shardings):
        plan = evaluated((given, P("data")), out_shardings=(None, None))
        assert plan.in_shardings == (shardings, NamedSharding(MESH, P("data")))
        assert plan.out_shardings[0] == shardings
    state, _ = plan.lowering.step(*jax.device_put((WEIGHTS, X), plan.in_shardings))
    np.testing.assert_allclose(state["down"], jax.jit(step)(WEIGHTS, X)[0]["down"], rtol=1e-5)


def test_out_shardings_are_kept():
    def split(x):
        return x * 2, x.sum(0)

    plan = autoshard.evaluate(split, X, mesh=MESH, in_shardings=(P("data"),), out_shardings=(P("data"), P("model")))
    assert [sharding.spec for sharding in plan.out_shardings] == [P("data"), P("model")]
    assert tally(plan.predicted.collectives) == {("all_reduce", ("data",)): WIDTH * F32}
    assert plan.verify().collectives_agree, "the sum is whole before it is sliced"


def test_keyword_arguments_are_kept_whole():
    plan = evaluated((MEGATRON, P("data")), kwargs={"scale": 2.0})
    assert plan.keyword_shardings == {"scale": NamedSharding(MESH, P())}


def test_a_limit_is_reported_not_enforced():
    plan = evaluated((None, None), memory=100)
    assert plan.memory == 100 < plan.predicted.peak_bytes
    assert "over the limit" in str(plan)


@pytest.mark.parametrize("in_shardings", [specs for specs, _ in BY_HAND.values()])
def test_no_sharding_by_hand_beats_the_plan(in_shardings):
    best = autoshard.plan(step, WEIGHTS, X, mesh=MESH, topology=v5e(SHAPE), donate_argnums=0)
    assert best.status == "optimal"
    assert evaluated(in_shardings).predicted.step_seconds >= best.cost * (1 - 1e-6)


BAD = [  # in_shardings, what is wrong
    (P("data"), "one sharding per positional argument is needed, in a tuple of 2"),
    ((P(),), "one sharding per positional argument is needed, in a tuple of 2"),
    (({"down": P()}, None), "the shardings are no prefix of what they are for"),
    (("data", None), "a sharding is a PartitionSpec, a NamedSharding or None; 'data' is none of them"),
    ((None, P("batch")), "names 'batch'; the mesh has the axes {'data': 4, 'model': 2}"),
    ((None, P(None, None, "data")), "names 3 dims, but the array has 2"),
    ((None, P("data", "data")), "uses a mesh axis twice"),
    ((None, P(("model", "data"))), "in another order than that of the mesh"),
]


@pytest.mark.parametrize("in_shardings, text", BAD)
def test_shardings_that_do_not_fit(in_shardings, text):
    with pytest.raises(MeshError) as caught:
        evaluated(in_shardings)
    assert text in str(caught.value)


# Against what XLA makes of the plain step: propagation decides what is gathered.


def fully_sharded(leaf):
    """Split on its largest dim over all devices, or whole."""
    dims = [dim for dim in range(leaf.ndim) if leaf.shape[dim] % MESH.size == 0]
    widest = max(dims, key=lambda dim: leaf.shape[dim], default=None)
    return P(*[BOTH if dim == widest else None for dim in range(leaf.ndim)])


def assert_bytes_as_compiled() -> None:
    """FSDP of a GPT moves within 30% of the bytes that XLA moves for the plain step: weights, not activations."""
    model = gpt.make(layers=1, d_model=32, heads=4, vocab=64, seq=64, batch=32)
    arguments = model.state, model.batches(0)
    specs = jax.tree.map(fully_sharded, model.state), P(BOTH)
    foreseen = autoshard.evaluate(model.step, *arguments, mesh=MESH, in_shardings=specs, donate_argnums=0)
    shardings = jax.tree.map(lambda spec: NamedSharding(MESH, spec), specs, is_leaf=lambda x: isinstance(x, P))
    step = jax.jit(model.step, in_shardings=shardings, out_shardings=(shardings[0], None), donate_argnums=0)
    compiled = tally(read_collectives(step.lower(*arguments).compile().as_text(), SHAPE))
    predicted = tally(as_all_reduces(foreseen.predicted.collectives, SHAPE))  # as the plain step has on CPU
    assert sum(predicted.values()) == pytest.approx(sum(compiled.values()), rel=0.3), (predicted, compiled)


def test_fully_sharded_states_are_gathered_and_activations_stay():
    assert_bytes_as_compiled()


def test_propagation_that_loses_the_batch_is_caught(monkeypatch):
    """As if a broadcast of a norm's mean, which only adds a dim of size 1, were one that copies."""
    real = operations._kind

    def copying(equation):
        return "broadcast" if equation.primitive == "broadcast_in_dim" else real(equation)

    monkeypatch.setattr(operations, "_kind", copying)
    with pytest.raises(AssertionError):
        assert_bytes_as_compiled()


@pytest.mark.parametrize("said", [P(None, "data"), P("model"), P(None, ("data", "model"))])
def test_a_constraint_that_an_argument_has_to_be_moved_for(said):
    def moved(x):
        return jax.lax.with_sharding_constraint(x * 2, NamedSharding(MESH, said))

    plan = autoshard.evaluate(moved, X, mesh=MESH, in_shardings=(P("data"),))
    assert plan.predicted.collectives and plan.verify().collectives_agree


def test_shardings_that_do_not_divide():
    with pytest.raises(MeshError, match=r"splits dim 0 of x .* over 4 devices, which do not divide 6"):
        autoshard.evaluate(lambda x: x, np.ones(6), mesh=MESH, in_shardings=(P("data"),))


# Propagation.


def layers(weights, x):
    hidden = jnp.tanh(x @ weights["up"])
    return hidden @ weights["down"], hidden.T, hidden.sum(), 3


OUTPUTS = [  # in_specs, outputs
    ((MEGATRON, P("data")), (P("data"), P("model", "data"), P(), P())),
    ((None, P("data")), (P("data"), P(None, "data"), P(), P())),
    (({"down": None, "up": P(None, "model")}, None), (P(), P("model"), P(), P())),
    (({"down": P(None, "data"), "up": None}, P("model")), (P("model", "data"), P(None, "model"), P(), P())),
    ((None, None), (P(), P(), P(), P())),
]


@pytest.mark.parametrize("in_specs, outputs", OUTPUTS)
def test_propagated_outputs(in_specs, outputs):
    found = autoshard.propagate(layers, WEIGHTS, X, mesh=MESH, in_specs=in_specs)
    assert found.outputs == outputs


def test_every_inner_value_is_there_with_the_equation_that_made_it():
    found = autoshard.propagate(layers, WEIGHTS, X, mesh=MESH, in_specs=(MEGATRON, P("data")))
    specs = {one.equation.primitive: one.spec for one in found.values if one.equation is not None}
    assert specs == {
        "dot_general": P("data"), "tanh": P("data", "model"), "transpose": P("model", "data"), "reduce_sum": P(),
    }  # fmt: skip
    arguments = [one for one in found.values if one.equation is None]
    assert [one.value.name for one in arguments] == ["weights/down", "weights/up", "x"]
    assert [one.spec for one in arguments] == [P("model"), P(None, "model"), P("data")]


def test_fixed_arguments_stay_and_open_ones_follow():
    found = autoshard.propagate(layers, WEIGHTS, X, mesh=MESH, in_specs=({"down": P(), "up": None}, P(None, "model")))
    assert [one.spec for one in found.values[:3]] == [P(), P("model"), P(None, "model")]
