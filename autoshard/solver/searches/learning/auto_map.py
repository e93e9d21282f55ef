"""Auto-Map's search: deep Q-learning of what deciding an option costs in the end.

Wang et al., "Auto-MAP: A DQN framework for exploring distributed execution plans for DNN workloads", 2020, after Mnih
et al., "Human-level control through deep reinforcement learning", Nature 2015.

Kept: nodes are decided one after the other; a network values each option by what it is and what is decided beside it;
transitions are replayed, and targets come from a network of earlier weights. Different: one hidden layer; rewards come
at each decision, what it adds to the cost, instead of at the end alone. Finished choices are made to fit.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.learning.network import Adam, Network
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import SearchRun


@dataclass(frozen=True)
class AutoMapSettings:
    """Values, and how they are learned."""

    hidden: int = 16  # units of the network
    rate: float = 0.01  # of Adam
    discount: float = 0.95  # of what later decisions cost
    memory: int = 4000  # transitions that are kept
    batch: int = 32  # that are replayed at once
    steps_per_replay: int = 8  # decisions from one replay to the next
    stray: float = 0.02  # share of decisions at random; it begins higher and falls to this
    episodes: int = 200  # of one network


SETTINGS = AutoMapSettings()


@dataclass(frozen=True, eq=False)
class Transition:
    """A decision: what the network saw of it, its reward, and what it saw of the next node's options."""

    features: np.ndarray  # [features]
    reward: float
    following: np.ndarray  # [options, features]; no rows after the last decision


@dataclass(eq=False)
class Learner:
    """The network, the one that gives it targets, and what is replayed."""

    network: Network
    target: Network
    optimizer: Adam
    transitions: list[Transition] = field(default_factory=list)
    decisions: int = 0

    @classmethod
    def of(cls, features: int, rng: np.random.Generator) -> Learner:
        network, target = (Network(features, SETTINGS.hidden, rng) for _ in range(2))
        return cls(network, target, Adam(network.arrays, SETTINGS.rate))

    def keep(self, transition: Transition, run: SearchRun) -> None:
        """Keeps a transition, and replays some every so many decisions."""
        if len(self.transitions) < SETTINGS.memory:
            self.transitions.append(transition)
        else:
            self.transitions[self.decisions % SETTINGS.memory] = transition
        self.decisions += 1
        if self.decisions % SETTINGS.steps_per_replay == 0:
            self.replay(run)

    def replay(self, run: SearchRun) -> None:
        """One step towards the targets of a few transitions."""
        drawn = [self.transitions[k] for k in run.rng.integers(len(self.transitions), size=SETTINGS.batch)]
        rows = np.stack([one.features for one in drawn])
        following = np.concatenate([one.following for one in drawn])
        values, start, targets = self.target.values(following), 0, []
        for one in drawn:
            end = start + len(one.following)
            targets.append(one.reward + SETTINGS.discount * (float(values[start:end].max()) if end > start else 0.0))
            start = end
        errors = np.clip(np.array(targets) - self.network.values(rows), -1.0, 1.0)
        self.optimizer.step(self.network.gradients(rows, errors / len(errors)))
        run.spend(self.network.seconds(len(rows) + len(following)))

    def renew_target(self) -> None:
        for old, new in zip(self.target.arrays, self.network.arrays, strict=True):
            old[:] = new


def auto_map(problem: Problem, run: SearchRun) -> None:
    """Networks, one after the other, each trained on episodes of its own."""
    at = Position(problem, run)
    order = at.by_stake()
    unit = float(at.at_stake.mean()) or 1.0
    for turn in run.rounds():
        learner = Learner.of(_features(at, order[0], {}, 0.0, unit).shape[1], run.rng)
        wildest = run.rng.random() if turn else 0.3
        for episode in range(SETTINGS.episodes):
            strays = max(SETTINGS.stray, wildest * (1 - 2 * episode / SETTINGS.episodes))
            at.start(_episode(at, order, learner, unit, strays))
            at.repair()
            at.offer()
            learner.renew_target()


def _episode(at: Position, order: list[int], learner: Learner, unit: float, strays: float) -> list[int]:
    """A choice made by the values of the network, and learned from.

    Args:
        unit: cost that counts as one.
        strays: share of decisions at random.
    """
    chosen: dict[int, int] = {}
    last: tuple[np.ndarray, float] | None = None
    for step, node in enumerate(order):
        rows = _features(at, node, chosen, step / len(order), unit)
        if last is not None:
            learner.keep(Transition(*last, rows), at.run)
        is_stray = at.rng.random() < strays
        option = int(at.rng.integers(len(rows)) if is_stray else learner.network.values(rows).argmax())
        last = rows[option], -float(rows[option, 0])
        chosen[node] = option
    if last is not None:
        learner.keep(Transition(*last, np.zeros((0, len(last[0])))), at.run)
    return [chosen[node] for node in range(len(order))]


def _features(at: Position, node: int, chosen: dict[int, int], progress: float, unit: float) -> np.ndarray:
    """What the network sees of each option: [options, features].

    What deciding it adds to the cost, that beyond the cheapest, both with what open neighbours cost at least, and how
    far the episode is.
    """
    added, hoped = at.costs[node].copy(), np.zeros(at.sizes[node])
    for other, table in at.tables[node].items():
        if other in chosen:
            added += table[chosen[other]]
        else:
            hoped += table.min(axis=0)
    at.run.spend(3 * at.looks[node])
    both = added + hoped
    columns = [_compressed(costs / unit) for costs in (added, added - added.min(), both - both.min())]
    rest = [both == both.min(), np.full(len(added), progress), np.ones(len(added))]
    return np.stack([*columns, *rest], axis=1).astype(np.float64)


def _compressed(values: np.ndarray) -> np.ndarray:
    """Values of all magnitudes, forbidden ones included, as small numbers of the same sign."""
    return np.asarray(np.sign(values) * np.log1p(np.abs(values)))
