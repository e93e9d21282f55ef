"""Layers that are alike are priced alike, wherever they stand in a step: problems of deep models repeat themselves."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import traced
from sweeps import some

from autoshard import topology
from autoshard.model.formulating import formulate
from autoshard.model.xla.backends import BACKENDS
from autoshard.model.xla.units import chip_memory
from autoshard.propagation import rules_for
from autoshard.solver.symmetry.node_kinds import NodeKinds

MACHINES = {"cpu": "cpu:8", "h100": "h100:1x8", "v5e": "v5e:2x4", "v5p": "v5p:2x2x2"}
AXES = {"a": 4, "b": 2}
SIZES = {"small": (256, 512), "as large as a chip's memory": (1024, 4096), "large": (4096, 32768)}  # width, batch
DEEP = 12
FAR = 3  # edges: how far around a node its kind looks


def kinds(chip, layers, size):
    """How many kinds of nodes the problem of a training step has."""
    width, batch = SIZES[size]

    def step(params, x):
        def loss(params):
            y = x
            for up, down in params:
                normed = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + 1e-6)
                y = y + jax.nn.relu(normed @ up) @ down
            return (y**2).mean()

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    square = jax.ShapeDtypeStruct((width, width), jnp.float32)
    program = traced(step, [(square, square)] * layers, jax.ShapeDtypeStruct((batch, width), np.float32))
    machine = topology(MACHINES[chip], AXES)
    problem = formulate(program, rules_for(program), AXES, machine, backend=BACKENDS[chip]).problem
    kind, _ = NodeKinds(problem).numbers(FAR, held=False)
    return kind.max() + 1


# CPU and GPU keep nothing in the chip: one size does. Both TPUs keep what fits, so that one of them has all sizes.
CASES = [("cpu", "small"), ("h100", "small"), *itertools.product(("v5e", "v5p"), SIZES)]
OTHERS = [("v5p", size) for size in SIZES if size != "small"]


@pytest.mark.parametrize("chip, size", some(CASES, *(case for case in CASES if case not in OTHERS)))
def test_twice_the_layers_are_few_more_kinds(chip, size):
    assert kinds(chip, 2 * DEEP, size) <= 1.7 * kinds(chip, DEEP, size)


def test_each_layer_by_itself_is_caught(monkeypatch):
    monkeypatch.setattr(chip_memory, "_LONGER", 1.01)
    few, many = (kinds("v5e", layers, "as large as a chip's memory") for layers in (DEEP, 2 * DEEP))
    assert many > 1.9 * few
