"""A program and the shardings of its arguments and results in, what `jax.jit` makes of them out, ready to be priced.

Layouts spread from the arguments, the results and the step's own constraints (`propagation/`). XLA's partitioner then
splits each operation, and reshards what lies otherwise than its reader wants (`reshards.py`). Nothing is searched for
but what is left open: which of several readers share a copy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from autoshard.errors import SolverError
from autoshard.layout import Layout, MeshShape
from autoshard.mesh.topology import Topology
from autoshard.model.formulating import formulator
from autoshard.model.formulation import Formulation
from autoshard.model.partitioner.choosing import GivenLayouts, as_given
from autoshard.model.partitioner.reshards import partitioned
from autoshard.model.xla.backends import Backend
from autoshard.model.xla.scatters import merges_slices
from autoshard.program import Program
from autoshard.propagation import Rule, propagate_layouts
from autoshard.propagation.post_order import in_post_order
from autoshard.solver.problem import Solution

_HOISTING = frozenset({"cpu"})  # backends that take a collective of what no turn changes out of a loop


def as_jitted(
    program: Program,
    rules: Sequence[Rule],
    mesh: MeshShape,
    topology: Topology,
    backend: Backend,
    arguments: Mapping[int, Layout],
    results: Mapping[int, Layout],
) -> tuple[Formulation, Solution]:
    """The program as `jax.jit` compiles it, and the one choice that is this program.

    Args:
        program: the traced step; best one in which nothing is merged, since Shardy comes before XLA merges.
        rules: one per equation.
        mesh: axis -> devices.
        topology: what the machine costs.
        backend: the compiler.
        arguments: index -> layout, of all of them.
        results: index -> layout, of those that are returned in a layout of their own. What takes an argument's place
            lies as that.

    Returns:
        A formulation of the program with its reshardings written out, which has equations and values of its own.
    """
    several = {axis: size for axis, size in mesh.items() if size > 1}
    fixed = {program.arguments[i].id: layout for i, layout in arguments.items()}
    ends = {**results, **{result: arguments[i] for i, result in program.carried.items()}}
    layouts = propagate_layouts(program, rules, mesh, fixed, ends, in_post_order(program)).values
    merges = functools.partial(merges_slices, mesh=several, backend=backend)
    turn_flops = backend.convolutions.turn_flops_among(math.prod(mesh.values()))
    hoists = backend.name in _HOISTING
    found = partitioned(program, rules, layouts, several, merges, hoists=hoists, turn_flops=turn_flops)
    in_parts = replace(backend, scatters=replace(backend.scatters, over_some_axes=True, by_hand=False))
    formulated = formulator(
        found.program, found.rules, mesh, topology, fixed=arguments, backend=in_parts, moves_views=True
    )
    formulation = formulated(offered=GivenLayouts(layouts=found.layouts, wants=found.wants))
    try:
        return formulation, as_given(formulation, found.layouts, found.wants)
    except SolverError:  # some value would have to be resharded in a way that none of these strategies has
        formulation = formulated()
        return formulation, as_given(formulation, found.layouts, found.wants)
