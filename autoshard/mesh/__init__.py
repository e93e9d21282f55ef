"""What the machine costs: links, collectives, reshardings and compute, in seconds."""

from autoshard.mesh.collectives import Collective
from autoshard.mesh.links import Link
from autoshard.mesh.presets import topology
from autoshard.mesh.topology import Topology

__all__ = ["Collective", "Link", "Topology", "topology"]
