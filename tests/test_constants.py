"""Every number that has a name says what it counts and in which unit, and no name of a number has two meanings."""

import ast
import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from documents import ROOT

PACKAGE = ROOT / "autoshard"
PLAIN = {"0", "1", "0.0", "1.0"}  # which need no unit: none of it, all of it, the first


class Constant(NamedTuple):
    """A number with a name, of a module or by default of a class."""

    file: str
    line: int
    name: str
    value: str
    comment: str  # what stands behind it, or above the numbers without comments among which it stands
    is_field: bool


def is_number(value: ast.expr | None) -> bool:
    if isinstance(value, ast.UnaryOp):
        return is_number(value.operand)
    if isinstance(value, ast.BinOp):
        return is_number(value.left) and is_number(value.right)
    return isinstance(value, ast.Constant) and type(value.value) in (int, float)


def comment_of(lines: list[str], first: int, last: int) -> str:
    """What is said of lines `first` to `last`, counted from 1."""
    behind = " ".join(line.split("#", 1)[1].strip() for line in lines[first - 1 : last] if "#" in line)
    if behind:
        return behind
    for line in reversed(lines[: first - 1]):
        if line.strip().startswith("#"):
            return line.strip(" #")
        if "#" in line or "=" not in line:
            return ""
    return ""


def constants_of(text: str, file: str) -> Iterator[Constant]:
    lines, tree = text.splitlines(), ast.parse(text)
    bodies = [(tree.body, False), *((node.body, True) for node in tree.body if isinstance(node, ast.ClassDef))]
    for body, is_field in bodies:
        for node in body:
            named = (
                node.targets
                if isinstance(node, ast.Assign)
                else [node.target]
                if isinstance(node, ast.AnnAssign)
                else []
            )
            if len(named) == 1 and isinstance(named[0], ast.Name) and is_number(node.value):
                said = comment_of(lines, node.lineno, node.end_lineno)
                yield Constant(file, node.lineno, named[0].id, ast.unparse(node.value), said, is_field)


@pytest.fixture(scope="module")
def constants():
    paths = sorted(PACKAGE.rglob("*.py"))
    return [one for path in paths for one in constants_of(path.read_text(), str(path.relative_to(PACKAGE)))]


def unsaid(constants: list[Constant]) -> list[str]:
    """The numbers of which nothing is said."""
    return [f"{one.file}:{one.line} {one.name}" for one in constants if not one.comment and one.value not in PLAIN]


def with_two_meanings(constants: list[Constant]) -> dict[str, list[str]]:
    """Names that several modules give to numbers of which they say different things, and these modules."""
    meanings: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for one in constants:
        if not one.is_field:
            meanings[one.name][one.comment].append(one.file)
    return {name: [*itertools.chain(*said.values())] for name, said in meanings.items() if len(said) > 1}


def test_every_number_says_what_it_is(constants):
    assert len(constants) > 300
    assert unsaid(constants) == []


def test_no_name_has_two_meanings(constants):
    assert with_two_meanings(constants) == {}


PLANTED = """
MUCH = 200_000  # entries of a table
# Seconds of a quiet core: per node and per edge.
PER_NODE = 1e-6
PER_EDGE = 2e-6

SHARE = 0.12

class Settings:
    most: int = 1 << 14
    least: int = 0
"""


def test_numbers_of_which_nothing_is_said_are_found():
    assert unsaid([*constants_of(PLANTED, "planted.py")]) == ["planted.py:7 SHARE", "planted.py:10 most"]


def test_a_name_with_two_meanings_is_found():
    other = "MUCH = 0.12  # of the limit\nPER_NODE = 2  # edges\nclass Settings:\n    most: int = 3  # nodes\n"
    both = [*constants_of(PLANTED, "one.py"), *constants_of(other, "other.py"), *constants_of(PLANTED, "third.py")]
    expected = {"MUCH": ["one.py", "third.py", "other.py"], "PER_NODE": ["one.py", "third.py", "other.py"]}
    assert with_two_meanings(both) == expected
