"""A traced step and what its options leave open in, the variant that it runs in out: chosen once, and chosen again.

A choice is made by what is predicted. Once the program of the chosen variant is compiled, its peak says by how much
predictions of memory are off, and all variants are chosen among again under a limit that is corrected by that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic

from jax.sharding import Mesh

from autoshard.cache import key_of, read_entry, write_entry
from autoshard.compiled.memory_check import confirmed
from autoshard.errors import MemoryLimitError, PlanError, SolverError
from autoshard.lower.on_shards import check_plan
from autoshard.options import Options
from autoshard.planning import PlansByProgram, compiled, lowered, plan_of_text, program_of
from autoshard.processes import ProcessGroup
from autoshard.processes.agreement import Claims, text_of_all
from autoshard.program import Program
from autoshard.propagation import rules_for
from autoshard.refine import fastest_compiled, with_compiler_options
from autoshard.solver.runtime.cutoff import CutoffEnd
from autoshard.user_plan import Plan
from autoshard.variants.choosing import LEAST_GAIN, Planned, Wishes, fastest, fastest_and_close, given_program, proven
from autoshard.variants.variant import StepVariants, Variant

TIGHT_SHARE = 0.9  # of the bytes that a plan may fill: one that fills more may be faster with still more
CLOSE = 0.05  # of predicted seconds: predictions do not tell variants apart that are closer, and `refine` compiles them
EXTRA_ROOM_FACTOR = 1.02  # more bytes than variants were chosen within, or they are not chosen among again


@dataclass(frozen=True, eq=False)
class OpenChoice(Generic[Planned]):
    """The variants of a traced step of which one is to run."""

    variants: StepVariants
    options: Options
    plan: Callable[..., Planned]  # of a program, options, seconds that are known to be enough, and plans made before
    bound: Callable[[Program, Plan], Planned]  # a lowered plan, bound to what it was made of
    before: PlansByProgram  # plans of the step, which those of variants join
    jit_keywords: Mapping[str, Any]  # that count when the step is compiled
    group: ProcessGroup | None  # processes that share the mesh: they plan the same variants, whatever their clocks say

    @property
    def is_single(self) -> bool:
        """Whether nothing is open."""
        return self._wishes().is_single(self.variants)

    def may_be_rewritten(self, variant: Variant) -> bool:
        """Whether a variant may be planned with stacks of matrices, or with trips that devices share out."""
        return self._wishes().may_rewrite(self.variants, variant)

    def planned(self, given: Plan | None) -> Planned:
        """The one variant that is open, or the one that a plan was given for."""
        wishes = self._wishes()
        if given is not None:
            return self.plan(given_program(self.variants, wishes, given), self.options)
        return fastest(self.variants, wishes, lambda program, enough: self.plan(program, self.options, enough))

    def fastest(self) -> Planned:
        """The fastest variant, planned within one time limit for all. `refine` compiles plans of the best ones.

        Raises:
            MemoryLimitError: no variant fits.
            MicrobatchError: the batch cannot be split as the user wants it.
        """
        if (known := self._kept()) is not None:
            return known
        first = replace(self._timed(), refine=1)
        if self.options.refine == 1:
            found = self._chosen(first, self._wishes(), self.before)[0]
        else:
            found = self._refined(self._chosen(first, self._wishes(), {}, close=CLOSE))
        self.keep(found.plan)
        return found

    def _refined(self, variants: Sequence[Planned]) -> Planned:
        """The best compiled of `refine` plans: up to half of them are those of other variants, the rest of the best.

        Of variants that are about as fast those are compiled whose peaks are farthest from that of the best, since they
        keep what others compute again: predictions of these have the least in common.

        Args:
            variants: the one predicted to be fastest, and those close to it.
        """
        options, (best, *others) = self._timed(), (one.plan for one in variants)

        def distance(other: Plan) -> float:
            peaks = other.predicted.peak_bytes, best.predicted.peak_bytes
            return max(peaks) / max(1, min(peaks))

        count = options.refine // 2 if self.group is None else 0  # all of a group would have to compile them
        others = sorted(others, key=distance, reverse=True)[:count]
        plan, seconds = fastest_compiled([best, *others], options) if others else (best, math.inf)
        if (left := options.refine - len(others)) > 1:
            return proven(self.plan(program_of(plan), replace(options, refine=left)), best.bound)
        plan = with_compiler_options(plan, seconds, options)
        return proven(self.bound(program_of(plan), plan), best.bound)

    def within(self, target: float, known: Plan) -> Plan | None:
        """The plan of the fastest variant that is predicted to hold no more than `target` bytes; None if none is found.

        With more room than the known plan fills, it is faster by `LEAST_GAIN`: an equal one is not worth compiling.
        None is sought unless memory has bound the choice.
        """
        allowed = self.options.memory * self.options.backend.usable
        try:
            if target < known.predicted.peak_bytes:
                return self._leaner(target)
            if target < EXTRA_ROOM_FACTOR * allowed or known.predicted.peak_bytes < TIGHT_SHARE * allowed:
                return None
            enough = known.cost * (1 - LEAST_GAIN)
            found = self._within(target, {}, enough)
            return found if found.cost <= enough else None
        except (CutoffEnd, MemoryLimitError, SolverError):
            return None

    def confirmed(self, error: MemoryLimitError) -> MemoryLimitError:
        """The error that nothing fits in the limit that the user set, with a limit in which the step fits as compiled.

        It comes back as it is where no devices are there to compile for, or other processes would have to.
        """
        options = self.options
        is_compiled = options.is_memory_given and self.group is None and isinstance(options.mesh, Mesh)
        if not is_compiled or self.variants.closes_over_tracers:
            return error

        def leanest() -> Plan | None:
            plan = None if error.leanest is None else error.leanest()
            return None if plan is None else lowered(program_of(plan), plan, self.jit_keywords)

        return confirmed(error, leanest, compiled, options.untried)

    def _leaner(self, target: float) -> Plan:
        """The fastest that holds no more than the target, or else the leanest."""
        before = {what: one for what, one in self.before.items() if one[1].predicted.peak_bytes <= target}
        try:
            return self._within(target, before)
        except MemoryLimitError as error:
            return self._within(error.needed * self.options.backend.usable, before)

    def _within(self, target: float, before: PlansByProgram, enough: float = math.inf) -> Plan:
        limited = replace(self._timed(), memory=target / self.options.backend.usable, refine=1, cache=None)
        made = self._chosen(limited, replace(self._wishes(), memory=target), before, enough)[0]
        return replace(made.plan, memory=self.options.memory)

    def _chosen(
        self, options: Options, wishes: Wishes, before: PlansByProgram, enough: float = math.inf, close: float = 0.0
    ) -> list[Planned]:
        is_rewritten = wishes.may_rewrite(self.variants, Variant(wishes.microbatches or 1))

        def plan(program: Program, best: float) -> Planned:
            made = self.plan(program, options.of_several() if is_rewritten else options, best, before)
            peak = made.plan.predicted.peak_bytes
            if options.memory != self.options.memory and peak > wishes.memory * (1 + 1e-6):  # of what is to stay free
                needed = peak / options.backend.usable
                raise MemoryLimitError("it fills more than it may", budget=options.memory, needed=needed)
            return made

        return fastest_and_close(self.variants, wishes, plan, enough, close)

    # What is kept of a choice, in a folder and for other processes.

    def keep(self, plan: Plan) -> None:
        """Keeps a variant's plan in the folder of plans, if there is one."""
        if self.options.cache is None or (self.group is not None and not self.group.leads):
            return
        variant = self.variants.variant_of(program_of(plan))
        write_entry(self.options.cache, self._key(), lambda: f"{json.dumps(asdict(variant))}\n{plan.dumps()}")

    def _kept(self) -> Planned | None:
        """The variant that was chosen before, with its plan; on all processes that of the leader."""
        folder = self.options.cache
        if folder is None and self.group is None:
            return None

        def text() -> str:
            return "" if folder is None else read_entry(folder, self._key(), self._checked_text) or ""

        if self.group is None:
            kept = text()
        else:
            program = self.variants.program(Variant())
            claims = Claims.of(program, rules_for(program), self.options, self.jit_keywords)
            kept = text_of_all(self.group, claims, "variant", text)
        return self._loaded(kept) if kept else None

    def _checked_text(self, text: str, where: str) -> str:
        """A text that was kept, once it has been read: in a folder that several share, one may have written anything.

        Raises:
            Exception: it is not what `keep` wrote.
        """
        self._loaded(text)
        return text

    def _loaded(self, text: str) -> Planned:
        head, _, plan = text.partition("\n")
        variant = Variant(**json.loads(head))
        if variant.level is not None and not variant.level < len(self.variants.recomputation(variant).levels):
            raise PlanError("it is for a level of recomputation that there is not")
        program = self.variants.program(variant)
        made = plan_of_text(plan, program, rules_for(program), self.options)
        check_plan(program, made.annotations, dict(self.options.mesh.shape))
        return self.bound(program, lowered(program, made, self.jit_keywords))

    def _key(self) -> str:
        """Equal in any process if the same choice would be made."""
        program, options = self.variants.program(Variant()), self.options
        parts = key_of(program, rules_for(program), options), "variants", options.microbatches, options.remat
        return hashlib.sha256(repr(parts).encode()).hexdigest()

    def _timed(self) -> Options:
        return self.options if self.group is not None else self.options.timed()

    def _wishes(self) -> Wishes:
        return Wishes.of(self._timed(), self.options.memory * self.options.backend.usable)
