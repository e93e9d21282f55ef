"""The clock, looked at while a step is formulated: what takes minutes must not outlast the user's time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
# Of the time that is left: what formulating the whole may take. A part of it and the search share the rest.
WHOLE_SHARE = 0.6
LEAST_SECONDS = 1.0  # that it may take even if no time is left: a small step is planned as ever


class FormulationTimeout(Exception):
    """The time for formulating is up. It is no `AutoshardError`: a smaller problem is formulated instead."""


def formulating_ends(until: float) -> float:
    """When formulating the whole has to end, if planning is to end at that time; both as `time.monotonic` has them."""
    now = time.monotonic()
    return now + max(LEAST_SECONDS, WHOLE_SHARE * (until - now))


def ends_at(until: float) -> Callable[[], None]:
    """What raises `FormulationTimeout` when it is called past that time, as `time.monotonic` has it.

    >>> ends_at(math.inf)()
    >>> ends_at(-math.inf)()
    Traceback (most recent call last):
        ...
    autoshard.model.pricing.formulation_deadline.FormulationTimeout
    """

    def check() -> None:
        if time.monotonic() > until:
            raise FormulationTimeout

    return check if until < math.inf else no_deadline


def no_deadline() -> None:
    pass


def once_in_time(make: Callable[[float], T]) -> Callable[[float], T]:
    """`make`, which is given a time and may be late, called until it has returned once.

    >>> made = once_in_time(lambda until: [until])
    >>> made(2.0) is made(3.0)
    True
    """
    known: list[T] = []

    def made(until: float) -> T:
        if not known:
            known.append(make(until))
        return known[0]

    return made
