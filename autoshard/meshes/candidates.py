"""The dims of a machine in, the meshes that are worth a plan out: pure arithmetic.

A mesh is *aligned* with the machine if every axis runs over whole dims of it (slices or hosts, then the dims of the
torus), except that one dim may be cut in two. Any other mesh has axes that share wires with each other more than it has
to. A machine of n dims so has meshes of one to n + 1 axes; the dim of a machine that has but one may be cut in three.

Slices or hosts come outermost, as in `mesh/placement.py`: an axis takes as many of them as its size allows, and the
axes before it must leave none that they could have taken.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autoshard.mesh.placement import shared_out

MOST_AXES = 4  # of a mesh: with more, formulating takes minutes (docs/architecture/problem.md, Four axes)

# Names of axes, outermost first, by how many there are.
NAMES = {
    1: ("data",),
    2: ("data", "model"),
    3: ("data", "fsdp", "model"),
    4: ("data", "fsdp", "sequence", "model"),
}


@dataclass(frozen=True)
class MachineDims:
    """What devices are wired along.

    >>> MachineDims(groups=1, inner=(4, 4)).devices
    16
    """

    groups: int  # slices of TPUs, or hosts: what the network joins
    inner: tuple[int, ...]  # devices along each dim of a torus; of a host, in one dim

    @property
    def devices(self) -> int:
        return self.groups * math.prod(self.inner)


def aligned_sizes(machine: MachineDims) -> list[tuple[int, ...]]:
    """The sizes of mesh axes, outermost first, of every aligned mesh.

    Those that are likely to be fast come first: of whole dims, of many axes, and with the larger axes outside.

    >>> aligned_sizes(MachineDims(1, (4, 4)))
    [(4, 4), (16,), (4, 2, 2), (2, 4, 2), (2, 2, 4), (8, 2), (2, 8)]
    >>> aligned_sizes(MachineDims(2, (8,)))
    [(2, 8), (16,), (2, 4, 2), (2, 2, 4), (8, 2), (4, 4)]
    """
    if machine.devices == 1:
        return [(1,)]
    found: dict[tuple[int, ...], int] = {}
    for count in range(1, MOST_AXES + 1):
        for sizes in _factorisations(machine.devices, count):
            cuts = _cuts(machine, sizes)
            if cuts is not None:
                found[sizes] = cuts
    return sorted(found, key=lambda sizes: (found[sizes], -len(sizes), [-size for size in sizes]))


def _factorisations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    """The ways to write a number as an ordered product of so many, none of which is 1.

    >>> list(_factorisations(8, 2))
    [(2, 4), (4, 2)]
    """
    if parts == 1:
        if number > 1:
            yield (number,)
        return
    for first in range(2, number):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorisations(number // first, parts - 1))


def _cuts(machine: MachineDims, sizes: Sequence[int]) -> int | None:
    """How often axes of these sizes cut dims of the machine; None if the mesh is not aligned with it."""
    if sum(size > 1 for size in (machine.groups, *machine.inner)) == 1:
        return len(sizes) - 1 if len(sizes) <= 3 else None
    inside, groups_along, left = [], 0, machine.groups
    for size in sizes:
        groups = math.gcd(size, left)
        left //= groups
        if left > 1 and size > groups:
            return None  # an axis inside the groups before all of these are taken
        groups_along += groups > 1
        inside.append(size // groups)
    if left > 1 or groups_along > 2:
        return None
    cuts = max(0, groups_along - 1)
    whole = [size for size in machine.inner if size > 1]
    if shared_out(whole, inside) is not None:
        return cuts
    if cuts:
        return None
    for i, size in enumerate(whole):
        others = whole[:i] + whole[i + 1 :]
        pairs = ((part, size // part) for part in range(2, size) if size % part == 0)
        if any(shared_out([*others, *pair], inside) is not None for pair in pairs):
            return 1
    return None


def named_meshes(sizes: Iterable[tuple[int, ...]], named: Sequence[str]) -> list[dict[str, int]]:
    """Axis -> devices of meshes of these sizes that have the axes which the user names.

    >>> named_meshes([(8,), (4, 2)], ["model"])
    [{'model': 8}, {'data': 4, 'model': 2}]
    >>> named_meshes([(8,), (4, 2)], ["x"])
    [{'x': 8}, {'x': 4, 'data': 2}, {'data': 4, 'x': 2}]
    """
    found = []
    for one in sizes:
        found += [dict(zip(names, one, strict=True)) for names in _names(len(one), tuple(dict.fromkeys(named)))]
    return found


def _names(count: int, named: tuple[str, ...]) -> list[tuple[str, ...]]:
    """The names of so many axes, outermost first, in every order that the user's own names leave open."""
    own = [name for name in named if name not in NAMES[MOST_AXES]]
    needed = [name for name in NAMES[MOST_AXES] if name in named]
    filled = [*needed, *(name for name in NAMES[count] if name not in needed)][: count - len(own)]
    if len(own) + len(needed) > count:
        return []
    usual = sorted(filled, key=NAMES[MOST_AXES].index)
    orders = itertools.permutations([*own, *usual])
    return [order for order in orders if [name for name in order if name in usual] == usual]
