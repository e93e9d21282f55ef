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
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence, Set, ValuesView
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autoshard.errors import ArgumentError
from autoshard.program.captured import constants_of, identity_of
from autoshard.program.trees import VALUE_NAMES

if TYPE_CHECKING:
    from autoshard.program.program import Program

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
    return _names(_reached(fn), wanted)


def traced_name(static: Any) -> str | None:
    """Where an object that is no array holds an array that is being traced: ``""`` is itself; None: nowhere.

    >>> traced_name(np.sum) is None
    True
    """
    found = _reached(static, with_globals=False)
    return next((".".join(path) for path, one in found if isinstance(one, jax.core.Tracer)), None)


@dataclass(frozen=True)
class HeldConstants:
    """Arrays that a step read from its static leaves when it was traced: for its program they are constants."""

    names: tuple[dict[Hashable, str], ...]  # per static leaf, `identity_of` each such array -> its name there
    arrays: tuple[Any, ...] = field(default=(), repr=False)  # these, kept so that no other gets their addresses

    @classmethod
    def of(cls, program: Program) -> HeldConstants:
        """From the leaves with which a program was traced."""
        static = [leaf for *_, leaf in program.in_tree.static]  # what nnx modules hold is not looked through
        if not static:
            return cls(())
        wanted = {identity_of(one): one for one in (*constants_of(program.jaxpr), *program.captured)}
        names = tuple(_names(_reached(leaf, with_globals=False), wanted) for leaf in static)
        return cls(names if any(names) else (), tuple(wanted[key] for found in names for key in found))

    def changed(self, static: Sequence[tuple[type, Any]]) -> str | None:
        """What a later call's static leaves, each with its type, hold another array at."""
        for (kind, leaf), names in zip(static, self.names, strict=False):
            if names and (left := names.keys() - _names(_reached(leaf, with_globals=False), names).keys()):
                return f"{kind.__name__}.{names[min(left, key=str)].replace('/', '.')}"
        return None

    def check(self, static: Sequence[tuple[type, Any]], step: str) -> None:
        """
        Raises:
            ArgumentError: the step would run with what static leaves no longer hold.
        """
        if (name := self.changed(static)) is not None:
            raise ArgumentError(
                f"{name} is another array than the one that {step} was planned with. JAX does not know the class as a "
                "pytree, so its arrays are constants of the step.\nRegister the class "
                "(jax.tree_util.register_dataclass, flax.struct.dataclass), or pass its arrays as arguments."
            )


def _names(reached: Iterable[tuple[_Path, Any]], wanted: Collection[Hashable]) -> dict[Hashable, str]:
    """Names of the arrays with these identities among those that are reached."""
    found: dict[Hashable, str] = {}
    left: set[Hashable] = set(wanted)
    for path, one in reached if left else ():
        if not isinstance(one, jax.core.Tracer) and (key := identity_of(one)) in left:
            found[key] = "/".join(path) or "closed-over array"
            left.discard(key)
            if not left:
                break
    return found


def _reached(one: Any, *, with_globals: bool = True) -> Iterator[tuple[_Path, Any]]:
    """Every array and tracer that can be reached from an object, with the names on the way; near ones first.

    Args:
        with_globals: whether also through the globals that functions name.
    """
    seen: set[int] = set()
    queue: deque[tuple[_Path, Any]] = deque([((), one)])
    while queue and len(seen) < _MOST_OBJECTS:
        path, one = queue.popleft()
        if isinstance(one, np.ndarray | jax.Array):
            yield path, one
        elif id(one) not in seen:
            seen.add(id(one))
            queue.extend(itertools.islice(_inside(path, one, with_globals), _MOST_OBJECTS))


def _inside(path: _Path, one: Any, with_globals: bool) -> Iterator[tuple[_Path, Any]]:
    if isinstance(one, functools.partial):
        yield path, one.func
        yield from (((name,), arg) for name, arg in zip(_parameters(one.func), one.args, strict=False))
        yield from (((name,), arg) for name, arg in one.keywords.items())
    elif isinstance(one, types.MethodType):
        yield path, one.__func__
        yield path if path else ("self",), one.__self__
    elif isinstance(one, types.FunctionType):
        yield from (((name,), value) for name, value in _free_variables(one, with_globals))
        yield from ((path, wrapped) for wrapped in [getattr(one, "__wrapped__", None)] if wrapped is not None)
    elif isinstance(one, dict):
        yield from (((*path, str(key)), value) for key, value in one.items() if isinstance(key, str | int))
    elif isinstance(one, list | tuple | Set | ValuesView | deque):
        yield from (((*path, str(i)), value) for i, value in enumerate(one))
    elif not isinstance(one, type | types.ModuleType | str | bytes | int | float | jax.core.Tracer):
        for name, value in _attributes(one):
            yield path if name in _UNNAMED else (*path, name), value


def _free_variables(fn: types.FunctionType, with_globals: bool) -> Iterator[tuple[str, Any]]:
    """What the code of a function, or of one defined in it, names beside its own variables."""
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=False):
        try:
            yield name, cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    names: list[str] = []
    codes = [fn.__code__] if with_globals else []
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
