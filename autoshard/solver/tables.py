"""Cost tables of edges, taken apart and put together; what is found once for equal tables."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from autoshard.solver.problem import Edge

TABLE_NOISE = 1e-12  # of the largest entry; what is smaller is noise from earlier sums
MOST_KEY_BYTES = 1 << 17  # of a call's arrays: larger ones repeat rarely, and take long to compare


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
        grid = largest * TABLE_NOISE
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
    rows, columns = classes(left), classes(right.T)  # strategies that leave an array alike have equal ones
    left, right = left[_firsts(rows)], right[:, _firsts(columns)]
    result = np.full((left.shape[0], right.shape[1]), np.inf)
    sums = np.empty_like(result)
    for x in range(left.shape[1]):
        np.minimum(result, np.add(left[:, x, None], right[x], out=sums), out=result)
    return result[np.ix_(rows, columns)]


def _firsts(numbers: np.ndarray) -> np.ndarray:
    """Of each class, the first row."""
    return np.unique(numbers, return_index=True)[1]


def summed(edges: Iterable[Edge]) -> dict[tuple[int, int], np.ndarray]:
    """Nodes, the lower number first -> the table of all edges that join them. Equal sums of the same are one object.

    >>> table = np.array([[1.0, 2.0]])
    >>> summed([Edge(0, 1, table), Edge(1, 0, table.T)])
    {(0, 1): array([[2., 4.]])}
    """
    parts: dict[tuple[int, int], list[tuple[np.ndarray, bool]]] = defaultdict(list)  # and whether it is turned
    for edge in edges:
        turned = edge.i > edge.j
        parts[(edge.j, edge.i) if turned else (edge.i, edge.j)].append((edge.costs, turned))
    sums: dict[tuple, np.ndarray] = {}
    tables = {}
    for pair, found in sorted(parts.items()):
        key = tuple((id(table), turned) for table, turned in found)
        if key not in sums:
            first, *others = (table.T if turned else table for table, turned in found)
            sums[key] = sum(others, first)
        tables[pair] = sums[key]
    return tables


class ArrayMemo:
    """What pure functions of arrays returned, by the arrays' entries: layers repeat, and so do their tables.

    Whoever asks shares the results.

    >>> memo = ArrayMemo()
    >>> first = memo.once(np.cumsum, np.ones(3))
    >>> memo.once(np.cumsum, np.ones(3)) is first
    True
    """

    def __init__(self) -> None:
        self._results: dict[tuple, Any] = {}

    def once(self, function: Callable[..., Any], *arrays: np.ndarray) -> Any:
        """What `function(*arrays)` returns; the arrays have 64-bit numbers."""
        if sum([array.nbytes for array in arrays]) > MOST_KEY_BYTES:
            return function(*arrays)
        key: tuple = (function, *[array.shape for array in arrays], *[array.tobytes() for array in arrays])
        if key not in self._results:
            self._results[key] = function(*arrays)
        return self._results[key]
