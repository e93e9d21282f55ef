"""The combinatorial core: a `Problem` of plain arrays in, a `Solution` with a proven bound out. Never imports JAX."""

from autoshard.solver.problem import Problem, Solution
from autoshard.solver.progress import Progress
from autoshard.solver.solve import solve

__all__ = ["Problem", "Progress", "Solution", "solve"]
