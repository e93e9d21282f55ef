"""Orders shorter than those of a given schedule, within limits of memory: lists, then local search, then HiGHS."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import ArgumentError, MemoryLimitError
from autoshard.errors.kinds import checks_kinds
from autoshard.pipeline.amounts import Amount, Transfer, is_number, per_task
from autoshard.pipeline.memory import Size, part_of_stage
from autoshard.pipeline.operations import start_times
from autoshard.pipeline.orders import Schedule
from autoshard.pipeline.scheduling.bound import bound_of, without_groups
from autoshard.pipeline.scheduling.integer_program import solve_orders
from autoshard.pipeline.scheduling.list_scheduling import list_schedule, priorities
from autoshard.pipeline.scheduling.local_search import local_search
from autoshard.pipeline.scheduling.problem import TOLERANCE, OrderProblem, Rows, order_problem
from autoshard.pipeline.simulation import simulate
from autoshard.pipeline.timeline import Timeline
from autoshard.pipeline.validation import validate


@dataclass(frozen=True)
class SearchResult:
    """The best schedule that `search` found, and how far from the best possible one it can be."""

    schedule: Schedule
    timeline: Timeline
    bound: float  # s, below which no makespan is

    @property
    def gap(self) -> float:
        """How much of the makespan a better schedule could save at most, as a share; 0 if this is a best one."""
        makespan = self.timeline.makespan
        return max(0.0, makespan - self.bound) / makespan if makespan else 0.0


@checks_kinds("schedule")
def search(
    schedule: Schedule,
    forward: Amount = 1.0,
    backward: Amount = 2.0,
    weight: Amount = 0.0,
    transfer: Transfer = 0.0,
    *,
    peak_limit: float | None = None,
    memory: Amount = 0.0,
    weight_memory: Amount | None = None,
    memory_limit: float | None = None,
    moves: int = 2000,
    time_limit: float = 10.0,
    seed: int = 0,
) -> SearchResult:
    """Another order of the tasks of a schedule, with the least makespan that is found.

    The schedule says what is to be done: its tasks, their devices, whether W is split from B. Its own orders are one
    candidate, so the result is never slower if they are within the limits. Fused groups and evictions are not kept.

    List scheduling tries several lists. Local search improves the best of their orders. Where few enough pairs of tasks
    can be in either order, HiGHS then solves the whole problem, to the end if time allows.

    Args:
        schedule: checked by `validate` first.
        forward: these four and the memory are as in `simulate`.
        peak_limit: most microbatches in flight per device, in whole stages.
        memory_limit: most bytes that a device may hold of what forward tasks save.
        moves: of local search.
        time_limit: seconds for HiGHS; 0 leaves it out. Only this search depends on a clock.
        seed: of local search.

    Raises:
        MemoryLimitError: one microbatch alone is over a limit.
        ScheduleError: the schedule cannot run.
        ArgumentError: an amount or a limit is negative, no number, or of the wrong length.

    >>> from autoshard.pipeline import schedule
    >>> search(schedule("gpipe", 2, 3), 1.0, 1.0, peak_limit=2).timeline.peak
    (2.0, 1.0)
    """
    validate(schedule)
    for name, value in (("moves", moves), ("time_limit", time_limit), ("seed", seed)):
        if not is_number(value) or value < 0:
            raise ArgumentError(f"{name}={value!r}; a number is needed, 0 or more")
    schedule = without_groups(schedule)
    limits: list[tuple[Size, Size, float]] = []
    if peak_limit is not None:
        parts = part_of_stage(schedule)
        limits.append((parts, parts, _checked("peak_limit", peak_limit)))
    if memory_limit is not None:
        saved = per_task(schedule, "memory", memory)
        kept = saved if weight_memory is None else per_task(schedule, "weight_memory", weight_memory)
        limits.append((saved, kept, _checked("memory_limit", memory_limit)))
    problem = order_problem(schedule, forward, backward, weight, transfer, limits)
    _check_one_fits(problem)
    bound = bound_of(problem)
    rows = _best_of_lists(problem)
    if moves and not _is_best(problem, rows, bound):
        rows = local_search(problem, rows, moves=int(moves), seed=int(seed), bound=bound)
    if time_limit and not _is_best(problem, rows, bound):
        outcome = solve_orders(problem, _cost(problem, rows), time_limit=float(time_limit))
        bound = max(bound, outcome.bound)
        candidates = [rows] + ([outcome.rows] if outcome.rows and _fits(problem, outcome.rows) else [])
        rows = min(candidates, key=lambda rows: _cost(problem, rows))
    found = problem.ordered(rows)
    timeline = simulate(
        found, forward, backward, weight, transfer, memory=memory, weight_memory=weight_memory
    )  # fmt: skip
    return SearchResult(found, timeline, min(bound, timeline.makespan))


def _checked(name: str, value: float) -> float:
    if not is_number(value) or value < 0:
        raise ArgumentError(f"{name}={value!r}; a number is needed, 0 or more")
    return float(value)


def _check_one_fits(problem: OrderProblem) -> None:
    """Raises the error of a limit that one microbatch on its own is over."""
    slices = problem.schedule.slices
    for limit in problem.limits:
        needed: dict[tuple[int, int], float] = {}
        for task, size in enumerate(limit.at_start):
            key = (problem.devices[task], problem.tasks[task].microbatch // slices)
            needed[key] = needed.get(key, 0.0) + size
        (device, microbatch), most = max(needed.items(), key=lambda item: item[1])
        if most > limit.most * (1 + TOLERANCE):
            raise MemoryLimitError(
                f"no order of schedule {problem.schedule.name!r} holds at most {limit.most:g}: microbatch {microbatch} "
                f"alone takes {most:g} on device {device}.\nAllow {most:g}, or cut the model or the batch finer.",
                budget=limit.most,
                needed=most,
            )


def _best_of_lists(problem: OrderProblem) -> Rows:
    """The best orders of lists, and the given ones if they are within the limits."""
    given: Rows = [[] for _ in range(problem.schedule.stages)]
    for task, device in enumerate(problem.devices):
        given[device].append(task)
    starts, _ = start_times(given, problem.lags, problem.seconds)
    candidates = [list_schedule(problem, priority) for priority in priorities(problem, starts)]
    if _fits(problem, given):
        candidates.insert(0, given)
    return min(candidates, key=lambda rows: _cost(problem, rows))


def _fits(problem: OrderProblem, rows: Rows) -> bool:
    return all(map(problem.fits, rows))


def _cost(problem: OrderProblem, rows: Rows) -> float:
    cost = problem.makespan(rows)
    return float("inf") if cost is None else cost


def _is_best(problem: OrderProblem, rows: Rows, bound: float) -> bool:
    return _cost(problem, rows) <= bound * (1 + TOLERANCE)
