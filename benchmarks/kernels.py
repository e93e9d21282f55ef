"""What operations of a GPU take however little they do, sorts, factorizations, and the host's link: timed.

    python benchmarks/kernels.py                   # on the device at hand
    python benchmarks/kernels.py --sorts           # these alone; so do --factorizations, --kernels and --host

Small operations stand one after the other in the turns of a loop, 4 and 8 of a kind: the difference is four operations,
and what a turn takes without any is the loop itself. `model/xla/operations.py` has the constant.
"""

import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

ROWS, WIDTH = 64, 256  # of the arrays: next to no work
FEW, MANY = 4, 8  # operations in a turn
TURNS, ROUNDS = 300, 5  # of a loop; of which the median counts
SORTED, LENGTHS = 2**24, (2**7, 2**10, 2**13, 2**16, 2**20, 2**24)  # elements in all, and of a row
ORDERS, BATCHES = (16, 32, 64, 256, 1024, 4096), (1, 8, 64, 512)  # of matrices
MOST_ELEMENTS = 2**26  # of matrices in all
MOST_SECONDS = 0.25  # of a factorization; larger matrices are not tried
SIZES = 2**20, 2**24, 2**28, 2**30  # bytes that go to the host's memory and come back


def seconds(run: Callable[..., Any], *args: Any) -> float:
    """The median of some runs."""
    jax.block_until_ready(run(*args))
    taken = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        jax.block_until_ready(run(*args))
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def kernels() -> None:
    """What an operation of each kind takes in a loop, and a turn of the loop."""
    weights = jax.random.normal(jax.random.key(0), (WIDTH, WIDTH)) / WIDTH**0.5
    kinds = {
        "product": lambda x: x @ weights,
        "reduction of rows": lambda x: x / (1 + jnp.abs(x).sum(-1, keepdims=True)),
        "reduction of columns": lambda x: x / (1 + jnp.abs(x).sum(0, keepdims=True)),
        "product and softmax": lambda x: jax.nn.softmax(x @ weights),
    }

    def turn(operation, count, x, _):
        for _ in range(count):
            x = operation(x)
        return x, None

    x = jnp.ones((ROWS, WIDTH))
    print("kind | operation us | turn us\n--- | --: | --:")
    for kind, operation in kinds.items():
        few, many = (
            seconds(jax.jit(partial(jax.lax.scan, partial(turn, operation, count), xs=None, length=TURNS)), x) / TURNS
            for count in (FEW, MANY)
        )
        each = (many - few) / (MANY - FEW)
        print(f"{kind} | {each * 1e6:.2f} | {(few - FEW * each) * 1e6:.2f}", flush=True)


def sorts() -> None:
    """What sorts of rows take per element, by what they sort and how long the rows are."""
    kinds = {  # dtype, function of an array
        "float32": (jnp.float32, jnp.sort),
        "float32, unstable": (jnp.float32, partial(jax.lax.sort, is_stable=False)),
        "bfloat16": (jnp.bfloat16, jnp.sort),
        "int32": (jnp.int32, jnp.sort),
        "float32, positions": (jnp.float32, jnp.argsort),
        "float32 and another": (jnp.float32, lambda x: jax.lax.sort((x, x + 1), num_keys=1)),
        "largest 64 of float32": (jnp.float32, lambda x: jax.lax.top_k(x, 64)),
    }
    print("\nsorted | " + " | ".join(f"rows of {length} ps" for length in LENGTHS) + "\n---" + " | --:" * len(LENGTHS))
    for kind, (dtype, function) in kinds.items():
        cells = []
        for length in LENGTHS:
            x = (jax.random.normal(jax.random.key(0), (SORTED // length, length)) * 1e6).astype(dtype)
            cells.append(f"{seconds(jax.jit(function), x) / SORTED * 1e12:.1f}")
        print(" | ".join([kind, *cells]), flush=True)


def factorizations() -> None:
    """What factorizations and solves take, by the matrices' order and how many there are."""
    columns = partial(jax.lax.linalg.triangular_solve, left_side=True, lower=True)
    kinds = {  # rows per column, function of matrices, symmetric ones among them
        "cholesky": (1, lambda x, s: jax.lax.linalg.cholesky(s, symmetrize_input=False)),
        "lu": (1, lambda x, s: jax.lax.linalg.lu(x)[0]),
        "qr": (1, lambda x, s: jax.lax.linalg.qr(x, full_matrices=False)),
        "qr of tall": (4, lambda x, s: jax.lax.linalg.qr(x, full_matrices=False)),
        "eigh": (1, lambda x, s: jax.lax.linalg.eigh(s, symmetrize_input=False)),
        "eigenvalues": (1, lambda x, s: jnp.linalg.eigvalsh(s, symmetrize_input=False)),
        "svd": (1, lambda x, s: jax.lax.linalg.svd(x, full_matrices=False)),
        "svd of tall": (4, lambda x, s: jax.lax.linalg.svd(x, full_matrices=False)),
        "singular values": (1, lambda x, s: jax.lax.linalg.svd(x, compute_uv=False)),
        "triangular_solve": (1, lambda x, s: columns(s, x)),
        "triangular_solve of one": (1, lambda x, s: columns(s, x[..., :1])),
        "tridiagonal_solve": (1, lambda x, s: jax.lax.linalg.tridiagonal_solve(x[..., 0], x[..., 1] + 4, s[..., 0], x)),
    }
    print(
        "\nfactorization | matrices | "
        + " | ".join(f"{order} us" for order in ORDERS)
        + "\n--- | --:"
        + " | --:" * len(ORDERS)
    )
    for (kind, (tall, function)), count in itertools.product(kinds.items(), BATCHES):
        cells = list[str]()
        for order in ORDERS:
            shape = (count, tall * order, order)
            if math.prod(shape) > MOST_ELEMENTS or (cells and float(cells[-1]) > MOST_SECONDS * 1e6):
                break
            cells.append(f"{seconds(jax.jit(function), *_matrices(shape)) * 1e6:.0f}")
        print(" | ".join([kind, str(count), *cells]), flush=True)


@partial(jax.jit, static_argnums=0)
def _matrices(shape: tuple[int, int, int]) -> tuple[jax.Array, jax.Array]:
    """Random ones, and symmetric positive definite ones of as many columns."""
    x = jax.random.normal(jax.random.key(0), shape)
    square = x[:, : shape[2]]
    return x, jnp.eye(shape[2]) * shape[2] + square @ square.mT


def host_link() -> None:
    """Bytes per second from the device's memory to the host's, and back."""
    mesh = jax.make_mesh((1,), ("x",))
    device, host = (NamedSharding(mesh, PartitionSpec(), memory_kind=kind) for kind in ("device", "pinned_host"))
    here = partial(jax.jit, lambda x: jax.device_put(x, device), in_shardings=host, out_shardings=device)()
    there = partial(jax.jit, lambda x: jax.device_put(x, host), in_shardings=device, out_shardings=host)()
    print("\nbytes | to the host GB/s | back GB/s\n--: | --: | --:")
    for size in SIZES:
        x = jax.device_put(jnp.ones(size // 4), device)
        down, up = seconds(there, x), seconds(here, there(x))
        print(f"{size} | {size / down / 1e9:.1f} | {size / up / 1e9:.1f}", flush=True)


if __name__ == "__main__":
    print(jax.devices()[0].device_kind, "with JAX", jax.__version__)
    parts = {"--kernels": kernels, "--sorts": sorts, "--factorizations": factorizations, "--host": host_link}
    for part in [parts[name] for name in sys.argv[1:]] or parts.values():
        part()
