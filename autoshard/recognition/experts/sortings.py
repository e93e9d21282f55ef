"""One sort of keys in a step, and what other arrays of integers are that follow from these keys.

A program that sorts rows by group makes many arrays of integers: the order, its inverse, the token of each sorted row,
how many rows each group has. There are many ways to write each. So the equations that make them are evaluated, for two
random draws of the keys, and compared with the definition, as polynomial identities are tested (Schwartz 1980).
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of, run
from autoshard.recognition.bodies import Tree

_DRAWS = 2
_SAME_ELEMENTS = frozenset({"convert_element_type", "copy", "copy_p", "expand_dims", "reshape", "squeeze", "transpose"})
_MOST_BYTES = 2**29  # of an array that is evaluated


class Index(enum.Enum):
    """What an array of integers is, of one element per row."""

    OF_SORTED = "of sorted"  # of each sorted row, a function of its slot: its token, or the slot itself
    INVERSE = "inverse"  # of each slot, where it is among the sorted rows
    KEYS = "keys"  # the keys, sorted


@dataclass(eq=False)
class Sorting:
    """The keys that some equation sorts, one per slot, and arrays that follow from them."""

    tree: Tree
    keys: Var  # [M], the group of each slot; an origin
    groups: int
    _draws: list[np.ndarray] = field(default_factory=list)  # of the keys
    _known: dict[Var, list[Any] | None] = field(default_factory=dict)  # origin -> its values per draw

    def __post_init__(self) -> None:
        random, source = np.random.default_rng(0), _source_of(self.tree, self.keys)
        aval = aval_of(source)
        self._known[source] = [random.integers(0, self.groups, aval.shape).astype(aval.dtype) for _ in range(_DRAWS)]
        found = self.values(self.keys)
        assert found is not None, "they are its elements"
        self._draws = [np.asarray(one) for one in found]

    @property
    def rows(self) -> int:
        return int(aval_of(self.keys).shape[0])

    @property
    def orders(self) -> list[np.ndarray]:
        return [np.argsort(keys, kind="stable") for keys in self._draws]

    def is_sizes(self, var: Any) -> bool:
        """Whether an array says how many rows each group has."""
        found = self.values(var) if aval_of(var).shape == (self.groups,) else None
        expected = [np.bincount(keys, minlength=self.groups) for keys in self._draws]
        return found is not None and all(np.array_equal(one, two) for one, two in zip(found, expected, strict=True))

    def index_of(self, var: Any) -> tuple[Index, np.ndarray | None] | None:
        """What an array of M integers is, in any shape; of a function of slots, its values per slot."""
        if isinstance(var, Literal) or np.prod(aval_of(var).shape) != self.rows:
            return None
        found = self.values(var)
        if found is None:
            return None
        flat = [np.asarray(one).reshape(-1) for one in found]
        tables = [np.empty_like(one) for one in flat]
        for table, one, order in zip(tables, flat, self.orders, strict=True):
            table[order] = one
        if all(np.array_equal(tables[0], one) for one in tables[1:]):
            return Index.OF_SORTED, tables[0]
        if all(np.array_equal(one[order], np.arange(self.rows)) for one, order in zip(flat, self.orders, strict=True)):
            return Index.INVERSE, None
        pairs = zip(flat, self._draws, self.orders, strict=True)
        if all(np.array_equal(one, keys[order]) for one, keys, order in pairs):
            return Index.KEYS, None
        return None

    def values(self, var: Any) -> list[Any] | None:
        """What an array is for each draw of the keys; None if it depends on anything else."""
        origin = self.tree.origin(var)
        waiting = [origin]
        while waiting:
            one = waiting[-1]
            if one in self._known:
                waiting.pop()
                continue
            body, maker = self.tree.homes.get(one, (None, None))
            if maker is None or body is None or not self._is_evaluated(maker) or id(maker) in body.inner:
                held = None if body is None else body.constants.get(one)
                self._known[one] = None if held is None else [held] * _DRAWS
                continue
            before = [self.tree.origin(x) for x in maker.invars if isinstance(x, Var)]
            missing = [x for x in before if x not in self._known]
            if any(self._known.get(x, ()) is None for x in before):
                self._known |= dict.fromkeys(self._made_by(maker), None)
            elif missing:
                waiting += missing
            else:
                self._evaluate(maker)
        return self._known[origin]

    def _made_by(self, eqn: JaxprEqn) -> Iterator[Var]:
        return (self.tree.origin(var) for var in eqn.outvars if isinstance(var, Var))

    @staticmethod
    def _is_evaluated(eqn: JaxprEqn) -> bool:
        avals = [aval_of(var) for var in eqn.outvars]
        small = all(np.prod(one.shape) * 8 <= _MOST_BYTES for one in avals)
        whole = all(np.issubdtype(one.dtype, np.integer) or one.dtype == bool for one in avals if hasattr(one, "dtype"))
        return small and whole and not eqn.effects

    def _evaluate(self, eqn: JaxprEqn) -> None:
        found: list[list[Any]] = []
        with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
            for draw in range(_DRAWS):
                operands = [
                    x.val if isinstance(x, Literal) else self._known[self.tree.origin(x)][draw]  # type: ignore[index]
                    for x in eqn.invars
                ]
                found.append([np.asarray(one) for one in run(eqn, list(map(jax.numpy.asarray, operands)))])
        self._known |= zip(self._made_by(eqn), map(list, zip(*found, strict=True)), strict=True)


def _source_of(tree: Tree, var: Var) -> Var:
    """The array whose elements, and no others, a value has in another shape: one that the program may reshape twice."""
    while True:
        var = tree.origin(var)
        _, maker = tree.homes.get(var, (None, None))
        if maker is None or maker.primitive.name not in _SAME_ELEMENTS or not isinstance(maker.invars[0], Var):
            return var
        if not np.issubdtype(aval_of(maker.invars[0]).dtype, np.integer):
            return var
        var = maker.invars[0]


def sortings(tree: Tree) -> Iterator[Sorting]:
    """A sorting for all keys whose rows some ragged product takes."""
    ragged = [eqn for body in tree.root.all() for eqn in body.equations if eqn.primitive.name == "ragged_dot_general"]
    sizes = {tree.origin(eqn.invars[2]): int(aval_of(eqn.invars[2]).shape[-1]) for eqn in ragged if _is_plain(eqn)}
    done = set[Var]()
    for body in tree.root.all():
        for eqn in body.equations:
            if eqn.primitive.name != "sort" or not _sorts_keys(eqn):
                continue
            keys, source = tree.origin(eqn.invars[0]), _source_of(tree, eqn.invars[0])
            if source in done:
                continue
            done.add(source)
            for groups in dict.fromkeys(sizes.values()):
                found = Sorting(tree, keys, groups)
                if any(count == groups and found.is_sizes(var) for var, count in sizes.items()):
                    yield found


def _is_plain(eqn: JaxprEqn) -> bool:
    return isinstance(eqn.invars[2], Var) and len(aval_of(eqn.invars[2]).shape) == 1


def _sorts_keys(eqn: JaxprEqn) -> bool:
    keys = eqn.invars[0]
    aval = aval_of(keys)
    is_row = isinstance(keys, Var) and len(aval.shape) == 1 and np.issubdtype(aval.dtype, np.integer)
    return bool(is_row and eqn.params["num_keys"] == 1 and len(eqn.invars) > 1)
