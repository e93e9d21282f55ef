"""Cost tables of edges, taken apart."""

from __future__ import annotations

import numpy as np

ROUNDING = 1e-12  # of the largest entry; what is smaller is noise from earlier sums


def split(table: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A table as ``rows[:, None] + columns + rest``, with the least of `rest` 0 in every row and column.

    A row (column) without a finite entry is inf in `rows` (`columns`) and in `rest`.

    >>> split(np.array([[5.0, 6.0], [7.0, 9.0]]))
    (array([5., 7.]), array([0., 1.]), array([[0., 0.],
           [0., 1.]]))
    """
    rows = table.min(axis=1)
    rest = table - np.where(np.isfinite(rows), rows, 0.0)[:, None]
    columns = rest.min(axis=0)
    rest -= np.where(np.isfinite(columns), columns, 0.0)
    largest = np.abs(table, where=np.isfinite(table), out=np.zeros_like(table)).max()
    if largest > 0:
        grid = largest * ROUNDING
        rest = np.round(rest / grid) * grid
    return rows, columns, rest


def classes(table: np.ndarray) -> np.ndarray:
    """Row -> number of its class of equal rows, in order of appearance.

    >>> classes(np.array([[1.0, 2.0], [3.0, 4.0], [1.0, 2.0]]))
    array([0, 1, 0])
    """
    seen: dict[bytes, int] = {}
    return np.array([seen.setdefault(row.tobytes(), len(seen)) for row in np.ascontiguousarray(table)])


def min_plus(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """``min over x of left[a, x] + right[x, b]``.

    >>> min_plus(np.array([[0.0, 5.0]]), np.array([[3.0], [1.0]]))
    array([[3.]])
    """
    result = np.full((left.shape[0], right.shape[1]), np.inf)
    for x in range(left.shape[1]):
        np.minimum(result, left[:, x, None] + right[x], out=result)
    return result
