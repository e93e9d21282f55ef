"""A function with a sharding rule and distributed implementations: `autoshard.operation`.

Without autoshard an `Operation` runs as the plain function that it decorates. In a planned step each call is one
equation. Its strategies are the splits of its rule, where each device runs the plain function on its shards, and the
splits of its implementations. Backward passes are operations too (`Operation.backward_of`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from autoshard.errors import ArgumentError, RuleError
from autoshard.errors.kinds import checks_kinds
from autoshard.operations.closures import closure_digest
from autoshard.operations.primitive import Batched, bind
from autoshard.operations.split import CallSplit
from autoshard.propagation.rule import Rule, Shape, names_of

RuleOf = Callable[[Sequence[Shape], Sequence[Shape]], Rule]  # shapes of operands and results -> their rule


@dataclass(eq=False)
class Implementation:
    """One distributed way to compute an operation. `Operation.implementation` makes it."""

    name: str
    local: Callable[..., Any]  # of a `CallSplit` and a device's shards; of static keywords
    splits: Mapping[str, tuple[str, ...]]  # role -> the factors that each mesh axis of it splits, all together
    where: Callable[..., bool] | None = None  # whether it can run a call that is split so
    seconds: Callable[..., float] | None = None  # of a device's own work; None: that of the traced function
    bytes: Callable[..., float] | None = None  # beside operands and results; None: those of the traced function
    local_backward: Callable[..., Any] | None = None  # None: the derivative of `local` as JAX takes it
    turns: int | None = None  # of the loops of unknown length in `local`, as prices count them; None: as everywhere
    interchangeable: frozenset[str] = frozenset()  # factors, of which only the product of a device's sizes matters

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Says how the gradient is computed on shards; used as a decorator.

        Args:
            function: of a `CallSplit`, a device's shards of the operands, of the results and of the cotangents of all
                results. It returns its shards of the gradients of all operands of floating point, in order.
        """
        self.local_backward = function
        return function


@dataclass(frozen=True)
class Forward:
    """What a backward operation is the backward pass of."""

    operation: Operation
    wrt: tuple[int, ...]  # the operands whose gradients are its results
    made: tuple[bool, ...]  # per result, whether it has a cotangent among its operands


@dataclass(eq=False)
class Operation:
    """A function of arrays whose calls are planned as one. `autoshard.operation` makes it; calling it runs it."""

    name: str
    function: Callable[..., Any]  # of arrays, and of static keywords: what each device runs on its shards, too
    rule_of: RuleOf = field(repr=False)
    implementations: list[Implementation] = field(default_factory=list, repr=False)
    plain_backward: Callable[..., Any] | None = field(default=None, repr=False)
    seconds: Callable[..., float] | None = field(default=None, repr=False)  # of the function on shards, as said
    sums_shared: bool = False  # whether a split factor that a result lacks leaves partial sums of it: a backward pass
    interchangeable: frozenset[str] = frozenset()  # factors: as of an `Implementation`
    identity: str = ""  # what tells it from others of its name, in words: it is part of a program's fingerprint
    forward: Forward | None = field(default=None, repr=False)  # of a backward pass: whose it is
    priced: dict[Any, Any] = field(default_factory=dict, repr=False)  # what planners have found of its calls
    derived: dict[Any, Operation] = field(default_factory=dict, repr=False)  # backward passes that were asked for

    def __post_init__(self) -> None:
        functools.update_wrapper(self, self.function)

    def __repr__(self) -> str:
        names = ", ".join(one.name for one in self.implementations) or "plain"
        identity = self.identity or self._closed_over
        return f"operation {self.name}: {names}{identity and f' ({identity})'}"

    @property
    def _closed_over(self) -> str:
        """What tells operations of one factory apart, where they say nothing of themselves."""
        own = [(one.local, one.local_backward, one.where, one.seconds, one.bytes) for one in self.implementations]
        digest = closure_digest([self.function, self.plain_backward, self.seconds, *itertools.chain(*own)])
        return digest and f"closes over {digest}"

    def __call__(self, *arrays: Any, **static: Any) -> Any:
        """What the function makes of arrays.

        Raises:
            ArgumentError: an operand is no array, or a keyword argument has no hash.
        """
        for i, array in enumerate(arrays):
            if not isinstance(array, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
                raise ArgumentError(
                    f"operand {i} of {self.name} is a {type(array).__name__}: positional arguments of an operation are "
                    "arrays.\nPass what is no array by keyword."
                )
        for name, value in static.items():
            try:
                hash(value)
            except TypeError as error:
                raise ArgumentError(
                    f"{name}= of {self.name} is a {type(value).__name__}, which has no hash: keyword arguments of an "
                    "operation are static.\nPass arrays by position."
                ) from error
        return bind(self, arrays, static)

    @checks_kinds()
    def implementation(
        self,
        *,
        splits: Mapping[str, str | Iterable[str]],
        name: str | None = None,
        where: Callable[..., bool] | None = None,
        seconds: Callable[..., float] | None = None,
        bytes: Callable[..., float] | None = None,
        turns: int | None = None,
    ) -> Callable[[Callable[..., Any]], Implementation]:
        """Adds a distributed implementation; used as a decorator of its local function.

        The local function takes a `CallSplit`, a device's shards of the operands, and the static keywords. It runs
        under `jax.shard_map`, so it may use `jax.lax.ppermute` and the like over `split.axes(role)`, and returns the
        device's shards of the results.

        Args:
            splits: role -> the factors of the rule that a mesh axis of this role splits, all together. At least one
                axis has a role. Other factors may be split beside, if no role splits them.
            name: what plans call it; by default that of the function.
            where: of a `CallSplit` and the static keywords: whether it can run a call that is split so.
            seconds: of a `CallSplit`, a `Topology`, the shards as `jax.ShapeDtypeStruct`s, and the static keywords:
                what the device's own work takes, collectives left out. A derivative that JAX takes of it takes twice
                as long. By default the traced function is priced.
            bytes: the same arguments without the topology: what the device holds beside operands and results.
            turns: how often loops of unknown length in it are counted. By default as `trips=` counts such loops.

        Raises:
            RuleError: no role is given, or the name is taken.
        """
        roles = {role: names_of(factors) for role, factors in splits.items()}
        if not roles or not all(roles.values()):
            raise RuleError(f"an implementation of {self.name} splits some factor: splits={{'ring': 'q k'}}")

        def added(local: Callable[..., Any]) -> Implementation:
            made = Implementation(name or local.__name__, local, roles, where, seconds, bytes, turns=turns)
            if any(one.name == made.name for one in self.implementations):
                raise RuleError(f"{self.name} already has an implementation {made.name!r}")
            self.implementations.append(made)
            return made

        return added

    def backward(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Says how gradients are computed; used as a decorator. By default JAX differentiates the function.

        Args:
            function: of the operands, the results and the cotangents of all results, and of the static keywords. It
                returns the gradients of all operands of floating point, in order.
        """
        self.plain_backward = function
        return function

    def named(self, name: str) -> Implementation | None:
        """The implementation of this name; None for "", the function itself.

        Raises:
            KeyError: there is none.
        """
        if not name:
            return None
        found = {one.name: one for one in self.implementations}
        return found[name]

    def call_rule(self, operands: Sequence[Shape], results: Sequence[Shape], batched: Batched) -> Rule:
        """The rule of one call, with a factor for each leading dim of a batch of calls."""
        counts = [sum(flags) for flags in zip(*batched, strict=True)] if batched else [0] * len(operands)
        levels = len(batched)
        inner = self.rule_of(
            [shape[count:] for shape, count in zip(operands, counts, strict=True)],
            [shape[levels:] for shape in results],
        )
        for one in self.implementations:
            for factor in (factor for factors in one.splits.values() for factor in factors):
                if factor not in inner.sizes:
                    raise RuleError(f"{one.name!r} of {self.name} splits {factor!r}, which its rule lacks: {inner}")
        if not levels:
            return inner
        names = [f"vmap{level}" for level in range(levels)]
        leading = [
            tuple((name,) for name, flags in zip(names, batched, strict=True) if flags[i]) for i in range(len(operands))
        ]
        all_levels = tuple((name,) for name in names)
        sizes = dict(zip(names, results[0][:levels], strict=True)) | dict(inner.sizes)
        return replace(
            inner,
            operands=tuple((*more, *dims) for more, dims in zip(leading, inner.operands, strict=True)),
            results=tuple((*all_levels, *dims) for dims in inner.results),
            sizes=sizes,
        )

    # The backward pass as an operation.

    def backward_of(self, wrt: tuple[int, ...], made: tuple[bool, ...]) -> Operation:
        """The operation from operands, results and cotangents to gradients.

        Args:
            wrt: the operands whose gradients are wanted.
            made: per result, whether it has a cotangent.
        """
        written = tuple((one, one.local_backward) for one in self.implementations)
        key = wrt, made, self.plain_backward, written
        if key not in self.derived:
            self.derived[key] = self._backward_of(wrt, made)
        return self.derived[key]

    def _backward_of(self, wrt: tuple[int, ...], made: tuple[bool, ...]) -> Operation:
        results = len(made)

        def operands_in(arrays: Sequence[Any]) -> int:
            return len(arrays) - results - sum(made)

        def rule_of(operands: Sequence[Shape], found: Sequence[Shape]) -> Rule:
            count = operands_in(operands)
            rule = self.rule_of(operands[:count], operands[count : count + results])
            cotangents = [dims for dims, one in zip(rule.results, made, strict=True) if one]
            gradients = tuple(rule.operands[i] for i in wrt)
            return replace(rule, operands=(*rule.operands, *rule.results, *cotangents), results=gradients)

        def plain(*arrays: Any, **static: Any) -> tuple[Any, ...]:
            count = operands_in(arrays)
            inputs, cotangents = arrays[:count], list(arrays[count + results :])
            if self.plain_backward is not None:
                outputs = arrays[count : count + results]
                whole = _all_cotangents(outputs, cotangents, made)
                return _wanted(self.plain_backward(*inputs, *outputs, *whole, **static), inputs, wrt)

            def of_wanted(*some: Any) -> list[Any]:
                own = dict(enumerate(inputs)) | dict(zip(wrt, some, strict=True))
                leaves = jax.tree.leaves(self.function(*own.values(), **static))
                return [leaf for leaf, one in zip(leaves, made, strict=True) if one]

            _, pull = jax.vjp(of_wanted, *(inputs[i] for i in wrt))
            return tuple(pull(cotangents))

        def by_hand(local_backward: Callable[..., Any]) -> Callable[..., Any]:
            def local(split: CallSplit, *arrays: Any, **static: Any) -> tuple[Any, ...]:
                count = operands_in(arrays)
                inputs, outputs = arrays[:count], arrays[count : count + results]
                whole = _all_cotangents(outputs, list(arrays[count + results :]), made)
                return _wanted(local_backward(split, *inputs, *outputs, *whole, **static), inputs, wrt)

            return local

        return Operation(
            f"{self.name}_backward",
            functools.wraps(self.function)(plain),
            rule_of,
            [
                replace(one, local=by_hand(one.local_backward), seconds=None, bytes=None, local_backward=None)
                if one.local_backward is not None
                else replace(one, seconds=_twice(one.seconds, operands_in), bytes=None)
                for one in self.implementations
            ],
            seconds=_twice(self.seconds, operands_in),
            sums_shared=True,
            interchangeable=self.interchangeable,
            identity=f"{self.identity or self._closed_over} by {wrt}".strip(),
            forward=Forward(self, wrt, made),
        )

    def is_written(self, run_name: str) -> bool:
        """Whether what runs it computes gradients by a function of the user's, which computes nothing again."""
        if self.forward is None:
            return True
        written = self.forward.operation.named(run_name)
        function = self.forward.operation.plain_backward if written is None else written.local_backward
        return function is not None

    def is_derived(self, run_name: str) -> bool:
        """Whether an implementation of this backward pass is JAX's derivative of the forward one."""
        if self.forward is None or not run_name:
            return False
        written = self.forward.operation.named(run_name)
        return written is not None and written.local_backward is None


def _twice(seconds: Callable[..., float] | None, operands_in: Callable[..., int]) -> Callable[..., float] | None:
    """A formula of the forward pass as one of its derivative, which has two products for each product of it."""
    if seconds is None:
        return None
    return lambda split, topology, *arrays, **static: (
        2 * seconds(split, topology, *arrays[: operands_in(arrays)], **static)
    )


def _all_cotangents(outputs: Sequence[Any], cotangents: list[Any], made: tuple[bool, ...]) -> list[Any]:
    """One cotangent per result; zeros of the result's own type where it has none."""
    given = iter(cotangents)
    return [next(given) if one else jax.numpy.zeros_like(output) for output, one in zip(outputs, made, strict=True)]


def _wanted(gradients: Any, inputs: Sequence[Any], wrt: tuple[int, ...]) -> tuple[Any, ...]:
    """Of the gradients of all operands of floating point, those that are wanted."""
    floating = [i for i, x in enumerate(inputs) if jax.numpy.issubdtype(x.dtype, jax.numpy.inexact)]
    by_operand = dict(zip(floating, jax.tree.leaves(gradients), strict=True))
    return tuple(by_operand[i] for i in wrt)


@checks_kinds()
def operation(
    notation: str,
    *,
    reduction: str | Iterable[str] = "",
    need_replication: str | Iterable[str] = "",
    sizes: Mapping[str, int] | None = None,
    name: str | None = None,
    seconds: Callable[..., float] | None = None,
) -> Callable[[Callable[..., Any]], Operation]:
    """Makes a function of arrays one operation that autoshard splits by a rule, or by implementations that you add.

    A device that has a share of some factors runs the function on its shards. So a factor of the rule may be split
    without a word to other devices; of a factor of `reduction`, the devices' results are summed up. Gradients follow:
    they are computed on shards too, and summed over the axes that split what an operand does not have.

    The function takes arrays by position and static values by keyword, and returns an array or a tuple of arrays. It
    is traced with whole arrays and with shards, so it takes sizes from its operands. Without autoshard, calling the
    result runs the function.

    Args:
        notation: which dims belong together, as for `register_rule`.
        reduction: factors whose split leaves partial sums.
        need_replication: factors that stay whole, but for implementations that split them.
        sizes: sizes of factors that occur in compound dims only.
        name: what plans and errors call it; by default that of the function.
        seconds: what the function takes on shards, where JAX cannot tell, as of a kernel: a formula as for
            `Operation.implementation`.

    Raises:
        RuleError: the notation is wrong.

    >>> @operation("b i, i j -> b j", reduction="i")
    ... def project(x, w):
    ...     return x @ w
    >>> project.name
    'project'
    """
    keywords: dict[str, Any] = {
        "reduction": names_of(reduction),
        "need_replication": names_of(need_replication),
        "sizes": dict(sizes or {}),
    }
    Rule.check_notation(notation, **keywords)

    def made(function: Callable[..., Any]) -> Operation:
        called = name or function.__name__

        @functools.lru_cache(maxsize=1024)
        def parsed(shapes: tuple[Shape, ...]) -> Rule:
            try:
                return Rule.parse(notation, *shapes, **keywords)
            except RuleError as error:
                raise RuleError(f"the rule of the operation {called}: {error}") from error

        def rule_of(operands: Sequence[Shape], results: Sequence[Shape]) -> Rule:
            return parsed((*map(tuple, operands), *map(tuple, results)))

        return Operation(called, function, rule_of, seconds=seconds)

    return made
