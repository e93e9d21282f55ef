"""Named schedules against their published bubbles, peaks and staleness; what their arguments may be."""

import itertools
import math
from collections import Counter

import pytest

from autoshard import ArgumentError
from autoshard.pipeline import ASYNCHRONOUS, SCHEDULES, schedule, simulate, staleness, validate

SIZES = [(4, 8), (8, 16), (4, 12)]  # stages, microbatches
WHOLE = [(1.0, 2.0, 0.0), (1.0, 1.0, 0.0), (3.0, 4.0, 0.0)]  # seconds of F and B
SPLIT = [(1.0, 1.0, 1.0), (1.0, 1.2, 0.8)]
EQUAL = [(1.0, 1.0, 1.0)]

# Name, chunks, seconds at which it holds, bubble, and peak of the device that holds most. Bubble and peak are functions
# of p stages, m microbatches, v chunks and seconds f, b, w. A "span" is from a device's own first task to its last.
PUBLISHED = [
    ("gpipe", 1, WHOLE, lambda p, m, v, f, b, w: (p - 1) * (f + b), lambda p, m, v: m),
    ("1f1b", 1, WHOLE, lambda p, m, v, f, b, w: (p - 1) * (f + b), lambda p, m, v: min(p, m)),
    ("eager_1f1b", 1, WHOLE, lambda p, m, v, f, b, w: (p - 1) * (f + b), lambda p, m, v: min(2 * p - 1, m)),
    *(
        (
            "interleaved_1f1b",
            chunks,
            WHOLE,
            lambda p, m, v, f, b, w: (p - 1) * (f + b) / v,
            lambda p, m, v: ((v - 1) * p + 2 * (p - 1) + 1) / v,
        )
        for chunks in (2, 4)
    ),
    *(
        ("looped_bfs", chunks, WHOLE, lambda p, m, v, f, b, w: (p - 1) * (f + b) / v, lambda p, m, v: m)
        for chunks in (2, 4)
    ),
    ("zb_h1", 1, SPLIT, lambda p, m, v, f, b, w: (p - 1) * (f + b - w), lambda p, m, v: p),
    ("zb_h2", 1, EQUAL, lambda p, m, v, f, b, w: (p - 1) * f, lambda p, m, v: 2 * p - 1),
    ("zb_h2 span", 1, EQUAL, lambda p, m, v, f, b, w: (p - 1) * (f + b - 2 * w), lambda p, m, v: 2 * p - 1),
    ("zb_v span", 2, EQUAL, lambda p, m, v, f, b, w: 0, lambda p, m, v: p),
    ("zb_v", 2, EQUAL, lambda p, m, v, f, b, w: (p - 1) * f / 2, lambda p, m, v: p),  # the last device starts that late
    ("chimera", 1, [(1.0, 1.0, 0.0)], lambda p, m, v, f, b, w: p - 2, lambda p, m, v: p),
    ("hanayo", 2, [(1.0, 1.0, 0.0)], lambda p, m, v, f, b, w: (p - 1) * (f + b) / v, lambda p, m, v: p),
    ("hanayo", 4, [(1.0, 1.0, 0.0)], lambda p, m, v, f, b, w: (p - 1) * (f + b) / v, lambda p, m, v: p),
    # Of DualPipe: (P/2 - 1) (F&B + B - 3W) with the whole backward pass in B, and F&B = F + B; P counts stages, which a
    # device of DualPipeV has two of.
    ("dualpipe", 1, EQUAL, lambda p, m, v, f, b, w: (p / 2 - 1) * (f + b + w + b + w - 3 * w), lambda p, m, v: p + 1),
    ("dualpipe_v", 2, EQUAL, lambda p, m, v, f, b, w: (p - 1) * (f + 2 * b - w) / 2, lambda p, m, v: (2 * p + 1) / 2),
    ("bpipe", 1, WHOLE, lambda p, m, v, f, b, w: (p - 1) * (f + b), lambda p, m, v: math.ceil((p + 2) / 2)),
    ("graph", 1, WHOLE, lambda p, m, v, f, b, w: (p - 1) * (f + b), lambda p, m, v: p),
]


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: f"{row[0]} {row[1]}".replace(" ", "-"))
def test_published_bubble_and_peak(row):
    name, chunks, seconds, bubble, peak = row
    name, _, measure = name.partition(" ")
    for (p, m), (f, b, w) in itertools.product(SIZES, seconds):
        timeline = simulate(schedule(name, p, m, chunks), f, b, w, overlap=0.0)
        found = max(timeline.idle) if measure else timeline.bubble
        assert found == pytest.approx(bubble(p, m, chunks, f, b, w)), (p, m, f, b, w)
        assert max(timeline.peak) == pytest.approx(peak(p, m, chunks)), (p, m)


def test_each_device_of_1f1b_holds_as_many_as_are_ahead():
    assert simulate(schedule("1f1b", 4, 8)).peak == (4.0, 3.0, 2.0, 1.0)
    assert simulate(schedule("bpipe", 8, 16)).peak == (5.0, 5.0, 5.0, 5.0, 4.0, 5.0, 5.0, 5.0)
    chimera = simulate(schedule("chimera", 8, 16), 1, 1).peak
    assert chimera == (5.0, 6.0, 7.0, 8.0, 8.0, 7.0, 6.0, 5.0)  # D/2 + 1 to D


@pytest.mark.parametrize("p, m", [*SIZES, (6, 18), (12, 36), (5, 15)])
@pytest.mark.parametrize(
    "name, part, peak", [("v_half", 1 / 2, lambda p: (p + 2) // 2), ("v_min", 2 / 3, lambda p: (p + 4) // 3)]
)
def test_v_half_and_v_min_have_their_part_of_the_bubble_of_1f1b(name, part, peak, p, m):
    timeline = simulate(schedule(name, p, m), 1, 1, 1)
    assert timeline.bubble <= part * simulate(schedule("1f1b", p, m), 1, 2).bubble
    assert max(timeline.peak) == peak(p)


def test_eager_1f1b_hides_transfers():
    plain, eager = (simulate(schedule(name, 4, 8), 1, 2, transfer=0.5).bubble for name in ("1f1b", "eager_1f1b"))
    assert (plain, eager) == (17.0, 12.0)


@pytest.mark.parametrize("overlap", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("p, m", SIZES)
def test_dualpipe_with_overlap(p, m, overlap):
    """The README's figure is of the outer devices, which fuse all pairs. F&B takes 3 seconds less the overlap."""
    timeline = simulate(schedule("dualpipe", p, m), 1, 1, 1, overlap=overlap)
    assert timeline.makespan - min(timeline.work) == pytest.approx((p / 2 - 1) * (3 - overlap + 2 - 3))
    timeline = simulate(schedule("dualpipe_v", p, m), 1, 1, 1, overlap=overlap)
    assert timeline.makespan - min(timeline.work) == pytest.approx((p - 1) * (3 - overlap + 2 - 3) / 2)


@pytest.mark.parametrize("p, m", SIZES)
def test_dualpipe_is_below_its_formula_where_the_parts_of_backward_differ(p, m):
    f, b, w = 1.0, 1.5, 0.5
    formula = (p / 2 - 1) * (f + b + w + b + w - 3 * w)
    fused = simulate(schedule("dualpipe", p, m), f, b, w, overlap=0.0).bubble
    assert simulate(schedule("dualpipe", p, m), f, b, w).bubble < fused < formula


@pytest.mark.parametrize("p, m", SIZES)
def test_dualpipe_with_b_ahead_of_w(p, m):
    """Tasks that run on their own send the cotangent before W: half of the published bubble where F = B = W."""
    assert simulate(schedule("dualpipe", p, m), 1, 1, 1).bubble == p / 2 - 1
    assert simulate(schedule("dualpipe_v", p, m), 1, 1, 1).bubble == (p - 1) / 2


@pytest.mark.parametrize("p, m", SIZES)
def test_units_of_chimera_and_hanayo_do_not_close_up_where_b_takes_longer(p, m):
    """One unit has (p - 1) 2B / v in Hanayo; every further one adds what B is longer than F on its way."""
    for v in (2, 4):
        bubble = simulate(schedule("hanayo", p, m, v), 1, 2).bubble
        assert bubble == pytest.approx((p - 1) * 2 * 2 / v + (m // p - 1) * (p - 1) * 2 * (2 - 1) / v)
    bubble = simulate(schedule("chimera", p, m), 1, 2).bubble
    assert bubble == pytest.approx((p / 2 - 1) * 4 + (m // p - 1) * (p / 2 - 1) * 2)


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize("p, m", SIZES)
def test_slices_divide_the_bubble(p, m, slices):
    for name in ("terapipe", "seq1f1b"):
        assert simulate(schedule(name, p, m, slices=slices)).bubble == pytest.approx((p - 1) * 3 / slices)
    assert max(simulate(schedule("terapipe", p, m, slices=slices)).peak) == m
    assert max(simulate(schedule("seq1f1b", p, m, slices=slices)).peak) == pytest.approx((p - 1 + slices) / slices)


def test_slices_of_a_causal_sequence_that_take_longer_and_longer():
    """Attention of a later slice reads more keys: a slice's seconds grow with its place."""
    seconds = lambda task: (1 + task.microbatch % 4) / 10  # noqa: E731
    timeline = simulate(schedule("seq1f1b", 4, 8, slices=4), seconds, lambda task: 2 * seconds(task))
    assert timeline.work == pytest.approx((24.0,) * 4)
    assert timeline.end["F", 3, 0] == pytest.approx(1.0)


BRANCHES = ((), (0,), (), (2,), (1, 3))  # two encoders of two stages, and what reads both


def test_branches_of_a_graph_run_side_by_side():
    timeline = simulate(schedule("graph", 5, 8, predecessors=BRANCHES))
    assert timeline.bubble == 2 * 3  # the longest path has three stages
    assert timeline.peak == (3.0, 2.0, 3.0, 2.0, 1.0)
    assert timeline.start["F", 0, 2] == 0.0
    assert simulate(schedule("1f1b", 5, 8)).bubble == 4 * 3


@pytest.mark.parametrize("name", [*SCHEDULES, *ASYNCHRONOUS])
def test_every_size_is_valid_or_refused(name):
    made = Counter()
    for p, m, v in itertools.product(range(1, 6), range(1, 13), (1, 2, 3, 4)):
        try:
            found = schedule(name, p, m, v)
        except ArgumentError:
            made["refused"] += 1
            continue
        validate(found)
        assert (found.stages, found.microbatches) == (p, m)
        assert len(found.placement) == found.replicas * p * found.sharers[0]
        made["valid"] += 1
    assert made["valid"] >= 8


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_microbatch_is_in_flight_on_every_device_and_all_are_done(name):
    timeline = simulate(schedule(name, 4, 8), 1, 1, 1)
    assert set(timeline.start) == set(timeline.end) == set(timeline.schedule.tasks())
    assert min(timeline.peak) >= 1 and timeline.bubble >= 0
    assert staleness(timeline.schedule).forward == (0,) * len(timeline.schedule.placement)


def test_staleness():
    one = staleness(schedule("pipedream", 4, 12))
    assert one.forward == one.backward == (3, 2, 1, 0)  # n - s - 1
    assert one.versions == (4, 3, 2, 1)
    two = staleness(schedule("pipedream_2bw", 4, 12))
    assert (two.forward, two.backward, two.versions) == ((1,) * 4, (1,) * 4, (2,) * 4)
    mare = staleness(schedule("pipemare", 4, 12, every=1))
    assert mare.forward == (6, 4, 2, 0)  # 2 (P - i) + 1 less the update that a gradient itself makes
    assert (mare.backward, mare.versions) == ((0,) * 4, (1,) * 4)
    assert staleness(schedule("pipemare", 4, 40, every=4)).forward == (2, 1, 1, 0)
    assert staleness(schedule("ampnet", 4, 12)).backward == (0,) * 4
    with pytest.raises(Exception, match=r"F\(microbatch 2.*reads version 1 of the weights when 0 is the latest"):
        staleness(schedule("pipedream_2bw", 4, 12, every=1))


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("1f2b", 4, 8), "no schedule is called '1f2b'. Did you mean '1f1b'"),
        (("ZB-H1", 4, 8), "Did you mean 'zb_h1'"),
        (("megatron", 4, 8), "no schedule is called 'megatron'. There are gpipe, 1f1b"),
        ((None, 4, 8), "no schedule is called None"),
        (("1f1b", 0, 8), "stages=0; a whole number is needed, 1 or more"),
        (("1f1b", 4, 0), "microbatches=0"),
        (("1f1b", 4, 2.5), "microbatches=2.5"),
        (("1f1b", True, 8), "stages=True"),
        (("interleaved_1f1b", 4, 8, 0), "chunks=0"),
        (("1f1b", 4, 8, 2), "'1f1b' has one virtual stage per device; chunks=2. Any number: interleaved_1f1b"),
        (("dualpipe", 4, 8, 2), "one virtual stage per device and pipeline; chunks=2"),
        (("zb_v", 4, 8, 3), "has two virtual stages per device; chunks=3"),
        (("hanayo", 4, 8, 3), "even number of virtual stages; chunks=3"),
        (("interleaved_1f1b", 4, 10, 2), "a multiple of 4 microbatches for 4 stages; microbatches=10. Use 8 or 12"),
        (("interleaved_1f1b", 4, 2, 2), "microbatches=2. Use 4"),
        (("dualpipe", 4, 6), "at least 8 microbatches for 4 stages; microbatches=6"),
        (("dualpipe", 4, 9), "a multiple of 2 .* microbatches=9. Use 8 or 10"),
        (("dualpipe", 3, 8), "stages in pairs; stages=3 is odd. Use 4"),
        (("chimera", 4, 7), "multiple of 2"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        schedule(*arguments)


@pytest.mark.parametrize(
    "name, options, message",
    [
        ("1f1b", {"slices": 2}, "'1f1b' takes no slices=; terapipe, seq1f1b do"),
        ("1f1b", {"every": 2}, "takes no every=; pipedream, pipedream_2bw, pipemare, ampnet do"),
        ("gpipe", {"predecessors": ((),)}, "takes no predecessors=; graph do"),
        ("seq1f1b", {"slices": 0}, "slices=0"),
        ("graph", {"predecessors": ((), (0,))}, "2 entries for stages=4"),
        ("graph", {"predecessors": ((), (2,), (0,), (1,))}, "predecessors.1.=.2,.: a stage reads stages of smaller"),
        ("graph", {"predecessors": 3}, "predecessors=3; per stage a sequence"),
    ],
)
def test_wrong_options_are_refused(name, options, message):
    with pytest.raises(ArgumentError, match=message):
        schedule(name, 4, 8, **options)
