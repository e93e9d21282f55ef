"""A formulation and what a plan says in; the choice that the plan is, and the cheapest choices near it, out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping

from autoshard.model.formulation import Formulation
from autoshard.model.search_policy import CLOSE_GAP
from autoshard.plans.annotations import Annotations
from autoshard.plans.plan import PlanData
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.run import count_options
from autoshard.solver.verify import OPTIMAL_GAP

Solve = Callable[[Problem], Solution | None]  # None: there is none, or none was found in time
Options = Mapping[int, list[int]]  # node -> options

# How far from the nodes that have to change others may change with them, in edges. An update of a parameter reads its
# gradient and its moments; the products that make the gradient are three edges away.
EDGE_DISTANCES = (3, 8)
_FEW_OPTIONS = 4000  # options: such a problem is solved as far as it goes


def agreeing(formulation: Formulation, annotations: Annotations) -> dict[int, list[int]]:
    """Per node, its options that are what the annotations say; none where the formulation has no such option."""
    homes, copies, program = annotations.homes, annotations.copies, formulation.program
    found: dict[int, list[int]] = {}
    for i, (value, options) in enumerate(zip(program.arguments, formulation.arguments, strict=True)):
        home = homes.get(value.id)
        seen = copies.get(value.id, home)
        found[i] = [o for o, kept in enumerate(options) if kept.home == home and kept.copy == seen]
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        made = tuple(homes.get(one.value.id) for one in group.outputs)
        wants = tuple(annotations.wants.get((use.equation.index, use.operand)) for use in group.uses)
        found[formulation.group_node(group)] = [
            o
            for o, strategy in enumerate(priced.strategies)
            if group.is_idle or (strategy.output_layouts == made and strategy.operand_layouts == wants)
        ]
    for id, shared in formulation.shared.items():
        layout = copies.get(id, homes.get(id))
        found[shared.node] = [o for o, one in enumerate(shared.layouts) if one == layout]
    return found


def near(formulation: Formulation, before: Options, allowed: Options, solve: Solve) -> Iterator[Solution]:
    """Solutions in which ever more nodes may choose anew.

    Args:
        before: per node the options among which it stays.
        allowed: of some nodes the only options that they may choose now; their neighbours may choose anew with them.
        solve: solves problems of the same nodes.
    """
    problem = formulation.problem.restrict(allowed)
    away = _distances(problem, allowed)
    for reach in EDGE_DISTANCES:
        held = {node: options for node, options in before.items() if away.get(node, reach + 1) > reach and options}
        found = solve(problem.restrict(held))
        if found is not None:
            yield found


def enough_gap(problem: Problem, plan: PlanData) -> float:
    """The gap with which a plan near another is good enough: that of the other, or of the planner."""
    return max(plan.gap if plan.bound > 0 else 0.0, OPTIMAL_GAP if is_small(problem) else CLOSE_GAP)


def is_small(problem: Problem) -> bool:
    """Whether the whole is solved as fast as a part of it."""
    return count_options(problem) <= _FEW_OPTIONS


def _distances(problem: Problem, origins: Collection[int]) -> dict[int, int]:
    """Edges from the nearest of these nodes to each that is reached."""
    neighbours: dict[int, list[int]] = defaultdict(list)
    for edge in problem.edges:
        neighbours[edge.i].append(edge.j)
        neighbours[edge.j].append(edge.i)
    found = dict.fromkeys(origins, 0)
    ring = list(found)
    while ring:
        ring = list(dict.fromkeys(n for node in ring for n in neighbours[node] if n not in found))
        found |= dict.fromkeys(ring, max(found.values(), default=0) + 1)
    return found
