"""`frontier`: a step in, plans between the fastest and the smallest out.

The ends come first: the plan without a limit, and the one under the smallest limit that is found. Then the widest gap
between two neighbours, as a ratio of their peaks, is halved as long as that finds plans. What is known of one limit
serves the others: a solution fits every limit above its peak, and a bound holds for every limit below. So a limit is
solved for only where no known solution is as good as what is proven.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from autoshard.errors import ArgumentError, MemoryLimitError, SolverError
from autoshard.errors.kinds import checks_kinds
from autoshard.frontiers.plans import Frontier
from autoshard.frontiers.traced_step import FrontierStep
from autoshard.frontiers.traced_variants import FrontierVariants
from autoshard.mesh.topology import Topology
from autoshard.options import is_whole_number
from autoshard.program.user_code import shows_users_lines
from autoshard.report.units import bytes_text
from autoshard.solver.problem import Solution
from autoshard.solver.verify import OPTIMAL_GAP
from autoshard.user_plan import Plan

_END_SEARCHES = 3  # searches: the fastest plan, how little memory would do, and the smallest plan
_EXTRA_SEARCHES = (
    5  # searches beyond one per plan: for the smallest limit, and between plans that have no third between them
)
_SMALLER_PEAK_SHARE = 0.8  # of the peak of the smallest plan known: the limit under which a smaller one is looked for
_CLOSE_PEAK_RATIO = 1.02  # ratio of peaks of two neighbours between which no third is looked for


@shows_users_lines
@checks_kinds("kwargs")
def frontier(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh | None = None,
    topology: Topology | str | None = None,
    points: int = 6,
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Frontier:
    """Seconds per step against bytes per device: plans from the fastest to the smallest.

    The step is traced and formulated once, and solved for each plan.

    >>> found = frontier(train_step, state, batch, mesh=mesh, topology="v5e:4x4")  # doctest: +SKIP
    >>> print(found)  # doctest: +SKIP
    >>> found.within("8GiB").in_shardings  # doctest: +SKIP

    Args:
        fn: any function that `jax.jit` takes.
        *args: its positional arguments: pytrees of arrays or ShapeDtypeStructs.
        mesh: the devices, as for `autoshard`.
        topology: what the machine costs, as for `autoshard`.
        points: the most plans to find, 2 or more. There are fewer where no others are found between them.
        kwargs: keyword arguments of `fn`.
        **options: `fixed`, `time_limit`, `ignore_constraints`, `trips`, `microbatches` (a number), `remat`, `tactics`,
            `search` and `memory`, as for `autoshard`, and keywords of `jax.jit`. `memory` is the limit of the fastest
            plan; without it that plan is sought without a limit, even if it fits no device. `time_limit` is that of all
            searches together, each of which gets an equal part.

    Returns:
        The plans, fastest first: seconds go up, bytes go down. Each has the bound of its own memory limit.

    Raises:
        ArgumentError: an option is of the wrong kind.
        MemoryLimitError: nothing fits into the `memory` that is given.
    """
    if not is_whole_number(points) or points < 2:
        raise ArgumentError(f"points={points!r}; the most plans to find is needed, 2 or more")
    step = FrontierVariants.of(fn, args, kwargs or {}, mesh, topology, options)
    searches = points + _EXTRA_SEARCHES
    limit = step.options.time_limit
    step = step.timed(time.monotonic() + limit, limit / searches)
    search = _FrontierSearch(step)
    search.find(points, searches)
    is_free = not step.options.is_memory_given
    return Frontier(step.as_written.program.name, search.plans(), step.usable, is_free, search.left_out(points))


@dataclass(frozen=True)
class _FrontierPoint:
    """A solution, and what it holds."""

    solution: Solution
    step: FrontierStep  # the variant that it is of
    memory: float  # the limit under which it was found, bytes per device
    seconds: float  # per step, predicted
    peak: int  # bytes per device, predicted


@dataclass(eq=False)
class _FrontierSearch:
    """What is known of a step under its limits."""

    step: FrontierVariants
    known: list[_FrontierPoint] = field(default_factory=list)
    proven: dict[float, float] = field(default_factory=dict)  # limit -> the least seconds of plans under it
    closed: set[tuple[int, int]] = field(default_factory=set)  # peaks between which a search found nothing
    has_smallest: bool = False  # whether plans that hold less were sought to the end

    def find(self, points: int, searches: int) -> None:
        """Looks for so many plans in no more searches."""
        self.solve(self.step.ample_memory)
        if self.is_late:
            return
        least = self.step.least_memory()
        if least is not None and least < self.step.ample_memory and not self.is_late:
            self.solve(least)
        done = _END_SEARCHES
        while done < searches - points:
            if self.is_late:
                return
            if not self.solve(_SMALLER_PEAK_SHARE * self.front()[-1].peak / self.step.usable):
                break
            done += 1  # what was said to be the least is what some lean choices hold
        self.has_smallest = True
        for _ in range(searches - done):
            gaps = self.gaps()
            if len(self.front()) >= points or not gaps or self.is_late:
                return
            high, low = max(gaps, key=lambda gap: gap[0] / gap[1])
            self.solve(math.sqrt(high) * math.sqrt(low) / self.step.usable)
            if [point.peak for point in self.front() if low < point.peak < high] == []:
                self.closed.add((high, low))

    def gaps(self) -> list[tuple[int, int]]:
        """Peaks of neighbouring plans between which there may be others."""
        pairs = itertools.pairwise(point.peak for point in self.front())
        return [gap for gap in pairs if gap not in self.closed and gap[0] > _CLOSE_PEAK_RATIO * gap[1]]

    def left_out(self, points: int) -> str:
        """What the time limit has kept from being sought; "" if it has not."""
        if not self.is_late:
            return ""
        found = [] if self.has_smallest else [f"less than {bytes_text(self.front()[-1].peak)}"]
        if len(self.front()) < points:
            found += [f"between {bytes_text(low)} and {bytes_text(high)}" for high, low in self.gaps()]
        return ", ".join(found)

    @property
    def is_late(self) -> bool:
        """Whether the time limit has passed, and the plans that are known have to do."""
        return time.monotonic() > self.step.options.ends

    def solve(self, memory: float) -> bool:
        """The best solution under a limit joins what is known, unless it is known; whether there is one."""
        best = self.best(memory)
        if best is not None and best.solution.cost <= self.bound(memory) * (1 + OPTIMAL_GAP):
            return True
        try:
            found = self.step.within(memory)
        except (MemoryLimitError, SolverError):
            if not self.known:
                raise
            return False
        predicted = found.plan.predicted
        self.known.append(
            _FrontierPoint(found.solution, found.step, memory, predicted.step_seconds, predicted.peak_bytes)
        )
        self.proven[memory] = max(found.plan.bound, self.proven.get(memory, 0.0))
        return True

    def best(self, memory: float) -> _FrontierPoint | None:
        """The cheapest known solution that fits a limit."""
        fitting = [point for point in self.known if point.peak <= memory * self.step.usable]
        return min(fitting, key=lambda point: (point.solution.cost, point.peak), default=None)

    def bound(self, memory: float) -> float:
        """What is proven of all plans under a limit."""
        return max((bound for limit, bound in self.proven.items() if limit >= memory), default=0.0)

    def front(self) -> list[_FrontierPoint]:
        """The known solutions of which none is as fast and holds less, fastest first."""
        front: list[_FrontierPoint] = []
        for point in sorted(self.known, key=lambda point: (point.seconds, point.peak)):
            if not front or point.peak < front[-1].peak:
                front.append(point)
        return front

    def plans(self) -> tuple[Plan, ...]:
        """The front as plans."""
        usable = self.step.usable
        return tuple(
            point.step.plan(point.solution, point.memory, self.bound(point.peak / usable)) for point in self.front()
        )
