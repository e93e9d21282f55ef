"""What predictions know of each primitive: one row of facts, beside its sharding rule in `propagation/rules/`.

A primitive without a row, one of the user's own say, is taken for one operation per element of its result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any


class FlopRule(Enum):
    """How the FLOPs of a primitive are counted; `mesh/compute.py` counts them."""

    NONE = auto()  # it only moves data
    PER_RESULT = auto()  # one per element of the result
    UNKNOWN = auto()  # not known, taken for one per element of the result
    ATTENTION = auto()  # of cuDNN: two per product of queries, keys and values that is not masked
    CONTRACTION = auto()  # two per product that it sums
    FACTORIZATION = auto()  # by a textbook's formula, `mesh/compute.py`
    FFT = auto()
    RANDOM = auto()  # rounds of a generator
    REDUCTION = auto()  # one per element that it takes in
    SCALED_PRODUCT = auto()  # two per product that it sums, as a contraction
    SCATTER = auto()  # one per element of the updates
    SORT = auto()
    TOP_K = auto()
    TRIANGULAR_SOLVE = auto()
    TRIDIAGONAL_SOLVE = auto()
    WINDOW = auto()  # one per element of each window


@dataclass(frozen=True)
class PrimitiveFacts:
    """What predictions know of one primitive."""

    work: FlopRule = FlopRule.UNKNOWN
    is_boundary: bool = False  # hands a value into a loop or branch, or out of it
    relabels: bool = False  # only renames or repeats what it reads: XLA folds it into what reads it
    is_view: bool = False  # the same elements in other dims: a matrix product reads through it
    is_expensive: bool = False  # XLA does not compute it twice to save a buffer (HloInstruction's cost class)
    is_long: bool = False  # XLA writes it out as a polynomial of many terms
    is_linear: bool = False  # partial sums can go through it
    passes_on: bool = False  # the same elements, for a product inside a loop
    is_loop: bool = False  # becomes a loop over its result, or a reduction, that computes its operands as it goes
    slices: bool = False  # reads a part of its operand: its work is done again by what reads it
    is_pointwise: bool = False  # each element of its result is made of those in the same place
    never_fuses: bool = False  # XLA keeps it apart from the elementwise operations around it
    overwrites: bool = False  # writes what it makes over the operand that it changes, if nothing else reads that
    from_one_device: bool = False  # one device has its results, which XLA hands to the others by an all_reduce
    runs_on_shards: bool = False  # XLA's partitioner gathers batches that are split: each device is to run its own part


def facts_of(primitive: str) -> PrimitiveFacts:
    """The row of a primitive.

    >>> facts_of("reshape").is_view, facts_of("my_own").work
    (True, <FlopRule.UNKNOWN: 3>)
    """
    return PRIMITIVES.get(primitive, _UNKNOWN)


def applies_function(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether it is a `scatter` that puts a function of what lies where it writes, as `x.at[i].apply(f)` is.

    Any other `scatter` puts its updates.
    """
    update = params.get("update_jaxpr") if primitive == "scatter" else None
    return update is not None and (bool(update.eqns) or list(update.outvars) != [update.invars[1]])


def primitives_where(fact: Callable[[PrimitiveFacts], bool]) -> frozenset[str]:
    """The primitives of which a fact holds.

    >>> sorted(primitives_where(lambda facts: facts.work is FlopRule.CONTRACTION))
    ['conv_general_dilated', 'dot_general', 'ragged_dot_general']
    """
    return frozenset(primitive for primitive, facts in PRIMITIVES.items() if fact(facts))


def _rows(names: str, work: FlopRule, **facts: bool) -> dict[str, PrimitiveFacts]:
    """One row for each of these primitives."""
    return dict.fromkeys(names.split(), PrimitiveFacts(work, **facts))


_UNKNOWN = PrimitiveFacts()
_VIEW = {"relabels": True, "is_view": True, "is_linear": True, "passes_on": True}

PRIMITIVES: dict[str, PrimitiveFacts] = {
    # propagation/rules/annotations.py
    **_rows("reshard sharding_constraint", FlopRule.NONE, relabels=True),
    **_rows("shard_map", FlopRule.UNKNOWN),
    # boundaries.py
    **_rows("branch_const branch_join scan_carry scan_slice scan_stack", FlopRule.NONE, is_boundary=True),
    **_rows("scan_const", FlopRule.NONE, is_boundary=True, passes_on=True),
    **_rows("idle", FlopRule.PER_RESULT),
    # contractions.py
    **_rows("dot_general", FlopRule.CONTRACTION),
    **_rows("ragged_dot_general", FlopRule.CONTRACTION, runs_on_shards=True),
    **_rows("scaled_dot scaled_matmul scaled_matmul_wrapper", FlopRule.SCALED_PRODUCT),
    # dims.py
    **_rows("empty empty2 stack tile unstack", FlopRule.NONE),
    **_rows("concatenate pad", FlopRule.NONE, is_loop=True),
    **_rows("rev slice", FlopRule.NONE, is_loop=True, slices=True),
    **_rows("split", FlopRule.NONE, is_loop=True, slices=True, is_linear=True),
    **_rows("broadcast_in_dim iota", FlopRule.NONE, relabels=True),
    **_rows("reshape squeeze transpose", FlopRule.NONE, **_VIEW),
    **_rows("broadcast_to rng_uniform roll thunky.inline_constant", FlopRule.PER_RESULT),
    # elementwise.py
    **_rows("bitcast_convert_type device_put stop_gradient", FlopRule.NONE),
    **_rows("optimization_barrier", FlopRule.NONE, never_fuses=True),
    **_rows("copy", FlopRule.NONE, relabels=True),
    **_rows("convert_element_type", FlopRule.PER_RESULT, is_linear=True, passes_on=True, is_pointwise=True),
    **_rows(
        """abs add add_any and bitcast ceil clamp clz complex conj eq eq_to floor from_edtype ge
        gt imag integer_pow is_finite le le_to log2 lt lt_to max max_contiguous
        mesh_cast min mul mulhi multiple_of name ne neg nextafter not one_minus_square or polygamma polynomial
        population_count program_order real reciprocal reduce_precision relayout
        remove_memory_space round select_n shard_alike shift_left shift_right_arithmetic shift_right_logical sign
        square sub tie to_edtype with_memory_space_constraint xla_metadata_value xor zeros_like zeta""",
        FlopRule.PER_RESULT,
        is_pointwise=True,
    ),
    **_rows(
        """acos acosh asin asinh atan atan2 atanh cbrt cos cosh div erf exp exp2 expm1
        log log1p logistic pow rem rsqrt sin sinh sqrt tan tanh""",
        FlopRule.PER_RESULT,
        is_expensive=True,
        is_pointwise=True,
    ),
    **_rows("bessel_i0e bessel_i1e", FlopRule.PER_RESULT, is_long=True, is_pointwise=True),
    **_rows("digamma erf_inv erfc lgamma", FlopRule.PER_RESULT, is_expensive=True, is_long=True, is_pointwise=True),
    **_rows(
        "igamma igamma_grad_a igammac regularized_incomplete_beta",  # loops until the last element has settled
        FlopRule.PER_RESULT,
        is_expensive=True,
        never_fuses=True,
        runs_on_shards=True,
    ),
    **_rows("layout_constraint", FlopRule.NONE, never_fuses=True, overwrites=True, runs_on_shards=True),
    # host.py
    **_rows(
        "debug_callback debug_print io_callback pure_callback", FlopRule.NONE, never_fuses=True, from_one_device=True
    ),
    **_rows("inspect_sharding", FlopRule.NONE, relabels=True, never_fuses=True),
    # indexing.py
    **_rows("dynamic_slice", FlopRule.NONE, is_loop=True, slices=True),
    **_rows("dynamic_update_slice scatter", FlopRule.NONE, overwrites=True),
    **_rows("gather", FlopRule.NONE, never_fuses=True),
    **_rows("scatter-add scatter-max scatter-min scatter-mul scatter-sub", FlopRule.SCATTER, overwrites=True),
    # linalg.py
    **_rows(
        "cholesky cholesky_update eig eigh geqrf hessenberg householder_product lu qr schur svd tridiagonal",
        FlopRule.FACTORIZATION,
        overwrites=True,
        runs_on_shards=True,
    ),
    **_rows("fft", FlopRule.FFT, runs_on_shards=True),
    **_rows("geqp3 ormqr symmetric_product", FlopRule.UNKNOWN, runs_on_shards=True),
    **_rows("lu_pivots_to_permutation", FlopRule.PER_RESULT, never_fuses=True, runs_on_shards=True),
    **_rows("triangular_solve", FlopRule.TRIANGULAR_SOLVE, overwrites=True, runs_on_shards=True),
    **_rows("tridiagonal_solve", FlopRule.TRIDIAGONAL_SOLVE, overwrites=True, runs_on_shards=True),
    # opaque.py
    **_rows(
        """addupdate after_all bcoo_dot_general bcsr_dot_general buffer_callback call_exported call_hi_primitive check
        compute_on coo_fromdense coo_matmat coo_matvec coo_spmm coo_spmv coo_todense core_map create_linear
        create_token csr_fromdense csr_matmat csr_matvec csr_spmm csr_spmv csr_todense cudnn_fusion custom_fusion
        custom_lin custom_partitioning dce_sink dim_as_value dimension_size einshape_lo fused_call
        fusible global_array_to_host_local_array host_local_array_to_global_array mosaic_gpu_p
        mpmd_map pallas_call pin platform_index rnn_bwd rnn_fwd run_scoped run_state shape_assertion spsolve stage
        swap todense tpu_custom_call unpin unreachable""",
        FlopRule.UNKNOWN,
    ),
    **_rows(
        """dot_product_attention_bwd dot_product_attention_bwd_wrapper dot_product_attention_fp8_bwd
        dot_product_attention_fp8_bwd_wrapper dot_product_attention_fp8_fwd dot_product_attention_fp8_fwd_wrapper
        dot_product_attention_fwd dot_product_attention_fwd_wrapper""",
        FlopRule.ATTENTION,
        never_fuses=True,
    ),
    **_rows("freeze new_ref", FlopRule.NONE, relabels=True),
    **_rows("get", FlopRule.NONE),
    **_rows("ffi_call", FlopRule.UNKNOWN, runs_on_shards=True),
    **_rows("operation", FlopRule.UNKNOWN, never_fuses=True),
    # randomness.py
    **_rows("random_clone", FlopRule.NONE),
    **_rows("random_unwrap random_wrap", FlopRule.NONE, relabels=True),
    **_rows("iota_2x32_shape", FlopRule.PER_RESULT),
    **_rows("random_gamma", FlopRule.UNKNOWN),
    **_rows(
        "philox2x32 philox4x32 random_fold_in random_seed random_split rng_bit_generator threefry4x32", FlopRule.RANDOM
    ),
    **_rows("random_bits threefry2x32", FlopRule.RANDOM, is_expensive=True),
    # reductions.py
    **_rows("cumlogsumexp cummax cummin cumprod cumsum pmax pmin psum", FlopRule.PER_RESULT),
    **_rows("reduce reduce_xor", FlopRule.REDUCTION),
    **_rows(
        "argmax argmin reduce_and reduce_max reduce_min reduce_or reduce_prod reduce_sum",
        FlopRule.REDUCTION,
        is_loop=True,
    ),
    # sorting.py
    **_rows("approx_top_k", FlopRule.REDUCTION, runs_on_shards=True),
    **_rows("sort", FlopRule.SORT, overwrites=True),
    **_rows("top_k", FlopRule.TOP_K, runs_on_shards=True),
    # windows.py
    **_rows("stencil", FlopRule.NONE, is_loop=True),
    **_rows("conv_general_dilated", FlopRule.CONTRACTION),
    **_rows(
        "reduce_window reduce_window_max reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter",
        FlopRule.WINDOW,
    ),
    **_rows("select_and_scatter_add", FlopRule.WINDOW, runs_on_shards=True),  # of float16 on CPU
}

# Families of which several modules know something.
BOUNDARIES = primitives_where(lambda facts: facts.is_boundary)
CONTRACTIONS = primitives_where(lambda facts: facts.work is FlopRule.CONTRACTION)
INCOMPLETE_GAMMAS = frozenset({"igamma", "igamma_grad_a", "igammac"})
THREEFRY = frozenset({"random_bits", "random_fold_in", "random_split", "threefry2x32"})  # JAX lowers them in two ways
VIEWS = primitives_where(lambda facts: facts.is_view) | {"broadcast_in_dim"}  # the same elements, some of them repeated
WINDOW_REDUCTIONS = frozenset({"reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum"})
