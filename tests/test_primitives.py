"""Each primitive that has a sharding rule has a row of facts, so that none gets default costs unseen."""

import pytest

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
