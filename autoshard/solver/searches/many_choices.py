"""What many choices cost and hold, all at once: for searches that work with populations and samples."""

from __future__ import annotations

import numpy as np

from autoshard.solver.arrays import graph_of, memory_of
from autoshard.solver.problem import Problem
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun

SECONDS_PER_ENTRY = 4e-9  # of a quiet core: one node, edge or life of one choice
SECONDS_PER_CALL = 5e-5  # of the same: the calls of NumPy for all choices at once


class ManyChoices:
    """Costs and bytes over the limit of the rows of an array of choices.

    Attributes:
        at: a `Position` of the problem, for what is done to single choices.
        sizes: options of each node: int64[nodes].
        starts: where the options of each node begin if those of all stand in a row: int64[nodes + 1].
    """

    def __init__(self, problem: Problem, run: SearchRun):
        self.run, self.at = run, Position(problem, run)
        graph, self._memory = graph_of(problem), memory_of(problem)
        self.sizes, self.starts = np.array(self.at.sizes, dtype=np.int64), graph.offsets
        self._left, self._right = graph.left, graph.right
        self._table_starts, self._widths = graph.table_offsets[:-1], self.sizes[graph.right]
        self._costs = np.minimum(graph.costs, self.at.never)
        self._tables = np.minimum(graph.tables, self.at.never)

    def costs(self, choices: np.ndarray) -> np.ndarray:
        """What each row of `choices`, int64[rows, nodes], costs; `never` and more where something is forbidden."""
        rows = len(choices)
        self.run.spend(SECONDS_PER_CALL + SECONDS_PER_ENTRY * rows * (len(self.sizes) + len(self._left)))
        cells = self._table_starts + choices[:, self._left] * self._widths + choices[:, self._right]
        return self._costs[self.starts[:-1] + choices].sum(axis=1) + self._tables[cells].sum(axis=1)

    def excess(self, choices: np.ndarray) -> np.ndarray:
        """Bytes over the limit of each row, summed over pressure points; 0 where it fits."""
        memory, rows, points = self._memory, len(choices), len(self._memory.room)
        if not points:
            return np.zeros(rows)
        self.run.spend(SECONDS_PER_CALL + SECONDS_PER_ENTRY * rows * (2 * len(memory.node) + points))
        usage = memory.usage[memory.usage_offsets[:-1] + choices[:, memory.node]].ravel()
        row = (points + 1) * np.arange(rows)[:, None]
        change = np.bincount((row + memory.start).ravel(), usage, rows * (points + 1))
        change -= np.bincount((row + memory.end).ravel(), usage, rows * (points + 1))
        held = change.reshape(rows, -1)[:, :-1].cumsum(axis=1)
        return np.maximum(held - memory.room, 0.0).sum(axis=1)

    def offer_best(self, choices: np.ndarray, costs: np.ndarray, excess: np.ndarray) -> np.ndarray:
        """Offers the cheapest row that fits, or what a repair makes of the row that is least over the limit.

        Returns:
            The row, repaired: int64[nodes].
        """
        best = int(np.lexsort((costs, excess))[0])
        if excess[best] == 0 and self.run.cost <= costs[best] < self.at.never:
            return np.asarray(choices[best])
        self.at.start(choices[best].tolist())
        self.at.repair()
        self.at.offer()
        return self.at.choice.copy()

    def random(self, rows: int) -> np.ndarray:
        """Choices at random: int64[rows, nodes]."""
        return self.run.rng.integers(self.sizes, size=(rows, len(self.sizes)))
