"""A plan in; a plan whose compiled program is within the memory limit by XLA's own account out, if one is found.

Predictions of memory can be off. A plan that is about to run is compiled anyway, so its compiled program is asked. If
it is over the limit, the step is planned again with a lower limit for the predicted peak: first as if predictions were
off by a factor, then by whatever of a factor and a number of bytes leaves less.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import jax

from autoshard.compiled.collectives import peak_bytes
from autoshard.errors import MemoryLimitError
from autoshard.plans.plan import PlanData
from autoshard.report.units import bytes_text
from autoshard.solver.verify import fits

REPLANS = 2  # at most: each takes a search and a compilation
# Shares of the last predicted peak that a next plan is predicted to fill at most.
LEANER_PEAK_SHARE = 0.95  # always, so that it is another plan
CORRECTED_SHARE = 0.98  # of the limit, once predictions are corrected: what a faster plan is predicted to fill at most
OUT_OF_MEMORY = 0.7  # where the compiler ran out of memory and does not say by how much

AnyPlan = TypeVar("AnyPlan", bound=PlanData)
Compiler = Callable[[AnyPlan], jax.stages.Compiled]


PAGE_BYTES = 4096  # buffers are rounded, flags and counters added: less than that says nothing of whether a plan fits
ROUNDING_SHARE = 0.1  # of a limit of a few pages: by more than that a plan is over, be it less than a page
UNTRIED_MEMORY_OPTIONS = ("remat='auto'",)  # what a train step may hold less by, where nobody says what was asked for


class MemoryWarning(UserWarning):
    """The compiled program of a plan needs more memory than the limit, and so do those of plans made to hold less.

    It is of a limit that the user did not set, the memory of the devices, or of a plan that the user gave. A plan over
    a limit that the user set, by more than a tenth of it or by more than a page of 4 KiB, is a `MemoryLimitError`
    instead.
    """


def fitting_plan(
    plan: AnyPlan,
    limit: float,
    compiled: Compiler[AnyPlan],
    replanned: Callable[[float], AnyPlan | None],
    agreed: Callable[[int, float | None], float | None] = lambda number, peak: peak,
    roomier: Callable[[float], AnyPlan | None] | None = None,
    untried: Sequence[str] = UNTRIED_MEMORY_OPTIONS,
) -> AnyPlan:
    """The first of up to `1 + REPLANS` plans that fits as compiled, with its `compiled_peak`; else the leanest of them.

    Where the first plan fits with room to spare, a faster one that is predicted to fill the limit may take its place.

    Args:
        plan: the first.
        limit: bytes per device.
        compiled: compiles a plan.
        replanned: the plan whose predicted peak is at most so many bytes, or what comes closest; None if there is none.
        agreed: takes the number of a plan and its compiled peak, and gives the peak that counts: several processes,
            each of which compiles, have to go on alike.
        roomier: a faster plan whose predicted peak is at most so many bytes; None if there is none, or none is sought.
        untried: options that were not given, by which a train step may hold less.

    A plan that cannot be compiled comes back as it is. What keeps it from compiling, a call of the step says.
    """
    tried: list[tuple[AnyPlan, float]] = []
    current: AnyPlan | None = plan
    while current is not None:
        peak = agreed(len(tried), _compiled_peak(compiled, current))
        if peak is None:
            break
        tried.append((current, peak))
        if fits(peak, limit) or len(tried) > REPLANS:
            break
        predicted = current.predicted.peak_bytes
        current = replanned(_next_target(predicted, peak, limit, is_first=current is plan))
        if current is not None and current.predicted.peak_bytes >= predicted:
            break
    if roomier is not None and len(tried) == 1 and fits(tried[0][1], limit):
        faster = roomier(CORRECTED_SHARE * _corrected(plan.predicted.peak_bytes, tried[0][1], limit))
        peak = None if faster is None else agreed(1, _compiled_peak(compiled, faster))
        if faster is not None and peak is not None and fits(peak, limit):
            tried = [(faster, peak)]
    return _with_figures(tried, limit, untried) if tried else plan


def is_over(plan: PlanData, limit: float) -> bool:
    """Whether a plan that has been held against the limit is over it."""
    return plan.compiled_peak is not None and not fits(plan.compiled_peak, limit)


def with_rounding(limit: float) -> float:
    """The most bytes that a program may hold which is said to keep the limit.

    >>> with_rounding(2**30) - 2**30, with_rounding(2000)
    (4096, 2200.0)
    """
    return limit + min(PAGE_BYTES, ROUNDING_SHARE * limit)


def over_limit_error(plan: PlanData, limit: float) -> MemoryLimitError:
    """What a user reads who set a limit that no compiled program keeps, that of the leanest plan included."""
    assert plan.compiled_peak is not None, "it has been compiled"
    return MemoryLimitError(f"{plan.name}: {plan.warnings[-1]}", budget=limit, needed=plan.compiled_peak)


def confirmed(
    error: MemoryLimitError,
    leanest: Callable[[], AnyPlan | None],
    compiled: Compiler[AnyPlan],
    untried: Sequence[str] = UNTRIED_MEMORY_OPTIONS,
) -> MemoryLimitError:
    """An error that names a limit which holds once compiled: the one it came with, or the compiled peak of its plan.

    The program is compiled once `needed` or the message is asked for.

    Args:
        error: it names the limit that a plan is predicted to need.
        leanest: makes the plan that is predicted to need that limit; it gives None where there is none.
        compiled: compiles a plan.
        untried: options that were not given, by which a train step may hold less.
    """

    @functools.cache
    def over() -> tuple[AnyPlan, float] | None:
        """The plan and its compiled peak, where this is more than it was predicted to need."""
        plan = leanest()
        peak = None if plan is None else _compiled_peak(compiled, plan)
        if plan is None or peak is None or math.isinf(peak) or fits(peak, with_rounding(error.needed)):
            return None
        return plan, peak

    def needed() -> float:
        found = over()
        return error.needed if found is None else math.ceil(found[1])

    def message(_: float) -> str:
        found = over()
        if found is None:
            return str(error)
        plan, peak = found
        return (
            f"{plan.name}: no plan fits in {bytes_text(error.budget)} per device. The leanest is predicted to hold "
            f"{bytes_text(plan.predicted.peak_bytes)}, and holds {_text(peak)} by XLA's account of its compiled "
            f"program.\n{error.largest}\n{_advice(peak, untried)}"
        )

    return MemoryLimitError(message, budget=error.budget, needed=needed, least=error.least, largest=error.largest)


def _compiled_peak(compiled: Compiler[AnyPlan], plan: AnyPlan) -> float | None:
    """Bytes by XLA's account; inf if they are more than the compiler may use, None if it does not compile the plan."""
    try:
        return peak_bytes(compiled(plan))
    except Exception as error:  # whatever JAX refuses a program with
        is_too_large = isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)
        return math.inf if is_too_large else None


def _next_target(predicted: float, peak: float, limit: float, *, is_first: bool) -> float:
    """What the next plan may be predicted to hold.

    >>> _next_target(80, 120, 100, is_first=True), _next_target(80, 120, 100, is_first=False)
    (66.66666666666667, 60)
    """
    if math.isinf(peak):
        return OUT_OF_MEMORY * predicted
    corrected = limit * predicted / peak if is_first else _corrected(predicted, peak, limit)
    return max(0, min(LEANER_PEAK_SHARE * predicted, corrected))


def _corrected(predicted: float, peak: float, limit: float) -> float:
    """What a plan may be predicted to hold, if predictions are off as that of a plan with this peak was.

    >>> _corrected(80, 100, 120), _corrected(100, 80, 120)
    (96.0, 140)
    """
    return min(limit * predicted / peak, limit - (peak - predicted))


def _with_figures(tried: Sequence[tuple[AnyPlan, float]], limit: float, untried: Sequence[str]) -> AnyPlan:
    """The plan that fits, or else the leanest, with its compiled peak; and a remark if it is not as it was planned."""
    plan, peak = min(tried, key=lambda one: one[1])
    first, first_peak = tried[0]
    remarks = plan.warnings
    if not fits(peak, limit):
        more = {1: "", 2: "; a plan made to hold less doesn't fit, either"}
        others = more.get(len(tried), f"; {len(tried) - 1} plans made to hold less don't fit, either")
        remarks = (
            *remarks,
            f"memory: by XLA's account this plan holds {_text(peak)} on each device, where {bytes_text(limit)} are "
            f"allowed and {bytes_text(plan.predicted.peak_bytes)} were predicted{others}.\n"
            f"{_advice(peak, untried)}",
        )
    elif plan is not first:
        remarks = (
            *remarks,
            f"memory: the first plan holds {_text(first_peak)} on each device by XLA's account, where "
            f"{bytes_text(limit)} are allowed and {bytes_text(first.predicted.peak_bytes)} were predicted. The step "
            f"was planned again to hold less; this plan holds {_text(peak)}.",
        )
    if plan is not first:  # that nothing is faster is shown of plans within a lower limit alone
        plan = replace(plan, status="feasible", bound=min(first.bound, plan.cost))
    return replace(plan, warnings=remarks, compiled_peak=None if math.isinf(peak) else math.ceil(peak))


def _text(peak: float) -> str:
    return "more than the compiler may use" if math.isinf(peak) else bytes_text(peak)


def _advice(peak: float, untried: Sequence[str] = UNTRIED_MEMORY_OPTIONS) -> str:
    """What to try where no plan holds so little.

    >>> _advice(5 * 2**30 - 1)
    "Try memory='5120MiB', a larger mesh, or remat='auto', if what the step keeps for its gradient is much."
    >>> _advice(300_000, ()), _advice(math.inf, ())
    ("Try memory='293KiB' or a larger mesh.", 'Try a larger mesh.')
    """
    unit, size = ("KiB", 2**10) if peak < 32 * 2**20 else ("MiB", 2**20)
    more = [] if math.isinf(peak) else [f"memory='{math.ceil(peak / size)}{unit}'"]
    if not untried:
        return f"Try {' or '.join([*more, 'a larger mesh'])}."
    ways = f"or {' or '.join(untried)}, if what the step keeps for its gradient is much"
    return f"Try {', '.join([*more, 'a larger mesh', ways])}."
