"""What a plan shows beside its layouts and costs, to JSON and back: its machine, its activations, its use of memory."""

from __future__ import annotations

from typing import Any

from autoshard.plans.activations import Activation
from autoshard.plans.memory_use import MemoryPart, MemoryUse
from autoshard.plans.plan import PlanData


def shown_to_json(plan: PlanData) -> dict[str, Any]:
    """As numbers, words, lists and dicts; bytes of many moments as one text, which takes one line of a file."""
    use = plan.memory_use
    return {
        "machine": plan.machine,
        "activations": [
            {
                "line": one.line,
                "primitive": one.primitive,
                "shape": list(one.shape),
                "dtype": one.dtype,
                "spec": list(map(list, one.layout)),
                "local_bytes": one.local_bytes,
                "count": one.count,
            }
            for one in plan.activations
        ],
        "memory_lines": [] if use is None else list(use.lines),
        "memory_parts": [
            {"name": part.name, "kind": part.kind, "bytes": " ".join(map(str, part.bytes))}
            for part in (use.parts if use is not None else ())
        ],
    }


def shown_from_json(entry: Any) -> dict[str, Any]:
    """The fields of a plan that `shown_to_json` wrote.

    Raises:
        ValueError, LookupError, TypeError, AttributeError: it is not what that wrote.
    """
    parts = tuple(
        MemoryPart(str(part["name"]), str(part["kind"]), tuple(map(int, part["bytes"].split())))
        for part in entry["memory_parts"]
    )
    lines = tuple(map(str, entry["memory_lines"]))
    if any(len(part.bytes) != len(lines) for part in parts) or (lines and not parts):
        raise ValueError("the use of memory has not as many moments as lines")
    machine = entry["machine"]
    activations = tuple(
        Activation(
            line=str(one["line"]),
            primitive=str(one["primitive"]),
            shape=tuple(map(int, one["shape"])),
            dtype=str(one["dtype"]),
            layout=tuple(tuple(map(str, axes)) for axes in one["spec"]),
            local_bytes=int(one["local_bytes"]),
            count=int(one["count"]),
        )
        for one in entry["activations"]
    )
    return {
        "machine": None if machine is None else str(machine),
        "activations": activations,
        "memory_use": MemoryUse(lines, parts) if lines else None,
    }
