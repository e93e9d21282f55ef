"""What is predicted beside what XLA makes of it, on CPU devices, TPU and GPU: collectives, peak memory, seconds.

    python benchmarks/prediction.py                                  # everything; writes docs/benchmarks/prediction.md
    python benchmarks/prediction.py --targets tpu --models gpt moe   # a part; only prints the rows
    python benchmarks/prediction.py --cache DIR                      # keeps what was compiled for the next time
    python benchmarks/prediction.py --rows FILE --targets cpu        # adds to the rows of earlier runs; writes the page

Needs the extras tpu and cuda, but no hardware: TPU and GPU programs are compiled, not run. Everything takes hours on
two cores.
"""

import argparse
import gzip
import hashlib
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from scipy.stats import spearmanr

jax.config.update("jax_platforms", "cpu")  # compilers for what is not there need JAX to look for nothing else
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from oracles import mesh_of  # noqa: E402  (needs the path above)
from rows import read_rows, write_rows  # noqa: E402
from shardings import shardings_of  # noqa: E402
from workloads import LARGE, SMALL, Workload  # noqa: E402

from autoshard import AutoshardError, Collective, Plan, evaluate, plan, topology  # noqa: E402
from autoshard.compiled.collectives import peak_bytes, read_collectives  # noqa: E402
from autoshard.compiled.schedule import CompiledSchedule, schedule_of  # noqa: E402
from autoshard.mesh.chips import CHIPS  # noqa: E402
from autoshard.mesh.collectives import total_seconds  # noqa: E402
from autoshard.mesh.machines import parse_machine  # noqa: E402
from autoshard.mesh.targets import compiler_options, target_mesh  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "prediction.md"
OWN = "autoshard"  # the sharding that is solved for
LEAST = 0.01  # of a program's bytes: kinds of collectives that move less are not compared
BYTES_WITHIN, PEAK_WITHIN = 0.10, 0.15
ROUNDS = 7  # of measured steps; all shardings of a model take turns


class Target(NamedTuple):
    """A machine to compile for."""

    machine: str  # a name as for `topology`
    axes: dict[str, int]
    workloads: Mapping[str, Workload]


TARGETS = {
    "cpu": Target("cpu:8", {"data": 4, "model": 2}, SMALL),
    "tpu": Target("v5e:4x4", {"data": 4, "model": 4}, LARGE),
    "gpu": Target("h100:2x8", {"data": 2, "model": 8}, LARGE),
}

MATTERS = 0.01  # share of a step
GATHERS_WEIGHTS = ("FSDP", OWN)  # shardings whose gathers are of weights alone, or nearly


@dataclass(frozen=True)
class Row:
    """One program: what was predicted for it, and what XLA made of it, per step on one device."""

    target: str
    model: str
    sharding: str
    predicted_bytes: Mapping[str, int]  # by kind of collective
    compiled_bytes: Mapping[str, int]
    predicted_peak: int
    compiled_peak: int | None  # None: it does not fit
    predicted_seconds: float  # of the compiled program: what arrives anew is there when it starts
    predicted_serially: float  # the same, nothing behind compute
    seconds: float | None  # measured on CPU; else estimated, in the order in which XLA has put the operations
    serially: float  # that estimate, one operation after the other
    communication: Mapping[str, float]  # of that, by kind of collective
    exposed: Mapping[str, float]  # how much of it nothing runs beside
    fits: bool  # whether the plan is said to fit

    def off(self) -> dict[str, tuple[int, int]]:
        """The kinds of collectives whose bytes are predicted wrong: kind -> (predicted, compiled)."""
        found = {}
        for kind in sorted(self.predicted_bytes.keys() | self.compiled_bytes.keys()):
            foreseen, there = self.predicted_bytes.get(kind, 0), self.compiled_bytes.get(kind, 0)
            counts = max(foreseen, there) > LEAST * sum(self.compiled_bytes.values())
            if counts and abs(foreseen - there) > BYTES_WITHIN * there:
                found[kind] = foreseen, there
        return found

    @property
    def peak_error(self) -> float | None:
        return None if self.compiled_peak is None else self.predicted_peak / self.compiled_peak - 1


class Compiled(NamedTuple):
    """What is kept of a compiled program."""

    hlo: str | None  # None: it does not fit
    peak: int | None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--models", nargs="*", default=list(SMALL), choices=list(SMALL))
    parser.add_argument("--shardings", nargs="*", help="some of those in shardings.py, or autoshard")
    parser.add_argument("--cache", type=Path, help="a folder for what was compiled")
    parser.add_argument("--rows", type=Path, help="a JSON file of rows, to do everything in several runs")
    chosen = parser.parse_args()
    kept = read_rows(chosen.rows, Row, lambda row: (row.target, row.model, row.sharding))
    for target in chosen.targets:
        for model in chosen.models:
            for row in rows_of(target, model, chosen.shardings, chosen.cache):
                kept[target, model, row.sharding] = row
                print(line(row), flush=True)
                write_rows(chosen.rows, kept.values())
    rows = sorted(kept.values(), key=lambda row: (list(TARGETS).index(row.target), list(SMALL).index(row.model)))
    print(summary(rows))
    whole = chosen.targets == list(TARGETS) and chosen.models == list(SMALL) and not chosen.shardings
    if chosen.rows or whole:
        PAGE.write_text(page(rows))


def rows_of(target: str, model: str, shardings: Sequence[str] | None, cache: Path | None) -> Iterator[Row]:
    machine, axes, workloads = TARGETS[target]
    mesh = mesh_of(axes) if target == "cpu" else target_mesh(machine, axes)
    workload = workloads[model]
    options = {"mesh": mesh, "topology": topology(machine, axes), "donate_argnums": 0}
    plans = dict(plans_of(workload, options, shardings))
    measured = measured_seconds(plans, workload) if target == "cpu" else {}
    for name, made in plans.items():
        found = compiled(made.lowering(mesh), mesh, cache)
        there = read_collectives(found.hlo, axes) if found.hlo else ()
        foreseen = made.predicted.collectives
        schedule = CompiledSchedule(0.0, {}, {})
        if found.hlo and target != "cpu":
            schedule = scheduled(found.hlo, machine, mesh)
        yield Row(
            target=target,
            model=model,
            sharding=name,
            predicted_bytes=by_kind(foreseen),
            compiled_bytes=by_kind(there),
            predicted_peak=made.predicted.peak_bytes,
            compiled_peak=found.peak,
            predicted_seconds=made.predicted.program_seconds,
            predicted_serially=made.predicted.program_seconds
            - made.predicted.exposed_seconds
            + made.predicted.communication_seconds,
            seconds=schedule.step_seconds or measured.get(name),
            serially=schedule.compute_seconds + total_seconds(there, axes, topology(machine, axes)),
            communication=schedule.communication,
            exposed=schedule.exposed,
            fits=made.predicted.peak_bytes <= made.memory,
        )


def scheduled(hlo: str, machine: str, mesh: Mesh) -> CompiledSchedule:
    """What a program takes on TPU by XLA's own estimate, on GPU by a roofline, at the links of the topology."""
    axes, clock = dict(mesh.shape), CHIPS[parse_machine(machine).chip].clock
    return schedule_of(hlo, axes, topology(machine, axes), clock, device_ids(mesh))


def device_ids(mesh: Mesh) -> list[int]:
    return [device.id for device in mesh.devices.flat]


def plans_of(workload: Workload, options: dict, shardings: Sequence[str] | None) -> Iterator[tuple[str, Plan]]:
    """The plan of every sharding by hand, and our own."""
    step, state, batch = workload.abstract()
    by_hand = shardings_of(workload.family, state, batch, dict(options["mesh"].shape))
    for name in (*by_hand, OWN):
        if shardings and name not in shardings:
            continue
        try:
            if name == OWN:
                yield name, plan(step, state, batch, **options)
            else:
                yield name, evaluate(step, state, batch, in_shardings=by_hand[name], **options)
        except AutoshardError as error:
            print(f"{name}: {error}", file=sys.stderr)


def compiled(lowered: jax.stages.Lowered, mesh: Any, cache: Path | None) -> Compiled:
    """The step compiled for the devices of `mesh`, or what an earlier run kept of it."""
    kept = f"{jax.__version__} {mesh.devices.flat[0].device_kind} {lowered.as_text()}"
    file = cache and cache / f"{hashlib.sha256(kept.encode()).hexdigest()[:24]}.hlo.gz"
    if file and file.exists():
        content = json.loads(gzip.decompress(file.read_bytes()))
        return Compiled(content["hlo"], content["peak"])
    options = compiler_options(mesh)
    with tempfile.TemporaryDirectory() as folder:
        if mesh.devices.flat[0].platform == "tpu":
            options["xla_dump_to"] = folder
        try:
            program = lowered.compile(compiler_options=options)
            found = Compiled(text_of(program, Path(folder)), peak_bytes(program))
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            found = Compiled(None, None)
    if file:
        cache.mkdir(parents=True, exist_ok=True)
        file.write_bytes(gzip.compress(json.dumps(found._asdict()).encode()))
    return found


def compiled_row(name: str, lowered: jax.stages.Lowered, mesh: Mesh, machine: str) -> tuple[Compiled, str]:
    """The program, and its row: peak, seconds, those of computing, and those of each kind of collective, apart."""
    made = compiled(lowered, mesh, None)
    if made.hlo is None:
        return made, f"{name} | does not fit"
    times = scheduled(made.hlo, machine, mesh)
    sent = ", ".join(f"{kind} {seconds:.3g}" for kind, seconds in times.communication.items())
    return made, f"{name} | {mib(made.peak)} MiB | {times.step_seconds:.4g} | {times.compute_seconds:.4g} | {sent}"


def text_of(program: jax.stages.Compiled, folder: Path) -> str:
    """The program, or what XLA wrote of it into a folder: libtpu cannot print some of those for v5p."""
    try:
        return program.as_text()
    except jax.errors.JaxRuntimeError:
        written = [*folder.glob("*.after_codegen.txt")]
        if len(written) != 1:
            raise
        return written[0].read_text()


def measured_seconds(plans: Mapping[str, Plan], workload: Workload) -> dict[str, float]:
    """Median seconds of a step on the devices at hand, per plan; the plans take turns."""
    model = workload.model()
    given = jax.tree.map(np.asarray, (model.state, model.batches(0)))  # every plan has its own
    arguments = {name: jax.device_put(given, made.in_shardings) for name, made in plans.items()}
    times: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(ROUNDS + 1):  # the first compiles
        for name, made in plans.items():
            start = time.perf_counter()
            state, _ = jax.block_until_ready(made.lowering.step(*arguments[name]))
            times[name].append(time.perf_counter() - start)
            arguments[name] = state, arguments[name][1]
    return {name: statistics.median(taken[1:]) for name, taken in times.items()}


def by_kind(collectives: Iterable[Collective]) -> dict[str, int]:
    found: Counter = Counter()
    for one in collectives:
        found[one.kind] += one.bytes
    return dict(found)


# Reports.


def line(row: Row) -> str:
    off = ", ".join(f"{kind} {foreseen:.3g} for {there:.3g}" for kind, (foreseen, there) in row.off().items())
    peak = "does not fit" if row.peak_error is None else f"{row.peak_error:+.1%}"
    return (
        f"{row.target} | {row.model} | {row.sharding} | {off or 'agree'} | {mib(row.predicted_peak)} | "
        f"{mib(row.compiled_peak)} | {peak} | {ms(row.predicted_seconds)} | {ms(row.seconds)} | "
        f"{ms(row.predicted_serially)} | "
        f"{ms(row.serially) if row.communication else ''}"
    )


def ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.4g}"


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.1f}"


def summary(rows: Sequence[Row]) -> str:
    lines = []
    for target in TARGETS:
        chosen = [row for row in rows if row.target == target]
        if not chosen:
            continue
        agree = sum(not row.off() for row in chosen)
        errors = [row.peak_error for row in chosen if row.peak_error is not None]
        near = sum(abs(error) <= PEAK_WITHIN for error in errors)
        lost = sum(row.fits and row.compiled_peak is None for row in chosen)
        lines.append(
            f"- {target}: collectives within {BYTES_WITHIN:.0%} in {agree} of {len(chosen)} programs, "
            f"peak within {PEAK_WITHIN:.0%} in {near} of {len(errors)}; {lost} said to fit do not."
        )
        for model in dict.fromkeys(row.model for row in chosen):
            timed = [row for row in chosen if row.model == model and row.seconds]
            if len(timed) > 2:
                lines.append(f"  - {model}: Spearman {spearman(timed)} over {len(timed)} shardings")
        timed = [row for row in chosen if row.seconds]
        if timed:
            lines.append(f"  - all models together: Spearman {spearman(timed)}")
        for kind in sorted({kind for row in chosen for kind in row.communication}):
            shares = hidden_shares(chosen, kind)
            if len(shares) > 2:
                median = statistics.median(shares)
                lines.append(f"  - {kind}s behind compute: {median:.0%} in the median of {len(shares)} programs")
    return "\n".join(lines)


def hidden_shares(rows: Sequence[Row], kind: str) -> list[float]:
    """How much of the time of these collectives nothing waits for, where weights are gathered and where it matters."""
    rows = [row for row in rows if row.sharding in GATHERS_WEIGHTS]
    rows = [row for row in rows if row.communication.get(kind, 0.0) > MATTERS * row.serially]
    return [max(0.0, 1 - row.exposed[kind] / row.communication[kind]) for row in rows]


def spearman(rows: Sequence[Row]) -> str:
    """Spearman's rank correlation of predicted seconds and those there are, and of both one after the other."""
    found = f"{spearmanr([row.predicted_seconds for row in rows], [row.seconds for row in rows]).statistic:.2f}"
    if not any(row.communication for row in rows):
        return found
    serially = spearmanr([row.predicted_serially for row in rows], [row.serially for row in rows]).statistic
    return f"{found}, one after the other {serially:.2f},"


def page(rows: Sequence[Row]) -> str:
    head = (PAGE.parent / "prediction.head.md").read_text()
    titles = ("model", "sharding", "collectives", "predicted MiB", "compiled MiB", "peak off")
    titles += ("predicted ms", "ms", "predicted ms, serially", "ms, serially")
    sections = [head.strip(), "## Summary\n\n" + summary(rows)]
    for target, (machine, axes, _) in TARGETS.items():
        lines = [f"## {machine}, {axes}", "", " | ".join(titles), " | ".join("---" for _ in titles)]
        lines += [line(row).partition(" | ")[2] for row in rows if row.target == target]
        sections.append("\n".join(lines))
    return "\n\n".join(sections) + "\n"


if __name__ == "__main__":
    main()
