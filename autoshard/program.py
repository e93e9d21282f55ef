"""Functions and abstract arguments in, a `Program` out. The only reader of jaxprs.

A `Program` is the traced step as one flat list of equations in program order. Calls (`jit`, `custom_jvp_call`,
`custom_vjp_call`, `remat`) are opened and their equations stand in the list as if written there. Loops and branches
are opened too: their bodies stand in the list once, with `Equation.trips` saying how often they run, between
*boundary equations* that connect body and surroundings:

========================  =====================================================================================
primitive                 meaning
========================  =====================================================================================
``scan_const``            a value from outside, seen inside: identity, ``x -> y``
``scan_carry``            one carry: operands (initial value, value the body hands on), results (value the body
                          sees, value after the loop); all four have one layout
``scan_slice``            one step's slice of a stacked operand: ``[steps, ...] -> [...]``
``scan_stack``            one step's result stacked: ``[...] -> [steps, ...]``
``branch_const``          a value from outside a `cond`, seen inside one branch: identity
``branch_join``           operands: one value per branch, result: the value of the `cond`; all have one layout
========================  =====================================================================================

`while` uses ``scan_const`` and ``scan_carry``. A ``scan_carry`` stands before the body it feeds, so its second operand
is defined later in the list than the equation itself: the one exception to definition before use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Source:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        return f"{name}:{self.line}" if self.line else "unknown line"


@dataclass(frozen=True)
class Value:
    """One array of the traced step."""

    id: int  # its index in Program.values
    shape: tuple[int, ...]
    dtype: Any  # numpy or JAX extended dtype (PRNG keys)
    bytes: int  # of the whole array
    name: str  # the user's path for arguments and results ("state.params['w']"), else ""
    source: Source | None  # the line that made it; None for arguments


@dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied to values; compared by identity."""

    index: int  # its index in Program.equations
    primitive: str
    params: Mapping[str, Any] = field(repr=False)
    inputs: tuple[Value | np.ndarray, ...]  # an array is a literal or a closed-over scalar
    outputs: tuple[Value, ...]
    source: Source | None
    path: tuple  # where in the nested jaxprs it stands; what lower() looks it up by
    trips: int = 1  # how often it runs per step: the product of the loops around it

    def __str__(self) -> str:
        operands = ", ".join(str(list(x.shape)) for x in self.inputs)
        results = ", ".join(str(list(x.shape)) for x in self.outputs)
        return f"{self.primitive} {operands} -> {results} ({self.source})"
