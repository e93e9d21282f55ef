"""FLOPs held against XLA's own cost analysis of the compiled equation, and against the textbook where XLA has none."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.errors import MeshError
from autoshard.mesh.compute import compute_seconds, flops
from autoshard.mesh.links import Cache
from autoshard.mesh.topology import Topology
from autoshard.program import Equation, Value

F32, I32, C64 = np.float32, np.int32, np.complex64


def array(*shape, dtype=F32):
    return jax.ShapeDtypeStruct(shape, dtype)


def equations(fn, *args) -> list[Equation]:
    def value(var):
        aval = var.aval
        return Value(0, tuple(aval.shape), aval.dtype, 0, "", None)

    def flat(jaxpr):
        for e in jaxpr.eqns:
            inner = e.params.get("jaxpr") or e.params.get("call_jaxpr")
            yield from flat(inner.jaxpr) if inner else [e]

    return [
        Equation(0, e.primitive.name, e.params, tuple(map(value, e.invars)), tuple(map(value, e.outvars)), None, ())
        for e in flat(jax.make_jaxpr(fn)(*args).jaxpr)
    ]


def check(fn, *args, tolerance=0.0):
    """All equations of `fn` together against XLA's count."""
    ours = sum(flops(equation) for equation in equations(fn, *args))
    xla = jax.jit(fn).lower(*args).compile().cost_analysis().get("flops", 0.0)
    assert ours == pytest.approx(max(xla, 0.0), rel=tolerance), (ours, xla)


def conv(strides=(1, 1), lhs_dilation=(1, 1), groups=1, batch_groups=1):
    return lambda x, k: lax.conv_general_dilated(
        x,
        k,
        strides,
        [(0, 0), (0, 0)],
        lhs_dilation,
        feature_group_count=groups,
        batch_group_count=batch_groups,
    )


AGAINST_XLA = {
    "matmul": (lambda x, y: x @ y, array(32, 64), array(64, 16)),
    "batched": (lambda x, y: jnp.einsum("bik,bkj->bij", x, y), array(4, 8, 16), array(4, 16, 12)),
    "conv": (conv(), array(2, 3, 16, 16), array(8, 3, 3, 3)),
    "conv strided": (conv(strides=(2, 2)), array(2, 3, 17, 17), array(8, 3, 3, 3)),
    "conv grouped": (conv(groups=4), array(2, 8, 16, 16), array(8, 2, 3, 3)),
    "add": (lambda x, y: x + y, array(8, 16), array(8, 16)),
    "tanh": (lambda x: x * x, array(8, 16)),
    "reshape": (lambda x: x.reshape(-1), array(8, 16)),
    "transpose": (lambda x: x.T, array(8, 16)),
}


@pytest.mark.parametrize("name", AGAINST_XLA)
def test_against_xla(name):
    check(*AGAINST_XLA[name])


def test_reductions_are_within_one_element_of_xla():
    check(lambda x: x.sum(0), array(64, 16), tolerance=1 / 32)  # n - 1 additions of n elements


def test_oracle_can_fail():
    with pytest.raises(AssertionError):
        check(lambda x: jnp.dot(x, x) if x.ndim == 1 else lax.linalg.cholesky(x), array(16, 16))  # XLA cannot count it


ONE_EQUATION = [  # (primitive, program, arguments, FLOPs)
    ("dot_general", lambda x, y: x @ y, (array(8, 16, dtype=C64), array(16, 4, dtype=C64)), 8 * 8 * 16 * 4),
    ("conv_general_dilated", conv(lhs_dilation=(2, 2)), (array(1, 1, 8, 8), array(1, 1, 3, 3)), 2 * 13 * 13 * 9 / 4),
    ("conv_general_dilated", conv(batch_groups=2), (array(2, 3, 8, 8), array(4, 3, 3, 3)), 2 * 4 * 6 * 6 * 27),
    ("ragged_dot_general", lax.ragged_dot, (array(8, 16), array(2, 16, 4), array(2, dtype=I32)), 2 * 8 * 16 * 4),
    (
        "scaled_dot",
        lambda x, y, a, b: lax.scaled_dot(x, y, lhs_scale=a, rhs_scale=b, dimension_numbers=(((1,), (1,)), ((), ()))),
        (array(8, 64), array(4, 64), array(8, 2), array(4, 2)),
        2 * 8 * 4 * 64,
    ),
    ("argmax", lambda x: lax.argmax(x, 0, I32), (array(8, 16),), 128),
    ("cumsum", lambda x: lax.cumsum(x), (array(8, 16),), 128),
    ("sort", lambda x: lax.sort(x), (array(4, 16),), 64 * 4),
    ("top_k", lambda x: lax.top_k(x, 4), (array(4, 16),), 64 * 2),
    ("fft", lambda x: lax.fft(x, "fft", (16,)), (array(4, 16, dtype=C64),), 5 * 64 * 4),
    ("fft", lambda x: lax.fft(x, "rfft", (16,)), (array(4, 16),), 2.5 * 64 * 4),
    ("cholesky", lax.linalg.cholesky, (array(3, 6, 6),), 3 * 6**3 / 3),
    ("lu", lambda x: lax.linalg.lu(x)[0], (array(6, 6),), 2 * 6**3 / 3),
    (
        "triangular_solve",
        lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True),
        (array(6, 6), array(6, 2)),
        6 * 12,
    ),
    ("dynamic_slice", lambda x: lax.dynamic_slice(x, (1,), (4,)), (array(8),), 0),
    ("scatter-add", lambda x, u: x.at[jnp.array([1, 2])].add(u), (array(8, 4), array(2, 4)), 8),
    ("gather", lambda x: x[jnp.array([1, 2])], (array(8, 4),), 0),
    (
        "reduce_window_max",
        lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 2), (2, 2), "VALID"),
        (array(8, 8),),
        64,
    ),
    ("exp", jnp.exp, (array(8, 4),), 32),
    ("select_n", lax.select, (array(8, dtype=bool), array(8), array(8)), 8),
]


@pytest.mark.parametrize("primitive, fn, args, expected", ONE_EQUATION, ids=[row[0] for row in ONE_EQUATION])
def test_one_equation(primitive, fn, args, expected):
    (equation,) = [e for e in equations(fn, *args) if e.primitive == primitive]
    assert flops(equation) == pytest.approx(expected)


def test_roofline():
    topology = Topology({}, memory_bytes=1e9, memory_bandwidth=1e10, flops={"float32": 1e12, "bfloat16": 2e12})
    assert compute_seconds(1e12, 0, np.dtype("float32"), topology) == 1.0
    assert compute_seconds(1e12, 0, "bfloat16", topology) == 0.5
    assert compute_seconds(1e12, 2e10, "float32", topology) == 2.0
    assert compute_seconds(0, 0, "float32", Topology({}, 1.0, 1.0, {})) == 0
    with pytest.raises(MeshError, match="no FLOP rates"):
        compute_seconds(1, 0, "float32", Topology({}, 1.0, 1.0, {}))


@pytest.mark.parametrize("bytes_moved, seconds", [(500, 0.5), (1000, 1.0), (1300, 4.0)])
def test_the_first_bytes_of_an_operation_go_through_the_cache(bytes_moved, seconds):
    topology = Topology({}, 1e9, memory_bandwidth=100.0, flops={"float32": 1e3}, cache=Cache(1000, 1000.0))
    assert compute_seconds(0, bytes_moved, "float32", topology) == seconds
    assert compute_seconds(5e3, bytes_moved, "float32", topology) == 5.0
