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


@inner()
def _unlink(first, follower, other, node, gone):
    """Takes `gone` out of the list of the neighbours of a node; the link that is free now."""
    link, before = first[node], -1
    while other[link] != gone:
        before, link = link, follower[link]
    if before < 0:
        first[node] = follower[link]
    else:
        follower[before] = follower[link]
    return link


@inner()
def _order(graph, movable, noise, reluctance, largest):
    """Min-weight elimination order with freezing: order, scope starts, scopes, state of each node.

    Args:
        movable: nodes that are not frozen from the start.
        noise: added to the logarithm of a table's entries.
        reluctance: of each node to be frozen, in edges.
        largest: logarithm of the entries that a table may have, before the minimum is taken.
    """
    nodes, edges = len(noise), len(graph.left)
    logs = np.empty(nodes)
    for node in range(nodes):
        logs[node] = math.log(graph.offsets[node + 1] - graph.offsets[node])
    first = np.full(nodes, -1)
    follower, other = np.full(2 * edges + 16, -1), np.full(2 * edges + 16, -1)
    degree, weight = np.zeros(nodes, np.int64), logs.copy()
    used, free = 0, -1
    state = np.zeros(nodes, np.int64)
    for node in range(nodes):
        if not movable[node]:
            state[node] = FROZEN
    for edge in range(edges):
        i, j = graph.left[edge], graph.right[edge]
        if movable[i] and movable[j]:
            for a, b in ((i, j), (j, i)):
                other[used], follower[used], first[a] = b, first[a], used
                used += 1
                degree[a] += 1
                weight[a] += logs[b]
    leaves = 1
    while leaves < nodes:
        leaves *= 2
    tree = np.full(2 * leaves, np.inf)
    for node in range(nodes):
        if movable[node]:
            tree[leaves + node] = weight[node] + noise[node]
    for at in range(leaves - 1, 0, -1):
        tree[at] = min(tree[2 * at], tree[2 * at + 1])
    order, scope_starts = np.empty(nodes, np.int64), np.zeros(nodes + 1, np.int64)
    scopes = np.empty(8 * nodes + 16, np.int64)
    seen = np.full(nodes, -1)  # in which look a node was last seen
    look = 0
    neighbours = np.empty(nodes, np.int64)
    steps = 0
    while tree[1] < np.inf:
        node = _winner(tree)
        chosen, freezes = node, weight[node] > largest and degree[node] > 0
        if freezes:
            chosen = _to_freeze(first, follower, other, degree, logs, reluctance, node)
        count = 0
        link = first[chosen]
        while link >= 0:
            neighbours[count] = other[link]
            count += 1
            link = follower[link]
        for k in range(count):
            y = neighbours[k]
            unlinked = _unlink(first, follower, other, y, chosen)
            follower[unlinked], free = free, unlinked
            degree[y] -= 1
            weight[y] -= logs[chosen]
        _play(tree, chosen, np.inf)
        if freezes:
            state[chosen] = FROZEN
        else:
            state[chosen] = ELIMINATED
            order[steps] = chosen
            at = scope_starts[steps]
            if at + count > len(scopes):
                scopes = np.concatenate((scopes, np.empty(len(scopes) + count, np.int64)))
            for k in range(count):  # of a slice the text of an error is compiled, too
                scopes[at + k] = neighbours[k]
            scope_starts[steps + 1] = at + count
            steps += 1
            for k in range(count):
                y = neighbours[k]
                look += 1
                seen[y] = look
                link = first[y]
                while link >= 0:
                    seen[other[link]] = look
                    link = follower[link]
                for z in neighbours[:count]:
                    if seen[z] != look:
                        if free >= 0:
                            link, free = free, follower[free]
                        else:
                            if used == len(other):
                                other = np.concatenate((other, np.full(len(other), -1)))
                                follower = np.concatenate((follower, np.full(len(follower), -1)))
                            link = used
                            used += 1
                        other[link], follower[link], first[y] = z, first[y], link
                        degree[y] += 1
                        weight[y] += logs[z]
        for k in range(count):
            y = neighbours[k]
            _play(tree, y, weight[y] + noise[y])
    return order[:steps], scope_starts[: steps + 1], scopes[: scope_starts[steps]], state


@inner()
def _to_freeze(first, follower, other, degree, logs, reluctance, node):
    """The node among these neighbours that ties most together and is least reluctant."""
    best = node
    most = degree[node] + logs[node] - reluctance[node]
    link = first[node]
    while link >= 0:
        y = other[link]
        value = degree[y] + logs[y] - reluctance[y]
        if value > most:
            best, most = y, value
        link = follower[link]
    return best


@kernel()
def plan(graph, movable, noise, reluctance, largest):
    """The plan of a block move of all movable nodes but those that have to be frozen."""
    order, scope_starts, scopes, state = _order(graph, movable, noise, reluctance, largest)
    steps = len(order)
    position = np.full(len(noise), steps)
    for step in range(steps):
        position[order[step]] = step
    kept, starts = np.empty(len(scopes), np.int64), np.zeros(steps + 1, np.int64)
    count = 0
    counts = np.zeros(steps + 1, np.int64)  # factors per step, one further on
    table_starts = np.zeros(steps + 1, np.int64)
    work = 0.0
    reader = np.full(steps, -1)  # the step that takes up a step's table
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
            counts[soonest + 1] += 1
    for edge in range(len(graph.left)):
        step = min(position[graph.left[edge]], position[graph.right[edge]])
        if step < steps:
            counts[step + 1] += 1
    factor_starts = counts
    for step in range(steps):
        factor_starts[step + 1] += factor_starts[step]
    at = factor_starts[:-1].copy()
    kind, factor = np.empty(factor_starts[steps], np.int64), np.empty(factor_starts[steps], np.int64)
    for edge in range(len(graph.left)):
        step = min(position[graph.left[edge]], position[graph.right[edge]])
        if step < steps:
            kind[at[step]], factor[at[step]] = EDGE, edge
            at[step] += 1
    for step in range(steps):
        if reader[step] >= 0:
            kind[at[reader[step]]], factor[at[reader[step]]] = TABLE, step
            at[reader[step]] += 1
    frozen, count_frozen = np.empty(len(state), np.int64), 0
    for node in range(len(state)):
        if state[node] == FROZEN:
            frozen[count_frozen] = node
            count_frozen += 1
    return EliminationPlan(
        order, starts, kept[:count], factor_starts, kind, factor, table_starts, frozen[:count_frozen], work
    )


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
