"""Primitives of the user's own that have no rule: what they compute is opened, if it is written in JAX."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from equality import assert_equal
from flax.linen import fp8_ops
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import UnknownPrimitiveWarning
from autoshard import autoshard as decorated

SHAPE = {"x": 8}
X = jnp.arange(64.0 * 32).reshape(64, 32) / 1000


def primitive(name, implementation, lowering=None):
    """A primitive that computes what a function says, as libraries define them."""
    made = Primitive(name)
    made.def_impl(implementation)
    made.def_abstract_eval(lambda *avals: _aval(lowering or implementation, *avals))
    mlir.register_lowering(made, mlir.lower_fun(lowering or implementation, multiple_results=False))
    batching.primitive_batchers[made] = lambda args, dims: (jax.vmap(implementation, in_axes=dims)(*args), 0)
    return made


def _aval(function, *avals):
    made = jax.eval_shape(function, *avals)
    return jax.core.ShapedArray(made.shape, made.dtype)


same = primitive("marked_the_same", lambda x: x)
ad.deflinear2(same, lambda ct, _: [ct])
chosen = primitive("chosen_where_any", lambda flags, x, y: jnp.where(jnp.any(flags), x, y))
twice_opened = primitive("opened_twice", lambda x: same.bind(jnp.tanh(x)) * 2)
by_numpy = primitive("made_by_numpy", lambda x: jnp.asarray(np.sin(np.asarray(x))), jnp.sin)


def turned(x):
    turn = lambda state: (state[0] + 1, same.bind(jnp.tanh(state[1] * 2)))  # noqa: E731
    return lax.while_loop(lambda state: state[0] < 5, turn, (0, x))[1]


STEPS = {
    "alone": lambda x: same.bind(x * 2) + 1,
    "in a loop": lambda x: lax.scan(lambda h, _: (same.bind(jnp.sin(h)), None), x, length=3)[0],
    "in a loop of unknown length": turned,
    "in a branch": lambda x: lax.cond(x.sum() > 0, lambda x: same.bind(x * 2), jnp.sin, x),
    "of several operands": lambda x: chosen.bind(x > 1, x * 2, x * 3),
    "in each other": lambda x: twice_opened.bind(x + 1),
    "in a batch": jax.vmap(lambda row: twice_opened.bind(row)),
    "in a derivative": jax.grad(lambda x: (same.bind(jnp.sin(x)) ** 2).sum()),
    "in a call": lambda x: jax.jit(lambda x: same.bind(x) + 1)(x),
}


def assert_split(step):
    """Split by rows, as the same step without the primitive; and the numbers are those of one device."""
    sharded = decorated(step, mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UnknownPrimitiveWarning)
        plan = sharded.plan(X)
    assert plan.arguments[0].local_bytes == X.nbytes // 8
    assert not any(one.kind == "all_gather" for one in plan.predicted.collectives)
    assert_equal(sharded(X), jax.jit(step)(X))


@pytest.mark.parametrize("case", STEPS)
def test_what_they_compute_is_split(case):
    assert_split(STEPS[case])


def test_what_is_not_written_in_jax_is_kept_whole():
    sharded = decorated(lambda x: by_numpy.bind(x), mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE))
    with pytest.warns(UnknownPrimitiveWarning, match="made_by_numpy"):
        plan = sharded.plan(X)
    assert plan.results[0].local_bytes == X.nbytes


def test_a_rule_of_the_users_is_obeyed():
    ruled = primitive("kept_by_a_rule", lambda x: x * 2)
    autoshard.register_rule(ruled, "... -> ...", need_replication="...")
    program = decorated(lambda x: ruled.bind(x), mesh=mesh_of(SHAPE)).trace(X)
    assert [equation.primitive for equation in program.equations] == ["kept_by_a_rule"]


def test_a_decorated_function_is_differentiated_by_their_rules():
    """Whose derivative is not that of what they compute: three times as much."""
    odd = primitive("with_a_derivative_of_its_own", lambda x: x * 2)
    ad.deflinear2(odd, lambda ct, _: [ct * 3])
    step = lambda x: odd.bind(x).sum()  # noqa: E731
    sharded = decorated(step, mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE))
    assert_equal(jax.grad(sharded)(X), jax.grad(step)(X))
    assert_equal(jax.grad(step)(X), jnp.full_like(X, 3.0))


@pytest.mark.parametrize("remat", [None, "auto"])
def test_a_type_of_their_own(remat):
    """flax's float8 layers give derivatives a type that is added up by a maximum, in loops, too."""

    def loss(x, scale, history):
        numbers = [lax.convert_element_type(array, fp8_ops.fp32_max_grad) for array in (scale, history)]

        def rounded(carry, _):
            return fp8_ops.in_qdq(jnp.float32, jnp.float8_e4m3fn, carry, *numbers) * 1.5, None

        return jnp.sum(lax.scan(rounded, x, length=3)[0] ** 2)

    step = jax.grad(loss, argnums=(0, 1, 2))
    arguments = X, jnp.ones(1), jnp.zeros(16)
    sharded = decorated(step, mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE), remat=remat)
    types = [value for equation in sharded.trace(*arguments).equations for value in equation.outputs]
    assert {value.itemsize for value in types if "fp8_meta" in str(value.dtype)} == {4}
    for _ in range(3):
        ours, theirs = sharded(*arguments), jax.jit(step)(*arguments)
        assert_equal(ours, theirs)
        arguments = X, *theirs[1:]


def test_opened_primitives_that_are_kept_whole_are_caught(monkeypatch):
    monkeypatch.setattr("autoshard.program.reader.implementation_of", lambda eqn: None)
    with pytest.raises((AssertionError, UnknownPrimitiveWarning)):
        assert_split(STEPS["of several operands"])
