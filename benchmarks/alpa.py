"""Alpa's suites on its V100 machines: the best pipeline beside the stages that Alpa published, priced by one model.

    python benchmarks/alpa.py                       # all suites
    python benchmarks/alpa.py gpt moe resnet        # some of them
    python benchmarks/alpa.py moe --only 2.4B

Sizes, microbatches and stages are those of alpa-projects/alpa: benchmark/alpa/suite_auto_gpt.py, suite_auto_moe.py and
suite_wresnet.py. A Llama of the same sizes stands for its GPT; what its other models are here, `alpa_models.py` says.
Alpa's stages are taken on the same tables as those that are searched. So each is split over its devices as well as the
planner can.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import alpa_models
from jax.sharding import AbstractMesh
from pipelines import BF16, steps_of, told
from workloads import Abstract, Workload

from autoshard import Link, Topology
from autoshard.errors import StageError
from autoshard.model.xla.backends import backend_of
from autoshard.stage_planning.choosing import CuttableSteps, PlanningTarget, search_planned
from autoshard.stage_planning.space import PlannedSpace, SpaceRequest, planned_space
from autoshard.stage_search import ChosenStage, PipelineChoice, SearchSettings, SimulatedChoice, StageTable, simulated

# Alpa's machines: p3.16xlarge, 8 V100 of 16 GB with NVLink (150 GB/s one way each) and 25 Gbit/s of network between
# hosts, which the 8 share (docs.aws.amazon.com/ec2, NVIDIA V100 data sheet).
V100 = {"float32": 15.7e12, "bfloat16": 125e12, "float16": 125e12}
NVLINK, ETHERNET = Link(1.9e-6, 150e9), Link(2e-5, 25e9 / 8 / 8)
USABLE = 0.9  # of the memory (xla_client_mem_fraction in alpa/global_env.py)
SCHEDULES = (("1f1b", 1), ("gpipe", 1))  # Alpa's own is the first


@dataclass(frozen=True)
class Case:
    """One row of a suite."""

    size: str  # parameters
    make: Callable[[], Abstract]
    batch: int
    microbatches: int
    stages: tuple[tuple[int, int], ...]  # Alpa's: parts of the model, which has equally long ones, and devices
    least_rows: int = 2  # of a microbatch: one is a case of its own to JAX

    @property
    def devices(self) -> int:
        return sum(devices for _, devices in self.stages)

    def counts(self) -> list[int]:
        """Numbers of microbatches to choose from: Alpa's, and of the others those that divide the batch."""
        near = {self.microbatches * times // 4 for times in (1, 2, 4, 8, 16)}
        return sorted(one for one in near if one > 1 and self.batch % one == 0 and self.least_rows * one <= self.batch)


def gpt(size: str, microbatches: int, stages: Sequence[tuple[int, int]]) -> Case:
    seq, width, layers, heads, vocab = GPT[size]
    sizes = {"layers": layers, "d_model": width, "heads": heads, "shared_heads": heads, "d_hidden": 8 * width // 3}
    workload = Workload("llama", sizes | BF16 | {"vocab": vocab, "seq": seq, "batch": 1024})
    return Case(size, workload.abstract, 1024, microbatches, tuple(stages))


def mixture(size: str, microbatches: int, stages: Sequence[tuple[int, int]]) -> Case:
    *sizes, experts = MOE[size]
    rows = 2 * alpa_models.GROUP // sizes[0]
    return Case(
        size, lambda: alpa_models.experts_step(tuple(sizes), experts, 1024), 1024, microbatches, tuple(stages), rows
    )


def resnet(size: str, batch: int, microbatches: int, stages: Sequence[tuple[int, int]]) -> Case:
    blocks, width, wider = RESNET[size]
    return Case(
        size,
        lambda: alpa_models.wide_resnet_step(BLOCKS[blocks], width, wider, batch),
        batch,
        microbatches,
        tuple(stages),
    )


# Size -> sequence, width, layers, heads, vocabulary (suite_manual_gpt.py); the same and experts (suite_manual_moe.py);
# layers, channels, width factor (suite_wresnet.py).
GPT = {
    "760M": (1024, 1536, 24, 16, 51200), "1.3B": (1024, 2048, 24, 32, 51200), "2.6B": (1024, 2560, 32, 32, 51200),
    "6.7B": (1024, 4096, 32, 32, 51200), "15B": (1024, 5120, 48, 40, 51200), "39B": (1024, 8192, 48, 64, 51200),
}  # fmt: skip
MOE = {
    "690M": (1024, 768, 8, 16, 32000, 16), "1.3B": (1024, 768, 16, 16, 32000, 16),
    "2.4B": (1024, 1024, 16, 16, 32000, 16), "10B": (1024, 1536, 16, 16, 32000, 32),
    "27B": (1024, 2048, 16, 16, 32000, 48), "70B": (1024, 2048, 32, 16, 32000, 64),
}  # fmt: skip
RESNET = {
    "500M": (50, 224, 2), "1B": (50, 320, 2), "2B": (50, 448, 2), "4B": (50, 640, 2), "6.8B": (50, 320, 16),
    "13B": (101, 320, 16),
}  # fmt: skip
BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # layers -> bottlenecks of each size of image (wide_resnet.py)
# Of each stage, the parts of the model and the devices (suite_auto_gpt.py, suite_auto_moe.py, suite_wresnet.py). Alpa
# ran the largest GPT with one sentence per microbatch; here it has two, since one row is a case of its own to JAX.
SUITES = {
    "gpt": [
        gpt("760M", 128, [(3, 1)] * 2), gpt("1.3B", 128, [(3, 2)] * 2), gpt("2.6B", 128, [(2, 2), (2, 2), (4, 4)]),
        gpt("6.7B", 64, [(4, 8)] * 2), gpt("15B", 128, [(4, 8)] * 4), gpt("39B", 512, [(1, 4)] * 16),
    ],
    "moe": [
        mixture("690M", 32, [(8, 2)]), mixture("1.3B", 32, [(4, 2)] * 2), mixture("2.4B", 32, [(4, 4)] * 2),
        mixture("10B", 16, [(4, 8)] * 2), mixture("27B", 128, [(1, 4)] * 8), mixture("70B", 64, [(1, 8)] * 8),
    ],
    "resnet": [
        resnet("500M", 1536, 24, [(16, 2)]), resnet("1B", 1536, 24, [(16, 4)]), resnet("2B", 1536, 24, [(8, 4)] * 2),
        resnet("4B", 1536, 32, [(5, 4), (4, 4), (7, 8)]), resnet("6.8B", 1536, 32, [(5, 8), (4, 8), (4, 8), (3, 8)]),
        resnet("13B", 1520, 38, [(4, 8)] * 6 + [(5, 8), (4, 8)]),
    ],
}  # fmt: skip


def v100s(devices: int) -> PlanningTarget:
    """So many of Alpa's devices."""
    inside = min(devices, 8)
    axes = {"data": devices // inside, "model": inside}
    links = {"data": ETHERNET, "model": NVLINK}
    costs = Topology({axis: links[axis] for axis, size in axes.items() if size > 1}, 16 * 2.0**30, 900e9, V100)
    backend = replace(backend_of(AbstractMesh((8,), ("model",)), "h100:8"), usable=USABLE)
    return PlanningTarget(axes, costs, backend, costs.memory_bytes)


def first_units(steps: CuttableSteps, count: int) -> list[int]:
    """Where the layers of a model begin among its units, and where its last one ends: layers are trips or blocks."""
    step, found = steps.in_microbatches(count), dict[str, int]()
    units = step.units().units
    for number, unit in enumerate(units):
        scopes = str(step.roles.step.equations[unit.start.equation].source_info.name_stack).split("/")
        blocks = [scope for scope in scopes if "_block" in scope]
        is_trip = " trip " in unit.name
        if blocks or is_trip:
            found.setdefault(unit.name if is_trip else blocks[-1], number)
    return [0, *list(found.values())[1:], len(units)]


def published(case: Case, found: PlannedSpace, begins: Sequence[int]) -> Iterator[SimulatedChoice]:
    """Alpa's stages, with each plan of their sub-meshes that the tables have."""
    layers, parts = len(begins) - 1, sum(one for one, _ in case.stages)
    ends = [round(layers * done / parts) for done in itertools.accumulate(one for one, _ in case.stages)]
    sizes = [devices for _, devices in case.stages]
    by_size: dict[int, list[StageTable]] = {}
    for table in found.space.costs[case.microbatches].tables:
        by_size.setdefault(table.shape.devices, []).append(table)
    places = itertools.accumulate(sizes, initial=0)
    bounds = list(zip(itertools.pairwise([0, *ends]), sizes, places, strict=False))
    for tables in itertools.product(*(by_size[size] for size in dict.fromkeys(sizes))):
        own = {table.shape.devices: table for table in tables}
        stages = tuple(ChosenStage(begins[i], begins[j], own[size], at) for (i, j), size, at in bounds)
        yield simulated(found.space, PipelineChoice("1f1b", 1, case.microbatches, stages))


def compare(suite: str, case: Case) -> None:
    machine, begin = v100s(case.devices), time.process_time()
    steps, counts = steps_of(case.make()), case.counts()
    request = SpaceRequest(
        steps.cut_into_units, machine.mesh_shape, machine.topology, machine.backend, machine.memory, counts,
        sorted({case.microbatches, counts[-1]}), SCHEDULES,
    )  # fmt: skip
    name = f"{suite} {case.size} on {case.devices} V100"
    try:
        found = planned_space(request)
    except StageError as error:
        print(f"{name}: {error}")
        return
    if found is None:
        print(f"{name}: none fits")
        return
    for table in found.space.costs[case.microbatches].tables:
        more = found.with_planned(case.microbatches, [(table.shape.name, table.variant)])
        found = found if more is None else more
    found, result = search_planned(found, SearchSettings())
    print(f"{name}, {time.process_time() - begin:.0f} CPU-s, {found.space.layers} units, gap {result.gap:.1%}")
    print(told("chosen", result.best))
    own = list(published(case, found, first_units(steps, case.microbatches)))
    fitting = [one for one in own if one.fits]
    best = min(fitting or own, key=lambda one: one.seconds)
    print(told(f"Alpa's {len(case.stages)} stages", best) + ("" if fitting else "  (does not fit)"), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", default=[], help=f"of {', '.join(SUITES)}; by default all")
    parser.add_argument("--only", nargs="*", default=[], help="sizes")
    given = parser.parse_args()
    for suite in given.suites or SUITES:
        for case in SUITES[suite]:
            if not given.only or case.size in given.only:
                compare(suite, case)


if __name__ == "__main__":
    main()
