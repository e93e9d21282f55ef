"""A step and a table of the layouts of its inner values in, the same step with constraints out.

`Plan.to_code` writes this file behind its table. So it stands alone: it imports JAX, and from autoshard only files that
stand alone, too. The jaxpr of the step is run again, equation by equation, as `lower/emitter.py` runs it. A path of
indices says which equation of which body a row of the table is for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.lower.lookups import local_lookup
from autoshard.lower.xla_faults import safely_split
from autoshard.operations.reduce_scatter import reduce_scatter, scattered_product, scatters_second
from autoshard.program.signature import named_arguments, selected, text_of_value

Specs = Sequence[P]  # constraints, one after the other

CALLS = {
    *("call", "closed_call", "composite", "custom_jvp_call", "custom_vjp_call", "eval_jaxpr", "jit", "pjit"),
    "xla_metadata_call",
}
_REMAT = {"checkpoint", "remat", "remat2"}
_KERNELS = {"mosaic_gpu_p", "pallas_call", "tpu_custom_call"}


class OnShards(NamedTuple):
    """An equation that each device runs on its own shards."""

    reads: Specs
    makes: Specs
    params: Mapping[str, Any]  # what differs on one device
    summed: tuple[str, ...] = ()  # mesh axes over which results are partial sums
    looked_up: Sequence[Sequence[str]] = ()  # of a gather along split dims: mesh axes that split each dim of the array
    scatter: tuple[Any, ...] = ()  # how the sum is scattered: dim, stages, and axes that are all_reduced


class Inner(NamedTuple):
    """One equation, argument or result: the constraints on what it reads and makes."""

    primitive: str = ""  # "": any
    reads: Mapping[int, tuple[bool, Specs]] = {}  # operand -> whether it is the copy; how it gets there
    makes: Mapping[int, Specs] = {}
    copies: Mapping[int, Specs] = {}  # of what it makes: for the readers that share one
    lies: Mapping[int, tuple[P, P | None]] = {}  # what it makes, and the copy, behind a barrier
    on_shards: OnShards | None = None


class Types(NamedTuple):
    """The types of explicit mode that flat arguments and results of a step have, by their numbers."""

    kinds: Sequence[AxisType]  # of mesh axes
    arguments: Mapping[int, P]  # with which the step was traced
    results: Mapping[int, P]


class Table(NamedTuple):
    """What a plan says inside a step. Paths begin at the step's own equations."""

    equations: int  # how many the step has
    rows: Mapping[tuple[Any, ...], Inner]
    merged: Mapping[tuple[int, ...], int] = {}  # equations that compute what an earlier one does
    written: Any = None  # the step written out, where it is run otherwise than JAX traces it
    static: Mapping[str | int, str] = {}  # arguments that the step was planned with, as they print
    weak: Sequence[int] | None = None  # arguments whose dtype gave way, as that of Python's numbers; None: as they come
    types: Types | None = None  # of a step of explicit mode


class Entry(NamedTuple):
    """An array, the copy that some readers share, and how both lie behind a barrier."""

    array: Any
    copy: Any = None
    lies: tuple[P, P | None] | None = None


def auto_mesh(mesh: Mesh | AbstractMesh) -> Mesh | AbstractMesh:
    """The same devices with Auto axes, on which the compiler splits what no constraint names."""
    types = (AxisType.Auto,) * len(mesh.axis_names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(mesh.axis_sizes, mesh.axis_names, axis_types=types)
    return Mesh(mesh.devices, mesh.axis_names, axis_types=types)


def constrain(
    step: Callable[..., Any],
    mesh: Mesh | AbstractMesh,
    table: Table,
    static_argnums: Any = None,
    static_argnames: Any = None,
) -> Any:
    """`step` with the constraints of a table; to be called under `jax.jit`."""

    @functools.wraps(step)
    def constrained(*args: Any, **keywords: Any) -> Any:
        check_static(step, args, keywords, table)
        traced, called = without_static(step, args, keywords, static_argnums, static_argnames)
        leaves, structure = jax.tree.flatten(traced)
        plain = jax.tree.unflatten(structure, plain_arguments(leaves, mesh, table))
        closed, result = traced_as_planned(called, plain, mesh, table)
        return jax.tree.unflatten(jax.tree.structure(result), constrained_results(closed, leaves, mesh, table))

    return constrained


def traced_as_planned(
    step: Callable[..., Any], arguments: Sequence[Any], mesh: Mesh | AbstractMesh, table: Table
) -> tuple[Any, Any]:
    """The jaxpr of a step and the shapes of its results, whatever mesh is set: on Explicit axes JAX adds operations.

    A step that names mesh axes means those of `mesh`, where the compiler splits what no constraint names. A step of
    explicit mode has its types.
    """
    trace = jax.make_jaxpr(step, return_shape=True)
    if table.types is not None:
        with jax.sharding.use_abstract_mesh(typed_axes(mesh, table.types)):
            return trace(*arguments)
    try:
        with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
            return trace(*arguments)
    except (RuntimeError, ValueError):  # JAX asks for a mesh, or it is the step's own error, which comes once more
        with jax.sharding.use_abstract_mesh(auto_mesh(mesh).abstract_mesh):
            return trace(*arguments)


def typed_axes(mesh: Mesh | AbstractMesh, types: Types) -> AbstractMesh:
    """What the types of a step are on."""
    return mesh.abstract_mesh.update(axis_types=tuple(types.kinds))


def without_static(
    step: Callable[..., Any], args: tuple, keywords: dict[str, Any], static_argnums: Any, static_argnames: Any
) -> tuple[tuple[list[Any], dict[str, Any]], Callable[[list[Any], dict[str, Any]], Any]]:
    """The arguments that are traced, positional and by name, and `step` as a function of these two."""
    positions, names = selected(step, static_argnums, static_argnames)
    fixed = {name: value for name, value in keywords.items() if name in names}

    def called(positional: list[Any], named: dict[str, Any]) -> Any:
        left = iter(positional)
        return step(*(arg if i in positions else next(left) for i, arg in enumerate(args)), **named, **fixed)

    positional = [arg for i, arg in enumerate(args) if i not in positions]
    return (positional, {name: value for name, value in keywords.items() if name not in names}), called


def check_static(step: Callable[..., Any], args: Sequence[Any], keywords: Mapping[str, Any], table: Table) -> None:
    """Refuses other static arguments than those with which operations were written out.

    Raises:
        ValueError: they print otherwise. Operations that JAX makes of the step are those of any arguments.
    """
    if table.written is None:
        return
    given = named_arguments(step, args, keywords)
    for name, planned in table.static.items():
        text = text_of_value(given[name]) if name in given else planned
        if text != planned:
            what = f"argument {name}" if isinstance(name, int) else name
            raise ValueError(
                f"{what} is {text}, it was {planned} when the step was planned and its operations were written out.\n"
                "Plan the step with this argument, too, and write code of its own for it."
            )


def plain_arguments(leaves: Sequence[Any], mesh: Mesh | AbstractMesh, table: Table) -> list[Any]:
    """Arrays, or shapes where their types name a mesh or are weak otherwise than planned: JAX has other equations then.

    A temperature that began as ``jnp.asarray(0.07)`` is weak until the first update. In explicit mode all are shapes,
    of the types with which the step was planned.
    """
    found: list[Any] = []
    for i, array in enumerate(leaves):
        type_ = jax.typeof(array)
        is_weak = type_.weak_type if table.weak is None else i in table.weak
        names_mesh = isinstance(getattr(type_, "sharding", None), NamedSharding) and not type_.sharding.mesh.empty
        how: dict[str, Any] = {"weak_type": is_weak}
        if table.types is not None and i in table.types.arguments:
            how["sharding"] = NamedSharding(typed_axes(mesh, table.types), table.types.arguments[i])
        is_plain = table.types is None and not names_mesh and is_weak == type_.weak_type
        found.append(array if is_plain else jax.ShapeDtypeStruct(type_.shape, type_.dtype, **how))
    return found


def constrained_results(closed: Any, leaves: Sequence[Any], mesh: Mesh | AbstractMesh, table: Table) -> list[Any]:
    """The flat results of a step's jaxpr, run with the constraints of a table.

    Raises:
        ValueError: it is not the step that was planned.
    """
    if table.written is not None:
        return _written_results(closed, leaves, mesh, table)
    if len(closed.jaxpr.eqns) != table.equations:
        raise ValueError(
            f"the step has {len(closed.jaxpr.eqns)} operations, it had {table.equations} when it was planned.\n"
            "Plan it anew and write this code anew, or leave `constrained` out."
        )
    return _Run(auto_mesh(mesh), table).results(closed, leaves)


def _untyped(array: Any) -> Any:
    """An array on the Auto axes of the mesh that is set, whatever its type says."""
    sharding = getattr(jax.typeof(array), "sharding", None)
    if not isinstance(sharding, NamedSharding) or AxisType.Explicit not in sharding.mesh.axis_types:
        return array
    return jax.sharding.reshard(array, P(*[None] * array.ndim))


def _written_results(closed: Any, leaves: Sequence[Any], mesh: Mesh | AbstractMesh, table: Table) -> list[Any]:
    """The flat results of the operations that are written out in a table, if they are of the types of the step's."""
    given = [f"{aval.dtype}{list(aval.shape)}" for aval in closed.in_avals]
    made: list[Any] = []
    if given == list(table.written.types):
        with jax.sharding.use_abstract_mesh(auto_mesh(mesh).abstract_mesh):
            made = _Run(auto_mesh(mesh), table).results(table.written, list(map(_untyped, leaves)))
    if [(one.shape, one.dtype) for one in closed.out_avals] != [(one.shape, one.dtype) for one in made]:
        raise ValueError(
            "the step takes or returns other arrays than when it was planned.\n"
            "Plan it anew and write this code anew, or leave `constrained` out."
        )
    if table.types is None:
        return made
    specs = table.types.results
    with jax.sharding.use_abstract_mesh(typed_axes(mesh, table.types)):
        return [jax.sharding.reshard(array, specs[i]) if i in specs else array for i, array in enumerate(made)]


def evaluated(*arrays: Any, body: Any) -> list[Any]:
    """The results of a body of a step, without constraints inside."""
    return _Run(AbstractMesh((), ()), Table(0, {})).results(body, arrays)


class _Run:
    """One run of a step's jaxpr."""

    def __init__(self, mesh: Mesh | AbstractMesh, table: Table):
        self.mesh, self.rows, self.merged = mesh, table.rows, table.merged

    def results(self, closed: Any, leaves: Sequence[Any]) -> list[Any]:
        given = [self.made(("argument", i), 0, array) for i, array in enumerate(leaves)]
        constants = [self.made(("constant", i), 0, array) for i, array in enumerate(closed.consts)]
        made = self.body(closed.jaxpr, constants, given, ())
        return [self.read(entry, ("result", i), 0) for i, entry in enumerate(made)]

    # Arrays.

    def through(self, array: Any, specs: Specs) -> Any:
        for spec in specs:
            array = jax.lax.with_sharding_constraint(array, NamedSharding(self.mesh, spec))
        return array

    def made(self, path: tuple[Any, ...], output: int, array: Any) -> Entry:
        row = self.rows.get(path)
        if row is None:
            return Entry(array)
        array = self.through(array, row.makes.get(output, ()))
        copy = self.through(array, row.copies[output]) if output in row.copies else None
        return Entry(array, copy, row.lies.get(output))

    def read(self, entry: Entry, path: tuple[Any, ...], operand: int) -> Any:
        row = self.rows.get(path)
        if row is None or operand not in row.reads:
            return entry.array
        is_copy, specs = row.reads[operand]
        return self.through(entry.copy if is_copy else entry.array, specs)

    def behind_barrier(self, entries: Sequence[Entry]) -> list[Entry]:
        pairs = jax.lax.optimization_barrier([(entry.array, entry.copy) for entry in entries])
        found = []
        for entry, (array, copy) in zip(entries, pairs, strict=True):
            home, shared = entry.lies or (None, None)
            array = array if home is None else self.through(array, [home])
            copy = copy if shared is None or copy is None else self.through(copy, [shared])
            found.append(Entry(array, copy, entry.lies))
        return found

    # Equations.

    def body(self, jaxpr: Any, consts: Sequence[Any], entries: Sequence[Entry], path: tuple[Any, ...]) -> list[Entry]:
        known = [one if isinstance(one, Entry) else Entry(one) for one in consts]
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*known, *entries], strict=True))

        def entry_of(atom: Any) -> Entry:
            return Entry(atom.val) if hasattr(atom, "val") else env[atom]

        for i, eqn in enumerate(jaxpr.eqns):
            first = self.merged.get((*path, i))
            if first is None:
                made = self.equation(eqn, list(map(entry_of, eqn.invars)), (*path, i))
            else:
                made = list(map(entry_of, jaxpr.eqns[first].outvars))
            env.update(zip(eqn.outvars, made, strict=True))
        return list(map(entry_of, jaxpr.outvars))

    def call(self, called: Any, entries: Sequence[Entry], path: tuple[Any, ...]) -> list[Entry]:
        return self.body(getattr(called, "jaxpr", called), getattr(called, "consts", ()), entries, path)

    def equation(self, eqn: Any, entries: list[Entry], path: tuple[Any, ...]) -> list[Entry]:
        name, row = eqn.primitive.name, self.rows.get(path)
        if row is not None and row.primitive not in ("", name):
            raise ValueError(
                f"operation {path} of the step is {name}, it was {row.primitive} when the step was planned.\n"
                "Plan it anew and write this code anew, or leave `constrained` out."
            )
        if name in CALLS:
            return self.call(eqn.params["jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"], entries, path)
        if name in _REMAT:
            return self.call(eqn.params["jaxpr"], self.recomputed(eqn, entries), path)
        if name == "scan":
            return self.scan(eqn, entries, path)
        if name == "while":
            return self.while_loop(eqn, entries, path)
        if name == "cond" and eqn.params.get("branches_platforms") is None:
            return self.cond(eqn, entries, path)
        arrays = [self.read(entry, path, i) for i, entry in enumerate(entries)]
        wished = eqn.params.get("sharding") if name == "sharding_constraint" else None
        made = [self.through(arrays[0], wished)] if isinstance(wished, list) else self.run(eqn, arrays, row)
        return [self.made(path, i, array) for i, array in enumerate(made)]

    def run(self, eqn: Any, arrays: Sequence[Any], row: Inner | None) -> list[Any]:
        name, on_shards = eqn.primitive.name, None if row is None else row.on_shards
        if name in _KERNELS and not eqn.params.get("interpret"):
            on_shards = OnShards([P()] * len(arrays), [P()] * len(eqn.outvars), {})
        if on_shards is None:
            return safely_split(_bind, eqn, arrays, None, self.mesh.shape)
        shards: OnShards = on_shards

        def on_one_device(*local: Any) -> list[Any]:
            if shards.scatter and name == "dot_general":
                dim, *how = shards.scatter
                if scatters_second(eqn.params["dimension_numbers"], local[0].ndim, dim):
                    return [scattered_product(eqn.params | shards.params, local, *how)]
            if shards.looked_up:
                partial = [local_lookup(eqn, local, shards.looked_up, shards.params["slice_sizes"])]
            else:
                partial = _bind(eqn, local, shards.params)
            if shards.scatter:
                return [reduce_scatter(partial[0], *shards.scatter)]
            return [jax.lax.psum(one, shards.summed) for one in partial] if shards.summed else partial

        specs: dict[str, Any] = {"in_specs": tuple(shards.reads), "out_specs": list(shards.makes)}
        made: list[Any] = jax.shard_map(on_one_device, mesh=self.mesh, check_vma=False, **specs)(*arrays)
        return made

    def recomputed(self, eqn: Any, entries: list[Entry]) -> list[Entry]:
        """In a backward pass a barrier keeps the compiler from undoing the recomputation."""
        guards = eqn.params["prevent_cse"] if eqn.params["differentiated"] else False
        flags = guards if isinstance(guards, tuple) else (guards,) * len(entries)
        if not any(flags):
            return entries
        behind = iter(self.behind_barrier([entry for entry, flag in zip(entries, flags, strict=True) if flag]))
        return [next(behind) if flag else entry for entry, flag in zip(entries, flags, strict=True)]

    # Loops and branches.

    def crossing(self, entries: Sequence[Entry], path: tuple[Any, ...], kind: str, operand: int = 0) -> list[Any]:
        return [self.read(entry, (*path, kind, i), operand) for i, entry in enumerate(entries)]

    def entered(self, arrays: Sequence[Any], path: tuple[Any, ...], kind: str, output: int = 0) -> list[Entry]:
        return [self.made((*path, kind, i), output, array) for i, array in enumerate(arrays)]

    def scan(self, eqn: Any, entries: list[Entry], path: tuple[Any, ...]) -> list[Entry]:
        params = eqn.params
        whole, carries = params["counts"] if "counts" in params else scan_counts(eqn)
        consts = self.crossing(entries[: whole - carries], path, "const")

        def step(carry: Any, slices: Any) -> Any:
            inner = [*self.entered(consts, path, "const"), *self.entered(carry, path, "carry")]
            results = self.call(params["jaxpr"], inner + self.entered(slices, path, "slice"), path)
            handed_on = self.crossing(results[:carries], path, "carry", 1)
            return handed_on, self.crossing(results[carries:], path, "stack")

        started = self.crossing(entries[whole - carries : whole], path, "carry")
        sliced = self.crossing(entries[whole:], path, "slice")
        how = {name: params[name] for name in ("length", "reverse", "unroll")}
        finals, stacked = jax.lax.scan(step, started, sliced, **how)
        return [*self.entered(finals, path, "carry", 1), *self.entered(stacked, path, "stack")]

    def while_loop(self, eqn: Any, entries: list[Entry], path: tuple[Any, ...]) -> list[Entry]:
        params = eqn.params
        tests, consts = params["cond_nconsts"], params["cond_nconsts"] + params["body_nconsts"]
        outside = self.crossing(entries[:consts], path, "const")
        of_batches = params["of_batches"] if "of_batches" in params else loops_of_batches(params)

        def inner(carry: Any) -> list[Entry]:
            return [*self.entered(outside, path, "const"), *self.entered(carry, path, "carry")]

        def going_on(entries: list[Entry]) -> Any:
            return self.call(params["cond_jaxpr"], entries[:tests] + entries[consts:], (*path, "test"))[0].array

        def body(carry: Any) -> Any:
            known = inner(carry)
            made = self.call(params["body_jaxpr"], known[tests:], (*path, "body"))
            new = self.crossing(made, path, "carry", 1)
            still = going_on(known) if of_batches else None  # one flag per loop of a batch
            return new if still is None else [_where(still, *pair) for pair in zip(new, carry, strict=True)]

        started = self.crossing(entries[consts:], path, "carry")
        finals = jax.lax.while_loop(lambda carry: going_on(inner(carry)).any(), body, started)
        return self.entered(finals, path, "carry", 1)

    def cond(self, eqn: Any, entries: list[Entry], path: tuple[Any, ...]) -> list[Entry]:
        def branch(b: int, closed: Any) -> Callable[[], list[Any]]:
            def taken() -> list[Any]:
                inner = self.entered(self.crossing(entries[1:], (*path, b), "const"), (*path, b), "const")
                return self.crossing(self.call(closed, inner, (*path, b)), path, "join", b)

            return taken

        branches = [branch(b, closed) for b, closed in enumerate(eqn.params["branches"])]
        return self.entered(jax.lax.switch(entries[0].array, branches), path, "join")


def _bind(eqn: Any, arrays: Sequence[Any], params: Mapping[str, Any] | None = None) -> list[Any]:
    bound = eqn.primitive.get_bind_params({**eqn.params, **(params or {})})
    with jax.threefry_partitionable(eqn.ctx.threefry_partitionable):
        made = eqn.primitive.bind(*arrays, **bound)
    return list(made) if eqn.primitive.multiple_results else [made]


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan are not stacked, and how many of these are carries: all others have one dim more."""
    inside = eqn.params["jaxpr"].jaxpr
    return _of_one_rank(eqn.invars, inside.invars), _of_one_rank(eqn.outvars, inside.outvars)


def loops_of_batches(params: Mapping[str, Any]) -> bool:
    """Whether a loop of unknown length stands for several, each with a flag that says whether it goes on."""
    return bool(params["cond_jaxpr"].out_avals[0].shape)


def _of_one_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    return sum(one.aval.ndim == other.aval.ndim for one, other in zip(outer, inner, strict=True))


def _where(flags: Any, new: Any, old: Any) -> Any:
    return jnp.where(flags.reshape(*flags.shape, *[1] * (new.ndim - flags.ndim)), new, old)
