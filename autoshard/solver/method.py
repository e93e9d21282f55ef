"""How a problem is solved: the table of search algorithms, in the order in which parts of a problem go through it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.solver.bounds.forbid_options import OptionBounds
from autoshard.solver.exact.narrow_parts import Elimination
from autoshard.solver.exact.programs import IntegerProgram
from autoshard.solver.local_search.compiled_search import CompiledSearch
from autoshard.solver.local_search.forest_moves import ForestMoves
from autoshard.solver.run import Algorithm
from autoshard.solver.settings import USUAL_SIZES, Sizes
from autoshard.solver.symmetry.repeated_nodes import RepeatedNodes

ALGORITHMS: tuple[Algorithm, ...] = (
    Elimination(),
    OptionBounds(),
    CompiledSearch(),
    ForestMoves(),
    IntegerProgram(),
)


@dataclass(frozen=True)
class Method:
    """What `solve` does, by default that of any problem."""

    algorithms: tuple[Algorithm, ...] = ALGORITHMS
    repeated_nodes: RepeatedNodes | None = None  # solves nodes that look alike as one first, where that is wanted
    sizes: Sizes = USUAL_SIZES


USUAL = Method()
