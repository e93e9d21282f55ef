"""What libtpu makes of a sum over all devices of which each gets a slice."""

import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.compiled.collectives import read_collectives
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla.backends import backend_of
from autoshard.model.xla.scatters import merges_slices

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
