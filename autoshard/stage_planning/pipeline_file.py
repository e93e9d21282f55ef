"""What a plan of stages says beside other plans, to JSON and back: its stages, its programs, where arrays lie."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import AutoshardError
from autoshard.layout import Layout, MeshShape, spec_of
from autoshard.plans.files import prediction_from_json
from autoshard.plans.nodes import Node
from autoshard.plans.plan import PlanData
from autoshard.plans.prediction import Prediction
from autoshard.stage_planning.planned_stage import PlannedStage, TaskCosts
from autoshard.stages.running.views import StackSharding, stack_sharding
from autoshard.stages.saved_pipeline import MeshPart, SavedPipeline, mesh_part

if TYPE_CHECKING:
    from autoshard.stage_planning.pipeline_plan import PipelinePlan

PIPELINE = "pipeline"  # the field of a file that other plans do not have


@dataclass(frozen=True)
class ArrayPart:
    """A part along dim 0 of an argument or result, all of it mostly, on the stage that keeps it."""

    device: int  # of the schedule
    shape: tuple[int, ...]
    layout: Layout | None  # None: no program of the stage reads it


ArrayParts = tuple[ArrayPart, ...]


def stacked(mesh: Mesh | AbstractMesh, parts: Sequence[MeshPart], own: ArrayParts) -> StackSharding:
    """How the parts of a stack lie as one array, of which each stage keeps some rows."""
    shardings = [
        NamedSharding(parts[one.device].on(mesh), PartitionSpec() if one.layout is None else spec_of(one.layout))
        for one in own
    ]
    return stack_sharding([one.shape for one in own], shardings, [parts[one.device].devices for one in own])


def devices_at(mesh: Mesh | AbstractMesh, places: Sequence[int]) -> tuple[Any, ...]:
    """The devices at these places of the whole mesh; the places themselves where it has none."""
    return tuple(mesh.devices.flat[place] for place in places) if isinstance(mesh, Mesh) else tuple(places)


def pipeline_to_json(plan: PipelinePlan) -> dict[str, Any]:
    """As numbers, words, lists and dicts."""
    assert plan.saved is not None and plan.costs is not None, "it is made of a pipeline"
    without = plan.without
    return plan.saved.to_json() | {
        "shown_stages": [[stage.seconds, stage.peak_bytes, stage.in_flight, stage.sent_bytes] for stage in plan.stages],
        "task_costs": {name: _listed(one) for name, one in asdict(plan.costs).items()},
        "argument_parts": list(map(_parts_to_json, plan.argument_parts)),
        "result_parts": list(map(_parts_to_json, plan.result_parts)),
        "without": without if without is None or isinstance(without, str) else asdict(without),
    }


def _listed(value: Any) -> Any:
    return list(map(_listed, value)) if isinstance(value, tuple) else value


def _parts_to_json(parts: ArrayParts) -> list[Any]:
    return [[one.device, list(one.shape), _listed(one.layout)] for one in parts]


def pipeline_from_json(node: Node, plan: PlanData) -> dict[str, Any]:
    """The fields that `pipeline_to_json` wrote.

    Raises:
        ValueError: it is not what that wrote; the message says where.
    """
    content = dict(node.fields())
    own = {name: content.pop(name, None) for name in ("shown_stages", "task_costs", "argument_parts", "result_parts")}
    without = content.pop("without", None)
    saved = SavedPipeline.from_json(Node(content, node.path))
    shown = {name: Node(value, f"{node.path}/{name}") for name, value in own.items()}
    try:
        order = saved.order()
        costs = _costs(shown["task_costs"])
        timeline = costs.timeline(order)
    except AutoshardError as error:
        raise node.wrong(f"a schedule that can run ({error})") from error
    if any(place >= plan.mesh.size for part in saved.parts for place in part.devices) or len(saved.parts) != (
        order.stages
    ):
        raise node["parts"].wrong("parts of the mesh")
    rows = shown["shown_stages"].parts()
    if not 0 < len(rows) <= len(order.placement):
        raise shown["shown_stages"].wrong("stages of the schedule")
    stages: list[PlannedStage] = []
    for device, row in zip(order.placement, rows, strict=False):
        part, (seconds, peak, in_flight, sent) = saved.parts[device], row.parts(4)
        layers = saved.layers[len(stages)] if len(stages) < len(saved.layers) else ()
        figures = seconds.number(), peak.count(), in_flight.number(), sent.number()
        stages.append(PlannedStage(layers, part.on(plan.mesh), devices_at(plan.mesh, part.devices), {}, *figures))

    def parts_of(name: str, arrays: int) -> tuple[ArrayParts, ...]:
        found = shown[name].items(lambda one: one.items(lambda part: _part(part, saved.parts)))
        if len(found) != arrays:
            raise shown[name].wrong(f"the parts of {arrays} arrays")
        return found

    return {
        "saved": saved,
        "costs": costs,
        "stages": tuple(stages),
        "timeline": timeline,
        "argument_parts": parts_of("argument_parts", len(plan.arguments)),
        "result_parts": parts_of("result_parts", len(plan.results)),
        "without": Node(without, f"{node.path}/without").optional(lambda one: _without(one, dict(plan.mesh.shape))),
    }


def _without(node: Node, axes: MeshShape) -> Prediction | str:
    return node.text() if isinstance(node.value, str) else prediction_from_json(node, axes)


def _costs(node: Node) -> TaskCosts:
    names = [one.name for one in fields(TaskCosts)]
    node.only(names)
    rows = {name: node[name].items(Node.number) for name in names if name != "transfer"}
    return TaskCosts(**rows, transfer=node["transfer"].items(lambda row: row.items(Node.number)))


def axes_of_arrays(node: Node, mesh: MeshShape) -> dict[str, list[MeshShape]]:
    """The mesh by which each argument and each result is split: that of the stage that keeps it.

    Args:
        node: what `pipeline_to_json` wrote.
        mesh: the whole.

    Raises:
        ValueError: it is not what that wrote; the message says where.
    """
    parts = node["parts"].items(mesh_part)

    def axes(array: Node) -> MeshShape:
        own = [one.device for one in array.items(lambda part: _part(part, parts)) if one.layout is not None]
        return {axis: parts[own[0]].axes.get(axis, 1) for axis in mesh} if own else mesh

    return {name: [axes(one) for one in node[f"{name[:-1]}_parts"].parts()] for name in ("arguments", "results")}


def _part(node: Node, parts: Sequence[MeshPart]) -> ArrayPart:
    device, shape, layout = node.parts(3)
    if device.count() >= len(parts):
        raise device.wrong("a device of the schedule")
    axes = parts[device.count()].axes
    read = layout.optional(lambda one: one.items(lambda dim: dim.items(lambda axis: axis.one_of(axes))))
    return ArrayPart(device.count(), shape.items(Node.count), read)
