"""Aceso's search: the bottleneck of a choice is relieved, again and again, over several hops.

Liu et al., "Aceso: Efficient parallel DNN training through iterative bottleneck alleviation", EuroSys 2024, sections 3
and 4.

Kept: bottlenecks are taken one after the other, worst first; one is relieved by a change there or beside it; a change
that makes things worse may be followed by up to `hops` more; a choice that has been seen is not gone to again.
Different: a bottleneck is the node that pays most, its edges included, or where memory is short the point that is
fullest; changes are options of the node or of a neighbour, where Aceso has a table of primitives.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.position import CHANGE_ROUNDING, Position
from autoshard.solver.searches.search_run import SearchRun


@dataclass(frozen=True)
class AcesoSettings:
    """How far a bottleneck is followed."""

    hops: int = 7  # changes in a row before one has to pay; Aceso's number
    shaken: float = 0.3  # of the nodes at most: what a round changes at random of the best choice
    afresh: int = 3  # every so many rounds one begins at a random choice


SETTINGS = AcesoSettings()


def aceso(problem: Problem, run: SearchRun) -> None:
    """Rounds in which bottlenecks are relieved until none can be."""
    at = Position(problem, run)
    keys = [run.rng.integers(1 << 62, size=size) for size in at.sizes]  # a choice is known by the xor of its options'
    seen: set[int] = set()
    for turn in run.rounds():
        if turn:
            at.start(_shaken(at, run) if run.choice is not None and turn % SETTINGS.afresh else at.random_choice())
        at.repair()
        at.offer()
        while _relieve(at, keys, seen):
            at.offer()


def _shaken(at: Position, run: SearchRun) -> list[int]:
    """The best choice with some of its nodes at random."""
    assert run.choice is not None, "a choice is known"
    moved = run.rng.random(len(at.sizes)) < SETTINGS.shaken * run.rng.random()
    return np.where(moved, at.random_choice(), run.choice).tolist()


def _relieve(at: Position, keys: list[np.ndarray], seen: set[int]) -> bool:
    """Goes through the nodes, those that pay most first, and relieves them; whether any was."""
    paid = {node: float(at.option_costs(node)[at.choice[node]]) for node in at.decided}
    relieved = False
    for node in sorted(at.decided, key=lambda node: -paid[node]):
        relieved |= _follow(at, node, keys, seen)
    return relieved


def _follow(at: Position, node: int, keys: list[np.ndarray], seen: set[int]) -> bool:
    """Up to so many hops from a bottleneck, kept if they make the choice cheaper; whether they do."""
    before, cost = at.choice.tolist(), at.cost
    here = int(np.bitwise_xor.reduce([key[option] for key, option in zip(keys, before, strict=True)]))
    for _ in range(SETTINGS.hops):
        found = _best_change(at, node, here, keys, seen)
        if found is None:
            break
        added, other, option = found
        here ^= int(keys[other][at.choice[other]]) ^ int(keys[other][option])
        seen.add(here)
        at.change(other, option, added)
        if at.cost < cost - CHANGE_ROUNDING * abs(cost):
            return True
        paid = [(float(at.option_costs(j)[at.choice[j]]), j) for j in (other, *at.tables[other]) if at.sizes[j] > 1]
        node = max(paid)[1]
    at.start(before)
    return False


def _best_change(
    at: Position, node: int, here: int, keys: list[np.ndarray], seen: set[int]
) -> tuple[float, int, int] | None:
    """The cheapest change at a node or beside it that leads to a choice not seen: added cost, node, option."""
    best = None
    for other in (node, *at.tables[node]):
        costs = at.option_costs(other)
        now = int(at.choice[other])
        for option in np.argsort(costs, kind="stable").tolist():
            added = float(costs[option] - costs[now])
            if best is not None and added >= best[0]:
                break
            known = option == now or here ^ int(keys[other][now]) ^ int(keys[other][option]) in seen
            if not known and at.excess_change(other, option) <= 0:
                best = added, other, option
                break
    return best
