"""What tactics ask for, what contradicts them, and that a step within them computes the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from models import llama, mlp

import autoshard
from autoshard.options import options_of
from autoshard.planning import checked_rules, formulated
from autoshard.tactics import (
    FSDP,
    HSDP,
    DataParallel,
    Dim,
    ExpertParallel,
    Megatron,
    SequenceParallel,
    TwoDimensional,
    Ulysses,
    ZeRO,
)
from autoshard.tactics.roles import Roles

PERCEPTRON = mlp.make(layers=2, width=16, batch=16)
MESH = AbstractMesh((2, 4), ("data", "model"))


def planned(tactics, model=PERCEPTRON, mesh=MESH, **options):
    return autoshard.plan(
        model.step,
        model.state,
        model.batches(0),
        mesh=mesh,
        topology="v5e:2x4",
        tactics=tactics,
        donate_argnums=0,
        **options,
    )


def abstract_llama(**sizes):
    """A Llama's step, and types of its state and batch."""
    made = []

    def state():
        made.append(llama.make(**sizes, remat=False))
        return made[0].state

    abstract = jax.eval_shape(state)
    return made[0].step, abstract, made[0].batches(0)


def layouts(plan):
    return {array.name: array.layout for array in plan.arguments}


def test_schemes_combine_in_any_order():
    one = planned([DataParallel("data"), Megatron("model"), ZeRO(3)])
    other = planned([ZeRO(3, "data"), Megatron("model"), DataParallel("data")])
    assert layouts(one) == layouts(other)
    assert one.cost == pytest.approx(other.cost)
    weights = [layout for name, layout in layouts(one).items() if name.endswith("w")]
    assert all({axis for axes in layout for axis in axes} == {"data", "model"} for layout in weights)
    batch = [layout for name, layout in layouts(one).items() if name.startswith("batch")]
    assert set(batch) == {(("data",), ())}


def test_what_tactics_leave_open_is_solved_for():
    free, within = planned([]), planned([DataParallel("data")])
    assert free.bound <= within.cost
    assert within.status == "optimal"
    assert "tactics: DataParallel('data')" in str(within)
    assert within.alternatives["without tactics"].step_seconds == pytest.approx(free.cost)
    assert not any("tactics" in remark for remark in free.warnings)


def test_an_explanation_names_the_tactics():
    explained = planned([DataParallel("data"), Megatron("model")]).explain("params/0/w")
    assert "within tactics: DataParallel('data'), Megatron('model')" in str(explained)


def test_a_wish_may_be_a_tactic():
    asked = planned([]).what_if(tactics=[Megatron("model")])
    assert asked.cost == pytest.approx(planned([Megatron("model")]).cost)
    assert asked.what_if(tactics=()).cost == pytest.approx(planned([]).cost)


def large_first(step):
    """A tactic of one's own: weights of experts, and of all else the largest, along the model axis."""
    largest = max((one for one in step.arguments if one.role == "weight"), key=lambda one: (one.shape, one.name))
    assert largest.dims == (Dim.FEATURE, Dim.FEATURE)
    return {largest.name: P(None, "model")}


def test_a_function_may_be_a_tactic():
    plan = planned([large_first, lambda step: [DataParallel("data")]])
    assert layouts(plan)["params/1/w"] == ((), ("model",))
    assert layouts(plan)["batch/x"][0][0] == "data"


@pytest.mark.parametrize("said", [3, "data", ["data"], [DataParallel], [None]])
def test_what_is_no_tactic_is_one_error(said):
    with pytest.raises(autoshard.ArgumentError, match="tactics are needed, or PartitionSpecs by path"):
        planned([lambda step: said])


def bracketed(p, x):
    return jax.tree.map(lambda w: w - jnp.mean(x @ w), p)


@pytest.mark.parametrize(
    "specs, said",
    [
        ({"w[0]": P(None, "model")}, None),
        ({"p/w*": P(None, "model")}, None),
        ({"nothing": P("model")}, "own(step): no argument of bracketed fits 'nothing'"),
        ({"w[0]": P("modle")}, " names 'modle'; the mesh has the axes"),
        ({"w[0]": P(None, None, "model")}, "does not fit"),
        ({"w[0]": P(("model", "data"))}, "another order"),
        ({"w[0]": P("data"), "p/*": P("model")}, "own(step)['p/*'] wants"),
    ],
)
def test_layouts_of_a_function_are_matched_as_fixed_ones(specs, said):
    def own(step):
        assert dict(step.mesh) == {"data": 2, "model": 4, "one": 1}
        return specs

    array = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    mesh = AbstractMesh((2, 4, 1), ("data", "model", "one"))
    given = {"mesh": mesh, "topology": "v5e:2x4", "tactics": [own]}
    if said is None:
        assert layouts(autoshard.plan(bracketed, {"w[0]": array}, array, **given))["p/w[0]"] == ((), ("model",))
        return
    with pytest.raises(autoshard.ConflictError, match=re.escape(said)):
        autoshard.plan(bracketed, {"w[0]": array}, array, **given)


def test_two_functions_that_differ_are_one_error():
    def other(step):
        return {"params/1/w": P("data")}

    with pytest.raises(autoshard.ConflictError, match=r"large_first\(step\) wants .* other\(step\) wants"):
        planned([large_first, other])


def test_the_tactic_that_says_it_is_blamed():
    for tactics in ([DataParallel("data"), ZeRO(1)], [ZeRO(1, "data"), DataParallel("data")]):
        with pytest.raises(autoshard.ConflictError, match=r"DataParallel\('data'\) wants"):
            planned(tactics, fixed={"params/0/w": P("data")})
    model = mlp.make(layers=2, width=12, batch=16)
    plan = planned([ZeRO(3, "data"), DataParallel("data")], model, AbstractMesh((8,), ("data",)))
    assert any("that ZeRO(3, 'data') splits of params" in one for one in plan.warnings)


@pytest.mark.parametrize(
    "tactics, options, error, said",
    [
        ([Megatron("data"), DataParallel("data")], {}, autoshard.ConflictError, "both say what the mesh axis 'data'"),
        ([DataParallel("data")], {"fixed": {"params/0/w": P("data")}}, autoshard.ConflictError, "like= or another"),
        (
            [lambda step: {"params/0/w": P("data")}, DataParallel("data")],
            {},
            autoshard.ConflictError,
            "leaves P('data'",
        ),
        ([ExpertParallel("data")], {}, autoshard.ConflictError, "finds nothing to apply to in step: no experts"),
        ([Ulysses("data")], {}, autoshard.ConflictError, "no sequence"),
        ([DataParallel("rows")], {}, autoshard.MeshError, "names the axis 'rows'; the mesh has 'data', 'model'"),
        ([DataParallel], {}, autoshard.ArgumentError, "a list of tactics is needed"),
        (["dp"], {}, autoshard.ArgumentError, "a list of tactics is needed"),
    ],
)
def test_what_cannot_be_is_one_error(tactics, options, error, said):
    with pytest.raises(error, match=said.replace("(", r"\(")):
        planned(tactics, **options)


def test_a_level_and_an_axis_are_checked():
    for level in (4, True, [1]):
        with pytest.raises(autoshard.ArgumentError, match="1, 2 or 3"):
            ZeRO(level)
    for make in (HSDP, DataParallel, FSDP, TwoDimensional):
        with pytest.raises(autoshard.ArgumentError, match="every mesh axis may be named once"):
            make("data", "data")
    with pytest.raises(autoshard.ArgumentError, match="name the mesh axis"):
        planned([FSDP()], mesh=AbstractMesh((8,), ("rows",)))
    assert [repr(one) for one in (ZeRO(2), FSDP("data"), HSDP("a", "b"))] == [
        "ZeRO(2)",
        "FSDP('data')",
        "HSDP('a', 'b')",
    ]


def test_what_an_axis_does_not_divide_stays_whole_and_is_named():
    model = mlp.make(layers=2, width=12, batch=16)
    plan = planned([FSDP("data")], model, AbstractMesh((8,), ("data",)))
    assert set(layouts(plan)["params/0/w"]) == {()}
    assert any("'data' (8 devices) divides no dim that FSDP('data') splits of params" in one for one in plan.warnings)


def test_heads_that_an_axis_does_not_divide_are_named():
    fn, *args = abstract_llama(layers=1, heads=4, shared_heads=2, d_model=32, d_hidden=32, seq=8, batch=8)
    with pytest.raises(autoshard.ConflictError, match=r"\(8 devices\) divides no dim .* dot_general at llama.py"):
        autoshard.plan(fn, *args, mesh=AbstractMesh((8,), ("data",)), topology="v5e:2x4", tactics=[Ulysses("data")])


def roles_of(fn, *args):
    program = autoshard.autoshard(fn, mesh=MESH, topology="h100:1x8", donate_argnums=0).trace(*args)
    options = options_of(MESH, topology="h100:1x8")
    return Roles(formulated(program, checked_rules(program, dict(MESH.shape)), options)), program


def test_a_recurrent_weight_and_grouped_channels_are_no_experts():
    def step(state, x):
        def loss_of(state):
            def turn(h, x):
                return jnp.tanh(h @ state["recurrent"] + x @ state["weight"]), None

            last, _ = jax.lax.scan(turn, jnp.zeros((8, 16)), x)
            rows = jax.lax.conv_general_dilated(last[:, :, None], state["kernel"], (1,), "SAME", feature_group_count=16)
            return jnp.mean(rows**2)

        gradients = jax.grad(loss_of)(state)
        return jax.tree.map(jnp.subtract, state, gradients)

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    state = {"recurrent": square, "weight": square, "kernel": jax.ShapeDtypeStruct((16, 1, 3), jnp.float32)}
    roles, program = roles_of(step, state, jax.ShapeDtypeStruct((4, 8, 16), jnp.float32))
    names = [value.name for value in program.arguments]
    assert {names[i]: kind.name for i, kind in roles.state.items()} == {
        "state/recurrent": "WEIGHT",
        "state/weight": "WEIGHT",
        "state/kernel": "WEIGHT",
    }
    assert roles.dims_of_argument(names.index("x"))[1] & Dim.BATCH  # the loop goes through the first


def test_a_token_that_is_put_before_others_stays_where_it_can_be_read():
    def step(state, x):
        def loss_of(state):
            token = jnp.broadcast_to(state["token"], (8, 1, 16))
            return jnp.mean((jnp.concatenate([token, x], 1) @ state["w"]) ** 2)

        return jax.tree.map(jnp.subtract, state, jax.grad(loss_of)(state))

    state = {"token": jax.ShapeDtypeStruct((1, 1, 16), jnp.float32), "w": jax.ShapeDtypeStruct((16, 16), jnp.float32)}
    args = state, jax.ShapeDtypeStruct((8, 7, 16), jnp.float32)
    plan = autoshard.plan(step, *args, mesh=AbstractMesh((8,), ("data",)), topology="v5e:2x4", tactics=[FSDP("data")])
    assert any(layouts(plan)["state/w"])


@pytest.mark.parametrize("scan", [False, True])
def test_roles_are_found_in_steps_that_nobody_marked(scan):
    sizes = {"layers": 1, "seq": 16, "batch": 8, "d_model": 32, "d_hidden": 64, "experts": 4, "capacity": 8}
    fn, state, batch = abstract_llama(**sizes, scan=scan)
    roles, program = roles_of(fn, state, batch)
    names = [value.name for value in program.arguments]
    kinds = {names[i].split("/", 1)[1]: kind.name for i, kind in roles.state.items()}
    layer = "0/blocks/" if scan else "0/blocks/0/"
    assert {name: kinds[layer + name] for name in ("query", "out", "norm1", "experts/gate", "experts/up")} == {
        "query": "WEIGHT",
        "out": "WEIGHT",
        "norm1": "PARAMETER",
        "experts/gate": "WEIGHT",
        "experts/up": "EXPERT",
    }
    assert kinds["0/token"] == "TABLE" and kinds["0/head"] == "WEIGHT"
    assert all(kind.endswith("OPTIMIZER") for name, kind in kinds.items() if name.startswith("1/"))
    assert [names[i] for i in roles.batch] == ["batch/inputs", "batch/targets"]
    for i in roles.batch:
        first, second = roles.dims_of_argument(i)
        assert first & Dim.BATCH and second & Dim.SEQUENCE
    query = roles.dims_of_argument(names.index("state/" + layer + "query"))
    assert query[-3] == Dim.FEATURE and query[-2] & Dim.HEAD


@pytest.mark.parametrize(
    "mesh, tactics",
    [
        ((2, 2, 2), [HSDP("b", "a"), Megatron("c")]),
        ((2, 4), [DataParallel("a"), SequenceParallel("b")]),
    ],
)
def test_a_step_within_tactics_computes_the_same(mesh, tactics):
    mesh = jax.make_mesh(mesh, tuple("abc")[: len(mesh)])
    step = autoshard.autoshard(PERCEPTRON.step, mesh=mesh, tactics=tactics)
    expected, _ = jax.jit(PERCEPTRON.step)(PERCEPTRON.state, PERCEPTRON.batches(0))
    found, _ = step(PERCEPTRON.state, PERCEPTRON.batches(0))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=2e-5, atol=1e-6)
    checked = step.plan(PERCEPTRON.state, PERCEPTRON.batches(0)).verify()
    assert checked.collectives_agree
