"""Machines of different speed and memory; several virtual stages per device against `autoshard.pipeline.simulate`."""

from dataclasses import replace

import numpy as np
import pytest
from every_pipeline import every_pipeline

from autoshard.pipeline import schedule, simulate
from autoshard.stage_search import (
    Channel,
    ChosenStage,
    DeviceRow,
    LayerCosts,
    MicrobatchCosts,
    PipelineChoice,
    SearchMemory,
    SearchSettings,
    StageSpace,
    SubMesh,
    search,
    search_stages,
    simulated,
)
from autoshard.stage_search.chunks import ChunkProblem, balanced, mean_bound
from autoshard.stage_search.simulating import schedule_form

EXACT = SearchSettings(most_tasks=10**7, gap=0.0)


def costs_of(random, layers, speed=1.0):
    forward, after, *sizes = random.uniform(0.5, 2.0, (5, layers))
    return LayerCosts(forward / speed, 1.2 * forward / speed, 0.8 * forward / speed, after / 10, *sizes)


@pytest.mark.parametrize("memory", [(100.0, 100.0), (100.0, 14.0)])
def test_a_slow_machine_with_little_memory_gets_fewer_layers(memory):
    layers, random = 6, np.random.default_rng(5)
    row = DeviceRow.of_hosts(2, 2, inside=Channel(0.0, 50.0), between=Channel(0.1, 5.0))
    costs = costs_of(random, layers)
    slow = LayerCosts(*(3 * one for one in (costs.forward, costs.backward, costs.weight)), costs.after,
                      costs.fixed_bytes, costs.microbatch_bytes, costs.working_bytes)  # fmt: skip
    halves = SubMesh("fast", 2, (0,), memory[0]), SubMesh("slow", 2, (2,), memory[1])
    tables = costs.table(halves[0]), slow.table(halves[1])
    sent = np.array([0.0, *[0.2] * (layers - 1), 0.0])
    space = StageSpace(row, {4: MicrobatchCosts(tables, sent, sent)}, (("1f1b", 1),))
    found = search_stages(space, EXACT)
    assert found.best.seconds == pytest.approx(min(every_pipeline(space))[0], rel=1e-9)
    first, second = found.best.choice.stages
    assert [first.table.shape.name, second.table.shape.name] == ["fast", "slow"]
    assert len(first.layers) > len(second.layers)
    if memory[1] < memory[0]:
        assert found.best.peak_bytes[1] <= memory[1]


def uneven_space(seed, layers, *, slower, memory, between):
    """Two hosts of two devices, the second slower and with less memory; stages of one device, a host, or all."""
    random = np.random.default_rng(seed)
    row = DeviceRow.of_hosts(2, 2, inside=Channel(0.001, 50.0), between=between)
    base = random.uniform(0.5, 2.0, (7, layers))
    tables = []
    for devices, starts, speed, room in (
        (1, (0, 1), 1.0, 100.0),
        (1, (2, 3), slower, memory),
        (2, (0,), 1.0, 100.0),
        (2, (2,), slower, memory),
        (4, (0,), slower, memory),
    ):
        seconds, sizes = base[:4] / speed / devices**0.7, base[4:] / devices
        tables.append(LayerCosts(*seconds, *sizes).table(SubMesh(f"{devices} from {starts[0]}", devices, starts, room)))
    sent = np.array([0.0, *random.uniform(0.1, 1.0, layers - 1), 0.0])
    return StageSpace(row, {4: MicrobatchCosts(tuple(tables), sent, sent)}, (("1f1b", 1),))


@pytest.mark.parametrize(
    "seed, layers, slower, memory, between",
    [
        (0, 8, 0.4, 100.0, Channel(0.01, 5.0)),
        (1, 8, 0.7, 11.0, Channel(0.01, 5.0)),
        (2, 8, 1.0, 100.0, Channel(2.0, 0.3)),  # a link that takes as long as a layer
        (3, 7, 0.5, 9.0, Channel(0.5, 0.5)),
    ],
)
def test_the_best_of_all_cuts_on_uneven_machines_and_slow_links(seed, layers, slower, memory, between):
    space = uneven_space(seed, layers, slower=slower, memory=memory, between=between)
    best = min(every_pipeline(space))
    found = search_stages(space, EXACT)
    assert found.best.seconds == pytest.approx(best[0], rel=1e-9), best
    assert found.bound == pytest.approx(best[0], rel=1e-9)


CHUNKED = [("interleaved_1f1b", 2), ("looped_bfs", 2), ("zb_v", 2), ("v_half", 2), ("v_min", 2)]


def chunked_space(seed, layers=9):
    random = np.random.default_rng(seed)
    row = DeviceRow.of_hosts(1, 2, inside=Channel(0.05, 1e9), between=Channel(0.05, 1e9))
    table = costs_of(random, layers).table(SubMesh.anywhere("1", 1, 2, 1e9))
    sent = np.array([0.0, *[1e-6] * (layers - 1), 0.0])
    return StageSpace(row, {4: MicrobatchCosts((table,), sent, sent)}, tuple(CHUNKED)), table, random


@pytest.mark.parametrize("name, chunks", CHUNKED)
def test_virtual_stages_are_simulated_as_by_the_simulator_and_never_below_the_bound(name, chunks):
    space, table, random = chunked_space(3)
    form = schedule_form(name, 2, chunks)
    problem = ChunkProblem(space, form, 4, (table,))
    bound, made = mean_bound(problem), schedule(name, 2, 4, chunks)
    for _ in range(8):
        cuts = [0, *sorted(random.choice(np.arange(1, space.layers), 3, replace=False).tolist()), space.layers]
        stages = tuple(ChosenStage(cuts[i], cuts[i + 1], table, device) for i, device in enumerate(form.placement))
        found = simulated(space, PipelineChoice(name, chunks, 4, stages))
        at = [(stage.first, stage.last) for stage in stages]
        forward, backward, weight = (
            [rows[run] for run in at] for rows in (table.forward, table.backward, table.weight)
        )
        if not made.has_weight_tasks:
            backward, weight = [b + w for b, w in zip(backward, weight, strict=True)], 0.0
        plain = simulate(made, forward, backward, weight, 0.05, memory=[table.microbatch_bytes[run] for run in at])
        assert found.timeline.makespan == pytest.approx(plain.makespan, rel=1e-6)
        assert found.timeline.peak_bytes == pytest.approx(plain.peak_bytes)
        assert bound <= found.seconds * (1 + 1e-9)
    best = simulated(space, PipelineChoice(name, chunks, 4, balanced(problem)))
    assert search_stages(space, EXACT).best.seconds <= best.seconds * (1 + 1e-9)


def test_no_kind_of_pipeline_uses_up_what_may_be_simulated():
    """Many stages have many moves, and long schedules: their choices come late if they are estimated to be slow."""
    layers = 40
    row = DeviceRow.of_hosts(8, 4, inside=Channel(1e-6, 1e9), between=Channel(1e-6, 1e8))
    costs = {}
    for count in (8, 32):
        ones = np.ones(layers) / count
        tables = [
            LayerCosts(ones / n, 2 * ones / n, 0 * ones, 0 * ones, ones, ones, ones).table(
                SubMesh.anywhere(str(n), n, 32, 1e9)
            )
            for n in (1, 2, 4)
        ]
        sent = np.array([0.0, *[1e7 / count] * (layers - 1), 0.0])
        costs[count] = MicrobatchCosts(tuple(tables), sent, sent)
    space = StageSpace(row, costs, (("1f1b", 1), ("eager_1f1b", 1), *CHUNKED))
    hasty, thorough = (search_stages(space, SearchSettings(most_tasks=tasks)) for tasks in (5_000, 60_000))
    assert thorough.best.seconds <= hasty.best.seconds <= 1.02 * thorough.best.seconds


@pytest.mark.parametrize("slower", [0.5, 3.0])
def test_what_one_search_found_serves_the_next(slower, monkeypatch):
    """The costs of one number of microbatches change; those of the other are not looked at again."""
    (first, _, _), (other, _, _) = chunked_space(0, layers=5), chunked_space(0, layers=5)
    (count,) = first.costs
    space = replace(first, costs={count: first.costs[count], 2 * count: other.costs[count]})
    memory = SearchMemory()
    before = search_stages(space, EXACT, memory)
    tables = (replace(one, forward=slower * one.forward) for one in space.costs[count].tables)
    changed = replace(space, costs={**space.costs, count: replace(space.costs[count], tables=tuple(tables))})
    alone, looked_at = search_stages(changed, EXACT), set()
    simulated = search.simulated
    monkeypatch.setattr(
        search, "simulated", lambda space, choice: looked_at.add(choice.microbatches) or simulated(space, choice)
    )
    again = search_stages(changed, EXACT, memory)
    assert (again.best.seconds, again.bound) == pytest.approx((alone.best.seconds, alone.bound))
    assert count in looked_at or again.best.seconds == before.best.seconds
    looked_at.clear()
    assert search_stages(changed, EXACT, memory).best.seconds == again.best.seconds and not looked_at
