"""Gathers and scatters of a few parts of rows, beside the cycles and peaks of libtpu: it takes one after the other."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from programs import f32

from autoshard import plan
from autoshard.model.xla import operations
from autoshard.model.xla.units import work_numbers
from autoshard.program import trace


def places(count, dims):
    return jax.ShapeDtypeStruct((count, dims), np.int32)


def parts(*sizes, along):
    """Slices of these sizes that begin at given places along some dims."""

    def one(x, place):
        begins = [place[along.index(dim)] if dim in along else 0 for dim in range(len(sizes))]
        return jax.lax.dynamic_slice(x, begins, sizes)

    return lambda x, at: jax.vmap(one, (None, 0))(x, at)


def gradient(picks):
    return jax.grad(lambda x, at, weights: (picks(x, at) * weights).sum())


ROWS = parts(8, 128, along=(0,))
PLANES = parts(5, 10, 10, along=(0,))
WHOLE = parts(10, 10, 10, along=(1, 2))  # which can begin at one place alone
FEW = {  # function of what shapes, and whether it is one by one
    "parts of rows": (ROWS, [f32(64, 128), places(4, 1)], True),
    "parts of both dims": (parts(128, 128, along=(0, 1)), [f32(256, 256), places(2, 2)], True),
    "parts of a single dim": (parts(100, along=(0,)), [f32(1000), places(12, 1)], True),
    "parts that are whole in the minor dims": (WHOLE, [f32(10, 10, 10), places(4, 2)], False),
    "gradients of parts of rows": (gradient(ROWS), [f32(64, 128), places(12, 1), f32(12, 8, 128)], True),
    "gradients of planes": (gradient(PLANES), [f32(10, 10, 10), places(4, 1), f32(4, 5, 10, 10)], True),
    "gradients of whole arrays": (gradient(WHOLE), [f32(10, 10, 10), places(4, 2), f32(4, 10, 10, 10)], True),
}


@pytest.mark.parametrize("name", FEW)
def test_few_parts_of_rows(monkeypatch, name):
    """Seconds within half, peaks within a fifth; not if parts are taken at once, or what is at once is not."""
    pytest.importorskip("libtpu")
    fn, shapes, one_by_one = FEW[name]

    def planned():
        return plan(fn, *shapes, mesh=AbstractMesh((8,), ("x",)), topology="v5e:2x4", fixed={"*": jax.P()})

    found = planned().verify("v5e:2x4")
    assert found.predicted_seconds == pytest.approx(found.schedule.step_seconds, rel=0.55)
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.2)
    for module in (operations, work_numbers):
        monkeypatch.setattr(
            module, "is_loop_over_rows", lambda equation: not one_by_one and "gather" in equation.primitive
        )
    assert planned().predicted.comparable_seconds != pytest.approx(found.schedule.step_seconds, rel=0.55)


def test_whole_rows_are_written_at_once():
    """Those of an embedding: their places say which rows they are, not where in a row they begin."""
    rows = trace(lambda x, at, rows: x.at[at].add(rows), (f32(64, 128), places(4, 1), f32(4, 1, 128)), {})
    (scatter,) = (one for one in rows.equations if one.primitive == "scatter-add")
    assert not operations.is_loop_over_rows(scatter)
