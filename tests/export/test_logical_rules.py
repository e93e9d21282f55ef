"""Plans as logical axis rules: flax and YAML make the plan's shardings of them."""

import carried_steps
import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
import yaml
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_shardings_code import collectives, defined

import autoshard
from autoshard.export.logical_axes import logical_axes

FIXED = {"params/up": P("data", "model"), "params/down": P("model"), "batch/*": P("data"), "shadow/up": P("data")}


@pytest.fixture(scope="module")
def plan():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    return autoshard.plan(carried_steps.train_step, *carried_steps.arguments(), mesh=mesh, fixed=FIXED)


def test_dims_that_the_program_ties_have_one_name(plan):
    axes = logical_axes(plan, plan.lowering.program)
    names = dict(zip((one.name for one in plan.arguments), axes.arguments, strict=True))
    up, down, x = names["state/params/up"], names["state/params/down"], names["batch/x"]
    assert up[1] == down[0]  # the hidden dim
    assert x[0].startswith("batch") and up[0] != up[1]
    assert axes.rules[up[1]] == ("model",) and axes.rules[up[0]] == ("data",) and axes.rules[x[0]] == ("data",)
    for array, ours in zip((*plan.arguments, *plan.results), (*axes.arguments, *axes.results), strict=True):
        assert tuple(axes.rules[name] if name else () for name in ours) == array.layout
        assert len({name for name in ours if name}) == len([name for name in ours if name])


def test_flax_makes_the_plans_shardings_of_the_rules(plan):
    found, mesh = defined(plan.to_code("flax")), plan.mesh
    shardings = {"in_shardings": found["in_shardings"](mesh), "out_shardings": found["out_shardings"](mesh)}
    for made, planned in (("in_shardings", plan.in_shardings), ("out_shardings", plan.out_shardings)):
        assert jax.tree.structure(shardings[made]) == jax.tree.structure(planned)
        for one, other in zip(jax.tree.leaves(shardings[made]), jax.tree.leaves(planned), strict=True):
            assert one.is_equivalent_to(other, 2 if len(one.spec) > 1 else max(len(one.spec), len(other.spec)))
    step = jax.jit(found["constrained"](carried_steps.train_step, mesh), **shardings)
    compiled = step.lower(*carried_steps.arguments()).compile()
    assert collectives(compiled.as_text()) == collectives(plan.lowering().compile().as_text())
    with nn.logical_axis_rules(found["rules"]()):
        names = logical_axes(plan, plan.lowering.program).arguments[0]
        assert nn.logical_to_mesh_axes(names) == nn.logical_to_mesh_axes(P(*names))


def shardings_by(rules, names, mesh):
    return nn.logical_to_mesh_sharding(P(*names), mesh, [(name, tuple(axes) or None) for name, axes in rules])


@pytest.mark.parametrize("bound", [True, False], ids=["bound", "of a file"])
def test_yaml_says_the_same(plan, bound):
    plan = plan if bound else autoshard.Plan.loads(plan.dumps(), plan.mesh)
    said = yaml.safe_load(plan.to_code("maxtext"))
    assert said["mesh_axes"] == ["data", "model"] and said["ici_parallelism"] == [4, 2]
    for side, arrays in (("arguments", plan.arguments), ("results", plan.results)):
        assert list(said["logical_axes"][side]) == [one.name for one in arrays]
        for one in arrays:
            made = shardings_by(said["logical_axis_rules"], said["logical_axes"][side][one.name], plan.mesh)
            assert made.is_equivalent_to(one.sharding(plan.mesh), len(one.shape))


def test_square_weights_get_two_names_where_they_are_split():
    def step(w, x):
        return jnp.sum(x @ w @ w)

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    plan = autoshard.plan(step, jnp.ones((16, 16)), jnp.ones((8, 16)), mesh=mesh, fixed={"w": P("data", "model")})
    axes = logical_axes(plan, plan.lowering.program)
    assert [axes.rules[name] for name in axes.arguments[0]] == [("data",), ("model",)]
    whole = autoshard.plan(step, jnp.ones((16, 16)), jnp.ones((8, 16)), mesh=mesh, fixed={"w": P()})
    assert logical_axes(whole, whole.lowering.program).arguments[0][1] is None
