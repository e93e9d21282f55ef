"""Tactics: published ways to share out a step, as restrictions under which it is planned.

>>> from autoshard.tactics import DataParallel, Megatron
>>> @autoshard(mesh=mesh, tactics=[DataParallel("data"), Megatron("model")])  # doctest: +SKIP
... def train_step(state, batch): ...

`schemes.py` has one row per scheme. What a row can say is in `rules.py`, what it is said of in `roles.py`, and how the
planner's choices become fewer in `restriction.py`.
"""

from autoshard.tactics.requests import Step, StepArgument
from autoshard.tactics.roles import Dim
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
    "SequenceParallel",
    "Step",
    "StepArgument",
    "Tactic",
    "ThreeDimensional",
    "TwoAndAHalf",
    "TwoDimensional",
    "Ulysses",
    "ZeRO",
]
