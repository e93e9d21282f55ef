"""A traced step and the shardings of its inner values in, the annotated function out.

The step's jaxpr is run again, equation by equation, with a `with_sharding_constraint` on every value whose sharding the
plan decided. `scan`, `while`, `cond`, `jax.checkpoint` and custom derivatives stay what they are.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
from autoshard.explicit import open_axes, type_sharding
from autoshard.jaxprs import (
    CONSTRAINTS,
    CUSTOM,
    HOST,
    NO_MESH,
    REMAT,
    ClosedJaxpr,
    JaxprEqn,
    Literal,
    called_jaxpr,
    called_operands,
    devices_put_on,
    equations_of,
    guards,
    is_array,
    is_kernel,
    on_host,
    run,
    said,
    scan_counts,
)
from autoshard.layout import Layout, spec_of
from autoshard.mesh.resharding import stops
from autoshard.on_shards import Split, may_run_on_shards, on_shards, runs_on_shards, wants_of
from autoshard.plans.annotations import Annotations
from autoshard.plans.plan import PlacedArray, PlanData
from autoshard.program import Equation, Program, Value


@dataclass(frozen=True)
class _Held:
    """An array of the running program, with the resharded copy that its readers share."""

    array: Any
    layout: Layout | None = None  # None: the plan says nothing of it
    copy: Any = None
    copy_layout: Layout | None = None

    @property
    def shell(self) -> _Held:
        """Its layouts alone: what may outlive the trace that the arrays belong to."""
        return _Held(None, self.layout, None, self.copy_layout)


class Step:
    """The annotated step under `jax.jit`, sharded and donated as planned.

    It is called as the function that was traced, static arguments left out, and with arguments of the same types.
    """

    def __init__(self, program: Program, plan: PlanData, **jit_keywords: Any):
        self._program, self._plan = program, plan
        results = [placed.layout for placed in plan.results]
        self._emitter = emitter = _Emitter(program, plan.annotations, plan.mesh, results)

        def run(*arguments: Any) -> tuple:
            return _typed(emitter.run(*map(emitter.untyped, arguments)), plan)

        closed = program.jaxpr
        self.flat = jax.jit(  # from flat arguments to flat results
            run,
            in_shardings=_of_arrays(plan.flat_in_shardings, closed.in_avals),
            out_shardings=_of_arrays(plan.flat_out_shardings, closed.out_avals),
            donate_argnums=tuple(sorted(program.donated)),
            **jit_keywords,
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.result(self.flat(*jax.tree.leaves((args, kwargs))))

    def result(self, leaves: Sequence[Any]) -> Any:
        """What the function returns, of its leaves."""
        return jax.tree.unflatten(self._program.out_tree.structure, leaves)

    @cached_property
    def transformed(self) -> Callable[..., tuple]:
        """As `flat`, for arguments that `jax.vmap` or the like has made more of than arrays of their shape.

        They cannot be placed, so they are constrained, which can be batched.
        """
        plan, constrained = self._plan, self._emitter.constrained

        def run(*arguments: Any) -> tuple:
            placed = [constrained(x, to.layout) for x, to in zip(arguments, plan.arguments, strict=True)]
            results = zip(self._emitter.run(*placed), plan.results, strict=True)
            return tuple(constrained(x, to.layout) for x, to in results)

        return jax.jit(run)


def _typed(results: Sequence[Any], plan: PlanData) -> tuple:
    """Results on the axes that they lie on: those of the user's mesh, where they have types of explicit mode."""
    if plan.axis_types is None:
        return tuple(results)
    mesh = plan.typed_mesh.abstract_mesh

    def typed(array: Any, to: PlacedArray) -> Any:
        if not to.typed or not is_array(jax.typeof(array)):
            return array
        kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
        named = (tuple(axis for axis in axes if kinds[axis] is AxisType.Explicit) for axes in to.layout)
        return jax.sharding.reshard(array, PartitionSpec(*(axes or None for axes in named)))

    with jax.sharding.use_abstract_mesh(mesh):
        return tuple(map(typed, results, plan.results))


def _of_arrays(shardings: Sequence[NamedSharding], avals: Sequence[Any]) -> tuple[NamedSharding | None, ...]:
    return tuple(sharding if is_array(aval) else None for sharding, aval in zip(shardings, avals, strict=True))


@dataclass(frozen=True, eq=False)
class Lowering:
    """A program and its plan under `jax.jit`; called, it lowers them for arguments as the plan places them."""

    program: Program
    plan: PlanData
    jit_keywords: Mapping[str, Any]

    @cached_property
    def step(self) -> Step:
        return Step(self.program, self.plan, **self.jit_keywords)

    def __call__(self, mesh: Mesh | AbstractMesh | None = None) -> jax.stages.Lowered:
        """For the plan's mesh, or another of the same axes; on a mesh without devices, lowered for TPU."""
        if mesh is not None and mesh is not self.plan.mesh:
            return Lowering(self.program, self.plan.on(mesh), self.jit_keywords)()
        arguments = [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)
            if is_array(aval)
            else jax.lax.create_token()
            for aval, sharding in zip(self.program.jaxpr.in_avals, self.plan.flat_in_shardings, strict=True)
        ]
        platforms = None if isinstance(self.plan.mesh, Mesh) else ("tpu",)
        with named_refusals(self.program, self.plan.mesh):
            return self.step.flat.trace(*arguments).lower(lowering_platforms=platforms)


@contextlib.contextmanager
def named_refusals(program: Program, mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """What `jax.jit` refuses of a program on several devices, in the user's words.

    Raises:
        MeshError: the program has effects whose order several devices do not keep, or is to run on other devices, too.
    """
    try:
        yield
    except ValueError as error:
        if "Received incompatible devices" in str(error):
            raise MeshError(_elsewhere(program, mesh, error)) from error
        if "ordered effects are not supported" not in str(error):
            raise
        lines = dict.fromkeys(str(equation.source) for equation in program.equations if not equation.outputs)
        raise MeshError(
            f"{program.name} has effects whose order matters, and {mesh.size} devices keep none: {', '.join(lines)}.\n"
            "Drop ordered=True there, or use a mesh of one device."
        ) from None


def _elsewhere(program: Program, mesh: Mesh | AbstractMesh, error: ValueError) -> str:
    """Which devices a program names that are not those of its mesh."""
    ours = sorted(device.id for device in mesh.devices.flat) if isinstance(mesh, Mesh) else []
    named: dict[str, list[int]] = {}
    for equation in program.equations:
        if equation.primitive == "device_put":
            named[str(equation.source or "unknown line")] = devices_put_on(equation.params)
    named = {line: ids for line, ids in named.items() if ids and ids != ours}
    where = f"on devices {ours}, those of the mesh {dict(mesh.shape)}"
    if named:
        lines = ", ".join(f"at {line} puts arrays on devices {ids}" for line, ids in named.items())
        return f"{program.name} runs {where}, but {lines}.\nLeave the device out there: the plan says where arrays lie."
    context = jax.sharding.get_mesh()
    if not context.empty and {device.id for device in context.devices.flat} != set(ours):
        return (
            f"{program.name} runs {where}, but the mesh that is set has other ones: {dict(context.shape)}.\n"
            "Call it outside of that jax.set_mesh, or give autoshard the mesh that is set."
        )
    return f"{program.name} runs {where}, and JAX refuses it: {error}\nGive autoshard a mesh of the devices it names."


def annotated(program: Program, annotations: Annotations, mesh: Mesh | AbstractMesh) -> Callable[..., list]:
    """`program` as a function from flat arguments to flat results, its inner values sharded as `annotations` say."""
    return _Emitter(program, annotations, mesh).run


class _Emitter:
    def __init__(
        self,
        program: Program,
        annotations: Annotations,
        mesh: Mesh | AbstractMesh,
        results: Sequence[Layout] | None = None,  # where they are to lie, if anywhere else than made
    ):
        self.program, self.annotations, self.mesh, self.wanted = program, annotations, mesh, results
        self.equations: Mapping[tuple, Equation] = {equation.path: equation for equation in program.equations}
        self.pins = _pins(program, annotations)

    def run(self, *arguments: Any) -> list:
        # whatever mesh the caller has set, be it of another size
        with jax.sharding.use_abstract_mesh(NO_MESH), jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self.results(arguments)

    def results(self, arguments: Sequence[Any]) -> list:
        closed = self.program.jaxpr
        env = {}
        for i, (var, array) in enumerate(zip(closed.jaxpr.invars, arguments, strict=True)):
            with jax.named_scope(f"arguments[{i}]"):  # what XLA calls the argument itself
                env[var] = self.held(self.program.arguments[i].id, array)
        env |= {
            var: self.held(value.id, self.untyped(array))
            for var, value, array in zip(closed.jaxpr.constvars, self.program.constants, closed.consts, strict=True)
        }
        made = self.body(closed, env, ())
        if self.wanted is None:
            return [held.array for held in made]
        return [self.on_the_way(held, want) for held, want in zip(made, self.wanted, strict=True)]

    # Arrays and their shardings.

    def untyped(self, array: Any) -> Any:
        """An array on Auto axes, whatever its type says."""
        if type_sharding(jax.typeof(array)) is None:
            return array
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return jax.sharding.reshard(array, PartitionSpec(*[None] * array.ndim))

    def constrained(self, array: Any, layout: Layout | None) -> Any:
        if not layout or not is_array(jax.typeof(array)):  # nothing is said of it, it has no dims, or no layout
            return array
        memory_kind = HOST if on_host(jax.typeof(array)) else None
        sharding = NamedSharding(self.mesh, spec_of(layout), memory_kind=memory_kind)
        return jax.lax.with_sharding_constraint(array, sharding)

    def constrained_to(self, array: Any, sharding: NamedSharding | None) -> Any:
        """The user's own constraint, on our mesh."""
        if sharding is None or open_axes(sharding.mesh):  # the plan says how it lies along these, too
            return array
        ours = NamedSharding(self.mesh, sharding.spec, memory_kind=sharding.memory_kind)
        return jax.lax.with_sharding_constraint(array, ours)

    def resharded(self, array: Any, source: Layout | None, target: Layout | None) -> Any:
        """An array from one layout to another, by way of those that XLA needs; from None: it may lie in any."""
        if source and target and is_array(jax.typeof(array)):
            for stop in stops(source, target, self.mesh.shape):
                array = self.constrained(array, stop)
        return self.constrained(array, target)

    def on_the_way(self, held: _Held, want: Layout) -> Any:
        """A result where `out_shardings` can take it from."""
        if held.layout and is_array(jax.typeof(held.array)) and (way := stops(held.layout, want, self.mesh.shape)):
            return self.resharded(held.array, held.layout, way[-1])
        return held.array

    def held(self, value: int, array: Any) -> _Held:
        """The array of a value, pinned to the layout it is made in, and its shared copy."""
        home, pin, made_in = self.annotations.homes.get(value), self.pins.get(value), self.annotations.sums.get(value)
        array = self.resharded(self.constrained(array, made_in), made_in, pin)
        copy_layout = self.annotations.copies.get(value)
        copy = None if copy_layout is None else self.resharded(array, home, copy_layout)
        return _Held(array, home, copy, copy_layout)

    def read(self, held: _Held, equation: Equation | None, operand: int) -> Any:
        """The array as this operand wants it."""
        want = None if equation is None else self.annotations.wants.get((equation.index, operand))
        if want is None or want == held.layout:
            return held.array
        if held.copy_layout is None:
            return self.resharded(held.array, held.layout, want)
        return held.copy if want == held.copy_layout else self.resharded(held.copy, held.copy_layout, want)

    def behind_barrier(self, operands: Sequence[_Held]) -> list[_Held]:
        """All of them behind one barrier: what is computed from one waits for the others.

        Says the shardings again: propagation passes through a barrier, and would pick others behind it.
        """
        pairs = jax.lax.optimization_barrier([(held.array, held.copy) for held in operands])
        return [
            _Held(
                self.constrained(array, held.layout),
                held.layout,
                self.constrained(copy, held.copy_layout),
                held.copy_layout,
            )
            for held, (array, copy) in zip(operands, pairs, strict=True)
        ]

    def made(self, equation: Equation | None, arrays: Sequence[Any]) -> list[_Held]:
        if equation is None:  # nobody reads these
            return [_Held(array) for array in arrays]
        return [self.held(value.id, array) for value, array in zip(equation.outputs, arrays, strict=True)]

    # Equations.

    def body(self, closed: ClosedJaxpr, env: dict, path: tuple) -> list[_Held]:
        equations = equations_of(closed.jaxpr)
        for i, eqn in enumerate(equations):
            first = self.program.merged.get((*path, i))
            if first is None:
                operands = [_operand(env, atom) for atom in eqn.invars]
                results = self.equation(eqn, operands, (*path, i))
            else:
                results = [env[var] for var in equations[first].outvars]
            env.update(zip(eqn.outvars, results, strict=True))
        return [_operand(env, atom) for atom in closed.jaxpr.outvars]

    def call(self, closed: ClosedJaxpr, entries: Sequence[_Held], path: tuple) -> list[_Held]:
        env = dict(zip(closed.jaxpr.invars, entries, strict=True))
        env |= {
            var: _Held(self.untyped(const)) for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        }
        return self.body(closed, env, path)

    def equation(self, eqn: JaxprEqn, operands: list[_Held], path: tuple) -> list[_Held]:
        scope = _scope(eqn, self.equations.get(path))
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            return self.emitted(eqn, operands, path)

    def emitted(self, eqn: JaxprEqn, operands: list[_Held], path: tuple) -> list[_Held]:
        name, opened = eqn.primitive.name, called_jaxpr(eqn)
        if opened is not None and name in CUSTOM:
            return self.custom(eqn, opened, operands, path)
        if name in REMAT:
            return self.remat(eqn, operands, path)
        if opened is not None:
            return self.call(opened, called_operands(eqn, operands), path)
        special = {"scan": self.scan, "while": self.while_loop, "cond": self.cond}.get(name)
        if special is not None:
            return special(eqn, operands, path)
        equation = self.equations.get(path)
        if name in CONSTRAINTS:
            array = self.read(operands[0], equation, 0)
            return self.made(equation, [self.constrained_to(array, said(eqn.params))])
        arrays = [self.read(held, equation, i) for i, held in enumerate(operands)]
        return self.made(equation, self.results_of(eqn, equation, arrays))

    def results_of(self, eqn: JaxprEqn, equation: Equation | None, arrays: list) -> list:
        if is_kernel(eqn):
            return self.kernel(eqn, arrays)
        homes = [self.annotations.homes.get(value.id) for value in equation.outputs] if equation else []
        if eqn.primitive.name == "dynamic_update_slice":
            arrays = _within_bounds(arrays, *homes)
        if eqn.primitive.name.startswith("scatter"):
            arrays = _apart_from_slices(eqn, arrays, *homes)
        if None in homes or equation is None:
            return run(eqn, arrays)
        scatter, wants = self.annotations.scatters.get(equation.index), wants_of(equation, self.annotations)
        if scatter is None and not may_run_on_shards(equation):
            return run(eqn, arrays)
        split = Split.of(equation, wants, dict(self.mesh.shape))
        if scatter is None and not runs_on_shards(equation, split):
            return run(eqn, arrays)
        function = on_shards(eqn, equation, split, scatter)
        return self.on_shards(
            function, arrays, list(map(spec_of, wants)), [spec_of(home) for home in homes if home is not None]
        )

    def kernel(self, eqn: JaxprEqn, arrays: Sequence[Any]) -> list:
        """Runs a kernel whole on every device: compilers refuse to split one, and have to be told so."""
        whole = PartitionSpec()
        return self.on_shards(
            lambda *shards: run(eqn, shards), arrays, [whole] * len(arrays), [whole] * len(eqn.outvars)
        )

    def on_shards(self, function: Callable, arrays: Sequence[Any], in_specs: Sequence, out_specs: Any) -> Any:
        """What every device makes of its shards, which the partitioner does not look into."""
        by_hand = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
        )
        return by_hand(*arrays)

    def custom(self, eqn: JaxprEqn, opened: ClosedJaxpr, operands: list[_Held], path: tuple) -> list[_Held]:
        """Runs the annotated body; differentiates by the rule the user gave."""
        shells = [held.shell for held in operands]
        made: list[_Held] = []

        @jax.custom_jvp
        def call(arrays, copies):
            entries = [
                _Held(array, shell.layout, copy, shell.copy_layout)
                for shell, array, copy in zip(shells, arrays, copies, strict=True)
            ]
            results = self.call(opened, called_operands(eqn, entries), path)
            made[:] = [held.shell for held in results]
            return [held.array for held in results], [held.copy for held in results]

        @call.defjvp
        def derivative(primals, tangents):
            (arrays, copies), (tangent_arrays, _) = primals, tangents
            _, out_tangents = jax.jvp(lambda *args: run(eqn, args), tuple(arrays), tuple(tangent_arrays))
            out_arrays, out_copies = call(arrays, copies)
            copy_tangents = [None if c is None else t for c, t in zip(out_copies, out_tangents, strict=True)]
            return (out_arrays, out_copies), (out_tangents, copy_tangents)

        arrays, copies = call([held.array for held in operands], [held.copy for held in operands])
        return [
            _Held(array, held.layout, copy, held.copy_layout)
            for held, array, copy in zip(made, arrays, copies, strict=True)
        ]

    def remat(self, eqn: JaxprEqn, operands: list[_Held], path: tuple) -> list[_Held]:
        """In a backward pass a barrier keeps XLA from undoing the recomputation, as JAX's own lowering does.

        Cotangents are among its operands, so that the recomputation waits for the backward pass to come to it.
        """
        opened = called_jaxpr(eqn)
        assert opened is not None, "a checkpoint calls one"
        if eqn.params["differentiated"]:
            guarded = guards(eqn)
            behind = iter(self.behind_barrier(list(itertools.compress(operands, guarded))))
            entries = [next(behind) if guard else held for held, guard in zip(operands, guarded, strict=True)]
            return self.call(opened, entries, path)
        made: list[_Held] = []

        def body():
            results = self.call(opened, operands, path)
            made[:] = [held.shell for held in results]
            return [(held.array, held.copy) for held in results]

        pairs = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])()
        return [
            _Held(array, held.layout, copy, held.copy_layout) for held, (array, copy) in zip(made, pairs, strict=True)
        ]

    def crossing(self, held: _Held, path: tuple, operand: int = 0) -> Any:
        """A value as a boundary equation wants it."""
        return self.read(held, self.equations.get(path), operand)

    def entered(self, array: Any, path: tuple, output: int = 0) -> _Held:
        """What a boundary equation makes of an array on the other side."""
        equation = self.equations.get(path)
        return _Held(array) if equation is None else self.held(equation.outputs[output].id, array)

    def scan(self, eqn: JaxprEqn, operands: list[_Held], path: tuple) -> list[_Held]:
        params, (consts, carries) = eqn.params, scan_counts(eqn)
        outside = self.loop_operands(operands, path, consts, carries)
        const_arrays, carry_arrays, stacks = (
            outside[:consts],
            outside[consts : consts + carries],
            outside[consts + carries :],
        )

        def step(carry, slices):
            entries = self.loop_entries(const_arrays, carry, path)
            entries += [self.entered(array, (*path, "slice", i)) for i, array in enumerate(slices)]
            results = self.call(params["jaxpr"], entries, path)
            handed_on = self.handed_on(results[:carries], path)
            return handed_on, [self.crossing(x, (*path, "stack", i)) for i, x in enumerate(results[carries:])]

        finals, stacked = jax.lax.scan(
            step, carry_arrays, stacks, length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
        )
        return [self.entered(array, (*path, "carry", i), output=1) for i, array in enumerate(finals)] + [
            self.entered(array, (*path, "stack", i)) for i, array in enumerate(stacked)
        ]

    def while_loop(self, eqn: JaxprEqn, operands: list[_Held], path: tuple) -> list[_Held]:
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        outside = self.loop_operands(operands, path, consts, len(operands) - consts)

        def going_on(entries):
            (result,) = self.call(params["cond_jaxpr"], entries[:tests] + entries[consts:], (*path, "test"))
            return result.array

        def test(carry):
            return going_on(self.loop_entries(outside[:consts], carry, path)).any()

        def body(carry):
            entries = self.loop_entries(outside[:consts], carry, path)
            handed_on = self.handed_on(self.call(params["body_jaxpr"], entries[tests:], (*path, "body")), path)
            if not params["cond_jaxpr"].out_avals[0].shape:
                return handed_on
            still = going_on(entries)  # one flag per loop of a batch that vmap made: each stops on its own
            return [_where(still, new, old) for new, old in zip(handed_on, carry, strict=True)]

        finals = jax.lax.while_loop(test, body, outside[consts:])
        return [self.entered(array, (*path, "carry", i), output=1) for i, array in enumerate(finals)]

    def loop_operands(self, operands: list[_Held], path: tuple, consts: int, carries: int) -> list:
        kinds = [("const", i) for i in range(consts)] + [("carry", i) for i in range(carries)]
        kinds += [("slice", i) for i in range(len(operands) - len(kinds))]
        return [self.crossing(held, (*path, *kind)) for held, kind in zip(operands, kinds, strict=True)]

    def loop_entries(self, consts: list, carry: list, path: tuple) -> list[_Held]:
        entries = [self.entered(array, (*path, "const", i)) for i, array in enumerate(consts)]
        return entries + [self.entered(array, (*path, "carry", i)) for i, array in enumerate(carry)]

    def handed_on(self, results: list[_Held], path: tuple) -> list:
        return [self.crossing(held, (*path, "carry", i), operand=1) for i, held in enumerate(results)]

    def cond(self, eqn: JaxprEqn, operands: list[_Held], path: tuple) -> list[_Held]:
        def branch(b: int, closed: ClosedJaxpr) -> Callable[[], list]:
            def taken():
                entries = []
                for i, held in enumerate(operands[1:]):
                    const = (*path, b, "const", i)
                    entries.append(self.entered(self.crossing(held, const), const))
                results = self.call(closed, entries, (*path, b))
                return [self.crossing(held, (*path, "join", i), operand=b) for i, held in enumerate(results)]

            return taken

        branches = [branch(b, closed) for b, closed in enumerate(eqn.params["branches"])]
        platforms = eqn.params.get("branches_platforms")
        if platforms is None:
            arrays = jax.lax.switch(operands[0].array, branches)
        else:  # which one is taken is known when the step is lowered, and only that one is
            taken_on = {name: taken for names, taken in zip(platforms, branches, strict=True) for name in names or ()}
            default = next((taken for names, taken in zip(platforms, branches, strict=True) if names is None), None)
            arrays = jax.lax.platform_dependent(default=default, **taken_on)
        return [self.entered(array, (*path, "join", i)) for i, array in enumerate(arrays)]


def _scope(eqn: JaxprEqn, equation: Equation | None) -> str:
    """What the operations of an equation are called in the compiled program: the user's names, line, and its index.

    The emitted operations come from lines of this file; `compiled/collectives.py` reads the user's back from here.
    """
    names = str(eqn.source_info.name_stack)
    return "/".join(filter(None, [names, None if equation is None else equation.label]))


def _within_bounds(arrays: Sequence[Any], layout: Layout | None = None) -> list:
    """Operands of a `dynamic_update_slice`, an update of one element along a dim that may be split inside the array.

    XLA's partitioner drops such an update if it is out of bounds; the operation itself moves it to the nearest element.

    Args:
        arrays: the array, the update, and where it starts along each dim.
        layout: of the result, if the plan says it.
    """
    array, update, *starts = arrays
    split = [True] * array.ndim if layout is None else map(bool, layout)
    return [array, update, *(
        jnp.clip(start, 0, min(size - 1, jnp.iinfo(start.dtype).max)) if one == 1 < size and may_be else start
        for start, size, one, may_be in zip(starts, array.shape, update.shape, split, strict=True)
    )]  # fmt: skip


def _apart_from_slices(eqn: JaxprEqn, arrays: Sequence[Any], layout: Layout | None = None) -> list:
    """Operands of a scatter; what a single update goes into along a split dim is not simplified with what made it.

    A device whose shard the update misses reads and writes back an element of the edge. If the shard is sliced out of a
    larger array, XLA makes one slice of both and forgets the edge: it writes back an element of another shard.

    Args:
        eqn: the scatter.
        arrays: the array, the indices and the updates.
        layout: of the result, if the plan says it.
    """
    array, indices, *updates = arrays
    indexed = eqn.params["dimension_numbers"].scatter_dims_to_operand_dims
    may_be_split = layout is None or any(layout[dim] for dim in indexed)
    if may_be_split and math.prod(indices.shape[:-1]) == 1:
        array = jax.lax.optimization_barrier(array)
    return [array, indices, *updates]


def _pins(program: Program, annotations: Annotations) -> dict[int, Layout]:
    """The constraints of inner values: value -> layout. All that was planned, but arguments and what follows.

    Of a product that is only transposed, as gradients of weights are, the transposed one gets the constraint: XLA makes
    the product in that order then, and would otherwise turn all that meets the gradient, weight and moments, round.
    """
    arguments = {value.id for value in program.arguments}
    free = arguments | set(annotations.implied)
    pins = {value: layout for value, layout in annotations.homes.items() if value not in free}
    for product, equation in _turned(program, annotations):
        if product in free:
            continue
        home = pins.pop(product)
        pins[equation.outputs[0].id] = tuple(home[dim] for dim in equation.params["permutation"])
    return pins


def _turned(program: Program, annotations: Annotations) -> Iterator[tuple[int, Equation]]:
    """Products that nothing but a transpose reads, and that as they are."""
    products = {
        equation.outputs[0].id
        for equation in program.equations
        if equation.primitive == "dot_general" and equation.index not in annotations.scatters
    }
    readers = Counter(value.id for value in program.results if isinstance(value, Value))
    readers.update(x.id for equation in program.equations for x in equation.inputs if isinstance(x, Value))
    for equation in program.equations:
        if equation.primitive == "transpose" and isinstance(product := equation.inputs[0], Value):
            home = annotations.homes.get(product.id)
            as_is = annotations.wants.get((equation.index, 0), home) == home
            if product.id in products and home is not None and readers[product.id] == 1 and as_is:
                yield product.id, equation


def _where(flags: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The rows of `new` whose flag is set, else those of `old`; flags stand for leading dims."""
    return jnp.where(flags.reshape(*flags.shape, *[1] * (new.ndim - flags.ndim)), new, old)


def _operand(env: Mapping, atom: Any) -> _Held:
    return _Held(atom.val) if isinstance(atom, Literal) else env[atom]
