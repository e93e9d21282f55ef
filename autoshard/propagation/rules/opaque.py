"""Operations whose inside only their maker knows. Such an operation gets whole operands unless it has a rule itself."""

from __future__ import annotations

from autoshard.jaxprs import partitioning_rule
from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, whole
from autoshard.propagation.rules.elementwise import shapes_of


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


@rule(
    "dot_product_attention_bwd",
    "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_bwd",
    "dot_product_attention_fp8_bwd_wrapper",
    "dot_product_attention_fp8_fwd",
    "dot_product_attention_fp8_fwd_wrapper",
    "dot_product_attention_fwd",
    "dot_product_attention_fwd_wrapper",
)
def fused_attention(equation: Equation) -> Rule:
    """`b t i h, b s j h, b s j h -> b t i h`, all but b whole: cuDNN runs each sequence on its own."""
    operands, results = shapes_of(equation)
    batch = operands[0][0]
    builder = RuleBuilder(operands, results)

    def batched(shapes: tuple[tuple[int, ...], ...]) -> list[tuple[int, int]]:
        return [(tensor, 0) for tensor, shape in enumerate(shapes) if len(shape) > 1 and shape[0] == batch]

    builder.factor(batch, batched(operands), batched(results))
    for side, shapes in enumerate((operands, results)):
        for tensor, shape in enumerate(shapes):
            for dim, size in enumerate(shape):
                if (tensor, dim) not in batched(shapes):
                    place = [(tensor, dim)]
                    builder.factor(size, *((place, []) if side == 0 else ([], place)), "need_replication")
    return builder.build()
