"""What is being done, on one line that is written anew and then taken away: for whoever waits at a terminal."""

from __future__ import annotations

import math
import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

from autoshard.program.paths import printable
from autoshard.report.units import seconds_text
from autoshard.solver.progress import Progress

DELAY = 1.0  # s of silence that need no line
_EVERY = 0.4  # s between two lines
_WIDTH = 100  # columns: a line that wraps cannot be taken back


class LiveLine:
    """A line on standard error while something takes its time; none in a pipe or a file.

    >>> import io
    >>> with LiveLine("planning step", stream=io.StringIO()) as line:
    ...     line.tell(Progress("moves", cost=4e-3, bound=3e-3, seconds=0.5))
    >>> line.text()
    'planning step: moves; 4 ms per step, none faster than 3 ms, gap 25.00%; 0 s'
    """

    def __init__(self, what: str, stream: TextIO | None = None):
        """
        Args:
            what: is being done.
            stream: where to write; None: standard error.
        """
        self.what, self.stream = what, sys.stderr if stream is None else stream
        self.known: Progress | None = None
        self.start = time.monotonic()
        self.is_shown = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True) if is_watched(self.stream) else None

    def tell(self, progress: Progress) -> None:
        """What a running `solve` knows."""
        self.known = progress

    def text(self) -> str:
        """The line as it is now."""
        known, found = self.known, ""
        if known is not None:
            found = f" {known.stage}"
            if math.isfinite(known.cost):
                found += f"; {seconds_text(known.cost)} per step"
            if known.bound > 0:
                found += f", none faster than {seconds_text(known.bound)}"
            if math.isfinite(known.gap) and known.bound > 0:
                found += f", gap {known.gap:.2%}"
        seconds = time.monotonic() - self.start
        return printable(f"{self.what}:{found}; {seconds:.0f} s" if found else f"{self.what}: {seconds:.0f} s")[:_WIDTH]

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()
        if self.is_shown:
            self._write(f"\r{' ' * _WIDTH}\r")

    def _run(self) -> None:
        if self._done.wait(DELAY):
            return
        while True:
            self.is_shown = True
            self._write(f"\r{self.text():<{_WIDTH}}")
            if self._done.wait(_EVERY):
                return

    def _write(self, text: str) -> None:
        try:
            self.stream.write(text)
            self.stream.flush()
        except (OSError, ValueError):  # the terminal is gone, or the stream is closed: nobody waits any more
            self._done.set()


def is_watched(stream: TextIO) -> bool:
    """Whether somebody sees a line as it is written: at a terminal or in a notebook."""
    try:
        return stream.isatty() or type(stream).__module__.startswith("ipykernel")
    except (AttributeError, ValueError):
        return False
