"""A formulation with a memory limit in, the cheapest choice found within the limit out, with all it holds counted."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np

from autoshard.errors import SolverError
from autoshard.model.formulation import Formulation
from autoshard.model.heap.room_in_results import RoomCut
from autoshard.model.resharding_memory import Resharding, counted, relieved
from autoshard.model.search_policy import CLOSE_GAP, solve_for_plan
from autoshard.solver.problem import ForbiddenError, InfeasibleError, LeastNeed, Live, Problem, Solution, UndecidedError
from autoshard.solver.progress import Progress
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.searches.search_run import Search
from autoshard.solver.solve import with_bound
from autoshard.solver.verify import fits, verify

RELAXED_SHARE = 0.4  # of the remaining budget, spent with temporaries in results that may not lie there
RELAXED_ROUNDS = 6  # of solving with more that is known not to lie in results
MAX_ROUNDS = 8  # A round solves the problem with more reshardings counted.
ROUND_SHARE = 0.8  # of the remaining budget, spent by one round
ROUNDS_SHARE = 0.6  # of the budget, for all rounds of a search that the user chose, or where results are large
# Values so small that together they fill less than this share of the limit are counted at their largest, whatever
# their layout: the problem then has far fewer choices that memory couples.
NEGLIGIBLE_SHARE = 0.005
BOUND_SHARE = 0.4  # of the work that is left: what each of the next rounds gets
BOUND_ROUNDS = 3  # of solving for the bound of the choice that was found, each with more reshardings counted
# Relative gap at which the search ends in a problem with reshardings counted. A smaller one proves nothing of the step:
# such a problem may count more than is held, so its bound is not a bound of the step.
CLOSE_COUNTED_GAP = 0.005
# Relative gap above which lean choices are sought although a choice within the limit is known: one may be cheaper.
LEAN_SEARCH_GAP = 0.05
LEANEST_SHARE = 0.5  # of the budget for lean choices, spent on the choice that holds the least
# Limits under which lean choices are sought, as factors of the least bytes that a choice holds without reshardings.
# Each limit is searched twice, for `LEAN_ITERATIONS` iterations.
LEAN_LIMIT_FACTORS = (math.inf, 2.0, 1.7, 1.4, 1.2, 1.1, 1.05, 1.02)
LEAN_ITERATIONS = 4
PEAK_ROUNDING = 1.0  # bytes: peaks are whole ones
PROOF_SHARE = 0.1  # of the budget, up to which it is sought that nothing fits, whatever reshardings free
PROOF_FACTOR = 1.001  # of the limit: that much less than what is proven to be held is not told from it
ANY_GAP = 1.0  # relative; the search ends at any choice


def solve_within(
    formulation: Formulation,
    time_limit: float,
    until: float = math.inf,
    progress: Callable[[Progress], None] | None = None,
    search: str | Search | None = None,
    budget: Budget | None = None,
    gap: float = 0.0,
) -> Solution:
    """The cheapest solution found whose predicted peak is within the usable share of the limit.

    What a resharding holds depends on two choices at once, so no problem has it at first. Small values may hold less
    than is counted. The first problem has as much more room, so that no choice is forbidden for that. While a solution
    is over the limit, the problem is solved again, a few times: without this room, and with what is resharded there
    counted.

    Where the limit is small beside the chip's own memory, temporaries are taken to lie there first, and where results
    are large, those to lie in their buffers that may. Such a solution is taken if they do.

    If that finds nothing within the limit, or something far from its bound, lean choices are looked at. The problem may
    say of such a choice that it does not fit. All rounds share one budget, so that a busy machine finds the same
    solution, unless the clock ends the search. Ctrl-C ends it with the best solution by then.

    Args:
        time_limit: seconds to spend.
        until: when the clock ends the search, if that is before the time limit has passed.
        progress: told what is known, as by `solve`.
        search: as for `solve`. Lean choices are not sought by it.
        budget: what may be spent, instead of the time limit.
        gap: relative, at which the search ends; 0: that of the planner. At `ANY_GAP` any choice within the limit does.

    Raises:
        ForbiddenError: every choice is forbidden, however much memory there is.
        InfeasibleError: even the leanest choice found is over; the error carries the limit that it needs.
    """
    budget = budget or Budget.of(time_limit, until)
    return _LimitSearch(formulation, budget, time_limit, progress, search, gap).solution()


class _LimitSearch:
    """One search within a limit: the rounds of all its parts share a budget, and what was found so far."""

    def __init__(
        self,
        formulation: Formulation,
        budget: Budget,
        time_limit: float,
        progress: Callable[[Progress], None] | None,
        search: str | Search | None,
        gap: float,
    ) -> None:
        given = formulation.problem.limit
        assert given is not None, "there is a limit to stay within"
        self.formulation, self.budget, self.time_limit = formulation, budget, time_limit
        self.progress, self.search, self.gap = progress, search, gap
        self.given, self.limit = given, given * formulation.prices.backend.usable
        self.is_small = formulation.is_limit_small
        self.is_loose = self.is_small or formulation.is_room_large  # whether temporaries may lie elsewhere
        is_part = search is not None or (self.is_loose and not self.is_small)
        self.rounds = budget.part(ROUNDS_SHARE) if is_part else budget
        self.exact = replace(formulation.problem, limit=self.limit, checked=True)
        self.leanest = _without(self.exact, formulation.heap.on_chip if self.is_small else ())
        filled = self.exact, formulation.prices.backend.on_chip_bytes  # whose choices hold little on the chip, too
        self.lean = [(self.leanest, 0.0), filled] if self.is_small else [(self.leanest, 0.0)]
        self.reshardings: dict[Resharding, None] = {}  # that are counted
        self.lying: list[Live] = []  # temporaries that are taken to lie in results
        self.bound = 0.0

    def solution(self) -> Solution:
        """What `solve_within` returns."""
        if self.is_loose and (found := self._with_room_elsewhere()) is not None:
            return found
        if (best := self._with_reshardings_counted()) is not None:
            if best.gap <= max(self.gap, LEAN_SEARCH_GAP) or self.budget.interrupted or self.budget.over:
                return best
            self.budget.needs_choice = False
        return self._among_lean_choices(best)

    @property
    def how(self) -> dict[str, Any]:
        """Keywords that all rounds give `solve`."""
        return {"accepts": self.within, "progress": self.progress, "search": self.search}

    def within(self, choice: Sequence[int]) -> bool:
        return fits(self.formulation.accepted_peak(choice[: len(self.exact.costs)]), self.limit)

    def _with_room_elsewhere(self) -> Solution | None:
        """The cheapest choice whose temporaries lie as far as they may on the chip or in results, if it is within.

        If it is not, the next rounds begin with those in results that lie there under it.
        """
        rounds = self.rounds if self.is_small else self.rounds.part(RELAXED_SHARE)
        relaxed = self._relaxed(self.leanest, self.reshardings, rounds, RELAXED_ROUNDS, in_results=True)
        room = self.formulation.heap.room_in_results
        if isinstance(relaxed, InfeasibleError):
            self._refuse_if_over(room.relaxed(self.leanest, ()), relaxed)
        elif relaxed is not None:
            self.bound = relaxed.bound
            if self.within(relaxed.choice):
                return relaxed
            if not self.is_small:
                self.lying = room.lying(relaxed.choice)
            elif not self.budget.interrupted and room.most:
                with contextlib.suppress(SolverError):
                    part = self.rounds.part(ROUND_SHARE)
                    solution = _solved(self.formulation, self.leanest, (), part, gap=self.gap, **self.how)
                    if self.within(solution.choice):
                        return with_bound(solution, self.bound)
            if self.is_small and (found := self._with_chip_filled()) is not None:
                return found
        if self.budget.interrupted:
            raise KeyboardInterrupt
        return None

    def _with_chip_filled(self) -> Solution | None:
        """A choice that holds no more than a small limit and the chip's own memory together; None if none is within.

        The problem without what may lie on the chip lets all of it lie there, however much that is.
        """
        on_chip = self.formulation.prices.backend.on_chip_bytes
        problem = replace(self.exact, limit=self.limit + on_chip, checked=True)
        found = self._relaxed(problem, {}, self.rounds, MAX_ROUNDS)
        if not isinstance(found, Solution):
            return None
        if self.formulation.heap.room_in_results.most <= on_chip:  # else more than the chip holds may lie elsewhere
            self.bound = max(self.bound, found.bound)
        return with_bound(found, self.bound) if self.within(found.choice) else None

    def _relaxed(
        self,
        problem: Problem,
        reshardings: dict[Resharding, None],
        budget: Budget,
        most_rounds: int,
        in_results: bool = False,
    ) -> Solution | InfeasibleError | None:
        """The solution of a problem that counts no more than is held, and the largest bound found.

        Where it is over the limit, the problem is solved again, a few times, with what the solution reshards then. The
        bounds of all these problems hold.

        Args:
            reshardings: to which those are added that decide what fits.
            in_results: whether temporaries may lie in buffers of results, but for those that a solution shows not to.

        Returns:
            the solution; or why there is none; None: it was not found in time.
        """
        room, cuts, bound, found = self.formulation.heap.room_in_results, list[RoomCut](), 0.0, None
        limit, how = problem.limit or 0.0, self.how | {"gap": self.gap, "cuts": cuts if in_results else None}
        for _ in range(most_rounds):
            try:
                part = budget.part(ROUND_SHARE)
                solution = _solved(self.formulation, problem, reshardings, part, at_least=True, **how)
            except InfeasibleError as error:
                return error
            except SolverError:
                break
            found = with_bound(solution, bound := max(bound, solution.bound))
            if self.within(found.choice) or self.budget.interrupted or budget.over:
                break
            new = list[RoomCut]()
            if in_results:
                if self.is_small or solution.gap > CLOSE_COUNTED_GAP:  # more cuts make it harder still
                    break
                bytes_in_use = self.formulation.bytes_in_use(found.choice)
                accepted = self.formulation.accepted_bytes_in_use(found.choice)
                new = [cut for cut in room.cuts(found.choice, bytes_in_use, accepted, limit) if cut not in cuts]
            over = self.formulation.reshardings_over(found.choice, limit)
            if not new and reshardings.keys() >= set(over):
                break
            cuts += new
            reshardings.update(dict.fromkeys(over))
        return found

    def _with_reshardings_counted(self) -> Solution | None:
        """The cheapest choice once all is counted that choices before it reshard where they are over; None if over."""
        rounded, spared = self._rounded()
        for i in range(MAX_ROUNDS):
            is_bound = not (i or self.is_loose)  # with more counted, it may be that of more than is held
            if i and self.rounds.over:
                break
            problem = replace(rounded, limit=self.limit if i else self.limit + spared, checked=True)
            try:
                gap, part = max(self.gap, CLOSE_COUNTED_GAP if i else 0.0), self.rounds.part(ROUND_SHARE)
                solution = _solved(self.formulation, problem, self.reshardings, part, gap=gap, **self.how)
            except ForbiddenError:
                raise
            except SolverError as error:  # nothing fits, or nothing was found in time
                if self.lying:
                    self.lying = []
                    rounded, spared = self._rounded()
                    continue
                if is_bound and isinstance(error, InfeasibleError):
                    self._refuse_if_over(self.exact, error, spared)
                if is_bound and isinstance(error, UndecidedError):
                    self.bound = error.bound
                break
            if is_bound:
                self.bound = solution.bound
            if self.within(solution.choice):
                best = with_bound(solution, self.bound)
                if self.is_loose or not self.reshardings or best.gap <= max(self.gap, CLOSE_GAP):
                    return best
                low, known = replace(rounded, limit=self.limit + spared, checked=True), self.reshardings
                return _bounded(self.formulation, low, known, best, self.within, self.rounds, self.progress)
            if self.budget.interrupted:
                raise KeyboardInterrupt
            before = self.lying
            if not self._learns(solution.choice, is_first=not i):
                break
            if len(self.lying) < len(before):
                rounded, spared = self._rounded()
        return None

    def _rounded(self) -> tuple[Problem, float]:
        """The problem with small values counted at their largest, and by how many bytes that may be too much."""
        return _coarse(_without(self.exact, self.lying), NEGLIGIBLE_SHARE * self.given)

    def _learns(self, choice: Sequence[int], *, is_first: bool) -> bool:
        """Whether a choice over the limit shows something that is not counted, which then is."""
        over = self.formulation.reshardings_over(choice, self.limit)
        now = self.formulation.heap.room_in_results.lying(choice) if self.lying else []
        still = [live for live in now if live in self.lying]
        is_new = not self.reshardings.keys() >= set(over) or len(still) < len(self.lying)
        self.reshardings.update(dict.fromkeys(over))
        if not (is_first or is_new):  # but for rounding there is another one
            if not self.lying:
                return False
            still = []
        self.lying = still
        return True

    def _among_lean_choices(self, best: Solution | None) -> Solution:
        """The best choice so far, or a cheaper one of those that hold less and less.

        Raises:
            InfeasibleError: all are over the limit.
        """
        needed, free, leanest = math.inf, 0.0, None
        try:
            limits = self.budget, self.time_limit, self.progress
            for solution, peak in chain(*(_lean_solutions(self.formulation, one, *limits) for one in self.lean)):
                if needed == math.inf:
                    free = solution.bound  # the first is sought without a limit
                if peak / self.formulation.prices.backend.usable < needed:
                    needed, leanest = peak / self.formulation.prices.backend.usable, solution.choice
                if fits(peak, self.limit) and (best is None or solution.cost < best.cost):
                    best = solution
                    if self.gap >= ANY_GAP:
                        break
        except (SolverError, KeyboardInterrupt) as error:
            if isinstance(error, UndecidedError):
                error.bound = max(self.bound, free)
            if best is None and (needed == math.inf or isinstance(error, KeyboardInterrupt)):
                raise
        if best is None:
            message = "the leanest choice is over the limit"
            raise InfeasibleError(self.given, LeastNeed(message, needed, leanest))
        return with_bound(best, self.bound if self.bound <= best.cost else free)

    def _refuse_if_over(self, problem: Problem, error: InfeasibleError, spared: float = 0.0) -> None:
        """Raises that nothing fits, where that is proven; the arguments are those of `_least_peak`."""
        if (least := _least_peak(self.formulation, problem, error, spared, self.budget)) is not None:
            raise _refusal(self.formulation, self.lean, least, self.budget) from None


def _bounded(
    formulation: Formulation,
    relaxed: Problem,
    reshardings: Iterable[Resharding],
    best: Solution,
    within: Callable[[Sequence[int]], bool],
    budget: Budget,
    progress: Callable[[Progress], None] | None,
) -> Solution:
    """The best solution with the bound of problems that count reshardings, but no more than is held; or a better one.

    The first problem of a search counts none. Where these decide what fits, its bound is far off.

    Args:
        relaxed: a problem that counts no more than is held.
    """
    known = dict.fromkeys(reshardings)
    for _ in range(BOUND_ROUNDS):
        if budget.over:
            break
        try:
            part = budget.part(BOUND_SHARE)
            found = _solved(formulation, relaxed, known, part, at_least=True, gap=CLOSE_COUNTED_GAP, progress=progress)
        except (SolverError, KeyboardInterrupt):  # none was found in time
            break
        bound = max(best.bound, found.bound)
        best = with_bound(found if found.cost < best.cost and within(found.choice) else best, bound)
        over = formulation.reshardings_over(found.choice, relaxed.limit or 0.0)
        if best.gap <= CLOSE_GAP or known.keys() >= set(over):
            break
        known.update(dict.fromkeys(over))
    return best


def _without(problem: Problem, lives: Iterable[Live]) -> Problem:
    """The problem in which these lives hold nothing."""
    gone = set(map(id, lives))
    return replace(problem, lives=tuple(live for live in problem.lives if id(live) not in gone), checked=True)


def _coarse(problem: Problem, room: float) -> tuple[Problem, float]:
    """The problem with small values counted at their largest, and by how many bytes that may be too much at a point.

    Args:
        room: the most bytes for that.
    """
    spare, lives = room, []
    for live in sorted(problem.lives, key=lambda live: int(live.usage.max())):
        spread = live.usage.max() - live.usage.min()
        if 0 < spread <= spare:
            spare -= spread
            live = replace(live, usage=np.full_like(live.usage, live.usage.max()))
        lives.append(live)
    return replace(problem, lives=tuple(lives), checked=True), room - spare


def _solved(
    formulation: Formulation,
    problem: Problem,
    reshardings: Iterable[Resharding],
    budget: Budget,
    *,
    at_least: bool = False,
    cuts: Sequence[RoomCut] | None = None,
    **limits: Any,
) -> Solution:
    """A solution of the problem with these reshardings counted, no less than they hold or no more.

    Args:
        cuts: if given, temporaries may lie in results, but for what these say.
    """
    counting = counted(problem, reshardings, formulation.prices, at_least=at_least)
    if cuts is not None:
        counting = formulation.heap.room_in_results.relaxed(counting, cuts)
    solution = solve_for_plan(counting, time_limit=budget.seconds, budget=budget, **limits)
    return replace(solution, choice=solution.choice[: len(problem.costs)])


def _least_peak(
    formulation: Formulation, problem: Problem, error: InfeasibleError, spared: float, budget: Budget
) -> Callable[[], float] | None:
    """What finds bytes over the limit below which no choice has its peak, whatever reshardings free; None: no proof.

    Args:
        problem: it counts no more than is held, but for what reshardings free.
        error: that nothing fits in it, with as many bytes more as are `spared`.
        budget: whose clock ends the search for a proof. Its work is not spent, so that what is found later stays.
    """
    assert problem.limit is not None, "nothing fits in it"
    low = relieved(problem, formulation.reshardings, formulation.groups, formulation.prices)
    if low is problem:
        least = error.least - spared - PEAK_ROUNDING
        return None if fits(least, problem.limit) else lambda: least
    own, limit = replace(budget.part(PROOF_SHARE), whole=None), problem.limit * PROOF_FACTOR + 2 * PEAK_ROUNDING
    try:
        if low is not None:
            solve_for_plan(replace(low, limit=limit), gap=ANY_GAP, time_limit=own.seconds, budget=own)
    except InfeasibleError as found:
        proof = found
        return lambda: proof.least - PEAK_ROUNDING
    except SolverError:
        return None
    return None


def _refusal(
    formulation: Formulation, lean: Iterable[tuple[Problem, float]], least: Callable[[], float], budget: Budget
) -> InfeasibleError:
    """The error that no choice fits. What would do is sought once it is asked for.

    Args:
        lean: the problems of which lean choices are sought.
        least: finds the bytes that no choice goes below with its peak.
        budget: for that search, which may take as long as is left now, whenever it begins.
    """
    usable, given, seconds = formulation.prices.backend.usable, formulation.problem.limit, budget.seconds
    assert given is not None, "`solve_within` has asked for it"

    def found() -> LeastNeed:
        timed, needed, choice = replace(budget, until=time.monotonic() + seconds), math.inf, None
        with contextlib.suppress(SolverError):
            solutions = chain(*(_lean_solutions(formulation, one, timed, seconds, None) for one in lean))
            leanest, peak = min(solutions, key=lambda one: one[1])
            needed, choice = peak / usable, leanest.choice
        return LeastNeed("no choice holds so little", needed, choice)

    return InfeasibleError(given, found, lambda: least() / usable)


def _lean_solutions(
    formulation: Formulation,
    lean: tuple[Problem, float],
    budget: Budget,
    time_limit: float,
    progress: Callable[[Progress], None] | None,
) -> Iterator[tuple[Solution, int]]:
    """Choices that hold less and less, down to the one that holds the least without reshardings, whatever it costs.

    With each comes its peak. Choices that hold more without reshardings are cheaper and reshard less, so that what
    they hold in all can be less. They do not depend on the problem's limit: what one call says is needed, another call
    finds again. `lean`: the problem, and the bytes of what it counts that the chip's own memory holds.

    Raises:
        SolverError: the least that a choice holds was not found in time.
    """
    (problem, on_chip), first = lean, budget.part(LEANEST_SHARE)
    late = f"how much memory it takes was not found in {time_limit:g} s; raise time_limit"
    try:
        solution = solve_for_plan(
            replace(problem, limit=0.0), time_limit=first.seconds, budget=first, progress=progress
        )
        yield solution, formulation.accepted_peak(solution.choice)
        return
    except ForbiddenError:
        raise
    except InfeasibleError as error:
        if (least := error.found).choice is None:
            raise UndecidedError(late) from error
    except SolverError as error:
        raise UndecidedError(late) from error
    reshardings: dict[Resharding, None] = {}
    last, peak, searched = None, 0.0, (0.0, -1)
    with contextlib.suppress(SolverError):  # none was found; one that holds even less is harder to find
        for limit in (slack * least.needed for slack in LEAN_LIMIT_FACTORS for _ in range(2)):
            if last is not None:
                if budget.over:
                    break
                if fits(peak, limit - on_chip):
                    continue  # about as good as any here
                reshardings.update(dict.fromkeys(formulation.reshardings_over(last.choice, limit)))
            if (limit, len(reshardings)) == searched:
                continue
            searched = limit, len(reshardings)
            leaner = replace(problem, limit=limit)
            how: dict[str, Any] = {"iterations": LEAN_ITERATIONS, "gap": CLOSE_COUNTED_GAP, "progress": progress}
            last = _solved(formulation, leaner, reshardings, budget.part(1.0), **how)
            peak = formulation.accepted_peak(last.choice)
            yield last, peak
    assert least.choice is not None, "it is known which choice needs so little"
    leanest = Solution(least.choice, verify(problem, least.choice)[0], 0.0, "feasible")
    yield leanest, formulation.accepted_peak(leanest.choice)
