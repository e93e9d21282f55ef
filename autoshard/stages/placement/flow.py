"""Minimum cuts of small directed graphs: which nodes stay with the source."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np

SOURCE, SINK = "source", "sink"
UNCUTTABLE = float("inf")  # the capacity of an edge that no cut may go through

_LARGEST_SUM = 2**20  # the sum of finite capacities in the units that SciPy counts in: its capacities have 32 bits


def source_side(edges: Mapping[tuple[Hashable, Hashable], float], *, is_largest: bool) -> tuple[set[Hashable], bool]:
    """A set of nodes with `SOURCE`, so that the edges that leave it have the least capacity in all.

    Args:
        edges: (from, to) -> capacity. Capacities are rounded to a millionth of their sum, and up.
        is_largest: whether of several such sets the largest is wanted, or the smallest.

    Returns:
        The nodes, and whether the cut goes through no edge of capacity `UNCUTTABLE`.

    >>> sorted(source_side({(SOURCE, "a"): 3, ("a", "b"): 1, ("b", SINK): 1}, is_largest=True)[0])
    ['a', 'b', 'source']
    """
    from scipy.sparse import coo_array  # here: SciPy's graphs take a quarter of the time to import autoshard
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    names = list(dict.fromkeys(name for edge in edges for name in edge) | {SOURCE: None, SINK: None})
    number = {name: i for i, name in enumerate(names)}
    finite = sum(capacity for capacity in edges.values() if capacity < UNCUTTABLE)
    unit = max(finite / _LARGEST_SUM, 1e-12)
    never = _LARGEST_SUM + 2 * len(edges) + 1
    capacities = [never if one == UNCUTTABLE else int(np.ceil(one / unit)) for one in edges.values()]
    ends = np.array([(number[a], number[b]) for a, b in edges], int).reshape(-1, 2)
    shape = len(names), len(names)
    graph = coo_array((np.array(capacities, np.int32), (ends[:, 0], ends[:, 1])), shape=shape).tocsr()
    found: Any = maximum_flow(graph, number[SOURCE], number[SINK])
    left = (graph - found.flow).tocsr()
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    is_possible = bool(found.flow_value < never)
    if not is_largest:
        reached = breadth_first_order(left, number[SOURCE], return_predecessors=False)
        return {names[i] for i in reached}, is_possible
    # Nodes from which the sink can still be reached are on its side in every such cut.
    reaching = breadth_first_order(left.T.tocsr(), number[SINK], return_predecessors=False)
    return set(names) - {names[i] for i in reaching}, is_possible
