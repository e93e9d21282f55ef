"""How much work an equation is, and its seconds on one device: the roofline of FLOP rate and memory bandwidth.

FLOPs are counted as XLA's own cost analysis counts them. A multiply-add is two. Any other elementwise operation is one
per element of the result, transcendental or not; next to the memory they read, the difference does not show. A
reduction is one per element that it takes in, and moving data is none. Where the number depends on an algorithm, it is
the textbook's, good to a factor of two: Golub and Van Loan, "Matrix Computations", 4th ed., and `5 n log2 n` for an FFT
of `n` complex numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from autoshard.mesh.topology import Topology
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation

_RANDOM_FLOPS = 50  # Threefry: 20 rounds of add, rotate (3) and xor for two words

# of one matrix [m, n], m >= n, per primitive
_FACTORIZATIONS: Mapping[str, Callable[[int, int], float]] = {
    "cholesky": lambda m, n: n**3 / 3,
    "cholesky_update": lambda m, n: 4 * n**2,
    "eig": lambda m, n: 25 * n**3,
    "eigh": lambda m, n: 9 * n**3,
    "geqrf": lambda m, n: 2 * n**2 * (m - n / 3),
    "hessenberg": lambda m, n: 10 * n**3 / 3,
    "householder_product": lambda m, n: 2 * n**2 * (m - n / 3),
    "lu": lambda m, n: n**2 * (m - n / 3),
    "qr": lambda m, n: 4 * n**2 * (m - n / 3),  # the factors, then Q
    "schur": lambda m, n: 25 * n**3,
    "svd": lambda m, n: 4 * m**2 * n + 22 * n**3,
    "tridiagonal": lambda m, n: 4 * n**3 / 3,
}


def flops(equation: Equation) -> float:
    """FLOPs of one run of an equation over whole arrays, on however many devices it is split."""
    params, work = equation.params, facts_of(equation.primitive).work
    shapes = [value.shape for value in equation.inputs]
    results = [math.prod(value.shape) for value in equation.outputs]
    result = max(results, default=0)
    match work:
        case FlopRule.NONE:
            return 0.0
        case FlopRule.CONTRACTION:
            complex_factor = 4 if _is_complex(equation.outputs[0].dtype) else 1
            return 2.0 * complex_factor * _products(equation, shapes, math.prod(equation.outputs[0].shape))
        case FlopRule.ATTENTION:
            return _attention_flops(equation)
        case FlopRule.REDUCTION:
            return float(max(map(math.prod, shapes)))
        case FlopRule.SCALED_PRODUCT:
            (contracted, _), _ = params.get("dimension_numbers", (((2,), (2,)), ((0,), (0,))))
            return 2.0 * result * math.prod(shapes[0][dim] for dim in contracted)
        case FlopRule.SCATTER:
            return float(math.prod(shapes[2]))
        case FlopRule.WINDOW:
            # the scatters visit their windows at the places of their second operand, the cotangent
            scatters = equation.primitive.startswith("select_and_scatter")
            places = math.prod(shapes[1]) if scatters else result
            return float(places * math.prod(params["window_dimensions"]))
        case FlopRule.SORT:
            return float(sum(results) * math.log2(max(2, shapes[0][params["dimension"]])))
        case FlopRule.TOP_K:
            return float(math.prod(shapes[0]) * math.log2(max(2, params["k"])))
        case FlopRule.FFT:
            half = 1 if all(_is_complex(v.dtype) for v in (*equation.inputs, *equation.outputs)) else 0.5
            points = math.prod(params["fft_lengths"])
            return 5.0 * half * max(result, math.prod(shapes[0])) * math.log2(max(2, points))
        case FlopRule.FACTORIZATION | FlopRule.TRIANGULAR_SOLVE | FlopRule.TRIDIAGONAL_SOLVE:
            return matrix_flops(equation.primitive, shapes)
        case FlopRule.RANDOM:
            return float(_RANDOM_FLOPS * sum(results))
        case FlopRule.PER_RESULT | FlopRule.UNKNOWN:
            return float(result)


def matrix_flops(primitive: str, shapes: Sequence[tuple[int, ...]]) -> float:
    """FLOPs of a factorization, or of a triangular or tridiagonal solve, by the shapes of its operands.

    >>> matrix_flops("cholesky", [(2, 3, 3)])
    18.0
    """
    match facts_of(primitive).work:
        case FlopRule.TRIANGULAR_SOLVE:
            return float(math.prod(shapes[1]) * shapes[0][-1])
        case FlopRule.TRIDIAGONAL_SOLVE:
            return 8.0 * math.prod(shapes[-1])
    *batch, m, n = shapes[0]
    return float(math.prod(batch) * _FACTORIZATIONS[primitive](max(m, n), min(m, n)))


def compute_seconds(flops: Any, bytes_moved: Any, dtype: Any, topology: Topology) -> Any:
    """Time of one device to do `flops` on `dtype` while it reads and writes `bytes_moved` of its memory.

    Numbers or arrays of them.

    >>> from autoshard.mesh.topology import Topology
    >>> topology = Topology({}, memory_bytes=1e9, memory_bandwidth=1e12, flops={"float32": 1e13})
    >>> compute_seconds(np.array([1e13, 1e6]), np.array([1e6, 1e12]), "float32", topology)
    array([1., 1.])
    """
    work = flops / topology.flops_for(dtype) if np.any(flops) else 0.0
    cache, cached = topology.cache, 0.0
    if cache is not None:
        cached = np.minimum(bytes_moved, cache.bytes) / cache.bandwidth
        bytes_moved = np.maximum(0.0, bytes_moved - cache.bytes)
    return np.maximum(work, cached + bytes_moved / topology.memory_bandwidth)


def _products(equation: Equation, shapes: list[tuple[int, ...]], result: int) -> float:
    """How many products of two numbers an equation sums up."""
    (left, right), params = shapes[:2], equation.params
    if equation.primitive == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return result * math.prod(left[dim] for dim in contracting)
    if equation.primitive == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracting), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contracting, *batch, *numbers.rhs_group_dimensions}
        return math.prod(left) * math.prod(size for dim, size in enumerate(right) if dim not in shared)
    # the zeros that dilation puts between the elements of the left operand are no work
    out_channels = right[params["dimension_numbers"].rhs_spec[0]]
    return result * math.prod(right) / out_channels / math.prod(params["lhs_dilation"])


def _attention_flops(equation: Equation) -> float:
    """Two per product of the scores and of what they weigh, where no mask leaves it out; the backward pass has five.

    Dao, "FlashAttention-2" (2023), section 4.1, counts so.
    """
    params = equation.params
    queries, keys, values = (value.shape for value in equation.inputs[:3])
    heads_dim, rows_dim = (1, 2) if int(params["layout"]) else (2, 1)  # BNTH or BTNH
    rows, seen = queries[rows_dim], keys[rows_dim]
    mask = getattr(params.get("mask_type"), "name", "")
    if "CAUSAL" in mask or params.get("use_causal_mask"):
        most = min(seen, params.get("sliding_window_length") or seen)
        few = min(rows, most)  # rows that see no more than themselves and those before them
        pairs = few * (few + 1) / 2 + (rows - few) * most
    else:
        pairs = rows * seen
    in_scores, in_sums = (3, 2) if "bwd" in equation.primitive else (1, 1)  # products as wide as keys, and as values
    return 2.0 * queries[0] * queries[heads_dim] * pairs * (in_scores * queries[-1] + in_sums * values[-1])


def _is_complex(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind == "c"
