"""Compiled sweeps of sequential tree-reweighted message passing (TRW-S), and the bound that their messages prove.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006. Every edge has a message to
each of its ends: a share of its costs that the end's options pay instead (a reparametrisation). What a sweep
takes out of nodes and messages, so that the least entry of each is 0, no choice can avoid: it is the bound.
"""

from __future__ import annotations

import numpy as np
from numba import njit

HALF_ULP = 2.0**-53  # relative; what one operation on floats may be off by
FLAGS = {"nnan", "nsz"}  # lets minima be taken several at a time; infinities keep their meaning


@njit(cache=True, nogil=True, fastmath=FLAGS)
def sweep(graph, costs, to_left, to_right, choice, forward, extra):
    """Updates all messages in one direction: what they prove, and by how much rounding may have made it too much.

    Args:
        choice: going forward, set to what is cheapest of each node given the nodes before it.
        extra: unless empty, set to by how much any choice with an option costs more than the bound, rounded.
    """
    nodes = len(graph.offsets) - 1
    total = np.empty(np.max(np.diff(graph.offsets)) if nodes else 0)
    bound = allowance = 0.0
    for step in range(nodes):
        node = step if forward else nodes - 1 - step
        if forward:
            choice[node] = _taken(graph, costs, to_left, choice, node)
        largest = _collect(graph, costs, to_left, to_right, node, total)
        options = graph.offsets[node + 1] - graph.offsets[node]
        least = total[:options].min()
        total[:options] -= least
        if len(extra):
            extra[graph.offsets[node] : graph.offsets[node + 1]] = total[:options]
        bound += least
        earlier = graph.earlier_starts[node + 1] - graph.earlier_starts[node]
        later = graph.later_starts[node + 1] - graph.later_starts[node]
        allowance += (earlier + later + 2) * largest + abs(bound)
        share = 1.0 / max(earlier, later, 1)
        if forward:
            for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
                least, largest = _send_right(graph, to_left, to_right, graph.later[at], share, total, extra)
                bound += least
                allowance += 4 * largest + abs(bound)
        else:
            for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
                least, largest = _send_left(graph, to_left, to_right, graph.earlier[at], share, total, extra)
                bound += least
                allowance += 4 * largest + abs(bound)
    return bound, 2 * HALF_ULP * allowance


@njit(cache=True, nogil=True, fastmath=FLAGS)
def _collect(graph, costs, to_left, to_right, node, total):
    """Puts what each option of a node costs with all messages to it into `total`; the sum of the largest terms."""
    first, options = graph.offsets[node], graph.offsets[node + 1] - graph.offsets[node]
    largest = 0.0
    for a in range(options):
        total[a] = costs[first + a]
        largest = max(largest, abs(total[a]))
    for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
        largest += _add(to_right, graph.right_offsets[graph.earlier[at]], options, total)
    for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
        largest += _add(to_left, graph.left_offsets[graph.later[at]], options, total)
    return largest


@njit(cache=True, nogil=True, fastmath=FLAGS)
def _add(messages, first, options, total):
    """Adds a message, whose least entry is 0, to `total`; its largest entry."""
    largest = 0.0
    for a in range(options):
        total[a] += messages[first + a]
        largest = max(largest, messages[first + a])
    return largest


@njit(cache=True, nogil=True)
def _taken(graph, costs, to_left, choice, node):
    """The option that is cheapest, given what the nodes before took and the messages from those after."""
    first, options = graph.offsets[node], graph.offsets[node + 1] - graph.offsets[node]
    best, least = 0, np.inf
    for a in range(options):
        cost = costs[first + a]
        for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
            edge = graph.earlier[at]
            cost += graph.tables[graph.table_offsets[edge] + choice[graph.left[edge]] * options + a]
        for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
            cost += to_left[graph.left_offsets[graph.later[at]] + a]
        if cost < least:
            best, least = a, cost
    return best


@njit(cache=True, nogil=True, fastmath=FLAGS)
def _send_right(graph, to_left, to_right, edge, share, total, extra):
    """Minimises over the left end's options into its message to the right, whose least entry is taken out.

    Returns that entry and the largest number involved.
    """
    rows = graph.left_offsets[edge + 1] - graph.left_offsets[edge]
    columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
    back, out = graph.left_offsets[edge], graph.right_offsets[edge]
    message = to_right[out : out + columns]
    message[:] = np.inf
    largest = 0.0
    for a in range(rows):
        paid = share * total[a] - to_left[back + a]
        largest = max(largest, total[a], to_left[back + a])
        row = graph.table_offsets[edge] + a * columns
        for b in range(columns):
            message[b] = min(message[b], paid + graph.tables[row + b])
    least = message.min()
    message -= least
    if len(extra):
        for a in range(rows):
            row = graph.table_offsets[edge] + a * columns
            left = np.inf
            for b in range(columns):
                left = min(left, graph.tables[row + b] - message[b])
            extra[graph.offsets[graph.left[edge]] + a] += left - to_left[back + a] - least
    return least, 2 * largest + abs(least) + message.max()


@njit(cache=True, nogil=True, fastmath=FLAGS)
def _send_left(graph, to_left, to_right, edge, share, total, extra):
    """Minimises over the right end's options into its message to the left, as `_send_right` does."""
    rows = graph.left_offsets[edge + 1] - graph.left_offsets[edge]
    columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
    back, out = graph.right_offsets[edge], graph.left_offsets[edge]
    paid = np.empty(columns)
    largest = 0.0
    for b in range(columns):
        paid[b] = share * total[b] - to_right[back + b]
        largest = max(largest, total[b], to_right[back + b])
    message = to_left[out : out + rows]
    for a in range(rows):
        row = graph.table_offsets[edge] + a * columns
        least = np.inf
        for b in range(columns):
            least = min(least, paid[b] + graph.tables[row + b])
        message[a] = least
    least = message.min()
    message -= least
    if len(extra):
        left = np.full(columns, np.inf)
        for a in range(rows):
            row = graph.table_offsets[edge] + a * columns
            for b in range(columns):
                left[b] = min(left[b], graph.tables[row + b] - message[a])
        for b in range(columns):
            extra[graph.offsets[graph.right[edge]] + b] += left[b] - to_right[back + b] - least
    return least, 2 * largest + abs(least) + message.max()


@njit(cache=True, nogil=True)
def priced(graph, memory, prices):
    """What options cost when the bytes that they hold are paid for, at a price per byte of each pressure point."""
    costs = graph.costs.copy()
    paid = np.zeros(len(prices) + 1)
    for point in range(len(prices)):
        paid[point + 1] = paid[point] + prices[point]
    for life in range(len(memory.node)):
        price = paid[memory.end[life]] - paid[memory.start[life]]
        if price != 0.0:
            first, usage = graph.offsets[memory.node[life]], memory.usage_offsets[life]
            for a in range(memory.usage_offsets[life + 1] - usage):
                costs[first + a] += price * memory.usage[usage + a]
    return costs


@njit(cache=True, nogil=True)
def over(memory, choice):
    """Bytes per pressure point by which a choice is over the limit; negative where it is below."""
    points = len(memory.room)
    change = np.zeros(points + 1)
    for life in range(len(memory.node)):
        usage = memory.usage[memory.usage_offsets[life] + choice[memory.node[life]]]
        change[memory.start[life]] += usage
        change[memory.end[life]] -= usage
    held = 0.0
    result = np.empty(points)
    for point in range(points):
        held += change[point]
        result[point] = held - memory.room[point]
    return result


@njit(cache=True, nogil=True)
def cost_of(graph, costs, choice):
    """The sum of the costs of the chosen options and of the pairs that they make."""
    total = 0.0
    for node in range(len(choice)):
        total += costs[graph.offsets[node] + choice[node]]
    for edge in range(len(graph.left)):
        columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
        entry = choice[graph.left[edge]] * columns + choice[graph.right[edge]]
        total += graph.tables[graph.table_offsets[edge] + entry]
    return total
