"""Every program that JAX tests its primitives with, and its gradient, under autoshard and under plain `jax.jit`.

    python benchmarks/harnesses.py                               # all of them, on a (4, 2) mesh: hours
    python benchmarks/harnesses.py --sample 200 --seed 1         # so many of them, of every primitive
    python benchmarks/harnesses.py --only conv --mesh 2 2 2      # those with this in their names, on another mesh
    python benchmarks/harnesses.py --x64                         # with 64-bit types
    python benchmarks/harnesses.py --rows FILE --jobs 4          # adds to the results of a run that was stopped

The programs are JAX's own (`jax._src.internal_test_util.test_harnesses`, in every wheel). Each runs on eight CPU
devices under a plan for a machine whose links cost nothing and whose chips are slow, so that all that can be split is
split, and on one device under `jax.jit`, with the same arguments. Its gradient is that of a sum of its results with
fixed weights, by all inexact arguments; the weights are arguments too. A program that `jax.jit` refuses, or cannot
differentiate, is counted as that.

Results are equal if integers are the same and others differ by roundings (`tests/equality.py`). Where they are not, the
plain program runs again with its arguments off by a rounding or two: "ill-conditioned" is what then differs as much.
All else is a fault: "differs", "raises", "crashes" (the process ended) or "hangs". Programs run in processes of their
own, which such a program does not take with it. The exit status is 1 if there are faults that `KNOWN` does not list.
"""

import argparse
import collections
import fnmatch
import itertools
import json
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from workers import Ended, Worker, answers, in_turns, serve  # noqa: E402  (needs the path above)

PARTS = ("values", "gradient")
MESH = (4, 2)
FAULTS = ("differs", "raises", "crashes", "hangs")
KNOWN: dict[str, str] = {}  # pattern of "name part" -> why it is none of our faults
FLAGS = (  # programs are compiled fast rather than to run fast; the passes over HLO are the same
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)
PLANNING_SECONDS = 10
HANGS_AFTER = 180  # s; the slowest program takes a tenth of it
KEPT_PROGRAMS = 40  # compiled, before JAX forgets them
NOISES = 4  # runs with arguments off by roundings
NOISE = 2  # roundings
LENIENCE = 4  # times the difference that noise makes


class Task(NamedTuple):
    """A program, or its gradient."""

    name: str
    part: str  # one of PARTS


@dataclass(frozen=True)
class Row:
    """What became of one task."""

    name: str
    part: str
    family: str  # the primitive that the program is there for
    outcome: str  # "equal", "ill-conditioned", "refused" by `jax.jit` too, or one of FAULTS
    detail: str = ""  # the error or the difference
    split: bool = False  # whether the plan splits anything
    seconds: float = 0.0

    @property
    def known(self) -> str | None:
        """The reason why the outcome is as it is, if it is a known exception."""
        task = f"{self.name} {self.part}"
        return next((reason for pattern, reason in KNOWN.items() if fnmatch.fnmatchcase(task, pattern)), None)


# One task, in this process.


def programs() -> dict[str, Any]:
    """JAX's programs by their names, those left out that JAX does not implement on CPUs."""
    from jax._src.internal_test_util.test_harnesses import all_harnesses

    return {harness.fullname: harness for harness in all_harnesses if harness.filter("cpu")}


def fast_links(axes: Iterable[str]):
    """A machine on which a plan splits whatever it can: messages cost nothing, and work is dear."""
    from autoshard import Link, Topology

    links = {axis: Link(latency=0.0, bandwidth=1e15) for axis in axes}
    return Topology(links, memory_bytes=1e12, memory_bandwidth=1e5, flops={"float32": 1e5})


def ran(harness: Any, part: str, mesh: Any) -> Row:
    """One task run under `jax.jit` and under autoshard on a mesh."""
    import numpy as np

    started = time.perf_counter()
    fn, args = harness.dyn_fun, harness.dyn_args_maker(np.random.RandomState(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome, detail, split = _outcome(fn, args, part, mesh)
    return Row(harness.fullname, part, harness.group_name, outcome, detail, split, time.perf_counter() - started)


def _outcome(fn: Callable, args: Sequence, part: str, mesh: Any) -> tuple[str, str, bool]:
    import jax
    from equality import are_equal, assert_equal, numbers

    from autoshard import autoshard

    try:
        if part == "gradient":
            fn, args = gradient_of(fn, args)
        expected = jax.block_until_ready(jax.jit(fn)(*args))
    except Exception as error:
        return "refused", _line(error), False
    split = False
    try:
        step = autoshard(fn, mesh=mesh, topology=fast_links(mesh.shape), time_limit=PLANNING_SECONDS)
        split = any(axes for x in step.plan(*args).flat_in_shardings for axes in x.spec)
        found = step(*args)
        jax.tree.map(numbers, found)  # as a user reads them
    except Exception as error:
        return "raises", _line(error), split
    if are_equal(found, expected):
        return "equal", "", split
    if differ_as_with_noise(fn, args, found, expected):
        return "ill-conditioned", "", split
    try:
        assert_equal(found, expected)
    except AssertionError as error:
        return "differs", _difference(error), split
    return "equal", "", split


def gradient_of(fn: Callable, args: Sequence) -> tuple[Callable, tuple]:
    """The gradient of a weighted sum of the inexact results by the inexact arguments, and what it is called with.

    Raises:
        ValueError: there are no such arguments or results.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    def is_inexact(x):
        return jnp.issubdtype(jax.dtypes.result_type(x) if not hasattr(x, "dtype") else x.dtype, jnp.inexact)

    leaves, tree = jax.tree.flatten(tuple(args))
    by = [i for i, leaf in enumerate(leaves) if is_inexact(leaf)]
    results = [x for x in jax.tree.leaves(jax.eval_shape(fn, *args)) if is_inexact(x)]
    if not by or not results:
        raise ValueError("no inexact arguments or results")
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=x.shape).astype(np.float32) for x in results]

    def gradient(weights, *args):
        leaves = jax.tree.leaves(args)

        def weighted_sum(inexact):
            given = dict(zip(by, inexact, strict=True))
            results = fn(*jax.tree.unflatten(tree, [given.get(i, leaf) for i, leaf in enumerate(leaves)]))
            total = 0.0
            for weight, x in zip(weights, [x for x in jax.tree.leaves(results) if is_inexact(x)], strict=True):
                # both parts of a complex number, with weights that differ
                parts = (jnp.real(x), 0.5 * jnp.imag(x)) if jnp.iscomplexobj(x) else (x,)
                total += sum(jnp.sum(weight * part) for part in parts)
            return total

        return jax.grad(weighted_sum)([leaves[i] for i in by])

    return gradient, (weights, *args)


def differ_as_with_noise(fn: Callable, args: Sequence, found: Any, expected: Any) -> bool:
    """Whether the plain program, with its arguments off by roundings, is as far from its results as those found."""
    import jax
    import numpy as np
    from equality import ATOL, RTOL, numbers

    jitted = jax.jit(fn)
    noisy = [jax.tree.leaves(jitted(*_with_noise(args, seed))) for seed in range(NOISES)]
    for i, (one, other) in enumerate(zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)):
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        one, other, others = numbers(one), numbers(other), [numbers(leaves[i]) for leaves in noisy]
        if not np.issubdtype(other.dtype, np.inexact):
            changes = np.any([x != other for x in others], axis=0)
            if np.any((one != other) & ~changes):
                return False
            continue
        finite = np.isfinite(one) & np.isfinite(other)
        # where a number is none, or is infinite, noise has to make or unmake one
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        unmade = np.any([np.isfinite(x) != np.isfinite(other) for x in others], axis=0)
        if np.any(~finite & ~same & ~unmade):
            return False
        with np.errstate(all="ignore"):
            changed = [np.abs(x - other)[np.isfinite(x) & np.isfinite(other)] for x in others]
            most = max(np.max(x, initial=0) for x in changed)
            far = np.abs(one - other)[finite] > LENIENCE * most + RTOL * np.abs(other[finite])
            far &= np.abs(one - other)[finite] > ATOL * np.max(np.abs(other[np.isfinite(other)]), initial=0)
        if np.any(far):
            return False
    return True


def _with_noise(args: Sequence, seed: int) -> Sequence:
    """The arguments off by roundings, those of the shortest type among them."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def is_inexact(x):
        return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.inexact)

    rng = np.random.default_rng(seed)
    rounding = max((float(jnp.finfo(x.dtype).eps) for x in jax.tree.leaves(args) if is_inexact(x)), default=0.0)

    def noisy(x):
        if not is_inexact(x):
            return x
        wide = np.asarray(x).astype(np.complex128 if jnp.iscomplexobj(x) else np.float64)
        with np.errstate(all="ignore"):
            return (wide * (1 + NOISE * rounding * rng.normal(size=x.shape))).astype(x.dtype)

    return jax.tree.map(noisy, tuple(args))


def _line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _difference(error: AssertionError) -> str:
    """The figures of a failed comparison; those that are most telling come first."""
    lines = [" ".join(line.split()) for line in str(error).splitlines() if ":" in line]
    return " ".join(sorted(lines, key=lambda line: not line.startswith(("Max", "Mismatched"))))[:300]


# Many tasks, in processes of their own.


def work(mesh_shape: Sequence[int]) -> None:
    """Runs tasks as they come."""
    import jax

    axes = ("x", "y", "z", "w")[: len(mesh_shape)]
    mesh = jax.make_mesh(tuple(mesh_shape), axes, axis_types=(jax.sharding.AxisType.Auto,) * len(axes))
    every, count = programs(), itertools.count(1)

    def answer(task: Sequence[str]) -> dict:
        if next(count) % KEPT_PROGRAMS == 0:
            jax.clear_caches()
        name, part = task
        return asdict(ran(every[name], part, mesh))

    serve(answer)


def chosen_tasks(families: dict[str, str], only: str | None, sample: int | None, seed: int) -> list[Task]:
    """The tasks of so many programs, in an order in which every family has its turn."""
    names = in_turns((name for name in families if only is None or only in name), families, seed)
    return [Task(name, part) for name in names[:sample] for part in PARTS]


def rows_of(
    tasks: Sequence[Task], families: dict[str, str], mesh: Sequence[int] = MESH, x64: bool = False, jobs: int = 1
) -> Iterator[Row]:
    """What became of the tasks, as they end."""
    command = [__file__, "--worker", "--mesh", *map(str, mesh)]
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS, "JAX_ENABLE_X64": str(int(x64))}
    for task, answer in answers(tasks, jobs, lambda: Worker(command, environment, HANGS_AFTER)):
        if isinstance(answer, Ended):
            outcome = "hangs" if answer.late else "crashes"
            yield Row(*task, families[task.name], outcome, answer.detail, split=True)
        else:
            yield Row(**answer)


# The table.


def kind_of(row: Row) -> str:
    """What faults of one kind have in common: the outcome, and the error without its numbers and names."""
    detail = row.detail if row.outcome in ("raises", "crashes") else ""
    return f"{row.outcome} {re.sub(r'[0-9.,]+', '#', detail)[:90]}".strip()


def print_table(rows: Sequence[Row]) -> None:
    columns = ("equal", "ill-conditioned", "refused", *FAULTS)
    print(f"{'family':28} {'part':9} {'tasks':>6} {'split':>6} " + " ".join(f"{column:>15}" for column in columns))
    families = sorted({row.family for row in rows})
    for family, part in [(family, part) for family in [*families, "all"] for part in PARTS]:
        of = [row for row in rows if family in (row.family, "all") and row.part == part]
        counts = collections.Counter(row.outcome for row in of)
        figures = " ".join(f"{counts[column] or '.':>15}" for column in columns)
        print(f"{family:28} {part:9} {len(of):6} {sum(row.split for row in of):6} {figures}")


def print_faults(rows: Sequence[Row]) -> None:
    kinds = collections.defaultdict(list)
    for row in rows:
        if row.outcome in FAULTS:
            kinds[row.known or kind_of(row)].append(row)
    for kind, of in sorted(kinds.items(), key=lambda item: -len(item[1])):
        families = collections.Counter(row.family for row in of)
        print(f"\n{len(of)} x {kind}\n    {', '.join(f'{name} {count}' for name, count in families.most_common())}")
        for row in sorted(of, key=lambda row: len(row.name))[:3]:
            print(f"    {row.name} {row.part}: {row.detail}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="a part of the programs' names")
    parser.add_argument("--sample", type=int, help="how many programs, of every primitive in turn")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--mesh", type=int, nargs="+", default=MESH)
    parser.add_argument("--x64", action="store_true", help="with 64-bit types")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--rows", type=Path, help="a file of results to add to, one line of JSON each")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options.mesh)
        return 0
    os.environ["JAX_ENABLE_X64"] = str(int(options.x64))  # which programs there are depends on it
    os.environ["JAX_PLATFORMS"] = "cpu"
    families = {name: harness.group_name for name, harness in programs().items()}
    tasks = chosen_tasks(families, options.only, options.sample, options.seed)
    kept = options.rows.read_text().splitlines() if options.rows and options.rows.exists() else ()
    found = {Task(row.name, row.part): row for row in (Row(**json.loads(line)) for line in kept)}
    left = [task for task in tasks if task not in found]
    started = time.perf_counter()
    with open(options.rows or os.devnull, "a") as file:
        for count, row in enumerate(rows_of(left, families, options.mesh, options.x64, options.jobs), 1):
            found[Task(row.name, row.part)] = row
            print(json.dumps(asdict(row)), file=file, flush=True)
            if row.outcome in FAULTS and not row.known:
                print(f"{row.name} {row.part} {row.outcome}: {row.detail}", flush=True)
            if count % 100 == 0:
                print(f"{count} of {len(left)}, {count / (time.perf_counter() - started):.2f} a second", flush=True)
    rows = [found[task] for task in tasks]
    print_table(rows)
    print_faults(rows)
    return int(any(row.outcome in FAULTS and not row.known for row in rows))


if __name__ == "__main__":
    sys.exit(main())
