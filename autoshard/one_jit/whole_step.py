"""The whole step in one program: what comes before the loop over microbatches, the loop, and the optimizer after it.

Arrays of stages 1 to S are one array with a dim of stages, split over their axis. What all of them compute after the
loop is one program mapped over that dim.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.one_jit.equal_stages import UniformStages, are_alike
from autoshard.one_jit.lockstep import Family, Lockstep, LoopInputs, Place, annotated_program
from autoshard.stages.programs import Key, StageProgram
from autoshard.user_plan import Plan


@dataclass(frozen=True, eq=False)
class StackRow:
    """One stage's part of an array of all."""

    stacked: Any  # (stages, ...)
    number: int  # from 0


class Store:
    """Values by their names, and by stage where each stage has one."""

    def __init__(self) -> None:
        self._values: dict[Any, Any] = {}

    def put(self, name: Any, value: Any) -> None:
        self._values[name] = value

    def __contains__(self, name: Any) -> bool:
        return name in self._values

    def __getitem__(self, name: Any) -> Any:
        found = self._values[name]
        return found.stacked[found.number] if isinstance(found, StackRow) else found

    def together(self, names: Sequence[Any]) -> Any:
        """The values of all stages as one array."""
        found = [self._values[name] for name in names]
        first = found[0]
        if all(isinstance(one, StackRow) and one.stacked is first.stacked for one in found) and [
            one.number for one in found
        ] == list(range(len(first.stacked))):
            return first.stacked
        return jnp.stack([self[name] for name in names])

    def spread(self, names: Sequence[Any], stacked: Any) -> None:
        """Puts the parts of an array of all stages."""
        for number, name in enumerate(names):
            self.put(name, StackRow(stacked, number))


@dataclass(frozen=True, eq=False)
class WholeStep:
    """A step in equal stages as one function of its flat arguments."""

    stages: UniformStages
    axis: str  # of the mesh, over which the stages lie
    plans: Mapping[StageProgram, Plan]  # how inner values of programs lie on the other axes

    @cached_property
    def lockstep(self) -> Lockstep:
        return Lockstep(self.stages, self.axis, self.plans)

    def __call__(self, mesh: Mesh | AbstractMesh, leaves: Sequence[Any]) -> list[Any]:
        """The flat results, traced."""
        programs, store = self.stages.programs, Store()
        for i, leaf in enumerate(leaves):
            store.put(Key("argument", i), leaf)
        for i, constant in enumerate(programs.constants):
            store.put(Key("constant", i), constant)
        stacked = self.split(store, leaves, mesh)
        for stage, program in programs.before.items():
            made = annotated_program(program, self.plans, mesh)(*(store[key] for key in program.inputs))
            for key, array in zip(program.outputs, made, strict=True):
                store.put((key, stage), array)
        self.loop(mesh, store, stacked)
        self.after(store, mesh)
        return [self.result(store, one) for one in programs.results]

    def split(self, store: Store, leaves: Sequence[Any], mesh: Mesh | AbstractMesh) -> dict[int, Any]:
        """Arguments whose rows belong to stages, with a dim of stages first."""
        several: dict[int, list[int]] = {}
        for number, piece in enumerate(self.stages.programs.pieces):
            several.setdefault(piece.argument, []).append(number)
        found = {}
        for argument, numbers in several.items():
            array = leaves[argument]
            found[argument] = array.reshape(len(numbers), array.shape[0] // len(numbers), *array.shape[1:])
            store.spread([Key("piece", number) for number in numbers], self.over_stages(found[argument], mesh))
        return found

    def over_stages(self, array: Any, mesh: Mesh | AbstractMesh) -> Any:
        """An array with a dim of stages, split along it; other dims as XLA likes."""
        spec = PartitionSpec(self.axis, *[PartitionSpec.UNCONSTRAINED] * (array.ndim - 1))
        return jax.lax.with_sharding_constraint(array, NamedSharding(mesh, spec))

    def loop(self, mesh: Mesh | AbstractMesh, store: Store, stacked: Mapping[int, Any]) -> None:
        lockstep, inner = self.lockstep, self.stages.inner

        def family(keys: Family) -> Any:
            return jnp.stack([store[key, stage] for key, stage in zip(keys, inner, strict=True)])

        several = [
            keys for kind in ("F", "B") for name in ("early", "sum") for keys in lockstep.families_of(kind, name)
        ]
        shared: dict[Key, Any] = {}
        ends: dict[Place, Any] = {}
        for program in lockstep.end_programs:
            for key in program.inputs:
                if key.kind in ("early", "sum"):
                    ends[key, program.stage] = store[key, program.stage]
                elif key.kind not in ("value", "microbatch"):
                    shared[key] = store[key]
        for port in (*self.stages.ports["F"], *self.stages.ports["B"]):
            if port.kind == "shared" and port.keys[0].kind != "value":
                shared[port.keys[0]] = store[port.keys[0]]
        used = {port.number for ports in self.stages.ports.values() for port in ports if port.kind == "stacked"}
        inputs = LoopInputs(
            shared, {i: stacked[i] for i in sorted(used)}, {keys: family(keys) for keys in dict.fromkeys(several)}, ends
        )
        made = lockstep.run(mesh, inputs)
        for keys, array in made.families.items():
            store.spread(keys, array)
        for (key, _), array in made.ends.items():
            store.put(key, array)
        for key, array in made.rows.items():
            store.put(key, array)

    # After the loop.

    @cached_property
    def groups(self) -> tuple[tuple[StageProgram, ...], ...]:
        """Programs after the loop: those of stages 1 to S that are alike together, all others alone."""
        by_stage: dict[int, list[StageProgram]] = {}
        for program in self.stages.programs.after:
            by_stage.setdefault(program.stage, []).append(program)
        rows = [by_stage.get(stage, []) for stage in self.stages.inner]
        found: list[tuple[StageProgram, ...]] = []
        for number in range(max(map(len, rows), default=0)):
            own = [row[number] for row in rows if number < len(row)]
            is_one = len(own) == self.stages.count and are_alike(own) and self.is_mapped(own)
            found += [tuple(own)] if is_one else [(one,) for one in own]
        ends = (self.stages.first, self.stages.last)
        return (*found, *((one,) for stage in ends for one in by_stage.get(stage, [])))

    def is_mapped(self, programs: Sequence[StageProgram]) -> bool:
        """Whether no program reads what another of them makes."""
        made = {key for one in programs for key in one.outputs}
        return not any(key in made for one in programs for key in one.inputs)

    def after(self, store: Store, mesh: Mesh | AbstractMesh) -> None:
        todo = list(self.groups)
        while todo:
            ready = [one for one in todo if all(key in store for program in one for key in program.inputs)]
            assert ready, "programs are in an order in which they can run"
            for group in ready:
                self.run(store, group, mesh)
            todo = [one for one in todo if one not in ready]

    def run(self, store: Store, group: Sequence[StageProgram], mesh: Mesh | AbstractMesh) -> None:
        function = annotated_program(group[0], self.plans, mesh)
        if len(group) == 1:
            made = function(*self.arrays(store, group[0]))
            for key, array in zip(group[0].outputs, made, strict=True):
                store.put(key, array)
            return
        arrays, dims = [], []
        for keys in zip(*(one.inputs for one in group), strict=True):
            is_one = len(set(keys)) == 1
            arrays.append(store[keys[0]] if is_one else store.together(keys))
            dims.append(None if is_one else 0)
        if all(dim is None for dim in dims):
            several = [function(*arrays)] * len(group)
            for one, made in zip(group, several, strict=True):
                for key, array in zip(one.outputs, made, strict=True):
                    store.put(key, array)
            return
        mapped = jax.vmap(function, in_axes=tuple(dims), spmd_axis_name=self.axis)(*arrays)
        for keys, array in zip(zip(*(one.outputs for one in group), strict=True), mapped, strict=True):
            store.spread(keys, array)

    def arrays(self, store: Store, program: StageProgram) -> list[Any]:
        """The operands of a program after the loop; of rows, one per microbatch."""
        turns = Counter[Key]()
        found = []
        for key in program.inputs:
            if key.kind == "rows":
                found.append(store[key][turns[key]])
                turns[key] += 1
            else:
                found.append(store[key])
        return found

    def result(self, store: Store, keys: Any) -> Any:
        if not isinstance(keys, tuple):
            return keys
        if len(keys) == 1:
            return store[keys[0]]
        if len(keys) == self.stages.count:
            whole = store.together(keys)
            return whole.reshape(-1, *whole.shape[2:])
        return jnp.concatenate([store[key] for key in keys])
