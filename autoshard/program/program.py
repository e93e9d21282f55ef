"""A `Program`: a traced step as data.

It is one flat list of equations in program order. Calls (`jit`, `custom_jvp_call`,
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
``idle``                  what stands in a branch for another platform, or is only checked (`Program.running_on`)
========================  =====================================================================================

`while` uses ``scan_const`` and ``scan_carry``. A ``scan_carry`` stands before the body it feeds, so its second operand
is defined later in the list than the equation itself: the one exception to definition before use.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.jaxprs import ClosedJaxpr
from autoshard.layout import Layout
from autoshard.program.explicit import ExplicitTypes, open_axes
from autoshard.program.trees import Tree
from autoshard.program.trip_counts import LoopLength
from autoshard.program.user_code import Source

if TYPE_CHECKING:
    from autoshard.program.modules import ModuleChanges

EquationPath = tuple[Any, ...]  # the place of an equation in the nested jaxprs: an index or a name for each level
dtype_name = functools.cache(str)  # since NumPy computes the name of a dtype each time, slowly


def is_number(dtype: Any) -> bool:
    """Whether arrays of this dtype can be added up.

    >>> [is_number(jax.numpy.dtype(name)) for name in ("float32", "bfloat16", "int4", "bool")]
    [True, True, True, False]
    """
    return bool(jax.dtypes.issubdtype(dtype, np.number))


@dataclass(frozen=True)
class Value:
    """One array of the traced step."""

    id: int  # its index in Program.values
    shape: tuple[int, ...]
    dtype: Any  # numpy or JAX extended dtype (PRNG keys)
    bytes: int  # of the whole array
    name: str = ""  # the user's path for arguments ("state/params/w"), else ""
    source: Source | None = None  # the line that made it, or that reads a closed-over array; None for arguments
    trips: int = 1  # how often it is made per step: the product of the trips of the loops around it
    on_host: bool = False  # whether it lies in the host's memory
    guessed: int = 1  # the part of `trips` that is from loops of unknown length, which a compiled program does not tell
    is_known: bool = False  # whether it depends on no argument, so that XLA computes it at compile time

    @cached_property
    def itemsize(self) -> int:
        """Bytes per element, PRNG keys included; 1 for tokens and other non-arrays, and for empty arrays."""
        return self.bytes // math.prod(self.shape) if self.bytes else getattr(self.dtype, "itemsize", 0) or 1

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
    path: EquationPath  # its place in the nested jaxprs, by which `lower/` finds it
    trips: int = 1  # how often it runs per step: the product of the trips of the loops around it
    guessed: int = 1  # as `Value.guessed`
    loop: tuple[int, int] | None = None  # boundary equations: first index of their loop, and one past its last

    @property
    def label(self) -> str:
        """Its name in a compiled program: the user's line, and its index."""
        return f"{self.source or 'unknown line'}#{self.index}"

    def __str__(self) -> str:
        operands = ", ".join(str(list(x.shape)) for x in self.inputs)
        results = ", ".join(str(list(x.shape)) for x in self.outputs)
        return f"{self.primitive} {operands} -> {results} ({self.source})"


_NAMED_LINES = 3  # lines that a remark names


@dataclass(frozen=True)
class RewrittenPlaces:
    """Places of a step that were rewritten by one law of algebra."""

    name: str  # of the law
    law: str  # in one line
    places: tuple[int, ...]  # indices among all places where the law applies, in the order of its search
    lines: tuple[str, ...]  # of the user's code
    arguments: frozenset[int] = frozenset()  # indices of the arguments that these places read

    @property
    def remark(self) -> str:
        """One line of a report.

        >>> RewrittenPlaces("common_factor", "A B + A C = A (B + C)", (0, 1), ("train.py:4",)).remark
        'rewrites: common_factor at train.py:4 (2 places): A B + A C = A (B + C).'
        """
        named = ", ".join(self.lines[:_NAMED_LINES]) or "unknown line"
        more = f" and {len(self.lines) - _NAMED_LINES} more lines" * (len(self.lines) > _NAMED_LINES)
        count = f" ({len(self.places)} places)" * (len(self.places) > 1)
        return f"rewrites: {self.name} at {named}{more}{count}: {self.law}."


@dataclass(frozen=True, eq=False)
class Program:
    """A traced step: its equations, its arguments and results, and the user's names for them."""

    name: str
    equations: tuple[Equation, ...]
    values: tuple[Value, ...]
    arguments: tuple[Value, ...]  # one per flat argument, in order, then one per array of `captured`
    captured: tuple[Any, ...] = field(repr=False)  # the large arrays that the function closes over
    constants: tuple[Value, ...]  # the small arrays that the function closes over
    results: tuple[Value | np.ndarray, ...]  # one per flat result; an array is a literal
    result_names: tuple[str, ...]
    donated: frozenset[int]  # indices of donated arguments
    carried: Mapping[int, int]  # argument index -> index of the result that takes its place in the next step
    in_tree: Tree  # of (args, kwargs), static arguments left out
    out_tree: Tree
    jaxpr: ClosedJaxpr = field(repr=False)
    guarded: frozenset[int] = frozenset()  # values that a recomputation reads from behind a barrier
    barriers: frozenset[EquationPath] = frozenset()  # the paths of these recomputations
    backward: frozenset[EquationPath] = frozenset()  # the paths of all backward passes of a `jax.checkpoint`
    # The path of an equation that repeats an earlier one of its jaxpr -> the place of the earlier one in the jaxpr.
    merged: Mapping[EquationPath, int] = field(default_factory=dict, repr=False)
    # The path of an equation with a primitive of the user -> its implementation in JAX's primitives.
    implementations: Mapping[EquationPath, ClosedJaxpr] = field(default_factory=dict, repr=False)
    loops: tuple[LoopLength, ...] = ()  # of unknown length: the assumed trips of each `while`
    # Paths of the loops, branches and calls whose bodies JAX traces by themselves.
    apart: frozenset[EquationPath] = frozenset()
    inner: frozenset[EquationPath] = frozenset()  # paths of equations that are parts of another, as of a stencil
    microbatches: int = 1  # in which the step runs, one after the other
    recomputed: str = ""  # what autoshard keeps for the backward pass and what it computes again, in words
    state_on_hosts: bool = False  # whether autoshard keeps arguments in the memory of hosts between steps
    own_statistics: str = ""  # the statistics that each microbatch computes by itself, in words
    shared_trips: str = ""  # the loops whose trips devices may share out, in words
    stacked: str = ""  # what autoshard computes of stacks of arrays instead of array by array, in words
    departure: str = ""  # how it differs from the jaxpr of the step, if no other field says so, in words
    adds_rows: bool = False  # whether its batch is padded with rows
    rewritten: tuple[RewrittenPlaces, ...] = ()  # by laws of algebra, in the order in which they were applied
    # Static arguments, by name, or by position if they have none.
    static: Mapping[str | int, Any] = field(default_factory=dict, repr=False)
    types: ExplicitTypes | None = None  # of explicit mode; None without explicit mode
    # The path of a `lax.platform_dependent` -> per branch the platforms that take it; None: all others.
    platforms: Mapping[EquationPath, tuple[tuple[str, ...] | None, ...]] = field(default_factory=dict, repr=False)
    # Argument -> the PartitionSpec in its flax metadata, which may name axes that a mesh does not have.
    wishes: Mapping[int, PartitionSpec] = field(default_factory=dict, repr=False)
    changes: ModuleChanges | None = field(default=None, repr=False)  # to nnx modules among the arguments; None: none
    # Per array of `captured`, its place among the constants of the step's jaxpr; None if an inner jaxpr has it, too.
    constant_places: tuple[int | None, ...] = field(default=(), repr=False)

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
        named = {value.id for value in self.own_arguments}  # names of captured arrays may have lines in them
        for value in (*self.arguments, *self.constants):
            name = value.name if value.id in named else "closed-over array"
            digest.update(f"{name} {value.shape} {value.dtype}{'<host>' * value.on_host};".encode())
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
        if self.wishes:
            digest.update(str(sorted((i, str(spec)) for i, spec in self.wishes.items())).encode())
        return digest.hexdigest()[:16]

    def scope(self, path: EquationPath) -> EquationPath:
        """The path of the innermost body of `apart` around an equation; () outside of all."""
        return next((path[:n] for n in range(len(path) - 1, 0, -1) if path[:n] in self.apart), ())

    def with_equations(self, equations: Sequence[Equation], inner: Set[int]) -> Program:
        """This program with some equations replaced.

        Args:
            equations: one for each of its own.
            inner: indices of those that are parts of others now; they are left out if nothing else reads them.
        """
        read = {x.id for x in self.results if isinstance(x, Value)}
        for equation in equations:  # the second operand of a `scan_carry` is defined in the body, after the equation
            if equation.index not in inner:
                read |= {x.id for x in equation.inputs if isinstance(x, Value)}
        kept = []
        for equation in reversed(equations):
            if equation.index not in inner or any(made.id in read for made in equation.outputs):
                kept.append(equation)
                read |= {x.id for x in equation.inputs if isinstance(x, Value)}
        paths = frozenset(equations[i].path for i in inner) | self.inner
        return replace(self, equations=renumbered(kept[::-1], len(equations)), inner=paths)

    @property
    def own_arguments(self) -> tuple[Value, ...]:
        """The arguments that a caller passes: all but the arrays that the function closes over."""
        return self.arguments[: len(self.arguments) - len(self.captured)]

    @property
    def state(self) -> tuple[int, ...]:
        """The arguments that stay from step to step, by index: carried or closed over."""
        return *sorted(self.carried), *range(len(self.own_arguments), len(self.arguments))

    @property
    def ordered_arguments(self) -> Mapping[int, Layout]:
        """Argument index -> the layout in its type, which explicit mode prescribes."""
        layouts = self.types.arguments if self.types is not None else ()
        return {i: layout for i, layout in enumerate(layouts) if layout}

    @property
    def open_axes(self) -> frozenset[str]:
        """The mesh axes that types of explicit mode leave open."""
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

        A result with an open type that may be the state of the next call does not: its type would be prescribed there.
        """
        if self.types is None:
            return frozenset()
        opened = (value for i, value in enumerate(self.own_arguments) if i not in self.typed_arguments)
        states = {(value.shape, value.dtype) for value in opened}
        return frozenset(
            i
            for i, (value, layout) in enumerate(zip(self.results, self.types.results, strict=True))
            if i not in self.types.on_auto
            and (layout is not None or not value.shape or (value.shape, value.dtype) not in states)
        )

    @property
    def closes_over_tracers(self) -> bool:
        """Whether it closes over tracers, so that it is valid only during the current trace."""
        return any(isinstance(const, jax.core.Tracer) for const in self.jaxpr.consts)

    def running_on(self, platform: str) -> Program:
        """This program with the branches of other platforms idle; indices stay the same.

        Equations for `checkify.debug_check`s alone are idle, too, as JAX lowers them to nothing.
        """
        others = {
            (*path, branch)
            for path, branches in self.platforms.items()
            for branch, names in enumerate(branches)
            if any(names is None or platform in names for names in branches) and branch != _taken(branches, platform)
        }
        unchecked = self._made_for_checks()
        if not (others or unchecked):
            return self
        idle = [
            equation.index in unchecked or any(equation.path[:n] in others for n in range(len(equation.path)))
            for equation in self.equations
        ]
        never_made = itertools.chain(*(equation.outputs for equation in itertools.compress(self.equations, idle)))
        blanks = {value.id: replace(value, shape=(), dtype=np.dtype(bool), bytes=0) for value in never_made}
        equations = []
        for equation, is_idle in zip(self.equations, idle, strict=True):
            if is_idle:
                outputs = tuple(blanks[value.id] for value in equation.outputs)
                equation = replace(equation, primitive="idle", params={}, inputs=(), outputs=outputs)
            elif equation.primitive == "check":
                read = (blanks.get(x.id, x) if isinstance(x, Value) else x for x in equation.inputs)
                equation = replace(equation, inputs=tuple(read))
            elif equation.primitive == "branch_join":  # the only reader of what a branch makes
                made = [x for x in equation.inputs if not (isinstance(x, Value) and x.id in blanks)]
                read = (x if not (isinstance(x, Value) and x.id in blanks) else made[0] for x in equation.inputs)
                equation = replace(equation, inputs=tuple(read))
            equations.append(equation)
        values = tuple(blanks.get(value.id, value) for value in self.values)
        return replace(self, equations=tuple(equations), values=values)

    def _made_for_checks(self) -> set[int]:
        """Indices of the equations that only serve checks, which are no part of compiled programs."""
        found: set[int] = set()
        checked = False
        read = {value.id for value in self.results if isinstance(value, Value)}  # by anything else
        for equation in reversed(self.equations):
            if equation.primitive == "check" and equation.params["debug"]:
                checked = True
                continue
            moves = equation.loop is None and not equation.primitive.startswith(("branch_", "scan_"))
            made_for_them = moves and bool(equation.outputs) and all(made.id not in read for made in equation.outputs)
            if checked and made_for_them:
                found.add(equation.index)
            else:
                read.update(value.id for value in equation.inputs if isinstance(value, Value))
        return found

    def __str__(self) -> str:
        return f"{self.name}: {len(self.arguments)} arguments, {len(self.equations)} equations"


def renumbered(kept: Sequence[Equation], before: int) -> tuple[Equation, ...]:
    """The equations that are kept, with new indices and loops."""
    here = np.zeros(before + 1, int)
    here[[equation.index + 1 for equation in kept]] = 1
    new = np.cumsum(here).tolist()

    def moved(old: Equation) -> Equation:
        loop = old.loop and (new[old.loop[0]], new[old.loop[1]])
        outputs, inputs = old.outputs, old.inputs
        index = new[old.index]
        where = old.source, old.path, old.trips, old.guessed
        return Equation(index, old.primitive, old.params, inputs, outputs, *where, loop)

    return tuple(map(moved, kept))


def _taken(branches: Sequence[tuple[str, ...] | None], platform: str) -> int:
    """The branch that a platform takes: the first that names it, or the one for all others."""
    return next(branch for branch, names in enumerate(branches) if names is None or platform in names)


def _printed(params: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The parameters that print the same in every process: no sets, and no objects that print their address."""
    bare = ((name, value.spec if isinstance(value, NamedSharding) else value) for name, value in sorted(params.items()))
    texts = ((name, _text(x)) for name, x in bare)
    return [(name, text) for name, text in texts if " at 0x" not in text and "set(" not in text]


def _text(parameter: Any) -> str:
    if isinstance(parameter, np.dtype):
        return dtype_name(parameter)
    return str(dict(parameter.shape) if isinstance(parameter, Mesh | AbstractMesh) else parameter)
