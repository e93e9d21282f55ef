"""Costs in, which device has which of them, out: the two heuristics of Neo (Mudigere et al., ISCA 2022).

Greedy takes costs from the largest on, each to the device with the least so far. Its largest load is at most 4/3 of the
best possible (Graham, SIAM J. Appl. Math. 17, 1969). Karmarkar and Karp ("The differencing method of set partitioning",
1982) join the two partial partitions that differ most, loads against each other.

>>> balanced([8, 7, 6, 5, 4], 2)
(0, 1, 0, 1, 1)
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence


def balanced(costs: Sequence[float], devices: int) -> tuple[int, ...]:
    """The device of each cost, by greedy or by differencing, whichever has the smaller largest load."""
    found = (greedy(costs, devices), karmarkar_karp(costs, devices))
    return min(found, key=lambda one: max(loads(costs, one, devices)))


def loads(costs: Sequence[float], device_of: Sequence[int], devices: int) -> list[float]:
    """What each device has in all."""
    found = [0.0] * devices
    for cost, device in zip(costs, device_of, strict=True):
        found[device] += cost
    return found


def greedy(costs: Sequence[float], devices: int) -> tuple[int, ...]:
    """The largest first, each to the device with the least so far."""
    device_of = [0] * len(costs)
    least = [(0.0, device) for device in range(devices)]
    for item in sorted(range(len(costs)), key=lambda i: -costs[i]):
        load, device = heapq.heappop(least)
        device_of[item] = device
        heapq.heappush(least, (load + costs[item], device))
    return tuple(device_of)


def karmarkar_karp(costs: Sequence[float], devices: int) -> tuple[int, ...]:
    """Largest differencing: partitions are joined, the largest load of one with the smallest of the other."""
    order = itertools.count()
    partitions = []
    for item, cost in enumerate(costs):
        loaded = [(0.0, ())] * (devices - 1) + [(float(cost), (item,))]
        partitions.append((-float(cost), next(order), loaded))
    heapq.heapify(partitions)
    while len(partitions) > 1:
        _, _, one = heapq.heappop(partitions)
        _, _, other = heapq.heappop(partitions)
        pairs = zip(one, reversed(other), strict=True)
        joined = sorted((a + b, (*items, *more)) for (a, items), (b, more) in pairs)
        heapq.heappush(partitions, (joined[0][0] - joined[-1][0], next(order), joined))
    device_of = [0] * len(costs)
    for _, _, loaded in partitions:
        for device, (_, items) in enumerate(loaded):
            for item in items:
                device_of[item] = device
    return tuple(device_of)
