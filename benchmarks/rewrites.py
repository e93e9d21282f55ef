"""What `rewrites="auto"` gains, predicted and compiled.

    python benchmarks/rewrites.py                                          # all programs on v5e:4x4 and h100:2x8
    python benchmarks/rewrites.py --programs lora lstm --machines v5e:4x4  # a part
    python benchmarks/rewrites.py --predicted                              # compiles nothing

A row per program and machine: seconds of the step as it is written and as it is rewritten, as planned and as XLA
schedules the compiled program, and the laws that were applied. Programs are plain JAX, each with its gradients; none
is written for a law.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

jax.config.update("jax_platforms", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1])]

from autoshard import AutoshardError, Plan, plan  # noqa: E402  (needs the path above)


class Training(NamedTuple):
    """A loss of weights and a batch, and their shapes."""

    loss: Callable[..., Any]
    weights: dict[str, tuple[int, ...]]
    batch: dict[str, tuple[int, ...]]
    frozen: dict[str, tuple[int, ...]] | None = None

    def step(self, weights: Any, frozen: Any, batch: Any) -> Any:
        """One step of gradient descent."""
        value, gradients = jax.value_and_grad(self.loss)(weights, frozen, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    def arguments(self, dtype: Any) -> tuple[Any, ...]:
        """Of the step, without numbers."""
        kinds = self.weights, self.frozen or {}, self.batch
        return tuple({name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in kind.items()} for kind in kinds)


def lora(weights, frozen, batch):
    """A feed-forward block with adapters of rank 16, merged into its weights as they are used."""
    up = frozen["up"] + 2.0 * (weights["up_a"] @ weights["up_b"])
    down = frozen["down"] + 2.0 * (weights["down_a"] @ weights["down_b"])
    return jnp.mean(jnp.square(jax.nn.gelu(batch["x"] @ up) @ down - batch["y"]))


def lstm(weights, frozen, batch):
    """A recurrent language model's layer: gates of the concatenated input and state, and its read-out."""
    hidden = weights["out"].shape[0]

    def turn(state, x):
        h, c = state
        gates = jnp.concatenate([x, h], -1) @ weights["gates"] + weights["bias"]
        i, f, g, o = jnp.split(gates, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h @ weights["out"]

    zeros = jnp.zeros((batch["x"].shape[1], hidden), batch["x"].dtype)
    return jnp.mean(jnp.square(jax.lax.scan(turn, (zeros, zeros), batch["x"])[1]))


def gru(weights, frozen, batch):
    """A gated recurrent unit over a sequence, its products apart."""

    def turn(h, x):
        z = jax.nn.sigmoid(x @ weights["wz"] + h @ weights["uz"])
        r = jax.nn.sigmoid(x @ weights["wr"] + h @ weights["ur"])
        n = jnp.tanh(x @ weights["wn"] + (r * h) @ weights["un"])
        h = (1 - z) * h + z * n
        return h, None

    zeros = jnp.zeros((batch["x"].shape[1], weights["uz"].shape[0]), batch["x"].dtype)
    return jnp.mean(jnp.square(jax.lax.scan(turn, zeros, batch["x"])[0]))


def linear_attention(weights, frozen, batch):
    """Attention without a softmax, in the order of the definition."""
    q, k, v = (jnp.einsum("btd,dhk->bthk", batch["x"], weights[name]) for name in ("q", "k", "v"))
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    mixed = jnp.einsum("bhts,bshk->bthk", jnp.einsum("bthk,bshk->bhts", q, k), v)
    return jnp.mean(jnp.square(jnp.einsum("bthk,hkd->btd", mixed, weights["o"])))


def attention(weights, frozen, batch):
    """Grouped-query attention and a gated feed-forward block: a layer of Llama."""
    x = batch["x"]
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, weights[name]) for name in ("q", "k", "v"))
    x = x + jnp.einsum("bthk,hkd->btd", jax.nn.dot_product_attention(q, k, v, is_causal=True), weights["o"])
    x = x + (jax.nn.silu(x @ weights["gate"]) * (x @ weights["up"])) @ weights["down"]
    return jnp.mean(jnp.square(x))


def features(weights, frozen, batch):
    """A click model: dense and pooled sparse features side by side, then two layers."""
    x = jnp.concatenate([batch["dense"], batch["sparse"], batch["context"]], -1)
    return jnp.mean(jnp.square(jax.nn.relu(x @ weights["hidden"]) @ weights["out"]))


def skip(weights, frozen, batch):
    """A block of the way up of a U-Net: what comes from below beside what was skipped."""
    x = jnp.concatenate([batch["below"], batch["skipped"]], -1)
    for name in ("first", "second"):
        x = jax.lax.conv_general_dilated(x, weights[name], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.silu(x)
    return jnp.mean(jnp.square(x))


def pooled(weights, frozen, batch):
    """A classifier of sequences: a wide projection, averaged over the sequence."""
    x = jax.nn.gelu(batch["x"] @ weights["hidden"])
    return jnp.mean(jnp.square(jnp.mean(x @ weights["wide"], 1) @ weights["out"]))


def towers(weights, frozen, batch):
    """Two towers of features that meet in a sum, and a shared head on both."""
    x = jax.nn.relu(batch["users"] @ weights["users"] + batch["items"] @ weights["items"])
    return jnp.mean(jnp.square(x @ weights["head"] + x @ weights["residual"]))


T, D, F = 2048, 2048, 8192
PROGRAMS = {
    "lora": Training(
        lora,
        {"up_a": (D, 16), "up_b": (16, F), "down_a": (F, 16), "down_b": (16, D)},
        {"x": (16 * T, D), "y": (16 * T, D)},
        {"up": (D, F), "down": (F, D)},
    ),
    "lstm": Training(lstm, {"gates": (2048, 4096), "bias": (4096,), "out": (1024, 1024)}, {"x": (256, 256, 1024)}),
    "gru": Training(gru, {f"{kind}{gate}": (1024, 1024) for kind in "wu" for gate in "zrn"}, {"x": (256, 256, 1024)}),
    "linear attention": Training(
        linear_attention,
        {"q": (1024, 16, 64), "k": (1024, 16, 64), "v": (1024, 16, 64), "o": (16, 64, 1024)},
        {"x": (16, 4096, 1024)},
    ),
    "llama layer": Training(
        attention,
        {"q": (D, 16, 128), "k": (D, 4, 128), "v": (D, 4, 128), "o": (16, 128, D)}
        | {"gate": (D, F), "up": (D, F), "down": (F, D)},
        {"x": (16, T, D)},
    ),
    "features": Training(
        features,
        {"hidden": (4096 + 1024 + 512, 4096), "out": (4096, 256)},
        {"dense": (16384, 512), "sparse": (16384, 4096), "context": (16384, 1024)},
    ),
    "skip": Training(
        skip,
        {"first": (3, 3, 768, 256), "second": (3, 3, 256, 256)},
        {"below": (32, 64, 64, 512), "skipped": (32, 64, 64, 256)},
    ),
    "pooled": Training(
        pooled, {"hidden": (1024, 1024), "wide": (1024, 8192), "out": (8192, 1000)}, {"x": (64, 1024, 1024)}
    ),
    "towers": Training(
        towers,
        {"users": (1024, 4096), "items": (768, 4096), "head": (4096, 1024), "residual": (4096, 1024)},
        {"users": (16384, 1024), "items": (16384, 768)},
    ),
}
MESHES = {"v5e:4x4": {"x": 4, "y": 4}, "h100:2x8": {"x": 2, "y": 8}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", nargs="*", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--machines", nargs="*", default=list(MESHES), choices=MESHES)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--predicted", action="store_true", help="compile nothing")
    chosen = parser.parse_args()
    print("| program | machine | predicted us | rewritten | compiled us | rewritten | planned in s | laws |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    for name in chosen.programs:
        for machine in chosen.machines:
            print(row(name, machine, jnp.dtype(chosen.dtype), compiles=not chosen.predicted), flush=True)


def row(name: str, machine: str, dtype: Any, *, compiles: bool) -> str:
    """A program on a machine."""
    program, axes = PROGRAMS[name], MESHES[machine]
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    plans, seconds = list[Plan](), list[float]()
    for rewrites in (None, "auto"):
        start = time.process_time()
        options: dict[str, Any] = {"mesh": mesh, "topology": machine, "rewrites": rewrites, "donate_argnums": 0}
        plans.append(plan(program.step, *program.arguments(dtype), **options))
        seconds.append(time.process_time() - start)
    predicted = [f"{one.predicted.step_seconds * 1e6:.0f}" for one in plans]
    compiled = [scheduled(one, machine) if compiles else "" for one in plans]
    laws = ", ".join(dict.fromkeys(law for law, _ in plans[1].rewrites)) or "none"
    times = f"{seconds[0]:.1f}, {seconds[1]:.1f}"
    return "| " + " | ".join([name, machine, *predicted, *compiled, times, laws]) + " |"


def scheduled(made: Plan, machine: str) -> str:
    """Microseconds of the compiled program, as XLA has ordered it."""
    try:
        found = made.verify(target=machine)
    except AutoshardError as error:
        return type(error).__name__
    return "" if found.schedule is None else f"{found.schedule.step_seconds * 1e6:.0f}"


if __name__ == "__main__":
    main()
