"""The solver on instances of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism.

    python benchmarks/solver.py asplos-2025-iopddl-*.json.gz --time-limit 60

The files are on https://github.com/google/iopddl. Prints a table: nodes before and after `simplify`, its seconds, cost,
bound, gap, and the seconds of `solve`, which simplifies too.
"""

import argparse
import time

from autoshard.errors import AutoshardError
from autoshard.solver import Problem, solve
from autoshard.solver.simplify import simplify


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each")
    options = parser.parse_args()
    width = max(map(len, options.files)) + 1
    print(f"{'file':<{width}}{'nodes':>8}{'left':>8}{'seconds':>9}{'cost':>14}{'bound':>14}{'gap':>9}{'seconds':>9}")
    for file in options.files:
        problem = Problem.read(file)
        start = time.perf_counter()
        left = sum(len(part.costs) for part in simplify(problem).parts)
        simplified = time.perf_counter() - start
        start = time.perf_counter()
        try:
            solution = solve(problem, time_limit=options.time_limit)
            result = f"{solution.cost:>14.6g}{solution.bound:>14.6g}{solution.gap:>9.1e}"
        except AutoshardError as error:
            result = f"{error!s:>37.37}"
        solved = time.perf_counter() - start
        print(f"{file:<{width}}{len(problem.costs):>8}{left:>8}{simplified:>9.1f}{result}{solved:>9.1f}", flush=True)


if __name__ == "__main__":
    main()
