"""However early the search ends, no plan is dearer than data parallelism where that fits: `plans/alternatives.py`."""

import functools
import math
from dataclasses import replace

import pytest
from jax.sharding import AbstractMesh
from oracles import SMALL, slow_chips
from sweeps import some

import autoshard
from autoshard import planning
from autoshard.plans.alternatives import solutions_of
from autoshard.propagation import rules_for
from autoshard.solver.problem import UndecidedError

NO_TIME = 0.001  # s, in which a search tries the first options
SHAPE = {"data": 4, "model": 2}


@functools.cache
def model_of(name):
    return SMALL[name]()


def options_of_step(time_limit, **more):
    mesh = AbstractMesh(tuple(SHAPE.values()), tuple(SHAPE))
    return {"mesh": mesh, "topology": slow_chips(tuple(SHAPE)), "time_limit": time_limit, "donate_argnums": 0, **more}


def formulation_of(name):
    model = model_of(name)
    sharded = autoshard.autoshard(model.step, **options_of_step(60))
    program = sharded.trace(model.state, model.batches(0))
    return planning.formulated(program, rules_for(program), sharded._options)


def plan_of(name, **more):
    model = model_of(name)
    return autoshard.plan(model.step, model.state, model.batches(0), **options_of_step(NO_TIME, **more))


def assert_no_dearer(name, above=1e-9):
    plain = solutions_of(formulation_of(name))["data parallel"]
    found = plan_of(name)
    assert found.bound <= found.cost <= plain.cost * (1 + above), (found.cost, plain.cost)


@pytest.mark.parametrize("name", some(SMALL, "lstm", "mlp", "moe", "tied"))
def test_a_plan_is_no_dearer_than_data_parallelism(name):
    assert_no_dearer(name)


@pytest.mark.parametrize("name", some(SMALL, "mlp", "moe"))
def test_first_options_alone_are_dearer(name, monkeypatch):
    """The test above can fail."""
    monkeypatch.setattr(planning, "no_dearer_than_data_parallel", lambda formulation, search, limit, gap: search())
    with pytest.raises(AssertionError):
        assert_no_dearer(name)


@pytest.mark.parametrize("name", some(SMALL, "mlp", "moe"))
def test_time_that_ends_formulating_too_leaves_data_parallelism(name, monkeypatch):
    """The part in which one dim is split is planned then. It has data parallelism, but for copies over a few axes."""
    monkeypatch.setattr(planning, "formulating_ends", lambda until: -math.inf)
    assert plan_of(name).is_late
    assert_no_dearer(name, above=1e-4)


def test_nothing_found_in_time_leaves_data_parallelism(monkeypatch):
    def ended(*args):
        raise UndecidedError("time was up", bound=0.0)

    monkeypatch.setattr(planning, "solve_within", ended)
    assert_no_dearer("mlp")
    with pytest.raises(autoshard.SolverError, match="time was up"):
        plan_of("mlp", memory=100)


@pytest.mark.parametrize("node", range(2))
def test_what_forbids_data_parallelism_stands(node):
    """A caller may restrict the problem: here the batch, or the last node, to what splits nothing."""
    formulation = formulation_of("mlp")
    batch = next(i for i in range(len(formulation.arguments)) if i not in formulation.program.state)
    restricted = [batch, len(formulation.problem.costs) - 1][node]
    problem = formulation.problem.restrict({restricted: [0]})
    found = planning.cheapest(replace(formulation, problem=problem), NO_TIME)
    assert found.choice[restricted] == 0


def test_data_parallelism_over_the_limit_is_no_plan():
    """The search ends with something leaner, or says that nothing fits."""
    formulation = formulation_of("mlp")
    plain = formulation.peak_bytes(solutions_of(formulation)["data parallel"].choice)
    tight = 0.9 * plain / formulation.prices.backend.usable
    found = plan_of("mlp", memory=tight)
    assert found.predicted.peak_bytes <= 0.9 * plain
