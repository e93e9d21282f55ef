"""REGAL's search: a genetic algorithm on random keys, whose proposals favour what is cheap.

Paliwal et al., "Reinforced genetic algorithm learning for optimizing computation graphs", ICLR 2020, section 3, after
Goncalves and Resende, "Biased random-key genetic algorithms", Journal of Heuristics 2011.

Kept: one key per node, of which an option is read; elites live on, mutants come in, children take most keys from an
elite parent. Mutants are drawn from distributions per node instead of uniformly. Different: a trained graph network
gives REGAL these distributions; here keys near 0 stand for cheap options, and distributions lean there. Choices over
the memory limit rank behind all that fit, those least over it first. The best of each generation is made to fit and
joins the next.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.many_choices import ManyChoices
from autoshard.solver.searches.search_run import SearchRun


@dataclass(frozen=True)
class RegalSettings:
    """A population."""

    size: int = 100  # choices in a population
    elites: int = 20  # of them, the cheapest, which stay
    mutants: int = 15  # of them, drawn anew in each generation
    inherited: float = 0.7  # probability of a key of the elite parent
    steepest: float = 6.0  # exponent of keys of mutants, at most: how much they favour what is cheap
    patience: int = 40  # generations without anything better, after which another population begins


SETTINGS = RegalSettings()


def regal(problem: Problem, run: SearchRun) -> None:
    """Populations, one after the other."""
    many = ManyChoices(problem, run)
    ranks = [np.argsort(many.at.prospects(node, {}), kind="stable") for node in range(len(many.sizes))]
    for _ in run.rounds():
        _evolve(many, np.concatenate(ranks), np.concatenate(list(map(np.argsort, ranks))), run)


def _evolve(many: ManyChoices, ranked: np.ndarray, rank: np.ndarray, run: SearchRun) -> None:
    """One population until nothing better has come for a while.

    Args:
        ranked: the options of each node, cheapest first, those of all nodes in a row.
        rank: the place of each option among those of its node.
    """
    rng, nodes = run.rng, len(many.sizes)
    steepness = 1 + (SETTINGS.steepest - 1) * rng.random()

    def mutants(count: int) -> np.ndarray:
        return rng.random((count, nodes)) ** (1 + (steepness - 1) * rng.random((count, 1)))

    keys = mutants(SETTINGS.size)
    best, idle = (np.inf, np.inf), 0
    while idle < SETTINGS.patience:
        choices = ranked[many.starts[:-1] + (keys * many.sizes).astype(np.int64)]
        costs, excess = many.costs(choices), many.excess(choices)
        repaired = many.offer_best(choices, costs, excess)
        order = np.lexsort((costs, excess))
        found = float(excess[order[0]]), float(costs[order[0]])
        best, idle = (found, 0) if found < best else (best, idle + 1)
        children = SETTINGS.size - SETTINGS.elites - SETTINGS.mutants - 1
        elite = order[rng.integers(SETTINGS.elites, size=children)]
        other = order[rng.integers(SETTINGS.elites, SETTINGS.size, size=children)]
        inherits = rng.random((children, nodes)) < SETTINGS.inherited
        born = np.where(inherits, keys[elite], keys[other])
        kept = (rank[many.starts[:-1] + repaired] + 0.5) / many.sizes
        keys = np.concatenate([keys[order[: SETTINGS.elites]], kept[None], mutants(SETTINGS.mutants), born])
