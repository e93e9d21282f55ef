"""What processes that share a mesh do in stages: the situations of `many_processes.py` that have a pipeline."""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

import autoshard

LAYERS, WIDTH, ROWS, STEPS = 4, 8, 24, 3
MICROBATCHES = 4


def arrays():
    made = np.random.default_rng(0)
    return (made.standard_normal((LAYERS, WIDTH, WIDTH)).astype(np.float32) / 3, *(
        made.standard_normal((ROWS, WIDTH)).astype(np.float32) for _ in range(2)
    ))  # fmt: skip


def scanned(weights, x, y):
    def loss(weights):
        return jnp.mean((lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0] - y) ** 2)

    value, gradient = jax.value_and_grad(loss)(weights)
    return weights - 0.5 * gradient, value


def unrolled(weights, x, y):
    """The same with an array per layer; it also returns a number per row."""

    def loss(weights):
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        losses = jnp.mean((h - y) ** 2, axis=-1)
        return jnp.mean(losses), losses

    (value, losses), gradient = jax.value_and_grad(loss, has_aux=True)(weights)
    return [w - 0.5 * g for w, g in zip(weights, gradient, strict=True)], value, jnp.max(losses)


def losses_on_one_device():
    weights, x, y = arrays()
    found = []
    for _ in range(STEPS):
        weights, value = jax.jit(scanned)(weights, x, y)
        found.append(float(value))
    return found


def mesh_of(**shape):
    devices = jax.devices()[: int(np.prod(list(shape.values())))]
    return Mesh(np.array(devices).reshape(tuple(shape.values())), tuple(shape))


def trained(step, mesh, schedule, chunks=1, stages=None, **options):
    """The losses of some steps, each a number that this process can read."""
    stages = stages or dict(mesh.shape)["stage"]
    pipeline = {"stages": stages, "microbatches": MICROBATCHES, "schedule": schedule, "chunks": chunks}
    fn = autoshard.autoshard(step, mesh=mesh, pipeline=pipeline, **options)
    return fn, losses_of(fn, step)


def losses_of(fn, step, *, is_born=False):
    """
    Args:
        is_born: whether the weights are made where the plan has them.
    """
    weights, x, y = arrays()
    weights = list(weights) if step is unrolled else weights
    if is_born:
        weights = fn.plan(weights, x, y).init(lambda: jax.tree.map(jnp.asarray, weights))
    found = []
    for _ in range(STEPS):
        weights, value, *_ = fn(weights, x, y)
        found.append(float(value))
    return found


def stages_of_neighbours(count):
    """Each of two stages has devices of half of the processes; the stack of weights is one array over all."""
    return trained(scanned, mesh_of(stage=2, data=count), "gpipe", donate_argnums=0)[1]


def stacks_are_copied(count):
    """Each process has two stages, so that the stack of weights is put together in every step."""
    return trained(scanned, mesh_of(stage=2, data=count), "interleaved_1f1b", chunks=2)[1]


def in_lockstep(count):
    """A stage per process, all in one program; again by the plan as a file has it, with weights born there."""
    mesh, pipeline = mesh_of(stage=count, data=2), {"stages": count, "microbatches": MICROBATCHES, "backend": "one_jit"}
    fn = autoshard.autoshard(scanned, mesh=mesh, pipeline=pipeline)
    expected = losses_of(fn, scanned)
    read = autoshard.Plan.loads(fn.plan(*arrays()).dumps(), mesh)
    again = losses_of(autoshard.autoshard(scanned, mesh=mesh, plan=read), scanned, is_born=True)
    return [float(one) for one in expected] if again == expected else [expected, again]


def two_ways(count):
    """Two pipelines in opposite directions, which share their devices and add up their gradients."""
    return trained(unrolled, mesh_of(stage=2, data=count), "chimera")[1]


def stages_of_their_own(here, count):
    """Each process has one stage. Then a program of the last fails: all raise, and all may try again."""
    return after_a_failure(*trained(unrolled, mesh_of(stage=count, data=2), "zb_h1"), here, count)


def a_shared_stage_fails(here, count):
    """Each stage has a device of every process, and its program fails on one."""
    return after_a_failure(*trained(unrolled, mesh_of(data=count, stage=2), "1f1b"), here, count)


def after_a_failure(fn, expected, here, count):
    """The losses, and the error that is raised if a program of the last process fails in the second microbatch."""
    weights, x, y = arrays()
    (runtime,) = fn._runtimes.values()
    before = dict(runtime.runnable)
    if here == count - 1:
        at = next(key for key, one in before.items() if one.program.kind == "F" and one.compiled is not None)
        calls = []

        def fails(*given):
            calls.append(given)
            if len(calls) == 2:
                raise MemoryError("planted")
            return before[at].compiled(*given)

        runtime.runnable[at] = dataclasses.replace(before[at], compiled=fails)
    begin = time.monotonic()
    try:
        fn(list(weights), x, y)
        text = "nothing failed"
    except autoshard.StageError as error:
        text = str(error)
    runtime.runnable = before
    seconds = time.monotonic() - begin
    return expected, text, seconds, losses_of(fn, unrolled) == losses_of(fn, unrolled, is_born=True) == expected
