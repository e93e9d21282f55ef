"""Processes that take turns at work whose result lies on disk, so that one does it for all."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

try:
    from fcntl import LOCK_EX, flock
except ImportError:  # on Windows, where each process works for itself
    flock = None  # type: ignore[assignment]


@contextlib.contextmanager
def turn(work: str) -> Iterator[tuple[int, ...]]:
    """Held by one process at a time of those that run this copy of the package on this Python; the others wait.

    Yields:
        File descriptors. A process that is started with them (`pass_fds`) holds the turn too, until it ends.
    """
    copy = hashlib.sha256(f"{Path(__file__).parent} {sys.version}".encode()).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"autoshard-{work}-{copy}.lock"
    held: tuple[int, ...] = ()
    if flock is not None:
        with contextlib.suppress(OSError):  # nowhere to write, or another user's file: nobody waits
            held = (os.open(path, os.O_RDWR | os.O_CREAT, 0o600),)
            flock(held[0], LOCK_EX)
    try:
        yield held
    finally:
        for descriptor in held:
            os.close(descriptor)
