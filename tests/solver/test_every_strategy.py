"""Every way to split every operation of the example programs and their gradients makes what one device makes.

The normal run takes a few strategies of a few programs; `python benchmarks/strategies.py` runs all of them.
"""

import dataclasses
import random

import jax
import jax.numpy as jnp
import pytest
from cases import CASES, Case, normal
from executed import Alone, gradient_of, mismatches, operations_of
from oracles import MESHES, mesh_of

from autoshard.mesh.backends import CPU
from autoshard.solver.strategies import strategies_of

MOST = 3  # strategies of one operation in the normal run
BY_NAME = {case.name: case for case in CASES}
CHOSEN = {  # the program -> the mesh
    "argmax": "4x2",
    "conv_general_dilated, feature groups": "2x2x2",
    "dot_general, batched": "2x2x2",
    "dynamic_update_slice": "8",
    "gather": "4x2",
    "reduce": "4x2",
    "reduce_xor": "2x2x2",
    "scatter-add": "4x2",
    "sort": "8",
}
EVERY = [(name, mesh) for name in BY_NAME for mesh in MESHES if mesh != "1"]


def some(strategies: list) -> list:
    return strategies if len(strategies) <= MOST else random.Random(0).sample(strategies, MOST)


def faults(case: Case, mesh: str, chosen=list) -> list[tuple[str, str]]:
    found = []
    for one in filter(None, (case, gradient_of(case))):
        for operation in operations_of(one).values():
            found += [pair for pair in mismatches(operation, mesh_of(MESHES[mesh]), chosen) if pair[1]]
    return found


@pytest.mark.parametrize("name, mesh", [(name, mesh) for name, mesh in CHOSEN.items() if name in BY_NAME])
def test_some_strategies(name, mesh):
    assert not faults(BY_NAME[name], mesh, some)


@pytest.mark.slow
@pytest.mark.parametrize("name, mesh", EVERY)
def test_all_strategies(name, mesh):
    assert not faults(BY_NAME[name], mesh)


def test_a_strategy_that_forgets_to_sum_is_caught(monkeypatch):
    """A product over a split dim, whose parts nobody adds up."""
    case = Case("product", "dot_general", jnp.matmul, (normal(8, 16), normal(16, 8)))
    (operation,) = operations_of(case).values()
    right = Alone.annotations

    def forgets(self, strategy):
        annotations = right(self, strategy)
        scatters = {index: dataclasses.replace(scatter, others=()) for index, scatter in annotations.scatters.items()}
        return dataclasses.replace(annotations, scatters=scatters)

    monkeypatch.setattr(Alone, "annotations", forgets)
    assert [pair for pair in mismatches(operation, mesh_of(MESHES["4x2"])) if pair[1]]


def test_idle_axes_are_among_the_strategies():
    (operation,) = operations_of(Case("sum", "reduce_sum", lambda x: jax.lax.reduce_sum_p.bind(
        x, axes=(1,), out_sharding=None), (normal(8, 16),))).values()  # fmt: skip
    strategies = strategies_of(Alone.of(operation).group, MESHES["2x2x2"], CPU)
    used = {frozenset(axis for _, axes in strategy.assignment for axis in axes) for strategy in strategies}
    assert len(used) == 8
