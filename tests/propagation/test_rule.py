"""The notation of rules, there and back, and what it refuses."""

import pytest

from autoshard.errors import RuleError
from autoshard.propagation.rule import Rule, RuleBuilder, factor_name

RULES = [  # notation, shapes, keywords, sizes, splittable
    ("i j -> j i", [(2, 3), (3, 2)], {}, {"i": 2, "j": 3}, "i j"),
    ("i k, k j -> i j", [(2, 3), (3, 4), (2, 4)], {"reduction": "k"}, {"i": 2, "k": 3, "j": 4}, "i j k"),
    (
        "b (h k) d, d f -> b h k f",
        [(2, 12, 5), (5, 7), (2, 4, 3, 7)],
        {"reduction": ["d"]},
        {"b": 2, "h": 4, "k": 3, "d": 5, "f": 7},
        "b h k d f",
    ),
    ("(i j) -> (i j)", [(12,), (12,)], {"sizes": {"i": 4}}, {"i": 4, "j": 3}, "i j"),
    ("(i j) -> i", [(12,), (4,)], {"need_replication": "j"}, {"i": 4, "j": 3}, "i"),
    ("i 1 -> i", [(4, 1), (4,)], {}, {"i": 4}, "i"),
    ("i j -> i j", [(4, 1), (4, 1)], {}, {"i": 4, "j": 1}, "i"),
    ("i -> i", [(8,), (6,)], {"permutation": "i"}, {"i": 6}, ""),
    ("i j -> i k", [(8, 9), (8, 2)], {"need_replication": "j, k"}, {"i": 8, "j": 9, "k": 2}, "i"),
    (
        "... k, k -> ...",
        [(2, 3, 5), (5,), (2, 3)],
        {"reduction": "k"},
        {"batch_0": 2, "batch_1": 3, "k": 5},
        "batch_0 batch_1 k",
    ),
    ("... k -> ... k", [(5,), (5,)], {}, {"k": 5}, "k"),
    (
        "...1 i, ...2 j -> ...1 i j",
        [(2, 3), (4, 3), (2, 3, 3)],
        {"need_replication": "batch2_0"},
        {"batch1_0": 2, "i": 3, "batch2_0": 4, "j": 3},
        "batch1_0 i j",
    ),
    ("i, -> i", [(3,), (), (3,)], {}, {"i": 3}, "i"),
    ("-> i", [(3,)], {}, {"i": 3}, "i"),
    ("i ->", [(3,), ()], {"reduction": "i"}, {"i": 3}, "i"),
    ("i ->", [(3,)], {"need_replication": "i"}, {"i": 3}, ""),
]


@pytest.mark.parametrize("notation, shapes, keywords, sizes, splittable", RULES)
def test_parse_and_back(notation, shapes, keywords, sizes, splittable):
    rule = Rule.parse(notation, *shapes, **keywords)
    assert rule.sizes == sizes
    assert rule.factors == tuple(sizes)
    assert rule.splittable == set(splittable.split())
    assert len(rule.operands) + len(rule.results) == len(shapes)
    kinds = {kind: getattr(rule, kind) for kind in ("reduction", "need_replication", "permutation")}
    assert Rule.parse(str(rule), *shapes, **kinds, sizes=keywords.get("sizes")) == rule


WRONG = [  # notation, shapes, keywords, message, what the caret points at
    ("i k, k j -> i j", [(2, 3), (3, 4), (2, 4)], {}, "factor 'k' is in no result", "k, k"),
    ("i -> i", [(3,), (4,)], {}, "factor 'i' has size 4 here and 3 elsewhere", "i"),
    ("i j -> i", [(3,), (3,)], {}, "2 dims in the rule, but the shape is (3,)", "i j"),
    ("i i1 -> i", [(3, 1), (3,)], {"reduction": "k"}, "reduction names 'k', which is no factor", "i i1"),
    ("i j -> i", [(3, 2), (3,)], {"reduction": "j", "permutation": "j"}, "'j' is both reduction and permutation", "j"),
    ("i 1 -> i", [(3, 2), (3,)], {}, "'1' is a dim of size 1", "1"),
    ("(i j) -> (i j)", [(12,), (12,)], {}, "the shapes do not tell the size of 'i'", "(i j)"),
    ("(i j) -> i j", [(12,), (4, 4)], {}, "make 4 x 4 = 16, but its size is 12", "(i j)"),
    ("i -> i", [(3,), (3,)], {"sizes": {"z": 1}}, "a size is given for 'z'", "i"),
    ("i -> i", [(3,), (3,), (3,)], {}, "1 operands and 1 results, but the equation has 3", "i"),
    ("... i, ... j -> ... i j", [(2, 3), (2, 2, 4), (2, 3, 4)], {}, "'...' stands for 2 dims here and for 1", "... j"),
    ("i ... -> i", [(2, 3), (3,)], {}, "'...' stands for leading dims", "..."),
    ("i * j -> i", [], {}, "'*' does not belong in a rule", "*"),
    ("i (j -> i", [], {}, "inside the brackets of a compound dim", "->"),
    ("i (j k", [], {}, "this bracket is never closed", "(j"),
    ("i j) -> i", [], {}, "this bracket was never opened", ")"),
    ("(i) -> i", [], {}, "a compound dim has at least two factors", "(i)"),
    ("((i j) k) -> i", [], {}, "inside the brackets", "(i j)"),
    ("i j", [], {}, "one '->' between operands and results, this one has 0", ""),
    ("2i -> i", [], {}, "does not belong in a rule", "2i"),
]


@pytest.mark.parametrize("notation, shapes, keywords, message, at", WRONG)
def test_refused_with_its_place(notation, shapes, keywords, message, at):
    with pytest.raises(RuleError) as caught:
        Rule.parse(notation, *shapes, **keywords)
    said, text, caret = str(caught.value).split("\n")
    assert message in said
    assert text == "    " + notation
    assert text[caret.index("^") :].startswith(at)


def test_builder_makes_what_the_notation_says():
    builder = RuleBuilder([(12, 5), (5, 7)], [(4, 3, 7)])
    builder.factor(4, [(0, 0)], [(0, 0)])
    builder.factor(3, [(0, 0)], [(0, 1)])
    builder.factor(5, [(0, 1), (1, 0)], [], "reduction")
    builder.factor(7, [(1, 1)], [(0, 2)])
    rule = builder.build()
    assert str(rule) == "(i j) k, k l -> i j l"
    assert rule == Rule.parse(str(rule), (12, 5), (5, 7), (4, 3, 7), reduction="k")


def test_factor_names_never_repeat():
    names = [factor_name(i) for i in range(100)]
    assert len(set(names)) == 100
    assert names[:3] == ["i", "j", "k"]


def test_rules_share_one_empty_set():
    """A process keeps thousands of rules, and an empty set takes as much as a tuple of twenty."""
    rules = RuleBuilder([(3,)], [(3,)]).build(), Rule.parse("i -> i", (3,), (3,))
    sets = [one for rule in rules for one in (*vars(rule).values(), rule.exchanged) if isinstance(one, frozenset)]
    assert len(sets) > 10 and len(set(map(id, sets))) == 1
