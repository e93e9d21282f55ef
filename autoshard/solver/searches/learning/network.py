"""A network of one hidden layer, from features of an option to a number, and Adam. Plain NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

SECONDS_PER_PRODUCT = 2e-9  # of a quiet core: a feature of a row times a hidden unit, there and back
SECONDS_PER_PASS = 4e-5  # of the same: the calls of NumPy, there and back


@dataclass(frozen=True)
class AdamSettings:
    """Kingma and Ba, "Adam: A method for stochastic optimization", ICLR 2015: their numbers."""

    momentum: float = 0.9  # share of the mean gradient that stays from step to step
    square_momentum: float = 0.999  # the same of the mean square
    smallest: float = 1e-8  # added to the root of the mean square, so that nothing is divided by 0


ADAM = AdamSettings()


class Adam:
    """Steps of gradient ascent on arrays, which it changes in place."""

    def __init__(self, arrays: Sequence[np.ndarray], rate: float):
        self.arrays, self.rate, self.count = arrays, rate, 0
        self._means = [np.zeros_like(array) for array in arrays]
        self._squares = [np.zeros_like(array) for array in arrays]

    def step(self, gradients: Sequence[np.ndarray]) -> None:
        """One step along gradients of the arrays, in their order."""
        self.count += 1
        rate = self.rate * np.sqrt(1 - ADAM.square_momentum**self.count) / (1 - ADAM.momentum**self.count)
        for array, gradient, mean, square in zip(self.arrays, gradients, self._means, self._squares, strict=True):
            mean += (1 - ADAM.momentum) * (gradient - mean)
            square += (1 - ADAM.square_momentum) * (gradient**2 - square)
            array += rate * mean / (np.sqrt(square) + ADAM.smallest)


class Network:
    """``tanh(x W + b) v`` for rows x of features.

    Attributes:
        arrays: W [features, hidden], b [hidden] and v [hidden].
    """

    def __init__(self, features: int, hidden: int, rng: np.random.Generator):
        self.arrays = (
            rng.standard_normal((features, hidden)) / np.sqrt(features),
            np.zeros(hidden),
            0.1 * rng.standard_normal(hidden) / np.sqrt(hidden),
        )

    def values(self, rows: np.ndarray) -> np.ndarray:
        """One number per row of [rows, features]."""
        inner, bias, outer = self.arrays
        return np.asarray(np.tanh(rows @ inner + bias) @ outer)

    def gradients(self, rows: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
        """The gradients of ``weights @ values(rows)`` by the arrays."""
        inner, bias, outer = self.arrays
        hidden = np.tanh(rows @ inner + bias)
        back = weights[:, None] * outer * (1 - hidden**2)
        return [rows.T @ back, back.sum(axis=0), hidden.T @ weights]

    def seconds(self, rows: int) -> float:
        """About what values and gradients of so many rows take on a quiet core."""
        return SECONDS_PER_PASS + SECONDS_PER_PRODUCT * rows * self.arrays[0].size
