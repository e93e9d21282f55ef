"""The train steps that predictions are held against, each at two scales, and those whose planning is timed.

`PLANNED` are models at the sizes that they are trained at, and are only planned. `SMALL` runs on 8 virtual CPU devices;
`LARGE` is compiled for 16 devices, TPU v5e:4x4 or 2x8 H100, and never allocated; so is `TRAINED`, models nearer to what
is trained, which only `plans.py` compiles. Their dims divide by the mesh axes 2, 4 and 8, and batches by 16, so that
every sharding of `shardings.py` applies. The folder `tests` has to be on the path.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from models import Model, constrained, diffusion, gnn, gpt, llama, lstm, mamba, moe, resnet, unet, vit
from models.model import Constrain


class Abstract(NamedTuple):
    """A train step, and the shapes of its state and batch."""

    step: Callable[[Any, Any], tuple[Any, Any]]
    state: Any  # a pytree of ShapeDtypeStructs
    batch: dict[str, ShapeDtypeStruct]


@dataclass(frozen=True)
class Workload:
    """A family of `tests/models` at chosen sizes."""

    family: str  # a row of FAMILIES, and of MEGATRON in shardings.py
    sizes: Mapping[str, Any]

    def model(self) -> Model:
        """Its train step with a state, allocated, and data."""
        return FAMILIES[self.family].make(**self.sizes)

    def abstract(self, constrain: Constrain | None = None) -> Abstract:
        """Its train step and the shapes of its arguments, of which nothing is allocated.

        Args:
            constrain: what lays out the values that the model names; by default they are left as they are.
        """
        models = []
        state = jax.eval_shape(lambda: models.append(self.model()) or models[0].state)
        # These steps close over no arrays, so that they outlive the trace that made them.

        def step(state: Any, batch: Any) -> tuple[Any, Any]:
            with constrained(constrain) if constrain else contextlib.nullcontext():
                return models[0].step(state, batch)

        return Abstract(step, state, FAMILIES[self.family].batch(**self.sizes))


class Family(NamedTuple):
    """How a model is made, and the shapes of its batch; both are functions of its sizes."""

    make: Callable[..., Model]
    batch: Callable[..., dict[str, ShapeDtypeStruct]]


def f32(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, jnp.float32)


def i32(*shape: int) -> ShapeDtypeStruct:
    return ShapeDtypeStruct(shape, jnp.int32)


def sentences(*, batch: int, seq: int, **_: Any) -> dict[str, ShapeDtypeStruct]:
    return {"inputs": i32(batch, seq), "targets": i32(batch, seq)}


def groups_of_tokens(*, groups: int, tokens: int, d_model: int, **_: Any) -> dict[str, ShapeDtypeStruct]:
    return {"x": f32(groups, tokens, d_model), "y": f32(groups, tokens, d_model)}


def classified_images(*, batch: int, size: int, **_: Any) -> dict[str, ShapeDtypeStruct]:
    return {"images": f32(batch, size, size, 3), "labels": i32(batch)}


def classified_pixels(*, batch: int, size: int, **_: Any) -> dict[str, ShapeDtypeStruct]:
    return {"images": f32(batch, size, size, 3), "labels": i32(batch, size, size)}


def classified_series(*, batch: int, seq: int, features: int, **_: Any) -> dict[str, ShapeDtypeStruct]:
    return {"x": f32(batch, seq, features), "labels": i32(batch)}


def noisy_images(*, batch: int, size: int, channels: int, **_: Any) -> dict[str, ShapeDtypeStruct]:
    return {"images": f32(batch, size, size, channels), "seed": i32()}


def graph(*, nodes: int, edges: int, features: int, **_: Any) -> dict[str, ShapeDtypeStruct]:
    of_nodes, ends = f32(nodes, features), i32(edges)
    return {"nodes": of_nodes, "edges": f32(edges, features), "senders": ends, "receivers": ends, "targets": of_nodes}


FAMILIES = {
    "diffusion": Family(diffusion.make, noisy_images),
    "gnn": Family(gnn.make, graph),
    "gpt": Family(gpt.make, sentences),
    "llama": Family(llama.make, sentences),
    "lstm": Family(lstm.make, classified_series),
    "mamba": Family(mamba.make, sentences),
    "mixtral": Family(llama.make, sentences),
    "moe": Family(moe.make, groups_of_tokens),
    "resnet": Family(resnet.make, classified_images),
    "unet": Family(unet.make, classified_pixels),
    "vit": Family(vit.make, classified_images),
}

# Unrolled layers are what XLA for TPU takes long over: few of them. Those that compute in bfloat16 keep a state in
# float32.
SMALL_GPT = {"d_model": 256, "heads": 8, "vocab": 1024, "seq": 64, "batch": 32, "layers": 2}
LARGE_GPT = {"d_model": 1024, "heads": 16, "vocab": 32768, "seq": 1024, "batch": 64, "dtype": jnp.bfloat16}
SIZES = [  # name, family, small, large
    ("gpt", "gpt", SMALL_GPT, LARGE_GPT | {"layers": 2}),
    ("gpt remat", "gpt", SMALL_GPT | {"remat": True}, LARGE_GPT | {"layers": 2, "remat": True}),
    ("gpt scan", "gpt", SMALL_GPT | {"scan": True}, LARGE_GPT | {"layers": 4, "scan": True}),
    (
        "gpt scan remat",
        "gpt",
        SMALL_GPT | {"scan": True, "remat": True},
        LARGE_GPT | {"layers": 4, "scan": True, "remat": True},
    ),
    (
        "moe",
        "moe",
        {"groups": 32, "tokens": 64, "d_model": 256, "d_hidden": 1024, "experts": 16, "capacity": 16},
        {"groups": 64, "tokens": 1024, "d_model": 1024, "d_hidden": 4096, "experts": 16, "capacity": 256},
    ),
    (
        "vit",
        "vit",
        {"layers": 2, "width": 256, "heads": 8, "size": 32, "patch": 4, "classes": 16, "batch": 32},
        {"layers": 2, "width": 1024, "heads": 16, "size": 256, "patch": 16, "classes": 1024, "batch": 256}
        | {"dtype": jnp.bfloat16},
    ),
    (
        "resnet",
        "resnet",
        {"stages": (1, 1, 1), "width": 64, "size": 32, "classes": 16, "batch": 32},
        {"stages": (3, 4, 6, 3), "width": 64, "size": 224, "classes": 1024, "batch": 512, "dtype": jnp.bfloat16},
    ),
    (
        "unet",
        "unet",
        {"width": 64, "size": 32, "classes": 16, "batch": 16},
        {"width": 64, "size": 256, "classes": 32, "batch": 128},
    ),
    (
        "lstm",
        "lstm",
        {"hidden": 512, "features": 256, "classes": 16, "seq": 16, "batch": 128},
        {"hidden": 1024, "features": 1024, "classes": 1024, "seq": 256, "batch": 2048},
    ),
]
SMALL = {name: Workload(family, small) for name, family, small, _ in SIZES}
LARGE = {name: Workload(family, large) for name, family, _, large in SIZES}

LLAMA_1B = {"d_model": 2048, "heads": 32, "shared_heads": 8, "d_hidden": 8192, "vocab": 128256, "layers": 16}
LLAMA_8B = {"d_model": 4096, "heads": 32, "shared_heads": 8, "d_hidden": 14336, "vocab": 128256, "layers": 32}
MIXTRAL = {"d_model": 2048, "heads": 16, "shared_heads": 8, "d_hidden": 3584, "vocab": 32768, "layers": 8}
GPT_3 = {"d_model": 12288, "heads": 96, "vocab": 50304, "layers": 96, "remat": True}
PLANNED = {
    "llama 8b": Workload("llama", LLAMA_8B | {"seq": 4096, "batch": 64, "dtype": jnp.bfloat16}),
    "llama 8b scan": Workload("llama", LLAMA_8B | {"seq": 4096, "batch": 64, "dtype": jnp.bfloat16, "scan": True}),
    "gpt-3": Workload("gpt", GPT_3 | {"seq": 2048, "batch": 256, "dtype": jnp.bfloat16}),
    "resnet-50": LARGE["resnet"],
}

TRAINED = {
    "llama 1b": Workload("llama", LLAMA_1B | {"seq": 2048, "batch": 32, "dtype": jnp.bfloat16}),
    "llama 1b scan": Workload("llama", LLAMA_1B | {"seq": 2048, "batch": 32, "dtype": jnp.bfloat16, "scan": True}),
    "llama 8b": Workload("llama", LLAMA_8B | {"seq": 2048, "batch": 16, "dtype": jnp.bfloat16}),
    "llama 8b scan": Workload("llama", LLAMA_8B | {"seq": 2048, "batch": 16, "dtype": jnp.bfloat16, "scan": True}),
    "mixtral scan": Workload(
        "mixtral",
        MIXTRAL | {"experts": 16, "capacity": 320, "seq": 2048, "batch": 32, "dtype": jnp.bfloat16, "scan": True},
    ),
    "vit-l scan": Workload(
        "vit",
        {"layers": 24, "width": 1024, "heads": 16, "size": 256, "patch": 16, "classes": 1024, "batch": 256}
        | {"dtype": jnp.bfloat16, "scan": True},
    ),
    "diffusion": Workload(
        "diffusion",
        {"layers": 2, "width": 256, "halvings": 2, "heads": 8, "size": 64, "channels": 4, "batch": 256}
        | {"dtype": jnp.bfloat16},
    ),
    "gnn": Workload(
        "gnn",
        {"nodes": 2**16, "edges": 2**19, "features": 128, "width": 512, "rounds": 4, "dtype": jnp.bfloat16},
    ),
    "mamba": Workload(
        "mamba",
        {"layers": 2, "d_model": 1024, "inner": 2048, "states": 16, "rank": 64, "vocab": 32768, "seq": 512}
        | {"batch": 32, "dtype": jnp.bfloat16},
    ),
}
