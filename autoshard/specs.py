"""PartitionSpecs as users write them in, layouts by index of argument or result out."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import ConflictError, MeshError
from autoshard.layout import Layout, MeshShape, in_mesh_order, layout_of, replicated, shards, spec_of
from autoshard.program import Program, Value
from autoshard.program.flattening import with_flat_modules
from autoshard.program.flax_shardings import layout_of_wish
from autoshard.program.paths import printable, slashed
from autoshard.program.trees import Tree, holds_flat_objects
from autoshard.propagation.rule import Rule

_LISTED_NAMES = 20  # arguments that a message names at most


def fixed_layouts(
    program: Program, fixed: Mapping[str, PartitionSpec], mesh: MeshShape, option: str = "fixed"
) -> dict[int, Layout]:
    """Argument index -> layout, from paths and globs.

    A pattern fits an argument if it fits the end of its path from some key on: "params/w" fits "state/params/w". A
    pattern that is the end of some path is that path, even if it holds the characters of a glob: "layers[0]".

    Args:
        option: what messages call the dict.

    Raises:
        ConflictError: a pattern fits no argument, a spec does not fit its array, or two contradict each other.
    """
    layouts: dict[int, Layout] = {}
    fixed_by: dict[int, str] = {}
    for pattern, spec in fixed.items():
        matches = _matches(pattern, program)
        if not matches:
            known = _names(program)
            raise ConflictError(f"{option}: no argument of {program.name} fits {pattern!r}; its arguments are {known}")
        for i in matches:
            value = program.arguments[i]
            try:
                layout = _layout(spec, value, mesh)
                _check_jit_takes(layout, value, mesh)
            except MeshError as error:
                raise ConflictError(f"{option}[{pattern!r}]: {error}") from None
            if layouts.setdefault(i, layout) != layout:
                raise ConflictError(
                    f"{option}[{pattern!r}] wants {value} to be {spec_of(layout)}, "
                    f"{option}[{fixed_by[i]!r}] wants it to be {spec_of(layouts[i])}.\n"
                    "Drop one of them, or make the patterns narrower."
                )
            fixed_by.setdefault(i, pattern)
    position = {id(value): i for i, value in enumerate(program.arguments)}
    for argument, result in program.carried.items():
        origin = position.get(id(program.results[result]), argument)
        if {argument, origin} <= layouts.keys() and layouts[argument] != layouts[origin]:
            raise ConflictError(
                f"{program.arguments[origin]} becomes {program.arguments[argument]} in the next step, but "
                f"{option}[{fixed_by[origin]!r}] wants it to be {spec_of(layouts[origin])}, and "
                f"{option}[{fixed_by[argument]!r}] {spec_of(layouts[argument])}.\nFix one of them only, or both alike."
            )
    return layouts


def check_agrees(value: Value, asked: Layout, given: Layout) -> None:
    """
    Args:
        asked: how `fixed=` wants an argument to lie.
        given: how it lies in a plan that the user gave.

    Raises:
        ConflictError: the two differ.
    """
    if asked != given:
        raise ConflictError(
            f"fixed= wants {value} to be {spec_of(asked)}, the plan that is given has it {spec_of(given)}.\n"
            "Drop one of them, or plan anew with this fixed=."
        )


def patterns_of(program: Program, fixed: Mapping[str, PartitionSpec]) -> dict[int, str]:
    """Argument index -> the first path or glob that fits it, of those that fit some."""
    return {
        i: pattern
        for pattern in reversed(list(fixed))
        for i, value in enumerate(program.arguments)
        if _fits(pattern, value.name)
    }


def wished_layouts(program: Program, mesh: MeshShape) -> dict[int, Layout]:
    """Argument index -> layout, of arguments for which flax has one that the mesh can keep."""
    found = {i: layout_of_wish(spec, program.arguments[i].shape, mesh) for i, spec in program.wishes.items()}
    return {i: layout for i, layout in found.items() if layout is not None}


def check_annotations(program: Program, rules: Sequence[Rule], mesh: MeshShape) -> None:
    """
    Raises:
        ConflictError: the step splits an array, by a constraint or a shard_map, over an axis that the plan's mesh does
            not have; or the step works on the shards of another mesh.
    """
    for equation, rule in zip(program.equations, rules, strict=True):
        written_for = equation.params.get("mesh") if equation.primitive == "shard_map" else None
        if written_for is not None and dict(written_for.shape) != dict(mesh):
            raise ConflictError(
                f"the shard_map at {equation.source or 'unknown line'} is written for the mesh "
                f"{dict(written_for.shape)}, but the step is planned for the mesh {dict(mesh)}.\n"
                "Plan for the mesh that the step is written for, or leave mesh= out of the shard_map."
            )
        unknown = sorted({axis for axes in rule.given.values() for axis in axes} - mesh.keys())
        if unknown:
            raise ConflictError(
                f"{equation.primitive} at {equation.source or 'unknown line'} splits {equation.inputs[0]} over "
                f"{', '.join(map(repr, unknown))}, but the step is planned for the mesh {dict(mesh)}.\n"
                "Name axes of that mesh, or plan for the mesh that the step is written for."
            )


def argument_layouts(program: Program, tree: Any, mesh: MeshShape) -> dict[int, Layout]:
    """Argument index -> layout, from a tuple that is a prefix of the positional arguments; None leaves it open.

    Raises:
        MeshError: the tuple is no prefix, or a spec does not fit its array or the mesh.
    """
    positional, _ = program.in_tree.children()
    count = len(positional.children())
    if not isinstance(tree, tuple) or isinstance(tree, PartitionSpec) or len(tree) != count:
        raise MeshError(f"one sharding per positional argument is needed, in a tuple of {count}, not {tree!r}")
    layouts = dict(_from_prefix(tree, positional, program.arguments, mesh))
    for i, layout in layouts.items():
        _check_even(layout, program.arguments[i], mesh)
    return layouts


def check_jit_takes(program: Program, layouts: Mapping[int, Layout], mesh: MeshShape) -> None:
    """
    Raises:
        MeshError: `jax.jit` does not take some argument's layout for an argument, or a plan cannot hold it.
    """
    for i, layout in layouts.items():
        _check_jit_takes(layout, program.arguments[i], mesh)


def result_layouts(program: Program, tree: Any, mesh: MeshShape) -> dict[int, Layout]:
    """Result index -> layout, from a prefix of the result; None leaves it open.

    Raises:
        MeshError: the tree is no prefix, or a spec does not fit its array or the mesh.
    """
    values = (*program.results, *program.arguments)
    layouts = dict(_from_prefix(tree, program.out_tree, values, mesh))
    return {i: layout for i, layout in layouts.items() if i < len(program.results)}


def _from_prefix(
    prefix: Any, tree: Tree, values: Sequence[Value | np.ndarray], mesh: MeshShape
) -> Iterator[tuple[int, Layout]]:
    """Index of a value -> layout; `tree` holds the values."""

    def is_entry(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec | NamedSharding)

    flat = with_flat_modules(prefix)
    try:
        entries = list(tree.under(flat, is_entry))
    except ValueError as error:
        if not holds_flat_objects(tree.structure):
            raise MeshError(f"the shardings are no prefix of what they are for: {error}") from None
        entries = list(_by_keys(tree, flat))
    for entry, below in entries:
        spec = entry.spec if isinstance(entry, NamedSharding) else entry
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise MeshError(f"a sharding is a PartitionSpec, a NamedSharding or None; {spec!r} is none of them")
        if spec is not None:
            yield from ((i, _layout(spec, values[i], mesh)) for i in below)


def _by_keys(tree: Tree, prefix: Any) -> Iterator[tuple[Any, tuple[int, ...]]]:
    """What `Tree.under` gives, for modules: states and other instances of them have the same keys, and other classes.

    Raises:
        MeshError: there is nothing under some entry's keys.
    """
    names = [(slashed(path), index) for path, index in zip(tree.paths, tree.order, strict=True) if index is not None]
    for path, entry in zip(Tree.of(prefix).paths, jax.tree.leaves(prefix), strict=True):
        name = slashed(path)
        below = tuple(index for one, index in names if not name or one == name or one.startswith(f"{name}/"))
        if not below:
            raise MeshError(
                f"a sharding stands under {name!r}, where there is no array. There are arrays under "
                f"{', '.join(repr(one) for one, _ in names[:_LISTED_NAMES])}{', ...' * (len(names) > _LISTED_NAMES)}.\n"
                "Take the keys of the modules: plan.in_shardings, or a state of nnx.state with the shardings in it."
            )
        yield entry, below


def _layout(spec: PartitionSpec, value: Value | np.ndarray, mesh: MeshShape) -> Layout:
    """`spec` for this array.

    Raises:
        MeshError: it has more dims than the array, names an axis twice, or one that the mesh does not have.
    """
    array = str(value) if isinstance(value, Value) else f"{value.dtype}{list(value.shape)}"
    try:
        layout = layout_of(spec, len(value.shape))
    except MeshError as error:
        raise MeshError(f"{spec} does not fit {array}: {error}") from None
    unknown = [axis for axes in layout for axis in axes if axis not in mesh]
    if unknown:
        raise MeshError(f"{spec} names {', '.join(map(repr, unknown))}; the mesh has the axes {dict(mesh)}")
    return layout


def _check_even(layout: Layout, value: Value, mesh: MeshShape) -> None:
    for dim, (size, axes) in enumerate(zip(value.shape, layout, strict=True)):
        if size % shards(axes, mesh):
            raise MeshError(
                f"{spec_of(layout)} splits dim {dim} of {value} over {shards(axes, mesh)} devices, which do not divide "
                f"{size}.\nPad it to a multiple of {shards(axes, mesh)}, or split another dim."
            )


def _check_jit_takes(layout: Layout, value: Value, mesh: MeshShape) -> None:
    _check_even(layout, value, mesh)
    if not in_mesh_order(layout, mesh):
        spec = spec_of(layout)
        raise MeshError(f"{spec} splits a dim of {value} over axes in another order than that of the mesh {dict(mesh)}")


def whole(program: Program) -> dict[int, Layout]:
    """The layouts that keep every argument whole."""
    return {i: replicated(len(value.shape)) for i, value in enumerate(program.arguments)}


def fitting(program: Program, fixed: Mapping[str, PartitionSpec]) -> dict[str, PartitionSpec]:
    """The entries whose paths or globs fit some argument."""
    return {pattern: spec for pattern, spec in fixed.items() if _matches(pattern, program)}


def _matches(pattern: str, program: Program) -> list[int]:
    """The arguments that a path or glob fits."""
    pattern = printable(pattern)  # as names are
    named = [(i, value.name) for i, value in enumerate(program.arguments)]
    exact = [i for i, name in named if f"/{name}".endswith(f"/{pattern}")]
    return exact or [i for i, name in named if _fits(pattern, name)]


def _fits(pattern: str, name: str) -> bool:
    keys = name.split("/")
    return any(fnmatch.fnmatchcase("/".join(keys[i:]), pattern) for i in range(len(keys)))


def _names(program: Program) -> str:
    names = [value.name for value in program.arguments]
    rest = len(names) - _LISTED_NAMES
    return ", ".join(names[:_LISTED_NAMES]) + (f" and {rest} more" if rest > 0 else "")
