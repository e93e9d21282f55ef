"""Python's collector of garbage, put off while millions of objects are made, hardly any of them in a cycle."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Garbage waits until this is left: looking for it among so many new objects takes as long as making them.

    What is there by then counts as old, and is looked at when the collector next looks at all.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if not gc.get_freeze_count():  # what somebody froze is to stay so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def frozen() -> Iterator[None]:
    """The collector never looks at what is there already: to look again and again takes longer than to make it.

    Afterwards the collector looks at it again, unless somebody had frozen objects before.
    """
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        yield
    finally:
        if not before:
            gc.unfreeze()
