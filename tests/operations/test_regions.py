"""What devices run on their own shards: `shard_map`s of the user, kernels and foreign functions."""

import functools
import importlib.util
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import normal
from equality import assert_equal
from jax import lax
from jax.experimental import pallas
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally
from sweeps import some

import autoshard as library
from autoshard import autoshard, operation
from autoshard.mesh.targets import target_mesh
from autoshard.model.formulating import formulate
from autoshard.model.grouping import groups_of
from autoshard.model.regions.pricing import RegionPrices
from autoshard.model.regions.strategies import is_call
from autoshard.operations.call import Call
from autoshard.operations.split import CallRun
from autoshard.options import options_of
from autoshard.propagation import registry
from autoshard.propagation.registry import rule_of, rules_for

SHAPE = {"x": 4, "y": 2}
X, W = normal(64, 32), normal(32, 32, seed=1)


def test_a_shard_map_is_predicted():
    """Its collectives, in a loop too, the work of its products, and what it holds beside operands and results."""
    mesh = mesh_of(SHAPE)
    pairs = [(i, (i + 1) % 4) for i in range(4)]

    def local(x, w):
        def turn(carry, _):
            return lax.ppermute(jnp.tanh(carry @ w), "x", pairs), None

        x, _ = lax.scan(turn, x, length=5)
        return lax.psum(x, "x"), lax.all_gather(x, "y", tiled=True)

    specs = {"in_specs": (P("x"), P()), "out_specs": (P(), P("x"))}
    region = jax.shard_map(local, mesh=mesh, check_vma=False, **specs)
    sharded = autoshard(region, mesh=mesh, topology=slow_chips(SHAPE))
    plan = sharded.plan(X, W)
    found = plan.verify()
    assert tally(plan.predicted.collectives) == tally(found.collectives)
    assert ("collective_permute", ("x",)) in tally(found.collectives)
    products = 5 * 2 * 16 * 32 * 32 / 1e9  # s, on one device
    assert products < plan.predicted.compute_seconds < 2 * products
    assert_equal(sharded(X, W), jax.jit(region)(X, W))


def _doubling(x, out):
    out[...] = x[...] * 2


@operation("i j -> i j", name="doubled", seconds=lambda split, topology, x, **_: x.size * 8 / topology.memory_bandwidth)
def doubled(x, *, interpret=False):
    block = pallas.BlockSpec((8, x.shape[1]), lambda i: (i, 0))
    kernel = {"grid": (x.shape[0] // 8,), "in_specs": [block], "out_specs": block, "interpret": interpret}
    return pallas.pallas_call(_doubling, jax.ShapeDtypeStruct(x.shape, x.dtype), **kernel)(x)


def test_a_kernel_with_a_rule_runs_on_shards():
    step = functools.partial(doubled, interpret=True)
    sharded = autoshard(
        lambda x: step(jnp.sin(x)), mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE), fixed={"x": P("x")}
    )
    plan = sharded.plan(X)
    assert plan.results[0].local_bytes < X.nbytes and not plan.predicted.collectives
    assert not plan.verify().collectives
    assert_equal(sharded(X), 2 * jnp.sin(X))


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu")
def test_a_kernel_with_a_rule_compiles_for_tpu():
    mesh = target_mesh("v5e:4x4", {"x": 4, "y": 4})
    x = jax.ShapeDtypeStruct((1024, 512), jnp.float32)
    step = lambda x: jnp.sum(doubled(x @ x.T), axis=0)  # noqa: E731
    plan = library.plan(step, x, mesh=mesh, topology="v5e:4x4", fixed={"x": P(("x", "y"))})
    assert plan.annotations.runs
    found = plan.verify()
    assert tally(plan.predicted.collectives) == tally(found.collectives)


def test_a_foreign_function_with_a_rule_runs_on_shards(monkeypatch):
    """LAPACK's factorisation by a name of its own: each device factors its matrices."""
    matrices = normal(16, 4, 4)
    positive = matrices @ matrices.transpose(0, 2, 1) + 4 * jnp.eye(4)[None]
    jnp.linalg.cholesky(positive)  # jaxlib finds LAPACK once JAX needs it

    def factored(x):
        types = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:1], jnp.int32)
        return jax.ffi.ffi_call("lapack_spotrf_ffi", types)(x, uplo=np.uint8(ord("L")))[0]

    monkeypatch.setattr(registry, "_RULES", dict(registry._RULES))
    library.register_rule("ffi_call:lapack_spotrf_ffi", "b i j -> b k l, b", need_replication="i j k l")
    sharded = autoshard(factored, mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE), fixed={"x": P(("x", "y"))})
    plan = sharded.plan(positive)
    assert plan.results[0].local_bytes == positive.nbytes // 8
    assert not plan.predicted.collectives and not plan.verify().collectives
    assert_equal(sharded(positive), jax.jit(factored)(positive))


def test_a_region_with_other_collectives_is_caught(monkeypatch):
    monkeypatch.setattr("autoshard.model.regions.pricing._KIND_OF_PRIMITIVE", {})
    with pytest.raises(AssertionError):
        test_a_shard_map_is_predicted()


SEQUENCES = [CallRun("", (("b", ("x", "y")),)), CallRun("zigzag", (("b", ("x",)), ("ring", ("y",))))]
HEADS = [CallRun("", (("b", ("x",)), ("g", ("y",)))), CallRun("zigzag", (("g", ("x",)), ("ring", ("y",))))]
ROWS = [CallRun("", (("q", ("x", "y")),)), CallRun("zigzag", (("ring", ("x", "y")),))]


def priced_runs(machine, runs):
    """What each run costs of attention's forward and backward pass, as if no other were known."""
    shape = {"x": 2, "y": 4}
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    options = options_of(mesh, topology=machine)
    rows = [jax.ShapeDtypeStruct((8, 1024, heads, 64), jnp.bfloat16) for heads in (16, 8, 8)]
    loss = jax.grad(lambda rows: library.ops.attention(*rows, is_causal=True).astype(jnp.float32).sum())
    program = autoshard(loss, mesh=mesh, topology=machine).trace(rows)
    groups = [one for one in groups_of(program, rules_for(program), options.backend, shape) if is_call(one)]
    regions = RegionPrices(program, shape, options.topology, options.backend, formulate)
    found = []
    for group in groups:
        known = group.equations[0].params["operation"].priced
        for run in runs:
            known.clear()
            found.append(regions.of(group, run))
        known.clear()
    return found


@pytest.mark.parametrize("machine", some(["v5e:2x4", "cpu:8"], "v5e:2x4"))
def test_sequences_and_heads_cost_the_same(machine):
    """A price of one split of both is taken for that of another; splits of rows cost something else."""
    sequences = priced_runs(machine, SEQUENCES)
    assert sequences == priced_runs(machine, HEADS)
    assert all(one != other for one, other in zip(sequences, priced_runs(machine, ROWS), strict=True))


def test_axes_beside_those_of_roles_are_one():
    """A price is taken for any axes that split a batch alike; sums over the batch run over the axes that are asked."""
    shape = {"x": 2, "y": 2, "z": 4, "ring": 2}
    mesh = AbstractMesh(tuple(shape.values()), tuple(shape), axis_types=(AxisType.Auto,) * len(shape))
    options = options_of(mesh, topology="v5e:4x8")
    rows, bias = [jax.ShapeDtypeStruct((8, 1024, 8, 64), jnp.float32)] * 3, jnp.zeros((1, 8, 1024, 1024))
    loss = jax.grad(lambda bias, rows: library.ops.attention(*rows, bias).sum())
    program = autoshard(loss, mesh=mesh, topology="v5e:4x8").trace(bias, rows)
    *_, group = (one for one in groups_of(program, rules_for(program), options.backend, shape) if is_call(one))
    regions = RegionPrices(program, shape, options.topology, options.backend, formulate)
    known = group.equations[0].params["operation"].priced
    runs = [CallRun("ulysses", (("b", axes), ("heads", ("ring",)))) for axes in (("x", "y"), ("z",))]
    known.clear()
    shared = [regions.of(group, run) for run in runs]
    assert len(known) == 1
    known.clear()
    assert shared == [shared[0], regions.of(group, runs[1])]
    assert [{one.axes for one in region.collectives if "ring" not in one.axes} for region in shared] == [
        {("x", "y")},
        {("z",)},
    ]


def test_they_are_priced_once():
    mesh = mesh_of({"x": 2, "y": 4})
    rows = [jax.ShapeDtypeStruct((8, 1024, heads, 64), jnp.bfloat16) for heads in (16, 8, 8)]
    (equation,) = (
        one
        for one in autoshard(library.ops.attention, mesh=mesh).trace(*rows).equations
        if one.primitive == "operation"
    )
    call, rule = Call.of(equation, rule_of(equation)), rule_of(equation)
    names = {run: call.interchangeable(run) for run in (*SEQUENCES, *HEADS)}
    assert set(names.values()) == {frozenset("bg")}
    with_bias = replace(rule, operands=(*rule.operands, (("g",), ("q",))))
    assert not replace(call, rule=with_bias).interchangeable(HEADS[0])  # an array of heads alone
