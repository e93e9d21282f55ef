"""What is said of XLA's compilers: sizes of arrays as v5e programs have them, and which compiler is meant."""

import math
from dataclasses import replace

import jax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of

from autoshard.errors import MeshError
from autoshard.mesh.backends import CPU, GPU, TPU, backend_of, padded_size
from autoshard.mesh.targets import target_mesh

SIZES = [  # shape, elements that it has in float32 on v5e, and the layout that XLA chooses
    ((3,), 128),  # {0:T(128)}
    ((5000,), 5120),  # {0:T(1024)}
    ((7, 5), 1024),  # {1,0:T(8,128)}
    ((1, 300), 384),  # {1,0:T(1,128)}
    ((300, 1), 384),  # {0,1:T(1,128)}
    ((3, 130), 1024),  # {1,0:T(4,128)}
    ((9, 130), 4096),  # {1,0:T(8,128)}
    ((100, 4), 512),  # {0,1:T(4,128)}
    ((12, 12), 2048),  # {1,0:T(8,128)}
    ((2, 3, 5), 768),  # {2,0,1:T(2,128)}
    ((130, 3, 2), 1536),  # {0,2,1:T(2,128)}
    ((16, 256, 3), 12288),  # {1,0,2:T(8,128)}
    ((3, 3, 3, 64), 4608),  # {3,2,1,0:T(4,128)}
    ((8, 3, 3, 64), 9216),  # {3,0,2,1:T(8,128)}
    ((16, 16, 257, 257), 25264128),  # {3,1,2,0:T(8,128)}
]


@pytest.mark.parametrize("shape, elements", SIZES)
def test_padded_sizes(shape, elements):
    assert padded_size(shape, TPU.tile) == elements
    assert padded_size(shape, None) == math.prod(shape)


def test_nothing_is_padded_where_there_is_nothing():
    assert [padded_size(shape, (8, 128)) for shape in ((0,), (0, 5), (8, 0, 3))] == [0, 0, 0]
    assert [padded_size((), tile) for tile in (None, (8, 128))] == [1, 128]


@pytest.mark.parametrize("shape, elements", SIZES)
def test_padded_sizes_are_those_of_tpu_programs(shape, elements):
    pytest.importorskip("libtpu")
    whole = NamedSharding(target_mesh("v5e:1x1", {"x": 1}), P())
    compiled = jax.jit(lambda x: x, in_shardings=whole).lower(jax.ShapeDtypeStruct(shape, "float32")).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == 4 * elements


ABSTRACT = AbstractMesh((8,), ("x",))
THREE_DIMS = {
    "sums_gathers": math.inf, "keeps_inside": 2.0**25, "keeps_sums": False, "fetches_gathered": 0.5,
    "keeps_columns": True,
}  # fmt: skip
MEANT = [  # the mesh, a machine by name, the compiler
    (mesh_of({"x": 8}), None, CPU),
    (mesh_of({"x": 8}), "v5e:2x4", CPU),  # whatever the topology is said to be, it is compiled for what is there
    (ABSTRACT, None, TPU),
    (ABSTRACT, "v5e:2x4", TPU),
    (ABSTRACT, "v5p:2x2x2", replace(TPU, **THREE_DIMS)),
    (ABSTRACT, "2x tpu7x:2x2x1", replace(TPU, slices=2, gathers_at_once=False, **THREE_DIMS)),
    (ABSTRACT, "h100:8", GPU),
    (ABSTRACT, "cpu:8", CPU),
]


@pytest.mark.parametrize("mesh, machine, backend", MEANT)
def test_the_compiler_that_is_meant(mesh, machine, backend):
    assert backend_of(mesh, machine) == backend


def test_a_machine_that_is_not_known():
    with pytest.raises(MeshError, match="no machine 'abacus:8'"):
        backend_of(ABSTRACT, "abacus:8")


NOT_THERE = [
    ("v5e:2x2", "libtpu", TPU),
    ("2x v5e:2x1", "libtpu", replace(TPU, slices=2, gathers_at_once=False)),
    ("h100:4", "jax_cuda13_plugin", GPU),
    ("h100:2x2", "jax_cuda13_plugin", GPU),
]


@pytest.mark.parametrize("name, needed, backend", NOT_THERE)
def test_the_compiler_of_devices_that_are_not_there(name, needed, backend):
    pytest.importorskip(needed)
    assert backend_of(target_mesh(name, {"x": 4})) == backend
