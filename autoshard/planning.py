"""A traced program and the options of `autoshard` in, its plan out: the stages, one after the other."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.sharding import Mesh

from autoshard.arrays.shared_arguments import shared_layouts
from autoshard.cache import key_of, load_plan, store_plan
from autoshard.compiled.memory_check import MemoryWarning, fitting_plan, is_over, over_limit_error, with_rounding
from autoshard.errors import ConflictError, MemoryLimitError, PlanError, SolverError, warn
from autoshard.layout import Layout, MeshShape, layout_of, spec_of, without_axes
from autoshard.lower import Lowering
from autoshard.lower.on_shards import check_plan
from autoshard.model.formulating import formulator
from autoshard.model.formulation import Formulation
from autoshard.model.memory_limit import solve_within
from autoshard.model.option_sets.partial_problems import formulated_near_best_choice, in_time, is_too_large
from autoshard.model.pricing.formulation_deadline import formulating_ends
from autoshard.model.xla.backends import Backend
from autoshard.operations.primitive import OPERATION
from autoshard.options import Options
from autoshard.padding.batches import uneven_batch
from autoshard.plans.alternatives import alternatives_of, no_dearer_than_data_parallel
from autoshard.plans.chosen_options import prediction_of
from autoshard.plans.limited_overlap import at_limited_overlap, with_limited_overlap
from autoshard.plans.make_plan import make_plan
from autoshard.plans.plan import PlanData
from autoshard.plans.prediction import Prediction
from autoshard.processes import ProcessGroup
from autoshard.processes.agreement import Claims, check_alike, peak_of_all, plan_of_all
from autoshard.program import Program
from autoshard.propagation import Rule, rules_for
from autoshard.refine import refined
from autoshard.report.memory_error import memory_error
from autoshard.report.step_remarks import remarks_of
from autoshard.report.uneven_machine import uneven_remarks
from autoshard.report.units import bytes_text
from autoshard.solver.problem import InfeasibleError, Problem, Solution
from autoshard.solver.progress import Progress
from autoshard.solver.run import begin_loading_compiled
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.runtime.cutoff import Cutoff, CutoffEnd
from autoshard.solver.searches.search_run import Search
from autoshard.solver.solve import with_bound
from autoshard.specs import check_agrees, check_annotations, fixed_layouts, wished_layouts
from autoshard.user_plan import Comparison, Plan

LARGE_PROGRAM = 10_000  # equations, from which on compiled code is likely to search: it is loaded meanwhile
OVERLAP_SHARE = 0.4  # of the work in a time limit: what limiting the overlap may take, after the search


def bound_plan(given: Plan, program: Program, options: Options) -> Plan:
    """The plan that the user gave, bound to this program. Shardings in `fixed=` have to agree with it."""
    made = replace(given.bound_to(program), compiled_peak=None)
    check_plan(program, made.annotations, dict(options.mesh.shape))
    shardings = (*made.flat_in_shardings, *made.captured_shardings)
    for i, layout in fixed_layouts(program, options.fixed, dict(options.mesh.shape)).items():
        value = program.arguments[i]
        check_agrees(value, layout, layout_of(shardings[i].spec, len(value.shape)))
    return made


def checked(
    program: Program,
    plan: Plan,
    options: Options,
    jit_keywords: Mapping[str, Any],
    before: PlansByProgram | None,
    group: ProcessGroup | None,
    others: Callable[[float], Plan | None] | None = None,
) -> Plan:
    """A lowered plan whose compiled program is within the memory limit, if such a plan is found.

    Calls run the program that is compiled here. Processes that share the mesh first compare their steps and plans.

    Args:
        before: the plans so far, to which this one is added; None if the plan is the user's and must not be replaced.
        others: finds the best plan of all variants within a number of predicted bytes; None if there is one variant.

    Raises:
        MemoryLimitError: by XLA's account no plan fits in the limit that the user set.
        ProcessError: another process is about to run something else, has failed or ended.

    Warns:
        MemoryWarning: by XLA's account no plan fits in the memory of the devices, or the user's plan in the limit.
    """
    if group is not None:
        rules = checked_rules(program, dict(options.mesh.shape))
        check_alike(group, Claims.of(program, rules, options, jit_keywords, None if before else plan), plan)
    if program.closes_over_tracers or not isinstance(plan.mesh, Mesh):
        return plan
    if plan.compiled_peak is None:

        def replanned(target: float) -> Plan | None:
            if before is None or others is not None:
                return None if others is None else others(target)
            leaner = _leaner_of_all(group, program, before[identity_of(program)][0], options, jit_keywords, target)
            return None if leaner is None else lowered(program, leaner, jit_keywords)

        agreed = functools.partial(peak_of_all, group) if group is not None else lambda _, peak: peak
        made = fitting_plan(plan, options.memory, compiled, replanned, agreed, others, options.untried)
        if before is not None and others is None and made is not plan:
            rules, _ = before[identity_of(program)]
            before[identity_of(program)] = rules, replace(made, lowering=None, planner=None)
            if options.cache is not None and not made.is_late and (group is None or group.leads):
                store_plan(options.cache, key_of(program, rules, options), made)
        plan = made
    if is_over(plan, options.memory):
        if options.is_memory_given and before is not None and is_over(plan, with_rounding(options.memory)):
            raise over_limit_error(plan, options.memory)
        warn(f"{plan.name}: {plan.warnings[-1]}", MemoryWarning)
    return plan


def compiled(plan: Plan) -> jax.stages.Compiled:
    assert plan.lowering is not None, "`lowered` gives it one"
    return plan.lowering().compile()


def _leaner(
    program: Program, rules: Sequence[Rule], options: Options, jit_keywords: Mapping[str, Any], target: float
) -> Plan | None:
    """A plan with a predicted peak of at most `target` bytes, or else the leanest; None if none is found."""
    memory = target / options.backend.usable
    for _ in range(2):
        try:
            made = _solved(program, rules, replace(options, memory=memory, refine=1), jit_keywords)
        except MemoryLimitError as error:
            if math.isinf(memory := error.needed):
                return None
        except SolverError:
            return None
        else:
            return replace(made, memory=options.memory)
    return None


def _leaner_of_all(
    group: ProcessGroup | None,
    program: Program,
    rules: Sequence[Rule],
    options: Options,
    jit_keywords: Mapping[str, Any],
    target: float,
) -> Plan | None:
    """As `_leaner`, with the leader's plan on all processes."""
    find_leaner = functools.partial(_leaner, program, rules, options, jit_keywords, target)
    if group is None:
        return find_leaner()
    key = f"leaner/{group.round}/{target}"
    text = group.leader_says(key, lambda: "" if (made := find_leaner()) is None else made.dumps())
    return plan_of_text(text, program, rules, options) if text else None


def plan_of_text(text: str, program: Program, rules: Sequence[Rule], options: Options) -> Plan:
    """The plan that another process made for the same program."""
    loaded = Plan.loads(text, options.mesh, where="the plan of another process").bound_to(program)
    return replace(loaded, comparison=comparison_of(program, rules, options))


PlansByProgram = dict[tuple[Any, ...], tuple[tuple[Rule, ...], Plan]]  # identity of a program -> its rules and plan


def identity_of(program: Program) -> tuple[Any, ...]:
    """Equal for equal programs of one process, operations included: fingerprints leave out the arrays in them."""
    return program.fingerprint, *(one.params["operation"] for one in program.equations if one.primitive == OPERATION)


def _planned_before(program: Program, rules: tuple[Rule, ...], before: PlansByProgram, mesh: MeshShape) -> Plan | None:
    """The plan of an equal program; None if there is none, or if the rules of its operations have changed."""
    known = before.get(identity_of(program))
    if known is None or known[0] != rules:
        return None
    bound = known[1].bound_to(program)
    try:
        check_plan(program, bound.annotations, mesh)
    except PlanError:
        return None
    return bound


def lowered(program: Program, plan: Plan, jit_keywords: Mapping[str, Any]) -> Plan:
    """A plan bound to its program under `jax.jit`."""
    return replace(plan, lowering=Lowering(program, plan, jit_keywords))


def program_of(plan: Plan) -> Program:
    """The program that a lowered plan is bound to."""
    assert plan.lowering is not None, "`lowered` gives it one"
    return plan.lowering.program


def planned(
    program: Program,
    options: Options,
    jit_keywords: Mapping[str, Any],
    before: PlansByProgram,
    group: ProcessGroup | None = None,
) -> Plan:
    """The plan of a traced program, taken from an equal program or from the cache if possible.

    Args:
        jit_keywords: with which `refine` compiles plans.
        before: the plans so far, to which this one is added.
        group: the processes that share the mesh and get the plan of one of them; None: one process has the mesh.
    """
    rules = checked_rules(program, dict(options.mesh.shape))
    known = _planned_before(program, rules, before, dict(options.mesh.shape))
    if known is not None:
        return known
    make = functools.partial(_cached, program, rules, options.timed(), jit_keywords)
    if group is None:
        made = make()
    else:
        claims = Claims.of(program, rules, options, jit_keywords)
        made = plan_of_all(group, claims, make, lambda text: plan_of_text(text, program, rules, options))
    if not program.closes_over_tracers:
        before[identity_of(program)] = rules, made
    return made


def _cached(program: Program, rules: tuple[Rule, ...], options: Options, jit_keywords: Mapping[str, Any]) -> Plan:
    """The plan of a program, from the cache if it is there."""
    if options.cache is None:
        return _solved_with_sequences(program, rules, options, jit_keywords)
    key = key_of(program, rules, options)
    found = load_plan(options.cache, key, program, options)
    if found is not None:
        return replace(found, comparison=comparison_of(program, rules, options))
    made = _solved_with_sequences(program, rules, options, jit_keywords)
    if not made.is_late:
        store_plan(options.cache, key, made)
    return made


def formulated(
    program: Program,
    rules: Sequence[Rule],
    options: Options,
    fixed: Mapping[int, Layout] | None = None,
    until: float = math.inf,
) -> Formulation:
    """The problem of a program under the options of `autoshard`; a part of it if the whole takes too long.

    Args:
        fixed: layouts of the arguments that must not have others; None: those of the options and of flax metadata.
        until: the end of formulating, as a time of `time.monotonic`. Tactics ignore it, as they restrict the whole.
    """
    mesh_shape = dict(options.mesh.shape)
    wished = wished_layouts(program, mesh_shape) if fixed is None else {}
    fixed = asked_layouts(program, options) if fixed is None else fixed
    _check_types(program, fixed)
    make = formulator(
        program,
        rules,
        mesh_shape,
        options.topology,
        memory=options.memory,
        fixed={**wished, **program.ordered_arguments, **fixed},
        open_axes=dict.fromkeys(program.ordered_arguments.keys() - fixed.keys(), program.open_axes),
        backend=with_sequences(options.backend) if options.tactics or options.reductions else options.backend,
    )
    if options.tactics:
        return options.restricts(make(), options.tactics, mesh_shape)
    if is_too_large(program, mesh_shape):
        return formulated_near_best_choice(mesh_shape, make, options.time_limit, options.search, until)
    return in_time(mesh_shape, make, until)


def with_sequences(backend: Backend) -> Backend:
    """The compiler, but with sums over several mesh axes finished by sequences of collectives, as tactics need."""
    return replace(backend, scatters=replace(backend.scatters, over_some_axes=True))


def asked_layouts(program: Program, options: Options) -> dict[int, Layout]:
    """Argument index -> the layout that the user asks for by `fixed=` and `like=`.

    Raises:
        ConflictError: the two options contradict each other, or one of them contradicts itself.
    """
    fixed = fixed_layouts(program, options.fixed, dict(options.mesh.shape))
    if options.like is not None:
        fixed = _with_shared(program, fixed, options.like)
    return {**options.pinned, **fixed}


def _with_shared(program: Program, fixed: Mapping[int, Layout], like: PlanData) -> dict[int, Layout]:
    """The fixed layouts, and those of arguments shared with another step.

    Raises:
        ConflictError: an argument has two different layouts.
    """
    shared = shared_layouts(program, like)
    for i, layout in shared.items():
        if fixed.get(i, layout) != layout:
            raise ConflictError(
                f"fixed= wants {program.arguments[i]} to be {spec_of(fixed[i])}, the plan of {like.name}, which like= "
                f"names, has it {spec_of(layout)}.\nDrop one of them, or plan {like.name} with this fixed=."
            )
    return {**shared, **fixed}


def _check_types(program: Program, fixed: Mapping[int, Layout]) -> None:
    """
    Raises:
        ConflictError: `fixed=` contradicts the type of an argument in explicit mode.
    """
    for i, typed in program.ordered_arguments.items():
        if i in fixed and without_axes(fixed[i], program.open_axes) != typed:
            raise ConflictError(
                f"fixed= wants {program.arguments[i]} to be {spec_of(fixed[i])}, its type says {spec_of(typed)}.\n"
                "Drop it from fixed=, or lay the array so before the call (jax.sharding.reshard)."
            )


def _solved_with_sequences(
    program: Program, rules: tuple[Rule, ...], options: Options, jit_keywords: Mapping[str, Any]
) -> Plan:
    """The plan of a program. Sums are finished by sequences if that is asked for and predicted to be faster.

    The problem without sequences is solved, too, since with them the search may end further from the best.
    """
    plain = _solved_in_reserve(program, rules, replace(options, reductions=None), jit_keywords)
    if options.reductions is None or options.tactics:
        return plain
    try:
        found = _solved(program, rules, options, jit_keywords)
    except (CutoffEnd, SolverError):
        return plain
    best = found if found.cost < plain.cost else plain
    bound = min(found.bound, best.bound)
    return best if bound == best.bound else replace(best, bound=bound, status="feasible")


def _solved_in_reserve(
    program: Program, rules: tuple[Rule, ...], options: Options, jit_keywords: Mapping[str, Any]
) -> Plan:
    """The plan of a program; the leanest plan if that fits the limit only without the reserve.

    The reserve is the share of the limit that predictions leave free. `checked` asks the compiled program.
    """
    try:
        return _solved(program, rules, options, jit_keywords)
    except MemoryLimitError as error:
        most = options.memory / options.backend.usable
        if not isinstance(options.mesh, Mesh) or error.least > most or error.needed > most:
            raise
        made = _leaner(program, rules, options, jit_keywords, error.needed * options.backend.usable)
        if made is None:
            raise
    share, limit = options.backend.usable, bytes_text(options.memory)
    remark = (
        f"memory: this plan is predicted to hold {bytes_text(made.predicted.peak_bytes)} of {limit} on each device. "
        f"That is more than the {share:.0%} up to which predictions are relied on, and no plan holds less. "
        "Its compiled program is held against the limit."
    )
    return replace(made, warnings=(*made.warnings, remark))


def _solved(program: Program, rules: Sequence[Rule], options: Options, jit_keywords: Mapping[str, Any]) -> Plan:
    """The plan of a traced program by all stages; with `refine`, the best of several compiled plans."""
    options = options.timed()
    if len(program.equations) > LARGE_PROGRAM:
        begin_loading_compiled()
    formulation = formulated(program, rules, options, until=formulating_ends(options.ends))
    solution = solved(program, formulation, options, options.search_ends)
    comparison = comparison_of(program, rules, options)

    def plan_of(solution: Solution) -> Plan:
        return Plan.of(described(formulation, solution, options), comparison)

    if options.refine == 1:
        return plan_of(solution)

    def made(solution: Solution) -> Plan:
        return lowered(program, plan_of(solution), jit_keywords)

    return refined(formulation, solution, options, functools.partial(formulated, program, rules), made)


def solved(
    program: Program, formulation: Formulation, options: Options, until: float = math.inf, gap: float = 0.0
) -> Solution:
    """The cheapest solution found within the memory limit.

    Args:
        until: the end of the search, as a time of `time.monotonic`, if the time limit ends later.

    Raises:
        MemoryLimitError: no solution fits.
        CutoffEnd: every solution is proven to take longer than `options.enough`.
    """
    enough = None if formulation.least is not None else options.enough  # the bound of a part is not that of the whole
    try:
        return cheapest(formulation, options.time_limit, until, options.progress, options.search, enough, gap)
    except InfeasibleError as error:
        is_part = formulation.least is not None
        leanest = functools.partial(_leanest, program, formulation, error, options)
        raise memory_error(program, error, options.backend.usable, is_part, options.untried, leanest) from None


def _leanest(program: Program, formulation: Formulation, error: InfeasibleError, options: Options) -> Plan | None:
    """The plan that needs exactly the limit in an error; None if no plan is known."""
    if math.isinf(error.needed) or error.choice is None:
        return None
    figures = prediction_of(formulation, error.choice)
    solution = at_limited_overlap(Solution(error.choice, 0.0, 0.0, "feasible"), figures)
    return lowered(program, Plan.of(described(formulation, solution, options)), {})


def cheapest(
    formulation: Formulation,
    time_limit: float,
    until: float = math.inf,
    progress: Callable[[Progress], None] | None = None,
    search: str | Search | None = None,
    enough: Callable[[], float] | None = None,
    gap: float = 0.0,
) -> Solution:
    """The cheapest solution found within the memory limit, with overlap limited by the compute that there is.

    Even if time is up early, the planner's own search returns nothing that costs more than data parallelism.

    Args:
        time_limit: seconds for the search, which also set its budget of work.
        until: the end of the search, as a time of `time.monotonic`, if the time limit ends later.
        progress: as for `solve`.
        search: as for `solve`.
        enough: the cutoff in seconds per step. The search ends once every solution is proven to cost more.
        gap: as for `solve_within`. With a gap, the search does not take overlap into account.

    Raises:
        CutoffEnd: every solution costs more than `enough`.
    """

    def solve(problem: Problem, budget: Budget | None = None) -> Solution:
        tell = progress if enough is None else Cutoff(enough, progress)
        return solve_within(replace(formulation, problem=problem), time_limit, until, tell, search, budget, gap)

    assert formulation.problem.limit is not None, "a plan is sought within the memory of a device"
    limit = formulation.problem.limit * formulation.prices.backend.usable

    def searched() -> Solution:
        found = solve(formulation.problem)
        if gap or time.monotonic() > until:
            return at_limited_overlap(found, prediction_of(formulation, found.choice))
        budget = Budget.of(time_limit, until)
        budget = replace(budget, work=OVERLAP_SHARE * budget.work)
        return with_limited_overlap(formulation, found, solve, budget, limit)

    solution = searched() if search else no_dearer_than_data_parallel(formulation, searched, limit, gap)
    least = formulation.least
    return solution if least is None else with_bound(solution, min(least, solution.bound))


def checked_rules(program: Program, mesh: MeshShape) -> tuple[Rule, ...]:
    """The rules of a program whose constraints the mesh can keep."""
    rules = rules_for(program)
    check_annotations(program, rules, mesh)
    return rules


def comparison_of(
    program: Program, rules: Sequence[Rule], options: Options, fixed: Mapping[int, Layout] | None = None
) -> Comparison:
    """The comparison of a plan with alternatives, made on request.

    It formulates the step again, since a formulation takes megabytes and a plan may live long. A plan with tactics is
    compared with the best plan without tactics, too.
    """
    free = replace(options, tactics=())

    def figures() -> dict[str, Prediction | str]:
        formulation = formulated(program, rules, free, fixed)
        if not options.tactics:
            return alternatives_of(formulation)
        try:
            best = cheapest(formulation, options.time_limit)
        except SolverError:
            return {"without tactics": "not found", **alternatives_of(formulation)}
        return {"without tactics": prediction_of(formulation, best.choice), **alternatives_of(formulation)}

    return Comparison(figures)


def described(formulation: Formulation, solution: Solution, options: Options) -> PlanData:
    """The plan of a solution, with its remarks."""
    mesh_shape = dict(options.mesh.shape)
    made = make_plan(formulation, solution, options.mesh)
    apart = [] if made.predicted.communication_seconds else [one.layout for one in made.arguments]
    remarks = remarks_of(formulation, mesh_shape, uneven_batch(formulation.program, mesh_shape, apart))
    return replace(made, warnings=(*remarks, *uneven_remarks(made, options.topology.uneven)))
