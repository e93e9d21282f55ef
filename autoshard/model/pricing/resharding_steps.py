"""Pairs of layouts in, the collectives that reshard between them out, as arrays; remembered, since layers repeat."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.layout import Layout, MeshShape
from autoshard.mesh.resharding import path
from autoshard.model.xla.gathers import Gathers, combined


class ReshardingSteps:
    """The steps of resharding between layouts of one rank: they depend on no shape that divides evenly."""

    def __init__(self, mesh: MeshShape, gathers: Gathers):
        self.mesh, self.gathers = mesh, gathers
        self.known: dict[tuple[str, tuple[str, ...], int, bool], int] = {}  # kind, axes, tiles, several -> from 1
        self._number: dict[Layout, int] = {}
        # [source, target, step]: its number; 0: none; -1: unknown
        self._steps = np.full((0, 0, 0), -1, dtype=np.int32)

    def steps(self, sources: Sequence[Layout], targets: Sequence[Layout]) -> np.ndarray:
        """[source, target, step]: which of `known` it is; 0 where there are fewer steps."""
        for layout in (*sources, *targets):
            self._number.setdefault(layout, len(self._number))
        missing = len(self._number) - len(self._steps)
        if missing > 0:
            self._steps = np.pad(self._steps, [(0, missing), (0, missing), (0, 0)], constant_values=-1)
            self._widen(1)
        rows, columns = ([self._number[layout] for layout in layouts] for layouts in (sources, targets))
        cells = np.ix_(rows, columns)
        for i, j in np.argwhere(self._steps[*cells, 0] < 0).tolist():
            steps = combined(path(sources[i], targets[j], self.mesh), self.mesh, self.gathers)
            found = [self.known.setdefault(step, len(self.known) + 1) for step in steps]
            self._widen(len(found))
            self._steps[rows[i], columns[j]] = 0
            self._steps[rows[i], columns[j], : len(found)] = found
        return self._steps[cells]

    def _widen(self, count: int) -> None:
        more = count - self._steps.shape[2]
        if more > 0:
            rows, columns, before = self._steps.shape
            added = np.where(self._steps[..., :1] < 0, -1, 0) if before else np.full((rows, columns, 1), -1)
            self._steps = np.concatenate([self._steps, added.repeat(more, axis=2)], axis=2, dtype=np.int32)
