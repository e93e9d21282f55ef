"""The leaves of a pytree in; which of them are no arrays, and so are part of the step's code, out.

`jax.jit` takes numbers as arrays, `eqx.filter_jit` takes them as they are. Both kinds of users get what they expect: a
number is an array, unless it stands in an equinox module. A step that takes such modules asks its flags in Python
(`if training:`), so beside them a bool is static wherever it stands. A counter or a rate stays an array there, since
each of its values would be planned anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBERS = (bool, int, float, complex)
# What arrays of other libraries have. They are not static: their numbers change from call to call.
_ARRAY_METHODS = ("__array__", "__jax_array__", "__dlpack__")


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
