"""Results that take arguments' places: peaks of compiled programs, donated or not, wherever the arguments must lie."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from programs import traced

import autoshard
from autoshard.model.heap.result_places import copied_for_others
from autoshard.model.heap.room_in_results import RoomInResults
from autoshard.tactics import DataParallel

SIZE = 2048


def adds_product(state, x):
    return {"w": state["w"] - 0.1 * (x.T @ x)}


def squares(state, x):
    return {"w": state["w"] @ state["w"]}, x.sum()


def sorts(state, x):
    return {"w": jnp.sort(state["w"], axis=0)}, x.sum()


def loops(state, x):
    def body(w, row):
        return w - 0.1 * jnp.outer(row, row), row.sum()

    w, sums = jax.lax.scan(body, state["w"], x[:8])
    return {"w": w}, sums.sum()


def keeps(state, x):
    return {"w": state["w"], "b": state["b"] + x.sum()}


def swaps(state, x):
    return {"w": state["b"], "b": state["w"]}, x.sum()


def transposes(state, x):
    return {"w": state["w"].T + 0.0}, x.sum()


def adam(state, x):
    gradient = x.T @ (x @ state["w"])
    m, v = 0.9 * state["m"] + 0.1 * gradient, 0.9 * state["v"] + 0.1 * gradient**2
    return {"w": state["w"] - m / (jnp.sqrt(v) + 1e-6), "m": m, "v": v}


KEYS = {keeps: "wb", swaps: "wb", adam: "wmv"}
WHOLE, ROWS, COLUMNS = P(), P("a"), P(None, "a")


@pytest.mark.parametrize(
    ("step", "home", "donates"),
    [
        (adds_product, WHOLE, False),
        (adds_product, ROWS, True),
        (squares, WHOLE, False),
        (sorts, COLUMNS, True),
        (sorts, WHOLE, True),
        (loops, WHOLE, False),
        (loops, ROWS, False),
        (loops, COLUMNS, True),
        (keeps, WHOLE, False),
        (swaps, ROWS, True),
        (transposes, ROWS, False),
        (transposes, COLUMNS, True),
        (adam, WHOLE, False),
        (adam, WHOLE, True),
    ],
)
def test_peaks_are_those_of_the_compiled_program(step, home, donates):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    array = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
    state, options = dict.fromkeys(KEYS.get(step, "w"), array), {"donate_argnums": 0} if donates else {}
    found = autoshard.plan(step, state, array, mesh=mesh, fixed={"state/w": home}, **options).verify()
    assert found.memory_agrees, f"{found.predicted_peak} bytes predicted, {found.actual_peak} compiled"


@pytest.mark.parametrize(
    ("step", "circles", "copied"),
    [
        (lambda a, b, c: (b, c, a), True, {0, 1, 2}),
        (lambda a, b, c: (b, c, a), False, {0}),
        (lambda a, b, c: (b, c, c * 2), True, set()),  # each is read before it is written over
        (lambda a, b, c: (c * 2, a, b), True, {0, 1}),
    ],
)
def test_arguments_in_each_others_places_are_copied(step, circles, copied):
    array = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
    program = traced(step, array, array, array, donate=(0, 1, 2))
    assert program.carried == {0: 0, 1: 1, 2: 2}
    assert copied_for_others(program, copies_circles=circles) == copied


def descended(weights, x):
    """One step of gradient descent on a residual stack."""

    def loss(weights):
        return jnp.mean(functools.reduce(lambda x, w: x + jnp.tanh(x @ w) @ w.T, weights, x) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))


def assert_results_hold_waiting_sums() -> None:
    """Where devices add up all gradients at once, what each has of them lies where the new weights will."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    weights, x = [jax.ShapeDtypeStruct((64, 256), jnp.float32)] * 6, jax.ShapeDtypeStruct((64, 64), jnp.float32)
    found = autoshard.plan(descended, weights, x, mesh=mesh, tactics=[DataParallel("data")]).verify()
    assert found.memory_agrees, f"{found.predicted_peak} bytes predicted, {found.actual_peak} compiled"


def test_results_are_free_until_the_sums_that_they_are_made_of_are_reduced():
    assert_results_hold_waiting_sums()


def test_results_that_no_sum_delays_are_caught(monkeypatch):
    monkeypatch.setattr(RoomInResults, "waiting", lambda self, choice: 0)
    with pytest.raises(AssertionError, match="compiled"):
        assert_results_hold_waiting_sums()
