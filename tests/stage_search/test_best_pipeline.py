"""The search of stages against every pipeline there is; its bound; memory; machines of several kinds."""

import math

import numpy as np
import pytest
from every_pipeline import every_pipeline

from autoshard.stage_search import (
    Channel,
    DeviceRow,
    LayerCosts,
    MicrobatchCosts,
    SearchSettings,
    StageSpace,
    SubMesh,
    search_stages,
)
from autoshard.stage_search.chains import Chains

ALL = (("gpipe", 1), ("1f1b", 1), ("eager_1f1b", 1), ("zb_h1", 1), ("zb_h2", 1))


def random_space(seed, layers, devices, *, memory=math.inf, schedules=ALL, hosts=1, counts=(2, 4)):
    """Layers of random costs, on sub-meshes of 1, 2 and 4 devices, of which larger ones are less efficient."""
    random = np.random.default_rng(seed)
    row = DeviceRow.of_hosts(hosts, devices // hosts, inside=Channel(0.001, 50.0), between=Channel(0.01, 5.0))
    work, sizes = random.uniform(0.5, 2.0, (4, layers)), random.uniform(0.5, 2.0, (3, layers))
    costs = {}
    for count in counts:
        tables = []
        for number in (1, 2, 4):
            if devices % number == 0:
                slower = (number**0.5) * count
                shape = SubMesh.anywhere(str(number), number, devices, memory)
                layer = LayerCosts(
                    *(work[:3] / slower * [[1.0], [1.2], [0.8]]),
                    work[3] / number / 10,
                    4 * sizes[0] / number,
                    4 * sizes[1] / number / count,
                    sizes[2] / number / count,
                )
                tables.append(layer.table(shape))
        sent = np.concatenate(([0.0], random.uniform(0.1, 1.0, layers - 1), [0.0])) / count
        costs[count] = MicrobatchCosts(tuple(tables), sent, sent)
    return StageSpace(row, costs, schedules)


EXACT = SearchSettings(most_tasks=10**7, gap=0.0)


@pytest.mark.parametrize("seed", range(6))
def test_the_best_of_all_pipelines_is_found_and_proven(seed):
    space = random_space(seed, layers=5 + seed % 2, devices=4, hosts=1 + seed % 2)
    best = min(every_pipeline(space))
    found = search_stages(space, EXACT)
    assert found.best.seconds == pytest.approx(best[0], rel=1e-9), best
    assert found.bound == pytest.approx(best[0], rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_best_that_fits_is_found(seed):
    free = random_space(seed, layers=5, devices=4)
    fastest = search_stages(free, EXACT).best
    needed = max(fastest.peak_bytes)
    space = random_space(seed, layers=5, devices=4, memory=0.75 * needed)
    best = min(every_pipeline(space))
    found = search_stages(space, EXACT)
    assert found.best.fits
    assert found.best.seconds == pytest.approx(best[0], rel=1e-9), best
    assert found.best.seconds > fastest.seconds
    assert found.bound <= best[0] * (1 + 1e-9)


def test_eight_layers_in_one_schedule():
    space = random_space(11, layers=8, devices=4, schedules=(("1f1b", 1),), counts=(4,))
    assert search_stages(space, EXACT).best.seconds == pytest.approx(min(every_pipeline(space))[0], rel=1e-9)


def test_a_bound_that_is_too_high_is_noticed(monkeypatch):
    """Planted: passing costs counted twice. Then the search ends too early, and the oracle sees it."""
    passing = Chains._passing_seconds
    monkeypatch.setattr(Chains, "_passing_seconds", lambda self, table: 2 * passing(self, table))
    wrong = []
    for seed in range(6):
        space = random_space(seed, layers=5, devices=4, schedules=(("1f1b", 1), ("zb_h1", 1)))
        wrong.append(search_stages(space, EXACT).bound > min(every_pipeline(space))[0] * (1 + 1e-9))
    assert any(wrong)


def test_a_small_budget_leaves_a_true_gap():
    space = random_space(3, layers=6, devices=4)
    best = min(every_pipeline(space))[0]
    found = search_stages(space, SearchSettings(most_tasks=50))
    assert found.bound <= best * (1 + 1e-9) <= found.best.seconds * (1 + 1e-9)
    assert found.gap == pytest.approx(1 - found.bound / found.best.seconds)


def test_nothing_fits():
    found = search_stages(random_space(0, layers=4, devices=4, memory=0.1))
    assert found.best is None
    assert math.isinf(found.bound)
