"""Rows that go to the devices which have their group's matrices: dropless experts over devices."""

from autoshard.ops.dispatching.operation import routed_operation
from autoshard.ops.dispatching.row_function import RowFunction, RowRole

__all__ = ["RowFunction", "RowRole", "routed_operation"]
