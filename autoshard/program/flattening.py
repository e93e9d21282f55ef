"""The arguments of a call in; their arrays, and all else about them in a form that calls are compared by, out.

Leaves that are no arrays are static. `jax.jit` takes numbers as arrays, `eqx.filter_jit` takes them as they are. Both
kinds of users get what they expect: a number is an array, unless it stands in an equinox module. A step that takes such
modules asks its flags in Python (`if training:`), so beside them a bool is static wherever it stands. A counter or a
rate stays an array there, since each of its values would be planned anew.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import PyTreeDef

from autoshard.program.signature import Arguments

if TYPE_CHECKING:
    from autoshard.program.modules import ModuleArguments


_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBERS = (bool, int, float, complex)
# What arrays of other libraries have. They are not static: their numbers change from call to call.
_ARRAY_METHODS = ("__array__", "__jax_array__", "__dlpack__")


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


def static_places(structure: PyTreeDef, leaves: Sequence[Any]) -> tuple[int, ...]:
    """The indices of leaves that are no arrays.

    >>> tree = {"activation": jax.nn.relu, "rate": 0.1, "w": np.ones(3)}
    >>> static_places(jax.tree.structure(tree), jax.tree.leaves(tree))
    (0,)
    """
    others = [i for i, leaf in enumerate(leaves) if not isinstance(leaf, _ARRAYS)]
    if not others:
        return ()
    numbers = [i for i in others if isinstance(leaves[i], _NUMBERS)]
    inside = frozenset(_places_in_modules(structure)) if numbers else frozenset()

    def is_static(i: int) -> bool:
        if isinstance(leaves[i], _NUMBERS):
            return i in inside or (bool(inside) and isinstance(leaves[i], bool))
        return _is_static(leaves[i])

    return tuple(filter(is_static, others))


def _is_static(leaf: Any) -> bool:
    if any(hasattr(leaf, method) for method in _ARRAY_METHODS):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return True
    return False


def _places_in_modules(structure: PyTreeDef, start: int = 0) -> Iterator[int]:
    """The places of leaves that stand in equinox modules. Who has none has most likely not imported equinox."""
    module = getattr(sys.modules.get("equinox"), "Module", None)
    node = structure.node_data()
    if module is None or node is None:
        return
    if isinstance(node[0], type) and issubclass(node[0], module):
        yield from range(start, start + structure.num_leaves)
        return
    for child in structure.children():
        yield from _places_in_modules(child, start)
        start += child.num_leaves
