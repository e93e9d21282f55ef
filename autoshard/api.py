"""What a user calls: `autoshard`, `plan`, `evaluate`, `propagate`. They compose the stages and remember the results."""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, Self, TypeVar, overload

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from autoshard.arguments import (
    ArrayType,
    abstract,
    is_deleted,
    is_typed_on,
    not_an_array,
    place,
    run_transformed,
    type_of,
    whole_type,
    without_type,
)
from autoshard.cache import find, keep, key_of
from autoshard.compiled.verification import Verification, compiled, mesh_of, verification
from autoshard.errors import ArgumentError, AutoshardError, ConflictError, MemoryLimitError, MeshError
from autoshard.explicit import is_explicit, type_sharding
from autoshard.jaxprs import calls_back
from autoshard.layout import Layout, MeshShape, layout_of, spec_of, without_axes
from autoshard.lower import Lowering, Step, named_refusals
from autoshard.mesh.topology import Topology
from autoshard.model.formulating import formulate
from autoshard.model.formulation import Formulation
from autoshard.model.given_layouts import as_propagated
from autoshard.model.memory_limit import solve_within
from autoshard.on_shards import check_plan
from autoshard.options import TRACE_KEYWORDS, Options, check_jit_keywords, options_of
from autoshard.plans.alternatives import alternatives_of
from autoshard.plans.making import make_plan
from autoshard.program import Equation, Program, Value, context, named_refusal, trace
from autoshard.propagation import PropagatedValue, Propagation, Rule, propagate_layouts, rules_for
from autoshard.refine import refined
from autoshard.report.text import bytes_text
from autoshard.signature import Arguments, Chosen, join
from autoshard.solver.problem import InfeasibleError, Solution
from autoshard.solver.runtime.garbage_collection import uncollected
from autoshard.specs import argument_layouts, check_annotations, check_jit_takes, fixed_layouts, result_layouts, whole
from autoshard.user_plan import Comparison, Plan

Parameters = ParamSpec("Parameters")  # of a step
Rest = ParamSpec("Rest")  # of a method, less the instance
Result = TypeVar("Result")


@overload
def autoshard(
    fn: Callable[Parameters, Result],
    *,
    mesh: Mesh | AbstractMesh,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    plan: Plan | str | Path | None = None,
    **jit_keywords: Any,
) -> Autosharded[Parameters, Result]: ...


@overload
def autoshard(
    fn: None = None,
    *,
    mesh: Mesh | AbstractMesh,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    plan: Plan | str | Path | None = None,
    **jit_keywords: Any,
) -> Callable[[Callable[Parameters, Result]], Autosharded[Parameters, Result]]: ...


def autoshard(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | AbstractMesh,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    plan: Plan | str | Path | None = None,
    **jit_keywords: Any,
) -> Any:
    """Shards a train step over a mesh. Use it where `jax.jit` would stand.

    The first call of a signature traces the step, solves for the cheapest sharding of every value, places the inputs,
    compiles and runs; later calls run.

    >>> import jax.numpy as jnp
    >>> @autoshard(mesh=jax.make_mesh((jax.device_count(),), ("data",)), donate_argnums=0)
    ... def train_step(weights, batch):
    ...     loss, gradient = jax.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)
    ...     return weights - 0.1 * gradient, loss
    >>> weights, loss = train_step(jnp.ones((8, 8)), jnp.ones((16, 8)))
    >>> float(loss)
    64.0

    Args:
        fn: any function that `jax.jit` takes; without it, a decorator is returned.
        mesh: the devices; axes of any type, they are used as Auto axes. An AbstractMesh can be planned for, not run.
        memory: bytes per device that a step may use, as a number or ``"14GiB"``; the topology's by default. Plans are
            predicted to fill at most 85% of it, on GPU 70%, since predictions can be off.
        topology: what the machine costs, or the name of a preset; guessed from the mesh by default.
        fixed: shardings that arguments must have, by path or glob: ``{"params/embed": P("model", None)}``.
        time_limit: seconds after which the solver returns the best plan it has, with its proven gap.
        cache: a folder in which plans are kept, and found again when the same step is planned for the same mesh,
            machine and options, by this or another process. What is not readable there is ignored with a warning.
        refine: how many plans to compile, to keep the one whose compiled program is best; 1 compiles none. They are the
            cheapest that differ; `autoshard.refine` says which, and what is best. Planning then takes the time of up to
            `refine` more searches and as many compilations.
        ignore_constraints: whether to drop what the step itself says of layouts: `with_sharding_constraint`,
            `reshard`, `out_sharding=`, and the types of its arguments in explicit mode.
        plan: a plan made earlier, or its file; it is used instead of solving, and must be for this very program and
            agree with `fixed`.
        **jit_keywords: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`, `keep_unused`,
            `compiler_options`, as for `jax.jit`.

    Returns:
        A function that behaves as `fn` and has `.plan(...)` and `.lower(...)`.

    Raises:
        AutoshardError: the options contradict each other or the mesh, here; or the arguments, when it is called.
    """
    options = options_of(
        mesh,
        memory=memory,
        topology=topology,
        fixed=fixed,
        time_limit=time_limit,
        cache=cache,
        refine=refine,
        ignore_constraints=ignore_constraints,
    )
    check_jit_keywords(jit_keywords)
    if plan is not None:
        plan = plan.on(options.mesh) if isinstance(plan, Plan) else Plan.load(plan, options.mesh)
    given = plan

    def decorate(fn: Callable[Parameters, Result]) -> Autosharded[Parameters, Result]:
        return Autosharded(fn, options=options, jit_keywords=jit_keywords, given=given)

    return decorate if fn is None else decorate(fn)


def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    **jit_keywords: Any,
) -> Plan:
    """The plan of `fn` on arrays or ShapeDtypeStructs; see `autoshard` for the options.

    Args:
        fn: any function that `jax.jit` takes.
        *args: positional arguments of `fn`: pytrees of arrays or ShapeDtypeStructs.
        kwargs: keyword arguments of `fn`.

    Returns:
        The plan. Its `status` is "optimal", or "feasible" with a proven `gap`.

    Raises:
        MemoryLimitError: no sharding fits; it carries the smallest limit that would do, in bytes per device.
        ConflictError: shardings that are fixed, or that the step itself asks for, contradict each other.
        MeshError: a sharding, the topology or the mesh does not fit the others.
        ArgumentError: an option is of the wrong kind.
    """
    options: dict[str, Any] = {
        "memory": memory,
        "topology": topology,
        "fixed": fixed,
        "time_limit": time_limit,
        "cache": cache,
    }
    step = autoshard(fn, mesh=mesh, refine=refine, ignore_constraints=ignore_constraints, **options, **jit_keywords)
    return step.plan(*args, **(kwargs or {}))


@dataclass(frozen=True)
class _Compiled:
    """One signature of the step, planned and handed to `jax.jit`."""

    plan: Plan
    program: Program
    context: Any  # in which it was traced; kept, so that no other one has its address

    @property
    def step(self) -> Step:
        assert self.plan.lowering is not None, "`Autosharded.finish` gives it one"
        return self.plan.lowering.step

    @functools.cached_property
    def calls_back(self) -> bool:
        return calls_back(self.program.jaxpr)

    @functools.cached_property
    def sentinels(self) -> tuple[int, ...]:
        """One array of each donated argument: if it has been deleted, the argument was donated before."""
        first = {self.program.in_tree.paths[i][:2]: i for i in sorted(self.program.donated, reverse=True)}
        return tuple(first.values())


class _Call(NamedTuple):
    """What a call was made with, and ran."""

    signature: tuple[Any, ...]  # types of static arguments, these, and the containers of the others
    compiled: _Compiled
    run: Callable[..., tuple[Any, ...]]  # from flat arguments to flat results
    sentinels: tuple[int, ...]


def _kinds(static: tuple[Any, ...]) -> tuple[type, ...]:
    return tuple(type(value) for _, value in static)


class Autosharded(Generic[Parameters, Result]):
    """A function that is planned, compiled and placed on its mesh when it is called."""

    def __init__(
        self,
        fn: Callable[Parameters, Result],
        *,
        options: Options,
        jit_keywords: Mapping[str, Any],
        given: Plan | None = None,
    ) -> None:
        if not callable(fn):
            raise ArgumentError(f"autoshard decorates a function; {fn!r} cannot be called")
        functools.update_wrapper(self, fn)
        self._fn, self._options, self._given = fn, options, given
        self._trace_keywords = {name: value for name, value in jit_keywords.items() if name in TRACE_KEYWORDS}
        self._jit_keywords = {name: value for name, value in jit_keywords.items() if name not in TRACE_KEYWORDS}
        self._static = Chosen.of(fn, jit_keywords, "static")
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}
        self._planned_before: dict[str, tuple[tuple[Rule, ...], Plan]] = {}  # by the fingerprint of the program
        # Types of arguments whose types are ignored, by what else they are.
        self._types_before: dict[tuple[Any, ...], tuple[Any, ...]] = {}
        self._last: _Call | None = None  # if all arguments lay as planned

    @overload
    def __get__(self, instance: None, owner: type) -> Self: ...

    @overload
    def __get__(
        self: Autosharded[Concatenate[Any, Rest], Result], instance: object, owner: type | None = None
    ) -> Callable[Rest, Result]: ...

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else types.MethodType(self, instance)

    def __call__(self, *args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        static, dynamic = self._static.split(args, kwargs)
        leaves, in_tree = jax.tree.flatten(dynamic)
        signature = _kinds(static), static, in_tree  # what is of another type is not compared
        last, refused = self._last, False
        if last is not None and last.signature == signature and not any(is_deleted(leaves[i]) for i in last.sentinels):
            try:
                with jax.no_tracing(True):  # run only what has been compiled, for arguments that lie as these do
                    results = last.run(*leaves)
            except jax.errors.JaxRuntimeError:
                raise
            except (RuntimeError, TypeError, ValueError):
                refused = True
            else:
                earlier: Result = last.compiled.step.result(results)
                return earlier
        if _by_hand() or _transforms_types(leaves):
            inner: Result = jax.jit(self._fn, **self._trace_keywords)(*args, **kwargs)
            return inner
        compiled = self._prepare(static, dynamic, leaves, in_tree)
        if not isinstance(compiled.plan.mesh, Mesh):
            raise MeshError(
                f"{compiled.plan.mesh} has no devices, so the step can be planned and lowered but not run.\n"
                "Give autoshard a mesh of devices (jax.make_mesh) to run it."
            )
        step = compiled.step
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):
            traced: Result = step.result(run_transformed(step.transformed, leaves, compiled.plan.mesh))
            return traced
        placed = place(leaves, compiled.plan, compiled.program.donated)
        untouched = all(map(operator.is_, leaves, placed))
        # Python that is called back may have something to trace.
        again = untouched and not refused and not compiled.calls_back and not compiled.program.closes_over_tracers
        self._last = _Call(signature, compiled, step.flat, compiled.sentinels) if again else None
        with named_refusals(compiled.program, compiled.plan.mesh):
            result: Result = step.result(step.flat(*placed))
            return result

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """How the step is sharded for arguments like these: arrays or ShapeDtypeStructs."""
        return self._planned(args, kwargs).plan

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The annotated step, lowered; `.compile()` compiles it for the devices of the mesh."""
        lowering = self._planned(args, kwargs).plan.lowering
        assert lowering is not None, "`finish` gives it one"
        return lowering()

    def trace(self, *args: Any, **kwargs: Any) -> Program:
        """The step's program for arguments like these."""
        static, dynamic = self._static.split(args, kwargs)
        return self._trace(static, dynamic, self._types(jax.tree.leaves(dynamic), static, dynamic))[0]

    def finish(self, program: Program, plan: Plan) -> _Compiled:
        """The program under `jax.jit` as the plan says."""
        return _Compiled(replace(plan, lowering=Lowering(program, plan, self._jit_keywords)), program, context())

    def _planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Compiled:
        static, dynamic = self._static.split(args, kwargs)
        return self._prepare(static, dynamic, *jax.tree.flatten(dynamic))

    def _prepare(self, static: tuple[Any, ...], dynamic: Arguments, leaves: list[Any], in_tree: Any) -> _Compiled:
        types = self._types(leaves, static, dynamic)
        key = static, _kinds(static), in_tree, id(context())
        try:
            compiled = self._compiled.get((*key, types))
        except TypeError as error:
            raise ArgumentError(f"static arguments must be hashable, as for jax.jit: {error}") from error
        if compiled is None:
            with uncollected():
                program, used = self._trace(static, dynamic, types)
                if not program.closes_over_tracers:
                    compiled = self._compiled.get((*key, used))
                if compiled is None:
                    compiled = self._planned_anew(program)
            if not program.closes_over_tracers:
                self._compiled[*key, types] = self._compiled[*key, used] = compiled
        return compiled

    def _planned_anew(self, program: Program) -> _Compiled:
        if self._given:
            made = _bound(self._given, program, self._options)
        else:
            made = _planned(program, self._options, self.finish, self._planned_before)
        return self.finish(program, made)

    def _types(self, leaves: list[Any], static: tuple[Any, ...], dynamic: Arguments) -> tuple[Any, ...]:
        try:
            types = tuple(map(type_of, leaves))
        except TypeError as error:
            blanks = tuple((place, None) for place, _ in static)
            raise not_an_array(self._fn, *join(blanks, dynamic)) from error
        context = jax.sharding.get_abstract_mesh()
        traced = tuple(self._as_traced(one, context) for one in types)
        if not self._options.ignore_constraints:
            return traced
        # The step's own results have no types then: they are traced with those that their arguments had before.
        opened = tuple(map(without_type, types))
        key = opened, context.axis_types
        before = self._types_before.get(key, opened)
        merged = tuple(old if new == bare else new for new, old, bare in zip(traced, before, opened, strict=True))
        self._types_before[key] = merged
        if not self._is_ours(context):
            return merged
        return tuple(whole_type(one, context) if one == bare else one for one, bare in zip(merged, opened, strict=True))

    def _as_traced(self, type_: ArrayType, context: AbstractMesh) -> ArrayType:
        """An argument's type as the step is traced with it: on Explicit axes if `jax.jit` would trace so.

        A number is always whole on them, so that one that the step returned is of the type of the first.
        """
        if is_typed_on(type_, self._options.mesh) and (context.empty or context.axis_types == type_[4].mesh.axis_types):
            return type_
        is_number = isinstance(type_, tuple) and not type_[0]
        return whole_type(type_, context) if is_number and self._is_ours(context) else without_type(type_)

    def _is_ours(self, mesh: AbstractMesh) -> bool:
        """Whether it is an explicit mesh of the axes that the step is planned for."""
        return is_explicit(mesh) and list(mesh.shape.items()) == list(self._options.mesh.shape.items())

    def _trace(
        self, static: tuple[Any, ...], dynamic: Arguments, types: tuple[Any, ...]
    ) -> tuple[Program, tuple[Any, ...]]:
        """The program, and the types of arguments that it was traced with."""
        args, kwargs = join(static, dynamic)
        obey = not self._options.ignore_constraints
        refusals: list[MeshError | None] = []
        set_by_caller = jax.sharding.get_abstract_mesh()
        attempts = self._attempts(types)
        for i, (mesh, tried) in enumerate(attempts):
            try:
                with jax.sharding.use_abstract_mesh(mesh):
                    leaves = list(map(abstract, tried))
                    return trace(self._fn, args, kwargs, leaves=leaves, obey=obey, **self._trace_keywords), tried
            except Exception as error:
                explicit = "type Auto" in str(error) or any(is_explicit(one) for one, _ in attempts)
                named = named_refusal(self._fn, error) if explicit else None
                refusals.append(named)
                says_another = (set_by_caller.empty and named is not None) or _wants_another_context(error)
                if i < len(attempts) - 1 and says_another:
                    continue
                if (named := next(filter(None, refusals), None)) is not None:
                    raise named from error
                raise
        raise AssertionError("there is an attempt")

    def _attempts(self, types: tuple[Any, ...]) -> list[tuple[AbstractMesh, tuple[Any, ...]]]:
        """Meshes to trace under, and types of arguments to trace with: as `jax.jit` does it, then what is tried if JAX
        refuses the step.

        A step that names axes and is traced under no mesh means those of ours, Auto or Explicit. Without a mesh that
        is set, arguments lie on Explicit axes by chance, since `jax.make_mesh` makes such: their types count only for
        a step that cannot do without.
        """
        context, ours = jax.sharding.get_abstract_mesh(), self._options.mesh.abstract_mesh
        assert self._options.given_mesh is not None, "`options_of` has it"
        given, opened = self._options.given_mesh.abstract_mesh, tuple(map(without_type, types))
        if not context.empty:
            auto = context.update(axis_types=(AxisType.Auto,) * len(context.axis_names)), opened
            return [(context, types), auto] if self._is_ours(context) else [auto]
        typed = [(one[4].mesh, types) for one in types if isinstance(one, tuple) and one[4] is not None][:1]
        as_typed = [(context, types), *typed] if typed and is_explicit(given) else []
        named = typed or [(given, opened)] * is_explicit(given)
        return [(context, opened), (ours, opened), *(as_typed or named)]


def _wants_another_context(error: Exception) -> bool:
    """Whether JAX refuses a step for the mesh that is set, or for the kind of its axes."""
    if not isinstance(error, RuntimeError | ValueError | AssertionError):
        return False
    return any(words in str(error) for words in ("set_mesh", "with_sharding_constraint", "type Auto"))


def _by_hand() -> bool:
    """Whether the caller runs on each device's shards, in a `shard_map` or `pmap`: nothing can be split there."""
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def _transforms_types(leaves: Sequence[Any]) -> bool:
    """Whether arrays are being transformed in explicit mode: how derivatives and batches lie, types say already."""
    traced = [leaf for leaf in leaves if isinstance(leaf, jax.core.Tracer)]
    explicit = is_explicit(jax.sharding.get_abstract_mesh())
    return any(explicit or type_sharding(jax.typeof(leaf)) is not None for leaf in traced)


def evaluate(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh,
    in_shardings: Any,
    out_shardings: Any = None,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    ignore_constraints: bool = False,
    kwargs: Mapping[str, Any] | None = None,
    **jit_keywords: Any,
) -> Plan:
    """What a sharding that you wrote by hand costs, in the same report as a plan: nothing is solved for.

    Inner values lie as sharding propagation leaves them; what the layouts leave open is done the cheapest way.

    Args:
        in_shardings: one entry per positional argument, as for `jax.jit`: PartitionSpecs or NamedShardings in a pytree
            that is a prefix of the argument's; None keeps an argument whole on every device, or as its type of explicit
            mode says.
        out_shardings: the same for the result. A result that takes an argument's place lies as that argument.
        ignore_constraints: as for `autoshard`.
        kwargs: keyword arguments of `fn`; they are kept whole.

    Returns:
        A plan with the status "feasible" and no bound; it may pass the memory limit, which is not enforced.

    Raises:
        MeshError: a sharding does not fit its array or the mesh.
    """
    step = autoshard(
        fn, mesh=mesh, memory=memory, topology=topology, ignore_constraints=ignore_constraints, **jit_keywords
    )
    program, options = step.trace(*args, **(kwargs or {})), step._options
    mesh_shape = dict(options.mesh.shape)
    rules = _rules(program, mesh_shape)
    layouts = whole(program) | dict(program.ordered_arguments) | argument_layouts(program, in_shardings, mesh_shape)
    check_jit_takes(program, layouts, mesh_shape)
    ends = {
        result.id: layout
        for i, layout in result_layouts(program, out_shardings, mesh_shape).items()
        if i not in program.carried.values() and isinstance(result := program.results[i], Value)
    }
    formulation = formulate(program, rules, mesh_shape, options.topology, fixed=layouts, backend=options.backend)
    fixed = {program.arguments[i].id: layout for i, layout in layouts.items()} | ends
    solution = as_propagated(formulation, propagate_layouts(program, rules, mesh_shape, fixed).values)
    warnings, comparison = _remarks(formulation, mesh_shape)
    made = Plan.of(make_plan(formulation, solution, options.mesh, warnings), comparison)
    return step.finish(program, replace(made, memory=options.memory)).plan


def verify(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Verification:
    """What XLA makes of a function under `jax.jit` or `autoshard`: its collectives and peak memory, beside predictions.

    Of a function that autoshard did not plan, the predictions are those of `evaluate` for the shardings that its
    arguments and results were compiled with; where these are nothing that can be planned with, none.

    Args:
        fn: a jitted or decorated function.
        *args: arrays or ShapeDtypeStructs, with the shardings that the function is to be compiled for, unless it was
            jitted with shardings. With those of a `target_mesh` it is compiled for a machine that is not there.
        mesh: the mesh; by default that of the arguments' or results' shardings, or of those that `fn` was jitted with.
        kwargs: keyword arguments of `fn`.

    Returns:
        Bytes per kind of collective and step, and peak bytes, of one device: predicted and compiled.

    Raises:
        ArgumentError: the function is not jitted.
        MeshError: there is no mesh to be found.
    """
    kwargs = kwargs or {}
    if isinstance(fn, Autosharded):
        return fn.plan(*args, **kwargs).verify()
    lower: Callable[..., jax.stages.Lowered] | None = getattr(fn, "lower", None)
    if lower is None:
        raise ArgumentError(f"{fn!r} is not jitted; give verify jax.jit(fn, ...) or autoshard(fn, ...)")
    lowered = lower(*args, **kwargs)
    placed = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves((args, kwargs, lowered.out_info))]
    found = compiled(lowered, mesh or mesh_of(placed))
    try:
        in_shardings, _ = found.program.input_shardings
        if kwargs or len(in_shardings) < len(args):
            raise ArgumentError(
                "it has keyword or static arguments, whose shardings evaluate does not take; pass arrays by position, "
                "and close over what is static"
            )
        donated = [all(info.donated for info in jax.tree.leaves(arg)) for arg in lowered.args_info[0]]
        predicted = evaluate(
            fn,
            *args,
            mesh=found.mesh,
            in_shardings=tuple(in_shardings),
            out_shardings=found.program.output_shardings,
            donate_argnums=tuple(i for i, given in enumerate(donated) if given),
        )
    except AutoshardError as error:
        return verification(None, found, found.mesh, unpredicted=str(error))
    # jax.jit leaves out what is not used
    dropped = [one is None for one in jax.tree.leaves(in_shardings, is_leaf=lambda one: one is None)]
    spared = sum(x.local_bytes for x, out in zip(predicted.arguments, dropped, strict=True) if out)
    prediction = replace(predicted.predicted, peak_bytes=predicted.predicted.peak_bytes - spared)
    return verification(prediction, found, found.mesh, plain=True)


def propagate(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh,
    in_specs: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    **jit_keywords: Any,
) -> Propagation:
    """GSPMD-style sharding propagation alone: from the arguments' PartitionSpecs to those of every value.

    Args:
        in_specs: one entry per positional argument: a PartitionSpec, a pytree of them that is a prefix of the
            argument's, or None for an argument whose sharding is open.
        kwargs: keyword arguments of `fn`.

    Returns:
        A PartitionSpec per flat argument, per flat result and per inner value; of these also where each axis came from.

    Raises:
        MeshError: a spec does not fit its array or the mesh.
    """
    program = autoshard(fn, mesh=mesh, **jit_keywords).trace(*args, **(kwargs or {}))
    layouts = argument_layouts(program, in_specs, mesh.shape)
    fixed = {program.arguments[i].id: layout for i, layout in layouts.items()}
    found = propagate_layouts(program, _rules(program, dict(mesh.shape)), dict(mesh.shape), fixed)
    given = dict.fromkeys(value.id for value in (*program.arguments, *program.constants))
    maker: dict[int, Equation | None] = {**given, **program.makers}
    return Propagation(
        arguments=tuple(spec_of(found.values[value.id]) for value in program.arguments),
        outputs=tuple(map(spec_of, found.results)),
        values=tuple(
            PropagatedValue(x, spec_of(found.values[x.id]), maker[x.id], found.origins[x.id])
            for x in program.values
            if x.id in maker
        ),
    )


def _bound(given: Plan, program: Program, options: Options) -> Plan:
    """The plan that the user gave for this program; what else the user fixed has to agree with it."""
    made = given.bound_to(program)
    check_plan(program, made.annotations, dict(options.mesh.shape))
    for i, layout in fixed_layouts(program, options.fixed, dict(options.mesh.shape)).items():
        value, spec = program.arguments[i], made.flat_in_shardings[i].spec
        if layout_of(spec, len(value.shape)) != layout:
            raise ConflictError(
                f"fixed= wants {value} to be {spec_of(layout)}, the plan that is given has it {spec}.\n"
                "Drop one of them, or plan anew with this fixed=."
            )
    return made


_Finish = Callable[[Program, Plan], _Compiled]


def _planned(
    program: Program, options: Options, finish: _Finish, before: dict[str, tuple[tuple[Rule, ...], Plan]]
) -> Plan:
    """The plan of a traced program: that of an equal one planned before, or from the cache, if it is there."""
    rules = _rules(program, dict(options.mesh.shape))
    known = before.get(program.fingerprint)
    if known is not None and known[0] == rules:
        return known[1].bound_to(program)
    made = _cached(program, rules, options, finish)
    if not program.closes_over_tracers:
        before[program.fingerprint] = rules, made
    return made


def _cached(program: Program, rules: tuple[Rule, ...], options: Options, finish: _Finish) -> Plan:
    """The plan of a program, from the cache if it is there."""
    if options.cache is None:
        return _made(program, rules, options, finish)
    key = key_of(program, rules, options)
    found = find(options.cache, key, program, options)
    if found is not None:
        others = Comparison(lambda: alternatives_of(_formulated(program, rules, options)))
        return replace(found, comparison=others)
    made = _made(program, rules, options, finish)
    keep(options.cache, key, made)
    return made


def _formulated(program: Program, rules: Sequence[Rule], options: Options) -> Formulation:
    mesh_shape = dict(options.mesh.shape)
    fixed = fixed_layouts(program, options.fixed, mesh_shape)
    _check_types(program, fixed)
    return formulate(
        program,
        rules,
        mesh_shape,
        options.topology,
        memory=options.memory,
        fixed={**program.ordered_arguments, **fixed},
        beside=dict.fromkeys(program.ordered_arguments.keys() - fixed.keys(), program.open_axes),
        backend=options.backend,
    )


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


def _made(program: Program, rules: Sequence[Rule], options: Options, finish: _Finish) -> Plan:
    """The stages from a traced program to its plan; where several are compiled, the best of them."""
    formulation = _formulated(program, rules, options)
    try:
        solution = solve_within(formulation, options.time_limit)
    except InfeasibleError as error:
        raise _memory_error(program, error, options.backend.usable) from None
    warnings, comparison = _remarks(formulation, dict(options.mesh.shape))

    def planned(solution: Solution) -> Plan:
        return Plan.of(make_plan(formulation, solution, options.mesh, warnings), comparison)

    if options.refine == 1:
        return planned(solution)

    def made(solution: Solution) -> Plan:
        return finish(program, planned(solution)).plan

    return refined(formulation, solution, options, functools.partial(_formulated, program, rules), made)


def _rules(program: Program, mesh: MeshShape) -> tuple[Rule, ...]:
    rules = rules_for(program)
    check_annotations(program, rules, mesh)
    return rules


def _remarks(formulation: Formulation, mesh: MeshShape) -> tuple[tuple[str, ...], Comparison]:
    """What a plan says beside its figures: warnings, and what it is compared with."""
    comparison = Comparison(functools.partial(alternatives_of, formulation))
    return (*_unused_axes(formulation.program, mesh), *formulation.prices.backend.remarks), comparison


def _unused_axes(program: Program, mesh: MeshShape) -> tuple[str, ...]:
    """A remark for every mesh axis that divides no dim of any argument or inner value."""
    sizes = {size for value in program.values for size in value.shape}
    return tuple(
        f"mesh axis {axis!r} ({devices} devices) divides no dim of {program.name}: its dims are "
        f"{', '.join(map(str, sorted(sizes)))}. Every device along it computes the same."
        for axis, devices in mesh.items()
        if devices > 1 and not any(size and size % devices == 0 for size in sizes)
    )


def _memory_error(program: Program, error: InfeasibleError, usable: float) -> MemoryLimitError:
    largest = sorted(program.values, key=lambda value: -value.bytes)[:3]
    listed = "\n".join(f"  {value} {bytes_text(value.bytes)} ({value.source or 'argument'})" for value in largest)
    if program.ordered_arguments:
        listed += f"\n{len(program.ordered_arguments)} arguments lie as their types of explicit mode say; "
        listed += "ignore_constraints=True frees them."
    needed = math.ceil(error.needed)
    unit, size = ("KiB", 2**10) if needed < 32 * 2**20 else ("MiB", 2**20)
    return MemoryLimitError(
        f"no sharding fits in {bytes_text(error.limit)} per device; the smallest limit that does is "
        f"{bytes_text(needed)}, of which {1 - usable:.0%} stay free, as far as predictions can be off.\n"
        f"Largest values, before sharding:\n{listed}\n"
        f"Try memory='{math.ceil(needed / size)}{unit}', a larger mesh, or jax.checkpoint around these lines.",
        budget=error.limit,
        needed=needed,
    )
