"""Steps of odd make, each hard on planning in its own way: `time_limits.py` plans them within short time limits."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


@dataclass(frozen=True)
class Late:
    """A step that is planned, and how."""

    step: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: tuple[int, ...] = (4, 2)
    options: Mapping[str, Any] = field(default_factory=dict)

    def keywords(self) -> dict[str, Any]:
        """What it is planned with, but the time limit."""
        if self.options.get("mesh") == "auto":
            return dict(self.options)
        names = ("data", "model", "third", "fourth")[: len(self.mesh)]
        devices = math.prod(self.mesh)
        topology = {8: "v5e:2x4", 16: "v5e:4x4", 32: "v5e:4x8", 64: "v5e:8x8", 256: "v5e:16x16"}[devices]
        return {"mesh": AbstractMesh(self.mesh, names), "topology": topology, **self.options}


def trained(loss: Callable[..., Any]) -> Callable[..., Any]:
    """A step of gradient descent."""

    def step(params: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

    return step


def mean_square(x: Any) -> Any:
    return jnp.mean(x**2)


def watched_rows(params: Any, x: Any) -> Any:
    y = jnp.tanh(x @ params)
    jax.vmap(lambda row: jax.debug.callback(lambda _: None, row.sum()))(y)
    return mean_square(y)


def pure_rows(params: Any, x: Any) -> Any:
    y = jnp.tanh(x @ params)
    row = jax.ShapeDtypeStruct((), jnp.float32)
    z = jax.vmap(lambda r: jax.pure_callback(lambda a: a, row, r, vmap_method="sequential"))(y.sum(1))
    return params + 0.0, mean_square(z)


def fan(width: int) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        return sum(mean_square(jnp.sin(x @ params) * i) for i in range(width))

    return loss


def branches(params: Any, x: Any) -> Any:
    """Branches from one value that meet in one concatenation."""
    return mean_square(jnp.concatenate([jnp.tanh(x @ w) for w in params], axis=1))


def leaves(params: Any, x: Any) -> Any:
    """Equal leaves, each added alone."""
    for w in params:
        x = x + w
    return mean_square(x)


def chain(length: int) -> Callable[..., Any]:
    def loss(params: Any, x: Any) -> Any:
        for i in range(length):
            x = jnp.sin(x) * params if i % 3 else jnp.roll(x, 1, axis=0)
        return mean_square(x)

    return loss


def residuals(params: Any, x: Any) -> Any:
    for w in params:
        x = x + jax.nn.gelu(x @ w) @ w.T
    return mean_square(x)


def dense(params: Any, x: Any) -> Any:
    """Every layer reads all layers before it."""
    seen = [x]
    for row in params:
        seen.append(jnp.tanh(sum(y @ w for y, w in zip(seen, row, strict=True))))
    return mean_square(seen[-1])


def transposes(params: Any, x: Any) -> Any:
    """Matrices read in both orders, so that no layout suits all readers."""
    for w in params:
        x = jnp.tanh((x @ w).T @ x @ w.T)
        x = x / (1 + jnp.abs(x).max())
    return mean_square(x)


def nested(params: Any, x: Any) -> Any:
    def inner(carry: Any, w: Any) -> Any:
        y = jax.lax.cond(carry.sum() > 0, lambda y: jnp.tanh(y @ w), lambda y: y - jnp.sin(y @ w.T), carry)
        _, y = jax.lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, jnp.cos(c[1] @ w)), (0, y))
        return y, y.sum()

    def outer(carry: Any, ws: Any) -> Any:
        y, sums = jax.lax.scan(inner, carry, ws)
        return jax.lax.fori_loop(0, 3, lambda i, z: z + jnp.tanh(z), y), sums

    y, sums = jax.lax.scan(outer, x, params)
    return y, sums


def scans(depth: int) -> Callable[..., Any]:
    """Scans within scans."""

    def level(x: Any, w: Any, left: int) -> Any:
        if not left:
            return jnp.tanh(x @ w)
        return jax.lax.scan(lambda y, _: (level(y, w, left - 1) + y, None), x, None, length=2)[0]

    return lambda params, x: mean_square(level(x, params, depth))


def lstm(params: Any, x: Any) -> Any:
    hidden = params["h"].shape[0]

    def turn(carry: Any, row: Any) -> Any:
        h, c = carry
        i, f, g, o = jnp.split(row @ params["x"] + h @ params["h"], 4, axis=-1)
        c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(c)
        return (h, c), h

    start = jnp.zeros((x.shape[1], hidden))
    return mean_square(jax.lax.scan(turn, (start, start), x)[1])


def attention(params: Any, x: Any) -> Any:
    for layer in params:
        q, k, v = (x @ layer[name] for name in ("q", "k", "v"))
        q, k, v = (y.reshape(*y.shape[:2], 8, -1) for y in (q, k, v))
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 8
        mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        y = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(mask, scores, -1e9)), v)
        x = x + y.reshape(x.shape) @ layer["o"]
        x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        x = x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-5)
    return mean_square(x)


def attention_params(layers: int, width: int) -> Any:
    shapes = dict.fromkeys("qkvo", (width, width)) | {"up": (width, 4 * width), "down": (4 * width, width)}
    return [{name: f32(*shape) for name, shape in shapes.items()} for _ in range(layers)]


def convolutions(params: Any, x: Any) -> Any:
    for w in params:
        y = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        x = jax.nn.relu((y - y.mean((0, 1, 2))) / jnp.sqrt(y.var((0, 1, 2)) + 1e-5)) + x
    return mean_square(x)


def per_example(params: Any, x: Any, y: Any) -> Any:
    """Gradients of each example, clipped, as in private training."""

    def loss(params: Any, x: Any, y: Any) -> Any:
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    gradients = jax.vmap(jax.grad(loss), (None, 0, 0))(params, x, y)
    norms = jnp.sqrt(sum(jnp.sum(g**2, (1, 2)) for g in gradients))
    scaled = [jnp.mean(g / jnp.maximum(1, norms)[:, None, None], 0) for g in gradients]
    return [w - 0.1 * g for w, g in zip(params, scaled, strict=True)]


def ensembles(params: Any, x: Any) -> Any:
    """Models side by side under vmap, each solved by a loop of its own."""

    def member(w: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < 10, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]

    return jax.vmap(member)(params)


def hessian_products(params: Any, x: Any, v: Any) -> Any:
    def loss(params: Any) -> Any:
        y = x
        for w in params:
            y = jnp.tanh(y @ w)
        return mean_square(y)

    return jax.jvp(jax.grad(loss), (params,), (v,))[1]


def gathers(params: Any, rows: Any) -> Any:
    x = jnp.zeros((rows.shape[0], params[0].shape[1]))
    for table in params:
        x = x + table[rows % table.shape[0]]
        x = x[jnp.argsort(x[:, 0])]
    return mean_square(x)


def linear_algebra(params: Any, x: Any) -> Any:
    for w in params:
        q, r = jnp.linalg.qr(w)
        s = jnp.linalg.cholesky(r.T @ r + jnp.eye(r.shape[0]))
        x = jax.scipy.linalg.solve_triangular(s, (x @ q).T, lower=True).T
    return x


def many_outputs(params: Any, x: Any) -> Any:
    return [jnp.tanh(x @ params + i).sum(i % 2) for i in range(200)]


def adam(params: Any, x: Any) -> Any:
    import optax

    weights, state = params
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    value, gradients = jax.value_and_grad(residuals)(weights, x)
    updates, state = optimizer.update(gradients, state, weights)
    return (optax.apply_updates(weights, updates), state), value


def adam_params(layers: int, width: int) -> Any:
    import optax

    weights = [f32(width, width)] * layers
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    return weights, jax.eval_shape(optimizer.init, weights)


def seven_dims(params: Any, x: Any) -> Any:
    for _ in range(6):
        x = jnp.tanh(jnp.einsum("abcdefg,gh->habcdef", x, params))
    return mean_square(x)


def scanned_layers(params: Any, x: Any) -> Any:
    @jax.checkpoint
    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    return mean_square(jax.lax.scan(layer, x, params)[0])


def scanned_params(layers: int, width: int) -> Any:
    return {"up": f32(layers, width, 4 * width), "down": f32(layers, 4 * width, width)}


FFN = (trained(scanned_layers), (scanned_params(8, 512), f32(64, 512)))
BLOCKS = (trained(attention), (attention_params(4, 256), f32(16, 64, 256)))
STACK = (trained(residuals), ([f32(512, 512)] * 12, f32(64, 512)))
SMALL = (trained(residuals), ([f32(256, 256)] * 4, f32(64, 256)))
IMAGES = (trained(convolutions), ([f32(3, 3, 64, 64)] * 20, f32(32, 32, 32, 64)))
UNEVEN = (trained(attention), (attention_params(3, 200), f32(15, 50, 200)))
FOUR_AXES = (2, 2, 2, 2)
SCANT = {"memory": "5MiB"}

STEPS: dict[str, Late] = {
    "callbacks of 2,048 rows": Late(trained(watched_rows), (f32(64, 64), f32(2048, 64))),
    "callbacks with results, 2,048 rows": Late(pure_rows, (f32(64, 64), f32(2048, 64))),
    "fan of 300": Late(trained(fan(300)), (f32(256, 256), f32(64, 256))),
    "fan of 100, four axes": Late(trained(fan(100)), (f32(256, 256), f32(64, 256)), FOUR_AXES),
    "branches of 100": Late(trained(branches), ([f32(128, 64)] * 100, f32(64, 128))),
    "500 leaves": Late(trained(leaves), ([f32(64, 64)] * 500, f32(64, 64))),
    "500 leaves, three axes": Late(trained(leaves), ([f32(64, 64)] * 500, f32(64, 64)), (2, 2, 2)),
    "1,000 leaves of Adam": Late(adam, (adam_params(330, 64), f32(64, 64))),
    "chain of 2,000": Late(trained(chain(2000)), (f32(64), f32(64, 64))),
    "chain of 300, four axes": Late(trained(chain(300)), (f32(64), f32(64, 64)), FOUR_AXES),
    "dense of 24": Late(trained(dense), ([[f32(256, 256)] * (i + 1) for i in range(24)], f32(64, 256))),
    "transposes of 20": Late(trained(transposes), ([f32(512, 512)] * 20, f32(512, 512))),
    "transposes of 8, four axes": Late(trained(transposes), ([f32(512, 512)] * 8, f32(512, 512)), FOUR_AXES),
    "nested loops": Late(nested, (f32(4, 3, 128, 128), f32(64, 128))),
    "scans six deep": Late(trained(scans(6)), (f32(128, 128), f32(64, 128))),
    "lstm, three axes": Late(trained(lstm), ({"x": f32(64, 512), "h": f32(128, 512)}, f32(50, 64, 64)), (2, 2, 2)),
    "attention, four axes": Late(*BLOCKS, FOUR_AXES),
    "attention, 256 chips": Late(*BLOCKS, (16, 16)),
    "attention, tight": Late(*BLOCKS, options={"memory": "4.5MiB"}),
    "convolutions of 20, three axes": Late(
        trained(convolutions), ([f32(3, 3, 64, 64)] * 20, f32(32, 32, 32, 64)), (2, 2, 2)
    ),
    "gradients of each example": Late(per_example, ([f32(128, 128)] * 8, f32(256, 128), f32(256, 128)), (2, 2, 2)),
    "ensembles": Late(ensembles, (f32(32, 128, 128), f32(64, 128)), FOUR_AXES),
    "products with the Hessian": Late(hessian_products, ([f32(256, 256)] * 8, f32(64, 256), [f32(256, 256)] * 8)),
    "gathers and sorts of 30": Late(trained(gathers), ([f32(1024, 64)] * 30, jax.ShapeDtypeStruct((512,), jnp.int32))),
    "linear algebra of 12": Late(linear_algebra, ([f32(128, 128)] * 12, f32(64, 128)), (2, 2, 2)),
    "200 results": Late(many_outputs, (f32(256, 256), f32(64, 256))),
    "seven dims, three axes": Late(trained(seven_dims), (f32(8, 8), f32(*[8] * 7)), (2, 2, 2)),
    "stack of 12, tight": Late(*STACK, options={"memory": "5MiB", "donate_argnums": 0}),
    "stack of 12, very tight": Late(*STACK, options={"memory": "2.4MiB", "donate_argnums": 0}),
    "stack of 24, four axes": Late(trained(residuals), ([f32(512, 512)] * 24, f32(64, 512)), FOUR_AXES),
    "stack of 12, mesh auto": Late(*STACK, options={"mesh": "auto", "topology": "v5e:4x4"}),
    "attention, mesh auto": Late(*BLOCKS, options={"mesh": "auto", "topology": "v5e:4x4"}),
    "layers, remat auto": Late(*FFN, options={"remat": "auto", "memory": "6MiB"}),
    "attention, remat auto": Late(*BLOCKS, options={"remat": "auto", "memory": "6MiB"}),
    "attention, microbatches auto": Late(*BLOCKS, options={"microbatches": "auto", "memory": "6MiB"}),
    "attention, remat and microbatches": Late(
        *BLOCKS, options={"remat": "auto", "microbatches": "auto", "memory": "5MiB"}
    ),
    "stack of 4, pipeline auto": Late(*SMALL, options={"pipeline": "auto"}),
    "attention, pipeline auto": Late(*BLOCKS, options={"pipeline": "auto"}),
    "attention, four stages": Late(*BLOCKS, options={"pipeline": {"stages": 4, "microbatches": 4}}),
    "attention, rewrites": Late(*BLOCKS, options={"rewrites": "auto", "reductions": "auto"}),
    "attention, padded": Late(
        trained(attention), (attention_params(3, 200), f32(15, 50, 200)), options={"pad": "auto"}
    ),
    "attention, flexflow": Late(*BLOCKS, options={"search": "flexflow"}),
}
