"""Every optimizer of optax and optax.contrib, planned without a rule of its own: does it train, and what is compiled?

    python benchmarks/optimizers.py                     # all; writes docs/benchmarks/optimizers.md
    python benchmarks/optimizers.py --only muon adam    # a part; only prints it

Plans a step of a few unrolled layers for eight CPU devices, compiles and runs it, and compares losses and weights with
those of one device. Takes minutes.
"""

import argparse
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib as contrib

from autoshard import autoshard
from autoshard.layout import axes_of, shards

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "optimizers.md"
STEPS = 3
RTOL = 2e-3  # of losses: sums over devices are rounded in another order, and optimizers divide by what they sum

# Name -> the transformation. What a step knows (loss, gradient, loss function) goes to each `update`; most ignore it.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    **{
        name: functools.partial(getattr(optax, name), 1e-3)
        for name in (
            *("adabelief", "adadelta", "adafactor", "adagrad", "adam", "adamax", "adamaxw", "adamw", "adan", "amsgrad"),
            *("fromage", "lamb", "lars", "lion", "nadam", "nadamw", "novograd", "optimistic_adam_v2"),
            *("optimistic_gradient_descent", "polyak_sgd", "radam", "rmsprop", "rprop", "sgd", "sign_sgd", "signum"),
            *("sm3", "yogi"),
        )
    },
    **{
        name: functools.partial(getattr(contrib, name), 1e-3)
        for name in (
            *("acprop", "ademamix", "adopt", "dadapt_adamw", "galore", "madgrad", "momo", "momo_adam", "muon"),
            *("prodigy", "schedule_free_adamw", "schedule_free_sgd", "simplified_ademamix", "sophia"),
        )
    },
    "cocob": contrib.cocob,
    "dog": lambda: optax.chain(contrib.dog(), optax.scale(0.1)),
    "dowg": lambda: optax.chain(contrib.dowg(), optax.scale(0.1)),
    "dpsgd": lambda: contrib.dpsgd(1e-3, l2_norm_clip=1.0, noise_multiplier=0.1, seed=0),
    "lbfgs": lambda: optax.lbfgs(linesearch=optax.scale_by_zoom_linesearch(max_linesearch_steps=4)),
    "mechanize": lambda: contrib.mechanize(optax.adamw(1e-3)),
    "noisy_sgd": lambda: optax.noisy_sgd(1e-3, seed=0),
    "normalize": lambda: optax.chain(contrib.normalize(), optax.sgd(1e-3)),
    "optimistic_adam": lambda: optax.optimistic_adam_v2(1e-3, beta=0.9),
    "reduce_on_plateau": lambda: optax.chain(optax.adam(1e-3), contrib.reduce_on_plateau()),
    "sam": lambda: contrib.sam(optax.sgd(1e-3), optax.chain(contrib.normalize(), optax.sgd(1e-2))),
    "schedule_free": lambda: contrib.schedule_free(optax.sgd(1e-3), 1e-3),
    "sgd, momentum": lambda: optax.sgd(1e-3, momentum=0.9, nesterov=True),
    "adafactor, small": lambda: optax.adafactor(1e-3, min_dim_size_to_factor=16),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 5),
    "chain with clipping and decay": lambda: optax.chain(
        optax.clip_by_global_norm(1.0), optax.scale_by_adam(), optax.add_decayed_weights(1e-2), optax.scale(-1e-3)
    ),
    "ema": lambda: optax.chain(optax.adam(1e-3), optax.ema(0.9)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(1e-3),
    "masked": lambda: optax.masked(optax.adamw(1e-3), lambda params: jax.tree.map(lambda w: w.ndim > 1, params)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 2),
    # Transformations beside optimizers.
    "adaptive_grad_clip": lambda: optax.chain(optax.adaptive_grad_clip(0.01), optax.adam(1e-3)),
    "add_noise": lambda: optax.chain(optax.add_noise(0.01, 0.55, seed=0), optax.adam(1e-3)),
    "apply_every": lambda: optax.chain(optax.adam(1e-3), optax.apply_every(2)),
    "centralize": lambda: optax.chain(optax.centralize(), optax.sgd(1e-3)),
    "conditionally_transform": lambda: optax.conditionally_transform(
        optax.adam(1e-3), lambda count, *_, **__: count % 2 == 0
    ),
    "flatten": lambda: optax.flatten(optax.adam(1e-3)),
    "keep_params_nonnegative": lambda: optax.chain(optax.adam(1e-3), optax.keep_params_nonnegative()),
    "lookahead": lambda: optax.lookahead(optax.adam(1e-3), sync_period=2, slow_step_size=0.5),
    "scale_by_backtracking_linesearch": lambda: optax.chain(
        optax.sgd(1.0), optax.scale_by_backtracking_linesearch(max_backtracking_steps=4)
    ),
    "scale_by_param_block_rms": lambda: optax.chain(optax.scale_by_param_block_rms(), optax.sgd(1e-3)),
    "scale_by_stddev": lambda: optax.chain(optax.scale_by_stddev(), optax.scale(-1e-3)),
    "selective_transform": lambda: optax.selective_transform(
        optax.adam(1e-3), freeze_mask={"layers": [{"up": True, "bias": False, "down": False}] * 3, "head": False}
    ),
    "skip_not_finite": lambda: optax.MultiSteps(optax.adam(1e-3), 1, should_skip_update_fn=optax.skip_not_finite),
    "zero_nans": lambda: optax.chain(optax.zero_nans(), optax.clip_by_block_rms(1.0), optax.adam(1e-3)),
    "partition": lambda: optax.partition(
        {"matrix": contrib.muon(1e-3), "rest": optax.adam(1e-3)},
        lambda params: jax.tree.map(lambda w: "matrix" if w.ndim == 2 else "rest", params),
    ),
}


@dataclass(frozen=True)
class Sizes:
    """Of the layers that are trained."""

    layers: int = 3
    width: int = 128
    hidden: int = 512
    batch: int = 128


@dataclass(frozen=True)
class Row:
    """What became of one optimizer."""

    name: str
    seconds: float  # to plan
    gap: float
    share: float  # bytes of the state on one device, of all bytes of the state
    step_seconds: float  # predicted
    fsdp: float | None  # predicted for FSDP; None: there is none
    sent: tuple[float, float]  # bytes of collectives of a step: predicted, compiled
    peak: tuple[float, float]  # bytes per device: predicted, compiled
    off: float  # by how much a loss differs from that of one device, as a share

    def __str__(self) -> str:
        faster = "" if self.fsdp is None else f"{self.step_seconds / self.fsdp:.2f}"
        (sent, found), (peak, held) = self.sent, self.peak
        return (
            f"{self.name} | {self.seconds:.1f} | {self.gap:.1%} | {self.share:.0%} | {self.step_seconds * 1e3:.2f} "
            f"| {faster} | {sent / 2**20:.2f} / {found / 2**20:.2f} | {peak / 2**20:.2f} / {held / 2**20:.2f} "
            f"| {self.off:.0e}"
        )


def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    for layer in params["layers"]:
        x = x + jnp.tanh(x @ layer["up"] + layer["bias"]) @ layer["down"]
    return jnp.mean((x @ params["head"] - y) ** 2)


def train_step(optimizer: Any, name: str) -> Callable[..., Any]:
    """A step of an optimizer, from and to parameters and state."""
    per_example = name == "dpsgd"  # it clips the gradient of each example

    def step(params: Any, state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, Any, jax.Array]:
        trained = params.fast if name == "lookahead" else params
        loss, gradients = jax.value_and_grad(loss_of)(trained, x, y)
        if per_example:
            gradients = jax.vmap(jax.grad(lambda p, x, y: loss_of(p, x[None], y[None])), (None, 0, 0))(params, x, y)
        known = {"value": loss, "grad": gradients, "value_fn": lambda p: loss_of(p, x, y)}
        if name in ("sam", "sophia"):  # these take nothing that they do not know
            known = {"obj_fn": lambda p: loss_of(p, x, y)} if name == "sophia" else {}
        updates, state = optax.with_extra_args_support(optimizer).update(gradients, state, params, **known)
        return optax.apply_updates(params, updates), state, loss

    return step


def start(name: str, sizes: Sizes, optimizer: Any) -> tuple[Any, Any, np.ndarray, np.ndarray]:
    """Parameters, state and a batch."""
    rng = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=(rows, columns)) / rows**0.5, jnp.float32)

    layers = [
        {
            "up": matrix(sizes.width, sizes.hidden),
            "bias": jnp.zeros(sizes.hidden) + 0.01,
            "down": matrix(sizes.hidden, sizes.width),
        }
        for _ in range(sizes.layers)
    ]
    params: Any = {"layers": layers, "head": matrix(sizes.width, 16)}
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
    x = rng.normal(size=(sizes.batch, sizes.width)).astype(np.float32)
    return params, optimizer.init(params), x, rng.normal(size=(sizes.batch, 16)).astype(np.float32)


def row_of(name: str, sizes: Sizes = Sizes(), compares: bool = True) -> Row:
    """One optimizer, planned, trained and compared with one device.

    Args:
        compares: whether to find what FSDP would cost, which takes a search.

    Raises:
        AssertionError: it does not train as on one device.
    """
    optimizer = OPTIMIZERS[name]()
    step = train_step(optimizer, name)
    mesh = jax.make_mesh((4, 2), ("data", "model"), devices=jax.devices()[:8])
    params, state, x, y = start(name, sizes, optimizer)
    plain, sharded = jax.jit(step), autoshard(step, mesh=mesh, topology="cpu:8", donate_argnums=(0, 1))
    begin = time.perf_counter()
    plan = sharded.plan(params, state, x, y)
    seconds = time.perf_counter() - begin
    ours, theirs, off = (params, state), (params, state), 0.0
    for _ in range(STEPS):
        *ours, loss = sharded(*ours, x, y)
        *theirs, expected = plain(*theirs, x, y)
        off = max(off, abs(float(loss) - float(expected)) / abs(float(expected)))
    assert off < RTOL, f"{name}: losses differ by {off:.1e}"
    found = plan.verify()
    carried = [plan.arguments[i] for i in plan.carried]
    whole = sum(array.local_bytes * shards(axes_of(array.layout), mesh.shape) for array in carried)
    fsdp = plan.alternatives.get("FSDP") if compares else None
    return Row(
        name,
        seconds,
        plan.gap,
        sum(array.local_bytes for array in carried) / whole,
        plan.predicted.step_seconds,
        fsdp and fsdp.step_seconds,
        (sum(found.predicted.values()), sum(found.actual.values())),
        (found.predicted_peak, found.actual_peak),
        off,
    )


HEAD = """# Optimizers

Written by `python benchmarks/optimizers.py`. An update is planned as any other
computation. Each row is a step of {layers} unrolled layers of width {width} on a (4, 2) mesh of CPU devices, compiled
and run {steps} times. Losses are those of one device up to rounding. The state is weights and moments.

"""
COLUMNS = (
    *("optimizer", "planned in s", "gap", "state per device", "predicted ms", "of FSDP"),
    *("MiB sent: predicted / compiled", "peak MiB: predicted / compiled", "losses differ by"),
)
NOTE = """
Every plan is proven optimal, and every compiled program has the bytes of collectives that are predicted. `sophia` takes
the loss as `obj_fn`, `lbfgs` as `value_fn`, here in line searches of at most four steps. `dpsgd` takes the gradient of
every example. Peaks of `muon` and of what adds noise are predicted too low on CPU.
`lookahead` keeps two copies of the weights. Rows behind `sgd, momentum` are transformations beside Adam or SGD.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=list(OPTIMIZERS), choices=list(OPTIMIZERS))
    chosen = parser.parse_args().only
    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for name in chosen:
        rows.append(str(row_of(name)))
        print(rows[-1], flush=True)
    if chosen == list(OPTIMIZERS):
        sizes = Sizes()
        head = HEAD.format(layers=sizes.layers, width=sizes.width, steps=STEPS)
        head += f"{' | '.join(COLUMNS)}\n{' | '.join(['---', *['--:'] * (len(COLUMNS) - 1)])}\n"
        PAGE.write_text(head + "".join(f"{row}\n" for row in rows) + NOTE)


if __name__ == "__main__":
    main()
