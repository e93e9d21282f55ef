"""How long planning takes, per stage: an unrolled GPT with AdamW on meshes of eight v5e chips.

    python benchmarks/planning.py                                  # everything, a few minutes on two cores
    python benchmarks/planning.py --layers 2 --mesh 4x2 --share 0.25

Prints a table: seconds to trace, to find rules, to formulate and to solve; nodes and options of the problem; cost, and
how far it may be from the best. Each under a memory limit that forces nothing and a tight one: `share` is the limit as
a share of what the step holds where nothing is split.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from models import MODELS  # noqa: E402  (needs the path above)
from oracles import v5e  # noqa: E402

from autoshard.errors import AutoshardError  # noqa: E402
from autoshard.program import trace  # noqa: E402
from autoshard.propagation import rules_for  # noqa: E402
from autoshard.solver.formulate import formulate  # noqa: E402
from autoshard.solver.within import solve_within  # noqa: E402

COLUMNS = (
    ("layers", 6), ("mesh", 6), ("share", 6), ("equations", 10), ("nodes", 6), ("options", 8), ("trace", 6),
    ("rules", 6), ("formulate", 10), ("solve", 7), ("cost", 11), ("gap", 9), ("status", 11),
)  # fmt: skip


def print_row(*cells: object) -> None:
    print("".join(f"{cell!s:>{width}}" for cell, (_, width) in zip(cells, COLUMNS, strict=True)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 12])
    parser.add_argument("--mesh", nargs="+", default=["8", "4x2", "2x2x2"])
    parser.add_argument("--share", type=float, nargs="+", default=[2.0, 0.25])
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each solve")
    options = parser.parse_args()
    print_row(*(name for name, _ in COLUMNS))
    for layers, mesh_name in itertools.product(options.layers, options.mesh):
        mesh = dict(zip("xyz", map(int, mesh_name.split("x")), strict=False))
        model = MODELS["gpt"](layers=layers)
        times = [time.perf_counter()]
        program = trace(model.step, (model.state, model.batches(0)), {}, donate_argnums=0)
        times.append(time.perf_counter())
        rules = rules_for(program)
        times.append(time.perf_counter())
        traced, ruled = (f"{later - sooner:.1f}" for sooner, later in itertools.pairwise(times))
        whole = formulate(program, rules, mesh, v5e(mesh))
        most = whole.peak_bytes([0] * len(whole.problem.costs))
        for share in options.share:
            start = time.perf_counter()
            formulation = formulate(program, rules, mesh, v5e(mesh), memory=share * most)
            problem = formulation.problem
            formulated = time.perf_counter() - start
            start = time.perf_counter()
            try:
                solution = solve_within(formulation, options.time_limit)
                cost, gap, status = f"{solution.cost:.3e}", f"{solution.gap:.1e}", solution.status
            except AutoshardError as error:
                cost, gap, status = "-", "-", type(error).__name__
            solved = time.perf_counter() - start
            print_row(
                layers, mesh_name, share, len(program.equations), len(problem.costs), sum(map(len, problem.costs)),
                traced, ruled, f"{formulated:.1f}", f"{solved:.1f}", cost, gap, status,
            )  # fmt: skip


if __name__ == "__main__":
    main()
