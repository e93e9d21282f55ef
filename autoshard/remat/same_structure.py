"""Two jaxprs in, out whether one is the other for arrays of other sizes: the same equations of the same values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from autoshard.jaxprs import ClosedJaxpr, Jaxpr, Literal


def is_alike(one: ClosedJaxpr, other: ClosedJaxpr) -> bool:
    """Whether both apply the same primitives to the same values, in one order. Shapes and numbers may differ.

    >>> import jax
    >>> def made(function, rows):
    ...     return jax.make_jaxpr(function)(jax.ShapeDtypeStruct((rows, 3), "float32"))
    >>> is_alike(made(lambda x: x * (x + 1), 8), made(lambda x: x * (x + 1), 2))
    True
    >>> is_alike(made(lambda x: x * (x + 1), 8), made(lambda x: (x + 1) * (x + 1), 2))
    False
    """
    return _wiring(one.jaxpr) == _wiring(other.jaxpr)


def _wiring(jaxpr: Jaxpr) -> tuple[Any, ...]:
    """Per equation its primitive, the numbers of the variables that it reads, how many it makes, and its bodies."""
    numbers: dict[Any, int] = {var: n for n, var in enumerate((*jaxpr.constvars, *jaxpr.invars))}

    def read(atom: Any) -> int | None:
        return None if isinstance(atom, Literal) else numbers[atom]

    equations = []
    for eqn in jaxpr.eqns:
        operands = tuple(map(read, eqn.invars))
        start = len(numbers)
        numbers.update((var, start + n) for n, var in enumerate(eqn.outvars))
        bodies = tuple(map(_wiring, _bodies(eqn.params)))
        equations.append((eqn.primitive.name, operands, len(eqn.outvars), bodies))
    return len(jaxpr.constvars), len(jaxpr.invars), tuple(equations), tuple(map(read, jaxpr.outvars))


def _bodies(params: Any) -> Iterator[Jaxpr]:
    for _, value in sorted(params.items()):
        for one in value if isinstance(value, tuple | list) else (value,):
            if isinstance(one, Jaxpr | ClosedJaxpr):
                yield one.jaxpr if isinstance(one, ClosedJaxpr) else one
