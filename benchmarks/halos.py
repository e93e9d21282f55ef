"""Random programs on split grids: numbers, and collectives as predicted, compiled, and of plain `jax.jit`.

    python benchmarks/halos.py                        # 40 programs on eight CPU devices in a row
    python benchmarks/halos.py --mesh 4 2 --first 100 --count 20

The programs are those of `tests/stencil_programs.py`. Argument and result are split over all axes, one axis a dim as
far as there are dims, else the first dim over all. A line per program says whether the numbers are those of one device,
and the bytes by kind. The exit status is 1 if numbers differ, or if predicted and compiled permutes do.
"""

import argparse
import os
import sys
from collections import Counter
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax  # noqa: E402
import numpy as np  # noqa: E402
from equality import assert_equal  # noqa: E402
from jax.sharding import AxisType, NamedSharding, PartitionSpec  # noqa: E402
from oracles import slow_chips  # noqa: E402
from stencil_programs import program  # noqa: E402

from autoshard import autoshard, verify  # noqa: E402


def kinds(collectives) -> dict[str, int]:
    found: Counter[str] = Counter()
    for one in collectives:
        found[one.kind] += one.bytes
    return dict(found)


def compared(seed: int, mesh: jax.sharding.Mesh) -> bool:
    """Prints a line about one program; whether all is as it should be."""
    name, run, shape = program(seed)
    axes = mesh.axis_names
    spec = PartitionSpec(*axes[: len(shape)]) if len(shape) >= len(axes) else PartitionSpec(axes)
    sharding = NamedSharding(mesh, spec)
    u = jax.random.normal(jax.random.key(seed), shape)
    expected = jax.jit(run)(u)
    step = autoshard(run, mesh=mesh, topology=slow_chips(axes), fixed={"*": spec})
    placed = jax.device_put(u, sharding)
    plan = step.plan(placed)
    checked = plan.verify()
    totals: Counter[str] = Counter()
    for (kind, _), size in checked.actual.items():
        totals[kind] += size
    plain = jax.jit(run, in_shardings=sharding, out_shardings=sharding)
    theirs: Counter[str] = Counter()
    for (kind, _), size in verify(plain, placed).actual.items():
        theirs[kind] += size
    try:
        assert_equal([np.asarray(step(placed))], [np.asarray(expected)])
        numbers = "equal"
    except AssertionError as error:
        numbers = f"DIFFER {str(error)[:200]}"
    predicted = kinds(plan.predicted.collectives)
    right = predicted == dict(totals)
    print(
        f"{name}: {numbers}; predicted {predicted} compiled {dict(totals)}{'' if right else ' !'} plain {dict(theirs)}"
    )
    sys.stdout.flush()
    return numbers == "equal" and right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mesh", type=int, nargs="+", default=[8])
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=40)
    args = parser.parse_args()
    axes = tuple("xyz"[: len(args.mesh)])
    mesh = jax.make_mesh(tuple(args.mesh), axes, axis_types=(AxisType.Auto,) * len(axes))
    results = [compared(seed, mesh) for seed in range(args.first, args.first + args.count)]
    print(f"{sum(results)} of {len(results)} programs are as predicted, with the numbers of one device")
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
