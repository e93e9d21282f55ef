"""A traced step in, out the same with its large attentions as operations; None where there are none.

An attention is worth it if its logits, shared out over all devices, are an eighth of a device's memory. The forward and
the backward pass hold about four arrays of their size, so they would need half of it. What else reads weights or logits
would compute these anyway, so such an attention stays as it is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from autoshard.batching.boundary import result_or_none
from autoshard.jaxprs import ClosedJaxpr, Jaxpr, Var, aval_of, inner_jaxprs
from autoshard.operations import Operation
from autoshard.ops.attending.attention import attention_operation
from autoshard.ops.attending.operands import AttentionVariant
from autoshard.program import Program
from autoshard.program.tracing import TracedStep
from autoshard.recognition.attention_weights import Weights, all_weights
from autoshard.recognition.bodies import BodyTree, NestedBody, values_needed
from autoshard.recognition.dim_order import Groups, arranged, combined, put_back
from autoshard.recognition.editing import Editor
from autoshard.recognition.equations import UnavailableValue
from autoshard.recognition.experts import with_experts
from autoshard.recognition.products import VALUE, Backward, Output, backwards, outputs
from autoshard.recognition.small_arrays import UnknownEquation
from autoshard.recognition.structural_equality import type_of

MEMORY_SHARE = 1 / 8  # of all devices' memory that the logits of one attention take, in float32
_DEPARTURE = "attention or experts in the step were recognised, and are operations of autoshard"


def with_operations(traced: TracedStep, devices: int, memory: float) -> TracedStep:
    """A traced step with its dropless experts as operations, and with its attentions, where a large one is among them.

    No plan needs this. So a fault on the way is logged, and the step stays as it was (`batching/boundary.py`).

    Args:
        memory: bytes of one device.
    """
    found = _with_both(traced.closed, devices, devices * memory * MEMORY_SHARE / 4)
    if found is traced.closed:
        return traced

    def read(closed: ClosedJaxpr) -> Program:
        return replace(traced.read(closed), departure=_DEPARTURE)

    return replace(traced, closed=found, again=lambda structs: _with_both(traced.again(structs), devices, 1), read=read)


def _with_both(closed: ClosedJaxpr, devices: int, least: float) -> ClosedJaxpr:
    """The jaxpr itself if there is nothing in it."""
    closed = result_or_none("recognition of attention", lambda: recognized(closed, least)) or closed
    return result_or_none("recognition of experts", lambda: with_experts(closed, devices)) or closed


def recognized(closed: ClosedJaxpr, least: float) -> ClosedJaxpr | None:
    """A jaxpr, from the same arguments to the same results, with attentions as calls of `autoshard.ops.attention`.

    Args:
        least: so many logits of one attention make it worth it to look for any.
    """
    if not _has_large_product(closed.jaxpr, least):
        return None
    left = set[int]()
    while True:
        tree = BodyTree.of(closed)
        found = list(all_weights(tree))
        chosen = [(i, one) for i, one in enumerate(found) if i not in left]
        if max((math.prod(one.true[role] for role in one.order) for _, one in chosen), default=0) < least:
            return None
        editor, failed = Editor(tree), set[int]()
        for i, weights in chosen:
            try:
                _rewrite(editor, weights)
            except (UnavailableValue, UnknownEquation):
                failed.add(i)
        needed = values_needed(tree)
        failed |= {i for i, weights in chosen if weights.scores.outvars[0] in needed}
        if not failed:
            return editor.jaxpr()
        left |= failed


def _has_large_product(jaxpr: Jaxpr, least: float) -> bool:
    return any(
        (eqn.primitive.name == "dot_general" and math.prod(aval_of(eqn.outvars[0]).shape) >= least)
        or any(_has_large_product(inner.jaxpr, least) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


@dataclass(frozen=True, eq=False)
class _AttentionCall:
    """One attention in the words of `attention_operation`."""

    weights: Weights

    @property
    def true(self) -> dict[str, int]:
        return dict(self.weights.true)

    def sizes(self, value: int) -> dict[str, int]:
        return self.true | {VALUE: value}

    @property
    def queries(self) -> Groups:
        w = self.weights
        return w.batch[:-1], (w.rows,), (*w.batch[-1:], *w.each), self.deep

    @property
    def keys(self) -> Groups:
        w = self.weights
        return w.batch[:-1], (w.keys,), w.batch[-1:], self.deep

    @property
    def deep(self) -> tuple[str, ...]:
        return tuple(role for role in self.true if role[0] == "d")

    @property
    def values(self) -> Groups:
        return (*self.keys[:-1], (VALUE,))

    @property
    def output(self) -> Groups:
        return (*self.queries[:-1], (VALUE,))

    @property
    def logits(self) -> Groups:
        w = self.weights
        return w.batch[:-1], (*w.batch[-1:], *w.each), (w.rows,), (w.keys,)

    @property
    def lengths(self) -> tuple[int, int]:
        return self.true[self.weights.rows], self.true[self.weights.keys]

    @property
    def others(self) -> list[Var]:
        """The arrays of biases and masks."""
        return [var for var, *_ in (*self.weights.biases, *self.weights.visible.rest)]

    def operation(self) -> Operation:
        seen, (rows, keys) = self.weights.visible, self.lengths
        is_causal = seen.ahead == 0
        window = None
        if seen.back is not None or (seen.ahead is not None and not is_causal):
            ahead = keys if seen.ahead is None else seen.ahead
            window = (rows if seen.back is None else seen.back, ahead)
        biases = [roles for _, roles, _ in self.weights.biases]
        masks = [roles for _, roles, _ in seen.rest]
        variant = AttentionVariant(
            bias=self.wide(biases), mask=self.wide(masks), is_causal=is_causal, window=window, scale=self.weights.scale
        )
        return attention_operation(variant, self.lengths)

    def wide(self, several: list[Any]) -> tuple[bool, ...]:
        there = {role for roles in several for dim in roles for role in dim}
        return tuple(bool(set(group) & there) for group in self.logits) if several else ()

    def operands(self, query: Any, key: Any, value: Any, others: Any, of_value: Any, dtype: Any, sizes: Any) -> list:
        """Arrays of the program as the operation takes them.

        Args:
            dtype: of the program's output. The operation's is that of the queries, so these get one as wide.
        """
        w, true = self.weights, sizes
        query = arranged(query, w.query_roles, self.queries, true)
        if jnp.promote_types(query.dtype, dtype) != query.dtype:
            query = query.astype(jnp.promote_types(query.dtype, dtype))
        key, value = arranged(key, w.key_roles, self.keys, true), arranged(value, of_value, self.values, true)
        biases = [
            arranged(x, roles, self.logits, true) * jnp.asarray(factor, x.dtype)
            for x, (_, roles, factor) in zip(others, w.biases, strict=False)
        ]
        masks = [
            arranged(x if flag else ~x, roles, self.logits, true)
            for x, (_, roles, flag) in zip(others[len(w.biases) :], w.visible.rest, strict=True)
        ]
        together = [combined(biases, jnp.add), combined(masks, jnp.logical_and)]
        places = [jnp.arange(size, dtype=jnp.int32) for size in self.lengths]
        return [query, key, value, *(x for x in together if x is not None), *places]


_Made = dict[
    tuple[NestedBody, Var], tuple[Var, Var]
]  # where a forward pass runs, of which values -> output and statistics


def _rewrite(editor: Editor, weights: Weights) -> None:
    call = _AttentionCall(weights)
    made: _Made = {}
    for one in list(outputs(weights)):
        made[one.body, one.value] = _forward(editor, call, one)
    for back in list(backwards(weights)):
        _backward(editor, call, back, made)


def _size(var: Var, roles: Any) -> int:
    """How many elements a value has."""
    return next((size for size, dim in zip(aval_of(var).shape, roles, strict=True) if dim == (VALUE,)), 1)


def _forward(editor: Editor, call: _AttentionCall, out: Output) -> tuple[Var, Var]:
    """The forward pass in the place of its last product; its output and statistics."""
    w, body = call.weights, out.body
    operands = [editor.here(var, body) for var in (w.query, w.key, out.value, *call.others)]
    result: Any = out.product.outvars[0]
    sizes = call.sizes(_size(operands[2], out.value_roles))

    def forward(query: Any, key: Any, value: Any, *others: Any) -> Any:
        dtype = aval_of(result).dtype
        inputs = call.operands(query, key, value, others, out.value_roles, dtype, sizes)
        output, statistics = call.operation()(*inputs)
        return put_back(output, call.output, out.roles, aval_of(result), sizes), output, statistics

    kind = "forward", w.kind, out.value_roles, out.roles, type_of(result)
    found = editor.replace(body, [out.product], forward, operands, [result, None, None], kind)
    return found[1], found[2]


def _backward(editor: Editor, call: _AttentionCall, back: Backward, made: _Made) -> None:
    w, body = call.weights, back.body
    dtype = aval_of(back.cotangent).dtype
    sizes = call.sizes(_size(back.cotangent, back.cotangent_roles))
    wanted = sorted(back.gradients)
    gone = [back.gradients[i].product for i in wanted]
    operands = [editor.here(var, body) for var in (w.query, w.key, back.value, *call.others)]
    saved = None
    homes = [one for one in made if one[1] == back.value]
    for home in sorted(homes, key=lambda one: one[0] is not body):
        try:
            saved = [editor.here(var, body) for var in made[home]]
            break
        except UnavailableValue:
            continue
    count = len(operands)

    def backward(*arrays: Any) -> list[Any]:
        query, key, value, *others = arrays[:count]
        cotangent = arranged(arrays[-1], back.cotangent_roles, call.output, sizes)
        inputs = call.operands(query, key, value, others, back.value_roles, dtype, sizes)
        output, statistics = call.operation()(*inputs) if saved is None else arrays[count:-1]
        of_results = cotangent.astype(output.dtype), jnp.zeros_like(statistics)
        operation = call.operation().backward_of(tuple(wanted), (True, True))
        gradients = operation(*inputs, output, statistics, *of_results)
        groups = {0: call.queries, 1: call.keys, 2: call.values}
        found = []
        for i, gradient in zip(wanted, gradients, strict=True):
            one = back.gradients[i]
            like = aval_of(one.product.outvars[0])
            whole = gradient if one.factor == 1 else gradient * jnp.asarray(one.factor, gradient.dtype)
            found.append(put_back(whole, groups[i], one.roles, like, sizes))
        return found

    results: list[Any] = [one.outvars[0] for one in gone]
    made_as = tuple(
        (i, back.gradients[i].factor, back.gradients[i].roles, type_of(one))
        for i, one in zip(wanted, results, strict=True)
    )
    kind = "backward", w.kind, back.value_roles, back.cotangent_roles, saved is None, made_as
    editor.replace(body, gone, backward, [*operands, *(saved or ()), back.cotangent], results, kind)
