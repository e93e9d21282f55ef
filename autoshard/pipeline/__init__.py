"""Pipeline schedules as data: made by name, checked, simulated, searched for. Never imports JAX."""

from autoshard.pipeline.catalogue.asynchronous import Staleness, staleness
from autoshard.pipeline.catalogue.table import ASYNCHRONOUS, SCHEDULES, schedule
from autoshard.pipeline.orders import Eviction, Schedule, Task, WeightUpdates
from autoshard.pipeline.scheduling.bound import makespan_bound
from autoshard.pipeline.scheduling.search import SearchResult, search
from autoshard.pipeline.simulation import simulate
from autoshard.pipeline.timeline import Timeline
from autoshard.pipeline.validation import validate

__all__ = [
    "ASYNCHRONOUS",
    "SCHEDULES",
    "Eviction",
    "Schedule",
    "SearchResult",
    "Staleness",
    "Task",
    "Timeline",
    "WeightUpdates",
    "makespan_bound",
    "schedule",
    "search",
    "simulate",
    "staleness",
    "validate",
]
