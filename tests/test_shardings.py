"""What the benchmark of predictions starts from: shardings by hand, and models of which nothing is allocated."""

import fnmatch
import sys
from pathlib import Path

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweeps import spread

import autoshard
from autoshard.jaxprs import said
from autoshard.program import slashed

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from shardings import MEGATRON, NAMES, SHARDINGS, constraint_of, names_of, shardings_of
from workloads import LARGE, SMALL, TRAINED

MESHES = [AbstractMesh(sizes, ("data", "model"), axis_types=(AxisType.Auto,) * 2) for sizes in ((4, 2), (4, 4), (2, 8))]
BOTH = ("data", "model")


def by_path(arrays, specs):
    """Path -> (shape, spec)."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    paths = jax.tree_util.tree_leaves_with_path(arrays)
    return {slashed(path): (x.shape, spec) for (path, x), spec in zip(paths, leaves, strict=True)}


ALL_OF_THEM = [*SMALL.values(), *LARGE.values(), *TRAINED.values()]
_ABSTRACT = {}


def abstract(workload):
    """Its step and the shapes of its arguments, found once."""
    if id(workload) not in _ABSTRACT:
        _ABSTRACT[id(workload)] = workload.abstract()
    return _ABSTRACT[id(workload)]


@pytest.mark.parametrize("workload", spread(ALL_OF_THEM, 2), ids=lambda workload: workload.family)
def test_every_sharding_splits_evenly_and_every_row_of_the_table_something(workload):
    _, state, batch = abstract(workload)
    for mesh in MESHES:
        found = shardings_of(workload.family, state, batch, dict(mesh.shape))
        assert {"data parallel", "FSDP", "Megatron", "FSDP+Megatron"} <= found.keys() <= SHARDINGS.keys()
        for name, (of_state, of_batch) in found.items():
            for shape, spec in (by_path(state, of_state) | by_path(batch, of_batch)).values():
                NamedSharding(mesh, spec).shard_shape(shape)  # fails if it is uneven
            whole = name in ("data parallel", "edge parallel")
            assert any(spec != P() for _, spec in by_path(state, of_state).values()) != whole
    for end in MEGATRON[workload.family]:
        assert any(fnmatch.fnmatchcase(path, f"*/{end}") for path in by_path(state, of_state)), end


SPECS = [  # workload, sharding, end of a path, spec
    ("gpt", "FSDP", "0/blocks/0/query/kernel", P(BOTH)),
    ("gpt", "FSDP+Megatron", "0/norm1/scale", P()),
    ("gpt", "Megatron", "0/blocks/1/out/kernel", P("model")),
    ("gpt scan", "FSDP+Megatron", "mu/blocks/query/kernel", P(None, "data", "model")),
    ("gpt scan", "FSDP+Megatron", "0/blocks/up/bias", P(None, "model")),
    ("gpt scan", "Megatron", "nu/token/embedding", P("model")),
    ("lstm", "FSDP+Megatron", "OptimizedLSTMCell_0/hf/kernel", P("data", "model")),
    ("diffusion", "Megatron", "0/params/Conv_15/kernel", P(None, None, None, "model")),  # 4 channels on 2 devices
    ("gnn", "edge parallel", "0/rounds/0/edge/up", P()),
    ("llama 1b scan", "FSDP+Megatron", "mu/blocks/down", P(None, "model", "data")),
    ("mamba", "Megatron", "0/blocks/1/log_a", P("model")),
    ("mixtral scan", "FSDP+Megatron", "0/blocks/experts/up", P(None, "model", None, "data")),
    ("mixtral scan", "expert parallel", "0/blocks/query", P(None, BOTH)),
    ("moe", "FSDP", "1/0/mu/up", P(None, None, BOTH)),
    ("moe", "expert parallel", "1/0/mu/up", P("model", None, "data")),
    ("moe", "FSDP+Megatron", "0/down", P("model", "data")),
    ("resnet", "Megatron", "batch_stats/stage1_block0/middle/norm/var", P("model")),
    ("resnet", "Megatron", "trace/stage1_block0/narrow/conv/kernel", P(None, None, "model")),
    ("unet", "FSDP", "0/params/Convolve_4/Conv_0/kernel", P(None, None, BOTH)),
    ("vit", "Megatron", "0/patches/kernel", P()),
]


@pytest.mark.parametrize("workload, sharding, end, expected", SPECS)
def test_specs(workload, sharding, end, expected):
    work = (LARGE | TRAINED)[workload]
    _, state, batch = abstract(work)
    of_state, _ = SHARDINGS[sharding](work.family, state, batch, dict(MESHES[0].shape))
    found = {spec for path, (_, spec) in by_path(state, of_state).items() if path.endswith(end)}
    assert found == {expected}


@pytest.mark.parametrize("name", SMALL)
def test_shapes_of_batches(name):
    models = []
    jax.eval_shape(lambda: models.append(SMALL[name].model()))
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), models[0].batches(0))
    assert shapes == abstract(SMALL[name]).batch


@pytest.mark.parametrize("name", ["gpt scan", "moe"])  # nnx modules, plain pytrees
def test_evaluate_takes_them(name):
    step, state, batch = abstract(LARGE[name])
    specs = shardings_of(LARGE[name].family, state, batch, dict(MESHES[1].shape))["FSDP+Megatron"]
    made = autoshard.evaluate(step, state, batch, mesh=MESHES[1], in_shardings=specs, donate_argnums=0)
    taken = jax.tree.map(lambda sharding: sharding.spec, made.in_shardings)
    assert by_path((state, batch), taken) == by_path((state, batch), specs)
    assert made.predicted.collectives


SLICES = AbstractMesh((2, 2, 4), ("slices", "data", "model"), axis_types=(AxisType.Auto,) * 3)


@pytest.mark.parametrize("workload", ALL_OF_THEM, ids=lambda workload: workload.family)
def test_slices_split_the_batch_with_data_and_nothing_of_the_state(workload):
    _, state, batch = abstract(workload)
    of_slices = shardings_of(workload.family, state, batch, dict(SLICES.shape))
    for name, (of_state, of_batch) in shardings_of(workload.family, state, batch, {"data": 2, "model": 4}).items():
        assert by_path(state, of_slices[name][0]) == by_path(state, of_state)
        for path, (shape, spec) in by_path(batch, of_batch).items():
            _, sliced = by_path(batch, of_slices[name][1])[path]
            NamedSharding(SLICES, sliced).shard_shape(shape)  # fails if it is uneven
            first = (spec[0],) if spec and isinstance(spec[0], str) else spec and spec[0]
            assert sliced == (P(("slices", *first), *spec[1:]) if spec else spec)


def constraints(workload, name, mesh=MESHES[1]):
    """The specs of all constraints in a step under the sharding of this name."""
    step, state, batch = workload.abstract(constraint_of(name, mesh))
    program = autoshard.autoshard(step, mesh=mesh).trace(state, batch)
    return [said(e.params).spec for e in program.equations if e.primitive == "sharding_constraint"]


NAMED = [  # workload, sharding, specs of inner values that are among its constraints
    ("gpt", "data parallel", {P(BOTH, (), ())}),
    ("gpt", "FSDP+Megatron", {P(("data",), (), ("model",), ()), P(("data",), (), ("model",))}),  # heads; hidden, vocab
    ("gpt", "FSDP+Megatron+sequence", {P(("data",), ("model",), ()), P(("data",), (), ("model",), ())}),
    ("gnn", "edge parallel", {P(BOTH, ()), P((), ())}),
    ("mixtral scan", "expert parallel", {P((), BOTH, (), ()), P(("model",), ("data",), (), ())}),  # before and after
    ("moe", "Megatron", {P(("model",), ("data",), (), ())}),
    ("unet", "FSDP+Megatron+sequence", {P(("data",), ("model",), (), P.UNCONSTRAINED)}),
    ("vit-l scan", "FSDP", {P(BOTH, (), ())}),
]


@pytest.mark.parametrize("workload, name, expected", NAMED)
def test_experts_constrain_inner_values(workload, name, expected):
    assert expected <= set(constraints((LARGE | TRAINED)[workload], name))


def test_slices_split_inner_values_with_data():
    found = constraints(LARGE["moe"], "expert parallel", SLICES)
    assert {P(("slices", *BOTH)), P("model", ("slices", "data"))} <= {P(*filter(None, spec)) for spec in found}


def test_a_dim_that_does_not_divide_stays_whole():
    wide = AbstractMesh((1, 16), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    found = constraints(TRAINED["llama 1b scan"], "Megatron", wide)
    assert P(("data",), (), ("model",), ()) in found and P(("data",), (), (), ()) in found  # 32 heads, 8 of keys


@pytest.mark.parametrize("name", ["gnn", "mixtral scan", "vit-l scan"])
def test_our_own_steps_have_no_constraints(name):
    step, state, batch = abstract(TRAINED[name])
    program = autoshard.autoshard(step, mesh=MESHES[0]).trace(state, batch)
    assert all(equation.primitive != "sharding_constraint" for equation in program.equations)


def test_every_sharding_says_how_names_lie():
    assert NAMES.keys() == SHARDINGS.keys()
    assert all(name in SHARDINGS for family in MEGATRON for name in names_of(family))
