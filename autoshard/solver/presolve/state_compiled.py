"""The state of the compiled reductions, and what changes it: queues, edges, options and lives.

Everything lies in flat arrays with room to grow: edges in doubly linked lists of halves (2e at the left end of edge e,
2e + 1 at the right), tables and usage in a pool. `touch`, `link`, `part`, `keep`, `hold` and `moments` do what the
methods of these names do in `simplify.py` (`link` is `join`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from autoshard.solver.runtime.compilation import inner, kernel, sort

POOL, LOG, CONSTANTS, HEAD, WAITING, HEAD_COMPARED, WAITING_COMPARED = range(7)  # in State.top


class State(NamedTuple):
    """A problem on its way to being smaller. Options of a node are packed at its start; a removed node has none."""

    first: np.ndarray  # int64[nodes]: where the options of a node start
    count: np.ndarray  # type: ignore[assignment]  # hides a method of tuples; int64[nodes]: how many it has left
    label: np.ndarray  # int64[options]: their numbers in the original problem
    cost: np.ndarray  # float64[options]
    end: np.ndarray  # int64[2 edges]: node of each half; -1: the edge is gone
    follower: np.ndarray  # int64[2 edges]: the next half of the same node
    leader: np.ndarray  # int64[2 edges]: the one before
    half: np.ndarray  # int64[nodes]: the first half
    degree: np.ndarray  # int64[nodes]
    table: np.ndarray  # int64[edges]: where in the pool [option of left, option of right] -> cost lies
    life: np.ndarray  # int64[nodes]: the first life
    lives: np.ndarray  # int64[nodes]: how many
    later_life: np.ndarray  # int64[lives]: the next one of the same node
    start: np.ndarray  # int64[lives]: pressure point
    stop: np.ndarray  # int64[lives]
    usage: np.ndarray  # int64[lives]: where in the pool the bytes per option lie
    pool: np.ndarray  # float64
    fixed: np.ndarray  # float64[points + 1]: bytes held whatever is chosen, as changes from point to point
    log: np.ndarray  # int64: node, what it followed (-1: nothing), number of pairs, then (its label, own label) each
    constants: np.ndarray  # float64: costs that are paid whatever is chosen
    queue: np.ndarray  # int64[nodes]: ring of nodes to look at
    queued: np.ndarray  # bool[nodes]
    compared: np.ndarray  # int64[nodes]: ring of nodes to compare the options of
    to_compare: np.ndarray  # bool[nodes]
    top: np.ndarray  # int64[7]: how far pool, log and so on are filled


@inner()
def push(queue, queued, top, head, waiting, node):
    if not queued[node]:
        queued[node] = True
        queue[(top[head] + top[waiting]) % len(queue)] = node
        top[waiting] += 1


@inner()
def pop(queue, queued, top, head, waiting):
    node = queue[top[head]]
    top[head] = (top[head] + 1) % len(queue)
    top[waiting] -= 1
    queued[node] = False
    return node


@inner()
def touch(state, node):
    """Puts a node down to be looked at again."""
    push(state.queue, state.queued, state.top, HEAD, WAITING, node)
    push(state.compared, state.to_compare, state.top, HEAD_COMPARED, WAITING_COMPARED, node)


@inner()
def strides(state, half):
    """Of a half edge: where its table starts, how far its own options are apart in it, and those of the other end."""
    edge = half // 2
    columns = state.count[state.end[2 * edge + 1]]
    if half % 2 == 0:
        return state.table[edge], columns, 1
    return state.table[edge], 1, columns


@inner()
def link(state, half, node):
    """Puts a half edge at the head of a node's list."""
    state.end[half] = node
    state.follower[half], state.leader[half] = state.half[node], -1
    if state.half[node] >= 0:
        state.leader[state.half[node]] = half
    state.half[node] = half
    state.degree[node] += 1


@inner()
def unlink(state, half):
    node, before, after = state.end[half], state.leader[half], state.follower[half]
    if before >= 0:
        state.follower[before] = after
    else:
        state.half[node] = after
    if after >= 0:
        state.leader[after] = before
    state.degree[node] -= 1


@inner()
def part(state, edge):
    """Takes an edge away."""
    for half in (2 * edge, 2 * edge + 1):
        unlink(state, half)
        touch(state, state.end[half])
    state.end[2 * edge] = state.end[2 * edge + 1] = -1


@inner()
def keep(state, node, kept):
    """Forbids the options of a node that are not kept, and packs the others."""
    first, count, pool = state.first[node], state.count[node], state.pool
    half = state.half[node]
    while half >= 0:
        edge = half // 2
        table, other = state.table[edge], state.end[half ^ 1]
        rows, columns = state.count[state.end[2 * edge]], state.count[state.end[2 * edge + 1]]
        to = table
        for a in range(rows):
            for b in range(columns):
                if kept[b if half % 2 else a]:
                    pool[to] = pool[table + a * columns + b]
                    to += 1
        touch(state, other)
        half = state.follower[half]
    life = state.life[node]
    while life >= 0:
        to = state.usage[life]
        for a in range(count):
            if kept[a]:
                pool[to] = pool[state.usage[life] + a]
                to += 1
        life = state.later_life[life]
    to = first
    for a in range(count):
        if kept[a]:
            state.cost[to], state.label[to] = state.cost[first + a], state.label[first + a]
            to += 1
    state.count[node] = to - first
    touch(state, node)
    if to > first:
        hold(state, node)


@inner()
def hold(state, node):
    """Moves what all options of a node hold to what is fixed; lives of which nothing is left go away."""
    before, life = -1, state.life[node]
    pool, count = state.pool, state.count[node]
    while life >= 0:
        usage = state.usage[life]
        least, most = np.inf, 0.0
        for a in range(usage, usage + count):
            least, most = min(least, pool[a]), max(most, pool[a])
        if state.start[life] < state.stop[life]:
            state.fixed[state.start[life]] += least
            state.fixed[state.stop[life]] -= least
        after = state.later_life[life]
        if most > least and state.start[life] < state.stop[life]:
            for a in range(usage, usage + count):
                pool[a] -= least
            before = life
        else:
            state.lives[node] -= 1
            if before < 0:
                state.life[node] = after
            else:
                state.later_life[before] = after
        life = after


@inner()
def find(state, node, other):
    """The half at `other` of its edge to a node; -1 if there is none."""
    half = state.half[node]
    while half >= 0:
        if state.end[half ^ 1] == other:
            return half ^ 1
        half = state.follower[half]
    return -1


@inner()
def _first(times, time):
    """Where a time stands in sorted ones for the first time."""
    low, high = 0, len(times) - 1
    while low < high:
        middle = (low + high) // 2
        if times[middle] < time:
            low = middle + 1
        else:
            high = middle
    return low


@inner()
def moments(state, node):
    """[stretch of points over which they do not change, option]: the bytes that each option of a node holds.

    Some stretches are empty.
    """
    count, lives = state.count[node], state.lives[node]
    times = np.empty(2 * lives, np.int64)
    life, k = state.life[node], 0
    while life >= 0:
        times[k], times[k + 1] = state.start[life], state.stop[life]
        life, k = state.later_life[life], k + 2
    sort(times)
    change = np.zeros((len(times), count))
    life = state.life[node]
    while life >= 0:
        begin, end = _first(times, state.start[life]), _first(times, state.stop[life])
        for a in range(count):
            usage = state.pool[state.usage[life] + a]
            change[begin, a] += usage
            change[end, a] -= usage
        life = state.later_life[life]
    for k in range(1, len(times)):
        for a in range(count):
            change[k, a] += change[k - 1, a]
    return change


@kernel()
def fill(state, pairs, owners):
    """Links edges and lives to their nodes, and puts every node down to be looked at."""
    for edge in range(len(pairs)):
        link(state, 2 * edge, pairs[edge, 0])
        link(state, 2 * edge + 1, pairs[edge, 1])
    for life in range(len(owners)):
        node = owners[life]
        state.later_life[life], state.life[node] = state.life[node], life
        state.lives[node] += 1
    for node in range(len(state.count)):
        hold(state, node)
        touch(state, node)
