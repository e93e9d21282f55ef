"""Rules of the equations around loops and branches, and of calls to the host."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.program import trace
from autoshard.propagation import rules_for


def step(x, w, xs):
    def body(carry, row):
        carry = jnp.tanh(carry @ w) + row
        return carry, carry * 2

    last, all_ = lax.scan(body, x, xs)
    return lax.cond(last.sum() > 0, lambda v: v + 1, lambda v: v * x, last), all_


X, W, XS = jnp.ones((4, 6)), jnp.ones((6, 6)), jnp.ones((3, 4, 6))

NOTATIONS = {  # primitive -> notation, splittable
    "scan_const": ("i j -> i j", "i j"),
    "scan_carry": ("i j, i j -> i j, i j", "i j"),
    "scan_slice": ("i j k -> j k", "j k"),
    "scan_stack": ("j k -> i j k", "j k"),
    "branch_const": ("i j -> i j", "i j"),
    "branch_join": ("i j, i j -> i j", "i j"),
}


@pytest.mark.parametrize("primitive", NOTATIONS)
def test_notation(primitive):
    program = trace(step, (X, W, XS), {})
    rules = [r for e, r in zip(program.equations, rules_for(program), strict=True) if e.primitive == primitive]
    assert rules
    notation, splittable = NOTATIONS[primitive]
    assert {str(rule) for rule in rules} == {notation}
    assert {rule.splittable for rule in rules} == {frozenset(splittable.split())}


def test_host_gets_whole_arrays():
    def fn(x):
        jax.debug.callback(lambda x: None, x)
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(X.shape, X.dtype), x)

    program = trace(fn, (X,), {})
    for equation, rule in zip(program.equations, rules_for(program), strict=True):
        assert equation.primitive in ("debug_callback", "pure_callback")
        assert not rule.splittable
        assert rule.need_replication == set(rule.factors)
