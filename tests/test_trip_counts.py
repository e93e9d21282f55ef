"""How often loops of unknown length turn: as the user says, as their condition says, or a guess that plans name."""

import equinox
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import ArgumentError
from autoshard.program import trace
from autoshard.program.trip_counts import UNKNOWN_TURNS

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)


def counted(test, change=lambda i: i + 1, start=0):
    """A loop whose counter starts so, is tested so and changes so."""
    return lambda x: lax.while_loop(lambda s: test(s[0], s[1]), lambda s: (change(s[0]), jnp.tanh(s[1])), (start, x))[1]


def checkpointed(x):
    turn = lambda s: (s[0] + 1, jnp.tanh(s[1]))  # noqa: E731
    return equinox.internal.while_loop(lambda s: s[0] < 50, turn, (0, x), max_steps=64, kind="checkpointed")[1]


def batched(x):
    return jax.vmap(lambda row: counted(lambda i, y: (i < 7) & (y.sum() > 0))(row))(x)


CASES = {  # a loop, turns, how they are known
    "less": (counted(lambda i, x: i < 5), 5, "exact"),
    "at most": (counted(lambda i, x: i <= 5), 6, "exact"),
    "by twos": (counted(lambda i, x: i < 5, lambda i: i + 2), 3, "exact"),
    "from one": (counted(lambda i, x: i < 5, start=1), 4, "exact"),
    "down": (counted(lambda i, x: i > 0, lambda i: i - 1, start=9), 9, "exact"),
    "the other way round": (counted(lambda i, x: lax.gt(5, i)), 5, "exact"),
    "unlike": (counted(lambda i, x: i != 5), 5, "exact"),
    "of floats": (counted(lambda i, x: i < 1.0, lambda i: i + 0.25, start=0.0), 4, "exact"),
    "in a call": (counted(jax.jit(lambda i, x: i < 5), jax.jit(lambda i: i + 1)), 5, "exact"),
    "two bounds": (counted(lambda i, x: (i < 5) & (i < 3)), 3, "guessed"),
    "a bound beside another test": (counted(lambda i, x: (i < 5) & (x.sum() > 0)), 5, "guessed"),
    "a high bound beside it": (counted(lambda i, x: (i < 10**6) & (x.sum() > 0)), UNKNOWN_TURNS, "guessed"),
    "a batch of these": (batched, 7, "guessed"),
    "nothing but a test": (counted(lambda i, x: x.sum() > 0), UNKNOWN_TURNS, "guessed"),
    "a counter that doubles": (counted(lambda i, x: i < 5, lambda i: i * 2, start=1), UNKNOWN_TURNS, "guessed"),
    "one that runs away": (counted(lambda i, x: i < 5, lambda i: i - 1), UNKNOWN_TURNS, "guessed"),
    "a limit that is made": (
        lambda x: lax.fori_loop(0, x[0, 0].astype(int), lambda i, y: jnp.tanh(y), x), UNKNOWN_TURNS, "guessed"
    ),
    "of a library": (checkpointed, 50, "guessed"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_turns(case):
    fn, turns, how = CASES[case]
    program = trace(fn, (X,), {})
    (loop,) = program.loops
    assert (loop.turns, loop.how) == (turns, how)
    assert max(equation.trips for equation in program.equations) == turns
    assert {value.guessed for value in program.values} <= {1, turns if how != "exact" else 1}


def test_a_derivative_turns_as_often():
    program = autoshard.autoshard(jax.grad(lambda x: checkpointed(x).sum()), mesh=mesh_of({"x": 8})).trace(X)
    assert [loop.turns for loop in program.loops] == [50, 50]


open_end = counted(lambda i, x: x.sum() > 0)
SAID = [(7, 7), ({"test_trip_counts.py:*": 5}, 5), ({"<lambda>": 3}, 3), ({"*": 2}, 2)]


@pytest.mark.parametrize("trips, turns", SAID)
def test_what_the_user_says(trips, turns):
    said = autoshard.plan(open_end, X, mesh=mesh_of({"x": 8}), topology=slow_chips("x"), trips=trips)
    guessed = autoshard.plan(open_end, X, mesh=mesh_of({"x": 8}), topology=slow_chips("x"))
    assert not any("guess" in one for one in said.warnings)
    (remark,) = (one for one in guessed.warnings if "guess" in one)
    assert f"taken to turn {UNKNOWN_TURNS} times" in remark and "trips={'test_trip_counts.py:" in remark
    arrival = said.predicted.arrival_seconds
    of_a_turn = (guessed.predicted.step_seconds - arrival) / UNKNOWN_TURNS
    assert said.predicted.step_seconds - arrival == pytest.approx(turns * of_a_turn, rel=0.2)


@pytest.mark.parametrize("trips", [0, True, "9", {"a.py:1": 0}, {3: 4}, {"nowhere.py:*": 4}])
def test_what_cannot_be_said(trips):
    with pytest.raises(ArgumentError, match="trips"):
        autoshard.plan(open_end, X, mesh=mesh_of({"x": 8}), topology=slow_chips("x"), trips=trips)


def test_bytes_of_loops_of_unknown_length_are_those_of_a_turn():
    """As the compiled program tells: a product that sums over devices, and one flag."""
    step = counted(lambda i, x: x.sum() > 0)
    found = autoshard.plan(
        step, X, mesh=mesh_of({"x": 8}), topology=slow_chips("x"), fixed={"x": jax.sharding.PartitionSpec("x")}
    ).verify()
    assert found.predicted == found.actual
    assert {one.is_per_turn for one in found.collectives} == {True}
