"""`autoshard.ops.fft`: Fourier transforms of one to three dims, and plain ones of a program recognised as such."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import checks_kinds
from autoshard.operations.operation import Operation
from autoshard.operations.primitive import OPERATION
from autoshard.ops.fourier.implementations import add_implementations
from autoshard.ops.fourier.transform import Transform
from autoshard.ops.operands import arrays_of
from autoshard.program import Equation, Program
from autoshard.propagation.rule import Rule, Shape

MOST_DIMS = 3  # of one transform, as XLA has it


@checks_kinds("axes", "inverse", "real", "length")
def fft(
    x: Any, axes: int | Sequence[int] = (-1,), *, inverse: bool = False, real: bool = False, length: int | None = None
) -> jax.Array:
    """A Fourier transform with the numbers of `jax.numpy.fft`, whose dims a plan may split.

    Under autoshard, the planner splits what is not transformed, or trades split dims by all_to_alls, as is predicted to
    be fastest. Without autoshard it is plain JAX.

    Args:
        x: real or complex, of any rank.
        axes: the one to three dims that are transformed; a real transform has half of the last of them.
        inverse: whether it is the inverse, which divides by the number of points.
        real: whether the numbers before (for the inverse, after) are real: `rfftn` and `irfftn`.
        length: of the last of `axes` after an inverse real transform; by default the even one.

    Returns:
        What `jnp.fft.fftn`, `ifftn`, `rfftn` or `irfftn` returns for these axes.

    Raises:
        ArgumentError: more than three axes, an axis that is not there or is there twice, or a length of another
            transform or of less than 1.

    >>> fft(jnp.ones(4), real=True).shape
    (3,)
    """
    [x] = arrays_of(x=x)
    given_axes = list(map(operator.index, np.atleast_1d(axes)))
    if not all(-x.ndim <= axis < x.ndim for axis in given_axes):
        raise ArgumentError(f"fft along axes {given_axes} of an array of shape {x.shape}: there is no such axis")
    places = [axis % x.ndim for axis in given_axes]
    if not 1 <= len(places) <= MOST_DIMS or len(set(places)) < len(places):
        raise ArgumentError(f"fft takes one to {MOST_DIMS} different axes, not {given_axes}")
    if length is not None and not (inverse and real):
        raise ArgumentError(
            "length= is of an inverse real transform, whose numbers do not tell how many they come from"
        )
    if length is not None and length < 1:
        raise ArgumentError(f"length={length} of an inverse real transform: 1 or more is needed")
    kind = "I" * inverse + "R" * real + "FFT"
    if real and not inverse and jnp.issubdtype(x.dtype, jnp.complexfloating):
        raise ArgumentError(f"a real transform takes real numbers, not {x.dtype}: leave out real=True")
    x = x.astype(_dtype(x.dtype, is_real=real and not inverse))
    last = range(x.ndim - len(places), x.ndim)
    moved = jnp.moveaxis(x, places, last)
    lengths = list(moved.shape[x.ndim - len(places) :])
    if inverse and real:
        lengths[-1] = 2 * (lengths[-1] - 1) if length is None else length
        moved = _of_length(moved, lengths[-1] // 2 + 1)
    made: jax.Array = fft_operation(Transform(kind, tuple(lengths)))(moved)
    return jnp.moveaxis(made, last, places)


def _of_length(x: jax.Array, count: int) -> jax.Array:
    """The first so many numbers along the last dim, with zeros behind them if there are fewer."""
    x = lax.slice_in_dim(x, 0, min(count, x.shape[-1]), axis=-1)
    return jnp.pad(x, [*[(0, 0)] * (x.ndim - 1), (0, count - x.shape[-1])])


def _dtype(dtype: Any, *, is_real: bool) -> Any:
    is_double = dtype == jnp.float64 or dtype == jnp.complex128
    if is_real:
        return jnp.float64 if is_double else jnp.float32
    return jnp.complex128 if is_double else jnp.complex64


@functools.lru_cache(maxsize=256)
def fft_operation(transform: Transform) -> Operation:
    """The operation of one transform of the last dims of an array."""

    def rule_of(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
        return transform.rule(tuple(map(tuple, operands)), tuple(map(tuple, results)))

    operation = Operation("fft", functools.wraps(fft)(lambda x: transform.whole(x)), rule_of, identity=str(transform))
    add_implementations(operation, transform)
    return operation


# Plain transforms.


def with_transforms(program: Program, mesh: Mapping[str, int]) -> Program:
    """`program` with its plain transforms as operations, where batches cannot take all axes of the mesh.

    Where they can, each device transforms its part of a batch, which no exchange of rows beats.
    """
    found = [
        _as_operation(equation) if equation.primitive == "fft" and not _has_batch(equation, mesh) else equation
        for equation in program.equations
    ]
    changed = any(one is not other for one, other in zip(found, program.equations, strict=True))
    return replace(program, equations=tuple(found)) if changed else program


def _has_batch(equation: Equation, mesh: Mapping[str, int]) -> bool:
    """Whether the dims that are not transformed can take all axes of a mesh."""
    transformed = len(equation.params["fft_lengths"])
    sizes = equation.inputs[0].shape[: len(equation.inputs[0].shape) - transformed]
    axes = [count for count in mesh.values() if count > 1]
    for places in itertools.product(range(len(sizes)), repeat=len(axes)):
        left = list(sizes)
        for place, count in zip(places, axes, strict=True):
            left[place] = left[place] // count if left[place] % count == 0 else 0
        if all(left):
            return True
    return not axes


def _as_operation(equation: Equation) -> Equation:
    params = equation.params
    name = getattr(params["fft_type"], "name", str(params["fft_type"])).upper()
    operation = fft_operation(Transform(name, tuple(params["fft_lengths"])))
    keywords = {"operation": operation, "static": (), "batched": (), "precision": None}
    return replace(equation, primitive=OPERATION, params=keywords)
