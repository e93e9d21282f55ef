"""Code blocks of Markdown pages: read, run in order, their output compared, their diffs applied.

A `python` block is run in the namespace that the blocks before it on the page have filled. A `text` block right after
it is what the block prints; `...` stands for anything. A `diff` block whose title is a file changes that file: lines
with a space or a minus must stand there once, in a row. A file that does not exist is made of lines with a plus. A
comment `<!-- needs NAME -->` before a block says that it runs only where the package NAME is installed.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]

_BLOCK = re.compile(
    r'^(?:<!-- needs (?P<needs>\w+) -->\n)?```(?P<language>\w+)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^```$',
    re.MULTILINE | re.DOTALL,
)
_SNIPPET = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    language: str
    title: str
    text: str
    line: int  # of the page, on which the text begins
    end: int  # of the page, in characters
    start: int
    needs: str  # a package without which it does not run

    @property
    def can_run(self) -> bool:
        return not self.needs or importlib.util.find_spec(self.needs) is not None


def blocks_of(page: str) -> list[Block]:
    """The fenced blocks of a page that name a language, with the files that they include."""
    return [
        Block(
            language=match["language"],
            title=match["title"] or "",
            text=_SNIPPET.sub(lambda name: (ROOT / name[1]).read_text(), match["text"]),
            line=page.count("\n", 0, match.start("text")) + 1,
            end=match.end(),
            start=match.start(),
            needs=match["needs"] or "",
        )
        for match in _BLOCK.finditer(page)
    ]


def run(page: str, name: str = "page") -> dict[str, Any]:
    """Runs the `python` blocks of a page, compares what they print, and returns the names that they define."""
    blocks = blocks_of(page)
    namespace: dict[str, Any] = {"__name__": "page"}
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language != "python" or not block.can_run:
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.text, name, "exec"), namespace)
        if after and after.language == "text" and not page[block.end : after.start].strip():
            compare(after.text, printed.getvalue(), f"{name}:{after.line}")
    return namespace


def compare(expected: str, printed: str, where: str) -> None:
    """Asserts that a block printed what the page says."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    matches = doctest.OutputChecker().check_output(expected, printed, flags)
    assert matches, f"{where} promises\n{expected}\nand this is printed:\n{printed}"


def apply_diff(diff: str, root: Path, title: str) -> None:
    """Changes the file `title` below `root` as a `diff` block says."""
    lines = diff.splitlines(keepends=True)
    old = "".join(line[1:] for line in lines if line[0] in " -")
    new = "".join(line[1:] for line in lines if line[0] in " +")
    file = root / title
    if not file.exists():
        assert not old, f"{title} does not exist, and the diff takes lines from it:\n{old}"
        file.write_text(new)
        return
    text = file.read_text()
    assert text.count(old) == 1, f"{title} has these lines {text.count(old)} times, not once:\n{old}"
    file.write_text(text.replace(old, new))
