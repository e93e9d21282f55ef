"""What each virtual stage of a device may hold: working bytes are shared, since one program runs at a time."""

from types import SimpleNamespace

import numpy as np
import pytest

from autoshard.stage_planning import choosing
from autoshard.stage_planning.exact_stages import (
    MOST_LEANER_PLANS,
    _fast_where_there_is_room,
    _StagePlanner,
    exact_pipeline,
    stage_in_flight,
    stage_limits,
)
from autoshard.stage_search import (
    Channel,
    ChosenStage,
    DeviceRow,
    LayerCosts,
    MicrobatchCosts,
    PipelineChoice,
    StageSpace,
    SubMesh,
    simulated,
)
from autoshard.stage_search.simulating import schedule_facts

ROOM, FIXED, LEFT, WORKING = 100.0, 4.0, 1.0, 50.0


def choice_of(chunks, working=WORKING):
    """Two devices with stages of one layer each, but for the last, which has two."""
    layers = 2 * chunks + 1
    ones = np.ones(layers)
    costs = LayerCosts(ones, ones, 0 * ones, 0 * ones, FIXED * ones, LEFT * ones, working * ones)
    table = costs.table(SubMesh.anywhere("1", 1, 2, ROOM))
    ends = [*range(1, 2 * chunks), layers]
    stages = tuple(ChosenStage(i, end, table, i % 2) for i, end in enumerate(ends))
    name = "interleaved_1f1b" if chunks > 1 else "1f1b"
    return PipelineChoice(name, chunks, 4, stages), schedule_facts(name, 2, chunks, 4)


@pytest.mark.parametrize("chunks", [2, 3, 5])
def test_virtual_stages_share_the_memory_of_their_device(chunks):
    choice, facts = choice_of(chunks)
    limits = stage_limits(choice, facts)
    for device in range(2):
        own = [number for number, home in enumerate(facts.schedule.placement) if home == device]
        assert sum(limits[number] - WORKING for number in own) + WORKING == pytest.approx(ROOM)
        for number in own:  # equal parts of the memory would be less than what a program holds beside
            held = len(choice.stages[number].layers) * (FIXED + stage_in_flight(facts, number) * LEFT)
            assert held + WORKING <= limits[number]
            assert chunks == 2 or ROOM / chunks < WORKING


def test_a_stage_alone_has_all_of_it_and_working_bytes_beyond_the_memory_are_split():
    assert stage_limits(*choice_of(1)) == [ROOM, ROOM]
    assert stage_limits(*choice_of(2, working=200.0)) == [ROOM / 2] * 4


class Cost:
    """What planning a stage found: seconds of F, B, W and once; bytes kept, left by F, and worked in."""

    def __init__(self, seconds, kept):
        self.row = seconds, seconds, 0.0, 0.0, kept, LEFT, WORKING


@pytest.mark.parametrize("kept, leaner_ones", [(22.0, 0), (24.0, 1), (30.0, 2)])
def test_as_many_stages_are_lean_as_the_device_needs(kept, leaner_ones):
    """A device has two virtual stages and room for 45 bytes beside what it works in and five microbatches."""
    choice, facts = choice_of(2)
    fast, lean = [[Cost(seconds, size) for _ in choice.stages] for seconds, size in ((1.0, kept), (1.1, 16.0))]
    found = _fast_where_there_is_room(space_of(choice), choice, facts, list(zip(fast, lean, strict=True)))
    on_first = [found[n] for n, home in enumerate(facts.schedule.placement) if home == 0]
    assert sum(one in lean for one in on_first) == leaner_ones
    held = sum(one.row[4] for one in on_first) + WORKING + LEFT * facts.in_flight[0].sum(axis=1).max()
    assert held <= ROOM


class Stages:
    """Twelve virtual stages of two kinds, of which the planner finds plans that hold just what they may."""

    kinds = (0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 0)

    def __init__(self):
        self.asked = []

    def cost(self, number, where, in_flight, **_):
        self.asked.append((number, where.memory, in_flight))
        held = min(where.memory, 100.0)
        return SimpleNamespace(held=lambda in_flight: held)


@pytest.mark.parametrize("step, leaner", [(0.0, 1), (0.1, 2), (1.0, 2), (6.0, 2)])
def test_stages_of_a_kind_share_a_few_leaner_plans(step, leaner):
    """The first has room for its fastest plan, the others for less, each for a little more than the one before."""
    stages, shape = Stages(), SimpleNamespace(mesh=None, topology=None, in_row=SimpleNamespace(name="8"))
    planner = _StagePlanner(stages, SimpleNamespace(usable=1.0))
    limits = [100.0, *(30.0 + step * i for i in range(10)), 200.0]
    first = planner.plans_within([shape] * 12, [1.0] * 12, limits, 1)
    assert max(map(len, first)) == 2 and len(stages.asked) == 3
    found = planner.plans_within([shape] * 12, [1.0] * 12, limits, MOST_LEANER_PLANS)
    assert sum(memory == np.inf for _, memory, _ in stages.asked) == 2 and len(stages.asked) == 2 + leaner
    assert len(found[0]) == len(found[11]) == 1
    for plans, limit in zip(found[1:11], limits[1:11], strict=True):
        assert plans[0].held(1.0) == 100.0 and any(one.held(1.0) <= limit for one in plans[1:])


@pytest.mark.parametrize("least_room, leaner", [(27.0, 2), (20.0, 1)])
def test_stages_with_few_microbatches_in_flight_get_a_plan_that_is_lean_with_few(least_room, leaner):
    """The plan for the least room keeps much and saves little: too much where less flies. 20 bytes do for no plan."""
    plans = [
        SimpleNamespace(held=lambda in_flight, kept=kept, saved=saved: kept + in_flight * saved)
        for kept, saved in ((10.0, 10.0), (10.0, 2.0), (2.0, 3.5))
    ]

    def cost(number, where, in_flight, **_):
        return next((one for one in plans if one.held(in_flight) <= where.memory), plans[-1])

    in_flight, limits = (8.0, 8.0, 2.0), (least_room, 27.0, 9.5)
    shape = SimpleNamespace(mesh=None, topology=None, in_row=SimpleNamespace(name="8"))
    planner = _StagePlanner(SimpleNamespace(kinds=(0, 0, 0), cost=cost), SimpleNamespace(usable=1.0))
    found = planner.plans_within([shape] * 3, in_flight, limits, 1)
    assert [len(own) for own in found] == [1 + leaner] * 3
    rooms = list(zip(found, in_flight, limits, strict=True))
    assert leaner == 1 or all(any(one.held(flying) <= limit for one in own) for own, flying, limit in rooms)


class Planned:
    """Stages of which the second leaner plan is faster than the first and keeps less, but works in more."""

    row = property(lambda self: (self.seconds, self.seconds, 0.0, 0.0, self.kept, LEFT, self.working))

    def __init__(self, seconds, kept, working):
        self.seconds, self.kept, self.working = seconds, kept, working

    def held(self, in_flight):
        return self.kept + in_flight * LEFT + self.working


@pytest.mark.parametrize("working, seconds", [(51.0, 1.5), (46.0, 1.1)])
def test_more_plans_make_no_pipeline_worse(working, seconds):
    """The first leaner plan fits on both virtual stages of a device; the second one may not, but is tried first."""
    choice, _ = choice_of(2)
    plans = iter((Planned(1.5, 24.0, 45.0), *[Planned(1.1, 22.5, working)] * 2))
    asked = {}

    def cost(number, where, in_flight, **_):
        fast = Planned(1.0, 30.0, WORKING) if number == 0 else Planned(1.0, FIXED, LEFT)
        return fast if where.memory == np.inf else asked.setdefault(where.memory, next(plans, None))

    cut = SimpleNamespace(kinds=(0, 1, 0, 3), cost=cost, crossing=lambda: (0.0, 0.0))
    shape = SimpleNamespace(mesh=None, topology=None, in_row=SimpleNamespace(name="1"))
    found = exact_pipeline(space_of(choice), choice, lambda *_: cut, {"1": shape}, SimpleNamespace(usable=1.0))
    assert len(asked) == 2 and found.simulated.fits
    assert max(one.seconds for one in found.costs) == seconds


@pytest.mark.parametrize("more, count", [(1.0, 2), (1.1, 2), (1.5, 8), (3.0, None)])
def test_if_whole_stages_hold_more_than_all_tables_say_choices_that_hold_less_are_planned(more, count, monkeypatch):
    """Equal stages hold 95 of 100 bytes with 2 microbatches by the tables; others, and those of 8, hold less."""
    ones, tables = np.ones(6), {}
    for microbatches in (2, 8):
        costs = LayerCosts(ones, ones, 0 * ones, 0 * ones, 10 * ones, 20 / microbatches * ones, 5 * ones)
        tables[microbatches] = MicrobatchCosts((costs.table(SubMesh.anywhere("1", 1, 2, ROOM)),), *np.zeros((2, 7)))
    space = StageSpace(DeviceRow((Channel(0.0, 1e9),)), tables)

    def exact(space, choice, *_):
        assert all(stage.table.shape.memory_bytes == ROOM for stage in choice.stages)
        peaks = [more * size for size in simulated(space, choice).peak_bytes]
        fits = max(peaks) <= ROOM
        return SimpleNamespace(simulated=SimpleNamespace(peak_bytes=peaks, seconds=1.0, fits=fits), choice=choice)

    monkeypatch.setattr(choosing, "exact_pipeline", exact)
    planned = SimpleNamespace(space=space, shapes={}, with_planned=lambda *_: None)
    monkeypatch.setattr(choosing, "planned_space", lambda _: planned)
    nothing = SimpleNamespace(mesh_shape=None, topology=None, backend=None, memory=None, units=())
    steps = SimpleNamespace(cut_into_units=None, cut_at=None, units_of=lambda _: nothing)
    found = choosing.choose_pipeline(steps, nothing, counts=[2, 8])
    assert (found and found.pipeline.choice.microbatches) == count


def test_a_stage_without_a_plan_leaves_no_pipeline():
    choice, facts = choice_of(2)
    none = [()] * len(choice.stages)
    assert _fast_where_there_is_room(space_of(choice), choice, facts, none) == [None]


def space_of(choice):
    channel, table = Channel(0.0, 1e9), choice.stages[0].table
    sent = np.zeros(table.layers + 1)
    row = DeviceRow.of_hosts(1, 2, inside=channel, between=channel)
    return StageSpace(row, {choice.microbatches: MicrobatchCosts((table,), sent, sent)})


@pytest.mark.parametrize("more, planned", [(1.1, [4, 4]), (1.5, [4, 8])])
def test_choices_that_are_known_to_hold_too_much_are_not_planned(more, planned, monkeypatch):
    """Of four microbatches none fits: a second cut of them is planned only if it might hold less than the first."""
    ones, tables = np.ones(6), {}
    for count in (4, 8):
        costs = LayerCosts(ones, ones, 0 * ones, 0 * ones, 18 * ones, 10 / count * ones, 5 * ones)
        tables[count] = MicrobatchCosts((costs.table(SubMesh.anywhere("1", 1, 2, ROOM)),), *np.zeros((2, 7)))
    space, tried = StageSpace(DeviceRow((Channel(0.0, 1e9),)), tables), []

    def choice_at(count, at):
        stages = (ChosenStage(*ends, tables[count].tables[0], i) for i, ends in enumerate(at))
        return simulated(space, PipelineChoice("1f1b", 1, count, tuple(stages)))

    told = [choice_at(4, ((0, 4), (4, 6))), choice_at(4, ((0, 3), (3, 6))), choice_at(8, ((0, 3), (3, 6)))]

    def exact(_, choice, *others):
        tried.append(choice.microbatches)
        times = more if choice.microbatches == 4 else 1.0
        peaks = [times * size for size in simulated(space, choice).peak_bytes]
        fits = max(peaks) <= ROOM
        return SimpleNamespace(simulated=SimpleNamespace(peak_bytes=peaks, seconds=1.0, fits=fits), choice=choice)

    monkeypatch.setattr(choosing, "exact_pipeline", exact)
    result = SimpleNamespace(best=told[0], others=told[1:])
    found = SimpleNamespace(space=space, shapes={})
    steps, machine = SimpleNamespace(cut_at=None), SimpleNamespace(backend=None)
    choosing._planned_exactly(result, found, steps, machine, choosing._Excess(), np.inf)
    assert tried[:2] == planned
