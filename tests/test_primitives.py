"""Each primitive that has a sharding rule has a row of facts, so that none gets default costs unseen.

What several modules know of a family of primitives stands in `primitives.py`, too.
"""

import ast
import functools
from collections import defaultdict
from collections.abc import Mapping

import pytest
from documents import ROOT

from autoshard.primitives import PRIMITIVES
from autoshard.propagation import registry


def with_rule() -> set[str]:
    """The primitives whose rules come with autoshard."""
    rules = registry._RULES.items()
    return {name for name, rule in rules if rule.__module__.startswith("autoshard.propagation.rules.")}


def test_every_primitive_with_a_rule_has_a_row_and_no_other():
    assert PRIMITIVES.keys() == with_rule()


@pytest.mark.parametrize("name", ["tanh", "scatter-add"])
def test_a_missing_row_is_found(monkeypatch, name):
    monkeypatch.delitem(PRIMITIVES, name)
    assert with_rule() - PRIMITIVES.keys() == {name}


PASTED = "export/standalone.py"  # code that users get, which does without the package


@functools.cache
def families(source: str) -> frozenset[frozenset[str]]:
    """The sets, tuples and lists of three and more primitives that a file spells out."""
    literals = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Set | ast.Tuple | ast.List)]
    named = [[getattr(one, "value", None) for one in literal.elts] for literal in literals if len(literal.elts) >= 3]
    known = (names for names in named if all(isinstance(name, str) and name in PRIMITIVES for name in names))
    return frozenset(map(frozenset, known))


def repeated_families(sources: Mapping[str, str]) -> dict[frozenset[str], list[str]]:
    """Families that several files spell out -> these files."""
    found = defaultdict(list)
    for file, source in sources.items():
        for family in families(source):
            found[family].append(file)
    return {family: files for family, files in found.items() if len(files) > 1}


def test_no_family_of_primitives_is_spelled_out_twice():
    package = ROOT / "autoshard"
    sources = {str(path.relative_to(package)): path.read_text() for path in sorted(package.rglob("*.py"))}
    del sources[PASTED]
    assert repeated_families(sources) == {}
    planted = {
        "model/one.py": 'X = {"exp", "log", "tanh"}',
        "plans/other.py": 'if name in ("tanh", "exp", "log"): pass',
    }
    assert repeated_families(sources | planted) == {frozenset({"exp", "log", "tanh"}): [*planted]}
