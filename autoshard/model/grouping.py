"""Equations and their rules in, groups out: the units that are planned.

A *group* is one equation, or a chain of elementwise equations that XLA will fuse into one loop: they share their
factors, so one assignment of mesh axes shards them all and nothing moves inside. An elementwise equation joins the
group of its consumers when they all are in one group. So an AdamW update of one parameter is a single group.

Equations are gathered in `_Draft`s first. Passes over the groups that come of these then find, each in a table of its
own, what XLA does with them and when they run.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from autoshard.layout import MeshShape, in_mesh_order
from autoshard.model.equations import contracts, inserted_operand, only_widens, stays_whole
from autoshard.model.groups import FactorDims, Group, GroupOutput, Use, given_evenly
from autoshard.model.lifetimes import first_point_outside_loop
from autoshard.model.workspaces import PREPARED
from autoshard.model.xla.backends import CPU, Backend
from autoshard.model.xla.cpu.breadth_first import ReadyPoints, ready_points, recomputed_from
from autoshard.model.xla.fusion import recomputation, scattered_values
from autoshard.model.xla.operations import beginning, joined_operands, runs_before_readers, stack_writer
from autoshard.model.xla.sums import added_sums, hoisted_sums, late_products, read_once
from autoshard.model.xla.units.product_ends import ending_products
from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value
from autoshard.propagation.halos import Reach, renamed
from autoshard.propagation.projection import layout_of_factors
from autoshard.propagation.rule import Dims, Rule

_Readers = Mapping[int, Sequence[tuple[Equation, int]]]  # value id -> the equations that read it, as which operand


@dataclass(eq=False)
class _Draft:
    """A group that equations still join, from the last one to the first."""

    equations: list[Equation]
    sizes: dict[int, int]  # factor -> size
    splittable: frozenset[int]
    reduction: frozenset[int]
    given: dict[int, tuple[str, ...]]  # factor -> the mesh axes that the user says
    open_axes: frozenset[str]  # mesh axes that may split given factors further
    operands: dict[int, list[FactorDims]]  # equation index -> dims of its operands
    results: dict[int, list[FactorDims]]  # equation index -> dims of its results
    fuses: bool  # whether elementwise producers may join
    reaches: tuple[Reach[int], ...]  # what devices read beyond their shards
    batch_factor: int | None  # the factor along which no window moves


def groups_of(
    program: Program, rules: Sequence[Rule], backend: Backend = CPU, mesh: MeshShape | None = None
) -> list[Group]:
    """The groups of `program`, in program order of their last equation.

    Args:
        program: values and equations.
        rules: one per equation.
        backend: the compiler, which fuses what is one group.
        mesh: axis -> devices: what the program's own constraints are said of.
    """
    readers: dict[int, list[tuple[Equation, int]]] = defaultdict(list)
    for equation in program.equations:
        for operand, value in enumerate(equation.inputs):
            if isinstance(value, Value):
                readers[value.id].append((equation, operand))
    scattered = scattered_values(program, readers) if backend.fusion.stores_scattered else frozenset()
    needed_outside = {value.id for value in program.results if isinstance(value, Value)}
    groups = _joined(program, rules, readers, scattered, needed_outside, backend, mesh or {})
    home = {equation.index: group for group in groups for equation in group.equations}
    makers = {made.value.id: group for group in groups for made in group.outputs}
    staying = _staying(program, needed_outside)
    once = read_once(program)
    hoisted = hoisted_sums(program, once, home, readers) if backend.sums.hoists else {}
    summed = added_sums(program, once, home) if backend.sums.adds_first else {}
    users = [[home[r.index] for made in group.outputs for r, _ in readers[made.value.id]] for group in groups]
    unneeded, late, multiplied = _leading_to_results(program, groups, users)
    stacked = _stacked(groups, users)
    ends = _ends(groups, readers, home, len(program.equations))
    is_breadth_first = backend.runs_ready_first
    again_from = recomputed_from(program, groups) if is_breadth_first else [0] * len(groups)
    points, after_loops = _points(groups, ends, again_from), late_products(groups, users)
    stored, axes = needed_outside | scattered, (mesh or {}).values()
    again = recomputation(program, groups, users, stored, backend, axes, points)
    ending = ending_products(groups, readers, home, makers, again.repeated, by_library=backend.operations.are_kernels)
    gone = [repeated and until is None for repeated, until in zip(again.repeated, again.lying, strict=True)]
    last = _last_runs(groups, users, points, gone)
    ready = ready_points(groups, points, gone, PREPARED) if is_breadth_first else ReadyPoints(points, {})
    starts = backend.operations.least_seconds > 0
    is_ahead = starts and not backend.operations.are_kernels
    beside = joined_operands(groups, again.repeated, ending, sums_as_made=is_ahead) if starts else [None] * len(groups)
    ahead = runs_before_readers(groups, users, again.repeated) if is_ahead else [False] * len(groups)
    entering = _entering_loops(program, groups, staying) if starts else set()
    begins = beginning(groups, again.repeated)
    counting = _counting_turns(program, home) if backend.operations.are_kernels else set()
    return [
        replace(
            group,
            loop_total=hoisted.get(i),
            accumulator=summed[i][0] if i in summed else None,
            summands=summed[i][1] if i in summed else 1,
            feeds_no_state=unneeded[i],
            feeds_only_results=late[i],
            feeds_products=multiplied[i],
            is_stacked=stacked[i],
            handed_on_at=ends[i],
            is_late=after_loops[i],
            point=points[i],
            ready_at=ready.made[i],
            prepared={e.index: ready.ahead[e.index] for e in group.equations if e.index in ready.ahead},
            is_folded=again.folded[i],
            is_recomputed=again.repeated[i],
            lies_until=again.lying[i],
            is_sunk=again.sunk[i],
            is_normalising=i in again.normalising,
            ends_product=ending[i] is not None,
            begins=begins[i],
            runs_ahead=ahead[i],
            read_before=beside[i],
            counts_turns=i in counting,
            written_by=stack_writer(group, makers, again.repeated, ending) if group.is_stack else None,
            is_copy=_is_copied(group, needed_outside, makers, again.repeated),
            passes_before=2 if i in entering else _passes_before(group, staying, makers),
            last_point=last[i],
        )
        for i, group in enumerate(groups)
    ]


def _joined(
    program: Program,
    rules: Sequence[Rule],
    readers: _Readers,
    scattered: Set[int],
    needed_outside: Set[int],
    backend: Backend,
    mesh: MeshShape,
) -> list[Group]:
    """The equations in groups, of which no pass has found anything yet.

    Args:
        scattered: values that are stored for themselves, so that what makes them joins no group.
        needed_outside: values that are read after the program.
    """
    home: dict[int, _Draft] = {}  # equation index -> its group
    drafts: list[_Draft] = []
    for equation, rule in zip(reversed(program.equations), reversed(rules), strict=True):
        alone = any(output.id in scattered for output in equation.outputs)
        fuses = _is_elementwise(equation, rule)
        host = None if alone or not fuses else _join(equation, rule, readers, home, backend, mesh)
        if host is None:
            host = _new_draft(equation, rule, fuses)
            drafts.append(host)
        home[equation.index] = host
    return [_group_of(i, draft, readers, home, needed_outside) for i, draft in enumerate(reversed(drafts))]


def _is_copied(group: Group, needed_outside: Set[int], makers: Mapping[int, Group], repeated: Sequence[bool]) -> bool:
    """Whether a group that computes nothing has to write a result: what repeats an array, or views what nobody writes.

    Args:
        needed_outside: values that are read after the program.
        makers: value -> the group that makes it; arguments have none.
        repeated: per group, whether its readers compute it again.
    """
    is_result = any(made.value.id in needed_outside for made in group.outputs)
    if group.is_known or not group.only_moves or not is_result:
        return group.is_known and is_result

    def is_unwritten(value: Value) -> bool:
        return value.id in makers and repeated[makers[value.id].index]

    return group.broadcasts or all(use.value.from_outside or is_unwritten(use.value) for use in group.uses)


def _staying(program: Program, needed_outside: Set[int]) -> set[int]:
    """The values that nothing may be written over: arguments that are not donated, results, what a loop reads again."""
    kept = {value.id for i, value in enumerate(program.arguments) if i not in program.donated}
    read_again = {e.outputs[0].id for e in program.equations if e.primitive == "scan_const"}
    return kept | read_again | needed_outside


def _passes_before(group: Group, staying: Set[int], makers: Mapping[int, Group]) -> int:
    """`Group.passes_before` of a group."""
    if inserted_operand(group.equations[0]) is None:
        return 0
    operand = group.equations[0].inputs[0]
    while isinstance(operand, Value) and operand.id not in staying:
        maker = makers.get(operand.id)
        if maker is None or maker.is_fill:
            return int(maker is not None)
        if not maker.is_view:
            return 0
        operand = maker.equations[0].inputs[0]
    return 2 if isinstance(operand, Value) else 1


def _entering_loops(program: Program, groups: Sequence[Group], staying: Set[int]) -> set[int]:
    """The groups, by index, that bring an array into a loop which goes on with a copy of it.

    A loop of matrix products keeps what it hands on in the chip, where it is brought while something else runs.
    """

    @functools.cache
    def multiplies(start: int, end: int) -> bool:
        return any(map(contracts, program.equations[start:end]))

    found = set()
    for group in groups:
        (first, *_) = group.equations
        entering = first.inputs[0] if first.primitive == "scan_carry" else None
        if isinstance(entering, Value) and entering.id in staying and math.prod(entering.shape) > 1:
            assert first.loop is not None, "boundaries of loops know theirs"
            if not multiplies(*first.loop):
                found.add(group.index)
    return found


def _counting_turns(program: Program, home: Mapping[int, Group]) -> set[int]:
    """A group, by index, of each loop that carries no counter of its own: XLA adds one, and counts with it."""
    loops = {equation.loop for equation in program.equations if equation.loop is not None}
    carries = (equation for equation in program.equations if equation.primitive == "scan_carry")
    counted = {
        one.loop
        for one in carries
        if one.outputs[0].shape == () and getattr(one.outputs[0].dtype, "kind", "") in ("i", "u")
    }
    found = set()
    for start, end in loops - counted:
        inside = [one for one in program.equations[start:end] if not facts_of(one.primitive).is_boundary]
        if inside:
            found.add(home[min(inside, key=lambda one: (one.trips, one.index)).index].index)
    return found


def _leading_to_results(
    program: Program, groups: Sequence[Group], users: Sequence[Sequence[Group]]
) -> tuple[list[bool], list[bool], list[bool]]:
    """`Group.feeds_no_state`, `Group.feeds_only_results` and `Group.feeds_products` of each group."""
    carried = {id(program.results[result]) for result in program.carried.values()}
    unneeded, late, multiplied = ([False] * len(groups) for _ in range(3))
    for group in reversed(groups):
        read = users[group.index]
        multiplied[group.index] = any(user.contracts or multiplied[user.index] for user in read)
        unneeded[group.index] = all(user is group or unneeded[user.index] for user in read) and not any(
            id(made.value) in carried for made in group.outputs
        )
        decides = not read and any(made.value.trips > 1 for made in group.outputs)  # whether a loop goes on
        late[group.index] = not decides and all(user is group or (user.fuses and late[user.index]) for user in read)
    return unneeded, late, multiplied


def _stacked(groups: Sequence[Group], users: Sequence[Sequence[Group]]) -> list[bool]:
    """`Group.is_stacked` of each group."""
    stacked = [False] * len(groups)
    for group in reversed(groups):
        read = (user for user in users[group.index] if user is not group)
        stacked[group.index] = any(user.is_stack or (user.fuses and stacked[user.index]) for user in read)
    return stacked


def _last_runs(
    groups: Sequence[Group], users: Sequence[Sequence[Group]], points: Sequence[int], repeated: Sequence[bool]
) -> list[int]:
    """`Group.last_point` of each group."""
    last = list(points)
    for group in reversed(groups):
        if repeated[group.index]:
            last[group.index] = max((last[user.index] for user in users[group.index]), default=0)
    return last


def _new_draft(equation: Equation, rule: Rule, fuses: bool) -> _Draft:
    number = {factor: n for n, factor in enumerate(f for f in rule.factors if rule.sizes[f] > 1)}
    together = {factor: number[other] for factor, other in rule.alike.items() if factor in number and other in number}
    sizes = {n: rule.sizes[factor] for factor, n in number.items() if factor not in together}
    number |= together
    tensors = zip((*equation.inputs, *equation.outputs), (*rule.operands, *rule.results), strict=True)
    kept = {factor for value, dims in tensors if stays_whole(value) for factor in itertools.chain(*dims)}
    return _Draft(
        equations=[equation],
        sizes=sizes,
        splittable=frozenset(number[factor] for factor in (rule.splittable | rule.exchanged) - kept),
        reduction=frozenset(number[factor] for factor in rule.reduction | rule.summed if factor in number),
        given={number[factor]: axes for factor, axes in rule.given.items() if factor in number},
        open_axes=rule.open_axes,
        operands={equation.index: [_renamed(dims, number) for dims in rule.operands]},
        results={equation.index: [_renamed(dims, number) for dims in rule.results]},
        fuses=fuses,
        reaches=renamed(rule.reaches, number),
        batch_factor=number.get(rule.batch_factor) if rule.batch_factor is not None else None,
    )


def _renamed(dims: Dims, number: dict[str, int]) -> FactorDims:
    return tuple([tuple([number[factor] for factor in dim if factor in number]) for dim in dims])


def _is_elementwise(equation: Equation, rule: Rule) -> bool:
    """Whether every factor of more than one element runs through to the results, whole or split alike."""
    facts = facts_of(equation.primitive)
    if facts.is_boundary or facts.never_fuses or facts.runs_on_shards or contracts(equation):
        return False  # what runs on shards is told how each of its operands lies
    values = [value for value in (*equation.inputs, *equation.outputs) if isinstance(value, Value)]
    if any(value.on_host or stays_whole(value) for value in values):
        return False
    if any(rule.sizes[factor] > 1 for factor in rule.reduction):
        return False
    return len(rule.splittable) == sum(size > 1 for size in rule.sizes.values())


def _join(
    equation: Equation, rule: Rule, readers: _Readers, home: Mapping[int, _Draft], backend: Backend, mesh: MeshShape
) -> _Draft | None:
    """Joins an elementwise equation to the group of its readers, and returns that; None if it can join none.

    A constraint does not bind what comes after it, nor what comes before it in other dims: `x.reshape(4, -1)` with the
    last dim split is no layout of `x`.
    """
    if len(equation.outputs) != 1 or rule.given:
        return None
    consumers = readers[equation.outputs[0].id]
    hosts = _reading(equation, readers, home)
    if len(hosts) != 1:
        return None
    (host,) = hosts
    if host is None or not host.fuses or host.equations[0].trips != equation.trips:
        return None
    if backend.fusion.takes_in and only_widens(host.equations) and len(_reading(host.equations[0], readers, home)) > 1:
        return None
    mapping = _mapping(rule, [host.operands[reader.index][operand] for reader, operand in consumers])
    if mapping is None:
        return None
    operands, results = ([_renamed(dims, mapping) for dims in side] for side in (rule.operands, rule.results))
    if not _lies_as_given((*operands, *results), host, mesh):
        return None
    host.equations.append(equation)
    host.operands[equation.index], host.results[equation.index] = operands, results
    return host


def _lies_as_given(tensors: Sequence[FactorDims], draft: _Draft, mesh: MeshShape) -> bool:
    """Whether layouts of these tensors, in the group's factors, can say what the user says of the group.

    So the strategy that splits nothing else is one of every group.
    """
    given = given_evenly(draft.given, draft.sizes, mesh)
    layouts = (layout_of_factors(dims, given, draft.sizes, mesh) for dims in tensors if given)
    return all(layout is not None and in_mesh_order(layout, mesh) for layout in layouts)


def _reading(equation: Equation, readers: _Readers, home: Mapping[int, _Draft]) -> list[_Draft | None]:
    """The groups that read what an equation of one result makes.

    A carry reads what the body hands on, but stands before it and so has no group yet: it is None; nothing joins it.
    """
    found = (home.get(reader.index) for reader, _ in readers[equation.outputs[0].id])
    return list({id(group): group for group in found}.values())


def _mapping(rule: Rule, read_as: list[FactorDims]) -> dict[str, int] | None:
    """The host's factor for each of the joining rule's, or None where the two don't correspond one to one."""
    (result,) = rule.results
    mapping: dict[str, int] = {}
    for dims in read_as:
        for dim, host_dim in zip(result, dims, strict=True):
            wide = [factor for factor in dim if rule.sizes[factor] > 1]
            if len(wide) != len(host_dim):
                return None
            for factor, host_factor in zip(wide, host_dim, strict=True):
                if mapping.setdefault(factor, host_factor) != host_factor:
                    return None
    return mapping if len(set(mapping.values())) == len(mapping) else None


def _ends(groups: Sequence[Group], readers: _Readers, home: Mapping[int, Group], last: int) -> list[int | None]:
    """`Group.handed_on_at` of each group, for a program of `last` equations."""
    ends: list[int | None] = [None] * len(groups)
    for group in reversed(groups):
        ends[group.index] = _end(group, readers, home, ends, last)
    return ends


def _end(
    group: Group, readers: _Readers, home: Mapping[int, Group], ends: Sequence[int | None], last: int
) -> int | None:
    """`Group.handed_on_at`, once all later groups have theirs."""
    found: set[int | None] = set()
    for made in group.outputs:
        for reader, operand in readers[made.value.id]:
            if reader.primitive == "scan_stack" or (reader.primitive == "scan_carry" and operand == 1):
                assert reader.loop is not None, "boundaries of loops know theirs"
                found.add(reader.loop[1])
            elif home[reader.index] is not group:
                found.add(ends[home[reader.index].index] if home[reader.index].fuses else None)
    return last if not found else found.pop() if len(found) == 1 else None


def _points(groups: Sequence[Group], ends: Sequence[int | None], again_from: Sequence[int]) -> list[int]:
    """`Group.point` of each group, in the order of the program but for what XLA runs as soon as it can.

    That is elementwise groups at an end (optimizer updates, sums of gradients in a loop), what a loop stacks, and what
    reads nothing. On CPU it is also what a backward pass computes again, without waiting for the backward pass.

    Args:
        ends: `Group.handed_on_at` of each.
        again_from: `recomputed_from` of each.
    """
    points: list[int] = []
    available: dict[int, int] = {}  # value -> the point from which it is there
    for group in groups:
        point = group.equations[-1].index
        soonest = max((available.get(use.value.id, 0) for use in group.uses), default=0)
        is_at_end = ends[group.index] is not None and group.fuses
        if is_at_end or group.is_stack or soonest < again_from[group.index] or not group.uses:
            point = soonest
        points.append(point)
        available.update(
            (made.value.id, max(point + 1, first_point_outside_loop(group, made.value))) for made in group.outputs
        )
    return points


def _group_of(
    index: int, draft: _Draft, readers: _Readers, home: Mapping[int, _Draft], needed_outside: Set[int]
) -> Group:
    """The group of a draft that no equation joins any more: with what it reads from outside, and what others read."""
    equations = tuple(reversed(draft.equations))
    inside = {output.id for equation in equations for output in equation.outputs}
    seen, uses, outputs = set(), [], []
    for equation in equations:
        for operand, value in enumerate(equation.inputs):
            if isinstance(value, Value) and (value.id not in inside or equation.primitive == "scan_carry"):
                dims = draft.operands[equation.index][operand]
                if (value.id, dims) not in seen:
                    seen.add((value.id, dims))
                    uses.append(Use(value, dims, equation, operand))
        for output, dims in zip(equation.outputs, draft.results[equation.index], strict=True):
            outside = any(home[reader.index] is not draft for reader, _ in readers[output.id])
            # only what is read; of a generator nobody makes its next state if nothing reads that
            handed_out = facts_of(equation.primitive).from_one_device or equation.primitive == "rng_bit_generator"
            if outside or output.id in needed_outside or (len(equations) == 1 and not handed_out):
                outputs.append(GroupOutput(output, dims))
    return Group(
        index=index,
        equations=equations,
        sizes=draft.sizes,
        splittable=draft.splittable,
        reduction=draft.reduction,
        given=draft.given,
        open_axes=draft.open_axes,
        operands=draft.operands,
        results=draft.results,
        fuses=draft.fuses,
        uses=tuple(uses),
        outputs=tuple(outputs),
        reaches=draft.reaches,
        batch_factor=draft.batch_factor,
    )
