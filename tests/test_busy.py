"""A busy machine plans what a quiet one does, bit for bit: work that is counted limits searches, not the clock."""

import contextlib
import functools
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import pytest
from models import MODELS, MORE_MODELS

from autoshard import topology
from autoshard.model.formulating import formulate
from autoshard.model.formulation import Formulation
from autoshard.model.memory_limit import solve_within
from autoshard.model.xla.backends import CPU, H100, V5E
from autoshard.program import trace
from autoshard.propagation import rules_for
from autoshard.solver.problem import Solution

MACHINES = {"cpu:8": ({"data": 4, "model": 2}, CPU), "v5e:2x4": ({"x": 2, "y": 4}, V5E), "h100:1x8": ({"x": 8}, H100)}
FREE, TIGHT = 1.0, 0.5  # of the memory that a plan holds which may hold all there is
SECONDS = {FREE: 60.0, TIGHT: 5.0}  # where little memory makes it hard, work ends the search
CASES = [
    pytest.param(name, machine, share, marks=[] if usual else [pytest.mark.slow])
    for name in MODELS | MORE_MODELS
    for machine in MACHINES
    for share in (FREE, TIGHT)
    for usual in [(name, machine, share) == ("lstm", "cpu:8", FREE)]
]


@functools.cache
def formulation_of(name: str, machine: str, memory: float | None = None) -> Formulation:
    model = {**MODELS, **MORE_MODELS}[name]()
    program = trace(model.step, jax.eval_shape(lambda: (model.state, model.batches(0))), {}, donate_argnums=0)
    mesh, backend = MACHINES[machine]
    target = topology(machine, mesh)
    memory = memory or target.memory_bytes
    return formulate(program, rules_for(program), mesh, target, memory=memory, backend=backend)


def formulated(name: str, machine: str, share: float) -> Formulation:
    free = formulation_of(name, machine)
    if share == FREE:
        return free
    return formulation_of(name, machine, share * free.peak_bytes(solve_within(free, SECONDS[FREE]).choice))


@contextlib.contextmanager
def clock(monkeypatch, speed: float):
    """While it lasts, the clocks that Python tells go this many times as fast."""

    def scaled(real):
        start = real()
        return lambda: start + speed * (real() - start)

    with monkeypatch.context() as patch:
        for name in ("monotonic", "perf_counter", "process_time", "time"):
            patch.setattr(time, name, scaled(getattr(time, name)))
        yield


def said(solve: object) -> tuple:
    """What comes of it: a solution, or an error."""
    try:
        solution: Solution = solve()
    except Exception as error:
        return type(error), str(error)
    return solution.choice, solution.cost, solution.bound, solution.status


@pytest.mark.parametrize("name, machine, share", CASES)
def test_a_clock_that_runs_ahead(monkeypatch, name, machine, share):
    """The same comes of a search for which one clock goes a hundred times as fast as another, if neither ends it."""
    formulation = formulated(name, machine, share)
    with clock(monkeypatch, 0.001):
        quiet = said(lambda: solve_within(formulation, SECONDS[share]))
    with clock(monkeypatch, 0.1):
        assert said(lambda: solve_within(formulation, SECONDS[share])) == quiet


def test_a_search_that_work_ends(monkeypatch):
    """What comes of it is not the best, and the same however long it takes; a clock that runs out ends it before."""
    formulation = formulated("mlp", "cpu:8", TIGHT)
    found = {}
    for speed, seconds in ((0.001, 1.5), (0.1, 1.5), (1e4, 1.5), (0.001, 4.0)):
        with clock(monkeypatch, speed):
            found[speed, seconds] = said(lambda seconds=seconds: solve_within(formulation, seconds))
    assert found[0.001, 1.5] == found[0.1, 1.5]
    assert found[1e4, 1.5] != found[0.1, 1.5] != found[0.001, 4.0]


@contextlib.contextmanager
def starved(process: int, share: float):
    """While it lasts, a process has this share of one core, as among busy others: it is stopped again and again."""
    os.sched_setaffinity(process, {min(os.sched_getaffinity(0))})
    ended, turn = threading.Event(), 0.03  # seconds

    def stopping():
        while not ended.wait(turn * share):
            os.kill(process, signal.SIGSTOP)
            ended.wait(turn * (1 - share))
            os.kill(process, signal.SIGCONT)

    thread = threading.Thread(target=stopping)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def digest(name: str) -> str:
    """Of the plan that is found for a model."""
    solution = solve_within(formulation_of(name, "cpu:8"), SECONDS[FREE])
    return hashlib.sha256(repr((solution.choice, solution.cost, solution.bound)).encode()).hexdigest()


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a process cannot be kept on one core here")
def test_a_starved_process():
    """Starved once it has imported all that it needs: imports plan nothing."""
    names = ["mlp"]
    code = f"from test_busy import digest\nprint(input())\nfor name in {names}: print(digest(name))"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-u", "-c", code], cwd=Path(__file__).parent, **pipes) as process:
        process.stdin.write("go\n")
        process.stdin.flush()
        assert process.stdout.readline() == "go\n"
        with starved(process.pid, share=1 / 3):
            printed = process.stdout.read()
    assert process.returncode == 0 and printed.split() == [digest(name) for name in names]
