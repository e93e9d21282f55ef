"""Plans of the tests' models, and what they took: on a quiet machine, and in a process that others starve.

    python benchmarks/busy.py --rows quiet.json                # every model on every machine, as fast as it goes
    python benchmarks/busy.py --rows busy.json --starved 2     # on one core, which two busy processes share
    python benchmarks/busy.py --compare quiet.json busy.json   # what differs: plans, or only what they took

Each model is planned by a process of its own for all machines, `--only` those with a word in their name. A row has the
CPU and wall seconds that solving took, the seconds per step, the proven gap, and a digest of all options chosen: two
rows have one digest if the plans are the same bit for bit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from rows import read_rows, write_rows  # noqa: E402

MACHINES = {  # name -> mesh
    "cpu:8": {"data": 4, "model": 2},
    "v5e:2x4": {"data": 2, "model": 4},
    "h100:1x8": {"x": 8},
}
CLOSE = 1e-6  # relative: costs that differ by less are called equal


@dataclass(frozen=True)
class Row:
    """One model planned once for one machine."""

    model: str
    machine: str
    options: int
    cpu_seconds: float  # of solving; formulating is left out
    wall_seconds: float
    step_seconds: float
    bound: float
    status: str
    digest: str  # of the choice


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="parts of the names of models")
    parser.add_argument("--machines", nargs="*", default=list(MACHINES))
    parser.add_argument("--rows", type=Path, help="a file of rows to add to")
    parser.add_argument("--starved", type=int, default=0, help="busy processes on the one core that planning gets")
    parser.add_argument("--time-limit", type=float, default=60.0)
    parser.add_argument("--compare", nargs=2, type=Path, help="two files of rows")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.compare:
        sys.exit(compared(*(read_rows(file, Row, key) for file in chosen.compare)))
    if chosen.one:
        for row in planned(chosen.one, chosen.machines, chosen.time_limit):
            print(json.dumps(asdict(row)), flush=True)
        return
    kept = read_rows(chosen.rows, Row, key)
    for name in steps():
        if chosen.only and not any(word in name for word in chosen.only):
            continue
        command = [sys.executable, __file__, "--one", name, "--time-limit", str(chosen.time_limit), "--machines"]
        with starving(chosen.starved):
            process = subprocess.Popen([*command, *chosen.machines], stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                row = Row(**json.loads(line))
                kept[key(row)] = row
                write_rows(chosen.rows, kept.values())
                print(described(row), flush=True)
            if process.wait():
                sys.exit(process.returncode)


def key(row: Row) -> tuple[str, str]:
    return row.model, row.machine


class starving:
    """While it lasts, this process and those it starts have one core, which so many busy processes share."""

    def __init__(self, count: int):
        self.count = count

    def __enter__(self) -> None:
        if not self.count:
            return
        self.cores = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(self.cores)})
        self.busy = [multiprocessing.Process(target=spin, daemon=True) for _ in range(self.count)]
        for process in self.busy:
            process.start()

    def __exit__(self, *_: Any) -> None:
        if not self.count:
            return
        for process in self.busy:
            process.kill()
        os.sched_setaffinity(0, self.cores)


def spin() -> None:
    while True:
        pass


def steps() -> dict[str, Any]:
    """Name -> a function that gives a step, its state and its batch, of which nothing is allocated."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from models import MODELS, MORE_MODELS
    from workloads import SMALL

    def abstract(make: Any) -> Any:
        model = make()
        shapes = jax.eval_shape(lambda: (model.state, model.batches(0)))
        return model.step, *shapes

    found = {name: lambda make=make: abstract(make) for name, make in {**MODELS, **MORE_MODELS}.items()}
    found |= {f"{name}, larger": workload.abstract for name, workload in SMALL.items()}
    for depth, width, residual in ((4, 1024, False), (6, 1024, True), (12, 1024, True), (24, 1024, True)):
        name = f"{depth} x {width}" + ", residual" * residual
        found[name] = lambda sizes=(depth, width, residual): stack(*sizes)
    return found | {"resnet-18": resnet_18}


def stack(depth: int, width: int, residual: bool, batch: int = 64) -> tuple[Any, Any, Any]:
    """A few dense layers."""
    import jax
    import jax.numpy as jnp

    def step(params, batch):
        def loss(params):
            y = batch
            for w in params:
                y = jax.nn.relu(y @ w) + (y if residual else 0)
            return (y**2).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], value

    def f32(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return step, [f32(width, width)] * depth, f32(batch, width)


def resnet_18() -> tuple[Any, Any, Any]:
    """The ResNet of two 3 x 3 convolutions per block (He et al. 2015), SGD with momentum."""
    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen as nn

    def normalized(features, kernel, stride, x):
        x = nn.Conv(features, (kernel, kernel), (stride, stride), use_bias=False)(x)
        return nn.BatchNorm(use_running_average=False, momentum=0.9)(x)

    class ResNet(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.max_pool(nn.relu(normalized(64, 7, 2, x)), (3, 3), strides=(2, 2), padding="SAME")
            for stage, features in enumerate((64, 128, 256, 512)):
                for block in range(2):
                    stride = 2 if stage and not block else 1
                    y = normalized(features, 3, 1, nn.relu(normalized(features, 3, stride, x)))
                    x = nn.relu(y + (x if x.shape == y.shape else normalized(features, 1, stride, x)))
            return nn.Dense(1000)(x.mean((1, 2)))

    model, optimizer = ResNet(), optax.sgd(0.1, momentum=0.9)

    def step(state, batch):
        params, statistics, moments = state

        def loss(params):
            variables = {"params": params, "batch_stats": statistics}
            logits, new = model.apply(variables, batch["images"], mutable="batch_stats")
            labels = batch["labels"]
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), new["batch_stats"]

        (value, new), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), new, moments), value

    images = jax.ShapeDtypeStruct((128, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    params = variables["params"]
    state = params, variables["batch_stats"], jax.eval_shape(optimizer.init, params)
    return step, state, {"images": images, "labels": jax.ShapeDtypeStruct((128,), jnp.int32)}


def planned(name: str, machines: list[str], time_limit: float) -> Iterator[Row]:
    """Rows of one model."""
    for machine in machines:
        formulation = formulation_of(name, machine)
        from autoshard.model.memory_limit import solve_within

        wall, cpu = time.monotonic(), time.process_time()
        solution = solve_within(formulation, time_limit)
        yield Row(
            model=name,
            machine=machine,
            options=sum(map(len, formulation.problem.costs)),
            cpu_seconds=time.process_time() - cpu,
            wall_seconds=time.monotonic() - wall,
            step_seconds=solution.cost,
            bound=solution.bound,
            status=solution.status,
            digest=hashlib.sha256(str(solution.choice).encode()).hexdigest()[:12],
        )


def formulation_of(name: str, machine: str) -> Any:
    """What a plan for a model on a machine is found from."""
    from autoshard import topology
    from autoshard.model.formulating import formulate
    from autoshard.model.xla.backends import CPU, H100, V5E
    from autoshard.program import trace
    from autoshard.propagation import rules_for

    step, state, batch = steps()[name]()
    mesh, target = MACHINES[machine], topology(machine, MACHINES[machine])
    program = trace(step, (state, batch), {}, donate_argnums=0)
    backend = CPU if machine.startswith("cpu") else V5E if machine.startswith("v") else H100
    return formulate(program, rules_for(program), mesh, target, memory=target.memory_bytes, backend=backend)


def described(row: Row) -> str:
    gap = (row.step_seconds - row.bound) / row.step_seconds
    return (
        f"{row.model:28} {row.machine:10} {row.options:7} options {row.cpu_seconds:6.1f} CPU s "
        f"{row.wall_seconds:6.1f} s  step {row.step_seconds * 1e3:.6g} ms, gap {gap:.3%}, {row.status}, {row.digest}"
    )


def compared(before: dict, after: dict) -> int:
    """Prints what differs; 1 where plans do, or costs or gaps are worse."""
    worse = 0
    for place in before.keys() & after.keys():
        old, new = before[place], after[place]
        costs_more = new.step_seconds > old.step_seconds * (1 + CLOSE)
        proves_less = new.status != "optimal" and new.bound / new.step_seconds < old.bound / old.step_seconds - CLOSE
        if old.digest == new.digest and not proves_less and not costs_more:
            continue
        marks = "COSTS MORE " * costs_more + "PROVES LESS " * proves_less
        print(f"{marks or 'another plan'}\n  {described(old)}\n  {described(new)}")
        worse += 1
    shared = before.keys() & after.keys()
    for word, rows in (("before", before), ("after", after)):
        print(f"{word}: {sum(rows[place].cpu_seconds for place in shared):.1f} CPU s of {len(shared)} rows")
    return int(bool(worse))


if __name__ == "__main__":
    main()
