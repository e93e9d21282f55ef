"""Two problems of the same nodes and options in, the choice out for which the larger of the two costs is least.

Any mixture of the two costs is a problem again, and what it costs at least, the larger of the two costs at least. So
mixtures give bounds (Lagrangian relaxation). What they leave open, labels close where few options are cheap enough
(`two_cost_labels.py`). Where these are many, labels look near the choices that are known: among the options of these,
whose recombinations lie between them, and a few others of each node. Where memory binds, and of what the bounds of a
mixture do not rule out, it is the integer program with a row per cost.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from autoshard.solver.bounds.message_passing import Relaxation, finite
from autoshard.solver.bounds.settings import RELAXATION, RelaxationSettings
from autoshard.solver.exact.labels import LabelOutcome
from autoshard.solver.exact.two_cost_labels import labelled
from autoshard.solver.problem import Edge, Problem
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.settings import USUAL_SIZES
from autoshard.solver.tables import summed
from autoshard.solver.verify import ROUNDING, verify

BUILD_SWEEPS = 10.0  # what it takes to build a relaxation
LABELS_RELAXATION = replace(RELAXATION, rounds=150)  # labels see more than further rounds do
NEAR_OPTION_COUNTS = (4, 9)  # options of each node beside those of known choices, in turn: those with the lowest bounds
CEILING_SHARES = (0.01, 0.03, 0.1, math.inf)  # of the bound: how far above it the ceilings of labels are, in turn


@dataclass(frozen=True)
class TwoCosts:
    """Problems of the same nodes, options and memory; a choice costs the larger of what they say."""

    first: Problem  # has the memory of a choice, and its limit
    second: Problem
    known_bounds: dict[tuple, list[np.ndarray]] = field(default_factory=dict, repr=False, compare=False)

    def costs(self, choice: Sequence[int]) -> tuple[float, float]:
        return verify(self.first, choice)[0], verify(self.second, choice)[0]

    def mixed(self, share: float) -> Problem:
        """The problem whose costs are such a share of those of the first, and the rest of those of the second.

        What the first forbids is forbidden, however small its share is.
        """
        made: dict[tuple[int, int], np.ndarray] = {}  # equal layers have the same tables before and after

        def mixture(first: np.ndarray | None, second: np.ndarray | None) -> np.ndarray:
            key = id(first), id(second)
            if key not in made:
                one, other = (np.zeros(1) if costs is None else costs for costs in (first, second))
                made[key] = _scaled(one, share) + _scaled(other, 1 - share)
            return made[key]

        pairs = zip(self.first.costs, self.second.costs, strict=True)
        costs = tuple(mixture(first, second) for first, second in pairs)
        tables, others = summed(self.first.edges), summed(self.second.edges)
        edges = (Edge(i, j, mixture(tables.get((i, j)), others.get((i, j)))) for i, j in sorted(tables | others))
        return replace(self.first, costs=costs, edges=tuple(edge for edge in edges if edge.costs.any()), checked=True)

    def recombined(self, choices: Sequence[Sequence[int]], *, gap: float, budget: Budget) -> tuple[int, ...] | None:
        """The cheapest choice found, within the memory, whose every option is that of one of these choices.

        None where there is no time to find one.

        Args:
            choices: the cheapest one first.
            gap: cost by which the choice may miss the cheapest one.
        """
        options = [np.array(sorted(set(own))) for own in zip(*choices, strict=True)]
        return _cheapest(self, options, choices[0], gap, budget)[0]

    def solved(
        self, choice: Sequence[int], share: float, *, gap: float, budget: Budget
    ) -> tuple[tuple[int, ...] | None, float]:
        """The cheapest choice found, memory aside, and a bound; None and -inf where it takes too long.

        Args:
            choice: the best one known.
            share: of the first problem in the mixture whose bounds rule out options.
            gap: cost by which the choice may miss the cheapest one.
        """
        cost = max(self.costs(choice))
        least = self._least(share, cost, budget)
        if least is None:
            return None, -math.inf
        options = self._options(least, cost * (1 + ROUNDING), choice)
        if sum(map(len, options)) > USUAL_SIZES.few_options:
            return None, -math.inf
        found, bound = _cheapest(self._free, options, choice, gap, budget)
        return found, min(bound, cost)

    def labelled(
        self, choice: Sequence[int], share: float, *, gap: float, budget: Budget
    ) -> Iterator[tuple[tuple[int, ...] | None, float]]:
        """Choices and bounds, memory aside, by labels among more and more options, as long as these are narrow.

        Choices that cost less than a ceiling have no option whose bound in the mixture is above the ceiling.

        Args:
            choice: the best one known.
            share: of the first problem in the mixture whose bounds rule out options.
            gap: relative, between a choice and a bound, with which it ends.
        """
        cost = max(self.costs(choice))
        least = self._least(share, cost, budget, LABELS_RELAXATION)
        if least is None:
            return
        bound = max(float(own.min()) for own in least)
        yield None, min(bound, cost)
        narrow, reaches, is_between = 0.0, list(CEILING_SHARES), False
        while reaches:
            reach = reaches.pop(0)
            ceiling = min(cost, bound + reach * abs(bound))
            options = self._options(least, ceiling)
            if budget.over or not all(map(len, options)) or cost <= bound * (1 + gap):
                return
            outcome = self._labelled_among(options, share, ceiling, budget)
            if outcome is None:
                reaches = [math.sqrt(narrow * min(reach, cost / bound - 1))] if narrow and not is_between else []
                is_between = True
                continue
            narrow, known = reach, min(outcome.bound, ceiling)
            if outcome.choice is not None:
                cost = min(cost, max(self.costs(outcome.choice)))
            yield outcome.choice, known
            if ceiling >= cost or cost <= known * (1 + gap):
                return

    def near(
        self, known: Callable[[], Sequence[Sequence[int]]], share: float, *, budget: Budget
    ) -> Iterator[tuple[int, ...] | None]:
        """Cheaper choices, memory aside, among the options of known ones and a few others; None where there are none.

        Ends where that takes too long, or the options are too many.

        Args:
            known: the choices, the cheapest one first.
            share: of the first problem in the mixture whose bounds say which others.
        """
        least = self._least(share, max(self.costs(known()[0])), budget, LABELS_RELAXATION)
        if least is None:
            return
        bounds = (np.where(np.isfinite(costs), own, np.inf) for costs, own in zip(self.first.costs, least, strict=True))
        lowest = [np.argsort(own, kind="stable")[: np.isfinite(own).sum()] for own in bounds]
        for count in NEAR_OPTION_COUNTS:
            if budget.over:
                return
            best, *others = known()
            pairs = zip(zip(best, *others, strict=True), lowest, strict=True)
            options = [np.unique([*own, *few[:count]]) for own, few in pairs]
            outcome = self._labelled_among(options, share, max(self.costs(best)), budget)
            if outcome is None:
                return
            yield outcome.choice

    def _labelled_among(
        self, options: Sequence[np.ndarray], share: float, wanted: float, budget: Budget
    ) -> LabelOutcome | None:
        """What labels find among some options of each node, memory aside; None if these are wide."""
        few = TwoCosts(restricted(self._free.first, options), restricted(self.second, options))
        outcome = labelled(few.first, few.second, few.mixed, share, wanted, budget.spend)
        if outcome is None or outcome.choice is None:
            return outcome
        return replace(outcome, choice=_chosen_of(options, outcome.choice))

    @property
    def _free(self) -> TwoCosts:
        """Without memory."""
        return replace(self, first=replace(self.first, lives=(), limit=None, checked=True))

    def _least(
        self, share: float, cost: float, budget: Budget, settings: RelaxationSettings = RELAXATION
    ) -> list[np.ndarray] | None:
        """Node -> option -> what any choice with it costs at least in a mixture, memory aside; None: there is no time.

        They are found once.

        Args:
            cost: that of the best choice known.
        """
        if (share, settings) in self.known_bounds:
            return self.known_bounds[share, settings]
        relaxation = Relaxation(finite(self._free.mixed(share), cost), settings)
        budget.spend(BUILD_SWEEPS * relaxation.seconds)
        for _, _ in relaxation.rounds(lambda: cost):
            budget.spend(relaxation.seconds)
            if budget.over:
                return None
        found = list(map(np.maximum, relaxation.least(forward=False), relaxation.least(forward=True)))
        self.known_bounds[share, settings] = found
        return found

    def _options(
        self, least: Sequence[np.ndarray], ceiling: float, choice: Sequence[int] | None = None
    ) -> list[np.ndarray]:
        """Node -> the options that choices below the ceiling may have, beside those of a choice."""
        found = []
        for node, (costs, own) in enumerate(zip(self.first.costs, least, strict=True)):
            is_allowed = own < ceiling
            if choice is not None:
                is_allowed[choice[node]] = True
            found.append(np.flatnonzero(np.isfinite(costs) & is_allowed))
        return found


def _cheapest(
    costs: TwoCosts, options: Sequence[np.ndarray], choice: Sequence[int], gap: float, budget: Budget
) -> tuple[tuple[int, ...] | None, float]:
    """The integer program over these options, from a choice among them; and what any of them costs at least."""
    start = [int(np.searchsorted(own, chosen)) for own, chosen in zip(options, choice, strict=True)]
    program = importlib.import_module("autoshard.solver.exact.integer_program")  # imports for a second

    def spend(seconds: float) -> bool:
        budget.spend(seconds)
        return budget.over

    first, second = restricted(costs.first, options), restricted(costs.second, options)
    outcome = program.cheapest(first, start, beside=second, seed=0, gap=gap, time_limit=budget.seconds, spend=spend)
    if outcome.interrupted:
        budget.interrupt()
    if outcome.choice is None:
        return None, outcome.bound
    return _chosen_of(options, outcome.choice), outcome.bound


def _chosen_of(options: Sequence[np.ndarray], choice: Sequence[int]) -> tuple[int, ...]:
    """A choice among these options of each node, in the numbers of all."""
    return tuple(int(own[at]) for own, at in zip(options, choice, strict=True))


def restricted(problem: Problem, options: Sequence[np.ndarray]) -> Problem:
    """The problem of only these options of each node, which get new numbers.

    >>> restricted(Problem((np.array([1.0, 2.0, 3.0]),), (), (), None), [np.array([0, 2])]).costs
    (array([1., 3.]),)
    """
    costs = tuple(own[kept] for own, kept in zip(problem.costs, options, strict=True))
    edges = tuple(Edge(e.i, e.j, e.costs[np.ix_(options[e.i], options[e.j])]) for e in problem.edges)
    lives = tuple(replace(live, usage=live.usage[options[live.node]]) for live in problem.lives)
    return replace(problem, costs=costs, edges=edges, lives=lives, checked=True)


def _scaled(costs: np.ndarray, share: float) -> np.ndarray:
    """So much of these costs; what is forbidden remains so."""
    return np.where(np.isinf(costs), np.inf, costs * share if share else 0.0)
