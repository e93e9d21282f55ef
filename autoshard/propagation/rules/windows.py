"""Operations on a sliding window: convolutions and poolings.

Where a windowed dim is split, neighbouring devices exchange the rims of their shards (a halo), so its factors are
permutation factors. Their sizes count windows, and need not multiply to the size of the dim.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, Shape, dimwise
from autoshard.propagation.rules.elementwise import shapes_of

# A factor's size, and the (operand, dim) and (result, dim) pairs that have it.
_Window = tuple[int, list[tuple[int, int]], list[tuple[int, int]]]


@rule("conv_general_dilated")
def conv_general_dilated(equation: Equation) -> Rule:
    """`b c (h m), o c m -> b o h`, reduction c; groups make the channels, or the batch, compound.

    As in Shardy, m is no factor where the windows alone fill the images' dim.
    """
    operands, (result,) = shapes_of(equation)
    numbers = equation.params["dimension_numbers"]
    specs = (tuple(numbers.lhs_spec), tuple(numbers.rhs_spec), tuple(numbers.out_spec))
    groups = (equation.params["feature_group_count"], equation.params["batch_group_count"])
    return _convolution(operands, result, specs, groups)


@lru_cache(maxsize=4096)
def _convolution(
    operands: tuple[Shape, ...], result: Shape, specs: tuple[tuple[int, ...], ...], groups: tuple[int, int]
) -> Rule:
    images, kernel = operands
    (batch, channels, *spatial), (kernel_out, kernel_in, *window), (out_batch, out_channels, *out_spatial) = specs
    feature_groups, batch_groups = groups
    builder = RuleBuilder(operands, [result])
    if batch_groups > 1:
        builder.factor(batch_groups, [(0, batch), (1, kernel_out)], [(0, out_channels)])
    builder.factor(result[out_batch], [(0, batch)], [(0, out_batch)])
    for dim, kernel_dim, out_dim in zip(spatial, window, out_spatial, strict=True):
        # The larger of the two is the major factor. So a split of the images goes to the result. In the gradient of a
        # kernel the "kernel" is an image itself, and the split goes to it.
        positions: _Window = (result[out_dim], [], [(0, out_dim)])
        taps: _Window = (kernel[kernel_dim], [(1, kernel_dim)], [])
        room = images[dim]
        for size, sources, targets in (positions, taps) if positions[0] >= taps[0] else (taps, positions):
            shared = min(room, size)
            if shared > 1:
                builder.factor(shared, [(0, dim), *sources], targets, "permutation")
                room //= shared
            elif size > 1:
                builder.factor(size, sources, targets, "need_replication")
    if feature_groups > 1:
        builder.factor(feature_groups, [(0, channels), (1, kernel_out)], [(0, out_channels)])
    builder.factor(kernel[kernel_in], [(0, channels), (1, kernel_in)], [], "reduction")
    per_group = result[out_channels] // (feature_groups * batch_groups)
    builder.factor(per_group, [(1, kernel_out)], [(0, out_channels)])
    return builder.build()


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
    return dimwise(operands, results, _windowed(equation.params))


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
    for dim, size in enumerate(results[0]):
        if dim in windowed:
            builder.factor(size, [(array, dim)], [(0, dim)], "permutation")
            builder.factor(operands[windows][dim], [(windows, dim)], [], "need_replication")
        else:
            builder.factor(size, [(0, dim), (1, dim)], [(0, dim)])
    return builder.build()
