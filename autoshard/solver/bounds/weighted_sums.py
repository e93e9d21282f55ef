"""Weighted sums of a vector's entries, row by row: a sparse matrix times it, small ones without SciPy."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy import sparse

# Entries up to which NumPy takes at most twice as long as SciPy: 18 and 10 us for so many, on one core. To import
# SciPy's sparse matrices takes 0.17 s, as long as a small step is planned.
MOST_WITHOUT_SCIPY = 4000


class WeightedSums:
    """A sparse matrix.

    >>> WeightedSums(np.array([0, 1, 1]), np.array([0, 0, 2]), np.array([1.0, 3.0, 10.0]), (2, 3)) @ np.array([5, 6, 7])
    array([ 5., 85.])
    """

    def __init__(self, rows: np.ndarray, columns: np.ndarray, weights: np.ndarray, shape: tuple[int, int]):
        """
        Args:
            rows: [entry]: its row. Entries stand row by row and by columns within rows, of each place one at most.
            columns: as `weights`, likewise.
        """
        self.rows, self.columns, self.weights, self.shape = rows, columns, weights, shape

    @functools.cached_property
    def _sparse(self) -> sparse.csr_array:
        from scipy import sparse  # takes longer to import than the rest of autoshard

        return sparse.csr_array((self.weights, (self.rows, self.columns)), shape=self.shape)

    def __matmul__(self, vector: np.ndarray) -> np.ndarray:
        if len(self.rows) > MOST_WITHOUT_SCIPY:
            return self._sparse @ vector
        return np.bincount(self.rows, self.weights * vector[self.columns], minlength=self.shape[0])

    def part(self, rows: slice) -> WeightedSums:
        """Some of the rows."""
        begin, end = np.searchsorted(self.rows, (rows.start, rows.stop))
        of = slice(begin, end)
        shape = rows.stop - rows.start, self.shape[1]
        return WeightedSums(self.rows[of] - rows.start, self.columns[of], self.weights[of], shape)
