"""Search against every order there is; its limits, bounds and errors."""

import itertools
import random
from dataclasses import replace

import pytest
from event_queue import random_schedule, run, waits

from autoshard import ArgumentError, MemoryLimitError
from autoshard.pipeline import SCHEDULES, makespan_bound, schedule, search, simulate, validate
from autoshard.pipeline.scheduling.bound import without_groups


def possible_rows(plan, device, limit):
    """The orders of a device that keep microbatches in a row, do B after F and W after B, and hold at most `limit`."""
    lines = {}
    for task in sorted(map(tuple, plan.orders[device]), key=lambda task: task[1]):
        lines.setdefault((task[0], task[2]), []).append(task)
    last = "W" if plan.has_weight_tasks else "B"
    earlier = {"B": "F", "W": "B"}

    def extend(done, counts, held):
        if len(done) == len(plan.orders[device]):
            yield done
        for (kind, stage), line in lines.items():
            count = counts[kind, stage]
            if count == len(line) or (kind in earlier and count >= counts[earlier[kind], stage]):
                continue
            if kind == "F" and limit is not None and held >= limit:
                continue
            change = 1 if kind == "F" else -1 if kind == last else 0
            yield from extend((*done, line[count]), counts | {(kind, stage): count + 1}, held + change)

    return list(extend((), dict.fromkeys(lines, 0), 0))


def exhaustive(plan, seconds, lag, limit):
    """The least makespan over all orders that keep microbatches in a row."""
    needs = {task: sorted(inputs) for task, inputs in waits(plan).items()}
    best = float("inf")
    for rows in itertools.product(*(possible_rows(plan, device, limit) for device in range(plan.stages))):
        ends, free, place = {}, [0.0] * len(rows), [0] * len(rows)
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(rows):
                while place[device] < len(row):
                    task = row[place[device]]
                    arrivals = [
                        ends.get(other, float("inf")) + (lag if plan.placement[other[2]] != device else 0.0)
                        for other in needs.get(task, ())
                    ]
                    start = max([free[device], *arrivals])
                    if start == float("inf") or start >= best:
                        break
                    ends[task] = free[device] = start + seconds(task)
                    place[device] += 1
                    moved = True
        if all(i == len(row) for i, row in zip(place, rows, strict=True)):
            best = min(best, max(ends.values()))
    return best


SMALL = [  # name, stages, microbatches
    *(("1f1b", p, m) for p, m in itertools.product(range(1, 7), range(1, 7)) if p * m <= 12 and (p, m) != (2, 6)),
    pytest.param("1f1b", 2, 6, marks=pytest.mark.slow),  # 17,424 orders
    *(("zb_h1", p, m) for p, m in ((2, 2), (2, 3), (3, 2))),
    *(("zb_v", p, m) for p, m in ((2, 1), (3, 1))),
    ("chimera", 2, 2),
]


@pytest.mark.parametrize("name, p, m", SMALL)
def test_search_finds_the_best_order_there_is(name, p, m):
    rng = random.Random(f"{name} {p} {m}")
    plan = schedule(name, p, m)
    amounts = [[rng.choice((0.5, 1.0, 2.0, rng.random())) for _ in plan.placement] for _ in range(3)]
    lag = rng.choice((0.0, 0.3))

    def seconds(task):
        return amounts["FBW".index(task[0])][task[2]]

    for limit in (None, *rng.sample(range(plan.sharers[0], m * plan.sharers[0] + 1), 1)):
        found = search(plan, *amounts, lag, peak_limit=None if limit is None else limit / plan.sharers[0])
        validate(found.schedule)
        assert limit is None or max(found.timeline.peak) * plan.sharers[0] <= limit
        assert found.timeline.makespan == pytest.approx(exhaustive(plan, seconds, lag, limit), rel=1e-6)
        assert found.gap == pytest.approx(0.0, abs=1e-6)


def test_the_exhaustive_search_is_not_below_what_can_be():
    """GPipe in which one microbatch at a time is in flight takes the sum of all tasks."""
    plan = schedule("gpipe", 2, 3)
    assert exhaustive(plan, lambda task: 1.0, 0.0, 1) == 12.0
    assert exhaustive(plan, lambda task: 1.0, 0.0, None) == 8.0


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_named_schedule_is_below_the_bound(name):
    plan = schedule(name, 4, 8)
    bound = makespan_bound(plan, 1.0, 1.2, 0.8, 0.1)
    assert 0 < bound <= simulate(plan, 1.0, 1.2, 0.8, 0.1).makespan * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(30))
def test_no_random_order_is_below_the_bound_and_search_is_never_above_it(seed):
    plan = random_schedule(seed)
    rng = random.Random(seed)
    amounts = [[rng.random() for _ in plan.placement] for _ in range(3)]
    makespan = simulate(plan, *amounts, 0.2).makespan
    bound = makespan_bound(plan, *amounts, 0.2)
    found = search(plan, *amounts, 0.2, moves=50, time_limit=0)
    assert bound <= found.bound * (1 + 1e-9) <= found.timeline.makespan * (1 + 2e-9) <= makespan * (1 + 3e-9)
    assert run(found.schedule, lambda task: 1.0, lambda *_: 0.0) is not None


@pytest.mark.parametrize("seed", range(20))
def test_one_microbatch_that_fits_is_enough_for_any_graph(seed):
    plan = random_schedule(seed)
    alone = {}
    for task in plan.tasks():
        if task.kind == "F":
            key = (plan.placement[task.virtual_stage], task.microbatch // plan.slices)
            alone[key] = alone.get(key, 0.0) + 1.0
    limit = max(alone.values())
    found = search(plan, memory=lambda task: 1.0, memory_limit=limit, moves=20, time_limit=0)
    assert max(found.timeline.peak_bytes) <= limit
    with pytest.raises(MemoryLimitError, match=rf"microbatch \d+ alone takes {limit:g} on device \d") as error:
        search(plan, memory=lambda task: 1.0, memory_limit=limit - 0.5)
    assert (error.value.budget, error.value.needed) == (limit - 0.5, limit)


def test_a_bound_of_uneven_stages_is_that_of_the_slowest():
    plan = schedule("1f1b", 3, 4)
    assert makespan_bound(plan, [1.0, 5.0, 1.0], [1.0, 5.0, 1.0]) == 42.0  # 1 before, 40, 1 after


def test_search_closes_what_published_orders_leave_open():
    """Chimera and Hanayo are made for F = B; with B = 2F other orders of the same tasks are shorter."""
    for name, most in (("chimera", 28.0), ("hanayo", 31.0)):
        plan = schedule(name, 4, 8)
        found = search(plan, peak_limit=4, time_limit=0)
        assert found.timeline.makespan <= most < simulate(plan).makespan
        assert max(found.timeline.peak) <= 4.0


def test_local_search_and_the_integer_program_find_what_lists_miss():
    plan = schedule("zb_h1", 3, 3)
    amounts = [2.0, 0.5, 1.0], [1.0, 2.0, 0.5], [2.0, 2.0, 1.0]
    efforts = ({"moves": 0, "time_limit": 0}, {"moves": 500, "time_limit": 0}, {"moves": 0, "time_limit": 10})
    found = [search(plan, *amounts, peak_limit=2, **effort) for effort in efforts]
    assert [one.timeline.makespan for one in found] == [19.5, 19.0, 18.5]
    assert [one.gap > 0 for one in found] == [True, True, False]


def test_search_is_the_same_twice_and_more_moves_are_not_worse():
    plan = schedule("hanayo", 4, 8)
    one, two = (search(plan, peak_limit=4, moves=300, time_limit=0, seed=1) for _ in range(2))
    assert one.schedule == two.schedule
    assert one.timeline.makespan <= search(plan, peak_limit=4, moves=0, time_limit=0).timeline.makespan


def test_memory_in_bytes_counts_what_weights_need():
    plan = schedule("zb_h2", 3, 6)
    free = search(plan, 1, 1, 1, memory=4.0, time_limit=0)
    tight = search(plan, 1, 1, 1, memory=4.0, weight_memory=1.0, memory_limit=12.0, time_limit=0)
    assert max(tight.timeline.peak_bytes) <= 12.0 < max(free.timeline.peak_bytes)


def test_groups_and_evictions_are_taken_apart():
    assert without_groups(schedule("dualpipe", 2, 4)).fused == ()
    assert search(schedule("bpipe", 4, 6), moves=5, time_limit=0).schedule.evictions == ()


def test_tasks_that_differ_by_microbatch_are_left_to_local_search():
    plan = schedule("1f1b", 2, 3)
    found = search(plan, lambda task: 1.0 + task.microbatch, time_limit=5.0)
    assert found.timeline.makespan <= simulate(plan, lambda task: 1.0 + task.microbatch).makespan


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"peak_limit": -1}, "peak_limit=-1; a number is needed, 0 or more"),
        ({"peak_limit": "4"}, "peak_limit='4'"),
        ({"memory_limit": float("nan")}, "memory_limit=nan"),
        ({"moves": -1}, "moves=-1"),
        ({"time_limit": None}, "time_limit=None"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        search(schedule("1f1b", 2, 2), **arguments)


def test_orders_that_break_a_limit_are_no_candidates():
    plan = replace(schedule("gpipe", 3, 6), name="mine")
    found = search(plan, peak_limit=2, time_limit=0)
    assert max(found.timeline.peak) <= 2 and found.schedule.name == "mine"
