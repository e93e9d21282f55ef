"""Terms of memory of loops: what they read or carry on that is made of arguments beside them.

They are terms as those of `memory_terms.py` are. Source: buffers of loops compiled for v5e.
`tests/model/xla/test_outside_chip.py` compiles some.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autoshard.model.lifetimes import around
from autoshard.model.memory_terms import HeldArgument, HeldBytes, argument_term
from autoshard.model.pricing.cost_tables import copies_of
from autoshard.model.xla.rounding import BFLOAT16_BYTES


@argument_term
def rounded_copies(argument: HeldArgument) -> Iterator[HeldBytes]:
    """What is rounded before loops, while these turn; a gathered copy is rounded, too, and counted as that."""
    value, arrays = argument.value, argument.prices.arrays
    if value.id in argument.prices.rounded:
        bare = [option.home == option.copy for option in argument.options]
        sizes = [arrays.elements(value, option.home) * BFLOAT16_BYTES for option in argument.options]
        loops = [loop for _, use in argument.uses if (loop := use.equation.loop)]
        yield HeldBytes(argument.node, around(loops), np.where(bare, sizes, 0))


@argument_term
def gathered_states(argument: HeldArgument) -> Iterator[HeldBytes]:
    """What is gathered for a loop that carries it on and ends with a result: it is copied into that at the end.

    Only where it lies outside the chip's own memory. There the loop writes over what is gathered.
    """
    prices = argument.prices
    if not prices.backend.gathers.copies_results:
        return
    entering = (use.equation for _, use in argument.uses if use.equation.primitive == "scan_carry" and not use.operand)
    loops = [one.loop for one in entering if one.loop and one.outputs[0].id in prices.places.returned]
    if loops:
        sizes = prices.arrays.copy_sizes(argument.value, prices.memo.once(copies_of, argument.options), None)
        is_gathered = [option.home != option.copy for option in argument.options]
        usage = np.where(is_gathered, sizes, 0)
        yield HeldBytes(argument.node, around(loops), usage, may_be_on_chip=False, is_one_buffer=False)
