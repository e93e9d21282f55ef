"""A traced step in, out the same whose dropless experts are operations; None where there are none.

All equations on sorted rows between two exits become one operation. It computes again, in the backward pass, what rows
the forward pass has made: then rows cross devices where they are used, and none is kept.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from autoshard.batching.boundary import result_or_none
from autoshard.jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, Var, aval_of, called_jaxpr, inner_jaxprs, literal
from autoshard.operations.primitive import OPERATION, evaluated
from autoshard.ops.dispatching import RowFunction, RowRole, routed_operation
from autoshard.ops.ragged_dot import ragged_operation
from autoshard.recognition.bodies import BodyTree, values_needed
from autoshard.recognition.editing import Editor
from autoshard.recognition.equations import UnavailableValue
from autoshard.recognition.experts.regions import RAGGED, ExitKind, RowExit, RowRegions
from autoshard.recognition.experts.sortings import Sorting, sortings

MOST_PER_ROW = 64  # elements of matrices per element of rows: where rows are fewer, as in decoding, matrices stay


def with_experts(closed: ClosedJaxpr, devices: int) -> ClosedJaxpr | None:
    """A jaxpr, from the same arguments to the same results, with dropless experts as operations; None without any.

    Args:
        devices: they divide the tokens. Tokens of any other number stay as they are, since an operation would be whole.
    """
    if not _has_ragged(closed.jaxpr):
        return None
    left = set[int]()  # sortings whose rows are used in other ways, too
    while True:
        tree = BodyTree.of(closed, _body_of, opens_too=_is_function_of_jax)
        editor, done, failed = Editor(tree), False, None
        for i, sorting in enumerate(list(sortings(tree))):
            if i in left:
                continue
            calls = result_or_none(
                "recognition of experts", functools.partial(_put_in_if_possible, editor, sorting, devices)
            )
            if calls is None:
                failed = i
                break
            done = done or bool(calls)
        if failed is None:
            return editor.jaxpr() if done else None
        left.add(failed)


def _put_in_if_possible(editor: Editor, sorting: Sorting, devices: int) -> list[_ExpertCall] | None:
    """None where the rows of one sorting cannot become operations; then the editor is to be thrown away."""
    try:
        return _put_in(editor, sorting, devices)
    except UnavailableValue:
        return None


def _put_in(editor: Editor, sorting: Sorting, devices: int) -> list[_ExpertCall]:
    """The operations in the place of what is made of the rows of one sorting; [] where it is not worth it.

    Raises:
        UnavailableValue: something else reads the sorted rows, or arrays of other sizes are made of these rows, or
            these rows of such arrays.
    """
    regions = RowRegions.of(editor.tree, sorting)
    calls = list(_calls(regions))
    if not calls or calls[0].slots.tokens % devices or not _has_many_rows(editor.tree, regions):
        return []
    for call in calls:
        call.put_in(editor)
    if not values_needed(editor.tree).isdisjoint(regions.row_dims):
        raise UnavailableValue
    return calls


def _has_many_rows(tree: BodyTree, regions: RowRegions) -> bool:
    """Whether rows are so many that a device may have whole matrices for its own."""
    products = [eqn for body in tree.root.all() for eqn in body.equations if eqn.primitive.name == RAGGED]
    into = [
        eqn for eqn in products if regions.dim_of(eqn.invars[0]) is not None and regions.dim_of(eqn.invars[1]) is None
    ]
    sizes = [[math.prod(aval_of(x).shape) for x in eqn.invars[:2]] for eqn in into]
    return all(matrices <= MOST_PER_ROW * rows for rows, matrices in sizes)


def _body_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """What a call runs; `autoshard.ops.ragged_dot` and its backward pass are calls too, of the plain function."""
    if not _is_ragged(eqn):
        return called_jaxpr(eqn)
    types = [jax.ShapeDtypeStruct(aval_of(x).shape, aval_of(x).dtype) for x in eqn.invars]
    return jax.make_jaxpr(functools.partial(evaluated, **eqn.params))(*types)


def _is_function_of_jax(eqn: JaxprEqn) -> bool:
    """Whether a call is of a function whose derivative is written out, as `jax.nn.relu`."""
    return eqn.primitive.name == "custom_jvp_call"


def _is_ragged(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != OPERATION or eqn.params["batched"]:
        return False
    operation = eqn.params["operation"]
    return (operation if operation.forward is None else operation.forward.operation) is ragged_operation


def _has_ragged(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name == RAGGED or _is_ragged(eqn) or any(_has_ragged(inner.jaxpr) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


@dataclass(frozen=True)
class Slots:
    """How slots are numbered: `tokens` times `each`, by token first, or by place first."""

    tokens: int
    each: int
    by_token: bool

    @classmethod
    def of(cls, rows: int, tables: Sequence[np.ndarray]) -> Slots:
        """What numbers tables of tokens have.

        Raises:
            UnavailableValue: they are none of these.
        """
        slots = np.arange(rows)
        found = {cls._of(rows, table, slots) for table in tables if not np.array_equal(table, slots)}
        if len(found) > 1:
            raise UnavailableValue
        return found.pop() if found else cls(rows, 1, True)

    @classmethod
    def _of(cls, rows: int, table: np.ndarray, slots: np.ndarray) -> Slots:
        tokens = int(table.max()) + 1
        if rows % tokens == 0:
            each = rows // tokens
            if np.array_equal(table, slots // each):
                return cls(tokens, each, True)
            if np.array_equal(table, slots % tokens):
                return cls(tokens, each, False)
        raise UnavailableValue

    def apart(self, x: Any) -> Any:
        """``[M, ...]`` to ``[T, K, ...]``."""
        if self.by_token:
            return x.reshape(self.tokens, self.each, *x.shape[1:])
        return x.reshape(self.each, self.tokens, *x.shape[1:]).swapaxes(0, 1)

    def together(self, x: Any) -> Any:
        """``[T, K, ...]`` to ``[M, ...]``."""
        x = x if self.by_token else x.swapaxes(0, 1)
        return x.reshape(self.tokens * self.each, *x.shape[2:])

    def kind(self, table: np.ndarray) -> RowRole:
        is_slot = len(table) == 0 or np.array_equal(table, np.arange(self.tokens * self.each))
        return RowRole.SLOT if is_slot else RowRole.TOKEN

    def has_all(self, var: Any, kind: RowRole) -> bool:
        """Whether the leading dims of an array are those of all tokens or slots, and of nothing else."""
        shape, size = aval_of(var).shape, self.tokens if kind is RowRole.TOKEN else self.tokens * self.each
        return size in itertools.accumulate(shape, operator.mul)


@dataclass(frozen=True, eq=False)
class _ExpertCall:
    """Exits of one body and level, as one operation."""

    regions: RowRegions
    slots: Slots
    leaving: tuple[RowExit, ...]

    def function(self) -> tuple[RowFunction, list[Var]]:
        """The function of rows, and the arrays outside that it reads.

        Raises:
            UnavailableValue: an array has other elements beside those of tokens or slots.
        """
        reader = _RowReader(self.regions, self.slots)
        outputs: list[tuple[Var, RowRole]] = []
        for one in self.leaving:
            if one.how is ExitKind.PER_GROUP:
                reader.need(one.eqn)
                outputs.append((reader.origin(one.eqn.outvars[0]), RowRole.GROUP))
            elif one.how is ExitKind.ADDED_TO_GROUPS:
                assert one.rows is not None, "it sums up rows"
                reader.need(one.rows)
                made = Var(aval_of(one.eqn.outvars[0]))
                reader.sums[made] = one.rows
                outputs.append((made, RowRole.GROUP))
            else:
                assert one.rows is not None, "all others take rows out"
                reader.need(one.rows)
                kind = RowRole.SLOT if one.table is None else self.slots.kind(one.table)
                if one.how is ExitKind.ADDED and not self.slots.has_all(one.eqn.outvars[0], kind):
                    raise UnavailableValue
                outputs.append((one.rows, kind))
        return reader.function(outputs)

    def put_in(self, editor: Editor) -> None:
        """
        Raises:
            UnavailableValue: an array that it reads cannot be handed here.
        """
        function, arrays = self.function()
        if not function.has_any_rows:
            raise UnavailableValue
        operation, slots = routed_operation(function), self.slots
        (body,) = {one.body for one in self.leaving}
        outer = [self.regions.sorting.keys, *arrays]
        operands = [editor.here(var, body) for var in outer]
        adding = ExitKind.ADDED, ExitKind.ADDED_TO_GROUPS
        bases = [one.eqn.invars[0] for one in self.leaving if one.how in adding]
        fixed = {i: base for i, base in enumerate(bases) if not isinstance(base, Var)}
        given = [base for base in bases if isinstance(base, Var)]

        def call(keys: Any, *others: Any) -> list[Any]:
            inputs = [
                slots.apart(x.reshape(aval_of(var).shape)) if kind is RowRole.SLOT else x
                for x, (var, kind) in zip(others[: len(arrays)], function.inputs, strict=True)
            ]
            made = operation(slots.apart(keys), *inputs)
            moving = iter(others[len(arrays) :])
            added = iter(fixed[i].val if i in fixed else next(moving) for i in range(len(bases)))
            found = []
            for one, (_, kind), x in zip(self.leaving, function.outputs, made, strict=True):
                like: Any = aval_of(one.eqn.outvars[0])
                whole = slots.together(x) if kind is RowRole.SLOT else x
                if one.how in adding:
                    whole = jax.numpy.asarray(next(added)) + whole
                found.append(whole.reshape(like.shape).astype(like.dtype))
            return found

        gone = [one.eqn for one in self.leaving]
        editor.replace(body, gone, call, [*operands, *given], [eqn.outvars[0] for eqn in gone])


def _calls(regions: RowRegions) -> Iterator[_ExpertCall]:
    into, out = [one.table for one in regions.entries.values()], [one.table for one in regions.leaving]
    tables = [table for table in (*into, *out) if table is not None]
    slots = Slots.of(regions.sorting.rows, tables)

    def place(one: RowExit) -> tuple[int, int]:
        return id(one.body), one.level

    for _, several in itertools.groupby(sorted(regions.leaving, key=place), key=place):
        yield _ExpertCall(regions, slots, tuple(several))


class _RowReader:
    """The equations on rows that some values are made of, from where rows come in."""

    def __init__(self, regions: RowRegions, slots: Slots):
        self.regions, self.slots = regions, slots
        self.origin = regions.tree.origin
        self.equations: list[JaxprEqn] = []
        self.inputs: dict[Var, tuple[RowRole, Var]] = {}  # value inside -> its kind, and the array outside
        self.row_dims: dict[Var, int] = {}
        self.sizes: Var | None = None
        self.lookups: dict[Var, Var] = {}
        self.sums: dict[Var, Var] = {}
        self._done = set[int]()

    def need(self, what: Any) -> None:
        """Adds what makes a value of rows, or an equation, behind what that needs."""
        waiting: list[Any] = [what]
        while waiting:
            one = waiting[-1]
            eqn = one
            if isinstance(one, Var):
                if one in self.regions.entries or one in self.regions.lookups:
                    self._enter(one)
                    waiting.pop()
                    continue
                _, eqn = self.regions.tree.homes[one]
            if id(eqn) in self._done:
                waiting.pop()
                continue
            before = self._operands(eqn)
            missing = [var for var in before if not self._has(var)]
            if missing:
                waiting += missing
                continue
            waiting.pop()
            self._add(eqn)

    def _has(self, var: Var) -> bool:
        if var in self.inputs or var in self.lookups:
            return True
        _, eqn = self.regions.tree.homes[var]
        return id(eqn) in self._done

    def _operands(self, eqn: JaxprEqn) -> list[Var]:
        """The operands of rows, and what is broadcast along rows."""
        known = self.regions.row_dims, self.regions.spread
        return [var for x in eqn.invars if isinstance(x, Var) and any((var := self.origin(x)) in one for one in known)]

    def _enter(self, var: Var) -> None:
        self.row_dims[var] = 0
        if var in self.regions.lookups:
            array = self.lookups[var] = self.regions.lookups[var]
            self._outside(array, RowRole.GROUP)
            return
        entry = self.regions.entries[var]
        kind = self.slots.kind(entry.table)
        if not self.slots.has_all(entry.array, kind):
            raise UnavailableValue
        self.inputs[var] = kind, entry.array

    def _outside(self, var: Var, kind: RowRole) -> None:
        """An array outside is read as it is.

        Raises:
            UnavailableValue: another equation reads it otherwise.
        """
        if self.inputs.setdefault(var, (kind, var))[0] is not kind:
            raise UnavailableValue

    def _add(self, eqn: JaxprEqn) -> None:
        self._done.add(id(eqn))
        inside, is_ragged = set(self._operands(eqn)), eqn.primitive.name == RAGGED
        constants = self.regions.constants if eqn.primitive.name == "select_n" else {}
        for i, x in enumerate(eqn.invars):
            if not isinstance(x, Var) or (var := self.origin(x)) in inside or var in constants:
                continue
            if is_ragged and i == 2:
                self.sizes = self.sizes or var
            else:
                self._outside(var, RowRole.GROUP if is_ragged else RowRole.SHARED)
        read: list[Any] = []
        for i, x in enumerate(eqn.invars):
            if not isinstance(x, Var):
                read.append(x)
            elif is_ragged and i == 2:
                read.append(self.sizes)
            elif (var := self.origin(x)) in constants:
                read.append(literal(constants[var]))
            else:
                read.append(var)
        written = [self.origin(var) if isinstance(var, Var) else var for var in eqn.outvars]
        self.equations.append(eqn.replace(invars=read, outvars=written))
        known = self.regions.row_dims | self.regions.spread
        self.row_dims |= {var: known[var] for var in written if var in known}

    def function(self, outputs: Sequence[tuple[Var, RowRole]]) -> tuple[RowFunction, list[Var]]:
        made = RowFunction(
            tuple(self.equations),
            self.row_dims,
            tuple((var, kind) for var, (kind, _) in self.inputs.items()),
            tuple(outputs),
            self.sizes,
            self.lookups,
            self.sums,
            self.slots.each,
            self.regions.sorting.groups,
        )
        return made, [array for _, array in self.inputs.values()]
