"""Equations and variables of jaxprs in, out what it costs to run the one again and to keep the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import REMAT, JaxprEqn, Literal, array_bytes, aval_of, called_jaxpr, is_array, on_host
from autoshard.mesh.compute import compute_seconds, flops
from autoshard.mesh.host import host_seconds
from autoshard.mesh.topology import Topology
from autoshard.primitives import facts_of
from autoshard.program import Equation, Value
from autoshard.program.reader import kind_of

_STATEFUL = frozenset({"rng_uniform"})  # another run makes other numbers


def seconds_again(eqn: JaxprEqn, topology: Topology) -> float:
    """Of running an equation once more on one device that has all of its operands; infinite if it must not run again.

    The roofline of its FLOPs and of the bytes of its results: what it reads is there for the backward pass, too.
    Views take no time. XLA fuses cheap elementwise work with its readers, so such results are never written.
    Loops are taken at all of their turns, branches at the longest.
    """
    name = eqn.primitive.name
    if eqn.effects or name in _STATEFUL:
        return math.inf
    inner = called_jaxpr(eqn) if name not in {"scan", "while", "cond"} else None
    if name == "scan":
        return eqn.params["length"] * _sum(eqn.params["jaxpr"].jaxpr, topology)
    if name == "while":
        return math.inf
    if name == "cond":
        return max(_sum(branch.jaxpr, topology) for branch in eqn.params["branches"])
    if inner is not None or name in REMAT:
        return math.inf if inner is None else _sum(inner.jaxpr, topology)
    facts = facts_of(name)
    if facts.is_view or facts.relabels:
        return 0.0
    is_fused = facts.is_pointwise and not facts.is_expensive
    made = 0 if is_fused else sum(array_bytes(var.aval) for var in eqn.outvars)
    equation = equation_of(eqn)
    dtype = max((value.dtype for value in equation.inputs), key=lambda one: getattr(one, "itemsize", 0), default=None)
    return compute_seconds(flops(equation), made, dtype, topology)


def is_movable(aval: Any) -> bool:
    """Whether it is an array in the memory of devices that JAX can put into the host's: of PRNG keys it cannot."""
    return is_array(aval) and not on_host(aval) and not jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended)


def moving_seconds(aval: Any, runs: int, topology: Topology) -> float:
    """Of taking an array to the host and back so often, on one device that has all of it; infinite if it stays."""
    if topology.host_bandwidth is None or not is_movable(aval) or not aval.shape:
        return math.inf
    return 2 * runs * host_seconds(array_bytes(aval), topology)


def _sum(jaxpr: Any, topology: Topology) -> float:
    return math.fsum(seconds_again(eqn, topology) for eqn in jaxpr.eqns)


def equation_of(eqn: JaxprEqn) -> Equation:
    """An equation of a jaxpr as rules and costs see it."""

    def value(aval: Any) -> Value:
        shape, dtype, is_on_host = kind_of(aval)
        return Value(0, shape, dtype, array_bytes(aval), on_host=is_on_host)

    inputs = tuple(
        np.asarray(atom.val, aval_of(atom).dtype)
        if isinstance(atom, Literal) and not aval_of(atom).shape
        else value(aval_of(atom))
        for atom in eqn.invars
    )
    return Equation(0, eqn.primitive.name, eqn.params, inputs, tuple(value(var.aval) for var in eqn.outvars), None, ())


Seconds = Callable[[JaxprEqn], float]
