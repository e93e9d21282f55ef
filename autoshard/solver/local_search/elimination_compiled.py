"""Compiled bucket elimination: the best options of nearly all nodes at once, given those of a few frozen ones.

Dechter, "Bucket elimination: a unifying framework for reasoning", 1999. A node is minimised out into a table over its
neighbours, which then are neighbours of each other; taking the node with the smallest table next keeps tables small
(the min-weight heuristic). Where even that one would be too large, a node is frozen: it keeps its present option, and
its edges fall apart (conditioning). Which one is random in part, so that another plan frees it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from autoshard.solver.runtime.compilation import inner, kernel

ELIMINATED, FROZEN = 1, 2
EDGE, TABLE = 0, 1  # what is added up before a node is minimised out: edges, and tables of nodes that went before it


class EliminationPlan(NamedTuple):
    """In which order to minimise nodes out, over what, and where the tables lie."""

    order: np.ndarray  # int64[steps]: nodes
    scope_starts: np.ndarray  # int64[steps + 1]
    scope: np.ndarray  # int64: per step, the nodes that the table is over
    factor_starts: np.ndarray  # int64[steps + 1]
    factor_kind: np.ndarray  # int64: per step, EDGE or TABLE for each factor
    factor: np.ndarray  # int64: the edge, or the step whose table it is, for each factor
    table_starts: np.ndarray  # int64[steps + 1]
    frozen: np.ndarray  # int64: nodes
    work: float  # entries of all tables before the minimum is taken


@inner()
def _play(tree, leaf, value):
    """Sets the value of a leaf in a tournament tree, in which every inner node holds the least of its two children."""
    at = leaf + len(tree) // 2
    tree[at] = value
    while at > 1:
        at //= 2
        tree[at] = min(tree[2 * at], tree[2 * at + 1])


@inner()
def _winner(tree):
    """The leaf with the least value."""
    at = 1
    while at < len(tree) // 2:
        at = 2 * at if tree[2 * at] == tree[at] else 2 * at + 1
    return at - len(tree) // 2


class _Links(NamedTuple):
    """The neighbours of every node that is left, as linked lists whose places are taken again once they are free."""

    first: np.ndarray  # int64[nodes]: place of the first neighbour; -1: none
    follower: np.ndarray  # int64[places]: of each place the next one in its list, or in that of free places; -1: none
    other: np.ndarray  # int64[places]: the neighbour
    degree: np.ndarray  # int64[nodes]: how many neighbours
    weight: np.ndarray  # float64[nodes]: logarithm of the entries of the node's table, before the minimum is taken
    free: np.ndarray  # int64[2]: the first free place, or -1, and the first that was never taken


@inner()
def _linked(graph, movable, logs):
    """The links of the edges between movable nodes."""
    nodes, places = len(logs), 2 * len(graph.left) + 16
    free = np.empty(2, np.int64)
    free[0], free[1] = -1, 0
    links = _Links(
        np.full(nodes, -1), np.full(places, -1), np.full(places, -1), np.zeros(nodes, np.int64), logs.copy(), free
    )
    for edge in range(len(graph.left)):
        i, j = graph.left[edge], graph.right[edge]
        if movable[i] and movable[j]:
            _add_neighbour(links, i, j, logs)
            _add_neighbour(links, j, i, logs)
    return links


@inner()
def _add_neighbour(links, node, neighbour, logs):
    """Puts one more neighbour of a node in front of its list; there must be a place left."""
    place = links.free[0]
    if place >= 0:
        links.free[0] = links.follower[place]
    else:
        place = links.free[1]
        links.free[1] += 1
    links.other[place], links.follower[place], links.first[node] = neighbour, links.first[node], place
    links.degree[node] += 1
    links.weight[node] += logs[neighbour]


@inner()
def _with_places(links, count):
    """The links, with so many places that were never taken at least."""
    if links.free[1] + count <= len(links.other):
        return links
    more = np.full(len(links.other) + count, -1)
    follower, other = np.concatenate((links.follower, more)), np.concatenate((links.other, more))
    return _Links(links.first, follower, other, links.degree, links.weight, links.free)


@inner()
def _neighbours(links, node, found):
    """The neighbours of a node, at the beginning of an array that is long enough."""
    place, count = links.first[node], links.degree[node]
    for k in range(count):
        found[k] = links.other[place]
        place = links.follower[place]
    return found[:count]


@inner()
def _unlink(links, node, gone, logs):
    """Takes `gone` out of the list of the neighbours of a node."""
    place, before = links.first[node], -1
    while links.other[place] != gone:
        before, place = place, links.follower[place]
    if before < 0:
        links.first[node] = links.follower[place]
    else:
        links.follower[before] = links.follower[place]
    links.follower[place], links.free[0] = links.free[0], place
    links.degree[node] -= 1
    links.weight[node] -= logs[gone]


@inner()
def _tie(links, node, others, logs, seen, look):
    """Ties a node to all others. `seen` has in which look each node was last seen, and is changed."""
    seen[node] = look
    place = links.first[node]
    while place >= 0:
        seen[links.other[place]] = look
        place = links.follower[place]
    for other in others:
        if seen[other] != look:
            _add_neighbour(links, node, other, logs)


@inner()
def _tournament(movable, weight, noise):
    """A tournament tree of the movable nodes."""
    leaves = 1
    while leaves < len(weight):
        leaves *= 2
    tree = np.full(2 * leaves, np.inf)
    for node in range(len(weight)):
        if movable[node]:
            tree[leaves + node] = weight[node] + noise[node]
    for at in range(leaves - 1, 0, -1):
        tree[at] = min(tree[2 * at], tree[2 * at + 1])
    return tree


@inner()
def _written(array, at, values):
    """An array with values written at a place, and room for them."""
    if at + len(values) > len(array):
        array = np.concatenate((array, np.empty(len(array) + len(values), np.int64)))
    array[at : at + len(values)] = values
    return array


@inner()
def _order(graph, movable, noise, reluctance, largest):
    """Min-weight elimination order with freezing: order, scope starts, scopes, state of each node.

    Args:
        movable: nodes that are not frozen from the start.
        noise: added to the logarithm of a table's entries.
        reluctance: of each node to be frozen, in edges.
        largest: logarithm of the entries that a table may have, before the minimum is taken.
    """
    nodes = len(noise)
    logs, state = np.empty(nodes), np.zeros(nodes, np.int64)
    for node in range(nodes):
        logs[node] = math.log(graph.offsets[node + 1] - graph.offsets[node])
        if not movable[node]:
            state[node] = FROZEN
    links = _linked(graph, movable, logs)
    tree = _tournament(movable, links.weight, noise)
    order, scope_starts = np.empty(nodes, np.int64), np.zeros(nodes + 1, np.int64)
    scopes = np.empty(8 * nodes + 16, np.int64)
    seen, found, look, steps = np.full(nodes, -1), np.empty(nodes, np.int64), 0, 0
    while tree[1] < np.inf:
        node = _winner(tree)
        freezes = links.weight[node] > largest and links.degree[node] > 0
        if freezes:
            node = _to_freeze(links, logs, reluctance, node)
        neighbours = _neighbours(links, node, found)
        for other in neighbours:
            _unlink(links, other, node, logs)
        _play(tree, node, np.inf)
        if freezes:
            state[node] = FROZEN
        else:
            state[node] = ELIMINATED
            order[steps] = node
            scopes = _written(scopes, scope_starts[steps], neighbours)
            scope_starts[steps + 1] = scope_starts[steps] + len(neighbours)
            steps += 1
            for other in neighbours:
                links = _with_places(links, len(neighbours))
                _tie(links, other, neighbours, logs, seen, look)
                look += 1
        for other in neighbours:
            _play(tree, other, links.weight[other] + noise[other])
    return order[:steps], scope_starts[: steps + 1], scopes[: scope_starts[steps]], state


@inner()
def _to_freeze(links, logs, reluctance, node):
    """The node among this one and its neighbours that ties most together and is least reluctant."""
    best, most = node, links.degree[node] + logs[node] - reluctance[node]
    place = links.first[node]
    while place >= 0:
        other = links.other[place]
        value = links.degree[other] + logs[other] - reluctance[other]
        if value > most:
            best, most = other, value
        place = links.follower[place]
    return best


@inner()
def _first_step(graph, edge, position):
    """The step at which an edge is added up: that of its end which goes first."""
    return min(position[graph.left[edge]], position[graph.right[edge]])


@inner()
def _factors(graph, position, reader):
    """What each step adds up: where its factors start, and their kinds and numbers, edges before tables.

    Args:
        position: of every node, its step; the number of steps for those that have none.
        reader: of every step, the one that takes up its table; -1: none.
    """
    steps = len(reader)
    starts = np.zeros(steps + 1, np.int64)
    for edge in range(len(graph.left)):
        step = _first_step(graph, edge, position)
        if step < steps:
            starts[step + 1] += 1
    for step in range(steps):
        if reader[step] >= 0:
            starts[reader[step] + 1] += 1
    for step in range(steps):
        starts[step + 1] += starts[step]
    at = starts[:-1].copy()
    kind, factor = np.empty(starts[steps], np.int64), np.empty(starts[steps], np.int64)
    for edge in range(len(graph.left)):
        step = _first_step(graph, edge, position)
        if step < steps:
            kind[at[step]], factor[at[step]] = EDGE, edge
            at[step] += 1
    for step in range(steps):
        if reader[step] >= 0:
            kind[at[reader[step]]], factor[at[reader[step]]] = TABLE, step
            at[reader[step]] += 1
    return starts, kind, factor


@kernel()
def plan(graph, movable, noise, reluctance, largest):
    """The plan of a block move of all movable nodes but those that have to be frozen."""
    order, scope_starts, scopes, state = _order(graph, movable, noise, reluctance, largest)
    steps = len(order)
    position = np.full(len(noise), steps)
    for step in range(steps):
        position[order[step]] = step
    kept, starts = np.empty(len(scopes), np.int64), np.zeros(steps + 1, np.int64)
    table_starts, reader = np.zeros(steps + 1, np.int64), np.full(steps, -1)
    count, work = 0, 0.0
    for step in range(steps):
        entries, soonest = 1, steps
        for node in scopes[scope_starts[step] : scope_starts[step + 1]]:
            if state[node] == ELIMINATED:  # those frozen since fell out of the scope
                kept[count] = node
                count += 1
                entries *= graph.offsets[node + 1] - graph.offsets[node]
                soonest = min(soonest, position[node])
        starts[step + 1] = count
        table_starts[step + 1] = table_starts[step] + entries
        work += entries * (graph.offsets[order[step] + 1] - graph.offsets[order[step]])
        if soonest < steps:
            reader[step] = soonest
    factor_starts, kind, factor = _factors(graph, position, reader)
    frozen = np.flatnonzero(state == FROZEN)
    return EliminationPlan(order, starts, kept[:count], factor_starts, kind, factor, table_starts, frozen, work)


@kernel()
def move(graph, costs, plan, choice):
    """Gives every node of the plan its best option, given those of the others; `choice` is changed."""
    steps = len(plan.order)
    tables = np.empty(plan.table_starts[steps])
    taken = np.empty(plan.table_starts[steps], np.int16)
    longest = 0
    for step in range(steps):
        node = plan.order[step]
        options = graph.offsets[node + 1] - graph.offsets[node]
        longest = max(longest, (plan.table_starts[step + 1] - plan.table_starts[step]) * options)
    sums = np.empty(longest)
    widest = 0
    for step in range(steps):
        widest = max(widest, plan.scope_starts[step + 1] - plan.scope_starts[step])
    strides, counter, sizes = np.empty(widest, np.int64), np.empty(widest, np.int64), np.empty(widest, np.int64)
    for step in range(steps):
        node = plan.order[step]
        first, options = graph.offsets[node], graph.offsets[node + 1] - graph.offsets[node]
        scope = plan.scope[plan.scope_starts[step] : plan.scope_starts[step + 1]]
        width = len(scope)
        rows = plan.table_starts[step + 1] - plan.table_starts[step]
        for k in range(width):
            sizes[k] = graph.offsets[scope[k] + 1] - graph.offsets[scope[k]]
        for row in range(rows):
            for a in range(options):
                sums[row * options + a] = costs[first + a]
        for at in range(plan.factor_starts[step], plan.factor_starts[step + 1]):
            if plan.factor_kind[at] == EDGE:
                base, stride = _edge_strides(graph, plan.factor[at], node, scope, choice, strides)
                _add(graph.tables, base, stride, strides, sizes, counter, width, rows, options, sums)
            else:
                base, stride = _table_strides(graph, plan, plan.factor[at], node, scope, strides)
                _add(tables, base, stride, strides, sizes, counter, width, rows, options, sums)
        for row in range(rows):
            least, best = sums[row * options], 0
            for a in range(1, options):
                if sums[row * options + a] < least:
                    least, best = sums[row * options + a], a
            tables[plan.table_starts[step] + row] = least
            taken[plan.table_starts[step] + row] = best
    for step in range(steps - 1, -1, -1):
        row = 0
        for node in plan.scope[plan.scope_starts[step] : plan.scope_starts[step + 1]]:
            row = row * (graph.offsets[node + 1] - graph.offsets[node]) + choice[node]
        choice[plan.order[step]] = taken[plan.table_starts[step] + row]


@inner()
def _edge_strides(graph, edge, node, scope, choice, strides):
    """Where in an edge's table the node's first option is, how far its options are apart, and those of the scope."""
    columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
    if graph.left[edge] == node:
        other, stride, step = graph.right[edge], columns, 1
    else:
        other, stride, step = graph.left[edge], 1, columns
    base = graph.table_offsets[edge]
    inside = False
    for k in range(len(scope)):
        strides[k] = step if scope[k] == other else 0
        inside |= scope[k] == other
    if not inside:
        base += step * choice[other]
    return base, stride


@inner()
def _table_strides(graph, plan, step, node, scope, strides):
    """Where the table of an earlier step starts, how far the node's options are apart in it, and those of the scope."""
    strides[: len(scope)] = 0
    stride, apart = 0, 1
    for at in range(plan.scope_starts[step + 1] - 1, plan.scope_starts[step] - 1, -1):
        other = plan.scope[at]
        if other == node:
            stride = apart
        else:
            for k in range(len(scope)):
                if scope[k] == other:
                    strides[k] = apart
        apart *= graph.offsets[other + 1] - graph.offsets[other]
    return plan.table_starts[step], stride


@inner()
def _add(source, base, stride, strides, sizes, counter, width, rows, options, sums):
    """Adds a table to the sums of a step, along all rows of its scope."""
    counter[:width] = 0
    at = base
    for row in range(rows):
        for a in range(options):
            sums[row * options + a] += source[at + a * stride]
        k = width - 1
        while k >= 0:
            counter[k] += 1
            at += strides[k]
            if counter[k] < sizes[k]:
                break
            at -= strides[k] * sizes[k]
            counter[k] = 0
            k -= 1
