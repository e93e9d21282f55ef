"""The jaxprs of a step on a batch and on a larger one in, a function of the larger with the results of the smaller out.

The larger jaxpr is run with the numbers that stand in the smaller, as a mean's count of rows, and with masks where rows
are reduced (`operations.py`). Both have to be the same equations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from autoshard.errors import ArgumentError
from autoshard.jaxprs import (
    REMAT,
    ClosedJaxpr,
    JaxprEqn,
    called_jaxpr,
    called_operands,
    equations_of,
    run,
    scan_counts,
    written_at,
)
from autoshard.padding.checkpoints import checkpointed
from autoshard.padding.operations import RefusedError, padded_operation


class PaddedProgram:
    """A step's jaxprs at two sizes of the batch."""

    def __init__(self, name: str, small: ClosedJaxpr, large: ClosedJaxpr):
        self.name, self.small, self.large = name, small, large

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results at the smaller size.

        Raises:
            ArgumentError: the added rows would change the results.
        """
        try:
            padded = self.body(self.small, self.large, arrays)
        except RefusedError as error:
            raise error.named(self.name) from None
        return [
            jax.lax.slice(array, [0] * len(aval.shape), aval.shape) if np.shape(array) != aval.shape else array
            for array, aval in zip(padded, self.small.out_avals, strict=True)
        ]

    def body(self, small: Any, large: Any, operands: Sequence[Any]) -> list[Any]:
        equations = [equations_of(one.jaxpr) for one in (small, large)]
        if len(equations[0]) != len(equations[1]) or len(small.consts) != len(large.consts):
            raise self.differs()
        env: dict[Any, Any] = {}
        for var, const, other in zip(large.jaxpr.constvars, small.consts, large.consts, strict=True):
            if np.shape(const) != np.shape(other):
                raise self.differs()
            env[var] = const
        env.update(zip(large.jaxpr.invars, operands, strict=True))

        def read(one: Any, other: Any) -> Any:
            return one.val if hasattr(one, "val") else env[other]

        for one, other in zip(*equations, strict=True):
            if one.primitive is not other.primitive or len(one.invars) != len(other.invars):
                raise RefusedError(one, f"is {other.primitive.name} at another number of rows")
            inputs = [read(*pair) for pair in zip(one.invars, other.invars, strict=True)]
            try:
                made = self.equation(one, other, inputs)
            except RefusedError as error:
                raise error.inside(one) from None
            env.update(zip(other.outvars, made, strict=True))
        return [read(*pair) for pair in zip(small.jaxpr.outvars, large.jaxpr.outvars, strict=True)]

    def differs(self) -> ArgumentError:
        return ArgumentError(
            f"pad='batch': {self.name} runs other operations on another number of rows, so its batch cannot be padded."
            "\nPad the batch yourself, with weights of 0 for the rows that you add, or use a batch that the devices "
            "divide."
        )

    def equation(self, small: JaxprEqn, large: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        name = small.primitive.name
        special = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if special is not None:
            return special(small, large, operands)
        called = called_jaxpr(small), called_jaxpr(large)
        if called[0] is not None and called[1] is not None:
            inner = called_operands(large, operands)
            if name in REMAT:
                return self.remat(small, *called, inner)
            return self.body(*called, inner)
        how = padded_operation(small, large)
        for mask in how.masks:
            operands[mask.operand] = mask.applied(operands[mask.operand])
        return run(large.replace(params=dict(how.params)), operands)

    def remat(self, eqn: JaxprEqn, small: Any, large: Any, operands: list[Any]) -> Sequence[Any]:
        def body(*inner: Any) -> list[Any]:
            return self.body(small, large, inner)

        return checkpointed(eqn, body, operands)

    # Loops and branches.

    def scan(self, small: JaxprEqn, large: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if small.params["length"] != large.params["length"]:
            raise RefusedError(small, "goes through the rows one by one")
        consts, carries = scan_counts(large)

        how = {name: large.params[name] for name in ("length", "reverse", "unroll")}

        def loop(*operands: Any) -> list[Any]:
            def step(carry: Any, slices: Any) -> Any:
                inside = [*operands[:consts], *carry, *slices]
                made = self.body(small.params["jaxpr"], large.params["jaxpr"], inside)
                return made[:carries], made[carries:]

            start, slices = list(operands[consts : consts + carries]), list(operands[consts + carries :])
            finals, stacked = jax.lax.scan(step, start, slices, **how)
            return [*finals, *stacked]

        return written_at(large, loop, *operands)  # which also says whether it is of a backward pass

    def while_loop(self, small: JaxprEqn, large: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        tests = large.params["cond_nconsts"]
        consts = tests + large.params["body_nconsts"]
        flags = [eqn.params["cond_jaxpr"].out_avals[0].shape for eqn in (small, large)]
        if flags[0] or flags[1]:
            raise RefusedError(small, "is a loop for each row, of which each stops on its own")

        def part(jaxpr: str, first: Sequence[Any]) -> Callable[[Any], Any]:
            return lambda carry: self.body(small.params[jaxpr], large.params[jaxpr], [*first, *carry])

        test, body = part("cond_jaxpr", operands[:tests]), part("body_jaxpr", operands[tests:consts])
        made: Sequence[Any] = jax.lax.while_loop(lambda carry: test(carry)[0], body, operands[consts:])
        return made

    def cond(self, small: JaxprEqn, large: JaxprEqn, operands: list[Any]) -> Sequence[Any]:
        if small.params.get("branches_platforms") is not None:
            raise RefusedError(small, "depends on the platform")
        pairs = zip(small.params["branches"], large.params["branches"], strict=True)
        branches = [functools.partial(self.branch, *pair) for pair in pairs]
        made: Sequence[Any] = jax.lax.switch(operands[0], branches, *operands[1:])
        return made

    def branch(self, small: Any, large: Any, *operands: Any) -> list[Any]:
        return self.body(small, large, operands)
