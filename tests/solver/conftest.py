"""Compiled code for the tests that read it."""

import pytest


@pytest.fixture(scope="session")
def compiled():
    """Compiled code, ready to run."""
    from autoshard.solver.local_search import large_search

    large_search.warm_up()
