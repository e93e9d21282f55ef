"""Every strategy of every operation of the example programs and their gradients, run on eight devices against one.

    python benchmarks/strategies.py                          # (8,), (4, 2) and (2, 2, 2), all strategies: hours
    python benchmarks/strategies.py --most 8 --mesh 4 2      # eight strategies an operation at most, on one mesh
    python benchmarks/strategies.py --only conv --jobs 2

The programs are those of `tests/cases.py`, at least one for every primitive that JAX lowers. Each operation is taken
with the operands that it has on one device, and all its strategies are run with links of all meshes, idle axes
included. Programs run in processes of their own: one that ends its process is counted, and named. The exit status is 1
if there is a difference; what XLA gets wrong is in `docs/xla_faults.md`, and no strategy may fall for it.
"""

import argparse
import itertools
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from workers import Ended, Worker, answers, serve  # noqa: E402  (needs the path above)

MESHES = ((8,), (4, 2), (2, 2, 2))
SECONDS = 1800  # for one program
KEPT_PROGRAMS = 40  # compiled, before JAX forgets them


def work() -> None:
    """Runs programs as they come: their strategies and what was found of each operation."""
    import conftest  # noqa: F401  (eight devices)
    import jax
    from cases import CASES
    from executed import gradient_of, mismatches, operations_of
    from oracles import mesh_of

    every, seen, count = {case.name: case for case in CASES}, set(), itertools.count(1)

    def answer(task: Sequence) -> dict:
        name, part, sizes, most = task
        if next(count) % KEPT_PROGRAMS == 0:
            jax.clear_caches()
        case = every[name] if part == "values" else gradient_of(every[name])
        tallies: Counter = Counter()
        faults = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                operations = {} if case is None else operations_of(case)
            except Exception as error:  # some operations run as part of a compiled program only
                return {"operations": 0, "strategies": 0, "faults": [], "refused": f"{name}: {error}"}
            mesh = mesh_of(dict(zip("xyz", sizes, strict=False)))
            for text, operation in operations.items():
                if (text, tuple(sizes)) in seen or operation.known:
                    continue
                seen.add((text, tuple(sizes)))
                tallies["operations"] += 1
                for strategy, difference in mismatches(operation, mesh, sample(most)):
                    tallies["strategies"] += 1
                    if difference:
                        faults.append(f"{text[:200]} as {strategy}: {difference}")
        return {"operations": tallies["operations"], "strategies": tallies["strategies"], "faults": faults}

    serve(answer)


def sample(most: int | None) -> Callable[[list], list]:
    """Takes so many of a list at most, the same each time."""
    return lambda found: found if most is None or len(found) <= most else random.Random(0).sample(found, most)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the programs' names")
    parser.add_argument("--mesh", type=int, nargs="+", help="one mesh")
    parser.add_argument("--most", type=int, help="strategies of one operation, drawn at random if there are more")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    import conftest  # noqa: F401
    from cases import CASES

    names = [case.name for case in CASES if options.only in case.name]
    faults, started = 0, time.perf_counter()
    print(f"{'mesh':>10} {'programs':>9} {'operations':>11} {'strategies':>11} {'wrong':>6} {'seconds':>8}", flush=True)
    for mesh in [options.mesh] if options.mesh else MESHES:
        tasks = [(name, part, mesh, options.most) for name in names for part in ("values", "gradient")]
        tallies: Counter = Counter()
        worker = [__file__, "--worker"]
        for task, said in answers(tasks, options.jobs, lambda: Worker(worker, {}, SECONDS)):  # noqa: B023
            if isinstance(said, Ended):
                said = {"faults": [f"the process ended: {said.detail}"]}
            for fault in said["faults"]:
                print(f"{task[0]}, {task[1]}: {fault}", flush=True)
            tallies.update(
                programs=bool(said.get("operations")),
                operations=said.get("operations", 0),
                strategies=said.get("strategies", 0),
                wrong=len(said["faults"]),
            )
        faults += tallies["wrong"]
        figures = [tallies[name] for name in ("programs", "operations", "strategies", "wrong")]
        seconds = time.perf_counter() - started
        widths = zip(figures, (9, 11, 11, 6), strict=True)
        row = " ".join(f"{figure:>{width}}" for figure, width in widths)
        print(f"{'x'.join(map(str, mesh)):>10} {row} {seconds:>8.0f}", flush=True)
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
