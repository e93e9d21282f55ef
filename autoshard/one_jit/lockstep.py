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
        makes = _Tick(self)
        mapped, whole = P(self.axis), P()
        index = jnp.arange(self.count)
        given = (index, inputs.stacked, inputs.families), (inputs.shared, inputs.ends)
        run = jax.shard_map(
            makes.loop,
            mesh=mesh,
            in_specs=(mapped, whole),
            out_specs=(mapped, whole),
            axis_names={self.axis},
            check_vma=False,
        )
        families, (ends, rows) = run(*given)
        return LoopResults(families, ends, rows)


@dataclass(frozen=True, eq=False)
class _Tick:
    """What one stage does, on its own arrays."""

    loop_of: Lockstep

    def called(self, program: StageProgram, arrays: Sequence[Any]) -> list[Any]:
        return annotated_program(program, self.loop_of.plans, jax.sharding.get_abstract_mesh())(*arrays)

    def loop(self, mapped: Any, whole: Any) -> tuple[Any, Any]:
        """All ticks."""
        step, programs = self.loop_of, self.loop_of.stages.programs
        index, stacked, families = jax.tree.map(lambda x: x[0], mapped)
        shared, ends = whole
        last = step.count - 1

        def zeros(key: Key) -> Any:
            type_ = programs.types[key]
            return jnp.zeros(type_.shape, type_.dtype)

        sums = {keys: families[keys] for kind in ("F", "B") for keys in step.families_of(kind, "sum")}
        end_sums = {place: array for place, array in ends.items() if place[0].kind == "sum"}
        rows_of = [(key, one) for one in step.end_programs for key in one.outputs if key.kind == "rows"]
        rows = {key: jnp.zeros((step.microbatches, *programs.types[key].shape), programs.types[key].dtype)
                for key, _ in rows_of}  # fmt: skip
        state: dict[str, Any] = {
            "sums": sums,
            "ends": end_sums,
            "rows": rows,
            "forward": [zeros(port.keys[0]) for port in step.passed["F"]],
            "backward": [zeros(port.keys[-1]) for port in step.passed["B"]],
            "kept": [
                jnp.zeros((step.slots, *one.shape), one.dtype)
                for one in (programs.types[one if isinstance(one, Key) else one.keys[0]] for one in step.kept)
            ],
        }

        def tick(state: Any, t: Any) -> tuple[Any, None]:
            m, back = t - index, t - (2 * last - index)
            at, is_on = jnp.clip(m, 0, step.microbatches - 1), (m >= 0) & (m < step.microbatches)
            at_back, is_back = jnp.clip(back, 0, step.microbatches - 1), (back >= 0) & (back < step.microbatches)
            state, values = dict(state), dict[Key, Any]()

            def of_end(kind: str, stage: int, microbatch: Any, counts: Any) -> None:
                program = step.stages.program(kind, stage)
                if program is None:
                    return
                arrays = []
                for key in program.inputs:
                    if key.kind == "microbatch":
                        arrays.append(microbatch)
                    elif key.kind == "sum":
                        arrays.append(state["ends"][key, stage])
                    elif key.kind == "early":
                        arrays.append(ends[key, stage])
                    else:
                        arrays.append(values[key] if key.kind == "value" else shared[key])
                for key, array in zip(program.outputs, self.called(program, arrays), strict=True):
                    if key.kind == "value":
                        values[key] = array
                    elif key.kind == "sum":
                        old = state["ends"][key, stage]
                        state["ends"] = {**state["ends"], (key, stage): jnp.where(counts, array, old)}
                    else:
                        old = state["rows"][key]
                        new = old.at[microbatch].set(jnp.where(counts, array, old[microbatch]))
                        state["rows"] = {**state["rows"], key: new}

            def of_layers(kind: str, microbatch: Any, counts: Any, value: Any) -> list[Any]:
                program, arrays = step.stages.alike(kind)[0], []
                for port in step.stages.ports[kind]:
                    if port.kind == "microbatch":
                        arrays.append(microbatch)
                    elif port.kind == "stacked":
                        arrays.append(stacked[port.number])
                    elif port.kind == "early":
                        arrays.append(families[port.keys])
                    elif port.kind == "sum":
                        arrays.append(state["sums"][port.keys])
                    elif port.kind == "shared" and port.keys[0].kind != "value":
                        arrays.append(shared[port.keys[0]])
                    else:
                        arrays.append(value(port))
                made = self.called(program, arrays)
                several = zip(*(one.outputs for one in step.stages.alike(kind)), strict=True)
                for keys, array in zip(several, made, strict=True):
                    if keys[0].kind == "sum":
                        old = state["sums"][keys]
                        state["sums"] = {**state["sums"], keys: jnp.where(counts, array, old)}
                return made

            # Forward.
            of_end("F", step.stages.first, at, is_on & (index == 0))
            forward = {
                port.keys: jnp.where(index == 0, values[port.keys[0]], array)
                for port, array in zip(step.passed["F"], state["forward"], strict=True)
            }
            made = of_layers(
                "F", at, is_on, lambda port: values[port.keys[0]] if port.kind == "shared" else forward[port.keys]
            )
            of_last = step.stages.alike("F")[-1].outputs
            values |= {key: array for key, array in zip(of_last, made, strict=True) if key.kind == "value"}
            for kind in ("F", "B"):
                of_end(kind, step.stages.last, at, is_on & (index == last))

            # What the backward pass gets.
            def now(one: Any) -> Any:
                if isinstance(one, Key):
                    return values[one]
                return made[one.number] if one.kind == "own" else forward[one.keys]

            slot = jnp.mod(m, step.slots)
            state["kept"] = [
                buffer.at[slot].set(now(one)) for one, buffer in zip(step.kept, state["kept"], strict=True)
            ]
            there = jnp.mod(back, step.slots)
            kept = {one: buffer[there] for one, buffer in zip(step.kept, state["kept"], strict=True)}

            # Backward.
            backward = {
                port.keys: jnp.where(index == last, values[port.keys[-1]], array)
                for port, array in zip(step.passed["B"], state["backward"], strict=True)
            }

            def value(port: Port) -> Any:
                if port.kind == "passed" and port.maker == "B":
                    return backward[port.keys]
                return kept[port.keys[0] if port.kind == "shared" else port]

            made_back = of_layers("B", at_back, is_back, value)
            of_first = step.stages.alike("B")[0].outputs
            values |= {key: array for key, array in zip(of_first, made_back, strict=True) if key.kind == "value"}
            values |= {one: array for one, array in kept.items() if isinstance(one, Key)}
            of_end("B", step.stages.first, at_back, is_back & (index == 0))

            # To the neighbours.
            up = [(s, s + 1) for s in range(last)]
            down = [(s + 1, s) for s in range(last)]
            state["forward"] = [jax.lax.ppermute(made[port.number], step.axis, up) for port in step.passed["F"]]
            state["backward"] = [jax.lax.ppermute(made_back[port.number], step.axis, down) for port in step.passed["B"]]
            return state, None

        state, _ = jax.lax.scan(tick, state, jnp.arange(step.ticks))

        def owned(array: Any, stage: int) -> Any:
            """The numbers of the first or the last stage, on all."""
            is_here = index == (0 if stage == step.stages.first else last)
            as_numbers = array.astype(jnp.int32) if array.dtype == jnp.bool_ else array
            found = jax.lax.psum(jnp.where(is_here, as_numbers, jnp.zeros_like(as_numbers)), step.axis)
            return found.astype(array.dtype)

        makers = {key: one.stage for key, one in rows_of}
        found = {place: owned(array, place[1]) for place, array in state["ends"].items()}
        found_rows = {key: owned(array, makers[key]) for key, array in state["rows"].items()}
        return jax.tree.map(lambda x: x[None], state["sums"]), (found, found_rows)


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
