"""Programs of explicit mode: the numbers of `jax.jit`, and its shardings wherever a type orders one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import assert_equal
from flax import nnx
from jax import lax
from jax.sharding import AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P

from autoshard import Plan, autoshard, evaluate, plan
from autoshard.errors import ArgumentError, AutoshardError, ConflictError, MeshError


def mesh_of(shape, *types):
    names = ("data", "model", "other")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=types or (AxisType.Explicit,) * len(shape))


MESHES = {shape: mesh_of(shape) for shape in [(8,), (4, 2), (2, 2, 2)]}
MESH = MESHES[4, 2]
AUTO = mesh_of((4, 2), AxisType.Auto, AxisType.Auto)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def model():
    """The second axis, or the first where there is no second."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return names[min(1, len(names) - 1)]


def spec(*entries):
    """A PartitionSpec in which an axis that the mesh does not have splits nothing, nor one that is taken."""
    names, taken, kept = jax.sharding.get_abstract_mesh().axis_names, set(), []
    for entry in entries:
        kept.append(entry if entry in names and entry not in taken else None)
        taken.add(entry)
    return P(*kept)


def on(x, *entries):
    return jax.device_put(x, spec(*entries))


# Each returns a function and its arguments; it is called with the mesh set.


def product():
    def step(w, x):
        return jnp.einsum("bd,df->bf", x, w, out_sharding=spec("data", "model"))

    return step, on(numbers(16, 32), None, "model"), on(numbers(8, 16), "data")


def whole_product():
    """What is summed over split dims has to be ordered."""

    def step(w, x):
        h = jnp.dot(x, w, out_sharding=spec("data", None))
        return reshard(h, P()), h.sum(0)

    return step, on(numbers(16, 32), "model"), on(numbers(8, 16), None, "model")


def training():
    def step(w, x):
        def loss(w):
            h = jnp.einsum("bd,df->bf", x, w, out_sharding=spec("data", "model"))
            return (reshard(jnp.tanh(h), spec("data", None)) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * reshard(gradient, jax.typeof(w).sharding), value

    return step, on(numbers(16, 32), None, "model"), on(numbers(8, 16), "data")


def two_layers():
    def step(weights, x):
        def loss(weights):
            h = jax.nn.relu(x @ weights[0])
            return ((jnp.dot(h, weights[1], out_sharding=spec("data", None)) + weights[2]) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    weights = on(numbers(16, 32), None, "model"), on(numbers(32, 16), "model", None), on(numbers(16))
    if len(jax.sharding.get_abstract_mesh().axis_names) == 1:
        weights = tuple(map(on, weights))
    return step, weights, on(numbers(8, 16), "data")


def lookup():
    def step(table, tokens):
        embedded = table.at[tokens].get(out_sharding=spec("data", None, None))
        return embedded.sum(-1), jax.grad(lambda t: (t.at[tokens].get(out_sharding=spec("data")) ** 2).sum())(table)

    return step, on(numbers(32, 16), None, "model"), on(np.arange(32, dtype=np.int32).reshape(8, 4) % 32, "data")


def constants():
    def step(x):
        zeros = jnp.zeros((8, 16), out_sharding=spec("data"))
        ones = jnp.ones_like(x) + jnp.full((16,), 2.0, out_sharding=P())
        return x + zeros + ones, jnp.arange(16, out_sharding=spec("data")), jnp.zeros((8, 8), out_sharding=P())

    return step, on(numbers(8, 16), "data")


def reshapes():
    def step(x):
        parts = x.reshape(4, 4, 16, out_sharding=spec(None, "data"))
        return parts, jnp.reshape(parts, (16, 16), out_sharding=spec("data")), x.reshape(16, 4, 4)

    if jax.sharding.get_abstract_mesh().shape["data"] == 8:
        return (lambda x: jnp.reshape(x, (2, 8, 16), out_sharding=P(None, "data"))), on(numbers(16, 16), "data")
    return step, on(numbers(16, 16), "data")


def looped():
    def step(w, x):
        def layer(h, w):
            h = jnp.dot(h, w, out_sharding=spec("data", None))
            return reshard(reshard(jnp.tanh(h), spec("data", "model")), spec("data", None)), h.mean()

        return lax.scan(layer, x, w)

    return step, on(numbers(3, 16, 16), None, None, "model"), on(numbers(8, 16), "data")


def looped_gradient():
    step, *args = looped()
    return jax.grad(lambda w, x: step(w, x)[0].sum(), argnums=(0, 1)), *args


def branches():
    def step(x, flag):
        y = lax.cond(flag[0] > 0, lambda x: reshard(x * 2, P("data")), lambda x: reshard(x.T, P("data")).T.T, x)
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (reshard(c[0] + 1, P("data")), c[1] + 1), (y, 0))[0]

    return step, on(numbers(16, 16), "data"), np.ones(1, np.int32)


def rematerialised():
    def step(w, x):
        @jax.checkpoint
        def block(w, x):
            return jnp.tanh(jnp.dot(x, w, out_sharding=spec("data", "model")))

        return jax.value_and_grad(lambda w: block(w, x).sum())(w)

    return step, on(numbers(16, 32), None, "model"), on(numbers(8, 16), "data")


@jax.custom_vjp
def _clipped(x):
    return reshard(x, P("data"))


_clipped.defvjp(lambda x: (_clipped(x), x), lambda x, g: (reshard(jnp.clip(g, -0.5, 0.5) + 0 * x, P("data")),))


@jax.custom_jvp
def _squared(x):
    return x * x


_squared.defjvp(lambda primals, tangents: (_squared(primals[0]), 2 * primals[0] * tangents[0]))


def custom_derivatives():
    def step(x):
        return _clipped(_squared(x)), jax.grad(lambda x: _clipped(_squared(x)).sum())(x)

    return step, on(numbers(8, 16), "data")


def random_numbers():
    def step(x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape, out_sharding=P("data"))
        noise = jax.random.normal(jax.random.fold_in(key, 1), (16,), out_sharding=spec("model"))
        return x * keep + noise, jax.random.uniform(key, (8, 8), out_sharding=P("data"))

    return step, on(numbers(8, 16), "data"), jax.random.key(0)


def batched():
    def step(w, x):
        return jax.vmap(lambda row: jnp.tanh(row @ w).sum())(x), jax.vmap(jnp.sort)(x)

    return step, on(numbers(16, 8)), on(numbers(8, 16), "data")


def by_hand():
    def step(x):
        inside = jax.shard_map(lambda x: lax.psum(x * 2, "data"), in_specs=P("data"), out_specs=P())
        return inside(x), reshard(x, P()).sum(0)

    return step, on(numbers(8, 16), "data")


def partly_by_hand():
    def step(x):
        inside = jax.shard_map(
            lambda x: lax.psum(jnp.tanh(x), "data"), in_specs=P("data"), out_specs=P(), axis_names={"data"}
        )
        return inside(x).sum(-1)

    return step, on(numbers(8, 16), "data", "model")


def on_auto_axes_inside():
    def step(w, x):
        @jax.sharding.auto_axes
        def inside(w, x):
            return lax.with_sharding_constraint(x @ w, spec("data"))

        return inside(w, x, out_sharding=spec("data", "model"))

    return step, on(numbers(16, 32), "model"), on(numbers(8, 16), "data", "model")


def adam():
    optimizer = optax.adam(1e-2)

    def step(state, x):
        weights, moments = state
        value, gradients = jax.value_and_grad(lambda w: (jnp.tanh(x @ w["in"]) ** 2).mean() + w["bias"].sum())(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    weights = {"in": on(numbers(16, 32), None, "model"), "bias": on(numbers(32))}
    if len(jax.sharding.get_abstract_mesh().axis_names) == 1:
        weights["in"] = on(numbers(16, 32))
    return step, (weights, optimizer.init(weights)), on(numbers(8, 16), "data")


class Block(nnx.Module):
    """As the documents of Flax and JAX write a module for explicit mode."""

    def __init__(self, rngs):
        self.into = nnx.Param(jax.random.normal(rngs.params(), (16, 32), out_sharding=spec(None, "model")))
        self.out = nnx.Param(jax.random.normal(rngs.params(), (32, 16), out_sharding=spec("model", None)))

    def __call__(self, x):
        h = jax.nn.gelu(jnp.dot(x, self.into[...], out_sharding=spec("data", "model")))
        return jnp.dot(h, self.out[...], out_sharding=spec("data", None))


def module():
    graph, state = nnx.split(Block(nnx.Rngs(0)))

    def step(state, x):
        value, gradients = jax.value_and_grad(lambda state: (nnx.merge(graph, state)(x) ** 2).mean())(state)
        return jax.tree.map(lambda w, g: w - 0.01 * g, state, gradients), value

    return step, state, on(numbers(8, 16), "data")


def open_arguments():
    """What has no type is open, whatever is set."""

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        return w - 0.1 * gradient, value

    return step, numbers(16, 32), numbers(8, 16)


def open_batch():
    step, w, _ = training()
    return step, w, numbers(8, 16)


def sorted_and_split():
    def step(x):
        first, rest = jnp.split(x, [4], axis=1)
        wide = jnp.concatenate([x, jnp.pad(x, ((0, 0), (1, 1)))], axis=1)
        return jnp.sort(x, axis=1), first, lax.top_k(rest, 2), wide

    return step, on(numbers(8, 16), "data")


def typed_constant():
    """A step that closes over an array with a type."""
    scale = on(numbers(16), "model")
    return (lambda x: x * scale), on(numbers(8, 16), "data")


PROGRAMS = [
    adam, batched, branches, by_hand, constants, custom_derivatives, looped, looped_gradient, lookup, module,
    on_auto_axes_inside, open_arguments, open_batch, partly_by_hand, product, random_numbers, rematerialised, reshapes,
    sorted_and_split, training, two_layers, typed_constant, whole_product,
]  # fmt: skip


def is_typed(x):
    sharding = jax.typeof(x).sharding
    return AxisType.Explicit in (sharding.mesh.axis_types or ())


@pytest.mark.parametrize("shape", MESHES, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_explicit_programs_are_as_under_jit(program, shape):
    mesh = MESHES[shape]
    with jax.set_mesh(mesh):
        step, *args = program()
        expected = jax.jit(step)(*args)
        decorated = autoshard(step, mesh=mesh)
        found = decorated(*args)
        assert_equal(found, expected)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if is_typed(one):
                assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)
        made = decorated.plan(*args)
        for x, sharding in zip(jax.tree.leaves(args), made.flat_in_shardings, strict=True):
            if jnp.ndim(x) and is_typed(x):
                assert sharding.is_equivalent_to(x.sharding, x.ndim)
        assert str(made)
