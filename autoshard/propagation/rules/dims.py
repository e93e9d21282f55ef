"""Operations that move, add, merge or cut dims and compute nothing."""

from __future__ import annotations

import math
from functools import lru_cache

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import KEPT_RULES, Rule, RuleBuilder, Shape, dimwise
from autoshard.propagation.rules.elementwise import shapes_of


@rule("broadcast_in_dim")
def broadcast_in_dim(equation: Equation) -> Rule:
    """`i -> j i`: each device makes the copies that its shard of a new dim asks for."""
    operands, (result,) = shapes_of(equation)
    return _broadcast_in_dim(operands, result, tuple(equation.params["broadcast_dimensions"]))


@lru_cache(maxsize=KEPT_RULES)
def _broadcast_in_dim(operands: tuple[Shape, ...], result: Shape, target: tuple[int, ...]) -> Rule:
    builder = RuleBuilder(operands, [result])
    source = {to: dim for dim, to in enumerate(target) if operands[0][dim] == result[to]}
    for dim, size in enumerate(result):
        builder.factor(size, [(0, source[dim])] if dim in source else [], [(0, dim)])
    return builder.build()


@rule("broadcast_to")
def broadcast_to(equation: Equation) -> Rule:
    """`i -> j i`: as `broadcast_in_dim`, with the operand's dims last."""
    operands, (result,) = shapes_of(equation)
    return _broadcast_in_dim(operands, result, tuple(range(len(result) - len(operands[0]), len(result))))


@rule("concatenate")
def concatenate(equation: Equation) -> Rule:
    """`i j, i j -> i j`: along the joined dim, pieces of the operands would have to move to other devices."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results, {equation.params["dimension"]: "permutation"})


@rule("empty", "empty2", "iota", "rng_uniform", "thunky.inline_constant")
def created(equation: Equation) -> Rule:
    """`-> i j`: each device makes its own shard."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    for dim, size in enumerate(results[0]):
        builder.factor(size, [], [(0, dim)])
    return builder.build()


@rule("pad")
def pad(equation: Equation) -> Rule:
    """`i j,  -> i j`: a padded dim shifts against its shards."""
    operands, results = shapes_of(equation)
    padded = {
        dim: "permutation" for dim, config in enumerate(equation.params["padding_config"]) if tuple(config) != (0, 0, 0)
    }
    return dimwise(operands, results, padded, sizes=operands[0])


@rule("reshape")
def reshape(equation: Equation) -> Rule:
    """`(i j) k -> i (j k)`: merged and split dims are compound, made of the common factors of both shapes.

    With `dimensions`, the operand is transposed before.
    """
    (operand,), (result,) = shapes_of(equation)
    order = equation.params.get("dimensions") or range(len(operand))
    return _reshape(operand, result, tuple(order))


@lru_cache(maxsize=KEPT_RULES)
def _reshape(operand: Shape, result: Shape, order: tuple[int, ...]) -> Rule:
    """Walks both shapes from the major end, one common factor at a time.

    Where the dims do not share a factor (``6 -> 4``, say), both sides get factors of their own until the products of
    the sizes meet again. No split can survive such factors.
    """
    builder = RuleBuilder([operand], [result])
    if 0 in operand:  # no elements: nothing to split, and no products to compare
        for side, shape in enumerate((operand, result)):
            for dim, size in enumerate(shape):
                here, there = ([(0, dim)], []) if side == 0 else ([], [(0, dim)])
                builder.factor(size, here, there, "need_replication")
        return builder.build()
    sources = [(dim, operand[dim]) for dim in order if operand[dim] > 1]
    targets = [(dim, size) for dim, size in enumerate(result) if size > 1]
    behind = ahead = 1  # products of the factors given so far: of the operand, of the result
    room_in = room_out = 1  # what the current dims still need
    dim_in = dim_out = 0
    while sources or targets or room_in > 1 or room_out > 1:
        if room_in == 1 and sources:
            dim_in, room_in = sources.pop(0)
        if room_out == 1 and targets:
            dim_out, room_out = targets.pop(0)
        shared = math.gcd(room_in, room_out)
        if behind == ahead:
            if shared > 1:
                builder.factor(shared, [(0, dim_in)], [(0, dim_out)])
                behind, room_in = behind * shared, room_in // shared
                ahead, room_out = ahead * shared, room_out // shared
            else:
                builder.factor(room_in, [(0, dim_in)], [], "need_replication")
                builder.factor(room_out, [], [(0, dim_out)], "need_replication")
                behind, room_in = behind * room_in, 1
                ahead, room_out = ahead * room_out, 1
        elif behind < ahead:
            size = _next_factor(room_in, shared, behind, ahead)
            builder.factor(size, [(0, dim_in)], [], "need_replication")
            behind, room_in = behind * size, room_in // size
        else:
            size = _next_factor(room_out, shared, ahead, behind)
            builder.factor(size, [], [(0, dim_out)], "need_replication")
            ahead, room_out = ahead * size, room_out // size
    return builder.build()


def _next_factor(room: int, shared: int, product: int, other: int) -> int:
    """The next factor of the side with the smaller product: what makes them meet, else what keeps `shared`."""
    if other % product == 0 and room % (other // product) == 0:
        return other // product
    return room // shared if room > shared else room


@rule("rev")
def rev(equation: Equation) -> Rule:
    """`i j -> i j`: along a reversed dim the shards trade places."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results, dict.fromkeys(equation.params["dimensions"], "permutation"))


@rule("roll")
def roll(equation: Equation) -> Rule:
    """`i j,  -> i j`: along the rolled dim the shards shift."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results, {equation.params["axis"]: "permutation"})


@rule("slice")
def slice_(equation: Equation) -> Rule:
    """`i j -> i j`: a dim that is cut shifts against its shards."""
    operands, results = shapes_of(equation)
    cut = {dim: "permutation" for dim, size in enumerate(operands[0]) if size != results[0][dim]}
    return dimwise(operands, results, cut, sizes=operands[0])


@rule("split")
def split(equation: Equation) -> Rule:
    """`i j -> i j, i j`: as several slices."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results, {equation.params["axis"]: "permutation"}, sizes=operands[0])


@rule("squeeze")
def squeeze(equation: Equation) -> Rule:
    """`i 1 j -> i j`."""
    operands, results = shapes_of(equation)
    gone = {dim % len(operands[0]) for dim in equation.params["dimensions"]}
    builder = RuleBuilder(operands, results)
    kept = (dim for dim in range(len(operands[0])) if dim not in gone)
    for to, dim in enumerate(kept):
        builder.factor(operands[0][dim], [(0, dim)], [(0, to)])
    return builder.build()


@rule("tile")
def tile(equation: Equation) -> Rule:
    """`j -> (i j)`: every device may make its own copies, but a shard of the tiled dim cannot be cut out of them."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    for dim, size in enumerate(operands[0]):
        repeats = results[0][dim] // max(size, 1)
        if repeats > 1:
            builder.factor(repeats, [], [(0, dim)])
        builder.factor(size, [(0, dim)], [(0, dim)])
    return builder.build()


@rule("stack")
def stack(equation: Equation) -> Rule:
    """`i, i -> j i`, j whole: one operand each."""
    operands, results = shapes_of(equation)
    return _stacked(operands, results[0], equation.params["axis"], stacking=True)


@rule("unstack")
def unstack(equation: Equation) -> Rule:
    """`j i -> i, i`, j whole: one result each."""
    operands, results = shapes_of(equation)
    return _stacked(results, operands[0], equation.params["axis"], stacking=False)


@lru_cache(maxsize=KEPT_RULES)
def _stacked(pieces: tuple[Shape, ...], stacked: Shape, axis: int, stacking: bool) -> Rule:
    axis %= len(stacked)
    sides = (pieces, [stacked]) if stacking else ([stacked], pieces)
    builder = RuleBuilder(*sides)
    for dim, size in enumerate(stacked):
        everywhere = [(tensor, dim - (dim > axis)) for tensor in range(len(pieces))] if dim != axis else []
        kind = "need_replication" if dim == axis else ""
        builder.factor(size, *((everywhere, [(0, dim)]) if stacking else ([(0, dim)], everywhere)), kind)
    return builder.build()


@rule("transpose")
def transpose(equation: Equation) -> Rule:
    """`i j -> j i`."""
    operands, (result,) = shapes_of(equation)
    return _transpose(operands[0], result, tuple(equation.params["permutation"]))


@lru_cache(maxsize=KEPT_RULES)
def _transpose(operand: Shape, result: Shape, permutation: tuple[int, ...]) -> Rule:
    builder = RuleBuilder([operand], [result])
    target = {dim: to for to, dim in enumerate(permutation)}
    for dim, size in enumerate(operand):
        builder.factor(size, [(0, dim)], [(0, target[dim])])
    return builder.build()
