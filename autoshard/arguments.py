"""A call's arguments in; which are static, what the others are made of, and those placed on the mesh, out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.errors import ArgumentError, MeshError
from autoshard.jaxprs import HOST
from autoshard.plans import Plan
from autoshard.program import slashed

Dynamic = tuple[tuple, dict[str, Any]]  # positional and keyword arguments, static ones left out
ArrayType = tuple[tuple[int, ...], Any, bool, bool]  # shape, dtype, whether weakly typed, whether in host memory

_NOWHERE = AbstractMesh((1,), ("any",), axis_types=(AxisType.Auto,))
_IN_HOST_MEMORY = NamedSharding(_NOWHERE, PartitionSpec(), memory_kind=HOST)


@dataclass(frozen=True)
class Static:
    """Which arguments are static, by the rules of `jax.jit`."""

    positions: frozenset[int]
    names: frozenset[str]

    @classmethod
    def of(cls, fn: Callable, jit_keywords: Mapping[str, Any]) -> Static:
        """From `static_argnums` and `static_argnames`; if only one is given, the other follows from the signature."""
        positions = _as_tuple(jit_keywords.get("static_argnums"))
        names = _as_tuple(jit_keywords.get("static_argnames"))
        if not positions and not names:
            return cls(frozenset(), frozenset())
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (ValueError, TypeError):  # a built-in without a signature
            parameters = ()
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        positions = tuple(i % len(positional) if i < 0 and positional else i for i in positions)
        if jit_keywords.get("static_argnames") is None:
            names = tuple(positional[i] for i in positions if i < len(positional))
        elif jit_keywords.get("static_argnums") is None:
            positions = tuple(positional.index(name) for name in names if name in positional)
        return cls(frozenset(positions), frozenset(names))

    def split(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, Dynamic]:
        """(static arguments with their places, the others)."""
        if not self.positions and not self.names:
            return (), (args, kwargs)
        static = tuple((i, arg) for i, arg in enumerate(args) if i in self.positions)
        static += tuple((name, kwargs[name]) for name in sorted(kwargs) if name in self.names)
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in self.positions)
        return static, (dynamic, {name: value for name, value in kwargs.items() if name not in self.names})

    def join(self, static: tuple, dynamic: Dynamic) -> Dynamic:
        """The way back from `split`."""
        positional, keyword = list(dynamic[0]), dict(dynamic[1])
        for place, value in static:
            if isinstance(place, int):
                positional.insert(place, value)
            else:
                keyword[place] = value
        return tuple(positional), keyword


def _as_tuple(value: Any) -> tuple:
    return () if value is None else (value,) if isinstance(value, int | str) else tuple(value)


def type_of(leaf: Any) -> ArrayType:
    """What a compiled step depends on of an array, a NumPy array, a Python number or a ShapeDtypeStruct.

    Raises:
        TypeError: the leaf is none of them.

    >>> type_of(1.0), type_of(jax.numpy.zeros(3))
    (((), dtype('float32'), True, False), ((3,), dtype('float32'), False, False))
    """
    if isinstance(leaf, jax.Array):
        aval = leaf.aval
    else:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    memory_kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return aval.shape, aval.dtype, aval.weak_type, memory_kind == HOST


def abstract(type_: ArrayType) -> jax.ShapeDtypeStruct:
    """The type for tracing. On which devices an array lies now is no business of the trace, in whose memory is."""
    shape, dtype, weak, on_host = type_
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=_IN_HOST_MEMORY if on_host else None)


def not_an_array(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> ArgumentError:
    """The error for arguments (None in the place of static ones) of which `type_of` raises."""
    try:
        named = inspect.signature(fn).bind(*args, **kwargs).arguments
    except (ValueError, TypeError):
        named = {f"argument {i}": arg for i, arg in enumerate(args)} | dict(kwargs)
    for path, leaf in jax.tree_util.tree_flatten_with_path(dict(named))[0]:
        try:
            type_of(leaf)
        except TypeError:
            return ArgumentError(
                f"{slashed(path)} is {leaf!r}, which is no array.\nMake its argument static (static_argnums, "
                "static_argnames), or leave what is no array out of it: eqx.partition(module, eqx.is_array), "
                "nnx.split(module), or a closure."
            )
    raise AssertionError("every leaf is an array")


def place(leaves: Sequence[Any], plan: Plan, donated: frozenset[int]) -> list:
    """The arrays on the mesh as the plan wants them.

    What has the plan's very sharding is not touched, and deleted if it is donated. An array that merely lies alike, on
    a mesh of Explicit axes say, is moved as any other: `jax.jit` would compile once more for it.

    Raises:
        MeshError: an array lies on devices that the mesh does not have.
    """
    placed = list(leaves)
    for i, (leaf, sharding) in enumerate(zip(leaves, plan.flat_in_shardings, strict=True)):
        lies = getattr(leaf, "sharding", None)
        if lies is not sharding and lies != sharding:
            placed[i] = _moved(leaf, sharding, plan.arguments[i].name, i in donated)
    return placed


def _moved(leaf: Any, sharding: NamedSharding, name: str, donated: bool) -> Any:
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        elsewhere = leaf.sharding.device_set - sharding.device_set
        if elsewhere and leaf.committed:
            raise MeshError(
                f"{name} lies on devices {sorted(device.id for device in elsewhere)}, which are not in the mesh "
                f"{dict(sharding.mesh.shape)}.\nMove it first (jax.device_put), or give autoshard a mesh that has them."
            )
        if donated and len(elsewhere) < len(leaf.sharding.device_set):
            # What device_put makes below may share the array's memory, and to donate that would delete the array.
            leaf = jax.device_put(leaf, leaf.sharding, may_alias=False)
    return jax.device_put(leaf, sharding)
