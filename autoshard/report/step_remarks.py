"""A program and the mesh that it is planned for in, what a plan says of the two, in words, out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.layout import MeshShape
from autoshard.model.formulation import Formulation
from autoshard.program import Program


def remarks_of(formulation: Formulation, mesh: MeshShape, uneven: Sequence[str]) -> tuple[str, ...]:
    """All that a plan says of how its step is run, what it says of uneven batches included."""
    program = formulation.program
    return (
        *formulation.restrictions,
        *_form_remarks(program),
        *unused_axes(program, mesh),
        *uneven,
        *guessed_loops(program),
        *formulation.prices.backend.remarks,
    )


def _form_remarks(program: Program) -> Iterator[str]:
    """What was done to the step before it was planned."""
    if program.microbatches > 1:
        yield f"it runs in {program.microbatches} microbatches."
    yield from filter(None, (program.own_statistics, program.recomputed, program.shared_trips, program.stacked))
    yield from (rewritten.remark for rewritten in program.rewritten)


def guessed_loops(program: Program) -> tuple[str, ...]:
    """A remark for every line of loops of which nobody says how often they turn."""
    guessed = {loop.source: loop.turns for loop in program.loops if loop.how == "guessed"}
    return tuple(
        f"the loop at {source or 'unknown line'} is taken to turn {turns} times, which is a guess: "
        f"trips={{'{source or '*'}': ...}} says how often."
        for source, turns in guessed.items()
    )


def unused_axes(program: Program, mesh: MeshShape) -> tuple[str, ...]:
    """A remark for every mesh axis that divides no dim of any argument or inner value."""
    sizes = {size for value in program.values for size in value.shape}
    return tuple(
        f"mesh axis {axis!r} ({devices} devices) divides no dim of {program.name}: its dims are "
        f"{', '.join(map(str, sorted(sizes)))}. Every device along it computes the same."
        for axis, devices in mesh.items()
        if devices > 1 and not any(size and size % devices == 0 for size in sizes)
    )
