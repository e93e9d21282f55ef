"""Two mesh axes that share a dim of a torus: a machine by name has the links that a mesh of its devices has."""

import pytest

from autoshard import Topology, topology
from autoshard.mesh.collectives import seconds
from autoshard.mesh.targets import target_mesh

CUT = [  # machine, sizes of axes
    ("v5e:4x4", (4, 2, 2)),
    ("v5e:4x4", (8, 2)),
    ("v5e:4x4", (2, 2, 4)),
    ("v5e:16x16", (16, 4, 4)),
    ("v5e:16x16", (64, 4)),
    ("v5p:4x4x4", (4, 4, 2, 2)),
    ("v5p:4x4x4", (8, 8)),
]


def parts(machine, axes):
    """Devices, bytes/s and whether it is a ring, of what each axis runs over."""
    links = {axis: machine.links[axis].over(size) for axis, size in axes.items()}
    return {axis: sorted((n, one.bandwidth, one.ring) for n, one in found if n > 1) for axis, found in links.items()}


def named(sizes):
    return dict(zip("abcd", sizes, strict=False))


@pytest.mark.parametrize("machine, sizes", CUT)
def test_links_by_name_are_those_of_devices(machine, sizes):
    pytest.importorskip("libtpu")
    axes = named(sizes)
    assert parts(topology(machine, axes), axes) == parts(Topology.of(target_mesh(machine, axes)), axes)


def test_the_oracle_tells_a_dim_that_is_cut_from_whole_ones():
    axes = named((2, 2))
    assert parts(topology("v5e:4", axes), axes) != parts(topology("v5e:2x2", axes), axes)


@pytest.mark.parametrize(
    "machine, sizes", [("v5e:4x4", (4, 2, 2)), ("v5e:16x16", (16, 4, 4)), ("v5e:16x16", (16, 8, 2))]
)
def test_over_both_axes_a_gather_has_the_wires_of_the_dim(machine, sizes):
    cut, whole = named(sizes), {"a": sizes[0], "b": sizes[1] * sizes[2]}
    size = 1e12  # bytes, beside which latency is nothing
    both = seconds("all_gather", ("b", "c"), size, cut, topology(machine, cut))
    assert both >= seconds("all_gather", ("b",), size, whole, topology(machine, whole)) * (1 - 1e-6)
    assert both < seconds("all_gather", ("b",), size, cut, topology(machine, cut)) * 2
