"""Of several plans the one whose compiled program is best: which are compared, and that a wrong prediction is found."""

import functools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import adjusted, mesh_of, slow_chips

import autoshard
from autoshard import planning, refine
from autoshard.cache import key_of
from autoshard.mesh import collectives
from autoshard.model.memory_limit import solve_within
from autoshard.model.pricing import prices
from autoshard.model.xla.backends import CPU
from autoshard.options import options_of
from autoshard.plans.alternatives import solutions_of
from autoshard.program import trace
from autoshard.propagation import rules_for
from autoshard.solver.verify import fits, verify

SHAPE = {"x": 4, "y": 2}
MESH = mesh_of(SHAPE)
MACHINE = replace(slow_chips(SHAPE), flops={"float32": 1e12}, memory_bandwidth=1e11)  # links matter beside work
WEIGHTS = {"down": jax.ShapeDtypeStruct((1024, 256), np.float32), "up": jax.ShapeDtypeStruct((256, 1024), np.float32)}
BATCH = jax.ShapeDtypeStruct((512, 256), np.float32)


def step(weights, batch):
    def loss_of(weights):
        return jnp.mean((jnp.tanh(batch @ weights["up"]) @ weights["down"]) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), loss


def options(**given):
    return options_of(MESH, **{"topology": MACHINE, "time_limit": 10} | given)


def planned(**given):
    return autoshard.plan(step, WEIGHTS, BATCH, mesh=MESH, topology=MACHINE, donate_argnums=0, **given)


def candidates(**given):
    """What `refine` compares for the step, and the formulation of it."""
    asked = options(**given)
    program = trace(step, (WEIGHTS, BATCH), {}, donate_argnums=0)
    formulated = functools.partial(planning.formulated, program, rules_for(program))
    formulation = formulated(asked)
    return formulation, refine.different(formulation, solve_within(formulation, 10), asked, formulated)


def compiled_seconds(plan, **given):
    return refine.compiled_seconds(plan, options(refine=2, **given))


def test_what_is_compared_differs_and_fits():
    limit = 3_000_000  # too little for data parallel and FSDP form
    formulation, found = candidates(refine=4, memory=limit)
    figures = [refine._figures(formulation, solution) for solution in found]
    assert len(found) == 4 and len(set(figures)) == 4
    assert all(fits(formulation.peak_bytes(solution.choice), limit * CPU.usable) for solution in found)
    assert all(solution.bound == found[0].bound <= solution.cost for solution in found)
    assert found[0].status == "optimal" and found[-1].status == "feasible"


def test_a_part_is_not_compared_with_another_one():
    """Options of two parts of a problem are numbered each in its own way."""
    asked = options(refine=3)
    program = trace(step, (WEIGHTS, BATCH), {}, donate_argnums=0)
    part = replace(planning.formulated(program, rules_for(program), asked), least=0.0)

    def formulated(_):
        raise AssertionError("the whole is formulated again")

    assert refine.different(part, solve_within(part, 10), asked, formulated)
    with pytest.raises(AssertionError, match="formulated again"):
        refine.different(replace(part, least=None), solve_within(part, 10), asked, formulated)


def test_a_textbook_comes_second_and_then_the_cheapest(monkeypatch):
    monkeypatch.setattr(refine, "LARGE_HIDDEN_SHARE", {})
    formulation, (best, textbook, *others) = candidates(refine=5)
    costs = [solution.cost for solution in others]
    assert textbook.cost == min(solution.cost for solution in solutions_of(formulation).values() if solution)
    assert costs == sorted(costs) and best.cost <= min(textbook.cost, *costs)


def test_a_textbook_is_compared_however_dear_it_is_predicted_to_be(monkeypatch):
    formulation, _ = candidates(refine=2)
    dearest = max(filter(None, solutions_of(formulation).values()), key=lambda solution: solution.cost)
    monkeypatch.setattr(refine, "solutions_of", lambda _: {"the only one": dearest, "not to be had": None})
    _, (_, textbook, *others) = candidates(refine=4)
    assert textbook.choice == dearest.choice
    assert min(solution.cost for solution in others) < textbook.cost


def test_what_would_be_the_cheapest_if_much_ran_behind_compute_comes_third():
    program = trace(step, (WEIGHTS, BATCH), {}, donate_argnums=0)
    hiding = replace(options(), backend=adjusted(CPU, "overlap", hidden_share=refine.LARGE_HIDDEN_SHARE))
    expected = solve_within(planning.formulated(program, rules_for(program), hiding), 10)
    formulation, (best, textbook, overlapping, *_) = candidates(refine=3)
    assert overlapping.choice == expected.choice != best.choice
    assert overlapping.cost == pytest.approx(verify(formulation.problem, overlapping.choice)[0])
    assert best.cost < overlapping.cost and expected.cost < overlapping.cost
    _, two = candidates(refine=2)
    assert [solution.choice for solution in two] == [best.choice, textbook.choice]


def test_arguments_alike_lie_in_other_pieces():
    formulation, (best, *_) = candidates(refine=3)
    weights = {0, 1}  # the same kind or two: they are what holds the most
    homes = formulation.arguments
    assert any(
        {homes[i][other.choice[i]].home for i in weights} != {homes[i][best.choice[i]].home for i in weights}
        for other in refine._otherwise(formulation, best, options(refine=3))
    )


def free_gathers(kind, *args):
    return 0.0 if kind == "all_gather" else collectives.seconds(kind, *args)


def test_a_plan_whose_prediction_is_too_good_is_dropped(monkeypatch):
    honest = compiled_seconds(planned())
    monkeypatch.setattr(prices, "collective_seconds", free_gathers)
    fooled, refined = planned(), planned(refine=8)
    assert compiled_seconds(fooled) > 1.2 * honest  # the planted fault does harm
    assert compiled_seconds(refined) < compiled_seconds(fooled)
    assert refined.cost >= fooled.cost and refined.bound == fooled.bound  # by the predictions, which stay as they are
    (remark,) = refined.warnings
    assert remark.startswith("refine: of 8 plans that were compiled, the one predicted to be the fastest takes ")


def test_what_is_kept_is_the_best_of_what_was_compiled(monkeypatch):
    judge, account = refine.compiled_seconds, []
    monkeypatch.setattr(refine, "compiled_seconds", lambda *args: account.append(judge(*args)) or account[-1])
    refined = planned(refine=3)
    assert len(account) == 3 and judge(refined, options(refine=3)) == min(account)


def test_of_the_variants_of_a_step_the_fastest_alone_is_compiled(monkeypatch):
    judge, account = refine.compiled_seconds, []
    monkeypatch.setattr(refine, "compiled_seconds", lambda *args: account.append(judge(*args)) or account[-1])
    refined = planned(refine=2, microbatches=4)
    assert len(account) == 2 and refined.bound <= planned(microbatches=4).bound


def test_a_plan_that_does_not_fit_as_compiled_is_dropped(monkeypatch):
    compile_, peaks = refine.compiled, []

    def too_large_at_first(*args):
        found = compile_(*args)
        peaks.append(found.peak_bytes)
        return found if len(peaks) > 1 else replace(found, peak_bytes=10**12)

    monkeypatch.setattr(refine, "compiled", too_large_at_first)
    refined = planned(refine=2)
    assert len(peaks) == 2 and refined.cost > planned().cost
    assert "the one predicted to be the fastest does not fit by XLA's account" in refined.warnings[0]


def test_where_none_fits_the_plan_stays_and_says_so(monkeypatch):
    monkeypatch.setattr(refine, "compiled_seconds", lambda plan, options: math.inf)
    refined = planned(refine=3)
    assert refined.in_shardings == planned().in_shardings
    assert refined.warnings == ("refine: none of the 3 plans that were compiled fits, as XLA has it.",)


def test_the_decorated_step_runs_as_refined():
    decorated = autoshard.autoshard(step, mesh=MESH, topology=MACHINE, refine=2)
    weights = {name: np.full(x.shape, 0.01, np.float32) for name, x in WEIGHTS.items()}
    batch = np.ones(BATCH.shape, np.float32)
    found, expected = decorated(weights, batch), jax.jit(step)(weights, batch)
    jax.tree.map(lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4), found, expected)


def test_refined_plans_are_kept_apart():
    program = trace(step, (WEIGHTS, BATCH), {})
    rules = rules_for(program)
    assert len({key_of(program, rules, options(refine=k)) for k in (1, 2, 3)}) == 3


@pytest.mark.parametrize("wrong", [0, -1, True, 2.0, "3"])
def test_what_refine_takes(wrong):
    with pytest.raises(autoshard.ArgumentError, match="how many plans to compile"):
        planned(refine=wrong)


def test_there_has_to_be_something_to_compile_for():
    with pytest.raises(autoshard.MeshError, match="has no devices"):
        options_of(MESH.abstract_mesh, refine=2)
    assert options_of(MESH.abstract_mesh, refine=1).compiled_for is None
