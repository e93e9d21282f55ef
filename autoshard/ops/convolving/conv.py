"""`autoshard.ops.conv`: `jax.lax.conv_general_dilated` whose images may be split, whatever their size.

A plain convolution is planned with halos, too, where every device's windows begin at the same place of its shard. That
is the case of most: `conv` leaves these to it. Any other is an operation here. Its positions are shared out, the
devices exchange the rows that they read, and a result that devices do not divide is gathered:

=============  ========================================================================================================
`halo`         image and result are split
`gathered`     the result is not divided by the devices, and gathered
`positions`    the image is not: every device has it whole, and computes its share of the positions
`shared`       neither is
=============  ========================================================================================================

Which of the four follows from the sizes. The number behind the name is that of the spatial dim.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import checks_kinds
from autoshard.operations.operation import Implementation, Operation
from autoshard.operations.split import CallSplit
from autoshard.ops.convolving.windows import PositionShare, WindowMoves, of_positions, rows_read
from autoshard.ops.operands import arrays_of
from autoshard.propagation.rule import Rule, Shape

ROLE = "space"
Pairs = tuple[tuple[int, int], ...]


@checks_kinds("window_strides", "lhs_dilation", "rhs_dilation", "feature_group_count", "batch_group_count")
def conv(
    lhs: Any,
    rhs: Any,
    window_strides: Sequence[int] | None = None,
    padding: str | Sequence[tuple[int, int]] = "SAME",
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """`jax.lax.conv_general_dilated`, of which a plan may split batch, channels and space, of any size.

    Under autoshard, devices that share out space exchange the rows that their windows read. The planner takes what is
    predicted to be fastest. Without autoshard it is plain JAX.

    Args:
        lhs: images; by default ``[N, C, ...space]``.
        rhs: kernel; by default ``[O, I, ...space]``.
        window_strides: one per spatial dim; by default 1.
        padding: ``"SAME"``, ``"SAME_LOWER"``, ``"VALID"``, or a pair per spatial dim.
        lhs_dilation: from row to row of the image; by default 1.
        rhs_dilation: from row to row of the window; by default 1.
        dimension_numbers: the order of dims, as for `jax.lax.conv_general_dilated`; by default NCHW, OIHW, NCHW.
        feature_group_count: groups that channels are split into, as there.
        batch_group_count: groups that images are split into, as there.
        precision: of the products, as there.
        preferred_element_type: the dtype of sums and result, as there.

    Returns:
        What `jax.lax.conv_general_dilated` returns.

    >>> conv(jnp.ones((1, 1, 5)), jnp.ones((1, 1, 3)), padding="VALID").shape
    (1, 1, 3)
    """
    lhs, rhs = arrays_of(lhs=lhs, rhs=rhs)
    spatial = lhs.ndim - 2
    strides, spread, dilation = (
        (1,) * spatial if one is None else tuple(map(int, one)) for one in (window_strides, lhs_dilation, rhs_dilation)
    )
    for name, one in (("window_strides", strides), ("lhs_dilation", spread), ("rhs_dilation", dilation)):
        if len(one) != spatial or min(one, default=1) < 1:
            raise ArgumentError(f"{name}={one}; 1 or more is needed for each of {spatial} spatial dims")
    plain = functools.partial(
        lax.conv_general_dilated,
        window_strides=strides,
        lhs_dilation=spread,
        rhs_dilation=dilation,
        dimension_numbers=dimension_numbers,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    try:  # JAX checks all that was said
        made = jax.eval_shape(functools.partial(plain, padding=padding), lhs, rhs)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(f"conv of images {lhs.shape} and a kernel {rhs.shape}: {error}") from error
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    pairs = _pairs(lhs.shape, rhs.shape, numbers, strides, spread, dilation, padding)
    convolution = Convolution(
        numbers, strides, pairs, spread, dilation, feature_group_count, precision, preferred_element_type
    )
    moves = convolution.moves(lhs.shape, rhs.shape, made.shape)
    if batch_group_count > 1 or all(one.is_regular for one in moves):
        return plain(lhs, rhs, padding=pairs)
    computed: jax.Array = conv_operation(convolution)(lhs, rhs)
    return computed


def _pairs(
    lhs: Shape,
    rhs: Shape,
    numbers: Any,
    strides: tuple[int, ...],
    spread: tuple[int, ...],
    dilation: tuple[int, ...],
    padding: str | Sequence[tuple[int, int]],
) -> Pairs:
    """The rows that are padded before and after, per spatial dim."""
    if not isinstance(padding, str):
        return tuple((int(low), int(high)) for low, high in padding)
    images = [(lhs[dim] - 1) * by + 1 for dim, by in zip(numbers.lhs_spec[2:], spread, strict=True)]
    windows = [(rhs[dim] - 1) * by + 1 for dim, by in zip(numbers.rhs_spec[2:], dilation, strict=True)]
    found = lax.padtype_to_pads(images, windows, strides, padding)
    return tuple((int(low), int(high)) for low, high in found)


@dataclass(frozen=True)
class Convolution:
    """What a convolution does, whatever the shapes of its operands."""

    numbers: Any  # `jax.lax.ConvDimensionNumbers`
    strides: tuple[int, ...]
    padding: Pairs
    spread: tuple[int, ...]  # from row to row of the image
    dilation: tuple[int, ...]
    groups: int
    precision: Any
    preferred_element_type: Any

    @property
    def spatial(self) -> range:
        return range(len(self.strides))

    def whole(self, lhs: Any, rhs: Any, padding: Pairs | None = None) -> jax.Array:
        """The convolution of what a device has, which may be a share of the batch, of channels or of groups."""
        lhs, padding = self._within_window(lhs, rhs, self.padding if padding is None else padding)
        return lax.conv_general_dilated(
            lhs,
            rhs,
            self.strides,
            padding,
            self.spread,
            self.dilation,
            self.numbers,
            feature_group_count=lhs.shape[self.numbers.lhs_spec[1]] // rhs.shape[self.numbers.rhs_spec[1]],
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )

    def _within_window(self, lhs: Any, rhs: Any, padding: Pairs) -> tuple[Any, Pairs]:
        """Images that need neither negative padding nor more than a window covers, and the padding that is left.

        XLA's CPU compiler computes some convolutions with negative padding wrongly; gradients of wide padding have it.
        """
        places, left = zip(*(spec[2:] for spec in self.numbers[:2]), strict=True), []
        config = [(0, 0, 0)] * lhs.ndim
        for (image, window), dilation, spread, ends in zip(places, self.dilation, self.spread, padding, strict=True):
            most = (rhs.shape[window] - 1) * dilation
            kept = tuple(min(max(0, end), most) for end in ends) if spread == 1 else ends
            config[image] = ends[0] - kept[0], ends[1] - kept[1], 0
            left.append(kept)
        return lax.pad(lhs, jnp.zeros((), lhs.dtype), config) if any(map(any, config)) else lhs, tuple(left)

    def moves(self, lhs: Shape, rhs: Shape, result: Shape) -> list[WindowMoves]:
        """Per spatial dim."""
        places = zip(*(spec[2:] for spec in self.numbers), strict=True)
        hows = zip(self.strides, self.padding, self.spread, self.dilation, strict=True)
        return [
            WindowMoves(lhs[image], rhs[window], result[out], stride, low, spread, dilation)
            for (image, window, out), (stride, (low, _), spread, dilation) in zip(places, hows, strict=True)
        ]

    def rule(self, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
        """`b (g c) i, (g o) c w -> b (g o) p`, reduction c; i, w and p stay whole."""
        (lhs, rhs), (made,) = operands, results
        images, kernel, out = self.numbers
        dims: list[list[tuple[str, ...]]] = [[()] * len(lhs), [()] * len(rhs), [()] * len(made)]
        dims[0][images[0]] = dims[2][out[0]] = ("b",)
        dims[0][images[1]], dims[1][kernel[1]] = ("g", "c"), ("c",)
        dims[1][kernel[0]] = dims[2][out[1]] = ("g", "o")
        sizes = {"b": lhs[images[0]], "g": self.groups, "c": rhs[kernel[1]], "o": rhs[kernel[0]] // self.groups}
        whole: list[str] = []
        for i in self.spatial:
            for names, spec, shape, letter in zip(dims, self.numbers, (lhs, rhs, made), "iwp", strict=True):
                names[spec[2 + i]] = (f"{letter}{i}",)
                sizes[f"{letter}{i}"] = shape[spec[2 + i]]
                whole.append(f"{letter}{i}")
        tensors = [tuple(names) for names in dims]
        return Rule((tensors[0], tensors[1]), (tensors[2],), sizes, frozenset("c"), frozenset(whole), frozenset())

    def share(self, split: CallSplit, dim: int) -> PositionShare | None:
        """What one device does along a spatial dim that is shared out."""
        size, window, positions = (split.sizes[f"{letter}{dim}"] for letter in "iwp")
        low, _ = self.padding[dim]
        moves = WindowMoves(size, window, positions, self.strides[dim], low, self.spread[dim], self.dilation[dim])
        return of_positions(moves, split.count(ROLE))

    def on_share(self, split: CallSplit, dim: int, is_split: bool, lhs: Any, rhs: Any) -> jax.Array:
        """A device's positions along a spatial dim; the last devices' may lie beyond the end."""
        share = self.share(split, dim)
        assert share is not None, "`where` has looked"
        rows = rows_read(
            lhs, self.numbers.lhs_spec[2 + dim], share, split.axes(ROLE), split.count(ROLE), is_split=is_split
        )
        padding = tuple(share.padding if i == dim else self.padding[i] for i in self.spatial)
        return self.whole(rows, rhs, padding)

    def __str__(self) -> str:
        return f"strides {self.strides}, padding {self.padding}, dilations {self.spread} and {self.dilation}"


@functools.lru_cache(maxsize=1024)
def conv_operation(convolution: Convolution) -> Operation:
    """The operation of one kind of convolution."""
    operation = Operation(
        "conv",
        functools.wraps(conv)(lambda lhs, rhs: convolution.whole(lhs, rhs)),
        convolution.rule,
        identity=f"{convolution} {convolution.numbers} {convolution.precision} {convolution.preferred_element_type}",
    )

    @operation.backward
    def backward(lhs: Any, rhs: Any, made: Any, cotangent: Any) -> tuple[jax.Array, ...]:
        return _gradients(convolution.whole, lhs, rhs, cotangent)

    for dim in convolution.spatial:
        for name, factors in (
            ("halo", (f"i{dim}", f"p{dim}")),
            ("gathered", (f"i{dim}",)),
            ("positions", (f"p{dim}",)),
            ("shared", ()),
        ):
            operation.implementations.append(_implementation(convolution, dim, name, factors))
    return operation


def _gradients(function: Any, lhs: Any, rhs: Any, cotangent: Any) -> tuple[jax.Array, ...]:
    """Of a function that is linear in either operand. It begins with what the forward pass begins with, too."""
    (of_rhs,) = jax.linear_transpose(lambda w: function(lhs, w), rhs)(cotangent)
    (of_lhs,) = jax.linear_transpose(lambda x: function(x, rhs), lhs)(cotangent)
    return of_lhs, of_rhs


def _implementation(convolution: Convolution, dim: int, name: str, factors: tuple[str, ...]) -> Implementation:
    place = convolution.numbers.out_spec[2 + dim]
    reads, leaves = f"i{dim}" in factors, f"p{dim}" in factors

    def where(split: CallSplit) -> bool:
        """Along a dim that devices divide it is split, along others not."""
        pieces = split.count(ROLE)
        divided = [split.sizes[f"{letter}{dim}"] % pieces == 0 for letter in "ip"]
        fits = pieces > 1 and split.count("c") == 1 and split.sizes[f"p{dim}"] >= pieces
        return fits and divided == [reads, leaves] and convolution.share(split, dim) is not None

    def local(split: CallSplit, lhs: Any, rhs: Any) -> jax.Array:
        made = convolution.on_share(split, dim, reads, lhs, rhs)
        if leaves:
            return made
        whole = lax.all_gather(made, split.axes(ROLE), axis=place, tiled=True)
        return lax.slice_in_dim(whole, 0, split.sizes[f"p{dim}"], axis=place)

    def local_backward(split: CallSplit, lhs: Any, rhs: Any, made: Any, cotangent: Any) -> tuple[jax.Array, ...]:
        axes, share = split.axes(ROLE), convolution.share(split, dim)
        if share is not None and not leaves:
            cotangent = _own(split, cotangent, place, share.positions)
        own = functools.partial(convolution.on_share, split, dim, reads)
        of_lhs, of_rhs = _gradients(own, lhs, rhs, cotangent)
        return of_lhs if reads else lax.psum(of_lhs, axes), lax.psum(of_rhs, axes)

    return Implementation(f"{name}{dim}", local, {ROLE: factors}, where, local_backward=local_backward)


def _own(split: CallSplit, whole: Any, place: int, each: int) -> jax.Array:
    """This device's share, of so many positions, of all that all devices have; zeros beyond the end."""
    more = each * split.count(ROLE) - whole.shape[place]
    padded = jnp.pad(whole, [(0, more * (i == place)) for i in range(whole.ndim)])
    return lax.dynamic_slice_in_dim(padded, split.index(ROLE) * each, each, axis=place)
