"""A formulation and its cheapest solution in; of several plans that differ, the one whose compiled program is best out.

Plans are ranked by predictions, which leave things out. What is compared here: the solution itself; the cheapest of
data parallel, FSDP and tensor parallel form, which shares least with it what predictions leave out; what would be the
cheapest if most of what nothing waits for ran behind compute, which predictions know least of; then, cheapest first,
the other two, and for each of the kinds of arguments that hold the most bytes, the cheapest plan that splits those
otherwise. Plans that run the same bytes of each collective and peak at the same bytes are taken for one.

A compiled program has to fit into the memory limit by XLA's own figure. Its seconds are those of its schedule
(`compiled/schedule.py`); on CPU those of the predicted work and of the collectives that it runs, one after the other.

Of the plan that is kept, options of XLA are tried that move operations about (`plans/compiler_options.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import jax

from autoshard.compiled.verification import compiled
from autoshard.errors import SolverError
from autoshard.layout import shards
from autoshard.lower import Lowering
from autoshard.mesh.collectives import total_seconds
from autoshard.model.formulation import Formulation
from autoshard.model.memory_limit import solve_within
from autoshard.model.xla.overlap import Overlap
from autoshard.options import Options
from autoshard.plans.alternatives import solutions_of
from autoshard.plans.chosen_options import prediction_of
from autoshard.plans.compiler_options import TRIED
from autoshard.report.units import seconds_text
from autoshard.solver.problem import Solution
from autoshard.solver.solve import with_bound
from autoshard.solver.verify import fits, verify
from autoshard.user_plan import Plan

# Share of weight gathers and gradient reductions that runs behind compute: more than plans are predicted to hide, less
# than GPU programs of large models hide (docs/benchmarks/plans.md, Summary).
LARGE_HIDDEN_SHARE = dict.fromkeys(("all_gather", "all_reduce", "reduce_scatter"), 0.7)
LEAST_SAVED_SHARE = 0.002  # share of a step that options of the compiler have to save, to be taken


def refined(
    formulation: Formulation,
    best: Solution,
    options: Options,
    formulated: Callable[[Options], Formulation],
    made: Callable[[Solution], Plan],
) -> Plan:
    """The best compiled of `options.refine` plans, or of as many as there are.

    Args:
        formulation: what is solved, with a memory limit.
        best: its cheapest solution.
        options: what is compiled for, and within which limit.
        formulated: makes the formulation of the same program under other options.
        made: makes a plan that can be lowered.
    """
    plans = [made(solution) for solution in different(formulation, best, options, formulated)]
    return with_compiler_options(*fastest_compiled(plans, options), options)


def fastest_compiled(plans: Sequence[Plan], options: Options) -> tuple[Plan, float]:
    """The plan whose compiled program takes the fewest seconds, and these; the first, and inf, if none fits.

    Args:
        plans: ones that can be lowered, of one program or of several variants; first the one predicted to be fastest.
    """
    seconds = [compiled_seconds(plan, options) for plan in plans]
    kept = min(range(len(plans)), key=seconds.__getitem__)
    if math.isinf(seconds[kept]):
        remark = f"none of the {len(plans)} plans that were compiled fits, as XLA has it."
        return _with_remark(plans[0], remark), math.inf
    if kept == 0:
        return plans[0], seconds[0]
    first = "does not fit" if math.isinf(seconds[0]) else f"takes {seconds_text(seconds[0])}"
    remark = (
        f"of {len(plans)} plans that were compiled, the one predicted to be the fastest {first} by XLA's account, "
        f"this one {seconds_text(seconds[kept])}."
    )
    return _with_remark(plans[kept], remark), seconds[kept]


def with_compiler_options(plan: Plan, seconds: float, options: Options) -> Plan:
    """The plan with those options of XLA with which its compiled program takes the fewest seconds.

    Options are tried one group after the other, on top of those that were taken before; those of a group that is
    taken save at least a share of `SAVED`.

    Args:
        plan: one that can be lowered.
        seconds: of a step without such options, by the account of its compiled program; inf if it does not fit.
    """
    if math.isinf(seconds):
        return plan
    mesh, before = options.compiled_for, seconds
    assert mesh is not None and plan.lowering is not None, "`options_of` and `finish` see to it"
    of_user = plan.lowering.jit_keywords.get("compiler_options") or {}
    for group in TRIED.get(mesh.devices.flat[0].platform, ()):
        if not of_user.keys().isdisjoint(group):
            continue
        tried = _compiled_with(plan, {**plan.compiler_options, **group})
        try:
            found = compiled_seconds(tried, options)
        except jax.errors.JaxRuntimeError as error:
            if "option" not in str(error):
                raise
            continue  # another release of the compiler does not know it
        if found < seconds * (1 - LEAST_SAVED_SHARE):
            plan, seconds = tried, found
    if seconds == before:
        return plan
    settings = ", ".join(f"{name}={value}" for name, value in plan.compiler_options.items())
    return _with_remark(
        plan, f"with {settings} XLA's program takes {seconds_text(seconds)}, not {seconds_text(before)}."
    )


def _compiled_with(plan: Plan, compiler_options: Mapping[str, bool | int]) -> Plan:
    made = replace(plan, compiler_options=compiler_options)
    assert plan.lowering is not None, "who asks has one"
    return replace(made, lowering=Lowering(plan.lowering.program, made, plan.lowering.jit_keywords))


def compiled_seconds(plan: Plan, options: Options) -> float:
    """Seconds of a step by the account of its compiled program; inf if it does not fit."""
    mesh = options.compiled_for
    assert mesh is not None and plan.lowering is not None, "`options_of` and `finish` see to it"
    try:
        found = compiled(plan.lowering(mesh), mesh, options.topology)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return math.inf
    if not fits(found.peak_bytes, options.memory):
        return math.inf
    if found.schedule:
        return found.schedule.step_seconds
    return plan.predicted.compute_seconds + total_seconds(found.collectives, dict(mesh.shape), options.topology)


def different(
    formulation: Formulation, best: Solution, options: Options, formulated: Callable[[Options], Formulation]
) -> list[Solution]:
    """Up to `options.refine` solutions that differ in what they run or hold, in the order in which they are tried."""
    assert formulation.problem.limit is not None, "it is solved with one"
    limit = formulation.problem.limit * options.backend.usable

    def by_cost(solutions: Iterable[Solution]) -> list[Solution]:
        fitting = (solution for solution in solutions if fits(formulation.accepted_peak(solution.choice), limit))
        return sorted(fitting, key=lambda solution: solution.cost)

    textbook = by_cost(filter(None, solutions_of(formulation).values()))
    overlaps = options.refine > 2 and formulation.least is None  # options of another part are numbered otherwise
    overlapping = by_cost(_overlapping(formulation, options, formulated)) if overlaps else []
    others = by_cost([*textbook[1:], *_otherwise(formulation, best, options)])
    found = {_figures(formulation, best): best}
    for solution in [*textbook[:1], *overlapping, *others]:
        found.setdefault(_figures(formulation, solution), with_bound(solution, best.bound))
    return list(found.values())[: options.refine]


def _overlapping(
    formulation: Formulation, options: Options, formulated: Callable[[Options], Formulation]
) -> Iterator[Solution]:
    """The cheapest solution if much runs behind compute, at the cost that it is predicted to have."""
    hiding = formulated(replace(options, backend=replace(options.backend, overlap=Overlap(LARGE_HIDDEN_SHARE))))
    with contextlib.suppress(SolverError):
        choice = solve_within(hiding, options.time_limit).choice
        cost, _ = verify(formulation.problem, choice)
        if math.isfinite(cost):
            yield Solution(choice, cost, bound=0.0, status="feasible")


def _figures(formulation: Formulation, solution: Solution) -> tuple:
    predicted = prediction_of(formulation, solution.choice)
    moved: Counter[str] = Counter()
    for one in predicted.collectives:
        moved[one.kind] += one.bytes
    return frozenset(moved.items()), predicted.peak_bytes


def _otherwise(formulation: Formulation, best: Solution, options: Options) -> Iterator[Solution]:
    """The cheapest solutions in which arguments alike, those that hold the most first, lie in other pieces.

    They take turns, and in none of these solutions they lie as in any before.
    """
    alike = defaultdict(list)
    for i, value in enumerate(formulation.program.arguments):
        alike[value.shape, value.dtype, formulation.arguments[i][best.choice[i]]].append(i)
    turns = deque(sorted(alike.values(), key=lambda args: -sum(formulation.program.arguments[i].bytes for i in args)))

    def pieces(argument: int, option: int) -> tuple[int, ...]:
        home = formulation.arguments[argument][option].home
        return tuple(shards(axes, formulation.mesh) for axes in home)

    found = [best]
    for _ in range(options.refine):
        if not turns:
            return
        arguments = turns.popleft()
        before = {pieces(i, solution.choice[i]) for i in arguments for solution in found}
        allowed = {
            i: [o for o in range(len(formulation.arguments[i])) if pieces(i, o) not in before] for i in arguments
        }
        if not all(allowed.values()):
            continue
        restricted = replace(formulation, problem=formulation.problem.restrict(allowed))
        with contextlib.suppress(SolverError):
            found.append(solve_within(restricted, options.time_limit))
            turns.append(arguments)
            yield found[-1]


def _with_remark(plan: Plan, remark: str) -> Plan:
    return replace(plan, warnings=(*plan.warnings, f"refine: {remark}"))
