"""A step as each process of a mesh has it in, the one plan that all run it by out; or an error that says what differs.

The leader plans, and its plan goes to the others as the text of a plan file. Before a step first runs, every process
holds its *claims*, all that the compiled program depends on, against those of the leader. Nothing here is done for a
mesh whose devices belong to one process.

How is searched, how long, and the cache folder are no claims: only the leader searches, and looks into a cache.
"""

from __future__ import annotations

import hashlib
import json
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from autoshard.cache import key_of, key_parts, versions
from autoshard.errors import ProcessError
from autoshard.jaxprs import Jaxpr, inner_jaxprs
from autoshard.options import Options
from autoshard.plans.files import to_json
from autoshard.plans.plan import PlanData
from autoshard.primitives import THREEFRY
from autoshard.processes.group import PATIENCE, ProcessGroup
from autoshard.program import Equation, Program
from autoshard.propagation import Rule
from autoshard.report.units import bytes_text
from autoshard.tactics.requests import text_of_tactic
from autoshard.user_plan import Plan

_UNLIMITED = 0.0  # stands for any time limit in a key


@dataclass(frozen=True)
class Claims:
    """A step as one process has it: what has to be the same on all."""

    step: str  # its name
    key: str  # of its plan, equal where the leader's plan can be used
    compared: Mapping[str, str]  # what else is compared, in the order in which differences are told; short texts
    arguments: tuple[str, ...]  # "state/w float32[8, 8]"
    operations: tuple[tuple[str, str], ...]  # (what it computes, the user's line) per equation

    @classmethod
    def of(
        cls,
        program: Program,
        rules: Sequence[Rule],
        options: Options,
        jit_keywords: Mapping[str, Any],
        given: Plan | None = None,
    ) -> Claims:
        """
        Args:
            given: the plan that the user gave, if so.
        """
        mesh = options.mesh
        devices = [device.id for device in mesh.devices.flat] if isinstance(mesh, Mesh) else []
        operations = tuple((_computes(equation), str(equation.source)) for equation in program.equations)
        compared = {
            "versions": " ".join(versions()),
            "mesh": f"{dict(mesh.shape)} of devices {_short(devices)}",
            "arguments": _digest([str(value) for value in program.arguments]),
            "operations": _digest([text for text, _ in operations]),
            "program": program.fingerprint,
            "random numbers": ", ".join(sorted({_generator(flag) for flag in _generators(program.jaxpr.jaxpr)})),
            "constants": _digest_of_constants(program),
            "rules": _digest(list(map(str, rules))),
            "memory": bytes_text(options.memory),
            "topology": _digest(options.topology),
            "fixed": _short({path: str(spec) for path, spec in options.fixed.items()}),
            "refine": str(options.refine),
            "ignore_constraints": str(options.ignore_constraints),
            "tactics": _short(list(map(text_of_tactic, options.tactics))),
            "reductions": str(options.reductions),
            "statistics": str(options.statistics),
            "like": "None"
            if options.like is None
            else f"a plan of {options.like.name}, {_digest_of_like(options.like)}",
            "trips": _short(dict(options.trips)),
            "jit keywords": _short(dict(jit_keywords)),
            "plan": "found by the search" if given is None else f"given, {digest_of(given)}",
        }
        key = key_of(program, rules, without_search(options))
        return cls(program.name, key, compared, tuple(map(str, program.arguments)), operations)

    def dumps(self) -> str:
        """As JSON."""
        return json.dumps(vars(self), default=dict)

    @classmethod
    def loads(cls, text: str) -> Claims:
        """What `dumps` wrote."""
        content = json.loads(text)
        operations = tuple((what, where) for what, where in content.pop("operations"))
        return cls(**content | {"arguments": tuple(content["arguments"]), "operations": operations})

    def difference(self, leaders: Claims, here: int, leader: int) -> str:
        """What differs from the leader's claims, in words; empty if nothing does."""
        differs = [name for name, one in self.compared.items() if leaders.compared.get(name) != one]
        if self.step == leaders.step and self.key == leaders.key and not differs:
            return ""
        what = next(iter(differs), "what the plan depends on")
        ours, theirs = self.compared.get(what, self.key[:16]), leaders.compared.get(what, leaders.key[:16])
        if self.step != leaders.step:
            what, ours, theirs = "step", self.step, leaders.step
        elif what == "arguments":
            ours, theirs = _first_difference(self.arguments, leaders.arguments, compared=str)
        elif what == "operations":
            found = _first_difference(self.operations, leaders.operations, compared=operator.itemgetter(0))
            ours, theirs = (one if isinstance(one, str) else " at ".join(one) for one in found)
        return (
            f"{leaders.step} is not the same on all processes of the mesh. They differ in {what}:\n"
            f"  process {leader}: {theirs}\n  process {here}: {ours}\n"
            "Give every process the same step, options and shapes of arguments."
        )


def _generators(jaxpr: Jaxpr) -> Iterator[bool]:
    """Per equation that draws random numbers, those of loops and calls too, whether devices draw each their own."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in THREEFRY:
            yield eqn.ctx.threefry_partitionable
        for inner in inner_jaxprs(eqn):
            yield from _generators(inner.jaxpr)


def _generator(is_partitionable: bool) -> str:
    return f"jax_threefry_partitionable={is_partitionable}"


def plan_of_all(group: ProcessGroup, claims: Claims, make: Callable[[], Plan], load: Callable[[str], Plan]) -> Plan:
    """The plan that the leader makes, on every process.

    The leader does not wait for the others: it may plan alone, to print the plan say.

    Args:
        load: makes a plan of the text that `Plan.dumps` wrote.

    Raises:
        AutoshardError: planning failed on the leader; the error is the leader's.
        ProcessError: the leader plans another step here, has failed in another way, or has ended.
    """
    made: Plan | None = None

    def text() -> str:
        nonlocal made
        made = make()
        return made.dumps()

    found = text_of_all(group, claims, "plan", text)
    return load(found) if made is None else made


def text_of_all(group: ProcessGroup, claims: Claims, about: str, make: Callable[[], str]) -> str:
    """What the leader says of a step, on every process.

    Args:
        about: which text of this step it is.
        make: makes it.

    Raises:
        AutoshardError: it could not be made; the error is the leader's.
        ProcessError: the leader plans another step here, has failed in another way, or has ended.
    """
    since, key = time.monotonic(), f"{about}/{claims.key}"

    def text() -> str:
        group.post("planning", claims.dumps())
        return make()

    def watch() -> None:
        """Finds a leader that has gone on to run another step, or that planned this one with other options."""
        running, planning = group.peek(_offer(group)), group.peek("planning")
        if group.has_said(key):  # since this process last looked: the leader plans other variants, or runs the step
            return
        if running is not None:
            _refuse(claims, Claims.loads(running), group)
        if planning is not None and time.monotonic() - since > PATIENCE.silence:
            leaders = Claims.loads(planning)
            if (leaders.step, leaders.arguments) == (claims.step, claims.arguments) and leaders.key != claims.key:
                _refuse(claims, leaders, group)

    return group.leader_says(key, text, watch)


def mesh_of_all(
    group: ProcessGroup, step: str, fingerprint: str, candidates: Sequence[Options], rank: Callable[[], str]
) -> str:
    """The leader's ranking of meshes as a text, on every process.

    Args:
        step: the name of the step.
        fingerprint: of its program on some mesh; empty if it can be traced on none.
        candidates: the options for each mesh.
        rank: makes the ranking.

    Raises:
        AutoshardError: no mesh will do on the leader; the error is the leader's.
        ProcessError: the leader chooses for other options, has failed in another way, or has ended.
    """
    options_of_candidates = [(*key_parts(without_search(one)), one.microbatches, one.remat) for one in candidates]
    key, place = _digest([step, fingerprint, repr(options_of_candidates)]), f"choosing/{_digest([step, fingerprint])}"
    since = time.monotonic()

    def watch() -> None:
        """Finds a leader that chooses the mesh of this step with other options, or runs on a mesh that it was given."""
        running = group.peek(_offer(group))
        if running is not None and not group.has_said(f"mesh/{key}"):
            raise ProcessError(
                f"{step} is not the same on all processes of the mesh. They differ in mesh:\n  process {group.leader}: "
                f"{Claims.loads(running).compared['mesh']}\n  process {group.here}: mesh='auto'\n"
                "Give every process the same mesh."
            )
        leaders = group.peek(place)
        if leaders not in {None, key} and time.monotonic() - since > PATIENCE.silence:
            raise ProcessError(
                f"{step} is not the same on all processes of the mesh. They differ in the options that mesh='auto' "
                f"chooses by:\n  process {group.leader}: {leaders}\n  process {group.here}: {key}\n"
                "Give every process the same options."
            )

    def text() -> str:
        group.post(place, key)
        return rank()

    return group.leader_says(f"mesh/{key}", text, watch)


def check_alike(group: ProcessGroup, claims: Claims, plan: Plan) -> None:
    """Waits until all processes are about to run this step by this plan.

    Raises:
        ProcessError: a process is about to run something else, has failed or ended, or has not come.
    """
    claims = replace(claims, compared={**claims.compared, "layouts": digest_of(plan)})
    if group.leads:
        group.post(_offer(group), claims.dumps())
        answer = ""
    else:
        leaders = Claims.loads(group.read(_offer(group), group.leader))
        answer = claims.difference(leaders, group.here, group.leader)
    differs = group.exchange("alike", answer, lambda answers: next(filter(None, answers.values()), ""))
    if differs:
        raise ProcessError(differs)


def peak_of_all(group: ProcessGroup, number: int, peak: float | None) -> float | None:
    """The largest of the peaks that compilers on all processes tell of the same program; None if one tells none.

    Args:
        number: which program of this round it is.
    """

    def largest(answers: Mapping[int, str]) -> str:
        peaks = [json.loads(answer) for answer in answers.values()]
        return json.dumps(None if None in peaks else max(peaks))

    found: float | None = json.loads(group.exchange(f"peak/{number}", json.dumps(peak), largest))
    return found


def digest_of(plan: Plan) -> str:
    """Equal for plans that say the same."""
    return _digest(to_json(plan, None))


def _offer(group: ProcessGroup) -> str:
    """The key under which the leader says what it is about to run."""
    return f"run/{group.round}"


def _refuse(claims: Claims, leaders: Claims, group: ProcessGroup) -> None:
    if claims.key != leaders.key or claims.compared["plan"] != leaders.compared["plan"]:
        known = {name: leaders.compared[name] for name in claims.compared}  # the leader, about to run, says more
        raise ProcessError(claims.difference(replace(leaders, compared=known), group.here, group.leader))


def without_search(options: Options) -> Options:
    """Options less what the leader alone needs."""
    return replace(options, time_limit=_UNLIMITED, search=None)


def _computes(equation: Equation) -> str:
    """An equation without its line, with the numbers in it."""
    numbers = [x.item() for x in equation.inputs if isinstance(x, np.ndarray) and x.size == 1 and x.dtype.kind != "V"]
    shapes = [list(x.shape) for x in equation.inputs], [list(x.shape) for x in equation.outputs]
    return f"{equation.primitive} {shapes[0]} -> {shapes[1]}{f' with {numbers}' if numbers else ''}"


def _digest_of_like(like: PlanData) -> str:
    return _digest([f"{one.name} {one.type} {one.layout}" for one in like.arguments])


def _digest_of_constants(program: Program) -> str:
    """Of the literals and the small constants of a program, which its fingerprint leaves out."""
    digest = hashlib.sha256()
    for array in (*(x for equation in program.equations for x in equation.inputs), *program.jaxpr.consts):
        if isinstance(array, jax.Array) and _can_be_read(array):
            array = np.asarray(array)
        if isinstance(array, np.ndarray) and array.dtype.kind != "O":
            digest.update(array.tobytes())
    return digest.hexdigest()[:16]


def _can_be_read(array: jax.Array) -> bool:
    is_tracer, is_key = isinstance(array, jax.core.Tracer), jax.dtypes.issubdtype(array.dtype, jax.dtypes.extended)
    return not is_tracer and not is_key and array.is_fully_addressable and not array.is_deleted()


def _digest(content: Any) -> str:
    text = json.dumps(content) if isinstance(content, dict | list) else repr(content)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _short(content: Any) -> str:
    """A text for people; of a long one its digest tells two apart."""
    text = str(content)
    return text if len(text) < 200 else f"{text[:160]}... ({_digest(text)})"


def _first_difference(ours: Sequence[Any], theirs: Sequence[Any], compared: Callable[[Any], str]) -> tuple[Any, Any]:
    """The first entries of two lists that differ, or how many entries they have."""
    pairs = zip(ours, theirs, strict=False)
    counts = f"{len(ours)} in all", f"{len(theirs)} in all"
    return next(((here, there) for here, there in pairs if compared(here) != compared(there)), counts)
