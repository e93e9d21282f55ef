"""`Plan.to_code` of steps of explicit mode: it takes and returns their types, and communicates as planned."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, reshard
from jax.sharding import PartitionSpec as P
from oracles import slow_chips
from written_code import defined

import autoshard
from autoshard.compiled.collectives import read_collectives
from autoshard.export.containers import UnwritableError
from autoshard.export.operations_code import operations_code


def mesh_of(*types):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=types or (AxisType.Explicit,) * 2)


def numbers(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) * 0.3


def train(state, x, y):
    """Layers in a scan, recomputed; an argument without a type; constants with and without one."""

    def loss_of(weights):
        @jax.checkpoint
        def layer(h, weight):
            h = jnp.dot(h, weight, out_sharding=P("data", "model"))
            return reshard(jnp.where(h > 0, jnp.tanh(h), h), P("data", None)), None

        h, _ = jax.lax.scan(layer, x, weights)
        return jnp.mean((h - y + jnp.zeros_like(h)) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(state["weights"])
    moments = 0.9 * state["moments"] + gradients
    return {"weights": state["weights"] - 0.1 * moments, "moments": moments}, loss


def looked_up(table, tokens):
    def loss_of(table):
        embedded = table.at[tokens].get(out_sharding=P("data", None, None))
        return (embedded**2).mean()

    return table - reshard(jax.grad(loss_of)(table), jax.typeof(table).sharding)


def by_hand(x, w):
    """Two `shard_map`s, one of them along one axis; what they sum is known to be whole, or is not."""

    def inside(x):
        return jax.lax.psum(x * 2, "data"), jax.lax.all_gather(x, "data", tiled=True).sum(0)

    def partly(x, w):
        return jax.lax.psum_scatter(jnp.tanh(x) @ w, "data", tiled=True)

    summed, gathered = jax.shard_map(inside, in_specs=P("data"), out_specs=(P(), P("data")))(x)
    halves = jax.shard_map(
        partly, in_specs=(P("data"), P()), out_specs=P("data"), axis_names={"data"}, check_vma=False
    )(x, w)
    return summed, gathered, reshard(halves, P(None, "model"))


def on(x, *spec):
    return jax.device_put(x, P(*spec))


STEPS = {
    "training": (
        train,
        lambda: (
            dict.fromkeys(("weights", "moments"), on(numbers(3, 16, 16), None, None, "model")),
            on(numbers(8, 16), "data"),
            numbers(8, 16),
        ),
    ),
    "lookup": (looked_up, lambda: (on(numbers(32, 16), None, "model"), on(np.arange(32).reshape(8, 4), "data"))),
    "by hand": (by_hand, lambda: (on(numbers(16, 16), "data"), on(numbers(16, 8)))),
}


def collectives(text):
    found = read_collectives(text, {"data": 4, "model": 2})
    return collections.Counter((one.kind, one.bytes, one.axes) for one in found)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("style", ["specs", "explicit"])
def test_the_code_has_the_numbers_types_and_collectives_of_the_plan(name, style):
    (step, arguments), mesh = STEPS[name], mesh_of()
    with jax.set_mesh(mesh):
        given = arguments()
        decorated = autoshard.autoshard(step, mesh=mesh, topology=slow_chips(mesh.axis_names))
        expected, plan = decorated(*given), decorated.plan(*given)
        code = plan.to_code(style)
        assert "written out here" in code and "autoshard" not in code.partition("import jax")[2]
        found = defined(code)
        shardings = {"in_shardings": found["in_shardings"](mesh), "out_shardings": found["out_shardings"](mesh)}
        compiled = jax.jit(found["constrained"](step, mesh), **shardings).lower(*given).compile()
        made = compiled(*jax.device_put(given, shardings["in_shardings"]))
    planned = collectives(plan.lowering().compile().as_text())
    assert style == "explicit" or (collectives(compiled.as_text()) == planned and planned)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
        assert AxisType.Explicit in jax.typeof(one).sharding.mesh.axis_types
        assert jax.typeof(one) == jax.typeof(other)


@pytest.mark.parametrize("types", [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)])
def test_types_may_be_on_some_axes(types):
    mesh = mesh_of(*types)
    axis = mesh.axis_names[types.index(AxisType.Explicit)]

    def step(w, x):
        return jnp.tanh(jnp.dot(x, w, out_sharding=P(axis))), w * 2

    with jax.set_mesh(mesh):
        given = on(numbers(16, 16)), on(numbers(8, 16), axis)
        decorated = autoshard.autoshard(step, mesh=mesh, topology=slow_chips(mesh.axis_names))
        expected, found = decorated(*given), defined(decorated.plan(*given).to_code())
        shardings = {"in_shardings": found["in_shardings"](mesh), "out_shardings": found["out_shardings"](mesh)}
        placed = jax.device_put(given, shardings["in_shardings"])
        made = jax.jit(found["constrained"](step, mesh), **shardings)(*placed)
    for one, other in zip(made, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)
        assert jax.typeof(one) == jax.typeof(other)


def test_types_that_were_ignored_are_those_that_the_step_is_traced_with():
    """The step reads its argument's type, and the code's argument lies otherwise."""

    def step(x):
        assert jax.typeof(x).sharding.spec == P("data", None)
        return x.sum(0)

    mesh = mesh_of()
    with jax.set_mesh(mesh):
        x = on(numbers(8, 16), "data")
        code = autoshard.plan(step, x, mesh=mesh, ignore_constraints=True, fixed={"x": P(None, "model")}).to_code()
        found = defined(code)
        made = jax.jit(found["constrained"](step, mesh), in_shardings=found["in_shardings"](mesh))(numbers(8, 16))
    np.testing.assert_allclose(made, numbers(8, 16).sum(0), rtol=1e-5)


def test_modules_keep_their_types():
    mesh = mesh_of()

    def step(model, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(jnp.tanh(x @ model.kernel[...]) ** 2))(model)
        model.kernel.set_value(model.kernel[...] - 0.1 * reshard(gradients.kernel[...], P(None, "model")))
        return loss

    def arguments():
        model = nnx.Linear(16, 32, rngs=nnx.Rngs(0), use_bias=False)
        model.kernel.set_value(on(numbers(16, 32), None, "model"))
        return model, on(numbers(8, 16), "data")

    with jax.set_mesh(mesh):
        theirs, ours = arguments(), arguments()
        code = autoshard.plan(step, *arguments(), mesh=mesh).to_code()
        expected, found = nnx.jit(step)(*theirs), nnx.jit(defined(code)["constrained"](step, mesh))(*ours)
    assert "written out here" in code
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(ours[0].kernel[...], theirs[0].kernel[...], rtol=1e-5)
    assert jax.typeof(ours[0].kernel[...]) == jax.typeof(theirs[0].kernel[...])


def test_what_runs_by_hand_on_another_mesh_or_with_constraints_inside_is_named():
    other = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    mesh = mesh_of(AxisType.Auto, AxisType.Auto)
    constrained = jax.shard_map(
        lambda x: jax.lax.with_sharding_constraint(x, P("model")),
        mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"},
    )  # fmt: skip
    elsewhere = jax.shard_map(jnp.sin, mesh=other, in_specs=P("x"), out_specs=P("x"))
    for step, why in ((elsewhere, "is on the mesh {'x': 8}"), (constrained, "has constraints inside")):
        with pytest.raises(UnwritableError, match=f"shard_map .*cannot be written as code: it {why}"):
            operations_code(jax.make_jaxpr(jax.jit(step))(numbers(8)), mesh.shape)
