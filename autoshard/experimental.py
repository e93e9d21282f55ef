"""What of `jax.experimental` is used: the only file that knows it."""

from jax.experimental import mesh_utils, topologies
from jax.experimental.compute_on import compute_on
from jax.experimental.xla_metadata import set_xla_metadata

__all__ = ["compute_on", "mesh_utils", "set_xla_metadata", "topologies"]
