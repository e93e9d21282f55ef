"""Every cut of the chain is the cheapest of all choices at some price, and the chain has all of these."""

import dataclasses
import itertools
import math
import random

import pytest

from autoshard.remat import cuts as module
from autoshard.remat.cuts import ForwardPass, at_price, chain, cuts


def choices(forward):
    """(bytes, seconds) of every choice there is, by trying which equations run again, and what is moved."""
    runnable = [e for e, seconds in enumerate(forward.seconds) if math.isfinite(seconds)]
    for count in range(len(runnable) + 1):
        for again in itertools.combinations(runnable, count):
            needed = {v for e in again for v in forward.reads[e]} | set(forward.wanted)
            kept = [v for v in needed if forward.makers[v] not in again]
            size, seconds = sum(forward.bytes[v] for v in kept), sum(forward.seconds[e] for e in again)
            movable = [v for v in kept if forward.moving and math.isfinite(forward.moving[v]) and forward.bytes[v]]
            for some in itertools.chain(*(itertools.combinations(movable, n) for n in range(len(movable) + 1))):
                yield size - sum(forward.bytes[v] for v in some), seconds + sum(forward.moving[v] for v in some)


def hull(points):
    """The corners of the lower convex hull, most bytes first, down to the least bytes."""
    best = {}
    for size, seconds in points:
        best[size] = min(seconds, best.get(size, math.inf))
    corners = []
    for point in sorted(best.items(), reverse=True):
        if corners and point[1] <= corners[-1][1]:
            corners = [one for one in corners if one[1] < point[1]]
        corners.append(point)
        while len(corners) > 2:
            (a, s), (b, t), (c, u) = corners[-3:]
            if (t - s) * (a - c) < (u - s) * (a - b):
                break
            del corners[-2]
    return corners


def random_pass(seed):
    """Up to nine equations of up to two results, in integers, so that no corner hangs on rounding."""
    rng = random.Random(seed)
    inputs = rng.randint(1, 3)
    makers, reads, seconds = [None] * inputs, [], []
    for e in range(rng.randint(1, 9)):
        reads.append(rng.sample(range(len(makers)), min(len(makers), rng.randint(1, 3))))
        seconds.append(math.inf if rng.random() < 0.15 else rng.randint(1, 12))
        makers += [e] * rng.choice([1, 1, 2])
    sizes = [rng.choice([0, 1, 2, 4, 8]) if maker is None else rng.randint(1, 9) for maker in makers]
    wanted = rng.sample(range(len(makers)), rng.randint(1, len(makers)))
    return ForwardPass(tuple(sizes), tuple(makers), tuple(map(tuple, reads)), tuple(seconds), tuple(wanted))


def check(forward):
    found = [(cut.bytes, cut.seconds) for cut in cuts(forward)]
    first, *expected = hull(choices(forward))
    assert found[0] == (sum(forward.bytes[v] for v in set(forward.wanted)), 0) and found[0][0] >= first[0]
    # The least bytes come with the least seconds that do; between these ends, exactly the corners.
    assert found[-1] == (expected or [first])[-1], (found, first, expected)
    assert found[1:] == expected or found == [first, *expected], (found, first, expected)


@pytest.mark.parametrize("seed", range(60))
def test_the_chain_has_what_is_cheapest_at_every_price(seed):
    check(random_pass(seed))


@pytest.mark.parametrize("seed", range(40))
def test_the_chain_has_what_is_cheapest_where_values_may_be_moved(seed):
    forward, rng = random_pass(seed), random.Random(seed)
    movable = rng.sample(range(len(forward.bytes)), min(4, len(forward.bytes)))
    moving = tuple(rng.randint(1, 9) if v in movable else math.inf for v in range(len(forward.bytes)))
    forward = dataclasses.replace(forward, moving=moving)
    check(forward)
    assert all(cut.moved <= cut.kept.intersection(movable) for cut in chain(forward))


@pytest.mark.parametrize("seed", range(60))
def test_what_is_best_at_a_price_is_the_last_corner_that_pays(seed):
    forward = random_pass(seed)
    corners = cuts(forward)
    assert at_price(forward, 0.0) == corners[0] and at_price(forward, math.inf) == corners[-1] == chain(forward)[-1]
    for before, after in itertools.pairwise(corners):
        price = (after.seconds - before.seconds) / (before.bytes - after.bytes)
        assert (at_price(forward, price).bytes, at_price(forward, price).seconds) == (after.bytes, after.seconds)
        lower = at_price(forward, 0.999 * price)
        assert lower.seconds <= before.seconds and lower.bytes >= before.bytes


def test_a_value_that_nothing_makes_is_moved_rather_than_kept():
    """The input of a layer, and a product of it that is cheaper to move than to compute again."""
    forward = ForwardPass((4.0, 8.0), (None, 0), ((0,),), (3.0,), (0, 1), moving=(1.0, 2.0))
    assert [(sorted(cut.kept), sorted(cut.moved), cut.bytes, cut.seconds) for cut in cuts(forward)] == [
        ([0, 1], [], 12.0, 0.0),
        ([0, 1], [0, 1], 0.0, 3.0),
    ]


def test_a_chain_has_choices_between_corners_that_are_worth_the_same():
    """Two products of one size, of which either may be kept alone: no corner of the hull, but half of the bytes."""
    forward = ForwardPass((1.0, 8.0, 8.0), (None, 0, 1), ((0,), (0,)), (3.0, 3.0), (1, 2))
    assert [(cut.bytes, cut.seconds) for cut in cuts(forward)] == [(16, 0), (1, 6)]
    assert [(cut.bytes, cut.seconds) for cut in chain(forward)] == [(16, 0), (9, 3), (1, 6)]


def test_every_cut_can_be_computed():
    for seed in range(40):
        forward = random_pass(seed)
        assert set(cuts(forward)) <= set(chain(forward))
        for more, fewer in itertools.pairwise(chain(forward)):
            assert more.bytes > fewer.bytes and more.seconds < fewer.seconds
        for cut in chain(forward):
            there = set(cut.kept)
            for e in sorted(cut.again):  # makers come before readers
                assert set(forward.reads[e]) <= there, (seed, cut)
                there |= {v for v, maker in enumerate(forward.makers) if maker == e}
            assert set(forward.wanted) <= there, (seed, cut)


def test_a_wrong_price_is_caught(monkeypatch):
    """The oracle sees a chain whose cuts count each byte twice."""
    right = module._cheapest

    def doubled(forward, price):
        doubled_bytes = tuple(b * (1 + v % 2) for v, b in enumerate(forward.bytes))
        cut = right(dataclasses.replace(forward, bytes=doubled_bytes), price)
        return module._cut(cut.kept, cut.again, cut.moved, forward)

    monkeypatch.setattr(module, "_cheapest", doubled)
    cuts.cache_clear()
    try:
        with pytest.raises(AssertionError):
            for seed in range(60):
                check(random_pass(seed))
    finally:
        cuts.cache_clear()
