"""The boundary around stacks of matrices: nobody asks for them, so no fault in them stops a step.

Whatever goes wrong while stacks are found or made is logged at WARNING with its traceback, and the step is planned as
it is written. Tests set `RAISES`, so that they see such faults.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

RAISES = False  # whether the caller gets the errors

Made = TypeVar("Made")
_LOG = logging.getLogger("autoshard")


def made_or_none(make: Callable[[], Made | None]) -> Made | None:
    """What `make` returns; None if it fails."""
    try:
        return make()
    except Exception:
        if RAISES:
            raise
        _LOG.warning("a fault of autoshard: stacks of matrices could not be made, and are left out", exc_info=True)
        return None
