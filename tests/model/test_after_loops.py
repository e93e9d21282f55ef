"""What is made of a loop's results comes after all its turns, and lies where a temporary of the loop has lain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, v5e

from autoshard import plan
from autoshard.model import grouping

SHAPE = {"x": 8}


def recurrences(x):
    """A scan over each row: what goes in and what is stacked is transposed."""
    return jax.vmap(lambda row: jax.lax.scan(lambda c, y: (c * 0.5 + y, c), jnp.zeros(16), row)[1])(x)


def counted(x):
    return jnp.cos(jax.lax.fori_loop(0, 20, lambda _, c: c * jnp.sin(c) - x, x)) / 3


def until(x):
    return -jax.lax.while_loop(lambda c: c[0] < 9, lambda c: (c[0] + 1, jnp.sin(c[1]) + x), (0, x))[1]


def kept(x):
    """Two stacks of which each is read after the loop."""
    end, (first, second) = jax.lax.scan(lambda c, y: (c * 0.5 + y, (c, jnp.sin(y))), x[:, 0], x.swapaxes(0, 1))
    return first.sum(0) + end, jnp.exp(second)


STEPS = {step.__name__: step for step in (recurrences, counted, until, kept)}


def is_right(step) -> bool:
    """Whether the predicted peak is within a tenth of the compiled one."""
    x = jax.ShapeDtypeStruct((2048, 8, 16), np.float32)
    made = plan(step, x, mesh=mesh_of(SHAPE), topology=v5e(SHAPE), fixed={"*": P("x")}).verify()
    return made.predicted_peak == pytest.approx(made.actual_peak, rel=0.1)


@pytest.mark.parametrize("name", STEPS)
def test_peaks_of_loops_whose_results_are_read(name):
    assert is_right(STEPS[name])


def test_with_results_read_inside_the_loop_peaks_are_wrong(monkeypatch):
    monkeypatch.setattr(grouping, "first_point_outside_loop", lambda *_: 0)
    assert not is_right(recurrences) and not is_right(until)
