"""Which tactics the models of the tests can be planned within, with the collectives of the scheme alone or with others.

    python benchmarks/tactics.py                      # every model and tactic
    python benchmarks/tactics.py --models llama vit   # a part

Plans for a v5e:2x2 and compiles nothing. Takes two CPU-minutes.
"""

import argparse
import sys
from pathlib import Path

import jax
from jax.sharding import AbstractMesh

import autoshard
from autoshard import tactics

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from models import MODELS, MORE_MODELS

SCHEMES = [
    tactics.DataParallel("a"),
    *(tactics.ZeRO(level, "a") for level in (1, 2, 3)),
    tactics.Megatron("a"),
    tactics.SequenceParallel("a"),
    tactics.Ulysses("a"),
    tactics.ExpertParallel("a"),
    tactics.TwoDimensional("a", "b"),
]


def main() -> None:
    everything = {**MODELS, **MORE_MODELS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=list(everything), choices=list(everything))
    for name in parser.parse_args().models:
        model = everything[name]()
        args = jax.eval_shape(lambda model=model: (model.state, model.batches(0)))
        for scheme in SCHEMES:
            print(f"{name:10} {scheme!r:28} {outcome(model.step, args, scheme)}", flush=True)


def outcome(step, args, scheme: tactics.Tactic) -> str:
    """How a step can be planned within a scheme."""
    shape = (2, 2) if len(scheme.axes) > 1 else (4,)
    mesh = AbstractMesh(shape, ("a", "b")[: len(shape)])
    try:
        plan = autoshard.plan(
            step, *args, mesh=mesh, topology="v5e:2x2", tactics=[scheme], donate_argnums=0, time_limit=10
        )
    except autoshard.ConflictError as error:
        return f"refused: {str(error).splitlines()[0].partition(': ')[2]}"
    return "other collectives" if any("other collectives" in remark for remark in plan.warnings) else "as published"


if __name__ == "__main__":
    main()
