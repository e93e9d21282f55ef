"""The arguments of a call in; their arrays, and all else about them in a form that calls are compared by, out.

Leaves that are no arrays are static, and part of what calls are compared by (`signature.static_places`).
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Coroutine, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.tree_util import PyTreeDef

from autoshard.errors import ArgumentError
from autoshard.program.closures import traced_name
from autoshard.program.paths import slashed
from autoshard.program.signature import Arguments, static_places
from autoshard.program.trees import Box, Tree

if TYPE_CHECKING:
    from autoshard.program.modules import ModuleArguments, ModuleChanges


class CallStructure(NamedTuple):
    """Containers, static leaves and modules' graphs of a call: all but its arrays."""

    tree: Hashable  # a PyTreeDef, or what `ModuleArguments` has
    places: tuple[int, ...]  # of static leaves
    static: tuple[tuple[type, Any], ...]  # their types, and what they are; types first: unlike values are not compared
    has_modules: bool


class FlatCall(NamedTuple):
    """The arguments of one call."""

    arrays: list[Any]
    structure: CallStructure
    modules: ModuleArguments | None  # those to which results are written, if there are any
    is_guess: bool = False  # whether it is as the call before without another look

    @property
    def share_arrays(self) -> bool:
        """Whether an array stands in several places; only modules are looked through."""
        return self.modules is not None and self.modules.share_arrays

    def result_of(self, changes: ModuleChanges, placed: Sequence[Any], results: Sequence[Any]) -> Any:
        """What a function returned that takes or returns modules, once its changes are in the caller's modules.

        Args:
            placed: the flat arguments, as they were placed.
            results: the flat results.
        """
        if self.modules is None:
            return changes.unflattened((*placed, *results))
        return self.modules.written(changes, placed, results)

    @property
    def is_special(self) -> bool:
        """Whether `jax.jit` would refuse it, or lose what the step does to it."""
        return self.structure.has_modules or bool(self.structure.places)


def flattened(dynamic: Arguments, before: CallStructure | None = None) -> FlatCall:
    """The arguments taken apart.

    Args:
        before: the structure of the call before. If this call has the same containers, the same leaves are taken to be
            static, and no leaf but these is looked at.
    """
    if before is None or before.has_modules:
        modules = module_arguments(dynamic)
        if modules is not None:
            if before is not None and before.tree == modules.structure:
                return FlatCall(modules.arrays, before, modules)
            return FlatCall(modules.arrays, CallStructure(modules.structure, (), (), True), modules)
    leaves, tree = jax.tree.flatten(dynamic)
    if before is not None and before.tree == tree:
        if not before.places:
            return FlatCall(leaves, before, None, is_guess=True)
        structure = before._replace(static=_static(leaves, before.places))
        if structure.static == before.static:
            return FlatCall(_without(leaves, before.places), before, None, is_guess=True)
    if before is not None:
        return flattened(dynamic)
    return _with_static_leaves(leaves, tree)


def _with_static_leaves(leaves: list[Any], tree: PyTreeDef) -> FlatCall:
    places = static_places(tree, leaves)
    return FlatCall(_without(leaves, places), CallStructure(tree, places, _static(leaves, places), False), None)


def module_arguments(dynamic: Arguments) -> ModuleArguments | None:
    """The arguments taken apart if there are nnx modules among them. Who has none need not have flax."""
    if "flax.nnx" not in sys.modules:
        return None
    from autoshard.program import modules

    return modules.ModuleArguments.of(dynamic)


def flat_results(
    result: Any, arguments: Any = (), tracers: Sequence[Any] = ()
) -> tuple[Sequence[Any], Tree | ModuleChanges]:
    """The arrays of what a function returned that takes no nnx modules, and what rebuilds it: `unflattened`.

    Args:
        result: what the function returned, which may have modules in it.
        arguments: what it was called with.
        tracers: the flat arguments.
    """
    if "flax.nnx" in sys.modules:
        from autoshard.program import modules

        if (found := modules.returned_modules(result, arguments, tracers)) is not None:
            return found
    box = Box.of(result)
    for place, _, static in box.tree.static:
        refuse_traced(static, slashed(box.tree.paths[place]))
    return box.leaves, box.tree


def refuse_traced(static: Any, place: str) -> None:
    """
    Raises:
        ArgumentError: a result that is no array means nothing once the function has been traced.
    """
    what = f"a {type(static).__name__}" + (f" at {place}" if place else "")
    if isinstance(static, Awaitable | Iterator):
        if isinstance(static, Coroutine):
            static.close()  # else Python warns that nobody has waited for it
        raise ArgumentError(
            f"the function returns {what}, which runs once, when the function is traced.\nReturn a list or a tuple."
        )
    if (name := traced_name(static)) is not None:
        raise ArgumentError(
            f"the function returns {what}, which JAX does not know as a pytree, and which holds a traced array"
            + (f": {name}" if name else "")
            + ".\nRegister its class (jax.tree_util.register_dataclass, flax.struct.dataclass), or return a dict."
        )


def with_flat_modules(tree: Any) -> Any:
    """A pytree whose nnx modules are as in the `Tree` of arguments that hold such modules."""
    if "flax.nnx" not in sys.modules:
        return tree
    from autoshard.program import modules

    return modules.with_flat_modules(tree)


def _static(leaves: list[Any], places: tuple[int, ...]) -> tuple[tuple[type, Any], ...]:
    return tuple((type(leaves[place]), leaves[place]) for place in places)


def _without(leaves: list[Any], places: tuple[int, ...]) -> list[Any]:
    if not places:
        return leaves
    skipped = frozenset(places)
    return [leaf for place, leaf in enumerate(leaves) if place not in skipped]
