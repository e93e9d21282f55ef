"""A row function as an operation whose calls a plan may split by tokens, and by groups with an exchange of rows."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from autoshard.jaxprs import aval_of
from autoshard.operations.operation import Operation
from autoshard.operations.split import CallSplit
from autoshard.ops.dispatching.exchange import DATA, EXPERTS, exchanged, on_own_rows, scattered_dim, summed
from autoshard.ops.dispatching.row_function import RowFunction, RowRole
from autoshard.propagation.rule import Rule, RuleBuilder, Shape

# digest -> the operation, while some step has it: equal layers are priced once
_KNOWN: weakref.WeakValueDictionary[str, Operation] = weakref.WeakValueDictionary()


def routed_operation(function: RowFunction) -> Operation:
    """The operation from ``groups[T, K]``, the group of each slot, and the function's inputs to its outputs.

    A TOKEN input or output is ``[T, ...]`` and a SLOT one ``[T, K, ...]``; the dim of rows is first. A token's output
    is the sum over its slots. Sums of groups are over all rows.
    """
    found = _KNOWN.get(function.digest)
    if found is None:
        _KNOWN[function.digest] = found = _operation(function)
    return found


def _operation(function: RowFunction) -> Operation:
    def plain(groups: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        return tuple(on_own_rows(function, groups, arrays))

    made = Operation(
        "experts",
        plain,
        functools.partial(_rule, function),
        sums_shared=True,
        identity=function.digest,
    )

    @made.implementation(splits={EXPERTS: "t g", DATA: "t"}, name="exchange", where=_has(EXPERTS), turns=1)
    def exchange(split: CallSplit, groups: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        return tuple(exchanged(function, split, groups, arrays, scatters=False))

    parts = " ".join(_part(i) for i in _scattered(function))
    if not parts:
        return made

    @made.implementation(
        splits={EXPERTS: "t g", DATA: f"t {parts}"}, name="exchange_scattered", where=_has(EXPERTS, DATA), turns=1
    )
    def exchange_scattered(split: CallSplit, groups: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        return tuple(exchanged(function, split, groups, arrays, scatters=True))

    @made.implementation(splits={DATA: f"t {parts}"}, name="scattered", where=_has(DATA))
    def scattered(split: CallSplit, groups: Any, *arrays: Any) -> tuple[jax.Array, ...]:
        found = on_own_rows(function, groups, arrays)
        return tuple(
            summed(x, split, scatters=True) if kind is RowRole.GROUP else x
            for x, (_, kind) in zip(found, function.outputs, strict=True)
        )

    return made


def _has(*roles: str) -> Callable[[CallSplit], bool]:
    return lambda split: all(split.count(role) > 1 for role in roles)


def _scattered(function: RowFunction) -> list[int]:
    """The results that are sums per group, of which devices may get parts."""
    shapes = [aval_of(var).shape if kind is RowRole.GROUP else () for var, kind in function.outputs]
    return [i for i, shape in enumerate(shapes) if scattered_dim(shape) is not None]


def _part(i: int) -> str:
    """The factor of the i-th result that is split where its sum is scattered."""
    return f"part{i}"


def _rule(function: RowFunction, operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """Tokens may be split, groups by an exchange; all else is whole."""
    builder = RuleBuilder(operands, results)
    kinds = [RowRole.SLOT, *(kind for _, kind in function.inputs)]
    ends = [kind for _, kind in function.outputs]

    def joined(wanted: set[RowRole], dim: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        first = [(i, dim) for i, kind in enumerate(kinds) if kind in wanted]
        return first, [(i, dim) for i, kind in enumerate(ends) if kind in wanted]

    rows, tokens = {RowRole.TOKEN, RowRole.SLOT}, operands[0][0]
    builder.factor(tokens, *joined(rows, 0), kind="")
    builder.factor(operands[0][1], *joined({RowRole.SLOT}, 1), kind="need_replication")
    builder.factor(function.groups, *joined({RowRole.GROUP}, 0), kind="need_replication")
    parts: dict[str, str] = {}
    done = {RowRole.TOKEN: 1, RowRole.SLOT: 2, RowRole.GROUP: 1, RowRole.SHARED: 0}
    for tensors, of, is_result in ((operands, kinds, False), (results, ends, True)):
        for i, (shape, kind) in enumerate(zip(tensors, of, strict=True)):
            for dim in range(done[kind], len(shape)):
                place = [(i, dim)]
                name = builder.factor(
                    shape[dim], [] if is_result else place, place if is_result else [], "need_replication"
                )
                if is_result and kind is RowRole.GROUP and dim == scattered_dim(shape):
                    parts[name] = _part(i)
    return _named(builder.build(), parts)


def _named(rule: Rule, parts: Mapping[str, str]) -> Rule:
    """The factors that implementations split, by their names there."""
    names = {**dict(zip(rule.sizes, ("t", "r", "g"), strict=False)), **parts}
    others = [name for name in rule.sizes if name not in names]
    names |= {name: f"d{i}" for i, name in enumerate(others)}

    def dims(tensors: Any) -> Any:
        return tuple(tuple(tuple(names[f] for f in factors) for factors in tensor) for tensor in tensors)

    return Rule(
        dims(rule.operands),
        dims(rule.results),
        {names[f]: size for f, size in rule.sizes.items()},
        reduction=frozenset(names[f] for f in rule.reduction),
        need_replication=frozenset(names[f] for f in rule.need_replication),
        permutation=frozenset(),
    )
