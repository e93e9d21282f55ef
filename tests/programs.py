"""Small functions traced, grouped and formulated, for the tests of what turns a program into a problem."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import jax
import numpy as np
from oracles import SMALL, TEXTBOOK

from autoshard.mesh.links import Link
from autoshard.mesh.topology import Topology
from autoshard.model.formulating import formulate
from autoshard.model.formulation import Formulation
from autoshard.model.grouping import groups_of
from autoshard.model.groups import Group
from autoshard.program import Program, trace
from autoshard.propagation import rules_for
from autoshard.solver import solve


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.float32)


def traced(fn: Callable, *args, donate: tuple[int, ...] = ()) -> Program:
    return trace(fn, args, {}, donate_argnums=donate)


def model_program(name: str) -> Program:
    """A small model's train step, donating its state; the state is never made."""
    made = []
    state = jax.eval_shape(lambda: made.append(SMALL[name]()) or made[0].state)
    return traced(made[0].step, state, made[0].batches(0), donate=(0,))


def grouped(fn: Callable, *args, donate: tuple[int, ...] = ()) -> list[Group]:
    program = traced(fn, *args, donate=donate)
    return groups_of(program, rules_for(program))


def formulated(
    fn: Callable, *args, mesh: Mapping[str, int], topology: Topology, donate: tuple[int, ...] = (), **options
) -> Formulation:
    program = traced(fn, *args, donate=donate)
    return formulate(program, rules_for(program), mesh, topology, **{"backend": TEXTBOOK} | options)


def round_topology(*axes: str) -> Topology:
    """Figures that are easily reckoned with: 1 ms and 1 MB/s per link, 1 GB/s of memory, 1 GFLOP/s."""
    return Topology(dict.fromkeys(axes, Link(latency=1e-3, bandwidth=1e6)), 1e9, 1e9, {"float32": 1e9})


def random_choices(formulation: Formulation, count: int) -> list[tuple[int, ...]]:
    """Choices that nothing forbids: the cheapest where every option costs something at random."""
    rng, problem = np.random.default_rng(0), replace(formulation.problem, limit=None, lives=())
    free = tuple(replace(edge, costs=np.where(np.isinf(edge.costs), np.inf, 0.0)) for edge in problem.edges)
    found = []
    for _ in range(count):
        costs = tuple(np.where(np.isinf(costs), np.inf, rng.random(len(costs))) for costs in problem.costs)
        found.append(solve(replace(problem, costs=costs, edges=free), time_limit=5).choice)
    return found
