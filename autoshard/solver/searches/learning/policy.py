"""A policy: for each node a distribution over its options, given by a network and trained by what samples cost.

The score of an option is what the network makes of its features plus a number of its own. So the network learns what
holds for all nodes, and the numbers what holds for one. A node takes an option with the softmax of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autoshard.solver.searches.learning.network import Adam, Network
from autoshard.solver.searches.many_choices import ManyChoices
from autoshard.solver.searches.position import Position


@dataclass(frozen=True)
class PolicySettings:
    """A policy and its training."""

    samples: int = 64  # per step
    hidden: int = 16  # units of the network
    rate: float = 0.05  # of Adam, for the network
    own_rate: float = 0.3  # of Adam, for the options' own numbers
    entropy: float = 0.01  # weight of the entropy of the distributions, which keeps them from settling too soon
    baseline: float = 0.9  # how much of the mean reward stays from one step to the next
    settled: float = 0.98  # mean probability of the likeliest options, at which a policy has settled
    steps: int = 300  # of one policy, at most


SETTINGS = PolicySettings()
Weights = Callable[[np.ndarray, np.ndarray], np.ndarray]  # probability ratios and advantages of samples -> weights


class Policy:
    """Distributions over the options of all nodes, those of all nodes in a row.

    Attributes:
        probabilities: of the options, [options].
    """

    def __init__(self, many: ManyChoices, features: np.ndarray):
        self.many, self.features = many, features
        self.network = Network(features.shape[1], SETTINGS.hidden, many.run.rng)
        self.own = np.zeros(len(features))
        self._optimizers = Adam(self.network.arrays, SETTINGS.rate), Adam([self.own], SETTINGS.own_rate)
        self._node = np.repeat(np.arange(len(many.sizes)), many.sizes)
        self._set()

    def _set(self) -> None:
        starts = self.many.starts[:-1]
        scores = self.network.values(self.features) + self.own
        powers = np.exp(scores - np.maximum.reduceat(scores, starts)[self._node])
        self.probabilities = powers / np.add.reduceat(powers, starts)[self._node]

    @property
    def is_settled(self) -> bool:
        """Whether nearly all nodes have one option that they take."""
        likeliest = np.maximum.reduceat(self.probabilities, self.many.starts[:-1])
        return bool(likeliest.mean() > SETTINGS.settled)

    def sample(self, count: int) -> np.ndarray:
        """Choices: int64[count, nodes]."""
        upto = np.cumsum(self.probabilities)  # every node adds one
        nodes = np.arange(len(self.many.sizes))
        drawn = np.searchsorted(upto, nodes + self.many.run.rng.random((count, len(nodes))))
        return np.clip(drawn - self.many.starts[:-1], 0, self.many.sizes - 1)

    def logarithms(self, choices: np.ndarray) -> np.ndarray:
        """The logarithm of the probability of each choice."""
        taken = self.probabilities[self.many.starts[:-1] + choices]
        return np.asarray(np.log(np.maximum(taken, 1e-30)).sum(axis=1))

    def ascend(self, choices: np.ndarray, weights: np.ndarray) -> None:
        """A step along the gradient of the weighted logarithms of the choices' probabilities, and of the entropy."""
        many, chances = self.many, self.probabilities
        taken = (many.starts[:-1] + choices).ravel()
        gained = np.bincount(taken, np.repeat(weights, choices.shape[1]), len(chances)) - weights.sum() * chances
        logs = np.log(np.maximum(chances, 1e-30))
        entropy = -np.add.reduceat(chances * logs, many.starts[:-1])[self._node]
        scores = gained / len(choices) - SETTINGS.entropy * chances * (logs + entropy)
        for optimizer, gradients in zip(
            self._optimizers, (self.network.gradients(self.features, scores), [scores]), strict=True
        ):
            optimizer.step(gradients)
        many.run.spend(self.network.seconds(len(chances)))
        self._set()


def train(policy: Policy, weights: Weights, repeats: int) -> None:
    """Samples, offers the best and trains, until the policy has settled.

    Args:
        weights: what samples weigh in the gradient.
        repeats: steps along each batch of samples.
    """
    many, mean = policy.many, None
    for _ in range(SETTINGS.steps):
        choices = policy.sample(SETTINGS.samples)
        costs, excess = many.costs(choices), many.excess(choices)
        many.offer_best(choices, costs, excess)
        rewards = rewards_of(many, costs, excess)
        mean = rewards.mean() if mean is None else SETTINGS.baseline * mean + (1 - SETTINGS.baseline) * rewards.mean()
        advantages = (rewards - mean) / (rewards.std() + 1e-9)
        before = policy.logarithms(choices)
        for _ in range(repeats):
            ratios = np.exp(np.clip(policy.logarithms(choices) - before, -20, 20))
            policy.ascend(choices, weights(ratios, advantages))
        if policy.is_settled:
            return


def rewards_of(many: ManyChoices, costs: np.ndarray, excess: np.ndarray) -> np.ndarray:
    """Rewards of choices: how many times the best cost they cost, as a logarithm; more where they are not allowed."""
    at, best = many.at, many.run.cost
    best = float(costs.min()) if best == np.inf else best
    over = np.minimum(excess / max(1.0, at.room), 1.0)
    above = np.maximum(costs - best, 0.0) + at.never * (over + (excess > 0))
    unit = abs(best) / 100 or at.never / 1e6
    return np.asarray(-np.log1p(above / unit))


def features_of(at: Position) -> np.ndarray:
    """What a network sees of each option: [options, features], each between -1 and 1.

    What it costs by itself and beside its neighbours at best, its place among the options by that; bytes that it holds;
    how many options, neighbours and bytes at stake the node has, and a constant.
    """
    rows, stake = [], np.log1p(at.at_stake / (at.at_stake.mean() or 1.0))
    for node, costs in enumerate(at.costs):
        beside = at.prospects(node, {})
        held = np.zeros(len(costs))
        for start, end, usage in at.lives[node]:
            held += (end - start) * usage
        shared = [len(costs) / 100, len(at.tables[node]) / 10, stake[node] / (1 + stake.max()), 1.0]
        own = [_scaled(costs), _scaled(beside), np.argsort(np.argsort(beside)) / len(costs), _scaled(held)]
        rows.append(np.concatenate([np.stack(own, axis=1), np.tile(shared, (len(costs), 1))], axis=1))
    return np.concatenate(rows)


def _scaled(values: np.ndarray) -> np.ndarray:
    """Values from 0, the least, towards 1: twice the mean above the least is at two thirds."""
    above = values - values.min()
    middle = float(np.median(above)) or float(above.mean()) or 1.0
    return np.asarray(above / (above + middle))
