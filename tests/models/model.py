"""What every file of this folder returns: one train step, its first state, and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Model:
    """A train step with everything needed to run it, in float32 and without randomness."""

    name: str
    step: Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) -> (state, loss): plain, ready for jax.jit
    state: Any  # the first state, a pytree of arrays
    batches: Callable[[int], dict[str, np.ndarray]]  # the i-th batch, the same in every process
