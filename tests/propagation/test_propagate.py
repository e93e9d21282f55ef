"""Propagation against Shardy's own pipeline, and by its properties."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import shardy
from jax.sharding import PartitionSpec as P
from models import MODELS

from autoshard.layout import axes_of, layout_of, replicated
from autoshard.program import Value, trace
from autoshard.propagation import propagate_layouts, rules_for

MESH = {"x": 4, "y": 2}


def layouts(fn, args, specs, mesh=MESH):
    """Layouts of arguments, of results, and the whole table."""
    program = trace(fn, args, {})
    fixed = {
        value.id: layout_of(spec, len(value.shape))
        for value, spec in zip(program.arguments, specs, strict=True)
        if spec is not None
    }
    found = propagate_layouts(program, rules_for(program), mesh, fixed)
    for value, layout in fixed.items():
        assert found[value] == layout
    results = [found[x.id] if isinstance(x, Value) else replicated(x.ndim) for x in program.results]
    return [found[x.id] for x in program.arguments], results, found


def check_against_shardy(fn, args, specs, mesh=MESH, changed=None):
    """Asserts that arguments and results lie as Shardy has them; `changed` alters ours, to see the check fail."""
    arguments, results, _ = layouts(fn, args, specs, mesh)
    if changed is not None:
        results[changed] = tuple(axes[:-1] for axes in results[changed])
    theirs = shardy.propagated(fn, args, specs, mesh)
    assert (arguments, results) == (theirs.arguments, theirs.results)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def matmul(x, w):
    return x @ w


def attention(x, query, key, value, out):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (query, key, value))
    scores = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k) / 4.0)
    mixed = jnp.einsum("bhqt,bthk->bqhk", scores, v)
    return x + jnp.einsum("bqhk,hkd->bqd", mixed, out)


def moving(x, y):
    a = x.reshape(8, 4, 16).transpose(1, 0, 2)
    b = (a * 2 + y.reshape(4, 1, 16)).sum(0)
    return b, a.max(2), jnp.concatenate([b, b], 0), b[:4], b.reshape(2, 64).T


def looping(x, w, xs):
    def body(carry, row):
        carry = jnp.tanh(carry @ w + row)
        return carry, carry.sum(0)

    return jax.lax.scan(body, x, xs)


def branching(x, y, w):
    return jax.lax.cond(x.sum() > 0, lambda a, b: a @ w, lambda a, b: b, x, y)


HEADS = [array(64, 8, 16)] * 3 + [array(8, 16, 64)]
COLUMN_ROW = [P(None, "y", None)] * 3 + [P("y", None, None)]

FUNCTIONS = {  # name: function, operands, specs
    "matmul, rows": (matmul, [array(64, 32), array(32, 16)], [P("x"), None]),
    "matmul, columns": (matmul, [array(64, 32), array(32, 16)], [None, P(None, "x")]),
    "matmul, contracted": (matmul, [array(64, 32), array(32, 16)], [P(None, "x"), None]),
    "matmul, both want x, left larger": (matmul, [array(64, 32), array(32, 16)], [P("x"), P(None, "x")]),
    "matmul, both want x, right larger": (matmul, [array(16, 32), array(32, 64)], [P("x"), P(None, "x")]),
    "matmul, two axes each": (matmul, [array(64, 32), array(32, 16)], [P("x", "y"), P("y", "x")]),
    "matmul, major and minor": (matmul, [array(64, 32), array(32, 16)], [P(("y", "x")), P(None, ("x", "y"))]),
    "fixed whole": (matmul, [array(64, 32), array(32, 16)], [P(), P("x")]),
    "elementwise conflict": (jnp.subtract, [array(8, 8)] * 2, [P("x"), P(None, "x")]),
    "elementwise whole": (jnp.subtract, [array(8, 8)] * 2, [P(), P("x")]),
    "attention, batch": (attention, [array(8, 16, 64), *HEADS], [P("x"), *[None] * 4]),
    "attention, heads": (attention, [array(8, 16, 64), *HEADS], [None, *COLUMN_ROW]),
    "attention, both": (attention, [array(8, 16, 64), *HEADS], [P("x"), *COLUMN_ROW]),
    "attention, sequence": (attention, [array(8, 16, 64), *HEADS], [P(None, "x"), *[None] * 4]),
    "moving, x": (moving, [array(8, 64), array(4, 16)], [P("x"), None]),
    "moving, y": (moving, [array(8, 64), array(4, 16)], [None, P("y", "x")]),
    "moving, compound": (moving, [array(8, 64), array(4, 16)], [P(None, ("x", "y")), None]),
    "moving, compound major": (moving, [array(8, 64), array(4, 16)], [P("y", "x"), None]),
    "scan, carry": (looping, [array(8, 16), array(16, 16), array(3, 8, 16)], [P("x"), None, None]),
    "scan, sliced": (looping, [array(8, 16), array(16, 16), array(3, 8, 16)], [None, None, P(None, "x")]),
    "scan, weight": (looping, [array(8, 16), array(16, 16), array(3, 8, 16)], [None, P(None, "y"), None]),
    "cond, one branch": (branching, [array(8, 16), array(8, 16), array(16, 16)], [None, P("x"), None]),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_as_shardy(name):
    check_against_shardy(*FUNCTIONS[name])


def test_the_oracle_sees_a_difference():
    with pytest.raises(AssertionError):
        check_against_shardy(*FUNCTIONS["attention, both"], changed=0)


# How a person would start: only some arguments, by the name of the parameter.
STEPS = {  # name: model, pattern of the argument's name -> spec
    "data parallel": ("mlp", {"^batch": P("x")}),
    "cnn": ("cnn", {"^batch": P("x")}),
    "gpt, data parallel": ("gpt", {"^batch": P("x")}),
    "gpt, Megatron": (
        "gpt",
        {
            r"state/0.*up/kernel": P(None, "y"),
            r"state/0.*down/kernel": P("y", None),
            r"state/0.*(query|key|value)/kernel": P(None, "y", None),
            r"state/0.*out/kernel": P("y", None, None),
            r"^batch": P("x"),
        },
    ),
    "gpt, vocabulary": ("gpt", {r"state/0/embed.*embedding": P("y"), r"^batch": P("x")}),
    "lstm": ("lstm", {r"^batch/x": P("x"), r"state/0.*h./kernel": P(None, "y")}),
    "moe, experts": ("moe", {r"state/0/(up|down)": P("x"), r"^batch": P("x")}),
    "tied": ("tied", {r"state/0/embedding": P("x"), r"^batch": P("y")}),
    "mlp, all weights": ("mlp", {r"params/\d/w": P("x"), r"^batch": P("x")}),
    "gpt, all matrices": ("gpt", {r"state/0.*(kernel|embedding)": P("x"), r"^batch": P("x")}),
}


@pytest.mark.parametrize("name", STEPS)
def test_train_steps_as_shardy(name):
    model_name, rules = STEPS[name]
    model = MODELS[model_name]()
    args = (model.state, model.batches(0))
    names = [value.name for value in trace(model.step, args, {}).arguments]
    specs = [next((spec for pattern, spec in rules.items() if re.search(pattern, name)), None) for name in names]
    check_against_shardy(model.step, args, specs)


def random_specs(shapes, rng):
    """Any specs that `jax.jit` would take, most of them useless."""
    specs = []
    for shape in shapes:
        entries = [None] * len(shape)
        for axis, size in MESH.items():
            dim = int(rng.integers(len(shape))) if shape else None
            if dim is not None and entries[dim] is None and shape[dim] % size == 0 and rng.random() < 0.5:
                entries[dim] = axis
        specs.append(P(*entries) if rng.random() < 0.4 else None)
    return specs


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("model_name", ["mlp", "moe", "tied"])
def test_any_specs_as_shardy(model_name, seed):
    model = MODELS[model_name]()
    args = (model.state, model.batches(0))
    specs = random_specs([np.shape(x) for x in jax.tree.leaves(args)], np.random.default_rng(seed))
    check_against_shardy(model.step, args, specs)


@pytest.mark.parametrize("model_name", MODELS)
def test_every_layout_is_one_and_a_fixed_point(model_name):
    model = MODELS[model_name]()
    args = (model.state, model.batches(0))
    specs = random_specs([np.shape(x) for x in jax.tree.leaves(args)], np.random.default_rng(5))
    program = trace(model.step, args, {})
    _, _, found = layouts(model.step, args, specs)
    assert len(found) == len(program.values)
    for value in program.values:
        layout = found[value.id]
        assert len(layout) == len(value.shape)
        assert len(axes_of(layout)) == sum(map(len, layout)), "an axis twice"
    fixed = {value.id: found[value.id] for value in program.values}
    assert propagate_layouts(program, rules_for(program), MESH, fixed) == found


def test_nothing_fixed_nothing_split():
    _, _, found = layouts(attention, [array(8, 16, 64), *HEADS], [None] * 5)
    assert not any(axes_of(layout) for layout in found.values())
