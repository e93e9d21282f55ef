"""Arrays that a step closes over: found wherever JAX keeps them, placed once, split, counted and named."""

import functools
import gc
import weakref

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from oracles import mesh_of
from sweeps import some

from autoshard import Plan, autoshard, evaluate, plan, propagate, verify
from autoshard.cache import key_of
from autoshard.errors import ArgumentError, ConflictError
from autoshard.options import options_of
from autoshard.program import captured as captured_module
from autoshard.program import trace
from autoshard.propagation import rules_for

P = PartitionSpec
MESH = mesh_of({"x": 4, "y": 2})
RNG = np.random.default_rng(0)
A = jnp.asarray(RNG.normal(size=(256, 256)) / 16, jnp.float32)
B = (RNG.normal(size=(256, 256)) / 16).astype(np.float32)
X = jnp.asarray(RNG.normal(size=(64, 256)), jnp.float32)
BASE = {"layers": [{"kernel": jnp.asarray(RNG.normal(size=(1024, 6 * 1024)) / 32, jnp.float32)}]}  # 24 MiB
LORA = {"down": jnp.ones((1024, 8)) / 8, "up": jnp.ones((8, 6 * 1024)) / 8}
BATCH = jnp.asarray(RNG.normal(size=(64, 1024)), jnp.float32)
SIMPLIFIED = "jax_use_simplified_jaxpr_constants"  # JAX's flag: constants are literals that hold arrays


@jax.jit
def inner(x):
    return jnp.tanh(x @ A) @ B


@jax.custom_vjp
def with_vjp(x):
    return inner(x)


with_vjp.defvjp(lambda x: (with_vjp(x), x), lambda x, g: jax.vjp(inner, x)[1](g))


@jax.custom_jvp
def with_jvp(x):
    return inner(x)


with_jvp.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))


def scanned(x):
    return jax.lax.scan(lambda c, _: (inner(c), c.sum()), x, None, length=3)


NESTED = {
    "plain": lambda x: jnp.tanh(x @ A) @ B,
    "jit": inner,
    "jit twice": lambda x: inner(inner(x)),
    "scan": lambda x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ A) @ B, None), x, None, length=3),
    "jit in scan": scanned,
    "gradient of scan": jax.grad(lambda x: scanned(x)[0].sum()),
    "while": lambda x: jax.lax.while_loop(lambda c: jnp.abs(inner(c)).sum() > 1, lambda c: inner(c) / 2, x),
    "cond": lambda x: jax.lax.cond(x[0, 0] > 0, lambda x: jax.jit(lambda x: x @ B)(x) @ A, lambda x: x, x),
    "checkpoint": jax.grad(lambda x: jax.checkpoint(inner)(x).sum()),
    "custom_vjp": with_vjp,
    "gradient of custom_vjp": jax.grad(lambda x: with_vjp(x).sum()),
    "custom_jvp": with_jvp,
    "vmap": lambda x: jax.vmap(inner)(x[:, None]),
    "result": lambda x: (inner(x), A),
}


def lora_step(lora, batch):
    def loss_of(lora):
        kernel = BASE["layers"][0]["kernel"]
        return jnp.mean((jnp.tanh(batch @ kernel) + batch @ lora["down"] @ lora["up"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(lora)
    return jax.tree.map(lambda w, g: w - 0.1 * g, lora, gradients), loss


def names(program):
    return sorted(value.name for value in program.arguments[len(program.own_arguments) :])


def check_equal(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=1e-4), got, want)


def copied(tree):
    return jax.tree.map(jnp.array, tree)


@pytest.fixture(params=[False, True], ids=["constants", "literals"])
def kept_as(request):
    before = getattr(jax.config, SIMPLIFIED)
    jax.config.update(SIMPLIFIED, request.param)
    jax.clear_caches()
    yield
    jax.config.update(SIMPLIFIED, before)
    jax.clear_caches()


def test_arrays_are_found_wherever_they_are_kept(kept_as):
    for name, fn in NESTED.items():
        program = trace(fn, (X,), {})
        assert names(program) == ["A", "B"], name
        assert not any(np.size(const) >= A.size for const in program.jaxpr.consts), name


@pytest.mark.parametrize("name", ["jit in scan", "while", "cond", "checkpoint", "gradient of custom_vjp", "result"])
def test_numbers_are_those_of_jit(name):
    step = autoshard(NESTED[name], mesh=MESH, fixed={"A": P("x", None), "B": P(None, "y")})
    check_equal(step(X), jax.jit(NESTED[name])(X))


@pytest.mark.parametrize("name", some(["jit in scan", "custom_vjp", "custom_jvp"], "jit in scan", "custom_vjp"))
def test_transformations_of_the_decorated_step(kept_as, name):
    fn = NESTED[name]
    step = autoshard(fn, mesh=MESH)

    def loss(fn, x):
        return jax.tree.leaves(fn(x))[0].sum()

    want = jax.grad(functools.partial(loss, fn))(X)
    check_equal(jax.grad(functools.partial(loss, step))(X), want)
    check_equal(jax.jit(jax.grad(functools.partial(loss, step)))(X), want)
    check_equal(jax.vmap(step)(X[:, None]), jax.vmap(fn)(X[:, None]))


def compiled_beside_predicted(step, *args):
    found = step.plan(*args).verify()
    return found.actual_peak, found.predicted_peak


def test_a_frozen_base_is_split_counted_and_named():
    step = autoshard(lora_step, mesh=MESH, memory="8MiB", donate_argnums=0)
    made = step.plan(LORA, BATCH)
    found = made.verify()
    assert [placed.name for placed in made.captured] == ["BASE/layers/0/kernel"]
    assert made.captured[0].local_bytes <= 24 * 2**20 / 4 and made.captured_shardings[0].mesh == made.mesh
    assert found.memory_agrees and found.actual_peak <= 8 * 2**20
    assert "Closed-over arrays (" in str(made) and "BASE/layers/0/kernel" in str(made)
    assert set(made.in_shardings[0]) == {"down", "up"} and len(made.in_shardings) == 2
    want = jax.jit(lora_step)(LORA, BATCH)
    state, loss = step(copied(LORA), BATCH)
    check_equal((state, loss), want)
    placed = jax.device_put(BATCH, made.in_shardings[1])
    for _ in range(2):
        state, loss = step(state, placed)
    check_equal(loss, jax.jit(lora_step)(jax.jit(lora_step)(want[0], BATCH)[0], BATCH)[1])


def test_that_nobody_counts_the_base_would_be_found(monkeypatch):
    monkeypatch.setattr(captured_module, "LEAST_ARGUMENT_BYTES", 2**40)
    found = plan(lora_step, LORA, BATCH, mesh=MESH, donate_argnums=0).verify()
    assert not found.memory_agrees and found.actual_peak > 2 * found.predicted_peak


def test_other_ways_to_shard_split_it_too():
    alternatives = plan(lora_step, LORA, BATCH, mesh=MESH, donate_argnums=0).alternatives
    base = BASE["layers"][0]["kernel"].nbytes
    gathered = [one.bytes for one in alternatives["FSDP"].collectives if one.kind == "all_gather"]
    assert alternatives["data parallel"].peak_bytes > base and base in gathered


def test_evaluate_counts_it_whole():
    made = evaluate(lora_step, LORA, BATCH, mesh=MESH, in_shardings=(None, None))
    assert made.captured[0].spec == P() and made.predicted.peak_bytes > 24 * 2**20


def test_a_jitted_step_is_verified_by_what_xla_counts(kept_as):
    found = verify(jax.jit(lambda x: x @ A, in_shardings=jax.NamedSharding(MESH, P("x"))), X)
    assert found.memory_agrees


def test_propagate_knows_the_arguments_alone():
    assert len(propagate(lora_step, LORA, BATCH, mesh=MESH, in_specs=(None, P("x"))).arguments) == 3


def test_fixed_by_path_or_glob():
    for pattern in ("BASE/layers/0/kernel", "kernel", "BASE/*"):
        made = plan(lora_step, LORA, BATCH, mesh=MESH, fixed={pattern: P("x", "y")})
        assert made.captured[0].spec == P("x", "y")
    with pytest.raises(ConflictError, match=r"its arguments are .*BASE/layers/0/kernel"):
        plan(lora_step, LORA, BATCH, mesh=MESH, fixed={"bias": P()})


class Frozen:
    def __init__(self):
        self.base = {"w": np.ones((256, 256), np.float32)}

    def step(self, x):
        return x @ self.base["w"]


def named_modules():
    linear = nnx.Sequential(nnx.Linear(256, 512, rngs=nnx.Rngs(0)), nnx.Linear(512, 256, rngs=nnx.Rngs(0)))
    mlp = eqx.nn.MLP(256, 256, 256, 1, key=jax.random.key(0))
    weights = np.ones((256, 256), np.float32)
    return {
        "nnx": (lambda x: linear(x), ["linear/layers/0/kernel", "linear/layers/1/kernel"]),
        "equinox": (lambda x: jax.vmap(mlp)(x), ["mlp/layers/0/weight", "mlp/layers/1/weight"]),
        "partial": (functools.partial(lambda w, x: x @ w, weights), ["w"]),
        "method": (Frozen().step, ["self/base/w"]),
        "default": (lambda x, w=weights: x @ w, ["w"]),
        "inner function": (lambda x: jax.lax.map(lambda row: row @ weights, x), ["weights"]),
        "made while it is traced": (lambda x: x @ jnp.asarray(np.ones((256, 256), np.float32)), None),
    }


@pytest.mark.parametrize("kind", named_modules())
def test_names(kind):
    fn, expected = named_modules()[kind]
    found = names(trace(fn, (X,), {}))
    if expected is None:
        (name,) = found
        assert name.startswith("closed over float32[256, 256] at test_captured.py:")
    else:
        assert found == expected


def test_small_arrays_stay_constants():
    small, large = jnp.ones(256), jnp.ones((256, 256))
    program = trace(lambda x: x @ large + small, (X,), {})
    assert names(program) == ["large"] and [value.shape for value in program.constants] == [(256,)]


def test_placed_once_and_never_again(monkeypatch):
    step, seen = autoshard(lambda x: x @ A, mesh=MESH, fixed={"A": P("x", None)}), []
    put = jax.device_put
    monkeypatch.setattr(jax, "device_put", lambda x, *args, **kwargs: seen.append(x) or put(x, *args, **kwargs))
    for _ in range(3):
        step(X)
    assert sum(one is A for one in seen) == 1
    assert not A.is_deleted() and A.sharding.num_devices == 1


def test_numbers_are_those_of_the_first_call():
    """As under `jax.jit`, where a program keeps its constants."""
    weights = np.ones((256, 256), np.float32)
    step = autoshard(lambda x: x @ weights, mesh=MESH)
    want = np.asarray(step(X))
    weights[:] = 7
    np.testing.assert_array_equal(np.asarray(step(X)), want)


def test_a_deleted_array_is_an_error_with_its_name():
    weights = jnp.ones((256, 256)) * 2
    step = autoshard(lambda x: x @ weights, mesh=MESH)
    made = step.plan(X)
    assert made.captured[0].name == "weights"
    weights.delete()
    with pytest.raises(ArgumentError, match=r"weights, which .* closes over, has been deleted"):
        step(X)


def test_plans_depend_on_shapes_and_not_on_numbers():
    def program_of(weights):
        return trace(lambda x: x @ weights, (X,), {})

    options = options_of(MESH)
    keys = [
        key_of(program, rules_for(program), options) for program in map(program_of, (A, A + 1, jnp.ones((256, 512))))
    ]
    assert keys[0] == keys[1] != keys[2]


def test_plan_files_have_them():
    made = plan(lora_step, LORA, BATCH, mesh=MESH, fixed={"kernel": P(None, "y")}, donate_argnums=0)
    loaded = Plan.loads(made.dumps(), MESH)
    assert loaded.captured == made.captured
    step = autoshard(lora_step, mesh=MESH, plan=loaded, donate_argnums=0)
    check_equal(step(copied(LORA), BATCH), jax.jit(lora_step)(LORA, BATCH))
    with pytest.raises(ConflictError, match="BASE/layers/0/kernel"):
        autoshard(lora_step, mesh=MESH, plan=loaded, fixed={"kernel": P("x")}, donate_argnums=0).plan(LORA, BATCH)


def test_planned_and_lowered_without_arrays_or_devices():
    step = autoshard(inner, mesh=AbstractMesh((4, 2), ("x", "y")))
    aval = jax.ShapeDtypeStruct(X.shape, X.dtype)
    assert [placed.name for placed in step.plan(aval).captured] == ["A", "B"]
    assert step.lower(aval).as_text().count("%arg") >= 3


def test_arrays_on_other_devices_and_on_explicit_axes():
    explicit = mesh_of({"x": 4, "y": 2}, jax.sharding.AxisType.Explicit)
    last = jax.device_put(A, jax.devices()[-1])
    two = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    check_equal(autoshard(lambda x: x @ last, mesh=two)(X), X @ A)
    with jax.set_mesh(explicit):
        split = jax.device_put(A, jax.NamedSharding(explicit, P("x", None)))
        step = autoshard(lambda x: jnp.einsum("ij,jk->ik", x, split, out_sharding=P("x", None)), mesh=explicit)
        x = jax.device_put(X, jax.NamedSharding(explicit, P(None, None)))
        got = step(x)
        assert step.plan(x).captured[0].name == "split" and got.sharding.spec == P("x", None)
        check_equal(got, X @ A)


@pytest.mark.usefixtures("few_objects")
def test_placed_arrays_live_no_longer_than_the_step():
    step = autoshard(lambda x: x @ A, mesh=MESH, fixed={"A": P("x", None)})
    step(X)
    (compiled,) = set(step._compiled.values())
    placed = weakref.ref(compiled.captured[0])
    del step, compiled
    gc.collect()
    assert placed() is None


def kinds_of_arrays():
    keys = jax.random.split(jax.random.key(0), 16384)
    on_host = jax.device_put(A, jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host"))
    rows = np.repeat(B, 2, axis=0)[::2]
    return {
        "keys": lambda x: jax.vmap(jax.random.normal)(keys)[:64, None] + x,
        "on the host": lambda x: x @ jax.device_put(on_host, jax.memory.Space.Device),
        "strided": lambda x: x @ rows,
    }


@pytest.mark.parametrize("kind", kinds_of_arrays())
def test_arrays_of_any_kind(kind):
    fn = kinds_of_arrays()[kind]
    step = autoshard(fn, mesh=MESH)
    assert len(step.plan(X).captured) == 1
    check_equal(step(X), jax.jit(fn)(X))


def test_a_decorated_step_inside_of_another():
    inside = autoshard(lambda x: x @ A, mesh=MESH)
    check_equal(autoshard(lambda x: inside(x) * 2, mesh=MESH)(X), X @ A * 2)
