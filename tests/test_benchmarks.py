"""The scripts of `benchmarks/` run for hours, so no test runs them; what they import and measure has to be there."""

import ast
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
sys.path.append(str(FOLDER))


def imported(path: Path) -> Iterator[str]:
    """The dotted name of everything of autoshard that a script imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "autoshard":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "autoshard")


def missing(names: Iterator[str]) -> list[str]:
    found = []
    for name in names:
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            found.append(name)
    return found


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_script_imports_is_there(path):
    assert not missing(imported(path))


def test_stages_whose_time_is_measured_are_there():
    import planning

    assert not missing(f"autoshard.{room}.{function}" for room, function in planning.STAGES)


def test_a_name_that_has_gone_is_found(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from autoshard.decorated import place, gone\nimport autoshard.nowhere\n")
    assert missing(imported(script)) == ["autoshard.decorated.gone", "autoshard.nowhere"]
