"""A problem that tactics have left, and the same without collectives that their schemes do not name, in; what a step
can do without of these, out.

Some steps cannot do with the collectives of a published scheme. They get as few others as there can be: a search counts
the places, and one with the fewest is taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autoshard.model.formulation import Formulation
from autoshard.solver import solve
from autoshard.solver.problem import Edge, Problem

_COUNTING_SECONDS = 10.0  # for the fewest places; what is found by then will do


@dataclass(frozen=True)
class Exceptions:
    """A problem that forbids the collectives of no scheme but in some places, and these."""

    problem: Problem
    nodes: tuple[int, ...]  # what communicates otherwise, or reads what is brought there otherwise


def exceptions(placed: Problem, strict: Problem) -> Exceptions:
    """The problem with everything that `strict` forbids, but in as few places as a search has found.

    Args:
        placed: it forbids what is no matter of collectives; it has a choice.
        strict: the same with further options and edges that forbid.

    Raises:
        SolverError: no choice was found in time.
    """
    added = strict.edges[len(placed.edges) :]
    counting = Problem(
        tuple(
            np.where(np.isinf(old), np.inf, np.isinf(new).astype(float))
            for old, new in zip(placed.costs, strict.costs, strict=True)
        ),
        (
            *(
                Edge(e.i, e.j, np.where(np.isinf(e.costs), np.inf, 0.0))
                for e in placed.edges
                if np.isinf(e.costs).any()
            ),
            *(Edge(e.i, e.j, np.isinf(e.costs).astype(float)) for e in added),
        ),
        (),
        None,
    )
    choice = solve(counting, time_limit=_COUNTING_SECONDS).choice
    freed = {node for node, costs in enumerate(strict.costs) if np.isinf(costs[choice[node]])}
    kept = tuple(edge for edge in added if np.isfinite(edge.costs[choice[edge.i], choice[edge.j]]))
    readers = {edge.j for edge in added if np.isinf(edge.costs[choice[edge.i], choice[edge.j]])}
    costs = tuple(
        old if node in freed else new for node, (old, new) in enumerate(zip(placed.costs, strict.costs, strict=True))
    )
    problem = replace(placed, costs=costs, edges=(*placed.edges, *kept), checked=True)
    return Exceptions(problem, tuple(sorted(freed | readers)))


def places_of(formulation: Formulation, nodes: tuple[int, ...]) -> list[str]:
    """Where nodes stand in the user's code, each line once; arguments by name."""
    arguments = formulation.program.arguments
    names = {i: value.name for i, value in enumerate(arguments)}
    names |= {formulation.group_node(one): str(one.equations[0].source or "unknown line") for one in formulation.groups}
    names |= {
        shared.node: str(formulation.program.values[value].source or "unknown line")
        for value, shared in formulation.shared.items()
    }
    return list(dict.fromkeys(names[node] for node in nodes))
