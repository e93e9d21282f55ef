"""`pad="batch"`: results are those of the batch as it is, or the step is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from sweeps import some

import autoshard
from autoshard.padding import operations
from autoshard.padding.rewriting import PaddedProgram

WIDTH = 4
ONE = jax.make_mesh((1,), ("one",), axis_types=(AxisType.Auto,))


def padded(step, batch, rows, *others):
    """The results of a step whose batch has been padded to so many rows with what spoils all that it gets into."""
    small = jax.make_jaxpr(step)(batch, *others)
    bad = [(0, rows - len(batch)), *[(0, 0)] * (batch.ndim - 1)]
    more = np.pad(batch, bad, constant_values=np.nan if batch.dtype.kind == "f" else 3)
    program = PaddedProgram("step", small, jax.make_jaxpr(step)(more, *others))
    return jax.jit(program)(more, *others)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def train(batch, weights):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch @ weights) @ weights.T - batch) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(weights)
    return weights - 0.1 * gradient, loss


def batch_norm(batch, weights):
    def loss_of(weights):
        hidden = batch @ weights
        hidden = (hidden - hidden.mean(0)) / jnp.sqrt(hidden.var(0) + 1e-3)
        return jnp.sum(jax.nn.logsumexp(hidden, axis=0)) + jnp.max(hidden)

    return jax.value_and_grad(loss_of)(weights)


def embedding(tokens, table):
    def loss_of(table):
        logits = table[tokens] @ table.T
        labels = jnp.roll(tokens, 1, axis=1)
        return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1))

    return jax.value_and_grad(loss_of)(table)


def loops(batch, weights):
    def layer(x, _):
        return jax.checkpoint(lambda x: jnp.tanh(x @ weights @ weights.T))(x), jnp.mean(x, axis=0)

    last, means = jax.lax.scan(layer, batch, length=3)
    norm = jax.lax.while_loop(lambda x: jnp.max(jnp.abs(x)) > 0.1, lambda x: 0.5 * x, last)
    return means, norm, jax.lax.cond(jnp.sum(batch) > 0, jnp.sum, lambda x: jnp.prod(1.0 + x), last)


def microbatches(batch, weights):
    parts = batch.reshape(-1, 2, *batch.shape[1:])
    return jnp.einsum("bkd,de->e", parts, weights), parts.argmax(axis=-1), jnp.cumsum(batch, axis=0)


def dropout(batch, weights):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, batch.shape)
    return jnp.sum(jnp.where(kept, batch, 0.0) @ weights), jnp.all(batch < 9.0, axis=0), jnp.argmin(batch, axis=0)


def slices(batch, weights):
    return batch[1:] @ weights, batch[:2].sum(), jnp.where(batch > 0, batch, 0.0).mean(where=batch > 0)


EXACT = [train, batch_norm, loops, dropout, slices]


@pytest.mark.parametrize("step", EXACT, ids=[step.__name__ for step in EXACT])
@pytest.mark.parametrize("rows, more", [(5, 8), pytest.param(3, 4, marks=pytest.mark.slow)])
def test_results_are_those_of_the_batch(step, rows, more):
    batch, weights = normal(rows, WIDTH), normal(WIDTH, 6, seed=1)
    assert_same(padded(step, batch, more, weights), jax.tree.leaves(jax.jit(step)(batch, weights)))


def test_tokens_and_microbatches():
    tokens = np.random.default_rng(0).integers(0, 7, (3, 5)).astype(np.int32)
    table = normal(7, WIDTH)
    assert_same(padded(embedding, tokens, 8, table), jax.tree.leaves(jax.jit(embedding)(tokens, table)))
    batch, weights = normal(6, WIDTH), normal(WIDTH, 6)
    assert_same(padded(microbatches, batch, 8, weights), jax.tree.leaves(jax.jit(microbatches)(batch, weights)))


def assert_same(made, expected):
    for one, other in zip(made, expected, strict=True):
        assert one.shape == other.shape and one.dtype == other.dtype
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


INTEGERS, FLOATS = ("int8", "uint8", "int32", "uint32"), ("float16", "bfloat16", "float32", "float8_e4m3fn")
BITS, ORDERED = "reduce_and reduce_or reduce_xor", "reduce_max reduce_min argmax argmin"
NUMBERS = "reduce_sum reduce_prod"
REDUCTIONS = [
    ("bool", f"{BITS} {ORDERED}"),
    *((dtype, f"{BITS} {ORDERED} {NUMBERS}") for dtype in INTEGERS),
    *((dtype, f"{ORDERED} {NUMBERS}") for dtype in FLOATS),
    ("complex64", f"reduce_max reduce_min {NUMBERS}"),
]
LIKE_OTHERS = ("uint8", "int32", "float16")


@pytest.mark.parametrize("dtype, names", some(REDUCTIONS, *(row for row in REDUCTIONS if row[0] not in LIKE_OTHERS)))
def test_added_rows_count_for_nothing_in_any_reduction(dtype, names):
    def step(x):
        of = {name: (0, np.int32) if name.startswith("arg") else ((0,),) for name in names.split()}
        return [getattr(jax.lax, name)(x, *how) for name, how in of.items()]

    for least, end in ((-3, 3), (1, 4), (-4, 0)):
        rows = np.random.default_rng(end).integers(least, end, (8, WIDTH)).astype(dtype)
        program = PaddedProgram("step", jax.make_jaxpr(step)(rows[:3]), jax.make_jaxpr(step)(rows))
        for name, made, right in zip(names.split(), jax.jit(program)(rows), step(jnp.asarray(rows[:3])), strict=True):
            np.testing.assert_array_equal(np.asarray(made), np.asarray(right), err_msg=name)


REFUSED = [
    (lambda x: jnp.sort(x, axis=0), "sort at test_padding.py.* makes rows of its result of other rows"),
    (lambda x: x[::-1], "rev at test_padding.py.* makes rows of its result of other rows"),
    (lambda x: jax.lax.cumsum(x, axis=0, reverse=True), "cumsum at .* makes rows"),
    (lambda x: jnp.concatenate([x, x]), "concatenate at test_padding.py"),
    (lambda x: x.T.reshape(-1), "reshape at .* added rows would stand between others"),
    (lambda x: jax.lax.map(jnp.sum, x), "scan at .* goes through the rows one by one"),
    (lambda x: jnp.fft.fft(x, axis=0), "fft at test_padding.py"),
    (lambda x: x * 2.0 if len(x) > 4 else x + 1.0, "add at .* is mul at another number of rows"),
    (lambda x: x * 2.0 if len(x) > 4 else x + x * 1.0, "runs other operations on another number of rows"),
    (lambda x: x * jnp.asarray(np.arange(len(x), dtype=np.float32))[:, None], "runs other operations|at"),
    (lambda x: jnp.median(x, axis=0), "sort at test_padding.py"),
    (lambda x: jax.random.normal(jax.random.key(0), x.T.shape) * x.T, "random_bits at .* other random numbers"),
    (
        lambda x: jax.lax.reduce(x, np.float32(0), lambda a, b: a + b, (0,)) if False else x[jnp.argsort(x[:, 0])],
        "sort",
    ),
]


@pytest.mark.parametrize("step, message", REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_certain_is_refused(step, message):
    with pytest.raises(autoshard.ArgumentError, match=message):
        padded(step, normal(3, WIDTH), 8)


FIXED = {  # steps that are written for five rows
    "a state": lambda x: jnp.zeros((5, WIDTH)) + x,
    "a shape": lambda x: x.reshape(5, 2, -1),
    "a range": lambda x: x[jnp.arange(5)] - x,
    "an assertion": lambda x: x.sum() if len(x) == 5 else 1 / 0,
}


@pytest.mark.parametrize("name", FIXED)
def test_a_step_for_so_many_rows_says_so(name):
    """Tracing it with more rows raised JAX's error, or the step's own."""
    step = autoshard.autoshard(FIXED[name], mesh=jax.make_mesh((8,), ("data",)), pad="batch")
    with pytest.raises(autoshard.ArgumentError, match=r"takes a batch of 5 rows, but not one of 8: .*\n.* to be x: "):
        step(normal(5, WIDTH))


def test_the_last_row_and_what_is_counted_are_those_of_the_batch():
    def step(x):
        return x[-1:], x / len(x), jnp.full((len(x), 2), len(x)), jnp.arange(len(x)), jnp.std(x), keys(len(x))

    def keys(rows):
        return jax.vmap(jax.random.normal)(jax.random.split(jax.random.key(1), rows))

    batch = normal(3, WIDTH)
    assert_same(padded(step, batch, 8), jax.tree.leaves(step(batch)))


def random_program(seed):
    """A chain of operations on arrays that have the batch as one dim."""
    draw = np.random.default_rng(seed)
    weights = draw.normal(size=(WIDTH, WIDTH))
    unary = [jnp.tanh, jnp.abs, lambda x: x - x.mean(0), lambda x: jax.nn.softmax(x, axis=0), lambda x: x @ weights]
    unary += [lambda x: jnp.cumsum(x, axis=0), lambda x: x.at[:, 1].set(0.0), lambda x: x / (1.0 + jnp.max(x, axis=0))]
    unary += [lambda x: (x @ x.T) @ x / len(x), lambda x: jnp.where(x > jnp.min(x), x, 0.0), lambda x: jnp.log(x**2)]
    unary += [lambda x: x.T.reshape(WIDTH, -1).T, lambda x: jnp.concatenate([x[:, 2:], x[:, :2]], axis=1)]
    ends = [jnp.sum, lambda x: jnp.var(x, axis=0), lambda x: jnp.argmax(x, axis=0), lambda x: x, jnp.linalg.norm]
    chain = [unary[i] for i in draw.integers(len(unary), size=3)]
    end = ends[draw.integers(len(ends))]

    def step(x):
        for operation in chain:
            x = operation(x)
        return end(x), jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(weights)

    return step


@pytest.mark.parametrize("seeds", [range(5), pytest.param(range(5, 30), marks=pytest.mark.slow)], ids=["few", "many"])
def test_random_programs(seeds):
    right = 0
    with jax.enable_x64(True):  # what programs cancel out does not hide what they get wrong
        for seed in seeds:
            step = random_program(seed)
            batch = np.random.default_rng(seed).normal(size=(3 + seed % 3, WIDTH))
            try:
                made = padded(step, batch, 8)
            except autoshard.ArgumentError:
                continue
            for one, other in zip(made, jax.tree.leaves(jax.jit(step)(batch)), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-8, atol=1e-8)
            right += 1
    assert right >= 0.7 * len(seeds)


def test_keys_of_rows_are_padded():
    """Each row has its key: rows of zeros are keys, too."""
    keys, x = jax.random.split(jax.random.key(3), 13), np.ones((13, 8), np.float32)
    step = lambda keys, x: jnp.mean(x * jax.vmap(lambda key: jax.random.normal(key, (8,)))(keys))  # noqa: E731
    mesh = jax.make_mesh((8,), ("data",))
    np.testing.assert_allclose(autoshard.autoshard(step, mesh=mesh, pad="batch")(keys, x), step(keys, x), rtol=1e-5)


def test_a_mask_that_is_missing_is_caught(monkeypatch):
    monkeypatch.setattr(operations.Mask, "applied", lambda mask, array: array)
    batch, weights = normal(3, WIDTH), normal(WIDTH, 6)
    with pytest.raises(AssertionError):
        assert_same(padded(train, batch, 4, weights), jax.tree.leaves(jax.jit(train)(batch, weights)))


# Decorated.


def sgd(state, batch, rate):
    def loss_of(weights):
        return jnp.mean((batch["x"] @ weights - batch["y"]) ** 2)

    loss, gradient = jax.value_and_grad(loss_of)(state["w"])
    return {"w": state["w"] - rate * gradient, "step": state["step"] + 1}, loss, batch["x"] @ state["w"]


def test_batches_of_any_size_train_as_on_one_device():
    mesh = jax.make_mesh((8,), ("data",))
    step = autoshard.autoshard(sgd, mesh=mesh, donate_argnums=0, pad="batch")
    state = {"w": jnp.asarray(normal(WIDTH, 2)), "step": jnp.asarray(0)}
    expected = jax.tree.map(np.asarray, state)
    for rows in (16, 11, 3):
        batch = {"x": normal(rows, WIDTH, seed=rows), "y": normal(rows, 2, seed=rows + 1)}
        state, *made = step(state, batch, 0.1)
        expected, *right = jax.jit(sgd)(expected, batch, 0.1)
        assert_same(jax.tree.leaves((state, made)), jax.tree.leaves((expected, right)))
        assert made[1].shape == (rows, 2)
    batch = {"x": normal(11, WIDTH), "y": normal(11, 2)}
    plan = step.plan(state, batch, 0.1)
    assert [one.shape[0] for one in plan.arguments if one.name.startswith("batch/")] == [16, 16]
    assert "11 rows" in plan.warnings[-1] and "16" in plan.warnings[-1]


@pytest.mark.parametrize("rows, padded", [(13, 16), (17, 32), (16, 16)])
def test_padded_batches_run_in_microbatches(rows, padded):
    """The rows that are added are those of the last microbatches, each of which the devices divide."""

    def step(state, batch, rate):
        return sgd(state, batch, rate)[:2]

    run = autoshard.autoshard(step, mesh=jax.make_mesh((8,), ("data",)), pad="batch", microbatches=2)
    state = {"w": jnp.asarray(normal(WIDTH, 2)), "step": jnp.asarray(0)}
    batch = {"x": normal(rows, WIDTH), "y": normal(rows, 2)}
    assert_same(jax.tree.leaves(run(state, batch, 0.1)), jax.tree.leaves(jax.jit(step)(state, batch, 0.1)))
    plan = run.plan(state, batch, 0.1)
    assert [one.shape[0] for one in plan.arguments if one.name.startswith("batch/")] == [padded] * 2
    assert run.trace(state, batch, 0.1).microbatches == 2


def rows_of_a_step(weights, batch):
    """Losses and predictions of examples, beside sums over them."""

    def loss(weights):
        logits = jnp.tanh(batch["x"] @ weights) @ weights.T
        losses = ((logits - batch["x"]) ** 2).sum(-1)
        return losses.mean(), (losses, logits)

    (value, (losses, logits)), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    return weights - gradient, value, losses, {"logits": logits, "columns": logits.T, "best": logits.argmax(-1)}


@pytest.mark.parametrize("microbatches", [2, "auto"])
def test_rows_of_results_are_those_of_the_batch_in_microbatches(microbatches):
    options = {"mesh": jax.make_mesh((8,), ("data",)), "pad": "batch", "microbatches": microbatches}
    weights, batch = jnp.asarray(normal(WIDTH, 3)), {"x": normal(13, WIDTH)}
    run = autoshard.autoshard(rows_of_a_step, **options)
    assert_same(jax.tree.leaves(run(weights, batch)), jax.tree.leaves(jax.jit(rows_of_a_step)(weights, batch)))
    assert run.trace(weights, batch).microbatches == (2 if microbatches == 2 else 1)


def test_rows_that_a_microbatch_needs_of_others_are_refused():
    """The step goes on with rows that it cuts out of the batch; results that nothing reads are cut out at the end."""
    options = {"mesh": jax.make_mesh((8,), ("data",)), "pad": "batch", "microbatches": 2}
    run = autoshard.autoshard(lambda x: jnp.tanh((x * 2)[:3]), **options)
    with pytest.raises(autoshard.MicrobatchError, match=r"slice at .* needs all rows of the batch at once"):
        run(normal(16, WIDTH))
    first = autoshard.autoshard(lambda x: ((x * 2)[:3], x.sum(0)), **options)
    assert_same(first(normal(16, WIDTH)), [normal(16, WIDTH)[:3] * 2, normal(16, WIDTH).sum(0)])


def test_a_plan_that_is_given_is_that_of_the_padded_batch():
    mesh, fixed = jax.make_mesh((8,), ("data",)), {"batch/x": jax.P(), "batch/y": jax.P()}
    state = {"w": jnp.asarray(normal(WIDTH, 2)), "step": jnp.asarray(0)}
    args = state, {"x": normal(11, WIDTH), "y": normal(11, 2)}, 0.1
    how = {"mesh": mesh, "pad": "batch"}
    plan, free = (autoshard.autoshard(sgd, **how, fixed=one).plan(*args) for one in (fixed, None))
    again = autoshard.autoshard(sgd, **how, plan=plan).plan(*args)
    assert again.in_shardings == plan.in_shardings != free.in_shardings


def test_the_batch_is_told_from_weights():
    of = jax.ShapeDtypeStruct
    weights = {"up": of((WIDTH, 8), np.float32), "bias": of((8,), np.float32)}
    mesh = jax.make_mesh((8,), ("data",))
    arguments = weights, of((11, WIDTH), np.float32)

    def predict(weights, x):
        return x @ weights["up"] + weights["bias"]

    shapes = {
        one.name: one.shape for one in autoshard.autoshard(predict, mesh=mesh, pad="batch").plan(*arguments).arguments
    }
    assert shapes == {"weights/bias": (8,), "weights/up": (WIDTH, 8), "x": (16, WIDTH)}
    (remark,) = autoshard.plan(predict, *arguments, mesh=mesh).warnings[:1]
    assert "11 rows (x)" in remark and "16 rows would" in remark
    assert not any(
        "rows" in one for one in autoshard.plan(predict, weights, of((16, WIDTH), np.float32), mesh=mesh).warnings
    )


def test_rows_are_not_added_where_all_devices_split_the_rest():
    """Time steps stand first in what advantages are made of, and a value is left over at their end."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))

    def differences(values):
        return values[1:] - values[:-1]

    def centred(values):
        return values - values.mean(1, keepdims=True)

    def remarks(step):
        made = autoshard.plan(step, jax.ShapeDtypeStruct((17, 1024), np.float32), mesh=mesh)
        return made.predicted.communication_seconds, [one for one in made.warnings if "17 rows" in one]

    assert remarks(differences) == (0, [])
    seconds, advice = remarks(centred)
    assert seconds and advice


def test_pad_is_batch_or_nothing():
    mesh = jax.make_mesh((8,), ("data",))
    with pytest.raises(autoshard.ArgumentError, match="pad='rows'"):
        autoshard.autoshard(sgd, mesh=mesh, pad="rows")
    step = autoshard.autoshard(lambda x: jnp.sort(x, axis=0), mesh=mesh, pad="batch")
    np.testing.assert_array_equal(step(normal(8, WIDTH)), np.sort(normal(8, WIDTH), axis=0))
    with pytest.raises(autoshard.ArgumentError, match=r"sort at test_padding.py:\d+ makes rows"):
        step(normal(9, WIDTH))
