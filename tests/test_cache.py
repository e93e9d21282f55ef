"""Plans kept on disk: what finds one again, what does not, and what happens to files that are not what was written."""

import functools
import os
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from oracles import adjusted, mesh_of, slow_chips, v5e

import autoshard
from autoshard import CacheWarning, planning
from autoshard.cache import key_of, load_plan, store_plan
from autoshard.options import options_of
from autoshard.propagation import rules_for
from autoshard.tactics import DataParallel

SHAPE = {"x": 4, "y": 2}
OPTIONS = {"mesh": mesh_of(SHAPE), "topology": slow_chips(SHAPE), "time_limit": 10}
WEIGHTS, BATCH = np.ones((8, 32), np.float32), np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)


def step(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)


def traced():
    return autoshard.autoshard(step, **OPTIONS).trace(WEIGHTS, BATCH)


@pytest.fixture
def made(monkeypatch):
    """A list that grows by one with every plan that is made rather than found."""
    count, make = [], planning._solved

    def noted(*args):
        count.append(1)
        return make(*args)

    monkeypatch.setattr(planning, "_solved", noted)
    return count


def planned(folder, fn=step, *args, **options):
    return autoshard.plan(fn, *(args or (WEIGHTS, BATCH)), cache=folder, **OPTIONS | options)


@pytest.fixture(autouse=True)
def strict():
    """No test expects a warning that it does not name."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", CacheWarning)
        yield


def test_a_plan_is_found_again(tmp_path, made):
    first, second = planned(tmp_path / "new" / "folder"), planned(tmp_path / "new" / "folder")
    assert len(made) == 1
    assert second.dumps() == first.dumps() and str(second) == str(first)  # with its alternatives, found anew
    assert second.in_shardings == first.in_shardings


def test_a_step_runs_by_the_plan_that_was_found(tmp_path, made):
    for _ in range(2):
        decorated = autoshard.autoshard(step, cache=str(tmp_path), donate_argnums=0, **OPTIONS)
        np.testing.assert_allclose(decorated(jnp.asarray(WEIGHTS), BATCH), step(WEIGHTS, BATCH), rtol=1e-5)
    assert len(made) == 1


def test_without_a_folder_nothing_is_kept(tmp_path, made, monkeypatch):
    monkeypatch.chdir(tmp_path)
    planned(None), planned(None)
    assert len(made) == 2 and not list(tmp_path.rglob("*"))


def other(weights, batch):
    return step(weights, jnp.tanh(batch))


DIFFERENT = {
    "program": {"fn": lambda w, b: step(w, b) * jnp.sum(b)},
    "shapes": {"args": (WEIGHTS, BATCH[:8])},
    "dtypes": {"args": (WEIGHTS.astype(np.float16), BATCH)},
    "donation": {"donate_argnums": 0},
    "mesh": {"mesh": mesh_of({"x": 2, "y": 4})},
    "names of axes": {"mesh": mesh_of({"x": 4, "z": 2}), "topology": slow_chips("xz")},
    "topology": {"topology": v5e(SHAPE)},
    "memory": {"memory": "1GiB"},
    "fixed": {"fixed": {"weights": P("x")}},
    "time limit": {"time_limit": 11},
}


@pytest.mark.parametrize("change", DIFFERENT)
def test_what_differs_is_planned_anew(tmp_path, made, change):
    options = dict(DIFFERENT[change])
    fn, args = options.pop("fn", step), options.pop("args", ())
    planned(tmp_path), planned(tmp_path, fn, *args, **options)
    assert len(made) == 2 and len(list(tmp_path.iterdir())) == 2
    planned(tmp_path, fn, *args, **options)
    assert len(made) == 2


class Bare:
    """Its text has its address."""


def search(problem, run, beside=None):
    """It finds nothing."""


def split(step, beside, axis):
    return [DataParallel(axis)]


def test_functions_count_by_name_and_what_they_are_given():
    program = traced()

    def key(axis):
        tactic = functools.partial(split, beside=Bare(), axis=axis)
        how = {"tactics": [tactic], "search": functools.partial(search, beside=Bare())}
        return key_of(program, rules_for(program), options_of(**OPTIONS, **how))

    assert key("x") == key("x") != key("y")


@pytest.mark.parametrize("what", ["autoshard", "jax", "rule", "compiler"])
def test_versions_and_rules_count(what, monkeypatch):
    program = traced()
    rules, options = list(rules_for(program)), options_of(**OPTIONS)
    before = key_of(program, rules, options)
    assert key_of(program, rules, options) == before
    if what == "autoshard":
        monkeypatch.setattr("autoshard.cache.version", lambda name: "99")
    elif what == "jax":
        monkeypatch.setattr(jax, "__version__", "99")
    elif what == "compiler":
        options = replace(options, backend=adjusted(options.backend, "gathers", summed_up_to_bytes=1.0))
    else:
        index = next(i for i, rule in enumerate(rules) if rule.reduction)
        rules[index] = replace(rules[index], reduction=frozenset())
    assert key_of(program, rules, options) != before


def truncated(path):
    path.write_text(path.read_text()[:-100])


def edited(path):
    """One number of the plan is another one: the file is still JSON."""
    text = path.read_text()
    changed = text.replace('"local_bytes": ', '"local_bytes": 1', 1)
    assert changed != text
    path.write_text(changed)


FAULTS = {
    "truncated": truncated,
    "edited": edited,
    "empty": lambda path: path.write_text(""),
    "foreign": lambda path: path.write_text("#!/bin/sh\nexit 1\n"),
    "binary": lambda path: path.write_bytes(bytes(range(256))),
    "of another step": lambda path: path.write_bytes(next(p for p in path.parent.iterdir() if p != path).read_bytes()),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_are_not_what_was_written_are_ignored(tmp_path, made, fault):
    expected = planned(tmp_path)
    (path,) = tmp_path.iterdir()
    planned(tmp_path, other)
    FAULTS[fault](path)
    with pytest.warns(CacheWarning) as caught:
        found = planned(tmp_path)
    assert found.dumps() == expected.dumps() and len(made) == 3
    assert str(path) in str(caught[0].message) and "planned anew" in str(caught[0].message)
    if fault != "a folder":
        assert len(caught) == 1
        planned(tmp_path)  # it was written anew
        assert len(made) == 3


def test_a_digest_that_fits_does_not_make_a_plan(tmp_path, made):
    """As if an older version had written other JSON."""
    planned(tmp_path)
    (path,) = tmp_path.iterdir()
    program, options = traced(), options_of(**OPTIONS)

    class Strange:
        def dumps(self):
            return '{"format": 1}'

    store_plan(tmp_path, path.stem, Strange())
    with pytest.warns(CacheWarning, match="format"):
        assert load_plan(tmp_path, path.stem, program, options) is None


def test_a_folder_that_cannot_be_written_to(tmp_path, made):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.warns(CacheWarning):
            planned(folder)
    assert len(made) == 2


WRITER = """
import sys
from pathlib import Path
from autoshard.cache import store_plan

class Written:
    def dumps(self):
        return text

folder, text = Path(sys.argv[1]), Path(sys.argv[2]).read_text()
for _ in range(100):
    store_plan(folder, "key", Written())
"""


def test_two_processes_may_write_at_once(tmp_path):
    """A reader finds all of one or of the other at any time, and nothing is left over."""
    plan = autoshard.plan(step, WEIGHTS, BATCH, **OPTIONS)
    program, options = traced(), options_of(**OPTIONS)
    folder, writers = tmp_path / "folder", []
    store_plan(folder, "key", plan)
    for number, text in enumerate([plan.dumps(), plan.dumps() + "\n" * 100_000]):
        (tmp_path / str(number)).write_text(text)
        command = [sys.executable, "-c", WRITER, str(folder), str(tmp_path / str(number))]
        writers.append(subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}))
    reads = 0
    while any(writer.poll() is None for writer in writers):
        assert load_plan(folder, "key", program, options).cost == plan.cost
        reads += 1
    assert reads and [writer.wait() for writer in writers] == [0, 0]
    assert [path.name for path in folder.iterdir()] == ["key.plan"]


def test_a_cache_is_a_path():
    with pytest.raises(autoshard.ArgumentError, match="path of a folder"):
        planned(True)
