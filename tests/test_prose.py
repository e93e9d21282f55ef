"""Prose is short: of ten sentences nine have fewer than 30 words, and no paragraph has more than 150.

Every page of the site, the pages in the repository's root, and the docstrings of every folder of the package.
"""

import doctest
from pathlib import Path

import prose
import pytest
from documents import ROOT

DOCS, PACKAGE = ROOT / "docs", ROOT / "autoshard"
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + sorted(DOCS.rglob("*.md"))
FOLDERS = sorted({path.parent for path in PACKAGE.rglob("*.py")})
HEADS = sorted(DOCS.rglob("*.head.md"))

SENTENCE, PARAGRAPH = 30, 150  # words: nine sentences of ten have fewer, every paragraph at most


def faults(paragraphs: list[str]) -> list[str]:
    """What of some paragraphs is too long, longest first."""
    sentences = sorted((part for text in paragraphs for part in prose.sentences(text)), key=prose.words, reverse=True)
    found = [f"paragraph of {prose.words(text)} words: {text}" for text in paragraphs if prose.words(text) > PARAGRAPH]
    if prose.ninth_decile(map(prose.words, sentences)) >= SENTENCE:
        found += [f"{prose.words(text)} words: {text}" for text in sentences if prose.words(text) >= SENTENCE]
    return found


def of_folder(folder: Path) -> list[str]:
    """The paragraphs of the docstrings of the files in a folder."""
    docstrings = (text for path in sorted(folder.glob("*.py")) for text in prose.docstrings(path.read_text()))
    return [paragraph for text in docstrings for paragraph in prose.paragraphs_of_docstring(text)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_sentences_and_paragraphs_of_a_page_are_short(page):
    assert faults(prose.paragraphs(page.read_text())) == []


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: str(folder.relative_to(ROOT)))
def test_sentences_and_paragraphs_of_docstrings_are_short(folder):
    assert faults(of_folder(folder)) == []


@pytest.mark.parametrize("head", HEADS, ids=lambda head: str(head.relative_to(ROOT)))
def test_a_page_that_a_benchmark_writes_begins_with_its_head(head):
    page = head.with_name(head.name.replace(".head.md", ".md"))
    assert page.read_text().startswith(head.read_text().strip())


SHORT = "One two three. " * 9


@pytest.mark.parametrize(
    "text, expected",
    [
        (SHORT + "word " * 99 + "end.", 0),  # one sentence of ten may be long
        (SHORT + "word " * 29 + "end. " + "word " * 30 + "end.", 2),
        ("word. " * 151, 1),
        ("word. " * 150, 0),
    ],
)
def test_planted_sentences_and_paragraphs_are_found(text, expected):
    assert len(faults(prose.paragraphs(text))) == expected


def test_long_sentences_of_docstrings_are_found(tmp_path):
    long = " ".join(["word"] * SENTENCE)
    function = f'def f(x):\n    """{long}.\n\n    Args:\n        x: {long}.\n    """'
    (tmp_path / "module.py").write_text(f'"""{long}."""\n\n{function}')
    assert len(faults(of_folder(tmp_path))) == 3


def test_prose_is_told_from_code():
    results = doctest.testmod(prose)
    assert results.failed == 0 < results.attempted
