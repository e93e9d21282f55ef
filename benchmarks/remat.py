"""What `remat="auto"` chooses beside every policy of `jax.checkpoint` and every number of microbatches, all compiled.

    python benchmarks/remat.py                                # Llama-8B and ViT-L on v5e:4x4, six limits: hours
    python benchmarks/remat.py --models tiny --machine h100:1x4 --mesh 4 1 --limits 0.003 --counts 1

A row per plan that fits: policy, microbatches, predicted and compiled seconds and peak. After each limit, by how much
the step that was chosen is slower than the fastest row. Policies are those that MaxText calls full and minimal, "dots"
for `dots_saveable`, and "none" for no mark. Limits are shares of the memory of a device.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from workloads import LLAMA_1B, TRAINED, Workload  # noqa: E402  (needs the path above)

from autoshard import AutoshardError, Plan, plan, topology  # noqa: E402

POLICIES: dict[str, Callable | bool] = {
    "none": False,
    "dots": jax.checkpoint_policies.dots_saveable,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": True,
}
TINY = {"d_model": 128, "heads": 4, "shared_heads": 2, "d_hidden": 512, "vocab": 256, "layers": 4}
MODELS = {
    "llama 8b": TRAINED["llama 8b scan"],
    "vit-l": TRAINED["vit-l scan"],
    "llama 1b": Workload("llama", LLAMA_1B | {"seq": 2048, "batch": 32, "scan": True}),
    "tiny": Workload("llama", TINY | {"seq": 128, "batch": 64, "scan": True}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["llama 8b", "vit-l"], choices=MODELS)
    parser.add_argument("--machine", default="v5e:4x4")
    parser.add_argument("--mesh", nargs=2, type=int, default=[4, 4])
    parser.add_argument("--limits", nargs="*", type=float, default=[0.4, 0.5, 0.6, 0.7, 0.85, 1.0])
    parser.add_argument("--counts", nargs="*", type=int, default=[1, 2, 4], help="of microbatches")
    chosen = parser.parse_args()
    axes = dict(zip(("data", "model"), chosen.mesh, strict=True))
    mesh = jax.sharding.AbstractMesh(tuple(axes.values()), tuple(axes))
    device = topology(chosen.machine, axes).memory_bytes
    print("| model | limit, GiB | policy | microbatches | predicted ms | compiled ms | predicted GiB | compiled GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in chosen.models:
        for share in chosen.limits:
            options = {"mesh": mesh, "topology": chosen.machine, "memory": share * device, "donate_argnums": 0}
            seconds = []
            for policy in POLICIES:
                for count in chosen.counts:
                    seconds.append(row(name, policy, count, {**options, "microbatches": count}))
            ours = row(name, "full", "auto", {**options, "remat": "auto", "microbatches": "auto"})
            fitting = [one for one in seconds if one is not None]
            if ours is not None and fitting:
                print(f"{name}, {share:.3g} of the memory: {ours / min(fitting) - 1:+.1%} of the fastest", flush=True)


def row(name: str, policy: str, count: Any, options: dict[str, Any]) -> float | None:
    """Compiled seconds of one plan, printed; None if it does not fit, as predicted or as compiled."""
    workload = MODELS[name]
    step = Workload(workload.family, {**workload.sizes, "remat": POLICIES[policy]}).abstract()
    label = "chosen" if "remat" in options else policy
    limit = options["memory"] / 2**30
    try:
        made: Plan = plan(step.step, step.state, step.batch, **options)
        found = made.verify(target=options["topology"])
    except AutoshardError as error:
        print(f"| {name} | {limit:.1f} | {label} | {count} | {type(error).__name__} |", flush=True)
        return None
    assert found.schedule is not None, "TPU and GPU programs have one"
    times = f"{made.predicted.step_seconds * 1e3:.4g} | {found.schedule.step_seconds * 1e3:.4g}"
    peaks = f"{found.predicted_peak / 2**30:.3g} | {found.actual_peak / 2**30:.3g}"
    print(f"| {name} | {limit:.1f} | {label} | {count} | {times} | {peaks} |", flush=True)
    return found.schedule.step_seconds if found.actual_peak <= options["memory"] else None


if __name__ == "__main__":
    main()
