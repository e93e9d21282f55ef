"""What XLA really did: the text of a compiled (partitioned) HLO module in, its collectives and its work out.

Reads what XLA prints for CPU, GPU and TPU: one instruction a line, collectives plain or as ``-start`` / ``-done``
pairs, alone or combined into tuples, replica groups as lists, as iota (``[4,2]<=[2,4]T(1,0)``) or on a mesh
(``mesh['x'=4,'y'=2] {'y'}``). A loop body counts as often as the loop runs; when XLA does not know how often, once.

What TPU programs have besides:

- A collective that runs beside other work stands in several fusions, with one channel id. The first fusion says that
  nothing of the collective is done before. The collective counts once, as often as the fusion that runs least.
- A reduce_scatter is an all-reduce in a computation named ``all-reduce-scatter``, which keeps a slice.
- A matrix product with a gathered operand or scattered result can be a loop of collective-permutes ("windowed
  einsum"), or that loop unrolled. It counts as the all_gather or reduce_scatter that it stands for.
- Between slices a collective is a pair of ``send`` and ``recv`` to the host, whose attributes tell its kind. The module
  is that of one slice, the outermost part of the mesh. What goes on inside a slice and what goes on between slices are
  two collectives. The module numbers partitions of one slice, but names what talks to other slices by device ids.
- Each operation says how many cycles XLA expects it to take (`schedule.py`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.compiled.module import Instruction, Module, attribute, operands, required_attribute, shape_bytes
from autoshard.errors import MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.collectives import Collective

KINDS = {  # opcode -> kind of collective
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "reduce-scatter": "reduce_scatter",
}
_BETWEEN_SLICES = {  # what the network between slices does
    "ALL_GATHER": "all_gather",
    "ALL_REDUCE": "all_reduce",
    "ALL_TO_ALL": "all_to_all",
    "ONE_TO_ONE": "collective_permute",
    "REDUCE_SCATTER": "reduce_scatter",
}
_MEGASCALE = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_SLICE = 100_000  # id of a device = id of its chip + _SLICE * number of its slice, counted from 1
_IOTA = re.compile(r"(?:\[([\d,]+)\]<=)?\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<devices>.*?)\))? \{(?P<used>[^}]*)\}")
_WINDOWED = re.compile(r"windowed_dot_general_body_(?P<kind>ag|rs)")
_BEGINS = '"async_collective_fusion_config":{"flag_start":"-1"'
_PRODUCTS = ("/dot_general", "/conv_general_dilated")
_LABEL = re.compile(r"([^/:(\"]+:\d+|unknown line)#(\d+)")  # Equation.label


def read_collectives(
    hlo_text: str,
    mesh_shape: MeshShape,
    device_order: Sequence[int] | None = None,
    device_ids: Sequence[int] | None = None,
) -> tuple[Collective, ...]:
    """Every collective of a compiled module, in program order.

    Args:
        hlo_text: `compiled.as_text()`.
        mesh_shape: devices per axis of the mesh that the program was compiled for.
        device_order: `device_order[i]` is the position in the flattened mesh of the module's i-th partition; jit
            numbers partitions in mesh order, so by default it is i.
        device_ids: ids of the devices of the flattened mesh; by default those of slices whose chips are numbered in
            mesh order.

    Raises:
        MeshError: the module's partitions are not those of the mesh, or what goes on between slices cannot be read.

    >>> hlo = '''
    ... ENTRY %main (x: f32[2,4]) -> f32[8,4] {
    ...   %x = f32[2,4]{1,0} parameter(0)
    ...   ROOT %g = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
    ... }'''
    >>> print(*read_collectives(hlo, {"x": 4, "y": 2}))
    1 x all_gather over x: 128 bytes (unknown line)
    """
    module = Module.of(hlo_text)
    found: dict[Any, Collective] = {}
    products: dict[tuple, dict[Any, _WindowStep]] = defaultdict(dict)  # name, place and axes -> by channel
    for part in collectives_in(module, hlo_text, mesh_shape, device_order, device_ids):
        one, computation = part.collective, part.computation
        if part.is_turn:
            loop = _WINDOWED.search(computation)
            times = one.count // module.turns[computation] if loop else one.count
            turns = products[one.why, part.frame, one.axes]
            turns[part.key or len(turns)] = _WindowStep(
                replace(one, bytes=one.bytes // one.count * times, count=times),
                loop and (computation, loop["kind"]),
                module.operand(part.instruction, computation).opcode == "broadcast",
            )
        else:
            key = part.key or len(found)
            if key not in found or one.count < found[key].count:
                found[key] = one
    for (_, _, axes), turns in products.items():
        for one in _windowed(list(turns.values()), math.prod(mesh_shape[axis] for axis in axes)):
            found[len(found)] = one
    return tuple(found.values())


@dataclass(frozen=True)
class CollectivePart:
    """A collective, or one of the instructions that it stands in."""

    collective: Collective  # with all runs of this instruction
    computation: str
    instruction: Instruction
    channel: str | None
    begun: int  # how many collectives of this channel have begun before other work that they run beside, by now
    frame: str | None  # the stack frame that asks for it
    rotates: bool  # whether everybody hands on to another what it has
    whole: bool  # whether it is in no fusion, or in one with the slice of what it sums

    @property
    def key(self) -> Hashable:
        """Equal for all parts of one collective; None if it has only one part, since it runs by itself.

        The parts share a channel. So do all collectives of a `shard_map`, and a collective before a loop with those
        inside; these differ in something else. What is said of the fusions around the parts may differ.
        """
        one = self.collective
        if self.channel is None or self.whole:
            return None
        why = one.why if "metadata=" in self.instruction.rest else None
        what = self.instruction.opcode == "recv", one.kind, one.axes, one.bytes // one.count, why
        return self.channel, self.begun, *what

    @property
    def is_turn(self) -> bool:
        """Whether it is a collective-permute of a windowed einsum, from everybody to the next."""
        return self.rotates and bool(_WINDOWED.search(self.computation) or self.collective.why.endswith(_PRODUCTS))


def collectives_in(
    module: Module,
    hlo_text: str,
    mesh_shape: MeshShape,
    device_order: Sequence[int] | None = None,
    device_ids: Sequence[int] | None = None,
) -> Iterator[CollectivePart]:
    """Every instruction of a module in which a collective stands, in program order; see `read_collectives`."""
    lines = source_lines(hlo_text)
    devices = math.prod(mesh_shape.values())
    order = np.arange(devices) if device_order is None else np.asarray(device_order)
    partitions = _partitions(hlo_text) or devices
    if device_ids is None:
        device_ids = [(1 + i // partitions) * _SLICE + i % partitions for i in range(devices)]
    places = {device: place for place, device in enumerate(device_ids)}
    begun: Counter[str | None] = Counter()
    for computation, instruction, runs in module.executed():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "recv" and _MEGASCALE in instruction.rest:
            kind, groups = _between_slices(instruction, places)
        elif opcode in KINDS:
            kind, groups = KINDS[opcode], order[_checked(_groups(instruction, opcode, partitions), devices)]
        else:
            continue
        axes = _axes(groups, mesh_shape)
        if not axes:
            continue
        size = shape_bytes(_result_shape(instruction))
        scatters = opcode == "all-reduce" and computation.startswith("all-reduce-scatter")
        if scatters:
            kind, size = "reduce_scatter", size // groups.shape[-1]
        attributes = _named_by(module, computation, instruction).rest
        name = re.search(r'op_name="([^"]*)"', attributes)
        channel = attribute(instruction.rest, "channel_id")
        begun[channel] += _BEGINS in instruction.rest
        yield CollectivePart(
            Collective(
                kind,
                axes,
                size * runs,
                runs,
                _source_line(attributes, lines),
                name[1] if name else "",
                is_per_turn=module.is_in_endless_loop(computation),
            ),
            computation,
            instruction,
            channel=channel,
            begun=begun[channel],
            frame=attribute(attributes, "stack_frame_id"),
            rotates=opcode == "collective-permute" and len(groups) == partitions,
            whole=scatters or all(by.opcode != "fusion" for _, by in module.around(computation)),
        )


@dataclass(frozen=True)
class _WindowStep:
    """One collective-permute of a windowed einsum: every device hands on what it has to the next."""

    collective: Collective  # in one run of its loop
    loop: tuple[str, str] | None  # the body that it stands in, and its kind, "ag" or "rs"; None: unrolled
    starts: bool  # whether it sends zeros, the sum before anything is added


def _windowed(turns: Sequence[_WindowStep], places: int) -> Iterator[Collective]:
    """The all_gathers and reduce_scatters that the turns of a product, or of several products alike, stand for.

    Turns before and after a loop belong to the loop. Without a loop, a gathered operand takes one turn less than there
    are places. A scattered sum goes round both ways, and each way starts with zeros.
    """
    found = [*{turn.loop: (turn, turn.loop[1], 1) for turn in turns if turn.loop}.values()]
    if not found:
        alike = defaultdict(list)
        for turn in turns:
            alike[turn.collective.bytes, turn.collective.count].append(turn)
        for same in alike.values():
            starts = sum(turn.starts for turn in same)
            kind, count = ("rs", starts // 2) if starts else ("ag", len(same) // (places - 1))
            found.append((same[0], kind, max(1, count)))
    for turn, kind, count in found:
        one = turn.collective
        size, runs = one.bytes * count, one.count * count
        if kind == "ag":
            yield replace(one, kind="all_gather", bytes=size * places, count=runs)
        else:
            yield replace(one, kind="reduce_scatter", bytes=size, count=runs)


def rendezvous(instruction: Instruction) -> str | None:
    """The name that a ``send`` and the ``recv`` of what comes back have in common."""
    match = re.search(r'_xla_host_transfer_rendezvous="([^"]*)"', instruction.rest)
    return match and match[1]


def equation_of(why: str) -> int | None:
    """The index of the equation of ours that a collective read from a compiled module belongs to."""
    labels = _LABEL.findall(why)
    return int(labels[-1][1]) if labels else None


def peak_bytes(compiled: Any) -> int:
    """Bytes of its memory that one device needs for a `jax.stages.Compiled`, by XLA's own memory analysis.

    That is arguments, results and temporaries; a donated argument and its result count once. `peak_memory_in_bytes` is
    another figure: on CPU and GPU it is not of the whole program, and on TPU it also counts what lies in the chip's own
    memory, copies of arguments among it, and no gaps between temporaries.
    """
    memory = compiled.memory_analysis()
    return (
        memory.argument_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes
    )


def _groups(instruction: Instruction, opcode: str, devices: int) -> np.ndarray:
    """Partitions that talk to each other, [group, member]."""
    rest = instruction.rest
    if opcode == "collective-permute":
        pairs = _attribute_list(rest, "source_target_pairs")
        return np.array([pair for pair in pairs if pair[0] != pair[1]], dtype=int).reshape(-1, 2)
    text = rest.partition("replica_groups=")[2]
    if mesh := _MESH.match(text):
        return _mesh_groups(mesh)
    if iota := _IOTA.match(text):
        return _iota(iota)
    return np.array(_attribute_list(rest, "replica_groups") or [list(range(devices))], dtype=int)


def _attribute_list(rest: str, key: str) -> list[list[int]]:
    """``key={{0,1},{2,3}}`` as lists; empty for ``key={}``."""
    match = re.search(rf"\b{key}=\{{((?:\{{[\d,]*\}},?\s*)*)\}}", rest)
    if match is None:
        raise MeshError(f"cannot read {key} of: {rest[:200]}")
    return [[int(member) for member in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", match[1])]


def _iota(match: re.Match) -> np.ndarray:
    """``[4,2]<=[2,4]T(1,0)``: count through the right shape, transpose, reshape to the left one, or else flatten."""
    shape, dims, permutation = ([int(n) for n in part.split(",")] if part else None for part in match.groups())
    assert dims is not None, "only the permutation may be left out"
    return np.arange(math.prod(dims)).reshape(dims).transpose(permutation).reshape(shape or [-1])


def _mesh_groups(match: re.Match) -> np.ndarray:
    """``mesh['x'=4,'y'=2] {'y','x':(2)2}``: a group per place along the axes not named.

    ``'x':(2)2`` is the part of `x` that has 2 places, with 2 major to it.
    """
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match["axes"])}
    ids = np.arange(math.prod(sizes.values()))
    if listed := match["devices"]:
        iota = _IOTA.match(listed)
        ids = _iota(iota).ravel() if iota else np.array([int(n) for n in listed.split(",")])
    used = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match["used"])
    # split every axis that is used in part, so that every dim is used whole or not at all
    dims, members = [], []
    for name, size in sizes.items():
        parts = sorted((int(before), int(part)) for axis, before, part in used if axis == name and part)
        if any(axis == name and not part for axis, _, part in used):
            parts = [(1, size)]
        major = 1
        for before, part in parts:
            dims += [before // major, part]
            members.append(len(dims) - 1)
            major = before * part
        dims.append(size // major)
    places = ids.reshape(dims)
    rest = [dim for dim in range(len(dims)) if dim not in members]
    return places.transpose(rest + members).reshape(-1, math.prod(dims[dim] for dim in members))


def _checked(groups: np.ndarray, devices: int) -> np.ndarray:
    if groups.size and groups.max() >= devices:
        raise MeshError(f"the module talks to partition {groups.max()}, but the mesh has {devices} devices")
    return groups


def _axes(groups: np.ndarray, mesh_shape: MeshShape) -> tuple[str, ...]:
    """The mesh axes along which members of one group, places in the flattened mesh, differ."""
    coordinates = np.unravel_index(groups, tuple(mesh_shape.values()))
    return tuple(axis for axis, where in zip(mesh_shape, coordinates, strict=True) if (where != where[:, :1]).any())


def _partitions(hlo_text: str) -> int | None:
    """How many devices a module is for, if it says so; on several slices, how many one slice has."""
    match = re.search(r"\bnum_partitions=(\d+)", hlo_text.partition("\n")[0])
    return int(match[1]) if match else None


def _between_slices(instruction: Instruction, places: Mapping[int, int]) -> tuple[str, np.ndarray]:
    """The kind of a collective over the network, and the places in the mesh that talk to each other, [group, member].

    ``"{1,2}x{0:3}"`` is each of the chips 0 to 3 of slices 1 and 2, ``{{100000,200000},...}`` chip 0 of both, and
    ``{{100000->200000}}`` goes from one to the other.
    """
    match = re.search(r'_xla_megascale_transfer_type="(\w+)"', instruction.rest)
    target = instruction.rest.partition("_xla_megascale_target=")[2]
    if every := re.match(r'"\{([\d,]+)\}x\{(\d+):(\d+)\}"', target):
        slices, chips = [int(n) for n in every[1].split(",")], range(int(every[2]), int(every[3]) + 1)
        groups = [[one * _SLICE + chip for one in slices] for chip in chips]
    elif listed := re.match(r"\{((?:\{\d+(?:(?:,|->)\d+)*\},?)*)\}", target):
        groups = [[int(n) for n in re.findall(r"\d+", group)] for group in re.findall(r"\{([^}]+)\}", listed[1])]
    else:
        groups = None
    if match is None or match[1] not in _BETWEEN_SLICES or groups is None or len({len(group) for group in groups}) > 1:
        raise MeshError(f"cannot read what goes on between slices in: {instruction.name} = {instruction.rest[:600]}")
    if unknown := {device for group in groups for device in group} - places.keys():
        raise MeshError(f"the module talks to devices {sorted(unknown)}, which the mesh does not have")
    found = np.array([[places[device] for device in group] for group in groups], dtype=int)
    return _BETWEEN_SLICES[match[1]], found.reshape(len(groups), len(groups[0]) if groups else 0)


def _result_shape(instruction: Instruction) -> str:
    """The text of the result's shape; a ``-start`` has (operands, results, ...), but all-reduce's only the results."""
    if instruction.opcode == "recv":
        return _elements(instruction.shape)[0]
    if not instruction.opcode.endswith("-start") or instruction.opcode == "all-reduce-start":
        return instruction.shape
    return _elements(instruction.shape)[1]


def _elements(shape: str) -> list[str]:
    """The elements of a tuple shape."""
    elements, depth = [""], 0
    for letter in shape.strip()[1:-1]:
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += letter
    return elements


def _named_by(module: Module, computation: str, instruction: Instruction) -> Instruction:
    """What says where an instruction comes from: itself, else an operand with the user's line, else what runs it.

    XLA for TPU joins all_reduces to one that says nothing.
    """
    if "metadata=" in instruction.rest:
        return instruction
    inside = module.inside(computation)
    makers = (inside[name] for name in operands(instruction) if name in inside)
    runs = module.callers[computation][1] if computation in module.callers else instruction
    return next((maker for maker in makers if _LABEL.search(maker.rest)), runs)


def source_lines(hlo_text: str) -> dict[int, str]:
    """The user's line of each stack frame, from the tables newer XLA prints at the module's head.

    It is the innermost line that is in no installed package, or else the innermost line.
    """
    tables: dict[str, dict[int, str]] = {"FileNames": {}, "FileLocations": {}, "StackFrames": {}}
    table = None
    for line in hlo_text.splitlines():
        if line.endswith("{"):
            break  # the first computation: the head is over
        if not line or not line[0].isdigit():
            table = tables.get(line)
        elif table is not None:
            number, _, entry = line.partition(" ")
            table[int(number)] = entry

    def place(frame: int) -> tuple[str, str]:
        location = tables["FileLocations"][int(required_attribute(tables["StackFrames"][frame], "file_location_id"))]
        file = tables["FileNames"][int(required_attribute(location, "file_name_id"))].strip('"')
        return file, f"{file.rsplit('/', 1)[-1]}:{attribute(location, 'line')}"

    places = {}
    for frame in tables["StackFrames"]:
        _, places[frame] = place(frame)
        caller = frame
        while caller in tables["StackFrames"]:
            file, line = place(caller)
            if "site-packages" not in file:
                places[frame] = line
                break
            caller = (
                int(required_attribute(tables["StackFrames"][caller], "parent_frame_id")) - 1
            )  # XLA counts these from 1 on
    return places


def _source_line(rest: str, lines: dict[int, str]) -> str:
    if labels := _LABEL.findall(rest):  # written by lower/emitter.py
        return labels[-1][0]
    if re.search(r'op_name="[^"]*\b(arguments|args)\[\d+\]', rest):  # by lower/emitter.py, what comes before all lines
        return "unknown line"
    if file := re.search(r'source_file="([^"]*)"', rest):
        return f"{file[1].rsplit('/', 1)[-1]}:{attribute(rest, 'source_line')}"
    frame = attribute(rest, "stack_frame_id")
    return lines.get(int(frame), "unknown line") if frame else "unknown line"
