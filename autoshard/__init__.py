"""autoshard: automatic sharding of JAX train steps.

>>> from autoshard import autoshard  # doctest: +SKIP
>>> @autoshard(mesh=mesh, donate_argnums=0)  # doctest: +SKIP
... def train_step(state, batch): ...
"""

from autoshard.api import autoshard, evaluate, plan, propagate, verify
from autoshard.errors import (
    ArgumentError,
    AutoshardError,
    ConflictError,
    MemoryLimitError,
    MeshError,
    PlanError,
    RuleError,
    SolverError,
)
from autoshard.mesh import Collective, Link, Topology, topology
from autoshard.plans import Plan, Prediction
from autoshard.propagation import Propagated, UnknownPrimitiveWarning, register_rule

__all__ = [
    "ArgumentError",
    "AutoshardError",
    "Collective",
    "ConflictError",
    "Link",
    "MemoryLimitError",
    "MeshError",
    "Plan",
    "PlanError",
    "Prediction",
    "Propagated",
    "RuleError",
    "SolverError",
    "Topology",
    "UnknownPrimitiveWarning",
    "autoshard",
    "evaluate",
    "plan",
    "propagate",
    "register_rule",
    "topology",
    "verify",
]
