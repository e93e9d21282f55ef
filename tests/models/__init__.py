"""Train steps for tests, benchmarks and rule coverage: one file per model, each with `make(**sizes) -> Model`.

`jax.eval_shape(lambda: make(...).state)` gives the state's shapes without allocating it, for sizes that do not fit.
"""

from . import cnn, gpt, lstm, mlp, moe, tied
from .model import Model

MODELS = {"cnn": cnn.make, "gpt": gpt.make, "lstm": lstm.make, "mlp": mlp.make, "moe": moe.make, "tied": tied.make}

__all__ = ["MODELS", "Model", "cnn", "gpt", "lstm", "mlp", "moe", "tied"]
