"""What forbids microbatches: an equation that needs something of all of them, and the error that names its line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from autoshard.errors import MicrobatchError
from autoshard.jaxprs import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var
from autoshard.microbatches.relations import Invariant, PartialResult, Relation
from autoshard.microbatches.rows import Microbatches
from autoshard.primitives import CONTRACTIONS
from autoshard.program.user_code import source_of

NEEDS_SUMS = "needs what only all microbatches together tell, a sum over the batch"


class Conflict(Exception):
    """Microbatches need something of each other."""

    def __init__(self, eqn: JaxprEqn, reason: str, sums: frozenset[Var] = frozenset()):
        """
        Args:
            sums: sums over rows; if each microbatch had its own, this would be no conflict.
        """
        super().__init__(reason)
        self.eqn, self.reason, self.line, self.sums = eqn, reason, source_of(eqn), sums


def refusal(conflict: Conflict, split: Microbatches) -> MicrobatchError:
    line = conflict.line or "unknown line"
    rows = f"{split.batch} rows" if split.samples == 1 else f"{split.batch} groups of {split.samples} rows"
    hint = "One row is a case of its own to jax.numpy: try half as many microbatches. " if split.rows == 1 else ""
    may_be_own = conflict.reason == NEEDS_SUMS and split.own_statistics is None
    own = " With statistics='microbatch' each microbatch takes sums like this of its own rows." if may_be_own else ""
    return MicrobatchError(
        f"microbatches={split.count} would change what the step computes: {conflict.eqn.primitive.name} at {line} "
        f"{conflict.reason}.\n"
        f"{hint}Compute there what each of the {rows} of the batch can compute alone, or use "
        f"microbatches=1.{own}"
    )


class EarlySumNeed(Exception):
    """An equation of the step's own jaxpr needs sums over the batch before microbatches run."""

    def __init__(self, conflict: Conflict, wanted: set[Var], sums: frozenset[Var] = frozenset()):
        """
        Args:
            wanted: the values that it needs, or the parts of sums that these are made of.
            sums: the sums over rows behind them.
        """
        super().__init__(conflict.reason)
        self.conflict, self.vars, self.sums = conflict, wanted, sums


def batch_sums_of(late: set[Var], jaxpr: Jaxpr, relations: Mapping[Var, Relation]) -> set[Var]:
    """The sums over the batch that these values are made of."""
    makers = {made: eqn for eqn in jaxpr.eqns for made in eqn.outvars}
    todo, found, seen = list(late), set[Var](), set[Var]()
    while todo:
        var = todo.pop()
        if isinstance(relations[var], PartialResult):
            found.add(var)
        elif relations[var] is Invariant.AFTER and var not in seen:
            seen.add(var)
            todo += [atom for atom in makers[var].invars if isinstance(atom, Var)]
    return found


def is_of_batch_alone(jaxpr: Jaxpr, var: Var, split: Microbatches) -> bool:
    """Whether a value is cheap to compute of the whole batch: made of its arrays alone, and by no product."""
    makers = {made: eqn for eqn in jaxpr.eqns for made in eqn.outvars}
    arguments = {var: i for i, var in enumerate(jaxpr.invars)}
    todo, seen = [var], set[Var]()
    while todo:
        one = todo.pop()
        if one in seen:
            continue
        seen.add(one)
        if one in arguments and arguments[one] not in split.dims:
            return False
        if (maker := makers.get(one)) is not None:
            if any(_multiplies(maker)):
                return False
            todo += [atom for atom in maker.invars if isinstance(atom, Var)]
    return True


def _multiplies(eqn: JaxprEqn) -> Iterable[bool]:
    yield eqn.primitive.name in CONTRACTIONS
    for value in eqn.params.values():
        for one in value if isinstance(value, tuple | list) else [value]:
            inner = one.jaxpr if isinstance(one, ClosedJaxpr) else one
            if isinstance(inner, Jaxpr):
                yield from (any(_multiplies(each)) for each in inner.eqns)


def paired_equations(whole: Sequence[JaxprEqn], part: Sequence[JaxprEqn]) -> list[tuple[JaxprEqn, JaxprEqn]]:
    pairs = list(zip(whole, part, strict=False))
    for eqn, small in pairs:
        if eqn.primitive is not small.primitive or len(eqn.invars) != len(small.invars):
            raise Conflict(eqn, "computes something else for a smaller batch")
        if [isinstance(atom, Literal) for atom in eqn.invars] != [isinstance(atom, Literal) for atom in small.invars]:
            raise Conflict(eqn, "computes something else for a smaller batch")
    if len(whole) != len(part):
        longer = whole if len(whole) > len(part) else part
        raise Conflict(longer[len(pairs)], "is not computed for every size of the batch")
    return pairs
