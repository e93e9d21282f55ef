"""The order in which XLA runs Shardy over a function, against the shardings of compiled functions."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of
from programs import f32
from shardy import fixed_layouts

from autoshard.layout import spec_of
from autoshard.program import trace
from autoshard.propagation import propagate_layouts, rules_for
from autoshard.propagation.post_order import in_post_order

MESH = {"x": 4, "y": 2}
ROWS, COLUMNS = P("x"), P(None, "x")


def turns(x, a, b):
    """Two sums in a loop, of which the last one written is the first carry."""

    def turn(sums, _):
        h = jnp.sin(x)
        first = sums[1] + h * a
        return (sums[0] + h * b, first), None

    return lax.scan(turn, (jnp.zeros(x.shape), jnp.zeros(x.shape)), length=3)[0]


def first_result_last(x, a, b):
    u = x * a
    return x * b, u


def cut(x, a, b):
    u = jnp.tanh(x * a)[:8]
    return x * b, u


def looked_up(x, a, b):
    """A filling gather asks first whether the positions are in range."""
    u = jnp.where(x > 0, a, b)
    return jnp.take(u, jnp.argmax(x + b, 0), axis=0), x - a


def stacked(x, a, b):
    """What a loop stacks is split in time to win against the smaller operand of a product."""
    rows = lax.scan(lambda c, _: (c, jnp.sin(c @ b)), x, length=3)[1]
    return (jnp.einsum("tbf,bi->tif", rows, a),)


X = f32(16, 16)
FUNCTIONS = {  # function, and the specs of its operands
    "first result last": (first_result_last, (None, ROWS, COLUMNS)),
    "cut": (cut, (None, ROWS, COLUMNS)),
    "in a loop": (turns, (None, ROWS, COLUMNS)),
    "branches of a choice": (lambda x, a, b: (jnp.where(x > 0, x * a, x * b),), (None, ROWS, COLUMNS)),
    "stacked": (stacked, (P(), COLUMNS, COLUMNS)),
    "looked up": (looked_up, (None, ROWS, COLUMNS)),
}


def assert_as_compiled(name, in_order=in_post_order):
    function, specs = FUNCTIONS[name]
    mesh = mesh_of(MESH)
    shardings = [None if spec is None else NamedSharding(mesh, spec) for spec in specs]
    compiled = jax.jit(function, in_shardings=shardings).lower(X, X, X).compile()
    program = trace(function, (X, X, X), {}, merges=False)
    found = propagate_layouts(program, rules_for(program), MESH, fixed_layouts(program, specs), None, in_order(program))
    layouts = [*(found.values[value.id] for value in program.arguments), *found.results]
    theirs = [*compiled.input_shardings[0], *jax.tree.leaves(compiled.output_shardings)]
    for layout, sharding in zip(layouts, theirs, strict=True):
        assert NamedSharding(mesh, spec_of(layout)).is_equivalent_to(sharding, len(layout)), (layout, sharding)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_ties_fall_as_compiled(name):
    assert_as_compiled(name)


@pytest.mark.parametrize("name", ["first result last", "in a loop", "stacked"])
def test_the_order_of_the_program_is_caught(name):
    with pytest.raises(AssertionError):
        assert_as_compiled(name, lambda program: None)
