"""Random programs on grids: what shifts an array against itself in the ways that users write."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Move = Callable[[Any], Any]  # of a grid, to one of the same shape


def roll(rng: random.Random, dims: int) -> Move:
    axis, by = rng.randrange(dims), rng.choice([-3, -2, -1, 1, 2])
    return lambda u: jnp.roll(u, by, axis)


def roll_all(rng: random.Random, dims: int) -> Move:
    by = tuple(rng.choice([-1, 1]) for _ in range(dims))
    return lambda u: jnp.roll(u, by, tuple(range(dims)))


def neighbours(rng: random.Random, dims: int) -> Move:
    """The weighted sum of all neighbours in a padded array."""
    mode, width = rng.choice(["constant", "wrap", "edge", "reflect"]), rng.choice([1, 1, 2])
    offsets = [tuple(rng.randint(0, 2 * width) for _ in range(dims)) for _ in range(3)]

    def move(u):
        padded = jnp.pad(u, width, mode=mode)
        cut = [tuple(slice(o, o + n) for o, n in zip(one, u.shape, strict=True)) for one in offsets]
        return sum((i + 2) * padded[one] for i, one in enumerate(cut))

    return move


def gradient(rng: random.Random, dims: int) -> Move:
    axis = rng.randrange(dims)
    return lambda u: jnp.gradient(u, axis=axis)


def difference(rng: random.Random, dims: int) -> Move:
    axis = rng.randrange(dims)
    return lambda u: jnp.diff(u, axis=axis, prepend=0.5)


def shift(rng: random.Random, dims: int) -> Move:
    """What moves in from outside is a row of numbers."""
    axis, by = rng.randrange(dims), rng.choice([1, 2])

    def move(u):
        rows = jnp.full((*u.shape[:axis], by, *u.shape[axis + 1 :]), 0.25)
        kept = jax.lax.slice_in_dim(u, 0, u.shape[axis] - by, axis=axis)
        return jnp.concatenate([rows, kept], axis)

    return move


def boundary(rng: random.Random, dims: int) -> Move:
    """The interior is computed, the boundary copied."""
    axis = rng.randrange(dims)

    def move(u):
        def rows(first, last):
            return jax.lax.slice_in_dim(u, first, u.shape[axis] + last, axis=axis)

        inside = jnp.tanh(rows(2, 0)) - rows(1, -1) * rows(0, -2)
        return jnp.concatenate([rows(0, 1 - u.shape[axis]), inside, rows(u.shape[axis] - 1, 0)], axis)

    return move


def interior(rng: random.Random, dims: int) -> Move:
    """The interior is updated in place."""
    axis, adds = rng.randrange(dims), rng.random() < 0.5
    inner = (slice(None),) * axis + (slice(1, -1),)

    def move(u):
        def rows(first, last):
            return jax.lax.slice_in_dim(u, first, u.shape[axis] + last, axis=axis)

        made = rows(2, 0) - 2 * rows(1, -1) + rows(0, -2)
        return u.at[inner].add(0.1 * made) if adds else u.at[inner].set(made)

    return move


def edited(rng: random.Random, dims: int) -> Move:
    """One element at an edge is updated by a number, in an array that is padded along all dims but the one it rolls."""
    axis, by, adds = rng.randrange(dims), rng.choice([-2, -1, 1]), rng.random() < 0.5
    at = tuple((0 if by < 0 else -1) if dim == axis else 3 for dim in range(dims))

    def move(u):
        padded = jnp.pad(u, [(int(dim != axis),) * 2 for dim in range(dims)])
        made = padded.at[at].add(7.0) if adds else padded.at[at].set(7.0)
        return jax.lax.slice(jnp.roll(made, by, axis), [0] * dims, u.shape)

    return move


def convolution(rng: random.Random, dims: int) -> Move:
    window = tuple(rng.choice([1, 2, 3]) for _ in range(dims))
    kernel = jnp.cos(jnp.arange(float(jnp.prod(jnp.array(window))))).reshape(1, 1, *window)
    return lambda u: jax.lax.conv_general_dilated(u[None, None], kernel, (1,) * dims, "SAME")[0, 0]


def pooling(rng: random.Random, dims: int) -> Move:
    window, largest = tuple(rng.choice([1, 2, 3]) for _ in range(dims)), rng.random() < 0.5
    fold, start = (jax.lax.max, -jnp.inf) if largest else (jax.lax.add, 0.0)
    return lambda u: jax.lax.reduce_window(u, start, fold, window, (1,) * dims, "SAME")


MOVES = (roll, roll_all, neighbours, gradient, difference, shift, boundary, interior, edited, convolution, pooling)


def program(seed: int) -> tuple[str, Callable, tuple[int, ...]]:
    """A program on one grid, the names of its moves, and the grid's shape."""
    rng = random.Random(seed)
    dims = rng.choice([1, 2, 2, 3])
    shape = tuple(rng.choice([64, 128] if i == 0 else [16, 32, 64]) for i in range(dims))
    shape = shape[:2] + tuple(min(size, 16) for size in shape[2:])
    kinds = rng.sample(MOVES, 2)
    moves = [kind(rng, dims) for kind in kinds]
    form = rng.choice(["once", "loop", "gradient", "gradient"])

    def once(u):
        return u + 0.1 * sum(move(u) for move in moves)

    def loop(u):
        return jax.lax.fori_loop(0, 3, lambda i, x: 0.5 * once(x), u)

    run = {"once": once, "loop": loop, "gradient": jax.grad(lambda u: jnp.sin(once(u)).sum())}[form]
    return f"{seed} {form}: {' + '.join(kind.__name__ for kind in kinds)} {shape}", run, shape
