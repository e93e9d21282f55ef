"""ColocRL's search: a policy trained by REINFORCE on what its samples cost.

Mirhoseini et al., "Device placement optimization with reinforcement learning", ICML 2017; the hierarchical model of
2018, GDP and TAPP train other networks in the same way.

Kept: a network proposes an option for every node, samples are drawn, and the gradient of their probabilities is
weighted by the reward less its moving average. Different: one hidden layer over features of options instead of
recurrent networks over operators (`policy.py`); the reward is the logarithm of the cost, not the square root of a
measured time; of each step the best sample is made to fit. Policies that have settled are followed by new ones.
"""

from __future__ import annotations

from autoshard.solver.problem import Problem
from autoshard.solver.searches.learning.policy import Policy, features_of, train
from autoshard.solver.searches.many_choices import ManyChoices
from autoshard.solver.searches.search_run import SearchRun


def colocrl(problem: Problem, run: SearchRun) -> None:
    """Policies, one after the other."""
    many = ManyChoices(problem, run)
    features = features_of(many.at)
    for _ in run.rounds():
        train(Policy(many, features), lambda ratios, advantages: advantages, repeats=1)
