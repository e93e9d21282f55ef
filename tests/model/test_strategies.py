"""The ways to split a group: counted by hand, against all layouts there are, and run device by device in NumPy."""

import itertools
import math
from collections import Counter
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import adjusted
from programs import f32, grouped, model_program

from autoshard.layout import layouts_of, replicated
from autoshard.model.grouping import groups_of
from autoshard.model.strategies import ALL_REDUCE, REDUCE_SCATTER, Strategy, strategies_of
from autoshard.model.xla.backends import V5E
from autoshard.model.xla.scatters import Scatters
from autoshard.propagation import rules_for

LINE, PLANE, ODD = {"x": 2}, {"x": 4, "y": 2}, {"x": 3, "y": 2}
CUBE = {"x": 2, "y": 2, "z": 2}


def matmul(x, w):
    return x @ w


def add(x, b):
    return x + b


def total(x):
    return x.sum((1, 2))


def largest(x):
    return x.max(0)


def all_of_it(x):
    return x.sum()


# Counted by hand. A matmul on one axis: nothing, rows, columns, or the contracted dim, finished by an all_reduce or
# scattered on rows or columns. On two axes it matters that x comes before y in every dim: of the contracted dim, x
# scatters on no dim that y splits.
COUNTS = [  # function, shapes, mesh, strategies
    (matmul, [(8, 8), (8, 8)], LINE, 3 + 3),
    (matmul, [(8, 4), (4, 6)], {"x": 4}, 2 + 2),  # 6 columns are not split by 4, nor scattered on
    (matmul, [(5, 3), (3, 7)], LINE, 1),
    (matmul, [(8, 8), (8, 8)], PLANE, 9 + (3 + 2 + 2) + (3 + 3 + 3) + 3),
    (matmul, [(4, 8), (8, 8)], PLANE, (9 - 1) + (3 + 2 + 2) + (3 + 2 + 3) + 2),  # 4 rows are never split by 8
    (add, [(8, 4), (4,)], LINE, 3),
    (add, [(8, 4), (4,)], PLANE, 9 - 1),
    (all_of_it, [(8,)], PLANE, 4),
    # both dims that are summed, one over each axis: one of the two may scatter
    (total, [(8, 4, 4)], {"x": 2, "y": 2}, (1 + 8 + 4 + 6) + (1 + 2 + 2) + (1 + 1 + 1) + 1),
]


@pytest.mark.parametrize("fn, shapes, mesh, count", COUNTS)
def test_counts(fn, shapes, mesh, count):
    (group,) = grouped(fn, *(f32(*shape) for shape in shapes))
    strategies = strategies_of(group, mesh)
    assert len(strategies) == len(set(strategies)) == count
    first = strategies[0]
    assert first.assignment == first.finishes == ()
    assert first.operand_layouts == tuple(replicated(len(use.value.shape)) for use in group.uses)


# Every triple of layouts that a matmul can have, found by looking at all triples.


def role(axis: str, x, w, y) -> str | None:
    """What a mesh axis does in a matmul whose operands and result lie so; None: no strategy does that."""
    dims = [[dim for dim, axes in enumerate(layout) if axis in axes] for layout in (x, w, y)]
    roles = {
        ((), (), ()): "nothing",
        ((0,), (), (0,)): "rows",
        ((), (1,), (1,)): "columns",
        ((1,), (0,), ()): "all_reduce",
        ((1,), (0,), (0,)): "scatter",
        ((1,), (0,), (1,)): "scatter",
    }
    return roles.get(tuple(map(tuple, dims)))


def matmul_layouts(m: int, k: int, n: int, mesh) -> Counter:
    """(operands, result) layouts of a matmul: one role per axis, and the contracted dim finished in one way."""
    found = Counter()
    for x, w, y in itertools.product(layouts_of((m, k), mesh), layouts_of((k, n), mesh), layouts_of((m, n), mesh)):
        roles = {axis: role(axis, x, w, y) for axis in mesh}
        if None in roles.values() or {"all_reduce", "scatter"} <= set(roles.values()):
            continue
        if sum(any(roles[axis] == "scatter" for axis in dim) for dim in y) > 1:  # on one dim at a time
            continue
        scattered = [[roles[axis] == "scatter" for axis in dim] for dim in y]
        if all(dim == sorted(dim) for dim in scattered):  # what is scattered cuts the pieces that are there finer
            found[(x, w), y] += 1
    return found


@pytest.mark.parametrize("mesh", [LINE, PLANE, ODD, CUBE])
@pytest.mark.parametrize("m, k, n", [(8, 8, 8), (4, 12, 6), (24, 2, 3)])
def test_a_matmul_against_all_layouts(m, k, n, mesh):
    (group,) = grouped(matmul, f32(m, k), f32(k, n))
    strategies = strategies_of(group, mesh)
    assert Counter((s.operand_layouts, s.output_layouts[0]) for s in strategies) == matmul_layouts(m, k, n, mesh)


# What a strategy computes.


def flat(x):
    return x.reshape(-1)


def two_dims(x, w):
    return (np if isinstance(x, np.ndarray) else jnp).tensordot(x, w, 2)


RUN = {  # function, shapes, and what joins partial results
    "matmul": (matmul, [(8, 12), (12, 24)], np.sum),
    "batched matmul": (matmul, [(4, 8, 2), (4, 2, 6)], np.sum),
    "matmul over two dims": (two_dims, [(8, 12, 6), (12, 6, 24)], np.sum),
    "bias": (add, [(8, 6), (6,)], None),
    "one dim of two": (flat, [(4, 6)], None),
    "sum over two dims": (total, [(6, 4, 12)], np.sum),
    "sum of all": (all_of_it, [(24,)], np.sum),
    "maximum": (largest, [(8, 12)], np.max),
}


def shard(array: np.ndarray, layout, device: tuple[int, ...], mesh) -> np.ndarray:
    """One device's part of an array."""
    where = dict(zip(mesh, device, strict=True))
    for dim, axes in enumerate(layout):
        for axis in axes:  # major to minor
            array = np.split(array, mesh[axis], axis=dim)[where[axis]]  # raises where it is uneven
    return array


def assert_computes(fn, join, group, strategy: Strategy, mesh, arrays) -> None:
    """Each device runs `fn` on its shards and collectives follow: then it holds its shard of the result."""
    whole = np.asarray(fn(**arrays))
    assigned = [axis for _, axes in strategy.assignment for axis in axes]
    assert len(set(assigned)) == len(assigned)
    devices = list(itertools.product(*map(range, mesh.values())))
    names = [use.value.name for use in group.uses]
    partial = {}
    for device in devices:
        shards = {
            name: shard(arrays[name], want, device, mesh)
            for name, want in zip(names, strategy.operand_layouts, strict=True)
        }
        partial[device] = fn(**shards)
    (left,) = strategy.output_layouts
    reduced = [axis for finish in strategy.finishes for axis in finish.axes]
    scatters = [finish for finish in strategy.finishes if finish.kind == REDUCE_SCATTER]
    assert len(set(reduced)) == len(reduced) and len(scatters) <= 1
    scattered = scatters[0].axes if scatters else ()
    assert sum(axis in scattered for dim in left for axis in dim) == len(scattered)
    unscattered = tuple(tuple(axis for axis in dim if axis not in scattered) for dim in left)
    for before, after in zip(unscattered, left, strict=True):
        assert after[: len(before)] == before  # scattering cuts finer what is there
    still = [i for i, axis in enumerate(mesh) if axis not in reduced]
    for device in devices:
        parts = [partial[other] for other in devices if all(other[i] == device[i] for i in still)]
        found = join(parts, axis=0) if join else parts[0]
        np.testing.assert_allclose(found, shard(whole, unscattered, device, mesh), rtol=1e-10)
        shard(whole, left, device, mesh)
    for finish in strategy.finishes:
        assert finish.kind in (ALL_REDUCE, REDUCE_SCATTER) and finish.output == 0
        layout = left if finish.kind == REDUCE_SCATTER or group.sums_locally(strategy.axes) else unscattered
        assert finish.elements == shard(whole, layout, devices[0], mesh).size


def run_all(fn, shapes, join, mesh, damage=lambda strategy: strategy) -> None:
    (group,) = grouped(fn, *(f32(*shape) for shape in shapes))
    arrays = {use.value.name: np.random.default_rng(i).normal(size=use.value.shape) for i, use in enumerate(group.uses)}
    for strategy in strategies_of(group, mesh):
        assert_computes(fn, join, group, damage(strategy), mesh, arrays)


@pytest.mark.parametrize("mesh", [LINE, PLANE, ODD])
@pytest.mark.parametrize("name", RUN)
def test_each_strategy_computes_the_result(name, mesh):
    run_all(*RUN[name], mesh)


FAULTS = {
    "never finished": lambda s: replace(s, finishes=()),
    "reduced twice": lambda s: replace(s, finishes=s.finishes * 2),
    "as if all_reduce scattered": lambda s: replace(s, finishes=tuple(replace(f, kind=ALL_REDUCE) for f in s.finishes)),
    "wrong bytes": lambda s: replace(s, finishes=tuple(replace(f, elements=f.elements * 2) for f in s.finishes)),
    "operands swapped": lambda s: replace(s, operand_layouts=s.operand_layouts[::-1]),
    "left whole": lambda s: replace(s, output_layouts=tuple(replicated(len(layout)) for layout in s.output_layouts)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_strategy_is_caught(fault):
    with pytest.raises((AssertionError, ValueError)):
        run_all(*RUN["matmul"], PLANE, damage=FAULTS[fault])


# Where a backend has no reduce_scatter over all devices.

STAGES = [  # mesh, axes of each stage, devices of each, elements of 24 x 48 that each leaves
    ({"x": 4, "y": 2}, [("y",), ("x",)], [2, 4], [576, 144]),
    ({"x": 2, "y": 2, "z": 3}, [("y", "z"), ("x",)], [6, 2], [192, 96]),
    ({"x": 8}, [("x",), ("x",)], [4, 2], [288, 144]),
    ({"x": 3}, [("x",)], [3], [384]),
]


@pytest.mark.parametrize("mesh, axes, devices, elements", STAGES)
def test_stages(mesh, axes, devices, elements):
    (group,) = grouped(matmul, f32(24, 24), f32(24, 48))
    for strategy in strategies_of(group, mesh, replace(V5E, scatters=Scatters(over_all_up_to=0))):
        scatters = [finish for finish in strategy.finishes if finish.kind == REDUCE_SCATTER]
        if math.prod(finish.devices(mesh) for finish in scatters) < math.prod(mesh.values()):
            assert len(scatters) <= 1
            continue
        assert [finish.axes for finish in scatters] == axes
        assert [finish.devices(mesh) for finish in scatters] == devices
        assert [finish.elements for finish in scatters] == elements


SLICES = [  # slices, mesh, axes of a reduce_scatter, those of each of its stages
    (2, {"s": 2, "x": 3, "y": 4}, ("s",), [("s",)]),
    (2, {"s": 2, "x": 3, "y": 4}, ("y",), [("y",)]),
    (2, {"s": 2, "x": 3, "y": 4}, ("x", "y"), [("y",), ("x",)]),  # all of a slice
    (2, {"s": 2, "x": 3, "y": 4}, ("s", "x"), [("x",), ("s",)]),
    (2, {"s": 2, "x": 3, "y": 4}, ("s", "x", "y"), [("y",), ("x",), ("s",)]),
    (6, {"s": 2, "x": 3, "y": 4}, ("s", "x"), [("s", "x")]),
    (6, {"s": 2, "x": 3, "y": 4}, ("s", "y"), [("y",), ("y",), ("s",)]),
    (1, {"s": 2, "x": 3, "y": 4}, ("x", "y"), [("x", "y")]),
]


@pytest.mark.parametrize("slices, mesh, axes, stages", SLICES)
def test_stages_of_several_slices(slices, mesh, axes, stages):
    (group,) = grouped(matmul, f32(24, 24), f32(24, 48))
    of_any_size = replace(adjusted(V5E, "scatters", chip_rows=0), slices=slices)
    found = [s.finishes for s in strategies_of(group, mesh, of_any_size)]
    found = [finishes for finishes in found if sorted({axis for f in finishes for axis in f.axes}) == sorted(axes)]
    scattered = [finishes for finishes in found if finishes[-1].kind == REDUCE_SCATTER]
    assert scattered
    for finishes in scattered:
        assert [finish.axes for finish in finishes] == stages
        left = np.cumprod([finish.devices(mesh) for finish in finishes])
        assert [finish.elements * count for finish, count in zip(finishes, left, strict=True)] == [
            finishes[0].elements * left[0]
        ] * len(stages)


# On meshes and groups of any kind.


@pytest.mark.parametrize("name", ["mlp", "moe", "lstm"])
def test_each_axis_goes_to_one_factor_evenly(name):
    program = model_program(name)
    for group in groups_of(program, rules_for(program)):
        strategies = strategies_of(group, PLANE)
        assert len(set(strategies)) == len(strategies) and not strategies[0].assignment
        for strategy in strategies:
            axes = [axis for _, some in strategy.assignment for axis in some]
            assert len(set(axes)) == len(axes)
            for factor, some in strategy.assignment:
                assert factor in group.splittable
                assert group.sizes[factor] % np.prod([PLANE[axis] for axis in some]) == 0
            for value, layout in zip(_values(group), strategy.operand_layouts + strategy.output_layouts, strict=True):
                assert layout in layouts_of(value.shape, PLANE)
            reduced = [axis for factor, some in strategy.assignment if factor in group.reduction for axis in some]
            finished = [axis for finish in strategy.finishes if finish.output == 0 for axis in finish.axes]
            times = max(1, group.gathers_per_output) if group.outputs else 0
            assert sorted(finished) == sorted(reduced * times)


def _values(group):
    return [use.value for use in group.uses] + [made.value for made in group.outputs]
