"""Attention in which devices trade rows for heads: each has all rows of its ring's stretch, of some heads.

Jacobs et al., "DeepSpeed Ulysses" (2023): one all_to_all per array, before and after. Where there are fewer key heads
than devices, each is sent to several. The heads' axes are the minor ones of the rows, so that what comes together is
one stretch of the sequence; a ring may go on over the other axes (Fang and Zhao, "USP", 2024).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.layout import MeshShape
from autoshard.operations.split import CallSplit
from autoshard.operations.sums import scattered_sum
from autoshard.ops.attending.blocks import Gradients, SoftmaxResiduals
from autoshard.ops.attending.operands import AttentionOperands

ROLE = "heads"


def can_share_out(groups: int, heads: int, count: int) -> bool:
    """Whether so many devices can have heads each.

    Args:
        groups: key heads.
        heads: queries' heads per key head.

    >>> can_share_out(8, 4, 4), can_share_out(2, 4, 8), can_share_out(3, 1, 2)
    (True, True, False)
    """
    return groups % count == 0 or (count % groups == 0 and groups * heads % count == 0)


@dataclass(frozen=True)
class Exchange:
    """How heads of one call are shared out."""

    axes: tuple[str, ...]
    count: int
    index: jax.Array | int
    groups: int  # key heads before
    heads: int  # queries' heads per key head before
    mesh: MeshShape

    @classmethod
    def of(cls, split: CallSplit, call: AttentionOperands) -> Exchange:
        _, _, groups, heads, _ = call.query.shape
        return cls(split.axes(ROLE), split.count(ROLE), split.index(ROLE), groups, heads, split.mesh)

    @property
    def copies(self) -> int:
        """To how many devices each key head goes."""
        return 1 if self.groups % self.count == 0 else self.count // self.groups

    @property
    def groups_after(self) -> int:
        return self.groups * self.copies // self.count

    def queries(self, x: jax.Array) -> jax.Array:
        """``[b, t, g, r, d]``, rows of a stretch, to all rows of the ring's stretch and some heads."""
        b, t, g, r, d = x.shape
        moved = lax.all_to_all(x.reshape(b, t, g * r, d), self.axes, 2, 1, tiled=True)
        return moved.reshape(b, t * self.count, self.groups_after, -1, d)

    def queries_back(self, x: jax.Array) -> jax.Array:
        b, t, g, r, d = x.shape
        moved = lax.all_to_all(x.reshape(b, t, g * r, d), self.axes, 1, 2, tiled=True)
        return moved.reshape(b, t // self.count, self.groups, self.heads, d)

    def statistics(self, x: jax.Array) -> jax.Array:
        """``[b, g, r, t]``, as queries go."""
        return jnp.moveaxis(self.queries(jnp.moveaxis(x, 3, 1)[..., None])[..., 0], 1, 3)

    def statistics_back(self, x: jax.Array) -> jax.Array:
        return jnp.moveaxis(self.queries_back(jnp.moveaxis(x, 3, 1)[..., None])[..., 0], 1, 3)

    def keys(self, x: jax.Array) -> jax.Array:
        """``[b, s, g, d]``, as queries go; heads that several devices need are repeated before."""
        return lax.all_to_all(jnp.repeat(x, self.copies, 2), self.axes, 2, 1, tiled=True)

    def keys_back(self, x: jax.Array) -> jax.Array:
        """Gradients of keys: those of the copies are summed up."""
        back = lax.all_to_all(x, self.axes, 1, 2, tiled=True)
        b, s, _, d = back.shape
        return back.reshape(b, s, self.groups, self.copies, d).sum(3)

    def rows(self, x: jax.Array | None, dim: int) -> jax.Array | None:
        """All rows of the ring's stretch of an array without heads."""
        return None if x is None else lax.all_gather(x, self.axes, axis=dim, tiled=True)

    def of_logits(self, x: jax.Array | None) -> jax.Array | None:
        """``[b, n or 1, t or 1, columns]``: all rows, some heads."""
        if x is None:
            return None
        if x.shape[2] > 1:
            x = self.rows(x, 2)
            assert x is not None
        if x.shape[1] == 1:
            return x
        size = x.shape[1] // self.count
        return lax.dynamic_slice_in_dim(x, self.index * size, size, 1)

    def of_logits_back(self, x: jax.Array | None, like: jax.Array | None) -> jax.Array | None:
        """The gradient of such an array."""
        if x is None or like is None:
            return None
        if like.shape[1] > 1:
            whole = jnp.zeros((x.shape[0], like.shape[1], *x.shape[2:]), x.dtype)
            x = lax.dynamic_update_slice_in_dim(whole, x, self.index * x.shape[1], 1)
        if like.shape[2] > 1:
            return scattered_sum(x, self.axes, 2, self.mesh)
        return lax.psum(x, self.axes)

    def call(self, call: AttentionOperands) -> AttentionOperands:
        """The call on all rows of the ring's stretch and some heads."""
        seeing = call.seeing
        first = seeing.query_positions[0] - self.index * seeing.query_positions.shape[0]
        first_key = seeing.key_positions[0] - self.index * seeing.key_positions.shape[0]
        moved = replace(
            seeing,
            query_positions=first + jnp.arange(call.query.shape[1] * self.count, dtype=jnp.int32),
            key_positions=first_key + jnp.arange(call.key.shape[1] * self.count, dtype=jnp.int32),
            bias=self.of_logits(seeing.bias),
            mask=self.of_logits(seeing.mask),
            query_segments=self.rows(seeing.query_segments, 1),
            key_segments=self.rows(seeing.key_segments, 1),
        )
        key, value = self.keys(call.key), self.keys(call.value)
        return replace(call, query=self.queries(call.query), key=key, value=value, seeing=moved)

    def saved(self, saved: SoftmaxResiduals) -> SoftmaxResiduals:
        m, l, delta = map(self.statistics, (saved.m, saved.l, saved.delta))  # noqa: E741
        return SoftmaxResiduals(m, l, delta, self.queries(saved.cotangent))

    def gradients_back(self, found: Gradients, call: AttentionOperands) -> Gradients:
        """Gradients on all rows and some heads to those of this device's rows; sent in the operands' dtypes."""
        query, key, value = (one.astype(like.dtype) for one, like in zip(found[:3], call.arrays, strict=True))
        bias = self.of_logits_back(found.bias, call.seeing.bias)
        return Gradients(self.queries_back(query), self.keys_back(key), self.keys_back(value), bias)
