"""A step lowered for flat arrays in, the same with the calling convention of the step out.

`jax.jit(step).lower(...).compile()` is called as the step is, static arguments left out. So is what `.lower` of a
decorated step makes. Whatever else the classes of `jax.stages` know is that of the flat program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

import jax
from jax.tree_util import PyTreeDef

from autoshard.arrays.arguments import ArrayType, type_of
from autoshard.errors import ArgumentError
from autoshard.plans.plan import PlanData
from autoshard.program.flattening import CallStructure, FlatCall, flattened
from autoshard.program.signature import Arguments

CompiledCall = Callable[
    [Callable[..., Any], tuple, dict[str, Any]], Any
]  # of a compiled flat program, with a call's arguments


@dataclass(frozen=True)
class LoweredCall:
    """What a step was lowered for, static arguments left out."""

    step: str  # its name
    structure: CallStructure
    types: tuple[ArrayType, ...]
    names: tuple[str, ...]  # one per array

    @classmethod
    def of(cls, plan: PlanData, dynamic: Arguments) -> LoweredCall:
        flat = flattened(dynamic)
        names = tuple(argument.name for argument in plan.arguments)
        return cls(plan.name, flat.structure, tuple(map(type_of, flat.arrays)), names)

    def taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> FlatCall:
        """The arguments of a call, which are of the structure, shapes and dtypes that the step was lowered for.

        Raises:
            ArgumentError: they are others.
        """
        flat = flattened((args, kwargs))
        if flat.structure != self.structure:
            raise ArgumentError(
                f"{self.step} was compiled for arguments of another structure{self._difference(flat.structure)}.\n"
                "Static arguments are left out here, as for jax.jit."
            )
        for name, lowered, array in zip(self.names, self.types, flat.arrays, strict=True):
            try:
                given = type_of(array)
            except TypeError as error:
                raise ArgumentError(f"{name} is {array!r}, which is no array.") from error
            if _kind(given) != _kind(lowered):
                raise ArgumentError(
                    f"{name} is {_text(given)}, and {self.step} was compiled for {_text(lowered)}.\n"
                    "Lower and compile it for these arguments, too, or call the decorated function itself."
                )
        return flat

    def _difference(self, given: CallStructure) -> str:
        if given.tree != self.structure.tree and all(isinstance(x.tree, PyTreeDef) for x in (given, self.structure)):
            return f".\nGiven: {given.tree}\nLowered: {self.structure.tree}"
        texts = (", ".join(f"{value!r}" for _, value in one.static) or "none" for one in (given, self.structure))
        given_text, lowered_text = texts
        if given_text == lowered_text:
            return ""
        return f": leaves that are no arrays are static.\nGiven: {given_text}\nLowered: {lowered_text}"


def _kind(type_: ArrayType) -> Any:
    """What a compiled program tells apart."""
    return type_[:2] if isinstance(type_, tuple) else type_


def _text(type_: ArrayType) -> str:
    return f"{type_[1]}{list(type_[0])}" if isinstance(type_, tuple) else str(type_)


class CompiledStep(jax.stages.Compiled):
    """A compiled step that is called as the step is."""

    __slots__ = ("_flat", "_run")

    def __init__(self, flat: jax.stages.Compiled, run: CompiledCall):
        self._flat, self._run = flat, run

    def __getattribute__(self, name: str) -> Any:
        own = name in ("__class__", "__deepcopy__", "call")
        return object.__getattribute__(self, name) if own else getattr(object.__getattribute__(self, "_flat"), name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        run = object.__getattribute__(self, "_run")
        return run(object.__getattribute__(self, "_flat"), args, kwargs)

    call = __call__

    def __copy__(self) -> Self:
        """Itself: it never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self


class LoweredStep(jax.stages.Lowered):
    """A lowered step whose compiled form is called as the step is."""

    __slots__ = ("_flat", "_run")

    def __init__(self, flat: jax.stages.Lowered, run: CompiledCall):
        self._flat, self._run = flat, run

    def __getattribute__(self, name: str) -> Any:
        own = name in ("__class__", "__deepcopy__", "compile", "taking")
        return object.__getattribute__(self, name) if own else getattr(object.__getattribute__(self, "_flat"), name)

    def compile(self, *args: Any, **kwargs: Any) -> CompiledStep:
        """Compiled for the devices of the mesh; takes what `jax.stages.Lowered.compile` takes."""
        flat, run = (object.__getattribute__(self, name) for name in LoweredStep.__slots__)
        return CompiledStep(flat.compile(*args, **kwargs), run)

    def taking(self, arguments: Callable[[tuple, dict[str, Any]], Arguments]) -> LoweredStep:
        """The same, called with what `arguments` makes into its own arguments."""
        flat, run = (object.__getattribute__(self, name) for name in LoweredStep.__slots__)
        return LoweredStep(flat, lambda compiled, args, kwargs: run(compiled, *arguments(args, kwargs)))

    def __copy__(self) -> Self:
        """Itself: it never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self
