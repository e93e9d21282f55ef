"""What a Fourier transform is, as data: the kind of each of its dims, and the order in which these are transformed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.propagation.rule import Dims, Rule, Shape

_OF_COMPLEX = {"FFT": "FFT", "IFFT": "IFFT", "RFFT": "FFT", "IRFFT": "IFFT"}


@dataclass(frozen=True)
class Transform:
    """A Fourier transform of the last dims of an array.

    A real transform has complex ones along all dims but the last. It begins with the last dim; its inverse ends there.
    """

    kind: str  # "FFT", "IFFT", "RFFT" or "IRFFT"
    lengths: tuple[int, ...]  # of the transformed dims; of the real side of a real transform

    @property
    def rank(self) -> int:
        return len(self.lengths)

    def kind_of(self, dim: int) -> str:
        """The kind of the transform along one of the transformed dims."""
        return self.kind if dim == self.rank - 1 else _OF_COMPLEX[self.kind]

    @property
    def first(self) -> int | None:
        """The dim that has to be transformed before all others, if there is one."""
        return self.rank - 1 if self.kind == "RFFT" else None

    @property
    def last(self) -> int | None:
        """The dim that has to be transformed after all others, if there is one."""
        return self.rank - 1 if self.kind == "IRFFT" else None

    def whole(self, x: Any) -> jax.Array:
        """The transform of whole dims."""
        return lax.fft(x, self.kind, self.lengths)

    def along(self, x: Any, dim: int) -> jax.Array:
        """The transform along one of the transformed dims, which is whole."""
        place = x.ndim - self.rank + dim
        made = lax.fft(jnp.moveaxis(x, place, -1), self.kind_of(dim), (self.lengths[dim],))
        return jnp.moveaxis(made, -1, place)

    def along_all(self, x: Any, dims: list[int]) -> jax.Array:
        """The transforms along some dims, which are whole, in an order that the kind allows."""
        inner = [dim for dim in dims if dim not in (self.first, self.last)]
        if self.first in dims:
            x = self.along(x, self.rank - 1)
        for dim in reversed(inner):
            x = self.along(x, dim)
        return self.along(x, self.rank - 1) if self.last in dims else x

    def rule(self, operands: tuple[Shape, ...], results: tuple[Shape, ...]) -> Rule:
        """`b i j -> b k l`: only batches may be split without a word to other devices."""
        (shape,), (made,) = operands, results
        batch = len(shape) - self.rank
        shared = [f"b{dim}" for dim in range(batch)]
        reads = [*shared, *(before(dim) for dim in range(self.rank))]
        leaves = [*shared, *(after(dim) for dim in range(self.rank))]
        sizes = dict(zip(reads, shape, strict=True)) | dict(zip(leaves, made, strict=True))
        whole = frozenset(reads[batch:] + leaves[batch:])
        return Rule((_dims(reads),), (_dims(leaves),), sizes, frozenset(), whole, frozenset())

    def __str__(self) -> str:
        return f"{self.kind} {' x '.join(map(str, self.lengths))}"


def before(dim: int) -> str:
    """The factor of a transformed dim of the operand."""
    return f"x{dim}"


def after(dim: int) -> str:
    """The factor of a transformed dim of the result."""
    return f"k{dim}"


def _dims(names: list[str]) -> Dims:
    return tuple((name,) for name in names)


def twiddles(rows: jax.Array, columns: jax.Array, length: int, *, inverse: bool, dtype: Any) -> jax.Array:
    """``exp(-2 pi i row column / length)``, and its conjugate for an inverse transform.

    Args:
        rows, columns: int32, of which no product reaches `length`.
        length: of the transform, below 2**31.
        dtype: complex.
    """
    real = jnp.finfo(dtype).dtype
    turns = (rows[:, None] * columns[None, :]).astype(real) / length
    angle = (2 if inverse else -2) * math.pi * turns
    return lax.complex(jnp.cos(angle), jnp.sin(angle)).astype(dtype)
