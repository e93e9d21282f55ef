"""Rows looked up and written at computed positions along split dims: right numbers, and nothing gathered for them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, normal
from equality import assert_equal
from executed import mismatches, operations_of
from jax import ShapeDtypeStruct, lax
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from oracles import mesh_of

from autoshard import autoshard, plan
from autoshard.lower import lookups, xla_faults

pytestmark = pytest.mark.usefixtures("without_rank_promotion")
TABLE, ROWS = normal(8, 4, 4), normal(3, 4, 4, seed=1)
OUTSIDE = {  # two of three
    "fill": np.array([-3, 8, 5], np.int8),
    "clip": np.array([2**32 - 3, 8, 5], np.uint32),
    "promise_in_bounds": np.array([-3, 8, 5], np.int32),  # what is promised is clipped, or dropped where it is written
}


def looked_up(mode: str):
    """One row, several, and single numbers, of which one dim is indexed beside the first."""

    def get(x, i):
        read = {"mode": mode, "wrap_negative_indices": False}
        return (
            x.at[i[:1]].get(**read),
            x.at[i].get(**read),
            x.at[i[1:2], :, i[2:]].get(**read),
            x.at[i, 1:3].get(**read),
        )

    return Case(mode, "", get, (TABLE, OUTSIDE[mode]))


def written(mode: str):
    """One row, a number of each column, and a single number; several rows beside them."""

    def put(x, i, rows):
        how = {"mode": mode if mode != "fill" else "drop", "wrap_negative_indices": False}
        one = x.at[i[0]].set(rows[0], **how)
        two = one.at[i[1], :, i[2]].add(rows[1, 0], **how)
        three = two.at[i[0], 2, i[2]].max(rows[2, 0, 0], **how).at[i[2:]].multiply(rows[2:], **how)
        return three.at[i[:2]].min(rows[:2], **how)

    return Case(mode, "", put, (TABLE, OUTSIDE[mode], ROWS))


def sliced(dtype: str):
    """One row, a number of each row, a single number, and a row of fewer columns."""

    def get(x, i):
        zero = jnp.zeros((), i.dtype)
        return (
            lax.dynamic_slice(x, (i[0], zero, zero), (1, 4, 4)),
            lax.dynamic_slice(x, (zero, i[1], zero), (8, 1, 4)),
            lax.dynamic_slice(x, (i[2], i[0], i[1]), (1, 1, 1)),
            lax.dynamic_slice(x, (i[2], i[0], zero), (1, 2, 4)),
        )

    table = jnp.round(8 * jnp.asarray(TABLE)).astype(dtype)
    return Case(dtype, "", get, (table, np.array([127, 8, 5], np.uint8) if dtype == "int8" else OUTSIDE["fill"]))


POSITIONED = ("dynamic_slice", "gather", "scatter")  # how names of primitives that read or write positions begin
CASES = [make(mode) for make in (looked_up, written) for mode in OUTSIDE]
CASES += [sliced("bfloat16"), sliced("int8")]


def wrong(case: Case, mesh: dict[str, int]) -> list:
    """What any strategy of its operations with positions computes otherwise than one device.

    `model/test_every_strategy.py` runs those of all others.
    """
    positioned = [one for one in operations_of(case).values() if one.eqn.primitive.name.startswith(POSITIONED)]
    assert len(positioned) > 3
    found = [pair for one in positioned for pair in mismatches(one, mesh_of(mesh))]
    assert found
    return [pair for pair in found if pair[1]]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.fn.__name__}, {case.name}")
def test_every_strategy_is_right(case):
    assert not wrong(case, {"x": 4, "y": 2} if case.name in ("clip", "bfloat16") else {"x": 8})


@pytest.mark.parametrize("case", [looked_up("clip"), sliced("int8")], ids=lambda case: case.name)
def test_a_lookup_in_the_wrong_shard_is_caught(case, monkeypatch):
    monkeypatch.setattr(lookups.jax.lax, "axis_index", lambda axes: jnp.int32(0))
    assert wrong(case, {"x": 8})


def test_an_idle_update_that_counts_is_caught(monkeypatch):
    monkeypatch.setattr(xla_faults.jnp, "full_like", lambda array, _: jnp.zeros_like(array))
    assert wrong(written("clip"), {"x": 8})


WHOLE = {  # writes whose indices have no numbers
    "added": lambda x: (2 * x).at[:].add(x @ jnp.eye(4)),
    "multiplied": lambda x: (2 * x).at[...].multiply(x @ jnp.eye(4)) + 1,
    "columns": lambda x: (2 * x).at[:, 1:3].add((x @ jnp.eye(4))[:, :2]) + 1,
    "gradient": jax.grad(lambda x: (x.at[:].add(3.0) ** 2).sum()),
}
APPLIED = {  # functions of what lies where they write
    "number": lambda x: x.at[3, 1].apply(jnp.square),
    "row": lambda x: x.at[3].apply(jnp.square),
    "rows": lambda x: x.at[2:5].apply(jnp.square) + x.at[:, 1].apply(jnp.cos),
    "computed": lambda x: x.at[x.argmax(axis=0)[0]].apply(jnp.square),
    "several": lambda x: x.at[jnp.array([1, 7])].apply(jnp.square),
}


@pytest.mark.parametrize("fn", [*WHOLE.values(), *APPLIED.values()], ids=[*WHOLE, *APPLIED])
def test_writes_are_those_of_one_device(fn):
    x = normal(8, 4)
    assert_equal(autoshard(fn, mesh=mesh_of({"x": 8}))(x), jax.jit(fn)(x))


STEPS = {
    "one row is written": lambda x, i, row: x.at[i[0]].set(row),
    "one row is added to": lambda x, i, row: x.at[i[:1]].add(row),
    "one number is written": lambda x, i, row: x.at[i[0], i[1]].set(row[0]),
    "one row is looked up": lambda x, i, row: x[i[:1]] * row[None],
    "one row is sliced": lambda x, i, row: lax.dynamic_index_in_dim(x, i[0]) * row[None],
    "one row of bfloat16 is looked up": lambda x, i, row: x[i[:1]] * row[None],
    "two rows are looked up": lambda x, i, row: x[i] * row[None],
}


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("machine", [None, "v5e:2x4", "h100:8"])
def test_nothing_is_gathered(machine, name):
    """XLA for TPU and GPU makes slices of single rows, for which it gathers the whole array."""
    if machine is not None:
        pytest.importorskip("libtpu" if machine.startswith("v5e") else "jax_plugins.xla_cuda13")
    mesh = mesh_of({"x": 8}) if machine is None else AbstractMesh((8,), ("x",))
    arrays = (
        ShapeDtypeStruct((64, 4096), jnp.bfloat16 if "bfloat16" in name else jnp.float32),
        ShapeDtypeStruct((2,), jnp.int32),
        ShapeDtypeStruct((4096,), jnp.float32),
    )
    made = plan(STEPS[name], *arrays, mesh=mesh, topology=machine, fixed={"x": P("x")})
    found = made.verify(target=machine) if machine else made.verify()
    assert found.collectives_agree, str(found)
    assert not any(kind == "all_gather" and count > 2**18 for (kind, _), count in found.actual.items()), str(found)
    assert found.actual_peak < 64 * 4096 * 4
