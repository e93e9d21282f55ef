"""One body of a step, as rewrites look at it: who makes and who reads each variable, and its products."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.jaxprs import Jaxpr, JaxprEqn, Literal, Var, aval_of
from autoshard.rewrites.product import Atom, Label, Product

SUMS = frozenset({"add", "add_any"})


@dataclass(frozen=True)
class ScaledProduct:
    """An array that is a product, its dims in some order, times numbers."""

    product: Product
    labels: tuple[Label, ...]  # of its dims, as in `product.result`
    scales: tuple[Atom, ...]  # arrays without dims
    through: tuple[JaxprEqn, ...]  # what stands between the product and the array


@dataclass(frozen=True, eq=False)
class BodyGraph:
    """A jaxpr whose plain calls are opened."""

    jaxpr: Jaxpr
    devices: int = 1  # of the mesh

    @cached_property
    def makers(self) -> Mapping[Var, JaxprEqn]:
        """Variable -> the equation that makes it."""
        return {var: eqn for eqn in self.jaxpr.eqns for var in eqn.outvars}

    @cached_property
    def readers(self) -> Mapping[Var, list[JaxprEqn]]:
        """Variable -> the equations that read it, one entry for each time that it is read."""
        found = defaultdict[Var, list[JaxprEqn]](list)
        for eqn in self.jaxpr.eqns:
            for atom in eqn.invars:
                if isinstance(atom, Var):
                    found[atom].append(eqn)
        return found

    @cached_property
    def results(self) -> frozenset[Var]:
        """The variables that the body hands out."""
        return frozenset(atom for atom in self.jaxpr.outvars if isinstance(atom, Var))

    @cached_property
    def products(self) -> Mapping[Var, Product]:
        """Result -> the product, of all that are plain. What a number is multiplied with is a multiple, no product."""
        found = (Product.of(eqn) for eqn in self.jaxpr.eqns if eqn.primitive.name == "dot_general")
        return {
            product.out: product
            for product in found
            if product.is_plain and all(isinstance(one.atom, Var) for one in product.operands)
        }

    def maker(self, atom: Atom) -> JaxprEqn | None:
        """The equation that makes an atom; None for inputs and literals."""
        return self.makers.get(atom) if isinstance(atom, Var) else None

    def is_read_once(self, var: Var) -> bool:
        """Whether one equation alone reads it, once, and nothing outside."""
        return var not in self.results and len(self.readers[var]) == 1

    def scaled_product(self, atom: Atom) -> ScaledProduct | None:
        """The product that an array is, through transposes and numbers; None if it is none."""
        scales, through, orders = list[Atom](), list[JaxprEqn](), list[Sequence[int]]()
        while isinstance(atom, Var) and atom not in self.products:
            eqn = self.makers.get(atom)
            if eqn is None:
                return None
            if eqn.primitive.name == "transpose":
                orders.append(eqn.params["permutation"])
                (atom,) = eqn.invars
            elif eqn.primitive.name == "mul" and (pair := self.scale(eqn)) is not None:
                atom, scale = pair
                scales.append(scale)
            else:
                return None
            through.append(eqn)
        if not isinstance(atom, Var):
            return None
        product = self.products[atom]
        labels = product.result
        for order in reversed(orders):
            labels = tuple(labels[dim] for dim in order)
        return ScaledProduct(product, labels, tuple(scales), tuple(through))

    def scale(self, eqn: JaxprEqn) -> tuple[Atom, Atom] | None:
        """The array and the number of a `mul` of the two; None if neither operand is a number, or both are."""
        for array, number in (eqn.invars, reversed(eqn.invars)):
            plain = self.number(number)
            if plain is not None and aval_of(array).shape == aval_of(eqn.outvars[0]).shape and aval_of(array).shape:
                return array, plain
        return None

    def number(self, atom: Atom) -> Atom | None:
        """The number that is everywhere in an array: itself, or what was broadcast."""
        if not aval_of(atom).shape:
            return atom
        eqn = self.maker(atom)
        if eqn is not None and eqn.primitive.name == "broadcast_in_dim" and not aval_of(eqn.invars[0]).shape:
            source: Atom = eqn.invars[0]
            return source
        return None

    def sums(self) -> Iterator[tuple[JaxprEqn, list[Atom]]]:
        """Every sum of several arrays of one type, with its addends. A sum that only a sum reads is part of that."""
        for eqn in self.jaxpr.eqns:
            if not self.is_sum(eqn):
                continue
            (out,) = eqn.outvars
            if self.is_read_once(out) and self.is_sum(self.readers[out][0]):
                continue
            yield eqn, self.addends(eqn)

    def addends(self, eqn: JaxprEqn) -> list[Atom]:
        """What a sum adds up, in its order."""
        found, waiting = list[Atom](), list(reversed(eqn.invars))
        while waiting:
            atom = waiting.pop()
            inner = self.maker(atom)
            if inner is not None and self.is_sum(inner) and self.is_read_once(inner.outvars[0]):
                waiting.extend(reversed(inner.invars))
            else:
                found.append(atom)
        return found

    def is_sum(self, eqn: JaxprEqn) -> bool:
        """Whether an equation adds two arrays of one type."""
        types = {(aval_of(atom).shape, aval_of(atom).dtype) for atom in (*eqn.invars, *eqn.outvars)}
        return eqn.primitive.name in SUMS and len(types) == 1 and not any(isinstance(x, Literal) for x in eqn.invars)
