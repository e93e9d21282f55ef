"""`Plan`, which users hold: what a plan says, bound to the step that it is for and to what it is compared with."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autoshard.arrays.state_and_batches import init, shard_batch
from autoshard.compiled.verification import Verification, compiled, verification, without_dropped
from autoshard.errors import ArgumentError, MeshError, PlanError
from autoshard.export.golden import changes_of, text_of_changes
from autoshard.export.logical_rules import maxtext_rules
from autoshard.export.shardings_code import shardings_code
from autoshard.files import write_whole
from autoshard.lower import Lowering
from autoshard.mesh.machines import is_machine
from autoshard.mesh.targets import target_mesh
from autoshard.mesh.topology import Topology
from autoshard.plans.files import from_json, from_text, to_json, to_text
from autoshard.plans.plan import PlanData
from autoshard.plans.prediction import Prediction
from autoshard.program.paths import printable
from autoshard.program.user_code import shows_users_lines
from autoshard.report.difference import Difference, wish_section
from autoshard.report.explanation import Explanation
from autoshard.report.html.elements import Html
from autoshard.report.html.page import page, plan_html
from autoshard.report.plan_sections import plan_sections, repr_text
from autoshard.report.plot import plan_figure
from autoshard.report.section import Section
from autoshard.report.text import text_of
from autoshard.tactics.requests import TacticLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Figures = Mapping[str, Prediction | str]  # of other ways to shard a step, or why one has none


@dataclass(eq=False)
class Comparison:
    """What a plan is compared with: the figures of other ways to shard, found when they are first asked for."""

    find: Callable[[], Figures] | None = None  # None: there is nothing to find them with, as in a plan of a file
    found: Figures | None = None  # None: nobody has asked

    def figures(self) -> Figures:
        """The figures. Only the first call searches."""
        if self.found is None and self.find is not None:
            self.found = self.find()
        return self.found or {}

    @property
    def known(self) -> Figures | None:
        """The figures without a search; None if one would find them."""
        return self.found or {} if self.find is None else self.found


class PlanQuestions(Protocol):
    """What a plan was made of: the program and the options."""

    def explain(self, plan: Plan, path: str) -> Explanation:
        """See `Plan.explain`."""

    def what_if(self, plan: Plan, wish: Mapping[str, Any]) -> Plan:
        """See `Plan.what_if`."""


@dataclass(frozen=True)
class Wish:
    """What `what_if` was asked for, and the costs of the plan that was asked."""

    text: str  # "memory='8GiB'"
    before: Prediction


@dataclass(frozen=True, eq=False)
class Plan(PlanData):
    """How a step is sharded over a mesh, what that is predicted to cost, and how good it is proven to be."""

    comparison: Comparison = field(repr=False, default_factory=Comparison)
    lowering: Lowering | None = field(repr=False, default=None)  # called, lowers the step; None: loaded, not yet bound
    planner: PlanQuestions | None = field(repr=False, default=None)  # None: loaded, not yet bound
    remark: str = ""  # what changes where the step was planned for another signature before
    wish: Wish | None = None  # what `what_if` was asked for; None: another made the plan
    stages: tuple[Any, ...] = ()  # `PlannedStage`s of a step that runs in a pipeline
    timeline: Any = field(repr=False, default=None)  # `autoshard.pipeline.Timeline` of its tasks; None without stages

    @classmethod
    def of(cls, plan: PlanData, comparison: Comparison | None = None) -> Plan:
        """What `plan` says, and what it is compared with."""
        values = {one.name: getattr(plan, one.name) for one in fields(PlanData)}
        return cls(**values, comparison=comparison or Comparison())

    def __copy__(self) -> Self:
        """Itself: a plan never changes."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[str, AbstractMesh]]:
        """Pickled, a plan is what its file says, and comes back on an AbstractMesh: `on` gives it devices."""
        return Plan.loads, (self.dumps(), AbstractMesh(self.mesh.axis_sizes, self.mesh.axis_names))

    @property
    def alternatives(self) -> Mapping[str, Prediction | None]:
        """What a step costs in data parallel, FSDP and tensor parallel form; None for what `absent` names.

        The figures are those of the program that `jax.jit` makes. "FSDP, inner layouts planned" is a row of its own, if
        the same arguments are faster so.

        A search finds them when they are first asked for, which takes about as long as planning. They are empty if the
        plan was loaded and saved without them. What each of them means exactly: `autoshard.plans.alternatives`.
        """
        figures = self.comparison.figures()
        return {name: None if isinstance(one, str) else one for name, one in figures.items()}

    @property
    def absent(self) -> Mapping[str, str]:
        """Why some of `alternatives` have no figures: no such sharding exists, or none was found in time."""
        return {name: one for name, one in self.comparison.figures().items() if isinstance(one, str)}

    def compare(self) -> Self:
        """This plan, once `alternatives` are found: printed from then on, it has a row for each of them.

        `print(plan)` alone never searches; `print(plan.compare())` does if nobody has asked before.
        """
        self.comparison.figures()
        return self

    @shows_users_lines
    def explain(self, path: str) -> Explanation:
        """Why an argument lies as it does: what the step costs if it lies otherwise, and what forced the choice.

        The step is formulated and solved again with the argument lying each other way, so this takes some seconds.

        >>> import jax, jax.numpy as jnp
        >>> from autoshard import plan
        >>> mesh = jax.sharding.AbstractMesh((8,), ("data",))
        >>> found = plan(lambda w, x: x @ w, jnp.ones((12, 12)), jnp.ones((64, 12)), mesh=mesh, topology="cpu:8")
        >>> found.explain("w").reasons[-1]
        "Dim 1 has 12 elements: 'data' (8 devices) does not divide it, but divides 8 and 16."

        Args:
            path: of an argument, as the printed plan has it; the end of a path or a glob will do, and stands for the
                first argument that it fits.

        Raises:
            PlanError: no argument has this path, or the plan was loaded and is not bound to a step.
        """
        return self._asked().explain(self, path)

    def diff(self, other: PlanData) -> Difference:
        """What differs between this plan and another, printable: layouts, seconds, bytes and collectives.

        Either may have been loaded. The difference is false if nothing differs.
        """
        return Difference.of(self, other)

    @shows_users_lines
    def what_if(
        self,
        *,
        fixed: Mapping[str, PartitionSpec] | None = None,
        memory: str | float | None = None,
        mesh: Mesh | AbstractMesh | None = None,
        topology: Topology | str | None = None,
        time_limit: float | None = None,
        tactics: Sequence[TacticLike] | None = None,
    ) -> Plan:
        """The plan of the same step under another wish; printed, it says what the wish costs.

        What was asked for before still holds where the wish says nothing else. The search begins with this plan, unless
        the wish is for another mesh or machine. The result can be verified, saved and given to `autoshard(plan=...)`.
        Only then its compiled program is held against the memory limit.

        Args:
            fixed: as for `autoshard`, on top of what is fixed.
            memory: bytes per device, as for `autoshard`.
            mesh: another mesh, for the same program.
            topology: what its machine costs; by default as this plan's was found.
            time_limit: seconds of the search; by default as for this plan.
            tactics: published schemes to plan within, as for `autoshard`: what one costs beside this plan. ``()`` drops
                those of this plan.

        Raises:
            MemoryLimitError: no sharding fits.
            PlanError: the plan was loaded and is not bound to a step.
            ConflictError: the wish contradicts itself, or what the step says.
            MeshError: the wish does not fit the mesh.
        """
        wish: dict[str, Any] = {"fixed": fixed, "memory": memory, "mesh": mesh, "topology": topology}
        wish |= {"time_limit": time_limit, "tactics": tactics}
        return self._asked().what_if(self, wish)

    def _asked(self) -> PlanQuestions:
        if self.planner is None:
            raise PlanError(
                "a plan that was loaded from a file, or moved to another mesh, knows no step to plan again.\n"
                "Give it to autoshard(step, mesh=..., plan=...) and ask `.plan(...)` of that."
            )
        return self.planner

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON, to be committed or loaded again.

        Raises:
            OSError: it cannot be written; what was there still is.
        """
        write_whole(path, self.dumps())

    def dumps(self) -> str:
        """The plan as JSON: what `save` writes."""
        return to_text(to_json(self, self.comparison.found))

    @classmethod
    @shows_users_lines
    def load(cls, path: str | Path, mesh: Mesh | AbstractMesh) -> Plan:
        """Reads a plan for `mesh`, whose axes are used as Auto axes.

        Containers that JSON knows nothing of (nnx modules, TrainState) come back as dicts with the same keys. Given to
        `autoshard(plan=...)`, the plan's trees are the step's own again.

        Raises:
            PlanError: the file is no plan, is damaged, or is one for another mesh.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError, TypeError) as error:  # it is no text, or the path is none
            raise PlanError(_unreadable(str(path), error)) from error
        return cls.loads(text, mesh, where=str(path))

    @classmethod
    @shows_users_lines
    def loads(cls, text: str, mesh: Mesh | AbstractMesh, where: str = "the text") -> Plan:
        """The plan that `dumps` wrote; see `load`.

        Args:
            where: what messages call the text.
        """
        try:
            content = from_text(text)
            kind = next((one for one in Plan.__subclasses__() if one.reads(content)), Plan)
            return kind.of_content(content, mesh, printable(str(where)))
        except (ValueError, RecursionError) as error:
            raise PlanError(_unreadable(where, error)) from error

    @classmethod
    def reads(cls, content: Any) -> bool:
        """Whether what a file says is a plan of this kind; the kinds that have stages tell."""
        return cls is Plan

    @classmethod
    def of_content(cls, content: Any, mesh: Mesh | AbstractMesh, where: str) -> Plan:
        """The plan that a file says.

        Raises:
            ValueError: it is not what `dumps` writes; the message says where.
        """
        found = from_json(content, mesh, where=where)
        return cls.of(found.plan, Comparison(found=found.alternatives))

    def assert_same(self, path: str | Path) -> None:
        """Checks this plan against a golden one: a file that `save` wrote, and that is committed beside the code.

        The same are mesh, arguments, results, how they and inner values lie, and the collectives. Predicted seconds and
        peaks may differ, since they change with what autoshard knows of machines.

        Raises:
            PlanError: the plans differ; the message has a line for each difference. Or the file is no plan.
        """
        try:
            text = Path(path).read_text()
        except FileNotFoundError:
            raise PlanError(
                f"there is no golden plan {path}.\nplan.save({str(path)!r}) writes it; commit it."
            ) from None
        except (OSError, UnicodeDecodeError, TypeError) as error:
            raise PlanError(_unreadable(str(path), error)) from error
        changes = changes_of(Plan.loads(text, _mesh_in(text, str(path)), where=str(path)), self)
        if changes:
            listed = text_of_changes(changes, "in the file", "now")
            raise PlanError(
                f"{self.name} is planned otherwise than {path} has it:\n{listed}\n"
                f"If that is meant, write the file anew: plan.save({str(path)!r})."
            )

    @shows_users_lines
    def to_code(self, style: Literal["specs", "explicit", "flax", "maxtext"] = "specs") -> str:
        """The plan as text that needs autoshard no more.

        Python styles define ``in_shardings(mesh)`` and ``out_shardings(mesh)``, the trees that `jax.jit` takes, and
        ``constrained(step, mesh)``, which is the step with the layouts of its inner values.

        Args:
            style: ``"specs"``: shardings as PartitionSpecs. ``"explicit"``: the same on Explicit axes, and
                ``explicit(step, mesh)``, which takes and returns arrays that have them as types. ``"flax"``: names of
                dims, and rules for them (``rules()``). ``"maxtext"``: names and rules as YAML.

        Raises:
            ArgumentError: there is no such style, or autoshard rewrote the step to keep state on hosts.
        """
        if self.state_on_hosts and (moved := [one.name for one in self.arguments if one.on_host]):
            raise ArgumentError(
                f"the plan of {self.name} keeps state in the memory of hosts between steps, first {moved[0]}, and "
                "cannot be written as code: only the step that autoshard rewrote takes this state from hosts.\n"
                "Run the step with autoshard, or plan it without hosts: "
                "topology=dataclasses.replace(topology, host_bandwidth=None)."
            )
        program = None if self.lowering is None else self.lowering.program
        if style == "maxtext":
            return maxtext_rules(self, program)
        if style not in ("specs", "explicit", "flax"):
            raise ArgumentError(f"style={style!r}; 'specs', 'explicit', 'flax' or 'maxtext' is needed")
        return shardings_code(self, program, style)

    def on(self, mesh: Mesh | AbstractMesh) -> Self:
        """This plan on another mesh of the same axes: made for an AbstractMesh, say, and used on devices.

        Raises:
            PlanError: the mesh has other axes.
        """
        return replace(super().on(mesh), lowering=None, planner=None)

    @shows_users_lines
    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """The state that `init_fn` makes, born as the plan has it: no device ever holds more than its shards.

        Of a plan with stages, each array is born on the devices of the stage that keeps it.

        >>> model_state = plan.init(model.init, jax.random.key(0), tokens)  # doctest: +SKIP

        Which of the plan's arguments the result is for follows from its keys, shapes and dtypes. It may be one
        argument, a part of one (``params`` of a train state), or a tuple of such. What is no array, as an activation
        function in an equinox module, stays as it is.

        Args:
            init_fn: a function that makes arrays, as `model.init` or `optimizer.init`. It is traced, as by `jax.jit`.
            *args: what `init_fn` takes. Arrays are traced; all else is passed on as it is.

        Returns:
            What `init_fn` returns, its arrays on the mesh.

        Raises:
            ArgumentError: no part of the arguments holds the same arrays, or several do that lie in different ways.
            MeshError: the plan's mesh has no devices.
        """
        return init(self, init_fn, args)

    def shard_batch(self, batch: Any) -> Any:
        """Global arrays, as the plan has its arguments, from those that this process has loaded.

        Of a dim that is split over processes, each passes the rows that its devices hold. With one process that is the
        whole array. An array of the whole shape is taken as what every process has.

        Args:
            batch: an argument of the step or a part of one, or a tuple of arguments: NumPy arrays or jax Arrays. Which
                one follows from keys, shapes and dtypes.

        Raises:
            ArgumentError: no argument of the plan is like this batch.
            MeshError: the plan's mesh has no devices.
        """
        return shard_batch(self, batch)

    @shows_users_lines
    def verify(self, target: str | None = None) -> Verification:
        """Compiles the step and puts what XLA really does beside what is predicted: collectives and peak memory.

        Args:
            target: a machine by name, ``"v5e:4x4"`` or ``"h100:2x8"``, to compile for. It need not be there: see
                `autoshard.mesh.targets`. None: the devices of the mesh; on a mesh without devices, the machine that the
                plan was made for, where ``topology=`` named it.

        Raises:
            PlanError: the plan was loaded and is not bound to a step.
            MeshError: the mesh has no devices to compile for, or the target or its compiler cannot be had.
        """
        if self.lowering is None:
            raise PlanError(
                "a plan that was loaded from a file knows no step to compile.\n"
                "Give it to autoshard(step, mesh=..., plan=...) and verify `.plan(...)` of that."
            )
        mesh = self._mesh_to_compile_for(target)
        # Anew: XLA says what it gathers whole while it compiles, and JAX would not compile what it has compiled.
        found = compiled(replace(self.lowering)(mesh), mesh)
        predicted = without_dropped(self.predicted, found, (*self.arguments, *self.captured))
        return verification(predicted, found.named(self.lowering.program))

    def _mesh_to_compile_for(self, target: str | None) -> Mesh:
        """The devices of a target; without one those of the mesh, or of the machine that the plan was made for.

        Raises:
            MeshError: there are none, or the target or its compiler cannot be had.
        """
        if target is None and isinstance(self.mesh, Mesh):
            return self.mesh
        planned_for = self.machine if self.machine is not None and is_machine(self.machine) else None
        if (machine := target or planned_for) is None:
            raise MeshError(
                f"{self.mesh} has no devices to compile for.\n"
                "Name a machine, as in verify(target='v5e:4x4'), or plan on a mesh of devices."
            )
        return target_mesh(machine, dict(self.mesh.shape))

    def __str__(self) -> str:
        return text_of(self._sections())

    def _sections(self) -> list[Section]:
        first, *others = plan_sections(self, self.comparison.known)
        return [first, *self._wishes(), *others, *self._notes()]

    def _notes(self) -> list[Section]:
        """What to know before seconds on this mesh are measured."""
        devices = self.mesh.devices.flat if isinstance(self.mesh, Mesh) else ()
        sharing = Counter(device.process_index for device in devices if device.platform == "cpu")
        count = max(sharing.values(), default=0)
        note = (
            f"Note: {count} CPU devices share the cores of one machine, so a step on them is hardly faster than on "
            "one. Seconds that are measured there say nothing of accelerators."
        )
        return [Section(lines=((note,),))] if count > 1 else []

    def _wishes(self) -> list[Section]:
        sections = [Section(lines=((self.remark,),))] if self.remark else []
        if self.wish is not None:
            sections.append(wish_section(self.wish.text, self.predicted, self.wish.before))
        return sections

    def __repr__(self) -> str:
        return repr_text(self)

    def show(self, path: str | Path | None = None) -> Path:
        """Writes the report as one HTML file, which needs no network, and returns where it is.

        It shows what the printed report says, memory over the step, and the arguments as a tree that folds. As the
        printed report it searches for nothing: after `compare()` it has the alternatives, too.

        Args:
            path: where to write it; by default a new file in the folder for temporary ones.
        """
        text = page(f"{self.name}: plan", self._html())
        if path is None:
            with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".html", delete=False) as file:
                file.write(text)
            return Path(file.name)
        write_whole(path, text)
        return Path(path)

    def plot(self) -> Figure:
        """A figure of matplotlib: memory over the step by what holds it, and the step beside its alternatives.

        Raises:
            MissingPackageError: matplotlib is not installed.
        """
        figure: Figure = plan_figure(self, self.comparison.known)
        return figure

    def _repr_html_(self) -> str:
        return self._html()

    def _html(self) -> Html:
        return plan_html(self, self.comparison.known, self._wishes(), self._notes())


def mesh_of_file(path: str | Path) -> AbstractMesh:
    """The mesh that the plan in a file was made for.

    Raises:
        PlanError: the file is no plan.
    """
    try:
        return _mesh_in(Path(path).read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(_unreadable(str(path), error)) from error


def _mesh_in(text: str, where: str) -> AbstractMesh:
    """The mesh that a plan in a file was made for."""
    try:
        shape = from_text(text)["mesh"]
        return AbstractMesh(tuple(shape.values()), tuple(shape))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise PlanError(_unreadable(where, error)) from error


def _unreadable(where: str, error: Exception) -> str:
    reason = printable(str(error) or type(error).__name__)
    return (
        f"{printable(where)} is not a plan that this version of autoshard can read: {reason}.\n"
        "Take the file from where it was committed, or save the plan anew."
    )
