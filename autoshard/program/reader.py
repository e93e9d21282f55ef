"""A jaxpr in, a `Program` out: the only walk over the jaxpr of a step."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autoshard.jaxprs import (
    CUSTOM,
    REMAT,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    array_bytes,
    called_jaxpr,
    called_operands,
    equations_of,
    guards,
    implementation_of,
    is_kernel,
    on_host,
    scan_counts,
)
from autoshard.primitives import facts_of
from autoshard.program.captured import CapturedArray
from autoshard.program.paths import ArrayKind, Places, carried_results, parameter_names, printable, slashed
from autoshard.program.program import Equation, Program, Value, renumbered
from autoshard.program.trees import Tree
from autoshard.program.trip_counts import PASSES_COUNTERS, UNKNOWN_TURNS, LoopLength, bounds, requested_turns
from autoshard.program.user_code import Source, source_of

# Primitives that open into other equations, and those that are to be computed as often as they occur.
_NEVER_MERGED = frozenset({"cond", "optimization_barrier", "rng_uniform", "scan", "while"})


class JaxprReader:
    """One walk over a traced function's jaxpr."""

    def __init__(
        self,
        closed: ClosedJaxpr,
        captured: Sequence[tuple[CapturedArray, str]] = (),
        *,
        merges: bool = True,
        has_rule: Callable[[JaxprEqn], bool] = lambda eqn: True,
        trips: Mapping[str, int] | None = None,
    ):
        """
        Args:
            captured: the arrays behind the last arguments, which the function closes over, and their names.
            merges: whether equations that compute the same become one.
            has_rule: whether an equation is known as it stands; any other is opened, if JAX can trace what it computes.
            trips: line, function or glob of a loop of unknown length -> how often it turns.
        """
        self.closed, self.captured, self.merges, self.has_rule = closed, captured, merges, has_rule
        self.values: list[Value] = []
        self.equations: list[Equation] = []
        self.effects: set[int] = set()  # equations that run for more than their results
        self.steered: dict[int, list] = {}  # boundary equation -> values that decide what passes it
        self.guarded: set[int] = set()
        self.barriers: set[tuple] = set()
        self.backward: set[tuple] = set()
        self.merged: dict[tuple, int] = {}
        self.platforms: dict[tuple, tuple] = {}
        self.implementations: dict[tuple, ClosedJaxpr] = {}
        self.trips, self.loops = trips or {}, dict[tuple, LoopLength]()
        self.numbers: dict[int, float] = {}  # values whose elements are all this number
        self.apart: set[tuple] = set()

    def program(self, in_tree: Tree, out_tree: Tree, places: Places) -> Program:
        closed = self.closed
        names = parameter_names(closed.jaxpr.debug_info, places.arguments)
        sources = [*[None] * len(names), *(one.line for one, _ in self.captured)]
        names += [printable(name) for _, name in self.captured]
        arguments = tuple(
            self.value(var.aval, name=name, at=_ReaderPlace((), 1, source))
            for var, name, source in zip(closed.jaxpr.invars, names, sources, strict=True)
        )
        own = arguments[: len(places.arguments)]
        constants = tuple(
            self.value(var.aval, name="closed-over array", is_known=True) for var in closed.jaxpr.constvars
        )
        env = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        env |= zip(closed.jaxpr.constvars, constants, strict=True)
        results = tuple(self.body(closed.jaxpr, env, _ReaderPlace((), 1, None)))
        kinds = [_kind(x) if isinstance(x, Value) else None for x in results]
        carried = carried_results(places, list(map(_kind, own)), kinds)
        replaced = {result: names[argument] for argument, result in places.in_place.items()}
        return Program(
            name=printable(closed.jaxpr.debug_info.func_name),
            equations=_without_dead(self.equations, results, self.steered, self.effects),
            values=tuple(self.values),
            arguments=arguments,
            captured=tuple(one.array for one, _ in self.captured),
            constant_places=tuple(one.constant for one, _ in self.captured),
            constants=constants,
            results=results,
            result_names=tuple(replaced.get(i) or slashed(path) for i, path in enumerate(places.results)),
            donated=places.donated,
            carried=carried,
            in_tree=in_tree,
            out_tree=out_tree,
            jaxpr=closed,
            guarded=frozenset(self.guarded),
            barriers=frozenset(self.barriers),
            backward=frozenset(self.backward),
            merged=self.merged,
            platforms=self.platforms,
            implementations=self.implementations,
            loops=tuple(self.loops.values()),
            apart=frozenset(self.apart),
        )

    def value(self, aval, *, name: str = "", at: _ReaderPlace | None = None, is_known: bool = False) -> Value:
        shape, dtype, is_on_host = kind_of(aval)
        at = at or _ReaderPlace((), 1, None)
        where = at.source, at.trips, is_on_host, at.guessed, is_known
        made = Value(len(self.values), shape, dtype, array_bytes(aval), name, *where)
        self.values.append(made)
        return made

    def emit(self, primitive: str, params: Mapping, inputs: list, outputs: list, at: _ReaderPlace) -> Equation:
        index = len(self.equations)
        where = at.source, at.path, at.trips, at.guessed
        made = Equation(index, primitive, params, tuple(inputs), tuple(outputs), *where)
        self.equations.append(made)
        return made

    def body(self, jaxpr: Jaxpr, env: dict, place: _ReaderPlace) -> list[Value | np.ndarray]:
        """Walks one jaxpr whose inputs are in `env`; the values of its results."""
        computed: dict[tuple, int] = {}
        equations = equations_of(jaxpr)
        for i, eqn in enumerate(equations):
            inputs = [_read(env, atom) for atom in eqn.invars]
            at = _ReaderPlace((*place.path, i), place.trips, source_of(eqn) or place.source, place.guessed)
            what = _computed(eqn, inputs) if self.merges else None
            first = i if what is None else computed.setdefault(what, i)
            if first < i:
                self.merged[at.path] = first
                outputs = [env[var] for var in equations[first].outvars]
            else:
                outputs = self.equation(eqn, inputs, at)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [_read(env, atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, inputs: list, at: _ReaderPlace) -> list:
        opened = called_jaxpr(eqn)
        if eqn.primitive.name in REMAT and eqn.params["differentiated"]:
            behind = {x.id for x in itertools.compress(inputs, guards(eqn)) if isinstance(x, Value)}
            self.guarded |= behind
            self.barriers |= {at.path} if behind else set()
            self.backward.add(at.path)
        if opened is not None:
            if eqn.primitive.name in REMAT | CUSTOM:
                self.apart.add(at.path)
            return self.call(opened, called_operands(eqn, inputs), at)
        open_loop = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(eqn.primitive.name)
        if open_loop is not None:
            self.apart.add(at.path)
            return open_loop(eqn, inputs, at)
        if not self.has_rule(eqn) and (implementation := implementation_of(eqn)) is not None:
            self.implementations[at.path] = implementation
            return self.call(implementation, inputs, at)
        is_known = _is_known(eqn, inputs)
        outputs = [self.value(var.aval, at=at, is_known=is_known) for var in eqn.outvars]
        made = self.emit(eqn.primitive.name, eqn.params, inputs, outputs, at)
        if eqn.effects and facts_of(eqn.primitive.name).from_one_device:
            self.effects.add(made.index)
        if eqn.primitive.name in PASSES_COUNTERS and (number := self.number(inputs[0])) is not None:
            self.numbers[outputs[0].id] = number
        return outputs

    def number(self, x: Value | np.ndarray) -> float | None:
        """The number that all elements of a value are, as far as that is known."""
        if isinstance(x, Value):
            return self.numbers.get(x.id)
        return float(x) if x.ndim == 0 and x.dtype.kind in "biuf" else None

    def call(self, closed: ClosedJaxpr, inputs: list, place: _ReaderPlace) -> list:
        env = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        env |= {var: _constant(const) for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
        return self.body(closed.jaxpr, env, place)

    def scan(self, eqn, inputs, at: _ReaderPlace) -> list:
        consts, carries = scan_counts(eqn)
        loop = _Loop(self, at, steps=eqn.params["length"])
        closed = eqn.params["jaxpr"]
        avals = [var.aval for var in closed.jaxpr.invars]
        entries = [loop.const(x, aval) for x, aval in zip(inputs[:consts], avals, strict=False)]
        finals = [loop.carry(x, var.aval) for x, var in zip(inputs[consts:], eqn.outvars[:carries], strict=False)]
        entries += [seen for seen, _ in finals]
        entries += [
            loop.slice(x, aval) for x, aval in zip(inputs[consts + carries :], avals[consts + carries :], strict=True)
        ]
        results = self.call(closed, entries, loop.inside)
        loop.hand_on(results[:carries])
        stacked = [loop.stack(x, var.aval) for x, var in zip(results[carries:], eqn.outvars[carries:], strict=True)]
        loop.close()
        return [final for _, final in finals] + stacked

    def while_loop(self, eqn, inputs, at: _ReaderPlace) -> list:
        params, length = eqn.params, self.length(eqn, inputs, at)
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        loop = _Loop(self, at, steps=length.turns, guessed=length.how != "exact")
        avals = [var.aval for var in params["cond_jaxpr"].jaxpr.invars[:tests]]
        avals += [var.aval for var in params["body_jaxpr"].jaxpr.invars[:consts]]
        entries = [loop.const(x, aval) for x, aval in zip(inputs, avals, strict=False)]
        finals = [loop.carry(x, var.aval) for x, var in zip(inputs[tests + consts :], eqn.outvars, strict=True)]
        seen = [value for value, _ in finals]
        going_on = self.call(params["cond_jaxpr"], entries[:tests] + seen, loop.inside.below("test"))
        if dims := tuple(range(len(going_on[0].shape))):  # a batch of loops goes on while any of them does
            flag = self.value(jax.ShapeDtypeStruct((), going_on[0].dtype), at=loop.inside)
            self.emit("reduce_or", {"axes": dims}, going_on, [flag], loop.inside.below("flag"))
            going_on = [flag]
        self.steered |= dict.fromkeys(loop.carries, going_on)
        loop.hand_on(self.call(params["body_jaxpr"], entries[tests:] + seen, loop.inside.below("body")))
        loop.close()
        return [final for _, final in finals]

    def length(self, eqn, inputs, at: _ReaderPlace) -> LoopLength:
        """How often a `while` turns: as the user says, as its condition says, or a guess.

        Of a loop of which nothing is known, another at the same line may tell: a derivative turns as often.
        """
        found = bounds(eqn, [self.number(x) for x in inputs])
        known = [turns for turns in found if turns is not None]
        if (said := requested_turns(at.source, self.trips)) is not None and (None in found or len(found) > 1):
            length = LoopLength(at.source, said, "said")
        elif known and len(known) == len(found):
            length = LoopLength(at.source, max(1, min(known)), "exact" if len(found) == 1 else "guessed")
        else:
            same = (one for one in self.loops.values() if at.source is not None and one.source == at.source)
            turns = next((one.turns for one in same), min([*known, UNKNOWN_TURNS]))
            length = LoopLength(at.source, max(1, turns), "guessed")
        self.loops[at.path] = length
        return length

    def cond(self, eqn, inputs, at: _ReaderPlace) -> list:
        if platforms := eqn.params.get("branches_platforms"):
            self.platforms[at.path] = platforms
        per_branch = []
        for b, closed in enumerate(eqn.params["branches"]):
            entries = []
            for i, (x, var) in enumerate(zip(inputs[1:], closed.jaxpr.invars, strict=True)):
                inner = self.value(var.aval, at=at)
                self.emit("branch_const", {}, [x], [inner], at.below(b, "const", i))
                entries.append(inner)
            per_branch.append(self.call(closed, entries, at.below(b)))
        outputs = [self.value(var.aval, at=at) for var in eqn.outvars]
        for i, (output, *choices) in enumerate(zip(outputs, *per_branch, strict=True)):
            join = self.emit("branch_join", {}, choices, [output], at.below("join", i))
            self.steered[join.index] = inputs[:1]
        return outputs


@dataclass(frozen=True)
class _ReaderPlace:
    """Where the reader stands: the path of a jaxpr or equation, its runs per step, the innermost user line so far."""

    path: tuple
    trips: int
    source: Source | None
    guessed: int = 1  # of the runs: turns of loops whose number a compiled program does not tell

    def below(self, *steps) -> _ReaderPlace:
        return replace(self, path=(*self.path, *steps))


class _Loop:
    """The boundary equations of one loop, as they are emitted around its body."""

    def __init__(self, reader: JaxprReader, at: _ReaderPlace, steps: int, guessed: bool = False):
        self.reader, self.outside = reader, at
        self.inside = replace(at, trips=at.trips * steps, guessed=at.guessed * (steps if guessed else 1))
        self.start = len(reader.equations)
        self.indices: list[int] = []
        self.carries: list[int] = []
        self.counts: dict[str, int] = {}

    def emit(self, kind: str, inputs, outputs, place: _ReaderPlace) -> int:
        position = self.counts[kind] = self.counts.get(kind, -1) + 1
        at = place.below(kind.removeprefix("scan_"), position)
        self.indices.append(self.reader.emit(kind, {}, inputs, outputs, at).index)
        return self.indices[-1]

    def value(self, aval, place: _ReaderPlace) -> Value:
        return self.reader.value(aval, at=place)

    def const(self, outer, aval) -> Value:
        inner = self.value(aval, self.inside)
        if (number := self.reader.number(outer)) is not None:
            self.reader.numbers[inner.id] = number
        self.emit("scan_const", [outer], [inner], self.outside)
        return inner

    def carry(self, initial, aval) -> tuple[Value, Value]:
        seen, final = self.value(aval, self.inside), self.value(aval, self.outside)
        self.carries.append(self.emit("scan_carry", [initial], [seen, final], self.outside))
        return seen, final

    def slice(self, stacked, aval) -> Value:
        inner = self.value(aval, self.inside)
        self.emit("scan_slice", [stacked], [inner], self.inside)
        return inner

    def stack(self, inner, aval) -> Value:
        stacked = self.value(aval, self.outside)
        self.emit("scan_stack", [inner], [stacked], self.inside)
        return stacked

    def hand_on(self, values: list) -> None:
        """Closes the carries' circles: what the body returned becomes their second operand."""
        for index, handed_on in zip(self.carries, values, strict=True):
            carry = self.reader.equations[index]
            self.reader.equations[index] = replace(carry, inputs=(carry.inputs[0], handed_on))

    def close(self) -> None:
        equations = self.reader.equations
        for index in self.indices:
            equations[index] = replace(equations[index], loop=(self.start, len(equations)))


def _without_dead(
    equations: list[Equation], results: tuple, steered: Mapping[int, list], effects: Set[int]
) -> tuple[Equation, ...]:
    """The equations that some result or effect needs, indices made anew."""
    producer = {output.id: equation for equation in equations for output in equation.outputs}
    needed: set[int] = set()
    queue = [producer[x.id] for x in results if isinstance(x, Value) and x.id in producer]
    queue += [equation for equation in equations if not equation.outputs or equation.index in effects]
    while queue:
        equation = queue.pop()
        if equation.index in needed:
            continue
        needed.add(equation.index)
        reads = (*equation.inputs, *steered.get(equation.index, ()))
        queue += [producer[x.id] for x in reads if isinstance(x, Value) and x.id in producer]
    return renumbered([equation for equation in equations if equation.index in needed], len(equations))


def _is_known(eqn: JaxprEqn, inputs: list) -> bool:
    """Whether XLA computes it as it compiles: of literals and small arrays that the step closes over."""
    facts = facts_of(eqn.primitive.name)
    is_folded = facts.is_pointwise or facts.relabels or facts.is_expensive or facts.is_loop
    if eqn.effects or not is_folded or (eqn.primitive.name == "iota" and math.prod(eqn.params["shape"]) > 1):
        return False
    return all(not isinstance(x, Value) or x.is_known for x in inputs)


def _computed(eqn: JaxprEqn, inputs: list) -> tuple | None:
    """Equal for equations of one jaxpr that compute the same; None for what is not compared.

    XLA merges those that are equal, and their collectives. What reads numbers alone costs nothing to make again.
    """
    if eqn.effects or eqn.primitive.name in _NEVER_MERGED or not any(isinstance(x, Value) for x in inputs):
        return None
    if is_kernel(eqn) or called_jaxpr(eqn) is not None:
        return None
    what = eqn.primitive, eqn.ctx, tuple(map(_identity, inputs)), tuple(sorted(eqn.params.items()))
    try:
        hash(what)
    except TypeError:  # a parameter that cannot be compared
        return None
    return what


def _identity(x: Value | np.ndarray) -> tuple:
    if isinstance(x, np.ndarray) and x.ndim == 0:
        return str(x.dtype), x.tobytes()
    return (x.id,) if isinstance(x, Value) else (None, id(x))


def kind_of(aval: Any) -> ArrayKind:
    """What kind of array an abstract value is; a token counts as a boolean."""
    return tuple(getattr(aval, "shape", ())), getattr(aval, "dtype", np.dtype(bool)), on_host(aval)


def _kind(value: Value) -> ArrayKind:
    return value.shape, value.dtype, value.on_host


def _read(env: Mapping, atom: Any) -> Value | np.ndarray:
    if not isinstance(atom, Literal):
        return env[atom]
    aval: Any = atom.aval
    return _constant(atom.val, aval.dtype)


def _constant(value: Any, dtype: Any = None) -> Any:
    return value if isinstance(value, np.ndarray | jax.Array) else np.asarray(value, dtype)
