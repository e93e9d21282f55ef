"""A function of arrays in, its results out, which XLA does not compute before all of the arrays are there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard.jaxprs import JaxprEqn, evaluated


def behind_barrier(fn: Callable[..., list[Any]], arrays: Sequence[Any], at: JaxprEqn) -> list[Any]:
    """What `fn` makes of the arrays, as JAX lowers a `jax.checkpoint` in a backward pass.

    Args:
        arrays: all different; those that `fn` does not read are waited for, too.
        at: an equation whose line the call has.
    """
    made = jax.make_jaxpr(jax.checkpoint(fn))(*arrays)
    (call,) = made.jaxpr.eqns
    # JAX puts a barrier before a checkpoint of a backward pass alone, which only differentiation makes.
    call = call.replace(params={**call.params, "differentiated": True}, source_info=at.source_info)
    return evaluated([call], dict(zip(made.jaxpr.invars, arrays, strict=True)), call.outvars)
