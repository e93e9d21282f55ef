"""A Llama of 8B parameters on one long sequence: our plan beside ring, Ulysses and plain GSPMD, each compiled.

    PYTHONPATH=tests:. python benchmarks/long_context.py --machine v5e:16x16 --tokens 131072
    PYTHONPATH=tests:. python benchmarks/long_context.py --machine v5e:4x4 --small --programs plan gspmd
    PYTHONPATH=tests:. python benchmarks/long_context.py --crossover  # predicted, over heads and lengths; compiles none

Every program splits the sequence over all devices, and the state as FSDP does. They differ in their attention alone,
but for our plan, which is found without a hint. `plain` is our plan of the model with its attention written out.
`gspmd` leaves attention by blocks to XLA's partitioner; `gspmd-rows` tells it to split query rows and to gather keys.
Seconds are those of XLA's schedule (TPU) or of a roofline (GPU). Needs the extras tpu or cuda, but
no hardware. A program takes minutes to compile.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax  # noqa: F401 - the models need it, and say so late
from jax.sharding import NamedSharding, PartitionSpec
from models import llama
from prediction import compiled_row, mib

from autoshard import plan, topology
from autoshard.mesh.targets import target_mesh
from autoshard.operations import CallRun
from autoshard.operations.call import Call
from autoshard.ops import attention
from autoshard.ops.attending.attention import attention_operation
from autoshard.ops.attending.operands import AttentionVariant

MESHES = {
    "v5e:4x4": {"x": 4, "y": 4},
    "v5e:16x16": {"x": 16, "y": 16},
    "v5p:4x4x4": {"x": 4, "y": 4, "z": 4},
    "h100:8x8": {"x": 8, "y": 8},
}
LARGE = {"layers": 32, "d_model": 4096, "heads": 32, "shared_heads": 8, "d_hidden": 14336, "vocab": 128256}
SMALL = {"layers": 2, "d_model": 1024, "heads": 8, "shared_heads": 4, "d_hidden": 2048, "vocab": 1024}
BY_HAND = ("ring", "zigzag", "ulysses", "ulysses_zigzag")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machine", default="v5e:16x16", choices=list(MESHES))
    parser.add_argument("--tokens", type=int, default=131072)
    parser.add_argument("--programs", nargs="*", default=["plan", "gspmd", "gspmd-rows", *BY_HAND])
    parser.add_argument("--small", action="store_true", help="a model of two thin layers")
    parser.add_argument("--crossover", action="store_true", help="which implementation is predicted to be fastest")
    said = parser.parse_args()
    axes = MESHES[said.machine]
    if said.crossover:
        crossover(said.machine, axes)
        return
    mesh = target_mesh(said.machine, axes)
    sizes = {**(SMALL if said.small else LARGE), "seq": said.tokens, "batch": 1, "scan": True, "dtype": jnp.bfloat16}
    print(
        f"{said.machine}, {said.tokens} tokens: program | peak | seconds | computing | each kind of collective, apart"
    )
    for name in said.programs:
        row(name, sizes, said.machine, mesh)


def row(name: str, sizes: dict[str, Any], machine: str, mesh: jax.sharding.Mesh) -> None:
    """Compiles one program and prints its line."""
    step, state, batch = abstract(sizes, attend_of(name, sizes["seq"], mesh))
    if name in ("plan", "plain"):
        found = plan(step, state, batch, mesh=mesh, topology=machine, donate_argnums=0)
        print(
            f"plan: predicted {found.predicted.step_seconds:.3g} s, {mib(found.predicted.peak_bytes)} MiB;", flush=True
        )
        print("  attention by", ", ".join(sorted({str(run) for run in found.annotations.runs.values()})), flush=True)
        lowered = found.lowering()
    else:
        everywhere = tuple(mesh.shape)
        put = functools.partial(jax.tree.map, lambda x: NamedSharding(mesh, largest_dim(x, everywhere, mesh)))
        tokens = NamedSharding(mesh, PartitionSpec(None, everywhere))
        lowered = jax.jit(
            step, in_shardings=(put(state), tokens), out_shardings=(put(state), None), donate_argnums=0
        ).lower(state, batch)
    print(compiled_row(name, lowered, mesh, machine)[1], flush=True)


def abstract(sizes: dict[str, Any], attend: Callable | None) -> tuple[Callable, Any, Any]:
    """A train step and the shapes of its state and batch; nothing is allocated."""
    models = []
    state = jax.eval_shape(lambda: models.append(llama.make(**sizes, attend=attend)) or models[0].state)
    tokens = jax.ShapeDtypeStruct((sizes["batch"], sizes["seq"]), jnp.int32)
    return models[0].step, state, {"inputs": tokens, "targets": tokens}


def largest_dim(x: Any, axes: tuple[str, ...], mesh: jax.sharding.Mesh) -> PartitionSpec:
    """The largest dim that all devices divide, but not that of the layers, split over all of them."""
    dims = [dim for dim in range(min(1, max(0, x.ndim - 2)), x.ndim) if x.shape[dim] % mesh.size == 0]
    if not dims:
        return PartitionSpec()
    largest = max(dims, key=lambda dim: x.shape[dim])
    return PartitionSpec(*[axes if dim == largest else None for dim in range(x.ndim)])


def attend_of(name: str, tokens: int, mesh: jax.sharding.Mesh) -> Callable | None:
    """The attention of a program; None for the model's own."""
    if name == "plain":
        return None
    causal = functools.partial(attention, is_causal=True)
    if name == "plan":
        return causal
    axes = tuple(mesh.shape)
    if name.startswith("gspmd"):
        return functools.partial(by_xla, tokens, NamedSharding(mesh, PartitionSpec(None, axes)), name == "gspmd-rows")
    if name in ("ulysses_ring", "ulysses_zigzag"):
        roles = (("ring", axes[:1]), ("heads", axes[1:]))
    else:
        roles = (("heads" if name == "ulysses" else "ring", axes),)
    return functools.partial(by_hand, CallRun(name, roles), mesh)


def variant_of(query: jax.Array) -> AttentionVariant:
    return AttentionVariant(is_causal=True, scale=query.shape[-1] ** -0.5)


def by_xla(tokens: int, rows: NamedSharding, gathers: bool, query: Any, key: Any, value: Any) -> jax.Array:
    """Attention by blocks, of which XLA's partitioner does what it will."""
    put = jax.lax.with_sharding_constraint
    query = put(query, rows)
    if gathers:
        key, value = (put(x, NamedSharding(rows.mesh, PartitionSpec())) for x in (key, value))
    plain = attention_operation(variant_of(query), (tokens, tokens)).function
    places = jnp.arange(tokens, dtype=jnp.int32)
    return put(plain(query, key, value, places, places)[0], rows)


def by_hand(run: CallRun, mesh: jax.sharding.Mesh, query: Any, key: Any, value: Any) -> jax.Array:
    """One implementation under `shard_map`, forward and backward."""
    tokens = query.shape[1]
    operation = attention_operation(variant_of(query), (tokens, tokens))
    places = jnp.arange(tokens, dtype=jnp.int32)

    def call(of: Any, operands: Any, results: Any) -> Callable:
        rule = of.call_rule([x.shape for x in operands], [x.shape for x in results], ())
        return Call(of, (), (), None, rule).on_mesh(run, mesh)

    @jax.custom_vjp
    def attended(query: Any, key: Any, value: Any) -> jax.Array:
        return forward(query, key, value)[0]

    def forward(*operands: Any) -> Any:
        inputs = *operands, places, places
        shapes = jax.eval_shape(operation.function, *inputs)
        output, statistics = call(operation, inputs, shapes)(*inputs)
        return output, (*inputs, output, statistics)

    def backward(saved: Any, cotangent: Any) -> Any:
        inputs = *saved, cotangent, jnp.zeros_like(saved[-1])
        return tuple(call(operation.backward_of((0, 1, 2), (True, True)), inputs, saved[:3])(*inputs))

    attended.defvjp(forward, backward)
    return attended(query, key, value)


def crossover(machine: str, axes: dict[str, int]) -> None:
    """Which implementation of attention a plan takes for a sequence that is split over all devices."""
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    rows = PartitionSpec(None, tuple(axes))
    print(f"{machine}: heads (heads of keys) | " + " | ".join(str(2**n) for n in range(13, 21, 2)))
    for heads, shared in ((64, 64), (32, 8), (8, 8), (4, 1)):
        found = []
        for tokens in (2**n for n in range(13, 21, 2)):
            sizes = (tokens, heads), (tokens, shared), (tokens, shared)
            types = [jax.ShapeDtypeStruct((1, t, n, 128), jnp.bfloat16) for t, n in sizes]
            step = functools.partial(attention, is_causal=True)
            made = plan(step, *types, mesh=mesh, topology=topology(machine, axes), fixed={"*": rows})
            (run,) = made.annotations.runs.values()
            found.append(f"{run.name or 'resharded'} {made.predicted.step_seconds * 1e3:.3g} ms")
        print(f"{heads} ({shared}) | " + " | ".join(found), flush=True)


if __name__ == "__main__":
    main()
