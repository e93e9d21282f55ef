"""`Plan`, which users hold: what a plan says, bound to the step that it is for and to what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from html import escape
from pathlib import Path
from typing import Any, Literal, Self

from jax.sharding import AbstractMesh, Mesh

from autoshard.compiled.verification import Verification, compiled, verification, without_dropped
from autoshard.errors import ArgumentError, MeshError, PlanError
from autoshard.export.shardings_code import shardings_code
from autoshard.files import write_whole
from autoshard.lower import Lowering
from autoshard.mesh.targets import target_mesh
from autoshard.plans.arrays import init, shard_batch
from autoshard.plans.difference import changes_of, text_of_changes
from autoshard.plans.files import from_json, from_text, to_json, to_text
from autoshard.plans.plan import PlanData
from autoshard.plans.prediction import Prediction
from autoshard.program.paths import printable
from autoshard.report.plan_sections import plan_sections
from autoshard.report.text import text_of

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


@dataclass(frozen=True, eq=False)
class Plan(PlanData):
    """How a step is sharded over a mesh, what that is predicted to cost, and how good it is proven to be."""

    comparison: Comparison = field(repr=False, default_factory=Comparison)
    lowering: Lowering | None = field(repr=False, default=None)  # called, lowers the step; None: loaded, not yet bound

    @classmethod
    def of(cls, plan: PlanData, comparison: Comparison | None = None) -> Plan:
        """What `plan` says, and what it is compared with."""
        said = {one.name: getattr(plan, one.name) for one in fields(PlanData)}
        return cls(**said, comparison=comparison or Comparison())

    @property
    def alternatives(self) -> Mapping[str, Prediction | None]:
        """What a step costs in data parallel, FSDP and tensor parallel form; None for what `absent` names.

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
    def load(cls, path: str | Path, mesh: Mesh | AbstractMesh) -> Plan:
        """Reads a plan for `mesh`, whose axes are used as Auto axes.

        Containers that JSON knows nothing of (nnx modules, TrainState) come back as dicts with the same keys. Given to
        `autoshard(plan=...)`, the plan's trees are the step's own again.

        Raises:
            PlanError: the file is no plan, is damaged, or is one for another mesh.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # ValueError: it is no text, or the path is none
            raise PlanError(_unreadable(str(path), error)) from error
        return cls.loads(text, mesh, where=str(path))

    @classmethod
    def loads(cls, text: str, mesh: Mesh | AbstractMesh, where: str = "the text") -> Plan:
        """The plan that `dumps` wrote; see `load`.

        Args:
            where: what messages call the text.
        """
        try:
            content = from_json(from_text(text), mesh, where=printable(where))
        except (ValueError, RecursionError) as error:
            raise PlanError(_unreadable(where, error)) from error
        return cls.of(content.plan, Comparison(found=content.alternatives))

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
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(_unreadable(str(path), error)) from error
        changes = changes_of(Plan.loads(text, _mesh_in(text, str(path)), where=str(path)), self)
        if changes:
            listed = text_of_changes(changes, "in the file", "now")
            raise PlanError(
                f"{self.name} is planned otherwise than {path} has it:\n{listed}\n"
                f"If that is meant, write the file anew: plan.save({str(path)!r})."
            )

    def to_code(self, style: Literal["specs", "explicit"] = "specs") -> str:
        """The plan as source code that runs without autoshard.

        Args:
            style: ``"specs"``: Python that defines ``in_shardings(mesh)`` and ``out_shardings(mesh)``, the trees that
                `jax.jit` takes, and ``constrained(step, mesh)``, the step with the layouts of its inner values.
                ``"explicit"``: the same on Explicit axes, and ``explicit(step, mesh)``, which takes and returns arrays
                that have these shardings as types.

        Raises:
            ArgumentError: there is no such style.
        """
        if style not in ("specs", "explicit"):
            raise ArgumentError(f"style={style!r}; 'specs' or 'explicit' is needed")
        program = None if self.lowering is None else self.lowering.program
        return shardings_code(self, program, explicit=style == "explicit")

    def on(self, mesh: Mesh | AbstractMesh) -> Self:
        """This plan on another mesh of the same axes: made for an AbstractMesh, say, and used on devices.

        Raises:
            PlanError: the mesh has other axes.
        """
        return replace(super().on(mesh), lowering=None)

    def init(self, init_fn: Callable[..., Any], *args: Any) -> Any:
        """The state that `init_fn` makes, born as the plan has it: no device ever holds more than its shards.

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

    def verify(self, target: str | None = None) -> Verification:
        """Compiles the step and puts what XLA really does beside what is predicted: collectives and peak memory.

        Args:
            target: a machine by name, ``"v5e:4x4"`` or ``"h100:2x8"``, to compile for instead of the devices of the
                mesh. It need not be there: see `autoshard.mesh.targets`.

        Raises:
            PlanError: the plan was loaded and is not bound to a step.
            MeshError: the mesh has no devices to compile for, or the target or its compiler cannot be had.
        """
        if self.lowering is None:
            raise PlanError(
                "a plan that was loaded from a file knows no step to compile.\n"
                "Give it to autoshard(step, mesh=..., plan=...) and verify `.plan(...)` of that."
            )
        mesh = self.mesh if target is None else target_mesh(target, dict(self.mesh.shape))
        if not isinstance(mesh, Mesh):
            raise MeshError(
                f"{self.mesh} has no devices to compile for.\n"
                "Name a machine, as in verify(target='v5e:4x4'), or plan on a mesh of devices."
            )
        # Anew: XLA says what it gathers whole while it compiles, and JAX would not compile what it has compiled.
        found = compiled(replace(self.lowering)(mesh), mesh)
        predicted = without_dropped(self.predicted, found, (*self.arguments, *self.captured))
        return verification(predicted, found.named(self.lowering.program), mesh)

    def __str__(self) -> str:
        return text_of(plan_sections(self, self.comparison.known))

    def _repr_html_(self) -> str:
        return f"<pre>{escape(str(self))}</pre>"


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
