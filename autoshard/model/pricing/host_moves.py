"""Groups in, out what they move between the memory of devices and that of their hosts."""

from __future__ import annotations

from autoshard.model.groups import Group
from autoshard.model.pricing.sizes import ArraySizes
from autoshard.model.strategies import Strategy


def moved_bytes(group: Group, strategy: Strategy, arrays: ArraySizes) -> int:
    """Bytes that each device sends to its host's memory or receives from there, in one run of a group."""
    first = group.equations[0]
    if first.primitive != "device_put":
        return 0
    makes = {made.value.id: leaf for made, leaf in zip(group.outputs, strategy.output_layouts, strict=True)}
    pairs = zip(first.inputs, first.outputs, strict=True)
    crossing = (made for read, made in pairs if getattr(read, "on_host", False) != made.on_host and made.id in makes)
    return sum(arrays.shard_bytes(made, makes[made.id]) for made in crossing)
