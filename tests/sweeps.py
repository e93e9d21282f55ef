"""Sweeps: many cases that prove one mechanism. A spread of them runs by default, the rest behind the marker `slow`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def some(cases: Iterable[Any], *chosen: Any) -> list:
    """Parameters of a test: those cases that are chosen run by default."""
    every = [*cases]
    assert {*chosen} <= {*every}, "these are no cases"
    return [one if one in chosen else _slow(one) for one in every]


def spread(cases: Sequence[Any], step: int, first: int = 0) -> list:
    """Parameters of a test: each `step`-th case runs by default."""
    return [one if k % step == first else _slow(one) for k, one in enumerate(cases)]


def by_primitive(cases: Iterable[Any]) -> list:
    """Parameters of a test, by their names: those that are not the first of their primitive have the marker `further`.

    They run by default, but not with the newest release of JAX, where one case shows that a primitive is as it was.
    """
    seen, found = set[str](), []
    for case in cases:
        further = pytest.mark.further if case.primitive in seen else ()
        found.append(pytest.param(case, marks=further, id=case.name))
        seen.add(case.primitive)
    return found


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
