"""What tests hold plans against: one device, what XLA compiled, and machines whose best plans are known to differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from models import MODELS, Model, gpt

from autoshard import Collective, Link, Plan, Topology, plan
from autoshard.layout import shards
from autoshard.model.xla.backends import CPU, Backend
from autoshard.model.xla.gathers import Gathers
from autoshard.model.xla.scatters import Scatters

MESHES = {"8": {"x": 8}, "4x2": {"x": 4, "y": 2}, "2x2x2": {"x": 2, "y": 2, "z": 2}, "1": {"x": 1}}
SMALL: dict[str, Callable[[], Model]] = {
    "cnn": lambda: MODELS["cnn"](channels=(8, 16), size=8, classes=8, batch=16),
    "gpt": lambda: gpt.make(layers=1, d_model=16, heads=4, vocab=32, seq=8, batch=8),
    "gpt scan": lambda: gpt.make(layers=2, d_model=16, heads=4, vocab=32, seq=8, batch=8, scan=True),
    "gpt remat": lambda: gpt.make(layers=2, d_model=16, heads=4, vocab=32, seq=8, batch=8, scan=True, remat=True),
    "lstm": lambda: MODELS["lstm"](hidden=16, features=8, classes=8, seq=4, batch=16),
    "mlp": lambda: MODELS["mlp"](layers=3, width=32, batch=16),
    "moe": lambda: MODELS["moe"](groups=8, tokens=8, d_model=16, d_hidden=16, experts=8, capacity=4),
    "tied": lambda: MODELS["tied"](vocab=64, d_model=16, seq=8, batch=8),
}
# A compiler that rounds, pads and hides nothing, and runs all in the order of the program.
TEXTBOOK = replace(CPU, gathers=Gathers(), scatters=Scatters())


def mesh_of(shape: dict[str, int], axis_type: AxisType = AxisType.Auto) -> Mesh:
    return jax.make_mesh(tuple(shape.values()), tuple(shape), axis_types=(axis_type,) * len(shape))


def v5e(axes: Iterable[str]) -> Topology:
    """Cloud TPU v5e: work is cheap beside a message, so a small step is best split little."""
    links = {axis: Link(latency=1e-6, bandwidth=45e9) for axis in axes}
    return Topology(links, memory_bytes=16e9, memory_bandwidth=8.1e11, flops={"float32": 4.9e13})


def slow_chips(axes: Iterable[str]) -> Topology:
    """Work is dear beside a message: even a small step is best split as far as it goes."""
    links = {axis: Link(latency=1e-9, bandwidth=1e10) for axis in axes}
    return Topology(links, memory_bytes=16e9, memory_bandwidth=1e9, flops={"float32": 1e9})


MACHINES = {"v5e": v5e, "slow chips": slow_chips}


def run(step: Callable, model: Model, steps: int = 5) -> tuple[list[float], list[np.ndarray], list]:
    """Losses, the final state's leaves, and the state's shardings after each step; the model's own state survives."""
    state = jax.tree.map(np.asarray, model.state)
    losses, shardings = [], []
    for i in range(steps):
        state, loss = step(state, model.batches(i))
        losses.append(float(loss))
        shardings.append([leaf.sharding for leaf in jax.tree.leaves(state)])
    assert jax.tree.structure(state) == jax.tree.structure(model.state)
    return losses, [np.asarray(leaf) for leaf in jax.tree.leaves(state)], shardings


_ONE_DEVICE: dict[str, tuple] = {}


def assert_same_numbers(name: str, step: Callable) -> None:
    """`step` trains the small model `name` as a plain `jax.jit` on one device does, and never moves its state."""
    model = SMALL[name]()
    if name not in _ONE_DEVICE:
        _ONE_DEVICE[name] = run(jax.jit(model.step), model)
    expected_losses, expected_state, _ = _ONE_DEVICE[name]
    losses, state, shardings = run(step, model)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for leaf, expected in zip(state, expected_state, strict=True):
        assert (leaf.shape, leaf.dtype) == (expected.shape, expected.dtype)
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)
    for after in shardings[1:]:
        for leaf, now, first in zip(state, after, shardings[0], strict=True):
            assert now.is_equivalent_to(first, leaf.ndim), f"{first} became {now}"


def share_of_free_peak(model: Model, share: float, **options) -> float:
    """The memory limit, in bytes per device, under which a plan may hold this share of what the free plan holds.

    The least that any plan of the small models holds is a third of it or less.
    """
    return share * plan(model.step, model.state, model.batches(0), **options).predicted.peak_bytes / CPU.usable


def tally(collectives: Iterable[Collective]) -> dict[tuple[str, tuple[str, ...]], int]:
    """Bytes by kind and axes."""
    found: Counter = Counter()
    for collective in collectives:
        found[collective.kind, collective.axes] += collective.bytes
    return dict(found)


def as_all_reduces(collectives: Iterable[Collective], mesh: dict[str, int]) -> list[Collective]:
    """What XLA's partitioner makes of reduce_scatters where nothing turns it back: all_reduces of the whole."""

    def shown(one: Collective) -> Collective:
        return replace(one, kind="all_reduce", bytes=one.bytes * shards(one.axes, mesh))

    return [shown(one) if one.kind == "reduce_scatter" else one for one in collectives]


def assert_peak_on_h100(made: Plan) -> None:
    """A plan for eight H100 holds what its compiled program does, within 10%. Skips the test without that compiler."""
    pytest.importorskip("jax_cuda13_plugin")
    verified = made.verify("h100:8")
    assert verified.predicted_peak == pytest.approx(verified.actual_peak, rel=0.1)


def adjusted(backend: Backend, habit: str, **constants) -> Backend:
    """A compiler with other constants of one habit."""
    return replace(backend, **{habit: replace(getattr(backend, habit), **constants)})
