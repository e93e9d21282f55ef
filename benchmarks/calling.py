"""What a call of a decorated step costs beside one of `jax.jit` with the same shardings.

    python benchmarks/calling.py [--leaves 500] [--devices 1 8]

A step over many small arrays and some work, donated and carried over, as a train step's state is. Both are called in
turns, in blocks; printed are medians, the median of the ratios of neighbouring blocks, and what our side of a call
takes: a call with a step in place of the compiled one that does nothing.
"""

import argparse
import dataclasses
import itertools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

BLOCK, ROUNDS = 20, 25


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=500)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--work", type=int, default=160, help="rows of the matrix that every step multiplies by itself")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    print(f"{'devices':>8}{'leaves':>8}{'jax.jit ms':>12}{'ours ms':>10}{'ratio':>8}{'our side us':>13}")
    for count in options.devices:
        plain, ours, ratio, side = measured(count, options.leaves, options.work)
        columns = f"{plain * 1e3:>12.3f}{ours * 1e3:>10.3f}{ratio:>8.3f}{side * 1e6:>13.1f}"
        print(f"{count:>8}{options.leaves:>8}{columns}")


def measured(devices: int, leaves: int, work: int) -> tuple[float, float, float, float]:
    """Seconds of one call of `jax.jit`, and of the decorated step; their ratio; seconds of our side alone."""
    from autoshard import autoshard

    mesh = jax.make_mesh((devices,), ("data",), devices=jax.devices()[:devices])

    def step(state, batch):
        moved = jax.tree.map(lambda x: x * 0.999, state["leaves"])
        return {"leaves": moved, "matrix": jnp.tanh(state["matrix"] @ state["matrix"])}, batch.sum()

    def state():
        rng = np.random.default_rng(0)
        return {
            "leaves": [jnp.asarray(rng.normal(size=8), jnp.float32) for _ in range(leaves)],
            "matrix": jnp.asarray(rng.normal(size=(work, work)) * 0.01, jnp.float32),
        }

    batch = jnp.ones((8, 8))
    ours = autoshard(step, mesh=mesh, donate_argnums=0)
    plan = ours.plan(state(), batch)
    in_shardings, out_shardings = plan.in_shardings, plan.out_shardings
    plain = jax.jit(step, in_shardings=in_shardings, out_shardings=out_shardings, donate_argnums=0)
    batch = jax.device_put(batch, in_shardings[1])
    states = {fn: jax.device_put(state(), in_shardings[0]) for fn in (plain, ours)}
    times: dict = {plain: [], ours: []}
    for _ in range(ROUNDS + 1):  # the first compiles
        for fn, taken in times.items():
            carried = states[fn]
            start = time.perf_counter()
            for _ in range(BLOCK):
                carried, _ = fn(carried, batch)
            jax.block_until_ready(carried)
            taken.append((time.perf_counter() - start) / BLOCK)
            states[fn] = carried
    by_jit, by_us = (taken[1:] for taken in times.values())
    ratio = statistics.median(itertools.starmap(lambda a, b: b / a, zip(by_jit, by_us, strict=True)))
    side = our_side(ours, states[ours], batch)
    return statistics.median(by_jit), statistics.median(by_us), ratio, side


def our_side(decorated, state, batch) -> float:
    """Seconds of a call that runs nothing: less those of flattening and unflattening, which `jax.jit` does too."""
    results, tree = jax.tree.flatten((state, batch.sum()))
    call = decorated._last
    call.compiled = dataclasses.replace(call.compiled, step=lambda *leaves: results)

    def seconds(fn) -> float:
        def block() -> float:
            start = time.perf_counter()
            for _ in range(BLOCK):
                fn()
            return (time.perf_counter() - start) / BLOCK

        return statistics.median(block() for _ in range(ROUNDS))

    flat = seconds(lambda: jax.tree.unflatten(tree, jax.tree.flatten((state, batch))[0]))
    return seconds(lambda: decorated(state, batch)) - flat


if __name__ == "__main__":
    main()
