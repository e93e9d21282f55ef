"""Copies of pieces: what an all_to_all cuts or a gather puts together is copied where pieces come out of order.

Pieces of images pad, and those of columns come in order only as whole tiles. Source: the cycles that libtpu notes on
compiled v5e and v5p programs, and copies in compiled H100 programs. `tests/mesh/test_targets.py` compiles stacks,
experts and images whose pieces are in order and out of it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.layout import Layout, MeshShape, local_shape
from autoshard.model.xla.convolutions import ImageDims
from autoshard.model.xla.rounding import BFLOAT16_BYTES
from autoshard.model.xla.tiles import Tile, padded_size, tiled_dims


@dataclass(frozen=True)
class Recopies:
    """How often pieces are copied, beside being sent."""

    pieces: int = 0  # times that an all_to_all, or a gather whose pieces come out of order, copies what it moves
    image_pieces: int = 0  # the same for images of two bytes an element, whose pieces pad; at least as for others
    keeps_columns: bool = False  # pieces of columns, as an array is written, come in order only if they are whole tiles

    def extra_of_images(
        self,
        shape: tuple[int, ...],
        itemsize: float,
        image_dims: ImageDims,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        mesh: MeshShape,
        tile: Tile | None,
    ) -> np.ndarray:
        """[source, target]: how many times more often than other values all_to_alls copy images.

        Pieces of few channels or images pad. What takes long is to put elements in order, however wide they are.
        """
        if not self.image_pieces:
            return np.zeros((len(sources), len(targets)))
        before, after = (
            np.array([local_shape(shape, layout, mesh) for layout in layouts]) for layouts in (sources, targets)
        )
        cut = np.stack([np.minimum.outer(before[:, dim], after[:, dim]) for dim in image_dims], axis=-1)
        pieces, place = np.unique(cut.reshape(-1, 2), axis=0, return_inverse=True)
        padding = [padded_size(tuple(piece), tile) / max(1, math.prod(piece)) for piece in pieces.tolist()]
        often = self.image_pieces * BFLOAT16_BYTES / itemsize * np.array(padding)[place]
        return np.maximum(0.0, often - self.pieces).reshape(len(sources), len(targets))

    def out_of_order(
        self,
        shape: tuple[int, ...],
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        mesh: MeshShape,
        tile: Tile | None,
    ) -> np.ndarray:
        """[several, source, target]: whether what is gathered, in one dim or in several at once, is copied into order.

        Of several dims pieces come in order if they have one element of each dim from the first that is gathered to the
        last, but for that. And XLA for TPU puts only whole tiles side by side: where pieces of rows or columns do not
        end with one, it makes the dim the outermost, in which order only a matrix can stay. On some TPUs what are
        columns as it is written cannot be rows for that.
        """
        before, after = (
            np.array([local_shape(shape, layout, mesh) for layout in layouts]) for layouts in (sources, targets)
        )
        before, after = before[:, np.newaxis], after[np.newaxis]
        gathered = before < after
        later = np.zeros_like(gathered)
        later[..., :-1] = np.logical_or.accumulate(gathered[..., :0:-1], axis=-1)[..., ::-1]
        begun = np.logical_or.accumulate(gathered, axis=-1)
        scattered = (begun & later & (before > 1)).any(axis=-1)
        if tile is None:
            return np.stack([np.zeros_like(scattered), scattered])
        tile_rows, tile_columns = tile
        roles = [tiled_dims(tuple(size), tile) for size in after[0].tolist()]
        other, rows, columns = np.stack(roles, axis=1)
        whole = other | (rows & (before % tile_rows == 0)) | (columns & (before % tile_columns == 0))
        if self.keeps_columns and len(shape) > 1:
            as_written = rows[..., -2] & columns[..., -1]
            whole[..., -1] &= ~as_written | (before[..., -1] % tile_columns == 0)
        around = (after > 1).sum(axis=-1, keepdims=True) - (after > 1)
        broken = (gathered & ~later & ~whole & (around > 1)).any(axis=-1)
        return np.stack([broken, broken | scattered])
