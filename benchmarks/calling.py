"""What a call of a decorated step costs beside one of `jax.jit` with the same shardings.

    python benchmarks/calling.py [--leaves 500] [--devices 1 8]

A step over many small arrays and some work, donated and carried over, as a train step's state is. Both are called in
turns, in blocks. Where a compiled program and its arrays happen to lie makes several percent, so there are several of
each. Printed are medians, the ratio of ours to `jax.jit`, that of other programs of `jax.jit` to the first ones, to
show how much of it is noise, and what our side of a call takes: a call with a step that does nothing in place of the
compiled one.
"""

import argparse
import functools
import random
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

BLOCK, ROUNDS = 40, 15
PROGRAMS = 8  # of each kind, one after the other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--leaves", type=int, default=500)
    parser.add_argument("--devices", type=int, nargs="*", default=[1, 8])
    parser.add_argument("--work", type=int, default=160, help="rows of the matrix that every step multiplies by itself")
    options = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", max(options.devices))
    columns = ("devices", "leaves", "jax.jit ms", "ours ms", "ratio", "jit to itself", "our side us")
    print(" | ".join(columns))
    for count in options.devices:
        plain, ours, ratio, noise, side = measured(count, options.leaves, options.work)
        times = f"{plain * 1e3:.3f} | {ours * 1e3:.3f} | {ratio:.3f} | {noise:.3f} | {side * 1e6:.1f}"
        print(f"{count} | {options.leaves} | {times}")


def measured(devices: int, leaves: int, work: int) -> tuple[float, float, float, float, float]:
    """Seconds of one call of `jax.jit`, and of the decorated step; their ratio, and that of `jax.jit` to itself;
    seconds of our side alone."""
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

    times: dict[str, list[float]] = {"plain": [], "ours": [], "itself": []}
    sides = []
    for _ in range(PROGRAMS):
        batch = jnp.ones((8, 8))
        ours = autoshard(step, mesh=mesh, donate_argnums=0)
        plan = ours.plan(state(), batch)
        options = {"in_shardings": plan.in_shardings, "out_shardings": plan.out_shardings, "donate_argnums": 0}
        steps = {"ours": ours} | {
            name: jax.jit(functools.wraps(step)(lambda *args: step(*args)), **options) for name in ("plain", "itself")
        }
        batch = jax.device_put(batch, plan.in_shardings[1])
        states = {name: jax.device_put(state(), plan.in_shardings[0]) for name in steps}
        taken: dict[str, list[float]] = {name: [] for name in steps}
        for n in range(ROUNDS + 1):  # the first compiles
            for name, fn in random.Random(n).sample(sorted(steps.items()), len(steps)):
                carried = states[name]
                start = time.perf_counter()
                for _ in range(BLOCK):
                    carried, _ = fn(carried, batch)
                jax.block_until_ready(carried)
                taken[name].append((time.perf_counter() - start) / BLOCK)
                states[name] = carried
        for name, blocks in taken.items():
            times[name].append(statistics.median(blocks[1:]))
        sides.append(our_side(ours, states["ours"], batch))
    by_jit, by_us, by_itself = map(statistics.median, times.values())
    return by_jit, by_us, by_us / by_jit, by_itself / by_jit, statistics.median(sides)


def our_side(decorated, state, batch) -> float:
    """Seconds of a call that runs nothing."""
    results = jax.tree.leaves((state, batch.sum()))
    decorated._last = decorated._last._replace(run=lambda *leaves: results)

    def block() -> float:
        start = time.perf_counter()
        for _ in range(BLOCK):
            decorated(state, batch)
        return (time.perf_counter() - start) / BLOCK

    return statistics.median(block() for _ in range(ROUNDS))


if __name__ == "__main__":
    main()
