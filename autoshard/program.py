"""Functions and abstract arguments in, a `Program` out. The only reader of jaxprs.

A `Program` is the traced step as one flat list of equations in program order. Calls (`jit`, `custom_jvp_call`,
`custom_vjp_call`, `remat`) are opened and their equations stand in the list as if written there. Loops and branches
are opened too: their bodies stand in the list once, with `Equation.trips` saying how often they run, between
*boundary equations* that connect body and surroundings:

========================  =====================================================================================
primitive                 meaning
========================  =====================================================================================
``scan_const``            a value from outside, seen inside: identity, ``x -> y``
``scan_carry``            one carry: operands (initial value, value the body hands on), results (value the body
                          sees, value after the loop); all four have one layout
``scan_slice``            one step's slice of a stacked operand: ``[steps, ...] -> [...]``
``scan_stack``            one step's result stacked: ``[...] -> [steps, ...]``
``branch_const``          a value from outside a `cond`, seen inside one branch: identity
``branch_join``           operands: one value per branch, result: the value of the `cond`; all have one layout
``idle``                  what stands in a branch for another platform (`Program.running_on`): computes nothing
========================  =====================================================================================

`while` uses ``scan_const`` and ``scan_carry``. A ``scan_carry`` stands before the body it feeds, so its second operand
is defined later in the list than the equation itself: the one exception to definition before use.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
import os
import re
import sysconfig
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.tree_util import SequenceKey, keystr, tree_flatten_with_path

from autoshard.errors import MeshError
from autoshard.explicit import Types, on_auto_axes, open_axes, types_of
from autoshard.jaxprs import (
    REMAT,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    called_jaxpr,
    called_operands,
    equations_of,
    guards,
    is_array,
    is_kernel,
    key_bytes,
    on_host,
    scan_counts,
)
from autoshard.layout import Layout
from autoshard.signature import Chosen, join, signature_without
from autoshard.trees import VALUE_KEYS, Boxed, Tree

dtype_name = functools.cache(str)  # NumPy writes the name of a dtype anew each time, and slowly

# What opens into other equations, and what is to be computed each time that it says so.
_NEVER_MERGED = frozenset({"cond", "optimization_barrier", "rng_uniform", "scan", "while"})


@dataclass(frozen=True)
class Source:
    """A line of the user's code."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        return f"{name}:{self.line}" if self.line else "unknown line"


@dataclass(frozen=True)
class Value:
    """One array of the traced step."""

    id: int  # its index in Program.values
    shape: tuple[int, ...]
    dtype: Any  # numpy or JAX extended dtype (PRNG keys)
    bytes: int  # of the whole array
    name: str = ""  # the user's path for arguments ("state/params/w"), else ""
    source: Source | None = None  # the line that made it; None for arguments
    trips: int = 1  # how often per step it is made: the product of the loops around it
    on_host: bool = False  # whether it lies in the host's memory

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element, PRNG keys included."""
        return self.bytes // math.prod(self.shape) if self.bytes else self.dtype.itemsize

    @property
    def from_outside(self) -> bool:
        """Whether no equation makes it."""
        return bool(self.name)

    def __str__(self) -> str:
        return f"{self.name or 'value'} {self.dtype}{'<host>' * self.on_host}{list(self.shape)}"


@dataclass(frozen=True, eq=False)
class Equation:
    """One primitive applied to values; compared by identity."""

    index: int  # its index in Program.equations
    primitive: str
    params: Mapping[str, Any] = field(repr=False)
    inputs: tuple[Value | np.ndarray, ...]  # an array is a literal or a closed-over scalar
    outputs: tuple[Value, ...]
    source: Source | None
    path: tuple  # where in the nested jaxprs it stands; what lower() looks it up by
    trips: int = 1  # how often it runs per step: the product of the loops around it
    loop: tuple[int, int] | None = None  # boundary equations: first index of their loop, and one past its last

    @property
    def label(self) -> str:
        """What it is called in a compiled program: the user's line, and its index."""
        return f"{self.source or 'unknown line'}#{self.index}"

    def __str__(self) -> str:
        operands = ", ".join(str(list(x.shape)) for x in self.inputs)
        results = ", ".join(str(list(x.shape)) for x in self.outputs)
        return f"{self.primitive} {operands} -> {results} ({self.source})"


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step: what it computes, on which arguments, and how both look to the user."""

    name: str
    equations: tuple[Equation, ...]
    values: tuple[Value, ...]
    arguments: tuple[Value, ...]  # one per flat argument, in order
    constants: tuple[Value, ...]  # arrays that the function closes over
    results: tuple[Value | np.ndarray, ...]  # one per flat result; an array is a literal
    result_names: tuple[str, ...]
    donated: frozenset[int]  # indices of donated arguments
    carried: Mapping[int, int]  # argument index -> index of the result that takes its place in the next step
    in_tree: Tree  # of (args, kwargs), static arguments left out
    out_tree: Tree
    jaxpr: ClosedJaxpr = field(repr=False)
    guarded: frozenset[int] = frozenset()  # values that a recomputation reads from behind a barrier
    # The path of an equation that computes what an earlier one of its jaxpr does -> the place of that one in the jaxpr.
    merged: Mapping[tuple, int] = field(default_factory=dict, repr=False)
    types: Types | None = None  # of explicit mode; None if it is no program of explicit mode
    # The path of a `lax.platform_dependent` -> per branch the platforms that take it; None: all others.
    platforms: Mapping[tuple, tuple[tuple[str, ...] | None, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def makers(self) -> Mapping[int, Equation]:
        """The equation that makes a value, by its id; arguments and constants have none."""
        return {output.id: equation for equation in self.equations for output in equation.outputs}

    @cached_property
    def reads(self) -> Counter[int]:
        """How often equations read a value, by its id; 0 if none does."""
        return Counter(x.id for equation in self.equations for x in equation.inputs if isinstance(x, Value))

    @cached_property
    def fingerprint(self) -> str:
        """Equal for equal programs, in any process: what a plan file is checked against."""
        digest = hashlib.sha256()
        for value in (*self.arguments, *self.constants):
            digest.update(f"{value.name} {value.shape} {value.dtype}{'<host>' * value.on_host};".encode())
        for equation in self.equations:
            operands = [x.id if isinstance(x, Value) else x.shape for x in equation.inputs]
            made = [(x.id, x.shape, dtype_name(x.dtype)) for x in equation.outputs]
            params = [f"{name}={text}" for name, text in _printed(equation.params)]
            digest.update(f"{equation.primitive} {operands} {made} {params} {equation.trips};".encode())
        results = [x.id if isinstance(x, Value) else x.shape for x in self.results]
        flags = sorted(self.donated), sorted(self.carried.items()), sorted(self.guarded)
        digest.update(f"{results} {flags}".encode())
        if self.types is not None:
            axis_types = [str(one) for one in self.types.mesh.axis_types]
            digest.update(f"{axis_types} {self.types.arguments} {self.types.results}".encode())
        return digest.hexdigest()[:16]

    @property
    def ordered_arguments(self) -> Mapping[int, Layout]:
        """Argument index -> the layout in its type, which is an order in explicit mode."""
        layouts = self.types.arguments if self.types is not None else ()
        return {i: layout for i, layout in enumerate(layouts) if layout}

    @property
    def open_axes(self) -> frozenset[str]:
        """The mesh axes of which types of explicit mode say nothing."""
        return open_axes(self.types.mesh) if self.types is not None else frozenset()

    @property
    def typed_arguments(self) -> frozenset[int]:
        """Arguments that lie on the user's Explicit axes; all others lie on Auto axes."""
        if self.types is None:
            return frozenset()
        return frozenset(i for i, value in enumerate(self.arguments) if not value.shape) | self.ordered_arguments.keys()

    @property
    def typed_results(self) -> frozenset[int]:
        """Results that lie on the user's Explicit axes.

        One that is open and may be the next call's state does not: its type would be an order there.
        """
        if self.types is None:
            return frozenset()
        opened = (value for i, value in enumerate(self.arguments) if i not in self.typed_arguments)
        states = {(value.shape, value.dtype) for value in opened}
        return frozenset(
            i
            for i, (value, layout) in enumerate(zip(self.results, self.types.results, strict=True))
            if i not in self.types.on_auto
            and (layout is not None or not value.shape or (value.shape, value.dtype) not in states)
        )

    @property
    def closes_over_tracers(self) -> bool:
        """Whether it is part of a function that is being traced, and means nothing after that."""
        return any(isinstance(const, jax.core.Tracer) for const in self.jaxpr.consts)

    def running_on(self, platform: str) -> Program:
        """This program where the branches that other platforms take compute nothing; indices stay what they are."""
        others = {
            (*path, branch)
            for path, branches in self.platforms.items()
            for branch, names in enumerate(branches)
            if any(names is None or platform in names for names in branches) and branch != _taken(branches, platform)
        }
        if not others:
            return self
        idle = [any(equation.path[:n] in others for n in range(len(equation.path))) for equation in self.equations]
        never_made = itertools.chain(*(equation.outputs for equation in itertools.compress(self.equations, idle)))
        blanks = {value.id: replace(value, shape=(), dtype=np.dtype(bool), bytes=0) for value in never_made}
        equations = []
        for equation, is_idle in zip(self.equations, idle, strict=True):
            if is_idle:
                outputs = tuple(blanks[value.id] for value in equation.outputs)
                equation = replace(equation, primitive="idle", params={}, inputs=(), outputs=outputs)
            elif equation.primitive == "branch_join":  # all that reads what a branch makes
                made = [x for x in equation.inputs if not (isinstance(x, Value) and x.id in blanks)]
                read = (x if not (isinstance(x, Value) and x.id in blanks) else made[0] for x in equation.inputs)
                equation = replace(equation, inputs=tuple(read))
            equations.append(equation)
        values = tuple(blanks.get(value.id, value) for value in self.values)
        return replace(self, equations=tuple(equations), values=values)

    def __str__(self) -> str:
        return f"{self.name}: {len(self.arguments)} arguments, {len(self.equations)} equations"


def _taken(branches: Sequence[tuple[str, ...] | None], platform: str) -> int:
    """The branch that a platform takes: the first that names it, or the one for all others."""
    return next(branch for branch, names in enumerate(branches) if names is None or platform in names)


def trace(
    fn: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    leaves: Sequence[Any] | None = None,
    obey: bool = True,
    **jit_keywords: Any,
) -> Program:
    """The Program of `fn` on arrays or ShapeDtypeStructs.

    Args:
        fn: any function that `jax.jit` takes.
        args: its positional arguments; arrays are only looked at for shape and dtype.
        kwargs: its keyword arguments.
        leaves: what to trace with in the place of the arrays in `args` and `kwargs`.
        obey: whether what the step says of layouts is kept: constraints, and types of explicit mode.
        **jit_keywords: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames` as for `jax.jit`.

    Warns:
        UserWarning: `fn` changes an argument in place, say an nnx module, and does not return what it changed.
    """
    jax.jit(fn, **jit_keywords)  # checks the keywords
    chosen = Chosen.of(fn, jit_keywords, "static")
    static, dynamic = chosen.split(args, dict(kwargs))
    donating = Chosen.of(fn, jit_keywords, "donate")
    positions = [i for i in range(len(args)) if i not in chosen]
    given = [(i in donating, arg) for i, arg in zip(positions, dynamic[0], strict=True)]
    given += [(name in donating, dynamic[1][name]) for name in sorted(dynamic[1])]
    flags = [donated for donated, arg in given for _ in jax.tree.leaves(arg)]
    boxed = [Boxed.of(arg) for _, arg in given]
    if leaves is not None:
        left = iter(leaves)
        boxed = [Boxed(box.tree, list(itertools.islice(left, len(box.leaves)))) for box in boxed]
    count = len(positions)
    closed, result = jax.make_jaxpr(_watched(fn, static), return_shape=True)(
        *boxed[:count], **dict(zip(sorted(dynamic[1]), boxed[count:], strict=True))
    )
    donated = frozenset(i for i, flag in enumerate(flags) if flag)
    in_tree, types = Tree.of(dynamic), types_of(closed, jax.sharding.get_abstract_mesh(), obey=obey)
    settled = _settled(closed, types, in_tree, result.tree, donated) if types else ()
    untyped = on_auto_axes(closed, types, obey=obey, settled=settled)
    return replace(_Reader(untyped).program(in_tree, result.tree, donated), types=types)


def _settled(closed: ClosedJaxpr, types: Types, in_tree: Tree, out_tree: Tree, donated: frozenset[int]) -> list[int]:
    """Results that take the place of an argument of their type, and so lie as it does."""
    reader = _Reader(closed)
    arguments = tuple(reader.value(aval) for aval in closed.in_avals)
    results = tuple(
        _read({}, atom) if isinstance(atom, Literal) else reader.value(atom.aval) for atom in closed.jaxpr.outvars
    )
    carried = _carried(in_tree.paths, arguments, out_tree.paths, results, donated)
    return [result for argument, result in carried.items() if types.arguments[argument] == types.results[result]]


_witness = jax.jit(lambda: ())


def context() -> Any:
    """The same object for as long as what `jax.jit` has traced is traced no other way.

    JAX has no list of what makes it trace anew: x64, the precision of products, a mesh that is set, and so on. So this
    is a trace that it keeps.
    """
    return _witness.trace().jaxpr


def _watched(fn: Callable, static: tuple) -> Callable:
    """`fn` of and to boxed pytrees, static arguments given.

    Warns if it changes an argument in place and the change gets lost, as `jax.jit` loses it.
    """

    @functools.wraps(fn)
    def watched(*args: Boxed, **kwargs: Boxed) -> Boxed:
        opened = tuple(box.opened() for box in args), {name: box.opened() for name, box in kwargs.items()}
        before = jax.tree.leaves(opened)
        args, kwargs = join(static, opened)
        result = Boxed.of(fn(*args, **kwargs))
        after, _ = tree_flatten_with_path(opened)
        returned = set(map(id, result.leaves))
        changed = [
            slashed(path[2:])
            for (path, leaf), old in zip(after, before, strict=False)
            if leaf is not old and id(leaf) not in returned
        ]
        if changed:
            name = getattr(fn, "__name__", "the step")
            warnings.warn(
                f"{name} changes {len(changed)} arrays of its arguments in place and does not return them, "
                f"{changed[0]!r} for one: the changes are lost, as under jax.jit.\n"
                f"Return what it changes, as in `return (model, optimizer), loss`, and go on with what comes back.",
                stacklevel=2,
            )
        return result

    signature = signature_without(fn, [place for place, _ in static])
    if signature is not None:  # what errors of JAX call arguments
        watched.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` looks for
    return watched


class _Reader:
    """One walk over a traced function's jaxpr."""

    def __init__(self, closed: ClosedJaxpr):
        self.closed = closed
        self.values: list[Value] = []
        self.equations: list[Equation] = []
        self.steered: dict[int, list] = {}  # boundary equation -> values that decide what passes it
        self.guarded: set[int] = set()
        self.merged: dict[tuple, int] = {}
        self.platforms: dict[tuple, tuple] = {}

    def program(self, in_tree: Tree, out_tree: Tree, donated: frozenset[int]) -> Program:
        closed = self.closed
        parameter_names = _parameter_names(closed.jaxpr.debug_info, in_tree.paths)
        arguments = tuple(
            self.value(var.aval, name=name) for var, name in zip(closed.jaxpr.invars, parameter_names, strict=True)
        )
        constants = tuple(self.value(var.aval, name="closed-over array") for var in closed.jaxpr.constvars)
        env = dict(zip(closed.jaxpr.invars, arguments, strict=True))
        env |= zip(closed.jaxpr.constvars, constants, strict=True)
        results = tuple(self.body(closed.jaxpr, env, _Place((), 1, None)))
        return Program(
            name=closed.jaxpr.debug_info.func_name,
            equations=_without_dead(self.equations, results, self.steered),
            values=tuple(self.values),
            arguments=arguments,
            constants=constants,
            results=results,
            result_names=tuple(map(slashed, out_tree.paths)),
            donated=donated,
            carried=_carried(in_tree.paths, arguments, out_tree.paths, results, donated),
            in_tree=in_tree,
            out_tree=out_tree,
            jaxpr=closed,
            guarded=frozenset(self.guarded),
            merged=self.merged,
            platforms=self.platforms,
        )

    def value(self, aval, *, name: str = "", source: Source | None = None, trips: int = 1) -> Value:
        shape, dtype = getattr(aval, "shape", ()), getattr(aval, "dtype", np.dtype(bool))  # a token has neither
        made = Value(len(self.values), tuple(shape), dtype, _bytes_of(aval), name, source, trips, on_host(aval))
        self.values.append(made)
        return made

    def emit(self, primitive: str, params: Mapping, inputs: list, outputs: list, at: _Place) -> Equation:
        index = len(self.equations)
        made = Equation(index, primitive, params, tuple(inputs), tuple(outputs), at.source, at.path, at.trips)
        self.equations.append(made)
        return made

    def body(self, jaxpr: Jaxpr, env: dict, place: _Place) -> list[Value | np.ndarray]:
        """Walks one jaxpr whose inputs are in `env`; the values of its results."""
        computed: dict[tuple, int] = {}
        equations = equations_of(jaxpr)
        for i, eqn in enumerate(equations):
            inputs = [_read(env, atom) for atom in eqn.invars]
            at = _Place((*place.path, i), place.trips, _source(eqn) or place.source)
            what = _computed(eqn, inputs)
            first = i if what is None else computed.setdefault(what, i)
            if first < i:
                self.merged[at.path] = first
                outputs = [env[var] for var in equations[first].outvars]
            else:
                outputs = self.equation(eqn, inputs, at)
            env.update(zip(eqn.outvars, outputs, strict=True))
        return [_read(env, atom) for atom in jaxpr.outvars]

    def equation(self, eqn: JaxprEqn, inputs: list, at: _Place) -> list:
        opened = called_jaxpr(eqn)
        if eqn.primitive.name in REMAT and eqn.params["differentiated"]:
            behind = itertools.compress(inputs, guards(eqn))
            self.guarded |= {x.id for x in behind if isinstance(x, Value)}
        if opened is not None:
            return self.call(opened, called_operands(eqn, inputs), at)
        open_loop = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(eqn.primitive.name)
        if open_loop is not None:
            return open_loop(eqn, inputs, at)
        outputs = [self.value(var.aval, source=at.source, trips=at.trips) for var in eqn.outvars]
        self.emit(eqn.primitive.name, eqn.params, inputs, outputs, at)
        return outputs

    def call(self, closed: ClosedJaxpr, inputs: list, place: _Place) -> list:
        env = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        env |= {var: _constant(const) for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)}
        return self.body(closed.jaxpr, env, place)

    def scan(self, eqn, inputs, at: _Place) -> list:
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

    def while_loop(self, eqn, inputs, at: _Place) -> list:
        """A `while` runs an unknown number of times: its body is weighed as if it ran once."""
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        loop = _Loop(self, at, steps=1)
        avals = [var.aval for var in params["cond_jaxpr"].jaxpr.invars[:tests]]
        avals += [var.aval for var in params["body_jaxpr"].jaxpr.invars[:consts]]
        entries = [loop.const(x, aval) for x, aval in zip(inputs, avals, strict=False)]
        finals = [loop.carry(x, var.aval) for x, var in zip(inputs[tests + consts :], eqn.outvars, strict=True)]
        seen = [value for value, _ in finals]
        going_on = self.call(params["cond_jaxpr"], entries[:tests] + seen, loop.inside.below("test"))
        self.steered |= dict.fromkeys(loop.carries, going_on)
        loop.hand_on(self.call(params["body_jaxpr"], entries[tests:] + seen, loop.inside.below("body")))
        loop.close()
        return [final for _, final in finals]

    def cond(self, eqn, inputs, at: _Place) -> list:
        if platforms := eqn.params.get("branches_platforms"):
            self.platforms[at.path] = platforms
        per_branch = []
        for b, closed in enumerate(eqn.params["branches"]):
            entries = []
            for i, (x, var) in enumerate(zip(inputs[1:], closed.jaxpr.invars, strict=True)):
                inner = self.value(var.aval, source=at.source, trips=at.trips)
                self.emit("branch_const", {}, [x], [inner], at.below(b, "const", i))
                entries.append(inner)
            per_branch.append(self.call(closed, entries, at.below(b)))
        outputs = [self.value(var.aval, source=at.source, trips=at.trips) for var in eqn.outvars]
        for i, (output, *choices) in enumerate(zip(outputs, *per_branch, strict=True)):
            join = self.emit("branch_join", {}, choices, [output], at.below("join", i))
            self.steered[join.index] = inputs[:1]
        return outputs


@dataclass(frozen=True)
class _Place:
    """Where the reader stands: the path of a jaxpr or equation, its runs per step, the innermost user line so far."""

    path: tuple
    trips: int
    source: Source | None

    def below(self, *steps) -> _Place:
        return _Place((*self.path, *steps), self.trips, self.source)


class _Loop:
    """The boundary equations of one loop, as they are emitted around its body."""

    def __init__(self, reader: _Reader, at: _Place, steps: int):
        self.reader, self.outside = reader, at
        self.inside = _Place(at.path, at.trips * steps, at.source)
        self.start = len(reader.equations)
        self.indices: list[int] = []
        self.carries: list[int] = []
        self.counts: dict[str, int] = {}

    def emit(self, kind: str, inputs, outputs, place: _Place) -> int:
        position = self.counts[kind] = self.counts.get(kind, -1) + 1
        at = place.below(kind.removeprefix("scan_"), position)
        self.indices.append(self.reader.emit(kind, {}, inputs, outputs, at).index)
        return self.indices[-1]

    def value(self, aval, place: _Place) -> Value:
        return self.reader.value(aval, source=place.source, trips=place.trips)

    def const(self, outer, aval) -> Value:
        inner = self.value(aval, self.inside)
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


def _without_dead(equations: list[Equation], results: tuple, steered: Mapping[int, list]) -> tuple[Equation, ...]:
    """The equations that some result or effect needs, indices made anew."""
    producer = {output.id: equation for equation in equations for output in equation.outputs}
    needed: set[int] = set()
    queue = [producer[x.id] for x in results if isinstance(x, Value) and x.id in producer]
    queue += [equation for equation in equations if not equation.outputs]
    while queue:
        equation = queue.pop()
        if equation.index in needed:
            continue
        needed.add(equation.index)
        reads = (*equation.inputs, *steered.get(equation.index, ()))
        queue += [producer[x.id] for x in reads if isinstance(x, Value) and x.id in producer]
    before = np.concatenate([[0], np.cumsum([equation.index in needed for equation in equations])]).astype(int).tolist()

    def moved(old: Equation) -> Equation:
        loop = old.loop and (before[old.loop[0]], before[old.loop[1]])
        index, inputs, outputs = before[old.index], old.inputs, old.outputs
        return Equation(index, old.primitive, old.params, inputs, outputs, old.source, old.path, old.trips, loop)

    return tuple(moved(equation) for equation in equations if equation.index in needed)


def _printed(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parameters that print alike in every process and on all devices: not sets, not objects with an address."""
    bare = ((name, value.spec if isinstance(value, NamedSharding) else value) for name, value in sorted(params.items()))
    texts = ((name, str(dict(x.shape) if isinstance(x, Mesh | AbstractMesh) else x)) for name, x in bare)
    return [(name, text) for name, text in texts if " at 0x" not in text and "set(" not in text]


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


def _read(env: Mapping, atom: Any) -> Value | np.ndarray:
    if not isinstance(atom, Literal):
        return env[atom]
    aval: Any = atom.aval
    return _constant(atom.val, aval.dtype)


def _constant(value: Any, dtype: Any = None) -> Any:
    return value if isinstance(value, np.ndarray | jax.Array) else np.asarray(value, dtype)


def _bytes_of(aval) -> int:
    if not is_array(aval):
        return 0
    held = key_bytes(aval)
    size = getattr(aval.dtype, "itemsize", 0)  # an extended type of the user's own says none
    return math.prod(aval.shape) * size if held is None else held


# Names.


def _parameter_names(debug_info, paths: Iterable[tuple]) -> list[str]:
    """One slashed path per flat argument: the parameter's name, then the keys below it."""
    names = []
    for path, described in zip(paths, debug_info.arg_names, strict=True):
        # `path` starts with (0, position) for positional and (1, keyword) for keyword arguments; only the debug info
        # knows what a positional parameter is called: "params['w']", or "batch[0]['x']" for one of *batch.
        parameter = re.findall(r"\w+", (described or "").removesuffix(keystr(path[2:]))) or [slashed(path[1:2])]
        names.append("/".join(filter(None, [*parameter, slashed(path[2:])])))
    return names


def slashed(path: tuple) -> str:
    """A key path as one reads it: ``params/0/w``."""
    return keystr(_without_value(path), simple=True, separator="/")


def _without_value(path: tuple) -> tuple:
    return path[:-1] if path and path[-1] in VALUE_KEYS else path


def _carried(in_paths, arguments, out_paths, results, donated) -> dict[int, int]:
    """Which result takes which argument's place: type and path below the top agree, else donated, in order."""

    def kind(value) -> tuple:
        return value.shape, value.dtype, value.on_host

    def below_top(path: tuple) -> tuple[str, ...]:
        return tuple(str(key) for key in path)

    free = [i for i, x in enumerate(results) if isinstance(x, Value)]
    pairs: dict[int, int] = {}
    by_path: dict[tuple, list[int]] = {}
    for i in free:
        path = out_paths[i]
        tails = [below_top(path)]
        if path and isinstance(path[0], SequenceKey):
            tails.append(below_top(path[1:]))
        for tail in tails:
            by_path.setdefault((tail, kind(results[i])), []).append(i)
    taken: set[int] = set()

    def take(argument: int, candidates: list[int]) -> None:
        result = next((i for i in candidates if i not in taken), None)
        if result is not None:
            pairs[argument] = result
            taken.add(result)

    for a, (path, value) in enumerate(zip(in_paths, arguments, strict=True)):
        if len(path) > 2 or a in donated:  # a bare array argument is state only if the user says so by donating it
            take(a, by_path.get((below_top(path[2:]), kind(value)), []))
    for a in sorted(donated - pairs.keys()):
        take(a, [i for i in free if kind(results[i]) == kind(arguments[a])])
    return pairs


# Source lines.

_LIBRARIES = re.compile(r"[/\\]site-packages[/\\](jax|jaxlib|flax|optax|equinox|chex|jaxtyping|haiku)[/\\]")
_OWN = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def _source(eqn: JaxprEqn) -> Source | None:
    """The innermost line that the user wrote: not JAX, not the model library, not the standard library."""
    stack = eqn.source_info.traceback
    if stack is None:
        return None
    for frame in stack.frames:
        if _is_users(frame.file_name):
            return Source(frame.file_name, frame.line_num, frame.function_name)
    return None


_ABOUT_LAYOUTS = re.compile(r"sharding|PartitionSpec|pspec|unreduced|\bmesh\b", re.IGNORECASE)


def named_refusal(fn: Callable, error: Exception) -> MeshError | None:
    """What JAX refuses of a step in explicit mode, in the user's words; None if the error is about something else."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    raised = frames[-1] if frames else None
    is_users_own = raised is not None and re.match(r"raise\b|assert\b", raised.line or "")
    is_jaxs = type(error).__module__.split(".")[0] in ("builtins", "jax") and not is_users_own
    if not is_jaxs or not _ABOUT_LAYOUTS.search(str(error)):
        return None
    line = raised and Source(raised.filename, raised.lineno or 0, raised.name)
    what = str(error).split(" This error occurs at source:")[0].strip()
    if "of type Auto" in what:
        then = "Set a mesh with Explicit axes, as jax.make_mesh makes them (jax.set_mesh), or give autoshard one."
    else:
        then = (
            "Say there how the result lies (out_sharding=, jax.sharding.reshard), or trace the step on Auto axes, "
            "where nothing has to be said: jax.make_mesh(..., axis_types=(AxisType.Auto, ...))."
        )
    name = getattr(fn, "__name__", "the step")
    return MeshError(f"JAX refuses {name} for its shardings at {line or 'unknown line'}: {what}\n{then}")


@functools.cache
def _is_users(file: str) -> bool:
    if _LIBRARIES.search(file) or file.startswith(_OWN):
        return False
    return "site-packages" in file or not file.startswith(_STANDARD)
