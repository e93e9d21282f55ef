"""Options that are numbers take NumPy's as Python's: sizes that are computed are often of these types."""

import json

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from autoshard import ArgumentError, frontier, plan
from autoshard.options import options_of
from autoshard.stages.requests import PipelineRequest

MESH = AbstractMesh((4,), ("x",))
ASKED = {"memory": 1 << 30, "microbatches": 4, "refine": 1, "time_limit": 5, "trips": 3}


@pytest.mark.parametrize("number", [np.int32, np.int64, np.uint64, int], ids=lambda one: one.__name__)
def test_numbers_of_numpy_are_numbers(number):
    found = options_of(MESH, **{name: number(value) for name, value in ASKED.items()})
    assert found == options_of(MESH, **ASKED)
    json.dumps([found.memory, found.microbatches, found.refine, found.time_limit, found.trips])


def test_stages_are_counted_by_them():
    asked = PipelineRequest.of({"stages": np.int64(2), "microbatches": np.int32(8)})
    assert asked == PipelineRequest(2, 8) and type(asked.stages) is int


def test_sizes_and_seconds_may_be_single_floats():
    found = options_of(MESH, memory=np.float32(1 << 20), time_limit=np.float32(5))
    assert (found.memory, found.time_limit) == (float(1 << 20), 5.0)


def test_a_frontier_counts_its_points_by_them():
    x = jax.ShapeDtypeStruct((16, 8), np.float32)
    assert frontier(lambda x: x @ x.T, x, mesh=MESH, points=np.int64(2)).plans


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("wrong", [np.bool_(True), np.array([4, 4]), 1j, np.int64(-4)], ids=str)
def test_what_is_no_number_is_refused(name, wrong):
    with pytest.raises(ArgumentError, match=name):
        plan(lambda x: x, jax.ShapeDtypeStruct((4,), np.float32), mesh=MESH, **{name: wrong})
