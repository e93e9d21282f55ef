"""The variants of a step in, the one out that is predicted to be fastest within the memory limit."""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Mapping
from typing import Protocol, TypeVar

from autoshard.errors import MemoryLimitError, MicrobatchError
from autoshard.program import Program
from autoshard.user_plan import Plan
from autoshard.variants.variant import StepVariants, Variant


class PlannedProgram(Protocol):
    """A program with its plan."""

    @property
    def plan(self) -> Plan: ...


Planned = TypeVar("Planned", bound=PlannedProgram)


def fastest(
    variants: StepVariants,
    mesh: Mapping[str, int],
    microbatches: int | None,
    planned: Callable[[Program], Planned],
    given: Plan | None = None,
) -> Planned:
    """The step planned in the variant that is predicted to take the fewest seconds.

    Args:
        microbatches: how many the user wants; None: as few as fit.
        given: the plan that the user gave, which is for one of the variants.

    Raises:
        MemoryLimitError: no variant fits.
        MicrobatchError: the batch cannot be split into as many microbatches as the user wants.
    """
    try:
        return _in_microbatches(variants, mesh, microbatches or 1, planned, given)
    except MemoryLimitError as error:
        if microbatches is not None or given is not None:
            raise
        for count in (2**power for power in range(1, 31)):
            try:
                return _in_microbatches(variants, mesh, count, planned)
            except MemoryLimitError:
                continue
            except MicrobatchError as refused:
                raise error from refused
        raise


def _in_microbatches(
    variants: StepVariants,
    mesh: Mapping[str, int],
    count: int,
    planned: Callable[[Program], Planned],
    given: Plan | None = None,
) -> Planned:
    """The cheapest of the ways to add up microbatches: over all devices in each of them, or after the last.

    For the latter, each group of devices has a sum of its own. That takes more memory and communicates less.
    """
    programs = [variants.program(Variant(count))]
    if count > 1:
        sizes = mesh.values()
        for groups in sorted({*itertools.accumulate(sizes, operator.mul), *sizes} - {1}):
            with contextlib.suppress(MicrobatchError):  # the rows of a microbatch are no multiple of so many groups
                programs.append(variants.program(Variant(count, groups)))
    if given is not None:  # it was made for one of them
        programs = [one for one in programs if one.fingerprint == given.fingerprint] or programs[:1]
    found: list[Planned] = []
    errors: list[MemoryLimitError] = []
    for one in programs:
        try:
            found.append(planned(one))
        except MemoryLimitError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=lambda one: one.plan.cost)
