"""A plan to JSON, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.errors import PlanError
from autoshard.layout import Layout, with_auto_axes
from autoshard.mesh.collectives import Collective
from autoshard.plans.annotations import Annotations, Scatter
from autoshard.plans.plan import PlacedArray, PlanData, check_mesh
from autoshard.plans.prediction import Prediction
from autoshard.program.trees import Tree

_FORMAT = 4


def to_json(plan: PlanData, alternatives: Mapping[str, Prediction | str] | None) -> dict:
    """A plan as numbers, words, lists and dicts.

    Args:
        alternatives: the figures that it is compared with, or why there are none; None if they have not been found.
    """
    annotations = plan.annotations
    figures: dict[str, Any] | None = None
    if alternatives is not None:
        figures = {name: None if isinstance(one, str) else asdict(one) for name, one in alternatives.items()}
    reasons = {name: one for name, one in (alternatives or {}).items() if isinstance(one, str)}
    return {
        "format": _FORMAT,
        "name": plan.name,
        "fingerprint": plan.fingerprint,
        "mesh": dict(plan.mesh.shape),
        "axis_types": plan.axis_types and [one.name for one in plan.axis_types],
        "status": plan.status,
        "bound": plan.bound,
        "cost": plan.cost,
        "memory": plan.memory,
        "warnings": list(plan.warnings),
        "arguments": [_placed_to_json(placed) for placed in plan.arguments],
        "results": [_placed_to_json(placed) for placed in plan.results],
        "carried": list(plan.carried.items()),
        "predicted": asdict(plan.predicted),
        "alternatives": figures,
        "absent": reasons,
        "argument_slots": _tree_to_json(plan.argument_tree.plain(range(len(plan.arguments)))),
        "result_slots": _tree_to_json(plan.result_tree.plain(range(len(plan.results) + len(plan.arguments)))),
        "homes": {str(value): _words(layout) for value, layout in annotations.homes.items()},
        "copies": {str(value): _words(layout) for value, layout in annotations.copies.items()},
        "wants": {f"{e}/{operand}": _words(layout) for (e, operand), layout in annotations.wants.items()},
        "scatters": {str(equation): asdict(scatter) for equation, scatter in annotations.scatters.items()},
        "sums": {str(value): _words(layout) for value, layout in annotations.sums.items()},
        "implied": sorted(annotations.implied),
        **_of_some_plans(plan),
    }


def _of_some_plans(plan: PlanData) -> dict:
    """What is left out of the file of a plan that has none of it, so that this file is as older versions wrote it."""
    captured = [_placed_to_json(placed) for placed in plan.captured]
    return ({"captured": captured} if captured else {}) | (
        {"compiled_peak": plan.compiled_peak} if plan.compiled_peak is not None else {}
    )


class Contents(NamedTuple):
    """What a file says."""

    plan: PlanData
    # Figures that it is compared with, or why there are none. None: it was saved before they were found.
    alternatives: Mapping[str, Prediction | str] | None


def from_json(content: dict, mesh: Mesh | AbstractMesh, where: str) -> Contents:
    """What `to_json` made.

    Args:
        where: what messages call it.
    """
    if content["format"] != _FORMAT:
        raise PlanError(f"{where} has format {content['format']}; this version of autoshard reads {_FORMAT}")
    check_mesh(content["mesh"], mesh, where)
    arguments = tuple(_placed_from_json(entry) for entry in content["arguments"])
    results = tuple(_placed_from_json(entry) for entry in content["results"])
    reasons = content.get("absent", {})  # older files have none
    found = content["alternatives"]
    alternatives = (
        None
        if found is None
        else {
            name: _prediction_from_json(one) if one else reasons.get(name, "no such sharding")
            for name, one in found.items()
        }
    )
    wants = {}
    for key, words in content["wants"].items():
        equation, operand = map(int, key.split("/"))
        wants[equation, operand] = _layout(words)
    plan = PlanData(
        name=content["name"],
        mesh=with_auto_axes(mesh),
        fingerprint=content["fingerprint"],
        arguments=arguments,
        results=results,
        carried=dict(content["carried"]),
        predicted=_prediction_from_json(content["predicted"]),
        status=content["status"],
        bound=content["bound"],
        cost=content["cost"],
        memory=content["memory"],
        warnings=tuple(content["warnings"]),
        annotations=Annotations(
            homes={int(value): _layout(words) for value, words in content["homes"].items()},
            copies={int(value): _layout(words) for value, words in content["copies"].items()},
            wants=wants,
            scatters={int(equation): _scatter_from_json(entry) for equation, entry in content["scatters"].items()},
            sums={int(value): _layout(words) for value, words in content["sums"].items()},
            implied=frozenset(content["implied"]),
        ),
        argument_tree=Tree.of_indices(_tree_from_json(content["argument_slots"])),
        result_tree=Tree.of_indices(_tree_from_json(content["result_slots"])),
        axis_types=_axis_types(content.get("axis_types")),
        compiled_peak=content.get("compiled_peak"),
        captured=tuple(_placed_from_json(entry) for entry in content.get("captured", ())),
    )
    return Contents(plan, alternatives)


def _axis_types(names: list[str] | None) -> tuple[AxisType, ...] | None:
    return None if names is None else tuple(AxisType[name] for name in names)


def _placed_to_json(placed: PlacedArray) -> dict:
    return {
        "name": placed.name,
        "shape": list(placed.shape),
        "dtype": placed.dtype,
        "spec": _words(placed.layout),
        "local_bytes": placed.local_bytes,
        "on_host": placed.on_host,
        "typed": placed.typed,
    }


def _placed_from_json(entry: dict) -> PlacedArray:
    return PlacedArray(
        entry["name"],
        tuple(entry["shape"]),
        entry["dtype"],
        _layout(entry["spec"]),
        entry["local_bytes"],
        entry.get("on_host", False),
        entry.get("typed", False),
    )


def _prediction_from_json(entry: dict) -> Prediction:
    collectives = tuple(Collective(**one | {"axes": tuple(one["axes"])}) for one in entry["collectives"])
    return Prediction(**entry | {"collectives": collectives})


def _scatter_from_json(entry: dict) -> Scatter:
    stages = ((tuple(axes), groups and tuple(map(tuple, groups))) for axes, groups in entry["stages"])
    return Scatter(entry["dim"], tuple(stages), tuple(entry["others"]))


def _words(layout: Layout) -> list[str]:
    """One word per dim: "data", "data,model", or "" for a whole dim."""
    return [",".join(axes) for axes in layout]


def _layout(words: list[str]) -> Layout:
    return tuple(tuple(word.split(",")) if word else () for word in words)


def _tree_to_json(tree: Any) -> Any:
    """A tree of numbers in tuples, lists and dicts.

    >>> _tree_to_json((0, {"w": [1, None]}))
    {'tuple': [0, {'dict': [['w', {'list': [1, None]}]]}]}
    """
    if isinstance(tree, dict):
        return {"dict": [[key, _tree_to_json(child)] for key, child in tree.items()]}
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: list(map(_tree_to_json, tree))}
    return tree


def _tree_from_json(node: Any) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, children),) = node.items()
    if kind == "dict":
        return {key: _tree_from_json(child) for key, child in children}
    return {"tuple": tuple, "list": list}[kind](map(_tree_from_json, children))
