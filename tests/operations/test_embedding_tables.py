"""Embedding tables over devices: balance against exhaustive search, and lookups against plain indexing."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import integers, normal
from equality import are_equal, assert_equal
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import ArgumentError, Link, autoshard
from autoshard.operations.call import Call
from autoshard.ops import EmbeddingTables
from autoshard.ops.tables import balancing
from autoshard.ops.tables.balancing import balanced, greedy, karmarkar_karp, loads
from autoshard.propagation.registry import rule_of

ROWS = (40, 7, 23, 3, 16, 9)


def best_load(costs, devices):
    """By trying everything."""
    every = itertools.product(range(devices), repeat=len(costs))
    return min(max(loads(costs, one, devices)) for one in every)


@pytest.mark.parametrize("devices", [2, 3])
def test_balance_is_near_the_best(devices):
    """Within Graham's 4/3, and the better of both is the best in most cases."""
    generator, optimal = np.random.default_rng(devices), 0
    for _ in range(12):
        costs = generator.lognormal(3, 1, size=7).tolist()
        best = best_load(costs, devices)
        for way in (greedy, karmarkar_karp):
            assert best - 1e-9 <= max(loads(costs, way(costs, devices), devices)) <= best * 4 / 3
        optimal += max(loads(costs, balanced(costs, devices), devices)) < best * 1.001
    assert optimal >= 8


def test_differencing_beats_greedy_where_it_should():
    costs = [8, 7, 6, 5, 4]
    found = [max(loads(costs, way(costs, 2), 2)) for way in (greedy, karmarkar_karp)]
    assert (min(found), best_load(costs, 2)) == (16, 15)


def plain(tables, indices):
    """Rows summed per bag; an index that is not there reads zeros."""
    found = []
    for i, table in enumerate(tables):
        here = indices[:, i]
        read = table[jnp.clip(here, 0, len(table) - 1)]
        found.append(jnp.where(((here >= 0) & (here < len(table)))[..., None], read, 0).sum(1))
    return jnp.stack(found, 1)


TABLES = [normal(rows, 8, seed=i) for i, rows in enumerate(ROWS)]
INDICES = integers(44, 16, len(ROWS), 3) - 2


@pytest.mark.parametrize("most_rows", [None, 10])
def test_tables_and_lookups_are_as_apart(most_rows):
    layout = EmbeddingTables.of(ROWS, 4, most_rows=most_rows)
    parts = layout.together(TABLES)
    assert_equal(layout.apart(parts), TABLES)
    assert_equal(layout.lookup(parts, INDICES), plain(TABLES, INDICES))


def test_split_tables_are_planned_and_predicted():
    """Values and gradients of plain indexing, and the collectives that were predicted."""
    shape, layout = {"x": 8}, EmbeddingTables.of(ROWS, 8, most_rows=12)
    weights = normal(16, len(ROWS), 8, seed=9)

    def loss(parts, indices):
        return jnp.sum(layout.lookup(parts, indices) * weights)

    chips = dataclasses.replace(slow_chips(shape), links={"x": Link(1e-9, 1e9)})
    fixed = {"parts": P("x"), "indices": P("x")}
    step = autoshard(jax.value_and_grad(loss), mesh=mesh_of(shape), topology=chips, fixed=fixed)
    parts = layout.together(TABLES)
    plan = step.plan(parts, INDICES)
    assert {run.name for run in plan.annotations.runs.values()} == {"exchanged"}
    assert tally(plan.predicted.collectives) == tally(plan.verify().collectives)
    value, gradient = step(parts, INDICES)
    expected = jax.value_and_grad(lambda tables: jnp.sum(plain(tables, INDICES) * weights))(TABLES)
    assert_equal((value, layout.apart(gradient)), expected)


def test_a_piece_at_another_place_is_found():
    layout = EmbeddingTables.of(ROWS, 4)
    first, *others = layout.pieces
    wrong = dataclasses.replace(layout, pieces=(dataclasses.replace(first, at=first.at + 1), *others))
    parts = jnp.pad(layout.together(TABLES), [(0, 0), (0, wrong.rows_per_device - layout.rows_per_device), (0, 0)])
    assert not are_equal(wrong.lookup(parts, INDICES), plain(TABLES, INDICES))


def test_tables_of_several_dtypes_are_promoted():
    tables = [jnp.asarray([[1, 2]]), jnp.asarray([[0.5, 0.25]], jnp.bfloat16), jnp.asarray([[1 / 3, 1.0]])]
    layout = EmbeddingTables.of(np.array([1, 1, 1]), 2)
    assert_equal(layout.apart(layout.together(tables)), [table.astype(jnp.float32) for table in tables])


def test_what_does_not_fit_is_said():
    with pytest.raises(ArgumentError, match="positive"):
        EmbeddingTables.of((3, 0), 2)
    with pytest.raises(ArgumentError, match="1 costs for 2 tables"):
        EmbeddingTables.of((3, 4), 2, costs=[1])
    with pytest.raises(ArgumentError, match="one width"):
        EmbeddingTables.of((3,), 2).together([normal(4, 8)])
    with pytest.raises(ArgumentError, match="one width"):
        EmbeddingTables.of((3,), 2).together([normal(3)])
    with pytest.raises(ArgumentError, match=r"\[3, 0\] rows"):
        EmbeddingTables.of(np.array([3, 0]), 2)
    with pytest.raises(ArgumentError, match="integers as indices, not float32"):
        EmbeddingTables.of((3,), 2).lookup(normal(2, 3, 8), normal(4, 1, 1))
    with pytest.raises(ArgumentError, match="lookup takes parts"):
        EmbeddingTables.of((3,), 2).lookup(normal(2, 3, 8), integers(3, 4, 2, 1))
    assert balancing.greedy([], 2) == ()


def test_devices_that_have_all_indices_sum_what_they_find():
    shape, layout = {"x": 4}, EmbeddingTables.of(ROWS, 4)
    mesh, parts = mesh_of(shape), layout.together(TABLES)
    equation = autoshard(lambda *x: layout.lookup(*x), mesh=mesh).trace(parts, INDICES).equations[-1]
    call = Call.of(equation, rule_of(equation))
    (run,) = (run for run in call.runs(shape) if run.name == "summed")
    assert_equal(call.on_mesh(run, mesh)(parts, INDICES)[0], plain(TABLES, INDICES))
