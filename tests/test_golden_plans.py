"""`Plan.assert_same`: a plan held against a golden one, and what an error says of the difference."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from steps import mlp

import autoshard

MESH = AbstractMesh((4, 2), ("data", "model"))


def float32(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def planned(step=mlp, mesh=MESH, rows=64, **options):
    weights = {"up": float32(32, 64), "bias": float32(64), "down": float32(64, 32)}
    batch = {"x": float32(rows, 32), "y": float32(rows, 32)}
    return autoshard.plan(step, {"weights": weights, "momentum": weights}, batch, mesh=mesh, **options)


@pytest.fixture(scope="module")
def golden(tmp_path_factory):
    plan = planned(fixed={"batch/*": P("data"), "weights/up": P(None, "model")})
    path = tmp_path_factory.mktemp("plans") / "mlp.plan.json"
    plan.save(path)
    return plan, path


def test_a_plan_is_its_own_golden_one(golden):
    plan, path = golden
    plan.assert_same(path)
    autoshard.Plan.load(path, MESH).assert_same(path)


def scaled(params, batch):
    """As `mlp`, with one operation more."""
    return mlp(params, jax.tree.map(lambda x: 2.0 * x, batch))


def test_another_program_that_is_split_and_talks_alike_is_the_same(golden):
    plan, path = golden
    other = planned(scaled, fixed={value.name: value.spec for value in plan.arguments})
    assert other.fingerprint != plan.fingerprint
    other.assert_same(path)


DIFFERENCES = [
    (
        {"fixed": {"batch/*": P("data"), "weights/up": P("model", None)}},
        r'params/weights/up float32\[32, 64\]: P\(None, "model"\) in the file, P\("model"\) now',
    ),
    (
        {"rows": 128, "fixed": {"batch/*": P("data")}},
        r"batch/x float32\[64, 32\]: P\(.data.\) in the file, not there now",
    ),
    ({"mesh": AbstractMesh((8,), ("data",))}, r"mesh: \{'data': 4, 'model': 2\} in the file, \{'data': 8\} now"),
]


@pytest.mark.parametrize("options, line", DIFFERENCES, ids=["layout", "shape", "mesh"])
def test_a_difference_is_named(golden, options, line):
    with pytest.raises(autoshard.PlanError, match=line) as raised:
        planned(**options).assert_same(golden[1])
    message = str(raised.value)
    assert message.startswith("mlp is planned otherwise than ") and "plan.save(" in message
    assert len(message.splitlines()) <= 23


def test_collectives_that_differ_are_named(golden):
    with pytest.raises(autoshard.PlanError, match=r"all_reduce over .*: .* bytes"):
        planned(fixed={"batch/*": P(), "weights/up": P(None, "model")}).assert_same(golden[1])


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"mesh": {"data": 4}}', '{"mesh": {"data": "x"}}'])
def test_what_is_no_plan_is_an_error(golden, tmp_path, content):
    (tmp_path / "broken.json").write_text(content)
    with pytest.raises(autoshard.PlanError, match=r"broken\.json is not a plan"):
        golden[0].assert_same(tmp_path / "broken.json")
    with pytest.raises(autoshard.PlanError, match=r"no golden plan .*\nplan\.save\("):
        golden[0].assert_same(tmp_path / "none.json")
