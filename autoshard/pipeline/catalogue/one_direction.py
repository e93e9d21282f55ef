"""Schedules in which every microbatch runs down one chain of virtual stages, and B is the whole backward pass.

GPipe (Huang et al. 2019), 1F1B (PipeDream-flush, Narayanan et al. 2021; DAPPLE, Fan et al. 2021), eager 1F1B (Zhuang et
al. 2023), interleaved 1F1B (Megatron-LM, arXiv:2104.04473), breadth-first (Lamy-Poirier, arXiv:2211.05953).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain as joined

from autoshard.pipeline.orders import Schedule, Task, chain, tasks


def loop_placement(stages: int, chunks: int) -> tuple[int, ...]:
    """Virtual stages dealt to devices in turn.

    >>> loop_placement(2, 2)
    (0, 1, 0, 1)
    """
    return tuple(range(stages)) * chunks


def v_placement(stages: int, waves: int = 1) -> tuple[int, ...]:
    """Virtual stages dealt to devices forth and back.

    >>> v_placement(3)
    (0, 1, 2, 2, 1, 0)
    """
    return (*range(stages), *reversed(range(stages))) * waves


def alternate(forward: Sequence[Task], backward: Sequence[Task], warmup: int) -> tuple[Task, ...]:
    """`warmup` forward tasks, then one forward and one backward in turn, then the backward tasks that are left.

    >>> "".join(task.kind for task in alternate(tasks("F", range(3), 0), tasks("B", range(3), 0), 1))
    'FFBFBB'
    """
    warmup = min(warmup, len(forward))
    pairs = zip(forward[warmup:], backward, strict=False)
    return (*forward[:warmup], *joined.from_iterable(pairs), *backward[len(forward) - warmup :])


def gpipe(stages: int, microbatches: int) -> Schedule:
    """All forward tasks, then all backward tasks."""
    every = range(microbatches)
    orders = [tasks("F", every, stage) + tasks("B", every, stage) for stage in range(stages)]
    return _schedule("gpipe", microbatches, orders)


def one_forward_one_backward(name: str, stages: int, microbatches: int, hops: int) -> Schedule:
    """Warm-up of `hops` forward tasks per device behind, then forward and backward in turn.

    With one hop, the first backward task comes when the first cotangent can be there. With two, the results of F and B
    have the time of another task to travel.
    """
    every = range(microbatches)
    orders = [
        alternate(tasks("F", every, stage), tasks("B", every, stage), hops * (stages - stage - 1))
        for stage in range(stages)
    ]
    return _schedule(name, microbatches, orders)


def interleaved(stages: int, microbatches: int, chunks: int) -> Schedule:
    """1F1B over groups of as many microbatches as there are devices: a group goes through one chunk, then the next."""
    groups = range(0, microbatches, stages)
    orders = []
    for device in range(stages):
        forward, backward = (
            tuple(
                joined.from_iterable(
                    tasks(kind, range(first, first + stages), chunk * stages + device)
                    for first in groups
                    for chunk in chunk_order
                )
            )
            for kind, chunk_order in (("F", range(chunks)), ("B", range(chunks)[::-1]))
        )
        orders.append(alternate(forward, backward, (chunks - 1) * stages + 2 * (stages - device - 1)))
    return _schedule("interleaved_1f1b", microbatches, orders, chunks)


def looped_breadth_first(stages: int, microbatches: int, chunks: int) -> Schedule:
    """All microbatches through one chunk, then all through the next."""
    every = range(microbatches)
    orders = [
        [
            *joined.from_iterable(tasks("F", every, chunk * stages + device) for chunk in range(chunks)),
            *joined.from_iterable(tasks("B", every, chunk * stages + device) for chunk in reversed(range(chunks))),
        ]
        for device in range(stages)
    ]
    return _schedule("looped_bfs", microbatches, orders, chunks)


def _schedule(name: str, microbatches: int, orders: Sequence[Sequence[Task]], chunks: int = 1) -> Schedule:
    placement = loop_placement(len(orders), chunks)
    return Schedule(name, microbatches, tuple(map(tuple, orders)), placement, chain(len(placement)))
