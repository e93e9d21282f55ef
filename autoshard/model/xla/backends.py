"""XLA's compilers: per chip the constants of each habit, and on which chip's programs they were measured.

A habit is a file beside this one, with its constants in a dataclass. A `Backend` is what one compiler does of each.
`BACKENDS` has a row for every chip that programs were compiled for and read. The other chips of `mesh/chips.py` name
one of these, and plans for them carry a remark (`Backend.remarks`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jax.sharding import AbstractMesh, Mesh

from autoshard.mesh.chips import CHIPS, chip_name_of
from autoshard.mesh.machines import parse_machine
from autoshard.model.xla.combining import Combining
from autoshard.model.xla.convolutions import Convolutions
from autoshard.model.xla.fusion import Fusion
from autoshard.model.xla.gathers import Gathers
from autoshard.model.xla.gpu.factorizations import LIBRARIES, Library
from autoshard.model.xla.gpu.sorts import Sorts
from autoshard.model.xla.loop_memory import LoopMemory
from autoshard.model.xla.operations import KERNEL_SECONDS, OperationCosts
from autoshard.model.xla.overlap import Overlap
from autoshard.model.xla.products import FourierProducts, VectorProducts
from autoshard.model.xla.recopies import Recopies
from autoshard.model.xla.rounding import Rounding
from autoshard.model.xla.scatters import Scatters
from autoshard.model.xla.sums import Sums
from autoshard.model.xla.tiles import Tile
from autoshard.model.xla.units.matrix_unit import MatrixUnit
from autoshard.model.xla.units.streams import Streams
from autoshard.model.xla.units.vector_unit import VectorUnit
from autoshard.primitives import WINDOW_REDUCTIONS, primitives_where


@dataclass(frozen=True)
class Backend:
    """One compiler. The defaults are what all have in common."""

    name: str  # a `jax.Device.platform`
    lowers_as: str  # what `jax.lax.platform_dependent` calls it
    chip: str  # what programs are made for: a key of CHIPS, or a kind of device that has no row
    measured_on: str  # the chip whose programs the constants were read from: a key of BACKENDS
    usable: float = 0.85  # share of a memory limit that a plan may be predicted to fill: peaks can be off
    slices: int = 1  # of TPUs; a program is that of one, outermost in the mesh, and the network joins them
    on_chip_bytes: float = 0.0  # of temporaries that lie in the chip's own memory, which is no part of the peak
    on_chip_seconds: float = 0.0  # after which a temporary leaves it if it is still wanted, whatever its size
    number_bytes: int = 0  # that a temporary of one element takes, which lies outside the chip; 0: what it has
    tile: Tile | None = None  # to which the two minor dims of an array are padded
    copies_circles: bool = False  # donated arguments that change places in a circle are all copied, not all but one
    runs_ready_first: bool = False  # what waits for the least, as gathers of arguments, before all else
    transposes_operands: bool = False  # products want some operands in another order, and copy them
    combining: Combining = field(default_factory=Combining)
    convolutions: Convolutions = field(default_factory=Convolutions)
    fourier_products: FourierProducts = field(default_factory=FourierProducts)
    fusion: Fusion = field(default_factory=Fusion)
    gathers: Gathers = field(default_factory=Gathers)
    loop_memory: LoopMemory = field(default_factory=LoopMemory)
    overlap: Overlap = field(default_factory=Overlap)
    recopies: Recopies = field(default_factory=Recopies)
    rounding: Rounding = field(default_factory=Rounding)
    scatters: Scatters = field(default_factory=Scatters)
    libraries: Mapping[str, Library] = field(default_factory=dict)  # primitive -> what it becomes
    sorts: Sorts = field(default_factory=Sorts)
    operations: OperationCosts = field(default_factory=OperationCosts)
    sums: Sums = field(default_factory=Sums)
    vector_products: VectorProducts = field(default_factory=VectorProducts)
    vector_unit: VectorUnit = field(default_factory=VectorUnit)
    streams: Streams = field(default_factory=Streams)
    matrix_unit: MatrixUnit = field(default_factory=MatrixUnit)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What plans say of constants that were not measured for their chip.

        >>> backend_of(AbstractMesh((8,), ("x",)), "v6e:2x4").remarks
        ('compiler constants of v6e were not measured: those of v5e are used.',)
        """
        if self.chip == self.measured_on:
            return ()
        return (f"compiler constants of {self.chip} were not measured: those of {self.measured_on} are used.",)


_LOOPS = primitives_where(lambda facts: facts.is_loop)
_SLICES = primitives_where(lambda facts: facts.slices)
SCATTERS = frozenset({"scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub"})
_MOVED = _SLICES | {"concatenate", "dynamic_slice", "pad"}
_IN_PLACE = primitives_where(lambda facts: facts.overwrites) | {"random_unwrap", "random_wrap"}
_SUMMED_IN_PARTS = frozenset({"bfloat16", "complex64", "float32"})  # numbers that TPUs reduce_scatter
_KINDS_BEHIND_COMPUTE = ("all_gather", "all_reduce", "reduce_scatter")

CPU = Backend(
    name="cpu",
    lowers_as="cpu",
    chip="cpu",
    measured_on="cpu",
    copies_circles=True,
    runs_ready_first=True,
    transposes_operands=True,
    combining=Combining(counts=False),  # what a lone all_reduce takes among threads of one process was not measured
    convolutions=Convolutions(flops_share=0.5),
    fusion=Fusion(
        taken_in=_MOVED | {"gather"}, overwrites_operands=True, overwritten_by=_IN_PLACE, reshapes_in_place=True
    ),
    rounding=Rounding(moves_as={"bfloat16": 4, "float8_e4m3fn": 2, "float8_e5m2": 2}),
    scatters=Scatters(from_all_reduces=False),
)
H100 = Backend(
    name="gpu",
    lowers_as="cuda",
    chip="h100",
    measured_on="h100",
    usable=0.7,
    combining=Combining(kinds=frozenset(_KINDS_BEHIND_COMPUTE), below_bytes=30 * 2**20),
    fusion=Fusion(
        takes_in=_LOOPS | SCATTERS | WINDOW_REDUCTIONS | {"gather", "sort"},
        taken_in=_SLICES | {"concatenate", "gather", "pad"},
        stores_scattered=True,
        reduces_apart_from=32,
        overwrites_operands=True,
        overwritten_by=_IN_PLACE - {"sort"},
        reshapes_in_place=True,
        stores_keys=True,
        normalises=True,
    ),
    libraries=LIBRARIES,
    operations=OperationCosts(least_seconds=KERNEL_SECONDS, are_kernels=True),
    overlap=Overlap(dict.fromkeys(_KINDS_BEHIND_COMPUTE, 0.55)),
    recopies=Recopies(pieces=1),
    rounding=Rounding(before_moves=True, widens_after_moves=True),
    sorts=Sorts(element_seconds=0.25e-12, byte_seconds=0.11e-12),
    sums=Sums(hoists=True, adds_first=True, runs_last=True),
)
V5E = Backend(
    name="tpu",
    lowers_as="tpu",
    chip="v5e",
    measured_on="v5e",
    number_bytes=2**14,
    tile=(8, 128),
    on_chip_bytes=88 * 2**20,  # of 128 MiB; arguments are copied there, too (`tests/model/xla/test_chip_memory.py`)
    on_chip_seconds=1.3e-3,  # by products between which 1 to 16 MiB wait
    combining=Combining(below_bytes=2**26),
    convolutions=Convolutions(
        copies_images=True,
        clock=1.5e9,
        few_channels=16,
        tap_cycles=(2.1, 0.7),
        lone_cycles=2.1,
        side=128,
        turn_flops=4300,
    ),
    fourier_products=FourierProducts(passes=6, side=128, memory_passes=2.5),
    fusion=Fusion(
        takes_in=_LOOPS | {"conv_general_dilated", "dot_general"},
        taken_in=_SLICES,
        sinks_broadcasts=True,
        stores_long=True,  # `tests/model/xla/test_long_functions.py`
        stores_softmaxes=True,
    ),
    gathers=Gathers(several_dims_at_once=True, copies_results=True, summed_up_to_bytes=2**24),
    loop_memory=LoopMemory(  # six products of 16 MiB, and not eight
        bytes=6 * 2**24, keeps_sums=True, rounding_share=0.36
    ),
    overlap=Overlap({"all_gather": 0.5, "host": 0.9}),
    # By libtpu's cycles 5 to 10 for images. XLA counts no copies where it chooses layouts itself: at more than 4
    # `evaluate` has a U-Net gather where XLA for TPU has all_to_alls.
    recopies=Recopies(pieces=2, image_pieces=4),
    rounding=Rounding(operands=True, before_moves=True, sums_as={"bool": 4}),
    scatters=Scatters(over_all_up_to=8, dtypes=_SUMMED_IN_PARTS, chip_rows=8),  # 2x2 and 2x4; 4x8 and 4x4 have none
    operations=OperationCosts(least_seconds=1.217e-6, product_seconds=1.29e-6, slice_bandwidth_share=0.5),
    sums=Sums(hoists=True, adds_first=True, loops_first=True),
    vector_products=VectorProducts({4: 0.40, 2: 0.26}),
    vector_unit=VectorUnit(
        clock=1.5e9,
        cycles={
            "asinh": 9,
            "cos": 40,
            "digamma": 110,
            "erf": 9,
            "erf_inv": 11,
            "igamma": 190,  # one turn of its loops
            "igamma_grad_a": 400,
            "igammac": 190,
            "lgamma": 61,
            "polygamma": 61,  # of an order that stands in the program
            "random_bits": 36,
            "random_gamma": 4300,  # one turn of its loops; 3,950 of 32 registers, 4,840 of 128
            "RNG_PHILOX": 380,  # 230 to 580, by how its blocks come to lie
            "RNG_THREE_FRY": 180,  # 60 to 330
            "random_split": 400,  # per key that is made; words of keys lie in tiles of one or two rows
            "sin": 40,
            "tan": 44,
            "zeta": 61,
        },
        complex_cycles={
            "cos": 84,
            "cosh": 168,
            "exp": 86,
            "expm1": 84,
            "logistic": 92,
            "pow": 140,
            "rsqrt": 91,
            "sin": 84,
            "sinh": 168,
            "tan": 85,
            "tanh": 86,
        },
    ),
    matrix_unit=MatrixUnit(clock=1.5e9, product_cycles=13, side=128),
    streams=Streams(
        clock=1.5e9,
        bandwidth=CHIPS["v5e"].memory_bandwidth,
        bandwidth_share=0.88,  # 8.5 cycles per register of 32-bit numbers
        register_cycles=8.6,
        window_cycles=1490,
        window_bytes=7.5e6,  # 16 to 42 windows of 64 to 320 MiB
        window_elements=2**20,
        alone_bytes=5e6,  # 4 MiB are one window, 6 are not
        alone_elements=2**17,
        alone_cycles=1740,
    ),
)
V5P = replace(
    V5E,
    chip="v5p",
    measured_on="v5p",
    convolutions=replace(V5E.convolutions, turn_devices=(5, 32)),
    fourier_products=replace(V5E.fourier_products, passes=11),  # by libtpu's cycles, of 256 points
    on_chip_bytes=2 * 2**20,  # of 64 MiB, by programs that are compiled for 2x2x2
    gathers=replace(V5E.gathers, summed_up_to_bytes=math.inf),
    # Four weights of 8 MiB, and not six; every other one of these weights is fetched, if they are gathered.
    loop_memory=LoopMemory(bytes=2.0**25, fetched_share=0.5, rounding_share=0.24),
    overlap=Overlap({"host": 0.9}),
    recopies=replace(V5E.recopies, keeps_columns=True),
    # 16,384 registers of one and two arrays, fused and not
    streams=replace(
        V5E.streams,
        clock=1.75e9,
        bandwidth=CHIPS["v5p"].memory_bandwidth,
        register_cycles=2.9,
        window_cycles=1320,
        alone_cycles=1085,
    ),
    scatters=Scatters(over_all_up_to=4, dtypes=_SUMMED_IN_PARTS, chip_rows=16),  # 2x2x1; 2x2x2 has none
    vector_products=VectorProducts({4: 0.35, 2: 0.22}),
)
BACKENDS: Mapping[str, Backend] = {backend.chip: backend for backend in (CPU, H100, V5E, V5P)}
_BY_PLATFORM = {"cpu": CPU, "tpu": V5E}  # what a device without a row in CHIPS is taken for; others are GPUs


def backend_of(mesh: Mesh | AbstractMesh, machine: str | None = None) -> Backend:
    """The compiler for the devices of a mesh; without devices, for a machine by name, or else for TPU v5e."""
    if isinstance(mesh, Mesh):
        devices = mesh.devices.ravel().tolist()
        slices = len({getattr(device, "slice_index", None) for device in devices})
        chip, otherwise = chip_name_of(devices[0].device_kind), _BY_PLATFORM.get(devices[0].platform, H100)
        found = _for_chip(chip) if chip else replace(otherwise, chip=devices[0].device_kind)
    elif machine is None:
        return V5E
    else:
        parsed = parse_machine(machine)
        slices, found = parsed.slices, _for_chip(parsed.chip)
    if found.name == "tpu" and slices > 1:  # of gathers of several dims over slices nothing is known
        found = replace(found, slices=slices, gathers=replace(found.gathers, several_dims_at_once=False))
    return found


def _for_chip(chip: str) -> Backend:
    """The compiler that makes programs for a chip."""
    constants = CHIPS[chip].compiler_constants
    return BACKENDS[constants.of] if constants.measured else replace(BACKENDS[constants.of], chip=chip)
