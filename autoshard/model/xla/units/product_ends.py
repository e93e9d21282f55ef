"""What runs in the operation of a product: elementwise work on what it makes, and sums of that.

Source: products with sums of their results, and attention with its gradients, compiled for v5e:2x4.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from autoshard.model.groups import Group
from autoshard.model.xla.gpu.library_kernels import ends_as_libraries_do
from autoshard.model.xla.products import multiplies_vector
from autoshard.model.xla.units.streams import STREAMED_BYTES
from autoshard.primitives import FlopRule, facts_of
from autoshard.program import Equation

_NEAR = 100  # groups between a product and a reduction: those farther apart read what is made of it


def ending_products(
    groups: Sequence[Group],
    readers: Mapping[int, Sequence[tuple[Equation, int]]],
    home: Mapping[int, Group],
    makers: Mapping[int, Group],
    repeated: Sequence[bool],
    *,
    by_library: bool,
) -> list[Group | None]:
    """The product that each group ends, if any: it alone reads the product, or reduces it or what is made of it.

    What a reduction computes again of a product as it reads ends it, too, unless it reads what is made of the product
    by others. So the backward pass of a softmax sums up while the gradient is made, which is stored beside the sums.
    Libraries on GPU end products in few ways, and reduce none.

    Args:
        groups: of a program.
        readers: value -> the equations that read it, as which operand.
        home: equation -> its group.
        makers: value -> the group that makes it; arguments have none.
        repeated: per group, whether its readers compute it again.
        by_library: whether libraries make products.
    """
    ends: list[Group | None] = [None] * len(groups)
    for group in groups:
        made_by = [(use.value.id, makers[use.value.id]) for use in group.uses if use.value.id in makers]
        products = [value for value, maker in made_by if maker.contracts and not multiplies_vector(maker)]
        if group.fuses:
            alone = (one for one in products if all(home[reader.index] is group for reader, _ in readers[one]))
            if not by_library or ends_as_libraries_do(group.equations):
                ends[group.index] = next((makers[one] for one in alone), None)
        elif facts_of(group.equations[0].primitive).work is FlopRule.REDUCTION and not by_library:
            read = (makers[one] if one in products else ends[maker.index] for one, maker in made_by)
            ends[group.index] = next((one for one in read if one is not None), None)
            if ends[group.index] is None:
                product, way = _way_from_product(group, makers, repeated, ends)
                for one in way:
                    ends[one.index] = product
    return ends


def _way_from_product(
    reduction: Group, makers: Mapping[int, Group], repeated: Sequence[bool], ends: Sequence[Group | None]
) -> tuple[Group | None, list[Group]]:
    """A product, and the groups that are one operation with it: a reduction, and the elementwise work in between.

    There are none if the reduction reads what is made of the product, too. But of a softmax, XLA for TPU finds the
    maxima of the rows in the same operation and stores the exponentials that it sums up. It does if they are made in 32
    bits, or of the product itself.
    """
    ways: dict[int, tuple[Group, list[Group]]] = {}  # of the groups that the operation reads
    ahead: list[tuple[Group, list[Group]]] = [(reduction, [])]
    seen: set[int] = set()
    while ahead:
        group, way = ahead.pop()
        for maker in (makers[use.value.id] for use in group.uses if use.value.id in makers):
            if maker.index in seen:
                continue
            seen.add(maker.index)
            if maker.fuses and repeated[maker.index]:
                ahead.append((maker, [*way, maker]))
            else:
                ways[maker.index] = maker, way
    products = [one for one, _ in ways.values() if one.contracts and not multiplies_vector(one)]
    if not products:
        return None, []
    product = max(products, key=lambda one: one.index)
    size = math.prod(product.outputs[0].value.shape)
    _, way = ways.pop(product.index)
    is_elementwise = all(math.prod(one.outputs[0].value.shape) == size for one in way)
    is_near = reduction.index - product.index < _NEAR
    if not is_elementwise or not is_near:
        return None, []
    dependent = [one for one, _ in ways.values() if _depends_on(product, one, makers)]
    are_maxima = all(one.equations[0].primitive == "reduce_max" and ends[one.index] for one in dependent)
    if dependent and not (are_maxima and any(_exponentiates(one, product, makers) for one in way)):
        return None, []
    return product, [reduction, *way]


def _exponentiates(group: Group, product: Group, makers: Mapping[int, Group]) -> bool:
    """Whether a group exponentiates what is made in 32 bits, or the product itself."""
    size = math.prod(product.outputs[0].value.shape)
    wide = [use.value for use in group.uses if math.prod(use.value.shape) == size and use.value.id in makers]
    plain = [
        makers[one.id] is product or (one.dtype.itemsize >= STREAMED_BYTES and not makers[one.id].widens)
        for one in wide
    ]
    return any(equation.primitive == "exp" for equation in group.equations) and all(plain)


def _depends_on(maker: Group, reader: Group, makers: Mapping[int, Group]) -> bool:
    """Whether a group reads, by way of others, what a group makes."""
    ahead, seen = [reader], set()
    while ahead:
        group = ahead.pop()
        if group is maker:
            return True
        if group.index > maker.index and group.index not in seen:
            seen.add(group.index)
            ahead += [makers[use.value.id] for use in group.uses if use.value.id in makers]
    return False
