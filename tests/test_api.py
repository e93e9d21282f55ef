"""The decorator as a user meets it: what it takes, where things lie afterwards, and what it says when it cannot."""

import functools
import traceback
from collections import namedtuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental.hijax import HiType, register_hitype
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, v5e

import autoshard
from autoshard import ArgumentError, ConflictError, MemoryLimitError, MeshError, Plan
from autoshard.model.xla.backends import CPU

SHAPE = {"x": 4, "y": 2}
OPTIONS = {"mesh": mesh_of(SHAPE), "topology": slow_chips(SHAPE), "time_limit": 10}
sharded = functools.partial(autoshard.autoshard, **OPTIONS)

WEIGHTS = {"down": np.ones((32, 8), np.float32), "up": np.linspace(-1, 1, 256, dtype=np.float32).reshape(8, 32)}
BATCH = np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)


def loss_of(weights, batch):
    return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"]) ** 2)


def step(weights, batch):
    loss, gradients = jax.value_and_grad(loss_of)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def arrays(tree):
    """The leaves as NumPy arrays, PRNG keys as their data."""

    def plain(leaf):
        is_key = jax.dtypes.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(leaf) if is_key else leaf)

    return list(map(plain, jax.tree.leaves(tree)))


def assert_same(found, expected):
    """Two results agree in structure, types and numbers."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(ours).str_short() == jax.typeof(theirs).str_short()
        assert jax.typeof(ours).weak_type == jax.typeof(theirs).weak_type
    for ours, theirs in zip(arrays(found), arrays(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def assert_as_jit(fn, *args, **keywords):
    """The decorated function returns what the jit-ed one does, and mirrors its arguments and result in its plan."""
    decorated = sharded(fn, **keywords)
    expected = jax.jit(fn, **{k: v for k, v in keywords.items() if not k.startswith("donate")})(*args)
    plan = decorated.plan(*args)
    found = decorated(*args)
    assert_same(found, expected)
    jax.tree.map(lambda sharding, leaf: sharding.shard_shape(leaf.shape), plan.out_shardings, found)
    for leaf, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(plan.out_shardings), strict=True):
        assert leaf.sharding == sharding
    return plan


def test_the_oracle_sees_other_numbers_types_and_trees():
    for wrong in ({"a": np.ones(3, np.int32)}, {"a": np.zeros(3, np.float32)}, [np.ones(3, np.float32)]):
        with pytest.raises(AssertionError):
            assert_same(wrong, {"a": np.ones(3, np.float32)})


# What a step may take and return.


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)])
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.layers[1](nnx.relu(self.layers[0](x)))


def nnx_modules():
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    def step(model, optimizer, batch):
        loss, gradients = nnx.value_and_grad(lambda m: jnp.mean(m(batch) ** 2))(model)
        optimizer.update(model, gradients)
        return model, optimizer, loss

    return step, (model, optimizer, BATCH)


def nnx_graphdef_and_state():
    graph, state = nnx.split(Net(nnx.Rngs(0)))

    def step(graph, state, batch):
        model = nnx.merge(graph, state)
        loss = jnp.mean(model(batch) ** 2)
        return nnx.state(model), loss

    return step, (graph, state, BATCH)


def linen_train_state():
    def apply(variables, x):
        return jnp.tanh(x @ variables["params"]["w"])

    state = TrainState.create(apply_fn=apply, params={"w": jnp.full((8, 8), 0.1)}, tx=optax.adamw(1e-2))

    def step(state, batch):
        def loss_of(params):
            return jnp.mean(state.apply_fn({"params": params}, batch) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(state.params)
        return state.apply_gradients(grads=gradients), loss

    return step, (state, BATCH)


def equinox_partitioned():
    arrays, rest = eqx.partition(eqx.nn.MLP(8, 8, 16, 2, key=jax.random.key(0)), eqx.is_array)

    def step(arrays, batch):
        def loss_of(arrays):
            return jnp.mean(jax.vmap(eqx.combine(arrays, rest))(batch) ** 2)

        loss, gradients = jax.value_and_grad(loss_of)(arrays)
        return eqx.apply_updates(arrays, jax.tree.map(lambda g: -0.1 * g, gradients)), loss

    return step, (arrays, BATCH)


def equinox_module():
    def step(layer, batch):
        loss, gradients = eqx.filter_value_and_grad(lambda layer: jnp.mean(jax.vmap(layer)(batch) ** 2))(layer)
        return eqx.apply_updates(layer, jax.tree.map(lambda g: -0.1 * g, gradients)), loss

    return step, (eqx.nn.Linear(8, 8, key=jax.random.key(0)), BATCH)


def prng_keys():
    def step(state, batch):
        key, now = jax.random.split(state["key"])
        return {"key": key, "w": state["w"] + jax.random.normal(now, (8, 8))}, batch @ state["w"]

    return step, ({"key": jax.random.key(3), "w": np.ones((8, 8), np.float32)}, BATCH)


def none_leaves_and_scalars():
    Pair = namedtuple("Pair", "first second")

    def step(state, batch, rate):
        return Pair({"w": state["w"] - rate, "bias": None}, [batch.sum(), None]), ()

    return step, ({"w": np.ones((8, 8), np.float32), "bias": None}, BATCH, 0.5)


def results_that_are_arguments_and_constants():
    def step(state, batch):
        return state, batch, jnp.zeros((8, 8)), 3, state["w"]

    return step, ({"w": np.ones((8, 8), np.float32)}, BATCH)


@jax.tree_util.register_pytree_with_keys_class
class Labelled:
    """A node whose constructor looks at its leaf, as labelled arrays and loss scales do."""

    def __init__(self, values, labels):
        assert isinstance(values, jax.Array | np.ndarray) and values.ndim == 2 and len(values) == len(labels)
        self.values, self.labels = values, labels

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("values"), self.values)], self.labels

    @classmethod
    def tree_unflatten(cls, labels, leaves):
        return cls(*leaves, labels)


def containers_that_look_at_their_leaves():
    def step(state, batch):
        kept = Labelled(state["grid"].values * 2 + batch.values.sum(), state["grid"].labels)
        return {"grid": kept, "w": state["w"] * batch.values.mean(0)}, [batch]

    state = {"grid": Labelled(np.ones((8, 8), np.float32), tuple("abcdefgh")), "w": np.ones((8, 8), np.float32)}
    return step, (state, Labelled(BATCH, tuple(range(16))))


STEPS = [
    nnx_modules, nnx_graphdef_and_state, linen_train_state, equinox_partitioned, equinox_module, prng_keys,
    none_leaves_and_scalars, results_that_are_arguments_and_constants,
]  # fmt: skip


@pytest.mark.parametrize("make", STEPS, ids=lambda make: make.__name__)
def test_takes_and_returns_what_jit_does(make):
    step, args = make()
    plan = assert_as_jit(step, *args)
    assert jax.tree.structure(plan.in_shardings) == jax.tree.structure(args)


def test_containers_that_look_at_their_leaves():
    step, (state, batch) = containers_that_look_at_their_leaves()
    decorated = sharded(step, donate_argnums=0)
    expected = state
    for _ in range(3):
        state, (returned,) = decorated(state, batch)
        expected, _ = jax.jit(step)(expected, batch)
        assert_same(state, expected)
    assert returned.labels == batch.labels
    plan = decorated.plan(state, batch)
    names = ["state/grid/values", "state/w", "batch/values"]
    assert [placed.name for placed in plan.arguments] == names
    grid, w, values = plan.flat_in_shardings  # a dict of its keys takes the place of what cannot hold them
    assert plan.in_shardings == ({"grid": {"values": grid}, "w": w}, {"values": values})
    assert plan.out_shardings == ({"grid": {"values": grid}, "w": w}, [{"values": plan.flat_out_shardings[2]}])
    assert plan.abstract(1)["values"].shape == BATCH.shape
    loaded = Plan.loads(plan.dumps(), OPTIONS["mesh"])
    assert loaded.in_shardings == plan.in_shardings and loaded.out_shardings == plan.out_shardings
    specs = ({"grid": Labelled(np.ones((8, 8)), tuple("abcdefgh")), "w": P("x")}, None)
    with pytest.raises(MeshError, match="a PartitionSpec, a NamedSharding or None"):
        autoshard.evaluate(step, state, batch, **{k: OPTIONS[k] for k in ("mesh", "topology")}, in_shardings=specs)
    specs = ({"grid": P("x"), "w": P("y")}, P())
    priced = autoshard.evaluate(step, state, batch, mesh=OPTIONS["mesh"], in_shardings=specs)
    assert [placed.spec for placed in priced.arguments] == [P("x"), P("y"), P()]


@pytest.mark.parametrize("make", [nnx_modules, linen_train_state, prng_keys], ids=lambda make: make.__name__)
def test_donated_state_of_any_kind_goes_round(make):
    step, (*state, batch) = make()
    decorated = sharded(step, donate_argnums=tuple(range(len(state))))
    expected, shardings = jax.tree.map(lambda leaf: leaf, state), None  # a copy, as nnx modules are changed in place
    for _ in range(3):
        *state, _ = decorated(*state, batch) if len(state) > 1 else decorated(state[0], batch)
        *expected, _ = jax.jit(step)(*expected, batch)
        now = [leaf.sharding for leaf in jax.tree.leaves(state)]
        assert shardings in (None, now)
        shardings = now
    assert_same(state, expected)


def scaled(x, factor, *, shift=0, mode="add"):
    return x * factor + shift if mode == "add" else x * factor - shift


STATIC = [  # jit keywords, args, kwargs
    ({"static_argnums": 1, "static_argnames": "mode"}, (BATCH, 2), {"shift": 1.0, "mode": "sub"}),
    ({"static_argnames": ("factor", "mode")}, (BATCH, 2), {"mode": "sub"}),
    ({"static_argnames": ("factor", "mode")}, (BATCH,), {"factor": 3, "mode": "add", "shift": BATCH}),
    ({"static_argnums": 1}, (BATCH,), {"factor": 3}),
    ({"static_argnums": -1}, (BATCH, 4), {}),
]


@pytest.mark.parametrize("keywords, args, kwargs", STATIC)
def test_static_and_keyword_arguments(keywords, args, kwargs):
    decorated = sharded(scaled, **keywords)
    assert_same(decorated(*args, **kwargs), jax.jit(scaled, **keywords)(*args, **kwargs))
    plan = decorated.plan(*args, **kwargs)
    dynamic = {name: value for name, value in kwargs.items() if isinstance(value, float | np.ndarray)}
    assert jax.tree.structure(plan.keyword_shardings) == jax.tree.structure(dynamic)
    assert len(plan.in_shardings) == 1


def test_equal_static_arguments_of_other_types_are_other_signatures():
    decorated = sharded(lambda x, n: x * n, static_argnums=1)
    x = np.ones(8, np.int32)
    assert [decorated(x, n).dtype for n in (2, 2.0, True)] == [np.int32, np.float32, np.int32]


def test_a_method():
    class Trainer:
        @sharded(static_argnums=0)
        def step(self, x):
            return x + 1

    assert_same(Trainer().step(BATCH), jnp.asarray(BATCH) + 1)


# Where inputs may lie.

EXPLICIT = mesh_of(SHAPE, AxisType.Explicit)
PLACES = {
    "numpy": lambda state, plan: state,
    "one device": lambda state, plan: jax.tree.map(jnp.array, state),
    "one device, committed": lambda state, plan: jax.device_put(state, jax.devices()[3]),
    "replicated": lambda state, plan: jax.device_put(state, NamedSharding(OPTIONS["mesh"], P())),
    "another sharding": lambda state, plan: jax.device_put(state, NamedSharding(OPTIONS["mesh"], P("y", "x"))),
    "another mesh": lambda state, plan: jax.device_put(state, NamedSharding(mesh_of({"z": 8}), P(None, "z"))),
    "some of the devices": lambda state, plan: jax.device_put(state, NamedSharding(some_devices(2, 4), P("z"))),
    "Explicit axes": lambda state, plan: jax.device_put(state, NamedSharding(EXPLICIT, P("x"))),
    "Explicit axes, as planned": lambda state, plan: jax.tree.map(
        lambda leaf, sharding: jax.device_put(leaf, NamedSharding(EXPLICIT, sharding.spec)), state, plan.in_shardings[0]
    ),
    "as planned": lambda state, plan: jax.device_put(state, plan.in_shardings[0]),
}


def some_devices(start, end):
    return Mesh(np.array(jax.devices()[start:end]), ("z",))


@pytest.fixture(scope="module")
def donating():
    return sharded(step, donate_argnums=0)


@pytest.mark.parametrize("place", PLACES)
def test_inputs_are_placed_and_only_what_lies_as_planned_is_donated(donating, place):
    state = PLACES[place](WEIGHTS, donating.plan(WEIGHTS, BATCH))
    before = arrays(state)
    first, _ = donating(state, BATCH)
    assert_same(first, jax.jit(step)(WEIGHTS, BATCH)[0])
    again = donating(first, jnp.asarray(BATCH))[0]
    for leaf, after in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        assert leaf.is_deleted() and leaf.sharding == after.sharding
    if place == "as planned":
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    else:
        for leaf, value in zip(arrays(state), before, strict=True):
            np.testing.assert_array_equal(leaf, value)


ELSEWHERE = {name: place for name, place in PLACES.items() if name not in ("numpy", "one device", "as planned")}


@pytest.mark.parametrize("place", ELSEWHERE)
def test_results_that_have_been_moved_are_placed_again(donating, place):
    """They are of the types that the step made, so only `jax.jit` sees that they lie elsewhere."""
    state, plan = WEIGHTS, donating.plan(WEIGHTS, BATCH)
    batch = jax.device_put(BATCH, plan.in_shardings[1])
    for _ in range(3):
        state, _ = donating(state, batch)
    assert donating._last is not None  # the next call asks jax.jit first
    moved = ELSEWHERE[place](state, plan)
    values = arrays(moved)
    again, _ = donating(moved, batch)
    assert_same(again, jax.jit(step)(dict(zip(sorted(WEIGHTS), values, strict=True)), BATCH)[0])
    for leaf, value in zip(jax.tree.leaves(moved), values, strict=True):
        np.testing.assert_array_equal(leaf, value)


def buffers(tree):
    """Where the shards of the arrays begin, per device."""
    return [[shard.data.unsafe_buffer_pointer() for shard in leaf.addressable_shards] for leaf in jax.tree.leaves(tree)]


def test_a_donated_state_stays_in_its_buffers(donating):
    state, plan = WEIGHTS, donating.plan(WEIGHTS, BATCH)
    batch = jax.device_put(BATCH, plan.in_shardings[1])
    state, _ = donating(state, batch)
    before, lies = buffers(state), buffers(batch)
    for _ in range(3):
        state, _ = donating(state, batch)
        assert buffers(state) == before and buffers(batch) == lies
    kept, _ = sharded(step)(state, batch)  # not donated
    assert buffers(kept) != before == buffers(state)


def test_what_lies_as_planned_is_not_touched(donating, monkeypatch):
    plan = donating.plan(WEIGHTS, BATCH)
    state, batch = jax.device_put((jax.tree.map(jnp.array, WEIGHTS), BATCH), plan.in_shardings)

    def moved(*args, **kwargs):
        raise AssertionError("something was moved")

    with monkeypatch.context() as patched:
        patched.setattr(jax, "device_put", moved)
        for _ in range(3):
            state, _ = donating(state, batch)
        with pytest.raises(AssertionError, match="was moved"):
            donating(state, BATCH)


def test_only_jit_looks_at_arguments_that_lie_as_before(monkeypatch):
    decorated = sharded(step)
    placed = jax.device_put((WEIGHTS, BATCH), decorated.plan(WEIGHTS, BATCH).in_shardings)
    expected = decorated(*placed)

    def looked(*args, **kwargs):
        raise AssertionError("looked at")

    with monkeypatch.context() as patched:
        patched.setattr(decorated, "_prepare", looked)
        assert_same(decorated(*placed), expected)
        for other in ((WEIGHTS, placed[1]), (placed[0], placed[1][:8]), (list(placed[0].values()), placed[1])):
            with pytest.raises(AssertionError, match="looked at"):
                decorated(*other)


@pytest.mark.parametrize("keywords, args, kwargs", STATIC)
def test_what_is_not_an_array_is_looked_at_too(keywords, args, kwargs):
    """Calls whose arrays lie alike, with other static arguments, or arguments by other names."""
    decorated = sharded(scaled, **keywords)
    jitted = jax.jit(scaled, **keywords)
    lie = NamedSharding(OPTIONS["mesh"], P())
    args = tuple(jax.device_put(jnp.asarray(arg), lie) if isinstance(arg, np.ndarray) else arg for arg in args)
    others = [{}, {}, {}, {"shift": 2.0}, {}, *([{"mode": "add"}, {}] if "mode" in kwargs else ())]
    for other in others:
        expected = jitted(*args, **kwargs | other)
        assert_same(decorated(*args, **kwargs | other), expected)


def test_a_step_that_calls_back_runs_again_and_again():
    """`jax.jit` has no fast path for some effects."""
    seen = []

    def shown(x):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum(), ordered=True)
        return x + 1

    decorated = autoshard.autoshard(shown, mesh=mesh_of({"x": 1}))
    x = jax.device_put(jnp.zeros(4), NamedSharding(mesh_of({"x": 1}), P()))
    for _ in range(6):
        x = decorated(x)
    jax.effects_barrier()
    assert seen == [0.0, 4.0, 8.0, 12.0, 16.0, 20.0]


def test_a_callback_may_take_and_give_nothing():
    def announced(x):
        jax.debug.callback(lambda: None)
        return x + 1

    assert autoshard.autoshard(announced, mesh=mesh_of({"x": 2}))(jnp.zeros(4)).sum() == 4


@pytest.mark.parametrize("inside", ["the step", "a scan", "a branch", "a shard_map"])
def test_what_is_called_back_may_use_jax(inside):
    """It runs in the midst of a call, and traces something new each time."""
    mesh, sizes = mesh_of({"x": 1}), iter(range(20, 30))

    def grown(x):
        return np.asarray(x + jnp.arange(next(sizes)).size, np.float32)

    def shown(x):
        def called(x):
            return jax.pure_callback(grown, jax.ShapeDtypeStruct((4,), jnp.float32), x)

        if inside == "a scan":
            return jax.lax.scan(lambda x, _: (called(x), None), x, length=1)[0]
        if inside == "a branch":
            return jax.lax.cond(x.sum() >= 0, called, jnp.zeros_like, x)
        if inside == "a shard_map":
            return jax.shard_map(called, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)(x)
        return called(x)

    decorated = autoshard.autoshard(shown, mesh=mesh)
    x = jax.device_put(jnp.zeros(4), NamedSharding(mesh, P()))
    for _ in range(4):
        x = jax.block_until_ready(decorated(x))
    np.testing.assert_array_equal(x, np.full(4, 20 + 21 + 22 + 23))


def test_a_branch_may_end_in_what_is_called_back():
    """XLA has a result on the device that calls back, and refuses branches whose results lie otherwise."""

    def guarded(x, w):
        def called(x):
            return jax.pure_callback(np.negative, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

        found = jax.lax.cond(x.sum() < 0, called, lambda x: x, x)
        return found, found @ w

    decorated = sharded(guarded, fixed={"x": P("x")}, topology="cpu:8")
    for x in (np.arange(8, dtype=np.float32), -np.ones(8, np.float32)):
        np.testing.assert_array_equal(decorated(x, np.ones((8, 3), np.float32))[0], np.abs(x))


def test_what_fails_as_it_runs_runs_once():
    seen = []

    def fails(x):
        def look(value):
            seen.append(float(value))
            if value > 1:
                raise ValueError("too large")
            return value

        return jax.pure_callback(look, jax.ShapeDtypeStruct((), jnp.float32), x.sum()) + x

    decorated = autoshard.autoshard(fails, mesh=mesh_of({"x": 1}))
    lie = NamedSharding(mesh_of({"x": 1}), P())
    for _ in range(3):
        jax.block_until_ready(decorated(jax.device_put(jnp.zeros(4), lie)))
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="too large"):
        jax.block_until_ready(decorated(jax.device_put(jnp.ones(4), lie)))
    assert seen == [0.0, 0.0, 0.0, 4.0]


@pytest.mark.parametrize("calls", [1, 3])  # of the third, only jax.jit would look at the arguments
@pytest.mark.parametrize("devices", [{"x": 1}, SHAPE], ids=str)
def test_a_state_that_was_donated_is_named(devices, calls):
    decorated = autoshard.autoshard(step, mesh=mesh_of(devices), donate_argnums=0)
    plan = decorated.plan(WEIGHTS, BATCH)
    state, batch = jax.device_put((jax.tree.map(jnp.array, WEIGHTS), BATCH), plan.in_shardings)
    for _ in range(calls):
        before, (state, _) = state, decorated(state, batch)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"weights/down has been deleted, .* donated.*\nGo on with what that"):
            decorated(before, batch)
    decorated(state, batch)


def test_one_device_is_a_mesh_too():
    state = jax.tree.map(jnp.array, WEIGHTS)
    decorated = autoshard.autoshard(step, mesh=mesh_of({"x": 1}), donate_argnums=0)
    assert_same(decorated(state, BATCH), jax.jit(step)(state, BATCH))


@pytest.mark.parametrize("context", [OPTIONS["mesh"], EXPLICIT, mesh_of({"z": 8}, AxisType.Explicit)], ids=str)
def test_the_mesh_that_the_caller_has_set_does_not_matter(context):
    with jax.set_mesh(context):
        assert_same(sharded(step)(WEIGHTS, BATCH), jax.jit(step)(WEIGHTS, BATCH))


def test_constraints_of_the_user_need_no_mesh_set():
    def constrained(x):
        return jax.lax.with_sharding_constraint(x * 2, P(("x", "y"))).sum(0)

    assert_same(sharded(constrained)(BATCH), jnp.asarray(2 * BATCH.sum(0)))


def compilations(run):
    """How often XLA compiles while `run()` runs."""
    count = 0

    def listen(event, duration, **_):
        nonlocal count
        count += event == "/jax/core/compile/backend_compile_duration"

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        run()
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    return count


def test_one_compilation_per_signature():
    decorated = sharded(step, donate_argnums=0)

    def three_steps(place, batch):
        state = PLACES[place](WEIGHTS, decorated.plan(WEIGHTS, BATCH))
        for _ in range(3):
            state, _ = decorated(state, batch)

    decorated.plan(WEIGHTS, BATCH)
    assert compilations(lambda: three_steps("numpy", BATCH)) == 1
    for place in ("replicated", "Explicit axes, as planned", "as planned"):
        assert compilations(lambda place=place: three_steps(place, BATCH)) == 0
    assert compilations(lambda: three_steps("numpy", BATCH.astype(np.float64))) == 0  # JAX makes it float32
    assert compilations(lambda: three_steps("numpy", BATCH[:8])) == 1
    assert compilations(lambda: jax.jit(lambda x: x + len(BATCH))(BATCH)) == 1  # the counter counts


# Differentiating the decorated function.


@jax.custom_vjp
def doubled_gradient(x, w):
    return jnp.sin(x @ w)


doubled_gradient.defvjp(
    lambda x, w: (doubled_gradient(x, w), (x, w)), lambda kept, g: (2 * g @ kept[1].T, 2 * kept[0].T @ g)
)


@jax.custom_jvp
def steep(x):
    return jnp.tanh(x)


steep.defjvp(lambda primals, tangents: (steep(*primals), 7 * tangents[0]))

LOSSES = {
    "custom_jvp": lambda w, x: jnp.sum(steep(x @ w)),
    "custom_vjp": lambda w, x: jnp.sum(doubled_gradient(x, w)),
    "custom_vjp in scan": lambda w, x: jnp.sum(
        jax.lax.scan(lambda c, _: (doubled_gradient(steep(c), w), None), x, length=2)[0]
    ),
    "plain": lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2),
    "remat": lambda w, x: jnp.sum(jax.checkpoint(lambda x: doubled_gradient(steep(x), w))(x)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_grad_of_the_decorated_function(name):
    w = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    decorated = sharded(LOSSES[name])
    expected = jax.grad(LOSSES[name], (0, 1))(w, BATCH)
    assert_same(jax.grad(decorated, (0, 1))(w, BATCH), expected)
    placed = jax.device_put((w, BATCH), decorated.plan(w, BATCH).in_shardings)
    assert_same(jax.jit(jax.grad(decorated, (0, 1)))(*placed), expected)


# Planning without running.


def test_an_abstract_mesh_is_planned_for_and_lowered_but_not_run():
    """For the compiler of the machine that the topology names, and so as if its devices were there."""
    mesh = AbstractMesh((4, 2), ("x", "y"))
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WEIGHTS, BATCH))
    decorated = autoshard.autoshard(step, mesh=mesh, topology="cpu:8", donate_argnums=0)
    plan = decorated.plan(*abstract)
    on_devices = sharded(step, topology="cpu:8", donate_argnums=0).plan(WEIGHTS, BATCH)
    assert plan.arguments == on_devices.arguments and plan.predicted == on_devices.predicted
    with pytest.raises(MeshError, match="has no devices, so the step can be planned"):
        decorated(WEIGHTS, BATCH)
    used = autoshard.autoshard(step, mesh=OPTIONS["mesh"], plan=plan, donate_argnums=0)
    assert_same(used(WEIGHTS, BATCH), jax.jit(step)(WEIGHTS, BATCH))


def test_lower_takes_abstract_arguments():
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (WEIGHTS, BATCH))
    lowered = sharded(step).lower(*abstract)
    assert isinstance(lowered, jax.stages.Lowered)
    assert lowered.compile().memory_analysis() is not None


def test_what_is_compiled_ahead_is_called_as_the_step():
    """With static and keyword arguments, arrays from anywhere, donation, and what the step closes over."""
    frozen = np.linspace(-1, 1, 32 * 1024, dtype=np.float32).reshape(32, 1024)

    def scaled(weights, turns, batch, *, scale):
        new, loss = step(weights, batch)
        return jax.tree.map(lambda w: w * scale, new), loss * turns + (frozen**2).sum()

    decorated = sharded(scaled, static_argnums=1, donate_argnums=0)
    lowered = decorated.lower(WEIGHTS, 3, BATCH, scale=2.0)
    compiled = lowered.compile()
    assert isinstance(lowered, jax.stages.Lowered) and isinstance(compiled, jax.stages.Compiled)
    assert compiled.as_text() and compiled.memory_analysis() is not None and compiled.cost_analysis()
    state, expected = WEIGHTS, WEIGHTS
    for _ in range(2):
        before = state
        state, loss = compiled(state, BATCH, scale=2.0)
        expected, expected_loss = jax.jit(scaled, static_argnums=1)(expected, 3, BATCH, scale=2.0)
        assert_same((state, loss), (expected, expected_loss))
    assert jax.tree.leaves(before)[0].is_deleted()
    with pytest.raises(ArgumentError, match="compiled for arguments of another structure"):
        compiled(state, 3, BATCH, scale=2.0)


def test_fixed_shardings_are_kept():
    plan = sharded(step, fixed={"up": P(None, "x"), "weights/d*": P("y")}).plan(WEIGHTS, BATCH)
    assert [placed.spec for placed in plan.arguments[:2]] == [P("y"), P(None, "x")]


def test_no_time_still_gives_a_plan_and_its_gap():
    decorated = autoshard.autoshard(step, **(OPTIONS | {"time_limit": 0}))
    plan = decorated.plan(WEIGHTS, BATCH)
    assert 0 <= plan.gap <= 1 and plan.bound <= plan.cost
    assert (plan.status == "optimal") == (plan.gap < 1e-6)
    assert_same(decorated(WEIGHTS, BATCH), jax.jit(step)(WEIGHTS, BATCH))


@pytest.mark.parametrize("topology", [slow_chips, v5e])
def test_a_memory_error_names_a_limit_that_can_be_planned_with(topology):
    options = OPTIONS | {"topology": topology(SHAPE), "donate_argnums": 0}
    with pytest.raises(MemoryLimitError) as caught:
        autoshard.plan(step, WEIGHTS, BATCH, **options, memory="700 B")
    error = caught.value
    assert error.budget == 700 < error.needed
    plan = autoshard.plan(step, WEIGHTS, BATCH, **options, memory=error.needed)
    assert plan.predicted.peak_bytes <= CPU.usable * error.needed
    free = autoshard.plan(step, WEIGHTS, BATCH, **options)
    assert CPU.usable * error.needed < free.predicted.peak_bytes
    text, needed = str(error), f"{error.needed / 1024:.1f} KiB"
    assert text.startswith("step: no plan fits in 700 B per device. The leanest is predicted to hold ")
    assert f"and holds {needed} by XLA's account of its compiled program.\nLargest values, before sharding:\n" in text
    assert "\nTry memory='3KiB'" in text and text.count("Largest values") == 1
    options["mesh"] = AbstractMesh(tuple(SHAPE.values()), tuple(SHAPE))  # for which nothing is compiled
    with pytest.raises(MemoryLimitError) as caught:
        autoshard.plan(step, WEIGHTS, BATCH, **options, memory="700 B")
    text = str(caught.value)
    needed = f"is {caught.value.needed / 1024:.1f} KiB"
    assert text.startswith(
        "no sharding was found that fits in 700 B per device; the smallest limit found that does " + needed
    )
    assert "value float32[16, 32] 2.0 KiB (test_api.py:" in text and "memory='" in text


def test_an_axis_that_divides_nothing_is_reported_and_idle():
    plan = autoshard.plan(step, WEIGHTS, BATCH, mesh=Mesh(np.array(jax.devices()[:7]), ("odd",)))
    said = "mesh axis 'odd' (7 devices) divides no dim of step: its dims are 8, 16, 32."
    (warning,) = (one for one in plan.warnings if one.startswith(said))
    assert warning in str(plan).replace("\n", " ")
    assert all(placed.spec == P() for placed in plan.arguments)


# What it says when it cannot.


def swapped(state):
    return {"a": state["b"], "b": state["a"]}


AB = {"a": np.ones(8), "b": np.ones(8)}
REFERENCE = jax.new_ref(jnp.ones(8))
TYPED_REFERENCE = jax.new_ref(jax.device_put(jnp.ones(8), NamedSharding(jax.make_mesh((4, 2), ("x", "y")), P())))


class Pair(HiType):
    """A type of the user's own, of two arrays."""

    def __hash__(self):
        return hash(Pair)

    def __eq__(self, other):
        return isinstance(other, Pair)


class PairOfArrays:
    pass


register_hitype(PairOfArrays, lambda _: Pair())
# Each: options of the decorator, function, its arguments, the error, and what it says.
BAD_CALLS = {
    "no such path": ({"fixed": {"embed": P("x")}}, step, (WEIGHTS, BATCH), ConflictError,
        "no argument of step fits 'embed'; its arguments are weights/down, weights/up, batch"),
    "contradiction": ({"fixed": {"up": P("x"), "weights/*": P("y")}}, step, (WEIGHTS, BATCH), ConflictError,
        "fixed['weights/*'] wants weights/up float32[8, 32] to be P('y',), fixed['up'] wants it to be P('x',)."),
    "contradiction a step later": ({"fixed": {"a": P("x"), "b": P("y")}}, swapped, (AB,), ConflictError,
        "state/b float32[8] becomes state/a float32[8] in the next step, but fixed['b'] wants it to be P('y',), and"),
    "does not divide": ({"fixed": {"x": P("x")}}, lambda x: x, (np.ones(6),), ConflictError,
        "splits dim 0 of x float32[6] over 4 devices, which do not divide 6.\nPad it to a multiple of 4"),
    "too many dims": ({"fixed": {"x": P("x", "y")}}, lambda x: x, (np.ones(8),), ConflictError,
        "names 2 dims, but the array has 1"),
    "axis twice": ({"fixed": {"x": P("y", "y")}}, lambda x: x, (np.ones((8, 8)),), ConflictError,
        "uses a mesh axis twice"),
    "no such axis": ({"fixed": {"x": P("z")}}, lambda x: x, (np.ones(8),), ConflictError,
        "names 'z'; the mesh has the axes {'x': 4, 'y': 2}"),
    "axes in another order": ({"fixed": {"x": P(("y", "x"))}}, lambda x: x, (np.ones(8),), ConflictError,
        "in another order than that of the mesh"),
    "other devices": ({"mesh": some_devices(0, 4), "topology": None}, step,
        (jax.tree.map(lambda a: lambda: jax.device_put(a, jax.devices()[6]), WEIGHTS), BATCH), MeshError,
        "weights/down lies on devices [6], which are not in the mesh {'z': 4}.\nMove it first (jax.device_put)"),
    "strings in an array": ({}, lambda state, x: x, ({"names": [1, np.array(["w"])]}, BATCH), ArgumentError,
        "state/names/1 is array(['w'], dtype='<U1'), which is no array.\nMake its argument static"),
    "strings in a large array": ({}, lambda x: x, (np.full((40, 30), "w"),), ArgumentError,
        "x is a NumPy array <U1[40, 30], which is no array.\nMake its"),
    "an object by keyword": ({}, lambda x, *, config=object: x, (BATCH, {"config": AB.items()}), ArgumentError,
        "config is dict_items("),
    "a reference to an array": ({}, lambda r: r[...], (jax.new_ref(jnp.ones(8)),), ArgumentError,
        "is a Ref{float32[8]}: a reference stays where it lies, whatever a plan says.\nPass the array"),
    "a type of the user's own": ({}, lambda x: x, (PairOfArrays(),), ArgumentError, "which is no array.\nMake its"),
    "a reference elsewhere": ({}, lambda x: x + REFERENCE[...], (jnp.ones(8),), MeshError,
        "closes over a Ref{float32[8]} on devices [0].\nMake it there: jax.new_ref"),
    "a reference of explicit mode": ({}, lambda x: x + TYPED_REFERENCE[...], (jnp.ones(8),), MeshError,
        "closes over a Ref{float32[8]}: its type is of explicit mode, and a reference keeps its type.\nMake it on"),
    "an unhashable static argument": ({"static_argnums": 0}, lambda n: n, ([1],), ArgumentError,
        "static arguments must be hashable, as for jax.jit: unhashable type: 'list'"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_CALLS)
def test_errors_of_a_call(case):
    options, fn, args, error, text = BAD_CALLS[case]
    args = jax.tree.map(lambda leaf: leaf() if callable(leaf) and case == "other devices" else leaf, args)
    kwargs = args[-1] if case.endswith("by keyword") else {}
    decorated = autoshard.autoshard(fn, **(OPTIONS | options))
    with pytest.raises(error) as caught:
        decorated(*(args[:-1] if kwargs else args), **kwargs)
    assert text in str(caught.value)


def test_what_a_reference_holds_is_passed_as_its_error_says():
    reference = jax.new_ref(jnp.ones(8))
    new = sharded(lambda x: 2 * x)(reference[...])
    reference[...] = jax.device_put(new, reference.sharding)
    np.testing.assert_array_equal(reference[...], np.full(8, 2))


BAD_OPTIONS = [
    ({"mesh": 8}, ArgumentError, "mesh must be a jax.sharding.Mesh or AbstractMesh, as jax.make_mesh gives; it is 8"),
    ({"mesh": mesh_of({"z": 8})}, MeshError, "mesh axis 'z' (8 devices) has no link; the topology has links for: x, y"),
    ({"memory": "lots"}, ArgumentError, "memory='lots' is not a size; write bytes as a number, or as '14GiB'"),
    ({"memory": "14 GiBs"}, ArgumentError, "memory='14 GiBs' is not a size"),
    ({"memory": -1}, ArgumentError, "memory=-1 is not a size"),
    ({"memory": [1]}, ArgumentError, "memory=[1] is not a size"),
    ({"topology": 3}, ArgumentError, "topology must be a Topology or the name of a preset; it is 3"),
    ({"topology": "v99"}, MeshError, "no machine 'v99'"),
    ({"mesh": mesh_of({"ü": 4, "a\\b": 2})}, MeshError, r"mesh axes 'ü', 'a\\b': XLA ends the process"),
    ({"fixed": {"w": "x"}}, ArgumentError, "fixed['w'] = 'x'; a path or glob and its PartitionSpec are needed"),
    ({"fixed": P("x")}, ArgumentError, "fixed must be a dict from path or glob to PartitionSpec"),
    ({"time_limit": -1}, ArgumentError, "time_limit=-1; seconds are needed, 0 or more"),
    ({"time_limit": "1 min"}, ArgumentError, "time_limit='1 min'; seconds are needed"),
    ({"donate": 0}, ArgumentError, "autoshard takes no donate; of jax.jit it takes static_argnums, static"),
    ({"in_shardings": P()}, ArgumentError, "Shardings that arguments must have go into fixed="),
    ({"plan": "/no/such/plan.json"}, autoshard.PlanError, "/no/such/plan.json is not a plan that this version"),
]


@pytest.mark.parametrize("options, error, text", BAD_OPTIONS, ids=lambda x: str(x)[:30])
@pytest.mark.parametrize("fn", [step, None], ids=["called", "decorator"])
def test_errors_of_options(fn, options, error, text):
    with pytest.raises(error) as caught:
        autoshard.autoshard(fn, **(OPTIONS | options))
    assert text in str(caught.value)
    assert isinstance(caught.value, autoshard.AutoshardError)


@pytest.mark.parametrize(
    "keywords, text",
    [
        ({"static_argnums": 3}, "static_argnums=(3,), but only accepts 2 positional arguments"),
        ({"donate_argnames": "z"}, "invalid argnames {'z'} in donate_argnames"),
        ({"static_argnums": 0, "donate_argnums": 0}, "cannot intersect"),
    ],
)
def test_keywords_that_do_not_fit_the_function(keywords, text):
    with pytest.raises(ArgumentError, match="step and the keywords given for it do not fit") as caught:
        sharded(step, **keywords)
    assert text in str(caught.value)


def test_what_is_decorated_must_be_a_function():
    with pytest.raises(ArgumentError, match="autoshard decorates a function; 3 cannot be called"):
        sharded(3)


class Mine(Exception):
    pass


def test_an_error_of_the_users_function_passes_unchanged():
    mine = Mine("mine")

    def failing(x):
        raise mine

    for run in (sharded(failing), sharded(failing).plan, sharded(failing).lower):
        with pytest.raises(Mine) as caught:
            run(BATCH)
        assert caught.value is mine and mine.__cause__ is None
        assert traceback.extract_tb(mine.__traceback__)[-1].name == "failing"
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'batch'") as caught:
        sharded(step)(WEIGHTS)
    assert not isinstance(caught.value, autoshard.AutoshardError)


@pytest.mark.parametrize("made", [jnp.asarray, np.asarray])
def test_on_one_device_a_batch_stays_as_it_is_made(made, monkeypatch):
    fn = autoshard.autoshard(step, mesh=mesh_of({"x": 1}))
    state = expected = WEIGHTS
    for _ in range(3):
        state, _ = fn(state, made(BATCH))

    def looked(*args, **kwargs):
        raise AssertionError("the arrays were looked at")

    monkeypatch.setattr(fn, "_prepare", looked)
    for _ in range(2):
        state, loss = fn(state, made(BATCH))
    for _ in range(5):
        expected, last = jax.jit(step)(expected, BATCH)
    assert_same((state, loss), (expected, last))
