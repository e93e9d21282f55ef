"""What XLA's compilers for CPU, GPU and TPU do differently with one partitioned program, as far as predictions know."""

from __future__ import annotations

from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from autoshard.mesh.presets import CHIPS, parse_machine


@dataclass(frozen=True)
class Backend:
    """One compiler. The defaults are what all have in common."""

    name: str  # a `jax.Device.platform`
    reduce_scatters: bool = True  # otherwise an all_reduce of the whole, and a slice
    sums_first: bool = False  # partial sums that are only added up are added before they are reduced, once
    rounds_operands: bool = False  # float32 operands of products to bfloat16, as early as it can
    recomputes: bool = False  # elementwise work is done again in every reader, also in matrix products, not stored


CPU = Backend("cpu", reduce_scatters=False)
GPU = Backend("gpu")
TPU = Backend("tpu", sums_first=True, rounds_operands=True, recomputes=True)

_BACKENDS = {backend.name: backend for backend in (CPU, GPU, TPU)}


def backend_of(mesh: Mesh | AbstractMesh, machine: str | None = None) -> Backend:
    """The compiler for the devices of a mesh; without devices, for a machine by name, or else for TPU."""
    if isinstance(mesh, Mesh):
        return _BACKENDS.get(mesh.devices.flat[0].platform, GPU)
    if machine is None:
        return TPU
    chip = parse_machine(machine).chip
    return TPU if CHIPS[chip].torus_dims else _BACKENDS.get(chip, GPU)
