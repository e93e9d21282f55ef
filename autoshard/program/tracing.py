"""Functions and abstract arguments in, a `Program` out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
from jax.tree_util import tree_flatten_with_path

from autoshard.errors import warn
from autoshard.jaxprs import ClosedJaxpr, JaxprEqn, Literal
from autoshard.program.captured import CapturedArray, identity_of, with_captured
from autoshard.program.closures import names_in_closure
from autoshard.program.explicit import ExplicitTypes, on_auto_axes, types_of
from autoshard.program.flattening import flat_results, module_arguments
from autoshard.program.flax_shardings import wishes_of
from autoshard.program.paths import Places, carried_results, slashed
from autoshard.program.program import Program
from autoshard.program.reader import JaxprReader, kind_of
from autoshard.program.signature import Arguments, ArgumentSelection, join, signature_without
from autoshard.program.trees import Box, Tree
from autoshard.program.trip_counts import check_places
from autoshard.program.user_code import named_change_outside

if TYPE_CHECKING:
    from autoshard.program.modules import ModuleArguments, ModuleChanges


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A step that has been traced, and can be traced again for other shapes."""

    closed: ClosedJaxpr
    paths: Sequence[tuple]  # of keys, one per flat argument: positional or keyword, which one, and below
    carried: Mapping[int, int]  # argument -> the result that takes its place
    is_explicit: bool  # whether types of explicit mode say how arrays lie
    again: Callable[[Sequence[Any]], ClosedJaxpr]  # flat ShapeDtypeStructs -> the step traced for these
    read: Callable[[ClosedJaxpr], Program]  # a jaxpr from the same arguments to the same results -> its Program
    has_own_statistics: bool = False  # whether each microbatch may take sums over rows that it needs of its own

    def program(self) -> Program:
        """The step as it was traced."""
        return self.read(self.closed)


def trace(fn: Callable, args: tuple, kwargs: Mapping[str, Any], **how: Any) -> Program:
    """The Program of `fn` on arrays or ShapeDtypeStructs; `traced_step` says what else it takes."""
    return traced_step(fn, args, kwargs, **how).program()


def traced_step(
    fn: Callable,
    args: tuple,
    kwargs: Mapping[str, Any],
    *,
    leaves: Sequence[Any] | None = None,
    obey: bool = True,
    merges: bool = True,
    has_rule: Callable[[JaxprEqn], bool] = lambda eqn: True,
    trips: Mapping[str, int] | None = None,
    **jit_keywords: Any,
) -> TracedStep:
    """The trace of `fn` on arrays or ShapeDtypeStructs.

    Args:
        fn: any function that `jax.jit` takes.
        args: its positional arguments; arrays are only looked at for shape and dtype.
        kwargs: its keyword arguments.
        leaves: what to trace with in the place of the arrays in `args` and `kwargs`.
        obey: whether what is said of layouts is kept: constraints, types of explicit mode, metadata of flax.
        merges: whether equations that compute the same become one, as XLA makes them one.
        has_rule: whether an equation is known as it stands; any other is opened, if JAX can trace what it computes.
        trips: line, function or glob of a loop of unknown length -> how often it turns.
        **jit_keywords: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames` as for `jax.jit`.

    Warns:
        UserWarning: `fn` changes an argument in place, no nnx module, and does not return what it changed.

    Raises:
        ArgumentError: `fn` changes an nnx module that is no argument.
    """
    jax.jit(fn, **jit_keywords)  # checks the keywords
    chosen = ArgumentSelection.of(fn, jit_keywords, "static")
    static, dynamic = chosen.split(args, dict(kwargs))
    donating = ArgumentSelection.of(fn, jit_keywords, "donate")
    positions = [i for i in range(len(args)) if i not in chosen]
    given = [(i in donating, arg) for i, arg in zip(positions, dynamic[0], strict=True)]
    given += [(name in donating, dynamic[1][name]) for name in sorted(dynamic[1])]
    modules = module_arguments(dynamic)
    in_tree = Tree.of(dynamic) if modules is None else modules.tree()
    recorded: list[ModuleChanges] = []
    called = _watched(fn, static, recorded) if modules is None else _recording(fn, static, modules, recorded)
    names, count = sorted(dynamic[1]), len(positions)

    def boxes_of(leaves: Sequence[Any] | None) -> list[Box]:
        return _boxes(dynamic, in_tree, leaves) if modules is None else modules.boxes(in_tree, leaves)

    def traced(boxed: Sequence[Box]) -> tuple[ClosedJaxpr, Any]:
        by_name = dict(zip(names, boxed[count:], strict=True))
        try:
            made: tuple[ClosedJaxpr, Any] = jax.make_jaxpr(called, return_shape=True)(*boxed[:count], **by_name)
        except Exception as error:
            if (refused := named_change_outside(fn, error)) is None:
                raise
            raise refused from error
        return made

    boxed = boxes_of(leaves)
    flags = [is_donated for (is_donated, _), box in zip(given, boxed, strict=True) for _ in box.leaves]
    closed, result = traced(boxed)
    places = Places(in_tree.array_paths, result.tree.array_paths, frozenset(i for i, flag in enumerate(flags) if flag))
    out_tree, changes = result.tree, recorded[-1] if recorded else None
    if changes is not None:
        out_tree = changes.shown
        places = replace(places, donated=places.donated - changes.untouched, in_place=changes.in_place)
    types = types_of(closed, jax.sharding.get_abstract_mesh(), obey=obey)
    settled = _results_in_place(closed, types, places) if types else ()
    untyped = on_auto_axes(closed, types, obey=obey, settled=settled)

    def again(structs: Sequence[Any]) -> ClosedJaxpr:
        others, _ = traced(boxes_of(list(structs)))
        return on_auto_axes(others, None, obey=obey)

    def read(rewritten: ClosedJaxpr) -> Program:
        taking, captured = with_captured(rewritten)
        known = types
        if captured and known is not None:
            known = replace(known, arguments=(*known.arguments, *[None] * len(captured)))
        named = list(zip(captured, _names(fn, captured, closed, untyped), strict=True))
        reader = JaxprReader(taking, named, merges=merges, has_rule=has_rule, trips=trips)
        program = reader.program(in_tree, out_tree, places)
        check_places(trips or {}, program.loops)
        wishes = wishes_of(dynamic, in_tree, modules) if obey else {}
        return replace(program, types=known, changes=changes, wishes=wishes, static=chosen.named(fn, args, kwargs))

    return TracedStep(untyped, in_tree.array_paths, _carried(closed, places), types is not None, again, read)


def _boxes(dynamic: Arguments, in_tree: Tree, leaves: Sequence[Any] | None) -> list[Box]:
    """Per argument its arrays, or what of `leaves` stands for them."""
    arrays = Box.of(dynamic).leaves if leaves is None else leaves
    return [box for side in Box.of_children(in_tree, arrays) for box in Box.of_children(side.tree, side.leaves)]


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


def _carried(closed: ClosedJaxpr, places: Places) -> dict[int, int]:
    """Argument -> the result that takes its place in the next step."""
    arguments = list(map(kind_of, closed.in_avals))
    results = [None if isinstance(atom, Literal) else kind_of(atom.aval) for atom in closed.jaxpr.outvars]
    return carried_results(places, arguments, results)


def _results_in_place(closed: ClosedJaxpr, types: ExplicitTypes, places: Places) -> list[int]:
    """Results that take the place of an argument of their type, and so lie as it does."""
    carried = _carried(closed, places)
    return [result for argument, result in carried.items() if types.arguments[argument] == types.results[result]]


_witness = jax.jit(lambda: ())


def context() -> Any:
    """The same object for as long as what `jax.jit` has traced is traced no other way.

    JAX has no list of what makes it trace anew: x64, the precision of products, a mesh that is set, and so on. So this
    is a trace that it keeps.
    """
    return _witness.trace().jaxpr


def _watched(fn: Callable, static: tuple, recorded: list[ModuleChanges]) -> Callable:
    """`fn` of and to boxed pytrees, static arguments given; if it returns modules, what is made of them is `recorded`.

    Warns if it changes an argument in place and the change gets lost, as `jax.jit` loses it.
    """

    @functools.wraps(fn)
    def watched(*args: Box, **kwargs: Box) -> Box:
        opened = tuple(box.opened() for box in args), {name: box.opened() for name, box in kwargs.items()}
        before = jax.tree.leaves(opened)
        tracers = [leaf for box in (*args, *kwargs.values()) for leaf in box.leaves]
        args, kwargs = join(static, opened)
        made = fn(*args, **kwargs)
        arrays, rebuilder = flat_results(made, opened, tracers)
        if isinstance(rebuilder, Tree):
            result = Box(rebuilder, arrays)
        else:
            result = Box.of_list(arrays, rebuilder.array_paths)
            recorded.append(rebuilder)
        after, _ = tree_flatten_with_path(opened)
        returned = set(map(id, result.leaves))
        changed = [
            path
            for (path, leaf), old in zip(after, before, strict=False)
            if leaf is not old and id(leaf) not in returned
        ]
        _warn_of_lost(fn, changed)
        return result

    return _with_signature(watched, fn, static)


def _recording(
    fn: Callable, static: tuple, modules: ModuleArguments, recorded: list[ModuleChanges]
) -> Callable[..., Box]:
    """`fn` of and to boxed lists, for arguments with modules; what it does to these is added to `recorded`."""

    @functools.wraps(fn)
    def recording(*args: Box, **kwargs: Box) -> Box:
        boxes = (*args, *(kwargs[name] for name in sorted(kwargs)))
        traced = modules.traced([leaf for box in boxes for leaf in box.leaves])
        positional, keyword = join(static, traced.arguments)
        results, changes = traced.returned(fn(*positional, **keyword))
        _warn_of_lost(fn, [path for path, leaf in traced.replaced() if not any(leaf is one for one in results)])
        recorded.append(changes)
        return Box.of_list(results, changes.array_paths)

    return _with_signature(recording, fn, static)


def _warn_of_lost(fn: Callable, changed: Sequence[tuple]) -> None:
    """Warns if there are arrays, by their paths, that `fn` replaced in containers of its own."""
    if changed:
        name = getattr(fn, "__name__", "the step")
        warn(
            f"{name} changes {len(changed)} arrays of its arguments in place and does not return them, "
            f"{slashed(changed[0][2:])!r} for one: the changes are lost, as under jax.jit.\n"
            f"Return what it changes, as in `return (model, optimizer), loss`, and go on with what comes back."
        )


def _with_signature(traced: Callable, fn: Callable, static: tuple) -> Callable:
    """`traced` with the signature that `fn` has without its static arguments: errors of JAX name arguments by it."""
    signature = signature_without(fn, [place for place, _ in static])
    if signature is not None:
        traced.__signature__ = signature  # type: ignore[attr-defined]  # what `inspect` looks for
    return traced
