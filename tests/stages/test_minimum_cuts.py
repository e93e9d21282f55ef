"""Cuts, residuals and balanced stages against every possibility there is."""

import itertools
import random

import pytest

from autoshard.errors import StageError
from autoshard.stages.placement.flow import SINK, SOURCE, UNCUTTABLE, source_side
from autoshard.stages.placement.residuals import kept_values
from autoshard.stages.stacks import EquationOrigin
from autoshard.stages.units import Unit, Units


def capacity(edges, inside):
    return sum(size for (a, b), size in edges.items() if a in inside and b not in inside)


def least_capacity(edges):
    """Over all sets of nodes with the source and without the sink."""
    nodes = sorted({name for edge in edges for name in edge} - {SOURCE, SINK})
    sets = (set(some) | {SOURCE} for n in range(len(nodes) + 1) for some in itertools.combinations(nodes, n))
    return min(capacity(edges, inside) for inside in sets)


def random_edges(seed):
    rng = random.Random(seed)
    nodes = [SOURCE, "a", "b", "c", "d", "e", SINK]
    pairs = [(a, b) for a in nodes for b in nodes if a != b and a != SINK and b != SOURCE]
    return {pair: rng.choice([1, 2, 3, 5, UNCUTTABLE]) for pair in rng.sample(pairs, 9) if pair != (SOURCE, SINK)}


@pytest.mark.parametrize("is_largest", [False, True])
def test_a_cut_is_the_least_of_all(is_largest):
    possible = 0
    for seed in range(60):
        edges = random_edges(seed)
        inside, is_possible = source_side(edges, is_largest=is_largest)
        least = least_capacity(edges)
        assert is_possible == (least < UNCUTTABLE)
        if is_possible:
            assert SOURCE in inside and SINK not in inside
            assert capacity(edges, inside) == least, edges
            possible += 1
    assert possible > 20


def test_the_largest_and_the_smallest_cut_enclose_all_others():
    for seed in range(40):
        edges = random_edges(seed)
        smallest, is_possible = source_side(edges, is_largest=False)
        largest, _ = source_side(edges, is_largest=True)
        assert not is_possible or smallest <= largest


def random_values(seed):
    """Values 0 to 7: which equation makes them (its number), of what, and how many bytes they have."""
    rng = random.Random(seed)
    makers = {i: i for i in range(8) if i >= 2 and rng.random() < 0.8}
    operands = {i: rng.sample(range(i), rng.randint(1, min(2, i))) for i in makers}
    cheap = {i for i in makers if rng.random() < 0.7}
    return makers, operands, cheap, [rng.randint(1, 9) for _ in range(8)], rng.sample(range(8), 3)


def can_make(kept, wanted, makers, operands, cheap):
    def has(value):
        return value in kept or (makers.get(value) in cheap and all(map(has, operands[value])))

    return all(map(has, wanted))


def test_kept_values_have_the_fewest_bytes_of_all_that_do():
    shared = 0
    for seed in range(80):
        makers, operands, cheap, sizes, wanted = random_values(seed)
        kept = kept_values(wanted, makers, lambda i, operands=operands: operands[i], cheap, lambda i, s=sizes: s[i])
        assert can_make(kept, wanted, makers, operands, cheap)
        every = (set(some) for n in range(9) for some in itertools.combinations(range(8), n))
        least = min(sum(sizes[i] for i in one) for one in every if can_make(one, wanted, makers, operands, cheap))
        assert sum(sizes[i] for i in kept) == least
        shared += kept != set(wanted)
    assert shared > 20  # it is not always best to keep what is read


def units(works, crossing):
    made = (
        Unit(f"u{i}", EquationOrigin(i), work, 2 * work, 0, 0, size)
        for i, (work, size) in enumerate(zip(works, crossing, strict=True))
    )
    return Units(tuple(made))


def test_balanced_stages_have_the_least_largest_work_of_all():
    rng = random.Random(0)
    for _ in range(40):
        works = [rng.randint(1, 9) for _ in range(8)]
        found, stages = units(works, [0, *(rng.randint(1, 3) for _ in range(7))]), rng.randint(1, 8)

        def cost(firsts, works=works, found=found):
            bounds = [0, *firsts, 8]
            largest = max(3 * sum(works[a:b]) for a, b in itertools.pairwise(bounds))
            return largest, sum(found.units[i].crossing_bytes for i in firsts)

        least = min(map(cost, itertools.combinations(range(1, 8), stages - 1)))
        assert cost(found.balanced(stages)) == least


def test_more_stages_than_units_are_refused():
    with pytest.raises(StageError, match=r"stages=3, but .* 2 parts at most \(u0, u1\)"):
        units([1, 1], [0, 1]).balanced(3)
    assert units([1, 1], [0, 1]).balanced(4, 2) == (1, 2, 2), "virtual stages may be empty"
