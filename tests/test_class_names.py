"""A class is a noun of its own: none is named by a participle or a pronoun alone, and no two have one name.

None begins with a preposition, or ends in a participle or an adverb.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable

import pytest
from documents import ROOT

PACKAGE = ROOT / "autoshard"
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
PREPOSITIONS = {
    "After", "At", "Before", "Behind", "Beside", "Between", "By", "From", "In", "Of", "On", "Over", "Through", "Under",
    "With", "Within", "Without",
}  # fmt: skip
ADVERBS = {"Again", "Ahead", "Alone", "Apart", "Aside", "Early", "Elsewhere", "Here", "Late", "There", "Together", "Up"}
ALSO_NOUNS = {"Cut", "Run", "Split"}  # of a graph; of a solver or an operation; of a call


def is_no_noun(name: str) -> bool:
    """Whether a class would be named by one word that is no noun, or by several that do not end in one.

    >>> [is_no_noun(name) for name in ("_Known", "Saved", "Making", "TimeUp", "CutoffReached", "OnShards")]
    [True, True, True, True, True, True]
    >>> [is_no_noun(name) for name in ("Resharding", "SavedPlan", "Split", "Edge", "StackSharding", "CutChoice")]
    [False, False, False, False, False, False]
    """
    first, *others = re.findall(r"[A-Z][a-z0-9]*", name)
    if others:  # a word before makes a gerund or a short participle a noun, as in `StackSharding` and `LayoutSpread`
        return first in PREPOSITIONS or others[-1] in ADVERBS or re.search(r"[a-df-z]ed$", others[-1]) is not None
    if first in NOUNS | ALSO_NOUNS:
        return False
    return first in OTHERS | PREPOSITIONS | ADVERBS or re.search(r"[a-z](ed|ing)$", first) is not None


def classes(source: str) -> list[str]:
    return [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef)]


def test_classes_are_nouns():
    files = sorted(PACKAGE.rglob("*.py"))
    found = {f"{path.relative_to(PACKAGE)}: {name}" for path in files for name in classes(path.read_text())}
    assert len(found) > 500
    assert {entry for entry in found if is_no_noun(entry.split(": ")[1])} == {"export/standalone.py: OnShards"}


@pytest.mark.parametrize("name", ["_Held", "Attended", "Nothing", "Leaving", "SearchEnded", "AfterLoop", "_TooLate"])
def test_planted_participles_are_found(name):
    assert [*map(is_no_noun, classes(f"class {name}:\n    pass\n\nclass Plan:\n    pass"))] == [
        True, False,
    ]  # fmt: skip


def shared_names(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    """Name of a class -> the files that have one of this name, where these are several. Pairs of file and name."""
    files = defaultdict(list)
    for file, name in named:
        files[name].append(file)
    return {name: places for name, places in files.items() if len(places) > 1}


def test_no_two_classes_have_one_name():
    found = [
        (file, node.name)
        for path in sorted(PACKAGE.rglob("*.py"))
        if (file := str(path.relative_to(PACKAGE))) not in PASTED
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    assert len(found) > 500
    assert shared_names(found) == {}
    assert shared_names([*found, ("model/copied.py", found[0][1])]) == {found[0][1]: [found[0][0], "model/copied.py"]}
