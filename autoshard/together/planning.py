"""`plan_together`: functions and weights in, a plan per function out, in which shared arguments lie alike.

What a layout of the shared arguments costs is known once each program is planned under it. Layouts to try come from two
sides: those that each program wants for itself, and those of the joint problem. So the result is no worse than the best
of the programs' own layouts imposed on the others.

The joint problem charges a program its compute and its communication less what runs behind compute. A program takes as
long as it communicates, however (`plans/limited_overlap.py`). So rounds follow in which programs that would hide too
much are charged a mixture of both, as there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from autoshard.arrays.shared_arguments import shared_arguments
from autoshard.decorated import ShardedFunction
from autoshard.errors import ArgumentError, ConflictError, MemoryLimitError, SolverError
from autoshard.errors.kinds import checks_kinds
from autoshard.layout import Layout
from autoshard.model.formulation import Formulation
from autoshard.model.search_policy import solve_for_plan
from autoshard.options import Options, check_jit_keywords, compile_keywords, options_of
from autoshard.planning import checked_rules, formulated, lowered, planned
from autoshard.processes import ProcessGroup
from autoshard.program import Program
from autoshard.program.user_code import shows_users_lines
from autoshard.replanning.planner import Replanner
from autoshard.report.units import seconds_text
from autoshard.solver.exact.two_costs import TwoCosts
from autoshard.solver.problem import Problem, Solution
from autoshard.solver.verify import verify
from autoshard.specs import fitting
from autoshard.together.joint_problem import JointProblem, Shared, homes_of, joint_problem
from autoshard.user_plan import Plan

_JOINT_ROUNDS = 4  # of solving the joint problem, each with other mixtures
_SMALL_TOTAL_GAP = 1e-6  # relative: a total that is so close to its bound is left alone
_JOINT_LIMIT_SHARES = (
    1.0,
    0.9,
    0.8,
    0.7,
)  # shares of the limit for the joint problem, which does not count what reshardings hold
_OPTIONS = (
    "memory",
    "topology",
    "fixed",
    "time_limit",
    "cache",
    "refine",
    "ignore_constraints",
    "trips",
    "microbatches",
    "search",
    "tactics",
)

Homes = tuple[tuple[int, Layout], ...]  # (shared argument, its layout), one program's


@shows_users_lines
@checks_kinds("weights")
def plan_together(
    functions: Mapping[str, tuple[Any, ...]],
    *,
    mesh: Mesh | AbstractMesh,
    weights: Mapping[str, float] | None = None,
    **options: Any,
) -> dict[str, Plan]:
    """Plans several functions under one layout of the arguments that they share, as prefill and decode.

    Shared is what has the same keys, shapes and dtypes in two functions: `params` of one is `state.params` of another.
    What is minimised is the sum of weight times seconds over the functions. The memory limit holds for each by itself.

    >>> plans = plan_together(
    ...     {"prefill": (prefill, (params, prompts)), "decode": (decode, (params, cache, tokens))},
    ...     mesh=mesh, weights={"decode": 500},
    ... )  # doctest: +SKIP
    >>> decode = autoshard(decode, mesh=mesh, plan=plans["decode"])  # doctest: +SKIP

    Args:
        functions: name -> the function and a tuple of its arguments, arrays or ShapeDtypeStructs; as a third entry a
            dict of keywords of `jax.jit`: ``(decode, (params, cache, tokens), {"donate_argnums": 1})``.
        mesh: the devices, as for `autoshard`.
        weights: name -> how often the function runs; 1 by default.
        **options: those of `autoshard`, for all functions. `time_limit` is that of each search; there are several, all
            by `search`.

    Returns:
        A plan per function. Each says how long all take together, and how long they take at least.

    Raises:
        ArgumentError: a function shares nothing with the others, or an option is of the wrong kind.
        ConflictError: shardings that are fixed contradict each other.
        MemoryLimitError: under no layout that was found do all functions fit.
    """
    _check(functions, weights or {}, options)
    programs = [_JointStep.of(name, entry, mesh, options) for name, entry in functions.items()]
    _check_patterns(programs, options.get("fixed") or {})
    counts = [float((weights or {}).get(step.name, 1.0)) for step in programs]
    shared = _shared(programs)
    group = ProcessGroup.of(programs[0].options.mesh)
    search = _LayoutSearch(programs, counts, shared, group)
    with contextlib.nullcontext() if group is None else group.joined(runs=False):
        best = search.best()
    remark = _remark(programs, counts, best.total, search.bound)
    return {
        step.name: step.bound(replace(plan, warnings=(*plan.warnings, remark)))
        for step, plan in zip(programs, best.plans, strict=True)
    }


@dataclass(frozen=True, eq=False)
class _JointStep:
    """One function, traced."""

    name: str
    program: Program
    options: Options
    jit_keywords: Mapping[str, Any]  # that count when it is compiled

    @classmethod
    def of(cls, name: str, entry: tuple[Any, ...], mesh: Any, given: Mapping[str, Any]) -> _JointStep:
        fn, args, *more = entry
        keywords = {key: value for key, value in given.items() if key not in _OPTIONS} | dict(*more)
        check_jit_keywords(keywords)
        options = options_of(mesh, **{key: value for key, value in given.items() if key in _OPTIONS})
        program = ShardedFunction(fn, options=options, jit_keywords=keywords).program_to_plan(*args)
        options = replace(options, fixed=fitting(program, options.fixed))
        return cls(name, program, options, compile_keywords(keywords))

    def formulated(self) -> Formulation:
        return formulated(self.program, checked_rules(self.program, dict(self.options.mesh.shape)), self.options)

    def planned(self, homes: Homes, group: ProcessGroup | None) -> Plan:
        return planned(self.program, replace(self.options, pinned=dict(homes)), self.jit_keywords, {}, group)

    def bound(self, plan: Plan) -> Plan:
        """The plan, which can be lowered, and asked again."""
        planner = Replanner.of(self.program, self.options, self.jit_keywords, is_given=False)
        return planner.bound(lowered(self.program, plan, self.jit_keywords))


@dataclass(frozen=True, eq=False)
class _Candidate:
    """The plans of all functions under one layout of what they share."""

    plans: Sequence[Plan]
    total: float  # seconds times weights


@dataclass(eq=False)
class _LayoutSearch:
    """The search for the best layout of shared arguments."""

    steps: Sequence[_JointStep]
    weights: Sequence[float]
    shared: Sequence[Shared]
    group: ProcessGroup | None = None  # the processes that share the mesh: the first one's searches are those of all
    bound: float = 0.0
    solved_before: int = 0  # joint problems
    known: dict[tuple[int, Homes], Plan] = field(default_factory=dict)
    refused: list[MemoryLimitError] = field(default_factory=list)

    def best(self) -> _Candidate:
        own = self.alone()
        self.bound = sum(weight * plan.bound for weight, plan in zip(self.weights, own, strict=True))
        candidates = []
        for i in sorted(range(len(own)), key=lambda i: -self.weights[i] * own[i].cost):
            layouts = {a: own[i].arguments[a].layout for a in range(len(own[i].arguments))}
            candidates += self.under({k: layouts[a] for k, a in self.places(i).items()}, (i, own[i]))
            if candidates and self.is_close(min(one.total for one in candidates)):
                return min(candidates, key=lambda one: one.total)
        candidates += self.joint(lambda: min((one.total for one in candidates), default=math.inf))
        if not candidates:
            raise self.refused[-1]
        return min(candidates, key=lambda one: one.total)

    def alone(self) -> list[Plan]:
        """The plan that each function has for itself.

        Raises:
            MemoryLimitError: some function does not fit even so; of several, the one that needs the most is named.
        """
        plans, refused = [], dict[str, MemoryLimitError]()
        for i, step in enumerate(self.steps):
            try:
                plans.append(self.plan(i, ()))
            except MemoryLimitError as error:
                refused[step.name] = error
        if refused:
            name, worst = max(refused.items(), key=lambda one: one[1].needed)
            raise MemoryLimitError(f"{name}: {worst}", budget=worst.budget, needed=worst.needed) from worst
        return plans

    def is_close(self, total: float) -> bool:
        return total <= self.bound * (1 + _SMALL_TOTAL_GAP)

    def places(self, program: int) -> dict[int, int]:
        """Index in `shared` -> the program's argument."""
        return {k: a for k, places in enumerate(self.shared) for p, a in places if p == program}

    def plan(self, program: int, homes: Homes) -> Plan:
        if (program, homes) not in self.known:
            self.known[program, homes] = self.steps[program].planned(homes, self.group)
        return self.known[program, homes]

    def under(self, layouts: Mapping[int, Layout], own: tuple[int, Plan] | None = None) -> list[_Candidate]:
        """The plans with shared arguments laid so; none if some function does not fit then.

        Args:
            layouts: index in `shared` -> layout.
            own: a program that is laid so by its own plan.
        """
        plans = []
        try:
            for i in range(len(self.steps)):
                homes = tuple((a, layouts[k]) for k, a in self.places(i).items() if k in layouts)
                plans.append(own[1] if own is not None and own[0] == i else self.plan(i, homes))
        except MemoryLimitError as error:
            self.refused.append(error)
            return []
        except (ConflictError, SolverError):  # what one function fixes, another may not take
            return []
        rest = {k for k in range(len(self.shared)) if k not in layouts}
        if rest:  # shared by others alone, so far open
            later = {k: plans[p].arguments[a].layout for k in sorted(rest) for p, a in self.shared[k][:1]}
            return self.under({**layouts, **later}, own)
        return [_Candidate(plans, sum(w * plan.cost for w, plan in zip(self.weights, plans, strict=True)))]

    def joint(self, least: Callable[[], float]) -> list[_Candidate]:
        """Candidates from the joint problem.

        Args:
            least: the total of the best candidate so far.
        """
        formulations = [step.formulated() for step in self.steps]
        usable = formulations[0].prices.backend.usable
        limit = self.steps[0].options.memory * usable
        found: list[_Candidate] = []
        for tighter in _JOINT_LIMIT_SHARES:
            shares = _CostShares(formulations)
            for _ in range(_JOINT_ROUNDS):
                joint = joint_problem(formulations, shares.problems(), self.weights, self.shared, limit * tighter)
                solution = self.solved(joint)
                if solution is None:
                    break
                if tighter == 1.0:
                    self.bound = max(self.bound, solution.bound)
                choices = joint.choices(solution.choice)
                homes = [homes_of(one, choice) for one, choice in zip(formulations, choices, strict=True)]
                found += self.under({k: homes[p][a] for k, places in enumerate(self.shared) for p, a in places[:1]})
                if self.is_close(min([least(), *(one.total for one in found)])) or not shares.changed(choices):
                    break
            if found or least() < math.inf:
                return found
        return found

    def solved(self, joint: JointProblem) -> Solution | None:
        """The solution of the joint problem; None if none is found."""
        if self.group is None:
            return self.solved_here(joint)
        self.solved_before += 1
        of = [(step.name, step.program.fingerprint, step.options.memory) for step in self.steps]
        identity = repr(
            (of, self.weights, self.shared, self.solved_before, sorted(self.steps[0].options.fixed.items()))
        )
        key = f"joint/{hashlib.sha256(identity.encode()).hexdigest()[:16]}"

        def text() -> str:
            found = self.solved_here(joint)
            return json.dumps(found and [list(found.choice), found.cost, found.bound, found.status])

        found = json.loads(self.group.leader_says(key, text))
        return None if found is None else Solution(tuple(found[0]), *found[1:])

    def solved_here(self, joint: JointProblem) -> Solution | None:
        with contextlib.suppress(SolverError):
            options = self.steps[0].options
            return solve_for_plan(joint.problem, time_limit=options.time_limit, search=options.search)
        return None


class _CostShares:
    """Of each program, how much its problem counts beside its communication alone."""

    def __init__(self, formulations: Sequence[Formulation]):
        self.formulations = formulations
        self.shares = [1.0] * len(formulations)
        # Costs of choices that hide too much, and that do not: as in `limited_overlap`.
        self.behind: list[tuple[float, float] | None] = [None] * len(formulations)
        self.beside: list[tuple[float, float] | None] = [None] * len(formulations)

    def problems(self) -> list[Problem]:
        pairs = zip(self.formulations, self.shares, strict=True)
        return [
            one.problem if share == 1.0 else TwoCosts(one.problem, one.waits(math.inf)).mixed(share)
            for one, share in pairs
        ]

    def changed(self, choices: Sequence[Sequence[int]]) -> bool:
        """Sets the shares by what was chosen under the last ones; whether any is another then."""
        before = list(self.shares)
        for i, (one, choice) in enumerate(zip(self.formulations, choices, strict=True)):
            costs = verify(one.problem, choice)[0], verify(one.waits(math.inf), choice)[0]
            whole, communication = costs
            if whole < communication:
                self.behind[i] = costs
            else:
                self.beside[i] = costs
            behind, beside = self.behind[i], self.beside[i]
            if behind is not None:
                less, more = (0.0, 1.0) if beside is None else (behind[1] - beside[1], beside[0] - behind[0])
                self.shares[i] = less / (less + more) if less + more > 0 else self.shares[i]
        return self.shares != before


def _shared(steps: Sequence[_JointStep]) -> Sequence[Shared]:
    """Every argument that several programs take: (program, argument) of each, in the order of the programs.

    Raises:
        ArgumentError: a function shares nothing with those before it.
    """
    found: list[list[tuple[int, int]]] = []
    place: dict[tuple[int, int], int] = {}  # -> index in `found`
    for i, step in enumerate(steps):
        shares_some = False
        for j in range(i):
            for mine, theirs in shared_arguments(step.program, steps[j].program).items():
                shares_some = True
                if (j, theirs) not in place:
                    place[j, theirs] = len(found)
                    found.append([(j, theirs)])
                if (i, mine) in place or any(program == i for program, _ in found[place[j, theirs]]):
                    continue
                place[i, mine] = place[j, theirs]
                found[place[j, theirs]].append((i, mine))
        if i and not shares_some:
            others = ", ".join(repr(one.name) for one in steps[:i])
            raise ArgumentError(
                f"plan_together: {step.name!r} shares no argument with {others}.\n"
                "Shared is what has the same keys, shapes and dtypes; plan it by itself if nothing is."
            )
    return found


def _check(functions: Any, weights: Any, options: Mapping[str, Any]) -> None:
    if not isinstance(functions, Mapping) or not functions:
        raise ArgumentError(f"functions={functions!r}; a dict from names to (function, arguments) is needed")
    for name, entry in functions.items():
        is_call = isinstance(entry, tuple) and len(entry) in (2, 3) and isinstance(entry[1], tuple)
        if not is_call or not all(isinstance(keywords, Mapping) for keywords in entry[2:]):
            raise ArgumentError(
                f"functions[{name!r}] = {entry!r}; the function and a tuple of its arguments are needed, as in "
                "(decode, (params, tokens)), and after these a dict of keywords of jax.jit, if there are any"
            )
    for name, weight in weights.items():
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if name not in functions or not is_number or not 0 <= weight < math.inf:
            known = ", ".join(map(repr, functions))
            raise ArgumentError(f"weights[{name!r}] = {weight!r}; a number, 0 or more, for one of {known} is needed")
    for name in ("like", "plan"):
        if options.get(name) is not None:
            raise ArgumentError(f"plan_together takes no {name}=; fixed= says how arguments must lie")
    if options.get("remat") is not None:
        raise ArgumentError(
            "plan_together takes no remat=: it lays out steps as they are written.\nMark what is to be computed again "
            "with jax.checkpoint, or plan that step with remat='auto', and the others with like= its plan."
        )


def _check_patterns(steps: Sequence[_JointStep], fixed: Mapping[str, Any]) -> None:
    unused = [pattern for pattern in fixed if not any(pattern in step.options.fixed for step in steps)]
    if unused:
        raise ConflictError(
            f"fixed: no argument of {', '.join(step.name for step in steps)} fits {unused[0]!r}; write paths as plans "
            "show them"
        )


def _remark(steps: Sequence[_JointStep], weights: Sequence[float], total: float, bound: float) -> str:
    named = ", ".join(f"{step.name} (weight {weight:g})" for step, weight in zip(steps, weights, strict=True))
    return (
        f"planned together: shared arguments lie alike in {named}. The weighted sum of their steps is "
        f"{seconds_text(total)}; it is at least {seconds_text(bound)}, however they lie."
    )
