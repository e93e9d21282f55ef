"""Machines by name, as rows of data with a source per number: ``topology("v5e:4x4")``, ``topology("h100:2x8")``.

One row is one JAX device. FLOP rates are dense matmuls at JAX's default precision, which on TPU runs float32 operands
in one bfloat16 pass and on NVIDIA GPUs in TF32. Sources:

[tpu]   Google Cloud, pages of the TPU versions (docs.cloud.google.com/tpu/docs/v5e, /v5p, /v6e, /v4, /tpu7x)
[book]  "How to Scale Your Model", chapter 2, tables of chips and of ICI bandwidth one way per link; latency of a hop
        and of the data-center network, chapters 2 and 3 (github.com/jax-ml/scaling-book)
[nv]    NVIDIA data sheets of A100 80GB SXM, H100 SXM, H200 SXM, HGX B200: without sparsity; NVLink one direction is
        half of the "total" figure
[dgx]   NVIDIA DGX A100, H100, H200, B200: one network adapter of 200 (A100) or 400 Gbit/s per GPU
[nccl]  NCCL, src/graph/tuning.cc, hwLatencies of Ring with LL128: 1.9 us over NVLink, 4.0 us over the network
[cpu]   measured; see `CHIPS["cpu"]`
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from autoshard.errors import MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.topology import Link, Topology

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
    per_chip: int = 1  # devices per chip, where a topology's name counts chips
    wraps: int = 0  # a torus dim that is a multiple of this closes to a ring


def _tpu(kinds, memory_gib, memory_gb_s, bf16, ici_gb_s, dcn_gbit_s, *, wraps, int8=None, fp8=None, per_chip=1) -> Chip:
    """A row in the units of the sources, all per chip: GiB, GB/s, TFLOP/s, GB/s one way per link, Gbit/s."""
    rates = {"bfloat16": bf16, "float32": bf16, "int8": int8, "float8_e4m3fn": fp8, "float8_e5m2": fp8}
    return Chip(
        kinds=kinds,
        memory_bytes=memory_gib * _GIB / per_chip,
        memory_bandwidth=memory_gb_s * _GB / per_chip,
        flops={dtype: rate * 1e12 / per_chip for dtype, rate in rates.items() if rate is not None},
        link=Link(latency=1e-6, bandwidth=ici_gb_s * _GB / per_chip, torus=True),  # [book]
        network=Link(latency=1e-5, bandwidth=dcn_gbit_s / 8 * _GB / per_chip),  # [book], [tpu]
        per_chip=per_chip,
        wraps=wraps,
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
    # [tpu]: memory, its bandwidth, peak compute, data-center network per chip; [book]: ICI of one link
    "v4": _tpu(("tpu v4",), 32, 1228, 275, 45, 50, wraps=4, int8=275),
    "v5e": _tpu(("tpu v5 lite", "tpu v5e"), 16, 819, 197, 50, 25, wraps=16, int8=393),
    "v5p": _tpu(("tpu v5p", "tpu v5"), 95, 2765, 459, 100, 50, wraps=4, int8=918),
    "v6e": _tpu(("tpu v6 lite", "tpu v6e"), 32, 1638, 918, 100, 100, wraps=16, int8=1836),
    # its two chiplets are two JAX devices, each with half of the chip
    "7x": _tpu(("tpu7x", "tpu v7x"), 192, 7380, 2307, 100, 100, wraps=4, fp8=4614, per_chip=2),
    # [nv] and [dgx]
    "a100": _gpu(("a100",), 80, 2039, 312, 156, 300, 200, int8=624),
    "h100": _gpu(("h100",), 80, 3350, 989.5, 494.5, 450, 400, int8=1979, fp8=1979),
    "h200": _gpu(("h200",), 141, 4800, 989.5, 494.5, 450, 400, int8=1979, fp8=1979),
    "b200": _gpu(("b200",), 180, 8000, 2250, 1125, 900, 400, int8=4500, fp8=4500),
    # One of 8 virtual devices that share a 2-core x86 host: best of 5 runs of 8 psums, all_gathers and all_to_alls
    # under shard_map with 1 KiB to 16 MiB on a device (psum 143 us to 16 ms, all_gather 132 us to 9.8 ms, all_to_all
    # 155 us to 17 ms), 8 chained matmuls of 512 x 512 (2.3e10 float32 FLOP/s on each of the 8) and v + 1 over 16 MiB;
    # memory is an eighth of a 32 GiB host. Orders of magnitude: enough to plan tests and demos by.
    "cpu": Chip(
        kinds=("cpu",),
        memory_bytes=4 * _GIB,
        memory_bandwidth=1.5e9,
        flops={"float32": 2.3e10, "bfloat16": 2.2e10},
        link=Link(latency=1.5e-5, bandwidth=1.5e9),
        network=Link(latency=1e-4, bandwidth=1e9),  # 10 Gbit/s Ethernet
    ),
}


def topology(name: str, axes: MeshShape | None = None) -> Topology:
    """A machine by name: a chip, and the shape of its torus, or hosts x devices per host.

    Args:
        name: ``"v5e:4x4"``, ``"h100:2x8"`` (2 hosts of 8), ``"h100:8"``, ``"cpu:8"``.
        axes: mesh axis -> devices, outermost first; without it the dims of the machine, named x, y, z.

    On a torus an axis that is one whole dim that closes to a ring, or several whole dims (a ring can be laid through
    them), sends both ways round; any other axis is a line. On GPUs an axis that fits in what the axes inside it
    leave of a host is on NVLink, any other on the network.

    >>> topology("h100:2x8", {"data": 2, "model": 8}).links["data"].bandwidth
    50000000000.0
    >>> topology("v5e:16x16").links["x"].bandwidth
    100000000000.0
    """
    chip_name, _, shape = name.lower().partition(":")
    chip = CHIPS.get(chip_name.removeprefix("tpu"))  # topology descriptions say "tpu7x"
    if chip is None or not all(part.isdigit() and int(part) for part in shape.split("x")):
        chips = ", ".join(CHIPS)
        raise MeshError(f"no machine {name!r}; write chip:shape, as in 'v5e:4x4' or 'h100:2x8', chip one of {chips}")
    dims = tuple(int(part) for part in shape.split("x"))
    if chip.per_chip > 1:
        dims += (chip.per_chip,)
    axes = dict(zip("xyzw", dims, strict=False)) if axes is None else dict(axes)
    if math.prod(axes.values()) != math.prod(dims):
        raise MeshError(f"{name} has {math.prod(dims)} devices, the axes {axes} have {math.prod(axes.values())}")
    if chip.link.torus:
        wrapped = [axis for axis, size in axes.items() if _is_ring(size, dims, chip.wraps)]
        return assemble(chip, axes, network=(), rings=wrapped)
    per_host, inside, network = dims[-1], 1, []
    for axis, size in reversed(axes.items()):
        inside *= size
        if per_host % inside:
            network.append(axis)
    return assemble(chip, axes, network=network)


def _is_ring(size: int, dims: tuple[int, ...], wraps: int) -> bool:
    if size in dims:
        return size % wraps == 0
    products = {math.prod(dims[i:j]) for i in range(len(dims)) for j in range(i + 2, len(dims) + 1)}
    return size in products


def chip_of(device_kind: str) -> Chip | None:
    """The row of a `jax.Device.device_kind`."""
    kind = device_kind.lower()
    matches = [(len(part), name) for name, chip in CHIPS.items() for part in chip.kinds if part in kind]
    return CHIPS[max(matches)[1]] if matches else None


def assemble(chip: Chip, axes: MeshShape, network: Collection[str], rings: Collection[str] = ()) -> Topology:
    """A topology of one chip: `network` axes run between hosts or slices, `rings` close on themselves."""
    links = {}
    for axis in axes:
        if axis in network:
            links[axis] = chip.network
        elif axis in rings:
            links[axis] = Link(chip.link.latency, 2 * chip.link.bandwidth, torus=True)
        else:
            links[axis] = chip.link
    return Topology(links, chip.memory_bytes, chip.memory_bandwidth, chip.flops)
