"""Contest files: what they say is read, what is written is read again, what is wrong is said with its place."""

from __future__ import annotations

import copy
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import answer, assert_same, random_problem

from autoshard.errors import SolverError
from autoshard.solver import Problem
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.problem import Edge, Live

CONTEST = {
    "problem": {
        "name": "tiny",
        "nodes": {
            "intervals": [[0, 5], [2, 2]],
            "costs": [[15, 55, 65], [45, 10**18]],
            "usages": [[10, 25, 30], [1, 2]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[30, 40, 20, 10**18, 5, 6]]},
        "usage_limit": 50,
    }
}
COMPACT, SPACED = (",", ":"), (", ", ": ")  # tables of the first kind are read in another way


def text_of(content: Any, separators: tuple[str, str] = COMPACT) -> bytes:
    return json.dumps(content, separators=separators).encode()


def arrays_of(problem: Problem) -> list[Any]:
    """All that a problem says, as lists."""
    return [
        [costs.tolist() for costs in problem.costs],
        [(edge.i, edge.j, edge.costs.tolist()) for edge in problem.edges],
        [(live.node, live.start, live.end, live.usage.tolist()) for live in problem.lives],
        problem.limit,
        problem.names,
    ]


def read(path: Path, data: bytes) -> list[Any] | str:
    """What is read, or the message without the path."""
    path.write_bytes(data)
    try:
        return arrays_of(Problem.read(path))
    except SolverError as error:
        assert str(error).startswith(f"{path}: ") and "\n" not in str(error)
        return str(error).removeprefix(f"{path}: ")


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
def test_read(tmp_path, suffix, separators):
    path = tmp_path / f"tiny{suffix}"
    data = text_of(CONTEST, separators)
    path.write_bytes(gzip.compress(data) if suffix.endswith("gz") else data)
    problem = Problem.read(path)
    np.testing.assert_array_equal(problem.costs[1], [45, np.inf])
    np.testing.assert_array_equal(problem.edges[0].costs, [[30, 40], [20, np.inf], [5, 6]])
    assert problem.limit == 50
    (live,) = problem.lives  # the other one is empty
    assert (live.node, live.start, live.end, live.usage.tolist()) == (0, 0, 5, [10, 25, 30])


def changed(place: str, value: Any) -> dict[str, Any]:
    """The file with another value at a place like ``nodes.costs.0``; `delete` and `append` change what is there."""
    content = copy.deepcopy(CONTEST)
    *way, last = [int(key) if key.isdigit() else key for key in place.split(".")]
    parent = content
    for key in way:
        parent = parent[key]
    if value is DELETE:
        del parent[last]
    else:
        parent[last] = value
    return content


DELETE = object()
NODES, EDGES = "problem.nodes", "problem.edges"
MALFORMED = [  # place, what stands there, message
    ("problem", DELETE, "the file has no 'problem'"),
    ("problem", [], "problem is a list, where an object is needed"),
    ("problem.nodes", DELETE, "problem has no 'nodes'"),
    ("problem.nodes", "many", "nodes is a string, where an object is needed"),
    ("problem.edges", DELETE, "problem has no 'edges'"),
    ("problem.edges", None, "edges is null, where an object is needed"),
    (f"{NODES}.costs", DELETE, "nodes has no 'costs'"),
    (f"{NODES}.costs", {}, "nodes.costs is an object, where a list of lists is needed"),
    (f"{NODES}.costs", [], "there are no nodes"),
    (f"{NODES}.costs.1", 7, "nodes.costs[1] is a number, where a list of numbers is needed"),
    (f"{NODES}.costs.1", [], "node 1 has no options"),
    (f"{NODES}.costs.1.0", "7", "nodes.costs[1] holds a string, where a number is needed"),
    (f"{NODES}.costs.1.0", None, "nodes.costs[1] holds null, where a number is needed"),
    (f"{NODES}.costs.1.0", True, "nodes.costs[1] holds true or false, where a number is needed"),
    (f"{NODES}.costs.1.0", [7], "nodes.costs[1] holds a list, where a number is needed"),
    (f"{NODES}.costs.1.0", np.nan, "node 1: a cost is nan; a number is needed, 1e18 for what is forbidden"),
    (f"{NODES}.costs.1.0", np.inf, "node 1: a cost is inf; a number is needed, 1e18 for what is forbidden"),
    (f"{NODES}.costs.1.0", -np.inf, "node 1: a cost is -inf; a number is needed, 1e18 for what is forbidden"),
    (f"{NODES}.costs.1.0", 10**400, "nodes.costs holds a number beyond 1e308"),
    (f"{NODES}.costs.1.0", -(10**308), None),
    (f"{NODES}.costs.1", [-1e308, -1e308], "costs are so large that their sum is beyond 1e308"),
    (f"{NODES}.costs.1", [1, 2, 3], "node 1 has 2 usages; it has 3 options"),
    (f"{NODES}.usages", DELETE, "nodes has no 'usages'"),
    (f"{NODES}.usages", [[1, 2, 3]], "nodes.usages has 1 rows; there are 2 rows of costs"),
    (f"{NODES}.usages.0", [1, 2], "node 0 has 2 usages; it has 3 options"),
    (f"{NODES}.usages.0.1", -1, "node 0: usage [10 -1 30] bytes; finite, 0 or more is needed"),
    (f"{NODES}.usages.0.1", np.nan, "node 0: usage [10. nan 30.] bytes; finite, 0 or more is needed"),
    (f"{NODES}.usages.0.1", np.inf, "node 0: usage [10. inf 30.] bytes; finite, 0 or more is needed"),
    (f"{NODES}.usages.0.1", "3GiB", "nodes.usages[0] holds a string, where a number is needed"),
    (f"{NODES}.usages.0.1", 2**63, "lives may hold 2**63 bytes or more together"),
    (f"{NODES}.usages.0.1", 2**80, "lives may hold 2**63 bytes or more together"),
    (f"{NODES}.intervals", DELETE, "nodes has no 'intervals'"),
    (f"{NODES}.intervals", [[0, 5]], "nodes.intervals has 1 rows; there are 2 rows of costs"),
    (f"{NODES}.intervals.0", [5, 0], "node 0: live from 5 to 0, which is earlier"),
    (f"{NODES}.intervals.1", [5, 0], "node 1: live from 5 to 0, which is earlier"),
    (f"{NODES}.intervals.1", [2], "node 1 has 1 numbers as its interval; 2 are needed"),
    (f"{NODES}.intervals.1", [1, 2, 3], "node 1 has 3 numbers as its interval; 2 are needed"),
    (f"{NODES}.intervals.1", 3, "nodes.intervals[1] is a number, where a list of numbers is needed"),
    (f"{NODES}.intervals.1", [1.5, 2], "node 1: interval 1.5; a whole number of 64 bits is needed"),
    (f"{NODES}.intervals.1", [1, np.inf], "node 1: interval inf; a whole number of 64 bits is needed"),
    (f"{NODES}.intervals.1", [1, np.nan], "node 1: interval nan; a whole number of 64 bits is needed"),
    (f"{NODES}.intervals.1", [1, 2**63], "node 1: interval 9.223372036854776e+18; a whole"),
    (f"{NODES}.names", [["w"], ["x"]], "nodes.names has to be a list of strings"),
    (f"{NODES}.names", ["w"], "1 names for 2 nodes"),
    (f"{EDGES}.nodes", DELETE, "edges has no 'nodes'"),
    (f"{EDGES}.nodes", [], "edges.nodes has 0 rows, edges.costs 1; an edge needs one of each"),
    (f"{EDGES}.nodes.0", [0, 7], "edge 0 (0, 7) joins a node that does not exist; there are 2"),
    (f"{EDGES}.nodes.0", [-1, 0], "edge 0 (-1, 0) joins a node that does not exist; there are 2"),
    (f"{EDGES}.nodes.0", [0], "edge 0 has 1 nodes; it joins 2"),
    (f"{EDGES}.nodes.0", [0, 1, 1], "edge 0 has 3 nodes; it joins 2"),
    (f"{EDGES}.nodes.0", [0, 0.5], "edge 0: node number 0.5; a whole number of 64 bits is needed"),
    (f"{EDGES}.nodes.0", ["0", "1"], "edges.nodes[0] holds a string, where a number is needed"),
    (f"{EDGES}.costs", DELETE, "edges has no 'costs'"),
    (f"{EDGES}.costs", [], "edges.nodes has 1 rows, edges.costs 0; an edge needs one of each"),
    (f"{EDGES}.costs.0", [1, 2, 3, 4, 5], "edge 0 has 5 costs; its nodes have 6 pairs of options"),
    (f"{EDGES}.costs.0", [[1, 2], [3, 4], [5, 6]], "edges.costs[0] holds a list, where a number is needed"),
    (f"{EDGES}.costs.0.2", np.nan, "edge 0: a cost is nan; a number is needed, 1e18 for what is forbidden"),
    (f"{EDGES}.costs.0.2", -np.inf, "edge 0: a cost is -inf; a number is needed, 1e18 for what is forbidden"),
    ("problem.usage_limit", -1, "usage_limit is -1 bytes; 0 or more are needed, fewer than 2**63"),
    ("problem.usage_limit", np.nan, "usage_limit is nan bytes; 0 or more are needed, fewer than 2**63"),
    ("problem.usage_limit", np.inf, "usage_limit is inf bytes; 0 or more are needed, fewer than 2**63"),
    ("problem.usage_limit", "50GB", "usage_limit is a string, where a number is needed"),
    ("problem.usage_limit", True, "usage_limit is true or false, where a number is needed"),
]


@pytest.mark.parametrize("separators", [COMPACT, SPACED])
@pytest.mark.parametrize("place, value, message", MALFORMED)
def test_malformed(tmp_path, place, value, message, separators):
    found = read(tmp_path / "bad.json", text_of(changed(place, value), separators))
    if message is None:
        assert not isinstance(found, str)
    else:
        assert isinstance(found, str) and message in found


def test_self_edges_are_refused(tmp_path):
    content = changed(f"{EDGES}.nodes", [[1, 1]])
    content["problem"]["edges"]["costs"] = [[0, 1, 2, 3]]
    assert read(tmp_path / "bad.json", text_of(content)).startswith("edge 0 (1, 1) must join two different nodes")


@pytest.mark.parametrize(
    "data, message",
    [
        (b"", "is not JSON"),
        (b"[1, 2", "is not JSON"),
        (b"[]", "the file is a list, where an object is needed"),
        (b"7", "the file is a number, where an object is needed"),
        (b"\xff\xfe\xfd", "is not JSON"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"problem":' * 100_000, "is nested too deeply"),
        (text_of(CONTEST)[:-20], "is not JSON"),
        (text_of(CONTEST).replace(b"55", b"5-5"), "is not JSON"),
        (text_of(CONTEST).replace(b"55", b""), "is not JSON"),
        (text_of(CONTEST).replace(b"55", b"1" * 5000), "is not JSON"),
        (gzip.compress(text_of(CONTEST), mtime=0)[:-20], "cannot be read"),
        (gzip.compress(text_of(CONTEST), mtime=0)[:40] + b"\0" * 20, "cannot be read"),
        (gzip.compress(b"no", mtime=0), "is not JSON"),
        (text_of(CONTEST).replace(b"55", b"-"), "is not JSON"),
        (text_of(CONTEST).replace(b"[45,", b"[45,],[,"), "is not JSON"),
        (text_of(CONTEST).replace(b"15,55", b",5-5"), "is not JSON"),
    ],
)
def test_not_a_file_of_this_kind(tmp_path, data, message):
    assert message in read(tmp_path / "bad.json.gz", data)


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "none" / "none.json"):
        with pytest.raises(SolverError, match=r"cannot be read"):
            Problem.read(path)
    with pytest.raises(SolverError, match=r"none.json: cannot be written"):
        random_problem(0).write(tmp_path / "none" / "none.json")


def test_texts_that_look_like_tables(tmp_path):
    content = changed("problem.name", "a:[[1,2],[3]]")
    content["problem"]["nodes"]["names"] = ["w:[[1,2]]", '":[[7]]']
    assert read(tmp_path / "odd.json", text_of(content)) == read(tmp_path / "odd.json", text_of(content, SPACED))
    assert Problem.read(tmp_path / "odd.json").names == ("w:[[1,2]]", '":[[7]]')


@pytest.mark.parametrize("suffix", [".json", ".json.gz"])
@pytest.mark.parametrize(
    "problem",
    [
        Problem((np.array([1.0, np.inf]),), (), (), None),
        Problem((np.array([0.1, -2.5]), np.array([1e-9])), (), (Live(1, 3, 5, np.array([7])),), 8, ("w", "x")),
        Problem(
            (np.zeros(2), np.zeros(1)),
            (Edge(0, 1, np.array([[1.5], [np.inf]])), Edge(1, 0, np.array([[2.0, 1 / 3]]))),
            (Live(0, -2, 5, np.array([0.5, 7])), Live(1, 0, 1, np.array([0]))),
            7.25,
        ),
    ],
)
def test_what_the_format_can_hold_is_the_same_again(tmp_path, problem, suffix):
    path = tmp_path / f"same{suffix}"
    problem.write(path)
    assert arrays_of(Problem.read(path)) == arrays_of(problem)
    before = path.read_bytes()
    Problem.read(path).write(path)
    assert path.read_bytes() == before
    assert before.startswith(b"\x1f\x8b") == suffix.endswith("gz")


def test_several_lives_keep_the_optimum(tmp_path):
    path = tmp_path / "problem.json"
    kinds = set()
    for seed in range(300):
        problem = random_problem(seed, nodes=4, options=3)
        problem.write(path)
        again = Problem.read(path)
        kinds.add(expected := answer(exhaustive, problem))
        assert_same(answer(exhaustive, again), expected)
        if expected[0] == "costs":  # the file's choice begins with one of the problem
            choice = exhaustive(again).choice[: len(problem.costs)]
            assert_same(("costs", exhaustive(problem).cost), ("costs", answer_of(problem, choice)))
    assert {kind for kind, _ in kinds} == {"costs", "needs", "forbidden"}


def answer_of(problem: Problem, choice: tuple[int, ...]) -> float:
    """What a choice costs; it has to fit."""
    return exhaustive(problem.restrict({node: [option] for node, option in enumerate(choice)})).cost


def test_further_lives_are_named(tmp_path):
    lives = (Live(0, 0, 1, np.array([1])), Live(0, 2, 3, np.array([1])), Live(0, 4, 4, np.array([1])))
    Problem((np.zeros(1),), (), lives, None, ("w",)).write(tmp_path / "p.json")
    assert Problem.read(tmp_path / "p.json").names == ("w", "w (2 to 3)")


@pytest.mark.parametrize("cost", [1e18, 1e300])
def test_costs_that_would_be_read_as_infinite(tmp_path, cost):
    with pytest.raises(SolverError, match=r"p.json: a cost is .*; from 1e\+18 on it would be read as infinite"):
        Problem((np.array([cost]),), (), (), None).write(tmp_path / "p.json")


large = st.sampled_from([10**18, 2**63, -(2**63), 10**400])
numbers = st.one_of(st.integers(-3, 70), st.integers(), st.floats(), large)
# Each kind of character that JSON writes in a way of its own. hypothesis takes seconds to list all that there are.
texts = st.text('a1-.,:[]{} "\\/\n\x00\x7f\xe9\u2028\ufffe\U0001f600', max_size=3)
values = st.recursive(
    st.one_of(numbers, st.none(), st.booleans(), texts),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(texts, inner, max_size=2)),
    max_leaves=6,
)


def places(content: Any) -> list[Callable[[Any], None]]:
    """Functions that put another value into one place of the content, for each place."""
    items = content.items() if isinstance(content, dict) else enumerate(content) if isinstance(content, list) else ()
    found = []
    for key, inner in items:
        found.append(lambda value, key=key: content.__setitem__(key, value))
        found += places(inner)
    return found


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_value_anywhere(tmp_path_factory, data):
    """Nothing but a SolverError is raised, and the two ways of reading a table agree."""
    content = copy.deepcopy(CONTEST)
    for _ in range(data.draw(st.integers(1, 2))):
        data.draw(st.sampled_from(places(content)))(data.draw(values))
    path = tmp_path_factory.mktemp("fuzz") / "p.json"
    assert repr(read(path, text_of(content))) == repr(read(path, text_of(content, SPACED)))


@settings(max_examples=400, deadline=None)
@given(st.data(), st.booleans())
def test_any_bytes(tmp_path_factory, data, zipped):
    """Nothing but a SolverError is raised for a file with a few bytes that are wrong, missing or too many."""
    whole = text_of(CONTEST)
    whole = gzip.compress(whole) if zipped else whole
    start = data.draw(st.integers(0, len(whole)))
    end = data.draw(st.integers(start, min(start + 5, len(whole))))
    wrong = data.draw(st.one_of(st.binary(max_size=4), st.sampled_from([b"]", b"],[", b"-", b",", b"[[1]]", b"1e999"])))
    read(tmp_path_factory.mktemp("fuzz") / "p.json", whole[:start] + wrong + whole[end:])
