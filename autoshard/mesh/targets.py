"""Machines that are not there: a name in, a mesh of devices that can be compiled for, not run on, out.

TPU programs are compiled by the package libtpu, GPU programs by the CUDA plugin of JAX. Neither needs the hardware.
What XLA wants to know of a GPU is a row of `_GPUS`, from the device descriptions that XLA's own tests use (openxla/xla,
xla/backends/gpu/target_config/specs).
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from autoshard.errors import MeshError
from autoshard.experimental import mesh_utils, topologies
from autoshard.layout import MeshShape
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.machines import Machine, parse_machine

# Of GPU programs: no kernels are timed, as there is nothing to time them on, nor made in all their variants.
_COMPILER_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "gpu": {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False},
}

# What libtpu would otherwise ask the machine it runs on, for minutes.
_NO_MACHINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-16",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


class _Gpu(NamedTuple):
    """What XLA's compiler asks of a GPU."""

    description: str
    capability: tuple[int, int]  # CUDA compute capability
    cores: int  # streaming multiprocessors
    lanes: int  # float32 units of each
    clock: float  # GHz
    memory: int  # bytes
    memory_bandwidth: int  # bytes/s
    cache: int  # bytes, L2
    shared: int  # bytes of shared memory per core
    shared_per_block: int  # bytes of it that one block can have


_GPUS: Mapping[str, _Gpu] = {
    "a100": _Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 108, 64, 1.41, 85100068864, 2039040000000, 41943040, 167936, 166912),
    "h100": _Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, 128, 1.98, 84942979072, 3352320000000, 52428800, 233472, 232448),
    "h200": _Gpu(
        "NVIDIA H200 141GB HBM3e", (9, 0), 132, 128, 1.98, 151397597184, 4800000000000, 52428800, 233472, 232448
    ),
    "b200": _Gpu("NVIDIA B200", (10, 0), 148, 128, 1.965, 191514411008, 7672320000000, 132644864, 233472, 232448),
}


def target_mesh(name: str, axes: MeshShape) -> Mesh:
    """A mesh over the devices of a machine that need not be there: `jax.jit` can lower and compile for it.

    Args:
        name: as for `topology`: ``"v5e:4x4"``, ``"2x v5e:4x4"``, ``"h100:2x8"``.
        axes: mesh axis -> devices, outermost first.

    Raises:
        MeshError: no such machine, other numbers of devices, or the compiler is not installed.
    """
    machine = parse_machine(name)
    if machine.chip not in _GPUS and not CHIPS[machine.chip].torus_dims:
        raise MeshError(f"{machine} is no TPU or GPU; jax.config.update('jax_num_cpu_devices', ...) makes CPU devices")
    devices = _gpus(machine) if machine.chip in _GPUS else _tpus(machine)
    if len(devices) != math.prod(axes.values()):
        raise MeshError(f"{name} has {len(devices)} devices, the mesh {dict(axes)} has {math.prod(axes.values())}")
    sizes = tuple(axes.values())
    on_torus = machine.chip not in _GPUS
    grid = placed(devices, sizes, machine.slices) if on_torus else np.array(devices).reshape(sizes)
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))


def compiler_options(mesh: Mesh) -> dict[str, Any]:
    """What to tell XLA when it compiles for a mesh without devices."""
    return dict(_COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {}))


def _tpus(machine: Machine) -> Sequence[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise MeshError(f"compiling for {machine} needs libtpu: pip install 'autoshard[tpu]'")
    if jax.default_backend() != "tpu":  # libtpu looks for the machine it runs on, and there is none
        os.environ.update(_NO_MACHINE)
    chip = {"7x": "tpu7x"}.get(machine.chip, machine.chip)
    options: dict[str, int | str] = {"num_slices": machine.slices} if machine.slices > 1 else {}
    if machine.chip == "v4":  # whose two cores are one device
        options["chip_config_name"] = "megacore"
    return _described("tpu", f"{chip}:{'x'.join(map(str, machine.dims))}", machine, **options)


def _gpus(machine: Machine) -> Sequence[jax.Device]:
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise MeshError(f"compiling for {machine} needs the CUDA plugin of JAX: pip install 'autoshard[cuda]'")
    (per_host,) = machine.dims
    return _described(
        "cuda",
        machine.chip,
        machine,
        topology=f"1x{machine.slices}x{per_host}",
        target_config=_target_config(_GPUS[machine.chip]),
    )


def _described(platform: str, topology_name: str, machine: Machine, **options: Any) -> Sequence[jax.Device]:
    try:
        return topologies.get_topology_desc(platform=platform, topology_name=topology_name, **options).devices
    except Exception as error:  # whatever the plugin raises
        raise MeshError(
            f"the compiler for {machine} cannot be had here: {error}\n"
            "It needs no hardware, but JAX has to leave the hardware alone: set JAX_PLATFORMS=cpu."
        ) from error


def placed(devices: Sequence[jax.Device], sizes: Sequence[int], slices: int) -> np.ndarray:
    """Devices in the order in which mesh axes lie along the torus; slices are outermost."""
    if slices == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    inner, left = [], slices
    for size in sizes:
        outer = math.gcd(size, left)
        left //= outer
        inner.append(size // outer)
        if left > 1 and inner[-1] > 1:
            raise MeshError(f"the outermost of the mesh axes {tuple(sizes)} do not make up {slices} slices")
    groups: dict[int, list[jax.Device]] = {}
    for device in devices:
        groups.setdefault(device.slice_index, []).append(device)
    return np.stack(
        [mesh_utils.create_device_mesh(inner, group, allow_split_physical_axes=True) for group in groups.values()]
    ).reshape(sizes)


def _target_config(gpu: _Gpu) -> str:
    """The text form of XLA's GpuTargetConfigProto."""
    info = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": gpu.shared,
        "threads_per_core_limit": 2048,
        "core_count": gpu.cores,
        "fpus_per_core": gpu.lanes,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": gpu.memory_bandwidth,
        "l2_cache_size": gpu.cache,
        "clock_rate_ghz": gpu.clock,
        "device_memory_size": gpu.memory,
        "shared_memory_per_block_optin": gpu.shared_per_block,
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    major, minor = gpu.capability
    fields = " ".join(f"{name}: {value}" for name, value in info.items())
    return (
        f"gpu_device_info {{ {fields} cuda_compute_capability {{ major: {major} minor: {minor} }} }}\n"
        'platform_name: "CUDA"\n'
        "dnn_version_info { major: 9 minor: 12 }\n"
        "runtime_version { major: 13 minor: 0 patch: 0 }\n"
        f'device_description_str: "{gpu.description}"\n'
    )
