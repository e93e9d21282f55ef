"""Arrays of a pytree by their paths in, the parts of a plan's arguments that hold the same arrays out.

A part is found by structure: the keys below it, and the shape and dtype of each array, are those of the pytree. Kinds
of containers do not count, so that a plan of a file, whose containers are dicts, finds the same parts.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.tree_util import keystr

from autoshard.plans.plan import PlanData
from autoshard.program.paths import printable
from autoshard.program.trees import Tree, is_value_key

Keys = tuple[str, ...]  # from the outside in


@dataclass(frozen=True)
class Leaf:
    """One array of a pytree: where it stands, and its type."""

    keys: Keys
    shape: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{'/'.join(self.keys) or 'the array'} {self.dtype}{list(self.shape)}"

    def is_like(self, other: Leaf) -> bool:
        """Whether both are of one type."""
        return self.shape == other.shape and self.dtype == other.dtype


@dataclass(frozen=True)
class ArgumentPart:
    """A part of some arguments that holds what a pytree holds."""

    keys: Keys  # of the part; () is all arguments
    leaves: tuple[int, ...]  # per array of the pytree, the index of the argument array that it is
    is_all: bool  # whether the part holds nothing else

    @property
    def name(self) -> str:
        """As users read it."""
        return "/".join(self.keys) or "the arguments"

    @property
    def is_argument(self) -> bool:
        """Whether it is one whole argument."""
        return self.is_all and len(self.keys) == 1


def keys_of(path: Sequence[Any]) -> Keys:
    """The keys of a path as text. The one behind which an nnx variable holds its array is left out.

    >>> import jax
    >>> keys_of((jax.tree_util.GetAttrKey("mu"), jax.tree_util.SequenceKey(0), jax.tree_util.DictKey("w")))
    ('mu', '0', 'w')
    """
    path = path[:-1] if path and is_value_key(path[-1]) else path
    return tuple(printable(keystr((key,), simple=True)) for key in path)


def argument_leaves(plan: PlanData) -> list[Leaf]:
    """One leaf per argument array of a plan; the first key is the parameter's name."""
    return named_leaves(plan.argument_tree, [(x.name, x.shape, x.dtype) for x in plan.arguments])


def named_leaves(tree: Tree, arrays: Sequence[tuple[str, tuple[int, ...], str]]) -> list[Leaf]:
    """One leaf per argument array.

    Args:
        tree: of (args, kwargs).
        arrays: name (``"state/params/w"``), shape and dtype of each array.
    """
    found: list[Leaf | None] = [None] * len(arrays)
    for index, path in enumerate(tree.array_paths):
        name, shape, dtype = arrays[index]
        below = keys_of(path[2:])
        found[index] = Leaf((name.removesuffix("/" + "/".join(below)), *below) if below else (name,), shape, dtype)
    return [leaf for leaf in found if leaf is not None]


def parts_like(
    wanted: Sequence[Leaf], there: Sequence[Leaf], is_like: Callable[[Leaf, Leaf], bool] = Leaf.is_like
) -> list[ArgumentPart]:
    """Every part of `there` below which an array like each of `wanted` stands, under the same keys.

    >>> there = [Leaf(("state", name, "w"), (8,), "float32") for name in ("params", "mu")]
    >>> [part.name for part in parts_like([Leaf(("w",), (8,), "float32")], there)]
    ['state/params', 'state/mu']
    """
    if not wanted:
        return []
    index = {leaf.keys: i for i, leaf in enumerate(there)}
    below: dict[Keys, int] = defaultdict(int)
    for leaf in there:
        for depth in range(len(leaf.keys) + 1):
            below[leaf.keys[:depth]] += 1
    first, found = wanted[0], []
    for leaf in there:
        cut = len(leaf.keys) - len(first.keys)
        if cut < 0 or leaf.keys[cut:] != first.keys:
            continue
        prefix = leaf.keys[:cut]
        leaves = [index.get((*prefix, *one.keys)) for one in wanted]
        if all(i is not None and is_like(one, there[i]) for one, i in zip(wanted, leaves, strict=True)):
            indices = tuple(i for i in leaves if i is not None)
            found.append(ArgumentPart(prefix, indices, below[prefix] == len(wanted)))
    return found


def best_of(parts: Iterable[ArgumentPart], *ranks: Callable[[ArgumentPart], bool]) -> list[ArgumentPart]:
    """The parts that no other one beats: of two, the better is for which an earlier rank is true."""
    found = list(parts)
    for rank in ranks:
        found = [part for part in found if rank(part)] or found
    return found


def common_suffix_length(some: Sequence[str], others: Sequence[str]) -> int:
    """How many keys two paths share from the inside out."""
    pairs = zip(reversed(some), reversed(others), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
