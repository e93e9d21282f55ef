"""A jaxpr in, out the same whose plain calls are opened."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoshard.jaxprs import (
    CUSTOM,
    HIDDEN_BODIES,
    REMAT,
    ClosedJaxpr,
    DropVar,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    called_jaxpr,
    equations_of,
)
from autoshard.program.user_code import source_of


def opened(
    closed: ClosedJaxpr,
    *,
    opens_too: Callable[[JaxprEqn], bool] = lambda eqn: False,
    body_of: Callable[[JaxprEqn], ClosedJaxpr | None] = called_jaxpr,
) -> ClosedJaxpr:
    """The equations of plain calls stand in the jaxpr's own list, with variables of their own and the user's line.

    Args:
        opens_too: calls that are opened beside the plain ones.
        body_of: what a call runs; None for what is no call.
    """
    equations: list[JaxprEqn] = []
    constants = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))

    def copied(jaxpr: Jaxpr, names: dict[Var, Any], call: JaxprEqn | None) -> list[Any]:
        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else names.get(atom, atom)

        for eqn in equations_of(jaxpr):
            inputs = list(map(read, eqn.invars))
            if call is not None:
                eqn = eqn.replace(source_info=_as_called(eqn, call))
            is_plain = eqn.primitive.name not in CUSTOM | REMAT | HIDDEN_BODIES
            called = body_of(eqn) if is_plain or opens_too(eqn) else None
            if called is not None:
                inner = dict(zip(called.jaxpr.invars, inputs, strict=True))
                for var, const in zip(called.jaxpr.constvars, called.consts, strict=True):
                    inner[var] = Var(var.aval)
                    constants[inner[var]] = const
                names.update(zip(eqn.outvars, copied(called.jaxpr, inner, eqn), strict=True))
                continue
            if not eqn.outvars and not eqn.effects:  # differentiation leaves calls that make nothing
                continue
            made = [var if isinstance(var, DropVar) else Var(var.aval) for var in eqn.outvars]
            names.update((old, new) for old, new in zip(eqn.outvars, made, strict=True) if not isinstance(old, DropVar))
            equations.append(eqn.replace(invars=inputs, outvars=made))
        return list(map(read, jaxpr.outvars))

    results = copied(closed.jaxpr, {}, None)
    jaxpr = closed.jaxpr.replace(
        constvars=list(constants), eqns=equations, outvars=results, debug_info=closed.jaxpr.debug_info
    )
    return ClosedJaxpr(jaxpr, list(constants.values()))


def _as_called(eqn: JaxprEqn, call: JaxprEqn) -> Any:
    """The line of an equation, else that of its caller; its names stand below those of the caller."""
    own = call if source_of(eqn) is None else eqn
    names = call.source_info.name_stack + eqn.source_info.name_stack
    return own.source_info.replace(name_stack=names)
