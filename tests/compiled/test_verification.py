"""Verification against what XLA compiled, and against faults that are planted into a plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import SMALL, as_all_reduces, mesh_of, tally, v5e

import autoshard
from autoshard import ArgumentError, Collective, MeshError, Plan, PlanError
from autoshard.compiled import verification as module
from autoshard.compiled.collectives import peak_bytes, read_collectives
from autoshard.compiled.verification import Rematerialization, rematerializations_in, traffic
from autoshard.program import trace

SHAPE = {"x": 4, "y": 2}
MESH = mesh_of(SHAPE)


@pytest.fixture(scope="module")
def plan():
    model = SMALL["mlp"]()
    specs = jax.tree.map(lambda leaf: jax.P(None, "y") if leaf.ndim == 2 else jax.P("y"), model.state)
    return autoshard.evaluate(
        model.step, model.state, model.batches(0),
        mesh=MESH, topology=v5e(SHAPE), in_shardings=(specs, jax.P("x")), donate_argnums=0,
    )  # fmt: skip


def with_prediction(plan: Plan, **changes) -> Plan:
    return dataclasses.replace(plan, predicted=dataclasses.replace(plan.predicted, **changes))


def test_what_is_read_is_what_xla_compiled(plan):
    found = plan.verify()
    compiled = plan.lowering().compile()
    assert found.actual == tally(read_collectives(compiled.as_text(), SHAPE))
    assert found.actual_peak == peak_bytes(compiled)
    sizes = compiled.memory_analysis()
    assert found.actual_peak == (
        sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    )


def test_a_right_prediction_is_confirmed(plan):
    found = plan.verify()
    assert found.collectives_agree, str(found)
    exact = with_prediction(plan, peak_bytes=found.actual_peak).verify()
    assert exact.ok and "differs" not in str(exact)


FAULTS = {  # what is wrong with a prediction -> changes to it, given what was compiled
    "a collective less": lambda plan, found: {"collectives": plan.predicted.collectives[1:]},
    "a collective more": lambda plan, found: {
        "collectives": (*plan.predicted.collectives, Collective("all_to_all", ("x",), 8, 1, "nowhere"))
    },
    "other bytes": lambda plan, found: {
        "collectives": tuple(dataclasses.replace(one, bytes=one.bytes + 4) for one in plan.predicted.collectives)
    },
    "another axis": lambda plan, found: {
        "collectives": tuple(dataclasses.replace(one, axes=("x", "y")) for one in plan.predicted.collectives)
    },
    "too little memory": lambda plan, found: {"peak_bytes": int(found.actual_peak * 0.79)},
    "too much memory": lambda plan, found: {"peak_bytes": int(found.actual_peak * 1.21)},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_predictions_are_found_out(plan, fault):
    right = plan.verify()
    wrong = with_prediction(plan, **({"peak_bytes": right.actual_peak} | FAULTS[fault](plan, right))).verify()
    assert not wrong.ok
    assert wrong.memory_agrees == ("memory" not in fault)
    assert wrong.collectives_agree == ("memory" in fault)
    (differing, *_) = [line for line in str(wrong).splitlines() if line.endswith("differs")]
    assert differing.startswith("peak memory") == ("memory" in fault)


def test_reduce_scatters_that_xla_does_not_make():
    collectives = [
        Collective("reduce_scatter", ("x", "y"), 16, 2, "a.py:1"),
        Collective("all_gather", ("x",), 16, 1, "a.py:2"),
    ]
    shown = as_all_reduces(collectives, SHAPE)
    assert traffic(shown) == {("all_reduce", ("x", "y")): 128, ("all_gather", ("x",)): 16}
    assert [one.count for one in shown] == [2, 1]


def test_reduce_scatters_of_a_real_program():
    """The equivalence that the test above states, seen in XLA: a sharded sum of partial products."""
    split = jax.NamedSharding(MESH, jax.P(None, ("x", "y"))), jax.NamedSharding(MESH, jax.P(("x", "y")))
    product = jax.jit(jnp.matmul, in_shardings=split, out_shardings=split[1])
    compiled = product.lower(*(jax.ShapeDtypeStruct((16, 16), np.float32),) * 2).compile()
    predicted = [Collective("reduce_scatter", ("x", "y"), 16 * 16 * 4 // 8, 1, "")]
    assert traffic(as_all_reduces(predicted, SHAPE)) == tally(read_collectives(compiled.as_text(), SHAPE))


def test_what_cannot_be_verified(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="knows no step to compile"):
        Plan.load(tmp_path / "plan.json", MESH).verify()
    abstract = autoshard.plan(jnp.add, np.ones(8), np.ones(8), mesh=AbstractMesh((8,), ("x",)))
    with pytest.raises(MeshError, match="no devices to compile for"):
        abstract.verify()


# Functions that autoshard did not plan.


def step(weights, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(weights)
    return weights - gradient, loss


LINE = f"test_verification.py:{step.__code__.co_firstlineno + 1}"


def array(*shape, spec=None):
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=spec and NamedSharding(MESH, spec))


W, X = array(64, 64, spec=P("x", "y")), array(256, 64, spec=P("x"))


def test_a_jitted_function_is_held_against_evaluate():
    for jitted, donated in ((jax.jit(step), ()), (jax.jit(step, donate_argnums=0), (0,))):
        found = autoshard.verify(jitted, W, X)
        foreseen = autoshard.evaluate(
            step, W, X, mesh=MESH, in_shardings=(P("x", "y"), P("x")), out_shardings=None, donate_argnums=donated
        )
        assert found.ok and not found.unpredicted, str(found)
        assert found.predicted == tally(as_all_reduces(foreseen.predicted.collectives, SHAPE))
        half, loss = 64 * 32 * 4, 4  # bytes: of the weights, which rows of x need whole, and of their gradient
        assert found.actual == {
            ("all_gather", ("x",)): half, ("all_reduce", ("x",)): half + loss, ("all_reduce", ("y",)): loss,
        }  # fmt: skip
        assert found.actual_peak == peak_bytes(jitted.lower(W, X).compile())
        assert {one.source for one in found.collectives} == {LINE}
        assert {line.split()[-2] for line in str(found).splitlines() if line.startswith("all_gather")} >= {LINE}
        assert "differs" not in str(found)


def test_wrong_predictions_for_a_jitted_function_are_found_out(monkeypatch):
    monkeypatch.setattr(module, "traffic", lambda collectives: traffic(list(collectives)[1:]))
    assert not autoshard.verify(jax.jit(step), W, X).collectives_agree


def scaled(x, factor):
    return (x * factor).sum()


UNPREDICTED = {  # jitted, arguments, options, what is said; each has one all_reduce or more
    "static": (jax.jit(scaled, static_argnums=1), (W, 3), {}, "it has keyword or static arguments"),
    "static by name": (jax.jit(scaled, static_argnames="factor"), (W,), {"kwargs": {"factor": 3}}, "it has keyword or"),
    "keywords": (jax.jit(scaled), (W,), {"kwargs": {"factor": W}}, "it has keyword or static arguments"),
    "order": (jax.jit(lambda x: x.sum(0)), (array(64, 64, spec=P(("y", "x"))),), {}, "in another order than that of"),
}


@pytest.mark.parametrize("case", UNPREDICTED)
def test_shardings_that_evaluate_does_not_take(case):
    jitted, args, options, reason = UNPREDICTED[case]
    found = autoshard.verify(jitted, *args, **options)
    assert reason in found.unpredicted and f"Nothing is predicted: {found.unpredicted}" in str(found)
    assert found.predicted == {} and found.predicted_peak == 0 and "differs" not in str(found)
    assert found.actual == tally(read_collectives(_compiled(jitted, args, **options).as_text(), SHAPE)) != {}


def _compiled(jitted, args, kwargs=None):
    return jitted.lower(*args, **(kwargs or {})).compile()


def test_the_mesh_of_a_jitted_function():
    whole = array(64)
    with pytest.raises(MeshError, match="no argument or result of the function has a NamedSharding"):
        autoshard.verify(jax.jit(jnp.sin), whole)
    assert "SingleDeviceSharding" in autoshard.verify(jax.jit(jnp.sin), whole, mesh=MESH).unpredicted
    split = NamedSharding(MESH, P("x"))
    assert autoshard.verify(jax.jit(jnp.sin, in_shardings=split, out_shardings=split), whole).ok
    assert autoshard.verify(jax.jit(jnp.sin, in_shardings=split), whole).ok


def test_arguments_that_are_not_used_are_not_there():
    split = NamedSharding(MESH, P("x"))
    alone = autoshard.verify(jax.jit(jnp.sin, in_shardings=split), array(64))
    beside = autoshard.verify(jax.jit(lambda unused, x: jnp.sin(x), in_shardings=split), array(4096), array(64))
    assert beside.predicted_peak == alone.predicted_peak and beside.ok


def test_a_decorated_function_is_held_against_its_plan():
    decorated = autoshard.autoshard(step, mesh=MESH, topology=v5e(SHAPE))
    found, expected = autoshard.verify(decorated, W, X), decorated.plan(W, X)
    assert found == expected.verify()
    assert found.predicted == traffic(expected.predicted.collectives)


NOT_JITTED = r"is not jitted; give verify jax.jit\(fn, ...\) or autoshard\(fn, ...\)"


@pytest.mark.parametrize(
    ("fn", "said"), [(step, NOT_JITTED), (lambda x: x, NOT_JITTED), (3, "fn=3; a function is needed")]
)
def test_what_is_not_jitted(fn, said):
    with pytest.raises(ArgumentError, match=said):
        autoshard.verify(fn, X)


# What XLA gathers whole for want of a better way.

CUBE = mesh_of({"x": 2, "y": 2, "z": 2})
ROWS, COLUMNS = P("z"), P(None, ("y", "z"))


def turned(x):
    rows = jax.lax.with_sharding_constraint(jnp.sin(x), NamedSharding(CUBE, ROWS))
    return jax.lax.with_sharding_constraint(rows, NamedSharding(CUBE, COLUMNS))


def shardings_of(spec):
    return {"in_shardings": NamedSharding(CUBE, ROWS), "out_shardings": NamedSharding(CUBE, spec)}


WARNED = Rematerialization(
    shape="f32[8,16]",
    source="devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate",
    target="devices=[1,4,2]<=[2,4]T(1,0) last_tile_dim_replicate",
    line=f"test_verification.py:{turned.__code__.co_firstlineno + 1}",
)


@pytest.mark.parametrize(
    "name, called",
    [
        ("arguments[1]", "state/b"),
        ("jit(run)/arguments[3]", "options/scale"),
        ("jit(run)/arguments[2]/sharding_constraint", "x"),
        ("jit(run)/dot_general", None),
    ],
)
def test_arguments_have_their_users_names(name, called):
    """XLA calls them by where the lowered step has them."""

    def step(state, x, *, options):
        return jax.tree.map(lambda leaf: leaf * x * options["scale"], state)

    ones = np.ones(2)
    program = trace(step, ({"a": ones, "b": ones}, ones), {"options": {"scale": ones}})
    assert module._argument_of(name, program) == called


def test_rematerializations_are_named_and_the_warning_is_still_there(capfd):
    by_jit = autoshard.verify(jax.jit(turned, **shardings_of(COLUMNS)), array(16, 16))
    assert "Involuntary full rematerialization" in capfd.readouterr().err
    assert by_jit.rematerializations == (WARNED,) and f"\n  {WARNED}" in str(by_jit)
    assert str(WARNED).startswith(f"{WARNED.line}: f32[8,16] from {{devices=[2,1,4]")
    planned = autoshard.evaluate(turned, array(16, 16), mesh=CUBE, in_shardings=(ROWS,), out_shardings=COLUMNS)
    assert planned.verify().rematerializations == (WARNED,)
    assert "Involuntary full rematerialization" in capfd.readouterr().err
    argument = autoshard.verify(jax.jit(lambda x: x * 2, **shardings_of(COLUMNS)), array(16, 16))
    assert argument.rematerializations == (dataclasses.replace(WARNED, line="x"),)


def test_where_nothing_is_rematerialized_nothing_is_named(capfd):
    found = autoshard.verify(jax.jit(jnp.sin, **shardings_of(P("y"))), array(16, 16))
    assert found.rematerializations == () and "rematerialization" not in str(found) + capfd.readouterr().err


WARNING = (
    "W1122 02:15:33 7610 spmd_partitioner.cc:656] [SPMD] Involuntary full rematerialization. The compiler {cannot} "
    "sharding {{devices=[2,1]<=[2]}} to {{replicated}} {way} for HLO operation{colon} %copy.3 = bf16[8,16]{{1,0}} "
    'copy(%sin), metadata={{op_name="{name}"{frame}}}. As the last resort, SPMD will replicate the tensor\n'
)
OLDER = {"cannot": "was not able to go from", "way": "without doing a full rematerialization", "colon": ":"}
TEXTS = [  # parts of the text, the line that is given for it
    ({"name": "jit(run)/jvp()/train.py:8#1/sharding_constraint", "frame": " stack_frame_id=4"}, "train.py:8"),
    ({"name": "jit(f)/sharding_constraint", "frame": " stack_frame_id=4"}, "model.py:5"),
    ({"name": "jit(f)/sharding_constraint", "frame": " stack_frame_id=9"}, "jit(f)/sharding_constraint"),
    ({"name": "params['w']"}, "params['w']"),
    ({"name": ""}, "%copy.3"),
    ({"name": "x"} | OLDER, "x"),
]


@pytest.mark.parametrize("parts, line", TEXTS)
def test_warnings_of_all_forms(parts, line):
    said = {"cannot": "cannot go from", "way": "efficiently", "colon": "", "frame": ""} | parts
    text = "I0000 nothing of interest\n" + 2 * WARNING.format(**said)
    expected = Rematerialization("bf16[8,16]", "devices=[2,1]<=[2]", "replicated", line)
    assert list(rematerializations_in(text, {4: "model.py:5"})) == [expected]
    assert not list(rematerializations_in(text.replace("Involuntary", "Voluntary"), {}))
