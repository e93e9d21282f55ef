"""What is predicted beside what XLA makes of it, for CPU devices, TPU and GPU: collectives, peak memory, seconds.

    python benchmarks/prediction.py                                  # everything; writes docs/benchmarks/prediction.md
    python benchmarks/prediction.py --targets tpu --models gpt moe   # a part; prints the rows
    python benchmarks/prediction.py --cache DIR                      # keeps what was compiled for the next time

Needs the extras tpu and cuda, but no hardware: TPU and GPU programs are compiled, not run.
"""

import argparse
import gzip
import hashlib
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax

jax.config.update("jax_platforms", "cpu")  # compilers for what is not there need JAX to look for nothing else

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from oracles import mesh_of  # noqa: E402  (needs the path above)
from shardings import shardings_of  # noqa: E402
from workloads import LARGE, SMALL, Workload  # noqa: E402

from autoshard import AutoshardError, Collective, Plan, evaluate, plan, topology  # noqa: E402
from autoshard.mesh.collectives import seconds  # noqa: E402
from autoshard.mesh.presets import CHIPS  # noqa: E402
from autoshard.mesh.targets import compiler_options, target_mesh  # noqa: E402
from autoshard.report.hlo import estimated_cycles, peak_bytes, read_collectives  # noqa: E402
from autoshard.report.verification import as_cpu_shows  # noqa: E402


class Target(NamedTuple):
    """A machine to compile for."""

    machine: str  # a name as for `topology`
    axes: dict[str, int]
    workloads: Mapping[str, Workload]
    runs: bool = False  # whether it is there


TARGETS = {
    "cpu": Target("cpu:8", {"data": 4, "model": 2}, SMALL, runs=True),
    "tpu": Target("v5e:4x4", {"data": 4, "model": 4}, LARGE),
    "gpu": Target("h100:2x8", {"data": 2, "model": 8}, LARGE),
}
OWN = "autoshard"  # the sharding that is solved for
SLACK = 0.01  # of a program's bytes: kinds of collectives that move less are not compared


@dataclass(frozen=True)
class Row:
    """One program: what was predicted for it, and what XLA made of it, per step on one device."""

    target: str
    model: str
    sharding: str
    predicted_bytes: dict[str, int]  # by kind of collective
    compiled_bytes: dict[str, int]
    predicted_peak: int
    compiled_peak: int | None  # None: it does not fit
    predicted_seconds: float
    compiled_seconds: float | None  # XLA's estimate for TPU, measured on CPU
    fits: bool  # whether the plan is said to fit

    @property
    def bytes_error(self) -> float:
        """The largest error of any kind of collective, as a share of what was compiled."""
        least = SLACK * sum(self.compiled_bytes.values())
        errors = [0.0]
        for kind in self.predicted_bytes.keys() | self.compiled_bytes.keys():
            foreseen, found = self.predicted_bytes.get(kind, 0), self.compiled_bytes.get(kind, 0)
            if max(foreseen, found) > least:
                errors.append(abs(foreseen - found) / max(found, 1))
        return max(errors)

    @property
    def peak_error(self) -> float | None:
        return None if self.compiled_peak is None else self.predicted_peak / self.compiled_peak - 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=TARGETS)
    parser.add_argument("--models", nargs="*", default=list(SMALL), choices=list(SMALL))
    parser.add_argument("--shardings", nargs="*", help="of those in shardings.py, and autoshard")
    parser.add_argument("--cache", type=Path, help="a folder for what was compiled")
    parser.add_argument("--rows", type=Path, help="a JSON file to keep rows in")
    chosen = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for target in chosen.targets:
        for model in chosen.models:
            for row in rows_of(target, model, chosen.shardings, chosen.cache):
                rows.append(row)
                print(line(row), flush=True)
                if chosen.rows:
                    chosen.rows.write_text(json.dumps([asdict(row) for row in rows], indent=1))


def rows_of(target: str, model: str, shardings: list[str] | None, cache: Path | None) -> Iterable[Row]:
    machine, axes, workloads, runs = TARGETS[target]
    mesh = mesh_of(axes) if runs else target_mesh(machine, axes)
    workload = workloads[model]
    step, state, batch = workload.abstract()
    options = {"mesh": mesh, "topology": topology(machine, axes), "donate_argnums": 0}
    for name, in_shardings in (shardings_of(workload.family, state, batch, axes) | {OWN: None}).items():
        if shardings and name not in shardings:
            continue
        try:
            if name == OWN:
                made = plan(step, state, batch, **options)
            else:
                made = evaluate(step, state, batch, in_shardings=in_shardings, **options)
        except AutoshardError as error:
            print(f"{target} {model} {name}: {error}", file=sys.stderr)
            continue
        found = compiled(made, mesh, cache)
        yield Row(
            target=target,
            model=model,
            sharding=name,
            predicted_bytes=by_kind(made.predicted.collectives if not runs else as_cpu_shows(made.predicted.collectives, axes)),
            compiled_bytes=by_kind(Collective(**one) for one in found["collectives"]),
            predicted_peak=made.predicted.peak_bytes,
            compiled_peak=found["peak_bytes"],
            predicted_seconds=made.predicted.step_seconds,
            compiled_seconds=None,
            fits=made.predicted.peak_bytes <= made.memory,
        )


def compiled(made: Plan, mesh: Any, cache: Path | None) -> dict:
    lowered = made.lowering(mesh)
    text = lowered.as_text()
    platform = mesh.devices.flat[0].device_kind
    key = hashlib.sha256(f"{jax.__version__} {platform} {text}".encode()).hexdigest()[:24]
    file = cache and cache / f"{key}.hlo.gz"
    if file and file.exists():
        content = json.loads(gzip.decompress(file.read_bytes()))
    else:
        start = time.perf_counter()
        try:
            program = lowered.compile(compiler_options=compiler_options(mesh))
            content = {"hlo": program.as_text(), "peak": peak_bytes(program), "error": None}
        except jax.errors.JaxRuntimeError as error:
            content = {"hlo": None, "peak": None, "error": str(error)[:4000]}
        content["seconds"] = time.perf_counter() - start
        if file:
            cache.mkdir(parents=True, exist_ok=True)
            file.write_bytes(gzip.compress(json.dumps(content).encode()))
    found = read_collectives(content["hlo"], dict(mesh.shape)) if content["hlo"] else ()
    cycles = estimated_cycles(content["hlo"]) if content["hlo"] else 0
    return {"collectives": [asdict(one) for one in found], "peak_bytes": content["peak"], "cycles": cycles,
            "error": content["error"], "file": str(file)}


def by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    found: Counter = Counter()
    for one in collectives:
        found[one.kind] += one.bytes
    return dict(found)


def line(row: Row) -> str:
    peak = "does not fit" if row.peak_error is None else f"{row.peak_error:+7.1%}"
    return (
        f"{row.target:4} {row.model:15} {row.sharding:24} bytes {row.bytes_error:8.1%}  peak {peak} "
        f"({row.predicted_peak / 2**20:.0f} vs {(row.compiled_peak or 0) / 2**20:.0f} MiB) "
        f"{row.predicted_bytes} vs {row.compiled_bytes}"
    )


if __name__ == "__main__":
    main()
