"""The arguments of a step in, out which of their dims is the batch, and its rows in microbatches."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from autoshard.errors import MicrobatchError
from autoshard.jaxprs import ClosedJaxpr, Jaxpr, aval_of, inner_jaxprs, is_array
from autoshard.microbatches.loop import looped
from autoshard.microbatches.relations import scaled_dims
from autoshard.microbatches.rows import Microbatches
from autoshard.program.paths import slashed
from autoshard.program.tracing import TracedStep

_ATTEMPTS = 6  # to find the batch: a step is traced again for each


def batch_of(traced: TracedStep, count: int, groups: int = 1) -> Microbatches:
    """The batch of a step: the first dim of the arrays that are no state.

    Of several sizes that such dims have, the batch is the one that the most arguments agree on; then, the one of the
    most elements. Arrays whose first dim has another size have no rows: tables, masks, keys.

    Raises:
        MicrobatchError: no argument has rows, or there are too few, or they do not divide.
    """
    dims = _first_dims(traced, count)
    batch = _ranked_sizes(traced, dims)[0]
    return _split(traced, [i for i, size in dims.items() if size == batch], batch, count, groups)


def _candidates(traced: TracedStep, count: int, groups: int) -> Iterator[Microbatches]:
    """What may be the batch, the likeliest first.

    Frozen weights are no state either. Where they have as many rows as the batch, one of the arguments with such rows
    is taken to have none, the one of the most arrays first. Then come other sizes.

    Raises:
        MicrobatchError: there is no batch, or the likeliest does not divide and no other does.
    """
    dims = _first_dims(traced, count)
    sizes = _ranked_sizes(traced, dims)
    fitting = [size for size in sizes if size % (count * groups) == 0]
    if not fitting:
        batch_of(traced, count, groups)
    for size in fitting:
        rows = [i for i, one in dims.items() if one == size]
        yield _split(traced, rows, size, count, groups)
        arrays = Counter(traced.paths[i][:2] for i in rows)
        for argument, _ in arrays.most_common() if len(arrays) > 1 else ():
            yield _split(traced, [i for i in rows if traced.paths[i][:2] != argument], size, count, groups)


def _first_dims(traced: TracedStep, count: int) -> dict[int, int]:
    """Argument -> its first dim, of those that are no state."""
    avals = traced.closed.in_avals
    dims = {i: aval.shape[0] for i, aval in enumerate(avals) if i not in traced.carried and _may_have_rows(aval)}
    if not dims:
        raise MicrobatchError(
            f"microbatches={count}: no argument has a batch; all arrays are state, which the step returns anew, or "
            "scalars.\nPass the batch as an argument of its own, with its rows along the first dim."
        )
    return dims


def _ranked_sizes(traced: TracedStep, dims: Mapping[int, int]) -> list[int]:
    """Sizes that the batch may have, the likeliest first."""
    agreeing, elements = Counter[int](), Counter[int]()
    for argument in {traced.paths[i][:2] for i in dims}:
        sizes = {size for i, size in dims.items() if traced.paths[i][:2] == argument}
        agreeing.update(sizes if len(sizes) == 1 else ())
    for i, size in dims.items():
        elements[size] += math.prod(traced.closed.in_avals[i].shape)
    return sorted(elements, key=lambda size: (agreeing[size], elements[size]), reverse=True)


def _split(traced: TracedStep, arguments: Sequence[int], batch: int, count: int, groups: int) -> Microbatches:
    """
    Raises:
        MicrobatchError: the rows do not divide.
    """
    rows = dict.fromkeys(arguments, 0)
    if batch % (count * groups):
        name = slashed(traced.paths[min(rows)][1:])
        fitting = [divisor for divisor in range(1, batch + 1) if batch % divisor == 0]
        raise MicrobatchError(
            f"microbatches={count} do not divide the {batch} rows of the batch ({name or 'the first argument'} and "
            f"{len(rows) - 1} more arrays).\nUse one of {', '.join(map(str, fitting))}, or pad the batch."
        )
    own = traced.carried if traced.has_own_statistics else None
    return Microbatches(count, batch, rows, groups, own_statistics=own)


def _may_have_rows(aval: Any) -> bool:
    """Whether an array may have rows of the batch: keys, raw ones too, have none."""
    if not is_array(aval) or not aval.shape or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return False
    return not (aval.shape == (2,) and aval.dtype == "uint32")


def in_microbatches(traced: TracedStep, count: int, groups: int = 1) -> tuple[ClosedJaxpr, str]:
    """The step as a loop over so many microbatches, and what is said of statistics of which each has its own.

    Args:
        groups: of rows that are run side by side, each with sums of its own until after the last microbatch.

    Raises:
        MicrobatchError: there is no batch to be split, or some line needs all of its rows at once.
    """
    part, split = traced_in_part(traced, count, groups)
    return looped(traced.closed, part, split)


def traced_in_part(traced: TracedStep, count: int, groups: int = 1) -> tuple[ClosedJaxpr, Microbatches]:
    """The step traced for the rows of one group of one microbatch, and where these rows are in the batch.

    Raises:
        MicrobatchError: there is no batch to be split, or the step does not take fewer rows.
    """
    if traced.is_explicit:
        raise MicrobatchError(
            f"microbatches={count}: the step says in types of explicit mode how its arrays lie, and those of a "
            "microbatch would differ.\nUse a mesh of Auto axes: jax.make_mesh(..., axis_types=(AxisType.Auto, ...))."
        )
    refusal: MicrobatchError | None = None
    for split in itertools.islice(_candidates(traced, count, groups), _ATTEMPTS):
        try:
            part = traced.again(tuple(_types(traced, split)))
            return part, _with_samples_together(traced.closed, part, split)
        except Exception as error:  # whatever the step does with fewer rows
            if refusal is None:
                refusal = MicrobatchError(
                    f"microbatches={count}: the step takes a batch of {split.batch} rows, but not one of {split.rows}: "
                    f"{error}\nUse fewer microbatches, or write the step for any number of rows."
                )
                refusal.__cause__ = error
    assert refusal is not None, "there is a candidate"
    raise refusal


def _with_samples_together(whole: ClosedJaxpr, part: ClosedJaxpr, split: Microbatches) -> Microbatches:
    """The split with rows of as many samples as the step treats together.

    A dim that grows with the batch, and is no multiple of it, has one element for several samples.
    """
    sizes = {split.batch, *_growing_sizes(whole.jaxpr, part.jaxpr, split.parts)}
    batch = math.gcd(*sizes)
    if batch % split.parts:  # the samples of one row would be in several microbatches
        return split
    return replace(split, batch=batch, samples=split.batch // batch)


def _growing_sizes(whole: Jaxpr, part: Jaxpr, parts: int) -> Iterator[int]:
    """Sizes of dims that are so many times as long in the whole step as in its part."""
    for eqn, small in zip(whole.eqns, part.eqns, strict=False):
        for made, other in zip(eqn.outvars, small.outvars, strict=False):
            if is_array(aval_of(made)) and is_array(aval_of(other)):
                shape = aval_of(made).shape
                yield from (shape[dim] for dim in scaled_dims(shape, aval_of(other).shape, parts) or ())
        for inner, inner_part in zip(inner_jaxprs(eqn), inner_jaxprs(small), strict=False):
            yield from _growing_sizes(inner.jaxpr, inner_part.jaxpr, parts)


def _types(traced: TracedStep, split: Microbatches) -> list[Any]:
    """The types of arguments with the rows of one microbatch."""
    return [
        jax.ShapeDtypeStruct(
            (aval.shape[0] // split.parts, *aval.shape[1:]) if i in split.dims else aval.shape,
            aval.dtype,
            weak_type=aval.weak_type,
        )
        if is_array(aval)
        else aval
        for i, aval in enumerate(traced.closed.in_avals)
    ]
