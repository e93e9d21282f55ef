"""Strategies run on devices: every way to split every operation of a program, against the operation on one device.

`operations_of` walks a program as it runs on one device and keeps each operation once, with the arrays that it got
there: indices, keys and masks are real ones. `mismatches` runs its strategies on a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from cases import Case
from equality import assert_equal
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from autoshard.jaxprs import called_jaxpr, called_operands, is_array, is_kernel, run, scan_counts
from autoshard.layout import spec_of
from autoshard.lower import annotated
from autoshard.model.grouping import groups_of
from autoshard.model.groups import Group
from autoshard.model.strategies import Strategy, strategies_of
from autoshard.model.xla.backends import CPU
from autoshard.plans.annotations import Annotations
from autoshard.plans.chosen_options import scatter_of
from autoshard.program import Program, Value, trace
from autoshard.propagation import rules_for

TOGETHER = 16  # strategies that are compiled as one program
# Those that say themselves how they are split, and the one whose numbers no two runs share.
_LEFT_OUT = frozenset({"reshard", "rng_uniform", "shard_map", "sharding_constraint"})
_NOT_LOWERED = "XLA for CPUs cannot lower mhlo.mulhi over several devices, of a plain jax.jit neither"
_FEW_BITS = "sums of many numbers of few bits are rounded otherwise in another order"


@dataclass(frozen=True)
class Operation:
    """One equation of a program, and the operands it had on one device."""

    eqn: Any = field(repr=False)
    operands: tuple = field(repr=False)

    @property
    def text(self) -> str:
        """Equal for equations that do the same to arrays of the same types."""
        types = [f"{jax.typeof(x).str_short(short_dtypes=True)}" for x in self.operands]
        params = [f"{name}={value}" for name, value in sorted(self.eqn.params.items()) if " at 0x" not in str(value)]
        return f"{self.eqn.primitive.name}({', '.join(types)}) {' '.join(params)}"

    @property
    def known(self) -> str | None:
        """Why it can differ on several devices without a fault of ours; None if it must not."""
        if self.eqn.primitive.name in ("philox2x32", "philox4x32") or "key<phx" in self.text:
            return _NOT_LOWERED
        if self.eqn.primitive.name != "reduce_sum":
            return None
        dtype = self.eqn.outvars[0].aval.dtype
        return _FEW_BITS if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4 else None

    def __call__(self, *operands: Any) -> list:
        return run(self.eqn, operands)


def gradient_of(case: Case) -> Case | None:
    """The gradient by the float arguments of a sum over all that the case makes; None where there is none."""
    floats = tuple(i for i, x in enumerate(case.args) if jnp.issubdtype(x.dtype, jnp.floating))

    def total(*args: Any) -> Any:
        made = [x for x in jax.tree.leaves(case.fn(*args)) if jnp.issubdtype(x.dtype, jnp.inexact)]
        return sum((jnp.sin(jnp.abs(x)).sum().astype(jnp.float32) for x in made), jnp.float32(0))

    gradient = jax.grad(total, floats)
    try:
        jax.eval_shape(gradient, *case.args)
    except Exception:  # whatever JAX says of what has no derivative
        return None
    return Case(f"{case.name}, gradient", case.primitive, gradient, case.args) if floats else None


def operations_of(case: Case) -> dict[str, Operation]:
    """The operations of a program, loops and branches opened, by their text."""
    closed = jax.make_jaxpr(case.fn)(*case.args)
    found: dict[str, Operation] = {}
    _walk(closed, list(case.args), found)
    return found


def _walk(closed: Any, operands: Sequence[Any], found: dict[str, Operation]) -> list:
    env = dict(zip((*closed.jaxpr.invars, *closed.jaxpr.constvars), (*operands, *closed.consts), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else env[atom]

    for eqn in closed.jaxpr.eqns:
        inputs = list(map(read, eqn.invars))
        for inner, entries in _bodies(eqn, inputs):
            _walk(inner, entries, found)
        opened = called_jaxpr(eqn)
        if opened is None and not list(_bodies(eqn, inputs)):
            operation = Operation(eqn, tuple(inputs))
            found.setdefault(operation.text, operation)
        results = run(eqn, inputs)
        env.update(zip(eqn.outvars, results, strict=True))
    return list(map(read, closed.jaxpr.outvars))


def _bodies(eqn: Any, inputs: list) -> Iterator[tuple[Any, list]]:
    """The jaxprs that an equation runs, with what the first run of each gets."""
    name, params, opened = eqn.primitive.name, eqn.params, called_jaxpr(eqn)
    if opened is not None:
        yield opened, called_operands(eqn, inputs)
    elif name == "scan" and params["length"]:
        whole = sum(scan_counts(eqn))
        yield params["jaxpr"], inputs[:whole] + [x[0] for x in inputs[whole:]]
    elif name == "while":
        tests, consts = params["cond_nconsts"], params["body_nconsts"]
        carry = inputs[tests + consts :]
        yield params["cond_jaxpr"], inputs[:tests] + carry
        yield params["body_jaxpr"], inputs[tests : tests + consts] + carry
    elif name == "cond":
        for branch in params["branches"]:
            yield branch, inputs[1:]


@dataclass(frozen=True)
class Alone:
    """An operation as a program of its own, and the one group that it makes."""

    program: Program
    group: Group
    arrays: tuple  # its operands, each once

    @classmethod
    def of(cls, operation: Operation) -> Alone | None:
        """None where there is nothing to split."""
        arrays = [x for x in operation.operands if jnp.ndim(x)]

        program = trace(lambda *given: operation(*_filled(operation, given)), tuple(arrays), {})
        if len(program.equations) != 1:
            return None
        groups = groups_of(program, rules_for(program), CPU)
        return cls(program, groups[0], tuple(arrays))

    def annotations(self, strategy: Strategy) -> Annotations:
        (equation,), scatter = self.program.equations, scatter_of(self.group, strategy)
        wants = {
            (use.value.id, use.operand): want
            for use, want in zip(self.group.uses, strategy.operand_layouts, strict=True)
        }
        by_value = {value: want for (value, _), want in wants.items()}
        operands = [(i, x.id) for i, x in enumerate(equation.inputs) if isinstance(x, Value)]
        return Annotations(
            homes={value.id: by_value.get(value.id, ((),) * len(value.shape)) for value in self.program.arguments}
            | {made.value.id: layout for made, layout in zip(self.group.outputs, strategy.output_layouts, strict=True)},
            copies={},
            wants={(equation.index, i): wants.get((value, i), by_value[value]) for i, value in operands},
            scatters={} if scatter is None else {equation.index: scatter},
        )


def mismatches(operation: Operation, mesh: Mesh, chosen: Callable[[list], list] = list) -> Iterator[tuple[str, str]]:
    """The strategies of an operation that make something else on the mesh than on one device, and how that differs.

    Args:
        operation: with its operands.
        mesh: of the devices that it is run on.
        chosen: takes of the strategies those that are run.

    Yields:
        the strategy's text and the difference or error; ("", "") for each that is right.
    """
    atoms = (*operation.eqn.invars, *operation.eqn.outvars)
    if operation.eqn.primitive.name in _LEFT_OUT or not all(is_array(atom.aval) for atom in atoms):
        return
    alone = Alone.of(operation)
    if alone is None or is_kernel(operation.eqn):
        return
    expected = jax.jit(lambda *xs: operation(*_filled(operation, xs)))(*alone.arrays)
    strategies = chosen(strategies_of(alone.group, dict(mesh.shape), CPU))
    for start in range(0, len(strategies), TOGETHER):
        some = strategies[start : start + TOGETHER]
        try:
            made = _run(alone, some, mesh)
        except Exception:
            made = [_run_one(alone, strategy, mesh) for strategy in some]
        for strategy, results in zip(some, made, strict=True):
            yield _compared(results, expected, strategy)


def _filled(operation: Operation, arrays: Sequence[Any]) -> list:
    rest = iter(arrays)
    return [next(rest) if jnp.ndim(x) else x for x in operation.operands]


def _run(alone: Alone, strategies: Sequence[Strategy], mesh: Mesh) -> list[list]:
    """The results of each strategy, all compiled as one program; each has operands of its own."""
    annotations = list(map(alone.annotations, strategies))

    def all_of_them(*given: tuple) -> list[list]:
        return [annotated(alone.program, one, mesh)(*arrays) for one, arrays in zip(annotations, given, strict=True)]

    # Arrays of hosts are cut by NumPy, those of devices by a program per layout. Typed keys are on devices alone.
    arrays = [x if jnp.issubdtype(x.dtype, jax.dtypes.extended) else np.asarray(x) for x in alone.arrays]
    given = tuple(
        tuple(
            jax.device_put(array, NamedSharding(mesh, spec_of(one.homes[value.id])))
            for array, value in zip(arrays, alone.program.arguments, strict=True)
        )
        for one in annotations
    )
    return jax.jit(all_of_them)(*given)


def _run_one(alone: Alone, strategy: Strategy, mesh: Mesh) -> list | Exception:
    try:
        return _run(alone, [strategy], mesh)[0]
    except Exception as error:
        return error


def _compared(results: list | Exception, expected: list, strategy: Strategy) -> tuple[str, str]:
    text = f"{dict(strategy.assignment)} {[finish.kind for finish in strategy.finishes]} -> {strategy.output_layouts}"
    if isinstance(results, Exception):
        return text, f"{type(results).__name__}: {str(results).splitlines()[0]}"
    try:
        assert_equal(results, list(expected))
    except AssertionError as error:
        return text, str(error).strip().replace("\n", " ")[:200]
    return "", ""
