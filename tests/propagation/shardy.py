"""What Shardy itself does with a function: the oracle for rules and for propagation. Asserts that it ran at all."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from jax._src import config
from jax._src.interpreters import partial_eval
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import stablehlo
from oracles import mesh_of

from autoshard.layout import Layout, MeshShape, layout_of, replicated
from autoshard.program import Program
from autoshard.propagation.rule import Dims

stablehlo.register_stablehlo_passes()

PROPAGATE = "builtin.module(func.func(chlo-legalize-to-stablehlo),sdy-propagation-pipeline)"
# The same before what is left of it changes the operations where their operands and results disagree.
ONLY_PROPAGATE = (
    "builtin.module(func.func(chlo-legalize-to-stablehlo),sdy-import-pipeline,sdy-import-func-calls,"
    "sdy-apply-sharding-constraints,sdy-user-priority-propagate)"
)
RULES = "builtin.module(func.func(chlo-legalize-to-stablehlo,sdy-populate-op-sharding-rules))"


@dataclass(frozen=True)
class Propagated:
    """What Shardy's pipeline made of a function."""

    arguments: list[Layout]
    results: list[Layout]
    find_inner: Callable[[], dict[tuple, tuple[Layout, ...]]]

    @cached_property
    def inner(self) -> dict[tuple, tuple[Layout, ...]]:
        """Path of an equation, as in Program -> the layouts of what it makes."""
        return self.find_inner()


class LoweredFunction:
    """A function that Shardy is asked about, lowered once for any layouts of its flat arguments."""

    def __init__(self, fn: Callable, args: Sequence, mesh_shape: MeshShape):
        self.mesh_shape = mesh_shape
        self.closed = _without_dead(_with_paths(jax.jit(fn).trace(*args).jaxpr, ()))
        whole = NamedSharding(mesh_of(mesh_shape), PartitionSpec())
        leaves = jax.tree.leaves(args)
        jitted = jax.jit(core.jaxpr_as_fun(self.closed), in_shardings=[whole] * len(leaves), keep_unused=True)
        self.module = _lowered(jitted, leaves)

    def propagated(self, specs: Sequence[PartitionSpec | None]) -> Propagated:
        """The layouts of arguments, results and inner values; an argument with spec None is free.

        What no result needs is left out before, as XLA does. An equation whose operation Shardy copies for each of its
        readers, as it does with constants, has no layout of its own and is not among the inner ones, nor is one whose
        operation is gone or has other shapes.
        """
        module = self._after(PROPAGATE, specs)  # which owns what is in it
        main = _main(module)
        arguments, results = (
            [
                _layout(str(attributes), len(aval.shape), self.mesh_shape)
                for attributes, aval in zip(attrs, avals, strict=True)
            ]
            for attrs, avals in (
                (main.attributes["arg_attrs"], self.closed.in_avals),
                (main.attributes["res_attrs"], self.closed.out_avals),
            )
        )
        for layout, spec in zip(arguments, specs, strict=True):
            assert spec is None or layout == layout_of(spec, len(layout)), "Shardy moved a fixed argument"
        find_inner = functools.partial(self._after, ONLY_PROPAGATE, specs)
        return Propagated(arguments, results, lambda: _inner_layouts(find_inner(), self.mesh_shape))

    def _after(self, pipeline: str, specs: Sequence[PartitionSpec | None]) -> Any:
        with self.module.context:
            operation = self.module.operation.clone().operation
            main = _main(operation)
            if specs:
                types = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value).inputs
                attributes = zip(main.attributes["arg_attrs"], types, specs, strict=True)
                main.attributes["arg_attrs"] = ir.ArrayAttr.get([_fixed(*one) for one in attributes])
            passmanager.PassManager.parse(pipeline).run(operation)
        return operation


def propagated(
    fn: Callable, args: Sequence, specs: Sequence[PartitionSpec | None], mesh_shape: MeshShape
) -> Propagated:
    """What Shardy makes of `fn` for one spec per flat argument."""
    return LoweredFunction(fn, args, mesh_shape).propagated(specs)


def _main(module: Any) -> Any:
    return next(op for op in module.regions[0].blocks[0] if op.attributes["sym_name"].value == "main")


def _fixed(attributes: Any, kind: Any, spec: PartitionSpec | None) -> Any:
    """The attributes of an argument with the sharding of a spec, or with none. The words of keys are dims behind."""
    others = {name: attributes[name] for name in (one.name for one in attributes) if name != "sdy.sharding"}
    if spec is not None:
        rank = ir.RankedTensorType(kind).rank
        dims = [(entry,) if isinstance(entry, str) else entry or () for entry in (*spec, *[None] * rank)[:rank]]
        written = ", ".join("{" + ", ".join(f'"{axis}"' for axis in axes) + "}" for axes in dims)
        others["sdy.sharding"] = ir.Attribute.parse(f"#sdy.sharding<@mesh, [{written}]>")
    return ir.DictAttr.get(others)


def fixed_layouts(program: Program, specs: Sequence[PartitionSpec | None]) -> dict[int, Layout]:
    """The same start for our own propagation: value id -> layout, of the arguments that have a spec."""
    pairs = zip(program.arguments, specs, strict=True)
    return {value.id: layout_of(spec, len(value.shape)) for value, spec in pairs if spec is not None}


def _with_paths(closed: core.ClosedJaxpr, path: tuple) -> core.ClosedJaxpr:
    """The same jaxpr, in which the name of each equation, which ends up in the module, is its path in a Program."""
    below = {"while": {"cond_jaxpr": "test", "body_jaxpr": "body"}}
    equations = []
    for i, eqn in enumerate(closed.jaxpr.eqns):
        here, eqn = (*path, i), _as_hlo(eqn)
        params = dict(eqn.params)
        for name, value in params.items():
            inside = (*here, *filter(None, [below.get(eqn.primitive.name, {}).get(name)]))
            if isinstance(value, core.ClosedJaxpr):
                params[name] = _with_paths(value, inside)
            elif isinstance(value, core.Jaxpr):
                params[name] = _with_paths(core.ClosedJaxpr(value, ()), inside).jaxpr
            elif name == "branches":
                params[name] = tuple(_with_paths(branch, (*here, b)) for b, branch in enumerate(value))
        stack = type(eqn.source_info.name_stack)().extend(f"at_{'_'.join(map(str, here))}_")
        equations.append(eqn.replace(params=params, source_info=eqn.source_info.replace(name_stack=stack)))
    return core.ClosedJaxpr(closed.jaxpr.replace(eqns=equations), closed.consts)


def _as_hlo(eqn: core.JaxprEqn) -> core.JaxprEqn:
    """A broadcast that adds nothing but dims of size 1, as the reshape that it is by the time XLA runs Shardy."""
    if eqn.primitive.name != "broadcast_in_dim" or eqn.invars[0].aval.size != eqn.outvars[0].aval.size:
        return eqn
    params = {"new_sizes": eqn.outvars[0].aval.shape, "dimensions": None, "sharding": None}
    return eqn.replace(primitive=jax.lax.reshape_p, params=params)


def _without_dead(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts)


def _inner_layouts(module: Any, mesh: MeshShape) -> dict[tuple, tuple[Layout, ...]]:
    found: dict[tuple, tuple[Layout, ...]] = {}
    by_kind: dict[tuple, tuple[Layout, ...]] = {}
    copied = set()

    def visit(operation: Any) -> None:
        for region in operation.regions:
            for block in region:
                for inner in block:
                    visit(inner.operation)
        paths = re.findall(r"at_(\w+?)_(?=[/\"])", str(operation.location))
        if not paths or not operation.results:
            return
        path = tuple(int(step) if step.isdigit() else step for step in paths[-1].split("_"))
        ranks = [ir.RankedTensorType(result.type).rank for result in operation.results]
        attributes = operation.attributes
        # What a call returns lies as the edge behind the call says.
        key = next((key for key in ("sdy.sharding", "sharding", "out_shardings") if key in attributes), None)
        text = str(attributes[key]) if key else ""
        shardings = re.findall(r"<@\w+, \[[^\]]*\][^>]*>", text) or [""] * len(ranks)
        layouts = tuple(_layout(s, rank, mesh) for s, rank in zip(shardings, ranks, strict=True))
        if by_kind.setdefault((path, operation.name, *ranks), layouts) != layouts:
            copied.add(path)
        found[path] = layouts  # the last operation of an equation makes its result

    visit(module)
    return {path: layouts for path, layouts in found.items() if path not in copied}


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


def _ran(jitted: Callable, args: Sequence, pipeline: str) -> Any:
    """The module operation that `jitted` lowers to, after some passes; JAX remembers modules, so it is a copy."""
    module = _lowered(jitted, args)
    with module.context:
        operation = module.operation.clone()
        passmanager.PassManager.parse(pipeline).run(operation.operation)
    return operation.operation


def _lowered(jitted: Callable, args: Sequence) -> Any:
    with config.traceback_in_locations_limit(0):  # a location is then a name stack, which is quick to print
        return jitted.trace(*args).lower(lowering_platforms=("tpu",)).compiler_ir("stablehlo")


def _layout(attributes: str, rank: int, mesh: MeshShape) -> Layout:
    """`<@mesh, [{"x", "y"}, {}]>` as a layout; nothing said means replicated.

    A dim ends before an axis of which it has but a part, since no PartitionSpec says that.
    """
    match = re.search(r"<@\w+, \[([^\]]*)\]", attributes)
    if match is None:
        return replicated(rank)
    dims = [re.findall(r'"(\w+)"(:?)', dim) for dim in re.findall(r"\{([^}]*)\}", match[1])]
    assert not any(dims[rank:]), "PRNG keys have hidden dims, but nothing splits them"
    return tuple(tuple(axis for axis, _ in itertools.takewhile(lambda part: not part[1], dim)) for dim in dims[:rank])
