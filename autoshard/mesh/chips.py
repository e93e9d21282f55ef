"""Known chips, as rows of data with a source per number.

One row is one JAX device. FLOP rates are dense matmuls at JAX's default precision, which on TPU runs float32 operands
in one bfloat16 pass and on NVIDIA GPUs in TF32. Sources:

[tpu]   Google Cloud, pages of the TPU versions (docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /v4, /tpu7x); what they
        call bidirectional ICI bandwidth per chip is twice the one way of a link times its links, 4 or 6
[book]  "How to Scale Your Model", chapter 2: tables of chips and of ICI bandwidth one way per link, and which dims
        close to a ring; PCIe bandwidth per chip; chapter 3: latency of a hop (github.com/jax-ml/scaling-book)
[nv]    NVIDIA data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200: without sparsity; NVLink one direction is
        half of the "total" figure
[dgx]   NVIDIA DGX A100, H100, H200, B200: one network adapter of 200 (A100) or 400 Gbit/s per GPU
[nccl]  NCCL, src/graph/tuning.cc, hwLatencies of Ring with LL128: 1.9 us over NVLink, 4.0 us over the network
[aot]   measured: the clock at which libtpu's `estimated_cycles` of compiled programs are seconds
[pcie]  data sheets as [nv]: PCIe x16 of generation 4 (A100) or 5, one direction is half of the figure for both
[cpu]   measured and fitted; see `CHIPS["cpu"]`
[guess] found in no source: the latency of the network between TPU slices, and its bandwidth for v4; the host link of 7x
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.mesh.links import Cache, Link

_GB, _GIB = 1e9, 2.0**30


@dataclass(frozen=True)
class CompilerConstants:
    """Which constants of XLA's compilers predictions for a chip use."""

    of: str  # the chip from whose programs they were read: a key of BACKENDS in model/xla/backends.py
    measured: bool  # whether that is this very chip; if not, every plan for it carries a remark


def _measured_on(chip: str) -> CompilerConstants:
    """Programs were compiled for this chip, and read."""
    return CompilerConstants(of=chip, measured=True)


def _taken_from(chip: str) -> CompilerConstants:
    """Nobody has read programs for this chip: it is taken for another one."""
    return CompilerConstants(of=chip, measured=False)


@dataclass(frozen=True)
class Chip:
    """One JAX device of a kind, and what it is wired to."""

    kinds: tuple[str, ...]  # what its `device_kind` contains, in lower case
    compiler_constants: CompilerConstants
    memory_bytes: float  # bytes
    memory_bandwidth: float  # bytes/s
    flops: Mapping[str, float]  # FLOP/s by dtype
    link: Link  # inside a host or TPU slice; on a torus one way of one link
    network: Link  # between hosts or slices
    cache: Cache | None = None
    clock: float | None = None  # Hz, of a TPU
    torus_dims: int = 0  # dims of the torus that its chips form, 0 without one
    wraps: int = 0  # a torus dim that is a multiple of this closes to a ring
    switches_cubes: bool = False  # optical switches join whole cubes of `wraps` chips a side: all dims close, or none
    cores: int = 1  # devices on one chip, where names and coordinates count chips
    core_link: Link | None = None  # between the devices on one chip
    host_bandwidth: float | None = None  # bytes/s to the host's memory, and as much back; None: it is the same

    def rings(self, dims: Sequence[int]) -> tuple[bool, ...]:
        """Which dims of a slice's torus close to a ring."""
        closes = [self.torus_dims > 0 and size % self.wraps == 0 for size in dims]
        if self.switches_cubes and not (len(dims) == self.torus_dims and all(closes)):
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
    kinds, constants, memory_gib, memory_gb_s, bf16, ici_gb_s, dcn_gbit_s, *, dims, wraps=0,
    cube=0, clock=None, int8=None, fp8=None, cores=1, host_gb_s=15,
) -> Chip:  # fmt: skip
    """A row in the units of the sources, all per chip: GiB, GB/s, TFLOP/s, GB/s one way per link, Gbit/s, GHz, GB/s.

    Args:
        wraps: as of `Chip`, of a chip whose slices are no cubes.
        cube: chips along a side of the cubes that are switched.
    """
    rates = {"bfloat16": bf16, "float32": bf16, "int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return Chip(
        kinds=kinds,
        compiler_constants=constants,
        memory_bytes=memory_gib * _GIB / cores,
        memory_bandwidth=memory_gb_s * _GB / cores,
        flops={dtype: rate * 1e12 / cores for dtype, rate in rates.items() if rate is not None},
        link=Link(latency=1e-6, bandwidth=ici_gb_s * _GB / cores, torus=True),  # [book]
        network=Link(latency=1e-5, bandwidth=dcn_gbit_s / 8 * _GB / cores),  # [guess], [tpu]
        clock=None if clock is None else clock * 1e9,
        torus_dims=dims,
        wraps=cube or wraps,
        switches_cubes=cube > 0,
        cores=cores,
        core_link=Link(latency=1e-6, bandwidth=6 * ici_gb_s * _GB) if cores > 1 else None,  # [tpu]: 6 times one link
        host_bandwidth=host_gb_s * _GB / cores,
    )


def _gpu(
    kinds, constants, memory_gb, memory_gb_s, bf16, tf32, nvlink_gb_s, network_gbit_s, pcie_gb_s, *, int8, fp8=None
) -> Chip:
    """A row in the units of the data sheets: GB, GB/s, TFLOP/s, GB/s one direction, Gbit/s, GB/s one direction."""
    rates = {"bfloat16": bf16, "float32": tf32, "int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return Chip(
        kinds=kinds,
        compiler_constants=constants,
        memory_bytes=memory_gb * _GB,
        memory_bandwidth=memory_gb_s * _GB,
        flops={dtype: rate * 1e12 for dtype, rate in rates.items() if rate is not None},
        link=Link(latency=1.9e-6, bandwidth=nvlink_gb_s * _GB),  # [nccl], [nv]
        network=Link(latency=4.0e-6, bandwidth=network_gbit_s / 8 * _GB),  # [nccl], [dgx]
        host_bandwidth=pcie_gb_s * _GB,  # [pcie]
    )


# Programs for v5e and v5p are compiled by libtpu, programs for h100 by XLA's GPU compiler, and those for CPU run:
# `docs/benchmarks/prediction.md`, `docs/benchmarks/plans.md`, `tests/mesh/test_targets.py`. For v6e a single gather is.
_V5E, _V5P, _H100 = _taken_from("v5e"), _taken_from("v5p"), _taken_from("h100")

CHIPS: Mapping[str, Chip] = {
    # [tpu]: memory, its bandwidth, peak compute, network per chip (v4: [guess]); [book]: ICI of one link, link to the
    # host; [aot]: clock
    "v4": _tpu(("tpu v4",), _V5P, 32, 1200, 275, 45, 50, dims=3, cube=4, clock=1.05, int8=275, host_gb_s=16),
    "v5e": _tpu(
        ("tpu v5 lite", "tpu v5e"), _measured_on("v5e"), 16, 819, 197, 50, 25, dims=2, wraps=16, clock=1.5, int8=393
    ),
    "v5p": _tpu(
        ("tpu v5p", "tpu v5"), _measured_on("v5p"), 95, 2765, 459, 100, 50, dims=3, cube=4, clock=1.75, int8=918
    ),
    "v6e": _tpu(
        ("tpu v6 lite", "tpu v6e"), _V5E, 32, 1638, 918, 100, 100, dims=2, wraps=16, clock=1.75, int8=1836, host_gb_s=32
    ),
    # its two chiplets are two JAX devices, each with half of the chip
    "7x": _tpu(("tpu7x", "tpu v7x"), _V5P, 192, 7380, 2307, 100, 100, dims=3, cube=4, fp8=4614, cores=2, host_gb_s=32),
    # [nv] and [dgx]
    "a100": _gpu(("a100",), _H100, 80, 2039, 312, 156, 300, 200, 32, int8=624),
    "h100": _gpu(("h100",), _measured_on("h100"), 80, 3350, 989.5, 494.5, 450, 400, 64, int8=1979, fp8=1979),
    "h200": _gpu(("h200",), _H100, 141, 4800, 989.5, 494.5, 450, 400, 64, int8=1979, fp8=1979),
    "b200": _gpu(("b200",), _H100, 180, 8000, 2250, 1125, 900, 400, 64, int8=4500, fp8=4500),
    # One of 8 virtual devices that share a 2-core x86 host. 8 chained matmuls of 512 x 512 make 2.3e10 float32 FLOP/s
    # on each of the 8; memory is an eighth of a 32 GiB host. The rest was fitted to the measured steps of nine models
    # under six shardings (docs/benchmarks/prediction.md): in a step, devices that share cores wait for each other, and
    # fresh memory costs more than in a loop. Orders of magnitude: enough to plan tests and demos by.
    "cpu": Chip(
        kinds=("cpu",),
        compiler_constants=_measured_on("cpu"),
        memory_bytes=4 * _GIB,
        memory_bandwidth=6.5e8,
        flops={"float32": 2.3e10, "bfloat16": 2.2e10},
        link=Link(latency=1e-4, bandwidth=3e8, shared=True),
        cache=Cache(3e6, 3e9),
        network=Link(latency=1e-4, bandwidth=1.5e8),  # an eighth of 10 Gbit/s Ethernet
    ),
}


def chip_name_of(device_kind: str) -> str | None:
    """The key of CHIPS for a `jax.Device.device_kind`."""
    kind = device_kind.lower()
    matches = [(len(part), name) for name, chip in CHIPS.items() for part in chip.kinds if part in kind]
    return max(matches)[1] if matches else None


def chip_of(device_kind: str) -> Chip | None:
    """The row of a `jax.Device.device_kind`."""
    name = chip_name_of(device_kind)
    return None if name is None else CHIPS[name]
