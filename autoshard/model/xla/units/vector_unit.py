"""The vector unit of a TPU core: functions that take longer to compute than what they read and make takes to move.

Elementwise work is done on registers of 8 x 128 numbers. Most functions are computed while memory brings the next
register; those of `VectorUnit.cycles` are not. A fused loop takes as long as the slower of the two.

Source: the cycles that libtpu notes on v5e programs of one function of [1024, 1024], applied one to three times.
`tests/model/xla/test_units.py` compiles some of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from autoshard.program import Equation

REGISTER = 8 * 128  # numbers


@dataclass(frozen=True)
class VectorUnit:
    """How long functions take on it."""

    clock: float = 1.0  # cycles per second
    # primitive, or algorithm of a generator -> of one register of real numbers
    cycles: Mapping[str, float] = field(default_factory=dict)
    complex_cycles: Mapping[str, float] = field(default_factory=dict)  # the same of complex numbers

    def counts(self, equation: Equation) -> bool:
        """Whether an equation is known to take longer than memory does."""
        return self._cycles(equation) > 0

    def seconds(self, equation: Equation, elements: np.ndarray | float) -> np.ndarray | float:
        """What an equation takes for so many elements of its result, padding included."""
        return elements / REGISTER * self._cycles(equation) / self.clock

    def _cycles(self, equation: Equation) -> float:
        values = (*equation.inputs, *equation.outputs)  # none, of a callback that takes and gives nothing
        is_complex = bool(values) and getattr(values[0].dtype, "kind", "") == "c"
        name = equation.primitive
        if name == "rng_bit_generator":  # that of the chip itself, RNG_DEFAULT, takes no cycles of the vector unit
            name = equation.params["algorithm"].name
        return (self.complex_cycles if is_complex else self.cycles).get(name, 0.0)
