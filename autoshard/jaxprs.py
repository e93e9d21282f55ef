"""How jaxprs are taken apart and run again: the only file that knows `jax.extend`.

Parameters of primitives differ between JAX releases; what reads them in more than one place is here.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax import api_util
from jax.extend import core
from jax.interpreters import partial_eval
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.experimental import compute_on, set_xla_metadata
from autoshard.layout import with_auto_axes

ClosedJaxpr = core.ClosedJaxpr
DropVar = core.DropVar
Jaxpr = core.Jaxpr
JaxprEqn = core.JaxprEqn
Literal = core.Literal
Primitive = core.Primitive
Var = core.Var

_UNCAPTURED = "uncaptured"  # the parameter in which `capturing_call` keeps an equation
NO_MESH = AbstractMesh((), ())
HOST = "pinned_host"  # the memory kind of shardings of arrays in the host's memory
_NOWHERE = AbstractMesh((1,), ("any",), axis_types=(AxisType.Auto,))
IN_HOST_MEMORY = NamedSharding(_NOWHERE, PartitionSpec(), memory_kind=HOST)  # of types to trace with
REMAT = frozenset({"checkpoint", "remat", "remat2"})
CONSTRAINTS = frozenset({"reshard", "sharding_constraint"})
CALLS_SCAN_BODIES = jax.__version_info__ < (0, 12)  # whether JAX makes a function of the body of a `scan`
_KERNELS = frozenset({"mosaic_gpu_p", "pallas_call", "tpu_custom_call"})
# Calls that JAX transforms by rules of their own.
CUSTOM = frozenset({
    "call_hi_primitive", "custom_jvp_call", "custom_linear_solve", "custom_vjp_call", "custom_vmap_call", "linear_call",
    "random_gamma",
})  # fmt: skip
# Primitives that open into a jaxpr which is no parameter of theirs, or not alone.
HIDDEN_BODIES = frozenset({"call_hi_primitive", "custom_linear_solve", "linear_call", "remat_opt"})
_CALLED = {  # primitive -> the parameters that may hold what it calls
    "call": ("call_jaxpr",),
    "closed_call": ("call_jaxpr",),
    "composite": ("jaxpr", "call_jaxpr"),
    "custom_jvp_call": ("call_jaxpr",),
    "custom_vjp_call": ("call_jaxpr",),
    "custom_vmap_call": ("call",),
    "eval_jaxpr": ("call_jaxpr",),
    "jit": ("jaxpr",),
    "linear_call": ("callee",),
    "pjit": ("jaxpr",),
    "remat_opt": ("fwd_jaxpr",),
    "xla_metadata_call": ("jaxpr",),
} | dict.fromkeys(REMAT, ("jaxpr",))


@functools.cache
def public_primitives() -> Mapping[str, Primitive]:
    """The primitives that JAX shows, by their names."""
    shown = (*vars(jax.lax).values(), *vars(core.primitives).values())
    return {one.name: one for one in shown if isinstance(one, Primitive)}


def called_jaxpr(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr that a call equation runs exactly once; None for everything else."""
    if eqn.primitive.name == "custom_linear_solve":
        return eqn.params["jaxprs"].solve
    if eqn.primitive.name == "call_hi_primitive":
        return _expanded(eqn)
    if eqn.primitive.name == "random_gamma":
        return _rejection_sampler(eqn.primitive, tuple(atom.aval for atom in eqn.invars), tuple(eqn.params.items()))
    held = [eqn.params[name] for name in _CALLED.get(eqn.primitive.name, ()) if name in eqn.params]
    if not held:
        return None
    return held[0] if isinstance(held[0], ClosedJaxpr) else ClosedJaxpr(held[0], ())


def equations_of(jaxpr: Jaxpr) -> Sequence[JaxprEqn]:
    """The equations of a jaxpr, as `jax.jit` lowers them.

    A `custom_vjp` with `optimize_remat` becomes the function alone where nothing reads its residuals.
    """
    if not any(eqn.primitive.name == "remat_opt" for eqn in jaxpr.eqns):
        return jaxpr.eqns
    equations, live = [], {atom for atom in jaxpr.outvars if isinstance(atom, Var)}
    for eqn in reversed(jaxpr.eqns):
        if not live.isdisjoint(eqn.outvars) or eqn.effects:
            if eqn.primitive.name == "remat_opt" and live.isdisjoint(eqn.outvars[: eqn.params["num_res"]]):
                eqn = _without_residuals(eqn)
            live |= {atom for atom in eqn.invars if isinstance(atom, Var)}
        equations.append(eqn)
    return equations[::-1]


def with_live_equations(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same without equations that no result needs, those inside loops and calls included.

    Differentiation leaves such equations where a metric is returned beside a loss: the derivative of a maximum counts
    where it is reached, and nobody reads that.
    """
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, True, instantiate=True)
    return ClosedJaxpr(jaxpr, closed.consts)


def _without_residuals(eqn: JaxprEqn) -> JaxprEqn:
    params = eqn.params
    called = ClosedJaxpr(*params["fun_jaxpr_thunk"]())
    return eqn.replace(
        primitive=core.primitives.call_p,
        params={"call_jaxpr": called},
        invars=eqn.invars[params["num_consts"] :],
        outvars=eqn.outvars[params["num_res"] :],
    )


def _expanded(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr of a primitive that a function defines; None if it works on more than arrays, or names no function."""
    primitive = eqn.params["_prim"]
    if not all(is_array(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return None

    def expanded(*operands: Any) -> list[Any]:
        return jax.tree.leaves(primitive.expand(*jax.tree.unflatten(primitive.in_tree, operands)))

    try:
        return jax.make_jaxpr(expanded)(*(atom.aval for atom in eqn.invars))
    except NotImplementedError:
        return None


def implementation_of(eqn: JaxprEqn) -> ClosedJaxpr | None:
    """The jaxpr of what a primitive's own `def_impl` computes; None if that is not written in JAX's primitives."""

    def implemented(*operands: Any) -> Any:
        return jax.tree.leaves(eqn.primitive.impl(*operands, **eqn.params))

    if eqn.effects or not all(is_array(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return None
    try:
        found = jax.make_jaxpr(implemented)(*(atom.aval for atom in eqn.invars))
    except Exception:  # whatever the implementation does with tracers
        return None
    same = [_kind(var.aval) for var in eqn.outvars] == [_kind(aval) for aval in found.out_avals]
    return found if same and not _binds(found.jaxpr, eqn.primitive) else None


def inner_jaxprs(eqn: JaxprEqn) -> list[ClosedJaxpr]:
    """The jaxprs among the parameters of an equation: bodies of loops and branches."""
    found = [one for value in eqn.params.values() for one in (value if isinstance(value, tuple | list) else [value])]
    closed = [ClosedJaxpr(one, ()) if isinstance(one, Jaxpr) and not one.constvars else one for one in found]
    return [one for one in closed if isinstance(one, ClosedJaxpr)]


def is_transposed(eqn: JaxprEqn) -> bool:
    """Whether differentiation made an equation for a backward pass, or a user's own rule of one made it there."""
    if eqn.primitive.name in REMAT and eqn.params["differentiated"]:
        return True
    return "transpose(" in str(eqn.source_info.name_stack)


def has_backward_pass(jaxpr: Jaxpr) -> bool:
    """Whether a backward pass stands somewhere in a jaxpr."""
    return any(
        is_transposed(eqn) or any(has_backward_pass(inner.jaxpr) for inner in inner_jaxprs(eqn)) for eqn in jaxpr.eqns
    )


def with_plain_names(jaxpr: Jaxpr) -> Jaxpr:
    """A jaxpr whose inputs and results are called by their number."""
    avals, paths = [var.aval for var in jaxpr.invars], tuple(map(str, range(len(jaxpr.outvars))))
    names = api_util.debug_info("autoshard", lambda *_: None, avals, {}, result_paths_thunk=lambda: paths)
    return Jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, jaxpr.eqns, jaxpr.effects, names)


def jaxpr_of(
    constants: Mapping[Var, Any], inputs: Sequence[Var], results: Sequence[Var | Literal], equations: Sequence[JaxprEqn]
) -> ClosedJaxpr:
    """A jaxpr of these equations, whose inputs and results are called by their number."""
    avals, paths = [var.aval for var in inputs], tuple(map(str, range(len(results))))
    names = api_util.debug_info("autoshard", lambda *_: None, avals, {}, result_paths_thunk=lambda: paths)
    effects = frozenset[Any]().union(*(eqn.effects for eqn in equations))
    jaxpr = Jaxpr(list(constants), list(inputs), list(results), list(equations), effects, names)
    return ClosedJaxpr(jaxpr, list(constants.values()))


def _kind(aval: Any) -> tuple[tuple[int, ...], Any]:
    return aval.shape, aval.dtype


def _binds(jaxpr: Jaxpr, primitive: Any) -> bool:
    """Whether a primitive is bound somewhere in a jaxpr, as all of JAX's are by their own implementations."""
    inner = [core.jaxprs_in_params(eqn.params) for eqn in jaxpr.eqns]
    return any(eqn.primitive is primitive for eqn in jaxpr.eqns) or any(
        _binds(one, primitive) for several in inner for one in several
    )


@functools.lru_cache(maxsize=256)
def _rejection_sampler(primitive: Any, avals: tuple[Any, ...], params: tuple[tuple[str, Any], ...]) -> Any:
    """The loops that JAX lowers a sampler to; None if it does not say how."""

    def sampled(*operands: Any) -> Any:
        return primitive.impl(*operands, **dict(params), use_vmap=True)  # as it is lowered

    try:
        return jax.make_jaxpr(sampled)(*avals)
    except TypeError:  # a JAX release that implements it otherwise
        return None


def guards(eqn: JaxprEqn) -> Sequence[bool]:
    """Which operands of a differentiated `jax.checkpoint` it reads from behind a barrier."""
    prevent_cse = eqn.params["prevent_cse"]
    return prevent_cse if isinstance(prevent_cse, tuple) else [prevent_cse] * len(eqn.invars)


def called_operands(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The operands of a call equation that its `called_jaxpr` takes."""
    if eqn.primitive.name != "custom_linear_solve":
        return list(operands)
    lengths = eqn.params["const_lengths"]
    start = lengths.matvec + lengths.vecmat
    rest = start + lengths.solve + lengths.transpose_solve
    return [*operands[start : start + lengths.solve], *operands[rest:]]


def call_name(params: Mapping[str, Any]) -> str:
    """What a foreign function or kernel is called; "" if it has no name."""
    name: str | None = params.get("target_name") or params.get("name")
    traced: str = getattr(getattr(params.get("jaxpr"), "debug_info", None), "func_name", "")
    return name or traced


def draws_otherwise_in_vmap(eqn: JaxprEqn) -> bool:
    """Whether an equation draws random numbers of which `jax.vmap` draws others: those of all but threefry."""
    if eqn.primitive.name in {"random_bits", "random_gamma", "random_split"}:
        return str(aval_of(eqn.invars[0]).dtype) != "key<fry>"
    return eqn.primitive.name in {"rng_bit_generator", "rng_uniform"}


def is_kernel(eqn: JaxprEqn) -> bool:
    """Whether the equation is code that a compiler takes as it is; an interpreted kernel is plain operations."""
    return eqn.primitive.name in _KERNELS and not eqn.params.get("interpret")


def said(params: Mapping[str, Any]) -> NamedSharding | None:
    """The sharding over a mesh that a constraint asks for; None if its sharding names no axes.

    A `reshard` to Auto axes asks for nothing, since `jax.jit` leaves these axes open. A `reshard` to Explicit axes has
    already become a constraint (`program/explicit.py`).
    """
    sharding = params.get("sharding")
    return sharding if isinstance(sharding, NamedSharding) else None


def constraint_like(operand: Var | Literal, result: Var, sharding: NamedSharding, like: JaxprEqn | None) -> JaxprEqn:
    """`result` is `operand` with a constraint, on the line of another equation."""
    aval: Any = result.aval
    made = _constraint(aval.shape, aval.dtype, NamedSharding(with_auto_axes(sharding.mesh), sharding.spec))
    source, params = made.source_info if like is None else like.source_info, {**made.params, "sharding": sharding}
    return made.replace(invars=[operand], outvars=[result], params=params, source_info=source)


@functools.lru_cache(maxsize=1024)
def _constraint(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> JaxprEqn:
    def constrained(x: Any) -> Any:
        return jax.lax.with_sharding_constraint(x, sharding)

    with jax.sharding.use_abstract_mesh(NO_MESH):
        equations = jax.make_jaxpr(constrained)(jax.ShapeDtypeStruct(shape, dtype)).jaxpr.eqns
    return next(eqn for eqn in equations if eqn.primitive.name == "sharding_constraint")


def capturing_call(eqn: JaxprEqn, called: ClosedJaxpr, count: int) -> dict[str, Any]:
    """The parameters of a call equation that calls a jaxpr with `count` more inputs, before the others.

    Custom derivatives are written for the inputs as they were, so such an equation keeps the one that it was.
    """
    (name,) = (name for name in _CALLED[eqn.primitive.name] if name in eqn.params)
    params = {**eqn.params, name: called if isinstance(eqn.params[name], ClosedJaxpr) else called.jaxpr}
    if eqn.primitive.name in CUSTOM:
        params[_UNCAPTURED] = eqn
    if isinstance(params.get("prevent_cse"), tuple):
        params["prevent_cse"] = (*[any(params["prevent_cse"])] * count, *params["prevent_cse"])
    return params


def uncaptured(eqn: JaxprEqn) -> tuple[JaxprEqn, int]:
    """A call equation as it was before `capturing_call`, and how many inputs that has put before its own."""
    before: JaxprEqn = eqn.params.get(_UNCAPTURED, eqn)
    return before, len(eqn.invars) - len(before.invars)


def call_of(eqn: JaxprEqn, called: ClosedJaxpr, operands: Sequence[Any], results: Sequence[Var]) -> JaxprEqn:
    """An equation that calls a jaxpr, on the line of another one."""
    params = {"call_jaxpr": called}
    return eqn.replace(primitive=core.primitives.call_p, params=params, invars=list(operands), outvars=list(results))


def context_like(eqn: JaxprEqn, mesh: AbstractMesh) -> Any:
    """The context of an equation, but for the mesh that is set."""
    if eqn.ctx.cur_abstract_mesh == mesh:
        return eqn.ctx
    with jax.sharding.use_abstract_mesh(mesh), _surrounding_settings(eqn):
        return jax.make_jaxpr(jax.lax.neg)(1.0).jaxpr.eqns[0].ctx


def partitioning_rule(params: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """The sharding rule of a `custom_partitioning` equation in our notation, and what it says of its factors."""
    rule = params["sharding_rule"]
    if rule is None or callable(rule):
        return None

    def text(tensor: Sequence[Any]) -> str:
        dims = (f"({' '.join(dim)})" if isinstance(dim, tuple) else dim.replace("\u2026", "...") for dim in tensor)
        return " ".join(dims)

    sides = (", ".join(map(text, side)) for side in (rule.operand_mappings, rule.result_mappings))
    kinds = {kind: getattr(rule, f"{kind}_factors") for kind in ("reduction", "need_replication", "permutation")}
    # The operation may be unable to work on parts of a factor that no result has and of which the rule says nothing.
    said = {factor for factors in kinds.values() for factor in factors}
    used, made = (
        {f for tensor in side for dim in tensor for f in ((dim,) if isinstance(dim, str) else dim)}
        for side in (rule.operand_mappings, rule.result_mappings)
    )
    kinds["need_replication"] += tuple(sorted(used - made - said))
    return " -> ".join(sides), kinds | {"sizes": dict(rule.factor_sizes)}


def devices_put_on(params: Mapping[str, Any]) -> list[int]:
    """The ids of the devices that a `device_put` names."""
    ids: set[int] = set()
    for one in params.get("devices", ()):
        if isinstance(one, jax.Device):
            ids.add(one.id)
        elif isinstance(one, jax.sharding.Sharding) and not isinstance(getattr(one, "mesh", None), AbstractMesh):
            devices: Iterable[Any] = one.device_set
            ids.update(device.id for device in devices)
    return sorted(ids)


def scan_counts(eqn: JaxprEqn) -> tuple[int, int]:
    """How many operands of a scan are constants, and how many are carries.

    The ranks tell, since the parameter that holds these counts differs between JAX releases. Stacked operands and
    results have one dim more outside than inside.
    """
    inside: Jaxpr = eqn.params["jaxpr"].jaxpr

    def of_one_rank(outer: Sequence[Any], inner: Sequence[Any]) -> int:
        return sum(one.aval.ndim == other.aval.ndim for one, other in zip(outer, inner, strict=True))

    carries, whole = of_one_rank(eqn.outvars, inside.outvars), of_one_rank(eqn.invars, inside.invars)
    return whole - carries, carries


def run(eqn: JaxprEqn, operands: Sequence[Any]) -> list[Any]:
    """The equation applied to other operands of the same types, whatever functions its parameters hold."""
    if not any(True for _ in core.jaxprs_in_params(eqn.params)) and eqn.primitive.name not in CUSTOM:
        with _surrounding_settings(eqn):
            results = eqn.primitive.bind(*operands, **eqn.params)
        return list(results) if eqn.primitive.multiple_results else [results]
    # A jaxpr of this one equation: how functions among the parameters are bound is JAX's business.
    variables, values = [], []
    for atom, operand in zip(eqn.invars, operands, strict=True):
        if not isinstance(atom, Literal) and atom not in variables:
            variables.append(atom)
            values.append(operand)
    kept = [var for var in eqn.outvars if not isinstance(var, core.DropVar)]
    paths = tuple(map(str, range(len(kept))))
    names = api_util.debug_info("autoshard", lambda *_: None, values, {}, result_paths_thunk=lambda: paths)
    single = ClosedJaxpr(Jaxpr([], variables, kept, [eqn], eqn.effects, names), ())
    results = iter(core.jaxpr_as_fun(single)(*values))
    return [None if isinstance(var, core.DropVar) else next(results) for var in eqn.outvars]


@contextlib.contextmanager
def _surrounding_settings(eqn: JaxprEqn) -> Iterator[None]:
    """What the user said around an equation: how random bits are made, what computes it, and metadata for XLA."""
    with contextlib.ExitStack() as said:
        partitionable = jax.config.jax_threefry_partitionable  # type: ignore[attr-defined]  # JAX adds its flags later
        if eqn.ctx.threefry_partitionable != partitionable:
            said.enter_context(jax.threefry_partitionable(eqn.ctx.threefry_partitionable))
        if eqn.ctx.compute_type is not None:  # from JAX 0.12 on an equation of its own
            said.enter_context(compute_on(eqn.ctx.compute_type))
        if eqn.ctx.xla_metadata:
            said.enter_context(set_xla_metadata(**eqn.ctx.xla_metadata))
        yield


def literal(value: Any) -> Literal:
    """A number as an operand."""
    return Literal(value, jax.typeof(value))


def evaluated(equations: Sequence[JaxprEqn], values: Mapping[Var, Any], wanted: Sequence[Var]) -> list[Any]:
    """The equations run on values; each keeps the line that it comes from."""
    read = dict.fromkeys(atom for eqn in equations for atom in eqn.invars if isinstance(atom, Var))
    inputs = [var for var in read | dict.fromkeys(wanted) if var in values]
    operands, paths = [values[var] for var in inputs], tuple(map(str, range(len(wanted))))
    names = api_util.debug_info("autoshard", lambda *_: None, operands, {}, result_paths_thunk=lambda: paths)
    effects = frozenset[Any]().union(*(eqn.effects for eqn in equations))
    piece = Jaxpr([], inputs, list(wanted), list(equations), effects, names)
    return list(core.jaxpr_as_fun(ClosedJaxpr(piece, ()))(*operands))


def written_at(eqn: JaxprEqn, function: Callable[..., Sequence[Any]], *operands: Any) -> list[Any]:
    """What a function makes of arrays, as if it were written where an equation is.

    The bodies of loops and calls in it keep their own lines.
    """
    closed = jax.make_jaxpr(function)(*operands)
    equations = [one.replace(source_info=eqn.source_info) for one in closed.jaxpr.eqns]
    variables = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    env = dict(zip(variables, [*operands, *closed.consts], strict=True))
    made = [atom for atom in closed.jaxpr.outvars if isinstance(atom, Var)]
    known = dict(zip(made, evaluated(equations, env, made), strict=True))
    return [known[atom] if isinstance(atom, Var) else atom.val for atom in closed.jaxpr.outvars]


def at_line_of(eqn: JaxprEqn, function: Callable[..., Any], *operands: Any) -> Any:
    """What a function makes of arrays, as if it were written where an equation is."""
    closed = jax.make_jaxpr(function)(*operands)
    equations = [one.replace(source_info=eqn.source_info) for one in closed.jaxpr.eqns]
    variables = [*closed.jaxpr.invars, *closed.jaxpr.constvars]
    (result,) = closed.jaxpr.outvars
    assert isinstance(result, Var), "it is made of the operands"
    return evaluated(equations, dict(zip(variables, [*operands, *closed.consts], strict=True)), [result])[0]


def folded(eqn: JaxprEqn) -> Callable[[Sequence[Any], Sequence[Any]], list]:
    """The function by which a `reduce` folds two elements of each operand, applied to whole arrays of elements."""

    def elementwise(some: Sequence[Any], others: Sequence[Any]) -> list:
        mapped = functools.partial(_opened, eqn.params["jaxpr"])
        for _ in range(some[0].ndim):
            mapped = jax.vmap(mapped)
        return list(mapped(*some, *others))

    return elementwise


def _opened(closed: ClosedJaxpr, *operands: Any) -> list[Any]:
    """A jaxpr applied to operands, calls opened: a function would be bound to the mesh that it was traced on."""
    env = dict(zip((*closed.jaxpr.invars, *closed.jaxpr.constvars), (*operands, *closed.consts), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        called, inputs = called_jaxpr(eqn), list(map(read, eqn.invars))
        results = run(eqn, inputs) if called is None else _opened(called, *called_operands(eqn, inputs))
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, closed.jaxpr.outvars))


def on_host(aval: Any) -> bool:
    """Whether an array of this type lies in the host's memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def calls_back(jaxpr: Jaxpr | ClosedJaxpr) -> bool:
    """Whether a program calls Python as it runs, be it somewhere deep inside."""
    eqns = jaxpr.jaxpr.eqns if isinstance(jaxpr, ClosedJaxpr) else jaxpr.eqns
    params = [value for eqn in eqns for value in eqn.params.values()]
    params += [one for value in params if isinstance(value, tuple | list) for one in value]  # branches
    return any("callback" in eqn.primitive.name or eqn.primitive.name == "debug_print" for eqn in eqns) or any(
        calls_back(one) for one in params if isinstance(one, Jaxpr | ClosedJaxpr)
    )


def aval_of(atom: Any) -> Any:
    """The type of a variable or literal, which JAX declares without the shape and dtype that arrays have."""
    return atom.aval


def is_array(aval: Any) -> bool:
    """Whether something of this type is an array: not a token, nor a reference to memory that changes in place."""
    return isinstance(aval, jax.core.ShapedArray)


def array_bytes(aval: Any) -> int:
    """Bytes of a whole array of this type, or like a `jax.ShapeDtypeStruct`; 0 of what is no array."""
    if not is_array(aval) and not isinstance(aval, jax.ShapeDtypeStruct):
        return 0
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):  # of PRNG keys, and of flax's float8 layers
        return math.prod(aval.shape) * array_bytes(aval.dtype._rules.physical_element_aval(aval.dtype))
    # XLA has booleans for derivatives by integers, which have no bytes in NumPy.
    return math.prod(aval.shape) * (int(aval.dtype.itemsize) or 1)


def as_function(closed: ClosedJaxpr) -> Callable[..., list[Any]]:
    """The function of its arguments that a jaxpr is."""
    return lambda *operands: list(core.jaxpr_as_fun(closed)(*operands))
