"""Prose taken apart: the paragraphs and sentences of Markdown pages and of docstrings, and how long they are.

Code, tables, headings, doctests and what mkdocs reads are left out.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Iterator

LEFT_OUT = (
    re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL),  # fenced code
    re.compile(r"^(?:#|\||:::|<!--).*$", re.MULTILINE),  # headings, tables, entries of the reference, comments
    re.compile(r"^.*\n(?=--- \|)|^--- \|.*$|^[^`\n|]+ \| .*$", re.MULTILINE),  # tables without outer bars
)
# What begins an item of a list, an entry of the glossary or a source.
ITEM = re.compile(r"^\s*(?:[-*] |\d+\. |:   |\*\*.*\*\*$|\[\w+\] )", re.MULTILINE)
END_OF_SENTENCE = re.compile(r"(?<=[.?!])[)\"*]*\s+")
BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # attributes in which a node of a file has statements
SECTION = re.compile(r"^(?:Args|Returns|Raises|Yields|Example|Examples):$")


def paragraphs(markdown: str) -> list[str]:
    """The paragraphs and items of lists of a page, each on one line; indented blocks of code left out.

    >>> paragraphs("# Head\\n\\nOne two. Three\\nfour.\\n\\n```sh\\nfive.\\n```\\n- six\\n- seven\\n  eight\\n")
    ['One two. Three four.', 'six', 'seven eight']
    >>> paragraphs("One:\\n\\n    code\\n\\na | b\\n--- | ---\\n1 | 2\\n\\n| c |\\n|---|\\n| 3 |\\n")
    ['One:']
    """
    for pattern in LEFT_OUT:
        markdown = pattern.sub("", markdown)
    blocks = re.split(r"\n\s*\n", ITEM.sub("\n\n", "\n" + markdown))
    prose = (block for block in blocks if not re.match(r"\n*    ", block))
    return [" ".join(block.split()) for block in prose if re.search(r"\w", block)]


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph.

    >>> sentences("One two. **Three.** Four (as in 0.5 of `a.b`).")
    ['One two.', '**Three.', 'Four (as in 0.5 of `a.b`).']
    """
    return [part for part in END_OF_SENTENCE.split(paragraph) if re.search(r"\w", part)]


def docstrings(source: str) -> Iterator[str]:
    """The docstrings of a Python file."""
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from filter(None, [ast.get_docstring(node)])
        for block in BLOCKS:  # expressions have no docstrings, and are most of what there is
            waiting += getattr(node, block, ())


def paragraphs_of_docstring(docstring: str) -> list[str]:
    """The paragraphs of a docstring; doctests, blocks of code and the names of arguments left out.

    >>> paragraphs_of_docstring("What.\\n\\nMore:\\n\\n    code\\n\\n>>> f(1)\\n1")
    ['What.', 'More:']
    >>> paragraphs_of_docstring("What.\\n\\nArgs:\\n    x: one\\n    y: two\\n      more")
    ['What.', 'one', 'two more']
    """
    kept: list[str] = []
    in_section = in_doctest = False
    for line in docstring.splitlines():
        if SECTION.match(line):
            in_section, line = not line.startswith("Example"), ""
        elif line and not line.startswith(" "):
            in_section = False
        in_doctest = line.lstrip().startswith(">>>") or (in_doctest and bool(line.strip()))
        if in_doctest:
            line = ""
        elif in_section:
            line = re.sub(r"^    \*{0,2}[\w, *]+: ", "- ", line) if re.match(r"    \S", line) else line.strip()
        kept.append(line)
    return paragraphs("\n".join(kept))


def words(text: str) -> int:
    return len(text.split())


def ninth_decile(lengths: Iterable[int]) -> int:
    """The length that at most one in ten is above.

    >>> ninth_decile([1, 2, 3, 4, 5, 6, 7, 8, 90, 100])
    90
    """
    rising = sorted(lengths)
    return rising[math.ceil(0.9 * len(rising)) - 1] if rising else 0
