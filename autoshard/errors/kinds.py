"""What a user passes to a public function in; an `ArgumentError` out if it is of another kind than is annotated.

The annotation says of what kind an argument is. The function itself checks the value, as that seconds are 0 or more.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import functools
import inspect
import numbers
import reprlib
import sys
import types
import typing
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

import numpy as np

from autoshard.errors import ArgumentError

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_ONE = {bool: "True or False", float: "a number", int: "a whole number", str: "a string", types.NoneType: "None"}
_SEVERAL = {float: "numbers", int: "whole numbers", str: "strings"}
_UNIONS = (typing.Union, types.UnionType)
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def checks_kinds(*names: str) -> Callable[[Callable[_Parameters, _Result]], Callable[_Parameters, _Result]]:
    """Holds the arguments of each call against the annotations of the decorated function.

    >>> @checks_kinds()
    ... def wait(seconds: float): ...
    >>> wait(2.5)
    >>> wait("2.5")
    Traceback (most recent call last):
        ...
    autoshard.errors.ArgumentError: seconds='2.5'; a number is needed

    Args:
        names: of the parameters to check; by default all that are annotated.
    """

    def decorate(fn: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
        signature = inspect.signature(fn)
        variadic = {one.name: one.kind for one in signature.parameters.values() if one.kind in _VARIADIC}
        annotated = [name for name in fn.__annotations__ if name in signature.parameters]
        wanted = names or tuple(name for name in annotated if variadic.get(name) is not _VARIADIC[1])

        @functools.wraps(fn)
        def called(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
            try:
                given = signature.bind(*args, **kwargs).arguments
            except TypeError:  # Python says itself which argument is missing or one too many
                return fn(*args, **kwargs)
            for name, kind in _annotations(fn, wanted).items():
                if name in given:
                    for value in given[name] if name in variadic else [given[name]]:
                        _check(name, value, kind)
            return fn(*args, **kwargs)

        return called

    return decorate


def check_fields(instance: Any) -> None:
    """Holds the fields of a dataclass against their annotations.

    Raises:
        ArgumentError: a field is of another kind.
    """
    of: Any = type(instance)
    names = tuple(field.name for field in dataclasses.fields(of))
    for name, kind in _annotations(of, names).items():
        _check(f"{of.__name__}.{name}", getattr(instance, name), kind)


@functools.cache
def _annotations(of: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Annotations of parameters or fields. The others may name what type checkers alone import."""
    own = inspect.unwrap(of)
    namespace = vars(sys.modules[of.__module__]) if isinstance(of, type) else own.__globals__
    hints = {name: of.__annotations__[name] for name in names}
    return typing.get_type_hints(types.SimpleNamespace(__annotations__=hints), namespace)


def _check(name: str, value: Any, kind: Any) -> None:
    if not is_of_kind(value, kind):
        raise ArgumentError(f"{name}={reprlib.repr(value)}; {_words(kind)} is needed")


def is_of_kind(value: Any, kind: Any) -> bool:
    """Whether a value is what an annotation says; numbers of NumPy are, truth values are no numbers.

    >>> is_of_kind(np.int64(3), int), is_of_kind(True, int), is_of_kind({"x": 2.0}, dict[str, int])
    (True, False, False)
    """
    if kind is Any or type(value) is kind:
        return True
    if isinstance(kind, type):
        return _is_of_type(value, kind)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return any(is_of_kind(value, one) for one in inner)
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin is collections.abc.Callable:
        return callable(value)
    if origin is not None and issubclass(origin, collections.abc.Mapping):
        return isinstance(value, collections.abc.Mapping) and all(
            is_of_kind(key, inner[0]) and is_of_kind(entry, inner[1]) for key, entry in value.items()
        )
    if origin is tuple and inner[-1:] != (...,):
        return _is_several(value) and len(value) == len(inner) and all(map(is_of_kind, value, inner))
    if origin is not None and issubclass(origin, collections.abc.Sequence):
        return _is_several(value) and _all_of_kind(value, inner[0])
    if origin is not None:  # an iterable
        if isinstance(value, collections.abc.Iterator):  # which can be read but once
            return True
        is_set = isinstance(value, collections.abc.Set | collections.abc.Mapping)
        return (_is_several(value) or is_set) and _all_of_kind(value, inner[0])
    return True  # a type variable, which any type may be


def _is_of_type(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool | np.bool_)
    if kind in (int, float):
        whole = numbers.Integral if kind is int else numbers.Real
        return isinstance(value, whole) and not isinstance(value, bool)
    return isinstance(value, kind)


def _all_of_kind(values: Iterable[Any], kind: Any) -> bool:
    return all(is_of_kind(value, kind) for value in values)


def _is_several(value: Any) -> bool:
    """Whether it is a sequence other than text, or an array with a first dim."""
    if isinstance(value, np.ndarray):
        return value.ndim > 0
    return isinstance(value, collections.abc.Sequence) and not isinstance(value, str | bytes)


def _words(kind: Any) -> str:
    """What is needed, in words."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(map(_words, inner)))
    if origin is typing.Literal:
        return " or ".join(map(repr, inner))
    if origin is collections.abc.Callable:
        return "a function"
    if origin is not None and issubclass(origin, collections.abc.Mapping):
        return f"a dict from {_plural(inner[0])} to {_plural(inner[1])}"
    if origin is tuple and inner[-1:] != (...,):
        return f"a pair of {' and '.join(map(_words, inner))}" if len(inner) == 2 else f"a tuple of {len(inner)}"
    if origin is not None:
        return "a sequence" if inner[0] is Any else f"a sequence of {_plural(inner[0])}"
    name = getattr(kind, "__name__", str(kind))
    return _ONE.get(kind, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def _plural(kind: Any) -> str:
    return _SEVERAL.get(kind) or (
        f"{kind.__name__}s" if isinstance(kind, type) and not typing.get_args(kind) else _words(kind)
    )
