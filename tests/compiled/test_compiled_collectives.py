"""`read_collectives` on real compiled programs whose collectives are known by hand, and on each form XLA prints."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.compiled.collectives import equation_of, peak_bytes, read_collectives
from autoshard.compiled.module import Module
from autoshard.errors import MeshError

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
    (
        "matmul",
        lambda a, b: a @ b,
        XY,
        (P("x", "y"), P("y")),
        P("x"),
        ((16, 8), (8, 32)),
        [("all_reduce", ("y",), 1, 16 // 4 * 32 * 4)],
    ),
    # over both: the result is whole
    (
        "matmul over two axes",
        lambda a, b: a @ b,
        XY,
        (P(None, ("x", "y")), P(("x", "y"))),
        P(),
        ((16, 8), (8, 32)),
        [("all_reduce", ("x", "y"), 1, 16 * 32 * 4)],
    ),
    ("gather", lambda a: a * 2, XY, P("x"), P(), ((16, 8),), [("all_gather", ("x",), 1, 16 * 8 * 4)]),
    ("gather minor", lambda a: a * 2, XYZ, P(None, "y"), P(), ((16, 8),), [("all_gather", ("y",), 1, 16 * 8 * 4)]),
    ("gather two", lambda a: a * 2, XYZ, P(("x", "z")), P(), ((16, 8),), [("all_gather", ("x", "z"), 1, 16 * 8 * 4)]),
    # CPU prints a tuple of slices: the result is the whole local shard
    ("transpose", lambda a: a * 2, XY, P("x"), P(None, "x"), ((16, 8),), [("all_to_all", ("x",), 1, 16 * 8 // 4 * 4)]),
    ("permute", lambda a: a * 2, XYZ, P("x"), P("y"), ((16, 8),), [("collective_permute", ("x", "y"), 1, 16 * 4 * 4)]),
    # said to be for a product, but no turn of a windowed einsum: nobody who has the right rows already moves any
    (
        "permute and multiply",
        lambda a, b: a @ b,
        XYZ,
        (P("x"), P()),
        P("y"),
        ((16, 8), (8, 32)),
        [("collective_permute", ("x", "y"), 1, 16 // 2 * 8 * 4)],
    ),
    # combined into one all-reduce of a tuple: 4x8 and 8x2 float32
    (
        "combined",
        lambda a, b: (a.sum(0), b.sum(0)),
        XY,
        (P("x"), P("x")),
        P(),
        ((16, 32), (16, 2)),
        [("all_reduce", ("x",), 1, (32 + 2) * 4)],
    ),
    # five turns, each finishing [4, 8] float32 over y
    (
        "scan",
        scanned,
        XY,
        (P(None, "y"), P("x", "y")),
        P("x", "y"),
        ((5, 8, 8), (16, 8)),
        [("all_reduce", ("y",), 5, 5 * 4 * 8 * 4)],
    ),
    (
        "while",
        looped_to(7),
        XY,
        (P("y"), P("x", "y")),
        P("x", "y"),
        ((8, 8), (16, 8)),
        [("all_reduce", ("y",), 7, 7 * 4 * 8 * 4)],
    ),
]


SCAN = next(program[1:] for program in PROGRAMS if program[0] == "scan")


@pytest.mark.parametrize("_name, fn, mesh, in_specs, out_specs, shapes, expected", PROGRAMS, ids=lambda x: str(x)[:24])
def test_compiled(_name, fn, mesh, in_specs, out_specs, shapes, expected):
    check(compiled(fn, mesh, in_specs, out_specs, *shapes).as_text(), mesh.shape, expected)


def test_oracle_can_fail():
    fn, mesh, in_specs, out_specs, shapes, expected = SCAN
    hlo = compiled(fn, mesh, in_specs, out_specs, *shapes).as_text()
    forgotten = hlo.replace('"known_trip_count":{"n":"5"}', '"known_trip_count":{"n":"4"}')
    assert forgotten != hlo
    with pytest.raises(AssertionError):
        check(forgotten, mesh.shape, expected)
    with pytest.raises(AssertionError):
        check(hlo.replace("all-reduce(", "negate("), mesh.shape, expected)


def test_trip_count_from_the_condition():
    fn, mesh, in_specs, out_specs, shapes, expected = SCAN
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
    assert collective.source == f"test_compiled_collectives.py:{line}"


# One instruction as XLA prints it on GPU or in newer versions: (text, mesh, expected)
FORMS = [
    (
        "(f32[2,4]{1,0}, f32[8,4]{1,0}) all-gather-start(%p), channel_id=1, replica_groups={{0,2,4,6},{1,3,5,7}}",
        ("all_gather", ("x",), 1, 8 * 4 * 4),
    ),
    (
        "((f32[2]{0}, bf16[2]{0}), (f32[8]{0}, bf16[8]{0})) all-gather-start(%p, %q), "
        "replica_groups=[2,4]<=[4,2]T(1,0)",
        ("all_gather", ("x",), 1, 8 * 4 + 8 * 2),
    ),
    (
        "f32[8,4]{1,0:T(8,128)} all-reduce-start(%p), replica_groups=mesh['x'=4,'y'=2] {'y'}, to_apply=%add",
        ("all_reduce", ("y",), 1, 8 * 4 * 4),
    ),
    (
        "((f32[8,4]{1,0}), f32[2,4]{1,0}) reduce-scatter-start(%p), "
        "replica_groups=mesh['a'=4,'b'=2] {'a'}, to_apply=%add",
        ("reduce_scatter", ("x",), 1, 2 * 4 * 4),
    ),
    (
        "(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0},{2,2}}",
        ("collective_permute", ("y",), 1, 8 * 4),
    ),
    (
        "pred[8,4]{1,0} reduce-scatter(%p), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add",
        ("reduce_scatter", ("x", "y"), 1, 8 * 4),
    ),
    (
        "s4[8,4]{1,0} all-to-all(%p), replica_groups=mesh['x'=4,'y'=2] {'x':(2)2}, dimensions={0}",
        ("all_to_all", ("x",), 1, 8 * 4 // 2),
    ),
    (
        "f32[8]{0} all-reduce(%p), replica_groups=mesh['x'=4,'y'=2] {'x':(1)2}, to_apply=%add",
        ("all_reduce", ("x",), 1, 8 * 4),
    ),
    (
        "f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, to_apply=%add",
        ("all_reduce", ("x",), 1, 8 * 4),
    ),
    (
        "f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'b'}, to_apply=%add",
        ("all_reduce", ("x",), 1, 8 * 4),
    ),
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


# Traps of TPU programs, in short texts of the forms that XLA prints for v5e.

MESH = {"x": 4, "y": 2}  # partition 2 * x + y
OVER_X = "replica_groups=[2,4]<=[4,2]T(1,0)"
NEXT = "source_target_pairs={{0,2},{2,4},{4,6},{6,0},{1,3},{3,5},{5,7},{7,1}}"  # round x
BACK = "source_target_pairs={{0,6},{2,0},{4,2},{6,4},{1,7},{3,1},{5,3},{7,5}}"
SWAP = "source_target_pairs={{0,0},{1,2},{2,1},{3,3},{4,4},{5,6},{6,5},{7,7}}"  # of y and half of x
PRODUCT = 'metadata={op_name="jit(f)/dot_general" stack_frame_id=3}'


def computation(name, *lines):
    return f"{name} (p: f32[8]) -> f32[8] {{\n" + "".join(f"  {line}\n" for line in lines) + "}\n"


def entry(*lines):
    return computation("ENTRY %main", "%p = f32[2,8]{1,0} parameter(0)", *lines)


def gathered(channel):
    return f"ROOT %g = f32[8]{{0}} all-gather(%p), channel_id={channel}, {OVER_X}"


def fused(callee, name="f"):
    return f'%f = f32[8]{{0}} fusion(%p), kind=kLoop, calls=%{callee}, metadata={{op_name="{name}"}}'


def called(callee):
    return f"%f = f32[8]{{0}} call(%p), to_apply=%{callee}"


def beside(step):
    """The n-th part of a gather that runs beside other work; a part says nothing of where it comes from."""
    return gathered(7) + f', backend_config={{"async_collective_fusion_config":{{"flag_start":"{step}"}}}}'


def loop(body, trips, name="w"):
    note = f'backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%{name} = f32[8] while(%p), condition=%test, body=%{body}, {note}"


def handed(name, channel, pairs, operand="%p", said=PRODUCT):
    """A collective-permute of 64 bytes."""
    return f"%{name} = (f32[2,8]{{1,0}}, f32[2,8]{{1,0}}, u32[], u32[]) collective-permute-start({operand}), " \
           f"channel_id={channel}, {pairs}, {said}"  # fmt: skip


TEST = computation("%test", "ROOT %t = pred[] constant(true)")
AG, RS = "wide.windowed_dot_general_body_ag.clone", "windowed_dot_general_body_rs.sunk"
BOTH_WAYS = [handed("a", 1, NEXT), handed("b", 2, BACK)]
ZEROS = "%zeros = f32[2,8]{1,0} broadcast(%zero), dimensions={}"
UNROLLED = [handed("a", 1, NEXT), handed("b", 2, BACK), handed("c", 3, NEXT, "%a")]
AGAIN = [handed("d", 4, NEXT), handed("e", 5, BACK), handed("f", 6, NEXT, "%d")]
SUMMED = [
    ZEROS, handed("a", 1, NEXT, "%zeros"), handed("b", 2, BACK, "%zeros"), handed("c", 3, NEXT, "%sum.1"),
    handed("d", 4, BACK, "%sum.2"), handed("e", 5, NEXT, "%sum.3"),
]  # fmt: skip
SUMMED_UP = f"%r = f32[8]{{0}} all-reduce(%p), channel_id=1, {OVER_X}, to_apply=%add"
WHOLE, PART = ("all_gather", ("x",), 1, 4 * 64), ("reduce_scatter", ("x",), 1, 64)
OTHERS = handed("a", 1, NEXT, said='metadata={op_name="jit(f)/roll"}')
TRAPS = {  # text, what is in it
    "one channel in two fusions": (
        computation("%one", gathered(7)) + computation("%other", gathered(7)) + entry(fused("one"), fused("other")),
        [("all_gather", ("x",), 1, 32)],
    ),
    "one channel in a loop and in a loop inside": (
        TEST + computation("%one", gathered(7)) + computation("%inner", fused("one"))
        + computation("%outer", loop("inner", 3), fused("one")) + entry(loop("outer", 5)),
        [("all_gather", ("x",), 5, 5 * 32)],
    ),
    "one channel beside different work, in a loop": (
        TEST + computation("%one", beside(-1)) + computation("%two", beside(2)) + computation("%three", beside(2))
        + computation("%layer", fused("two", "a"), fused("three", "b"))
        + entry(fused("one"), loop("layer", 5), fused("two")),
        [("all_gather", ("x",), 1, 32)],
    ),
    "one channel before a loop, and in it": (
        TEST + computation("%one", beside(-1)) + computation("%two", beside(2))
        + computation("%layer", fused("one", "a"), fused("two", "b"))
        + entry(fused("one"), fused("two"), loop("layer", 5)),
        [("all_gather", ("x",), 1, 32), ("all_gather", ("x",), 5, 5 * 32)],
    ),
    "one channel before a loop, and in it, each by itself": (
        TEST + computation("%layer", gathered(7)) + entry(gathered(7).removeprefix("ROOT "), loop("layer", 5)),
        [("all_gather", ("x",), 1, 32), ("all_gather", ("x",), 5, 5 * 32)],
    ),
    "one channel, scattered before a loop and in it": (
        TEST + "".join(computation(f"%all-reduce-scatter.{i}", SUMMED_UP) for i in (1, 2))
        + computation("%layer", fused("all-reduce-scatter.1")) + entry(fused("all-reduce-scatter.2"), loop("layer", 5)),
        [("reduce_scatter", ("x",), 1, 8), ("reduce_scatter", ("x",), 5, 5 * 8)],
    ),
    "one channel, twice": (
        entry(gathered(7).removeprefix("ROOT "), gathered(7)), [("all_gather", ("x",), 1, 32)] * 2,
    ),
    "one channel, called before a loop and in it": (
        TEST + computation("%one", gathered(7)) + computation("%other", gathered(7))
        + computation("%layer", called("one")) + entry(called("other"), loop("layer", 5)),
        [("all_gather", ("x",), 1, 32), ("all_gather", ("x",), 5, 5 * 32)],
    ),
    "one channel in a fusion that is called": (
        computation("%one", gathered(7)) + computation("%inner", fused("one")) + computation("%other", gathered(7))
        + entry(called("inner"), fused("other")),
        [("all_gather", ("x",), 1, 32)],
    ),
    "two channels": (
        computation("%one", gathered(7)) + computation("%other", gathered(8)) + entry(fused("one"), fused("other")),
        [("all_gather", ("x",), 1, 32)] * 2,
    ),
    "a reduce_scatter": (
        computation("%all-reduce-scatter.3", SUMMED_UP)
        + entry(fused("all-reduce-scatter.3")),
        [("reduce_scatter", ("x",), 1, 8)],
    ),
    "a loop that gathers": (TEST + computation(f"%{AG}", *BOTH_WAYS) + entry(loop(AG, 2)), [WHOLE]),
    "a loop that scatters": (TEST + computation(f"%{RS}", *BOTH_WAYS) + entry(loop(RS, 2)), [PART]),
    "a turn before the loop, and one after": (
        TEST + computation(f"%{AG}", *BOTH_WAYS)
        + entry(handed("c", 3, NEXT), loop(AG, 1), handed("d", 4, NEXT, "%sum")),
        [WHOLE],
    ),
    "in a loop over layers": (
        TEST + computation(f"%{RS}", *BOTH_WAYS) + computation("%layer", loop(RS, 2)) + entry(loop("layer", 6)),
        [("reduce_scatter", ("x",), 6, 6 * 64)],
    ),
    "two loops alike": (
        TEST + computation(f"%{AG}", *BOTH_WAYS) + computation(f"%{AG}.1", *BOTH_WAYS[:1])
        + entry(loop(AG, 2), loop(f"{AG}.1", 3)),
        [("all_gather", ("x",), 1, 256)] * 2,
    ),
    "the channels of one loop, in a loop over layers and before it": (
        TEST + computation(f"%{AG}", *BOTH_WAYS) + computation(f"%{AG}.1", *BOTH_WAYS)
        + computation("%layer", loop(AG, 2)) + entry(loop(f"{AG}.1", 2), loop("layer", 5)),
        [WHOLE, ("all_gather", ("x",), 5, 5 * 256)],
    ),
    "the channels of an unrolled loop, in a loop over layers and before it": (
        TEST + computation("%layer", *UNROLLED) + entry(*UNROLLED, loop("layer", 5)),
        [WHOLE, ("all_gather", ("x",), 5, 5 * 256)],
    ),
    "an unrolled loop that gathers": (entry(*UNROLLED), [WHOLE]),
    "two unrolled loops alike": (entry(*UNROLLED, *AGAIN), [("all_gather", ("x",), 2, 2 * 256)]),
    "an unrolled loop that scatters": (entry(*SUMMED), [PART]),
    "unrolled, in a loop over layers": (
        TEST + computation("%layer", *SUMMED) + entry(loop("layer", 6)),
        [("reduce_scatter", ("x",), 6, 6 * 64)],
    ),
    "an operand that goes to another device": (
        entry(handed("a", 1, SWAP)), [("collective_permute", ("x", "y"), 1, 64)],
    ),
    "what is no product": (entry(OTHERS), [("collective_permute", ("x",), 1, 64)]),
}  # fmt: skip


@pytest.mark.parametrize("trap", TRAPS)
def test_traps(trap):
    check(TRAPS[trap][0], MESH, TRAPS[trap][1])


@pytest.mark.parametrize(
    "trap, text, other",
    [
        ("one channel in two fusions", "channel_id=7", "channel_id=8"),
        ("one channel before a loop, and in it", '"flag_start":"-1"', '"flag_start":"2"'),
        ("one channel, called before a loop and in it", " call(%p), to_apply", " fusion(%p), kind=kLoop, calls"),
        ("one channel, scattered before a loop and in it", "all-reduce-scatter", "region"),
        ("a reduce_scatter", "all-reduce-scatter.3", "region.3"),
        ("a loop that gathers", "windowed_dot_general_body_ag", "region"),
        ("an unrolled loop that scatters", "broadcast(", "copy("),
        ("an operand that goes to another device", SWAP, NEXT),
        ("what is no product", "/roll", "/dot_general"),
    ],
)
def test_other_texts_are_read_otherwise(trap, text, other):
    hlo, expected = TRAPS[trap]
    changed = hlo.replace(text, other, 1) if trap == "one channel in two fusions" else hlo.replace(text, other)
    with pytest.raises(AssertionError):
        check(changed, MESH, expected)


MEGASCALE = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
SLICES = {"a": 2, "b": 2, "y": 2}  # a and b go over four slices, and a module is that of one
PAIRS = "{{100000,300000},{100001,300001},{200000,400000},{200001,400001}}"
BETWEEN = [  # what the host is told, what it gives, what that is
    ('"{1,2,3,4}x{0:1}"', "ALL_REDUCE", "f32[8]{0:T(128)}", ("all_reduce", ("a", "b"), 1, 32)),
    (PAIRS, "ALL_REDUCE", "f32[8]{0:T(128)}", ("all_reduce", ("a",), 1, 32)),
    (PAIRS.replace("3000", "5000").replace("2000", "3000").replace("5000", "2000"), "ALL_GATHER", "bf16[4,2]{1,0}",
     ("all_gather", ("b",), 1, 16)),
    (PAIRS, "ALL_TO_ALL", "f32[8]{0}", ("all_to_all", ("a",), 1, 32)),
    (PAIRS, "REDUCE_SCATTER", "f32[8]{0}", ("reduce_scatter", ("a",), 1, 32)),
    ("{{200000->300000},{200001->300001},{300000->200000},{300001->200001}}", "ONE_TO_ONE", "f32[8]{0}",
     ("collective_permute", ("a", "b"), 1, 32)),
    ("{}", "ONE_TO_ONE", "f32[8]{0}", None),
]  # fmt: skip


@pytest.mark.parametrize("target, kind, shape, expected", BETWEEN)
def test_between_slices(target, kind, shape, expected):
    """A channel id stands for one thing on the host's side, and for another on the chip's."""
    told = f'_xla_megascale_target={target},_xla_megascale_transfer_type="{kind}"'
    told = f"is_host_transfer=true, frontend_attributes={{{MEGASCALE},{told}}}"
    hlo = "HloModule jit_f, num_partitions=2\n\n" + entry(
        f"%inside = {shape} all-reduce(%p), channel_id=1, replica_groups={{{{0,1}}}}, to_apply=%add",
        f"%send = ({shape}, u32[], token[]) send(%p, %after), channel_id=2, {told}",
        f"%recv = ({shape}, u32[], token[]) recv(%after), channel_id=1, {told}",
        "%got = (f32[8], token[]) recv-done(%recv), channel_id=1, is_host_transfer=true",
    )
    size = 16 if "bf16" in shape else 32
    check(hlo, SLICES, [("all_reduce", ("y",), 1, size)] + [expected] * (expected is not None))


# What libtpu makes for two slices of 2x2 chips: what lay over s, x and y is gathered, and goes from one dim to another.
TWO = {"s": 2, "x": 2, "y": 2}
IDS = [100000, 100001, 100003, 100002, 200000, 200001, 200003, 200002]
HOST = f"is_host_transfer=true, frontend_attributes={{{MEGASCALE},_xla_host_transfer_rendezvous="
RECORDED = f"""HloModule jit__lambda, is_scheduled=true, replica_count=1, num_partitions=4

ENTRY %main.1_spmd (param: f32[64,1024]) -> f32[512,1024] {{
  %send = (f32[64,1024]{{1,0:T(8,128)}}, u32[], token[]) send(%fusion, %after-all), channel_id=2, {HOST}"all-gather.3_0",_xla_megascale_target="{{1,2}}x{{0:3}}",_xla_megascale_transfer_type="ALL_GATHER",is_spmd_generated="true"}}
  %recv = (f32[128,1024]{{1,0:T(8,128)}}, u32[], token[]) recv(%after-all), channel_id=1, {HOST}"all-gather.3_0",_xla_megascale_target="{{1,2}}x{{0:3}}",_xla_megascale_transfer_type="ALL_GATHER",is_spmd_generated="true"}}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true
  %recv-done = (f32[128,1024]{{1,0:T(8,128)}}, token[]) recv-done(%recv), channel_id=1, is_host_transfer=true
  %all-gather.9 = f32[2,256,1024]{{2,1,0:T(8,128)S(1)}} all-gather(%bitcast), channel_id=1, replica_groups={{{{0,1,2,3}}}}, dimensions={{1}}, use_global_device_ids=true
  %send.1 = (f32[128,4,256]{{2,0,1:T(8,128)}}, u32[], token[]) send(%bitcast.6, %after-all.1), channel_id=4, {HOST}"all-to-all_0",_xla_megascale_target={{{{100000,100003,200000,200003}},{{100001,100002,200001,200002}}}},_xla_megascale_transfer_type="ALL_TO_ALL",is_spmd_generated="true"}}
  %recv.1 = (f32[128,4,256]{{2,0,1:T(8,128)}}, u32[], token[]) recv(%after-all.1), channel_id=3, {HOST}"all-to-all_0",_xla_megascale_target={{{{100000,100003,200000,200003}},{{100001,100002,200001,200002}}}},_xla_megascale_transfer_type="ALL_TO_ALL",is_spmd_generated="true"}}
}}
"""  # noqa: E501


def of_two_slices(hlo):
    return [(one.kind, one.axes, one.bytes) for one in read_collectives(hlo, TWO, device_ids=IDS)]


def test_a_program_for_two_slices():
    """A device's id tells its chip, which is not where it stands in its slice's part of the mesh."""
    assert of_two_slices(RECORDED) == [
        ("all_gather", ("s",), 2 * 64 * 1024 * 4),
        ("all_gather", ("x", "y"), 2 * 256 * 1024 * 4),
        ("all_to_all", ("s", "x"), 128 * 1024 * 4),
    ]


@pytest.mark.parametrize(
    "text, other, message",
    [
        ('"ALL_TO_ALL"', '"SOME_TO_SOME"', "cannot read what goes on between slices in: recv.1 "),
        ('_xla_megascale_transfer_type="ALL_GATHER",', "", "cannot read what goes on between slices in: recv "),
        ('"{1,2}x{0:3}"', '"all"', "cannot read what goes on between slices in: recv "),
        ("100003,200000,", "200000,", "cannot read what goes on between slices in: recv.1 "),  # groups of 3 and of 4
        ("{1,2}x", "{1,3}x", r"talks to devices \[300000, 300001, 300002, 300003\]"),
    ],
)
def test_what_goes_on_between_slices_is_not_passed_over(text, other, message):
    with pytest.raises(MeshError, match=message):
        of_two_slices(RECORDED.replace(text, other))


LIMIT = "%limit = s32[]{:T(128)} constant(8)"
COUNTER = "%i = s32[]{:T(128)} get-tuple-element(%p), index=1"
LESS = "ROOT %t = pred[]{:T(512)} compare(%i, %limit), direction=LT"
STEPS = [  # the loop's condition, what it adds to its counter, how often it runs
    ([LIMIT, COUNTER, LESS], 1, 8),
    ([LIMIT, COUNTER, LESS.replace("LT", "LE")], 1, 9),
    ([LIMIT, COUNTER, LESS], 2, 4),
    ([LIMIT.replace("8", "7"), COUNTER, LESS], 2, 4),  # unrolled by two, and one turn that does half
    ([LIMIT.replace("8", "7"), COUNTER, LESS.replace("LT", "LE")], 2, 4),
    ([LIMIT, COUNTER, "ROOT %t = pred[] fusion(%i, %limit), kind=kLoop, calls=%less"], 2, 4),
    ([LIMIT, COUNTER, LESS.replace("LT", "GT")], 1, 1),  # not known
    ([COUNTER, LESS], 1, 1),
    # a decoder that also ends once every sequence has: the counter says how often at most
    ([LIMIT, COUNTER, LESS.removeprefix("ROOT "), "ROOT %e = pred[] and(%t, %done)"], 1, 1),
    ([LIMIT, COUNTER, "ROOT %t = pred[] fusion(%i, %limit), kind=kLoop, calls=%less_and"], 1, 1),
]


@pytest.mark.parametrize("test, step, trips", STEPS)
def test_how_often_loops_run_that_xla_says_nothing_of(test, step, trips):
    body = [
        "%x = f32[8]{0} get-tuple-element(%p), index=0",
        COUNTER,
        f"%step = s32[]{{:T(128)}} constant({step})",
        "%next = s32[]{:T(128)} add(%i, %step)",
        f"%sum = f32[8]{{0}} all-reduce(%x), channel_id=1, {OVER_X}, to_apply=%add",
        "ROOT %r = (f32[8]{0}, s32[]) tuple(%sum, %next)",
    ]
    both = computation("%less_and", LESS.removeprefix("ROOT "), "ROOT %e = pred[] and(%t, %done)")
    hlo = computation("%less", LESS) + both + computation("%test", *test) + computation("%body", *body)
    hlo += entry("%w = (f32[8]{0}, s32[]) while(%p), condition=%test, body=%body")
    check(hlo, MESH, [("all_reduce", ("x",), trips, trips * 32)])


FRAMES = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/train.py"
2 "/lib/python3.11/site-packages/optax/transform.py"

FunctionNames
1 "main"

FileLocations
1 {file_name_id=1 function_name_id=1 line=10 end_line=10 column=0 end_column=0}
2 {file_name_id=1 function_name_id=1 line=20 end_line=20 column=0 end_column=0}
3 {file_name_id=2 function_name_id=1 line=30 end_line=30 column=0 end_column=0}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=1}
3 {file_location_id=3 parent_frame_id=2}
4 {file_location_id=3 parent_frame_id=4}
5 {file_location_id=3 parent_frame_id=1}


"""
PLACES = [  # metadata, the user's line. A frame's parent is called one more than it is
    ("stack_frame_id=1", "train.py:10"),
    ("stack_frame_id=2", "train.py:20"),
    ("stack_frame_id=3", "train.py:10"),  # called from frame 1, not 2
    ("stack_frame_id=4", "train.py:10"),  # called from frame 3, which is in a package too
    ("stack_frame_id=5", "transform.py:30"),  # called by nobody
    ("stack_frame_id=9", "unknown line"),
    ('source_file="/home/me/train.py" source_line=7', "train.py:7"),
    ('op_name="jit(run)/jvp(blocks)/train.py:41#12/dot_general" stack_frame_id=2', "train.py:41"),
    ('op_name="jit(run)/while/body/unknown line#3/mul" stack_frame_id=2', "unknown line"),
    ('op_name="jit(run)/(train.py:41#12/dot_general:train.py:43#15/add)" stack_frame_id=2', "train.py:43"),
]


@pytest.mark.parametrize("said, line", PLACES)
def test_lines(said, line):
    reduction = f"f32[8]{{0}} all-reduce(%p), channel_id=1, {OVER_X}, to_apply=%add"
    (one,) = read_collectives(FRAMES + entry(f"%r = {reduction}, metadata={{{said}}}"), MESH)
    assert one.source == line
    scattered = computation("%all-reduce-scatter", f"%r = {reduction}")  # where it says nothing, who runs it does
    (one,) = read_collectives(FRAMES + scattered + entry(fused(f"all-reduce-scatter, metadata={{{said}}}")), MESH)
    assert (one.kind, one.source) == ("reduce_scatter", line)


@pytest.mark.parametrize(
    "why, index",
    [
        ("jit(run)/jvp(blocks)/train.py:41#12/dot_general", 12),
        ("jit(run)/train.py:41#12/while/body/train.py:43#15/sharding_constraint", 15),
        ("jit(run)/(train.py:41#12/mul:train.py:43#15/add)", 15),
        ("jit(run)/unknown line#3/mul", 3),
        ("jit(step)/transpose(jvp())/(reduce_sum:dot_general)", None),
        ("arguments[12]", None),
        (r"args[1][\'w\']", None),
        ("", None),
    ],
)
def test_equations(why, index):
    assert equation_of(why) == index


@pytest.mark.parametrize("trips", [0, 1, 5])
def test_a_body_runs_as_often_as_its_loop_turns(trips):
    body = computation("%body", "ROOT %r = f32[8]{0} negate(%p)")
    module = Module.of(body + TEST + entry(loop("body", trips)))
    assert [runs for where, _, runs in module.executed() if where == "body"] == [trips]
