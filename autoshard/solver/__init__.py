"""The combinatorial core: a `Problem` of plain arrays in, a `Solution` with a proven bound out. Never imports JAX."""

from autoshard.solver.problem import Edge, ForbiddenError, InfeasibleError, Live, Problem, Solution
from autoshard.solver.progress import Progress
from autoshard.solver.searches.search_run import SearchRun
from autoshard.solver.searches.table import SEARCHES
from autoshard.solver.solve import solve

__all__ = [
    "SEARCHES",
    "Edge",
    "ForbiddenError",
    "InfeasibleError",
    "Live",
    "Problem",
    "Progress",
    "SearchRun",
    "Solution",
    "solve",
]
