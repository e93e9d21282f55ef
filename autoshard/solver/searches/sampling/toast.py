"""TOAST's search: Monte Carlo tree search over groups of nodes that must go together.

Alabed et al., "TOAST: Fast and scalable auto-partitioning based on principled static analysis", 2025, sections 3 and 4.

Kept: an analysis before the search finds what is split alike or resharded, and one decision is taken for all of it, so
that the tree is shallow. Different: TOAST sees dims of a program. A `Problem` has tables alone: nodes go together whose
edge costs most where their options do not agree. Conflicts are resolved by other groups: the first tree has few, and
each further one has more, down to single nodes.
"""

from __future__ import annotations

import itertools

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.sampling.tree_search import search_tree
from autoshard.solver.searches.search_run import SearchRun

SHARES = (0.1, 0.2, 0.4, 0.7, 1.0)  # groups per node, in trees that take turns
TIE_NOISE = 0.3  # of the logarithm of how strongly nodes are tied, in further trees


def toast(problem: Problem, run: SearchRun) -> None:
    """Trees over groups that take turns from few to many."""
    at = Position(problem, run)
    stake = at.at_stake
    for share, turn in zip(itertools.cycle(SHARES), run.rounds(), strict=False):
        groups = groups_together(at, max(1, round(share * len(stake))), TIE_NOISE if turn else 0.0)
        groups.sort(key=lambda group: -stake[group].sum())
        search_tree(at, [sorted(group, key=lambda node: -stake[node]) for group in groups], run, turn)


def groups_together(at: Position, count: int, noise: float) -> list[list[int]]:
    """The nodes in so many groups, joined along the edges that cost most where ends differ.

    Args:
        count: of groups; there are more where edges do not reach.
        noise: of the logarithms of what edges cost.
    """
    ties = []
    for node, tables in enumerate(at.tables):
        for other, table in tables.items():
            if other < node:
                apart = table.mean() - min(table.min(axis=0).mean(), table.min(axis=1).mean())
                ties.append((float(apart * np.exp(noise * at.rng.standard_normal())), node, other))
    root = list(range(len(at.sizes)))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = node = root[root[node]]
        return node

    left = len(root)
    for _, node, other in sorted(ties, reverse=True):
        if left <= count:
            break
        if (a := find(node)) != (b := find(other)):
            root[a] = b
            left -= 1
    groups: dict[int, list[int]] = {}
    for node in range(len(root)):
        groups.setdefault(find(node), []).append(node)
    return list(groups.values())
