"""The sharding rules of JAX's primitives, one module per family of operations; importing them registers them."""

from autoshard.propagation.rules import (
    boundaries,
    contractions,
    dims,
    elementwise,
    host,
    indexing,
    linalg,
    randomness,
    reductions,
    sorting,
    windows,
)

__all__ = [
    "boundaries",
    "contractions",
    "dims",
    "elementwise",
    "host",
    "indexing",
    "linalg",
    "randomness",
    "reductions",
    "sorting",
    "windows",
]
