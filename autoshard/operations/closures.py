"""What functions close over, as text: two operations that one factory makes differ in that alone."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from types import CellType, FunctionType
from typing import Any

import jax
import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, type(None), np.dtype, np.generic)
_LARGEST = 2**20  # bytes of an array that is read


def closure_digest(functions: Iterable[Any]) -> str:
    """Equal for functions that close over equal values, in any process; "" if they close over nothing.

    Read are numbers, text, containers, arrays of up to 1 MiB, and functions with what these close over. Of any other
    value only its class counts.

    >>> def factory(n): return lambda x: n * x
    >>> closure_digest([factory(1)]) == closure_digest([factory(1)]) != closure_digest([factory(2)])
    True
    >>> closure_digest([len])
    ''
    """
    said = [text for one in functions if isinstance(one, FunctionType | functools.partial) and (text := _said(one, ()))]
    return hashlib.sha256(";".join(said).encode()).hexdigest()[:8] if said else ""


def _said(value: Any, above: tuple[int, ...]) -> str:
    """
    Args:
        above: ids of what this value is part of.
    """
    if id(value) in above:
        return ""
    inside = (*above, id(value))
    if isinstance(value, _PLAIN):
        return repr(value)
    if isinstance(value, functools.partial):
        return _said((value.func, value.args, value.keywords), inside)
    if isinstance(value, FunctionType):
        cells = tuple(_content(cell) for cell in value.__closure__ or ())
        held = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return f"{value.__qualname__}{_said(held, inside)}" if held else ""
    if isinstance(value, Mapping):
        return _said(tuple(value.items()), inside)
    if isinstance(value, tuple | list):
        return f"({','.join(_said(one, inside) for one in value)})"
    if isinstance(value, set | frozenset):
        return f"{{{','.join(sorted(_said(one, inside) for one in value))}}}"
    if isinstance(value, np.ndarray | jax.Array):
        return _array(value)
    if is_dataclass(value) and not isinstance(value, type):
        held = tuple(getattr(value, one.name) for one in fields(value) if one.repr)
        return f"{type(value).__qualname__}{_said(held, inside)}"
    return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _array(value: Any) -> str:
    kind = f"{value.dtype}{value.shape}"
    is_here = not isinstance(value, jax.core.Tracer) and getattr(value, "is_fully_addressable", True)
    if not is_here or value.size * getattr(value.dtype, "itemsize", _LARGEST) > _LARGEST:
        return kind
    return f"{kind}{hashlib.sha256(np.asarray(value).tobytes()).hexdigest()}"
