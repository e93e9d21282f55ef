"""A choice of a large `Problem` in, a better one out: large neighbourhood search with the integer program.

Shaw, "Using constraint programming and local search methods to solve vehicle routing problems", 1998. All nodes keep
their options but those near a random one, which the integer program sets anew, memory and all. How many are set anew
follows how long that takes.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence

import numpy as np

from autoshard.errors import SolverError
from autoshard.solver.arrays import Graph
from autoshard.solver.local_search.settings import NEIGHBOURHOODS
from autoshard.solver.presolve.simplify import simplify
from autoshard.solver.presolve.simplify_large import reduce
from autoshard.solver.problem import Problem


class Neighbourhoods:
    """Neighbourhoods of a problem's choices, one after the other."""

    def __init__(self, problem: Problem, graph: Graph, rng: np.random.Generator, *, counted: bool = False):
        self.problem, self.graph, self.rng, self.counted = problem, graph, rng, counted
        self.size = float(min(NEIGHBOURHOODS.first_nodes, len(problem.costs)))

    def improve(
        self, choice: Sequence[int], allowed: np.ndarray, seconds: float, stop: threading.Event
    ) -> tuple[int, ...] | None:
        """The best choice in a neighbourhood of one that fits; None if it was not found.

        Args:
            allowed: per option of all nodes, whether a better choice can have it.
            seconds: to spend, at most, about; unless looks are counted.
            stop: ends it early.
        """
        from autoshard.solver.exact.integer_program import cheapest  # takes a second to import

        limit = math.inf if self.counted else min(NEIGHBOURHOODS.seconds, seconds)
        started, looks = time.monotonic(), 0

        def look() -> bool:
            nonlocal looks
            looks += 1
            return self.counted and looks >= NEIGHBOURHOODS.looks

        def check() -> None:
            if stop.is_set():
                raise SolverError("stopped")

        free = near(self.graph, int(self.rng.integers(len(choice))), int(self.size), self.rng)
        offsets = self.graph.offsets
        options: dict[int, Sequence[int] | np.ndarray] = {node: [option] for node, option in enumerate(choice)}
        for node in free:
            options[node] = np.union1d(np.flatnonzero(allowed[offsets[node] : offsets[node + 1]]), choice[node])
        try:
            small = simplify(self.problem.restrict(options), tick=check, reduce=reduce)
        except SolverError:
            return None
        outcomes = []
        for part in small.parts:
            if stop.is_set():
                return None
            left = max(0.0, limit - (time.monotonic() - started))
            outcomes.append(cheapest(part, None, time_limit=left, seed=0, stop=stop, look=look))
        late = looks >= NEIGHBOURHOODS.looks if self.counted else time.monotonic() - started > limit
        self.size = max(
            NEIGHBOURHOODS.least_nodes,
            min(len(choice), self.size * (NEIGHBOURHOODS.shrinkage if late else NEIGHBOURHOODS.growth)),
        )
        choices = [outcome.choice for outcome in outcomes if outcome.choice is not None]
        return None if len(choices) < len(outcomes) else small.invert(choices)


def near(graph: Graph, root: int, size: int, rng: np.random.Generator) -> list[int]:
    """A node and those nearest to it, in random order among equals."""
    found, seen = [root], {root}
    for node in found:
        earlier = graph.earlier[graph.earlier_starts[node] : graph.earlier_starts[node + 1]]
        later = graph.later[graph.later_starts[node] : graph.later_starts[node + 1]]
        for other in rng.permutation(np.concatenate([graph.left[earlier], graph.right[later]])).tolist():
            if other not in seen:
                seen.add(other)
                found.append(other)
        if len(found) >= size:
            break
    return found[:size]
