"""A plan in, what XLA really does beside what was predicted out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jax.sharding import Mesh

from autoshard.errors import MeshError, PlanError
from autoshard.layout import MeshShape, shards
from autoshard.mesh.collectives import Collective, has_reduce_scatter
from autoshard.plans import Plan
from autoshard.report.hlo import peak_bytes, read_collectives
from autoshard.report.text import bytes_text, table_text

_TOLERANCE = 0.20  # share by which the peak may be off

Traffic = Mapping[tuple[str, tuple[str, ...]], int]  # (kind, axes) -> bytes per step on one device


@dataclass(frozen=True)
class Verification:
    """Predicted beside compiled, for one device and one step."""

    predicted: Traffic  # as this backend shows it
    actual: Traffic
    predicted_peak: int  # bytes
    actual_peak: int  # bytes; arguments + outputs - aliased + temporaries

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
        return self.collectives_agree and self.memory_agrees

    def __str__(self) -> str:
        rows = []
        for kind, axes in sorted(self.predicted.keys() | self.actual.keys()):
            foreseen, found = (side.get((kind, axes), 0) for side in (self.predicted, self.actual))
            verdict = "" if foreseen == found else "differs"
            rows.append((kind, ", ".join(axes), bytes_text(foreseen), bytes_text(found), verdict))
        verdict = "" if self.memory_agrees else "differs"
        rows.append(("peak memory", "", bytes_text(self.predicted_peak), bytes_text(self.actual_peak), verdict))
        return table_text(("Per step and device", "over axes", " predicted", " compiled", ""), rows)


def verify(plan: Plan) -> Verification:
    """Compiles a plan for the devices of its mesh, and reads what came out.

    Raises:
        PlanError: the plan was loaded and is not bound to a step.
        MeshError: the mesh has no devices to compile for.
    """
    if plan.lowering is None:
        raise PlanError(
            "a plan that was loaded from a file knows no step to compile.\n"
            "Give it to autoshard(step, mesh=..., plan=...) and verify `.plan(...)` of that."
        )
    if not isinstance(plan.mesh, Mesh):
        raise MeshError(f"{plan.mesh} has no devices to compile for; plan on a mesh of devices to verify")
    compiled = plan.lowering().compile()
    mesh = dict(plan.mesh.shape)
    predicted = plan.predicted.collectives
    shown = predicted if has_reduce_scatter(plan.mesh) else as_cpu_shows(predicted, mesh)
    return Verification(
        predicted=traffic(shown),
        actual=traffic(read_collectives(compiled.as_text(), mesh)),
        predicted_peak=plan.predicted.peak_bytes,
        actual_peak=peak_bytes(compiled),
    )


def traffic(collectives: Iterable[Collective]) -> Traffic:
    """Bytes by kind and axes."""
    found: dict[tuple[str, tuple[str, ...]], int] = {}
    for one in collectives:
        found[one.kind, one.axes] = found.get((one.kind, one.axes), 0) + one.bytes
    return found


def as_cpu_shows(collectives: Iterable[Collective], mesh: MeshShape) -> list[Collective]:
    """XLA has no reduce_scatter on CPU: it runs an all_reduce of the whole, and a slice."""
    def shown(one: Collective) -> Collective:
        return replace(one, kind="all_reduce", bytes=one.bytes * shards(one.axes, mesh))

    return [shown(one) if one.kind == "reduce_scatter" else one for one in collectives]
