"""A plan to JSON, and back."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, fields, replace
from typing import Any, NamedTuple

from jax.sharding import AbstractMesh, AxisType, Mesh

from autoshard.errors import PlanError
from autoshard.layout import Layout, MeshShape, divides, with_auto_axes
from autoshard.mesh.collectives import KINDS, Collective
from autoshard.operations.split import CallRun
from autoshard.plans.annotations import Annotations, Scatter
from autoshard.plans.compiler_options import SCHEDULING_OPTIONS
from autoshard.plans.nodes import Node, number_of
from autoshard.plans.plan import PlacedArray, PlanData, check_mesh
from autoshard.plans.prediction import Prediction
from autoshard.plans.shown_json import shown_from_json, shown_to_json
from autoshard.plans.tree_json import tree_from_json, tree_to_json
from autoshard.program.paths import printable
from autoshard.program.trees import Tree

_FORMAT = 4  # version of plan files; raised when files written before can no longer be read


def to_json(plan: PlanData, alternatives: Mapping[str, Prediction | str] | None) -> dict:
    """A plan as numbers, words, lists and dicts.

    Args:
        alternatives: the figures that it is compared with, or why there are none; None if they have not been found.
    """
    annotations, mesh = plan.annotations, dict(plan.mesh.shape)
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
        "arguments": [_placed_to_json(placed, mesh) for placed in plan.arguments],
        "results": [_placed_to_json(placed, mesh) for placed in plan.results],
        "carried": list(plan.carried.items()),
        "predicted": asdict(plan.predicted),
        "alternatives": figures,
        "absent": reasons,
        "argument_slots": tree_to_json(plan.argument_tree.plain(range(len(plan.arguments)))),
        "result_slots": tree_to_json(plan.result_tree.plain(range(len(plan.results) + len(plan.arguments)))),
        "homes": {str(value): _words(layout, mesh) for value, layout in annotations.homes.items()},
        "copies": {str(value): _words(layout, mesh) for value, layout in annotations.copies.items()},
        "wants": {f"{e}/{operand}": _words(layout, mesh) for (e, operand), layout in annotations.wants.items()},
        "scatters": {str(equation): asdict(scatter) for equation, scatter in annotations.scatters.items()},
        "sums": {str(value): _words(layout, mesh) for value, layout in annotations.sums.items()},
        "implied": sorted(annotations.implied),
        **_of_some_plans(plan),
    }


def _of_some_plans(plan: PlanData) -> dict:
    """What is left out of the file of a plan that has none of it, so that this file is as older versions wrote it."""
    mesh = dict(plan.mesh.shape)
    captured = [_placed_to_json(placed, mesh) for placed in plan.captured]
    in_place = sorted(set(range(len(plan.results))).difference(plan.result_tree.order))
    runs = {str(equation): [run.name, *map(list, run.roles)] for equation, run in plan.annotations.runs.items()}
    return (
        ({"captured": captured} if captured else {})
        | ({"runs": runs} if runs else {})
        | ({"in_place": in_place} if in_place else {})  # results that stand in modules among the arguments alone
        | ({"compiled_peak": plan.compiled_peak} if plan.compiled_peak is not None else {})
        | ({"compiler_options": dict(plan.compiler_options)} if plan.compiler_options else {})
        | ({"meshes": [[dict(shape), *figures] for shape, *figures in plan.meshes]} if plan.meshes else {})
        | ({"rewrites": [[name, list(places)] for name, places in plan.rewrites]} if plan.rewrites else {})
        | ({"state_on_hosts": True} if plan.state_on_hosts else {})
        | ({"shown": shown_to_json(plan)} if plan.memory_use is not None or plan.machine is not None else {})
    )


# The last field: a digest of the text before it, as `to_text` writes both. Other programs write other text.
_DIGEST = re.compile(r',\n "digest": "([0-9a-f]{64})"\n}\n*\Z')


def to_text(content: dict) -> str:
    """What `to_json` made as the text of a file, with a digest that tells a damaged one."""
    body = json.dumps(content, indent=1).removesuffix("\n}")
    return f'{body},\n "digest": "{hashlib.sha256(body.encode()).hexdigest()}"\n}}\n'


def from_text(text: str) -> Any:
    """What JSON says, if it is what was written.

    Raises:
        ValueError: it is no JSON, or it is damaged.
        RecursionError: it is nested too deep to be a plan.
    """
    if not isinstance(text, str):
        raise ValueError(f"it is {text!r}, where a text is needed")
    text = text.replace("\r\n", "\n")
    found = _DIGEST.search(text)
    if found and hashlib.sha256(text[: found.start()].encode()).hexdigest() != found[1]:
        raise ValueError(
            "its digest is that of another text, so that it was damaged, merged or edited; whoever means an edit takes "
            'the last field, "digest", out'
        )
    return json.loads(text)


class Contents(NamedTuple):
    """What a file says."""

    plan: PlanData
    # Figures that it is compared with, or why there are none. None: it was saved before they were found.
    alternatives: Mapping[str, Prediction | str] | None


def from_json(
    content: Any, mesh: Mesh | AbstractMesh, where: str, own_axes: Mapping[str, Sequence[MeshShape]] | None = None
) -> Contents:
    """What `to_json` made.

    Args:
        content: anything that JSON can hold; it is checked throughout.
        where: what messages call it.
        own_axes: by "arguments" and "results", the mesh of each array; by default that of the plan. An array of a stage
            lies on the stage's own part, and splits by that evenly.

    Raises:
        PlanError: it is of another format, or for another mesh.
        ValueError: it is not what `to_json` makes; the message says where.
    """
    node = Node(content)
    if (found := node["format"].value) != _FORMAT:
        raise PlanError(f"{where} has format {found!r}; this version of autoshard reads {_FORMAT}")
    node.only(_FIELDS)
    if (digest := node.get("digest")) is not None and not re.fullmatch("[0-9a-f]{64}", digest.name()):
        raise digest.wrong("a digest")
    check_mesh({axis: size.count() for axis, size in node["mesh"].entries()}, mesh, where)
    axes = dict(mesh.shape)
    arguments, results, captured = (
        () if (entries := node.get(name)) is None else _all_placed(entries, axes, (own_axes or {}).get(name))
        for name in ("arguments", "results", "captured")
    )
    annotations = Annotations(
        homes=_layouts(node["homes"], axes),
        copies=_layouts(node["copies"], axes),
        wants={_operand(key): _layout(words, axes) for key, words in node["wants"].entries()},
        scatters={number_of(e, "scatters"): _scatter(entry, axes) for e, entry in node["scatters"].entries()},
        sums=_layouts(node["sums"], axes),
        implied=frozenset(node["implied"].items(Node.count)),
        runs={}
        if (runs := node.get("runs")) is None
        else {number_of(e, "runs"): _run(one, axes) for e, one in runs.entries()},
    )
    in_place = () if (entries := node.get("in_place")) is None else entries.items(Node.count)
    plan = PlanData(
        name=node["name"].name(),
        mesh=with_auto_axes(mesh),
        fingerprint=node["fingerprint"].name(),
        arguments=arguments,
        results=results,
        carried=_carried(node["carried"], len(arguments) + len(captured), len(results)),
        predicted=prediction_from_json(node["predicted"], axes),
        status=node["status"].one_of(("optimal", "feasible")),
        bound=node["bound"].number(),
        cost=node["cost"].number(),
        memory=node["memory"].optional(Node.number),
        warnings=node["warnings"].items(Node.text),
        annotations=annotations,
        argument_tree=_argument_tree(node["argument_slots"], len(arguments)),
        result_tree=tree_from_json(node["result_slots"], len(results), in_place, len(arguments)),
        axis_types=None if (types := node.get("axis_types")) is None else _axis_types(types, len(axes)),
        compiled_peak=None if (peak := node.get("compiled_peak")) is None else peak.optional(Node.count),
        captured=captured,
        compiler_options={} if (chosen := node.get("compiler_options")) is None else _compiler_options(chosen),
        meshes=() if (meshes := node.get("meshes")) is None else meshes.items(_figures_of_mesh),
        rewrites=() if (laws := node.get("rewrites")) is None else laws.items(_places_of_law),
        state_on_hosts=False if (moved := node.get("state_on_hosts")) is None else moved.flag(),
        **({} if (shown := node.get("shown")) is None else shown_from_json(shown, axes)),
    )
    return Contents(plan, _alternatives(node["alternatives"], node.get("absent"), axes))


_FIELDS = (
    *("format", "name", "fingerprint", "mesh", "axis_types", "status", "bound", "cost", "memory", "warnings"),
    *("arguments", "results", "captured", "carried", "predicted", "alternatives", "absent"),
    *("argument_slots", "result_slots", "homes", "copies", "wants", "scatters", "sums", "implied"),
    *(
        "runs",
        "in_place",
        "compiled_peak",
        "compiler_options",
        "meshes",
        "rewrites",
        "state_on_hosts",
        "shown",
        "digest",
    ),
)


def _places_of_law(node: Node) -> tuple[str, tuple[int, ...]]:
    name, places = node.parts(2)
    return name.name(), places.items(Node.count)


def _compiler_options(node: Node) -> dict[str, bool | int]:
    """Options that change no number: only those that plans are compiled with are read."""
    found: dict[str, bool | int] = {}
    for name, value in node.entries():
        if name not in SCHEDULING_OPTIONS:
            raise ValueError(f"compiler_options has {name!r}, which no plan is compiled with")
        found[name] = value.value if isinstance(value.value, bool) else value.count()
    return found


def _figures_of_mesh(node: Node) -> tuple[dict[str, int], float, int]:
    shape, seconds, peak = node.parts(3)
    return {axis: size.count() for axis, size in shape.entries()}, seconds.number(), peak.count()


def _alternatives(found: Node, absent: Node | None, axes: MeshShape) -> dict[str, Prediction | str] | None:
    if found.value is None:
        return None
    reasons = {} if absent is None else {name: reason.text() for name, reason in absent.entries()}  # older files: none
    return {
        printable(name): reasons.get(name, "no such sharding") if one.value is None else prediction_from_json(one, axes)
        for name, one in found.entries()
    }


def _argument_tree(node: Node, arrays: int) -> Tree:
    tree = tree_from_json(node, arrays)
    kinds = [child.structure.node_data() for child in tree.children()]
    if [kind and kind[0] for kind in kinds] != [tuple, dict]:
        raise node.wrong("a tuple of positional and a dict of keyword arguments")
    return tree


def _carried(node: Node, arguments: int, results: int) -> dict[int, int]:
    pairs = [(a.count(), r.count()) for a, r in (pair.parts(2) for pair in node.parts())]
    if any(a >= arguments or r >= results for a, r in pairs) or len(dict(pairs)) < len(pairs):
        raise node.wrong("pairs of an argument and a result")
    return dict(pairs)


def _axis_types(node: Node, axes: int) -> tuple[AxisType, ...] | None:
    if node.value is None:
        return None
    return tuple(AxisType[one.one_of(AxisType.__members__)] for one in node.parts(axes))


def _operand(key: str) -> tuple[int, int]:
    equation, _, operand = key.partition("/")
    return number_of(equation, "wants"), number_of(operand, "wants")


def _layouts(node: Node, axes: MeshShape) -> dict[int, Layout]:
    return {number_of(value, node.path): _layout(words, axes) for value, words in node.entries()}


def _placed_to_json(placed: PlacedArray, mesh: MeshShape) -> dict:
    return {
        "name": placed.name,
        "shape": list(placed.shape),
        "dtype": placed.dtype,
        "spec": _words(placed.layout, mesh),
        "local_bytes": placed.local_bytes,
        "on_host": placed.on_host,
        "typed": placed.typed,
    }


def _all_placed(entries: Node, axes: MeshShape, own: Sequence[MeshShape] | None) -> tuple[PlacedArray, ...]:
    found = entries.parts()
    if own is not None and len(own) != len(found):
        raise entries.wrong(f"{len(own)} arrays")
    return tuple(map(_placed_from_json, found, [axes] * len(found) if own is None else own))


def _placed_from_json(entry: Node, axes: MeshShape) -> PlacedArray:
    entry.only(("name", "shape", "dtype", "spec", "local_bytes", "on_host", "typed"))
    on_host, typed = (False if (one := entry.get(name)) is None else one.flag() for name in ("on_host", "typed"))
    shape, layout = entry["shape"].items(Node.count), _layout(entry["spec"], axes)
    if len(layout) != len(shape) or not divides(shape, layout, axes):
        raise entry["spec"].wrong(f"a layout that splits {list(shape)} evenly")
    dtype = entry["dtype"].name()
    return PlacedArray(entry["name"].name(), shape, dtype, layout, entry["local_bytes"].count(), on_host, typed)


def prediction_from_json(node: Node, axes: MeshShape) -> Prediction:
    """A prediction that was written as its fields.

    Raises:
        ValueError: it is none; the message says where.
    """
    kinds = {one.name: one.type for one in fields(Prediction)}
    node.only(kinds)
    for name in (one.name for one in fields(Prediction) if one.default is MISSING and node.get(one.name) is None):
        raise node.wrong(f"a prediction with {name}")
    fields_read: dict[str, Any] = {
        name: (Node.count if kinds[name] == "int" else Node.number)(one)
        for name, one in node.entries()
        if name != "collectives"
    }
    return Prediction(**fields_read, collectives=node["collectives"].items(lambda one: _collective(one, axes)))


def _collective(node: Node, axes: MeshShape) -> Collective:
    node.only([one.name for one in fields(Collective)])
    return Collective(
        kind=node["kind"].one_of(KINDS),
        axes=_axes(node["axes"], axes),
        bytes=node["bytes"].count(),
        count=node["count"].count(),
        source=node["source"].name(),
        why=node["why"].name(),
        is_per_turn=False if (one := node.get("is_per_turn")) is None else one.flag(),
    )


def _scatter(node: Node, axes: MeshShape) -> Scatter:
    node.only(("dim", "stages", "others"))

    def stage(one: Node) -> tuple[tuple[str, ...], tuple[tuple[int, ...], ...] | None]:
        over, groups = one.parts(2)
        return _axes(over, axes), groups.optional(lambda found: found.items(lambda group: group.items(Node.count)))

    return Scatter(node["dim"].count(), node["stages"].items(stage), _axes(node["others"], axes))


def _run(node: Node, axes: MeshShape) -> CallRun:
    name, *roles = node.parts()

    def role(one: Node) -> tuple[str, tuple[str, ...]]:
        what, over = one.parts(2)
        return what.name(), _axes(over, axes)

    return CallRun(name.text(), tuple(map(role, roles)))


def _axes(node: Node, axes: MeshShape) -> tuple[str, ...]:
    return node.items(lambda axis: axis.one_of(axes))


def _words(layout: Layout, mesh: MeshShape) -> list[str | list[str]]:
    """One word per dim: "data", "data,model", or "" for a whole dim; lists where names of the mesh are no such words.

    >>> _words((("x", "y"), ()), {"x": 2, "y": 2}), _words((("a,b",), ()), {"a,b": 2})
    (['x,y', ''], [['a,b'], []])
    """
    if any("," in axis or not axis for axis in mesh):
        return list(map(list, layout))
    return [",".join(axes) for axes in layout]


def _layout(node: Node, axes: MeshShape) -> Layout:
    """What `_words` wrote.

    Raises:
        ValueError: it names an axis that the mesh does not have, or one twice.
    """

    def dim(word: Node) -> tuple[str, ...]:
        if isinstance(word.value, str):
            word = replace(word, value=word.value.split(",") if word.value else [])
        return _axes(word, axes)

    layout = node.items(dim)
    named = [axis for axes in layout for axis in axes]
    if len(set(named)) < len(named):
        raise node.wrong("a layout that names each axis once")
    return layout
