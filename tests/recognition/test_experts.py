"""Dropless experts that a program spells out become operations, with the same numbers; what only looks so stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from cases import normal
from equality import assert_equal
from jax import lax
from jax.extend.core import jaxpr_as_fun

from autoshard.batching import boundary
from autoshard.jaxprs import inner_jaxprs
from autoshard.ops import ragged_dot
from autoshard.recognition.experts import rewriting, sortings, with_experts

TOKENS, SLOTS, GROUPS, WIDTH, HIDDEN = 12, 2, 4, 3, 5
PARAMS = {
    "router": normal(WIDTH, GROUPS, seed=1),
    "swish": normal(GROUPS, WIDTH, HIDDEN, seed=2),
    "up": normal(GROUPS, WIDTH, HIDDEN, seed=3),
    "down": normal(GROUPS, HIDDEN, WIDTH, seed=4),
    "bias": normal(GROUPS, HIDDEN, seed=5),
}
X = normal(TOKENS, WIDTH)

Experts = Callable[[Any, jax.Array], jax.Array]


def routed(params: Any, x: jax.Array, slots: int = SLOTS) -> tuple[jax.Array, jax.Array]:
    """The weights and the experts of each token."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ params["router"]), slots)
    return weights / weights.sum(-1, keepdims=True), chosen


def mlp(params: Any, rows: jax.Array, sizes: jax.Array, dot: Any = lax.ragged_dot) -> jax.Array:
    return dot(jax.nn.silu(dot(rows, params["swish"], sizes)) * dot(rows, params["up"], sizes), params["down"], sizes)


def scattered(params: Any, x: jax.Array) -> jax.Array:
    """Weighted rows are added to their tokens."""
    weights, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=GROUPS)
    made = mlp(params, x[order // SLOTS], sizes) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def gathered(params: Any, x: jax.Array) -> jax.Array:
    """MaxText's `permute` and `unpermute`: repeated tokens are taken, rows are taken back, and then weighed."""
    weights, chosen = routed(params, x)
    flat = jnp.ravel(chosen)
    order = jnp.argsort(flat)
    made = mlp(params, jnp.take(x, order // SLOTS, axis=0), jnp.bincount(flat, length=GROUPS))
    back = jnp.take(made, jnp.argsort(order), axis=0)
    return jnp.einsum("tkd,tk->td", back.reshape(-1, SLOTS, WIDTH), weights)


def counted(params: Any, x: jax.Array) -> jax.Array:
    """Repeated rows, sizes of one-hot vectors, and an inverse that is scattered, in two dims."""
    weights, chosen = routed(params, x)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    inverse = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(TOKENS, SLOTS)
    sizes = jax.nn.one_hot(flat, GROUPS, dtype=jnp.int32).sum(0)
    made = mlp(params, jnp.repeat(x, SLOTS, axis=0)[order], sizes)
    return (made[inverse] * weights[..., None]).sum(1)


def by_place(params: Any, x: jax.Array) -> jax.Array:
    """All first choices stand before all second ones."""
    weights, chosen = routed(params, x)
    flat = chosen.T.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = (flat[:, None] == jnp.arange(GROUPS)).sum(0, dtype=jnp.int32)
    made = mlp(params, x[order % TOKENS], sizes) * weights.T.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order % TOKENS].add(made)


def of_one(params: Any, x: jax.Array) -> jax.Array:
    """One expert per token."""
    weights, chosen = routed(params, x, 1)
    order = jnp.argsort(chosen[:, 0])
    rows = mlp(params, x[order], jnp.bincount(chosen[:, 0], length=GROUPS))
    return jnp.zeros_like(x).at[order].set(rows) * weights


def by_operation(params: Any, x: jax.Array) -> jax.Array:
    """The operation of autoshard in the place of `jax.lax.ragged_dot`."""
    weights, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=GROUPS)
    made = mlp(params, x[order // SLOTS], sizes, ragged_dot) * weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def with_biases(params: Any, x: jax.Array) -> jax.Array:
    """A bias per expert, of the sorted experts; activations that clip."""
    weights, chosen = routed(params, x)
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=GROUPS)
    hidden = jnp.clip(lax.ragged_dot(x[order // SLOTS], params["up"], sizes) + params["bias"][flat[order]], -1, 1)
    made = lax.ragged_dot(jax.nn.relu(hidden), params["down"], sizes) * weights.reshape(-1)[order][:, None]
    return jax.ops.segment_sum(made, order // SLOTS, TOKENS)


FORMS = [scattered, gathered, counted, by_place, of_one, by_operation, with_biases]


def trained(experts: Experts) -> Callable:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        return (experts(params, x) ** 2).sum()

    return jax.value_and_grad(loss, (0, 1))


def in_layers(experts: Experts, wrap: Any = lambda f: f) -> Callable:
    def loss(params: Any, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, scale: jax.Array) -> tuple[jax.Array, None]:
            return x + experts(jax.tree.map(lambda p: p * scale, params), x), None

        return (lax.scan(wrap(layer), x, jnp.array([1.0, 0.5, 0.7]))[0] ** 2).sum()

    return jax.value_and_grad(loss, (0, 1))


STEPS = {one.__name__: trained(one) for one in FORMS} | {
    "layers": in_layers(gathered),
    "layers, computed again": in_layers(scattered, jax.checkpoint),
    "inference": scattered,
    "two layers": trained(lambda params, x: scattered(params, x + by_place(params, x))),
}


def recognized(step: Callable, *arrays: Any, devices: int = 2) -> Any:
    return with_experts(jax.make_jaxpr(step)(*arrays), devices)


def counts_of(jaxpr: Any) -> tuple[int, int]:
    """Operations, and equations that sort or multiply by group outside of them. What a scan stacks is not counted."""
    own = [eqn.primitive.name for eqn in jaxpr.eqns]
    found = [own.count("operation"), own.count("ragged_dot_general") + own.count("sort")]
    for eqn in jaxpr.eqns:
        for inner in inner_jaxprs(eqn):
            more = counts_of(inner.jaxpr)
            found = [found[0] + more[0], found[1] + (more[1] if eqn.primitive.name != "scan" else 0)]
    return found[0], found[1]


SLOW = {"counted", "by_operation", "two layers", "layers", "of_one", "with_biases"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in STEPS]
)
def test_every_way_to_write_experts_becomes_operations_with_the_same_numbers(name):
    step = STEPS[name]
    found = recognized(step, PARAMS, X)
    assert found is not None
    expected = {"inference": (1, 0), "two layers": (4, 0), "of_one": (2, 1)}  # JAX's scatter of rows numbers them again
    assert counts_of(found.jaxpr) == expected.get(name, (2, 0))
    made = jax.jit(jaxpr_as_fun(found))(*jax.tree.leaves((PARAMS, X)))
    assert_equal(list(made), jax.tree.leaves(jax.jit(step)(PARAMS, X)))


def test_bfloat16_experts_have_the_same_numbers():
    params, x = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (PARAMS, X))
    found = recognized(scattered, params, x)
    assert_equal(jax.jit(jaxpr_as_fun(found))(*jax.tree.leaves((params, x)))[0], jax.jit(scattered)(params, x))


@pytest.mark.parametrize(("tokens", "hidden", "devices"), [(TOKENS, HIDDEN, 5), (2, 10_000, 2)])
def test_experts_stay_that_devices_could_not_share_out(tokens, hidden, devices):
    """Tokens that devices do not divide, and a few tokens of large experts, as in decoding."""
    params = PARAMS | {name: normal(GROUPS, WIDTH, hidden) for name in ("swish", "up")}
    params["down"] = normal(GROUPS, hidden, WIDTH)
    assert recognized(scattered, params, X[:tokens], devices=devices) is None
    assert recognized(scattered, PARAMS, X, devices=4) is not None


# What only looks like it.


def reads_sorted_rows(params: Any, x: jax.Array) -> jax.Array:
    """The first of the sorted rows is a result: it depends on the order in which rows of a group stand."""
    _, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    return mlp(params, x[order // SLOTS], jnp.bincount(chosen.reshape(-1), length=GROUPS))[:3]


def mixes_rows(params: Any, x: jax.Array) -> jax.Array:
    """Each row less the one before it among the sorted ones."""
    _, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    rows = x[order // SLOTS]
    made = mlp(params, rows - jnp.roll(rows, 1, 0), jnp.bincount(chosen.reshape(-1), length=GROUPS))
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def limited(params: Any, x: jax.Array) -> jax.Array:
    """An expert drops what is beyond twice an even load, which few batches reach."""
    _, chosen = routed(params, x)
    flat = chosen.reshape(-1)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=GROUPS)
    place = jnp.arange(flat.size) - (jnp.cumsum(sizes) - sizes)[flat[order]]
    made = jnp.where((place < TOKENS)[:, None], mlp(params, x[order // SLOTS], sizes), 0)
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def with_limited_sizes(params: Any, x: jax.Array) -> jax.Array:
    """No more than twice an even load is multiplied."""
    _, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    made = mlp(params, x[order // SLOTS], jnp.minimum(jnp.bincount(chosen.reshape(-1), length=GROUPS), TOKENS))
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def masked(take: Callable) -> Experts:
    """Every third token goes to no expert; `take` makes rows of products, tokens, sorted keys and biases."""

    def experts(params: Any, x: jax.Array) -> jax.Array:
        _, chosen = routed(params, x)
        flat = jnp.where(jnp.arange(TOKENS)[:, None] % 3 > 0, chosen, GROUPS).reshape(-1)
        order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=GROUPS)
        rows = x[order // SLOTS]
        made = take(mlp(params, rows, sizes), rows, flat[order], params["bias"][:, :WIDTH])
        return jnp.zeros_like(x).at[order // SLOTS].add(made)

    return experts


def dropped_by_place(params: Any, x: jax.Array) -> jax.Array:
    """Rows of no expert are added beyond the tokens, where they are dropped."""
    _, chosen = routed(params, x)
    flat = jnp.where(jnp.arange(TOKENS)[:, None] % 3 > 0, chosen, GROUPS).reshape(-1)
    order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=GROUPS)
    rows = x[order // SLOTS]
    to = jnp.where(flat[order] < GROUPS, order // SLOTS, TOKENS)
    return jnp.zeros_like(x).at[to].add(mlp(params, rows, sizes) + rows, mode="drop")


def of_more_tokens(params: Any, x: jax.Array) -> jax.Array:
    """A row of zeros stands behind the tokens."""
    return scattered_among(params, jnp.concatenate([x, jnp.zeros((1, WIDTH))]), jnp.zeros_like(x))


def to_more_tokens(params: Any, x: jax.Array) -> jax.Array:
    """A row for what is dropped stands behind the tokens."""
    return scattered_among(params, x, jnp.zeros((TOKENS + 1, WIDTH)))[:TOKENS]


def scattered_among(params: Any, x: jax.Array, base: jax.Array) -> jax.Array:
    _, chosen = routed(params, x[:TOKENS])
    order = jnp.argsort(chosen.reshape(-1))
    made = mlp(params, x[order // SLOTS], jnp.bincount(chosen.reshape(-1), length=GROUPS))
    return base.at[order // SLOTS].add(made)


UNEQUAL = {
    "limited": limited,
    "with_limited_sizes": with_limited_sizes,
    "tokens of no expert stay": masked(lambda made, rows, keys, _: jnp.where((keys < GROUPS)[:, None], made, rows)),
    "no bias for no expert": masked(
        lambda made, rows, keys, bias: made + jnp.take(bias, keys, axis=0, mode="fill", fill_value=0)
    ),
    "dropped_by_place": dropped_by_place,
    "of_more_tokens": of_more_tokens,
    "to_more_tokens": to_more_tokens,
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_other_loads_or_keys_would_change_stays_as_it_is(name):
    assert recognized(UNEQUAL[name], PARAMS, X) is None


def test_tokens_of_no_expert_are_recognised_where_they_read_no_group():
    step = masked(lambda made, rows, keys, bias: made + rows)
    found = recognized(step, PARAMS, X)
    assert counts_of(found.jaxpr) == (1, 0)
    assert_equal(jax.jit(jaxpr_as_fun(found))(*jax.tree.leaves((PARAMS, X)))[0], jax.jit(step)(PARAMS, X))


def test_keys_that_may_be_negative_read_no_group():
    """jax.jit reads the last group for them, and `bincount` counts them to the first."""

    def step(params: Any, x: jax.Array, flat: jax.Array) -> jax.Array:
        order, sizes = jnp.argsort(flat), jnp.bincount(flat, length=GROUPS)
        made = mlp(params, x[order], sizes) + params["bias"][:, :WIDTH][flat[order]]
        return jnp.zeros_like(x).at[order].add(made)

    assert recognized(step, PARAMS, X, jnp.zeros(TOKENS, jnp.int32)) is None


def test_each_choice_may_be_sorted_by_itself():
    def step(params: Any, x: jax.Array) -> jax.Array:
        _, chosen = routed(params, x)
        total = jnp.zeros_like(x)
        for flat in chosen.T:
            order = jnp.argsort(flat)
            total = total.at[order].add(mlp(params, x[order], jnp.bincount(flat, length=GROUPS)))
        return total

    found = recognized(step, PARAMS, X)
    assert counts_of(found.jaxpr) == (2, 0)
    assert_equal(jax.jit(jaxpr_as_fun(found))(*jax.tree.leaves((PARAMS, X)))[0], jax.jit(step)(PARAMS, X))


def test_a_column_that_the_step_chooses_is_taken_of_all_rows():
    def step(params: Any, x: jax.Array, column: jax.Array) -> jax.Array:
        _, chosen = routed(params, x)
        order = jnp.argsort(chosen.reshape(-1))
        rows, sizes = x[order // SLOTS], jnp.bincount(chosen.reshape(-1), length=GROUPS)
        made = mlp(params, rows, sizes) * lax.dynamic_slice(rows, (0, column), (TOKENS * SLOTS, 1))
        return jnp.zeros_like(x).at[order // SLOTS].add(made)

    found = recognized(step, PARAMS, X, 1)
    assert counts_of(found.jaxpr) == (1, 0)
    made = jax.jit(jaxpr_as_fun(found))(*jax.tree.leaves((PARAMS, X, 1)))
    assert_equal(made[0], jax.jit(step)(PARAMS, X, 1))


def test_a_fault_in_one_layer_leaves_the_others_operations(monkeypatch):
    def faulty(editor: Any, sorting: Any, devices: int) -> Any:
        if sorting.rows == TOKENS:
            raise ValueError("a fault")
        return put_in(editor, sorting, devices)

    put_in = rewriting._put_in
    monkeypatch.setattr(rewriting, "_put_in", faulty)
    monkeypatch.setattr(boundary, "RAISES_ERRORS", False)
    found = recognized(lambda params, x: scattered(params, x) + of_one(params, x), PARAMS, X)
    assert counts_of(found.jaxpr) == (1, 4)


def test_masks_of_attention_are_not_evaluated(monkeypatch):
    """They follow from constants, and are large."""

    def step(params: Any, x: jax.Array) -> jax.Array:
        places = jnp.arange(TOKENS)
        weights = jax.nn.softmax(jnp.where(places[:, None] >= places, x @ x.T, -1e9))
        return scattered(params, weights @ x)

    evaluated = set[tuple[int, ...]]()
    plain = sortings.run
    monkeypatch.setattr(
        sortings, "run", lambda eqn, xs: evaluated.update(var.aval.shape for var in eqn.outvars) or plain(eqn, xs)
    )
    assert recognized(step, PARAMS, X) is not None
    assert (TOKENS * SLOTS,) in evaluated
    assert (TOKENS, TOKENS) not in evaluated


def test_one_layer_that_fits_becomes_operations_beside_one_that_does_not():
    def both(params: Any, x: jax.Array) -> jax.Array:
        return scattered(params, x) + mixes_rows(params, x * 2)

    found = recognized(both, PARAMS, X)
    assert counts_of(found.jaxpr) == (1, 4)


def numbers_rows(params: Any, x: jax.Array) -> jax.Array:
    """What a row is made of depends on its place among the sorted ones."""
    _, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    rows = x[order // SLOTS] * jnp.arange(TOKENS * SLOTS, dtype=jnp.float32)[:, None]
    made = mlp(params, rows, jnp.bincount(chosen.reshape(-1), length=GROUPS))
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def with_other_sizes(params: Any, x: jax.Array) -> jax.Array:
    """Groups of equal sizes, whatever was chosen."""
    _, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    made = mlp(params, x[order // SLOTS], jnp.full(GROUPS, TOKENS * SLOTS // GROUPS))
    return jnp.zeros_like(x).at[order // SLOTS].add(made)


def with_other_tokens(params: Any, x: jax.Array) -> jax.Array:
    """Rows go back to tokens of other rows: still one function of slots, but none that numbers tokens."""
    _, chosen = routed(params, x)
    order = jnp.argsort(chosen.reshape(-1))
    made = mlp(params, x[order // SLOTS], jnp.bincount(chosen.reshape(-1), length=GROUPS))
    return jnp.zeros_like(x).at[(order * 5 + 1) % TOKENS].add(made)


@pytest.mark.parametrize(
    "step", [reads_sorted_rows, mixes_rows, numbers_rows, with_other_sizes, with_other_tokens], ids=lambda f: f.__name__
)
def test_what_depends_on_the_order_of_rows_stays_as_it_is(step):
    assert recognized(step, PARAMS, X) is None
