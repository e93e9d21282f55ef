"""The simulator against an event queue on random schedules, and by hand; what `validate` refuses."""

import random
import sys
from dataclasses import replace

import pytest
from event_queue import random_schedule, run

from autoshard import ArgumentError, MissingPackageError, ScheduleError
from autoshard.pipeline import ASYNCHRONOUS, SCHEDULES, Eviction, Task, schedule, simulate, validate


def random_amounts(seed):
    """Seconds of each task and between devices, zeros among them."""
    rng = random.Random(seed)
    of_task = {}

    def seconds(task):
        return of_task.setdefault(tuple(task), rng.choice((0.0, 0.5, 1.0, rng.random())))

    matrix = [[rng.choice((0.0, rng.random())) for _ in range(4)] for _ in range(4)]
    return seconds, matrix


def agree(plan, seconds, matrix):
    """Whether the simulator says what the event queue says."""
    matrix = [row[: plan.stages] for row in matrix[: plan.stages]]
    start, end, most = run(plan, seconds, lambda source, target: matrix[source][target])
    timeline = simulate(plan, seconds, seconds, seconds, matrix)
    assert {tuple(task): moment for task, moment in timeline.start.items()} == pytest.approx(start)
    assert {tuple(task): moment for task, moment in timeline.end.items()} == pytest.approx(end)
    assert timeline.makespan == pytest.approx(max(end.values()) - min(start.values()))
    if len({(plan.placement[i], plan.sharers[i]) for i in range(len(plan.placement))}) == len({*plan.placement}):
        sharers = dict(zip(plan.placement, plan.sharers, strict=True))
        per_device = [most[device] / sharers.get(device, 1) / plan.slices for device in range(plan.stages)]
        assert timeline.peak == pytest.approx(per_device)


@pytest.mark.parametrize("seed", range(60))
def test_random_orders_against_an_event_queue(seed):
    agree(random_schedule(seed), *random_amounts(seed))


@pytest.mark.parametrize("seed", range(40))
def test_shuffled_orders_are_refused_where_the_event_queue_stops(seed):
    rng = random.Random(seed)
    plan = random_schedule(seed)
    orders = [list(order) for order in plan.orders]
    order = rng.choice([order for order in orders if order])
    i, j = rng.randrange(len(order)), rng.randrange(len(order))
    order[i], order[j] = order[j], order[i]
    plan = replace(plan, orders=tuple(map(tuple, orders)))
    if run(plan, lambda task: 1.0, lambda source, target: 0.0) is None:
        with pytest.raises(ScheduleError, match=r"deadlocks: device \d at [FBW]\(.*\) for [FBW]\("):
            validate(plan)
    else:
        agree(plan, *random_amounts(seed))


def test_the_event_queue_sees_a_wrong_duration():
    plan = schedule("1f1b", 2, 3)
    start, _, _ = run(plan, lambda task: 1.0, lambda source, target: 0.0)
    assert start != simulate(plan, 1.0, 1.0 + 1e-6).start


@pytest.mark.parametrize("name", [*SCHEDULES, *ASYNCHRONOUS])
def test_every_schedule_against_an_event_queue(name):
    agree(replace(schedule(name, 4, 8), evictions=()), *random_amounts(3))


PLAN = schedule("1f1b", 2, 3)  # F0 F1 B0 F2 B1 B2 on device 0, F0 B0 F1 B1 F2 B2 on device 1


def test_times_by_hand():
    timeline = simulate(PLAN, 1.0, 2.0, transfer=0.5)
    assert timeline.start["F", 0, 1] == 1.5
    assert timeline.end["B", 0, 1] == 4.5
    assert (timeline.start["B", 0, 0], timeline.start["F", 2, 0]) == (5.0, 7.0)
    assert timeline.end["B", 1, 0] == 10.0
    assert timeline.makespan == timeline.end["B", 2, 0] == 14.0
    assert timeline.work == (9.0, 9.0) and timeline.bubble == 5.0
    assert timeline.idle == (5.0, 1.0)
    assert timeline.peak == (2.0, 1.0)


def test_uneven_stages_and_links():
    timeline = simulate(PLAN, [1.0, 3.0], [2.0, 4.0], transfer=[[0.0, 1.0], [10.0, 0.0]])
    assert timeline.start["F", 0, 1] == 2.0
    assert timeline.end["B", 0, 1] == 9.0
    assert timeline.start["B", 0, 0] == 19.0
    assert timeline.work == (9.0, 21.0)
    assert simulate(PLAN, lambda task: 1.0 + task.virtual_stage * 2, [2.0, 4.0]).work == (9.0, 21.0)


def test_chunks_and_slices_share_the_seconds_of_a_stage():
    assert simulate(schedule("interleaved_1f1b", 2, 4, 4), 1.0, 2.0).work == (12.0, 12.0)
    assert simulate(schedule("terapipe", 2, 4, slices=3), 1.0, 2.0).work == pytest.approx((12.0, 12.0))
    assert simulate(schedule("chimera", 2, 4), 1.0, 2.0).work == (12.0, 12.0)  # two pipelines, not two chunks
    assert simulate(schedule("zb_h1", 2, 4), 1.0, 2.0).work == (12.0, 12.0)  # W as it is said: 0
    assert simulate(schedule("zb_h1", 2, 4), 1.0, 2.0, 0.5).work == (14.0, 14.0)


def test_bytes():
    assert simulate(PLAN, memory=[6.0, 4.0]).peak_bytes == (12.0, 4.0)
    split = schedule("zb_h1", 2, 3)  # F0 F1 B0 W0 F2 B1 W1 B2 W2, and F0 B0 F1 B1 W0 F2 B2 W1 W2
    assert simulate(split, 1, 1, 1, memory=6.0).peak_bytes == (12.0, 12.0)
    assert simulate(split, 1, 1, 1, memory=6.0, weight_memory=1.0).peak_bytes == (12.0, 7.0)
    assert simulate(split, 1, 1, 1, memory=6.0, weight_memory=0.0).peak_bytes == (12.0, 6.0)
    assert simulate(PLAN, memory=6.0, weight_memory=1.0).peak_bytes == (12.0, 6.0)  # without W all goes with B


def test_fused_tasks_run_as_one():
    fused = (Task("B", 0, 0), Task("F", 2, 0))
    assert simulate(replace(PLAN, fused=(fused,))).end == simulate(PLAN).end
    timeline = simulate(replace(PLAN, fused=(fused,)), 1.0, 2.0, overlap=0.0)
    assert (timeline.start["B", 0, 0], timeline.end["F", 2, 0]) == (4.0, 7.0)
    assert timeline.start["B", 1, 0] == 7.0
    timeline = simulate(replace(PLAN, fused=(fused,)), 1.0, 2.0, overlap=1.0)
    assert timeline.end["F", 2, 0] == 6.0 and timeline.work == (8.0, 9.0)
    assert timeline.end["B", 0, 0] == pytest.approx(4.0 + 2 * 2 / 3)


def test_evicted_savings_are_counted_where_they_are():
    plan = replace(schedule("gpipe", 2, 3), evictions=(Eviction(Task("F", 1, 0), 1, Task("B", 1, 0)),))
    assert simulate(plan).peak == (2.0, 4.0)
    assert simulate(plan, memory=2.0).peak_bytes == (4.0, 8.0)


def test_a_keeper_holds_what_comes_beside_what_returns():
    """Of four devices the last has one microbatch of its own; the first sends it the last one and gets one back."""
    assert simulate(schedule("bpipe", 4, 6)).peak == (3.0, 3.0, 2.0, 3.0)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda order: order[1:], r"misses F\(microbatch 0, virtual stage 0\), which belongs to device 0; 1 of 12"),
        (
            lambda order: (*order, order[2]),
            r"has B\(microbatch 0, virtual stage 0\) twice: on device 0 and on device 0",
        ),
        (lambda order: (("F", 0, 1), *order), r"F\(microbatch 0, virtual stage 1\) on device 0; .* placed on device 1"),
        (lambda order: (("F", 3, 0), *order), r"microbatch 3, virtual stage 0\), which is no task of it: .* F and B"),
        (lambda order: (("X", 0, 0), *order), "which is no task of it"),
        (lambda order: (("F", 0), *order), "tasks: .kind, microbatch, virtual stage"),
        (lambda order: order[::-1], r"deadlocks: device 0 at B\(microbatch 2.*Put a task that others wait for"),
    ],
)
def test_faults_are_refused(change, message):
    with pytest.raises(ScheduleError, match=f"(?s){message}"):
        simulate(replace(PLAN, orders=(change(PLAN.orders[0]), PLAN.orders[1])))


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"placement": (0, 2)}, "virtual stage 1 on device 2; it has the orders of 2 devices, 0 to 1"),
        ({"predecessors": ((), (1,))}, "virtual stage 1 reads virtual stage 1"),
        ({"predecessors": ((),)}, "2 virtual stages in `placement` and 1 in `predecessors`"),
        ({"orders": ()}, "has 0 devices"),
        ({"microbatches": 0}, "0 microbatches"),
        ({"microbatches": 4}, "misses F.microbatch 3"),
        ({"replicas": 2}, "equally many of its 2 virtual stages and of its 3 microbatches"),
        ({"fused": ((Task("F", 0, 0), Task("B", 0, 0)),)}, "which do not stand in a row"),
        ({"evictions": (Eviction(Task("F", 0, 0), 1, Task("B", 1, 0)),)}, "must stand after it and not after B"),
        ({"evictions": (Eviction(Task("F", 0, 0), 0, Task("B", 0, 0)),)}, "another device of the 2 is needed"),
    ],
)
def test_impossible_schedules_are_refused(fields, message):
    with pytest.raises(ScheduleError, match=message):
        validate(replace(PLAN, **fields))


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"forward": -1.0}, "forward=-1.0; 0 or more"),
        ({"forward": "1"}, "forward='1'; a number is needed"),
        ({"backward": [1.0, 2.0, 3.0]}, "backward has 3 entries; schedule '1f1b' has 2 virtual stages"),
        ({"transfer": [[0.0]]}, "2 rows of 2 entries"),
        ({"transfer": -0.1}, "transfer=-0.1; 0 seconds"),
        ({"overlap": -1.0}, "overlap=-1.0"),
        ({"memory": 1.0, "weight_memory": 2.0}, "weight_memory=2 bytes of F.* part of memory=1"),
        ({"weight": float("nan")}, "weight=nan"),
    ],
)
def test_wrong_amounts_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        simulate(PLAN, **arguments)


def test_the_chart():
    timeline = simulate(PLAN)
    assert str(timeline) == (
        "device 0  F0 F1 ......B0    F2 B1    ...B2\ndevice 1  ...F0 B0    F1 B1    F2 B2    ......"
    )
    assert timeline.chart(width=34) == "device 0  FFFF....BBBBFFBBBB..BBBB\ndevice 1  ..FFBBBBFFBBBBFFBBBB...."
    assert "F1b" in str(simulate(schedule("zb_v", 2, 3)))
    with pytest.raises(ArgumentError, match="width=0"):
        timeline.chart(0)


def test_the_plot():
    figure = simulate(PLAN).plot()
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["device 0", "device 1"]
    assert len(axes.patches) == 12
    assert simulate(schedule("zb_h1", 2, 2)).plot(axes) is figure


def test_the_plot_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingPackageError, match=r"pip install 'autoshard\[plot\]'"):
        simulate(PLAN).plot()
