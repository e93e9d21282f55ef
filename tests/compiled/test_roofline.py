"""Seconds of single operations of compiled GPU programs: small modules written as XLA writes them."""

import pytest

from autoshard import topology
from autoshard.compiled.module import Module
from autoshard.compiled.roofline import Roofline
from autoshard.model.xla.backends import H100
from autoshard.model.xla.gpu.factorizations import LIBRARIES
from autoshard.model.xla.operations import KERNEL_SECONDS

MACHINE = topology("h100:2x8", {"x": 16})
HBM, BF16 = MACHINE.memory_bandwidth, MACHINE.flops_for("bfloat16")
GEMM = 'custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
CONTRACTS = '{"lhs_contracting_dimensions":["%s"],"rhs_contracting_dimensions":["0"],"lhs_batch_dimensions":[]}}}'
CONV = "window={size=3x3 pad=1_1x1_1}, dim_labels=b01f_o01i->b01f, custom_call_target="
CUDNN = "__cudnn$conv"
BODIES = {
    "added": ["%a = f32[64]{0} parameter(0)", "%b = f32[64]{0} parameter(1)", "ROOT %r = f32[64]{0} add(%a, %b)"],
    "sliced": [
        "%a = f32[16,64]{1,0} parameter(0)", "%i = s32[] parameter(1)",
        "ROOT %r = f32[1,64]{1,0} dynamic-slice(%a, %i, %i), dynamic_slice_sizes={1,64}",
    ],
    "put": [
        "%a = f32[16,64]{1,0} parameter(0)", "%b = f32[1,64]{1,0} parameter(1)", "%i = s32[] parameter(2)",
        "%u = f32[16,64]{1,0} dynamic-update-slice(%a, %b, %i, %i)", "ROOT %r = f32[16,64]{1,0} bitcast(%u)",
    ],
    "cast": [
        "%a = f32[16,64]{1,0} parameter(0)", "%i = s32[] parameter(1)", "%b = f32[64,16]{0,1} bitcast(%a)",
        "%c = bf16[64,16]{0,1} convert(%b)",
        "ROOT %r = bf16[64,1]{0,1} dynamic-slice(%c, %i, %i), dynamic_slice_sizes={64,1}",
    ],
    "kept": [
        "%a = f32[16,64]{1,0} parameter(0)", "%b = f32[64,16]{0,1} bitcast(%a)",
        "ROOT %r = bf16[64,16]{0,1} convert(%b)",
    ],
    "bent": [
        "%a = f32[64,16]{0,1} parameter(0)", "%b = f32[1,64]{1,0} parameter(1)", "%i = s32[] parameter(2)",
        "%s = f32[16,64]{1,0} bitcast(%a)", "ROOT %r = f32[16,64]{1,0} dynamic-update-slice(%s, %b, %i, %i)",
    ],
    "sorted": [
        "%a = f32[16,64]{1,0} parameter(0)",
        "ROOT %r = f32[16,64]{1,0} sort(%a), dimensions={1}, to_apply=%compared",
    ],
    "multiplied": [
        "%a = bf16[8192,4096]{1,0} parameter(0)", "%b = bf16[4096,8192]{1,0} parameter(1)",
        "ROOT %r = bf16[8192,8192]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    ],
}  # fmt: skip
ENTRY = [
    "%vector = f32[64]{0} parameter(0)", "%stack = f32[16,64]{1,0} parameter(1)", "%i = s32[] parameter(2)",
    "%row = f32[1,64]{1,0} parameter(3)", "%left = bf16[8192,4096]{1,0} parameter(4)",
    "%right = bf16[4096,8192]{1,0} parameter(5)", "%images = bf16[32,56,56,64]{3,2,1,0} parameter(6)",
    "%kernel = bf16[64,3,3,64]{3,2,1,0} parameter(7)",
    "%added = f32[64]{0} fusion(%vector, %vector), kind=kLoop, calls=%added_body",
    "%sliced = f32[1,64]{1,0} fusion(%stack, %i), kind=kLoop, calls=%sliced_body",
    "%put = f32[16,64]{1,0} fusion(%stack, %row, %i), kind=kLoop, calls=%put_body",
    "%cast = bf16[64,1]{0,1} fusion(%stack, %i), kind=kLoop, calls=%cast_body",
    "%kept = bf16[64,16]{0,1} fusion(%stack), kind=kLoop, calls=%kept_body",
    "%bent = f32[16,64]{1,0} fusion(%stack, %row, %i), kind=kLoop, calls=%bent_body",
    "%multiplied = bf16[8192,8192]{1,0} fusion(%left, %right), kind=kCustom, calls=%multiplied_body",
    f"%gemm = (bf16[8192,8192]{{1,0}}, s8[33554432]{{0}}) custom-call(%left, %right), {GEMM}{CONTRACTS % 1}",
    f'%forward = (bf16[32,56,56,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%images, %kernel), {CONV}"{CUDNN}Forward"',
    f'%filter = (bf16[64,3,3,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%images, %images), {CONV}"{CUDNN}BackwardFilter"',
    f'%input = (bf16[32,56,56,64]{{3,2,1,0}}, u8[0]{{0}}) custom-call(%images, %kernel), {CONV}"{CUDNN}BackwardInput"',
    "%matrices = f32[64,1024,1024]{1,2,0} parameter(8)",
    '%factors = (f32[64,1024,1024]{1,2,0}, s32[64]{0}) custom-call(%matrices), custom_call_target="cusolver_potrf_ffi"',
    "%sorted = f32[16,64]{1,0} sort(%stack), dimensions={1}, to_apply=%compared",
    "%sorted_inside = f32[16,64]{1,0} fusion(%stack), kind=kInput, calls=%sorted_body",
    "%waited = f32[1024]{0} all-gather(%vector), replica_groups={}, dimensions={0}",
    "%outer = f32[64,64]{1,0} dot(%vector, %vector)",
    "%begun = (f32[64]{0}, f32[1024]{0}) all-gather-start(%vector), replica_groups={}, dimensions={0}",
    "ROOT %element = f32[64]{0} get-tuple-element(%begun), index=0",
]  # fmt: skip
ROUNDED = 4.0  # bytes of an index
IMAGES, KERNEL = 2 * 32 * 56 * 56 * 64, 2 * 64 * 9 * 64
SORTED = H100.sorts.element_seconds + 4 * H100.sorts.byte_seconds  # of a step, per element
PRODUCTS = 2 * 32 * 56 * 56 * 64 * 9 * 64  # FLOPs of the convolutions


@pytest.fixture(scope="module")
def module():
    texts = {f"%{name}_body": lines for name, lines in BODIES.items()} | {"ENTRY %main": ENTRY}
    lines = [x for head, body in texts.items() for x in (f"{head} () -> f32[] {{", *(f"  {y}" for y in body), "}")]
    return Module.of("\n".join(["HloModule m", *lines]))


@pytest.mark.parametrize("name, seconds", [
    ("added", 3 * 256 / HBM),
    ("sliced", (2 * 256 + ROUNDED) / HBM),  # not the stack
    ("put", (2 * 256 + ROUNDED) / HBM),
    ("cast", (256 + 128 + ROUNDED) / HBM),
    ("kept", (16 * 256 + 16 * 128) / HBM),
    ("bent", (2 * 256 + ROUNDED) / HBM),
    ("multiplied", 2 * 8192 * 8192 * 4096 / BF16),
    ("gemm", 2 * 8192 * 8192 * 4096 / BF16),
    ("forward", max((2 * IMAGES + KERNEL) / HBM, PRODUCTS / BF16)),
    ("filter", max((2 * IMAGES + KERNEL) / HBM, PRODUCTS / BF16)),
    ("input", max((2 * IMAGES + KERNEL) / HBM, PRODUCTS / BF16)),
    ("factors", float(LIBRARIES["cholesky"].seconds("cholesky", [(64, 1024, 1024)]))),
    ("sorted", 21 * 16 * 64 * SORTED),  # steps of a bitonic network of 64
    ("sorted_inside", 21 * 16 * 64 * SORTED),
    ("outer", (2 * 256 + 4 * 64 * 64) / HBM),
    ("waited", 0.0),
    ("begun", 0.0),
    ("element", 0.0),
    ("vector", 0.0),
])  # fmt: skip
def test_an_operation_takes_its_memory_or_its_flops(module, name, seconds):
    if seconds:
        seconds += KERNEL_SECONDS
    instruction = next(one for one in module.computations["main"] if one.name == name)
    assert Roofline(module, MACHINE).seconds("main", instruction) == pytest.approx(seconds, rel=1e-12)
