"""What `autoshard` returns: a function that is traced, planned, compiled and placed on its mesh when it is called."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import math
import operator
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, overload

import jax
from jax.sharding import Mesh

from autoshard.arrays.ahead_of_time import LoweredCall, LoweredStep
from autoshard.arrays.arguments import (
    abstract,
    current_sharding,
    is_deleted,
    not_an_array,
    place,
    place_captured,
    replicated_type,
    run_transformed,
    transforms_types,
    type_of,
    unplanned_placements,
    without_type,
)
from autoshard.errors import ArgumentError, MemoryLimitError, MeshError
from autoshard.jaxprs import calls_back
from autoshard.lower import JittedStep, named_refusals
from autoshard.ops.fourier.fft import with_transforms
from autoshard.options import TRACE_KEYWORDS, Options, check_fits, compile_keywords
from autoshard.planning import PlansByProgram, bound_plan, checked, lowered, planned, program_of
from autoshard.processes import ProcessGroup
from autoshard.program import Program, context, named_refusal
from autoshard.program.closures import HeldConstants
from autoshard.program.explicit import is_by_hand, is_explicit
from autoshard.program.flattening import CallStructure, FlatCall, flattened
from autoshard.program.signature import Arguments, ArgumentSelection, join
from autoshard.program.tracing import traced_step
from autoshard.program.user_code import shows_users_lines
from autoshard.propagation.registry import has_rule, has_rule_in_jit
from autoshard.propagation.stencils import with_stencils
from autoshard.recognition import with_operations
from autoshard.replanning.planner import Replanner
from autoshard.replanning.signatures import signature_remark
from autoshard.report.live import LiveLine
from autoshard.solver.runtime.garbage_collection import uncollected
from autoshard.user_plan import Plan
from autoshard.variants.choosing import proven
from autoshard.variants.open_choice import OpenChoice
from autoshard.variants.rewriting import RewriteSearch, as_planned
from autoshard.variants.trace_contexts import as_traced, is_explicit_form, trace_contexts, wants_another_context
from autoshard.variants.variant import StepVariants, Variant

_LOG = logging.getLogger("autoshard")  # says at INFO what is planned

Parameters = ParamSpec("Parameters")  # of a step
Rest = ParamSpec("Rest")  # of a method, less the instance
Result = TypeVar("Result")


@dataclass(frozen=True)
class PlannedStep:
    """One signature of the step, planned and handed to `jax.jit`."""

    plan: Plan
    program: Program
    context: Any  # of tracing; kept alive, so that no other context gets its address
    planner: Replanner
    held: HeldConstants  # constants that it read from static leaves
    is_checked: bool = False  # whether its compiled program has been compared with the memory limit
    choice: OpenChoice[PlannedStep] | None = None  # among the variants of the step; None once one is checked

    @property
    def step(self) -> JittedStep:
        assert self.plan.lowering is not None, "`lowered` gives it one"
        return self.plan.lowering.step

    @functools.cached_property
    def run(self) -> Callable[..., tuple[Any, ...]]:
        """The compiled step, from flat arguments as the plan places them to flat results."""
        flat, captured = self.step.flat, self.captured
        return (lambda *leaves: flat(*leaves, *captured)) if captured else flat

    @functools.cached_property
    def captured(self) -> tuple[jax.Array, ...]:
        """The arrays that the step closes over, placed once for all calls."""
        return tuple(place_captured(self.program.captured, self.plan))

    @property
    def captured_for_transformations(self) -> tuple[Any, ...]:
        """The compiled step for a call under a transformation, for which JAX refuses arrays on other hosts."""
        is_here = all(array.is_fully_addressable for array in self.captured)
        return self.captured if is_here else self.program.captured

    def result(self, flat: FlatCall, placed: Sequence[Any], results: Sequence[Any]) -> Any:
        """The result of the function. Writes the changes to modules into the caller's modules first."""
        if self.program.changes is None:
            return self.step.result(results)
        return flat.result_of(self.program.changes, placed, results)

    def run_compiled(
        self, lowered: LoweredCall, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The step compiled ahead of time, run with the arguments of a call."""
        flat = lowered.taken_apart(args, kwargs)
        placed = place(flat.arrays, self.plan, self.program.donated)
        return self.result(flat, placed, compiled(*placed, *self.captured))

    @functools.cached_property
    def calls_back(self) -> bool:
        return calls_back(self.program.jaxpr)

    @functools.cached_property
    def sentinels(self) -> tuple[int, ...]:
        """One array of each donated argument. If it is deleted, the argument was donated before."""
        first = {self.program.in_tree.array_paths[i][:2]: i for i in sorted(self.program.donated, reverse=True)}
        return tuple(first.values())


class _Call(NamedTuple):
    """The arguments of a call, and the compiled step that it ran."""

    signature: tuple[Any, ...]  # types of static arguments, static arguments, structure of the other arguments
    compiled: PlannedStep
    run: Callable[..., tuple[Any, ...]]  # from flat arguments to flat results
    sentinels: tuple[int, ...]
    otherwise: dict[int, Any]  # index of an array that does not lie as planned -> its sharding

    def may_run(self, flat: FlatCall) -> bool:
        """Whether no argument is deleted or has to be copied."""
        # `jax.jit` stays slow after a call that was not allowed to trace. So arrays that did not lie as planned before
        # have to lie that way again.
        if any(is_deleted(flat.arrays[i]) for i in self.sentinels) or flat.share_arrays:
            return False
        if self.compiled.held.changed(flat.structure.static):
            return False
        return all(current_sharding(flat.arrays[i]) == lies for i, lies in self.otherwise.items())


def _kinds(static: tuple[Any, ...]) -> tuple[type, ...]:
    return tuple(type(value) for _, value in static)


class ShardedFunction(Generic[Parameters, Result]):
    """A function that is planned, compiled and placed on its mesh when it is called."""

    _made_with: Mapping[str, Any]  # keyword arguments of the constructor

    def __new__(cls, *args: Any, **made_with: Any) -> Self:
        made = super().__new__(cls)
        made._made_with = made_with
        return made

    def __init__(
        self,
        fn: Callable[Parameters, Result],
        *,
        options: Options,
        jit_keywords: Mapping[str, Any],
        given: Plan | None = None,
        merges: bool = True,
    ) -> None:
        """
        Args:
            given: the plan to use instead of a search.
            merges: whether tracing merges equations that compute the same.
        """
        if not callable(fn):
            raise ArgumentError(f"autoshard decorates a function; {fn!r} cannot be called")
        functools.update_wrapper(self, fn)
        check_fits(fn, jit_keywords)
        self._fn, self._options, self._given, self._merges = fn, options, given, merges
        self._trace_keywords = {name: value for name, value in jit_keywords.items() if name in TRACE_KEYWORDS}
        self._jit_keywords = compile_keywords(jit_keywords)
        self._static = ArgumentSelection.of(fn, jit_keywords, "static")
        self._group = None if options.is_alone else ProcessGroup.of(options.mesh)
        self._lock = threading.RLock()
        self._compiled: dict[tuple[Any, ...], PlannedStep] = {}
        self._planned_before: PlansByProgram = {}
        # Under ignore_constraints: types without shardings -> the original types of such arguments.
        self._types_before: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._modules_before: CallStructure | None = None  # of the last call, if there were nnx modules in it
        self._last: _Call | None = None  # the last call, if all of its arguments lay as planned

    def __copy__(self) -> Self:
        """Returns itself, as a copy of any function does."""
        return self

    def __reduce__(self) -> tuple[Callable[..., Self], tuple[Callable[Parameters, Result]]]:
        """Pickles the function and its options, but no plan and no compiled program."""
        return functools.partial(type(self), **self._made_with), (self._fn,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Returns itself, as a copy of any function does; for a method of a copied object, the method of the copy."""
        fn = copy.deepcopy(self._fn, memo)
        return self if fn is self._fn else type(self)(fn, **self._made_with)

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(
        self: ShardedFunction[Concatenate[Any, Rest], Result], instance: object, owner: type | None = None
    ) -> Callable[Rest, Result]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        static, dynamic = self._static.split(args, kwargs)
        last, refused = self._last, False
        flat = flattened(dynamic, last.signature[2] if last is not None else self._modules_before)
        leaves = flat.arrays
        signature = _kinds(static), static, flat.structure  # types first: values of unlike types are never compared
        if last is not None and last.signature == signature and last.may_run(flat):
            try:
                with jax.no_tracing(True):  # run only what has been compiled, for arguments that lie as these do
                    results = last.run(*leaves)
            except jax.errors.JaxRuntimeError:
                raise
            except (RuntimeError, TypeError, ValueError):
                refused = True
            else:
                earlier: Result = last.compiled.result(flat, leaves, results)
                return earlier
        return self._call_anew(args, kwargs, flattened(dynamic) if flat.is_guess else flat, refused)

    @shows_users_lines
    def _call_anew(self, args: tuple[Any, ...], kwargs: dict[str, Any], flat: FlatCall, refused: bool) -> Result:
        """A call whose arguments have to be checked.

        Args:
            refused: whether the compiled step of the last call did not take its arguments.
        """
        static, dynamic = self._static.split(args, kwargs)
        leaves, signature = flat.arrays, (_kinds(static), static, flat.structure)
        self._modules_before = flat.structure if flat.structure.has_modules else None
        if is_by_hand() or transforms_types(leaves):
            plain = self._fn if flat.is_special else jax.jit(self._fn, **self._trace_keywords)
            inner: Result = plain(*args, **kwargs)
            return inner
        is_transformed = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        compiled = self._prepare(static, dynamic, flat, runs=not is_transformed)
        if not isinstance(compiled.plan.mesh, Mesh):
            raise MeshError(
                f"{compiled.plan.mesh} has no devices, so the step can be planned and lowered but not run.\n"
                "Give autoshard a mesh of devices (jax.make_mesh) to run it."
            )
        if is_transformed:
            taken = [*leaves, *compiled.captured_for_transformations]
            results = run_transformed(compiled.step.transformed, taken, compiled.plan.mesh)
            traced: Result = compiled.result(flat, leaves, results)
            return traced
        placed = place(leaves, compiled.plan, compiled.program.donated)
        untouched = all(map(operator.is_, leaves, placed))
        # A Python callback may trace functions.
        again = untouched and not refused and not compiled.calls_back and not compiled.program.closes_over_tracers
        otherwise = unplanned_placements(leaves, compiled.plan) if again else {}
        self._last = _Call(signature, compiled, compiled.run, compiled.sentinels, otherwise) if again else None
        with named_refusals(compiled.program, compiled.plan.mesh):
            result: Result = compiled.result(flat, placed, compiled.run(*placed))
            return result

    @shows_users_lines
    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is sharded for arguments like these: arrays or ShapeDtypeStructs."""
        return self._planned(args, kwargs).plan

    @shows_users_lines
    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step, lowered. The result of `.compile()` is called as the step, without static arguments."""
        step = self._planned(args, kwargs)
        assert step.plan.lowering is not None, "`lowered` gives it one"
        call = LoweredCall.of(step.plan, self._static.split(args, kwargs)[1])
        return LoweredStep(step.plan.lowering(), functools.partial(step.run_compiled, call))

    @shows_users_lines
    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The step's program for arguments like these."""
        return self.variants(*args, **kwargs).program(Variant(self._options.microbatches or 1))

    def variants(self, *args: Any, **kwargs: Any) -> StepVariants:
        """The ways to run the step for arguments like these."""
        static, dynamic = self._static.split(args, kwargs)
        return self._traced(static, dynamic, self._types(flattened(dynamic).arrays, static, dynamic))

    def program_to_plan(self, *args: Any, **kwargs: Any) -> Program:
        """The traced program, or its form with stacks of matrices or shared trips if that is predicted to be faster."""
        traced = self.variants(*args, **kwargs)
        as_written = Variant(self._options.microbatches or 1)
        if self._open_choice(traced, self._options).may_be_rewritten(as_written):
            with contextlib.suppress(MemoryLimitError):  # under another limit it may fit
                return self._planned(args, kwargs).program
        return traced.program(as_written)

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> PlannedStep:
        static, dynamic = self._static.split(args, kwargs)
        return self._prepare(static, dynamic, flattened(dynamic))

    def _prepare(
        self, static: tuple[Any, ...], dynamic: Arguments, flat: FlatCall, *, runs: bool = False
    ) -> PlannedStep:
        """The step for arguments like these.

        Args:
            runs: whether it is about to run. Then its compiled program is compared with the memory limit. A limit
                given by the user is always checked.
        """
        # If several threads call the step first, one plans it. Processes that share the mesh agree on a plan.
        with self._lock if self._group is None else self._group.joined(runs=runs):
            return self._prepared(static, dynamic, flat, runs)

    def _prepared(self, static: tuple[Any, ...], dynamic: Arguments, flat: FlatCall, runs: bool) -> PlannedStep:
        types = self._types(flat.arrays, static, dynamic)
        key = static, _kinds(static), flat.structure, id(context())
        try:
            compiled = self._compiled.get((*key, types))
        except (TypeError, ValueError) as error:
            raise self._unhashable(static, dynamic, error) from error
        if compiled is None:
            with uncollected():
                with LiveLine(f"tracing {getattr(self._fn, '__name__', 'the step')}"):
                    traced = self._traced(static, dynamic, types)
                if not traced.closes_over_tracers:
                    compiled = self._compiled.get((*key, traced.types))
                if compiled is None:
                    # Processes plan the same, whatever their clocks.
                    options = self._options if self._group is not None else self._options.timed()
                    try:
                        compiled = self._fastest_rewritten(traced, options)
                    except MemoryLimitError as error:
                        raise self._open_choice(traced, options).confirmed(error) from None
            if not traced.closes_over_tracers:
                self._compiled[*key, types] = self._compiled[*key, traced.types] = compiled
        compiled.held.check(flat.structure.static, compiled.program.name)
        # Other processes compile when they run the step. On GPU, a process that compiles alone waits for them.
        asked = self._options.is_memory_given and self._group is None
        if not compiled.is_checked and (runs or asked):
            compiled = self._checked(compiled)
        return compiled

    def _checked(self, compiled: PlannedStep) -> PlannedStep:
        before, choice = None if self._given else self._planned_before, compiled.choice
        others = None if choice is None else functools.partial(choice.within, known=compiled.plan)
        plan = checked(compiled.program, compiled.plan, self._options, self._jit_keywords, before, self._group, others)
        if self._group is not None:
            self._group.round += 1
        if choice is not None and plan is not compiled.plan:
            choice.keep(plan)
        made = self._bound(program_of(plan), plan)
        made = replace(made, plan=replace(made.plan, remark=compiled.plan.remark), is_checked=True)
        for key in [key for key, one in self._compiled.items() if one is compiled]:
            self._compiled[key] = made
        return made

    def _fastest_rewritten(self, traced: StepVariants, options: Options) -> PlannedStep:
        """The fastest rewriting of the step, if rewrites are asked for. Only its best plans are compiled."""
        devices = options.mesh.size
        if self._given is not None or not options.rewrites:
            rewrites = self._given.rewrites if self._given else ()
            return self._fastest(as_planned(traced, rewrites, devices), options)

        def planned(variants: StepVariants, enough: float, share: float) -> PlannedStep:
            limited = replace(options, refine=1, time_limit=share * options.time_limit)
            return self._fastest(variants, replace(limited, enough=self._enough(enough, limited)))

        found = RewriteSearch(traced, options.rewrites, devices, options.topology, planned, options.ends).fastest()
        if options.refine == 1:
            return found
        refined = self._fastest(as_planned(traced, found.plan.rewrites, devices), options)
        return proven(refined, found.plan.bound)

    def _fastest(self, traced: StepVariants, options: Options) -> PlannedStep:
        """The fastest variant of the step. All share one time limit; only the best plans of that one are compiled."""
        choice = self._open_choice(traced, options)
        if self._given is not None or choice.is_single:
            return choice.planned(self._given)
        later = None if traced.closes_over_tracers else replace(choice, options=self._options)
        return replace(choice.fastest(), choice=later)

    def _open_choice(self, traced: StepVariants, options: Options) -> OpenChoice[PlannedStep]:
        plans = self._planned_before, self._jit_keywords
        return OpenChoice(traced, options, self._planned_anew, self._bound, *plans, self._group)

    def _planned_anew(
        self, program: Program, options: Options, enough: float = math.inf, before: PlansByProgram | None = None
    ) -> PlannedStep:
        """The plan of a program, with what calls need.

        Args:
            enough: seconds per step: a plan that is proven to take more is not sought further.
            before: the plans so far, to which this one is added; None: those of the step.
        """
        if self._given:
            plan = bound_plan(self._given, program, self._options)
        else:
            with LiveLine(f"planning {program.name}") as line:
                told = replace(options, progress=line.tell, enough=self._enough(enough, options))
                before = self._planned_before if before is None else before
                plan = planned(program, told, self._jit_keywords, before, self._group)
        made = self._bound(program, lowered(program, plan, self._jit_keywords))
        if (last := next(reversed(self._compiled.values()), None)) is not None:
            made = replace(made, plan=replace(made.plan, remark=signature_remark(made.plan, last.plan)))
        _LOG.info("%s\n%s", made.plan.remark or f"Planned {program.name}.", repr(made.plan))
        return made

    def _bound(self, program: Program, plan: Plan) -> PlannedStep:
        """A lowered plan with its program and the context of tracing."""
        planner = Replanner.of(program, self._options, self._jit_keywords, is_given=self._given is not None)
        return PlannedStep(planner.bound(plan), program, context(), planner, HeldConstants.of(program))

    def _enough(self, seconds: float, options: Options) -> Callable[[], float] | None:
        """The cutoff in seconds per step: the given one, or that of the options.

        Processes that share a mesh use that of the options alone, since all of them need the leader's plan.
        """
        asked = options.enough
        if self._group is not None or math.isinf(seconds):
            return asked
        return lambda: seconds if asked is None else min(seconds, asked())

    def _types(self, leaves: list[Any], static: tuple[Any, ...], dynamic: Arguments) -> tuple[Any, ...]:
        try:
            types = tuple(map(type_of, leaves))
        except TypeError as error:
            raise self._not_an_array(static, dynamic) or error from error
        context = jax.sharding.get_abstract_mesh()
        traced = tuple(as_traced(one, context, self._options.mesh) for one in types)
        if not self._options.ignore_constraints:
            return traced
        # Results of the step have no explicit types then. They are traced with the types of the arguments before.
        opened = tuple(map(without_type, types))
        key = opened, context.axis_types
        before = self._types_before.get(key, opened)
        merged = tuple(old if new == bare else new for new, old, bare in zip(traced, before, opened, strict=True))
        self._types_before[key] = merged
        if not is_explicit_form(context, self._options.mesh):
            return merged
        return tuple(replicated_type(t, context) if t == bare else t for t, bare in zip(merged, opened, strict=True))

    def _unhashable(self, static: tuple[Any, ...], dynamic: Arguments, error: Exception) -> ArgumentError:
        said = f"static arguments must be hashable, as for jax.jit: {error}"
        return self._not_an_array(static, dynamic) or ArgumentError(said)

    def _not_an_array(self, static: tuple[Any, ...], dynamic: Arguments) -> ArgumentError | None:
        return not_an_array(self._fn, *join(tuple((place, None) for place, _ in static), dynamic))

    def _traced(self, static: tuple[Any, ...], dynamic: Arguments, types: tuple[Any, ...]) -> StepVariants:
        """The step traced, from which the programs of its variants are made."""
        args, kwargs = join(static, dynamic)
        obey = not self._options.ignore_constraints
        refusals: list[MeshError | None] = []
        set_by_caller = jax.sharding.get_abstract_mesh()
        attempts = trace_contexts(types, self._options)
        for i, (mesh, tried) in enumerate(attempts):
            try:
                with jax.sharding.use_abstract_mesh(mesh):
                    how: dict[str, Any] = {
                        "leaves": list(map(abstract, tried)),
                        "obey": obey,
                        "merges": self._merges,
                        "has_rule": has_rule if self._merges else has_rule_in_jit,
                        "trips": self._options.trips,
                    }
                    traced = traced_step(self._fn, args, kwargs, **how, **self._trace_keywords)
                traced = replace(traced, has_own_statistics=self._options.statistics is not None)
                finish = self._finished if self._merges else None
                if self._merges:
                    traced = with_operations(traced, self._options.mesh.size, self._options.topology.memory_bytes)
                return StepVariants(
                    traced, mesh, tried, self._options.topology, finish, self._options.remat is not None
                )
            except Exception as error:
                explicit = "type Auto" in str(error) or any(is_explicit(one) for one, _ in attempts)
                named = named_refusal(self._fn, error) if explicit else None
                refusals.append(named)
                says_another = (set_by_caller.empty and named is not None) or wants_another_context(error)
                if i < len(attempts) - 1 and says_another:
                    continue
                if (named := next(filter(None, refusals), None)) is not None:
                    raise named from error
                raise
        raise AssertionError("there is an attempt")

    def _finished(self, program: Program) -> Program:
        """A program whose stencils and Fourier transforms are one equation each."""
        return with_transforms(with_stencils(program), self._options.mesh.shape)
