"""The sharding rules of JAX's primitives, one module per family of operations; importing them registers them."""

from autoshard.propagation.rules import (
    annotations,
    boundaries,
    contractions,
    dims,
    elementwise,
    host,
    indexing,
    linalg,
    opaque,
    randomness,
    reductions,
    sorting,
    windows,
)

__all__ = [
    "annotations",
    "boundaries",
    "contractions",
    "dims",
    "elementwise",
    "host",
    "indexing",
    "linalg",
    "opaque",
    "randomness",
    "reductions",
    "sorting",
    "windows",
]
