"""Monte Carlo tree search: decisions on groups of nodes one after the other, the rest made up by what they imply.

A branch is a sequence of decisions. Each iteration goes down the tree where the upper confidence bound of the reward is
highest (Kocsis and Szepesvari, "Bandit based Monte-Carlo planning", ECML 2006), weighted by how cheap an option looks.
It adds one vertex, completes the choice, and hands the reward back along the branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun


@dataclass(frozen=True)
class TreeSettings:
    """A tree."""

    decisions: int = 40  # that stand in the tree; further groups take what looks cheapest
    exploration: float = 1.5  # weight of what was tried little
    iterations_per_option: float = 1.0  # of the groups in the tree
    least_iterations: int = 300  # of a tree, on top of that
    growth: float = 1.3  # factor of these numbers from one tree to the next, so that small trees are seen whole
    most_growth: float = 1e3  # of all trees together
    strays: float = 0.1  # share of nodes below the first tree that take an option by its prior, at most
    uniform: float = 0.1  # share of a prior that is the same for all options
    sharpness: float = 4.0  # of priors: how fast they fall, from the cheapest option to one of average cost


SETTINGS = TreeSettings()


@dataclass(eq=False)
class Vertex:
    """What is known of the options of one group after the same decisions."""

    prior: np.ndarray  # [options], sums to 1
    visits: np.ndarray  # [options]
    rewards: np.ndarray  # [options], sums over visits
    seen: np.ndarray  # [options]: whether all below is known
    below: dict[int, Vertex] = field(default_factory=dict)  # option -> the next group's


def search_tree(at: Position, groups: Sequence[Sequence[int]], run: SearchRun, turn: int) -> None:
    """Builds one tree and offers what comes of its branches.

    Args:
        groups: nodes that are decided together: the first one in the tree, the others by what looks cheapest then.
        turn: how many trees there were before. Further ones go astray, each to another degree, every other one to any
            option alike.
    """
    strays = run.rng.random() ** 2 if turn else SETTINGS.strays
    uniform = 1.0 if turn % 2 else SETTINGS.uniform
    options = sum(at.sizes[group[0]] for group in groups[: SETTINGS.decisions])
    growth = min(SETTINGS.growth**turn, SETTINGS.most_growth)
    iterations = int(growth * (SETTINGS.least_iterations + SETTINGS.iterations_per_option * options))

    def completed(left: Sequence[Sequence[int]], chosen: dict[int, int]) -> dict[int, int]:
        return chosen | _completed(at, left, chosen, run.rng.random() * strays, uniform)

    best, scale = np.inf, 0.0
    roots: dict[int, Vertex] = {}
    for iteration in range(1, iterations + 1):
        branch, chosen = _grown_branch(at, groups, roots, completed)
        at.start([chosen[node] for node in range(len(at.sizes))])
        at.repair()
        at.offer()
        cost = at.cost if at.excess == 0 else np.inf
        best = min(best, cost)
        above = min(cost - best, at.never) if np.isfinite(best) else at.never
        scale += (above - scale) / iteration
        reward = float(np.exp(-above / scale)) if scale > 0 else 1.0
        for vertex, option in branch:
            vertex.visits[option] += 1
            vertex.rewards[option] += reward
        if len(branch) == len(groups) and _is_all_seen(branch):
            return


def _grown_branch(
    at: Position,
    groups: Sequence[Sequence[int]],
    below: dict[int, Vertex],
    completed: Callable[[Sequence[Sequence[int]], dict[int, int]], dict[int, int]],
) -> tuple[list[tuple[Vertex, int]], dict[int, int]]:
    """The way down a tree by its most promising options, one vertex further than before; and the choice that it makes.

    Args:
        below: the root of the tree under 0, if there is one; changed.
        completed: gives the other groups their options.
    """
    chosen: dict[int, int] = {}
    branch: list[tuple[Vertex, int]] = []
    option = 0
    for depth, group in enumerate(groups):
        vertex = below.get(option)
        is_new = vertex is None and depth < SETTINGS.decisions
        if is_new:
            vertex = below[option] = _vertex(at, group[0], chosen)
        if vertex is None:
            return branch, completed(groups[depth:], chosen)
        option, below = _promising(vertex), vertex.below
        branch.append((vertex, option))
        chosen[group[0]] = option
        _follow(at, group, chosen)
        if is_new:
            return branch, completed(groups[depth + 1 :], chosen)
    return branch, chosen


def _is_all_seen(branch: Sequence[tuple[Vertex, int]]) -> bool:
    """Notes that the end of a branch is known; whether all of the tree is now."""
    is_seen = True
    for vertex, option in reversed(branch):
        vertex.seen[option] = is_seen
        is_seen = bool(vertex.seen.all())
    return is_seen


def _vertex(at: Position, node: int, chosen: dict[int, int]) -> Vertex:
    """The options of a node with priors by what they seem to cost after these decisions."""
    prior = _prior(at, at.prospects(node, chosen), SETTINGS.uniform)
    return Vertex(prior, np.zeros(len(prior)), np.zeros(len(prior)), np.zeros(len(prior), dtype=bool))


def _prior(at: Position, costs: np.ndarray, uniform: float) -> np.ndarray:
    """Probabilities of options, a share of them uniform, the rest falling with what they cost: [options]."""
    above = costs - costs.min()
    scale = above[above < at.never / 2].mean() / SETTINGS.sharpness
    prior = np.exp(-above / scale) if scale > 0 else (above == 0).astype(np.float64)
    return (1 - uniform) * prior / prior.sum() + uniform / len(prior)


def _promising(vertex: Vertex) -> int:
    """The option with the highest upper confidence bound, of those not seen to the end."""
    visits = vertex.visits
    mean = np.where(visits > 0, vertex.rewards / np.maximum(visits, 1), vertex.rewards.sum() / max(1.0, visits.sum()))
    bonus = SETTINGS.exploration * vertex.prior * np.sqrt(1 + visits.sum()) / (1 + visits)
    return int(np.where(vertex.seen, -np.inf, mean + bonus).argmax())


def _follow(at: Position, group: Sequence[int], chosen: dict[int, int]) -> None:
    """Lets the nodes of a group after the first take what looks cheapest."""
    for node in group[1:]:
        chosen[node] = int(at.prospects(node, chosen).argmin())


def _completed(
    at: Position, groups: Sequence[Sequence[int]], chosen: dict[int, int], strays: float, uniform: float
) -> dict[int, int]:
    """What these groups take after the decisions: what looks cheapest, or for some nodes one by its prior."""
    chosen = dict(chosen)
    for group in groups:
        for node in group:
            costs = at.prospects(node, chosen)
            is_stray = at.rng.random() < strays
            chosen[node] = int(at.rng.choice(len(costs), p=_prior(at, costs, uniform)) if is_stray else costs.argmin())
    return chosen
