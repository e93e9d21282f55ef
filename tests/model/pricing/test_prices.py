"""Seconds of groups and reshardings, each worked out by hand from the roofline and from the alpha-beta model."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from oracles import TEXTBOOK, adjusted
from programs import f32, grouped, round_topology, traced

from autoshard.errors import MeshError
from autoshard.mesh.links import Link
from autoshard.mesh.topology import Topology
from autoshard.model.grouping import groups_of
from autoshard.model.pricing import prices as module
from autoshard.model.pricing.prices import PriceList
from autoshard.model.pricing.roofline import GroupWork
from autoshard.model.strategies import ALL_REDUCE, REDUCE_SCATTER
from autoshard.model.xla.backends import CPU, H100, V5E
from autoshard.model.xla.convolutions import image_dims
from autoshard.model.xla.fusion import read_through
from autoshard.model.xla.loop_memory import LoopMemory, kept_on_chip_in_loops, turns_that_read
from autoshard.model.xla.products import VectorProducts
from autoshard.model.xla.rounding import Itemsizes, itemsizes_of
from autoshard.model.xla.units.streams import Streams
from autoshard.program import Value
from autoshard.propagation import rules_for

LINE = {"x": 4}
TOPOLOGY = Topology({"x": Link(1e-3, 1e6)}, memory_bytes=1e9, memory_bandwidth=1e9, flops={"float32": 1e9, "int8": 4e9})
INDEX = jax.ShapeDtypeStruct((), np.int32)
INDICES = jax.ShapeDtypeStruct((10,), np.int32)
MANY = jax.ShapeDtypeStruct((128,), np.int32)
NHWC = ("NHWC", "HWIO", "NHWC")
LAUNCH, HALF = 1e-6, 1.2  # s; how much dearer than half an all_reduce


def prices(mesh=LINE, **options) -> PriceList:
    return PriceList(mesh, TOPOLOGY, **options)


def adam(m, g, w):
    m = 0.9 * m + 0.1 * g
    return m, w - m


def write(cache, new, at):
    return jax.lax.dynamic_update_slice(cache, new, (at, 0))


def read(cache, at):
    return jax.lax.dynamic_slice(cache, (at, 0), (10, 64))


WORK_OF_V5E = adjusted(V5E, "operations", least_seconds=0.0, product_seconds=0.0)  # without what operations start with

# At 1 GFLOP/s and 1 GB/s, FLOPs and bytes are both nanoseconds, and the larger counts.
COMPUTE = {  # function, arguments, axes of factors (of the last group), nanoseconds on one device
    "bytes of a thin matmul": (jnp.matmul, [f32(8, 4), f32(4, 6)], {}, 4 * (8 * 4 + 4 * 6 + 8 * 6)),
    "FLOPs of a thick one": (jnp.matmul, [f32(64, 64), f32(64, 64)], {}, 2 * 64**3),
    "in four, by rows": (jnp.matmul, [f32(64, 64), f32(64, 64)], {0: ("x",)}, 2 * 64**3 / 4),
    "bytes in four": (jnp.matmul, [f32(8, 4), f32(4, 6)], {0: ("x",)}, 4 * (8 * 4 / 4 + 4 * 6 + 8 * 6 / 4)),
    "partial sums are written whole": (
        jnp.matmul, [f32(8, 4), f32(4, 6)], {1: ("x",)}, 4 * (8 * 4 / 4 + 4 * 6 / 4 + 8 * 6)
    ),
    "a chain reads and writes its ends only": (adam, [f32(8, 4)] * 3, {}, 4 * 32 * (3 + 2)),
    "a chain in four": (adam, [f32(8, 4)] * 3, {0: ("x",)}, 4 * 32 * (3 + 2) / 4),
    "FLOPs of a chain of 20": (lambda x: sum([x] * 21, 0.0), [f32(8, 4)], {}, 32 * 21),
    "a broadcast operand is read once": (jnp.add, [f32(8, 4), f32(4)], {}, 4 * (32 + 4 + 32)),
    "a reduction": (lambda x: x.sum(0), [f32(64, 4)], {}, 4 * (256 + 4)),
    "a view of what is made": (lambda x: (x @ x).T, [f32(64, 64)], {}, 0),
    "a result that is a view of an argument": (lambda x: x.T, [f32(64, 4)], {}, 4 * 2 * 256),
    "a result that repeats an array": (lambda x: jnp.repeat(x[None], 3, 0), [f32(64, 4)], {}, 4 * 4 * 256),
    "a slice": (read, [f32(1000, 64), INDEX], {}, 4 * 2 * 640),
    "rows of a table": (lambda x, i: x[i], [f32(1000, 64), INDICES], {}, 4 * 2 * 640),
    "a write over what is computed": (
        lambda x, *args: write(jnp.sin(x), *args), [f32(1000, 64), f32(10, 64), INDEX], {}, 4 * 2 * 640
    ),
    "a write over an argument that stays": (
        write, [f32(1000, 64), f32(10, 64), INDEX], {}, 4 * (2 * 640 + 2 * 64000)
    ),
    "a write over zeros": (
        lambda *args: write(jnp.zeros((1000, 64)), *args), [f32(10, 64), INDEX], {}, 4 * (2 * 640 + 64000)
    ),
    "rows added": (
        lambda x, n, i: jnp.sin(x).at[i].add(n), [f32(1000, 64), f32(10, 64), INDICES], {}, 4 * 2 * 640
    ),
    "rows compared": (
        lambda x, n, i: jnp.sin(x).at[i].max(n), [f32(1000, 64), f32(10, 64), INDICES], {}, 4 * 2 * 640
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", COMPUTE)
def test_compute_by_hand(case):
    fn, args, split, nanoseconds = COMPUTE[case]
    priced = prices().group(grouped(fn, *args)[-1])
    found = {
        seconds.compute
        for strategy, seconds in zip(priced.strategies, priced.seconds, strict=True)
        if strategy.axes == split and all(finish.kind == ALL_REDUCE for finish in strategy.finishes)
    }
    assert [second * 1e9 for second in found] == pytest.approx([nanoseconds])


def halves(x, w):
    left, right = jnp.split(x @ w, 2, 1)
    return jnp.sin(left), jnp.cos(right)


def twice(x, y):
    wave = jnp.sin(x) * y
    return wave.sum(0), wave.sum(1), x


FUSED = {  # on GPU: function, arguments, nanoseconds of memory traffic of all groups
    # each of the two sums reads what sin(x) * y is made of; nobody writes that
    "what readers make again": (twice, [f32(64, 32)] * 2, 4 * (2 * 2 * 64 * 32 + 32 + 64)),
    # product: 8 x 4, 4 x 64 -> 8 x 64; each reader reads its half
    "slices": (halves, [f32(8, 4), f32(4, 64)], 4 * (32 + 256 + 512 + 2 * (256 + 256))),
}


@pytest.mark.parametrize("case", FUSED)
def test_what_is_fused_costs_its_readers(case):
    fn, args, nanoseconds = FUSED[case]
    program = traced(fn, *args)
    gpu = adjusted(H100, "operations", least_seconds=0.0)
    groups = groups_of(program, rules_for(program), gpu)
    asked = PriceList(LINE, replace(TOPOLOGY, flops={"float32": 1e18}), backend=gpu, instead=read_through(groups))
    assert sum(asked.group(group).seconds[0].compute for group in groups) * 1e9 == pytest.approx(nanoseconds)


def test_images_are_padded_along_batch_and_features():
    """8 images of 128 x 128 pixels: to 128 features on TPU, though the pixels would fit, as those of arguments do."""
    program = traced(
        lambda x, k: jax.nn.relu(jax.lax.conv_general_dilated(x + 1, k, (1, 1), "SAME", dimension_numbers=NHWC)),
        f32(8, 128, 128, 3), f32(3, 3, 3, 64),
    )  # fmt: skip
    asked = PriceList(LINE, TOPOLOGY, backend=V5E, images=image_dims(program))
    whole = ((),) * 4
    assert asked.arrays.local_bytes(program.results[0], whole) == 4 * 128 * 128 * 8 * 128
    assert asked.arrays.sizes(program.results[0], [whole]) == 4 * 128 * 128 * 8 * 128
    assert asked.arrays.local_bytes(program.arguments[0], whole) == 4 * 8 * 128 * 128 * 3
    (read,) = (x for x in program.values if x.shape == (8, 128, 128, 3) and x is not program.arguments[0])
    assert asked.arrays.local_bytes(read, whole) == 4 * 128 * 128 * min(8 * 128, 4 * 128)
    assert asked.arrays.local_bytes(program.arguments[1], whole) == 4 * 3 * 3 * 4 * 128


def test_convolutions_have_the_rate_of_the_backend():
    (group,) = grouped(lambda x, w: lax.conv(x, w, (1, 1), "SAME"), f32(2, 64, 32, 32), f32(64, 64, 3, 3))
    slow, fast = (
        prices(backend=adjusted(CPU, "convolutions", flops_share=rate)).group(group).seconds[0].compute
        for rate in (0.25, 1.0)
    )
    assert slow == pytest.approx(4 * fast)


def test_each_dtype_has_its_rate():
    many = jax.ShapeDtypeStruct((512, 512), np.int8)
    (group,) = grouped(jnp.matmul, many, many)
    assert prices().group(group).seconds[0].compute == pytest.approx(2 * 512**3 / 4e9)


def test_costs_are_the_sums():
    priced = prices().group(grouped(jnp.matmul, f32(64, 64), f32(64, 64))[0])
    assert priced.costs.tolist() == [s.compute + s.communication for s in priced.seconds]  # nothing is hidden


# Communication: 4 devices in a ring, 1 ms a message, 1 MB/s. A gradient, say, of 8 x 6 floats: 192 bytes, of which
# 3/4 go through each link, once to reduce and once to gather. 144 bytes are 0.144 ms.
RING = 3 * 1e-3 + 144e-6


def early(x, w):
    return jnp.sum(x @ w @ w.T)


def contracted(fn, *args, mesh=LINE, backend=CPU):
    """Strategies and seconds of the first product where it splits what it contracts."""
    group = next(group for group in grouped(fn, *args) if group.contracts)
    priced = prices(mesh, backend=backend).group(group)
    (factor,) = group.reduction
    pairs = zip(priced.strategies, priced.seconds, strict=True)
    return group, [(strategy, seconds) for strategy, seconds in pairs if factor in strategy.axes]


def test_collectives_that_are_waited_for():
    group, found = contracted(early, f32(8, 4), f32(4, 6))
    assert not group.feeds_only_results
    expected = {(ALL_REDUCE, 48): LAUNCH + 2 * RING, (REDUCE_SCATTER, 12): LAUNCH + HALF * RING}
    assert {strategy.finishes[0].kind for strategy, _ in found} == {ALL_REDUCE, REDUCE_SCATTER}
    for strategy, seconds in found:
        (finish,) = strategy.finishes
        assert seconds.communication == pytest.approx(expected[finish.kind, finish.elements])
        assert prices().finish_bytes(group, strategy) == [4 * finish.elements]


def test_late_all_reduces_pay_no_latency():
    """XLA makes one of them all."""
    group, found = contracted(jnp.matmul, f32(8, 4), f32(4, 6))
    assert group.feeds_only_results
    expected = {ALL_REDUCE: 2 * 144e-6, REDUCE_SCATTER: LAUNCH + HALF * RING}
    for strategy, seconds in found:
        assert seconds.communication == pytest.approx(expected[strategy.finishes[0].kind])


def test_what_is_combined_pays_no_latency():
    """XLA for GPU makes one of all reduce_scatters and gathers of weights that nothing waits for, too."""
    gpu = adjusted(H100, "combining", below_bytes=math.inf)
    _, found = contracted(jnp.matmul, f32(8, 4), f32(4, 6), backend=gpu)
    expected = {ALL_REDUCE: 2 * 144e-6, REDUCE_SCATTER: HALF * 144e-6}
    for strategy, seconds in found:
        assert seconds.communication == pytest.approx(expected[strategy.finishes[0].kind])
    for weights, backend, latency in (([0], gpu, 0.0), ([], gpu, 3e-3), ([0], V5E, 3e-3)):
        asked = prices(backend=backend, weights=weights)
        seconds = HALF * (latency + 192e-6) + (LAUNCH if latency else 0.0)
        assert asked.resharding(value(8, 8), X, NONE) == pytest.approx(seconds)
        waited = asked.resharding(value(8, 8), X, NONE) - asked.hidden(value(8, 8), X, NONE)
        np.testing.assert_allclose(asked.table(value(8, 8), [X], [NONE]), [[waited]])
        np.testing.assert_allclose(asked.moves(value(8, 8), [X, X], [NONE, X]), [waited, 0.0])
    late, waited_for = prices(backend=gpu, weights=[0]), prices(backend=gpu)
    assert late.resharding(value(8, 8), X, Y) == waited_for.resharding(value(8, 8), X, Y)  # this kind is not combined


def test_what_fills_part_of_a_combined_collective_pays_that_part_of_the_latency():
    gathered = 8 * 8 * 4  # bytes
    for combines_below, share in ((gathered * 4, 1 / 4), (gathered, 1.0), (gathered / 4, 1.0)):
        asked = prices(backend=adjusted(H100, "combining", below_bytes=combines_below), weights=[0])
        seconds = HALF * (share * 3e-3 + 192e-6) + share * LAUNCH
        assert asked.resharding(value(8, 8), X, NONE) == pytest.approx(seconds)


def test_an_all_reduce_instead_of_a_gather_adds_to_zeros():
    """64 devices each put their 16 bytes into an array of 1024."""
    asked = PriceList({"x": 64}, round_topology("x"), backend=V5E)
    zeros, ring = LAUNCH + 1024 / TOPOLOGY.memory_bandwidth, 63 * 1e-3 + 63 / 64 * 1024 / 1e6
    assert asked.resharding(value(64, 4), X, NONE) == pytest.approx(zeros + LAUNCH + 2 * ring)
    np.testing.assert_allclose(asked.table(value(64, 4), [X], [NONE]), [[zeros + LAUNCH + 2 * ring]])


@pytest.mark.parametrize("backend, copies", [(CPU, 0), (H100, 1), (V5E, 2)])
def test_all_to_alls_copy_pieces(backend, copies):
    """64 bytes are read and written each time."""
    through = copies * 2 * 64 / TOPOLOGY.memory_bandwidth
    found = prices(backend=backend).resharding(value(8, 8), X, Y)
    assert found == pytest.approx(RESHARDINGS["all_to_all"][2] + through)


@pytest.mark.parametrize(
    "backend, dtype, copies",
    [
        (CPU, np.float32, 0), (H100, np.float32, 1), (V5E, np.int8, 8 * 128 / 4), (V5E, np.float16, 4 * 128 / 4),
        (V5E, np.float32, 2 * 128 / 4), (V5E, np.float64, 128 / 4),
        (adjusted(V5E, "recopies", pieces=0), np.float16, 4 * 128 / 4),
    ],
)  # fmt: skip
def test_all_to_alls_of_images_copy_padded_pieces(backend, dtype, copies):
    """8 images of 16 channels on 4 devices, in pieces of 2 images and 4 of 128 lanes; per element, however wide."""
    images = value(8, 4, 4, 16, dtype=dtype)
    asked = prices(backend=backend, images={images.id: (0, 3)})
    batch, features = (("x",), (), (), ()), ((), (), (), ("x",))
    size = images.bytes / 4
    through = copies * 2 * size / TOPOLOGY.memory_bandwidth
    for source, target in ((batch, features), (features, batch)):
        found = asked.resharding(images, source, target)
        assert found == pytest.approx(LAUNCH + 3 * 1e-3 + 3 / 4 * size / 1e6 + through, rel=1e-9)
        np.testing.assert_allclose(asked.table(images, [source, target], [target]), [[found], [0]])


def test_images_copy_at_least_as_others():
    """Of 512 channels nothing pads; in 8 bytes an element one copy would do."""
    images, batch, features = value(8, 4, 4, 512, dtype=np.float64), (("x",), (), (), ()), ((), (), (), ("x",))
    asked = prices(backend=V5E, images={images.id: (0, 3)})
    assert asked.resharding(images, batch, features) == prices(backend=V5E).resharding(images, batch, features)


def test_images_that_do_not_divide_copy_padded_pieces():
    """6 images on 4 devices, two each."""
    images, batch, features = value(6, 4, 4, 16), (("x",), (), (), ()), ((), (), (), ("x",))
    asked, others = prices(backend=V5E, images={images.id: (0, 3)}), prices(backend=V5E)
    found = asked.resharding(images, batch, features)
    assert found > others.resharding(images, batch, features)
    np.testing.assert_allclose(
        asked.table(images, [batch, ((),) * 4], [features]), [[found], [V5E.operations.least_seconds]]
    )


ROWS = {  # what is done with 128 rows of 256 columns
    "looked up": (lambda table, at: table[at], [f32(4096, 256), MANY]),
    "added": (lambda table, rows, at: jnp.sin(table).at[at].add(rows), [f32(4096, 256), f32(128, 256), MANY]),
    "written": (lambda table, rows, at: jnp.sin(table).at[at].set(rows), [f32(4096, 256), f32(128, 256), MANY]),
}


@pytest.mark.parametrize("backend, columns", [(CPU, 64), (WORK_OF_V5E, 128)])
@pytest.mark.parametrize("case", ROWS)
def test_rows_lie_by_themselves(case, backend, columns):
    """Of columns split in four, on TPU the 64 of each row pad to 128; a table that rows are picked of is copied so."""
    fn, args = ROWS[case]
    group = grouped(fn, *args)[-1]
    priced = prices(backend=backend).group(group)
    (factor,) = next(use.dims[1] for use in group.uses if use.value.shape == (4096, 256))
    nanoseconds = {
        strategy.axes.get(factor, ()): 1e9 * seconds.compute
        for strategy, seconds in zip(priced.strategies, priced.seconds, strict=True)
        if strategy.axes.keys() <= {factor}
    }
    copied = 2 * 4 * 4096 * 64 if case == "looked up" and columns == 128 else 0
    assert nanoseconds == pytest.approx({(): 2 * 4 * 128 * 256, ("x",): 2 * 4 * 128 * columns + copied})


WINDOWS = {  # what is read of a table, and how many times larger it is when each window lies by itself
    "numbers": (lambda table, at: table[at], (4096,), 1),
    "columns of one": (lambda table, at: table[at], (4096, 1), 1),
    "rows of one": (lambda table, at: table[at], (4096, 256, 1), 1),
    "rows of half a tile": (lambda table, at: table[at], (4096, 64), 2),
    "tiles": (lambda table, at: table[at], (4096, 8, 128), 1),
    "crops": (lambda table, at: jax.vmap(lambda start: lax.dynamic_slice(table, (start, 0, 0), (32, 32, 3)))(at),
              (4096, 32, 3), 4),
}  # fmt: skip


@pytest.mark.parametrize("case", WINDOWS)
def test_windows_lie_by_themselves(case):
    """A table whose rows fill half of a tile is copied so."""
    fn, shape, larger = WINDOWS[case]
    group = next(g for g in grouped(fn, f32(*shape), MANY) if g.equations[0].primitive == "gather")
    asked, (made,) = prices(backend=WORK_OF_V5E), group.equations[0].outputs
    nothing_split = next(
        seconds for strategy, seconds in zip(asked.group(group).strategies, asked.group(group).seconds, strict=True)
        if not strategy.axes
    )  # fmt: skip
    size = asked.arrays.local_bytes(made, ((),) * len(made.shape))
    copied = 2 * 4 * math.prod(shape) if case == "rows of half a tile" else 0
    assert nothing_split.compute * TOPOLOGY.memory_bandwidth == pytest.approx(2 * size * larger + copied)


def test_pieces_gathered_in_several_dims_are_put_in_order():
    """All 64 devices are asked at once either way; a matrix of 64 MiB is then read and written twice."""
    asked = PriceList({"x": 8, "y": 8}, round_topology("x", "y"), backend=V5E)
    matrix = value(4096, 4096)
    rows, both = (asked.resharding(matrix, source, NONE) for source in ((("x", "y"), ()), (("x",), ("y",))))
    assert both == pytest.approx(rows + 2 * 2 * 2**26 / TOPOLOGY.memory_bandwidth, rel=1e-9)
    tables = [asked.table(matrix, [source], [NONE]) for source in ((("x", "y"), ()), (("x",), ("y",)))]
    np.testing.assert_allclose(tables, [[[rows]], [[both]]])


@pytest.mark.parametrize("shape, source, target, copied", [
    ((8, 512, 128), (("x",), ("y",), ()), ((), (), ()), False),  # one of x in every piece
    ((16, 512, 128), (("x",), ("y",), ()), ((), (), ()), True),  # two
    ((8, 512, 128), (("x",), (), ("y",)), ((), (), ()), True),  # what is whole between them
    ((8, 1, 128), (("x",), (), ("y",)), ((), (), ()), False),
    ((8, 8, 512, 128), ((), ("x",), ("y",), ()), ((), (), (), ()), False),  # what is whole before them
    ((8, 512, 128), (("x",), ("y",), ()), (("x",), (), ()), False),  # one dim alone
    ((8, 504, 128), (("x",), ("y",), ()), ((), (), ()), True),  # 63 rows, which do not fill tiles of 8
    ((8, 504, 128), ((), ("y",), ()), ((), (), ()), True),
    ((8, 128, 32), ((), (), ("y",)), ((), (), ()), True),  # 4
    ((8, 128, 64), ((), (), ("y",)), ((), (), ()), False),
    ((1, 128, 32), ((), (), ("y",)), ((), (), ()), False),  # a matrix
    ((504, 128), (("y",), ()), ((), ()), False),
    ((8, 512, 16, 64), ((), ("y",), (), ()), ((), (), (), ()), True),  # 64 of 512, which have to be the columns
    ((8, 1024, 16, 64), ((), ("y",), (), ()), ((), (), (), ()), False),
    ((8, 512, 16, 64), ((), (), ("y",), ()), ((), (), (), ()), False),  # neither rows nor columns
])  # fmt: skip
def test_pieces_that_come_in_order_are_not_copied(shape, source, target, copied):
    asked = PriceList({"x": 8, "y": 8}, round_topology("x", "y"), backend=V5E)
    array = value(*shape)
    plain = PriceList({"x": 8, "y": 8}, round_topology("x", "y"), backend=adjusted(V5E, "recopies", pieces=0))
    found = asked.resharding(array, source, target)
    more = found - plain.resharding(array, source, target)
    assert more == pytest.approx(copied * 2 * 2 * 4 * math.prod(shape) / TOPOLOGY.memory_bandwidth, rel=1e-9, abs=1e-15)
    np.testing.assert_allclose(asked.table(array, [source, target], [target]), [[found], [0]])


@pytest.mark.parametrize("shape, copied", [
    ((8, 128, 256), True),  # 32 columns
    ((8, 128, 1024), False),  # 128
    ((1, 128, 256), False),  # a matrix
    ((256,), False),
    ((8, 128, 64), False),  # better the rows anyhow
])  # fmt: skip
def test_columns_that_cut_tiles_are_put_in_order(shape, copied):
    """They could be rows; where that is not done they are read and written twice."""
    whole, split = ((),) * len(shape), (*((),) * (len(shape) - 1), ("y",))
    backends = V5E, adjusted(V5E, "recopies", keeps_columns=True)
    asked = [PriceList({"y": 8}, round_topology("y"), backend=backend) for backend in backends]
    seconds = [one.table(value(*shape), [split], [whole]).item() for one in asked]
    assert seconds == pytest.approx([one.resharding(value(*shape), split, whole) for one in asked])
    more = seconds[1] - seconds[0]
    assert more == pytest.approx(copied * 2 * 2 * 4 * math.prod(shape) / TOPOLOGY.memory_bandwidth, rel=1e-9, abs=1e-15)


def test_a_slice_is_an_operation_of_its_own():
    """Where nothing moves between devices; the rows that an uneven split leaves over, too."""
    asked = prices(backend=adjusted(V5E, "operations", least_seconds=1e-3))
    for rows in (8, 9):
        array = value(rows, 8, trips=3)
        assert asked.resharding(array, NONE, X) == 1e-3
        assert asked.resharding(array, X, NONE) == prices(backend=V5E).resharding(array, X, NONE)
        assert asked.table(array, [NONE], [NONE, X]).tolist() == [[0.0, 3e-3]]


@pytest.mark.parametrize("behind_barrier", [True, False])
def test_what_a_recomputation_slices_is_copied(behind_barrier):
    """A weight and a layer's input in each of three trips, at half of the memory's bandwidth; the forward pass none."""
    layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None), prevent_cse=behind_barrier)
    gradient = jax.grad(lambda w, x: jnp.sum(lax.scan(layer, x, w)[0]))
    program = traced(gradient, f32(3, 128, 128), f32(8, 128))
    asked = PriceList({}, round_topology(), backend=WORK_OF_V5E)
    slices = [g for g in groups_of(program, rules_for(program), V5E) if g.equations[0].primitive == "scan_slice"]
    seconds = [asked.group(group).seconds[0].compute for group in slices]
    copies = [2 * 2 * 4 * rows * 128 * 3 * 1e-9 * behind_barrier for rows in (8, 128)]
    assert seconds == pytest.approx([0.0, *copies])


ROOMS = [(1, 0, 1.0), (1, 2**16 - 1, 1.0), (1, 2**16, 0.0), (2, 2**16, 0.5), (2, 2**17, 0.0)]


@pytest.mark.parametrize("count, room, through", ROOMS)
def test_what_a_loop_adds_up_stays_in_the_chip(count, room, through):
    """Products of 64 KiB in each of three trips, and sums that they are added to: what there is no room for moves."""

    def adding(totals, xs):
        return lax.scan(lambda t, x: ([a + (i * x).T @ x for i, a in enumerate(t)], None), totals, xs)[0]

    program = traced(adding, [f32(128, 128)] * count, f32(3, 8, 128))
    fast = replace(TOPOLOGY, flops={"float32": 1e18})
    asked = PriceList(
        {},
        fast,
        backend=replace(adjusted(V5E, "loop_memory", bytes=room), streams=Streams()),  # memory alone
        kept=kept_on_chip_in_loops(program, Itemsizes(), LoopMemory(keeps_sums=True)),
    )
    seconds = {
        group.equations[0].primitive: asked.group(group).seconds[0].compute
        for group in groups_of(program, rules_for(program), V5E)
    }
    moved = 2**16 * through
    assert seconds["dot_general"] == pytest.approx(3 * (2 * 4 * 8 * 128 + moved) * 1e-9)
    assert seconds["add"] == pytest.approx(3 * 3 * moved * 1e-9)


@pytest.mark.parametrize("room, through", [(0, 1.0), (2**15 - 1, 1.0), (2**15, 0.0)])
@pytest.mark.parametrize("view", [lambda w: w, jnp.transpose], ids=["as it is", "transposed"])
def test_what_a_loop_only_reads_stays_in_the_chip(room, through, view):
    """A weight of 32 KiB in bfloat16 in each of three trips, and 8 rows in and out."""
    recurrent = lambda h, w: lax.scan(lambda h, _: (h @ view(w), None), h, length=3)[0]  # noqa: E731
    program = traced(recurrent, f32(8, 128), f32(128, 128))
    groups = groups_of(program, rules_for(program), V5E)
    itemsizes = itemsizes_of(program, groups, V5E.rounding)
    fast = replace(TOPOLOGY, flops={"float32": 1e18})
    backend = adjusted(V5E, "loop_memory", bytes=room)
    asked = PriceList(
        {},
        fast,
        itemsizes,
        backend,
        kept=kept_on_chip_in_loops(program, itemsizes, LoopMemory(keeps_sums=True)),
        instead=read_through(groups),
    )
    (product,) = (group for group in groups if group.contracts)
    assert asked.group(product).seconds[0].compute == pytest.approx(3e-9 * (2**15 * through + 8 * 128 * (2 + 4)))


@pytest.mark.parametrize("source, target, share", [
    (((), ()), (("x",), ()), 0),
    ((("x",), ()), ((), ("x",)), 0),
    ((("x",), ()), ((), ()), 1),
])  # fmt: skip
def test_what_is_gathered_for_a_loop_may_be_read_from_memory(source, target, share):
    """Half of 64 KiB in each of three trips, beside what gathering takes."""
    recurrent = lambda h, w: lax.scan(lambda h, _: (h @ w, None), h, length=3)[0]  # noqa: E731
    program = traced(recurrent, f32(8, 128), f32(128, 128))
    weight = program.arguments[1]
    chip, backend = round_topology("x"), adjusted(V5E, "loop_memory", fetched_share=0.5)
    asked, plain = (PriceList(LINE, chip, backend=backend, turns=turns) for turns in (turns_that_read(program), None))
    fetched = asked.memory_seconds(weight, source, target)
    assert fetched == pytest.approx(0.5 * 3 * 2**16 * share / chip.memory_bandwidth)
    tables = [prices.table(weight, [source], [target]) for prices in (asked, plain)]
    assert tables[0] - tables[1] == pytest.approx(fetched)


def test_what_needs_no_reduction_talks_to_nobody():
    group = grouped(jnp.matmul, f32(8, 4), f32(4, 8))[0]
    priced = prices().group(group)
    for strategy, seconds in zip(priced.strategies, priced.seconds, strict=True):
        assert (seconds.communication == 0) == (not group.reduction & strategy.axes.keys())


def value(*shape: int, trips: int = 1, dtype=np.float32) -> Value:
    return Value(0, shape, np.dtype(dtype), int(np.prod(shape)) * np.dtype(dtype).itemsize, trips=trips)


X, Y, NONE = (("x",), ()), ((), ("x",)), ((), ())
RESHARDINGS = {  # from, to, seconds for 8 x 8 floats: 256 bytes, 64 per device
    "nothing": (X, X, 0.0),
    "a slice": (NONE, X, 0.0),
    "gathered": (X, NONE, LAUNCH + HALF * (3 * 1e-3 + 192e-6)),
    "all_to_all": (X, Y, LAUNCH + 3 * 1e-3 + 48e-6),
}


@pytest.mark.parametrize("case", RESHARDINGS)
def test_reshardings_by_hand(case):
    source, target, seconds = RESHARDINGS[case]
    assert prices().resharding(value(8, 8), source, target) == pytest.approx(seconds)


def test_a_table_is_every_pair_as_often_as_the_value_is_made():
    layouts = [NONE, X, Y]
    table = prices().table(value(8, 8, trips=3), layouts, layouts[1:])
    expected = [[prices().resharding(value(8, 8), a, b) * 3 for b in layouts[1:]] for a in layouts]
    np.testing.assert_allclose(table, expected)
    assert table[1, 0] == 0 and table[2, 0] == pytest.approx(3 * RESHARDINGS["all_to_all"][2])


@pytest.mark.parametrize("layout, bytes", [(NONE, 256), (X, 64), (Y, 64)])
def test_bytes_and_writing(layout, bytes):
    assert prices().arrays.local_bytes(value(8, 8), layout) == bytes
    assert prices().writing(value(8, 8), layout) == pytest.approx(bytes * 1e-9)


def test_uneven_shards_are_padded():
    assert prices().arrays.local_bytes(value(9, 8), X) == 3 * 8 * 4


@pytest.mark.parametrize("dtype, size", [(np.float16, 2), (np.int8, 1), (np.complex64, 8)])
def test_itemsize(dtype, size):
    assert value(3, 5, dtype=dtype).itemsize == value(0, 5, dtype=dtype).itemsize == size


def test_itemsize_of_keys():
    key = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 6))
    (group,) = grouped(lambda keys: jnp.reshape(keys, (2, 3)), key)
    assert group.outputs[0].value.itemsize == 8


def repeated(x, ws):
    return jax.lax.scan(lambda x, w: (x @ w, None), x, ws)[0]


def test_a_loops_body_is_paid_every_time():
    once, often = (
        prices().group(next(group for group in grouped(repeated, f32(8, 4), f32(trips, 4, 4)) if group.contracts))
        for trips in (1, 5)
    )
    assert once.strategies == often.strategies
    np.testing.assert_allclose(often.costs, 5 * once.costs)
    ring = 3e-3 + 96e-6
    reductions = [seconds.communication for seconds in often.seconds if seconds.communication]
    assert reductions == pytest.approx([5 * (LAUNCH + 2 * ring)] + [5 * (LAUNCH + HALF * ring)] * 2)


@pytest.mark.parametrize("source, target, cleared", [
    ((("s",), ()), NONE, True),
    ((("s", "x"), ()), X, True),
    ((("s",), ()), ((), ("s",)), True),
    ((("x",), ()), NONE, False),
    (NONE, (("s",), ()), False),
])  # fmt: skip
def test_what_comes_from_other_slices_in_a_loop_has_its_stacks_cleared(source, target, cleared):
    """8,000 bytes of all devices, once in the five trips together."""
    options = {"backend": replace(adjusted(V5E, "gathers", several_dims_at_once=False), slices=2)}
    plain, asked = (PriceList({"s": 2, "x": 4}, round_topology("s", "x"), stacked=stacked, **options)
                    for stacked in (None, {0: 8000}))  # fmt: skip
    made, seconds = value(8, 8, trips=5), 8000 / 8 / 5 / TOPOLOGY.memory_bandwidth * cleared
    assert asked.memory_seconds(made, source, target) == pytest.approx(seconds)
    more = asked.table(made, [source], [target]) - plain.table(made, [source], [target])
    np.testing.assert_allclose(more, [[5 * seconds]], atol=1e-15)


# What runs behind compute: a compiler that hides half of each gather, a fifth of each reduce_scatter.

HIDING = adjusted(TEXTBOOK, "overlap", hidden_share={"all_gather": 0.5, "reduce_scatter": 0.2})
HIDDEN = {"nothing": 0.0, "a slice": 0.0, "gathered": 0.5, "all_to_all": 0.0}  # resharding -> share of a weight's


@pytest.mark.parametrize("case", RESHARDINGS)
def test_gathers_of_weights_are_hidden(case):
    source, target, seconds = RESHARDINGS[case]
    weight = PriceList(LINE, TOPOLOGY, backend=HIDING, weights=[0])
    of_a_loop = PriceList(
        LINE, TOPOLOGY, backend=HIDING, weights=[0], waited_for=[0]
    )  # which waits for all that it reads
    activation = PriceList(LINE, TOPOLOGY, backend=HIDING)
    for asked, share in ((weight, HIDDEN[case]), (of_a_loop, 0.0), (activation, 0.0), (prices(), 0.0)):
        assert asked.resharding(value(8, 8), source, target) == pytest.approx(seconds)
        assert asked.hidden(value(8, 8), source, target) == pytest.approx(share * seconds)
        table = asked.table(value(8, 8, trips=3), [source], [target])
        np.testing.assert_allclose(table, [[(1 - share) * seconds * 3]])


@pytest.mark.parametrize("fn, share", [(jnp.matmul, 0.2), (early, 0.0)])
def test_reduce_scatters_that_nothing_waits_for_are_hidden(fn, share):
    (group, *_) = [group for group in grouped(fn, f32(8, 4), f32(4, 6)) if group.contracts]
    priced, plain = PriceList(LINE, TOPOLOGY, backend=HIDING).group(group), prices().group(group)
    assert priced.strategies == plain.strategies
    kinds = set()
    for strategy, seconds, before in zip(priced.strategies, priced.seconds, plain.seconds, strict=True):
        kinds |= {finish.kind for finish in strategy.finishes}
        scatters = {finish.kind for finish in strategy.finishes} == {REDUCE_SCATTER}
        assert (seconds.compute, seconds.communication) == (before.compute, before.communication)
        assert seconds.hidden == pytest.approx(share * scatters * seconds.communication)
        assert seconds.total == pytest.approx(seconds.compute + seconds.communication - seconds.hidden)
    assert kinds == {ALL_REDUCE, REDUCE_SCATTER}
    assert priced.costs.tolist() == [seconds.total for seconds in priced.seconds]


@pytest.mark.parametrize("together, seconds", [(True, 144e-6), (False, 2 * 144e-6)])
def test_products_that_are_reduced_together_pay_once(together, seconds):
    """Each half of one all_reduce, combined with others; else each its own."""
    program = traced(lambda x, w, v: x @ w + x @ v, f32(8, 4), f32(4, 6), f32(4, 6))
    groups = groups_of(program, rules_for(program), adjusted(TEXTBOOK, "sums", adds_first=together))
    for group in (group for group in groups if group.contracts):
        priced = prices().group(group)
        found = {
            one.communication
            for strategy, one in zip(priced.strategies, priced.seconds, strict=True)
            if {finish.kind for finish in strategy.finishes} == {ALL_REDUCE}
        }
        assert list(found) == pytest.approx([seconds])


# Groups that look alike share their prices.


def test_layers_share_prices():
    groups = [g for g in grouped(lambda x, w: x @ w @ w @ w, f32(8, 4), f32(4, 4)) if g.contracts]
    asked = prices()
    first, second, last = map(asked.group, groups)
    assert first is second and last is not first  # the last one is late
    fresh = [prices().group(group) for group in groups]
    for remembered, again in zip((first, second, last), fresh, strict=True):
        assert remembered == again


DIFFERENT = {  # pairs that differ in one thing only
    "shape": (jnp.add, [f32(8, 4)] * 2, jnp.add, [f32(4, 8)] * 2),
    "dtype": (jnp.add, [f32(8, 4)] * 2, jnp.add, [jax.ShapeDtypeStruct((8, 4), np.float16)] * 2),
    "work": (lambda x: x + 1, [f32(8, 4)], lambda x: x + 1 + 2, [f32(8, 4)]),
    "operands": (lambda x: x * x, [f32(8, 4)], jnp.multiply, [f32(8, 4)] * 2),
    "dims": (lambda x: x + x.T, [f32(4, 4)], jnp.add, [f32(4, 4)] * 2),
    "late": (jnp.matmul, [f32(4, 4)] * 2, lambda x, w: (x @ w) @ w, [f32(4, 4)] * 2),
}


@pytest.mark.parametrize("case", DIFFERENT)
def test_groups_that_differ_do_not_share(case):
    f, xs, g, ys = DIFFERENT[case]
    one, other = (prices()._signature(grouped(fn, *args)[0]) for fn, args in ((f, xs), (g, ys)))
    assert one != other


@pytest.mark.parametrize("field", ["kept", "fused"])
def test_groups_that_are_rounded_do_not_share(field):
    (group,) = grouped(jnp.matmul, *[f32(4, 4)] * 2)
    rounded = Itemsizes(**{field: frozenset([group.outputs[0].value.id])})
    assert prices(itemsizes=rounded)._signature(group) != prices()._signature(group)


def test_groups_whose_operands_lie_otherwise_do_not_share():
    """A product of a matrix and one that is read the other way round."""
    one, other = (
        grouped(lambda x, w, dim=dim: jax.lax.dot_general(x, w, (((1,), (dim,)), ((), ()))), *[f32(4, 4)] * 2)[0]
        for dim in (0, 1)
    )
    assert prices()._signature(one) != prices()._signature(other)


def test_groups_whose_operands_are_made_again_do_not_share():
    """A product of two operands, and of one that is twice the same."""
    (group,) = grouped(jnp.matmul, *[f32(4, 4)] * 2)
    left, right = (use.value for use in group.uses)
    apart, alike = ({right.id: (value,)} for value in (right, left))
    assert prices(instead=apart)._signature(group) == prices()._signature(group)
    assert prices(instead=alike)._signature(group) != prices()._signature(group)


# Wrong prices are caught.


@pytest.mark.parametrize(
    "name, wrong", [("LAUNCH_SECONDS", 1e-3), ("HALVES_FACTOR", 1.0), ("collective_seconds", lambda *_: 3e-3)]
)
def test_wrong_prices_are_caught(monkeypatch, name, wrong):
    monkeypatch.setattr(module, name, wrong)
    with pytest.raises(AssertionError):
        test_reshardings_by_hand("gathered")
    with pytest.raises(AssertionError):
        test_collectives_that_are_waited_for()


@pytest.mark.parametrize("wrong", [0.0, 1.0])
def test_hiding_too_little_or_too_much_is_caught(monkeypatch, wrong):
    pair, moved = PriceList._pair, PriceList._moved
    monkeypatch.setattr(PriceList, "_pair", lambda self, *args: (*pair(self, *args)[:2], wrong))
    with pytest.raises(AssertionError):
        test_gathers_of_weights_are_hidden("gathered")
    monkeypatch.undo()
    monkeypatch.setattr(PriceList, "_moved", lambda self, *args: (moved(self, *args)[0], wrong))
    with pytest.raises(AssertionError):
        test_gathers_of_weights_are_hidden("gathered")


def test_bytes_of_inner_values_are_caught(monkeypatch):
    """As if every equation of a chain went through memory."""

    def unfused(self, group, wants, leaves):
        return sum(x.bytes for e in group.equations for x in (*e.inputs, *e.outputs) if isinstance(x, Value))

    monkeypatch.setattr(GroupWork, "_bytes_moved", unfused)
    with pytest.raises(AssertionError):
        test_compute_by_hand("a chain reads and writes its ends only")


def test_a_mesh_needs_its_links():
    with pytest.raises(MeshError, match=r"'y' .2 devices. has no link"):
        PriceList({"y": 2}, round_topology("x"))


@pytest.mark.parametrize("layout, rows", [((("x",), ()), 1), (((), ()), 4)])
@pytest.mark.parametrize("dtype, share", [("float32", 0.40), ("bfloat16", 0.26)])
def test_a_product_with_a_vector_goes_over_the_matrix(dtype, share, layout, rows):
    """Four rows over four devices are one each, with which TPUs multiply elementwise."""
    operands = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((4, 64), (64, 256))]
    program = traced(jnp.matmul, *operands)
    (group,) = groups_of(program, rules_for(program), V5E)
    priced = PriceList(LINE, TOPOLOGY, backend=WORK_OF_V5E).group(group)
    found = priced.strategies.index(next(one for one in priced.strategies if one.operand_layouts == (layout, ((), ()))))
    elementwise = 64 * 256 * operands[0].dtype.itemsize / share * 1e-9
    assert (priced.seconds[found].compute == pytest.approx(elementwise)) == (rows == 1)


def test_a_batch_of_products_with_vectors_is_not_elementwise():
    """Where a device has one of the batch left, it is one such product."""
    program = traced(lambda x, w: jnp.einsum("bk,bkn->bn", x, w), f32(4, 64), f32(4, 64, 256))
    (group,) = groups_of(program, rules_for(program), V5E)
    priced = PriceList(LINE, TOPOLOGY, backend=V5E).group(group)
    plain = PriceList(LINE, TOPOLOGY, backend=replace(V5E, vector_products=VectorProducts())).group(group)
    dearer = {
        strategy.output_layouts: ours.compute > theirs.compute
        for strategy, ours, theirs in zip(priced.strategies, priced.seconds, plain.seconds, strict=True)
        if not strategy.finishes
    }
    assert dearer[(((), ()),)] is False and dearer[((("x",), ()),)] is True
