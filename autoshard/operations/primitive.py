"""A call of an operation as one equation of a jaxpr: how JAX evaluates, differentiates and batches it.

`operation` is the call. `operation_tangent` is its linear part in forward mode. That transposes to a call of the
backward operation. So a step and its gradient have one equation per call each, also in scans and under
`jax.checkpoint`. `batched` of an equation says per `jax.vmap`, outermost first, which operands have its leading dim;
all results do. `precision` is that of products at the call, as `jax.default_matmul_precision` sets it: the function is
traced later, when the step is lowered.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from autoshard.jaxprs import Primitive

if TYPE_CHECKING:
    from autoshard.operations.operation import Operation

OPERATION = "operation"
Batched = tuple[tuple[bool, ...], ...]

operation_p = Primitive(OPERATION)
operation_p.multiple_results = True
tangent_p = Primitive("operation_tangent")
tangent_p.multiple_results = True


def bind(operation: Operation, arrays: Sequence[Any], static: dict[str, Any]) -> Any:
    """A call as one equation; what the function returns."""
    operands = tuple(map(jnp.asarray, arrays))
    keywords = tuple(sorted(static.items()))
    structure = jax.tree.structure(jax.eval_shape(functools.partial(operation.function, **static), *operands))
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]  # JAX adds its flags later
    made = operation_p.bind(*operands, operation=operation, static=keywords, batched=(), precision=precision)
    return jax.tree.unflatten(structure, made)


def mapped(function: Any, batched: Batched) -> Any:
    """A function of one call's arrays to a list, mapped over the leading dims of a batch of calls."""
    for flags in reversed(batched):
        function = jax.vmap(function, in_axes=tuple(0 if flag else None for flag in flags))
    return function


def evaluated(
    *operands: Any, operation: Operation, static: tuple[tuple[str, Any], ...], batched: Batched, precision: str | None
) -> list[Any]:
    """The plain function of a call's operands, as a list of its results."""

    def plain(*arrays: Any) -> list[Any]:
        return jax.tree.leaves(operation.function(*arrays, **dict(static)))

    with jax.default_matmul_precision(precision):
        return list(mapped(plain, batched)(*operands))


def _is_inexact(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def tangents_of(
    *arrays: Any,
    operation: Operation,
    static: tuple[tuple[str, Any], ...],
    batched: Batched,
    precision: str | None,
    wrt: tuple[int, ...],
    count: int,
) -> list[Any]:
    """The tangents of a call's results of floating point.

    Args:
        arrays: the `count` operands, the results, and a tangent per operand of `wrt`.
    """
    operands, tangents = arrays[:count], arrays[len(arrays) - len(wrt) :]

    def of_wanted(*some: Any) -> list[Any]:
        own = dict(enumerate(operands)) | dict(zip(wrt, some, strict=True))
        made = evaluated(*own.values(), operation=operation, static=static, batched=batched, precision=precision)
        return [one for one in made if _is_inexact(one)]

    with jax.default_matmul_precision(precision):
        return list(jax.jvp(of_wanted, tuple(operands[i] for i in wrt), tuple(tangents))[1])


def _differentiated(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    results = operation_p.bind(*primals, **params)
    wrt = tuple(i for i, tangent in enumerate(tangents) if not isinstance(tangent, ad.Zero) and _is_inexact(primals[i]))
    given = [tangents[i] for i in wrt]
    count = len(primals)
    moving = iter(tangent_p.bind(*primals, *results, *given, wrt=wrt, count=count, **params) if wrt else ())
    return results, [
        next(moving) if wrt and _is_inexact(one) else ad.Zero(jax.typeof(one).to_tangent_aval()) for one in results
    ]


def _transposed(cotangents: Sequence[Any], *arrays: Any, operation, batched, wrt, count, **params) -> list[Any]:
    """Cotangents of the results to those of the tangents, by a call of the backward operation."""
    known = arrays[: len(arrays) - len(wrt)]
    operands, results = known[:count], known[count:]
    moving = iter(cotangents)
    floating = [(one, next(moving)) for one in results if _is_inexact(one)]
    given = [ad.instantiate_zeros(ct) if isinstance(ct, ad.Zero) else ct for _, ct in floating]
    backward = operation.backward_of(wrt, tuple(map(_is_inexact, results)))
    # A gradient of an operand that a batch shares is made per element of the batch, and summed up after.
    levels = [(*flags, *[True] * (len(results) + len(given))) for flags in batched]
    made = operation_p.bind(*operands, *results, *given, operation=backward, batched=tuple(levels), **params)
    gradients = []
    for i, gradient in zip(wrt, made, strict=True):
        shared = tuple(level for level, flags in enumerate(batched) if not flags[i])
        gradients.append(gradient.sum(shared) if shared else gradient)
    return [None] * len(known) + gradients


def _batch(primitive: Any, arrays: Sequence[Any], dims: Sequence[int | None], *, batched: Batched, **params: Any):
    """One more leading dim, which the operands get that have it."""
    flags = tuple(dim is not None for dim in dims)
    moved = [x if dim is None else jnp.moveaxis(x, dim, 0) for x, dim in zip(arrays, dims, strict=True)]
    made = primitive.bind(*moved, batched=(flags, *batched), **params)
    return made, [0] * len(made)


def _batch_tangents(arrays, dims, *, batched: Batched, wrt, count, **params):
    """The same of the tangent part, by its definition: its results and tangents have the new dim if an operand has."""

    def plain(*each: Any) -> list[Any]:
        return tangents_of(*each, batched=batched, wrt=wrt, count=count, **params)

    axes = tuple(dims)
    if all(axis is None for axis in axes[:count]):
        made = jax.vmap(plain, in_axes=axes)(*arrays)
        return made, [0] * len(made)
    size = next(x.shape[axis] for x, axis in zip(arrays, axes, strict=True) if axis is not None)
    full = [
        jnp.broadcast_to(x, (size, *x.shape))
        if axis is None and i >= count
        else x
        if axis is None
        else jnp.moveaxis(x, axis, 0)
        for i, (x, axis) in enumerate(zip(arrays, axes, strict=True))
    ]
    # Tangents of operands that the batch shares may differ along it: these operands are repeated.
    own = [
        jnp.broadcast_to(x, (size, *x.shape)) if i < count and axes[i] is None and i in wrt else x
        for i, x in enumerate(full)
    ]
    flags = tuple(axes[i] is not None or i in wrt for i in range(count))
    made = tangent_p.bind(*own, batched=(flags, *batched), wrt=wrt, count=count, **params)
    return made, [0] * len(made)


def _abstract(function: Any) -> Any:
    def types(*avals: Any, **params: Any) -> list[Any]:
        arrays = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals]
        made = jax.eval_shape(functools.partial(function, **params), *arrays)
        return [jax.core.ShapedArray(one.shape, one.dtype) for one in made]

    return types


operation_p.def_impl(evaluated)
operation_p.def_abstract_eval(_abstract(evaluated))
ad.primitive_jvps[operation_p] = _differentiated
batching.primitive_batchers[operation_p] = functools.partial(_batch, operation_p)
mlir.register_lowering(operation_p, mlir.lower_fun(evaluated, multiple_results=True))

tangent_p.def_impl(tangents_of)
tangent_p.def_abstract_eval(_abstract(tangents_of))
ad.primitive_jvps[tangent_p] = lambda primals, tangents, **params: jax.jvp(
    functools.partial(tangents_of, **params), tuple(primals), tuple(map(ad.instantiate_zeros, tangents))
)
ad.primitive_transposes[tangent_p] = _transposed
batching.primitive_batchers[tangent_p] = _batch_tangents
mlir.register_lowering(tangent_p, mlir.lower_fun(tangents_of, multiple_results=True))
