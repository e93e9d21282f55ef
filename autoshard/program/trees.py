"""Containers of pytrees apart from their leaves.

Constructors of users' containers may look at what they hold, as labelled arrays do. So a user's container is rebuilt
with tracers and arrays alone, as `jax.jit` rebuilds it. It is rebuilt with anything else only to show it to the user.
If that fails, plain containers take its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import jax
from jax.tree_util import GetAttrKey, PyTreeDef, keystr, register_pytree_with_keys_class, tree_flatten_with_path

from autoshard.program.signature import static_places

# nnx holds every array in the `value` of a Variable: names of arrays leave this key out.
VALUE_NAMES = frozenset({"value", "raw_value"})


def is_value_key(key: Any) -> bool:
    """Whether a key is one behind which a Variable holds its array. Keys are whatever a class of the user's lists."""
    return isinstance(key, GetAttrKey) and key.name in VALUE_NAMES


@dataclass(frozen=True)
class Tree:
    """A pytree without its arrays: what holds them, which of a list of arrays goes where, and its static leaves.

    An array may stand in several places, as a variable does that two modules share.
    """

    structure: PyTreeDef
    paths: tuple[tuple, ...] = field(compare=False, repr=False)  # of keys, one per place
    order: tuple[int | None, ...] = field(compare=False, repr=False)  # per place, the index of its array; None: static
    static: tuple[tuple[int, type, Any], ...] = ()  # place, type and value of every leaf that is no array

    @classmethod
    def of(cls, tree: Any) -> Tree:
        """The tree of a pytree whose arrays are listed as JAX lists them."""
        found, structure = tree_flatten_with_path(tree)
        leaves = [leaf for _, leaf in found]
        static = {place: leaves[place] for place in static_places(structure, leaves)}
        order, arrays = [], 0
        for place in range(len(found)):
            order.append(None if place in static else arrays)
            arrays += place not in static
        paths = tuple(_single_keys(path) for path, _ in found)
        return cls(structure, paths, tuple(order), tuple((i, type(leaf), leaf) for i, leaf in static.items()))

    @classmethod
    def of_indices(cls, tree: Any) -> Tree:
        """The tree of a pytree in which each leaf is its index in the list of arrays, or None where it is static."""
        found, structure = tree_flatten_with_path(tree, is_leaf=lambda node: node is None)
        return cls(structure, tuple(_single_keys(path) for path, _ in found), tuple(index for _, index in found))

    @cached_property
    def array_paths(self) -> tuple[tuple, ...]:
        """Of keys, one per array: the first place in which it stands."""
        first: dict[int, tuple] = {}
        for path, index in zip(self.paths, self.order, strict=True):
            if index is not None:
                first.setdefault(index, path)
        return tuple(first[index] for index in sorted(first))

    def children(self) -> list[Tree]:
        """The pytrees right below the topmost container."""
        found, start = [], 0
        for child in self.structure.children():
            end = start + child.num_leaves
            paths = tuple(path[1:] for path in self.paths[start:end])
            static = tuple((place - start, *rest) for place, *rest in self.static if start <= place < end)
            found.append(Tree(child, paths, self.order[start:end], static))
            start = end
        return found

    def unflattened(self, arrays: Sequence[Any]) -> Any:
        """The pytree with these arrays, and its static leaves as they were."""
        leaves = self.placed(arrays) if self.static else arrays
        for place, _, value in self.static:
            leaves[place] = value  # type: ignore[index]  # a list: `placed` made it
        return jax.tree.unflatten(self.structure, leaves)

    def filled(self, leaves: Sequence[Any]) -> Any:
        """The pytree with these leaves, and None for static ones; what cannot hold them becomes a dict of its keys."""
        return _restored(_rebuilt(self.structure, list(zip(self.paths, self.placed(leaves), strict=True))))

    def plain(self, leaves: Sequence[Any]) -> Any:
        """The pytree of these leaves in tuples, lists and dicts alone.

        >>> from jax.sharding import PartitionSpec
        >>> Tree.of((0, {"w": [1, None]})).plain("ab")
        ('a', {'w': ['b', None]})
        """
        return _all_plain(self.structure, list(zip(self.paths, self.placed(leaves), strict=True)))

    def placed(self, leaves: Sequence[Any]) -> list:
        """Leaves as the structure lists them, with None in the place of static ones."""
        return [None if index is None else leaves[index] for index in self.order]

    def indices(self) -> list[int | None]:
        """Per leaf that JAX finds in the user's pytree, which array it is; None for a static leaf."""
        if not holds_flat_objects(self.structure):
            return list(self.order)
        return jax.tree.leaves(self.filled(range(1 + max(index for index in self.order if index is not None))))

    def under(self, prefix: Any, is_entry: Callable[[Any], bool]) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Every entry of a pytree that is a prefix of this one, and the indices of the leaves below it.

        Raises:
            ValueError: it is no prefix.
        """
        entries, structure = jax.tree.flatten(prefix, is_leaf=is_entry)
        counts = list(_leaf_counts(structure, self.structure))
        start = 0
        for entry, count in zip(entries, counts, strict=True):
            yield entry, tuple(index for index in self.order[start : start + count] if index is not None)
            start += count


def _leaf_counts(prefix: PyTreeDef, structure: PyTreeDef) -> Iterator[int]:
    """How many leaves of a structure stand below each leaf of its prefix."""
    if prefix.node_data() is None:
        yield structure.num_leaves
        return
    ours, theirs = structure.children(), prefix.children()
    if prefix.node_data() != structure.node_data() or len(ours) != len(theirs):
        raise ValueError(f"{prefix} stands where {structure} is wanted")
    for below, child in zip(theirs, ours, strict=True):
        yield from _leaf_counts(below, child)


def _rebuilt(structure: PyTreeDef, leaves: list[tuple[tuple, Any]]) -> Any:
    """`leaves` holds (path from this node on, leaf)."""
    try:
        return jax.tree.unflatten(structure, [leaf for _, leaf in leaves])
    except Exception:  # whatever a constructor of the user's raises
        return _plain(structure, leaves, _rebuilt)


def _all_plain(structure: PyTreeDef, leaves: list[tuple[tuple, Any]]) -> Any:
    return _plain(structure, leaves, _all_plain)


def _plain(structure: PyTreeDef, leaves: list[tuple[tuple, Any]], below: Callable[[PyTreeDef, list], Any]) -> Any:
    """A node as a tuple, list or dict of what `below` makes of its children; custom nodes become dicts."""
    if (node := structure.node_data()) is None:
        return leaves[0][1]
    kind, data = node
    if kind is type(None):
        return None
    if kind is FlatObject:
        return _nested(data, structure, [leaf for _, leaf in leaves], below)
    children, held, start = [], [], 0
    for child in structure.children():
        inside, start = leaves[start : start + child.num_leaves], start + child.num_leaves
        children.append(below(child, [(path[1:], leaf) for path, leaf in inside]))
        held += [(path[0], children[-1]) for path, _ in inside[:1]]
    if kind in (tuple, list):
        return kind(children)
    if kind is dict:
        return dict(zip(data, children, strict=True))
    if len(children) == 1 and held and is_value_key(held[0][0]):
        return children[0]
    names = distinct(keystr((key,), simple=True) for key, _ in held)
    return dict(sorted(zip(names, (child for _, child in held), strict=True), key=lambda item: item[0]))


def distinct(texts: Iterable[str]) -> list[str]:
    """Texts of keys that differ, though they may be written alike.

    >>> distinct(["1", "w", "1"])
    ['1', 'w', '1#1']
    """
    found: dict[str, None] = {}
    for text in texts:
        numbered = (f"{text}#{i}" for i in itertools.count(1))
        found[text if text not in found else next(one for one in numbered if one not in found)] = None
    return list(found)


def _nested(recipe: Recipe, structure: PyTreeDef, leaves: list[Any], below: Callable[[PyTreeDef, list], Any]) -> Any:
    """What a FlatObject holds, in dicts of its keys."""
    top: dict[str, Any] = {}
    for path, child in zip(recipe.paths, structure.children(), strict=True):
        inside, leaves = leaves[: child.num_leaves], leaves[child.num_leaves :]
        paths = [path for path, _ in tree_flatten_with_path(jax.tree.unflatten(child, range(len(inside))))[0]]
        value = below(child, list(zip(paths, inside, strict=True)))
        if not path:
            return value
        held = top
        for key in path[:-1]:
            held = held.setdefault(keystr((key,), simple=True), {})
        held[keystr(path[-1:], simple=True)] = value
    return top


@dataclass(frozen=True)
class _Path:
    """Where a leaf stands below a container, as one key."""

    keys: tuple

    def __str__(self) -> str:
        return keystr(self.keys)


def _single_keys(path: tuple) -> tuple:
    """A key path in which every key stands for one step."""
    if not any(isinstance(key, _Path) for key in path):
        return path
    return tuple(part for key in path for part in (key.keys if isinstance(key, _Path) else (key,)))


class Recipe(Protocol):
    """How an object is made of its values; two that are equal make equal objects."""

    @property
    def paths(self) -> tuple[tuple, ...]:
        """Of keys, one per value."""

    def restored(self, values: Sequence[Any]) -> Any: ...


@register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class FlatObject:
    """An object that is no tree, as an nnx module: its values in one list, with the paths that its author sees."""

    recipe: Recipe
    values: Sequence[Any]

    def tree_flatten_with_keys(self) -> tuple[list[tuple[_Path, Any]], Recipe]:
        return list(zip(map(_Path, self.recipe.paths), self.values, strict=True)), self.recipe

    @classmethod
    def tree_unflatten(cls, recipe: Recipe, values: Sequence[Any]) -> FlatObject:
        return cls(recipe, values)


def holds_flat_objects(structure: PyTreeDef) -> bool:
    """Whether some node of a pytree is a FlatObject."""
    node = structure.node_data()
    return node is not None and (node[0] is FlatObject or any(map(holds_flat_objects, structure.children())))


def _restored(tree: Any) -> Any:
    """A pytree with the objects that its FlatObjects stand for."""
    found, structure = jax.tree.flatten(tree, is_leaf=lambda node: isinstance(node, FlatObject))
    if not any(isinstance(node, FlatObject) for node in found):
        return tree
    made = [node.recipe.restored(node.values) if isinstance(node, FlatObject) else node for node in found]
    return jax.tree.unflatten(structure, made)


@register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Box:
    """A pytree whose containers JAX does not rebuild: it may be filled with anything."""

    tree: Tree
    leaves: Sequence[Any]

    @classmethod
    def of(cls, tree: Any) -> Box:
        made, leaves = Tree.of(tree), jax.tree.leaves(tree)
        return cls(made, [leaf for leaf, index in zip(leaves, made.order, strict=True) if index is not None])

    @classmethod
    def of_list(cls, leaves: Sequence[Any], paths: Sequence[tuple]) -> Box:
        """A list whose items are called by paths."""
        return cls(Tree(jax.tree.structure([0] * len(leaves)), tuple(paths), tuple(range(len(leaves)))), leaves)

    @classmethod
    def of_children(cls, tree: Tree, leaves: Sequence[Any]) -> list[Box]:
        """Per pytree right below the topmost container of `tree`, which holds every array once."""
        boxes, start = [], 0
        for child in tree.children():
            count = sum(index is not None for index in child.order)
            numbers = iter(range(count))
            order = tuple(None if index is None else next(numbers) for index in child.order)
            boxes.append(cls(Tree(child.structure, child.paths, order, child.static), leaves[start : start + count]))
            start += count
        return boxes

    def opened(self) -> Any:
        return self.tree.unflattened(self.leaves)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[_Path, Any]], Tree]:
        return list(zip(map(_Path, self.tree.array_paths), self.leaves, strict=True)), self.tree

    @classmethod
    def tree_unflatten(cls, tree: Tree, leaves: Sequence[Any]) -> Box:
        return cls(tree, leaves)
