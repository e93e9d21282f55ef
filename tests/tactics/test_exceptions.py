"""A step that a scheme does not fit gets other collectives in the fewest places, and its plan names them."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from models import rnn, vit

import autoshard
from autoshard import tactics
from autoshard.solver.problem import Edge, Problem
from autoshard.tactics.exceptions import exceptions

NODES, OPTIONS = 5, 3


def forbidding(random, share):
    """Costs and edges of which a share is forbidden."""
    costs = tuple(np.where(random.random(OPTIONS) < share, np.inf, 1.0) for _ in range(NODES))
    pairs = itertools.combinations(range(NODES), 2)
    edges = tuple(Edge(i, j, np.where(random.random((OPTIONS, OPTIONS)) < share, np.inf, 0.0)) for i, j in pairs)
    return costs, edges


def faults(problem, choice):
    """How many nodes and edges forbid a choice."""
    nodes = sum(np.isinf(costs[choice[node]]) for node, costs in enumerate(problem.costs))
    return nodes + sum(np.isinf(edge.costs[choice[edge.i], choice[edge.j]]) for edge in problem.edges)


@pytest.mark.parametrize("seed", range(4))
def test_as_few_places_as_any_choice_has(seed):
    random = np.random.default_rng(seed)
    costs, edges = forbidding(random, 0.0)
    strict_costs, more = forbidding(random, 0.6)
    placed = Problem(costs, edges, (), None)
    strict = Problem(strict_costs, (*edges, *more), (), None)
    found = exceptions(placed, strict)
    fewest = min(faults(strict, choice) for choice in itertools.product(range(OPTIONS), repeat=NODES))
    assert fewest > 0 and found.nodes
    freed = sum(
        np.isinf(old).any() and not np.isinf(new).any()
        for old, new in zip(strict.costs, found.problem.costs, strict=True)
    )
    dropped = len(strict.edges) - len(found.problem.edges)
    assert freed + dropped == fewest
    assert any(not faults(found.problem, choice) for choice in itertools.product(range(OPTIONS), repeat=NODES))


def recurrent(weights, x):
    def loss(weights):
        def cell(state, x):
            state = jnp.tanh(state @ weights["state"] + x)
            return state, state

        h = x @ weights["up"] @ weights["down"]
        return jnp.mean(jax.lax.scan(cell, jnp.zeros_like(h[0]), h)[1] ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def test_a_plan_names_where_a_scheme_does_not_hold():
    shapes = {"up": (64, 128), "down": (128, 64), "state": (64, 64)}
    weights = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    batch = jax.ShapeDtypeStruct((8, 16, 64), "float32")
    given = {"mesh": AbstractMesh((4,), ("a",)), "topology": "v5e:2x2", "tactics": [tactics.Megatron("a")]}
    plan = autoshard.plan(recurrent, weights, batch, donate_argnums=0, **given)
    (remark,) = (one for one in plan.warnings if "other collectives" in one)
    assert "at test_exceptions.py:" in remark


def of_shapes(**shapes):
    return {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}


def within(scheme, step, weights, batch):
    """A plan within one tactic on four devices."""
    shape = (2, 2) if len(scheme.axes) > 1 else (4,)
    mesh = AbstractMesh(shape, ("a", "b")[: len(shape)])
    return autoshard.plan(step, weights, batch, mesh=mesh, topology="v5e:2x2", tactics=[scheme], donate_argnums=0)


def remarks(plan, said):
    return [one for one in plan.warnings if said in one]


def test_what_embeds_the_batch_stays_whole_where_nothing_is_its_second_product():
    model = vit.make(layers=1)
    given = jax.eval_shape(lambda: (model.state, model.batches(0)))
    plan = within(tactics.Megatron("a"), model.step, *given)
    assert remarks(plan, "embeds the batch") and not remarks(plan, "other collectives")
    laid = {
        array.name.partition("/0/")[2]: {axis for axes in array.layout for axis in axes} for array in plan.arguments
    }
    assert not laid["patches/kernel"] and laid["blocks/0/up/kernel"] == {"a"}


def test_what_a_loop_carries_embeds_nothing():
    weights = of_shapes(up=(64, 128), down=(128, 64), state=(64, 64))
    plan = within(tactics.Megatron("a"), recurrent, weights, jax.ShapeDtypeStruct((8, 16, 64), "float32"))
    assert not remarks(plan, "embeds the batch")
    laid = {array.name: array.layout for array in plan.arguments}
    assert laid["weights/state"] != ((), ())


def normed(state, images):
    """A convolution of three channels, a scale and two products, with momentum."""
    weights, moments = state

    def loss(weights):
        x = jax.lax.conv_general_dilated(
            images, weights["stem"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = x * jax.lax.rsqrt(jnp.mean(x**2, -1, keepdims=True)) * weights["scale"]
        return jnp.mean((jax.nn.gelu(x @ weights["up"]) @ weights["down"]) ** 2)

    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, jax.grad(loss)(weights))
    return jax.tree.map(lambda w, m: w - 0.1 * m, weights, moments), moments


def test_vectors_and_first_layers_lie_as_features_do_in_two_dimensions():
    weights = of_shapes(stem=(3, 3, 3, 64), scale=(64,), up=(64, 256), down=(256, 64))
    batch = jax.ShapeDtypeStruct((8, 16, 16, 3), "float32")
    plan = within(tactics.TwoDimensional("a", "b"), normed, (weights, weights), batch)
    assert not remarks(plan, "other collectives")
    laid = {array.name: array.layout for array in plan.arguments}
    for moments in ("state/1/up", "state/1/down"):
        assert {axis for axes in laid[moments] for axis in axes} == {"a", "b"}


def test_where_features_are_joined_they_are_gathered():
    model = rnn.make()
    given = jax.eval_shape(lambda: (model.state, model.batches(0)))
    plan = within(tactics.TwoDimensional("a", "b"), model.step, *given)
    assert remarks(plan, "between products") and not remarks(plan, "other collectives")
