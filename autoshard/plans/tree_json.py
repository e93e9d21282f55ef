"""Pytrees of numbers in plain containers to JSON, and back.

A key of a dict is written as it is if JSON has its type, else as an object: ``{"tuple": [0, "w"]}``, ``{"bytes":
"6b65"}``. A key of a class that a file cannot name is written as its text, and so are all other keys of its dict, since
JAX sorts them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Collection
from typing import Any

from autoshard.plans.nodes import Node
from autoshard.program.paths import printable
from autoshard.program.trees import Tree, distinct

_JSON_SCALARS = (str, int, float, bool, type(None))
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")  # of an object, which differs from process to process


def tree_to_json(tree: Any) -> Any:
    """A tree of numbers in tuples, lists and dicts.

    >>> tree_to_json((0, {"w": [1, None], (2, b"k"): 3}))
    {'tuple': [0, {'dict': [['w', {'list': [1, None]}], [{'tuple': [2, {'bytes': '6b'}]}, 3]]}]}
    """
    if isinstance(tree, dict):
        return {"dict": [[key, tree_to_json(child)] for key, child in _items(tree)]}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: list(map(tree_to_json, tree))}
    return tree


def tree_from_json(node: Node, leaves: int, elsewhere: Collection[int] = (), others: int = 0) -> Tree:
    """What `tree_to_json` made of a tree of so many arrays.

    Args:
        elsewhere: which of them it does not hold.
        others: how many arrays, numbered after these, it may hold beside them.

    Raises:
        ValueError: it is no such tree.
    """
    tree = Tree.of_indices(_tree(node))
    held = {index for index in tree.order if index is not None}
    if held - set(range(leaves, leaves + others)) != set(range(leaves)) - set(elsewhere):
        raise ValueError(f"{node.path} does not hold each of {leaves} arrays")
    return tree


def _items(tree: dict) -> list[tuple[Any, Any]]:
    """The keys of a dict as JSON, all different and in the order of the keys that are read, and what stands there."""
    if all(map(_is_plain, tree)):
        return [(_key(key), child) for key, child in tree.items()]
    texts = distinct(printable(_ADDRESS.sub("", str(key))) for key in tree)
    return sorted(zip(texts, tree.values(), strict=True), key=operator.itemgetter(0))


def _is_plain(key: Any) -> bool:
    return type(key) in _JSON_SCALARS or type(key) is bytes or (type(key) is tuple and all(map(_is_plain, key)))


def _key(key: Any) -> Any:
    if type(key) is bytes:
        return {"bytes": key.hex()}
    return {"tuple": list(map(_key, key))} if type(key) is tuple else key


def _tree(node: Node) -> Any:
    if node.value is None:
        return None
    if type(node.value) is int:
        return node.count()
    ((kind, below),) = _only_field(node)
    if kind in ("tuple", "list"):
        return {"tuple": tuple, "list": list}[kind](map(_tree, below.parts()))
    if kind != "dict":
        raise node.wrong("a tuple, list, dict, null or the number of an array")
    pairs = [pair.parts(2) for pair in below.parts()]
    found = {_key_of(key): _tree(child) for key, child in pairs}
    if len(found) < len(pairs):
        raise below.wrong("a dict whose keys differ")
    return found


def _key_of(node: Node) -> Any:
    if type(node.value) in _JSON_SCALARS:
        return node.value
    ((kind, below),) = _only_field(node)
    if kind == "tuple":
        return tuple(map(_key_of, below.parts()))
    if kind == "bytes":
        return bytes.fromhex(below.name())
    raise node.wrong("the key of a dict")


def _only_field(node: Node) -> list[tuple[str, Node]]:
    if not isinstance(node.value, dict) or len(node.value) != 1:
        raise node.wrong("a container or the number of an array")
    return list(node.entries())
