"""Verification against what XLA compiled, and against faults that are planted into a plan."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from oracles import SMALL, mesh_of, tally, v5e

import autoshard
from autoshard import Collective, MeshError, Plan, PlanError
from autoshard.report.hlo import peak_bytes, read_collectives
from autoshard.report.verification import as_cpu_shows, traffic

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


def test_reduce_scatters_show_as_all_reduces_on_cpu():
    collectives = [
        Collective("reduce_scatter", ("x", "y"), 16, 2, "a.py:1"),
        Collective("all_gather", ("x",), 16, 1, "a.py:2"),
    ]
    shown = as_cpu_shows(collectives, SHAPE)
    assert traffic(shown) == {("all_reduce", ("x", "y")): 128, ("all_gather", ("x",)): 16}
    assert [one.count for one in shown] == [2, 1]


def test_reduce_scatters_of_a_real_program():
    """The equivalence that the test above states, seen in XLA: a sharded sum of partial products."""
    split = jax.NamedSharding(MESH, jax.P(None, ("x", "y"))), jax.NamedSharding(MESH, jax.P(("x", "y")))
    product = jax.jit(jnp.matmul, in_shardings=split, out_shardings=split[1])
    compiled = product.lower(*(jax.ShapeDtypeStruct((16, 16), np.float32),) * 2).compile()
    predicted = [Collective("reduce_scatter", ("x", "y"), 16 * 16 * 4 // 8, 1, "")]
    assert traffic(as_cpu_shows(predicted, SHAPE)) == tally(read_collectives(compiled.as_text(), SHAPE))


def test_what_cannot_be_verified(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="knows no step to compile"):
        Plan.load(tmp_path / "plan.json", MESH).verify()
    abstract = autoshard.plan(jnp.add, np.ones(8), np.ones(8), mesh=AbstractMesh((8,), ("x",)))
    with pytest.raises(MeshError, match="no devices to compile for"):
        abstract.verify()
