"""`plan_together`: one layout of shared arguments, as good as any, and never worse than what one function wants."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from oracles import MACHINES, slow_chips, v5e

import autoshard
from autoshard.layout import layouts_of, spec_of
from autoshard.together import planning

MESH = AbstractMesh((4, 2), ("data", "model"))
WIDTH, HIDDEN = 32, 64


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


WEIGHTS = {"up": float32(WIDTH, HIDDEN), "down": float32(HIDDEN, WIDTH)}


def prefill(params, prompts):
    return jax.nn.relu(prompts @ params["up"]) @ params["down"]


def decode(params, cache, tokens):
    hidden = jax.nn.relu(tokens @ params["up"]) @ params["down"]
    return cache.at[:, 0].set(hidden), hidden


PREFILL = (prefill, (WEIGHTS, float32(512, WIDTH)))
DECODE = (decode, (WEIGHTS, float32(4, 64, WIDTH), float32(4, WIDTH)), {"donate_argnums": 1})
FUNCTIONS = {"prefill": PREFILL, "decode": DECODE}


def alone(entry, topology, **options):
    fn, args, *keywords = entry
    return autoshard.plan(fn, *args, mesh=MESH, topology=topology, **dict(*keywords), **options)


def specs(plan):
    return [sharding.spec for sharding in jax.tree.leaves(plan.in_shardings[0])]


def weighted(plans, weights):
    return sum(weights.get(name, 1.0) * plan.cost for name, plan in plans.items())


def product(weight, x):
    return jnp.tanh(x @ weight)


@pytest.mark.parametrize("machine", ["slow chips", pytest.param("v5e", marks=pytest.mark.slow)])
def test_no_layout_of_what_is_shared_is_better(machine):
    weights, topology = {"many": 3.0}, MACHINES[machine](MESH.axis_names)
    weight = float32(WIDTH, HIDDEN)
    functions = {"few": (product, (weight, float32(4, WIDTH))), "many": (product, (weight, float32(512, WIDTH)))}
    plans = autoshard.plan_together(functions, mesh=MESH, weights=weights, topology=topology)
    assert specs(plans["few"]) == specs(plans["many"])
    totals = [
        weighted({name: alone(entry, topology, fixed={"weight": spec_of(layout)}) for name, entry in functions.items()},
                 weights)
        for layout in layouts_of(weight.shape, dict(MESH.shape))
    ]  # fmt: skip
    assert weighted(plans, weights) <= min(totals) * (1 + 1e-6)
    assert max(totals) > 1.01 * min(totals)  # that it can fail


def rows_of_a(params, x):
    return params["a"] @ x, jnp.sum(params["b"][:1])


def rows_of_b(params, x):
    return params["b"] @ x, jnp.sum(params["a"][:1])


def joined_rows():
    params, x = {"a": float32(64, 256), "b": float32(64, 256)}, float32(256, 4)
    return {"a": (rows_of_a, (params, x)), "b": (rows_of_b, (params, x))}


def test_what_neither_function_wants_for_itself_may_be_best():
    functions, topology = joined_rows(), v5e(MESH.axis_names)
    total = weighted(autoshard.plan_together(functions, mesh=MESH, topology=topology), {})
    for one, other in (("a", "b"), ("b", "a")):
        own = alone(functions[one], topology)
        imposed = alone(functions[other], topology, like=own)
        assert total < 0.9 * (own.cost + imposed.cost)


def test_a_function_that_runs_often_decides():
    topology = slow_chips(MESH.axis_names)
    plans = autoshard.plan_together(FUNCTIONS, mesh=MESH, weights={"decode": 1e6}, topology=topology)
    assert plans["decode"].cost == pytest.approx(alone(DECODE, topology).cost, rel=1e-3)
    assert "planned together" in plans["decode"].warnings[-1] and "decode (weight 1e+06)" in str(plans["prefill"])


@pytest.mark.slow
def test_the_memory_limit_holds_for_each_function():
    topology, weight = v5e(MESH.axis_names), float32(WIDTH, HIDDEN)
    functions = {name: (product, (weight, float32(rows, WIDTH))) for name, rows in (("half", 256), ("all", 512))}

    def planned(memory):
        return autoshard.plan_together(functions, mesh=MESH, topology=topology, memory=memory)

    with pytest.raises(autoshard.MemoryLimitError, match=r"^all: no sharding fits") as refused:
        planned(1000)
    memory = 1.02 * refused.value.needed
    plans = planned(memory)
    peaks = [plan.predicted.peak_bytes for plan in plans.values()]
    assert max(peaks) <= memory < sum(peaks)  # they run one at a time
    assert specs(plans["half"]) == specs(plans["all"])


def test_plans_run_and_pin_what_is_fixed():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    fixed = {"params/up": P("data"), "cache": P("model")}
    plans = autoshard.plan_together(FUNCTIONS, mesh=mesh, fixed=fixed)
    assert plans["prefill"].in_shardings[0]["up"].spec == plans["decode"].in_shardings[0]["up"].spec == P("data")
    assert plans["decode"].in_shardings[1].spec == P("model")
    step = autoshard.autoshard(decode, mesh=mesh, plan=plans["decode"], donate_argnums=1)
    given = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), DECODE[1])
    _, hidden = step(*given)
    assert float(hidden[0, 0]) == WIDTH * HIDDEN
    assert plans["decode"].verify().actual_peak > 0


REFUSED = [
    ({}, {}, "a dict from names"),
    ({"a": prefill}, {}, "a tuple of its arguments"),
    ({"a": PREFILL}, {"weights": {"b": 1}}, r"weights\['b'\] = 1; a number"),
    ({"a": PREFILL}, {"weights": {"a": -1}}, "0 or more"),
    ({"a": PREFILL, "b": (jnp.sin, (float32(3),))}, {}, "'b' shares no argument with 'a'"),
    ({"a": PREFILL}, {"fixed": {"cache": P()}}, "fixed: no argument of a fits 'cache'"),
    ({"a": PREFILL}, {"in_shardings": None}, "autoshard takes no in_shardings"),
    ({"a": PREFILL}, {"like": "plan.json"}, "takes no like="),
    ({"a": PREFILL}, {"remat": "auto"}, r"takes no remat=.*\n.*like="),
]


@pytest.mark.parametrize("functions, options, message", REFUSED)
def test_what_cannot_be_planned_is_named(functions, options, message):
    with pytest.raises(autoshard.AutoshardError, match=message):
        autoshard.plan_together(functions, mesh=MESH, **options)


def test_a_search_is_that_of_the_joint_problem_too(monkeypatch):
    asked, right = [], planning.solve_for_plan

    def spied(problem, **limits):
        asked.append(limits["search"])
        return right(problem, **limits)

    monkeypatch.setattr(planning, "solve_for_plan", spied)
    functions, topology = joined_rows(), v5e(MESH.axis_names)
    autoshard.plan_together(functions, mesh=MESH, topology=topology, search="pase")
    assert set(asked) == {"pase"}
