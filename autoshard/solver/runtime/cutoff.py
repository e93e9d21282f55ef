"""A search that ends as soon as its bound says that nobody will want its result."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from autoshard.solver.progress import Progress


class CutoffEnd(Exception):
    """No solution of a problem costs as little as what is known. It is no `AutoshardError`: nothing went wrong."""

    def __init__(self, bound: float):
        super().__init__(bound)
        self.bound = bound  # proven: no solution costs less


class Cutoff:
    """Told what a running `solve` knows; raises once its bound is above what is enough.

    Of the searches of one `solve_within` only the first proves something: later ones count more than is held. An
    exception may leave a search only in the thread that called it.

    >>> cutoff = Cutoff(lambda: 2.0)
    >>> cutoff(Progress("bounds", cost=9.0, bound=1.5, seconds=0.1))
    >>> cutoff(Progress("bounds", cost=9.0, bound=2.5, seconds=0.2))
    Traceback (most recent call last):
        ...
    autoshard.solver.runtime.cutoff.CutoffEnd: 2.5
    """

    def __init__(self, enough: Callable[[], float], tell: Callable[[Progress], None] | None = None):
        """
        Args:
            enough: the cost above which no solution is wanted.
            tell: is told the same.
        """
        self._enough, self._tell = enough, tell
        self._thread, self._seconds, self._is_first = threading.get_ident(), -math.inf, True

    def __call__(self, progress: Progress) -> None:
        if self._tell is not None:
            self._tell(progress)
        if threading.get_ident() != self._thread:
            return
        self._is_first &= progress.seconds >= self._seconds
        self._seconds = progress.seconds
        if self._is_first and progress.bound > self._enough():
            raise CutoffEnd(progress.bound)
