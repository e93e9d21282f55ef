"""Functions and abstract arguments in, a `Program` out: the traced step as flat equations over values."""

from autoshard.program.paths import slashed
from autoshard.program.program import Equation, Program, Value, dtype_name, is_number
from autoshard.program.tracing import context, trace
from autoshard.program.user_code import Source, named_refusal

__all__ = [
    "Equation",
    "Program",
    "Source",
    "Value",
    "context",
    "dtype_name",
    "is_number",
    "named_refusal",
    "slashed",
    "trace",
]
