"""Convolutions: how images lie in memory, what is copied for that, and at which rate they run.

On TPU the batch and feature dims of images are the tiled ones, and an argument is copied to lie so. On CPU convolutions
run at part of the FLOP rate of matrix products, and the gradient of max-pooling takes scratch copies. Groups of
features leave most of a TPU's matrix unit idle, few channels leave part of it idle. Images of one feature leave all of
it idle. Sources: layouts and heaps of compiled v5e and CPU programs; the cycles that libtpu notes on convolutions of
groups of 2, 4 and 16 channels, of 3 to 256 channels and kernels of 1 x 1 to 16 x 16, and of one feature of 64 to 2,048
images; measured CPU steps (`docs/benchmarks/prediction.md`).
`tests/end_to_end/test_what_xla_does.py` compiles a CNN for CPU devices, `tests/mesh/test_targets.py` compiles for TPU.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.model.equations import is_kernel_gradient
from autoshard.model.groups import FactorDims, Group, Use, reads_images
from autoshard.model.xla.tiles import RowsAndColumns, Tile, padded_size, rows_and_columns
from autoshard.program import Equation, Program

_IMAGES = 8  # or features, that lie together in a tile
_LONE_IMAGES = 128  # images of one feature that lie side by side
TURNS = "turns"  # parameter of a convolution that XLA makes piece by piece: a `Turns`
_PACKED_ROWS = 16  # of a tile of bfloat16
_INSERT_PASSES = 3.0  # of a result through memory, while pieces of whole tiles are put into it
ImageDims = tuple[int, int]  # batch and feature dims of a value that lies as convolutions want images


@dataclass(frozen=True)
class Turns:
    """How devices make a convolution piece by piece, while the pieces of one of its tensors go round between them."""

    tensor: int  # 0: the images, 1: the kernel, 2: the result
    dim: int  # of the tensor, which lies in pieces
    count: int  # of turns, each with one or two pieces
    by_batch: bool  # images lie with their batch as the last dim, which pads pieces of few channels least


@dataclass(frozen=True)
class Convolutions:
    """What convolutions cost beside their FLOPs."""

    flops_share: float = 1.0  # of the FLOP/s of matrix products, at which convolutions run
    copies_images: bool = False  # whether what is read or made as it is outside is copied in another order
    clock: float = 1.0  # cycles per second
    few_channels: int = 0  # per group of features, below which a tap takes longer
    tap_cycles: tuple[float, float] = (0.0, 0.0)  # of one tap at one place of 8 images, of few channels and of more
    lone_cycles: float = 0.0  # of one tap at one place of 128 images of one feature
    side: int = 0  # rows and columns of a square of the matrix unit; 0: it is not known
    turn_flops: float = 0.0  # FLOP per byte of what goes round, above which one is made in turns; 0: none is
    turn_devices: tuple[int, int] = (4, 32)  # the fewest and the most of a program that makes any in turns

    def turn_flops_among(self, devices: int) -> float:
        """FLOP per byte of what goes round between so many devices, above which a convolution is made in turns."""
        fewest, most = self.turn_devices
        return self.turn_flops if fewest <= devices <= most else 0.0

    def padding(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """How many times its FLOPs a convolution takes, since squares of the matrix unit are filled up; per strategy.

        Taps of the kernel lie side by side in a square, with all channels of each. Channels that are made fill the
        columns, or images do where these pad less. Of a gradient by a kernel either the channels that are read or those
        that are made lie beside the taps. Where each channel is a group, a tap is a square with one number per channel.

        Args:
            group: what is computed.
            pieces: factor -> into how many pieces each strategy splits it.
        """
        (first, *_) = group.equations
        if first.primitive != "conv_general_dilated" or not self.side:
            return 1.0
        numbers, made, kernel = first.params["dimension_numbers"], first.outputs[0].shape, first.inputs[1].shape
        is_depthwise = first.params["feature_group_count"] > 1 and kernel[numbers.rhs_spec[1]] == 1
        if first.params["batch_group_count"] > 1 or (first.params["feature_group_count"] > 1 and not is_depthwise):
            return 1.0
        results, operands = group.results[first.index][0], group.operands[first.index]
        if (turns := first.params.get(TURNS)) is not None:
            dims = (*operands, results)[turns.tensor][turns.dim]
            pieces = {**pieces, **{factor: pieces[factor] * turns.count for factor in dims[:1]}}

        def size(shape: tuple[int, ...], dims: FactorDims, dim: int) -> np.ndarray:
            return shape[dim] / math.prod((pieces[factor] for factor in dims[dim]), start=np.ones(1))

        makes = size(made, results, numbers.out_spec[1])
        if is_kernel_gradient(first):
            taps, reads = math.prod(made[dim] for dim in numbers.out_spec[2:]), size(made, results, numbers.out_spec[0])
            either = (self._filled(taps * one) * self._filled(other) for one, other in ((reads, makes), (makes, reads)))
            return np.minimum(*either) / (taps * reads * makes)
        if is_depthwise:
            return self._filled(makes) * self.side / makes
        images, reads = size(made, results, numbers.out_spec[0]), size(kernel, operands[1], numbers.rhs_spec[1])
        summed = math.prod(kernel[dim] for dim in numbers.rhs_spec[2:]) * reads
        columns = np.minimum(_in_tiles(images) * self._filled(makes), self._filled(images) * _in_tiles(makes))
        filled = self._filled(summed) * columns / (summed * images * makes)
        return np.where(makes > 1, filled, 1.0)  # images of one feature are no matrix products

    def _filled(self, size: np.ndarray) -> np.ndarray:
        return np.ceil(size / self.side) * self.side

    def grouped_seconds(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """What a convolution of several groups of several features takes at least, per strategy; 0 of any other.

        Each group is made apart, 8 images at a time.

        Args:
            group: what is computed.
            pieces: factor -> into how many pieces each strategy splits it.
        """
        (first, *_) = group.equations
        if first.primitive != "conv_general_dilated" or not any(self.tap_cycles):
            return 0.0
        groups, numbers = first.params["feature_group_count"], first.params["dimension_numbers"]
        kernel, made = first.inputs[1].shape, first.outputs[0].shape
        channels = min(kernel[numbers.rhs_spec[1]], made[numbers.out_spec[1]] // groups)
        if groups == 1 or channels == 1:
            return 0.0
        dims = group.results[first.index][0]

        def size(dim: int) -> np.ndarray:
            split = math.prod((pieces[factor] for factor in dims[dim]), start=np.ones(1))
            return made[dim] / split

        images, features, *places = map(size, numbers.out_spec)
        runs = (
            math.prod(places, start=np.ones(1))
            * np.ceil(images / _IMAGES)
            * features
            * groups
            / made[numbers.out_spec[1]]
        )
        taps = math.prod(kernel[dim] for dim in numbers.rhs_spec[2:])
        return runs * taps * self.tap_cycles[channels >= self.few_channels] / self.clock

    def lone_seconds(self, group: Group, pieces: Mapping[int, np.ndarray]) -> np.ndarray | float:
        """What a convolution takes at least that makes images of one feature, per strategy; 0 of others.

        Such images lie side by side, 128 to a register, and no part of it is a matrix product.

        Args:
            group: what is computed.
            pieces: factor -> into how many pieces each strategy splits it.
        """
        (first, *_) = group.equations
        if first.primitive != "conv_general_dilated" or not self.lone_cycles or is_kernel_gradient(first):
            return 0.0
        if first.params["feature_group_count"] > 1 or first.params["batch_group_count"] > 1:
            return 0.0
        numbers, made, dims = first.params["dimension_numbers"], first.outputs[0].shape, group.results[first.index][0]
        images, features, *places = (
            made[dim] / math.prod((pieces[factor] for factor in dims[dim]), start=np.ones(1))
            for dim in numbers.out_spec
        )
        taps = math.prod(first.inputs[1].shape[dim] for dim in numbers.rhs_spec[2:])
        runs = math.prod(places, start=np.ones(1)) * np.ceil(images / _LONE_IMAGES) * taps
        return np.where(features > 1, 0.0, runs * self.lone_cycles / self.clock)


def _in_tiles(size: np.ndarray) -> np.ndarray:
    """Images or features, with what fills up tiles."""
    return np.ceil(size / _IMAGES) * _IMAGES


def bytes_of_turns(first: Equation, sizes: Sequence[np.ndarray]) -> np.ndarray:
    """Bytes that pass through memory since a convolution is made in turns, beside those of one turn; per strategy.

    What does not go round is read in every turn, or added to. Pieces that stay apart are put into the result, which is
    filled with zeros before.

    Args:
        first: the convolution, with its `TURNS`.
        sizes: bytes of the images, the kernel and the result on one device.
    """
    turns, (images, kernel, result) = first.params[TURNS], sizes
    numbers, again = first.params["dimension_numbers"], turns.count - 1
    if turns.tensor == 2:
        return again * (kernel if turns.dim == numbers.out_spec[0] else images)
    if turns.dim == (numbers.rhs_spec if turns.tensor else numbers.lhs_spec)[1]:
        return again * result
    channels = first.inputs[1].shape[turns.dim] // (2 * turns.count) if turns.tensor else _PACKED_ROWS
    passes = 1 + _INSERT_PASSES * max(1.0, _PACKED_ROWS / max(1, channels))
    return again * (images if turns.tensor else kernel) + passes * result


def lies_as_images(shape: tuple[int, ...], image_dims: Sequence[int], tile: Tile | None) -> bool:
    """Whether an array lies as convolutions want images wherever it comes from, since it is padded least so.

    If it is padded as little with its last two dims as rows and columns, it lies like that instead.

    Args:
        shape: on one device.
        image_dims: its batch and feature dims come first.

    >>> lies_as_images((16, 28, 28, 128), (0, 3), (8, 128)), lies_as_images((16, 56, 56, 64), (0, 3), (8, 128))
    (True, False)
    """
    batch, features = image_dims[:2]
    as_images = padded_size(shape, tile, minor=(batch, features))
    last = len(shape) - 2, len(shape) - 1
    return as_images == padded_size(shape, tile) and as_images < padded_size(shape, tile, minor=last)


def are_read_as_they_lie(shape: tuple[int, ...], image_dims: Sequence[int], tile: Tile | None) -> bool:
    """Whether a convolution reads images of an argument in place: these lie with their batch or features as columns.

    Args:
        shape: on one device.
        image_dims: its batch and feature dims come first.

    >>> [are_read_as_they_lie((images, 224, 224, 3), (0, 3), (8, 128)) for images in (64, 128)]
    [False, True]
    """
    return tile is None or rows_and_columns(shape, tile)[1] in image_dims[:2]


def lie_by_batch(shape: tuple[int, ...], image_dims: ImageDims, tile: Tile) -> bool:
    """Whether images lie as any array does, since that has their batch as columns: few features do not pad then."""
    return not isinstance(image_dims, RowsAndColumns) and rows_and_columns(shape, tile)[1] == image_dims[0]


def image_dims(program: Program) -> dict[int, ImageDims]:
    """Values of the shapes that convolutions read and make -> the batch and feature dims. Arguments lie otherwise."""
    found: dict[tuple[int, ...], ImageDims] = {}
    for equation in program.equations:
        if equation.primitive == "conv_general_dilated":
            images, _, made = equation.params["dimension_numbers"]
            found |= _lying_by_batch(equation)
            found.setdefault(equation.inputs[0].shape, images[:2])
            found.setdefault(equation.outputs[0].shape, made[:2])
    made_inside = (output for equation in program.equations for output in equation.outputs)
    return {value.id: found[value.shape] for value in made_inside if value.shape in found}


def _lying_by_batch(equation: Equation) -> dict[tuple[int, ...], ImageDims]:
    """Shapes of images that lie with their batch last, since a convolution is made in turns -> features and batch."""
    turns = equation.params.get(TURNS)
    if turns is None or not turns.by_batch:
        return {}
    images, kernel, made = equation.params["dimension_numbers"]
    if not is_kernel_gradient(equation):
        read, left = RowsAndColumns((images[1], images[0])), RowsAndColumns((made[1], made[0]))
        return {equation.inputs[0].shape: read, equation.outputs[0].shape: left}
    cut, dims = (0, images) if turns.dim == made[0] else (1, kernel)
    return {equation.inputs[cut].shape: RowsAndColumns((dims[0], dims[1]))}


def reads_rounded(equation: Equation, group: Group) -> bool:
    """Whether a convolution reads each number that it makes several times: XLA rounds them once, and stores that."""
    if equation.primitive != "conv_general_dilated" or group.outputs[0].value.dtype != np.float32:
        return False
    numbers = equation.params["dimension_numbers"]
    if is_kernel_gradient(equation):
        return any(equation.outputs[0].shape[dim] > 1 for dim in numbers.out_spec[2:])
    return any(equation.inputs[1].shape[dim] > 1 for dim in numbers.rhs_spec[2:])


def copies_argument(group: Group, user: Group, of_arguments: Container[int]) -> bool:
    """Whether `user` convolves what it makes of an argument, which does not lie as images do: that is stored.

    Args:
        group: an elementwise one.
        user: reads what it makes.
        of_arguments: values that are made elementwise of arguments.
    """
    made = group.outputs[0].value
    return made.id in of_arguments and any(reads_images(use) and use.value is made for use in user.uses)


def image_dims_of(use: Use) -> ImageDims | None:
    """The batch and feature dims of images that a convolution reads as they arrive: it has them lie otherwise."""
    if not reads_images(use) or not use.value.from_outside:
        return None
    return use.equation.params["dimension_numbers"].lhs_spec[:2]
