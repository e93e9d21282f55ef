"""Pipelines run by brute force, as an oracle of `simulate`: an event queue, and random schedules for it."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import defaultdict
from collections.abc import Callable

from autoshard.pipeline import Schedule


def waits(schedule: Schedule) -> dict[tuple, set[tuple]]:
    """What each task waits for, from the definition of a pipeline: messages between virtual stages."""
    found = defaultdict(set)
    everything = {tuple(task) for order in schedule.orders for task in order}
    for kind, unit, stage in everything:
        task = (kind, unit, stage)
        if kind == "F":
            found[task] |= {("F", unit, before) for before in schedule.predecessors[stage]}
            found["B", unit, stage].add(task)
            for before in schedule.predecessors[stage]:
                found["B", unit, before].add(("B", unit, stage))
            if unit % schedule.slices:
                found[task].add(("F", unit - 1, stage))
                found["B", unit - 1, stage].add(("B", unit, stage))
        if kind == "W":
            found[task].add(("B", unit, stage))
    return found


def run(
    schedule: Schedule, seconds: Callable[[tuple], float], travel: Callable[[int, int], float]
) -> tuple[dict, dict, list[float]] | None:
    """Start and end of each task and the most units in flight per device; None where devices wait forever."""
    needs = {task: set(inputs) for task, inputs in waits(schedule).items()}
    readers = defaultdict(list)
    for task, inputs in needs.items():
        for other in inputs:
            readers[other].append(task)
    queues = [list(map(tuple, order)) for order in schedule.orders]
    released_by = "W" if any(task[0] == "W" for queue in queues for task in queue) else "B"
    is_busy = [False] * len(queues)
    held = [0] * len(queues)
    most = [0] * len(queues)
    start, end = {}, {}
    serial = itertools.count()
    events = []  # (moment, serial, what, device, task): a task's end, or the arrival of another's result at a task

    def try_to_start(device: int, now: float) -> None:
        if is_busy[device] or not queues[device] or needs.get(queues[device][0]):
            return
        task = queues[device].pop(0)
        is_busy[device] = True
        held[device] += task[0] == "F"
        most[device] = max(most[device], held[device])
        start[task] = now
        heapq.heappush(events, (now + seconds(task), next(serial), "end", device, task))

    for device in range(len(queues)):
        try_to_start(device, 0.0)
    while events:
        now, _, what, device, task = heapq.heappop(events)
        if what == "end":
            end[task] = now
            is_busy[device] = False
            held[device] -= task[0] == released_by
            for reader in readers[task]:
                target = schedule.placement[reader[2]]
                lag = 0.0 if target == device else travel(device, target)
                heapq.heappush(events, (now + lag, next(serial), "arrival", target, (task, reader)))
        else:
            needs[task[1]].discard(task[0])
        try_to_start(device, now)
    return None if any(queues) else (start, end, most)


def random_schedule(seed: int) -> Schedule:
    """Random virtual stages on random devices, with orders that can run. Some are sliced, split or doubled."""
    rng = random.Random(seed)
    devices, microbatches = rng.randint(1, 4), rng.randint(1, 4)
    replicas = rng.choice((1, 1, 2))
    microbatches *= replicas
    slices = rng.choice((1, 1, 1, 2, 3))
    each = rng.randint(1, 5)
    predecessors = []
    for replica in range(replicas):
        for stage in range(each):
            earlier = range(replica * each, replica * each + stage)
            predecessors.append(tuple(sorted(rng.sample(earlier, min(len(earlier), rng.choice((0, 1, 1, 2)))))))
    placement = tuple(rng.randrange(devices) for _ in predecessors)
    kinds = rng.choice(("FB", "FBW"))
    todo = [
        (kind, unit, stage)
        for unit in range(microbatches * slices)
        for stage in range(len(placement))
        if stage // each == unit * replicas // (microbatches * slices)
        for kind in kinds
    ]
    schedule = Schedule("random", microbatches, (tuple(todo),), placement, tuple(predecessors), replicas, slices)
    needs = waits(schedule)
    orders = [[] for _ in range(devices)]
    done = set()
    while todo:
        task = rng.choice([task for task in todo if needs[task] <= done])
        todo.remove(task)
        done.add(task)
        orders[placement[task[2]]].append(task)
    orders = tuple(map(tuple, orders))
    return Schedule("random", microbatches, orders, placement, tuple(predecessors), replicas, slices)
