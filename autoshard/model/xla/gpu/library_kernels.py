"""Kernels beside those of libraries on GPU: what puts matrices and images in order before them, and results after them.

A library of linear algebra takes matrices by columns, and works in place: an argument is copied first, and each result
is turned after. Source: operations compiled for H100, of arguments and of what is computed.
`tests/model/xla/test_workspaces_on_gpu.py` counts the kernels of some.
"""

from __future__ import annotations

from autoshard.model.xla.gpu.image_copies import is_argument, lies_as_read, padding
from autoshard.program import Equation

# Beside the library's own, and beside one for each operand that is an argument.
_AROUND_MATRICES = {"eigh": 2, "householder_product": 1, "lu": 2, "qr": 4, "svd": 2, "triangular_solve": 1}
_AROUND = {"approx_top_k": 2, "rng_bit_generator": 1, "select_and_scatter_add": 2, "top_k": 2, "tridiagonal_solve": 2}
_OF_KERNEL = 1  # of a convolution: its kernel in order
_OF_SPECTRA = 3  # of an inverse transform of several dims to real numbers: the first of them, turned twice


def kernels_beside(equation: Equation) -> int:
    """How many kernels XLA for GPU makes of an equation beside the first."""
    name = equation.primitive
    if name in _AROUND_MATRICES:
        return _AROUND_MATRICES[name] + sum(map(is_argument, equation.inputs))
    if name == "conv_general_dilated" and equation.outputs[0].bytes:
        is_copied = padding(equation) > 1 or (is_argument(equation.inputs[0]) and not lies_as_read(equation))
        return _OF_KERNEL + is_copied
    if name == "fft" and is_inverse_of_several_dims(equation):
        return _OF_SPECTRA
    return _AROUND.get(name, 0)


def is_inverse_of_several_dims(equation: Equation) -> bool:
    """Whether it is a transform of several dims to real numbers: XLA makes complex ones of all dims but the last."""
    kind = equation.params["fft_type"]
    return "IRFFT" in getattr(kind, "name", str(kind)) and len(equation.params["fft_lengths"]) > 1
