"""The meshes that a step is traced under, one after the other, until JAX takes it."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.arrays.arguments import ArrayType, is_on_host, is_typed_on, on_devices, replicated_type, without_type
from autoshard.options import Options
from autoshard.program.explicit import is_explicit


def trace_contexts(types: tuple[Any, ...], options: Options) -> list[tuple[AbstractMesh, tuple[Any, ...]]]:
    """Meshes to trace under, and types of arguments to trace with: as `jax.jit` does it, then what is tried if JAX
    refuses the step.

    A step that names axes and is traced under no mesh means those of ours, Auto or Explicit. Without a mesh that
    is set, arguments lie on Explicit axes by chance, since `jax.make_mesh` makes such: their types count only for
    a step that cannot do without.
    """
    context, ours = jax.sharding.get_abstract_mesh(), options.mesh.abstract_mesh
    assert options.given_mesh is not None, "`options_of` has it"
    given, opened = options.given_mesh.abstract_mesh, tuple(map(without_type, types))
    # Where state may lie on hosts, a step is given such that does not say so itself.
    here = [(context, tuple(map(on_devices, opened)))] if options.remat and any(map(is_on_host, types)) else []
    if not context.empty:
        auto = context.update(axis_types=(AxisType.Auto,) * len(context.axis_names)), opened
        return [(context, types), auto, *here] if is_explicit_form(context, options.mesh) else [auto, *here]
    typed = [(one[4].mesh, types) for one in types if isinstance(one, tuple) and one[4] is not None][:1]
    as_typed = [(context, types), *typed] if typed and is_explicit(given) else []
    named = typed or [(given, opened)] * is_explicit(given)
    return [(context, opened), (ours, opened), *(as_typed or named), *here]


def as_traced(type_: ArrayType, context: AbstractMesh, mesh: Mesh | AbstractMesh) -> ArrayType:
    """An argument's type as the step is traced with it: on Explicit axes if `jax.jit` would trace so.

    A number is always whole on them, so that one that the step returned is of the type of the first.
    """
    if is_typed_on(type_, mesh) and (context.empty or context.axis_types == type_[4].mesh.axis_types):
        return type_
    is_number = isinstance(type_, tuple) and not type_[0]
    is_whole = is_number and is_explicit_form(context, mesh)
    return replicated_type(type_, context) if is_whole else without_type(type_)


def is_explicit_form(context: AbstractMesh, mesh: Mesh | AbstractMesh) -> bool:
    """Whether a mesh has Explicit axes, and they are those of the mesh that the step is planned for."""
    return is_explicit(context) and list(context.shape.items()) == list(mesh.shape.items())


def wants_another_context(error: Exception) -> bool:
    """Whether JAX refuses a step for the mesh that is set, the kind of its axes, or where arguments lie."""
    if not isinstance(error, RuntimeError | ValueError | AssertionError):
        return False
    return any(words in str(error) for words in ("set_mesh", "with_sharding_constraint", "type Auto", "memory_space"))
