"""Plans beside MaxText's rule sets and Alpa's integer program, as predictions for one machine.

    python benchmarks/comparison.py                          # writes docs/benchmarks/comparison.md
    python benchmarks/comparison.py --models "llama 1b scan" # a part; only prints

MaxText's rules are those of `benchmarks/shardings.py`: layouts of state and batch by the names of dims, and constraints
on activations. `evaluate` prices them as `jax.jit` runs them. Takes minutes.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from jax.sharding import AbstractMesh  # noqa: E402
from shardings import SHARDINGS, constraint_of, names_of  # noqa: E402
from workloads import TRAINED  # noqa: E402

from autoshard import AutoshardError, evaluate, plan  # noqa: E402

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "comparison.md"
MACHINE, AXES = "v5e:4x4", {"data": 4, "model": 4}
MODELS = ("llama 1b scan", "llama 8b scan", "mixtral scan", "vit-l scan")
RULES = ("FSDP", "FSDP+Megatron", "FSDP+Megatron+sequence")
GIB = 2**30


def rows_of(model: str) -> Iterator[str]:
    """A row per way to shard the step: predicted milliseconds and GiB per device, CPU seconds to find it."""
    mesh, workload = AbstractMesh(tuple(AXES.values()), tuple(AXES)), TRAINED[model]
    options = {"mesh": mesh, "topology": MACHINE, "donate_argnums": 0}
    for name, more in (("autoshard", {}), ("the same problem by Alpa's integer program", {"search": "alpa"})):
        begin = time.process_time()
        try:
            made = plan(*workload.abstract(), **options, **more)
        except AutoshardError as error:
            yield f"{model} | {name} | {type(error).__name__} | | | {time.process_time() - begin:.1f}"
            continue
        seconds, predicted = time.process_time() - begin, made.predicted
        yield (
            f"{model} | {name} | {predicted.step_seconds * 1e3:.4g} | {predicted.peak_bytes / GIB:.2f} "
            f"| {made.gap:.1%} | {seconds:.1f}"
        )
    for name in (name for name in RULES if name in names_of(workload.family)):
        work = workload.abstract(constraint_of(name, mesh))
        specs = SHARDINGS[name](workload.family, work.state, work.batch, AXES)
        found = evaluate(*work, in_shardings=specs, **options).predicted
        yield f"{model} | {name} | {found.step_seconds * 1e3:.4g} | {found.peak_bytes / GIB:.2f} | |"


HEAD = f"""# Beside Alpa and MaxText's rules

Written by `python benchmarks/comparison.py`: train steps on a (4, 4) mesh of {MACHINE}, whose chips have 16 GiB.
Figures are predictions. `benchmarks/plans.md` has compiled ones of the same rules. MaxText's rule sets are layouts by
names of dims, with constraints on activations; they are not held to the memory limit. Alpa's program is the one of its
paper, in our implementation, on our problem. PyTorch's AutoParallel plans PyTorch modules by an integer program over
layouts of tensors, and cannot be run on these steps; so it has no rows.

model | sharding | predicted ms | GiB per device | proven gap | CPU s
--- | --- | --: | --: | --: | --:
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    chosen = parser.parse_args().models
    text = HEAD
    for model in chosen:
        for row in rows_of(model):
            text += f"{row}\n"
            print(row, flush=True)
    if chosen == list(MODELS):
        PAGE.write_text(text)


if __name__ == "__main__":
    main()
