"""Work that neither Ctrl-C nor the clock has to wait for: Python hears them only between instructions of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

T = TypeVar("T")
TICK_SECONDS = 0.1  # between two calls of `tick`


def in_background(work: Callable[[], T], tick: Callable[[], None]) -> T:
    """What some work returns or raises, done in a thread of its own.

    >>> in_background(lambda: 6 * 7, tick=lambda: None)
    42

    Args:
        tick: called again and again meanwhile; when it raises, the work is left to itself.
    """
    return result_of(begun(work), tick)


def begun(work: Callable[[], T]) -> Future[T]:
    """What some work will return or raise, begun in a thread that the end of the process does not wait for."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def result_of(future: Future[T], tick: Callable[[], None]) -> T:
    """What the work returns or raises.

    Args:
        tick: called again and again until then; when it raises, the work is left to itself.
    """
    while wait([future], timeout=TICK_SECONDS).not_done:
        tick()
    return future.result()
