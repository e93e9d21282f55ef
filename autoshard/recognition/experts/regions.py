"""The equations of a step on rows that are sorted by group: how rows come in, what is made of them, how they leave.

========  ==============================================================================================
comes in  a gather by the tokens, slots or groups of sorted rows, a scatter by the inverse order
inside    what makes each row of the same row alone, and ragged products with a matrix per group
leaves    a scatter to tokens, slots or groups, a gather by the inverse order, a product summed over each group
========  ==============================================================================================
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of
from autoshard.microbatches.proof import equation_of
from autoshard.primitives import applies_function
from autoshard.propagation.registry import has_rule, rule_of
from autoshard.recognition.bodies import BodyTree, NestedBody
from autoshard.recognition.experts.sortings import Index, Sorting

RAGGED = "ragged_dot_general"


class ExitKind(enum.Enum):
    """How an equation takes rows out."""

    ADDED = "added"  # a scatter-add, by token or slot
    IN_SLOTS = "in slots"  # one element per slot
    PER_GROUP = "per group"  # a product that is summed over the rows of each group
    ADDED_TO_GROUPS = "added to groups"  # a scatter-add, by group


@dataclass(frozen=True, eq=False)
class RowEntry:
    """The elements of an array, one per sorted row."""

    array: Var  # its leading dims are those of tokens or slots
    table: np.ndarray  # [M]: of each slot, which element


@dataclass(frozen=True, eq=False)
class RowExit:
    """An equation that takes rows out."""

    body: NestedBody
    eqn: JaxprEqn
    how: ExitKind
    rows: Var | None  # what is taken out; None for PER_GROUP, which is made of all operands
    table: np.ndarray | None  # of ADDED: of each slot, to which element
    level: int  # how many exits lie before it


@dataclass(eq=False)
class RowRegions:
    """What a step makes of rows that one sorting brings together. Variables are origins."""

    tree: BodyTree
    sorting: Sorting
    row_dims: dict[Var, int] = field(default_factory=dict)
    entries: dict[Var, RowEntry] = field(default_factory=dict)  # value of rows -> how it came in
    lookups: dict[Var, Var] = field(default_factory=dict)  # value of rows -> the array of which it has their groups'
    constants: dict[Var, Any] = field(default_factory=dict)  # predicate of a selection -> what it is in all rows
    spread: dict[Var, int] = field(default_factory=dict)  # what all rows have alike, broadcast -> its dim of rows
    leaving: list[RowExit] = field(default_factory=list)

    @classmethod
    def of(cls, tree: BodyTree, sorting: Sorting) -> RowRegions:
        found = cls(tree, sorting)
        for body in tree.root.all():
            levels: dict[Var, int] = {}
            for eqn in body.equations:
                level = max((levels.get(x, 0) for x in eqn.invars if isinstance(x, Var)), default=0)
                leaves = len(found.leaving)
                if id(eqn) not in body.inner:
                    found._read(body, eqn, level)
                above = level + (len(found.leaving) > leaves)
                levels |= {var: above for var in eqn.outvars if isinstance(var, Var) and above}
        return found

    @cached_property
    def _rows(self) -> int:
        return self.sorting.rows

    def dim_of(self, atom: Any) -> int | None:
        """The dim of rows; None for what has none."""
        return None if isinstance(atom, Literal) else self.row_dims.get(self.tree.origin(atom))

    def _read(self, body: NestedBody, eqn: JaxprEqn, level: int) -> None:
        name = eqn.primitive.name
        dims = [self.dim_of(x) for x in eqn.invars]
        if all(dim is None for dim in dims):
            moves = name in ("gather", "scatter", "scatter-add")
            if not moves or self.sorting.follows(eqn.outvars[0]):
                return
            if name == "gather":
                self._enter(eqn)
            else:
                self._enter_by_inverse(eqn)
            return
        if name == "gather" and dims[0] == 0 and dims[1] is None:
            if takes_rows(eqn) and self._is(eqn.invars[1], Index.INVERSE):
                self.leaving.append(RowExit(body, eqn, ExitKind.IN_SLOTS, self.tree.origin(eqn.invars[0]), None, level))
        elif name in ("scatter-add", "scatter") and dims[2] == 0 and dims[:2] == [None, None]:
            self._scatter(body, eqn, level)
        elif name == RAGGED:
            self._ragged(body, eqn, dims, level)
        elif has_rule(eqn):
            self._inside(eqn, dims)

    def _is(self, index: Any, what: Index) -> bool:
        found = self.sorting.index_of(index)
        return found is not None and found[0] is what

    def _enter(self, eqn: JaxprEqn) -> None:
        array, index = eqn.invars
        if isinstance(array, Literal) or not takes_rows(eqn) or len(aval_of(index).shape) != 2:
            return
        found = self.sorting.index_of(index)
        made = self.tree.origin(eqn.outvars[0])
        if found is None or found[0] is Index.INVERSE:
            return
        if found[1] is not None:
            self.entries[made] = RowEntry(self.tree.origin(array), found[1])
        elif aval_of(array).shape[0] == self.sorting.groups and self.sorting.are_keys_of_groups:
            self.lookups[made] = self.tree.origin(array)
        else:
            return
        self.row_dims[made] = 0

    def _enter_by_inverse(self, eqn: JaxprEqn) -> None:
        base, index, updates = eqn.invars
        made = aval_of(eqn.outvars[0]).shape
        if isinstance(updates, Literal) or not adds_rows(eqn) or made[:1] != (self._rows,):
            return
        if self._is(index, Index.INVERSE) and (eqn.primitive.name == "scatter" or self._is_zero(base)):
            rows = self.tree.origin(eqn.outvars[0])
            self.row_dims[rows] = 0
            self.entries[rows] = RowEntry(self.tree.origin(updates), np.arange(self._rows))

    def _is_zero(self, atom: Any) -> bool:
        if isinstance(atom, Literal):
            return bool(np.all(np.asarray(atom.val) == 0))
        _, maker = self.tree.homes.get(self.tree.origin(atom), (None, None))
        return maker is not None and maker.primitive.name == "broadcast_in_dim" and self._is_zero(maker.invars[0])

    def _scatter(self, body: NestedBody, eqn: JaxprEqn, level: int) -> None:
        found = self.sorting.index_of(eqn.invars[1])
        if found is None or not adds_rows(eqn):
            return
        rows, table = self.tree.origin(eqn.invars[2]), found[1]
        if table is None:
            is_sum = eqn.primitive.name == "scatter-add" and found[0] is Index.KEYS
            is_whole = aval_of(eqn.outvars[0]).shape[0] == self.sorting.groups
            if is_sum and is_whole and self.sorting.are_keys_of_groups:
                self.leaving.append(RowExit(body, eqn, ExitKind.ADDED_TO_GROUPS, rows, None, level))
        elif eqn.primitive.name == "scatter-add":
            self.leaving.append(RowExit(body, eqn, ExitKind.ADDED, rows, table, level))
        elif np.array_equal(table, np.arange(self._rows)) and aval_of(eqn.outvars[0]).shape[0] == self._rows:
            self.leaving.append(RowExit(body, eqn, ExitKind.IN_SLOTS, rows, None, level))

    def _ragged(self, body: NestedBody, eqn: JaxprEqn, dims: list[int | None], level: int) -> None:
        numbers: Any = eqn.params["ragged_dot_dimension_numbers"]
        (contracted, _), (batch, _) = numbers.dot_dimension_numbers
        ragged, of_groups = tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)
        if batch or not isinstance(eqn.invars[2], Var) or not self.sorting.is_sizes(eqn.invars[2]):
            return
        if ragged != (dims[0],):
            return
        if dims[0] in contracted:
            if dims[1] is not None:
                self.leaving.append(RowExit(body, eqn, ExitKind.PER_GROUP, None, None, level))
        elif dims[1] is None and of_groups == (0,):
            self._inside(eqn, dims)

    def _inside(self, eqn: JaxprEqn, dims: list[int | None]) -> None:
        """Results whose rows are made of the same rows alone."""
        rule = rule_of(equation_of(eqn))
        factors = {rule.operands[i][dim] for i, dim in enumerate(dims) if dim is not None}
        if len(factors) != 1 or len(next(iter(factors))) != 1:
            return
        ((factor,),) = factors
        mixed = rule.need_replication | rule.permutation | rule.reduction | rule.summed | rule.exchanged
        if factor in mixed or rule.sizes[factor] != self._rows:
            return
        for i, tensor in enumerate(rule.operands):
            places = [dim for dim, has in enumerate(tensor) if factor in has]
            if dims[i] is None and places and not self._is_alike(eqn, i, places[0]):
                return
        found = [[dim for dim, has in enumerate(tensor) if factor in has] for tensor in rule.results]
        if any(len(one) != 1 or tensor[one[0]] != (factor,) for one, tensor in zip(found, rule.results, strict=True)):
            return
        self.row_dims |= {
            self.tree.origin(var): one[0] for var, one in zip(eqn.outvars, found, strict=True) if isinstance(var, Var)
        }

    def _is_alike(self, eqn: JaxprEqn, i: int, dim: int) -> bool:
        """Whether an operand that was not made of rows has the same in all of them, or their groups."""
        atom = eqn.invars[i]
        if self._is_spread(atom, dim):
            return True
        if eqn.primitive.name == "select_n" and i == 0 and (value := self.sorting.constant(atom)) is not None:
            self.constants[self.tree.origin(atom)] = value
            return True
        if dim == 0 and self._is(atom, Index.KEYS):
            origin = self.tree.origin(atom)
            self.row_dims[origin], self.entries[origin] = 0, RowEntry(self.sorting.keys, np.arange(self._rows))
            return True
        return False

    def _is_spread(self, atom: Any, dim: int) -> bool:
        """Whether an array has the same in all rows, since it was broadcast along them."""
        if isinstance(atom, Literal):
            return False
        origin = self.tree.origin(atom)
        _, maker = self.tree.homes.get(origin, (None, None))
        if maker is None or maker.primitive.name != "broadcast_in_dim":
            return False
        if dim in maker.params["broadcast_dimensions"]:
            place = maker.params["broadcast_dimensions"].index(dim)
            if aval_of(maker.invars[0]).shape[place] != 1 or aval_of(atom).shape[dim] == 1:
                return False
        self.spread[origin] = dim
        return True


def takes_rows(eqn: JaxprEqn) -> bool:
    """Whether a gather takes whole elements along the first dim, and puts them first."""
    numbers, shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[0]).shape
    made = len(aval_of(eqn.outvars[0]).shape)
    return (
        numbers.start_index_map == (0,)
        and numbers.collapsed_slice_dims == (0,)
        and not numbers.operand_batching_dims
        and tuple(eqn.params["slice_sizes"]) == (1, *shape[1:])
        and tuple(numbers.offset_dims) == tuple(range(made - len(shape) + 1, made))
    )


def adds_rows(eqn: JaxprEqn) -> bool:
    """Whether a scatter puts or adds whole elements along the first dim."""
    numbers, shape = eqn.params["dimension_numbers"], aval_of(eqn.invars[0]).shape
    many = len(aval_of(eqn.invars[2]).shape)
    return (
        not applies_function(eqn.primitive.name, eqn.params)
        and numbers.scatter_dims_to_operand_dims == (0,)
        and numbers.inserted_window_dims == (0,)
        and not numbers.operand_batching_dims
        and tuple(numbers.update_window_dims) == tuple(range(many - len(shape) + 1, many))
    )
