"""What a step keeps for its backward pass, chosen anew: the numbers stay, and so few bytes are kept as are said."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from jax.extend import core
from sweeps import some

from autoshard.mesh.presets import topology
from autoshard.primitives import PRIMITIVES
from autoshard.remat import costs, loops
from autoshard.remat.cuts import cuts
from autoshard.remat.recomputation import EXPOSED_TRANSFER_SHARES, Recomputation

MACHINE = topology("v5e:4x2", {"x": 4, "y": 2})
LAYERS, ROWS, WIDTH = 4, 6, 8


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


STACK = {"up": numbers(0, LAYERS, WIDTH, 2 * WIDTH), "down": numbers(1, LAYERS, 2 * WIDTH, WIDTH) / 4}
X, KEYS = numbers(2, ROWS, WIDTH), jax.random.split(jax.random.key(3), LAYERS)


def layer(x, w):
    h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
    return x + jnp.tanh(jax.nn.gelu(h @ w["up"]) @ w["down"])


@jax.custom_vjp
def clipped(x):
    return jnp.sin(x)


clipped.defvjp(lambda x: (jnp.sin(x), jnp.cos(x)), lambda cos, g: (jnp.clip(g * cos, -1, 1),))


def dropped(x, w, key):
    mask = jax.random.bernoulli(key, 0.8, x.shape)
    return layer(jnp.where(mask, x / 0.8, 0.0), w)


def scanned(body, *stacks, around=lambda f: f, **how):
    def loss(w, x):
        def turn(x, slices):
            return around(body)(x, *slices), None

        x, _ = jax.lax.scan(turn, x, (w, *stacks), **how)
        return jnp.mean((x - 1) ** 2)

    return loss


def chunked(x, w):
    """An inner loop over rows."""
    _, rows = jax.lax.scan(lambda c, row: (c + row.sum(), jnp.tanh(row) * c), 0.0, x)
    return layer(rows, w)


def encoded_and_decoded(w, x):
    memory, _ = jax.lax.scan(lambda x, one: (layer(x, one), None), x, w)
    x, _ = jax.lax.scan(lambda x, one: (layer(x, one) * jnp.tanh(memory), None), x, w)
    return jnp.mean(x**2)


def returned(w, x):
    """A stack that the step itself hands back."""
    x, stack = jax.lax.scan(lambda x, one: (layer(x, one), x), x, w)
    return jnp.mean(x**2) + 1e-3 * jnp.sum(stack[1:])


def recurrent(w, x):
    """Two layers, of which each reads what the one below has stacked."""

    def of_layer(rows, i):
        def cell(h, row):
            h = layer(jnp.tanh(row + h), jax.tree.map(lambda one: one[i], w))
            return h, h

        return jax.lax.scan(cell, jnp.zeros_like(rows[0]), rows)[1]

    return jnp.mean(of_layer(of_layer(x.reshape(3, -1, WIDTH), 0), 1) ** 2)


def with_skips(w, x):
    """A scan down and one up again that reads what the first has stacked, as a U-Net does."""
    x, skipped = jax.lax.scan(lambda x, one: ((y := layer(x, one)), y), x, w)
    x, _ = jax.lax.scan(lambda x, one: (layer(x + one[1], one[0]), None), x, (w, skipped), reverse=True)
    return jnp.mean(x**2)


def products(w, x):
    return jax.lax.scan(lambda x, one: (jnp.tanh(x @ one), x), x, w)


def own_rule(kept, gradients):
    w, stack = kept

    def turn(g, slices):
        one, x = slices
        g = g * (1 - jnp.tanh(x @ one) ** 2)
        return g @ one.T, x.T @ g

    g, of_w = jax.lax.scan(turn, gradients[0], (w, stack), reverse=True)
    return of_w, g


with_own_rule = jax.custom_vjp(products)
with_own_rule.defvjp(lambda w, x: ((made := products(w, x)), (w, made[1])), own_rule)


@jax.custom_vjp
def cell(h, row, w):
    return jnp.tanh(h @ w + row)


def cell_backward(kept, g):
    h, w, made = kept
    g = g * (1 - made**2)
    return g @ w.T, g, h.T @ g


cell.defvjp(lambda h, row, w: ((made := cell(h, row, w)), (h, w, made)), cell_backward)


def with_own_cell(w, x):
    """A recurrence whose cell has its own rule: JAX leaves a call without operands and results of the cell."""
    turn = lambda h, row: (cell(h, row, w["up"] @ w["down"]),) * 2  # noqa: E731
    _, made = jax.lax.scan(turn, jnp.zeros((2, WIDTH)), x.reshape(3, 2, WIDTH))
    return jnp.mean((made @ w["up"]) ** 2)


def accumulated(w, x):
    """Gradients added up over parts of the batch by the user's own loop."""

    def part(total, rows):
        value, gradient = jax.value_and_grad(scanned(layer))(w, rows)
        return jax.tree.map(jnp.add, total, gradient), value

    total, values = jax.lax.scan(part, jax.tree.map(jnp.zeros_like, w), x.reshape(2, -1, WIDTH))
    return values.mean(), total


def scaled(w, x):
    """The cotangent is scaled by what the loss decides: a value that is there only after the forward pass."""
    value, pull = jax.vjp(lambda w: scanned(layer)(w, x), w)
    return value, pull(jnp.where(value > 1, 0.5, 2.0))


def unrolled(body, around=lambda f: f):
    def loss(w, x):
        for i in range(LAYERS):
            x = around(body)(x, jax.tree.map(lambda one, i=i: one[i], w))
        return jnp.mean((x - 1) ** 2)

    return loss


def chain(w, x):
    """A plain chain of products, which never has more than one value alive."""
    for i in range(LAYERS):
        x = jnp.tanh(jnp.tanh(x @ w["up"][i]) @ w["down"][i])
    return jnp.mean(x**2)


def two_losses(first, second):
    """A step with a second forward pass behind the first backward pass, as of an actor and a critic or of a GAN."""

    def step(w, x):
        h = jnp.tanh(x)
        one, gradient = jax.value_and_grad(first)(w, h)
        other, more = jax.value_and_grad(lambda w: second(w, h * layer(jnp.cos(x), jax.tree.map(lambda a: a[0], w))))(w)
        return one + other, jax.tree.map(jnp.add, gradient, more)

    return step


LOSSES = {
    "chunked": scanned(chunked),
    "custom_vjp": scanned(lambda x, w: clipped(layer(x, w))),
    "dots saved": scanned(
        layer, around=functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    ),
    "dropout": scanned(dropped, KEYS),
    "encoder and decoder": encoded_and_decoded,
    "own rule of a cell": lambda w, x: with_own_cell(jax.tree.map(lambda one: one[0], w), x),
    "plain": scanned(layer),
    "own backward scan": lambda w, x: jnp.mean(with_own_rule(w["up"] @ w["down"], x)[0] ** 2),
    "recurrent": recurrent,
    "remat": scanned(layer, around=jax.checkpoint),
    "returned": returned,
    "reversed, two layers a turn": scanned(layer, reverse=True, unroll=2),
    "unrolled in jit": jax.jit(unrolled(lambda x, w: clipped(layer(x, w)))),
    "unrolled chain": chain,
    "unrolled remat": unrolled(layer, around=jax.checkpoint),
    "with skips": with_skips,
}
STEPS = {name: jax.value_and_grad(loss) for name, loss in LOSSES.items()}
STEPS |= {"accumulated": accumulated, "scaled": scaled}
STEPS |= {
    "two losses, scanned": two_losses(scanned(layer), scanned(layer)),
    "two losses, scanned and unrolled": two_losses(scanned(layer), unrolled(layer)),
    "two losses, unrolled": two_losses(unrolled(layer), chain),
}


def recomputation(step):
    return Recomputation.of(jax.make_jaxpr(step)(STACK, X), MACHINE)


def check_numbers(found, step, level):
    expected = jax.tree.leaves(jax.jit(step)(STACK, X))
    made = found.rewritten(level)
    assert_equal(list(jax.jit(core.jaxpr_as_fun(made))(*jax.tree.leaves((STACK, X)))), expected)


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner in core.jaxprs_in_params(eqn.params):
            yield from scans(inner)


def stacked_bytes(jaxpr, space=jax.memory.Space.Device):
    """Of all that scans stack in one memory, counted in the jaxpr itself."""
    found = 0
    for eqn in scans(jaxpr):
        inside = eqn.params["jaxpr"].jaxpr.outvars
        found += sum(
            out.aval.size * out.aval.dtype.itemsize
            for out, var in zip(eqn.outvars, inside, strict=True)
            if out.aval.ndim == var.aval.ndim + 1 and out.aval.memory_space == space
        )
    return found


ELSEWHERE = ("accumulated", "chunked", "dropout", "encoder and decoder", "recurrent", "with skips")  # moved to hosts
LIKE_OTHERS = ("adamw with clipping", "masters", "two losses, scanned and unrolled", "two losses, unrolled")


@pytest.mark.parametrize("name", some(STEPS, *(name for name in STEPS if name not in (*ELSEWHERE, *LIKE_OTHERS))))
def test_numbers_are_those_of_the_step(name):
    found = recomputation(STEPS[name])
    assert found.levels, "it keeps values for a backward pass"
    check_numbers(found, STEPS[name], found.levels_on_devices[-1])


@pytest.mark.parametrize(
    "name",
    [
        "accumulated", "chunked", "custom_vjp", "dropout", "encoder and decoder", "recurrent",
        "two losses, scanned", "with skips",
    ],
)  # fmt: skip
def test_numbers_are_those_of_the_step_where_values_are_moved_to_hosts(name):
    found = recomputation(STEPS[name])
    level = found.levels_of(1, EXPOSED_TRANSFER_SHARES[0])[-1]
    assert level.moved > 0 and level.bytes < found.levels_on_devices[-1].bytes
    check_numbers(found, STEPS[name], level)


@pytest.mark.parametrize("name", [name for name in STEPS if name.startswith("two losses")])
def test_numbers_of_two_losses_are_those_of_the_step_at_the_first_level(name):
    found = recomputation(STEPS[name])
    check_numbers(found, STEPS[name], found.levels[0])


@pytest.mark.parametrize("name", ["dropout", "plain", "remat"])
def test_levels_stack_what_they_say(name):
    """The first level stacks as many bytes more than another as it is said to keep more."""
    found = recomputation(STEPS[name])
    sizes = [(stacked_bytes(found.rewritten(level).jaxpr), level.bytes) for level in found.levels]
    assert len(sizes) > 1
    for level in found.levels:
        assert stacked_bytes(found.rewritten(level).jaxpr, jax.memory.Space.Host) == level.moved
    for (size, said), (fewer, less) in itertools.pairwise(sizes):
        assert size - fewer == said - less > 0


@pytest.mark.parametrize(
    ("name", "pairs"), [("own backward scan", 1), ("plain", 1), ("recurrent", 2), ("with skips", 2)]
)
def test_each_forward_scan_has_its_backward_scan(name, pairs):
    found = recomputation(STEPS[name]).scope.pairs
    assert [pair.second.eqn.params["reverse"] != pair.first.eqn.params["reverse"] for pair in found] == [True] * pairs


def test_marks_are_undone():
    """Of a scan with marks of `jax.checkpoint`, the same can be kept as of one without."""

    def choices(name):
        (pair,) = (block for block, _ in recomputation(STEPS[name]).blocks[1] if isinstance(block, loops.LoopPair))
        return [(cut.bytes, cut.seconds) for cut in cuts(pair.forward_pass)]

    assert choices("remat") == choices("plain") and len(choices("plain")) > 1


def attention(x, w):
    """A head of few features, whose scores are masked, and a hidden layer of many."""
    scores = jnp.where(jnp.tri(len(x)) > 0, (x[:, :64] @ x[:, :64].T - 1) * 0.1, -1e9)
    return x + jnp.tanh(jax.nn.softmax(scores) @ x @ w["up"]) @ w["down"]


def keeps_products_alone(found):
    """Whether some level keeps of each turn the hidden layer, and no scores."""
    for level in found.levels_on_devices:
        pairs = ((block, cut) for block, cut in found.cut_of(level).items() if isinstance(block, loops.LoopPair))
        kept = {var.aval.shape for block, cut in pairs for var in block.kept(cut)}
        if (4096, 8192) in kept and (4096, 4096) not in kept:
            return True
    return False


def test_scores_are_computed_again_and_products_kept(monkeypatch):
    """XLA fuses most elementwise work on scores, so that not every operation is a pass over memory."""
    shapes = {"up": (LAYERS, 2048, 8192), "down": (LAYERS, 8192, 2048)}
    w = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    closed = jax.make_jaxpr(jax.grad(scanned(attention)))(w, jax.ShapeDtypeStruct((4096, 2048), jnp.float32))
    assert keeps_products_alone(Recomputation.of(closed, MACHINE))
    unfused = {name: replace(facts, is_expensive=True) for name, facts in PRIMITIVES.items()}
    monkeypatch.setattr(costs, "facts_of", unfused.__getitem__)
    assert not keeps_products_alone(Recomputation.of(closed, MACHINE))


def test_a_step_without_a_backward_pass_has_no_levels():
    found = recomputation(scanned(layer))
    assert found.levels == () and "no backward pass was found" in found.why_none
    assert recomputation(STEPS["plain"]).why_none == ""


def test_a_missing_stack_is_caught(monkeypatch):
    """The oracle sees a backward pass that reads the slices of another turn."""
    right = loops._scan

    def turned(loop, env, *rest, **how):
        reverse = loop.eqn.params["reverse"]
        wrong = loop.eqn.replace(params=loop.eqn.params | {"reverse": not reverse}) if reverse else loop.eqn
        return right(loops.NumberedLoop(wrong, loop.consts, loop.carries, loop.body), env, *rest, **how)

    found = recomputation(STEPS["plain"])
    monkeypatch.setattr(loops, "_scan", turned)
    with pytest.raises(AssertionError):
        check_numbers(found, STEPS["plain"], found.levels_on_devices[-1])
