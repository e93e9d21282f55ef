"""Several processes that share a mesh. They go through situations in turn, and write what came of each.

python many_processes.py <processes> <port> <folder> <situation>...

All are forked from one that has imported what they need, which takes a process as long as half of what it does here.
"""

import json
import os
import runpy
import sys
import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import stages_in_processes
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import planning
from autoshard.processes import group

DEVICES = 2  # per process
WEIGHTS, BATCH = np.ones((8, 32), np.float32), np.linspace(0, 1, 256, dtype=np.float32).reshape(32, 8)
COUNT, PORT = map(int, sys.argv[1:3])
FOLDER, SITUATIONS = Path(sys.argv[3]), sys.argv[4:]
assert all(getattr(autoshard, name) for name in autoshard.__all__), "imported when they are first asked for"


def forked(count: int) -> int:
    """The number of the process that this returns in. The one that forks them ends when all have ended."""
    children = []
    for index in range(count):
        if not (child := os.fork()):
            output = os.open(FOLDER / f"output.{index}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            return index
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    os._exit(0)


warnings.filterwarnings("ignore", "os.fork", RuntimeWarning)  # JAX has no threads yet
HERE = forked(COUNT)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", DEVICES)
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"localhost:{PORT}", COUNT, HERE)

group.PATIENCE = group.Patience(poll=0.05, beat=0.2, silence=4.0, arrival=6.0)
SEARCHES = [0]
solved = planning._solved


def counted(*args):
    SEARCHES[0] += 1
    return solved(*args)


planning._solved = counted


def mesh_of(count=COUNT):
    """All devices of the first so many processes."""
    devices = [one for one in jax.devices() if one.process_index < count]
    return jax.sharding.Mesh(np.array(devices).reshape(count, DEVICES), ("x", "y"))


def slow(mesh):
    """Chips so slow that splitting pays even for small arrays."""
    links = {axis: autoshard.Link(latency=1e-9, bandwidth=1e10) for axis in mesh.shape}
    return autoshard.Topology(links, memory_bytes=16e9, memory_bandwidth=1e9, flops={"float32": 1e9})


def placed(array, mesh):
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, P()), lambda index: array[index])


def step(weights, batch):
    return weights - 0.1 * jax.grad(lambda w: jnp.mean((batch @ w) ** 2))(weights)


def trained(decorated, mesh, steps=2, weights=WEIGHTS, batch=BATCH):
    """The sum of the weights after some steps."""
    weights, batch = placed(weights, mesh), placed(batch, mesh)
    for _ in range(steps):
        weights = decorated(weights, batch)
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(weights)
    return float(total.addressable_data(0))


def decorated(fn=step, mesh=None, **options):
    mesh = mesh or mesh_of()
    return autoshard.autoshard(fn, mesh=mesh, **{"topology": slow(mesh), "time_limit": 10} | options), mesh


def differs(name, first, others):
    """An option that the first process gives otherwise than the others."""
    return {name: first if HERE == 0 else others}


def works():
    return trained(*decorated())


def searches_end_at_different_points():
    """Plans differ if each process keeps its own: the first one's splits the batch, the last one's the weights."""
    wanted = {"fixed": {"batch": P("x") if HERE == 0 else P()}}
    own = planning._cached
    planning._cached = lambda program, rules, options, keywords: own(
        program, rules, planning.replace(options, **wanted), keywords
    )
    try:
        return trained(*decorated(lambda weights, batch: step(weights, jnp.tanh(batch))))
    finally:
        planning._cached = own


def one_has_a_cached_plan():
    fn = lambda weights, batch: step(weights, jnp.sin(batch))  # noqa: E731
    before = SEARCHES[0]
    folder = FOLDER / f"cache of {HERE}"
    if HERE:  # of a run of this process alone
        mesh = mesh_of()
        autoshard.plan(fn, WEIGHTS, BATCH, mesh=mesh.abstract_mesh, topology=slow(mesh), time_limit=10, cache=folder)
    return trained(*decorated(fn, cache=folder)), SEARCHES[0] - before


def plan_on_the_first_alone():
    fn, mesh = decorated(lambda weights, batch: step(weights, jnp.cos(batch)))
    if HERE == 0:
        str(fn.plan(WEIGHTS, BATCH))
    return trained(fn, mesh)


def plans_are_equal():
    fn, _ = decorated(lambda weights, batch: step(weights, jnp.exp(batch)), time_limit=10 + HERE)
    before = SEARCHES[0]
    return str(fn.plan(WEIGHTS, BATCH).in_shardings), SEARCHES[0] - before


def replanned_to_fit():
    """The first plan is over the limit by the compiler's account: all processes plan again alike."""
    from autoshard.compiled import memory_check

    own = memory_check.peak_bytes
    seen = []
    memory_check.peak_bytes = lambda program: seen.append(1) or (2.0**40 if HERE and len(seen) == 1 else own(program))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            fn, mesh = decorated(lambda weights, batch: step(weights, jnp.abs(batch)), memory="1MiB")
            return trained(fn, mesh), len(seen)
    finally:
        memory_check.peak_bytes = own


def documented():
    """The program of the page on many hosts."""
    return runpy.run_path(str(Path(__file__).parents[1] / "docs" / "how_to" / "many_hosts.py"))["losses"]


def takes_a_typed_key():
    fn, mesh = decorated(lambda weights, batch, key: (step(weights, batch * jax.random.uniform(key)), key))
    weights, key = placed(WEIGHTS, mesh), jax.random.key(0)
    for _ in range(2):
        weights, key = fn(weights, placed(BATCH, mesh), key)
    return float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(weights).addressable_data(0))


def made_by_each_process():
    """Arrays and keys that each process has on a device of its own, as a model that is made before its first step."""
    fn = lambda weights, batch, key: (step(weights, batch * jax.random.uniform(key)), key)  # noqa: E731
    donating, mesh = decorated(fn, donate_argnums=(0, 1, 2))
    weights, key = jnp.asarray(WEIGHTS), jax.random.key(0)
    batch = jax.device_put(BATCH, jax.local_devices()[-1])
    rows = donating.plan(weights, batch, key).shard_batch({"batch": batch})["batch"]
    for given in (batch, rows):
        weights, key = donating(weights, given, key)
    assert not batch.is_deleted()
    return float(jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(weights).addressable_data(0))


def loads_its_rows():
    """The state is born sharded, and each process passes its own rows of the batch, or all of them."""
    fn, mesh = decorated(lambda weights, batch: step(weights, batch * 2), fixed={"batch": P("x")})
    plan = fn.plan(WEIGHTS, BATCH)
    mine = BATCH.reshape(COUNT, -1, BATCH.shape[1])[HERE]
    weights = plan.init(lambda: jnp.ones(WEIGHTS.shape))
    for batch in (mine, BATCH):
        weights = fn(weights, plan.shard_batch(batch))
    total = jax.jit(jnp.sum, out_shardings=NamedSharding(mesh, P()))(weights)
    return float(total.addressable_data(0))


def plans_together():
    """The first process searches for all, also for a layout that steps share."""
    mesh, before = mesh_of(), SEARCHES[0]

    def product(weights, batch):
        return jnp.tanh(batch @ weights)

    functions = {"few": (product, (WEIGHTS, BATCH[:4])), "many": (product, (WEIGHTS, BATCH))}
    plans = autoshard.plan_together(functions, mesh=mesh, topology=slow(mesh), time_limit=10 + HERE)
    return [str(plan.in_shardings) for plan in plans.values()], SEARCHES[0] - before


def two_of_them():
    """A mesh of the first two processes; the others have nothing to do with it."""
    return trained(*decorated(mesh=mesh_of(2))) if HERE < 2 else None


def works_after_errors():
    return trained(*decorated(lambda weights, batch: step(weights, 1 - batch)))


def tries_again():
    """The first process fails to plan, all raise, and all try again."""
    fn, mesh = decorated(lambda weights, batch: step(weights, batch / 3))
    own, failed = planning._cached, []

    def failing(*args):
        failed.append(1)
        planning._cached = own
        raise ZeroDivisionError("planted")

    planning._cached = failing
    try:
        trained(fn, mesh)
    except (ZeroDivisionError, autoshard.ProcessError):
        failed.append(1)
    finally:
        planning._cached = own
    return trained(fn, mesh), len(failed)


def different_memory():
    return trained(*decorated(**differs("memory", "1GiB", "2GiB")))


def different_reductions():
    return trained(*decorated(**differs("reductions", "auto", None)))


def mesh_chosen_on_the_last():
    """The first runs on a mesh that it was given, and would wait for the others there."""
    mesh = mesh_of()
    fn = lambda weights, batch: step(weights, batch * 3)  # noqa: E731
    chosen = autoshard.autoshard(fn, mesh="auto", time_limit=10)
    return trained(decorated(fn)[0] if HERE == 0 else chosen, mesh)


def different_code():
    return trained(*decorated(step if HERE == 0 else lambda weights, batch: jnp.tanh(step(weights, batch))))


def different_numbers():
    rate = 0.1 if HERE == 0 else 0.2
    return trained(*decorated(lambda weights, batch: weights - rate * jnp.mean(batch) ** 2))


def different_random_numbers():
    """JAX has two ways to split the same keys over devices, with other collectives."""
    with jax.threefry_partitionable(HERE == 0):
        fn, mesh = decorated(lambda weights, batch: step(weights, batch + jax.random.normal(jax.random.key(0), (8,))))
        return trained(fn, mesh)


def different_order_of_devices():
    mesh = mesh_of()
    mesh = mesh if HERE == 0 else jax.sharding.Mesh(mesh.devices[::-1], mesh.axis_names)
    return trained(*decorated(mesh=mesh))


def different_seeds():
    fn, mesh = decorated(lambda weights, batch: step(weights, batch * 5), donate_argnums=0)
    return fn(jax.random.normal(jax.random.key(HERE), WEIGHTS.shape), placed(BATCH, mesh))


def different_shapes():
    return trained(*decorated(), batch=BATCH if HERE == 0 else BATCH[:16])


def different_code_in_plan():
    """One that is asked for a plan alone waits for no other process, and the first run finds out."""
    fn, mesh = decorated(lambda weights, batch: step(weights, batch * 2 if HERE else batch + 2))
    fn.plan(WEIGHTS, BATCH)
    return trained(fn, mesh)


def one_has_a_plan_file():
    mesh = mesh_of()
    local = autoshard.plan(step, WEIGHTS, BATCH, mesh=mesh.abstract_mesh, topology=slow(mesh))
    return trained(*decorated(plan=local if HERE == 0 else None, mesh=mesh))


def nothing_fits():
    return trained(*decorated(memory=100))


def planning_fails():
    def failing(*args):
        raise ZeroDivisionError("planted") if HERE == 0 else AssertionError("only the first plans")

    own, planning._cached = planning._cached, failing
    try:
        return trained(*decorated(lambda weights, batch: step(weights, -batch)))
    finally:
        planning._cached = own


def interrupted():
    def failing(*args):
        raise KeyboardInterrupt

    own, planning._cached = planning._cached, failing
    try:
        return trained(*decorated(lambda weights, batch: step(weights, 3 - batch)))
    finally:
        planning._cached = own


def tracing_fails_on_the_last():
    def failing(weights, batch):
        if COUNT - 1 == HERE:
            raise ZeroDivisionError("planted")
        return step(weights, batch / 2)

    return trained(*decorated(failing))


def the_last_never_comes():
    if COUNT - 1 > HERE:
        return trained(*decorated(lambda weights, batch: step(weights, batch + 7)))
    while not (FOLDER / "the_last_never_comes.0").exists():
        time.sleep(0.1)
    return None


def the_last_dies():
    fn, mesh = decorated(lambda weights, batch: step(weights, batch + 5))
    if COUNT - 1 == HERE:
        time.sleep(0.5)
        os._exit(0)
    return trained(fn, mesh)


def the_first_dies():
    fn, mesh = decorated(lambda weights, batch: step(weights, batch + 6))
    if HERE == 0:
        time.sleep(0.5)
        os._exit(0)
    return trained(fn, mesh)


def stages_of_their_own():
    before = SEARCHES[0]
    return *stages_in_processes.stages_of_their_own(HERE, COUNT), SEARCHES[0] - before


def stages_of_neighbours():
    return stages_in_processes.stages_of_neighbours(COUNT)


def stacks_are_copied():
    return stages_in_processes.stacks_are_copied(COUNT)


def in_lockstep():
    return stages_in_processes.in_lockstep(COUNT)


def two_ways():
    return stages_in_processes.two_ways(COUNT)


def a_shared_stage_fails():
    return stages_in_processes.a_shared_stage_fails(HERE, COUNT)


def outcome(situation):
    start = time.monotonic()
    try:
        result = {"value": globals()[situation]()}
    except BaseException as error:
        kind = "AutoshardError" if isinstance(error, autoshard.AutoshardError) else ""
        result = {"error": type(error).__name__, "kind": kind, "text": str(error)}
    return result | {"seconds": time.monotonic() - start}


for name in SITUATIONS:
    (FOLDER / f"{name}.{HERE}").write_text(json.dumps(outcome(name)))
ended = time.monotonic() + 10
while len(list(FOLDER.glob(f"{name}.*"))) < COUNT - (name == "the_last_dies") and time.monotonic() < ended:
    time.sleep(0.05)  # the first has what the others talk through
sys.stdout.flush()
os._exit(0)  # JAX would wait for a process that has ended
