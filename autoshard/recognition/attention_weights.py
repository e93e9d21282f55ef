"""A product, a softmax and a product again, recognised as attention.

Whatever way a softmax is written, its weights are a function of logits and masks. So the equations between the first
product and the second are evaluated on small random arrays (`probe.py`), and compared with the definition. What is
shown so: weights are ``softmax(scale * logits + coefficient * bias)`` over the keys that masks leave, also of rows
without any, and of logits as large as `LARGE`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import jax
import numpy as np

from autoshard.jaxprs import JaxprEqn, Var, aval_of
from autoshard.recognition.bodies import BodyTree
from autoshard.recognition.masks import Mask, VisibleKeys, visible
from autoshard.recognition.probe import FOLLOWED, Probe
from autoshard.recognition.small_arrays import SMALL, Roles, SmallArray, UnknownEquation, evaluated
from autoshard.recognition.structural_equality import Proofs, ValueStructure, parameters_and_types

LARGE = 1e6  # a mask hides keys among logits of this size, or it is left as it is
MOST_EQUATIONS = 300  # between two products
_EXPONENTIALS = ("exp", "exp2")
_ORDINARY = (None, jax.lax.Precision.DEFAULT, jax.lax.DotAlgorithmPreset.BF16_BF16_F32)  # as operations compute it


@dataclass(frozen=True, eq=False)
class Weights:
    """Attention weights, and the product of queries and keys that they are made of. Variables are origins."""

    tree: BodyTree
    made: Var
    scores: JaxprEqn
    query: Var
    key: Var
    query_roles: Roles
    key_roles: Roles
    true: Mapping[str, int]  # role -> elements in the program, if more than one
    rows: str  # the role of queries' rows
    keys: str
    scale: float = 1.0
    biases: tuple[tuple[Var, Roles, float], ...] = ()  # with their coefficients
    masks: tuple[Mask, ...] = ()
    visible: VisibleKeys = field(default_factory=VisibleKeys)
    stops_at_numbers: bool = False  # whether what is added is a bias, whatever it is made of
    roles: Roles = ()  # of the weights
    proofs: Proofs = field(default_factory=Proofs)
    likeness: ValueStructure = field(default_factory=lambda: ValueStructure((), ()))  # of the weights to others

    @property
    def kind(self) -> int:
        """Weights of one kind differ by their variables alone."""
        return self.proofs.kind(self.likeness)

    def of_others(self, scores: JaxprEqn, like: ValueStructure) -> Weights:
        """The weights that are made alike, of another product of queries and keys."""
        names = self.likeness.renamed(like)
        rest = tuple((names[var], roles, flag) for var, roles, flag in self.visible.rest)
        return replace(
            self,
            made=names[self.made],
            scores=scores,
            query=names[self.query],
            key=names[self.key],
            biases=tuple((names[var], roles, factor) for var, roles, factor in self.biases),
            masks=tuple((names[var], roles, flag) for var, roles, flag in self.masks),
            visible=replace(self.visible, rest=rest),
            likeness=like,
        )

    @property
    def batch(self) -> tuple[str, ...]:
        """Roles that queries and keys share: the batch, and last the heads of keys."""
        return tuple(role for role in self.true if role[0] == "b")

    @property
    def each(self) -> tuple[str, ...]:
        """Roles of the heads of queries that share a head of keys."""
        return tuple(role for role in self.true if role[0] == self.rows[0] and role != self.rows)

    @property
    def order(self) -> tuple[str, ...]:
        return (*self.batch, *self.each, self.rows, self.keys)

    def probe(self, seed: int, *, flags: Mapping[Var, bool] | None = None, times: float = 1.0) -> Probe:
        """Queries, keys and their product as small arrays."""
        probe = Probe(self.tree, dict(self.true), seed, flags or {}, stops_at_numbers=self.stops_at_numbers)
        pairs = (self.query, self.query_roles), (self.key, self.key_roles)
        for var, roles in pairs:
            probe.put(var, roles)
        query = probe.known[self.query]
        probe.put(self.query, query.roles, query.array * times)
        product = evaluated(self.scores, [probe.value(atom) for atom in self.scores.invars], self.true)
        probe.put(self.scores.outvars[0], product.roles, product.array)
        return probe

    def logits(self, probe: Probe) -> np.ndarray:
        return aligned(probe.known[self.scores.outvars[0]], self.order)

    def expected(self, probe: Probe) -> np.ndarray:
        """The weights by their definition, from the arrays of a probe."""
        found = self.scale * self.logits(probe)
        for var, _, coefficient in self.biases:
            found = found + coefficient * aligned(probe.known[var], self.order)
        seen = np.ones_like(found, bool)
        for var, _, flag in self.masks:
            seen = seen & (aligned(probe.known[var], self.order) == flag)
        found = np.where(seen, found, -1e300)
        found = np.exp(found - found.max(-1, keepdims=True))
        weights: np.ndarray = found / found.sum(-1, keepdims=True)
        return weights

    def are_found(self, probe: Probe) -> bool:
        """Whether the program makes these weights of a probe's arrays."""
        found = aligned(probe.value(self.made), self.order)
        return same(found, self.expected(probe))


def same(found: np.ndarray, expected: np.ndarray) -> bool:
    """Whether two ways to compute something agree, up to rounding of float64 and numbers written in float32."""
    if found.ndim != expected.ndim or not np.isfinite(found).all():
        return False
    shape = np.broadcast_shapes(found.shape, expected.shape)
    return shape == expected.shape and bool(np.abs(found - expected).max() <= 1e-6 * (1 + np.abs(expected).max()))


def aligned(x: SmallArray, order: Sequence[str]) -> np.ndarray:
    """An array with one dim per role, in this order; of roles that it lacks, one element.

    Raises:
        UnknownEquation: it has other roles.
    """
    roles = [role for dim in x.roles for role in dim]
    there = [role for role in order if role in roles]
    if len(there) != len(roles):
        raise UnknownEquation("a value with other roles")
    apart = x.array.reshape([SMALL[role[0]] for role in roles])
    moved = apart.transpose([roles.index(role) for role in there])
    return moved.reshape([SMALL[role[0]] if role in there else 1 for role in order])


def all_weights(tree: BodyTree) -> Iterator[Weights]:
    """The attention weights that products read."""
    seen, proofs, exponentials = set[Var](), Proofs(), _Exponentials(tree)
    for body in tree.root.all():
        for eqn in body.equations:
            if eqn.primitive.name != "dot_general":
                continue
            for atom in eqn.invars:
                if isinstance(atom, Var) and (origin := tree.origin(atom)) not in seen:
                    seen.add(origin)
                    found = _weights_of(tree, origin, proofs) if exponentials.lead_to(origin) else None
                    if found is not None:
                        yield found


@dataclass
class _Exponentials:
    """The values to which exponentials lead, without products between."""

    tree: BodyTree
    known: dict[Var, bool] = field(default_factory=dict)

    def lead_to(self, origin: Var) -> bool:
        waiting = [origin]
        while waiting:
            var = waiting[-1]
            _, eqn = self.tree.homes.get(var, (None, None))
            if var in self.known or eqn is None or eqn.primitive.name not in FOLLOWED:
                self.known.setdefault(var, False)
                waiting.pop()
                continue
            before = [self.tree.origin(atom) for atom in eqn.invars if isinstance(atom, Var)]
            missing = [one for one in before if one not in self.known]
            waiting += missing
            if not missing:
                self.known[var] = eqn.primitive.name in _EXPONENTIALS or any(self.known[one] for one in before)
        return self.known[origin]


def _weights_of(tree: BodyTree, made: Var, proofs: Proofs) -> Weights | None:
    for scores in _products_before(tree, made):
        if not is_ordinary(scores) or not all(isinstance(atom, Var) for atom in scores.invars):
            continue
        ends = [*(atom for atom in scores.invars if isinstance(atom, Var)), scores.outvars[0]]
        like = ValueStructure.of(tree, ends, [made], parameters_and_types(scores))
        found = proofs.once(like.structure, functools.partial(_shown, tree, made, scores, proofs, like))
        if found is not None:
            return found.of_others(scores, like)
    return None


def _shown(tree: BodyTree, made: Var, scores: JaxprEqn, proofs: Proofs, like: ValueStructure) -> Weights | None:
    for stops in (False, True):
        try:
            found = _proven(tree, made, scores, stops)
        except UnknownEquation:
            found = None
        if found is not None:
            return replace(found, roles=found.probe(0).value(made).roles, proofs=proofs, likeness=like)
    return None


def is_ordinary(product: JaxprEqn) -> bool:
    """Whether a product has the precision that operations compute with."""
    precisions = product.params["precision"]
    return all(one in _ORDINARY for one in (precisions if isinstance(precisions, tuple) else (precisions,)))


def _products_before(tree: BodyTree, made: Var) -> list[JaxprEqn]:
    """Products from which exponentials lead to a value; none if other operations are between, or very many."""
    products, seen, waiting, has_exp = list[JaxprEqn](), set[Var](), [made], False
    while waiting and len(seen) < MOST_EQUATIONS:
        var = tree.origin(waiting.pop())
        _, eqn = tree.homes.get(var, (None, None))
        if var in seen or eqn is None:
            continue
        seen.add(var)
        if eqn.primitive.name == "dot_general":
            products.append(eqn)
        elif eqn.primitive.name in FOLLOWED:
            has_exp |= eqn.primitive.name in _EXPONENTIALS
            waiting += [atom for atom in eqn.invars if isinstance(atom, Var)]
    return products if has_exp and len(seen) < MOST_EQUATIONS else []


def _proven(tree: BodyTree, made: Var, scores: JaxprEqn, stops: bool) -> Weights | None:
    """The weights that a value is, shown on small arrays; None if it is anything else.

    Raises:
        UnknownEquation: it cannot be evaluated.
    """
    bare = _sides(tree, made, scores, stops)
    if bare is None:
        return None
    probe = bare.probe(0)
    probe.value(made)
    roles = probe.leaves
    flags = [var for var in roles if probe.known[var].array.dtype == bool]
    added = [var for var in roles if var not in flags]
    for values in itertools.product([True, False], repeat=len(flags)):
        flag_of = dict(zip(flags, values, strict=True))
        factors = _factors(bare, added, flag_of)
        if factors is None:
            continue
        scale, *rest = factors
        biases = tuple((var, roles[var], factor) for var, factor in zip(added, rest, strict=True))
        masks = tuple((var, roles[var], flag) for var, flag in flag_of.items())
        found = replace(bare, scale=scale, biases=biases, masks=masks)
        for rows in sorted((found.rows, *found.each), key=lambda role: -found.true[role]):
            seen = visible(tree, masks, rows, found.keys)
            if len(seen.rest) < len(masks):
                break
        else:
            rows, seen = found.rows, VisibleKeys(rest=masks)
        found = replace(found, rows=rows, visible=seen)
        if _holds(found):
            return found
    return None


def _sides(tree: BodyTree, made: Var, scores: JaxprEqn, stops: bool) -> Weights | None:
    """Which operand of a product has the keys: weights add up to one along these."""
    (left, right), names = scores.invars, _names(scores)
    if not (isinstance(left, Var) and isinstance(right, Var)) or tree.origin(left) == tree.origin(right):
        return None
    true = {role: size for role, size in names.sizes.items() if size > 1}
    left_roles, right_roles = (tuple((n,) if n in true else () for n in side) for side in names.sides)
    origins = tree.origin(left), tree.origin(right)
    # Made with either operand as the queries: the probe puts both in alike.
    start = Weights(tree, made, scores, *origins, left_roles, right_roles, true, "", "", stops_at_numbers=stops)
    found = start.probe(0).value(made)
    free = {letter: [role for role in true if role[0] == letter] for letter in "xy"}
    for query, key, letter, of_keys in ((left, right, "x", "y"), (right, left, "y", "x")):
        if len(free[of_keys]) != 1 or not free[letter]:
            continue
        (keys,) = free[of_keys]
        if (keys,) not in found.roles:
            continue
        sums = found.array.sum(found.roles.index((keys,)))
        if not np.allclose(sums, 1, atol=1e-6):
            continue
        rows = max(free[letter], key=lambda role: true[role])
        roles = {left: left_roles, right: right_roles}
        return replace(
            start,
            query=tree.origin(query),
            key=tree.origin(key),
            query_roles=roles[query],
            key_roles=roles[key],
            rows=rows,
            keys=keys,
        )
    return None


@dataclass(frozen=True)
class _RoleNames:
    sides: tuple[tuple[str, ...], tuple[str, ...]]  # per operand the role of each dim
    sizes: dict[str, int]


def _names(scores: JaxprEqn) -> _RoleNames:
    """A role for every dim of a product: shared ones `b`, contracted ones `d`, the others `x` and `y`."""
    gone, both = scores.params["dimension_numbers"]
    shapes = [aval_of(atom).shape for atom in scores.invars]
    sizes, sides = dict[str, int](), []
    for shape, lost, shared, letter in zip(shapes, gone, both, "xy", strict=True):
        numbers = itertools.count()
        names = []
        for i in range(len(shape)):
            if i in shared:
                names.append(f"b{list(shared).index(i)}")
            elif i in lost:
                names.append(f"d{list(lost).index(i)}")
            else:
                names.append(f"{letter}{next(numbers)}")
        sides.append(tuple(names))
        sizes |= dict(zip(names, shape, strict=True))
    ordered = {role: sizes[role] for role in sorted(sizes)}
    return _RoleNames((sides[0], sides[1]), ordered)


def _factors(bare: Weights, added: Sequence[Var], flag_of: Mapping[Var, bool]) -> list[float] | None:
    """What logits and biases are multiplied by, where every mask says the same everywhere; None if nothing fits."""
    probe = bare.probe(1, flags=flag_of)
    weights = np.broadcast_to(aligned(probe.value(bare.made), bare.order), bare.logits(probe).shape)
    if not np.isfinite(weights).all() or weights.min() <= 0:
        return None
    shape = weights.shape
    columns = [bare.logits(probe), *(np.broadcast_to(aligned(probe.known[var], bare.order), shape) for var in added)]
    flat = [(x - x.mean(-1, keepdims=True)).ravel() for x in (np.log(weights), *columns)]
    matrix = np.stack(flat[1:], 1)
    factors, *_ = np.linalg.lstsq(matrix, flat[0], rcond=None)
    if np.abs(matrix @ factors - flat[0]).max() > 1e-6 or np.abs(factors).min() < 1e-9:
        return None
    return [float(factor) for factor in factors]


def _holds(found: Weights) -> bool:
    """Whether the weights are these for random masks, and for logits as large as they get."""
    for seed, times in ((2, 1.0), (3, 1.0), (4, LARGE)):
        probe = found.probe(seed, times=times)
        probe.value(found.made)
        _see_a_key(probe, found)
        if not found.are_found(_again(probe, found)):
            return False
    if not found.masks or found.visible.sees_a_key(found.true[found.rows], found.true[found.keys]):
        return True
    probe = found.probe(5)
    probe.value(found.made)
    for var, _, flag in found.masks:
        probe.known[var].array[...] = not flag
    return found.are_found(_again(probe, found))


def _see_a_key(probe: Probe, found: Weights) -> None:
    """Lets every row see its first key."""
    for var, roles, flag in found.masks:
        array = probe.known[var].array
        where = tuple(0 if dim == (found.keys,) else slice(None) for dim in roles)
        array[where] = flag


def _again(probe: Probe, found: Weights) -> Probe:
    """A probe of which only what is put in stays."""
    kept = {found.query, found.key, found.tree.origin(found.scores.outvars[0]), *probe.leaves}
    probe.known = {var: x for var, x in probe.known.items() if var in kept}
    return probe
