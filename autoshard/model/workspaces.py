"""What one operation holds beside its operands and results while it runs: an equation in, bytes on one device out.

Libraries work on copies of their operands, XLA runs some operations as loops over arrays of their own, and backends
widen numbers that they have no instructions for. Each row of `WORKSPACES` is a formula of the bytes that operands and
results take on one device. The rows were fitted to the temporaries of programs of one operation under `jax.vmap`,
the batch split over eight devices, at two sizes: `python benchmarks/strangers.py` compares them with whole programs.
An operation without a row is taken to need nothing, and so is one of empty arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax.lax import RandomAlgorithm

from autoshard.model.equations import is_computed
from autoshard.model.xla.backends import SCATTERS
from autoshard.model.xla.cpu.narrow_numbers import MOVES_WINDOWS, scatter_copies, window_copies
from autoshard.model.xla.cpu.pooling import pooling_bytes, positions_bytes
from autoshard.model.xla.cpu.sparse_products import product_bytes
from autoshard.model.xla.gpu.image_copies import copied_bytes
from autoshard.model.xla.gpu.library_kernels import is_inverse_of_several_dims, words_are_apart
from autoshard.model.xla.gpu.sorts import POSITION_BYTES, is_kept_by_kernel
from autoshard.model.xla.tiles import Tile, padded_size
from autoshard.model.xla.units.rows import gathered_bytes, scattered_bytes
from autoshard.model.xla.units.sorting import best_bytes, sorts_in_halves
from autoshard.model.xla.units.work_numbers import is_listed
from autoshard.primitives import INCOMPLETE_GAMMAS
from autoshard.program import Equation, Value


@dataclass(frozen=True)
class ShardBytes:
    """One equation, and the bytes that its operands and results take on one device."""

    equation: Equation
    operands: tuple[float, ...]
    results: tuple[float, ...]  # 0 of a result that nothing reads
    operand_shapes: tuple[tuple[int, ...], ...]  # on one device
    result_shapes: tuple[tuple[int, ...], ...]
    kept: tuple[bool, ...] = ()  # of operands: whether nothing may be written over them, for arguments or others' reads
    is_result: bool = False  # whether the program returns what it makes

    @property
    def whole(self) -> float:
        """Bytes of all results together."""
        return sum(self.results)

    @property
    def itemsize(self) -> int:
        return self.equation.outputs[0].itemsize


_CUBLAS_WORKSPACE_BYTES = 2**25  # XLA's constant for Hopper
_LEAST_TEMPORARY_BYTES = 2**14  # of libtpu
_TILE: Tile = (8, 128)  # of a TPU's registers
_MOST_BLOCKS_IN_CHIP = 3.8e6  # bytes of blocks of four words; libtpu puts 3.6 MB of them into the chip, 4 MB beside it
_PARTS_OF_QUARTERS = 8  # real and imaginary, of the four quarters
# Rows x columns x summed elements up to which XLA's GPU compiler writes a product of float32 or wider as loops.
_MOST_LOOPED_PRODUCT = 100

_KEYS_APART = 3  # times the bytes of keys that XLA's CPU backend encrypts with: their words, and the schedule of these

Formula = Callable[[ShardBytes], float]


def workspace_bytes(backend: str, shards: ShardBytes) -> float:
    """Bytes that an operation holds beside its operands and results on one device.

    Args:
        backend: `Backend.name`.
        shards: the operation.
    """
    equation = shards.equation
    formula = WORKSPACES.get(backend, {}).get(equation.primitive)
    has_elements = all(math.prod(value.shape) for value in (*equation.inputs, *equation.outputs))
    return 0.0 if formula is None or not has_elements else formula(shards)


def has_workspace(backend: str, primitive: str) -> bool:
    """Whether an operation may hold more than its operands and results."""
    return primitive in WORKSPACES.get(backend, {})


def copied(shards: ShardBytes, operand: int = 0) -> float:
    """A library works in place: on a copy of an argument, and on what is computed anyhow."""
    value = shards.equation.inputs[operand]
    return 0.0 if is_computed(value) else shards.operands[operand]


def copied_and_results(shards: ShardBytes) -> float:
    """What a library makes is put in order afterwards."""
    return copied(shards) + shards.whole


def all_results(shards: ShardBytes) -> float:
    return shards.whole


def _threefry_bits(shards: ShardBytes) -> float:
    """XLA's CPU backend encrypts in a loop: two words per element that go in, and two that come out.

    The bits take the place of one of them, if they are as wide. Each of many keys is taken apart and put in order.
    """
    if not (words := _words(shards)):
        return 0.0
    return 16 * words - (shards.whole if shards.itemsize >= 4 else 0) + _KEYS_APART * shards.operands[0]


def _words(shards: ShardBytes) -> float:
    """Words that are encrypted one by one."""
    if _is_drawn_by_hardware(shards.equation):
        return 0.0
    return shards.whole / shards.itemsize * max(1, shards.itemsize // 4)


def _threefry_keys(shards: ShardBytes) -> float:
    """Two words per key that go in, and two that come out, before these are put together."""
    if _is_drawn_by_hardware(shards.equation):
        return 0.0
    return 1.5 * shards.whole + _KEYS_APART * shards.operands[0]


def _kernels_of_all_groups(shards: ShardBytes) -> float:
    """Kernels of groups get a gradient for every pair of groups, of which XLA then makes another with zeros in it.

    The first is made of transposed copies, which are counted beside this: of what is computed only these are left. By
    the time of the second they are gone.
    """
    groups = shards.equation.params["batch_group_count"]
    of_pairs = groups * shards.whole if groups > 1 else 0.0
    gone = sum(size for size, value in zip(shards.operands, shards.equation.inputs, strict=True) if is_computed(value))
    return max(0.0, of_pairs - gone, 2 * of_pairs - gone - sum(shards.operands))


def _is_drawn_by_hardware(equation: Equation) -> bool:
    """Whether the keys are of a generator that XLA has as one operation."""
    return "rbg" in str(equation.inputs[0].dtype)


def _until_all_have_settled(numbers: float) -> Formula:
    """A loop of so many numbers per element, in float32 at least, to which both operands are widened."""

    def formula(shards: ShardBytes) -> float:
        elements, width = shards.whole / shards.itemsize, max(4, shards.itemsize)
        return elements * width * (numbers + 2 * (shards.itemsize < width))

    return formula


def _singular_vectors(shards: ShardBytes) -> float:
    """Vectors are put in order after the library; it makes them even where only values are wanted."""
    if shards.equation.params["compute_uv"]:
        return shards.whole
    rows, columns = shards.equation.inputs[0].shape[-2:]
    k = min(rows, columns)
    vectors = rows * rows + columns * columns if shards.equation.params["full_matrices"] else k * (rows + columns)
    return copied(shards) + shards.operands[0] * vectors / (rows * columns)


def _singular_vectors_on_gpu(shards: ShardBytes) -> float:
    """Of matrices of up to 1,024 rows cuSOLVER makes all vectors, whatever is wanted.

    It works in place: on a copy of an argument, for which there is room where results will be.
    """
    rows, columns = shards.equation.inputs[0].shape[-2:]
    matrices = shards.operands[0] / (rows * columns)  # bytes of one element of each
    makes_all = max(rows, columns) <= 1024
    if not shards.equation.params["compute_uv"]:
        return shards.operands[0] + matrices * (rows**2 + columns**2) * makes_all
    in_place = 0.0 if shards.kept[0] else shards.operands[0]
    has_room = rows > columns or (rows == columns and 0.0 in shards.results)  # a result's, or what nothing reads
    vectors = matrices * (rows**2 + columns**2 * (not has_room)) if makes_all else shards.whole
    return max(0.0, vectors - in_place)


def _factored_in_place(shards: ShardBytes) -> float:
    """cuSOLVER factors a copy, and is given a pointer to each matrix."""
    rows, columns = shards.equation.inputs[0].shape[-2:]
    return copied(shards) + 8 * shards.operands[0] / (rows * columns * shards.itemsize)


def _solved(shards: ShardBytes) -> float:
    """Matrices and right sides are copied in another order; matrices not where they come from the right."""
    matrices, sides = shards.operands
    if not shards.equation.params["left_side"]:
        return sides
    return matrices + sides * (matrices != sides)


def _batched_updates(shards: ShardBytes) -> float:
    """Of a scatter in a batch: updates in another order, and indices that name the batch, too."""
    if not shards.equation.params["dimension_numbers"].operand_batching_dims:
        return 0.0
    return shards.operands[2] + 2 * shards.operands[1]


def _widened_product(shards: ShardBytes) -> float:
    """Products of floating-point numbers of less than 32 bits are taken in float32: copies of operands and result.

    What is computed from other values is widened as it is made, and is stored so instead.
    """

    def widened(value: Value | np.ndarray, size: float) -> float:
        if not jnp.issubdtype(value.dtype, jnp.floating) or value.dtype.itemsize >= 4:
            return 0.0
        return size * 4 / value.dtype.itemsize

    equation = shards.equation
    copies = [widened(value, size) for value, size in zip(equation.inputs, shards.operands, strict=True)]
    inside = [is_computed(value) for value in equation.inputs]
    instead = (size for size, copy, made in zip(shards.operands, copies, inside, strict=True) if made and copy)
    return sum(copies) - sum(instead) + widened(equation.outputs[0], shards.whole)


def _tokens_per_group(shards: ShardBytes) -> float:
    """Of a `ragged_dot`: the tokens once per group, zeros where they belong to another; the groups' matrices, in order.

    The gradient of the matrices has tokens on both sides. Narrow numbers are widened to float32.
    """
    equation = shards.equation
    groups = equation.inputs[2].shape[-1]
    has_matrices = bool(equation.params["ragged_dot_dimension_numbers"].rhs_group_dimensions)
    tokens, others = (
        size * max(1.0, 4 / value.dtype.itemsize) if jnp.issubdtype(value.dtype, jnp.floating) else size
        for value, size in zip(equation.inputs[:2], shards.operands, strict=False)
    )
    made = equation.outputs[0].dtype.itemsize
    widened = shards.whole * 4 / made if made < 4 and has_matrices else 0.0
    return groups * tokens + (others if has_matrices else groups * others) + widened


def _cublas_workspace_bytes(shards: ShardBytes) -> float:
    """What XLA gives cuBLAS for any product of floating-point numbers but the smallest on one device."""
    equation = shards.equation
    tensors = (*equation.inputs[:2], equation.outputs[0])
    if not jnp.issubdtype(tensors[-1].dtype, jnp.inexact):
        return 0.0
    sizes = (*shards.operands[:2], shards.whole)
    elements = [size / value.dtype.itemsize for value, size in zip(tensors, sizes, strict=True)]
    pieces = [math.prod(value.shape) / max(1.0, size) for value, size in zip(tensors, elements, strict=True)]
    _, (batch, _) = equation.params["dimension_numbers"]
    batches = math.prod(equation.inputs[0].shape[dim] for dim in batch) / min(pieces)  # what splits all splits these
    left, right, made = elements
    batches = max(1.0, batches)
    rows, columns = (
        math.sqrt(side * made / max(1.0, other) / batches) for side, other in ((left, right), (right, left))
    )
    multiplied = math.sqrt(left * right * made / batches**3)  # rows x columns x summed
    summed = multiplied / max(1.0, rows * columns)
    is_elementwise = min(rows, columns, summed) < 1.5  # XLA multiplies with a vector, or two of them, in a fusion
    is_complex = jnp.issubdtype(tensors[-1].dtype, jnp.complexfloating)
    is_small = multiplied <= _MOST_LOOPED_PRODUCT and tensors[-1].dtype.itemsize >= 4 and not is_complex
    return 0.0 if is_elementwise or is_small else _CUBLAS_WORKSPACE_BYTES


def _solved_in_place(shards: ShardBytes) -> float:
    """cuBLAS solves on copies of what is kept, and is given a pointer to each matrix and to each right side."""
    rows, columns = shards.equation.inputs[0].shape[-2:]
    matrices = shards.operands[0] / (rows * columns * shards.itemsize)
    matrices_kept, sides_kept = (size * kept for size, kept in zip(shards.operands, shards.kept, strict=True))
    return matrices_kept + sides_kept + 16 * matrices


def _images_in_order(shards: ShardBytes) -> float:
    images, *_ = shards.operands
    return copied_bytes(shards.equation, images, shards.whole, is_result=shards.is_result)


def _spectra(shards: ShardBytes) -> float:
    """Of an inverse transform of several dims to real numbers: complex ones along all but the last, put in order."""
    if not is_inverse_of_several_dims(shards.equation):
        return 0.0
    return shards.operands[0] * (1 + shards.kept[0])


def _sorted(shards: ShardBytes) -> float:
    """Of what keeps the largest elements, where there is no call for it: the operand and its positions, sorted."""
    equation = shards.equation
    if not equation.params.get("aggregate_to_topk", True):
        return 0.0
    return shards.operands[0] * (1 + 4 / equation.inputs[0].dtype.itemsize)


def _sorted_on_cpu(shards: ShardBytes) -> float:
    """XLA's CPU backend has a call for the largest of float32 and wider; it sorts bfloat16 as float32."""
    params, dtype = shards.equation.params, shards.equation.inputs[0].dtype
    is_called = params.get("is_max_k", True) and dtype in (np.float32, np.float64)
    return 0.0 if is_called else _sorted(shards) * (4 / 3 if dtype == jnp.bfloat16 else 1)


def _best_positions(shards: ShardBytes) -> float:
    """Of a gradient of pooling: the best element of each window, and where it lies, one position per dim."""
    source, rank = shards.operands[0], len(shards.equation.inputs[0].shape)
    return source + rank * POSITION_BYTES * source / shards.equation.inputs[0].dtype.itemsize


def _generator_words(shards: ShardBytes) -> float:
    """The words of a generator's blocks, each an array of its own before they are joined."""
    made = shards.results[1]
    return made if words_are_apart(shards.equation, made / shards.equation.outputs[1].itemsize) else 0.0


def _blocks_in_rows(shards: ShardBytes) -> float:
    """Of a generator on TPU that is not the chip's own: each block of many lies in a row of 128 words for itself."""
    algorithm, bits, made = shards.equation.params["algorithm"], shards.equation.outputs[1], shards.results[1]
    if algorithm == RandomAlgorithm.RNG_PHILOX:
        return made * 128 / 4 if made > _MOST_BLOCKS_IN_CHIP else 0.0
    is_flat = algorithm == RandomAlgorithm.RNG_THREE_FRY and len(bits.shape) == 1
    return made * 128 / 2 if is_flat and made > _MOST_BLOCKS_IN_CHIP / 2 else 0.0


def _given_to_host(shards: ShardBytes) -> float:
    """What the host computes with and what it makes, row after row, which other operations do not read."""
    return sum(max(size, _LEAST_TEMPORARY_BYTES) for size in (*shards.operands, *shards.results))


def _padded_pivots(shards: ShardBytes) -> float:
    """Of a batch of factorizations on TPU: the pivots of each matrix take whole rows of 128 numbers."""
    rows, columns = shards.equation.inputs[0].shape[-2:]
    matrices = shards.operands[0] / (rows * columns * shards.equation.inputs[0].dtype.itemsize)
    if matrices <= 1 or shards.is_result:  # as a result it lies where the others do
        return 0.0
    return matrices * -(-min(rows, columns) // 128) * 128 * 4


def _sorted_positions(shards: ShardBytes) -> float:
    """Of a stable sort on GPU: the positions of all elements, in 32 bits.

    Where nothing reads some of what it sorts, it sorts positions anyway.
    """
    if not shards.equation.params["is_stable"] or not all(shards.results):
        return 0.0
    return shards.operands[0] / shards.equation.inputs[0].dtype.itemsize * POSITION_BYTES


def _sorted_elements(shards: ShardBytes) -> float:
    """Of a stable sort on TPU: positions of 32 bits. As all that is sorted and not read, they lie outside the chip."""
    if not shards.equation.params["is_stable"]:
        return 0.0
    if not all(shards.results):
        return max(0.0, _LEAST_TEMPORARY_BYTES - shards.operands[0])
    elements = shards.operands[0] / shards.equation.inputs[0].dtype.itemsize
    return max(_LEAST_TEMPORARY_BYTES, elements * POSITION_BYTES)


def _best(shards: ShardBytes) -> float:
    """Of what keeps the largest on TPU."""
    are_read = bool(shards.results[0]), bool(shards.results[1])
    held = best_bytes(shards.equation, shards.operands[0], are_read, is_kept=any(shards.kept))
    return max(_LEAST_TEMPORARY_BYTES, held) if _leaves_unread(shards) else held


def _leaves_unread(shards: ShardBytes) -> bool:
    """Whether it sorts something that nothing reads."""
    return not all(shards.results) and not sorts_in_halves(shards.equation)


def _rotated_quarters(shards: ShardBytes) -> float:
    """Of an `eigh` of complex matrices on TPU: parts of quarters of them, which a loop rotates outside the chip."""
    matrices = shards.equation.inputs[0]
    if matrices.dtype.kind != "c":
        return 0.0
    rows = matrices.shape[-1]
    count = round(shards.operands[0] / (rows * rows * matrices.dtype.itemsize))
    quarter = padded_size((max(1, count), -(-rows // 2), -(-rows // 2)), _TILE)
    return _PARTS_OF_QUARTERS * max(_LEAST_TEMPORARY_BYTES, quarter * matrices.dtype.itemsize / 2)


WORKSPACES: Mapping[str, Mapping[str, Formula]] = {
    "cpu": {
        **dict.fromkeys(("cholesky", "eigh", "geqp3", "geqrf", "hessenberg", "householder_product"), copied),
        **dict.fromkeys(("lu", "qr", "schur", "tridiagonal"), copied),
        "approx_top_k": _sorted_on_cpu,
        "bcoo_dot_general": lambda shards: product_bytes(shards.equation, *shards.operands[:2]),
        "conv_general_dilated": _kernels_of_all_groups,
        "dot_general": _widened_product,
        "eig": copied_and_results,
        "igamma": _until_all_have_settled(27),
        "igamma_grad_a": _until_all_have_settled(39),
        "igammac": _until_all_have_settled(25),
        "lu_pivots_to_permutation": lambda shards: 2 * shards.whole,
        "ormqr": lambda shards: copied(shards) + copied(shards, -1),
        "ragged_dot_general": _tokens_per_group,
        "regularized_incomplete_beta": lambda shards: 39 * shards.whole / shards.itemsize,
        "random_bits": _threefry_bits,
        "random_fold_in": _threefry_keys,
        "random_split": _threefry_keys,
        **dict.fromkeys(SCATTERS, lambda shards: _batched_updates(shards) + scatter_copies(shards)),
        **dict.fromkeys(MOVES_WINDOWS, window_copies),
        "svd": _singular_vectors,
        "select_and_scatter_add": pooling_bytes,
        "threefry2x32": all_results,
        "top_k": _sorted_on_cpu,
        "triangular_solve": _solved,
        "tridiagonal_solve": lambda shards: 2 * shards.whole,
    },
    "gpu": {
        **dict.fromkeys(
            ("approx_top_k", "top_k"), lambda shards: _sorted(shards) * (not is_kept_by_kernel(shards.equation))
        ),
        "cholesky": _factored_in_place,
        "conv_general_dilated": _images_in_order,
        "eigh": lambda shards: shards.operands[0] * shards.kept[0],
        "dot_general": _cublas_workspace_bytes,
        "fft": _spectra,
        **dict.fromkeys(("geqp3", "geqrf", "householder_product", "tridiagonal"), copied),
        **dict.fromkeys(INCOMPLETE_GAMMAS, _until_all_have_settled(13.5)),
        "lu": copied,
        "ormqr": lambda shards: copied(shards, -1),
        "qr": lambda shards: shards.results[0],
        "ragged_dot_general": lambda shards: _CUBLAS_WORKSPACE_BYTES,
        "regularized_incomplete_beta": lambda shards: 27 * shards.whole / shards.itemsize,
        "rng_bit_generator": _generator_words,
        "select_and_scatter_add": _best_positions,
        "sort": _sorted_positions,
        "svd": _singular_vectors_on_gpu,
        "triangular_solve": _solved_in_place,
        "tridiagonal_solve": all_results,
    },
    "tpu": {  # of what does not lie in the chip's own memory
        "compute_on": _given_to_host,
        "eigh": _rotated_quarters,
        "gather": lambda shards: gathered_bytes(
            shards.equation, shards.operands[0], shards.whole, shards.result_shapes[0], is_result=shards.is_result
        ),
        **dict.fromkeys(
            SCATTERS,
            lambda shards: scattered_bytes(
                shards.equation, shards.operands[0], shards.operands[2], shards.operand_shapes[2]
            ),
        ),
        "lu": _padded_pivots,
        "rng_bit_generator": _blocks_in_rows,
        "sort": _sorted_elements,
        "top_k": _best,
    },
}

# Of what the formulas of CPU count, what is there from before the operation: two words per element, and positions.
PREPARED: Mapping[str, Formula] = {
    "random_bits": lambda shards: 8 * _words(shards),
    "select_and_scatter_add": positions_bytes,
}

# Sparse matrices: which operands are fetched while the first of their operations runs, as in programs for v5e.
_FETCHED_BESIDE: Mapping[str, frozenset[int]] = {
    **dict.fromkeys(("coo_fromdense", "csr_fromdense"), frozenset({0})),
    "coo_todense": frozenset({0, 2}),
    "csr_todense": frozenset({0, 1}),
    **dict.fromkeys(("coo_matmat", "coo_matvec"), frozenset({0, 2, 3})),
    **dict.fromkeys(("csr_matmat", "csr_matvec"), frozenset({0, 1, 3})),
}


def is_outside_chip(backend: str, shards: ShardBytes) -> bool:
    """Whether what an operation works with lies outside a chip's own memory, wherever its results do."""
    if backend == "tpu" and shards.equation.primitive == "top_k":
        return _leaves_unread(shards)
    return backend == "tpu" and shards.equation.primitive in ("compute_on", "eigh", "lu", "sort")


def is_counted(backend: str, equation: Equation) -> bool:
    """Whether what an operation has outside a chip's own memory was counted in compiled programs, its operands too."""
    return backend == "tpu" and not consists_of_several(equation) and is_listed(equation)


def consists_of_several(equation: Equation) -> bool:
    """Whether it becomes several operations, of which XLA leaves out what makes results that nothing reads."""
    return equation.primitive in _FETCHED_BESIDE


def is_fetched_beside(equation: Equation, operand: int) -> bool:
    """Whether an operand is fetched while the operation runs that reads it: one of the last of those it consists of."""
    return operand in _FETCHED_BESIDE.get(equation.primitive, ())
