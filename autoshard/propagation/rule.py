"""Which dims of an equation's operands and results belong together: shapes and notation in, a `Rule` out.

The notation is that of `jax.experimental.custom_partitioning`, close to einsum. There is one name per dim, and brackets
stand around the factors of a compound dim (major to minor). ``...`` stands for leading dims of any number, and ``1``
for a dim of size 1 that no factor owns.

>>> rule = Rule.parse("b (h k), (h k) f -> b f", (8, 64), (64, 16), (8, 16), reduction="h k", sizes={"h": 4})
>>> rule.sizes["k"], sorted(rule.splittable)
(16, ['b', 'f', 'h', 'k'])
>>> print(rule)
b (h k), (h k) f -> b f
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import Any, NoReturn

from autoshard.errors import RuleError
from autoshard.propagation.halos import Reach

Dims = tuple[tuple[str, ...], ...]  # of one tensor: dim -> factors, major to minor
Shape = tuple[int, ...]

NONE: frozenset[str] = frozenset()  # shared by all rules: it takes 216 bytes, and most sets of a rule are empty
KEPT_RULES = 256  # cached by each function that makes rules from shapes: enough for the shapes of a large step


@dataclass(frozen=True)
class Rule:
    """Which dims of an equation's operands and results are one factor."""

    operands: tuple[Dims, ...]  # operand -> dim -> factors, major to minor; () for a size-1 dim that no factor owns
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]  # factor -> size
    reduction: frozenset[str]  # if split, results are partial sums, finished by all_reduce or reduce_scatter
    need_replication: frozenset[str]  # whole on every device while the equation runs (sort, fft, ...); propagates still
    permutation: frozenset[str]  # if split, the equation communicates; strategies split only those with a reach
    given: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # factor -> the mesh axes that the user gives
    open_axes: frozenset[str] = NONE  # the only mesh axes that may split given factors further
    reaches: tuple[Reach[str], ...] = ()  # what devices read beyond their shards if permutation factors are split
    summed: frozenset[str] = NONE  # permutation factors that leave partial sums, too, if they are split
    batch_factor: str | None = None  # of windows: the factor along which no window moves
    alike: Mapping[str, str] = field(default_factory=dict)  # factor -> the exchanged one that strategies split with it

    @cached_property
    def factors(self) -> tuple[str, ...]:
        """Every factor, in order of appearance."""
        seen = {factor: None for dims in (*self.operands, *self.results) for dim in dims for factor in dim}
        return tuple(seen)

    @cached_property
    def splittable(self) -> frozenset[str]:
        """The factors a strategy may split."""
        whole = self.need_replication | self.permutation
        return frozenset(factor for factor, size in self.sizes.items() if size > 1 and factor not in whole)

    @cached_property
    def exchanged(self) -> frozenset[str]:
        """The permutation factors that a strategy may split: devices exchange halos."""
        moved = (rows.factor for reach in self.reaches for rows in reach.rows)
        return frozenset(factor for factor in moved if self.sizes[factor] > 1) or NONE

    @cached_property
    def passing(self) -> tuple[str, ...]:
        """The factors without a special kind, which pass from operands to results."""
        special = self.reduction | self.need_replication | self.permutation
        return tuple(factor for factor in self.sizes if factor not in special)

    def __str__(self) -> str:
        return f"{_text(self.operands)} -> {_text(self.results)}"

    @classmethod
    def parse(
        cls,
        notation: str,
        *shapes: Sequence[int],
        reduction: str | Iterable[str] = "",
        need_replication: str | Iterable[str] = "",
        permutation: str | Iterable[str] = "",
        sizes: Mapping[str, int] | None = None,
    ) -> Rule:
        """The rule written as `notation`, for operands and results of these shapes.

        Args:
            notation: for example ``"... i k, k j -> ... i j"``.
            shapes: the shape of every operand, then of every result.
            reduction: factors, as one string or several, that are summed (or maximised, ...) away.
            need_replication: factors that stay whole; as everywhere here, ``...1`` names all leading dims so written.
            permutation: factors that are expensive to split; only they may differ in size from dim to dim.
            sizes: factors of compound dims whose size the shapes do not tell.

        Raises:
            RuleError: with the place in the notation that is wrong.
        """
        return _Notation(notation).rule(shapes, reduction, need_replication, permutation, sizes or {})

    @staticmethod
    def check_notation(notation: str, **keywords: Any) -> None:
        """Raises the errors of a rule that do not depend on shapes; `said` are the keyword arguments of `parse`.

        Raises:
            RuleError: with the place in the notation that is wrong.
        """
        written = _Notation(notation)
        written.check([*written.operands, *written.results], **keywords)


class RuleBuilder:
    """A rule under construction: one `factor` call per factor, major before minor within a compound dim."""

    def __init__(self, operands: Sequence[Shape], results: Sequence[Shape]):
        self._operands: list[list[tuple[str, ...]]] = [[()] * len(shape) for shape in operands]
        self._results: list[list[tuple[str, ...]]] = [[()] * len(shape) for shape in results]
        self._sizes: dict[str, int] = {}
        self._kinds: dict[str, list[str]] = {"": [], "reduction": [], "need_replication": [], "permutation": []}

    def factor(
        self, size: int, operands: Iterable[tuple[int, int]], results: Iterable[tuple[int, int]], kind: str = ""
    ) -> str:
        """Adds a factor to these (operand, dim) and (result, dim) pairs; its name."""
        name = factor_name(len(self._sizes))
        self._sizes[name] = size
        self._kinds[kind].append(name)
        for tensor, dim in operands:
            self._operands[tensor][dim] += (name,)
        for tensor, dim in results:
            self._results[tensor][dim] += (name,)
        return name

    def build(
        self, reaches: Sequence[Reach[str]] = (), summed: Iterable[str] = (), batch_factor: str | None = None
    ) -> Rule:
        return Rule(
            operands=tuple(map(tuple, self._operands)),
            results=tuple(map(tuple, self._results)),
            sizes=self._sizes,
            reduction=frozenset(self._kinds["reduction"]) or NONE,
            need_replication=frozenset(self._kinds["need_replication"]) or NONE,
            permutation=frozenset(self._kinds["permutation"]) or NONE,
            reaches=tuple(reaches),
            summed=frozenset(summed) or NONE,
            batch_factor=batch_factor,
        )


def factor_name(index: int) -> str:
    """The name of the index-th factor of a rule: i, j, ..., z, a, ..., h, i1, j1, ..."""
    letter = "ijklmnopqrstuvwxyzabcdefgh"[index % 26]
    return letter if index < 26 else f"{letter}{index // 26}"


def whole(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
    """The rule of an unknown primitive: every dim is a factor of its own and is kept whole."""
    builder = RuleBuilder(operands, results)
    for tensor, shape in enumerate(operands):
        for dim, size in enumerate(shape):
            builder.factor(size, [(tensor, dim)], [], "need_replication")
    for tensor, shape in enumerate(results):
        for dim, size in enumerate(shape):
            builder.factor(size, [], [(tensor, dim)], "need_replication")
    return builder.build()


def dimwise(
    operands: Sequence[Shape],
    results: Sequence[Shape],
    kinds: Mapping[int, str] | None = None,
    sizes: Shape | None = None,
    *,
    broadcasts: bool = False,
) -> Rule:
    """The rule that joins dim by dim: dim d of every operand and result is one factor.

    Args:
        operands, results: their shapes; a scalar has no part in it.
        kinds: the kind of the factor of some dims.
        sizes: the factors' sizes, where the dims differ; by default the first result's.
        broadcasts: whether a dim of size 1 has no part in it either.
    """
    sizes = results[0] if sizes is None else sizes
    builder = RuleBuilder(operands, results)
    for dim, size in enumerate(sizes):
        builder.factor(
            size,
            [(i, dim) for i, shape in enumerate(operands) if shape and not (broadcasts and shape[dim] == 1 < size)],
            [(tensor, dim) for tensor, shape in enumerate(results) if shape],
            kinds.get(dim, "") if kinds else "",
        )
    return builder.build()


def _group(name: str) -> str:
    """The name of a group of leading dims: "..." and "...0" are one."""
    return name if not name.startswith("...") else "..." + name[3:].lstrip("0")


def names_of(factors: str | Iterable[str]) -> tuple[str, ...]:
    """Factor names from one string (spaces or commas between) or from several.

    >>> names_of("i j"), names_of(["i", "j"])
    (('i', 'j'), ('i', 'j'))
    """
    return tuple(re.findall(r"[^\s,]+", factors)) if isinstance(factors, str) else tuple(factors)


def _text(tensors: tuple[Dims, ...]) -> str:
    def dim_text(dim: tuple[str, ...]) -> str:
        return "1" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})"

    return ", ".join(" ".join(map(dim_text, dims)) for dims in tensors)


@dataclass(frozen=True)
class _Dim:
    """One dim as written: its factors, and where in the text it stands."""

    factors: tuple[str, ...]
    position: int
    ellipsis: bool = False  # if so, its only factor is the name of the group, "..." or "...1"


class _Notation:
    """A text in the rule grammar, parsed into dims with their positions in the text."""

    _TOKEN = re.compile(r"\s*(?:(?P<token>->|\.\.\.\d*|[A-Za-z]\w*|1\b|[(),])|(?P<bad>\S))")

    def __init__(self, text: str):
        self.text = text
        sides: list[list[list[_Dim]]] = [[[]]]
        compound: list[str] | None = None
        opened = position = 0
        while match := self._TOKEN.match(text, position):
            position = match.end()
            token, at = match["token"], match.start("token")
            value = sides[-1][-1]
            if token is None:
                self.fail(match.start("bad"), f"{match['bad']!r} does not belong in a rule")
            elif compound is not None and (token in ("(", ",", "->") or token.startswith(".")):
                self.fail(at, f"{token!r} inside the brackets of a compound dim")
            elif token == "->":
                sides.append([[]])
            elif token == ",":
                sides[-1].append([])
            elif token == "(":
                compound, opened = [], at
            elif token == ")":
                if compound is None:
                    self.fail(at, "this bracket was never opened")
                if len(compound) < 2:
                    self.fail(opened, "a compound dim has at least two factors")
                value.append(_Dim(tuple(compound), opened))
                compound = None
            elif token.startswith("."):
                if value:
                    self.fail(at, "'...' stands for leading dims: it comes first")
                value.append(_Dim((token,), at, ellipsis=True))
            elif compound is not None:
                compound.append(token)
            else:
                value.append(_Dim(() if token == "1" else (token,), at))
        if compound is not None:
            self.fail(opened, "this bracket is never closed")
        if len(sides) != 2:
            self.fail(len(text), f"a rule has one '->' between operands and results, this one has {len(sides) - 1}")
        self.operands, self.results = sides

    def fail(self, position: int, message: str) -> NoReturn:
        raise RuleError(f"{message}\n    {self.text}\n    {' ' * position}^")

    def rule(
        self,
        shapes: Sequence[Sequence[int]],
        reduction: str | Iterable[str],
        need_replication: str | Iterable[str],
        permutation: str | Iterable[str],
        sizes: Mapping[str, int],
    ) -> Rule:
        operands, results = self._sides(len(shapes))
        tensors, groups = self._expand([*operands, *results], shapes)
        reduction, need_replication, permutation = (
            tuple(factor for name in names_of(names) for factor in groups.get(_group(name), (name,)))
            for names in (reduction, need_replication, permutation)
        )
        kinds, where = self.check(tensors, reduction, need_replication, permutation, sizes, len(operands))
        known = self._sizes(tensors, shapes, kinds["permutation"], dict(sizes))
        factors = [tuple(dim.factors for dim in dims) for dims in tensors]
        ordered = {factor: known[factor] for factor in where}
        return Rule(tuple(factors[: len(operands)]), tuple(factors[len(operands) :]), ordered, **kinds)  # type: ignore[arg-type]  # three names, none of them `given`

    def check(
        self,
        tensors: Sequence[Sequence[_Dim]],
        reduction: str | Iterable[str] = "",
        need_replication: str | Iterable[str] = "",
        permutation: str | Iterable[str] = "",
        sizes: Mapping[str, int] | None = None,
        operands: int | None = None,
    ) -> tuple[dict[str, frozenset[str]], dict[str, int]]:
        """The factors of each special kind, and the first position of each factor in the text, both checked."""
        kinds = {
            "reduction": frozenset(names_of(reduction)) or NONE,
            "need_replication": frozenset(names_of(need_replication)) or NONE,
            "permutation": frozenset(names_of(permutation)) or NONE,
        }
        where: dict[str, int] = {}
        for dims in tensors:
            here: set[str] = set()
            for dim in dims:
                for factor in dim.factors:
                    where.setdefault(factor, dim.position)
                    if factor in here:
                        self.fail(dim.position, f"factor {factor!r} stands twice in one operand or result")
                    here.add(factor)
        self._check_kinds(kinds, where)
        self._check_given_sizes(sizes or {}, where, tensors)
        in_results = {
            factor
            for dims in tensors[len(self.operands) if operands is None else operands :]
            for dim in dims
            for factor in dim.factors
        }
        for factor, position in where.items():
            if factor.startswith("."):
                continue
            if factor not in in_results and not any(factor in names for names in kinds.values()):
                self.fail(
                    position,
                    f"factor {factor!r} is in no result: say reduction={factor!r} if it is summed away, "
                    f"need_replication={factor!r} if it has to stay whole",
                )
        return kinds, where

    def _check_given_sizes(self, sizes: Mapping[str, int], where: Mapping[str, int], tensors) -> None:
        for factor, size in sizes.items():
            if factor not in where:
                self.fail(0, f"a size is given for {factor!r}, which is no factor of this rule")
            if not isinstance(size, int) or size < 1:
                self.fail(where[factor], f"the size of factor {factor!r} is a positive integer, not {size!r}")
            alone = next((dim for dims in tensors for dim in dims if dim.factors == (factor,)), None)
            if alone is not None:
                self.fail(alone.position, f"factor {factor!r} is a whole dim here, so its size comes from the shapes")

    def _sides(self, tensors: int) -> tuple[list[list[_Dim]], list[list[_Dim]]]:
        """Operands and results. An empty side is one scalar or no array, whichever fits the shapes."""
        operands, results = self.operands, self.results
        if operands == [[]] and tensors == len(results):
            operands = []
        elif results == [[]] and tensors == len(operands):
            results = []
        if len(operands) + len(results) != tensors:
            self.fail(
                0,
                f"the rule has {len(operands)} operands and {len(results)} results, "
                f"but the equation has {tensors} in all",
            )
        return operands, results

    def _expand(
        self, tensors: list[list[_Dim]], shapes: Sequence[Sequence[int]]
    ) -> tuple[list[list[_Dim]], dict[str, tuple[str, ...]]]:
        """The dims with every '...' expanded to one factor per leading dim, and the factors of each '...'."""
        written = {factor for dims in tensors for dim in dims for factor in dim.factors}
        leading: dict[str, int] = {}
        groups: dict[str, tuple[str, ...]] = {}
        expanded = []
        for dims, shape in zip(tensors, shapes, strict=True):
            if not (dims and dims[0].ellipsis):
                if len(dims) != len(shape):
                    position = dims[0].position if dims else 0
                    self.fail(position, f"{len(dims)} dims in the rule, but the shape is {tuple(shape)}")
                expanded.append(dims)
                continue
            group, position = dims[0].factors[0], dims[0].position
            here = len(shape) - len(dims) + 1
            if here < 0:
                self.fail(position, f"{len(dims) - 1} dims beside '...', but the shape is {tuple(shape)}")
            number = _group(group)[3:]
            if leading.setdefault(number, here) != here:
                self.fail(position, f"'...' stands for {here} dims here and for {leading[number]} before")
            names = (f"batch{number}_{index}" for index in count())
            free = (name for name in names if name not in written)
            groups[_group(group)] = factors = tuple(itertools.islice(free, here))
            expanded.append([_Dim((factor,), position) for factor in factors] + dims[1:])
        return expanded, groups

    def _check_kinds(self, kinds: Mapping[str, frozenset[str]], where: Mapping[str, int]) -> None:
        kind_of: dict[str, str] = {}
        for kind, names in kinds.items():
            for factor in sorted(names):
                if factor not in where:
                    self.fail(0, f"{kind} names {factor!r}, which is no factor of this rule")
                if factor in kind_of:
                    self.fail(where[factor], f"factor {factor!r} is both {kind_of[factor]} and {kind}")
                kind_of[factor] = kind

    def _sizes(
        self,
        tensors: list[list[_Dim]],
        shapes: Sequence[Sequence[int]],
        permutation: frozenset[str],
        known: dict[str, int],
    ) -> dict[str, int]:
        """The size of every factor, from its own dims or from the other factors of a compound dim."""
        dims = [
            (dim, size)
            for tensor, shape in zip(tensors, shapes, strict=True)
            for dim, size in zip(tensor, shape, strict=True)
        ]
        for dim, size in dims:
            if not dim.factors and size != 1:
                self.fail(dim.position, f"'1' is a dim of size 1, but this one has size {size}")
            if len(dim.factors) == 1:
                (factor,) = dim.factors
                if known.setdefault(factor, size) != size:
                    if factor not in permutation:
                        self.fail(dim.position, f"factor {factor!r} has size {size} here and {known[factor]} elsewhere")
                    known[factor] = min(size, known[factor])
        for _ in dims:  # each round can make one more compound dim solvable
            for dim, size in dims:
                unknown = [factor for factor in dim.factors if factor not in known]
                rest = math.prod(known[factor] for factor in dim.factors if factor in known)
                if len(unknown) == 1 and rest and size % rest == 0:
                    known[unknown[0]] = size // rest
        for dim, size in dims:
            if unknown := [factor for factor in dim.factors if factor not in known]:
                self.fail(dim.position, f"the shapes do not tell the size of {unknown[0]!r}: give it in sizes=")
            product = math.prod(known[factor] for factor in dim.factors)
            if product != size and not permutation.intersection(dim.factors):
                sizes = " x ".join(str(known[factor]) for factor in dim.factors)
                self.fail(dim.position, f"the factors of this dim make {sizes} = {product}, but its size is {size}")
        return known
