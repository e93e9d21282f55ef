"""Functions and abstract arguments in, a `Program` out."""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.tree_util import tree_flatten_with_path

from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Literal
from autoshard.program.captured import CapturedArray, identity_of, with_captured
from autoshard.program.closures import names_in_closure
from autoshard.program.explicit import Types, on_auto_axes, types_of
from autoshard.program.paths import carried_results, slashed
from autoshard.program.program import Program
from autoshard.program.reader import Reader, kind_of
from autoshard.program.signature import ArgumentSelection, join, signature_without
from autoshard.program.trees import Box, Tree
from autoshard.program.turns import check_places


@dataclass(frozen=True)
class TracedStep:
    """A step that has been traced, and can be traced again for other shapes."""

    closed: ClosedJaxpr
    paths: Sequence[tuple]  # of keys, one per flat argument: positional or keyword, which one, and below
    carried: Collection[int]  # arguments whose place a result takes
    is_explicit: bool  # whether types of explicit mode say how arrays lie
    again: Callable[[Sequence[Any]], ClosedJaxpr]  # flat ShapeDtypeStructs -> the step traced for these


def trace(
    fn: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    leaves: Sequence[Any] | None = None,
    obey: bool = True,
    merges: bool = True,
    has_rule: Callable[[JaxprEqn], bool] = lambda eqn: True,
    trips: Mapping[str, int] | None = None,
    rewritten: Callable[[TracedStep], ClosedJaxpr] | None = None,
    **jit_keywords: Any,
) -> Program:
    """The Program of `fn` on arrays or ShapeDtypeStructs.

    Args:
        fn: any function that `jax.jit` takes.
        args: its positional arguments; arrays are only looked at for shape and dtype.
        kwargs: its keyword arguments.
        leaves: what to trace with in the place of the arrays in `args` and `kwargs`.
        obey: whether what the step says of layouts is kept: constraints, and types of explicit mode.
        merges: whether equations that compute the same become one, as XLA makes them one.
        has_rule: whether an equation is known as it stands; any other is opened, if JAX can trace what it computes.
        trips: line, function or glob of a loop of unknown length -> how often it turns.
        rewritten: what is read in the place of the traced step: a jaxpr from the same arguments to the same results.
        **jit_keywords: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames` as for `jax.jit`.

    Warns:
        UserWarning: `fn` changes an argument in place, say an nnx module, and does not return what it changed.
    """
    jax.jit(fn, **jit_keywords)  # checks the keywords
    chosen = ArgumentSelection.of(fn, jit_keywords, "static")
    static, dynamic = chosen.split(args, dict(kwargs))
    donating = ArgumentSelection.of(fn, jit_keywords, "donate")
    positions = [i for i in range(len(args)) if i not in chosen]
    given = [(i in donating, arg) for i, arg in zip(positions, dynamic[0], strict=True)]
    given += [(name in donating, dynamic[1][name]) for name in sorted(dynamic[1])]
    flags = [donated for donated, arg in given for _ in jax.tree.leaves(arg)]
    boxed = [Box.of(arg) for _, arg in given]
    if leaves is not None:
        boxed = _boxes_of(boxed, leaves)
    names = sorted(dynamic[1])

    def traced(boxes: Sequence[Box]) -> tuple[ClosedJaxpr, Any]:
        by_name = dict(zip(names, boxes[len(positions) :], strict=True))
        made: tuple[ClosedJaxpr, Any] = jax.make_jaxpr(_watched(fn, static), return_shape=True)(
            *boxes[: len(positions)], **by_name
        )
        return made

    closed, result = traced(boxed)
    donated = frozenset(i for i, flag in enumerate(flags) if flag)
    in_tree, types = Tree.of(dynamic), types_of(closed, jax.sharding.get_abstract_mesh(), obey=obey)
    settled = _results_in_place(closed, types, in_tree, result.tree, donated) if types else ()
    untyped = on_auto_axes(closed, types, obey=obey, settled=settled)
    if rewritten is not None:

        def again(structs: Sequence[Any]) -> ClosedJaxpr:
            others, _ = traced(_boxes_of(boxed, structs))
            return on_auto_axes(others, None, obey=obey)

        carried = _carried(closed, in_tree, result.tree, donated)
        untyped = rewritten(TracedStep(untyped, in_tree.paths, carried, types is not None, again))
    taking, captured = with_captured(untyped)
    if captured and types is not None:
        types = replace(types, arguments=(*types.arguments, *[None] * len(captured)))
    named = list(zip(captured, _names(fn, captured, closed, untyped), strict=True))
    reader = Reader(taking, named, merges=merges, has_rule=has_rule, trips=trips)
    program = replace(reader.program(in_tree, result.tree, donated), types=types)
    check_places(trips or {}, program.loops)
    return program


def _boxes_of(boxed: Sequence[Box], leaves: Sequence[Any]) -> list[Box]:
    """The same trees with other leaves."""
    left = iter(leaves)
    return [Box(box.tree, list(itertools.islice(left, len(box.leaves)))) for box in boxed]


def _names(fn: Callable, captured: Sequence[CapturedArray], traced: ClosedJaxpr, untyped: ClosedJaxpr) -> list[str]:
    """What arrays that `fn` closes over are called: as in the user's code where they are found there."""
    if not captured:
        return []
    as_traced = dict(zip(map(identity_of, untyped.consts), map(identity_of, traced.consts), strict=True))
    identities = [as_traced.get(identity_of(one.array), identity_of(one.array)) for one in captured]
    names = names_in_closure(fn, identities)
    return [
        names.get(identity) or f"closed over {one.type}" + (f" at {one.line}" if one.line else "")
        for identity, one in zip(identities, captured, strict=True)
    ]


def _carried(closed: ClosedJaxpr, in_tree: Tree, out_tree: Tree, donated: frozenset[int]) -> dict[int, int]:
    """Argument -> the result that takes its place in the next step."""
    arguments = list(map(kind_of, closed.in_avals))
    results = [None if isinstance(atom, Literal) else kind_of(atom.aval) for atom in closed.jaxpr.outvars]
    return carried_results(in_tree.paths, arguments, out_tree.paths, results, donated)


def _results_in_place(
    closed: ClosedJaxpr, types: Types, in_tree: Tree, out_tree: Tree, donated: frozenset[int]
) -> list[int]:
    """Results that take the place of an argument of their type, and so lie as it does."""
    carried = _carried(closed, in_tree, out_tree, donated)
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
    def watched(*args: Box, **kwargs: Box) -> Box:
        opened = tuple(box.opened() for box in args), {name: box.opened() for name, box in kwargs.items()}
        before = jax.tree.leaves(opened)
        args, kwargs = join(static, opened)
        result = Box.of(fn(*args, **kwargs))
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
    if signature is not None:  # errors of JAX name arguments by it
        watched.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` looks for
    return watched
