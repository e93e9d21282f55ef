"""One worker compiles for all."""

import fcntl
import tempfile
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled():
    """Compiled code, ready to run. Workers take turns, so that the first compiles, and others read what it left."""
    with open(Path(tempfile.gettempdir()) / "autoshard-tests-compile.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        from autoshard.solver.local_search import large_search

        large_search.warm_up()
