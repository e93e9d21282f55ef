"""Every error autoshard raises on purpose.

A message says what is wrong, where (the user's line and parameter path), the numbers, and the next step. Users catch
:class:`AutoshardError`; the child says which stage gave up.
"""

from __future__ import annotations


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
    """No sharding fits. Carries the budget and the smallest one that would do, in bytes per device."""

    def __init__(self, message: str, *, budget: float, needed: float):
        super().__init__(message)
        self.budget = budget
        self.needed = needed


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
