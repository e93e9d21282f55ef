"""A step in microbatches computes what it computes at once, or is refused with the line that needs the whole batch."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import are_equal, assert_equal
from hypothesis import given, settings
from jax import lax
from jax.extend import core
from models import MORE_MODELS
from oracles import SMALL, mesh_of
from random_steps import steps
from sweeps import some

import autoshard
from autoshard import MicrobatchError
from autoshard.microbatches import relations
from autoshard.microbatches.batch import in_microbatches
from autoshard.program.tracing import traced_step
from autoshard.propagation.registry import has_rule

ROWS, FEATURES = 16, 12


def in_parts(step, args, count, groups=1):
    """The results of a step that runs in microbatches on one device."""
    traced = traced_step(step, args, {}, has_rule=has_rule)
    split, _ = in_microbatches(traced, count, groups)
    traced.read(split)
    return jax.jit(core.jaxpr_as_fun(split))(*jax.tree.leaves(args))


def check(step, args, count=4, groups=1):
    expected = jax.tree.leaves(jax.jit(step)(*args))
    assert_equal(list(in_parts(step, args, count, groups)), expected)


def numbers(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


WEIGHTS = {"up": numbers(0, FEATURES, 8), "down": numbers(1, 8, FEATURES)}
BATCH = {"x": numbers(2, ROWS, 6, FEATURES), "y": numbers(3, ROWS, 6, FEATURES)}


def trained(loss):
    """A step of clipped Adam on a loss of (weights, batch, key)."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-2))

    def step(weights, state, batch, key):
        value, gradients = jax.value_and_grad(loss)(weights, batch, key)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value, optax.global_norm(gradients)

    return step, (WEIGHTS, optimizer.init(WEIGHTS), BATCH, jax.random.key(7))


def layers(weights, x):
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def squares(weights, batch, key):
    return jnp.mean((layers(weights, batch["x"]) - batch["y"]) ** 2)


def merged_rows(weights, batch, key):
    x = batch["x"].reshape(-1, FEATURES)
    return jnp.mean((layers(weights, x).reshape(batch["y"].shape) - batch["y"]) ** 2)


def masked(weights, batch, key):
    mask = (batch["y"][..., 0] > 0).astype(jnp.float32)
    errors = ((layers(weights, batch["x"]) - batch["y"]) ** 2).mean(-1)
    return jnp.sum(errors * mask) / jnp.sum(mask)


def dropped_out(weights, batch, key):
    hidden = jnp.tanh(batch["x"] @ weights["up"])
    hidden = jnp.where(jax.random.bernoulli(key, 0.5, hidden.shape), hidden, 0)
    return jnp.mean((hidden @ weights["down"] - batch["y"]) ** 2)


def scanned(weights, batch, key):
    @jax.checkpoint
    def layer(x, key):
        kept = jax.random.bernoulli(key, 0.8, x.shape)
        return x + jnp.where(kept, layers(weights, x), 0), jnp.mean(x, axis=-1)

    x, means = lax.scan(layer, batch["x"], jax.random.split(key, 3))
    return jnp.mean((x - batch["y"]) ** 2) + 0.1 * jnp.mean(means)


def looked_up(weights, batch, key):
    tokens = jnp.argmax(batch["x"], axis=-1)
    return jnp.mean((weights["down"].T[tokens] @ weights["up"].T[:, :8] - batch["y"][..., :8]) ** 2)


def picked_by_row_number(weights, batch, key):
    """The usual way to write a cross entropy; a table written the same way; and several places of each row."""
    x = layers(weights, batch["x"])
    flat = x.reshape(len(x), -1)
    labels = jnp.argmax(batch["y"].reshape(flat.shape), axis=-1)
    rows, places = jnp.arange(len(x)), jnp.argsort(x.sum(-1), axis=-1)[:, :2]
    weighed = jnp.ones_like(flat).at[rows, labels].set(0.5).at[rows, 0].add(1.0)
    picked = -jax.nn.log_softmax(flat)[rows, labels].mean()
    return picked + jnp.mean(weighed * flat**2) + jnp.mean(x[rows[:, None], places] ** 2)


def per_row(weights, batch, key):
    return jnp.mean(jax.vmap(lambda x, y: jnp.max((layers(weights, x) - y) ** 2))(batch["x"], batch["y"]))


def each_row_until_small(weights, batch, key):
    def halved(x):
        return lax.while_loop(lambda x: jnp.sum(x * x) > 1.0, lambda x: x * 0.5, x)

    return jnp.mean(jax.vmap(halved)(lax.stop_gradient(layers(weights, batch["x"])))) + squares(weights, batch, key)


def chosen(weights, batch, key):
    x = lax.cond(key_is_even(key), lambda x: x @ weights["up"], lambda x: jnp.tanh(x) @ weights["up"], batch["x"])
    return jnp.mean((x @ weights["down"] - batch["y"]) ** 2)


def key_is_even(key):
    return jax.random.key_data(key)[-1] % 2 == 0


EXACT = [
    chosen,
    dropped_out,
    each_row_until_small,
    looked_up,
    masked,
    merged_rows,
    per_row,
    picked_by_row_number,
    scanned,
    squares,
]


ROTATED = [(loss, 1 + (k + turn) % 2) for turn in range(2) for k, loss in enumerate(EXACT)]


@pytest.mark.parametrize("loss, groups", some(ROTATED, *ROTATED[: len(EXACT)]))
def test_what_is_exact_is_equal(loss, groups):
    step, args = trained(loss)
    check(step, args, count=4, groups=groups)


@pytest.mark.parametrize("name", some(["lstm", "moe", "tied"], "moe", "tied"))
def test_models(name):
    model = SMALL[name]()
    check(model.step, (model.state, model.batches(0)), count=2)


@pytest.mark.slow
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("name", [*SMALL, *MORE_MODELS])
def test_all_models_are_equal_or_refused(name, groups):
    model = SMALL[name]() if name in SMALL else MORE_MODELS[name]()
    try:
        check(model.step, (model.state, model.batches(0)), count=2, groups=groups)
    except MicrobatchError:
        assert name in ("cnn", "gnn", "resnet"), "these alone have statistics of the batch, or a graph for one"


def test_results_per_row_come_back_in_their_places():
    def step(weights, batch):
        x = layers(weights, batch["x"])
        return x, x.reshape(-1, FEATURES), jnp.max(x), jnp.min(x, axis=(0, 1)), jnp.all(x > 0), batch["x"].shape[0]

    check(step, (WEIGHTS, BATCH))
    check(step, (WEIGHTS, BATCH), groups=2)


def views_behind_each_other(weights, batch):
    """Losses of pairs, as of chosen and rejected answers; classifier-free guidance; a batch that is repeated."""
    x, y = batch["x"], batch["y"]
    rows = len(x)

    def loss(weights):
        both = layers(weights, jnp.concatenate([x, y, jnp.zeros_like(x)]))
        one, other, _ = jnp.split(both, 3)
        merged = both.reshape(-1, FEATURES)[: 2 * both[0].shape[0] * rows]
        return jnp.mean(jax.nn.softplus(one - other)) + jnp.mean(merged**2) + jnp.mean(both[rows : 2 * rows] * one)

    tiled = jnp.tile(layers(weights, x), (2, 1, 1))
    padded = jnp.pad(y, ((rows, 0), (0, 0), (0, 1)), constant_values=1.0)
    return jax.value_and_grad(loss)(weights), tiled, padded, jnp.concatenate([y, x]).sum(0)


@pytest.mark.parametrize("groups", [1, 2])
def test_batches_behind_each_other_are_rows(groups):
    check(views_behind_each_other, (WEIGHTS, BATCH), count=2, groups=groups)


@pytest.mark.parametrize(
    "step",
    [
        lambda weights, batch: jnp.concatenate([batch["x"][1:], batch["x"][:1]]),
        lambda weights, batch: batch["x"][: len(batch["x"]) // 2],
        lambda weights, batch: jnp.concatenate([batch["x"], batch["y"]]).reshape(-1, 2, *batch["x"].shape[1:]),
        lambda weights, batch: jnp.cumsum(jnp.concatenate([batch["x"], batch["y"]]), axis=0),
        lambda weights, batch: jnp.concatenate([batch["x"], batch["y"]])[::2],
    ],
    ids=["shifted", "half", "pairs of rows", "summed up", "every other"],
)
def test_what_cuts_between_rows_is_refused(step):
    with pytest.raises(MicrobatchError, match=r"needs all rows of the batch at once|takes the dim of the batch apart"):
        in_parts(lambda *given: jnp.tanh(step(*given)), (WEIGHTS, BATCH), count=2)


@pytest.mark.parametrize("groups", [1, 2])
def test_results_that_nothing_reads_are_cut_out_of_all_rows(groups):
    def step(weights, batch):
        x = jnp.tanh(batch["x"] @ weights["up"])
        return x[:2], x[::2], batch["x"][1:], jnp.sum(x)

    check(step, (WEIGHTS, BATCH), count=2, groups=groups)


def answers_to_one_prompt(weights, batch, key):
    """Rewards count against those of the other answers (GRPO), and experts are dealt out among tokens of two rows."""
    kept = jax.random.bernoulli(key, 0.8, batch["x"].shape)
    x = layers(weights, batch["x"] * kept)
    rewards = batch["y"].mean((1, 2)).reshape(-1, 4)
    advantages = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True) + 1e-3)
    pairs = x.reshape(-1, 2 * x.shape[1], FEATURES)
    mixed = jnp.einsum("gsf,gtf->gst", jax.nn.softmax(jnp.cumsum(pairs, 1)), pairs)
    return jnp.mean(advantages.reshape(-1, 1, 1) * x) + jnp.mean(mixed**2)


@pytest.mark.parametrize("groups", [1, 2])
def test_samples_that_are_treated_together_stay_together(groups):
    check(*trained(answers_to_one_prompt), count=2, groups=groups)


def test_samples_that_are_treated_together_are_in_one_microbatch():
    step, args = trained(answers_to_one_prompt)
    with pytest.raises(MicrobatchError, match="takes a batch of 16 rows, but not one of 2"):
        in_parts(step, args, 8)


def layered_with_metrics(weights, batch):
    """Metrics that are no sums, of all layers and inside their loop; their derivatives stand in the trace unread."""

    def layer(x, w):
        x = jnp.tanh(x @ w)
        return x, (jnp.max(jnp.abs(x)), jnp.min(x))

    def loss(weights):
        x, extremes = lax.scan(layer, batch["x"], weights)
        return jnp.mean((x - batch["y"]) ** 2), (jnp.max(jnp.abs(x - batch["y"])), extremes)

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    return weights - 0.1 * gradient, value, metrics


def test_metrics_beside_the_loss_are_no_matter_of_its_gradient():
    check(layered_with_metrics, (numbers(4, 3, FEATURES, FEATURES), BATCH))


def test_whole_numbers_are_made_of_sums():
    def step(weights, batch):
        total = jnp.sum(layers(weights, batch["x"])) * 10
        return total.astype(jnp.int32), total.astype(bool), (jnp.sum(batch["x"] > 0) * 0.7).astype(jnp.int32)

    check(step, (WEIGHTS, BATCH))
    with pytest.raises(MicrobatchError):  # a call that is one equation runs in every microbatch, or in none
        in_parts(jax.checkpoint(step), (WEIGHTS, BATCH), 4)


# What needs the whole batch, and the words of the refusal.


def normalised_over_batch(weights, batch, key):
    x = batch["x"] @ weights["up"]
    x = (x - x.mean((0, 1))) * lax.rsqrt(x.var((0, 1)) + 1e-5)
    return jnp.mean((x @ weights["down"] - batch["y"]) ** 2)


def balanced(weights, batch, key):
    shares = jax.nn.softmax(batch["x"] @ weights["up"]).mean((0, 1))
    return squares(weights, batch, key) + jnp.sum(shares * shares)


def root(weights, batch, key):
    return jnp.sqrt(squares(weights, batch, key))


def sorted_over_batch(weights, batch, key):
    x = layers(weights, batch["x"])
    return jnp.mean(jnp.sort(x, axis=0) * x)


def summed_up_over_batch(weights, batch, key):
    return jnp.mean(jnp.cumsum(layers(weights, batch["x"]), axis=0) ** 2)


def transposed_picks(weights, batch, key):
    """As many places as rows: what counts places is no number of a row."""
    x = layers(weights, batch["x"])[:, :1, 0] @ jnp.ones((1, ROWS))
    return jnp.mean(x[jnp.arange(ROWS)[None], jnp.arange(x.shape[0])[:, None]] ** 2)


def reversed_rows(weights, batch, key):
    return jnp.mean(layers(weights, batch["x"]) * layers(weights, batch["x"])[::-1])


def contrasted(weights, batch, key):
    x = layers(weights, batch["x"])[:, 0]
    return jnp.mean(jax.nn.logsumexp(x @ x.T, axis=1))


def first_rows(weights, batch, key):
    return jnp.mean(layers(weights, batch["x"][: batch["x"].shape[0] // 2]) ** 2)


def row_by_row(weights, batch, key):
    return lax.scan(lambda total, x: (total + jnp.mean(layers(weights, x) ** 2), None), 0.0, batch["x"])[0]


def until_all_are_small(weights, batch, key):
    x = lax.while_loop(lambda x: jnp.max(x) > 0.1, lambda x: x * 0.5, lax.stop_gradient(layers(weights, batch["x"])))
    return jnp.mean(x) + squares(weights, batch, key)


def picked_rows(weights, batch, key):
    return jnp.mean(layers(weights, batch["x"][jnp.array([0, 3])]) ** 2)


def on_size(weights, batch, key):
    extra = 2.0 if batch["x"].shape[0] > 8 else jnp.mean(weights["up"])
    return squares(weights, batch, key) * extra


REFUSED = [
    (normalised_over_batch, "a sum over the batch"),
    (balanced, "a sum over the batch"),
    (root, "a sum over the batch"),
    (sorted_over_batch, "needs all rows of the batch at once"),
    (summed_up_over_batch, "needs all rows of the batch at once"),
    (reversed_rows, "needs all rows of the batch at once"),
    (contrasted, "pairs rows of the batch with other rows"),
    (first_rows, "needs all rows of the batch at once"),
    (row_by_row, "loops over the rows of the batch"),
    (until_all_are_small, "turns until all rows of the batch are done"),
    (transposed_picks, "by their number"),
    (picked_rows, "needs all rows of the batch at once|by their number"),
    (on_size, "smaller batch|every size of the batch"),
]


@pytest.mark.parametrize(("loss", "words"), REFUSED, ids=[loss.__name__ for loss, _ in REFUSED])
def test_what_needs_the_whole_batch_is_refused_with_its_line(loss, words):
    step, args = trained(loss)
    with pytest.raises(MicrobatchError, match=rf"(?s)at test_microbatches.py:\d+.*({words})"):
        in_parts(step, args, 4)


@pytest.mark.parametrize(
    ("args", "count", "words"),
    [
        ((WEIGHTS, BATCH), 3, "do not divide the 16 rows"),
        ((WEIGHTS,), 2, "no argument has a batch"),
    ],
)
def test_a_batch_that_cannot_be_split(args, count, words):
    def step(weights, batch=None):
        return jax.tree.map(lambda w: w * 2, weights)

    with pytest.raises(MicrobatchError, match=words):
        in_parts(step, args, count)


# Random steps.


def equal_or_refused(step, seed):
    rng = np.random.default_rng(seed)
    args = step.state(rng), step.batch(rng)
    rows = jax.tree.leaves(args[1])[0].shape[0]
    for count in (2, 4):
        if rows % count == 0:
            try:
                check(step, args, count)
            except MicrobatchError:
                hypothesis.event("refused")
            else:
                hypothesis.event("equal")


@given(steps([4, 8]), hypothesis.strategies.integers(0, 2**32 - 1))
@settings(max_examples=2, deadline=None, derandomize=True, database=None)
def test_random_steps(step, seed):
    equal_or_refused(step, seed)


@pytest.mark.slow
@given(steps([4, 6, 8, 16]), hypothesis.strategies.integers(0, 2**32 - 1))
@settings(max_examples=300, deadline=None, database=None)
def test_many_random_steps(step, seed):
    equal_or_refused(step, seed)


# The oracle can fail.


def test_a_false_sum_is_caught(monkeypatch):
    def step(weights, batch):
        return jnp.max(layers(weights, batch["x"]))

    expected = [jax.jit(step)(WEIGHTS, BATCH)]
    assert are_equal(list(in_parts(step, (WEIGHTS, BATCH), 4)), expected)
    monkeypatch.setitem(relations.REDUCTIONS, "reduce_max", "add")
    assert not are_equal(list(in_parts(step, (WEIGHTS, BATCH), 4)), expected)


# Planned and run.


def test_a_decorated_step_in_microbatches_is_the_step():
    step, args = trained(scanned)
    split = autoshard.autoshard(step, mesh=mesh_of({"data": 4, "model": 2}), microbatches=2)
    assert_equal(jax.tree.map(np.asarray, split(*args)), jax.tree.map(np.asarray, jax.jit(step)(*args)))
    assert any("2 microbatches" in warning for warning in split.plan(*args).warnings)


def test_sums_of_groups_communicate_once():
    step, args = trained(squares)
    batch = jax.tree.map(lambda x: np.tile(x, (8, 1, 1)), BATCH)
    plan = autoshard.plan(step, *args[:2], batch, args[3], mesh=mesh_of({"data": 8}), microbatches=4)
    in_loop = [one for one in plan.predicted.collectives if one.count >= 4]
    assert not in_loop, "gradients of all microbatches are reduced once"


def test_a_plan_in_microbatches_is_saved_and_loaded(tmp_path):
    step, args = trained(squares)
    mesh = mesh_of({"data": 4, "model": 2})
    plan = autoshard.plan(step, *args, mesh=mesh, microbatches=2)
    plan.save(tmp_path / "plan.json")
    again = autoshard.autoshard(step, mesh=mesh, microbatches=2, plan=tmp_path / "plan.json")
    assert_equal(jax.tree.map(np.asarray, again(*args)), jax.tree.map(np.asarray, jax.jit(step)(*args)))


def test_auto_takes_as_few_as_fit():
    def step(weights, x):
        def loss(weights):
            return jnp.mean((jnp.tanh(jnp.tanh(x @ weights["in"]) @ weights["out"]) - x) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    args = {"in": jnp.ones((8, 64)), "out": jnp.ones((64, 8))}, jnp.ones((4096, 8))
    mesh = mesh_of({"data": 8})
    with pytest.raises(autoshard.MemoryLimitError) as whole:
        autoshard.plan(step, *args, mesh=mesh, memory=1000)
    limit = 0.8 * whole.value.needed
    plan = autoshard.plan(step, *args, mesh=mesh, memory=limit, microbatches="auto")
    assert any("2 microbatches" in warning for warning in plan.warnings)
    assert plan.predicted.peak_bytes < limit


@pytest.mark.parametrize("rows", [FEATURES, ROWS], ids=["as many rows as weights", "fewer rows than frozen weights"])
def test_frozen_weights_are_no_batch(rows):
    """Weights that the step does not change are no state. Their first dim may be that of the batch, or a larger one."""
    frozen = [numbers(i, FEATURES, FEATURES) for i in range(3)]

    def step(adapters, frozen, x, y):
        def loss(adapters):
            h = x
            for weight, one in zip(frozen, adapters, strict=True):
                h = jnp.tanh(h @ weight + h @ one)
            return jnp.mean((h - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(adapters)
        return jax.tree.map(lambda w, g: w - 0.1 * g, adapters, gradients), value

    adapters = [numbers(10 + i, FEATURES, FEATURES) for i in range(3)]
    check(step, (adapters, frozen, numbers(20, rows, FEATURES), numbers(21, rows, FEATURES)))
    batched = lambda adapters, frozen, batch: step(adapters, frozen, *batch)  # noqa: E731
    check(batched, (adapters, frozen, (numbers(20, rows, FEATURES), numbers(21, rows, FEATURES))))
