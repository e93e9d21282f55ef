"""Spotlight's search: a policy trained by proximal policy optimization.

Gao, Chen and Li, "Spotlight: Optimizing device placement for training deep neural networks", ICML 2018, after Schulman
et al., "Proximal policy optimization algorithms", 2017.

Kept: every batch of samples is used for several steps, in which probabilities stay near those that it was drawn with.
Different: the network is that of `policy.py`, and so are the rewards.
"""

from __future__ import annotations

import numpy as np

from autoshard.solver.problem import Problem
from autoshard.solver.searches.learning.policy import Policy, features_of, train
from autoshard.solver.searches.many_choices import ManyChoices
from autoshard.solver.searches.search_run import SearchRun

CLIPPED = 0.2  # how far a ratio of probabilities may be from 1 to be raised or lowered further
REPEATS = 4  # steps along one batch


def spotlight(problem: Problem, run: SearchRun) -> None:
    """Policies, one after the other."""
    many = ManyChoices(problem, run)
    features = features_of(many.at)
    for _ in run.rounds():
        train(Policy(many, features), clipped, REPEATS)


def clipped(ratios: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """The weights of samples: none for those that are likelier already and good, or less likely and bad.

    >>> clipped(np.array([1.0, 1.5, 0.5]), np.array([2.0, 2.0, 2.0])).tolist()
    [2.0, 0.0, 1.0]
    """
    gone = np.where(advantages > 0, ratios > 1 + CLIPPED, ratios < 1 - CLIPPED)
    return np.where(gone, 0.0, ratios * advantages)
