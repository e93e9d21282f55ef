"""The arguments of a step in, a tree of them that folds out: keys of their paths are its branches."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from autoshard.plans.plan import PlacedArray
from autoshard.report.folding import folded
from autoshard.report.html.elements import Html, element
from autoshard.report.html.tables import Colours, axis_html, spec_html
from autoshard.report.units import bytes_text

_OPEN_LEVELS = 2  # levels that are open at first, as long as they have few branches
_FEW_BRANCHES = 12  # of a level that is open at first, so that what is open fits on a screen


@dataclass
class _Branch:
    """A key of paths, and what stands below it."""

    bytes: int = 0  # per device
    axes: dict[str, None] = field(default_factory=dict)  # mesh axes that split something below
    branches: dict[str, _Branch] = field(default_factory=dict)
    leaves: list[tuple[str, list[PlacedArray]]] = field(default_factory=list)


def tree_html(placed: Sequence[PlacedArray], colours: Colours) -> Html:
    """Arrays that lie alike under one pattern, in a tree of their paths."""
    root = _Branch()
    for name, alike in folded(placed):
        *keys, last = name.split("/")
        size = sum(one.local_bytes for one in alike)
        branch = root
        axes = dict.fromkeys(axis for axes in alike[0].layout for axis in axes)
        for key in keys:
            branch = branch.branches.setdefault(key, _Branch())
            branch.bytes += size
            branch.axes |= axes
        branch.leaves.append((last, alike))
    return element("div", *_below(root, colours, 0), class_="tree")


def _below(branch: _Branch, colours: Colours, depth: int) -> Iterable[Html]:
    for name, alike in branch.leaves:
        yield _leaf(name, alike, colours)
    for key, below in branch.branches.items():
        while len(below.branches) == 1 and not below.leaves:  # a chain of keys is one branch
            ((inner, below),) = below.branches.items()
            key = f"{key}/{inner}"
        few = len(branch.branches) <= _FEW_BRANCHES
        summary = element(
            "summary",
            element("span", key, class_="path"),
            element("span", *(axis_html(axis, colours) for axis in colours if axis in below.axes)),
            element("span", bytes_text(below.bytes), class_="size soft"),
        )
        yield element("details", summary, *_below(below, colours, depth + 1), open=depth < _OPEN_LEVELS and few)


def _leaf(name: str, alike: list[PlacedArray], colours: Colours) -> Html:
    count = element("span", f"\N{MULTIPLICATION SIGN}{len(alike)}", class_="soft") if len(alike) > 1 else Html()
    size = sum(one.local_bytes for one in alike)
    return element(
        "div",
        element("span", name, class_="path"),
        count,
        element("span", alike[0].type, class_="path soft"),
        spec_html(alike[0].layout, colours),
        element("span", bytes_text(size), class_="size soft"),
        class_="leaf",
    )
