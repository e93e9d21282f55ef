"""1F1B and GPipe for what is no plain chain: a graph of stages, slices of sequences, savings kept by other devices.

GraphPipe (Jeon et al., arXiv:2406.17145), TeraPipe (Li et al., arXiv:2102.07988), Seq1F1B (Sun et al.,
arXiv:2406.03488), BPipe (Kim et al., ICML 2023).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.pipeline.catalogue.one_direction import alternate, one_forward_one_backward
from autoshard.pipeline.orders import Eviction, Schedule, Task, chain, tasks


def graph(microbatches: int, predecessors: Sequence[Sequence[int]]) -> Schedule:
    """1F1B on a graph of stages, one per device. A stage warms up with one forward task per stage still ahead of it.

    What lies ahead is counted along the longest path to a last stage. So branches run side by side, and have fewer
    microbatches in flight than the same stages in a row.
    """
    ahead = [0] * len(predecessors)
    for stage in reversed(range(len(predecessors))):
        for earlier in predecessors[stage]:
            ahead[earlier] = max(ahead[earlier], ahead[stage] + 1)
    every = range(microbatches)
    orders = tuple(
        alternate(tasks("F", every, stage), tasks("B", every, stage), warmup) for stage, warmup in enumerate(ahead)
    )
    return Schedule("graph", microbatches, orders, tuple(range(len(orders))), tuple(map(tuple, predecessors)))


def sliced(name: str, stages: int, microbatches: int, slices: int, *, interleave: bool) -> Schedule:
    """GPipe, or 1F1B if `interleave`, on slices of the sequence. Backward tasks take slices from the last to the first.

    A device can begin to go back when the last slice of the first microbatch has gone forward, so 1F1B warms up with
    the other slices in addition.
    """
    units = range(microbatches * slices)
    back = tuple(first + i for first in range(0, len(units), slices) for i in reversed(range(slices)))
    orders = []
    for stage in range(stages):
        warmup = stages - stage - 2 + slices if interleave else len(units)
        orders.append(alternate(tasks("F", units, stage), tasks("B", back, stage), warmup))
    return Schedule(name, microbatches, tuple(orders), tuple(range(stages)), chain(stages), slices=slices)


def bpipe(stages: int, microbatches: int) -> Schedule:
    """1F1B whose first devices lend memory from the last. None holds more than stages / 2 + 1 microbatches, rounded up.

    Device s has stages - s microbatches in flight, and its partner, device stages - 1 - s, has s + 1. What a device
    would hold above the limit, its partner keeps: of those in flight the newest one, which is needed last.
    """
    base = one_forward_one_backward("bpipe", stages, microbatches, hops=1)
    limit = (stages + 3) // 2
    evictions: list[Eviction] = []
    for device, order in enumerate(base.orders):
        here: list[Task] = []  # forward tasks whose savings are on the device
        away: list[Task] = []
        for i, task in enumerate(order):
            if task.kind == "B":
                if (forward := task._replace(kind="F")) in away:
                    away.remove(forward)
                    here.append(forward)
                    evictions.append(Eviction(forward, stages - 1 - device, before=task))
                here.remove(forward)
            else:
                here.append(task)
            following = order[i + 1] if i + 1 < len(order) else None
            if following and len(here) == limit and (following.kind == "F" or following._replace(kind="F") in away):
                away.append(here.pop())
    return replace(base, evictions=tuple(evictions))
