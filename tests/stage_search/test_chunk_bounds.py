"""Bounds of pipelines with several virtual stages per device, against every cut, simulated by `autoshard.pipeline`."""

import itertools
import math
from dataclasses import fields

import numpy as np
import pytest
from every_pipeline import cuts_of

from autoshard.pipeline import schedule, simulate
from autoshard.stage_search import Channel, DeviceRow, LayerCosts, MicrobatchCosts, StageSpace, SubMesh, search_stages
from autoshard.stage_search.chunks import ChunkProblem, mean_bound
from autoshard.stage_search.fractional import fractional_bound
from autoshard.stage_search.layer_capacity import RoomForLayers, _DeviceLimits
from autoshard.stage_search.simulating import schedule_facts, schedule_form
from autoshard.stage_search.tightening import KindBound
from autoshard.stage_search.whole_layers import LAST_LAYERS, LayerSeconds, WholeLayers, endings, least_per_layer

LAG = 0.05
CASES = [  # schedule, devices, chunks, microbatches, layers, seed, head
    ("interleaved_1f1b", 2, 2, 4, 8, 0, 1.0),
    ("interleaved_1f1b", 2, 3, 2, 9, 1, 4.0),
    ("interleaved_1f1b", 3, 2, 3, 8, 2, 0.3),
    ("looped_bfs", 2, 2, 4, 8, 3, 2.0),
    ("zb_v", 2, 2, 4, 8, 4, 2.0),
    ("v_half", 2, 2, 3, 7, 5, 1.0),
]


def problem_of(name, devices, chunks, microbatches, layers, seed, head, memory=math.inf):
    """Layers of nearly equal costs but for the last one."""
    random = np.random.default_rng(seed)
    costs = random.uniform(0.9, 1.1, (7, layers)) * np.array([[1.0], [1.2], [0.8], [0.3], [1.0], [1.0], [1.0]])
    costs[:3, -1] *= head
    table = LayerCosts(*costs).table(SubMesh.anywhere("1", 1, devices, memory))
    return problem_on((table,), name, devices, chunks, microbatches)


def problem_on(tables, name, devices, chunks, microbatches):
    """Layers of these costs on a row of devices."""
    layers, channel = tables[0].layers, Channel(LAG, 1e12)
    sent = np.array([0.0, *[1e-9] * (layers - 1), 0.0])
    row = DeviceRow.of_hosts(1, devices, inside=channel, between=channel)
    space = StageSpace(row, {microbatches: MicrobatchCosts(tables, sent, sent)}, ((name, chunks),))
    return ChunkProblem(space, schedule_form(name, devices, chunks), microbatches, tables)


def best_of_all(problem, name, devices, chunks):
    """Seconds of the best cut that fits, by `simulate`, over all tables of each virtual stage."""
    made = schedule(name, devices, problem.microbatches, chunks)
    homes, found = np.array(made.placement), math.inf
    of_device = [[one for one in problem.tables if device in one.shape.starts] for device in range(devices)]
    room = [tables[0].shape.memory_bytes for tables in of_device]
    every_table = list(itertools.product(*(of_device[home] for home in homes)))
    for cuts, tables in itertools.product(cuts_of(problem.space.layers, devices * chunks), every_table):
        at = list(itertools.pairwise(cuts))

        def of(kind, at=at, tables=tables):
            return np.array([getattr(table, kind)[run] for table, run in zip(tables, at, strict=True)])

        if not np.isfinite(of("forward")).all():
            continue  # there is no such stage
        split = made.has_weight_tasks
        backward = of("backward") if split else of("backward") + of("weight")
        weight = of("weight") if split else 0.0
        line = simulate(made, of("forward"), backward, weight, LAG, memory=of("microbatch_bytes"))
        held = [
            of("fixed_bytes")[homes == d].sum() + of("working_bytes")[homes == d].max() + line.peak_bytes[d]
            for d in range(devices)
        ]
        if all(one <= limit for one, limit in zip(held, room, strict=True)):
            found = min(found, line.makespan + max(of("after")[homes == d].sum() for d in range(devices)))
    return found


def endings_of(problem):
    return endings(problem.space.layers, len(problem.form.placement), LAST_LAYERS)


def bounds_of(problem, facts):
    """Every bound: of the mean, of whole layers, of the program, and of all parts after all programs."""
    split = facts.schedule.has_weight_tasks
    whole = WholeLayers.of(problem.space, problem.microbatches, problem.tables, has_weight_tasks=split)
    room = RoomForLayers(problem, whole, facts.in_flight)
    parts = KindBound(problem, whole, room, 0.0, math.inf)
    while parts.raise_once(facts):
        pass
    return {
        "mean": mean_bound(problem),
        "whole layers": whole.bound(problem.form.placement),
        "program": fractional_bound(problem, facts),
        "room": min(room.bound(ending, math.inf) for ending in endings_of(problem)),
        "parts": parts.seconds,
    }


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[5]}")
def test_no_cut_takes_less_than_a_bound_and_the_tightest_is_near(case):
    name, devices, chunks, microbatches = case[:4]
    problem = problem_of(*case)
    best = best_of_all(problem, name, devices, chunks)
    found = bounds_of(problem, schedule_facts(name, devices, chunks, microbatches))
    assert all(bound <= best * (1 + 1e-9) for bound in found.values()), (best, found)
    assert found["program"] <= found["parts"] * (1 + 1e-9)
    assert found["parts"] >= 0.93 * best, (best, found)


def test_the_program_sees_memory():
    case = ("interleaved_1f1b", 2, 2, 4, 8, 0, 1.0)
    problem = problem_of(*case)
    facts = schedule_facts("interleaved_1f1b", 2, 2, 4)
    tight = problem_of(*case, memory=17.0)
    assert math.isfinite(best_of_all(tight, "interleaved_1f1b", 2, 2))
    assert fractional_bound(tight, facts) >= fractional_bound(problem, facts)
    starved = problem_of(*case, memory=9.0)
    assert math.isinf(best_of_all(starved, "interleaved_1f1b", 2, 2))
    assert math.isinf(fractional_bound(starved, facts))


@pytest.mark.parametrize("seed", range(4))
def test_each_device_has_its_own_memory_and_working_bytes(seed):
    """The first device is slow, small and needs much to work in; the other is none of these."""
    random = np.random.default_rng(seed)
    ones, seconds, ratio = np.ones(8), random.uniform(0.5, 2, 8), random.uniform(2, 4)
    tables = tuple(
        LayerCosts(
            seconds / speed, 2 * seconds / speed, 0 * ones, 0 * ones, 10 * ones, 0.01 * ones, working * ones
        ).table(SubMesh(f"1 from {start}", 1, (start,), memory))
        for start, speed, memory, working in ((0, 1.0, 45.0, 12.0), (1, ratio, 64.0, 3.0))
    )
    case = "interleaved_1f1b", 2, 2
    problem = problem_on(tables, *case, 4)
    best, found = best_of_all(problem, *case), bounds_of(problem, schedule_facts(*case, 4))
    assert all(bound <= best * (1 + 1e-9) for bound in found.values()), (best, found)
    assert found["program"] >= 0.8 * best, (best, found)


@pytest.mark.parametrize("head", [1.0, 2.5])
def test_whole_layers_have_to_fit_into_memory(head):
    """Eight layers and a head on two devices: in 8.7 bytes four layers fit, and the head beside three at most."""
    layers, case = 9, ("interleaved_1f1b", 2, 2)
    ones, heads = np.ones(layers), np.array([1.0] * (layers - 1) + [head])
    costs = LayerCosts(ones, 2 * ones, 0 * ones, 0 * ones, 2 * heads, 0.02 * ones, 0.5 * ones)
    table = costs.table(SubMesh.anywhere("1", 1, 2, 8.7))
    problem, facts = problem_on((table,), *case, 4), schedule_facts(*case, 4)
    assert math.isinf(best_of_all(problem, *case))
    room = room_of(problem, facts)
    assert math.isinf(min(room.bound(ending, math.inf) for ending in endings_of(problem)))
    assert not room.is_enough()


def room_of(problem, facts):
    whole = WholeLayers.of(
        problem.space, problem.microbatches, problem.tables, has_weight_tasks=facts.schedule.has_weight_tasks
    )
    return RoomForLayers(problem, whole, facts.in_flight)


def test_layers_that_differ_in_what_they_work_in_are_of_several_kinds():
    """The first layer needs more to work in than the second device can spare."""
    ones, case = np.ones(8), ("interleaved_1f1b", 2, 2)
    costs = LayerCosts(ones, 2 * ones, 0 * ones, 0 * ones, ones, 0.01 * ones, np.array([3.0, *ones[1:]]))
    tables = tuple(costs.table(SubMesh(str(at), 1, (at,), room)) for at, room in enumerate((9.0, 6.0)))
    problem = problem_on(tables, *case, 4)
    best, found = best_of_all(problem, *case), bounds_of(problem, schedule_facts(*case, 4))
    assert all(bound <= best * (1 + 1e-9) for bound in found.values()), (best, found)
    assert search_stages(problem.space).best.seconds == pytest.approx(best)


def test_a_device_without_stages_of_some_layer():
    """No stage of the first device has the third layer."""
    ones, case = np.ones(6), ("interleaved_1f1b", 2, 2)
    costs = LayerCosts(ones, 2 * ones, 0 * ones, 0 * ones, ones, 0.1 * ones, ones)
    lacking, whole = (costs.table(SubMesh(str(at), 1, (at,), 20.0)) for at in range(2))
    for field in fields(lacking)[2:]:
        getattr(lacking, field.name)[:3, 3:] = np.inf
    problem = problem_on((lacking, whole), *case, 4)
    best, found = best_of_all(problem, *case), bounds_of(problem, schedule_facts(*case, 4))
    assert all(bound <= best * (1 + 1e-9) for bound in found.values()), (best, found)
    assert found["room"] >= 0.8 * best


def test_there_is_no_room_for_a_layer_that_fits_nowhere():
    case = ("hanayo", 2, 2)
    problem = problem_of(*case, 4, 6, 0, 50.0, memory=9.0)
    problem.tables[0].fixed_bytes[:1, 1:] += 9.0
    room = room_of(problem, schedule_facts(*case, 4))
    assert not room.is_enough()
    assert all(math.isinf(room.bound(ending, math.inf)) for ending in endings_of(problem))


@pytest.mark.parametrize("seed", range(3))
def test_fast_and_lean_layers_share_the_memory(seed):
    """Of each layer the lean plan is slower and holds less, so devices have as many fast ones as fit."""
    layers, case = 7, ("interleaved_1f1b", 2, 2)
    random, ones = np.random.default_rng(seed), np.ones(7)
    slower = random.uniform(1.1, 1.6)
    sizes = 5.0 * ones, 5.0 / random.uniform(1.5, 3) * ones
    memory = 5.0 * layers / 2 * random.uniform(0.7, 0.95) + 1.5
    tables = tuple(
        LayerCosts(speed * ones, 2 * speed * ones, 0 * ones, 0.1 * ones, size, 0.05 * ones, ones).table(
            SubMesh.anywhere("1", 1, 2, memory), name
        )
        for name, speed, size in (("", 1.0, sizes[0]), ("lean", slower, sizes[1]))
    )
    problem = problem_on(tables, *case, 4)
    best, found = best_of_all(problem, *case), bounds_of(problem, schedule_facts(*case, 4))
    assert math.isfinite(best)
    assert all(bound <= best * (1 + 1e-9) for bound in found.values()), (best, found)
    assert found["room"] >= found["whole layers"] * (1 - 1e-3)
    assert found["room"] >= 0.85 * best, (best, found)


@pytest.mark.parametrize("name, seed", [("interleaved_1f1b", 2), ("interleaved_1f1b", 4), ("zb_v", 0)])
def test_cuts_move_until_all_fits(name, seed):
    """Layers of equal seconds and different bytes: the balanced cut does not fit, a few others do."""
    ones, sizes = np.ones(7), np.random.default_rng(seed).uniform(0.3, 2.0, (2, 7))

    def problem(memory):
        table = LayerCosts(ones, ones, ones, ones, *sizes, ones).table(SubMesh.anywhere("1", 1, 2, memory))
        return problem_on((table,), name, 2, 2, 4)

    memory = next(one for one in itertools.count(9.0, 0.25) if math.isfinite(best_of_all(problem(one), name, 2, 2)))
    starved, tight = (search_stages(problem(one).space).best for one in (memory - 0.25, memory))
    assert starved is None
    assert tight.seconds <= 1.2 * best_of_all(problem(memory), name, 2, 2)


def test_a_bound_of_memory_that_is_too_high_is_noticed(monkeypatch):
    """Planted: every layer takes three places."""
    most = _DeviceLimits.most
    monkeypatch.setattr(_DeviceLimits, "most", lambda self, seconds: most(self, seconds) / 3)
    problem = problem_of(*CASES[0])
    found = bounds_of(problem, schedule_facts(*CASES[0][:1], *CASES[0][1:4]))
    assert found["room"] > best_of_all(problem, *CASES[0][:3])


def test_a_bound_that_is_too_high_is_noticed(monkeypatch):
    """Planted: the first microbatch passes every layer twice."""
    case = CASES[0]
    busy = LayerSeconds._busy
    monkeypatch.setattr(LayerSeconds, "_busy", lambda self, *given: 3 * busy(self, *given))
    problem = problem_of(*case)
    found = bounds_of(problem, schedule_facts(*case[:1], *case[1:4]))
    assert found["whole layers"] > best_of_all(problem, *case[:3])


def test_a_run_of_layers_that_saves_something_lowers_what_layers_add():
    runs = LayerCosts(*[np.ones(5)] * 7).table(SubMesh.anywhere("1", 1, 2, 1e9)).work.copy()
    assert least_per_layer(runs).tolist() == [3.0] * 5
    runs[0, 5] -= 5.0  # five layers at once save a third
    assert least_per_layer(runs) == pytest.approx([2.0] * 5)


def test_every_ending_is_one_of_a_cut():
    for layers, stages in (4, 2), (5, 5), (6, 3), (3, 3), (4, 1):
        made = set()
        for cuts in cuts_of(layers, stages):
            home = [sum(cut <= layer for cut in cuts[1:-1]) for layer in range(layers)]
            made.add(tuple(stages - 1 - home[layers - 1 - i] for i in range(min(3, layers))))
        assert set(endings(layers, stages, 3)) == made


def test_the_search_proves_that_equal_virtual_stages_are_near_the_best():
    """Twenty equal layers on four devices: five virtual stages of one layer each are better than any two or four."""
    layers, devices = 20, 4
    ones = np.ones(layers)
    table = LayerCosts(ones, 2 * ones, 0 * ones, 0 * ones, ones, ones, ones).table(
        SubMesh.anywhere("1", 1, devices, 1e9)
    )
    row = DeviceRow.of_hosts(1, devices, inside=Channel(0.0, 1e12), between=Channel(0.0, 1e12))
    sent = np.array([0.0, *[1.0] * (layers - 1), 0.0])
    schedules = (("1f1b", 1), *(("interleaved_1f1b", chunks) for chunks in (2, 4, 5)))
    found = search_stages(StageSpace(row, {8: MicrobatchCosts((table,), sent, sent)}, schedules))
    assert (found.best.choice.schedule, found.best.choice.chunks) == ("interleaved_1f1b", 5)
    assert found.best.seconds == pytest.approx(8 * 5 * 3 + 3 * 3)  # (p - 1)(F + B)/v beside the work
    assert found.gap <= 0.03


def test_schedules_for_gradients_of_weights_wait_until_nothing_else_fits():
    """Layers without such gradients that fit with few microbatches in flight alone, as in v_min."""
    layers, devices = 20, 10
    ones = np.ones(layers)
    costs = LayerCosts(ones, 2 * ones, 0 * ones, 0 * ones, 0 * ones, ones, 0 * ones)
    row = DeviceRow.of_hosts(1, devices, inside=Channel(0.0, 1e12), between=Channel(0.0, 1e12))
    sent = np.array([0.0, *[1e-9] * (layers - 1), 0.0])

    def best(memory):
        table = costs.table(SubMesh.anywhere("1", 1, devices, memory))
        space = StageSpace(row, {10: MicrobatchCosts((table,), sent, sent)}, (("1f1b", 1), ("v_min", 2)))
        return search_stages(space).best

    assert best(100.0).choice.schedule == "1f1b"
    tight = best(9.0)  # 1F1B holds ten microbatches of a layer or more on the first device
    assert tight.choice.schedule == "v_min"
    assert max(tight.peak_bytes) <= 9.0
