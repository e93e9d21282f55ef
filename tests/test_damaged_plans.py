"""Files of plans that were damaged or forged: each is refused by a `PlanError`, or says nothing that does harm."""

import copy
import json
import math
import random
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import CacheWarning, Plan, PlanError
from autoshard.cache import load_plan, store_plan
from autoshard.options import options_of

MESH = mesh_of({"x": 4, "y": 2})
OPTIONS = {"mesh": MESH, "topology": slow_chips("xy"), "donate_argnums": 0}
STATE, BATCH = {"w": np.ones((64, 16), np.float32), "step": np.zeros((), np.int32)}, np.ones((64, 16), np.float32)


def step(state, batch):
    return {"w": (jnp.tanh(state["w"].T @ batch) @ batch.T).T, "step": state["step"] + 1}, jnp.mean(batch)


@pytest.fixture(scope="module")
def plan():
    made = autoshard.plan(step, STATE, BATCH, fixed={"*w": P(("x", "y")), "batch": P(("x", "y"))}, **OPTIONS)
    assert made.alternatives and made.annotations.scatters and made.predicted.collectives
    return made


@pytest.fixture(scope="module")
def document(plan):
    return without_digest(plan)


def without_digest(plan):
    document = json.loads(plan.dumps())
    del document["digest"]
    return document


def look(node):
    """What tells one part of a list from another: its type, and the keys or the length that it has."""
    return type(node), tuple(node) if isinstance(node, dict) else len(node) if isinstance(node, list) else None


def places(node, path=(), of_each_look=None):
    """Every part of a document, or of each list the first few parts of each look."""
    yield path
    if isinstance(node, dict | list):
        seen = Counter()
        for key in node if isinstance(node, dict) else range(len(node)):
            seen[look(node[key])] += 1
            if isinstance(node, dict) or of_each_look is None or seen[look(node[key])] <= of_each_look:
                yield from places(node[key], (*path, key), of_each_look)


GONE = object()
OTHERS = [None, True, 0, -1, 1.5, math.nan, 10**30, "", "x", "\x1b[31m", [], [[]], {}, {"x": 1}, [1, 2, 3], GONE]


def changed(document, path, value):
    if not path:
        return value
    made = copy.deepcopy(document)
    node = made
    for key in path[:-1]:
        node = node[key]
    if value is GONE:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return made


def swaps(document, of_each_look=None):
    found = places(document, of_each_look=of_each_look)
    return [(path, value) for path in found for value in OTHERS if path or value is not GONE]


def used(text, shows=True):
    """A plan that was loaded, once everything that is shown or handed out of it was asked for; None if refused."""
    try:
        loaded = Plan.loads(text, MESH)
        assert not shows or str(loaded).replace("\n", "").isprintable()
        _ = loaded.in_shardings, loaded.keyword_shardings, loaded.out_shardings, loaded.abstract(0), loaded.gap
        assert json.loads(loaded.dumps())
    except PlanError:
        return None
    return loaded


@pytest.mark.parametrize("of_each_look", [1, pytest.param(None, marks=pytest.mark.slow)])
def test_every_part_swapped_for_another_kind(document, of_each_look):
    counts = {True: 0, False: 0}
    for i, (path, value) in enumerate(swaps(document, of_each_look)):
        counts[used(json.dumps(changed(document, path, value)), shows=i % 8 == 0) is None] += 1
    assert counts[True] > 5 * counts[False] > 0  # most of what is left are other numbers of a prediction


def test_what_is_not_refused_computes_the_same(document):
    """Of changes of what the step runs by."""
    expected = jax.jit(step)(STATE, BATCH)
    said = {"arguments", "results", "carried", "axis_types", "homes", "copies", "wants", "scatters", "sums", "implied"}
    found = [one for one in swaps(document) if one[0] and one[0][0] in said]
    random.Random(0).shuffle(found)
    ran = 0
    for path, value in found:
        loaded = used(json.dumps(changed(document, path, value)))
        if loaded is None:
            continue
        try:
            result = autoshard.autoshard(step, **OPTIONS, plan=loaded)(jax.tree.map(jnp.asarray, STATE), BATCH)
        except PlanError:
            continue
        assert_equal(result, expected)
        ran += 1
        if ran == 6:
            return
    raise AssertionError("a few run")


def test_every_bit_counts(plan):
    text, rng = plan.dumps().encode(), random.Random(0)
    for place in [*rng.sample(range(len(text) - 1), 1000), *range(len(text) - 80, len(text) - 1)]:
        flipped = bytearray(text)
        flipped[place] ^= 1 << rng.randrange(8)
        with pytest.raises(PlanError):
            Plan.loads(flipped.decode(errors="replace"), MESH)


def test_every_length_counts(plan):
    text = plan.dumps()
    for length in range(0, len(text) - 1, 11):
        with pytest.raises(PlanError):
            Plan.loads(text[:length], MESH)


def test_two_plans_merged_into_one_are_refused(plan):
    """As git merges two versions of a file: what differs in one place comes from the one, the rest from the other."""
    other = replace(plan, status="feasible" if plan.status == "optimal" else "optimal", bound=0.5)
    lines = [text.splitlines(keepends=True) for text in (plan.dumps(), other.dumps())]
    (at,) = (i for i, line in enumerate(lines[0]) if '"status"' in line)
    with pytest.raises(PlanError, match="digest is that of another text"):
        Plan.loads("".join([*lines[0][: at + 1], *lines[1][at + 1 :]]), MESH)


def test_line_ends_do_not_count(plan):
    assert Plan.loads(plan.dumps().replace("\n", "\r\n"), MESH).dumps() == plan.dumps()


@pytest.mark.parametrize("depth", [200, 2000, 100_000])
@pytest.mark.parametrize("kind", ["text", "tree", "key", "objects"])
def test_deep_nesting(document, kind, depth):
    lists = '{"list": [' * depth + "0" + "]}" * depth
    keys = '{"dict": [[' + '{"tuple": [' * depth + '"k"' + "]}" * depth + ", 0]]}"
    nested = {"text": "[" * depth, "objects": '{"a": ' * depth + "1" + "}" * depth, "tree": lists, "key": keys}[kind]
    if kind in ("tree", "key"):
        slots = json.dumps(document["result_slots"])
        nested = json.dumps(document).replace(f'"result_slots": {slots}', f'"result_slots": {nested}')
    with pytest.raises(PlanError):
        Plan.loads(nested, MESH)


def test_names_of_a_file_do_not_reach_the_terminal(document):
    evil = "\x1b]0;owned\x07[red]w[/red]\x9b2J\u202e"
    forged = copy.deepcopy(document)
    for placed in forged["arguments"]:
        placed["name"] = evil
    forged |= {"name": evil, "warnings": [f"one\n{evil}"]}
    for one in forged["predicted"]["collectives"]:
        one |= {"source": evil, "why": evil}
    loaded = used(json.dumps(forged))
    assert "[red]w[/red]" in str(loaded) and "\\x1b]0;owned" in str(loaded)


def refused_with(document, **fields):
    with pytest.raises(PlanError) as caught:
        Plan.loads(json.dumps(document | fields), MESH, where="plan\x1b[2J.json")
    return str(caught.value)


def test_errors_say_where_and_show_nothing_raw(document):
    said = refused_with(document, cost="\x1b[31mfree")
    assert "cost is '\\x1b[31mfree', where a number belongs" in said and "\x1b" not in said
    arguments = [document["arguments"][0] | {"spec": ["z", ""]}, *document["arguments"][1:]]
    assert "arguments/0/spec" in refused_with(document, arguments=arguments)


def test_a_forged_file_of_a_cache_is_refused(tmp_path, plan):
    """Its first line fits: whoever can write into the folder can compute it."""
    program, options = autoshard.autoshard(step, **OPTIONS).trace(STATE, BATCH), options_of(MESH)
    store_plan(tmp_path, "ab", plan)
    assert load_plan(tmp_path, "ab", program, options) is not None
    scatters = {equation: replace(one, dim=1 - one.dim) for equation, one in plan.annotations.scatters.items()}
    store_plan(tmp_path, "ab", replace(plan, annotations=replace(plan.annotations, scatters=scatters)))
    with pytest.warns(CacheWarning, match="contradict each other"):
        assert load_plan(tmp_path, "ab", program, options) is None
