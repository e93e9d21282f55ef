"""Attention that a program spells out becomes an operation, with the same numbers; what only looks like it stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from models import llama

from autoshard import autoshard, plan, topology
from autoshard.jaxprs import inner_jaxprs
from autoshard.recognition import attention_weights, recognized, rewriting

ROWS = 12
HEADS = jax.ShapeDtypeStruct((2, ROWS, 4, 8), jnp.float32)
SHARED = jax.ShapeDtypeStruct((2, ROWS, 2, 8), jnp.float32)
ONE = jax.ShapeDtypeStruct((2, ROWS, 8), jnp.float32)
BIAS = jax.ShapeDtypeStruct((1, 4, ROWS, ROWS), jnp.float32)
MASK = np.random.default_rng(0).random((2, 1, ROWS, ROWS)) < 0.7
LOWER = jnp.tril(jnp.ones((ROWS, ROWS), bool))

Attend = Callable[..., jax.Array]


def logits_of(q: Any, k: Any) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def summed(weights: Any, v: Any) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def by_hand(q: Any, k: Any, v: Any) -> jax.Array:
    """The scale on the queries, an additive mask, and a softmax written out."""
    logits = logits_of(q * 8**-0.5, k) + jnp.where(jnp.tril(jnp.ones((ROWS, ROWS))) == 1, 0, -1e9)
    weights = jnp.exp(logits - logits.max(-1, keepdims=True))
    return summed(weights / weights.sum(-1, keepdims=True), v)


def by_logsumexp(q: Any, k: Any, v: Any) -> jax.Array:
    logits = jnp.where(LOWER, logits_of(q, k) / 3, -jnp.inf)
    return summed(jnp.exp(logits - jax.nn.logsumexp(logits, -1, keepdims=True)), v)


def windowed(q: Any, k: Any, v: Any) -> jax.Array:
    """Five keys back; places are those of an array that is made once."""
    place = jnp.arange(ROWS)
    distance = place[:, None] - place[None, :]
    return summed(jax.nn.softmax(jnp.where((distance >= 0) & (distance < 5), logits_of(q, k), -1e30)), v)


def of_one_key_head(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkd->bhqk", q, k))
    return jnp.einsum("bhqk,bkd->bqhd", weights, v)


def of_one_head(q: Any, k: Any, v: Any) -> jax.Array:
    return jax.nn.softmax(q @ jnp.swapaxes(k, 1, 2) / 3.0) @ v


def padded(q: Any, k: Any, v: Any) -> jax.Array:
    """Padding is a number that is added, as BERT has it, so a row of padding alone is no mean."""
    is_token = jnp.arange(ROWS)[None, None, None] < jnp.array([5, ROWS])[:, None, None, None]
    added = jnp.where(is_token, 0.0, jnp.finfo(jnp.float32).min)
    return summed(jax.nn.softmax(logits_of(q, k) + added), v)


def with_merged_heads(q: Any, k: Any, v: Any) -> jax.Array:
    """Heads of a group apart in products, and together in the softmax."""
    b, t, g, d = k.shape
    logits = jnp.einsum("btgrd,bsgd->bgrts", q.reshape(b, t, g, -1, d), k).reshape(b, -1, t, t)
    weights = jax.nn.softmax(jnp.where(LOWER, logits, -1e30)).reshape(b, g, -1, t, t)
    return jnp.einsum("bgrts,bsgd->btgrd", weights, v).reshape(q.shape)


def of_two_values(q: Any, k: Any, v: Any) -> jax.Array:
    """Two products read the same weights, and only one of them is differentiated."""
    weights = jax.nn.softmax(logits_of(q, k))
    return summed(weights, v) + jax.lax.stop_gradient(summed(weights, 2 * v))


def in_nested_scans(q: Any, k: Any, v: Any) -> jax.Array:
    """A backward pass two scans deep, which makes the forward pass again."""

    def layer(x: Any, _: Any) -> Any:
        return plain(x, k, v, is_causal=True) + x, None

    return jax.lax.scan(lambda x, _: jax.lax.scan(layer, x, None, length=2), q, None, length=2)[0]


def of_chunks(q: Any, k: Any, v: Any) -> jax.Array:
    chunks = jnp.moveaxis(q.reshape(2, 3, -1, 4, 8), 1, 0)
    return jnp.moveaxis(jax.lax.map(jax.checkpoint(lambda x: plain(x, k, v)), chunks), 0, 1).reshape(q.shape)


def plain(q: Any, k: Any, v: Any, **how: Any) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, **how)


CAUSAL = flax.linen.make_causal_mask(jnp.ones((2, ROWS)))
ALIKE: dict[str, tuple[Attend, tuple[Any, ...]]] = {
    "jax": (plain, (HEADS, HEADS, HEADS)),
    "jax, causal, shared heads": (lambda *x: plain(*x, is_causal=True), (HEADS, SHARED, SHARED)),
    "jax, mask": (lambda *x: plain(*x, mask=MASK), (HEADS, HEADS, HEADS)),
    "jax, bias": (lambda *x: plain(*x, bias=jnp.sin(jnp.arange(1.0 * ROWS))[None, None, None]), (HEADS,) * 3),
    "jax, window": (lambda *x: plain(*x, is_causal=True, local_window_size=4), (HEADS,) * 3),
    "jax, lengths": (lambda *x: plain(*x, key_value_seq_lengths=jnp.array([5, 9])), (HEADS,) * 3),
    "linen": (flax.linen.dot_product_attention, (HEADS,) * 3),
    "linen, causal": (lambda *x: flax.linen.dot_product_attention(*x, mask=CAUSAL), (HEADS,) * 3),
    "nnx": (flax.nnx.dot_product_attention, (HEADS,) * 3),
    "by hand": (by_hand, (HEADS,) * 3),
    "logsumexp": (by_logsumexp, (HEADS,) * 3),
    "window by hand": (windowed, (HEADS,) * 3),
    "one key head": (of_one_key_head, (HEADS, ONE, ONE)),
    "one head": (of_one_head, (ONE, ONE, ONE)),
    "padding": (padded, (HEADS,) * 3),
    "merged heads": (with_merged_heads, (HEADS, SHARED, SHARED)),
    "two values": (of_two_values, (HEADS,) * 3),
    "nested scans": (in_nested_scans, (HEADS,) * 3),
    "chunks": (of_chunks, (HEADS,) * 3),
    "two batches": (jax.vmap(jax.vmap(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, 1, 1)), (HEADS,) * 3),
}


def and_itself(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(logits_of(q, k))
    return summed(weights, v) + (weights**2).sum()


def dropped(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(logits_of(q, k))
    return summed(jnp.where(jax.random.bernoulli(jax.random.key(0), 0.8, weights.shape), weights / 0.8, 0), v)


def capped(q: Any, k: Any, v: Any) -> jax.Array:
    return summed(jax.nn.softmax(5 * jnp.tanh(logits_of(q, k) / 5)), v)


def scaled_by(q: Any, k: Any, v: Any) -> jax.Array:
    """A scale that only the running program knows."""
    return summed(jax.nn.softmax(logits_of(q, k) * v.mean()), v)


UNLIKE: dict[str, Attend] = {
    "softmax over queries": lambda q, k, v: summed(jax.nn.softmax(logits_of(q, k), axis=2), v),
    "softmax over heads": lambda q, k, v: summed(jax.nn.softmax(logits_of(q, k), axis=1), v),
    "dropout": dropped,
    "weights used again": and_itself,
    "capped logits": capped,
    "a scale of the running program": scaled_by,
    "a fill that hides little": lambda q, k, v: summed(jax.nn.softmax(jnp.where(LOWER, logits_of(q, k), -20.0)), v),
    "products of another precision": lambda q, k, v: jax.jit(
        lambda w: jnp.einsum("bhqk,bkhd->bqhd", w, v, precision="highest")
    )(jax.nn.softmax(logits_of(q, k))),
    "no softmax": lambda q, k, v: summed(jax.nn.sigmoid(logits_of(q, k)), v),
    "a softmax twice": lambda q, k, v: summed(jax.nn.softmax(jax.nn.softmax(logits_of(q, k))), v),
    "rows that see no key": lambda q, k, v: summed(jax.nn.softmax(logits_of(q, k), where=jnp.asarray(MASK)), v),
}


def loss_of(attend: Attend) -> Callable[..., jax.Array]:
    return lambda *x: (attend(*x).astype(jnp.float32) ** 2).sum()


def counted(jaxpr: Any) -> Counter[str]:
    """How often operations are called in a jaxpr, by their name."""
    found = Counter[str]()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "operation":
            found[eqn.params["operation"].name] += 1
        for inner in inner_jaxprs(eqn):
            found += counted(inner.jaxpr)
    return found


def test_numbers_and_gradients_are_those_of_the_plain_program():
    found, expected, operands, names = [], [], [], []
    for dtype in (jnp.float32, jnp.bfloat16):
        for name, (attend, types) in ALIKE.items():
            if dtype == jnp.bfloat16 and name not in ("jax, causal, shared heads", "linen, causal"):
                continue
            inputs = [
                jax.random.normal(jax.random.key(i), one.shape, jnp.float32).astype(dtype)
                for i, one in enumerate(types)
            ]
            step = jax.value_and_grad(loss_of(attend), (0, 1, 2))
            made = recognized(jax.make_jaxpr(step)(*inputs), 1)
            assert made is not None, name
            assert counted(made.jaxpr)["attention_backward"] == 1, name
            found.append(jaxpr_as_fun(made))
            expected.append(step)
            operands.append(inputs)
            names.append(name)
    both = jax.jit(
        lambda many: [(f(*x), jax.tree.leaves(g(*x))) for f, g, x in zip(found, expected, many, strict=True)]
    )
    for name, inputs, (ours, plain_ones) in zip(names, operands, both(operands), strict=True):
        for one, other in zip(ours, plain_ones, strict=True):
            scale = np.abs(np.asarray(other, np.float32)).max()
            error = np.abs(np.asarray(one, np.float32) - np.asarray(other, np.float32)).max() / scale
            assert error < (3e-2 if inputs[0].dtype == jnp.bfloat16 else 3e-6), (name, error)


@pytest.mark.parametrize("name", UNLIKE)
def test_what_only_looks_like_attention_stays(name):
    for step in (UNLIKE[name], jax.grad(loss_of(UNLIKE[name]), (0, 1, 2))):
        assert recognized(jax.make_jaxpr(step)(HEADS, HEADS, HEADS), 1) is None


def test_without_the_comparison_lookalikes_would_pass(monkeypatch):
    """The comparison on small arrays is what tells them apart."""
    monkeypatch.setattr(attention_weights, "_holds", lambda found: True)
    fill = UNLIKE["a fill that hides little"]
    assert recognized(jax.make_jaxpr(fill)(HEADS, HEADS, HEADS), 1) is not None


def test_a_gradient_of_the_bias_keeps_the_logits():
    step = jax.grad(lambda q, k, v, b: loss_of(lambda *x: plain(*x, bias=b))(q, k, v), (0, 1, 2, 3))
    assert recognized(jax.make_jaxpr(step)(HEADS, HEADS, HEADS, BIAS), 1) is None


@pytest.mark.parametrize(("scan", "remat"), [(True, False), (True, True), (False, True)])
def test_layers_hand_on_outputs_instead_of_weights(scan, remat):
    """A backward scan gets what the operation left, in place of the weights that it had before."""
    step, state, batch = small_llama(scan=scan, remat=remat)
    made = recognized(jax.make_jaxpr(step)(state, batch), 1)
    assert made is not None
    layers = 1 if scan else 2
    assert counted(made.jaxpr) == {"attention": layers * (1 + remat), "attention_backward": layers}


def small_llama(**how: Any) -> tuple[Callable, Any, Any]:
    sizes = {"layers": 2, "d_model": 16, "heads": 4, "shared_heads": 2, "d_hidden": 32, "vocab": 32, "seq": 16}
    model = llama.make(**sizes, batch=2, **how)
    return model.step, model.state, model.batches(0)


def test_what_a_scan_hands_on_has_the_numbers_of_the_plain_program():
    step, state, batch = small_llama(scan=True, remat=False)
    made = recognized(jax.make_jaxpr(step)(state, batch), 1)
    assert made is not None
    flat, tree = jax.tree.flatten((state, batch))
    found, expected = jax.jit(lambda *x: (jaxpr_as_fun(made)(*x), step(*jax.tree.unflatten(tree, x))))(*flat)
    for one, other in zip(found, jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-3, atol=2e-5)


def test_a_step_without_autoshard_in_it_runs_on_split_sequences(monkeypatch):
    monkeypatch.setattr(rewriting, "MEMORY_SHARE", 0.0)
    types = [jax.ShapeDtypeStruct((1, 64, heads, 8), jnp.float32) for heads in (2, 1, 1)]
    inputs = [jax.random.normal(jax.random.key(i), one.shape) for i, one in enumerate(types)]
    step = jax.grad(loss_of(lambda *x: plain(*x, is_causal=True)), (0, 1, 2))
    mesh = jax.make_mesh((4,), ("x",), devices=jax.devices()[:4])
    ours = autoshard(step, mesh=mesh, fixed={"*": jax.P(None, "x")})
    assert {run.name for run in ours.plan(*inputs).annotations.runs.values()} <= {"", "zigzag", "split_keys"}
    for one, other in zip(ours(*inputs), jax.jit(step)(*inputs), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_long_sequence_of_few_heads_goes_round_a_ring_without_a_hint():
    types = [jax.ShapeDtypeStruct((1, 2**17, heads, 128), jnp.bfloat16) for heads in (4, 1, 1)]
    step = jax.grad(loss_of(lambda *x: plain(*x, is_causal=True)), (0, 1, 2))
    mesh = jax.sharding.AbstractMesh((8,), ("x",))
    found = plan(step, *types, mesh=mesh, topology="v5e:2x4", fixed={"*": jax.P(None, "x")})
    assert {run.name for run in found.annotations.runs.values()} == {"zigzag"}


def test_small_attentions_stay_as_they_are():
    """Plans of a batch of sentences are as they were: an eighth of the memory is far."""
    types = [jax.ShapeDtypeStruct((64, 4096, heads, 128), jnp.bfloat16) for heads in (32, 8, 8)]
    closed = jax.make_jaxpr(jax.grad(loss_of(plain), (0, 1, 2)))(*types)
    memory = 256 * topology("v5e:16x16", {"x": 16, "y": 16}).memory_bytes
    assert recognized(closed, memory * rewriting.MEMORY_SHARE / 4) is None
    assert recognized(closed, 1) is not None
