"""Distributed Fourier transforms: pencils and slabs of several dims, and one long dim in six steps.

=========  ============================================================================================================
`kept`     dims are split before and after. Each is gathered by an all_to_all against another dim, transformed and
           given back (the pencil decomposition: Pippig, "PFFT", SIAM J. Sci. Comput. 35(3), 2013)
`traded`   one dim is split before and another after: half the all_to_alls, as transposed orders of FFTW-MPI have
`sixstep`  one dim alone: transforms of its rows and its columns with twiddle factors between (Bailey, "FFTs in external
           or hierarchical memory", J. Supercomputing 4, 1990), and three all_to_alls
=========  ============================================================================================================

Dims that devices do not divide, as the 129 frequencies of 256 real numbers, are padded while they are traded.
"""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.operations.operation import Implementation, Operation
from autoshard.operations.split import Axes, CallSplit
from autoshard.ops.fourier.transform import Transform, after, before, twiddles

MOST_SPLIT = 2  # dims: a slab or a pencil


def implementations(transform: Transform) -> list[Implementation]:
    """Every way to compute a transform along split dims."""
    dims = range(transform.rank)
    apart = [dim for dim in dims if dim not in (transform.first, transform.last)]
    found = [
        _kept(transform, some)
        for count in range(1, MOST_SPLIT + 1)
        for some in itertools.combinations(apart, count)
        if transform.rank > 1
    ]
    if transform.last is None:
        found += [_traded(transform, one, other) for one in apart for other in dims if one != other]
    if transform.rank == 1 and apart:
        found.append(_six_steps(transform))
    return found


def _kept(transform: Transform, some: tuple[int, ...]) -> Implementation:
    roles = {f"rows{dim}": (before(dim), after(dim)) for dim in some}
    local_dims = [dim for dim in range(transform.rank) if dim not in some]

    def local(split: CallSplit, x: Any) -> jax.Array:
        ahead = [dim for dim in local_dims if dim != transform.last]
        x = transform.along_all(x, ahead)
        for dim in some:
            x = _exchanged(transform, x, dim, split.axes(f"rows{dim}"), split.count(f"rows{dim}"))
        return transform.along_all(x, [dim for dim in local_dims if dim not in ahead])

    def where(split: CallSplit) -> bool:
        return all(split.count(role) > 1 for role in roles)

    return Implementation("kept" + "".join(map(str, some)), local, roles, where)


def _exchanged(transform: Transform, x: Any, dim: int, axes: Axes, pieces: int) -> jax.Array:
    """The transform along a split dim, which is split again after: rows come together, and part."""
    place = x.ndim - transform.rank + dim
    partner = max((i for i in range(x.ndim) if i != place), key=lambda i: x.shape[i])
    size = x.shape[partner]
    x = _padded(x, partner, pieces)
    x = lax.all_to_all(x, axes, split_axis=partner, concat_axis=place, tiled=True)
    x = transform.along(x, dim)
    x = lax.all_to_all(x, axes, split_axis=place, concat_axis=partner, tiled=True)
    return lax.slice_in_dim(x, 0, size, axis=partner)


def _padded(x: Any, dim: int, pieces: int) -> jax.Array:
    more = -x.shape[dim] % pieces
    return jnp.pad(x, [(0, more * (i == dim)) for i in range(x.ndim)]) if more else x


def _traded(transform: Transform, one: int, other: int) -> Implementation:
    def local(split: CallSplit, x: Any) -> jax.Array:
        x = transform.along_all(x, [dim for dim in range(transform.rank) if dim != one])
        batch = x.ndim - transform.rank
        x = lax.all_to_all(x, split.axes("trade"), split_axis=batch + other, concat_axis=batch + one, tiled=True)
        return transform.along(x, one)

    return Implementation(f"traded{one}{other}", local, {"trade": (before(one), after(other))})


def _six_steps(transform: Transform) -> Implementation:
    """One dim of ``N = n M`` points on n devices: ``j = j1 M + j2`` before, ``k = k1 + n k2`` after."""
    (length,) = transform.lengths
    inverse = transform.kind == "IFFT"

    def where(split: CallSplit) -> bool:
        return length % split.count("points") ** 2 == 0 and length < 2**31

    def local(split: CallSplit, x: Any) -> jax.Array:
        axes, n = split.axes("points"), split.count("points")
        batch, each = x.shape[:-1], x.shape[-1] // n
        place = len(batch)

        def exchanged(x: jax.Array) -> jax.Array:
            return lax.all_to_all(x, axes, split_axis=place, concat_axis=place, tiled=True)

        columns = exchanged(x.reshape(*batch, n, each))  # j1, and some j2
        columns = jnp.moveaxis(lax.fft(jnp.moveaxis(columns, -2, -1), transform.kind, (n,)), -1, -2)
        first = split.index("points") * each
        here = jnp.arange(each, dtype=jnp.int32) + first
        turned = twiddles(jnp.arange(n, dtype=jnp.int32), here, length, inverse=inverse, dtype=x.dtype)
        columns = columns * jnp.expand_dims(turned, range(place))
        rows = exchanged(columns).reshape(*batch, n * each)  # one k1, and every j2
        rows = lax.fft(rows, transform.kind, (n * each,))
        made = exchanged(rows.reshape(*batch, n, each))  # k1, and some k2
        return jnp.moveaxis(made, -2, -1).reshape(*batch, n * each)

    return Implementation("sixstep", local, {"points": (before(0), after(0))}, where)


def add_implementations(operation: Operation, transform: Transform) -> None:
    operation.implementations += implementations(transform)
