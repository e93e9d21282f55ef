"""A machine measured: collectives, matmuls and passes over memory are timed on the devices of a mesh.

In: a mesh. Out: a `Topology` of the links that `Topology.of` guesses, with the latency and bandwidth at which
`collectives.seconds` comes closest to the times. Every process runs the same programs in the same order, whatever its
clock says, and takes the numbers of the process that has the mesh's first device.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
from autoshard.layout import with_auto_axes
from autoshard.mesh.collectives import KINDS, seconds
from autoshard.mesh.links import Link

if TYPE_CHECKING:
    from autoshard.mesh.topology import Topology

_DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class Workload:
    """How much is timed: runs of a loop each, of which the fastest counts."""

    sizes: Sequence[int]  # bytes of the larger buffer of a collective, on one device
    side: int  # of the square matrices that are multiplied
    pass_bytes: int  # bytes that a pass over memory reads, and writes
    repeats: int  # of a collective, matmul or pass in a loop
    runs: int  # of a loop


ON_CPU = Workload(sizes=(2**12, 2**16, 2**19, 2**22), side=512, pass_bytes=2**24, repeats=8, runs=5)
ON_ACCELERATORS = Workload(sizes=(2**12, 2**16, 2**20, 2**24, 2**27), side=8192, pass_bytes=2**28, repeats=16, runs=5)


def measure(
    mesh: Mesh,
    guess: Topology,
    *,
    path: str | Path | None = None,
    progress: bool = True,
    workload: Workload | None = None,
) -> Topology:
    """`Topology.measure`, of a given workload or the usual one of the platform.

    Args:
        guess: `Topology.of(mesh)`: what no measurement tells.
    """
    if not isinstance(mesh, Mesh):
        raise MeshError(f"{mesh} has no devices to measure; give a jax.sharding.Mesh of some, or name the machine")
    on_auto = with_auto_axes(mesh)
    assert isinstance(on_auto, Mesh), "one of devices stays one"
    mesh = on_auto
    first = mesh.devices.flat[0]
    leads = first.process_index == jax.process_index()
    timer = _Timer(mesh, workload or (ON_CPU if first.platform == "cpu" else ON_ACCELERATORS))
    numbers = [_memory_bytes(mesh) or guess.memory_bytes]
    jobs: dict[str, Callable[[], Iterable[float]]] = {
        **{f"{dtype} matmuls": functools.partial(timer.flops, dtype) for dtype in _DTYPES},
        "memory": timer.memory_bandwidth,
        **{f"axis {axis}": functools.partial(timer.link, axis, guess) for axis in _axes(mesh)},
    }
    show = progress and leads and sys.stderr.isatty()
    try:
        for done, (what, job) in enumerate(jobs.items()):
            if show:
                print(f"\r\033[Kmeasuring {what} ({done + 1} of {len(jobs)})", end="", file=sys.stderr, flush=True)
            numbers += job()
    except KeyboardInterrupt:
        if leads and path is not None and len(numbers) > len(_DTYPES) + 1:
            _topology(numbers, mesh, guess).save(path)
        raise
    finally:
        if show:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    topology = _topology(_agreed(numbers, mesh), mesh, guess)
    if leads and path is not None:
        topology.save(path)
    return topology


def fit(times: Sequence[float], latencies: Sequence[float], transfers: Sequence[float]) -> tuple[float, float]:
    """Factors (a, b) at which ``a * latencies + b * transfers`` is closest to `times`, all in seconds.

    Closest means the least sum of ``|log(fitted / time)|``: twice the time is as wrong as half of it, and one disturbed
    time moves little. Gauss and Newton's least squares find the minimum, weighted anew with the inverse of each error.

    >>> a, b = fit([3.0, 5.0, 20.0, 161.0], latencies=[1.0, 1.0, 1.0, 1.0], transfers=[0.0, 1.0, 4.0, 79.0])
    >>> round(a, 3), round(b, 3)
    (3.0, 2.0)
    """
    columns, measured = np.stack([latencies, transfers], axis=1), np.log(times)
    logs = np.zeros(2)
    for _ in range(100):
        terms = columns * np.exp(logs)
        fitted = terms.sum(axis=1)
        errors = np.log(fitted) - measured
        roots = 1 / np.sqrt(np.maximum(np.abs(errors), 1e-6))
        slopes = terms / fitted[:, None]
        # a weak pull to 1 decides what the times leave open
        rows = np.concatenate([slopes * roots[:, None], 0.01 * np.eye(2)])
        wanted = -np.concatenate([errors * roots, 0.01 * logs])
        logs += np.clip(np.linalg.lstsq(rows, wanted, rcond=None)[0], -1, 1)
    a, b = np.exp(logs).tolist()
    return a, b


@dataclass(frozen=True)
class _Timer:
    """Times work that all devices of a mesh do at once."""

    mesh: Mesh
    workload: Workload

    def flops(self, dtype: str) -> list[float]:
        """FLOP/s of one device."""
        side = self.workload.side
        matrix = np.random.default_rng(0).standard_normal((side, side), dtype=np.float32) / np.sqrt(side)

        def powers(x: jax.Array) -> jax.Array:
            x = x.astype(dtype)
            return self._repeat(lambda _, y: y @ x, x)

        return [2 * side**3 / self._seconds(powers, matrix)]

    def memory_bandwidth(self) -> list[float]:
        """Bytes/s of one device, read and written."""
        block = np.zeros(self.workload.pass_bytes // 4, np.float32)
        once = self._seconds(lambda x: self._repeat(lambda _, y: y + 1, x), block)
        return [2 * self.workload.pass_bytes / once]

    def link(self, axis: str, guess: Topology) -> tuple[float, float]:
        """The factors by which the latency and the inverse bandwidth of the guessed link of an axis are off."""
        rows = []
        for kind in KINDS:
            # which links of a torus a permutation uses depends on its pairs
            if kind == "collective_permute" and any(link.torus for _, link in self._parts(axis, guess)):
                continue
            for size in self.workload.sizes:
                once, result = self._collective(kind, axis, size)
                latency, whole = (seconds(kind, (axis,), bytes, self.mesh.shape, guess) for bytes in (0, result))
                rows.append((once, latency, whole - latency))
        return fit(*zip(*rows, strict=True))

    def _parts(self, axis: str, guess: Topology) -> Sequence[tuple[int, Link]]:
        return guess.links[axis].over(self.mesh.shape[axis])

    def _collective(self, kind: str, axis: str, size: int) -> tuple[float, int]:
        """Seconds of one collective, and bytes of its result on one device; `size` is the larger of it and its operand.

        What a collective reads is what the one before it wrote, and not the same on all devices: XLA drops
        collectives that it can do without.
        """
        devices = self.mesh.shape[axis]
        part = max(size // 4 // devices, 1)

        def all_gather(step, x):
            return lax.dynamic_slice_in_dim(lax.all_gather(x, axis, tiled=True), step % devices * part, part)

        def reduce_scatter(step, x):
            scattered = lax.psum_scatter(x, axis, tiled=True)
            return lax.dynamic_update_slice_in_dim(x, scattered, step % devices * part, 0)

        bodies = {
            "all_gather": all_gather,
            "all_reduce": lambda _, x: lax.psum(x, axis),
            "all_to_all": lambda _, x: lax.all_to_all(x, axis, 0, 0, tiled=True),
            "collective_permute": lambda _, x: lax.ppermute(x, axis, [(i, (i + 1) % devices) for i in range(devices)]),
            "reduce_scatter": reduce_scatter,
        }
        block = np.zeros(part if kind == "all_gather" else part * devices, np.float32)
        once = self._seconds(lambda x: self._repeat(bodies[kind], x), block)
        return once, 4 * (part if kind == "reduce_scatter" else part * devices)

    def _repeat(self, body: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
        return lax.fori_loop(0, self.workload.repeats, body, x)

    def _seconds(self, loop: Callable[[jax.Array], jax.Array], block: np.ndarray) -> float:
        """Seconds of one repeat of a loop over a block on each device, without the start of the program."""
        whole = self._fastest(loop, block)
        return (whole - self._start if whole > self._start else whole) / self.workload.repeats

    @functools.cached_property
    def _start(self) -> float:
        """Seconds of a program that does nothing."""
        return self._fastest(lambda x: x, np.zeros(1, np.float32))

    def _fastest(self, function: Callable[[jax.Array], jax.Array], block: np.ndarray) -> float:
        spec = PartitionSpec(self.mesh.axis_names)
        run = jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False))
        x = _on_every_device(block, self.mesh)
        jax.block_until_ready(run(x))  # compiles
        times = []
        for _ in range(self.workload.runs):
            start = time.perf_counter()
            jax.block_until_ready(run(x))
            times.append(time.perf_counter() - start)
        return min(times)


def _axes(mesh: Mesh) -> list[str]:
    return [axis for axis, size in mesh.shape.items() if size > 1]


def _memory_bytes(mesh: Mesh) -> float | None:
    """Bytes that a device can use, where it says so."""
    try:
        stats = mesh.local_devices[0].memory_stats() or {}
    except (IndexError, jax.errors.JaxRuntimeError) as error:
        raise MeshError(f"no device of the mesh runs in this process, so nothing can be measured: {error}") from error
    return stats.get("bytes_limit")


def _topology(numbers: Sequence[float], mesh: Mesh, guess: Topology) -> Topology:
    """The topology of these numbers: bytes, a rate per dtype, a memory bandwidth, two factors per measured axis."""
    memory_bytes, *rates = numbers[: 1 + len(_DTYPES)]
    memory_bandwidth, *factors = numbers[1 + len(_DTYPES) :]
    links = {axis: link for axis, link in guess.links.items() if mesh.shape[axis] == 1}
    for axis, latency, transfer in zip(_axes(mesh), factors[::2], factors[1::2], strict=False):
        links[axis] = _scaled(guess.links[axis], latency, transfer)
    flops = dict(zip(_DTYPES, rates, strict=True))
    return replace(guess, links=links, memory_bytes=memory_bytes, memory_bandwidth=memory_bandwidth, flops=flops)


def _scaled(link: Link, latency: float, transfer: float) -> Link:
    parts = tuple((devices, _scaled(part, latency, transfer)) for devices, part in link.parts)
    return replace(link, latency=link.latency * latency, bandwidth=link.bandwidth / transfer, parts=parts)


def _agreed(numbers: Sequence[float], mesh: Mesh) -> list[float]:
    """The numbers of the process that has the first device."""
    bits = np.asarray(numbers, np.float64).view(np.uint32)  # JAX would round a float64
    everywhere = NamedSharding(mesh, PartitionSpec())
    first = jax.jit(lambda rows: rows[0], out_shardings=everywhere)(_on_every_device(bits[None], mesh))
    return np.asarray(first).view(np.float64).tolist()


def _on_every_device(block: np.ndarray, mesh: Mesh) -> jax.Array:
    """An array of which every device holds `block`."""
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    return jax.make_array_from_callback((mesh.size * len(block), *block.shape[1:]), sharding, lambda _: block)
