"""A matrix product or convolution and how its tensors lie in, the factors that XLA's partitioner splits out.

A model of `PartitionDot` (openxla/xla, xla/service/spmd/dot_handler.cc). A factor is of one of four kinds, by the
tensors that have it: of the *batch* (all three), *contracted* (both operands), or of the *left* or the *right* operand
and the result. The partitioner looks for axes that two tensors have in one place:

1. If every device has its own piece of what is split, one rule for all axes decides (`_at_once`).
2. Otherwise some axes are settled, those of one kind, and the rest as if each piece were a product of its own. Of the
   kinds that match, the one that holds the fewest bytes goes first, then the one that moves the fewest.
3. Where no two tensors agree, operands go where the result wants them.
4. A sum over axes that split the result, too, is shared out over as many devices that would compute the same. If these
   are more, XLA uses some of them, which no layout over whole axes says: this is not modelled.

Axes that are settled are gathered wherever else they split an operand. Those of the first step are gathered for the
whole product, the others among the devices that have one piece. XLA writes the collectives of the two differently, so
it does not see when both gather the same value. Products whose operands are large enough for XLA's windowed einsums are
taken to be the collectives that these stand for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from autoshard.layout import MeshShape, axes_of, shards
from autoshard.model.partitioner.placed_equation import PlacedEquation, SettledSplit, Split

BATCH, CONTRACTED, LEFT, RIGHT = "batch", "contracted", "left", "right"


class PlacedProduct:
    """A product: left operand, right operand, result."""

    def __init__(self, placed: PlacedEquation):
        self.placed, self.mesh, self.splits = placed, placed.mesh, placed.splits
        left, right, made = ({factor for dim in tensor.dims for factor in dim} for tensor in placed.tensors)
        self.kinds: Mapping[str, str] = {  # of each factor
            **dict.fromkeys(left & right & made, BATCH),
            **dict.fromkeys((left & right) - made, CONTRACTED),
            **dict.fromkeys((left & made) - right, LEFT),
            **dict.fromkeys((right & made) - left, RIGHT),
        }

    def size(self, tensor: int) -> int:
        """Bytes of the whole tensor."""
        return self.placed.tensors[tensor].bytes

    def of_kind(self, split: Split, kind: str) -> Split:
        return {factor: axes for factor, axes in split.items() if self.kinds.get(factor) == kind}


def product_split(placed: PlacedEquation) -> SettledSplit:
    """The factors that XLA splits of a product, and over which axes."""
    product = PlacedProduct(placed)
    used = frozenset().union(*map(_axes, product.splits))
    return _over_idle_axes(product, used) or _settled(product, product.splits, used)


def _over_idle_axes(product: PlacedProduct, used: frozenset[str]) -> SettledSplit | None:
    """A sum over axes that split the result, too, where as many devices would compute the same: these share it out."""
    left, right, made = product.splits
    summed = product.of_kind(left, CONTRACTED)
    idle = tuple(axis for axis in product.mesh if axis not in used)
    is_shared = summed and summed == left == right and len(made) == 1 and _axes(made) == used
    if not is_shared or shards(idle, product.mesh) != shards(tuple(used), product.mesh):
        return None
    return SettledSplit({**summed, **dict.fromkeys(made, idle)})


def _settled(product: PlacedProduct, splits: Sequence[Split], axes: frozenset[str]) -> SettledSplit:
    """The factors that are split over these axes, where tensors are split over no others."""
    if not axes:
        return SettledSplit({})
    found = _at_once(product, splits, axes, may_reshard=False)
    if found is not None:
        return SettledSplit(found)
    ways = []
    for first in _matches(product, splits):
        inner = axes - _axes(first)
        then = _settled(product, _rest_of_splits(product, splits, first), inner)
        ways.append(SettledSplit({**first, **_joined(first, then.split)}, inner))
    if ways:
        return min(ways, key=lambda way: product.placed.cost(way.split))
    return SettledSplit(_at_once(product, splits, axes, may_reshard=True) or splits[2])


def _at_once(product: PlacedProduct, splits: Sequence[Split], axes: frozenset[str], may_reshard: bool) -> Split | None:
    """The split, if all of the axes split some tensors in dims of one kind, and one rule settles them."""
    left, right, made = splits

    def only(split: Split, kind: str) -> bool:
        return _axes(split) == axes and product.of_kind(split, kind) == split

    if only(left, BATCH) and left == right:
        return left
    for operand in (left, right):
        if only(operand, BATCH) and operand == made:
            return operand
    if only(left, CONTRACTED) and only(right, CONTRACTED) and (may_reshard or not made or _axes(made) == axes):
        return right if product.size(0) < product.size(1) else left
    if only(left, LEFT) and left == made:
        return left
    if only(right, RIGHT) and right == made:
        return right
    if may_reshard and made:
        return made
    if not made and not left and only(right, CONTRACTED) and product.size(1) > product.size(2):
        return right
    if not made and not right and only(left, CONTRACTED) and product.size(0) > product.size(2):
        return left
    return None


def _matches(product: PlacedProduct, splits: Sequence[Split]) -> Iterator[Split]:
    """What may be settled first: factors of one kind that two tensors split."""
    left, right, made = splits

    def pieces(split: Split) -> int:
        return shards(tuple(_axes(split)), product.mesh)

    of = product.of_kind
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


def _cheaper_side(product: PlacedProduct, sides: Sequence[tuple[Split, Split]]) -> int:
    """Which operand stays as it is: the one for which less of the other is gathered."""
    gathered = [
        shards(tuple(_axes(sides[side][0])), product.mesh) * product.placed.tensors[1 - side].local_bytes(product.mesh)
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


def _rest_of_splits(product: PlacedProduct, splits: Sequence[Split], first: Split) -> list[Split]:
    """What is left of the splits in each piece of what is settled.

    Each device makes all of a dim of the result that is to be split over axes of a sum and over others, if no operand
    has that dim in pieces.
    """
    left, right, made = (_without(split, first) for split in splits)
    if product.of_kind(first, CONTRACTED) == first:
        gone = _axes(first)
        mixed = {factor for factor, axes in splits[2].items() if not gone.isdisjoint(axes)}
        made = {factor: axes for factor, axes in made.items() if factor not in mixed or factor in {**left, **right}}
    return [left, right, made]


def _joined(first: Split, then: Split) -> Split:
    """The factors of a later split, with the axes that the first has for them before."""
    return {factor: (*first.get(factor, ()), *axes) for factor, axes in then.items()}
