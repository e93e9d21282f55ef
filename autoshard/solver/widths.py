"""Groups in, the values out that XLA keeps or moves in fewer bits than the program says.

On TPU a matrix product or convolution of float32 operands rounds them to bfloat16, unless the program asks for more
precision. What nothing but such products reads is rounded where it is made: it is stored, moved between devices and
summed over them as bfloat16. A copy for such products alone is rounded before it is moved.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from jax.lax import Precision

from autoshard.mesh.backends import Backend
from autoshard.program import Program, Value
from autoshard.solver.groups import CONTRACTIONS, Group

_ROUNDED = 2  # bytes of a bfloat16
_DEFAULT = (None, "default", Precision.DEFAULT)


@dataclass(frozen=True)
class Widths:
    """Bytes per element of values in memory, and of what is resharded of them."""

    kept: frozenset[int] = frozenset()  # values that are stored rounded
    moved: frozenset[int] = frozenset()  # values whose resharded copies are rounded
    fused: frozenset[int] = frozenset()  # values of which only what is made of them is stored, and that is rounded

    def of(self, value: Value) -> int:
        """As it is made, and summed over devices."""
        return _ROUNDED if value.id in self.kept else itemsize(value)

    def stored(self, value: Value) -> int:
        return _ROUNDED if value.id in self.fused else self.of(value)

    def moving(self, value: Value) -> int:
        return _ROUNDED if value.id in self.moved else itemsize(value)


def widths_of(program: Program, groups: Sequence[Group], backend: Backend) -> Widths:
    """What `backend` rounds."""
    if not backend.rounds_operands:
        return Widths()
    readers: dict[int, list[Group]] = defaultdict(list)
    for group in groups:
        for use in group.uses:
            readers[use.value.id].append(group)
    results = {value.id for value in program.results if isinstance(value, Value)}
    kept: set[int] = set()
    moved: set[int] = set()

    def rounds(group: Group) -> bool:
        if group.equations[0].primitive in CONTRACTIONS:
            return _at_default_precision(group.equations[0].params.get("precision"))
        return group.only_moves and all(made.value.id in kept for made in group.made)

    for group in reversed(groups):  # readers before what they read, but for what loops hand on
        for made in group.made:
            users = readers[made.value.id]
            if users and str(made.value.dtype) == "float32":
                if made.value.id not in results and all(map(rounds, users)):
                    kept.add(made.value.id)
                _note(made.value, users, rounds, moved)
    fused = {
        group.made[0].value.id
        for group in groups
        if group.equations[0].primitive in CONTRACTIONS
        and group.made[0].value.id not in results
        and _goes_on(group, readers[group.made[0].value.id], kept)
    }
    for value in program.arguments:
        if str(value.dtype) == "float32":
            _note(value, readers[value.id], rounds, moved)
    return Widths(frozenset(kept), frozenset(kept | moved), frozenset(fused))


def itemsize(value: Value) -> int:
    """Bytes per element, PRNG keys included."""
    return value.bytes // math.prod(value.shape) if value.bytes else value.dtype.itemsize


def _goes_on(product: Group, users: Sequence[Group], kept: set[int]) -> bool:
    """Whether XLA fuses the one reader of a product into it, and stores what that makes."""
    if len(users) != 1 or not users[0].fuses:
        return False
    made = users[0].made
    shape = product.made[0].value.shape
    return all(one.value.id in kept and math.prod(one.value.shape) == math.prod(shape) for one in made)


def _note(value: Value, users: Sequence[Group], rounds, moved: set[int]) -> None:
    """Elementwise readers compute on the shards as they lie, so a copy is for the others."""
    others = [user for user in users if not user.fuses or rounds(user)]
    if others and all(map(rounds, others)):
        moved.add(value.id)


def _at_default_precision(precision) -> bool:
    pair = precision if isinstance(precision, tuple) else (precision,)
    return all(one in _DEFAULT for one in pair)
