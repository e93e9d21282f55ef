"""Results that are made once for the same arguments: layers repeat, and so do what they cost and hold."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np

from autoshard.layout import Layout
from autoshard.model.pricing.formulation_deadline import ends_at, no_deadline

T = TypeVar("T")


class Memo:
    """What functions returned, by their very arguments."""

    def __init__(self) -> None:
        self.tick = no_deadline  # called before anything is made
        self._lists: dict[tuple[Layout, ...], tuple[Layout, ...]] = {}
        self._results: dict[tuple, tuple] = {}

    @contextlib.contextmanager
    def ending(self, until: float) -> Iterator[None]:
        """While it lasts, whatever is made past that time raises `FormulationTimeout`."""
        self.tick = ends_at(until)
        try:
            yield
        finally:
            self.tick = no_deadline

    def in_time(self, items: Iterable[T]) -> tuple[T, ...]:
        """The items, each of which is made in time: there may be thousands."""
        made = []
        for item in items:
            self.tick()
            made.append(item)
        return tuple(made)

    def one(self, layouts: Iterable[Layout]) -> tuple[Layout, ...]:
        """The one tuple of these layouts: equal ones are the same object, so that `once` knows them again."""
        layouts = tuple(layouts)
        return self._lists.setdefault(layouts, layouts)

    def once(self, make: Callable[..., Any], *args: Any, of: tuple = ()) -> Any:
        """What `make(*args)` returns, made once for these very arguments: layers repeat.

        Args:
            make: a function of `args` and `of` alone.
            *args: told apart by identity, so that large ones need not be compared; what is remembered keeps them alive.
            of: what else the result depends on, compared by value.
        """
        key = make.__module__, make.__qualname__, *map(id, args), of
        if key not in self._results:
            self.tick()
            self._results[key] = make(*args), args
        return self._results[key][0]


class LastChoice:
    """What was found of the choice that was asked about last, for as long as no other is asked about."""

    def __init__(self) -> None:
        self._choice: tuple[int, ...] | None = None
        self._found: dict[str, Any] = {}

    def once(self, what: str, choice: Sequence[int], make: Callable[[], Any]) -> Any:
        """What `make()` returns, made once of a choice."""
        choice = tuple(choice)
        if choice != self._choice:
            self._choice, self._found = choice, {}
        if what not in self._found:
            self._found[what] = make()
        return self._found[what]


def read_only(array: np.ndarray) -> np.ndarray:
    """The array, which nobody can change any more: those who ask for it share it."""
    array.setflags(write=False)
    return array
