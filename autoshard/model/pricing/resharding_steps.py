"""Pairs of layouts in, the collectives that reshard between them out, as arrays; remembered, since layers repeat."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from autoshard.layout import Layout, MeshShape, in_mesh_order
from autoshard.mesh.resharding import path, path_whatever_is_whole
from autoshard.model.pricing.formulation_deadline import no_deadline
from autoshard.model.xla.gathers import Gathers, combined


class ReshardingSteps:
    """The steps of resharding between layouts: they depend on no shape that divides evenly."""

    def __init__(self, mesh: MeshShape, gathers: Gathers):
        self.mesh, self.gathers = mesh, gathers
        self.known: dict[tuple[str, tuple[str, ...], int, bool], int] = {}  # kind, axes, tiles, several -> from 1
        self._of_kinds: dict[bytes, tuple[int, ...] | None] = {}  # None: pairs of one kind may differ
        self._tables: dict[int, _StepTable] = {}  # by rank

    def steps(
        self, sources: Sequence[Layout], targets: Sequence[Layout], tick: Callable[[], None] = no_deadline
    ) -> np.ndarray:
        """[source, target, step]: which of `known` it is; 0 where there are fewer steps.

        Args:
            sources: as `targets`, layouts of one rank; one at least.
            tick: called before the steps of each pair are found; what it raises ends that.
        """
        table = self._tables.setdefault(len(sources[0]), _StepTable())
        rows, columns = table.numbers(sources), table.numbers(targets)
        unknown = np.argwhere(table.steps[*np.ix_(rows, columns), 0] < 0)
        if len(unknown):
            pairs = rows[unknown[:, 0]], columns[unknown[:, 1]]
            table.learn(pairs, *self._found(sources, targets, unknown, tick))
        return table.steps[np.ix_(rows, columns)]

    def _found(
        self, sources: Sequence[Layout], targets: Sequence[Layout], pairs: np.ndarray, tick: Callable[[], None]
    ) -> tuple[list[tuple[int, ...]], np.ndarray]:
        """Rows of steps, and which of them is of each pair, given as [pair, (source, target)].

        Pairs whose axes stand in mesh order are of one kind if they are alike without the dims that neither layout
        splits. The same steps lead between them, unless such dims may matter.
        """
        found: list[tuple[int, ...]] = []
        kinds, ordered = _kinds(sources, targets, pairs, self.mesh)
        rows = np.full(len(pairs), -1)
        _, firsts, number = np.unique(kinds[ordered], axis=0, return_index=True, return_inverse=True)
        row_of_kind = np.full(len(firsts), -1)
        for kind, first in enumerate(np.flatnonzero(ordered)[firsts].tolist()):
            i, j = pairs[first].tolist()
            steps = self._of_kind(kinds[first].tobytes(), sources[i], targets[j], tick)
            if steps is not None:
                row_of_kind[kind] = len(found)
                found.append(steps)
        rows[ordered] = row_of_kind[number.ravel()]
        for pair in np.flatnonzero(rows < 0).tolist():
            tick()
            i, j = pairs[pair].tolist()
            rows[pair] = len(found)
            found.append(self._numbers(path(sources[i], targets[j], self.mesh)))
        return found, rows

    def _of_kind(self, kind: bytes, source: Layout, target: Layout, tick: Callable[[], None]) -> tuple[int, ...] | None:
        """The steps between all pairs of a kind, of which this is one; None if they may differ."""
        if kind not in self._of_kinds:
            tick()
            found = path_whatever_is_whole(source, target, self.mesh)
            self._of_kinds[kind] = None if found is None else self._numbers(found)
        return self._of_kinds[kind]

    def _numbers(self, found: Sequence[tuple[str, tuple[str, ...], int]]) -> tuple[int, ...]:
        """The places in `known` of a path."""
        steps = combined(found, self.mesh, self.gathers)
        return tuple(self.known.setdefault(step, len(self.known) + 1) for step in steps)


class _StepTable:
    """Of layouts of one rank: between which pairs which steps lead."""

    def __init__(self) -> None:
        self._number: dict[Layout, int] = {}
        self.steps = np.full((0, 0, 1), -1, dtype=np.int32)  # [source, target, step]: 0: none; -1: unknown

    def numbers(self, layouts: Sequence[Layout]) -> np.ndarray:
        """[layout]: its row and column."""
        numbers = [self._number.setdefault(layout, len(self._number)) for layout in layouts]
        missing = len(self._number) - len(self.steps)
        if missing:
            self.steps = np.pad(self.steps, [(0, missing), (0, missing), (0, 0)], constant_values=-1)
        return np.array(numbers)

    def learn(self, pairs: tuple[np.ndarray, np.ndarray], found: list[tuple[int, ...]], rows: np.ndarray) -> None:
        """Writes down which of some rows of steps is of each pair."""
        more = max(map(len, found)) - self.steps.shape[2]
        if more > 0:
            unknown = self.steps[..., :1] < 0
            added = np.where(unknown, np.int32(-1), np.int32(0)).repeat(more, axis=2)
            self.steps = np.concatenate([self.steps, added], axis=2)
        width = self.steps.shape[2]
        table = np.array([[*steps, *[0] * (width - len(steps))] for steps in found], dtype=np.int32)
        self.steps[pairs] = table[rows]


def _kinds(
    sources: Sequence[Layout], targets: Sequence[Layout], pairs: np.ndarray, mesh: MeshShape
) -> tuple[np.ndarray, np.ndarray]:
    """Of each pair, the dims that axes split, numbered without those that neither layout splits; and if in mesh order.

    >>> layouts = [(("a",), (), ()), ((), (), ("a",)), ((), ("a",), ())]
    >>> _kinds(layouts, layouts, np.array([(0, 1), (0, 2), (1, 0)]), {"a": 2})[0].tolist()
    [[1, 2], [1, 2], [2, 1]]
    """
    split = np.concatenate([_dims_split(sources, mesh)[pairs[:, 0]], _dims_split(targets, mesh)[pairs[:, 1]]], axis=1)
    rank, number = len(sources[0]), np.arange(len(pairs))[:, np.newaxis]
    used = np.zeros((len(pairs), rank + 1), dtype=bool)
    used[number, split] = True
    used[:, 0] = False  # stands for axes that split nothing
    ordered = np.array([in_mesh_order(layout, mesh) for layout in sources])[pairs[:, 0]]
    ordered &= np.array([in_mesh_order(layout, mesh) for layout in targets])[pairs[:, 1]]
    return used.cumsum(axis=1)[number, split], ordered


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
