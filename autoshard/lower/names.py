"""Equations in, what their operations are called in the compiled program out: after the user's lines.

The emitted operations come from lines of `emitter.py`; `compiled/collectives.py` reads the user's back from names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import jax

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn
from autoshard.plans.annotations import Annotations
from autoshard.program import Equation, Program, Value


def named_after(equation: Equation | None) -> contextlib.AbstractContextManager:
    """Whatever is emitted meanwhile has the line of this equation."""
    return contextlib.nullcontext() if equation is None else jax.named_scope(equation.label)


def named_as(eqn: JaxprEqn, equation: Equation | None) -> contextlib.AbstractContextManager:
    """Whatever is emitted meanwhile has the user's names, line, and the index of the equation."""
    names = str(eqn.source_info.name_stack)
    scope = "/".join(filter(None, [names, None if equation is None else equation.label]))
    return jax.named_scope(scope) if scope else contextlib.nullcontext()


def reader_in(body: ClosedJaxpr, operand: int, path: tuple, equations: Mapping[tuple, Equation]) -> Equation | None:
    """The first equation of a call's body that reads an operand of the call, or that stands in the call that does.

    Args:
        path: of the call.
        equations: of the program, by their paths.
    """
    var = body.jaxpr.invars[operand]
    reader = next((i for i, eqn in enumerate(body.jaxpr.eqns) if any(atom is var for atom in eqn.invars)), None)
    if reader is None:
        return None
    inside = (*path, reader)
    found = equations.get(inside)
    return found or next((one for at, one in equations.items() if at[: len(inside)] == inside), None)


def first_readers(program: Program, annotations: Annotations) -> Mapping[int, Equation]:
    """The first equation that does not read a value where it is, but its copy, by the id of the value."""
    homes, copies, found = annotations.homes, annotations.copies, dict[int, Equation]()
    for equation in program.equations:
        for operand, value in enumerate(equation.inputs):
            want = annotations.wants.get((equation.index, operand))
            if want and isinstance(value, Value) and value.id in copies and want != homes.get(value.id):
                found.setdefault(value.id, equation)
    return found
