"""Lower bounds for stages in a row, and the stages that reach them: dynamic programming, then best first.

The bound of one pipeline is the largest over its stages s of

    M (F + B + W)_s + after_s + sum over earlier stages t of (F + B + W)_t and their transfers there and back

with M microbatches. A stage cannot begin before the first microbatch has come through the stages before it, does all
of its own tasks one by one, and its last cotangent still goes back through those stages. This holds for every schedule
whose B is the whole backward pass, whatever its order. In others a stage may end with its Ws, which no stage waits
for. There earlier stages count with F and the transfers there alone; or else Ws are left out, of all stages.

The least bound over all cuts and sub-meshes follows from that of the stages that are left: f(i, p, r), with r stages
from layer i and position p on, is the least over the first of them of max(M work + after, passing + f(rest)),
with the seconds that pass in the first of them.
No enumeration of the largest stage is needed, as in Alpa (arXiv:2201.12023, section 5.2), since a stage's sum and its
maximum do not compete in this bound. Leaves of a best-first search come in the order of their bounds.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.stage_search.choices import ChosenStage
from autoshard.stage_search.tables import MicrobatchCosts, Numbers, StageSpace, StageTable, is_within_memory


@dataclass(frozen=True)
class ChainProblem:
    """Stages in a row, each on sub-meshes of a few tables, that together take the whole row of devices."""

    space: StageSpace
    microbatches: int
    tables: tuple[StageTable, ...]
    stages: int  # the most that there may be
    in_flight: tuple[float, ...]  # at entry r - 1, of a stage with r - 1 stages after it: microbatches, at least
    has_weight_tasks: bool
    leaves_out_weights: bool = False  # whether Ws are left out, and so the way back counts; where they are tasks


class Chains:
    """The bounds of a `ChainProblem`: `least(stages)`, and `BestFirst` to walk through its choices."""

    def __init__(self, problem: ChainProblem) -> None:
        self.problem = problem
        self.costs: MicrobatchCosts = problem.space.costs[problem.microbatches]
        self.layers = problem.space.layers
        self._granule = math.gcd(
            *(start for table in problem.tables for start in table.shape.starts),
            *(table.shape.devices for table in problem.tables),
            problem.space.row.devices,
        )
        self.positions = problem.space.row.devices // self._granule
        self._own = [self._own_seconds(table) for table in problem.tables]
        self._passing = [self._passing_seconds(table) for table in problem.tables]
        self._back = [self._transfers(table) for table in problem.tables]
        self.values = self._values()

    def least(self, stages: int) -> float:
        """Seconds that no pipeline of so many stages is below; inf if there is none."""
        return float(self.values[stages - 1][0, 0])

    def _own_seconds(self, table: StageTable) -> Numbers:
        forward, back = self._tasks(table)
        counted = back[:1] if self.problem.leaves_out_weights else back
        return self.problem.microbatches * (forward + sum(counted)) + table.after

    def _passing_seconds(self, table: StageTable) -> Numbers:
        forward, back = self._tasks(table)
        return forward + back[0] if self._counts_way_back else forward

    @property
    def _counts_way_back(self) -> bool:
        return self.problem.leaves_out_weights or not self.problem.has_weight_tasks

    def _tasks(self, table: StageTable) -> tuple[Numbers, list[Numbers]]:
        least = self.problem.space.least_task_seconds
        back = [table.backward, table.weight] if self.problem.has_weight_tasks else [table.backward + table.weight]
        return np.maximum(table.forward, least), [np.maximum(one, least) for one in back]

    def _transfers(self, table: StageTable) -> Numbers:
        """Entry [q, k]: seconds that results take over cut k to the stage at position q, and cotangents back.

        No pair of stages takes less: the other one may have more devices, but no more pairs than this one's are used.
        """
        row, granule, devices = self.problem.space.row, self._granule, table.shape.devices
        ways = [self.costs.sent_forward, self.costs.sent_backward]
        sizes = np.stack(ways if self._counts_way_back else ways[:1])
        found = np.zeros((self.positions + 1, self.layers + 1))
        for q in range(1, self.positions):
            channel = row.channel(q * granule - 1, q * granule)
            found[q] = np.where(sizes > 0, channel.latency + sizes / (channel.bandwidth * devices), 0.0).sum(axis=0)
        return found

    def first_stage(self, which: int, left: int) -> Numbers:
        """Seconds that a stage with `left` stages from it on asks for by itself; inf where it does not fit."""
        has_room = is_within_memory(self.problem.tables[which], self.problem.in_flight[left - 1])
        return np.where(has_room, self._own[which], np.inf)

    def _values(self) -> list[Numbers]:
        """Per number of stages left, bounds at [position, layer]."""
        values: list[Numbers] = []
        for left in range(1, self.problem.stages + 1):
            now = np.full((self.positions + 1, self.layers + 1), np.inf)
            for which, table in enumerate(self.problem.tables):
                own, taken = self.first_stage(which, left), table.shape.devices // self._granule
                for start in table.shape.starts:
                    at = start // self._granule
                    if left == 1:
                        found = own[:, -1] if at + taken == self.positions else np.full(self.layers + 1, np.inf)
                    else:
                        rest = values[-1][at + taken] + self._back[which][at + taken]
                        if not np.isfinite(rest).any():
                            continue
                        found = np.maximum(own, self._passing[which] + rest[None, :]).min(axis=1)
                    now[at] = np.minimum(now[at], found)
            values.append(now)
        return values

    def next_stages(self, node: _PartialChain) -> list[tuple[float, _PartialChain]]:
        """Each way to go on from a partial choice, with the bound of the best of its completions."""
        found = []
        for which, table in enumerate(self.problem.tables):
            start = node.position * self._granule
            if start not in table.shape.starts:
                continue
            taken = table.shape.devices // self._granule
            own = node.passed + self.first_stage(which, node.left)[node.layer]
            if node.left == 1:
                rest = np.full(self.layers + 1, -np.inf)
                passed = np.full(self.layers + 1, node.passed)
                ends: Sequence[int] = [self.layers] if node.position + taken == self.positions else []
            else:
                passed = node.passed + self._passing[which][node.layer] + self._back[which][node.position + taken]
                rest = passed + self.values[node.left - 2][node.position + taken]
                ends = range(node.layer + 1, self.layers)
            bounds = np.maximum(node.largest, np.maximum(own, rest))
            for end in ends:
                if math.isfinite(bounds[end]):
                    stage = ChosenStage(node.layer, end, table, start)
                    largest = max(node.largest, float(own[end]))
                    child = _PartialChain(
                        end, node.position + taken, node.left - 1, float(passed[end]), largest, (*node.stages, stage)
                    )
                    found.append((float(bounds[end]), child))
        return found


@dataclass(frozen=True, eq=False)
class _PartialChain:
    """The first stages of a pipeline."""

    layer: int
    position: int
    left: int  # stages
    passed: float = 0.0  # s, of the stages passed and their transfers
    largest: float = 0.0  # s, the largest bound of a stage so far
    stages: tuple[ChosenStage, ...] = ()


class BestFirst:
    """The choices of one number of stages, in the order of their bounds."""

    def __init__(self, chains: Chains, stages: int, most_expanded: int = 20_000) -> None:
        self.chains, self.stages, self.most_expanded = chains, stages, most_expanded
        self._count = itertools.count()
        least = chains.least(stages)
        root = _PartialChain(0, 0, stages)
        self._heap = [(least, 0, next(self._count), root)] if math.isfinite(least) else []

    @property
    def bound(self) -> float:
        """Seconds that no choice is below which has not come yet, nor been left out for being too slow."""
        return self._heap[0][0] if self._heap else math.inf

    def next(self, below: float) -> tuple[ChosenStage, ...] | None:
        """The choice of the least bound that has not come yet.

        None if no other has a bound less than `below`, or if none was found among as many partial choices as are
        looked at.
        """
        for _ in range(self.most_expanded):
            if self.bound >= below:
                return None
            _, _, _, node = heapq.heappop(self._heap)
            if node.left == 0:
                return node.stages
            for bound, child in self.chains.next_stages(node):
                if bound < below:
                    heapq.heappush(self._heap, (bound, child.left, next(self._count), child))
        return None
