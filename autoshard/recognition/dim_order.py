"""Arrays of products in the order that operations take, and back. Dims are moved and merged; no number changes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autoshard.recognition.small_arrays import Roles

Groups = Sequence[tuple[str, ...]]  # per dim of the operation, the roles that it is the product of


def arranged(x: jax.Array, roles: Roles, groups: Groups, true: Mapping[str, int]) -> jax.Array:
    """An array with one dim per group. A group of which it lacks all roles has one element; of some, it is repeated."""
    here = [role for dim in roles for role in dim]
    apart = x.reshape([true[role] for role in here])
    wanted = [role for group in groups for role in group]
    there = [role for role in wanted if role in here]
    moved = apart.transpose([here.index(role) for role in there])
    is_whole = [bool(set(group) & set(here)) for group in groups]
    missing = {role for group, whole in zip(groups, is_whole, strict=True) if whole for role in group} - set(here)
    spread = [role for role in wanted if role in here or role in missing]
    if missing:
        shape = [true[role] for role in spread]
        dims = [i for i, role in enumerate(spread) if role in here]
        moved = jax.lax.broadcast_in_dim(moved, shape, dims)
    sizes = [math.prod(true[r] for r in group) if whole else 1 for group, whole in zip(groups, is_whole, strict=True)]
    return moved.reshape(sizes)


def put_back(x: jax.Array, groups: Groups, roles: Roles, like: Any, true: Mapping[str, int]) -> jax.Array:
    """The way back: an array with these roles per dim, of the shape and dtype of another."""
    wanted = [role for group in groups for role in group]
    apart = x.reshape([true[role] for role in wanted])
    order = [role for dim in roles for role in dim]
    single = [i for i, role in enumerate(wanted) if role not in order]  # dims of one element
    moved = apart.transpose([*single, *(wanted.index(role) for role in order)])
    return moved.reshape(like.shape).astype(like.dtype)


def combined(arrays: Sequence[jax.Array], together: Any) -> jax.Array | None:
    """All arrays by one function of two; None if there is none."""
    found: jax.Array | None = None
    for array in arrays:
        found = array if found is None else together(found, array)
    return None if found is None else jnp.asarray(found)
