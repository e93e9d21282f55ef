"""Train steps as people write them, with what they put around a model: (state, batch, key) -> (state, loss)."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from pipeline_steps import cross_entropy, layer, numbers, weights_of_layer

ROWS, WIDTH, LENGTH, VOCABULARY = 8, 8, 4, 16


def words(seed, length=LENGTH):
    return np.random.default_rng(seed).integers(0, VOCABULARY, (ROWS, length)).astype(np.int32)


def attention(weights, x, memory, *, is_causal=False):
    queries, keys, values = x @ weights["q"], memory @ weights["k"], memory @ weights["v"]
    scores = jnp.einsum("btd,bsd->bts", queries, keys) / np.sqrt(WIDTH)
    if is_causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    return x + jax.nn.softmax(scores) @ values @ weights["o"]


def attention_weights(seed):
    return {name: numbers(seed + i, WIDTH, WIDTH) for i, name in enumerate("qkvo")}


def trained(loss, weights, batch, optimizer=None):
    optimizer = optimizer or optax.adamw(1e-2, eps=1e-4)

    def step(state, batch, key):
        value, gradients = jax.value_and_grad(loss)(state["weights"], batch, key)
        updates, moments = optimizer.update(gradients, state["moments"], state["weights"])
        return {"weights": optax.apply_updates(state["weights"], updates), "moments": moments}, value

    return step, {"weights": weights, "moments": optimizer.init(weights)}, batch


def conv_unet():
    """Two levels down and up by convolutions, with group norms, and skips between them."""

    def conv(x, w, stride=1):
        return lax.conv_general_dilated(x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def normed(x):
        groups = x.reshape(*x.shape[:3], 2, -1)
        groups = (groups - groups.mean((1, 2, 4), keepdims=True)) * lax.rsqrt(groups.var((1, 2, 4), keepdims=True) + 1)
        return jax.nn.silu(groups.reshape(x.shape))

    def loss(weights, batch, key):
        x = first = normed(conv(batch["x"], weights["in"]))
        x = second = normed(conv(x, weights["down"][0], 2))
        x = normed(conv(x, weights["down"][1], 2))
        x = normed(conv(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), weights["up"][0]) + second)
        x = normed(conv(jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), weights["up"][1]) + first)
        return jnp.mean((conv(x, weights["out"]) - batch["x"]) ** 2)

    weights = {
        "in": numbers(1, 3, 3, 2, 4), "out": numbers(2, 3, 3, 4, 2),
        "down": [numbers(3, 3, 3, 4, 4), numbers(4, 3, 3, 4, 4)],
        "up": [numbers(5, 3, 3, 4, 4), numbers(6, 3, 3, 4, 4)],
    }  # fmt: skip
    return trained(loss, weights, {"x": numbers(7, ROWS, 8, 8, 2)})


def vision_transformer():
    """Patches, a token for the class, learned positions."""

    def loss(weights, batch, key):
        patches = batch["image"].reshape(batch["image"].shape[0], 2, 2, 2, 2, 3).transpose(0, 1, 3, 2, 4, 5)
        x = patches.reshape(patches.shape[0], 4, 12) @ weights["patch"]
        token = jnp.broadcast_to(weights["class"], (x.shape[0], 1, WIDTH))
        x = jnp.concatenate([token, x], axis=1) + weights["positions"]
        for one in weights["layers"]:
            x = layer(one["mlp"], attention(one["attention"], x, x))
        return cross_entropy(x[:, 0] @ weights["head"], batch["label"])

    layers = [{"mlp": weights_of_layer(10 * i), "attention": attention_weights(100 + 10 * i)} for i in range(4)]
    weights = {
        "patch": numbers(1, 12, WIDTH), "class": numbers(2, WIDTH), "positions": numbers(3, 5, WIDTH),
        "layers": layers, "head": numbers(4, WIDTH, VOCABULARY),
    }  # fmt: skip
    return trained(loss, weights, {"image": numbers(5, ROWS, 4, 4, 3), "label": words(6)[:, 0]})


def encoder_decoder():
    """Every layer of the decoder reads what the encoder made."""

    def loss(weights, batch, key):
        x = weights["embedding"][batch["source"]]
        for one in weights["encoder"]:
            x = layer(one["mlp"], attention(one["attention"], x, x))
        y = weights["embedding"][batch["target"][:, :-1]]
        for one in weights["decoder"]:
            y = attention(one["attention"], y, y, is_causal=True)
            y = layer(one["mlp"], attention(one["cross"], y, x))
        return cross_entropy(y @ weights["embedding"].T, batch["target"][:, 1:])

    def block(seed, *names):
        return {"mlp": weights_of_layer(seed)} | {
            name: attention_weights(seed + 3 + 4 * i) for i, name in enumerate(names)
        }

    weights = {
        "embedding": numbers(1, VOCABULARY, WIDTH),
        "encoder": [block(20 * i, "attention") for i in (1, 2)],
        "decoder": [block(20 * i, "attention", "cross") for i in (3, 4)],
    }
    return trained(loss, weights, {"source": words(1, 5), "target": words(2, LENGTH + 1)})


def language_model(*, mixes=lambda x, key: x, depth=4):
    """A loss of a small language model whose layers may be mixed with noise."""

    def loss(weights, batch, key):
        x = weights["embedding"][batch["inputs"]]
        for one, own in zip(weights["layers"], jax.random.split(key, depth), strict=True):
            x = mixes(layer(one, x), own)
        return cross_entropy(x @ weights["head"], batch["targets"])

    layers = [weights_of_layer(10 * i) for i in range(depth)]
    weights = {"embedding": numbers(1, VOCABULARY, WIDTH), "layers": layers, "head": numbers(2, WIDTH, VOCABULARY)}
    tokens = words(9, LENGTH + 1)
    return loss, weights, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def dropout_in_every_layer():
    loss, *rest = language_model(mixes=lambda x, key: jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0))
    return trained(loss, *rest)


def clipped_with_a_schedule():
    """Gradients clipped by their norm, a learning rate that warms up, no decay of biases."""
    loss, weights, batch = language_model()
    rate = optax.warmup_cosine_decay_schedule(1e-3, 1e-2, 2, 10)
    masked = optax.add_decayed_weights(0.1, mask=lambda tree: jax.tree.map(lambda one: one.ndim > 1, tree))
    optimizer = optax.chain(optax.clip_by_global_norm(0.3), optax.scale_by_adam(eps=1e-4), masked,
                            optax.scale_by_learning_rate(rate))  # fmt: skip
    return trained(loss, weights, batch, optimizer)


def with_average(loss, weights, batch, optimizer):
    """A training step that keeps an exponential average of the weights beside them."""

    def step(state, batch, key):
        value, gradients = jax.value_and_grad(loss)(state["weights"], batch, key)
        updates, moments = optimizer.update(gradients, state["moments"])
        made = optax.apply_updates(state["weights"], updates)
        average = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["average"], made)
        return {"weights": made, "moments": moments, "average": average}, value

    return step, {"weights": weights, "moments": optimizer.init(weights), "average": weights}, batch


def averaged():
    loss, weights, batch = language_model()
    return with_average(loss, weights, batch, optax.sgd(0.1, momentum=0.9))


def scaled_loss():
    """Dynamic loss scaling: a step whose gradients are not finite changes nothing but the scale."""
    loss, weights, batch = language_model()

    def step(state, batch, key):
        scale = state["scale"]
        value, gradients = jax.value_and_grad(lambda *given: loss(*given) * scale)(state["weights"], batch, key)
        gradients = jax.tree.map(lambda one: one / scale, gradients)
        is_finite = jnp.all(jnp.array([jnp.all(jnp.isfinite(one)) for one in jax.tree.leaves(gradients)]))
        made = jax.tree.map(lambda w, g: jnp.where(is_finite, w - 0.1 * g, w), state["weights"], gradients)
        good = jnp.where(is_finite, state["good"] + 1, 0)
        scale = jnp.where(is_finite, jnp.where(good % 3 == 0, scale * 2, scale), scale / 2)
        return {"weights": made, "scale": scale, "good": good}, value / state["scale"]

    return step, {"weights": weights, "scale": jnp.float32(64.0), "good": jnp.int32(0)}, batch


def auxiliary_losses():
    """Each layer adds a loss of its own; the logits add another."""
    _, weights, batch = language_model()

    def loss(weights, batch, key):
        x, extra = weights["embedding"][batch["inputs"]], 0.0
        for one in weights["layers"]:
            x = layer(one, x)
            extra += jnp.mean(x**2)
        logits = x @ weights["head"]
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        return cross_entropy(logits, batch["targets"]) + 0.01 * extra + 1e-3 * jnp.mean(normaliser**2)

    return trained(loss, weights, batch)


def ragged_depth():
    """Seven layers of several widths and kinds."""
    sizes = [8, 16, 4, 12, 8, 8, 24, 8]

    def loss(weights, batch, key):
        x = batch["x"]
        for i, w in enumerate(weights):
            x = (jnp.tanh, jax.nn.gelu, jax.nn.softplus)[i % 3](x @ w["kernel"] + w["bias"])
        return jnp.mean((x - batch["y"]) ** 2)

    weights = [
        {"kernel": numbers(i, a, b), "bias": numbers(50 + i, b)} for i, (a, b) in enumerate(itertools.pairwise(sizes))
    ]
    return trained(loss, weights, {"x": numbers(90, ROWS, 8), "y": numbers(91, ROWS, 8)})


def mixture_with_a_shared_embedding():
    """The two best experts of each token, an embedding that is read at both ends, an average of the weights."""
    experts = 4

    def mixed(weights, x):
        shares, chosen = lax.top_k(jax.nn.softmax(x @ weights["router"]), 2)
        gates = (jax.nn.one_hot(chosen, experts) * shares[..., None]).sum(-2) / shares.sum(-1, keepdims=True)
        made = jax.nn.gelu(jnp.einsum("btd,edf->btef", x, weights["up"]))
        return x + jnp.einsum("btef,efd,bte->btd", made, weights["down"], gates)

    def loss(weights, batch, key):
        x = weights["embedding"][batch["tokens"][:, :-1]]
        for one in weights["layers"]:
            x = mixed(one["experts"], attention(one["attention"], x, x, is_causal=True))
        return cross_entropy(x @ weights["embedding"].T, batch["tokens"][:, 1:])

    def layer_weights(seed):
        wide = {"up": numbers(seed + 6, experts, WIDTH, 16), "down": numbers(seed + 7, experts, 16, WIDTH)}
        return {"attention": attention_weights(seed), "experts": {"router": numbers(seed + 5, WIDTH, experts), **wide}}

    weights = {"embedding": numbers(1, VOCABULARY, WIDTH), "layers": [layer_weights(10 * i) for i in range(3)]}
    return with_average(loss, weights, {"tokens": words(2, LENGTH + 1)}, optax.adam(1e-2, eps=1e-4))


def scanned_encoder_decoder():
    """Two loops over layers, the second of which reads in every turn what the first has made; clipped gradients."""

    def stacked(made):
        return jax.tree.map(lambda *leaves: np.stack(leaves), *map(made, range(2)))

    def loss(weights, batch, key):
        def encoded(x, one):
            return layer(one["mlp"], attention(one["attention"], x, x)), None

        def decoded(x, one):
            x = attention(one["cross"], attention(one["attention"], x, x, is_causal=True), memory)
            return layer(one["mlp"], x), None

        memory, _ = lax.scan(encoded, weights["embedding"][batch["source"]], weights["encoder"])
        x, _ = lax.scan(decoded, weights["embedding"][batch["target"][:, :-1]], weights["decoder"])
        return cross_entropy(x @ weights["head"], batch["target"][:, 1:])

    def block(seed, *names):
        return {"mlp": weights_of_layer(seed)} | {name: attention_weights(seed + len(name)) for name in names}

    weights = {
        "embedding": numbers(1, VOCABULARY, WIDTH),
        "head": numbers(2, WIDTH, VOCABULARY),
        "encoder": stacked(lambda i: block(20 * i, "attention")),
        "decoder": stacked(lambda i: block(20 * i + 50, "attention", "cross")),
    }
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-4))
    return trained(loss, weights, {"source": words(3), "target": words(4, LENGTH + 1)}, optimizer)


def two_losses():
    """A generator and a discriminator, each with a gradient of its own through both."""

    def made(weights, x):
        for one in weights:
            x = layer(one, x)
        return x

    def judged(weights, x):
        return made(weights["layers"], x) @ weights["head"]

    def step(state, batch, key):
        noise = jax.random.normal(key, batch["x"].shape)

        def of_judge(weights):
            right = jax.nn.softplus(-judged(weights, batch["x"]))
            return jnp.mean(right + jax.nn.softplus(judged(weights, lax.stop_gradient(made(state["maker"], noise)))))

        def of_maker(weights):
            return jnp.mean(jax.nn.softplus(-judged(state["judge"], made(weights, noise))))

        losses, gradients = {}, {}
        for name, loss in (("judge", of_judge), ("maker", of_maker)):
            losses[name], gradients[name] = jax.value_and_grad(loss)(state[name])
        return jax.tree.map(lambda w, g: w - 0.05 * g, state, gradients), losses["judge"] + losses["maker"]

    judge = {"layers": [weights_of_layer(i) for i in (20, 30)], "head": numbers(9, WIDTH, 1)}
    return step, {"judge": judge, "maker": [weights_of_layer(i) for i in (0, 10)]}, {"x": numbers(5, ROWS, WIDTH)}


def low_rank_adapters():
    """A frozen model of which small adapters are trained."""
    loss, frozen, batch = language_model()

    def adapted(adapters, frozen, batch, key):
        layers = [
            {**one, "up": one["up"] + a["down"] @ a["up"]} for one, a in zip(frozen["layers"], adapters, strict=True)
        ]
        return loss({**frozen, "layers": layers}, batch, key)

    def step(state, batch, key):
        value, gradients = jax.value_and_grad(adapted)(state["adapters"], state["frozen"], batch, key)
        made = jax.tree.map(lambda w, g: w - 0.5 * g, state["adapters"], gradients)
        return {"adapters": made, "frozen": state["frozen"]}, value

    adapters = [{"down": numbers(60 + i, WIDTH, 2), "up": numbers(70 + i, 2, 2 * WIDTH)} for i in range(4)]
    return step, {"adapters": adapters, "frozen": frozen}, batch


def model_of(name):
    """A recipe as the models of tests are: a batch and a key per step."""
    step, state, batch = RECIPES[name]()
    return SimpleNamespace(
        step=lambda state, given: step(state, *given), state=state, batches=lambda i: (batch, jax.random.key(i))
    )


RECIPES = {
    "adapters": low_rank_adapters,
    "auxiliary losses": auxiliary_losses,
    "averaged": averaged,
    "clipped with a schedule": clipped_with_a_schedule,
    "conv unet": conv_unet,
    "dropout in every layer": dropout_in_every_layer,
    "encoder decoder": encoder_decoder,
    "mixture with a shared embedding": mixture_with_a_shared_embedding,
    "ragged depth": ragged_depth,
    "scaled loss": scaled_loss,
    "scanned encoder decoder": scanned_encoder_decoder,
    "two losses": two_losses,
    "vision transformer": vision_transformer,
}
