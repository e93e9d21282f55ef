"""Every how-to page runs from its first block to its last, and prints what it shows; README and architecture do too."""

import pytest
from documents import ROOT, blocks_of, compare, run

PAGES = [ROOT / "README.md", ROOT / "docs" / "architecture.md", *sorted((ROOT / "docs" / "how_to").glob("*.md"))]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run(path.read_text(), str(path.relative_to(ROOT)))


def test_every_page_has_code():
    assert len(PAGES) >= 9
    assert all(any(block.language == "python" for block in blocks_of(path.read_text())) for path in PAGES)


PAGE = """
```python
cost = 1.0
```

```python
print("cost", cost)
```

```text
cost ...
```
"""


@pytest.mark.parametrize(
    "right, wrong, error",
    [
        ('"cost"', '"price"', AssertionError),  # printed otherwise
        ("cost = 1.0", "price = 1.0", NameError),
        ("cost = 1.0", "cost = 1.0; assert cost == 2.0", AssertionError),
    ],
)
def test_a_planted_mistake_fails(right, wrong, error):
    run(PAGE)
    with pytest.raises(error):
        run(PAGE.replace(right, wrong))


def test_what_is_shown_for_a_gap_may_be_anything_but_nothing_else_is():
    compare("all_reduce ...\npeak memory\n", "all_reduce  2.0 MiB\npeak memory\n", "page")
    with pytest.raises(AssertionError, match="page promises"):
        compare("all_reduce ...\npeak memory\n", "all_reduce  2.0 MiB\n", "page")


def test_a_block_that_needs_a_package_is_told_apart():
    (block,) = blocks_of("<!-- needs no_such_package -->\n```python\nassert False\n```\n")
    assert not block.can_run
    run("<!-- needs no_such_package -->\n```python\nassert False\n```\n")
    with pytest.raises(AssertionError):
        run("<!-- needs pytest -->\n```python\nassert False\n```\n")
