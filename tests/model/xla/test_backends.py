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
from sweeps import some

import autoshard
from autoshard import Plan
from autoshard.errors import MeshError
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.targets import target_mesh
from autoshard.model.xla import rounding
from autoshard.model.xla.backends import BACKENDS, CPU, H100, V5E, V5P, backend_of
from autoshard.model.xla.rounding import PACKED_BYTES
from autoshard.model.xla.tiles import elements_in_word, padded_size

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


PACKED = [  # shape, and the bytes that it has in 4 and in 2 bits on v5e; None: libtpu takes no such array
    ((3,), 512, None),  # {0:T(1024)(128)(8,1)E(4)}
    ((1500,), 1024, None),
    ((5, 7), 512, None),  # {1,0:T(8,128)(8,1)E(4)}
    ((100, 100), 6656, 3584),  # {1,0:T(16,128)(16,1)E(2)}
    ((33, 129), 5120, 3072),
    ((64, 128), 4096, 2048),  # {1,0:T(64,128)(8,1)E(4)}
    ((128, 1), 512, None),
    ((4, 9, 130), 8192, None),
    ((2, 3, 16), 1024, None),
]
FOUR_BITS, TWO_BITS = ("int4", "uint4", "float4_e2m1fn"), ("int2", "uint2")
NARROW = [
    (shape, dtype, size)
    for shape, *sizes in PACKED
    for names, size in zip((FOUR_BITS, TWO_BITS), sizes, strict=True)
    for dtype in names
    if size and hasattr(jnp, dtype)
]


@pytest.mark.parametrize("shape, dtype, size", NARROW)
def test_narrow_numbers_are_packed_on_tpu(shape, dtype, size):
    width = PACKED_BYTES[dtype]
    assert padded_size(shape, V5E.tile, packed=elements_in_word(width)) * width == size


@pytest.mark.parametrize("shape, dtype, size", some(NARROW, *NARROW[::5]))
def test_packed_sizes_are_those_of_tpu_programs(shape, dtype, size):
    pytest.importorskip("libtpu")
    whole = NamedSharding(target_mesh("v5e:1x1", {"x": 1}), P())
    compiled = jax.jit(lambda x: x, in_shardings=whole).lower(jax.ShapeDtypeStruct(shape, dtype)).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == size


@pytest.mark.parametrize("dtype", [name for name in FOUR_BITS + TWO_BITS if hasattr(jnp, name)])
def test_narrow_numbers_are_packed_in_cpu_programs(dtype):
    """Of an odd number of them the last byte is not full."""
    compiled = jax.jit(lambda x: x).lower(jax.ShapeDtypeStruct((33, 129), dtype)).compile()
    assert compiled.memory_analysis().argument_size_in_bytes == math.ceil(33 * 129 * PACKED_BYTES[dtype])


@pytest.mark.parametrize("dtype", [name for name in FOUR_BITS if hasattr(jnp, name)])
def test_a_peak_of_narrow_numbers_is_that_of_the_cpu_program(dtype):
    shapes = [jax.ShapeDtypeStruct((256, 256), dtype)] * 2
    found = autoshard.plan(lambda x, y: (x + y, x.T), *shapes, mesh=mesh_of({"x": 8})).verify()
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.02)


def narrow_plan(dtype):
    """Three products with weights of these numbers, each converted just before."""

    def step(weights, x):
        for w in weights:
            x = jnp.tanh(x @ (w.astype(jnp.bfloat16) * jnp.bfloat16(0.1)))
        return x

    mesh = target_mesh("v5e:4x2", {"data": 4, "model": 2})
    shapes = [jax.ShapeDtypeStruct((1024, 1024), dtype)] * 3, jax.ShapeDtypeStruct((8, 1024), jnp.bfloat16)
    return autoshard.plan(step, *shapes, mesh=mesh)


@pytest.mark.parametrize("dtype", some(FOUR_BITS, "int4"))
def test_a_peak_of_packed_weights_is_that_of_the_program(dtype):
    pytest.importorskip("libtpu")
    found = narrow_plan(dtype).verify()
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.02)


def test_bytes_instead_of_packed_numbers_would_be_seen(monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setattr(rounding, "PACKED_BYTES", {})
    found = narrow_plan("int4").verify()
    assert found.predicted_peak > 1.7 * found.actual_peak


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
