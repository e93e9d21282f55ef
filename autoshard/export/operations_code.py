"""A jaxpr in, the code of the same as data out: what `Plan.to_code` writes of a step that autoshard changed.

Bodies of calls, loops and branches are `Body`s of their own, in the order in which they are needed. So is what an
operation of autoshard computes; how devices share it is left to the compiler. What code cannot say is refused:
functions among parameters, as callbacks and kernels have them, and primitives that JAX does not show.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.export.containers import UnwritableError, home_of, literal
from autoshard.export.standalone import CALLS, loops_of_batches, scan_counts
from autoshard.export.written_out import FUNCTIONS
from autoshard.jaxprs import (
    CONSTRAINTS,
    REMAT,
    ClosedJaxpr,
    Jaxpr,
    JaxprEqn,
    Literal,
    Primitive,
    aval_of,
    called_jaxpr,
    inner_jaxprs,
    public_primitives,
)
from autoshard.operations.primitive import OPERATION, evaluated
from autoshard.primitives import applies_function
from autoshard.program.explicit import open_axes
from autoshard.program.user_code import source_of

# The primitives by their names, where JAX shows them.
PRIMITIVES = """
_PRIMITIVES = {
    one.name: one
    for module in (jax.lax, jax.extend.core.primitives)
    for one in vars(module).values()
    if isinstance(one, jax.extend.core.Primitive)
}
"""
PRIMITIVE_MODULES = ("jax.extend.core.primitives",)
_FUNCTIONS = {"ragged_dot_general", *FUNCTIONS} | {
    f"scatter{kind}" for kind in ("", "-add", "-max", "-min", "-mul", "-sub")
}
_TRACED_LATE = "call_hi_primitive"  # a call whose function JAX traces when the primitive is bound
# Of a scatter, what its function takes; the others are functions that the function makes itself.
_SCATTERS = ("dimension_numbers", "indices_are_sorted", "mode", "unique_indices")
_DIGITS_PER_LINE = 100  # of hexadecimal numbers, so that lines stay below 120 columns


def operations_code(closed: ClosedJaxpr, mesh: Mapping[str, int]) -> tuple[str, frozenset[str]]:
    """The code of a function `_operations` that gives the jaxpr as a `Body`, and the modules that it needs.

    Args:
        mesh: what the step is planned for.

    Raises:
        UnwritableError: code cannot say some operation; the error names it and its line.
    """
    writer = _Writer(mesh)
    last = writer.body(closed)
    types = ", ".join(literal(f"{aval.dtype}{list(aval.shape)}") for aval in map(aval_of, closed.jaxpr.invars))
    lines = [*writer.lines, f"    return {last}._replace(types=[{types}])"]
    head = 'def _operations():\n    """The operations of the step as they were planned."""\n'
    return head + "\n".join(lines) + "\n", frozenset(writer.modules)


class _Writer:
    """Bodies, written one after the other."""

    def __init__(self, mesh: Mapping[str, int]) -> None:
        self.mesh = mesh
        self.lines: list[str] = []
        self.modules: set[str] = set()
        self._names: dict[tuple[int, ...], str] = {}
        self._kept: list[Any] = []  # so that no other jaxpr gets the identity of one

    def body(self, called: ClosedJaxpr | Jaxpr) -> str:
        """The name of a body, which is written first if it was not yet."""
        jaxpr, consts = (called.jaxpr, called.consts) if isinstance(called, ClosedJaxpr) else (called, ())
        key = id(jaxpr), *map(id, consts)
        if key not in self._names:
            self._kept.append(called)
            text = self._body(jaxpr, consts)
            self._names[key] = f"body_{len(self._names)}"
            self.lines += [f"    {self._names[key]} = Body(", *text, "    )"]
        return self._names[key]

    def _body(self, jaxpr: Jaxpr, consts: Sequence[Any]) -> list[str]:
        numbers: dict[Any, int] = {}

        def made(variable: Any) -> str:
            return str(numbers.setdefault(variable, len(numbers)))

        def read(atom: Any) -> str:
            return self._number(atom) if isinstance(atom, Literal) else str(numbers[atom])

        def list_of(texts: Iterator[str]) -> str:
            return f"[{', '.join(texts)}]"

        constants = {made(variable): const for variable, const in zip(jaxpr.constvars, consts, strict=True)}
        inputs = list_of(map(made, jaxpr.invars))
        lines = []
        for eqn in jaxpr.eqns:
            arguments = f"{self._primitive(eqn)}, {list_of(map(read, eqn.invars))}, {list_of(map(made, eqn.outvars))}"
            if params := self._params(eqn):
                arguments += f", dict({', '.join(f'{name}={text}' for name, text in params.items())})"
            if not eqn.ctx.threefry_partitionable:
                arguments += ", threefry_partitionable=False"
            source = source_of(eqn)
            lines.append(f"            Operation({arguments}),{f'  # {source}' if source else ''}")
        text = [
            f"        {inputs},",
            "        [",
            *lines,
            "        ],",
            f"        {list_of(map(read, jaxpr.outvars))},",
        ]
        if constants:
            held = (f"            {number}: {_constant(const)}," for number, const in constants.items())
            text += ["        {", *held, "        },"]
        return text

    def _number(self, atom: Literal) -> str:
        return f"number({literal(str(aval_of(atom).dtype))}, {literal(np.asarray(atom.val).item())})"

    def _primitive(self, eqn: JaxprEqn) -> str:
        name = eqn.primitive.name
        if name == _TRACED_LATE and called_jaxpr(eqn) is not None:
            return 'Function("call")'
        if eqn.ctx.compute_type is not None or eqn.ctx.xla_metadata:
            raise _refusal(eqn, "it has metadata for the compiler")
        if name in CALLS | REMAT | _FUNCTIONS or name in (
            "cond",
            "scan",
            "shard_map",
            "sharding_constraint",
            "while",
        ):
            return f"Function({literal(name)})"
        return self._bound(eqn.primitive, eqn)

    def _bound(self, primitive: Primitive, eqn: JaxprEqn) -> str:
        if public_primitives().get(primitive.name) is not primitive:
            raise _refusal(eqn, f"JAX does not show the primitive {primitive.name}")
        return f"_PRIMITIVES[{literal(primitive.name)}]"

    def _params(self, eqn: JaxprEqn) -> dict[str, str]:
        name, params = eqn.primitive.name, eqn.params
        if name == _TRACED_LATE and (called := called_jaxpr(eqn)) is not None:
            return {"jaxpr": self.body(called)}
        if name in CALLS:
            return {"jaxpr": self.body(params["jaxpr" if "jaxpr" in params else "call_jaxpr"])}
        if name in REMAT:
            keywords = {key: literal(params[key]) for key in ("prevent_cse", "differentiated")}
            return {"jaxpr": self.body(params["jaxpr"]), **keywords}
        if name == "scan":
            keywords = {key: literal(params[key]) for key in ("length", "reverse", "unroll")}
            return {"jaxpr": self.body(params["jaxpr"]), **keywords, "counts": literal(scan_counts(eqn))}
        if name == "while":
            keywords = {key: literal(params[key]) for key in ("cond_nconsts", "body_nconsts")}
            bodies = {key: self.body(params[key]) for key in ("cond_jaxpr", "body_jaxpr")}
            return {**bodies, **keywords, "of_batches": literal(loops_of_batches(params))}
        if name == "cond":
            if params.get("branches_platforms") is not None:
                raise _refusal(eqn, "its branches are for several platforms")
            return {"branches": f"[{', '.join(map(self.body, params['branches']))}]"}
        if name == "shard_map":
            return self._by_hand(eqn)
        if name == "sharding_constraint":
            return {"sharding": self._constraint(params["sharding"], eqn)}
        if name == OPERATION:
            arrays = (jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in map(aval_of, eqn.invars))
            return {"body": self.body(jax.make_jaxpr(functools.partial(evaluated, **params))(*arrays))}
        if name == "device_put":
            if any(device is not None for device in params["devices"]):
                raise _refusal(eqn, "it names devices")
            return {}
        if name in ("random_wrap", "random_seed"):
            return {"impl": literal(params["impl"].name)}
        if applies_function(name, params):
            raise _refusal(eqn, "it applies a function")
        if name.startswith("scatter"):
            params = {key: params[key] for key in _SCATTERS}
        return {key: self._param(value, eqn, key) for key, value in params.items()}

    def _by_hand(self, eqn: JaxprEqn) -> dict[str, str]:
        """What `jax.shard_map` takes. Constraints inside would be on axes that are left."""
        params = eqn.params
        if dict(params["mesh"].shape) != dict(self.mesh):
            raise _refusal(eqn, f"it is on the mesh {dict(params['mesh'].shape)}")
        if any(_constrains(params["jaxpr"])):
            raise _refusal(eqn, "it has constraints inside")
        specs = {
            key: f"({''.join(f'{literal_spec(one)}, ' for one in params[key])})" for key in ("in_specs", "out_specs")
        }
        axes = f"{{{', '.join(map(literal, sorted(params['newly_manual_axes'])))}}}"
        return {"body": self.body(params["jaxpr"]), **specs, "axis_names": axes}

    def _constraint(self, sharding: Any, eqn: JaxprEqn) -> str:
        if not isinstance(sharding, NamedSharding) or sharding.memory_kind not in (None, "device"):
            raise _refusal(eqn, "it moves arrays elsewhere")
        if open_axes(sharding.mesh):  # the plan decides along open axes, too
            return "[]"
        return f"[{literal_spec(sharding.spec)}]"

    def _param(self, value: Any, eqn: JaxprEqn, key: str) -> str:
        """A parameter as code."""
        if isinstance(value, Primitive):
            return self._bound(value, eqn)
        if isinstance(value, NamedSharding) and not any(value.spec):
            return "None"
        if isinstance(value, enum.Enum):
            return f"{self._home(type(value), eqn, key)}.{value.name}"
        if isinstance(value, np.dtype) or (isinstance(value, type) and issubclass(value, np.generic)):
            return f"jnp.dtype({literal(str(np.dtype(value)))})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = dict(zip(value._fields, value, strict=True))
            return f"{self._home(type(value), eqn, key)}({self._fields(fields, eqn, key)})"
        if type(value) in (tuple, list):
            parts = [self._param(one, eqn, key) for one in value]
            return f"({', '.join(parts)}{',' * (len(parts) == 1)})"
        if isinstance(value, np.generic):
            return literal(value.item())
        if isinstance(value, np.ndarray):
            return _constant(value)
        if value is None or type(value) in (bool, int, float, complex, str, bytes):
            return literal(value)
        if isinstance(value, jax.lax.RaggedDotDimensionNumbers):
            return f"jax.lax.RaggedDotDimensionNumbers({self._fields(vars(value), eqn, key)})"
        raise _refusal(eqn, f"its parameter {key} is a {type(value).__name__}")

    def _fields(self, fields: Mapping[str, Any], eqn: JaxprEqn, key: str) -> str:
        return ", ".join(f"{name}={self._param(one, eqn, key)}" for name, one in fields.items())

    def _home(self, kind: type, eqn: JaxprEqn, key: str) -> str:
        try:
            module, name = home_of(kind)
        except UnwritableError:
            raise _refusal(eqn, f"its parameter {key} is a {kind.__name__}") from None
        self.modules.add(module)
        return f"{module}.{name}"


def _constrains(jaxpr: Jaxpr) -> Iterator[bool]:
    """Per equation, those inside of others too, whether it is a constraint."""
    for eqn in jaxpr.eqns:
        yield eqn.primitive.name in CONSTRAINTS
        for inner in inner_jaxprs(eqn):
            yield from _constrains(inner.jaxpr)


def literal_spec(spec: PartitionSpec) -> str:
    """As code, with the entries that it has.

    >>> literal_spec(PartitionSpec("data", None, PartitionSpec.UNCONSTRAINED))
    'P("data", None, P.UNCONSTRAINED)'
    """
    entries = ("P.UNCONSTRAINED" if one is PartitionSpec.UNCONSTRAINED else literal(one) for one in spec)
    return f"P({', '.join(entries)})"


def _refusal(eqn: JaxprEqn, why: str) -> UnwritableError:
    source = source_of(eqn)
    return UnwritableError(f"{eqn.primitive.name}{f' at {source}' if source else ''} cannot be written as code: {why}")


def _constant(value: Any) -> str:
    if jax.dtypes.issubdtype(jax.typeof(value).dtype, jax.dtypes.prng_key):
        how = literal(str(jax.random.key_impl(value)))
        return f"jax.random.wrap_key_data({_constant(jax.random.key_data(value))}, impl={how})"
    held = np.asarray(value)
    digits = np.ascontiguousarray(held).tobytes().hex()
    lines = [digits[i : i + _DIGITS_PER_LINE] for i in range(0, len(digits), _DIGITS_PER_LINE)] or [""]
    text = " ".join(f'"{line}"' for line in lines)
    return f"array({literal(str(held.dtype))}, {literal(held.shape)}, {text})"
