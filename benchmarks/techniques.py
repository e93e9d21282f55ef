"""What our plans do that people do by hand in some places, and what hardly anybody does: by how many plans, and which.

    python benchmarks/techniques.py                                  # everything; writes docs/benchmarks/techniques.md
    python benchmarks/techniques.py --machines h100:2x8 --models moe  # a part; only prints it

Plans the programs of benchmarks/plans.py, and compiles nothing. Needs the extras tpu and cuda; takes minutes.
"""

import argparse
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from plans import MACHINES, MODELS, for_devices

from autoshard import Collective, Plan, plan, topology
from autoshard.layout import axes_of, shards
from autoshard.mesh.targets import target_mesh
from autoshard.plans.plan import PlacedArray

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks" / "techniques.md"
SLOW = {"2x v5e:4x4": "slices", "h100:2x8": "data"}  # the axis whose links are slower by far
PART = 0.1  # of the bytes of the state: less of it says little about a plan
LITTLE = 0.01  # of all bytes that are moved
TECHNIQUES = {
    "part of the mesh": "Weights and moments are split over some axes and copied along others (HSDP, MiCS).",
    "two dims": "Weights are split in two dims or more, over different axes (2-D and 3-D sharding).",
    "all_to_all": "Activations change the dim they are split in: heads for sequences (Ulysses), tokens for experts.",
    "reductions only": "Over the slow links gradients are reduced, and little else moves.",
    "weights once": "Weights are gathered over fast links alone, though their moments are split over slow ones, too.",
    "scattered in loops": "A loop reduce_scatters gradients in its turns, where XLA by itself would all_reduce them.",
    "layers differ": "Layers that look alike are split in different ways.",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--machines", nargs="*", default=list(MACHINES), choices=list(MACHINES))
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    chosen = parser.parse_args()
    found: dict[str, dict[str, list[str]]] = {name: defaultdict(list) for name in TECHNIQUES}
    count = 0
    for machine in chosen.machines:
        mesh = target_mesh(machine, MACHINES[machine])
        for model in chosen.models:
            options = {"mesh": mesh, "topology": topology(machine, MACHINES[machine]), "donate_argnums": 0}
            made = plan(*for_devices(MODELS[model], mesh.size).abstract(), **options)
            used = techniques(made, SLOW.get(machine), scanned="scan" in model)
            print(f"{machine} | {model} | {', '.join(used)}", flush=True)
            count += 1
            for name in used:
                found[name][machine].append(model)
    if chosen.machines == list(MACHINES) and chosen.models == list(MODELS):
        PAGE.write_text(page(found, count))


def techniques(made: Plan, slow: str | None, scanned: bool) -> list[str]:
    """Which of TECHNIQUES a plan uses.

    Args:
        slow: the axis over the slow links, if there is one.
        scanned: whether layers are stacked and run in a loop.
    """
    axes = {axis for axis, size in made.mesh.shape.items() if size > 1}
    state = [made.arguments[i] for i in made.carried]
    moved = made.predicted.collectives

    def whole(chosen: Iterable[PlacedArray]) -> int:
        return sum(x.local_bytes * shards(axes_of(x.layout), made.mesh.shape) for x in chosen)

    def share(chosen: Iterable[PlacedArray]) -> float:
        return whole(chosen) / whole(state)

    over = [one for one in moved if slow in one.axes]
    gathered = [one for one in over if one.kind not in ("all_reduce", "reduce_scatter")]
    total = sum(one.bytes for one in moved)
    split_slowly = share(x for x in state if slow in axes_of(x.layout))
    uses = {
        "part of the mesh": share(x for x in state if 0 < len(axes_of(x.layout) & axes) < len(axes)) >= PART,
        "two dims": share(x for x in state if sum(map(bool, x.layout)) > 1) >= PART,
        "all_to_all": amount(moved, "all_to_all", "value ") > LITTLE * total,
        "reductions only": slow is not None and bool(over) and sum(x.bytes for x in gathered) <= LITTLE * total,
        "scattered in loops": scanned and amount(moved, "reduce_scatter", "") > LITTLE * total,
        "layers differ": not scanned and layers_differ(made),
        "weights once": slow is not None and split_slowly >= PART and amount(over, "all_gather", "") <= LITTLE * total,
    }
    return [name for name in TECHNIQUES if uses[name]]


def amount(collectives: Iterable[Collective], kind: str, why: str) -> int:
    return sum(one.bytes for one in collectives if one.kind == kind and one.why.startswith(why))


def layers_differ(made: Plan) -> bool:
    """Whether weights of one name and shape, but for numbers in their names, lie in different ways."""
    alike = defaultdict(set)
    for i in made.carried:
        placed = made.arguments[i]
        if len(placed.shape) > 1:
            alike[re.sub(r"\d+", "#", placed.name), placed.shape].add(placed.layout)
    return any(len(layouts) > 1 for layouts in alike.values())


def page(found: dict[str, dict[str, list[str]]], count: int) -> str:
    lines = [
        "# What our plans do",
        "",
        "Written by `python benchmarks/techniques.py`, which plans the programs of `docs/benchmarks/plans.md` and",
        "reads the plans. That page says what the plans gain. A technique counts from",
        f"{PART:.0%} of the state's bytes on, or {LITTLE:.0%} of all bytes that are moved.",
        "",
        f"technique | of {count} plans | programs",
        "--- | --- | ---",
    ]
    for name, text in TECHNIQUES.items():
        where = "; ".join(f"{machine}: {', '.join(models)}" for machine, models in found[name].items())
        lines.append(f"{text} | {sum(map(len, found[name].values()))} | {where}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
