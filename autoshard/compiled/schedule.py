"""How long a compiled TPU or GPU program takes, in the order in which XLA has put its operations.

A device computes one operation after the other, each for as many cycles as XLA expects. For a GPU XLA says nothing, and
an operation takes as long as `roofline.py` says. A collective takes what `mesh/collectives.py` says, once those before
it on the same mesh axes are done.

Some collectives start in one instruction and end in another: a ``-start`` and a ``-done``; between slices a ``send``
and a ``recv-done``; or the first and the last fusion that the collective stands in. Such a collective runs beside all
that is between the two instructions. For any other collective the device waits. So it is with what moves to the host's
memory and back, each way over a link of its own. So it is, too, with what a TPU copies between its memory and the
chip's own beside what it computes: XLA writes no cycles on that. It takes what memory takes for its bytes, and waiting
for it counts as computing.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from autoshard.compiled.collectives import CollectivePart, collectives_in, rendezvous
from autoshard.compiled.host_transfers import host_transfer
from autoshard.compiled.module import Instruction, Module, attribute, max_elements, operands, shape_bytes
from autoshard.compiled.roofline import Roofline
from autoshard.errors import MeshError
from autoshard.layout import MeshShape
from autoshard.mesh.collectives import seconds
from autoshard.mesh.host import host_seconds
from autoshard.mesh.topology import Topology

# Opcodes whose time XLA writes on the instruction where it knows it. What only moves inside the chip may have none.
_COMPUTES = frozenset({
    "convolution", "custom-call", "dot", "fft", "fusion", "gather", "reduce", "reduce-window", "reverse", "rng",
    "rng-bit-generator", "scatter", "select-and-scatter", "sort",
})  # fmt: skip
_MOVES = ("AllocateBuffer", "ConcatBitcast", "X64Combine", "X64SplitHigh", "X64SplitLow")  # custom calls


@dataclass(frozen=True)
class CompiledSchedule:
    """Seconds of one step on one device."""

    compute_seconds: float
    communication: Mapping[str, float]  # kind of collective, or "host" -> seconds, one after the other
    exposed: Mapping[str, float]  # the same -> seconds in which nothing runs beside it
    unestimated: tuple[str, ...] = ()  # operations of which XLA does not say how long they take; they count as nothing

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + sum(self.exposed.values())


def schedule_of(
    hlo_text: str,
    mesh_shape: MeshShape,
    topology: Topology,
    clock: float | None,
    device_ids: Sequence[int] | None = None,
) -> CompiledSchedule:
    """The schedule of a module compiled for TPU or GPU.

    Args:
        hlo_text: `compiled.as_text()`.
        mesh_shape: devices per axis of the mesh that the program was compiled for.
        clock: cycles per second; None for GPU.
        device_ids: as for `read_collectives`.
    """
    module = Module.of(hlo_text)
    lasts = Roofline(module, topology).seconds if clock is None else lambda _, one: one.cycles / clock
    simulation = _Simulation(module, mesh_shape, topology, lasts, skips_conditions=clock is None)
    simulation.place(collectives_in(module, hlo_text, mesh_shape, device_ids=device_ids))
    simulation.place_host_transfers()
    if clock is not None:
        simulation.place_copies()
    simulation.run(module.entry, 1)
    exposed = {kind: simulation.exposed[kind] for kind in simulation.communication}
    unestimated = () if clock is None else tuple(dict.fromkeys(_unestimated(module)))
    return CompiledSchedule(simulation.compute, dict(simulation.communication), exposed, unestimated)


def _unestimated(module: Module) -> Iterator[str]:
    """The operations of a TPU program that compute, and of which XLA does not say how long they take."""
    for computation, one, _ in module.executed():
        if any(around.opcode == "fusion" for _, around in module.around(computation)):
            continue  # XLA writes the time of a fusion on the fusion itself
        computes = one.opcode in _COMPUTES and max_elements(one.shape) > 1
        target = (attribute(one.rest, "custom_call_target") or "").strip('"')
        if one.is_unestimated or (computes and not one.has_estimate and target not in _MOVES):
            yield target or one.opcode


_TO_HOST, _FROM_HOST = "<to host>", "<from host>"  # links beside those of mesh axes
_MEMORY = "<memory>"  # as well, and the kind of what it copies
_ARRAY_IN_PLACE = re.compile(r"[a-z]+\d*[a-z0-9]*\[[\d,<=]+\](?:\{[^{}]*\})?")  # with its memory space, if it says one
_Lasts = Callable[[str, Instruction], float]  # computation and instruction of it -> seconds of one run


class _Span(NamedTuple):
    """From where to where a collective or a transfer runs: names of instructions of one computation."""

    kind: str
    axes: tuple[str, ...]  # or the link to the host
    seconds: float
    begin: str
    end: str


def _copied_bytes(start: Instruction) -> int:
    """Bytes that memory reads and writes for an array, or part of it, that is copied beside what is computed.

    >>> _copied_bytes(Instruction("c", "(f32[8,4]{1,0:S(1)}, f32[8,4]{1,0}, u32[]{:S(2)})", "copy-start", "%a)"))
    128
    """
    if start.opcode not in ("copy-start", "slice-start"):
        return 0
    places = _ARRAY_IN_PLACE.findall(start.shape)
    if any("S(5)" in place for place in places):  # to or from the host
        return 0
    return min(map(shape_bytes, places), default=0) * sum("S(" not in place for place in places)


class _Simulation:
    def __init__(
        self, module: Module, mesh_shape: MeshShape, topology: Topology, lasts: _Lasts, *, skips_conditions: bool
    ):
        """
        Args:
            skips_conditions: whether nobody asks if a loop of a known number of turns goes on, as the runtime of GPUs.
        """
        self.module, self.mesh_shape, self.topology, self.lasts = module, mesh_shape, topology, lasts
        self.skips_conditions = skips_conditions
        self.spans: dict[str, list[_Span]] = defaultdict(list)  # by computation
        self.compute = 0.0
        self.communication: dict[str, float] = Counter()  # type: ignore[assignment]  # whose stubs count in int
        self.exposed: dict[str, float] = Counter()  # type: ignore[assignment]  # as well

    def place(self, parts: Iterable[CollectivePart]) -> None:
        """Finds where collectives begin and end; a part that runs more often than the other parts is left out."""
        together: dict[Hashable, list[CollectivePart]] = defaultdict(list)
        for part in parts:
            together[part.key or len(together)].append(part)
        for same in together.values():
            least = min(part.collective.count for part in same)
            places: dict[str, list[Instruction]] = defaultdict(list)
            for part in same:
                if part.collective.count == least:
                    computation, instruction = self.module.outermost(part.computation, part.instruction)
                    places[computation].append(instruction)
            for computation, instructions in places.items():
                starts = [one for one in instructions if one.opcode.endswith("-start") or one.opcode == "recv"]
                bounds = [(self._begin(computation, one), self._done(computation, one)) for one in starts]
                if not starts:
                    bounds = [(instructions[0].name, instructions[-1].name)]
                one, length = same[0].collective, self._seconds(same[0])
                self.spans[computation] += [_Span(one.kind, one.axes, length, begin, end) for begin, end in bounds]

    def place_host_transfers(self) -> None:
        """Finds where arrays begin to move to the host's memory or back, and where they have come."""
        seen: set[tuple[str, str]] = set()
        for computation, instruction, _ in self.module.executed():
            moved = host_transfer(self.module, computation, instruction)
            if moved is None or (computation, instruction.name) in seen:
                continue
            seen.add((computation, instruction.name))
            length, end = host_seconds(moved.bytes, self.topology), self._done(computation, instruction)
            link = _TO_HOST if moved.sends else _FROM_HOST
            self.spans[computation].append(_Span("host", (link,), length, instruction.name, end))

    def place_copies(self) -> None:
        """Finds where arrays begin to move between memory and the chip's own, and where they have come."""
        for computation, instructions in self.module.computations.items():
            for one in instructions:
                if copied := _copied_bytes(one):
                    length = copied / self.topology.memory_bandwidth
                    done = self._done(computation, one)
                    self.spans[computation].append(_Span(_MEMORY, (_MEMORY,), length, one.name, done))

    def _begin(self, computation: str, start: Instruction) -> str:
        """Where a collective begins: between slices where this slice sends its part, be `recv` before or after."""
        if start.opcode != "recv":
            return start.name
        for one in self.module.computations[computation]:
            if one.opcode == "send" and rendezvous(one) == rendezvous(start):
                return one.name
        raise MeshError(f"nothing is sent for {start.name}, which waits for other slices, in {computation}")

    def _done(self, computation: str, start: Instruction) -> str:
        for one in self.module.computations[computation]:
            if one.opcode.endswith("-done") and operands(one)[:1] == [start.name]:
                return one.name
        return start.name

    def _seconds(self, part: CollectivePart) -> float:
        """Seconds of one run. In a windowed einsum every device hands on to the next, over all links at once."""
        one = part.collective
        if part.is_turn:
            links = [link for axis in one.axes for _, link in self.topology.links[axis].over(self.mesh_shape[axis])]
            link = min(links, key=lambda link: link.bandwidth)
            return link.latency + one.bytes / one.count / link.bandwidth
        return seconds(one.kind, one.axes, one.bytes / one.count, self.mesh_shape, self.topology)

    def run(self, computation: str, runs: int) -> float:
        """Seconds of one of so many runs of a computation."""
        now = 0.0
        links: dict[str, tuple[float, str]] = defaultdict(lambda: (0.0, ""))  # axis -> until when they carry what
        begin: dict[str, list[_Span]] = {span.begin: [] for span in self.spans[computation]}
        end: dict[str, list[_Span]] = {span.end: [] for span in self.spans[computation]}
        for span in self.spans[computation]:
            begin[span.begin].append(span)
            end[span.end].append(span)
        begun: dict[int, tuple[float, str]] = {}  # span -> when it is done, and what kind it waits for
        for instruction in self.module.computations[computation]:
            for span in begin.get(instruction.name, ()):
                free, before = max(links[axis] for axis in span.axes)
                done = max(now, free) + span.seconds
                begun[id(span)] = done, before
                links.update(dict.fromkeys(span.axes, (done, span.kind)))
                if span.kind != _MEMORY:
                    self.communication[span.kind] += span.seconds * runs
            if instruction.opcode != "fusion":  # XLA writes the time of a fusion on the fusion itself
                callees = list(self.module.callees(instruction))
                if self.skips_conditions and "known_trip_count" in instruction.rest:
                    callees = callees[1:]
                now += sum(times * self.run(callee, times * runs) for callee, times in callees)
            lasts = self.lasts(computation, instruction)
            now += lasts
            self.compute += lasts * runs
            for span in end.get(instruction.name, ()):
                done, before = begun.pop(id(span))
                waits = max(0.0, done - now)
                now += waits
                if span.kind == _MEMORY:
                    self.compute += waits * runs
                    continue
                self.exposed[span.kind] += min(waits, span.seconds) * runs
                self.exposed[before] += max(0.0, waits - span.seconds) * runs
        return now
