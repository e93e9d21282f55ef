"""`reshard` held against the collectives of compiled programs. All pairs of layouts: `benchmarks/resharding.py`."""

import dataclasses
import itertools
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from autoshard.compiled.collectives import read_collectives
from autoshard.layout import Layout, spec_of
from autoshard.mesh import tilings
from autoshard.mesh.collectives import seconds
from autoshard.mesh.links import Link
from autoshard.mesh.resharding import ReshardingStep, _Group, _path, path, reshard, reshard_seconds, stops
from autoshard.mesh.topology import Topology

MESHES = [{"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2}]
SHAPES = {1: (16,), 2: (16, 24), 3: (16, 24, 40)}  # every count divides every size, no two sizes are alike


def layouts(mesh_shape, ndim: int) -> list[Layout]:
    """Every layout whose axes stand in mesh order."""
    places = itertools.product(range(ndim + 1), repeat=len(mesh_shape))
    return [
        tuple(tuple(axis for axis, dim in zip(mesh_shape, where, strict=True) if dim == d) for d in range(ndim))
        for where in places
    ]


def observed(
    mesh_shape, shape, source: Layout, target: Layout, between_operations: bool = False
) -> tuple[ReshardingStep, ...]:
    """What XLA compiles the resharding to, alone or as a constraint on a value inside."""
    devices = np.array(jax.devices()[: math.prod(mesh_shape.values())])
    mesh = Mesh(devices.reshape(tuple(mesh_shape.values())), tuple(mesh_shape))
    before, *way, after = (
        NamedSharding(mesh, spec_of(layout)) for layout in (source, *stops(source, target, mesh_shape), target)
    )

    def moved(x):
        for sharding in (*way, after):
            x = jax.lax.with_sharding_constraint(x, sharding)
        return x

    def step(x):
        return (
            jnp.tanh(moved(jax.lax.with_sharding_constraint(jnp.tanh(x), before))) if between_operations else moved(x)
        )

    jitted = jax.jit(step, in_shardings=before, out_shardings=after)
    hlo = jitted.lower(jax.ShapeDtypeStruct(shape, jnp.float32)).compile().as_text()
    return tuple(ReshardingStep(c.kind, c.axes, c.bytes) for c in read_collectives(hlo, mesh_shape))


def check(mesh_shape, shape, source, target, **how):
    predicted = reshard(shape, 4, source, target, mesh_shape)
    assert predicted == observed(mesh_shape, shape, source, target, **how), (mesh_shape, source, target, predicted)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_every_pair_of_one_dim(mesh_shape):
    for source, target in itertools.permutations(layouts(mesh_shape, 1), 2):
        check(mesh_shape, SHAPES[1], source, target)


def test_pairs_of_two_dims_and_two_axes():
    for source, target in list(itertools.permutations(layouts(MESHES[1], 2), 2))[::2]:
        check(MESHES[1], SHAPES[2], source, target)


def _random_layout(rng, mesh_shape, ndim):
    axes = rng.sample(list(mesh_shape), rng.randint(0, len(mesh_shape)))  # in any order inside a dim
    dims = [rng.randrange(ndim) for _ in axes]
    return tuple(tuple(axis for axis, dim in zip(axes, dims, strict=True) if dim == d) for d in range(ndim))


@pytest.mark.parametrize("seed", range(40))
def test_random_pairs(seed):
    rng = random.Random(seed)
    mesh_shape = rng.choice([*MESHES, {"x": 3, "y": 2}])
    ndim = rng.randint(2, 3)
    source, target = (_random_layout(rng, mesh_shape, ndim) for _ in range(2))
    shape = tuple(3 * size for size in SHAPES[ndim])
    check(mesh_shape, shape, source, target, between_operations=seed % 2 == 0)


@pytest.mark.parametrize(
    "sizes, every", [((3, 2), 5), ((2, 3), 5), ((2, 1, 3), 25), pytest.param((2, 1, 3), 5, marks=pytest.mark.slow)]
)
def test_pairs_on_axes_of_unlike_sizes(sizes, every):
    """Some of all pairs: XLA since JAX 0.11.1 would end the process on some of them."""
    mesh_shape = dict(zip("xyz", sizes, strict=False))
    for source, target in list(itertools.permutations(layouts(mesh_shape, 2), 2))[::every]:
        check(mesh_shape, (36, 24), source, target)


def layout_of(text: str) -> Layout:
    return tuple(() if dim == "_" else tuple(dim) for dim in text.split())


@pytest.mark.parametrize(
    "source, target, way",
    [
        ("x _", "_ xy", ["_ x"]),  # all_to_all, then a slice
        ("y _", "_ yx", ["_ y"]),
        ("y _", "_ xy", ["_ _"]),
        ("xy _", "y x", ["x _", "_ x"]),
        ("x _", "y x", ["_ x"]),
        ("x y", "_ _", []),
        ("y x", "_ _", []),  # XLA gathers the last dim first; the other order moves fewer bytes
    ],
)
def test_ways_by_hand(source, target, way):
    assert stops(layout_of(source), layout_of(target), {"x": 3, "y": 2}) == tuple(map(layout_of, way))
    assert stops(layout_of(source), layout_of(target), {"x": 4, "y": 2}) == ()


def test_oracle_can_fail(monkeypatch):
    pair = ((), ("x",)), (("x",), ("y",))
    check(MESHES[1], SHAPES[2], *pair)
    forget()
    with monkeypatch.context() as without:  # a partitioner that lacks one of its ways
        without.setattr(_Group, "shifted_all_to_all", lambda *_: None)
        with pytest.raises(AssertionError):
            check(MESHES[1], SHAPES[2], *pair)
    forget()


def forget():
    for function in (_path, tilings.tiling_of, tilings.members_of):
        function.cache_clear()


# by hand: 16x24 float32 on x=4, y=2 is 1536 bytes: (from, to, steps)
STEPS = [
    ("x _", "_ _", [("all_gather", "x", 1536)]),
    ("xy _", "x _", [("all_gather", "y", 384)]),
    ("_ _", "x y", []),
    ("x _", "x y", []),
    ("x _", "_ x", [("all_to_all", "x", 384)]),
    ("xy _", "x y", [("all_to_all", "y", 192)]),
    ("x y", "_ _", [("all_gather", "y", 384), ("all_gather", "x", 1536)]),
    ("xy _", "yx _", [("collective_permute", "xy", 192)]),
    ("x _", "y _", [("collective_permute", "xy", 384), ("all_gather", "x", 768)]),
    ("xy _", "_ x", [("all_gather", "xy", 1536)]),  # full rematerialization, then a slice
]


@pytest.mark.parametrize("source, target, steps", STEPS)
def test_steps_by_hand(source, target, steps):
    found = reshard((16, 24), 4, layout_of(source), layout_of(target), {"x": 4, "y": 2})
    assert [(s.kind, "".join(s.axes), s.bytes) for s in found] == steps


def test_seconds_are_those_of_the_steps():
    topology = Topology({"x": Link(1e-6, 1e9), "y": Link(1e-6, 1e8)}, 1e9, 1e10, {"float32": 1e12})
    mesh_shape = {"x": 4, "y": 2}
    source, target = (("x",), ("y",)), ((), ())
    expected = seconds("all_gather", ("y",), 384, mesh_shape, topology)
    expected += seconds("all_gather", ("x",), 1536, mesh_shape, topology)
    assert reshard_seconds((16, 24), 4, source, target, mesh_shape, topology) == pytest.approx(expected)
    assert reshard_seconds((16, 24), 4, target, source, mesh_shape, topology) == 0


def test_an_uneven_dim_is_padded():
    (step,) = reshard((10,), 4, (("x",),), ((),), {"x": 4})
    assert step == ReshardingStep("all_gather", ("x",), 12 * 4)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (2, 4, 2), (8, 8)])
def test_what_is_found_for_layouts_alike_is_found_for_each(sizes):
    """Whole dims are left out; that changes nothing, and what depends on them is told."""
    mesh, rng = dict(zip("xyz", sizes, strict=False)), random.Random(0)
    every = {ndim: layouts(mesh, ndim) for ndim in (1, 2, 3, 4, 5)}
    remembered = set()
    for _ in range(3000):
        some = every[rng.randint(1, 5)]
        source, target = rng.choice(some), rng.choice(some)
        found = path(source, target, mesh)
        assert found == _path(source, target, tuple(mesh.items()))[0], (source, target)
        remembered.add(found)
    assert len(remembered) > 20


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2), (2, 2, 2, 2), (3, 9)], ids=str)
def test_digits_tell_what_devices_do(monkeypatch, sizes):
    """Both ways to write tilings lead to the same collectives, axes in any order inside a dim."""
    mesh, rng = tuple(zip("xyzw", sizes, strict=False)), random.Random(0)
    pairs = [tuple(_random_layout(rng, dict(mesh), ndim) for _ in range(2)) for ndim in (2, 3) for _ in range(300)]
    by_digits = [_path(*pair, mesh) for pair in pairs]
    forget()
    with monkeypatch.context() as without:
        without.setattr(tilings, "prime_of", lambda _: 0)
        assert by_digits == [_path(*pair, mesh) for pair in pairs]
    forget()


def test_other_digits_are_other_collectives(monkeypatch):
    """A fault in digits: copies become tiles from the minor one on."""
    mesh = (("x", 2), ("y", 2), ("z", 2))
    every = list(itertools.permutations(layouts(dict(mesh), 2), 2))
    right = [_path(*pair, mesh) for pair in every]
    forget()
    with monkeypatch.context() as planted:
        spread = tilings.DigitTiling.spread
        planted.setattr(tilings.DigitTiling, "spread", lambda tiling, factors: spread(_backwards(tiling), factors))
        assert right != [_path(*pair, mesh) for pair in every]
    forget()


def _backwards(tiling):
    return dataclasses.replace(tiling, rest=tiling.rest[::-1])
