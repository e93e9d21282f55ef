"""How jaxprs are taken apart and run again: the only file that knows `jax.extend`.

Parameters of primitives differ between JAX releases; what reads them in more than one place is here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import api_util
from jax.extend import core

ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var = core.ClosedJaxpr, core.Jaxpr, core.JaxprEqn, core.Literal, core.Var

REMAT = frozenset({"checkpoint", "remat", "remat2"})
CUSTOM = frozenset({"custom_jvp_call", "custom_vjp_call"})


def called_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that a call equation runs exactly once; None for everything else."""
    params, name = eqn.params, eqn.primitive.name
    if name in ("jit", "pjit"):
        return params["jaxpr"]
    if name in ("closed_call", "eval_jaxpr") or name in CUSTOM:
        return params["call_jaxpr"]
    if name in REMAT:
        inner = params["jaxpr"]
        return inner if isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())
    return None


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carries.

    Read off the ranks, since the parameter that holds them differs between JAX releases: stacked operands and results
    have one dim more outside than inside.
    """
    inside = eqn.params["jaxpr"].jaxpr
    carries = sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(eqn.outvars, inside.outvars, strict=True))
    whole = sum(outer.aval.ndim == inner.aval.ndim for outer, inner in zip(eqn.invars, inside.invars, strict=True))
    return whole - carries, carries


def run(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The equation applied to other operands of the same types, whatever functions its parameters hold."""
    if not any(True for _ in core.jaxprs_in_params(eqn.params)) and eqn.primitive.name not in CUSTOM:
        results = eqn.primitive.bind(*operands, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]
    # A jaxpr of this one equation: how functions among the parameters are bound is JAX's business.
    variables, values = [], []
    for atom, operand in zip(eqn.invars, operands, strict=True):
        if not isinstance(atom, Literal) and atom not in variables:
            variables.append(atom)
            values.append(operand)
    kept = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
    paths = tuple(map(str, range(len(kept))))
    names = api_util.debug_info("autoshard", lambda *_: None, values, {}, result_paths_thunk=lambda: paths)
    single = ClosedJaxpr(Jaxpr([], variables, kept, [eqn], eqn.effects, names), ())
    results = iter(core.jaxpr_as_fun(single)(*values))
    return [None if isinstance(var, core.DropVar) else next(results) for var in eqn.outvars]


def key_bytes(aval: Any) -> int | None:
    """Bytes of an array of PRNG keys; None for any other array."""
    if not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return None
    words = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    return words.size * words.dtype.itemsize
