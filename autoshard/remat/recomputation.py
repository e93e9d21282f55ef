"""The jaxpr of a step in, out the levels of recomputation that it can run with, and the jaxpr of each.

A level keeps, in every block of the step, what is cheapest at one price of memory. So each next level keeps fewer bytes
and computes more seconds again, and no choice of the same bytes over all blocks computes less (Lagrange multipliers).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.jaxprs import ClosedJaxpr, aval_of, is_array, on_host
from autoshard.mesh.topology import Topology
from autoshard.remat.costs import seconds_again
from autoshard.remat.cuts import Cut, ForwardPass, chain
from autoshard.remat.scope import SIZES, Block, Scope
from autoshard.report.units import bytes_text

LEAST_STEP = 0.04  # of the bytes between the first and the last level: two levels are at least so far apart
EXPOSED_TRANSFER_SHARES = (
    0.1,
    1.0,
)  # shares of transfers to hosts that choices are made by, as they run beside enough compute or not
_NAMED_VALUES = 6  # kept values that a remark names
PASSES = 2  # over memory that a kept value takes: it is written, and read; what is computed again in less is not kept


@dataclass(frozen=True)
class RematLevel:
    """What is kept and what is computed again in all blocks of a step."""

    cuts: tuple[Cut, ...]  # one per block
    size: int  # of the blocks outside of loops, as `Scope.blocks` has it
    bytes: float  # kept on devices, of whole arrays
    seconds: float  # computed again per step, or waiting for hosts, on one device
    held: float  # bytes kept, and those of the most that is made again at one time
    moved: float = 0.0  # bytes kept on hosts


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

    @property
    def levels(self) -> tuple[RematLevel, ...]:
        """Those on devices, and behind them those that keep values on hosts."""
        return (*self.levels_on_devices, *self.levels_on_hosts)

    @cached_property
    def levels_on_devices(self) -> tuple[RematLevel, ...]:
        """The one that holds the most first; none if nothing is kept for a backward pass.

        What takes less time to compute again than to write and to read is never kept.
        """
        if not all(is_array(aval) and not on_host(aval) for aval in self.scope.closed.in_avals):
            return ()  # tokens, references and arrays in the host's memory are no arguments to trace with
        return _apart(_best(level for size in SIZES for level in self.levels_of(size)))

    @cached_property
    def levels_on_hosts(self) -> tuple[RematLevel, ...]:
        """The levels that move values to the hosts' memory and back, the one that holds the most first.

        None where no value can be moved. None holds as much as a level on devices that waits no longer.
        """
        if not self.levels_on_devices or self.topology.host_bandwidth is None:
            return ()
        found = [level for size in SIZES for share in EXPOSED_TRANSFER_SHARES for level in self.levels_of(size, share)]
        ordered = _best([*self.levels_on_devices, *found])
        least = LEAST_STEP * (ordered[0].held - ordered[-1].held)
        apart = list[RematLevel]()  # the leanest first
        for level in reversed(ordered):
            if level.moved and (not apart or level.held - apart[-1].held >= least):
                apart.append(level)
        return tuple(reversed(apart))

    def levels_of(self, size: int, exposed: float | None = None) -> list[RematLevel]:
        """The levels for blocks of one size.

        Args:
            exposed: the share of transfers to hosts and back that something waits for, as it is taken for the choice;
                None: nothing is moved.
        """
        blocks = self.blocks[size]
        chains = [chain(self.movable(block, exposed)) for block, _ in blocks]
        if not chains:
            return []
        price = PASSES / self.topology.memory_bandwidth
        steps = list[tuple[float, int, int]]()  # seconds per byte saved, the cut that a block goes on to, the block
        for b, (cuts, (_, turns)) in enumerate(zip(chains, blocks, strict=True)):
            steps += [(slope, i, b) for i, slope in enumerate(slopes(cuts, turns), start=1)]
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

    def movable(self, block: Block, exposed: float | None) -> ForwardPass:
        """What can be chosen of a block, with what of it can be moved to hosts."""
        if exposed is None:
            return block.forward_pass
        moving = tuple(exposed * seconds for seconds in block.moving(self.topology))
        return replace(block.forward_pass, moving=moving)

    def seconds_of(self, block: Block, cut: Cut) -> float:
        """Seconds of what a block computes again, and of waiting for transfers to hosts and back.

        Transfers run beside compute: those to hosts beside the forward pass, those back beside the backward pass, which
        takes twice as long.
        """
        run = block.forward_pass.seconds
        again = math.fsum(run[e] for e in cut.again)
        one_way = math.fsum(block.moving(self.topology)[v] for v in cut.moved) / 2
        beside = math.fsum(seconds for seconds in run if math.isfinite(seconds))
        return again + max(0.0, one_way - beside) + max(0.0, one_way - 2 * beside - again)

    def level(self, size: int, chains: Sequence[Sequence[Cut]], at: Sequence[int]) -> RematLevel:
        chosen = tuple(cuts[i] for cuts, i in zip(chains, at, strict=True))
        pairs = zip(self.blocks[size], chosen, strict=True)
        seconds = math.fsum(count * self.seconds_of(block, cut) for (block, count), cut in pairs)
        kept = math.fsum(cut.bytes for cut in chosen)
        blocks = [block for block, _ in self.blocks[size]]
        again = max(block.bytes_again(cut) for block, cut in zip(blocks, chosen, strict=True))
        moved = math.fsum(block.moved_bytes(cut) for block, cut in zip(blocks, chosen, strict=True))
        return RematLevel(chosen, size, kept, seconds, kept + again, moved)

    def cut_of(self, level: RematLevel) -> dict[Block, Cut]:
        """Block -> what of it is kept."""
        return {block: cut for (block, _), cut in zip(self.blocks[level.size], level.cuts, strict=True)}

    def held_bytes(self, level: RematLevel) -> float:
        """Bytes of whole arrays that some point of the step holds of what is kept."""
        return self.scope.held_bytes({block: cut.bytes for block, cut in self.cut_of(level).items()})

    def remark(self, level: RematLevel) -> str:
        """What a level does, in words."""
        values = defaultdict[str, float](float)
        for block, cut in self.cut_of(level).items():
            moved = set(block.moved(cut))
            for var in block.kept(cut):
                if var not in moved and (size := block.bytes_of_values[var]) > 0:
                    values[f"{block.line_of(var)} {aval_of(var).str_short(short_dtypes=True)}"] += size
        largest = sorted(values.items(), key=lambda one: -one[1])[:_NAMED_VALUES]
        named = ", ".join(f"{name} ({bytes_text(size)})" for name, size in largest)
        more = f" and {len(values) - _NAMED_VALUES} more" if len(values) > _NAMED_VALUES else ""
        away = f" {bytes_text(level.moved)} are moved to the hosts' memory and back." if level.moved else ""
        whole = sum(block.bytes_read for block in self.cut_of(level))
        return (
            f"remat='auto': the backward pass reads {bytes_text(whole)} of the forward pass. "
            f"{bytes_text(level.bytes)} of these are kept: {named or 'nothing'}{more}.{away} The rest is computed "
            f"again, which is {level.seconds:.3g} s of work for one device."
        )

    def rewritten(self, level: RematLevel) -> ClosedJaxpr:
        """The step, with what this level keeps."""
        return self.scope.rewritten(self.cut_of(level))


def slopes(cuts: Sequence[Cut], turns: int) -> list[float]:
    """Seconds per byte from each choice of a chain to the next, which are no less than those before.

    Args:
        turns: how often the block runs per step.
    """
    pairs = itertools.pairwise(cuts)
    steps = (turns * (after.seconds - before.seconds) / (before.bytes - after.bytes) for before, after in pairs)
    return list(itertools.accumulate(steps, max, initial=0.0))[1:]


def _best(levels: Iterable[RematLevel]) -> list[RematLevel]:
    """The levels than which none takes as few seconds and holds less."""
    best = list[RematLevel]()
    for level in sorted(levels, key=lambda level: (level.seconds, level.held)):
        if not best or level.held < best[-1].held:
            best.append(level)
    return best


def _apart(levels: Sequence[RematLevel]) -> tuple[RematLevel, ...]:
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
