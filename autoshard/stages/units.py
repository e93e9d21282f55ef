"""A step in microbatches in, out where its forward pass may be cut, and what each cut costs: what a search runs on.

The forward pass is a line of slots: an equation each, or a trip each for loops over layers. A boundary lies between two
slots with work, where the fewest bytes cross. Between two boundaries lies a unit. In a transformer, units are attention
and the MLP of each layer, or a whole layer where layers are scanned.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.errors import StageError
from autoshard.jaxprs import Var, scan_counts
from autoshard.program.user_code import source_of
from autoshard.stages.roles import PipelineRoles, bytes_of, variables, work
from autoshard.stages.stacks import EquationOrigin

_END = EquationOrigin(2**62)  # after every equation
_NEAR_BOUNDARIES = 8  # boundaries: a layer of a transformer has about as many products


@dataclass(frozen=True)
class Unit:
    """What lies between two neighbouring boundaries of the forward pass. Never cut."""

    name: str  # the user's line where its work begins, and the trip of its loop over layers
    start: EquationOrigin  # its first slot
    forward_flops: float  # of one microbatch
    backward_flops: float  # of one microbatch; its share of those of the whole backward pass
    parameter_bytes: int  # of the parameters that are first read here
    made_bytes: (
        int  # of one microbatch: all that products in it make, as a measure of what is kept for the backward pass
    )
    crossing_bytes: int  # of one microbatch: what crosses the boundary before it, forward; the cotangents are as large


@dataclass(frozen=True)
class Units:
    """The units of a forward pass, in order."""

    units: tuple[Unit, ...]

    def boundaries(self, first_units: Sequence[int]) -> tuple[EquationOrigin, ...]:
        """Where stages begin that begin with these units.

        Args:
            first_units: of all stages but the first, ascending; the number of units for stages that are empty.
        """
        return tuple(self.units[i].start if i < len(self.units) else _END for i in first_units)

    def balanced(self, stages: int, filled: int | None = None) -> tuple[int, ...]:
        """The first units of all stages but the first, so that the largest stage has the least work.

        Among equals, fewer bytes cross. Exact, by dynamic programming over (stages, units).

        Args:
            filled: so many stages at least have a unit, the last ones may be empty; by default none is.

        Raises:
            StageError: there are fewer units than that.
        """
        count = len(self.units)
        filled = stages if filled is None else filled
        if filled <= count < stages:
            return (*self.balanced(count), *[count] * (stages - count))
        if count < filled:
            lines = ", ".join(dict.fromkeys(unit.name for unit in self.units))
            where = f" ({lines})" if lines else ""
            advice = (
                f"Use stages={count} or fewer."
                if count > 1
                else "Leave pipeline= out; or write layers one after the other, or as a lax.scan over stacked weights."
            )
            raise StageError(
                f"pipeline: stages={filled}, but the forward pass can be cut into {count} parts at most{where}.\n"
                f"{advice}"
            )
        done = np.concatenate([[0.0], np.cumsum([unit.forward_flops + unit.backward_flops for unit in self.units])])
        least = np.full((stages + 1, count + 1), np.inf)  # the largest stage of the first n units in s stages
        least[0, 0] = 0.0
        for s, n in _states(stages, count):
            least[s, n] = min(max(least[s - 1, k], done[n] - done[k]) for k in range(s - 1, n))
        most = least[stages, count] * (1 + 1e-9)
        crossing = np.full((stages + 1, count + 1), np.inf)  # bytes, no stage being larger than that
        crossing[0, 0] = 0.0
        begins = np.zeros((stages + 1, count + 1), int)  # where the last of these stages begins
        for s, n in _states(stages, count):
            ways = [
                (crossing[s - 1, k] + (self.units[k].crossing_bytes if k else 0), k)
                for k in range(s - 1, n)
                if done[n] - done[k] <= most
            ]
            crossing[s, n], begins[s, n] = min(ways, default=(np.inf, 0))
        firsts, n = [], count
        for s in range(stages, 1, -1):
            n = int(begins[s, n])
            firsts.append(n)
        return tuple(firsts[::-1])


def _states(stages: int, units: int) -> list[tuple[int, int]]:
    """So many stages of so many units, before those that build on them; each stage has a unit or more."""
    return [(s, n) for s in range(1, stages + 1) for n in range(s, units + 1)]


@dataclass(frozen=True)
class _ForwardSlot:
    origin: EquationOrigin
    flops: float
    crossing: int  # bytes that cross the boundary before it
    name: str
    is_cheap: bool  # whether its work is elementwise


class _ForwardLine:
    """The forward pass as a line of slots."""

    def __init__(self, roles: PipelineRoles):
        self.roles, self.step = roles, roles.step

    @cached_property
    def forward(self) -> list[int]:
        """The forward equations that belong to one stage."""
        roles = self.roles
        return [i for i in roles.loop if i not in roles.backward and i not in roles.free]

    @cached_property
    def last_readers(self) -> dict[Var, int]:
        """Variable -> the last forward equation that reads it."""
        own = set(self.forward)
        return {
            var: max(inside) for var, several in self.roles.readers.items() if (inside := own.intersection(several))
        }

    def slots(self) -> list[_ForwardSlot]:
        alive: dict[Var, int] = {}
        found: list[_ForwardSlot] = []
        for i in self.forward:
            eqn, small = self.step.equations[i], self.step.small[i]
            trips = eqn.params["length"] if self.roles.stacks.get(i) == i else 1
            name, flops = str(source_of(eqn) or eqn.primitive.name), work(small) / trips
            crossing = sum(alive.values())
            cheap = i in self.roles.cheap
            found.append(
                _ForwardSlot(EquationOrigin(i), flops, crossing, name + (" trip 0" if trips > 1 else ""), cheap)
            )
            if trips > 1:
                consts, carries = scan_counts(small)
                carry = sum(map(bytes_of, small.outvars[:carries]))
                first = {var: bytes_of(self.step.twins[var]) for var in self.roles.inputs(i) if var in alive}
                held = variables(eqn.invars[:consts])
                ended = {var for var in first if self.last_readers[var] == i and var not in held}
                inside = crossing - sum(first[var] for var in ended) + carry
                found += [
                    _ForwardSlot(EquationOrigin(i, trip), flops, inside, f"{name} trip {trip}", cheap)
                    for trip in range(1, trips)
                ]
            alive = {var: size for var, size in alive.items() if self.last_readers[var] > i}
            for var in eqn.outvars:
                if self.last_readers.get(var, -1) > i:
                    alive[var] = bytes_of(self.step.twins[var])
        return found

    def units(self, least: int) -> Units:
        slots = self.slots()
        if not slots:
            return Units(())
        starts = [0, *_boundaries(slots, least)]
        backward = sum(work(self.step.small[i]) for i in self.roles.loop if i in self.roles.backward)
        ratio = backward / max(sum(slot.flops for slot in slots), 1.0)
        seen: set[Var] = set()
        units = []
        for start, stop in itertools.pairwise([*starts, len(slots)]):
            inside = slots[start:stop]
            flops = sum(slot.flops for slot in inside)
            biggest = max(inside, key=lambda slot: slot.flops)
            sizes = [self.sizes(slot, seen) for slot in inside]
            units.append(
                Unit(
                    biggest.name,
                    inside[0].origin,
                    flops,
                    ratio * flops,
                    sum(parameters for parameters, _ in sizes),
                    sum(made for _, made in sizes),
                    inside[0].crossing,
                )
            )
        return Units(tuple(units))

    def sizes(self, slot: _ForwardSlot, seen: set[Var]) -> tuple[int, int]:
        """Bytes of parameters that are not in `seen` yet, and of what products make for the backward pass."""
        i = slot.origin.equation
        eqn, small = self.step.equations[i], self.step.small[i]
        is_stack = self.roles.stacks.get(i) == i
        trips = eqn.params["length"] if is_stack else 1
        read = [var for var in self.roles.inputs(i) if var in self.roles.parameters and (is_stack or var not in seen)]
        seen |= set(read)
        made = sum(map(bytes_of, small.outvars)) if i not in self.roles.cheap else 0
        return sum(map(bytes_of, read)) // trips, made // trips


def _boundaries(slots: Sequence[_ForwardSlot], least: int) -> list[int]:
    """The slots before which the line may be cut: one at most between two slots with work, where fewest bytes cross.

    Of these, one is left out if half as many bytes cross near it on either side, unless fewer than `least` remain.
    """
    found: list[int] = []
    since = 0  # the first slot after the last one with work
    for k, slot in enumerate(slots):
        if not slot.is_cheap:
            if found or since:  # what stands before the first work belongs to it
                found.append(min(range(since, k + 1), key=lambda one: (slots[one].crossing, -one)))
            since = k + 1
    good = [
        k
        for n, k in enumerate(found)
        if not (
            any(2 * slots[one].crossing <= slots[k].crossing for one in found[max(0, n - _NEAR_BOUNDARIES) : n])
            and any(2 * slots[one].crossing <= slots[k].crossing for one in found[n + 1 : n + 1 + _NEAR_BOUNDARIES])
        )
    ]
    return good if len(good) + 1 >= least else found


def units_of(roles: PipelineRoles, least: int = 1) -> Units:
    """Where the forward pass of a step may be cut: into `least` units or more, if it has so much work apart."""
    return _ForwardLine(roles).units(least)
