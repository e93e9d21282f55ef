"""One option per node of a formulation, read in the words of the program: annotations, arrays, a prediction."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from autoshard.layout import Layout, axes_of, local_shape, spec_text
from autoshard.mesh.collectives import Collective
from autoshard.model.formulation import Formulation
from autoshard.model.groups import FactorDims, Group
from autoshard.model.heap.result_places import aliased, copied_results
from autoshard.model.pricing.prices import GroupSeconds
from autoshard.model.regions.shared_work import forward_groups
from autoshard.model.resharding_memory import ValueReader, uses_of
from autoshard.model.strategies import ALL_REDUCE, REDUCE_SCATTER, Strategy, merged_with_slice
from autoshard.model.xla.rounding import Readers, unrounded_itemsize
from autoshard.operations.split import CallRun
from autoshard.plans.annotations import Annotations, Scatter
from autoshard.plans.plan import PlacedArray
from autoshard.plans.prediction import Prediction
from autoshard.program import Source, Value


def prediction_of(formulation: Formulation, choice: Sequence[int]) -> Prediction:
    """What a step costs under one option per node."""
    found: Prediction = formulation.last_choice.once(
        "prediction", choice, lambda: ChosenOptions(formulation, choice).prediction()
    )
    return found


@dataclass
class StepCosts:
    """Seconds and collectives of a step, while they are added up."""

    compute: float
    communication: float = 0.0
    hidden: float = 0.0  # of communication
    further_turns: float = 0.0  # of all turns but one of loops of unknown length
    # kind, axes, line, reason, whether runs are those of one turn -> bytes and runs
    _tallies: dict[tuple, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    _seen: set[tuple] = field(default_factory=set)

    def add(self, seconds: GroupSeconds, turns: int) -> None:
        """Adds a group's seconds, in a loop that is guessed to turn so often."""
        self.compute += seconds.compute
        self.communication += seconds.communication
        self.hidden += seconds.hidden
        self.further_turns += seconds.total * (1 - 1 / turns)

    def is_first(self, key: tuple) -> bool:
        """Whether this was not asked before, of collectives that are run once for all who need them."""
        if key in self._seen:
            return False
        self._seen.add(key)
        return True

    def run(
        self, kind: str, axes: tuple[str, ...], size: int, runs: int, turns: int, source: Source | None, why: str
    ) -> None:
        """Counts runs; in loops whose turns no compiled program tells, those of one turn."""
        tally = self._tallies[kind, axes, str(source or "unknown line"), why, turns > 1]
        tally[0] += size * (runs // turns)
        tally[1] += runs // turns

    def collectives(self) -> tuple[Collective, ...]:
        return tuple(
            Collective(kind, axes, size, count, source, why, is_per_turn)
            for (kind, axes, source, why, is_per_turn), (size, count) in self._tallies.items()
        )


class ChosenOptions:
    """One option per node, read in the words of the program."""

    def __init__(self, formulation: Formulation, choice: Sequence[int]):
        self.formulation, self.choice = formulation, choice
        self.program, self.prices = formulation.program, formulation.prices
        self.argument_of = {result: argument for argument, result in self.program.carried.items()}
        arguments = zip(self.program.arguments, formulation.arguments, strict=True)
        self.kept = {value.id: options[choice[i]] for i, (value, options) in enumerate(arguments)}
        self.homes: dict[int, Layout] = {value: kept.home for value, kept in self.kept.items()}
        self.copies: dict[int, Layout] = {
            value: kept.copy for value, kept in self.kept.items() if kept.copy != kept.home
        }
        self.homes |= {value.id: ((),) * len(value.shape) for value in self.program.constants}
        self.strategies = []
        for group, priced in zip(formulation.groups, formulation.priced, strict=True):
            strategy = priced.strategies[choice[formulation.group_node(group)]]
            self.strategies.append(strategy)
            self.homes |= {
                made.value.id: left for made, left in zip(group.outputs, strategy.output_layouts, strict=True)
            }
        for value, shared in formulation.shared.items():
            layout = shared.layouts[choice[shared.node]]
            if layout != self.homes[value]:
                self.copies[value] = layout

    @cached_property
    def scatters(self) -> list[Scatter | None]:
        """How `lower` finishes each group; None where that is left to XLA."""
        return list(map(scatter_of, self.formulation.groups, self.strategies))

    def want(self, reader: ValueReader) -> Layout:
        return reader.wants[self.choice[reader.node]]

    def stays(self, group: Group) -> bool:
        """Whether what a loop adds up is added up in the layout it is made in, all the way."""
        if group.hoisted_all_reduces is None:
            return True
        readers = [(made.value, reader) for made in group.outputs for reader in self.formulation.readers[made.value.id]]
        return all(self.want(r) == self.homes[v.id] and (r.group is None or self.stays(r.group)) for v, r in readers)

    def annotations(self) -> Annotations:
        finished = zip(self.formulation.groups, self.scatters, strict=True)
        scatters = {group.equations[0].index: scatter for group, scatter in finished if scatter is not None}
        idle = {made.value.id for group in self.formulation.groups if group.is_idle for made in group.outputs}
        homes = {value: home for value, home in self.homes.items() if value not in idle}
        implied = frozenset(self.implied())
        return Annotations(
            homes, self.copies, dict(self.wants()), scatters, dict(self.sums()), implied, dict(self.runs())
        )

    def wants(self) -> Iterator[tuple[tuple[int, int], Layout]]:
        """Equation and operand, and the layout in which the equation reads it."""
        for reader in itertools.chain.from_iterable(self.formulation.readers.values()):
            for group, use in uses_of([reader]):
                for equation, operand in group.reading.get(use.value.id, ()):
                    if group.operands[equation.index][operand] == use.dims:
                        yield (equation.index, operand), self.want(reader)

    def runs(self) -> Iterator[tuple[int, CallRun]]:
        """What computes each call of an operation on shards."""
        for group, strategy in zip(self.formulation.groups, self.strategies, strict=True):
            if strategy.run is not None and strategy.run.roles:
                yield group.equations[0].index, strategy.run

    def sums(self) -> Iterator[tuple[int, Layout]]:
        """Values whose partial sums XLA reduces and slices, and their layouts in between.

        XLA has to be told both: from the slices alone it would split what is summed as they are, and move it for that.
        """
        for group, strategy, scatter in zip(self.formulation.groups, self.strategies, self.scatters, strict=True):
            sliced = {axis for finish in strategy.finishes if finish.kind == REDUCE_SCATTER for axis in finish.axes}
            if sliced and scatter is None:
                (made,), (layout,) = group.outputs, strategy.output_layouts
                yield made.value.id, tuple(tuple(axis for axis in axes if axis not in sliced) for axes in layout)

    def implied(self) -> Iterator[int]:
        """Values to which propagation brings the planned layout, and no other.

        Every reader takes the value as it is, and its axes come from what it is made of; of what is made of numbers,
        from what a reader reads beside it. A constraint would only keep XLA from simplifying across it before it
        partitions the program; after a reduce_scatter by hand it says again what that has said.
        """
        loose: dict[int, Sequence[ValueReader]] = {}  # values whose axes do not come from what they are made of
        for group, strategy, scatter in zip(self.formulation.groups, self.strategies, self.scatters, strict=True):
            if needs_constraints(group):
                continue
            for made in group.outputs:
                value, readers = made.value.id, self.formulation.readers[made.value.id]
                if not self.is_read_as_left(made.value, readers) or self.may_be_split_unevenly(made.value):
                    continue
                if scatter or (not strategy.finishes and self.is_split_by_others(group, made.dims)):
                    yield value
                elif not strategy.finishes:
                    loose[value] = readers
        for value, readers in loose.items():
            if any(self.is_split_by_others(group, use.dims, loose) for group, use in uses_of(readers)):
                yield value

    def is_read_as_left(self, value: Value, readers: Sequence[ValueReader]) -> bool:
        """Whether it has readers, and all take it in the layout that it is made in."""
        return bool(readers) and all(self.want(reader) == self.homes[value.id] for reader in readers)

    def may_be_split_unevenly(self, value: Value) -> bool:
        """Whether propagation could split the value over axes that it is planned whole on, as no plan would.

        XLA splits dims that an axis does not divide where it splits what they come from: 257 tokens as 256 patches.
        """
        home, mesh = self.homes[value.id], self.prices.mesh
        idle = [n for axis, n in mesh.items() if axis not in axes_of(home)]
        return any(size > 1 and size % n for size in local_shape(value.shape, home, mesh) for n in idle)

    def is_split_by_others(self, group: Group, dims: FactorDims, apart_from: Container[int] = ()) -> bool:
        """Whether what a group reads, apart from these values, has all axes that split a tensor of these dims."""
        strategy = self.strategies[group.index]
        wants = zip(group.uses, strategy.operand_layouts, strict=True)
        reads = [zip(use.dims, want, strict=True) for use, want in wants if use.value.id not in apart_from]
        split = {factor for factors, axes in itertools.chain(*reads) if axes for factor in factors}
        return strategy.axes.keys() & set(itertools.chain(*dims)) <= split

    def placed(self, value: Value, name: str, layout: Layout | None = None) -> PlacedArray:
        layout = self.homes[value.id] if layout is None else layout
        if 0 in value.shape:  # XLA keeps results without elements whole; JAX cannot read them under another sharding
            layout = ((),) * len(value.shape)
        size = self.prices.arrays.shard_bytes(value, layout)
        return PlacedArray(name, value.shape, str(value.dtype), layout, size, value.on_host)

    def placed_result(self, index: int) -> PlacedArray:
        value, name = self.program.results[index], self.program.result_names[index]
        if isinstance(value, np.ndarray):
            return PlacedArray(name, value.shape, str(value.dtype), ((),) * value.ndim, value.nbytes)
        if index in self.argument_of:
            return self.placed(value, name, self.homes[self.program.arguments[self.argument_of[index]].id])
        return self.placed(value, name)

    def prediction(self) -> Prediction:
        arrival = self.arrival()
        costs = StepCosts(arrival + self.rounding() + self.returning() + self.resharded_memory())
        self.add_groups(costs)
        costs.communication += self.unhoisted()
        self.add_reshardings(costs)
        for value, taken in self.slices():
            costs.compute += taken
            costs.further_turns += taken * (1 - 1 / value.guessed)
        exposed = costs.communication - min(costs.hidden, costs.compute)
        return Prediction(
            step_seconds=costs.compute + exposed,
            compute_seconds=costs.compute,
            communication_seconds=costs.communication,
            exposed_seconds=exposed,
            peak_bytes=self.formulation.peak_outside_chip(self.choice),
            collectives=costs.collectives(),
            host_bytes=self.host_bytes(),
            arrival_seconds=arrival,
            further_turns_seconds=min(costs.further_turns, costs.compute + exposed - arrival),
        )

    def add_groups(self, costs: StepCosts) -> None:
        """Adds what groups compute, and the collectives that stand in them."""
        choices = zip(self.formulation.groups, self.formulation.priced, self.strategies, strict=True)
        forward = forward_groups(self.formulation.groups, self.prices)
        for group, priced, strategy in choices:
            shares = group.index not in forward or self.strategies[forward[group.index]].run == strategy.run
            seconds = priced.seconds[self.choice[self.formulation.group_node(group)]]
            costs.add(seconds if shares else self.prices.unmerged_backward_seconds(group, strategy), group.guessed)
            self.add_finishes(costs, group, strategy)
            self.add_halos(costs, group, strategy)
            region = self.prices.region(group, strategy, shares=shares)
            for one in region.collectives if region is not None else ():
                runs, why = group.trips * one.runs, f"inside {strategy.run or group.equations[0].primitive}"
                costs.run(one.kind, one.axes, one.bytes, runs, group.guessed, group.equations[0].source, why)

    def add_finishes(self, costs: StepCosts, group: Group, strategy: Strategy) -> None:
        """Adds the collectives that finish partial sums; what several groups add up together is reduced once."""
        merged, stays = self.with_merged_slices(group, strategy), self.stays(group)
        after_loop = stays and all(one.kind == ALL_REDUCE for one in strategy.finishes)
        sizes = self.prices.finish_bytes(group, merged, after_loop=after_loop)
        for finish, size in zip(merged.finishes, sizes, strict=True):
            if group.accumulator is not None and not costs.is_first((group.accumulator, finish.kind, finish.axes)):
                continue
            reduced = group.equations[-1]
            kind = finish.kind if finish in strategy.finishes else ALL_REDUCE
            runs = group.finish_trips(kind) if stays else group.trips
            turns = group.guessed if runs == group.trips else 1
            why = f"partial {'results' if group.gathers_per_output else 'sums'} of {reduced.primitive}"
            costs.run(finish.kind, finish.axes, size, runs, turns, reduced.source, why)

    def with_merged_slices(self, group: Group, strategy: Strategy) -> Strategy:
        """The strategy with the collectives that XLA makes where all that read a sum want one slice of it.

        Of a sum that a loop adds up, what leaves the loop is read.

        They take no longer than its own, by which the step is priced: XLA combines them as it does all_reduces.
        """
        if not strategy.finishes or len(group.outputs) != 1:
            return strategy
        value, total = group.outputs[0].value, group.loop_total
        if total is not None and self.stays(group) and math.prod(total.shape) == math.prod(value.shape):
            value = total
        home, wants = self.homes[value.id], {self.want(reader) for reader in self.formulation.readers[value.id]}
        if len(wants) != 1 or wants == {home} or value.id in self.copies:
            return strategy
        (want,), mesh, backend = wants, self.prices.mesh, self.prices.backend
        merged = (merged_with_slice(value, one, home, want, mesh, backend) for one in strategy.finishes)
        return replace(strategy, finishes=tuple(itertools.chain(*merged)))

    def add_halos(self, costs: StepCosts, group: Group, strategy: Strategy) -> None:
        """Adds the rows that neighbours send; XLA merges equal collectives."""
        for halo, size in zip(strategy.halos, self.prices.halo_bytes(group, strategy), strict=True):
            use, want = group.uses[halo.use], strategy.operand_layouts[halo.use]
            if costs.is_first((use.value.id, halo.axes, halo.rows, want)):
                reader, why = use.equation, f"halo of {use.equation.primitive}"
                costs.run("collective_permute", halo.axes, size, group.trips, group.guessed, reader.source, why)

    def add_reshardings(self, costs: StepCosts) -> None:
        """Adds the collectives between layouts."""
        for value, source, target, line, readers in self.reshardings():
            steps = self.prices.steps(value, source, target, readers)
            if not steps:
                continue
            taken = self.prices.resharding(value, source, target, readers) * value.trips
            behind = self.prices.hidden(value, source, target, readers) * value.trips
            costs.communication += taken
            costs.hidden += behind
            costs.further_turns += (taken - behind) * (1 - 1 / value.guessed)
            size = self.prices.itemsizes.moving(value, readers)
            smaller = f" in {8 * size:g} bits" if size < unrounded_itemsize(value) else ""
            why = f"{value}{smaller} from {spec_text(source)} to {spec_text(target)}"
            for step in steps:
                costs.run(step.kind, step.axes, step.bytes, value.trips, value.guessed, line, why)

    def arrival(self) -> float:
        """Seconds to write the arguments that no result of the step before has taken the place of."""
        staying = frozenset(self.program.state)
        arriving = (x for i, x in enumerate(self.program.arguments) if i not in staying)
        return sum(self.prices.writing(value, self.homes[value.id]) for value in arriving)

    def rounding(self) -> float:
        """Seconds to round arguments before loops."""
        return sum(self.prices.rounding(value, self.homes[value.id]) for value in self.program.arguments)

    def returning(self) -> float:
        """Seconds to copy the arguments that are results, but for those in the places of arguments."""
        formulation, found = self.formulation, 0.0
        copied = copied_results(self.program, formulation.groups, self.prices.backend.operations)
        for value in self.program.arguments:
            count, least = copied.get(value.id, (0, 0.0))
            found += count * self.prices.copying(value, self.homes[value.id], least) if count else 0.0
        return found

    def resharded_memory(self) -> float:
        """Seconds in which memory is written and read because values are resharded."""
        total = 0.0
        for id, readers in self.formulation.readers.items():
            value, home = self.program.values[id], self.homes[id]
            seen = self.copies.get(id, home)
            hops = [(home, seen, self.formulation.copied_for(value, self.choice))]
            hops += [(seen, self.want(reader), reader.copied_for) for reader in readers if self.want(reader) != home]
            total += sum(self.prices.memory_seconds(value, *hop) for hop in hops) * value.trips
        return total

    def slices(self) -> Iterator[tuple[Value, float]]:
        """Values that are cut without a collective, and the seconds that this takes as an operation of its own.

        Each reader cuts for itself, also what it wants as it was made, if others have it resharded: the problem has
        no costs of more than two nodes. Of arguments it knows both, home and copy.
        """
        for id, readers in self.formulation.readers.items():
            value, home = self.program.values[id], self.homes[id]
            seen, copied_for = self.copies.get(id, home), self.formulation.copied_for(value, self.choice)
            hops = [(home, seen, copied_for)]
            for reader in readers:
                may_read_home = id in self.kept or (copied_for is not None and reader.group not in copied_for)
                if not (may_read_home and self.want(reader) == home):
                    hops.append((seen, self.want(reader), reader.copied_for))
            for hop in hops:
                if not self.prices.steps(value, *hop):
                    yield value, self.prices.resharding(value, *hop) * value.trips

    def unhoisted(self) -> float:
        """Seconds to reduce in every turn of loops what they do not add up in the layout it is made in."""
        total = 0.0
        for group in self.formulation.groups:
            for made in group.outputs if group.hoisted_all_reduces is not None else ():
                readers = self.formulation.readers.get(made.value.id, ())
                home, shared = self.homes[made.value.id], self.copies.get(made.value.id)
                moves = shared is not None or (len(readers) == 1 and self.want(readers[0]) != home)
                total += moves * self.prices.unhoisted(group, made.value)
        return total

    def host_bytes(self) -> int:
        replaced = aliased(self.program)
        results = (x for i, x in enumerate(self.program.results) if isinstance(x, Value) and i not in replaced)
        own = dict.fromkeys([*results, *self.moved_to_hosts()])
        held = [x for x in (*self.program.arguments, *own) if x.on_host]
        return sum(self.prices.arrays.shard_bytes(value, self.homes[value.id]) for value in held)

    def moved_to_hosts(self) -> Iterator[Value]:
        """What the step itself takes there, other than for the next step. A stack is there as a whole."""
        ends = {x.id for x in self.program.results if isinstance(x, Value)}
        stacks = (one for one in self.program.equations if one.primitive == "scan_stack")
        stacked = {x.id for one in stacks for x in one.inputs if isinstance(x, Value)}
        for equation in self.program.equations:
            if equation.primitive in {"device_put", "scan_stack"}:
                yield from (x for x in equation.outputs if x.on_host and x.id not in ends | stacked)

    def reshardings(self) -> Iterator[tuple[Value, Layout, Layout, Source | None, Readers]]:
        """Every resharding of the step: (value, from, to, the line that asks for it, whom the copy is for).

        Readers that ask for the same one get the same array: XLA merges equal collectives.
        """
        for id, readers in self.formulation.readers.items():
            value = self.program.values[id]
            home = self.homes[id]
            seen = self.copies.get(id, home)
            asked: dict[Layout, list[ValueReader]] = defaultdict(list)
            for reader in readers:
                asked[self.want(reader)].append(reader)
            if seen != home:  # read as it is, or sliced or copied on
                line, copied_for = _line(asked[seen] or readers, value), self.formulation.copied_for(value, self.choice)
                yield value, home, seen, line, copied_for
            for want in (want for want in asked if want not in (home, seen)):
                yield value, seen, want, _line(asked[want], value), _groups(asked[want])


def needs_constraints(group: Group) -> bool:
    """Whether propagation may not find the layouts of a group's results, whatever it reads.

    After a callback XLA has the result on the device that calls back, and refuses branches that end so.
    """
    makes_calls = any("callback" in equation.primitive for equation in group.equations)
    return group.is_boundary or group.hoisted_all_reduces is not None or makes_calls


def scatter_of(group: Group, strategy: Strategy) -> Scatter | None:
    """How `lower` finishes a group; None where that is left to XLA."""
    stages = [finish for finish in strategy.finishes if finish.kind == REDUCE_SCATTER]
    if not stages or not group.sums_locally(strategy.axes):
        return None
    (layout,) = strategy.output_layouts
    return Scatter(
        dim=next(dim for dim, axes in enumerate(layout) if stages[0].axes[0] in axes),
        stages=tuple((stage.axes, stage.groups) for stage in stages),
        others=tuple(axis for finish in strategy.finishes if finish.kind == ALL_REDUCE for axis in finish.axes),
    )


def _groups(readers: Sequence[ValueReader]) -> Readers:
    """The groups that read one copy; none of them can do with fewer bits where an argument is replaced by it."""
    groups = [reader.group for reader in readers if reader.group]
    return groups if len(groups) == len(readers) else ()


def _line(readers: Sequence[ValueReader], value: Value) -> Source | None:
    """The line of the first that uses a value, else that which makes it."""
    return next((reader.use.equation.source for reader in readers if reader.use), value.source)
