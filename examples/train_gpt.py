"""Train a small GPT, written for one device, on every device there is.

    python examples/train_gpt.py                                 # all accelerators, or else 8 virtual CPU devices
    python examples/train_gpt.py --mesh 2x4 --memory 13MiB       # another mesh; less memory per device

The model and the step are plain flax nnx and optax. `autoshard` finds how to split them and shows what it found. Then
the same step runs under plain `jax.jit` on one device: the two loss curves must be the same.
"""

import argparse
import math
import time
from functools import partial
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autoshard import autoshard

VOCAB = 128  # ASCII
OPTIMIZER = optax.adamw(3e-3)  # one object: JAX takes a state with another for a state of another type
TEXT = np.frombuffer("\n".join(topics.values()).encode("ascii", "ignore"), np.uint8)  # Python's own manual, in English


class Block(nnx.Module):
    """Attention and MLP, each behind a layer norm."""

    def __init__(self, width, heads, rngs):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, use_bias=False, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Characters in, scores of the next character out."""

    def __init__(self, layers, width, heads, context, rngs):
        self.token = nnx.Embed(VOCAB, width, rngs=rngs)
        self.position = nnx.Embed(context, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.token(tokens) + self.position(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def train_step(state, batch):
    """One step of AdamW on next-character prediction."""
    model, optimizer = state

    def loss_of(model):
        logits = model(batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return (model, optimizer), loss


def init(options):
    """A fresh model and its optimizer, the same at every call."""
    model = GPT(options.layers, options.width, options.heads, options.context, nnx.Rngs(0))
    return model, nnx.Optimizer(model, OPTIMIZER, wrt=nnx.Param)


def batch_of(step, options):
    """`options.batch` random windows of the text; the same ones for the same step."""
    starts = np.random.default_rng(step).integers(len(TEXT) - options.context, size=(options.batch, 1))
    return TEXT[starts + np.arange(options.context + 1)].astype(np.int32)


def train(name, step, options, console):
    """Run `options.steps` steps under a live progress line; the trained model and the losses."""
    state, losses = init(options), []
    columns = [*Progress.get_default_columns()[:2], TimeElapsedColumn(), TextColumn("{task.fields[status]}")]
    with Progress(*columns, console=console) as progress:
        line = progress.add_task(f"{name:>9}", total=options.steps, status="compiling")
        for i in range(options.steps):
            state, loss = step(state, batch_of(i, options))
            losses.append(float(loss))
            if i == 0:
                start = time.perf_counter()  # after the compilation
            else:
                speed = i * options.batch * options.context / (time.perf_counter() - start)
                progress.update(line, status=f"loss {losses[-1]:.3f}  {speed:,.0f} tokens/s")
            progress.advance(line)
    return state[0], losses


def compare(losses, single, devices):
    """Both loss curves, side by side."""
    table = Table("step", f"{devices} devices", "1 device", "", title="Loss")
    for i in np.unique(np.linspace(0, len(losses) - 1, 12).astype(int)):
        bar = "█" * round(40 * losses[i] / max(losses))
        table.add_row(str(i + 1), f"{losses[i]:.5f}", f"{single[i]:.5f}", bar)
    return table


@partial(jax.jit, static_argnames="length")
def generate(model, window, length, key):
    """What the model writes after `window`."""

    def write(window, key):
        character = jax.random.categorical(key, model(window[None])[0, -1] / 0.7)
        return jnp.append(window[1:], character), character

    return jax.lax.scan(write, window, jax.random.split(key, length))[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", help="devices per mesh axis, such as 8, 4x2 or 2x2x2")
    parser.add_argument("--memory", help="limit per device, such as 13MiB; default: what the devices have")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    options = parser.parse_args()

    jax.config.update("jax_num_cpu_devices", 8)  # counts only where there is no accelerator
    count = jax.device_count()
    shape = [int(n) for n in (options.mesh or (f"{count // 2}x2" if count % 2 == 0 else str(count))).split("x")]
    mesh = jax.make_mesh(shape, ["data", "model", "third"][: len(shape)], devices=jax.devices()[: math.prod(shape)])
    console = Console()

    step = autoshard(train_step, mesh=mesh, memory=options.memory, donate_argnums=0)
    plan = step.plan(init(options), batch_of(0, options)).compare()
    console.print(str(plan), markup=False, highlight=False, soft_wrap=True)

    model, losses = train(f"{mesh.size} devices", step, options, console)
    _, single = train("1 device", jax.jit(train_step, donate_argnums=0), options, console)
    console.print(compare(losses, single, mesh.size))
    difference = max(abs(a - b) / b for a, b in zip(losses, single, strict=True))
    console.print(f"Largest relative difference between the two: {difference:.1e}")

    prompt = TEXT[: options.context].astype(np.int32)
    written = generate(jax.device_get(model), prompt, 200, jax.random.key(0))
    console.print(f"\nAfter {bytes(prompt.tolist())} the model writes:", markup=False, highlight=False)
    console.print(bytes(written.tolist()).decode(), markup=False, highlight=False)


if __name__ == "__main__":
    main()
