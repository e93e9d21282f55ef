"""nnx modules among the arguments of a step in, flat arrays out; and what the step did to the modules, written back.

A step that is traced gets modules of its own, made of tracers. What it changes in them, or adds, is a result of its
program (`ModuleChanges`), and each call writes these results into the caller's modules, as `nnx.jit` does. This is the
only file that imports flax, and it is imported only where flax.nnx is there already.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import PartitionSpec
from jax.tree_util import DictKey, PyTreeDef, SequenceKey, tree_flatten_with_path, treedef_tuple

from autoshard.errors import ArgumentError
from autoshard.program.signature import Arguments, static_places
from autoshard.program.trees import Box, FlatObject, Tree

_Path = tuple[Any, ...]


def is_module(node: Any) -> bool:
    """Whether nnx follows references to it: a module, an optimizer, a metric, Rngs, a Variable."""
    return nnx.graph.is_graph_node(node)


def _is_item(node: Any) -> bool:
    """Whether a call takes it apart as a whole: a module, or a state, which is a value as under `jax.jit`."""
    return isinstance(node, nnx.State) or is_module(node)


def with_flat_modules(tree: Any) -> Any:
    """A pytree with its modules as the `Tree` of arguments has them."""
    return jax.tree.map(lambda node: _alone(node) if is_module(node) else node, tree, is_leaf=is_module)


class _CachedHash:
    """Something that is hashed once: the hash of a graph takes as long as taking its module apart."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _CachedHash) and self._value == other._value)

    @cached_property
    def _hash(self) -> int:
        return hash(self._value)

    def __hash__(self) -> int:
        return self._hash


@dataclass(frozen=True)
class _GraphRecipe:
    """How a module is made of the values of its variables."""

    graph: nnx.GraphDef
    paths: tuple[_Path, ...] = field(compare=False, repr=False)  # of keys, one per value

    def restored(self, values: Sequence[Any]) -> Any:
        return nnx.unflatten(self.graph, list(values))


@dataclass(frozen=True)
class ModuleChanges:
    """What a traced step did to the modules among its arguments, and what it returned.

    Both are made of the flat arguments of a call, as they were placed, and its flat results after them: its sources.
    """

    graphs: tuple[nnx.GraphDef, ...]  # of the modules among the arguments
    keeps_graphs: bool  # whether these are as they were, and hold arrays in variables alone
    items: tuple[nnx.GraphDef | None, ...]  # of what the step returned; None: it is no module
    result: PyTreeDef  # of these items
    values: PyTreeDef  # of what all graphs hold, and of what all items hold
    order: tuple[int | None, ...]  # per leaf of `values`, which source it is; None: static
    static: tuple[tuple[int, Any], ...]  # per static leaf of `values`, its place and what it is
    takes_static: bool  # whether leaves of the arguments outside of modules are no arrays
    in_place: Mapping[int, int]  # flat argument -> the flat result that replaces it in its module
    untouched: frozenset[int]  # flat arguments that modules hold after the step, too: donated or not, they are kept
    array_paths: tuple[_Path, ...]  # of keys, one per flat result, from the argument or the result on
    shown: Tree  # the step's result, as its author sees it, of the flat results and then the flat arguments

    def unflattened(self, sources: Sequence[Any], variables: Sequence[Any] = (), references: Any = None) -> Any:
        """What the step returned, once its changes are in the caller's modules.

        Args:
            sources: the flat arguments of the call, as they were placed, and its flat results. Of a function that takes
                no modules, its flat results.
            variables: those of the caller's modules.
            references: the caller's module or variable -> its number.
        """
        leaves = [None if source is None else sources[source] for source in self.order]
        for place, value in self.static:
            leaves[place] = value
        inside, returned = jax.tree.unflatten(self.values, leaves)
        ours = nnx.graph.IndexMap.from_refmap(nnx.graph.RefMap() if references is None else references)
        if self.keeps_graphs:
            made = ours
            for variable, value in zip(variables, itertools.chain(*inside), strict=True):
                if _differs(variable.get_raw_value(), value):
                    variable.set_raw_value(value)
        else:
            made = nnx.graph.IndexMap()
            for graph, value in zip(self.graphs, inside, strict=True):
                nnx.unflatten(graph, value, index_ref=made, outer_index_outer_ref=ours)
        items = [
            value if graph is None else nnx.unflatten(graph, value, index_ref=made, outer_index_outer_ref=ours)
            for graph, value in zip(self.items, returned, strict=True)
        ]
        return jax.tree.unflatten(self.result, items)


class ModuleArguments:
    """The arguments of one call, taken apart: their arrays, and the modules to which results are written."""

    @classmethod
    def of(cls, dynamic: Arguments) -> Self | None:
        """None if there are no modules among them."""
        items, tree = jax.tree.flatten(dynamic, is_leaf=_is_item)
        if not any(map(_is_item, items)):
            return None
        with nnx.update_context("autoshard"):  # takes what nnx.cached_partial hands on to the next transformation
            return cls(items, tree)

    def __init__(self, items: list[Any], tree: PyTreeDef) -> None:
        """
        Args:
            items: the leaves of `tree`: modules, states, and leaves outside of both.
        """
        self._items, self._tree = items, tree
        self._references = nnx.graph.RefMap()
        graphs, values = [], []
        self._variables: list[Any] = []  # and arrays that modules hold without one
        for item in self._items:
            graph, inside = None, item
            if is_module(item):
                graph, state = nnx.flatten(item, ref_index=self._references, graph=True)
                inside = list(map(_value, state.leaves))
                self._variables += state.leaves
            graphs.append(graph)
            values.append(inside)
        leaves, structure = jax.tree.flatten(values)
        self._values: PyTreeDef = structure
        self._graphs = tuple(graphs)
        self._static = static_leaves(self._values, leaves)
        self.arrays = without(leaves, self._static)
        # Equal for two calls that differ in the numbers of their arrays alone.
        kinds = tuple(type(leaf) for _, leaf in self._static)
        self.structure: Hashable = _CachedHash((self._tree, self._graphs, self._values, kinds, self._static))

    @property
    def share_arrays(self) -> bool:
        """Whether an array stands in several variables, as in those of a module and its clone."""
        return len(set(map(id, self.arrays))) < len(self.arrays)

    @property
    def inside(self) -> frozenset[int]:
        """Indices of the arrays that modules hold."""
        sizes = (item.num_leaves for item in self._values.children())
        flags = itertools.chain(*([graph is not None] * size for graph, size in zip(self._graphs, sizes, strict=True)))
        return frozenset(i for i, is_inside in enumerate(without(list(flags), self._static)) if is_inside)

    def beside(self, arrays: Sequence[Any]) -> Arguments:
        """The arguments with these arrays outside of modules, and the caller's modules as they are."""
        values = jax.tree.unflatten(self._values, with_static(arrays, self._static, self._values.num_leaves))
        items = zip(self._graphs, self._items, values, strict=True)
        given: Arguments = jax.tree.unflatten(
            self._tree, [value if graph is None else item for graph, item, value in items]
        )
        return given

    def tree(self) -> Tree:
        """The arguments as their author sees them: each module by itself, variables that it shares included."""
        static = {place for place, _ in self._static}
        count = itertools.count()
        numbers = [None if place in static else next(count) for place in range(self._values.num_leaves)]
        return _shown(self._tree, self._items, _FlatModules.of(self._items, nnx.graph.RefMap()).held, [], iter(numbers))

    def specs(self) -> dict[int, PartitionSpec]:
        """Index of an array -> the PartitionSpec in the metadata of its variable, logical names resolved."""
        static = {place for place, _ in self._static}
        found, index, place = {}, 0, 0
        for holder, value in itertools.chain(*_FlatModules.of(self._items, nnx.graph.RefMap()).held):
            spec = _spec_of(holder)
            for _ in jax.tree.leaves(value):
                if place not in static:
                    if spec is not None:
                        found[index] = spec
                    index += 1
                place += 1
        return found

    def boxes(self, tree: Tree, leaves: Sequence[Any] | None = None) -> list[Box]:
        """Per argument its arrays; what several arguments share stands with the first of them.

        Args:
            tree: what `tree` gives.
            leaves: what the boxes hold in the place of the arrays.
        """
        leaves = self.arrays if leaves is None else leaves
        positional, keyword = (side.children() for side in self._tree.children())
        items = iter(self._values.children())
        static = {place for place, _ in self._static}
        boxes, index, place = [], 0, 0
        for argument in (*positional, *keyword):
            start = index
            for value in itertools.islice(items, argument.num_leaves):
                index += sum(at not in static for at in range(place, place + value.num_leaves))
                place += value.num_leaves
            paths = [path[2:] for path in tree.array_paths[start:index]]
            boxes.append(Box.of_list(leaves[start:index], paths))
        return boxes

    def traced(self, leaves: Sequence[Any]) -> TracedModules:
        """The same arguments made of tracers, to call the step with."""
        values = jax.tree.unflatten(self._values, with_static(leaves, self._static, self._values.num_leaves))
        inner = nnx.graph.IndexMap()
        items = [
            value if graph is None else nnx.unflatten(graph, value, index_ref=inner)
            for graph, value in zip(self._graphs, values, strict=True)
        ]
        return TracedModules(self._tree, items, list(leaves), nnx.graph.RefMap.from_indexmap(inner))

    def written(self, changes: ModuleChanges, placed: Sequence[Any], results: Sequence[Any]) -> Any:
        """What the step returned, once its changes are in the caller's modules."""
        return changes.unflattened((*placed, *results), self._variables, self._references)


@dataclass(frozen=True)
class _FlatModules:
    """Modules, and other leaves, as flat lists."""

    graphs: list[Any]  # per item; None: it is no module
    leaves: list[Any]  # of what all items hold, as it was then: a step may change containers in variables
    values: PyTreeDef  # of these leaves
    keys: list[_Path]  # per leaf, the index of its item and the keys from the item on
    held: list[list[tuple[Any, Any]]]  # per item, what holds a value, a variable or the item itself, and the value

    @classmethod
    def of(cls, items: Sequence[Any], references: Any, outer: Any = None) -> _FlatModules:
        """
        Args:
            references: module or variable -> its number; those in `items` are added.
            outer: the same for the caller's, of which the items are made.
        """
        graphs, values, all_held, keys = [], [], [], list[_Path]()
        for number, item in enumerate(items):
            graph: nnx.GraphDef | None = None
            paths: list[_Path] = [()]
            held = [(item, item)]
            if is_module(item):
                graph, state = nnx.flatten(item, ref_index=references, ref_outer_index=outer, graph=True)
                paths, held = list(map(_keys, state.paths)), [(holder, _value(holder)) for holder in state.leaves]
            elif isinstance(item, nnx.State):
                listed, _ = tree_flatten_with_path(item, is_leaf=is_module)
                paths, held = [path for path, _ in listed], [(holder, _value(holder)) for _, holder in listed]
            graphs.append(graph)
            values.append([value for _, value in held] if is_module(item) else item)
            for path, (_, value) in zip(paths, held, strict=True):
                keys.extend((number, *path, *below) for below, _ in tree_flatten_with_path(value)[0])
            all_held.append(held)
        leaves, structure = jax.tree.flatten(values)
        return cls(graphs, leaves, structure, keys, all_held)

    def is_like(self, other: _FlatModules) -> bool:
        """Whether both hold the same, in the same variables and in nothing else."""
        in_variables = all(isinstance(holder, nnx.Variable) for held in other.held for holder, _ in held)
        return self.graphs == other.graphs and self.values == other.values and in_variables


class TracedModules:
    """A step's arguments made of tracers, while it is traced."""

    def __init__(self, tree: PyTreeDef, items: list[Any], tracers: list[Any], outer: Any) -> None:
        """
        Args:
            items: the leaves of `tree`: modules and tracers.
            tracers: the flat arguments.
            outer: module or variable -> its number among the caller's.
        """
        self.arguments: Arguments = jax.tree.unflatten(tree, items)
        self._tree, self._items, self._tracers, self._outer = tree, items, tracers, outer
        listed, _ = tree_flatten_with_path(self.arguments, is_leaf=_is_item)
        self._modules = [item for _, item in listed if is_module(item)]
        self._places = [path[1:] for path, item in listed if is_module(item)]
        self._before = _FlatModules.of(self._modules, nnx.graph.RefMap(), outer)

    def replaced(self) -> list[tuple[_Path, Any]]:
        """Arrays that the step has put into containers of its own, outside of modules, with their key paths."""
        after, _ = tree_flatten_with_path(self.arguments, is_leaf=_is_item)
        pairs = zip(after, self._items, strict=False)
        return [(path, leaf) for (path, leaf), old in pairs if leaf is not old and not is_module(leaf)]

    def returned(self, result: Any) -> tuple[list[Any], ModuleChanges]:
        """The flat results of the program, and what is made of them."""
        references = nnx.graph.RefMap()
        modules = _FlatModules.of(self._modules, references, self._outer)
        listed, structure = tree_flatten_with_path(result, is_leaf=is_module)
        items = _FlatModules.of([item for _, item in listed], references, self._outer)
        leaves = [*modules.leaves, *items.leaves]
        values = treedef_tuple((modules.values, items.values))
        static = static_leaves(values, leaves)
        skipped = {place for place, _ in static}
        beside = [item for item in self._items if not is_module(item)]
        arguments = {id(tracer): i for i, tracer in enumerate(self._tracers)}
        before = dict(zip(self._before.keys, self._before.leaves, strict=True))
        paths = [(*self._places[number], *keys) for number, *keys in modules.keys]
        paths += [(*listed[number][0], *keys) for number, *keys in items.keys]

        results: list[Any] = []
        array_paths: list[_Path] = []
        in_place: dict[int, int] = {}
        untouched: set[int] = set()
        order: list[int | None] = []
        for place, (leaf, path) in enumerate(zip(leaves, paths, strict=True)):
            if place in skipped:
                order.append(None)
                continue
            is_changed = place >= len(modules.keys)
            if not is_changed:
                old = before.get(modules.keys[place])
                argument = arguments.get(id(old))
                is_changed = leaf is not old or argument is None
                if argument is not None:
                    if is_changed:
                        in_place[argument] = len(results)
                    else:
                        untouched.add(argument)
                        order.append(argument)
            if is_changed:
                order.append(len(self._tracers) + len(results))
                results.append(leaf)
                array_paths.append(path)
        return results, ModuleChanges(
            graphs=tuple(modules.graphs),
            keeps_graphs=self._before.is_like(modules),
            items=tuple(items.graphs),
            result=structure,
            values=values,
            order=tuple(order),
            static=static,
            takes_static=any(id(leaf) not in arguments for leaf in jax.tree.leaves(beside)),
            in_place=in_place,
            untouched=frozenset(untouched),
            array_paths=tuple(array_paths),
            shown=_shown(
                structure,
                [item for _, item in listed],
                items.held,
                modules.held,
                _results_first(order, len(self._tracers), len(results)),
            ),
        )


def returned_modules(
    result: Any, arguments: Any = (), tracers: Sequence[Any] = ()
) -> tuple[list[Any], ModuleChanges] | None:
    """The flat results of a function that takes no modules, and what is made of them; None if it returns none.

    Args:
        result: what the function returned.
        arguments: what it was called with.
        tracers: the flat arguments.
    """
    if not any(map(is_module, jax.tree.leaves(result, is_leaf=is_module))):
        return None
    items, tree = jax.tree.flatten(arguments)
    return TracedModules(tree, items, list(tracers), nnx.graph.RefMap()).returned(result)


def _results_first(order: Sequence[int | None], arguments: int, results: int) -> Iterator[int | None]:
    """Sources by their place among the results and then the arguments."""
    for source in order:
        yield None if source is None else source - arguments if source >= arguments else source + results


def _shown(
    tree: PyTreeDef,
    items: Sequence[Any],
    held: Sequence[Sequence[tuple[Any, Any]]],
    held_elsewhere: Sequence[Sequence[tuple[Any, Any]]],
    numbers: Iterator[int | None],
) -> Tree:
    """A pytree with these items, as its author sees it.

    Args:
        held: per item, what holds values, and these, as `_FlatModules` has them.
        held_elsewhere: the same of other modules, with which the items may share variables.
        numbers: per leaf of the values elsewhere, and then of those of the items, which array it is.
    """

    def indices_of(value: Any) -> Any:
        structure: PyTreeDef = jax.tree.structure(value)
        return jax.tree.unflatten(structure, list(itertools.islice(numbers, structure.num_leaves)))

    def with_indices(one: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
        return [(holder, indices_of(value)) for holder, value in one]

    elsewhere, of_items = list(map(with_indices, held_elsewhere)), list(map(with_indices, held))
    # A state may hold variables of modules with other arrays.
    of_modules = [one for item, one in zip(items, of_items, strict=True) if not isinstance(item, nnx.State)]
    known: dict[int, list[Any]] = {}
    for holder, indices in itertools.chain(*elsewhere, *of_modules):
        known.setdefault(id(holder), []).append(indices)

    def indices_in(holder: Any) -> Any:
        visits = known[id(holder)]  # a variable is visited once, an array as often as modules hold it
        return visits.pop(0) if len(visits) > 1 else visits[0]

    def of_item(item: Any, one: Sequence[tuple[Any, Any]]) -> Any:
        if isinstance(item, nnx.State):
            inside = (indices for _, indices in one)
            return jax.tree.map(
                lambda node: _alone(node, lambda _: next(inside)) if is_module(node) else next(inside),
                item,
                is_leaf=is_module,
            )
        return _alone(item, indices_in) if is_module(item) else indices_in(item)

    return Tree.of_indices(jax.tree.unflatten(tree, map(of_item, items, of_items)))


def static_leaves(structure: PyTreeDef, leaves: Sequence[Any]) -> tuple[tuple[int, Any], ...]:
    """Place and value of every leaf that is no array."""
    return tuple((place, leaves[place]) for place in static_places(structure, leaves))


def without(leaves: list[Any], static: tuple[tuple[int, Any], ...]) -> list[Any]:
    skipped = {place for place, _ in static}
    return [leaf for place, leaf in enumerate(leaves) if place not in skipped] if static else leaves


def with_static(arrays: Sequence[Any], static: tuple[tuple[int, Any], ...], count: int) -> list[Any]:
    """The way back from `without`."""
    known, left = dict(static), iter(arrays)
    return [known[place] if place in known else next(left) for place in range(count)]


def _value(holder: Any) -> Any:
    """What a variable holds; an array that a module holds without one is itself."""
    return holder.get_raw_value() if isinstance(holder, nnx.Variable) else holder


def _differs(old: Any, new: Any) -> bool:
    return any(a is not b for a, b in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True))


def _spec_of(holder: Any) -> PartitionSpec | None:
    """What a variable wishes for; None if it has no wish."""
    if not isinstance(holder, nnx.Variable):
        return None
    if getattr(holder, "hijax", False):
        raise ArgumentError(
            "a module among the arguments has variables with hijax=True: what a step writes into them is no result of "
            "the step. Pass nnx.with_vars(module, hijax=False)."
        )
    spec = nnx.get_partition_spec(holder).get_raw_value()
    return spec if isinstance(spec, PartitionSpec) and len(spec) else None


def _keys(path: tuple[Any, ...]) -> _Path:
    return tuple(SequenceKey(key) if isinstance(key, int) else DictKey(key) for key in path)


def _alone(module: Any, value_of: Callable[[Any], Any] = _value) -> FlatObject:
    """A module by itself, whose variables hold what `value_of` says of them."""
    graph, state = nnx.flatten(module, graph=True)
    return FlatObject(_GraphRecipe(graph, tuple(map(_keys, state.paths))), list(map(value_of, state.leaves)))
