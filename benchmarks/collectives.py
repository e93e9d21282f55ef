"""How one all_reduce compares with the reduce_scatter and all_gather that it is made of, on 8 CPU devices.

Prints a table: bytes per device, seconds of each, their ratio. Both run in turns: noise disturbs both.
"""

import statistics
import time

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

ROUNDS = 15


def all_reduce(x):
    return jax.lax.psum(x, "x")


def two_halves(x):
    scattered = jax.lax.psum_scatter(x, "x", scatter_dimension=1, tiled=True)
    return jax.lax.all_gather(scattered, "x", axis=1, tiled=True)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("x")
    runs = [
        jax.jit(jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
        for fn in (all_reduce, two_halves)
    ]
    print(f"{'bytes':>10} {'all_reduce':>12} {'two halves':>12} {'ratio':>6}")
    for elements in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        x = jax.device_put(jnp.ones((8, elements), jnp.float32), NamedSharding(mesh, spec))
        seconds = [[], []]
        for _ in range(ROUNDS + 1):  # the first round compiles
            for run, times in zip(runs, seconds, strict=True):
                start = time.perf_counter()
                jax.block_until_ready(run(x))
                times.append(time.perf_counter() - start)
        whole, halves = (statistics.median(times[1:]) for times in seconds)
        print(f"{elements * 4:>10} {whole * 1e6:>10.0f}us {halves * 1e6:>10.0f}us {halves / whole:>6.2f}")


if __name__ == "__main__":
    main()
