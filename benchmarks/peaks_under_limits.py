"""How true plans come: predicted collectives and peak memory beside those of the compiled program, on 8 CPU devices.

    python benchmarks/peaks_under_limits.py                             # the test models, all memory free
    python benchmarks/peaks_under_limits.py --shares 0.3 0.7            # and under limits between least and free peak
    python benchmarks/peaks_under_limits.py --models gpt tied --meshes 8

Prints a row per plan: whether the collectives agree in kind, axes and bytes, and by how much the predicted peak is off.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from oracles import MACHINES, MESHES, SMALL, limit_between, mesh_of  # noqa: E402  (needs the path above)

from autoshard import AutoshardError, plan  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(SMALL), choices=SMALL)
    parser.add_argument("--meshes", nargs="*", default=["8", "4x2"], choices=MESHES)
    parser.add_argument("--shares", nargs="*", type=float, default=[], help="of the way from least to free memory")
    chosen = parser.parse_args()
    heads = f"{'model':10} {'mesh':6} {'machine':11} {'limit':>6} {'status':9} {'collectives':12}"
    print(f"{heads} {'peak':>7} {'seconds':>8}")
    errors, agreed = [], 0
    for name, mesh, machine in itertools.product(chosen.models, chosen.meshes, MACHINES):
        model, axes = SMALL[name](), MESHES[mesh]
        options = {"mesh": mesh_of(axes), "topology": MACHINES[machine](axes), "donate_argnums": 0}
        for share in (None, *chosen.shares):
            limit = {} if share is None else {"memory": limit_between(model, share, **options)}
            start = time.perf_counter()
            try:
                made = plan(model.step, model.state, model.batches(0), **options, **limit)
            except AutoshardError as error:
                print(f"{name:10} {mesh:6} {machine:11} {share or 'none':>6} {type(error).__name__}")
                continue
            seconds = time.perf_counter() - start
            found = made.verify()
            errors.append(found.predicted_peak / found.actual_peak - 1)
            agreed += found.collectives_agree
            agree = "agree" if found.collectives_agree else "differ"
            over = " over the limit" if found.actual_peak > made.memory else ""
            print(
                f"{name:10} {mesh:6} {machine:11} {share or 'none':>6} {made.status:9} {agree:12} {errors[-1]:+7.1%} "
                f"{seconds:8.1f}{over}",
                flush=True,
            )
    within = sum(abs(error) <= 0.2 for error in errors)
    print(f"\n{len(errors)} plans: collectives agree in {agreed}; the peak is within 20% in {within}, ", end="")
    print(f"from {min(errors):+.1%} to {max(errors):+.1%}")


if __name__ == "__main__":
    main()
