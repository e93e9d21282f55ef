"""Compiled reductions of large problems: the bulk of what `simplify` does, with the same optimum and a way back.

Nodes lose options that have no finite partner over an edge (arc consistency), or that another option beats whatever the
neighbours choose (dead-end elimination: Goldstein, "Efficient rotamer elimination applied to protein side-chains and
related spin glasses", 1994). They go away when one option is left, or when it follows from a neighbour's. Edges go away
when their costs fall apart into one for either end.

`_visit`, `_merge` and `_compare` do what the methods of these names do in `simplify.py`. What would not fit into the
state any more is not begun, and the caller makes room.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.presolve.settings import PRESOLVE
from autoshard.solver.presolve.state_compiled import (
    CONSTANTS,
    HEAD,
    HEAD_COMPARED,
    LOG,
    POOL,
    WAITING,
    WAITING_COMPARED,
    find,
    hold,
    keep,
    link,
    moments,
    part,
    pop,
    strides,
    touch,
    unlink,
)
from autoshard.solver.runtime.compilation import inner, kernel
from autoshard.solver.tables import TABLE_NOISE

DONE, FULL, MORE = -1, -2, -3  # how `reduce` ends, but for the node that has no option left
LARGEST_COMPARISON = PRESOLVE.largest_compiled_comparison  # compiled code takes numbers, not fields


@kernel()
def reduce(state, steps):
    """Reduces until nothing applies (DONE), or for so many steps (MORE), or until the pool or log is FULL.

    Otherwise returns the number of a node that has no option left.
    """
    top = state.top
    widest = 0
    for count in state.count:
        widest = max(widest, count)
    option = np.empty(widest, np.int64)
    links = np.full(len(state.count), -1)
    for _ in range(steps):
        if top[WAITING]:
            node = pop(state.queue, state.queued, top, HEAD, WAITING)
            if not state.count[node]:
                continue
            status = _visit(state, node, option, links)
            if status == FULL:
                touch(state, node)
            if status != DONE:
                return status
        elif top[WAITING_COMPARED]:
            node = pop(state.compared, state.to_compare, top, HEAD_COMPARED, WAITING_COMPARED)
            if state.count[node] > 1:
                _compare(state, node)
        else:
            return DONE
    return MORE


@inner()
def _visit(state, node, option, links):
    """Tries every reduction of one node but dominance: DONE, FULL, or the node if it has no option left."""
    if state.top[LOG] + 3 + 2 * len(option) > len(state.log):
        return FULL
    if not _consistent(state, node):
        return node
    if state.count[node] == 1:
        _fix(state, node)
        return DONE
    half = state.half[node]
    while half >= 0:
        after = state.follower[half]
        _separate(state, half)
        half = after
    half = state.half[node]
    while half >= 0:
        follows, leads = _functional(state, half)
        other = state.end[half ^ 1]
        sizes = state.degree[node] + state.lives[node], state.degree[other] + state.lives[other]
        if follows and not (leads and sizes[0] > sizes[1]):  # the smaller of two moves
            return _merge(state, half, option, links)
        if leads:
            touch(state, node)
            return _merge(state, half ^ 1, option, links)
        half = state.follower[half]
    return DONE


@inner()
def _consistent(state, node):
    """Forbids options without a finite partner; False if none is left."""
    first, count = state.first[node], state.count[node]
    kept = np.empty(count, np.bool_)
    for a in range(count):
        kept[a] = state.cost[first + a] < np.inf
    half = state.half[node]
    while half >= 0:
        table, own, its = strides(state, half)
        others = state.count[state.end[half ^ 1]]
        for a in range(count):
            if kept[a]:
                possible = False
                for b in range(others):
                    if state.pool[table + a * own + b * its] < np.inf:
                        possible = True
                        break
                kept[a] = possible
        half = state.follower[half]
    for a in range(count):
        if not kept[a]:
            keep(state, node, kept)
            break
    return state.count[node] > 0


@inner()
def _fix(state, node):
    """Takes a node with one option away: its row goes to the neighbours' costs."""
    first, half = state.first[node], state.half[node]
    while half >= 0:
        table, _, its = strides(state, half)
        other, after = state.end[half ^ 1], state.follower[half]
        for b in range(state.count[other]):
            state.cost[state.first[other] + b] += state.pool[table + b * its]
        part(state, half // 2)
        half = after
    state.constants[state.top[CONSTANTS]] = state.cost[first]
    state.top[CONSTANTS] += 1
    at = state.top[LOG]
    state.log[at], state.log[at + 1], state.log[at + 2], state.log[at + 3] = node, -1, 1, 0
    state.log[at + 4] = state.label[first]
    state.top[LOG] = at + 5
    hold(state, node)
    state.count[node] = 0


@inner()
def _separate(state, half):
    """Takes an edge away whose costs fall apart into one for either end."""
    table, own, its = strides(state, half)
    node, other = state.end[half], state.end[half ^ 1]
    rows, columns, pool = state.count[node], state.count[other], state.pool
    largest = 0.0
    for at in range(table, table + rows * columns):
        if pool[at] == np.inf:
            return
        largest = max(largest, abs(pool[at]))
    for a in range(rows):
        for b in range(columns):
            rest = (pool[table + a * own + b * its] - pool[table + a * own]) - (pool[table + b * its] - pool[table])
            if abs(rest) > TABLE_NOISE * largest:
                return
    for a in range(rows):
        state.cost[state.first[node] + a] += pool[table + a * own]
    for b in range(columns):
        state.cost[state.first[other] + b] += pool[table + b * its] - pool[table]
    part(state, half // 2)


@inner()
def _functional(state, half):
    """Whether each option of the other end allows one of this node, and each of this node one of the other end."""
    table, own, its = strides(state, half)
    rows, columns = state.count[state.end[half]], state.count[state.end[half ^ 1]]
    leads = True
    finite = 0
    for a in range(rows):
        in_row = 0
        for b in range(columns):
            in_row += state.pool[table + a * own + b * its] < np.inf
        leads &= in_row == 1
        finite += in_row
    if finite != columns:  # every option has a finite partner
        return False, leads
    for b in range(columns):
        in_column = 0
        for a in range(rows):
            in_column += state.pool[table + a * own + b * its] < np.inf
        if in_column != 1:
            return False, leads
    return True, leads


@inner()
def _merge(state, half, option, links):
    """Merges the node of a half edge into the other end, whose options decide it: DONE, or FULL before it began."""
    node, into = state.end[half], state.end[half ^ 1]
    count, pool, top = state.count[into], state.pool, state.top
    if top[POOL] + _needed(state, node, into) > len(pool):
        return FULL
    table, own, its = strides(state, half)
    for b in range(count):
        for a in range(state.count[node]):
            if pool[table + a * own + b * its] < np.inf:
                option[b] = a
    at = top[LOG]
    state.log[at], state.log[at + 1], state.log[at + 2] = node, into, count
    for b in range(count):
        paid = pool[table + option[b] * own + b * its] + state.cost[state.first[node] + option[b]]
        state.cost[state.first[into] + b] += paid
        state.log[at + 3 + 2 * b] = state.label[state.first[into] + b]
        state.log[at + 4 + 2 * b] = state.label[state.first[node] + option[b]]
    top[LOG] = at + 3 + 2 * count
    part(state, half // 2)
    touch(state, into)
    _move_edges(state, node, into, option, links)
    _move_lives(state, node, into, option)
    state.count[node] = 0
    return DONE


@inner()
def _needed(state, node, into):
    """Entries of the pool that a merge takes at most."""
    count, needed = state.count[into], 0
    if count > state.count[node]:
        half = state.half[node]
        while half >= 0:
            needed += count * state.count[state.end[half ^ 1]]
            half = state.follower[half]
        needed += count * state.lives[node]
    return needed


@inner()
def _move_edges(state, node, into, option, links):
    """Moves all edges of a node to another one: of `into`, option b stands for option[b] of the node."""
    pool, count = state.pool, state.count[into]
    marked = state.degree[into] <= 4 * state.degree[node]
    if marked:
        half = state.half[into]
        while half >= 0:
            links[state.end[half ^ 1]] = half
            half = state.follower[half]
    half = state.half[node]
    while half >= 0:
        after, other = state.follower[half], state.end[half ^ 1]
        table, own, its = strides(state, half)
        columns = state.count[other]
        existing = links[other] if marked else find(state, other, into)
        if existing >= 0:
            to, to_own, to_its = strides(state, existing)
            for b in range(count):
                for c in range(columns):
                    pool[to + b * to_own + c * to_its] += pool[table + option[b] * own + c * its]
            unlink(state, half)
            unlink(state, half ^ 1)
            state.end[half] = state.end[half ^ 1] = -1
            touch(state, into)
        else:
            new_own, new_its = (columns, 1) if half % 2 == 0 else (1, count)
            moved = np.empty(count * columns)
            for b in range(count):
                for c in range(columns):
                    moved[b * new_own + c * new_its] = pool[table + option[b] * own + c * its]
            if count > state.count[node]:
                table = state.table[half // 2] = state.top[POOL]
                state.top[POOL] += count * columns
            for at in range(count * columns):
                pool[table + at] = moved[at]
            unlink(state, half)
            link(state, half, into)
        touch(state, other)
        half = after
    if marked:
        half = state.half[into]
        while half >= 0:
            links[state.end[half ^ 1]] = -1
            half = state.follower[half]


@inner()
def _move_lives(state, node, into, option):
    """Moves all lives of a node to another one."""
    pool, count = state.pool, state.count[into]
    life, moved = state.life[node], np.empty(count)
    while life >= 0:
        after, usage = state.later_life[life], state.usage[life]
        for b in range(count):
            moved[b] = pool[usage + option[b]]
        if count > state.count[node]:
            state.usage[life] = state.top[POOL]
            state.top[POOL] += count
        for b in range(count):
            pool[state.usage[life] + b] = moved[b]
        state.later_life[life], state.life[into] = state.life[into], life
        state.lives[into] += 1
        life = after
    state.life[node], state.lives[node] = -1, 0


@inner()
def _compare(state, node):
    """Forbids each option that another one beats whatever the neighbours choose."""
    count, first = state.count[node], state.first[node]
    if count**2 > LARGEST_COMPARISON:
        return
    half = state.half[node]
    while half >= 0:
        if count**2 * state.count[state.end[half ^ 1]] > LARGEST_COMPARISON:
            return
        half = state.follower[half]
    held = moments(state, node)
    kept = np.ones(count, np.bool_)
    for a in range(count - 1, -1, -1):  # of options that beat each other, the first stays
        for b in range(count):
            if b != a and kept[b] and _beats(state, node, first, b, a, held):
                kept[a] = False
                break
    for a in range(count):
        if not kept[a]:
            keep(state, node, kept)
            break


@inner()
def _beats(state, node, first, option, other, held):
    """Whether an option costs and holds no more than another one, whatever the neighbours choose."""
    for moment in range(len(held)):
        if held[moment, option] > held[moment, other]:
            return False
    worse = state.cost[first + option] - state.cost[first + other]
    half = state.half[node]
    while half >= 0:
        table, own, its = strides(state, half)
        most = -np.inf
        for b in range(state.count[state.end[half ^ 1]]):
            theirs = state.pool[table + other * own + b * its]
            if theirs < np.inf:
                most = max(most, state.pool[table + option * own + b * its] - theirs)
        worse += most
        if worse == np.inf:
            return False
        half = state.follower[half]
    return worse <= 0.0
