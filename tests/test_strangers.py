"""What is predicted of programs that others wrote is what is compiled for CPU devices (`benchmarks/strangers.py`)."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from stranger_page import page, shares
from stranger_rows import BARS, FORMS, Row, Task
from strangers import chosen_tasks, compare, programs

from autoshard import primitives

# One program of each kind of which predictions were far off.
KINDS = (
    ("case", "cholesky", "batch"),
    ("case", "random_bits", "batch"),
    ("case", "top_k", "batch"),
    ("case", "triangular_solve", "batch"),
    ("harness", "igamma", "batch"),
    ("situation", "quantiles", "values"),
    ("situation", "singular values", "values"),
    ("situation", "top logits", "values"),
    ("situation", "weights of fp8", "values"),
)
EVERY = programs()


def named(source, name):
    """The first program of a source whose name begins so."""
    return next(key for key in EVERY if key[0] == source and key[1].startswith(name))


def compared(source, name, form) -> Row:
    key = named(source, name)
    row = compare(Task(*key, form, "cpu"), EVERY[key])
    assert row.outcome == "compared", row.detail
    return row


@pytest.mark.parametrize(("source", "name", "form"), KINDS)
def test_predictions_come_true(source, name, form):
    row = compared(source, name, form)
    assert not row.misses
    assert all(row.applies(bar) for bar in BARS if bar != "seconds")


def test_the_flag_of_a_batch_of_loops_is_predicted():
    row = compared("situation", "fixed point", "values")
    assert row.predicted == row.compiled == {"all_reduce": 1}


def test_a_collective_that_is_not_predicted_is_found(monkeypatch):
    """XLA's partitioner gathers the batch of a `top_k` that is left to it."""
    left = replace(primitives.facts_of("top_k"), runs_on_shards=False)
    monkeypatch.setitem(primitives.PRIMITIVES, "top_k", left)
    row = compared("situation", "top logits", "values")
    assert row.misses.keys() == {"collectives", "peak"} and row.is_over
    assert "all_gather 0 predicted" in row.misses["collectives"]


def test_a_peak_that_is_too_low_is_found():
    row = Row("case", "a", "values", "cpu", "add", "compared", predicted_peak=70_000, peak=100_000, usable=0.85)
    assert row.misses.keys() == {"peak"} and row.is_over  # and nothing runs, since the check finds no plan
    assert replace(row, checked_peak=100_000).misses["limit"].endswith("100000 bytes after the check")
    assert replace(row, checked_peak=85_000).misses.keys() == {"peak"}
    good = replace(row, predicted_peak=90_000)
    assert not good.misses and not good.is_over


def test_seconds_and_unknown_bytes():
    row = Row("case", "a", "values", "v5e:2x4", "add", "compared", predicted_seconds=1.0, seconds=2.1)
    assert row.misses.keys() == {"seconds"}
    assert not replace(row, unestimated=("sort",)).misses
    assert replace(row, seconds=None, compiled={"all_reduce": None}).misses.keys() == {"collectives"}


def test_the_page_lists_every_exception():
    good = Row("case", "a", "values", "cpu", "add", "compared", predicted_peak=100_000, peak=100_000)
    bad = replace(good, name="b", family="sort", peak=300_000)
    assert shares([good, bad])["peak"] == (1, 2)
    assert "| cpu | sort: predicted low | 1 | `b` values: 100000 predicted, 300000 bytes compiled |" in page(
        [good, bad]
    )


def test_a_sample_has_every_family_in_turn():
    families = {("case", "a1"): "a", ("case", "a2"): "a", ("case", "b1"): "b"}
    tasks = chosen_tasks(families, ["cpu"], "", 2, 0)
    assert {families[task.source, task.name] for task in tasks} == {"a", "b"}
    assert {task.form for task in tasks} == set(FORMS)
