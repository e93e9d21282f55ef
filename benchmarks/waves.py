"""Wave equations on a split grid of eight CPU devices: our plan beside plain `jax.jit`, and the halos that both send.

    python benchmarks/waves.py                       # all programs, about three minutes
    python benchmarks/waves.py --programs roll conv --mesh 4 2 --repeats 9

A program makes some leapfrog steps in a scan: ``2 u - before + c^2 laplacian(u)``, in two dims or three, on a torus or
with zeros outside, with a speed that is one number or an array. The Laplacian is written by slices of a padded grid, by
`jnp.roll`, by a convolution, as an update of the interior, or with four neighbours on each side. The plan is found
without a hint. Plain `jax.jit` gets the grid split by hand, in every way to give mesh axes to dims in order.

A row: seconds of one call (the least of the repeats, run in turn), plain over plan, MiB that a device receives in one
call of the compiled plan, and the MiB of the rims of its shard, edges and corners included. The exit status is 1 if a
plan takes more than 1.1 times as long as the fastest split by hand, sends more than rims, or has other numbers.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from equality import assert_equal  # noqa: E402
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec  # noqa: E402

from autoshard import autoshard  # noqa: E402
from autoshard.layout import layout_of, shards, spec_text  # noqa: E402

STEPS = 10  # leapfrog steps of one call
SLACK = 1.1  # of seconds, over the fastest split by hand
Grid = Any
_FAR = (-205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560)  # second derivative of eighth order; Fornberg (1988)


def padded(u: Grid, wraps: bool) -> Grid:
    p = jnp.pad(u, 1, mode="wrap" if wraps else "constant")
    inner = tuple(slice(1, -1) for _ in u.shape)
    total = -2.0 * u.ndim * u
    for dim in range(u.ndim):
        for start in (0, 2):
            total += p[(*inner[:dim], slice(start, start + u.shape[dim]), *inner[dim + 1 :])]
    return total


def rolled(u: Grid, wraps: bool) -> Grid:
    total = -2.0 * u.ndim * u
    for dim, by in itertools.product(range(u.ndim), (-1, 1)):
        moved = jnp.roll(u, by, dim)
        if not wraps:
            edge = u.shape[dim] - 1 if by < 0 else 0
            moved = jnp.where(jax.lax.broadcasted_iota(jnp.int32, u.shape, dim) == edge, 0.0, moved)
        total += moved
    return total


def convolved(u: Grid, wraps: bool) -> Grid:
    kernel = np.zeros((3,) * u.ndim, np.float32)
    kernel[(1,) * u.ndim] = -2.0 * u.ndim
    for dim, place in itertools.product(range(u.ndim), (0, 2)):
        kernel[(*(1,) * dim, place, *(1,) * (u.ndim - dim - 1))] = 1.0
    image = jnp.pad(u, 1, mode="wrap") if wraps else u
    window = "VALID" if wraps else "SAME"
    return jax.lax.conv_general_dilated(image[None, None], jnp.asarray(kernel)[None, None], (1,) * u.ndim, window)[0, 0]


def interior(u: Grid, wraps: bool) -> Grid:
    """Zeros at the rim, which does not move."""
    assert not wraps, "a torus has no interior"
    inner = tuple(slice(1, -1) for _ in u.shape)
    total = -2.0 * u.ndim * u[inner]
    for dim, start in itertools.product(range(u.ndim), (0, 2)):
        total += u[(*inner[:dim], slice(start, u.shape[dim] - 2 + start), *inner[dim + 1 :])]
    return jnp.zeros_like(u).at[inner].set(total)


def far(u: Grid, wraps: bool) -> Grid:
    """Four neighbours on each side."""
    p = jnp.pad(u, 4, mode="wrap" if wraps else "constant")
    inner = tuple(slice(4, -4) for _ in u.shape)
    total = u.ndim * _FAR[0] * u
    for dim, by in itertools.product(range(u.ndim), (-4, -3, -2, -1, 1, 2, 3, 4)):
        moved = p[(*inner[:dim], slice(4 + by, 4 + by + u.shape[dim]), *inner[dim + 1 :])]
        total += _FAR[abs(by)] * moved
    return total


class Wave(NamedTuple):
    """One program."""

    laplacian: Callable[[Grid, bool], Grid]
    shape: tuple[int, ...]
    wraps: bool
    varies: bool = False  # whether the speed is an array
    reach: int = 1

    def step(self, state: tuple[Grid, Grid], speed: Any) -> tuple[tuple[Grid, Grid], Any]:
        def leap(pair: tuple[Grid, Grid], _: Any) -> tuple[tuple[Grid, Grid], Any]:
            before, now = pair
            after = 2.0 * now - before + speed * self.laplacian(now, self.wraps)
            return (now, after), jnp.sum(after**2) if self.varies else None

        return jax.lax.scan(leap, state, length=STEPS)

    def arguments(self) -> tuple[tuple[Grid, Grid], Any]:
        keys = jax.random.split(jax.random.key(0), 3)
        speed = 0.05 + 0.05 * jax.random.uniform(keys[2], self.shape) if self.varies else jnp.float32(0.1)
        return tuple(jax.random.normal(key, self.shape) for key in keys[:2]), speed


FLAT, CUBE = (1024, 1024), (96, 96, 96)
WAVES = {
    "slices": Wave(padded, FLAT, wraps=False),
    "slices torus": Wave(padded, FLAT, wraps=True),
    "slices varies": Wave(padded, FLAT, wraps=False, varies=True),
    "slices 3d": Wave(padded, CUBE, wraps=False),
    "slices 3d torus": Wave(padded, CUBE, wraps=True),
    "roll": Wave(rolled, FLAT, wraps=True),
    "roll walls": Wave(rolled, FLAT, wraps=False),
    "roll varies": Wave(rolled, FLAT, wraps=True, varies=True),
    "roll 3d": Wave(rolled, CUBE, wraps=True),
    "conv": Wave(convolved, FLAT, wraps=False),
    "conv torus": Wave(convolved, FLAT, wraps=True),
    "conv varies": Wave(convolved, FLAT, wraps=False, varies=True),
    "conv 3d": Wave(convolved, CUBE, wraps=False),
    "interior": Wave(interior, FLAT, wraps=False),
    "interior 3d": Wave(interior, CUBE, wraps=False, varies=True),
    "far": Wave(far, FLAT, wraps=False, reach=4),
    "far torus 3d": Wave(far, CUBE, wraps=True, reach=4),
}


def splits(rank: int, axes: Sequence[str]) -> list[PartitionSpec]:
    """Every way to give all mesh axes to dims, in order."""
    found = []
    for cuts in itertools.combinations_with_replacement(range(len(axes) + 1), rank - 1):
        ends = zip((0, *cuts), (*cuts, len(axes)), strict=True)
        found.append(PartitionSpec(*(tuple(axes[a:b]) or None for a, b in ends)))
    return found


def rims(wave: Wave, spec: PartitionSpec, mesh: Mesh) -> int:
    """Bytes that a device receives in one call, if it gets the rims of its shard in every step."""
    parts = [shards(axes, mesh.shape) for axes in layout_of(spec, len(wave.shape))]
    shard = [size // part for size, part in zip(wave.shape, parts, strict=True)]
    wide = [size + 2 * wave.reach * (part > 1) for size, part in zip(shard, parts, strict=True)]
    return 4 * STEPS * (math.prod(wide) - math.prod(shard))


def least_seconds(calls: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Of each call, the least of some runs; they take turns, so that what else the machine does hits all."""
    found = dict.fromkeys(calls, math.inf)
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            found[name] = min(found[name], time.perf_counter() - start)
    return found


def row(name: str, wave: Wave, mesh: Mesh, repeats: int) -> bool:
    """Measures one program and prints its line; whether it keeps all three promises."""
    arguments = wave.arguments()
    step = autoshard(wave.step, mesh=mesh)
    plan = step.plan(*arguments)
    calls: dict[str, Callable[[], Any]] = {}
    placed = jax.device_put(arguments, plan.in_shardings)
    calls["plan"] = functools.partial(step, *placed)
    for spec in splits(len(wave.shape), mesh.axis_names):
        sharding = NamedSharding(mesh, spec)
        whole = NamedSharding(mesh, PartitionSpec())
        given = (sharding, sharding), sharding if wave.varies else whole
        made = jax.jit(wave.step, in_shardings=given, out_shardings=((sharding, sharding), None))
        calls[spec_text(layout_of(spec, len(wave.shape)))] = functools.partial(made, *jax.device_put(arguments, given))
    took = least_seconds(calls, repeats)
    ours = took.pop("plan")
    best = min(took, key=lambda one: took[one])
    checked = plan.verify()
    sent = sum(size for (kind, _), size in checked.actual.items() if kind != "all_reduce")
    chosen = jax.tree.leaves(plan.in_shardings)[0].spec
    allowed = rims(wave, chosen, mesh)
    try:
        assert_equal(*(jax.tree.map(np.asarray, made(*arguments)) for made in (step, jax.jit(wave.step))))
        equal = "equal"
    except AssertionError:
        equal = "DIFFER"
    fits = ours <= SLACK * took[best] and sent <= allowed and equal == "equal"
    theirs = ", ".join(f"{spec} {seconds * 1e3:.1f}" for spec, seconds in took.items())
    print(
        f"| {name} | {spec_text(layout_of(chosen, len(wave.shape)))} | {ours * 1e3:.1f} | {theirs} "
        f"| {ours / took[best]:.2f} | {sent / 2**20:.2f} | {allowed / 2**20:.2f} | {equal}{'' if fits else ' !'} |",
        flush=True,
    )
    return fits


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="*", default=list(WAVES), choices=list(WAVES))
    parser.add_argument("--mesh", type=int, nargs="+", default=[4, 2])
    parser.add_argument("--repeats", type=int, default=25)
    asked = parser.parse_args()
    axes = tuple("xyz"[: len(asked.mesh)])
    mesh = jax.make_mesh(tuple(asked.mesh), axes, axis_types=(AxisType.Auto,) * len(axes))
    print("| program | split | plan, ms | plain `jit`, ms | ratio | MiB sent | MiB of rims | numbers |")
    print("|---|---|--:|---|--:|--:|--:|---|")
    kept = [row(name, WAVES[name], mesh, asked.repeats) for name in asked.programs]
    print(f"{sum(kept)} of {len(kept)} programs are within {SLACK}, send rims alone, and have equal numbers")
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
