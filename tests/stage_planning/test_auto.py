"""pipeline='auto' and the plans of pipelines: what is chosen, what plans say, that steps compute the same numbers."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from autoshard import autoshard, plan, topology
from autoshard.errors import ArgumentError, MemoryLimitError, StageError
from autoshard.options import options_of
from autoshard.pipeline import schedule
from autoshard.report.units import bytes_text
from autoshard.stage_planning import choosing
from autoshard.stage_planning.pipeline_plan import PipelinePlan
from autoshard.stage_planning.planned_stage import _hops
from autoshard.stage_planning.unit_costs import UnitCut
from autoshard.stages.planning import StagePlanner
from autoshard.stages.programs import Key
from autoshard.stages.stacks import EquationOrigin
from autoshard.stages.units import Units

WIDTH, LAYERS, ROWS = 61, 4, 8  # no mesh axis divides the width: a plan without stages has all weights on every device


def step(params, x, y):
    def loss(params):
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean((h - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(params)
    return [w - 0.1 * g for w, g in zip(params, gradient, strict=True)], value


def arguments():
    keys = jax.random.split(jax.random.key(0), LAYERS)
    x = jax.random.normal(jax.random.key(1), (ROWS, WIDTH))
    return [jax.random.normal(key, (WIDTH, WIDTH)) / 8 for key in keys], x, jnp.ones((ROWS, WIDTH))


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


@pytest.fixture(scope="module")
def tight(mesh):
    """A step that fits in stages alone."""
    return autoshard(step, mesh=mesh, pipeline="auto", memory="110KiB")


@pytest.fixture(scope="module")
def found(tight):
    return tight.plan(*arguments())


def test_a_step_that_fits_no_plan_without_stages_runs_in_stages(mesh, tight, found):
    with pytest.raises(MemoryLimitError):
        plan(step, *arguments(), mesh=AbstractMesh((2,), ("data",)), topology="cpu:2", memory="110KiB")
    assert [len(stage.devices) for stage in found.stages] == [1, 1]
    assert all(0 < stage.peak_bytes <= found.memory for stage in found.stages)
    assert found.predicted.peak_bytes == max(stage.peak_bytes for stage in found.stages)
    expected, results = jax.jit(step)(*arguments()), tight(*arguments())
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(results), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    params, loss = tight(results[0], *arguments()[1:])  # results lie as arguments are taken
    assert loss < expected[1] and len(params) == LAYERS


def test_what_a_plan_says_of_its_stages(found):
    assert found.timeline.makespan <= found.predicted.step_seconds
    assert [stage.plan.predicted.step_seconds > 0 for stage in found.stages] == [True, True]
    assert found.stages[0].sent_bytes == found.stages[1].sent_bytes == ROWS * WIDTH * 4
    assert found.stages[0].layers and found.stages[0].layers[0].startswith("test_auto.py:")
    text = str(found)
    for said in (
        "stage 1",
        "in flight",
        "slower than the best choice searched, by the costs of layers",
        "of which the busiest stage waits",
        "Without stages: no sharding fits",
    ):
        assert said in text
    assert repr(found).startswith("<Plan of 'step'")
    meshes = {sharding.mesh.devices.item() for sharding in found.in_shardings[0]}
    assert meshes == {stage.devices[0] for stage in found.stages}
    assert found.bound <= found.cost == found.predicted.step_seconds


def test_what_has_one_name_lies_one_way_in_all_programs_of_a_stage(found):
    layouts = {}
    for program, made in zip(found.pipeline.programs.programs, found.pipeline.plans, strict=True):
        ends = zip((*program.inputs, *program.outputs), (*made.arguments, *made.results), strict=True)
        for key, placed in ends:
            assert layouts.setdefault((program.stage, key), placed.layout) == placed.layout, (program.name, key)
    assert any(key.kind == "sum" for _, key in layouts)


def test_arguments_count_on_the_device_that_has_most(found):
    assert found.argument_bytes == 4 * (LAYERS // 2 * WIDTH**2 + ROWS * WIDTH)
    assert f"Arguments ({bytes_text(found.argument_bytes)} per device)" in str(found)


def test_the_timeline_is_in_the_html_report(found, tmp_path):
    page = found.show(tmp_path / "plan.html").read_text()
    assert page.count("<title>F(") == found.timeline.schedule.microbatches * len(found.stages)
    assert "stage 1" in page


def test_programs_of_stages_are_verified(found):
    verified = found.verify()
    assert {name.split(" of ")[1] for name in verified.programs} == {"stage 0", "stage 1"}
    assert "F of stage 0" in str(verified)


def test_a_chosen_plan_is_explained_and_asked_what_if(found):
    explained = found.explain("params/0")
    assert explained.reasons[0].startswith("Stage 0 keeps it; F of stage 0")
    wished = found.what_if(memory="1MiB")
    assert [stage.devices for stage in wished.stages] == [stage.devices for stage in found.stages]
    with pytest.raises(MemoryLimitError, match="pipeline: "):
        found.what_if(memory="80KiB")


def test_the_plan_without_stages_is_kept_where_it_is_faster(mesh):
    automatic = autoshard(step, mesh=mesh, pipeline="auto")
    chosen = automatic.plan(*arguments())
    assert chosen.stages == () and chosen.timeline is None
    assert "dispatching the tasks of a pipeline takes 0.00186 s per step or more" in str(chosen)
    assert chosen.predicted == plan(step, *arguments(), mesh=mesh).predicted
    with pytest.raises(StageError, match="step runs without stages"):
        automatic.pipeline(*arguments())
    assert automatic(*arguments())[1] == pytest.approx(jax.jit(step)(*arguments())[1])


def test_stages_are_not_planned_where_their_layers_alone_take_too_long(mesh, monkeypatch):
    for name in ("exact_pipeline", "with_less_room"):
        monkeypatch.setattr(choosing, name, None)
    monkeypatch.setattr(choosing, "DISPATCH_SECONDS", 0.0)
    chosen = plan(step, *arguments(), mesh=mesh, pipeline="auto")
    (told,) = (one for one in chosen.warnings if "by the costs of its layers no pipeline takes less than" in one)
    assert float(re.search(r"less than (\S+) s per step", told)[1]) > chosen.predicted.step_seconds


def test_a_step_that_cannot_run_in_microbatches_runs_without_stages(mesh):
    def normed(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(((x - x.mean(0)) @ w @ w) ** 2))(w)

    chosen = autoshard(normed, mesh=mesh, pipeline="auto").plan(*arguments()[0][:1], arguments()[1])
    assert chosen.stages == ()
    assert "cannot be cut" in str(chosen)


def test_stages_that_are_asked_for_are_told_as_well(mesh):
    asked = autoshard(step, mesh=mesh, pipeline={"stages": 2, "microbatches": 4, "schedule": "zb_h1"})
    made = asked.plan(*arguments())
    assert isinstance(made, PipelinePlan)
    assert made.timeline.schedule.name == "zb_h1"
    assert {"F", "B", "W"} <= made.stages[1].plans.keys()


def test_fixed_holds_in_stages(mesh):
    wide = autoshard(step, mesh=mesh, pipeline="auto", memory="110KiB", fixed={"x": P("data")})
    made = wide.plan(*arguments())
    assert made.stages


@pytest.mark.parametrize("option", [{"pad": "auto"}, {"microbatches": 2}, {"like": "x.json"}])
def test_options_that_stages_do_not_heed_are_refused(mesh, option):
    with pytest.raises(ArgumentError, match=f"pipeline=.*{next(iter(option))}="):
        plan(step, *arguments(), mesh=mesh, pipeline="auto", **option)


def test_pipeline_takes_auto_or_a_dict(mesh):
    with pytest.raises(ArgumentError, match="pipeline="):
        autoshard(step, mesh=mesh, pipeline="gpipe")


def scanned(weights, x, y):
    def loss(weights):
        return jnp.mean((jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights["w"])[0] - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return {"w": weights["w"] - 0.1 * gradient["w"]}, value


@pytest.mark.parametrize("layers, is_view", [(4, True), (3, False)])
def test_a_plan_says_how_stacks_lie_over_the_stages(mesh, layers, is_view):
    weights, x = {"w": jnp.ones((layers, 6, 6)) / 8}, jnp.ones((4, 6))
    step = autoshard(scanned, mesh=mesh, pipeline={"stages": 2, "microbatches": 2})
    made = step.plan(weights, x, x)
    assert any("copied between stages" in warning for warning in made.warnings) == (not is_view)
    asked, given = made.in_shardings[0]["w"], made.out_shardings[0]["w"]
    assert asked == given
    assert asked.shard_shape((layers, 6, 6)) == ((2, 6, 6) if is_view else (3, 3, 6))
    if not is_view:
        result, _ = step({"w": jax.device_put(weights["w"], asked)}, x, x)
        assert result["w"].sharding == given
        expected, _ = jax.jit(scanned)(weights, x, x)
        np.testing.assert_allclose(result["w"], expected["w"], rtol=1e-5)
        again = jax.jit(scanned)(expected, x, x)[1]
        np.testing.assert_allclose(step(result, x, x)[1], again, rtol=1e-5)


def test_the_prediction_is_of_the_device_that_works_most(mesh):
    pipeline = {"stages": 2, "microbatches": 2, "schedule": "interleaved_1f1b", "chunks": 2}
    x = jnp.ones((4, 6))
    made = autoshard(scanned, mesh=mesh, pipeline=pipeline).plan({"w": jnp.ones((4, 6, 6))}, x, x)
    of_device = [sum(stage.seconds for stage in made.stages[device::2]) for device in range(2)]
    predicted = made.predicted
    assert predicted.compute_seconds + predicted.exposed_seconds == pytest.approx(max(of_device), rel=1e-6)


def test_a_pipeline_that_is_asked_for_keeps_to_the_memory_limit(mesh):
    pipeline = {"stages": 2, "microbatches": 4, "schedule": "gpipe"}
    free = autoshard(step, mesh=mesh, pipeline=pipeline)
    made = free.plan(*arguments())
    programs = max(one.predicted.peak_bytes for one in made.pipeline.plans)
    assert programs < made.predicted.peak_bytes  # so every program fits alone
    memory = (made.predicted.peak_bytes - 1) / free._options.backend.usable
    with pytest.raises(MemoryLimitError, match=r"stage \d of step is predicted to hold .*\n.*pipeline='auto'") as found:
        autoshard(step, mesh=mesh, pipeline=pipeline, memory=memory).plan(*arguments())
    assert found.value.needed > found.value.budget == memory
    needed = autoshard(step, mesh=mesh, pipeline=pipeline, memory=found.value.needed + 1).plan(*arguments())
    assert needed.predicted.peak_bytes == made.predicted.peak_bytes


def test_stages_are_priced_with_the_links_inside_them():
    axes = {"data": 16}
    costs = topology("h100:2x8", axes)
    options = options_of(AbstractMesh((16,), ("data",)), topology=costs)
    planner = StagePlanner(None, None, options, {}, frozenset())
    inside = planner.options_on(AbstractMesh((8,), ("data",)), 8).topology
    assert inside.links["data"] == costs.links["data"].parts[1][1]
    assert planner.options_on(AbstractMesh((16,), ("data",))).topology == costs


def test_what_is_sent_past_a_stage_is_charged_on_every_hop():
    past, near = Key("value", 0), Key("value", 1)
    programs = SimpleNamespace(sends={(0, 2): (past,), (0, 1): (past, near), (2, 1): (near,)})
    forward = {(0, 1): {past, near}, (1, 2): {past}, (2, 1): {near}}
    assert _hops(programs, schedule("1f1b", 3, 3)) == forward
    direct = schedule("graph", 3, 3, predecessors=[(), (0,), (0, 1)])
    assert _hops(programs, direct) == {(0, 2): {past}, (0, 1): {past, near}, (2, 1): {near}}


def test_a_choice_that_cannot_be_cut_leaves_the_others(mesh, monkeypatch):
    made, refused = choosing.exact_pipeline, []

    def refuses_first(space, choice, *rest):
        if not refused:
            refused.append(choice)
            raise StageError("an early stage would wait for a late one")
        return made(space, choice, *rest)

    monkeypatch.setattr(choosing, "exact_pipeline", refuses_first)
    found = autoshard(step, mesh=mesh, pipeline="auto", memory="110KiB").plan(*arguments())
    assert refused and len(found.stages) > 1


def test_a_unit_that_cannot_be_cut_out_leaves_the_others_of_its_kind():
    kinds = (1.0, 2.0, 2.0, 2.0, 2.0, 3.0)
    units = SimpleNamespace(
        units=[
            SimpleNamespace(
                forward_flops=kind, parameter_bytes=0, made_bytes=0, crossing_bytes=1, start=EquationOrigin(i)
            )
            for i, kind in enumerate(kinds)
        ]
    )

    def cut_at(firsts, impossible):
        if impossible & set(firsts):
            raise StageError("an early stage would wait for a late one")
        return tuple(firsts)

    assert UnitCut.of(units, lambda firsts: cut_at(firsts, set())).cut == (1, 2, 3, 5)
    found = UnitCut.of(units, lambda firsts: cut_at(firsts, {2}))
    assert found.cut == (1, 3, 4, 5) and found.planned == (0, 2, 2, 2, 2, 4)
    tried = []
    with pytest.raises(StageError):
        UnitCut.of(units, lambda firsts: tried.append(tuple(firsts)) or cut_at(firsts, {1}))
    assert len(set(tried)) == len(tried) > 2
    with pytest.raises(StageError, match="computes nothing per row"):
        UnitCut.of(Units(()), lambda firsts: pytest.fail("there is nothing to cut"))
    with pytest.raises(StageError, match=r"into 0 parts at most\."):
        Units(()).balanced(2)


def test_nothing_is_searched_under_a_trace(mesh, monkeypatch):
    automatic = autoshard(step, mesh=mesh, pipeline="auto")
    monkeypatch.setattr(automatic, "_chosen", lambda *_: pytest.fail("it searches"))
    assert jax.eval_shape(automatic, *arguments())[1].shape == ()


def test_pipelines_are_kept_by_context_and_static_arguments(mesh):
    def scaled(params, x, y, scale):
        return step(params, x * scale[0], y)

    how = {"pipeline": {"stages": 2, "microbatches": 2}, "static_argnums": 3}
    options = {"xla_cpu_enable_fast_math": False}
    sharded = autoshard(scaled, mesh=mesh, compiler_options=options, **how)
    first = sharded.pipeline(*arguments(), (2.0,))
    assert sharded.pipeline(*arguments(), (2.0,)) is first
    assert {tuple(one.lowering.jit_keywords["compiler_options"]) for one in first.plans} == {tuple(options)}
    with jax.default_matmul_precision("float32"):
        assert sharded.pipeline(*arguments(), (2.0,)) is not first
    assert sharded.pipeline(*arguments(), (2.0,)) is first
    with pytest.raises(ArgumentError, match="static arguments must be hashable"):
        sharded(*arguments(), [2.0])
    with pytest.raises(ArgumentError, match="pipeline= cannot be combined with refine="):
        autoshard(scaled, mesh=mesh, refine=2, **how)


@pytest.mark.parametrize(("tabled", "bound"), [(2.0, 0.75), (1.5, 1.0), (1.2, 1.0)])
def test_the_bound_of_the_tables_is_held_against_the_choice_by_the_same_tables(tabled, bound):
    """Whole stages take 1 s. By the tables no choice takes less than 1.5 s, and this one takes `tabled`."""
    planned = SimpleNamespace(simulated=SimpleNamespace(seconds=1.0))
    chosen = choosing.ChosenPipeline(planned, {}, (), SimpleNamespace(bound=1.5), tabled)
    assert chosen.bound == bound


def test_dims_that_are_to_be_padded_are_refused_with_what_to_do_instead(mesh):
    with pytest.raises(
        ArgumentError, match=r"cannot be combined with pad= yet; leave one of them out\.\npad='batch' adds rows"
    ):
        autoshard(step, mesh=mesh, pipeline="auto", pad="auto")
