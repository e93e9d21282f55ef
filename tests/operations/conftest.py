"""Operations run where JAX is told to refuse arrays of unlike ranks, as users may tell it."""

import jax
import pytest


@pytest.fixture(autouse=True)
def without_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield
