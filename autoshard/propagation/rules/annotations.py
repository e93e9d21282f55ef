"""Where the user says how an array lies: constraints, and regions that are written per device."""

from __future__ import annotations

from dataclasses import replace

from jax.sharding import PartitionSpec

from autoshard.jaxprs import CONSTRAINTS, said
from autoshard.layout import layout_of
from autoshard.program import Equation
from autoshard.program.explicit import open_axes
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, dimwise
from autoshard.propagation.rules.elementwise import shapes_of


@rule(*CONSTRAINTS)
def constraint(equation: Equation) -> Rule:
    """`i j -> i j`, split as the user says; a dim that is left unconstrained may be split by anything."""
    operands, results = shapes_of(equation)
    rule = dimwise(operands, results)
    sharding = said(equation.params)
    if sharding is None:
        return rule
    spec = sharding.spec
    layout = layout_of(spec, len(results[0]))
    free = {dim for dim, entry in enumerate(spec) if entry is PartitionSpec.UNCONSTRAINED}
    dims = ((dim, factors) for dim, factors in enumerate(rule.results[0]) if factors and dim not in free)
    return replace(rule, given={factor: layout[dim] for dim, (factor,) in dims}, open_axes=open_axes(sharding.mesh))


@rule("shard_map")
def shard_map(equation: Equation) -> Rule:
    """`i j, k -> l`, each split as its spec says: what the region does with its shards is its own business."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    given = {}
    for side, shapes, specs in (
        ("operands", operands, equation.params["in_specs"]),
        ("results", results, equation.params["out_specs"]),
    ):
        for tensor, (shape, spec) in enumerate(zip(shapes, specs, strict=True)):
            for dim, (size, axes) in enumerate(zip(shape, layout_of(spec, len(shape)), strict=True)):
                sides: dict[str, list[tuple[int, int]]] = {"operands": [], "results": []}
                place = sides | {side: [(tensor, dim)]}
                given[builder.factor(size, **place, kind="need_replication")] = axes
    return replace(builder.build(), given=given)
