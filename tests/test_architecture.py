"""The table of docs/architecture.md has a row for every file of the package, and names no file that is not there."""

import re
from pathlib import PurePosixPath

from documents import ROOT

PAGE = (ROOT / "docs" / "architecture.md").read_text()
PACKAGE = ROOT / "autoshard"


def named_paths(page: str) -> list[str]:
    """Files and folders in the first column: below the package, or beside the one named before in the row."""
    (table,) = re.findall(r"^## What each file does\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
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
