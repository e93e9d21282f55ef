"""A matrix product or convolution and how its tensors lie in, the factors that XLA's partitioner splits out.

A model of `PartitionDot` (openxla/xla, xla/service/spmd/dot_handler.cc). A factor is of one of four kinds, by the
tensors that have it: of the *batch* (all three), *contracted* (both operands), or of the *left* or the *right* operand
and the result. The partitioner looks for axes that two tensors have in one place:

1. If every device has its own piece of what is split, one rule for all axes decides (`_at_once`).
2. Otherwise some axes are settled, those of one kind, and the rest as if each piece were a product of its own. Of the
   kinds that match, the one that holds the fewest bytes goes first, then the one that moves the fewest.
3. Axes that split only the result slice an operand. Whatever else is split is gathered.

Axes that are settled are gathered wherever else they split an operand. Products whose operands are large enough for
XLA's windowed einsums are taken to be the collectives that these stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from autoshard.layout import Layout, MeshShape, axes_of, local_shape, shards
from autoshard.mesh.resharding import reshard
from autoshard.propagation.projection import factors_of_layout, layout_of_factors
from autoshard.propagation.rule import Rule

Split = Mapping[str, tuple[str, ...]]  # factor -> the mesh axes that split it

BATCH, CONTRACTED, LEFT, RIGHT = "batch", "contracted", "left", "right"


@dataclass(frozen=True)
class Product:
    """One product: its rule, what it works on, and where."""

    rule: Rule
    shapes: tuple[tuple[int, ...], ...]  # of the left operand, the right one, and the result
    layouts: tuple[Layout, ...]  # of these
    itemsizes: tuple[int, ...]  # bytes per element
    mesh: MeshShape

    @cached_property
    def kinds(self) -> Mapping[str, str]:
        """Factor -> its kind."""
        left, right, made = ({factor for dim in dims for factor in dim} for dims in self.dims)
        found = dict.fromkeys(left & right & made, BATCH) | dict.fromkeys((left & right) - made, CONTRACTED)
        return found | dict.fromkeys((left & made) - right, LEFT) | dict.fromkeys((right & made) - left, RIGHT)

    @property
    def dims(self) -> tuple:
        return (*self.rule.operands[:2], self.rule.results[0])

    def splits(self) -> tuple[Split, ...]:
        """How each tensor is split."""
        pairs = zip(self.dims, self.layouts, strict=True)
        return tuple(factors_of_layout(dims, layout, self.rule.sizes, self.mesh) for dims, layout in pairs)

    def local_bytes(self, tensor: int, layout: Layout) -> int:
        count = 1
        for size in local_shape(self.shapes[tensor], layout, self.mesh):
            count *= size
        return count * self.itemsizes[tensor]

    def size(self, tensor: int) -> int:
        """Bytes of the whole tensor."""
        return self.local_bytes(tensor, ((),) * len(self.shapes[tensor]))

    def cost(self, split: Split) -> tuple[float, float]:
        """Bytes that are made and bytes that are moved on one device, if the product is split so."""
        made = moved = 0.0
        for tensor, layout in enumerate(self.layouts):
            found = layout_of_factors(self.dims[tensor], split, self.rule.sizes, self.mesh)
            if found is None:
                return float("inf"), float("inf")
            source, target = (found, layout) if tensor == 2 else (layout, found)
            if tensor == 2:
                made += self.local_bytes(2, found)
                if any(self.kinds.get(factor) == CONTRACTED for factor in split):
                    made, moved = made + self.local_bytes(2, found), moved + self.local_bytes(2, found)
            if source != target:
                steps = reshard(self.shapes[tensor], self.itemsizes[tensor], source, target, self.mesh)
                moved += sum(step.bytes for step in steps)
                made += sum(step.bytes for step in steps[:-1]) + self.local_bytes(tensor, target)
        return made, moved


def product_split(product: Product) -> Split:
    """The factors that XLA splits of a product, and over which axes."""
    splits = product.splits()
    used = {axis for split in splits for axes in split.values() for axis in axes}
    return _settled(product, splits, frozenset(axis for axis in product.mesh if axis in used))


def _settled(product: Product, splits: Sequence[Split], axes: frozenset[str]) -> Split:
    """The factors that are split over these axes, where tensors are split over no others."""
    if not axes:
        return {}
    found = _at_once(product, splits, axes, may_reshard=False)
    if found is not None:
        return found
    ways = [
        {**first, **_joined(first, _settled(product, [_without(split, first) for split in splits], axes - _axes(first)))}
        for first in _matches(product, splits)
    ]
    if ways:
        return min(ways, key=product.cost)
    left, right, made = splits
    if not left and not right and made and _axes(made) != axes:
        return _settled(product, splits, _axes(made))
    return _at_once(product, splits, axes, may_reshard=True) or {}


def _at_once(product: Product, splits: Sequence[Split], axes: frozenset[str], may_reshard: bool) -> Split | None:
    """The split, if each tensor is whole or split over all of the axes, and one rule settles all of them."""
    if any(split and _axes(split) != axes for split in splits):
        return None
    left, right, made = splits

    def only(split: Split, kind: str) -> bool:
        return bool(split) and all(product.kinds.get(factor) == kind for factor in split)

    if only(left, BATCH) and left == right:
        return left
    for operand in (left, right):
        if only(operand, BATCH) and operand == made:
            return operand
    if only(left, CONTRACTED) and only(right, CONTRACTED):
        return right if product.size(0) < product.size(1) else left
    if only(left, LEFT) and left == made:
        return left
    if only(right, RIGHT) and right == made:
        return right
    if may_reshard and any(only(made, kind) for kind in (BATCH, LEFT, RIGHT)):
        return made
    if not made and not left and only(right, CONTRACTED) and product.size(1) > product.size(2):
        return right
    if not made and not right and only(left, CONTRACTED) and product.size(0) > product.size(2):
        return left
    return None


def _matches(product: Product, splits: Sequence[Split]) -> Iterator[Split]:
    """What may be settled first: factors of one kind that two tensors split."""
    left, right, made = splits

    def of(split: Split, kind: str) -> Split:
        return {factor: axes for factor, axes in split.items() if product.kinds.get(factor) == kind}

    def pieces(split: Split) -> int:
        return shards(tuple(_axes(split)), product.mesh)

    batches = [of(split, BATCH) for split in splits]
    if batches[2] and pieces(batches[2]) in (pieces(batches[0]), pieces(batches[1])):
        yield batches[0] if batches[0] == batches[1] else batches[2]
    sides = [(of(left, LEFT), of(made, LEFT)), (of(right, RIGHT), of(made, RIGHT))]
    whole = [side for side, (operand, result) in enumerate(sides) if operand and pieces(operand) == pieces(result)]
    if whole:
        yield sides[_cheaper_side(product, sides) if len(whole) == 2 else whole[0]][1]
    else:
        for operand, result in sides:
            if operand and result:
                if matching := _alike(operand, result, product.mesh):
                    yield matching
                break
    contracted = of(left, CONTRACTED), of(right, CONTRACTED)
    larger = contracted[1] if product.size(0) < product.size(1) else contracted[0]
    if contracted[0] and pieces(contracted[0]) == pieces(contracted[1]):
        yield larger
    elif matching := _alike(*contracted, product.mesh):
        yield matching


def _cheaper_side(product: Product, sides: Sequence[tuple[Split, Split]]) -> int:
    """Which operand stays as it is: the one for which less of the other is gathered."""
    gathered = [
        shards(tuple(_axes(sides[side][0])), product.mesh)
        * product.local_bytes(1 - side, product.layouts[1 - side])
        for side in (0, 1)
    ]
    return 0 if gathered[0] < gathered[1] else 1


def _alike(one: Split, other: Split, mesh: MeshShape) -> Split:
    """The factors that both split into as many pieces, as the second does."""
    return {
        factor: other[factor]
        for factor, axes in one.items()
        if factor in other and shards(axes, mesh) == shards(other[factor], mesh)
    }


def _axes(split: Split) -> frozenset[str]:
    return axes_of(tuple(split.values()))


def _without(split: Split, settled: Split) -> Split:
    """What is left of a split once axes are settled."""
    gone = _axes(settled)
    kept = {factor: tuple(axis for axis in axes if axis not in gone) for factor, axes in split.items()}
    return {factor: axes for factor, axes in kept.items() if axes}


def _joined(first: Split, then: Split) -> Split:
    """The factors of a later split, with the axes that the first has for them before."""
    return {factor: (*first.get(factor, ()), *axes) for factor, axes in then.items()}
