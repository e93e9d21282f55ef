"""The arrays of one attention call by name, the same whole and on one device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.operations.sums import wide
from autoshard.ops.attending.blocks import (
    Blocks,
    Gradients,
    Softmax,
    SoftmaxResiduals,
    Visibility,
    swept,
    swept_back,
)


@dataclass(frozen=True)
class AttentionVariant:
    """Which arrays a call has beside queries, keys and values, and what it says of visibility. Static."""

    bias: tuple[bool, ...] = ()  # per dim, whether it has more than one element; () without a bias
    mask: tuple[bool, ...] = ()
    has_segments: bool = False
    same_segments: bool = False  # whether queries and keys are the same tokens
    has_lengths: bool = False
    is_causal: bool = False
    window: tuple[int, int] | None = None
    scale: float = 1.0

    @property
    def sees_itself(self) -> bool:
        """Whether each query sees the key at its place, so that blocks without a seen key can be left out."""
        aside = self.window is None or min(self.window) >= 0
        return aside and not self.mask and not self.has_lengths and (self.same_segments or not self.has_segments)

    @property
    def is_plainly_causal(self) -> bool:
        """Whether causal order, and segments of the same tokens, are all that decides."""
        return self.is_causal and self.sees_itself and self.window is None and not self.bias

    def notation(self) -> tuple[str, str, str]:
        """Rule of the operands, rule of the results, and the factors that stay whole."""

        def of_logits(wide: Sequence[bool], rows: str) -> str:
            names = ("b", "(g r)", rows, "c")
            return " ".join(name if flag else "1" for name, flag in zip(names, wide, strict=True))

        operands = ["b q (g r) d", "b k g d", "b k g v"]
        operands += [of_logits(wide, "q") for wide in (self.bias, self.mask) if wide]
        operands += ["b q", "b k"] * self.has_segments + ["b"] * self.has_lengths + ["q", "k"]
        columns = " c" * any(wide and wide[3] for wide in (self.bias, self.mask))
        return ", ".join(operands), "b q (g r) v, p b (g r) q", f"k d v p{columns}"


@dataclass(frozen=True)
class AttentionOperands:
    """The operands of one call on one device."""

    query: jax.Array  # [b, t, g, r, d]
    key: jax.Array  # [b, s, g, d]
    value: jax.Array
    seeing: Visibility
    variant: AttentionVariant

    @classmethod
    def of(cls, variant: AttentionVariant, query: Any, key: Any, value: Any, *others: Any) -> AttentionOperands:
        rest = list(others)
        bias = rest.pop(0) if variant.bias else None
        mask = rest.pop(0) if variant.mask else None
        of_queries, of_keys = (rest.pop(0), rest.pop(0)) if variant.has_segments else (None, None)
        lengths = rest.pop(0) if variant.has_lengths else None
        query_positions, key_positions = rest
        seeing = Visibility(
            query_positions,
            key_positions,
            bias,
            mask,
            of_queries,
            of_keys,
            lengths,
            variant.is_causal,
            variant.window,
        )
        return cls(by_groups(query, key.shape[2]), key, value, seeing, variant)

    def blocks(self, *, whole: bool) -> Blocks:
        """Which blocks are computed.

        Args:
            whole: whether the device has the whole sequence, so that places tell what is seen.
        """
        t, s = self.query.shape[1], self.key.shape[1]
        if not whole or t != s or not self.variant.sees_itself:
            return Blocks.of(self.query, self.key)
        if not self.variant.is_causal and self.variant.window is None:
            return Blocks.of(self.query, self.key)
        return Blocks.of(self.query, self.key, self._meets)

    def _meets(self, rows: tuple[int, int], keys: tuple[int, int]) -> bool:
        back, ahead = self.variant.window or (keys[1] + rows[1], keys[1] + rows[1])
        if self.variant.is_causal:
            ahead = 0
        return keys[1] - 1 >= rows[0] - back and keys[0] <= rows[1] - 1 + ahead

    def forward(self, *, whole: bool) -> Softmax:
        empty = Softmax.empty(self.query, self.value)
        return swept(empty, *self.arrays, self.seeing, scale=self.variant.scale, blocks=self.blocks(whole=whole))

    def backward(self, saved: SoftmaxResiduals, *, whole: bool) -> Gradients:
        return swept_back(
            self.no_gradients,
            *self.arrays,
            saved,
            self.seeing,
            scale=self.variant.scale,
            blocks=self.blocks(whole=whole),
        )

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        return self.query, self.key, self.value

    @property
    def no_gradients(self) -> Gradients:
        query, key, value = (jnp.zeros(x.shape, wide(self.query)) for x in self.arrays)
        bias = self.seeing.bias
        return Gradients(query, key, value, None if bias is None else jnp.zeros(bias.shape, wide(self.query)))

    def rows(self, start: int, size: int) -> AttentionOperands:
        """Some of its queries."""
        query = lax.slice_in_dim(self.query, start, start + size, axis=1)
        return replace(self, query=query, seeing=self.seeing.rows(start, size))

    def keys(self, start: int, size: int) -> AttentionOperands:
        """Some of its keys."""
        key, value = (lax.slice_in_dim(x, start, start + size, axis=1) for x in (self.key, self.value))
        return replace(self, key=key, value=value, seeing=self.seeing.keys(start, size))


def by_groups(x: jax.Array, groups: int) -> jax.Array:
    """Heads ``[b, t, n, d]`` as groups that share a key head: ``[b, t, g, r, d]``."""
    b, t, n, d = x.shape
    return x.reshape(b, t, groups, n // groups, d)


class QueryRows(NamedTuple):
    """What is known of a device's queries once they have met all keys."""

    output: jax.Array  # [b, t, g, r, v], in the dtype of the queries
    m: jax.Array
    l: jax.Array  # noqa: E741

    @classmethod
    def of(cls, softmax: Softmax, query: Any) -> QueryRows:
        return cls(softmax.output.astype(query.dtype), softmax.m, softmax.l)

    @property
    def results(self) -> tuple[jax.Array, jax.Array]:
        """What the operation returns: the output by heads, and ``m`` and ``l`` of each row as ``[2, b, n, t]``."""
        b, t, g, r, v = self.output.shape
        return self.output.reshape(b, t, g * r, v), jnp.stack([self.m, self.l]).reshape(2, b, g * r, t)


def saved_of(output: Any, statistics: Any, cotangent: Any, of_statistics: Any, groups: int) -> SoftmaxResiduals:
    """What the backward pass knows of rows.

    Statistics have a cotangent in second derivatives. That of `l` reaches a logit as ``l`` times its weight; `m` is a
    constant.
    """
    two, b, n, t = statistics.shape
    m, l = statistics.reshape(two, b, groups, n // groups, t)  # noqa: E741
    made, of_made = (by_groups(x, groups).astype(wide(output)) for x in (output, cotangent))
    rows = (0, 2, 3, 1)
    delta = lax.dot_general(made, of_made, (((4,), (4,)), (rows, rows)), preferred_element_type=wide(output))
    delta = lax.sub(delta, lax.mul(l, of_statistics[1].reshape(l.shape)))
    return SoftmaxResiduals(m, l, delta, by_groups(cotangent, groups))


def gradients_like(found: Gradients, operands: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Gradients as the operation returns them: in the shapes and dtypes of the operands, a bias the fourth."""
    pairs = zip(found, operands, strict=False)
    return tuple(one.reshape(like.shape).astype(like.dtype) for one, like in pairs if one is not None)
