"""What a choice costs and holds, recomputed from the `Problem` alone. Shares no code with any solver."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from autoshard.errors import SolverError
from autoshard.solver.problem import Problem, Solution

OPTIMAL_GAP = 1e-6  # a solution this close to its bound, relatively, is called optimal
ROUNDING = 1e-12  # relative; what float sums of costs or of fractional bytes may be off by


def verify(problem: Problem, choice: Sequence[int]) -> tuple[float, float]:
    """Cost and peak bytes of a choice; the cost is inf where the choice is forbidden.

    >>> import numpy as np
    >>> verify(Problem((np.array([1.0, 2.0]),), (), (), None), (1,))
    (2.0, 0.0)

    Raises:
        SolverError: the choice does not name one option of every node.
    """
    if len(choice) != len(problem.costs):
        raise SolverError(f"{len(choice)} options are chosen for {len(problem.costs)} nodes")
    for node, option in enumerate(choice):
        options = len(problem.costs[node])
        if not 0 <= option < options:
            raise SolverError(f"{problem.name(node)} has {options} options; option {option} was chosen")
    nodes = [costs[option] for costs, option in zip(problem.costs, choice, strict=True)]
    edges = [edge.costs[choice[edge.i], choice[edge.j]] for edge in problem.edges]
    change: dict[int, float] = defaultdict(float)  # program point -> bytes more than at the point before
    for live in problem.lives:
        usage = float(live.usage[choice[live.node]])
        change[live.start] += usage
        change[live.end] -= usage
    held = peak = 0.0
    for point in sorted(change):
        held += change[point]
        peak = max(peak, held)
    return math.fsum([*nodes, *edges]), peak


def fits(peak: float, limit: float | None) -> bool:
    """Whether this many bytes are within the limit."""
    return limit is None or peak <= limit * (1 + ROUNDING)


def check(problem: Problem, solution: Solution) -> None:
    """Raises SolverError unless cost, memory, bound and status of the solution hold together."""
    cost, peak = verify(problem, solution.choice)
    if not math.isfinite(cost):
        raise SolverError("the solution makes a forbidden choice")
    if not math.isclose(cost, solution.cost, rel_tol=ROUNDING):
        raise SolverError(f"the solution says that it costs {solution.cost!r}; it costs {cost!r}")
    if not fits(peak, problem.limit):
        raise SolverError(f"the solution holds {peak:.0f} bytes; the limit is {problem.limit:.0f}")
    if not solution.bound <= cost:
        raise SolverError(f"the solution costs {cost!r}, less than its proven bound {solution.bound!r}")
    if solution.status == "optimal" and not solution.gap <= OPTIMAL_GAP:
        raise SolverError(f"the solution is called optimal; its cost {cost!r} is not proven beyond {solution.bound!r}")
