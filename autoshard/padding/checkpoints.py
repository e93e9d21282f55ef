"""A `jax.checkpoint` and another body in, the same checkpoint around that body out.

It stays one equation. What guards its operands from the forward pass is then JAX's own, which programs and the lowered
step know. An `optimization_barrier` in its place would be an operation of the step, ahead of which weights are gathered
before they are narrowed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from autoshard.jaxprs import JaxprEqn, Var, capturing_call, evaluated, jaxpr_of


def checkpointed(eqn: JaxprEqn, body: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
    """What a checkpoint makes of other operands with another body.

    Args:
        eqn: the checkpoint, which may stand in a backward pass.
        body: takes the operands; as many as the checkpoint has.
    """
    made = jax.make_jaxpr(body)(*operands)
    inside, values = made.jaxpr, [*made.consts, *operands]
    called = jaxpr_of({}, [*inside.constvars, *inside.invars], inside.outvars, inside.eqns)
    inputs, results = ([Var(aval) for aval in avals] for avals in (called.in_avals, called.out_avals))
    params = capturing_call(eqn, called, len(made.consts))
    call = eqn.replace(params=params, invars=[*inputs], outvars=[*results])
    return evaluated([call], dict(zip(inputs, values, strict=True)), results)
