"""autoshard: automatic sharding of JAX train steps.

>>> from autoshard import autoshard  # doctest: +SKIP
>>> @autoshard(mesh=mesh, donate_argnums=0)  # doctest: +SKIP
... def train_step(state, batch): ...
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autoshard.errors import (
    ArgumentError,
    AutoshardError,
    ConflictError,
    MemoryLimitError,
    MeshError,
    MicrobatchError,
    MissingPackageError,
    PlanError,
    ProcessError,
    RuleError,
    ScheduleError,
    SolverError,
    StageError,
)

if TYPE_CHECKING:
    from autoshard.api import autoshard, evaluate, plan, propagate, verify
    from autoshard.cache import CacheWarning
    from autoshard.compiled.memory_check import MemoryWarning
    from autoshard.frontiers import Frontier, fewest_devices, frontier, largest_batch
    from autoshard.mesh import Collective, Link, Topology, topology
    from autoshard.operations import operation
    from autoshard.plans.prediction import Prediction
    from autoshard.propagation import Propagation, UnknownPrimitiveWarning, register_rule
    from autoshard.report.difference import Difference
    from autoshard.report.explanation import Explanation
    from autoshard.together.planning import plan_together
    from autoshard.user_plan import Plan

__all__ = [
    "ArgumentError",
    "AutoshardError",
    "CacheWarning",
    "Collective",
    "ConflictError",
    "Difference",
    "Explanation",
    "Frontier",
    "Link",
    "MemoryLimitError",
    "MemoryWarning",
    "MeshError",
    "MicrobatchError",
    "MissingPackageError",
    "Plan",
    "PlanError",
    "Prediction",
    "ProcessError",
    "Propagation",
    "RuleError",
    "ScheduleError",
    "SolverError",
    "StageError",
    "Topology",
    "UnknownPrimitiveWarning",
    "autoshard",
    "evaluate",
    "fewest_devices",
    "frontier",
    "largest_batch",
    "operation",
    "plan",
    "plan_together",
    "propagate",
    "register_rule",
    "topology",
    "verify",
]

# Imported when they are first asked for, since they take JAX, which the solver starts in half the time without.
_HOMES = {
    # Plans with stages are of kinds of their own, which `Plan.load` knows once they are imported.
    "autoshard.api": ("Plan", "autoshard", "evaluate", "plan", "propagate", "verify"),
    "autoshard.cache": ("CacheWarning",),
    "autoshard.compiled.memory_check": ("MemoryWarning",),
    "autoshard.frontiers": ("Frontier", "fewest_devices", "frontier", "largest_batch"),
    "autoshard.mesh": ("Collective", "Link", "Topology", "topology"),
    "autoshard.operations": ("operation",),
    "autoshard.plans.prediction": ("Prediction",),
    "autoshard.propagation": ("Propagation", "UnknownPrimitiveWarning", "register_rule"),
    "autoshard.report.difference": ("Difference",),
    "autoshard.report.explanation": ("Explanation",),
    "autoshard.together.planning": ("plan_together",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    module = _HOME.get(name, f"autoshard.{name}")
    try:
        found = import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}") from None
    value = getattr(found, name) if name in _HOME else found
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
