"""One equation and the layouts of its operands in, the function that each device runs on its own shards out.

Most equations are left to XLA's partitioner. These kinds are not, and run inside a `shard_map` instead:

- Sums of which each device gets a slice. The partitioner only knows all_reduces, and not every backend turns an
  all_reduce and a slice into a reduce_scatter.
- Convolutions in groups, some of which the partitioner computes wrongly (`docs/xla_faults.md`).
- Reductions of a split dim by anything but a sum, product, minimum or maximum of real numbers. Backends have no
  all_reduce for them. The partitioner also starts each device's part from the initial value, which then counts as often
  as there are devices.
- What reads rows of its neighbours' shards (`halos.py`). The partitioner gathers some of these arrays whole, and its
  collectives are not the ones that were planned.
- What the partitioner gathers although only batches are split (`PrimitiveFacts.runs_on_shards`), as `top_k` on CPU and
  GPU. Of Fourier transforms it then runs some, on CPU, in an order of dims that its transforms do not know.
- Lookups of a single row along a split dim. XLA gathers the dim for a `dynamic_slice`, which XLA for GPU also makes of
  such a gather.
- Ragged products. Of rows that are split, each device counts those that it has of each group.
- Foreign functions for which the user has registered a rule that lets them be split.

A split factor of the rule becomes a smaller dim on each device; a split *group* factor of a convolution also becomes a
smaller group count. Where a reduced factor is split the devices' partial results are finished here.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autoshard.errors import PlanError
from autoshard.jaxprs import JaxprEqn, folded, run
from autoshard.layout import Layout, MeshShape, divides, local_shape, ordered_axes, shards, spec_of, spec_text
from autoshard.lower.halos import with_halos, with_rims, without_halos, wrapped_dims
from autoshard.lower.lookups import local_lookup
from autoshard.model.equations import (
    folds_by_hand,
    is_grouped_convolution,
    is_lookup,
    is_single_lookup,
    sums_locally,
)
from autoshard.model.xla.scatters import scatter_stages
from autoshard.operations.call import Call
from autoshard.operations.primitive import OPERATION
from autoshard.operations.reduce_scatter import reduce_scatter, scattered_product, scatters_second
from autoshard.operations.split import CallRun
from autoshard.plans.annotations import Annotations, Scatter
from autoshard.primitives import facts_of
from autoshard.program import Equation, Program, Value
from autoshard.propagation.halos import HaloRows
from autoshard.propagation.projection import factors_of_layout, layout_of_factors
from autoshard.propagation.registry import rule_of
from autoshard.propagation.rule import Rule
from autoshard.propagation.rules.windows import STENCIL, WRAPS, beyond

FOREIGN = "ffi_call"  # a function of another language, which knows nothing of partitioners


@dataclass(frozen=True)
class EquationSplit:
    """How one equation is split over a mesh."""

    rule: Rule
    axes: Mapping[str, tuple[str, ...]]  # factor -> the mesh axes that split it
    mesh: MeshShape

    @classmethod
    def of(cls, equation: Equation, wants: Sequence[Layout], mesh: MeshShape) -> EquationSplit:
        """The split that follows from the layouts in which the operands are read.

        Raises:
            PlanError: dims that belong together are not split alike.
        """
        rule = rule_of(equation)
        axes: dict[str, tuple[str, ...]] = {}
        for dims, layout in zip(rule.operands, wants, strict=True):
            axes |= factors_of_layout(dims, layout, rule.sizes, mesh)
        if [layout_of_factors(dims, axes, rule.sizes, mesh) for dims in rule.operands] != list(wants):
            raise PlanError(
                f"the plan reads the operands of {equation} as {', '.join(map(spec_text, wants))}, which splits dims "
                "that belong together in different ways.\nPlan the step anew; the file has been changed."
            )
        return cls(rule, axes, mesh)

    @property
    def looked_up(self) -> list[tuple[str, ...]]:
        """Of a lookup, the axes that split each dim of the array from which it takes one position per index."""
        return [
            tuple(axis for factor in dim if factor in self.rule.reduction for axis in self.axes.get(factor, ()))
            for dim in self.rule.operands[0]
        ]

    @property
    def reduced(self) -> tuple[str, ...]:
        """The axes over which results are partial, in mesh order."""
        axes = {axis for factor in self.rule.reduction | self.rule.summed for axis in self.axes.get(factor, ())}
        return ordered_axes(axes, self.mesh)

    @property
    def exchanged_rows(self) -> list[HaloRows]:
        """What devices bring of each other's rows."""
        return [rows for reach in self.rule.reaches for rows in reach.halos if self.axes.get(rows.factor)]

    def pieces(self, factor: str) -> int:
        """Into how many pieces a factor is split."""
        return shards(self.axes.get(factor, ()), self.mesh)

    def results(self) -> list[Layout | None]:
        """How finished results lie; None where no layout says so."""
        rule = self.rule
        return [layout_of_factors(dims, self.axes, rule.sizes, self.mesh) for dims in rule.results]


def may_run_on_shards(equation: Equation) -> bool:
    """Whether XLA's partitioner is not to be trusted with the equation, if it is split in some way."""
    unsafe = is_grouped_convolution(equation) or folds_by_hand(equation) or facts_of(equation.primitive).runs_on_shards
    return unsafe or is_single_lookup(equation) or bool(rule_of(equation).reaches)


def runs_on_shards(equation: Equation, split: EquationSplit) -> bool:
    """Whether XLA's partitioner is not to be trusted with the equation, split so."""
    if facts_of(equation.primitive).runs_on_shards or equation.primitive == STENCIL:
        return any(split.axes.values())
    if any(split.axes.get(factor) for factor in split.rule.exchanged):
        return True
    by_hand = folds_by_hand(equation) or is_single_lookup(equation)
    return is_grouped_convolution(equation) or (by_hand and bool(split.reduced))


def on_shards(eqn: JaxprEqn, equation: Equation, split: EquationSplit, scatter: Scatter | None) -> Callable[..., list]:
    """The function from one device's shards of the operands to its shards of the results, with mesh axes bound.

    Args:
        eqn: the equation as it stands in its jaxpr.
        equation: the same in the program.
        split: how it is split.
        scatter: how its partial sums are finished, if each device gets a slice of the sum.
    """
    local = eqn.replace(params={**eqn.params, **local_params(equation, split)})

    def on_one_device(*shards: Any) -> list:
        operands = with_halos(shards, split.rule, split.axes, split.mesh, functools.partial(beyond, equation))
        if WRAPS in equation.params:
            operands[0] = with_rims(operands[0], equation, {rows.dim for rows in split.exchanged_rows})
        if equation.primitive == "ragged_dot_general":
            operands = [*operands[:2], _local_groups(equation, split, *operands[2:])]
        if folds_by_hand(equation) and split.reduced:
            return _folded(local, operands, split.reduced)
        if scatter is not None and equation.primitive == "dot_general":
            numbers = local.params["dimension_numbers"]
            if scatters_second(numbers, operands[0].ndim, scatter.dim):
                return [scattered_product(local.params, operands, scatter.stages, scatter.others)]
        if is_lookup(equation) and split.reduced:
            partial = [local_lookup(eqn, operands, split.looked_up, local.params["slice_sizes"])]
        else:
            partial = run(local, operands)
        if equation.primitive == "select_and_scatter_add":
            partial = [without_halos(one, split.rule, split.axes) for one in partial]
        if scatter is not None:
            (one,) = partial
            return [reduce_scatter(one, scatter.dim, scatter.stages, scatter.others)]
        return [jax.lax.psum(one, split.reduced) for one in partial] if split.reduced else partial

    return on_one_device


def check_plan(program: Program, annotations: Annotations, mesh: MeshShape) -> None:
    """Checks what a plan says of a program's inner values, since the plan's file may have been edited.

    Most layouts only say where values lie. The layouts around an equation that runs on shards decide what is computed.

    Raises:
        PlanError: a layout does not fit its value; or an equation that runs on shards, or whose sum is scattered, is
            not split as its layouts say.
    """
    layouts_of_values = (layouts.items() for layouts in (annotations.homes, annotations.copies, annotations.sums))
    for value, layout in itertools.chain(*layouts_of_values):
        _check_layout(layout, program.values[value] if 0 <= value < len(program.values) else None, mesh)
    for (index, operand), layout in annotations.wants.items():
        inputs = program.equations[index].inputs if 0 <= index < len(program.equations) else ()
        _check_layout(layout, inputs[operand] if 0 <= operand < len(inputs) else None, mesh)
    if unknown := annotations.scatters.keys() - set(range(len(program.equations))):
        raise PlanError(f"the plan scatters the sum of equation {min(unknown)}, which {program.name} does not have")
    for index, chosen in annotations.runs.items():
        _check_run(program.equations[index] if 0 <= index < len(program.equations) else None, chosen, mesh)
    for equation in program.equations:
        scatter = annotations.scatters.get(equation.index)
        if scatter is None and not may_run_on_shards(equation):
            continue
        homes = [annotations.homes.get(value.id) for value in equation.outputs]
        if scatter is None and None in homes:
            continue
        split = EquationSplit.of(equation, wants_of(equation, annotations), mesh)
        if scatter is None:
            fits = not runs_on_shards(equation, split) or homes == split.results()
        else:
            fits = sums_locally(equation) and _fits(scatter, homes, split)
        if not fits:
            raise PlanError(
                f"the plan's layouts of {equation} contradict each other: split as its operands are, its results "
                f"would not lie as {', '.join(str(home and spec_of(home)) for home in homes)}"
                f"{'' if scatter is None else f' by {scatter}'}.\nPlan the step anew; the file has been changed."
            )


def _check_run(equation: Equation | None, run: CallRun, mesh: MeshShape) -> None:
    axes = [axis for _, names in run.roles for axis in names]
    fits = equation is not None and equation.primitive == OPERATION and len(set(axes)) == len(axes)
    if equation is None or not fits or not Call.of(equation, rule_of(equation)).can_run(run, mesh):
        what = "which the program does not have" if equation is None else f"{equation} cannot run so"
        raise PlanError(f"the plan says {run} of a call, {what}.\nPlan the step anew; the file has been changed.")


def _check_layout(layout: Layout, value: Value | np.ndarray | None, mesh: MeshShape) -> None:
    axes = [axis for dim in layout for axis in dim]
    fits = value is not None and len(layout) == len(value.shape) and mesh.keys() >= set(axes)
    if value is None or not fits or len(set(axes)) < len(axes) or not divides(value.shape, layout, mesh):
        what = "which the program does not have" if value is None else f"on the mesh {dict(mesh)}"
        raise PlanError(
            f"the plan says {spec_text(layout)} of {'a value' if value is None else value}, {what}.\n"
            "Plan the step anew; the file has been changed."
        )


def wants_of(equation: Equation, annotations: Annotations) -> list[Layout]:
    """The layout in which each operand is read; an operand of which the plan says nothing is whole."""
    found = []
    for operand, value in enumerate(equation.inputs):
        home = annotations.homes.get(value.id) if isinstance(value, Value) else None
        found.append(annotations.wants.get((equation.index, operand), home or ()) or ((),) * len(value.shape))
    return found


def _fits(scatter: Scatter, homes: Sequence[Layout | None], split: EquationSplit) -> bool:
    """Whether a scatter leaves the partial sums in the layout that the plan says."""
    if len(homes) != 1 or homes[0] is None or not 0 <= scatter.dim < len(homes[0]):
        return False
    (summed,), home = split.results(), homes[0]
    scattered = home[scatter.dim][len(summed[scatter.dim]) :] if summed is not None else ()
    rest = {axis for axis in split.reduced if axis not in scattered}
    expected = tuple(axes + scattered * (dim == scatter.dim) for dim, axes in enumerate(summed or ()))
    stages = scatter_stages(scattered, split.mesh)
    return bool(scattered) and home == expected and rest == set(scatter.others) and scatter.stages in stages


def local_params(equation: Equation, split: EquationSplit) -> dict[str, Any]:
    """What differs on one device: the group counts of a convolution, the padding of windows."""
    found: dict[str, Any] = {}
    if equation.primitive == FOREIGN:
        pairs = zip(equation.params["result_avals"], split.results(), strict=True)
        local = [aval.update(shape=local_shape(aval.shape, layout or (), split.mesh)) for aval, layout in pairs]
        found = {"result_avals": tuple(local)}
    if is_lookup(equation):
        array = equation.inputs[0].shape
        pieces = [math.prod(map(split.pieces, dim)) for dim in split.rule.operands[0]]
        taken = zip(equation.params["slice_sizes"], array, pieces, strict=True)
        found = {"slice_sizes": tuple(size // count if size == whole else size for size, whole, count in taken)}
    if is_grouped_convolution(equation):
        numbers, images = equation.params["dimension_numbers"], split.rule.operands[0]
        batch, channels = numbers.lhs_spec[:2]
        found = {
            name: equation.params[name] // split.pieces(images[dim][0])
            for name, dim in (("feature_group_count", channels), ("batch_group_count", batch))
            if equation.params[name] > 1
        }
    padding = {rows.dim: rows.padding for rows in split.exchanged_rows if "padding" in equation.params}
    padding |= {dim: (0, 0) for dim, wraps, _ in wrapped_dims(equation) if wraps}
    if padding or WRAPS in equation.params:
        dims = range(len(equation.inputs[0].shape))
        if equation.primitive == "conv_general_dilated":
            dims = equation.params["dimension_numbers"].lhs_spec[2:]
        as_written = zip(dims, equation.params["padding"], strict=True)
        found["padding"] = tuple(padding.get(dim, tuple(whole)) for dim, whole in as_written)
    return found


def _local_groups(equation: Equation, split: EquationSplit, sizes: jax.Array) -> jax.Array:
    """How many rows of each group of a ragged product one device has, of the dim that the groups divide."""
    (dim,) = equation.params["ragged_dot_dimension_numbers"].lhs_ragged_dimensions
    axes = tuple(axis for factor in split.rule.operands[0][dim] for axis in split.axes.get(factor, ()))
    if not axes:
        return sizes
    count = equation.inputs[0].shape[dim] // shards(axes, split.mesh)
    first = (jax.lax.axis_index(axes) * count).astype(sizes.dtype)
    ends = jnp.cumsum(sizes, axis=-1, dtype=sizes.dtype)
    inside = [jnp.clip(bounds, first, first + count) for bounds in (ends - sizes, ends)]
    return inside[1] - inside[0]


def _folded(eqn: JaxprEqn, operands: Sequence[jax.Array], axes: tuple[str, ...]) -> list:
    """A reduction of a dim that is split over these axes: each device folds its part, then all parts are folded."""

    def gathered(part: jax.Array) -> jax.Array:
        return jax.lax.all_gather(part, axes, axis=0)

    if eqn.primitive.name != "reduce":  # it starts from its own neutral element, however often
        (part,) = run(eqn, operands)
        return run(eqn.replace(params={**eqn.params, "axes": (0,)}), [gathered(part)])
    fold, dims = folded(eqn), tuple(eqn.params["dimensions"])
    count = len(operands) // 2
    arrays, initial = operands[:count], operands[count:]
    parts = _halved(fold, [jnp.moveaxis(x, dims, range(len(dims))) for x in arrays], len(dims))
    parts = _halved(fold, list(map(gathered, parts)), 1)
    return fold([jnp.broadcast_to(start, part.shape) for start, part in zip(initial, parts, strict=True)], parts)


def _halved(fold: Callable[[list, list], list], arrays: list[jax.Array], dims: int) -> list[jax.Array]:
    """The leading dims of arrays folded away, half by half, starting from nothing but their elements."""
    arrays = [x.reshape(-1, *x.shape[dims:]) for x in arrays]
    while (count := len(arrays[0])) > 1:
        half = count // 2
        pairs = fold([x[:half] for x in arrays], [x[half : 2 * half] for x in arrays])
        arrays = [jnp.concatenate([pair, x[2 * half :]]) for pair, x in zip(pairs, arrays, strict=True)]
    return [x[0] for x in arrays]
