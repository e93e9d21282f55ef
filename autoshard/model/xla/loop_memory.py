"""Values of loops: the TPU compiler keeps what a loop reads or adds up in every turn in the chip's own memory.

If all that a loop computes with has room there, it keeps all of that, a state that the loop hands on as well. That is
vector memory, which is no part of the peak, and what lies there need not be read in each turn. Source: compiled v5e and
v5p programs. `tests/mesh/test_targets.py` compiles loops that fill the room and loops that do not fit,
`tests/model/xla/test_small_programs.py` small ones.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from autoshard.model.equations import is_matrix_product
from autoshard.model.xla.rounding import Itemsizes, unrounded_itemsize
from autoshard.model.xla.sums import read_once, sums_in_loops
from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value


@dataclass(frozen=True)
class LoopMemory:
    """The room for what loops keep."""

    bytes: float = 0.0  # of what a loop reads in every turn that need not go through memory
    keeps_sums: bool = False  # whether matrix products that a loop adds up stay there, too
    rounding_share: float = 1.0  # of the memory's bandwidth, at which what loops read rounded is rounded before them
    fetched_share: float = 0.0  # of what is gathered for a loop: what is read from memory in every turn all the same

    def outside(self, sizes: np.ndarray, share: float) -> np.ndarray:
        """Bytes that go through memory of values that take `sizes` bytes.

        Args:
            sizes: bytes of one value per layout.
            share: the value's part of all that its loop keeps.

        >>> LoopMemory(bytes=100.0).outside(np.array([40.0, 80.0, 120.0]), share=0.5)
        array([  0.,  30., 120.])
        """
        return np.where(sizes > self.bytes, sizes, np.maximum(0.0, sizes - self.bytes * share))


def kept_on_chip_in_loops(program: Program, itemsizes: Itemsizes, room: LoopMemory) -> dict[int, int]:
    """What can stay in the chip while a loop turns -> bytes of all that can in its loop.

    That is what its matrix products read in every turn, a recurrent net's weights, and matrix products that it only
    adds up; with the sums, if the products are not split. An argument that is read as it is stays in memory: what is
    kept is written there by some operation, as one that rounds it. Of a small loop it is all that a turn makes, too.

    Args:
        program: the traced step.
        itemsizes: what is rounded.
        room: what is kept, and how much.
    """
    found: dict[tuple[int, int], tuple[set[int], dict[int, int]]] = defaultdict(lambda: (set(), {}))
    bare = _multiplied(program, converted=False)
    for entering in _constants_of_loops(program):
        assert entering.loop is not None, "boundaries of loops know theirs"
        (outside,), (inside,) = entering.inputs, entering.outputs
        assert isinstance(outside, Value), "a number enters no loop as an array"
        if outside.from_outside and inside.id in bare and not _is_rounded(inside, itemsizes):
            continue
        values, sizes = found[entering.loop]
        sizes[inside.id] = inside.bytes
        values.add(inside.id)
    for carry, total, makers in sums_in_loops(program, read_once(program)) if room.keeps_sums else ():
        if is_matrix_product(makers[-1]) and total.outputs[0].bytes:
            assert carry.loop is not None, "boundaries of loops know theirs"
            values, sizes = found[carry.loop]
            (product,) = makers[-1].outputs
            sizes[product.id] = product.bytes
            values.add(product.id)
            if not any(maker.primitive == "split" for maker in makers):
                values.update(value.id for value in (carry.outputs[0], *total.outputs))
                values.update(value.id for maker in makers for value in maker.outputs)
    kept = {value: sum(sizes.values()) for values, sizes in found.values() for value in values}
    return _made_in_small_loops(program, room.bytes) | kept


def _made_in_small_loops(program: Program, room: float) -> dict[int, int]:
    """What loops make in every turn -> bytes of all that they compute with, of loops of which all of that has room.

    Of loops of unknown length XLA keeps less inside, and not always the same.
    """
    found: dict[int, int] = {}
    loops = {one.loop for one in program.equations if one.loop is not None}
    for start, end in sorted(loops, key=lambda loop: loop[1] - loop[0]):  # from inside out
        made = [value for one in program.equations[start:end] for value in _made_in_turns(one)]
        read = [one.outputs[0] for one in program.equations[start:end] if one.primitive == "scan_const"]
        size = sum(value.bytes for value in (*made, *read))
        if 0 < size <= room and all(value.guessed == 1 for value in made):
            found |= {value.id: size for value in made}
    return found


def _made_in_turns(equation: Equation) -> tuple[Value, ...]:
    """What an equation of a loop makes in every turn, what the loop hands on included."""
    if equation.primitive == "scan_carry":
        return equation.outputs[:1]
    return () if facts_of(equation.primitive).is_boundary else equation.outputs


def rounded_for_loops(program: Program, itemsizes: Itemsizes) -> set[int]:
    """The arguments that XLA rounds before loops whose matrix products read them: whole in every turn, or a slice.

    Of a stack of weights the compiled program rounds all layers ahead of the loop, at once.
    """
    pairs = ((entering.inputs[0], entering.outputs[0]) for entering in _read_by_loops(program, slices=True))
    return {
        outside.id
        for outside, inside in pairs
        if isinstance(outside, Value) and outside.from_outside and _is_rounded(inside, itemsizes)
    }


def turns_that_read(program: Program) -> dict[int, int]:
    """Values that matrix products of loops read in every turn -> how many turns these are, of all such loops."""
    found: dict[int, int] = defaultdict(int)
    for entering in _constants_of_loops(program):
        (outside,), (inside,) = entering.inputs, entering.outputs
        assert isinstance(outside, Value), "a number enters no loop as an array"
        found[outside.id] += inside.trips // outside.trips
    return dict(found)


def _constants_of_loops(program: Program) -> list[Equation]:
    """The equations that hand a loop what its matrix products read in every turn, if these are several."""
    return _read_by_loops(program, slices=False)


def _read_by_loops(program: Program, *, slices: bool) -> list[Equation]:
    """The equations that hand a loop of several turns what its matrix products read.

    Args:
        slices: whether those count, too, that hand it one slice per turn.
    """
    kinds = ("scan_const", "scan_slice") if slices else ("scan_const",)
    entering = [
        equation
        for equation in program.equations
        if equation.primitive in kinds
        and isinstance(equation.inputs[0], Value)
        and equation.outputs[0].trips > equation.inputs[0].trips > 0
    ]
    multiplied = _multiplied(program) if entering else set()
    return [equation for equation in entering if equation.outputs[0].id in multiplied]


def _is_rounded(inside: Value, itemsizes: Itemsizes) -> bool:
    return itemsizes.moving(inside) < unrounded_itemsize(inside)


def _multiplied(program: Program, converted: bool = True) -> set[int]:
    """The values that matrix products read, and those that these are views of, or the same in another dtype.

    Args:
        converted: whether the same in another dtype is of them.
    """
    found: set[int] = set()
    for equation in reversed(program.equations):
        passed_on = facts_of(equation.primitive).passes_on and equation.outputs[0].id in found
        passed_on = passed_on and (converted or equation.primitive != "convert_element_type")
        if passed_on or is_matrix_product(equation):
            found.update(value.id for value in equation.inputs if isinstance(value, Value))
    return found


def lying_by_slices(program: Program) -> dict[int, tuple[int, ...]]:
    """What loops stack -> the dims of one slice. A loop writes slices as they lie, so the minor dims are of these."""
    stacks = (equation.outputs[0] for equation in program.equations if equation.primitive == "scan_stack")
    return {stack.id: tuple(range(1, len(stack.shape))) for stack in stacks if len(stack.shape) > 2}
