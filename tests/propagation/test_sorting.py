"""Rules of operations that order elements, held against their own numbers."""

import jax.numpy as jnp
import pytest
from jax import lax
from rule_oracles import check_against_shardy, check_by_pieces, normal

from autoshard.propagation import Rule

X = normal(4, 6, 8)

SORTING = [
    (lambda x: lax.sort(x, dimension=1), (X,)),
    (lambda x, y: lax.sort((x, y), dimension=0, num_keys=1), (X, X + 1)),
    (lambda x: lax.top_k(x, 3), (X,)),
    (lambda x: lax.approx_max_k(x, 3, reduction_dimension=1), (X,)),
]


@pytest.mark.parametrize("fn, operands", SORTING)
def test_by_pieces(fn, operands):
    check_by_pieces(fn, *operands, factors=2)


@pytest.mark.parametrize("fn, operands", SORTING[:2])
def test_as_in_shardy(fn, operands):
    check_against_shardy(fn, *operands, op='"stablehlo.sort"')


def test_the_oracle_sees_a_wrong_rule():
    free = Rule.parse("i j k -> i j k", X.shape, X.shape)
    with pytest.raises(AssertionError):
        check_by_pieces(lambda x: jnp.sort(x, axis=1), X, rule=free)
