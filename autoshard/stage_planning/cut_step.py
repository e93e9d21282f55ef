"""A step cut into stages, as the planner takes it: the programs of a stage are planned together, like ones once."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.layout import Layout
from autoshard.microbatches.canonical_forms import form_of
from autoshard.program import Program
from autoshard.solver.searches.search_run import Search
from autoshard.stage_planning.costs import StageCost, SubMeshModel, formulated_stage, stage_cost
from autoshard.stage_planning.joint_stage import JointStage
from autoshard.stage_search.tables import Numbers
from autoshard.stages.programs import Key, StageProgram, StagePrograms
from autoshard.stages.stage_layouts import program_of, replaced_inputs
from autoshard.stages.stage_tactics import StageTactics


@dataclass(frozen=True, eq=False)
class KnownStages:
    """Stages that were planned, by what they look like: several cuts of one step may have the same ones."""

    formulated: dict[Any, JointStage] = field(default_factory=dict)
    costs: dict[Any, StageCost | None] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CutStep:
    """A step cut into stages."""

    programs: StagePrograms
    donated: Collection[int]  # arguments of the step
    fixed: Mapping[int, Layout] = field(default_factory=dict)  # argument -> how it has to lie
    tactics: StageTactics | None = None  # that hold in every stage
    search: str | Search | None = None  # what plans stages, by name or itself; None: the solver's own way
    known: KnownStages = field(default_factory=KnownStages, repr=False)
    _looks: dict[int, Any] = field(default_factory=dict, repr=False)
    _traced: dict[int, list[Program]] = field(default_factory=dict, repr=False)
    _fingerprints: dict[Any, str] = field(default_factory=dict, repr=False)  # by jaxprs' ids, and by their forms

    def of_stage(self, stage: int) -> list[StageProgram]:
        """The programs of one stage."""
        return [program for program in self.programs.programs if program.stage == stage]

    def traced(self, stage: int) -> list[Program]:
        """The same for the planner."""
        if stage not in self._traced:
            self._traced[stage] = [
                program_of(program, self.programs.name, self.programs.carried, self._given)
                for program in self.of_stage(stage)
            ]
        return self._traced[stage]

    @cached_property
    def _given(self) -> list[Key]:
        """Arguments and pieces whose memory the values may take that take their places."""
        pieces = enumerate(self.programs.pieces)
        keys = [Key("argument", i) for i in self.donated]
        keys += [Key("piece", n) for n, piece in pieces if piece.argument in self.donated]
        late = {key: [one for one in several if one.kind == "after"] for key, several in self.programs.readers.items()}
        return [key for key in keys if len(late.get(key, ())) == 1]

    def cost(self, stage: int, where: SubMeshModel, in_flight: float, **effort: Any) -> StageCost | None:
        """One stage planned on a sub-mesh; `effort` are further keywords of `stage_cost`.

        What looks alike is formulated once for each kind of sub-mesh, and planned once in each way.

        Raises:
            ConflictError: the tactics leave nothing there.
            FormulationTimeout: planning on the sub-mesh has to end.
        """
        limit = where.memory * where.backend.usable if math.isfinite(where.memory) else None
        key = self._look(stage), self.programs.microbatches, tuple(where.mesh.shape.items()), where.topology
        asked = key, limit, in_flight, tuple(sorted(effort.items()))
        if asked in self.known.costs:
            return self.known.costs[asked]
        if key not in self.known.formulated:
            self.known.formulated[key] = formulated_stage(
                self.of_stage(stage),
                self.traced(stage),
                where,
                self.programs.microbatches,
                frozenset(self.programs.kept[stage]),
                frozenset(key for key, home in self.programs.homes.items() if home == stage),
                self._fixed,
                self.tactics,
            )
        how: dict[str, Any] = {"until": where.until, "search": self.search, **effort}
        found = stage_cost(self.known.formulated[key], limit, in_flight, **how)
        if time.monotonic() < where.until:  # what a search had time for
            self.known.costs[asked] = found
        return found

    @cached_property
    def _fixed(self) -> dict[Key, Layout]:
        """How arguments have to lie, and so pieces of them. Trips of a stack are never split."""
        pieces = enumerate(self.programs.pieces)
        parts = {Key("piece", n): self.fixed[piece.argument] for n, piece in pieces if piece.argument in self.fixed}
        whole = {Key("argument", i): layout for i, layout in self.fixed.items()}
        return whole | {key: ((), *layout[1:]) for key, layout in parts.items()}

    @cached_property
    def kinds(self) -> list[int]:
        """Per stage, the first stage that is like it: of the same programs, which hand each other the same values."""
        first: dict[Any, int] = {}
        return [first.setdefault(self._look(stage), stage) for stage in range(self.programs.stages)]

    def _look(self, stage: int) -> Any:
        """Equal for stages that are alike, also of other cuts of the same step into as many microbatches."""
        if stage not in self._looks:
            self._looks[stage] = self._look_of(stage)
        return self._looks[stage]

    def _look_of(self, stage: int) -> Any:
        own, kept = self.of_stage(stage), set(self.programs.kept[stage])
        number: dict[Key, int] = {}
        names = [
            [(number.setdefault(key, len(number)), key.kind, key in kept) for key in (*one.inputs, *one.outputs)]
            for one in own
        ]
        prints = tuple((one.kind, self._fingerprint(stage, n)) for n, one in enumerate(own))
        homes = tuple((self.programs.homes.get(key) == stage, self._fixed.get(key)) for key in number)
        # What roles a cut finds is its own.
        left = () if self.tactics is None else (self.tactics, *map(self.tactics.look, own))
        return prints, str(names), homes, left

    def _fingerprint(self, stage: int, number: int) -> str:
        """That of a program of a stage. Of programs that are written alike, one is read."""
        one = self.of_stage(stage)[number]
        taken, given = replaced_inputs(one, self.programs.carried, self._given)
        places = tuple(sorted(taken.items())), given
        known = id(one.jaxpr), *places  # like stages mostly have one jaxpr
        if known not in self._fingerprints:
            form = form_of(one.jaxpr), *places
            if form not in self._fingerprints:
                self._fingerprints[form] = self.traced(stage)[number].fingerprint
            self._fingerprints[known] = self._fingerprints[form]
        return self._fingerprints[known]

    def crossing(self) -> tuple[Numbers, Numbers]:
        """Bytes of one microbatch that cross the cut before each stage, forward and backward; 0 at both ends."""
        found = np.zeros((2, self.programs.stages + 1))
        seen: set[tuple[Key, int]] = set()
        for (source, target), keys in self.programs.sends.items():
            low, high = sorted((source, target))
            for key in keys:
                for k in range(low + 1, high + 1):
                    if (key, k) not in seen:
                        seen.add((key, k))
                        found[int(source > target), k] += self.programs.bytes_of(key)
        return found[0], found[1]
