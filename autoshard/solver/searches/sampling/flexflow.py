"""FlexFlow's search: Markov chain Monte Carlo over the options of random nodes.

Jia, Zaharia and Aiken, "Beyond data and model parallelism for deep neural networks", MLSys 2019, section 6.

Kept: a proposal changes one random node to a random option; it is taken with probability ``min(1, exp(-d / t))``, where
``d`` is the increase of the cost; a chain ends when its second half has brought nothing better, and another starts.
Different: the change of the cost is read from tables, where FlexFlow simulates the tasks that change. Bytes over the
memory limit have a price, another one in each chain, so that chains pass through what does not fit. The first chain
starts at the cheapest option of each node, others at a random choice or the best one, and all are made to fit first.
Chains have temperatures of all magnitudes, since FlexFlow's is set by hand.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.solver.problem import Problem
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun


@dataclass(frozen=True)
class FlexFlowSettings:
    """A chain."""

    warmest: float = 0.3  # temperature of a chain at most, as a share of what a node costs on average
    coldest: float = 1e-3  # and at least
    dearest: float = 3.0  # price of a byte in a chain at most, as a share of what a byte may cost on average
    cheapest: float = 0.03  # and at least
    proposals: int = 100  # of a chain, at least
    proposals_per_option: int = 10  # on top of that


SETTINGS = FlexFlowSettings()


def flexflow(problem: Problem, run: SearchRun) -> None:
    """Chains of random changes, each from another start and at another temperature."""
    at, rng = Position(problem, run), run.rng
    least = SETTINGS.proposals + SETTINGS.proposals_per_option * sum(at.sizes)
    for chain in run.rounds():
        if chain:
            at.start(at.random_choice() if chain % 2 or run.choice is None else run.choice)
        at.repair()
        at.offer()
        share = SETTINGS.warmest * (SETTINGS.coldest / SETTINGS.warmest) ** rng.random()
        cost = run.cost if run.cost < at.never else at.cost
        price = at.typical_price * SETTINGS.dearest * (SETTINGS.cheapest / SETTINGS.dearest) ** rng.random()
        _chain(at, temperature=share * abs(cost) / len(at.sizes), price=price, least=least)


def _chain(at: Position, temperature: float, price: float, least: int) -> None:
    """Proposals until none has brought anything better for as long as it took to find the best.

    Args:
        temperature: increase of the cost that is taken with probability 1/e.
        price: cost per byte over the limit and pressure point.
        least: proposals that are made in any case.
    """
    rng, best, last, turn = at.rng, at.cost if at.is_allowed else at.never, 0, 0
    while at.decided and turn < max(least, 2 * last):
        turn += 1
        node = at.decided[rng.integers(len(at.decided))]
        option = int(rng.integers(at.sizes[node]))
        added = at.added_cost(node, option)
        if added + price * at.excess_change(node, option) > rng.exponential(temperature):
            continue
        at.change(node, option, added)
        if at.is_allowed and at.cost < best:
            best, last = at.cost, turn
            at.offer()
