"""Given layouts are kept wherever a strategy can, and what is left open is done the cheapest way."""

import jax.numpy as jnp
import numpy as np
import pytest
from programs import f32, formulated, model_program, random_choices, round_topology

from autoshard.model.formulating import formulate
from autoshard.model.formulation import Formulation
from autoshard.model.given_layouts import as_propagated
from autoshard.propagation import propagate_layouts, rules_for
from autoshard.solver import solve
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.verify import verify

LINE, PLANE = {"x": 2}, {"x": 4, "y": 2}
TOPOLOGY = round_topology("x", "y", "one")
X, W, V = f32(8, 4), f32(4, 6), f32(6, 4)
WHOLE, ROWS, COLUMNS = ((), ()), (("x",), ()), ((), ("x",))


def forward(x, w, v):
    return jnp.sin(x @ w) @ v


def left(formulation: Formulation, choice) -> dict:
    """Value id -> how its group leaves it."""
    found = {}
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        strategy = priced.strategies[choice[formulation.group_node(group)]]
        found |= {made.value.id: layout for made, layout in zip(group.made, strategy.leaves, strict=True)}
    return found


def assert_followed(formulation: Formulation, layouts) -> None:
    """Every group that can leave its results as given does; the choice is allowed, and claims no bound."""
    solution = as_propagated(formulation, layouts)
    cost, _ = verify(formulation.problem, solution.choice)
    assert np.isfinite(cost) and cost == pytest.approx(solution.cost)
    assert (solution.bound, solution.status) == (0.0, "feasible")
    found = left(formulation, solution.choice)
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        given = [layouts.get(made.value.id) for made in group.made]
        can = any(
            all(want in (None, got) for want, got in zip(given, strategy.leaves, strict=True))
            for strategy in priced.strategies
        )
        for made, want in zip(group.made, given, strict=True):
            assert not can or want is None or found[made.value.id] == want, (str(group.equations[-1]), want)


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
def test_what_choices_leave_is_left_so(mesh):
    formulation = formulated(forward, X, W, V, mesh=mesh, topology=TOPOLOGY)
    for choice in random_choices(formulation, 10):
        layouts = left(formulation, choice)
        assert_followed(formulation, layouts)
        # the same choice leaves values so; the cheapest that does costs no more
        assert as_propagated(formulation, layouts).cost <= verify(formulation.problem, choice)[0] * (1 + 1e-6)


@pytest.mark.parametrize("hidden", [WHOLE, ROWS, COLUMNS, None])
@pytest.mark.parametrize("out", [WHOLE, ROWS, COLUMNS, None])
def test_the_cheapest_of_all_that_read_and_leave_values_so(hidden, out):
    formulation = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY, fixed={0: ROWS, 1: WHOLE, 2: WHOLE})
    made = [group.made[0].value.id for group in formulation.groups]
    layouts = {value: layout for value, layout in zip(made, (hidden, hidden, out), strict=True) if layout is not None}
    allowed = {}
    for group, priced, value in zip(formulation.groups, formulation.priced, made, strict=True):
        options = [i for i, s in enumerate(priced.strategies) if layouts.get(value) in (None, s.leaves[0])]
        reads = [layouts.get(use.value.id) for use in group.uses]
        wants = [priced.strategies[i].wants for i in options]
        fits = [all(a in (None, b) for a, b in zip(reads, want, strict=True)) for want in wants]
        ready = [i for i, fit in zip(options, fits, strict=True) if fit]
        allowed[formulation.group_node(group)] = ready or options
    assert_followed(formulation, layouts)
    expected = exhaustive(formulation.problem.restrict(allowed)).cost
    assert as_propagated(formulation, layouts).cost == pytest.approx(expected)


def test_nothing_given_is_the_cheapest_without_a_limit():
    formulation = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY, memory=1.0)
    free = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY)
    assert as_propagated(formulation, {}).cost == pytest.approx(solve(free.problem).cost)


def test_what_no_strategy_leaves_is_free():
    """8 rows are not split by x and y over columns of 6: the group does its best."""
    formulation = formulated(forward, X, W, V, mesh=PLANE, topology=TOPOLOGY)
    product = formulation.groups[0].made[0].value.id
    assert_followed(formulation, {product: ((), ("x", "y"))})
    free = as_propagated(formulation, {})
    assert as_propagated(formulation, {product: ((), ("x", "y"))}).cost == pytest.approx(free.cost)


def test_axes_of_one_device_say_nothing():
    formulation = formulated(forward, X, W, V, mesh={"one": 1, "x": 2}, topology=TOPOLOGY)
    product = formulation.groups[0].made[0].value.id
    found = as_propagated(formulation, {product: (("one", "x"), ())})
    assert left(formulation, found.choice)[product] == ROWS


@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_models_as_propagated(name):
    program = model_program(name)
    rules = rules_for(program)
    batch = next(value for value in reversed(program.arguments) if value.shape)
    given = {batch.id: (("x",),) + ((),) * (len(batch.shape) - 1)}
    formulation = formulate(program, rules, PLANE, TOPOLOGY)
    assert_followed(formulation, propagate_layouts(program, rules, PLANE, given).values)


def test_a_layout_that_is_not_followed_is_caught(monkeypatch):
    monkeypatch.setattr("autoshard.model.given_layouts.without_idle_axes", lambda layout, mesh: None)
    formulation = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY, fixed={0: ROWS})
    with pytest.raises(AssertionError):
        assert_followed(formulation, {formulation.groups[0].made[0].value.id: COLUMNS})
