"""The pages of the site: the reference has every public name once, the glossary every term once.

`mkdocs build --strict` in .ci/run builds it; these tests need no mkdocs.
"""

import doctest
import functools
import importlib.util
import re
from collections import Counter
from types import ModuleType

import pytest
from documents import ROOT
from prose import sentences

import autoshard
import autoshard.ops
import autoshard.pipeline
import autoshard.rewrites
import autoshard.solver
import autoshard.tactics

DOCS = ROOT / "docs"
PUBLIC = (autoshard, autoshard.ops, autoshard.pipeline, autoshard.rewrites, autoshard.solver, autoshard.tactics)


def located(path: str) -> object:
    """What a dotted path names; a module comes before what has its name in the package."""
    parts = path.split(".")
    for split in range(len(parts) - 1, 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:split]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[split:], found)
    raise LookupError(path)


def entries(reference: str) -> Counter:
    """What the entries of reference pages name: how often each object."""
    return Counter(id(located(path)) for path in re.findall(r"^::: (\S+)$", reference, re.MULTILINE))


def faults(reference: str) -> list[str]:
    """Public names that the reference does not have exactly once."""
    found = entries(reference)
    public = [(f"{package.__name__}.{name}", getattr(package, name)) for package in PUBLIC for name in package.__all__]
    named = [(name, value) for name, value in public if not isinstance(value, ModuleType)]
    return [f"{name}: {found[id(value)]} entries" for name, value in named if found[id(value)] != 1]


REFERENCE = "\n".join(path.read_text() for path in sorted((DOCS / "reference").glob("*.md")))


def test_the_reference_has_every_public_name_once():
    assert faults(REFERENCE) == []


@pytest.mark.parametrize(
    "page, expected",
    [
        (REFERENCE.replace("::: autoshard.evaluate", ""), "autoshard.evaluate: 0 entries"),
        (REFERENCE + "\n::: autoshard.solver.solve.solve", "autoshard.solver.solve: 2 entries"),
    ],
)
def test_a_planted_gap_in_the_reference_is_found(page, expected):
    assert faults(page) == [expected]


TERMS = re.findall(r"^\*\*(.+)\*\*\n:   (.+(?:\n    .+)*)$", (DOCS / "glossary.md").read_text(), re.MULTILINE)


def test_the_glossary_defines_each_term_once_in_one_or_two_sentences():
    counts = Counter(term.lower() for term, _ in TERMS)
    assert len(counts) >= 40 and max(counts.values()) == 1
    assert {term: text for term, text in TERMS if not 1 <= len(sentences(text)) <= 2} == {}


@pytest.mark.parametrize(
    "term",
    [
        *("bound", "donated buffer", "exposed communication", "factor", "gap", "group", "home layout", "incumbent"),
        *("launch", "layout", "liveness", "neighbourhood", "partial sum", "presolve", "rematerialisation"),
        *("resharding", "residual", "strategy"),
    ],
)
def test_the_glossary_has_the_terms_that_texts_lean_on(term):
    assert term in {term.lower() for term, _ in TERMS}


def test_pages_made_of_files_of_the_repository_link_to_pages():
    spec = importlib.util.spec_from_file_location("site_hook", DOCS / "site_hook.py")
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    assert doctest.testmod(hook).failed == 0 < doctest.testmod(hook).attempted
    assert "(docs/" not in "".join(hook.relinked((ROOT / source).read_text()) for source in hook.PAGES)


QUESTIONS = (DOCS / "questions.md").read_text()


def missing_answers(page: str) -> list[str]:
    """Pages and tests that a table of questions names and that are not there."""
    pages = [DOCS / path for path in re.findall(r"\]\(([\w/]+\.md)", page)]
    tests = [ROOT / path for path in re.findall(r"`(tests/[\w/.]+)`", page)]
    return [str(path) for path in (*pages, *tests) if not path.exists()]


def test_every_question_has_a_page_and_a_test():
    rows = [row for row in QUESTIONS.splitlines() if row.startswith("| ")][1:]
    assert len(rows) == 12 and all("](" in row and "`tests/" in row for row in rows)
    assert missing_answers(QUESTIONS) == []
    assert len(missing_answers(QUESTIONS.replace("how_to/read_a_plan.md", "how_to/read.md"))) == 3
