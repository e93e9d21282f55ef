"""What is predicted for steps on one device, beside what the device at hand takes: seconds, and the peak of its memory.

    python benchmarks/one_device.py                       # every model; prints the table
    python benchmarks/one_device.py --models gpt resnet   # some

No collective is in these steps: what is held against the device are compute, memory traffic and memory itself. Each
model runs in a process of its own, since an allocator only tells its peak since it started.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

WARM, ROUNDS, STEPS = 3, 5, 8  # steps before the clock starts; rounds, of which the median counts, of so many steps
SECONDS_WITHIN, PEAK_WITHIN = 2.0, 0.20
BATCHES = {  # what fits beside the optimizer's state on one device
    "gpt": {"batch": 8},
    "gpt remat": {"batch": 8},
    "gpt scan": {"batch": 8},
    "gpt scan remat": {"batch": 8},
    "moe": {"groups": 8},
    "vit": {"batch": 64},
    "resnet": {"batch": 128},
    "unet": {"batch": 16},
    "lstm": {"batch": 512},
}


@dataclass(frozen=True)
class Row:
    """One model, per step."""

    model: str
    device: str
    predicted_seconds: float
    seconds: float  # measured: median of rounds
    predicted_peak: int  # bytes
    compiled_peak: int  # bytes, by XLA's own analysis of the program
    peak: int  # bytes that the device's allocator held at most; 0 where it tells none

    @property
    def seconds_ratio(self) -> float:
        return self.predicted_seconds / self.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--one", choices=list(BATCHES), help="measures this model here, and prints its row as JSON")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(asdict(measured(options.one))))
        return
    print("model | predicted ms | measured ms | ratio | predicted MiB | compiled MiB | allocator MiB")
    print("--- | --- | --- | --- | --- | --- | ---")
    rows = []
    for model in options.models:
        command = [sys.executable, __file__, "--one", model]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            print(f"{model} | failed: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        rows.append(row := Row(**json.loads(done.stdout.splitlines()[-1])))
        print(written(row), flush=True)
    print(summary(rows))


def measured(name: str) -> Row:
    """The row of one model, planned for the first device of this process and run on it."""
    import jax
    import numpy as np
    from workloads import LARGE, Workload

    from autoshard import autoshard
    from autoshard.compiled.collectives import peak_bytes

    device = jax.devices()[0]
    mesh = jax.make_mesh((1,), ("data",), devices=[device])
    workload = LARGE[name]
    model = Workload(workload.family, {**workload.sizes, **BATCHES[name]}).model()
    step = autoshard(model.step, mesh=mesh, donate_argnums=0)
    batch = jax.device_put(model.batches(0), device)
    plan = step.plan(model.state, batch)
    compiled = step.lower(model.state, batch).compile()
    state = jax.tree.map(lambda x: jax.device_put(np.asarray(x), device), model.state)
    del model
    for _ in range(WARM):
        state, loss = step(state, batch)
    jax.block_until_ready((state, loss))
    rounds = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(STEPS):
            state, loss = step(state, batch)
        jax.block_until_ready((state, loss))
        rounds.append((time.perf_counter() - start) / STEPS)
    held = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    return Row(
        name,
        device.device_kind,
        plan.predicted.step_seconds,
        statistics.median(rounds),
        plan.predicted.peak_bytes,
        peak_bytes(compiled),
        held,
    )


def written(row: Row) -> str:
    """A line of the table."""
    seconds = f"{row.predicted_seconds * 1e3:.2f} | {row.seconds * 1e3:.2f} | {row.seconds_ratio:.2f}"
    peaks = " | ".join(f"{bytes_ / 2**20:.0f}" for bytes_ in (row.predicted_peak, row.compiled_peak, row.peak))
    return f"{row.model} | {seconds} | {peaks}"


def summary(rows: list[Row]) -> str:
    """How often predictions hold."""
    if not rows:
        return "nothing was measured"
    logs = [math.log(row.seconds_ratio) for row in rows]
    near = sum(abs(log) <= math.log(SECONDS_WITHIN) for log in logs)
    peaks = sum(abs(row.predicted_peak / row.compiled_peak - 1) <= PEAK_WITHIN for row in rows)
    return (
        f"\n{rows[0].device}: seconds within a factor of {SECONDS_WITHIN:g} in {near} of {len(rows)}, predicted over "
        f"measured {math.exp(statistics.mean(logs)):.2f} (geometric mean); peak within {PEAK_WITHIN:.0%} of the "
        f"compiled program's in {peaks}"
    )


if __name__ == "__main__":
    main()
