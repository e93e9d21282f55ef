"""Every error autoshard raises on purpose, and its warnings, which name the user's line.

A message says what is wrong, where (the user's line and parameter path), the numbers, and the next step. Users catch
:class:`AutoshardError`; the child says which stage gave up.
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = re.compile(r"[/\\]site-packages[/\\](jax|jaxlib|flax|optax|equinox|chex|jaxtyping|haiku)[/\\]")
_STANDARD = sysconfig.get_path("stdlib") + os.sep


@functools.cache
def is_users(file: str) -> bool:
    """Whether a file is the user's: not autoshard's, JAX's, a model library's or the standard library's."""
    if _LIBRARIES.search(file) or file.startswith(OWN_FOLDER):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD)


def warn(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line of the user's that led here."""
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)


class AutoshardError(Exception):
    """Base of every error autoshard raises on purpose."""


class ArgumentError(AutoshardError, TypeError):
    """An option or argument of a kind that autoshard does not take."""


class RuleError(AutoshardError):
    """A sharding rule that contradicts itself, its operands, or one already registered."""


class MeshError(AutoshardError):
    """A mesh, topology or PartitionSpec that does not fit the arrays or devices it is used with."""


class ConflictError(AutoshardError):
    """Two fixed shardings that cannot both hold."""


class MissingPackageError(AutoshardError, ImportError):
    """An optional package that is needed here is not installed."""


class MemoryLimitError(AutoshardError):
    """No sharding fits. Carries the budget and the smallest one that would do, in bytes per device.

    That nothing fits may be known long before the smallest one that would do: it is sought once `needed` or the message
    is asked for.
    """

    def __init__(
        self,
        message: str | Callable[[float], str],
        *,
        budget: float,
        needed: float | Callable[[], float],
        least: float | Callable[[], float] = 0.0,
        largest: str = "",
        leanest: Callable[[], Any] | None = None,
    ):
        """
        Args:
            message: or what makes it of `needed`.
            needed: or what finds it; inf where it is not found in time.
            least: bytes per device: it is proven that no smaller budget would do; or what finds it.
            largest: the paragraph of the message that names the largest values.
            leanest: makes the plan that needs so little; it gives None where there is none.
        """
        super().__init__(*[message] if isinstance(message, str) else [])
        self.budget, self.largest, self.leanest = budget, largest, leanest
        self._message, self._needed, self._least = message, needed, least

    @property
    def needed(self) -> float:
        """The smallest budget found that would do, in bytes per device; inf if none was found in time."""
        if callable(self._needed):
            self._needed = self._needed()
        return self._needed

    @property
    def least(self) -> float:
        """Bytes per device: it is proven that no smaller budget would do."""
        if callable(self._least):
            self._least = self._least()
        return self._least

    def __str__(self) -> str:
        if callable(self._message):
            self._message = self._message(self.needed)
            self.args = (self._message,)
        return self._message

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _memory_limit_error, (str(self), self.budget, self.needed, self.least, self.largest)


def _memory_limit_error(message: str, budget: float, needed: float, least: float, largest: str) -> MemoryLimitError:
    return MemoryLimitError(message, budget=budget, needed=needed, least=least, largest=largest)


def of_least_need(errors: Sequence[MemoryLimitError], until: float = math.inf) -> MemoryLimitError:
    """The error that names the smallest budget. What others need is not sought where that is known to be more.

    Args:
        until: when the search for more of them ends, as `time.monotonic` has it.
    """
    first, *others = sorted(errors, key=lambda error: error.least)
    for other in others:
        if other.least >= first.needed or time.monotonic() > until:
            break
        first = min(first, other, key=lambda error: error.needed)
    return first


class SolverError(AutoshardError):
    """The integer program has no solution, or a solver returned one that `verify` rejects."""


class PlanError(AutoshardError):
    """A plan used with another mesh, another program, or other arguments than it was made for."""


class MicrobatchError(AutoshardError):
    """A step that cannot be computed microbatch by microbatch without changing what it computes."""


class ScheduleError(AutoshardError):
    """A pipeline schedule that deadlocks, or whose orders miss, repeat or misplace a task."""


class StageError(AutoshardError):
    """A step that cannot be cut into the stages of a pipeline, or a stage that failed as it ran."""


class ProcessError(AutoshardError):
    """Processes that share a mesh and do not run the same step, or of which one has failed or ended."""
