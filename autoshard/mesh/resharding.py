"""From one layout to another: the collectives that XLA's SPMD partitioner really runs, and their seconds.

A model of `PartitionedHlo::ReshardNoCache` (openxla/xla, xla/service/spmd/spmd_partitioner.cc), which knows no mesh
axes: a sharding is a *tiling*, an array of devices with one dim per array dim, plus a last one for copies of a tile.
In its order of preference:

1. same tile counts, other devices: collective_permute;
2. the same tile counts on other dims: all_to_all, one for all the pairs of dims that are swapped;
3. fewer copies, finer tiles: a local slice, free, and a collective_permute if the devices come out in another order;
4. more copies, coarser tiles: a collective_permute that puts devices in order, an all_gather per dim, last dim first;
5. a mix: split one dim in two, copy one dim, or unfold the copies into a dim, then any of the above. Or set aside the
   tiles of the target that the source only cuts finer, and do the rest inside each group of devices;
6. "involuntary full rematerialization": all_gather every dim, slice.

A step's bytes are its result on one device. Copies within a device's memory are not priced. A dim that does not divide
evenly is taken as padded to the larger of what source and target pad it to; the halo exchanges that XLA then adds are
not modelled.

`benchmarks/resharding.py` compares this with compiled programs. All 5,134 pairs of layouts of one to three dims on the
meshes (8,), (4, 2) and (2, 2, 2) come out with the same kinds, axes and bytes. So do random pairs on up to 16 devices,
with axes in any order and counts of three.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import overload

from autoshard.layout import Layout, MeshShape, shards
from autoshard.mesh.collectives import seconds
from autoshard.mesh.tilings import DeviceSets, Members, Tiling, members_of, prime_of, split_or_merge, swaps, tiling_of
from autoshard.mesh.topology import Topology


@dataclass(frozen=True)
class ReshardingStep:
    """One collective of a resharding."""

    kind: str  # one of collectives.KINDS
    axes: tuple[str, ...]  # mesh axes it runs over, in mesh order
    bytes: int  # its result on one device


def reshard(
    shape: Sequence[int], itemsize: float, source: Layout, target: Layout, mesh_shape: MeshShape
) -> tuple[ReshardingStep, ...]:
    """The collectives that take an array from `source` to `target`, in order; none where a local slice will do.

    >>> mesh = {"x": 4, "y": 2}
    >>> reshard((16, 24), 4, (("x",), ()), ((), ("x",)), mesh)
    (ReshardingStep(kind='all_to_all', axes=('x',), bytes=384),)
    >>> reshard((16, 24), 4, ((), ()), ((), ("x",)), mesh)
    ()
    """
    if source == target:
        return ()
    padded = math.prod(
        max(-(-size // count) * count for count in (shards(before, mesh_shape), shards(after, mesh_shape)))
        for size, before, after in zip(shape, source, target, strict=True)
    )
    found = path(source, target, mesh_shape)
    return tuple(ReshardingStep(kind, axes, math.ceil(padded * itemsize / tiles)) for kind, axes, tiles in found)


def path(source: Layout, target: Layout, mesh_shape: MeshShape) -> tuple[tuple[str, tuple[str, ...], int], ...]:
    """The collectives of `reshard` as (kind, axes, into how many tiles the result is cut): they depend on no shape.

    >>> path((("x",), ()), ((), ("x",)), {"x": 4, "y": 2})
    (('all_to_all', ('x',), 4),)
    """
    mesh = tuple(mesh_shape.items())
    layouts = (source, *stops(source, target, mesh_shape), target)
    return tuple(step for hop in itertools.pairwise(layouts) for step in _hop(*hop, mesh)[0])


def path_whatever_is_whole(
    source: Layout, target: Layout, mesh_shape: MeshShape
) -> tuple[tuple[str, tuple[str, ...], int], ...] | None:
    """The same; None if it may be another one where more or fewer dims are split in neither layout."""
    mesh = tuple(mesh_shape.items())
    if not prime_of(mesh):
        return None
    found, traits = _path(*_without_whole_dims(source, target), mesh)
    return None if DIMS in traits else found


def stops(source: Layout, target: Layout, mesh_shape: MeshShape) -> tuple[Layout, ...]:
    """The layouts by way of which an array goes from `source` to `target`; none where XLA takes it there itself.

    On axes whose sizes are not powers of one prime, a resharding may cut a dim between devices that no axis tells
    apart. XLA since JAX 0.11.1 ends the process there ("Could not slice dimension"). So XLA gets only steps without
    such cuts.

    >>> stops((("x",), ()), ((), ("x", "y")), {"x": 3, "y": 2})
    (((), ('x',)),)
    """
    mesh = tuple(mesh_shape.items())
    if source == target or prime_of(mesh):
        return ()
    return _stops(source, target, mesh)


@cache
def _stops(source: Layout, target: Layout, mesh: tuple[tuple[str, int], ...]) -> tuple[Layout, ...]:
    """Those of the way with the fewest bytes: gather some axes of the source, move others, cut by some of the target.

    One way always exists: what is split alike stays, the rest is gathered, then cut.
    """
    if CUTS not in _hop(source, target, mesh)[1]:
        return ()
    best = math.inf
    found: tuple[Layout, ...] = ()
    for way in itertools.product(_coarser(source), _coarser(target)):
        layouts = [layout for layout, _ in itertools.groupby((source, *way, target))]
        hops = [_hop(*hop, mesh) for hop in itertools.pairwise(layouts)]
        if any(CUTS in traits for _, traits in hops):
            continue
        moved = sum(1 / tiles for steps, _ in hops for _, _, tiles in steps)
        if moved < best:
            best, found = moved, tuple(layouts[1:-1])
    assert best < math.inf, (source, target, mesh)
    return found


def _coarser(layout: Layout) -> list[Layout]:
    """A layout, and what is left of it where the minor axes of some dims are gathered."""
    return list(itertools.product(*([axes[:kept] for kept in range(len(axes) + 1)] for axes in layout)))


def _hop(source: Layout, target: Layout, mesh: tuple[tuple[str, int], ...]) -> _Path:
    """From one layout straight to another."""
    small = _without_whole_dims(source, target)
    found = _path(*small, mesh)
    return _path(source, target, mesh) if DIMS in found[1] and small != (source, target) else found


def reshard_seconds(
    shape: Sequence[int],
    itemsize: float,
    source: Layout,
    target: Layout,
    mesh_shape: MeshShape,
    topology: Topology,
) -> float:
    """Time of all steps of `reshard`, one after the other."""
    steps = reshard(shape, itemsize, source, target, mesh_shape)
    return sum(seconds(step.kind, step.axes, step.bytes, mesh_shape, topology) for step in steps)


_Collective = tuple[str, tuple[str, ...], int]  # kind, axes, into how many tiles its result is cut
_Steps = list[_Collective]


# The way from one layout to another depends on which axes go from where to where. It may also depend on where dims that
# are whole in both layouts stand (DIMS). CUTS: it may cut dims otherwise than axes do.
DIMS, CUTS = "dims", "cuts"
_Path = tuple[tuple[_Collective, ...], frozenset[str]]  # the collectives, and which of these are true of it


def _without_whole_dims(source: Layout, target: Layout) -> tuple[Layout, Layout]:
    """Both layouts without the dims that neither splits."""
    kept = [i for i, before in enumerate(source) if before or target[i]]
    return tuple([source[i] for i in kept]), tuple([target[i] for i in kept])


@cache
def _path(source: Layout, target: Layout, mesh: tuple[tuple[str, int], ...]) -> _Path:
    traits: set[str] = set()
    group = _Group(members_of(mesh), 1, traits)
    result = group.reshard(tiling_of(source, mesh), tiling_of(target, mesh))
    assert result is not None  # only a caller that forbids full replication gets None
    return tuple(result), frozenset(traits)


@dataclass(frozen=True)
class _Group:
    """Devices that reshard among themselves, as do the other groups beside them; tilings number them 0, 1, ..."""

    members: Members
    tiles: int  # into how many tiles the dims outside the groups are cut
    traits: set[str]  # which of DIMS and CUTS are true of what was found so far

    @overload
    def reshard(self, source: Tiling, target: Tiling) -> _Steps: ...

    @overload
    def reshard(self, source: Tiling, target: Tiling, *, rematerialize: bool) -> _Steps | None: ...

    def reshard(self, source: Tiling, target: Tiling, *, rematerialize: bool = True) -> _Steps | None:
        """ReshardNoCache; None only without `rematerialize`, where nothing but full replication would do."""
        if source.same(target) or source.replicated:
            return []
        if not target.replicated:
            if source.shape == target.shape:
                return self.permute(source, target)
            if (pairs := swaps(source, target)) is not None:
                return self.all_to_all(source, target, pairs)
        if source.partial and not target.replicated:
            steps = self.slice_copies(source, target)
            if steps is None:
                steps = self.shifted_all_to_all(source, target)
            if steps is not None:
                return steps
        if target.partial and not target.replicated:
            steps = self.gather_copies(source, target)
            if steps is None:
                steps = self.shifted_all_to_all(source, target)
            if steps is not None:
                return steps
        if not target.replicated:
            self.traits.add(CUTS)
            steps = self.resharded_in_two_steps(source, target)
            if steps is None:
                steps = self.in_groups(source, target)
            if steps is not None or not rematerialize:
                return steps
        return self.gather(source, [1] * len(source.tiles))

    def step(self, kind: str, talk: DeviceSets, tiles: int) -> _Collective:
        """A collective among `talk`."""
        return kind, self.members.axes(talk), tiles * self.tiles

    def permute(self, source: Tiling, target: Tiling) -> _Steps:
        if source.same(target):
            return []
        return [self.step("collective_permute", source.moved(target), math.prod(source.tiles))]

    def gather(self, source: Tiling, tiles: Sequence[int]) -> _Steps:
        """All-gathers, last dim first, until only `tiles` are left of each dim."""
        steps, left = [], list(source.tiles)
        for dim in reversed(range(len(tiles))):
            factor = left[dim] // tiles[dim]
            if factor > 1:
                left[dim] = tiles[dim]
                # devices of one tile of the result differ in the minor part of this dim
                steps.append(self.step("all_gather", source.among_minor({dim: factor}), math.prod(left)))
        return steps

    def all_to_all(self, source: Tiling, target: Tiling, pairs: Sequence[tuple[int, int]]) -> _Steps:
        """ReshardWithAllToAll: pairs of dims that share no dim go together, any others one by one."""
        together: list[tuple[int, int]] = []
        later: list[tuple[int, int]] = []
        seen: set[int] = set()
        for pair in sorted(pairs, key=lambda pair: pair[1]):
            (later if seen & set(pair) else together).append(pair)
            seen |= set(pair) if pair in together else set()
        batches = [together, *([pair] for pair in later)]
        if len(together) == 1 or any(source.tiles[before] % source.tiles[after] for before, after in together):
            batches = [[pair] for pair in pairs]  # where one pair has to go before another, they come in that order
        steps = []
        for batch in batches:
            if source.same(target):
                break
            factors = {after: source.tiles[before] // source.tiles[after] for before, after in batch}
            for before, after in batch:
                source = source.swapped(before, after)
            steps.append(self.step("all_to_all", source.among_minor(factors), math.prod(source.tiles)))
        return steps + self.permute(source, target)

    def slice_copies(self, source: Tiling, target: Tiling) -> _Steps | None:
        """ReshardFromPartialReplicateWithDynamicSlice."""
        reached = self.compatible(source, target)
        return None if reached is None else self.permute(reached, target)

    def gather_copies(self, source: Tiling, target: Tiling) -> _Steps | None:
        """ReshardToPartialReplicateWithAllGather."""
        start = self.compatible(target, source)
        return None if start is None else self.permute(source, start) + self.gather(start, target.tiles)

    def compatible(self, coarse: Tiling, fine: Tiling) -> Tiling | None:
        """PartialReplicateReshardCompatibleSharding: `fine`'s counts, each tile on devices that hold it in `coarse`."""
        if not coarse.partial or any(n % m for n, m in zip(fine.tiles, coarse.tiles, strict=True)):
            return None
        if fine.refines(coarse):
            return fine
        self.traits.add(CUTS)
        return coarse.spread([n // m for n, m in zip(fine.tiles, coarse.tiles, strict=True)])

    def shifted_all_to_all(self, source: Tiling, target: Tiling) -> _Steps | None:
        """ReshardPartialReplicateWithAllToAll: [1,2,3 copies] to [2,3] and back, tile counts shifted by one dim."""
        if source.partial == target.partial:
            return None
        copied, tiled = (source, target) if source.partial else (target, source)
        if copied.tiles[0] != 1 or (*copied.tiles[1:], copied.copies) != tiled.tiles:
            return None
        if not copied.in_order_of(tiled):
            return None
        self.traits.update((DIMS, CUTS))
        last = max(dim for dim, count in enumerate(tiled.tiles) if count > 1)
        between = tiled.copied(last)
        if source.partial:
            pairs = swaps(source, between)
            return None if pairs is None else self.all_to_all(source, between, pairs) + self.reshard(between, target)
        pairs = swaps(between, target)
        return None if pairs is None else self.reshard(source, between) + self.all_to_all(between, target, pairs)

    def resharded_in_two_steps(self, source: Tiling, target: Tiling) -> _Steps | None:
        """TryComplexReshardHandling: by way of a tiling from which a direct reshard leads on."""
        if (halves := split_or_merge(source, target)) is not None:
            return self.reshard(*halves, rematerialize=False)
        between = None
        if target.partial:
            for dim, count in enumerate(source.tiles):
                if count > 1 and count * source.copies == target.copies:
                    between = source.copied(dim)
                    break
        elif source.partial:
            for dim, (before, after) in enumerate(zip(source.tiles, target.tiles, strict=True)):
                if before == 1 and after != 1 and after % source.copies == 0:
                    between = source.unfolded(dim)
                    break
        if between is None:
            return None
        onward = self.reshard(between, target, rematerialize=False)
        return None if onward is None else self.reshard(source, between) + onward

    def in_groups(self, source: Tiling, target: Tiling) -> _Steps | None:
        """Sets aside tiles of the target that the source only cuts finer, and goes on inside groups that share them."""
        counts = [
            after if before % after == 0 and (before == after or not (source.partial or target.partial)) else 1
            for before, after in zip(source.tiles, target.tiles, strict=True)
        ]
        if max(counts) == 1:
            return None
        inner_source, inner_target = source.inside(target, counts)
        members = self.members.shared_out(source.shared_out(counts))
        inner = _Group(members, self.tiles * math.prod(counts), self.traits)
        between = source.rejoined(inner_target, counts)
        return inner.reshard(inner_source, inner_target) + self.reshard(between, target)
