"""Propagation against Shardy's own pipeline, and by its properties."""

import functools
import math
import re
from collections import Counter
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_programs
import shardy
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from models import MODELS, MORE_MODELS
from oracles import SMALL, mesh_of
from sweeps import some

import autoshard
from autoshard.layout import axes_of
from autoshard.program import trace
from autoshard.propagation import propagate_layouts, rules_for

GENERATED = settings(deadline=None, database=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
MESH = {"x": 4, "y": 2}
BOUNDARIES = {"branch_const", "branch_join", "scan_carry", "scan_const", "scan_slice", "scan_stack"}


class Traced:
    """A function as we read it, and as Shardy does, for any specs of its arguments."""

    def __init__(self, fn, args, mesh=MESH):
        self.fn, self.args, self.mesh = fn, tuple(args), mesh
        self.program = trace(fn, self.args, {}, merges=False)

    @cached_property
    def rules(self):
        return rules_for(self.program)

    @cached_property
    def lowered(self):
        return shardy.LoweredFunction(self.fn, self.args, self.mesh)

    @cached_property
    def values(self):
        """How many values the equations make."""
        equations = (equation for equation in self.program.equations if equation.primitive not in BOUNDARIES)
        return sum(len(equation.outputs) for equation in equations)

    def spread(self, specs):
        """How propagation lays the program out."""
        fixed = shardy.fixed_layouts(self.program, specs)
        found = propagate_layouts(self.program, self.rules, self.mesh, fixed)
        for value, layout in fixed.items():
            assert found.values[value] == layout
        return found


def check_against_shardy(fn, args, specs, mesh=MESH, changed=None):
    return compare(Traced(fn, args, mesh), specs, changed)


def compare(traced, specs, changed=None):
    """Asserts that arguments and results lie as Shardy has them; the number of inner values compared, and those that
    lie otherwise.

    `changed` alters the layout of one of our results, to see the check fail.
    """
    program, found = traced.program, traced.spread(specs)
    results = list(found.results)
    if changed is not None:
        results[changed] = tuple(axes[:-1] for axes in results[changed])
    theirs = traced.lowered.propagated(specs)
    assert [found.values[value.id] for value in program.arguments] == theirs.arguments
    assert results == theirs.results
    compared, others = 0, []
    for equation in program.equations:
        layouts = theirs.inner.get(equation.path, ())
        if [len(x) for x in layouts] == [len(x.shape) for x in equation.outputs]:
            for value, layout in zip(equation.outputs, layouts, strict=True):
                compared += 1
                if found.values[value.id] != layout:
                    others.append(f"{equation}: {found.values[value.id]}, Shardy {layout}")
    return compared, others


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
    compared, others = check_against_shardy(*FUNCTIONS[name])
    assert compared and not others, others


def constrain(x, *entries):
    return lax.with_sharding_constraint(x, NamedSharding(mesh_of(MESH), P(*entries)))


def manual(fn, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh_of(MESH), in_specs=in_specs, out_specs=out_specs)


def summed(x, xs):
    return lax.scan(lambda c, row: (jnp.sin(c + row), None), x, xs)[0]


def also(fn, more):
    """`fn` of a value, and `more` of it: the value has another reader than the constraint."""
    return lambda h: (fn(h), more(h))


X, W, XS = array(8, 16), array(16, 32), array(4, 8, 16)
CONSTRAINED = {  # name: function, operands, specs
    "inner": (lambda x, w: constrain(jnp.tanh(x @ w), None, "x") * 2, [X, W], [P("y"), None]),
    "whole": (lambda x, w: constrain(x @ w) * 2, [X, W], [P("x"), P(None, "y")]),
    "open": (lambda x, w: constrain(x @ w, P.UNCONSTRAINED, "x") * 2, [X, W], [P("y"), None]),
    "argument": (lambda x, w: constrain(x, "x") @ w, [X, W], [None, None]),
    "argument, fixed otherwise": (lambda x, w: constrain(x, "x") @ w, [X, W], [P(None, "y"), None]),
    "constant": (lambda x: constrain(jnp.ones((8, 16)), "x") + x, [X], [P(None, "y")]),
    "another reader": (
        lambda x, w: also(lambda h: constrain(h, None, "x"), jnp.sin)(jnp.tanh(x @ w)), [X, W], [P("y"), None]),
    "two that differ": (
        lambda x, w: also(lambda h: constrain(h, "x"), lambda h: constrain(h, None, "y"))(x @ w), [X, W], [None] * 2),
    "two alike": (
        lambda x, w: also(lambda h: constrain(h, "x"), lambda h: constrain(h, "x") * 2)(x @ w), [X, W], [P("y"), None]),
    "in a row": (
        lambda x, w: also(lambda h: constrain(constrain(h, "x"), None, "x").sum(0), jnp.sin)(x @ w), [X, W],
        [None] * 2),
    "result of a loop": (
        lambda x, xs: also(lambda h: constrain(h, "x"), jnp.sin)(summed(x, xs)), [X, XS], [P(None, "y"), None]),
    "in a loop": (
        lambda x, xs: lax.scan(lambda c, r: (constrain(jnp.sin(c + r), None, "y"), c.sum(0)), x, xs), [X, XS],
        [None] * 2),
    "carry in a loop": (
        lambda x, xs: lax.scan(lambda c, r: (jnp.sin(constrain(c, "x") + r), c.sum(0)), x, xs), [X, XS], [None] * 2),
    "result of a branch": (
        lambda x, y: also(lambda h: constrain(h, "x"), jnp.sin)(
            lax.cond(x.sum() > 0, lambda a, b: a, lambda a, b: jnp.sin(b), x, y)), [X, X], [None, P(None, "y")]),
    "gradient": (
        lambda x, w: jax.grad(lambda w: constrain(jnp.tanh(x @ w), "x", "y").sum())(w), [X, W], [None] * 2),
    "manual": (
        lambda x, w: manual(lambda a, b: lax.psum(a @ b, "x"), (P(None, "x"), P("x")), P())(jnp.sin(x), w * 2) + 1,
        [X, W], [None] * 2),
    "manual, fixed otherwise": (
        lambda x, w: manual(jnp.matmul, (P("x"), P()), P("x"))(x, w) * 2, [X, W], [P("y"), P("y")]),
    "manual, another reader": (lambda x: also(manual(jnp.sin, P("x"), P("x")), jnp.cos)(x), [X], [None]),
}  # fmt: skip


@pytest.mark.parametrize("name", CONSTRAINED)
def test_constraints_as_shardy(name):
    compared, others = check_against_shardy(*CONSTRAINED[name])
    assert compared and not others, others


def test_the_oracle_sees_a_difference():
    with pytest.raises(AssertionError):
        check_against_shardy(*FUNCTIONS["attention, both"], changed=0)


# How a person would start: only some arguments, by the name of the parameter.
STEPS = {  # name: model, pattern of the argument's name -> spec
    "data parallel": ("mlp", {"^batch": P("x")}),
    "mlp, all weights": ("mlp", {r"params/\d/w": P("x"), r"^batch": P("x")}),
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
    "gpt, all matrices": ("gpt", {r"state/0.*(kernel|embedding)": P("x"), r"^batch": P("x")}),
    "lstm": ("lstm", {r"^batch/x": P("x"), r"state/0.*h./kernel": P(None, "y")}),
    "moe, experts": ("moe", {r"state/0/(up|down)": P("x"), r"^batch": P("x")}),
    "tied": ("tied", {r"state/0/embedding": P("x"), r"^batch": P("y")}),
}


@functools.lru_cache(maxsize=1)  # tests of one model follow each other
def traced_model(kind, name):
    model = {"models": MODELS, "more": MORE_MODELS, "small": SMALL}[kind][name]()
    return Traced(model.step, (model.state, model.batches(0)))


def check_step(traced, specs):
    """Asserts that a train step's results lie as Shardy has them, and 99 of 100 inner values."""
    compared, others = compare(traced, specs)
    assert compared > 0.8 * traced.values
    assert len(others) <= 0.01 * compared, "\n".join(others)


def named_specs(traced, rules):
    """For each flat argument the spec of the first pattern that its path fits, or None."""
    names = [value.name for value in traced.program.arguments]
    return [next((spec for pattern, spec in rules.items() if re.search(pattern, name)), None) for name in names]


@pytest.mark.parametrize("name", STEPS)
def test_train_steps_as_shardy(name):
    model_name, rules = STEPS[name]
    traced = traced_model("models", model_name)
    check_step(traced, named_specs(traced, rules))


@pytest.mark.parametrize("state_too", [False, True])
@pytest.mark.parametrize("model_name", some(MORE_MODELS, "gnn", "llama", "mixtral", "rnn"))
def test_more_train_steps_as_shardy(model_name, state_too):
    """Data parallel; and with the state split as well, each array over its last dim that y divides."""
    traced = traced_model("more", model_name)
    state, batch = map(jax.tree.leaves, traced.args)
    specs = [last_dim(np.shape(x)) if state_too else None for x in state]
    check_step(traced, specs + [P("x") if np.ndim(x) else None for x in batch])


@pytest.mark.parametrize("name", some(["gpt scan", "gpt remat", "lstm"], "gpt remat", "lstm"))
def test_loops_under_fsdp_as_shardy(name):
    """Batch and weights want the same axes: who comes first at the carry of a loop decides for all that is inside."""
    traced, axes = traced_model("small", name), tuple(MESH)

    def largest(x):
        dims = [dim for dim, size in enumerate(np.shape(x)) if size % math.prod(MESH.values()) == 0]
        split = max(dims, key=lambda dim: np.shape(x)[dim], default=None)
        return P(*(axes if dim == split else None for dim in range(np.ndim(x))))

    state, batch = map(jax.tree.leaves, traced.args)
    check_step(traced, [*map(largest, state), *(P(axes) for _ in batch)])


def last_dim(shape):
    """The spec that splits the last dim of more than one channel over y."""
    dims = [dim for dim, size in enumerate(shape) if size % MESH["y"] == 0]
    return P(*[None] * dims[-1], "y") if dims else None


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


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@pytest.mark.parametrize("model_name", ["mlp", "moe", "tied"])
def test_any_specs_as_shardy(model_name, seed):
    traced = traced_model("models", model_name)
    shapes = [np.shape(x) for x in jax.tree.leaves(traced.args)]
    check_step(traced, random_specs(shapes, np.random.default_rng(seed)))


@pytest.mark.parametrize("count", some([30, 300], 30))
def test_random_programs_as_shardy(count):
    totals = Counter()

    @seed(1)
    @settings(GENERATED, max_examples=count)
    @given(st.data())
    def check(data):
        program = data.draw(random_programs.programs())
        mesh = data.draw(st.sampled_from(random_programs.MESHES))
        specs = data.draw(random_programs.specs(program.shapes, mesh))
        compared, others = check_against_shardy(program, program.arguments, specs, mesh)
        totals.update(programs=1, compared=compared, others=len(others))
        totals.update(instruction.text.split("[")[0].split()[0] for instruction in program.instructions)

    check()
    assert totals["programs"] == count and totals["compared"] > 5 * count
    assert totals["others"] <= 0.01 * totals["compared"]
    for nested in ("scan", "while", "cond", "grad"):
        assert totals[nested] >= count // 20


@pytest.mark.parametrize("model_name", MODELS)
def test_every_layout_is_one_and_a_fixed_point(model_name):
    traced = traced_model("models", model_name)
    program = traced.program
    specs = random_specs([np.shape(x) for x in jax.tree.leaves(traced.args)], np.random.default_rng(5))
    found = traced.spread(specs)
    assert len(found.values) == len(program.values)
    for value in program.values:
        layout = found.values[value.id]
        assert len(layout) == len(value.shape)
        assert len(axes_of(layout)) == sum(map(len, layout)), "an axis twice"
        assert {origin.axis for origin in found.origins[value.id]} == axes_of(layout)
    fixed = {value.id: found.values[value.id] for value in program.values}
    assert propagate_layouts(program, traced.rules, MESH, fixed).values == found.values


def test_nothing_fixed_nothing_split():
    found = Traced(attention, [array(8, 16, 64), *HEADS]).spread([None] * 5)
    assert not any(axes_of(layout) for layout in found.values.values())


def test_what_is_computed_twice_lies_as_written():
    """Of two equal equations Shardy splits the one that an array beside it splits."""

    def twice(x, y):
        return jnp.tanh(x), y + jnp.tanh(x)

    specs = P(None, None), P(None, "y")
    check_against_shardy(twice, [array(2, 4), array(2, 4)], specs)
    found = autoshard.propagate(twice, array(2, 4), array(2, 4), mesh=AbstractMesh((4, 2), ("x", "y")), in_specs=specs)
    assert [tuple(spec) for spec in found.outputs] == [(), (None, "y")]
