"""One sort of keys in a step, and what other arrays of integers are that follow from these keys.

A program that sorts rows by group makes many arrays of integers: the order, its inverse, the token of each sorted row,
how many rows each group has. There are many ways to write each. So the equations that make them are evaluated, for
several draws of the keys, and compared with the definition, as polynomial identities are tested (Schwartz 1980).

Draws are of even loads, of full groups and of keys beyond the groups. A flag may compare loads with a limit that none
of them reaches. So it counts as constant only if it does not depend on the keys, except by a permutation that sorts.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.lax import GatherScatterMode

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of, run
from autoshard.recognition.bodies import BodyTree

_DRAWS = 5  # of keys, for which arrays are evaluated; `Integers` is given them
_TAKES_ELEMENTS = frozenset({  # of their first operand, each as it is
    "convert_element_type", "copy", "copy_p", "dynamic_slice", "expand_dims", "gather", "reshape", "slice", "squeeze",
    "transpose",
})  # fmt: skip
_MOST_BYTES = 2**28  # of an array that is evaluated


class Index(enum.Enum):
    """What an array of integers is, of one element per row."""

    OF_SORTED = "of sorted"  # of each sorted row, a function of its slot: its token, or the slot itself
    INVERSE = "inverse"  # of each slot, where it is among the sorted rows
    KEYS = "keys"  # the keys, sorted


@dataclass(eq=False)
class Integers:
    """Arrays of integers and flags that follow from constants, and from arrays of which draws are known."""

    tree: BodyTree
    known: dict[Var, list[Any] | None] = field(default_factory=dict)  # origin -> its values, one per draw

    def values(self, var: Var) -> list[Any] | None:
        """What an array is in each draw; None if it depends on anything else."""
        origin = self.tree.origin(var)
        waiting = [origin]
        while waiting:
            one = waiting[-1]
            if one in self.known:
                waiting.pop()
                continue
            body, maker = self.tree.homes.get(one, (None, None))
            if maker is None or body is None or not _is_evaluated(maker) or id(maker) in body.inner:
                held = None if body is None else body.constants.get(one)
                self.known[one] = None if held is None else [held] * _DRAWS
                continue
            before = [self.tree.origin(x) for x in maker.invars if isinstance(x, Var)]
            missing = [x for x in before if x not in self.known]
            if any(self.known.get(x, ()) is None for x in before):
                self.known |= dict.fromkeys(self._made_by(maker), None)
            elif missing:
                waiting += missing
            else:
                self._evaluate(maker)
        return self.known[origin]

    def _made_by(self, eqn: JaxprEqn) -> list[Var]:
        return [self.tree.origin(var) for var in eqn.outvars if isinstance(var, Var)]

    def _evaluate(self, eqn: JaxprEqn) -> None:
        operands = [[x.val] * _DRAWS if isinstance(x, Literal) else self._drawn(x) for x in eqn.invars]
        is_fixed = all(one is values[0] for values in operands for one in values)
        found: list[list[Any]] = []
        with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            for draw in range(1 if is_fixed else _DRAWS):
                arrays = [jax.numpy.asarray(values[draw]) for values in operands]
                found.append([np.asarray(one) for one in run(eqn, arrays)])
        found = found * _DRAWS if is_fixed else found
        self.known |= zip(self._made_by(eqn), map(list, zip(*found, strict=True)), strict=True)

    def _drawn(self, var: Var) -> list[Any]:
        values = self.known[self.tree.origin(var)]
        assert values is not None, "it has been evaluated"
        return values


def _is_evaluated(eqn: JaxprEqn) -> bool:
    avals = [aval_of(var) for var in eqn.outvars]
    small = all(np.prod(one.shape) * 8 <= _MOST_BYTES for one in avals)
    whole = all(np.issubdtype(one.dtype, np.integer) or one.dtype == bool for one in avals if hasattr(one, "dtype"))
    return small and whole and not eqn.effects


class Sorting:
    """The keys that some equation sorts, one per slot, and arrays that follow from them."""

    def __init__(self, tree: BodyTree, constants: Integers, keys: Var, source: Var, groups: int):
        """
        Args:
            constants: what follows from constants alone, shared by all sortings.
            keys: ``[M]``, the group of each slot; an origin.
            source: the array that has their elements.
        """
        self.tree, self.keys, self.source, self.groups = tree, keys, source, groups
        self._constants = constants
        self._integers = Integers(tree, {source: self._drawn()})
        self._indices: dict[Var, tuple[Index, np.ndarray | None] | None] = {}

    def _drawn(self) -> list[np.ndarray]:
        """Even loads, all rows in one group, and keys beyond the groups where the source can have them."""
        random, aval = np.random.default_rng(0), aval_of(self.source)
        low, high = _range_of(self.tree, self._constants, self.source)
        ends = np.iinfo(aval.dtype)
        low, high = max(-1, low, ends.min), min(self.groups + 1, high, ends.max)
        spans = [(0, self.groups), (0, self.groups), (0, 1), (self.groups - 1, self.groups)]
        spans.append((int(min(0, low)), int(max(self.groups, high + 1))))
        assert len(spans) == _DRAWS
        return [random.integers(*span, aval.shape).astype(aval.dtype) for span in spans]

    @cached_property
    def are_keys_of_groups(self) -> bool:
        """Whether every key is one of the groups, whatever the arguments of the step."""
        low, high = _range_of(self.tree, self._constants, self.keys)
        return low >= 0 and high < self.groups

    def is_as(self, other: Sorting) -> bool:
        """Whether another sorting is of the same keys, which the program takes twice."""
        same = self.source is other.source and self.groups == other.groups
        return same and all(np.array_equal(one, two) for one, two in zip(self._draws, other._draws, strict=True))

    @property
    def rows(self) -> int:
        return int(aval_of(self.keys).shape[0])

    @cached_property
    def _draws(self) -> list[np.ndarray]:
        found = self._integers.values(self.keys)
        assert found is not None, "they are elements of the source"
        return [np.asarray(one) for one in found]

    @cached_property
    def _orders(self) -> list[np.ndarray]:
        return [np.argsort(keys, kind="stable") for keys in self._draws]

    def follows(self, var: Any) -> bool:
        """Whether an array follows from the keys alone."""
        return not isinstance(var, Literal) and self._integers.values(var) is not None

    def constant(self, var: Any) -> Any:
        """The one value that all elements of an array have, whatever the keys; None if there is none."""
        found = None if isinstance(var, Literal) else self._integers.values(var)
        if found is None or self._reads_keys(var):
            return None
        first = np.asarray(found[0]).reshape(-1)[:1]
        return first[0] if first.size and all(np.all(np.asarray(one) == first[0]) for one in found) else None

    def _reads_keys(self, var: Var) -> bool:
        """Whether an array of integers is made of the keys. Of a permutation that sorts something it is not."""
        waiting, seen = [self.tree.origin(var)], set[Var]()
        while waiting:
            one = waiting.pop()
            if one is self.source:
                return True
            _, maker = self.tree.homes.get(one, (None, None))
            if one in seen or maker is None or self._is_permutation(maker, one):
                continue
            seen.add(one)
            waiting += [self.tree.origin(x) for x in maker.invars if isinstance(x, Var)]
        return False

    def _is_permutation(self, maker: JaxprEqn, var: Var) -> bool:
        """Whether an equation sorts the numbers of slots."""
        operand = _sorted_operand(self.tree, maker, var)
        found = self._integers.values(operand) if isinstance(operand, Var) else None
        if found is None or any(one is not found[0] for one in found):
            return False
        return np.array_equal(found[0], np.arange(found[0].size))

    def is_sizes(self, var: Any) -> bool:
        """Whether an array says how many rows each group has."""
        found = self._integers.values(var) if aval_of(var).shape == (self.groups,) else None
        clipped = [np.clip(keys.astype(np.int64), 0, self.groups) for keys in self._draws]  # as `jnp.bincount` does
        expected = [np.bincount(keys, minlength=self.groups)[: self.groups] for keys in clipped]
        return found is not None and all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))

    def index_of(self, var: Any) -> tuple[Index, np.ndarray | None] | None:
        """What an array of M integers is, in any shape; of a function of slots, its values per slot."""
        if isinstance(var, Literal) or np.prod(aval_of(var).shape) != self.rows:
            return None
        origin = self.tree.origin(var)
        if origin not in self._indices:
            self._indices[origin] = self._index_of(origin)
        return self._indices[origin]

    def _index_of(self, var: Var) -> tuple[Index, np.ndarray | None] | None:
        found = self._integers.values(var)
        if found is None:
            return None
        flat, slots = [np.asarray(one).reshape(-1) for one in found], np.arange(self.rows)
        tables = [np.empty_like(one) for one in flat]
        for table, one, order in zip(tables, flat, self._orders, strict=True):
            table[order] = one
        if all(np.array_equal(tables[0], one) for one in tables[1:]):
            return Index.OF_SORTED, tables[0]
        if all(np.array_equal(one[order], slots) for one, order in zip(flat, self._orders, strict=True)):
            return Index.INVERSE, None
        pairs = zip(flat, self._draws, self._orders, strict=True)
        return (Index.KEYS, None) if all(np.array_equal(one, keys[order]) for one, keys, order in pairs) else None


def _source_of(tree: BodyTree, constants: Integers, var: Var) -> Var:
    """The array whose elements a value has, in another shape, or some of them: the program may take these twice."""
    while True:
        var = tree.origin(var)
        _, maker = tree.homes.get(var, (None, None))
        if maker is None or maker.primitive.name not in _TAKES_ELEMENTS or not isinstance(maker.invars[0], Var):
            return var
        fixed = all(isinstance(x, Literal) or constants.values(x) is not None for x in maker.invars[1:])
        if not fixed or not np.issubdtype(aval_of(maker.invars[0]).dtype, np.integer):
            return var
        var = maker.invars[0]


def _sorted_operand(tree: BodyTree, maker: JaxprEqn, var: Var) -> Any:
    """The operand of a sort whose elements a result has; None if the equation is none."""
    if maker.primitive.name != "sort":
        return None
    pairs = zip(maker.outvars, maker.invars, strict=True)
    return next(x for made, x in pairs if isinstance(made, Var) and tree.origin(made) is var)


def _range_of(tree: BodyTree, constants: Integers, atom: Any) -> tuple[float, float]:
    """The least and the largest element that an array of integers can have, whatever the arguments of the step."""
    values = [atom.val] if isinstance(atom, Literal) else constants.values(atom)
    if values is not None:
        return float(np.min(values[0])), float(np.max(values[0]))
    origin, dtype = tree.origin(atom), aval_of(atom).dtype
    _, maker = tree.homes.get(origin, (None, None))
    if maker is None or not np.issubdtype(dtype, np.integer):
        return -math.inf, math.inf
    name, found = maker.primitive.name, [(-math.inf, math.inf)]
    if name in ("top_k", "argmax", "argmin"):
        (dim,) = maker.params["axes"] if "axes" in maker.params else (maker.params["axis"],)
        found = [(0, aval_of(maker.invars[0]).shape[dim] - 1)]
    elif name == "select_n":
        found = [_range_of(tree, constants, x) for x in maker.invars[1:]]
    elif name == "sort":
        found = [_range_of(tree, constants, _sorted_operand(tree, maker, origin))]
    elif name in _TAKES_ELEMENTS and maker.params.get("mode") is not GatherScatterMode.FILL_OR_DROP:
        found = [_range_of(tree, constants, maker.invars[0])]
    low, high = min(one for one, _ in found), max(one for _, one in found)
    fits = np.iinfo(dtype).min <= low and high <= np.iinfo(dtype).max
    return (low, high) if fits else (-math.inf, math.inf)


def sortings(tree: BodyTree) -> Iterator[Sorting]:
    """A sorting for all keys whose rows some ragged product takes."""
    ragged = [eqn for body in tree.root.all() for eqn in body.equations if eqn.primitive.name == "ragged_dot_general"]
    sizes = {tree.origin(eqn.invars[2]): int(aval_of(eqn.invars[2]).shape[-1]) for eqn in ragged if _is_plain(eqn)}
    constants, done = Integers(tree), list[Sorting]()
    for body in tree.root.all():
        for eqn in body.equations:
            if eqn.primitive.name != "sort" or not _sorts_keys(eqn):
                continue
            keys = tree.origin(eqn.invars[0])
            source = _source_of(tree, constants, keys)
            for groups in dict.fromkeys(sizes.values()):
                found = Sorting(tree, constants, keys, source, groups)
                if any(found.is_as(one) for one in done):
                    continue
                done.append(found)
                if any(count == groups and found.is_sizes(var) for var, count in sizes.items()):
                    yield found


def _is_plain(eqn: JaxprEqn) -> bool:
    return isinstance(eqn.invars[2], Var) and len(aval_of(eqn.invars[2]).shape) == 1


def _sorts_keys(eqn: JaxprEqn) -> bool:
    keys = eqn.invars[0]
    aval = aval_of(keys)
    is_row = isinstance(keys, Var) and len(aval.shape) == 1 and np.issubdtype(aval.dtype, np.integer)
    return bool(is_row and eqn.params["num_keys"] == 1 and len(eqn.invars) > 1)
