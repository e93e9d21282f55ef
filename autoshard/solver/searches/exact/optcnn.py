"""OptCNN's search: nodes between two others are minimised out exactly; what is left is enumerated.

Jia, Lin, Qi and Aiken, "Exploring hidden dimensions in parallelizing convolutional neural networks", ICML 2018,
section 5 (node elimination and edge elimination). TensorFlow's and AccPar's chains of layers are the same program.

Kept: a node with two neighbours becomes an edge between them, parallel edges become one, and the choices of the nodes
that are left are tried in turn. Different: of a node with more neighbours the tables are minimised apart, which gives
the enumeration a bound to leave branches by, and memory its prices (`mini_buckets.py`).
"""

from __future__ import annotations

from autoshard.solver.problem import Problem
from autoshard.solver.searches.exact.pase import SETTINGS, DynamicProgramSettings, depth_first, search_by_tables
from autoshard.solver.searches.search_run import SearchRun


def optcnn(problem: Problem, run: SearchRun) -> None:
    """Elimination of nodes with two neighbours, and an enumeration that grows from round to round."""
    widest = max(len(costs) for costs in problem.costs)
    entries = min(SETTINGS.most_entries, widest**3)  # a node and its two neighbours; rounds do not enlarge it
    settings = DynamicProgramSettings(entries=entries, most_entries=entries, size=4.0, growth=2.0)
    search_by_tables(problem, run, settings, depth_first)
