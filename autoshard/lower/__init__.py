"""A traced step and its plan in, the annotated function under `jax.jit` out."""

from autoshard.lower.emitter import annotated
from autoshard.lower.step import Lowering, Step, named_refusals

__all__ = ["Lowering", "Step", "annotated", "named_refusals"]
