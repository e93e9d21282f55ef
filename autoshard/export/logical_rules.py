"""A plan in, rules for logical axes out: Python for flax, or YAML as MaxText configures its models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from autoshard.export.logical_axes import LogicalAxes, Names, logical_axes
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.program import Program

FLAX_PREAMBLE = '''
# Logical axis -> the mesh axes that split it.
RULES = [
{rules}]


def rules():
    """The rules, for `flax.linen.logical_axis_rules` and `flax.linen.logical_to_mesh_sharding`."""
    return list(RULES)
'''

FLAX_SHARDINGS = '''
def _shardings_on(mesh):
    """From names of dims to the sharding that the rules make of them, on the mesh with Auto axes."""
    mesh = auto_mesh(mesh)

    def sharding(names, memory_kind=None):
        found = flax.linen.logical_to_mesh_sharding(names, mesh, RULES)
        return NamedSharding(mesh, found.spec, memory_kind=memory_kind)

    return sharding
'''


def flax_rules(axes: LogicalAxes) -> str:
    """The rules as Python."""
    lines = "".join(f"    ({json.dumps(name)}, {_python(split)}),\n" for name, split in axes.rules.items())
    return FLAX_PREAMBLE.format(rules=lines)


def names_text(names: Names) -> str:
    """Names of dims as a PartitionSpec has them: ``P("batch", None)``."""
    return f"P({', '.join('None' if name is None else json.dumps(name) for name in names)})"


def maxtext_rules(plan: PlanData, program: Program | None) -> str:
    """The rules as YAML."""
    axes = logical_axes(plan, program)
    rules = [f"  - {json.dumps([name, list(split)])}" for name, split in axes.rules.items()]
    lines = [
        f"# How {plan.name} is sharded over the mesh {dict(plan.mesh.shape)}. Written by autoshard.",
        f"mesh_axes: {json.dumps(list(plan.mesh.axis_names))}",
        f"ici_parallelism: {json.dumps(list(plan.mesh.shape.values()))}",
        "logical_axis_rules:",
        *rules,
        "# Names of dims, as models write them in flax.linen.with_logical_partitioning.",
        "logical_axes:",
        *_listed("arguments", plan.arguments, axes.arguments),
        *_listed("results", plan.results, axes.results),
    ]
    return "\n".join(lines) + "\n"


def _listed(what: str, arrays: Sequence[PlacedArray], names: Sequence[Names]) -> Iterable[str]:
    yield f"  {what}:" + " {}" * (not arrays)
    for array, ours in zip(arrays, names, strict=True):
        yield f"    {json.dumps(array.name)}: {json.dumps(list(ours))}"


def _python(axes: Sequence[str]) -> str:
    if not axes:
        return "None"
    quoted = [json.dumps(axis) for axis in axes]
    return quoted[0] if len(quoted) == 1 else f"({', '.join(quoted)})"
