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
_LARGEST_READ = 2**20  # bytes of an array that is read
_LONGEST = 1000  # letters of a text that is kept as it is


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
    texts_of = _ValueTexts()
    texts = [
        text for one in functions if isinstance(one, FunctionType | functools.partial) and (text := texts_of.of(one))
    ]
    return hashlib.sha256(";".join(texts).encode()).hexdigest()[:8] if texts else ""


class _ValueTexts:
    """Values as text. Each is read once, however many others share it."""

    def __init__(self) -> None:
        self._texts: dict[int, tuple[Any, str]] = {}  # by id, with the value, so that no other gets this id

    def of(self, value: Any) -> str:
        if id(value) not in self._texts:
            self._texts[id(value)] = value, ""  # what a value says inside itself
            text = self._read(value)
            short = text if len(text) <= _LONGEST else hashlib.sha256(text.encode()).hexdigest()
            self._texts[id(value)] = value, short
        return self._texts[id(value)][1]

    def _read(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, functools.partial):
            return self.of((value.func, value.args, value.keywords))
        if isinstance(value, FunctionType):
            cells = tuple(_content(cell) for cell in value.__closure__ or ())
            held = (*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
            return f"{value.__qualname__}{self.of(held)}" if held else ""
        if isinstance(value, Mapping):
            return self.of(tuple(value.items()))
        if isinstance(value, tuple | list):
            return f"({','.join(map(self.of, value))})"
        if isinstance(value, set | frozenset):
            return f"{{{','.join(sorted(map(self.of, value)))}}}"
        if isinstance(value, np.ndarray | jax.Array):
            return _array(value)
        if is_dataclass(value) and not isinstance(value, type):
            held = tuple(getattr(value, one.name, None) for one in fields(value) if one.repr)
            return f"{type(value).__qualname__}{self.of(held)}"
        return value.__qualname__ if isinstance(value, type) else type(value).__qualname__


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # a name that has no value yet
        return None


def _array(value: Any) -> str:
    kind = f"{value.dtype}{value.shape}"
    is_read = _is_here(value) and isinstance(value.dtype, np.dtype) and not value.dtype.hasobject
    if not is_read or value.size * value.dtype.itemsize > _LARGEST_READ:
        return kind
    return f"{kind}{hashlib.sha256(np.asarray(value).tobytes()).hexdigest()}"


def _is_here(value: Any) -> bool:
    """Whether an array has numbers, all of which this process can read."""
    if isinstance(value, jax.core.Tracer):
        return False
    return isinstance(value, np.ndarray) or (value.is_fully_addressable and not value.is_deleted())
