"""Containers of pytrees apart from their leaves.

Constructors of users' containers may look at what they hold, as labelled arrays do. So a user's container is rebuilt
with tracers and arrays alone, as `jax.jit` rebuilds it. It is rebuilt with anything else only to show it to the user.
If that fails, plain containers take its place.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.tree_util import GetAttrKey, PyTreeDef, keystr, register_pytree_with_keys_class, tree_flatten_with_path

# nnx holds every array in the `value` of a Variable: names of arrays leave this key out.
VALUE_KEYS = (GetAttrKey("value"), GetAttrKey("raw_value"))


@dataclass(frozen=True)
class Tree:
    """A pytree without its leaves: what holds them, and which of a list of leaves goes where."""

    structure: PyTreeDef
    paths: tuple[tuple, ...] = field(compare=False, repr=False)  # of keys, one per leaf
    order: tuple[int, ...] = field(compare=False, repr=False)  # per place, the index of its leaf

    @classmethod
    def of(cls, tree: Any) -> Tree:
        """The tree of a pytree whose leaves are listed as JAX lists them."""
        found, structure = tree_flatten_with_path(tree)
        return cls(structure, tuple(path for path, _ in found), tuple(range(len(found))))

    @classmethod
    def of_indices(cls, tree: Any) -> Tree:
        """The tree of a pytree in which each leaf is its index in the list of leaves."""
        return Tree(**vars(cls.of(tree)) | {"order": tuple(jax.tree.leaves(tree))})

    def children(self) -> list[Tree]:
        """The pytrees right below the topmost container."""
        found, start = [], 0
        for child in self.structure.children():
            end = start + child.num_leaves
            found.append(Tree(child, tuple(path[1:] for path in self.paths[start:end]), self.order[start:end]))
            start = end
        return found

    def filled(self, leaves: Sequence[Any]) -> Any:
        """The pytree with these leaves; what cannot hold them becomes a dict of its keys."""
        return _rebuilt(self.structure, list(zip(self.paths, self.placed(leaves), strict=True)))

    def plain(self, leaves: Sequence[Any]) -> Any:
        """The pytree of these leaves in tuples, lists and dicts alone.

        >>> from jax.sharding import PartitionSpec
        >>> Tree.of((0, {"w": [1, None]})).plain("ab")
        ('a', {'w': ['b', None]})
        """
        return _all_plain(self.structure, list(zip(self.paths, self.placed(leaves), strict=True)))

    def placed(self, leaves: Sequence[Any]) -> list:
        """Leaves as the structure lists them."""
        return [leaves[index] for index in self.order]

    def under(self, prefix: Any, is_entry: Callable[[Any], bool]) -> Iterator[tuple[Any, tuple[int, ...]]]:
        """Every entry of a pytree that is a prefix of this one, and the indices of the leaves below it.

        Raises:
            ValueError: it is no prefix.
        """
        entries, structure = jax.tree.flatten(prefix, is_leaf=is_entry)
        counts = list(_leaf_counts(structure, self.structure))
        start = 0
        for entry, count in zip(entries, counts, strict=True):
            yield entry, self.order[start : start + count]
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
    keys, children, start = [], [], 0
    for child in structure.children():
        inside, start = leaves[start : start + child.num_leaves], start + child.num_leaves
        keys.append(inside[0][0][0] if inside else None)
        children.append(below(child, [(path[1:], leaf) for path, leaf in inside]))
    if kind in (tuple, list):
        return kind(children)
    if kind is dict:
        return dict(zip(data, children, strict=True))
    if len(keys) == 1 and keys[0] in VALUE_KEYS:
        return children[0]
    held = [(key, child) for key, child in zip(keys, children, strict=True) if key is not None]
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


@dataclass(frozen=True)
class _Path:
    """Where a leaf stands in a boxed pytree, as one key."""

    keys: tuple

    def __str__(self) -> str:
        return keystr(self.keys)


@register_pytree_with_keys_class
@dataclass(frozen=True, eq=False)
class Box:
    """A pytree whose containers JAX does not rebuild: it may be filled with anything."""

    tree: Tree
    leaves: Sequence[Any]

    @classmethod
    def of(cls, tree: Any) -> Box:
        return cls(Tree.of(tree), jax.tree.leaves(tree))

    def opened(self) -> Any:
        return jax.tree.unflatten(self.tree.structure, self.leaves)

    def tree_flatten_with_keys(self) -> tuple[list[tuple[_Path, Any]], Tree]:
        return list(zip(map(_Path, self.tree.paths), self.leaves, strict=True)), self.tree

    @classmethod
    def tree_unflatten(cls, tree: Tree, leaves: Sequence[Any]) -> Box:
        return cls(tree, leaves)
