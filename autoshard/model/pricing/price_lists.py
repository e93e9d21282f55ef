"""A program in, its groups and its price lists out: what these have in common is found once, whatever they offer."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from autoshard.layout import MeshShape
from autoshard.mesh.topology import Topology
from autoshard.model.grouping import groups_of
from autoshard.model.groups import Group
from autoshard.model.pricing.prices import PriceList
from autoshard.model.pricing.resharding_steps import ReshardingSteps
from autoshard.model.regions.pricing import RegionPrices
from autoshard.model.weights import made_of_state, waited_for
from autoshard.model.xla.backends import Backend
from autoshard.model.xla.convolutions import image_dims
from autoshard.model.xla.fusion import read_through
from autoshard.model.xla.loop_memory import (
    kept_on_chip_in_loops,
    lying_by_slices,
    rounded_for_loops,
    turns_that_read,
)
from autoshard.model.xla.operations import bytes_stacked_by_loop
from autoshard.model.xla.products import matrix_dims
from autoshard.model.xla.rounding import Itemsizes, itemsizes_of
from autoshard.model.xla.units.chip_memory import kept_on_chip_for_readers, made_with_products, scaled, stored_nowhere
from autoshard.model.xla.units.rows import lying_by_rows
from autoshard.model.xla.units.scalar_unit import places_of
from autoshard.program import Program
from autoshard.propagation.registry import rule_of
from autoshard.propagation.rule import Rule

if TYPE_CHECKING:
    from autoshard.model.formulation import Formulation


@dataclass(frozen=True)
class PriceLists:
    """A program as its compiler groups it, and how its prices are made."""

    program: Program  # as the compiler runs it
    groups: list[Group]
    backend: Backend  # as it combines what these groups send
    prices: Callable[
        ..., PriceList
    ]  # takes what is `offered`, and other keywords of `PriceList` that not all lists share

    @classmethod
    def of(
        cls,
        program: Program,
        rules: Sequence[Rule],
        mesh: MeshShape,
        topology: Topology,
        backend: Backend,
        formulate: Callable[..., Formulation],
    ) -> PriceLists:
        """Those of a program as it was traced.

        Args:
            formulate: as for `RegionPrices`.
        """
        traced, program = program, program.running_on(backend.lowers_as)
        if program is not traced:
            pairs = zip(program.equations, rules, strict=True)
            rules = [rule_of(equation) if equation.primitive in ("check", "idle") else rule for equation, rule in pairs]
        groups = groups_of(program, rules, backend, mesh)
        backend = replace(backend, combining=backend.combining.counted(groups), streams=backend.streams.counted(groups))
        itemsizes, weights = itemsizes_of(program, groups, backend.rounding), made_of_state(program, groups)
        prices = functools.partial(
            PriceList,
            mesh,
            topology,
            itemsizes,
            backend,
            weights=weights,
            waited_for=waited_for(groups, weights),
            stacked=bytes_stacked_by_loop(program),
            kept=_kept(program, groups, itemsizes, backend, math.prod(mesh.values())),
            products=made_with_products(groups) if backend.streams.bandwidth_share else None,
            turns=turns_that_read(program) if backend.loop_memory.fetched_share else None,
            rounded=rounded_for_loops(program, itemsizes),
            places=places_of(program) if backend.number_bytes else None,
            instead=read_through(groups),
            images=image_dims(program),
            matrices=_minor_dims(program) if backend.tile else None,
            steps=ReshardingSteps(mesh, backend.gathers),
            regions=RegionPrices(program, mesh, topology, backend, formulate),
        )
        return cls(program, groups, backend, prices)


def _minor_dims(program: Program) -> dict[int, tuple[int, ...]]:
    """Values whose two minor dims are not any -> those among which they are."""
    return matrix_dims(program) | lying_by_rows(program) | lying_by_slices(program)


def _kept(
    program: Program, groups: Sequence[Group], itemsizes: Itemsizes, backend: Backend, devices: int
) -> dict[int, int] | None:
    """What lies in a chip's own memory -> the bytes of all that lie there with it; 0 of what lies nowhere."""
    room = backend.loop_memory
    if not room.bytes:
        return None
    between = (
        kept_on_chip_for_readers(program, groups, backend.on_chip_bytes * devices) if backend.on_chip_bytes else {}
    )
    nowhere = dict.fromkeys(stored_nowhere(groups), 0)
    return (
        scaled(between, backend.on_chip_bytes, room.bytes) | nowhere | kept_on_chip_in_loops(program, itemsizes, room)
    )
