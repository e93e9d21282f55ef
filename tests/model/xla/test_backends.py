"""What is said of XLA's compilers: sizes of arrays as v5e programs have them, and which compiler is meant."""

import math
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import adjusted, mesh_of

import autoshard
from autoshard import Plan
from autoshard.errors import MeshError
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla.backends import BACKENDS, CPU, H100, V5E, V5P, backend_of
from autoshard.model.xla.tiles import padded_size

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
    assert padded_size(shape, V5E.tile) == elements
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


def of_slices(backend, count):
    """The compiler for so many slices: of gathers of several dims over these nothing is known."""
    return replace(adjusted(backend, "gathers", several_dims_at_once=False), slices=count)


MEANT = [  # the mesh, a machine by name, the compiler
    (mesh_of({"x": 8}), None, CPU),
    (mesh_of({"x": 8}), "v5e:2x4", CPU),  # whatever the topology is said to be, it is compiled for what is there
    (ABSTRACT, None, V5E),
    (ABSTRACT, "v5e:2x4", V5E),
    (ABSTRACT, "2x v5e:2x2", of_slices(V5E, 2)),
    (ABSTRACT, "v5p:2x2x2", V5P),
    (ABSTRACT, "v4:2x2x2", replace(V5P, chip="v4")),
    (ABSTRACT, "v6e:2x4", replace(V5E, chip="v6e")),
    (ABSTRACT, "2x tpu7x:2x2x1", of_slices(replace(V5P, chip="7x"), 2)),
    (ABSTRACT, "h100:8", H100),
    (ABSTRACT, "b200:8", replace(H100, chip="b200")),
    (ABSTRACT, "cpu:8", CPU),
]


@pytest.mark.parametrize("mesh, machine, backend", MEANT)
def test_the_compiler_that_is_meant(mesh, machine, backend):
    assert backend_of(mesh, machine) == backend


def test_a_machine_that_is_not_known():
    with pytest.raises(MeshError, match="no machine 'abacus:8'"):
        backend_of(ABSTRACT, "abacus:8")


@dataclass(frozen=True)
class UnknownDevice:
    """A device that has no row in CHIPS."""

    platform: str
    device_kind: str = "Abacus 1"


@pytest.mark.parametrize("platform, backend", [("tpu", V5E), ("gpu", H100), ("rocm", H100), ("cpu", CPU)])
def test_devices_of_no_known_chip(platform, backend):
    found = backend_of(Mesh(np.array([UnknownDevice(platform)]), ("x",)))
    assert found == replace(backend, chip="Abacus 1")
    assert found.remarks == (f"compiler constants of Abacus 1 were not measured: those of {backend.chip} are used.",)


def test_chips_with_constants_of_their_own_are_those_that_say_so():
    assert {name for name, chip in CHIPS.items() if chip.compiler_constants.measured} == set(BACKENDS)
    for name, chip in CHIPS.items():
        constants = chip.compiler_constants
        assert (constants.of == name) == constants.measured, name
        assert BACKENDS[constants.of].measured_on == BACKENDS[constants.of].chip == constants.of


MACHINES = {"v4": "v4:2x2x2", "v5p": "v5p:2x2x2", "7x": "7x:2x2x1", "v5e": "v5e:2x4", "v6e": "v6e:2x4"}


@pytest.mark.parametrize("chip", CHIPS)
def test_plans_say_whose_constants_were_not_measured(chip):
    """In print, and also when they are read from a file."""
    plan = autoshard.plan(jnp.sin, np.ones((8, 8), np.float32), mesh=ABSTRACT, topology=MACHINES.get(chip, f"{chip}:8"))
    constants = CHIPS[chip].compiler_constants
    remark = f"compiler constants of {chip} were not measured: those of {constants.of} are used."
    assert plan.warnings == (() if constants.measured else (remark,))
    assert (remark in " ".join(str(plan).split())) != constants.measured
    assert Plan.loads(plan.dumps(), ABSTRACT).warnings == plan.warnings


@pytest.mark.parametrize("machine", ["v5e:2x4", "h100:8", None])
def test_keys_are_arguments_on_every_backend(machine):
    key = jax.eval_shape(lambda: jax.random.key(0))
    numbers = jax.ShapeDtypeStruct((64, 64), np.float32)
    plan = autoshard.plan(
        lambda key, x: x + jax.random.normal(key, x.shape), key, numbers, mesh=ABSTRACT, topology=machine
    )
    assert plan.predicted.peak_bytes >= 2 * 64 * 64 * 4 / 8


NOT_THERE = [
    ("v5e:2x2", "libtpu", V5E),
    ("2x v5e:2x1", "libtpu", of_slices(V5E, 2)),
    ("h100:4", "jax_cuda13_plugin", H100),
    ("h100:2x2", "jax_cuda13_plugin", H100),
]


@pytest.mark.parametrize("name, needed, backend", NOT_THERE)
def test_the_compiler_of_devices_that_are_not_there(name, needed, backend):
    pytest.importorskip(needed)
    assert backend_of(target_mesh(name, {"x": 4})) == backend
