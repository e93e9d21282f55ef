"""Convolutions on GPU: what is copied so that cuDNN can read it.

cuDNN wants the channels of images of one or two dims to be minor, and those of three dims to be major. What lies
otherwise is copied before, if it is an argument, and after, if it is a result; XLA lays out in the first place what is
made in between. cuDNN pads both ends alike: an image that is padded otherwise, or between its elements, is padded by an
operation of its own. Source: convolutions compiled for H100. `tests/model/xla/test_workspaces_on_gpu.py` compiles some.
"""

from __future__ import annotations

import math

from autoshard.model.equations import is_kernel_gradient
from autoshard.program import Equation, Value

_MOST_DIMS_WITH_MINOR_CHANNELS = 2  # of images, batch and channels apart


def is_argument(operand: object) -> bool:
    """Whether an operand comes from outside the program: it lies as the caller has it."""
    return isinstance(operand, Value) and operand.from_outside


def lies_as_read(equation: Equation) -> bool:
    """Whether images lie as cuDNN wants them, where the first dim is major and the last minor."""
    batch, features, *places = equation.params["dimension_numbers"].lhs_spec
    last = len(places) + 1
    return (last in (batch, features)) == (len(places) <= _MOST_DIMS_WITH_MINOR_CHANNELS)


def padding(equation: Equation) -> float:
    """How many times larger the images are that an operation of its own pads; 1 if cuDNN does, or none is padded.

    cuDNN knows gradients: of kernels, and of images, where these are spread by a stride.
    """
    params, (images, kernel) = equation.params, equation.inputs
    is_spread = any(one > 1 for one in params["lhs_dilation"])
    if is_kernel_gradient(equation) or (is_spread and not is_argument(kernel)):
        return 1.0
    if not is_spread and all(low == high for low, high in params["padding"]):
        return 1.0
    sizes = [images.shape[dim] for dim in params["dimension_numbers"].lhs_spec[2:]]
    each = zip(sizes, params["lhs_dilation"], params["padding"], strict=True)
    padded = math.prod(max(0, (size - 1) * between + 1 + low + high) for size, between, (low, high) in each)
    return padded / max(1, math.prod(sizes))


def copied_bytes(equation: Equation, images: float, made: float, *, is_result: bool) -> float:
    """Bytes of what is copied beside a convolution.

    Args:
        equation: the convolution.
        images: bytes of its images on one device.
        made: bytes of what it makes.
        is_result: whether that is a result of the program: its buffer may hold a copy of the images before.
    """
    times, turned = padding(equation), not lies_as_read(equation)
    is_given = is_argument(equation.inputs[0])
    before = images * times if is_given and (turned or times > 1) else images * max(0.0, times - 1)
    after = made if turned and is_result else 0.0
    return after + (before if before > made or not is_result or not turned else 0.0)
