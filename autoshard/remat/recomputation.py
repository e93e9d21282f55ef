"""The jaxpr of a step in, out the levels of recomputation that it can run with, and the jaxpr of each.

A level keeps, in every block of the step, what is cheapest at one price of memory. So each next level keeps fewer bytes
and computes more seconds again, and no choice of the same bytes over all blocks computes less (Lagrange multipliers).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.jaxprs import ClosedJaxpr, aval_of
from autoshard.mesh.topology import Topology
from autoshard.remat.costs import seconds_again
from autoshard.remat.cuts import Cut, cuts
from autoshard.remat.scope import SIZES, Block, Scope
from autoshard.report.units import bytes_text

LEAST_STEP = 0.02  # of the bytes between the first and the last level: two levels are at least so far apart
_NAMED = 6  # kept values that a remark names
PASSES = 2  # over memory that a kept value takes: it is written, and read; what is computed again in less is not kept


@dataclass(frozen=True)
class Level:
    """What is kept and what is computed again in all blocks of a step."""

    cuts: tuple[Cut, ...]  # one per block
    size: int  # of the blocks outside of loops, as `Scope.blocks` has it
    bytes: float  # kept, of whole arrays
    seconds: float  # computed again per step, on one device


@dataclass(frozen=True, eq=False)
class Recomputation:
    """What of a step can be computed again instead of kept."""

    scope: Scope
    topology: Topology

    @classmethod
    def of(cls, closed: ClosedJaxpr, topology: Topology) -> Recomputation:
        """That of a step whose backward pass is in its jaxpr."""
        return cls(Scope(closed, functools.partial(seconds_again, topology=topology)), topology)

    @cached_property
    def blocks(self) -> Mapping[int, Sequence[tuple[Block, int]]]:
        """Size of the blocks outside of loops -> all blocks, and how often they run per step."""
        return {size: list(self.scope.blocks(size)) for size in SIZES}

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The one that keeps the most first; none if nothing is kept for a backward pass.

        What takes less time to compute again than to write and to read is never kept.
        """
        found = [level for size in SIZES for level in self.levels_of(size)]
        best, ordered = list[Level](), sorted(found, key=lambda level: (level.seconds, level.bytes))
        for level in ordered:
            if not best or level.bytes < best[-1].bytes:
                best.append(level)
        return _apart(best)

    def levels_of(self, size: int) -> list[Level]:
        """The levels for blocks of one size."""
        blocks = self.blocks[size]
        chains = [cuts(block.forward_pass) for block, _ in blocks]
        if not chains:
            return []
        price = PASSES / self.topology.memory_bandwidth
        steps = [  # seconds per byte saved, the block, the cut that it goes on to
            (turns * (after.seconds - before.seconds) / (before.bytes - after.bytes), b, i)
            for b, (chain, (_, turns)) in enumerate(zip(chains, blocks, strict=True))
            for i, (before, after) in enumerate(itertools.pairwise(chain), start=1)
        ]
        at = [0] * len(chains)
        found = [self.level(size, chains, at)]
        for slope, several in itertools.groupby(sorted(steps), key=lambda step: step[0]):
            for _, b, i in several:
                at[b] = i
            if slope <= price:
                found.clear()
            found.append(self.level(size, chains, at))
        return found

    def level(self, size: int, chains: Sequence[Sequence[Cut]], at: Sequence[int]) -> Level:
        chosen = tuple(chain[i] for chain, i in zip(chains, at, strict=True))
        turns = (count for _, count in self.blocks[size])
        seconds = math.fsum(count * cut.seconds for count, cut in zip(turns, chosen, strict=True))
        return Level(chosen, size, math.fsum(cut.bytes for cut in chosen), seconds)

    def cut_of(self, level: Level) -> dict[Block, Cut]:
        """Block -> what of it is kept."""
        return {block: cut for (block, _), cut in zip(self.blocks[level.size], level.cuts, strict=True)}

    def held_bytes(self, level: Level) -> float:
        """Bytes of whole arrays that some point of the step holds of what is kept."""
        return self.scope.held_bytes({block: cut.bytes for block, cut in self.cut_of(level).items()})

    def remark(self, level: Level) -> str:
        """What a level does, in words."""
        values = defaultdict[str, float](float)
        for block, cut in self.cut_of(level).items():
            for var in block.kept(cut):
                if (size := block.bytes_kept(var)) > 0:
                    values[f"{block.line_of(var)} {aval_of(var).str_short(short_dtypes=True)}"] += size
        largest = sorted(values.items(), key=lambda one: -one[1])[:_NAMED]
        named = ", ".join(f"{name} ({bytes_text(size)})" for name, size in largest)
        more = f" and {len(values) - _NAMED} more" if len(values) > _NAMED else ""
        whole = sum(block.bytes_read for block in self.cut_of(level))
        return (
            f"remat='auto': the backward pass reads {bytes_text(whole)} of the forward pass. "
            f"{bytes_text(level.bytes)} of these are kept: {named or 'nothing'}{more}. The rest is computed again, "
            f"which is {level.seconds:.3g} s of work for one device."
        )

    def rewritten(self, level: Level) -> ClosedJaxpr:
        """The step, with what this level keeps."""
        return self.scope.rewritten(self.cut_of(level))


def _apart(levels: Sequence[Level]) -> tuple[Level, ...]:
    """The levels less those that differ too little from others to be worth a search of their own."""
    if not levels:
        return ()
    first, last = levels[0], levels[-1]
    least = LEAST_STEP * (first.bytes - last.bytes)
    found = [first]
    for level in levels[1:-1]:
        if found[-1].bytes - level.bytes >= least and level.bytes - last.bytes >= least:
            found.append(level)
    return (*found, last) if len(levels) > 1 else (first,)
