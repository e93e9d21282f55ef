"""Steps in which laws of algebra apply, and a random call of each: what the tests of rewrites run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Rewritable(NamedTuple):
    """A step and arguments for it."""

    step: Callable[..., Any]
    arguments: tuple[Any, ...]
    names: tuple[str, ...]  # of the rewrites that must apply


def arrays(seed: int, *shapes: tuple[int, ...]) -> list[jax.Array]:
    random = np.random.default_rng(seed)
    return [jnp.asarray(random.standard_normal(shape) / np.sqrt(shape[-1]), jnp.float32) for shape in shapes]


def with_gradients(loss: Callable[..., Any], *, frozen: int = 0) -> Callable[..., Any]:
    """A step of the loss and its gradients by all arguments but the first few."""

    def step(*args: Any) -> Any:
        return jax.value_and_grad(loss, argnums=tuple(range(frozen, len(args))))(*args)

    return step


def gated(x, gate, up, down):
    return jnp.sum((jax.nn.silu(x @ gate) * (x @ up)) @ down)


def grouped_queries(x, wq, wk, wv, wo):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w) for w in (wq, wk, wv))
    q = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jax.nn.softmax(jnp.einsum("bthgk,bshk->bhgts", q, k))
    mixed = jnp.einsum("bhgts,bshk->bthgk", scores, v)
    return jnp.sum(jnp.tanh(jnp.einsum("bthgk,hgkd->btd", mixed, wo)))


def lora(x, frozen, a, b):
    return jnp.mean(jnp.square(jax.nn.relu(x @ (frozen + 0.5 * (a @ b)))))


def matrix_chain(x, a, b, c):
    return jnp.sum(jnp.sin(x @ ((a @ b) @ c)))


def linear_attention(q, k, v):
    q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    return jnp.sum(jnp.square(jnp.einsum("bts,bsd->btd", jnp.einsum("btk,bsk->bts", q, k), v)))


def features(dense, sparse, w, v):
    return jnp.sum(jnp.tanh(jnp.concatenate([dense, sparse], -1) @ w) @ v)


def skip_connection(x, y, kernel):
    joined = jnp.concatenate([x, y], -1)
    made = jax.lax.conv_general_dilated(joined, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return jnp.sum(jax.nn.relu(made))


def two_towers(x, y, a, b):
    return jnp.sum(jnp.tanh(x @ a + y @ b))


def shared_input(x, a, b):
    return jnp.sum(jnp.tanh(x @ a + x @ b))


def pooled(x, w, v):
    return jnp.sum(jnp.tanh(jnp.mean(jnp.tanh(x) @ w, 1)) @ v)


def heads_summed(x, w):
    return jnp.sum(jnp.tanh(jnp.sum(jnp.einsum("bthk,hkd->bthd", x, w), 2)))


def recurrent(xs, wx, wh, wo):
    def turn(h, x):
        h = jnp.tanh(x @ wx + h @ wh)
        return h, jnp.square(h @ wo)

    return jnp.mean(jax.lax.scan(turn, jnp.zeros((xs.shape[1], wh.shape[0])), xs)[1])


def lstm(xs, w, bias):
    def turn(state, x):
        h, c = state
        i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w + bias, 4, -1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    zeros = jnp.zeros((xs.shape[1], w.shape[1] // 4))
    return jnp.mean(jnp.square(jax.lax.scan(turn, (zeros, zeros), xs, reverse=True)[1]))


def rewritables(seed: int) -> dict[str, Rewritable]:
    """The steps, with arguments of random shapes."""
    random = np.random.default_rng(seed)
    b, t, d, e, f = (int(n) for n in random.choice([2, 3, 4, 5, 6, 8], 5, replace=False))

    def of(loss, names, *shapes, frozen=0):
        return Rewritable(with_gradients(loss, frozen=frozen), tuple(arrays(seed, *shapes)), tuple(names.split()))

    return {
        "gated": of(gated, "fused_products sum_of_products", (b, t, d), (d, f), (d, f), (f, d)),
        "grouped queries": of(
            grouped_queries, "fused_products sum_of_products", (b, t, d), (d, 8, e), (d, 4, e), (d, 4, e), (4, 2, e, d)
        ),
        "lora": of(lora, "distributed_product product_chain", (b, t, d), (d, f), (d, 2), (2, f), frozen=2),
        "matrix chain": of(matrix_chain, "product_chain", (b, t, d), (d, e), (e, f), (f, d)),
        "linear attention": of(linear_attention, "product_chain", (b, 8, d), (b, 8, d), (b, 8, e)),
        "features": of(features, "split_concatenation sliced_product", (b, d), (b, e), (d + e, f), (f, t)),
        "skip connection": of(skip_connection, "split_concatenation", (b, 4, 4, d), (b, 4, 4, e), (3, 3, d + e, f)),
        "two towers": of(two_towers, "sum_of_products fused_products", (b, t, d), (b, t, e), (d, f), (e, f)),
        "shared input": of(shared_input, "common_factor fused_products", (b, d), (d, f), (d, f)),
        "pooled": of(pooled, "summed_product broadcast_product", (b, t, d), (d, e), (e, f)),
        "heads summed": of(heads_summed, "summed_product broadcast_product", (b, t, d, e), (d, e, f)),
        "recurrent": of(recurrent, "loop_product loop_sum", (t, b, d), (d, e), (e, e), (e, f)),
        "lstm": of(lstm, "split_concatenation loop_sum", (t, b, d), (d + e, 4 * e), (4 * e,)),
    }
