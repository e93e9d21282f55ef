"""Train steps for tests, benchmarks and rule coverage: one file per model, each with `make(**sizes) -> Model`.

`jax.eval_shape(lambda: make(...).state)` gives the state's shapes without allocating it, for sizes that do not fit.
"""

import functools

from . import cnn, diffusion, gnn, gpt, llama, lstm, mamba, mlp, moe, resnet, rnn, tied, unet, vit
from .model import Model, constrained

MODELS = {"cnn": cnn.make, "gpt": gpt.make, "lstm": lstm.make, "mlp": mlp.make, "moe": moe.make, "tied": tied.make}

# For rule coverage and propagation; not every test plans them.
MORE_MODELS = {
    "diffusion": diffusion.make,
    "gnn": gnn.make,
    "llama": llama.make,
    "mamba": mamba.make,
    "mixtral": functools.partial(llama.make, experts=4, capacity=16),
    "resnet": resnet.make,
    "rnn": rnn.make,
    "unet": unet.make,
    "vit": vit.make,
}

__all__ = [
    "MODELS",
    "MORE_MODELS",
    "Model",
    "cnn",
    "constrained",
    "diffusion",
    "gnn",
    "gpt",
    "llama",
    "lstm",
    "mamba",
    "mlp",
    "moe",
    "resnet",
    "rnn",
    "tied",
    "unet",
    "vit",
]
