"""Random numbers: keys stay as they are, and each device draws the numbers of its own shard."""

from __future__ import annotations

from autoshard.program import Equation, dtype_name
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, dimwise, whole
from autoshard.propagation.rules.elementwise import shapes_of

# Types of keys of a batch of which JAX draws with the first key alone: every device needs that one.
_DRAW_ONCE = {"random_bits": ("key<rbg>", "key<urbg>"), "random_split": ("key<urbg>",)}


@rule("iota_2x32_shape")
def counters(equation: Equation) -> Rule:
    """`-> i j, i j`: the high and the low half of each element's counter."""
    operands, results = shapes_of(equation)
    return dimwise(operands, results)


@rule("philox2x32", "philox4x32", "threefry2x32", "threefry4x32")
def cipher(equation: Equation) -> Rule:
    """`, , i, i -> i, i`: each counter is encrypted on its own."""
    return dimwise(*shapes_of(equation), broadcasts=True)


@rule("random_bits", "random_split")
def draws(equation: Equation) -> Rule:
    """`k -> k i j`: the dims of the keys, then those of what is drawn from each.

    If one key draws for all, keys are whole.
    """
    (keys,), (result,) = shapes_of(equation)
    builder = RuleBuilder([keys], [result])
    draws_once = dtype_name(equation.inputs[0].dtype) in _DRAW_ONCE[equation.primitive]
    for dim, size in enumerate(result):
        builder.factor(size, [(0, dim)] if dim < len(keys) and not draws_once else [], [(0, dim)])
    if draws_once:
        for dim, size in enumerate(keys):
            builder.factor(size, [(0, dim)], [], "need_replication")
    return builder.build()


@rule("random_clone", "random_fold_in", "random_gamma", "random_seed")
def keywise(equation: Equation) -> Rule:
    """`k, k -> k`."""
    return dimwise(*shapes_of(equation))


@rule("random_unwrap", "random_wrap")
def key_data(equation: Equation) -> Rule:
    """`k -> k d` or back: the words of one key stay together."""
    (operand,), (result,) = shapes_of(equation)
    builder = RuleBuilder([operand], [result])
    keys = min(len(operand), len(result))
    for dim in range(keys):
        builder.factor(result[dim], [(0, dim)], [(0, dim)])
    for dim in range(keys, len(operand)):
        builder.factor(operand[dim], [(0, dim)], [], "need_replication")
    for dim in range(keys, len(result)):
        builder.factor(result[dim], [], [(0, dim)], "need_replication")
    return builder.build()


@rule("rng_bit_generator")
def rng_bit_generator(equation: Equation) -> Rule:
    """`k -> l, i`, all whole: one generator makes the numbers one after the other."""
    return whole(*shapes_of(equation))
