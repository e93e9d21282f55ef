"""Compiled sweeps of sequential tree-reweighted message passing (TRW-S), and the bound that their messages prove.

Kolmogorov, "Convergent tree-reweighted message passing for energy minimization", PAMI 2006. Every edge has a message to
each of its ends: a share of its costs that the end's options pay instead (a reparametrisation). What a sweep
takes out of nodes and messages, so that the least entry of each is 0, no choice can avoid: it is the bound.
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.solver.runtime.compilation import inner, kernel

HALF_ULP = 2.0**-53  # relative; what one operation on floats may be off by
FLAGS = {"nnan", "nsz"}  # lets minima be taken several at a time; infinities keep their meaning


@kernel(fastmath=FLAGS)
def sweep(graph, costs, to_left, to_right, extra, forward, complete):
    """Updates all messages in one direction: what they prove, and by how much rounding may have made it too much.

    Args:
        extra: set to by how much each option costs more than the best of its node, given all messages to it.
        complete: add what the edges to come leave unpaid: by how much any choice with an option costs more than the
            bound, rounded.
    """
    offsets, table_offsets, tables = graph.offsets, graph.table_offsets, graph.tables
    nodes = len(offsets) - 1
    total = np.empty(graph.widest)
    paid = np.empty(len(total))
    bound = allowance = 0.0
    for step in range(nodes):
        node = step if forward else nodes - 1 - step
        largest = _collect(graph, costs, to_left, to_right, node, total)
        first, options = offsets[node], offsets[node + 1] - offsets[node]
        least = _take_least(total, 0, options)
        for a in range(options):
            extra[first + a] = total[a]
        bound += least
        earlier = graph.earlier_starts[node + 1] - graph.earlier_starts[node]
        later = graph.later_starts[node + 1] - graph.later_starts[node]
        allowance += (earlier + later + 2) * largest + abs(bound)
        share = 1.0 / max(earlier, later, 1)
        links, starts = (graph.later, graph.later_starts) if forward else (graph.earlier, graph.earlier_starts)
        for at in range(starts[node], starts[node + 1]):
            edge = links[at]
            left, right, table = graph.left_offsets[edge], graph.right_offsets[edge], table_offsets[edge]
            if forward:
                other = graph.right_offsets[edge + 1] - right
                largest = _pay(share, total, to_left, left, options, paid)
                _minimise_rows(tables, table, options, other, paid, to_right, right)
                least = _take_least(to_right, right, other)
                if complete:
                    _spare_rows(tables, table, options, other, to_left, left, to_right, right, least, extra, first)
            else:
                other = graph.left_offsets[edge + 1] - left
                largest = _pay(share, total, to_right, right, options, paid)
                _minimise_columns(tables, table, other, options, paid, to_left, left)
                least = _take_least(to_left, left, other)
                if complete:
                    _spare_columns(tables, table, other, options, to_left, left, to_right, right, least, extra, first)
            bound += least
            allowance += 4 * (largest + abs(least)) + abs(bound)
    return bound, 4 * HALF_ULP * allowance


@inner(fastmath=FLAGS)
def _take_least(values, first, count):
    """Takes the least of some values out of them."""
    least = values[first]
    for a in range(first + 1, first + count):
        if values[a] < least:
            least = values[a]
    for a in range(first, first + count):
        values[a] -= least
    return least


@inner(fastmath=FLAGS)
def _pay(share, total, messages, first, options, paid):
    """What the options pay of an edge's costs, less what its message to them says already; the largest number."""
    largest = 0.0
    for a in range(options):
        paid[a] = share * total[a] - messages[first + a]
        largest = max(largest, total[a] + messages[first + a])
    return largest


@inner(fastmath=FLAGS)
def _minimise_rows(tables, table, rows, columns, paid, message, out):
    for b in range(columns):
        message[out + b] = paid[0] + tables[table + b]
    for a in range(1, rows):
        row, price = table + a * columns, paid[a]
        for b in range(columns):
            cost = price + tables[row + b]
            if cost < message[out + b]:
                message[out + b] = cost


@inner(fastmath=FLAGS)
def _minimise_columns(tables, table, rows, columns, paid, message, out):
    for a in range(rows):
        row = table + a * columns
        least = paid[0] + tables[row]
        for b in range(1, columns):
            cost = paid[b] + tables[row + b]
            if cost < least:
                least = cost
        message[out + a] = least


@inner(fastmath=FLAGS)
def _spare_rows(tables, table, rows, columns, to_left, left, to_right, right, least, extra, first):
    """Adds to `extra` what the options of the left end leave unpaid, over the best of the right end."""
    for a in range(rows):
        spare = np.inf
        for b in range(columns):
            spare = min(spare, tables[table + a * columns + b] - to_right[right + b])
        extra[first + a] += spare - to_left[left + a] - least


@inner(fastmath=FLAGS)
def _spare_columns(tables, table, rows, columns, to_left, left, to_right, right, least, extra, first):
    """Adds to `extra` what the options of the right end leave unpaid, over the best of the left end."""
    for b in range(columns):
        spare = np.inf
        for a in range(rows):
            spare = min(spare, tables[table + a * columns + b] - to_left[left + a])
        extra[first + b] += spare - to_right[right + b] - least


@inner(fastmath=FLAGS)
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


@inner(fastmath=FLAGS)
def _add(messages, first, options, total):
    """Adds a message, whose least entry is 0, to `total`; its largest entry."""
    largest = 0.0
    for a in range(options):
        total[a] += messages[first + a]
        largest = max(largest, messages[first + a])
    return largest


@kernel()
def choose(graph, costs, to_left, choice):
    """Sets each node to the option that is cheapest, given what those before took and the messages from those after."""
    total = np.empty(graph.widest)
    for node in range(len(choice)):
        first, options = graph.offsets[node], graph.offsets[node + 1] - graph.offsets[node]
        for a in range(options):
            total[a] = costs[first + a]
        for at in range(graph.earlier_starts[node], graph.earlier_starts[node + 1]):
            edge = graph.earlier[at]
            row = graph.table_offsets[edge] + choice[graph.left[edge]] * options
            for a in range(options):
                total[a] += graph.tables[row + a]
        for at in range(graph.later_starts[node], graph.later_starts[node + 1]):
            _add(to_left, graph.left_offsets[graph.later[at]], options, total)
        best = 0
        for a in range(1, options):
            if total[a] < total[best]:
                best = a
        choice[node] = best


@kernel()
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


@kernel()
def over(memory, choice):
    """Bytes per pressure point by which a choice is over the limit; negative where it is below."""
    held = np.empty(len(memory.node))
    for life in range(len(held)):
        held[life] = memory.usage[memory.usage_offsets[life] + choice[memory.node[life]]]
    return _over(memory, held)


@kernel()
def expected_over(graph, memory, extra, temperature):
    """Bytes per pressure point by which options, mixed, are over the limit; cheap ones have the larger shares."""
    share = np.empty(len(extra))
    for node in range(len(graph.offsets) - 1):
        total = 0.0
        for a in range(graph.offsets[node], graph.offsets[node + 1]):
            share[a] = math.exp(-extra[a] / temperature)
            total += share[a]
        for a in range(graph.offsets[node], graph.offsets[node + 1]):
            share[a] /= total
    held = np.zeros(len(memory.node))
    for life in range(len(held)):
        first, usage = graph.offsets[memory.node[life]], memory.usage_offsets[life]
        for a in range(memory.usage_offsets[life + 1] - usage):
            held[life] += share[first + a] * memory.usage[usage + a]
    return _over(memory, held)


@inner()
def _over(memory, held):
    """Bytes per pressure point over the limit, where each life holds this much."""
    points = len(memory.room)
    change = np.zeros(points + 1)
    for life in range(len(held)):
        change[memory.start[life]] += held[life]
        change[memory.end[life]] -= held[life]
    total = 0.0
    result = np.empty(points)
    for point in range(points):
        total += change[point]
        result[point] = total - memory.room[point]
    return result


@kernel()
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
