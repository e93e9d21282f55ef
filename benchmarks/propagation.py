"""How long sharding rules and propagation take, and that it grows with the number of equations, not faster.

    python benchmarks/propagation.py                      # a minute on one core, most of it to build and trace models
    python benchmarks/propagation.py --layers 4 8

Prints a table: equations of an unrolled GPT with AdamW; CPU seconds of rules and of propagation, the least of several
runs; microseconds per equation. Columns are split over one axis, the batch over the other.
"""

import argparse
import re
import sys
import time
from pathlib import Path

import jax

jax.config.update("jax_platforms", "cpu")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]
from models import MODELS  # noqa: E402  (needs the path above)

from autoshard.program import Program, trace  # noqa: E402
from autoshard.propagation import propagate_layouts, rules_for  # noqa: E402

MESH = {"data": 8, "model": 8}
FIXED = {
    r"^state/0/.*(query|key|value)/kernel$": ((), ("model",), ()),
    r"^state/0/.*up/kernel$": ((), ("model",)),
    r"^batch/": (("data",), ()),
}


def fixed_layouts(program: Program) -> dict:
    """Value id -> layout, of the arguments that a person would fix for Megatron's sharding."""
    found = {}
    for value in program.arguments:
        layout = next((layout for pattern, layout in FIXED.items() if re.search(pattern, value.name)), None)
        if layout is not None and len(layout) == len(value.shape):
            found[value.id] = layout
    return found


def cpu_seconds(work, runs: int) -> float:
    """Of the fastest run."""
    times = []
    for _ in range(runs):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 10, 21, 43])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print(f"{'layers':>6}{'equations':>11}{'split':>8}{'rules':>8}{'propagate':>11}{'us/equation':>13}")
    for layers in options.layers:
        model = MODELS["gpt"](layers=layers)
        program = trace(model.step, (model.state, model.batches(0)), {}, donate_argnums=0)
        fixed, rules = fixed_layouts(program), rules_for(program)
        assert len(fixed) >= 4 * layers
        found = propagate_layouts(program, rules, MESH, fixed)
        split = sum(any(layout) for layout in found.values.values())
        ruled = cpu_seconds(lambda program=program: rules_for(program), options.runs)
        spread = cpu_seconds(lambda args=(program, rules, MESH, fixed): propagate_layouts(*args), options.runs)
        count = len(program.equations)
        each = (ruled + spread) / count * 1e6
        print(f"{layers:>6}{count:>11}{split:>8}{ruled:>8.2f}{spread:>11.2f}{each:>13.1f}", flush=True)


if __name__ == "__main__":
    main()
