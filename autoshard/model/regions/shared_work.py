"""Calls of operations and of their gradients in, what it costs if the two run in different ways out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autoshard.model.groups import Group
from autoshard.model.pricing.prices import PricedStrategies, PriceList


def forward_groups(groups: Sequence[Group], prices: PriceList) -> dict[int, int]:
    """Index of the group of a backward pass -> that of the forward pass whose work XLA shares with it."""
    if prices.regions is None or not prices.regions.forward:
        return {}
    home = {equation.index: group.index for group in groups for equation in group.equations}
    return {home[backward]: home[forward.index] for backward, forward in prices.regions.forward.items()}


def shared_work(
    groups: Sequence[Group], priced: Sequence[PricedStrategies], prices: PriceList
) -> Iterator[tuple[int, int, np.ndarray]]:
    """(forward group, backward group, seconds per pair of their strategies) of work that XLA merges only in one run."""
    for j, i in forward_groups(groups, prices).items():
        pairs = zip(priced[j].strategies, priced[j].seconds, strict=True)
        apart = np.array([prices.unmerged_backward_seconds(groups[j], one).total - same.total for one, same in pairs])
        ways = [one.run for one in priced[i].strategies]
        differ = np.array([[way != one.run for one in priced[j].strategies] for way in ways])
        yield i, j, differ * np.maximum(apart, 0.0)
