"""The plans of two signatures of one step in; what planning the second anew changes for the user, in words, out."""

from __future__ import annotations

from autoshard.plans.plan import PlanData
from autoshard.report.units import bytes_text

_NAMED_ARRAYS = 3  # arrays that the words name
# A plan has no static arguments and no weak types, so it cannot say which of these differ.
_OTHER = "other static arguments, containers, donation or weak types (`jnp.full(shape, 0.1)` has one, its update none)"


def signature_remark(plan: PlanData, before: PlanData) -> str:
    """Why a step is planned anew for a signature, and whether its state moves between the two plans.

    Args:
        before: of the signature that was planned before.
    """
    earlier = {placed.name: placed for placed in before.arguments}
    changed = [
        f"{placed.name} is {placed.type}, before {earlier[placed.name].type}"
        for placed in plan.arguments
        if placed.name in earlier and placed.type != earlier[placed.name].type
    ]
    new = [placed.name for placed in plan.arguments if placed.name not in earlier]
    why = _listed(changed or [f"{name} is new" for name in new]) or _OTHER
    moved = [
        plan.arguments[i]
        for i in sorted(plan.carried)
        if (old := earlier.get(plan.arguments[i].name)) is not None
        and old.type == plan.arguments[i].type
        and old.layout != plan.arguments[i].layout
    ]
    if not moved:
        return f"Planned anew for this signature: {why}. State lies as in the plan before."
    size = bytes_text(sum(one.local_bytes for one in moved))
    return (
        f"Planned anew for this signature: {why}. {len(moved)} arrays of state lie otherwise than in the plan before "
        f"and are moved when calls change from one to the other, {size} on each device: "
        f"{_listed([one.name for one in moved])}. autoshard(step, like=plan) keeps them where they are."
    )


def _listed(words: list[str]) -> str:
    rest = len(words) - _NAMED_ARRAYS
    return ", ".join(words[:_NAMED_ARRAYS]) + (f" and {rest} more" if rest > 0 else "")
