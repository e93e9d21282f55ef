"""Messages of graphs on GPU: a scatter takes in what it adds up, and the gather that this is made of."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, PartitionSpec
from oracles import adjusted, assert_peak_on_h100

from autoshard import plan
from autoshard.model.xla import backends

MESH, TARGET = AbstractMesh((8,), ("data",)), "h100:8"
NODES, EDGES = 4096, 16384
NODE, ENDS = jax.ShapeDtypeStruct((NODES, 1024), jnp.float32), jax.ShapeDtypeStruct((EDGES,), jnp.int32)
WEIGHTS, MESSAGES = (jax.ShapeDtypeStruct((EDGES, *more), jnp.float32) for more in ((), (1024,)))
STORED = EDGES * 1024 * 4 // 8  # bytes of the messages on each device

PROGRAMS = {  # function of what
    "sums": (lambda x, s, r: jax.ops.segment_sum(x[s], r, NODES), [NODE, ENDS, ENDS]),
    "maxima": (lambda x, s, r: jax.ops.segment_max(x[s], r, NODES), [NODE, ENDS, ENDS]),
    "weighted": (
        lambda x, s, r, w: jax.ops.segment_sum(jnp.tanh(x[s] * w[:, None]), r, NODES),
        [NODE, ENDS, ENDS, WEIGHTS],
    ),
    "gradient": (jax.grad(lambda x, s, r: (jax.ops.segment_sum(x[s], r, NODES) ** 2).sum()), [NODE, ENDS, ENDS]),
    "set": (lambda x, s, made: x.at[s].set(made * 2), [NODE, ENDS, MESSAGES]),
}


def planned(name):
    function, shapes = PROGRAMS[name]
    return plan(function, *shapes, mesh=MESH, topology=TARGET, fixed={"x": PartitionSpec(None, "data")})


@pytest.mark.parametrize("name", PROGRAMS)
def test_messages_are_not_stored(monkeypatch, name):
    """They would be if scatters took nothing in."""
    free, fusion = planned(name).predicted.peak_bytes, backends.H100.fusion
    kept = frozenset(primitive for primitive in fusion.takes_in if not primitive.startswith("scatter"))
    without = adjusted(backends.H100, "fusion", takes_in=kept)
    monkeypatch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "h100": without})
    assert planned(name).predicted.peak_bytes - free >= STORED / 2


@pytest.mark.parametrize("name", PROGRAMS)
def test_peaks_are_those_of_the_compiler(name):
    assert_peak_on_h100(planned(name))
