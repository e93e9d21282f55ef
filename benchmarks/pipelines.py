"""Pipelines against published ones, all priced by one model: what is chosen, how long it takes, how far from the best.

    python benchmarks/pipelines.py large            # Llama 3 70B and GPT-3 on hosts of H100 and slices of v5e
    python benchmarks/pipelines.py memory           # predicted bytes of stages beside those of compiled ones, on v5e
    python benchmarks/pipelines.py large --only "llama 70b, h100:16x8"

`large` prices Megatron's recipe (arXiv:2104.04473) by the same model: tensor parallelism inside a host, 1F1B or
interleaved 1F1B across hosts, in the best number of stages, chunks and microbatches. `alpa.py` has the suites of Alpa.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh
from shardings import megatron
from workloads import Abstract, Workload

from autoshard import plan, topology
from autoshard.layout import Layout, layout_of
from autoshard.model.xla.backends import backend_of
from autoshard.program.tracing import traced_step
from autoshard.propagation.registry import has_rule
from autoshard.stage_planning.choosing import ChosenPipeline, CuttableSteps, PlanningTarget, choose_pipeline
from autoshard.stage_planning.planned_stage import stage_memory
from autoshard.stage_planning.space import CHUNKS
from autoshard.stage_planning.sub_meshes import sub_mesh_shapes
from autoshard.stage_search import SimulatedChoice

LLAMA_70B = {"layers": 80, "d_model": 8192, "heads": 64, "shared_heads": 8, "d_hidden": 28672, "vocab": 128256}
GPT_3 = {"layers": 96, "d_model": 12288, "heads": 96, "shared_heads": 96, "d_hidden": 32768, "vocab": 51200}
BF16 = {"dtype": jnp.bfloat16, "scan": True}
MEGATRON_SCHEDULES = (("1f1b", 1), *(("interleaved_1f1b", chunks) for chunks in CHUNKS))


@dataclass(frozen=True)
class Setting:
    """A model and a machine that it is trained on."""

    workload: Workload
    machine: str
    axes: Mapping[str, int]  # the innermost is that of Megatron's tensor parallelism
    counts: Sequence[int]  # numbers of microbatches to choose from


LARGE = {
    "llama 70b, h100:16x8": Setting(
        Workload("llama", LLAMA_70B | BF16 | {"seq": 4096, "batch": 256}),
        "h100:16x8", {"data": 16, "model": 8}, (16, 32, 64, 128),
    ),
    "llama 70b, 2x v5e:16x16": Setting(
        Workload("llama", LLAMA_70B | BF16 | {"seq": 4096, "batch": 512}),
        "2x v5e:16x16", {"slices": 2, "data": 16, "model": 16}, (2, 4, 8, 16, 32),
    ),
    "gpt-3 size, h100:8x8": Setting(
        Workload("llama", GPT_3 | BF16 | {"seq": 2048, "batch": 256}),
        "h100:8x8", {"data": 8, "model": 8}, (16, 32, 64, 128),
    ),
}  # fmt: skip


def steps_of(made: Abstract, fixed: Mapping[str, Layout] | None = None) -> CuttableSteps:
    """A train step, traced for shapes alone."""
    traced = traced_step(made.step, (made.state, made.batch), {}, has_rule=has_rule, donate_argnums=0)
    program = traced.program()
    by_index = {i: fixed[value.name] for i, value in enumerate(program.own_arguments) if value.name in (fixed or {})}
    return CuttableSteps(traced, program, jax.sharding.get_abstract_mesh(), by_index)


def machine_of(name: str, axes: Mapping[str, int]) -> PlanningTarget:
    """A machine by name."""
    costs = topology(name, axes)
    backend = backend_of(AbstractMesh(tuple(axes.values()), tuple(axes)), name)
    return PlanningTarget(axes, costs, backend, costs.memory_bytes)


def megatron_layouts(workload: Workload, axes: Mapping[str, int]) -> dict[str, Layout]:
    """How Megatron lays out the state: path -> layout."""
    made = workload.abstract()
    (state, _) = megatron(workload.family, made.state, made.batch, dict(axes))
    leaves = jax.tree_util.tree_leaves_with_path(made.state)
    specs = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, jax.sharding.PartitionSpec))
    names = [f"state/{jax.tree_util.keystr(path, simple=True, separator='/')}" for path, _ in leaves]
    return {name: layout_of(spec, len(leaf.shape)) for name, spec, (_, leaf) in zip(names, specs, leaves, strict=True)}


def told(name: str, found: SimulatedChoice | None) -> str:
    """One line of figures."""
    if found is None:
        return f"  {name:24} none fits"
    choice = found.choice
    shapes = "+".join(dict.fromkeys(stage.table.shape.name + stage.table.variant for stage in choice.stages))
    share = found.timeline.bubble / found.timeline.makespan
    return (
        f"  {name:24} {found.seconds * 1e3:10.1f} ms  {choice.devices:3} stages of {shapes:12} {choice.schedule:16} "
        f"chunks {choice.chunks}  M {choice.microbatches:4}  bubble {share:6.1%}  "
        f"peak {max(found.peak_bytes) / 2**30:5.1f} GiB"
    )


def large(only: Sequence[str]) -> None:
    """Chosen pipelines beside Megatron's recipe."""
    for name in only or LARGE:
        setting = LARGE[name]
        machine = machine_of(setting.machine, setting.axes)
        begin = time.process_time()
        chosen = choose_pipeline(steps_of(setting.workload.abstract()), machine, counts=setting.counts)
        spent = time.process_time() - begin
        print(f"{name}: planned in {spent:.0f} CPU-s", flush=True)
        if chosen is None:
            print("  none fits")
            continue
        print(told("chosen, by tables", chosen.search.best))
        print(told("chosen, planned exactly", chosen.pipeline.simulated))
        gap = f"gap {chosen.search.gap:.1%}"
        print(f"  no choice is below {chosen.search.bound * 1e3:.1f} ms by the tables: {gap}", flush=True)
        print(told("Megatron's recipe", _simulated(recipe(setting, machine))), flush=True)


def _simulated(chosen: ChosenPipeline | None) -> SimulatedChoice | None:
    return None if chosen is None else chosen.pipeline.simulated


def recipe(setting: Setting, machine: PlanningTarget) -> ChosenPipeline | None:
    """Megatron's recipe in its best numbers: a stage has whole hosts, and splits layers over the innermost axis."""
    layouts = megatron_layouts(setting.workload, setting.axes)
    memory = machine.memory * machine.backend.usable
    inner = list(setting.axes.values())[-1]
    shapes = [
        shape
        for shape in sub_mesh_shapes(machine.mesh_shape, machine.topology, memory)
        if shape.in_row.devices % inner == 0
    ]
    return choose_pipeline(
        steps_of(setting.workload.abstract(), layouts),
        machine,
        counts=setting.counts,
        schedules=MEGATRON_SCHEDULES,
        shapes=shapes,
    )


# Two layers per stage and few words, so that each program is compiled for TPU in seconds. Microbatches are so large
# that what programs work in is more than the 128 MiB of on-chip memory, which XLA would put all of it into.
SMALL = {"layers": 4, "d_model": 1024, "heads": 8, "vocab": 1024, "seq": 512, "batch": 512, "remat": True} | {
    "dtype": jnp.bfloat16
}
MEMORY = {
    "gpt": Workload("gpt", SMALL),
    "gpt scan": Workload("gpt", SMALL | {"scan": True}),
    "llama": Workload("llama", SMALL | {"shared_heads": 4, "d_hidden": 2816}),
    "llama scan": Workload("llama", SMALL | {"scan": True, "shared_heads": 4, "d_hidden": 2816}),
}


def memory(only: Sequence[str]) -> None:
    """Bytes per device of each stage: by the plan, and with the peaks of its programs as libtpu compiles them."""
    for name in only or MEMORY:
        made, mesh = MEMORY[name].abstract(), AbstractMesh((2, 4), ("data", "model"))
        asked = {"stages": 2, "microbatches": 4}
        how = {"mesh": mesh, "topology": "v5e:2x4", "pipeline": asked, "donate_argnums": 0}
        found = plan(made.step, made.state, made.batch, **how)
        pipeline, compiled = found.pipeline, found.verify(target="v5e:2x4").programs
        peaks = [compiled[one.name].actual_peak for one in pipeline.programs.programs]
        plans = [
            replace(one, predicted=replace(one.predicted, peak_bytes=peak))
            for one, peak in zip(pipeline.plans, peaks, strict=True)
        ]
        for number, stage in enumerate(found.stages):
            parts = stage_memory(pipeline.programs, plans, number)
            held = parts.fixed + stage.in_flight * parts.microbatch + parts.working
            print(
                f"{name}, stage {number}: {stage.peak_bytes / 2**20:.0f} MiB predicted, {held / 2**20:.0f} MiB "
                f"compiled, {stage.peak_bytes / held - 1:+.1%}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["large", "memory"])
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    {"large": large, "memory": memory}[given.what](given.only)


if __name__ == "__main__":
    main()
