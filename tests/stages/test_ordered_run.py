"""What a process raises where another one tells of a failure while its own work goes on."""

import contextlib
import threading
from dataclasses import replace

import pytest

from autoshard import ProcessError, StageError
from autoshard.stages.running import ordered_run
from autoshard.stages.running.ordered_run import OrderedRun


class Failed:
    """A group of which another process has told that it failed."""

    def __init__(self):
        self.is_told = threading.Event()

    @contextlib.contextmanager
    def joined(self, *, runs):
        yield

    def watch(self):
        self.is_told.set()
        raise ProcessError("process 1 of the mesh failed")


class SlowRun(OrderedRun):
    """A run that learns of the failure itself, or never, after the other process has told of it."""

    def __init__(self, learns):
        self.group, self.learns, self.failure, self.found = Failed(), learns, None, []
        self.ended = threading.Event()

    def guarded_run(self):
        self.group.is_told.wait(10)
        if self.learns:
            self.failure = "the end of the step", StageError("a stage failed on process 1")
        else:
            self.ended.wait(10)


@pytest.mark.parametrize("learns, kind", [(True, StageError), (False, ProcessError)])
def test_the_error_of_the_stage_comes_before_that_of_the_process(learns, kind, monkeypatch):
    monkeypatch.setattr(ordered_run, "_WATCH_SECONDS", 0.01)
    monkeypatch.setattr(ordered_run, "PATIENCE", replace(ordered_run.PATIENCE, beat=2.0 if learns else 0.1))
    run = SlowRun(learns)
    with pytest.raises(kind):
        run.results()
    run.ended.set()
