"""Strategies that are found once for several groups are those that each of them has."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P
from programs import f32, model_program, traced

from autoshard.model.grouping import groups_of
from autoshard.model.pricing import group_strategies
from autoshard.model.pricing.group_strategies import GroupStrategies
from autoshard.model.pricing.memo import Memo
from autoshard.model.strategies import strategies_of, unsummed_key
from autoshard.model.xla.backends import V5E
from autoshard.propagation import rules_for

MESH = {"x": 4, "y": 2}


def odd(x, y, z):
    """Equal factors of other sizes, of dims without elements, and under constraints."""
    halves = x[:, :3] * 2, y * 2, jnp.tanh(y), z * 2, y.T * 2
    mesh = AbstractMesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Auto,) * len(MESH))
    with jax.sharding.use_abstract_mesh(mesh):
        bound = [jax.lax.with_sharding_constraint(jnp.exp(y), P(axis)) for axis in MESH]
    return halves, [jnp.cos(one).sum(0) for one in bound], jnp.sin(x).max(1)


def programs():
    yield traced(odd, f32(8, 8), f32(8, 3), f32(0, 8))
    yield model_program("gpt")


def assert_each_has_its_own():
    shared = 0  # how many groups another one stands for
    for program in programs():
        groups = groups_of(program, rules_for(program), V5E, MESH)
        known = GroupStrategies(MESH, V5E, Memo(), {})
        for group in groups:
            strategies, wants, leaves = known.of(group)
            assert list(strategies) == strategies_of(group, MESH, V5E), group.equations
            assert wants == tuple(zip(*(one.operand_layouts for one in strategies), strict=True))
            assert leaves == tuple(zip(*(one.output_layouts for one in strategies), strict=True))
        keys = [key for key in map(unsummed_key, groups) if key is not None]
        shared += len(keys) - len(set(keys))
    return shared


def test_ways_that_are_known_are_those_of_each_group():
    assert assert_each_has_its_own() > 30


@pytest.mark.parametrize("part", [0, 4])  # operands, what the user says
def test_a_key_that_leaves_something_out_is_caught(part, monkeypatch):
    def short(group):
        key = unsummed_key(group)
        return None if key is None else (*key[:part], *key[part + 1 :])

    monkeypatch.setattr(group_strategies, "unsummed_key", short)
    with pytest.raises(AssertionError):
        assert_each_has_its_own()
