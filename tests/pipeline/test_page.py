"""The page on pipelines runs, and prints what it shows, to the character."""

import contextlib
import io
import re

import pytest
from documents import ROOT, blocks_of

from autoshard.pipeline import SCHEDULES

PAGE = (ROOT / "docs" / "pipelines.md").read_text()


def check(page):
    """Runs the `python` blocks of a page in order and compares what they print with the `text` blocks after them."""
    namespace = {}
    blocks = blocks_of(page)
    for block, after in zip(blocks, [*blocks[1:], None], strict=True):
        if block.language == "python":
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(block.text, namespace)
            assert printed.getvalue() == (after.text if after and after.language == "text" else ""), block.text


def test_the_page_prints_what_it_shows():
    check(PAGE)


def test_a_planted_mistake_is_found():
    planted = PAGE.replace("device 3  .........F0 B0", "device 3  ........ F0 B0", 1)
    assert planted != PAGE
    with pytest.raises(AssertionError):
        check(planted)


def test_the_summary_has_every_schedule_once():
    assert sorted(re.findall(r"^\| `(\w+)` \|", PAGE, re.MULTILINE)) == sorted(SCHEDULES)
