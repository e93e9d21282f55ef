"""What a user asks for beside the step in, checked `Options` out."""

from __future__ import annotations

import math
import numbers
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autoshard.errors import ArgumentError, MeshError, SolverError
from autoshard.errors.kinds import checks_kinds
from autoshard.layout import Layout, with_auto_axes
from autoshard.mesh.presets import topology as preset
from autoshard.mesh.targets import target_mesh
from autoshard.mesh.topology import Topology
from autoshard.model.xla.backends import Backend, backend_of
from autoshard.plans.plan import PlanData
from autoshard.rewrites import REWRITES
from autoshard.solver.progress import Progress
from autoshard.solver.searches.search_run import Search
from autoshard.solver.searches.table import algorithm_of
from autoshard.tactics import Tactic
from autoshard.tactics.requests import TacticLike, is_tactic
from autoshard.tactics.restriction import Restricts, restricted

TRACE_KEYWORDS = ("static_argnums", "static_argnames", "donate_argnums", "donate_argnames")
JIT_KEYWORDS = (*TRACE_KEYWORDS, "keep_unused", "compiler_options")

_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(?:([kmgt])(i?))?b?\s*", re.IGNORECASE)

LEAST_SEARCH_SHARE = 0.25  # of the time limit: what the search has at least, however long formulating has taken


@dataclass(frozen=True)
class Options:
    """What a plan depends on besides the program."""

    mesh: Mesh | AbstractMesh  # axis types Auto
    topology: Topology
    backend: Backend
    memory: float  # bytes per device
    fixed: Mapping[str, PartitionSpec]  # path or glob -> spec
    time_limit: float  # s
    cache: Path | None = None  # the folder in which plans are kept
    refine: int = 1  # how many plans are compiled, to keep the best; 1: none is
    compiled_for: Mesh | None = None  # for which devices: those of the mesh, or of a machine that need not be there
    ignore_constraints: bool = False  # whether what the step itself says of layouts is dropped
    trips: Mapping[str, int] = field(default_factory=dict)  # line, function or glob of a `while` -> turns
    given_mesh: Mesh | AbstractMesh | None = None  # as the user gave it, axis types included
    is_memory_given: bool = False  # whether the user said how much memory there is
    until: float | None = None  # when the time limit ends, as `time.monotonic` has it; None: it has not begun
    microbatches: int | None = 1  # how many the step runs in; None: as many as it takes to fit
    like: PlanData | None = None  # of another step, as whose the arguments lie that both take
    given_topology: Topology | str | None = None  # as the user gave it; None: guessed from the mesh
    progress: Callable[[Progress], None] | None = None  # told what is known while a plan is sought
    remat: str | None = None  # "auto": what the backward pass keeps is chosen; None: as the step says
    pinned: Mapping[int, Layout] = field(default_factory=dict)  # argument index -> its layout, beside what is fixed
    enough: Callable[[], float] | None = None  # seconds: a plan that is proven to take longer is not sought further
    search: str | Search | None = None  # what solves the problem, by name or itself; None: the solver's own way
    tactics: tuple[TacticLike, ...] = ()  # what restricts the plan, in order
    restricts: Restricts = restricted  # what the tactics leave of a formulation
    rewrites: tuple[str, ...] = ()  # laws of algebra that the step may be rewritten by
    reductions: str | None = None  # "auto": sums may be finished by sequences; None: at once, unless tactics say so
    statistics: str | None = None  # "microbatch": each takes sums over rows that it needs of its own; None: none may
    is_alone: bool = False  # whether this process plans without the others of its mesh

    def timed(self) -> Options:
        """With the time limit begun, if it has not."""
        return self if self.until is not None else replace(self, until=self.deadline())

    def of_several(self) -> Options:
        """For one plan of several that share the time: half of the work, and half of the time that is left."""
        until = None if self.until is None else half_of_time(self.until)
        return replace(self, time_limit=self.time_limit / 2, until=until)

    @property
    def ends(self) -> float:
        """When planning ends, as `time.monotonic` has it; infinite if that is not said."""
        return math.inf if self.until is None else self.until

    def deadline(self, until: float = math.inf) -> float:
        """When planning that begins now ends by the time limit, as `time.monotonic` has it.

        Args:
            until: when planning ends, if that is earlier.
        """
        return min(until, time.monotonic() + self.time_limit)

    @property
    def search_ends(self) -> float:
        """When a search ends that begins now, as `time.monotonic` has it."""
        return max(self.ends, time.monotonic() + LEAST_SEARCH_SHARE * self.time_limit)

    @property
    def untried(self) -> tuple[str, ...]:
        """The options that were not given, by which a train step may hold less."""
        ways = {"remat='auto'": self.remat is None, "microbatches='auto'": self.microbatches == 1}
        return tuple(way for way, is_open in ways.items() if is_open)


@checks_kinds("remat", "reductions", "statistics")
def options_of(
    mesh: Any,
    *,
    memory: Any = None,
    topology: Any = None,
    fixed: Any = None,
    time_limit: Any = 60.0,
    cache: Any = None,
    refine: Any = 1,
    ignore_constraints: Any = False,
    trips: Any = None,
    microbatches: Any = None,
    remat: Literal["auto"] | None = None,
    search: Any = None,
    tactics: Any = (),
    rewrites: Any = None,
    reductions: Literal["auto"] | None = None,
    statistics: Literal["microbatch"] | None = None,
) -> Options:
    """The options as a user writes them, checked and with their defaults.

    Raises:
        MeshError: the topology has no link for an axis of the mesh, or there are no devices to refine for.
        ArgumentError: an option is of the wrong kind.
    """
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise ArgumentError(f"mesh must be a jax.sharding.Mesh or AbstractMesh, as jax.make_mesh gives; it is {mesh!r}")
    if not mesh.axis_names:
        raise MeshError("the mesh has no axes; give it one, even of one device: jax.make_mesh((1,), ('data',))")
    if unwritable := [name for name in map(str, mesh.axis_names) if not name.isascii() or "\\" in name]:
        raise MeshError(
            f"mesh axes {', '.join(map(repr, unwritable))}: XLA ends the process when it compiles for an axis of such "
            "a name.\nName axes in ASCII letters, without a backslash."
        )
    given_mesh, mesh = mesh, with_auto_axes(mesh)
    given_topology = topology
    if isinstance(topology, str):
        topology = preset(topology, dict(mesh.shape))
    elif topology is None:
        topology = Topology.of(mesh)
    elif not isinstance(topology, Topology):
        raise ArgumentError(f"topology must be a Topology or the name of a preset; it is {topology!r}")
    topology.check(mesh.shape)
    backend = backend_of(mesh, topology.machine)
    if fixed is not None and not isinstance(fixed, Mapping):
        raise ArgumentError(f"fixed must be a dict from path or glob to PartitionSpec; it is {fixed!r}")
    for pattern, spec in (fixed or {}).items():
        if not isinstance(pattern, str) or not isinstance(spec, PartitionSpec):
            raise ArgumentError(f"fixed[{pattern!r}] = {spec!r}; a path or glob and its PartitionSpec are needed")
    if not is_number(time_limit) or not time_limit >= 0:
        raise ArgumentError(f"time_limit={time_limit!r}; seconds are needed, 0 or more")
    if cache is not None and not isinstance(cache, str | Path):
        raise ArgumentError(f"cache={cache!r}; the path of a folder is needed")
    if not is_whole_number(refine) or refine < 1:
        raise ArgumentError(f"refine={refine!r}; how many plans to compile is needed, 1 or more")
    if not isinstance(ignore_constraints, bool):
        raise ArgumentError(f"ignore_constraints={ignore_constraints!r}; True or False is needed")
    compiled_for = _devices(mesh, topology.machine) if refine > 1 else None
    limit = topology.memory_bytes if memory is None else bytes_of(memory)
    tactics = _tactics(tactics)
    keeps = all(isinstance(one, Tactic) for one in tactics)  # a function may say anything
    folder = _folder(cache) if cache is not None and keeps else None
    return Options(
        mesh,
        topology,
        backend,
        limit,
        dict(fixed or {}),
        float(time_limit),
        folder,
        int(refine),
        compiled_for,
        ignore_constraints,
        _turns(trips),
        given_mesh,
        memory is not None,
        microbatches=_count(microbatches),
        given_topology=given_topology,
        remat=remat,
        search=_search(search, cache),
        tactics=tactics,
        rewrites=_rewrites(rewrites),
        reductions=reductions,
        statistics=statistics,
    )


def _search(search: Any, cache: Any) -> str | Search | None:
    """The search, once it is known to be one."""
    if search is None:
        return None
    try:
        algorithm_of(search)
    except SolverError as error:
        raise ArgumentError(f"search={search!r}: {error}") from None
    if cache is not None and not isinstance(search, str):
        raise ArgumentError(
            f"search={search!r} and cache={cache!r}: plans of a function of yours are not kept, as the function may "
            "change.\nDrop cache=, or name one of autoshard.solver.SEARCHES."
        )
    chosen: str | Search = search
    return chosen


def _tactics(tactics: Any) -> tuple[TacticLike, ...]:
    """Tactics, checked.

    >>> from autoshard.tactics import ZeRO
    >>> _tactics([ZeRO(3)]), _tactics(())
    ((ZeRO(3),), ())
    """
    given = tactics if isinstance(tactics, list | tuple) else [tactics]
    for one in given:
        if not is_tactic(one):
            raise ArgumentError(
                f"tactics={tactics!r}: a list of tactics is needed, as in [DataParallel('data'), Megatron('model')] of "
                "autoshard.tactics; functions of the step may be among them"
            )
    return tuple(given)


def _rewrites(rewrites: Any) -> tuple[str, ...]:
    """Names of laws, in the order in which they were registered.

    >>> _rewrites(None), _rewrites(["loop_sum"]), len(_rewrites("auto")) == len(REWRITES)
    ((), ('loop_sum',), True)
    """
    if rewrites is None:
        return ()
    named = list(REWRITES) if isinstance(rewrites, str) and rewrites == "auto" else rewrites
    if not isinstance(named, list | tuple) or not all(isinstance(one, str) and one in REWRITES for one in named):
        raise ArgumentError(
            f"rewrites={rewrites!r}; 'auto', None or a list of names of autoshard.rewrites.REWRITES is needed:"
            f"\n{', '.join(REWRITES)}"
        )
    return tuple(name for name in REWRITES if name in named)


def _count(microbatches: Any) -> int | None:
    """How many microbatches; None for "auto".

    >>> _count(None), _count(4), _count("auto")
    (1, 4, None)
    """
    if microbatches is None or (isinstance(microbatches, str) and microbatches == "auto"):
        return 1 if microbatches is None else None
    if not is_whole_number(microbatches) or microbatches < 1:
        raise ArgumentError(f"microbatches={microbatches!r}; how many is needed, 1 or more, or 'auto'")
    return int(microbatches)


def is_whole_number(value: Any) -> bool:
    """Whether a value says how many: Python's integers, NumPy's, and no truth values."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Whether a value says how much: as `is_whole_number`, with fractions."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _folder(path: str | Path) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # of a user that is not known
        return Path(path)


def _turns(trips: Any) -> dict[str, int]:
    """How often loops of unknown length turn, by where they stand; one number is for all.

    >>> _turns(64), _turns({"solver.py:41": 8}), _turns(None)
    ({'*': 64}, {'solver.py:41': 8}, {})
    """
    counts = trips if isinstance(trips, Mapping) else {} if trips is None else {"*": trips}
    for place, turns in counts.items():
        if not isinstance(place, str) or not is_whole_number(turns) or turns < 1:
            raise ArgumentError(
                f"trips={trips!r}: a number of turns is needed, 1 or more, or a dict from where loops stand to such "
                "numbers, as in trips={'solver.py:41': 64} or trips={'integrate': 64}"
            )
    return {place: int(turns) for place, turns in counts.items()}


def _devices(mesh: Mesh | AbstractMesh, machine: str | None) -> Mesh:
    """What plans of `mesh` can be compiled for."""
    if isinstance(mesh, Mesh):
        return mesh
    if machine is None:
        raise MeshError(
            f"refine= compiles plans, and {mesh} has no devices.\n"
            "Plan on a mesh of devices, or name a machine, as in topology='v5e:4x4'."
        )
    return target_mesh(machine, dict(mesh.shape))


def check_jit_keywords(keywords: Mapping[str, Any]) -> None:
    """
    Raises:
        ArgumentError: some keyword is neither autoshard's nor one of `jax.jit` that makes sense here, or is of the
            wrong kind.
    """
    unknown = sorted(keywords.keys() - set(JIT_KEYWORDS))
    if unknown:
        hint = "\nShardings that arguments must have go into fixed=." if "in_shardings" in unknown else ""
        known = ", ".join(JIT_KEYWORDS)
        raise ArgumentError(f"autoshard takes no {', '.join(map(str, unknown))}; of jax.jit it takes {known}{hint}")
    _check_kinds_for_jit(**keywords)


@checks_kinds()
def _check_kinds_for_jit(
    *,
    static_argnums: int | Iterable[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Iterable[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    compiler_options: Mapping[str, bool | float | str] | None = None,
) -> None:
    """The keywords are of the kinds that `jax.jit` takes."""


def check_fits(fn: Callable[..., Any], jit_keywords: Mapping[str, Any]) -> None:
    """
    Raises:
        ArgumentError: the function has no such arguments, or one is to be both static and donated.
    """
    try:
        jax.jit(fn, **{name: value for name, value in jit_keywords.items() if name in TRACE_KEYWORDS})
    except (TypeError, ValueError) as error:
        name = getattr(fn, "__name__", "the function")
        raise ArgumentError(f"{name} and the keywords given for it do not fit: {error}") from error


def compile_keywords(jit_keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The keywords of `jax.jit` that count when the annotated step is compiled; the others have been traced."""
    return {name: value for name, value in jit_keywords.items() if name not in TRACE_KEYWORDS}


def bytes_of(size: str | float) -> float:
    """Bytes of ``"14GiB"``, ``"800 MB"`` or a plain number.

    >>> bytes_of("1.5KiB"), bytes_of("2 MB"), bytes_of(800)
    (1536.0, 2000000.0, 800.0)
    """
    if isinstance(size, str) and (match := _SIZE.fullmatch(size)):
        number, prefix, binary = match.groups()
        power = _POWERS[prefix.lower()] if prefix else 0
        return float(number) * float((1024 if binary else 1000) ** power)
    if isinstance(size, str) or not is_number(size) or not 0 <= size < math.inf:
        raise ArgumentError(f"memory={size!r} is not a size; write bytes as a number, or as '14GiB' or '800MB'")
    return float(size)


def half_of_time(until: float) -> float:
    """When half of the time is up that is left until then: what one plan may take of which several are to be made."""
    now = time.monotonic()
    return now + max(0.0, until - now) / 2
