"""What passes through a TPU's vector unit, and what lies in its own memory, beside libtpu's cycles; with faults."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.compiled.schedule import schedule_of
from autoshard.mesh.chips import CHIPS
from autoshard.mesh.targets import target_mesh
from autoshard.model import grouping
from autoshard.model.groups import StackWriter
from autoshard.model.pricing import price_lists
from autoshard.model.xla import backends
from autoshard.model.xla.units.streams import Streams

pytest.importorskip("libtpu")
MACHINE, AXES = "v5e:2x2", {"x": 4}
WITHIN = 1.45  # of libtpu's cycles
SMALL, LARGE = (512, 512), (4096, 2048)


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def rms(x, scale):
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-6) * scale


def adam(p, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return p - 1e-3 * m / (jnp.sqrt(v) + 1e-8), m, v


def stored_and_summed(x):
    made = jnp.tanh(x) * 2
    wide = made.astype(jnp.float32)
    return made, wide.sum(1), wide.sum(0)


def centred(x):
    for _ in range(4):
        x = jnp.tanh(x) - jnp.mean(x, axis=1, keepdims=True)
    return x


LOOPS = {  # function of arrays like the first, or of that and a row
    "one function": jnp.tanh,
    "a few functions": lambda x: jnp.tanh(x) * 2 + 1,
    "two arrays": lambda x, y: x + y,
    "two arrays, fused": lambda x, y: x * y + 1,
    "a sum": lambda x: x.sum(1),
    "a softmax": jax.nn.softmax,
    "a norm": rms,
    "several sums": centred,
    "sums of what it stores": stored_and_summed,
    "an optimizer": adam,
    "two parts": lambda x, y: jnp.concatenate([x, y]),
}
ARRAYS = {"two arrays": 2, "two arrays, fused": 2, "an optimizer": 4, "two parts": 2}


def arguments(name, shape, dtype):
    arrays = [array(*shape, dtype=dtype)] * ARRAYS.get(name, 1)
    return [*arrays, array(shape[1], dtype=dtype)] if name == "a norm" else arrays


def seconds(fn, shapes) -> tuple[float, float]:
    """Predicted, and by libtpu's cycles, without what the first operation waits for its arguments."""
    mesh = target_mesh(MACHINE, AXES)
    whole = NamedSharding(mesh, P())
    compiled = jax.jit(fn, in_shardings=whole, out_shardings=whole).lower(*shapes).compile()
    schedule = schedule_of(compiled.as_text(), AXES, autoshard.topology(MACHINE, AXES), CHIPS["v5e"].clock)
    assert schedule.unestimated == ()
    return foreseen(fn, shapes), schedule.step_seconds


def foreseen(fn, shapes) -> float:
    """Of one device, as every device of the compiled program computes it all."""
    mesh = AbstractMesh((1,), tuple(AXES))
    lies = tuple(P() for _ in shapes)
    placed = autoshard.evaluate(fn, *shapes, in_shardings=lies, out_shardings=P(), mesh=mesh, topology="v5e:1x1")
    return placed.predicted.comparable_seconds


def without(patch, **fields):
    """A fault: v5e without some of its constants."""
    patch.setattr(backends, "BACKENDS", {**backends.BACKENDS, "v5e": replace(backends.V5E, **fields)})


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["32 bits", "16 bits"])
@pytest.mark.parametrize("shape", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("name", LOOPS)
def test_loops(name, shape, dtype):
    if (name, dtype) == ("several sums", jnp.bfloat16):
        pytest.skip("what is widened for a sum is read once, and counted for each step that makes it")
    predicted, compiled = seconds(LOOPS[name], arguments(name, shape, dtype))
    assert 1 / WITHIN <= predicted / compiled <= WITHIN


FAULTS = {  # constants, and a loop that is off without them
    "no streams": (Streams(), "a softmax"),
    "nothing is packed": (replace(backends.V5E.streams, register_cycles=0.0), "a few functions"),
    "windows of single operations are large": (replace(backends.V5E.streams, alone_elements=2**20), "one function"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_faults_of_loops(monkeypatch, name):
    streams, loop = FAULTS[name]
    shapes = arguments(loop, LARGE, jnp.bfloat16)
    predicted, compiled = seconds(LOOPS[loop], shapes)
    assert 1 / WITHIN <= predicted / compiled <= WITHIN
    without(monkeypatch, streams=streams)
    assert not 1 / WITHIN <= foreseen(LOOPS[loop], shapes) / compiled <= WITHIN


def stacked(dtype):
    return lambda x: jax.lax.scan(lambda c, _: (c * 1.5 + 1, c.astype(dtype)), x, None, length=4)


def products_stacked(x, weights):
    def layer(c, weight):
        product = (c * weight[0]).astype(weight.dtype) @ weight
        return c + 1, product

    return jax.lax.scan(layer, x, weights)


STACKING = {  # a loop that stacks, and what it takes
    "of 32 bits": (stacked(jnp.float32), [array(8192, 4096)]),
    "of 16 bits": (stacked(jnp.bfloat16), [array(8192, 4096)]),
    "of products": (products_stacked, [array(8192, 1024), array(4, 1024, 1024, dtype=jnp.bfloat16)]),
}


def assert_stacks_are_near(name) -> None:
    predicted, compiled = seconds(*STACKING[name])
    assert 0.8 <= predicted / compiled <= 1.25, (name, predicted, compiled)


@pytest.mark.parametrize("name", STACKING)
def test_stacks_are_streams_or_written_by_products(name):
    assert_stacks_are_near(name)


@pytest.mark.parametrize("writer, name", [(StackWriter.PRODUCT, "of 16 bits"), (StackWriter.LOOP, "of products")])
def test_other_writers_of_stacks_are_noticed(monkeypatch, writer, name):
    monkeypatch.setattr(grouping, "stack_writer", lambda *_: writer)
    with pytest.raises(AssertionError):
        assert_stacks_are_near(name)


def test_arrays_of_one_operation_are_read_once(monkeypatch):
    def gated(x, y):
        return jnp.where(x > 0, x, y), jnp.where(x > 0, y, x), jnp.where(x > 0, 0.0, x)

    shapes = [array(*LARGE)] * 2
    predicted, compiled = seconds(gated, shapes)
    assert 1 / WITHIN <= predicted / compiled <= WITHIN
    monkeypatch.setattr(grouping, "joined_operands", lambda groups, *_, **how: [None] * len(groups))
    assert foreseen(gated, shapes) > 1.3 * predicted


def training(depth):
    """A step of a residual stack."""

    def step(weights, x, y):
        def loss(weights):
            out = x
            for w in weights:
                out = out + jnp.tanh(out @ w)
            return jnp.mean((out - y) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    return step


STACKS = [(4, 256, 256), (4, 1024, 1024), (4, 1024, 4096), (8, 1024, 8192)]  # layers, width, batch
STACKS_WITHIN = 1.6  # of libtpu's cycles
SCANNED = 4, 256, 4096, 2048  # layers, width, width inside a layer, batch


@pytest.mark.parametrize("layers, width, batch", STACKS)
def test_what_layers_hand_on_lies_in_the_chip(monkeypatch, layers, width, batch):
    shapes = [array(width, width)] * layers, array(batch, width), array(batch, width)
    predicted, compiled = seconds(training(layers), shapes)
    assert 1 / STACKS_WITHIN <= predicted / compiled <= STACKS_WITHIN
    monkeypatch.setattr(price_lists, "kept_on_chip_for_readers", lambda program, groups, room: {})
    monkeypatch.setattr(price_lists, "stored_nowhere", lambda groups: frozenset())
    assert foreseen(training(layers), shapes) > 1.2 * predicted


def recomputing(weights, x):
    """The gradient of a loop over layers with norms, which its backward pass computes again."""

    def norm(x):
        return (x * jax.lax.rsqrt((x.astype(jnp.float32) ** 2).mean(-1, keepdims=True))).astype(x.dtype)

    def layer(x, w):
        up, down = w
        return x + norm(x @ up) @ down, None

    def loss(weights):
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(jnp.float32) ** 2).mean()

    return jax.grad(loss)(weights)


def test_temporaries_of_loops_lie_in_the_chip(monkeypatch):
    layers, width, inside, batch = SCANNED
    weights = array(layers, width, inside, dtype=jnp.bfloat16), array(layers, inside, width, dtype=jnp.bfloat16)
    shapes = weights, array(batch, width, dtype=jnp.bfloat16)
    predicted, compiled = seconds(recomputing, shapes)
    assert 1 / WITHIN <= predicted / compiled <= WITHIN
    kept = price_lists.kept_on_chip_for_readers

    def outside_loops(program, groups, room):
        trips = {value.id: value.trips for value in program.values}
        return {value: most for value, most in kept(program, groups, room).items() if trips[value] == 1}

    monkeypatch.setattr(price_lists, "kept_on_chip_for_readers", outside_loops)
    assert foreseen(recomputing, shapes) > 1.1 * predicted


IMAGES = {  # images, places along each side, places of a kernel along each side
    "a tile of images": (64, 28, 3),
    "many images": (512, 28, 3),
    "large kernels": (512, 28, 5),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_of_one_feature(monkeypatch, name):
    images, places, taps = IMAGES[name]

    def convolved(x, kernel):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)

    shapes = array(images, places, places, 1), array(taps, taps, 1, 1)
    predicted, compiled = seconds(convolved, shapes)
    assert 1 / WITHIN <= predicted / compiled <= WITHIN
    without(monkeypatch, convolutions=replace(backends.V5E.convolutions, lone_cycles=0.0))
    assert foreseen(convolved, shapes) < compiled / WITHIN
