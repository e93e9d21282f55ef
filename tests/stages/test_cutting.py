"""A step that is cut into stages computes what it computes whole, whatever form it has."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from equality import are_equal, assert_equal
from one_device import cut_evenly, cuttable, run_in_order
from pipeline_steps import LAYERS, ROWS, STEPS, WIDTH, layer, numbers, scanned, weights_of_layer

from autoshard import MicrobatchError
from autoshard.microbatches.canonical_forms import form_of
from autoshard.pipeline import SCHEDULES, schedule
from autoshard.stages.cutting import cut
from autoshard.stages.programs import Key
from autoshard.stages.stage_layouts import program_of

ACTIVATION = (ROWS // 2, 4, WIDTH)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(STEPS))
def test_stages_compute_the_step(name):
    step, args = STEPS[name]()
    programs = cut_evenly(step, args, 2, 3, weight_programs=True)
    expected = jax.tree.leaves(jax.jit(step)(*args))
    assert_equal(run_in_order(programs, jax.tree.leaves(args)), expected)


@pytest.fixture(scope="module")
def unrolled():
    step, args = STEPS["unrolled"]()
    return cuttable(step, args, 2)


@functools.cache
def evenly(step, stages, **options):
    units = step.units(stages)
    return cut(step, units.boundaries(units.balanced(stages)), **options)


def test_one_activation_crosses_each_boundary_and_one_cotangent(unrolled):
    programs = evenly(unrolled, 4)
    assert sorted(programs.sends) == [(0, 1), (1, 0), (1, 2), (2, 1), (2, 3), (3, 2)]
    for keys in programs.sends.values():
        assert [programs.types[key].shape for key in keys] == [ACTIVATION]


def guarded():
    """Gradients in units of the largest, and none if one is infinite; then steps in units of the weights' size."""

    def update(gradients, state, weights=None):
        leaves = jax.tree.leaves(gradients)
        is_finite = jnp.stack([jnp.all(jnp.isfinite(one)) for one in leaves]).all()
        largest = jnp.stack([jnp.max(jnp.abs(one)) for one in leaves]).max()
        return jax.tree.map(lambda one: jnp.where(is_finite, one / largest, 0.0), gradients), state

    return optax.chain(optax.GradientTransformation(lambda _: (), update), optax.adafactor(1e-2))


def test_of_stacks_of_layers_numbers_alone_cross_after_the_loop():
    step, args = scanned(optimizer=guarded())
    programs = cut_evenly(step, args, 2, 3)
    expected = jax.tree.leaves(jax.jit(step)(*args))
    assert_equal(run_in_order(programs, jax.tree.leaves(args)), expected)
    makers = {key: one.stage for one in programs.programs for key in one.outputs}
    sent = {key for one in programs.programs for key in one.inputs if makers.get(key, one.stage) != one.stage}
    numbers_alone = {programs.types[key].shape for key in sent if key.kind == "late"}
    stacks = {i for i, leaf in enumerate(jax.tree.leaves(args)) if leaf.shape[:1] == (LAYERS,)}
    read = {key.number for one in programs.programs for key in one.inputs if key.kind == "argument"}
    assert numbers_alone == {()} and not stacks & read


def test_weight_programs_take_half_of_the_backward_pass(unrolled):
    """Each product of the forward pass has two in the backward pass: one for its operand, one for its weight."""
    whole, apart = evenly(unrolled, 3), evenly(unrolled, 3, weight_programs=True)
    both = apart.loop["B", 1].flops + apart.loop["W", 1].flops
    assert whole.loop["B", 1].flops == pytest.approx(both, rel=0.1)
    products = [str(apart.loop[kind, 1].jaxpr).count("dot_general") for kind in ("F", "B", "W")]
    assert len(set(products)) == 1 and products[0] >= 2, products
    assert ("B", 0) not in apart.loop, "no stage waits for the first"


def test_products_are_kept_for_the_backward_pass_and_elementwise_work_is_done_again(unrolled):
    programs = evenly(unrolled, 4)
    kept = sorted(programs.types[key].shape for key in programs.kept[1])
    assert kept == sorted([ACTIVATION, (*ACTIVATION[:2], 2 * WIDTH)]), "what the layer reads, and its inner product"


def test_each_stage_has_its_own_optimizer(unrolled):
    programs = evenly(unrolled, 3)
    assert sorted(program.stage for program in programs.after) == [0, 1, 2]
    for argument, taken in programs.carried.items():
        home, maker = programs.homes[argument], programs.makers[taken].stage
        assert home == maker or programs.types[argument].shape == (), f"{argument} moves from {maker} to {home}"


def test_trips_of_a_loop_over_layers_are_units():
    step, args = scanned(remat=True)
    found = cuttable(step, args, 2)
    starts = [unit.start for unit in found.units().units]
    loop = next(start.equation for start in starts if start.trip)
    assert [start.trip for start in starts if start.equation == loop] == [0, 1, 2, 3]
    programs = evenly(found, 2)
    bounds = {(piece.start, piece.stop) for piece in programs.pieces}
    assert bounds == {(0, 2), (2, LAYERS)}, "every stage has two layers, of weights and of moments"
    assert all(len(program.inputs) < 40 for program in programs.after)


def test_norms_of_all_gradients_are_numbers_that_stages_send():
    step, args = STEPS["tied"]()
    programs = cut_evenly(step, args, 2, 2)
    sent = {
        key
        for program in programs.after
        for key in program.inputs
        if key.kind == "late" and programs.makers[key].stage != program.stage
    }
    assert sent and all(programs.types[key].shape == () for key in sent)


def test_a_planted_fault_is_seen():
    """A stage that adds the gradient of one microbatch alone."""
    step, args = STEPS["with rows"]()
    programs = cut_evenly(step, args, 2, 2)
    leaves, expected = jax.tree.leaves(args), jax.tree.leaves(jax.jit(step)(*args))
    assert are_equal(run_in_order(programs, leaves), expected)
    late = {key: program for key, program in programs.loop.items() if key[0] != "B"}
    late["B", 0] = programs.loop["B", 0]
    late["B", 1] = dataclasses.replace(
        programs.loop["B", 1],
        outputs=tuple(key if key.kind != "sum" else Key("sum", -1) for key in programs.loop["B", 1].outputs),
    )
    assert not are_equal(run_in_order(dataclasses.replace(programs, loop=late), leaves), expected)


@pytest.mark.parametrize("name", SCHEDULES)
def test_tasks_of_every_schedule_find_their_inputs(name, unrolled):
    """Devices follow their orders, each as far as what its next task reads is there."""
    order = schedule(name, 2, 4)
    stages = len(order.placement) // order.replicas
    programs = evenly(unrolled, stages, weight_programs=order.has_weight_tasks)
    made, position = set(), [0] * len(order.orders)
    count = sum(map(len, order.orders))
    while sum(position) < count:
        before = sum(position)
        for device, tasks in enumerate(order.orders):
            while position[device] < len(tasks):
                kind, microbatch, stage = tasks[position[device]]
                program = programs.loop.get((kind, stage % stages))
                if program is not None:
                    read = {(key, microbatch) for key in program.inputs if key.kind == "value"}
                    if not read <= made:
                        break
                    made |= {(key, microbatch) for key in program.outputs}
                position[device] += 1
        assert sum(position) > before, f"{name} waits for ever at {position}"


def normalized_over_the_batch(weights, batch):
    def loss(weights):
        x = batch["x"] @ weights["up"]
        x = (x - x.mean(0)) / (x.std(0) + 1e-3)
        return jnp.mean((x @ weights["down"] - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def with_metrics(weights, batch):
    def loss(weights):
        error = jnp.abs(layer(weights, batch["x"]) - batch["y"])
        return jnp.mean(error**2), jnp.max(error)

    (value, largest), gradients = jax.value_and_grad(loss, has_aux=True)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value, largest


def test_a_maximum_beside_the_loss_is_no_matter_of_its_gradient():
    batch = {"x": numbers(2, ROWS, WIDTH), "y": numbers(3, ROWS, WIDTH)}
    assert cuttable(with_metrics, (weights_of_layer(0), batch), 4).roles


def test_a_step_that_needs_the_whole_batch_is_refused_with_its_line():
    weights = {"up": numbers(0, WIDTH, 2 * WIDTH), "down": numbers(1, 2 * WIDTH, WIDTH)}
    batch = {"x": numbers(2, ROWS, WIDTH), "y": numbers(3, ROWS, WIDTH)}
    with pytest.raises(MicrobatchError, match=r"microbatches=4 would change .* at test_cutting.py:\d+"):
        _ = cuttable(normalized_over_the_batch, (weights, batch), 4).roles


def test_stages_of_like_layers_are_written_alike(unrolled):
    """And only those: of each form one program is read, which stands for the others."""
    programs = evenly(unrolled, LAYERS)
    forms = [form_of(programs.loop["F", stage].jaxpr) for stage in range(LAYERS)]
    middle = forms[1:-1]
    assert len(middle) > 1 and all(hash(one) == hash(middle[0]) and one == middle[0] for one in middle)
    assert forms[-1] != middle[0]
    read = [program_of(programs.loop["F", n], "step", programs.carried).fingerprint for n in range(LAYERS)]
    assert [one == read[1] for one in read] == [one == forms[1] for one in forms]
