"""A jaxpr and classes of dims to pad in, a function of the same arrays to the same results, padded inside, out.

A value may be there in two forms: as written, and with all its dims of padded classes larger. Each equation that can
runs on the second form. Any other runs as written, on arrays that have lost their added rows again. So nothing is
refused, and what it costs to go back and forth is the plan's to say.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

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
from autoshard.padding.dims.classes import DimClasses, Node, PaddedClass, variables_of
from autoshard.padding.dims.padded_equations import padded_equation
from autoshard.padding.dims.resizing import resized
from autoshard.padding.operations import shape_of
from autoshard.primitives import facts_of

_KEEP_ZEROS = {"convert_element_type", "neg", "reshape", "squeeze", "transpose"}


class TwoForms:
    """An array of the running jaxpr, as written and padded, each made when it is first asked for."""

    def __init__(
        self, shape: tuple[int, ...], padded_shape: tuple[int, ...], *, as_written: Any = None, padded: Any = None
    ):
        self.shape, self.padded_shape = shape, padded_shape
        self._as_written, self._padded = as_written, padded
        self.has_zeros = padded is None  # behind its own rows, in its padded form

    def as_written(self, reader: JaxprEqn | None = None) -> Any:
        """The array without added rows.

        Args:
            reader: on whose line it loses them, if it does so now.
        """
        if self._as_written is None:
            self._as_written = _resized(self._padded, self.shape, reader)
        return self._as_written

    def padded(self, reader: JaxprEqn | None = None) -> Any:
        """The array with added rows."""
        if self._padded is None:
            self._padded = _resized(self._as_written, self.padded_shape, reader)
        return self._padded


def _resized(array: Any, shape: tuple[int, ...], reader: JaxprEqn | None) -> Any:
    def made(array: Any) -> list[Any]:
        for dim, size in enumerate(shape):
            array = resized(array, dim, size)
        return [array]

    if np.shape(array) == shape:
        return array
    (found,) = made(array) if reader is None else written_at(reader, made, array)
    return found


class UnevenStep:
    """A step's jaxpr with some classes of its dims padded inside."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        classes: DimClasses,
        padded: Mapping[Node, PaddedClass],
        carried: Collection[int],
    ):
        """
        Args:
            padded: classes by their roots.
            carried: results that take the place of an argument in the next step.
        """
        self.closed, self.classes, self.padded, self.carried = closed, classes, padded, carried
        self.updates = _updates(closed, carried)

    def traced_as(self, closed: ClosedJaxpr) -> UnevenStep:
        """The same classes padded in another trace of the step, as in that of a microbatch, which has fewer rows.

        Raises:
            ValueError: the traces differ in more than the sizes of other dims.
        """
        classes = DimClasses(closed)
        known = dict(zip(map(id, variables_of(self.closed)), map(id, variables_of(closed)), strict=True))
        padded = {classes.root((known[var], dim)): one for (var, dim), one in self.padded.items()}
        if any(classes.members(root) != one.members for root, one in padded.items()):
            raise ValueError("a dim that is padded has fewer rows")
        return UnevenStep(closed, classes, padded, self.carried)

    def __call__(self, *arrays: Any) -> list[Any]:
        """The results, of the shapes as written."""
        made = self.body(
            self.closed, [self.given(*pair) for pair in zip(self.closed.jaxpr.invars, arrays, strict=True)]
        )
        return [one.as_written() for one in made]

    def padded_shape(self, atom: Any) -> tuple[int, ...]:
        found = []
        for dim, size in enumerate(shape_of(atom)):
            one = None if hasattr(atom, "val") else self.padded.get(self.classes.root((id(atom), dim)))
            found.append(size if one is None else size // one.members * one.padded)
        return tuple(found)

    def touches(self, atom: Any) -> bool:
        return self.padded_shape(atom) != shape_of(atom)

    # Forms.

    def given(self, var: Any, array: Any) -> TwoForms:
        return TwoForms(shape_of(var), self.padded_shape(var), as_written=array)

    def made(self, var: Any, array: Any) -> TwoForms:
        return TwoForms(shape_of(var), self.padded_shape(var), padded=array)

    def settled(self, var: Any, entry: TwoForms) -> Any:
        """The form in which a value goes into loops and out of them."""
        return entry.padded() if self.touches(var) else entry.as_written()

    def unsettled(self, var: Any, array: Any) -> TwoForms:
        return self.made(var, array) if self.touches(var) else self.given(var, array)

    # Equations.

    def body(self, closed: ClosedJaxpr, entries: Sequence[TwoForms]) -> list[TwoForms]:
        env: dict[Any, TwoForms] = dict(zip(closed.jaxpr.invars, entries, strict=True))
        consts = zip(closed.jaxpr.constvars, closed.consts, strict=True)
        env |= {var: self.given(var, const) for var, const in consts}

        def read(atom: Any) -> TwoForms:
            return self.given(atom, atom.val) if hasattr(atom, "val") else env[atom]

        for eqn in equations_of(closed.jaxpr):
            env.update(zip(eqn.outvars, self.equation(eqn, list(map(read, eqn.invars))), strict=True))
        return list(map(read, closed.jaxpr.outvars))

    def equation(self, eqn: JaxprEqn, entries: list[TwoForms]) -> list[TwoForms]:
        is_touched = _has_body(eqn) or any(map(self.touches, (*eqn.invars, *eqn.outvars)))
        if id(eqn) in self.updates or not is_touched:
            return self.as_written(eqn, entries)
        name, called = eqn.primitive.name, called_jaxpr(eqn)
        if name == "scan":
            return self.scan(eqn, entries)
        if called is not None:
            inner = called_operands(eqn, entries)
            return self.remat(eqn, called, inner) if name in REMAT else self.body(called, inner)
        how = padded_equation(eqn, list(map(self.padded_shape, eqn.invars)), list(map(self.padded_shape, eqn.outvars)))
        if how is None:
            return self.as_written(eqn, entries)
        arrays = [entry.padded(eqn) for entry in entries]
        for mask in how.masks:
            if mask.neutral != "zero" or not entries[mask.operand].has_zeros:
                arrays[mask.operand] = mask.applied(arrays[mask.operand])
        found = written_at(eqn, functools.partial(how.run, eqn), *arrays)
        made = [self.made(*pair) for pair in zip(eqn.outvars, found, strict=True)]
        for one in made:
            one.has_zeros = name in _KEEP_ZEROS and entries[0].has_zeros and self.touches(eqn.invars[0])
        return made

    def as_written(self, eqn: JaxprEqn, entries: list[TwoForms]) -> list[TwoForms]:
        arrays = [entry.as_written(eqn) for entry in entries]
        made = written_at(eqn, lambda *arrays: run(eqn, arrays), *arrays)
        return [self.given(*pair) for pair in zip(eqn.outvars, made, strict=True)]

    def remat(self, eqn: JaxprEqn, called: ClosedJaxpr, entries: Sequence[TwoForms]) -> list[TwoForms]:
        variables, results = called.jaxpr.invars, called.jaxpr.outvars
        arrays = [self.settled(*pair) for pair in zip(variables, entries, strict=True)]

        def body(*arrays: Any) -> list[Any]:
            made = self.body(called, [self.unsettled(*pair) for pair in zip(variables, arrays, strict=True)])
            return [self.settled(*pair) for pair in zip(results, made, strict=True)]

        made = checkpointed(eqn, body, arrays)
        return [self.unsettled(*pair) for pair in zip(results, made, strict=True)]

    def scan(self, eqn: JaxprEqn, entries: list[TwoForms]) -> list[TwoForms]:
        inner, (consts, carries) = eqn.params["jaxpr"], scan_counts(eqn)
        variables, results = inner.jaxpr.invars, inner.jaxpr.outvars
        whole, turns = consts + carries, eqn.params["length"]
        outside = [self.settled(*pair) for pair in zip(eqn.invars, entries, strict=True)]
        stacks = [resized(array, 0, turns) for array in outside[whole:]]  # turns are never added

        def step(carry: Any, slices: Any) -> Any:
            inside = [*outside[:consts], *carry, *slices]
            made = self.body(inner, [self.unsettled(*pair) for pair in zip(variables, inside, strict=True)])
            carried = [self.settled(*pair) for pair in zip(variables[consts:whole], made[:carries], strict=True)]
            return carried, [self.settled(*pair) for pair in zip(results[carries:], made[carries:], strict=True)]

        how = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
        finals, stacked = jax.lax.scan(step, outside[consts:whole], stacks, **how)
        stacked = [
            resized(array, 0, self.padded_shape(var)[0])
            for var, array in zip(eqn.outvars[carries:], stacked, strict=True)
        ]
        return [self.unsettled(*pair) for pair in zip(eqn.outvars, [*finals, *stacked], strict=True)]


def _has_body(eqn: JaxprEqn) -> bool:
    return eqn.primitive.name == "scan" or called_jaxpr(eqn) is not None


def _updates(closed: ClosedJaxpr, carried: Collection[int]) -> set[int]:
    """The equations that update the state, by their ids: pointwise ones of which nothing but the next state is made.

    They run as written, since state is stored so: gradients lose their added rows once, and moments never get any.
    """
    results = closed.jaxpr.outvars
    read_elsewhere = {id(one) for i, one in enumerate(results) if i not in carried}
    read_by_updates = {id(results[i]) for i in carried}
    found = set()
    for eqn in reversed(equations_of(closed.jaxpr)):
        made = set(map(id, eqn.outvars))
        if _is_pointwise(eqn) and made & read_by_updates and not made & read_elsewhere:
            found.add(id(eqn))
            read_by_updates |= {id(atom) for atom in eqn.invars}
        else:
            read_elsewhere |= {id(atom) for atom in eqn.invars}
    return found


def _is_pointwise(eqn: JaxprEqn) -> bool:
    called = called_jaxpr(eqn)
    if called is not None:
        return all(map(_is_pointwise, equations_of(called.jaxpr)))
    return facts_of(eqn.primitive.name).is_pointwise or eqn.primitive.name == "broadcast_in_dim"
