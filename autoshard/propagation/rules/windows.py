"""Operations on a sliding window: convolutions, poolings, and stencils (`propagation/stencils.py`).

Where a windowed dim is split, neighbouring devices exchange the rims of their shards (a halo), so its factors are
permutation factors. Their sizes count windows, and need not multiply to the size of the dim. A factor has a reach if
the windows of every device begin at the same place of its shard: if positions times stride are the rows of the dim.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from autoshard.program import Equation
from autoshard.propagation.halos import HaloRows, Reach, hops, window_rows
from autoshard.propagation.moves import MoveStep, RowOffset, SourceRead, reads
from autoshard.propagation.parts import shape_in
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import KEPT_RULES, Rule, RuleBuilder, Shape, dimwise
from autoshard.propagation.rules.elementwise import shapes_of
from autoshard.propagation.source_halos import SharedReads, SourceHalos

STENCIL = "stencil"
WRAPS = "wraps"  # parameter of a convolution: along which dims of the images it goes on at the other end
_REACH_SHARE = 1 / 8  # of a dim: more at once is no halo, as where the halves of a dim trade places

# A factor's size, and the (operand, dim) and (result, dim) pairs that have it.
_Window = tuple[int, list[tuple[int, int]], list[tuple[int, int]]]
_Moves = tuple[int, int, int, int]  # of a window along one dim: stride, padding before, spread of the rows, dilation


def _least(dtype: Any) -> Any:
    return -np.inf if jnp.issubdtype(dtype, np.floating) else jnp.iinfo(dtype).min


def _most(dtype: Any) -> Any:
    return np.inf if jnp.issubdtype(dtype, np.floating) else jnp.iinfo(dtype).max


def beyond(equation: Equation, operand: int) -> Any:
    """What rows beyond an operand of a window count as."""
    dtype, name = equation.inputs[operand].dtype, equation.primitive
    if name == "select_and_scatter_add" and operand == 1:
        return _least(dtype) if equation.params["select_prim"].name == "ge" else _most(dtype)
    if name in ("reduce_window_max", "reduce_window_min"):
        return _least(dtype) if name.endswith("max") else _most(dtype)
    return 0


@rule("conv_general_dilated")
def conv_general_dilated(equation: Equation) -> Rule:
    """`b c (h m), o c m -> b o h`, reduction c; groups make the channels, or the batch, compound.

    As in Shardy, m is no factor where the windows alone fill the images' dim.
    """
    operands, (result,) = shapes_of(equation)
    numbers = equation.params["dimension_numbers"]
    specs = (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec))
    groups = (equation.params["feature_group_count"], equation.params["batch_group_count"])
    names = "window_strides", "padding", "lhs_dilation", "rhs_dilation"
    moves = zip(*(equation.params[name] for name in names), strict=True)
    wraps = equation.params.get(WRAPS, (False,) * len(numbers.lhs_spec[2:]))
    return _convolution(operands, result, specs, groups, tuple((s, int(p[0]), b, r) for s, p, b, r in moves), wraps)


@lru_cache(maxsize=KEPT_RULES)
def _convolution(
    operands: tuple[Shape, ...],
    result: Shape,
    specs: tuple[tuple[int, ...], ...],
    groups: tuple[int, int],
    moves: tuple[_Moves, ...],
    wraps: tuple[bool, ...],
) -> Rule:
    images, kernel = operands
    (batch, channels, *spatial), (kernel_out, kernel_in, *window), (out_batch, out_channels, *out_spatial) = specs
    feature_groups, batch_groups = groups
    builder = RuleBuilder(operands, [result])
    if batch_groups > 1:
        builder.factor(batch_groups, [(0, batch), (1, kernel_out)], [(0, out_channels)])
    batch_factor = builder.factor(result[out_batch], [(0, batch)], [(0, out_batch)])
    reaches: list[HaloRows[str]] = []
    summed = []
    for dim, kernel_dim, out_dim, moved, round_the_end in zip(spatial, window, out_spatial, moves, wraps, strict=True):
        # The larger of the two is the major factor. So a split of the images goes to the result. In the gradient of a
        # kernel the "kernel" is an image itself, and the split goes to it.
        positions: _Window = (result[out_dim], [], [(0, out_dim)])
        taps: _Window = (kernel[kernel_dim], [(1, kernel_dim)], [])
        room = images[dim]
        taps_first = positions[0] < taps[0]
        for i, (size, sources, targets) in enumerate((taps, positions) if taps_first else (positions, taps)):
            shared = min(room, size)
            if shared > 1:
                factor = builder.factor(shared, [(0, dim), *sources], targets, "permutation")
                room //= shared
                rows = None if i else _rows(dim, factor, images[dim], taps[0], positions[0], moved, taps_first)
                if rows is not None:
                    reaches.append(replace(rows, wraps=round_the_end))
                    summed += [factor] * taps_first
    if feature_groups > 1:
        builder.factor(feature_groups, [(0, channels), (1, kernel_out)], [(0, out_channels)])
    builder.factor(kernel[kernel_in], [(0, channels), (1, kernel_in)], [], "reduction")
    per_group = result[out_channels] // (feature_groups * batch_groups)
    builder.factor(per_group, [(1, kernel_out)], [(0, out_channels)])
    return builder.build([Reach(0, tuple(reaches))] if reaches else [], summed, batch_factor)


def _rows(
    dim: int, factor: str, size: int, window: int, places: int, moved: _Moves, window_is_split: bool
) -> HaloRows[str] | None:
    """What devices read along a dim whose windows, or whose one window, they share out; None if it has no one form."""
    stride, padding, spread, dilation = moved
    if size * spread != (window * dilation if window_is_split else places * stride):
        return None
    moves = places if window_is_split else None
    return window_rows(dim, factor, size, window, padding, stride=stride, dilation=dilation, spread=spread, moves=moves)


def _windowed(params: Any) -> dict[int, str]:
    """The dims along which a window spans, skips or pads."""
    dims = len(params["window_dimensions"])
    ones = (1,) * dims
    alone = zip(
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation", ones),
        strict=True,
    )
    return {
        dim: "permutation"
        for dim, (window, stride, padding, dilation) in enumerate(alone)
        if (window, stride, tuple(padding), dilation) != (1, 1, (0, 0), 1)
    }


@rule("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add")
def pooling(equation: Equation) -> Rule:
    """`b h c -> b h c`, h expensive."""
    operands, results = shapes_of(equation)
    found = dimwise(operands, results, _windowed(equation.params))
    if equation.primitive not in ("reduce_window_max", "reduce_window_min", "reduce_window_sum"):
        return found
    params, (size,) = equation.params, operands
    ones = (1,) * len(size)
    names = "window_strides", "padding", "base_dilation", "window_dilation"
    moves = zip(*(params.get(name, ones) for name in names), strict=True)
    reaches = [
        _rows(dim, factor, size[dim], params["window_dimensions"][dim], results[0][dim], (s, int(p[0]), b, r), False)
        for dim, ((s, p, b, r), (factor,)) in enumerate(zip(moves, found.operands[0], strict=True))
        if factor in found.permutation
    ]
    known = tuple(rows for rows in reaches if rows is not None)
    batch_factor = next((dim[0] for dim in found.operands[0][:1] if dim[0] not in found.permutation), None)
    return replace(found, reaches=(Reach(0, known),) if known else (), batch_factor=batch_factor)


@rule("select_and_scatter")
def select_and_scatter(equation: Equation) -> Rule:
    """`b h c, b i c,  -> b h c`, h expensive, i whole; the second operand has one element per window."""
    return _scattered(equation, array=0, windows=1)


@rule("select_and_scatter_add")
def select_and_scatter_add(equation: Equation) -> Rule:
    """`b i c, b h c -> b h c`, h expensive, i whole; the first operand has one element per window."""
    return _scattered(equation, array=1, windows=0)


def _scattered(equation: Equation, array: int, windows: int) -> Rule:
    operands, results = shapes_of(equation)
    builder, windowed = RuleBuilder(operands, results), _windowed(equation.params)
    alike: dict[str, str] = {}
    rows: list[tuple[HaloRows[str], HaloRows[str]]] = []
    for dim, size in enumerate(results[0]):
        if dim in windowed:
            rows_factor = builder.factor(size, [(array, dim)], [(0, dim)], "permutation")
            factor = builder.factor(operands[windows][dim], [(windows, dim)], [], "need_replication")
            if equation.primitive == "select_and_scatter_add":
                found = _scattered_rows(equation, dim, rows_factor, size, operands[windows][dim])
                rows += [found] if found else []
                alike |= {factor: rows_factor} if found else {}
        else:
            builder.factor(size, [(0, dim), (1, dim)], [(0, dim)])
    built = builder.build()
    if not rows:
        return built
    reaches = Reach(array, tuple(one for one, _ in rows)), Reach(windows, tuple(one for _, one in rows))
    batch_factor = next((dim[0] for dim in built.results[0][:1] if dim[0] not in built.permutation), None)
    return replace(built, reaches=reaches, alike=alike, batch_factor=batch_factor)


def _scattered_rows(
    equation: Equation, dim: int, factor: str, size: int, places: int
) -> tuple[HaloRows[str], HaloRows[str]] | None:
    """What a device reads of the array and of the windows to make its rows: all windows over these, and their rows."""
    params = equation.params
    window, stride = params["window_dimensions"][dim], params["window_strides"][dim]
    low = int(params["padding"][dim][0])
    if places * stride != size:
        return None
    first, after = -((window - 1 - low) // stride), (low - 1) // stride
    array = HaloRows(dim, factor, low - first * stride, after * stride - low + window, 0, size)
    return array, HaloRows(dim, factor, -first, after + 1, 0, places)


@rule(STENCIL)
def stencil(equation: Equation) -> Rule:
    """`h w, r w -> h w`, h expensive, r whole: what moves along a dim is exchanged, if it is little."""
    operands, (result,) = shapes_of(equation)
    return _stencil(*(equation.params[name] for name in ("steps", "dims", "shared")), operands, result)


def source_shapes(equation: Equation) -> list[Shape]:
    """The shapes of a stencil's sources as its steps have them."""
    return _in_steps((x.shape for x in equation.inputs), equation.params["dims"], len(equation.outputs[0].shape))


def _in_steps(shapes: Iterable[Shape], dims: Iterable[tuple[int | None, ...]], rank: int) -> list[Shape]:
    return [shape_in(shape, where, rank) if shape else () for shape, where in zip(shapes, dims, strict=True)]


@lru_cache(maxsize=KEPT_RULES)
def _stencil(
    steps: tuple[MoveStep, ...],
    dims: tuple[tuple[int | None, ...], ...],
    shared: SharedReads,
    operands: tuple[Shape, ...],
    result: Shape,
) -> Rule:
    sources = _in_steps(operands, dims, len(result))
    found, moved = reads(steps, sources)
    builder, names = RuleBuilder(operands, [result]), []
    for dim, size in enumerate(result):
        here = [(i, where.index(dim)) for i, where in enumerate(dims) if dim in where]
        alike = [(i, at) for i, at in here if operands[i][at] == size]
        names.append(builder.factor(size, alike, [(0, dim)], "permutation" if dim in moved else ""))
        for i, at in here:
            if operands[i][at] != size:
                builder.factor(operands[i][at], [(i, at)], [], "need_replication")
    small = [dim for dim in moved if _is_small(dim, found, sources, result[dim])]
    is_split = [[one == size for one, size in zip(shape, result, strict=bool(shape))] for shape in sources]
    halos = SourceHalos(found, is_split, shared)

    def rows(source: int, dim: int) -> tuple[HaloRows[str], ...]:
        hulls = (hull for hull in halos.hulls(source, dim) if hull.dim in small)
        return tuple(replace(hull, dim=dims[source].index(hull.dim), factor=names[hull.dim]) for hull in hulls)

    moving = dict.fromkeys((read.source, dim) for read in found if sources[read.source] for dim in sorted(small))
    reaches = [
        Reach(source, rows(source, dim), is_hull=True, readers=halos.readers(source, dim))
        for source, dim in moving
        if sources[source][dim] == result[dim] and dim in dims[source]
    ]
    return builder.build(reaches)


def rows_at(place: RowOffset, dim: int, factor: str) -> HaloRows[str]:
    """The rows that devices read at a place along a dim that is split."""
    return HaloRows(dim, factor, -place.offset, place.offset, place.first, place.last, place.wraps)


def _rows_of(read: SourceRead, dim: int, factor: str) -> HaloRows[str]:
    place = read.places[dim]
    assert place is not None, "all dims were taken for split"
    return rows_at(place, dim, factor)


def _is_small(dim: int, found: list[SourceRead], sources: Sequence[Shape], size: int) -> bool:
    """Whether little moves along a dim, if it is split in as few pieces as can be."""
    pieces = next((n for n in (2, 3, 5, 7) if size % n == 0), None)
    if pieces is None:
        return False
    rows = {_rows_of(read, dim, "") for read in found if sources[read.source][dim:][:1] == (size,)}
    most = max((sum(hop.rows for hop in hops(one, size, pieces)) for one in rows), default=size)
    return most <= _REACH_SHARE * size
