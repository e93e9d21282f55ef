"""One device's shards of the operands of an equation in, what the device reads for its results out: halos exchanged."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.jaxprs import JaxprEqn, run
from autoshard.layout import MeshShape, shards
from autoshard.program import Equation
from autoshard.propagation.halos import HaloRows, hops
from autoshard.propagation.moves import MoveStep, MoveWalk, Places, RowOffset, reads
from autoshard.propagation.parts import shape_in
from autoshard.propagation.registry import rule_of
from autoshard.propagation.rule import Rule
from autoshard.propagation.rules.windows import WRAPS, rows_at, source_shapes
from autoshard.propagation.source_halos import SourceHalos, is_moved


def with_halos(
    arrays: Sequence[jax.Array],
    rule: Rule,
    axes: Mapping[str, tuple[str, ...]],
    mesh: MeshShape,
    beyond: Callable[[int], Any],
) -> list[jax.Array]:
    """Operands with the rows that this device reads of its neighbours.

    Args:
        arrays: the shards.
        rule: what is read.
        axes: factor -> the mesh axes that split it.
        mesh: axis -> devices.
        beyond: operand -> what rows beyond the array count as.
    """
    found = list(arrays)
    for reach in rule.reaches:
        for rows in reach.halos:
            if split := axes.get(rows.factor, ()):
                array = found[reach.operand]
                found[reach.operand] = exchanged(array, rows, split, shards(split, mesh), beyond(reach.operand))
    return found


def with_rims(array: jax.Array, equation: Equation, split: Collection[int] = ()) -> jax.Array:
    """The images of a convolution with what follows them at the other end, along dims that no halo is brought of.

    Args:
        array: the images, or a device's part of them.
        equation: the convolution.
        split: the dims of the images that halos are brought of.
    """
    for dim, wraps, (before, after) in wrapped_dims(equation):
        if wraps and dim not in split:
            size = array.shape[dim]
            rims = [(size - before, size), (0, size), (0, after)]
            array = jnp.concatenate([jax.lax.slice_in_dim(array, *rim, axis=dim) for rim in rims], dim)
    return array


def run_whole(equation: Equation | None, eqn: JaxprEqn, arrays: Sequence[Any]) -> list:
    """An equation on whole arrays: as it stands in its jaxpr, or a convolution over what was padded there."""
    if equation is None or WRAPS not in equation.params:
        return run(eqn, arrays)
    padding = tuple((0, 0) if wraps else pads for _, wraps, pads in wrapped_dims(equation))
    images, *others = arrays
    return run(eqn.replace(params={**eqn.params, "padding": padding}), [with_rims(images, equation), *others])


def wrapped_dims(equation: Equation) -> Iterator[tuple[int, bool, tuple[int, int]]]:
    """Of a convolution, the dims that windows move along, whether they go on at the other end, and the padding."""
    if WRAPS in equation.params:
        places = equation.params["dimension_numbers"].lhs_spec[2:]
        yield from zip(places, equation.params[WRAPS], equation.params["padding"], strict=True)


def without_halos(array: jax.Array, rule: Rule, axes: Mapping[str, tuple[str, ...]]) -> jax.Array:
    """The rows of a result that are the device's own, if the result has a row for each that was read of its array."""
    config = [(0, 0, 0)] * array.ndim
    for rows in rule.reaches[0].halos if rule.reaches else ():
        if axes.get(rows.factor, ()):
            config[rows.dim] = -rows.before, -rows.after, 0
    return jax.lax.pad(array, jnp.zeros((), array.dtype), config)


def exchanged(array: jax.Array, rows: HaloRows, axes: tuple[str, ...], pieces: int, beyond: Any = 0) -> jax.Array:
    """The rows of an array that this device reads.

    Args:
        array: the device's shard.
        rows: along which dim, and which.
        axes: the mesh axes that split the dim.
        pieces: how many devices these are.
        beyond: what rows of no device count as.
    """
    dim, shard = rows.dim, array.shape[rows.dim]
    begin, end = -rows.before, shard + rows.after
    parts: dict[int, jax.Array] = {}
    if begin < shard and end > 0:
        parts[max(begin, 0)] = jax.lax.slice_in_dim(array, max(begin, 0), min(end, shard), axis=dim)
    for hop in hops(rows, shard * pieces, pieces):
        sent = jax.lax.slice_in_dim(array, hop.start, hop.stop, axis=dim)
        parts[begin + hop.at] = jax.lax.ppermute(sent, axes, hop.pairs)
    found = _joined(parts, begin, end, array, dim)
    if beyond == 0 or (begin >= 0 and end <= shard):  # whoever receives nothing has zeros
        return found
    place = jax.lax.broadcasted_iota(jnp.int32, found.shape, dim) + jax.lax.axis_index(axes) * shard + begin
    inside = (place >= rows.first) & (place < rows.last)
    return jnp.where(inside, found, jnp.asarray(beyond, found.dtype))


def _joined(parts: Mapping[int, jax.Array], begin: int, end: int, array: jax.Array, dim: int) -> jax.Array:
    """Parts of an array that start at these rows, with zeros between them."""

    def zeros(count: int) -> jax.Array:
        return jnp.zeros((*array.shape[:dim], count, *array.shape[dim + 1 :]), array.dtype)

    row, pieces = begin, []
    for start in sorted(parts):
        pieces += [zeros(start - row)] * (start > row) + [parts[start]]
        row = start + parts[start].shape[dim]
    pieces += [zeros(end - row)] * (row < end)
    return pieces[0] if len(pieces) == 1 else jnp.concatenate(pieces, dim)


def run_stencil(
    equations: Mapping[int, JaxprEqn],
    equation: Equation,
    axes: Mapping[str, tuple[str, ...]],
    arrays: Sequence[jax.Array],
    mesh: MeshShape,
) -> jax.Array:
    """What a device makes of a stencil.

    Args:
        equations: those of its steps.
        equation: the stencil.
        axes: factor -> the mesh axes that split it; none if it runs on whole arrays.
        arrays: its sources, as the device has them.
        mesh: axis -> devices.
    """
    (dims,) = rule_of(equation).results
    split = [axes.get(factor, ()) for (factor,) in dims]
    sources = source_shapes(equation)
    arrays = [
        jnp.reshape(array, shape_in(array.shape, where, len(dims))) if array.ndim else array
        for array, where in zip(map(jnp.asarray, arrays), equation.params["dims"], strict=True)
    ]
    steps, shared, is_split = equation.params["steps"], equation.params["shared"], [bool(one) for one in split]
    sizes = [zip(shape, steps[-1].shape, is_split, strict=bool(shape)) for shape in sources]
    halos = SourceHalos(
        reads(steps, sources)[0], [[one == n and cut for one, n, cut in each] for each in sizes], shared
    )
    work = _ShardWork(equations, steps, sources, split, [shards(one, mesh) for one in split], arrays, halos)
    return MoveWalk(steps, sources, work).result(is_split)


class _ShardWork:
    """The steps of a move on one device."""

    def __init__(
        self,
        equations: Mapping[int, JaxprEqn],
        steps: Sequence[MoveStep],
        sources: Sequence[tuple[int, ...]],
        axes: Sequence[tuple[str, ...]],  # of the result's dims
        pieces: Sequence[int],  # into which they are split
        arrays: Sequence[jax.Array],
        halos: SourceHalos,
    ):
        self.equations, self.steps, self.sources, self.arrays = equations, steps, sources, arrays
        self.axes, self.pieces, self.sizes = axes, pieces, steps[-1].shape
        self.halos = halos
        self.brought: dict[tuple, jax.Array] = {}  # source and what is brought of it -> rows

    def source(self, index: int, places: Places) -> jax.Array:
        shape = self.sources[index]
        split = [(dim, place) for dim, place in enumerate(places) if place is not None]
        array = self.exchanged(index, [(dim, place) for dim, place in split if shape[dim] == self.sizes[dim]])
        for dim, place in split:
            if shape[dim] != self.sizes[dim]:
                array = self.rows(array, dim, place, shape[dim])
        return array

    def exchanged(self, index: int, places: Sequence[tuple[int, RowOffset]]) -> jax.Array:
        """The rows of a source at these places along dims that are split in it, too."""
        array, moved = self.arrays[index], [dim for dim, place in places if is_moved(place)]
        if not moved:
            return array
        at, hulls = dict(places), self.halos.hulls(index, moved[-1])
        known = {hull.dim for hull in hulls if -hull.before <= at[hull.dim].offset <= hull.after}
        if not known >= {*moved, *(hull.dim for hull in hulls)}:  # otherwise read where fewer dims are split
            hulls = tuple(rows_at(at[dim], dim, "") for dim in moved)
        for i, hull in enumerate(hulls):
            so_far = index, hulls[: i + 1]
            if so_far not in self.brought:
                self.brought[so_far] = exchanged(array, hull, self.axes[hull.dim], self.pieces[hull.dim])
            array = self.brought[so_far]
        for hull in hulls:
            start, shard = at[hull.dim].offset + hull.before, self.sizes[hull.dim] // self.pieces[hull.dim]
            array = jax.lax.slice_in_dim(array, start, start + shard, axis=hull.dim)
        return array

    def rows(self, array: jax.Array, dim: int, place: RowOffset, size: int) -> jax.Array:
        """The rows at a place of an array that is whole along the dim."""
        axes, pieces, whole = self.axes[dim], self.pieces[dim], self.sizes[dim]
        if size == 1:
            return jnp.broadcast_to(array, [*array.shape[:dim], whole // pieces, *array.shape[dim + 1 :]])
        before = max(0, -place.offset)
        config = [(0, 0, 0)] * array.ndim
        config[dim] = (before, max(0, whole + place.offset - size), 0)
        padded = jax.lax.pad(array, jnp.zeros((), array.dtype), config)
        shard = whole // pieces
        start = jax.lax.axis_index(axes) * shard + place.offset + before
        return jax.lax.dynamic_slice_in_dim(padded, start, shard, dim)

    def step(self, index: int, places: Places, operands: Sequence[jax.Array]) -> jax.Array:
        step = self.steps[index]
        shape = [
            size if place is None else self.sizes[dim] // self.pieces[dim]
            for dim, (place, size) in enumerate(zip(places, step.shape, strict=True))
        ]
        match step.kind:
            case "fill":
                return jax.lax.broadcast(operands[0], shape)
            case "slice":
                starts = [0 if place else start for place, start in zip(places, step.moves, strict=True)]
                return jax.lax.slice(operands[0], starts, [a + size for a, size in zip(starts, shape, strict=True)])
            case "pad":
                config = [(0, 0, 0) if place else (*one, 0) for place, one in zip(places, step.moves, strict=True)]
                return jax.lax.pad(operands[0], operands[1], config)
            case "concatenate":
                return jnp.concatenate(operands, step.moves)
            case "put" | "put_add":
                return self.updated(step, places, *operands)
            case _:
                (made,) = run(self.equations[index], operands)
                return made

    def updated(self, step: MoveStep, places: Places, array: jax.Array, update: jax.Array) -> jax.Array:
        """Along whole dims the update is where it belongs, along others everywhere."""
        starts = [0 if place else start for place, start in zip(places, step.moves[0], strict=True)]
        if not update.ndim:
            pairs = zip(places, array.shape, step.moves[1], strict=True)
            update = jnp.broadcast_to(update, [size if place else length for place, size, length in pairs])
        if step.kind == "put":
            return jax.lax.dynamic_update_slice(array, update, starts)
        sizes = zip(starts, array.shape, update.shape, strict=True)
        config = [(start, size - start - length, 0) for start, size, length in sizes]
        return array + jax.lax.pad(update, jnp.zeros((), update.dtype), config)

    def choose(
        self, dim: int, place: RowOffset, first: int, last: int, inside: jax.Array, outside: jax.Array
    ) -> jax.Array:
        shard = self.sizes[dim] // self.pieces[dim]
        rows = jax.lax.iota(jnp.int32, shard) + jax.lax.axis_index(self.axes[dim]) * shard + place.offset
        chosen = jnp.expand_dims((rows >= first) & (rows < last), [d for d in range(inside.ndim) if d != dim])
        return jnp.where(chosen, inside, outside)
