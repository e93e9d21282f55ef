"""Rules of random numbers: keys stay whole, their dims and the dims of what is drawn are free."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from autoshard.program import trace
from autoshard.propagation import rule_of

KEY = jax.random.key(0)
KEYS = jax.random.split(KEY, 4)
RBG_KEYS = jax.random.split(jax.random.key(0, impl="rbg"), 4)  # of a batch of which the first one draws

RANDOM = [  # function, operands, primitive, notation, splittable
    (lambda k: jax.random.bits(k, (4, 6)), (KEY,), "random_bits", " -> i j", "i j"),
    (jax.vmap(lambda k: jax.random.bits(k, (6,))), (KEYS,), "random_bits", "i -> i j", "i j"),
    (lambda k: jax.random.split(k, 4), (KEY,), "random_split", " -> i", "i"),
    (jax.vmap(jax.random.fold_in), (KEYS, jnp.arange(4)), "random_fold_in", "i, i -> i", "i"),
    (jax.vmap(jax.random.key_data), (KEYS,), "random_unwrap", "i -> i j", "i"),
    (jax.random.wrap_key_data, (jnp.zeros((4, 2), jnp.uint32),), "random_wrap", "i j -> i", "i"),
    (lambda s: jax.random.key(s), (jnp.int32(3),), "random_seed", " -> ", ""),
    (jax.random.clone, (KEYS,), "random_clone", "i -> i", "i"),
    (lambda k: lax.rng_bit_generator(k, (4, 6)), (jnp.zeros(4, jnp.uint32),), "rng_bit_generator",
     "i -> j, k l", ""),
    (jax.vmap(lambda k: jax.random.bits(k, (6,))), (RBG_KEYS,), "random_bits", "k -> i j", "i j"),
]  # fmt: skip


@pytest.mark.parametrize("fn, operands, primitive, notation, splittable", RANDOM)
def test_notation(fn, operands, primitive, notation, splittable):
    equation = next(e for e in trace(fn, operands, {}).equations if e.primitive == primitive)
    rule = rule_of(equation)
    assert str(rule) == notation
    assert rule.splittable == set(splittable.split())


def test_a_rejection_sampler_is_planned_as_the_loops_that_it_is_lowered_to():
    program = trace(lambda k: jax.random.gamma(k, jnp.ones((4, 6))), (KEY,), {})
    primitives = {equation.primitive for equation in program.equations}
    assert "random_gamma" not in primitives
    assert {"random_split", "scan_carry", "reduce_or"} <= primitives
