"""A traced step and the shardings of its inner values in, the annotated function out.

The step's jaxpr is run again, equation by equation, with a `with_sharding_constraint` on every value whose sharding the
plan decided. `scan`, `while`, `cond`, `jax.checkpoint` and custom derivatives stay what they are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from autoshard.errors import MeshError
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
    equations_of,
    guards,
    is_array,
    is_kernel,
    on_host,
    run,
    said,
    scan_counts,
    uncaptured,
)
from autoshard.layout import Layout, spec_of
from autoshard.lower.constraints import constraints_of
from autoshard.lower.halos import run_stencil, run_whole
from autoshard.lower.names import first_readers, named_after, named_as, reader_in
from autoshard.lower.on_shards import EquationSplit, may_run_on_shards, on_shards, runs_on_shards, wants_of
from autoshard.lower.sharded_array import ShardedArray, handed_through, unfolded
from autoshard.lower.xla_faults import safely_split
from autoshard.mesh.resharding import stops
from autoshard.operations.call import Call
from autoshard.operations.primitive import OPERATION
from autoshard.operations.split import UNSPLIT_RUN
from autoshard.plans.annotations import Annotations
from autoshard.program import Equation, Program, Value
from autoshard.program.explicit import open_axes, type_sharding
from autoshard.propagation.padded_windows import UNPADDED
from autoshard.propagation.registry import rule_of
from autoshard.propagation.rules.windows import STENCIL


def annotated(program: Program, annotations: Annotations, mesh: Mesh | AbstractMesh) -> Callable[..., list]:
    """`program` as a function from flat arguments to flat results, its inner values sharded as `annotations` say."""
    return Emitter(program, annotations, mesh).run


class Emitter:
    """One run of a program's jaxpr with the constraints of a plan."""

    def __init__(
        self,
        program: Program,
        annotations: Annotations,
        mesh: Mesh | AbstractMesh,
        results: Sequence[Layout] | None = None,  # of results; None: each stays in the layout in which it is made
    ):
        self.program, self.annotations, self.mesh, self.wanted = program, annotations, mesh, results
        self.equations: Mapping[tuple, Equation] = {equation.path: equation for equation in program.equations}
        self.constraints = constraints_of(program, annotations)
        self.first_readers = first_readers(program, annotations)

    def run(self, *arguments: Any) -> list:
        # The caller may have set another mesh, even of another size, so it is unset before that of the plan is set.
        with jax.sharding.use_abstract_mesh(NO_MESH), jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return self.results(arguments)

    def results(self, arguments: Sequence[Any]) -> list:
        closed = self.program.jaxpr
        env = {}
        for i, (var, array) in enumerate(zip(closed.jaxpr.invars, arguments, strict=True)):
            with jax.named_scope(f"arguments[{i}]"):  # what XLA calls the argument itself
                env[var] = self.sharded(self.program.arguments[i].id, array)
        env |= {
            var: self.sharded(value.id, self.untyped(array))
            for var, value, array in zip(closed.jaxpr.constvars, self.program.constants, closed.consts, strict=True)
        }
        made = self.body(closed, env, ())
        if self.wanted is None:
            return [entry.array for entry in made]
        return list(map(self.result, self.program.results, made, self.wanted))

    def result(self, value: Value | np.ndarray, entry: ShardedArray, want: Layout) -> Any:
        """A result in its layout. A constraint that reshards it has the name of the equation that makes it.

        By this name, collectives of the compiled program are attributed to the equation.
        """
        if not entry.layout or entry.layout == want:
            return entry.array
        with named_after(self.program.makers.get(value.id) if isinstance(value, Value) else None):
            return self.resharded(entry.array, entry.layout, want)

    # Arrays and their shardings.

    def untyped(self, array: Any) -> Any:
        """An array on Auto axes, whatever its type says."""
        if type_sharding(jax.typeof(array)) is None:
            return array
        if isinstance(array, jax.Ref):
            raise MeshError(
                f"{self.program.name} closes over a {jax.typeof(array)}: its type is of explicit mode, and a reference "
                "keeps its type.\nMake it on a mesh of Auto axes: jax.make_mesh(..., axis_types=(AxisType.Auto, ...))."
            )
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            return jax.sharding.reshard(array, PartitionSpec(*[None] * array.ndim))

    def constrained(self, array: Any, layout: Layout | None) -> Any:
        if not layout or not is_array(jax.typeof(array)):  # no plan, a scalar, or a token
            return array
        memory_kind = HOST if on_host(jax.typeof(array)) else None
        sharding = NamedSharding(self.mesh, spec_of(layout), memory_kind=memory_kind)
        return jax.lax.with_sharding_constraint(array, sharding)

    def constrained_to(self, array: Any, sharding: NamedSharding | None) -> Any:
        """The user's own constraint, on the mesh of the plan."""
        if sharding is None or open_axes(sharding.mesh):  # the plan decides along open axes, too
            return array
        ours = NamedSharding(self.mesh, sharding.spec, memory_kind=sharding.memory_kind)
        return jax.lax.with_sharding_constraint(array, ours)

    def resharded(self, array: Any, source: Layout | None, target: Layout | None) -> Any:
        """An array resharded from one layout to another, by way of those that XLA needs; None: from any layout."""
        return self.constrained(self.at_last_stop(array, source, target), target)

    def at_last_stop(self, array: Any, source: Layout | None, target: Layout | None) -> Any:
        """An array in the last layout on the way to its target, from which XLA reshards it by `out_shardings`."""
        if source and target and is_array(jax.typeof(array)):
            for stop in stops(source, target, self.mesh.shape):
                array = self.constrained(array, stop)
        return array

    def sharded(self, value: int, array: Any) -> ShardedArray:
        """The array of a value, constrained to the layout in which it is made, and its shared copy."""
        home, pin, made_in = (
            self.annotations.homes.get(value),
            self.constraints.get(value),
            self.annotations.sums.get(value),
        )
        array = self.resharded(self.constrained(array, made_in), made_in, pin)
        copy_layout = self.annotations.copies.get(value)
        if copy_layout is None:
            return ShardedArray(array, home)
        with named_after(self.first_readers.get(value)):
            return ShardedArray(array, home, self.resharded(array, home, copy_layout), copy_layout)

    def read(self, entry: ShardedArray, equation: Equation | None, operand: int) -> Any:
        """The array in the layout of this operand."""
        want = None if equation is None else self.annotations.wants.get((equation.index, operand))
        if want is None or want == entry.layout:
            return entry.array
        if entry.copy_layout is None:
            return self.resharded(entry.array, entry.layout, want)
        return entry.copy if want == entry.copy_layout else self.resharded(entry.copy, entry.copy_layout, want)

    def behind_barrier(
        self, operands: Sequence[ShardedArray], readers: Sequence[Equation | None]
    ) -> list[ShardedArray]:
        """The arrays behind one barrier: an equation that reads one of them waits for the others.

        Says the shardings again: propagation passes through a barrier, and would pick others behind it. XLA may move
        what gathers an operand behind the barrier, and call it as this: it has the line of the operand's reader.
        """
        pairs = jax.lax.optimization_barrier([(entry.array, entry.copy) for entry in operands])
        guarded = []
        for entry, (array, copy), reader in zip(operands, pairs, readers, strict=True):
            with named_after(reader):
                arrays = self.constrained(array, entry.layout), self.constrained(copy, entry.copy_layout)
            guarded.append(entry.holding(*arrays, entry.made_by))
        return guarded

    def outputs(self, equation: Equation | None, arrays: Sequence[Any]) -> list[ShardedArray]:
        if equation is None:  # no equation reads the results
            return [ShardedArray(array) for array in arrays]
        return [self.sharded(value.id, array) for value, array in zip(equation.outputs, arrays, strict=True)]

    # Equations.

    def body(self, closed: ClosedJaxpr, env: dict, path: tuple) -> list[ShardedArray]:
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

    def call(self, closed: ClosedJaxpr, entries: Sequence[ShardedArray], path: tuple) -> list[ShardedArray]:
        env = dict(zip(closed.jaxpr.invars, entries, strict=True))
        env |= {
            var: ShardedArray(self.untyped(const))
            for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        }
        return self.body(closed, env, path)

    def equation(self, eqn: JaxprEqn, operands: list[ShardedArray], path: tuple) -> list[ShardedArray]:
        with named_as(eqn, self.equations.get(path)):
            return self.emitted(eqn, operands, path)

    def emitted(self, eqn: JaxprEqn, operands: list[ShardedArray], path: tuple) -> list[ShardedArray]:
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
        if (implementation := self.program.implementations.get(path)) is not None:
            return self.custom(eqn, implementation, operands, path)
        equation = self.equations.get(path)
        if equation is not None and UNPADDED in equation.params:
            steps, source = equation.params[UNPADDED]
            array = self.read(unfolded(steps, eqn, operands)[1][source], equation, 0)
            return self.outputs(equation, [jnp.reshape(array, equation.outputs[0].shape)])
        if equation is not None and equation.primitive == STENCIL:
            (ended,) = self.stencil(eqn, equation, operands)
            if len(eqn.outvars) == 1:
                return [ended]
            others = run(eqn, [entry.array for entry in operands])  # other outputs of a split are read inside stencils
            made = [ShardedArray(array, made_by=(eqn, operands)) for array in others]
            return [ended if i == equation.params["output"] else one for i, one in enumerate(made)]
        if name in CONSTRAINTS:
            array = self.read(operands[0], equation, 0)
            return self.outputs(equation, [self.constrained_to(array, said(eqn.params))])
        arrays = [self.read(entry, equation, i) for i, entry in enumerate(operands)]
        made = self.outputs(equation, self.results_of(eqn, equation, arrays))
        if path in self.program.inner:
            made = [replace(entry, made_by=(eqn, operands)) for entry in made]
        return made

    def stencil(self, eqn: JaxprEqn, equation: Equation, operands: list[ShardedArray]) -> list[ShardedArray]:
        """Runs the equations from a stencil's sources to its result again, on shards if devices exchange halos."""
        steps = equation.params["steps"]
        equations, sources = unfolded(steps, eqn, operands)
        arrays = [self.read(sources[i], equation, i) for i in range(len(sources))]
        homes = [self.annotations.homes.get(value.id) for value in equation.outputs]
        wants, mesh = wants_of(equation, self.annotations), dict(self.mesh.shape)
        split = EquationSplit.of(equation, wants, mesh)
        if None in homes or not runs_on_shards(equation, split):
            return self.outputs(equation, [run_stencil(equations, equation, {}, arrays, mesh)])
        made = self.on_shards(
            lambda *shards: [run_stencil(equations, equation, split.axes, shards, mesh)],
            arrays,
            list(map(spec_of, wants)),
            [spec_of(home) for home in homes if home is not None],
        )
        return self.outputs(equation, made)

    def results_of(self, eqn: JaxprEqn, equation: Equation | None, arrays: list) -> list:
        if is_kernel(eqn):
            return self.kernel(eqn, arrays)
        homes = [self.annotations.homes.get(value.id) for value in equation.outputs] if equation else []
        run_it = functools.partial(run_whole, equation)
        layout = homes[0] if homes else None
        if equation is not None and equation.primitive == OPERATION:
            chosen = self.annotations.runs.get(
                equation.index, UNSPLIT_RUN
            )  # also under `shard_map`, since it may contain a kernel
            return list(Call.of(equation, rule_of(equation)).on_mesh(chosen, self.mesh)(*arrays))
        if None in homes or equation is None:
            return safely_split(run_it, eqn, arrays, layout, self.mesh.shape)
        scatter, wants = self.annotations.scatters.get(equation.index), wants_of(equation, self.annotations)
        if scatter is None and not may_run_on_shards(equation):
            return safely_split(run_it, eqn, arrays, layout, self.mesh.shape)
        split = EquationSplit.of(equation, wants, dict(self.mesh.shape))
        if scatter is None and not runs_on_shards(equation, split):
            return safely_split(run_it, eqn, arrays, layout, self.mesh.shape)
        function = on_shards(eqn, equation, split, scatter)
        return self.on_shards(
            function, arrays, list(map(spec_of, wants)), [spec_of(home) for home in homes if home is not None]
        )

    def kernel(self, eqn: JaxprEqn, arrays: Sequence[Any]) -> list:
        """Runs a kernel whole on every device, in a `shard_map`, since compilers refuse to split kernels."""
        whole = PartitionSpec()
        return self.on_shards(
            lambda *shards: run(eqn, shards), arrays, [whole] * len(arrays), [whole] * len(eqn.outvars)
        )

    def on_shards(self, function: Callable, arrays: Sequence[Any], in_specs: Sequence, out_specs: Any) -> Any:
        """Runs a function on the shards of every device, where the partitioner does not change it."""
        by_hand = jax.shard_map(
            function, mesh=self.mesh, in_specs=tuple(in_specs), out_specs=out_specs, check_vma=False
        )
        return by_hand(*arrays)

    def custom(
        self, eqn: JaxprEqn, opened: ClosedJaxpr, operands: list[ShardedArray], path: tuple
    ) -> list[ShardedArray]:
        """Runs the annotated body. Its derivative is the rule that the user gave."""
        shells, made = [entry.shell for entry in operands], list[ShardedArray]()
        written, captured = uncaptured(eqn)

        @jax.custom_jvp
        def call(arrays, copies):
            entries = list(map(ShardedArray.holding, shells, arrays, copies))
            results = self.call(opened, called_operands(eqn, entries), path)
            made[:] = [entry.shell for entry in results]
            return [entry.array for entry in results], [entry.copy for entry in results]

        def derivative(primals, tangents):
            (arrays, copies), (tangent_arrays, _) = primals, tangents
            own, moving = arrays[captured:], tangent_arrays[captured:]
            # JAX refuses to differentiate with respect to arrays that the user's function closes over, even by zero.
            varied = [i for i, tangent in enumerate(moving) if not isinstance(tangent, SymbolicZero)]

            def of_varied(*some):
                return run(written, [*(dict(enumerate(own)) | dict(zip(varied, some, strict=True))).values()])

            _, out_tangents = jax.jvp(of_varied, tuple(own[i] for i in varied), tuple(moving[i] for i in varied))
            out_arrays, out_copies = call(arrays, copies)
            copy_tangents = [None if c is None else t for c, t in zip(out_copies, out_tangents, strict=True)]
            return (out_arrays, out_copies), (out_tangents, copy_tangents)

        call.defjvp(derivative, symbolic_zeros=True)
        arrays, copies = call([entry.array for entry in operands], [entry.copy for entry in operands])
        makers = handed_through(opened, [entry.made_by for entry in called_operands(eqn, operands)])
        return list(map(ShardedArray.holding, made, arrays, copies, makers))

    def remat(self, eqn: JaxprEqn, operands: list[ShardedArray], path: tuple) -> list[ShardedArray]:
        """Runs a recomputation. In a backward pass a barrier keeps XLA from undoing it, as in JAX's own lowering.

        Cotangents are among the operands of the barrier, so that the recomputation waits until they are there.
        """
        opened = called_jaxpr(eqn)
        assert opened is not None, "a checkpoint calls one"
        if eqn.params["differentiated"]:
            guarded = guards(eqn)
            readers = [reader_in(opened, i, path, self.equations) for i, guard in enumerate(guarded) if guard]
            behind = iter(self.behind_barrier(list(itertools.compress(operands, guarded)), readers))
            entries = [next(behind) if guard else entry for entry, guard in zip(operands, guarded, strict=True)]
            return self.call(opened, entries, path)
        made: list[ShardedArray] = []

        def body():
            results = self.call(opened, operands, path)
            made[:] = [entry.shell for entry in results]
            return [(entry.array, entry.copy) for entry in results]

        pairs = jax.checkpoint(body, prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])()
        makers = handed_through(opened, [entry.made_by for entry in operands])
        return [
            entry.holding(array, copy, maker) for entry, (array, copy), maker in zip(made, pairs, makers, strict=True)
        ]

    def crossing(self, entry: ShardedArray, path: tuple, operand: int = 0) -> Any:
        """A value in the layout that a boundary equation reads."""
        equation = self.equations.get(path)
        with named_after(equation):
            return self.read(entry, equation, operand)

    def entered(self, array: Any, path: tuple, output: int = 0) -> ShardedArray:
        """The result of a boundary equation for an array from the other side."""
        equation = self.equations.get(path)
        if equation is None:
            return ShardedArray(array)
        with named_after(equation):
            return self.sharded(equation.outputs[output].id, array)

    def scan(self, eqn: JaxprEqn, operands: list[ShardedArray], path: tuple) -> list[ShardedArray]:
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

        how = {name: params[name] for name in ("length", "reverse", "unroll")}
        with named_after(self.boundary_of(path)):
            finals, stacked = jax.lax.scan(step, carry_arrays, stacks, **how)
        return [self.entered(array, (*path, "carry", i), output=1) for i, array in enumerate(finals)] + [
            self.entered(array, (*path, "stack", i)) for i, array in enumerate(stacked)
        ]

    def while_loop(self, eqn: JaxprEqn, operands: list[ShardedArray], path: tuple) -> list[ShardedArray]:
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
            still = going_on(entries)  # under vmap there is a flag per loop of the batch, and each loop stops by itself
            return [_where(still, new, old) for new, old in zip(handed_on, carry, strict=True)]

        with named_after(self.boundary_of(path)):
            finals = jax.lax.while_loop(test, body, outside[consts:])
        return [self.entered(array, (*path, "carry", i), output=1) for i, array in enumerate(finals)]

    def boundary_of(self, path: tuple) -> Equation | None:
        """An equation at the boundary of a loop, which has the line of the loop."""
        kinds = ("carry", "slice", "stack", "const")
        return next((self.equations[(*path, kind, 0)] for kind in kinds if (*path, kind, 0) in self.equations), None)

    def loop_operands(self, operands: list[ShardedArray], path: tuple, consts: int, carries: int) -> list:
        kinds = [("const", i) for i in range(consts)] + [("carry", i) for i in range(carries)]
        kinds += [("slice", i) for i in range(len(operands) - len(kinds))]
        return [self.crossing(entry, (*path, *kind)) for entry, kind in zip(operands, kinds, strict=True)]

    def loop_entries(self, consts: list, carry: list, path: tuple) -> list[ShardedArray]:
        entries = [self.entered(array, (*path, "const", i)) for i, array in enumerate(consts)]
        return entries + [self.entered(array, (*path, "carry", i)) for i, array in enumerate(carry)]

    def handed_on(self, results: list[ShardedArray], path: tuple) -> list:
        return [self.crossing(entry, (*path, "carry", i), operand=1) for i, entry in enumerate(results)]

    def cond(self, eqn: JaxprEqn, operands: list[ShardedArray], path: tuple) -> list[ShardedArray]:
        def branch(b: int, closed: ClosedJaxpr) -> Callable[[], list]:
            def taken():
                entries = []
                for i, entry in enumerate(operands[1:]):
                    const = (*path, b, "const", i)
                    entries.append(self.entered(self.crossing(entry, const), const))
                results = self.call(closed, entries, (*path, b))
                return [self.crossing(entry, (*path, "join", i), operand=b) for i, entry in enumerate(results)]

            return taken

        branches = [branch(b, closed) for b, closed in enumerate(eqn.params["branches"])]
        platforms = eqn.params.get("branches_platforms")
        if platforms is None:
            arrays = jax.lax.switch(operands[0].array, branches)
        else:  # lowering knows the platform and emits only its branch
            taken_on = {name: taken for names, taken in zip(platforms, branches, strict=True) for name in names or ()}
            default = next((taken for names, taken in zip(platforms, branches, strict=True) if names is None), None)
            arrays = jax.lax.platform_dependent(default=default, **taken_on)
        return [self.entered(array, (*path, "join", i)) for i, array in enumerate(arrays)]


def _where(flags: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """The rows of `new` where a flag is set, else those of `old`; the dims of `flags` are the leading dims."""
    return jnp.where(flags.reshape(*flags.shape, *[1] * (new.ndim - flags.ndim)), new, old)


def _operand(env: Mapping, atom: Any) -> ShardedArray:
    return ShardedArray(atom.val) if isinstance(atom, Literal) else env[atom]
