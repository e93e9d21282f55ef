"""The problems of several programs in, one problem whose choices lay shared arguments alike out.

The nodes of all programs stand one behind the other, their costs times the programs' weights. Of two nodes of one
shared argument an edge forbids all pairs of options with different homes. What copies of the argument a program makes
stays its own business. Programs run one at a time, so each has program points of its own, and the one limit holds for
each program by itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.layout import Layout
from autoshard.model.formulation import Formulation
from autoshard.solver.problem import Edge, Live, Problem

Shared = Sequence[tuple[int, int]]  # one argument of several programs: (program, argument) of each


@dataclass(frozen=True, eq=False)
class JointProblem:
    """One problem for several programs, and the way back to each."""

    problem: Problem
    first_nodes: tuple[int, ...]  # of each program, and one past the last node

    def choices(self, choice: Sequence[int]) -> list[tuple[int, ...]]:
        """The choice of each program."""
        return [tuple(choice[start:end]) for start, end in itertools.pairwise(self.first_nodes)]


def joint_problem(
    formulations: Sequence[Formulation],
    problems: Sequence[Problem],
    weights: Sequence[float],
    shared: Sequence[Shared],
    limit: float | None,
) -> JointProblem:
    """The problem of all programs.

    Args:
        formulations: one per program.
        problems: of the same nodes and options, with the costs that count.
        weights: how much a second of each program counts.
        shared: the arguments that several programs take.
        limit: bytes per device that each program may use.
    """
    first_nodes = tuple(itertools.accumulate((len(one.costs) for one in problems), initial=0))
    points = itertools.accumulate((len(one.program.equations) + 2 for one in formulations), initial=0)
    costs: list[np.ndarray] = []
    edges: list[Edge] = []
    lives: list[Live] = []
    names: list[str] = []
    for problem, weight, node, point in zip(problems, weights, first_nodes, points, strict=False):
        costs += [_weighted(one, weight) for one in problem.costs]
        edges += [Edge(one.i + node, one.j + node, _weighted(one.costs, weight)) for one in problem.edges]
        lives += [
            replace(one, node=one.node + node, start=one.start + point, end=one.end + point) for one in problem.lives
        ]
        names += problem.names
    for places in shared:
        for (program, argument), (other, another) in itertools.pairwise(places):
            homes = [option.home for option in formulations[program].arguments[argument]]
            others = [option.home for option in formulations[other].arguments[another]]
            edges.append(Edge(first_nodes[program] + argument, first_nodes[other] + another, _alike(homes, others)))
    return JointProblem(
        Problem(tuple(costs), tuple(edges), tuple(lives), limit, tuple(names), checked=True), first_nodes
    )


def homes_of(formulation: Formulation, choice: Sequence[int]) -> Mapping[int, Layout]:
    """How each argument lies under a choice."""
    return {i: options[choice[i]].home for i, options in enumerate(formulation.arguments)}


def _weighted(costs: np.ndarray, weight: float) -> np.ndarray:
    """What is forbidden stays forbidden, however little the program counts."""
    return np.where(np.isinf(costs), np.inf, costs * weight) if weight else np.where(np.isinf(costs), np.inf, 0.0)


def _alike(some: Sequence[Layout], others: Sequence[Layout]) -> np.ndarray:
    return np.array([[0.0 if one == other else np.inf for other in others] for one in some])
