"""Convolutions: how images lie in memory, what is copied for that, and at which rate they run.

On TPU the batch and feature dims of images are the tiled ones, and an argument is copied to lie so. On CPU convolutions
run at part of the FLOP rate of matrix products, and the gradient of max-pooling takes scratch copies. Groups of
features leave most of a TPU's matrix unit idle. Images of one feature leave all of it idle. Sources: layouts and heaps
of compiled v5e and CPU programs; the cycles that libtpu notes on convolutions of groups of 2, 4 and 16 channels, and of
one feature of 64 to 2,048 images; measured CPU steps (`docs/benchmarks/prediction.md`).
`tests/end_to_end/test_what_xla_does.py` compiles a CNN for CPU devices, `tests/mesh/test_targets.py` compiles for TPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.model.equations import is_kernel_gradient
from autoshard.model.groups import Group, Use, reads_images
from autoshard.program import Equation, Program

_IMAGES = 8  # that lie together in a tile
_LONE_IMAGES = 128  # images of one feature that lie side by side
ImageDims = tuple[int, int]  # batch and feature dims of a value that lies as convolutions want images


@dataclass(frozen=True)
class Convolutions:
    """What convolutions cost beside their FLOPs."""

    flops_share: float = 1.0  # of the FLOP/s of matrix products, at which convolutions run
    copies_images: bool = False  # whether what is read or made as it is outside is copied in another order
    clock: float = 1.0  # cycles per second
    few_channels: int = 0  # per group of features, below which a tap takes longer
    tap_cycles: tuple[float, float] = (0.0, 0.0)  # of one tap at one place of 8 images, of few channels and of more
    lone_cycles: float = 0.0  # of one tap at one place of 128 images of one feature

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


def image_dims(program: Program) -> dict[int, ImageDims]:
    """Values of the shapes that convolutions read and make -> the batch and feature dims. Arguments lie otherwise."""
    found: dict[tuple[int, ...], ImageDims] = {}
    for equation in program.equations:
        if equation.primitive == "conv_general_dilated":
            images, _, made = equation.params["dimension_numbers"]
            found.setdefault(equation.inputs[0].shape, images[:2])
            found.setdefault(equation.outputs[0].shape, made[:2])
    made_inside = (output for equation in program.equations for output in equation.outputs)
    return {value.id: found[value.shape] for value in made_inside if value.shape in found}


def reads_rounded(equation: Equation, group: Group) -> bool:
    """Whether a convolution reads each number that it makes several times: XLA rounds them once, and stores that."""
    if equation.primitive != "conv_general_dilated" or group.outputs[0].value.dtype != np.float32:
        return False
    numbers = equation.params["dimension_numbers"]
    if is_kernel_gradient(equation):
        return any(equation.outputs[0].shape[dim] > 1 for dim in numbers.out_spec[2:])
    return any(equation.inputs[1].shape[dim] > 1 for dim in numbers.rhs_spec[2:])


def copies_argument(group: Group, user: Group) -> bool:
    """Whether `user` convolves what it makes of an argument, which does not lie as images do: that is stored."""
    made = group.outputs[0].value
    convolved = any(reads_images(use) and use.value is made for use in user.uses)
    return convolved and any(use.value.from_outside and use.value.shape == made.shape for use in group.uses)


def image_dims_of(use: Use) -> ImageDims | None:
    """The batch and feature dims of images that a convolution reads as they arrive: it has them lie otherwise."""
    if not reads_images(use) or not use.value.from_outside:
        return None
    return use.equation.params["dimension_numbers"].lhs_spec[:2]
