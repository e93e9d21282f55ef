"""Tactics: published ways to share out a step, as restrictions under which it is planned.

>>> from autoshard.tactics import DataParallel, Megatron
>>> @autoshard(mesh=mesh, tactics=[DataParallel("data"), Megatron("model")])  # doctest: +SKIP
... def train_step(state, batch): ...

`schemes.py` has one row per scheme. What a row can say is in `rules.py`, what it is said of in `roles.py`, and how the
planner's choices become fewer in `restriction.py`.
"""

from autoshard.tactics.requests import Step, StepArgument, TacticLike, is_tactic, text_of_tactic
from autoshard.tactics.restriction import Restricts, restricted
from autoshard.tactics.roles import Dim, Roles, batch_dim
from autoshard.tactics.schemes import (
    FSDP,
    HSDP,
    DataParallel,
    ExpertParallel,
    Megatron,
    MiCS,
    SequenceParallel,
    Tactic,
    ThreeDimensional,
    TwoAndAHalf,
    TwoDimensional,
    Ulysses,
    ZeRO,
)

__all__ = [
    "FSDP",
    "HSDP",
    "DataParallel",
    "Dim",
    "ExpertParallel",
    "Megatron",
    "MiCS",
    "Restricts",
    "Roles",
    "SequenceParallel",
    "Step",
    "StepArgument",
    "Tactic",
    "TacticLike",
    "ThreeDimensional",
    "TwoAndAHalf",
    "TwoDimensional",
    "Ulysses",
    "ZeRO",
    "batch_dim",
    "is_tactic",
    "restricted",
    "text_of_tactic",
]
