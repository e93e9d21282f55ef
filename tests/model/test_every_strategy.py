"""Every way to split every operation of the example programs and their gradients makes what one device makes.

The normal run takes a few strategies of a few programs; `python benchmarks/strategies.py` runs all of them.
"""

import math
import random

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, Case, normal
from executed import Alone, gradient_of, mismatches, operations_of
from oracles import MESHES, mesh_of

from autoshard.lower import on_shards
from autoshard.model.strategies import strategies_of
from autoshard.model.xla.backends import CPU

MOST = 1  # strategies of one operation in the normal run
BY_NAME = {case.name: case for case in CASES}
CHOSEN = {  # the program -> the mesh
    "argmax": "4x2",
    "conv_general_dilated, feature groups": "4x2",
    "dynamic_update_slice": "8",
    "reduce_xor": "2x2x2",
    "scatter-add": "8",
    "sort": "8",
}
EVERY = [(name, mesh) for name in BY_NAME for mesh in MESHES if mesh != "1"]


def some(strategies: list) -> list:
    return strategies if len(strategies) <= MOST else random.Random(0).sample(strategies, MOST)


def faults(case: Case, mesh: str, chosen=list) -> list[tuple[str, str]]:
    found = []
    for one in filter(None, (case, gradient_of(case))):
        for operation in (one for one in operations_of(one).values() if not one.known):
            found += [pair for pair in mismatches(operation, mesh_of(MESHES[mesh]), chosen) if pair[1]]
    return found


@pytest.mark.parametrize("name, mesh", [(name, mesh) for name, mesh in CHOSEN.items() if name in BY_NAME])
def test_some_strategies(name, mesh):
    assert not faults(BY_NAME[name], mesh, some)


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh", EVERY)
def test_all_strategies(name, mesh):
    assert not faults(BY_NAME[name], mesh)


def test_a_strategy_that_forgets_an_operand_is_caught(monkeypatch):
    """A product over a split dim that runs on shards, of which no device sums those of the others."""
    operation = only_operation(jnp.matmul, normal(8, 16), normal(16, 8))
    mesh = mesh_of(MESHES["4x2"])
    assert not [pair for pair in mismatches(operation, mesh) if pair[1]]
    monkeypatch.setattr(on_shards, "reduce_scatter", _first_slice)
    assert [pair for pair in mismatches(operation, mesh) if pair[1]]


def _first_slice(partial, dim, stages, others):
    pieces = math.prod(len(groups[0]) if groups else jax.lax.axis_size(axes) for axes, groups in stages)
    return jax.lax.slice_in_dim(partial, 0, partial.shape[dim] // pieces, axis=dim)


def only_operation(fn, *args):
    (operation,) = operations_of(Case("", "", fn, args)).values()
    return operation


def test_idle_axes_are_among_the_strategies():
    operation = only_operation(lambda x: jax.lax.reduce_max(x, (1,)), normal(8, 16))
    strategies = strategies_of(Alone.of(operation).group, MESHES["2x2x2"], CPU)
    used = {frozenset(axis for _, axes in strategy.assignment for axis in axes) for strategy in strategies}
    assert len(used) == 8
