"""Each way to split a contraction or a sum: XLA finishes the result with the collectives that the strategy names."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from oracles import mesh_of, tally
from programs import f32, grouped

from autoshard import Collective
from autoshard.layout import spec_of
from autoshard.report.hlo import read_collectives
from autoshard.report.verification import as_cpu_shows
from autoshard.solver.groups import Group
from autoshard.solver.strategies import Strategy, strategies_of


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


PROGRAMS = {
    "matmul": (jnp.matmul, [f32(16, 32), f32(32, 64)]),
    "over two dims": (lambda x, w: jnp.tensordot(x, w, 2), [f32(16, 8, 32), f32(8, 32, 64)]),
    "convolution": (convolved, [f32(16, 8, 8, 16), f32(1, 1, 16, 32)]),
    "sum": (lambda x: x.sum((1, 2)), [f32(16, 8, 32)]),
}
MESHES = {"4x2": {"x": 4, "y": 2}, "2x4": {"x": 2, "y": 4}, "2x2x2": {"x": 2, "y": 2, "z": 2}}


def assert_finished(fn, group: Group, strategy: Strategy, axes: dict[str, int]) -> None:
    mesh = mesh_of(axes)
    wants = tuple(NamedSharding(mesh, spec_of(layout)) for layout in strategy.wants)
    left = NamedSharding(mesh, spec_of(strategy.leaves[0]))

    def run(*operands):
        constrained = map(jax.lax.with_sharding_constraint, operands, wants)
        return jax.lax.with_sharding_constraint(fn(*constrained), left)

    operands = [jax.ShapeDtypeStruct(use.value.shape, use.value.dtype) for use in group.uses]
    compiled = jax.jit(run, in_shardings=wants, out_shardings=left).lower(*operands).compile()
    named = [Collective(f.kind, f.axes, 4 * f.elements, 1, "") for f in strategy.finishes]
    assert tally(read_collectives(compiled.as_text(), axes)) == tally(as_cpu_shows(named, axes)), strategy


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_strategies_finish_as_they_say(name, mesh):
    fn, operands = PROGRAMS[name]
    (group,) = grouped(fn, *operands)
    finished = [strategy for strategy in strategies_of(group, MESHES[mesh]) if strategy.finishes]
    assert finished
    for strategy in finished:
        assert_finished(fn, group, strategy, MESHES[mesh])


def test_a_strategy_that_xla_does_not_run_is_caught():
    fn, operands = PROGRAMS["matmul"]
    (group,) = grouped(fn, *operands)
    strategy = next(s for s in strategies_of(group, MESHES["4x2"]) if s.finishes)
    wrong = tuple(replace(finish, elements=2 * finish.elements) for finish in strategy.finishes)
    with pytest.raises(AssertionError):
        assert_finished(fn, group, replace(strategy, finishes=wrong), MESHES["4x2"])
