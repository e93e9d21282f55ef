"""Machines by name, as rows of data with a source per number: ``topology("v5e:4x4")``, ``topology("h100:2x8")``.

One row is one JAX device. FLOP rates are dense matmuls at JAX's default precision, which on TPU runs float32 operands
in one bfloat16 pass and on NVIDIA GPUs in TF32. Sources:

[tpu]   Google Cloud, pages of the TPU versions (docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /v4, /tpu7x); what they
        call bidirectional ICI bandwidth per chip is twice the one way of a link times its links, 4 or 6
[book]  "How to Scale Your Model", chapter 2: tables of chips and of ICI bandwidth one way per link, and which dims
        close to a ring; chapter 3: latency of a hop (github.com/jax-ml/scaling-book)
[nv]    NVIDIA data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200: without sparsity; NVLink one direction is
        half of the "total" figure
[dgx]   NVIDIA DGX A100, H100, H200, B200: one network adapter of 200 (A100) or 400 Gbit/s per GPU
[nccl]  NCCL, src/graph/tuning.cc, hwLatencies of Ring with LL128: 1.9 us over NVLink, 4.0 us over the network
[aot]   measured: the clock at which libtpu's `estimated_cycles` of compiled programs are seconds
[cpu]   measured and fitted; see `CHIPS["cpu"]`
[guess] found in no source: the latency of the network between TPU slices, and its bandwidth for v4
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.errors import MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.topology import Cache, Link, Topology

_GB, _GIB = 1e9, 2.0**30


@dataclass(frozen=True)
class Chip:
    """One JAX device of a kind, and what it is wired to."""

    kinds: tuple[str, ...]  # what its `device_kind` contains, in lower case
    memory_bytes: float  # bytes
    memory_bandwidth: float  # bytes/s
    flops: Mapping[str, float]  # FLOP/s by dtype
    link: Link  # inside a host or TPU slice; on a torus one way of one link
    network: Link  # between hosts or slices
    cache: Cache | None = None
    clock: float | None = None  # Hz, of a TPU
    torus_dims: int = 0  # dims of the torus that its chips form, 0 without one
    wraps: int = 0  # a torus dim that is a multiple of this closes to a ring
    cores: int = 1  # devices on one chip, where names and coordinates count chips
    core_link: Link | None = None  # between the devices on one chip

    def rings(self, dims: Sequence[int]) -> tuple[bool, ...]:
        """Which dims of a slice's torus close to a ring; of three, all or none, since whole cubes are switched."""
        closes = [self.torus_dims > 0 and size % self.wraps == 0 for size in dims]
        if self.torus_dims == 3 and not (len(dims) == 3 and all(closes)):
            return (False,) * len(dims)
        return tuple(closes)

    def along(self, ring: bool = False, stride: int = 1) -> Link:
        """The link along one dim of the torus, to every `stride`-th chip: `stride` such lines share the wires."""
        bandwidth = self.link.bandwidth * (2 if ring else 1) / stride
        return Link(self.link.latency * stride, bandwidth, torus=True, ring=ring)

    def between_cores(self) -> Link:
        """The link between the devices on one chip."""
        return self.core_link or self.along()


def _tpu(
    kinds, memory_gib, memory_gb_s, bf16, ici_gb_s, dcn_gbit_s, *, dims, wraps, clock=None, int8=None, fp8=None, cores=1
) -> Chip:
    """A row in the units of the sources, all per chip: GiB, GB/s, TFLOP/s, GB/s one way per link, Gbit/s, GHz."""
    rates = {"bfloat16": bf16, "float32": bf16, "int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return Chip(
        kinds=kinds,
        memory_bytes=memory_gib * _GIB / cores,
        memory_bandwidth=memory_gb_s * _GB / cores,
        flops={dtype: rate * 1e12 / cores for dtype, rate in rates.items() if rate is not None},
        link=Link(latency=1e-6, bandwidth=ici_gb_s * _GB / cores, torus=True),  # [book]
        network=Link(latency=1e-5, bandwidth=dcn_gbit_s / 8 * _GB / cores),  # [guess], [tpu]
        clock=None if clock is None else clock * 1e9,
        torus_dims=dims,
        wraps=wraps,
        cores=cores,
        core_link=Link(latency=1e-6, bandwidth=6 * ici_gb_s * _GB) if cores > 1 else None,  # [tpu]: 6 times one link
    )


def _gpu(kinds, memory_gb, memory_gb_s, bf16, tf32, nvlink_gb_s, network_gbit_s, *, int8, fp8=None) -> Chip:
    """A row in the units of the data sheets: GB, GB/s, TFLOP/s, GB/s one direction, Gbit/s."""
    rates = {"bfloat16": bf16, "float32": tf32, "int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return Chip(
        kinds=kinds,
        memory_bytes=memory_gb * _GB,
        memory_bandwidth=memory_gb_s * _GB,
        flops={dtype: rate * 1e12 for dtype, rate in rates.items() if rate is not None},
        link=Link(latency=1.9e-6, bandwidth=nvlink_gb_s * _GB),  # [nccl], [nv]
        network=Link(latency=4.0e-6, bandwidth=network_gbit_s / 8 * _GB),  # [nccl], [dgx]
    )


CHIPS: Mapping[str, Chip] = {
    # [tpu]: memory, its bandwidth, peak compute, network per chip (v4: [guess]); [book]: ICI of one link; [aot]: clock
    "v4": _tpu(("tpu v4",), 32, 1200, 275, 45, 50, dims=3, wraps=4, clock=1.05, int8=275),
    "v5e": _tpu(("tpu v5 lite", "tpu v5e"), 16, 819, 197, 50, 25, dims=2, wraps=16, clock=1.5, int8=393),
    "v5p": _tpu(("tpu v5p", "tpu v5"), 95, 2765, 459, 100, 50, dims=3, wraps=4, clock=1.75, int8=918),
    "v6e": _tpu(("tpu v6 lite", "tpu v6e"), 32, 1638, 918, 100, 100, dims=2, wraps=16, clock=1.75, int8=1836),
    # its two chiplets are two JAX devices, each with half of the chip
    "7x": _tpu(("tpu7x", "tpu v7x"), 192, 7380, 2307, 100, 100, dims=3, wraps=4, fp8=4614, cores=2),
    # [nv] and [dgx]
    "a100": _gpu(("a100",), 80, 2039, 312, 156, 300, 200, int8=624),
    "h100": _gpu(("h100",), 80, 3350, 989.5, 494.5, 450, 400, int8=1979, fp8=1979),
    "h200": _gpu(("h200",), 141, 4800, 989.5, 494.5, 450, 400, int8=1979, fp8=1979),
    "b200": _gpu(("b200",), 180, 8000, 2250, 1125, 900, 400, int8=4500, fp8=4500),
    # One of 8 virtual devices that share a 2-core x86 host. 8 chained matmuls of 512 x 512 make 2.3e10 float32 FLOP/s
    # on each of the 8; memory is an eighth of a 32 GiB host. The rest was fitted to the measured steps of nine models
    # under six shardings (docs/benchmarks/prediction.md): in a step, devices that share cores wait for each other, and
    # fresh memory costs more than in a loop. Orders of magnitude: enough to plan tests and demos by.
    "cpu": Chip(
        kinds=("cpu",),
        memory_bytes=4 * _GIB,
        memory_bandwidth=6.5e8,
        flops={"float32": 2.3e10, "bfloat16": 2.2e10},
        link=Link(latency=1e-4, bandwidth=3e8, shared=True),
        cache=Cache(3e6, 3e9),
        network=Link(latency=1e-4, bandwidth=1.5e8),  # an eighth of 10 Gbit/s Ethernet
    ),
}


_NAME = re.compile(r"(?:(\d+)\s*x\s*)?(?:tpu\s*)?([a-z0-9]+):(\d+(?:x\d+)*)")


@dataclass(frozen=True)
class Machine:
    """A machine as its name says it; `str` gives the name."""

    chip: str  # a key of CHIPS
    slices: int  # what the network joins: TPU slices, or hosts
    dims: tuple[int, ...]  # chips along each dim of a slice's torus; devices of a host in one dim

    def __str__(self) -> str:
        shape = "x".join(map(str, self.dims))
        if CHIPS[self.chip].torus_dims:
            return f"{self.slices} x {self.chip}:{shape}" if self.slices > 1 else f"{self.chip}:{shape}"
        return f"{self.chip}:{self.slices}x{shape}" if self.slices > 1 else f"{self.chip}:{shape}"

    @property
    def axes(self) -> dict[str, int]:
        """Its dims in JAX devices, outermost first: x, y, z, w, and before them `slice` for several slices of TPUs."""
        chip = CHIPS[self.chip]
        several = [self.slices] if self.slices > 1 else []
        cores = [chip.cores] if chip.cores > 1 else []
        if chip.torus_dims:
            return dict(zip(["slice"] * len(several) + list("xyzw"), [*several, *self.dims, *cores], strict=False))
        return dict(zip("xy", [*several, *self.dims], strict=False))


def parse_machine(name: str) -> Machine:
    """What the name of a machine says.

    Args:
        name: of TPUs the slices if there are several, the chip, the torus: ``"v5e:4x4"``, ``"2x v5e:4x4"``,
            ``"tpu7x:2x2x1"``; of others the hosts if there are several, and the devices of one: ``"h100:8"``,
            ``"h100:2x8"``.

    Raises:
        MeshError: no machine has this name.

    >>> parse_machine("2x7x:2x2x1")
    Machine(chip='7x', slices=2, dims=(2, 2, 1))
    >>> parse_machine("h100:2x8")
    Machine(chip='h100', slices=2, dims=(8,))
    """
    match = _NAME.fullmatch(name.strip().lower())
    slices, chip_name, shape = match.groups() if match else (None, "", "")
    dims = tuple(int(part) for part in shape.split("x")) if match else ()
    if chip_name not in CHIPS or 0 in dims or int(slices or 1) == 0:
        chips = ", ".join(CHIPS)
        raise MeshError(
            f"no machine {name!r}; write chip:shape, as in 'v5e:4x4', '2x v5e:4x4' (slices) or 'h100:2x8' (hosts), "
            f"chip one of {chips}"
        )
    chip = CHIPS[chip_name]
    if not chip.torus_dims:
        if slices is not None or len(dims) > 2:
            raise MeshError(f"no machine {name!r}; write hosts and devices per host after the chip: '{chip_name}:2x8'")
        return Machine(chip_name, dims[0] if len(dims) == 2 else 1, dims[-1:])
    if len(dims) > chip.torus_dims:
        raise MeshError(f"no machine {name!r}; the torus of {chip_name} has {chip.torus_dims} dims, not {len(dims)}")
    return Machine(chip_name, int(slices or 1), dims)


def topology(name: str, axes: MeshShape | None = None) -> Topology:
    """A machine by name: a chip, and the shape of its torus, or hosts x devices per host.

    Args:
        name: ``"v5e:4x4"``, ``"2x v5e:4x4"`` (2 slices of 4 x 4, joined by the data-center network), ``"h100:2x8"`` (2
            hosts of 8), ``"h100:8"``, ``"cpu:8"``.
        axes: mesh axis -> devices, outermost first; without it the dims of the machine, named x, y, z, w, and before
            them `slice` for the slices of TPUs.

    The outermost axes run over the slices or hosts, on the network. An axis that covers them and some of what is inside
    runs over both links, and its collectives are priced level by level. On a torus the other axes are laid on whole
    dims where their sizes allow, as `jax.make_mesh` does it; one whole dim may close to a ring, and several work side
    by side. An axis of any other size is a line laid through the torus.

    Raises:
        MeshError: no machine has this name, or the axes have another number of devices.

    >>> topology("h100:2x8", {"data": 2, "model": 8}).links["data"].bandwidth
    50000000000.0
    >>> topology("v5e:16x16").links["x"].bandwidth
    100000000000.0
    """
    machine = parse_machine(name)
    chip = CHIPS[machine.chip]
    axes = machine.axes if axes is None else dict(axes)
    have, wanted = math.prod(machine.axes.values()), math.prod(axes.values())
    if have != wanted:
        raise MeshError(f"{name} has {have} devices, the axes {axes} have {wanted}")
    inside, parts, outside = {}, {}, machine.slices
    for axis, size in axes.items():
        slices = math.gcd(size, outside)
        outside //= slices
        inside[axis] = size // slices
        parts[axis] = [(slices, chip.network)]
    for axis, links in _laid_out(chip, machine.dims, inside).items():
        parts[axis] += links
    return assemble(chip, parts)


def _laid_out(chip: Chip, dims: Sequence[int], axes: MeshShape) -> dict[str, list[tuple[int, Link]]]:
    """(devices, link) of what each axis runs over inside one slice or host."""
    if not chip.torus_dims:
        return {axis: [(size, chip.link)] for axis, size in axes.items()}
    wires = [(size, chip.along(ring)) for size, ring in zip(dims, chip.rings(dims), strict=True)]
    wires = [(size, link) for size, link in [*wires, (chip.cores, chip.between_cores())] if size > 1]

    def laid(owners: Sequence[str | None]) -> dict[str, list[tuple[int, Link]]]:
        owned = {axis: [wire for wire, owner in zip(wires, owners, strict=True) if owner == axis] for axis in axes}
        whole = {axis: math.prod(size for size, _ in owned[axis]) == axes[axis] for axis in axes}
        return {axis: owned[axis] for axis in axes if whole[axis]}

    # the inner axes are tried first for the inner wires; as many axes as possible get whole dims
    choices = itertools.product([*reversed(axes), None], repeat=len(wires))
    best = max((laid(choice[::-1]) for choice in choices), key=len)
    return {axis: best.get(axis, [(size, chip.along())]) for axis, size in axes.items()}


def chip_of(device_kind: str) -> Chip | None:
    """The row of a `jax.Device.device_kind`."""
    kind = device_kind.lower()
    matches = [(len(part), name) for name, chip in CHIPS.items() for part in chip.kinds if part in kind]
    return CHIPS[max(matches)[1]] if matches else None


def assemble(chip: Chip, parts: Mapping[str, Sequence[tuple[int, Link]]]) -> Topology:
    """A topology of one chip, from the (devices, link) of what each mesh axis runs over."""
    links = {}
    for axis, spans in parts.items():
        spans = [(devices, link) for devices, link in spans if devices > 1]
        links[axis] = Link.join(spans) if spans else chip.link
    return Topology(links, chip.memory_bytes, chip.memory_bandwidth, chip.flops, chip.cache)
