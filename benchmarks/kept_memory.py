"""What stays in memory of plans that are made, printed and dropped, beside what `jax.jit` keeps of the same shapes.

    python benchmarks/kept_memory.py [SIGNATURES]

Each way runs in a process of its own. Bytes are those that Python has given out, as `tracemalloc` counts them; what
remains after `jax.clear_caches()` is not JAX's.
"""

import gc
import multiprocessing
import sys
import tracemalloc

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

import autoshard

MESH = AbstractMesh((4, 2), ("data", "model"))
WEIGHTS = {"up": jax.ShapeDtypeStruct((64, 128), jnp.float32), "down": jax.ShapeDtypeStruct((128, 64), jnp.float32)}
WARM_UP = 10  # signatures: what is made once is no growth


def step(weights, x):
    def loss(weights):
        return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def planned(x):
    str(autoshard.autoshard(step, mesh=MESH, topology="cpu:8", donate_argnums=0).plan(WEIGHTS, x))


def traced(x):
    jax.jit(lambda *args: step(*args)).trace(WEIGHTS, x)


def report(way: str, signatures: int) -> None:
    for i in range(1, WARM_UP + signatures + 1):
        {"autoshard": planned, "jax.jit": traced}[way](jax.ShapeDtypeStruct((8 * i, 64), jnp.float32))
        if i == WARM_UP:
            gc.collect()
            tracemalloc.start(1)
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    jax.clear_caches()
    gc.collect()
    own = tracemalloc.get_traced_memory()[0]
    print(f"{way}: {signatures} signatures leave {kept / 2**20:.1f} MiB, {own / 2**20:.1f} without JAX's caches")


if __name__ == "__main__":
    signatures = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    for way in ("jax.jit", "autoshard"):
        process = multiprocessing.get_context("spawn").Process(target=report, args=(way, signatures))
        process.start()
        process.join()
