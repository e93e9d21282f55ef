"""What the machine costs: links, collectives, reshardings and compute, in seconds."""

from autoshard.mesh.collectives import Collective
from autoshard.mesh.presets import topology
from autoshard.mesh.topology import Link, Topology

__all__ = ["Collective", "Link", "Topology", "topology"]
