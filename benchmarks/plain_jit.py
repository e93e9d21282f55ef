"""What `evaluate` predicts for steps under `jax.jit` alone, beside what XLA makes of them: nobody says inner layouts.

    python benchmarks/plain_jit.py --rows FILE                        # everything; writes docs/benchmarks/plain_jit.md
    python benchmarks/plain_jit.py --machines cpu --models gpt moe    # a part; only prints the rows

The steps are the models of `tests/models`, at sizes that compile fast. Their arguments are laid out in three ways, with
no thought of the model: the batch over all devices (data), and each array of the state along its largest dim as well
(FSDP), or along its last dim over the last axis (tensor). So layouts collide as they do in code that was written for
one device. Needs the extra tpu, but no hardware.
"""

import argparse
import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")  # compilers for what is not there need JAX to look for nothing else
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from models import Model, diffusion, gnn, llama, mamba, resnet, rnn, unet, vit  # noqa: E402  (needs the path above)
from oracles import SMALL, mesh_of  # noqa: E402
from rows import read_rows, write_rows  # noqa: E402

from autoshard import Collective, evaluate  # noqa: E402
from autoshard.compiled.verification import compiled  # noqa: E402
from autoshard.layout import shards  # noqa: E402
from autoshard.mesh.targets import target_mesh  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "plain_jit.md"
AXES = {"x": 4, "y": 2}
MACHINES = ("cpu", "v5e:2x4")
WITHIN = 0.10  # share by which all bytes that collectives move may be off
LLAMA = {"layers": 1, "d_model": 32, "heads": 8, "shared_heads": 4, "d_hidden": 64, "vocab": 64, "seq": 16, "batch": 16}
MODELS: dict[str, Callable[[], Model]] = {
    **SMALL,
    "diffusion": lambda: diffusion.make(layers=1, width=16, size=8, batch=16),
    "gnn": lambda: gnn.make(nodes=64, edges=256, features=8, width=32, rounds=2),
    "llama": lambda: llama.make(**LLAMA),
    "mamba": lambda: mamba.make(layers=1, d_model=32, inner=64, vocab=64, seq=8, batch=16),
    "mixtral": lambda: llama.make(**LLAMA, experts=8, capacity=8),
    "resnet": lambda: resnet.make(stages=(1, 1), width=8, size=8, batch=16),
    "rnn": lambda: rnn.make(vocab=64, width=32, hidden=64, seq=8, batch=16),
    "unet": lambda: unet.make(width=16, size=8, classes=8, batch=16),
    "vit": lambda: vit.make(layers=1, width=32, heads=8, size=16, patch=4, batch=16),
}


@dataclass(frozen=True)
class Row:
    """One program: what was predicted for it, and what XLA made of it, per step on one device."""

    machine: str
    model: str
    sharding: str
    predicted_bytes: Mapping[str, int]  # by kind of collective
    compiled_bytes: Mapping[str, int]
    predicted_peak: int
    compiled_peak: int
    predicted_seconds: float  # of the compiled program
    seconds: float | None  # XLA's own estimate; None on CPU

    @property
    def ratio(self) -> float:
        """Predicted over compiled bytes, of all collectives."""
        return sum(self.predicted_bytes.values()) / max(1, sum(self.compiled_bytes.values()))

    @property
    def agrees(self) -> bool:
        return abs(self.ratio - 1) <= WITHIN


def along(shape: Sequence[int], axes: tuple[str, ...], dims: Iterable[int]) -> P:
    """The first of these dims that the axes divide is split by them."""
    split = next((dim for dim in dims if shape[dim] % shards(axes, AXES) == 0), None)
    return P(*(axes if dim == split else None for dim in range(len(shape))))


def largest(x: Any) -> P:
    return along(x.shape, tuple(AXES), sorted(range(len(x.shape)), key=lambda dim: -x.shape[dim]))


def last(x: Any) -> P:
    return along(x.shape, ("y",), range(len(x.shape) - 1, -1, -1)) if len(x.shape) > 1 else P()


def first(axes: tuple[str, ...], x: Any) -> P:
    return along(x.shape, axes, range(min(1, len(x.shape))))


SHARDINGS: dict[str, tuple[Callable, Callable]] = {  # name -> of an array of the state, and of the batch
    "data": (lambda x: P(), functools.partial(first, ("x", "y"))),
    "FSDP": (largest, functools.partial(first, ("x", "y"))),
    "tensor": (last, functools.partial(first, ("x",))),
}


@functools.cache
def step_of(model: str) -> tuple[Callable, Any, Any]:
    """The step of a model, and the shapes of its state and batch."""
    made = MODELS[model]()
    shapes = (jax.tree.map(jax.typeof, x) for x in (made.state, made.batches(0)))
    return made.step, *(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree) for tree in shapes)


def row_of(machine: str, model: str, sharding: str, mesh: Mesh) -> Row:
    step, state, batch = step_of(model)
    of_state, of_batch = SHARDINGS[sharding]
    specs = jax.tree.map(of_state, state), jax.tree.map(of_batch, batch)
    options = {} if machine == "cpu" else {"topology": machine}
    predicted = evaluate(step, state, batch, mesh=mesh, in_shardings=specs, donate_argnums=0, **options).predicted
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    jitted = jax.jit(step, in_shardings=placed, out_shardings=(placed[0], None), donate_argnums=0)
    found = compiled(jitted.lower(state, batch), mesh)
    return Row(
        machine=machine,
        model=model,
        sharding=sharding,
        predicted_bytes=by_kind(predicted.collectives),
        compiled_bytes=by_kind(found.collectives),
        predicted_peak=predicted.peak_bytes,
        compiled_peak=found.peak_bytes,
        predicted_seconds=predicted.program_seconds,
        seconds=found.schedule.step_seconds if found.schedule else None,
    )


def by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    found: Counter = Counter()
    for one in collectives:
        found[one.kind] += one.bytes
    return dict(found)


def cells(row: Row) -> list[str]:
    kinds = sorted(row.predicted_bytes.keys() | row.compiled_bytes.keys())
    both = ((kind, row.predicted_bytes.get(kind, 0), row.compiled_bytes.get(kind, 0)) for kind in kinds)
    off = "" if row.agrees else ", ".join(f"{kind} {ours} for {there}" for kind, ours, there in both if ours != there)
    seconds = "" if row.seconds is None else f"{row.predicted_seconds * 1e6:.0f} for {row.seconds * 1e6:.0f}"
    peak = f"{row.predicted_peak / row.compiled_peak:.2f}"
    return [row.machine, row.model, row.sharding, f"{row.ratio:.2f}", off, peak, seconds]


def summary(rows: Sequence[Row]) -> Iterator[str]:
    for machine in MACHINES:
        chosen = [row for row in rows if row.machine == machine]
        if chosen:
            agree, near = sum(row.agrees for row in chosen), sum(abs(row.ratio - 1) <= 0.01 for row in chosen)
            yield f"- {machine}: within {WITHIN:.0%} in {agree} of {len(chosen)} programs, within 1% in {near}."


def page(rows: Sequence[Row]) -> str:
    head = (PAGE.parent / "plain_jit.head.md").read_text().strip()
    titles = ["machine", "model", "sharding", "bytes", "off", "peak", "us"]
    table = [titles, ["---"] * len(titles), *map(cells, rows)]
    return "\n".join(
        [head, "", "## Summary", "", *summary(rows), "", *(f"| {' | '.join(line)} |" for line in table), ""]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=MACHINES)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rows", type=Path, help="a JSON file of rows, to do everything in several runs")
    chosen = parser.parse_args()
    kept = read_rows(chosen.rows, Row, lambda row: (row.machine, row.model, row.sharding))
    for machine in chosen.machines:
        mesh = mesh_of(AXES) if machine == "cpu" else target_mesh(machine, AXES)
        for model in chosen.models:
            for sharding in SHARDINGS:
                row = kept[machine, model, sharding] = row_of(machine, model, sharding, mesh)
                print(*cells(row), sep=" | ", flush=True)
                write_rows(chosen.rows, kept.values())
    rows = sorted(kept.values(), key=lambda row: (MACHINES.index(row.machine), list(MODELS).index(row.model)))
    print(*summary(rows), sep="\n")
    if chosen.rows:
        PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
