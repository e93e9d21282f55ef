"""Annotated programs compute what the plain function computes, however their inner values are sharded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips

import autoshard
from autoshard.jaxprs import REMAT
from autoshard.layout import Layout, layouts_of
from autoshard.lower import annotated
from autoshard.plans.annotations import Annotations
from autoshard.program import Program, Value, trace

MESH = mesh_of({"x": 4, "y": 2})
W = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(16, 8)).astype(np.float32)


@jax.custom_jvp
def steep(x):
    return jnp.tanh(x)


steep.defjvp(lambda primals, tangents: (steep(*primals), 7 * tangents[0]))


@jax.custom_vjp
def odd_gradient(x, w):
    return jnp.sin(x @ w)


odd_gradient.defvjp(lambda x, w: (odd_gradient(x, w), (x, w)), lambda kept, g: (2 * g @ kept[1].T, 3 * kept[0].T @ g))


def scan(w, x):
    def body(carry, row):
        total, y = carry
        y = jnp.tanh(y @ w) + row
        return (total + y.sum(), y), y.max(1)

    rows = jnp.stack([x, 2 * x, x - 1])
    return jax.lax.scan(body, (0.0, x), rows, reverse=True)


def while_loop(w, x):
    return jax.lax.while_loop(
        lambda c: (c[0] < 3) & (jnp.abs(c[1] @ w).max() < 1e3), lambda c: (c[0] + 1, jnp.tanh(c[1] @ w) * 2), (0, x)
    )


def cond(w, x):
    return jax.lax.cond(x.sum() > 0, lambda: (x @ w, x.T), lambda: (x + 1, (x @ w).T))


def switch(w, x):
    return jax.lax.switch(jnp.int32(x[0, 0] > -9) + 1, [lambda x: x, lambda x: x @ w, lambda x: jnp.sin(x) @ w.T], x)


def remat(w, x):
    return jax.checkpoint(lambda x: jnp.sin(jnp.tanh(x @ w)) @ w)(x)


def remat_gradient(w, x):
    return jax.grad(lambda w: remat(w, x).sum())(w)


def nested(w, x):
    @jax.checkpoint
    def layer(x, w):
        x = jax.lax.cond(x.sum() > 0, lambda: odd_gradient(x, w), lambda: steep(x))
        return jax.lax.fori_loop(0, 2, lambda i, x: steep(x @ w) + i, x), x.mean()

    loss = lambda w: sum(map(jnp.sum, jax.lax.scan(layer, x, jnp.stack([w, w.T]))))  # noqa: E731
    return jax.value_and_grad(loss)(w)


def literal_results(w, x):
    return w, 3.0, jnp.zeros((4, 4)), x + jnp.arange(8)


PROGRAMS = {
    "cond": cond,
    "custom_jvp": lambda w, x: steep(x @ w) @ w,
    "custom_jvp gradient": lambda w, x: jax.grad(lambda w: steep(x @ w).sum())(w),
    "custom_vjp": lambda w, x: odd_gradient(odd_gradient(x, w), w),
    "custom_vjp gradient": lambda w, x: jax.grad(lambda w: odd_gradient(x, w).sum())(w),
    "jit": lambda w, x: jax.jit(lambda x: jax.nn.relu(x @ w))(x).sum(0),
    "literal results": literal_results,
    "nested": nested,
    "remat": remat,
    "remat gradient": remat_gradient,
    "scan": scan,
    "scan gradient": lambda w, x: jax.grad(lambda w: scan(w, x)[0][0])(w),
    "sort": lambda w, x: jnp.sort(x @ w, axis=0)[::2],
    "switch": switch,
    "while": while_loop,
}
TRACED: dict[str, Program] = {name: trace(fn, (W, X), {}) for name, fn in PROGRAMS.items()}


@st.composite
def annotations(draw, program: Program) -> Annotations:
    """Any layouts for the values of `program`, for the copies its readers share, and for its operands."""

    def layout(value: Value) -> Layout:
        return draw(st.sampled_from(layouts_of(value.shape, {"x": 4, "y": 2})))

    some = st.booleans() if draw(st.booleans()) else st.just(True)
    homes = {value.id: layout(value) for value in program.values if value.shape and draw(some)}
    copies = {value.id: layout(value) for value in program.values if value.shape and draw(st.booleans())}
    wants = {}
    for equation in program.equations:
        operands = {(equation.index, i): x for i, x in enumerate(equation.inputs) if isinstance(x, Value) and x.shape}
        if equation.primitive in ("scan_carry", "branch_join") and operands:  # all that meets here has one layout
            one = layout(equation.outputs[0])
            wants |= dict.fromkeys(operands, one)
            homes |= {output.id: one for output in equation.outputs}
        else:
            wants |= {key: layout(value) for key, value in operands.items() if draw(some)}
    return Annotations(homes, copies, wants)


def assert_computes(name: str, chosen: Annotations) -> None:
    """The annotated program gives the numbers, shapes and types of the plain function."""
    expected = jax.tree.leaves(jax.jit(PROGRAMS[name])(W, X))
    found = jax.jit(annotated(TRACED[name], chosen, MESH))(W, X)
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert jnp.shape(ours) == theirs.shape and jnp.result_type(ours) == theirs.dtype
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=2, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_any_sharding_computes_the_same(name, data):
    assert_computes(name, data.draw(annotations(TRACED[name])))


def test_the_oracle_sees_a_wrong_program(monkeypatch):
    """A program whose results come in another order is found out."""
    swapped = dataclasses.replace(TRACED["scan"], jaxpr=trace(lambda w, x: scan(w, x * 1.001), (W, X), {}).jaxpr)
    monkeypatch.setitem(TRACED, "scan", swapped)
    with pytest.raises(AssertionError):
        assert_computes("scan", Annotations({}, {}, {}))


def primitives_of(jaxpr) -> set[str]:
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for param in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns")):
            inner = getattr(param, "jaxpr", param)
            found |= primitives_of(inner) if hasattr(inner, "eqns") else set()
    return found


KEPT = {
    "cond": {"cond"},
    "custom_jvp": {"custom_jvp_call"},
    "custom_vjp": {"custom_jvp_call"},
    "remat": REMAT,
    "scan": {"scan"},
    "switch": {"cond"},
    "while": {"while"},
}


@pytest.mark.parametrize("name", KEPT)
def test_control_flow_stays_what_it_is(name):
    jaxpr = jax.make_jaxpr(annotated(TRACED[name], Annotations({}, {}, {}), MESH))(W, X).jaxpr
    assert KEPT[name] & primitives_of(jaxpr)


def test_values_are_made_where_the_plan_says():
    """One constraint for a home, one for a copy; none where a reader wants what is there."""
    program = trace(lambda w, x: jnp.sin(x @ w), (W, X), {})
    dot, sin = program.equations
    home, copy = ((("x",), ()), ((), ()))
    value = dot.outputs[0].id

    def shardings(**chosen):
        made = Annotations(**({"homes": {}, "copies": {}, "wants": {}} | chosen))
        jaxpr = jax.make_jaxpr(annotated(program, made, MESH))(W, X).jaxpr
        return [eqn.params["sharding"].spec for eqn in jaxpr.eqns if eqn.primitive.name == "sharding_constraint"]

    spec = NamedSharding(MESH, jax.P("x")).spec
    assert shardings() == []
    assert shardings(homes={value: home}) == [spec]
    assert shardings(homes={value: home}, wants={(sin.index, 0): home}) == [spec]
    assert shardings(homes={value: home}, wants={(sin.index, 0): copy}) == [spec, jax.P()]
    assert shardings(homes={value: home}, copies={value: copy}, wants={(sin.index, 0): copy}) == [spec, jax.P()]
    assert shardings(homes={program.arguments[0].id: home}) == []  # jit's in_shardings place the arguments


def test_what_is_computed_twice_is_emitted_once():
    def fn(w, x):
        return jax.lax.scan(lambda c, _: (c + jnp.sin(w) - 2 * jnp.sin(w), jnp.cos(w) * jnp.cos(w)), x, length=2)

    emitted = annotated(trace(fn, (X, X), {}), Annotations({}, {}, {}), MESH)
    (scan,) = (eqn for eqn in jax.make_jaxpr(emitted)(X, X).jaxpr.eqns if eqn.primitive.name == "scan")
    made = [eqn.primitive.name for eqn in scan.params["jaxpr"].jaxpr.eqns]
    assert made.count("sin") == made.count("cos") == 1
    for ours, theirs in zip(emitted(X, X), fn(X, X), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize("name", ["nested", "scan gradient", "while"])
def test_solved_plans_of_loops_compute_the_same(name):
    decorated = autoshard.autoshard(PROGRAMS[name], mesh=MESH, topology=slow_chips(MESH.axis_names), time_limit=10)
    found, expected = decorated(W, X), jax.jit(PROGRAMS[name])(W, X)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def constraints(fn, home):
    """(primitive that makes it, spec) of every constraint, in a program whose product is made in layout `home`."""
    program = trace(fn, (W, X), {})
    product = next(e.outputs[0] for e in program.equations if e.primitive == "dot_general")
    closed = jax.make_jaxpr(annotated(program, Annotations({product.id: home}, {}, {}), MESH))(W, X)
    maker = {var: eqn.primitive.name for eqn in closed.jaxpr.eqns for var in eqn.outvars}
    return [
        (maker[eqn.invars[0]], eqn.params["sharding"].spec)
        for eqn in closed.jaxpr.eqns
        if eqn.primitive.name == "sharding_constraint"
    ]


def test_what_is_only_transposed_is_constrained_in_that_order():
    """So that XLA makes a gradient as the weight lies; with the constraint in between, it turns the weight round."""
    home, turned = (("x",), ("y",)), jax.sharding.PartitionSpec("y", "x")
    assert constraints(lambda w, x: w + (x.T @ x).T, home) == [("transpose", turned)]
    as_made = [("dot_general", jax.sharding.PartitionSpec("x", "y"))]
    assert constraints(lambda w, x: (w + (y := x.T @ x).T, y), home) == as_made  # somebody else reads it
    assert constraints(lambda w, x: w + (x.T @ x), home) == as_made


def on_platforms(x):
    """A product on TPU, a sum on CPU, nothing much elsewhere."""
    return jax.lax.platform_dependent(x, tpu=lambda x: x @ x, cpu=lambda x: x + x.sum(0), default=jnp.sin)


def only_elsewhere(x):
    """A kernel that no CPU runs, whatever is around it."""
    kernel = pallas.pallas_call(lambda x, out: None, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype))
    return jax.lax.platform_dependent(x, tpu=kernel, default=jnp.cos)


PLATFORM_DEPENDENT = {
    "alone": on_platforms,
    "a kernel": only_elsewhere,
    "gradient": jax.grad(lambda x: on_platforms(x).sum()),
    "vmapped": lambda x: jax.vmap(on_platforms)(jnp.stack([x, 2 * x])),
    "rematerialised": jax.grad(lambda x: jax.checkpoint(on_platforms)(x).sum()),
    "in a loop": lambda x: jax.lax.scan(lambda c, _: (only_elsewhere(c), None), x, None, length=2)[0],
    "gradient through a loop": jax.grad(
        lambda x: jax.lax.scan(lambda c, _: (jnp.sin(on_platforms(c)), None), x, None, length=2)[0].sum()
    ),
    "in a branch": lambda x: jax.lax.cond(x.sum() > 0, on_platforms, only_elsewhere, x),
}


@pytest.mark.parametrize("name", PLATFORM_DEPENDENT)
def test_only_branches_of_the_platform_are_lowered(name):
    fn, x = PLATFORM_DEPENDENT[name], jnp.arange(64.0).reshape(8, 8) / 99
    mesh = mesh_of({"x": 4, "y": 2})
    np.testing.assert_allclose(autoshard.autoshard(fn, mesh=mesh)(x), jax.jit(fn)(x), rtol=1e-5, atol=1e-5)


def test_a_branch_is_lowered_for_the_platform_it_is_for():
    sharded = autoshard.autoshard(on_platforms, mesh=mesh_of({"x": 4, "y": 2}))
    lowering = sharded.plan(jnp.ones((8, 8))).lowering
    here, there = lowering().as_text(), lowering(AbstractMesh((4, 2), ("x", "y"))).as_text()  # for TPU
    assert ("dot_general" in here, "reduce" in here, "sine" in here) == (False, True, False)
    assert ("dot_general" in there, "sine" in there) == (True, False)


@pytest.mark.parametrize(("machine", "product"), [("v5e:4x2", True), ("cpu:8", False), ("h100:8", False)])
def test_only_what_the_platform_runs_is_planned(machine, product):
    """The same program everywhere, so that a plan can be used elsewhere too; but a plan of one branch."""
    mesh = AbstractMesh((4, 2), ("x", "y"))
    sharded = autoshard.autoshard(on_platforms, mesh=mesh, topology=machine)
    made = sharded.plan(jnp.ones((1024, 1024)))
    taken = (lambda x: x @ x) if product else (lambda x: x + x.sum(0)) if "cpu" in machine else jnp.sin
    alone = autoshard.plan(
        lambda x: jax.lax.platform_dependent(x, default=taken), jnp.ones((1024, 1024)), mesh=mesh, topology=machine
    )
    assert made.predicted.step_seconds == pytest.approx(alone.predicted.step_seconds, rel=1e-3)
    assert made.predicted.peak_bytes == pytest.approx(alone.predicted.peak_bytes, rel=1e-3)
    assert made.fingerprint == sharded.trace(jnp.ones((1024, 1024))).fingerprint
    here = autoshard.autoshard(on_platforms, mesh=mesh_of({"x": 4, "y": 2}), plan=made)
    np.testing.assert_allclose(here(jnp.ones((1024, 1024))), 1025)


def on_host(x):
    with compute_on("device_host"):
        return 2 * x


def with_metadata(x):
    with set_xla_metadata(said="around"):
        return 2 * x


def with_other_bits(x):
    with jax.threefry_partitionable(not jax.config.jax_threefry_partitionable):
        other = jax.random.uniform(jax.random.key(0), x.shape)
    return x + other - 2 * jax.random.uniform(jax.random.key(0), x.shape)


COMPUTES_ON = pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="there it is an equation of its own")


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("fn, text", [
    pytest.param(on_host, "_xla_compute_type", marks=COMPUTES_ON),
    (with_metadata, 'said = "around"'),
    (with_other_bits, ""),
])  # fmt: skip
def test_what_is_said_around_an_equation_holds(fn, text, loop):
    def looped(x):
        return jax.lax.scan(lambda carry, _: (fn(carry), None), x, length=2)[0]

    step, x = looped if loop else fn, jnp.arange(8.0)
    sharded = autoshard.autoshard(step, mesh=MESH, topology=slow_chips(MESH.shape))
    np.testing.assert_allclose(sharded(x), jax.jit(step)(x), rtol=1e-6)
    assert text in jax.jit(step).lower(x).as_text()
    assert text in sharded.lower(x).as_text()


@pytest.mark.parametrize("rows, columns", [(("x",), ("x", "y")), (("x", "y"), ("y",)), (("y",), ("y", "x"))])
def test_axes_of_unlike_sizes(rows, columns):
    """Arguments, an inner constraint and results all lie as XLA cannot reshard in one step."""
    mesh = mesh_of({"x": 3, "y": 2})
    before, after = P(rows), P(None, columns)

    def fn(x):
        y = jax.lax.with_sharding_constraint(2 * x, NamedSharding(mesh, after))
        return jax.lax.with_sharding_constraint(y + 1, NamedSharding(mesh, before)).T

    step = autoshard.autoshard(fn, mesh=mesh, topology=slow_chips(mesh.shape), fixed={"x": before})
    x = np.arange(144, dtype=np.float32).reshape(12, 12)
    np.testing.assert_array_equal(step(x), (2 * x + 1).T)
