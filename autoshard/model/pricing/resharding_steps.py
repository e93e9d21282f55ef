"""Pairs of layouts in, the collectives that reshard between them out, as arrays; remembered, since layers repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.layout import Layout, MeshShape, in_mesh_order
from autoshard.mesh.resharding import depends_on_whole_dims, path
from autoshard.model.pricing.late import never_late
from autoshard.model.xla.gathers import Gathers, combined


class ReshardingSteps:
    """The steps of resharding between layouts of one rank: they depend on no shape that divides evenly."""

    def __init__(self, mesh: MeshShape, gathers: Gathers):
        self.mesh, self.gathers = mesh, gathers
        self.known: dict[tuple[str, tuple[str, ...], int, bool], int] = {}  # kind, axes, tiles, several -> from 1
        self._number: dict[Layout, int] = {}
        self._matters: dict[bytes, bool] = {}  # see `_kinds`
        # [source, target, step]: its number; 0: none; -1: unknown
        self._steps = np.full((0, 0, 0), -1, dtype=np.int32)

    def steps(
        self, sources: Sequence[Layout], targets: Sequence[Layout], tick: Callable[[], None] = never_late
    ) -> np.ndarray:
        """[source, target, step]: which of `known` it is; 0 where there are fewer steps.

        Args:
            tick: called before the steps of each pair are found; what it raises ends that.
        """
        for layout in (*sources, *targets):
            self._number.setdefault(layout, len(self._number))
        missing = len(self._number) - len(self._steps)
        if missing > 0:
            self._steps = np.pad(self._steps, [(0, missing), (0, missing), (0, 0)], constant_values=-1)
            self._widen(1)
        rows, columns = (np.array([self._number[layout] for layout in layouts]) for layouts in (sources, targets))
        cells = np.ix_(rows, columns)
        unknown = np.argwhere(self._steps[*cells, 0] < 0)
        if len(unknown):
            self._steps[rows[unknown[:, 0]], columns[unknown[:, 1]]] = self._found(sources, targets, unknown, tick)
        return self._steps[cells]

    def _found(
        self, sources: Sequence[Layout], targets: Sequence[Layout], pairs: np.ndarray, tick: Callable[[], None]
    ) -> np.ndarray:
        """[pair, step]: the steps between each pair, given as [pair, (source, target)]."""
        kinds = _kinds(sources, targets, pairs, self.mesh, tick, self._matters)
        _, firsts, kind_of = np.unique(kinds, return_index=True, return_inverse=True)
        found = []
        for source, target in ((sources[i], targets[j]) for i, j in pairs[firsts].tolist()):
            tick()
            steps = combined(path(source, target, self.mesh), self.mesh, self.gathers)
            found.append([self.known.setdefault(step, len(self.known) + 1) for step in steps])
        self._widen(max(map(len, found)))
        width = self._steps.shape[2]
        return np.array([[*steps, *[0] * (width - len(steps))] for steps in found], dtype=np.int32)[kind_of]

    def _widen(self, count: int) -> None:
        more = count - self._steps.shape[2]
        if more > 0:
            rows, columns, before = self._steps.shape
            added = np.where(self._steps[..., :1] < 0, -1, 0) if before else np.full((rows, columns, 1), -1)
            self._steps = np.concatenate([self._steps, added.repeat(more, axis=2)], axis=2, dtype=np.int32)


def _kinds(
    sources: Sequence[Layout],
    targets: Sequence[Layout],
    pairs: np.ndarray,
    mesh: MeshShape,
    tick: Callable[[], None] = never_late,
    known: dict[bytes, bool] | None = None,
) -> np.ndarray:
    """[pair]: a number, equal only for pairs between which the same steps lead.

    Pairs are of one kind that are alike without the dims that neither layout splits, unless such dims may matter.

    >>> layouts = [(("a",), (), ()), ((), (), ("a",)), ((), ("a",), ())]
    >>> _kinds(layouts, layouts, np.array([(0, 1), (0, 2), (1, 0)]), {"a": 2}).tolist()
    [0, 0, 1]

    Args:
        known: which dims axes split in a pair -> whether other dims may matter. This call adds to it.
    """
    if not mesh:  # nothing is split
        return np.zeros(len(pairs), dtype=int)
    split = np.concatenate([_dims_split(sources, mesh)[pairs[:, 0]], _dims_split(targets, mesh)[pairs[:, 1]]], axis=1)
    rank, number = len(sources[0]), np.arange(len(pairs))
    used = np.zeros((len(pairs), rank + 1), dtype=bool)
    for column in split.T:
        used[number, column] = True
    used[:, 0] = False  # stands for axes that split nothing
    places = used.cumsum(axis=1)
    without = np.stack([places[number, column] for column in split.T], axis=1)
    _, firsts, kinds = np.unique(without, axis=0, return_index=True, return_inverse=True)
    kinds = kinds.ravel()
    ordered = np.array([in_mesh_order(layout, mesh) for layout in sources])[pairs[:, 0]]
    ordered &= np.array([in_mesh_order(layout, mesh) for layout in targets])[pairs[:, 1]]
    known, matters = {} if known is None else known, []
    for row, first, (i, j) in zip(without[firsts], firsts.tolist(), pairs[firsts].tolist(), strict=True):
        key = row.tobytes() if ordered[first] else None  # where axes stand in another order, more than dims tell pairs
        if key is None or key not in known:
            tick()
            found = depends_on_whole_dims(sources[i], targets[j], mesh)
        else:
            found = known[key]
        if key is not None:
            known[key] = found
        matters.append(found)
    return np.where(np.array(matters)[kinds] | ~ordered, len(firsts) + number, kinds)


def _dims_split(layouts: Sequence[Layout], mesh: MeshShape) -> np.ndarray:
    """[layout, axis]: the dim that an axis splits, counted from 1; 0: none."""
    found = np.zeros((len(layouts), len(mesh)), dtype=int)
    place = {axis: i for i, axis in enumerate(mesh)}
    for row, layout in zip(found, layouts, strict=True):
        for dim, axes in enumerate(layout, start=1):
            for axis in axes:
                row[place[axis]] = dim
    return found


def differ(sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
    """[source, target]: whether these are two."""
    number = {layout: i for i, layout in enumerate(dict.fromkeys((*sources, *targets)))}
    return np.not_equal.outer([number[layout] for layout in sources], [number[layout] for layout in targets])


def places_among(layouts: Sequence[Layout], among: Sequence[Layout]) -> list[int]:
    """Which of some layouts each is."""
    place = {layout: i for i, layout in enumerate(among)}
    return [place[layout] for layout in layouts]
