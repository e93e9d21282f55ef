"""Every law holds: a step that is rewritten computes the same values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.extend import core
from rewritable import rewritables

from autoshard.errors import PlanError
from autoshard.rewrites import REWRITES, Match, Rewrite
from autoshard.rewrites.applying import rewritten, sites

DEVICES = 4
TOLERANCE = 1e-5  # of the largest element; float32 has 6e-8
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 12))]


def assert_same(closed, versions, arguments):
    """The versions of a jaxpr compute what it does."""

    def every(*arrays):
        return [core.jaxpr_as_fun(one)(*arrays) for one in (closed, *versions)]

    lowered = jax.jit(every).lower(*arguments)
    before, *others = lowered.compile({"xla_backend_optimization_level": 0})(*arguments)
    for after in others:
        for one, other in zip(before, after, strict=True):
            error = np.max(np.abs(np.asarray(one) - np.asarray(other)))
            assert error <= TOLERANCE * (1e-6 + np.max(np.abs(one))), error


@pytest.mark.parametrize("seed", SEEDS)
def test_rewritten_steps_compute_the_same(seed):
    applied = set()
    for name, (step, arguments, expected) in rewritables(seed).items():
        closed = jax.make_jaxpr(step)(*arguments)
        found = [site for law in REWRITES.values() for site in sites(closed, law, DEVICES)]
        assert set(expected) <= {site.rewrite.name for site in found}, name
        applied |= {site.rewrite.name for site in found}
        assert_same(closed, [rewritten(closed, site.rewrite, site.places, DEVICES) for site in found], arguments)
    own = {name for name, law in REWRITES.items() if law.find.__module__.startswith("autoshard.")}
    assert applied >= own, "every law is tried"


def test_rewrites_compose():
    """One law after the other, until none applies that was not applied before."""
    for step, arguments, _ in [rewritables(3)["lstm"]]:
        closed = jax.make_jaxpr(step)(*arguments)
        made = closed
        for law in REWRITES.values():
            for site in sites(made, law, DEVICES)[:1]:
                made = rewritten(made, law, site.places, DEVICES)
        assert_same(closed, [made], arguments)


def planted(build):
    def find(graph):
        for product in graph.products.values():
            yield Match((product.out,), (product.left.atom, product.right.atom), build)

    return Rewrite("planted", "A B = C", find)


def matmul(x, w):
    return jnp.tanh(x @ w)


def test_a_wrong_law_is_caught():
    x, w = jnp.ones((2, 3)), jnp.full((3, 4), 0.1)
    closed = jax.make_jaxpr(matmul)(x, w)
    assert_same(closed, [rewritten(closed, planted(lambda a, b: [a @ b]), [0], DEVICES)], (x, w))
    with pytest.raises(AssertionError):
        assert_same(closed, [rewritten(closed, planted(lambda a, b: [a @ b + 1e-4]), [0], DEVICES)], (x, w))


def test_a_law_that_builds_another_type_is_an_error():
    closed = jax.make_jaxpr(matmul)(jnp.ones((2, 3)), jnp.ones((3, 4)))
    with pytest.raises(PlanError, match=r"a rewrite builds .* in the place of .* at test_laws.py"):
        rewritten(closed, planted(lambda a, b: [a]), [0], DEVICES)
    table = np.ones((2, 4), np.float32)
    with pytest.raises(PlanError, match="closes over 1 arrays"):
        rewritten(closed, planted(lambda a, b: [a @ b * table]), [0], DEVICES)


def test_places_that_need_each_other_are_not_rewritten_together():
    """The first of two places of one kind is rewritten; what the site says of its places is what is done."""

    def step(x, a, b):
        y = x @ a
        return x @ (b * jnp.sum(y)), y, jnp.tanh(x) @ a, jnp.tanh(x) @ b

    arguments = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((3, 4))
    closed = jax.make_jaxpr(step)(*arguments)
    (site,) = sites(closed, REWRITES["fused_products"], DEVICES)
    assert site.places == (1,)
    made = rewritten(closed, site.rewrite, site.places, DEVICES)
    assert str(made).count("dot_general") == 3
    assert_same(closed, [made], arguments)


def test_effects_stay_in_their_order():
    said = []

    def step(x, a, b):
        y = x @ a
        io_callback(said.append, None, y[0, 0], ordered=True)
        return y, x @ io_callback(lambda b: b, jax.typeof(b), b, ordered=True)

    closed = jax.make_jaxpr(step)(*[jnp.ones((3, 3))] * 3)
    assert sites(closed, REWRITES["fused_products"], DEVICES) == []


def test_a_place_that_needs_its_own_result_is_left_alone():
    def step(x, a, b):
        y = x @ a
        return x @ (b * jnp.sum(y)), y

    arguments = jnp.ones((2, 3)), jnp.ones((3, 4)), jnp.ones((3, 4))
    closed = jax.make_jaxpr(step)(*arguments)
    assert sites(closed, REWRITES["fused_products"], DEVICES) == []


NOT_REWRITTEN = {  # law -> a step in which it would change more than the order of sums, or nothing would be gained
    "fused_products": lambda x, a, b: (x @ a, (x @ a) @ b),
    "common_factor": lambda x, a, b: x @ a - x @ a * b[0, 0],
    "sum_of_products": lambda x, a, b: (x @ a).astype(jnp.bfloat16) + (x @ a.T.T).astype(jnp.bfloat16),
    "product_chain": lambda x, a, b: jnp.tanh(x @ a) @ b,
    "summed_product": lambda x, a, b: jnp.sum(jnp.abs(x @ a), 0),
    "loop_sum": lambda x, a, b: jax.lax.scan(lambda c, _: (c * 0.5 + x @ a, None), x, length=3),
    "broadcast_product": lambda x, a, b: jnp.broadcast_to(x[:1], (3, 3)).astype(jnp.int8).astype(jnp.float32) @ a,
    "loop_product": lambda x, a, b: jax.lax.scan(lambda c, key: (jnp.tanh(c + drawn(key) @ a), None), x, keys()),
}


def keys():
    return jax.random.split(jax.random.key(0, impl="rbg"), 3)


def drawn(key):
    """Of these keys, `jax.vmap` draws other numbers than a loop."""
    return jax.random.uniform(key, (3, 3))


@pytest.mark.parametrize("name", NOT_REWRITTEN)
def test_what_is_not_the_same_is_left_alone(name):
    square = jnp.ones((3, 3))
    closed = jax.make_jaxpr(NOT_REWRITTEN[name])(square, square, square)
    assert sites(closed, REWRITES[name], DEVICES) == []
