"""What later programs read of a stage in, out which values they get, so that they can make the others of these.

A value that is read later is either kept, which costs its bytes for as long as the microbatch is in flight, or computed
again of others, if the equations for that are cheap. The choice with the fewest bytes is a minimum cut between the
values that cannot be made again and those that are read. Of equal choices, the one that computes least again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

from autoshard.jaxprs import Var
from autoshard.stages.placement.flow import SINK, SOURCE, UNCUTTABLE, source_side


def kept_values(
    wanted: Iterable[Var],
    makers: Mapping[Var, int],
    inputs: Callable[[int], Sequence[Var]],
    cheap: Collection[int],
    size: Callable[[Var], float],
) -> set[Var]:
    """The values to keep, so that cheap equations make of them all that are wanted.

    Args:
        wanted: what later programs read.
        makers: variable -> the equation that makes it; received values have none.
        inputs: equation -> the variables that it reads, less those that are at hand everywhere.
        cheap: equations that may run again.
        size: bytes of a variable.
    """
    edges: dict[tuple[Hashable, Hashable], float] = {}
    todo, seen = list(wanted), set[Var]()
    edges |= {((var, "made"), SINK): UNCUTTABLE for var in todo}
    while todo:
        var = todo.pop()
        if var in seen:
            continue
        seen.add(var)
        edges[(var, "making"), (var, "made")] = size(var)
        maker = makers.get(var)
        if maker is None or maker not in cheap:
            edges[SOURCE, (var, "making")] = UNCUTTABLE
            continue
        operands = inputs(maker)
        edges |= {((operand, "made"), (var, "making")): UNCUTTABLE for operand in operands}
        todo += operands
    if not seen:
        return set()
    near, _ = source_side(edges, is_largest=True)
    return {var for var in seen if (var, "making") in near and (var, "made") not in near}
