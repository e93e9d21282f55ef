"""Random calls of operations, forward and backward, each run by its implementations, against plain JAX on one device.

Sizes are odd as often as even; operands are float32 or bfloat16. Partial sums of bfloat16 are rounded on each device:
they are held against the numbers that float32 has: no further off than plain JAX in bfloat16, but for some roundings.
"""

import functools
import importlib
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, integers, normal
from equality import assert_equal
from executed import Alone, operations_of
from oracles import mesh_of
from sweeps import some

from autoshard import ops
from autoshard.operations.call import Call
from autoshard.propagation.registry import rule_of

MESHES = ({"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})
RUNS = 3  # ways to run a call that are compiled together
ROUNDINGS = 8  # of bfloat16: of partial sums that are larger than their total
EPSILON = float(jnp.finfo(jnp.bfloat16).eps)


def attention(rng):
    groups, per_group, rows = rng.choice([1, 2, 3]), rng.choice([1, 2]), rng.choice([16, 24, 30])
    batch, columns = rng.choice([1, 2, 3]), rng.choice([7, 8])
    said = rng.choice(
        [{}, {"is_causal": True}, {"local_window_size": (9, 0)}, {"mask": integers(4, batch, 1, rows) > 0}]
    )
    said = {name: x[:, :, None] if name == "mask" else x for name, x in said.items()}
    heads = groups * per_group, groups, groups
    return ops.attention, [normal(batch, rows, n, columns, seed=i) for i, n in enumerate(heads)], said


def conv(rng):
    image, kernel = (
        normal(rng.choice([1, 2]), 4, rng.choice([16, 17, 24])),
        normal(8, 4, rng.choice([1, 2, 3, 5]), seed=1),
    )
    said = {"window_strides": [rng.choice([1, 2])], "padding": rng.choice(["SAME", "VALID", [(0, 2)]])}
    return ops.conv, [image, kernel], said


def matmul(rng):
    rows, summed, columns = (rng.choice([7, 8, 16]) for _ in range(3))
    return ops.matmul, [normal(2, rows, summed), normal(summed, columns, seed=1)], {}


def ragged_dot(rng):
    rows, groups = rng.choice([24, 30, 64]), rng.choice([2, 4, 8])
    sizes = np.random.default_rng(rng.randrange(99)).multinomial(rows - rng.choice([0, 5]), [1 / groups] * groups)
    return ops.ragged_dot, [normal(rows, 6), normal(groups, 6, 8, seed=1)], {"group_sizes": jnp.asarray(sizes)}


def with_gradients(function, said, *operands):
    made, pull = jax.vjp(functools.partial(function, **said), *operands)
    return made, pull(jnp.cos(jnp.arange(made.size)).reshape(made.shape).astype(made.dtype))


def wrong(found, plain, exact):
    """Whether numbers differ from those of plain JAX by more than roundings; `exact` is what float32 has."""
    if plain[0].dtype != jnp.bfloat16:
        assert_equal(found, plain)
        return False

    def errors(made):
        return np.array([float(jnp.abs(x - y).max(initial=0)) for x, y in zip(made, exact, strict=True)])

    largest = np.array([float(jnp.abs(x).max(initial=0)) for x in exact])
    return bool((errors(found) > errors(plain) + ROUNDINGS * EPSILON * largest).any())


def check(make, seed, dtype):
    rng = random.Random(seed)
    function, operands, said = make(rng)
    shape, operands = rng.choice(MESHES), [x.astype(dtype) for x in operands]
    step = functools.partial(with_gradients, function, said)
    count = 0
    for one in operations_of(Case(make.__name__, "", step, tuple(operands))).values():
        alone = Alone.of(one) if one.eqn.primitive.name == "operation" else None
        if alone is None:
            continue
        (equation,) = alone.program.equations
        call, places = Call.of(equation, rule_of(equation)), {x.id: i for i, x in enumerate(alone.program.arguments)}
        runs = [run for run in call.runs(shape) if run.name]
        runs = rng.sample(runs, min(RUNS, len(runs)))

        def computed(*arrays, runs=runs, call=call, equation=equation, places=places):
            inputs = [arrays[places[x.id]] if hasattr(x, "id") else jnp.asarray(x) for x in equation.inputs]
            return [list(call.on_mesh(run, mesh_of(shape))(*inputs)) for run in runs]

        wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in map(jnp.asarray, one.operands)]
        plain, exact = (jax.tree.leaves(jax.jit(one.eqn.params["operation"])(*xs)) for xs in (one.operands, wide))
        for run, found in zip(runs, jax.jit(computed)(*alone.arrays), strict=True):
            assert not wrong(found, plain, exact), f"{call} by {run}"
            count += 1
    return count


RINGS = 6  # a seed whose product runs in rings
KINDS = (attention, conv, matmul, ragged_dot)
CALLS = [(make, seed, dtype) for seed in range(8) for make in KINDS for dtype in ("float32", "bfloat16")]

QUICK = [(attention, 4, "bfloat16"), (conv, 1, "bfloat16"), (matmul, 5, "float32"), (ragged_dot, 0, "bfloat16")]


@pytest.mark.parametrize("make, seed, dtype", some(CALLS, *QUICK))
def test_implementations_compute_what_plain_jax_does(make, seed, dtype):
    ran = check(make, seed, dtype)
    assert ran or (make, seed, dtype) not in QUICK


def test_a_ring_that_turns_the_wrong_way_is_found(monkeypatch):
    def wrong_pairs(split, distance):
        return [(i, (i - distance) % split.count("ring")) for i in range(split.count("ring"))]

    monkeypatch.setattr(importlib.import_module("autoshard.ops.matmul"), "_pairs", wrong_pairs)
    with pytest.raises(AssertionError, match=r"by (gathering|scattering)"):
        check(matmul, RINGS, "bfloat16")
