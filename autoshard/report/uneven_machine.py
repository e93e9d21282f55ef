"""A plan for a machine whose devices are not alike in, what its slowest devices cost the step out, in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autoshard.mesh.unevenness import Unevenness
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.report.units import seconds_text

_LISTED_POSITIONS = 8  # positions whose figures stand in a remark


def uneven_remarks(plan: PlanData, machine: Sequence[Unevenness]) -> Iterator[str]:
    """A remark for every axis along which devices differ."""
    for uneven in machine:
        if len(set(uneven.memories)) > 1:
            yield (
                f"memory: devices along {uneven.axis!r} have {_listed(uneven.memories)} of the machine's bytes. "
                "The limit is that of the smallest."
            )
        if len(set(uneven.speeds)) > 1:
            yield " ".join(_of_speeds(plan, uneven))


def _of_speeds(plan: PlanData, uneven: Unevenness) -> Iterator[str]:
    compute, step = plan.predicted.compute_seconds, plan.predicted.step_seconds
    yield f"speed: devices along {uneven.axis!r} run at {_listed(uneven.speeds)} of the machine's rates."
    yield f"The step takes what the slowest take, {seconds_text(step)}."
    yield f"A device waits {seconds_text(compute * uneven.waiting)} of it on average."
    batch = _batch(plan)
    if batch is None or uneven.axis not in batch.layout[0]:
        rows = "No rows" if batch is None else f"No rows of {batch.name}"
        yield f"{rows} are split there, so no shares of them would help."
    else:
        shares = _listed(uneven.shares(batch.shape[0]))
        saved = seconds_text(compute * uneven.saved_by_shares)
        yield f"Shares of {shares} of the {batch.shape[0]} rows of {batch.name} would save {saved} at best."
        yield "They are not run: XLA runs one program on shapes of one size, where an added row takes as long as any."
    alone = uneven.fastest_alone
    if alone is not None:
        fastest = sorted(uneven.speeds, reverse=True)[alone - 1]
        ratio = len(uneven.speeds) * uneven.slowest / (alone * fastest)
        yield f"The fastest {alone} alone would compute it in {ratio:.0%} of the time: leave the others out."


def _batch(plan: PlanData) -> PlacedArray | None:
    """The largest argument that is no state. A step that carries none may have its weights there."""
    arriving = [one for i, one in enumerate(plan.arguments) if i not in plan.carried and one.shape]
    return max(arriving, key=lambda one: one.local_bytes, default=None)


def _listed(figures: Sequence[float]) -> str:
    """Figures of all positions, runs of the same one together.

    >>> _listed((1.0, 1.0, 0.6))
    '1 (2 times) and 0.6'
    """
    runs = list[tuple[float, int]]()
    for figure in figures:
        runs[-1:] = [(figure, runs[-1][1] + 1)] if runs and runs[-1][0] == figure else [*runs[-1:], (figure, 1)]
    texts = [f"{figure:g}" + f" ({count} times)" * (count > 1) for figure, count in runs[:_LISTED_POSITIONS]]
    more = [f"{len(runs) - _LISTED_POSITIONS} more"] if len(runs) > _LISTED_POSITIONS else []
    *first, last = [*texts, *more]
    return f"{', '.join(first)} and {last}" if first else last
