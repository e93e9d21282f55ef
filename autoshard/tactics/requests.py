"""Tactics in, what they ask for along each mesh axis out; or what contradicts itself, or finds nothing to apply to."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from autoshard.errors import ArgumentError, ConflictError, MeshError
from autoshard.errors.kinds import is_of_kind
from autoshard.layout import Layout, spec_of, without_idle_axes
from autoshard.program.signature import text_of_function
from autoshard.specs import fixed_layouts
from autoshard.tactics.roles import Dim, Roles
from autoshard.tactics.rules import AxisRule
from autoshard.tactics.schemes import Tactic

TacticLike = Tactic | Callable[["Step"], Any]


@dataclass(frozen=True)
class StepArgument:
    """One argument of a step, as a function that is a tactic sees it.

    Attributes:
        name: its path, "state/params/w".
        shape: of the whole array.
        role: "batch", whose rows the step goes through; "weight" of products, or of experts, "expert"; "table", as of
            embeddings; "parameter", a scale or bias; "cache", state with rows of the batch; "optimizer", all other
            state, and "expert_optimizer", what of that has the shape of an expert's weight.
        dims: what each dim is.
    """

    name: str
    shape: tuple[int, ...]
    role: str
    dims: tuple[Dim, ...]


@dataclass(frozen=True)
class Step:
    """What a function that is a tactic sees of a step."""

    name: str
    mesh: Mapping[str, int]  # axis -> devices, axes of one device included
    arguments: tuple[StepArgument, ...]

    @classmethod
    def of(cls, roles: Roles, mesh: Mapping[str, int]) -> Step:
        """That of a formulation."""
        program = roles.step.program
        kinds = {i: kind.name.lower() for i, kind in roles.state.items()} | dict.fromkeys(roles.batch, "batch")
        arguments = (
            StepArgument(value.name, value.shape, kinds[i], roles.dims_of_argument(i))
            for i, value in enumerate(program.arguments)
        )
        return cls(program.name, dict(mesh), tuple(arguments))


@dataclass(frozen=True)
class AxisRequest:
    """What one tactic says of one axis."""

    tactic: Tactic
    basis: AxisRule
    own: AxisRule


@dataclass
class TacticRequests:
    """What all tactics together ask for."""

    requests: dict[str, list[AxisRequest]] = field(default_factory=dict)  # axis -> what tactics say of it
    layouts: dict[int, tuple[Layout, str]] = field(default_factory=dict)  # argument -> its layout, which function
    tactics: list[Tactic] = field(default_factory=list)

    def rule(self, axis: str) -> AxisRule:
        """What holds along an axis: the basis that its tactics share, and what each says in its place, in order."""
        requests = self._in_order(axis)
        return functools.reduce(lambda rule, one: rule.refined(one.own), requests, requests[0].basis)

    def speaker(self, axis: str, says: Callable[[AxisRule], bool] = lambda rule: True) -> Tactic:
        """The last tactic that says something itself of an axis; the first where all rest on the basis for it."""
        requests = self._in_order(axis)
        return next((one.tactic for one in reversed(requests) if says(one.own)), requests[0].tactic)

    def _in_order(self, axis: str) -> list[AxisRequest]:
        return sorted(self.requests[axis], key=lambda one: one.tactic.order)


def is_tactic(one: Any) -> bool:
    """Whether it is a tactic, or a function that may be one: not a class of them."""
    return not isinstance(one, type) and (isinstance(one, Tactic) or callable(one))


def text_of_tactic(tactic: TacticLike) -> str:
    """A tactic as a user writes it, or the name of a function that is one: the same in any process."""
    return repr(tactic) if isinstance(tactic, Tactic) else text_of_function(tactic)


def ask(asked: TacticRequests, tactic: TacticLike, roles: Roles, mesh: Mapping[str, int]) -> None:
    """Adds what a tactic asks for.

    Raises:
        ConflictError: it contradicts an earlier one, or finds nothing to apply to.
        MeshError: the mesh does not have its axis.
    """
    if not isinstance(tactic, Tactic):
        _ask_function(asked, tactic, roles, mesh)
        return
    axes = tactic.axes_after(asked.tactics, mesh)
    if unknown := [axis for axis in axes if axis not in mesh]:
        raise MeshError(f"{tactic} names the axis {unknown[0]!r}; the mesh has {', '.join(map(repr, mesh))}")
    _check_applies(tactic, roles)
    for axis, (basis, own) in tactic.rules(axes).items():
        requests = asked.requests.setdefault(axis, [])
        for one in requests:
            is_same_step = one.tactic.order == tactic.order and one.own != own
            if one.basis != basis or is_same_step:
                raise ConflictError(
                    f"{one.tactic} and {tactic} both say what the mesh axis {axis!r} does, and differ.\n"
                    "Give one of them another axis, or drop it."
                )
        requests.append(AxisRequest(tactic, basis, own))
    asked.tactics.append(tactic)


def _ask_function(asked: TacticRequests, tactic: Callable[[Step], Any], roles: Roles, mesh: Mapping[str, int]) -> None:
    """Adds what a function returns: tactics, or PartitionSpecs by path or glob."""
    found = tactic(Step.of(roles, mesh))
    if isinstance(found, Mapping):
        for pattern, spec in found.items():
            if not isinstance(pattern, str) or not isinstance(spec, PartitionSpec):
                raise ArgumentError(
                    f"{text_of_tactic(tactic)} returned {pattern!r}: {spec!r}; "
                    "a path or glob and its PartitionSpec are needed"
                )
        _ask_layouts(asked, f"{text_of_tactic(tactic)}(step)", found, roles, mesh)
        return
    tactics: list[Any] = list(found) if is_of_kind(found, Iterable[Any]) else [found]
    if not all(map(is_tactic, tactics)):
        raise ArgumentError(
            f"{text_of_tactic(tactic)} returned {found!r}; tactics are needed, or PartitionSpecs by path"
        )
    for one in tactics:
        ask(asked, one, roles, mesh)


def _ask_layouts(
    asked: TacticRequests, requested_by: str, specs: Mapping[str, PartitionSpec], roles: Roles, mesh: Mapping[str, int]
) -> None:
    """Adds layouts by path or glob, of which each fits some argument."""
    program = roles.step.program
    for i, found in fixed_layouts(program, specs, mesh, requested_by).items():
        layout = without_idle_axes(found, roles.step.mesh)
        other, other_by = asked.layouts.setdefault(i, (layout, requested_by))
        if other != layout:
            raise ConflictError(
                f"{other_by} wants {program.arguments[i]} to be {spec_of(other)}, {requested_by} wants it to be "
                f"{spec_of(layout)}.\nDrop one of them."
            )


_NEEDED = {
    Dim.BATCH: "no batch: every argument is carried from step to step, or has no rows",
    Dim.FEATURE: "no product with a weight",
    Dim.SEQUENCE: "no sequence: products with weights have no rows beside the batch",
    Dim.HEAD: "no attention: no product of two activations keeps heads",
    Dim.EXPERT: "no experts: no product with a weight has a dim that both, and the result, have. A ragged product has "
    "none that can be split",
}


def _check_applies(tactic: Tactic, roles: Roles) -> None:
    has = Dim.OTHER
    for kind in roles.dims.values():
        has |= kind
    for need, what in _NEEDED.items():
        if need & tactic.needs and not need & has:
            raise ConflictError(f"{tactic} finds nothing to apply to in {roles.step.program.name}: {what}.")
