"""Costs of units: what a lean plan may hold, and costs in numbers of microbatches that were not planned."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from autoshard import autoshard, topology
from autoshard.model.xla.backends import V5E
from autoshard.solver.problem import Solution
from autoshard.stage_planning import costs
from autoshard.stage_planning.choosing import CuttableSteps
from autoshard.stage_planning.costs import StageCost, SubMeshModel
from autoshard.stage_planning.recomputing.levels import AS_WRITTEN, RecomputationLevels
from autoshard.stage_planning.space import SpaceRequest, between_microbatches, planned_space
from autoshard.stage_planning.unit_costs import FIELDS, UnitCosts, kinds_of, lean_unit_costs, with_loops
from autoshard.stage_search import SubMesh
from autoshard.variants.variant import Variant


def unit_costs_of(**rows):
    return UnitCosts(np.array([rows.get(name, [0.0, 0.0]) for name in FIELDS]))


def test_lean_units_fill_the_memory_of_a_stage_beside_what_one_of_them_works_in():
    fast = unit_costs_of(fixed_bytes=[10.0, 30.0], microbatch_bytes=[1.0, 1.0], working_bytes=[5.0, 4.0])
    asked, stages, in_flight, room, usable = {}, 2, 2.0, 20.0, 0.5

    def cost(stage, where, **_):
        asked[stage] = where.memory * usable
        return SimpleNamespace(row=(0.0,) * len(FIELDS))

    units = SimpleNamespace(planned=(0, 1), cut=SimpleNamespace(cost=cost))
    shape = SimpleNamespace(mesh=None, topology=None, in_row=SimpleNamespace(memory_bytes=room))
    assert lean_unit_costs(units, shape, SimpleNamespace(usable=usable), fast, stages, in_flight) is not fast
    held = asked[0] - 5.0, asked[1] - 4.0
    assert sum(held) / stages + 5.0 == pytest.approx(room)
    assert held[1] / held[0] == pytest.approx(32 / 12)  # in proportion to what fast plans hold
    roomy = SimpleNamespace(mesh=None, topology=None, in_row=SimpleNamespace(memory_bytes=100.0))
    assert lean_unit_costs(units, roomy, SimpleNamespace(usable=usable), fast, stages, in_flight) is fast


def test_equal_layers_of_a_stage_share_its_memory_and_work_one_at_a_time():
    """Six of a kind in two stages: what one holds counts three times, so bytes that all hold are worth saving most."""
    sizes = {"fixed_bytes": 10.0, "microbatch_bytes": 1.0, "working_bytes": 5.0}
    fast = UnitCosts(np.array([[sizes.get(name, 0.0)] * 6 for name in FIELDS]))
    asked = []

    def cost(stage, where, *, copies, **_):
        asked.append((where.memory, copies))
        return SimpleNamespace(row=(0.0,) * len(FIELDS))

    units = SimpleNamespace(planned=(0,) * 6, cut=SimpleNamespace(cost=cost))
    shape = SimpleNamespace(mesh=None, topology=None, in_row=SimpleNamespace(memory_bytes=20.0))
    lean_unit_costs(units, shape, SimpleNamespace(usable=1.0), fast, 2, 2.0)
    assert asked == [(pytest.approx(20.0), 3.0)]
    stage = SimpleNamespace(kept=(), between=())
    held = StageCost(stage, (), {}, fixed_bytes=10.0, microbatch_bytes=1.0, working_bytes=5.0, bound=0.0)
    assert held.held(2.0, copies=3.0) == 3 * (10.0 + 2.0) + 5.0


def test_what_a_search_has_not_improved_is_sought_longer(monkeypatch):
    """The first choice that fits may be many times the best."""
    works = []

    def solved(problem, *, gap, budget, search):
        works.append(budget.work)
        return Solution((0,), 50.0 if budget.work < 5 else 1.1, 1.0, "feasible")

    monkeypatch.setattr(costs, "solve_for_plan", solved)
    assert costs._solved(None, costs._Effort(0.03, 2.0, math.inf, None)).cost == 1.1 and works == [2.0, 8.0]
    assert costs._solved(None, costs._Effort(0.03, 6.0, math.inf, None)).cost == 1.1 and works == [2.0, 8.0, 6.0]


def test_a_layer_with_a_norm_behind_it_is_like_the_others():
    units = [SimpleNamespace(forward_flops=flops, parameter_bytes=size, made_bytes=1) for flops, size in UNITS]
    assert kinds_of(units) == [0, 1, 1, 1, 4, 5, 5]


def test_a_convolution_that_makes_more_of_as_much_work_is_another_kind():
    units = [SimpleNamespace(forward_flops=1e12, parameter_bytes=1 << 20, made_bytes=made) for made in (4, 1, 4)]
    assert kinds_of(units) == [0, 1, 0]


UNITS = [(0.0, 1e9), (1e12, 7e9), (1e12, 7e9), (1.00002e12, 7.0001e9), (1.1e12, 7e9), (1e9, 0), (1e9, 0)]


def test_a_stage_of_two_layers_of_a_loop_works_in_more():
    """An embedding, three layers and a head: one layer with the embedding or the head is no loop."""
    values = np.ones((len(FIELDS), 5))
    values[FIELDS.index("working_bytes")] = [1.0, 4.0, 4.0, 4.0, 2.0]
    cut = SimpleNamespace(cost=lambda stage, where, **_: SimpleNamespace(working_bytes={5: 9.0}[stage]))
    units = SimpleNamespace(planned=(0, 1, 1, 1, 2), pair=(5, 1), cut=cut)
    shape = SimpleNamespace(mesh=None, topology=None)
    table = with_loops(units, shape, None, UnitCosts(values)).layer_costs().table(SubMesh.anywhere("1", 1, 2, 1e9))
    found = table.working_bytes
    assert [found[run] for run in ((1, 2), (0, 2), (3, 5), (1, 3), (0, 5))] == [4.0, 4.0, 4.0, 9.0, 9.0]
    assert np.isinf(found[2, 2]) and np.isinf(found[3, 1])
    alone = SimpleNamespace(planned=(0, 1), pair=None, cut=cut)
    assert with_loops(alone, shape, None, UnitCosts(values)).loop_bytes == 0.0


def test_costs_that_are_planned_are_taken_and_others_lie_between():
    known = {2: unit_costs_of(forward=[8.0, 4.0]), 8: unit_costs_of(forward=[5.0, 1.0])}
    assert between_microbatches(known, 8) is known[8]
    # A quarter of the rows is a third of the way from an eighth to a half.
    assert between_microbatches(known, 4).values[0].tolist() == [6.0, 2.0]


@pytest.mark.parametrize(("share", "expected"), [(1.0, {0.5, 1.0}), (0.8, {0.4})])
def test_a_limit_below_the_smallest_device_holds_for_stages_on_larger_ones(share, expected):
    axes = {"hosts": 2}
    machine = topology("h100:2x1", axes, memories={"hosts": (1, 0.5)})
    unit = SimpleNamespace(cost=lambda stage, where, **_: SimpleNamespace(row=(1.0,) * len(FIELDS)))
    cut = SimpleNamespace(planned=(0, 1), cut=unit, crossing=np.zeros(3))
    backend, memory = SimpleNamespace(usable=0.5), share * machine.memory_bytes
    found = planned_space(SpaceRequest(lambda count: cut, axes, machine, backend, memory, [2], [2]))
    assert {shape.in_row.memory_bytes / machine.memory_bytes for shape in found.shapes.values()} == expected


def test_units_that_are_alike_at_several_levels_are_planned_once():
    def step(weights, tokens):
        def loss(weights):
            def layer(x, w):
                return x + jax.nn.gelu(x @ w), None

            x, _ = jax.lax.scan(layer, weights["in"][tokens], weights["layers"])
            return jnp.mean(jnp.tanh(x @ weights["out"]) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    weights = {"in": jnp.ones((32, 16)), "layers": jnp.ones((4, 16, 16)), "out": jnp.ones((16, 64))}
    args = weights, jnp.zeros((8, 4), jnp.int32)
    mesh, machine = AbstractMesh((2,), ("stage",)), topology("v5e:2", {"stage": 2})
    made = autoshard(step, mesh=mesh, topology="v5e:2").variants(*args)
    levels = RecomputationLevels.of(made.step, machine)
    steps = CuttableSteps(made.step, made.program(Variant()), made.mesh, levels=levels)
    where = SubMeshModel(mesh, machine, V5E, math.inf)
    first, second = (
        [units.cut.cost(stage, where, 1.0) for stage in dict.fromkeys(units.planned)]
        for units in (steps.cut_into_units(2, level) for level in (AS_WRITTEN, min(levels.prices)))
    )
    assert first[0] is second[0] and first[1] is not second[1]  # the embedding has nothing to compute again
