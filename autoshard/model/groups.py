"""Equations and their rules in, groups out: the units that are planned.

A *group* is one equation, or a chain of elementwise equations that XLA will fuse into one loop: they share their
factors, so one assignment of mesh axes shards them all and nothing moves inside. An elementwise equation joins the
group of its consumers when they all are in one group. So an AdamW update of one parameter is a single group.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from autoshard.layout import MeshShape, even_axes, in_mesh_order
from autoshard.mesh.backends import CPU, Backend
from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value
from autoshard.propagation.projection import layout_of_factors
from autoshard.propagation.rule import Dims, Rule

_PRODUCTS = frozenset({"mul", "square"})  # what a sum of products may be made of
_READ_AGAIN = 3  # so many arrays at most for one that is not stored; found in compiled ResNets and transformers


def reads_images(use: Use) -> bool:
    """Whether a convolution moves its windows over this operand."""
    return use.equation.primitive == "conv_general_dilated" and use.operand == 0


def is_matrix_product(equation: Equation) -> bool:
    """Whether it sums products. Of a `dot_general` that sums none XLA makes an elementwise product."""
    if equation.primitive != "dot_general":
        return False
    (summed, _), _ = equation.params["dimension_numbers"]
    return any(equation.inputs[0].shape[dim] > 1 for dim in summed)


def is_kernel_gradient(equation: Equation) -> bool:
    """Whether it is a convolution that takes the batch for the features: XLA transposes both operands before it."""
    return equation.primitive == "conv_general_dilated" and equation.params["dimension_numbers"].lhs_spec[0] != 0


def sums_locally(equation: Equation) -> bool:
    """Whether it makes on the shards of one device what the device adds to a sum; convolutions if no pixel is split."""
    return equation.primitive == "reduce_sum" or contracts(equation)


def is_grouped_convolution(equation: Equation) -> bool:
    """Whether it is a convolution whose channels, or whose batch, fall into groups."""
    counts = "feature_group_count", "batch_group_count"
    return equation.primitive == "conv_general_dilated" and any(equation.params[count] > 1 for count in counts)


def folds_by_hand(equation: Equation) -> bool:
    """Whether it reduces by what XLA's backends have no all_reduce for: `lower` finishes it where it is split."""
    if equation.primitive in ("reduce_and", "reduce_or"):
        return equation.inputs[0].dtype != np.bool_
    if equation.primitive in ("reduce_max", "reduce_min"):
        return np.issubdtype(equation.inputs[0].dtype, np.complexfloating)
    return equation.primitive in ("reduce", "reduce_xor")


def stays_whole(value: Value | np.ndarray) -> bool:
    """Whether it is never split: XLA's collectives mix up numbers of two bits."""
    return value.dtype.name in ("int2", "uint2")


def contracts(equation: Equation) -> bool:
    """Whether it is a matrix product or a convolution."""
    return equation.primitive == "conv_general_dilated" or is_matrix_product(equation)


FactorDims = tuple[tuple[int, ...], ...]  # of one tensor: dim -> factors of its group, major to minor


@dataclass(frozen=True)
class Use:
    """One operand of a group: a value from outside it, and which factors its dims are."""

    value: Value
    dims: FactorDims  # in the group's factors
    equation: Equation
    operand: int  # which operand of `equation`


@dataclass(frozen=True)
class Made:
    """One value that a group makes and others read."""

    value: Value
    dims: FactorDims


@dataclass(eq=False)
class Group:
    """Equations planned as one node. Factors are named ``0, 1, ...``; factors of size 1 are left out."""

    index: int
    equations: list[Equation]
    sizes: dict[int, int]  # factor -> size
    splittable: set[int]
    reduction: frozenset[int]
    given: dict[int, tuple[str, ...]]  # factor -> the mesh axes that the user says
    beside: frozenset[str]  # mesh axes that may split given factors further, where no others may
    operands: dict[int, list[FactorDims]]  # equation index -> dims of its operands
    results: dict[int, list[FactorDims]]
    fuses: bool  # whether elementwise producers may join
    uses: list[Use] = field(default_factory=list)
    made: list[Made] = field(default_factory=list)
    aside: bool = False  # whether it leads to results alone that take no argument's place: a loss
    late: bool = False  # whether what it makes goes into results only, through nothing but elementwise groups
    ends: int | None = None  # the point at which the program is over, if late, or the loop that hands on all it makes
    point: int = 0  # the program point at which it runs
    last: int = 0  # the last point at which it runs: later than `point` if its readers run it again
    repeated: bool = False  # whether XLA lets every reader compute it again, so that its result is never stored
    sunk: bool = False  # whether it is so inside a loop that it stands before
    summed: int | None = None  # of a product: the value that XLA adds it and others up to before it reduces the sum
    summands: int = 1  # how many these are
    hoisted: int | None = None  # how often its result is all_reduced, if a loop only adds it up, in the layout it is in
    folded: bool = False  # whether it is part of the one reduction that reads it, which is a library call

    @property
    def only_moves(self) -> bool:
        return all(facts_of(equation.primitive).relabels for equation in self.equations)

    @property
    def is_view(self) -> bool:
        """Whether it only renames the elements of one array: XLA makes no copy of it for a matrix product."""
        return all(facts_of(equation.primitive).is_view for equation in self.equations)

    @property
    def widens(self) -> bool:
        """Whether it only makes numbers wider: where readers take such work in, XLA stores what it reads."""
        first, *others = self.equations
        if others or first.primitive != "convert_element_type" or not isinstance(first.inputs[0], Value):
            return False
        return first.inputs[0].itemsize < first.outputs[0].itemsize

    @property
    def is_boundary(self) -> bool:
        """Whether it only hands a value into a loop or branch, or out of it."""
        return facts_of(self.equations[0].primitive).is_boundary

    @property
    def is_idle(self) -> bool:
        """Whether it stands in a branch for another platform."""
        return self.equations[0].primitive == "idle"

    @property
    def enters(self) -> bool:
        """Whether it hands a loop what that only reads."""
        return self.equations[0].primitive in ("scan_const", "scan_slice")

    @property
    def stacks(self) -> bool:
        """Whether it writes what a loop's body makes into the loop's result, in place."""
        return self.equations[0].primitive == "scan_stack"

    @property
    def fills(self) -> bool:
        """Whether it repeats a number or counts: XLA makes it as it is wanted, wherever it is wanted."""
        return self.only_moves and self.reads_numbers

    @property
    def broadcasts(self) -> bool:
        """Whether what it makes repeats something smaller."""
        size = math.prod(self.made[0].value.shape)
        widest = {e.primitive for e in self.equations if any(math.prod(made.shape) == size for made in e.outputs)}
        smaller = all(math.prod(use.value.shape) < size for use in self.uses)
        return smaller and all(facts_of(name).relabels and name != "iota" for name in widest)

    @property
    def reads_numbers(self) -> bool:
        """Whether it reads no array of several elements."""
        return all(math.prod(use.value.shape) == 1 for use in self.uses)

    @property
    def contracts(self) -> bool:
        """Whether it is a matrix product or a convolution."""
        return contracts(self.equations[0])

    @property
    def can_wait(self) -> bool:
        """Whether it reduces something, for nothing but gradients or a loss."""
        if self.contracts:
            return self.ends is not None
        return self.aside and self.trips == 1 and bool(self.reduction)

    @property
    def picks(self) -> int:
        """How many arrays per result are gathered of a reduction that cannot be all_reduced; 0 if it can.

        Of positions XLA gathers the values, too.
        """
        (first, *_) = self.equations
        if first.primitive in ("argmax", "argmin"):
            return 2
        return int(folds_by_hand(first))

    def sums_locally(self, assignment: Mapping[int, tuple[str, ...]]) -> bool:
        """Whether the equation itself, on the shards of one device, makes what the device adds to its sum.

        Args:
            assignment: factor -> the mesh axes that split it.
        """
        (first, *_) = self.equations
        if first.primitive != "conv_general_dilated":
            return sums_locally(first)
        numbers = first.params["dimension_numbers"]
        pixels = itertools.chain(*(self.operands[first.index][0][dim] for dim in numbers.lhs_spec[2:]))
        taps = itertools.chain(*(self.operands[first.index][1][dim] for dim in numbers.rhs_spec[2:]))
        return assignment.keys().isdisjoint((*pixels, *taps))

    def finish_trips(self, kind: str) -> int:
        """How often per step a collective finishes its result."""
        return self.trips if self.hoisted is None or kind != "all_reduce" else self.hoisted

    @property
    def trips(self) -> int:
        return max(equation.trips for equation in self.equations)

    def given_on(self, mesh: MeshShape) -> dict[int, tuple[str, ...]]:
        """Factor -> of the axes that the user says, those that split it evenly, in the order of the mesh."""
        return {factor: even_axes(self.sizes[factor], axes, mesh) for factor, axes in self.given.items()}

    def factors_of(self, equation: Equation) -> set[int]:
        """The factors that `equation` runs over."""
        dims = self.operands[equation.index] + self.results[equation.index]
        return {factor for tensor in dims for dim in tensor for factor in dim}


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
    scattered = _scattered(program, readers) if backend.stores_scattered else frozenset()
    home: dict[int, Group] = {}  # equation index -> its group
    groups: list[Group] = []
    for equation, rule in zip(reversed(program.equations), reversed(rules), strict=True):
        alone = any(output.id in scattered for output in equation.outputs)
        host = None if alone else _host(equation, rule, readers, home, backend, mesh or {})
        if host is None:
            host = _new_group(len(groups), equation, rule)
            groups.append(host)
        home[equation.index] = host
    groups.reverse()
    needed_outside = {value.id for value in program.results if isinstance(value, Value)}
    for index, group in enumerate(groups):
        group.index = index
        group.equations.reverse()
        _connect(group, readers, home, needed_outside)
    read_once = _read_once(program)
    if backend.hoists_sums:
        _note_hoisted(program, read_once, home)
    if backend.sums_first:
        _note_summands(program, read_once, home)
    users = [[home[r.index] for made in group.made for r, _ in readers[made.value.id]] for group in groups]
    carried = {id(program.results[result]) for result in program.carried.values()}
    for group in reversed(groups):
        group.aside = all(user is group or user.aside for user in users[group.index]) and not any(
            id(made.value) in carried for made in group.made
        )
        group.late = all(user is group or (user.fuses and user.late) for user in users[group.index])
        group.ends = _end(group, readers, home, len(program.equations))
    _schedule(groups)
    stored = needed_outside | scattered | _guarded(program, groups)
    are_stored = [any(made.value.id in stored for made in group.made) for group in groups]
    for group, is_stored in zip(groups, are_stored, strict=True):
        group.folded = not is_stored and not backend.takes_in and _is_folded(group, users[group.index])
    through: dict[int, set[int]] = {}  # value that readers make again -> the values of its size that they read for it
    padded = {e.outputs[0].id for e in program.equations if e.primitive == "pad" and "pad" in backend.taken_in}
    for group, is_stored in zip(groups, are_stored, strict=True):
        read = users[group.index]
        again = not is_stored and _is_repeated(group, read, backend)
        wide = itertools.chain(*(users[user.index] if user.widens else [user] for user in read))
        group.repeated = group.folded or (again and not _reads_far(group, list(wide), through, padded))
        group.sunk = group.repeated and any(user.equations[0].primitive == "scan_const" for user in read)
    for group in reversed(groups):
        group.last = max((user.last for user in users[group.index]), default=0) if group.repeated else group.point
    return groups


def _guarded(program: Program, groups: Sequence[Group]) -> set[int]:
    """Values that lie behind a barrier; of a view, what it views."""
    found = set(program.guarded)
    for group in reversed(groups):
        if group.is_view and any(made.value.id in found for made in group.made):
            found.difference_update(made.value.id for made in group.made)
            found.update(use.value.id for use in group.uses)
    return found


def entering_loops(groups: Sequence[Group], weights: Set[int]) -> set[int]:
    """What loops read, and the weights that this is made of."""
    found: set[int] = set()
    for group in reversed(groups):
        if group.enters or any(made.value.id in found and made.value.id in weights for made in group.made):
            found.update(use.value.id for use in group.uses)
    return found


def made_of_state(program: Program, groups: Sequence[Group]) -> set[int]:
    """The arguments that the step carries over, and the values that are made of these alone."""
    found = {program.arguments[i].id for i in program.carried}
    for group in groups:
        if group.uses and not group.reduction and found.issuperset(use.value.id for use in group.uses):
            found.update(made.value.id for made in group.made)
    return found


def image_dims(program: Program) -> dict[int, tuple[int, int]]:
    """Values of the shapes that convolutions read and make -> the batch and feature dims. Arguments lie otherwise."""
    found: dict[tuple[int, ...], tuple[int, int]] = {}
    for equation in program.equations:
        if equation.primitive == "conv_general_dilated":
            images, _, made = equation.params["dimension_numbers"]
            found.setdefault(equation.inputs[0].shape, images[:2])
            found.setdefault(equation.outputs[0].shape, made[:2])
    made_inside = (output for equation in program.equations for output in equation.outputs)
    return {value.id: found[value.shape] for value in made_inside if value.shape in found}


def read_through(groups: Sequence[Group]) -> dict[int, tuple[Value, ...]]:
    """What the readers of a value read instead of it, if XLA has each of them compute it again."""
    found: dict[int, tuple[Value, ...]] = {}
    for group in groups:
        if group.repeated:
            read = itertools.chain(*(found.get(use.value.id, (use.value,)) for use in group.uses))
            made = {made.value.id: made.value for made in group.made}
            if not group.fuses:  # a slice: its readers read as much as there is of it
                found.update((id, (value,)) for id, value in made.items())
            else:
                found.update(dict.fromkeys(made, tuple({value.id: value for value in read}.values())))
    return found


def _new_group(index: int, equation: Equation, rule: Rule) -> Group:
    number = {factor: n for n, factor in enumerate(f for f in rule.factors if rule.sizes[f] > 1)}
    tensors = zip((*equation.inputs, *equation.outputs), (*rule.operands, *rule.results), strict=True)
    kept = {factor for value, dims in tensors if stays_whole(value) for factor in itertools.chain(*dims)}
    return Group(
        index=index,
        equations=[equation],
        sizes={n: rule.sizes[factor] for factor, n in number.items()},
        splittable={number[factor] for factor in rule.splittable - kept},
        reduction=frozenset(number[factor] for factor in rule.reduction if factor in number),
        given={number[factor]: axes for factor, axes in rule.given.items() if factor in number},
        beside=rule.beside,
        operands={equation.index: [_renamed(dims, number) for dims in rule.operands]},
        results={equation.index: [_renamed(dims, number) for dims in rule.results]},
        fuses=_is_elementwise(equation, rule),
    )


def _renamed(dims: Dims, number: dict[str, int]) -> FactorDims:
    return tuple(tuple(number[factor] for factor in dim if factor in number) for dim in dims)


def _is_elementwise(equation: Equation, rule: Rule) -> bool:
    """Whether every factor of more than one element runs through to the results, whole or split alike."""
    facts = facts_of(equation.primitive)
    if facts.is_boundary or facts.never_fuses or contracts(equation):
        return False
    values = [value for value in (*equation.inputs, *equation.outputs) if isinstance(value, Value)]
    if any(value.on_host or stays_whole(value) for value in values):
        return False
    if any(rule.sizes[factor] > 1 for factor in rule.reduction):
        return False
    return len(rule.splittable) == sum(size > 1 for size in rule.sizes.values())


def _host(equation: Equation, rule: Rule, readers, home, backend: Backend, mesh: MeshShape) -> Group | None:
    """The group that `equation` can join, once it has joined it.

    A constraint does not bind what comes after it, nor what comes before it in other dims: `x.reshape(4, -1)` with the
    last dim split is no layout of `x`.
    """
    if len(equation.outputs) != 1 or rule.given or not _is_elementwise(equation, rule):
        return None
    consumers = readers[equation.outputs[0].id]
    hosts = _reading(equation, readers, home)
    if len(hosts) != 1:
        return None
    (host,) = hosts
    if host is None or not host.fuses or host.equations[0].trips != equation.trips:
        return None
    if backend.takes_in and host.widens and len(_reading(host.equations[0], readers, home)) > 1:
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


def _lies_as_given(tensors: Sequence[FactorDims], group: Group, mesh: MeshShape) -> bool:
    """Whether layouts of these tensors, in the group's factors, can say what the user says of the group.

    So the strategy that splits nothing else is one of every group.
    """
    given = group.given_on(mesh)
    layouts = (layout_of_factors(dims, given, group.sizes, mesh) for dims in tensors if given)
    return all(layout is not None and in_mesh_order(layout, mesh) for layout in layouts)


def _reading(equation: Equation, readers, home) -> list[Group | None]:
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


def _scattered(program: Program, readers: Mapping[int, Sequence[tuple[Equation, int]]]) -> frozenset[int]:
    """What XLA scatters into: what a scatter makes, or the one sum that reads this, which it makes in one."""
    found = set()
    for equation in program.equations:
        if equation.primitive.startswith("scatter"):
            (made,) = equation.outputs
            users = [reader for reader, _ in readers[made.id]]
            added = len(users) == 1 and users[0].primitive in ("add", "add_any") and equation.primitive == "scatter-add"
            found.add(users[0].outputs[0].id if added else made.id)
    return frozenset(found)


def stacked_beside(program: Program) -> dict[int, int]:
    """Values that are made in loops -> bytes of all that the innermost loop around them stacks."""
    stacks: dict[tuple[int, int], list[Equation]] = defaultdict(list)
    for equation in program.equations:
        if equation.primitive == "scan_stack":
            assert equation.loop is not None, "boundaries of loops know theirs"
            stacks[equation.loop].append(equation)
    found: dict[int, int] = {}
    for (start, end), stacked in sorted(stacks.items(), key=lambda item: (item[0][0], -item[0][1])):  # from outside in
        inside = (made for equation in program.equations[start:end] for made in equation.outputs)
        size = sum(equation.outputs[0].bytes for equation in stacked)
        found |= {made.id: size for made in inside if made.trips >= stacked[0].trips}
    return found


def kept_inside(program: Program, sums: bool) -> dict[int, int]:
    """What can stay in the chip while a loop turns -> bytes of all that can in its loop.

    That is what its matrix products read in every turn, a recurrent net's weights, and matrix products that it only
    adds up; with the sums, if the products are not split.

    Args:
        sums: whether products and sums are of them.
    """
    found: dict[tuple[int, int], tuple[set[int], dict[int, int]]] = defaultdict(lambda: (set(), {}))
    for entering in _constants_of_loops(program):
        assert entering.loop is not None, "boundaries of loops know theirs"
        values, sizes = found[entering.loop]
        (inside,) = entering.outputs
        sizes[inside.id] = inside.bytes
        values.add(inside.id)
    for carry, total, makers in _sums_in_loops(program, _read_once(program)) if sums else ():
        if is_matrix_product(makers[-1]) and total.outputs[0].bytes:
            assert carry.loop is not None, "boundaries of loops know theirs"
            values, sizes = found[carry.loop]
            (product,) = makers[-1].outputs
            sizes[product.id] = product.bytes
            values.add(product.id)
            if not any(maker.primitive == "split" for maker in makers):
                values.update(value.id for value in (carry.outputs[0], *total.outputs))
                values.update(value.id for maker in makers for value in maker.outputs)
    return {value: sum(sizes.values()) for values, sizes in found.values() for value in values}


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
    entering = [
        equation
        for equation in program.equations
        if equation.primitive == "scan_const"
        and isinstance(equation.inputs[0], Value)
        and equation.outputs[0].trips > equation.inputs[0].trips > 0
    ]
    multiplied = _multiplied(program) if entering else set()
    return [equation for equation in entering if equation.outputs[0].id in multiplied]


def _multiplied(program: Program) -> set[int]:
    """The values that matrix products read, and those that these are views of, or the same in another dtype."""
    found: set[int] = set()
    for equation in reversed(program.equations):
        passed_on = facts_of(equation.primitive).passes_on and equation.outputs[0].id in found
        if passed_on or is_matrix_product(equation):
            found.update(value.id for value in equation.inputs if isinstance(value, Value))
    return found


def _read_once(program: Program) -> set[int]:
    """The values that have one reader, and are no result."""
    results = {value.id for value in program.results if isinstance(value, Value)}
    return {value for value, count in program.reads.items() if count == 1} - results


def _sums_in_loops(program: Program, read_once: Set[int]) -> Iterator[tuple[Equation, Equation, list[Equation]]]:
    """Of each sum that a loop only adds to: the carry, the equation that adds, and what makes that which it adds.

    The last of these is the first on the way back that is not linear.
    """
    for carry in (equation for equation in program.equations if equation.primitive == "scan_carry"):
        inside, _ = carry.outputs
        total = program.makers.get(carry.inputs[1].id) if isinstance(carry.inputs[1], Value) else None
        if total is None or total.primitive not in ("add", "add_any") or inside not in total.inputs:
            continue
        added = next((x for x in total.inputs if x is not inside), None)
        if inside.id not in read_once:
            continue
        chain = []
        while isinstance(added, Value) and added.id in program.makers and added.id in read_once:
            maker = program.makers[added.id]
            chain.append(maker)
            if not facts_of(maker.primitive).is_linear:
                break
            added = maker.inputs[0]
        if chain:
            yield carry, total, chain


def _note_hoisted(program: Program, read_once: set[int], home) -> None:
    """Sets `Group.hoisted` of what a loop only adds up, and of what it goes through on the way."""
    for carry, _, makers in _sums_in_loops(program, read_once):
        for maker in makers:
            if facts_of(maker.primitive).is_linear or home[maker.index].reduction:
                home[maker.index].hoisted = carry.outputs[1].trips


def _note_summands(program: Program, read_once: set[int], home) -> None:
    """Sets `Group.summed` and `summands` of products that are added up with others and read by nobody else."""
    summed: dict[int, list[Group]] = {}  # value -> the products that it is the sum of
    for equation in program.equations:
        product = is_matrix_product(equation)
        if not product and equation.primitive not in ("add", "add_any"):
            continue
        (made,) = equation.outputs
        products = [home[equation.index]]
        if not product:
            parts = [summed.get(x.id) if isinstance(x, Value) else None for x in equation.inputs]
            if not all(parts):
                continue
            products = list(itertools.chain(*filter(None, parts)))
            for one in products:
                one.summed, one.summands = made.id, len(products)
        if made.id in read_once:
            summed[made.id] = products


def _end(group: Group, readers, home, last: int) -> int | None:
    """`Group.ends`, once all later groups have theirs."""
    found = set()
    for made in group.made:
        for reader, operand in readers[made.value.id]:
            if reader.primitive == "scan_stack" or (reader.primitive == "scan_carry" and operand == 1):
                found.add(reader.loop[1])
            elif home[reader.index] is not group:
                found.add(home[reader.index].ends if home[reader.index].fuses else None)
    return last if not found else found.pop() if len(found) == 1 else None


def _schedule(groups: list[Group]) -> None:
    """What XLA runs as soon as it can: elementwise groups at an end (optimizer updates, sums of gradients in a loop),
    what a loop stacks, and what reads nothing. Others run in program order.
    """
    available: dict[int, int] = {}  # value -> the point from which it is there
    for group in groups:
        group.point = group.equations[-1].index
        if (group.ends is not None and group.fuses) or group.stacks or not group.uses:
            group.point = max((available.get(use.value.id, 0) for use in group.uses), default=0)
        available.update((made.value.id, group.point + 1) for made in group.made)


def _is_folded(group: Group, users: list[Group]) -> bool:
    """Whether it is the product in a sum of products: of all that precedes a reduction, XLA folds only this into it."""
    products = {e.primitive for e in group.equations if not facts_of(e.primitive).relabels}
    return bool(users) and products <= _PRODUCTS and {user.equations[0].primitive for user in users} == {"reduce_sum"}


def _is_repeated(group: Group, users: list[Group], backend: Backend) -> bool:
    """Whether XLA fuses an elementwise group, a view, or what else it takes in, into every group that reads it."""
    first = group.equations[0].primitive
    if not users or not (group.fuses or first == "scan_slice" or first in backend.taken_in):
        return False
    if backend.takes_in:
        if _is_normalised(group, users):
            return False
        if backend.rounds_operands and any(_rounds_once(user.equations[0], group) for user in users):
            return False
        if backend.tile and any(_is_laid_out(group, user) for user in users):
            return False
        sunk = {"scan_const"} if backend.sinks_broadcasts and group.broadcasts else set()
        takers = backend.takes_in | sunk
        return all(user.stacks or user.fuses or user.equations[0].primitive in takers for user in users)

    def takes(user: Group) -> bool:
        reads_views = group.is_view and is_matrix_product(user.equations[0])
        return user.stacks or (user.fuses and not user.folded) or reads_views

    if not all(map(takes, users)):
        return False
    return len(set(map(id, users))) == 1 or not any(_is_dear(equation) for equation in group.equations)


def _reads_far(group: Group, users: Sequence[Group], through: dict[int, set[int]], padded: Container[int]) -> bool:
    """Whether several groups would each read too many arrays of its size to compute it again; notes which if not.

    So it is with the sums along residual connections, once they are long: each is made of all before it. What is padded
    is too many: the sums of an associative scan are each made of such sums of half the length.

    Args:
        users: the groups that read what it makes, or what this is widened to.
        through: value -> the values of its size that it is computed again from; added to.
        padded: values that are padded as they are read.
    """
    size = math.prod(group.made[0].value.shape)
    wide = [use.value.id for use in group.uses if math.prod(use.value.shape) == size]
    read = set().union(*(through.get(value, {value}) for value in wide))
    far = len(read) > _READ_AGAIN or any(value in padded for value in wide)
    if far and len(set(map(id, users))) > 1:
        return True
    if group.fuses:
        through.update((made.value.id, read) for made in group.made)
    return False


def _rounds_once(equation: Equation, group: Group) -> bool:
    """Whether a convolution reads each number that it makes several times: XLA rounds them once, and stores that."""
    if equation.primitive != "conv_general_dilated" or group.made[0].value.dtype != np.float32:
        return False
    numbers = equation.params["dimension_numbers"]
    if is_kernel_gradient(equation):
        return any(equation.outputs[0].shape[dim] > 1 for dim in numbers.out_spec[2:])
    return any(equation.inputs[1].shape[dim] > 1 for dim in numbers.rhs_spec[2:])


def _is_laid_out(group: Group, user: Group) -> bool:
    """Whether `user` convolves what it makes of an argument, which does not lie as images do: that is stored."""
    made = group.made[0].value
    convolved = any(reads_images(use) and use.value is made for use in user.uses)
    return convolved and any(use.value.from_outside and use.value.shape == made.shape for use in group.uses)


def _is_dear(equation: Equation) -> bool:
    """Whether XLA does not compute it twice to save a buffer. By a constant it multiplies rather than divides."""
    if equation.primitive == "div" and not isinstance(equation.inputs[1], Value):
        return False
    return facts_of(equation.primitive).is_expensive


def _is_normalised(group: Group, users: list[Group]) -> bool:
    """Whether it is dear, and read by what sums it up and by what divides it by the sum: a softmax."""
    if not any(_is_dear(equation) for equation in group.equations):
        return False
    wide = math.prod(group.made[0].value.shape)
    divided = [
        any(e.primitive == "div" and math.prod(e.outputs[0].shape) == wide for e in user.equations)
        for user in users
        if user.fuses
    ]
    return bool(divided) and all(divided) and any(user.reduction and not user.contracts for user in users)


def _connect(group: Group, readers, home, needed_outside: set[int]) -> None:
    inside = {output.id for equation in group.equations for output in equation.outputs}
    seen = set()
    for equation in group.equations:
        for operand, value in enumerate(equation.inputs):
            if isinstance(value, Value) and (value.id not in inside or equation.primitive == "scan_carry"):
                dims = group.operands[equation.index][operand]
                if (value.id, dims) not in seen:
                    seen.add((value.id, dims))
                    group.uses.append(Use(value, dims, equation, operand))
        for output, dims in zip(equation.outputs, group.results[equation.index], strict=True):
            outside = any(home[reader.index] is not group for reader, _ in readers[output.id])
            if outside or output.id in needed_outside or len(group.equations) == 1:
                group.made.append(Made(output, dims))
