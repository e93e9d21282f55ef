"""Threads that plan, call and verify steps at once."""

import os
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import planning
from autoshard.compiled import verification

OPTIONS = {"mesh": mesh_of({"x": 4, "y": 2}), "topology": slow_chips("xy")}
WEIGHTS, BATCH = np.ones((8, 32), np.float32), np.linspace(0, 1, 128, dtype=np.float32).reshape(16, 8)


def step(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)


def in_threads(work, count=4):
    """What each of several threads that start at once returns."""
    results, started = [None] * count, threading.Barrier(count)

    def run(i):
        started.wait()
        results[i] = work()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def searches(monkeypatch):
    """A list that grows with every search."""
    count, solved = [], planning._solved

    def noted(*args):
        count.append(1)
        time.sleep(0.1)  # so that the other threads come to it
        return solved(*args)

    monkeypatch.setattr(planning, "_solved", noted)
    return count


@pytest.mark.parametrize("what", ["call", "plan"])
def test_first_calls_of_one_signature_plan_once(searches, what):
    decorated = autoshard.autoshard(step, **OPTIONS)
    found = in_threads(lambda: decorated(WEIGHTS, BATCH) if what == "call" else decorated.plan(WEIGHTS, BATCH))
    assert len(searches) == 1
    if what == "call":
        for result in found:
            np.testing.assert_allclose(result, step(WEIGHTS, BATCH), rtol=1e-5)
    else:
        assert all(plan is found[0] for plan in found)


def test_a_step_may_call_another_while_threads_plan_both(searches):
    inner = autoshard.autoshard(step, **OPTIONS)
    outer = autoshard.autoshard(lambda weights, batch: inner(weights, batch) * 2, **OPTIONS)
    found = in_threads(lambda: outer(WEIGHTS, BATCH) - inner(WEIGHTS, BATCH))
    for result in found:
        np.testing.assert_allclose(result, step(WEIGHTS, BATCH), rtol=1e-5)


def redirected():
    """Where standard error goes while it is collected in threads, which begin and end in turn; and after."""
    texts, before = [], os.fstat(2)
    second_is_in, first_is_out = threading.Event(), threading.Event()

    def first():
        with verification._standard_error(into=texts):
            second_is_in.wait(timeout=0.5)
        first_is_out.set()

    def second():
        with verification._standard_error(into=texts):
            second_is_in.set()
            first_is_out.wait(timeout=0.5)

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
        time.sleep(0.05)
    for thread in threads:
        thread.join()
    after = os.fstat(2)
    return (after.st_dev, after.st_ino) != (before.st_dev, before.st_ino)


def test_standard_error_stays_where_it_is():
    assert not redirected()


class NoLock:
    def __enter__(self): ...

    def __exit__(self, *error): ...


def test_without_turns_it_would_not(monkeypatch):
    kept = os.dup(2)
    try:
        monkeypatch.setattr(verification, "_REDIRECTING", NoLock())
        assert redirected()
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def test_plans_are_verified_in_threads():
    plan = autoshard.plan(step, WEIGHTS, BATCH, **OPTIONS)
    before = os.fstat(2).st_ino
    found = in_threads(plan.verify, count=3)
    assert all(one.ok for one in found) and os.fstat(2).st_ino == before


def test_there_may_be_no_standard_error(capfd):
    texts, kept = [], os.dup(2)
    os.close(2)
    try:
        with verification._standard_error(into=texts):
            pass
    finally:
        os.dup2(kept, 2)
        os.close(kept)
    assert texts == []
