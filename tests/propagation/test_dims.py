"""Rules of operations on dims, held against Shardy."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from rule_oracles import check_against_shardy, check_by_pieces, normal, only_equation

from autoshard.propagation import Rule, rule_of

X = normal(4, 6, 8)

RESHAPES = [  # from, to, rule
    ((4, 6), (24,), "i j -> (i j)"),
    ((24,), (4, 6), "(i j) -> i j"),
    ((4, 12), (8, 6), "i (j k) -> (i j) k"),
    ((2, 3, 4), (6, 4), "i j k -> (i j) k"),
    ((4, 1, 6), (4, 6), "i 1 j -> i j"),
    ((4, 6), (1, 4, 6, 1), "i j -> 1 i j 1"),
    ((8, 8), (16, 4), "i (j k) -> (i j) k"),
    ((2, 3), (3, 2), None),
    ((6,), (4, 3), None),
    ((6, 2, 5), (4, 3, 5), None),
    ((12, 5), (5, 12), None),
    ((8, 10), (16, 5), "i (j k) -> (i j) k"),
]


@pytest.mark.parametrize("shape, to, notation", [case for case in RESHAPES if case[0] != (6,)])
def test_reshape(shape, to, notation):
    def fn(x):
        return lax.reshape(x, to)

    x = normal(*shape)
    rule = rule_of(only_equation(fn, (x,)))
    if notation:
        assert str(rule) == notation
        assert not rule.need_replication
    if notation or jax.__version_info__ < (0, 11):  # since then Shardy also joins dims that only begin alike
        check_against_shardy(fn, x, op="stablehlo.reshape")


def test_reshape_of_nothing():
    rule = rule_of(only_equation(lambda x: lax.reshape(x, (0, 7)), (jnp.ones((3, 0)),)))
    assert not rule.splittable


SHARDY = [  # function, operands, operation
    (lambda x: lax.broadcast_in_dim(x, (5, 4, 6, 8), (1, 2, 3)), (X,), "stablehlo.broadcast_in_dim"),
    (lambda x: lax.broadcast_in_dim(x, (4, 6, 8), (0, 1, 2)), (X[:, :1],), "stablehlo.broadcast_in_dim"),
    (lambda x: lax.broadcast_in_dim(x, (6, 4), (1,)), (normal(4),), "stablehlo.broadcast_in_dim"),
    (lambda x, y: lax.concatenate([x, y], 1), (X, X), "stablehlo.concatenate"),
    (lambda x: lax.pad_p.bind(x, 0.0, padding_config=((0, 0, 0), (1, 2, 0), (0, 0, 1))), (X,), "stablehlo.pad"),
    (lambda x: lax.rev(x, (1,)), (X,), "stablehlo.reverse"),
    (lambda x: lax.slice(x, (0, 1, 0), (4, 5, 8)), (X,), "stablehlo.slice"),
    (lambda x: lax.squeeze(x, (1,)), (X[:, :1],), "stablehlo.reshape"),
    (lambda x: lax.transpose(x, (2, 0, 1)), (X,), "stablehlo.transpose"),
]


@pytest.mark.parametrize("fn, operands, op", SHARDY)
def test_as_in_shardy(fn, operands, op):
    check_against_shardy(fn, *operands, op=op)


NOTATIONS = [  # function, operands, notation, splittable
    (lambda: lax.iota(jnp.int32, 8), (), " -> i", "i"),
    (lambda x: lax.broadcast_in_dim(x, (4, 6), (0, 1)), (X[:, :1, 0],), "i 1 -> i j", "i j"),
    (lambda x, y: lax.concatenate([x, y], 1), (X, X), "i j k, i j k -> i j k", "i k"),
    (lambda x: lax.split(x, (2, 4), 1), (X,), "i j k -> i j k, i j k", "i k"),
    (lambda x: lax.rev(x, (0, 2)), (X,), "i j k -> i j k", "j"),
    (lambda x, y: lax.stack_p.bind(x, y, axis=1), (X, X), "i k l, i k l -> i j k l", "i k l"),
    (lambda x: lax.unstack_p.bind(x, axis=0), (X,), "i j k -> j k, j k, j k, j k", "j k"),
    (lambda x: lax.tile_p.bind(x, reps=(1, 2, 1)), (X,), "i k l -> i (j k) l", "i j k l"),
]


@pytest.mark.parametrize("fn, operands, notation, splittable", NOTATIONS)
def test_notation(fn, operands, notation, splittable):
    if not all(hasattr(lax, name) for name in fn.__code__.co_names if name.endswith("_p")):
        pytest.skip("not a primitive of this JAX")
    rule = rule_of(only_equation(fn, operands))
    assert str(rule) == notation
    assert rule.splittable == set(splittable.split())


PIECEWISE = [
    (lambda x, y: lax.concatenate([x, y], 1), (X, X)),
    (lambda x: lax.pad(x, 0.0, ((0, 0, 0), (1, 2, 0), (0, 0, 0))), (X,)),
    (lambda x: lax.rev(x, (1,)), (X,)),
    (lambda x: lax.split(x, (2, 4), 1), (X,)),
    (lambda x: lax.transpose(x, (2, 0, 1)), (X,)),
]


@pytest.mark.parametrize("fn, operands", PIECEWISE)
def test_by_pieces(fn, operands):
    check_by_pieces(fn, *operands)


def test_the_oracles_see_a_wrong_rule():
    swapped = Rule.parse("i j -> (j i)", (4, 6), (24,))
    with pytest.raises(AssertionError):
        check_against_shardy(lambda x: lax.reshape(x, (24,)), normal(4, 6), op="stablehlo.reshape", rule=swapped)
    free = Rule.parse("i j k -> i j k", X.shape, X.shape)
    with pytest.raises(AssertionError):
        check_by_pieces(lambda x: lax.rev(x, (1,)), X, rule=free)
