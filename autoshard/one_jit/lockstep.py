"""The loop over microbatches with all stages in lockstep: one F and one B of every stage per tick, in one program.

Every device runs the same code on its own stage's arrays, under a `shard_map` over the axis of stages alone; the other
axes are XLA's. With S stages, stage s (from 0 here) runs F of microbatch t - s in tick t, and B of microbatch
t - (2 (S - 1) - s). So the last stage runs B right after F, M microbatches take M + 2 (S - 1) ticks, and a stage keeps
what its backward pass needs of 2 S - 1 microbatches at most, however many there are. What comes before the loop over
layers and after it is computed by all stages, of which the first or the last one's numbers count: a branch that only
some devices take could hold a collective that waits for the others. In the first and last ticks stages compute numbers
that nobody takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from autoshard.jaxprs import as_function
from autoshard.lower.emitter import Emitter
from autoshard.one_jit.equal_stages import Port, UniformStages
from autoshard.stages.programs import Key, StageProgram
from autoshard.user_plan import Plan

Place = tuple[Key, int]  # a value, and the stage that has it
Family = tuple[Key, ...]  # the keys of one thing in stages 1 to S


@dataclass(frozen=True, eq=False)
class LoopInputs:
    """What the loop reads."""

    shared: Mapping[Key, Any]  # arguments and constants, whole
    stacked: Mapping[int, Any]  # argument -> (stages, rows of each, ...)
    families: Mapping[Family, Any]  # early values and first sums of stages 1 to S: (stages, ...)
    ends: Mapping[Place, Any]  # early values and first sums of the first and the last stage


@dataclass(frozen=True, eq=False)
class LoopResults:
    """What the loop makes."""

    families: Mapping[Family, Any]  # sums of stages 1 to S: (stages, ...)
    ends: Mapping[Place, Any]  # sums of the first and the last stage
    rows: Mapping[Key, Any]  # (microbatches, ...)


@dataclass(frozen=True, eq=False)
class Lockstep:
    """The loop of one step."""

    stages: UniformStages
    axis: str  # of the mesh, over which the stages lie
    plans: Mapping[StageProgram, Plan]  # how inner values of programs lie on the other axes

    @property
    def count(self) -> int:
        return self.stages.count

    @property
    def microbatches(self) -> int:
        return self.stages.programs.microbatches

    @property
    def ticks(self) -> int:
        return self.microbatches + 2 * (self.count - 1)

    @property
    def slots(self) -> int:
        """Microbatches that a stage keeps something of."""
        return 2 * self.count - 1

    @cached_property
    def passed(self) -> dict[str, tuple[Port, ...]]:
        """What goes to the next stage ("F") and to the one before ("B"), once each."""
        found: dict[tuple[str, int, Family], Port] = {}
        for port in (*self.stages.ports["F"], *self.stages.ports["B"]):
            if port.kind == "passed":
                found.setdefault((port.maker, port.number, port.keys), port)
        return {kind: tuple(port for (maker, _, _), port in found.items() if maker == kind) for kind in ("F", "B")}

    @cached_property
    def kept(self) -> tuple[Any, ...]:
        """What B reads of the F of its microbatch: ports of stages 1 to S, and values of the first stage."""
        found: dict[Any, None] = {}
        for port in self.stages.ports["B"]:
            is_kept = port.kind == "own" or (port.kind == "passed" and port.maker == "F")
            if is_kept or (port.kind == "shared" and port.keys[0].kind == "value"):
                found[port.keys[0] if port.kind == "shared" else port] = None
        backward = self.stages.program("B", self.stages.first)
        for key in backward.inputs if backward is not None else ():
            if key.kind == "value" and self.stages.programs.makers[key].kind == "F":
                found[key] = None
        return tuple(found)

    @cached_property
    def end_programs(self) -> tuple[StageProgram, ...]:
        found = [self.stages.program(kind, s) for s in (self.stages.first, self.stages.last) for kind in ("F", "B")]
        return tuple(one for one in found if one is not None)

    def families_of(self, kind: str, name: str) -> list[Family]:
        """The families among the inputs of the programs of stages 1 to S."""
        return [port.keys for port in self.stages.ports[kind] if port.kind == name]

    def run(self, mesh: Mesh | AbstractMesh, inputs: LoopInputs) -> LoopResults:
        """The whole loop, traced."""
        mapped, whole = P(self.axis), P()
        index = jnp.arange(self.count)
        given = (index, inputs.stacked, inputs.families), (inputs.shared, inputs.ends)
        run = jax.shard_map(
            lambda mapped, whole: _StageLoop(self, *jax.tree.map(lambda x: x[0], mapped), *whole).run(),
            mesh=mesh,
            in_specs=(mapped, whole),
            out_specs=(mapped, whole),
            axis_names={self.axis},
            check_vma=False,
        )
        families, (ends, rows) = run(*given)
        return LoopResults(families, ends, rows)


@dataclass(frozen=True, eq=False)
class _StageLoop:
    """What one stage does in all ticks, on its own arrays."""

    step: Lockstep
    index: Any  # of the stage, from 0
    stacked: Mapping[int, Any]  # as of `LoopInputs`, the stage's own part
    families: Mapping[Family, Any]
    shared: Mapping[Key, Any]
    ends: Mapping[Place, Any]

    @property
    def last(self) -> int:
        return self.step.count - 1

    def called(self, program: StageProgram, arrays: Sequence[Any]) -> list[Any]:
        return annotated_program(program, self.step.plans, jax.sharding.get_abstract_mesh())(*arrays)

    def run(self) -> tuple[Any, Any]:
        """All ticks: the stage's own results, and those that all stages have."""

        def tick(state: Any, t: Any) -> tuple[Any, None]:
            return _Tick(self, dict(state), {}).run(t), None

        state, _ = jax.lax.scan(tick, self.start(), jnp.arange(self.step.ticks))
        makers = {key: one.stage for key, one in self.rows_of()}
        ends = {place: self.owned(array, place[1]) for place, array in state["ends"].items()}
        rows = {key: self.owned(array, makers[key]) for key, array in state["rows"].items()}
        return jax.tree.map(lambda x: x[None], state["sums"]), (ends, rows)

    def rows_of(self) -> list[tuple[Key, StageProgram]]:
        """What ends of the loop make row by row, each with the program that makes it."""
        return [(key, one) for one in self.step.end_programs for key in one.outputs if key.kind == "rows"]

    def start(self) -> dict[str, Any]:
        """What is carried from tick to tick, before the first one."""
        step, types = self.step, self.step.stages.programs.types

        def zeros(key: Key, *leading: int) -> Any:
            return jnp.zeros((*leading, *types[key].shape), types[key].dtype)

        sums = {keys: self.families[keys] for kind in ("F", "B") for keys in step.families_of(kind, "sum")}
        kept = [one if isinstance(one, Key) else one.keys[0] for one in step.kept]
        return {
            "sums": sums,
            "ends": {place: array for place, array in self.ends.items() if place[0].kind == "sum"},
            "rows": {key: zeros(key, step.microbatches) for key, _ in self.rows_of()},
            "forward": [zeros(port.keys[0]) for port in step.passed["F"]],
            "backward": [zeros(port.keys[-1]) for port in step.passed["B"]],
            "kept": [zeros(key, step.slots) for key in kept],
        }

    def owned(self, array: Any, stage: int) -> Any:
        """The numbers of the first or the last stage, on all."""
        is_here = self.index == (0 if stage == self.step.stages.first else self.last)
        as_numbers = array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
        found = jax.lax.psum(jnp.where(is_here, as_numbers, jnp.zeros_like(as_numbers)), self.step.axis)
        return found.astype(array.dtype)


@dataclass(frozen=True, eq=False)
class _Tick:
    """One F and one B of one stage."""

    loop: _StageLoop
    state: dict[str, Any]  # carried from tick to tick; changes
    values: dict[Key, Any]  # of both ends, and of the microbatch that comes past them; grows

    def run(self, t: Any) -> dict[str, Any]:
        """The state after the tick of this number."""
        step, state, index, last = self.loop.step, self.state, self.loop.index, self.loop.last
        m, back = t - index, t - (2 * last - index)
        at, is_on = jnp.clip(m, 0, step.microbatches - 1), (m >= 0) & (m < step.microbatches)
        at_back, is_back = jnp.clip(back, 0, step.microbatches - 1), (back >= 0) & (back < step.microbatches)
        forward, made = self._forward(at, is_on)
        kept = self._exchange_kept(jnp.mod(m, step.slots), jnp.mod(back, step.slots), forward, made)
        made_back = self._backward(at_back, is_back, kept)
        up, down = [(s, s + 1) for s in range(last)], [(s + 1, s) for s in range(last)]
        state["forward"] = [jax.lax.ppermute(made[port.number], step.axis, up) for port in step.passed["F"]]
        state["backward"] = [jax.lax.ppermute(made_back[port.number], step.axis, down) for port in step.passed["B"]]
        return state

    def _forward(self, at: Any, is_on: Any) -> tuple[dict[Family, Any], list[Any]]:
        """What came from the stage before, and what the F of this stage makes of it; the last stage runs its B, too."""
        step, index, values = self.loop.step, self.loop.index, self.values
        self._run_end("F", step.stages.first, at, is_on & (index == 0))
        forward = {
            port.keys: jnp.where(index == 0, values[port.keys[0]], array)
            for port, array in zip(step.passed["F"], self.state["forward"], strict=True)
        }
        made = self._run_layers(
            "F", at, is_on, lambda port: values[port.keys[0]] if port.kind == "shared" else forward[port.keys]
        )
        self._take_values(step.stages.alike("F")[-1], made)
        for kind in ("F", "B"):
            self._run_end(kind, step.stages.last, at, is_on & (index == self.loop.last))
        return forward, made

    def _exchange_kept(
        self, slot: Any, slot_back: Any, forward: Mapping[Family, Any], made: Sequence[Any]
    ) -> dict[Any, Any]:
        """Stores what B will read of this F, and gives what the B of this tick reads of its own F."""

        def now(one: Key | Port) -> Any:
            if isinstance(one, Key):
                return self.values[one]
            return made[one.number] if one.kind == "own" else forward[one.keys]

        kept = self.loop.step.kept
        buffers = [buffer.at[slot].set(now(one)) for one, buffer in zip(kept, self.state["kept"], strict=True)]
        self.state["kept"] = buffers
        return {one: buffer[slot_back] for one, buffer in zip(kept, buffers, strict=True)}

    def _backward(self, at: Any, is_on: Any, kept: Mapping[Any, Any]) -> list[Any]:
        """What the B of this stage makes."""
        step, index, values = self.loop.step, self.loop.index, self.values
        backward = {
            port.keys: jnp.where(index == self.loop.last, values[port.keys[-1]], array)
            for port, array in zip(step.passed["B"], self.state["backward"], strict=True)
        }

        def value(port: Port) -> Any:
            if port.kind == "passed" and port.maker == "B":
                return backward[port.keys]
            return kept[port.keys[0] if port.kind == "shared" else port]

        made = self._run_layers("B", at, is_on, value)
        self._take_values(step.stages.alike("B")[0], made)
        values.update({one: array for one, array in kept.items() if isinstance(one, Key)})
        self._run_end("B", step.stages.first, at, is_on & (index == 0))
        return made

    def _take_values(self, program: StageProgram, made: Sequence[Any]) -> None:
        self.values.update(
            {key: array for key, array in zip(program.outputs, made, strict=True) if key.kind == "value"}
        )

    def _run_end(self, kind: str, stage: int, microbatch: Any, counts: Any) -> None:
        """Runs a program of the first or the last stage, whose sums and rows count on that stage alone."""
        program = self.loop.step.stages.program(kind, stage)
        if program is None:
            return
        arrays = [self._operand_of_end(key, stage, microbatch) for key in program.inputs]
        for key, array in zip(program.outputs, self.loop.called(program, arrays), strict=True):
            if key.kind == "value":
                self.values[key] = array
            elif key.kind == "sum":
                old = self.state["ends"][key, stage]
                self.state["ends"] = {**self.state["ends"], (key, stage): jnp.where(counts, array, old)}
            else:
                old = self.state["rows"][key]
                new = old.at[microbatch].set(jnp.where(counts, array, old[microbatch]))
                self.state["rows"] = {**self.state["rows"], key: new}

    def _operand_of_end(self, key: Key, stage: int, microbatch: Any) -> Any:
        match key.kind:
            case "microbatch":
                return microbatch
            case "sum":
                return self.state["ends"][key, stage]
            case "early":
                return self.loop.ends[key, stage]
            case "value":
                return self.values[key]
        return self.loop.shared[key]

    def _run_layers(self, kind: str, microbatch: Any, counts: Any, value: Callable[[Port], Any]) -> list[Any]:
        """Runs a program of the stages that are alike.

        Args:
            value: of a microbatch, by its port.
        """
        stages, sums = self.loop.step.stages, self.state["sums"]
        arrays = [self._operand_of_layers(port, microbatch, value) for port in stages.ports[kind]]
        made = self.loop.called(stages.alike(kind)[0], arrays)
        for keys, array in zip(zip(*(one.outputs for one in stages.alike(kind)), strict=True), made, strict=True):
            if keys[0].kind == "sum":
                sums = {**sums, keys: jnp.where(counts, array, sums[keys])}
        self.state["sums"] = sums
        return made

    def _operand_of_layers(self, port: Port, microbatch: Any, value: Callable[[Port], Any]) -> Any:
        match port.kind:
            case "microbatch":
                return microbatch
            case "stacked":
                return self.loop.stacked[port.number]
            case "early":
                return self.loop.families[port.keys]
            case "sum":
                return self.state["sums"][port.keys]
        is_shared = port.kind == "shared" and port.keys[0].kind != "value"
        return self.loop.shared[port.keys[0]] if is_shared else value(port)


def annotated_program(
    program: StageProgram, plans: Mapping[StageProgram, Plan], mesh: Mesh | AbstractMesh
) -> Callable[..., list[Any]]:
    """A program of a stage as a function whose inner values lie as planned.

    Args:
        mesh: the whole one. In the loop, its axis of stages is a manual one, and plans say nothing of it.
    """
    plan = plans[program]
    assert plan.lowering is not None, "plans of stages are bound to their programs"
    if plan.lowering.program.captured:  # what it closes over is no argument here
        return as_function(program.jaxpr)
    layouts = [placed.layout for placed in plan.results]
    emitter = Emitter(plan.lowering.program, plan.annotations, mesh, layouts)
    return lambda *arrays: emitter.results(arrays)
