"""What each virtual stage of a device may hold: working bytes are shared, since one program runs at a time."""

import numpy as np
import pytest

from autoshard.stage_planning.exact_stages import stage_in_flight, stage_limits
from autoshard.stage_search import ChosenStage, LayerCosts, PipelineChoice, SubMesh
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
