"""Arrays on one part of a mesh to the same arrays on another, where the devices are those of several processes.

JAX puts an array onto devices of its own process alone. Between processes runs a program over both parts, in which each
device of the first sends its shard to one device of the second (`ppermute`). All processes call `moved` with the same
arrays in the same order. A process that has no device of an array holds it without shards, as JAX allows it.

Example. A value lies on devices 0 and 1 of process 0, split along dim 0, and a stage on devices 2 and 3 of process 1
reads it split along dim 1. A program on devices 0 and 1 splits it along dim 1; one on all four sends 0 -> 2, 1 -> 3.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

Index = tuple[slice, ...]


def placed(array: Any, sharding: NamedSharding) -> jax.Array:
    """An array that every process has all of, as one global array.

    Args:
        array: a NumPy array or number, or an array of JAX on devices of this process.
    """
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = placed(jax.random.key_data(array), sharding)
        return _as_keys(words, str(jax.random.key_impl(array)), sharding)
    data = np.asarray(array)
    dtype = jax.dtypes.canonicalize_dtype(data.dtype)
    return jax.make_array_from_callback(data.shape, sharding, lambda index: data[index].astype(dtype), dtype=dtype)


def is_global(array: Any) -> bool:
    """Whether an array is one of a mesh, of which each process holds its shards; if not, every process has it all."""
    return isinstance(array, jax.Array) and not isinstance(array.sharding, SingleDeviceSharding)


def moved(array: Any, sharding: NamedSharding) -> jax.Array:
    """The array as `sharding` has it.

    Args:
        array: of a mesh, or whole on every process.
    """
    if not is_global(array):
        return placed(array, sharding)
    if array.sharding == sharding:
        return array
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        words = moved(_key_data(array), sharding)
        return _as_keys(words, str(jax.random.key_impl(array)), sharding)
    source, target = _devices(array.sharding), _devices(sharding)
    if source == target:
        return _resharded(sharding)(array)
    if (nearby := _from_own_shards(array, sharding)) is not None:
        return nearby
    return _sent(array, source, sharding, target)


def part_of(array: Any, start: int, stop: int, sharding: NamedSharding) -> jax.Array:
    """Rows of an array along dim 0, as `sharding` has them; a view where every device has its rows."""
    if not is_global(array):
        return placed(array[start:stop], sharding)
    shape = (stop - start, *array.shape[1:])
    held = array.sharding.devices_indices_map(array.shape)
    wanted = sharding.devices_indices_map(shape)
    if all(
        device in held and _spans(held[device], array.shape) == _shifted(_spans(index, shape), start)
        for device, index in wanted.items()
    ):
        own = {shard.device: shard.data for shard in array.addressable_shards}
        return _of_shards(shape, sharding, [own[device] for device in wanted if device in own], array.dtype)
    spec = PartitionSpec(None, *array.sharding.spec[1:])
    rows = _rows(start, stop, NamedSharding(array.sharding.mesh, spec))(array)
    return moved(rows, sharding)


def spans_processes(sharding: NamedSharding) -> bool:
    """Whether several processes have devices of it."""
    return len({device.process_index for device in _devices(sharding)}) > 1


def zeros(shape: Sequence[int], dtype: Any, sharding: NamedSharding) -> jax.Array:
    """Zeros, or keys of zeros."""
    return _zeros(tuple(shape), dtype, sharding)()


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> Callable[[], jax.Array]:
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def _devices(sharding: NamedSharding) -> tuple[Any, ...]:
    return tuple(sharding.mesh.devices.flat)


@functools.lru_cache(maxsize=1024)
def _resharded(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x, out_shardings=sharding)


@functools.lru_cache(maxsize=1024)
def _rows(start: int, stop: int, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda x: x[start:stop], out_shardings=sharding)


def _key_data(keys: Any) -> jax.Array:
    return _words(NamedSharding(keys.sharding.mesh, keys.sharding.spec))(keys)


@functools.lru_cache(maxsize=64)
def _words(sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(jax.random.key_data, out_shardings=sharding)


def _as_keys(words: jax.Array, implementation: str, sharding: NamedSharding) -> jax.Array:
    return _wrapped(implementation, sharding)(words)


@functools.lru_cache(maxsize=64)
def _wrapped(implementation: str, sharding: NamedSharding) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda words: jax.random.wrap_key_data(words, impl=implementation), out_shardings=sharding)


# Without a program: every process has what its devices need.


def _from_own_shards(array: jax.Array, sharding: NamedSharding) -> jax.Array | None:
    """The array from shards that lie on devices of the same process; None if any process lacks some."""
    sources = _nearby_sources(array.sharding, sharding, array.shape)
    if sources is None:
        return None
    own = {shard.device: shard.data for shard in array.addressable_shards}
    made = [
        jax.device_put(own[source] if cut is None else own[source][cut], device)
        for device, (source, cut) in sources.items()
        if source in own
    ]
    return _of_shards(array.shape, sharding, made, array.dtype)


@functools.lru_cache(maxsize=4096)
def _nearby_sources(
    here: NamedSharding, there: NamedSharding, shape: tuple[int, ...]
) -> dict[Any, tuple[Any, Index | None]] | None:
    """Device -> a device of its process whose shard has what it needs, and which part of that shard; None: all of it.

    Returns:
        None if any device has no such source. It is the same on all processes.
    """
    sources: list[tuple[Any, Any]] = list(here.devices_indices_map(shape).items())
    held = [(device, _spans(index, shape)) for device, index in sources]
    found: dict[Any, tuple[Any, Index | None]] = {}
    targets: list[tuple[Any, Any]] = list(there.devices_indices_map(shape).items())
    for device, index in targets:
        wanted = _spans(index, shape)
        covering = [
            (_size(spans), source != device, source.id, source, spans)
            for source, spans in held
            if source.process_index == device.process_index
            and all(a <= c and d <= b for (a, b), (c, d) in zip(spans, wanted, strict=True))
        ]
        if not covering:
            return None
        *_, source, spans = min(covering, key=lambda one: one[:3])
        cut = tuple(slice(c - a, d - a) for (a, _), (c, d) in zip(spans, wanted, strict=True))
        found[device] = source, None if spans == wanted else cut
    return found


def _size(spans: Sequence[tuple[int, int]]) -> int:
    return math.prod(stop - start for start, stop in spans)


def _spans(index: Sequence[slice], shape: Sequence[int]) -> list[tuple[int, int]]:
    return [one.indices(size)[:2] for one, size in zip(index, shape, strict=True)]


def _shifted(spans: list[tuple[int, int]], by: int) -> list[tuple[int, int]]:
    return [(spans[0][0] + by, spans[0][1] + by), *spans[1:]]


def _of_shards(shape: Sequence[int], sharding: NamedSharding, shards: Sequence[jax.Array], dtype: Any) -> jax.Array:
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, list(shards), dtype=dtype)


# By a program over both parts of the mesh.


def _sent(array: jax.Array, source: tuple[Any, ...], sharding: NamedSharding, target: tuple[Any, ...]) -> jax.Array:
    """The array as devices of one part send it to those of the other."""
    here, there, rounds = _wire(array.sharding, sharding, array.shape)
    ready = moved(array, here)
    shard = here.shard_shape(array.shape)
    own = {one.device: one.data for one in ready.addressable_shards}
    received: dict[Any, jax.Array] = {}
    union = tuple(dict.fromkeys((*source, *target)))
    for pairs in rounds:
        parts = [
            _flat(own[device]) if device in own else _blank(device, shard, array.dtype)
            for device in union
            if device.process_index == jax.process_index()
        ]
        mesh = line_of(union)
        rows = (len(union) * (shard[0] if shard else 1), *shard[1:])
        whole = _of_shards(rows, NamedSharding(mesh, PartitionSpec("devices")), parts, array.dtype)
        for one in _permuted(mesh, pairs)(whole).addressable_shards:
            if any(union[to] == one.device for _, to in pairs):
                received[one.device] = one.data if shard else one.data.reshape(())
    made = [received[device] for device in _devices(there) if device in received]
    return moved(_of_shards(array.shape, there, made, array.dtype), sharding)


def _flat(shard: jax.Array) -> jax.Array:
    return shard if shard.ndim else shard.reshape(1)


@functools.lru_cache(maxsize=1024)
def _wire(
    here: NamedSharding, there: NamedSharding, shape: tuple[int, ...]
) -> tuple[NamedSharding, NamedSharding, tuple[tuple[tuple[int, int], ...], ...]]:
    """How an array lies before and after it is sent, shard by shard, and who sends to whom in each round.

    Numbers in pairs are places among the devices of both parts, those of the first part before the others.
    """
    source, target = _devices(here), _devices(there)
    union = {device: i for i, device in enumerate(dict.fromkeys((*source, *target)))}
    if here.mesh.axis_names == there.mesh.axis_names and here.mesh.devices.shape == there.mesh.devices.shape:
        pairs = tuple((union[a], union[b]) for a, b in zip(source, target, strict=True))
        return NamedSharding(here.mesh, there.spec), there, (pairs,)
    # Meshes of unlike shapes: as many parts along one dim as both have devices for, each part on some devices alike.
    ways = [math.gcd(size, math.gcd(len(source), len(target))) for size in shape]
    dim = max(range(len(ways)), key=ways.__getitem__) if ways else 0
    split = ways[dim] if ways else 1
    spec = PartitionSpec(*[None] * dim, "parts") if split > 1 else PartitionSpec()
    senders, receivers = (_grid(devices, split) for devices in (source, target))
    copies, rounds = senders.devices.shape[1], []
    for first in range(0, receivers.devices.shape[1], copies):
        block = receivers.devices[:, first : first + copies]
        both = zip(senders.devices[:, : block.shape[1]].flat, block.flat, strict=True)
        rounds.append(tuple((union[a], union[b]) for a, b in both))
    return NamedSharding(senders, spec), NamedSharding(receivers, spec), tuple(rounds)


def _grid(devices: Sequence[Any], split: int) -> Mesh:
    """A mesh of so many parts, and the devices that have the same part."""
    return Mesh(np.array(devices).reshape(split, -1), ("parts", "copies"), axis_types=(AxisType.Auto, AxisType.Auto))


@functools.lru_cache(maxsize=1024)
def line_of(devices: tuple[Any, ...]) -> Mesh:
    """A mesh of one axis "devices"."""
    return Mesh(np.array(devices), ("devices",), axis_types=(AxisType.Auto,))


@functools.lru_cache(maxsize=1024)
def _permuted(mesh: Mesh, pairs: tuple[tuple[int, int], ...]) -> Callable[[jax.Array], jax.Array]:
    spec = PartitionSpec("devices")
    sent = jax.shard_map(
        lambda x: jax.lax.ppermute(x, "devices", pairs), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(sent)


@functools.lru_cache(maxsize=64)
def _blank(device: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """What a device passes that only receives."""
    return jax.device_put(np.zeros(shape or (1,), dtype), device)
