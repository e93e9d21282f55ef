import gc
import weakref

import pytest

from autoshard.solver.runtime.garbage_collection import frozen, uncollected


class Cycle:
    """An object that knows itself."""


@pytest.fixture(autouse=True)
def collecting():
    gc.enable()
    yield
    gc.unfreeze()
    gc.enable()


def test_the_collector_waits_and_what_was_made_is_old_then():
    with uncollected():
        assert not gc.isenabled()
        made = [[] for _ in range(10_000)]
        assert gc.get_count()[0] > len(made)
    assert gc.isenabled()
    assert gc.get_count()[0] < len(made)  # nothing is due that would look at them
    gc.freeze()  # else it looks through all that other tests have made
    cycle = Cycle()
    cycle.itself, alive = cycle, weakref.ref(cycle)
    del cycle
    gc.collect()
    assert alive() is None  # and yet garbage is found


def test_what_is_frozen_stays_so():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with uncollected():
        pass
    assert gc.get_freeze_count() == frozen > 0


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with uncollected():
        pass
    assert not gc.isenabled()


@pytest.mark.parametrize("before", [False, True])
def test_objects_are_frozen_for_a_while_unless_some_were_before(before):
    if before:
        gc.freeze()
    with frozen():
        assert gc.get_freeze_count()
    assert bool(gc.get_freeze_count()) == before
