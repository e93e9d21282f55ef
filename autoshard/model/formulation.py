"""Program, rules, mesh and topology in; the `Problem`, and the way back from its choices, out.

Nodes of the problem, in this order:

* one per argument. Option: its home layout, and the layout of one resharded copy that its users share (or none);
* one per group of equations (`groups.py`). Option: a `Strategy`;
* one per value that several groups read. Option: the layout in which they share it, so that a value resharded the
  same way for two readers is resharded, and paid, once; or the layout of a copy for those who read it in fewer bits,
  while the others read it as it is left.

Node costs are the seconds of the group per step; edge costs the seconds of resharding a value from how it is left to
how it is wanted. A result that takes an argument's place in the next step ends in that argument's home layout.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import ConflictError
from autoshard.layout import Layout, MeshShape, layouts_of, replicated, spec_of, without_axes, without_idle_axes
from autoshard.mesh.topology import Topology
from autoshard.model.equations import is_kernel_gradient, stays_whole
from autoshard.model.grouping import groups_of
from autoshard.model.groups import Group
from autoshard.model.lifetimes import (
    HEAP,
    Holding,
    Span,
    aliased,
    copied_when_donated,
    holding,
    looped,
    repeats,
    updated_in_loops,
    use_span,
)
from autoshard.model.prices import Priced, Prices
from autoshard.model.resharding_memory import Change, Reader, uses_of
from autoshard.model.strategies import ALL_REDUCE, REDUCE_SCATTER, Strategy
from autoshard.model.weights import entering_loops, made_of_state
from autoshard.model.xla.backends import CPU, Backend
from autoshard.model.xla.convolutions import image_dims, image_dims_of, scratch_copies
from autoshard.model.xla.fusion import read_through
from autoshard.model.xla.loop_memory import kept_inside, turns_that_read
from autoshard.model.xla.rounding import widths_of
from autoshard.model.xla.slicing import stacked_beside
from autoshard.model.xla.transposes import transposes
from autoshard.program import Program, Value
from autoshard.propagation.registry import rule_of
from autoshard.propagation.rule import Rule
from autoshard.solver.problem import Edge, Live, Problem


@dataclass(frozen=True)
class Kept:
    """One option of an argument."""

    home: Layout
    copy: Layout  # what its users see; equal to home: no copy


@dataclass(frozen=True)
class Shared:
    """The node that decides in which layout several groups read one value."""

    node: int
    layouts: tuple[Layout, ...]  # its options


@dataclass(frozen=True, eq=False)
class Formulation:
    """The problem, and what each of its nodes and options means."""

    program: Program
    mesh: Mapping[str, int]  # without axes of one device
    prices: Prices
    groups: Sequence[Group]
    arguments: Sequence[tuple[Kept, ...]]  # per argument, its options
    priced: Sequence[Priced]  # per group
    shared: Mapping[int, Shared]  # value id -> its node
    readers: Mapping[int, Sequence[Reader]]  # value id -> who wants it
    changes: Sequence[Change]  # what may hold more, beside the lives
    problem: Problem
    fingerprint: str = ""  # of the program as it was traced, branches for other platforms included

    def peak_bytes(self, choice: Sequence[int]) -> int:
        """The most bytes that are in use on one device at any program point, both ends of each resharding included."""
        return int(self._in_use(choice).max())

    def changes_over(self, choice: Sequence[int], limit: float) -> list[Change]:
        """What is resharded while more than `limit` bytes are in use, and what is alike in other layers."""
        over = self._in_use(choice) > limit
        kinds = set()
        for change in self.changes:
            extra = change.extra(*change.layouts(choice), self.prices)
            start = change.starts(extra)
            if (extra.first and over[start]) or (extra.then and over[start : change.used[1]].any()):
                kinds.add(change.kind)
        return [change for change in self.changes if change.kind in kinds]

    def _in_use(self, choice: Sequence[int]) -> np.ndarray:
        """Bytes that are in use on one device, per program point."""
        change = np.zeros(len(self.program.equations) + 2)
        for live in self.problem.lives:
            change[live.start] += live.usage[choice[live.node]]
            change[live.end] -= live.usage[choice[live.node]]
        for (start, end), extra in self._resharding_lives(choice):
            change[start] += extra * HEAP
            change[end] -= extra * HEAP
        return change.cumsum()

    def _resharding_lives(self, choice: Sequence[int]) -> Iterator[tuple[Span, int]]:
        """What resharded values hold beside what is counted anyway, and how much less what they are made of."""
        extras = [change.extra(*change.layouts(choice), self.prices) for change in self.changes]
        both = list(zip(self.changes, extras, strict=True))
        at_once = (change for change, extra in both if extra.at_once)
        last = self._last_runs(
            {(change.value.id, reader.node) for change in at_once for reader in change.copied_to(choice)}
        )
        for change, extra in both:
            left, wanted = change.layouts(choice)
            end = change.used[1]
            if change.counts_wanted:
                yield (
                    (change.used_until(change.users, last), end),
                    -self.prices.arrays.local_bytes(change.value, wanted),
                )
            elif left != wanted:
                end = change.used_until(change.copied_to(choice), last)
            start = change.starts(extra)
            yield (start, start + 1), extra.first
            yield (start, end), extra.then

    def _last_runs(self, moved: Container[tuple[int, int]]) -> list[int]:
        """Per group the last point at which it runs.

        Args:
            moved: (value, node that reads it) where a copy is read that is made as soon as the value is.
        """
        last = [group.last for group in self.groups]
        for group in reversed(self.groups):
            if group.repeated:
                readers = ((made.value.id, reader) for made in group.made for reader in self.readers[made.value.id])
                again = (last[r.group.index] for value, r in readers if r.group and (value, r.node) not in moved)
                last[group.index] = max(again, default=group.point)
        return last

    def group_node(self, group: Group) -> int:
        return len(self.arguments) + group.index


def formulate(
    program: Program,
    rules: Sequence[Rule],
    mesh: MeshShape,
    topology: Topology,
    *,
    memory: float | None = None,
    fixed: Mapping[int, Layout] | None = None,
    beside: Mapping[int, frozenset[str]] | None = None,
    backend: Backend = CPU,
) -> Formulation:
    """The sharding problem of `program`.

    Args:
        program: the traced step.
        rules: one per equation.
        mesh: axis -> devices.
        topology: what the machine costs.
        memory: bytes per device that may be in use at any point; None for no limit.
        fixed: argument index -> layout that it must have.
        beside: argument index -> mesh axes that may split it further than is fixed.
        backend: the compiler that will make a program of it.
    """
    mesh, traced = {axis: size for axis, size in mesh.items() if size > 1}, program
    program = traced.running_on(backend.lowers_as)
    if program is not traced:
        pairs = zip(program.equations, rules, strict=True)
        rules = [rule_of(equation) if equation.primitive == "idle" else rule for equation, rule in pairs]
    groups = groups_of(program, rules, backend, mesh)
    widths, weights = widths_of(program, groups, backend.rounding), made_of_state(program, groups)
    prices = Prices(
        mesh,
        topology,
        widths,
        backend,
        weights=weights,
        entering=entering_loops(groups, weights),
        stacked=stacked_beside(program),
        kept=kept_inside(program, backend.loop_memory.keeps_sums) if backend.loop_memory.bytes else None,
        turns=turns_that_read(program) if backend.loop_memory.fetched_share else None,
        instead=read_through(groups),
        images=image_dims(program),
    )
    found = _Formulator(program, groups, prices, fixed or {}, backend, beside or {}).formulation(memory)
    return replace(found, fingerprint=traced.fingerprint)


class _Formulator:
    def __init__(
        self,
        program: Program,
        groups: list[Group],
        prices: Prices,
        fixed: Mapping[int, Layout],
        backend: Backend,
        beside: Mapping[int, frozenset[str]],
    ):
        self.beside = beside
        self.program, self.groups, self.prices, self.fixed, self.backend = program, groups, prices, fixed, backend
        self.priced = [prices.group(group) for group in groups]
        self.costs: list[np.ndarray] = []
        self.names: list[str] = []
        self.edges: list[Edge] = []
        self.lives: list[Live] = []
        self.changes: list[Change] = []
        self.shared: dict[int, Shared] = {}
        self.readers: dict[int, list[Reader]] = defaultdict(list)
        self.start = {made.value.id: group.point for group in groups for made in group.made}
        self.looped = looped(program)

    def formulation(self, memory: float | None) -> Formulation:
        first_group = len(self.program.arguments)
        for group, priced in zip(self.groups, self.priced, strict=True):
            for i, use in enumerate(group.uses):
                self.readers[use.value.id].append(Reader(first_group + group.index, priced.wants[i], group, use))
        homes = self._homes()
        for argument, result in self.program.carried.items():
            value = self.program.results[result]
            if value is not self.program.arguments[argument]:
                assert isinstance(value, Value), "a number takes no argument's place"
                self.readers[value.id].append(Reader(argument, self._homes_of(homes[argument])))
        self._check_host_memory(homes)
        self._add_arguments(homes)
        self._add_groups()
        lives = tuple(live for live in self.lives if live.usage.any())
        problem = Problem(tuple(self.costs), tuple(self.edges), lives, memory, names=tuple(self.names))
        return Formulation(
            program=self.program,
            mesh=self.prices.mesh,
            prices=self.prices,
            groups=self.groups,
            arguments=homes,
            priced=self.priced,
            shared=self.shared,
            readers=self.readers,
            changes=self.changes,
            problem=problem,
        )

    # Arguments.

    def _homes(self) -> list[tuple[Kept, ...]]:
        return [self._options_of_argument(i, value) for i, value in enumerate(self.program.arguments)]

    def _options_of_argument(self, index: int, value: Value) -> tuple[Kept, ...]:
        mesh, fixed = self.prices.mesh, None
        homes = [replicated(len(value.shape))] if stays_whole(value) else layouts_of(value.shape, mesh)
        if index in self.fixed:
            fixed = without_idle_axes(self.fixed[index], mesh)
            if stays_whole(value) and fixed not in homes:
                raise ConflictError(f"{value} cannot be {spec_of(fixed)}: XLA's collectives mix up numbers of two bits")
            if fixed not in homes:
                raise ConflictError(
                    f"{value} cannot be {spec_of(self.fixed[index])}: a fixed sharding must split every dim evenly, "
                    f"with its axes in the order of the mesh {dict(mesh)}"
                )
            if axes := self.beside.get(index):
                homes, fixed = [home for home in homes if without_axes(home, axes) == fixed], None
        readers = self.readers[value.id]
        # a home that elementwise readers like is among the options
        apart = tuple(fixed is None and _computes_on_shards(reader) for reader in readers)
        # what a constraint says has to be reached, however
        said = tuple(bool(r.group and r.group.given and not alone) for r, alone in zip(readers, apart, strict=True))

        def options(*wants: tuple[Layout, ...]) -> tuple[Kept, ...]:
            wanted = dict.fromkeys(itertools.chain(*itertools.compress(wants, map(operator.not_, apart))))
            elementwise = list(itertools.compress(wants, apart))
            reached = set(itertools.chain(*itertools.compress(wants, said)))
            found = []
            for home in homes if fixed is None else [fixed]:
                found.append(Kept(home, home))
                if not value.on_host:
                    # ... but of one in whose shards it cannot compute: rows, of which it makes batches
                    unread = [want for want in elementwise if not any(_gathers_to(one, home) for one in want)]
                    copies = dict.fromkeys(itertools.chain(wanted, *unread))
                    read = [copy for copy in copies if _gathers_to(home, copy) or copy in reached]
                    found += [Kept(home, copy) for copy in read if copy != home]
            return tuple(found)

        what = value.shape, value.on_host, fixed, said, apart, tuple(homes)
        return self.prices.memo.once(options, *(reader.wants for reader in readers), of=what)

    def _check_host_memory(self, homes: Sequence[tuple[Kept, ...]]) -> None:
        """
        Raises:
            ConflictError: an array in the host's memory, where nothing is resharded, is said to lie in two ways.
        """
        made = [
            (one.value, priced.leaves[i], _said(group, priced.leaves[i]))
            for group, priced in zip(self.groups, self.priced, strict=True)
            for i, one in enumerate(group.made)
        ]
        for i, value in enumerate(self.program.arguments):
            fixed = [f"fixed= wants {spec_of(self.fixed[i])}"] if i in self.fixed else []
            made.append((value, self._homes_of(homes[i]), fixed))
        for value, layouts, said in made:
            readers = self.readers[value.id] if value.on_host else ()
            if not set(layouts).intersection(*(reader.wants for reader in readers)):
                said += itertools.chain(*(_said(reader.group, reader.wants) for reader in readers))
                raise ConflictError(
                    f"{value} lies in the host's memory, where nothing is resharded, but {', and '.join(said)}.\n"
                    "Say one of them only, or move it to the device's memory in between (jax.device_put)."
                )

    def _homes_of(self, kepts: tuple[Kept, ...]) -> tuple[Layout, ...]:
        return self.prices.memo.once(_homes, kepts)

    def _copies_of(self, kepts: tuple[Kept, ...]) -> tuple[Layout, ...]:
        return self.prices.memo.once(_copies, kepts)

    def _add_arguments(self, options: list[tuple[Kept, ...]]) -> None:
        for index, value in enumerate(self.program.arguments):
            self.names.append(value.name)
            kepts = options[index]
            told = value.id in self.prices.weights, value.id in self.prices.ahead
            what = value.shape, value.on_host, *told, self.prices.widths.moving(value), self.prices.turns.get(value.id)
            stored = None  # a size in memory, if it arrives anew every step
            if index not in self.program.carried:
                stored = self.prices.widths.stored(value)

            def seconds(kepts: tuple[Kept, ...], value: Value = value, stored: int | None = stored) -> np.ndarray:
                hops = [(value, kept.home, kept.copy) for kept in kepts]
                costs = np.array([self.prices.exposed(*hop) + self.prices.memory_seconds(*hop) for hop in hops])
                return costs if stored is None else costs + [self.prices.writing(value, kept.home) for kept in kepts]

            self.costs.append(self.prices.memo.once(seconds, kepts, of=(*what, stored)))
        copied = copied_when_donated(self.program, self.groups)
        in_loops = set(self.looped.values())
        for index, value in enumerate(self.program.arguments):
            kepts = options[index]
            for reader in self.readers[value.id]:
                self._connect(index, reader.node, self._argument_table(value, kepts, reader))
            at_home = self.prices.arrays.sizes(value, self._homes_of(kepts))
            self.lives.append(Live(index, 0, len(self.program.equations), at_home))
            uses = uses_of(self.readers[value.id])
            if index in in_loops:  # a copy of it is the loop's own buffer
                self._hold_copies(
                    index, kepts, [loop for _, use in uses if (loop := use.equation.loop)], index in copied, None
                )
            elif self.backend.transposes_operands and any(transposes(use) for _, use in uses):
                self._hold_copies(index, kepts, [(0, 0), *itertools.starmap(use_span, uses)], True, None)
            elif self.backend.tile and (minor := next(filter(None, (image_dims_of(use) for _, use in uses)), None)):
                self._hold_images(index, kepts, minor, list(itertools.starmap(use_span, uses)))
            elif uses:
                spans = list(itertools.starmap(use_span, uses))
                self._hold_copies(index, kepts, spans, index in copied, copied.get(index))

    def _hold_copies(
        self, index: int, kepts: tuple[Kept, ...], spans: Sequence[Span], copied: bool, gradient: Group | None
    ) -> None:
        """What an argument holds beside its home while it is used: its gathered copy, or, if `copied`, XLA's own.

        XLA makes none while an all_reduce finishes the gradient.
        """
        value = self.program.arguments[index]
        start, end = min(start for start, _ in spans), max(end for _, end in spans)
        at_home = self.prices.arrays.sizes(value, self._homes_of(kepts))
        gathered = self.prices.arrays.copy_sizes(value, self._copies_of(kepts))
        own = at_home if copied and gradient is None else self.prices.memo.once(np.zeros_like, at_home)
        self._hold(index, start, end, self.prices.memo.once(_held, kepts, own, gathered))
        if gradient is not None:  # as large as the argument, and split alike wherever no collective comes after
            made = gradient.made[0].value
            alone = [
                0 if strategy.finishes else self.prices.arrays.local_bytes(made, strategy.leaves[0])
                for strategy in self._strategies(gradient)
            ]
            self._hold(len(self.program.arguments) + gradient.index, start, end, np.array(alone))

    def _hold_images(self, index: int, kepts: tuple[Kept, ...], minor: tuple[int, int], spans: Sequence[Span]) -> None:
        """What an argument holds beside its home while convolutions read it, as images lie."""
        value = self.program.arguments[index]
        laid_out = np.array([self.prices.arrays.image_bytes(value, kept.copy, minor) for kept in kepts])
        self._hold(index, min(start for start, _ in spans), max(end for _, end in spans), laid_out)

    def _argument_table(self, value: Value, kepts: tuple[Kept, ...], reader: Reader) -> np.ndarray:
        """Seconds from each option to each want. Without a copy only slices are allowed: a copy must be counted."""
        stays = self.prices.stays(value, self._homes_of(kepts), reader.wants)
        from_copy = self.prices.table(value, self._copies_of(kepts), reader.wants)
        return self.prices.memo.once(_from_argument, kepts, reader.wants, stays, from_copy)

    # Groups.

    def _add_groups(self) -> None:
        first_group = len(self.program.arguments)
        aliases = aliased(self.program)
        outputs = {
            value.id for i, value in enumerate(self.program.results) if isinstance(value, Value) and i not in aliases
        }
        in_place = {result.id for i in aliases if isinstance(result := self.program.results[i], Value)}
        in_place |= self.looped.keys() | updated_in_loops(self.program, self.groups)
        for group, priced in zip(self.groups, self.priced, strict=True):
            self.names.append(str(group.equations[-1]))
            self.costs.append(priced.costs)
        for group, priced in zip(self.groups, self.priced, strict=True):
            for i, made in enumerate(group.made):
                self._add_value(first_group + group.index, group, made.value, priced.leaves[i], outputs, in_place)

    def _add_value(self, node: int, group: Group, value: Value, leaves, outputs: set[int], in_place: set[int]) -> None:
        readers = self.readers[value.id]
        held = holding(value, group, uses_of(readers))
        kept = value.id in outputs or value.id in in_place  # a result, whose buffer is there all the time
        left = self.prices.arrays.sizes(value, leaves)
        self._hold_made(node, group, held, left, kept)
        if value.id in outputs:
            self.lives.append(Live(node, 0, len(self.program.equations), left))
        if not readers:
            return
        narrow = self._narrow_readers(readers, value)
        apart = self.prices.memo.once(_gathered, leaves, *(reader.wants for reader in readers)) if narrow else ()
        holder, wants = self._connect_readers(readers, value, narrow, apart, group.point if group.repeated else None)
        alone = _copied_for(readers[0]) if len(readers) == 1 else None
        table = self.prices.table(value, leaves, wants, alone)
        if apart:
            narrow_table = self.prices.table(value, leaves, wants, narrow)
            table = self.prices.memo.once(_with_copies_apart, table, narrow_table, leaves, apart)
        if group.is_view:  # what it views can as well be resharded, and is counted
            stays = self.prices.stays(value, leaves, wants)
            if any(reader.group and reader.group.given for reader in readers):  # but not to what only it has dims for
                stays = self.prices.memo.once(_or_unlike, stays, leaves, wants)
            table = self.prices.memo.once(_only_where, stays, table)
        if group.hoisted is not None:
            table = table + self._unhoisted(group, value, leaves, wants)
        self._connect(node, holder, table)
        if held.used is None:
            return
        if self.backend.sums.runs_last and not kept:
            self._hold_for_last(value, group, readers, held)
        stored = held.stored and not kept
        if stored:
            start, end = held.used
            overwritten = self.backend.fusion.overwrites_operands and self._is_overwritten(value, readers)
            self._hold(holder, start, end - overwritten, self.prices.arrays.sizes(value, wants))
        hop = (node, leaves), (holder, wants)
        fused = stored and any(reader.group.fuses for reader in readers if reader.group)
        made = group.point if group.repeated else None
        self.changes.append(Change(value, held.used, *hop, kept, stored, fused, readers, alone, made))

    def _is_overwritten(self, value: Value, readers: Sequence[Reader]) -> bool:
        """Whether its one reader is elementwise and writes a result over it: over the first operand that it can."""
        group = readers[0].group
        if len(readers) > 1 or group is None or not group.fuses or group.repeated:
            return False
        made = {one.value.bytes for one in group.made}
        operands = (use.value for use in group.uses if len(self.readers[use.value.id]) == 1)
        return next((one is value for one in operands if not one.from_outside and one.bytes in made), False)

    def _hold_for_last(self, value: Value, group: Group, readers: Sequence[Reader], held: Holding) -> None:
        """What those that can wait still hold of a value, or of what it is made again of, once others have read it."""
        waiting = [(reader, reader.group) for reader in readers if reader.group and reader.group.can_wait]
        if not waiting:
            return
        reader, last = max(waiting, key=lambda one: one[1].point)
        summed = self.prices.memo.once(_finished, self._strategies(last))
        end = last.ends if last.ends is not None else len(self.program.equations)
        for source in [value] if held.stored else self.prices.instead.get(value.id, ()):
            if source.shape == value.shape and not source.from_outside:
                start = group.last + 1
                if held.stored:
                    assert held.used is not None, "somebody waits for it"
                    start = held.used[1]
                self._hold(reader.node, start, end - 1, self.prices.arrays.sizes(source, reader.wants) * summed)

    def _unhoisted(self, group: Group, value: Value, leaves, wants) -> np.ndarray:
        """Seconds, at most, to reduce in every turn of a loop what is not added up in the layout it is in."""
        axes = tuple(self.prices.mesh)
        assert group.hoisted is not None, "only what is added up is asked for"
        again = self.prices.all_reduce(axes, value.bytes) * (group.trips - group.hoisted)
        return np.array([[0.0 if left == want else again for want in wants] for left in leaves])

    def _connect_readers(
        self,
        readers: Sequence[Reader],
        value: Value,
        narrow: Container[Group],
        apart: Sequence[tuple[Layout, Layout]],
        made: int | None,
    ) -> tuple[int, tuple[Layout, ...]]:
        """The node that decides in which layout the readers of a value see it, and that layout per option.

        Several readers get a node between them and the value; a single one decides for itself.

        Args:
            narrow: who reads fewer bits of the value than others do.
            apart: copies that only those read, each an option behind the others: how the value is left, and the copy.
            made: the point that makes the value, if it is not stored until it is used.
        """
        if len(readers) == 1:
            return readers[0].node, readers[0].wants
        wants = self.prices.memo.once(_any_of, *(reader.wants for reader in readers))
        if apart:
            wants = self.prices.memo.once(_and_copies_apart, wants, apart)
        holder = len(self.costs)
        self.shared[value.id] = Shared(holder, wants)
        self.costs.append(np.zeros(len(wants)))
        self.names.append(f"{value} shared by {len(readers)} readers")
        busy = sum(not _elementwise(reader) for reader in readers)
        for reader in readers:
            copied_for = _copied_for(reader)
            table = self.prices.table(value, wants, reader.wants, copied_for)
            if _elementwise(reader) or busy > 1:  # XLA merges equal all_gathers, so the copy that grows is shared
                sizes = self.prices.arrays.sizes(value, wants), self.prices.arrays.sizes(value, reader.wants)
                table = self.prices.memo.once(_without_growth, table, *sizes)
            if apart and reader.group not in narrow:
                table = self.prices.memo.once(_without_copies_apart, table, reader.wants, apart)
            self._connect(holder, reader.node, table)
            if reader.group is not None and reader.use is not None:
                used = use_span(reader.group, reader.use)
                hop = (holder, wants), (reader.node, reader.wants)
                self.changes.append(Change(value, used, *hop, True, False, False, [reader], copied_for, made))
        return holder, wants

    def _narrow_readers(self, readers: Sequence[Reader], value: Value) -> tuple[Group, ...]:
        """Those of several readers for whom alone a copy is smaller than one for all."""
        if len(readers) == 1:
            return ()
        size, groups = self.prices.widths.moving(value), (reader.group for reader in readers)
        return tuple(group for group in groups if group and self.prices.widths.moving(value, [group]) < size)

    def _hold_made(self, node: int, group: Group, held: Holding, left: np.ndarray, kept: bool) -> None:
        """What a group holds to make a value of `left` bytes per strategy, and until the value is first used."""
        widths = tuple(self.prices.widths.of(made.value) for made in group.made)

        def bytes_unfinished(strategies: tuple[Strategy, ...]) -> np.ndarray:
            return np.array([self._unfinished(group, strategy) for strategy in strategies])

        strategies = self._strategies(group)
        unfinished = self.prices.memo.once(bytes_unfinished, strategies, of=widths)
        waits = np.zeros(len(strategies), bool)
        if (end := group.ends) is not None:  # reductions that XLA combines into one wait for the last of them
            waits = self.prices.memo.once(_all_reduced, strategies) & (left < self.backend.combining.below_bytes)
            start = end - 1 if self.backend.sums.runs_last and group.can_wait else group.point
            self._hold(node, start, end - 1, np.maximum(left, unfinished) * waits)
            self._hold(node, end - 1, end, (left + unfinished) * waits)
        first = held.used[0] if held.used else group.point
        self._hold(node, group.point, max(group.point + 1, first), unfinished * ~waits)
        if held.made and not kept:
            self._hold(node, *held.made, left * ~waits)
        for use in repeats(group):
            self._hold(node, self.start.get(use.value.id, 0), group.point + 1, left)
        if self.backend.transposes_operands and is_kernel_gradient(group.equations[0]):
            self._hold(node, group.point, group.point + 1, self._operand_bytes(group))
        if self.backend.transposes_operands and (scratch := scratch_copies(group)):
            self._hold(node, group.point, group.point + 1, left * scratch)

    def _strategies(self, group: Group) -> tuple[Strategy, ...]:
        return self.priced[group.index].strategies

    def _operand_bytes(self, group: Group) -> np.ndarray:
        """Of all operands together, per strategy."""
        values = [use.value for use in group.uses]
        return np.array(
            [sum(map(self.prices.arrays.local_bytes, values, strategy.wants)) for strategy in self._strategies(group)]
        )

    def _unfinished(self, group: Group, strategy: Strategy) -> int:
        """Bytes of the unreduced result, which stands beside the finished one while a collective finishes it."""
        sizes = self.prices.finish_bytes(group, strategy)
        pieces = [f.devices(self.prices.mesh) if f.kind == REDUCE_SCATTER else 1 for f in strategy.finishes]
        return max((size * count for size, count in zip(sizes, pieces, strict=True)), default=0)

    def _connect(self, i: int, j: int, table: np.ndarray) -> None:
        if i == j:  # a loop that hands a carry on untouched
            self.costs[i] = self.costs[i] + np.diagonal(table)
        elif table.any():
            self.edges.append(Edge(i, j, table))

    # Memory.

    def _hold(self, node: int, start: int, end: int, usage: np.ndarray) -> None:
        """Counts a temporary."""
        if start >= end or not usage.any():
            return
        self.lives.append(Live(node, start, end, usage * HEAP))


# What layers repeat: functions of their arguments alone, for `Prices.once`.


def _homes(kepts: Sequence[Kept]) -> tuple[Layout, ...]:
    return tuple(kept.home for kept in kepts)


def _copies(kepts: Sequence[Kept]) -> tuple[Layout, ...]:
    return tuple(kept.copy for kept in kepts)


def _held(kepts: Sequence[Kept], own: np.ndarray, gathered: np.ndarray) -> np.ndarray:
    """Bytes of the copy per option; where there is none, of XLA's own."""
    return np.where([kept.copy == kept.home for kept in kepts], own, gathered)


def _from_argument(
    kepts: Sequence[Kept], wants: Sequence[Layout], stays: np.ndarray, from_copy: np.ndarray
) -> np.ndarray:
    bare = np.array([kept.home == kept.copy for kept in kepts])[:, None]
    at_home = np.array([[kept.home == want for want in wants] for kept in kepts])  # others read the copy
    return np.where(bare & ~stays, np.inf, np.where(at_home, 0.0, from_copy))


def _any_of(*wants: Sequence[Layout]) -> tuple[Layout, ...]:
    return tuple(dict.fromkeys(itertools.chain(*wants)))


def _only_where(allowed: np.ndarray, table: np.ndarray) -> np.ndarray:
    return np.where(allowed, table, np.inf)


def _or_unlike(allowed: np.ndarray, leaves: Sequence[Layout], wants: Sequence[Layout]) -> np.ndarray:
    """What is allowed, and whatever leads to a layout that no strategy leaves."""
    left = set(leaves)
    return allowed | np.array([want not in left for want in wants])


def _without_growth(table: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    return np.where(np.less.outer(before, after), np.inf, table)


def _gathered(leaves: Sequence[Layout], *wants: Sequence[Layout]) -> tuple[tuple[Layout, Layout], ...]:
    """How a value is left, and what is gathered of that."""
    copies = _any_of(*wants)
    return tuple((left, x) for left in dict.fromkeys(leaves) for x in copies if left != x and _gathers_to(left, x))


def _and_copies_apart(wants: tuple[Layout, ...], apart: Sequence[tuple[Layout, Layout]]) -> tuple[Layout, ...]:
    return wants + tuple(copy for _, copy in apart)


def _with_copies_apart(
    table: np.ndarray, narrow: np.ndarray, leaves: Sequence[Layout], apart: Sequence[tuple[Layout, Layout]]
) -> np.ndarray:
    """The columns of copies apart from the second table, and only for values that are left as they say."""
    shared = table.shape[1] - len(apart)
    as_left = np.array([[left == source for source, _ in apart] for left in leaves])
    return np.hstack([table[:, :shared], np.where(as_left, narrow[:, shared:], np.inf)])


def _without_copies_apart(
    table: np.ndarray, wants: Sequence[Layout], apart: Sequence[tuple[Layout, Layout]]
) -> np.ndarray:
    """Beside copies apart, this reader reads the value as it is left."""
    shared = len(table) - len(apart)
    as_left = np.array([[want == source for want in wants] for source, _ in apart])
    return np.vstack([table[:shared], np.where(as_left, 0.0, np.inf)])


def _all_reduced(strategies: Sequence[Strategy]) -> np.ndarray:
    return np.array([any(finish.kind == ALL_REDUCE for finish in strategy.finishes) for strategy in strategies])


def _finished(strategies: Sequence[Strategy]) -> np.ndarray:
    return np.array([bool(strategy.finishes) for strategy in strategies])


def _gathers_to(home: Layout, copy: Layout) -> bool:
    """Whether all_gathers alone make the copy. Any other copy holds as much as its home, and had better be the home."""
    return all(whole == split[: len(whole)] for split, whole in zip(home, copy, strict=True))


def _copied_for(reader: Reader) -> tuple[Group, ...]:
    """Who reads a copy that is for this reader alone."""
    return () if reader.group is None else (reader.group,)


def _said(group: Group | None, layouts: Sequence[Layout]) -> list[str]:
    """Where the user says how what a group reads or makes lies, and how; nothing where the user does not."""
    if group is None or not group.given:
        return []
    equation = group.equations[-1]
    return [f"{equation.primitive} at {equation.source or 'unknown line'} wants {spec_of(layouts[0])}"]


def _computes_on_shards(reader: Reader) -> bool:
    """Whether a copy for this reader could never pay. What a view makes is not resharded: what it views is."""
    return _elementwise(reader) and not (reader.group is not None and reader.group.is_view)


def _elementwise(reader: Reader) -> bool:
    """Whether a copy for this reader could never pay: it can as well compute on the shards it is given."""
    return reader.group is None or reader.group.fuses
