"""Example programs: at least one for every primitive that JAX can lower, for oracle tests to loop over.

A row of a table is ``(name, function, *arguments)``; up to its first comma a name is the primitive that the row is
about. Rows of primitives that a JAX release cannot lower for CPUs are left out, by what it has and not by its number.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src import compute_on
from jax._src.interpreters import mlir
from jax._src.lax import linalg as inner_linalg
from jax._src.lax import parallel as collectives
from jax._src.lax import windowed_reductions
from jax._src.state import discharge
from jax._src.state import primitives as references
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import checkify, io_callback, pallas, scheduling_groups, sparse
from jax.experimental.buffer_callback import buffer_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.multihost_utils import global_array_to_host_local_array, host_local_array_to_global_array
from jax.experimental.pallas import fuser as pallas_fuser
from jax.experimental.pallas import tpu as pallas_tpu
from jax.experimental.pallas import triton as pallas_triton
from jax.experimental.sparse.linalg import spsolve
from jax.experimental.xla_metadata import set_xla_metadata
from jax.scipy.sparse.linalg import cg
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P


def _imported(name: str) -> Any:
    """A module that not every JAX release has, or None."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


shard_alike = _imported("jax.experimental.shard_alike")
program_order = _imported("jax._src.program_order")
_imported("jax._src.thunky.thunky")  # only registers a primitive, as the next one does
_imported("jax._src.pallas.mosaic.interpret.interpret_pallas_call")

# What a program for CPUs may hold; JAX rewrites references away before it lowers anything.
PRIMITIVES = {primitive.name: primitive for primitive in (*mlir._lowerings, *mlir._platform_specific_lowerings["cpu"])}
GONE_BEFORE_LOWERING = ("addupdate", "get", "new_ref", "swap")


@dataclass(frozen=True)
class Case:
    """One program: `fn(*args)`, with arrays for arguments, uses `primitive`, in its jaxpr or one nested in it."""

    name: str
    primitive: str
    fn: Callable
    args: tuple


def _table(*rows: tuple) -> tuple[Case, ...]:
    named = ((name, name.split(",")[0], fn, args) for name, fn, *args in rows)
    return tuple(
        Case(name, primitive, fn, tuple(map(_array, args)))
        for name, primitive, fn, args in named
        if primitive in PRIMITIVES or primitive in GONE_BEFORE_LOWERING
    )


def _array(x: Any) -> jax.Array:
    return x if isinstance(x, jax.Array) else jax.device_put(x)


def _bind(primitive: str, **params: Any) -> Callable:
    """For primitives that no public function binds."""
    return lambda *args: PRIMITIVES[primitive].bind(*args, **params)


# Arguments. Dims of one array differ in size where they can, and all can be split by 2 and by 4.


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _integers(high: int, *shape: int, seed: int = 0, dtype: Any = np.int32) -> np.ndarray:
    return np.random.default_rng(seed).integers(high, size=shape).astype(dtype)


def _shuffled(*shape: int) -> np.ndarray:
    """0, 1, 2, ... in random order, the same each time: no two are equal."""
    count = np.prod(shape, dtype=int)
    return np.random.default_rng(0).permutation(count).reshape(shape).astype(np.float32)


def normal(*shape: int, seed: int = 0) -> jax.Array:
    """Random numbers, the same each time."""
    return _array(_normal(*shape, seed=seed))


def integers(high: int, *shape: int, seed: int = 0, dtype: Any = np.int32) -> jax.Array:
    """Random numbers from 0 to high - 1, the same each time."""
    return _array(_integers(high, *shape, seed=seed, dtype=dtype))


# NumPy arrays, of which more are made here: JAX would compile a program for each, in every process that imports this.
X, Y = _normal(8, 16), _normal(8, 16, seed=1)
UNIT, UNIT2 = (abs(np.sin(x)) * 0.8 + 0.1 for x in (X, Y))  # from 0.1 to 0.9
CUBE = _normal(4, 8, 16)
VECTOR = _normal(16)
WHOLE = _integers(8, 8, 16) - 4
BITS, BITS2 = (_integers(1 << 31, 8, 16, seed=seed, dtype=np.uint32) for seed in (0, 1))
FLAGS = X > 0
COMPLEX = X + 1j * Y
SQUARE = _normal(4, 8, 8)
POSITIVE = SQUARE @ SQUARE.mT + 8 * np.eye(8, dtype=np.float32)  # positive definite
KEY, KEYS = jax.random.key(0), jax.random.split(jax.random.key(1), 8)


# Calls: functions called in functions, with derivatives and batching rules of their own.


@jax.custom_jvp
def _cubed(x):
    return x**3


_cubed.defjvp(lambda primals, tangents: (_cubed(*primals), 3 * primals[0] ** 2 * tangents[0]))


@jax.custom_vjp
def _clipped(x, y):
    return jnp.sin(x) * y


_clipped.defvjp(lambda x, y: (jnp.sin(x) * y, (x, y)), lambda kept, g: (jnp.clip(g * jnp.cos(kept[0]), -1, 1), g))


@jax.custom_vjp
def _lean(x):
    return jnp.tanh(x)


_lean.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * (1 - jnp.tanh(x) ** 2),), optimize_remat=True)


@jax.custom_batching.custom_vmap
def _normalised(x):
    return x / jnp.sum(x)


@_normalised.def_vmap
def _normalised_rows(_, batched, x):
    return x / jnp.sum(x, 1, keepdims=True), batched[0]


def _layer(x):
    return jnp.tanh(x @ jnp.ones((16, 16)) / 16)


def _named(x):
    return checkpoint_name(_layer(x), "layer") * 2


KEEP_NAMED = jax.checkpoint_policies.save_only_these_names("layer")
SINE = jax.make_jaxpr(jnp.sin)(X)
EXPORTED = jax.export.export(jax.jit(lambda x, y: (x @ y.T, x + 1)))(X, Y)


@functools.partial(lax.composite, name="test.scaled")
def _composite(x, scale=2.0):
    return x * scale


def _custom_root(x):
    return lax.custom_root(
        lambda y: y**3 - x, jnp.ones_like(x), lambda f, y: _newton(f, y), lambda g, y: y / g(jnp.ones_like(y))
    )


def _newton(f, y):
    return lax.fori_loop(0, 20, lambda _, y: y - f(y) / jax.jvp(f, (y,), (jnp.ones_like(y),))[1], y)


CALLS = _table(
    ("call_exported", lambda x, y: EXPORTED.call(jnp.sin(x), y), X, Y),
    ("composite", lambda x: _composite(jnp.sin(x)) + 1, X),
    ("custom_jvp_call", lambda x: _cubed(x) + 1, X),
    ("custom_jvp_call, of jax.nn", lambda x: jax.nn.relu(x) + jax.nn.silu(x), X),
    ("custom_jvp_call, in scan", lambda x: lax.scan(lambda c, y: (_cubed(c) + y, c), x[0] / 9, x / 9), X),
    ("mul, gradient of custom_jvp_call", jax.grad(lambda x: _cubed(x).sum()), X),
    ("custom_vjp_call", lambda x, y: _clipped(x, y) + 1, X, Y),
    ("custom_vjp_call, vmapped", jax.vmap(_clipped, (0, None)), X, VECTOR),
    ("cos, gradient of custom_vjp_call", jax.grad(lambda x, y: _clipped(x, y).sum(), (0, 1)), X, Y),
    ("custom_vmap_call", lambda x: _normalised(jnp.exp(x)), VECTOR),
    ("reduce_sum, custom_vmap_call vmapped", jax.vmap(_normalised), X),
    ("custom_linear_solve", lambda a, b: lax.custom_linear_solve(
        lambda x: a @ x, b, lambda _, b: jnp.linalg.solve(a, b), symmetric=True), POSITIVE[0], _normal(8, 4)),
    ("custom_linear_solve, conjugate gradients", lambda a, b: cg(lambda x: a @ x, b)[0], POSITIVE[0], VECTOR[:8]),
    ("custom_linear_solve, jnp.linalg.solve", jnp.linalg.solve, POSITIVE, _normal(4, 8, 16)),
    ("eval_jaxpr", _bind("eval_jaxpr", call_jaxpr=SINE), X),
    ("jit", lambda x: jax.jit(_layer)(x) + jax.jit(_layer)(x + 1), X),
    ("jit, result is argument", lambda x: jax.jit(lambda x: (x, x, x + 1))(jnp.sin(x)), X),
    ("jit, of nothing", lambda x: x * jax.jit(lambda: jnp.ones(16))(), X),
    ("jit, inline", lambda x: jax.jit(_layer, inline=True)(jax.jit(jnp.sin)(x)), X),
    ("jit, closed-over array", lambda x: jax.jit(lambda y: x + y)(x + np.arange(16.0, dtype=np.float32)), X),
    ("linear_call", lambda x: jax.custom_derivatives.linear_call(lambda r, x: r * x, lambda r, y: r * y, 2.0, x), X),
    ("name", _named, X),
    ("remat2", lambda x: jax.checkpoint(_layer)(jnp.sin(x)), X),
    ("remat2, gradient", jax.grad(lambda x: jax.checkpoint(_layer)(jax.checkpoint(_layer)(x)).sum()), X),
    ("remat2, gradient with a policy", jax.grad(lambda x: jax.checkpoint(_named, policy=KEEP_NAMED)(x).sum()), X),
    ("remat2, in scan", jax.grad(
        lambda x: lax.scan(jax.checkpoint(lambda c, y: (jnp.sin(c * y), c)), x[0], x)[0].sum()), X),
    ("remat_opt, gradient of custom_vjp_call", jax.grad(lambda x: _lean(x).sum()), X),
    ("sin, custom_root", lambda x: jnp.sin(_custom_root(x)), UNIT),
    ("sin, gradient of custom_root", jax.grad(lambda x: jnp.cos(_custom_root(x)).sum()), UNIT),
    ("tanh, named_call and named_scope", jax.named_call(jax.named_scope("inner")(_layer), name="outer"), X),
)  # fmt: skip


# Contractions.


def _dot(contracting: tuple, batch: tuple = ((), ()), **options) -> Callable:
    return lambda x, y: lax.dot_general(x, y, (contracting, batch), **options)


def _ragged(contracting: tuple, batch: tuple, ragged: tuple, group: tuple) -> Callable:
    numbers = lax.RaggedDotDimensionNumbers((contracting, batch), ragged, group)
    return lambda x, y, sizes: lax.ragged_dot_general(x, y, sizes, numbers)


EIGHTHS = _normal(2, 8, 64).astype(jnp.float8_e4m3fn)
SCALES = np.broadcast_to(np.asarray([[[1, 2]], [[2, 4]]], jnp.float8_e8m0fnu), (2, 8, 2))
SIZES = np.array([4, 2, 8, 2], np.int32)
CONTRACTIONS = _table(
    ("dot_general", _dot(((1,), (0,))), X, _normal(16, 4)),
    ("dot_general, matrix and vector", jnp.dot, X, VECTOR),
    ("dot_general, inner product", jnp.vdot, VECTOR, VECTOR + 1),
    ("dot_general, outer product", _dot(((), ())), VECTOR, _normal(8)),
    ("dot_general, batch", _dot(((2,), (1,)), ((0,), (0,))), CUBE, _normal(4, 16, 8)),
    ("dot_general, batch of transposed operands", _dot(((0,), (2,)), ((1, 3), (0, 1))),
     _normal(4, 8, 16, 2), _normal(8, 2, 4, 16, seed=1)),
    ("dot_general, two contracting", _dot(((0, 2), (1, 0))), CUBE, _normal(16, 4, 8)),
    ("dot_general, integers", _dot(((1,), (1,)), preferred_element_type=np.int32),
     WHOLE.astype(np.int8), WHOLE[:4].astype(np.int8)),
    ("dot_general, bfloat16", _dot(((1,), (1,)), preferred_element_type=np.float32),
     X.astype(jnp.bfloat16), Y.astype(jnp.bfloat16)),
    ("dot_general, highest precision", _dot(((1,), (1,)), precision="highest"), X, Y),
    ("dot_general, complex", _dot(((1,), (1,))), COMPLEX, COMPLEX),
    ("dot_general, gradient", jax.grad(lambda x, y: jnp.sum(jnp.tanh(x @ y)), (0, 1)), X, _normal(16, 4)),
    ("dot_general, einsum", lambda x, y, z: jnp.einsum("bij,bkj,ik->bi", x, y, z), CUBE, CUBE + 1, _normal(8, 8)),
    ("dot_general, attention", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, is_causal=True),
     *(_normal(4, 8, 2, 16, seed=seed) for seed in range(3))),
    ("dot_general, grouped attention", lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="xla"),
     _normal(4, 8, 4, 16), _normal(4, 8, 2, 16, seed=1), _normal(4, 8, 2, 16, seed=2)),
    ("ragged_dot_general, ragged rows", lax.ragged_dot, _normal(16, 8), _normal(4, 8, 2), SIZES),
    ("ragged_dot_general, ragged rows in batches", _ragged(((2,), (2,)), ((0,), (0,)), (1,), (1,)),
     _normal(2, 16, 8), _normal(2, 4, 8, 2), np.stack([SIZES, SIZES[::-1]])),
    ("ragged_dot_general, ragged contraction", _ragged(((0,), (0,)), ((), ()), (0,), ()),
     _normal(16, 8), _normal(16, 4), SIZES),
    ("ragged_dot_general, ragged batch", _ragged(((2,), (1,)), ((0,), (0,)), (0,), ()),
     _normal(16, 8, 4), _normal(16, 4, 2), SIZES),
    ("ragged_dot_general, gradient", jax.grad(lambda x, y, n: jnp.sin(lax.ragged_dot(x, y, n)).sum(), (0, 1)),
     _normal(16, 8), _normal(4, 8, 2), SIZES),
    ("scaled_dot", lambda x, y, a, b: lax.scaled_dot(
        x, y, lhs_scale=a, rhs_scale=b, dimension_numbers=(((1,), (1,)), ((), ()))),
     EIGHTHS[0], EIGHTHS[1, :4], SCALES[0], SCALES[1, :4]),
    *((("scaled_matmul_wrapper", jax.nn.scaled_matmul, EIGHTHS, EIGHTHS[:, :4], SCALES, SCALES[:, :4]),)
      if "scaled_matmul" in PRIMITIVES else ()),
    ("scaled_matmul", _bind("scaled_matmul", preferred_element_type=np.float32),
     EIGHTHS, EIGHTHS[:, :4], SCALES, SCALES[:, :4]),
)  # fmt: skip


# Control flow.


def _rnn(w, x):
    def step(h, x):
        h = jnp.tanh(h @ w + x)
        return h, h * 2

    return lax.scan(step, jnp.zeros_like(x[0]), x)


def _halved(x):
    return lax.while_loop(lambda x: jnp.max(x) > 1, lambda x: x / 2, x)


def _carried(w, x):
    """The test of the loop reads a constant of its own, and so does the body."""
    limit = jnp.sum(w)
    return lax.while_loop(lambda c: c[0] < limit, lambda c: (c[0] + 1, c[1] @ w), (jnp.float32(0), x))


def _layers(weights, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]


CONTROL_FLOW = _table(
    ("cond", lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x), np.bool_(True), X),
    ("cond, of several", lambda i, x, y: lax.switch(i, [jnp.add, jnp.subtract, lambda x, y: x @ x.T @ y], x, y),
     np.int32(2), X, Y),
    ("cond, closed-over values", lambda x, y: lax.cond(
        x[0, 0] > y[0, 0], lambda: (x, 1.0), lambda: (y * 2, 0.0)), X, Y),
    ("cond, a branch returns its operand", lambda p, x: lax.cond(p, lambda x: x, lambda x: x * 2, jnp.sin(x)),
     np.bool_(False), X),
    ("cond, gradient", jax.grad(lambda x, p: lax.cond(p, jnp.sin, jnp.exp, x).sum()), X, np.bool_(True)),
    ("cond, in scan", lambda x: lax.scan(
        lambda c, y: (lax.cond(c[0] > 0, jnp.add, jnp.subtract, c, y), c), x[0], x), X),
    ("select_n, cond vmapped", jax.vmap(lambda p, x: lax.cond(p, jnp.sin, jnp.cos, x)), FLAGS[:, 0], X),
    ("platform_index", lambda x: lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos), X),
    ("scan", _rnn, _normal(16, 16), CUBE),
    ("scan, over weights", _layers, _normal(4, 16, 16), X),
    ("scan, gradient", jax.grad(lambda w, x: jnp.sum(_rnn(w, x)[1])), _normal(16, 16), CUBE),
    ("scan, gradient over weights", jax.grad(lambda w, x: jnp.sum(_layers(w, x) ** 2), (0, 1)), _normal(4, 16, 16), X),
    ("scan, reverse", lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c), jnp.zeros(16), x, reverse=True), X),
    ("scan, unrolled", lambda x: lax.scan(lambda c, y: (c * 0.5 + y, c), jnp.zeros(16), x, unroll=2), X),
    ("scan, of nothing but a length", lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=4)[0], X),
    ("scan, in scan", lambda x: lax.scan(lambda c, y: lax.scan(lambda c, z: (c + z, c * z), c, y), X[0], x), CUBE),
    ("scan, counter and unused carry", lambda x: lax.scan(
        lambda c, y: ((c[0] + 1, c[1] + y, c[2]), y * c[0]), (0, x[0], x[1]), x), X),
    ("scan, carries that trade places", lambda x, y: lax.fori_loop(0, 3, lambda _, c: (c[1], c[0] + 1), (x, y)), X, Y),
    ("scan, map", lambda x: lax.map(lambda row: row / jnp.sum(row), x), UNIT),
    ("scan, map in batches", lambda x: lax.map(lambda row: row / jnp.sum(row), x, batch_size=4), UNIT),
    ("scan, vmapped", jax.vmap(_rnn, (None, 1)), _normal(16, 16), CUBE),
    ("mul, associative_scan", lambda x: lax.associative_scan(jnp.multiply, x), UNIT),
    ("concatenate, associative_scan along columns", lambda x: lax.associative_scan(jnp.add, x, axis=1), UNIT),
    ("while", _halved, abs(X) * 9),
    ("while, with constants", _carried, abs(_normal(16, 16)) / 16, X),
    ("while, fori_loop", lambda n, x: lax.fori_loop(0, n, lambda i, x: x + i, x), np.int32(3), X),
    ("while, vmapped", jax.vmap(_halved), abs(X) * 9),
    ("while, forward derivative", lambda x: jax.jvp(_halved, (x,), (jnp.ones_like(x),)), abs(X) * 9),
)  # fmt: skip


# Dims: moved, added, merged or cut.

RESHAPES = {
    "flat": ((8, 16), (128,)),
    "merge": ((4, 8, 16), (32, 16)),
    "split": ((8, 16), (8, 4, 4)),
    "split of a vector": ((16,), (4, 4)),
    "merge and split": ((4, 8, 16), (32, 2, 8)),
    "shift": ((4, 16), (8, 8)),
    "uneven": ((6, 4), (4, 6)),
    "uneven behind a dim": ((8, 4, 6), (8, 3, 8)),
    "sizes of 1": ((8, 1, 16), (1, 8, 16, 1)),
    "to a scalar": ((1, 1), ()),
    "from a scalar": ((), (1, 1)),
}
DIMS = _table(
    ("broadcast_in_dim", lambda x: lax.broadcast_in_dim(x, (4, 8, 16), (1, 2)), X),
    ("broadcast_in_dim, new minor dim", lambda x: lax.broadcast_in_dim(x, (8, 16, 4), (0, 1)), X),
    ("broadcast_in_dim, of a size 1", lambda x: lax.broadcast_in_dim(x, (8, 16), (0, 1)), X[:, :1]),
    ("broadcast_in_dim, of a scalar", lambda x: lax.broadcast_in_dim(x, (8, 16), ()), np.float32(2)),
    ("broadcast_to", lambda x: references.broadcast_to(x, (4, 8, 16)), X),
    ("broadcast_in_dim, of a vector", lambda x, y: x + y[:, None], X, _normal(8)),
    ("concatenate", lambda x, y: lax.concatenate([x, y], 0), X, Y),
    ("concatenate, of different sizes", lambda x, y, z: lax.concatenate([x, y, z], 1), X, Y[:, :4], Y[:, :12]),
    ("concatenate, of one with itself", lambda x: lax.concatenate([x, x], 1), X),
    ("concatenate, gradient", jax.grad(lambda x, y: jnp.sin(lax.concatenate([x, y], 1)).sum(), (0, 1)), X, Y[:, :4]),
    ("empty", lambda x: x + 0 * lax.empty((8, 16), np.float32), X),
    ("empty2", lambda x: x + 0 * _bind("empty2", dtype=np.float32, memory_space=jax.memory.Space.Device)(), X),
    ("iota", lambda x: x + lax.broadcasted_iota(np.float32, (8, 16), 1), X),
    ("pad, low and high", lambda x: lax.pad(x, 0.0, ((2, 6, 0), (0, 0, 0))), X),
    ("pad, both dims", lambda x, y: lax.pad(x, y, ((4, 4, 0), (1, 2, 0))), X, np.float32(2)),
    ("pad, interior", lambda x: lax.pad(x, 0.0, ((0, 1, 1), (0, 0, 0))), X),
    ("pad, negative", lambda x: lax.pad(x, 0.0, ((-2, -2, 0), (-4, 4, 0))), X),
    ("pad, gradient", jax.grad(lambda x, y: jnp.sin(lax.pad(x, y, ((4, 4, 0), (0, 1, 1)))).sum(), (0, 1)),
     X, np.float32(2)),
    *((f"reshape, {name}", functools.partial(lax.reshape, new_sizes=to), _normal(*shape))
      for name, (shape, to) in RESHAPES.items()),
    ("reshape, heads", lambda x: jnp.sin(x).reshape(8, 4, 4).transpose(1, 0, 2).reshape(4, 32), X),
    ("rev", lambda x: lax.rev(x, (0,)), X),
    ("rev, two dims", lambda x: lax.rev(x, (0, 2)), CUBE),
    ("slice", lambda x: lax.slice(x, (0, 4), (8, 12)), X),
    ("slice, both dims", lambda x: lax.slice(x, (2, 1), (6, 16)), X),
    ("slice, strided", lambda x: lax.slice(x, (0, 0), (8, 16), (1, 2)), X),
    ("slice, strided with an offset", lambda x: x[1::2, :12:3], X),
    ("slice, gradient", jax.grad(lambda x: jnp.sin(x[:, 4:12]).sum()), X),
    ("split", lambda x: lax.split(x, (4, 12), 1), X),
    ("split, gradient", jax.grad(lambda x: sum(jnp.sin(y).sum() for y in lax.split(x, (4, 4), 0))), X),
    ("squeeze", lambda x: lax.squeeze(x, (0, 2)), CUBE[:1, :, :1]),
    ("stack", lambda x, y: jnp.stack([x, y, x], 1), X, Y),
    ("tile", lambda x: jnp.tile(x, (2, 4)), X),
    ("transpose", lambda x: x.T, X),
    ("transpose, three dims", lambda x: lax.transpose(x, (2, 0, 1)), CUBE),
    ("unstack", lambda x: jnp.unstack(x, axis=0), CUBE),
)  # fmt: skip


# Edges: kinds of arrays, of arguments and of results.

DTYPES = "bfloat16 complex64 float16 float4_e2m1fn float8_e4m3fn float8_e5m2 int2 int4 int8 uint4 uint8 uint16"
CLOSED_OVER = _array(Y)
EDGES = _table(
    *((f"add, of {dtype}", lambda x, y: (x + y, x.T), _array(X).astype(dtype), _array(Y).astype(dtype))
      for dtype in DTYPES.split() if hasattr(jnp, dtype)),
    ("concatenate, of nothing", lambda x, y: lax.concatenate([x, y], 0), X[:0], Y),
    ("cumsum, of no elements", lambda x: jnp.cumsum(x, 1), X[:, :0]),
    ("dot_general, over no elements", lambda x, y: x @ y.T, X[:, :0], Y[:, :0]),
    ("iota, no arguments", lambda: lax.broadcasted_iota(np.float32, (8, 16), 0)),
    ("iota, no argument used", lambda x: jnp.arange(16.0), X),
    ("mul, of scalars only", lambda x, y: x * y + 1, np.float32(2), np.float32(3)),
    ("mul, of a weak type", lambda x, y: x * y, jnp.asarray(2.0), X.astype(jnp.bfloat16)),
    ("reduce_sum, of no elements", lambda x: (jnp.sum(x, 0), jnp.sum(x, 1)), X[:0]),
    ("reshape, of no elements", lambda x: lax.reshape(x, (4, 0, 2)), X[:0]),
    ("scan, of no steps", lambda x: lax.scan(lambda c, y: (c + y, c), jnp.ones(16), x), X[:0]),
    ("sin, an argument as it is", lambda x, y: (jnp.sin(x), y), X, Y),
    ("sin, an argument returned twice", lambda x, y: (y, jnp.sin(x), y), X, Y),
    ("sin, an argument unused", lambda x, y: jnp.sin(x), X, Y),
    ("sin, a constant result", lambda x: (jnp.sin(x), 1.0, np.ones(16, np.float32)), X),
    ("sin, closed-over array", lambda x: jnp.sin(x) + CLOSED_OVER, X),
    ("sin, of dims of size 1", lambda x: jnp.sin(x), X[:1, :1]),
    ("sin, one value twice", lambda x: (jnp.sin(x),) * 2, X),
    ("sin, one value computed twice", lambda x: (jnp.sin(x), jnp.sin(x)), X),
    ("sin, uneven dims", lambda x: jnp.sin(x) @ x.T, _normal(7, 5)),
    ("sin, unused result", lambda x: (jnp.cos(x @ x.T), jnp.sin(x))[1], X),
)  # fmt: skip


# Elementwise.

UNARY = {  # by the arguments at which they are smooth and finite
    "normal": (X, "abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc exp exp2 expm1 floor is_finite "
               "logistic neg one_minus_square round sign sin sinh square tan tanh"),
    "unit": (UNIT, "acos asin atanh digamma erf_inv lgamma log log1p log2 rsqrt sqrt"),
    "large": (UNIT + 1, "acosh"),
    "bits": (BITS, "clz population_count"),
    "complex": (COMPLEX, "conj imag real"),
}  # fmt: skip
BINARY = {
    "normal": ((X, Y), "add atan2 complex div eq ge gt le lt max min mul ne nextafter rem sub eq_to le_to lt_to"),
    "unit": ((UNIT, UNIT2), "igamma igamma_grad_a igammac pow"),
    "large": ((UNIT + 2, UNIT2 + 1), "zeta"),
    "bits": ((BITS, BITS2), "and mulhi or xor"),
    "few bits": ((BITS, BITS2 % 8), "shift_left shift_right_arithmetic shift_right_logical"),
}
SPELLED = {"and": "bitwise_and", "not": "bitwise_not", "or": "bitwise_or", "xor": "bitwise_xor"}


def _known(names: str) -> list[str]:
    return [name for name in names.split() if name in PRIMITIVES]


def _of_lax(name: str) -> Callable:
    named = SPELLED.get(name, name)
    return getattr(lax, named) if hasattr(lax, named) else getattr(lax, f"{name}_p").bind


ELEMENTWISE = _table(
    *((name, _of_lax(name), x) for x, names in UNARY.values() for name in _known(names)),
    *((name, _of_lax(name), *xs) for xs, names in BINARY.values() for name in _known(names)),
    ("add, of different dtypes", lambda x, y: x + y, X, WHOLE),
    ("add, of a literal", lambda x: 1.0 + x, X),
    ("add, of arrays of size 1", lambda x, y: lax.add_p.bind(x, y), X[:1], Y[:1]),
    ("add_any", jax.grad(lambda x: jnp.sum(jnp.sin(x) * x)), X),
    ("bitcast_convert_type", lambda x: lax.bitcast_convert_type(x, np.int32), X),
    ("bitcast_convert_type, to smaller", lambda x: lax.bitcast_convert_type(x, np.uint8), X),
    ("bitcast_convert_type, to larger", lambda x: lax.bitcast_convert_type(x, np.uint32),
     _integers(256, 8, 4, dtype=np.uint8)),
    ("clamp", lax.clamp, X - 1, Y, X + 1),
    ("clamp, scalar bounds", lax.clamp, np.float32(-0.5), X, np.float32(0.5)),
    ("convert_element_type", lambda x: x.astype(np.int32), X),
    ("convert_element_type, to bfloat16", lambda x: x.astype(jnp.bfloat16), X),
    ("convert_element_type, from bool", lambda x: x.astype(np.float32), FLAGS),
    ("copy", lambda x: jnp.array(x, copy=True), X),
    ("integer_pow", lambda x: lax.integer_pow(x, 3), X),
    ("integer_pow, negative", lambda x: lax.integer_pow(x, -2), UNIT),
    ("not", lax.bitwise_not, FLAGS),
    ("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y.T, 1.0)), X, Y),
    ("polynomial", lambda x: lax.polynomial(x, (1.0, 2.0, 3.0)), X),
    ("polygamma", lambda x: lax.polygamma(jnp.ones_like(x), x), UNIT),
    ("population_count, of flags as bytes", lambda x: lax.population_count(x.astype(np.uint8)), FLAGS),
    ("pow, of integers", lambda x: x ** jnp.full_like(WHOLE, 2), X),
    ("reduce_precision", lambda x: lax.reduce_precision(x, 5, 5), X),
    ("regularized_incomplete_beta", lax.betainc, UNIT, UNIT2, UNIT),
    ("round, to even", lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN), X * 4),
    ("select_n", lax.select_n, FLAGS, X, Y),
    ("select_n, scalar predicate", lax.select_n, np.bool_(True), X, Y),
    ("select_n, of three", lax.select_n, WHOLE % 3, X, Y, X + Y),
    ("sign, of integers", lax.sign, WHOLE),
    ("stop_gradient", _bind("stop_gradient"), X),
    ("sin, stop_gradient", jax.grad(lambda x: jnp.sum(jnp.sin(x) * lax.stop_gradient(x))), X),
    ("tie", _bind("tie"), X, Y),
    ("tanh, gelu", jax.nn.gelu, X),
    ("exp, softmax", lambda x: jax.nn.softmax(x), X),
)  # fmt: skip


# Host: callbacks.


def _doubled_on_host(x):
    return np.asarray(x) * 2


def _printed(x):
    jax.debug.print("sum {}", jnp.sum(x) * 0)
    return x + 1


def _called_back(x):
    jax.debug.callback(lambda x: None, x)
    return x + 1


def _doubled_in_place(_, out, x):
    np.asarray(out)[...] = np.asarray(x) * 2


def _inspected(x):
    jax.debug.inspect_array_sharding(x, callback=lambda sharding: None)
    return x + 1


def _counted(x):
    count = io_callback(lambda: np.float32(3), jax.ShapeDtypeStruct((), np.float32), ordered=True)
    return x * count


HOST = _table(
    ("debug_callback", _called_back, X),
    ("debug_print", _printed, X),
    ("io_callback", lambda x: io_callback(_doubled_on_host, x, x), X),
    ("io_callback, ordered", _counted, X),
    ("buffer_callback", lambda x: buffer_callback(_doubled_in_place, x)(jnp.sin(x)), X),
    ("inspect_sharding", _inspected, X),
    ("pure_callback", lambda x: jax.pure_callback(_doubled_on_host, x, jnp.sin(x)), X),
    ("pure_callback, vmapped", jax.vmap(
        lambda x: jax.pure_callback(_doubled_on_host, x, x, vmap_method="expand_dims")), X),
)  # fmt: skip


# Indexing.

ROWS = _integers(16, 8, 4)


def _scattered(method: str) -> Callable:
    return lambda x, i, y: getattr(x.at[i], method)(y)


INDEXING = _table(
    ("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (i, 0), (4, 16)), X, np.int32(2)),
    ("dynamic_slice, one row", lambda x, i: lax.dynamic_index_in_dim(x, i, 0), X, np.int32(2)),
    ("dynamic_slice, two dims", lambda x, i, j: lax.dynamic_slice(x, (i, j), (4, 4)), X, np.int32(2), np.int32(3)),
    ("dynamic_slice, gradient", jax.grad(lambda x, i: jnp.sin(lax.dynamic_slice(x, (i, 0), (4, 16))).sum()),
     X, np.int32(2)),
    ("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (i, 0)), X, Y[:4], np.int32(2)),
    ("dynamic_update_slice, cache", lambda cache, new, i: lax.dynamic_update_slice_in_dim(cache, new, i, 1),
     _normal(4, 16, 2, 8), _normal(4, 1, 2, 8, seed=1), np.int32(5)),
    ("gather, embedding", lambda w, i: w[i], _normal(16, 8), ROWS),
    ("gather, embedding of columns", lambda w, i: jnp.take(w, i, axis=1), _normal(8, 16), ROWS),
    ("gather, embedding that clips", lambda w, i: jnp.take(w, i, axis=0, mode="clip"), _normal(16, 8), ROWS),
    ("gather, take_along_axis", lambda x, i: jnp.take_along_axis(x, i, 1), X, ROWS),
    ("gather, two indices", lambda x, i, j: x[i, j], X, _integers(8, 4, 2), _integers(16, 4, 2)),
    ("gather, two indices apart", lambda x, i, j: x[i, :, j], CUBE, _integers(4, 8), _integers(16, 8)),
    ("gather, windows", lambda x, i: lax.gather(
        x, i, lax.GatherDimensionNumbers((1, 2), (), (0, 1)), (4, 8)), X, _integers(4, 8, 2)),
    ("gather, vmapped", jax.vmap(lambda w, i: w[i]), CUBE, _integers(8, 4, 2)),
    ("gather, vmapped over indices", jax.vmap(lambda w, i: w[i], (None, 0)), X, ROWS // 2),
    ("gather, gradient", jax.grad(lambda w, i: jnp.sin(w[i]).sum()), _normal(16, 8), ROWS),
    ("gather, gradient of take_along_axis", jax.grad(
        lambda x, i: jnp.sin(jnp.take_along_axis(x, i, 1)).sum()), X, ROWS),
    ("gather, by flags", lambda x: x[jnp.nonzero(x[:, 0] > 0, size=4)], X),
    ("scatter", _scattered("set"), _normal(16, 8), np.arange(8, dtype=np.int32) * 2, _normal(8, 8, seed=1)),
    ("scatter, of a scalar", lambda x, i: x.at[i].set(0.0), _normal(16, 8), _integers(16, 4)),
    ("scatter, of a static slice", lambda x, y: x.at[2:6].set(y), X, Y[:4]),
    ("scatter-add", _scattered("add"), _normal(16, 8), ROWS, _normal(8, 4, 8, seed=1)),
    ("scatter-add, two indices", lambda x, i, j, y: x.at[i, j].add(y),
     X, _integers(8, 4), _integers(16, 4), VECTOR[:4]),
    ("scatter-add, histogram", lambda i: jnp.zeros(16).at[i].add(1.0), ROWS),
    ("scatter-add, segment_sum", lambda x, i: jax.ops.segment_sum(x, i, 4), _normal(16, 8), _integers(4, 16)),
    ("scatter-add, vmapped", jax.vmap(_scattered("add")), CUBE, _integers(8, 4, 2), _normal(4, 2, 16, seed=1)),
    ("scatter-add, vmapped over updates", jax.vmap(_scattered("add"), (None, None, 0)),
     X, _integers(8, 2), _normal(4, 2, 16, seed=1)),
    ("scatter-add, gradient", jax.grad(lambda x, i, y: jnp.sin(x.at[i].add(y)).sum(), (0, 2)),
     _normal(16, 8), ROWS, _normal(8, 4, 8, seed=1)),
    ("scatter-max", _scattered("max"), _normal(16, 8), ROWS, _normal(8, 4, 8, seed=1)),
    ("scatter-min", _scattered("min"), _normal(16, 8), ROWS, _normal(8, 4, 8, seed=1)),
    ("scatter-mul", _scattered("multiply"), _normal(16, 8), ROWS, _normal(8, 4, 8, seed=1)),
    ("scatter-sub", _scattered("subtract"), _normal(16, 8), ROWS, _normal(8, 4, 8, seed=1)),
    ("scatter, vmapped", jax.vmap(_scattered("set")), CUBE, _integers(8, 4, 1), _normal(4, 1, 16, seed=1)),
)  # fmt: skip


# Kernels: code that JAX does not look into, and hints to the compiler.


def _doubling(source, target):
    target[...] = source[...] * 2


def _doubled_in_blocks(x):
    rows = pallas.BlockSpec((4, 16), lambda i: (i, 0))
    return pallas.pallas_call(_doubling, x, grid=(2,), in_specs=[rows], out_specs=rows, interpret=True)(jnp.sin(x))


ONE_CORE = pallas_tpu.create_tensorcore_mesh("core", num_cores=1)


def _mapped_over_cores(x):
    source, target = jax.new_ref(x), jax.new_ref(jnp.zeros_like(x))
    pallas.core_map(ONE_CORE, interpret=True)(lambda: _doubling(source, target))
    return target[...]


def _factorised(x):
    shapes = (jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], np.int32))
    return jax.ffi.ffi_call("lapack_spotrf_ffi", shapes, vmap_method="broadcast_all")(x, uplo=np.uint8(ord("L")))


@custom_partitioning
def _partitioned(x, w):
    return jnp.tanh(x) @ w


_partitioned.def_partition(
    partition=lambda mesh, shapes, result: (
        mesh, lambda x, w: jnp.tanh(x) @ w, result.sharding, tuple(shape.sharding for shape in shapes)
    ),
    infer_sharding_from_operands=lambda mesh, shapes, result: NamedSharding(mesh, P(*shapes[0].sharding.spec[:1])),
    sharding_rule="i j, j k -> i k",
    need_replication_factors=("j", "k"),
)  # fmt: skip


@pallas_fuser.custom_fusion
def _fused(x):
    return jnp.sin(x)


_fused.def_eval_rule(lambda _, x: (jnp.sin(x),))
_fused.def_pull_block_spec(lambda specs: specs)


def _through_scratch(x):
    def body(scratch):
        scratch[...] = x * 2
        return scratch[...] + 1

    return pallas.run_scoped(body, pallas_tpu.VMEM(x.shape, x.dtype))


def _checked(x):
    checkify.debug_check(x[0, 0] < 100, "too large")
    return x + 1


def _tagged(x):
    with set_xla_metadata(tag="a"):
        return jnp.sin(x)


KERNELS = _table(
    ("bitcast", lambda x: pallas_tpu.bitcast(x, np.int32), X),
    ("check", _checked, X),
    ("compute_on", lambda x: getattr(compute_on, "compute_on2", compute_on.compute_on)(
        jnp.sin, compute_type="device_host", out_memory_spaces=jax.memory.Space.Device)(x) + 1, X),
    ("core_map", _mapped_over_cores, X),
    ("custom_fusion", lambda x: _fused(x) + 1, X),
    ("custom_partitioning", _partitioned, X, _normal(16, 4)),
    ("einshape_lo", _bind("einshape_lo", equation="a(bc)->abc", sizes=(("b", 4),), assert_is_tile_preserving=False), X),
    ("ffi_call", _factorised, POSITIVE),
    ("fusible", lambda x: pallas_fuser.fusible(lambda x, _: x() * 2)(x), X),
    ("max_contiguous", lambda x: pallas_triton.max_contiguous(x, 4), WHOLE),
    ("mpmd_map", lambda x: pallas.kernel(_doubling, x, mesh=ONE_CORE, interpret=True)(x), X),
    ("multiple_of", lambda i, x: x + pallas.multiple_of(i, 8), np.int32(8), X),
    ("pallas_call", lambda x: pallas.pallas_call(_doubling, x, interpret=True)(x), X),
    ("pallas_call, in blocks", _doubled_in_blocks, X),
    ("pallas_call, vmapped", jax.vmap(_doubled_in_blocks), CUBE),
    ("program_order", lambda x: program_order.program_order(lambda x: jnp.sin(x) + 1, enforce=True)(x), X),
    ("reciprocal", pallas.reciprocal, UNIT),
    ("remove_memory_space", _bind("remove_memory_space"), X),
    ("roll", lambda x: pallas_tpu.roll(x, 1, 0), X),
    ("run_scoped", _through_scratch, X),
    ("shard_alike", lambda x, y: shard_alike.shard_alike(x * 2, y), X, Y),
    ("sin, einshape", lambda x: jnp.sin(pallas_tpu.einshape("a(bc)->abc", x, b=4)), X),
    ("sin, fusible", lambda x: jnp.sin(pallas_fuser.fusible(lambda x, _: x() * 2)(x)), X),
    ("sin, with XLA metadata", _tagged, X),
    ("thunky.inline_constant", lambda x: (x, _bind("thunky.inline_constant", value=b"four")()), X),
    ("with_memory_space_constraint", lambda x: pallas_tpu.with_memory_space_constraint(x, pallas_tpu.HBM), X),
    ("xla_metadata_call", lambda x: scheduling_groups.scheduling_group("group")(jnp.sin)(x) + 1, X),
    ("xla_metadata_value", lambda x: set_xla_metadata(jnp.sin(x), tag="a"), X),
)  # fmt: skip


# Lanes: collectives inside vmap: batching turns them into other primitives.


def _lanes(fn: Callable, in_axes: Any = 0) -> Callable:
    return jax.vmap(fn, in_axes, axis_name="lanes")


LANES = _table(
    ("psum, in vmap", _lanes(lambda x: x / lax.psum(x, "lanes")), UNIT),
    ("pmax, in vmap", _lanes(lambda x: x - lax.pmax(x, "lanes")), X),
    ("pmin, in vmap", _lanes(lambda x: x - lax.pmin(x, "lanes")), X),
    ("broadcast_in_dim, all_gather in vmap", _lanes(lambda x: lax.all_gather(x, "lanes") * x), X),
    ("reduce_sum, psum_scatter in vmap", _lanes(lambda x: lax.psum_scatter(x, "lanes", tiled=True)), X),
    ("gather, ppermute in vmap", _lanes(lambda x: lax.ppermute(x, "lanes", [(i, (i + 1) % 8) for i in range(8)])), X),
    ("transpose, all_to_all in vmap", _lanes(lambda x: lax.all_to_all(x, "lanes", 0, 0, tiled=True)), X),
    ("iota, axis_index in vmap", _lanes(lambda x: x * lax.axis_index("lanes")), X),
)


# Linear algebra.


def _solve(**options) -> Callable:
    return functools.partial(lax.linalg.triangular_solve, **options)


LOWER = np.tril(SQUARE) + 4 * np.eye(8, dtype=np.float32)
LINALG = _table(
    ("cholesky", jnp.linalg.cholesky, POSITIVE),
    ("cholesky, of one matrix", jnp.linalg.cholesky, POSITIVE[0]),
    ("cholesky_update", lambda r, w: lax.linalg.cholesky_update(r, w), np.linalg.cholesky(POSITIVE[0]).T, VECTOR[:8]),
    ("eig", jnp.linalg.eig, SQUARE),
    ("eigh", jnp.linalg.eigh, POSITIVE),
    ("eigh, values only", jnp.linalg.eigvalsh, POSITIVE),
    ("fft", jnp.fft.fft, COMPLEX),
    ("fft, inverse", jnp.fft.ifft, COMPLEX),
    ("fft, real", jnp.fft.rfft, CUBE),
    ("fft, inverse to real", jnp.fft.irfft, COMPLEX[:, :9]),
    ("fft, two dims", jnp.fft.fft2, CUBE + 1j * CUBE),
    ("fft, two real dims", jnp.fft.rfft2, CUBE),
    ("fft, two dims inverse to real", jnp.fft.irfft2, (CUBE + 1j * CUBE)[..., :9]),
    ("fft, along rows", lambda x: jnp.fft.fft(x, axis=0), COMPLEX),
    ("hessenberg", lax.linalg.hessenberg, SQUARE),
    ("householder_product", lax.linalg.householder_product, _normal(4, 8, 4), _normal(4, 4)),
    ("lu", lax.linalg.lu, SQUARE),
    ("lu, of tall matrices", lax.linalg.lu, _normal(4, 16, 8)),
    ("lu, determinant", jnp.linalg.det, SQUARE),
    ("lu, inverse", jnp.linalg.inv, POSITIVE),
    ("lu_pivots_to_permutation", lambda p: lax.linalg.lu_pivots_to_permutation(p, 8),
     np.broadcast_to(np.arange(4, dtype=np.int32), (2, 4))),
    ("ormqr", lax.linalg.ormqr, _normal(4, 8, 8), _normal(4, 8), _normal(4, 8, 2)),
    ("qr", jnp.linalg.qr, _normal(4, 16, 8)),
    ("qr, pivoting", lambda x: lax.linalg.qr(x, pivoting=True), SQUARE),
    ("geqrf", lambda x: inner_linalg.geqrf(x), SQUARE),
    ("geqp3", inner_linalg.geqp3, SQUARE, np.zeros((4, 8), np.int32)),
    ("schur", lax.linalg.schur, SQUARE),
    ("svd", jnp.linalg.svd, _normal(4, 16, 8)),
    ("svd, thin", lambda x: jnp.linalg.svd(x, full_matrices=False), _normal(4, 16, 8)),
    ("svd, values only", lambda x: jnp.linalg.svd(x, compute_uv=False), _normal(4, 8, 16)),
    ("symmetric_product", lambda x, y: lax.linalg.symmetric_product(x, y, alpha=2.0, beta=3.0),
     _normal(4, 8, 16), SQUARE),
    ("triangular_solve", _solve(left_side=True, lower=True), LOWER, _normal(4, 8, 16)),
    ("triangular_solve, from the right", _solve(left_side=False, lower=True), LOWER, _normal(4, 16, 8)),
    ("triangular_solve, transposed", _solve(left_side=True, lower=True, transpose_a=True), LOWER[0], _normal(8, 16)),
    ("tridiagonal", lambda x: lax.linalg.tridiagonal(x), POSITIVE),
    ("tridiagonal_solve", lax.linalg.tridiagonal_solve,
     _normal(4, 8), _normal(4, 8) + 4, _normal(4, 8), _normal(4, 8, 2)),
)  # fmt: skip


# Memory: references, tokens, places, layouts.


def _refs(x):
    ref = jax.new_ref(x)
    ref[...] += 1.0
    ref[2:4] = x[:2]
    return ref[...] * 2


def _added_to_ref(x, y):
    ref = jax.new_ref(jnp.zeros_like(x))
    jax.ref.addupdate(ref, (slice(0, 4),), y[:4])
    swapped = jax.ref.swap(ref, (slice(0, 2),), y[:2])
    return jax.ref.freeze(ref), swapped


def _ref_in_scan(x):
    ref = jax.new_ref(jnp.zeros_like(x[0]))

    def step(_, row):
        ref[...] += row
        return None, ref[...]

    return lax.scan(step, None, x)[1]


MEMORY = _table(
    ("addupdate", _added_to_ref, X, Y),
    ("after_all", lambda x: (lax.after_all(lax.create_token(x)), x + 1)[1], X),
    ("create_token", lambda x: (lax.create_token(x), x + 1)[1], X),
    ("dce_sink", lambda x: (lax.dce_sink(jnp.sin(x)), x + 1)[1], X),
    ("device_put", lambda x: jax.device_put(x + 1, jax.memory.Space.Device) * 2, X),
    ("device_put, to the host and back", lambda x: jax.device_put(
        jax.device_put(x + 1, jax.memory.Space.Host), jax.memory.Space.Device) * 2, X),
    ("device_put, of several", lambda x, y: jax.device_put((x, y.T)), X, Y),
    ("get", lambda x: jax.new_ref(x)[2:4], X),
    ("layout_constraint", lambda x: with_layout_constraint(x + 1, Layout((0, 1))), X),
    ("new_ref", _refs, X),
    ("relayout", _bind("relayout", dst_layout=Layout((0, 1))), X),
    ("run_state", lambda x: discharge.run_state(lambda ref: _doubling(ref, ref))(x), X),
    ("swap", _ref_in_scan, X),
)  # fmt: skip


# Randomness.


SEEDS = _integers(1 << 31, 4, dtype=np.uint32)
RANDOMNESS = _table(
    ("iota_2x32_shape", lambda x: (_bind("iota_2x32_shape", shape=(8, 16))(), x), X),
    ("philox2x32", _bind("philox2x32"), SEEDS[0], BITS, BITS2),
    ("philox4x32", _bind("philox4x32"), *SEEDS[:2], BITS, BITS2, BITS, BITS2),
    ("random_bits", lambda k: jax.random.bits(k, (8, 16)), KEY),
    ("random_bits, bytes", lambda k: jax.random.bits(k, (8, 16), np.uint8), KEY),
    ("random_bits, uniform", lambda k: jax.random.uniform(k, (8, 16)), KEY),
    ("random_bits, normal", lambda k: jax.random.normal(k, (8, 16)), KEY),
    ("random_bits, vmapped", jax.vmap(lambda k: jax.random.normal(k, (16,))), KEYS),
    ("random_bits, categorical", lambda k, x: jax.random.categorical(k, x), KEY, X),
    ("random_bits, permutation", lambda k, x: jax.random.permutation(k, x), KEY, X),
    ("random_bits, dropout", lambda k, x: jnp.where(jax.random.bernoulli(k, 0.5, x.shape), x * 2, 0), KEY, X),
    *((f"random_bits, {impl}", lambda k: jax.random.normal(k, (8, 16)), jax.random.key(0, impl=impl))
      for impl in ("philox2x32", "philox4x32", "rbg", "threefry4x32", "unsafe_rbg")),
    ("random_clone", jax.random.clone, KEYS),
    ("random_fold_in", lambda k, x: jax.random.normal(jax.random.fold_in(k, x), (8, 16)), KEY, np.int32(3)),
    ("random_fold_in, vmapped", jax.vmap(jax.random.fold_in), KEYS, np.arange(8, dtype=np.int32)),
    ("random_gamma", lambda k, a: jax.random.gamma(k, a), KEY, UNIT),
    ("random_seed", lambda seed: jax.random.key_data(jax.random.key(seed)), np.uint32(3)),
    ("random_split", lambda k: jax.random.split(k, (4, 2)), KEY),
    ("random_split, carried", lambda k, x: lax.scan(
        lambda k, x: (jax.random.split(k)[0], x + jax.random.normal(k, (16,))), k, x), KEY, X),
    ("random_unwrap", jax.random.key_data, KEYS),
    ("random_wrap", lambda d: jax.random.key_data(jax.random.wrap_key_data(d)), jax.random.key_data(KEYS)),
    ("rng_bit_generator", lambda k: lax.rng_bit_generator(k, (8, 16)), np.arange(4, dtype=np.uint32)),
    ("rng_uniform", lambda low, high: jnp.floor(lax.rng_uniform(low, high, (8, 16))), np.float32(0), np.float32(0.5)),
    ("threefry2x32", lambda k, x: jax.extend.random.threefry_2x32(k, x), jax.random.key_data(KEY), BITS),
    ("threefry4x32", _bind("threefry4x32"), *SEEDS, BITS, BITS2, BITS, BITS2),
)  # fmt: skip


# Reductions.

REDUCTIONS = _table(
    ("argmax", lambda x: jnp.argmax(x, 1), X),
    ("argmax, of all", jnp.argmax, X),
    ("argmin", lambda x: jnp.argmin(x, 0), X),
    *((name, functools.partial(getattr(lax, name), axis=1), UNIT)
      for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")),
    *((f"{name}, reverse", functools.partial(getattr(lax, name), axis=0, reverse=True), UNIT)
      for name in ("cumlogsumexp", "cummax", "cummin", "cumprod", "cumsum")),
    ("cumsum, gradient", jax.grad(lambda x: jnp.sin(jnp.cumsum(x, 1)).sum()), X),
    ("reduce", lambda x: lax.reduce(x, np.float32(0), lambda a, b: a + b * 1, (1,)), X),
    ("reduce, of several", lambda x, y: lax.reduce(
        (x, y), (np.float32(0), np.float32(1)), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)), X, UNIT),
    ("reduce_and", lambda x: jnp.all(x, 1), FLAGS),
    ("reduce_max", lambda x: jnp.max(x, 1), X),
    ("reduce_max, of all", jnp.max, X),
    ("reduce_max, gradient", jax.grad(lambda x: jnp.max(x, 1).sum()), X),
    ("reduce_min", lambda x: jnp.min(x, 0), X),
    ("reduce_or", lambda x: jnp.any(x, 1), FLAGS),
    ("reduce_prod", lambda x: jnp.prod(x, 1), UNIT + 0.5),
    ("reduce_sum", lambda x: jnp.sum(x, 1), X),
    ("reduce_sum, of all", jnp.sum, X),
    ("reduce_sum, of the outer dims", lambda x: jnp.sum(x, (0, 2)), CUBE),
    ("reduce_sum, that keeps the dim", lambda x: jnp.sum(x, 1, keepdims=True) + x, X),
    ("reduce_sum, of bfloat16", lambda x: jnp.sum(x.astype(jnp.bfloat16), 1), X),
    ("reduce_sum, variance", lambda x: (x - x.mean(1, keepdims=True)) / jnp.sqrt(x.var(1, keepdims=True) + 1e-5), X),
    ("reduce_xor", lambda x: lax.reduce_xor(x, (1,)), WHOLE),
)  # fmt: skip


# Sorting.

SORTING = _table(
    ("approx_top_k", lambda x: lax.approx_max_k(x, 4), X),
    ("approx_top_k, of the least along rows", lambda x: lax.approx_min_k(x, 4, reduction_dimension=0), X),
    ("sort", lambda x: jnp.sort(x, 1), X),
    ("sort, along rows", lambda x: lax.sort(x, dimension=0), X),
    ("sort, of several", lambda x, y: lax.sort((x, y), dimension=1, num_keys=1), X, Y),
    ("sort, by two keys", lambda i, j, y: lax.sort((i, j, y), dimension=1, num_keys=2), WHOLE, FLAGS, Y),
    ("sort, argsort", lambda x: jnp.argsort(x, 1), X),
    ("sort, descending", lambda x: jnp.sort(x, 1, descending=True), X),
    ("sort, gradient", jax.grad(lambda x: jnp.sum(jnp.sort(x, 1) ** 3)), X),
    ("sort, median", lambda x: jnp.median(x, 1), X),
    ("sin, searchsorted", lambda x, y: jnp.searchsorted(x, jnp.sin(y), method="sort"), np.sort(VECTOR), X),
    ("top_k", lambda x: lax.top_k(x, 4), X),
    ("top_k, gradient", jax.grad(lambda x: jnp.sum(lax.top_k(x, 4)[0] ** 3)), X),
    ("top_k, routing", lambda x: jax.nn.one_hot(lax.top_k(x, 2)[1], 16), X),
)  # fmt: skip


# Sparse arrays.

DENSE = np.where(X > 0.5, X, np.float32(0))
NONZERO = 64  # room for more than there are


def _bcoo(x: jax.Array) -> sparse.BCOO:
    return sparse.BCOO.fromdense(x, nse=NONZERO)


def _bcsr(x: jax.Array) -> sparse.BCSR:
    return sparse.BCSR.fromdense(x, nse=NONZERO)


def _coo(x: jax.Array) -> sparse.COO:
    return sparse.COO.fromdense(x, nse=NONZERO)


def _csr(x: jax.Array) -> sparse.CSR:
    return sparse.CSR.fromdense(x, nse=NONZERO)


def _sampled(x, y, z):
    return sparse.bcoo_dot_general_sampled(x, y, _bcoo(z).indices, dimension_numbers=(((1,), (1,)), ((), ())))


def _extracted(x, y):
    rows = _bcsr(x)
    return sparse.bcsr_extract(rows.indices, rows.indptr, y)


SPARSE = _table(
    ("bcoo_dot_general", lambda x, y: _bcoo(x) @ y, DENSE, _normal(16, 4)),
    ("bcoo_dot_general, sparsify", lambda x, y: sparse.sparsify(lambda x, y: jnp.sin(x @ y))(_bcoo(x), y),
     DENSE, _normal(16, 4)),
    ("bcoo_dot_general_sampled", _sampled, X, Y, DENSE[:, :8]),
    ("bcoo_extract", lambda x, y: sparse.bcoo_extract(_bcoo(x), y).todense(), DENSE, Y),
    ("bcoo_fromdense", lambda x: _bcoo(x).data, DENSE),
    ("bcoo_sort_indices", lambda x: _bcoo(x).sort_indices().todense(), DENSE),
    ("bcoo_spdot_general", lambda x, y: (_bcoo(x) @ _bcoo(y)).todense(), DENSE, DENSE.T),
    ("bcoo_sum_duplicates", lambda x: _bcoo(x).sum_duplicates(nse=NONZERO).todense(), DENSE),
    ("bcoo_todense", lambda x: _bcoo(x).todense(), DENSE),
    ("bcoo_todense, batched", lambda x: sparse.BCOO.fromdense(x, n_batch=1, nse=16).todense(), DENSE),
    ("bcoo_transpose", lambda x: _bcoo(x).T.todense(), DENSE),
    ("bcsr_dot_general", lambda x, y: _bcsr(x) @ y, DENSE, _normal(16, 4)),
    ("bcsr_extract", _extracted, DENSE, Y),
    ("bcsr_fromdense", lambda x: _bcsr(x).data, DENSE),
    ("bcsr_todense", lambda x: _bcsr(x).todense(), DENSE),
    ("coo_fromdense", lambda x: _coo(x).data, DENSE),
    ("coo_matmat", lambda x, y: _coo(x) @ y, DENSE, _normal(16, 4)),
    ("coo_matvec", lambda x, y: _coo(x) @ y, DENSE, VECTOR),
    ("coo_todense", lambda x: _coo(x).todense(), DENSE),
    ("csr_fromdense", lambda x: _csr(x).data, DENSE),
    ("csr_matmat", lambda x, y: _csr(x) @ y, DENSE, _normal(16, 4)),
    ("csr_matvec", lambda x, y: _csr(x) @ y, DENSE, VECTOR),
    ("csr_todense", lambda x: _csr(x).todense(), DENSE),
    ("spsolve", spsolve,
     np.arange(1, 9, dtype=np.float32), np.arange(8, dtype=np.int32), np.arange(9, dtype=np.int32), VECTOR[:8]),
    ("todense", lambda x: sparse.todense(_bcoo(x)), DENSE),
)  # fmt: skip


# Windows: convolutions and poolings.


def _conv(dims: tuple[str, str, str], strides: tuple = (1, 1), padding: Any = "SAME", **options) -> Callable:
    return lambda x, w: lax.conv_general_dilated(x, w, strides, padding, dimension_numbers=dims, **options)


NHWC, NCHW = ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")
IMAGES, KERNEL = _normal(4, 8, 16, 8), _normal(3, 3, 8, 2, seed=1) / 4


def _gradients(fn: Callable) -> Callable:
    return jax.grad(lambda *args: jnp.sum(jnp.sin(fn(*args))), (0, 1))


def _pool(init: Any, fold: Callable, window: tuple, strides: tuple, padding: Any = "VALID", **options) -> Callable:
    return lambda x: lax.reduce_window(x, np.float32(init), fold, window, strides, padding, **options)


MAX_POOL = _pool(-np.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1))
CONVOLUTIONS = {
    "NHWC": (_conv(NHWC), IMAGES, KERNEL),
    "NCHW": (_conv(NCHW), _normal(4, 8, 16, 8), _normal(2, 8, 3, 3, seed=1) / 4),
    "of points": (_conv(NHWC), IMAGES, _normal(1, 1, 8, 16) / 4),
    "strided": (_conv(NHWC, (2, 2)), IMAGES, KERNEL),
    "valid": (_conv(NHWC, padding="VALID"), IMAGES, KERNEL),
    "patches": (_conv(NHWC, (4, 4), "VALID"), IMAGES, _normal(4, 4, 8, 2) / 4),
    "dilated images": (_conv(NHWC, padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)), IMAGES, KERNEL),
    "dilated kernel": (_conv(NHWC, rhs_dilation=(2, 2)), IMAGES, KERNEL),
    "feature groups": (_conv(NHWC, feature_group_count=2), IMAGES, _normal(3, 3, 4, 16) / 4),
    "depthwise": (_conv(NHWC, feature_group_count=8), IMAGES, _normal(3, 3, 1, 8) / 4),
    "batch groups": (_conv(NHWC, batch_group_count=2), IMAGES, _normal(3, 3, 8, 4) / 4),
    "one dim": (_conv(("NWC", "WIO", "NWC"), (1,)), CUBE, _normal(3, 16, 8) / 4),
    "three dims": (_conv(("NDHWC", "DHWIO", "NDHWC"), (1, 1, 1)), _normal(2, 4, 8, 4, 2), _normal(3, 3, 3, 2, 8) / 4),
}
WINDOWS = _table(
    *((f"conv_general_dilated, {name}", *row) for name, row in CONVOLUTIONS.items()),
    *((f"conv_general_dilated, gradients of {name}", _gradients(fn), *args)
      for name, (fn, *args) in CONVOLUTIONS.items()),
    ("conv_general_dilated, transposed", lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"), IMAGES, KERNEL),
    ("conv_general_dilated, vmapped", jax.vmap(_conv(NHWC), (None, 0)), IMAGES, np.stack([KERNEL, KERNEL + 1])),
    ("conv_general_dilated, vmapped over both", jax.vmap(_conv(NHWC)),
     np.stack([IMAGES, IMAGES + 1]), np.stack([KERNEL, KERNEL + 1])),
    ("reduce_window", _pool(0, lambda x, y: x + y * 1, (1, 2, 2, 1), (1, 2, 2, 1)), IMAGES),
    ("reduce_window_max", MAX_POOL, IMAGES),
    ("reduce_window_max, overlapping", _pool(-np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"), IMAGES),
    ("reduce_window_min", _pool(np.inf, lax.min, (1, 2, 4, 1), (1, 2, 4, 1)), IMAGES),
    ("reduce_window_sum", _pool(0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1)), IMAGES),
    ("reduce_window_sum, running", _pool(0, lax.add, (1, 4), (1, 1), ((0, 0), (3, 0))), X),
    ("reduce_window_sum, dilated", _pool(0, lax.add, (1, 2), (1, 1), "SAME", window_dilation=(1, 2)), X),
    ("reduce_window_sum, gradient", jax.grad(
        lambda x: jnp.sin(_pool(0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1))(x)).sum()), IMAGES),
    ("select_and_gather_add", lambda x, t: jax.jvp(MAX_POOL, (x,), (t,)), _shuffled(4, 8, 16, 8), IMAGES),
    ("select_and_scatter", lambda x, y: windowed_reductions._select_and_scatter(
        x, lax.ge, (1, 2, 2, 1), (1, 2, 2, 1), ((0, 0),) * 4, y, np.float32(0), lax.add),
     _shuffled(4, 8, 16, 8), IMAGES[:, :4, :8]),
    ("select_and_scatter_add", jax.grad(lambda x: MAX_POOL(x).sum()), _shuffled(4, 8, 16, 8)),
)  # fmt: skip


CASES: tuple[Case, ...] = (
    *CALLS,
    *CONTRACTIONS,
    *CONTROL_FLOW,
    *DIMS,
    *EDGES,
    *ELEMENTWISE,
    *HOST,
    *INDEXING,
    *KERNELS,
    *LANES,
    *LINALG,
    *MEMORY,
    *RANDOMNESS,
    *REDUCTIONS,
    *SORTING,
    *SPARSE,
    *WINDOWS,
)


# Programs that name a mesh themselves.

ROWS_OVER_X = P("x")
RING = [(0, 1), (1, 2), (2, 3), (3, 0)]


def mesh_cases(mesh: Mesh) -> tuple[Case, ...]:
    """Programs on `mesh`, whose axis x has four devices and whose axis y has two."""

    def manual(fn: Callable, into: Any = ROWS_OVER_X, out: Any = ROWS_OVER_X, **options: Any) -> Callable:
        return jax.shard_map(fn, mesh=mesh, in_specs=into, out_specs=out, **options)

    def started(name: str, *args: Any, **options: Any) -> Callable:
        return lambda x: getattr(collectives, name)(x, "x", *args, **options).done()

    def cast(to: str) -> Callable:
        return lambda x: lax.pcast(x, "x", to=to)

    def explicit(x: jax.Array) -> jax.Array:
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return jax.sharding.explicit_axes(
                lambda x: jax.sharding.reshard(jnp.sin(x), P("y")), axes=("x", "y"), in_sharding=P("x")
            )(x)

    def mean_loss(w, x):
        def loss(w, x):
            return lax.pmean(jnp.mean(jnp.tanh(x @ w) ** 2), "x")

        return manual(loss, (P(), P("x")), P())(w, x)

    turn = manual(lambda x: lax.ppermute(x, "x", RING))
    split = NamedSharding(mesh, P("x", "y"))
    return _table(
        ("all_gather", manual(lambda x: lax.all_gather(x, "x", tiled=True) * 2), X),
        ("all_gather, stacked", manual(lambda x: lax.all_gather(x, "x", axis=1)), X),
        ("all_gather_done", manual(started("all_gather_start", axis=1)), X),
        ("all_gather_invariant", manual(lambda x: lax.all_gather(x, "x", tiled=True, to="invarying"), out=P()), X),
        ("all_gather_reduced", manual(
            lambda x: cast("varying")(collectives.all_gather_reduced(x, "x", tiled=True))), X),
        ("all_gather_reduced_start", manual(
            lambda x: cast("varying")(started("all_gather_start", tiled=True, to="reduced")(x))), X),
        ("all_gather_start", manual(started("all_gather_start", tiled=True)), X),
        ("all_to_all", manual(lambda x: lax.all_to_all(x, "x", 1, 0, tiled=True), out=P(None, "x")), X),
        *(((name, manual(started("all_to_all_start", *dims, tiled=True)), X)
           for name, dims in (("all_to_all_done", (1, 1)), ("all_to_all_start", (1, 0))))
          if hasattr(lax, "psum_scatter_start") else ()),  # before that, XLA for CPUs cannot compile it
        ("axis_index", manual(lambda x: x * lax.axis_index("x")), X),
        ("global_array_to_host_local_array", lambda x: global_array_to_host_local_array(x, mesh, P("x")), X),
        ("host_local_array_to_global_array", lambda x: host_local_array_to_global_array(x, mesh, P("x")), X),
        ("pmax", manual(lambda x: lax.pmax(x, "x"), out=P()), X),
        ("pmin", manual(lambda x: lax.pmin(x, "x"), out=P()), X),
        ("ppermute", turn, X),
        ("ppermute, in scan", lambda x: lax.scan(lambda x, _: (turn(x) + 1, x), x, None, length=4), X),
        ("ppermute, scan inside", manual(
            lambda x: lax.scan(lambda x, _: (lax.ppermute(x, "x", RING), x.sum()), x, None, length=4)[0]), X),
        ("ppermute_done", manual(started("ppermute_start", [(to, start) for start, to in RING])), X),
        ("ppermute_start", manual(started("ppermute_start", RING)), X),
        ("preduced", manual(lambda x, y: x * cast("varying")(cast("reduced")(y)), (P("x"), P())), X, Y[:2]),
        ("psum", manual(lambda x: lax.psum(x, "x"), out=P(), check_vma=False), X),
        ("psum_done", manual(started("psum_start"), P("y", "x"), P("y")), X),
        ("psum_invariant", manual(lambda x: lax.psum(x, "x"), out=P()), X),
        ("psum_invariant, both axes", manual(lambda x: lax.psum(x, ("x", "y")), P("x", "y"), P()), X),
        ("psum_invariant, gradient", jax.grad(mean_loss, (0, 1)), normal(16, 4), X),
        ("psum_invariant_start", manual(started("psum_start"), out=P()), X),
        ("psum_start", manual(started("psum_start"), out=P(), check_vma=False), X),
        ("pvary", manual(lambda x: x * cast("varying")(jnp.float32(2))), X),
        ("reduce_scatter", manual(lambda x: lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)), X),
        ("reduce_scatter_done", manual(started("psum_scatter_start", tiled=True), P(None, "x")), X),
        *((name, manual(lambda x: cast("varying")(cast("reduced")(x)) * lax.axis_index("x"), P()), X)
          for name in ("reduced_vary_cast", "reduced_vary_cast_p")),  # its names in two releases
        ("reduce_scatter_start", manual(started("psum_scatter_start", scatter_dimension=1, tiled=True)), X),
        ("reshard", explicit, X),
        ("reshard, to nothing", lambda x: jax.sharding.reshard(x, NamedSharding(mesh, P())), X),
        ("shard_map", lambda x: manual(lambda x: x * 2)(jnp.sin(x)) + 1, X),
        ("shard_map, of matmuls", lambda w, x: manual(jnp.dot, (P("x"), P()), P("x"))(x, w) @ w.T, normal(16, 4), X),
        ("shard_map, one manual axis", lambda x: manual(
            lambda x: lax.psum(jnp.sin(x), "x"), out=P(), axis_names={"x"})(x * 2), X),
        ("shard_map, one manual axis of two in the other", lambda x: manual(
            lambda x: x + lax.axis_index("y"), P(None, "y"), P(None, "y"), axis_names={"y"})(x), X),
        ("shard_map, gradient", jax.grad(lambda x: jnp.sum(manual(jnp.sin)(x) ** 2)), X),
        ("shard_map, in scan", lambda x: lax.scan(lambda x, _: (manual(jnp.sin)(x), None), x, None, length=4)[0], X),
        ("sharding_constraint", lambda x: lax.with_sharding_constraint(jnp.sin(x), split) * 2, X),
        ("sharding_constraint, with open dims", lambda x: lax.with_sharding_constraint(
            jnp.sin(x), NamedSharding(mesh, P("x", P.UNCONSTRAINED))) * 2, X),
        ("sharding_constraint, in scan", lambda x: lax.scan(
            lambda c, y: (lax.with_sharding_constraint(c + y, NamedSharding(mesh, P("x"))), c), x[0], x), X),
        ("sharding_constraint, gradient", jax.grad(
            lambda x: jnp.sin(lax.with_sharding_constraint(x * 2, split)).sum()), X),
        ("unreduced_psum", manual(lambda x: collectives.unreduced_psum(cast("unreduced")(x), "x"), out=P()), X),
        ("unreduced_psum_start", manual(lambda x: started("psum_start")(cast("unreduced")(x)), out=P()), X),
        ("unreduced_reduce_scatter", manual(lambda x: collectives.unreduced_psum_scatter(
            cast("unreduced")(x), "x", scatter_dimension=1, tiled=True)), X),
        ("unreduced_reduce_scatter_start", manual(
            lambda x: started("psum_scatter_start", scatter_dimension=1, tiled=True)(cast("unreduced")(x))), X),
        *((name, manual(lambda x: lax.psum(cast("unreduced")(x), "x"), out=P()), X)
          for name in ("vary_unreduced_cast", "vary_unreduced_cast_p")),
    )  # fmt: skip
