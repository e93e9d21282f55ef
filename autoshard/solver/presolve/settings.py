"""The numbers of the reductions. The NumPy version and the compiled one share them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PresolveSettings:
    """Which reductions are worth a try. Entries are of tables [option, option]."""

    largest_fill: int = 1024  # entries of a table that elimination may make where there was none, if it saves none
    # Entries to look at for one edge: dominance is not tried beyond. Compiled code looks at one 16 times as fast.
    largest_comparison: int = 1 << 18
    largest_compiled_comparison: int = 1 << 22
    glances: int = 4  # columns of each table that are looked at first: most pairs of options are not ordered there
    # Compiled code.
    steps: int = 20_000  # between two checks of the time
    spare: int = 4  # times the entries of a problem: the room that it gets
    least_spare: int = 100_000  # entries: room on top of that


PRESOLVE = PresolveSettings()
