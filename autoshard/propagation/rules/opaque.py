"""Operations whose inside only their maker knows. Such an operation gets whole operands unless it has a rule itself."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from autoshard.jaxprs import partitioning_rule
from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, whole
from autoshard.propagation.rules.elementwise import shapes_of

Shapes = tuple[tuple[int, ...], ...]


@rule(
    # Code of another kind: a kernel, a library, another process, another function's export.
    "buffer_callback",
    "call_exported",
    "call_hi_primitive",
    "check",
    "compute_on",
    "core_map",
    "cudnn_fusion",
    "custom_fusion",
    "einshape_lo",
    "ffi_call",
    "fused_call",
    "fusible",
    "mosaic_gpu_p",
    "mpmd_map",
    "pallas_call",
    "rnn_bwd",
    "rnn_fwd",
    "tpu_custom_call",
    # Arrays in which some elements are left out, where JAX may call a library.
    "bcoo_dot_general",
    "bcsr_dot_general",
    "coo_fromdense",
    "coo_matmat",
    "coo_matvec",
    "coo_spmm",
    "coo_spmv",
    "coo_todense",
    "csr_fromdense",
    "csr_matmat",
    "csr_matvec",
    "csr_spmm",
    "csr_spmv",
    "csr_todense",
    "spsolve",
    "todense",
    # Memory that changes in place: a layout belongs to a value, and a reference holds many values in turn.
    "addupdate",
    "freeze",
    "get",
    "new_ref",
    "pin",
    "run_scoped",
    "run_state",
    "swap",
    "unpin",
    # Between processes.
    "global_array_to_host_local_array",
    "host_local_array_to_global_array",
    # No arrays at all.
    "after_all",
    "create_linear",
    "create_token",
    "custom_lin",
    "dce_sink",
    "dim_as_value",
    "dimension_size",
    "platform_index",
    "shape_assertion",
    "stage",
    "unreachable",
)
def opaque(equation: Equation) -> Rule:
    """`i j -> k`, all whole."""
    return whole(*shapes_of(equation))


@rule("operation")
def operation(equation: Equation) -> Rule:
    """What the user wrote as the rule of an `autoshard.operation`."""
    found: Rule = equation.params["operation"].call_rule(*shapes_of(equation), equation.params["batched"])
    return found


@rule("custom_partitioning")
def custom_partitioning(equation: Equation) -> Rule:
    """What the user wrote as `sharding_rule`; without it, all whole."""
    operands, results = shapes_of(equation)
    given = partitioning_rule(equation.params)
    if given is None:
        return whole(operands, results)
    notation, kinds = given
    return Rule.parse(notation, *operands, *results, **kinds)


_FORWARD_OPERANDS = 10  # queries, keys, values, bias, two lengths, two offsets, two tables of pages
_SCALED_FORWARD_OPERANDS = 9  # queries, keys, values, and numbers that scale


@rule(
    "dot_product_attention_bwd",
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fwd",
    "dot_product_attention_fwd_wrapper",
)
def fused_attention(equation: Equation) -> Rule:
    """`b t (k g) h, b s k h, b s k v -> b t (k g) v`, all but b and k whole: cuDNN runs each head by itself.

    g are the heads of queries that share one head of keys. A bias may have one row for all of b, or of heads: its
    gradient is then a sum over them.
    """
    operands, results = shapes_of(equation)
    has_bias, has_bias_gradient = equation.params["variadic_args"]
    if math.prod(operands[8]):  # pages of keys, which any sequence may own
        return _batched(operands, results)
    rows = _AttentionRows(equation)
    bias, shared = "e", []
    if has_bias:
        sizes = {"b": operands[0][0], rows.heads: rows.query_heads}
        shared = [name for (name, size), rows_of in zip(sizes.items(), operands[3], strict=False) if rows_of < size]
        bias = " ".join([*("1" if name in shared else name for name in sizes), "t s"])
    lengths = [
        ("b", f"m{i}")[: len(shape)] if math.prod(shape) else (f"m{i}",) for i, shape in enumerate(operands[4:8])
    ]
    written = [*rows.read, bias, *map(" ".join, lengths), "x", "y"]
    is_packed = len(operands[4]) > 1  # several sequences in a row, each with numbers of its own
    statistics = f"{'(b p)' if is_packed else 'b'} {rows.heads} t"
    if len(operands) == _FORWARD_OPERANDS:
        return _with_whole(operands, results, written, [rows.made, statistics])
    summed = " ".join(shared) if has_bias_gradient else ""
    return _with_whole(operands, results, [*written, statistics, rows.made, rows.made], [*rows.read, bias], summed)


@rule(
    "dot_product_attention_fp8_bwd",
    "dot_product_attention_fp8_bwd_wrapper",
    "dot_product_attention_fp8_fwd",
    "dot_product_attention_fp8_fwd_wrapper",
)
def scaled_fused_attention(equation: Equation) -> Rule:
    """The same of eight bits, beside which numbers of their scales come and go."""
    operands, results = shapes_of(equation)
    rows = _AttentionRows(equation)
    statistics = f"b {rows.heads} t"
    if len(operands) == _SCALED_FORWARD_OPERANDS:
        read, made = rows.read, [rows.made, *["1 1 1 1"] * 2, statistics]
    else:
        read, made = [*rows.read, rows.made, rows.made, statistics], [*rows.read, *["1 1 1 1"] * 4]
    numbers = ["1 1 1 1"[: 2 * len(shape)].strip() for shape in operands[len(read) :]]
    return _with_whole(operands, results, [*read, *numbers], made)


class _AttentionRows:
    """How the arrays of an attention are written, heads before or behind their rows."""

    def __init__(self, equation: Equation):
        heads_first = int(equation.params["layout"]) == _HEADS_FIRST
        queries, keys = (value.shape for value in equation.inputs[:2])
        self.query_heads, heads = (shape[1 if heads_first else 2] for shape in (queries, keys))
        self.heads = "(k g)" if self.query_heads > heads else "k"

        def rows(row: str, heads: str, each: str) -> str:
            return f"b {heads} {row} {each}" if heads_first else f"b {row} {heads} {each}"

        self.read = [rows("t", self.heads, "h"), rows("s", "k", "h"), rows("s", "k", "v")]
        self.made = rows("t", self.heads, "v")


_HEADS_FIRST = 1  # of `jax.nn.dot_product_attention`'s layouts in cuDNN, "BNTH"


def _with_whole(
    operands: Shapes, results: Shapes, written: Sequence[str], made: Sequence[str], summed: str = ""
) -> Rule:
    """A rule whose factors are whole but for b and k; the first of what is written and made, as many as there are."""
    notation = f"{', '.join(written[: len(operands)])} -> {', '.join(made[: len(results)])}"
    reduction = re.findall(r"[a-z]\w*", summed)
    whole_ones = dict.fromkeys(name for name in re.findall(r"[a-z]\w*", notation) if name not in {"b", "k", *reduction})
    return Rule.parse(notation, *operands, *results, reduction=reduction, need_replication=whole_ones)


def _batched(operands: Shapes, results: Shapes) -> Rule:
    """The leading dims of queries and results are one factor. All others are whole."""
    builder = RuleBuilder(operands, results)
    batched = [(0, 0)]
    builder.factor(operands[0][0], batched, batched)
    for side, shapes in enumerate((operands, results)):
        for tensor, shape in enumerate(shapes):
            for dim, size in enumerate(shape):
                if (tensor, dim) not in batched:
                    place = [(tensor, dim)]
                    builder.factor(size, *((place, []) if side == 0 else ([], place)), "need_replication")
    return builder.build()
