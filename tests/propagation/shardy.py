"""What Shardy itself does with a function: the oracle for rules and for propagation. Asserts that it ran at all."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import passmanager
from jaxlib.mlir.dialects import stablehlo

from autoshard.layout import Layout, MeshShape, layout_of, replicated
from autoshard.propagation.rule import Dims

stablehlo.register_stablehlo_passes()

PROPAGATE = "builtin.module(func.func(chlo-legalize-to-stablehlo),sdy-propagation-pipeline)"
RULES = "builtin.module(func.func(chlo-legalize-to-stablehlo,sdy-populate-op-sharding-rules))"


def propagated(
    fn: Callable, args: Sequence, specs: Sequence[PartitionSpec | None], mesh_shape: MeshShape
) -> tuple[list[Layout], list[Layout]]:
    """The layouts of `fn`'s flat arguments and results after Shardy's pipeline; an argument with spec None is free."""
    mesh = jax.make_mesh(
        tuple(mesh_shape.values()), tuple(mesh_shape), axis_types=(jax.sharding.AxisType.Auto,) * len(mesh_shape)
    )
    leaves, tree = jax.tree.flatten(args)
    shardings = [None if spec is None else NamedSharding(mesh, spec) for spec in specs]
    module = _ran(jax.jit(fn, in_shardings=jax.tree.unflatten(tree, shardings)), args, PROPAGATE)
    main = next(op for op in module.body.operations if op.attributes["sym_name"].value == "main")
    ranks = [len(leaf.shape) for leaf in leaves], [len(x.shape) for x in jax.tree.leaves(jax.eval_shape(fn, *args))]
    found = tuple(
        [_layout(str(attributes), rank) for attributes, rank in zip(main.attributes[key], of, strict=True)]
        for key, of in zip(("arg_attrs", "res_attrs"), ranks, strict=True)
    )
    for layout, spec in zip(found[0], specs, strict=True):
        assert spec is None or layout == layout_of(spec, len(layout)), "Shardy moved a fixed argument"
    return found


@dataclass(frozen=True)
class OpRule:
    """Shardy's rule of one operation, named as it names factors."""

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: dict[str, int]
    special: dict[str, frozenset[str]]  # "reduction", "need_replication", ... -> factors


def rule_of_op(fn: Callable, args: Sequence, op: str) -> OpRule:
    """Shardy's rule of the last operation `op` that `fn` lowers to."""
    text = str(_ran(jax.jit(fn, keep_unused=True), args, RULES))
    # A region stands between an operation and its rule: look for the rule after the operation's name.
    after = text[text.rindex(op) :]
    rule = r"#sdy\.op_sharding_rule<\((.*?)\)->\((.*?)\)(?: \{(.*?)\})?((?: \w+=\{[^}]*\})*)>"
    match = re.search(rule, _unnested(after))
    assert match, f"Shardy has no rule for {op} in\n{text}"
    operands, results, sizes, special = match.groups()
    return OpRule(
        operands=_tensors(operands),
        results=_tensors(results),
        sizes={name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", sizes or "")},
        special={kind: frozenset(names.split(", ")) for kind, names in re.findall(r"(\w+)=\{([^}]*)\}", special)},
    )


def _unnested(text: str) -> str:
    """`text` without the inside of the first region, where other operations have rules of their own."""
    first_line = text.split("\n", 1)[0]
    return text[text.index("\n    })") :] if first_line.endswith("({") else text


def _tensors(text: str) -> tuple[Dims, ...]:
    return tuple(
        tuple(tuple(re.findall(r"[a-z](?:_\d+)?", dim)) for dim in filter(None, tensor.split(", ")))
        for tensor in re.findall(r"\[(.*?)\]", text)
    )


def _ran(jitted: Callable, args: Sequence, pipeline: str):
    module = jitted.trace(*args).lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(pipeline).run(module.operation)
    return module


def _layout(attributes: str, rank: int) -> Layout:
    """`{sdy.sharding = #sdy.sharding<@mesh, [{"x", "y"}, {}]>}` as a layout; nothing said means replicated."""
    match = re.search(r"#sdy\.sharding<@\w+, \[([^\]]*)\]", attributes)
    if match is None:
        return replicated(rank)
    return tuple(tuple(re.findall(r'"(\w+)"(?!:)', dim)) for dim in re.findall(r"\{([^}]*)\}", match[1]))
