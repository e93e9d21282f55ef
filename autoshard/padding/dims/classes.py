"""A jaxpr in, which of its dims are one and the same dim of the model, out: all that a rule ties to each other.

The dims of 6 heads of 64 columns are those of size 6, and those of size 384 that heads are the major part of. A *class*
has all of them: each has `unit` times as many rows as the class has members.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, called_jaxpr, called_operands, equations_of, scan_counts
from autoshard.padding.batches import padded_rows
from autoshard.padding.operations import equation_of, shape_of
from autoshard.primitives import FlopRule, facts_of
from autoshard.propagation.registry import has_rule, rule_of

Node = tuple[int, int]  # id of a variable, and a dim of it


@dataclass(frozen=True)
class PaddedClass:
    """A class of dims that gets more members."""

    members: int
    padded: int


class DimClasses:
    """The classes of dims of one jaxpr, with the bodies of its loops and calls."""

    def __init__(self, closed: ClosedJaxpr):
        self._parents: dict[Node, Node] = {}
        self._sizes: dict[Node, set[int]] = defaultdict(set)
        self._work: dict[Node, float] = defaultdict(float)
        self._body(closed.jaxpr, 1)
        self._members = self._found()

    def root(self, node: Node) -> Node:
        parent = self._parents.setdefault(node, node)
        while parent != self._parents[parent]:
            self._parents[node] = self._parents[parent]
            node, parent = parent, self._parents[parent]
        return parent

    def members(self, root: Node) -> int:
        """How many members a class has; 0 where the sizes of its dims are no multiples of one."""
        return self._members.get(root, 0)

    def uneven(self, mesh: Mapping[str, int]) -> dict[Node, PaddedClass]:
        """The classes that products have and that devices do not divide, by their roots; most work first."""
        found = {}
        for root in sorted(self._work, key=lambda one: -self._work[one]):
            members = self.members(root)
            if members > 1 and (padded := padded_rows(members, mesh)) > members:
                found[root] = PaddedClass(members, padded)
        return found

    def _found(self) -> dict[Node, int]:
        """Root -> how many members a class has; classes whose sizes are no multiples of one are left out."""
        sizes: dict[Node, set[int]] = defaultdict(set)
        work: dict[Node, float] = defaultdict(float)
        for node, own in self._sizes.items():
            sizes[self.root(node)] |= own
        for node, flops in self._work.items():
            work[self.root(node)] += flops
        self._work = work
        least = {root: min(found) for root, found in sizes.items()}
        return {root: n for root, n in least.items() if n and all(size % n == 0 for size in sizes[root])}

    def _tie(self, nodes: Sequence[Node]) -> None:
        for node in nodes[1:]:
            self._parents[self.root(node)] = self.root(nodes[0])

    def _body(self, jaxpr: Any, trips: int) -> None:
        for eqn in equations_of(jaxpr):
            called = called_jaxpr(eqn)
            if eqn.primitive.name == "scan":
                self._scan(eqn, trips)
            elif called is not None:
                operands = called_operands(eqn, eqn.invars)
                self._same(operands, called.jaxpr.invars)
                self._same(eqn.outvars, called.jaxpr.outvars)
                self._body(called.jaxpr, trips)
            elif has_rule(eqn.primitive.name):
                self._equation(eqn, trips)

    def _scan(self, eqn: JaxprEqn, trips: int) -> None:
        inner, (consts, carries) = eqn.params["jaxpr"].jaxpr, scan_counts(eqn)
        whole = consts + carries
        self._same(eqn.invars[:whole], inner.invars[:whole])
        self._same(eqn.invars[whole:], inner.invars[whole:], 1)
        self._same(eqn.outvars[:carries], inner.outvars[:carries])
        self._same(eqn.outvars[:carries], inner.invars[consts:whole])
        self._same(eqn.outvars[carries:], inner.outvars[carries:], 1)
        self._body(inner, trips * eqn.params["length"])

    def _same(self, outside: Sequence[Any], inside: Sequence[Any], skipped: int = 0) -> None:
        for outer, inner in zip(outside, inside, strict=True):
            if hasattr(outer, "val") or hasattr(inner, "val"):
                continue
            for dim, size in enumerate(shape_of(inner)):
                pair = (id(outer), dim + skipped), (id(inner), dim)
                for node in pair:
                    self._sizes[node].add(size)
                self._tie(pair)

    def _equation(self, eqn: JaxprEqn, trips: int) -> None:
        rule = rule_of(equation_of(eqn))
        tensors = list(zip([*eqn.invars, *eqn.outvars], [*rule.operands, *rule.results], strict=True))
        apart = rule.need_replication | rule.permutation | rule.exchanged
        flops = 2.0 * trips * math.prod(rule.sizes.values())
        for factor in rule.factors:
            nodes = list(_led_by(factor, tensors))
            if rule.sizes[factor] < 2 or not nodes or (factor in apart and not eqn.primitive.name.startswith("cum")):
                continue
            for node, size in nodes:
                self._sizes[node].add(size)
            self._tie([node for node, _ in nodes])
            if facts_of(eqn.primitive.name).work is FlopRule.CONTRACTION or eqn.primitive.name == "operation":
                self._work[nodes[0][0]] += flops


def _led_by(factor: str, tensors: Sequence[tuple[Any, Any]]) -> Iterator[tuple[Node, int]]:
    """The dims whose major factor this is, with their sizes."""
    for atom, dims in tensors:
        if not hasattr(atom, "val"):
            for dim, factors in enumerate(dims):
                if factors[:1] == (factor,):
                    yield (id(atom), dim), shape_of(atom)[dim]


def variables_of(closed: ClosedJaxpr) -> Iterator[Any]:
    """All variables of a jaxpr and of the bodies of its loops and calls, in the order of its equations."""
    yield from (*closed.jaxpr.invars, *closed.jaxpr.constvars)
    for eqn in equations_of(closed.jaxpr):
        yield from eqn.outvars
        body = eqn.params["jaxpr"] if eqn.primitive.name == "scan" else called_jaxpr(eqn)
        if body is not None:
            yield from variables_of(body)
