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
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from stranger_page import page, print_kinds  # noqa: E402  (needs the path above)
from stranger_rows import FORMS, MACHINES, Row, Task, read  # noqa: E402  (as above)
from workers import Ended, Worker, answers, in_turns, serve  # noqa: E402  (as above)

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "strangers.md"
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
    names = in_turns(sorted(name for name in families if only in name[1]), families, seed)
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
