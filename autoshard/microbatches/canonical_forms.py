"""Jaxprs and equations in, their forms out: equal for those that are written alike, so that one stands for all.

The stages of a pipeline are mostly alike. A program is traced, and read, once for all stages that have the like.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, aval_of
from autoshard.microbatches.loop import MicrobatchedStep

Form = tuple[Any, ...]


def form_of(closed: ClosedJaxpr) -> Form:
    """Equal for jaxprs that are written alike, but for their functions: their programs have one fingerprint."""
    jaxpr = closed.jaxpr
    number: dict[Any, int] = {var: n for n, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def read(atom: Any) -> Any:
        return _literal(atom) if isinstance(atom, Literal) else number[atom]

    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        number |= {var: len(number) + n for n, var in enumerate(eqn.outvars)}
        params = tuple((name, _form(value)) for name, value in sorted(eqn.params.items()))
        equations.append((eqn.primitive.name, operands, tuple(map(aval_of, eqn.outvars)), params))
    return tuple(closed.in_avals), tuple(map(id, closed.consts)), tuple(equations), tuple(map(read, jaxpr.outvars))


def _form(parameter: Any) -> Any:
    """Of a parameter: equal for those that say the same."""
    if isinstance(parameter, tuple | list):
        return tuple(map(_form, parameter))
    if isinstance(parameter, Jaxpr | ClosedJaxpr):
        return form_of(parameter if isinstance(parameter, ClosedJaxpr) else ClosedJaxpr(parameter, ()))
    return None if callable(parameter) else repr(parameter)


class StepForms:
    """The forms of what a step's parts compute: equal for equations of one step that make the same of their operands.

    Their functions and inner jaxprs are the same objects then, and they come from the same lines. Forms hold for as
    long as the step is there.
    """

    def __init__(self, step: MicrobatchedStep):
        self._step = step

    @cached_property
    def _proven(self) -> Mapping[int, frozenset[Form]]:
        """Equation -> what the proof says of it and of what is inside."""
        proof, found = self._step.proof, dict[int, set[Form]]()
        sets = {"touched": proof.touched, "drawn": proof.drawn, "counted": proof.counted, "own": proof.own}
        for name, paths in sets.items():
            for path in paths:
                assert isinstance(path[0], int), "a path begins with an equation of the step"
                found.setdefault(path[0], set()).add((name, path[1:], proof.counted.get(path), proof.own.get(path)))
        return {i: frozenset(facts) for i, facts in found.items()}

    def in_microbatch(self, i: int, number: VariableNumbers) -> Form:
        """Of an equation, as a microbatch runs it."""
        return number.equation(self._step.equations[i]), number.equation(self._step.small[i]), self._proven.get(i)

    def total(self, var: Any) -> Form:
        """Of how a sum over microbatches begins, grows and ends."""
        eqn = self._step.equations[self._step.makers[var]]
        return self._step.op(var), aval_of(var), *_line(eqn)


class VariableNumbers:
    """Variables by numbers, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}

    def __call__(self, atom: Any) -> Any:
        """A variable's number, or what a literal says."""
        if isinstance(atom, Literal):
            return _literal(atom)
        return self._numbers.setdefault(atom, len(self._numbers))

    def equation(self, eqn: JaxprEqn) -> Form:
        """Of an equation: equal where operands have the same numbers, and all else is the same."""
        params = tuple((name, _same(value)) for name, value in eqn.params.items())
        made = tuple((self(var), aval_of(var)) for var in eqn.outvars)
        return eqn.primitive, tuple(map(self, eqn.invars)), made, params, id(eqn.ctx), *_line(eqn)


def _literal(atom: Literal) -> Form:
    """Of a number: its type, and its very bits."""
    array = np.asarray(atom.val)
    return atom.aval, array.dtype, repr(atom.val) if array.dtype == object else array.tobytes()


def _line(eqn: JaxprEqn) -> Form:
    return eqn.source_info.traceback, str(eqn.source_info.name_stack)


def _same(parameter: Any) -> Any:
    """Of a parameter: equal for one object, and for what is equal without being a function or a jaxpr."""
    if isinstance(parameter, tuple | list):
        return tuple(map(_same, parameter))
    if isinstance(parameter, numbers.Number | np.generic | str | None):
        return type(parameter), repr(parameter)
    if isinstance(parameter, Jaxpr | ClosedJaxpr):
        return id(parameter)
    try:
        hash(parameter)
    except TypeError:
        return id(parameter)
    return parameter
