"""Terms of memory of what operations work on beside their operands and results.

They are terms as those of `memory_terms.py` are. XLA makes some of it ahead of them, as it runs first what is ready
first. `tests/model/test_breadth_first.py` compiles some.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from autoshard.layout import shards
from autoshard.model.groups import FactorDims
from autoshard.model.memory_terms import HeldBytes, HeldOutput, output_term
from autoshard.model.strategies import Strategy
from autoshard.model.workspaces import PREPARED, ShardBytes, has_workspace, is_outside_chip, workspace_bytes
from autoshard.program import Equation, Value


@output_term
def scratch(output: HeldOutput) -> Iterator[HeldBytes]:
    """What an operation takes beside its operands and results, while it runs."""
    group, span = output.group, (output.group.ready_at, output.group.ready_at + 1)
    if output.is_first:
        name = output.prices.backend.name
        needy = [one for one in group.equations if has_workspace(name, one.primitive)]
        for equation in needy:
            sizes = [shard_bytes(equation, output, strategy) for strategy in output.strategies]
            usage = np.array([workspace_bytes(name, one) for one in sizes])
            on_chip = output.may_be_on_chip and not is_outside_chip(name, sizes[0])
            yield HeldBytes(output.node, span, usage, may_be_on_chip=on_chip, is_one_buffer=False)
        if numbers := output.numbers_beside if output.prices.backend.number_bytes else 0:
            usage = np.full(len(output.strategies), numbers * output.prices.backend.number_bytes)
            yield HeldBytes(output.node, span, usage, may_be_on_chip=False, is_one_buffer=False)


def shard_bytes(equation: Equation, output: HeldOutput, strategy: Strategy) -> ShardBytes:
    """What the operands and results of one equation of a group take on one device."""
    group = output.group

    def pieces(dims: FactorDims) -> list[int]:
        return [math.prod(shards(strategy.axes.get(f, ()), output.prices.mesh) for f in dim) for dim in dims]

    def local(value: Value | np.ndarray, dims: FactorDims) -> float:
        if isinstance(value, Value) and not output.reads.get(value.id):
            return 0.0
        return (value.bytes if isinstance(value, Value) else value.nbytes) / math.prod(pieces(dims))

    def local_shape(value: Value | np.ndarray, dims: FactorDims) -> tuple[int, ...]:
        return tuple(math.ceil(size / count) for size, count in zip(value.shape, pieces(dims), strict=True))

    operand_dims, result_dims = group.operands[equation.index], group.results[equation.index]
    return ShardBytes(
        equation,
        tuple(map(local, equation.inputs, operand_dims)),
        tuple(map(local, equation.outputs, result_dims)),
        tuple(map(local_shape, equation.inputs, operand_dims)),
        tuple(map(local_shape, equation.outputs, result_dims)),
        tuple(isinstance(x, Value) and (x.from_outside or output.reads[x.id] > 1) for x in equation.inputs),
        is_result=bool(output.returns),
    )


@output_term
def prepared(output: HeldOutput) -> Iterator[HeldBytes]:
    """Words of random bits, and positions that poolings look up, from when they are ready until their group runs."""
    group = output.group
    for equation in group.equations if output.is_first else ():
        start = group.prepared.get(equation.index, group.ready_at)
        if start < group.ready_at:
            sizes = [shard_bytes(equation, output, strategy) for strategy in output.strategies]
            usage = np.array([PREPARED[equation.primitive](one) for one in sizes])
            yield HeldBytes(output.node, (start, group.ready_at), usage, is_one_buffer=False)
