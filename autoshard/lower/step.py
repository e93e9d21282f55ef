"""A program and its plan in, the annotated step under `jax.jit` out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
from autoshard.jaxprs import devices_put_on, is_array
from autoshard.lower.emitter import Emitter
from autoshard.plans.compiler_options import options_for
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.program import Program
from autoshard.program.trees import Box


class JittedStep:
    """The annotated step under `jax.jit`, sharded and donated as planned.

    It is called as the function that was traced, static arguments left out, and with arguments of the same types.
    Arrays that the function closes over follow the flat arguments, as in `Program.arguments`.
    """

    def __init__(self, program: Program, plan: PlanData, **jit_keywords: Any):
        self._program, self._plan = program, plan
        results = [placed.layout for placed in plan.results]
        self._emitter = emitter = Emitter(program, plan.annotations, plan.mesh, results)

        def run(*arguments: Any) -> tuple:
            return _typed(emitter.run(*map(emitter.untyped, arguments)), plan)

        closed = program.jaxpr
        if chosen := _compiler_options(plan):
            jit_keywords = {
                **jit_keywords,
                "compiler_options": chosen | dict(jit_keywords.get("compiler_options") or {}),
            }
        self.flat = jax.jit(  # from flat arguments and closed-over arrays to flat results
            run,
            in_shardings=_of_arrays((*plan.flat_in_shardings, *plan.captured_shardings), closed.in_avals),
            out_shardings=_of_arrays(plan.flat_out_shardings, closed.out_avals),
            donate_argnums=tuple(sorted(program.donated)),
            **jit_keywords,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.result(self.flat(*Box.of((args, kwargs)).leaves, *self._program.captured))

    def result(self, leaves: Sequence[Any]) -> Any:
        """What the function returns, of its leaves."""
        return self._program.out_tree.unflattened(leaves)

    @cached_property
    def transformed(self) -> Callable[..., tuple]:
        """As `flat`, for arguments that `jax.vmap` or the like has made more of than arrays of their shape.

        They cannot be placed, so they are constrained, which can be batched.
        """
        plan, constrained = self._plan, self._emitter.constrained

        def run(*arguments: Any) -> tuple:
            layouts = (to.layout for to in (*plan.arguments, *plan.captured))
            placed = list(map(constrained, arguments, layouts))
            results = zip(self._emitter.run(*placed), plan.results, strict=True)
            return tuple(constrained(x, to.layout) for x, to in results)

        return jax.jit(run)


def _compiler_options(plan: PlanData) -> dict[str, bool | int]:
    """The options of XLA that the plan was compiled with, if its devices are of a kind that has them."""
    if not plan.compiler_options or not isinstance(plan.mesh, Mesh):
        return {}
    return options_for(plan.mesh.devices.flat[0].platform, plan.compiler_options)


def _typed(results: Sequence[Any], plan: PlanData) -> tuple:
    """Results on the axes that they lie on: those of the user's mesh, where they have types of explicit mode."""
    if plan.axis_types is None:
        return tuple(results)
    mesh = plan.typed_mesh.abstract_mesh

    def typed(array: Any, to: PlacedArray) -> Any:
        if not to.typed or not is_array(jax.typeof(array)):
            return array
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        named = (tuple(axis for axis in axes if kinds[axis] is AxisType.Explicit) for axes in to.layout)
        return jax.sharding.reshard(array, PartitionSpec(*(axes or None for axes in named)))

    with jax.sharding.use_abstract_mesh(mesh):
        return tuple(map(typed, results, plan.results))


def _of_arrays(shardings: Sequence[NamedSharding], avals: Sequence[Any]) -> tuple[NamedSharding | None, ...]:
    return tuple(sharding if is_array(aval) else None for sharding, aval in zip(shardings, avals, strict=True))


@dataclass(frozen=True, eq=False)
class Lowering:
    """A program and its plan under `jax.jit`; called, it lowers them for arguments as the plan places them."""

    program: Program
    plan: PlanData
    jit_keywords: Mapping[str, Any]

    @cached_property
    def step(self) -> JittedStep:
        return JittedStep(self.program, self.plan, **self.jit_keywords)

    def __call__(self, mesh: Mesh | AbstractMesh | None = None) -> jax.stages.Lowered:
        """For the plan's mesh, or another of the same axes; on a mesh without devices, lowered for TPU."""
        if mesh is not None and mesh is not self.plan.mesh:
            return Lowering(self.program, self.plan.on(mesh), self.jit_keywords)()
        shardings = (*self.plan.flat_in_shardings, *self.plan.captured_shardings)
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
            if is_array(aval)
            else jax.lax.create_token()
            for aval, sharding in zip(self.program.jaxpr.in_avals, shardings, strict=True)
        ]
        platforms = None if isinstance(self.plan.mesh, Mesh) else ("tpu",)
        with named_refusals(self.program, self.plan.mesh):
            return self.step.flat.trace(*arguments).lower(lowering_platforms=platforms)


@contextlib.contextmanager
def named_refusals(program: Program, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """What `jax.jit` refuses of a program on several devices, in the user's words.

    Raises:
        MeshError: the program has effects whose order several devices do not keep, or is to run on other devices, too.
    """
    try:
        yield
    except ValueError as error:
        if "Received incompatible devices" in str(error):
            raise MeshError(_elsewhere(program, mesh, error)) from error
        if "ordered effects are not supported" not in str(error):
            raise
        lines = dict.fromkeys(str(equation.source) for equation in program.equations if not equation.outputs)
        raise MeshError(
            f"{program.name} has effects whose order matters, and {mesh.size} devices keep none: {', '.join(lines)}.\n"
            "Drop ordered=True there, or use a mesh of one device."
        ) from None


def _elsewhere(program: Program, mesh: Mesh | AbstractMesh, error: ValueError) -> str:
    """Which devices a program names that are not those of its mesh."""
    ours = sorted(device.id for device in mesh.devices.flat) if isinstance(mesh, Mesh) else []
    named: dict[str, list[int]] = {}
    for equation in program.equations:
        if equation.primitive == "device_put":
            named[str(equation.source or "unknown line")] = devices_put_on(equation.params)
    named = {line: ids for line, ids in named.items() if ids and ids != ours}
    where = f"on devices {ours}, those of the mesh {dict(mesh.shape)}"
    if named:
        lines = ", ".join(f"at {line} puts arrays on devices {ids}" for line, ids in named.items())
        return f"{program.name} runs {where}, but {lines}.\nLeave the device out there: the plan says where arrays lie."
    for ref in (constant for constant in program.jaxpr.consts if isinstance(constant, jax.Ref)):
        if (devices := sorted(device.id for device in ref.sharding.device_set)) != ours:
            return (
                f"{program.name} runs {where}, but closes over a {jax.typeof(ref)} on devices {devices}.\n"
                "Make it there: jax.new_ref(jax.device_put(array, NamedSharding(mesh, PartitionSpec()))), on Auto axes."
            )
    context = jax.sharding.get_mesh()
    if not context.empty and {device.id for device in context.devices.flat} != set(ours):
        return (
            f"{program.name} runs {where}, but the mesh that is set has other ones: {dict(context.shape)}.\n"
            "Call it outside of that jax.set_mesh, or give autoshard the mesh that is set."
        )
    return f"{program.name} runs {where}, and JAX refuses it: {error}\nGive autoshard a mesh of the devices it names."
