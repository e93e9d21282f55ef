"""`Plan.to_code` of steps with static arguments, and of steps whose planned jaxpr is not the one that JAX makes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from oracles import slow_chips
from written_code import defined

import autoshard

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
WEIGHT = np.full((16, 16), 0.1, np.float32)


def mesh_of():
    return jax.make_mesh((4, 2), ("data", "model"))


def model_of():
    return nnx.Linear(16, 16, rngs=nnx.Rngs(0))


def powered(weight, turns, x, how="sum"):
    """A step with a number and a text that Python looks at."""
    for _ in range(turns):
        x = jnp.tanh(x @ weight)
    return getattr(jnp, how)(x)


def trained(model, turns, x, how="sum"):
    """The same of a module, which it changes."""

    def loss_of(model):
        return powered(model.kernel[...], turns, x, how)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), gradients))
    return loss


@pytest.mark.parametrize(
    "step, jit, make, path",
    [(powered, jax.jit, lambda: WEIGHT, "weight"), (trained, nnx.jit, model_of, "model/kernel")],
    ids=["arrays", "modules"],
)
def test_static_arguments_reach_the_step_as_they_are(step, jit, make, path):
    mesh, static = mesh_of(), {"static_argnums": 1, "static_argnames": "how"}
    first, again, plain = make(), make(), make()
    planned = autoshard.autoshard(step, mesh=mesh, fixed={path: P(None, "model")}, **static)
    written = defined(planned.plan(first, 2, X, how="mean").to_code())["constrained"](step, mesh, **static)
    got, want = jit(written, **static)(again, 2, X, how="mean"), step(plain, 2, X, how="mean")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for one, other in zip(jax.tree.leaves(again), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


OTHERS = [  # a static argument that is none of those with which operations were written out
    ((3,), {"how": "mean"}, "turns is 3, it was 2 when the step was planned"),
    ((2,), {"how": "sum"}, "how is 'sum', it was 'mean'"),
    ((2,), {}, "how is 'sum', it was 'mean'"),
    ((), {"turns": True, "how": "mean"}, "turns is True, it was 2"),
]


@pytest.mark.parametrize(
    "step, jit, make", [(powered, jax.jit, lambda: WEIGHT), (trained, nnx.jit, model_of)], ids=["arrays", "modules"]
)
def test_operations_that_are_written_out_have_their_static_arguments(step, jit, make):
    """Whichever way these are given, defaults included."""
    mesh, static = mesh_of(), {"static_argnums": 1, "static_argnames": ("turns", "how")}
    plan = autoshard.autoshard(step, mesh=mesh, microbatches=2, **static).plan(make(), 2, X, how="mean")
    code = plan.to_code()
    assert "written out here" in code
    written = jit(defined(code)["constrained"](step, mesh, **static), **static)
    for args, kwargs in (((2, X), {"how": "mean"}), ((), {"turns": 2, "x": X, "how": "mean"})):
        np.testing.assert_allclose(written(make(), *args, **kwargs), step(make(), 2, X, how="mean"), rtol=1e-5)
    for args, kwargs, text in OTHERS:
        with pytest.raises(ValueError, match=text):
            written(make(), *args, x=X, **kwargs)


def test_of_static_arguments_some_are_given_by_position_and_others_by_name():
    mesh, static = mesh_of(), {"static_argnums": 1, "static_argnames": "how"}
    code = autoshard.autoshard(powered, mesh=mesh, microbatches=2, **static).plan(WEIGHT, 2, X, how="mean").to_code()
    written = jax.jit(defined(code)["constrained"](powered, mesh, **static), **static)
    np.testing.assert_allclose(written(WEIGHT, 2, X, how="mean"), powered(WEIGHT, 2, X, how="mean"), rtol=1e-5)
    with pytest.raises(ValueError, match="turns is 3, it was 2"):
        written(WEIGHT, 3, X, how="mean")


def scaled(x, by):
    return jnp.mean(x * by)


SELECTIONS = [  # keywords of jax.jit, and a call
    ({"static_argnames": "by"}, lambda step: step(X, 3)),
    ({"static_argnums": 1}, lambda step: step(X, by=3)),
    ({"static_argnums": -1}, lambda step: step(X, 3)),
]


@pytest.mark.parametrize("static, call", SELECTIONS, ids=["by name", "by position", "from the end"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_static_arguments_are_those_of_jax(static, call, microbatches):
    """A position follows from a name, and a name from a position."""
    how = {"mesh": mesh_of(), "fixed": {"x": P("data")}, "microbatches": microbatches}
    code = call(autoshard.autoshard(scaled, **how, **static).plan).to_code()
    written = jax.jit(defined(code)["constrained"](scaled, mesh_of(), **static), **static)
    np.testing.assert_allclose(call(written), call(scaled), rtol=1e-5)


def told(model, x):
    return {"kind": "text", "sum": model(x).sum()}


def called(model, x, how):
    return getattr(jnp, how)(model(x))


def applied(w, x):
    return (jnp.tanh(x @ w) @ w.T).at[0].apply(jnp.sin)


UNEVEN = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((257, 257), (63, 257))]
DEPARTURES = [  # step, arguments, options, what the code says
    (applied, UNEVEN, {"pad": "auto"}, "(pad='auto'); scatter at"),
    (told, (model_of(), X), {}, "or the step returns, what is no array"),
    (called, (model_of(), X, "sum"), {}, "takes leaves that are no arrays"),
]


@pytest.mark.parametrize("step, arguments, options, reason", DEPARTURES, ids=[reason for *_, reason in DEPARTURES])
def test_what_jax_would_not_trace_alike_has_no_inner_layouts(step, arguments, options, reason):
    """The table would be of other operations."""
    machine = slow_chips(mesh_of().axis_names)
    code = autoshard.autoshard(step, mesh=mesh_of(), topology=machine, **options).plan(*arguments).to_code()
    assert "left out: " in code and reason in code and "def constrained" not in code
