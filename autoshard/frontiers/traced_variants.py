"""A function and its options in, the fastest of its variants within any memory limit out, each formulated once.

Without `remat="auto"` there is one variant, or one per way to add up microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from autoshard.frontiers.traced_step import FrontierStep
from autoshard.options import Options
from autoshard.program import Program
from autoshard.solver.problem import Solution
from autoshard.user_plan import Plan
from autoshard.variants.choosing import Wishes, fastest
from autoshard.variants.variant import StepVariants, Variant


@dataclass(frozen=True, eq=False)
class SolvedStep:
    """A variant of a step with its plan under a limit, whose bound holds for all variants."""

    step: FrontierStep
    solution: Solution
    plan: Plan


@dataclass(frozen=True, eq=False)
class FrontierVariants:
    """A step, traced, of whose variants the fastest is found under memory limits."""

    as_written: FrontierStep
    variants: StepVariants
    formulated: dict[int, FrontierStep] = field(default_factory=dict)  # id of a program -> the same, with its problem

    @classmethod
    def of(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mesh: Mesh | AbstractMesh | None,
        topology: Any,
        given: Mapping[str, Any],
    ) -> FrontierVariants:
        """
        Args:
            given: options of `autoshard` and keywords of `jax.jit`, as a user writes them.

        Raises:
            ArgumentError: there is no such option, or one is of the wrong kind.
        """
        return cls(*FrontierStep.with_variants(fn, args, kwargs, mesh, topology, given))

    @property
    def options(self) -> Options:
        return self.as_written.options

    @property
    def usable(self) -> float:
        """The share of a limit that plans are predicted to fill at most."""
        return self.as_written.usable

    def timed(self, until: float, time_limit: float | None = None) -> FrontierVariants:
        """The same within a time.

        Args:
            until: when all planning ends, as `time.monotonic` has it.
            time_limit: seconds for each limit; None: as the options say.
        """
        limit = self.options.time_limit if time_limit is None else time_limit
        options = replace(self.options, time_limit=limit, until=until)
        return replace(self, as_written=replace(self.as_written, options=options))

    @property
    def ample_memory(self) -> float:
        """A limit that no choice passes, in bytes; the user's where there is one."""
        return max(step.ample_memory for step in self.ends)

    def least_memory(self) -> float | None:
        """The smallest limit under which a solution was found, in bytes per device; None: there was no time for one."""
        return self.ends[-1].least_memory()

    @property
    def ends(self) -> list[FrontierStep]:
        """The variants that hold the most and the least: the step as it is written, if nothing else is open."""
        first = Variant(self.options.microbatches or 1)
        levels = self.variants.recomputation(first).levels if self.options.remat else ()
        if not levels:
            return [self.step(self.variants.program(first))]
        moves = Wishes.of(self.options, math.inf).moves_state(self.variants)
        leanest = replace(first, level=len(levels) - 1, state_on_hosts=moves)
        ends = dict.fromkeys((replace(first, level=0), leanest))
        return [self.step(self.variants.program(variant)) for variant in ends]

    def step(self, program: Program) -> FrontierStep:
        """A variant's program, whose problem is formulated once."""
        if id(program) not in self.formulated:
            self.formulated[id(program)] = replace(self.as_written, program=program)
        return self.formulated[id(program)]

    def within(self, memory: float, gap: float = 0.0) -> SolvedStep:
        """The fastest variant under a limit, in bytes per device.

        Args:
            gap: as for `solve_within`.

        Raises:
            MemoryLimitError: none fits; it carries the smallest limit found that would do.
        """
        options = self.options.timed()

        def planned(program: Program, enough: float) -> SolvedStep:
            step = self.step(program)
            solution = step.solution(memory, None if math.isinf(enough) else enough, gap)
            return SolvedStep(step, solution, step.plan(solution, memory, solution.bound))

        return fastest(self.variants, Wishes.of(options, memory * self.usable), planned)
