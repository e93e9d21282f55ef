"""Tactics hold in every stage of a pipeline, and so does a search that the user chose; the numbers stay the same."""

import functools

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from models import gpt, mlp
from oracles import run
from sweeps import some
from test_volumes import BATCH, ITEM, LENGTH, MODEL, STEPS, sent

import autoshard
from autoshard.errors import ConflictError, MeshError
from autoshard.options import options_of
from autoshard.planning import checked_rules, formulated
from autoshard.stage_planning import choosing, costs
from autoshard.stage_planning.choosing import CuttableSteps, PlanningTarget, choose_pipeline
from autoshard.stages import planning, stage_tactics
from autoshard.tactics import FSDP, DataParallel, ExpertParallel, Megatron, SequenceParallel, Ulysses, ZeRO
from autoshard.tactics.roles import Roles
from autoshard.variants.variant import Variant

STAGES, MICROBATCHES, MODEL_AXIS = 2, 4, 4
PIPELINE = {"stages": STAGES, "microbatches": MICROBATCHES}
TINY = {"layers": 2, "d_model": 16, "heads": 4, "vocab": 32, "seq": 8, "batch": 16}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def planned(name, tactics, **options):
    step, args = STEPS[name]()
    mesh = AbstractMesh((STAGES, MODEL_AXIS), ("stage", "model"))
    how = {"mesh": mesh, "topology": "h100:2x4", "pipeline": PIPELINE, "donate_argnums": 0}
    return autoshard.plan(step, *args, **how | options, tactics=tactics)


ACTIVATION = ITEM * BATCH // MICROBATCHES * LENGTH * MODEL
SHARE = (MODEL_AXIS - 1) / MODEL_AXIS
VOLUMES = {  # bytes that a device sends for one layer and microbatch, forward and backward
    "Megatron": ([Megatron("model")], {"all_reduce model": 2 * 2 * ACTIVATION * SHARE}),
    "Ulysses": ([Ulysses("model")], {"all_to_all model": 4 * ACTIVATION / MODEL_AXIS * SHARE}),
}


@pytest.mark.parametrize("name", ["unrolled", "scanned"])
@pytest.mark.parametrize("tactic", VOLUMES)
def test_stages_send_what_the_papers_say(tactic, name):
    tactics, volume = VOLUMES[tactic]
    plan = planned(name, tactics)
    for stage in plan.stages:  # of one layer each
        for kind in "F", "B":
            found = sent(stage.plans[kind])
            # Ulysses all_reduces gradients of weights, too, in each backward pass.
            assert {key: found[key] for key in volume} == volume, kind
            assert kind == "B" or found.keys() == volume.keys()
    said = [one for one in plan.warnings if one.startswith("tactics:")]
    assert len(said) == 1 and said[0].startswith(f"tactics: {tactics[0]}. "), plan.warnings


def test_the_oracle_sees_a_stage_without_tactics(monkeypatch):
    monkeypatch.setattr(stage_tactics.StageTactics, "restricted", lambda self, program, formulation, mesh: formulation)
    plan = planned("unrolled", VOLUMES["Ulysses"][0])
    assert any(sent(stage.plans["F"]) != VOLUMES["Ulysses"][1] for stage in plan.stages)


TACTICS = {
    "data, Megatron": [DataParallel("data"), Megatron("model")],
    "FSDP, sequence": [FSDP("data"), SequenceParallel("model")],
    "ZeRO 2": [ZeRO(2, "data", "model")],
    "a function": [lambda step: {one.name: P() for one in step.arguments if one.role == "weight"}],
}


# By default each of the tactics with layers written in one way, and each way with two of them.
WAYS = [(name, turn == k % 2) for turn in range(2) for k, name in enumerate(TACTICS)]


@functools.cache
def trained_on_one_device(scan):
    model = gpt.make(**TINY, scan=scan)
    return run(jax.jit(model.step), model, steps=2)


@pytest.mark.parametrize("tactics, scan", some(WAYS, *WAYS[: len(TACTICS)]))
def test_stages_within_tactics_train_as_one_device_does(tactics, scan):
    model = gpt.make(**TINY, scan=scan)
    mesh = jax.make_mesh((2, 2, 2), ("stage", "data", "model"))
    how = {"mesh": mesh, "pipeline": PIPELINE, "tactics": TACTICS[tactics], "compiler_options": QUICK}
    losses, state, _ = run(autoshard.autoshard(model.step, **how), model, steps=2)
    expected_losses, expected_state, _ = trained_on_one_device(scan)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for leaf, expected in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)


def test_what_arguments_are_to_stages_is_what_they_are_to_the_step(monkeypatch):
    asked = []
    known = stage_tactics.tactic_requests
    monkeypatch.setattr(
        stage_tactics, "tactic_requests", lambda t, roles, mesh: asked.append(roles) or known(t, roles, mesh)
    )
    for name in "unrolled", "scanned":
        step, args = STEPS[name]()
        planned(name, [Megatron("model")])
        whole = whole_roles(step, args)
        assert asked[-1].state == whole.state and asked[-1].batch == whole.batch
        for i in range(len(whole.step.program.own_arguments)):
            assert asked[-1].dims_of_argument(i) == whole.dims_of_argument(i), i


def whole_roles(step, args):
    mesh = AbstractMesh((MODEL_AXIS,), ("model",))
    program = autoshard.autoshard(step, mesh=mesh, topology="h100:1x4", donate_argnums=0).trace(*args)
    rules = checked_rules(program, dict(mesh.shape))
    return Roles(formulated(program, rules, options_of(mesh, topology="h100:1x4")))


def test_stages_that_are_searched_are_within_tactics():
    """Along the axes that each of them has: a stage of two devices has one."""
    step, args = STEPS["scanned"]()
    mesh = AbstractMesh((2, 2, 2), ("stage", "data", "model"))
    options = options_of(mesh, topology="h100:2x4")
    tactics = [DataParallel("data"), Megatron("model")]
    made = autoshard.autoshard(step, mesh=mesh, topology="h100:2x4", donate_argnums=0).variants(*args)
    steps = CuttableSteps(made.step, made.program(Variant()), made.mesh, tactics=tactics)
    machine = PlanningTarget(dict(mesh.shape), options.topology, options.backend, options.memory)
    found = choose_pipeline(steps, machine, counts=[4], schedules=[("1f1b", 1)])
    for cost, stage in zip(found.pipeline.costs, found.pipeline.simulated.choice.stages, strict=True):
        plans = cost.plans(found.shapes[stage.table.shape.name].mesh)
        kinds = {one.kind: plan for one, plan in zip(cost.stage.programs, plans, strict=True)}
        every = {(one.kind, one.axes) for one in kinds["F"].predicted.collectives}
        assert ("all_reduce", ("model",)) in every
        assert every <= {("all_reduce", ("model",)), ("all_reduce", ("data",))}, every


REFUSALS = {
    "no experts": ([ExpertParallel("model")], ConflictError, "finds nothing to apply to"),
    "no such axis": ([Megatron("tensor")], MeshError, "names the axis 'tensor'"),
    "two that differ": ([Megatron("model"), FSDP("model")], ConflictError, "both say what the mesh axis 'model' does"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_a_whole_step_is_refused_is_refused_in_stages(name):
    tactics, kind, message = REFUSALS[name]
    with pytest.raises(kind, match=message):
        planned("unrolled", tactics)


def test_a_wish_for_tactics_plans_the_same_stages_within_them():
    free = planned("unrolled", ())
    wished = free.what_if(tactics=[Megatron("model")])
    assert [stage.layers for stage in wished.stages] == [stage.layers for stage in free.stages]
    assert sent(wished.stages[0].plans["F"]) == VOLUMES["Megatron"][1]


@pytest.mark.parametrize("pipeline", [PIPELINE, PIPELINE | {"backend": "one_jit"}, "auto"], ids=str)
def test_a_search_that_is_asked_for_plans_the_stages(pipeline, monkeypatch):
    """Presolve settles most of the small problems of stages, so that the search itself is not called."""
    asked = []
    one_by_one, together = planning.planned, costs.solve_for_plan

    def planned_program(program, options, *rest):
        asked.append(options.search)
        return one_by_one(program, options, *rest)

    def planned_stage(problem, **how):
        asked.append(how["search"])
        return together(problem, **how)

    monkeypatch.setattr(planning, "planned", planned_program)
    monkeypatch.setattr(costs, "solve_for_plan", planned_stage)
    monkeypatch.setattr(choosing, "DISPATCH_SECONDS", 0.0)  # so that stages of so small a step are planned at all
    model = mlp.make(layers=2, width=16, batch=16)
    how = {"mesh": AbstractMesh((2, 2), ("stage", "data")), "topology": "h100:2x2", "pipeline": pipeline}
    step, args = STEPS["scanned"]() if "backend" in pipeline else (model.step, (model.state, model.batches(0)))
    autoshard.plan(step, *args, **how, search="aceso")
    assert asked and set(asked) == {"aceso"}
