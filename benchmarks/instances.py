"""The planner's own problems as contest files, so that other solvers can be tried on them, and this one at any commit.

    python benchmarks/instances.py                        # all: writes benchmarks/instances/, some minutes
    python benchmarks/instances.py --models gpt moe       # a part of the files, and no page

Each is what `plan` solves for a train step of `workloads.py` on a machine: free, in the memory that it has, and tight,
in a share of what lies between the least that a choice holds and what the cheapest holds. Costs are picoseconds and
usages bytes, both as whole numbers, since other readers of such files take nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

jax.config.update("jax_platforms", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from workloads import LARGE  # noqa: E402  (needs the path above)

from autoshard import topology  # noqa: E402
from autoshard.model.formulating import formulate  # noqa: E402
from autoshard.model.xla.backends import CPU, H100, V5E, Backend  # noqa: E402
from autoshard.program import Program, trace  # noqa: E402
from autoshard.propagation import rules_for  # noqa: E402
from autoshard.solver import Problem, Solution, solve  # noqa: E402
from autoshard.solver.problem import InfeasibleError  # noqa: E402
from autoshard.solver.verify import verify  # noqa: E402

FOLDER = Path(__file__).parent / "instances"
PICOSECONDS = 1e12  # per second


class Machine(NamedTuple):
    name: str  # as for `topology`
    axes: dict[str, int]
    backend: Backend


MACHINES = {
    "tpu": Machine("v5e:4x4", {"data": 4, "model": 4}, V5E),
    "gpu": Machine("h100:2x8", {"data": 2, "model": 8}, H100),
    "slices": Machine("2x v5e:4x4", {"slice": 2, "data": 4, "model": 4}, V5E),
}
FREE, TIGHT = None, 0.1  # limits: what the machine has, or a share of the way from the least to what the cheapest holds
INSTANCES = [  # model, machine, limits; few of three axes, which make files of megabytes
    ("gpt", "tpu", (FREE,)),  # here, with U-Net and LSTM the cheapest choice is about the leanest
    ("gpt scan remat", "gpu", (FREE, TIGHT)),
    ("moe", "tpu", (FREE, TIGHT)),
    ("moe", "slices", (TIGHT,)),
    ("vit", "gpu", (FREE, TIGHT)),
    ("resnet", "tpu", (FREE, TIGHT)),
    ("unet", "gpu", (FREE,)),
    ("lstm", "tpu", (FREE,)),
]
HEAD = """# Sharding problems of train steps

Files in the format of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism
(https://github.com/asplos-contest/2025/blob/main/IOPDDL.md), written by `benchmarks/instances.py` from the train steps
of `benchmarks/workloads.py`. A cost is picoseconds per step on one device, a usage bytes on one device. `tight`: the
limit lies {tight:.0%} of the way from the least that any choice holds to what the cheapest holds. The last nodes of a
file, which cost nothing, stand for further lives of others, with which they share the option.

    python -m autoshard.solver benchmarks/instances/*.json.gz --time-limit 60

Best known cost and proven bound, by this solver in {seconds:.0f} s each:

| file | step | machine | nodes | options | edges | limit, bytes | cost | bound |
|---|---|---|--:|--:|--:|--:|--:|--:|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", help="some of the models; the page is left as it is then")
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for each solve")
    chosen = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    rows = []
    for model, target, limits in INSTANCES:
        if chosen.models and model not in chosen.models:
            continue
        problems = list(problems_of(model, target, chosen.time_limit))
        for limit, (name, problem) in zip((FREE, TIGHT), problems, strict=False):
            if limit in limits:
                problem.write(FOLDER / name)
                solution = solve(problem, time_limit=chosen.time_limit)
                rows.append(row_of(name, model, target, Problem.read(FOLDER / name), solution))
                print(rows[-1], flush=True)
    if not chosen.models:
        page = HEAD.format(tight=TIGHT, seconds=chosen.time_limit) + "\n".join(rows) + "\n"
        (FOLDER / "README.md").write_text(page)


def problems_of(model: str, target: str, time_limit: float) -> Iterator[tuple[str, Problem]]:
    """Name of a file, and the problem for it: the free one, and the tight one if memory can be."""
    machine = MACHINES[target]
    step, state, batch = LARGE[model].abstract()
    program = trace(step, (state, batch), {}, donate_argnums=0)
    stem = f"{model.replace(' ', '-')}-{target}"
    memory = topology(machine.name, machine.axes).memory_bytes
    free = problem_of(program, machine, memory)
    yield f"{stem}.json.gz", free
    unlimited = replace(free, limit=None)
    cheapest = verify(unlimited, solve(unlimited, time_limit=time_limit).choice)[1]
    try:
        solve(replace(free, limit=0), time_limit=time_limit)
    except InfeasibleError as error:
        if error.needed >= cheapest:  # the cheapest is the leanest too
            return
        limit = error.needed + TIGHT * (cheapest - error.needed)
        yield f"{stem}-tight.json.gz", problem_of(program, machine, limit / CPU.usable)


def problem_of(program: Program, machine: Machine, memory: float) -> Problem:
    """What `plan` solves first, in whole numbers."""
    formulation = formulate(
        program,
        rules_for(program),
        machine.axes,
        topology(machine.name, machine.axes),
        memory=memory,
        backend=machine.backend,
    )
    problem = formulation.problem
    return replace(
        problem,
        costs=tuple(np.round(costs * PICOSECONDS) for costs in problem.costs),
        edges=tuple(replace(edge, costs=np.round(edge.costs * PICOSECONDS)) for edge in problem.edges),
        lives=tuple(replace(live, usage=np.ceil(live.usage).astype(np.int64)) for live in problem.lives),
        limit=int(memory * CPU.usable),
    )


def row_of(name: str, model: str, target: str, problem: Problem, solution: Solution) -> str:
    machine, options = MACHINES[target], sum(map(len, problem.costs))
    mesh = " x ".join(f"{axis} {size}" for axis, size in machine.axes.items())
    sizes = f"{len(problem.costs)} | {options} | {len(problem.edges)} | {problem.limit}"
    bound = "the same" if solution.status == "optimal" else f"{solution.bound:.0f}"
    return f"| {name} | {model} | {machine.name}, {mesh} | {sizes} | {solution.cost:.0f} | {bound} |"


if __name__ == "__main__":
    main()
