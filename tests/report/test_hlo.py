"""`read_collectives` on real compiled programs whose collectives are known by hand, and on each form XLA prints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
from autoshard.report.hlo import peak_bytes, read_collectives

P = PartitionSpec


def mesh_of(shape, names):
    return Mesh(np.array(jax.devices()[:8]).reshape(shape), names)


def compiled(fn, mesh, in_specs, out_specs, *shapes, **keywords):
    def shardings(specs):
        return jax.tree.map(lambda s: NamedSharding(mesh, s), specs, is_leaf=lambda x: isinstance(x, P))

    jitted = jax.jit(fn, in_shardings=shardings(in_specs), out_shardings=shardings(out_specs), **keywords)
    return jitted.lower(*(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes)).compile()


def check(hlo, mesh_shape, expected):
    """The oracle is the table itself: (kind, axes, count, bytes of all runs), in any order."""
    found = sorted((c.kind, c.axes, c.count, c.bytes) for c in read_collectives(hlo, mesh_shape))
    assert found == sorted(expected), found


def scanned(weights, x):
    return jax.lax.scan(lambda c, w: (c @ w, ()), x, weights)[0]


def looped_to(limit):
    """A while loop with a bound that only the loop condition shows."""
    return lambda w, x: jax.lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]


def branching(i, w, x):
    return jax.lax.switch(i, [lambda x: x, lambda x: x @ w, lambda x: jnp.tanh(x @ w)], x)


XY = mesh_of((4, 2), ("x", "y"))
XYZ = mesh_of((2, 2, 2), ("x", "y", "z"))
PROGRAMS = [
    # a contraction split over y: every device holds 16x32/4 float32 of the result
    ("matmul", lambda a, b: a @ b, XY, (P("x", "y"), P("y")), P("x"), ((16, 8), (8, 32)),
     [("all_reduce", ("y",), 1, 16 // 4 * 32 * 4)]),
    # over both: the result is whole
    ("matmul over two axes", lambda a, b: a @ b, XY, (P(None, ("x", "y")), P(("x", "y"))), P(), ((16, 8), (8, 32)),
     [("all_reduce", ("x", "y"), 1, 16 * 32 * 4)]),
    ("gather", lambda a: a * 2, XY, P("x"), P(), ((16, 8),), [("all_gather", ("x",), 1, 16 * 8 * 4)]),
    ("gather minor", lambda a: a * 2, XYZ, P(None, "y"), P(), ((16, 8),), [("all_gather", ("y",), 1, 16 * 8 * 4)]),
    ("gather two", lambda a: a * 2, XYZ, P(("x", "z")), P(), ((16, 8),), [("all_gather", ("x", "z"), 1, 16 * 8 * 4)]),
    # CPU prints a tuple of slices: the result is the whole local shard
    ("transpose", lambda a: a * 2, XY, P("x"), P(None, "x"), ((16, 8),), [("all_to_all", ("x",), 1, 16 * 8 // 4 * 4)]),
    ("permute", lambda a: a * 2, XYZ, P("x"), P("y"), ((16, 8),), [("collective_permute", ("x", "y"), 1, 16 * 4 * 4)]),
    # combined into one all-reduce of a tuple: 4x8 and 8x2 float32
    ("combined", lambda a, b: (a.sum(0), b.sum(0)), XY, (P("x"), P("x")), P(), ((16, 32), (16, 2)),
     [("all_reduce", ("x",), 1, (32 + 2) * 4)]),
    # five turns, each finishing [4, 8] float32 over y
    ("scan", scanned, XY, (P(None, "y"), P("x", "y")), P("x", "y"), ((5, 8, 8), (16, 8)),
     [("all_reduce", ("y",), 5, 5 * 4 * 8 * 4)]),
    ("while", looped_to(7), XY, (P("y"), P("x", "y")), P("x", "y"), ((8, 8), (16, 8)),
     [("all_reduce", ("y",), 7, 7 * 4 * 8 * 4)]),
]


@pytest.mark.parametrize("_name, fn, mesh, in_specs, out_specs, shapes, expected", PROGRAMS, ids=lambda x: str(x)[:24])
def test_compiled(_name, fn, mesh, in_specs, out_specs, shapes, expected):
    check(compiled(fn, mesh, in_specs, out_specs, *shapes).as_text(), mesh.shape, expected)


def test_oracle_can_fail():
    _, fn, mesh, in_specs, out_specs, shapes, expected = PROGRAMS[8]
    hlo = compiled(fn, mesh, in_specs, out_specs, *shapes).as_text()
    forgotten = hlo.replace('"known_trip_count":{"n":"5"}', '"known_trip_count":{"n":"4"}')
    assert forgotten != hlo
    with pytest.raises(AssertionError):
        check(forgotten, mesh.shape, expected)
    with pytest.raises(AssertionError):
        check(hlo.replace("all-reduce(", "negate("), mesh.shape, expected)


def test_trip_count_from_the_condition():
    _, fn, mesh, in_specs, out_specs, shapes, expected = PROGRAMS[8]
    hlo = compiled(fn, mesh, in_specs, out_specs, *shapes).as_text()
    check(hlo.replace("known_trip_count", "nothing_known"), mesh.shape, expected)


def test_branches_count_once_each():
    shardings = [NamedSharding(XY, spec) for spec in (P(), P("y"), P("x", "y"))]
    shapes = [jax.ShapeDtypeStruct((), jnp.int32)] + [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 8), (16, 8))]
    jitted = jax.jit(branching, in_shardings=shardings, out_shardings=NamedSharding(XY, P("x")))
    found = [c for c in read_collectives(jitted.lower(*shapes).compile().as_text(), XY.shape) if c.kind == "all_reduce"]
    assert [(c.axes, c.count, c.bytes) for c in found] == [(("y",), 1, 4 * 8 * 4)] * 2


def test_source_is_the_users_line():
    def double_and_sum(x):
        return (x * 2).sum(0)

    line = double_and_sum.__code__.co_firstlineno + 1
    hlo = compiled(double_and_sum, XY, P("x"), P(), (16, 8)).as_text()
    (collective,) = read_collectives(hlo, XY.shape)
    assert collective.source == f"test_hlo.py:{line}"


# One instruction as XLA prints it on GPU or in newer versions: (text, mesh, expected)
FORMS = [
    ("(f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%p), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}",
     ("all_gather", ("x",), 1, 8 * 4 * 4)),
    ("((f32[2]{0}, bf16[2]{0}), (f32[8]{0}, bf16[8]{0})) all-gather-start(%p, %q), replica_groups=[2,4]<=[4,2]T(1,0)",
     ("all_gather", ("x",), 1, 8 * 4 + 8 * 2)),
    ("f32[8,4]{1,0:T(8,128)} all-reduce-start(%p), replica_groups=mesh['x'=4,'y'=2] {'y'}, to_apply=%add",
     ("all_reduce", ("y",), 1, 8 * 4 * 4)),
    ("((f32[8,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%p), replica_groups=mesh['a'=4,'b'=2] {'a'}, to_apply=%add",
     ("reduce_scatter", ("x",), 1, 2 * 4 * 4)),
    ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0},{2,2}}",
     ("collective_permute", ("y",), 1, 8 * 4)),
    ("pred[8,4]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add",
     ("reduce_scatter", ("x", "y"), 1, 8 * 4)),
    ("s4[8,4]{1,0} all-to-all(%p), replica_groups=mesh['x'=4,'y'=2] {'x':(2)2}, dimensions={0}",
     ("all_to_all", ("x",), 1, 8 * 4 // 2)),
    ("f32[8]{0} all-reduce(%p), replica_groups=mesh['x'=4,'y'=2] {'x':(1)2}, to_apply=%add",
     ("all_reduce", ("x",), 1, 8 * 4)),
    ("f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, to_apply=%add",
     ("all_reduce", ("x",), 1, 8 * 4)),
    ("f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}, to_apply=%add",
     ("all_reduce", ("x",), 1, 8 * 4)),
    ("f32[8]{0} all-reduce(%p), replica_groups={}, to_apply=%add", ("all_reduce", ("x", "y"), 1, 8 * 4)),
    ("f8e4m3fn[8]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add", None),
    ("f32[8]{0} collective-permute(%p), source_target_pairs={{0,0},{1,1}}", None),
    ("f32[8]{0} all-gather-done(%p)", None),
]


@pytest.mark.parametrize("text, expected", FORMS)
def test_forms(text, expected):
    hlo = f"ENTRY %main (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n  ROOT %c = {text}\n}}\n"
    check(hlo, {"x": 4, "y": 2}, [expected] if expected else [])


def test_async_computations_and_calls_are_followed():
    hlo = """
%wrapped (p: f32[2]) -> f32[8] {
  ROOT %g = f32[8]{0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), metadata={source_file="/a/b.py" source_line=3}
}

ENTRY %main (p: f32[2]) -> f32[8] {
  %s = ((f32[2]{0}), f32[8]{0}) async-start(%p), calls=%wrapped
  %d = f32[8]{0} async-done(%s)
  %t = ((f32[2]{0}), f32[8]{0}) call-start(%p), to_apply=%wrapped
  %u = f32[8]{0} call-done(%t)
  ROOT %c = f32[8]{0} call(%p), to_apply=%wrapped
}
"""
    check(hlo, {"x": 4, "y": 2}, [("all_gather", ("x",), 1, 32)] * 3)
    assert {c.source for c in read_collectives(hlo, {"x": 4, "y": 2})} == {"b.py:3"}


def test_device_order():
    hlo = "ENTRY %m (p: f32[8]) -> f32[8] {\n  ROOT %c = f32[8]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}\n}\n"
    check(hlo, {"x": 2, "y": 2}, [("all_reduce", ("y",), 1, 32)])
    (collective,) = read_collectives(hlo, {"x": 2, "y": 2}, device_order=[0, 2, 1, 3])
    assert collective.axes == ("x",)


def test_wrong_mesh_and_wrong_text():
    hlo = compiled(lambda a: a * 2, XY, P("x"), P(), (16, 8)).as_text()
    with pytest.raises(MeshError, match="mesh has 4 devices"):
        read_collectives(hlo, {"x": 4})
    with pytest.raises(MeshError, match="no ENTRY"):
        read_collectives("not a module", {"x": 8})


def test_peak_bytes_counts_a_donated_argument_once():
    whole = compiled(lambda a: a * 2, XY, P("x"), P("x"), (16, 8))
    donated = compiled(lambda a: a * 2, XY, P("x"), P("x"), (16, 8), donate_argnums=0)
    assert peak_bytes(whole) - peak_bytes(donated) == 16 * 8 * 4 // 4
    assert peak_bytes(whole) >= 2 * 16 * 8 * 4 // 4
