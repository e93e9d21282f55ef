"""The file format of the ASPLOS/EuroSys 2025 contest on intra-operator parallelism, as arrays; JSON, gzipped or not.

    {"problem": {"name": "A",
                 "nodes": {"costs": [[15, 55], [45]], "usages": [[10, 25], [1]], "intervals": [[0, 5], [2, 3]]},
                 "edges": {"nodes": [[0, 1]], "costs": [[30, 40]]},
                 "usage_limit": 50}}

https://github.com/asplos-contest/2025/blob/main/IOPDDL.md: a node has costs and bytes per option, and one half-open
interval in which it holds them; an edge has one cost per pair of options, those of the second node varying fastest. A
cost of 1e18 or more stands for infinity, and a problem without `usage_limit` has none. `names` of nodes, one string
each, are an addition of ours, which other readers pass over.
"""

from __future__ import annotations

import gzip
import json
import warnings
import zlib
from collections.abc import Sequence
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autoshard.errors import SolverError

FORBIDDEN = 10**18  # stands for an infinite cost
INT64 = np.iinfo(np.int64)
TABLE = "autoshard.solver.contest: table"  # key of what stands for a table that was cut out of the text


class RaggedRows(NamedTuple):
    """Rows of numbers, each of its own length."""

    values: np.ndarray  # [numbers], int64 or float64
    lengths: np.ndarray  # [rows]

    @property
    def offsets(self) -> np.ndarray:
        """Where rows start in `values`, and where the last one ends; [rows + 1]."""
        return np.append(0, self.lengths.cumsum())

    def split(self) -> list[np.ndarray]:
        """The rows, as views.

        >>> RaggedRows(np.array([1, 2, 3]), np.array([2, 1])).split()
        [array([1, 2]), array([3])]
        """
        offsets = self.offsets.tolist()
        return [self.values[start:end] for start, end in pairwise(offsets)]


class ContestProblem(NamedTuple):
    """What a file says. Rows are as many and as long as others want them to be; numbers are as they stand there."""

    costs: RaggedRows  # node -> option -> float64 cost; inf: forbidden
    usages: RaggedRows  # node -> option -> bytes
    intervals: np.ndarray  # [nodes, 2], int64
    pairs: np.ndarray  # [edges, 2], int64: the nodes that an edge joins, all of which there are
    tables: RaggedRows  # edge -> options of the first node times options of the second -> float64 cost; inf: forbidden
    limit: float | None
    names: tuple[str, ...]  # per node, or none


def read(path: Path) -> ContestProblem:
    """Reads a file, gzipped or not.

    Raises:
        SolverError: the file is no such JSON, or rows are too few, too long, or hold what they should not; with the
            place.
    """
    nodes, edges, limit = _sections(_decode(_read_bytes(path)))
    costs = _costs(_table(nodes, "nodes", "costs"), "node")
    count = len(costs.lengths)
    if not count:
        raise SolverError("there are no nodes")
    if not costs.lengths.all():
        raise SolverError(f"node {costs.lengths.argmin()} has no options")
    usages = _table(nodes, "nodes", "usages")
    intervals = _whole(_table(nodes, "nodes", "intervals"), "node", "interval")
    for name, rows in (("usages", usages), ("intervals", intervals)):
        if len(rows.lengths) != count:
            raise SolverError(f"nodes.{name} has {len(rows.lengths)} rows; there are {count} rows of costs")
    _expect(usages.lengths, costs.lengths, "node", "usages; it has {} options")
    _expect(intervals.lengths, np.full(count, 2), "node", "numbers as its interval; {} are needed")
    pairs = _whole(_table(edges, "edges", "nodes"), "edge", "node number")
    tables = _costs(_table(edges, "edges", "costs"), "edge")
    if len(pairs.lengths) != len(tables.lengths):
        counts = f"edges.nodes has {len(pairs.lengths)} rows, edges.costs {len(tables.lengths)}"
        raise SolverError(f"{counts}; an edge needs one of each")
    _expect(pairs.lengths, np.full(len(pairs.lengths), 2), "edge", "nodes; it joins {}")
    ends = pairs.values.reshape(-1, 2)
    absent = np.flatnonzero(((ends < 0) | (ends >= count)).any(axis=1))
    if len(absent):
        i, j = ends[absent[0]]
        raise SolverError(f"edge {absent[0]} ({i}, {j}) joins a node that does not exist; there are {count}")
    _expect(tables.lengths, costs.lengths[ends].prod(axis=1), "edge", "costs; its nodes have {} pairs of options")
    names = nodes.get("names", [])
    if not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise SolverError("nodes.names has to be a list of strings")
    return ContestProblem(costs, usages, intervals.values.reshape(-1, 2), ends, tables, _limit(limit), tuple(names))


def write(path: Path, contest: ContestProblem) -> None:
    """Writes a file, gzipped if its name ends in .gz; the same bytes each time.

    Raises:
        SolverError: a cost is finite and would be read as infinite, or the file cannot be written.
    """
    nodes = {
        "costs": [_cost_row(row) for row in contest.costs.split()],
        "intervals": contest.intervals.tolist(),
        "usages": [row.tolist() for row in contest.usages.split()],
    }
    if contest.names:
        nodes["names"] = list(contest.names)
    edges = {"costs": [_cost_row(row) for row in contest.tables.split()], "nodes": contest.pairs.tolist()}
    problem: dict[str, Any] = {"edges": edges, "name": path.name.split(".")[0], "nodes": nodes}
    if contest.limit is not None:
        problem["usage_limit"] = int(contest.limit) if contest.limit == int(contest.limit) else contest.limit
    data = json.dumps({"problem": problem}, separators=(",", ":")).encode()
    try:
        path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    except OSError as error:
        raise SolverError(f"cannot be written: {error}") from error


def _cost_row(row: np.ndarray) -> list[float]:
    finite = np.isfinite(row)
    if (row[finite] >= FORBIDDEN).any():
        raise SolverError(f"a cost is {row[finite].max():g}; from {FORBIDDEN:g} on it would be read as infinite")
    row = np.where(finite, row, FORBIDDEN)
    whole = (row == np.floor(row)).all() and row.min() > -FORBIDDEN
    return row.astype(np.int64).tolist() if whole else row.tolist()


def _read_bytes(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        return gzip.decompress(data) if data.startswith(b"\x1f\x8b") else data
    except (OSError, EOFError, zlib.error) as error:
        raise SolverError(f"cannot be read: {error}") from error


def _decode(data: bytes) -> Any:
    """The content of JSON text, in which tables of whole numbers may be `RaggedRows` instead of lists of lists.

    Such tables are nearly all of a large file. Read by themselves they take a third of the time and memory.
    """
    rest, tables = _cut(data)

    def restore(found: dict[str, Any]) -> Any:
        return tables.get(found[TABLE], found) if list(found) == [TABLE] else found

    if tables:
        try:
            return json.loads(rest, object_hook=restore)
        except (ValueError, TypeError, RecursionError):
            pass  # a text in it looked like a table, or it is not JSON
    try:
        return json.loads(data)
    except ValueError as error:
        raise SolverError(f"is not JSON: {error}") from error
    except RecursionError as error:
        raise SolverError("is nested too deeply for a contest problem") from error


def _cut(data: bytes) -> tuple[bytes, dict[int, RaggedRows]]:
    """The text with the tables that stand behind a colon, in as few characters as can be, replaced by numbers."""
    rest: list[bytes] = []
    tables: dict[int, RaggedRows] = {}
    done = 0
    start = data.find(b":[[")
    while start >= 0:
        end = data.find(b"]]", start)
        rows = _scan(data[start + 3 : end]) if end >= 0 else None
        if rows is not None:
            rest += [data[done : start + 1], json.dumps({TABLE: len(tables)}).encode()]
            tables[len(tables)] = rows
            done = end + 2
        start = data.find(b":[[", max(start + 3, done))
    rest.append(data[done:])
    return b"".join(rest), tables


def _scan(text: bytes) -> RaggedRows | None:
    r"""The rows that a text like ``1,2],[3`` lists; None if there is anything but whole numbers in them.

    >>> _scan(b"1,2],[3")
    RaggedRows(values=array([1, 2, 3]), lengths=array([2, 1]))
    """
    rows = text.translate(None, b"-0123456789").split(b"],[")
    if any(row.strip(b",") for row in set(rows)):
        return None
    lengths = np.fromiter(map(len, rows), np.int64, len(rows)) + 1
    text = text.translate(bytes.maketrans(b"[]", b"  "))
    digits = np.frombuffer(text, np.uint8) >= ord("0")
    if np.count_nonzero(digits[1:] > digits[:-1]) + digits[:1].sum() != lengths.sum():  # some number is missing
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("error", DeprecationWarning)  # for text that is no number
        try:
            values = np.fromstring(text, dtype=np.int64, sep=",")
        except (ValueError, DeprecationWarning):
            return None
    exact = len(values) == lengths.sum() and values.max() < INT64.max and values.min() > INT64.min
    return RaggedRows(values, lengths) if exact else None


def _sections(content: Any) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Nodes, edges and the limit."""
    problem = _member(content, "the file", "problem")
    sections = _member(problem, "problem", "nodes"), _member(problem, "problem", "edges")
    for name, section in zip(("nodes", "edges"), sections, strict=True):
        if not isinstance(section, dict):
            raise SolverError(f"{name} is {_kind(section)}, where an object is needed")
    return *sections, problem.get("usage_limit")


def _member(content: Any, name: str, key: str) -> Any:
    if not isinstance(content, dict):
        raise SolverError(f"{name} is {_kind(content)}, where an object is needed")
    if key not in content:
        raise SolverError(f"{name} has no '{key}'")
    return content[key]


def _table(section: dict[str, Any], name: str, key: str) -> RaggedRows:
    """The rows under a key."""
    table, place = _member(section, name, key), f"{name}.{key}"
    if isinstance(table, RaggedRows):
        return table
    if not isinstance(table, list):
        raise SolverError(f"{place} is {_kind(table)}, where a list of lists is needed")
    for row, numbers in enumerate(table):
        if not isinstance(numbers, list):
            raise SolverError(f"{place}[{row}] is {_kind(numbers)}, where a list of numbers is needed")
    types = set(map(type, chain.from_iterable(table)))
    if not types <= {int, float}:
        row, value = next((k, v) for k, row in enumerate(table) for v in row if type(v) not in (int, float))
        raise SolverError(f"{place}[{row}] holds {_kind(value)}, where a number is needed")
    lengths = np.fromiter(map(len, table), np.int64, len(table))
    try:
        if types == {int}:
            return RaggedRows(np.fromiter(chain.from_iterable(table), np.int64, lengths.sum()), lengths)
    except OverflowError:
        pass
    try:
        return RaggedRows(np.fromiter(chain.from_iterable(table), np.float64, lengths.sum()), lengths)
    except OverflowError as error:
        raise SolverError(f"{place} holds a number beyond 1e308") from error


def _kind(value: Any) -> str:
    """What JSON calls a value."""
    names = {dict: "an object", RaggedRows: "a list", list: "a list", str: "a string", bool: "true or false"}
    return names.get(type(value), "null" if value is None else "a number")


def _expect(lengths: np.ndarray, expected: np.ndarray, kind: str, message: str) -> None:
    """Refuses rows that are not as long as they must be."""
    wrong = np.flatnonzero(lengths != expected)
    if len(wrong):
        raise SolverError(f"{kind} {wrong[0]} has {lengths[wrong[0]]} {message.format(expected[wrong[0]])}")


def _refuse(rows: RaggedRows, wrong: np.ndarray, kind: str, message: str) -> None:
    """Refuses numbers that are wrong, with the row of the first."""
    if wrong.any():
        first = int(wrong.argmax())
        row = int(np.searchsorted(rows.offsets, first, side="right")) - 1
        raise SolverError(f"{kind} {row}: {message.format(rows.values[first])}")


def _costs(rows: RaggedRows, kind: str) -> RaggedRows:
    values = rows.values.astype(np.float64)
    _refuse(rows, ~np.isfinite(values), kind, "a cost is {}; a number is needed, 1e18 for what is forbidden")
    values[values >= FORBIDDEN] = np.inf
    return RaggedRows(values, rows.lengths)


def _whole(rows: RaggedRows, kind: str, what: str) -> RaggedRows:
    if rows.values.dtype == np.int64:
        return rows
    fit = np.abs(rows.values) < 2.0**63  # false for NaN
    whole = fit & (np.floor(rows.values, where=fit, out=np.zeros_like(rows.values)) == rows.values)
    _refuse(rows, ~whole, kind, what + " {}; a whole number of 64 bits is needed")
    return RaggedRows(rows.values.astype(np.int64), rows.lengths)


def _limit(limit: Any) -> float | None:
    if limit is None:
        return None
    if type(limit) not in (int, float):
        raise SolverError(f"usage_limit is {_kind(limit)}, where a number is needed")
    if not 0 <= limit < 2**63:  # NaN compares false
        raise SolverError(f"usage_limit is {limit} bytes; 0 or more are needed, fewer than 2**63")
    return limit


def rows_of(arrays: Sequence[np.ndarray], dtype: type) -> RaggedRows:
    """Arrays as rows.

    >>> rows_of([np.array([[1, 2], [3, 4]]), np.array([5])], np.float64)
    RaggedRows(values=array([1., 2., 3., 4., 5.]), lengths=array([4, 1]))
    """
    lengths = np.fromiter((array.size for array in arrays), np.int64, len(arrays))
    return RaggedRows(np.concatenate([np.zeros(0, dtype), *(array.ravel() for array in arrays)]), lengths)
