"""What the NumPy version of the solver and the compiled one take for the same work: why there are two.

    python benchmarks/solver_versions.py        # prints one line per problem, after what loading takes; a minute

The problems are those of `benchmarks/instances/` that memory leaves large, and one of the size of the contest's. All
figures are CPU seconds in this process. Code that has never run on a machine is compiled first.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from problems import large_problem  # noqa: E402

from autoshard.solver import Problem  # noqa: E402
from autoshard.solver.bounds.message_passing import Relaxation  # noqa: E402
from autoshard.solver.presolve.simplify import simplify  # noqa: E402

FOLDER = Path(__file__).parent / "instances"
INSTANCES = ("gpt-tpu", "resnet-tpu-tight", "moe-slices-tight")
SWEEPS = 10


def main() -> None:
    seconds, _ = timed(load)
    print(f"compiled code: {seconds:.1f} s to load")
    for name in INSTANCES:
        print(line(name, Problem.read(FOLDER / f"{name}.json.gz")), flush=True)
    print(line("contest", large_problem()), flush=True)


def load() -> None:
    from autoshard.solver.local_search import large_search

    large_search.warm_up()


def line(name: str, problem: Problem) -> str:
    """Presolve of a problem, and one sweep over its largest part, in both versions."""
    from autoshard.solver.arrays import graph_of, memory_of
    from autoshard.solver.bounds.ascent import Ascent
    from autoshard.solver.presolve.simplify_large import reduce

    plain, small = timed(lambda: simplify(problem))
    compiled, _ = timed(lambda: simplify(problem, reduce=reduce))
    part = max(small.parts, key=lambda part: sum(map(len, part.costs)))
    building, relaxation = timed(lambda: Relaxation(part))
    ascent = Ascent(graph_of(part), memory_of(part))
    sweep, _ = timed(lambda: [relaxation.sweep(forward=k % 2 == 0, choose=False) for k in range(SWEEPS)])
    compiled_sweep, _ = timed(lambda: [ascent.sweep() for _ in range(SWEEPS // 2)])  # each is two
    return (
        f"{name}, {sum(map(len, problem.costs))} options: presolve {plain:.2f} s, compiled {compiled:.2f} s; "
        f"{sum(map(len, part.costs))} left: relaxation {building:.2f} s to build, "
        f"{sweep / SWEEPS * 1e3:.2f} ms a sweep, compiled {compiled_sweep / SWEEPS * 1e3:.2f} ms"
    )


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


if __name__ == "__main__":
    main()
