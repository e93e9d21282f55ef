"""A step that fits in no way in, the error that says so out: the limit that would do, what is largest, what to try."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from autoshard.errors import MemoryLimitError
from autoshard.jaxprs import has_backward_pass
from autoshard.program import Program
from autoshard.report.units import bytes_text
from autoshard.solver.problem import InfeasibleError

_SAME_LIMIT = 0.01  # share by which two limits may differ that are taken for one


def memory_error(
    program: Program,
    error: InfeasibleError,
    usable: float,
    is_part: bool,
    untried: Sequence[str] = (),
    leanest: Callable[[], Any] | None = None,
) -> MemoryLimitError:
    """What a user reads whose step does not fit.

    Args:
        usable: the share of the limit that plans may fill.
        is_part: whether only a part of all shardings was offered.
        untried: options that were not given, by which a train step may hold less.
        leanest: makes the plan that needs the least.
    """
    values = sorted(program.values, key=lambda value: -value.bytes)[:3]
    listed = (f"  {value} {bytes_text(value.bytes)} ({value.source or 'argument'})" for value in values)
    largest = "\n".join(("Largest values, before sharding:", *listed))
    if program.ordered_arguments:
        largest += f"\n{len(program.ordered_arguments)} arguments lie as their types of explicit mode say; "
        largest += "ignore_constraints=True frees them."
    if program.wishes:
        largest += "\nArguments lie as the metadata of flax says; ignore_constraints=True frees them."
    less = untried if has_backward_pass(program.jaxpr.jaxpr) else ()
    limit = bytes_text(error.limit)

    def message(needed: float) -> str:
        if math.isinf(needed):
            found = f"no sharding fits in {limit} per device; which limit does was not found in time"
            more = "a longer time_limit"
        else:
            is_proven, is_least = error.least > error.limit, error.least >= (1 - _SAME_LIMIT) * needed
            none_fits = "fits" if is_proven else "was found that fits"
            which = "the smallest limit that does" if is_least else "the smallest limit found that does"
            found = f"no sharding {none_fits} in {limit} per device; {which}"
            if is_part:
                found = f"no sharding was found that fits in {limit} per device; the smallest limit of those looked at"
            found += f" is {bytes_text(needed)}, of which {1 - usable:.0%} stay free, as far as predictions can be off"
            unit, size = ("KiB", 2**10) if needed < 32 * 2**20 else ("MiB", 2**20)
            more = f"memory='{math.ceil(needed / size)}{unit}'"
        return f"{found}.\n{largest}\nTry {_listed((*less, more, 'a larger mesh'))}."

    def needed() -> float:
        return error.needed if math.isinf(error.needed) else math.ceil(error.needed)

    def least() -> float:
        return error.least

    return MemoryLimitError(message, budget=error.limit, needed=needed, least=least, largest=largest, leanest=leanest)


def _listed(steps: Sequence[str]) -> str:
    """
    >>> _listed(["remat='auto'", "memory='2KiB'", "a larger mesh"]), _listed(["memory='2KiB'", "a larger mesh"])
    ("remat='auto', memory='2KiB', or a larger mesh", "memory='2KiB' or a larger mesh")
    """
    comma = "," if len(steps) > 2 else ""
    return f"{', '.join(steps[:-1])}{comma} or {steps[-1]}"
