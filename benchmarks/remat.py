"""What `remat="auto"` chooses beside every policy of `jax.checkpoint` and every number of microbatches, all compiled.

    python benchmarks/remat.py                                 # Llama-8B and ViT-L on v5e:4x4, six limits: hours
    python benchmarks/remat.py --models llama --machine h100:8 --mesh 4 2 --layers 8          # minutes

A row per plan that fits: policy, microbatches, predicted and compiled seconds and peak. After each limit, by how much
the step that was chosen is slower than the fastest row, and how many programs were compiled to choose it. Policies are
those that MaxText calls full and minimal, "dots" for `dots_saveable`, and "none" for no mark.

Limits are shares of what the step without marks holds under no limit, as compiled; those above a device's memory are
left out. A plan that is within a smaller limit is the plan for it, too, and each program is compiled once. `--known`
names a file that keeps what was compiled, for another run.
"""

import argparse
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax

jax.config.update("jax_platforms", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from workloads import LLAMA_1B, LLAMA_8B, TRAINED, Workload  # noqa: E402  (needs the path above)

from autoshard import AutoshardError, Plan, autoshard, plan, planning, topology  # noqa: E402
from autoshard import refine as refining  # noqa: E402
from autoshard.compiled.collectives import peak_bytes  # noqa: E402
from autoshard.compiled.verification import compiled  # noqa: E402
from autoshard.mesh.targets import target_mesh  # noqa: E402
from autoshard.options import Options  # noqa: E402
from autoshard.solver.verify import fits  # noqa: E402

POLICIES: dict[str, Callable | bool] = {
    "none": False,
    "dots": jax.checkpoint_policies.dots_saveable,
    "minimal": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "full": True,
}
SMALL = {"d_model": 1024, "heads": 8, "shared_heads": 4, "d_hidden": 3584, "vocab": 32768, "layers": 8}
BF16 = TRAINED["llama 8b scan"].sizes["dtype"]
MODELS = {
    "llama 8b": TRAINED["llama 8b scan"],
    "vit-l": TRAINED["vit-l scan"],
    "llama 1b": Workload("llama", LLAMA_1B | {"seq": 2048, "batch": 32, "scan": True, "dtype": BF16}),
    "llama": Workload("llama", SMALL | {"seq": 1024, "batch": 64, "scan": True, "dtype": BF16}),
    "llama long": Workload("llama", SMALL | {"seq": 4096, "batch": 16, "scan": True, "dtype": BF16}),
    "llama wide": Workload("llama", LLAMA_8B | {"seq": 2048, "batch": 16, "scan": True, "dtype": BF16, "layers": 8}),
    "gpt": Workload("gpt", {"d_model": 1024, "heads": 16, "vocab": 32768, "layers": 4, "seq": 1024, "batch": 64}),
}


@dataclass
class Compiler:
    """Compiles each program once, for a machine that is not there."""

    machine: str
    known: Path | None
    figures: dict[str, tuple[float, float]] = field(default_factory=dict)  # digest -> seconds, peak bytes
    asked: list[str] = field(default_factory=list)  # digests, since it was emptied

    def __post_init__(self) -> None:
        if self.known and self.known.exists():
            self.figures = json.loads(self.known.read_text())

    def of(self, made: Plan) -> tuple[float, float]:
        """Seconds per step and bytes per device; infinite where the compiler ran out of memory."""
        mesh = target_mesh(self.machine, dict(made.mesh.shape))
        lowered = made.lowering(mesh)
        digest = hashlib.sha256(f"{self.machine} {dict(made.mesh.shape)} {lowered.as_text()}".encode()).hexdigest()
        self.asked.append(digest)
        if digest not in self.figures:
            try:
                found = compiled(lowered, mesh, made.planner.options.topology)
                self.figures[digest] = found.schedule.step_seconds, peak_bytes(found.program)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                self.figures[digest] = math.inf, math.inf
            if self.known:
                self.known.write_text(json.dumps(self.figures))
        return self.figures[digest]

    def seconds_within(self, made: Plan, options: Options) -> float:
        """What `refine` asks of a compiled program: its seconds; inf if it does not fit."""
        seconds, peak = self.of(made)
        return seconds if fits(peak, options.memory) else math.inf

    def as_jax(self, made: Plan) -> Any:
        """What `planning` asks of a compiled program: how much memory it takes."""
        _, peak = self.of(made)
        if math.isinf(peak):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")
        sizes = {"argument_size_in_bytes": peak, "output_size_in_bytes": 0, "alias_size_in_bytes": 0}
        return SimpleNamespace(memory_analysis=lambda: SimpleNamespace(**sizes, temp_size_in_bytes=0))


@dataclass
class Sweep:
    """Plans of one model in every policy and number of microbatches."""

    name: str
    layers: int
    compiler: Compiler
    mesh: Any
    usable: float = 1.0  # the share of a limit that plans fill at most
    last: dict[tuple[str, int], Plan | None] = field(default_factory=dict)  # under the last, larger limit

    def step(self, policy: str) -> Any:
        workload = MODELS[self.name]
        layers = {"layers": self.layers} if self.layers else {}
        return Workload(workload.family, {**workload.sizes, **layers, "remat": POLICIES[policy]}).abstract()

    def planned(self, policy: str, count: int, limit: float) -> Plan | None:
        """The plan that is predicted to fill no more than a limit, all of it; limits go down. None if there is none."""
        before = self.last.get((policy, count), False)
        if before is None:
            return None
        if before and before.predicted.peak_bytes <= limit:
            return before
        step = self.step(policy)
        how = {"mesh": self.mesh.abstract_mesh, "topology": self.compiler.machine, "donate_argnums": 0}
        try:
            made = plan(step.step, step.state, step.batch, memory=limit / self.usable, microbatches=count, **how)
        except AutoshardError:
            made = None
        self.last[policy, count] = made
        return made

    def row(self, label: str, count: Any, limit: float, made: Plan | None) -> float | None:
        """Compiled seconds of a plan, printed; None if it does not fit, as predicted or as compiled."""
        if made is None:
            return None
        seconds, peak = self.compiler.of(made)
        times = f"{made.predicted.step_seconds * 1e3:.4g} | {seconds * 1e3:.4g}"
        peaks = f"{made.predicted.peak_bytes / 2**30:.3g} | {peak / 2**30:.3g}"
        print(f"| {self.name} | {limit / 2**30:.2f} | {label} | {count} | {times} | {peaks} |", flush=True)
        return seconds if peak <= limit else None

    def chosen(self, limit: float, counts: Any, refine: int) -> float | None:
        """Compiled seconds of the step that `remat="auto"` chooses."""
        step = self.step("full")
        how = {"mesh": self.mesh, "topology": self.compiler.machine, "donate_argnums": 0, "refine": refine}
        self.compiler.asked.clear()
        began = time.process_time()
        run = autoshard(step.step, memory=limit, microbatches=counts, remat="auto", **how)
        try:
            made = run.plan(step.state, step.batch)
        except AutoshardError as error:
            print(f"{self.name}, {limit / 2**30:.2f} GiB: {type(error).__name__}", flush=True)
            return None
        took, number = time.process_time() - began, len(set(self.compiler.asked))
        found = self.row("chosen", run.trace(step.state, step.batch).microbatches, limit, made)
        print(*(one for one in made.warnings if "remat" in one or "microbatches" in one), sep="\n")
        print(f"{self.name}: {number} programs compiled to choose, {took:.0f} CPU-s", flush=True)
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["llama 8b", "vit-l"], choices=MODELS)
    parser.add_argument("--machine", default="v5e:4x4")
    parser.add_argument("--mesh", nargs=2, type=int, default=[4, 4])
    parser.add_argument("--layers", type=int, default=0, help="instead of the model's own number")
    parser.add_argument("--limits", nargs="*", type=float, default=[1.05, 0.85, 0.7, 0.55, 0.45, 0.35])
    parser.add_argument("--counts", nargs="*", type=int, default=[1, 2, 4], help="of microbatches")
    parser.add_argument("--policies", nargs="*", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--refine", type=int, default=1, help="how many plans remat='auto' compiles to choose")
    parser.add_argument("--known", type=Path, help="a file that keeps what was compiled")
    asked = parser.parse_args()
    axes = dict(zip(("data", "model"), asked.mesh, strict=True))
    compiler, mesh = Compiler(asked.machine, asked.known), target_mesh(asked.machine, axes)
    planning.compiled = compiler.as_jax
    refining.compiled_seconds = compiler.seconds_within
    device = topology(asked.machine, axes).memory_bytes
    print("| model | limit, GiB | policy | microbatches | predicted ms | compiled ms | predicted GiB | compiled GiB |")
    print("|---|---|---|---|---|---|---|---|")
    for name in asked.models:
        sweep = Sweep(name, asked.layers, compiler, mesh)
        free = sweep.planned("none", 1, 1e15)
        assert free is not None, "no limit binds"
        whole = compiler.of(free)[1]
        whole = free.predicted.peak_bytes if math.isinf(whole) else whole
        sweep.usable = free.planner.options.backend.usable
        for limit in sorted({min(share * whole, device) for share in asked.limits}, reverse=True):
            plans = [(policy, count) for policy in asked.policies for count in asked.counts]
            found = [sweep.row(*one, limit, sweep.planned(*one, limit)) for one in plans]
            fitting = [seconds for seconds in found if seconds is not None]
            ours = sweep.chosen(limit, "auto" if len(asked.counts) > 1 else asked.counts[0], asked.refine)
            if ours is not None and fitting:
                print(f"{name}, {limit / 2**30:.2f} GiB: {ours / min(fitting) - 1:+.1%} of the fastest", flush=True)
            elif ours is None and fitting:
                print(f"{name}, {limit / 2**30:.2f} GiB: MISSED, others fit", flush=True)


if __name__ == "__main__":
    main()
