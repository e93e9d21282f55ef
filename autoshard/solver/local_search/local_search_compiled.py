"""Compiled one-node moves within the memory limit: make a choice fit, and make one that fits cheaper."""

from __future__ import annotations

import numpy as np

from autoshard.solver.runtime.compilation import inner, kernel, sort
from autoshard.solver.verify import ROUNDING

# A choice is given up after so many changes if the rest would take this many times the changes that are left.
TRIED_CHANGES, SLOWNESS = 10, 2.0


@inner()
def _changes(graph, choice, node, costs):
    """Puts what each option of a node would cost, given all others, into `costs`."""
    first, options = graph.offsets[node], graph.offsets[node + 1] - graph.offsets[node]
    for a in range(options):
        costs[a] = graph.costs[first + a]
    for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
        edge = graph.earlier[at]
        row = graph.table_offsets[edge] + choice[graph.left[edge]] * options
        for a in range(options):
            costs[a] += graph.tables[row + a]
    for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
        edge = graph.later[at]
        columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
        entry = graph.table_offsets[edge] + choice[graph.right[edge]]
        for a in range(options):
            costs[a] += graph.tables[entry + a * columns]


@inner()
def _fits(memory, lives, now, then, over):
    """Whether the node with these lives may change its option: no point that it makes fuller is over the limit."""
    times = _times(memory, lives)
    for k in range(len(times) - 1):
        start, end, more = times[k], times[k + 1], 0.0
        for life in lives:
            if memory.start[life] <= start and end <= memory.end[life]:
                usage = memory.usage_offsets[life]
                more += memory.usage[usage + then] - memory.usage[usage + now]
        if more > 0.0:
            for point in range(start, end):
                if over[point] + more > 0.0:
                    return False
    return True


@inner()
def _times(memory, lives):
    """When these lives start and end, in order; from one to the next the same of them are held."""
    times = np.empty(2 * len(lives), np.int64)
    for k in range(len(lives)):
        times[2 * k], times[2 * k + 1] = memory.start[lives[k]], memory.end[lives[k]]
    sort(times)
    return times


@inner()
def _take(memory, lives, node, option, choice, over):
    for life in lives:
        usage = memory.usage_offsets[life]
        more = memory.usage[usage + option] - memory.usage[usage + choice[node]]
        if more != 0.0:
            for point in range(memory.start[life], memory.end[life]):
                over[point] += more
    choice[node] = option


@inner()
def _saved(memory, lives, now, then, point):
    """Bytes that the node holds less at a point after a change."""
    saved = 0.0
    for life in lives:
        if memory.start[life] <= point < memory.end[life]:
            usage = memory.usage_offsets[life]
            saved += memory.usage[usage + now] - memory.usage[usage + then]
    return saved


@kernel()
def repair(graph, memory, starts, lives, choice, over, most):
    """Makes a choice fit by the change that is cheapest per byte saved at the fullest point, again and again.

    At most `most` nodes change, and fewer where that will not do; `choice` and `over` (bytes per point) change along.

    Returns:
        Whether it fits now, and how many nodes changed.
    """
    costs = np.empty(graph.widest)
    first = 0.0  # bytes over the limit at the start, over all points
    for changes in range(most + 1):
        left = 0.0
        for point in range(len(over)):
            left += max(over[point], 0.0)
        if left == 0.0:
            return True, changes
        first = max(first, left)
        if changes == most or (
            changes >= TRIED_CHANGES and left * changes > SLOWNESS * (first - left) * (most - changes)
        ):
            return False, changes
        point = 0
        for other in range(1, len(over)):
            if over[other] > over[point]:
                point = other
        best_node, best_option, least = -1, -1, np.inf
        for node in range(len(choice)):
            own = lives[starts[node] : starts[node + 1]]
            present = False
            for life in own:
                present |= memory.start[life] <= point < memory.end[life]
            if not present:
                continue
            _changes(graph, choice, node, costs)
            now = choice[node]
            for then in range(graph.offsets[node + 1] - graph.offsets[node]):
                if costs[then] == np.inf:
                    continue
                saved = min(_saved(memory, own, now, then, point), over[point])
                if saved > 0.0:
                    rate = (costs[then] - costs[now]) / saved
                    if rate < least and _fits(memory, own, now, then, over):
                        best_node, best_option, least = node, then, rate
        if best_node < 0:
            return False, changes
        _take(memory, lives[starts[best_node] : starts[best_node + 1]], best_node, best_option, choice, over)
    return False, most


@kernel()
def descend(graph, memory, starts, lives, choice, over):
    """Gives one node after the other its cheapest option that fits, until none changes."""
    costs = np.empty(graph.widest)
    waiting = np.ones(len(choice), np.bool_)
    changed = True
    while changed:
        changed = False
        for node in range(len(choice)):
            if not waiting[node]:
                continue
            waiting[node] = False
            _changes(graph, choice, node, costs)
            own = lives[starts[node] : starts[node + 1]]
            now = choice[node]
            most = costs[now] - ROUNDING * abs(costs[now]) if costs[now] < np.inf else np.inf  # to be called cheaper
            while True:
                then = 0
                for a in range(1, graph.offsets[node + 1] - graph.offsets[node]):
                    if costs[a] < costs[then]:
                        then = a
                if costs[then] >= most:
                    break
                if _fits(memory, own, now, then, over):
                    _take(memory, own, node, then, choice, over)
                    changed = True
                    _wake(graph, node, waiting)
                    break
                costs[then] = np.inf


@inner()
def _wake(graph, node, waiting):
    for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
        waiting[graph.left[graph.earlier[at]]] = True
    for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
        waiting[graph.right[graph.later[at]]] = True
