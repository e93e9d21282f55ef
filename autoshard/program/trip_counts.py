"""A `while` in, how often it turns out, as far as its condition says so.

A counter says so that starts at a number, changes by a number in each turn, and is compared with a number. Of several
conditions that all have to hold each that is such a comparison is a bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np

from autoshard.errors import ArgumentError
from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Literal, called_jaxpr, called_operands, implementation_of
from autoshard.program.user_code import Source

# Turns of a loop of unknown length. A guess, large enough that the work inside the loop outweighs the work around it.
UNKNOWN_TURNS = 32
# Primitives whose result has the value of their operand, as far as counters and flags of loops go.
PASSES_COUNTERS = frozenset({
    "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "reduce_and", "reduce_or", "reshape", "squeeze",
    "stop_gradient",
})  # fmt: skip


@dataclass(frozen=True)
class LoopLength:
    """How often a `while` is taken to turn."""

    source: Source | None
    turns: int
    how: str  # "said" by the user, "exact" if its condition tells, else "guessed"


def requested_turns(source: Source | None, trips: Mapping[str, int]) -> int | None:
    """What the user says of the loop at a line: by ``file.py:12``, by the function that it stands in, or by a glob."""
    return next((turns for glob, turns in trips.items() if _stands_at(source, glob)), None)


def check_places(trips: Mapping[str, int], loops: Sequence[LoopLength]) -> None:
    """
    Raises:
        ArgumentError: some place is that of no loop.
    """
    for glob in trips:
        if glob != "*" and not any(_stands_at(loop.source, glob) for loop in loops):
            found = ", ".join(dict.fromkeys(f"{one.source} ({one.source.function})" for one in loops if one.source))
            raise ArgumentError(f"trips= names {glob!r}, where no `while` stands; the step has {found or 'none'}")


def _stands_at(source: Source | None, glob: str) -> bool:
    names = [] if source is None else [str(source), source.function, source.function.rsplit(".", 1)[-1]]
    return glob == "*" or any(fnmatch(name, glob) for name in names)


def bounds(eqn: JaxprEqn, numbers: Sequence[float | None]) -> list[int | None]:
    """Per condition that has to hold, after how many turns it no longer does; None where it is no such comparison.

    Args:
        eqn: a `while`.
        numbers: per operand of it the number that it is, all of its elements alike; None where that is not known.
    """
    params = eqn.params
    tests, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
    operands = [_Number(x) if x is not None else _UnknownValue() for x in numbers]
    carries = [_Carry(i) for i in range(len(numbers) - consts)]
    (condition,) = _expressions(params["cond_jaxpr"], [*operands[:tests], *carries])
    handed_on = _expressions(params["body_jaxpr"], [*operands[tests:consts], *carries])
    return [_count(one, numbers[consts:], handed_on) for one in _conjuncts(condition)]


class _UnknownValue:
    """What nothing is known of."""


@dataclass(frozen=True)
class _Number:
    value: float


@dataclass(frozen=True)
class _Carry:
    index: int


@dataclass(frozen=True, eq=False)
class _Operation:
    primitive: str
    operands: tuple[Any, ...]


def _expressions(closed: ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
    """What the results of a jaxpr are made of, in terms of its inputs; calls are opened."""
    env = dict(zip(closed.jaxpr.invars, inputs, strict=True))
    env |= {var: _number(const) for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)}

    def read(atom: Any) -> Any:
        return _number(atom.val) if isinstance(atom, Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        opened = called_jaxpr(eqn)
        if opened is not None:
            results = _expressions(opened, called_operands(eqn, operands))
        elif eqn.primitive.name in PASSES_COUNTERS:
            results = operands[:1]
        elif _is_foreign(eqn) and (implementation := implementation_of(eqn)) is not None:
            results = _expressions(implementation, operands)
        else:
            results = [_Operation(eqn.primitive.name, tuple(operands))] * len(eqn.outvars)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in closed.jaxpr.outvars]


def _is_foreign(eqn: JaxprEqn) -> bool:
    """Whether a library made the primitive, say to mark a flag or a counter."""
    implementation = getattr(eqn.primitive.impl, "func", eqn.primitive.impl)
    is_one_number = len(eqn.outvars) == 1 and getattr(eqn.outvars[0].aval, "shape", ()) == ()
    return is_one_number and not implementation.__module__.startswith("jax.")


def _number(value: Any) -> Any:
    array = np.asarray(value) if isinstance(value, int | float | np.generic | np.ndarray) else None
    if array is None or array.ndim or array.dtype.kind not in "biuf":
        return _UnknownValue()
    return _Number(float(array))


def _conjuncts(condition: Any) -> list[Any]:
    if isinstance(condition, _Operation) and condition.primitive == "and":
        return [one for operand in condition.operands for one in _conjuncts(operand)]
    return [condition]


def _count(condition: Any, start: Sequence[float | None], handed_on: Sequence[Any]) -> int | None:
    """After how many turns a comparison of a counter with a number fails."""
    if not isinstance(condition, _Operation) or condition.primitive not in ("lt", "le", "gt", "ge", "ne"):
        return None
    (left, right), kind = condition.operands, condition.primitive
    if not isinstance(left, _Carry) or _step(left.index, handed_on[left.index]) in (None, 0.0):
        left, right, kind = right, left, {"lt": "gt", "le": "ge", "gt": "lt", "ge": "le", "ne": "ne"}[kind]
    limit = _value(right, start, handed_on)
    if not isinstance(left, _Carry) or limit is None:
        return None
    step, begin = _step(left.index, handed_on[left.index]), start[left.index]
    rises = kind in ("lt", "le") or (kind == "ne" and begin is not None and limit > begin)
    if step is None or begin is None or (step > 0) != rises or step == 0:
        return None
    turns = (limit - begin) / step
    return max(0, math.floor(turns) + 1 if kind in ("le", "ge") else math.ceil(turns))


def _value(limit: Any, start: Sequence[float | None], handed_on: Sequence[Any]) -> float | None:
    """The number that a limit is in all turns."""
    if isinstance(limit, _Carry):
        return start[limit.index] if _step(limit.index, handed_on[limit.index]) == 0.0 else None
    return limit.value if isinstance(limit, _Number) else None


def _step(carry: int, after: Any) -> float | None:
    """By how much a turn changes a carry; None where that is no number."""
    if after == _Carry(carry):
        return 0.0
    if not isinstance(after, _Operation):
        return None
    if after.primitive == "select_n":  # of a batch of loops, those that have ended stay
        steps = [_step(carry, case) for case in after.operands[1:]]
        moving = [step for step in steps if step != 0.0]
        return moving[0] if len(moving) == 1 else None
    if after.primitive not in ("add", "sub"):
        return None
    first, second = after.operands
    if after.primitive == "add" and isinstance(first, _Number):
        first, second = second, first
    if first != _Carry(carry) or not isinstance(second, _Number):
        return None
    return second.value if after.primitive == "add" else -second.value
