"""Kernels beside those of libraries on GPU: what puts matrices and images in order before them, and results after them.

A library of linear algebra takes matrices by columns, and works in place: an argument is copied first, and each result
is turned after. Source: operations compiled for H100, of arguments and of what is computed.
`tests/model/xla/test_workspaces_on_gpu.py` counts the kernels of some.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from autoshard.model.xla.gpu.image_copies import is_argument, lies_as_read, padding
from autoshard.primitives import facts_of
from autoshard.program import Equation

# Beside the library's own, and beside one for each operand that is an argument.
_AROUND_MATRICES = {"eigh": 2, "householder_product": 1, "lu": 2, "qr": 4, "svd": 2, "triangular_solve": 1}
_OF_SERIES = {"igamma": 16, "igamma_grad_a": 18, "igammac": 16, "regularized_incomplete_beta": 8}  # loops turn once
_AROUND = {
    **_OF_SERIES,
    "approx_top_k": 2,
    "ragged_dot_general": 1,
    "select_and_scatter_add": 2,
    "top_k": 2,
    "tridiagonal_solve": 2,
}
_OF_STATE, _OF_WORDS = 1, 1  # of a generator: its next state, and words that are made apart before they are joined
_MOST_WORDS_AT_ONCE = {
    "RNG_THREE_FRY": 2**17
}  # elements whose words no array of its own holds; 512 of other generators
_MOST_SUMMED_AT_ONCE = 2**14  # elements of one that is made; more are summed in two kernels
_SUMS = frozenset({"reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod", "reduce_sum"})
_ENDINGS = frozenset({"add", "add_any", "convert_element_type", "max"})  # of a product: an array is added, or a relu
_OF_GELU = frozenset({"integer_pow", "tanh"})  # beside sums and multiples
_OF_KERNEL = 1  # of a convolution: its kernel in order
_OF_SPECTRA = 3  # of an inverse transform of several dims to real numbers: the first of them, turned twice


def kernels_beside(equation: Equation, read: Container[int]) -> int:
    """How many kernels XLA for GPU makes of an equation beside the first.

    Args:
        equation: what is computed.
        read: ids of the values that something reads.
    """
    name = equation.primitive
    if name in _AROUND_MATRICES:
        return _AROUND_MATRICES[name] + sum(map(is_argument, equation.inputs))
    if name == "conv_general_dilated" and equation.outputs[0].bytes:
        is_copied = padding(equation) > 1 or (is_argument(equation.inputs[0]) and not lies_as_read(equation))
        return _OF_KERNEL + is_copied
    if name == "fft" and is_inverse_of_several_dims(equation):
        return _OF_SPECTRA
    if name == "rng_bit_generator":
        state, bits = equation.outputs
        return _OF_STATE * (state.id in read) + _OF_WORDS * words_are_apart(equation, math.prod(bits.shape))
    if name in _SUMS and equation.outputs:
        summed = math.prod(equation.inputs[0].shape) // max(1, math.prod(equation.outputs[0].shape))
        return int(summed > _MOST_SUMMED_AT_ONCE)
    return _AROUND.get(name, 0)


def ends_as_libraries_do(equations: Sequence[Equation]) -> bool:
    """Whether a library makes this of a product as it writes it: sums with an array, multiples, a ReLU, a GELU."""
    names = {equation.primitive for equation in equations if not facts_of(equation.primitive).relabels}
    return _OF_GELU <= names <= _OF_GELU | {"add", "convert_element_type", "mul"} or all(map(_is_ending, equations))


def _is_ending(equation: Equation) -> bool:
    if equation.primitive == "mul":
        return any(math.prod(value.shape) <= 1 for value in equation.inputs)
    return equation.primitive in _ENDINGS or facts_of(equation.primitive).relabels


def words_are_apart(equation: Equation, elements: float) -> bool:
    """Whether the words of a generator's blocks are arrays of their own before so many elements are joined of them."""
    return elements > _MOST_WORDS_AT_ONCE.get(equation.params["algorithm"].name, 512)


def is_inverse_of_several_dims(equation: Equation) -> bool:
    """Whether it is a transform of several dims to real numbers: XLA makes complex ones of all dims but the last."""
    kind = equation.params["fft_type"]
    return "IRFFT" in getattr(kind, "name", str(kind)) and len(equation.params["fft_lengths"]) > 1
