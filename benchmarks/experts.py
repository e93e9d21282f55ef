"""Dropless mixtures of experts: our plan beside six sets of shardings by hand, each compiled.

    PYTHONPATH=tests:. python benchmarks/experts.py --machine v5p:4x4x4 --layer mixtral
    PYTHONPATH=tests:. python benchmarks/experts.py --machine v5p:4x4x4 --layer mixtral --programs plan FSDP
    PYTHONPATH=tests:. python benchmarks/experts.py --imbalance  # rounds of an exchange by load; compiles nothing
    PYTHONPATH=tests:. XLA_FLAGS=--xla_force_host_platform_device_count=8 python benchmarks/experts.py \\
        --measure  # a small layer on eight CPU devices

A layer sorts tokens by expert, as MegaBlocks does, and multiplies them by `jax.lax.ragged_dot`. The step has a loss,
its gradient and Adam. The shardings are those of `benchmarks/shardings.py`, which stand for the rule sets of MaxText;
the step is the same for all. Seconds are those of XLA's schedule (TPU) or of a roofline (GPU), at the links of the
topology. Needs the extras tpu or cuda, but no hardware.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from prediction import by_kind, compiled_row, device_ids, mib
from shardings import constraint_of, names_of, shardings_of

from autoshard import Collective, autoshard, plan
from autoshard.compiled.collectives import read_collectives
from autoshard.mesh.targets import target_mesh
from autoshard.ops.dispatching.exchange import capacity_of

MESHES = {
    "v5p:4x4x4": {"data": 16, "model": 4},
    "h100:8x8": {"data": 8, "model": 8},
    "v5e:4x4": {"data": 4, "model": 4},
}
FAMILY = "dropless"


class Layer(NamedTuple):
    """One mixture of experts."""

    width: int
    hidden: int
    experts: int
    slots: int  # experts per token
    length: int = 4096  # tokens of a sequence


LAYERS = {
    "mixtral": Layer(4096, 14336, 8, 2),
    "deepseek-v3": Layer(7168, 2048, 256, 8),
    "small": Layer(64, 256, 16, 2, 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="v5p:4x4x4", choices=list(MESHES))
    parser.add_argument("--layer", default="mixtral", choices=list(LAYERS))
    parser.add_argument("--programs", nargs="*", default=["plan", *names_of(FAMILY)])
    parser.add_argument("--imbalance", action="store_true", help="rounds of an exchange by load")
    parser.add_argument("--measure", action="store_true", help="a small layer on eight CPU devices")
    said = parser.parse_args()
    if said.imbalance:
        imbalance(LAYERS[said.layer], MESHES[said.machine])
    elif said.measure:
        measured()
    else:
        mesh = target_mesh(said.machine, MESHES[said.machine])
        columns = "program | peak | seconds | computing | each kind of collective, apart | bytes"
        print(f"{said.machine}, {said.layer}: {columns}")
        for name in said.programs:
            row(name, LAYERS[said.layer], said.machine, mesh)


def step_of(layer: Layer, constrain: Callable = lambda x, dims: x) -> Callable:
    """A train step of one layer. `constrain` lays out what has named dims."""

    def experts(params: Any, x: jax.Array) -> jax.Array:
        rows = constrain(x.reshape(-1, layer.width), ("batch", None))
        logits = (rows @ params["router"]).astype(jnp.float32)
        weights, chosen = lax.top_k(jax.nn.softmax(logits), layer.slots)
        groups = chosen.reshape(-1)
        order = jnp.argsort(groups)
        sizes = jnp.bincount(groups, length=layer.experts)
        swish, up, down = (params["experts"][name].astype(x.dtype) for name in ("swish", "up", "down"))
        sent = constrain(rows[order // layer.slots], ("batch", None))
        hidden = jax.nn.silu(lax.ragged_dot(sent, swish, sizes)) * lax.ragged_dot(sent, up, sizes)
        made = lax.ragged_dot(constrain(hidden, ("batch", "hidden")), down, sizes)
        made = constrain(made, ("batch", None)) * weights.reshape(-1)[order][:, None].astype(x.dtype)
        return jnp.zeros_like(rows).at[order // layer.slots].add(made).reshape(x.shape)

    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        x = constrain(x, ("batch", "length", None))
        x = x * params["scale"].astype(x.dtype)
        return jnp.mean((x + constrain(experts(params, x), ("batch", "length", None))).astype(jnp.float32) ** 2)

    def step(state: Any, x: jax.Array) -> Any:
        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        updates, moments = OPTIMIZER.update(gradients, moments)
        return (optax.apply_updates(params, updates), moments), loss

    return step


OPTIMIZER = optax.adam(1e-4)


def state_of(layer: Layer) -> Any:
    def array(seed: int, *shape: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), shape) / shape[-2] ** 0.5

    into, out = (layer.experts, layer.width, layer.hidden), (layer.experts, layer.hidden, layer.width)
    params = {
        "scale": jnp.ones(layer.width),
        "router": array(0, layer.width, layer.experts),
        "experts": {"swish": array(1, *into), "up": array(2, *into), "down": array(3, *out)},
    }
    return params, OPTIMIZER.init(params)


def row(name: str, layer: Layer, machine: str, mesh: Mesh) -> None:
    """Compiles one program, of one sequence per device, and prints its line."""
    state = jax.eval_shape(functools.partial(state_of, layer))
    batch = jax.ShapeDtypeStruct((mesh.size, layer.length, layer.width), jnp.bfloat16)
    if name == "plan":
        start = time.perf_counter()
        found = plan(step_of(layer), state, batch, mesh=mesh, topology=machine, donate_argnums=0)
        seconds, peak = found.predicted.step_seconds, mib(found.predicted.peak_bytes)
        runs = ", ".join(sorted({str(run) for run in found.annotations.runs.values()}))
        took = time.perf_counter() - start
        sent = mib_by_kind(found.predicted.collectives)
        print(f"plan: predicted {seconds:.3g} s, {peak} MiB, {sent}, planned in {took:.0f} s: {runs}", flush=True)
        lowered = found.lowering()
    else:
        laid = shardings_of(FAMILY, state, batch, dict(mesh.shape))[name]
        put = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
        of_state, of_batch = put(laid[0]), put(laid[1])
        lowered = jax.jit(
            step_of(layer, constraint_of(name, mesh)),
            in_shardings=(of_state, of_batch),
            out_shardings=(of_state, None),
            donate_argnums=0,
        ).lower(state, batch)
    made, cells = compiled_row(name, lowered, mesh, machine)
    if made.hlo is not None:
        there = mib_by_kind(read_collectives(made.hlo, dict(mesh.shape), device_ids=device_ids(mesh)))
        cells = f"{cells} | {there}"
    print(cells, flush=True)


def mib_by_kind(collectives: Iterable[Collective]) -> str:
    return ", ".join(f"{kind} {size / 2**20:.0f} MiB" for kind, size in sorted(by_kind(collectives).items()))


def imbalance(layer: Layer, axes: dict[str, int]) -> None:
    """Rounds that an exchange takes where one expert gets so many times its share, the others what is left."""
    print("load of the fullest expert | devices with experts | rounds | rows of a round per device, in even loads")
    random = np.random.default_rng(0)
    for devices in dict.fromkeys((axes["model"], axes["data"])):
        if layer.experts % devices:
            continue
        rows = layer.length * layer.slots
        for load in (1, 2, 4, 8):
            share = np.full(layer.experts, (1 - load / layer.experts) / max(1, layer.experts - 1))
            share[0] = load / layer.experts
            counts = random.multinomial(rows, share.clip(0) / share.clip(0).sum(), size=64)
            per_device = counts.reshape(64, devices, -1).sum(-1)
            capacity = capacity_of(rows, devices)
            print(f"{load} | {devices} | {-(-per_device.max() // capacity)} | {capacity * devices / rows:.2f}")


def measured() -> None:
    """Milliseconds of a step on eight CPU devices: our plan, and the shardings by hand."""
    layer, axes = LAYERS["small"], {"data": 4, "model": 2}
    mesh = jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * 2)
    state = state_of(layer)
    batch = jax.random.normal(jax.random.key(4), (8, layer.length, layer.width), jnp.bfloat16)
    programs = {"plan": autoshard(step_of(layer), mesh=mesh)}
    put = functools.partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec))
    for name, laid in shardings_of(FAMILY, state, batch, axes).items():
        of_state, of_batch = put(laid[0]), put(laid[1])
        programs[name] = jax.jit(
            step_of(layer, constraint_of(name, mesh)),
            in_shardings=(of_state, of_batch),
            out_shardings=(of_state, None),
        )
    for name, program in programs.items():
        jax.block_until_ready(program(state, batch))
        times = []
        for _ in range(7):
            start = time.perf_counter()
            jax.block_until_ready(program(state, batch))
            times.append(time.perf_counter() - start)
        print(f"{name} | {sorted(times)[3] * 1e3:.1f} ms", flush=True)


if __name__ == "__main__":
    main()
