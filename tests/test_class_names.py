"""A class is a noun of its own: none is named by a participle or a pronoun alone, and no two have one name."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable

import pytest
from documents import ROOT

NOUNS = {  # of the field, that end as participles do
    "Combining", "Indexing", "Lowering", "Numbering", "Ranking", "Resharding", "Rounding", "Seed", "Sorting", "Tiling",
}  # fmt: skip
OTHERS = {  # participles of another form, and pronouns
    "All", "Any", "Begun", "Born", "Bound", "Built", "Chosen", "Cut", "Drawn", "Each", "Every", "Found", "Given",
    "Gone", "Held", "It", "Kept", "Known", "Laid", "Left", "Lost", "Made", "Met", "Nothing", "One", "Others",
    "Paid", "Put", "Read", "Run", "Said", "Seen", "Sent", "Set", "Shown", "Something", "Spent", "Split", "Spread",
    "Sunk", "Taken", "That", "These", "This", "Those", "Told", "Unknown", "What", "Which", "Who", "Written",
}  # fmt: skip
# Names that two classes may share: one of them stands in code that `Plan.to_code` writes, in a namespace of its own.
PASTED = {"export/standalone.py", "export/written_out.py"}
ALSO_NOUNS = {"Cut", "Run", "Split"}  # of a graph; of a solver or an operation; of a call


def is_participle(name: str) -> bool:
    """Whether a class would be named by one word that is no noun.

    >>> [is_participle(name) for name in ("_Known", "Saved", "Making", "Resharding", "SavedPlan", "Split", "Edge")]
    [True, True, True, False, False, False, False]
    """
    word = name.strip("_")
    if len(re.findall(r"[A-Z][a-z0-9]*", word)) != 1 or word in NOUNS | ALSO_NOUNS:
        return False
    return word in OTHERS or re.search(r"[a-z](ed|ing)$", word) is not None


def classes(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_classes_are_nouns():
    files = sorted((ROOT / "autoshard").rglob("*.py"))
    found = {f"{path.relative_to(ROOT)}: {name}" for path in files for name in classes(path.read_text())}
    assert len(found) > 500
    assert {entry for entry in found if is_participle(entry.split(": ")[1])} == set()


@pytest.mark.parametrize("name", ["_Held", "Attended", "Nothing", "Leaving"])
def test_planted_participles_are_found(name):
    assert [*map(is_participle, classes(f"class {name}:\n    pass\n\nclass Plan{name.strip('_')}:\n    pass"))] == [
        True, False,
    ]  # fmt: skip


def shared_names(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Name of a class -> the files that have one of this name, where these are several. Pairs of file and name."""
    files = defaultdict(list)
    for file, name in named:
        files[name].append(file)
    return {name: places for name, places in files.items() if len(places) > 1}


def test_no_two_classes_have_one_name():
    package = ROOT / "autoshard"
    found = [
        (file, node.name)
        for path in sorted(package.rglob("*.py"))
        if (file := str(path.relative_to(package))) not in PASTED
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert len(found) > 500
    assert shared_names(found) == {}
    assert shared_names([*found, ("model/copied.py", found[0][1])]) == {found[0][1]: [found[0][0], "model/copied.py"]}
