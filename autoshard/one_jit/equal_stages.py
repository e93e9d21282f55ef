"""A step in, out its programs cut so that all stages but the first and the last are alike: one loop's equal parts.

Stage 0 has what comes before the loop over layers, stage S + 1 what comes after it, and stages 1 to S have equally many
trips each. What stands at one place among the inputs of all S programs is a *port*. It says where the arrays are from:

=========  ===============================================================================
kind       the array of stage s
=========  ===============================================================================
microbatch the number of the microbatch
stacked    rows of an argument, as many for each stage: `number` is the argument
shared     one array for all stages: an argument, constant, or value of the first stage
early      what the stage computes before its first microbatch
sum        a sum so far of the stage itself
own        what the forward program of the stage made of the same microbatch
passed     what the stage before made (F), or the stage after (B); at the end, the first or last stage of all
=========  ===============================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from autoshard.errors import StageError
from autoshard.jaxprs import Var, scan_counts
from autoshard.one_jit.loop_ends import LoopEnds, with_loop_ends
from autoshard.stages.cutting import CuttableStep, cut
from autoshard.stages.programs import Key, StageProgram, StagePrograms
from autoshard.stages.roles import PipelineRoles
from autoshard.stages.stacks import EquationOrigin


@dataclass(frozen=True)
class Port:
    """Where one input of the alike programs is from."""

    kind: str
    keys: tuple[Key, ...]  # per stage
    number: int = 0  # of `stacked`, the argument; of `own` and `passed`, the place among the maker's outputs
    maker: str = ""  # of `own` and `passed`: "F" or "B"


@dataclass(frozen=True, eq=False)
class UniformStages:
    """A step whose stages 1 to `count` have the same programs."""

    programs: StagePrograms
    count: int  # stages of the loop

    @property
    def first(self) -> int:
        return 0

    @property
    def last(self) -> int:
        return self.count + 1

    @cached_property
    def inner(self) -> range:
        """The stages that are alike."""
        return range(1, self.count + 1)

    def program(self, kind: str, stage: int) -> StageProgram | None:
        """The program of a stage."""
        if kind == "before":
            return self.programs.before.get(stage)
        return self.programs.loop.get((kind, stage))

    def alike(self, kind: str) -> list[StageProgram]:
        """The programs of stages 1 to S, or none."""
        found = [self.program(kind, stage) for stage in self.inner]
        present = [one for one in found if one is not None]
        if present and (len(present) < len(found) or not are_alike(present)):
            raise self.refused(f"{present[0].name.split(' of ')[0]} programs of its stages differ")
        return present

    @cached_property
    def ports(self) -> dict[str, tuple[Port, ...]]:
        """Of the F and the B programs."""
        return {kind: tuple(self._ports(kind)) for kind in ("F", "B")}

    def _ports(self, kind: str) -> list[Port]:
        several = self.alike(kind)
        if not several:
            raise self.refused("the step takes no gradient through the loop over layers")
        return [self._port(kind, keys) for keys in zip(*(one.inputs for one in several), strict=True)]

    def _port(self, kind: str, keys: tuple[Key, ...]) -> Port:
        kinds = {key.kind for key in keys}
        if len(kinds) > 1:
            raise self.refused(f"its stages read {', '.join(map(str, keys[:2]))} at one place")
        name = kinds.pop()
        if name in ("microbatch", "early", "sum"):
            return Port(name, keys)
        if name == "piece":
            pieces = [self.programs.pieces[key.number] for key in keys]
            step = pieces[0].stop - pieces[0].start
            if len({piece.argument for piece in pieces}) == 1 and all(
                (piece.start, piece.stop) == (i * step, (i + 1) * step) for i, piece in enumerate(pieces)
            ):
                return Port("stacked", keys, pieces[0].argument)
        elif name in ("argument", "constant") and len(set(keys)) == 1:
            return Port("shared", keys)
        elif name == "value":
            return self._value_port(kind, keys)
        raise self.refused(f"its stages read different parts of their arguments ({', '.join(map(str, keys[:2]))})")

    def _value_port(self, kind: str, keys: tuple[Key, ...]) -> Port:
        makers = [self.programs.makers[key] for key in keys]
        places = [maker.outputs.index(key) for maker, key in zip(makers, keys, strict=True)]
        stages = [maker.stage for maker in makers]
        names = {maker.kind for maker in makers}

        def at_one_place(which: slice) -> bool:
            return len(set(places[which])) <= 1 and len(names) == 1

        if len(set(keys)) == 1 and stages[0] == self.first and names == {"F"}:
            return Port("shared", keys)
        if stages == list(self.inner) and at_one_place(slice(None)):
            return Port("own", keys, places[0], makers[0].kind)
        if stages == [s - 1 for s in self.inner] and at_one_place(slice(1, None)) and names == {"F"}:
            return Port("passed", keys, places[-1], "F")
        if kind == "B" and stages == [s + 1 for s in self.inner] and at_one_place(slice(0, -1)) and names == {"B"}:
            return Port("passed", keys, places[0], "B")
        raise self.refused(f"a stage reads what stage {stages[-1]} makes, which is not beside it")

    def check_ends(self) -> None:
        """
        Raises:
            StageError: the first or the last stage reads what does not come past it at the same tick.
        """
        near = {self.first: {("F", self.first), ("B", 1)}, self.last: {("F", 0), ("F", self.count)}}
        near[self.last] |= {("F", self.last), ("B", self.last)}
        for stage, known in near.items():
            for kind in ("F", "B"):
                program = self.program(kind, stage)
                for key in program.inputs if program is not None else ():
                    if key.kind == "value":
                        maker = self.programs.makers[key]
                        if (maker.kind, maker.stage) not in known:
                            where = "before" if stage == self.first else "after"
                            raise self.refused(f"what stands {where} the loop reads what {maker.name} makes")
        rows = [key for kind in ("F", "B") for one in self.alike(kind) for key in one.outputs if key.kind == "rows"]
        if rows:
            raise self.refused("its layers make results per row of the batch, or per microbatch, as statistics")

    def refused(self, why: str) -> StageError:
        return refused(self.programs.name, why)


def refused(name: str, why: str) -> StageError:
    """The error for a step that this backend does not run."""
    return StageError(
        f"pipeline: {name} cannot run with backend='one_jit', which needs one loop over equal layers: {why}.\n"
        "Leave backend= out: stages then are programs of their own."
    )


def are_alike(programs: Sequence[StageProgram]) -> bool:
    """Whether programs compute the same of other arrays."""
    first = programs[0]
    return all(
        len(one.inputs) == len(first.inputs)
        and str(one.jaxpr.jaxpr) == str(first.jaxpr.jaxpr)
        and len(one.jaxpr.consts) == len(first.jaxpr.consts)
        and all(map(_same, one.jaxpr.consts, first.jaxpr.consts))
        for one in programs[1:]
    )


def _same(one: Any, other: Any) -> bool:
    return one is other or np.array_equal(np.asarray(one), np.asarray(other))


def uniform_stages(step: CuttableStep, count: int) -> UniformStages:
    """The step cut around its longest loop over layers, and that into equal parts.

    Raises:
        StageError: there is no such loop, it has no gradient or goes in reverse, its layers do not divide, or its parts
            are not alike.
    """
    loops = [i for i, first in step.roles.stacks.items() if i == first and i not in step.roles.backward]
    if not loops:
        raise refused(step.name, "the forward pass has no scan over stacked parameters")
    work = {i: step.roles.step.equations[i].params["length"] for i in loops}
    loop = max(loops, key=lambda i: (work[i], -i))
    if step.roles.step.equations[loop].params["reverse"]:
        raise refused(step.name, "the loop goes from the last layer to the first (reverse=True)")
    trips = work[loop]
    if trips % count:
        raise refused(step.name, f"stages={count} do not divide the {trips} layers of the loop")
    each, ends = trips // count, with_loop_ends(step, loop)
    boundaries = [EquationOrigin(ends.loop, s * each) for s in range(count)] + [EquationOrigin(ends.loop + 1)]
    pins = functools.partial(_pins, ends=ends, each=each, count=count)
    made = UniformStages(cut(ends.step, boundaries, pins=pins, are_alike=True), count)
    assert made.ports is not None
    made.check_ends()
    return made


def _pins(
    roles: PipelineRoles, origins: Sequence[EquationOrigin], ends: LoopEnds, each: int, count: int
) -> dict[int, int]:
    """The stages of the backward pass: its loops' parts beside those of the forward loop, the rest at both ends.

    What reads the last carry of the backward loop belongs to the first stage, what reads nothing of it to the last.
    """
    owners = {i for i, first in roles.stacks.items() if origins[first].equation == ends.loop}
    scans = {i for i in roles.backward if i in owners}
    found: dict[int, int] = {}
    of_loop, at_start = set[Var](), set[Var]()  # made of what the backward loop makes; of its last carry
    for i in sorted(roles.backward - roles.added):
        made, read = roles.step.equations[i].outvars, set(roles.made_in_loop(i))
        if i in scans:
            found[i] = 1 + origins[i].trip // each
            of_loop |= set(made)
            at_start |= set(made[: scan_counts(roles.step.equations[i])[1]]) if found[i] == 1 else set()
        elif origins[i].equation in ends.backward_entrances:
            found[i] = count + 1
        elif origins[i].equation in ends.backward_exits:
            found[i] = 0
            of_loop |= set(made)
            at_start |= set(made)
        elif read & at_start:
            found[i] = 0
            at_start |= set(made)
            of_loop |= set(made)
        elif read & of_loop:
            of_loop |= set(made)
        elif read:
            found[i] = count + 1
    return found
