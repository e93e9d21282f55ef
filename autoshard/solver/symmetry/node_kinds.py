"""A `Problem` in, kinds of nodes that look alike out.

Layers of a model come out as nodes with the same costs, tied to neighbours alike by the same tables. Nodes are told
apart by what is around them, so many edges far (colour refinement).
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.tables import summed


class NodeKinds:
    """The nodes of a problem, with what tells them apart numbered: equal costs, lives and tables have one number."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._numbers: dict[object, int] = {}
        self._known: dict[int, int] = {}
        pairs = summed(problem.edges)
        self.ends = np.array([*pairs], dtype=np.int64).reshape(-1, 2)  # of edges: nodes, the lower number first
        self.table = np.array([self._number(table) for table in pairs.values()], dtype=np.int64)  # edge -> its number
        self.tables = dict(zip(self.table.tolist(), pairs.values(), strict=True))  # number -> table
        self._kept = [*pairs.values()]  # so that no other array gets their id

    def numbers(self, far: int, *, held: bool) -> tuple[np.ndarray, np.ndarray]:
        """Node -> number of its kind, in order of appearance; and the same for nodes that look one edge less far.

        Nodes of one kind have the same costs, and by the same tables as many neighbours of each of the kinds that look
        less far.

        Args:
            held: whether they also hold the same in memory, as long as others live or all the time.
        """
        usages: list[list[tuple]] = [[] for _ in self.problem.costs]
        for live in self.problem.lives if held else ():
            usages[live.node].append((self._number(live.usage), live.start == 0))
        seen: dict[object, int] = {}
        alone = ((self._number(costs), *sorted(own)) for costs, own in zip(self.problem.costs, usages, strict=True))
        by_self = [seen.setdefault(one, len(seen)) for one in alone]
        before = np.array(by_self, dtype=np.int64)
        sides = 2 * self.table[:, None] + [0, 1]  # [edge, end]: the table as it is seen from there
        for _ in range(far - 1):
            around = np.zeros(len(before), dtype=np.uint64)
            np.add.at(around, self.ends, _mixed(_mixed(sides) + before[self.ends[:, ::-1]].astype(np.uint64)))
            before = np.unique(_mixed(_mixed(before) + around), return_inverse=True)[1]
        beside: list[list[tuple[int, int]]] = [[] for _ in self.problem.costs]
        for end in (0, 1):
            rows = np.column_stack([self.ends[:, end], sides[:, end], before[self.ends[:, 1 - end]]])
            for node, side, other in rows.tolist():
                beside[node].append((side, other))
        kinds: dict[object, int] = {}  # mixed numbers may be equal by chance; what matters here is not left to it
        described = zip(by_self, before.tolist(), beside, strict=True)
        kind = [kinds.setdefault((one, own, *sorted(around)), len(kinds)) for one, own, around in described]
        return np.array(kind, dtype=np.int64), before

    def _number(self, array: np.ndarray) -> int:
        """Equal for equal arrays; many are one object."""
        if id(array) not in self._known:
            content = array.shape, array.dtype.str, np.ascontiguousarray(array).tobytes()
            self._known[id(array)] = self._numbers.setdefault(content, len(self._numbers))
        return self._known[id(array)]


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Numbers that look random, the same for the same (Steele et al., "Fast splittable pseudorandom...", 2014)."""
    mixed = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
