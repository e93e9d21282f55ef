"""The search of pipeline stages: cuts, sub-meshes, microbatches and schedule at once, on arrays. Never imports JAX."""

from autoshard.stage_search.choices import ChosenStage, PipelineChoice, SimulatedChoice, StageSearchResult
from autoshard.stage_search.machine import Channel, DeviceRow, SubMesh
from autoshard.stage_search.search import SearchMemory, SearchSettings, search_stages
from autoshard.stage_search.simulating import simulated
from autoshard.stage_search.tables import LayerCosts, MicrobatchCosts, StageSpace, StageTable

__all__ = [
    "Channel",
    "ChosenStage",
    "DeviceRow",
    "LayerCosts",
    "MicrobatchCosts",
    "PipelineChoice",
    "SearchMemory",
    "SearchSettings",
    "SimulatedChoice",
    "StageSearchResult",
    "StageSpace",
    "StageTable",
    "SubMesh",
    "search_stages",
    "simulated",
]
