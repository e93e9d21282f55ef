"""Each way to split a contraction or a sum: the result is right, by the collectives that the strategy names."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from oracles import adjusted, mesh_of, tally
from programs import f32, grouped, traced

from autoshard import Collective
from autoshard.compiled.collectives import read_collectives
from autoshard.layout import spec_of
from autoshard.lower import annotated
from autoshard.model.groups import Group
from autoshard.model.strategies import REDUCE_SCATTER, Strategy, strategies_of
from autoshard.model.xla.backends import CPU, V5P
from autoshard.plans.annotations import Annotations
from autoshard.plans.chosen_options import scatter_of


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def smallest(x, y):
    """The least of each row of x, and what stands in its place in y."""
    infinite = jnp.float32(jnp.inf)
    return jax.lax.reduce((x, y), (infinite, infinite), _less, (1,))[1]


def _less(one, other):
    return tuple(jnp.where(one[0] < other[0], *pair) for pair in zip(one, other, strict=True))


PROGRAMS = {
    "matmul": (jnp.matmul, [f32(16, 32), f32(32, 64)]),
    "over two dims": (lambda x, w: jnp.tensordot(x, w, 2), [f32(16, 8, 32), f32(8, 32, 64)]),
    "convolution": (convolved, [f32(16, 8, 8, 16), f32(1, 1, 16, 32)]),
    "sum": (lambda x: x.sum((1, 2)), [f32(16, 8, 32)]),
    "sum of all but the last": (lambda x: x.sum((0, 1)), [f32(16, 8, 32)]),
    "a long vector": (lambda x: x.sum(0), [f32(16, 2048)]),
    "argmax": (lambda x: jnp.argmax(x, 1), [f32(16, 32)]),
    "smallest of pairs": (smallest, [f32(16, 32), f32(16, 32)]),
    "batched": (lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((0,), (0,)))), [f32(4, 16, 8), f32(4, 16, 8)]),
}
STAGED = adjusted(V5P, "scatters", chip_rows=0)  # slices of any size
MESHES = {"8": {"x": 8}, "4x2": {"x": 4, "y": 2}, "2x4": {"x": 2, "y": 4}, "2x2x2": {"x": 2, "y": 2, "z": 2}}


FINISHES = [  # a program, a mesh, which of the strategies; the other ones are slow
    pytest.param(
        name, mesh, slice(first, None, step), marks=() if usual else pytest.mark.slow, id=f"{name}-{mesh}-{first}"
    )
    for name in PROGRAMS
    for mesh, step in {"8": 1, "4x2": 3, "2x4": 4, "2x2x2": 5}.items()
    if mesh != "2x2x2" or name in ("matmul", "sum")
    for first in range(step)
    for usual in [first == 0 and (mesh != "2x4" or name in ("matmul", "batched"))]
]


def lowered_as(strategy: Strategy, fn, group: Group, axes: dict[str, int]):
    """The function as a plan with this strategy lowers it, the sharding of its result, and random operands."""
    mesh, scatter = mesh_of(axes), scatter_of(group, strategy)
    program = traced(fn, *(jax.ShapeDtypeStruct(use.value.shape, use.value.dtype) for use in group.uses))
    (equation,), left = program.equations, strategy.output_layouts[-1]
    annotations = Annotations(
        homes={value.id: want for value, want in zip(program.arguments, strategy.operand_layouts, strict=True)}
        | {made.value.id: layout for made, layout in zip(group.outputs, strategy.output_layouts, strict=True)},
        copies={},
        wants={(equation.index, operand): want for operand, want in enumerate(strategy.operand_layouts)},
        scatters={} if scatter is None else {equation.index: scatter},
    )
    wants = [NamedSharding(mesh, spec_of(layout)) for layout in strategy.operand_layouts]
    operands = [
        jax.device_put(np.random.default_rng(i).normal(size=value.shape).astype(np.float32), want)
        for i, (value, want) in enumerate(zip(program.arguments, wants, strict=True))
    ]
    return annotated(program, annotations, mesh), NamedSharding(mesh, spec_of(left)), operands


def run_as(strategy: Strategy, fn, group: Group, axes: dict[str, int]):
    """The compiled function; it makes the right thing of random operands."""
    step, left, operands = lowered_as(strategy, fn, group, axes)
    compiled = jax.jit(step, out_shardings=[left]).lower(*operands).compile()
    (found,) = compiled(*operands)
    np.testing.assert_allclose(found, fn(*map(np.asarray, operands)), rtol=1e-4, atol=1e-4)
    return compiled


def assert_finished(fn, group: Group, strategy: Strategy, axes: dict[str, int]) -> None:
    compiled = run_as(strategy, fn, group, axes)
    named = [Collective(f.kind, f.axes, 4 * f.elements, 1, "") for f in strategy.finishes]
    assert tally(read_collectives(compiled.as_text(), axes)) == tally(named), strategy


@pytest.mark.parametrize("name, mesh, part", FINISHES)
def test_strategies_finish_as_they_say(name, mesh, part):
    fn, operands = PROGRAMS[name]
    (group,) = grouped(fn, *operands)
    finished = [strategy for strategy in strategies_of(group, MESHES[mesh], CPU) if strategy.finishes]
    assert finished
    for strategy in finished[part]:
        assert_finished(fn, group, strategy, MESHES[mesh])


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["matmul", "batched", "a long vector"])
def test_scatters_in_stages(name, mesh):
    """As for v5p, which has none over all of eight devices."""
    fn, operands = PROGRAMS[name]
    (group,) = grouped(fn, *operands)
    kinds = [REDUCE_SCATTER] * 2
    staged = [s for s in strategies_of(group, MESHES[mesh], STAGED) if [f.kind for f in s.finishes] == kinds]
    assert staged
    for strategy in staged:
        assert_finished(fn, group, strategy, MESHES[mesh])


@pytest.mark.parametrize("backend", [CPU, STAGED])
def test_scatters_can_be_differentiated(backend):
    fn, operands = PROGRAMS["over two dims"]
    (group,) = grouped(fn, *operands)
    strategies = strategies_of(group, MESHES["4x2"], backend)
    found = [s for s in strategies if REDUCE_SCATTER in {finish.kind for finish in s.finishes}]
    for strategy in found[:: len(found) // 6]:
        step, _, arrays = lowered_as(strategy, fn, group, MESHES["4x2"])
        weight = np.random.default_rng(9).normal(size=group.outputs[0].value.shape)
        gradients = jax.jit(jax.grad(lambda *xs: (step(*xs)[0] * weight).sum(), (0, 1)))(*arrays)  # noqa: B023
        expected = jax.grad(lambda *xs: (fn(*xs) * weight).sum(), (0, 1))(*map(np.asarray, arrays))  # noqa: B023
        for one, other in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_strategy_that_xla_does_not_run_is_caught():
    fn, operands = PROGRAMS["matmul"]
    (group,) = grouped(fn, *operands)
    strategy = next(s for s in strategies_of(group, MESHES["4x2"]) if s.finishes)
    wrong = tuple(replace(finish, elements=2 * finish.elements) for finish in strategy.finishes)
    with pytest.raises(AssertionError):
        assert_finished(fn, group, replace(strategy, finishes=wrong), MESHES["4x2"])


def test_stages_the_wrong_way_round_are_caught():
    fn, operands = PROGRAMS["matmul"]
    (group,) = grouped(fn, *operands)
    strategy = next(s for s in strategies_of(group, MESHES["4x2"], STAGED) if len(s.finishes) > 1)
    with pytest.raises(AssertionError):
        run_as(replace(strategy, finishes=strategy.finishes[::-1]), fn, group, MESHES["4x2"])
