"""What is said of arrays in the host's memory in, an error where they would have to be resharded there out."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from autoshard.errors import ConflictError
from autoshard.layout import Layout, spec_of
from autoshard.model.groups import Group
from autoshard.model.pricing.prices import PricedStrategies
from autoshard.model.resharding_memory import ValueReader
from autoshard.program import Value


def check_host_memory(
    arguments: Iterable[tuple[Value, Sequence[Layout], str]],
    groups: Iterable[tuple[Group, PricedStrategies]],
    readers: Mapping[int, Sequence[ValueReader]],
) -> None:
    """
    Args:
        arguments: each with the layouts that it may have, and the words of what is fixed.
        groups: each with its strategies.
        readers: value -> what reads it.

    Raises:
        ConflictError: an array in the host's memory, where nothing is resharded, is said to lie in two ways.
    """
    made: list[tuple[Value, Sequence[Layout], list[str]]] = [
        (one.value, priced.output_layouts[i], _constraints_on_group(group, priced.output_layouts[i]))
        for group, priced in groups
        for i, one in enumerate(group.outputs)
    ]
    made += [(value, layouts, [fixed] if fixed else []) for value, layouts, fixed in arguments]
    for value, layouts, constraints in made:
        reading = readers[value.id] if value.on_host else ()
        if not set(layouts).intersection(*(reader.wants for reader in reading)):
            constraints += itertools.chain(*(_constraints_on_group(reader.group, reader.wants) for reader in reading))
            raise ConflictError(
                f"{value} lies in the host's memory, where nothing is resharded, but {', and '.join(constraints)}.\n"
                "Say one of them only, or move it to the device's memory in between (jax.device_put)."
            )


def _constraints_on_group(group: Group | None, layouts: Sequence[Layout]) -> list[str]:
    """Where the user says how what a group reads or makes lies, and how; nothing where the user does not."""
    if group is None or not group.given:
        return []
    equation = group.equations[-1]
    return [f"{equation.primitive} at {equation.source or 'unknown line'} wants {spec_of(layouts[0])}"]
