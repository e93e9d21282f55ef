"""Compiled code is loaded once, in the background where a program is so large that it will be needed."""

import subprocess
import sys
import threading
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import planning
from autoshard.solver import run
from autoshard.solver.local_search import large_search
from autoshard.solver.runtime.background import begun, in_background, result_of
from autoshard.solver.runtime.turns import turn


def test_work_goes_on_beside():
    go_on = threading.Event()
    future = begun(go_on.wait)
    assert not future.done()
    assert result_of(future, tick=go_on.set) is True


def test_what_it_raises_is_raised():
    with pytest.raises(ZeroDivisionError):
        in_background(lambda: 1 / 0, tick=lambda: None)


@pytest.fixture
def loads(monkeypatch):
    """A list that grows when compiled code is loaded."""
    count = []
    monkeypatch.setattr(run, "_load_compiled", lambda: count.append(1))
    run.begin_loading_compiled.cache_clear()
    yield count
    run.begin_loading_compiled.cache_clear()


@pytest.mark.parametrize("large", [True, False])
def test_a_large_program_has_it_loaded_once(loads, monkeypatch, large):
    monkeypatch.setattr(planning, "LARGE_PROGRAM", 0 if large else 1000)
    for shift in range(2):
        fn = lambda x, shift=shift: jnp.tanh(x) + shift  # noqa: E731
        autoshard.plan(fn, np.ones((8, 8), np.float32), mesh=mesh_of({"x": 8}), topology=slow_chips("x"))
    if large:
        run.begin_loading_compiled().result()
    assert len(loads) == large


@pytest.mark.parametrize("cold", [True, False])
def test_what_was_never_compiled_is_compiled_by_processes_beside(monkeypatch, cold):
    started = []

    def start(command, **keywords):
        started.append(command[-1])
        return SimpleNamespace(wait=lambda: None)

    stats = SimpleNamespace(cache_misses={"graph": int(cold)})
    cost_of = type("Kernel", (), {"__call__": lambda *args: 0.0, "stats": stats})()
    monkeypatch.setattr(large_search, "kernels", SimpleNamespace(cost_of=cost_of))
    monkeypatch.setattr(large_search.subprocess, "Popen", start)
    warmed = []
    for name in ("warm_up_searches", "warm_up_reductions"):
        monkeypatch.setattr(large_search, name, type(name, (), {"__call__": lambda self: warmed.append(1)})())
        getattr(large_search, name).__name__ = name
    large_search.warm_up()
    assert len(started) == 2 * cold and len(warmed) == 2
    assert all(name in " ".join(started) for name in ("warm_up_searches", "warm_up_reductions")) or not cold


def test_one_compiles_for_all():
    """Who comes later waits for it, and for the processes that it has started."""

    def come():
        with turn("test"):
            return True

    with turn("test") as held:
        other = begun(come)
        child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE, pass_fds=held)
        with turn("other work"):
            assert not other.done()
    assert not other.done()  # the child has the turn
    child.communicate(b"\n")
    assert other.result(timeout=20)


def test_nobody_waits_where_nothing_can_be_written(monkeypatch):
    monkeypatch.setattr("tempfile.gettempdir", lambda: "/proc/none")
    with turn("test") as held:
        assert held == ()
