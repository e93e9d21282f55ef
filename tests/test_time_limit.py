"""The time limit is for all of planning: what formulates the step, every search for its plan, all rounds of each."""

import itertools
import math
import time
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import decorated, planning
from autoshard import options as user_options
from autoshard.frontiers import batches, devices
from autoshard.frontiers import search as frontier_search
from autoshard.meshes import mesh_function
from autoshard.model.option_sets import partial_problems
from autoshard.model.pricing import formulation_deadline, price_lists, resharding_steps
from autoshard.model.pricing.prices import PriceList
from autoshard.options import options_of
from autoshard.plans import alternatives, limited_overlap
from autoshard.propagation import rules_for
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.runtime.clock import Clock
from autoshard.solver.settings import PROVEN
from autoshard.stage_planning import staged_function
from autoshard.variants import choosing

LIMIT = 40.0
WEIGHTS, BATCH = np.ones((8, 32), np.float32), np.ones((16, 8), np.float32)


def step(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)


@pytest.fixture
def clock(monkeypatch):
    """A clock of planning's own that can be put forward; it has the same time as the real one at first."""
    moved = SimpleNamespace(by=0.0)
    for module in (planning, user_options):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + moved.by))
    return moved


@pytest.fixture
def searched(monkeypatch):
    """When each search is to end at the latest."""
    ends, solve = [], planning.solve_within

    def noted(formulation, time_limit, until, *_):
        ends.append(until)
        return solve(formulation, time_limit)

    monkeypatch.setattr(planning, "solve_within", noted)
    return ends


@pytest.mark.parametrize("formulating, left", [(0, 40), (25, 15), (35, 10), (500, 10)])
def test_what_formulates_the_step_counts(clock, searched, monkeypatch, formulating, left):
    formulated = planning.formulated

    def slow(*args, **keywords):
        clock.by += formulating
        return formulated(*args, **keywords)

    monkeypatch.setattr(planning, "formulated", slow)
    start = time.monotonic()
    autoshard.plan(step, WEIGHTS, BATCH, mesh=mesh_of({"x": 8}), topology=slow_chips("x"), time_limit=LIMIT)
    took = time.monotonic() - start
    for end in searched:
        assert formulating + left - 0.1 <= end - start <= formulating + left + took


def test_the_searches_for_a_lean_plan_share_it(clock, searched):
    """Where nothing fits, leaner plans are sought: not from the start of another limit."""
    with pytest.raises(autoshard.MemoryLimitError):
        autoshard.plan(step, WEIGHTS, BATCH, mesh=mesh_of({"x": 8}), topology=slow_chips("x"), memory=100, time_limit=9)
    assert max(searched) - min(searched) < 1e-6 or len(searched) == 1


def test_all_variants_of_a_step_share_it(clock, monkeypatch):
    """No variant is begun once the limit has passed, and the bound is then that of none."""
    formulated, begun = planning.formulated, []

    def slow(*args, **keywords):
        begun.append(clock.by)
        clock.by += 0.6 * LIMIT
        return formulated(*args, **keywords)

    def layer(x, weight):
        for _ in range(3):
            x = x + jax.nn.softmax(jnp.tanh(x @ weight)) @ weight.T
        return x, None

    def scanned(weights, batch):
        def loss(weights):
            return jnp.mean(jnp.tanh(jax.lax.scan(layer, batch, weights)[0]) ** 2)

        return weights - 0.1 * jax.grad(loss)(weights)

    def plan():
        begun.clear()
        how = {"mesh": mesh_of({"x": 8}), "topology": "v5e:4x2", "time_limit": LIMIT, "remat": "auto"}
        return autoshard.plan(scanned, np.ones((4, 16, 64), np.float32), np.ones((512, 16), np.float32), **how)

    assert plan().bound > 0
    monkeypatch.setattr(planning, "formulated", slow)
    monkeypatch.setattr(choosing, "time", planning.time)
    assert plan().bound == 0 and begun == [0, 0.6 * LIMIT]


@pytest.mark.parametrize("late", [False, True])
def test_no_round_begins_late(monkeypatch, clock, late):
    """Of the search for the cheapest plan that hides no more than it computes."""
    options = {"mesh": mesh_of({"x": 8}), "topology": slow_chips("x")}
    program = autoshard.autoshard(step, **options).trace(WEIGHTS, BATCH)
    formulation = planning.formulated(program, rules_for(program), options_of(**options))
    solution = planning.solve_within(formulation, 5.0)
    problem = formulation.problem  # as if nearly all ran behind compute
    doubled = [replace(edge, costs=2 * edge.costs) for edge in problem.edges]
    waits = replace(problem, costs=tuple(2 * costs for costs in problem.costs), edges=tuple(doubled), checked=True)
    formulation = replace(formulation, waits=lambda until: waits)
    hidden = SimpleNamespace(communication_seconds=2 * solution.cost)
    for module in (limited_overlap, planning, alternatives):
        monkeypatch.setattr(module, "prediction_of", lambda *args: hidden)
    searches = []

    def solve(*args, **keywords):
        searches.append(args)
        clock.by += 20 if late else 0
        return solution

    monkeypatch.setattr(planning, "solve_within", solve)
    found = planning.cheapest(formulation, LIMIT, until=time.monotonic() + 10)
    assert found.cost == hidden.communication_seconds if late else len(searches) > 1
    assert len(searches) == 1 or not late


def test_a_budget_may_end_with_another():
    now = time.monotonic()
    assert Budget.of(60.0, now + 5).seconds <= 5 < 59 < Budget.of(60.0).seconds <= 60
    assert Budget.of(60.0, now + 5).work == Budget.of(60.0).work  # what is found follows from the work in it


@pytest.fixture
def pricing_clock(monkeypatch):
    """A clock of formulating's own, on which each group of equations takes so many seconds to price."""
    times, price = SimpleNamespace(by=0.0, per_group=0.0, priced=0), PriceList.group

    def slow(prices, group):
        times.by += times.per_group
        times.priced += 1
        return price(prices, group)

    monkeypatch.setattr(formulation_deadline, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + times.by))
    monkeypatch.setattr(PriceList, "group", slow)
    return times


def two_layers(weights, batch):
    return jnp.mean(jnp.tanh(batch @ weights["up"]) @ weights["down"])


LAYERS = {"up": np.ones((512, 2048), np.float32), "down": np.ones((2048, 512), np.float32)}


@pytest.mark.parametrize("shape", [{"x": 4, "y": 2}, {"a": 2, "b": 2, "c": 2, "d": 2}], ids=["whole", "in parts"])
def test_the_clock_ends_formulating_with_a_plan(pricing_clock, monkeypatch, shape):
    """A part is planned instead, in which all axes split one dim; the plan says so, and its bound stays true."""
    devices = math.prod(shape.values())
    mesh = jax.sharding.AbstractMesh(tuple(shape.values()), tuple(shape))
    monkeypatch.setattr(partial_problems, "MOST_LAYOUTS", 0)

    def plan(seconds_per_group):
        pricing_clock.by, pricing_clock.per_group, pricing_clock.priced = 0.0, seconds_per_group, 0
        how = {"mesh": mesh, "topology": f"v5e:{devices // 4}x4", "time_limit": LIMIT}
        return autoshard.plan(jax.grad(two_layers), LAYERS, np.ones((4096, 512), np.float32), **how)

    def is_part(plan):
        return any("the time limit ended" in said for said in plan.warnings)

    whole, groups = plan(0.0), pricing_clock.priced
    assert not is_part(whole)
    early = plan(LIMIT)
    assert pricing_clock.priced < groups + 3, "once the time is up, the whole is left"
    assert {len(jax.tree.leaves(tuple(given.spec))) for given in early.arguments} <= {0, len(shape)}
    for made in (early, plan(0.8 * LIMIT / groups)):  # ended after the first part, where there are several
        assert is_part(made)
        assert whole.cost * (1 - 1e-9) <= made.cost and made.bound <= whole.cost
    assert plan(0.5 * LIMIT / groups).dumps() == whole.dumps(), "while time suffices, the clock changes nothing"


@pytest.mark.parametrize("devices", [8, 1])
def test_one_axis_is_formulated_whole(pricing_clock, devices):
    """No part of it is smaller."""
    pricing_clock.per_group = LIMIT
    how = {"mesh": mesh_of({"x": devices}), "topology": slow_chips("x"), "time_limit": LIMIT}
    assert not any("the time limit ended" in said for said in autoshard.plan(step, WEIGHTS, BATCH, **how).warnings)


def test_a_plan_made_late_is_not_kept(monkeypatch, tmp_path):
    """A quiet run plans anew, and its plan is kept."""
    how = {"mesh": mesh_of({"x": 4, "y": 2}), "topology": slow_chips("xy"), "cache": tmp_path}
    with monkeypatch.context() as patch:
        patch.setattr(planning, "formulating_ends", lambda until: -math.inf)
        assert autoshard.plan(step, WEIGHTS, BATCH, **how).is_late and not list(tmp_path.iterdir())
    assert not autoshard.plan(step, WEIGHTS, BATCH, **how).is_late and list(tmp_path.iterdir())


def test_a_search_that_would_formulate_late_is_left_out(monkeypatch):
    """That for a plan that hides no more than it computes: what is known by then is taken."""
    options = {"mesh": mesh_of({"x": 8}), "topology": slow_chips("x")}
    program = autoshard.autoshard(step, **options).trace(WEIGHTS, BATCH)
    formulation = planning.formulated(program, rules_for(program), options_of(**options))
    solution = planning.solve_within(formulation, 5.0)
    hidden = SimpleNamespace(communication_seconds=2 * solution.cost)
    monkeypatch.setattr(limited_overlap, "prediction_of", lambda *args: hidden)
    budget = Budget(1.0, until=-math.inf)
    found = limited_overlap.with_limited_overlap(formulation, solution, lambda *_: solution, budget)
    assert found.choice == solution.choice and found.cost == hidden.communication_seconds


def test_what_takes_long_to_price_once_ends_in_time(monkeypatch):
    """A table between the layouts of one argument on four axes has thousands of pairs: the clock is looked at in it."""
    clock, priced = SimpleNamespace(by=0.0), []

    def slow(make):
        def made(*args):
            clock.by += LIMIT / 20
            priced.append(clock.by)
            return make(*args)

        return made

    monkeypatch.setattr(formulation_deadline, "time", SimpleNamespace(monotonic=lambda: time.monotonic() + clock.by))
    for name in ("path", "path_whatever_is_whole"):
        monkeypatch.setattr(resharding_steps, name, slow(getattr(resharding_steps, name)))
    mesh = jax.sharding.AbstractMesh((2, 2, 2, 2), tuple("abcd"))
    shapes = jax.ShapeDtypeStruct((16, 32, 64), jnp.float32), jax.ShapeDtypeStruct((64, 32), jnp.float32)
    made = autoshard.plan(lambda x, y: jnp.tanh(x @ y), *shapes, mesh=mesh, topology="v5e:4x4", time_limit=LIMIT)
    assert made.is_late and len(priced) < 60  # those of the part in which all axes are one are among them


def test_equations_are_grouped_once(pricing_clock, monkeypatch):
    """Where the clock ends the whole, its part has the same groups."""
    grouped, groups_of = [], price_lists.groups_of
    monkeypatch.setattr(price_lists, "groups_of", lambda *args: grouped.append(1) or groups_of(*args))
    pricing_clock.per_group = LIMIT
    how = {"mesh": mesh_of({"x": 4, "y": 2}), "topology": slow_chips("xy"), "time_limit": LIMIT}
    assert autoshard.plan(step, WEIGHTS, BATCH, **how).is_late and len(grouped) == 1


@pytest.mark.parametrize("needs_choice", [False, True])
def test_only_a_first_choice_is_sought_past_the_end(needs_choice):
    budget = Budget.of(0.0)
    budget.needs_choice = needs_choice
    clock = Clock(budget.part(1.0), None, is_timed=False, incumbent=None, goal=PROVEN, tick=lambda: None)
    assert (clock.grace > 0) == needs_choice
    before = clock.latest
    clock.extend()
    assert (clock.latest > before) == needs_choice


def test_readings_of_a_fused_chain_are_listed_once():
    """One group of thousands of equations may have as many readers of as many values."""
    program = autoshard.autoshard(lambda x, y: jnp.sin(x * y) * y + y, mesh=mesh_of({"x": 8})).trace(BATCH, BATCH)
    formulation = planning.formulated(program, rules_for(program), options_of(mesh_of({"x": 8})))
    for group in formulation.groups:
        for value, readings in group.reading.items():
            expected = [
                (e, i) for e in group.equations for i, x in enumerate(e.inputs) if getattr(x, "id", None) == value
            ]
            assert list(readings) == expected
        assert group.reading is group.reading


@pytest.fixture
def late_mesh(monkeypatch):
    """A clock of the choice of meshes, which each plan puts forward by so many seconds."""
    moved, planned = SimpleNamespace(by=0.0, each=0.0), decorated.planned
    for module in (mesh_function, user_options):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: 100.0 + moved.by))

    def slow(*args, **keywords):
        moved.by += moved.each
        return planned(*args, **keywords)

    monkeypatch.setattr(decorated, "planned", slow)
    return moved


@pytest.mark.parametrize("each, fewest, most", [(0.0, 3, 9), (9.0, 1, 2), (50.0, 1, 1)])
def test_it_is_for_all_meshes_together(late_mesh, each, fewest, most):
    late_mesh.each = each
    plan = autoshard.plan(step, WEIGHTS, BATCH, mesh="auto", topology="v5e:2x4", time_limit=10)
    late = [warning for warning in plan.warnings if "the time limit ended before" in warning]
    assert fewest <= len(plan.meshes) <= most and bool(late) == (each > 0)


@pytest.mark.parametrize("is_late", [False, True])
def test_it_is_for_all_sizes_of_the_batch_together(monkeypatch, is_late):
    clock = itertools.count(step=6.0 if is_late else 0.0)
    for module in (batches, user_options):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    how = {"mesh": mesh_of({"x": 8}), "topology": slow_chips("x"), "memory": "16KiB", "donate_argnums": 0}
    found = autoshard.largest_batch(step, WEIGHTS, BATCH, time_limit=10, **how)
    assert (found.undecided is not None) == is_late
    assert found.rows == 8 if is_late else found.rows > 8


def test_it_is_for_all_points_of_a_frontier_together(monkeypatch):
    clock = itertools.count(step=6.0)
    monkeypatch.setattr(frontier_search, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    how = {"mesh": mesh_of({"x": 8}), "topology": slow_chips("x"), "donate_argnums": 0}
    assert len(autoshard.frontier(step, WEIGHTS, BATCH, time_limit=10, **how).plans) == 1


def test_fewest_devices_says_what_was_not_tried(monkeypatch):
    clock = itertools.count(step=6.0)
    for module in (devices, user_options):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    found = autoshard.fewest_devices(step, WEIGHTS, BATCH, chip="v5e", most=8, time_limit=10, donate_argnums=0)
    assert found.mesh.size == 8 and "time limit ended before fewer than 8 devices" in found.warnings[-1]


def test_stages_are_sought_within_it(monkeypatch):
    """The clock of stages has passed the limit before the first unit is planned: the plan without stages is taken."""
    asked, choose = [], staged_function.choose_pipeline

    def late(*args, until, **rest):
        asked.append(until - time.monotonic())
        return choose(*args, until=-math.inf, **rest)

    monkeypatch.setattr(staged_function, "choose_pipeline", late)
    two = {"mesh": mesh_of({"x": 8}), "topology": slow_chips("x"), "pipeline": "auto", "donate_argnums": 0}
    plan = autoshard.plan(step_of_two_layers, (WEIGHTS[:, :8], WEIGHTS[:, :8]), BATCH, time_limit=LIMIT, **two)
    assert 0.25 * LIMIT - 1 < asked[0] <= LIMIT and "pipeline='auto'" in plan.warnings[-1]


def step_of_two_layers(weights, batch):
    def loss(weights):
        return jnp.mean((jnp.tanh(batch @ weights[0]) @ weights[1]) ** 2)

    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))
