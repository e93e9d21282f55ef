"""What holds memory: one function per term, and how many bytes it holds per option over which program points.

A *term* takes an argument, a value as a group makes it, or a value as others read it, and yields `HeldBytes`. The
decorators enter it into the list of its kind; the problem counts every list. `lifetimes.py` says when values are there,
and the head of that file lists what holds memory. What one resharding holds depends on two choices at once, and stands
in `resharding_memory.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.model.equations import is_kernel_gradient
from autoshard.model.groups import Group, Use
from autoshard.model.lifetimes import FirstWrite, Lifetime, Span, around, repeats, use_span
from autoshard.model.pricing.cost_tables import (
    ArgumentOption,
    are_all_reduced,
    are_finished,
    copies_of,
    copy_bytes,
    homes_of,
)
from autoshard.model.pricing.memo import read_only
from autoshard.model.pricing.prices import PriceList
from autoshard.model.resharding_memory import ValueReader
from autoshard.model.strategies import REDUCE_SCATTER, Strategy
from autoshard.model.xla.convolutions import image_dims_of
from autoshard.model.xla.products import transposes
from autoshard.model.xla.units.scalar_unit import numbers_of_value
from autoshard.model.xla.units.work_numbers import known_keys, numbers_of
from autoshard.operations.reduce_scatter import scatters_second
from autoshard.program import Value
from autoshard.propagation.rules.windows import STENCIL, WRAPS


@dataclass(frozen=True)
class HeldBytes:
    """Bytes that something takes over a stretch of program points."""

    node: int  # whose options decide how many
    span: Span
    usage: np.ndarray  # bytes per option of the node
    in_heap: bool = True  # whether it lies among the temporaries, which have gaps
    may_be_on_chip: bool = True  # of temporaries: whether a chip's own memory may hold them instead
    is_one_buffer: bool = True  # of temporaries: whether it is no sum of several
    written: FirstWrite | None = None  # of a result's buffer
    delays: int = 0  # of a sum that waits for others: the bit of its group, in `FirstWrite.made_of`


@dataclass(frozen=True, eq=False)
class HeldArgument:
    """An argument, as terms of memory see it."""

    node: int
    value: Value
    options: tuple[ArgumentOption, ...]
    narrow: tuple[Group, ...]  # who reads fewer bits than others do, and alone reads the copies of narrow options
    uses: Sequence[tuple[Group, Use]]
    is_loop_buffer: bool  # whether a loop carries it on in its own buffer
    is_copied: bool  # whether it is donated and XLA copies it, since some use may come after what is written over it
    gradient: Group | None  # that makes its gradient: an all_reduce of this saves the copy
    returns: int  # how many results it is, that have buffers of their own
    replaced: FirstWrite | None  # where it is not donated: when what is returned for it is written
    moves: bool  # whether XLA copies it, since it takes another argument's place
    end: int  # the program point past all equations
    nodes: Callable[[Group], int]
    strategies: Callable[[Group], tuple[Strategy, ...]]
    prices: PriceList

    @cached_property
    def home_bytes(self) -> np.ndarray:
        """Bytes in the home layout, per option."""
        return self.prices.arrays.sizes(self.value, self.prices.memo.once(homes_of, self.options))

    @property
    def is_outside(self) -> bool:
        """Whether no copy of it lies in the chip's own memory."""
        return self.value.id in self.prices.places.outside

    def copies(self, spans: Sequence[Span], *, copied: bool, gradient: Group | None = None) -> Iterator[HeldBytes]:
        """What it holds beside its home over these spans: its gathered copy, or, if `copied`, XLA's own.

        XLA makes none while an all_reduce finishes the gradient.
        """
        memo, arrays = self.prices.memo, self.prices.arrays
        start, end = around(spans)
        layouts = memo.once(copies_of, self.options)
        for_all, for_narrow = (arrays.copy_sizes(self.value, layouts, readers) for readers in (None, self.narrow))
        own = self.home_bytes if copied and gradient is None else memo.once(np.zeros_like, self.home_bytes)
        size, on_chip = memo.once(copy_bytes, self.options, own, for_all, for_narrow), not self.is_outside
        yield HeldBytes(self.node, (start, end), size, may_be_on_chip=on_chip)
        if gradient is not None:  # as large as the argument, and split alike wherever no collective comes after
            made = gradient.outputs[0].value
            alone = [
                0 if strategy.finishes else arrays.local_bytes(made, strategy.output_layouts[0])
                for strategy in self.strategies(gradient)
            ]
            yield HeldBytes(self.nodes(gradient), (start, end), np.array(alone))


@dataclass(frozen=True, eq=False)
class HeldOutput:
    """A value that a group makes, as terms of memory see it."""

    node: int
    value: Value
    group: Group
    strategies: tuple[Strategy, ...]
    lifetime: Lifetime
    left: np.ndarray  # bytes per strategy, in the layout it is left in
    returned: np.ndarray  # the same if it is a result
    returns: int  # how many results it is that have buffers of their own, in the layout it is left in, all the time
    in_place: bool  # whether it is written into a buffer that is there anyway
    written: FirstWrite  # if it is a result
    points: Mapping[int, int]  # value id -> the point that makes it
    reads: Mapping[int, int]  # value id -> how often it is read, as a result of the program, too
    end: int  # the program point past all equations
    prices: PriceList

    @property
    def has_buffer(self) -> bool:
        """Whether its buffer is there all the time."""
        return bool(self.returns) or self.in_place

    @property
    def is_stored(self) -> bool:
        """Whether it has a buffer of its own while it is used, even where it is used as it was made."""
        return self.lifetime.stored and not self.has_buffer

    @property
    def may_be_on_chip(self) -> bool:
        """Whether the chip's own memory may hold it: numbers, what loops wait for, and what is sorted unread do not."""
        is_unread = self.lifetime.used is None and not self.returns
        return not self.least_bytes and not (is_unread and self.group.equations[0].primitive == "sort")

    @property
    def may_be_in_results(self) -> bool:
        """Whether it may lie where a result will: numbers in a TPU's memory lie apart."""
        return not self.least_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes that it takes as a temporary at least."""
        places, is_number = self.prices.places, math.prod(self.value.shape) == 1
        if self.value.id in places.outside and not is_number:
            return self.prices.backend.number_bytes
        if not is_number or self.group.is_idle or self.lifetime.is_start or self.value.id in places.registers:
            return 0
        decides = self.lifetime.used is None and self.value.trips > 1  # whether a loop begins is a number, too
        is_carried = self.group.equations[0].primitive == "scan_carry"
        return self.prices.backend.number_bytes * (numbers_of_value(self.value, is_carried=is_carried) + decides)

    def held(self, node: int, span: Span, usage: np.ndarray) -> HeldBytes:
        """Bytes of the value itself, as a temporary."""
        is_one_buffer = self.may_be_in_results
        return HeldBytes(node, span, usage, may_be_on_chip=self.may_be_on_chip, is_one_buffer=is_one_buffer)

    @cached_property
    def unfinished(self) -> np.ndarray:
        """Bytes per strategy of the unreduced result, which stands beside the finished one until it is reduced."""
        itemsizes = tuple(self.prices.itemsizes.summed(made.value) for made in self.group.outputs)

        def unfinished_bytes(strategies: tuple[Strategy, ...]) -> np.ndarray:
            return np.array([self._unfinished(strategy) if strategy.finishes else 0 for strategy in strategies])

        return self.prices.memo.once(unfinished_bytes, self.strategies, of=itemsizes)

    @cached_property
    def waits(self) -> np.ndarray:
        """Per strategy, whether it is reduced with all others at the end: combined reductions wait for the last one."""
        if self.group.handed_on_at is None:
            return np.zeros(len(self.strategies), bool)
        combined = self.left < self.prices.backend.combining.below_bytes
        return self.prices.memo.once(are_all_reduced, self.strategies) & combined

    @property
    def scatters_inside(self) -> np.ndarray:
        """Per strategy, whether a sum is reduced and scattered along another dim than the first that is made.

        Products that are scattered along dims of their second operand are made with that dim first.
        """
        product, made = self.group.equations[0], self.group.outputs[0].value
        is_product = product.primitive == "dot_general" and made in product.outputs

        def is_first(dim: int) -> bool:
            numbers = product.params["dimension_numbers"] if is_product else None
            return dim == 0 or (is_product and scatters_second(numbers, len(product.inputs[0].shape), dim))

        ends = [[one for one in strategy.finishes if one.kind == REDUCE_SCATTER] for strategy in self.strategies]
        inner = [
            any(
                {*one.axes} & {*axes} and not is_first(dim)
                for one in found
                for dim, axes in enumerate(strategy.output_layouts[one.output])
            )
            for found, strategy in zip(ends, self.strategies, strict=True)
        ]
        return np.array(inner, bool)

    @property
    def operand_bytes(self) -> np.ndarray:
        """Bytes of all operands together, per strategy."""
        values = [use.value for use in self.group.uses]
        local_bytes = self.prices.arrays.local_bytes
        return np.array([sum(map(local_bytes, values, strategy.operand_layouts)) for strategy in self.strategies])

    @property
    def numbers_beside(self) -> int:
        """How many numbers the operations of its group work with on a TPU core."""
        known = known_keys(self.group)
        drawn = [one for one in self.group.equations if not one.inputs or id(one.inputs[0]) not in known]
        whole = [all(self.reads.get(made.id) for made in one.outputs) for one in drawn]
        pairs, is_result = zip(drawn, whole, strict=True), bool(self.returns)
        return sum(numbers_of(one, is_read_whole=is_whole, is_result=is_result) for one, is_whole in pairs)

    @property
    def is_first(self) -> bool:
        """Whether it is the first that its group makes: what the group holds once is counted with it."""
        return self.value is self.group.outputs[0].value

    def with_halos(self, strategy: Strategy) -> int:
        """Bytes of the halos under a strategy, and of the operands that they are put around for a window."""
        received = sum(self.prices.halo_bytes(self.group, strategy))
        if self.group.equations[0].primitive == STENCIL:
            return received
        uses = {halo.use for halo in strategy.halos}
        if any(self.group.equations[0].params.get(WRAPS, ())):  # along whole dims, too
            uses.add(0)
        local_bytes = self.prices.arrays.local_bytes
        return received + sum(local_bytes(self.group.uses[use].value, strategy.operand_layouts[use]) for use in uses)

    def _unfinished(self, strategy: Strategy) -> int:
        sizes = self.prices.finish_bytes(self.group, strategy)
        mesh = self.prices.mesh
        pieces = [f.devices(mesh) if f.kind == REDUCE_SCATTER else 1 for f in strategy.finishes]
        return max((size * count for size, count in zip(sizes, pieces, strict=True)), default=0)


@dataclass(frozen=True, eq=False)
class ReadValue:
    """A value that others read, as terms of memory see it."""

    made: HeldOutput
    used: Span  # from the first to past the last use
    readers: Sequence[ValueReader]
    holder: int  # the node that decides in which layout it is read
    sizes: np.ndarray  # bytes per option of that node
    is_overwritten: bool  # whether its one reader writes a result over it
    strategies: Callable[[Group], tuple[Strategy, ...]]


ArgumentTerm = Callable[[HeldArgument], Iterator[HeldBytes]]
OutputTerm = Callable[[HeldOutput], Iterator[HeldBytes]]
ReadTerm = Callable[[ReadValue], Iterator[HeldBytes]]
ARGUMENT_TERMS: list[ArgumentTerm] = []
OUTPUT_TERMS: list[OutputTerm] = []
READ_TERMS: list[ReadTerm] = []


def argument_term(term: ArgumentTerm) -> ArgumentTerm:
    """Counts a term for every argument."""
    ARGUMENT_TERMS.append(term)
    return term


def output_term(term: OutputTerm) -> OutputTerm:
    """Counts a term for every value that a group makes."""
    OUTPUT_TERMS.append(term)
    return term


def read_term(term: ReadTerm) -> ReadTerm:
    """Counts a term for every value that others read."""
    READ_TERMS.append(term)
    return term


@argument_term
def home(argument: HeldArgument) -> Iterator[HeldBytes]:
    """The argument itself, all the time."""
    yield HeldBytes(argument.node, (0, argument.end), argument.home_bytes, in_heap=False)


@argument_term
def returned_arguments(argument: HeldArgument) -> Iterator[HeldBytes]:
    """A copy for every result that is the argument itself, all the time; it is written when all else is done."""
    if argument.returns:
        whole = (0, argument.end)
        written = FirstWrite(argument.end - 1)
        yield HeldBytes(argument.node, whole, argument.home_bytes * argument.returns, in_heap=False, written=written)


@argument_term
def replacements(argument: HeldArgument) -> Iterator[HeldBytes]:
    """What is returned in its place, if it is not donated, all the time: its buffer lies as the argument does."""
    if argument.replaced:
        whole = (0, argument.end)
        yield HeldBytes(argument.node, whole, argument.home_bytes, in_heap=False, written=argument.replaced)


@argument_term
def moved_arguments(argument: HeldArgument) -> Iterator[HeldBytes]:
    """A copy of the argument while it is written over another argument."""
    if argument.moves:
        yield HeldBytes(argument.node, (argument.end - 1, argument.end), argument.home_bytes)


@argument_term
def copies(argument: HeldArgument) -> Iterator[HeldBytes]:
    """A second copy of the argument while it is used: gathered, transposed, as images lie, or because it is donated."""
    prices, uses = argument.prices, argument.uses
    loops = [loop for _, use in uses if (loop := use.equation.loop)]
    spans = loops if argument.is_loop_buffer else list(itertools.starmap(use_span, uses))
    if prices.backend.runs_ready_first and spans and (start := around(spans)[0]):
        yield from argument.copies([(0, start)], copied=False)
    if argument.is_loop_buffer:  # a copy of it is the loop's own buffer
        yield from argument.copies(loops, copied=argument.is_copied)
    elif prices.backend.transposes_operands and any(transposes(use) for _, use in uses):
        yield from argument.copies([(0, 0), *spans], copied=True)
    elif prices.backend.tile and (minor := next(filter(None, (image_dims_of(use) for _, use in uses)), None)):
        images = [prices.arrays.image_bytes(argument.value, option.copy, minor) for option in argument.options]
        yield HeldBytes(argument.node, around(spans), np.array(images))
    elif uses:
        yield from argument.copies(spans, copied=argument.is_copied, gradient=argument.gradient)


@output_term
def waiting_sums(output: HeldOutput) -> Iterator[HeldBytes]:
    """What is reduced with all others, until the last of these is made, and then the reduced beside the unreduced."""
    end = output.group.handed_on_at
    if end is not None:
        runs_last = output.prices.backend.sums.runs_last and output.group.can_wait
        start = end - 1 if runs_last else output.group.point
        # a result has a buffer of its own
        left = np.maximum(output.left, output.least_bytes) * (not output.has_buffer) * output.waits
        unfinished = np.where(output.unfinished, np.maximum(output.unfinished, output.least_bytes), 0) * output.waits
        on_chip, delays = output.may_be_on_chip, 1 << output.group.index
        yield HeldBytes(output.node, (start, end), unfinished, may_be_on_chip=on_chip, delays=delays)
        wider = np.maximum(left - unfinished, 0)
        yield HeldBytes(output.node, (start, end - 1), wider, may_be_on_chip=on_chip, is_one_buffer=False)
        yield HeldBytes(output.node, (end - 1, end), left, may_be_on_chip=on_chip, is_one_buffer=False)


@output_term
def unfinished_sums(output: HeldOutput) -> Iterator[HeldBytes]:
    """The unreduced result, until the reduced one is used: XLA runs reductions that do not wait for others together."""
    if np.count_nonzero(output.unfinished):
        point = output.group.point
        first = output.lifetime.used[0] if output.lifetime.used else point
        yield HeldBytes(output.node, (point, max(point + 1, first)), output.unfinished * ~output.waits)


@output_term
def turned_sums(output: HeldOutput) -> Iterator[HeldBytes]:
    """A copy of what is reduced and scattered along an inner dim: XLA's CPU backend makes that dim the first."""
    if output.prices.backend.transposes_operands and np.count_nonzero(output.unfinished):
        span = output.group.point, output.group.point + 1
        yield HeldBytes(output.node, span, output.unfinished * output.scatters_inside * ~output.waits)


@output_term
def made_values(output: HeldOutput) -> Iterator[HeldBytes]:
    """The value as it is made, until it is first used."""
    if output.lifetime.made and not output.has_buffer:
        usage = np.maximum(output.left, output.least_bytes) * ~output.waits
        yield output.held(output.node, output.lifetime.made, usage)


@output_term
def repeated_operands(output: HeldOutput) -> Iterator[HeldBytes]:
    """What XLA writes out at the full size of a product, ahead of the reduction that the product is folded into."""
    for use in repeats(output.group):
        yield HeldBytes(output.node, (output.points.get(use.value.id, 0), output.group.point + 1), output.left)


@output_term
def kernel_gradient_operands(output: HeldOutput) -> Iterator[HeldBytes]:
    """Transposed copies of both operands of a convolution that makes a kernel's gradient, while it runs."""
    if output.prices.backend.transposes_operands and is_kernel_gradient(output.group.equations[0]):
        span = output.group.point, output.group.point + 1
        yield HeldBytes(output.node, span, output.operand_bytes, is_one_buffer=False)


@output_term
def halos(output: HeldOutput) -> Iterator[HeldBytes]:
    """Operands with the halos that a device has received around them."""
    if output.group.reaches and output.is_first:
        usage = np.array([output.with_halos(strategy) for strategy in output.strategies])
        yield HeldBytes(output.node, (output.group.point, output.group.point + 1), usage, is_one_buffer=False)


@output_term
def regions(output: HeldOutput) -> Iterator[HeldBytes]:
    """What devices hold while they run a call of an operation, or a `shard_map`, on their shards."""
    (equation, *_) = output.group.equations
    key = output.prices.region_key(equation)
    if not (output.is_first and key):
        return

    def workspaces(strategies: Sequence[Strategy]) -> np.ndarray:
        found = (output.prices.region(output.group, strategy) for strategy in strategies)
        return read_only(np.array([0.0 if region is None else region.workspace for region in found]))

    types = tuple(value.dtype for value in equation.inputs)
    usage = output.prices.memo.once(workspaces, output.strategies, of=(key, types))
    yield HeldBytes(output.node, (output.group.point, output.group.point + 1), usage, is_one_buffer=False)


@output_term
def results(output: HeldOutput) -> Iterator[HeldBytes]:
    """A result that takes no argument's place, all the time: XLA reserves its buffer for the whole program.

    Further results of the same value are copies.
    """
    if output.returns:
        whole = (0, output.end)
        yield HeldBytes(output.node, whole, output.returned, in_heap=False, written=output.written)
        if output.returns > 1:
            copied = output.returned * (output.returns - 1)
            yield HeldBytes(output.node, whole, copied, in_heap=False, written=FirstWrite(output.end - 1))


@read_term
def sources_of_late_sums(read: ReadValue) -> Iterator[HeldBytes]:
    """What is read by a sum or a product that is computed last, once other readers have read it, until the end.

    If it is made again there, that is what it is made of.
    """
    output, sums = read.made, read.made.prices.backend.sums
    if output.has_buffer or not (sums.runs_last or sums.loops_first):
        return
    readers = [(reader, reader.group) for reader in read.readers if reader.group]
    waiting = [one for one in readers if (one[1].can_wait if sums.runs_last else one[1].is_late)]
    if not waiting:
        return
    reader, last = max(waiting, key=lambda one: one[1].point)
    summed = output.prices.memo.once(are_finished, read.strategies(last)) == sums.runs_last
    end = last.handed_on_at if last.handed_on_at is not None else output.end
    value, is_stored = output.value, output.lifetime.stored
    for source in [value] if is_stored else output.prices.instead.get(value.id, ()):
        if source.shape == value.shape and not source.from_outside:
            start = read.used[1] if is_stored else output.group.last_point + 1
            yield HeldBytes(reader.node, (start, end - 1), output.prices.arrays.sizes(source, reader.wants) * summed)


@read_term
def read_values(read: ReadValue) -> Iterator[HeldBytes]:
    """The value as it is read, from its first to its last use."""
    output, (start, end) = read.made, read.used
    if output.is_stored:
        span, usage = (start, end - read.is_overwritten), np.maximum(read.sizes, output.least_bytes)
        yield output.held(read.holder, span, usage)
