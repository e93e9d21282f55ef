"""How much work an equation is, and its seconds on one device: the roofline of FLOP rate and memory bandwidth.

Counted as XLA's own cost analysis does: a multiply-add is two, any other elementwise operation one per element of the
result, transcendental or not (next to the memory they read, the difference does not show), a reduction one per element
it takes in, moving data none. Where the number depends on an algorithm it is that of the textbook (Golub and Van Loan,
"Matrix Computations", 4th ed.; `5 n log2 n` for an FFT of `n` complex numbers) and good to a factor of two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from autoshard.mesh.topology import Topology
from autoshard.program import Equation

_MOVES = frozenset({
    "bitcast_convert_type", "branch_const", "branch_join", "broadcast_in_dim", "concatenate", "copy",
    "debug_callback", "debug_print", "device_put", "dynamic_slice", "dynamic_update_slice", "empty", "empty2",
    "expand_dims", "gather", "io_callback", "iota", "optimization_barrier", "pad", "pure_callback", "pvary",
    "random_clone", "random_unwrap", "random_wrap", "reshape", "reshard", "rev", "scan_carry", "scan_const",
    "scan_slice", "scan_stack", "scatter", "sharding_constraint", "slice", "split", "squeeze", "stack",
    "stop_gradient", "tile", "transpose", "unstack",
})  # fmt: skip
_REDUCTIONS = frozenset({
    "argmax", "argmin", "approx_top_k", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
    "reduce_sum", "reduce_xor",
})  # fmt: skip
_SCATTERS = frozenset({"scatter_add", "scatter_max", "scatter_min", "scatter_mul", "scatter_sub"})
_WINDOWS = frozenset({
    "reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "select_and_gather_add",
    "select_and_scatter", "select_and_scatter_add",
})  # fmt: skip
# Threefry: 20 rounds of add, rotate (3) and xor for two words
_RANDOM = frozenset({"philox2x32", "philox4x32", "random_bits", "random_fold_in", "random_seed", "random_split",
                     "rng_bit_generator", "threefry2x32", "threefry4x32"})  # fmt: skip
_RANDOM_FLOPS = 50

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
    name, params = equation.primitive.replace("-", "_"), equation.params
    shapes = [value.shape for value in equation.inputs]
    results = [math.prod(value.shape) for value in equation.outputs]
    result = max(results, default=0)
    if name in _MOVES:
        return 0.0
    if name in ("dot_general", "ragged_dot_general", "conv_general_dilated"):
        complex_factor = 4 if _is_complex(equation.outputs[0].dtype) else 1
        return 2.0 * complex_factor * _products(name, shapes, math.prod(equation.outputs[0].shape), params)
    if name in _REDUCTIONS:
        return float(max(map(math.prod, shapes)))
    if name in _SCATTERS:
        return float(math.prod(shapes[2]))
    if name in _WINDOWS:
        # the scatters visit their windows at the places of their second operand, the cotangent
        places = math.prod(shapes[1]) if name.startswith("select_and_scatter") else result
        return float(places * math.prod(params["window_dimensions"]))
    if name == "sort":
        return float(sum(results) * math.log2(max(2, shapes[0][params["dimension"]])))
    if name == "top_k":
        return float(math.prod(shapes[0]) * math.log2(max(2, params["k"])))
    if name == "fft":
        half = 1 if all(_is_complex(v.dtype) for v in (*equation.inputs, *equation.outputs)) else 0.5
        return 5.0 * half * max(result, math.prod(shapes[0])) * math.log2(max(2, math.prod(params["fft_lengths"])))
    if name in _FACTORIZATIONS:
        *batch, m, n = shapes[0]
        return float(math.prod(batch) * _FACTORIZATIONS[name](max(m, n), min(m, n)))
    if name == "triangular_solve":
        return float(math.prod(shapes[1]) * shapes[0][-1])
    if name == "tridiagonal_solve":
        return 8.0 * result
    if name in _RANDOM:
        return float(_RANDOM_FLOPS * sum(results))
    return float(result)


def compute_seconds(flops: float, bytes_moved: float, dtype: Any, topology: Topology) -> float:
    """Time of one device to do `flops` on `dtype` while it reads and writes `bytes_moved` of its memory.

    >>> from autoshard.mesh.topology import Topology
    >>> topology = Topology({}, memory_bytes=1e9, memory_bandwidth=1e12, flops={"float32": 1e13})
    >>> compute_seconds(1e13, 1e6, "float32", topology)
    1.0
    >>> compute_seconds(1e6, 1e12, "float32", topology)
    1.0
    """
    work = flops / topology.flops_for(dtype) if flops else 0.0
    cache, cached = topology.cache, 0.0
    if cache is not None:
        cached = min(bytes_moved, cache.bytes) / cache.bandwidth
        bytes_moved = max(0.0, bytes_moved - cache.bytes)
    return max(work, cached + bytes_moved / topology.memory_bandwidth)


def _products(name: str, shapes: list[tuple[int, ...]], result: int, params: Mapping[str, Any]) -> float:
    """How many products of two numbers an equation sums up."""
    left, right = shapes[:2]
    if name == "dot_general":
        (contracting, _), _ = params["dimension_numbers"]
        return result * math.prod(left[dim] for dim in contracting)
    if name == "ragged_dot_general":
        numbers = params["ragged_dot_dimension_numbers"]
        (_, contracting), (_, batch) = numbers.dot_dimension_numbers
        shared = {*contracting, *batch, *numbers.rhs_group_dimensions}
        return math.prod(left) * math.prod(size for dim, size in enumerate(right) if dim not in shared)
    # the zeros that dilation puts between the elements of the left operand are no work
    out_channels = right[params["dimension_numbers"].rhs_spec[0]]
    return result * math.prod(right) / out_channels / math.prod(params["lhs_dilation"])


def _is_complex(dtype: Any) -> bool:
    return isinstance(dtype, np.dtype) and dtype.kind == "c"
