"""Whether plans cost what they report, and optimal ones are not beaten: over random programs, for three machines.

    python benchmarks/objective.py --workers 16                    # 1,000 programs and 300 train steps
    python benchmarks/objective.py --programs 40 --steps 0         # a part
    python benchmarks/objective.py --seed 7 --rows FILE            # other programs; adds to a run that was stopped
    python benchmarks/objective.py --seed 7 --show "program 3"     # the programs of one block, as text

Programs and steps are those that the tests draw (`tests/random_programs.py`, `tests/random_steps.py`), each on a mesh
of eight devices and for CPU, TPU v5e or H100. Each is planned in ten seconds at most. Nothing is compiled. Three things
are counted as faults, and the exit status is 1 if there are any:

- The cost that was minimised and the step that is predicted differ by more than 0.1%.
- A row of `Plan.alternatives` is faster than a plan that is called optimal, by more than 0.1%.
- The proven bound lies above the cost.

A block of programs is drawn and planned in one process. A row is printed for each program with a fault, and a line for
each block as it ends.
"""

import argparse
import collections
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "tests")]

from workers import Ended, Worker, answers, serve  # noqa: E402  (needs the path above)

MACHINES = ("cpu:8", "v5e:2x4", "h100:8")
STEP_SIZES = (8, 16, 32, 64)  # of the dims of train steps
PLANNING_SECONDS = 10
WITHIN = 1e-3  # share by which cost and prediction may differ
HANGS_AFTER = 60.0  # s, per program of a block
BLOCK = 10  # programs that are drawn together


class Block(NamedTuple):
    """Programs that are drawn together."""

    kind: str  # "program" or "step"
    seed: int
    number: int
    count: int  # how many are drawn


@dataclass(frozen=True)
class Row:
    """One program: what was minimised, and what is reported."""

    kind: str
    seed: int
    block: int
    place: int  # in its block
    machine: str
    mesh: dict[str, int]
    status: str  # of the plan; "raises", "crashes" or "hangs" if there is none
    cost: float = 0.0  # s, that the solver minimised
    predicted: float = 0.0  # s
    bound: float = 0.0  # s
    fastest: str = ""  # the fastest alternative
    fastest_seconds: float | None = None
    detail: str = ""  # the error
    wall: float = 0.0  # s that planning and comparing took

    @property
    def faults(self) -> list[str]:
        """What is wrong, in words."""
        if self.status in ("raises", "crashes", "hangs"):
            return [f"{self.status}: {self.detail}"]
        found = []
        if abs(self.cost - self.predicted) > WITHIN * self.predicted + 1e-15:
            found.append(f"cost {self.cost:.6e} s, predicted {self.predicted:.6e} s")
        if self.bound > self.cost * (1 + 1e-9):
            found.append(f"bound {self.bound:.6e} s above cost {self.cost:.6e} s")
        beaten = self.fastest_seconds is not None and self.fastest_seconds < self.predicted * (1 - WITHIN)
        if self.status == "optimal" and beaten:
            found.append(f"optimal at {self.predicted:.6e} s, {self.fastest} takes {self.fastest_seconds:.6e} s")
        return found


def row_of(block: Block, place: int, drawn: tuple) -> Row:
    """Plans one program and puts what was minimised beside what is reported."""
    from jax.sharding import AbstractMesh

    from autoshard import Prediction, plan

    fn, args, options, mesh, machine = drawn
    started = time.perf_counter()
    row = Row(block.kind, block.seed, block.number, place, machine, mesh, "raises")
    try:
        abstract = AbstractMesh(tuple(mesh.values()), tuple(mesh))
        made = plan(fn, *args, mesh=abstract, topology=machine, time_limit=PLANNING_SECONDS, **options)
        rows = {name: one.step_seconds for name, one in made.alternatives.items() if isinstance(one, Prediction)}
    except Exception as error:
        return replace(row, detail=f"{type(error).__name__}: {error}"[:300], wall=time.perf_counter() - started)
    fastest = min(rows, key=rows.__getitem__, default="")
    return replace(
        row,
        status=made.status,
        cost=made.cost,
        predicted=made.predicted.step_seconds,
        bound=made.bound,
        fastest=fastest,
        fastest_seconds=rows.get(fastest),
        wall=time.perf_counter() - started,
    )


def drawn(block: Block) -> list[tuple]:
    """The programs of a block: (function, arguments, options, mesh, machine)."""
    import hypothesis
    import jax
    import numpy as np
    from hypothesis import strategies as st
    from random_programs import MESHES, programs
    from random_steps import steps

    found: list[tuple] = []

    def keep(program: Any, mesh: dict[str, int], machine: str) -> None:
        if block.kind == "program":
            found.append((program, program.arguments, {}, mesh, machine))
            return
        rng = np.random.default_rng(0)
        arguments = jax.eval_shape(lambda: (program.state(rng), program.batch(rng)))
        found.append((program, arguments, {"donate_argnums": 0}, mesh, machine))

    kinds: dict[str, Callable] = {"program": programs, "step": lambda: steps(sizes=STEP_SIZES)}
    settings = hypothesis.settings(
        max_examples=block.count,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    given = hypothesis.given(kinds[block.kind](), st.sampled_from(MESHES), st.sampled_from(MACHINES))
    hypothesis.seed(f"{block.seed}/{block.number}")(settings(given(keep)))()
    return found


def work() -> None:
    """Plans blocks as they come."""
    import jax

    def answer(task: Sequence) -> list[dict]:
        jax.clear_caches()
        block = Block(*task)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [asdict(row_of(block, place, one)) for place, one in enumerate(drawn(block))]

    serve(answer)


def new_worker() -> Worker:
    return Worker([__file__, "--serve"], {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "1"}, HANGS_AFTER * BLOCK)


def blocks_of(kind: str, count: int, seed: int) -> list[Block]:
    starts = range(0, count, BLOCK)
    return [Block(kind, seed, number, min(BLOCK, count - start)) for number, start in enumerate(starts)]


def rows_of(blocks: Sequence[Block], workers: int) -> Iterator[tuple[Block, list[Row]]]:
    """The rows of each block, as it ends."""
    for block, answer in answers(blocks, workers, new_worker):
        if isinstance(answer, Ended):
            status = "hangs" if answer.late else "crashes"
            yield block, [Row(block.kind, block.seed, block.number, 0, "", {}, status, detail=answer.detail)]
        else:
            yield block, [Row(**row) for row in answer]


def print_row(row: Row) -> None:
    where = f"{row.kind} {row.block}.{row.place} of seed {row.seed} on {row.machine} {row.mesh}"
    for fault in row.faults:
        print(f"{where}: {fault}", flush=True)


def read(path: Path | None) -> list[Row]:
    """The rows of a run that was stopped."""
    lines = path.read_text().splitlines() if path and path.exists() else ()
    return [Row(**json.loads(line)) for line in lines]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=1000, help="how many random programs")
    parser.add_argument("--steps", type=int, default=300, help="how many random train steps")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no result is waited for")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    parser.add_argument("--rows", type=Path, help="a file of results to add to, one line of JSON each")
    parser.add_argument("--show", help="print the programs of one block, as in 'program 3', and plan nothing")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        work()
        return 0
    os.environ["JAX_PLATFORMS"] = "cpu"
    if options.show:
        kind, number = options.show.split()
        for place, (program, _, _, mesh, machine) in enumerate(drawn(Block(kind, options.seed, int(number), BLOCK))):
            print(f"# {place}: {machine} {mesh}\n{program!r}\n")
        return 0
    blocks = blocks_of("program", options.programs, options.seed) + blocks_of("step", options.steps, options.seed)
    rows = read(options.rows)
    done = {(row.kind, row.seed, row.block) for row in rows}
    left = [block for block in blocks if block[:3] not in done]
    started = time.perf_counter()
    with open(options.rows or os.devnull, "a") as file:
        for block, found in rows_of(left, options.workers):
            rows += found
            for row in found:
                print_row(row)
                print(json.dumps(asdict(row)), file=file, flush=True)
            wall = sum(row.wall for row in found)
            print(f"{block.kind} block {block.number}: {len(found)} planned in {wall:.0f} s", flush=True)
            if time.perf_counter() - started > options.seconds:
                break
    statuses = collections.Counter(row.status for row in rows)
    faults = [row for row in rows if row.faults]
    print(f"{len(rows)} programs, {dict(statuses)}; {len(faults)} with faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
