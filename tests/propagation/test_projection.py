"""Layouts and factors against the elements that each device ends up with."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.propagation.projection import factors_of_layout, layout_of_factors

MESH = {"x": 2, "y": 4, "z": 3}

TO_LAYOUT = [  # dims, sizes, assignment, layout
    ((("i",), ("j",)), {"i": 8, "j": 6}, {"i": ("x", "y"), "j": ("z",)}, (("x", "y"), ("z",))),
    ((("i",), ()), {"i": 8}, {}, ((), ())),
    ((("i",),), {"i": 6}, {"i": ("y",)}, None),
    ((("i", "j"),), {"i": 2, "j": 8}, {"i": ("x",), "j": ("y",)}, (("x", "y"),)),
    ((("i", "j"),), {"i": 4, "j": 8}, {"i": ("x",), "j": ("y",)}, None),
    ((("i", "j"),), {"i": 4, "j": 8}, {"j": ("y",)}, None),
    ((("i", "j"),), {"i": 1, "j": 8}, {"j": ("y",)}, (("y",),)),
    ((("i", "j", "k"),), {"i": 2, "j": 3, "k": 4}, {"i": ("x",), "j": ("z",), "k": ("y",)}, (("x", "z", "y"),)),
    ((("i", "j", "k"),), {"i": 2, "j": 3, "k": 4}, {"i": ("x",), "k": ("y",)}, None),
    ((("i", "j"),), {"i": 8, "j": 8}, {"i": ("x",)}, (("x",),)),
    ((("i",),), {"i": 8}, {"i": ("x",), "elsewhere": ("y",)}, (("x",),)),
]


@pytest.mark.parametrize("dims, sizes, assignment, layout", TO_LAYOUT)
def test_layout_of_factors(dims, sizes, assignment, layout):
    assert layout_of_factors(dims, assignment, sizes, MESH) == layout


TO_FACTORS = [  # dims, sizes, layout, assignment
    ((("i",), ("j",)), {"i": 8, "j": 6}, (("x", "y"), ()), {"i": ("x", "y")}),
    ((("i", "j"),), {"i": 2, "j": 8}, (("x", "y"),), {"i": ("x",), "j": ("y",)}),
    ((("i", "j"),), {"i": 2, "j": 8}, (("y",),), {}),
    ((("i", "j"),), {"i": 8, "j": 8}, (("x", "y"),), {"i": ("x", "y")}),
    ((("i", "j"),), {"i": 1, "j": 8}, (("y",),), {"j": ("y",)}),
    ((("i", "j"),), {"i": 4, "j": 9}, (("x", "z"),), {"i": ("x",)}),
    (((),), {}, (("x",),), {}),
    ((("i",),), {"i": 6}, (("y",),), {"i": ("y",)}),
]


@pytest.mark.parametrize("dims, sizes, layout, assignment", TO_FACTORS)
def test_factors_of_layout(dims, sizes, layout, assignment):
    assert factors_of_layout(dims, layout, sizes, MESH) == assignment


def elements(split_shape, axes_of_dims, mesh):
    """Per device, which elements it holds when the array of this shape is cut so."""
    numbers = np.arange(math.prod(split_shape)).reshape(split_shape)
    held = {}
    for device in itertools.product(*(range(n) for n in mesh.values())):
        at = dict(zip(mesh, device, strict=True))
        piece = numbers
        for dim, axes in enumerate(axes_of_dims):
            index, pieces = 0, 1
            for axis in axes:
                index, pieces = index * mesh[axis] + at[axis], pieces * mesh[axis]
            size = piece.shape[dim] // pieces
            piece = np.take(piece, range(index * size, (index + 1) * size), axis=dim)
        held[device] = frozenset(piece.ravel().tolist())
    return held


@st.composite
def assignments(draw):
    """Dims of up to three factors, and axes for some of them."""
    dims, sizes, free = [], {}, draw(st.permutations(list(MESH)))
    assignment = {}
    for _ in range(draw(st.integers(1, 2))):
        dim = []
        for _ in range(draw(st.integers(1, 3))):
            factor = "ijklmn"[len(sizes)]
            sizes[factor] = draw(st.sampled_from([1, 2, 3, 4, 6]))
            dim.append(factor)
            axes = [free.pop() for _ in range(draw(st.integers(0, 2))) if free]
            if axes:
                assignment[factor] = tuple(axes)
        dims.append(tuple(dim))
    return tuple(dims), sizes, assignment


@settings(max_examples=200, deadline=None, derandomize=True)
@given(assignments())
def test_a_layout_is_there_exactly_if_it_gives_each_device_the_same_elements(case):
    dims, sizes, assignment = case
    layout = layout_of_factors(dims, assignment, sizes, MESH)
    even = all(sizes[f] % math.prod(MESH[a] for a in axes) == 0 for f, axes in assignment.items())
    if not even:
        assert layout is None
        return
    factors = [f for dim in dims for f in dim]
    wanted = elements([sizes[f] for f in factors], [assignment.get(f, ()) for f in factors], MESH)
    shape = [math.prod(sizes[f] for f in dim) for dim in dims]
    as_written = tuple(tuple(a for f in dim for a in assignment.get(f, ())) for dim in dims)
    divides = all(n % math.prod(MESH[a] for a in axes) == 0 for n, axes in zip(shape, as_written, strict=True))
    fits = divides and elements(shape, as_written, MESH) == wanted
    assert layout == (as_written if fits else None)
    if layout is not None:
        again = factors_of_layout(dims, layout, sizes, MESH)
        assert layout_of_factors(dims, again, sizes, MESH) == layout


def test_the_element_oracle_sees_a_wrong_order():
    assert elements([4, 4], [("x",), ("y",)], MESH) != elements([4, 4], [("y",), ("x",)], MESH)
    assert elements([16], [("x", "y")], MESH) != elements([16], [("y", "x")], MESH)
