"""The published searches by name, and what a caller says of a search to the search itself."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from autoshard.errors import SolverError
from autoshard.solver.searches.exact.alpa import alpa
from autoshard.solver.searches.exact.optcnn import optcnn
from autoshard.solver.searches.exact.pase import pase
from autoshard.solver.searches.exact.tensoropt import tensoropt
from autoshard.solver.searches.greedy.autoddl import autoddl
from autoshard.solver.searches.greedy.partir import partir
from autoshard.solver.searches.learning.auto_map import auto_map
from autoshard.solver.searches.learning.colocrl import colocrl
from autoshard.solver.searches.learning.spotlight import spotlight
from autoshard.solver.searches.partitioning.double_recursive import double_recursive
from autoshard.solver.searches.partitioning.scotch import scotch
from autoshard.solver.searches.partitioning.tofu import tofu
from autoshard.solver.searches.sampling.aceso import aceso
from autoshard.solver.searches.sampling.automap import automap
from autoshard.solver.searches.sampling.flexflow import flexflow
from autoshard.solver.searches.sampling.regal import regal
from autoshard.solver.searches.sampling.toast import toast
from autoshard.solver.searches.search_run import PartSearch, Search

_ALL: tuple[Search, ...] = (
    aceso,
    alpa,
    auto_map,
    autoddl,
    automap,
    colocrl,
    double_recursive,
    flexflow,
    optcnn,
    partir,
    pase,
    regal,
    scotch,
    spotlight,
    tensoropt,
    toast,
    tofu,
)

SEARCHES: Mapping[str, Search] = MappingProxyType({search.__name__: search for search in _ALL})


def algorithm_of(search: str | Search) -> PartSearch:
    """A search by its name, or a function like those of `SEARCHES`, as an algorithm of a `Method`.

    >>> algorithm_of("flexflow").name
    'flexflow'

    Raises:
        SolverError: there is no search of that name.
    """
    if isinstance(search, str) and search in SEARCHES:
        return PartSearch(SEARCHES[search], search)
    if isinstance(search, str) or not callable(search):
        raise SolverError(
            f"there is no search {search!r}; the searches are {', '.join(sorted(SEARCHES))}.\n"
            "A function of a Problem and a SearchRun is one, too."
        )
    return PartSearch(search, getattr(search, "__name__", "own search"))
