"""The chip's own memory of a TPU core: temporaries that lie there, and products that lie nowhere.

libtpu lets a temporary lie in vector memory while there is room. A product that reads such a temporary starts at once,
and nothing that is written there goes through memory. Of more than there is room for, a part lies there. What one
operation makes together with the product that it ends is the only thing that this operation stores.

Source: the memory spaces in v5e programs of 4 to 8 layers, widths of 256 to 2,048 and batches of 256 to 8,192.
`tests/model/xla/test_streams.py` compiles some.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.model.groups import Group
from autoshard.program import Program, Value

_LONGER = 16.0  # times as many points: what lies for so long makes room for what does not
_CROWDED = 4.0  # times the room of all devices: of so much or more, what lies in the chip is too little to count


def kept_on_chip_for_readers(program: Program, groups: Sequence[Group], room: float) -> dict[int, int]:
    """What can stay in the chip for its readers -> the most bytes of all that can at one time while it is there.

    What is needed again soon is kept before what lies for long. So what a layer hands on counts alike in every layer,
    however much the layers before it have left for their backward pass.

    Args:
        program: the traced step.
        groups: its groups.
        room: bytes of all devices.
    """
    results = {value.id for value in program.results if isinstance(value, Value)}
    last: dict[int, int] = {}
    outside = set(results)
    for group in groups:
        for use in group.uses:
            last[use.value.id] = max(last.get(use.value.id, 0), group.last_point)
            if group.is_boundary:
                outside.add(use.value.id)
    lives: dict[int, tuple[int, int, int]] = {}
    for group in groups:
        if group.is_boundary or group.is_recomputed:
            continue
        for value in (made.value for made in group.outputs):
            if value.id not in outside and value.id in last:
                lives[value.id] = group.point, max(group.point, last[value.id]), value.bytes
    together = zip(lives, _peak_while_alive(list(lives.values())), strict=True)
    return {value: most for value, most in together if 0 < most < _CROWDED * room}


def _peak_while_alive(lives: Sequence[tuple[int, int, int]]) -> list[int]:
    """Per life, from its first point to its last and of so many bytes, the most bytes while it lasts.

    Lives that are much longer than it do not count.
    """
    most, held = [0] * len(lives), np.zeros(max((end for _, end, _ in lives), default=0) + 1, dtype=np.int64)

    def lasting(one: int) -> int:
        start, end, _ = lives[one]
        return round(math.log(end - start + 1, _LONGER))

    for _, alike in itertools.groupby(sorted(range(len(lives)), key=lasting), key=lasting):
        ones = list(alike)
        for start, end, size in (lives[one] for one in ones):
            held[start : end + 1] += size
        for one in ones:
            start, end, _ = lives[one]
            most[one] = int(held[start : end + 1].max())
    return most


def made_with_products(groups: Sequence[Group]) -> dict[int, Group]:
    """Values that one operation makes with a product, on the way to what it stores -> that product."""
    found: dict[int, Group] = {}
    for group in groups:
        behind = group if group.contracts else None
        if group.ends_product:
            behind = next((found[use.value.id] for use in group.uses if use.value.id in found), None)
        if behind is not None:
            found.update((made.value.id, behind) for made in group.outputs)
    return found


def stored_nowhere(groups: Sequence[Group]) -> frozenset[int]:
    """Ids of products, and of what ends one, that lie nowhere: whatever reads them is one operation with them.

    Who makes a reader's work again reads what that reads.
    """
    readers: dict[int, list[Group]] = {}
    for group in groups:
        for use in group.uses:
            readers.setdefault(use.value.id, []).append(group)
    ends: dict[int, bool] = {}  # value -> whether all who read it at last are one operation with it
    for group in reversed(groups):
        for value in (made.value.id for made in group.outputs):
            ends[value] = value in readers and all(
                all(ends[made.value.id] for made in user.outputs)
                if user.is_recomputed and not user.is_stored_by_product
                else user.ends_product
                for user in readers[value]
            )
    made = (one.value.id for group in groups if group.contracts or group.ends_product for one in group.outputs)
    return frozenset(value for value in made if ends[value])


def scaled(kept: Mapping[int, int], room: float, of: float) -> dict[int, int]:
    """The same bytes where `room` is as much as `of` elsewhere."""
    return {value: round(size * of / room) for value, size in kept.items()}
