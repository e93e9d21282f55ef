"""The line that is shown while a plan is sought: at a terminal and in notebooks alone, and gone afterwards."""

from __future__ import annotations

import io
import time

import pytest
from test_text import mlp_plan

from autoshard.report import live
from autoshard.report.live import LiveLine
from autoshard.solver.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(live, "DELAY", 0.0)
    monkeypatch.setattr(live, "_EVERY", 0.01)


def screen(written: str) -> str:
    """What one line of a terminal shows after this was written."""
    shown = ""
    for text in written.split("\r"):
        shown = text + shown[len(text) :]
    return shown.strip()


def test_a_plan_is_watched_at_a_terminal(impatient, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    mlp_plan(64, 1024, {"data": 2, "model": 2}, memory="2.4MiB")
    lines = terminal.getvalue().split("\r")
    assert any(line.startswith("tracing mlp") for line in lines)
    assert any(line.startswith("planning mlp") and "per step" in line and "gap" in line for line in lines)
    assert screen(terminal.getvalue()) == "" and all(len(line) <= 100 for line in lines)


def test_a_pipe_stays_empty(impatient, monkeypatch):
    pipe = io.StringIO()
    monkeypatch.setattr("sys.stderr", pipe)
    mlp_plan(64, 1024, {"data": 8})
    assert pipe.getvalue() == ""


def test_what_is_quick_shows_nothing():
    terminal = Terminal()
    with LiveLine("planning", terminal):
        pass
    assert terminal.getvalue() == ""


def test_an_error_takes_the_line_away(impatient):
    terminal = Terminal()
    with pytest.raises(ZeroDivisionError), LiveLine("planning", terminal) as line:
        line.tell(Progress("moves", cost=float("inf"), bound=float("-inf"), seconds=0.0))
        time.sleep(0.1)
        raise ZeroDivisionError
    assert "planning: moves; 0 s" in terminal.getvalue() and screen(terminal.getvalue()) == ""


def test_a_terminal_that_is_gone_stops_nothing(impatient):
    terminal = Terminal()
    with LiveLine("planning", terminal):
        terminal.close()
        time.sleep(0.05)
