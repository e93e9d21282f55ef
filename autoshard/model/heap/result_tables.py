"""What a TPU program holds for operations that make several arrays: a table of these, each all the time.

Every temporary in the memory of a TPU starts at a multiple of `Backend.number_bytes`. An operation that makes a tuple
has a temporary with the addresses of its parts, and no two tuples ever share one. Three kinds make tuples: fused
operations with several results, and the copies that fetch arguments into the chip's own memory and take results out of
it, which hand on a semaphore. What a callback without a result sends and receives makes tuples, too, and what it sends
of the step's own stays, so that no two calls share it. So a step of few bytes and many arrays holds mostly tables. A
program of which all other temporaries lie in the chip's own memory has no tables (`Formulation.elsewhere`).

One operation makes several of the parts that a concatenation joins, if these are as large as each other and go over
one array: halves of it, or quotients and remainders. A gather that fills what is out of bounds compares its coordinates
with the last ones that are not. Several of these are a constant array, which is fetched as arguments are. So are those
by which a scatter is clipped. What a gather does not compare is joined as it is read: its coordinates have no table.

An argument is fetched while other work runs, once, if the chip's own memory holds a shard, and a result is taken out
while other work runs. So a copy counts only where operations run before an argument's last use, or enough of them after
a result is made. Numbers are no such arrays.

Source: buffers of training steps compiled for v5e:2x4 and v5p:2x2x2, and of programs of few operations for v5e:2x4.
`tests/model/xla/test_result_tables.py` compiles some.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jax.lax import GatherScatterMode

from autoshard.model.equations import is_computed
from autoshard.model.groups import Group
from autoshard.model.heap.number_terms import has_empty_reply
from autoshard.model.memory_terms import HeldArgument, HeldOutput
from autoshard.model.workspaces import consists_of_several, is_counted, is_fetched_beside
from autoshard.model.xla.backends import Backend
from autoshard.primitives import facts_of
from autoshard.program import Equation, Value
from autoshard.propagation.rules.windows import STENCIL

_BEFORE_FETCHED = 1  # operations at least that run before the last use of an argument that is fetched
_AFTER_MADE = 2  # operations at least that run after a result is made that is taken out of the chip
_REPLY = 2  # tables of what a callback gets back
_Part = tuple[tuple[int, ...], frozenset[int]]  # of a concatenation: its shape, and the arrays that it is made of
TABLES = "tables of operations with several results"  # what the node that holds them is called


@dataclass
class ResultTables:
    """The tables of one program, counted while its arguments and values are gone through."""

    backend: Backend
    devices: int
    used: list[Sequence[Group]] = field(default_factory=list)  # per argument that fits the chip, who uses it
    fetched: int = 0  # other arguments, which operations fetch while they run
    made: list[Group] = field(default_factory=list)  # of each result
    sent: float = 0.0  # bytes of what callbacks without a result send and receive
    stored: Counter[int] = field(default_factory=Counter)  # index of a group -> arrays that it makes
    groups: dict[int, Group] = field(default_factory=dict)  # such groups, by their indices
    arrays: dict[int, frozenset[int]] = field(default_factory=dict)  # what is made again -> what is read for it
    joining: list[Group] = field(default_factory=list)  # that concatenate
    coordinates: set[int] = field(default_factory=set)  # what gathers read, and do not compare with bounds
    bounds: set[tuple[int, ...]] = field(default_factory=set)  # constant arrays that coordinates are compared with

    def add_argument(self, argument: HeldArgument) -> None:
        """Notes the copy that fetches it."""
        fits = argument.value.bytes <= self.backend.on_chip_bytes * self.devices
        users = [group for group, _ in argument.uses]
        if not fits or not users or math.prod(argument.value.shape) == 1:
            return
        if any(is_fetched_beside(use.equation, use.operand) for _, use in argument.uses):
            self.fetched += 1
        elif not self._is_counted(max(users, key=lambda group: group.point)):
            self.used.append(users)

    def add_group(self, group: Group) -> None:
        """Notes what has tables whatever its results: joined parts, bounds of coordinates, callbacks without a result.

        Such a callback has one of each operand, and what it sends of the step's own.
        """
        if group.is_recomputed and not group.is_boundary and not self._is_counted(group):
            wide = [use.value.id for use in group.uses if math.prod(use.value.shape) > 1]
            read = frozenset().union(*(self.arrays.get(value, {value}) for value in wide))
            self.arrays.update((made.value.id, read) for made in group.outputs)
        if group.equations[0].primitive in ("concatenate", STENCIL):
            self.joining.append(group)
        bounds = [one for equation in group.equations for one in _bounds(equation)]
        self.bounds.update(() if self._is_counted(group) else bounds)
        if group.equations[0].primitive == "gather" and not bounds:
            self.coordinates.update(one.id for one in group.equations[0].inputs[1:] if isinstance(one, Value))
        if has_empty_reply(group):
            operands = group.equations[0].inputs
            made = (one.bytes for one in operands if is_computed(one))
            self.sent += (max(1, len(operands)) + _REPLY) * self.backend.number_bytes
            self.sent += sum(max(size, self.backend.number_bytes) for size in made)

    def add_output(self, output: HeldOutput) -> None:
        """Notes the copy that takes it out, if it is a result, and the table of its group."""
        group = output.group
        if not (output.is_stored or output.has_buffer) or group.is_boundary or group.is_idle:
            return
        if consists_of_several(group.equations[0]) and not output.reads.get(output.value.id):
            return
        if output.has_buffer and math.prod(output.value.shape) > 1:
            self.made.append(group)
        self.stored[group.index] += 1
        self.groups[group.index] = group

    @property
    def bytes(self) -> float:
        """Of all tables."""
        if not self.backend.number_bytes:
            return 0.0
        operation_of = self._operations()
        order = sorted(set(operation_of.values()))

        def before(group: Group) -> int:
            """How many operations begin before that of a group."""
            return bisect.bisect_left(order, operation_of.get(group.index, (group.point, 0)))

        fetched = self.fetched + sum(max(map(before, users)) >= _BEFORE_FETCHED for users in self.used)
        taken_out = sum(len(order) - 1 - before(group) >= _AFTER_MADE for group in self.made)
        arrays = Counter[tuple[int, int]]()
        for index, operation in operation_of.items():
            if not self._is_counted(self.groups[index]):
                arrays[operation] += self.stored[index] + self.groups[index].runs_beside
        several = sum(count > 1 for count in arrays.values())
        joining = (one for one in self.joining if one.outputs[0].value.id not in self.coordinates)
        together = (_joined_by_operation(parts) for group in joining for parts in self._joined(group))
        several += len(set(itertools.chain(*together)))
        return self.backend.number_bytes * (fetched + taken_out + several + len(self.bounds)) + self.sent

    def _joined(self, group: Group) -> Iterator[list[_Part]]:
        """The parts of each concatenation in a group: what is computed again there."""
        (first, *_) = group.equations
        if first.primitive == "concatenate":
            made = {use.value.id: use.value for use in group.uses if use.value.id in self.arrays}
            yield [(value.shape, self.arrays[value.id]) for value in made.values()]
        if first.primitive == STENCIL:
            steps, sources = first.params["steps"], first.inputs
            wide = [{one.id} if isinstance(one, Value) and math.prod(one.shape) > 1 else set() for one in sources]
            read = list[frozenset[int]]()  # by each step
            for step in steps:
                read.append(frozenset().union(*(read[one] if one >= 0 else wide[~one] for one in step.operands)))
                if step.kind == "concatenate":
                    yield [(steps[one].shape, read[one]) for one in {*step.operands} if one >= 0]

    def _is_counted(self, group: Group) -> bool:
        """Whether its tables are among its numbers."""
        return any(is_counted(self.backend.name, one) for one in group.equations)

    def _operations(self) -> dict[int, tuple[int, int]]:
        """Index of a group that stores something -> the point and index of the first group of its operation.

        XLA makes one operation of groups that loop over the same operands alike.
        """
        first: dict[tuple, tuple[int, int]] = {}
        found: dict[int, tuple[int, int]] = {}
        for index, group in sorted(self.groups.items(), key=lambda item: item[1].point):
            alike: tuple = (index,)
            if _is_loop(group) and not group.reads_numbers:
                operands = frozenset(use.value.id for use in group.uses)
                alike = group.trips, group.outputs[0].value.shape, operands
            found[index] = first.setdefault(alike, (group.point, index))
        return found


def _joined_by_operation(parts: Sequence[_Part]) -> Iterator[_Part]:
    """Of each operation that makes several of these parts, how large they are, and the arrays that it goes over."""
    operations: list[tuple[tuple[int, ...], list[frozenset[int]]]] = []  # how large its parts are, what each reads
    for shape, arrays in parts:
        alike = (others for size, others in operations if size == shape)
        together = next((others for others in alike if any(arrays & other for other in others)), None)
        if together is None:
            operations.append((shape, [arrays]))
        else:
            together.append(arrays)
    yield from ((shape, frozenset().union(*arrays)) for shape, arrays in operations if len(arrays) > 1)


def _bounds(equation: Equation) -> Iterator[tuple[int, ...]]:
    """The last coordinates in bounds, if XLA compares several at once with these: an array of constants."""
    is_scatter = equation.primitive.startswith("scatter")
    if not is_scatter and equation.primitive != "gather":
        return
    array, indices, *updates = equation.inputs
    mode, numbers = GatherScatterMode.from_any(equation.params["mode"]), equation.params["dimension_numbers"]
    compares = mode == (GatherScatterMode.CLIP if is_scatter else GatherScatterMode.FILL_OR_DROP)
    if not compares or not isinstance(indices, Value) or indices.is_known or indices.shape[-1] < 2:
        return
    if is_scatter:
        apart = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        sizes = iter(updates[0].shape[dim] for dim in numbers.update_window_dims)
        window = [1 if dim in apart else next(sizes) for dim in range(len(array.shape))]
        yield tuple(array.shape[dim] - window[dim] for dim in numbers.scatter_dims_to_operand_dims)
    else:
        yield tuple(array.shape[dim] - equation.params["slice_sizes"][dim] for dim in numbers.start_index_map)


def _is_loop(group: Group) -> bool:
    """Whether its operation goes over what it makes element by element."""
    return group.fuses or facts_of(group.equations[0].primitive).is_loop
