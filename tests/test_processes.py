"""Processes that share a mesh run one plan, or all of them raise: real processes, which talk over gloo on CPU."""

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import compilation
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stages_in_processes
from oracles import mesh_of, slow_chips

import autoshard
from autoshard.options import options_of
from autoshard.processes import ProcessGroup, agreement
from autoshard.processes.agreement import Claims
from autoshard.propagation import rules_for

HERE = Path(__file__).parent
SECONDS = 20.0  # within which a situation ends on all processes

WORK = [
    "works",
    "searches_end_at_different_points",
    "one_has_a_cached_plan",
    "plan_on_the_first_alone",
    "plans_are_equal",
    "replanned_to_fit",
    "loads_its_rows",
    "takes_a_typed_key",
    "made_by_each_process",
    "plans_together",
    "two_of_them",
    "documented",
    "stages_of_their_own",
    "tries_again",
    "works_after_errors",
]
# Situation -> what every process but the one that caused it says.
FAIL = {
    "different_memory": "They differ in memory:\n  process 0: 1.0 GiB\n  process ",
    "different_reductions": "They differ in reductions:\n  process 0: auto\n  process ",
    "mesh_chosen_on_the_last": "They differ in mesh:\n  process 0: {'x': ",
    "different_code": "They differ in step",
    "different_numbers": "process 0: mul [[], []] -> [[]] with [0.1",
    "different_random_numbers": "random numbers:\n  process 0: jax_threefry_partitionable=True\n  process ",
    "different_order_of_devices": "They differ in mesh:\n  process 0: {'x': ",
    "different_seeds": "weights is not the same on all processes of the mesh.\nMake it of the same seed",
    "different_shapes": "They differ in arguments:\n  process 0: batch float32[32, 8]\n  process ",
    "different_code_in_plan": "process 0: add [[32, 8], []] -> [[32, 8]] with [2.0] at many_processes.py:",
    "one_has_a_plan_file": "process 0: given, ",
    "nothing_fits": "no sharding fits in 100 B per device",
    "planning_fails": "process 0 of the mesh failed: ZeroDivisionError: planted",
    "interrupted": "process 0 of the mesh failed: KeyboardInterrupt",
    "tracing_fails_on_the_last": "failed: ZeroDivisionError: planted",
    "the_last_never_comes": "has not come to this step in ",
    "the_last_dies": "has ended or hangs",
}
CAUSE = {
    "planning_fails": 0,
    "interrupted": 0,
    "tracing_fails_on_the_last": -1,
    "the_last_never_comes": -1,
    "the_last_dies": -1,
}
LAST = ["the_last_never_comes", "the_last_dies"]  # after which there is no going on
ORDER = [*WORK[:-1], *(name for name in FAIL if name not in LAST), WORK[-1], *LAST]


def launched(count: int, folder: Path, order: list[str] = ORDER) -> dict[str, list[dict]]:
    """What came of each situation on each process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(HERE.parent), "XLA_FLAGS": compilation.CPU_ONLY}
    command = [sys.executable, str(HERE / "many_processes.py"), str(count), port, str(folder), *order]
    running = subprocess.Popen(command, env=env, start_new_session=True)
    try:
        running.wait(timeout=240)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.wait()

    def outcome(name: str, index: int) -> dict:
        path = folder / f"{name}.{index}"
        return json.loads(path.read_text()) if path.exists() else {"missing": True}

    return {name: [outcome(name, index) for index in range(count)] for name in {*order}}


@pytest.fixture(scope="module", params=[4, pytest.param(2, marks=pytest.mark.slow)])
def outcomes(request, tmp_path_factory):
    """Launched once for all workers of pytest."""
    root, count = tmp_path_factory.getbasetemp(), request.param
    folder = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / f"processes {count}"
    done = folder / "outcomes"
    try:
        folder.mkdir()
    except FileExistsError:
        late = time.monotonic() + 300
        while not done.exists() and time.monotonic() < late:
            time.sleep(0.2)
        return json.loads(done.read_text())
    found = launched(count, folder)
    written = folder / "written"
    written.write_text(json.dumps(found))
    written.rename(done)
    return found


def step(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)


WEIGHTS, BATCH = np.ones((8, 32), np.float32), np.linspace(0, 1, 256, dtype=np.float32).reshape(32, 8)
ALONE = {
    "works": step,
    "searches_end_at_different_points": lambda w, b: step(w, jnp.tanh(b)),
    "one_has_a_cached_plan": lambda w, b: step(w, jnp.sin(b)),
    "plan_on_the_first_alone": lambda w, b: step(w, jnp.cos(b)),
    "replanned_to_fit": lambda w, b: step(w, jnp.abs(b)),
    "loads_its_rows": lambda w, b: step(w, b * 2),
    "made_by_each_process": lambda w, b: step(w, b * jax.random.uniform(jax.random.key(0))),
    "takes_a_typed_key": lambda w, b: step(w, b * jax.random.uniform(jax.random.key(0))),
    "two_of_them": step,
    "tries_again": lambda w, b: step(w, b / 3),
    "works_after_errors": lambda w, b: step(w, 1 - b),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_numbers_are_those_of_one_device(outcomes, name):
    expected = WEIGHTS
    for _ in range(2):
        expected = ALONE[name](expected, BATCH)
    values = [one["value"] for one in outcomes[name]]
    values = values[:2] if name == "two_of_them" else values
    for value in values:
        np.testing.assert_allclose(value[0] if isinstance(value, list) else value, jnp.sum(expected), rtol=1e-5)


def test_only_the_first_searches(outcomes):
    (plan, searches), *others = (one["value"] for one in outcomes["plans_are_equal"])
    assert searches == 1 and others == [[plan, 0]] * len(others)
    (_, searches), *others = (one["value"] for one in outcomes["one_has_a_cached_plan"])
    assert searches == 1 and all(value[1] == 1 for value in others)  # that which filled the cache


def test_functions_planned_together_have_one_layout_everywhere(outcomes):
    (plans, searches), *others = (one["value"] for one in outcomes["plans_together"])
    assert searches >= 2 and others == [[plans, 0]] * len(others)


def test_the_program_of_the_page_trains_alike_everywhere(outcomes):
    first, *others = (one["value"] for one in outcomes["documented"])
    assert len(first) == 3 and others == [first] * len(others)


def test_all_may_try_again(outcomes):
    first, *others = (one["value"][1] for one in outcomes["tries_again"])
    assert first == 2 and others == [1] * len(others)


def test_all_plan_again_where_one_compiler_asks_for_more_memory(outcomes):
    assert [one["value"][1] for one in outcomes["replanned_to_fit"]] == [2] * len(outcomes["replanned_to_fit"])


@pytest.mark.parametrize("name", FAIL)
def test_all_processes_raise(outcomes, name):
    found = outcomes[name]
    cause = {CAUSE.get(name)} - {None}
    cause = {index % len(found) for index in cause}
    for index, one in enumerate(found):
        if index in cause:
            assert one.get("kind") != "AutoshardError", one  # its own error, or none
        else:
            assert one["kind"] == "AutoshardError" and FAIL[name] in one["text"], one
            assert one["seconds"] < SECONDS
    assert len({one["error"] for i, one in enumerate(found) if i not in cause}) == 1


def assert_a_failing_stage_ended_the_step(outcome, stage, count):
    losses, text, seconds, is_well_again = outcome["value"][:4]
    np.testing.assert_allclose(losses, stages_in_processes.losses_on_one_device(), rtol=1e-4)
    assert f"stage {stage} in the forward pass of microbatch 1 failed: MemoryError: planted (on process" in text
    assert "Its arguments are as they were" in text
    assert seconds < SECONDS and is_well_again


def test_processes_run_stages_of_their_own(outcomes):
    """They train as one device does, by the plan of the first; a stage that fails ends the step everywhere."""
    found = outcomes["stages_of_their_own"]
    for index, one in enumerate(found):
        assert_a_failing_stage_ended_the_step(one, len(found) - 1, len(found))
        assert (one["value"][4] > 0) == (index == 0)  # searches
    assert len({one["value"][1] for one in found}) == 1


STAGES = ["a_shared_stage_fails", "in_lockstep", "stages_of_neighbours", "stacks_are_copied", "two_ways"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_stages_lie_on_processes_in_any_way(count, tmp_path):
    found = launched(count, tmp_path, STAGES)
    for one in found["a_shared_stage_fails"]:
        assert_a_failing_stage_ended_the_step(one, 0, count)
    for name in STAGES[1:]:
        for one in found[name]:
            np.testing.assert_allclose(one["value"], stages_in_processes.losses_on_one_device(), rtol=1e-4)


def claims(fn=step, shape=None, args=(WEIGHTS, BATCH), given=None, keywords=None, **options):
    mesh = mesh_of(shape or {"x": 4, "y": 2})
    options = {"mesh": mesh, "topology": slow_chips(mesh.shape)} | options
    program = autoshard.autoshard(fn, **options).trace(*args)
    return Claims.of(program, rules_for(program), options_of(**options), keywords or {}, given)


def named(fn, name="step"):
    fn.__name__ = name
    return fn


CONSTANT = np.arange(8.0, dtype=np.float32)
DIFFERENT = {
    "step": {"fn": lambda w, b: step(w, b)},
    "mesh": {"shape": {"x": 2, "y": 4}},
    "arguments": {"args": (WEIGHTS, BATCH[:16])},
    "operations": {"fn": named(lambda weights, batch: step(weights, jnp.tanh(batch)))},
    "constants": {},
    "memory": {"memory": "1GiB"},
    "topology": {"topology": replace(slow_chips("xy"), memory_bandwidth=2e9)},
    "fixed": {"fixed": {"batch": jax.sharding.PartitionSpec("x")}},
    "refine": {"refine": 2},
    "ignore_constraints": {"ignore_constraints": True},
    "trips": {"trips": 7},
    "jit keywords": {"keywords": {"keep_unused": True}},
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_every_difference_is_told(what):
    """After the way through the store, too."""
    ours, theirs = claims(), claims(**DIFFERENT[what])
    if what == "constants":
        ours, theirs = (claims(named(lambda w, b, c=CONSTANT + i: step(w, b) + jnp.sum(c))) for i in range(2))
    assert ours.difference(Claims.loads(ours.dumps()), 1, 0) == ""
    told = ours.difference(Claims.loads(theirs.dumps()), 1, 0)
    assert f"They differ in {what}:\n  process 0: " in told and "\n  process 1: " in told


def test_limits_of_the_search_may_differ():
    assert claims(time_limit=5).difference(claims(time_limit=50, cache="plans"), 1, 0) == ""


def test_only_the_leader_searches_with_a_function():
    """Functions, whose texts have addresses, are no claims; tactics that are ones count by names and arguments."""

    def said(number: int) -> Claims:
        tactic = functools.partial(lambda number, step: {}, number)
        return Claims.loads(claims(search=lambda run: number, tactics=[tactic]).dumps())

    assert said(0).difference(said(0), 1, 0) == ""
    assert "differ in tactics" in said(0).difference(said(1), 1, 0)


class Alone:
    """A group of two, as its leader sees it; it keeps what is posted."""

    here = leader = 0
    leads = True
    joined = ProcessGroup.joined
    leader_says = ProcessGroup.leader_says

    def __init__(self):
        self.round, self._depth, self.lock, self._said, self.posted = 0, 0, threading.RLock(), {}, []

    def post(self, key, text):
        self.posted.append((key, text))


def test_the_mesh_is_chosen_anew_for_other_options(monkeypatch):
    """Of one step with other options the leader ranks anew, and tells of no failure of a mesh that it leaves."""
    group = Alone()
    monkeypatch.setattr(ProcessGroup, "of", lambda mesh: group)

    def ranked(fn=step, **options):
        made = autoshard.autoshard(fn, mesh="auto", topology="v5e:2x2", **options)
        return made._ranking_of_all(group, (WEIGHTS, BATCH), {})

    def named_axis(weights, batch):
        return step(weights, jax.lax.with_sharding_constraint(batch, jax.sharding.PartitionSpec("model")))

    ranked()
    ranked(memory="1GiB")
    ranked(remat="auto")
    assert ranked(search=lambda run: None, time_limit=3) == ranked()
    assert "model" in ranked(named_axis)
    keys = {key for key, _ in group.posted if key.startswith("mesh/")}
    assert len(keys) == 4
    assert not [text for _, text in group.posted if "error" in text]
    assert {key.split("/")[0] for key, _ in group.posted} == {"mesh", "choosing"}


def test_a_pipeline_is_chosen_where_the_others_get_to_know(monkeypatch):
    """A step that cannot be traced is told of when it runs; planned alone, it holds up nobody."""
    group, depths = Alone(), []
    monkeypatch.setattr(ProcessGroup, "of", lambda mesh: group)

    def fails(weights, batch):
        depths.append(group._depth)
        raise ZeroDivisionError("planted")

    sharded = autoshard.autoshard(fails, mesh=mesh_of({"x": 2}), pipeline="auto")
    for run, rounds in ((sharded.plan, 0), (sharded, 1)):
        with pytest.raises(ZeroDivisionError):
            run(WEIGHTS, BATCH)
        assert group.round == rounds and len(group.posted) == rounds
    assert group.posted[0][0] == "failed/0/0" and {*depths} == {1}


def test_layouts_count():
    """Two plans of one program that differ in a layout have different digests."""
    plan = autoshard.plan(step, WEIGHTS, BATCH, mesh=mesh_of({"x": 4, "y": 2}))
    annotations = plan.annotations
    value, layout = next((value, layout) for value, layout in annotations.homes.items() if layout)
    moved = {**annotations.homes, value: tuple(() if dim else ("x",) for dim in layout)}
    other = replace(plan, annotations=replace(annotations, homes=moved))
    assert agreement.digest_of(plan) == agreement.digest_of(replace(plan)) != agreement.digest_of(other)
