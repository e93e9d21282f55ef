"""The named schedules, what each asks of its arguments, and `schedule`, which makes one."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.errors import ArgumentError
from autoshard.errors.kinds import is_of_kind
from autoshard.pipeline.catalogue import (
    asynchronous,
    building_blocks,
    dual,
    one_direction,
    slots,
    variants,
    zero_bubble,
)
from autoshard.pipeline.orders import Schedule


@dataclass(frozen=True)
class _Request:
    """The arguments of `schedule`, checked."""

    stages: int
    microbatches: int
    chunks: int
    slices: int
    every: int
    predecessors: Sequence[Sequence[int]]


@dataclass(frozen=True)
class _Entry:
    """How a named schedule is made, and which arguments it takes."""

    make: Callable[[_Request], Schedule]
    chunks: str = "one"  # "one", "two", "even" or "any"
    even_stages: bool = False
    multiple_of: Callable[[int], int] = lambda stages: 1  # that the number of microbatches must be
    fewest: Callable[[int], int] = lambda stages: 1  # microbatches
    option: str = ""  # the one of "slices", "every" and "predecessors" that it takes


def _plain(make: Callable[[int, int], Schedule], **asked: Any) -> _Entry:
    return _Entry(lambda request: make(request.stages, request.microbatches), **asked)


def _chunked(make: Callable[[int, int, int], Schedule], chunks: str, **asked: Any) -> _Entry:
    return _Entry(lambda request: make(request.stages, request.microbatches, request.chunks), chunks, **asked)


def _sliced(name: str, *, interleave: bool) -> _Entry:
    return _Entry(
        lambda request: variants.sliced(
            name, request.stages, request.microbatches, request.slices, interleave=interleave
        ),
        option="slices",
    )


def _updating(make: Callable[[int, int, int], Schedule]) -> _Entry:
    return _Entry(lambda request: make(request.stages, request.microbatches, request.every), option="every")


_SYNCHRONOUS = {
    "gpipe": _plain(one_direction.gpipe),
    "1f1b": _plain(lambda p, m: one_direction.one_forward_one_backward("1f1b", p, m, hops=1)),
    "eager_1f1b": _plain(lambda p, m: one_direction.one_forward_one_backward("eager_1f1b", p, m, hops=2)),
    "interleaved_1f1b": _chunked(one_direction.interleaved, "any", multiple_of=lambda stages: stages),
    "looped_bfs": _chunked(one_direction.looped_breadth_first, "any"),
    "zb_h1": _plain(zero_bubble.zb_h1),
    "zb_h2": _plain(zero_bubble.zb_h2),
    "zb_v": _plain(zero_bubble.zb_v, chunks="two"),
    "v_half": _plain(building_blocks.v_half, chunks="two"),
    "v_min": _plain(building_blocks.v_min, chunks="two"),
    "chimera": _plain(slots.chimera, even_stages=True, multiple_of=lambda stages: 2),
    "hanayo": _chunked(slots.hanayo, "even"),
    "dualpipe": _plain(dual.dualpipe, even_stages=True, multiple_of=lambda stages: 2, fewest=lambda stages: 2 * stages),
    "dualpipe_v": _plain(dual.dualpipe_v, chunks="two", fewest=lambda stages: 2 * stages),
    "graph": _Entry(lambda request: variants.graph(request.microbatches, request.predecessors), option="predecessors"),
    "bpipe": _plain(variants.bpipe),
    "terapipe": _sliced("terapipe", interleave=False),
    "seq1f1b": _sliced("seq1f1b", interleave=True),
}

_ASYNCHRONOUS = {
    "pipedream": _updating(asynchronous.pipedream),
    "pipedream_2bw": _updating(asynchronous.pipedream_2bw),
    "pipemare": _updating(asynchronous.pipemare),
    "ampnet": _updating(asynchronous.ampnet),
}

SCHEDULES = tuple(_SYNCHRONOUS)
"""Names of schedules that compute what the step computes: gradients are those of all microbatches."""

ASYNCHRONOUS = tuple(_ASYNCHRONOUS)
"""Names of schedules that change weights while microbatches are in flight; see `staleness`."""

_CHUNKS = {"one": (1, 1), "two": (2, 2), "even": (2, 2), "any": (1, 1)}  # by default, and what they are a multiple of


_MOST_TASKS = 10_000_000  # forward tasks, which are held in some gigabytes


def schedule(
    name: str,
    stages: int,
    microbatches: int,
    chunks: int = 1,
    *,
    slices: int = 1,
    every: int | None = None,
    predecessors: Sequence[Sequence[int]] | None = None,
) -> Schedule:
    """A published schedule.

    A device has one stage, of `chunks` virtual stages. Virtual stages are numbered as a microbatch goes through them:
    dealt in turn (virtual stage v on device v % stages), or forth and back in schedules shaped like a V or a wave. In
    "chimera" and "dualpipe", two pipelines run in opposite directions with a copy of the weights each. The first has
    the first half of the microbatches and virtual stages 0 to stages - 1, on the device of the same number. The second
    has the other half and virtual stages stages to 2 * stages - 1, of which the first is on the last device.

    Args:
        name: one of `SCHEDULES` or of `ASYNCHRONOUS`.
        stages: devices in the pipeline.
        microbatches: in one step; in asynchronous schedules, in the stream that is looked at.
        chunks: virtual stages per device. Those shaped like a V have two, and a wave of "hanayo" has two, whether 1 or
            2 is said.
        slices: of the sequence, in "terapipe" and "seq1f1b", which are "gpipe" and "1f1b" with one. The second entry of
            a task counts slices: microbatch * slices + slice.
        every: microbatches per update of the weights, in asynchronous schedules; by default 1 in "pipedream" and
            "ampnet", as many as there are stages in the others.
        predecessors: in "graph", per stage the stages whose results it reads; by default a chain.

    Raises:
        ArgumentError: an unknown name, or an argument that the schedule is not defined for.

    >>> schedule("1f1b", 2, 2).orders[0]
    (Task(kind='F', microbatch=0, virtual_stage=0), Task(kind='F', microbatch=1, virtual_stage=0), \
Task(kind='B', microbatch=0, virtual_stage=0), Task(kind='B', microbatch=1, virtual_stage=0))
    """
    entry = _entry(name)
    _check_count("slices", slices)
    given = {"slices": slices > 1, "every": every is not None, "predecessors": predecessors is not None}
    for option, is_said in given.items():
        if is_said and entry.option != option:
            takers = [other for other, row in _ALL.items() if row.option == option]
            raise ArgumentError(f"schedule {name!r} takes no {option}=; {', '.join(takers)} do")
    _check_count("stages", stages)
    _check_count("microbatches", microbatches)
    request = _Request(
        stages,
        microbatches,
        _chunks(name, entry.chunks, chunks),
        slices,
        _check_count("every", (1 if name in ("pipedream", "ampnet") else stages) if every is None else every),
        _predecessors(stages, predecessors),
    )
    if (tasks := stages * microbatches * request.chunks * slices) > _MOST_TASKS:
        raise ArgumentError(
            f"schedule {name!r} of {stages} stages and {microbatches} microbatches has {tasks} forward tasks; there "
            f"may be {_MOST_TASKS}"
        )
    if entry.even_stages and stages % 2:
        raise ArgumentError(f"schedule {name!r} has stages in pairs; stages={stages} is odd. Use {stages + 1}.")
    multiple, fewest = entry.multiple_of(stages), entry.fewest(stages)
    if microbatches < fewest:
        raise ArgumentError(
            f"schedule {name!r} needs at least {fewest} microbatches for {stages} stages; microbatches={microbatches}"
        )
    if microbatches % multiple:
        below, above = microbatches // multiple * multiple, -(-microbatches // multiple) * multiple
        near = f"{below} or {above}" if below >= fewest else str(above)
        raise ArgumentError(
            f"schedule {name!r} needs a multiple of {multiple} microbatches for {stages} stages; "
            f"microbatches={microbatches}. Use {near}."
        )
    return entry.make(request)


_ALL = _SYNCHRONOUS | _ASYNCHRONOUS


def _entry(name: str) -> _Entry:
    if isinstance(name, str) and name in _ALL:
        return _ALL[name]
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), _ALL, n=3, cutoff=0.5)
    meant = f"Did you mean {' or '.join(map(repr, near))}? " if near else ""
    raise ArgumentError(f"no schedule is called {name!r}. {meant}There are {', '.join(_ALL)}.")


def _check_count(name: str, value: int) -> int:
    if not is_of_kind(value, int) or value < 1:
        raise ArgumentError(f"{name}={value!r}; a whole number is needed, 1 or more")
    return int(value)


def _chunks(name: str, rule: str, chunks: int) -> int:
    _check_count("chunks", chunks)
    default, multiple = _CHUNKS[rule]
    chunks = default if chunks == 1 else chunks
    if rule == "any" or chunks == default or (rule == "even" and chunks % multiple == 0):
        return chunks
    allowed = {
        "one": f"has one virtual stage per device{' and pipeline' if name in ('chimera', 'dualpipe') else ''}",
        "two": "has two virtual stages per device",
        "even": "goes forth and back, so a device has an even number of virtual stages",
    }[rule]
    several = [other for other, row in _ALL.items() if row.chunks == "any"]
    raise ArgumentError(f"schedule {name!r} {allowed}; chunks={chunks}. Any number: {', '.join(several)}.")


def _up_to(stage: int) -> str:
    return f"0 to {stage - 1}" if stage else "none"


def _predecessors(stages: int, predecessors: Sequence[Sequence[int]] | None) -> Sequence[Sequence[int]]:
    if predecessors is None:
        return [() if stage == 0 else (stage - 1,) for stage in range(stages)]
    try:
        found = [tuple(sorted({int(earlier) for earlier in before})) for before in predecessors]
    except (TypeError, ValueError):
        raise ArgumentError(
            f"predecessors={predecessors!r}; per stage a sequence of stages is needed, as in ((), (), (0, 1))"
        ) from None
    if len(found) != stages:
        raise ArgumentError(f"predecessors has {len(found)} entries for stages={stages}; one per stage is needed")
    for stage, before in enumerate(found):
        if before and not 0 <= before[0] <= before[-1] < stage:
            raise ArgumentError(
                f"predecessors[{stage}]={before}: a stage reads stages of smaller numbers, {_up_to(stage)} here; "
                "number them in an order in which they can run"
            )
    return found
