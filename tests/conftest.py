"""Eight virtual CPU devices for every test, and programs compiled fast rather than to run fast."""

import contextlib
import gc
import os
import sys
from dataclasses import replace

import compilation
import jax
import pytest

from autoshard import planning
from autoshard.batching import boundary
from autoshard.solver.runtime import budget

collect_ignore = ["many_processes.py"]  # a program, which tests start

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
# Else JAX asks the file system about each frame of each error that passes it, as of those that a test expects.
jax.config.update("jax_traceback_filtering", "off")
# Else JAX makes a key of each program that it compiles, though there is no folder in which to look for it.
jax.config.update("jax_enable_compilation_cache", False)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"  # for processes that tests start

# jaxlib reads the variable once, and libtpu when it first compiles, which ends at flags that libtpu does not know.
os.environ["XLA_FLAGS"] = compilation.CPU_ONLY
jax.devices()
os.environ["XLA_FLAGS"] = compilation.PLAIN

compilation.share_contexts()

boundary.RAISES_ERRORS = True  # faults that users would find in a log alone

# Jaxprs are many small objects that live on: with Python's own thresholds the collector takes a twentieth of the time.
gc.set_threshold(100_000, 50, 100)


# Files with tests of ten seconds and more: one that begins last is waited for by the other worker.
LONG = ("test_notebooks.py", "test_examples.py", "test_every_process.py", "test_hosts.py")


# The code that draws of Hypothesis without bounds go into: numbers that it compares with are worth a try.
DRAWN_FROM = "autoshard/solver/contest.py"


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.path.name not in LONG)
    if providers := sys.modules.get("hypothesis.internal.conjecture.providers"):
        # Else it parses all of the package, in each process, and what it draws changes with any line there.
        providers.is_local_module_file = lambda path: path.endswith(DRAWN_FROM)


def pytest_sessionfinish():
    """pytest looks for garbage five times over as it ends, and Python once more: in millions of objects by then."""
    gc.freeze()


@contextlib.contextmanager
def _little_work():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(budget, "QUIET_SHARE", budget.QUIET_SHARE / 10)
        yield


@pytest.fixture(scope="module")
def little_work():
    """Until the module ends, searches do a tenth of the work that their time limits allow. The clock, which a busy
    machine runs into, gives them all of the time."""
    with _little_work():
        yield


@pytest.fixture
def little_work_once():
    """The same for one test."""
    with _little_work():
        yield


@pytest.fixture
def few_objects():
    """The collector knows of no objects but those of the test: looking through all others takes seconds."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def without_rank_promotion():
    """JAX refuses arrays of unlike ranks, as users may tell it to."""
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def blind(monkeypatch):
    """The planner takes every peak for a share of what it is: `blind(0.3)`."""

    def make(share):
        honest = planning.formulated

        def formulated(*args, **limits):
            formulation = honest(*args, **limits)
            lives = tuple(replace(live, usage=live.usage * share) for live in formulation.problem.lives)
            return replace(formulation, problem=replace(formulation.problem, lives=lives, checked=True))

        monkeypatch.setattr(planning, "formulated", formulated)

    return make
