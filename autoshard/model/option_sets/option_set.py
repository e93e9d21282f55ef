"""`OptionSet`: a part of the strategies of groups and of the homes of arguments, small enough to be priced.

A group of f factors has (f + 1)^n strategies on n axes, and each is priced against each of its neighbours. With four
axes that takes minutes. An option set offers two kinds of them:

* axes taken together: in a *partition* of the mesh axes into blocks, the axes of a block split the same factor. So a
  mesh of four axes is planned as coarser meshes of one or two;
* near a choice: strategies and homes that differ from it in the place of at most so many axes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autoshard.layout import Layout, MeshShape, finest_axes, shards
from autoshard.model.groups import Group
from autoshard.model.strategies import Strategy

Partition = tuple[tuple[str, ...], ...]  # blocks of mesh axes
Place = Mapping[str, int]  # mesh axis -> the factor or dim that it splits; axes that split nothing are left out


@dataclass(frozen=True, eq=False)
class OptionSet:
    """What is offered. Without choices near which options lie, these are the partitions alone.

    >>> options = OptionSet(((("a", "b"), ("c",)),))
    >>> list(options.assignments({}, ["a", "b", "c"], [7]))
    [(None, None, None), (None, None, 7), (7, 7, None), (7, 7, 7)]
    >>> near = OptionSet((), changes=1)
    >>> list(near.assignments({"a": 7}, ["a", "b"], [7, 8]))
    [(None, None), (7, None), (7, 7), (7, 8), (8, None)]
    """

    partitions: tuple[Partition, ...]
    groups: Mapping[int, Place] = field(default_factory=dict)  # group index -> how it was split
    homes: Mapping[int, Place] = field(default_factory=dict)  # argument index -> how it lay
    changes: int = 0  # in how many axes an option near a choice may differ from it

    def choices(self, group: Group, axes: Sequence[str], factors: Sequence[int]) -> Iterable[tuple[int | None, ...]]:
        """Per axis the factor that it splits, or None: the strategies of a group that are offered."""
        return self.assignments(self.groups.get(group.index), axes, factors)

    def of_argument(self, index: int, homes: Sequence[Layout], axes: Sequence[str]) -> list[Layout]:
        """The homes of an argument that are offered, in their order."""
        dims = range(len(homes[0]))
        offered = set(self.assignments(self.homes.get(index), axes, list(dims)))
        return [home for home in homes if _place_per_axis(home, axes) in offered]

    @property
    def has_every_split(self) -> bool:
        """Whether all strategies are looked at, and `fitting` alone says which are offered."""
        return False

    def fitting(self, group: Group, strategies: Sequence[Strategy]) -> Sequence[int] | None:
        """Which of these strategies are offered; None: all."""
        return None

    def key(self, group: Group) -> Any:
        """Equal for groups of which the same is offered, if all else about them is equal."""
        place = self.groups.get(group.index)
        return None if place is None else tuple(sorted(place.items()))

    def assignments(
        self, place: Place | None, axes: Sequence[str], factors: Sequence[int]
    ) -> Iterator[tuple[int | None, ...]]:
        """What is offered, in the order in which all of it would stand; the first splits nothing."""
        order = {None: -1} | {factor: i for i, factor in enumerate(factors)}
        found = self.of_blocks(axes, factors) | self._near(place, axes, factors)
        known = (one for one in found if all(factor in order for factor in one))
        return iter(sorted(known, key=lambda one: [order[factor] for factor in one]))

    def of_blocks(self, axes: Sequence[str], factors: Sequence[int]) -> set[tuple[int | None, ...]]:
        """What the partitions offer."""
        found: set[tuple[int | None, ...]] = {(None,) * len(axes)}
        for partition in self.partitions:
            blocks = [[axis for axis in block if axis in axes] for block in partition]
            for chosen in itertools.product([None, *factors], repeat=len(blocks)):
                of = {axis: factor for block, factor in zip(blocks, chosen, strict=True) for axis in block}
                found.add(tuple(of[axis] for axis in axes))
        return found

    def near(self, group: Group, axes: Sequence[str], factors: Sequence[int]) -> set[tuple[int | None, ...]]:
        """What lies near the choice of a group."""
        return self._near(self.groups.get(group.index), axes, factors)

    def _near(self, place: Place | None, axes: Sequence[str], factors: Sequence[int]) -> set[tuple[int | None, ...]]:
        found: set[tuple[int | None, ...]] = set()
        if place is not None:
            before = tuple(place.get(axis) for axis in axes)
            for changed in itertools.combinations(range(len(axes)), min(self.changes, len(axes))):
                for new in itertools.product([None, *factors], repeat=len(changed)):
                    made = list(before)
                    for i, factor in zip(changed, new, strict=True):
                        made[i] = factor
                    found.add(tuple(made))
        return found


@dataclass(frozen=True, eq=False)
class RowOptionSet(OptionSet):
    """What splits one factor or dim: over all axes of the mesh, or over those that split it into the most pieces.

    >>> options = RowOptionSet(((("a", "b"),),), mesh={"a": 4, "b": 2})
    >>> options.of_argument(0, [((), ()), (("a",), ()), (("b",), ()), (("a", "b"), ()), ((), ("b",))], ["a", "b"])
    [((), ()), (('a', 'b'), ()), ((), ('b',))]
    """

    mesh: MeshShape = field(default_factory=dict)

    def choices(self, group: Group, axes: Sequence[str], factors: Sequence[int]) -> Iterable[tuple[int | None, ...]]:
        free = {axis: self.mesh[axis] for axis in axes}
        yield (None,) * len(axes)
        for factor in factors:
            if split := finest_axes(free, group.sizes[factor]):
                yield tuple(factor if axis in split else None for axis in axes)

    def of_argument(self, index: int, homes: Sequence[Layout], axes: Sequence[str]) -> list[Layout]:
        finest = dict[int, int]()  # dim -> the most pieces that it is in
        for home in homes:
            for dim, split in enumerate(home):
                finest[dim] = max(finest.get(dim, 1), shards(split, self.mesh))

        def is_offered(home: Layout) -> bool:
            split = [dim for dim, some in enumerate(home) if some]
            return not split or (len(split) == 1 and shards(home[split[0]], self.mesh) == finest[split[0]])

        return [home for home in homes if is_offered(home)]


def _place_per_axis(layout: Layout, axes: Sequence[str]) -> tuple[int | None, ...]:
    place = place_of(layout)
    return tuple(place.get(axis) for axis in axes)


def place_of(layout: Layout) -> dict[str, int]:
    """Mesh axis -> the dim that it splits.

    >>> place_of((("a",), (), ("b", "c")))
    {'a': 0, 'b': 2, 'c': 2}
    """
    return {axis: dim for dim, split in enumerate(layout) for axis in split}
