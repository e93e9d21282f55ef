"""Compiled sweeps of sequential tree-reweighted message passing (TRW-S), and the bound that their messages prove.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006. Every edge has a message to
each of its ends: a share of its costs that the end's options pay instead (a reparametrisation). The bound is what the
cheapest option of every node and the cheapest pair of every edge cost together, so written; it holds for any messages.
"""

from __future__ import annotations

import numpy as np
from numba import njit

HALF_ULP = 2.0**-53  # relative; what one operation on floats may be off by
FLAGS = {"nnan", "nsz"}  # lets minima be taken several at a time; infinities keep their meaning


@njit(cache=True, nogil=True, fastmath=FLAGS)
def sweep(graph, costs, to_left, to_right, choice, forward):
    """Updates all messages in one direction; going forward, `choice` too, each node given the nodes before it."""
    nodes = len(graph.offsets) - 1
    total = np.empty(np.max(np.diff(graph.offsets)) if nodes else 0)
    for step in range(nodes):
        node = step if forward else nodes - 1 - step
        _collect(graph, costs, to_left, to_right, node, total)
        earlier = graph.earlier_starts[node + 1] - graph.earlier_starts[node]
        later = graph.later_starts[node + 1] - graph.later_starts[node]
        share = 1.0 / max(earlier, later, 1)
        if forward:
            choice[node] = _taken(graph, costs, to_left, choice, node)
            for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
                _send_right(graph, to_left, to_right, graph.later[at], share, total)
        else:
            for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
                _send_left(graph, to_left, to_right, graph.earlier[at], share, total)


@njit(cache=True, nogil=True, fastmath=FLAGS)
def _collect(graph, costs, to_left, to_right, node, total):
    """Puts what each option of a node costs with all messages to it into `total`."""
    first, options = graph.offsets[node], graph.offsets[node + 1] - graph.offsets[node]
    for a in range(options):
        total[a] = costs[first + a]
    for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
        message = graph.right_offsets[graph.earlier[at]]
        for a in range(options):
            total[a] += to_right[message + a]
    for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
        message = graph.left_offsets[graph.later[at]]
        for a in range(options):
            total[a] += to_left[message + a]


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
def _send_right(graph, to_left, to_right, edge, share, total):
    """Minimises over the left end's options: its message to the right."""
    rows = graph.left_offsets[edge + 1] - graph.left_offsets[edge]
    columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
    back, out = graph.left_offsets[edge], graph.right_offsets[edge]
    message = to_right[out : out + columns]
    message[:] = np.inf
    for a in range(rows):
        paid = share * total[a] - to_left[back + a]
        row = graph.table_offsets[edge] + a * columns
        for b in range(columns):
            message[b] = min(message[b], paid + graph.tables[row + b])
    message -= message.min()


@njit(cache=True, nogil=True, fastmath=FLAGS)
def _send_left(graph, to_left, to_right, edge, share, total):
    """Minimises over the right end's options: its message to the left."""
    rows = graph.left_offsets[edge + 1] - graph.left_offsets[edge]
    columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
    back, out = graph.right_offsets[edge], graph.left_offsets[edge]
    paid = np.empty(columns)
    for b in range(columns):
        paid[b] = share * total[b] - to_right[back + b]
    message = to_left[out : out + rows]
    for a in range(rows):
        row = graph.table_offsets[edge] + a * columns
        least = np.inf
        for b in range(columns):
            least = min(least, paid[b] + graph.tables[row + b])
        message[a] = least
    message -= message.min()


@njit(cache=True, nogil=True, fastmath=FLAGS)
def bound_of(graph, costs, to_left, to_right, extra):
    """What the messages prove that every choice costs, and by how much rounding may have made it too much.

    Writes into `extra`, per option, by how much any choice with it costs more than the bound (at least, and rounded).
    """
    bound = allowance = compensation = 0.0
    nodes = len(graph.offsets) - 1
    total = np.empty(np.max(np.diff(graph.offsets)) if nodes else 0)
    for node in range(nodes):
        first, options = graph.offsets[node], graph.offsets[node + 1] - graph.offsets[node]
        _collect(graph, costs, to_left, to_right, node, total)
        least = np.inf
        largest = 0.0
        for a in range(options):
            least = min(least, total[a])
            largest = max(largest, abs(costs[first + a]))
        for a in range(options):
            extra[first + a] = total[a] - least
        terms = 2 + graph.earlier_starts[node + 1] - graph.earlier_starts[node]
        terms += graph.later_starts[node + 1] - graph.later_starts[node]
        for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
            edge = graph.earlier[at]
            largest += np.max(np.abs(to_right[graph.right_offsets[edge] : graph.right_offsets[edge + 1]]))
        for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
            edge = graph.later[at]
            largest += np.max(np.abs(to_left[graph.left_offsets[edge] : graph.left_offsets[edge + 1]]))
        allowance += terms * largest
        bound += least
        compensation += abs(bound)
    for edge in range(len(graph.left)):
        least, largest = _spread(graph, to_left, to_right, edge, extra)
        allowance += 3 * largest
        bound += least
        compensation += abs(bound)
    return bound, (allowance + compensation) * 2 * HALF_ULP


@njit(cache=True, nogil=True, fastmath=FLAGS)
def _spread(graph, to_left, to_right, edge, extra):
    """The cheapest pair of an edge beyond its messages, and the largest number involved; adds to `extra`."""
    rows = graph.left_offsets[edge + 1] - graph.left_offsets[edge]
    columns = graph.right_offsets[edge + 1] - graph.right_offsets[edge]
    out, back = graph.left_offsets[edge], graph.right_offsets[edge]
    in_row, in_column = np.full(rows, np.inf), np.full(columns, np.inf)
    for a in range(rows):
        row = graph.table_offsets[edge] + a * columns
        for b in range(columns):
            in_column[b] = min(in_column[b], graph.tables[row + b] - to_left[out + a] - to_right[back + b])
            in_row[a] = min(in_row[a], graph.tables[row + b] - to_left[out + a] - to_right[back + b])
    least = in_row.min()
    for a in range(rows):
        extra[graph.offsets[graph.left[edge]] + a] += in_row[a] - least
    for b in range(columns):
        extra[graph.offsets[graph.right[edge]] + b] += in_column[b] - least
    largest = np.max(np.abs(to_left[out : out + rows])) + np.max(np.abs(to_right[back : back + columns]))
    return least, abs(least) + 2 * largest


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
