"""Arrays laid side by side in one, so that no device has to move what it has of them; and taken apart again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Concatenation:
    """How arrays that differ in at most one dim become one.

    Arrays of one shape are stacked in a new first dim. Others are joined in the dim in which they differ, taken apart
    into `groups` equal runs: run i of the whole is run i of every array. Whatever axes divide `groups` can split the
    joined dim without moving anything, as Megatron-LM lays out the heads of fused queries, keys and values.
    """

    dim: int | None  # in which they differ; None: they are stacked
    groups: int
    sizes: tuple[int, ...]  # of that dim, per array

    @classmethod
    def of(cls, shapes: Sequence[tuple[int, ...]], devices: int) -> Concatenation | None:
        """That of arrays of these shapes on so many devices; None if they differ in several dims.

        >>> Concatenation.of([(8, 12), (8, 4)], devices=2)
        Concatenation(dim=1, groups=2, sizes=(12, 4))
        """
        if len({len(shape) for shape in shapes}) != 1:
            return None
        differing = [dim for dim, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1]
        if len(differing) > 1:
            return None
        if not differing:
            return cls(None, 1, ())
        (dim,) = differing
        sizes = tuple(shape[dim] for shape in shapes)
        return cls(dim, math.gcd(devices, *sizes), sizes)

    def joined(self, arrays: Sequence[Any]) -> Any:
        """The arrays as one: of one dim more than each."""
        if self.dim is None:
            return jnp.stack(arrays)
        return jnp.concatenate([self.in_groups(array) for array in arrays], self.dim + 1)

    def in_groups(self, array: Any) -> Any:
        """One of the arrays, its dim as groups and what is in one."""
        assert self.dim is not None, "stacked arrays have no groups"
        shape = (*array.shape[: self.dim], self.groups, array.shape[self.dim] // self.groups)
        return jnp.reshape(array, (*shape, *array.shape[self.dim + 1 :]))

    def labels(self, labels: Sequence[Any]) -> list[Any]:
        """The labels of the joined array's dims, from those of each array's: `JOINED` is the new one.

        >>> Concatenation.of([(8, 12), (8, 4)], devices=2).labels("ab")
        ['a', 'b', 'joined']
        """
        at = 0 if self.dim is None else self.dim + 1
        return [*labels[:at], JOINED, *labels[at:]]

    def taken_apart(self, array: Any, labels: Sequence[Any], label: Any) -> list[Any]:
        """What each array has made, of an array that the joined one has made.

        Args:
            labels: of its dims.
            label: of the dim in which the arrays differ.
        """
        at = list(labels).index(JOINED)
        if self.dim is None:
            return [jax.lax.index_in_dim(array, i, at, keepdims=False) for i in range(array.shape[at])]
        assert list(labels).index(label) + 1 == at, "the two stay together"
        found, start = list[Any](), 0
        for size in self.sizes:
            stop = start + size // self.groups
            part = jax.lax.slice_in_dim(array, start, stop, axis=at)
            found.append(jnp.reshape(part, (*array.shape[: at - 1], size, *array.shape[at + 1 :])))
            start = stop
        return found


JOINED = "joined"
