"""A traced step and its plan in, the annotated function under `jax.jit` out."""

from autoshard.lower.emitter import annotated
from autoshard.lower.step import JittedStep, Lowering, named_refusals

__all__ = ["JittedStep", "Lowering", "annotated", "named_refusals"]
