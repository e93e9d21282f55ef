"""A function and keywords of `jax.jit` in; which of its arguments they name out.

Which leaves of these arguments are static follows from the leaves themselves (`static_places`).
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.tree_util import PyTreeDef

Arguments = tuple[tuple, dict[str, Any]]  # positional and keyword arguments

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_NUMBERS = (bool, int, float, complex)
# What arrays of other libraries have. They are not static: their numbers change from call to call.
_ARRAY_METHODS = ("__array__", "__jax_array__", "__dlpack__")


@dataclass(frozen=True)
class ArgumentSelection:
    """Some arguments of a function, by the rules of `jax.jit`."""

    positions: frozenset[int]
    names: frozenset[str]

    @classmethod
    def of(cls, fn: Callable, jit_keywords: Mapping[str, Any], kind: str) -> ArgumentSelection:
        """From `kind_argnums` and `kind_argnames`; if only one is given, the other follows from the signature."""
        positions, names = selected(fn, *(jit_keywords.get(f"{kind}_{which}") for which in ("argnums", "argnames")))
        return cls(frozenset(positions), frozenset(names))

    def __contains__(self, place: int | str) -> bool:
        return place in (self.positions if isinstance(place, int) else self.names)

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, Arguments]:
        """The chosen arguments with their places, and the other arguments."""
        if not self.positions and not self.names:
            return (), (args, kwargs)
        chosen: tuple[tuple[int | str, Any], ...] = tuple((i, arg) for i, arg in enumerate(args) if i in self.positions)
        chosen += tuple((name, kwargs[name]) for name in sorted(kwargs) if name in self.names)
        others = tuple(arg for i, arg in enumerate(args) if i not in self.positions)
        return chosen, (others, {name: value for name, value in kwargs.items() if name not in self.names})

    def named(self, fn: Callable[..., Any], args: tuple, kwargs: Mapping[str, Any]) -> dict[str | int, Any]:
        """The chosen arguments of a call, by position where they have no name; defaults, too."""
        if not self.positions and not self.names:
            return {}
        given = named_arguments(fn, args, kwargs)
        parameters = _parameters(fn) or ()
        named = {i: p.name for i, p in enumerate(parameters) if i in self.positions and not _takes_many(p)}
        places = *sorted(self.positions - named.keys()), *sorted(self.names.union(named.values()))
        return {place: given[place] for place in places if place in given}


def selected(fn: Callable, argnums: Any, argnames: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The positions and names that `jax.jit` takes; where one of both is None, it follows from the signature.

    >>> selected(lambda x, rate, turns: None, -1, None)
    ((2,), ('turns',))
    """
    positions, names = _as_tuple(argnums), _as_tuple(argnames)
    if not positions and not names:
        return (), ()
    parameters = _parameters(fn) or ()
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    positions = tuple(i % len(positional) if i < 0 and positional else i for i in positions)
    if argnames is None:
        names = tuple(positional[i] for i in positions if i < len(positional))
    elif argnums is None:
        positions = tuple(positional.index(name) for name in names if name in positional)
    return positions, names


def named_arguments(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str | int, Any]:
    """The arguments of a call by position and by name, and those that are left to their defaults.

    >>> named_arguments(lambda x, rate=0.1, **more: None, [1], {"turns": 3})
    {0: 1, 'turns': 3, 'x': 1, 'rate': 0.1, 'more': {'turns': 3}}
    """
    found: dict[str | int, Any] = dict(enumerate(args))
    found.update(kwargs)
    try:
        bound = inspect.signature(fn).bind(*args, **kwargs)
    except (TypeError, ValueError):  # it has no signature, or cannot be called so
        return found
    bound.apply_defaults()
    found.update(bound.arguments)
    return found


def text_of_function(fn: Callable) -> str:
    """A function by name, with what `functools.partial` gives it; the same in every process, so without addresses.

    >>> text_of_function(functools.partial(max, 3, key=abs)), text_of_function(functools.partial(max, key=object()))
    ('max(3, key=abs)', 'max(key=<object object>)')
    """
    if isinstance(fn, functools.partial):
        given = *map(text_of_value, fn.args), *(f"{name}={text_of_value(value)}" for name, value in fn.keywords.items())
        return f"{text_of_function(fn.func)}({', '.join(given)})"
    return str(getattr(fn, "__name__", type(fn).__name__))


def text_of_value(value: Any) -> str:
    """A value as it prints, without addresses; a function by name, a set in the order of its texts.

    >>> text_of_value(({"b", "a"}, frozenset(), abs, 2))
    "({'a', 'b'}, frozenset(), abs, 2)"
    """
    if type(value) is tuple:
        return f"({', '.join(map(text_of_value, value))}{',' * (len(value) == 1)})"
    if type(value) in (set, frozenset) and value:  # their order is another in each process
        text = f"{{{', '.join(sorted(map(text_of_value, value)))}}}"
        return text if type(value) is set else f"frozenset({text})"
    named = callable(value) and (hasattr(value, "__name__") or isinstance(value, functools.partial))
    return text_of_function(value) if named else re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))


def join(chosen: tuple, others: Arguments) -> Arguments:
    """The way back from `ArgumentSelection.split`."""
    positional, keyword = list(others[0]), dict(others[1])
    for place, value in chosen:
        if isinstance(place, int):
            positional.insert(place, value)
        else:
            keyword[place] = value
    return tuple(positional), keyword


def signature_without(fn: Callable, chosen: Iterable[int | str]) -> inspect.Signature | None:
    """The signature of a function whose chosen arguments are given; None if it has none."""
    parameters = _parameters(fn)
    if parameters is None:
        return None
    left = [p for i, p in enumerate(parameters) if p.name not in chosen and (i not in chosen or _takes_many(p))]
    try:
        return inspect.Signature(left)
    except ValueError:  # a parameter without a default behind one with a default
        return None


def _takes_many(parameter: inspect.Parameter) -> bool:
    return parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)


def _parameters(fn: Callable) -> list[inspect.Parameter] | None:
    try:
        return list(inspect.signature(fn).parameters.values())
    except (ValueError, TypeError):  # a built-in without a signature
        return None


def _as_tuple(value: Any) -> tuple:
    return () if value is None else (value,) if isinstance(value, int | str) else tuple(value)


def static_places(structure: PyTreeDef, leaves: Sequence[Any]) -> tuple[int, ...]:
    """The indices of leaves that are no arrays.

    `jax.jit` takes numbers as arrays, `eqx.filter_jit` takes them as they are. Both kinds of users get what they
    expect: a number is an array, unless it stands in an equinox module. A step that takes such modules asks its flags
    in Python (`if training:`), so beside them a bool is static wherever it stands. A counter or a rate stays an array
    there, since each of its values would be planned anew.

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


# What the code of a plan reads the arguments of its step by, in its order there.
STANDING_ALONE = (selected, named_arguments, text_of_function, text_of_value, _as_tuple, _parameters)
