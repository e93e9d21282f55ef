"""Registering rules, and what happens without one."""

import importlib
import warnings
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas
from jax.extend.core import Primitive
from models import MODELS

from autoshard.errors import RuleError
from autoshard.program import trace
from autoshard.propagation import Rule, UnknownPrimitiveWarning, register_rule, rule_of, rules_for
from autoshard.propagation.registry import has_rule, rule
from autoshard.propagation.rule import KEPT_RULES


def primitive_like_matmul(name: str) -> Primitive:
    primitive = Primitive(name)
    primitive.def_abstract_eval(lambda x, y: jax.core.ShapedArray((x.shape[0], y.shape[1]), x.dtype))
    return primitive


RIGHT = Rule.parse("i j -> i j", (4, 6), (4, 6))
X, Y = jnp.ones((4, 6)), jnp.ones((6, 8))


def test_a_second_rule_is_an_error():
    with pytest.raises(RuleError, match="'tanh' already has a sharding rule"):
        rule("tanh")(lambda equation: None)
    with pytest.raises(RuleError, match="'dot_general' already has a sharding rule"):
        register_rule("dot_general", "i k, k j -> i j", reduction="k")


def test_no_more_rules_are_kept_than_a_large_step_has():
    """In a process that plans many shapes rules would pile up."""
    for size in range(2, KEPT_RULES + 50):
        given = jax.ShapeDtypeStruct((size, 2), jnp.float32)
        rules_for(trace(lambda x, y: (x + y).sum(), (given, given), {}))
    for family in ("elementwise", "reductions"):
        rules = importlib.import_module(f"autoshard.propagation.rules.{family}")
        kept = [one for one in vars(rules).values() if hasattr(one, "cache_info")]
        assert kept and max(one.cache_info().currsize for one in kept) == KEPT_RULES


def test_unknown_primitive_is_kept_whole_and_named_once():
    primitive = primitive_like_matmul("unheard_of")
    program = trace(lambda x, y: primitive.bind(x, y) + primitive.bind(2 * x, y), (X, Y), {})
    with pytest.warns(UnknownPrimitiveWarning) as caught:
        rules = rules_for(program)
    assert len(caught) == 1
    message = str(caught[0].message)
    assert "'unheard_of'" in message
    assert "test_registry.py:" in message
    line = message.splitlines()[-1].strip()
    assert line == 'autoshard.register_rule("unheard_of", "...1, ...2 -> ...3", need_replication="...1 ...2 ...3")'
    assert [rule.splittable for rule in rules if "m" in rule.sizes] == [frozenset()] * 2


def test_the_line_in_the_warning_registers_a_rule():
    primitive = primitive_like_matmul("soon_known")
    (equation,) = trace(primitive.bind, (X, Y), {}).equations
    with pytest.warns(UnknownPrimitiveWarning) as caught:
        before = rule_of(equation)
    line = str(caught[0].message).splitlines()[-1].strip()
    eval(line.removeprefix("autoshard."), {"register_rule": register_rule})
    after = rule_of(equation)
    assert (list(after.sizes.values()), after.splittable) == (list(before.sizes.values()), before.splittable)
    (other,) = trace(lambda x, y: primitive.bind(x[:2], y[:, :3]), (X, Y), {}).equations[-1:]  # of other shapes
    assert not rule_of(other).splittable


def test_registered_rule_of_a_primitive_of_ones_own():
    primitive = primitive_like_matmul("my_matmul")
    register_rule(primitive, "i k, k j -> i j", reduction="k")
    (equation,) = trace(primitive.bind, (X, Y), {}).equations
    assert rule_of(equation) == Rule.parse("i k, k j -> i j", (4, 6), (6, 8), (4, 8), reduction="k")


def test_registered_rule_that_does_not_fit():
    primitive = primitive_like_matmul("my_wrong_matmul")
    register_rule(primitive, "i k, k j -> i k", need_replication="j")
    (equation,) = trace(primitive.bind, (X, Y), {}).equations
    with pytest.raises(RuleError, match=r"my_wrong_matmul(.|\n)*'k' has size 8 here and 6 elsewhere"):
        rule_of(equation)


WRONG = [  # notation, what is said of it, message, column of the mark
    ("b i -> b i", {"reduction": "q"}, "reduction names 'q', which is no factor of this rule", 0),
    ("b i, i j -> b j", {}, "factor 'i' is in no result: say reduction='i'", 2),
    ("b i -> b i", {"reduction": "i", "permutation": "i"}, "factor 'i' is both reduction and permutation", 2),
    ("b b -> b", {}, "factor 'b' stands twice in one operand or result", 2),
    ("b (h k) -> b h k", {"sizes": {"h": 4}}, "factor 'h' is a whole dim here, so its size comes from the shapes", 13),
    ("b (h k) -> b (h k)", {"sizes": {"h": 0}}, "the size of factor 'h' is a positive integer, not 0", 2),
    ("b (h k) -> b (h k)", {"sizes": {"m": 4}}, "a size is given for 'm', which is no factor of this rule", 0),
    ("i -> (i j", {}, "this bracket is never closed", 5),
    ("i j", {}, "a rule has one '->' between operands and results", 3),
]


@pytest.mark.parametrize("notation, said, message, column", WRONG)
def test_a_wrong_rule_is_an_error_where_it_is_registered(notation, said, message, column):
    with pytest.raises(RuleError) as caught:
        register_rule("my_wrong", notation, **said)
    text, written, mark = str(caught.value).split("\n")[-3:]
    assert message in text
    assert written.strip() == notation
    assert mark.index("^") - 4 == column
    assert not has_rule("my_wrong")


def test_a_rule_of_one_kernel():
    def doubled(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    def call(x):
        return pallas.pallas_call(doubled, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)

    (equation,) = trace(call, (X,), {}).equations
    assert not rule_of(equation).splittable
    register_rule("pallas_call:doubled", "i j -> i j")
    assert rule_of(equation) == RIGHT


@pytest.mark.parametrize("name", MODELS)
def test_every_primitive_of_the_models_has_a_rule(name):
    model = MODELS[name]()
    program = trace(model.step, (model.state, model.batches(0)), {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rules = rules_for(program)
    for equation, found in zip(program.equations, rules, strict=True):
        check_shapes(equation, found)


def check_shapes(equation, rule):
    """Asserts that a rule's factors make up the dims of its equation, and are of one kind."""
    tensors = [*zip(equation.inputs, rule.operands, strict=True), *zip(equation.outputs, rule.results, strict=True)]
    for value, dims in tensors:
        assert len(dims) == len(value.shape), (equation, rule)
        for size, factors in zip(value.shape, dims, strict=True):
            product = 1
            for factor in factors:
                product *= rule.sizes[factor]
            taps = not factors and equation.primitive == "conv_general_dilated"  # of a kernel: no factor, as in Shardy
            assert product == size or taps or rule.permutation & set(factors), (equation, rule)
        assert len({f for dim in dims for f in dim}) == sum(map(len, dims)), "a factor twice in one tensor"
    in_results = {factor for dims in rule.results for dim in dims for factor in dim}
    special = rule.reduction | rule.need_replication | rule.permutation
    assert set(rule.factors) == set(rule.sizes)
    assert set(rule.factors) <= in_results | special, (equation, rule)
    assert len(special) == len(rule.reduction) + len(rule.need_replication) + len(rule.permutation)


def test_check_shapes_can_fail():
    (equation,) = trace(jnp.tanh, (X,), {}).equations
    transposed = Rule.parse("i j -> j i", (4, 6), (6, 4))
    with pytest.raises(AssertionError):
        check_shapes(equation, transposed)
    with pytest.raises(AssertionError):
        check_shapes(equation, replace(RIGHT, sizes={"i": 4, "j": 6, "k": 1}))
    check_shapes(equation, RIGHT)
