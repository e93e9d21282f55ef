"""Convolutions: how images lie in memory, what is copied for that, and at which rate they run.

On TPU the batch and feature dims of images are the tiled ones, and an argument is copied to lie so. On CPU convolutions
run at part of the FLOP rate of matrix products, and the gradient of max-pooling takes scratch copies. Sources: layouts
and heaps of compiled v5e and CPU programs; measured CPU steps (`docs/benchmarks/prediction.md`).
`tests/end_to_end/test_what_xla_does.py` compiles a CNN for CPU devices, `tests/mesh/test_targets.py` compiles for TPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.model.equations import is_kernel_gradient
from autoshard.model.groups import Group, Use, reads_images
from autoshard.program import Equation, Program

ImageDims = tuple[int, int]  # batch and feature dims of a value that lies as convolutions want images


@dataclass(frozen=True)
class Convolutions:
    """What convolutions cost beside their FLOPs."""

    flops_share: float = 1.0  # of the FLOP/s of matrix products, at which convolutions run


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


def scratch_copies(group: Group) -> int:
    """How many times its result a group takes beside its operands and results, while it runs.

    XLA's CPU backend turns `select_and_scatter_add`, the gradient of max-pooling, into a reduce_window that carries an
    index per dim, and a scatter.
    """
    if group.equations[0].primitive == "select_and_scatter_add":
        return len(group.outputs[0].value.shape) + 1
    return 0
