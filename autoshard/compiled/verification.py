"""A plan or a jitted function in, what XLA really does with it out, beside what was predicted."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding

from autoshard.compiled.collectives import equation_of, peak_bytes, read_collectives, source_lines
from autoshard.compiled.schedule import CompiledSchedule, schedule_of
from autoshard.errors import ArgumentError, MeshError
from autoshard.layout import local_shape
from autoshard.mesh.chips import chip_of
from autoshard.mesh.collectives import Collective
from autoshard.mesh.targets import compiler_options
from autoshard.mesh.topology import Topology
from autoshard.model.xla.backends import backend_of
from autoshard.model.xla.rounding import PACKED_BYTES
from autoshard.model.xla.tiles import elements_in_word, padded_size
from autoshard.plans.plan import PlacedArray
from autoshard.plans.prediction import Prediction
from autoshard.program import Program
from autoshard.report.plan_sections import collectives as collectives_section
from autoshard.report.section import Bytes, Column, NameList, Phrase, Piece, Row, Seconds, Section
from autoshard.report.text import text_of

_TOLERANCE = 0.20  # share by which the peak may be off
_REMATERIALIZED = re.compile(
    r"Involuntary full rematerialization.*?from sharding \{(?P<source>.*?)\} to \{(?P<target>.*?)\}"
    r"(?: without| efficiently).*?for HLO operation:? %(?P<operation>\S+) = (?P<shape>\S+)(?P<rest>.*)"
)

Traffic = Mapping[tuple[str, tuple[str, ...]], int]  # (kind, axes) -> bytes per step on one device


@dataclass(frozen=True)
class Rematerialization:
    """An array that XLA gathers whole on every device, since it knows no other way between two shardings."""

    shape: str  # of one shard, "f32[8,16]"
    source: str  # XLA's text of the sharding that it has, "devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate"
    target: str  # XLA's text of the sharding that is wanted
    line: str  # the user's, "train.py:41"; of an argument, its name

    def __str__(self) -> str:
        return f"{self.line}: {self.shape} from {{{self.source}}} to {{{self.target}}}"


@dataclass(frozen=True)
class CompiledProgram:
    """What one step of a compiled program does on each device."""

    program: jax.stages.Compiled
    mesh: Mesh
    collectives: tuple[Collective, ...]
    peak_bytes: int
    rematerializations: tuple[Rematerialization, ...]
    schedule: CompiledSchedule | None  # of TPU and GPU programs

    def named(self, program: Program) -> CompiledProgram:
        """The same with reasons in the words of the program that was compiled."""
        return replace(
            self,
            collectives=tuple(_named(one, program) for one in self.collectives),
            rematerializations=tuple(
                replace(one, line=_argument_of(one.line, program) or one.line) for one in self.rematerializations
            ),
        )


@dataclass(frozen=True)
class Verification:
    """Predicted beside compiled, for one device and one step."""

    predicted: Traffic  # as this backend shows it
    actual: Traffic
    predicted_peak: int  # bytes
    actual_peak: int  # bytes, see `collectives.peak_bytes`
    collectives: tuple[Collective, ...]  # what was compiled, one by one
    rematerializations: tuple[Rematerialization, ...]
    unpredicted: str = ""  # why nothing is predicted, if so
    predicted_seconds: float = 0.0  # of the compiled program, in which loops of unknown length turn once
    schedule: CompiledSchedule | None = None  # what it takes on TPU by XLA's own estimate, on GPU by a roofline

    @property
    def collectives_agree(self) -> bool:
        """Whether the compiled program has exactly the predicted collectives, by kind, axes and bytes."""
        return self.predicted == self.actual

    @property
    def memory_agrees(self) -> bool:
        """Whether the peak is predicted within a fifth."""
        return abs(self.predicted_peak - self.actual_peak) <= _TOLERANCE * self.actual_peak

    @property
    def ok(self) -> bool:
        """Whether collectives and memory are as predicted."""
        return self.collectives_agree and self.memory_agrees

    def sections(self) -> list[Section]:
        """The report, as data."""
        sections = [self._figures()]
        if self.unpredicted:
            sections.append(Section(lines=(("Nothing is predicted: ", self.unpredicted),)))
        if self.collectives:
            shown = [replace(one, why=_last_name(one.why)) for one in self.collectives]
            sections.append(collectives_section(shown, "Compiled collectives"))
        lines: tuple[Phrase, ...] = tuple(("  ", str(one)) for one in self.rematerializations)
        if lines:
            title = ("Involuntary full rematerialization, by way of the whole array:",)
            sections.append(Section(title, lines=lines))
        return sections

    def _figures(self) -> Section:
        rows: list[Row] = []
        for kind, axes in sorted(self.predicted.keys() | self.actual.keys()):
            foreseen, found = (side.get((kind, axes), 0) for side in (self.predicted, self.actual))
            rows.append((kind, NameList(axes), *self._beside(foreseen, found, foreseen == found)))
        rows.append(("peak memory", "", *self._beside(self.predicted_peak, self.actual_peak, self.memory_agrees)))
        if self.schedule:
            predicted = "" if self.unpredicted else Seconds(self.predicted_seconds)
            unknown = ", ".join(self.schedule.unestimated)
            note = f"not known of {unknown}" if unknown else ""
            rows.append(("estimated time", "", predicted, Seconds(self.schedule.step_seconds), note))
        numbers = Column("predicted", is_number=True), Column("compiled", is_number=True)
        return Section(("Per step and device",), (Column("over axes"), *numbers, Column("")), tuple(rows))

    def _beside(self, foreseen: int, found: int, agrees: bool) -> tuple[Piece, Piece, str]:
        if self.unpredicted:
            return "", Bytes(found), ""
        return Bytes(foreseen), Bytes(found), "" if agrees else "differs"

    def __str__(self) -> str:
        return text_of(self.sections())


def verification(predicted: Prediction | None, found: CompiledProgram, *, unpredicted: str = "") -> Verification:
    """What was predicted for a program, if it was, beside what was compiled."""
    return Verification(
        predicted=traffic(predicted.collectives if predicted else ()),
        actual=traffic(found.collectives),
        predicted_peak=predicted.peak_bytes if predicted else 0,
        actual_peak=found.peak_bytes,
        collectives=found.collectives,
        rematerializations=found.rematerializations,
        unpredicted=unpredicted,
        predicted_seconds=predicted.comparable_seconds if predicted else 0.0,
        schedule=found.schedule,
    )


def verification_of_wrapped(fn: Callable[..., Any], lowered: Any, mesh: Mesh) -> Verification:
    """What `nnx.jit` or `eqx.filter_jit` compiles. They take arguments apart, so that nothing is predicted of these."""
    inner = getattr(lowered, "lowered", None)
    if not isinstance(inner, jax.stages.Lowered):
        raise ArgumentError(f"{fn!r} does not lower to a program of JAX; give verify jax.jit(fn, ...)")
    found = compiled(inner, mesh)
    why = f"{type(fn).__module__.split('.')[0]} takes its arguments apart. Give verify autoshard(fn, ...) instead"
    return verification(None, found, unpredicted=why)


def without_dropped(predicted: Prediction, found: CompiledProgram, arguments: Sequence[PlacedArray]) -> Prediction:
    """A prediction without the arguments that the program never reads: `jax.jit` leaves them out of what it compiles.

    Args:
        arguments: all of them, in order.
    """
    shardings = jax.tree.leaves(found.program.input_shardings[0], is_leaf=lambda one: one is None)
    pairs = zip(arguments, shardings, strict=False)
    mesh, tile = dict(found.mesh.shape), backend_of(found.mesh).tile

    def padded_bytes(one: PlacedArray) -> int:
        shape = local_shape(one.shape, one.layout, mesh)
        itemsize = PACKED_BYTES.get(one.dtype) or one.local_bytes // max(1, math.prod(shape)) or 1
        return math.ceil(itemsize * padded_size(shape, tile, packed=elements_in_word(itemsize)))

    spared = sum(padded_bytes(one) for one, sharding in pairs if sharding is None and not one.on_host)
    return replace(predicted, peak_bytes=predicted.peak_bytes - spared)


def mesh_of(tree: Any) -> Mesh | None:
    """The first mesh with devices that a sharding in a pytree names, or the sharding of an array in it."""
    shardings = (getattr(leaf, "sharding", leaf) for leaf in jax.tree.leaves(tree))
    meshes = (one.mesh for one in shardings if isinstance(one, NamedSharding))
    return next((mesh for mesh in meshes if isinstance(mesh, Mesh)), None)


def compiled(
    lowered: jax.stages.Lowered, mesh: Mesh | None = None, topology: Topology | None = None
) -> CompiledProgram:
    """What XLA makes of a program that was lowered for `mesh`; by default that of the shardings it is jitted with.

    Args:
        topology: what communication costs there; by default, as data sheets say.

    Raises:
        MeshError: these name no mesh.
    """
    warnings: list[str] = []
    with _standard_error(into=warnings):
        program = lowered.compile(compiler_options=compiler_options(mesh) if mesh else None)
    mesh = mesh or mesh_of((program.input_shardings, program.output_shardings))
    if mesh is None:
        raise MeshError("no argument or result of the function has a NamedSharding to take the mesh from; pass mesh=")
    text, log = program.as_text(), "".join(warnings)
    assert text is not None, "XLA prints what it compiles for the platforms here"
    lines = source_lines(text) if _REMATERIALIZED.search(log) else {}
    device, schedule = mesh.devices.flat[0], None
    chip = chip_of(device.device_kind)
    shape, ids = dict(mesh.shape), [device.id for device in mesh.devices.flat]
    if chip and (chip.clock or not chip.torus_dims) and device.platform != "cpu":
        schedule = schedule_of(text, shape, topology or Topology.of(mesh), chip.clock, ids)
    return CompiledProgram(
        program=program,
        mesh=mesh,
        collectives=read_collectives(text, shape, device_ids=ids),
        peak_bytes=peak_bytes(program),
        rematerializations=tuple(rematerializations_in(log, lines)),
        schedule=schedule,
    )


def rematerializations_in(log: str, lines: Mapping[int, str]) -> Iterator[Rematerialization]:
    """The arrays that XLA's warnings name, each once.

    Args:
        log: what XLA wrote.
        lines: the user's line of each stack frame of the module.
    """
    seen = set()
    for match in _REMATERIALIZED.finditer(log):
        label = re.search(r'op_name="[^"]*?([^/"]+:\d+)#\d+', match["rest"])
        frame = re.search(r"stack_frame_id=(\d+)", match["rest"])
        name = re.search(r'op_name="([^"]+)"', match["rest"])
        if label:
            where = label[1]
        elif frame and int(frame[1]) in lines:
            where = lines[int(frame[1])]
        else:
            where = name[1] if name else f"%{match['operation']}"
        one = Rematerialization(match["shape"].split("{")[0], match["source"], match["target"], where)
        if one not in seen:
            seen.add(one)
            yield one


def traffic(collectives: Iterable[Collective]) -> Traffic:
    """Bytes by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for one in collectives:
        found[one.kind, one.axes] = found.get((one.kind, one.axes), 0) + one.bytes
    return found


def _named(one: Collective, program: Program) -> Collective:
    """With what asks for it in the words of the program, as far as XLA has kept track of it."""
    index, argument = equation_of(one.why), _argument_of(one.why, program)
    if index is None and argument is not None:  # newer XLA names the argument alone: its first reader has a line
        value = next(value for value in program.arguments if value.name == argument)
        reader = next((one for one in program.equations if any(x is value for x in one.inputs)), None)
        if reader is None:
            return replace(one, why=argument)
        return replace(one, source=str(reader.source or one.source), why=f"{argument} for {reader.primitive}")
    if index is None:
        return one
    name = program.equations[index].primitive
    if argument is not None:
        return replace(one, why=f"{argument} for {name}")
    return replace(one, why=f"operand or result of {name}" if one.why.endswith("sharding_constraint") else name)


def _argument_of(name: str, program: Program) -> str | None:
    """The argument that `lower/emitter.py`, and XLA after it, calls so."""
    found = re.search(r"\barguments\[(\d+)\]", name)
    return program.arguments[int(found[1])].name if found else None


def _last_name(name: str) -> str:
    """Of an `op_name`: the operation, or several that XLA has combined, without where they stand.

    >>> _last_name("jit(step)/transpose(jvp())/(reduce_sum:dot_general:reduce_sum)"), _last_name("state/up/kernel")
    ('reduce_sum, dot_general', 'state/up/kernel')
    """
    if not name.startswith("jit("):  # an argument's
        return name
    return ", ".join(dict.fromkeys(name.rpartition("/")[2].strip("()").split(":")))


# Of one descriptor, which all threads have: a thread that redirected it meanwhile would put it back wrong.
_REDIRECTING = threading.Lock()


@contextlib.contextmanager
def _standard_error(into: list[str]) -> Iterator[None]:
    """Collects what the process, XLA's C++ included, writes to standard error meanwhile; it is written there after.

    Threads take turns. Where there is no standard error, nothing is collected.
    """
    with _REDIRECTING, contextlib.ExitStack() as stack:
        _flush()
        try:
            kept = os.dup(2)
        except OSError:  # closed, as in services
            yield
            return
        stack.callback(os.close, kept)
        file = stack.enter_context(tempfile.TemporaryFile())
        try:
            os.dup2(file.fileno(), 2)
            yield
        finally:
            _flush()
            os.dup2(kept, 2)
            file.seek(0)
            text = file.read()
            into.append(text.decode(errors="replace"))
            with contextlib.suppress(OSError):  # whoever read it has gone
                while text:
                    text = text[os.write(2, text) :]


def _flush() -> None:
    with contextlib.suppress(AttributeError, OSError, ValueError):  # None, broken or closed
        sys.stderr.flush()
