"""What a user calls: the decorator `autoshard`, and `plan`. They compose the stages, and remember what they made."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import ConflictError, MemoryLimitError, MeshError
from autoshard.layout import Layout, MeshShape, layout_of, spec_of
from autoshard.lower import jitted, lowered
from autoshard.mesh.presets import topology as preset
from autoshard.mesh.topology import Topology
from autoshard.plans import Comparison, Plan, make_plan
from autoshard.program import Program, Value, trace
from autoshard.propagation import Propagated, PropagatedValue, propagate_layouts, rules_for
from autoshard.report.alternatives import alternatives_of
from autoshard.solver import solve
from autoshard.solver.follow import as_propagated
from autoshard.solver.formulate import Formulation, formulate
from autoshard.solver.problem import InfeasibleError

_TRACE_KEYWORDS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
_JIT_KEYWORDS = (*_TRACE_KEYWORDS, "keep_unused", "compiler_options")
_UNITS = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


@dataclass(frozen=True)
class Options:
    """What a plan depends on besides the program."""

    mesh: Mesh | AbstractMesh  # axis types Auto
    topology: Topology
    memory: float  # bytes per device
    fixed: Mapping[str, PartitionSpec]  # path or glob -> spec
    time_limit: float  # s


def autoshard(
    fn: Callable | None = None,
    *,
    mesh: Mesh | AbstractMesh,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    plan: Plan | str | Path | None = None,
    **jit_keywords: Any,
) -> Any:
    """Shards a train step over a mesh. Use it where `jax.jit` would stand.

    The first call of a signature traces the step, solves for the cheapest sharding of every value, places the inputs,
    compiles and runs; later calls run.

    Args:
        fn: any function that `jax.jit` takes; without it, a decorator is returned.
        mesh: the devices; axes of any type, they are used as Auto axes. An AbstractMesh can be planned for, not run.
        memory: bytes per device that a step may use, as a number or ``"14GiB"``; the topology's by default.
        topology: what the machine costs, or the name of a preset; guessed from the mesh by default.
        fixed: shardings that arguments must have, by path or glob: ``{"params/embed": P("model", None)}``.
        time_limit: seconds after which the solver returns the best plan it has, with its proven gap.
        plan: a plan made earlier, or its file; it is used instead of solving, and must be for this very program.
        **jit_keywords: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`, `keep_unused`,
            `compiler_options`, as for `jax.jit`.

    Returns:
        A function that behaves as `fn` and has `.plan(...)` and `.lower(...)`.

    Raises:
        AutoshardError: the options contradict each other, or no sharding fits in memory.
    """
    if fn is None:
        given = {name: value for name, value in locals().items() if name not in ("fn", "jit_keywords")}
        return functools.partial(autoshard, **given, **jit_keywords)
    options = _options(mesh, topology, memory, fixed, time_limit)
    return Autosharded(fn, options, jit_keywords, plan)


def plan(
    fn: Callable,
    *args: Any,
    mesh: Mesh | AbstractMesh,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    kwargs: Mapping[str, Any] | None = None,
    **jit_keywords: Any,
) -> Plan:
    """The plan of `fn` on arrays or ShapeDtypeStructs; see `autoshard` for the options.

    Args:
        kwargs: keyword arguments of `fn`.
    """
    options = _options(mesh, topology, memory, fixed, time_limit)
    return Autosharded(fn, options, jit_keywords, None).plan(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Compiled:
    """One signature of the step, planned and handed to `jax.jit`."""

    plan: Plan
    program: Program
    step: Any  # under jax.jit: flat arguments -> flat results


class Autosharded:
    """A function that is planned, compiled and placed on its mesh when it is called."""

    def __init__(self, fn: Callable, options: Options, jit_keywords: dict, plan: Plan | str | Path | None):
        unknown = jit_keywords.keys() - set(_JIT_KEYWORDS)
        if unknown:
            raise TypeError(f"autoshard got {sorted(unknown)}; of jax.jit it takes {', '.join(_JIT_KEYWORDS)}")
        functools.update_wrapper(self, fn)
        self._fn, self._options, self._jit_keywords = fn, options, jit_keywords
        self._given = Plan.load(plan, options.mesh) if isinstance(plan, str | Path) else plan
        self._static = _Static(fn, jit_keywords)
        self._compiled: dict[tuple, _Compiled] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiled, leaves = self._prepare(args, kwargs)
        if not isinstance(self._options.mesh, Mesh):
            raise MeshError(
                f"{self._options.mesh} has no devices, so the step can be planned and lowered but not run.\n"
                "Give autoshard a mesh of devices (jax.make_mesh) to run it."
            )
        placed = _place(leaves, compiled.plan, compiled.program)
        return jax.tree.unflatten(compiled.program.out_tree, compiled.step(*placed))

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is sharded for arguments like these: arrays or ShapeDtypeStructs."""
        return self._prepare(args, kwargs)[0].plan

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step, lowered; `.compile()` compiles it for the devices of the mesh."""
        return self._prepare(args, kwargs)[0].plan.lowering()

    def _prepare(self, args: tuple, kwargs: dict) -> tuple[_Compiled, list]:
        static, dynamic = self._static.split(args, kwargs)
        leaves, in_tree = jax.tree.flatten(dynamic)
        avals = tuple(_abstract(leaf) for leaf in leaves)
        key = static, in_tree, tuple((aval.shape, aval.dtype, aval.weak_type) for aval in avals)
        compiled = self._compiled.get(key)
        if compiled is None:
            compiled = self._compiled[key] = self._compile(args, kwargs)
        return compiled, leaves

    def trace(self, args: tuple, kwargs: dict) -> Program:
        """The step's program for arguments like these; where arrays lie now is no business of it."""
        static, dynamic = self._static.split(args, kwargs)
        args, kwargs = self._static.join(static, jax.tree.map(_abstract, dynamic))
        keywords = {name: value for name, value in self._jit_keywords.items() if name in _TRACE_KEYWORDS}
        return trace(self._fn, args, kwargs, **keywords)

    def _compile(self, args: tuple, kwargs: dict) -> _Compiled:
        program = self.trace(args, kwargs)
        made = self._given.bound_to(program) if self._given else plan_program(program, self._options)
        rest = {name: value for name, value in self._jit_keywords.items() if name not in _TRACE_KEYWORDS}
        return _compiled(program, made, rest)


def _compiled(program: Program, made: Plan, jit_keywords: Mapping[str, Any]) -> _Compiled:
    step = jitted(program, made, **jit_keywords)
    return _Compiled(replace(made, lowering=functools.partial(lowered, program, made, step)), program, step)


def evaluate(
    fn: Callable,
    *args: Any,
    mesh: Mesh | AbstractMesh,
    in_shardings: Any,
    out_shardings: Any = None,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **jit_keywords: Any,
) -> Plan:
    """What a sharding that you wrote by hand costs, in the same report as a plan: nothing is solved for.

    Inner values lie as sharding propagation leaves them; what the layouts leave open is done the cheapest way.

    Args:
        in_shardings: one entry per positional argument, as for `jax.jit`: PartitionSpecs or NamedShardings in a pytree
            that is a prefix of the argument's; None keeps an argument whole on every device.
        out_shardings: the same for the result. A result that takes an argument's place lies as that argument.
        kwargs: keyword arguments of `fn`; they are kept whole.

    Returns:
        A plan with the status "feasible" and no bound; it may pass the memory limit, which is not enforced.

    Raises:
        MeshError: a sharding does not fit its array or the mesh.
    """
    options = _options(mesh, topology, memory, None, 0.0)
    traced = Autosharded(fn, options, jit_keywords, None)
    program = traced.trace(args, dict(kwargs or {}))
    layouts = _layouts_from_tree(program, in_shardings, options.mesh)
    ends = _result_layouts(program, out_shardings, options.mesh)
    rules, mesh_shape = rules_for(program), dict(options.mesh.shape)
    formulation = formulate(program, rules, mesh_shape, options.topology, fixed=layouts)
    fixed = {program.arguments[i].id: layout for i, layout in layouts.items()} | ends
    solution = as_propagated(formulation, propagate_layouts(program, rules, mesh_shape, fixed))
    comparison = Comparison(functools.partial(alternatives_of, formulation))
    made = make_plan(formulation, solution, options.mesh, _unused_axes(program, mesh_shape), comparison)
    rest = {name: value for name, value in jit_keywords.items() if name not in _TRACE_KEYWORDS}
    return _compiled(program, replace(made, memory=options.memory), rest).plan


def propagate(
    fn: Callable,
    *args: Any,
    mesh: Mesh | AbstractMesh,
    in_specs: tuple,
    kwargs: Mapping[str, Any] | None = None,
    **jit_keywords: Any,
) -> Propagated:
    """GSPMD-style sharding propagation alone: from the arguments' PartitionSpecs to those of every value.

    Args:
        in_specs: one entry per positional argument: a PartitionSpec, a pytree of them that is a prefix of the
            argument's, or None for an argument whose sharding is open.

    Raises:
        MeshError: a spec does not fit its array or the mesh.
    """
    options = _options(mesh, Topology.of(mesh), None, None, 0.0)
    program = Autosharded(fn, options, jit_keywords, None).trace(args, dict(kwargs or {}))
    layouts = _layouts_from_tree(program, in_specs, options.mesh, open_ones=True)
    fixed = {program.arguments[i].id: layout for i, layout in layouts.items()}
    found = propagate_layouts(program, rules_for(program), dict(options.mesh.shape), fixed)
    maker = {output.id: equation for equation in program.equations for output in equation.outputs}
    return Propagated(
        outputs=tuple(
            spec_of(found[x.id]) if isinstance(x, Value) else PartitionSpec() for x in program.results
        ),
        values=tuple(PropagatedValue(x, spec_of(found[x.id]), maker.get(x.id)) for x in program.values if x.id in found),
    )


def plan_program(program: Program, options: Options) -> Plan:
    """The stages from a traced program to its plan."""
    mesh_shape = dict(options.mesh.shape)
    formulation = formulate(
        program,
        rules_for(program),
        mesh_shape,
        options.topology,
        memory=options.memory,
        fixed=_fixed_layouts(program, options.fixed, mesh_shape),
    )
    try:
        solution = solve(formulation.problem, time_limit=options.time_limit)
    except InfeasibleError as error:
        raise _memory_error(formulation, error) from None
    comparison = Comparison(functools.partial(alternatives_of, formulation))
    return make_plan(formulation, solution, options.mesh, _unused_axes(program, mesh_shape), comparison)


# Options.


def _options(mesh, topology, memory, fixed, time_limit) -> Options:
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise MeshError(f"mesh must be a jax.sharding.Mesh or AbstractMesh, not {mesh!r}")
    auto = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, Mesh):
        mesh = Mesh(mesh.devices, mesh.axis_names, axis_types=auto)
    else:
        mesh = AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=auto)
    if isinstance(topology, str):
        topology = preset(topology, dict(mesh.shape))
    topology = topology or Topology.of(mesh)
    limit = topology.memory_bytes if memory is None else bytes_of(memory)
    return Options(mesh, topology, limit, fixed or {}, time_limit)


def bytes_of(size: str | float) -> float:
    """Bytes of ``"14GiB"``, ``"800 MB"`` or a plain number.

    >>> bytes_of("1.5KiB")
    1536.0
    """
    if not isinstance(size, str):
        return float(size)
    match = re.fullmatch(r"\s*([0-9.]+)\s*([a-zA-Z]*)\s*", size)
    if not match or match[2].lower() not in _UNITS:
        raise MeshError(f"memory={size!r} is not a size; write bytes as a number, or as '14GiB' or '800MB'")
    return float(match[1]) * _UNITS[match[2].lower()]


def _fixed_layouts(program: Program, fixed: Mapping[str, PartitionSpec], mesh: MeshShape) -> dict[int, Layout]:
    """Argument index -> layout, from paths and globs.

    A pattern fits an argument if it fits the end of its path from some key on: "params/w" fits "state/params/w".
    """
    layouts: dict[int, Layout] = {}
    pinned_by: dict[int, str] = {}
    for pattern, spec in fixed.items():
        matches = [i for i, value in enumerate(program.arguments) if _fits(pattern, value.name)]
        if not matches:
            names = ", ".join(value.name for value in program.arguments[:20])
            raise ConflictError(f"fixed: no argument of {program.name} fits {pattern!r}; its arguments are {names}, ...")
        for i in matches:
            value = program.arguments[i]
            unknown = [axis for axis in _axes(spec) if axis not in mesh]
            if unknown:
                raise ConflictError(f"fixed[{pattern!r}] = {spec} names {unknown}; the mesh has the axes {list(mesh)}")
            try:
                layout = layout_of(spec, len(value.shape))
            except MeshError as error:
                raise ConflictError(f"fixed[{pattern!r}] does not fit {value}: {error}") from None
            if layouts.setdefault(i, layout) != layout:
                raise ConflictError(
                    f"fixed[{pattern!r}] wants {value} to be {spec}, fixed[{pinned_by[i]!r}] wants it to be "
                    f"{spec_of(layouts[i])}.\nDrop one of them, or make the patterns narrower."
                )
            pinned_by[i] = pattern
    for argument, result in program.carried.items():
        twin = next((i for i, value in enumerate(program.arguments) if value is program.results[result]), None)
        if argument in layouts and twin in layouts and layouts[argument] != layouts[twin]:
            raise ConflictError(
                f"{program.arguments[twin]} becomes {program.arguments[argument]} in the next step, but they are fixed "
                f"to {spec_of(layouts[twin])} and {spec_of(layouts[argument])}"
            )
    return layouts


def _layouts_from_tree(program: Program, tree: Any, mesh: Mesh | AbstractMesh, open_ones: bool = False) -> dict:
    """Argument index -> layout, from a tuple that is a prefix of the positional arguments."""
    slots = jax.tree.unflatten(program.in_tree, range(len(program.arguments)))
    if not isinstance(tree, tuple) or isinstance(tree, PartitionSpec) or len(tree) != len(slots[0]):
        raise MeshError(f"one sharding per positional argument is needed, in a tuple of {len(slots[0])}, not {tree!r}")
    layouts = {i: layout for i, layout in _from_prefix(tree, slots[0], program.arguments, mesh) if layout is not None}
    if not open_ones:
        layouts = {i: ((),) * len(value.shape) for i, value in enumerate(program.arguments)} | layouts
    return layouts


def _result_layouts(program: Program, tree: Any, mesh: Mesh | AbstractMesh) -> dict[int, Layout]:
    """Value id -> layout, from a prefix of the result; results that take an argument's place are left out."""
    if tree is None:
        return {}
    slots = jax.tree.unflatten(program.out_tree, range(len(program.results)))
    replaced = set(program.carried.values())
    return {
        program.results[i].id: layout
        for i, layout in _from_prefix(tree, slots, program.results, mesh)
        if layout is not None and i not in replaced and isinstance(program.results[i], Value)
    }


def _from_prefix(tree: Any, slots: Any, values: Sequence, mesh: Mesh | AbstractMesh) -> Iterator[tuple]:
    def is_entry(node: Any) -> bool:
        return node is None or isinstance(node, PartitionSpec | NamedSharding)

    try:
        pairs = jax.tree.map(lambda entry, below: [(i, entry) for i in jax.tree.leaves(below)], tree, slots, is_leaf=is_entry)
    except ValueError as error:
        raise MeshError(f"the shardings are no prefix of what they are for: {error}") from None
    for i, entry in (pair for pairs in jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, list)) for pair in pairs):
        spec = entry.spec if isinstance(entry, NamedSharding) else entry
        if spec is None:
            yield i, None
            continue
        value = values[i]
        unknown = [axis for axis in _axes(spec) if axis not in mesh.shape]
        if unknown:
            raise MeshError(f"{spec} names {unknown}; the mesh has the axes {list(mesh.shape)}")
        try:
            yield i, layout_of(spec, len(value.shape))
        except MeshError as error:
            raise MeshError(f"{spec} does not fit {value}: {error}") from None


def _axes(spec: PartitionSpec) -> list[str]:
    return [axis for entry in spec if entry for axis in ((entry,) if isinstance(entry, str) else entry)]


def _fits(pattern: str, name: str) -> bool:
    keys = name.split("/")
    return any(fnmatch.fnmatchcase("/".join(keys[i:]), pattern) for i in range(len(keys)))


def _unused_axes(program: Program, mesh: MeshShape) -> tuple[str, ...]:
    """A remark for every mesh axis that divides no dim of any argument or inner value."""
    sizes = {size for value in program.values for size in value.shape}
    return tuple(
        f"mesh axis {axis!r} ({devices} devices) divides no dim of {program.name}: its dims are "
        f"{', '.join(map(str, sorted(sizes)))}. Every device along it computes the same."
        for axis, devices in mesh.items()
        if devices > 1 and not any(size and size % devices == 0 for size in sizes)
    )


def _memory_error(formulation: Formulation, error: InfeasibleError) -> MemoryLimitError:
    largest = sorted(formulation.program.values, key=lambda value: -value.bytes)[:3]
    listed = "\n".join(f"  {value} {_size(value.bytes)} ({value.source or 'argument'})" for value in largest)
    return MemoryLimitError(
        f"no sharding fits in {_size(error.limit)} per device; the smallest that does needs {_size(error.needed)}.\n"
        f"Largest values, before sharding:\n{listed}\n"
        f"Try memory='{math.ceil(error.needed / 2**20)}MiB', a larger mesh, or jax.checkpoint around the lines above.",
        budget=error.limit,
        needed=error.needed,
    )


def _size(size: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} bytes"


# Arguments.


@dataclass(frozen=True)
class _Static:
    """Which arguments are static, by the rules of `jax.jit`."""

    positions: frozenset[int]
    names: frozenset[str]

    def __init__(self, fn: Callable, jit_keywords: Mapping[str, Any]):
        positions = _as_tuple(jit_keywords.get("static_argnums"))
        names = _as_tuple(jit_keywords.get("static_argnames"))
        try:
            parameters = list(inspect.signature(fn).parameters.values())
        except (ValueError, TypeError):
            parameters = []
        positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        positions = {i % len(positional) if i < 0 and positional else i for i in positions}
        if not jit_keywords.get("static_argnames"):
            names = {*names, *(positional[i] for i in positions if i < len(positional))}
        if jit_keywords.get("static_argnums") is None:
            positions = {*positions, *(positional.index(name) for name in names if name in positional)}
        object.__setattr__(self, "positions", frozenset(positions))
        object.__setattr__(self, "names", frozenset(names))

    def split(self, args: tuple, kwargs: dict) -> tuple[tuple, tuple]:
        """(static arguments, hashable), (dynamic positional, dynamic keyword)."""
        static = tuple((i, arg) for i, arg in enumerate(args) if i in self.positions)
        static += tuple((name, kwargs[name]) for name in sorted(kwargs) if name in self.names)
        dynamic = tuple(arg for i, arg in enumerate(args) if i not in self.positions)
        return static, (dynamic, {name: value for name, value in kwargs.items() if name not in self.names})

    def join(self, static: tuple, dynamic: tuple) -> tuple[tuple, dict]:
        """The way back from `split`."""
        positional, keyword = list(dynamic[0]), dict(dynamic[1])
        for where, value in static:
            if isinstance(where, int):
                positional.insert(where, value)
            else:
                keyword[where] = value
        return tuple(positional), keyword


def _as_tuple(value: Any) -> tuple:
    return () if value is None else (value,) if isinstance(value, int | str) else tuple(value)


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf's type without its sharding: where it lies now is no business of the trace."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _place(leaves: list, plan: Plan, program: Program) -> list:
    """The inputs on the mesh as the plan wants them; what is in place already is not touched."""
    placed = []
    for i, (leaf, sharding) in enumerate(zip(leaves, plan.flat_in_shardings, strict=True)):
        if isinstance(leaf, jax.Array):
            if leaf.sharding.is_equivalent_to(sharding, leaf.ndim) and leaf.committed:
                placed.append(leaf)
                continue
            if leaf.committed and not leaf.sharding.device_set <= sharding.device_set:
                elsewhere = sorted(device.id for device in leaf.sharding.device_set - sharding.device_set)
                raise MeshError(
                    f"{plan.arguments[i].name} lies on devices {elsewhere}, which are not in the mesh "
                    f"{dict(plan.mesh.shape)}.\nMove it first (jax.device_put), or give autoshard a mesh that has them."
                )
            if i in program.donated and not leaf.sharding.device_set.isdisjoint(sharding.device_set):
                leaf = jnp.copy(leaf)  # device_put may share the user's buffer, and donating it would delete the user's array
        placed.append(jax.device_put(leaf, sharding))
    return placed
