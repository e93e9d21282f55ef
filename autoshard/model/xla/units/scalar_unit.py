"""The scalar unit of a TPU core: which numbers it keeps in registers, which lie in memory, and what loops wait for.

What is computed of numbers alone stays in registers. What is computed of arrays or keys lies in memory, where every
number takes `Backend.number_bytes`, a word of a key as well. A reduction to a number takes as much again while it runs.
If a loop carries or reads one number in memory, all that it carries lie there, each twice: as a turn finds it and as it
leaves it. An array that decides whether a loop goes on lies outside the chip's own memory, and so does what is sent to
the host or comes from there.

Source: the buffers of loops, sums and conditions compiled for v5e. `tests/model/xla/test_units.py` compiles some.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import jax
import numpy as np

from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value

_ENTERS_LOOPS = frozenset({"scan_carry", "scan_const"})
_WORD_BYTES = 4  # of a key


@dataclass(frozen=True)
class ValuePlaces:
    """Where values of a program lie on a TPU core, whatever their size."""

    registers: frozenset[int] = frozenset()  # numbers that never lie in memory
    outside: frozenset[int] = frozenset()  # arrays that never lie in the chip's own memory
    returned: frozenset[int] = frozenset()  # those of them that a loop carries and that it ends with as a result


def places_of(program: Program) -> ValuePlaces:
    """Where values of a program lie on a TPU core."""
    waited_for = read_by_conditions(program)
    return ValuePlaces(
        registers=numbers_in_registers(program),
        outside=waited_for | exchanged_with_host(program),
        returned=waited_for & carried_to_results(program),
    )


def exchanged_with_host(program: Program) -> frozenset[int]:
    """Ids of the values in a device's memory that move to the host's or from there, or that are given for an answer."""
    found: set[int] = set()
    for one in program.equations:
        moved: list[tuple[Value | np.ndarray, ...]]
        if one.primitive == "device_put":
            pairs = list(zip(one.inputs, one.outputs, strict=True))
            moved = [(read, made) for read, made in pairs if getattr(read, "on_host", False) != made.on_host]
        elif facts_of(one.primitive).from_one_device and one.outputs:
            moved = [max((one.inputs, one.outputs), key=_bytes_of)]  # what comes back lies where the rest has lain
        else:
            continue
        values = (value for values in moved for value in values if isinstance(value, Value))
        found |= {value.id for value in values if not value.on_host}
    return frozenset(found)


def _bytes_of(values: Iterable[Value | np.ndarray]) -> int:
    return sum(value.bytes for value in values if isinstance(value, Value))


def carried_to_results(program: Program) -> frozenset[int]:
    """Ids of the values that loops carry and end with as results of the program."""
    results = {value.id for value in program.results if isinstance(value, Value)}
    carries = (one.outputs for one in program.equations if one.primitive == "scan_carry")
    return frozenset(seen.id for seen, final in carries if final.id in results)


def read_by_conditions(program: Program) -> frozenset[int]:
    """Ids of the values that loops carry, and of which they compute whether they go on."""
    results = {value.id for value in program.results if isinstance(value, Value)}
    unread = [value for value in program.values if not program.reads[value.id] and value.id not in results]
    waiting = [value for value in unread if value.dtype == bool and value.shape == () and value.trips > 1]
    found, seen = set(), {value.id for value in waiting}
    while waiting:
        value = waiting.pop()
        maker = program.makers.get(value.id)
        if maker is None:
            continue
        if maker.loop is not None:
            found |= {value.id} if maker.primitive == "scan_carry" else set()
            continue
        before = [one for one in maker.inputs if isinstance(one, Value) and one.id not in seen]
        seen |= {one.id for one in before}
        waiting += before
    return frozenset(found)


def numbers_in_registers(program: Program) -> frozenset[int]:
    """Ids of the values of one element that are made of numbers alone, those that loops carry included."""
    found = {value.id for value in program.values if _is_number(value) and not _is_key(value)} | _only_seeds(program)
    while True:
        left = found - _made_of_memory(program.equations, found) - _carried_beside_memory(program.equations, found)
        if left == found:
            return frozenset(found)
        found = left


def _only_seeds(program: Program) -> set[int]:
    """Ids of the keys that are made of seeds and of which only their words are read."""
    found = {one.outputs[0].id for one in program.equations if one.primitive == "random_seed"}
    others = (one for one in program.equations if one.primitive != "random_unwrap")
    return found - {value.id for one in others for value in one.inputs if isinstance(value, Value)}


def numbers_of_value(value: Value, *, is_carried: bool) -> int:
    """How many numbers a value of one element is in memory, where a loop carries it or elsewhere."""
    return (value.itemsize // _WORD_BYTES if _is_key(value) else 1) * (1 + is_carried)


def _made_of_memory(equations: Iterable[Equation], registers: set[int]) -> set[int]:
    """What is made of anything but numbers in registers."""

    def is_in_register(value: Value | np.ndarray) -> bool:
        return value.id in registers if isinstance(value, Value) else math.prod(value.shape) == 1

    return {made.id for one in equations if not all(map(is_in_register, one.inputs)) for made in one.outputs}


def _carried_beside_memory(equations: Iterable[Equation], registers: set[int]) -> set[int]:
    """What is carried by loops that carry, or read, a number that is in memory."""
    entering = defaultdict(list)
    for one in equations:
        if one.primitive in _ENTERS_LOOPS and one.loop is not None:
            entering[one.loop].append(one)
    reached = (loop for loop in entering.values() if any(_is_in_memory(one.outputs[0], registers) for one in loop))
    return {made.id for loop in reached for one in loop if one.primitive == "scan_carry" for made in one.outputs}


def _is_in_memory(value: Value, registers: set[int]) -> bool:
    return _is_number(value) and value.id not in registers


def _is_number(value: Value) -> bool:
    return math.prod(value.shape) == 1


def _is_key(value: Value) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
