"""What becomes a stencil, and which rows of their neighbours devices read for one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from autoshard.program import trace
from autoshard.propagation import rule_of
from autoshard.propagation.halos import HaloRows, hops
from autoshard.propagation.stencils import with_stencils

GRID = jax.ShapeDtypeStruct((64, 32), "float32")


def stencils(fn, *args):
    program = with_stencils(trace(fn, args or (GRID,), {}))
    assert all(equation.index == i for i, equation in enumerate(program.equations))
    return [equation for equation in program.equations if equation.primitive == "stencil"], program


def rows_along_first(equation):
    """(rows before the shard, rows after it, whether round the end) of everything that is read along dim 0."""
    found = {
        (rows.before, rows.after, rows.wraps)
        for reach in rule_of(equation).reaches
        for rows in reach.rows
        if not rows.dim
    }
    return sorted(found)


ONE = [  # a program that is one stencil, what devices read along the first dim
    (lambda u: jnp.roll(u, 1, 0), [(1, -1, True)]),
    (lambda u: jnp.roll(u, -2, 0), [(-2, 2, True)]),
    (lambda u: jnp.pad(u, ((1, 1), (0, 0)), mode="wrap")[2:], [(-1, 1, True)]),
    (lambda u: jnp.pad(u, ((1, 1), (0, 0)))[:-2], [(1, -1, False)]),
    (lambda u: jnp.pad(u, ((1, 1), (0, 0)), mode="edge")[2:], [(0, 1, False)]),
    (lambda u: jnp.pad(u, ((1, 1), (0, 0)), mode="reflect")[:-2], [(1, 1, False)]),
    (lambda u: jnp.concatenate([jnp.zeros((2, 32)), u[:-2]]), [(2, -2, False)]),
    (lambda u: u.at[1:-1].add(u[2:] - u[:-2]), [(1, 1, False)]),
    (lambda u: u.at[0].set(u[1]), [(0, 1, False)]),
    (lambda u: u.at[0].set(0.0), [(0, 0, False)]),
    (lambda u: jax.lax.dynamic_update_slice(u, u[3:5], (2, 0)), [(0, 1, False)]),
]


@pytest.mark.parametrize("program, rows", ONE)
def test_one_stencil(program, rows):
    (equation,), whole = stencils(program)
    assert rows_along_first(equation) == rows
    assert whole.results[0] is equation.outputs[0]


NONE = [
    lambda x: jnp.concatenate([-x[:, 16:], x[:, :16]], 1),  # halves trade places, as rotary embeddings have them
    lambda x: x[1:],
    lambda x: jnp.concatenate([x, x]),
    lambda x: x[::2] + x[1::2],
    lambda x: jnp.pad(x, 1) * 2,
    lambda x: jnp.roll(x, jnp.argmax(x[0]), 0),  # by how much is not known
    lambda x: x * x[3, 4],
]


@pytest.mark.parametrize("program", NONE)
def test_no_stencil(program):
    found, whole = stencils(program)
    assert not found and whole.inner == frozenset()


@pytest.mark.parametrize("other", [jnp.cumsum, jnp.sort, lambda row: row[::-1]])
@pytest.mark.parametrize("row", [lambda u: u[3], lambda u: u.reshape(8, 8, 32)[1, 2]])
def test_a_row_of_a_grid_beside_an_array_is_convolved(row, other):
    """The row is a step of the grid's rank, the array beside it has one dim."""
    _, program = stencils(lambda u: jnp.convolve(jnp.concatenate([other(row(u)), row(u)]), jnp.ones(5)))
    assert [equation.primitive for equation in program.equations].count("concatenate") == 1


def test_what_others_read_keeps_its_equation():
    (_,), program = stencils(lambda u: (jnp.pad(u, ((1, 1), (0, 0)))[2:], jnp.pad(u, ((1, 1), (0, 0)))))
    assert [equation.primitive for equation in program.equations].count("pad") == 1


def aligned(cells, scores):
    """As losses of alignments: a cell takes of itself and its neighbour, and two states are handed on."""

    def body(carry, score):
        cells, between = carry
        new = jnp.logaddexp(cells[:, :-1], between) + score
        return (jnp.concatenate([cells[:, :1], jnp.logaddexp(cells[:, 1:], new)], 1), new), None

    return jax.lax.scan(body, (cells, cells[:, 1:]), scores)[0][0].sum()


def test_what_a_loop_hands_on_keeps_its_equation():
    """The carry's equation stands before the body that makes what it hands on."""
    cells, scores = jax.ShapeDtypeStruct((16, 5), "float32"), jax.ShapeDtypeStruct((12, 16, 4), "float32")
    found, program = stencils(jax.grad(aligned), cells, scores)
    made = program.makers.keys() | {value.id for value in (*program.arguments, *program.constants)}
    assert found and program.reads.keys() <= made


def test_a_stencil_does_not_reach_into_a_checkpoint():
    def program(u):
        inner = jax.checkpoint(lambda x: jnp.tanh(x[1:]))(u)
        return jnp.pad(inner, ((0, 1), (0, 0)))

    found, _ = stencils(program)
    assert not found


@pytest.mark.parametrize("pieces", [2, 4, 8])
@pytest.mark.parametrize(
    "before, after, wraps", [(1, 1, False), (2, -2, False), (-3, 3, True), (9, -9, True), (17, -17, False)]
)
def test_hops_bring_every_row(pieces, before, after, wraps):
    """Against the rows themselves: what a device puts together is what it reads."""
    size, rows = 32, HaloRows(0, "i", before, after, 0, 32, wraps)
    shard = size // pieces
    shards = np.arange(size).reshape(pieces, shard)
    found = np.full((pieces, shard + before + after), -1)
    for device in range(pieces):
        for place in range(-before, shard + after):
            if 0 <= place < shard:
                found[device, place + before] = shards[device, place]
    for hop in hops(rows, size, pieces):
        assert len({sender for sender, _ in hop.pairs}) == len(hop.pairs) == len({to for _, to in hop.pairs})
        for sender, receiver in hop.pairs:
            found[receiver, hop.at : hop.at + hop.stop - hop.start] = shards[sender, hop.start : hop.stop]
    places = np.arange(pieces)[:, None] * shard + np.arange(-before, shard + after)
    expected = places % size if wraps else np.where((places >= 0) & (places < size), places, -1)
    np.testing.assert_array_equal(found, expected)


def test_rows_that_do_not_matter_are_not_sent():
    assert not hops(HaloRows(0, "i", 1, -1, 0, 1), 32, 4)  # its first row is read by the device that has it
    (far,) = hops(HaloRows(0, "i", -31, 31, 31, 32), 32, 4)
    assert far.pairs == ((3, 0),) and far.stop - far.start == 1
