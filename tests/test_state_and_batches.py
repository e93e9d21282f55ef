"""`Plan.init`, `Plan.shard_batch` and `Plan.abstract`: arrays made, loaded and restored as a plan has them."""

from typing import NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.arrays.state_and_batches import initialiser, local_shape

WIDTH, HIDDEN = 16, 64


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.relu(nn.Dense(HIDDEN)(x)))


MODEL, OPTIMIZER = Model(), optax.adam(1e-3)


def make_state(key):
    params = MODEL.init(key, jnp.zeros((1, WIDTH)))
    return TrainState.create(apply_fn=MODEL.apply, params=params, tx=OPTIMIZER)


def train_step(state, batch):
    def loss_of(params):
        return jnp.mean((state.apply_fn(params, batch["x"]) - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state.params)
    return state.apply_gradients(grads=gradient), loss


BATCH = {name: jax.ShapeDtypeStruct((32, WIDTH), jnp.float32) for name in "xy"}


def planned(mesh, **options):
    state = jax.eval_shape(make_state, jax.random.key(0))
    return autoshard.plan(train_step, state, BATCH, mesh=mesh, donate_argnums=0, **options)


@pytest.fixture(scope="module")
def plan():
    kernels = {"*Dense_0/kernel": P("data", "model"), "*Dense_1/kernel": P("model", "data"), "batch/*": P("data")}
    return planned(jax.make_mesh((4, 2), ("data", "model")), fixed=kernels)


def assert_laid(arrays, shardings):
    """Every array lies as its sharding says."""
    for array, sharding in zip(jax.tree.leaves(arrays), jax.tree.leaves(shardings), strict=True):
        assert array.sharding == sharding


def assert_equal(some, others):
    for one, other in zip(jax.tree.leaves(some), jax.tree.leaves(others), strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_state_is_born_as_planned(plan):
    state = plan.init(make_state, jax.random.key(0))
    assert_laid(state, plan.in_shardings[0])
    assert_equal(state, jax.jit(make_state)(jax.random.key(0)))
    assert state.params["params"]["Dense_0"]["kernel"].sharding.spec == P("data", "model")


@jax.tree_util.register_pytree_node_class
class Keyless:
    """A container that names no keys, as `eqx.nn.State` is one: JAX counts its children."""

    def __init__(self, *children):
        self.children = children

    def tree_flatten(self):
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


@pytest.mark.parametrize("around", [lambda held: held, lambda held: {"inner": [held]}], ids=["top", "below"])
def test_containers_without_keys_name_their_arrays_once(around):
    def made():
        return around(Keyless(jnp.zeros((8, 4)), Keyless(jnp.zeros((16,)), [jnp.zeros((4,))])))

    def step(state, x):
        return jax.tree.map(lambda one: one + x.sum(), state), x

    mesh = jax.make_mesh((4, 2), ("data", "model"))
    found = autoshard.plan(step, made(), jnp.ones((8,)), mesh=mesh)
    names = [argument.name.removeprefix("state/").removeprefix("inner/0/") for argument in found.arguments]
    assert names == ["0", "1/0", "1/1/0", "x"]
    assert_laid(found.init(made), found.in_shardings[0])


def test_parts_of_a_state_are_found_by_their_structure(plan):
    params = plan.init(MODEL.init, jax.random.key(0), np.zeros((1, WIDTH), np.float32))
    assert_laid(params, plan.in_shardings[0].params)
    moments = plan.init(OPTIMIZER.init, params)
    assert_laid(moments, plan.in_shardings[0].opt_state)
    both = plan.init(lambda: ({"step": 0}, MODEL.init(jax.random.key(0), jnp.zeros((1, WIDTH)))))
    assert_laid(both[1], plan.in_shardings[0].params)


def test_a_plan_of_a_file_does_as_well(plan):
    loaded = autoshard.Plan.loads(plan.dumps(), plan.mesh)
    assert_laid(loaded.init(make_state, jax.random.key(0)), plan.in_shardings[0])


def test_no_device_holds_more_than_its_shards():
    def sgd(weights, x):
        return weights - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(weights)

    def weights(key):
        return jax.random.normal(key, (2048, 1024))

    of = jax.ShapeDtypeStruct
    mesh = jax.make_mesh((8,), ("data",))
    arguments = of((2048, 1024), jnp.float32), of((8, 2048), jnp.float32)
    plan = autoshard.plan(sgd, *arguments, mesh=mesh, donate_argnums=0, fixed={"weights": P("data")})

    def peak(jitted, given):
        memory = jitted.lower(*given).compile().memory_analysis()
        return memory.output_size_in_bytes + memory.temp_size_in_bytes

    (maker,) = initialiser(plan, weights, [jax.random.key(0)]).makers
    alone = peak(jax.jit(weights), maker.given)  # numbers, and the bits that they are made of
    assert alone >= 8 * plan.arguments[0].local_bytes
    assert peak(maker.jitted, maker.given) < alone / 7.9


class Pair(NamedTuple):
    up: jax.Array
    down: jax.Array


def pair_step(pair, shadow, x):
    def loss_of(pair):
        return jnp.mean((jax.nn.relu(x @ pair.up) @ pair.down) ** 2)

    new = jax.tree.map(lambda w, g: w - g, pair, jax.grad(loss_of)(pair))
    return new, jax.tree.map(lambda s, w: 0.9 * s + w, shadow, new)


def test_what_may_be_two_things_is_refused_where_these_lie_otherwise():
    pair = Pair(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WIDTH, HIDDEN), (HIDDEN, WIDTH))))
    x = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    mesh, fixed = jax.make_mesh((8,), ("data",)), {"pair/up": P("data"), "shadow/up": P(None, "data")}
    plan = autoshard.plan(pair_step, pair, pair, x, mesh=mesh, donate_argnums=(0, 1), fixed=fixed)

    def make():
        return Pair(jnp.ones((WIDTH, HIDDEN)), jnp.ones((HIDDEN, WIDTH)))

    with pytest.raises(autoshard.ArgumentError, match=r"pair and shadow of pair_step both are.*two ways"):
        plan.init(make)
    assert_laid(plan.init(lambda: (make(), make())), plan.in_shardings[:2])


def nnx_step(model, x):
    def loss_of(model):
        return jnp.mean(model(x) ** 2)

    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model), nnx.grad(loss_of)(model)))
    return model


def eqx_step(arrays, x):
    static = eqx.partition(eqx_model(), eqx.is_array)[1]

    def loss_of(arrays):
        return jnp.mean(jax.vmap(eqx.combine(arrays, static))(x) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, arrays, jax.grad(loss_of)(arrays))


def eqx_model():
    return eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, key=jax.random.key(0))


@pytest.mark.parametrize(
    "make, state, step, largest",
    [
        (lambda: nnx.Linear(WIDTH, HIDDEN, rngs=nnx.Rngs(0)), lambda made: made, nnx_step, "kernel"),
        (eqx_model, lambda made: eqx.filter(made, eqx.is_array), eqx_step, "layers/0/weight"),
    ],
    ids=["nnx", "equinox"],
)
def test_modules_are_born_as_planned(make, state, step, largest):
    x, made = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32), state(make())
    plan = autoshard.plan(step, made, x, mesh=jax.make_mesh((8,), ("data",)), fixed={largest: P("data")})
    born = plan.init(make)
    assert type(born) is type(make())
    assert_laid(state(born), plan.in_shardings[0])
    assert_equal(state(born), made)
    assert any(not leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(state(born)))


def test_what_no_argument_holds_is_refused(plan):
    with pytest.raises(autoshard.ArgumentError, match=r"init_fn makes a float32\[3\]. No part .* \(state, batch\)"):
        plan.init(lambda: {"a": jnp.zeros(3)})
    with pytest.raises(autoshard.ArgumentError, match=r"Dense_1/kernel float32\[32, 64\], where train_step is planned"):
        plan.init(lambda key: MODEL.init(key, jnp.zeros((1, 2 * WIDTH))), jax.random.key(0))
    nowhere = planned(jax.sharding.AbstractMesh((8,), ("data",)))
    with pytest.raises(autoshard.MeshError, match="no devices"):
        nowhere.init(make_state, jax.random.key(0))


def test_a_batch_is_placed_and_cast_as_jit_would(plan):
    rows = {name: np.random.default_rng(0).normal(size=(32, WIDTH)) for name in "xy"}
    placed = plan.shard_batch(rows)
    assert_laid(placed, plan.in_shardings[1])
    assert_equal(placed, jax.tree.map(lambda x: x.astype(np.float32), rows))
    assert_laid(plan.shard_batch(jax.tree.map(jnp.asarray, rows)), plan.in_shardings[1])
    assert_laid(plan.shard_batch({"x": rows["x"]}), plan.in_shardings[1]["x"])
    with pytest.raises(autoshard.ArgumentError, match=r"x float32\[30, 16\], where .* for batch/x float32\[32, 16\]"):
        plan.shard_batch({name: array[:30] for name, array in rows.items()})


def test_what_a_process_holds_of_a_batch(plan):
    sharding = plan.in_shardings[1]["x"]
    assert local_shape((32, WIDTH), sharding) == (32, WIDTH)
    here = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("data",))
    assert local_shape((32, WIDTH), jax.sharding.NamedSharding(here, P("data"))) == (32, WIDTH)


def test_a_checkpoint_of_one_mesh_is_restored_on_another(plan, tmp_path):
    wide = planned(jax.make_mesh((8,), ("data",)), fixed={"*Dense_0/kernel": P(None, "data")})
    state = wide.init(make_state, jax.random.key(3))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", plan.abstract(0))
    assert_laid(restored, plan.in_shardings[0])
    assert_equal(restored, state)
    kernels = [one.params["params"]["Dense_0"]["kernel"].sharding for one in (state, restored)]
    assert kernels[0] != kernels[1]
