"""A plan and what makes or holds arrays in, arrays that lie as the plan has its arguments out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jax.tree_util import tree_flatten_with_path

from autoshard.arrays.arguments import put_on_mesh
from autoshard.arrays.subtrees import (
    ArgumentPart,
    Leaf,
    argument_leaves,
    best_of,
    common_suffix_length,
    keys_of,
    parts_like,
)
from autoshard.errors import ArgumentError, MeshError
from autoshard.jaxprs import NO_MESH
from autoshard.layout import spec_text, with_auto_axes
from autoshard.plans.plan import PlanData
from autoshard.program.flattening import flat_results
from autoshard.program.signature import static_places

_LISTED_PARTS = 5  # arrays or parts that a message names at most


def init(plan: PlanData, init_fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """What `init_fn` makes, each array made as the plan has it among its arguments; see `Plan.init`."""
    if not callable(init_fn):
        raise ArgumentError(f"init({init_fn!r}): a function that makes arrays is needed, and what it takes")
    with _without_explicit_axes():
        return initialiser(plan, init_fn, args)()


@dataclass(frozen=True, eq=False)
class Maker:
    """A jitted function that makes some arrays of a state on the devices where they shall lie."""

    numbers: tuple[int, ...]  # of these arrays among all
    jitted: Any
    given: tuple[Any, ...]  # what it takes
    types: tuple[Any, ...] = field(repr=False)  # ShapeDtypeStructs with shardings, of what it returns

    def __call__(self) -> list[jax.Array]:
        devices = self.types[0].sharding.mesh.devices.flat
        if any(device.process_index == jax.process_index() for device in devices):
            made: list[jax.Array] = self.jitted(*self.given)
            return made
        # Other processes make these arrays; this one holds them without shards.
        return [
            jax.make_array_from_single_device_arrays(one.shape, one.sharding, [], dtype=one.dtype) for one in self.types
        ]


@dataclass(frozen=True, eq=False)
class Initialiser:
    """Makes a state where a plan has it. A plan without stages has all arrays on the same devices, and so one maker."""

    makers: tuple[Maker, ...]
    rebuilt: Callable[[Sequence[Any]], Any] = field(repr=False)  # from all arrays to what `init_fn` returns

    def __call__(self) -> Any:
        arrays: dict[int, jax.Array] = {}
        for maker in self.makers:
            arrays |= zip(maker.numbers, maker(), strict=True)
        return self.rebuilt([arrays[number] for number in range(len(arrays))])


def initialiser(plan: PlanData, init_fn: Callable[..., Any], args: Sequence[Any]) -> Initialiser:
    """What makes the arrays of the result where they shall lie.

    A jitted function has one set of devices, and arrays of a plan with stages lie on several. So there is a function
    per set, from which the compiler drops whatever is made for others.
    """
    mesh = _devices_of(plan)
    leaves, structure = jax.tree.flatten(tuple(args))
    traced = [i for i, leaf in enumerate(leaves) if isinstance(leaf, jax.Array | np.ndarray)]
    rebuilders: list[Any] = []  # what makes the result of its arrays, and the keys of these

    def arrays_of(*given: Any) -> list[Any]:
        filled = list(leaves)
        for i, array in zip(traced, given, strict=True):
            filled[i] = array
        arrays, rebuilder = flat_results(init_fn(*jax.tree.unflatten(structure, filled)))
        rebuilders[:] = [rebuilder.unflattened, list(map(keys_of, rebuilder.array_paths))]
        return list(arrays)

    def given_on(mesh: Any) -> tuple[Any, ...]:
        return tuple(_on_mesh(leaves[i], mesh) for i in traced)

    shapes = jax.eval_shape(arrays_of, *given_on(mesh))
    rebuilt, keys = rebuilders
    wanted = [Leaf(path, one.shape, str(one.dtype)) for path, one in zip(keys, shapes, strict=True)]
    indices = _found(plan, wanted, "init_fn makes", Leaf.is_like, state_first=True)
    types = [
        jax.ShapeDtypeStruct(one.shape, one.dtype, sharding=plan.flat_in_shardings[i])
        for one, i in zip(shapes, indices, strict=True)
    ]
    by_devices: dict[tuple[Any, ...], list[int]] = {}
    for number, one in enumerate(types):
        by_devices.setdefault(tuple(one.sharding.mesh.devices.flat), []).append(number)

    def maker(numbers: Sequence[int]) -> Maker:
        own = tuple(types[number] for number in numbers)

        def some(*given: Any) -> list[Any]:
            arrays = arrays_of(*given)
            return [arrays[number] for number in numbers]

        jitted = jax.jit(some, out_shardings=[one.sharding for one in own])
        return Maker(tuple(numbers), jitted, given_on(with_auto_axes(own[0].sharding.mesh)), own)

    return Initialiser(tuple(map(maker, by_devices.values())), rebuilt)


def shard_batch(plan: PlanData, batch: Any) -> Any:
    """Global arrays from those that this process holds; see `Plan.shard_batch`."""
    _devices_of(plan)
    leaves, structure = tree_flatten_with_path(batch)
    static = static_places(structure, [leaf for _, leaf in leaves])
    found = [one for i, one in enumerate(leaves) if i not in static]
    arrays = [leaf if isinstance(leaf, jax.Array) else np.asarray(leaf) for _, leaf in found]
    if not arrays:
        raise ArgumentError(
            f"shard_batch of {type(batch).__name__}: it holds no array.\nPass arrays as {plan.name} takes them."
        )
    wanted = [
        Leaf(keys_of(path), tuple(array.shape), str(_canonical(array.dtype)))
        for (path, _), array in zip(found, arrays, strict=True)
    ]
    local = {
        leaf.keys: local_shape(leaf.shape, sharding)
        for leaf, sharding in zip(argument_leaves(plan), plan.flat_in_shardings, strict=True)
    }

    def is_like(one: Leaf, there: Leaf) -> bool:
        return one.dtype == there.dtype and one.shape in (there.shape, local[there.keys])

    indices = _found(plan, wanted, "the batch holds", is_like, state_first=False)
    placed = []
    for array, leaf, index in zip(arrays, wanted, indices, strict=True):
        sharding, shape = plan.flat_in_shardings[index], plan.arguments[index].shape
        if isinstance(array, jax.Array) and array.shape == shape:
            placed.append(put_on_mesh(array, sharding))
        else:
            data = np.asarray(array).astype(leaf.dtype, copy=False)
            placed.append(jax.make_array_from_process_local_data(sharding, data, shape))
    rest = iter(placed)
    return jax.tree.unflatten(structure, [leaf if i in static else next(rest) for i, (_, leaf) in enumerate(leaves)])


def local_shape(shape: Sequence[int], sharding: NamedSharding) -> tuple[int, ...]:
    """The shape of what this process holds of a global array."""
    rows: list[set[tuple[int, int]]] = [set() for _ in shape]
    for index in sharding.addressable_devices_indices_map(tuple(shape)).values():
        for dim, part in enumerate(index or ()):
            start, stop, _ = part.indices(shape[dim])
            rows[dim].add((start, stop))
    return tuple(sum(stop - start for start, stop in parts) for parts in rows)


def _canonical(dtype: Any) -> Any:
    return dtype if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)


def _found(
    plan: PlanData, wanted: Sequence[Leaf], what: str, is_like: Callable[[Leaf, Leaf], bool], *, state_first: bool
) -> list[int]:
    """Per array, the index of the plan's argument that it is.

    A tuple that is no part of the arguments may hold several parts: `return params, optimizer_state`.

    Args:
        what: how messages start.
        state_first: whether, of two parts that are alike, arguments that stay from step to step come first, or last.

    Raises:
        ArgumentError: no part of the arguments holds the same arrays, or several that lie otherwise.
    """
    there = argument_leaves(plan)
    if not wanted:
        return []
    parts = _ranked(plan, parts_like(wanted, there, is_like), state_first)
    if parts:
        return list(_only(plan, parts, what).leaves)
    groups: dict[str, list[Leaf]] = {}
    for leaf in wanted:
        if leaf.keys:
            groups.setdefault(leaf.keys[0], []).append(leaf)
    found: dict[Leaf, int] = {}
    for key, leaves in groups.items():
        below = [Leaf(leaf.keys[1:], leaf.shape, leaf.dtype) for leaf in leaves]
        left = [part for part in parts_like(below, there, is_like) if not set(part.leaves) & set(found.values())]
        if key.isdigit() and (parts := _ranked(plan, left, state_first)):
            part = next(iter(best_of(parts, lambda part: part.is_argument)), None)
            assert part is not None, "there is one"
            chosen = part if part.is_argument else _only(plan, parts, f"[{key}] of what {what}")
            found |= dict(zip(leaves, chosen.leaves, strict=True))
    if len(found) < len(wanted):
        raise ArgumentError(_not_found(there, wanted, what, plan))
    return [found[leaf] for leaf in wanted]


def _ranked(plan: PlanData, parts: Collection[ArgumentPart], state_first: bool) -> list[ArgumentPart]:
    """The parts that are likeliest: whole arguments first."""

    def is_likely(part: ArgumentPart) -> bool:
        return all((i in plan.carried) == state_first for i in part.leaves)

    return best_of(parts, is_likely, lambda part: part.is_argument, lambda part: part.is_all)


def _only(plan: PlanData, parts: Sequence[ArgumentPart], what: str) -> ArgumentPart:
    """The first of the parts; any other lies as it does.

    Raises:
        ArgumentError: one lies otherwise.
    """
    first = parts[0]
    for other in parts[1:]:
        for one, another in zip(first.leaves, other.leaves, strict=True):
            if plan.flat_in_shardings[one] != plan.flat_in_shardings[another]:
                here, there = plan.arguments[one], plan.arguments[another]
                raise ArgumentError(
                    f"{what} what {first.name} and {other.name} of {plan.name} both are, and these lie in two ways: "
                    f"{here.name} {spec_text(here.layout)}, {there.name} {spec_text(there.layout)}.\n"
                    "Make a whole argument of the step at once, so that every array has one place in it."
                )
    return first


def _not_found(there: Sequence[Leaf], wanted: Sequence[Leaf], what: str, plan: PlanData) -> str:
    """What does not fit: an array that has a namesake of another type, or else all."""
    namesakes = [(common_suffix_length(one.keys, other.keys), one, other) for one in wanted for other in there]
    depth, one, other = max(
        ((depth, one, other) for depth, one, other in namesakes if not one.is_like(other)),
        key=lambda pair: pair[0],
        default=(0, None, None),
    )
    if depth:
        return (
            f"{what} {one}, where {plan.name} is planned for {other}.\n"
            "Use the shapes and dtypes that the plan was made with, or plan for these."
        )
    listed = ", ".join(map(str, wanted[:_LISTED_PARTS])) + (
        f" and {len(wanted) - _LISTED_PARTS} more" * (len(wanted) > _LISTED_PARTS)
    )
    known = ", ".join(dict.fromkeys(leaf.keys[0] for leaf in there))
    return (
        f"{what} {listed}. No part of the arguments of {plan.name} ({known}) holds the same arrays under the same "
        "keys.\nMake what the step takes: one argument, a part of one, or a tuple of such."
    )


def _devices_of(plan: PlanData) -> Mesh:
    if not isinstance(plan.mesh, Mesh):
        raise MeshError(
            f"{plan.mesh} has no devices to hold arrays.\n"
            "Use the plan on a mesh of devices, as in plan.on(jax.make_mesh(...))."
        )
    return plan.mesh


def _on_mesh(array: Any, mesh: Mesh) -> Any:
    """An array that a function on the mesh takes: nowhere in particular, or on all of its devices, on Auto axes."""
    if not isinstance(array, jax.Array) or not array.committed:
        return array
    sharding = array.sharding
    if sharding.device_set != set(mesh.devices.flat):
        return put_on_mesh(array, NamedSharding(mesh, PartitionSpec()))
    if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
        return jax.device_put(array, NamedSharding(with_auto_axes(sharding.mesh), sharding.spec))
    return array


def _without_explicit_axes() -> contextlib.AbstractContextManager[Any]:
    """No mesh is set if the one that is has Explicit axes, on which types would say how arrays lie."""
    if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
        return jax.sharding.use_abstract_mesh(NO_MESH)
    return contextlib.nullcontext()
