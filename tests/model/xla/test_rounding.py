"""What TPU rounds: by hand for small functions. That XLA does so is seen in tests/mesh/test_targets.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import f32, traced

from autoshard.model.grouping import groups_of
from autoshard.model.xla import rounding as module
from autoshard.model.xla.backends import CPU, H100, V5E
from autoshard.model.xla.rounding import Itemsizes, itemsizes_of
from autoshard.program import Program
from autoshard.propagation import rules_for

X, W, V = f32(8, 4), f32(4, 6), f32(6, 4)


def rounded(program: Program, backend=V5E) -> dict[str, str]:
    """What is said of each value of which something is: arguments by name, others by what makes them."""
    itemsizes = itemsizes_of(program, groups_of(program, rules_for(program), backend), backend.rounding)
    names = {value.id: value.name for value in program.arguments}
    names |= {output.id: equation.primitive for equation in program.equations for output in equation.outputs}
    found = {}
    for id, name in names.items():
        value = program.values[id]
        smaller = {"kept": itemsizes.of(value), "moved": itemsizes.moving(value), "fused": itemsizes.stored(value)}
        said = [word for word, size in smaller.items() if size < value.itemsize]
        if "moved" not in said and any(of == id for of, _ in itemsizes.read):
            said.append("moved for some")
        if "kept" in said:  # and so also stored rounded
            said.remove("fused")
        if said:
            assert name not in found, f"two values are called {name}"
            found[name] = " ".join(said)
    return found


def forward(x, w, v):
    return jnp.tanh(x @ w) @ v


def through_a_loop(x, ws):
    return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, ws)[0]


EXACT = {"precision": jax.lax.Precision.HIGHEST}
TABLE = {  # function, arguments, what is rounded. Who keeps a value rounded also moves it so
    "operands": (jnp.matmul, [X, W], {"a": "moved", "b": "moved"}),
    "what is made between two products": (
        lambda x, w, v: jnp.tanh(jnp.sin(x) @ w) @ v,
        [X, W, V],
        {"w": "moved", "v": "moved", "sin": "kept moved", "tanh": "kept moved", "dot_general": "fused"},
    ),
    "results are whole": (
        lambda x, w: (lambda h: (h, h @ w))(jnp.sin(x)), [X, W], {"w": "moved", "sin": "moved"},
    ),
    "what others read too": (
        lambda x, w: (lambda h: (h @ w, h.sum(0)))(jnp.sin(x)), [X, W], {"w": "moved", "sin": "moved for some"},
    ),
    "elementwise readers may take a copy": (
        lambda x, w: (lambda h: (h @ w, h + 1))(jnp.sin(x)), [X, W], {"w": "moved", "sin": "moved for some"},
    ),
    "by way of a transpose": (
        lambda x, w: x.T @ w, [f32(4, 8), W], {"x": "moved", "w": "moved", "transpose": "kept moved"},
    ),
    "a transpose that is a result": (
        lambda x, w: (lambda t: (t, t @ w))(x.T), [f32(4, 8), W], {"w": "moved", "transpose": "moved"},
    ),
    "more precision": (lambda x, w: jnp.matmul(x, w, **EXACT), [X, W], {}),
    "one of both": (
        lambda x, w: (jnp.matmul(x, w, **EXACT), x @ (w + 1)), [X, W],
        {"x": "moved for some", "add": "kept moved"},
    ),
    "bfloat16": (jnp.matmul, [jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)] * 2, {}),
    "integers": (jnp.matmul, [jax.ShapeDtypeStruct((8, 8), np.int32)] * 2, {}),
    "convolutions": (
        lambda x, k: jax.lax.conv(x, k, (1, 1), "SAME"), [f32(2, 3, 8, 8), f32(4, 3, 3, 3)],
        {"x": "moved", "k": "moved"},
    ),
    "slices that a loop takes": (
        through_a_loop, [X, f32(3, 4, 4)], {"ws": "moved", "scan_slice": "kept moved", "scan_carry": "moved for some"},
    ),
    "weights that are put together": (
        lambda x, w, v: x @ jnp.concatenate([w, v], 1), [X, W, f32(4, 2)],
        {"x": "moved", "w": "moved", "v": "moved", "concatenate": "kept moved"},
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TABLE)
def test_by_hand(case):
    fn, args, expected = TABLE[case]
    assert rounded(traced(fn, *args)) == expected


def normalized(x, w):
    """A norm in float32 around values in bfloat16, between two products."""
    wide = (x @ w).astype(jnp.float32)
    return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True))).astype(jnp.bfloat16) @ w


def gathered(x, w):
    """A master weight, cast for its product."""
    return x @ w.astype(jnp.bfloat16), w - 0.1


HALF = jax.ShapeDtypeStruct((8, 8), jnp.bfloat16)
CONVERTED = {  # function, arguments, backend, what moves in fewer bits
    "widened after it is moved": (normalized, [HALF, HALF], H100, {"convert_element_type": "moved"}),
    "rounded before it is moved": (gathered, [HALF, f32(8, 8)], H100, {"w": "moved for some"}),
    "rounded before, on TPU": (gathered, [HALF, f32(8, 8)], V5E, {"w": "moved for some"}),
    "neither, on CPU": (gathered, [HALF, f32(8, 8)], CPU, {}),
    "integers": (lambda x: x.astype(jnp.float32) + 1, [jax.ShapeDtypeStruct((8,), np.int8)], H100, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", CONVERTED)
def test_what_a_program_converts(case):
    fn, args, backend, expected = CONVERTED[case]
    assert rounded(traced(fn, *args), backend) == expected


def test_a_copy_for_some_readers():
    """What a product and a sum read is moved rounded for the product alone."""
    program = traced(lambda x, w: (lambda h: (h @ w, h.sum(0)))(jnp.sin(x)), X, W)
    groups = groups_of(program, rules_for(program), V5E)
    itemsizes = itemsizes_of(program, groups, V5E.rounding)
    (sine,) = program.equations[0].outputs
    product, total = (group for group in groups if any(use.value is sine for use in group.uses))
    assert (itemsizes.moving(sine, [product]), itemsizes.moving(sine, [product, total]), itemsizes.moving(sine)) == (
        2,
        4,
        4,
    )


@pytest.mark.parametrize("backend", [CPU, H100])
def test_others_round_nothing(backend):
    program = traced(forward, X, W, V)
    assert rounded(program, backend) == {} != rounded(program)
    found = itemsizes_of(program, groups_of(program, rules_for(program), backend), backend.rounding)
    assert found == Itemsizes(rounding=backend.rounding)


def test_bytes_per_element():
    value = traced(forward, X, W, V).arguments[0]
    said = frozenset([value.id])
    smaller = {value.id: 2}
    for itemsizes, made, stored, moving in (
        (Itemsizes(), 4, 4, 4),
        (Itemsizes(kept=said, moved=smaller), 2, 2, 2),
        (Itemsizes(moved=smaller), 4, 4, 2),
        (Itemsizes(shared=smaller), 4, 4, 2),
        (Itemsizes(fused=said), 4, 2, 4),  # summed over devices as it is made
    ):
        assert (itemsizes.of(value), itemsizes.stored(value), itemsizes.moving(value)) == (made, stored, moving)


def test_products_that_round_nothing_are_caught(monkeypatch):
    monkeypatch.setattr(module, "_DEFAULT_PRECISIONS", ())
    with pytest.raises(AssertionError):
        test_by_hand("operands")
