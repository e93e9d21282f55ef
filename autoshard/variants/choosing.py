"""The variants of a step in, the one out that is predicted to be fastest within the memory limit."""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from autoshard.errors import ConflictError, MemoryLimitError, MicrobatchError, of_least_need
from autoshard.options import Options
from autoshard.program import Program
from autoshard.solver.problem import UndecidedError
from autoshard.solver.runtime.cutoff import CutoffEnd
from autoshard.user_plan import Plan
from autoshard.variants.variant import StepVariants, Variant

# Twice as many microbatches have to gain this share of a step's seconds, or still more of them are not tried. So has a
# rewrite, or the step stays as it is: predictions of steps that close are not told apart.
LEAST_GAIN = 0.005
# A plan that fills less of the memory than this is held to be free: less memory in use would not make it faster.
FREE_BELOW = 0.5


class PlannedProgram(Protocol):
    """A program with its plan, as a dataclass."""

    @property
    def plan(self) -> Plan: ...


Planned = TypeVar("Planned", bound=PlannedProgram)


@dataclass(frozen=True)
class Wishes:
    """What the user leaves open of how a step runs, and what bounds it."""

    mesh: Mapping[str, int]
    microbatches: int | None  # None: as many as are fastest
    recomputes: bool  # whether autoshard chooses what is computed again
    memory: float  # bytes per device that a plan may be predicted to fill
    until: float  # when no more variants are planned, as `time.monotonic` has it
    moves: bool  # whether state may be moved to hosts: their links are known

    @classmethod
    def of(cls, options: Options, memory: float) -> Wishes:
        """Those of a user's options."""
        mesh, recomputes = dict(options.mesh.shape), options.remat is not None
        moves = recomputes and options.topology.host_bandwidth is not None
        return cls(mesh, options.microbatches, recomputes, memory, options.ends, moves)

    def is_single(self, variants: StepVariants) -> bool:
        """Whether there is nothing to choose from."""
        return self.microbatches == 1 and not self.recomputes and not self.may_rewrite(variants, Variant())

    def moves_state(self, variants: StepVariants) -> bool:
        """Whether some of the state can lie on hosts."""
        return self.moves and bool(variants.movable_state.movable)

    def may_rewrite(self, variants: StepVariants, variant: Variant) -> bool:
        """Whether a variant may be planned with stacks of matrices, or with trips that devices share out."""
        return bool(self.sizes(variants, variant)) or self.shares_trips(variants, variant)

    def shares_trips(self, variants: StepVariants, variant: Variant) -> bool:
        """Whether devices can share out the trips of some loop."""
        found = variants.shareable(variant)
        return found is not None and found.are_shareable(self.mesh, self.memory)

    def sizes(self, variants: StepVariants, variant: Variant) -> tuple[int, ...]:
        """The sizes of stacks to choose from."""
        found = variants.batched(variant)
        return () if found is None else found.multiples(self.mesh)


def fastest(
    variants: StepVariants, wishes: Wishes, planned: Callable[[Program, float], Planned], enough: float = math.inf
) -> Planned:
    """The step planned in the variant that is predicted to take the fewest seconds; as `fastest_and_close` has it."""
    return fastest_and_close(variants, wishes, planned, enough)[0]


def fastest_and_close(
    variants: StepVariants,
    wishes: Wishes,
    planned: Callable[[Program, float], Planned],
    enough: float = math.inf,
    close: float = 0.0,
) -> list[Planned]:
    """The step planned in the variant that is predicted to take the fewest seconds, and in those that are close to it.

    Its bound is that of all variants: none of those that fit is proven to be faster than that.

    Args:
        planned: plans a program, and may raise `CutoffEnd` once it is proven to take more than so many seconds.
        enough: seconds per step: variants that are proven to take more are not wanted.
        close: the share of its seconds by which another one may be slower.

    Raises:
        CutoffEnd: all that fit are proven to take more than is enough.
        MemoryLimitError: no variant fits.
        MicrobatchError: the batch cannot be split into as many microbatches as the user wants.
        UndecidedError: none was found to fit in time.
    """
    search = _VariantSearch(variants, wishes, planned, enough, close)
    best = search.fastest()
    most = (1 + close) * best.plan.cost
    return [best, *(one for one in search.found if one is not search.best and one.plan.cost <= most)]


def proven(found: Planned, bound: float) -> Planned:
    """A plan with a bound that holds for all variants, if that is less than what is proven of its own."""
    if bound >= found.plan.bound:
        return found
    made: Any = found
    weaker: Planned = replace(made, plan=replace(made.plan, bound=bound, status="feasible"))
    return weaker


def given_program(variants: StepVariants, wishes: Wishes, given: Plan) -> Program:
    """The variant that a plan was made for; the step as it is if the plan is for none, which then is an error."""
    counts = [wishes.microbatches] if wishes.microbatches else [2**power for power in range(31)]
    for count in counts:
        try:
            first = variants.program(Variant(count))
        except MicrobatchError:
            if wishes.microbatches:
                raise
            break
        for variant in _grouped(variants, wishes.mesh, count):
            levels = range(len(variants.recomputation(variant).levels)) if wishes.recomputes else ()
            at_levels = [variant, *(replace(variant, level=level) for level in levels)]
            moves = wishes.moves_state(variants) and any(one.on_host for one in given.arguments)
            places = (False, True)[: 1 + moves]
            for one in (replace(one, state_on_hosts=there) for there in places for one in at_levels):
                for other in _rewritten_otherwise(variants, wishes, one):
                    if variants.program(other).fingerprint == given.fingerprint:
                        return variants.program(other)
    return first if wishes.microbatches else variants.program(Variant())


def _rewritten_otherwise(variants: StepVariants, wishes: Wishes, variant: Variant) -> Iterator[Variant]:
    """A variant, and the same with what nobody asks for: trips that devices share out, stacks of matrices."""
    loops = (False, True)[: 1 + wishes.shares_trips(variants, variant)]
    for one in (replace(variant, shares_trips=shared) for shared in loops):
        yield one
        yield from (replace(one, stacked=size) for size in wishes.sizes(variants, one))


def _grouped(variants: StepVariants, mesh: Mapping[str, int], count: int) -> Iterator[Variant]:
    """The ways to add up microbatches: over all devices in each of them, or after the last.

    For the latter, each group of devices has a sum of its own. That takes more memory and communicates less.

    Raises:
        MicrobatchError: the batch cannot be split into so many.
    """
    variants.program(Variant(count))
    yield Variant(count)
    if count == 1:
        return
    for groups in sorted({*itertools.accumulate(mesh.values(), operator.mul), *mesh.values()} - {1}):
        try:
            variants.program(Variant(count, groups))
        except MicrobatchError:  # the rows of a microbatch are no multiple of so many groups
            continue
        yield Variant(count, groups)


class _VariantSearch(Generic[Planned]):
    """The search through the variants of a step."""

    def __init__(
        self,
        variants: StepVariants,
        wishes: Wishes,
        planned: Callable[[Program, float], Planned],
        enough: float,
        close: float,
    ):
        self.variants, self.wishes, self.planned, self.enough, self.close = variants, wishes, planned, enough, close
        self.best: Planned | None = None
        self.found: list[Planned] = []
        self.best_variant = Variant(wishes.microbatches or 1)  # or the last that was planned, while nothing fits
        self.bounds: list[float] = []  # s, of the variants that fit
        self.errors: list[MemoryLimitError] = []
        self.late: list[UndecidedError] = []  # of the variants of which it was not found in time whether they fit
        self.slow: list[CutoffEnd] = []  # what is proven of variants that nobody would want

    def fastest(self) -> Planned:
        asked = self.wishes.microbatches
        for count in [asked] if asked is not None else (2**power for power in range(31)):
            before, slow = self.best, len(self.slow)
            try:
                self.plan_all_in(count)
            except MicrobatchError as refused:
                if asked is not None:
                    raise
                if self.best is None and not self.slow:
                    raise self.error from refused
                break
            if self.best is None and self.late and time.monotonic() > self.wishes.until:
                break
            if self.best is not None and not self.may_gain(before):
                break
            if self.best is None and slow and self.bound_of(self.slow[slow:]) >= self.bound_of(self.slow[:slow]):
                break
        self.plan_with_shared_trips()
        self.plan_stacked()
        if self.best is None:
            raise min(self.slow, key=lambda one: one.bound) if self.slow else self.error
        return proven(self.best, min(self.bounds))

    @staticmethod
    def bound_of(slow: Sequence[CutoffEnd]) -> float:
        return min((one.bound for one in slow), default=math.inf)

    @property
    def error(self) -> UndecidedError | MemoryLimitError:
        """Why nothing is planned: of some variants it is not known whether they fit, or none does."""
        return self.late[0] if self.late else of_least_need(self.errors, self.wishes.until)

    def may_gain(self, before: Planned | None) -> bool:
        """Whether still more microbatches may be faster: memory binds, and the last doubling has gained."""
        assert self.best is not None, "something fits"
        if (
            time.monotonic() > self.wishes.until
            or self.best.plan.predicted.peak_bytes < FREE_BELOW * self.wishes.memory
        ):
            return False
        return before is None or self.best.plan.cost < before.plan.cost * (1 - LEAST_GAIN)

    def plan_all_in(self, count: int) -> None:
        """Plans the variants of so many microbatches."""
        ways = list[tuple[float, Variant]]()
        for variant in _grouped(self.variants, self.wishes.mesh, count):
            if ways and time.monotonic() > self.wishes.until:
                self.bounds.append(0.0)  # nothing is proven of what is not planned
                break
            if (found := self.plan_leanest(variant)) is not None:
                ways.append(found)
        if not ways:  # not even with the least that can be kept
            return
        _, variant = min(ways, key=lambda way: way[0])
        on_devices, on_hosts = self.levels(variant)
        self.plan_richer(variant, on_devices[:-1])
        if self.best_variant.level != 0:  # something is computed again, or on hosts already
            self.plan_richer(variant, on_hosts)
            if self.may_move_state(variant):
                self.plan_richer(replace(variant, state_on_hosts=True), on_devices)

    def plan_leanest(self, variant: Variant) -> tuple[float, Variant] | None:
        """Plans a variant as lean as it can be, and leaner on hosts if need be: its seconds, and the way that fits."""
        ends: list[int | None] = [levels[-1] for levels in self.levels(variant) if levels]
        moves = self.wishes.moves_state(self.variants)
        for one in (variant, replace(variant, state_on_hosts=True))[: 1 + moves]:
            for level in ends or [None]:
                if (cost := self.plan(replace(one, level=level))) is not None:
                    return cost, one
        return None

    def may_move_state(self, variant: Variant) -> bool:
        """Whether less may be computed again, with state on hosts, than it takes to move the state there and back."""
        if variant.state_on_hosts or self.best_variant.level is None or not self.wishes.moves_state(self.variants):
            return False
        again = self.variants.recomputation(variant).levels[self.best_variant.level].seconds
        return self.variants.seconds_of_moving_state < again

    def plan_richer(self, variant: Variant, levels: Sequence[int]) -> None:
        """Plans a variant at levels of which each holds less than the one before, the last first, while they fit."""
        for level in reversed(levels):
            if time.monotonic() > self.wishes.until:
                self.bounds.append(0.0)
                break
            one = replace(variant, level=level)
            if self.variants.least_bytes(one) / math.prod(self.wishes.mesh.values()) > self.wishes.memory:
                break
            if self.plan(one) is None:  # levels before it keep still more
                break

    def levels(self, variant: Variant) -> tuple[Sequence[int], Sequence[int]]:
        """The levels that keep all on devices, and those that keep something on hosts."""
        if not self.wishes.recomputes:
            return (), ()
        found = self.variants.recomputation(variant)
        count = len(found.levels_on_devices)
        return range(count), range(count, len(found.levels))

    def plan(self, variant: Variant) -> float | None:
        """The seconds of a variant's plan, or those that it is proven to take; None if it does not fit."""
        if self.best is None:
            self.best_variant = variant
        try:
            enough = self.enough if self.best is None else (1 + self.close) * self.best.plan.cost
            found = self.planned(self.variants.program(variant), enough)
        except MemoryLimitError as error:
            self.errors.append(error)
            return None
        except UndecidedError as late:
            self.late.append(late)
            self.bounds.append(late.bound)
            return None
        except CutoffEnd as slow:
            self.slow.append(slow)
            self.bounds.append(slow.bound)
            return slow.bound
        self.bounds.append(found.plan.bound)
        self.found.append(found)
        if self.best is None or found.plan.cost < self.best.plan.cost:
            self.best, self.best_variant = found, variant
        return found.plan.cost

    def plan_with_shared_trips(self) -> None:
        """Plans the best variant with loops of which devices may share out the trips."""
        variant = self.best_variant
        if not self.wishes.shares_trips(self.variants, variant):
            return
        if self.best is not None and time.monotonic() > self.wishes.until:
            self.bounds.append(0.0)
            return
        with contextlib.suppress(ConflictError):  # tactics ask for what operations do not have
            self.plan(replace(variant, shares_trips=True))

    def plan_stacked(self) -> None:
        """Plans the best variant with what it computes of each matrix by itself computed of stacks of matrices."""
        variant = self.best_variant
        for size in self.wishes.sizes(self.variants, variant):
            if self.best is not None and time.monotonic() > self.wishes.until:
                self.bounds.append(0.0)
                break
            with contextlib.suppress(ConflictError):  # tactics ask for what the stacks do not have
                self.plan(replace(variant, stacked=size))
