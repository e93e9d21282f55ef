"""A plan in, Python without autoshard that shards a step as the plan does out."""

from __future__ import annotations

import ast
import inspect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from types import ModuleType
from typing import Any, Literal

import jax
from jax.tree_util import PyTreeDef

from autoshard.errors import PlanError
from autoshard.export import standalone, written_out
from autoshard.export.containers import Expression, Line, UnwritableError, expression_of
from autoshard.export.inner_layouts import (
    InnerLayouts,
    inner_layouts,
    reason_without_table,
    reason_written_out,
    spec_of_type,
    types_text,
)
from autoshard.export.logical_axes import Names, logical_axes
from autoshard.export.logical_rules import FLAX_SHARDINGS, flax_rules, names_text
from autoshard.export.modules_code import CONSTRAIN_MODULES, CONSTRAINED_MODULES, EXPLICIT_MODULES
from autoshard.export.operations_code import PRIMITIVE_MODULES, PRIMITIVES
from autoshard.jaxprs import HOST
from autoshard.layout import spec_text
from autoshard.lower import lookups, xla_faults
from autoshard.operations import reduce_scatter
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.program import Program, signature
from autoshard.program.trees import Tree, holds_flat_objects

Style = Literal["specs", "explicit", "flax"]
_PASTED = (reduce_scatter, xla_faults, lookups, standalone)

_SHARDINGS_ON = '''
def _shardings_on(mesh):
    """From a PartitionSpec to its sharding on the mesh, with Auto axes: on them, the compiler splits inner values."""
    mesh = auto_mesh(mesh)
    return lambda spec, memory_kind=None: NamedSharding(mesh, spec, memory_kind=memory_kind)
'''

_TYPES_ON = '''
def _shardings_on(mesh):
    """From a PartitionSpec to its sharding on the mesh: on Auto axes, or as a type of explicit mode."""
    auto, typed = auto_mesh(mesh), typed_mesh(mesh)
    return lambda spec, memory_kind=None, is_type=False: NamedSharding(
        typed if is_type else auto, spec, memory_kind=memory_kind
    )


def typed_mesh(mesh):
    """The same devices with axes of the kinds that types of explicit mode are on."""
    types = {types}
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)
'''

_AUTO_MESH = inspect.getsource(standalone.auto_mesh)
_SIGNATURES = "\n\n".join(inspect.getsource(one) for one in signature.STANDING_ALONE)

_NODE = '''
class _Any:
    """Stands for static data of a container that is no literal. It equals everything."""

    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 0

    def __repr__(self):
        return "ANY"


ANY = _Any()


def node(kind, static, children):
    """A container of the user's, as JAX rebuilds it from its static data and its children."""
    registry = jax.tree_util.default_registry
    structure = jax.tree_util.PyTreeDef.from_node_data_and_children(
        registry, (kind, static), [jax.tree.structure(child) for child in children]
    )
    return jax.tree.unflatten(structure, jax.tree.leaves(children))
'''

_CONSTRAINED = '''
def constrained(step, mesh, static_argnums=None, static_argnames=None):
    """`step` with the plan's constraints inside, to be given to `jax.jit`. It must compute what was planned.

    Arguments that are static for `jax.jit` are to be named here, too.
    """
    return constrain(step, mesh, _table(), static_argnums, static_argnames)
'''

_AS_IT_IS = '''
def constrained(step, mesh, static_argnums=None, static_argnames=None):
    """`step` as it is: the layouts of its arguments and results imply all others."""
    return step
'''

_EXPLICIT = '''
def explicit(step, mesh, static_argnums=None, static_argnames=None):
    """`step` from and to arrays that have types of explicit mode; inside, axes are Auto, and constraints those planned.

    Call it under `jax.set_mesh(typed_mesh(mesh))`, with arguments placed by `jax.device_put` as `in_shardings` says.
    Arguments that are static for `jax.jit` are to be named here, too.
    """
    results = [sharding.spec for sharding in {results}]

    @functools.wraps(step)
    def typed(*args, **keywords):
        traced, called = without_static({inner}, args, keywords, static_argnums, static_argnames)
        leaves, structure = jax.tree.flatten(traced)
        given, made = [hasattr(leaf, "dtype") for leaf in leaves], []

        def flat(*arrays):
            left = iter(arrays)
            filled = [next(left) if is_array else leaf for leaf, is_array in zip(leaves, given)]
            made[:] = jax.tree.flatten(called(*jax.tree.unflatten(structure, filled)))
            return [leaf for leaf, is_array in zip(made[0], arrays_among(made[0], len(results))) if is_array]

        run = jax.sharding.auto_axes(flat, axes=mesh.axis_names, out_sharding=results)
        left = iter(run(*(leaf for leaf, is_array in zip(leaves, given) if is_array)))
        flags = arrays_among(made[0], len(results))
        return jax.tree.unflatten(made[1], [next(left) if flag else leaf for leaf, flag in zip(made[0], flags)])

    return typed
'''

_ARRAYS_AMONG = '''
def arrays_among(leaves, count):
    """Which leaves are arrays, so many as are known: numbers are, unless that are too many, as in equinox modules."""
    flags = [hasattr(leaf, "dtype") or isinstance(leaf, (bool, int, float, complex)) for leaf in leaves]
    return flags if sum(flags) == count else [hasattr(leaf, "dtype") for leaf in leaves]
'''

_FOR_EXPLICIT = (inspect.getsource(standalone.without_static), _SIGNATURES)


@dataclass(frozen=True)
class _Trees:
    """The trees of arguments and of results, as code; the one of arguments is that of positional arguments."""

    name: str  # of the function that gives it
    says: str  # its docstring
    tree: Tree
    arrays: Sequence[PlacedArray]
    texts: Sequence[str]  # per array, the code of its sharding
    example: str  # what it takes where classes of the user's cannot be written

    @cached_property
    def parts(self) -> tuple[PyTreeDef, list[Line]]:
        """The structure, and the line of each leaf. Static leaves are None, as `eqx.partition` leaves them out."""
        structure, order = self.tree.structure, self.tree.order
        if None in order or holds_flat_objects(structure):
            found, structure = jax.tree.flatten(self.tree.filled([_Leaf(i) for i in range(len(self.arrays))]))
            order = tuple(leaf.index for leaf in found)
        lines = [Line(text, f"{one.name} {one.type}") for text, one in zip(self.texts, self.arrays, strict=True)]
        return structure, [lines[index] for index in order if index is not None]

    @cached_property
    def expression(self) -> Expression | None:
        """The tree; None if some class of it cannot be written."""
        try:
            found = expression_of(*self.parts)
        except UnwritableError:
            return None
        return found if not found.nodes or _fits(found, self.parts[0]) else None

    def text(self) -> str:
        if self.expression is not None:
            body = self.expression.text(1, "return ")
            return f'def {self.name}(mesh):\n    """{self.says}"""\n    put = _shardings_on(mesh)\n{body}\n'
        lines = "".join(f"        {line.text},  # {line.comment}\n" for line in self.parts[1])
        example = self.example
        return (
            f"def {self.name}(mesh, {example}=None):\n"
            f'    """{self.says}\n\n    Some class of this tree cannot be written here. `{example}` has to be given\n'
            f'    for its classes: arrays or ShapeDtypeStructs. Leaves that are neither have None.\n    """\n'
            f"    if {example} is None:\n"
            f'        raise TypeError("{self.name}(mesh, {example}): its classes are needed; see its docstring")\n'
            f"    leaves, structure = jax.tree.flatten({example})\n    left = iter(_{self.name}(mesh))\n"
            f"    flags = arrays_among(leaves, {len(self.parts[1])})\n"
            f"    return jax.tree.unflatten(structure, [next(left) if flag else None for flag in flags])\n\n\n"
            f"def _{self.name}(mesh):\n    put = _shardings_on(mesh)\n    return [\n{lines}    ]\n"
        )


def shardings_code(plan: PlanData, program: Program | None, style: Style = "specs") -> str:
    """The code.

    Args:
        plan: what it is of.
        program: the program that was planned; None if that is not known, and what is inside stays unsaid.
        style: "explicit" where arguments and results have types of explicit mode, "flax" where they have names of dims.

    Raises:
        PlanError: the step has a padded batch, and code cannot say how its added rows are left out.
    """
    positional, keyword = plan.argument_tree.children()
    of_arguments = f"A tree per positional argument of {plan.name}, for jax.jit."
    of_results = f"The tree of the result of {plan.name}, for jax.jit."
    arrays, explicit = (*plan.arguments, *plan.results), style == "explicit"
    axes = logical_axes(plan, program) if style == "flax" else None
    if axes is not None:
        texts = [_named_leaf(*one) for one in zip(arrays, [*axes.arguments, *axes.results], strict=True)]
    else:
        texts = [_leaf(replace(one, typed=one.typed or explicit)) for one in arrays]
    count = len(plan.arguments)
    given = plan.arguments, texts[:count]
    made = (*plan.results, *plan.arguments), [*texts[count:], *texts[:count]]
    trees = [
        _Trees("in_shardings", of_arguments, positional, *given, "args"),
        _Trees("out_shardings", of_results, plan.result_tree, *made, "result"),
    ]
    if keyword.paths:
        says = "A tree per keyword argument, for jax.device_put: jax.jit takes shardings of positional ones alone."
        trees.insert(1, _Trees("keyword_shardings", says, keyword, *given, "keywords"))
    table, why = _table_of(plan, program, explicit)
    if table is None and program is not None and program.adds_rows:
        raise PlanError(
            f"code for {plan.name} would count the rows that are added to its batch: {why}.\n"
            "Give the rows that you add weights of 0, and plan that step."
        )
    takes_modules = table is not None and program is not None and program.changes is not None
    wraps = explicit and plan.axis_types is None  # a step of explicit mode needs no other one around it
    wraps = wraps and (takes_modules or program is None or program.changes is None)  # a table runs changes of modules
    is_written = table is not None and bool(table.operations)
    runs_table = table is not None and (table.rows or takes_modules or is_written)
    pasted: tuple[ModuleType, ...] = (*_PASTED, *[written_out] * is_written) if runs_table else ()
    expressions = [one.expression for one in trees if one.expression is not None]
    needs_node = any(one.nodes for one in expressions)
    modules = sorted(frozenset().union(*(one.modules for one in expressions)))
    if pasted or wraps:
        modules += ["functools", "inspect", "re"]
    if table is not None and is_written:
        modules += [*PRIMITIVE_MODULES, *table.modules]
    if axes is not None:
        modules.append("flax.linen")
        putting = f"{flax_rules(axes)}\n\n{FLAX_SHARDINGS}"
    else:
        putting = _TYPES_ON.format(types=types_text(plan)) if explicit or plan.axis_types else _SHARDINGS_ON
    parts = [
        _docstring(plan, program, table, trees, wraps, why),
        _imports(modules, pasted) + "\nfrom flax import nnx" * takes_modules,
        *(one.text() for one in trees),
        CONSTRAINED_MODULES if takes_modules else _CONSTRAINED if pasted else _AS_IT_IS if table is not None else "",
        _explicit(plan, trees[-1], table is not None, takes_modules) if wraps else "",
        _ARRAYS_AMONG if wraps or len(expressions) < len(trees) else "",
        f"def _table():\n{table.text()}" if table is not None and pasted else "",
        table.operations if table is not None else "",
        putting,
        _NODE if needs_node else "",
        *((*map(_source_of, pasted), _SIGNATURES) if pasted else [_AUTO_MESH, *_FOR_EXPLICIT * wraps]),
        PRIMITIVES if is_written else "",
        CONSTRAIN_MODULES if takes_modules else "",
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def _explicit(plan: PlanData, results: _Trees, has_table: bool, takes_modules: bool) -> str:
    if takes_modules:
        types = (f"        {spec_of_type(one)},  # {one.name} {one.type}\n" for one in plan.results)
        return EXPLICIT_MODULES.format(types="".join(types))
    inner = "constrained(step, mesh, static_argnums, static_argnames)" if has_table else "step"
    found = "jax.tree.leaves(out_shardings(mesh))" if results.expression is not None else "_out_shardings(mesh)"
    return _EXPLICIT.format(inner=inner, results=found)


def _leaf(array: PlacedArray) -> str:
    kind = f', memory_kind="{HOST}"' if array.on_host else ""
    if not array.typed:
        return f"put({spec_text(array.layout)}{kind})"
    return f"put({spec_of_type(array)}{kind}, is_type=True)"


def _named_leaf(array: PlacedArray, names: Names) -> str:
    kind = f', memory_kind="{HOST}"' if array.on_host else ""
    return f"put({names_text(names)}{kind})"


def _docstring(
    plan: PlanData,
    program: Program | None,
    table: InnerLayouts | None,
    trees: Sequence[_Trees],
    wraps: bool,
    why: str,
) -> str:
    mesh, donated = dict(plan.mesh.shape), _donated(program)
    donating = f", donate_argnums={donated}" if donated else ""
    step = "step" if table is None else "constrained(step, mesh)"
    given = [f"{one.name}(mesh)" if one.expression is not None else f"{one.name}(mesh, {one.example})" for one in trees]
    lines = [
        f"How {plan.name} is sharded over the mesh {mesh}. Written by autoshard {_version()}, needed no more.",
        "",
    ]
    if wraps:
        jit = "nnx.jit" if program is not None and program.changes is not None else "jax.jit"
        lines += [f"    step = {jit}(explicit(step, mesh){donating})", ""]
    elif program is not None and program.changes is not None:
        lines += [f"    step = nnx.jit({step}{donating})", ""]
        if table is None:
            lines += [f"Place arguments before the first step: `jax.device_put(arguments, {given[0]})`."]
    else:
        lines += [
            f"    step = jax.jit({step}, in_shardings={given[0]},",
            f"                   out_shardings={given[-1]}{donating})",
            "",
        ]
    if table is None:
        lines += [f"Layouts of inner values are left out: {why}."]
    else:
        lines += ["`constrained` adds the layouts of inner values. Without it the compiler chooses them."]
        if table.operations:
            lines += [
                f"The operations of the step are written out here, since {table.reason_written_out}.",
                "So `constrained` runs these, and takes from the step what its arguments and results are.",
                "They have the static arguments and the closed-over values of the call that was planned; static",
                "arguments that print otherwise are refused.",
            ]
        lines += [f"Left to the compiler, which may communicate otherwise: {one}." for one in table.left_to_xla]
    lines += [
        f"The step closes over {one.name}: pass it as an argument, to be laid as {spec_text(one.layout)}, so that no "
        "device holds it whole."
        for one in plan.captured
        if any(one.layout)
    ]
    text = "\n".join(lines).replace("\\", "\\\\").replace('"""', "'''")
    return f'"""{text}\n"""\n'


def _table_of(plan: PlanData, program: Program | None, types_all: bool) -> tuple[InnerLayouts | None, str]:
    """The table of inner layouts, or why the code leaves it out."""
    if program is None:
        return None, "the plan comes from a file and knows no step; bind it to one"
    if why := reason_without_table(program):
        return None, why
    try:
        return inner_layouts(program, plan, types_all), ""
    except UnwritableError as error:
        return None, f"{reason_written_out(program)}; {error}"


def _donated(program: Program | None) -> tuple[int, ...]:
    """Positional arguments whose arrays are all donated."""
    if program is None:
        return ()
    found: dict[int, list[bool]] = {}
    for i, path in enumerate(program.in_tree.array_paths):
        if path[0].idx == 0:
            found.setdefault(path[1].idx, []).append(i in program.donated)
    return tuple(position for position, flags in found.items() if all(flags))


def _version() -> str:
    try:
        return version("autoshard")
    except PackageNotFoundError:  # run from a folder that is not installed
        return ""


def _imports(modules: Sequence[str], pasted: Sequence[ModuleType]) -> str:
    """The import lines of the code, `from __future__` first."""
    names: dict[str, set[str]] = {"jax.sharding": {"AbstractMesh", "AxisType", "Mesh", "NamedSharding"}}
    whole = {"import jax", *(f"import {module}" for module in modules)}
    for one in itertools.chain(*(ast.parse(inspect.getsource(module)).body for module in pasted)):
        if isinstance(one, ast.Import):
            whole.add(ast.unparse(one))
        elif isinstance(one, ast.ImportFrom) and (one.module or "").partition(".")[0] not in (
            "__future__",
            "autoshard",
        ):
            names.setdefault(one.module or "", set()).update(name.name for name in one.names)
    lines = [f"from {module} import {', '.join(sorted(found - {'PartitionSpec'}))}" for module, found in names.items()]
    lines.append("from jax.sharding import PartitionSpec as P")
    return "\n".join(["from __future__ import annotations", "", *sorted(whole), *sorted(lines)])


def _source_of(module: ModuleType) -> str:
    """The source of a module without its docstring and imports."""
    source = inspect.getsource(module)
    first = next(one for one in ast.parse(source).body if not isinstance(one, ast.Import | ast.ImportFrom | ast.Expr))
    start = min([first.lineno, *(decorator.lineno for decorator in getattr(first, "decorator_list", ()))])
    return "\n".join(source.splitlines()[start - 1 :])


def _fits(expression: Expression, structure: PyTreeDef) -> bool:
    """Whether the expression, run, is a tree of this structure."""
    imports = "\n".join(f"import {module}" for module in sorted(expression.modules))
    namespace: dict[str, Any] = {"jax": jax, "P": jax.sharding.PartitionSpec, "put": lambda spec, **_: _Leaf(0)}
    try:
        exec(f"{imports}\n{_NODE}\ntree = (\n{expression.text(1)}\n)", namespace)
        return bool(jax.tree.structure(namespace["tree"]) == structure)
    except Exception:  # whatever the user's classes raise when they are rebuilt from what is written
        return False


@dataclass(frozen=True)
class _Leaf:
    """Stands for the sharding of an array in a tree that is only looked at."""

    index: int
