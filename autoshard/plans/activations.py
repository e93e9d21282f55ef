"""A program and its annotations in, how the largest values inside the step lie out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.layout import Layout, MeshShape, local_shape
from autoshard.model.equations import contracts
from autoshard.plans.annotations import Annotations
from autoshard.program import Program

_MOST_ROWS = 8  # that are listed: the activations that hold the most bytes


@dataclass(frozen=True)
class Activation:
    """What a product or convolution of the user's makes, wherever it lies alike."""

    line: str  # the user's line and function
    primitive: str
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    local_bytes: int  # of one, per device
    count: int = 1  # of such values


def activations_of(program: Program, annotations: Annotations, mesh: MeshShape) -> tuple[Activation, ...]:
    """How what products and convolutions make lies, in the order of the program; without gradients of the state."""
    state = {tuple(sorted(program.arguments[i].shape)) for i in program.state}
    found: Counter[Activation] = Counter()
    for equation in program.equations:
        if not contracts(equation):
            continue
        for value in equation.outputs:
            layout = annotations.homes.get(value.id)
            if layout is None or len(value.shape) < 2 or tuple(sorted(value.shape)) in state:
                continue
            size = value.itemsize
            for local in local_shape(value.shape, layout, mesh):
                size *= local
            function = f" ({equation.source.function.rpartition('<locals>.')[2]})" if equation.source else ""
            line = f"{equation.source or 'unknown line'}{function}"
            found[Activation(line, equation.primitive, value.shape, str(value.dtype), layout, size)] += 1
    every = [replace(one, count=count) for one, count in found.items()]
    return tuple(_largest(every))


def _largest(activations: Sequence[Activation]) -> list[Activation]:
    kept = sorted(activations, key=lambda one: -one.count * one.local_bytes)[:_MOST_ROWS]
    return [one for one in activations if one in kept]
