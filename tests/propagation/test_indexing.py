"""Rules of reads and writes at computed positions, held against their own numbers and against Shardy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from rule_oracles import check_against_shardy, check_by_pieces, normal

from autoshard.program import Value, trace
from autoshard.propagation import Rule, rule_of

TABLE = normal(16, 6)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 16, (4, 8)), jnp.int32)
LOGITS = normal(4, 8, 16)


def one_hot_gather(table, tokens):
    return jnp.take_along_axis(table, tokens[..., None], axis=-1)


INDEXED = [  # function, operands, primitive, notation, reduction, splittable
    (lambda t, i: t[i], (TABLE, TOKENS), "gather", "l k, i j 1 -> i j k", "l", "i j k l"),
    (lambda t, i: jnp.take(t, i, axis=1), (TABLE, TOKENS % 6), "gather", "k l, i j 1 -> k i j", "l", "i j k l"),
    (one_hot_gather, (LOGITS, TOKENS), "gather", "i j l, i j k 1 -> i j k", "l", "i j l"),
    (lambda t, i: t[i, i], (TABLE, TOKENS % 6), "gather", "k l, i j m -> i j", "k l", "i j k l"),
    (lambda t, i: t.at[i].add(1.0), (TABLE, TOKENS), "scatter-add", None, "i j", "i j k l"),
    (lambda t, i: t.at[i].set(1.0), (TABLE, TOKENS), "scatter", None, "", "k l"),
    (lambda t, i: t.at[i].max(1.0), (TABLE, TOKENS), "scatter-max", None, "i j", "i j k l"),
    (lambda t: t.at[2:5].add(1.0), (TABLE,), "scatter-add", None, "", "k"),
    (lambda t, i: jax.grad(lambda t: (t[i] ** 2).sum())(t), (TABLE, TOKENS), "scatter-add",
     "l k, i j 1, i j k -> l k", "i j", "i j k l"),
    (lambda x, i: jax.grad(lambda x: one_hot_gather(x, i).sum())(x), (LOGITS, TOKENS), "scatter-add",
     "i j l, i j k 1, i j k -> i j l", "", "i j l"),
    (lambda x, i: lax.dynamic_slice_in_dim(x, i, 2, 1), (LOGITS, 3), "dynamic_slice",
     "i j l, , ,  -> i k l", None, "i l"),
    (lambda x, i: lax.dynamic_index_in_dim(x, i, 1), (LOGITS, 3), "dynamic_slice",
     "i j k, , ,  -> i 1 k", "j", "i j k"),
    (lambda x, i: lax.dynamic_index_in_dim(x > 0, i, 1), (LOGITS, 3), "dynamic_slice", None, "", "i l"),
    (lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)), (LOGITS, LOGITS[:, :1], 3), "dynamic_update_slice",
     "i j k, i 1 k, , ,  -> i j k", "", "i j k"),
    (lambda x, u, i: lax.dynamic_update_slice(x, u, (0, i, 0)), (LOGITS, LOGITS[:, :3], 3), "dynamic_update_slice",
     "i j l, i k l, , ,  -> i j l", "", "i l"),
]  # fmt: skip


def found(fn, operands, primitive):
    (equation,) = [e for e in trace(fn, operands, {}).equations if e.primitive == primitive]
    return equation


@pytest.mark.parametrize("fn, operands, primitive, notation, reduction, splittable", INDEXED)
def test_notation(fn, operands, primitive, notation, reduction, splittable):
    equation = found(fn, operands, primitive)
    rule = rule_of(equation)
    if notation is not None:
        assert str(rule).replace("n", "m") == notation
    if reduction is not None:
        assert rule.reduction & rule.splittable == set(reduction.split())
    assert rule.splittable == set(splittable.split())


@pytest.mark.parametrize("fn, operands, primitive", [case[:3] for case in INDEXED])
def test_as_in_shardy(fn, operands, primitive):
    op = {"dynamic_slice": "stablehlo.dynamic_slice", "dynamic_update_slice": "stablehlo.dynamic_update_slice"}
    equation = found(fn, operands, primitive)
    check_against_shardy(
        fn, *operands, op=op.get(primitive, f'"stablehlo.{primitive.split("-")[0]}"'), rule=rule_of(equation)
    )


def test_lookup_by_pieces():
    """Indices count within a shard, so only what is not indexed can be computed as it stands."""
    equation = found(lambda t, i: t[i], (TABLE, TOKENS), "gather")
    rule = rule_of(equation)
    check_by_pieces(lambda t, i: t[i[..., 0]], TABLE, TOKENS[..., None], rule=only(rule, "i j k"))

    def masked(table, tokens, offset):  # what XLA computes on a device that holds rows from `offset` on
        local = tokens[..., 0] - offset
        here = (local >= 0) & (local < len(table))
        return jnp.where(here[..., None], table[jnp.clip(local, 0, len(table) - 1)], 0)

    halves = [masked(TABLE[:8], TOKENS[..., None], 0), masked(TABLE[8:], TOKENS[..., None], 8)]
    np.testing.assert_allclose(halves[0] + halves[1], TABLE[TOKENS])
    assert rule.reduction == {"l"}


def test_accumulating_scatter_by_pieces():
    updates = normal(4, 8, 6)
    equation = found(lambda t, i, u: t.at[i].add(u), (TABLE, TOKENS, updates), "scatter-add")
    rule = rule_of(equation)
    args = TABLE, TOKENS[..., None], updates

    def fn(t, i, u):
        return t.at[i[..., 0]].add(u)

    check_by_pieces(fn, *args, rule=only(rule, "i j k"), once=(0,))
    with pytest.raises(AssertionError):  # the start counts once
        check_by_pieces(fn, *args, rule=only(rule, "i j k"))
    free = Rule.parse("l k, i j 1, i j k -> l k", *(x.shape for x in args), TABLE.shape, reduction="i j")
    with pytest.raises(AssertionError):
        check_by_pieces(lambda t, i, u: t.at[i[..., 0]].set(u), *args, rule=only(free, "i j k"), once=(0,))


def only(rule: Rule, factors: str) -> Rule:
    """The rule with only these factors free to split."""
    whole = frozenset(rule.factors) - set(factors.split())
    return Rule(rule.operands, rule.results, rule.sizes, rule.reduction - whole, whole, frozenset())


def test_slices_by_pieces():
    check_by_pieces(lambda x: lax.dynamic_slice_in_dim(x, jnp.int32(3), 2, 1), LOGITS, rule=SLICE)


SLICE = Rule.parse("i j l -> i k l", (4, 8, 16), (4, 2, 16), need_replication="j k")


def test_values_are_not_literals():
    assert all(isinstance(x, Value) for x in found(lambda t, i: t[i], (TABLE, TOKENS), "gather").inputs)
