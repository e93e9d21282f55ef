import pytest


@pytest.fixture(autouse=True)
def in_every_test(without_rank_promotion):
    """Operations run where JAX refuses arrays of unlike ranks."""
