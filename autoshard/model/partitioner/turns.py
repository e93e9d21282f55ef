"""A convolution as XLA's partitioner splits it in, whether devices make it piece by piece out: XLA's windowed einsums.

If all devices have a piece each of one tensor, and the convolution needs all of it, the partitioner for TPU gathers
nothing: the pieces go round, and every turn works on two. So it does with sums that are to lie in pieces. A model of
`GetWindowedEinsumConfiguration` (openxla/xla, xla/service/spmd/dot_handler.cc). What is gathered for another reader
anyway is gathered, and so is what gives little to compute, or lies on many devices (`Convolutions.turn_devices`).
Measured on v5e:2x4 and v5e:4x4 by products of 512 x 512 to 4096 x 1024 numbers, of 448 to 2,048 rows on each device:
both begin at 8,192 to 9,216 rows of all devices, whatever else is large or small, if numbers have four bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.layout import Layout, MeshShape, local_shape
from autoshard.mesh.compute import flops
from autoshard.model.equations import contracts
from autoshard.model.xla.convolutions import Turns
from autoshard.model.xla.tiles import RowsAndColumns, padded_size
from autoshard.program import Equation, Program, Value

_TILE = (8, 128)


def turns_of(
    equation: Equation,
    program: Program,
    lies: Sequence[Layout | None],
    wants: Sequence[Layout | None],
    mesh: MeshShape,
    flops_per_byte: float,
) -> Turns | None:
    """How a convolution is made in turns; None if it is made at once.

    Args:
        lies: how operands and the result lie before and after it.
        wants: how it reads the operands, and how it leaves the result.
        mesh: axis -> devices, of more than one.
        flops_per_byte: of what goes round, from which on it does; 0: nothing does.
    """
    if equation.primitive != "conv_general_dilated" or not flops_per_byte:
        return None
    devices = math.prod(mesh.values())
    tensors = (*equation.inputs, *equation.outputs)
    for index in (1, 0, 2):
        tensor, source, target = tensors[index], lies[index], wants[index]
        if not isinstance(tensor, Value) or source is None or target is None or any(target):
            continue
        dim = next((dim for dim, axes in enumerate(source) if set(axes) == set(mesh)), None)
        if dim is None or not all(any(want or ()) for i, want in enumerate(wants[:2]) if i != index):
            continue
        if flops(equation) < flops_per_byte * math.prod(tensor.shape) * tensor.itemsize:
            continue
        if index < 2 and _is_gathered_anyway(equation, tensor, program):
            continue
        count = devices // 2 if devices > 4 and devices % 4 == 0 else devices
        return Turns(index, dim, count, _lies_by_batch(equation, wants, mesh, tensor.shape[dim] // devices))
    return None


def _is_gathered_anyway(equation: Equation, tensor: Value, program: Program) -> bool:
    """Whether two products read it that the partitioner takes for matrix products: they share what is gathered."""
    readers = [other for other in program.equations if any(x is tensor for x in other.inputs) and contracts(other)]
    return len(readers) > 1 and all(map(_is_plain, readers)) and any(other.index == equation.index for other in readers)


def _is_plain(equation: Equation) -> bool:
    """Whether no window moves: every pixel is a row of a matrix product."""
    if equation.primitive != "conv_general_dilated":
        return True
    params = equation.params
    kernel = [equation.inputs[1].shape[dim] for dim in params["dimension_numbers"].rhs_spec[2:]]
    moves = (*params["window_strides"], *params["lhs_dilation"], *params["rhs_dilation"])
    return {*kernel, *moves} <= {1} and not any(map(any, params["padding"]))


def _lies_by_batch(equation: Equation, wants: Sequence[Layout | None], mesh: MeshShape, channels: int) -> bool:
    """Whether images lie with their batch last: pieces of so few channels are padded less so."""
    numbers = equation.params["dimension_numbers"]
    is_gradient = numbers.lhs_spec[0] != 0
    batch = numbers.lhs_spec[1] if is_gradient else numbers.lhs_spec[0]
    assert wants[0] is not None, "images are an array"
    images = local_shape(equation.inputs[0].shape, wants[0], mesh)[batch]
    orders = RowsAndColumns((0, 1)), RowsAndColumns((1, 0))
    by_batch, by_channel = (padded_size((channels, images), _TILE, minor=order) for order in orders)
    return by_batch < by_channel
