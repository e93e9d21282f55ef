"""How fast a step can be within how much memory, on how few devices, for how large a batch."""

from autoshard.frontiers.batches import largest_batch
from autoshard.frontiers.devices import fewest_devices
from autoshard.frontiers.plans import Frontier
from autoshard.frontiers.search import frontier

__all__ = ["Frontier", "fewest_devices", "frontier", "largest_batch"]
