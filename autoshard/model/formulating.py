"""Program, rules, mesh and topology in, the `Formulation` out: every node, edge and life of the problem.

`formulation.py` says which nodes there are.
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autoshard.layout import Layout, MeshShape, spec_of
from autoshard.mesh.topology import Topology
from autoshard.model.formulation import Formulation, SharedLayout
from autoshard.model.groups import Group
from autoshard.model.heap import loop_terms, number_terms, workspace_terms  # whose terms enter the lists below, too  # noqa: F401
from autoshard.model.heap.heap import Heap
from autoshard.model.heap.overwriting import is_overwritten, lies_in_columns
from autoshard.model.heap.result_places import (
    copied_for_others,
    copied_results,
    copied_when_donated,
    donations_not_overwritten,
    looped,
    returned,
    taking_places,
    updated_in_loops,
)
from autoshard.model.heap.result_tables import TABLES, ResultTables
from autoshard.model.host_memory import check_host_memory
from autoshard.model.lifetimes import HEAP_OVERHEAD, holding, results_written, use_span
from autoshard.model.memory_terms import (
    ARGUMENT_TERMS,
    OUTPUT_TERMS,
    READ_TERMS,
    HeldArgument,
    HeldBytes,
    HeldOutput,
    ReadValue,
)
from autoshard.model.option_sets.argument_homes import ArgumentHomes
from autoshard.model.option_sets.option_set import OptionSet
from autoshard.model.pricing.cost_tables import (
    ArgumentOption,
    and_narrow_copies,
    any_of,
    copies_of,
    from_argument,
    homes_of,
    narrow_copies,
    only_where,
    or_unlike,
    with_narrow_copies,
    without_growth,
    without_narrow_copies,
)
from autoshard.model.pricing.formulation_deadline import once_in_time
from autoshard.model.pricing.price_lists import PriceLists
from autoshard.model.pricing.prices import PriceList
from autoshard.model.regions.shared_work import shared_work
from autoshard.model.resharding_memory import MoveToPlace, Resharding, ValueReader, narrow_groups, uses_of
from autoshard.model.strategies import Strategy
from autoshard.model.xla.backends import CPU, Backend
from autoshard.model.xla.rounding import Readers
from autoshard.program import Program, Value
from autoshard.propagation.rule import Rule
from autoshard.solver.problem import Edge, Live, Problem
from autoshard.solver.runtime.garbage_collection import uncollected


def formulate(
    program: Program,
    rules: Sequence[Rule],
    mesh: MeshShape,
    topology: Topology,
    *,
    offered: OptionSet | None = None,
    until: float = math.inf,
    **how: Any,
) -> Formulation:
    """The sharding problem of `program`.

    Args:
        offered: the strategies and homes among which is chosen; None: all.
        until: when time is up, as `time.monotonic` has it: what is not done by then raises `FormulationTimeout`.
        **how: the rest of what `formulator` takes.
    """
    return formulator(program, rules, mesh, topology, **how)(offered=offered, until=until)


def formulator(
    program: Program,
    rules: Sequence[Rule],
    mesh: MeshShape,
    topology: Topology,
    *,
    memory: float | None = None,
    fixed: Mapping[int, Layout] | None = None,
    open_axes: Mapping[int, frozenset[str]] | None = None,
    backend: Backend = CPU,
    moves_views: bool = False,
) -> Callable[..., Formulation]:
    """A function that makes problems of `program`, with `offered=` and `until=` as for `formulate`.

    The first call computes what all problems share.

    Args:
        program: the traced step.
        rules: one per equation.
        mesh: axis -> devices.
        topology: what the machine costs.
        memory: bytes per device that may be in use at any point; None for no limit.
        fixed: argument index -> layout that it must have.
        open_axes: argument index -> mesh axes that may split it further than is fixed.
        backend: the compiler that will make a program of it.
        moves_views: whether what is only a view of an array may be resharded; otherwise the array is.
    """
    mesh = {axis: size for axis, size in mesh.items() if size > 1}
    lists = functools.cache(lambda: PriceLists.of(program, rules, mesh, topology, backend, formulate))

    def formulation(prices: PriceList, until: float, *, counts_memory: bool) -> Formulation:
        known, given, opened = lists(), fixed or {}, open_axes or {}
        how = known.program, known.groups, prices, given, known.backend, opened, moves_views
        with prices.memo.ending(until):
            return _Formulator(*how, counts_memory=counts_memory).formulation(memory)

    @uncollected()
    def made(offered: OptionSet | None = None, until: float = math.inf) -> Formulation:
        make_prices = functools.partial(lists().prices, offered=offered)
        found = formulation(make_prices(), until, counts_memory=True)
        alone = functools.partial(make_prices, waits_only=True)
        waits = once_in_time(lambda until: formulation(alone(), until, counts_memory=False).problem)
        return replace(found, rules=tuple(rules), traced=program, waits=waits)

    return made


class _Formulator:
    def __init__(
        self,
        program: Program,
        groups: list[Group],
        prices: PriceList,
        fixed: Mapping[int, Layout],
        backend: Backend,
        open_axes: Mapping[int, frozenset[str]],
        moves_views: bool,
        *,
        counts_memory: bool,
    ):
        self.open_axes, self.moves_views, self.counts_memory = open_axes, moves_views, counts_memory
        self.program, self.groups, self.prices, self.fixed, self.backend = program, groups, prices, fixed, backend
        self.priced = [prices.group(group) for group in groups]
        self.costs: list[np.ndarray] = []
        self.names: list[str] = []
        self.edges: list[Edge] = []
        self.lives: list[Live] = []
        self.heap = Heap()  # the lives of temporaries and results
        self.tables = ResultTables(backend, math.prod(prices.mesh.values()))
        self.reshardings: list[Resharding] = []
        self.shared: dict[int, SharedLayout] = {}
        self.readers: dict[int, list[ValueReader]] = defaultdict(list)
        self.start = {made.value.id: group.point for group in groups for made in group.outputs}
        self.returns, self.taking, self.written = returned(program), taking_places(program), results_written(groups)
        self.copied = copied_results(program, groups, prices.backend.operations)
        self.result_ids = {value.id for value in program.results if isinstance(value, Value)}
        self.reads = program.reads + Counter(self.result_ids)
        self.apart = donations_not_overwritten(program, groups, backend.fusion)
        # results are moved to their layouts after all equations
        self.looped, self.end = looped(program), len(program.equations) + 1

    def formulation(self, memory: float | None) -> Formulation:
        first_group = len(self.program.arguments)
        for group, priced in zip(self.groups, self.priced, strict=True):
            for use, layouts in zip(group.uses, priced.operand_layouts, strict=True):
                self.readers[use.value.id].append(ValueReader(first_group + group.index, layouts, group, use))
        homes = self._homes()
        for argument, result in self.program.carried.items():
            value = self.program.results[result]
            if value is not self.program.arguments[argument]:
                assert isinstance(value, Value), "a number takes no argument's place"
                self.readers[value.id].append(ValueReader(argument, self._homes_of(homes[argument])))
        reasons = [f"fixed= wants {spec_of(self.fixed[i])}" if i in self.fixed else "" for i in range(len(homes))]
        arguments = zip(self.program.arguments, map(self._homes_of, homes), reasons, strict=True)
        check_host_memory(arguments, zip(self.groups, self.priced, strict=True), self.readers)
        self._add_arguments(homes)
        self._add_groups()
        for i, j, table in shared_work(self.groups, self.priced, self.prices):
            self._connect(self.group_node(self.groups[i]), self.group_node(self.groups[j]), table)
        self._add_tables()
        lives = tuple(live for live in self.lives if np.count_nonzero(live.usage))
        problem = Problem(tuple(self.costs), tuple(self.edges), lives, memory, names=tuple(self.names))
        return Formulation(
            program=self.program,
            traced=self.program,
            rules=(),
            mesh=self.prices.mesh,
            prices=self.prices,
            groups=self.groups,
            arguments=homes,
            priced=self.priced,
            shared=self.shared,
            readers=self.readers,
            reshardings=self.reshardings,
            problem=problem,
            heap=self.heap,
        )

    # Arguments.

    def _homes(self) -> list[tuple[ArgumentOption, ...]]:
        asked = ArgumentHomes(self.prices, self.readers, self.fixed, self.open_axes)
        return [asked.options(i, value) for i, value in enumerate(self.program.arguments)]

    def _homes_of(self, kepts: tuple[ArgumentOption, ...]) -> tuple[Layout, ...]:
        return self.prices.memo.once(homes_of, kepts)

    def _copies_of(self, kepts: tuple[ArgumentOption, ...]) -> tuple[Layout, ...]:
        return self.prices.memo.once(copies_of, kepts)

    def _add_arguments(self, options: list[tuple[ArgumentOption, ...]]) -> None:
        staying = frozenset(self.program.state)
        for index, value in enumerate(self.program.arguments):
            self.names.append(value.name)
            kepts = options[index]
            narrow = narrow_groups(self.readers[value.id], value, self.prices.itemsizes)
            traits = value.id in self.prices.weights, value.id in self.prices.ahead
            moving = self.prices.itemsizes.moving(value), self.prices.itemsizes.moving(value, narrow)
            rounded = value.id in self.prices.rounded
            what = value.shape, value.on_host, *traits, rounded, *moving, self.prices.turns.get(value.id)
            # the bytes of the argument, if every step gets a new one
            stored = None if index in staying else self.prices.itemsizes.stored(value)
            copies = self.copied.get(value.id, (0, 0.0))

            def seconds(
                kepts: tuple[ArgumentOption, ...],
                value: Value = value,
                stored: float | None = stored,
                narrow: tuple[Group, ...] = narrow,
                copies: tuple[int, float] = copies,
            ) -> np.ndarray:
                costs = self._moving_to_copies(value, kepts, narrow)
                costs += [self.prices.rounding(value, kept.home) for kept in kepts]
                if count := copies[0]:
                    costs += [count * self.prices.copying(value, kept.home, copies[1]) for kept in kepts]
                return costs if stored is None else costs + [self.prices.writing(value, kept.home) for kept in kepts]

            self.costs.append(self.prices.memo.once(seconds, kepts, of=(*what, stored, *copies)))
        copied = copied_when_donated(self.program, self.groups)
        for_others = copied_for_others(self.program, copies_circles=self.backend.copies_circles)
        taken = {index: self.written[value] for value, places in self.taking.items() for index in places}
        in_loops = set(self.looped.values())
        for index, value in enumerate(self.program.arguments):
            self.prices.memo.tick()
            kepts = options[index]
            narrow = narrow_groups(self.readers[value.id], value, self.prices.itemsizes)
            for reader in self.readers[value.id] if self.prices.mesh else ():
                self._connect(index, reader.node, self._argument_table(value, kepts, reader, reader.group in narrow))
            argument = HeldArgument(
                node=index,
                value=value,
                options=kepts,
                narrow=narrow,
                uses=uses_of(self.readers[value.id]),
                is_loop_buffer=index in in_loops,
                is_copied=index in copied,
                gradient=copied.get(index),
                returns=self.returns[value.id],
                replaced=None if index in self.program.donated else taken.get(index),
                moves=index in for_others,
                end=self.end,
                nodes=self.group_node,
                strategies=self._strategies,
                prices=self.prices,
            )
            self.tables.add_argument(argument)
            self._hold(part for term in ARGUMENT_TERMS for part in term(argument))

    def _moving_to_copies(
        self, value: Value, kepts: tuple[ArgumentOption, ...], narrow: tuple[Group, ...]
    ) -> np.ndarray:
        """Seconds from the home of each option to its copy."""
        homes, copies = self._homes_of(kepts), self._copies_of(kepts)
        found = [self.prices.moves(value, homes, copies)]
        if any(kept.narrow for kept in kepts):
            found.append(self.prices.moves(value, homes, copies, narrow))
        return np.where([kept.narrow for kept in kepts], found[-1], found[0])

    def _argument_table(
        self, value: Value, kepts: tuple[ArgumentOption, ...], reader: ValueReader, reads_narrow: bool
    ) -> np.ndarray:
        """Seconds from each option to each want. Without a copy only slices are allowed: a copy must be counted."""
        stays = self.prices.stays(value, self._homes_of(kepts), reader.wants)
        from_copy = self.prices.table(value, self._copies_of(kepts), reader.wants, reader.copied_for)

        def table(*args: Any) -> np.ndarray:
            return from_argument(*args, reads_narrow=reads_narrow)

        return self.prices.memo.once(table, kepts, reader.wants, stays, from_copy, of=(reads_narrow,))

    # Groups.

    def _add_groups(self) -> None:
        first_group = len(self.program.arguments)
        number_bytes = self.backend.number_bytes
        in_place = self.taking.keys() | self.looped.keys() | updated_in_loops(self.program, self.groups)
        carries = (one.outputs for one in self.program.equations if one.primitive == "scan_carry")
        # A loop may end in a result's buffer.
        in_place |= {seen.id for seen, final in carries if final.id in self.returns or final.id in self.taking}
        for group, priced in zip(self.groups, self.priced, strict=True):
            self.names.append(str(group.equations[-1]))
            self.costs.append(priced.costs)
            self.tables.add_group(group)
            self._hold(number_terms.empty_replies(self.group_node(group), group, len(priced.strategies), number_bytes))
        for group, priced in zip(self.groups, self.priced, strict=True):
            for made, layouts in zip(group.outputs, priced.output_layouts, strict=True):
                self.prices.memo.tick()
                self._add_value(first_group + group.index, group, made.value, layouts, in_place)

    def _add_value(self, node: int, group: Group, value: Value, makes, in_place: set[int]) -> None:
        readers = self.readers[value.id]
        held = holding(value, group, uses_of(readers))
        output = HeldOutput(
            node=node,
            value=value,
            group=group,
            strategies=self._strategies(group),
            lifetime=held,
            left=self.prices.arrays.sizes(value, makes),
            returned=self.prices.arrays.returned_sizes(value, makes),
            returns=self.returns[value.id],
            in_place=value.id in in_place,
            written=self.written[value.id],
            points=self.start,
            reads=self.reads,
            end=self.end,
            prices=self.prices,
        )
        self.tables.add_output(output)
        self._hold(part for term in OUTPUT_TERMS for part in term(output))
        self._move_to_places(node, group, value, makes)
        if not readers:
            return
        alone = readers[0].copied_for if len(readers) == 1 else None
        if self.prices.mesh:
            holder, wants = self._connect_value(node, group, value, makes, alone)
        else:  # one device reshards nothing
            holder, wants = readers[0].node, readers[0].wants
        if held.used is None:
            return
        in_columns = lies_in_columns(value, self.program.makers[value.id])
        read = ReadValue(
            made=output,
            used=held.used,
            readers=readers,
            holder=holder,
            sizes=self.prices.arrays.sizes(value, wants),
            is_overwritten=is_overwritten(value, self.readers, self.backend.fusion, self.result_ids, in_columns),
            strategies=self._strategies,
        )
        self._hold(part for term in READ_TERMS for part in term(read))
        kept, stored = output.has_buffer, output.is_stored
        hop = (node, makes), (holder, wants)
        fused = stored and any(reader.group.fuses for reader in readers if reader.group)
        made = group.point if group.lies_nowhere else None
        self.reshardings.append(Resharding(value, held.used, *hop, kept, stored, fused, readers, alone, made))

    def _move_to_places(self, node: int, group: Group, value: Value, makes: tuple[Layout, ...]) -> None:
        """Counts a result beside the donated buffer if its layout differs from that of the argument."""
        ends = [use_span(*use)[1] for use in uses_of(self.readers[value.id])]
        used = self.written[value.id].point, max([group.point + 1, *ends]) + 1
        for reader in self.readers[value.id]:
            index = reader.node
            if reader.group is None and index in self.taking.get(value.id, ()):
                hop = (node, makes), (index, reader.wants)
                fuses, is_apart = group.fuses, index in self.apart
                self.reshardings.append(
                    MoveToPlace(value, used, *hop, True, True, fuses, [reader], reader.copied_for, None, is_apart)
                )

    def _connect_value(
        self, node: int, group: Group, value: Value, makes: tuple[Layout, ...], alone: Readers
    ) -> tuple[int, tuple[Layout, ...]]:
        """As `_connect_readers`, with an edge from the node that makes the value."""
        readers = self.readers[value.id]
        narrow = narrow_groups(readers, value, self.prices.itemsizes)
        apart = self._narrow_copies(makes, readers, narrow)
        computed_again = group.point if group.lies_nowhere else None
        holder, wants = self._connect_readers(readers, value, narrow, apart, computed_again)
        table = self.prices.table(value, makes, wants, alone)
        if apart:
            narrow_table = self.prices.table(value, makes, wants, narrow)
            table = self.prices.memo.once(with_narrow_copies, table, narrow_table, makes, apart)
        if group.is_view and not self.moves_views:  # resharding its operand instead is equivalent, and is counted
            stays = self.prices.stays(value, makes, wants)
            if any(reader.group and reader.group.given for reader in readers):  # except to dims that only the view has
                stays = self.prices.memo.once(or_unlike, stays, makes, wants)
            table = self.prices.memo.once(only_where, stays, table)
        if again := self.prices.unhoisted(group, value):
            table = table + np.array([[again * (left != want) for want in wants] for left in makes])
        self._connect(node, holder, table)
        return holder, wants

    def _connect_readers(
        self,
        readers: Sequence[ValueReader],
        value: Value,
        narrow: Sequence[Group],
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
        wants = self.prices.memo.once(any_of, *(reader.wants for reader in readers))
        if apart:
            wants = self.prices.memo.once(and_narrow_copies, wants, apart)
        holder = len(self.costs)
        self.shared[value.id] = SharedLayout(holder, wants, tuple(narrow) if apart else (), len(wants) - len(apart))
        self.costs.append(np.zeros(len(wants)))
        self.names.append(f"{value} shared by {len(readers)} readers")
        busy = sum(not reader.is_elementwise for reader in readers)
        for reader in readers:
            table = self.prices.table(value, wants, reader.wants, reader.copied_for)
            if reader.is_elementwise or busy > 1:  # XLA merges equal all_gathers, so that readers share the larger copy
                sizes = self.prices.arrays.sizes(value, wants), self.prices.arrays.sizes(value, reader.wants)
                table = self.prices.memo.once(without_growth, table, *sizes)
            if apart and reader.group not in narrow:
                table = self.prices.memo.once(without_narrow_copies, table, reader.wants, apart)
            self._connect(holder, reader.node, table)
            if reader.group is not None and reader.use is not None:
                used = use_span(reader.group, reader.use)
                hop = (holder, wants), (reader.node, reader.wants)
                self.reshardings.append(
                    Resharding(value, used, *hop, True, False, False, [reader], reader.copied_for, made)
                )
        return holder, wants

    def _narrow_copies(
        self, makes: tuple[Layout, ...], readers: Sequence[ValueReader], narrow: tuple[Group, ...]
    ) -> tuple[tuple[Layout, Layout], ...]:
        """Pairs of the layout of a value and that of a copy for readers of fewer bits; none without such readers."""
        if not narrow:
            return ()
        reads = tuple(reader.group in narrow for reader in readers)
        wants = (reader.wants for reader in readers)
        return self.prices.memo.once(lambda left, *wants: narrow_copies(left, wants, reads), makes, *wants, of=reads)

    def _strategies(self, group: Group) -> tuple[Strategy, ...]:
        return self.priced[group.index].strategies

    def group_node(self, group: Group) -> int:
        return len(self.program.arguments) + group.index

    def _add_tables(self) -> None:
        """A node without a choice, which holds the tables of operations with several results."""
        if self.backend.number_bytes:  # always, so that choices of different formulations have the same nodes
            node = len(self.costs)
            self.costs.append(np.zeros(1))
            self.names.append(TABLES)
            held = self.tables.bytes if self.counts_memory else 0
            self.lives.append(Live(node, 0, self.end, np.array([float(held)])))
            self.heap.tables.append(self.lives[-1])

    def _hold(self, held: Iterable[HeldBytes]) -> None:
        """Adds the lives of all terms of memory; temporaries include the gaps between them."""
        for part in held if self.counts_memory else ():
            (start, end), usage = part.span, part.usage
            if part.in_heap and not (start < end and np.count_nonzero(usage)):
                continue
            self.lives.append(Live(part.node, start, end, usage * HEAP_OVERHEAD if part.in_heap else usage))
            self.heap.add(self.lives[-1], part)

    def _connect(self, i: int, j: int, table: np.ndarray) -> None:
        if i == j:  # a loop that passes a carry on unchanged
            self.costs[i] = self.costs[i] + np.diagonal(table)
        elif table.any():
            self.edges.append(Edge(i, j, table))
