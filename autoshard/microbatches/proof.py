"""Traces of a step in, for the whole batch and for a microbatch; out, how the one follows from the other.

Or the line that forbids it.

Both jaxprs are walked side by side. Each equation gets the relations of its operands, and its sharding rule says what
its results are: a factor that holds rows of the batch passes to a result, or is reduced, which leaves a part of a sum.
What the rule of an equation keeps whole, a microbatch cannot compute alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import (
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    aval_of,
    called_jaxpr,
    called_operands,
    equations_of,
    implementation_of,
    scan_counts,
)
from autoshard.microbatches.blocks import blocks_of
from autoshard.microbatches.conflicts import (
    NEEDS_SUMS,
    Conflict,
    EarlySumNeed,
    batch_sums_of,
    is_of_batch_alone,
    paired_equations,
    refusal,
)
from autoshard.microbatches.relations import (
    OWN,
    REDUCTIONS,
    BatchRows,
    Invariant,
    PartialResult,
    Relation,
    batch_factor,
    handed_on,
    is_part,
    joined,
    keeps_zero,
    linear,
    may_run_in_loop,
    moved,
    moves_only,
    rounds,
    same_carries,
    scaled_dims,
    sums_of,
)
from autoshard.microbatches.row_numbers import reads_positions, row_column
from autoshard.microbatches.rows import Microbatches
from autoshard.microbatches.statistics import RunningStates, changed_states, is_backward, late_inputs, remark_of
from autoshard.program import Equation, Value
from autoshard.program.reader import kind_of
from autoshard.program.user_code import source_of
from autoshard.propagation.registry import has_rule, rule_of

Path = tuple[int | str, ...]

# Parameters that say shapes, which differ between the two traces.
_SHAPES = frozenset({
    "dimensions", "limit_indices", "new_sizes", "out_sharding", "padding_config", "shape", "sharding", "sizes",
    "slice_sizes", "start_indices",
})  # fmt: skip
_PARTWISE = frozenset({"optimization_barrier"})  # each result is its operand


@dataclass
class Proof:
    """How the values of a step follow from those of its microbatches."""

    relations: dict[Var, Relation]  # of the variables of the whole step's own jaxpr
    places: list[Invariant | None]  # per equation: computed before, after, or None: in every microbatch
    ahead: set[Var]  # sums that microbatches need, and that are made of the batch alone: computed before, of all of it
    drawn: set[Path]  # equations that have no rows, and make some: run for the whole batch, of which rows are taken
    touched: set[Path] = field(default_factory=set)  # equations with one of these somewhere inside
    counted: Mapping[Path, int] = field(default_factory=dict)  # equations -> the column of indices that counts rows
    # Equations that make statistics, of which each microbatch has its own, and whether these are sums.
    own: Mapping[Path, bool] = field(default_factory=dict)
    running: RunningStates = field(default_factory=RunningStates)  # states that statistics change, by nothing else
    handed_on: Mapping[Var, Var] = field(default_factory=dict)  # other such states, as arguments -> as results
    own_lines: frozenset[str] = frozenset()  # of the user, in which statistics are made

    @property
    def remark(self) -> str:
        """What a plan says of statistics of which each microbatch has its own."""
        return remark_of(self.own_lines, len(self.running.results) + len(self.handed_on))


def proof(whole: ClosedJaxpr, part: ClosedJaxpr, split: Microbatches) -> Proof:
    """How `whole` follows from `part`, run on each microbatch.

    Args:
        whole: the step, its calls opened (`opening.opened`).
        part: the same for the rows of one microbatch.
        split: which arguments have rows.

    Raises:
        MicrobatchError: the result would not be that of the whole batch, with the line that needs all of its rows.
    """
    ahead, own, states = set[Var](), set[Var](), dict[Var, Var]()
    scaled = set[Var]()
    while True:
        walk = _ProofWalk(split, ahead, own, states, scaled)
        try:
            found = walk.step(whole, part)
            if walk.more:
                own |= walk.more
                continue
            if len(found.handed_on) == len(states) and walk.scaled <= scaled:
                return found
            states, scaled = dict(found.handed_on), scaled | walk.scaled
            continue
        except EarlySumNeed as needed:
            conflict = needed.conflict
            if needed.vars - ahead and all(is_of_batch_alone(whole.jaxpr, var, split) for var in needed.vars):
                ahead |= needed.vars
                continue
            sums = conflict.sums or needed.sums
        except Conflict as one:
            conflict, sums = one, one.sums
        sums |= walk.more
        if split.own_statistics is None or sums <= own:
            raise refusal(conflict, split) from None
        own |= sums


class _ProofWalk:
    """One walk over both jaxprs."""

    def __init__(
        self, split: Microbatches, ahead: set[Var], own: set[Var], states: Mapping[Var, Var], scaled: set[Var]
    ):
        """
        Args:
            ahead: sums over the batch that are made before the first microbatch.
            own: sums over rows of which each microbatch has its own.
            states: arguments of which each microbatch has what the one before makes of them.
            scaled: parts of sums that are multiplied by statistics.
        """
        self.split, self.ahead, self.sums, self.states, self.in_loop = split, ahead, own, states, scaled
        # Found in this walk: parts of sums that are so, and sums of which microbatches need their own.
        self.scaled, self.more = set[Var](), set[Var]()
        self.drawn: set[Path] = set()
        self.counted: dict[Path, int] = {}
        self.own: dict[Path, bool] = {}
        self.makers: dict[Var, JaxprEqn] = {}
        self.drawn_rows: dict[Var, BatchRows] = {}
        # jaxprs of a scan, by id, and relations of its operands -> those of its results, and what is found inside
        self.scans: dict[tuple, tuple[list[Relation], set[Path], dict[Path, int], dict[Path, bool]]] = {}

    # The step's own jaxpr.

    def step(self, whole: ClosedJaxpr, part: ClosedJaxpr) -> Proof:
        env: dict[Var, Relation] = {}
        for i, var in enumerate(whole.jaxpr.invars):
            env[var] = BatchRows(self.split.dims[i], self.split.samples) if i in self.split.dims else Invariant.BEFORE
        env |= dict.fromkeys(self.states, Invariant.OWN)
        for var, other in zip(whole.jaxpr.constvars, part.jaxpr.constvars, strict=True):
            if (relation := self.made_of_nothing(var, other, Invariant.BEFORE)) is None:
                raise Conflict(whole.jaxpr.eqns[0], "reads a constant that a smaller batch has not")
            env[var] = relation
        places: list[Invariant | None] = []
        inside: set[Var] = set()  # made in every microbatch
        read = {atom for eqn in equations_of(whole.jaxpr) for atom in eqn.invars if isinstance(atom, Var)}
        whole_equations = equations_of(whole.jaxpr)
        self.makers |= {var: eqn for eqn in whole_equations for var in eqn.outvars}
        pairs = paired_equations(whole_equations, equations_of(part.jaxpr))
        for i, (eqn, small) in enumerate(pairs):
            relations = [_read(env, atom) for atom in eqn.invars]
            if Invariant.OWN in relations:
                self.scaled |= late_inputs(eqn, self.makers, env)
            try:
                found, place = self.placed(eqn, small, relations, (i,))
            except EarlySumNeed as needed:
                late = batch_sums_of(needed.vars, whole.jaxpr, env)
                again = EarlySumNeed(needed.conflict, late, sums_of(env[var] for var in late))
                if not self.may_be_own(whole.jaxpr, again):
                    raise again from None
                kinds = {True: Invariant.OWN_BACKWARD, False: Invariant.OWN}
                env |= {var: kinds[is_backward(self.makers[var])] for var in needed.vars}
                found, place = self.placed(eqn, small, [_read(env, atom) for atom in eqn.invars], (i,))
            except Conflict:
                if not moves_only(eqn.primitive.name) or not read.isdisjoint(eqn.outvars):
                    raise
                # A result that has other rows than the batch, as where rows were added: it is cut out of all of them.
                found, place = [Invariant.AFTER] * len(eqn.outvars), Invariant.AFTER
            if place is Invariant.BEFORE and not inside.isdisjoint(
                atom for atom in eqn.invars if isinstance(atom, Var)
            ):
                place = None
            env.update(zip(eqn.outvars, found, strict=True))
            env |= dict.fromkeys(self.ahead.intersection(eqn.outvars), Invariant.BEFORE)
            if place is None:
                inside |= {var for var in eqn.outvars if env[var] in (Invariant.BEFORE, Invariant.ZERO)} - self.ahead
            places.append(place)
        touched = {path[:n] for path in (*self.drawn, *self.counted, *self.own) for n in range(1, len(path))}
        changed = changed_states(whole.jaxpr, self.split.own_statistics or {}, env)
        alone = {var: result for var, result in changed.items() if var not in self.states}
        running = RunningStates.of(whole.jaxpr, alone, env, places)
        handed_on = {var: result for var, result in changed.items() if var not in running.results}
        for i in running.equations:
            places[i] = Invariant.AFTER
            env |= dict.fromkeys(whole_equations[i].outvars, Invariant.IN_TURN)
        own = self.own, running, handed_on, self.own_lines()
        return Proof(env, places, self.ahead, self.drawn, touched, self.counted, *own)

    def may_be_own(self, jaxpr: Jaxpr, needed: EarlySumNeed) -> bool:
        """Whether each microbatch may have its own of sums that an equation needs; the next walk knows them then."""
        sums = (needed.conflict.sums or needed.sums) - self.sums
        if self.split.own_statistics is None or not sums:
            return False
        if needed.vars - self.ahead and all(is_of_batch_alone(jaxpr, var, self.split) for var in needed.vars):
            return False
        self.more |= sums
        return True

    def own_lines(self) -> frozenset[str]:
        """The user's lines in which statistics are made of which each microbatch has its own."""
        made = (eqn for var, eqn in self.makers.items() if var in self.sums and not is_backward(eqn))
        return frozenset(str(line) for eqn in made if (line := source_of(eqn)) is not None)

    def placed(
        self, eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], path: Path
    ) -> tuple[list[Relation], Invariant | None]:
        """The relations of an equation's results, and when it is computed."""
        rows = any(isinstance(relation, BatchRows) for relation in relations)
        is_late = Invariant.OWN_BACKWARD in relations and not is_backward(eqn)  # it reads the mean of all microbatches
        is_scaled = Invariant.OWN in relations or not self.in_loop.isdisjoint(eqn.outvars)
        may_run = is_part(eqn, relations) if is_scaled else may_run_in_loop(eqn, relations)
        if not rows and (is_late or not may_run):
            return [Invariant.AFTER] * len(eqn.outvars), Invariant.AFTER
        try:
            found = self.equation(eqn, small, relations, path)
            if Invariant.AFTER in found:
                raise Conflict(eqn, NEEDS_SUMS)
        except Conflict as conflict:
            late = {
                atom
                for atom, relation in zip(eqn.invars, relations, strict=True)
                if isinstance(atom, Var) and (relation is Invariant.AFTER or isinstance(relation, PartialResult))
            }
            if not late:
                raise
            raise EarlySumNeed(conflict, late) from None
        differs = rows or any(isinstance(one, BatchRows | PartialResult) or one in OWN for one in (*relations, *found))
        if differs and eqn.effects and any("IO" in str(effect) or "Ordered" in str(effect) for effect in eqn.effects):
            raise Conflict(eqn, "has an effect that every microbatch would have")
        return found, None if differs else Invariant.BEFORE

    # Any equation.

    def body(self, whole: ClosedJaxpr, part: ClosedJaxpr, entries: Sequence[Relation], path: Path) -> list[Relation]:
        env: dict[Var, Relation] = dict(zip(whole.jaxpr.invars, entries, strict=True))
        for var, other in zip(whole.jaxpr.constvars, part.jaxpr.constvars, strict=True):
            if aval_of(var).shape != aval_of(other).shape:
                raise Conflict(whole.jaxpr.eqns[0], "reads a constant of the batch's size inside a loop or call")
            env[var] = Invariant.BEFORE
        for i, (eqn, small) in enumerate(paired_equations(equations_of(whole.jaxpr), equations_of(part.jaxpr))):
            found = self.equation(eqn, small, [_read(env, atom) for atom in eqn.invars], (*path, i))
            env.update(zip(eqn.outvars, found, strict=True))
        return [_read(env, atom) for atom in whole.jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], path: Path) -> list[Relation]:
        self.makers |= dict.fromkeys(eqn.outvars, eqn)
        special = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(eqn.primitive.name)
        if special is not None:
            return special(eqn, small, relations, path)
        called, other = called_jaxpr(eqn), called_jaxpr(small)
        if called is None and not has_rule(eqn):
            called, other = implementation_of(eqn), implementation_of(small)
        if called is None or other is None:
            return self.leaf(eqn, small, relations, path)
        try:
            return self.body(called, other, called_operands(eqn, relations), path)
        except Conflict as conflict:  # what JAX has written itself has the line of who calls it
            conflict.line = conflict.line or source_of(eqn)
            raise

    def leaf(self, eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], path: Path) -> list[Relation]:
        name = eqn.primitive.name
        if name in _PARTWISE:
            return list(relations)
        if any(isinstance(relation, BatchRows) for relation in relations):
            return self.with_rows(eqn, small, relations, path)
        if Invariant.AFTER in relations:
            return [Invariant.AFTER] * len(eqn.outvars)
        if any(isinstance(relation, PartialResult) for relation in relations):
            is_linear = linear(name, relations, pads_with=1 if name == "pad" else None) and not rounds(eqn)
            if not is_linear and moves_only(name) and len(relations) == 1:
                return list(relations) * len(eqn.outvars)
            sums = sums_of(relations)
            if not is_linear and len(path) > 1 and self.split.own_statistics is not None:
                raise Conflict(eqn, NEEDS_SUMS, sums)  # a loop or call makes nothing after the last microbatch
            return [PartialResult("add", sums) if is_linear else Invariant.AFTER] * len(eqn.outvars)
        known = Invariant.ZERO if keeps_zero(name, relations) else Invariant.BEFORE
        if known is Invariant.BEFORE and not OWN.isdisjoint(relations):
            known = self.own_kind(eqn, relations)
        repeats = name == "broadcast_in_dim"
        made: list[Relation] = []
        for out, other in zip(eqn.outvars, small.outvars, strict=True):
            if (relation := self.made_of_nothing(out, other, known)) is None:
                raise Conflict(eqn, "makes something else for a smaller batch")
            made.append(BatchRows(relation.dim, None) if repeats and isinstance(relation, BatchRows) else relation)
        if not repeats and any(isinstance(relation, BatchRows) for relation in made):
            if known in OWN:
                raise Conflict(eqn, "makes rows of the batch of what each microbatch has its own of")
            self.drawn.add(path)
            rows = zip(eqn.outvars, made, strict=True)
            self.drawn_rows |= {var: relation for var, relation in rows if isinstance(relation, BatchRows)}
        elif len(path) > 1 and not repeats:
            self.check_parameters(eqn, small)
        return made

    def made_of_nothing(self, whole: Var, part: Var, known: Invariant) -> Relation | None:
        """What a value is that no rows go into: it may have some, as random bits have; None if it cannot be.

        Of a dim that holds more than rows, these are taken for its major part. What such a value is combined with has
        to agree with that.
        """
        shape = aval_of(whole).shape
        dims = scaled_dims(shape, aval_of(part).shape, self.split.parts)
        if dims == []:
            return known
        if dims is None or len(dims) > 1 or shape[dims[0]] % self.split.batch:
            return None
        return BatchRows(dims[0], shape[dims[0]] // self.split.batch)

    def with_rows(self, eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], path: Path) -> list[Relation]:
        name = eqn.primitive.name
        array = BatchRows(relations[0].dim, 1) if isinstance(relations[0], BatchRows) else None
        others = relations[1:] if name == "scatter-add" and relations[0] == PartialResult("add") else relations
        if any(isinstance(relation, PartialResult) or relation is Invariant.AFTER for relation in others):
            raise Conflict(eqn, NEEDS_SUMS, sums_of(others))
        self.check_parameters(eqn, small)
        if (blocks := blocks_of(eqn, small, relations, self.split)) is not None:
            return blocks
        if (column := row_column(eqn, relations, self.makers, self.drawn_rows, self.split)) is not None:
            self.counted[path] = column
            relations = [Invariant.BEFORE, *relations[1:]]  # the rows of the indices are those of the array
        elif (fault := reads_positions(eqn, relations)) is not None:
            raise Conflict(eqn, fault)
        rule = rule_of(equation_of(eqn))
        factor = batch_factor(rule, relations, self.split.batch)
        if isinstance(factor, str):
            raise Conflict(eqn, factor)
        if column is None and factor.name in rule.need_replication | rule.permutation:
            raise Conflict(eqn, "needs all rows of the batch at once")
        found: list[Relation] = []
        for i, (out, other) in enumerate(zip(eqn.outvars, small.outvars, strict=True)):
            rows = array if column is not None and name != "gather" else handed_on(rule, factor, i)
            dims = scaled_dims(aval_of(out).shape, aval_of(other).shape, self.split.parts)
            if dims is None or dims != ([] if rows is None else [rows.dim]):
                raise Conflict(eqn, "takes the dim of the batch apart")
            found.append(rows or self.reduced(eqn, out, relations, factor.name in rule.reduction, path))
        return found

    def own_kind(self, eqn: JaxprEqn, relations: Sequence[Relation]) -> Invariant:
        """What is made of statistics of which each microbatch has its own."""
        backward = Invariant.OWN_BACKWARD in relations or is_backward(eqn)
        return Invariant.OWN_BACKWARD if backward else Invariant.OWN

    def reduced(self, eqn: JaxprEqn, out: Var, relations: Sequence[Relation], is_reduced: bool, path: Path) -> Relation:
        """What a result is over whose rows an equation reduces."""
        op = REDUCTIONS.get(eqn.primitive.name)
        if op is None or not is_reduced:
            raise Conflict(eqn, "needs all rows of the batch at once")
        if eqn.primitive.name == "scatter-add" and relations[0] not in (Invariant.ZERO, PartialResult("add")):
            raise Conflict(eqn, "adds to an array that each microbatch would add again")
        if out in self.sums:
            self.own[path] = op == "add"
            return self.own_kind(eqn, relations)
        return PartialResult(op, frozenset({out}) | sums_of(relations))

    def check_parameters(self, eqn: JaxprEqn, small: JaxprEqn) -> None:
        for key, value in eqn.params.items():
            if key in _SHAPES or isinstance(value, Jaxpr | ClosedJaxpr) or callable(value):
                continue
            if not _same(value, small.params.get(key)):
                raise Conflict(eqn, f"has a parameter, {key}, that depends on the size of the batch")

    # Loops and branches.

    def scan(self, eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], path: Path) -> list[Relation]:
        if eqn.params["length"] != small.params["length"]:
            raise Conflict(eqn, "loops over the rows of the batch")
        consts, carries = scan_counts(eqn)
        carry, stacked = list(relations[consts : consts + carries]), list(relations[consts + carries :])
        if any(isinstance(relation, BatchRows) and relation.dim == 0 for relation in stacked):
            raise Conflict(eqn, "loops over the rows of the batch")
        slices = [moved(relation, -1) for relation in stacked]
        whole, part, inside = eqn.params["jaxpr"], small.params["jaxpr"], len(path)
        self.forget(path)
        # A loop over layers that is taken apart is many scans of one body.
        key = id(whole), id(part), *relations, *(sums_of([one]) for one in relations)
        while key not in self.scans:
            self.forget(path)
            results = self.body(whole, part, [*relations[:consts], *carry, *slices], path)
            if same_carries(carry, after := self.joined(eqn, carry, results[:carries])):
                drawn = {one[inside:] for one in self.drawn if one[:inside] == path}
                counted = {one[inside:]: column for one, column in self.counted.items() if one[:inside] == path}
                own = {one[inside:]: is_sum for one, is_sum in self.own.items() if one[:inside] == path}
                found = [*carry, *(moved(relation, 1) for relation in results[carries:])]
                self.scans[key] = found, drawn, counted, own
            carry = after
        found, drawn, counted, own = self.scans[key]
        self.drawn |= {(*path, *one) for one in drawn}
        self.counted |= {(*path, *one): column for one, column in counted.items()}
        self.own |= {(*path, *one): is_sum for one, is_sum in own.items()}
        return list(found)

    def while_loop(self, eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], path: Path) -> list[Relation]:
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = list(relations[tests + consts :])
        while True:
            self.forget(path)
            flag = self.body(
                params["cond_jaxpr"], small.params["cond_jaxpr"], [*relations[:tests], *carry], (*path, "test")
            )
            if isinstance(flag[0], PartialResult) or flag[0] is Invariant.AFTER:
                raise Conflict(eqn, "turns until all rows of the batch are done")
            results = self.body(
                params["body_jaxpr"], small.params["body_jaxpr"], [*relations[tests : tests + consts], *carry],
                (*path, "body"),
            )  # fmt: skip
            if same_carries(carry, after := self.joined(eqn, carry, results)):
                return carry
            carry = after

    def cond(self, eqn: JaxprEqn, small: JaxprEqn, relations: Sequence[Relation], path: Path) -> list[Relation]:
        if isinstance(relations[0], PartialResult) or relations[0] is Invariant.AFTER:
            raise Conflict(eqn, NEEDS_SUMS)
        pairs = zip(eqn.params["branches"], small.params["branches"], strict=True)
        found = [self.body(*pair, relations[1:], (*path, b)) for b, pair in enumerate(pairs)]
        results = found[0]
        for other in found[1:]:
            results = self.joined(eqn, results, other)
        return results

    def joined(self, eqn: JaxprEqn, ones: Sequence[Relation], others: Sequence[Relation]) -> list[Relation]:
        made = [joined(one, other) for one, other in zip(ones, others, strict=True)]
        if None in made:
            reason = "adds sums over the batch to what every microbatch would count again"
            raise Conflict(eqn, reason, sums_of([*ones, *others]))
        return [relation for relation in made if relation is not None]

    def forget(self, path: Path) -> None:
        """What was found in an earlier round of a loop."""
        self.drawn = {one for one in self.drawn if one[: len(path)] != path}
        self.own = {one: is_sum for one, is_sum in self.own.items() if one[: len(path)] != path}


def _read(env: Mapping[Var, Relation], atom: Var | Literal) -> Relation:
    if not isinstance(atom, Literal):
        return env[atom]
    value = atom.val
    is_zero = isinstance(value, int | float | np.ndarray | np.generic | jax.Array) and not np.any(np.asarray(value))
    return Invariant.ZERO if is_zero else Invariant.BEFORE


def equation_of(eqn: JaxprEqn) -> Equation:
    """An equation of a jaxpr as rules see it."""

    def value(aval: Any) -> Value:
        shape, dtype, is_on_host = kind_of(aval)
        return Value(0, shape, dtype, 0, on_host=is_on_host)

    inputs = tuple(
        np.asarray(atom.val, aval_of(atom).dtype)
        if isinstance(atom, Literal) and not aval_of(atom).shape
        else value(aval_of(atom))
        for atom in eqn.invars
    )
    outputs = tuple(value(var.aval) for var in eqn.outvars)
    return Equation(0, eqn.primitive.name, eqn.params, inputs, outputs, source_of(eqn), ())


def _same(one: object, other: object) -> bool:
    try:
        return bool(one == other) or str(one) == str(other)
    except Exception:  # arrays and what else cannot be compared
        return str(one) == str(other)
