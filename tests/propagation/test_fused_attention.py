"""cuDNN's attention, `implementation="cudnn"`: how it may be split, what it computes, and plans that hold it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax.sharding import AbstractMesh, PartitionSpec

import autoshard
from autoshard.mesh.compute import flops
from autoshard.propagation.rules.opaque import fused_attention, scaled_fused_attention

BATCH, ROWS, HEADS, SHARED, WIDTH = 8, 256, 16, 4, 64


@pytest.fixture(autouse=True)
def traced_without_gpu(monkeypatch):
    """JAX asks for cuDNN's version as it traces."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    for name in ("check_compute_capability", "is_cuda_compute_capability_equal"):
        monkeypatch.setattr(cudnn, name, lambda *_, name=name, **__: name.startswith("check"))


def arrays(rows=ROWS, batch=BATCH, heads_first=False):
    shapes = [(batch, rows, HEADS, WIDTH), *[(batch, rows, SHARED, WIDTH)] * 2]
    if heads_first:
        shapes = [(batch, heads, rows, width) for batch, rows, heads, width in shapes]
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def loss(q, k, v, *bias, **said):
    made = jax.nn.dot_product_attention(q, k, v, *bias, implementation="cudnn", **said)
    return jnp.mean(made.astype(jnp.float32) ** 2)


def calls(fn, *args):
    """Forward and backward call, with what rules read of equations."""
    jaxpr = jax.make_jaxpr(jax.grad(fn, argnums=tuple(range(len(args)))))(*args)
    found = [one for one in jaxpr.eqns if "attention" in one.primitive.name]
    assert len(found) == 2
    return [
        SimpleNamespace(
            primitive=one.primitive.name,
            params=one.params,
            inputs=[value.aval for value in one.invars],
            outputs=[value.aval for value in one.outvars],
        )
        for one in found
    ]


def split(rule):
    return {factor: rule.sizes[factor] for factor in rule.splittable}


def test_sequences_and_heads_may_be_split():
    for call in calls(loss, *arrays()):
        rule = fused_attention(call)
        assert split(rule) == {"b": BATCH, "k": SHARED}
        assert rule.operands[0][2] == ("k", "g")
        assert rule.operands[1][2] == ("k",)
    assert [dims[2] for dims in rule.results] == [("k", "g"), ("k",), ("k",)]


def test_heads_before_rows():
    said = {"scale": 1.0, "qkv_layout": "BNTH"}
    forward, backward = calls(
        lambda *qkv: jnp.sum(cudnn.dot_product_attention(*qkv, **said).astype(jnp.float32)), *arrays(heads_first=True)
    )
    assert fused_attention(forward).operands[0][1] == ("k", "g")
    assert fused_attention(backward).results[1][:2] == (("b",), ("k",))
    assert flops(forward) == calls_flops(arrays())[0]


def test_lengths_go_with_their_sequences():
    lengths = jnp.full(BATCH, ROWS - 1, jnp.int32)
    for call in calls(lambda *qkv: loss(*qkv, query_seq_lengths=lengths, key_value_seq_lengths=lengths), *arrays()):
        rule = fused_attention(call)
        assert rule.operands[4] == rule.operands[5] == (("b",),)


@pytest.mark.parametrize("shared", [(), (0,), (1,), (0, 1)])
def test_gradients_of_a_bias_are_summed_over_what_shares_it(shared):
    shape = tuple(1 if dim in shared else size for dim, size in enumerate((BATCH, HEADS, ROWS, ROWS)))
    bias = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    forward, backward = calls(loss, *arrays(), bias)
    names = [("b",), ("k", "g")]
    assert fused_attention(forward).reduction == frozenset()
    rule = fused_attention(backward)
    assert rule.reduction == {name for dim in shared for name in names[dim]}
    assert rule.results[3][:2] == tuple(() if dim in shared else names[dim] for dim in range(2))


def test_packed_sequences_stay_with_their_row():
    lengths, offsets = (jnp.zeros((BATCH, count), jnp.int32) for count in (3, 4))

    def packed(q, k, v):
        said = {"mask_type": cudnn.MaskType.PADDING, "q_seqlen": lengths, "kv_seqlen": lengths}
        made = cudnn.dot_product_attention(q, k, v, **said, q_offsets=offsets, kv_offsets=offsets)
        return jnp.sum(made.astype(jnp.float32))

    forward, _ = calls(packed, *arrays())
    rule = fused_attention(forward)
    assert rule.results[1][0][0] == "b"
    assert rule.operands[6][0] == ("b",)
    assert split(rule) == {"b": BATCH, "k": SHARED}


def test_eight_bits():
    scale = jax.ShapeDtypeStruct((1, 1, 1, 1), jnp.float32)
    q, k, v = (jax.ShapeDtypeStruct(x.shape, jnp.float8_e4m3fn) for x in arrays())
    statistics = jax.ShapeDtypeStruct((BATCH, HEADS, ROWS), jnp.float32)
    params = {"layout": 0, "use_causal_mask": False}
    forward = SimpleNamespace(params=params, inputs=[q, k, v, *[scale] * 6], outputs=[q, scale, scale, statistics])
    backward = SimpleNamespace(
        params=params, inputs=[q, k, v, q, q, statistics, *[scale] * 12], outputs=[q, k, v, *[scale] * 4]
    )
    for call in (forward, backward):
        assert split(scaled_fused_attention(call)) == {"b": BATCH, "k": SHARED}


def calls_flops(qkv, **said):
    return [flops(call) for call in calls(lambda *qkv: loss(*qkv, **said), *qkv)]


def test_flops_are_those_of_the_products():
    product = 2 * BATCH * HEADS * ROWS * ROWS * WIDTH
    assert calls_flops(arrays()) == [2 * product, 5 * product]
    below = (ROWS + 1) / 2 / ROWS
    assert calls_flops(arrays(), is_causal=True) == pytest.approx([2 * product * below, 5 * product * below])
    window = calls_flops(arrays(), is_causal=True, local_window_size=(31, 0))[0]
    assert window == pytest.approx(2 * product * (32 * ROWS - 31 * 32 / 2) / ROWS**2, rel=0.05)


def test_one_sequence_is_split_by_its_heads():
    plan = autoshard.plan(
        jax.grad(loss, argnums=(0, 1, 2)),
        *arrays(rows=4096, batch=1),
        mesh=AbstractMesh((4,), ("x",)),
        topology="h100:4",
    )
    assert plan.in_shardings[0].spec == PartitionSpec(None, None, "x")
    assert not plan.predicted.collectives
