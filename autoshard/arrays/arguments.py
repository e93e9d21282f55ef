"""The arrays of a call in; their types, and the same arrays placed on the mesh, out."""

from __future__ import annotations

import functools
import inspect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from autoshard.errors import ArgumentError, MeshError, ProcessError
from autoshard.jaxprs import HOST, IN_HOST_MEMORY, is_array
from autoshard.plans.plan import PlanData
from autoshard.program import slashed
from autoshard.program.explicit import is_explicit, type_sharding
from autoshard.program.signature import static_places

# Shape, dtype, whether weakly typed, whether in host memory, the sharding in a type of explicit mode. A token has no
# shape; its type is its abstract value.
ArrayType = tuple[tuple[int, ...], Any, bool, bool, NamedSharding | None] | Any
_ARRAY_TYPES = jax.core.ShapedArray, jax.ShapeDtypeStruct
_SHOWN_CHARACTERS = 200  # of an argument's text that a message shows at most
_TypedArray = tuple[tuple[int, ...], Any, bool, bool, NamedSharding]


def type_of(leaf: Any) -> ArrayType:
    """The facts that a compiled step depends on: of an array, NumPy array, Python number, ShapeDtypeStruct or token.

    Raises:
        TypeError: the leaf is none of them, a reference to an array, or of a type of the user's own.

    >>> type_of(1.0), type_of(jax.numpy.zeros(3))
    (((), dtype('float32'), True, False, None), ((3,), dtype('float32'), False, False, None))
    """
    if isinstance(leaf, jax.Ref):
        raise TypeError("a Ref changes under the step, so that its layout is no part of a plan")
    if isinstance(leaf, jax.Array):
        aval = leaf.aval
    else:
        aval = leaf if isinstance(leaf, jax.ShapeDtypeStruct) else jax.typeof(leaf)
    if not isinstance(aval, _ARRAY_TYPES):
        if aval == _token_type():
            return aval
        raise TypeError(f"{aval} is a type of the user's own, whose parts have no layout in a plan")
    memory_kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return aval.shape, aval.dtype, aval.weak_type, memory_kind == HOST, _typed(aval)


@functools.cache
def _token_type() -> Any:
    return jax.typeof(jax.lax.create_token())


def _typed(aval: Any) -> NamedSharding | None:
    """The sharding in a type, along the Explicit axes alone."""
    sharding = type_sharding(aval)
    if sharding is None:
        return None
    return jax.core.ShapedArray(
        aval.shape, aval.dtype, sharding=NamedSharding(sharding.mesh.abstract_mesh, sharding.spec)
    ).sharding


def is_typed_on(type_: ArrayType, mesh: Mesh | AbstractMesh) -> TypeGuard[_TypedArray]:
    """Whether the type is one of explicit mode, on a mesh of the same axes."""
    typed = type_[4] if isinstance(type_, tuple) else None
    return typed is not None and list(typed.mesh.shape.items()) == list(mesh.shape.items())


def without_type(type_: ArrayType) -> ArrayType:
    """The same array, open to be laid in any way."""
    return (*type_[:4], None) if isinstance(type_, tuple) else type_


def is_on_host(type_: ArrayType) -> bool:
    """Whether the array lies in the host's memory."""
    return isinstance(type_, tuple) and type_[3]


def on_devices(type_: ArrayType) -> ArrayType:
    """The same array in the memory of devices."""
    return (*type_[:3], False, type_[4]) if isinstance(type_, tuple) else type_


def replicated_type(type_: ArrayType, mesh: AbstractMesh) -> ArrayType:
    """The same array with a type that says it is whole on a mesh of Explicit axes."""
    if not isinstance(type_, tuple):
        return type_
    return (*type_[:4], NamedSharding(mesh, PartitionSpec(*[None] * len(type_[0]))))


def abstract(type_: ArrayType) -> Any:
    """The type for tracing. The trace sees the kind of memory that an array is in, and not its devices."""
    if not isinstance(type_, tuple):
        return jax.lax.create_token()
    shape, dtype, weak, on_host, typed = type_
    sharding = typed or (IN_HOST_MEMORY if on_host else None)
    if typed is not None and on_host:
        sharding = NamedSharding(typed.mesh, typed.spec, memory_kind=HOST)
    return jax.ShapeDtypeStruct(shape, dtype, weak_type=weak, sharding=sharding)


def not_an_array(fn: Callable, args: tuple, kwargs: Mapping[str, Any]) -> ArgumentError | None:
    """The error for arguments that are neither arrays nor hashable, if any; static arguments are None here."""
    try:
        named = inspect.signature(fn).bind(*args, **kwargs).arguments
    except (ValueError, TypeError):
        named = {f"argument {i}": arg for i, arg in enumerate(args)} | dict(kwargs)
    found, structure = jax.tree_util.tree_flatten_with_path(dict(named))
    static = static_places(structure, [leaf for _, leaf in found])
    for place, (path, leaf) in enumerate(found):
        if isinstance(leaf, jax.Ref):
            return ArgumentError(
                f"{slashed(path)} is a {jax.typeof(leaf)}: a reference stays where it lies, whatever a plan says."
                "\nPass the array, and return the new one: new = step(ref[...]). To write it back where the reference "
                "lies: ref[...] = jax.device_put(new, ref.sharding)."
            )
        if not (_is_hashable(leaf) if place in static else _has_type(leaf)):
            return ArgumentError(
                f"{slashed(path)} is {_shown(leaf)}, which is no array{' and has no hash' * (place in static)}.\n"
                "Make its argument static (static_argnums, static_argnames), give it a hash, turn it into an array, or "
                "leave it out: eqx.partition(module, eqx.is_array), nnx.split(module), or a closure. If its class "
                "holds arrays, register it as a pytree: jax.tree_util.register_dataclass, flax.struct.dataclass."
            )
    return None


def _shown(leaf: Any) -> str:
    """What a message says of an argument, on one line: its `repr`, or the beginning of it; of a large array its type.

    >>> _shown(np.zeros((32, 16), "datetime64[s]")), _shown({"a"})
    ('a NumPy array datetime64[s][32, 16]', "{'a'}")
    """
    text = " ".join(repr(leaf).split())
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return f"a NumPy array {leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, np.ndarray) else text[:_SHOWN_CHARACTERS]


def _has_type(leaf: Any) -> bool:
    try:
        type_of(leaf)
    except TypeError:
        return False
    return True


def _is_hashable(leaf: Any) -> bool:
    try:
        hash(leaf)
    except (TypeError, ValueError):  # a writable memoryview raises the latter
        return False
    return True


def place(leaves: Sequence[Any], plan: PlanData, donated: frozenset[int]) -> list:
    """The arrays on the mesh as the plan wants them.

    An array that has the plan's very sharding is not touched, and it is deleted if it is donated, unless it stands in
    other places, too, as in a module and its clone: then it is copied. What is not donated stays as it is on a mesh of
    one device, if it lies there or in NumPy's memory. An array that only lies alike, for instance on a mesh of Explicit
    axes, is moved as any other: `jax.jit` would compile again for it.

    Raises:
        ArgumentError: an array has been deleted, or is none.
        MeshError: an array lies on devices that the mesh does not have.
    """
    placed = list(leaves)
    times = Counter(map(id, leaves)) if donated else Counter[int]()
    for i, (leaf, sharding) in enumerate(zip(leaves, plan.flat_in_shardings, strict=True)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ArgumentError(
                f"{plan.arguments[i].name} is {leaf}, which has no numbers to run with.\n"
                "Call the step with arrays; .plan() and .lower() take what has only a shape."
            )
        if is_deleted(leaf):
            raise ArgumentError(
                f"{plan.arguments[i].name} has been deleted, most likely since it was donated to an earlier call.\n"
                "Go on with what that call returned, as in `state, loss = step(state, batch)`, or do not donate it."
            )
        lies = getattr(leaf, "sharding", None)
        stays = lies is sharding or lies == sharding or _is_same_sharding(lies, sharding, leaf)
        if not stays and (i in donated or not _goes_to_one_device(leaf, lies, sharding)):
            placed[i] = _moved(leaf, sharding, plan.arguments[i].name, i in donated)
        elif i in donated and times[id(leaf)] > 1 and isinstance(leaf, jax.Array):
            placed[i] = jax.device_put(leaf, leaf.sharding, may_alias=False)
    return placed


def place_captured(arrays: Sequence[Any], plan: PlanData) -> list[jax.Array]:
    """Arrays that the step closes over, on the mesh as the plan wants them.

    As under `jax.jit`, numbers are those of now: a NumPy array may change later. A `jax.Array` that lies right already
    is not copied.

    Raises:
        ArgumentError: an array has been deleted.
    """
    placed = []
    with jax.ensure_compile_time_eval():  # the step may be called while another function is being traced
        for array, to, sharding in zip(arrays, plan.captured, plan.captured_shardings, strict=True):
            if is_deleted(array):
                raise ArgumentError(
                    f"{to.name}, which {plan.name} closes over, has been deleted, most likely since it was donated.\n"
                    "Pass it to the step as an argument, or close over a copy (jax.numpy.copy)."
                )
            kept = array if isinstance(array, jax.Array) else np.array(array)
            placed.append(put_on_mesh(kept, sharding))
    return placed


def _is_same_sharding(lies: Any, sharding: NamedSharding, leaf: Any) -> bool:
    """Whether two shardings are one type of explicit mode, which `jax.jit` does not compile anew for: P("x", None) and
    P("x")."""
    explicit = isinstance(lies, NamedSharding) and is_explicit(sharding.mesh) and lies.mesh == sharding.mesh
    return explicit and lies.is_equivalent_to(sharding, leaf.ndim)


def _goes_to_one_device(leaf: Any, lies: Any, sharding: NamedSharding) -> bool:
    """Whether `jax.jit` takes an array as it is: the mesh is one device, and it lies there or JAX brings it."""
    if sharding.num_devices > 1 or is_explicit(sharding.mesh) or sharding.memory_kind == HOST:
        return False
    if isinstance(lies, SingleDeviceSharding):
        return lies.device_set == sharding.device_set and lies.memory_kind == sharding.memory_kind
    return isinstance(leaf, np.ndarray) and sharding.is_fully_addressable


def unplanned_placements(leaves: Sequence[Any], plan: PlanData) -> dict[int, Any]:
    """Where the arrays lie that `place` leaves otherwise than planned, as far as `jax.jit` tells them apart."""
    places = enumerate(zip(map(current_sharding, leaves), plan.flat_in_shardings, strict=True))
    return {i: lies for i, (lies, sharding) in places if lies is not sharding and lies != sharding}


def current_sharding(leaf: Any) -> Any:
    """The sharding of an array; of what lies on no device its type.

    >>> current_sharding(np.zeros(3))
    <class 'numpy.ndarray'>
    """
    return getattr(leaf, "sharding", type(leaf))


def is_deleted(leaf: Any) -> bool:
    """Whether it is an array that is no longer there."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()


def transforms_types(leaves: Sequence[Any]) -> bool:
    """Whether arrays are being transformed in explicit mode: how derivatives and batches lie, types say already."""
    traced = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
    explicit = is_explicit(jax.sharding.get_abstract_mesh())
    return any(explicit or type_sharding(jax.typeof(leaf)) is not None for leaf in traced)


def run_transformed(step: Callable[..., tuple], leaves: Sequence[Any], mesh: Mesh) -> tuple:
    """The flat results of `JittedStep.transformed`, wherever the arrays behind the leaves lie.

    An array under `jax.vmap` has more elements than its shape says. If it has to be moved, it can only be copied whole
    to all devices.
    """
    try:
        return step(*leaves)
    except ValueError as error:
        if "incompatible devices" not in str(error):
            raise
    return step(*jax.device_put(list(leaves), NamedSharding(mesh, PartitionSpec())))


def _moved(leaf: Any, sharding: NamedSharding, name: str, donated: bool) -> Any:
    if not is_array(jax.typeof(leaf)):
        return leaf
    if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer):
        elsewhere: set[Any] = leaf.sharding.device_set - sharding.device_set
        if elsewhere and leaf.committed:
            raise MeshError(
                f"{name} lies on devices {sorted(device.id for device in elsewhere)}, which are not in the mesh "
                f"{dict(sharding.mesh.shape)}.\nMove it first (jax.device_put), or give autoshard a mesh that has them."
            )
        copies = donated and len(elsewhere) < len(leaf.sharding.device_set)
    else:
        copies = False
    with jax.ensure_compile_time_eval():  # the step may be called while another function is being traced
        if copies and sharding.is_fully_addressable:
            # The result of the device_put below may share the array's memory. To donate it would delete the array.
            leaf = jax.device_put(leaf, leaf.sharding, may_alias=False)
        try:
            return put_on_mesh(leaf, sharding)
        except AssertionError as error:  # of JAX, with all numbers of both arrays
            if sharding.is_fully_addressable:
                raise
            raise ProcessError(
                f"{name} is not the same on all processes of the mesh.\nMake it of the same seed and numbers on all of "
                "them. A process's own rows of a batch are for plan.shard_batch(batch)."
            ) from error.__cause__


def put_on_mesh(array: Any, sharding: NamedSharding) -> Any:
    """The array as `sharding` has it.

    JAX puts no typed keys onto devices of other processes, so their words go. Of arrays that are committed to a device
    of one process it puts none there either, and copies are committed: so these go as numbers.
    """
    if sharding.is_fully_addressable:
        return jax.device_put(array, sharding)
    is_key = jax.dtypes.issubdtype(getattr(array, "dtype", None), jax.dtypes.prng_key)
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        return jax.jit(lambda keys: keys, out_shardings=sharding)(array) if is_key else jax.device_put(array, sharding)
    numbers = jax.random.key_data(array) if is_key else array
    numbers = np.array(numbers) if isinstance(numbers, jax.Array) else numbers
    placed = jax.device_put(numbers, NamedSharding(sharding.mesh, sharding.spec) if is_key else sharding)
    if not is_key:
        return placed
    wrapped = functools.partial(jax.random.wrap_key_data, impl=str(jax.random.key_impl(array)))
    return jax.jit(wrapped, out_shardings=sharding)(placed)
