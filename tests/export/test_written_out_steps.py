"""`Plan.to_code` of steps that autoshard changed: their operations are written out, and run as planned."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from oracles import slow_chips
from written_code import defined

import autoshard
from autoshard.compiled.collectives import read_collectives
from autoshard.export.containers import UnwritableError
from autoshard.export.operations_code import PRIMITIVES, operations_code
from autoshard.export.standalone import Table, constrained_results
from autoshard.recognition import rewriting


def mesh_of():
    return jax.make_mesh((4, 2), ("data", "model"))


def collectives(text):
    return collections.Counter(
        (one.kind, one.bytes, one.axes) for one in read_collectives(text, {"data": 4, "model": 2})
    )


def array(*shape, dtype=np.float32):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype) * 0.2


def scanned(weights, x, y):
    """A scan over layers with dropout, lookups and their gradients."""

    def loss_of(weights):
        def layer(h, weight):
            h = jax.nn.gelu(h @ weight)
            return h * jax.random.bernoulli(jax.random.key(1), 0.9, h.shape[1:]), None

        h, _ = jax.lax.scan(layer, weights["table"][x], weights["layers"])
        return jnp.mean((jnp.where(h > 3, 3, h) - y) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def unrolled(weights, x):
    def loss_of(weights):
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return jnp.sum(y**2)

    return jax.tree.map(lambda w, g: w - g, weights, jax.grad(loss_of)(weights))


def muon(state, x):
    weights, moments = state

    def loss_of(weights):
        y = x
        for weight in weights:
            y = y + jnp.tanh(y @ weight)
        return jnp.mean(y**2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    updates, moments = optax.contrib.muon(1e-2).update(gradients, moments, weights)
    return (optax.apply_updates(weights, updates), moments), loss


def chain(a, b, c):
    return (a @ b) @ c


SCANNED = {"layers": array(3, 32, 32), "table": array(64, 32)}, np.arange(16) * 3, array(16, 32)
SQUARES = [array(32, 32) for _ in range(4)]
STEPS = {  # name: (step, arguments, options, what the code says)
    "microbatches": (scanned, SCANNED, {"microbatches": 4}, "runs in microbatches"),
    "remat": (unrolled, (SQUARES, array(16, 32)), {"remat": "auto"}, "what the backward pass keeps"),
    "stacks": (muon, ((SQUARES, optax.contrib.muon(1e-2).init(SQUARES)), array(16, 32)), {}, "stacks of matrices"),
    "rewrites": (chain, (array(512, 8), array(8, 512), array(512, 512)), {"rewrites": "auto"}, "was rewritten"),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_code_has_the_numbers_and_collectives_of_the_plan(name):
    step, arguments, options, reason = STEPS[name]
    mesh, machine = mesh_of(), slow_chips(mesh_of().axis_names)
    plan = autoshard.autoshard(step, mesh=mesh, topology=machine, **options).plan(*arguments)
    code = plan.to_code()
    assert "written out here" in code and reason in code and "autoshard" not in code.partition("import jax")[2]
    found = defined(code)
    shardings = {"in_shardings": found["in_shardings"](mesh), "out_shardings": found["out_shardings"](mesh)}
    jitted = jax.jit(found["constrained"](step, mesh), **shardings)
    compiled = jitted.lower(*arguments).compile()
    planned = collectives(plan.lowering().compile().as_text())
    assert collectives(compiled.as_text()) == planned and planned
    made = compiled(*jax.device_put(arguments, shardings["in_shardings"]))
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(jax.jit(step)(*arguments)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def attended(weights, x):
    query, key, value = (jnp.einsum("btd,dhe->bthe", x, weight) for weight in weights)
    return jnp.mean(jax.nn.dot_product_attention(query, key, value, is_causal=True) ** 2)


def sorted_to_experts(weights, x):
    """Each token goes to one expert."""
    router, experts = weights
    chosen = jnp.argmax(x @ router, axis=-1)
    order = jnp.argsort(chosen)
    made = jax.lax.ragged_dot(x[order], experts, jnp.bincount(chosen, length=4))
    return jnp.mean(jnp.zeros_like(made).at[order].set(made) ** 2)


RECOGNISED = {
    "attention": (attended, ([array(16, 4, 8) for _ in "qkv"], array(2, 32, 16)), {"x": P(None, "data")}),
    "experts": (sorted_to_experts, ((array(16, 4), array(4, 16, 16)), array(32, 16)), {"x": P("data")}),
    "transform": (lambda x: jnp.abs(jnp.fft.fft2(x)), (array(16, 16),), {"x": P("data", "model")}),
}


@pytest.mark.parametrize("name", RECOGNISED)
def test_what_a_plan_recognises_has_its_inner_layouts(name, monkeypatch):
    """Attention and experts are written out; transforms are in JAX's own jaxpr what they are in the plan's."""
    monkeypatch.setattr(rewriting, "MEMORY_SHARE", 0.0)
    step, arguments, fixed = RECOGNISED[name]
    decorated = autoshard.autoshard(step, mesh=mesh_of(), topology=slow_chips(mesh_of().axis_names), fixed=fixed)
    assert "operation" in {one.primitive for one in decorated.trace(*arguments).equations}
    code = decorated.plan(*arguments).to_code()
    assert ("experts in the step were recognised" in code) == (name != "transform")
    made = jax.jit(defined(code)["constrained"](step, mesh_of()))(*arguments)
    np.testing.assert_allclose(made, jax.jit(step)(*arguments), rtol=2e-4, atol=1e-4)


def test_a_padded_step_takes_the_padded_batch():
    """Its mean is that of the rows that there were."""
    rows = array(7, 16)
    plan = autoshard.autoshard(jnp.mean, mesh=mesh_of(), pad="batch").plan(rows)
    padded = np.concatenate([rows, np.full((1, 16), np.nan, np.float32)])
    mean = jax.jit(defined(plan.to_code())["constrained"](jnp.mean, mesh_of()))
    np.testing.assert_allclose(mean(padded), rows.mean(), rtol=1e-5)
    with pytest.raises(ValueError, match="takes or returns other arrays"):
        mean(rows)


def test_a_padded_step_that_cannot_be_written_is_refused():
    """The step as it is would count the added rows."""

    def step(rows):
        return jnp.mean(jax.pure_callback(np.sin, rows[:, 0].sum(), rows[:, 0].sum()) * rows)

    plan = autoshard.autoshard(step, mesh=mesh_of(), pad="batch").plan(array(7, 16))
    with pytest.raises(autoshard.PlanError, match=r"would count the rows that are added.* pure_callback cannot"):
        plan.to_code()


def test_dims_that_are_padded_inside_are_written_with_their_layouts():
    def step(weight, x):
        def loss_of(weight):
            return jnp.mean(jnp.tanh(jnp.tanh(x @ weight) @ weight.T) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(weight)
        return weight - 0.1 * gradient, loss

    mesh, arguments = mesh_of(), (array(257, 257), array(63, 257))
    machine = slow_chips(mesh.axis_names)
    plan = autoshard.autoshard(step, mesh=mesh, topology=machine, pad="auto").plan(*arguments)
    code = plan.to_code()
    assert "dims are padded inside the step" in code and "autoshard" not in code.partition("import jax")[2]
    written = jax.jit(defined(code)["constrained"](step, mesh))
    planned = collectives(plan.lowering().compile().as_text())
    assert collectives(written.lower(*arguments).compile().as_text()) == planned and planned
    for one, other in zip(written(*arguments), jax.jit(step)(*arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=1e-5)


def test_modules_are_changed_by_written_out_steps():
    def step(model, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), gradients))
        return loss

    ours, theirs = (nnx.Linear(16, 16, rngs=nnx.Rngs(0)) for _ in range(2))
    plan = autoshard.autoshard(step, mesh=mesh_of(), microbatches=2).plan(ours, array(8, 16))
    code = plan.to_code()
    assert "written out here" in code
    loss = nnx.jit(defined(code)["constrained"](step, mesh_of()))(ours, array(8, 16))
    np.testing.assert_allclose(loss, step(theirs, array(8, 16)), rtol=1e-5)
    np.testing.assert_allclose(ours.kernel[...], theirs.kernel[...], rtol=1e-5)


def operations(x, key):
    """Operations whose parameters are objects of JAX: dtypes, enums, named tuples, keys, primitives, constants."""
    drawn = jax.random.normal(jax.random.wrap_key_data(key), x.shape) + jnp.asarray(np.arange(8, dtype=np.float32))
    image = jax.lax.conv(x[None, None], drawn[None, None, :3, :3], (1, 1), "SAME")
    pooled = jax.grad(
        lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID").sum()
    )
    looked = jnp.asarray(x).at[jnp.array([1, 2])].max(jnp.take(x, jnp.array([3, 9]), axis=0, mode="fill"))
    turns = jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]
    branch = jax.lax.cond(x.sum() > 0, jnp.sin, jnp.cos, x)
    parts = jnp.fft.fft(x).astype(jnp.complex64), jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8)), jnp.argsort(x, axis=1)
    return pooled(image), looked, turns, branch, parts, x.astype(jnp.bfloat16) * 2, jax.lax.top_k(x, 2)


def ran(closed, arguments):
    """A jaxpr run from its code."""
    code, modules = operations_code(closed, {})
    names = {}
    imports = "\n".join(f"import {module}" for module in modules)
    lines = [
        imports,
        "from autoshard.export.written_out import *",
        "import jax, jax.numpy as jnp, jax.extend.core.primitives",
        PRIMITIVES,
        code,
    ]
    exec("\n".join(lines), names)
    table = Table(0, {}, {}, names["_operations"]())
    return constrained_results(closed, arguments, mesh_of(), table)


def test_what_operations_are_made_of_is_written():
    arguments = array(8, 8), jax.random.key_data(jax.random.key(0))
    expected = jax.tree.leaves(operations(*arguments))
    made = ran(jax.make_jaxpr(operations)(*arguments), arguments)
    for one, other in zip(made, expected, strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_allclose(one.astype(np.complex64), other.astype(np.complex64), rtol=1e-5, atol=1e-5)


def key_of(data):
    return jax.random.wrap_key_data(data)


CLOSED_OVER = jax.random.split(jax.random.key(5))
SINGLE_OPERATIONS = {
    "derivative of a cast": lambda x, key: jax.grad(lambda x: x.astype(jnp.bfloat16).sum())(x),
    "clone": lambda x, key: jax.random.key_data(jax.random.clone(key_of(key))),
    "complex literal": lambda x, key: x * complex(1, -0.0) + complex(np.nan, np.inf),
    "device_put": lambda x, key: jax.device_put((x, 2 * x))[1],
    "key that is closed over": lambda x, key: x + jax.random.normal(CLOSED_OVER[0], x.shape),
    "keys of seeds": lambda x, key: jax.vmap(lambda seed: jax.random.normal(jax.random.key(seed), (2,)))(np.arange(3)),
    "literal results": lambda x, key: (x, 1.0, 3),
    "ragged_dot": lambda x, key: jax.lax.ragged_dot(x, jnp.stack([x, x]), jnp.array([3, 5])),
}


@pytest.mark.parametrize("name", SINGLE_OPERATIONS)
def test_an_operation_is_written(name):
    arguments, step = (array(8, 8), jax.random.key_data(jax.random.key(0))), SINGLE_OPERATIONS[name]
    closed = jax.make_jaxpr(step)(*arguments)
    for one, other in zip(ran(closed, arguments), jax.tree.leaves(step(*arguments)), strict=True):
        assert one.dtype == jnp.asarray(other).dtype
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_what_code_cannot_say_is_named():
    def called(x):
        return jax.pure_callback(np.sin, x, x)

    with pytest.raises(UnwritableError, match=r"pure_callback at test_written_out_steps.py:\d+ cannot be written"):
        operations_code(jax.make_jaxpr(called)(np.ones(3, np.float32)), {})
    with pytest.raises(UnwritableError, match=r"scatter at .* it applies a function"):
        operations_code(jax.make_jaxpr(lambda x: x.at[1].apply(jnp.sin))(np.ones(3, np.float32)), {})
