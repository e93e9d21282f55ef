"""The mesh that mesh="auto" chooses, beside all meshes planned one by one, and the first two as they compile.

    python benchmarks/meshes.py --machines v5e:4x4 --models gpt "gpt scan"  # a part
    python benchmarks/meshes.py --no-compile  # without compiling the first two

It prints a row for each program. A row says "best" if no mesh that is planned alone is faster than the chosen one. It
says "agree" if the compiled programs of the first two meshes come in the order of the ranking, or within CLOSE.
Compiling needs the extras tpu and cuda, but no hardware.
"""

import argparse
import time
from typing import Any

import jax
from plans import MODELS, for_devices
from workloads import PLANNED

from autoshard import AutoshardError, Plan, plan, topology
from autoshard.compiled.verification import compiled
from autoshard.mesh.targets import target_mesh
from autoshard.meshes.places import DevicePlace

MACHINES = ("v5e:4x4", "v5e:16x16", "v5p:4x4x4", "h100:2x8")
CLOSE = 0.03  # share of a step by which two programs may differ and count as equally fast


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS | PLANNED))
    parser.add_argument("--no-compile", action="store_true")
    chosen = parser.parse_args()
    print("machine | model | chosen | ms | CPU s | meshes | of all planned alone | first two, compiled ms | ")
    print(" | ".join(["---"] * 9))
    for machine in chosen.machines:
        for model in chosen.models:
            print(row(machine, model, compiles=not chosen.no_compile), flush=True)


def row(machine: str, model: str, *, compiles: bool) -> str:
    """What is chosen for one program, and how that compares."""
    place = DevicePlace.of(machine)
    work = for_devices((MODELS | PLANNED)[model], place.dims.devices).abstract()
    start = time.process_time()
    found = plan(*work, mesh="auto", topology=machine, donate_argnums=0)
    took = time.process_time() - start
    alone = {tuple(mesh.shape.items()): seconds_alone(work, mesh, machine) for mesh in place.meshes([])}
    fastest = min(alone.values())
    best = "best" if found.predicted.step_seconds <= fastest * (1 + 1e-6) else f"{fastest * 1e3:.4g} ms is faster"
    cells = [
        text(found.meshes[0][0]),
        f"{found.predicted.step_seconds * 1e3:.4g}",
        f"{took:.1f}",
        str(len(alone)),
        best,
    ]
    cells += compiled_in_order(work, machine, found) if compiles and len(found.meshes) > 1 else ["", ""]
    return " | ".join([machine, model, *cells])


def seconds_alone(work: Any, mesh: Any, machine: str) -> float:
    """Of the plan on one mesh; inf if there is none."""
    try:
        return plan(*work, mesh=mesh, topology=machine, donate_argnums=0).predicted.step_seconds
    except AutoshardError:
        return float("inf")


def compiled_in_order(work: Any, machine: str, found: Plan) -> list[str]:
    """Milliseconds of the compiled programs on the first two meshes, and whether they come in this order."""
    seconds = [compiled_seconds(work, machine, shape) for shape, *_ in found.meshes[:2]]
    agrees = seconds[0] <= seconds[1] * (1 + CLOSE)
    return [", ".join(f"{one * 1e3:.4g}" for one in seconds), "agree" if agrees else "do not agree"]


def compiled_seconds(work: Any, machine: str, shape: dict[str, int]) -> float:
    """Seconds of a step by the schedule of its compiled program; inf if it does not compile for that memory."""
    mesh = target_mesh(machine, shape)
    made = plan(*work, mesh=mesh, topology=machine, donate_argnums=0)
    try:
        program = compiled(made.lowering(mesh), mesh, topology(machine, shape))
    except jax.errors.JaxRuntimeError:
        return float("inf")
    assert program.schedule is not None, "TPU and GPU programs have one"
    return program.schedule.step_seconds


def text(shape: dict[str, int]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in shape.items())


if __name__ == "__main__":
    main()
