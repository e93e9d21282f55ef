"""Which meshes over a machine are worth a plan, by trying every way to lay axes over its dims."""

import itertools
import math

import pytest

from autoshard.meshes.candidates import MOST_AXES, MachineDims, aligned_sizes, named_meshes

MACHINES = [
    MachineDims(1, (1,)),
    MachineDims(1, (8,)),
    MachineDims(1, (4, 4)),
    MachineDims(1, (2, 2, 4)),
    MachineDims(2, (8,)),
    MachineDims(3, (8,)),
    MachineDims(4, (8,)),
    MachineDims(2, (4, 4)),
]


def laid_by_hand(machine):
    """Sizes of axes, by sharing out the machine's dims, or these with one of them cut, over axes in every order.

    Pieces of groups are outermost: at most one axis has a piece of them and of what is inside, the last that has any.
    """
    dims = [("group", machine.groups), *(("inner", size) for size in machine.inner)]
    dims = [(kind, size) for kind, size in dims if size > 1]
    ways = [dims]
    for i, (kind, size) in enumerate(dims):
        for part in range(2, size):
            if size % part == 0:
                ways.append([*dims[:i], (kind, part), (kind, size // part), *dims[i + 1 :]])
    found = set()
    for pieces in ways:
        for count in range(1, MOST_AXES + 1):
            for owners in itertools.product(range(count), repeat=len(pieces)):
                if set(owners) != set(range(count)):
                    continue
                groups = [axis for axis, (kind, _) in zip(owners, pieces, strict=True) if kind == "group"]
                inner = [axis for axis, (kind, _) in zip(owners, pieces, strict=True) if kind == "inner"]
                if groups and inner and max(groups) > min(inner):
                    continue
                sizes = [1] * count
                for axis, (_, size) in zip(owners, pieces, strict=True):
                    sizes[axis] *= size
                found.add(tuple(sizes))
    return found or {(1,)}


@pytest.mark.parametrize("machine", MACHINES, ids=str)
def test_the_meshes_are_those_laid_by_hand(machine):
    sizes = aligned_sizes(machine)
    assert len(set(sizes)) == len(sizes)
    assert set(sizes) == laid_by_hand(machine)
    assert all(math.prod(one) == machine.devices for one in sizes)


def test_the_oracle_can_fail():
    assert set(aligned_sizes(MachineDims(1, (16,)))) != laid_by_hand(MachineDims(1, (4, 4)))


NAMED = [  # sizes, axes that the user names, meshes
    ([(8,), (4, 2)], [], [{"data": 8}, {"data": 4, "model": 2}]),
    ([(4, 2), (2, 2, 2)], ["fsdp"], [{"data": 4, "fsdp": 2}, {"data": 2, "fsdp": 2, "model": 2}]),
    ([(8,), (2, 4)], ["expert"], [{"expert": 8}, {"expert": 2, "data": 4}, {"data": 2, "expert": 4}]),
    ([(8,), (2, 4)], ["y", "x"], [{"y": 2, "x": 4}, {"x": 2, "y": 4}]),
    ([(8,)], ["x", "y"], []),
]


@pytest.mark.parametrize("sizes, named, expected", NAMED)
def test_names_of_axes(sizes, named, expected):
    found = named_meshes(sizes, named)
    assert [list(one.items()) for one in found] == [list(one.items()) for one in expected]
