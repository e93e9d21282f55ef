"""The boundary around what nobody asks for, as stacks of matrices: no fault in it stops a step.

Whatever goes wrong on the way is logged at WARNING with its traceback, and the step is planned as it is written. Tests
set `RAISES_ERRORS`, so that they see such faults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

RAISES_ERRORS = False  # whether the caller gets the errors

Made = TypeVar("Made")
_LOG = logging.getLogger("autoshard")


def result_or_none(what: str, make: Callable[[], Made | None]) -> Made | None:
    """What `make` returns; None if it fails.

    Args:
        what: is made, for the log.
    """
    try:
        return make()
    except Exception:
        if RAISES_ERRORS:
            raise
        _LOG.warning("%s failed, by a fault of autoshard, and is left out. Please report this.", what, exc_info=True)
        return None
