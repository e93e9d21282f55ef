"""`rewrites="auto"`: the fastest way to write a step is found by price, runs, is reported, saved and found again."""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from oracles import mesh_of, v5e
from rewritable import arrays, matrix_chain, recurrent, with_gradients

import autoshard
from autoshard import ArgumentError, MicrobatchError, Plan, PlanError
from autoshard.decorated import ShardedFunction
from autoshard.rewrites import REWRITES, Match, register
from autoshard.rewrites.applying import sites
from autoshard.rewrites.product import contracted
from autoshard.variants.rewriting import RewriteSearch, as_planned, by_laws
from autoshard.variants.variant import Variant

AXES = {"data": 2, "model": 2}


def planned(step, arguments, **options):
    return autoshard.plan(step, *arguments, mesh=mesh_of(AXES), topology=v5e(AXES), **options)


@pytest.fixture(scope="module")
def chain():
    """A step that multiplies large matrices in the dearer order."""

    def step(weights, x):
        loss, gradients = jax.value_and_grad(lambda weights: matrix_chain(x, *weights.values()))(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss

    x, *weights = arrays(0, (16, 64, 256), (256, 8), (8, 256), (256, 64))
    return step, (dict(zip("abc", weights, strict=True)), x)


@pytest.fixture(scope="module")
def rewritten_step(chain):
    step, _ = chain
    return autoshard.autoshard(step, mesh=mesh_of(AXES), topology=v5e(AXES), rewrites=["product_chain"])


def test_a_chain_is_multiplied_in_the_cheaper_order(chain, rewritten_step):
    step, arguments = chain
    plan, before = rewritten_step.plan(*arguments), planned(step, arguments)
    assert plan.cost < before.cost and plan.bound <= plan.cost
    assert [name for name, _ in plan.rewrites] == ["product_chain"] * len(plan.rewrites) and plan.rewrites
    assert "rewrites: product_chain at rewritable.py:" in str(plan) and "rewrites:" not in str(before)
    assert_equal(rewritten_step(*arguments), jax.jit(step)(*arguments))


def test_the_explanation_of_an_argument_names_what_reads_it_rewritten(chain, rewritten_step):
    _, arguments = chain
    reasons = rewritten_step.plan(*arguments).explain("weights/a").reasons
    assert any(reason.startswith("rewrites: product_chain at rewritable.py:") for reason in reasons)


def test_a_saved_plan_rewrites_the_step_again(chain, rewritten_step, tmp_path):
    step, arguments = chain
    plan = rewritten_step.plan(*arguments)
    plan.save(tmp_path / "plan.json")
    again = autoshard.autoshard(step, mesh=mesh_of(AXES), topology=v5e(AXES), plan=tmp_path / "plan.json")
    assert again.plan(*arguments).rewrites == plan.rewrites
    assert_equal(again(*arguments), rewritten_step(*arguments))
    text = plan.dumps().replace("product_chain", "another_law")
    with pytest.raises(PlanError):
        autoshard.autoshard(step, mesh=mesh_of(AXES), plan=Plan.loads(text, mesh_of(AXES))).plan(*arguments)


def test_a_step_in_which_no_law_pays_stays_as_it_is():
    step = with_gradients(lambda x, w: (x @ w).sum())
    arguments = arrays(0, (8, 16), (16, 8))
    plan, before = planned(step, arguments, rewrites=["fused_products", "loop_sum"]), planned(step, arguments)
    assert plan.rewrites == () and plan.dumps() == before.dumps()


def test_products_leave_a_loop_whose_turns_wait_for_each_other():
    step, arguments = with_gradients(recurrent), arrays(0, (16, 16, 32), (32, 64), (64, 64), (64, 32))
    laws = ["loop_product", "loop_sum"]
    rewritten_step = autoshard.autoshard(step, mesh=mesh_of(AXES), topology=v5e(AXES), rewrites=laws)
    plan, before = rewritten_step.plan(*arguments), planned(step, arguments)
    assert {name for name, _ in plan.rewrites} == set(laws) and plan.cost < 0.9 * before.cost
    assert_equal(rewritten_step(*arguments), jax.jit(step)(*arguments))


@pytest.mark.usefixtures("little_work_once")
def test_a_rewritten_step_runs_in_microbatches_and_recomputes(chain):
    plan = planned(*chain, rewrites=["product_chain"], microbatches=2, remat="auto")
    assert plan.rewrites and any("2 microbatches" in one for one in plan.warnings)


def test_a_refined_plan_has_the_bound_and_the_time_of_the_search(chain, monkeypatch):
    step, arguments = chain
    ends, honest, fastest = set(), ShardedFunction._fastest, RewriteSearch.fastest

    def timed(self, traced, options):
        ends.add(options.until)
        return honest(self, traced, options)

    def with_less_proven(self):
        found = fastest(self)
        return replace(found, plan=replace(found.plan, bound=found.plan.bound / 2))

    monkeypatch.setattr(ShardedFunction, "_fastest", timed)
    monkeypatch.setattr(RewriteSearch, "fastest", with_less_proven)
    plan = planned(step, arguments, rewrites=["product_chain"], refine=2, time_limit=5)
    assert plan.bound < 0.6 * plan.cost and plan.status == "feasible"
    assert len(ends) == 1 and None not in ends


def test_processes_share_the_time_limit_among_places(chain):
    step, arguments = chain
    variants = autoshard.autoshard(step, mesh=mesh_of(AXES), topology=v5e(AXES)).variants(*arguments)
    count = len(sites(variants.step.closed, REWRITES["product_chain"], 4))
    for until, share in [(math.inf, 1 / (1 + count)), (1e9, 1.0)]:
        assert RewriteSearch(variants, ["product_chain"], 4, v5e(AXES), None, until).share == share


def test_places_that_shift_with_the_rows_are_refused():
    """With few rows the first chain is not looked at, so that the second one would have its place."""

    def step(x, a, b, c, d):
        return jnp.tanh((x @ a) @ b), (a @ c) @ d

    shapes = [(256, 256), (256, 256), (256, 256), (256, 64), (64, 64)]
    whole = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    few = [jax.ShapeDtypeStruct((32, 256), jnp.float32), *whole[1:]]
    variants = autoshard.autoshard(step, mesh=mesh_of(AXES), topology=v5e(AXES)).variants(*whole)
    for site in sites(variants.step.closed, REWRITES["product_chain"], 4):
        made = by_laws(variants, [site.rewritten_places], 4)
        made.step.again(tuple(whole))
        with pytest.raises(MicrobatchError, match="product_chain applies in other places"):
            made.step.again(tuple(few))


def test_a_plan_of_places_that_the_step_lacks_is_refused(chain):
    step, arguments = chain
    variants = autoshard.autoshard(step, mesh=mesh_of(AXES), topology=v5e(AXES)).variants(*arguments)
    places = [place for site in sites(variants.step.closed, REWRITES["product_chain"], 4) for place in site.places]
    assert as_planned(variants, [("product_chain", places)], 4).program(Variant()).rewritten
    with pytest.raises(PlanError, match="in other ones alone"):
        as_planned(variants, [("product_chain", [*places, 99])], 4)


def quadratic(weights, x):
    """A loss that ends in products of vectors, whose gradients are products with the number 1."""
    return jnp.vdot(x[0], weights["a"] @ x[1]) + x[0] @ weights["b"] @ x[1] + x[0] @ x[1] * jnp.sum(weights["a"])


def test_products_with_numbers_are_no_products():
    """`rewrites=` raised that a number cannot be hashed."""
    weights = dict(zip("ab", arrays(0, (32, 32), (32, 32)), strict=True))
    step = lambda weights, x: jax.grad(quadratic, argnums=(0, 1))(weights, x)  # noqa: E731
    arguments = weights, arrays(1, (2, 32))[0]
    found = autoshard.autoshard(step, mesh=mesh_of(AXES), topology=v5e(AXES), rewrites="auto")(*arguments)
    assert_equal(found, jax.jit(step)(*arguments))


def test_a_law_of_the_users_own_is_tried():
    """``A^T B = (B^T A)^T``, written as a user would."""

    @register("turned_product", "A^T B = (B^T A)^T")
    def turned_product(graph):
        for product in graph.products.values():

            def build(left, right, product=product):
                labels = product.left.labels, product.right.labels
                return [contracted(product.eqn, right, labels[1], left, labels[0], product.result)]

            yield Match((product.out,), (product.left.atom, product.right.atom), build)

    try:
        step, arguments = with_gradients(lambda x, w: (x @ w).sum()), arrays(0, (8, 16), (16, 8))
        planned(step, arguments, rewrites=["turned_product"])
        with pytest.raises(ArgumentError, match="turned_product"):
            register("turned_product", "A = A")(lambda graph: ())
    finally:
        del REWRITES["turned_product"]


@pytest.mark.parametrize("rewrites", ["fused", ["no such law"], 3])
def test_what_is_no_law_is_an_error(rewrites):
    with pytest.raises(ArgumentError, match="rewrites="):
        planned(np.sin, [np.ones(4)], rewrites=rewrites)
