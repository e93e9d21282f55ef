"""Dims that devices do not divide: `pad=` beside the program padded by hand, and beside no padding, each compiled.

    PYTHONPATH=tests:. python benchmarks/uneven.py                          # about ten minutes
    PYTHONPATH=tests:. python benchmarks/uneven.py --programs heads

A train step of a scanned transformer in bfloat16 with momentum. `heads` has 28 heads, `vocabulary` 50,257 words,
`layers` 30 layers, on an axis of 16; `batch` has 30 sequences on 8 devices. The rows padded by hand are the same step
with 32 heads, 50,272 words behind a mask, 32 layers of which two pass on what they get, or 32 sequences of which two
weigh nothing. They are planned, too, so that they differ in the padding alone; their state is stored padded. Seconds
are those of XLA's schedule. The exit status is 1 if a step with `pad=` takes more than 1.05 times as long as by hand.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from prediction import compiled_row, scheduled

from autoshard import autoshard, plan
from autoshard.mesh.targets import target_mesh

SLACK = 1.05
MACHINES = {"v5e:4x4": 16, "v5e:2x4": 8}  # devices, in one mesh axis


@dataclass(frozen=True)
class Model:
    """A transformer; what is beyond its real sizes is padding."""

    heads: int = 32
    words: int = 4096
    layers: int = 2
    batch: int = 16
    length: int = 1024
    width: int = 2048
    hidden: int = 4096
    columns: int = 64  # of a head
    real: tuple[tuple[str, int], ...] = ()  # name of a size -> how much of it is no padding

    def of(self, size: str) -> int:
        return dict(self.real).get(size, getattr(self, size))

    def parameters(self) -> Any:
        inner = self.heads * self.columns
        layer = dict.fromkeys(("q", "k", "v"), (self.width, inner))
        layer |= {"o": (inner, self.width), "up": (self.width, self.hidden), "down": (self.hidden, self.width)}
        stacked = {name: jax.ShapeDtypeStruct((self.layers, *shape), jnp.float32) for name, shape in layer.items()}
        ends = {"embed": (self.of("words"), self.width), "head": (self.width, self.words)}
        return stacked, {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in ends.items()}

    def arguments(self) -> tuple[Any, Any, Any]:
        params = self.parameters()
        return params, params, jax.ShapeDtypeStruct((self.batch, self.length + 1), jnp.int32)

    def block(self, x: jax.Array, layer: Any) -> tuple[jax.Array, None]:
        p, number = layer
        p = jax.tree.map(lambda w: w.astype(x.dtype), p)

        def heads(name: str) -> jax.Array:
            return (h @ p[name]).reshape(*x.shape[:2], self.heads, self.columns)

        h = normalised(x)
        scores = jnp.einsum("bqhd,bkhd->bhqk", heads("q"), heads("k")).astype(jnp.float32) / self.columns**0.5
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9)).astype(x.dtype)
        y = x + jnp.einsum("bhqk,bkhd->bqhd", weights, heads("v")).reshape(*x.shape[:2], -1) @ p["o"]
        y = y + jax.nn.gelu(normalised(y) @ p["up"]) @ p["down"]
        return (y if self.of("layers") == self.layers else jnp.where(number < self.of("layers"), y, x)), None

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        stacked, ends = params
        x = ends["embed"].astype(jnp.bfloat16)[tokens[:, :-1]]
        x, _ = jax.lax.scan(jax.checkpoint(self.block), x, (stacked, jnp.arange(self.layers)))
        logits = (normalised(x) @ ends["head"].astype(x.dtype)).astype(jnp.float32)
        if self.of("words") < self.words:
            logits = jnp.where(jnp.arange(self.words) < self.of("words"), logits, -1e9)
        each = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        rows = jnp.arange(self.batch)[:, None, None] < self.of("batch")
        each = each if self.of("batch") == self.batch else jnp.where(rows, each, 0.0)
        return -jnp.sum(each) / (self.of("batch") * self.length)

    def step(self, params: Any, moments: Any, tokens: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(self.loss)(params, tokens)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments, loss


def normalised(x: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-5)).astype(x.dtype)


# the model, its padded sizes, the option, and the machine
PROGRAMS = {
    "heads": (Model(heads=28, batch=1, length=2048), {"heads": 32}, "auto", "v5e:4x4"),
    "vocabulary": (Model(words=50257, batch=1, length=2048), {"words": 50272}, "auto", "v5e:4x4"),
    "layers": (Model(layers=30, length=512), {"layers": 32}, "auto", "v5e:4x4"),
    "batch": (Model(batch=30), {"batch": 32}, "batch", "v5e:2x4"),
    "batch auto": (Model(batch=30), {"batch": 32}, "auto", "v5e:2x4"),
}


def row(name: str) -> bool:
    """Compiles one step in three ways and prints their lines; whether ours is within the bar."""
    model, sizes, pad, machine = PROGRAMS[name]
    mesh = target_mesh(machine, {"x": MACHINES[machine]})
    by_hand = replace(model, **sizes, real=tuple((size, getattr(model, size)) for size in sizes))
    how = {"mesh": mesh, "topology": machine, "donate_argnums": (0, 1)}
    lowered: dict[str, Callable[[], Any]] = {
        f"pad={pad!r}": lambda: autoshard(model.step, pad=pad, **how).lower(*model.arguments()),
        "by hand": lambda: plan(by_hand.step, *by_hand.arguments(), **how).lowering(mesh),
        "as written": lambda: plan(model.step, *model.arguments(), **how).lowering(mesh),
    }
    seconds = []
    for way, make in lowered.items():
        made, cells = compiled_row(f"{name}, {way}", make(), mesh, machine)
        print(cells, flush=True)
        seconds.append(math.inf if made.hlo is None else scheduled(made.hlo, machine, mesh).step_seconds)
    print(f"{name}: {seconds[0] / seconds[1]:.3f} of the step padded by hand, {seconds[0] / seconds[2]:.3f} as written")
    return seconds[0] <= SLACK * seconds[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=list(PROGRAMS))
    print("program | peak | seconds | computing | each kind of collective, apart")
    kept = [row(name) for name in parser.parse_args().programs]
    return 0 if all(kept) else 1


if __name__ == "__main__":
    sys.exit(main())
