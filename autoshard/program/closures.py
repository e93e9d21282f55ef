"""A function in, the arrays that it can reach without its arguments out, each with the name that its author has for it.

Looked through are what the function closes over, the globals that its code names, its defaults, what a
`functools.partial` or a method is bound to; and containers, modules and other functions among these.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import types
from collections import deque
from collections.abc import Collection, Hashable, Iterator
from typing import Any

import jax
import numpy as np

from autoshard.program.captured import identity_of
from autoshard.program.trees import VALUE_NAMES

_MOST_OBJECTS = 20_000  # that are looked at: a search for names must not take longer than tracing does
# Attributes in which parameters hold their array, and mappings of flax what is in them.
_UNNAMED = frozenset(VALUE_NAMES | {"_value", "_raw_value", "_dict", "_mapping"})
_Path = tuple[str, ...]


def names_in_closure(fn: Any, wanted: Collection[Hashable]) -> dict[Hashable, str]:
    """Names of the arrays with these identities (`identity_of`), as far as they are found: ``model/layers/0/kernel``.

    >>> model = {"layers": [{"kernel": np.ones(3)}, {"kernel": np.ones(4)}]}
    >>> names_in_closure(lambda x: model["layers"][1]["kernel"] * x, [identity_of(model["layers"][1]["kernel"])])
    {...: 'model/layers/1/kernel'}
    """
    found: dict[Hashable, str] = {}
    left: set[Hashable] = set(wanted)
    seen: set[int] = set()
    queue: deque[tuple[_Path, Any]] = deque([((), fn)])
    while queue and left and len(seen) < _MOST_OBJECTS:
        path, one = queue.popleft()
        if isinstance(one, np.ndarray | jax.Array):
            if (key := identity_of(one)) in left:
                found[key] = "/".join(path) or "closed-over array"
                left.discard(key)
        elif id(one) not in seen:
            seen.add(id(one))
            queue.extend(itertools.islice(_inside(path, one), _MOST_OBJECTS))
    return found


def _inside(path: _Path, one: Any) -> Iterator[tuple[_Path, Any]]:
    if isinstance(one, functools.partial):
        yield path, one.func
        yield from (((name,), arg) for name, arg in zip(_parameters(one.func), one.args, strict=False))
        yield from (((name,), arg) for name, arg in one.keywords.items())
    elif isinstance(one, types.MethodType):
        yield path, one.__func__
        yield path if path else ("self",), one.__self__
    elif isinstance(one, types.FunctionType):
        yield from (((name,), value) for name, value in _free_variables(one))
        yield from ((path, wrapped) for wrapped in [getattr(one, "__wrapped__", None)] if wrapped is not None)
    elif isinstance(one, dict):
        yield from (((*path, str(key)), value) for key, value in one.items() if isinstance(key, str | int))
    elif isinstance(one, list | tuple):
        yield from (((*path, str(i)), value) for i, value in enumerate(one))
    elif not isinstance(one, type | types.ModuleType | str | bytes | int | float | jax.core.Tracer):
        for name, value in _attributes(one):
            yield path if name in _UNNAMED else (*path, name), value


def _free_variables(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What the code of a function, or of one defined in it, names beside its own variables."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    names: list[str] = []
    codes = [fn.__code__]
    for code in codes:
        names += code.co_names
        codes += [const for const in code.co_consts if isinstance(const, types.CodeType)]
    yield from ((name, fn.__globals__[name]) for name in dict.fromkeys(names) if name in fn.__globals__)
    parameters = inspect.signature(fn, follow_wrapped=False).parameters
    yield from ((one.name, one.default) for one in parameters.values() if one.default is not one.empty)


def _parameters(fn: Any) -> Iterator[str]:
    """The names of a function's parameters, then numbers for what has none."""
    with contextlib.suppress(ValueError, TypeError):  # of a built-in without a signature
        yield from inspect.signature(fn).parameters
    yield from (f"argument {i}" for i in itertools.count())


def _attributes(one: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, without running properties of its class."""
    with contextlib.suppress(AttributeError):
        yield from object.__getattribute__(one, "__dict__").items()
    for kind in type(one).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            held = kind.__dict__.get(name)
            if isinstance(held, types.MemberDescriptorType):
                try:
                    yield name, held.__get__(one, type(one))
                except AttributeError:  # it has no value yet
                    continue
