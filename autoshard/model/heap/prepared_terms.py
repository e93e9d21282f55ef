"""Terms of memory of what operations work on that XLA makes ahead of them, as it runs first what is ready first.

They are terms as those of `memory_terms.py` are. `tests/model/test_breadth_first.py` compiles some.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from autoshard.model.memory_terms import HeldBytes, HeldOutput, output_term, shard_bytes
from autoshard.model.workspaces import PREPARED


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
