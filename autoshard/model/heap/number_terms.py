"""Terms of memory of numbers: what a TPU core holds as one, though the program has something else.

They are terms as those of `memory_terms.py` are. Source: buffers of programs compiled for v5e.
`tests/model/xla/test_units.py` compiles some.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np

from autoshard.layout import local_shape
from autoshard.model.groups import Group
from autoshard.model.lifetimes import around, use_span
from autoshard.model.memory_terms import HeldArgument, HeldBytes, HeldOutput, argument_term, output_term
from autoshard.primitives import facts_of


@argument_term
def complex_parts(argument: HeldArgument) -> Iterator[HeldBytes]:
    """The real and the imaginary part of a complex number, each a number by itself, while it is used."""
    number_bytes = argument.prices.backend.number_bytes
    is_complex = getattr(argument.value.dtype, "kind", "") == "c"  # keys have none
    if number_bytes and argument.uses and math.prod(argument.value.shape) == 1 and is_complex:
        span = around(list(itertools.starmap(use_span, argument.uses)))
        usage = np.full(len(argument.options), 2 * number_bytes)
        yield HeldBytes(argument.node, span, usage, may_be_on_chip=False)


@output_term
def split_numbers(output: HeldOutput) -> Iterator[HeldBytes]:
    """What is an array, and one element on each device, as a number: until it is last used; and any element cut out.

    A sum takes as much again while it runs. Elementwise work on such elements stays in registers.
    """
    value, prices, group = output.value, output.prices, output.group
    number_bytes, used = prices.backend.number_bytes, output.lifetime.used
    if not number_bytes or used is None or group.fuses or group.is_boundary:
        return
    is_cut = group.is_recomputed and facts_of(group.equations[0].primitive).slices
    if not (is_cut or output.is_stored) or not 2 - is_cut <= math.prod(value.shape) <= math.prod(prices.mesh.values()):
        return
    which = [one.value.id for one in group.outputs].index(value.id)
    layouts = (strategy.output_layouts[which] for strategy in output.strategies)
    is_number = np.array([math.prod(local_shape(value.shape, layout, prices.mesh)) == 1 for layout in layouts])
    yield HeldBytes(output.node, (group.point, used[1]), number_bytes * is_number, may_be_on_chip=False)


def has_empty_reply(group: Group) -> bool:
    """Whether it calls the host, which returns nothing: a number stands for that, and for what is not sent."""
    return not group.outputs and facts_of(group.equations[0].primitive).from_one_device


def empty_replies(node: int, group: Group, strategies: int, number_bytes: int) -> Iterator[HeldBytes]:
    """The number that a callback without results gets back, and one to send if it has no operands."""
    if number_bytes and has_empty_reply(group):
        usage = np.full(strategies, number_bytes * (1 + (not group.equations[0].inputs)))
        yield HeldBytes(node, (group.point, group.point + 1), usage, may_be_on_chip=False)
