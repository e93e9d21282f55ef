"""A plan as plain data: the shardings of a step, their predicted cost, and a proven bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import ArgumentError, PlanError
from autoshard.errors.kinds import checks_kinds
from autoshard.jaxprs import HOST
from autoshard.layout import Layout, spec_of, with_auto_axes, with_axis_types
from autoshard.plans.activations import Activation
from autoshard.plans.annotations import Annotations
from autoshard.plans.memory_use import MemoryUse
from autoshard.plans.prediction import Prediction
from autoshard.program import Program
from autoshard.program.trees import Tree

_KEY_IMPLEMENTATIONS = ("threefry2x32", "rbg", "unsafe_rbg")  # of PRNG keys, as JAX has them


@dataclass(frozen=True)
class PlacedArray:
    """One argument or result, and its layout on the mesh."""

    name: str  # "state/params/w"
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    local_bytes: int  # per device
    on_host: bool = False  # whether it lies in the host's memory
    typed: bool = False  # whether its sharding is on the user's Explicit axes

    @property
    def type(self) -> str:
        """As jaxprs write it: ``float32<host>[64, 64]``."""
        return f"{self.dtype}{'<host>' * self.on_host}{list(self.shape)}"

    def sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        return NamedSharding(mesh, self.spec, memory_kind=HOST if self.on_host else None)

    def typed_sharding(self, mesh: Mesh | AbstractMesh) -> NamedSharding:
        """The PartitionSpec of a type in explicit mode, which has an entry per dim."""
        spec = PartitionSpec(*(axes if len(axes) > 1 else axes[0] if axes else None for axes in self.layout))
        return NamedSharding(mesh, spec, memory_kind=HOST if self.on_host else None)

    @property
    def spec(self) -> PartitionSpec:
        return spec_of(self.layout)


@dataclass(frozen=True, eq=False)
class PlanData:
    """How a step is sharded over a mesh, what that is predicted to cost, and how good it is proven to be."""

    bound_is_of: ClassVar[str] = "the best possible on this mesh"  # the plans that the bound is of

    name: str  # of the step
    mesh: Mesh | AbstractMesh  # axis types Auto
    fingerprint: str  # of the program it was made for
    arguments: tuple[PlacedArray, ...]  # per flat argument
    results: tuple[PlacedArray, ...]  # per flat result
    carried: Mapping[int, int]  # argument -> the result that takes its place in the next step
    predicted: Prediction
    status: str  # "optimal" or "feasible"
    bound: float  # proven: no plan of this program costs fewer seconds
    cost: float  # seconds per step, as solved
    memory: float | None  # the limit it was made for, bytes per device
    warnings: tuple[str, ...]
    annotations: Annotations = field(repr=False)
    argument_tree: Tree = field(repr=False)  # of (args, kwargs), static arguments left out
    result_tree: Tree = field(repr=False)  # of the results, and of the arguments that modules it returns still hold
    axis_types: tuple[AxisType, ...] | None = None  # of the user's mesh, if the step is a program of explicit mode
    captured: tuple[PlacedArray, ...] = ()  # the large arrays that the step closes over
    # Bytes per device by XLA's account of the compiled program; None: not compiled, or XLA ran out of memory.
    compiled_peak: int | None = None
    memory_use: MemoryUse | None = field(repr=False, default=None)  # None: the plan was loaded
    machine: str | None = None  # name of the machine that it was planned for; None: the plan was loaded
    activations: tuple[Activation, ...] = field(repr=False, default=())  # the largest; empty if the plan was loaded
    compiler_options: Mapping[str, bool | int] = field(default_factory=dict)  # of XLA, where `refine` chose them
    # (axis -> devices, seconds per step, peak bytes per device) of each mesh that was tried, best first; empty unless
    # the mesh was chosen.
    meshes: tuple[tuple[Mapping[str, int], float, int], ...] = ()
    rewrites: tuple[tuple[str, tuple[int, ...]], ...] = ()  # names of applied laws, with the indices of the places
    state_on_hosts: bool = False  # whether autoshard chose to keep arguments in the memory of hosts
    is_late: bool = False  # whether time was up while formulating, so that another run may find a better plan

    @property
    def gap(self) -> float:
        """How far the cost may be from the best, as a share of the cost."""
        return (self.cost - self.bound) / self.cost if self.cost else 0.0

    @property
    def argument_bytes(self) -> int:
        """What the arguments take of a device's memory: of the device that has most, where devices have others."""
        return sum(one.local_bytes for one in self.arguments if not one.on_host)

    @property
    def choices(self) -> Mapping[str, str]:
        """Its decisions beside layouts, in words, as the stages of a pipeline."""
        return {}

    @cached_property
    def flat_in_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat argument, in the order of `arguments`."""
        return tuple(map(self._sharding, self.arguments))

    @cached_property
    def captured_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per array that the step closes over, in the order of `captured`."""
        return tuple(map(self._sharding, self.captured))

    @cached_property
    def flat_out_shardings(self) -> tuple[NamedSharding, ...]:
        """One sharding per flat result, in the order of `results`."""
        return tuple(map(self._sharding, self.results))

    def _sharding(self, placed: PlacedArray) -> NamedSharding:
        return placed.typed_sharding(self.typed_mesh) if placed.typed else placed.sharding(self.mesh)

    @cached_property
    def typed_mesh(self) -> Mesh | AbstractMesh:
        """The mesh of arguments and results that have types of explicit mode."""
        return self.mesh if self.axis_types is None else with_axis_types(self.mesh, self.axis_types)

    @property
    def in_shardings(self) -> tuple[Any, ...]:
        """A pytree of NamedSharding per positional argument, static arguments left out.

        Usable in `jax.jit(in_shardings=...)`, `jax.device_put` and orbax. Shardings of keyword arguments are in
        `keyword_shardings`.
        """
        positional: tuple[Any, ...] = self.argument_tree.filled(self.flat_in_shardings)[0]
        return positional

    @property
    def keyword_shardings(self) -> dict[str, Any]:
        """A pytree of NamedSharding per keyword argument."""
        by_name: dict[str, Any] = self.argument_tree.filled(self.flat_in_shardings)[1]
        return by_name

    @property
    def out_shardings(self) -> Any:
        """A pytree of NamedSharding that mirrors the step's result."""
        return self.result_tree.filled((*self.flat_out_shardings, *self.flat_in_shardings))

    def abstract(self, argnum: int) -> Any:
        """An argument as ShapeDtypeStructs with shardings: what a checkpoint restores into.

        Args:
            argnum: position among the arguments that are not static.

        Raises:
            ArgumentError: there is no such argument.
        """
        structs = [
            jax.ShapeDtypeStruct(placed.shape, _dtype(placed.dtype), sharding=sharding)
            for placed, sharding in zip(self.arguments, self.flat_in_shardings, strict=True)
        ]
        positional = self.argument_tree.filled(structs)[0]
        if not isinstance(argnum, int) or not -len(positional) <= argnum < len(positional):
            raise ArgumentError(
                f"abstract({argnum!r}): {self.name} has {len(positional)} positional arguments, from 0 on"
            )
        return positional[argnum]

    def on(self, mesh: Mesh | AbstractMesh) -> Self:
        """This plan on another mesh of the same axes: made for an AbstractMesh, say, and used on devices.

        Raises:
            PlanError: the mesh has other axes.
        """
        check_mesh(dict(self.mesh.shape), mesh, f"the plan of {self.name}")
        return replace(self, mesh=with_auto_axes(mesh), compiled_peak=None)

    def bound_to(self, program: Program) -> Self:
        """This plan with the containers of `program`.

        Raises:
            PlanError: the plan was made for another program.
        """
        if self.fingerprint != program.fingerprint:
            raise PlanError(
                f"the plan was made for another program than {program.name}: {_difference(self, program)}.\n"
                "Plan the step anew, or use the code, options and argument shapes that the plan was made with."
            )
        if (difference := _difference_in_detail(self, program)) is not None:
            raise PlanError(
                f"the plan contradicts {program.name}: {difference}.\nPlan the step anew; the file has been changed."
            )
        return replace(self, argument_tree=program.in_tree, result_tree=program.out_tree)


def _dtype(name: str) -> Any:
    """A dtype by its name.

    >>> _dtype("bfloat16"), _dtype("key<fry>")
    (dtype(bfloat16), key<fry>)

    Raises:
        PlanError: neither NumPy nor JAX has a dtype of this name.
    """
    if not name.startswith("key<"):
        try:
            return np.dtype(name)
        except (TypeError, ValueError) as error:
            raise PlanError(f"{name!r} is no type of arrays that NumPy or JAX comes with") from error
    keys = (jax.eval_shape(partial(jax.random.key, impl=impl), 0).dtype for impl in _KEY_IMPLEMENTATIONS)
    known = {str(dtype): dtype for dtype in keys}
    if name not in known:
        raise PlanError(f"PRNG keys of type {name} are not among those that JAX comes with: {', '.join(known)}")
    return known[name]


@checks_kinds("mesh")
def check_mesh(planned: Mapping[str, int], mesh: Mesh | AbstractMesh, what: str) -> None:
    """Raises PlanError unless the mesh has the axes of the plan."""
    if list(planned.items()) != list(mesh.shape.items()):
        raise PlanError(
            f"{what} was made for the mesh {dict(planned)}, not for {dict(mesh.shape)}.\n"
            "Plan the step anew on this mesh, or use a mesh of the plan's axes."
        )


def _difference_in_detail(plan: PlanData, program: Program) -> str | None:
    """Contradictions between a plan and the arrays of its program, as an edited file may have."""
    kinds = (
        ("argument", plan.arguments, program.own_arguments),
        ("closed-over array", plan.captured, program.arguments[len(program.own_arguments) :]),
        ("result", plan.results, program.results),
    )
    for kind, planned, values in kinds:
        if len(planned) != len(values):
            return f"it has {len(planned)} {kind}s, the step {len(values)}"
        for placed, value in zip(planned, values, strict=True):
            there = f"{value.dtype}{'<host>' * getattr(value, 'on_host', False)}{list(value.shape)}"
            if placed.type != there:
                return f"{kind} {placed.name} {placed.type} in the plan is {there} in the step"
    if plan.carried != program.carried:
        return "other results take the place of arguments"
    typed = [i for i, placed in enumerate((*plan.arguments, *plan.captured)) if placed.typed]
    typed_results = [i for i, placed in enumerate(plan.results) if placed.typed]
    if typed != sorted(program.typed_arguments) or typed_results != sorted(program.typed_results):
        return "other arrays have types of explicit mode"
    types = None if program.types is None else program.types.mesh.axis_types
    if types is not None and plan.axis_types != types:
        return "the axes of its mesh have other types"
    return None


def _difference(plan: PlanData, program: Program) -> str:
    ours = [f"{placed.name} {placed.type}" for placed in (*plan.arguments, *plan.captured)]
    theirs = [str(value) for value in program.arguments]
    for here, there in zip(ours, theirs, strict=False):
        if here != there:
            return f"{here} in the plan is {there} in the step"
    if len(ours) != len(theirs):
        return f"the plan has {len(ours)} arrays for arguments, the step {len(theirs)}"
    if plan.carried != program.carried:
        return "other results take the place of arguments (is donate_argnums the same?)"
    return "the arguments are the same, but not the operations on them, or not what is donated"
