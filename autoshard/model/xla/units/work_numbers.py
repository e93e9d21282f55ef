"""Numbers that operations of a TPU core work with: flags, counters, places and the words of a key.

Each of them is a temporary that lies outside the chip's own memory, however small it is (`Backend.number_bytes`). So is
the tuple of an array that is brought in or out beside other work. Where nothing but such tuples and what the scalar
unit makes lies there, libtpu counts nothing. Source: the buffers of programs of one operation compiled for v5e.
`tests/model/xla/test_units.py` and `tests/model/xla/test_rows_one_by_one.py` compile some.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from jax.lax import RandomAlgorithm

from autoshard.model.equations import is_computed
from autoshard.model.groups import Group
from autoshard.model.xla.operations import is_loop_over_rows
from autoshard.model.xla.units.sorting import sorts_in_halves
from autoshard.primitives import INCOMPLETE_GAMMAS, THREEFRY, primitives_where
from autoshard.program import Equation, Value

_POSITIONS = frozenset({"argmax", "argmin"})
_CALLBACKS = primitives_where(lambda facts: facts.from_one_device)

# Primitive -> how many numbers its operations keep in memory.
_NUMBERS: Mapping[str, int] = {
    **dict.fromkeys(_POSITIONS, 3),
    **dict.fromkeys(_CALLBACKS, 4),  # what is sent and received
    **dict.fromkeys(THREEFRY, 3),
    **dict.fromkeys(INCOMPLETE_GAMMAS, 16),
    **dict.fromkeys(("coo_fromdense", "csr_fromdense"), 1),
    **dict.fromkeys(("regularized_incomplete_beta", "rng_bit_generator"), 9),
    "compute_on": 2,
    "device_put": 2,  # of what moves between memories
    "eigh": 5,
    "lu_pivots_to_permutation": 8,
    "random_gamma": 23,
    "select_and_gather_add": 2,
    "sort": 2,
    "svd": 21,
    "tridiagonal_solve": 17,
}
_OF_ONE_MATRIX = frozenset({"cholesky", "eigh"})  # of a batch, the counters of the loops over it are in registers
_OF_CHOLESKY, _OF_LARGE_CHOLESKY = 1, 6  # whether a block is positive; of several blocks these are brought in and out
_CHOLESKY_BLOCK = 128  # rows
_OF_COMPLEX_ROTATIONS = 34  # of an `eigh` of complex matrices: the parts of quarters and angles, brought in and out
_OF_LOOP_OVER_ROWS = {"gather": 5, "scatter": 10}
_OF_LOOP_OVER_PARTS = {"gather": 4, "scatter": 6}  # of a single dim
_BESIDE_COORDINATES = 6  # of a loop over parts that begin at several coordinates, of which each is a number, too
_OF_LONE_UPDATE = 2  # whether it is within bounds, and what is brought out; another of what is brought in
_OF_COORDINATE = 4  # of each after the first that says where it goes
_OF_UNREAD_BEST = {"approx_top_k": 2, "top_k": 1}  # where something reads the best elements or their places, not both


def is_listed(equation: Equation) -> bool:
    """Whether the numbers that an operation works with were counted in compiled programs."""
    return equation.primitive in _NUMBERS or equation.primitive == "cholesky" or is_loop_over_rows(equation)


def known_keys(group: Group) -> set[int]:
    """The keys in a group that are made of a number in the program: XLA knows their words."""
    seeded = (one for one in group.equations if one.primitive == "random_seed")
    return {id(one.outputs[0]) for one in seeded if not any(isinstance(value, Value) for value in one.inputs)}


def numbers_of(equation: Equation, *, is_read_whole: bool = True, is_result: bool = False) -> int:
    """How many numbers an operation works with that lie in memory. The words of many keys are arrays, and no numbers.

    Args:
        equation: the operation.
        is_read_whole: whether something reads each of its results, or the program returns it.
        is_result: whether it makes results of the program.
    """
    name, shapes = equation.primitive, [value.shape for value in equation.inputs]
    if not all(map(math.prod, shapes)):
        return 0
    if name in _OF_UNREAD_BEST:
        return 0 if is_read_whole or sorts_in_halves(equation) else _OF_UNREAD_BEST[name]
    if name == "lu":
        return 0 if is_result else 4
    if name == "device_put" and not any(map(_crosses, equation.inputs, equation.outputs)):
        return 0
    if is_loop_over_rows(equation):
        return _numbers_of_loop(equation)
    if name.startswith("scatter"):
        return _numbers_of_lone_update(equation)
    if name in _POSITIONS and shapes[0][equation.params["axes"][0]] == 1:
        return 0  # the position of the only one
    if name == "sort" and not equation.params["is_stable"]:
        return 0 if is_read_whole else _NUMBERS[name]  # a stable sort counts the places of what it sorts
    if name == "tridiagonal_solve" and math.prod(shapes[0][:-1]) > 1:
        return 0
    if name == "eigh" and equation.inputs[0].dtype.kind == "c":
        return _OF_COMPLEX_ROTATIONS
    if name in _OF_ONE_MATRIX and not _is_one_matrix(equation.inputs[0]):
        return 0
    if name == "cholesky":
        return _OF_CHOLESKY if shapes[0][-1] <= _CHOLESKY_BLOCK else _OF_LARGE_CHOLESKY
    if name == "rng_bit_generator" and equation.params["algorithm"] == RandomAlgorithm.RNG_DEFAULT:
        return 0  # an instruction of the chip
    if name == "random_bits" and "rbg" in str(equation.inputs[0].dtype):
        return 0  # the same
    if name in _POSITIONS and isinstance(operand := equation.inputs[0], Value) and not operand.from_outside:
        return _NUMBERS[name] - 1
    if name in THREEFRY and math.prod(shapes[0]) > 1:
        return 0
    return _NUMBERS.get(name, 0)


def _crosses(read: Value | np.ndarray, made: Value) -> bool:
    return getattr(read, "on_host", False) != made.on_host


def _numbers_of_loop(equation: Equation) -> int:
    """Of a gather or scatter that is run row by row: its counter, and where a row begins."""
    numbers, name = equation.params["dimension_numbers"], equation.primitive[:7]
    coordinates = equation.inputs[1].shape[-1] + len(numbers.operand_batching_dims)
    if name == "gather" and coordinates > 2:
        return _BESIDE_COORDINATES + coordinates
    is_flat = len(equation.inputs[0].shape) == 1
    return (_OF_LOOP_OVER_PARTS if is_flat else _OF_LOOP_OVER_ROWS)[name]


def _numbers_of_lone_update(equation: Equation) -> int:
    """Of a scatter of one update, unless it goes to a row that one number names: its guard is a vector then."""
    indices, numbers = equation.inputs[1], equation.params["dimension_numbers"]
    shape, named = equation.inputs[0].shape, numbers.scatter_dims_to_operand_dims
    if math.prod(indices.shape[:-1]) != 1 or len(shape) == 1 or all(shape[dim] == 1 for dim in named):
        return 0
    if named == (0,) and len(indices.shape) == 1:
        return 0
    is_number = math.prod(equation.inputs[2].shape) == 1
    if isinstance(indices, Value) and is_computed(indices):
        of_coordinates = 1  # by which negative ones count from the end; several are numbers anyway
    else:
        of_coordinates = _OF_COORDINATE * (len(named) - 1) * (not is_number)
    return _OF_LONE_UPDATE + (equation.primitive == "scatter" or not is_number) + of_coordinates


def _is_one_matrix(value: Value | np.ndarray) -> bool:
    """Whether it is a single matrix, of several elements."""
    return math.prod(value.shape[:-2]) == 1 < math.prod(value.shape)
