"""A function and its options in, plans of it under memory limits out; the function is traced and formulated once."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from autoshard.api import autoshard
from autoshard.decorated import ShardedFunction
from autoshard.errors import ArgumentError, MemoryLimitError, SolverError
from autoshard.model.formulation import Formulation
from autoshard.model.pricing.formulation_deadline import formulating_ends
from autoshard.options import Options, check_jit_keywords, compile_keywords, options_of
from autoshard.planning import checked_rules, comparison_of, described, formulated, lowered, solved
from autoshard.program import Program
from autoshard.replanning.planner import Replanner
from autoshard.solver.problem import Solution
from autoshard.solver.solve import with_bound
from autoshard.user_plan import Plan
from autoshard.variants.variant import StepVariants, Variant

_OPTIONS = (
    "memory",
    "fixed",
    "time_limit",
    "ignore_constraints",
    "trips",
    "microbatches",
    "remat",
    "tactics",
    "search",
)


@dataclass(frozen=True, eq=False)
class FrontierStep:
    """A step, traced, of which plans are made under memory limits."""

    program: Program
    options: Options
    jit_keywords: Mapping[str, Any]  # that count when it is compiled

    @classmethod
    def of(cls, *how: Any) -> FrontierStep:
        """The step as it is written; see `with_variants`."""
        return cls.with_variants(*how)[0]

    @classmethod
    def with_variants(
        cls,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mesh: Mesh | AbstractMesh | None,
        topology: Any,
        given: Mapping[str, Any],
    ) -> tuple[FrontierStep, StepVariants]:
        """The step as it is written, and all of its variants.

        Args:
            given: options of `autoshard` and keywords of `jax.jit`, as a user writes them.

        Raises:
            ArgumentError: there is no such option, or one is of the wrong kind.
        """
        keywords = {name: value for name, value in given.items() if name not in _OPTIONS}
        if others := [name for name in keywords if name in inspect.signature(autoshard).parameters]:
            raise ArgumentError(
                f"{', '.join(others)} cannot be among the options here; of those of autoshard these can: "
                f"{', '.join(_OPTIONS)}.\nautoshard.plan takes the others, for one plan."
            )
        check_jit_keywords(keywords)
        if given.get("microbatches") == "auto":
            raise ArgumentError(
                "microbatches='auto' is for one plan; here several are made, which are compared for the same number of "
                "microbatches.\nGive the number."
            )
        known = {name: value for name, value in given.items() if name in _OPTIONS}
        options = options_of(mesh, topology=topology, **known)
        variants = ShardedFunction(fn, options=options, jit_keywords=keywords).variants(*args, **kwargs)
        program = variants.program(Variant(options.microbatches or 1))
        return cls(program, options, compile_keywords(keywords)), variants

    @cached_property
    def formulation(self) -> Formulation:
        """The problem, whatever its limit."""
        options = self.options
        rules = checked_rules(self.program, dict(options.mesh.shape))
        return formulated(self.program, rules, options, until=formulating_ends(options.ends))

    @property
    def usable(self) -> float:
        """The share of a limit that plans are predicted to fill at most."""
        return self.options.backend.usable

    @property
    def ample_memory(self) -> float:
        """A limit that no choice passes, in bytes; the user's where there is one."""
        if self.options.is_memory_given:
            return self.options.memory
        lives = self.formulation.problem.lives
        most = sum(float(live.usage.max()) for live in lives)
        return max(1.0, 2 * most) / self.usable  # reshardings hold no more than what they reshard

    def solution(self, memory: float, enough: float | None = None, gap: float = 0.0) -> Solution:
        """The cheapest solution found under a limit, in bytes per device.

        Args:
            enough: seconds per step: a solution that is proven to take more is not sought further.
            gap: as for `solve_within`.

        Raises:
            CutoffEnd: there is no solution that takes no more than is enough.
            MemoryLimitError: there is none; it carries the smallest limit found that would do.
        """
        limited = replace(self.formulation, problem=replace(self.formulation.problem, limit=memory, checked=True))
        stops = None if enough is None else lambda: enough
        options = replace(self.options, memory=memory, enough=stops)
        return solved(self.program, limited, options, options.search_ends, gap)

    def least_memory(self) -> float | None:
        """The smallest limit under which a solution was found, in bytes per device; None: there was no time for one."""
        try:
            self.solution(0.0)
        except MemoryLimitError as error:
            return None if math.isinf(error.needed) else float(error.needed)
        except SolverError:
            return None
        return 0.0

    def plan(self, solution: Solution, memory: float, bound: float) -> Plan:
        """What a solution says.

        Args:
            memory: the limit under which it was sought.
            bound: proven of every plan under this limit, in seconds.
        """
        options = replace(self.options, memory=memory, is_memory_given=True)
        rules = checked_rules(self.program, dict(options.mesh.shape))
        limited = replace(self.formulation, problem=replace(self.formulation.problem, limit=memory, checked=True))
        made = described(limited, with_bound(solution, bound), options)
        compared = Plan.of(replace(made, memory=memory), comparison_of(self.program, rules, options))
        planner = Replanner.of(self.program, options, self.jit_keywords, is_given=False)
        return planner.bound(lowered(self.program, compared, self.jit_keywords))
