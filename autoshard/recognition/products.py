"""The products that read attention weights: outputs, and in backward passes gradients of values, keys and queries."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.jaxprs import JaxprEqn, Literal, Var, aval_of
from autoshard.recognition.attention_weights import Weights, aligned, is_ordinary, same
from autoshard.recognition.bodies import BodyTree, NestedBody
from autoshard.recognition.probe import Probe
from autoshard.recognition.small_arrays import Roles, UnknownEquation, evaluated
from autoshard.recognition.structural_equality import ValueStructure, parameters_and_types

VALUE = "v0"  # the role of the elements of one value


@dataclass(frozen=True, eq=False)
class Output:
    """The product of weights and values."""

    body: NestedBody
    product: JaxprEqn
    value: Var  # by origin
    value_roles: Roles
    roles: Roles  # of the product


@dataclass(frozen=True, eq=False)
class Gradient:
    """A product that is the gradient of queries, keys or values."""

    product: JaxprEqn
    roles: Roles
    factor: float  # how many times the gradient it is


@dataclass(frozen=True, eq=False)
class Backward:
    """The backward pass of attention: from the output's cotangent to gradients."""

    body: NestedBody
    cotangent: Var
    cotangent_roles: Roles
    value: Var  # by origin
    value_roles: Roles
    gradients: dict[int, Gradient]  # by operand of attention: 0 queries, 1 keys, 2 values


@dataclass(frozen=True, eq=False)
class _WeightProduct:
    """A product of a value with known roles and another value."""

    other: Var
    gone: tuple[tuple[str, ...], ...]  # roles of the known value that are contracted
    both: tuple[tuple[str, ...], ...]
    other_roles: Roles  # by dim of the other


def _reads(
    weights: Weights, readers: Iterable[tuple[NestedBody, JaxprEqn]], origin: Var, roles: Roles, free_role: str
) -> Iterator[tuple[NestedBody, JaxprEqn, _WeightProduct]]:
    """The products of a value, which has these roles, among what reads it."""
    for body, eqn in readers:
        if eqn.primitive.name != "dot_general" or not is_ordinary(eqn):
            continue
        for side, atom in enumerate(eqn.invars):
            other = eqn.invars[1 - side]
            if isinstance(atom, Literal) or isinstance(other, Literal):
                continue
            if weights.tree.origin(atom) != origin or weights.tree.origin(other) == origin:
                continue
            gone, both = (sides[side] for sides in eqn.params["dimension_numbers"])
            other_gone, other_both = (sides[1 - side] for sides in eqn.params["dimension_numbers"])
            shape = aval_of(other).shape
            found = dict(zip(other_gone, (roles[i] for i in gone), strict=True))
            found |= dict(zip(other_both, (roles[i] for i in both), strict=True))
            free = tuple(i for i in range(len(shape)) if i not in found)
            if sum(shape[i] > 1 for i in free) > 1:
                continue
            found |= {i: (free_role,) if shape[i] > 1 else () for i in free}
            other_roles = tuple(found[i] for i in range(len(shape)))
            contracted, shared = (tuple(roles[i] for i in dims if roles[i]) for dims in (gone, both))
            yield body, eqn, _WeightProduct(other, contracted, shared, other_roles)


def _flat(dims: Roles) -> set[str]:
    return {role for dim in dims for role in dim}


def outputs(weights: Weights) -> Iterator[Output]:
    """The products of weights and values, in all bodies."""
    for body, eqn, read in _reads_of_weights(weights):
        if read.gone == ((weights.keys,),) and _flat(read.both) == set(weights.batch):
            roles = _roles(weights, eqn, read)
            yield Output(body, eqn, weights.tree.origin(read.other), read.other_roles, roles)


def _reads_of_weights(weights: Weights) -> Iterator[tuple[NestedBody, JaxprEqn, _WeightProduct]]:
    readers = weights.tree.readers(weights.made)
    return _reads(weights, readers, weights.made, weights.roles, VALUE)


def _roles(weights: Weights, product: JaxprEqn, read: _WeightProduct) -> Roles:
    """Those of a product that reads the weights."""

    def shown() -> Roles:
        probe = weights.probe(0)
        probe.value(weights.made)
        probe.put(read.other, read.other_roles)
        return evaluated(product, [probe.value(atom) for atom in product.invars], weights.true).roles

    side = product.invars.index(read.other)
    return weights.proofs.once(("roles", weights.kind, parameters_and_types(product), side, read.other_roles), shown)


def backwards(weights: Weights) -> Iterator[Backward]:
    """The backward passes, in all bodies, each shown to be one on small arrays."""
    summed = {weights.rows, *weights.each}
    for body, eqn, read in list(_reads_of_weights(weights)):
        if _flat(read.gone) == summed and _flat(read.both) == set(weights.batch):
            found = _backward(weights, body, eqn, read)
            if found is not None:
                yield found


def _backward(weights: Weights, body: NestedBody, of_value: JaxprEqn, read: _WeightProduct) -> Backward | None:
    """The backward pass around a product of weights and a cotangent, which is the gradient of the values."""
    tree = weights.tree
    cotangent = tree.origin(read.other)
    for _, eqn, met in _reads(weights, _readers_in(body, tree, cotangent), cotangent, read.other_roles, weights.keys):
        if met.gone != ((VALUE,),) or _flat(met.both) != set(weights.batch) or eqn is of_value:
            continue
        passes = _CotangentProduct(weights, cotangent, read.other_roles, tree.origin(met.other), met.other_roles, eqn)
        found = {2: Gradient(of_value, _roles(weights, of_value, read), 1.0)}
        for operand, other in ((0, weights.key), (1, weights.query)):
            for _, product in _readers_in(body, tree, other):
                gradient = _gradient(passes, operand, other, product)
                if gradient is not None:
                    found[operand] = gradient
                    break
        if len(found) > 1:
            return Backward(body, read.other, read.other_roles, passes.value, met.other_roles, found)
    return None


def _readers_in(body: NestedBody, tree: BodyTree, origin: Var) -> list[tuple[NestedBody, JaxprEqn]]:
    return [(home, eqn) for home, eqn in tree.readers(origin) if home is body]


@dataclass(eq=False)
class _CotangentProduct:
    """The forward pass, with a cotangent and its product with the values."""

    weights: Weights
    cotangent: Var  # by origin, as the value
    of_cotangent: Roles
    value: Var
    of_value: Roles
    product: JaxprEqn

    @property
    def ends(self) -> list[Var]:
        """What the backward pass is made of."""
        return [*self.weights.likeness.values, self.cotangent, self.value, self.product.outvars[0]]

    @property
    def kind(self) -> Hashable:
        origins = [self.weights.tree.origin(atom) for atom in self.product.invars]
        side = origins.index(self.value)
        return self.weights.kind, self.of_cotangent, self.of_value, parameters_and_types(self.product), side

    @cached_property
    def probes(self) -> list[Probe]:
        """The same with two seeds."""
        return [self._probe(seed) for seed in (6, 7)]

    def _probe(self, seed: int) -> Probe:
        probe = self.weights.probe(seed)
        probe.value(self.weights.made)
        probe.takes_leaves = False
        for var, roles in ((self.cotangent, self.of_cotangent), (self.value, self.of_value)):
            probe.put(var, roles)
        made = evaluated(self.product, [probe.value(atom) for atom in self.product.invars], self.weights.true)
        probe.put(self.product.outvars[0], made.roles, made.array)
        probe.forget()
        return probe


def _gradient(passes: _CotangentProduct, operand: int, other: Var, product: JaxprEqn) -> Gradient | None:
    """A product of logits' gradients with keys or queries; None if it is none."""
    tree = passes.weights.tree
    if product.primitive.name != "dot_general" or len(product.invars) != 2:
        return None
    variables = [atom for atom in product.invars if isinstance(atom, Var)]
    rest = [atom for atom in variables if tree.origin(atom) != other]
    if len(variables) != 2 or len(rest) != 1:
        return None
    like = ValueStructure.of(tree, passes.ends, variables, passes.kind, operand, parameters_and_types(product))
    shown = passes.weights.proofs.once(like.structure, lambda: _roles_and_factor(passes, operand, rest[0], product))
    return None if shown is None else Gradient(product, *shown)


def _roles_and_factor(
    passes: _CotangentProduct, operand: int, other: Var, product: JaxprEqn
) -> tuple[Roles, float] | None:
    """Of a gradient of queries or keys, from its operand that is no key or query; None if it is none."""
    weights, probes = passes.weights, passes.probes
    if not probes[0].follows(other):
        return None
    factors = list[float]()
    roles: Roles = ()
    for probe in probes:
        try:
            of_logits = probe.value(other)
            if not {weights.rows, weights.keys} <= _flat(of_logits.roles):
                return None
            made = evaluated(product, [probe.value(atom) for atom in product.invars], weights.true)
            expected, order = _expected(weights, operand, probe, passes.value, passes.cotangent)
            found, roles = aligned(made, order), made.roles
        except UnknownEquation:
            return None
        factor = float((found * expected).sum() / (expected * expected).sum())
        if not same(found, factor * expected) or abs(factor) < 1e-12:
            return None
        factors.append(factor)
    if abs(factors[0] - factors[1]) > 1e-6 * abs(factors[0]):
        return None
    return roles, 1.0 if abs(factors[0] - 1) < 1e-6 else factors[0]


def _expected(
    weights: Weights, operand: int, probe: Probe, value: Var, cotangent: Var
) -> tuple[np.ndarray, tuple[str, ...]]:
    """The gradient of queries or keys by its formula, and the roles of its dims."""
    order = weights.order
    w = weights.expected(probe)
    of_output = aligned(probe.known[weights.tree.origin(cotangent)], (*order, VALUE))
    values = aligned(probe.known[weights.tree.origin(value)], (*order, VALUE))
    of_weights = (of_output * values).sum(-1)
    of_logits = weights.scale * w * (of_weights - (w * of_weights).sum(-1, keepdims=True))
    for var, _, flag in weights.masks:
        of_logits = np.where(aligned(probe.known[var], order) == flag, of_logits, 0.0)
    deep = tuple(role for role in weights.true if role[0] == "d")
    name, roles = (weights.key, weights.batch + weights.each + (weights.rows,)) if operand == 0 else (
        weights.query, (*weights.batch, weights.keys)
    )  # fmt: skip
    met = aligned(probe.known[name], (*order, *deep))
    full = of_logits.reshape(of_logits.shape + (1,) * len(deep)) * met
    gone = tuple(i for i, role in enumerate(order) if role not in roles)
    return full.sum(gone), (*roles, *deep)
