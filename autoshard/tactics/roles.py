"""A grouped step in, what its groups, factors and arguments are to a train step out: batch, feature, expert, weight.

Tactics speak of the batch and of weights, programs of dims and operands. Nothing here looks at names. What a dim is
follows from the equations that it goes through:

1. Factors of two groups are one *dim of the step* where the one is how a group leaves a dim of a value, and the other
   how another group reads it. Of a dim of several factors the major one counts, since that is what axes split first.
2. The *batch* is the dims that the batch's arrays begin with (`batch_dim`), wherever they go. An argument is an array
   of the batch if no result takes its place and it has as many rows as the others; parameters of an evaluation have
   not.
3. A *weight product* multiplies something that depends on the batch with something made of the state alone. Its factors
   on the weight are *features*; its others are *rows*: batch, positions of a sequence, an expert's slots. A factor
   that both operands and the result have numbers the *experts*.
4. *Attention* multiplies two arrays that depend on the batch and keeps rows. Features that both and the result have
   are its *heads*.

A step of any library, unrolled or scanned, has these, since grouping has already opened its loops.
"""

from __future__ import annotations

import enum
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from autoshard.model.groups import FactorDims, Group
from autoshard.model.resharding_memory import ValueReader
from autoshard.primitives import CONTRACTIONS
from autoshard.program import Program, Value

Factor = tuple[int, int]  # (group, factor of it)


class Dim(enum.Flag):
    """What a dim of the step is. A dim may be several of these."""

    OTHER = 0
    BATCH = enum.auto()
    SEQUENCE = enum.auto()  # a row of weight products that is neither batch nor an expert's slots
    FEATURE = enum.auto()
    HEAD = enum.auto()  # a feature, too
    EXPERT = enum.auto()
    SLOT = enum.auto()  # a row of what experts compute that is not the batch


class GroupRole(enum.Enum):
    """What a group of equations is for."""

    PRODUCT = enum.auto()  # a weight product
    EXPERT = enum.auto()  # a weight product of experts
    ATTENTION = enum.auto()  # a product of two arrays that depend on the batch, of which rows are kept
    GRADIENT = enum.auto()  # a product that sums over rows: the gradient of a weight
    SUM = enum.auto()  # any other sum over rows: gradients of biases and embeddings, the loss
    UPDATE = enum.auto()  # on parameters, their gradients and the optimizer's state
    ACTIVATION = enum.auto()  # all else: on what has rows


class StateRole(enum.Enum):
    """What an argument is that is no batch."""

    WEIGHT = enum.auto()  # of weight products
    EXPERT = enum.auto()  # a weight of experts
    TABLE = enum.auto()  # what else activations meet, but elementwise: embeddings
    PARAMETER = enum.auto()  # what they meet elementwise alone: scales, biases
    CACHE = enum.auto()  # it has rows of the batch, as keys and values of a decoder
    OPTIMIZER = enum.auto()  # all else: moments, counters
    EXPERT_OPTIMIZER = enum.auto()  # what of that has the shape of an expert's weight
    PARAMETER_OPTIMIZER = enum.auto()  # what of that has the shape of parameters, and of nothing else of these


class GroupedStep(Protocol):
    """The groups of a train step and who reads their values: a formulation, or several of the parts of a step."""

    @property
    def program(self) -> Program: ...
    @property
    def mesh(self) -> Mapping[str, int]: ...  # without axes of one device
    @property
    def groups(self) -> Sequence[Group]: ...
    @property
    def readers(self) -> Mapping[int, Sequence[ValueReader]]: ...  # value id -> who wants it


@dataclass(frozen=True, eq=False)
class Roles:
    """What the groups, factors and arguments of a train step are to it."""

    step: GroupedStep

    @property
    def handed(self) -> frozenset[int]:
        """Arguments that are neither the step's batch nor its state: a whole step has none."""
        return frozenset()

    # Dims.

    @cached_property
    def _parents(self) -> dict[Factor, Factor]:
        parents: dict[Factor, Factor] = {}
        made = {made.value.id: (group.index, made.dims) for group in self.groups for made in group.outputs}
        first: dict[int, tuple[int, FactorDims]] = dict(made)
        for group in self.groups:
            for use in group.uses:
                index, dims = first.setdefault(use.value.id, (group.index, use.dims))
                for one, other in zip(dims, use.dims, strict=True):
                    for mine, theirs in _alike(one, other):
                        a, b = _root(parents, (index, mine)), _root(parents, (group.index, theirs))
                        parents[a] = b
        for argument, result in self.step.program.carried.items():
            value, home = self.step.program.results[result], self.step.program.arguments[argument]
            if isinstance(value, Value) and value.id in first and home.id in first:
                (i, ours), (j, others) = first[value.id], first[home.id]
                for one, other in zip(ours, others, strict=True):
                    for mine, theirs in _alike(one, other):
                        parents[_root(parents, (i, mine))] = _root(parents, (j, theirs))
        return parents

    def dim_of(self, group: Group, factor: int) -> Factor:
        """Which dim of the step a factor is; equal for factors that are the same dim."""
        return _root(self._parents, (group.index, factor))

    def role(self, group: Group, factor: int) -> Dim:
        """What a factor of a group is."""
        return self.dims.get(self.dim_of(group, factor), Dim.OTHER)

    @cached_property
    def dims(self) -> Mapping[Factor, Dim]:
        """Dim of the step -> what it is."""
        batch = set(self._batch_dims())
        rows, slots, features, experts = set[Factor](), set[Factor](), set[Factor](), set[Factor]()
        for group in self.groups:
            if not self._is_weight_product(group):
                continue
            # Of factors, since several of them may be one dim: a recurrent weight takes and makes the same features.
            weight = _factors(use.dims for use in group.uses if use.value.id in self.of_state)
            active = _factors(use.dims for use in group.uses if use.value.id not in self.of_state)
            left = _factors(made.dims for made in group.outputs)
            is_convolution = group.equations[0].primitive == "conv_general_dilated"  # its groups are of channels
            shared = set() if is_convolution else self._dims(group, weight & active & left) - batch
            experts |= shared
            features |= self._dims(group, weight) - shared
            (slots if shared else rows).update(self._dims(group, (active & left) - weight))
        for group in self.groups:  # what a lookup picks from, as the words of an embedding
            state = _factors(use.dims for use in group.uses if use.value.id in self.of_state)
            if group.equations[0].primitive not in CONTRACTIONS and not self.of_state.issuperset(
                use.value.id for use in group.uses
            ):
                features |= self._dims(group, state & group.reduction)
        rows -= slots
        features -= rows | slots | batch | experts
        heads = set[Factor]()
        for group in self.groups:
            if group.equations[0].primitive in CONTRACTIONS and not self._reads_state(group) and len(group.uses) > 1:
                heads |= self._dims_of_whole_group(group) & features
        found: dict[Factor, Dim] = {}
        kinds = (
            (batch, Dim.BATCH),
            (rows - batch, Dim.SEQUENCE),
            (slots - batch, Dim.SLOT),
            (features, Dim.FEATURE),
            (heads, Dim.HEAD),
            (experts, Dim.EXPERT),
        )
        for dims, kind in kinds:
            for dim in dims:
                found[dim] = found.get(dim, Dim.OTHER) | kind
        return found

    def _batch_dims(self) -> Iterator[Factor]:
        for argument in self.batch:
            dim, value = batch_dim(self.step, argument), self.step.program.arguments[argument]
            if dim is not None:
                for reader in self.step.readers[value.id]:
                    if reader.group is not None and reader.use is not None and reader.use.dims[dim]:
                        yield self.dim_of(reader.group, reader.use.dims[dim][0])

    def _dims_of_whole_group(self, group: Group) -> set[Factor]:
        """The dims of the step that all operands and results of a group have, as one factor."""
        tensors = [*(use.dims for use in group.uses), *(made.dims for made in group.outputs)]
        return self._dims(group, set.intersection(*(_factors([dims]) for dims in tensors)))

    def _dims(self, group: Group, factors: Iterable[int]) -> set[Factor]:
        """The dims of the step that these factors of a group are."""
        return {self.dim_of(group, factor) for factor in factors}

    # Groups.

    @property
    def groups(self) -> list[Group]:
        """Every group of the program."""
        return list(self.step.groups)

    @cached_property
    def work(self) -> tuple[GroupRole, ...]:
        """What each group is for."""
        updates = self._updates()
        return tuple(
            GroupRole.UPDATE if group.index in updates else self._work_on_activations(group, updates)
            for group in self.groups
        )

    def _work_on_activations(self, group: Group, updates: set[int]) -> GroupRole:
        if self._is_weight_product(group):
            is_expert = any(self.dims.get(dim, Dim.OTHER) & Dim.EXPERT for dim in self._dims_of_whole_group(group))
            return GroupRole.EXPERT if is_expert else GroupRole.PRODUCT
        rows = Dim.BATCH | Dim.SEQUENCE | Dim.SLOT
        readers = [r for made in group.outputs for r in self.step.readers[made.value.id]]
        for_updates = bool(readers) and all(r.group is None or r.group.index in updates for r in readers)
        left = any(self._is_any(group, made.dims, rows) for made in group.outputs) and not for_updates
        if group.equations[0].primitive in CONTRACTIONS and len(group.uses) > 1 and left:
            return GroupRole.ATTENTION
        sums_rows = any(self.role(group, factor) & rows for factor in group.reduction)
        if not sums_rows or left:
            return GroupRole.ACTIVATION
        return GroupRole.GRADIENT if group.equations[0].primitive in CONTRACTIONS else GroupRole.SUM

    def _is_any(self, group: Group, dims: FactorDims, kinds: Dim) -> bool:
        return any(self.role(group, factor) & kinds for dim in dims for factor in dim)

    def _updates(self) -> set[int]:
        """Groups on parameters, gradients and optimizer state: those without rows, and those only these read."""
        rows, program = Dim.BATCH | Dim.SLOT, self.step.program
        carried = {program.results[result] for result in program.carried.values() if _is_value(program.results[result])}
        returned = {value for i, value in enumerate(program.results) if _is_value(value)} - carried
        found = {g.index for g in self.groups if not any(self.role(g, factor) & rows for factor in g.sizes)}
        found -= {g.index for g in self.groups if self._is_weight_product(g)}
        for group in reversed(self.groups):
            if group.index in found or group.equations[0].primitive in CONTRACTIONS:
                continue
            readers = [r for made in group.outputs for r in self.step.readers[made.value.id]]
            ends = any(made.value in returned for made in group.outputs)
            sums = any(self.role(group, factor) & rows for factor in group.reduction)
            if readers and not ends and not sums and all(r.group is None or r.group.index in found for r in readers):
                found.add(group.index)
        return found

    def _reads_state(self, group: Group) -> bool:
        return any(use.value.id in self.of_state for use in group.uses)

    def _is_weight_product(self, group: Group) -> bool:
        is_product = group.equations[0].primitive in CONTRACTIONS
        active = any(use.value.id not in self.of_state for use in group.uses)
        return is_product and active and self._reads_state(group)

    @cached_property
    def embedding(self) -> frozenset[int]:
        """The weight products that embed the batch: nothing that they read was multiplied with a weight before."""
        products = {group.index for group in self.groups if self._is_weight_product(group)}
        multiplied, before = set[int](), -1
        while len(multiplied) > before:  # once more for what a loop carries from turn to turn
            before = len(multiplied)
            for group in self.groups:
                if group.index in products or any(use.value.id in multiplied for use in group.uses):
                    multiplied.update(made.value.id for made in group.outputs)
        late = {group.index for group in self.groups if any(use.value.id in multiplied for use in group.uses)}
        return frozenset(products - late)

    # Arguments.

    @cached_property
    def of_state(self) -> set[int]:
        """All arguments but the batch, and the values made of these alone, also in loops that update them."""
        program = self.step.program
        batch = set(self.batch)
        found = {value.id for i, value in enumerate(program.arguments) if i not in batch}
        for group in self.groups:
            first = group.equations[0]
            if first.primitive == "scan_carry":
                is_state = isinstance(first.inputs[0], Value) and first.inputs[0].id in found
            else:
                is_state = (
                    bool(group.uses) and not group.reduction and found.issuperset(use.value.id for use in group.uses)
                )
            if is_state:
                found.update(made.value.id for made in group.outputs)
        return found

    @cached_property
    def batch(self) -> tuple[int, ...]:
        """The arguments that have rows of the batch, and are no state.

        Of several numbers of rows, the batch has the one that the most arguments of the function agree on in all their
        arrays; then, the one of the most elements.
        """
        program = self.step.program
        dims = {i: batch_dim(self.step, i) for i in range(len(program.own_arguments)) if i not in program.carried}
        rows = {
            i: program.arguments[i].shape[dim] for i, dim in dims.items() if dim is not None and _has_rows(program, i)
        }
        sizes: dict[object, set[int]] = {}
        for i, size in rows.items():
            sizes.setdefault(program.in_tree.array_paths[i][:2], set()).add(size)
        agreeing, elements = Counter[int](), Counter[int]()
        for found in sizes.values():
            agreeing.update(found if len(found) == 1 else ())
        for i, size in rows.items():
            elements[size] += math.prod(program.arguments[i].shape)
        batch = max(elements, key=lambda size: (agreeing[size], elements[size]), default=None)
        alike = {path for path, found in sizes.items() if found == {batch}}
        return tuple(
            i
            for i, size in rows.items()
            if size == batch and (not alike or program.in_tree.array_paths[i][:2] in alike)
        )

    @cached_property
    def state(self) -> Mapping[int, StateRole]:
        """Argument of the state -> what it is."""
        program, batch, met = self.step.program, set(self.batch), self._met_by_activations
        found = {
            i: StateRole.CACHE
            if any(dim & Dim.BATCH for dim in self.dims_of_argument(i))
            else met.get(value.id, StateRole.OPTIMIZER)
            for i, value in enumerate(program.arguments)
            if i not in batch
        }
        shapes: dict[StateRole, set[tuple[int, ...]]] = defaultdict(set)
        for i, state in found.items():
            shapes[state].add(program.arguments[i].shape)
        vectors = shapes[StateRole.PARAMETER] - shapes[StateRole.WEIGHT] - shapes[StateRole.TABLE]
        moments = ((StateRole.EXPERT_OPTIMIZER, shapes[StateRole.EXPERT]), (StateRole.PARAMETER_OPTIMIZER, vectors))
        for i, state in found.items():
            if state is StateRole.OPTIMIZER:
                shape = program.arguments[i].shape
                found[i] = next((role for role, known in moments if shape in known), state)
        return found

    @cached_property
    def _met_by_activations(self) -> Mapping[int, StateRole]:
        """Id of a value that is made of the state alone -> what it is to those that it meets, itself or remade."""
        met: dict[int, StateRole] = {}  # the last of these that a value is read as
        strength = [StateRole.PARAMETER, StateRole.TABLE, StateRole.WEIGHT, StateRole.EXPERT]
        read_as = {GroupRole.PRODUCT: StateRole.WEIGHT, GroupRole.EXPERT: StateRole.EXPERT}

        def meet(group: Group, kind: StateRole, among: Set[int] | None = None) -> None:
            for use in group.uses:
                if among is None or use.value.id in among:
                    met[use.value.id] = max(met.get(use.value.id, kind), kind, key=strength.index)

        for group, work in zip(self.groups, self.work, strict=True):
            if work not in (GroupRole.UPDATE, GroupRole.GRADIENT, GroupRole.SUM):
                by_default = StateRole.PARAMETER if group.fuses else StateRole.TABLE
                meet(group, read_as.get(work, by_default), self.of_state)
        for group in reversed(self.groups):  # back to the arguments that these are made of
            for made in group.outputs:
                if made.value.id in met and made.value.id in self.of_state:
                    meet(group, met[made.value.id])
        return met

    def dims_of_argument(self, argument: int) -> tuple[Dim, ...]:
        """What each dim of an argument is, by all that read it."""
        return self.dims_of_value(self.step.program.arguments[argument])

    def dims_of_value(self, value: Value) -> tuple[Dim, ...]:
        """What each dim of a value is, by all that read it."""
        found = [Dim.OTHER] * len(value.shape)
        for reader in self.step.readers[value.id]:
            if reader.group is not None and reader.use is not None:
                for i, factors in enumerate(reader.use.dims):
                    found[i] |= _union(self.role(reader.group, factor) for factor in factors[:1])
        return tuple(found)


def batch_dim(step: GroupedStep, argument: int) -> int | None:
    """The first dim of an argument that no loop goes through; None: every dim is gone through."""
    value, dim = step.program.arguments[argument], 0
    readers = step.readers[value.id]
    while readers and all(r.group and r.group.equations[0].primitive == "scan_slice" for r in readers):
        dim += 1
        readers = [one for r in readers if r.group for one in step.readers[r.group.outputs[0].value.id]]
    return dim if dim < len(value.shape) else None


def _has_rows(program: Program, argument: int) -> bool:
    """Whether an argument may have rows of the batch: scalars and keys, raw ones too, have none."""
    value = program.arguments[argument]
    return bool(value.shape) and not (
        (value.shape == (2,) and str(value.dtype) == "uint32") or "key" in str(value.dtype)
    )


def _factors(tensors: Iterable[FactorDims]) -> set[int]:
    """The factors that these tensors of one group have."""
    return {factor for dims in tensors for dim in dims for factor in dim}


def _alike(one: tuple[int, ...], other: tuple[int, ...]) -> Iterable[tuple[int, int]]:
    """Factors of two groups that are the same piece of one dim."""
    return zip(one, other, strict=True) if len(one) == len(other) else zip(one[:1], other[:1], strict=False)


def _root(parents: dict[Factor, Factor], factor: Factor) -> Factor:
    """The representative of a factor's dim; ways to it are shortened."""
    path = []
    while (parent := parents.get(factor, factor)) != factor:
        path.append(factor)
        factor = parent
    for one in path:
        parents[one] = factor
    return factor


def _union(kinds: Iterable[Dim]) -> Dim:
    return Dim(sum({flag: flag.value for kind in kinds for flag in kind}.values()))


def _is_value(value: object) -> bool:
    return isinstance(value, Value)
