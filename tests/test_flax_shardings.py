"""Names of dims that flax linen keeps beside arrays: layouts where they are mesh axes, else left to the planner."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import MemoryLimitError
from autoshard.program.flax_shardings import layout_of_wish

SHAPE = {"data": 4, "model": 2}
OPTIONS = {"mesh": mesh_of(SHAPE), "topology": slow_chips(SHAPE), "time_limit": 10, "donate_argnums": 0}
X = np.linspace(-1, 1, 128, dtype=np.float32).reshape(16, 8)
RULES = [("hidden", "model"), ("embed", None)]


class Net(nn.Module):
    """A box with axes of the mesh, one with logical names, one with names that nobody knows."""

    @nn.compact
    def __call__(self, x):
        init = nn.initializers.lecun_normal()
        x = nn.Dense(16, kernel_init=nn.with_partitioning(init, (None, "data")), use_bias=False)(x)
        x = nn.Dense(16, kernel_init=nn.with_logical_partitioning(init, ("embed", "hidden")), use_bias=False)(x)
        heads = nn.DenseGeneral((4, 2), kernel_init=nn.with_partitioning(init, ("model", None, None)), use_bias=False)
        x = heads(x).reshape(x.shape[0], 8)
        return nn.Dense(8, kernel_init=nn.with_logical_partitioning(init, ("a", "b")), use_bias=False)(x)


SGD = optax.sgd(0.1, momentum=0.9)


def make(optimizer=SGD):
    module = Net()
    params = module.init(jax.random.key(0), X)["params"]
    return TrainState.create(apply_fn=module.apply, params=params, tx=optimizer)


def step(state, x):
    loss, gradients = jax.value_and_grad(lambda p: jnp.mean(state.apply_fn({"params": p}, x) ** 2))(state.params)
    return state.apply_gradients(grads=gradients), loss


def specs(plan):
    return {argument.name: argument.spec for argument in plan.arguments}


def test_boxes_are_wishes_and_stay():
    state, decorated = make(), autoshard.autoshard(step, **OPTIONS)
    with nn.logical_axis_rules(RULES):
        state, _ = decorated(state, X)
        plan = decorated.plan(state, X)
    expected, loss = jax.jit(step)(jax.jit(step)(make(), X)[0], X)
    state, found = decorated(state, X)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    assert jax.tree.map(lambda a: a.shape, state.params) == jax.tree.map(lambda a: a.shape, expected.params)
    for part in ("state/params", "state/opt_state/0/trace"):
        assert specs(plan)[f"{part}/Dense_0/kernel"] == P(None, "data")
        assert specs(plan)[f"{part}/Dense_1/kernel"] == P(None, "model")
        assert specs(plan)[f"{part}/DenseGeneral_0/kernel"] == P("model")
    assert state.params["Dense_1"]["kernel"].value.sharding.spec == P(None, "model")


def test_fixed_goes_before_and_an_option_drops_them():
    pinned = autoshard.plan(step, make(), X, fixed={"params/Dense_0/kernel": P("data")}, **OPTIONS)
    assert specs(pinned)["state/params/Dense_0/kernel"] == P("data")
    assert specs(pinned)["state/opt_state/0/trace/Dense_0/kernel"] == P(None, "data")
    free = autoshard.plan(step, make(), X, ignore_constraints=True, **OPTIONS)
    plain = jax.tree.map(nn.meta.unbox, make(), is_leaf=lambda node: isinstance(node, nn.meta.AxisMetadata))
    assert specs(free) == specs(autoshard.plan(step, plain, X, **OPTIONS))


def test_factored_moments_keep_no_names_of_dims_that_they_lack():
    plan = autoshard.plan(step, make(optax.adafactor(0.1, min_dim_size_to_factor=8)), X, **OPTIONS)
    assert specs(plan)["state/params/Dense_0/kernel"] == P(None, "data")


def test_a_limit_that_wishes_break_says_how_to_free_them():
    with pytest.raises(MemoryLimitError, match="metadata of flax"):
        boxed = nn.Partitioned(np.ones((8, 8), np.float32), ("data", None))
        autoshard.plan(lambda box, x: x @ box.value, boxed, X, memory=100, **OPTIONS)


WISHES = [  # what flax has, the array, what of it is kept
    (P("data", None), (8, 3), (("data",), ())),
    (P("data"), (8, 3), (("data",), ())),
    (P(("data", "model"), None), (8, 3), (("data", "model"), ())),
    (P("embed", "model"), (8, 2), ((), ("model",))),
    (P(P.UNCONSTRAINED, "model"), (8, 2), ((), ("model",))),
    (P("embed", "mlp"), (8, 2), None),  # no axis of the mesh
    (P(None, None), (8, 2), None),
    (P("data"), (6,), None),  # does not divide
    (P("data", "model"), (8,), None),  # more dims than the array
    (P("data", "data"), (8, 8), None),  # an axis twice
    (P(("model", "data")), (8,), None),  # in another order than that of the mesh
]


@pytest.mark.parametrize("spec, shape, layout", WISHES, ids=str)
def test_what_of_a_wish_is_kept(spec, shape, layout):
    assert layout_of_wish(spec, shape, SHAPE) == layout
