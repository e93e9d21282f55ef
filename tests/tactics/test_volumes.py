"""The plan of every tactic communicates what its scheme is published to: formulas of docs/tactics.md, held to the byte.

The plans are for GPUs, whose compiler gathers weights in their own width and runs a reduce_scatter as one.
"""

import functools
import math

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from models import mlp, moe

import autoshard
from autoshard.tactics import (
    FSDP,
    HSDP,
    DataParallel,
    ExpertParallel,
    Megatron,
    MiCS,
    SequenceParallel,
    ThreeDimensional,
    TwoAndAHalf,
    TwoDimensional,
    Ulysses,
    ZeRO,
)

ITEM = 4  # bytes of a float32
LAYERS, WIDTH, ROWS = 3, 256, 128  # of the perceptron: square weights
BATCH, LENGTH, HEADS, HEAD, HIDDEN = 8, 64, 8, 16, 512  # of the transformer
MODEL = HEADS * HEAD
GROUPS, TOKENS, EXPERTS, CAPACITY, FEATURES = 8, 16, 8, 8, 32  # of the mixture of experts: sizes by default


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def normed(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def block(p, x):
    """Attention and feed-forward with one product for query, key and value, as Megatron has it."""
    query, key, value = jnp.einsum("btd,dchk->cbthk", normed(x), p["qkv"])
    scores = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", query, key))
    x = x + jnp.einsum("bthk,hkd->btd", jnp.einsum("bhqs,bshk->bqhk", scores, value), p["out"])
    return x + jax.nn.relu(normed(x) @ p["up"]) @ p["down"]


def transformer(*, scan):
    """A train step of two blocks, and its state and batch. Positions are learnt: the stream needs a gradient."""
    layers = 2
    stack = (layers,) if scan else ()
    blocks = {
        "qkv": float32(*stack, MODEL, 3, HEADS, HEAD),
        "out": float32(*stack, HEADS, HEAD, MODEL),
        "up": float32(*stack, MODEL, HIDDEN),
        "down": float32(*stack, HIDDEN, MODEL),
    }
    state = {"positions": float32(LENGTH, MODEL), "blocks": blocks if scan else [blocks] * layers}

    def loss_of(state, x):
        x = x + state["positions"]
        if scan:
            x, _ = jax.lax.scan(lambda x, p: (block(p, x), None), x, state["blocks"])
        else:
            for p in state["blocks"]:
                x = block(p, x)
        return jnp.mean(x * x)

    def step(state, x):
        loss, gradients = jax.value_and_grad(loss_of)(state, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss

    return step, (state, float32(BATCH, LENGTH, MODEL))


def perceptron(*, moments=True):
    """A step with square weights and a momentum."""
    model = mlp.make(LAYERS, WIDTH, ROWS, bias=False)
    state = jax.eval_shape(lambda: model.state)
    batch = jax.eval_shape(lambda: model.batches(0))
    if not moments:
        return model.step, (state, batch)

    def step(both, batch):
        params, moments = both
        after, loss = model.step(params, batch)
        moments = jax.tree.map(lambda m, p, q: 0.9 * m + (p - q), moments, params, after)
        return (jax.tree.map(lambda p, m: p - m, params, moments), moments), loss

    return step, ((state, state), batch)


def mixture():
    model = moe.make()
    return model.step, (jax.eval_shape(lambda: model.state), jax.eval_shape(lambda: model.batches(0)))


STEPS = {
    "perceptron": functools.cache(perceptron),
    "unrolled": functools.cache(functools.partial(transformer, scan=False)),
    "scanned": functools.cache(functools.partial(transformer, scan=True)),
    "experts": functools.cache(mixture),
}


def plan_of(step, mesh, tactics, **options):
    fn, args = STEPS[step]()
    abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
    machine = f"h100:1x{abstract.size}"
    return autoshard.plan(fn, *args, mesh=abstract, topology=machine, tactics=tactics, donate_argnums=0, **options)


def sent(plan, least=2048):
    """Bytes that one device sends per step, by kind and axes, as a ring does; without what is smaller than `least`."""
    found = {}
    for one in plan.predicted.collectives:
        devices, each = math.prod(plan.mesh.shape[axis] for axis in one.axes), one.bytes / one.count
        share = (devices - 1) / devices
        factor = {"all_reduce": 2 * share, "reduce_scatter": devices - 1}.get(one.kind, share)
        if each * (devices if one.kind == "reduce_scatter" else 1) >= least:
            key = f"{one.kind} {','.join(one.axes)}"
            found[key] = found.get(key, 0.0) + factor * one.bytes
    return found


WEIGHTS = LAYERS * WIDTH * WIDTH * ITEM  # of the perceptron
ACTIVATION = ROWS * WIDTH * ITEM
BLOCKS = 2 * (4 * MODEL * MODEL + 2 * MODEL * HIDDEN) * ITEM  # of the transformer
POSITIONS = LENGTH * MODEL * ITEM  # of what is added to the batch, elementwise: it is never gathered to be read
STREAM = BATCH * LENGTH * MODEL * ITEM
DISPATCHED = EXPERTS * CAPACITY * GROUPS * FEATURES * ITEM

EIGHT = {"data": 8}
FOUR = {"model": 4}
s8, s4, s2 = 7 / 8, 3 / 4, 1 / 2  # what leaves a device of 8, 4 and 2

PUBLISHED = [  # step, mesh, tactics, bytes that each device sends
    ("perceptron", EIGHT, [DataParallel("data")], {"all_reduce data": 2 * WEIGHTS * s8}),
    (
        "perceptron",
        EIGHT,
        [ZeRO(2)],
        {"reduce_scatter data": WEIGHTS * s8, "all_gather data": WEIGHTS * s8},
    ),
    (  # XLA makes one all_gather of those of the forward and the backward pass
        "perceptron",
        EIGHT,
        [FSDP("data")],
        {"reduce_scatter data": WEIGHTS * s8, "all_gather data": WEIGHTS * s8},
    ),
    (  # 1.5 times that of data parallelism: gathered in both passes
        "scanned",
        EIGHT,
        [DataParallel("data"), ZeRO(3)],
        {
            "reduce_scatter data": BLOCKS * s8,
            "all_gather data": 2 * BLOCKS * s8,
            "all_reduce data": 2 * POSITIONS * s8,
        },
    ),
    (
        "perceptron",
        {"replica": 2, "shard": 4},
        [HSDP("shard", "replica")],
        {
            "all_gather shard": WEIGHTS * s4,
            "reduce_scatter shard": WEIGHTS * s4,
            "all_reduce replica": 2 * WEIGHTS / 4 * s2,
        },
    ),
    (
        "perceptron",
        {"replica": 2, "shard": 4},
        [MiCS("shard", "replica")],
        {
            "all_gather shard": WEIGHTS * s4,
            "reduce_scatter shard": WEIGHTS * s4,
            "all_reduce replica": 2 * WEIGHTS / 4 * s2,
        },
    ),
    ("unrolled", FOUR, [Megatron("model")], {"all_reduce model": 2 * 4 * 2 * STREAM * s4}),
    ("scanned", FOUR, [Megatron("model")], {"all_reduce model": 2 * 4 * 2 * STREAM * s4}),
    (
        "unrolled",
        FOUR,
        [Megatron("model"), SequenceParallel("model")],
        {"reduce_scatter model": 2 * 4 * STREAM * s4, "all_gather model": 2 * 4 * STREAM * s4},
    ),
    (
        "unrolled",
        {"sequence": 4},
        [Ulysses("sequence")],
        {
            "all_to_all sequence": 2 * 8 * STREAM / 4 * s4,
            "all_reduce sequence": 2 * BLOCKS * s4,
            "all_gather sequence": POSITIONS * s4,
        },
    ),
    (  # the way back to the tokens has no gradient here: they are the batch
        "experts",
        {"expert": 4},
        [ExpertParallel("expert")],
        {"all_to_all expert": 3 * DISPATCHED / 4 * s4},
    ),
    (
        "perceptron",
        {"x": 2, "y": 4},
        [TwoDimensional("x", "y")],
        {
            "all_gather x": WEIGHTS / 4 * s2,
            "reduce_scatter x": WEIGHTS / 4 * s2,
            "all_gather y": (LAYERS - 1) * ACTIVATION / 2 * s4,
            "reduce_scatter y": (LAYERS - 1) * ACTIVATION / 2 * s4,
        },
    ),
    (
        "perceptron",
        {"z": 2, "x": 2, "y": 2},
        [TwoAndAHalf("x", "y", "z")],
        {
            "all_gather x": WEIGHTS / 2 * s2,
            "reduce_scatter x": WEIGHTS / 2 * s2,
            "all_reduce z": 2 * WEIGHTS / 4 * s2,
            "all_gather y": (LAYERS - 1) * ACTIVATION / 4 * s2,
            "reduce_scatter y": (LAYERS - 1) * ACTIVATION / 4 * s2,
        },
    ),
    (  # per layer: a gather and a scatter forward, the same backward; the first layer's input lies as it is read, and
        # needs no gradient
        "perceptron",
        {"x": 2, "y": 2, "z": 2},
        [ThreeDimensional("x", "y", "z")],
        {
            "all_reduce x": 2 * WEIGHTS / 4 * s2,
            "all_gather": (2 * LAYERS - 1) * ACTIVATION / 4 * s2,
            "reduce_scatter": (2 * LAYERS - 1) * ACTIVATION / 4 * s2,
        },
    ),
]


def by_kind(found, expected):
    """What is sent, the axes left out of keys that the expectation has without axes."""
    gathered = {}
    for key, size in found.items():
        kind = key.split()[0]
        name = kind if kind in expected else key
        gathered[name] = gathered.get(name, 0.0) + size
    return gathered


@pytest.mark.parametrize("step, mesh, tactics, expected", PUBLISHED, ids=[f"{row[0]} {row[2]}" for row in PUBLISHED])
def test_a_plan_sends_what_is_published(step, mesh, tactics, expected):
    plan = plan_of(step, mesh, tactics)
    assert not any("other collectives" in remark for remark in plan.warnings)
    assert by_kind(sent(plan), expected) == pytest.approx(expected)


def test_another_scheme_is_told_apart():
    found = sent(plan_of("perceptron", EIGHT, [DataParallel("data")]))
    assert found != pytest.approx({"all_reduce data": 3 * WEIGHTS * s8})
    assert sent(plan_of("perceptron", EIGHT, [ZeRO(2)])) != pytest.approx(found)
