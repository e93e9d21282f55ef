"""A `Problem` in, a verified `Solution` out.

What repeats itself is solved as one first, if the method says so. Then the problem is simplified, and its parts go
through the table of algorithms (`method.py`), as `run.py` has it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import replace

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import checks_kinds
from autoshard.solver.incumbent import least_sum
from autoshard.solver.infeasibility import infeasible_error, late_error
from autoshard.solver.local_search.reduce_memory import leaner_choice
from autoshard.solver.method import USUAL, Method
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.progress import Progress
from autoshard.solver.run import NoChoice, SolverRun
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.runtime.clock import SearchTimeout
from autoshard.solver.searches.search_run import Search
from autoshard.solver.searches.table import algorithm_of
from autoshard.solver.settings import PROVEN, Goal
from autoshard.solver.verify import OPTIMAL_GAP, check

SECONDS = 60.0  # to spend, if nothing else is asked for


@checks_kinds("problem", "time_limit", "iterations", "seed", "threads", "progress")
def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    iterations: int | None = None,
    seed: int = 0,
    threads: int | None = None,
    goal: Goal = PROVEN,
    method: Method = USUAL,
    progress: Callable[[Progress], None] | None = None,
    budget: Budget | None = None,
    search: str | Search | None = None,
) -> Solution:
    """The cheapest choice within the memory limit, and how far from it any other could be.

    When time runs out, or the user presses Ctrl-C, the best choice so far is returned with the bound proven so far.
    It costs no more than the first option of every node, if that one fits.

    >>> import numpy as np
    >>> from autoshard.solver.problem import Edge
    >>> edge = Edge(0, 1, np.array([[5.0, 0.0], [0.0, 5.0]]))
    >>> solve(Problem((np.array([0.0, 1.0]), np.array([0.0, 3.0])), (edge,), (), None))
    Solution(choice=(1, 0), cost=1.0, bound=1.0, status='optimal')

    Args:
        time_limit: seconds to spend, what follows the search included; None: 60, or as long as the iterations take. The
            search ends by the work in it, before that unless the machine is busy: the same problem and time limit give
            the same solution. Only a problem for compiled code without a `budget` is searched until time is up.
        iterations: how much to search: rounds of a large problem, each of which takes about half a second of every
            core, and looks of HiGHS at whether to stop. The same problem, seed and iterations give the same solution,
            however busy the machine is and with however many threads, unless a time limit ends the search.
        seed: of the random numbers inside. The same problem and seed give the same optimal solution in any process.
        threads: that search side by side where a problem is large; None: one per core.
        goal: when a choice is good enough; by default when it is proven to be optimal.
        method: the search algorithms in their order, and the sizes of problems that they are for.
        progress: told what is known when that changes, when the solver turns to something else, and twice a second.
        budget: what may be spent, instead of a time limit, by this search and others.
        search: one of the published searches, by its name in `SEARCHES`, or a function like them, instead of `method`.
            Presolve comes before it all the same. Where it finds nothing that fits, the choice that holds the least is
            returned, if that fits.

    Raises:
        InfeasibleError: nothing fits in memory; it carries the smallest limit that would do.
        SolverError: every choice is forbidden, or none was found in time; or there is no search of that name.
        ArgumentError: an argument is of the wrong kind, or negative.
        KeyboardInterrupt: Ctrl-C, before any choice was found.
    """
    for name, value, least in (("time_limit", time_limit, 0), ("iterations", iterations, 0), ("threads", threads, 1)):
        if value is not None and not value >= least:
            raise ArgumentError(f"{name}={value!r}; {least} or more is needed")
    if time_limit is None:
        time_limit = usual_limit(iterations)
    if problem.limit == math.inf:  # no limit at all: an infinite room at a price of 0 would be worth 0 * inf
        problem = replace(problem, limit=None, checked=True)
    counts_work = budget is not None or search is not None
    if search is not None:
        method = Method(algorithms=(algorithm_of(search),))
    budget = budget or Budget.of(time_limit)
    run = SolverRun(
        problem,
        seed=seed,
        threads=threads or _cores(),
        budget=budget,
        iterations=iterations,
        counts_work=counts_work,
        goal=goal,
        sizes=method.sizes,
        algorithms=method.algorithms,
        progress=progress,
    )
    incumbent = run.incumbent
    try:
        incumbent.prove(least_sum(problem))
        run.begin()
        run.clock.check()
        if not (method.repeated_nodes and method.repeated_nodes.improve(incumbent, run)):
            run.solve(incumbent, bounds_pay=True)
            if goal.prefers_lean:
                _take_leaner(run)
    except SearchTimeout:
        pass
    except KeyboardInterrupt:
        budget.interrupt()
        if incumbent.choice is None:
            raise
    except NoChoice:
        raise infeasible_error(run) from None
    finally:
        incumbent.disconnect()
    if incumbent.choice is None:
        spent = f"{time_limit:g} s" if iterations is None else f"{iterations} iterations"
        raise late_error(problem, spent, incumbent.bound)
    seconds = run.report.finish()
    solution = Solution(incumbent.choice, incumbent.cost, 0.0, "feasible", seconds)
    solution = with_bound(solution, incumbent.bound)
    check(problem, solution)
    return solution


def usual_limit(iterations: int | None) -> float:
    """Seconds to spend where nobody says how many: as long as it takes, if iterations are counted."""
    return SECONDS if iterations is None else math.inf


def with_bound(solution: Solution, bound: float) -> Solution:
    """The solution with this proven bound, which says no more than what it costs, and the status that follows."""
    bounded = replace(solution, bound=min(bound, solution.cost))
    return replace(bounded, status="optimal" if bounded.gap <= OPTIMAL_GAP else "feasible")


def _take_leaner(run: SolverRun) -> None:
    """Takes a choice that costs the same and holds less, unless the goal accepts the best one alone."""
    incumbent = run.incumbent
    if incumbent.choice is None:
        return
    lean = leaner_choice(incumbent.problem, incumbent.choice, run.seed)
    if run.clock.accepts is None or run.clock.is_rejected or run.clock.accepts(lean):
        incumbent.replace(lean)


def _cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
