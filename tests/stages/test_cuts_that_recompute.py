"""Stages that compute again what they would keep: numbers stay, less is kept, both traces are rewritten alike."""

import dataclasses
import math

import jax
import pytest
from equality import assert_equal
from one_device import cuttable, run_in_order
from pipeline_steps import STEPS

from autoshard import MicrobatchError, PlanError, topology
from autoshard.remat.cuts import chain
from autoshard.remat.scope import Scope
from autoshard.stages.cutting import cut
from autoshard.stages.placement import recomputing
from autoshard.stages.placement.recomputing import ApartStep, KnownCuts, MemoryPrices, PricedStep
from autoshard.stages.programs import BlockCut

MACHINE = topology("v5e:4x2")


def cut_in_two(name, prices=None, keeps=None):
    step, args = STEPS[name]()
    found = cuttable(step, args, 2)
    units = found.units(2)
    keeps = keeps or (None if prices is None else MemoryPrices(prices, MACHINE))
    return cut(found, units.boundaries(units.balanced(2)), keeps=keeps), step, args


def kept_bytes(programs):
    return {stage: sum(map(programs.bytes_of, keys)) for stage, keys in programs.kept.items()}


# Unrolled, with a sum over the batch that microbatches need; scanned, with marks of `jax.checkpoint`.
@pytest.mark.parametrize("name", ["masked with dropout", "scanned and clipped"])
def test_each_stage_keeps_what_its_price_says_and_numbers_stay(name):
    free, _, _ = cut_in_two(name, (0.0, 0.0))
    mixed, step, args = cut_in_two(name, (math.inf, 0.0))
    assert kept_bytes(mixed)[0] < 0.1 * kept_bytes(free)[0]
    assert kept_bytes(mixed)[1] == kept_bytes(free)[1]
    assert mixed.recomputed.seconds[0] > 0 == mixed.recomputed.seconds[1]
    assert mixed.loop["B", 0].flops > free.loop["B", 0].flops and mixed.loop["F", 0].flops <= free.loop["F", 0].flops
    assert mixed.sends.keys() == free.sends.keys()
    assert [sum(map(mixed.bytes_of, keys)) for keys in mixed.sends.values()] == [128 * 4] * 2  # an activation each way
    assert_equal(run_in_order(mixed, jax.tree.leaves(args)), jax.tree.leaves(jax.jit(step)(*args)))


def test_large_blocks_keep_what_is_best_at_their_price(monkeypatch):
    """Of them not all choices are made: those of a block that many layers are in would take as long as all else."""
    price = 1.0  # s per byte: whatever can be computed again is
    usual, _, _ = cut_in_two("unrolled", (price, math.inf))
    monkeypatch.setattr(recomputing, "LARGEST_CHAIN", 0)
    monkeypatch.setattr(recomputing, "chain", lambda forward: pytest.fail("all choices are made"))
    made, step, args = cut_in_two("unrolled", (price, math.inf))
    assert made.recomputed.cuts[-1] == usual.recomputed.cuts[-1]
    assert kept_bytes(made)[0] < kept_bytes(cut_in_two("unrolled", (0.0, math.inf))[0])[0]
    assert_equal(run_in_order(made, jax.tree.leaves(args)), jax.tree.leaves(jax.jit(step)(*args)))


def test_cuts_that_are_known_are_those_of_their_prices():
    priced, _, _ = cut_in_two("scanned", (math.inf, 1e-12))
    known, _, _ = cut_in_two("scanned", keeps=KnownCuts(priced.recomputed.cuts, MACHINE))
    assert known.recomputed.cuts == priced.recomputed.cuts
    assert [str(one.jaxpr) for one in known.programs] == [str(one.jaxpr) for one in priced.programs]


@pytest.mark.parametrize("cuts", [(), None, (BlockCut((10**6,), ()),)], ids=["none", "nothing kept", "unknown value"])
def test_cuts_of_another_step_are_refused(cuts):
    count = len(cut_in_two("scanned", (0.0, 0.0))[0].recomputed.cuts)
    several = (BlockCut((), ()),) * count if cuts is None else cuts * count
    with pytest.raises(PlanError, match="The plan is for another step"):
        cut_in_two("scanned", keeps=KnownCuts(several, MACHINE))


def test_a_trace_that_is_not_rewritten_is_caught(monkeypatch):
    before = ApartStep.recomputed

    def whole_alone(self, choice):
        return dataclasses.replace(before(self, choice), part=self.part)

    monkeypatch.setattr(ApartStep, "recomputed", whole_alone)
    with pytest.raises(MicrobatchError):
        cut_in_two("unrolled", (math.inf, math.inf))


def test_a_microbatch_that_would_keep_something_else_is_caught(monkeypatch):
    before = Scope.rewritten_and_watched

    def keeping_all(self, chosen):
        is_part = self.like is not None
        return before(self, {block: chain(block.forward_pass)[0] for block in chosen} if is_part else chosen)

    monkeypatch.setattr(Scope, "rewritten_and_watched", keeping_all)
    with pytest.raises(MicrobatchError, match="remat='auto': the step computes something else for fewer rows"):
        cut_in_two("two towers", (math.inf, 0.0))


def test_prices_go_from_keeping_all_to_keeping_the_least():
    step, args = STEPS["unrolled"]()
    priced = PricedStep.of(cuttable(step, args, 2).whole, MACHINE)
    prices = priced.prices(6)
    assert prices[0] == 0 and math.isinf(prices[-1]) and 3 <= len(prices) <= 6
    assert list(prices) == sorted(set(prices))
    seconds = list(map(priced.seconds, prices))
    assert seconds[0] == 0 and seconds == sorted(seconds)
