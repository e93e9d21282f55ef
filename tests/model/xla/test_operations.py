"""Which operations groups are on TPU, where little is to be found: many groups, primitives of users, odd numbers."""

import random
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from programs import f32

from autoshard import evaluate, plan, register_rule, topology
from autoshard.model import grouping
from autoshard.model.formulating import formulate
from autoshard.model.grouping import groups_of
from autoshard.model.xla import operations
from autoshard.model.xla.backends import V5E
from autoshard.model.xla.operations import KERNEL_SECONDS
from autoshard.program import trace
from autoshard.propagation import rules_for


def groups_in(step, *arguments):
    program = trace(step, arguments, {})
    return groups_of(program, rules_for(program), V5E, {"x": 4})


def turns(count):
    def step(x, mask):
        for _ in range(count):
            x = jnp.tanh(jnp.cumsum(x * mask, 0))
        return x

    return step


def test_many_readers_of_one_array_that_wait_for_each_other_take_little_time():
    """What each waits for is found once, and not once for each of the others."""
    program = trace(turns(400), (f32(64, 64), f32(64, 64)), {})
    rules = rules_for(program)
    start = time.process_time()
    groups = groups_of(program, rules, V5E, {"x": 4})
    assert time.process_time() - start < 1
    assert not any(group.runs_beside for group in groups)


@pytest.mark.parametrize("most", [4, 64, 1000])
def test_what_a_group_waits_for(monkeypatch, most):
    monkeypatch.setattr(operations, "_MOST_BETWEEN", most)
    draw = random.Random(most)
    reads = [sorted(draw.sample(range(i), min(i, draw.randrange(4)))) for i in range(200)]
    behind = []  # per group, all that it waits for
    for group, before in enumerate(reads):
        behind.append({group}.union(*(behind[other] for other in before)))
        found, least = operations._awaited(group, reads)
        assert found <= behind[group]
        assert {other for other in behind[group] if other >= least} <= found
        assert least == 0 or len(found) > most


@pytest.mark.parametrize(
    "place, is_known", [(3, True), (jnp.array([3]), True), (np.array([1, -1]), True), (lambda x: x.argmax(), False)]
)
def test_places_that_the_step_says_are_known(place, is_known):
    """Whether they are a number or a small array; and what is computed of these costs nothing."""

    def step(x):
        return x.at[place(x[0]) if callable(place) else place].set(1.0)

    scatter = trace(step, (f32(64, 64),), {}).equations[-1]
    assert scatter.inputs[1].is_known == is_known
    inserting = V5E.operations.least_seconds * (1 if is_known else 1 + operations._OPERATIONS_OF_GUARD)
    *before, last = groups_in(step, f32(64, 64))
    assert V5E.operations.seconds(last) == inserting
    assert not is_known or all(V5E.operations.seconds(group) == 0 for group in before)


def test_readers_that_wait_run_apart_and_others_together():
    def step(x, mask):
        first = jnp.cumsum(x * mask, 0)
        return first, jnp.cumsum(jnp.sin(mask), 0), jnp.cumsum(first * mask, 0)

    groups = groups_in(step, f32(64, 64), f32(64, 64))
    assert [group.runs_beside for group in groups if group.fuses] == [False, True, False]


def test_an_elementwise_primitive_of_a_user_may_make_arrays_of_several_sizes():
    primitive = Primitive("rows_and_all")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda rows, x: [jax.core.ShapedArray(a.shape, a.dtype) for a in (rows, x)])
    register_rule(primitive, "i, i j -> i, i j")
    arguments = f32(64), f32(64, 32)
    program = trace(lambda rows, x: [made * 2 for made in primitive.bind(rows, x)], arguments, {})
    found = formulate(program, rules_for(program), {"x": 4}, topology("v5e:2x2"), backend=V5E)
    assert all(np.isfinite(costs).all() for costs in found.problem.costs)


@pytest.mark.parametrize(
    "work, computes",
    [(lambda x: x - 0.0, False), (lambda x: 0.0 - x, True), (lambda x: x * 1.0, False), (lambda x: x + 2.0, True)],
)
def test_work_that_gives_back_its_operand(work, computes):
    (equation,) = trace(work, (f32(8),), {}).equations
    assert operations._computes(equation) == computes


@pytest.mark.parametrize("dtype, loops", [("float32", False), ("complex64", False), ("bfloat16", True)])
def test_triangles_of_few_bits_alone_are_inverted_row_by_row(dtype, loops):
    matrix, vectors = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((32, 32), (32, 8)))
    (equation,) = trace(
        lambda a, b: jax.lax.linalg.triangular_solve(a, b, left_side=True), (matrix, vectors), {}
    ).equations
    assert (operations._extra_operations(equation) > 32) == loops


@pytest.mark.parametrize("chip, kernels", [("h100", 2), ("v5e", 0)])
def test_arguments_that_are_returned_are_copied_by_kernels_on_gpu(chip, kernels):
    """The state of an evaluation step, as it was: with what is computed beside it, since the objective counts both."""
    state = {name: f32(64, 64) for name in "ab"}

    def planned(step):
        return plan(step, state, f32(64, 64), mesh=AbstractMesh((1,), ("x",)), topology=f"{chip}:1", donate_argnums=())

    alone, both = planned(lambda state, x: jnp.sin(x)), planned(lambda state, x: (state, jnp.sin(x)))
    more = both.predicted.step_seconds - alone.predicted.step_seconds
    assert more == pytest.approx(kernels * KERNEL_SECONDS, abs=1e-7)
    assert both.cost == pytest.approx(both.predicted.step_seconds)


RETURNED = {  # a step that only returns arguments or views of them -> shapes, and the fewest operations it can be
    "an argument": (lambda x: x, [f32(1024, 1024)], 1),
    "several": (lambda *xs: xs, [f32(256, 512)] * 5, 1),
    "numbers": (lambda x, y: (x, y), [f32(), f32(1)], 0),
    "a view of what nobody writes": (jax.grad(lambda x, w: (x.reshape(-1) * w).sum()), [f32(64, 128), f32(8192)], 1),
}


@pytest.mark.parametrize("name", RETURNED)
def test_steps_that_only_return_arguments_copy_them_on_tpu(name):
    """Within a factor of two of libtpu's cycles: one copy starts, and others run beside it."""
    pytest.importorskip("libtpu")
    step, shapes, operations_run = RETURNED[name]
    planned = plan(step, *shapes, mesh=AbstractMesh((8,), ("x",)), topology="v5e:2x4", fixed={"*": jax.P()})
    truth = planned.verify("v5e:2x4").schedule.step_seconds
    assert (truth > V5E.operations.least_seconds / 2) == (operations_run > 0)
    assert truth / 2 <= planned.predicted.comparable_seconds <= truth * 2
    assert planned.cost == pytest.approx(planned.predicted.step_seconds)


SHAPE = (4096, 4096)
STORED = {  # what a loop stores and sums up -> cycles of the one fusion that libtpu makes of it on v5e
    ("float32", "sum", 1): 322_806,
    ("float32", "max", 1): 322_998,
    ("float32", "sum", 0): 307_528,
    ("bfloat16", "sum", 1): 304_016,
}


def seconds_of_stored(dtype, reduction, dim):
    """Predicted, without what the loop waits for its argument."""

    def step(x):
        made = jnp.tanh(x) * 2
        return made, getattr(made.astype(jnp.float32), reduction)(dim)

    mesh, x = AbstractMesh((4,), ("x",)), jax.ShapeDtypeStruct(SHAPE, dtype)
    made = evaluate(step, x, in_shardings=(P(),), out_shardings=P(), mesh=mesh, topology="v5e:2x2").predicted
    return made.compute_seconds - made.arrival_seconds


@pytest.mark.parametrize("dtype, reduction, dim", STORED)
def test_a_loop_sums_up_what_it_stores(monkeypatch, dtype, reduction, dim):
    measured = STORED[dtype, reduction, dim] / V5E.streams.clock
    assert 0.8 < seconds_of_stored(dtype, reduction, dim) / measured < 1.25
    monkeypatch.setattr(grouping, "joined_operands", lambda *args, **_: operations.joined_operands(*args))
    assert seconds_of_stored(dtype, reduction, dim) > 2 * measured


RECURRENT = {(32, 256): 6_033_293, (64, 128): 5_284_912}  # batch and width of 256 turns -> all cycles on v5e


def recurrent_gradient(weights, xs):
    """Of a loss of an LSTM: each turn hands on a state, and stacks what its gradient will read."""

    def turn(carry, x):
        hidden, state = carry
        let, forget, out, new = jnp.split(jnp.concatenate([hidden, x], -1) @ weights, 4, -1)
        state = jax.nn.sigmoid(forget) * state + jax.nn.sigmoid(let) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(out) * jnp.tanh(state)
        return (hidden, state), hidden

    zeros = jnp.zeros(xs.shape[1:])
    return jnp.square(jax.lax.scan(turn, (zeros, zeros), xs)[1]).sum()


@pytest.mark.parametrize("batch, width", RECURRENT)
def test_stacks_are_written_by_the_loops_of_a_turn(monkeypatch, batch, width):
    mesh, shapes = AbstractMesh((4,), ("x",)), (f32(2 * width, 4 * width), f32(256, batch, width))

    def ratio():
        lies = {"in_shardings": (P(), P()), "out_shardings": P(), "mesh": mesh, "topology": "v5e:2x2"}
        made = evaluate(jax.grad(recurrent_gradient), *shapes, **lies).predicted
        return made.step_seconds / (RECURRENT[batch, width] / V5E.streams.clock)

    assert 0.8 < ratio() < 1.25
    monkeypatch.setattr(grouping, "joined_operands", lambda *args, **_: operations.joined_operands(*args))
    assert ratio() > 1.25


def test_each_sum_is_part_of_the_loop_that_stores_its_array():
    def step(x):
        made = jnp.tanh(x) * 2
        scaled = made / made.sum(0)
        return made, scaled, scaled.sum(1)

    groups = groups_in(step, f32(*SHAPE))
    sums = [group for group in groups if group.reduction]
    assert len(sums) == 2 and all({use.value.id for use in group.uses} <= group.read_before for group in sums)
    made = {one.value.id for group in groups if group.fuses for one in group.outputs}
    assert [len(made & group.read_before) for group in sums] == [1, 2]  # the second waits for the first


def test_sums_of_narrow_numbers_and_of_these_in_wider_ones_are_two_operations():
    def step(x):
        made = jnp.tanh(x) * 2
        return made, made.astype(jnp.float32).sum(1), made.max(0)

    narrow = jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16)
    assert [group.runs_beside for group in groups_in(step, narrow) if group.reduction] == [True, False]
    assert all(group.runs_beside for group in groups_in(step, f32(*SHAPE)) if group.reduction)
