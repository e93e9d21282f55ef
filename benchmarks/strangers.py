"""How true predictions are on programs that nobody here wrote: beside what XLA compiles for CPU, TPU and GPU.

    python benchmarks/strangers.py --machine cpu --sample 200 --seed 1    # so many programs, of every primitive
    python benchmarks/strangers.py --machine v5e:2x4 --seconds 600        # as many as are done in ten minutes
    python benchmarks/strangers.py --only top_k                           # those with this in their names
    python benchmarks/strangers.py --rows FILE --seconds 600              # adds to a run that was stopped
    python benchmarks/strangers.py --rows FILE --page                     # writes docs/benchmarks/strangers.md of these

The programs are the cases of `tests/cases.py`, at least one per primitive; those that JAX tests its primitives with
(`jax._src.internal_test_util.test_harnesses`); and the situations of `benchmarks/situations.py`. Cases and harnesses
come in four forms: as they are, their gradients, and both of these under `jax.vmap` over a batch that is split over all
devices. The batch makes the largest argument one MiB at least, so that figures are of the program and not of its
bookkeeping.

Each is planned for a machine, compiled for it and verified. Nothing runs, so arguments are shapes alone. On CPU the
links of the machine cost nothing, so that all that can be split is split. Four bars are measured, on each machine:

- Bytes of each kind of collective within 10%.
- The peak within 20%, or within one page of 4 KiB.
- The compiled peak within the tightest limit under which the plan would be made (`Backend.usable`), but for one page.
  A program over it is planned anew with that limit, and its compiled program checked. What counts is the plan that
  comes of this. If there is a `MemoryLimitError` instead, nothing runs over its limit.
- On TPU, seconds within a factor of two of XLA's own estimate, of programs of which XLA estimates every operation. On
  GPU, where XLA has no estimate, of our roofline.

Programs run in processes of their own: one that ends its process is a row as others are. If XLA ends the process of the
program without a plan, too, the program counts as refused.
"""

import argparse
import collections
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from exceptions import reason_of  # noqa: E402  (as above)
from workers import Ended, Worker, answers, in_turns, serve  # noqa: E402  (needs the path above)

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "strangers.md"
MACHINES = ("cpu", "v5e:2x4", "h100:1x8")
FORMS = ("values", "gradient", "batch", "batch gradient")
DEVICES = 8
BATCH_BYTES = 2**20  # of the largest argument of a batch, at least
BATCHES = (64, 4096)  # the least and the most that is in one
FLAGS = (  # programs are compiled fast rather than to run fast; the passes over HLO are the same
    f"--xla_force_host_platform_device_count={DEVICES} --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
PLANNING_SECONDS = 10
HANGS_AFTER = 180  # s
KEPT_PROGRAMS = 40  # compiled, before JAX forgets them
PAGE_BYTES = 4096  # off by less: rounding of buffers, flags and counters
COLLECTIVES_WITHIN, PEAK_WITHIN, SECONDS_WITHIN = 0.10, 0.20, 2.0
BARS = {"collectives": 0.95, "peak": 0.90, "limit": 1.0, "seconds": 0.90}  # shares of programs


class Task(NamedTuple):
    """A program in one form, on one machine."""

    source: str  # "case", "harness" or "situation"
    name: str
    form: str  # one of FORMS
    machine: str  # one of MACHINES


@dataclass(frozen=True)
class Row:
    """What was predicted for one task, and what was compiled."""

    source: str
    name: str
    form: str
    machine: str
    family: str  # the primitive that the program is there for
    outcome: str  # "compared", "refused" by JAX or XLA without a plan too, "raises", "crashes" or "hangs"
    detail: str = ""  # the error
    predicted: Mapping[str, int] = field(default_factory=dict)  # kind of collective -> bytes
    compiled: Mapping[str, int | None] = field(default_factory=dict)  # None: not known how many
    predicted_peak: int = 0  # bytes
    peak: int = 0  # bytes
    usable: float = 1.0  # share of a limit that a plan may be predicted to fill
    checked_peak: int | None = None  # bytes after the check of compiled programs; None: not needed, or nothing runs
    predicted_seconds: float = 0.0
    seconds: float | None = None  # None: the compiler has no estimate
    unestimated: tuple[str, ...] = ()  # the operations of which it has none
    wall: float = 0.0  # s that the task took

    @property
    def task(self) -> Task:
        return Task(self.source, self.name, self.form, self.machine)

    @property
    def misses(self) -> dict[str, str]:
        """The bars that it misses, each with what is off."""
        if self.outcome != "compared":
            return {}
        found = {}
        off = [_beside(kind, self.predicted.get(kind, 0), self.compiled.get(kind, 0)) for kind in self.kinds_off]
        if off:
            found["collectives"] = ", ".join(off)
        if abs(self.predicted_peak - self.peak) > max(PEAK_WITHIN * self.peak, PAGE_BYTES):
            found["peak"] = f"{self.predicted_peak} predicted, {self.peak} bytes compiled"
        if self.checked_peak is not None and self.checked_peak - PAGE_BYTES > self.limit:
            found["limit"] = f"{self.limit:.0f} allowed, {self.checked_peak} bytes after the check"
        if (
            self.applies("seconds")
            and not 1 / SECONDS_WITHIN <= self.predicted_seconds / self.seconds <= SECONDS_WITHIN
        ):
            found["seconds"] = f"{self.predicted_seconds:.2e} predicted, {self.seconds:.2e} s compiled"
        return found

    @property
    def limit(self) -> float:
        """The tightest limit under which the plan would be made, in bytes."""
        return self.predicted_peak / self.usable

    @property
    def is_over(self) -> bool:
        """Whether the program is over that limit before the check."""
        return self.outcome == "compared" and self.peak - PAGE_BYTES > self.limit

    @property
    def kinds_off(self) -> list[str]:
        """The kinds of collectives whose bytes are off."""

        def is_off(predicted: int, compiled: int | None) -> bool:
            return compiled is None or abs(predicted - compiled) > COLLECTIVES_WITHIN * compiled

        kinds = sorted(self.predicted.keys() | self.compiled.keys())
        return [kind for kind in kinds if is_off(self.predicted.get(kind, 0), self.compiled.get(kind, 0))]

    def applies(self, bar: str) -> bool:
        """Whether a bar can be measured."""
        is_estimated = bool(self.seconds) and not self.unestimated
        return self.outcome == "compared" and (bar != "seconds" or is_estimated)

    def reason(self, bar: str) -> str:
        """Why it misses a bar."""
        what = f"{self.machine} {self.family} {self.form}"
        if bar == "seconds":
            return reason_of(what, bar, self.predicted_seconds, self.seconds or 0.0)
        if bar == "collectives":
            sent = (sum(size or 0 for size in sizes.values()) for sizes in (self.predicted, self.compiled))
            return reason_of(what, bar, *sent)
        return reason_of(what, bar, self.predicted_peak, self.peak)


def _beside(kind: str, predicted: int, compiled: int | None) -> str:
    return f"{kind} {predicted} predicted, {'unknown' if compiled is None else compiled} compiled"


# Programs. A program is (family, function, arguments); the arguments are arrays or shapes.

Program = tuple[str, Callable, tuple]


def programs() -> dict[tuple[str, str], Program]:
    """All of them, by source and name."""
    import cases
    import situations
    from jax._src.internal_test_util.test_harnesses import all_harnesses

    found: dict[tuple[str, str], Program] = {}
    for case in cases.CASES:
        found["case", case.name] = case.primitive, case.fn, case.args
    for harness in all_harnesses:
        if harness.filter("cpu"):
            found["harness", harness.fullname] = harness.group_name, harness, ()
    for situation in situations.SITUATIONS:
        found["situation", situation.name] = situation.name, situation.fn, situation.args
    return found


def in_form(source: str, program: Program, form: str) -> tuple[Callable, tuple]:
    """A program's function and the shapes of its arguments in one form.

    Raises:
        Exception: whatever JAX says of what has no derivative or no rule for batches.
    """
    import jax
    import numpy as np
    from harnesses import gradient_of

    _, fn, args = program
    if source == "harness":
        fn, args = fn.dyn_fun, fn.dyn_args_maker(np.random.RandomState(0))
    if form.endswith("gradient"):
        fn, args = gradient_of(fn, args)
    shapes = jax.tree.map(jax.typeof, tuple(args))
    if form.startswith("batch"):
        fn, shapes = batched(fn, shapes)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), shapes)
    jax.eval_shape(fn, *shapes)
    return fn, shapes


def batched(fn: Callable, shapes: tuple) -> tuple[Callable, tuple]:
    """A function under `vmap`, and its arguments with a batch of them."""
    import jax

    leaves = jax.tree.leaves(shapes)
    largest = max((leaf.size * getattr(leaf.dtype, "itemsize", 4) for leaf in leaves), default=1)
    least, most = BATCHES
    batch = least
    while batch < most and batch * largest < BATCH_BYTES:
        batch *= 2
    return jax.vmap(fn), jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), shapes)


# One task, in this process.


def compare(task: Task, program: Program) -> Row:
    """Plans a program, compiles it, and puts what is predicted beside what is compiled."""
    started = time.perf_counter()
    row = Row(*task, program[0], "compared")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            fn, shapes = in_form(task.source, program, task.form)
        except Exception as error:
            return replace(row, outcome="refused", detail=_line(error))
        try:
            row = compared(row, fn, shapes)
        except Exception as error:
            outcome = "raises" if compiles_alone(fn, shapes, task.machine) else "refused"
            row = replace(row, outcome=outcome, detail=_line(error))
    return replace(row, wall=time.perf_counter() - started)


def compared(row: Row, fn: Callable, shapes: tuple) -> Row:
    """The row with its figures."""
    import jax
    from harnesses import fast_links

    from autoshard import plan
    from autoshard.mesh.targets import target_mesh
    from autoshard.model.xla.backends import backend_of

    options: dict[str, Any] = {}
    if row.machine == "cpu":
        mesh, target = cpu_mesh(), None
        backend = backend_of(mesh)
        options["topology"] = fast_links(mesh.shape)
    else:
        mesh, target = jax.sharding.AbstractMesh((DEVICES,), ("data",)), row.machine
        backend = backend_of(mesh, target)
        options["topology"] = target
    if row.form.startswith("batch"):
        options["fixed"] = {"*": jax.sharding.PartitionSpec("data")}
    found = plan(fn, *shapes, mesh=mesh, time_limit=PLANNING_SECONDS, **options).verify(target)
    row = replace(
        row,
        predicted=by_kind(found.predicted),
        compiled=by_kind(found.actual),
        predicted_peak=found.predicted_peak,
        peak=found.actual_peak,
        usable=backend.usable,
        predicted_seconds=found.predicted_seconds,
        seconds=found.schedule.step_seconds if found.schedule else None,
        unestimated=found.schedule.unestimated if found.schedule else (),
    )
    if not row.is_over:
        return row
    on = mesh if target is None else target_mesh(target, dict(mesh.shape))
    return checked(row, fn, shapes, {"mesh": on, "time_limit": PLANNING_SECONDS, **options})


def checked(row: Row, fn: Callable, shapes: tuple, options: Mapping[str, Any]) -> Row:
    """The row of a program that is over its limit, with what the check of compiled programs makes of it."""
    from autoshard import MemoryLimitError, autoshard

    try:
        made = autoshard(fn, memory=row.limit, **options).plan(*shapes)
    except MemoryLimitError:
        return row
    return replace(row, checked_peak=made.compiled_peak)


def by_kind(traffic: Mapping[tuple[str, tuple[str, ...]], int | None]) -> dict[str, int | None]:
    """Bytes by kind, whatever the axes; None where some are not known."""
    found: dict[str, int | None] = {}
    for (kind, _), size in traffic.items():
        before = found.get(kind, 0)
        found[kind] = None if size is None or before is None else before + size
    return found


def compiles_alone(fn: Callable, shapes: tuple, machine: str) -> bool:
    """Whether XLA compiles a program for the devices of the machine, whole on each, without a plan."""
    import jax

    from autoshard.mesh.targets import compiler_options, target_mesh

    try:
        mesh = cpu_mesh() if machine == "cpu" else target_mesh(machine, {"data": DEVICES})
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        jax.jit(fn, in_shardings=whole).lower(*shapes).compile(compiler_options(mesh))
    except Exception:
        return False
    return True


def cpu_mesh() -> Any:
    import jax

    return jax.make_mesh((DEVICES,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


def _line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


# Many tasks, in processes of their own.


def work() -> None:
    """Compares tasks as they come."""
    import jax

    every = programs()
    count = 0

    def answer(task: Sequence[str]) -> dict | bool:
        nonlocal count
        if len(task) > len(Task._fields):  # see `ends_alone`
            one = Task(*task[:-1])
            return compiles_alone(*in_form(one.source, every[one.source, one.name], one.form), one.machine)
        count += 1
        if count % KEPT_PROGRAMS == 0:
            jax.clear_caches()
        one = Task(*task)
        return asdict(compare(one, every[one.source, one.name]))

    serve(answer)


def chosen_tasks(
    families: Mapping[tuple[str, str], str], machines: Sequence[str], only: str, sample: int | None, seed: int
) -> list[Task]:
    """The tasks of so many programs, in an order in which every family has its turn."""
    names = in_turns((name for name in families if only in name[1]), families, seed)
    names.sort(key=lambda name: name[0] != "situation")  # stable: the others keep their turns
    return [
        Task(source, name, form, machine)
        for source, name in names[:sample]
        for machine in machines
        for form in (FORMS[:1] if source == "situation" else FORMS)
    ]


def rows_of(tasks: Sequence[Task], families: Mapping[tuple[str, str], str], jobs: int = 1) -> Iterator[Row]:
    """What became of the tasks, as they end."""
    for task, answer in answers(tasks, jobs, new_worker):
        if not isinstance(answer, Ended):
            yield Row(**answer)
        elif not answer.late and ends_alone(task):
            detail = "XLA ends the process of the program without a plan, too"
            yield Row(*task, families[task.source, task.name], "refused", detail)
        else:
            outcome = "hangs" if answer.late else "crashes"
            yield Row(*task, families[task.source, task.name], outcome, answer.detail)


def new_worker() -> Worker:
    return Worker([__file__, "--serve"], {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}, HANGS_AFTER)


def ends_alone(task: Task) -> bool:
    """Whether XLA ends the process when it compiles the program of a task without a plan."""
    worker = new_worker()
    answer = worker((*task, "alone"))
    worker.close()
    return isinstance(answer, Ended) and not answer.late


# The page.


def shares(rows: Iterable[Row]) -> dict[str, tuple[int, int]]:
    """Per bar, how many rows are within it, of how many."""
    found = {}
    every = list(rows)
    for bar in BARS:
        measured = [row for row in every if row.applies(bar)]
        if measured:
            found[bar] = sum(bar not in row.misses for row in measured), len(measured)
    return found


def kind_of(row: Row, bar: str) -> str:
    """What exceptions of one kind have in common: the primitive, and the sign of what is off."""
    if bar == "collectives":
        signs = []
        for kind in row.kinds_off:
            predicted, compiled = row.predicted.get(kind, 0), row.compiled.get(kind, 0)
            more = compiled is None or compiled > predicted
            signs.append(f"{kind} {'not ' if more and not predicted else 'too few ' if more else 'too many '}predicted")
        return f"{row.family}: {', '.join(signs)}"
    predicted, compiled = (row.predicted_seconds, row.seconds) if bar == "seconds" else (row.predicted_peak, row.peak)
    return f"{row.family}: predicted {'low' if predicted < (compiled or 0) else 'high'}"


def page(rows: Sequence[Row], chosen: str = "") -> str:
    """The page, in Markdown; `chosen` are the options that chose the programs."""
    lines = [
        "# Programs from elsewhere",
        "",
        f"What `python benchmarks/strangers.py{chosen}` compares: predictions for programs that were written for other",
        "purposes, beside what XLA compiles. The head of that script says which programs, and what the bars are.",
        "",
        "| machine | programs | " + " | ".join(f"{bar} (aim {aim:.0%})" for bar, aim in BARS.items()) + " |",
        "|---|--:|" + "--:|" * len(BARS),
    ]
    for machine in MACHINES:
        of = [row for row in rows if row.machine == machine]
        figures = shares(of)
        cells = [f"{100 * figures[bar][0] / figures[bar][1]:.1f}%" if bar in figures else "" for bar in BARS]
        lines.append(f"| {machine} | {sum(row.outcome == 'compared' for row in of)} | {' | '.join(cells)} |")
    over = collections.Counter(row.machine for row in rows if row.is_over)
    refused = collections.Counter(row.machine for row in rows if row.is_over and row.checked_peak is None)
    lines += ["", "Over their limit before the check of compiled programs: " + _counts(over) + "."]
    lines += ["", "No plan within it, which a `MemoryLimitError` says: " + _counts(refused) + "."]
    unknown = collections.Counter(row.machine for row in rows if row.outcome == "compared" and row.unestimated)
    lines += ["", "With operations of which XLA has no estimate: " + _counts(unknown) + "."]
    others = collections.Counter((row.machine, row.outcome) for row in rows if row.outcome != "compared")
    lines += ["", "Not compared: " + ", ".join(f"{n} {what} on {on}" for (on, what), n in sorted(others.items())) + "."]
    for bar in BARS:
        kinds = collections.defaultdict(list)
        for row in rows:
            if bar in row.misses:
                kinds[row.machine, kind_of(row, bar), row.reason(bar)].append(row)
        if not kinds:
            continue
        lines += ["", f"## Exceptions: {bar}", "", "| machine | kind | programs | for example | reason |"]
        lines += ["|---|---|--:|---|---|"]
        for (machine, kind, why), of in sorted(kinds.items(), key=lambda item: (item[0][0], -len(item[1]))):
            one = min(of, key=lambda row: len(row.name))
            example = f"`{one.name.replace('|', ' ')[:60]}` {one.form}: {one.misses[bar]}"
            lines.append(f"| {machine} | {kind} | {len(of)} | {example} | {why} |")
    for outcome in ("raises", "crashes", "hangs"):
        for row in rows:
            if row.outcome == outcome:
                lines += ["", f"`{row.name[:80]}` {row.form} on {row.machine} {outcome}: {row.detail[:160]}"]
    return "\n".join(lines) + "\n"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} on {machine}" for machine, count in counts.items()) or "none"


def print_kinds(rows: Sequence[Row], most: int) -> None:
    """Shares, and the kinds of exceptions that have the most programs."""
    for machine in MACHINES:
        of = [row for row in rows if row.machine == machine]
        outcomes = collections.Counter(row.outcome for row in of)
        if not of:
            continue
        over = [row for row in of if row.is_over]
        refused = sum(row.checked_peak is None for row in over)
        print(f"\n{machine}: {dict(outcomes)}, {len(over)} over before the check, {refused} refused by it")
        for bar, (within, total) in shares(of).items():
            print(f"  {bar}: {within} of {total}, {within / total:.1%}")
            kinds = collections.defaultdict(list)
            for row in of:
                if bar in row.misses:
                    kinds[kind_of(row, bar)].append(row)
            for kind, alike in sorted(kinds.items(), key=lambda item: -len(item[1]))[:most]:
                one = min(alike, key=lambda row: len(row.name))
                print(f"    {len(alike):4} {kind} | {one.name[:60]} {one.form}: {one.misses[bar]}")
        for row in of:
            if row.outcome in ("raises", "crashes", "hangs"):
                print(f"  {row.outcome} {row.name[:60]} {row.form}: {row.detail[:150]}")


def read(path: Path | None) -> dict[Task, Row]:
    """The rows of a run that was stopped."""
    lines = path.read_text().splitlines() if path and path.exists() else ()
    return {row.task: row for row in (Row(**json.loads(line)) for line in lines)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", choices=MACHINES, nargs="+", default=MACHINES)
    parser.add_argument("--only", default="", help="a part of the programs' names")
    parser.add_argument("--sample", type=int, help="how many programs, of every primitive in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further task is begun")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--rows", type=Path, help="a file of results to add to, one line of JSON each")
    parser.add_argument("--page", action="store_true", help="write the page")
    parser.add_argument("--most", type=int, default=25, help="kinds of exceptions to print, per bar")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        work()
        return 0
    os.environ["JAX_PLATFORMS"] = "cpu"
    families = {key: program[0] for key, program in programs().items()}
    tasks = chosen_tasks(families, options.machine, options.only, options.sample, options.seed)
    found = read(options.rows)
    left, started = [task for task in tasks if task not in found], time.perf_counter()
    with open(options.rows or os.devnull, "a") as file:
        for row in rows_of(left, families, options.workers):
            found[row.task] = row
            print(json.dumps(asdict(row)), file=file, flush=True)
            if time.perf_counter() - started > options.seconds:
                break
    rows = [found[task] for task in tasks if task in found]
    print_kinds(rows, options.most)
    if options.page:
        sample = "" if options.sample is None else f" --sample {options.sample} --seed {options.seed}"
        PAGE.write_text(page(rows, sample))
    return 0


if __name__ == "__main__":
    sys.exit(main())
