"""Attention at the limits of what is recognised: it keeps its numbers or stays, and no step fails because of it."""

from __future__ import annotations

import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard import plan
from autoshard.batching import boundary
from autoshard.recognition import recognized, rewriting

ROWS = 12
LOWER = np.tril(np.ones((ROWS, ROWS), bool))


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


Q, K, V = (normal(i, 2, ROWS, 4, 8) for i in range(3))


def logits_of(q: Any, k: Any) -> jax.Array:
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


def summed(weights: Any, v: Any) -> jax.Array:
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def places(rows: int, keys: int) -> jax.Array:
    return jnp.arange(rows)[:, None] - jnp.arange(keys)


def attended(q: Any, k: Any, v: Any) -> jax.Array:
    return summed(jax.nn.softmax(logits_of(q, k)), v)


def masked(mask: Any, fill: float = -1e30) -> Any:
    return lambda q, k, v: summed(jax.nn.softmax(jnp.where(mask(), logits_of(q, k), fill)), v)


def short_places() -> jax.Array:
    """Places that int8 cannot count."""
    place = jnp.arange(200).astype(jnp.int8)
    return place[:, None] >= place


def of_merged_rows(q: Any, k: Any, v: Any) -> jax.Array:
    """A constant mask over heads and rows, which are one dim."""
    mask = np.arange(4 * ROWS)[:, None] >= np.arange(ROWS)
    logits = jnp.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]).reshape(2, 4 * ROWS, ROWS)
    weights = jax.nn.softmax(jnp.where(jnp.asarray(mask), logits, -1e30)).reshape(2, 4, ROWS, ROWS)
    return jnp.einsum("bhqk,bkd->bqhd", weights, v[:, :, 0])


def of_layers(weights: Any, x: Any) -> Any:
    """A gradient whose scan gets one more stack, beside a carry that a turn hands on as it is."""

    def layer(carry: Any, w: Any) -> Any:
        x, total = carry
        q = (x @ w).reshape(2, ROWS, 4, 8)
        y = x + masked(lambda: jnp.asarray(LOWER))(q, 2 * q, 1.5 * q).reshape(x.shape)
        return (y, total + 1e-3 * y.sum()), None

    def loss(weights: Any) -> Any:
        (y, total), _ = jax.lax.scan(layer, (x, (weights**2).sum()), weights)
        return (y**2).mean() + total

    return jax.grad(loss)(weights)


def of_checkpoint(*inputs: Any) -> Any:
    """A checkpoint around a jitted function that closes over an array."""
    attend = jax.checkpoint(jax.jit(masked(lambda: LOWER)))
    return jax.grad(lambda inputs: (attend(*inputs) ** 2).sum())(inputs)


def times_itself(q: Any, k: Any, v: Any) -> jax.Array:
    weights = jax.nn.softmax(logits_of(q, k))
    return summed(weights @ weights, v)


def of_complex_numbers(q: Any, k: Any, v: Any) -> jax.Array:
    return summed(jax.nn.softmax(logits_of(q, k)) + 0j, v + 1j * v[::-1])


def chained(x: Any, added: Any) -> Any:
    for _ in range(400):
        x = x * 0.999 + added
    return x


def without_attention(q: Any, k: Any, v: Any) -> Any:
    return summed(chained(logits_of(q, k), jnp.exp(logits_of(q, k))), v)


FEW = normal(3, 2, 5, 4, 8)
MANY = normal(4, 2, 200, 4, 8)
STEPS: dict[str, tuple[Any, tuple[Any, ...], bool]] = {  # with the arguments, and whether attention is recognised
    "differences that wrap around": (masked(lambda: places(ROWS, ROWS).astype(jnp.uint32) < 5), (Q, K, V), True),
    "places that wrap around": (masked(short_places), (MANY, MANY, MANY), True),
    "merged rows": (of_merged_rows, (Q, K, V), True),
    "infinitely far": (masked(lambda: places(ROWS, ROWS) < jnp.inf), (Q, K, V), True),
    "an unchanged carry": (of_layers, (0.1 * normal(5, 3, 32, 32), normal(6, 2, ROWS, 32)), True),
    "a checkpoint with a constant": (of_checkpoint, (Q, K, V), True),
    "one element per head": (attended, (Q, K, V[..., :1]), True),
    "weights times weights": (times_itself, (Q, K, V), False),
    "complex numbers": (of_complex_numbers, (Q, K, V), False),
    "rows without a key": (masked(lambda: places(ROWS, 5) < 3, -jnp.inf), (Q, FEW, FEW), False),
    "a long chain": (without_attention, (Q, K, V), False),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_keeps_its_numbers(name):
    step, inputs, is_recognized = STEPS[name]
    closed = jax.make_jaxpr(step)(*inputs)
    made = recognized(closed, 1)
    assert (made is not None) == is_recognized
    if made is not None:
        for one, other in zip(
            *jax.jit(lambda *x: (jaxpr_as_fun(made)(*x), jaxpr_as_fun(closed)(*x)))(*inputs), strict=True
        ):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_long_chain_beside_attention_is_no_obstacle():
    """A product with keys, whose other operand many equations make of the output."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        out = attended(q, k, v)
        return (out**2).sum() + logits_of(jax.lax.stop_gradient(chained(out, 0.001)), k).sum()

    assert recognized(jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(Q, K, V), 1) is not None


def test_a_fault_of_recognition_ends_no_plan(monkeypatch, caplog):
    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(rewriting, "recognized", fails)
    mesh = jax.sharding.AbstractMesh((4,), ("x",))
    with pytest.raises(ZeroDivisionError):
        plan(lambda x: x + 1, jnp.ones(8), mesh=mesh)
    monkeypatch.setattr(boundary, "RAISES_ERRORS", False)
    with caplog.at_level(logging.WARNING, "autoshard"):
        assert plan(lambda x: x + 1, jnp.ones(8), mesh=mesh) is not None
    assert caplog.records[0].exc_info is not None
    assert "recognition of attention failed" in caplog.text
