"""What goes with stages, and with plans that the user gave: options and plans in, an error out if they do not."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autoshard.errors import ArgumentError, PlanError
from autoshard.one_jit.plan import OneJitPlan
from autoshard.options import Options
from autoshard.stage_planning.pipeline_plan import PipelinePlan
from autoshard.user_plan import Plan

# Option -> why it does not go with stages, and what does.
_ALTERNATIVES_TO_OPTIONS = {
    "pad": "pad='batch' adds rows of the batch to stages that are programs of their own (without backend=); what "
    "pad='auto' adds is for the devices of the whole mesh.",
    "rewrites": "The stages of one program are equal as they are written: leave backend= out.",
}


def check_combination(
    what: str, options: Options, others: Mapping[str, Any], *, heeded: Collection[str], takes_uneven: bool
) -> None:
    """
    Args:
        what: asks for stages, as messages call it.
        others: what the user gives beside `options` that stages do not heed, by name; None where nothing is given.
        heeded: which of the options are heeded that only some stages heed.
        takes_uneven: whether devices that differ are heeded.

    Raises:
        ArgumentError: some options are given that stages do not heed.
    """
    unheeded = {
        **others,
        "remat": options.remat,
        "search": options.search,
        "tactics": options.tactics or None,
        "rewrites": options.rewrites or None,
        "reductions": options.reductions,
        "refine": None if options.refine == 1 else options.refine,
    }
    names = [f"{name}=" for name, value in unheeded.items() if value is not None and name not in heeded]
    if options.topology.uneven and not takes_uneven:
        names.append("a topology with uneven devices")
    if names:
        why = "".join(f"\n{_ALTERNATIVES_TO_OPTIONS[name]}" for name in _ALTERNATIVES_TO_OPTIONS if f"{name}=" in names)
        raise ArgumentError(f"{what} cannot be combined with {', '.join(names)} yet; leave one of them out.{why}")


def check_given(plan: Plan | None, like: Plan | None, options: Options, pad: str | None) -> None:
    """
    Args:
        plan: given as `plan=`.
        like: given as `like=`.
        options: the others.
        pad: given as `pad=`.

    Raises:
        PlanError: `like=` has stages.
        ArgumentError: the plan has stages, which do not heed some option.
    """
    if isinstance(plan, PipelinePlan | OneJitPlan):
        in_programs, others = isinstance(plan, PipelinePlan), {"pad": pad, "like": like}
        heeded = ["remat", *["pad"] * (pad == "batch")] if in_programs else []
        check_combination("a plan with stages", options, others, heeded=heeded, takes_uneven=in_programs)
    if isinstance(like, PipelinePlan):
        raise PlanError(
            f"like=: the plan of {like.name} has {len(like.stages)} stages. Each array lies on the devices of its own "
            "stage, and arguments of a step without stages on all devices.\n"
            "Leave like= out, and each call moves its arguments; or name the plan of a step without stages."
        )


def check_statistics(options: Options, *, is_in_parts: bool) -> None:
    """
    Args:
        is_in_parts: whether the user says how a step is cut into parts, or gives a plan that may.

    Raises:
        ArgumentError: `statistics=` is given for a step that runs in one part.
    """
    if options.statistics is not None and not is_in_parts:
        raise ArgumentError(
            f"statistics={options.statistics!r} is for steps in microbatches, and this one takes its batch at once: "
            "its sums are over the whole batch.\nGive microbatches= or pipeline=, or leave statistics= out."
        )
