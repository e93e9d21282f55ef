"""A plan never changes the numbers of the programs that JAX tests its primitives with (`benchmarks/harnesses.py`)."""

import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import mesh_of

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from harnesses import FAULTS, PARTS, Task, chosen_tasks, differ_as_with_noise, programs, ran, rows_of
from workers import Ended, Worker, answers

SAMPLE = 12  # programs in the normal run
SHARES = 48  # of all programs; a share takes some minutes
MESH = mesh_of({"x": 4, "y": 2})


def families():
    return {name: harness.group_name for name, harness in programs().items()}


def assert_no_faults(rows):
    assert not [row for row in rows if row.outcome in FAULTS and not row.known]


def test_a_sample():
    tasks, every = chosen_tasks(families(), None, SAMPLE, 0), programs()
    rows = [ran(every[task.name], task.part, MESH) for task in tasks]
    assert_no_faults(rows)
    assert sum(row.split and row.outcome == "equal" for row in rows) >= SAMPLE / 2


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_every_program(share):
    tasks = [Task(name, part) for name in sorted(families())[share::SHARES] for part in PARTS]
    assert_no_faults(rows_of(tasks, families()))


@pytest.mark.parametrize(
    "fn, found, as_with_noise",
    [
        (lambda x: 2 * x, lambda x: 2.001 * x, False),
        (lambda x: 2 * x, lambda x: 2 * x.at[3].set(jnp.nan), False),
        (lambda x: jnp.argsort(x), lambda x: jnp.argsort(-x), False),
        (lambda x: jnp.sin(1e7 * x), lambda x: jnp.sin(1e7 * x + 1), True),
        (lambda x: jnp.sum(x - jnp.mean(x)), lambda x: jnp.sum(x - jnp.mean(x)) + 1e-7, True),
    ],
)
def test_what_noise_explains(fn, found, as_with_noise):
    x = jnp.asarray(np.random.default_rng(0).normal(size=64), jnp.float32)
    assert differ_as_with_noise(fn, (x,), found(x), fn(x)) == as_with_noise


def test_a_task_that_ends_its_process_or_never_ends(tmp_path):
    """Tasks after it are answered."""
    script = tmp_path / "script.py"
    script.write_text(
        f"import os, sys, time; sys.path.append({str(Path(__file__).parents[2] / 'benchmarks')!r})\n"
        "from workers import serve\n"
        "serve(lambda task: os._exit(3) if task == 'exit' else time.sleep(60) if task == 'sleep' else task)\n"
    )
    found = dict(answers(["one", "exit", "two", "sleep", "three"], 1, lambda: Worker([str(script)], {}, 3.0)))
    assert [found[task] for task in ("one", "two", "three")] == ["one", "two", "three"]
    assert isinstance(found["exit"], Ended) and "3" in found["exit"].detail and not found["exit"].late
    assert isinstance(found["sleep"], Ended) and found["sleep"].late
