"""Every schedule trains every model as one device does: 5 steps in float32. Slow: the whole sweep takes minutes.

Schedules that cut a step alike share its programs, each of which is compiled once per sub-mesh.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
from models import MORE_MODELS, gpt
from one_device import QUICK
from oracles import SMALL, run
from test_running import mesh_of
from training_recipes import RECIPES, model_of

from autoshard import autoshard
from autoshard.pipeline import SCHEDULES, schedule
from autoshard.stages.planned_pipeline import predecessors_of
from autoshard.stages.running import runtime

pytestmark = pytest.mark.slow

STAGES, MICROBATCHES = 2, 4
TINY = {"layers": 2, "d_model": 16, "heads": 4, "vocab": 32, "seq": 8, "batch": 16}
MODELS = {
    "gpt": lambda: gpt.make(**TINY),
    "gpt scan": lambda: gpt.make(**TINY | {"layers": 4}, scan=True),
    "llama remat": lambda: MORE_MODELS["llama"](**TINY, shared_heads=2, d_hidden=32, remat=True),
    "lstm": SMALL["lstm"],
    "moe": SMALL["moe"],
    "unet": lambda: MORE_MODELS["unet"](width=8, size=8, batch=16),
    "vit": lambda: MORE_MODELS["vit"](layers=2, width=16, heads=4, size=8, batch=16),
} | {name: functools.partial(model_of, name) for name in RECIPES}


@functools.cache
def on_one_device(name):
    model = MODELS[name]()
    losses, state, _ = run(jax.jit(model.step), model)
    return losses, state


@functools.cache
def cut_like(name, chunks, has_weights):
    """A model cut so, and its function: by the schedule that is simplest for that."""
    model = MODELS[name]()
    by = {(1, False): "gpipe", (1, True): "zb_h1", (2, False): "looped_bfs", (2, True): "zb_v"}[chunks, has_weights]
    pipeline = {"stages": STAGES, "microbatches": MICROBATCHES, "schedule": by, "chunks": chunks}
    step = autoshard(model.step, mesh=mesh_of(stage=STAGES, data=2), pipeline=pipeline, compiler_options=QUICK)
    return step, step.pipeline(model.state, model.batches(0))


@pytest.fixture(autouse=True)
def compiled_once(monkeypatch):
    kept = compiled_once.__dict__.setdefault("kept", {})
    made = runtime.runnable

    def runnable(program, plan):
        key = id(program), plan.mesh
        if key not in kept:
            kept[key] = made(program, plan), program
        return kept[key][0]

    monkeypatch.setattr(runtime, "runnable", runnable)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("model_name", MODELS)
def test_every_schedule_trains_every_model_alike(name, model_name):
    model = MODELS[model_name]()
    order = schedule(name, STAGES, MICROBATCHES)
    chunks = len(order.placement) // order.replicas // STAGES
    step, planned = cut_like(model_name, chunks, order.has_weight_tasks)
    if name == "graph":
        order = schedule(name, STAGES, MICROBATCHES, predecessors=predecessors_of(planned.programs))
    ordered = replace(planned, schedule=order)
    for key, known in step._pipelines.items():
        if known.programs is planned.programs:
            step._pipelines[key] = ordered
    losses, state, _ = run(step, model)
    expected_losses, expected_state = on_one_device(model_name)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for leaf, expected in zip(state, expected_state, strict=True):
        np.testing.assert_allclose(leaf, expected, rtol=1e-4, atol=1e-5)
