"""What `pad=` may say, and the decorated function that each makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoshard.decorated import ShardedFunction
from autoshard.padding.dims.uneven_function import UnevenFunction
from autoshard.padding.padded_function import PaddedFunction

PADDED_FUNCTIONS: Mapping[str | None, type[ShardedFunction[..., Any]]] = {
    None: ShardedFunction,
    "batch": PaddedFunction,
    "auto": UnevenFunction,
}
