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

from autoshard.jaxprs import ClosedJaxpr, aval_of, is_array, on_host
from autoshard.mesh.topology import Topology
from autoshard.remat.costs import seconds_again
from autoshard.remat.cuts import Cut, chain
from autoshard.remat.scope import SIZES, Block, Scope
from autoshard.report.units import bytes_text

LEAST_STEP = 0.04  # of the bytes between the first and the last level: two levels are at least so far apart
_NAMED = 6  # kept values that a remark names
PASSES = 2  # over memory that a kept value takes: it is written, and read; what is computed again in less is not kept


@dataclass(frozen=True)
class Level:
    """What is kept and what is computed again in all blocks of a step."""

    cuts: tuple[Cut, ...]  # one per block
    size: int  # of the blocks outside of loops, as `Scope.blocks` has it
    bytes: float  # kept, of whole arrays
    seconds: float  # computed again per step, on one device
    held: float  # bytes kept, and those of the most that is made again at one time


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
    def why_none(self) -> str:
        """Why there are no levels, in words; empty if there are."""
        avals = self.scope.closed.in_avals
        special = next((aval for aval in avals if not is_array(aval) or on_host(aval)), None)
        if special is not None:
            return (
                f"remat='auto' changes nothing: an argument of the step is {special}. A step runs as it is written "
                "unless all of its arguments are arrays in the memory of devices."
            )
        if not self.levels:
            return (
                "remat='auto' changes nothing: no backward pass was found in the step that reads what its forward pass "
                "makes. A step that has one computes its gradients inside (jax.grad)."
            )
        return ""

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The one that holds the most first; none if nothing is kept for a backward pass.

        What takes less time to compute again than to write and to read is never kept.
        """
        if not all(is_array(aval) and not on_host(aval) for aval in self.scope.closed.in_avals):
            return ()  # tokens, references and arrays in the host's memory are no arguments to trace with
        found = [level for size in SIZES for level in self.levels_of(size)]
        best, ordered = list[Level](), sorted(found, key=lambda level: (level.seconds, level.held))
        for level in ordered:
            if not best or level.held < best[-1].held:
                best.append(level)
        return _apart(best)

    def levels_of(self, size: int) -> list[Level]:
        """The levels for blocks of one size."""
        blocks = self.blocks[size]
        chains = [chain(block.forward_pass) for block, _ in blocks]
        if not chains:
            return []
        price = PASSES / self.topology.memory_bandwidth
        steps = list[tuple[float, int, int]]()  # seconds per byte saved, the cut that a block goes on to, the block
        for b, (cuts, (_, turns)) in enumerate(zip(chains, blocks, strict=True)):
            slope = 0.0
            for i, (before, after) in enumerate(itertools.pairwise(cuts), start=1):
                slope = max(slope, turns * (after.seconds - before.seconds) / (before.bytes - after.bytes))
                steps.append((slope, i, b))
        at = [0] * len(chains)
        found = [self.level(size, chains, at)]
        # Blocks that look alike go on together.
        for (slope, i), several in itertools.groupby(sorted(steps), key=lambda step: step[:2]):
            for _, _, b in several:
                at[b] = i
            if slope <= price:
                found.clear()
            found.append(self.level(size, chains, at))
        return found

    def level(self, size: int, chains: Sequence[Sequence[Cut]], at: Sequence[int]) -> Level:
        chosen = tuple(cuts[i] for cuts, i in zip(chains, at, strict=True))
        turns = (count for _, count in self.blocks[size])
        seconds = math.fsum(count * cut.seconds for count, cut in zip(turns, chosen, strict=True))
        kept = math.fsum(cut.bytes for cut in chosen)
        blocks = (block for block, _ in self.blocks[size])
        again = max(block.bytes_again(cut) for block, cut in zip(blocks, chosen, strict=True))
        return Level(chosen, size, kept, seconds, kept + again)

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
                if (size := block.bytes_of_values[var]) > 0:
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
    least = LEAST_STEP * (first.held - last.held)
    found = [first]
    for level in levels[1:-1]:
        if found[-1].held - level.held >= least and level.held - last.held >= least:
            found.append(level)
    return (*found, last) if len(levels) > 1 else (first,)
