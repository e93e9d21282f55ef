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
    """The dotted name of everything of autoshard that a script imports, or replaces in what it imports."""
    nodes, known = list(ast.walk(ast.parse(path.read_text()))), {}
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "autoshard":
            names = {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            known |= names
            yield from names.values()
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "autoshard")

    targets = (target for node in nodes if isinstance(node, ast.Assign) for target in node.targets)
    for target in targets:
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id in known:
            yield f"{known[target.value.id]}.{target.attr}"


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
    script.write_text("from autoshard.decorated import place, gone\nimport autoshard.nowhere\nplace.gone = 1\n")
    lost = ["autoshard.decorated.gone", "autoshard.nowhere", "autoshard.decorated.place.gone"]
    assert missing(imported(script)) == lost
