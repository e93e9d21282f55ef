"""How long planning takes, in CPU seconds from the call to the Plan, tracing included, and where they go.

    python benchmarks/planning.py                       # the table: models at the sizes that they are trained at
    python benchmarks/planning.py --rows scan           # those with this word in their name
    python benchmarks/planning.py --layers 2 4 8 16 32  # a Llama-3-8B of that many unrolled layers

Nothing is allocated. Each row is planned in a process of its own, for a TPU by name, under that machine's memory limit.
Printed are equations of the step, nodes and options of the problem, CPU seconds in all and of each stage (what is left
is checking and printing), the predicted seconds per step, and how far they may be from the best.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

ROWS = {  # name -> workload, mesh, machine
    "llama 8b unrolled, (8, 8)": ("llama 8b", (8, 8), "v5e:8x8"),
    "llama 8b scan, (8, 8)": ("llama 8b scan", (8, 8), "v5e:8x8"),
    "llama 8b unrolled, (4, 4, 4)": ("llama 8b", (4, 4, 4), "v5p:4x4x4"),
    "gpt-3 unrolled, (16, 16)": ("gpt-3", (16, 16), "v6e:16x16"),
    "resnet-50, (8, 8)": ("resnet-50", (8, 8), "v5e:8x8"),
}
STAGES = {"trace": "trace", "_rules": "rules", "_formulated": "formulate", "solve_within": "solve", "make_plan": "plan"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="a part of the names of rows")
    parser.add_argument("--layers", type=int, nargs="*", default=[], help="instead of the table")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a row, and layers or 0
    options = parser.parse_args()
    if options.one:
        print(measured(options.one[0], int(options.one[1])))
        return
    first, *_ = ROWS
    runs = [(first, layers) for layers in options.layers] or [(name, 0) for name in ROWS if options.rows in name]
    stages = " | ".join(STAGES.values())
    print(f"step | layers | equations | nodes | options | CPU s | {stages} | step s | gap | status")
    print("--- | " * (9 + len(STAGES)) + "---", flush=True)
    for name, layers in runs:
        command = [sys.executable, __file__, "--one", name, str(layers)]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1], flush=True)


def measured(name: str, layers: int) -> str:
    """A line of the table."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from jax.sharding import AbstractMesh, AxisType
    from workloads import PLANNED, Workload

    from autoshard import api, autoshard

    workload, mesh, machine = ROWS[name]
    work = PLANNED[workload]
    if layers:
        work = Workload(work.family, {**work.sizes, "layers": layers})
    step, state, batch = work.abstract()
    devices = AbstractMesh(mesh, tuple("xyz"[: len(mesh)]), axis_types=(AxisType.Auto,) * len(mesh))
    taken, formulations = {}, []
    for function in STAGES:
        setattr(api, function, timed(getattr(api, function), function, taken, formulations))
    decorated = autoshard(step, mesh=devices, topology=machine, donate_argnums=0)
    start = time.process_time()
    plan = decorated.plan(state, batch)
    total = time.process_time() - start
    problem = formulations[0].problem
    nodes, choices = len(problem.costs), sum(map(len, problem.costs))
    stages = " | ".join(f"{taken[function]:.2f}" for function in STAGES)
    head = f"{name} | {work.sizes.get('layers', '-')} | {len(formulations[0].program.equations)} | {nodes} | {choices}"
    return f"{head} | {total:.2f} | {stages} | {plan.predicted.step_seconds:.6g} | {plan.gap:.2%} | {plan.status}"


def timed(fn, name: str, taken: dict, formulations: list):
    """`fn`, with the CPU seconds that it takes noted; what is formulated is kept."""

    def run(*args, **kwargs):
        start = time.process_time()
        result = fn(*args, **kwargs)
        taken[name] = taken.get(name, 0.0) + time.process_time() - start
        if name == "_formulated":
            formulations.append(result)
        return result

    return run


if __name__ == "__main__":
    main()
