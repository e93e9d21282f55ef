"""What a user calls: `autoshard`, `plan`, `evaluate`, `propagate`. They compose the stages and remember the results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, overload

import jax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from autoshard.compiled.verification import (
    Verification,
    compiled,
    mesh_of,
    verification,
    verification_of_wrapped,
    without_dropped,
)
from autoshard.decorated import Parameters, Result, ShardedFunction
from autoshard.errors import ArgumentError, AutoshardError
from autoshard.errors.kinds import checks_kinds
from autoshard.layout import spec_of
from autoshard.mesh.topology import Topology
from autoshard.meshes.mesh_function import MeshChoosingFunction
from autoshard.meshes.places import DevicePlace, axes_in
from autoshard.model.formulating import formulate
from autoshard.model.partitioner.as_jitted import as_jitted
from autoshard.one_jit.function import OneJitFunction
from autoshard.one_jit.plan import OneJitPlan
from autoshard.options import check_jit_keywords, compile_keywords, options_of
from autoshard.padding.kinds import PADDED_FUNCTIONS
from autoshard.padding.padded_stages import staged
from autoshard.planning import checked_rules, described, lowered
from autoshard.plans.alternatives import with_inner_layouts_planned
from autoshard.plans.annotations import Annotations
from autoshard.program import Equation
from autoshard.program.user_code import shows_users_lines
from autoshard.propagation import PropagatedValue, Propagation, propagate_layouts, rules_for
from autoshard.replanning.planner import Replanner
from autoshard.solver.searches.search_run import Search
from autoshard.specs import argument_layouts, check_jit_takes, result_layouts, whole
from autoshard.stage_planning.option_checks import check_combination, check_given, check_statistics
from autoshard.stage_planning.pipeline_plan import PipelinePlan
from autoshard.stages.requests import PipelineRequest
from autoshard.tactics.requests import TacticLike
from autoshard.user_plan import Comparison, Plan, mesh_of_file


@overload
def autoshard(
    fn: Callable[Parameters, Result],
    *,
    mesh: Mesh | AbstractMesh | Literal["auto"],
    memory: str | float | None = None,
    topology: Topology | str | int | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    trips: int | Mapping[str, int] | None = None,
    microbatches: int | str | None = None,
    statistics: Literal["microbatch"] | None = None,
    remat: Literal["auto"] | None = None,
    tactics: Sequence[TacticLike] = (),
    rewrites: Sequence[str] | Literal["auto"] | None = None,
    reductions: Literal["auto"] | None = None,
    like: Plan | str | Path | None = None,
    pad: Literal["batch", "auto"] | None = None,
    pipeline: Mapping[str, Any] | Literal["auto"] | None = None,
    plan: Plan | str | Path | None = None,
    search: str | Search | None = None,
    **jit_keywords: Any,
) -> ShardedFunction[Parameters, Result]: ...


@overload
def autoshard(
    fn: None = None,
    *,
    mesh: Mesh | AbstractMesh | Literal["auto"],
    memory: str | float | None = None,
    topology: Topology | str | int | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    trips: int | Mapping[str, int] | None = None,
    microbatches: int | str | None = None,
    statistics: Literal["microbatch"] | None = None,
    remat: Literal["auto"] | None = None,
    tactics: Sequence[TacticLike] = (),
    rewrites: Sequence[str] | Literal["auto"] | None = None,
    reductions: Literal["auto"] | None = None,
    like: Plan | str | Path | None = None,
    pad: Literal["batch", "auto"] | None = None,
    pipeline: Mapping[str, Any] | Literal["auto"] | None = None,
    plan: Plan | str | Path | None = None,
    search: str | Search | None = None,
    **jit_keywords: Any,
) -> Callable[[Callable[Parameters, Result]], ShardedFunction[Parameters, Result]]: ...


@overload
def autoshard(
    fn: Callable[Parameters, Result], *, like: Plan, **options: Any
) -> ShardedFunction[Parameters, Result]: ...


@overload
def autoshard(
    fn: None = None, *, like: Plan, **options: Any
) -> Callable[[Callable[Parameters, Result]], ShardedFunction[Parameters, Result]]: ...


@shows_users_lines
@checks_kinds("pad", "like", "plan")
def autoshard(
    fn: Callable[..., Any] | None = None,
    *,
    mesh: Mesh | AbstractMesh | Literal["auto"] | None = None,
    memory: str | float | None = None,
    topology: Topology | str | int | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    trips: int | Mapping[str, int] | None = None,
    microbatches: int | str | None = None,
    statistics: Literal["microbatch"] | None = None,
    remat: Literal["auto"] | None = None,
    tactics: Sequence[TacticLike] = (),
    rewrites: Sequence[str] | Literal["auto"] | None = None,
    reductions: Literal["auto"] | None = None,
    like: Plan | str | Path | None = None,
    pad: Literal["batch", "auto"] | None = None,
    pipeline: Mapping[str, Any] | Literal["auto"] | None = None,
    plan: Plan | str | Path | None = None,
    search: str | Search | None = None,
    **jit_keywords: Any,
) -> Any:
    """Shards a train step over a mesh. Use it where `jax.jit` would stand.

    The first call of a signature traces the step, solves for the cheapest sharding of every value, places the inputs,
    compiles and runs; later calls run. What a step changes in nnx modules among its arguments is changed in the
    caller's, as under `nnx.jit`. Leaves that are no arrays are static.

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
            That of `like` by default. ``"auto"``: the mesh, of one to four axes, on which the step is the fastest. It
            is chosen when arguments first come, among meshes over the machine that `topology` names, or over so many
            devices if it is a number, or else over the devices at hand. `Plan.meshes` lists them.
        memory: bytes per device that a step may use, as a number or ``"14GiB"``; the topology's by default. Plans are
            predicted to fill at most 85% of it, on GPU 70%, since predictions can be off. Before a step runs, XLA's
            figure for its compiled program is held against the limit; where that is over, the step is planned again.
            If `memory` is given, `.plan` compiles the step for this as well, on a mesh that has devices.
        topology: what the machine costs, or the name of a preset; guessed from the mesh by default.
        fixed: shardings that arguments must have, by path or glob: ``{"params/embed": P("model", None)}``. Large
            arrays that the step closes over are among them, by the names they have in its code.
        time_limit: seconds that planning may take once the step is traced: then it returns the best plan it has, with
            its proven gap. The search has a quarter of it at least, however long it took to formulate the step. If
            that takes more than 60% of it, only shardings in which all mesh axes split one dim are compared. The limit
            is for all microbatches and recomputation that are tried together; on a mesh of several processes for each
            of these. With ``mesh="auto"`` it is for all meshes.
        cache: a folder in which plans are kept, and found again when the same step is planned for the same mesh,
            machine and options, by this or another process. What is not readable there is ignored with a warning.
        refine: how many plans to compile, to keep the one whose compiled program is best; 1 compiles none. They are the
            cheapest that differ; `autoshard.refine` says which, and what is best. Where microbatches or remat are
            "auto", up to half of them run the step in other ways, predicted to take 5% longer at most. Planning then
            takes the time of up to `refine` more searches and as many compilations. On GPU, up to three more
            compilations choose options of XLA (`Plan.compiler_options`). With ``mesh="auto"`` plans on the fastest mesh
            are compiled.
        ignore_constraints: whether to drop what the step itself says of layouts: `with_sharding_constraint`,
            `reshard`, `out_sharding=`, the types of its arguments in explicit mode, and the names of mesh axes that
            flax keeps beside arrays.
        trips: how often loops of unknown length turn, each `while` whose condition does not tell: a number for all, or
            numbers by line, by the function that the loop stands in, or by a glob of these
            (``{"solver.py:41": 64, "integrate*": 200}``). A guess by default, which the plan names.
        microbatches: in how many parts the batch is run, one after the other, so that activations of one part alone
            are held; gradients are added up between. The batch is the first dim of the arrays that are no state. It is
            proven that this changes nothing but the order of sums; a line that needs the whole batch is an error.
            ``"auto"``: as many as are predicted to be fastest within the memory limit.
        statistics: ``"microbatch"``: a line that needs a sum over the whole batch, as batch normalisation and balance
            losses do, is no error: each microbatch takes the sum over its own rows, as in a loop over microbatches that
            is written by hand. That changes what the step computes; the plan says at which lines.
        remat: ``"auto"``: what the backward pass reads of the forward pass is kept or computed again, whatever is
            predicted to be fastest within the memory limit. What `jax.checkpoint` marks is only a hint then. None:
            what the step says is done.
        tactics: published schemes that restrict the plan, in order: ``[DataParallel("data"), Megatron("model")]``. What
            they leave open is solved for. See `autoshard.tactics`; functions of the step may be among them.
        rewrites: ``"auto"``: the step is rewritten by laws of algebra where that is predicted to be faster on this
            mesh, up to the order of sums: products of one operand as one, products taken out of loops, and others. A
            list of names: by these of `autoshard.rewrites.REWRITES` alone. Plans name what was rewritten and where.
        reductions: ``"auto"``: sums over several mesh axes may also be reduce_scattered over some and all_reduced over
            the others, where that is predicted to be faster, as over the links inside hosts before those between.
        like: the plan of another step, or its file: arguments that both steps take lie as it says. These are what has
            the same keys, shapes and dtypes in both: `params` of an evaluation is `state.params` of a train step.
        pad: ``"batch"``: a batch that the devices do not divide, as the last of an epoch, gets rows of zeros, and the
            results stay those of the batch: sums and means leave these rows out. A step of which this is not certain is
            refused, with the line that stands in the way. ``"auto"``: any dim that the devices do not divide, as a
            vocabulary, heads or the batch, is padded inside the step where that is predicted to be faster. Arguments
            and results keep their shapes, and nothing is refused.
        search: which search chooses, instead of the solver's own: the name of a published one, of those in
            `autoshard.solver.SEARCHES`, or a function like them, as `solve` takes it.
        pipeline: ``dict(stages=4, microbatches=16, schedule="1f1b")``: the step is cut into stages, which run on parts
            of the mesh, a microbatch after the other. The axis called "stage" or "pipe" is theirs, else the first that
            the number of stages divides. `autoshard.pipeline.SCHEDULES` names the orders; `chunks` is the number of
            virtual stages per device for those that have several. Microbatches are exact as under `microbatches`.
            ``backend="one_jit"`` runs equal parts of one loop over layers in lockstep, as one jitted program.
            ``"auto"``: the fastest stages found, of any number, layers and parts of the mesh, in any number of
            microbatches and the best schedule; the plan without stages where that is faster. `Plan.stages` says which.
        plan: a plan made earlier, or its file; it is used instead of solving, and must be for this very program and
            agree with `fixed`.
        **jit_keywords: `static_argnums`, `static_argnames`, `donate_argnums`, `donate_argnames`, `keep_unused`,
            `compiler_options`, as for `jax.jit`.

    Returns:
        A function that behaves as `fn` and has `.plan(...)` and `.lower(...)`.

    Raises:
        AutoshardError: the options contradict each other or the mesh, here; or the arguments, when it is called.
    """
    if mesh is None and isinstance(like, Plan):
        mesh = like.typed_mesh
    meshes: list[Any] = [mesh]
    if isinstance(mesh, str) and mesh == "auto":
        place = DevicePlace.of(topology)
        topology = place.machine
        planned = plan if plan is not None else like
        meshes = place.meshes(axes_in(fixed, tactics)) if planned is None else [place.mesh(_mesh_shape_of(planned))]
    check_jit_keywords(jit_keywords)
    common: dict[str, Any] = {"memory": memory, "topology": topology, "fixed": fixed, "time_limit": time_limit}
    common |= {"cache": cache, "refine": refine, "ignore_constraints": ignore_constraints, "trips": trips}
    common |= {"microbatches": microbatches, "remat": remat, "search": search, "tactics": tactics}
    common |= {"rewrites": rewrites, "reductions": reductions, "statistics": statistics}
    options, *_ = all_options = [options_of(one, **common) for one in meshes]
    is_automatic = isinstance(pipeline, str) and pipeline == "auto"
    request = None if is_automatic else PipelineRequest.of(pipeline)
    if pipeline is not None:
        others = {"pad": pad, "plan": plan, "like": like, "mesh": mesh if isinstance(mesh, str) else None}
        in_stages = request is None or request.backend != "one_jit"
        heeded = ["tactics", "search", *["remat", "rewrites"] * in_stages, *["refine"] * is_automatic]
        heeded += ["pad"] * (in_stages and pad == "batch")
        check_combination("pipeline=", options, others, heeded=heeded, takes_uneven=in_stages)
    given, shared = _given_plan(plan, options.mesh), _given_plan(like, options.mesh)
    check_given(given, shared, options, pad)
    check_statistics(options, is_in_parts=any(one is not None for one in (microbatches, pipeline, given)))
    options = replace(options, like=shared)

    def decorate(fn: Callable[Parameters, Result]) -> ShardedFunction[Parameters, Result]:
        if isinstance(given, PipelinePlan):
            return staged(fn, pad, given.request, given, options=options, jit_keywords=jit_keywords)
        if isinstance(given, OneJitPlan):
            return OneJitFunction(fn, options=options, jit_keywords=jit_keywords, request=given.asked, given=given)
        if request is not None and request.backend == "one_jit":
            return OneJitFunction(fn, options=options, jit_keywords=jit_keywords, request=request)
        if request is not None or is_automatic:
            return staged(fn, pad, request, options=options, jit_keywords=jit_keywords)
        kind: type[ShardedFunction[Any, Any]] = PADDED_FUNCTIONS[pad]
        if mesh == "auto" and plan is None and like is None:
            return MeshChoosingFunction(fn, options=all_options, jit_keywords=jit_keywords, kind=kind)
        return kind(fn, options=options, jit_keywords=jit_keywords, given=given)

    return decorate if fn is None else decorate(fn)


def _mesh_shape_of(plan: Plan | str | Path) -> dict[str, int]:
    """The axes of the mesh that a plan, or the one in a file, was made for."""
    return dict(plan.mesh.shape if isinstance(plan, Plan) else mesh_of_file(plan).shape)


def _given_plan(plan: Plan | str | Path | None, mesh: Mesh | AbstractMesh) -> Plan | None:
    """A plan that the user gave, or its file, on a mesh of the same axes."""
    return plan.on(mesh) if isinstance(plan, Plan) else None if plan is None else Plan.load(plan, mesh)


@shows_users_lines
@checks_kinds("fn", "kwargs")
def plan(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh | Literal["auto"] | None = None,
    memory: str | float | None = None,
    topology: Topology | str | int | None = None,
    fixed: Mapping[str, PartitionSpec] | None = None,
    time_limit: float = 60.0,
    cache: str | Path | None = None,
    refine: int = 1,
    ignore_constraints: bool = False,
    trips: int | Mapping[str, int] | None = None,
    microbatches: int | str | None = None,
    statistics: Literal["microbatch"] | None = None,
    remat: Literal["auto"] | None = None,
    tactics: Sequence[TacticLike] = (),
    rewrites: Sequence[str] | Literal["auto"] | None = None,
    reductions: Literal["auto"] | None = None,
    like: Plan | str | Path | None = None,
    search: str | Search | None = None,
    pipeline: Mapping[str, Any] | Literal["auto"] | None = None,
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
        MicrobatchError: some line of `fn` needs the whole batch, and `microbatches` asks for parts of it.
        ArgumentError: an option is of the wrong kind.
    """
    options: dict[str, Any] = {"memory": memory, "topology": topology, "fixed": fixed, "time_limit": time_limit}
    options |= {"cache": cache, "trips": trips, "microbatches": microbatches, "remat": remat}
    options |= {"tactics": tactics, "rewrites": rewrites, "like": like, "search": search}
    options |= {"pipeline": pipeline, "reductions": reductions, "statistics": statistics}
    step = autoshard(fn, mesh=mesh, refine=refine, ignore_constraints=ignore_constraints, **options, **jit_keywords)
    return step.plan(*args, **(kwargs or {}))


@shows_users_lines
@checks_kinds("fn", "kwargs")
def evaluate(
    fn: Callable[..., Any],
    *args: Any,
    mesh: Mesh | AbstractMesh,
    in_shardings: Any,
    out_shardings: Any = None,
    memory: str | float | None = None,
    topology: Topology | str | None = None,
    ignore_constraints: bool = False,
    trips: int | Mapping[str, int] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **jit_keywords: Any,
) -> Plan:
    """What a sharding that you wrote by hand costs under `jax.jit`, in the report of a plan: nothing is solved for.

    Inner values lie as sharding propagation leaves them, and are resharded as XLA does it. `alternatives` has
    a row "inner layouts planned" if layouts of our own are faster for the same arguments.

    Args:
        in_shardings: one entry per positional argument, as for `jax.jit`: PartitionSpecs or NamedShardings in a pytree
            that is a prefix of the argument's; None keeps an argument whole on every device, or as its type of explicit
            mode says.
        out_shardings: the same for the result. A result that takes an argument's place lies as that argument.
        ignore_constraints: as for `autoshard`.
        trips: as for `autoshard`.
        kwargs: keyword arguments of `fn`; they are kept whole.

    Returns:
        A plan with the status "feasible" and no bound; it may pass the memory limit, which is not enforced.

    Raises:
        MeshError: a sharding does not fit its array or the mesh.
    """
    options = options_of(mesh, memory=memory, topology=topology, ignore_constraints=ignore_constraints, trips=trips)
    check_jit_keywords(jit_keywords)
    traced = functools.partial(ShardedFunction, fn, options=options, jit_keywords=jit_keywords)
    program = traced().trace(*args, **(kwargs or {}))
    as_written = traced(merges=False).trace(*args, **(kwargs or {}))  # Shardy comes before XLA merges anything
    mesh_shape, machine = dict(options.mesh.shape), (options.topology, options.backend)
    rules = checked_rules(program, mesh_shape)
    layouts = whole(program) | dict(program.ordered_arguments) | argument_layouts(program, in_shardings, mesh_shape)
    check_jit_takes(program, layouts, mesh_shape)
    ends = result_layouts(program, out_shardings, mesh_shape)
    formulation, solution = as_jitted(as_written, rules_for(as_written), mesh_shape, *machine, layouts, ends)
    made = described(formulation, solution, options)
    made = replace(made, fingerprint=program.fingerprint, annotations=Annotations({}, {}, {}), memory=options.memory)
    planned = functools.partial(
        formulate, program, rules, mesh_shape, options.topology, fixed=layouts, backend=options.backend
    )
    comparison = Comparison(lambda: with_inner_layouts_planned(made.predicted, planned()))
    planner = Replanner(program, options, compile_keywords(jit_keywords), layouts, {}, is_given=True)
    return planner.bound(lowered(program, Plan.of(made, comparison), compile_keywords(jit_keywords)))


@shows_users_lines
@checks_kinds("fn", "mesh", "kwargs")
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
    if isinstance(fn, ShardedFunction):
        return fn.plan(*args, **kwargs).verify()
    lower: Callable[..., jax.stages.Lowered] | None = getattr(fn, "lower", None)
    if lower is None:
        raise ArgumentError(f"{fn!r} is not jitted; give verify jax.jit(fn, ...) or autoshard(fn, ...)")
    lowered = lower(*args, **kwargs)
    if not isinstance(lowered, jax.stages.Lowered):
        return verification_of_wrapped(fn, lowered, mesh or mesh_of((args, kwargs)))
    found = compiled(lowered, mesh or mesh_of((args, kwargs, lowered.out_info)))
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
        return verification(None, found, unpredicted=str(error))
    prediction = without_dropped(predicted.predicted, found, predicted.arguments)
    constants = sum(one.local_bytes for one in predicted.captured)  # as jit has them: XLA's account leaves them out
    prediction = replace(prediction, peak_bytes=prediction.peak_bytes - constants)
    return verification(prediction, found)


@shows_users_lines
@checks_kinds("fn", "kwargs")
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
    check_jit_keywords(jit_keywords)
    # Shardy propagates before XLA merges what is computed twice.
    as_written = ShardedFunction(fn, options=options_of(mesh), jit_keywords=jit_keywords, merges=False)
    program = as_written.trace(*args, **(kwargs or {}))
    layouts = argument_layouts(program, in_specs, mesh.shape)
    fixed = {program.arguments[i].id: layout for i, layout in layouts.items()}
    found = propagate_layouts(program, checked_rules(program, dict(mesh.shape)), dict(mesh.shape), fixed)
    given = dict.fromkeys(value.id for value in (*program.arguments, *program.constants))
    maker: dict[int, Equation | None] = {**given, **program.makers}
    return Propagation(
        arguments=tuple(spec_of(found.values[value.id]) for value in program.own_arguments),
        outputs=tuple(map(spec_of, found.results)),
        values=tuple(
            PropagatedValue(x, spec_of(found.values[x.id]), maker[x.id], found.origins[x.id])
            for x in program.values
            if x.id in maker
        ),
    )
