"""Layouts against PartitionSpecs and against where JAX really puts the pieces."""

import itertools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of

from autoshard.errors import MeshError
from autoshard.layout import (
    divides,
    in_mesh_order,
    layout_of,
    layouts_of,
    local_shape,
    spec_of,
    with_auto_axes,
)

MESH = {"x": 4, "y": 2}
SPECS = [  # spec, dims, layout
    (None, 2, ((), ())),
    (P(), 0, ()),
    (P("x"), 2, (("x",), ())),
    (P(None, ("x", "y")), 3, ((), ("x", "y"), ())),
    (P(("x",), None), 2, (("x",), ())),
    (P(P.UNCONSTRAINED, "y"), 2, ((), ("y",))),
]


@pytest.mark.parametrize("spec, ndim, layout", SPECS)
def test_specs_have_one_normal_form(spec, ndim, layout):
    assert layout_of(spec, ndim) == layout
    assert layout_of(spec_of(layout), ndim) == layout


@pytest.mark.parametrize("spec, text", [(P("x", "y"), "names 2 dims, but the array has 1"), (P(("x", "x")), "twice")])
def test_specs_that_fit_no_array(spec, text):
    with pytest.raises(MeshError, match=text):
        layout_of(spec, 1)


def every_spec(ndim):
    """All ways to give each axis of MESH to a dim or to none, in either order of the axes."""
    for dims in itertools.product([None, *range(ndim)], repeat=2):
        entries = [tuple(axis for axis, dim in zip(MESH, dims, strict=True) if dim == d) for d in range(ndim)]
        yield P(*entries)
        if any(len(entry) == 2 for entry in entries):
            yield P(*(entry[::-1] for entry in entries))


def jax_shard_shape(spec, shape):
    """What one device holds by JAX's own account; None where JAX refuses."""
    try:
        return NamedSharding(mesh_of(MESH), spec).shard_shape(shape)
    except ValueError:
        return None


@pytest.mark.parametrize("shape", [(8, 8), (4, 6), (2, 3), (1, 16), (5, 8)])
def test_pieces_are_those_of_jax(shape):
    found = []
    for spec in every_spec(len(shape)):
        layout = layout_of(spec, len(shape))
        expected = jax_shard_shape(spec, shape)
        assert divides(shape, layout, MESH) == (expected is not None)
        if expected is not None:
            assert local_shape(shape, layout, MESH) == expected
            found += [layout] if in_mesh_order(layout, MESH) else []
    assert sorted(found) == sorted(layouts_of(shape, MESH))
    assert len(set(found)) == len(found)


def test_the_oracle_sees_axes_in_another_order():
    """Both orders of two axes give pieces of one shape, but not the same piece to the same device."""
    one, other = (NamedSharding(mesh_of(MESH), P(axes)) for axes in (("x", "y"), ("y", "x")))
    assert one.shard_shape((8,)) == other.shard_shape((8,))
    assert not one.is_equivalent_to(other, 1)
    assert in_mesh_order((("x", "y"),), MESH) and not in_mesh_order((("y", "x"),), MESH)


def test_uneven_pieces_are_padded():
    assert local_shape((5, 3), (("x",), ("y",)), MESH) == (2, 2)


@pytest.mark.parametrize("axis_type", AxisType)
def test_any_mesh_can_have_auto_axes(axis_type):
    mesh = mesh_of(MESH, axis_type)
    assert with_auto_axes(mesh) == mesh_of(MESH)
    expected = AbstractMesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    bare = AbstractMesh((4, 2), ("x", "y"), axis_types=(axis_type,) * 2)
    assert with_auto_axes(bare) == expected
    assert np.array_equal(with_auto_axes(mesh).devices, mesh.devices)
    assert set(with_auto_axes(mesh).axis_types) == {AxisType.Auto}
    assert jax.device_count() == mesh.size
