"""Shardings as people write them by hand: `in_shardings` of a train step for `autoshard.evaluate` and `jax.jit`.

The mesh has the axes data and model, and before them slices where a slow network joins several. These split, with data,
the batch and what is made of it, and each has all of the state, as with MaxText's `dcn_data_parallelism`.

A parallelism says how an array of the state lies, from its path and shape, so that an optimizer's moments and a norm's
running means lie as their parameters; how the arrays of the batch lie; and how values inside the step do, by the names
that models give their dims.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.layout import Layout, MeshShape, replicated, shards, spec_of
from autoshard.program import slashed

InShardings = tuple[Any, Any]  # PartitionSpecs in the tree of the state, and in that of the batch
ALL = ("data", "model")
ADDED = ("position/embedding", "positions")
STACKED = "*/blocks/[!0-9]*"  # paths of arrays whose first dim is the layers that a scan loops over: it stays whole

# What Megatron splits over the model axis: family -> end of a path, as a glob -> dim, counted from the last, which the
# first dim of stacked layers does not move. The first of two layers splits its results, the second what it sums over,
# and only the second's result is summed over devices.
TRANSFORMER = {
    "query/kernel": -2, "key/kernel": -2, "value/kernel": -2,  # [model, heads, head]: each device has its heads
    "out/kernel": -3,  # [heads, head, model]
    "up/kernel": -1, "up/bias": -1, "down/kernel": -2,  # [model, hidden] and [hidden, model]
}  # fmt: skip
ATTENTION = {"query": -2, "key": -2, "value": -2, "out": -3, "token": -2, "head": -1}  # the same, in plain pytrees
MEGATRON: dict[str, dict[str, int]] = {
    "diffusion": {  # attention by heads, convolutions by channel out: each gathers all channels
        "query/kernel": -2, "key/kernel": -2, "value/kernel": -2, "out/kernel": -3,
        "Conv_*/kernel": -1, "Conv_*/bias": -1, "ConvTranspose_*/kernel": -1, "ConvTranspose_*/bias": -1,
    },
    "dropless": {"swish": -1, "up": -1, "down": -2},  # by hidden unit: rows are sorted by expert
    "gnn": {"edge/up": -1, "edge/bias": -1, "edge/down": -2, "node/up": -1, "node/bias": -1, "node/down": -2},
    "gpt": TRANSFORMER | {"token/embedding": -2, "head/kernel": -1},  # both by vocabulary
    "llama": ATTENTION | {"gate": -1, "up": -1, "down": -2},
    "lstm": {  # by hidden unit, all four gates of each: every time step gathers the hidden state
        "OptimizedLSTMCell_0/*/kernel": -1, "OptimizedLSTMCell_0/*/bias": -1,
        "Dense_0/kernel": -2,
    },
    "mamba": {  # by channel of the state
        "in": -1, "filter": -1, "filter_bias": -1, "select": -2, "delta": -1, "delta_bias": -1, "log_a": -2, "skip": -1,
        "out": -2, "embedding": -2, "head": -1,
    },
    "mixtral": ATTENTION | {"experts/swish": -3, "experts/up": -3, "experts/down": -3},  # by expert
    "moe": {"up": -3, "down": -3},  # by expert
    "resnet": {  # by channel between blocks: a block sums its narrow result over devices and gathers its middle one
        "stem/conv/kernel": -1, "stem/norm/*": -1,
        "narrow/conv/kernel": -2,  # [height, width, in, out]
        "middle/conv/kernel": -1, "middle/norm/*": -1,
        "wide/conv/kernel": -1, "wide/norm/*": -1,
        "shortcut/conv/kernel": -1, "shortcut/norm/*": -1,
        "head/kernel": -2,
    },
    "unet": {  # by channel in and out in turns
        "Convolve_0/Conv_0/kernel": -1, "Convolve_0/GroupNorm_0/*": -1,
        "Convolve_1/Conv_0/kernel": -2,
        "Convolve_2/Conv_0/kernel": -1, "Convolve_2/GroupNorm_0/*": -1,
        "ConvTranspose_0/kernel": -2,
        "Convolve_3/Conv_0/kernel": -1, "Convolve_3/GroupNorm_0/*": -1,
        "Convolve_4/Conv_0/kernel": -2,
        "params/Conv_0/kernel": -1, "params/Conv_0/bias": -1,
    },
    "vit": TRANSFORMER | {"head/kernel": -1, "head/bias": -1},
}  # fmt: skip

# How the batch lies where its sequence is split too, an image's height standing for one. A MoE has its tokens in
# groups already: more groups, not shorter ones, split its sequence, and all-to-alls take them to the experts. An LSTM
# and a Mamba are left out: their sequence is what they loop over. So is a graph, which has none.
SEQUENCE = {"diffusion": P("data", "model"), "dropless": P("data", "model"), "gpt": P("data", "model"),
            "llama": P("data", "model"), "mixtral": P("data", "model"), "moe": P(ALL),
            "resnet": P("data", "model"), "unet": P("data", "model"),
            "vit": P("data", "model")}  # fmt: skip

# The arrays of the state that are an expert's, by the end of their path; the dim of experts is the third from last.
EXPERTS = {
    "dropless": ("swish", "up", "down"),
    "mixtral": ("experts/swish", "experts/up", "experts/down"),
    "moe": ("up", "down"),
}

# How values inside the step lie, by the names of their dims (`named` in tests/models/model.py): parallelism -> name ->
# axes. Dims without a name, and those that are not here, are whole.
Names = Mapping[str, Any]  # name -> axes, or UNCONSTRAINED
ON_ALL: Names = dict.fromkeys(("batch", "expert_batch", "nodes", "edges"), ALL)
ON_MODEL: Names = {
    **dict.fromkeys(ON_ALL, ("data",)),
    **dict.fromkeys(("heads", "shared_heads", "hidden", "vocab", "experts"), ("model",)),
    "channels": P.UNCONSTRAINED,  # of images: convolutions split them as their kernels are
}
NAMES: Mapping[str, Names] = {
    "data parallel": ON_ALL,
    "FSDP": ON_ALL,
    "Megatron": ON_MODEL,
    "FSDP+Megatron": ON_MODEL,
    "FSDP+Megatron+sequence": {**ON_MODEL, "length": ("model",), "height": ("model",)},
    "expert parallel": {"batch": ALL, "experts": ("model",), "expert_batch": ("data",)},
    "edge parallel": {"edges": ALL},
}


def data_parallel(family: str, state: Any, batch: Any, mesh: MeshShape) -> InShardings:
    """Every device has all of the state and its part of the batch."""
    return _laid(state, lambda path, shape: replicated(len(shape))), _batch(batch, P(ALL), mesh)


def fsdp(family: str, state: Any, batch: Any, mesh: MeshShape) -> InShardings:
    """Every device has its part of the batch and of each array of the state, which it gathers for use (ZeRO-3)."""

    def layout(path: str, shape: tuple[int, ...]) -> Layout:
        return _largest_split(replicated(len(shape)), path, shape, ALL, mesh)

    return _laid(state, layout), _batch(batch, P(ALL), mesh)


def megatron(family: str, state: Any, batch: Any, mesh: MeshShape) -> InShardings:
    """Devices along the model axis share a part of the batch and split layers in pairs (Shoeybi et al. 2019)."""
    return _laid(state, lambda path, shape: _megatron_split(family, path, shape, mesh)), _batch(batch, P("data"), mesh)


def fsdp_megatron(family: str, state: Any, batch: Any, mesh: MeshShape) -> InShardings:
    """Megatron, with each array of the state split over the data axis too."""

    def layout(path: str, shape: tuple[int, ...]) -> Layout:
        return _largest_split(_megatron_split(family, path, shape, mesh), path, shape, ("data",), mesh)

    return _laid(state, layout), _batch(batch, P("data"), mesh)


def fsdp_megatron_sequence(family: str, state: Any, batch: Any, mesh: MeshShape) -> InShardings:
    """FSDP and Megatron, with the batch's sequence split over the model axis."""
    return fsdp_megatron(family, state, batch, mesh)[0], _batch(batch, SEQUENCE[family], mesh)


def expert_parallel(family: str, state: Any, batch: Any, mesh: MeshShape) -> InShardings:
    """FSDP, with each device along the model axis keeping experts, to which all-to-alls take tokens (GShard)."""

    def layout(path: str, shape: tuple[int, ...]) -> Layout:
        whole = replicated(len(shape))
        if any(path.endswith(f"/{end}") for end in EXPERTS[family]):
            return _largest_split(_with(whole, -3, ("model",)), path, shape, ("data",), mesh)
        return _largest_split(whole, path, shape, ALL, mesh)

    return _laid(state, layout), _batch(batch, P(ALL), mesh)


def edge_parallel(family: str, state: Any, batch: Any, mesh: MeshShape) -> InShardings:
    """Every device has all nodes of a graph, its part of the edges, and sums what it sends with all others."""
    of_edges = ("edges", "senders", "receivers")
    whole = dict.fromkeys(batch, P())
    split = _batch({name: batch[name] for name in of_edges}, P(ALL), mesh)
    return data_parallel(family, state, batch, mesh)[0], whole | split


SHARDINGS: dict[str, Callable[[str, Any, Any, MeshShape], InShardings]] = {
    "data parallel": data_parallel,
    "FSDP": fsdp,
    "Megatron": megatron,
    "FSDP+Megatron": fsdp_megatron,
    "FSDP+Megatron+sequence": fsdp_megatron_sequence,
    "expert parallel": expert_parallel,
    "edge parallel": edge_parallel,
}
OF_FAMILIES = {"FSDP+Megatron+sequence": SEQUENCE, "expert parallel": EXPERTS, "edge parallel": ("gnn",)}  # others: all


def shardings_of(family: str, state: Any, batch: Any, mesh: MeshShape) -> dict[str, InShardings]:
    """Every sharding by hand that the family has, by name.

    Args:
        family: a row of `MEGATRON`.
        state: arrays or ShapeDtypeStructs.
        batch: the same.
        mesh: the sizes of the axes slices, data and model, in the mesh's order.
    """
    return {name: SHARDINGS[name](family, state, batch, mesh) for name in names_of(family)}


def names_of(family: str) -> list[str]:
    """The shardings by hand that a family has."""
    return [name for name in SHARDINGS if family in OF_FAMILIES.get(name, MEGATRON)]


def constraint_of(name: str, mesh: Mesh) -> Callable[[jax.Array, tuple[str | None, ...]], jax.Array]:
    """What lays out named values under the sharding of this name; axes that do not divide are left out."""
    names, sizes = NAMES[name], dict(mesh.shape)

    def constrain(x: jax.Array, dims: tuple[str | None, ...]) -> jax.Array:
        entries = [_with_slices(names.get(dim, ()), sizes) for dim in dims]
        even = [() if size % _shards(axes, sizes) else axes for axes, size in zip(entries, x.shape, strict=True)]
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*even)))

    return constrain


def _shards(axes: Any, mesh: MeshShape) -> int:
    return 1 if axes is P.UNCONSTRAINED else shards(axes, mesh)


def _laid(state: Any, layout: Callable[[str, tuple[int, ...]], Layout]) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, x: spec_of(layout(slashed(path), x.shape)), state)


def _batch(batch: Any, spec: P, mesh: MeshShape) -> Any:
    """Labels have fewer dims than what they label."""
    entries = [_with_slices(axes, mesh) for axes in spec]
    return jax.tree.map(lambda x: P(*entries[: len(x.shape)]), batch)


def _with_slices(axes: Any, mesh: MeshShape) -> Any:
    """The axes of a dim of a value: slices split what data splits."""
    if "slices" not in mesh or axes is P.UNCONSTRAINED or "data" not in axes:
        return axes
    return ("slices", *((axes,) if isinstance(axes, str) else axes))


def _megatron_split(family: str, path: str, shape: tuple[int, ...], mesh: MeshShape) -> Layout:
    layout = replicated(len(shape))
    for end, dim in MEGATRON[family].items():
        if fnmatch.fnmatchcase(path, f"*/{end}") and shape[dim] % mesh["model"] == 0:
            return _with(layout, dim, ("model",))
    return layout


def _largest_split(layout: Layout, path: str, shape: tuple[int, ...], axes: tuple[str, ...], mesh: MeshShape) -> Layout:
    """`layout` with the largest dim split that is whole and that `axes` divide; if there is none, as it is.

    Vectors, and what is added to every element of the batch, stay as they are, as in FSDP libraries: they save little,
    and where they are split, propagation splits activations alike.
    """
    first = fnmatch.fnmatchcase(path, STACKED)
    if sum(size > 1 for size in shape[first:]) < 2 or path.endswith(ADDED):
        return layout
    dims = [dim for dim in range(first, len(shape)) if not layout[dim] and shape[dim] % shards(axes, mesh) == 0]
    return _with(layout, max(dims, key=lambda dim: shape[dim]), axes) if dims else layout


def _with(layout: Layout, dim: int, axes: tuple[str, ...]) -> Layout:
    dim %= len(layout)
    return (*layout[:dim], axes, *layout[dim + 1 :])
