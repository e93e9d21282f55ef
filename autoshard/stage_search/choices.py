"""What the search chooses, and what comes of a choice: stages, schedule, seconds, bytes."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.pipeline import Timeline
from autoshard.stage_search.tables import StageTable


@dataclass(frozen=True, eq=False)
class ChosenStage:
    """Consecutive layers on one sub-mesh: a virtual stage of the pipeline."""

    first: int  # layer
    last: int  # the layer after its last one
    table: StageTable  # whose shape and variant it has
    start: int  # position of its first device in the row

    @property
    def layers(self) -> range:
        """Its layers."""
        return range(self.first, self.last)

    @property
    def devices(self) -> range:
        """Its positions in the row."""
        return range(self.start, self.start + self.table.shape.devices)

    @property
    def key(self) -> tuple[int, int, str, str, int]:
        """What tells it from other choices at the same number of microbatches."""
        return self.first, self.last, self.table.shape.name, self.table.variant, self.start


@dataclass(frozen=True, eq=False)
class PipelineChoice:
    """Virtual stages in the order in which a microbatch goes through them, and the schedule that runs them."""

    schedule: str  # a name of `autoshard.pipeline.SCHEDULES`
    chunks: int
    microbatches: int
    stages: tuple[ChosenStage, ...]

    @property
    def devices(self) -> int:
        """Devices of the schedule: groups of devices that run one task at a time."""
        return len(self.stages) // self.chunks

    @property
    def key(self) -> tuple[object, ...]:
        """What tells it from other choices."""
        return self.schedule, self.chunks, self.microbatches, tuple(stage.key for stage in self.stages)


@dataclass(frozen=True, eq=False)
class SimulatedChoice:
    """A choice and what it takes, by simulation of its schedule."""

    choice: PipelineChoice
    timeline: Timeline
    after_seconds: float  # s, after the last task: the optimizer of the slowest stage
    peak_bytes: tuple[float, ...]  # per device of the schedule: bytes on each device of its sub-mesh
    in_flight: tuple[float, ...]  # per device of the schedule, microbatches of a whole stage at most
    transfer_bytes: tuple[float, ...]  # per cut between virtual stages, both ways, per step

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.timeline.makespan + self.after_seconds

    @property
    def fits(self) -> bool:
        """Whether every stage is within the memory of its sub-mesh."""
        homes = self.timeline.schedule.placement
        return all(
            self.peak_bytes[device] <= stage.table.shape.memory_bytes
            for device, stage in zip(homes, self.choice.stages, strict=True)
        )


@dataclass(frozen=True, eq=False)
class StageSearchResult:
    """The best pipeline found, and how much better another can be at most."""

    best: SimulatedChoice | None  # None: none fits
    bound: float  # s: no choice of the space takes less, by the tables; inf: none fits
    others: tuple[SimulatedChoice, ...]  # the best of each other kind that was simulated, fastest first
    simulated: int  # how many choices were

    @property
    def gap(self) -> float:
        """By which share of its seconds the best could be improved at most."""
        return 0.0 if self.best is None else max(0.0, 1.0 - self.bound / self.best.seconds)
