"""What users say of shardings inside and outside a step is obeyed; what contradicts is named, both sides of it."""

import re
import warnings
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips

from autoshard import autoshard, plan, propagate
from autoshard.errors import ConflictError, MeshError
from autoshard.layout import layout_of
from autoshard.model.grouping import groups_of
from autoshard.propagation import rules_for

AXES = {"x": 4, "y": 2}
MESH = mesh_of(AXES)
W, X = (np.random.default_rng(i).normal(size=shape).astype(np.float32) for i, shape in enumerate([(16, 32), (8, 16)]))


def constrained(spec):
    """A step whose hidden layer is constrained."""

    def step(w, x):
        hidden = lax.with_sharding_constraint(jnp.tanh(x @ w), NamedSharding(MESH, spec))
        return (hidden @ w.T).sum(0), hidden

    return step


@pytest.mark.parametrize("spec", [P("x"), P(None, "x"), P("y", "x"), P(), P(None, ("x", "y")), P("x", P.UNCONSTRAINED)])
def test_a_constraint_is_obeyed(spec):
    step = autoshard(constrained(spec), mesh=MESH, topology=slow_chips(AXES))
    lowered = step.lower(W, X).as_text()
    assert "sdy.sharding_constraint" in lowered
    for got, want in zip(step(W, X), jax.jit(constrained(spec))(W, X), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    made = step.plan(W, X)
    wanted = layout_of(spec, 2)
    kept = [layout for layout in made.annotations.homes.values() if len(layout) == 2]
    assert any(all(a == b or open_ for a, b, open_ in zip(k, wanted, _open(spec), strict=True)) for k in kept)


def _open(spec):
    entries = [entry is P.UNCONSTRAINED for entry in spec]
    return entries + [False] * (2 - len(entries))


def test_a_constraint_costs_what_it_forces():
    free = plan(lambda w, x: (jnp.tanh(x @ w) @ w.T).sum(0), W, X, mesh=MESH, topology=slow_chips(AXES))
    whole = plan(lambda w, x: constrained(P())(w, x)[0], W, X, mesh=MESH, topology=slow_chips(AXES))
    assert whole.status == free.status == "optimal"
    assert whole.cost > 1.5 * free.cost


def test_constraints_with_open_dims_may_be_split_further():
    made = plan(constrained(P("x", P.UNCONSTRAINED)), W, X, mesh=MESH, topology=slow_chips(AXES))
    assert (("x",), ("y",)) in made.annotations.homes.values()


def test_a_region_written_per_device_is_one_equation():
    def step(w, x):
        part = jax.shard_map(
            lambda w, x: lax.psum(x @ w, "x"), mesh=MESH, in_specs=(P("x"), P(None, "x")), out_specs=P()
        )
        return jnp.sin(part(w * 2, jnp.cos(x)))

    made = plan(step, W, X, mesh=MESH, topology=slow_chips(AXES))
    np.testing.assert_allclose(
        autoshard(step, mesh=MESH, topology=slow_chips(AXES))(W, X), np.sin(np.cos(X) @ (W * 2)), rtol=1e-4, atol=1e-5
    )
    assert made.in_shardings[0].spec == P("x") and made.in_shardings[1].spec == P(None, "x")
    found = propagate(step, W, X, mesh=MESH, in_specs=(None, None))
    assert found.arguments == (P("x"), P(None, "x"))
    assert found.outputs == (P(),)


def test_propagation_says_where_a_sharding_came_from():
    found = propagate(constrained(P(None, "y")), W, X, mesh=MESH, in_specs=(None, P("x")))
    assert found.arguments == (P(None, "y"), P("x"))
    by_primitive = {value.equation.primitive: value for value in found.values if value.equation}
    (origin,) = by_primitive["sharding_constraint"].origins
    assert (origin.axis, origin.equation) == ("y", None)
    assert str(by_primitive["tanh"].origins[0]).startswith("'y' from value float32[8, 32] (test_annotations.py:")
    weight = next(value for value in found.values if value.value.name == "w")
    assert [origin.axis for origin in weight.origins] == ["y"]
    assert weight.origins[0].equation.primitive == "dot_general"
    assert weight.origins[0].start is by_primitive["sharding_constraint"].value


def test_contradictions_name_both_sides():
    with pytest.raises(ConflictError) as caught:
        plan(constrained(P("x")), W, X, mesh=mesh_of({"data": 8}))
    text = str(caught.value)
    assert re.search(r"sharding_constraint at test_annotations\.py:\d+ splits value float32\[8, 32\] over 'x'", text)
    assert "planned for the mesh {'data': 8}" in text

    def manual(x):
        return jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("x"), out_specs=P("x"))(x)

    other = AbstractMesh((2, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with pytest.raises(ConflictError, match=r"shard_map at test_annotations.py:\d+ is written for the mesh {'x': 4"):
        plan(manual, X, mesh=other)
    with pytest.raises(ConflictError, match=r"fixed\['\*'\] wants .*fixed\['w'\] wants it to be|Drop one"):
        plan(constrained(P("x")), W, X, mesh=MESH, fixed={"w": P("x"), "*": P("y")})
    with pytest.raises(MeshError, match=r"splits dim 0 of x float32\[8, 16\] over 16 devices|do not divide"):
        propagate(constrained(P("x")), W, X[:6], mesh=MESH, in_specs=(None, P("x")))


def test_a_given_plan_has_to_agree_with_what_is_fixed():
    step, options = constrained(P("x")), {"mesh": MESH, "topology": slow_chips(AXES)}
    made = plan(step, W, X, **options, fixed={"w": P("x")})
    assert autoshard(step, **options, plan=made, fixed={"w": P("x")}).plan(W, X).in_shardings[0].spec == P("x")
    with pytest.raises(ConflictError, match=r"fixed= wants w .* to be P\('y'.*the plan that is given has it P\('x'"):
        autoshard(step, **options, plan=made, fixed={"w": P("y")}).plan(W, X)


def doubled(x_ref, out_ref):
    out_ref[...] = x_ref[...] * 2


def with_kernel(x, interpret=False):
    call = pallas.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=interpret)
    return jnp.sin(call(jnp.cos(x)))


def test_a_kernel_is_kept_whole_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = autoshard(partial(with_kernel, interpret=True), mesh=MESH, topology=slow_chips(AXES))(X)
    np.testing.assert_allclose(got, np.sin(2 * np.cos(X)), rtol=1e-5, atol=1e-6)


def test_a_kernel_is_lowered_for_many_tpus():
    """JAX refuses to lower a kernel for several devices unless it is told that each runs it whole."""
    mesh = AbstractMesh(tuple(AXES.values()), tuple(AXES), axis_types=(AxisType.Auto,) * 2)
    lowered = autoshard(with_kernel, mesh=mesh, topology=slow_chips(AXES)).lower(jnp.ones((128, 256))).as_text()
    assert "tpu_custom_call" in lowered and "sdy.manual_computation" in lowered


# A constraint may say of a view what no layout says of what it views: the ordinary microbatch constraint.


def rearranged(draw, shape, mesh):
    """Some views, elementwise and other operations, and constraints in any place: [(kind, argument)]."""
    steps, shape = [], list(shape)
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(["split", "merge", "transpose", "tanh", "add", "product", "constraint"]))
        if kind == "split":
            dim = draw(st.integers(0, len(shape) - 1))
            piece = draw(st.sampled_from([piece for piece in range(1, shape[dim] + 1) if shape[dim] % piece == 0]))
            shape[dim : dim + 1] = [piece, shape[dim] // piece]
            steps.append(("reshape", tuple(shape)))
        elif kind == "merge" and len(shape) > 1:
            dim = draw(st.integers(0, len(shape) - 2))
            shape[dim : dim + 2] = [shape[dim] * shape[dim + 1]]
            steps.append(("reshape", tuple(shape)))
        elif kind == "transpose":
            order = draw(st.permutations(range(len(shape))))
            shape = [shape[dim] for dim in order]
            steps.append((kind, tuple(order)))
        elif kind == "constraint":
            dims = [() for _ in shape]
            for axis in draw(st.permutations(list(mesh))):  # in any order, evenly or not
                if draw(st.booleans()):
                    dims[draw(st.integers(0, len(shape) - 1))] += (axis,)
            entries = [dim or draw(st.sampled_from([None, P.UNCONSTRAINED])) for dim in dims]
            steps.append((kind, P(*entries)))
        elif kind != "merge":
            steps.append((kind, None))
    return steps


def running(steps, mesh):
    def run(x):
        for kind, said in steps:
            if kind == "constraint":
                x = lax.with_sharding_constraint(x, NamedSharding(mesh, said))
            elif said is not None:
                x = getattr(jnp, kind)(x, said)
            elif kind == "product":
                x = x @ jnp.full((x.shape[-1], x.shape[-1]), 1 / x.shape[-1], x.dtype)
            else:
                x = jnp.tanh(x) if kind == "tanh" else x + jnp.arange(x.shape[-1], dtype=x.dtype)
        return x

    return run


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.data())
def test_constraints_among_views(data):
    axes = data.draw(st.sampled_from([{"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}, {"x": 3, "y": 2}]))
    shape = data.draw(st.lists(st.sampled_from([2, 3, 4, 6, 8, 24]), min_size=1, max_size=3))
    step = running(rearranged(data.draw, shape, axes), mesh_of(axes))
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    found = autoshard(step, mesh=mesh_of(axes), topology=slow_chips(axes))(x)
    np.testing.assert_allclose(found, jax.jit(step)(x), rtol=1e-5, atol=1e-5)


MICROBATCHES = {  # what is constrained, and whether a layout of what it views says it, so that both are one group
    "a minor dim of a split one": (P(None, "x"), False),
    "a major dim of a split one": (P("x"), True),
    "both, the major one to its end": (P("x", "y"), True),
    "both, in another order than the mesh's": (P("y", "x"), False),
    "what splits neither evenly": (P(None, None, ("x", "y")), True),
    "an open dim and a minor one": (P(P.UNCONSTRAINED, "x"), False),
}


@pytest.mark.parametrize("case", MICROBATCHES)
def test_microbatches(case):
    spec, together = MICROBATCHES[case]

    def step(w, x):
        batches = lax.with_sharding_constraint(x.reshape(4, 8, 6), NamedSharding(MESH, spec))
        return lax.scan(lambda loss, x: (loss + jnp.tanh(x @ w).sum(), None), 0.0, batches)[0]

    w, x = np.ones((6, 8), np.float32) / 6, np.arange(32 * 6, dtype=np.float32).reshape(32, 6) / 99
    step = autoshard(step, mesh=MESH, topology=slow_chips(AXES))
    program = step.trace(w, x)
    found = groups_of(program, rules_for(program), mesh=AXES)
    grouped = [[equation.primitive for equation in group.equations] for group in found if group.given]
    assert grouped == [["reshape", "sharding_constraint"] if together else ["sharding_constraint"]]
    np.testing.assert_allclose(step(w, x), np.tanh(x @ w).sum(), rtol=1e-5)
    assert any(layout == layout_of(spec, 3) for layout in step.plan(w, x).annotations.homes.values()) or case in (
        "what splits neither evenly",
        "an open dim and a minor one",
    )


def on_host(spec):
    return NamedSharding(MESH, spec, memory_kind="pinned_host")


def constrained_there(specs):
    """Constraints, side by side, of what lies in the host's memory."""
    return lambda x: [lax.with_sharding_constraint(x, on_host(spec)) for spec in specs]


def test_what_is_said_twice_of_the_host_s_memory():
    x = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=on_host(P()))
    assert plan(constrained_there([P("x", "y")] * 2), x, mesh=MESH).in_shardings[0].spec == P("x", "y")
    here = r"sharding_constraint at test_annotations\.py:\d+ wants P\("
    with pytest.raises(ConflictError, match=rf"x float32<host>\[8, 8\] lies in.*{here}'x', 'y'\), and {here}'y'"):
        plan(constrained_there([P("x", "y"), P("y")]), x, mesh=MESH)
    with pytest.raises(ConflictError, match=rf"fixed= wants P\('y'.*, and {here}'x'"):
        plan(constrained_there([P("x")]), x, mesh=MESH, fixed={"x": P("y")})
