"""What a plan shows beside its layouts and costs, to JSON and back: its machine, its activations, its use of memory."""

from __future__ import annotations

from typing import Any

from autoshard.layout import MeshShape
from autoshard.plans.activations import Activation
from autoshard.plans.memory_use import MemoryPart, MemoryUse
from autoshard.plans.nodes import Node, number_of
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


def shown_from_json(node: Node, axes: MeshShape) -> dict[str, Any]:
    """The fields of a plan that `shown_to_json` wrote.

    Raises:
        ValueError: it is not what that wrote; the message says where.
    """
    node.only(("machine", "activations", "memory_lines", "memory_parts"))
    lines = node["memory_lines"].items(Node.name)
    parts = node["memory_parts"].items(lambda one: _part(one, len(lines)))
    if parts and not lines:  # a program of numbers alone holds nothing at any line
        raise node["memory_parts"].wrong("what is held at each of the lines")
    return {
        "machine": node["machine"].optional(Node.name),
        "activations": node["activations"].items(lambda one: _activation(one, axes)),
        "memory_use": MemoryUse(lines, parts) if lines else None,
    }


def _part(node: Node, moments: int) -> MemoryPart:
    node.only(("name", "kind", "bytes"))
    sizes = tuple(number_of(word, node["bytes"].path) for word in node["bytes"].text().split())
    if len(sizes) != moments:
        raise node["bytes"].wrong(f"{moments} sizes")
    return MemoryPart(node["name"].name(), node["kind"].one_of(("argument", "value")), sizes)


def _activation(node: Node, axes: MeshShape) -> Activation:
    node.only(("line", "primitive", "shape", "dtype", "spec", "local_bytes", "count"))
    layout = node["spec"].items(lambda dim: dim.items(lambda axis: axis.one_of(axes)))
    shape = node["shape"].items(Node.count)
    if len(layout) != len(shape):
        raise node["spec"].wrong(f"a layout of {len(shape)} dims")
    return Activation(
        line=node["line"].name(),
        primitive=node["primitive"].name(),
        shape=shape,
        dtype=node["dtype"].name(),
        layout=layout,
        local_bytes=node["local_bytes"].count(),
        count=node["count"].count(),
    )
