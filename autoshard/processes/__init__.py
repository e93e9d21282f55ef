"""Processes that share a mesh: what they tell each other, and the one plan that all of them run."""

from autoshard.processes.group import PATIENCE, ProcessGroup

__all__ = ["PATIENCE", "ProcessGroup"]
