"""The table of docs/architecture.md has a row for every file of the package, and names no file that is not there.

Its pages name nothing that is not in the code. The first page is short and links all others. Files have at most 500
lines, folders at most 15 files.
"""

import functools
import re
from collections import Counter
from pathlib import Path, PurePosixPath

import pytest
from documents import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
ROOMS = sorted((ROOT / "docs" / "architecture").glob("*.md"))
PACKAGE = ROOT / "autoshard"
MOST_WORDS = 5000  # of the first page, beside its table of files


def named_paths(page: str) -> list[str]:
    """Files and folders in the first column: below the package, or beside the one named before in the row."""
    (table,) = re.findall(r"^## What each file does\n(.*?)(?:^## |\Z)", page, re.MULTILINE | re.DOTALL)
    found = []
    for row in re.findall(r"^\| (`.*?) \| ", table, re.MULTILINE):
        folder = PurePosixPath()
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", row):
            if name.count("/") > name.endswith("/"):
                folder = PurePosixPath(name).parent
                found.append(name)
            else:
                found.append(f"{folder / name}{'/' * name.endswith('/')}")
    return found


def faults(page: str) -> list[str]:
    """Names of nothing, and files without a row."""
    named = named_paths(page)
    files = sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    missing = (
        file for file in files if not any(file == name or file.startswith(f"{name.rstrip('/')}/") for name in named)
    )
    return [name for name in named if not (PACKAGE / name).exists()] + list(missing)


def test_every_file_has_a_row():
    assert faults(PAGE) == []


def test_a_file_without_a_row_and_a_row_without_a_file_are_found():
    assert faults(PAGE.replace("`mesh/measure.py`", "`mesh/measuring.py`")) == ["mesh/measuring.py", "mesh/measure.py"]
    assert faults(PAGE.replace("`refine.py`", "`refined.py`")) == ["refined.py", "refine.py"]


@functools.cache
def sources() -> tuple[frozenset[str], frozenset[str]]:
    """Paths of files and folders, each with every end of it, and the identifiers of the code."""
    files = [file for folder in ("autoshard", "benchmarks", "docs", "tests") for file in (ROOT / folder).rglob("*")]
    parts = [path.relative_to(ROOT).parts for path in [*files, *ROOT.glob("*.*")]]
    ends = frozenset("/".join(path[start:]) for path in parts for start in range(len(path)))
    code = (path.read_text() for path in files if path.suffix == ".py" and path != Path(__file__))
    return ends, frozenset(word for text in code for word in re.findall(r"[A-Za-z_]\w*", text))


def unknown_names(page: str) -> list[str]:
    """What a page sets as code, and neither a path nor the code has."""
    ends, identifiers = sources()
    found = []
    for name in re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)):
        if re.fullmatch(r"[\w./]+(?:\.\w+|/)", name) and (
            name[-1] == "/" or Path(name).suffix in {".md", ".py", ".toml"}
        ):
            found += [] if name.rstrip("/") in ends else [name]
        else:
            found += [word for word in re.findall(r"[A-Za-z_]\w\w+", name) if word not in identifiers]
    return found


@pytest.mark.parametrize("page", [ROOT / "docs" / "architecture.md", *ROOMS], ids=lambda page: page.stem)
def test_pages_name_what_there_is(page):
    assert unknown_names(page.read_text()) == []


def test_a_name_of_nothing_is_found():
    page = "`solver/solve.py`, `solver/solver.py`, `remat/`, `remate/`, `Backend.usable`, `Backend.unusable_share`"
    assert unknown_names(page) == ["solver/solver.py", "remate/", "unusable_share"]


def test_the_first_page_is_short_and_links_all_others():
    first = PAGE.split("## What each file does\n")[0]
    assert len(first.split()) <= MOST_WORDS
    assert {path.name for path in ROOMS} - set(re.findall(r"\]\(architecture/(\w+\.md)", first)) == set()


def too_large(package: Path, lines: int = 500, files: int = 15) -> list[str]:
    """Files of more lines, and folders of more files, by their paths in the package."""
    paths = sorted(package.rglob("*.py"))
    counts = Counter(path.parent for path in paths)
    large = [path for path in paths if len(path.read_text().splitlines()) > lines]
    return [str(path.relative_to(package)) for path in [*large, *(one for one in counts if counts[one] > files)]]


def test_files_and_folders_are_small():
    assert too_large(PACKAGE) + too_large(PACKAGE.parent / "benchmarks", files=100) == []


def test_a_file_and_a_folder_that_are_too_large_are_found(tmp_path):
    (tmp_path / "room").mkdir()
    for name, lines in ("one.py", 3), ("room/two.py", 4), ("room/three.py", 1), ("room/four.py", 1):
        (tmp_path / name).write_text("x = 1\n" * lines)
    assert too_large(tmp_path, lines=3, files=2) == ["room/two.py", "room"]
