"""What XLA's compilers for CPU, GPU and TPU do differently with one partitioned program, as far as predictions know."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from jax.sharding import AbstractMesh, Mesh

from autoshard.mesh.chips import CHIPS, chip_of
from autoshard.mesh.machines import parse_machine
from autoshard.primitives import primitives_where


@dataclass(frozen=True)
class Backend:
    """One compiler. The defaults are what all have in common."""

    name: str  # a `jax.Device.platform`
    lowers_as: str  # what `jax.lax.platform_dependent` calls it
    usable: float = 0.85  # share of a memory limit that a plan may be predicted to fill: peaks can be off
    slices: int = 1  # of TPUs; a program is that of one, outermost in the mesh, and the network joins them
    shortest: float = 0.0  # s, of an operation: what a slice takes that a device cuts out of what it has
    reduce_scatters: bool = True  # whether it makes an all_reduce and a slice a reduce_scatter
    tile: tuple[int, int] | None = None  # rows and columns that the two minor dims of an array are padded to
    # kind -> share of its time that runs behind compute, where nothing waits for it
    hides: Mapping[str, float] = field(default_factory=dict)
    combined_kinds: frozenset[str] = frozenset({"all_reduce"})  # of which many become one, where nothing waits for them
    combines_below: float = math.inf  # bytes of their results: those of this size and more stay alone
    scatters_globally: bool = True  # has reduce_scatters over all devices of a program; or it all_reduces, and slices
    gathers_at_once: bool = False  # several dims, one after the other, in one all_gather over the axes of all
    # Bytes of the largest all_gather over all of many devices that becomes an all_reduce of zeros and the own piece. On
    # TPUs with tori of three dims it is any: `tests/mesh/test_targets.py` compiles gathers on either side.
    sums_gathers: float = 0.0
    # Bytes of what a loop reads in every turn that need not go through memory: they stay in the chip's own ...
    keeps_inside: float = 0.0
    keeps_sums: bool = False  # ... as matrix products do that it adds up
    fetches_gathered: float = 0.0  # share of what is gathered for a loop that it does read from memory in every turn
    hoists_sums: bool = False  # partial sums that a loop adds up are reduced once, after the loop
    sums_first: bool = False  # partial sums that are only added up are added before they are reduced, once
    # How often an all_to_all, or a gather whose pieces come out of order, copies what it moves.
    recopies: int = 0
    keeps_columns: bool = False  # pieces of columns, as an array is written, come in order only if they are whole tiles
    image_recopies: int = 0  # the same for images of two bytes an element, whose pieces pad; at least as for others
    slicing: float = 1.0  # at which part of the memory's bandwidth a loop copies what it slices
    convolves: float = 1.0  # at which part of the FLOP/s of matrix products convolutions run
    rounds_operands: bool = False  # float32 operands of products to bfloat16, as early as it can
    rounds_first: bool = False  # what is only converted to a smaller type after it is moved, before that
    widens_last: bool = False  # what is converted to a larger type before it is moved, after that
    transposes_operands: bool = False  # products want some operands in another order, and copy them
    sinks_broadcasts: bool = False  # what repeats something smaller does so inside the loop that uses it
    sums_last: bool = False  # what nothing waits for is computed last of all, if it is summed over devices
    overwrites: bool = False  # elementwise work goes into the buffer of an operand that nobody else reads
    stores_scattered: bool = False  # what scatters is no part of what reads it
    takes_in: frozenset[str] = frozenset()  # primitives that, as elementwise ones, do their operands' work again
    taken_in: frozenset[str] = frozenset()  # primitives whose work these do again, beside elementwise ones


_LOOPS = primitives_where(lambda facts: facts.is_loop)
_SLICES = primitives_where(lambda facts: facts.slices)

CPU = Backend("cpu", "cpu", reduce_scatters=False, convolves=0.5, transposes_operands=True)
GPU = Backend(
    "gpu",
    "cuda",
    usable=0.7,
    # Between what small and large models hide: docs/architecture.md, Overlap.
    hides=dict.fromkeys(("all_gather", "all_reduce", "reduce_scatter"), 0.55),
    combined_kinds=frozenset({"all_gather", "all_reduce", "reduce_scatter"}),
    combines_below=30 * 2**20,  # the default of XLA's combiners (xla/service/collective_utils.h)
    recopies=1,
    hoists_sums=True,
    sums_first=True,
    rounds_first=True,
    widens_last=True,
    sums_last=True,
    overwrites=True,
    stores_scattered=True,
    takes_in=_LOOPS | {"gather"},
    taken_in=_SLICES | {"pad"},
)
TPU = Backend(
    "tpu",
    "tpu",
    tile=(8, 128),
    shortest=1.2e-6,  # by libtpu's cycles: `tests/mesh/test_targets.py` compiles a slice
    hides={"all_gather": 0.5},  # docs/benchmarks/prediction.md: in the median of programs that gather weights
    scatters_globally=False,
    gathers_at_once=True,
    sums_gathers=2**24,
    combines_below=2**26,
    keeps_inside=6 * 2**24,  # six products of 16 MiB, and not eight: `tests/mesh/test_targets.py` compiles both
    keeps_sums=True,
    recopies=2,
    # By libtpu's cycles 5 to 10. XLA counts no copies where it chooses layouts itself: at more than 4 `evaluate` has a
    # U-Net gather where XLA for TPU has all_to_alls.
    image_recopies=4,
    slicing=0.5,  # by libtpu's cycles: slices of 2 to 32 MiB, on v5e
    hoists_sums=True,
    sums_first=True,
    rounds_operands=True,
    rounds_first=True,
    sinks_broadcasts=True,
    takes_in=_LOOPS | {"conv_general_dilated", "dot_general"},
    taken_in=_SLICES,
)
_BACKENDS = {backend.name: backend for backend in (CPU, GPU, TPU)}


def padded_size(shape: tuple[int, ...], tile: tuple[int, int] | None, minor: tuple[int, ...] | None = None) -> int:
    """Elements that an array takes in memory, with those dims as the minor ones that pad least.

    Fewer rows than a tile has are padded to a power of two.

    Args:
        shape: of the array.
        tile: rows and columns; None if nothing is padded.
        minor: the dims among which the two minor ones are, if not any.

    >>> padded_size((257, 3), (8, 128)), padded_size((16, 16, 257, 257), (8, 128))
    (1536, 25264128)
    >>> padded_size((8, 256, 256, 64), (8, 128), minor=(0, 3)) // 256**2  # images, 64 channels of 128 lanes
    1024
    """
    size = math.prod(shape)
    if tile is None or not size:
        return size
    if len(shape) < 2:
        return _padded(size, tile[1])
    dims = itertools.permutations(range(len(shape)) if minor is None else minor, 2)
    return min(_size_with(shape, row, column, tile) for row, column in dims)


@functools.cache
def tiled_dims(shape: tuple[int, ...], tile: tuple[int, int]) -> np.ndarray:
    """[other, rows, columns; dim]: whether that is what a dim can be where an array lies with the least padding.

    The outermost dim is neither rows nor columns if that takes no more: what reads a stack reads a layer at a time.

    >>> tiled_dims((24, 1024, 16, 64), (8, 128)).astype(int)  # weights of heads of 64, as columns half of them padding
    array([[1, 0, 1, 1],
           [0, 0, 1, 1],
           [0, 1, 0, 0]])
    """
    roles = np.zeros((3, len(shape)), dtype=bool)
    if not math.prod(shape):
        return ~roles
    sizes = {(a, b): _size_with(shape, a, b, tile) for a, b in itertools.permutations(range(len(shape)), 2)}
    least = min(sizes.values(), default=0)
    pairs = [pair for pair, size in sizes.items() if size == least]
    for row, column in [pair for pair in pairs if 0 not in pair] or pairs:
        others = [dim for dim in range(len(shape)) if dim not in (row, column)]
        roles[0, others] = roles[1, row] = roles[2, column] = True
    return roles


def _size_with(shape: tuple[int, ...], row: int, column: int, tile: tuple[int, int]) -> int:
    """Elements that an array takes with these dims as rows and columns."""
    rows, columns = tile
    rest = math.prod(shape) // (shape[row] * shape[column])
    return rest * _padded(shape[row], min(rows, 1 << (shape[row] - 1).bit_length())) * _padded(shape[column], columns)


def _padded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def backend_of(mesh: Mesh | AbstractMesh, machine: str | None = None) -> Backend:
    """The compiler for the devices of a mesh; without devices, for a machine by name, or else for TPU."""
    if isinstance(mesh, Mesh):
        devices = mesh.devices.ravel().tolist()
        slices = len({getattr(device, "slice_index", None) for device in devices})
        backend, chip = _BACKENDS.get(devices[0].platform, GPU), chip_of(devices[0].device_kind)
    elif machine is None:
        return TPU
    else:
        parsed = parse_machine(machine)
        slices, chip = parsed.slices, CHIPS[parsed.chip]
        backend = TPU if chip.torus_dims else _BACKENDS.get(parsed.chip, GPU)
    if backend is TPU and slices > 1:
        backend = replace(backend, slices=slices, gathers_at_once=False)  # not known of gathers over slices
    if backend.name == TPU.name and chip is not None and chip.torus_dims == 3:
        backend = replace(
            backend,
            sums_gathers=math.inf,
            keeps_inside=2.0**25,  # four weights of 8 MiB, and not six: the same tests compile both
            keeps_sums=False,
            fetches_gathered=0.5,  # every other one of these weights, if they are gathered
            keeps_columns=True,
        )
    return backend
