"""Leaves that are no arrays: equinox modules are taken as eqx.filter_jit takes them, numbers as jax.jit does."""

import dataclasses
import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import ArgumentError, Plan

SHAPE = {"x": 4, "y": 2}
OPTIONS = {"mesh": mesh_of(SHAPE), "topology": slow_chips(SHAPE), "time_limit": 10}
sharded = functools.partial(autoshard.autoshard, **OPTIONS)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
OPTIMIZER = optax.sgd(0.1, momentum=0.9)


class Net(eqx.Module):
    """Functions, rates and flags among its leaves, and a state of running means."""

    up: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    activation: Callable
    scale: float

    def __init__(self, key):
        self.up = eqx.nn.Linear(8, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.dropout, self.activation, self.scale = eqx.nn.Dropout(0.5), jnp.tanh, 2.0

    def __call__(self, x, state, key):
        x, state = self.norm(self.activation(self.up(x)), state)
        return self.scale * self.dropout(x, key=key), state


def train_step(model, state, opt_state, x, key):
    def loss_of(model):
        batched = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
        y, new = batched(x, state, key)
        return jnp.mean((y - 1) ** 2), new

    (loss, state), gradients = eqx.filter_value_and_grad(loss_of, has_aux=True)(model)
    updates, opt_state = OPTIMIZER.update(gradients, opt_state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, opt_state, loss


def assert_same(ours, theirs):
    ours, theirs = (jax.tree.flatten(tree) for tree in (ours, theirs))
    assert ours[1] == theirs[1]
    for a, b in zip(ours[0], theirs[0], strict=True):
        if eqx.is_array(b):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        else:
            assert type(a) is type(b) and a == b


def mlp():
    return eqx.nn.MLP(8, 8, 16, 1, key=jax.random.key(0))


def test_modules_with_numbers_are_born_as_planned():
    """Their rates and flags are static in `init` as they are in the step."""

    def born(key):
        model = eqx.nn.make_with_state(Net)(key)[0]
        return model, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))

    key = jax.random.key(0)
    (model, opt_state), (_, state) = born(key), eqx.nn.make_with_state(Net)(key)
    plan = sharded(train_step, donate_argnums=(0, 1, 2)).plan(model, state, opt_state, X, key)
    assert_same(plan.init(born, key), (model, opt_state))
    assert_same(plan.shard_batch({"x": X, "name": "train"}), {"x": X, "name": "train"})


def test_a_step_of_modules_is_that_of_filter_jit():
    model, state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    ours = theirs = model, state, OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    decorated = sharded(train_step, donate_argnums=(0, 1, 2))
    for i in range(2):
        *ours, loss = decorated(*ours, X, jax.random.key(i))
        *theirs, expected = eqx.filter_jit(train_step)(*theirs, X, jax.random.key(i))
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    assert_same(ours, theirs)
    plan = decorated.plan(*ours, X, jax.random.key(2))
    assert [argument.name for argument in plan.arguments[:2]] == ["model/up/weight", "model/up/bias"]
    assert plan.carried == {i: i for i in range(len(plan.arguments) - 2)}
    decorated(eqx.nn.inference_mode(ours[0]), *ours[1:], X, jax.random.key(3))  # another module, planned anew


def test_the_comparison_sees_other_static_leaves():
    with pytest.raises(AssertionError):
        assert_same({"rate": jnp.asarray(0.5)}, {"rate": 0.5})


def test_plans_of_modules(tmp_path):
    decorated = sharded(lambda model, x: (model, jax.vmap(model)(x)), donate_argnums=0)
    model = mlp()
    plan = decorated.plan(model, X)
    arrays, static = eqx.partition(model, eqx.is_array)
    assert_same(eqx.combine(jax.device_put(arrays, plan.in_shardings[0]), static), model)
    assert jax.tree.structure(plan.abstract(0)) == jax.tree.structure(arrays)
    assert plan.out_shardings[0].activation is None
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan", OPTIONS["mesh"]).in_shardings[0]["activation"] is None
    again, _ = sharded(lambda model, x: (model, jax.vmap(model)(x)), donate_argnums=0, plan=tmp_path / "plan")(model, X)
    assert again.activation is model.activation
    given = autoshard.evaluate(lambda model, x: jax.vmap(model)(x), model, X, **with_layouts_of(plan))
    assert given.in_shardings[0].layers[0].weight.spec == plan.in_shardings[0].layers[0].weight.spec


def with_layouts_of(plan):
    return {"mesh": OPTIONS["mesh"], "topology": OPTIONS["topology"], "in_shardings": plan.in_shardings}


def loss_of(model, x):
    return jnp.mean(jax.vmap(model)(x) ** 2)


def test_transformations_around_a_decorated_function_of_modules():
    decorated, model = sharded(loss_of), mlp()
    assert_same(eqx.filter_grad(decorated)(model, X), eqx.filter_grad(loss_of)(model, X))
    np.testing.assert_allclose(eqx.filter_jit(decorated)(model, X), loss_of(model, X), rtol=1e-5)
    np.testing.assert_allclose(eqx.filter_jit(sharded(eqx.filter_jit(loss_of)))(model, X), loss_of(model, X), rtol=1e-5)
    batched = jax.vmap(lambda x: decorated(model, x))(np.stack([X, 2 * X]))
    np.testing.assert_allclose(batched, [loss_of(model, X), loss_of(model, 2 * X)], rtol=1e-5)


# What is static, and how often it is planned: arguments call by call, and how many signatures they are.
CALLS = {
    "functions": (lambda f, x: f(x), [(jnp.tanh, X), (jnp.sin, X), (jnp.tanh, X)], 2),
    "strings": (lambda d, x: x * (2 if d["mode"] == "a" else 3), [({"mode": "a"}, X), ({"mode": "b"}, X)], 2),
    "numbers are arrays": (lambda d, x: x * d["rate"], [({"rate": 0.1}, X), ({"rate": 0.2}, X)], 1),
    "a function where an array was": (
        lambda d: d["f"](X) if callable(d["f"]) else d["f"] * X, [({"f": X},), ({"f": jnp.sin},), ({"f": X},)], 2),
    "a flag beside a module": (
        lambda m, x, flag: loss_of(m, x) if flag else x.sum(), [(mlp(), X, True), (mlp(), X, False)], 2),
    "a counter beside a module": (lambda m, x, n: loss_of(m, x) * n, [(mlp(), X, 1), (mlp(), X, 2)], 1),
    "another activation": (loss_of, [(mlp(), X), (eqx.tree_at(lambda m: m.activation, mlp(), jnp.sin), X)], 2),
}  # fmt: skip


@pytest.mark.parametrize("case", CALLS)
def test_what_is_static_is_compared_by_value(case):
    fn, calls, signatures = CALLS[case]
    traces = 0

    def counted(*args):
        nonlocal traces
        traces += 1
        return fn(*args)

    decorated = sharded(counted)
    for args in (*calls, *calls):
        np.testing.assert_allclose(decorated(*args), fn(*args), rtol=1e-5)
    assert traces == signatures


def test_static_leaves_come_back():
    result = sharded(lambda x: {"name": "net", "f": jnp.tanh, "y": x, "n": 3})(X)
    assert result["name"] == "net" and result["f"] is jnp.tanh
    assert isinstance(result["y"], jax.Array) and isinstance(result["n"], jax.Array)


class Tensor:
    """An array of another library."""

    def __array__(self, dtype=None, copy=None):
        return np.ones(3)


@pytest.mark.parametrize("leaf", [Tensor(), np.array(["w"]), {1}.copy], ids=["tensor", "strings", "fine"])
def test_what_is_neither_array_nor_static_is_named(leaf):
    decorated = sharded(lambda state: jnp.zeros(8))
    if callable(leaf):
        assert decorated({"odd": leaf}).shape == (8,)
        return
    with pytest.raises(ArgumentError, match=r"state/odd is .*no array"):
        decorated({"odd": leaf})


def test_a_static_leaf_without_a_hash_is_named():
    with pytest.raises(ArgumentError, match=r"state/odd is .*no array and has no hash"):
        sharded(lambda state: jnp.zeros(8))({"odd": {1}})


# What JAX does not know as a pytree.


class Model:
    """Holds an array, a list of some, and a function of another."""

    def __init__(self):
        self.w, self.layers, self.scale = jnp.ones((8, 4)), [jnp.ones(4)], 2.0
        mean = jnp.full(8, 0.5)
        self.normalised = lambda x: x - mean

    def __call__(self, x):
        return self.normalised(x) @ self.w + self.layers[0]


@dataclasses.dataclass
class Metrics:
    loss: jax.Array


def set_weights(model):
    model.w = 2 * model.w


def set_layer(model):
    model.layers[0] = 2 * model.layers[0]


def replace_function(model):
    model.normalised = lambda x: x


CHANGES = {"Model.w": set_weights, "Model.layers.0": set_layer, "Model.mean": replace_function}


FORMS = {
    "stages": {"pipeline": {"stages": 1, "microbatches": 2}},
    "a padded batch": {"pad": "batch"},
    "padded dims": {"pad": "auto"},
}


@pytest.mark.parametrize("name, form", [*((name, "one program") for name in CHANGES), *(("Model.w", f) for f in FORMS)])
def test_arrays_of_unknown_objects_are_constants_that_must_not_change(name, form):
    model, x = Model(), X[:13] if form == "a padded batch" else X
    step = sharded(lambda model, x: model(x).mean(), **FORMS.get(form, {}))
    first = step(model, x)
    model.unread = jnp.ones(3)
    np.testing.assert_allclose(step(model, x), first, rtol=1e-5)
    CHANGES[name](model)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=rf"{name} is another array than the one .*\nRegister the class"):
            step(model, x)
    np.testing.assert_allclose(sharded(lambda model, x: model(x).mean())(model, x), model(x).mean(), rtol=1e-5)


async def waits(x):
    return x


TRACED = {
    "an object": (lambda x: (x, Metrics(x.sum())), "a Metrics at 1, .* holds a traced array: loss"),
    "a function": (lambda x: {"later": lambda: x.sum()}, "a function at later, .* holds a traced array: x"),
    "a partial": (lambda x: functools.partial(jnp.add, x), "a partial, .* holds a traced array"),
    "a view": (lambda x: {"a": x}.values(), "a dict_values, .* holds a traced array"),
    "a method": (lambda x: x.sum, "a method, .* holds a traced array"),
    "a generator": (lambda x: (row for row in x), "a generator, which runs once"),
    "an iterator": (lambda x: map(jnp.sum, x), "a map, which runs once"),
    "a coroutine": (waits, "a coroutine, which runs once"),
}


@pytest.mark.filterwarnings("ignore:Python iterable type")
@pytest.mark.parametrize("case", TRACED)
def test_results_that_hold_what_is_traced_are_refused(case):
    step, said = TRACED[case]
    with pytest.raises(ArgumentError, match=f"the function returns {said}"):
        sharded(step)(X)
