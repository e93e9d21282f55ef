"""Attentions that are made alike are proven once; those that differ in anything are proven each for itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

from autoshard.recognition import attention_weights, products, recognized

ROWS = 12
LOWER = np.tril(np.ones((ROWS, ROWS), bool))
SOME = np.random.default_rng(0).random((ROWS, ROWS)) < 0.7

Layer = Callable[[Any, Any], Any]


def layer(mask: np.ndarray = LOWER, scale: float = 0.3, back: bool = False) -> Layer:
    """Attention with one of each choice."""

    def attended(x: Any, w: Any) -> Any:
        q, k, v = (x @ w[i] for i in range(3))
        if back:
            q, k = k, q
        logits = jnp.where(jnp.asarray(mask), (q @ jnp.swapaxes(k, 1, 2)) * scale, -1e30)
        weights = jax.nn.softmax(logits)
        return x + weights @ v

    return attended


ALIKE = [layer() for _ in range(5)]
UNLIKE = {
    "masks": [layer(), layer(SOME)],
    "numbers": [layer(), layer(scale=0.2)],
    "sides": [layer(SOME), layer(SOME, back=True)],
}


def gradient(layers: list[Layer]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    weights = jax.random.normal(jax.random.key(0), (len(layers), 3, 8, 8)) / 3
    x = jax.random.normal(jax.random.key(1), (2, ROWS, 8))

    def loss(weights: Any, x: Any) -> Any:
        for one, w in zip(layers, weights, strict=True):
            x = one(x, w)
        return (x**2).mean()

    return jax.grad(loss), (weights, x)


def proofs(patch: pytest.MonkeyPatch, layers: list[Layer]) -> tuple[int, int]:
    """How often weights, and gradients, are shown on small arrays while a gradient's attentions are recognised."""
    counts = [0, 0]
    shown = [(attention_weights, "_shown"), (products, "_roles_and_factor")]
    for i, (module, name) in enumerate(shown):
        plain = getattr(module, name)

        def counted(*args: Any, plain: Any = plain, i: int = i) -> Any:
            counts[i] += 1
            return plain(*args)

        patch.setattr(module, name, counted)
    step, arrays = gradient(layers)
    found = recognized(jax.make_jaxpr(step)(*arrays), 1)
    assert found is not None
    calls = [eqn for eqn in found.jaxpr.eqns if eqn.primitive.name == "operation"]
    assert len(calls) == 2 * len(layers), "a forward and a backward pass each"
    return counts[0], counts[1]


def test_layers_that_are_made_alike_are_proven_once() -> None:
    """Five layers take the proofs of three: the last of a gradient's layers, and the first, are unlike the others."""
    found = []
    for layers in (ALIKE[:3], ALIKE):
        with pytest.MonkeyPatch.context() as patch:
            found.append(proofs(patch, layers))
    assert found[0] == found[1]


@pytest.mark.parametrize("what", UNLIKE)
def test_layers_that_differ_keep_their_own_numbers(what: str) -> None:
    step, arrays = gradient(UNLIKE[what])
    found = recognized(jax.make_jaxpr(step)(*arrays), 1)
    assert found is not None
    np.testing.assert_allclose(jaxpr_as_fun(found)(*arrays)[0], step(*arrays), rtol=1e-4, atol=1e-5)
