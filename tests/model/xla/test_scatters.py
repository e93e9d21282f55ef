"""What libtpu makes of a sum over all devices of which each gets a slice."""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard import plan
from autoshard.compiled.collectives import read_collectives
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla.backends import backend_of
from autoshard.model.xla.scatters import merges_slices
from autoshard.operations.sums import scattered_sum

MESHES = [("v5e:2x4", {"x": 8}), ("v5e:2x4", {"x": 2, "y": 4}), ("v5e:4x4", {"x": 16}), ("v5p:2x2x1", {"x": 4})]
MESHES += [("v5p:2x2x2", {"x": 8})]


@pytest.mark.parametrize("machine, axes", MESHES)
def test_sums_over_all_devices(machine, axes):
    pytest.importorskip("libtpu")
    mesh = target_mesh(machine, axes)
    split, whole = NamedSharding(mesh, P(tuple(axes))), NamedSharding(mesh, P())

    def sliced(x, y):
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x.T @ y, whole), split)

    shapes = [jax.ShapeDtypeStruct((64 * mesh.size, 256), jnp.float32)] * 2
    hlo = jax.jit(sliced, in_shardings=split, out_shardings=split).lower(*shapes).compile().as_text()
    found = {one.kind for one in read_collectives(hlo, axes, device_ids=[one.id for one in mesh.devices.flat])}
    abstract = AbstractMesh(tuple(axes.values()), tuple(axes))
    assert math.prod(axes.values()) == mesh.size
    merged = merges_slices(tuple(axes), axes, backend_of(abstract, machine))
    assert found == {"reduce_scatter" if merged else "all_reduce"}


def test_what_shards_scatter_is_predicted():
    """A part of a matrix over some devices, over all of them, of narrow rows, and over all in the form that is ours."""
    pytest.importorskip("libtpu")
    machine, axes = "v5p:2x2x2", {"x": 4, "y": 2}
    mesh = target_mesh(machine, axes)

    def local(wide, narrow, cube, experts):
        scattered = functools.partial(jax.lax.psum_scatter, scatter_dimension=0, tiled=True)
        ours = scattered_sum(experts, ("x", "y"), 1, axes)
        return scattered(wide, "x"), scattered(narrow, "x"), scattered(cube, ("x", "y")), ours

    shapes = (64, 256), (64, 32), (128, 256), (4, 64, 256)
    everywhere = P(("x", "y"))
    region = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=everywhere,
        out_specs=(everywhere, everywhere, everywhere, P(None, ("x", "y"))),
        check_vma=False,
    )
    arrays = [jax.ShapeDtypeStruct((8 * rows, *rest), jnp.float32) for rows, *rest in shapes]
    found = plan(region, *arrays, mesh=mesh, topology=machine).verify()
    assert found.predicted == found.actual, str(found)
    kinds = {kind for kind, _ in found.actual}
    assert kinds == {"all_reduce", "reduce_scatter"}
