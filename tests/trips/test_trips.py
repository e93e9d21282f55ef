"""Loops whose trips do not need each other: which these are, and that devices share out their trips."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax import lax
from oracles import mesh_of, slow_chips

import autoshard
from autoshard.batching import boundary
from autoshard.trips import independent
from autoshard.trips.independent import IndependentTrips
from autoshard.trips.rewriting import ShareableLoops

MESH = {"data": 4, "model": 2}
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 4, 8)), jnp.float32)
W = jnp.asarray(RNG.normal(size=(8, 8)), jnp.float32)


def one(w, x):
    return jnp.tanh(jnp.sort(x @ w, axis=-1))


def mapped(w, x):
    return lax.map(lambda row: one(w, row), x)


def in_chunks(w, x):
    return lax.map(lambda row: one(w, row), x, batch_size=2)


def gradients(w, x):
    loss, (by_w, by_x) = jax.value_and_grad(lambda w, x: (mapped(w, x) ** 2).mean(), (0, 1))(w, x)
    return w - 0.1 * by_w, by_x, loss


def accumulated(w, x):
    """Gradients over microbatches, as users add them up."""

    def add(totals, row):
        loss, gradient = jax.value_and_grad(lambda w: (one(w, row) ** 2).mean())(w)
        return (totals[0] + loss, totals[1] + gradient), None

    (loss, gradient), _ = lax.scan(add, (jnp.float32(1), jnp.ones_like(w)), x)
    return w - 0.1 * gradient, loss


def counted(w, x):
    """A loop that picks its row by a counter, and adds up twice in a trip."""
    return lax.fori_loop(0, len(x), lambda i, total: total + one(w, x[i]) + i, jnp.zeros_like(x[0]))


def backwards(w, x):
    def step(carry, row):
        i, kept = carry
        return (i - 2, kept), one(w, row) * i + kept

    (i, kept), made = lax.scan(step, (jnp.int32(7), w[0]), x, reverse=True)
    return made, i, kept


def drawn(w, x):
    keys = jax.random.split(jax.random.key(0), len(x))
    return lax.map(lambda pair: pair[0] @ w + jax.random.normal(pair[1], x.shape[1:]), (x, keys))


def searched(w, x):
    """A loop in a trip that ends sooner or later, and a choice."""

    def root(row):
        found = lax.while_loop(lambda y: (y > 0.1).any(), lambda y: y * 0.7, one(w, row))
        return lax.cond(row[0, 0] > 0, jnp.sin, jnp.cos, found)

    return lax.map(root, x)


def whole_numbers(w, x):
    rounded = (x * 100).astype(jnp.int32)
    return lax.scan(lambda total, row: (total + row.sum(), jnp.sort(row)), jnp.int32(3), rounded)


INDEPENDENT = [mapped, in_chunks, gradients, accumulated, counted, backwards, drawn, searched, whole_numbers]


def recurrent(w, x):
    return lax.scan(lambda h, row: (one(w, row + h), h), X[0], x)


def read_sum(w, x):
    return lax.scan(lambda total, row: (total + one(w, row), total), X[0], x)


def read_new_sum(w, x):
    def step(total, row):
        new = total + one(w, row)
        return new, new

    return lax.scan(step, X[0], x)


def doubled(w, x):
    return lax.scan(lambda total, row: (total + total, one(w, row)), X[0], x)


def swapped(w, x):
    return lax.scan(lambda pair, row: ((pair[1], pair[0]), one(w, row) + pair[0]), (X[0], X[1]), x)


def decayed(w, x):
    return lax.scan(lambda total, row: (0.9 * total + one(w, row), None), X[0], x)[0]


def largest(w, x):
    return lax.scan(lambda most, row: (jnp.maximum(most, one(w, row)), None), X[0], x)[0]


def printed(w, x):
    def told(row):
        jax.debug.print("{}", row[0, 0], ordered=True)
        return one(w, row)

    return lax.map(told, x)


DEPENDENT = [recurrent, read_sum, read_new_sum, doubled, swapped, decayed, largest, printed]


def loops(step, *arguments):
    found = ShareableLoops.of(jax.make_jaxpr(step)(*arguments), slow_chips(MESH))
    return () if found is None else found.loops


@pytest.mark.parametrize("step", DEPENDENT)
def test_a_trip_that_needs_another_is_no_independent_one(step):
    assert not loops(step, W, X)


@pytest.mark.parametrize("step", INDEPENDENT)
def test_shared_trips_compute_what_one_device_does(step):
    assert loops(step, W, X)
    planned = autoshard.autoshard(step, mesh=mesh_of(MESH), topology=slow_chips(MESH))
    plan = planned.plan(W, X)
    assert "share them out" in " ".join(plan.warnings)
    assert any("trip over" in str(run) for run in plan.annotations.runs.values())
    assert_equal(planned(W, X), jax.jit(step)(W, X))


def test_what_compiles_sends_one_sum_for_all_trips():
    plan = autoshard.plan(gradients, W, X, mesh=mesh_of(MESH), topology=slow_chips(MESH))
    assert plan.verify().collectives_agree
    assert sum(one.count for one in plan.predicted.collectives) < len(X)


def test_a_plan_for_shared_trips_is_taken_again(tmp_path):
    options = {"mesh": mesh_of(MESH), "topology": slow_chips(MESH)}
    plan = autoshard.plan(gradients, W, X, **options)
    plan.save(tmp_path / "plan.json")
    again = autoshard.autoshard(gradients, plan=autoshard.Plan.load(tmp_path / "plan.json", mesh_of(MESH)), **options)
    assert again.plan(W, X).annotations == plan.annotations
    assert_equal(again(W, X), jax.jit(gradients)(W, X))


def test_trips_that_no_axis_divides_and_loops_that_are_little_work_stay():
    odd = autoshard.plan(mapped, W, X[:15], mesh=mesh_of(MESH), topology=slow_chips(MESH))
    assert "share them out" not in " ".join(odd.warnings)
    large = jnp.ones((1024, 1024))
    assert not loops(lambda w, x, y: (mapped(w, x[:2]), y @ y @ y), W, X, large)


def test_loops_whose_arrays_do_not_fit_whole_stay():
    found = ShareableLoops.of(jax.make_jaxpr(accumulated)(W, X), slow_chips(MESH))
    whole = 2 * W.nbytes + 4  # the weights, and sums of their gradients and of the loss
    assert found.are_shareable(MESH, whole)
    assert not found.are_shareable(MESH, whole - 1)
    assert not found.are_shareable({"data": 3}, whole)


def test_a_carry_taken_for_a_sum_is_caught(monkeypatch):
    """A product with each row before it would be lost."""

    def scaled(w, x):
        return lax.scan(lambda total, row: (total * 2 + one(w, row), None), X[0], x)[0]

    assert not loops(scaled, W, X)
    monkeypatch.setattr(independent, "_ADDS", {"add", "add_any", "mul"})
    planned = autoshard.autoshard(scaled, mesh=mesh_of(MESH), topology=slow_chips(MESH))
    with pytest.raises(AssertionError):
        assert_equal(planned(W, X), jax.jit(scaled)(W, X))


def test_a_fault_leaves_the_step_as_written(monkeypatch):
    monkeypatch.setattr(IndependentTrips, "call", lambda self: {}["planted"])
    monkeypatch.setattr(boundary, "RAISES_ERRORS", False)
    planned = autoshard.autoshard(mapped, mesh=mesh_of(MESH), topology=slow_chips(MESH))
    assert "share them out" not in " ".join(planned.plan(W, X).warnings)
    assert_equal(planned(W, X), jax.jit(mapped)(W, X))
