"""What is minimised is what is reported, of random programs and train steps on CPU, TPU and GPU."""

import sys
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from optax.contrib import MuonDimensionNumbers
from random_programs import MESHES, programs
from random_steps import steps

import autoshard
from autoshard.model.formulation import Formulation
from autoshard.solver import Problem
from autoshard.solver.exact.two_costs import TwoCosts

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
import objective

pytestmark = pytest.mark.filterwarnings("ignore::autoshard.propagation.UnknownPrimitiveWarning")

MACHINES = ("cpu:8", "v5e:2x4", "h100:8")
SETTINGS = {"derandomize": True, "deadline": None, "suppress_health_check": list(HealthCheck)}
CLOSE = 1e-3  # what the cost and the prediction may differ by, relatively: slices that readers turn out not to need


def assert_one_price(step, *args, mesh, machine, **options) -> autoshard.Plan:
    """A plan costs what its report says, and what is called optimal is not beaten by any row beside it."""
    mesh = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    made = autoshard.plan(step, *args, mesh=mesh, topology=machine, time_limit=10, **options)
    np.testing.assert_allclose(made.predicted.step_seconds, made.cost, rtol=CLOSE, atol=1e-15)
    assert made.bound <= made.cost
    for name, row in made.alternatives.items():
        if made.status == "optimal" and not isinstance(row, str | None):
            assert row.step_seconds >= made.cost * (1 - CLOSE), name
    return made


def check_program(program, mesh, machine):
    assert_one_price(program, *program.arguments, mesh=mesh, machine=machine)


def check_step(step, mesh, machine):
    rng = np.random.default_rng(0)
    state, batch = jax.eval_shape(lambda: (step.state(rng), step.batch(rng)))
    assert_one_price(step, state, batch, mesh=mesh, machine=machine, donate_argnums=0)


DRAWN = given(programs(), st.sampled_from(MESHES), st.sampled_from(MACHINES))
DRAWN_STEPS = given(steps(sizes=(8, 16, 32, 64)), st.sampled_from(MESHES), st.sampled_from(MACHINES))


@settings(max_examples=5, **SETTINGS)
@DRAWN
def test_random_programs(program, mesh, machine):
    check_program(program, mesh, machine)


@pytest.mark.slow
@settings(max_examples=1000, **SETTINGS)
@DRAWN
def test_many_random_programs(program, mesh, machine):
    check_program(program, mesh, machine)


@settings(max_examples=1, **SETTINGS)
@DRAWN_STEPS
def test_random_steps(step, mesh, machine):
    check_step(step, mesh, machine)


@pytest.mark.slow
@settings(max_examples=300, **SETTINGS)
@DRAWN_STEPS
def test_many_random_steps(step, mesh, machine):
    check_step(step, mesh, machine)


def muon():
    """An update of a stack of matrices, whose momentum products read in bfloat16 and sums in float32."""
    numbers = {"up": MuonDimensionNumbers(1, 2)}
    optimizer = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=numbers)
    params = {"up": jax.ShapeDtypeStruct((8, 512, 2048), np.float32)}

    def update(state, gradients):
        params, moments = state
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    return update, (params, jax.eval_shape(optimizer.init, params)), params


def test_a_copy_that_is_read_in_two_widths():
    assert_one_price(*muon(), mesh={"data": 4, "model": 2}, machine="v5e:2x4", donate_argnums=0)


SPLIT = {"fixed": {"*": P("data")}, "mesh": {"data": 8}, "donate_argnums": 0}


def step_of(rows: int, width: int = 1024):
    """A step on a square weight and a batch of so many rows.

    TPUs read both in bfloat16 for products, but the update does not. Where both are split by rows, the weight is
    gathered for the products.
    """

    def step(w, x):
        return w - jax.grad(lambda w: (x @ w).var())(w)

    return step, jax.ShapeDtypeStruct((width, width), np.float32), jax.ShapeDtypeStruct((rows, width), np.float32)


def test_a_copy_for_readers_of_fewer_bits():
    made = assert_one_price(*step_of(65536), machine="v5e:2x4", **SPLIT)
    assert any(one.kind == "all_gather" and "in 16 bits" in one.why for one in made.predicted.collectives)


def test_no_more_is_hidden_than_is_computed():
    predicted = assert_one_price(*step_of(256, 2048), machine="h100:8", **SPLIT).predicted
    assert predicted.exposed_seconds == predicted.communication_seconds - predicted.compute_seconds


def test_a_width_that_is_reported_otherwise_is_caught(monkeypatch):
    monkeypatch.setattr(Formulation, "copied_for", lambda self, value, choice: None)
    with pytest.raises(AssertionError):
        test_a_copy_for_readers_of_fewer_bits()


def test_an_overlap_without_a_limit_is_caught(monkeypatch):
    monkeypatch.setattr("autoshard.planning.with_limited_overlap", lambda formulation, solution, *_: solution)
    monkeypatch.setattr("autoshard.plans.make_plan.at_limited_overlap", lambda solution, predicted: solution)
    with pytest.raises(AssertionError):
        test_no_more_is_hidden_than_is_computed()


def test_mixtures_by_hand():
    """Two options: 5 s of which 4 are communication, and 6 of which 3 are; mixed, they cost the same at a half."""
    problem = Problem((np.array([5.0, 6.0, np.inf]),), (), (), None)
    waits = Problem((np.array([4.0, 3.0, 1.0]),), (), (), None)
    assert TwoCosts(problem, waits).mixed(0.5).costs[0].tolist() == [4.5, 4.5, np.inf]
    assert TwoCosts(problem, waits).mixed(0.0).costs[0].tolist() == [4.0, 3.0, np.inf]


def test_the_benchmark_counts_every_fault():
    """`benchmarks/objective.py` does over thousands of programs what this file does over a few."""
    good = objective.Row("program", 0, 0, 0, "cpu:8", {"x": 8}, "optimal", 1.0, 1.0, 1.0, "FSDP", 1.0)
    assert not good.faults
    assert not replace(good, status="feasible", fastest_seconds=0.5).faults
    for bad in ({"predicted": 0.998}, {"bound": 1.1}, {"fastest_seconds": 0.99}, {"status": "raises"}):
        assert len(replace(good, **bad).faults) == 1, bad


def test_the_benchmark_draws_the_same_programs_again():
    block = objective.Block("program", 0, 1, 3)
    first, again = objective.drawn(block), objective.drawn(block)
    assert len(first) == 3 and [repr(one) for one in first] == [repr(one) for one in again]
