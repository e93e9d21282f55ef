"""What a user gives an operation as arrays in, arrays of JAX out."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from autoshard.errors import ArgumentError


def arrays_of(**operands: Any) -> list[jax.Array]:
    """The operands, by name.

    >>> arrays_of(lhs=[1.0, 2.0])[0].shape
    (2,)

    Raises:
        ArgumentError: one is no array, and nothing that JAX makes one of.
    """
    return [_array(name, operand) for name, operand in operands.items()]


def _array(name: str, operand: Any) -> jax.Array:
    try:
        return jnp.asarray(operand)
    except (TypeError, ValueError, OverflowError) as error:
        raise ArgumentError(f"{name} is a {type(operand).__name__}; an array is needed: {error}") from error
