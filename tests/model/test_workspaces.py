"""What operations need while they run, and what is never stored, beside what XLA's programs for CPU allocate."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify, sparse
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import PartitionSpec as P
from oracles import mesh_of
from programs import f32

from autoshard import plan, topology
from autoshard.model import formulating, workspaces
from autoshard.model.heap.room_in_results import RoomInResults
from autoshard.model.xla import fusion
from autoshard.model.xla.backends import CPU, H100, V5E
from autoshard.model.xla.cpu import narrow_numbers, pooling, reductions
from autoshard.program import trace
from autoshard.propagation import rules_for

TOKENS, MATRICES, MADE = f32(512, 64), f32(16, 64, 64), f32(512, 64)
SIZES = jax.ShapeDtypeStruct((16,), np.int32)


def of_tokens(x, w, sizes, cotangent):
    return jax.vjp(lambda x: jax.lax.ragged_dot(x, w, sizes), x)[1](cotangent)[0]


def of_matrices(x, w, sizes, cotangent):
    return jax.vjp(lambda w: jax.lax.ragged_dot(x, w, sizes), w)[1](cotangent)[0]


RAGGED = {
    "product": (jax.lax.ragged_dot, (TOKENS, MATRICES, SIZES)),
    "gradient of tokens": (of_tokens, (TOKENS, MATRICES, SIZES, MADE)),
    "gradient of matrices": (of_matrices, (TOKENS, MATRICES, SIZES, MADE)),
}


def assert_peak_as_compiled(function, *arguments, rel, **options):
    found = plan(function, *arguments, mesh=mesh_of({"x": 8}), **options).verify()
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=rel)


def assert_ragged_product_as_compiled(name):
    function, arguments = RAGGED[name]
    assert_peak_as_compiled(function, *arguments, rel=0.1)


@pytest.mark.parametrize("name", RAGGED)
def test_ragged_products_hold_tokens_once_per_group(name):
    assert_ragged_product_as_compiled(name)


def of_sparse(elements, places, other):
    return sparse.BCOO((elements, places), shape=(400, 300)) @ other


SPARSE = f32(5000), jax.ShapeDtypeStruct((5000, 2), np.int32), f32(300, 16)


def test_sparse_products_hold_a_row_per_element(monkeypatch):
    assert_peak_as_compiled(of_sparse, *SPARSE, rel=0.1, fixed={"*": P()})
    monkeypatch.setattr(workspaces, "product_bytes", lambda *sizes: 0.0)
    with pytest.raises(AssertionError):
        assert_peak_as_compiled(of_sparse, *SPARSE, rel=0.5, fixed={"*": P()})


def test_a_workspace_that_is_left_out_is_caught(monkeypatch):
    rows = dict(workspaces.WORKSPACES["cpu"]) | {"ragged_dot_general": lambda shards: shards.operands[0]}
    monkeypatch.setattr(workspaces, "WORKSPACES", {**workspaces.WORKSPACES, "cpu": rows})
    with pytest.raises(AssertionError):
        assert_ragged_product_as_compiled("product")


def windowed(x):
    return jax.lax.reduce_window(x, jnp.zeros((), x.dtype), jax.lax.add, (1, 2, 2), (1, 1, 1), "SAME")


NARROW = {  # what goes over copies of twice the width, and what XLA makes a reduction
    "windows": windowed,
    "windows over what is computed": lambda x: windowed(x * 2) + 1,
    "windows side by side": lambda x: jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 2, 2), (1, 2, 2), "VALID"),
    "running maxima": lambda x: jax.lax.cummax(x, 1),
    "scattered": jax.vmap(lambda x, places, rows: x.at[places].add(rows)),
}


def assert_narrow_as_compiled(name, dtype):
    x, rows = (jax.ShapeDtypeStruct(shape, dtype) for shape in ((64, 32, 32), (64, 8, 32)))
    more = (jax.ShapeDtypeStruct((64, 8), np.int32), rows) if name == "scattered" else ()
    assert_peak_as_compiled(NARROW[name], x, *more, rel=0.15, fixed={"*": P("x")})


@pytest.mark.parametrize("name", NARROW)
def test_narrow_numbers_are_widened(name):
    assert_narrow_as_compiled(name, jnp.bfloat16)
    if name != "windows side by side":  # float8 has no infinity
        assert_narrow_as_compiled(name, jnp.float8_e4m3fn)


def test_copies_of_narrow_numbers_that_are_left_out_are_caught(monkeypatch):
    monkeypatch.setattr(narrow_numbers, "WIDER_BYTES", {})
    for name in ("windows", "running maxima", "scattered"):
        with pytest.raises(AssertionError):
            assert_narrow_as_compiled(name, jnp.bfloat16)


def pooled(width, stride, padding, made=lambda x: x):
    """The gradient of a maximum over windows."""

    def loss_of(x):
        sizes = (1, width, width, 1), (1, stride, stride, 1)
        return (jax.lax.reduce_window(made(x), -jnp.inf, jax.lax.max, *sizes, padding).astype(np.float32) ** 2).sum()

    return jax.grad(loss_of)


POOLS = {
    "side by side": (pooled(2, 2, "VALID"), np.float32),
    "of what is computed": (pooled(2, 2, "VALID", jnp.sin), np.float32),
    "padded": (pooled(3, 2, "SAME"), np.float32),
    "padded, of what is computed": (pooled(3, 2, "SAME", jnp.sin), np.float32),
    "many": (pooled(3, 1, "SAME"), np.float32),
    "of 16 bits": (pooled(2, 2, "VALID"), np.float16),
    "widened": (pooled(2, 2, "VALID"), jnp.bfloat16),
}


def assert_pool_as_compiled(name):
    function, dtype = POOLS[name]
    assert_peak_as_compiled(function, jax.ShapeDtypeStruct((64, 32, 32, 16), dtype), rel=0.12, fixed={"*": P("x")})


@pytest.mark.parametrize("name", POOLS)
def test_gradients_of_pooling_hold_positions(name):
    assert_pool_as_compiled(name)


def test_positions_that_are_left_out_are_caught(monkeypatch):
    monkeypatch.setattr(pooling, "COORDINATE_BYTES", 0)
    for name in ("side by side", "padded", "many"):
        with pytest.raises(AssertionError):
            assert_pool_as_compiled(name)


def of_kernels(images, kernels):
    def loss(kernels):
        dims = "NHWC", "HWIO", "NHWC"
        made = jax.lax.conv_general_dilated(images, kernels, (1, 1), "SAME", None, None, dims, images.shape[-1])
        return (made**2).sum()

    return jax.grad(loss)(kernels)


def assert_depthwise_as_compiled():
    assert_peak_as_compiled(of_kernels, f32(8, 8, 8, 128), f32(5, 5, 1, 128), rel=0.2, fixed={"images": P("x")})


def test_gradients_of_depthwise_kernels_hold_those_of_all_pairs(monkeypatch):
    assert_depthwise_as_compiled()
    monkeypatch.delitem(workspaces.WORKSPACES["cpu"], "conv_general_dilated")
    with pytest.raises(AssertionError):
        assert_depthwise_as_compiled()


MOVES = {
    "reversed": lambda x: jnp.cos(jax.lax.rev(jnp.sin(x), (1,))),
    "padded": lambda x: jnp.cos(jnp.pad(jnp.sin(x), ((0, 0), (1, 1), (0, 0)))),
    "joined": lambda x: jnp.cos(jax.lax.concatenate([jnp.sin(x), x], 1)),
    "taken apart": lambda x: sum(jnp.split(jnp.sin(x), 2, 1)),
    "picked": lambda x: jnp.sin(x)[:, np.array([3, 1, 2])],
}


def assert_nothing_is_stored_between(name):
    assert_peak_as_compiled(MOVES[name], f32(512, 16, 64), rel=0.01, fixed={"*": P("x")})


@pytest.mark.parametrize("name", MOVES)
def test_what_moves_is_one_loop_with_its_only_reader(name):
    assert_nothing_is_stored_between(name)


def test_a_value_that_is_stored_between_is_caught(monkeypatch):
    monkeypatch.setattr(fusion, "_is_repeated", lambda *_: False)
    with pytest.raises(AssertionError):
        assert_nothing_is_stored_between("padded")


LONG, SHORT = f32(512, 16, 64), f32(512, 64, 16)
REDUCTIONS = {  # what is reduced over 64 or 16 elements
    "by the library": (lambda x: jnp.sum(jnp.exp(x) * 2, -1), LONG),
    "by the library, of what it has no operator for": (lambda x: jnp.sum(jnp.where(x > 0, x, 0.1), -1), LONG),
    "over a long dim": (lambda x: jnp.prod(jnp.exp(x), -1), LONG),
    "over a short dim": (lambda x: jnp.prod(jnp.exp(x), -1), SHORT),
    "to a position": (lambda x: jnp.argmax(jnp.exp(x), -1), LONG),
    "of numbers of no library": (lambda x: jnp.sum(x * 2 + 1, -1), jax.ShapeDtypeStruct(LONG.shape, np.int32)),
}


def assert_reduction_as_compiled(name):
    assert_peak_as_compiled(*REDUCTIONS[name], rel=0.12, fixed={"*": P("x")})


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_compute_as_they_go_or_read_what_is_stored(name):
    assert_reduction_as_compiled(name)


@pytest.mark.parametrize("name", ["by the library, of what it has no operator for", "over a short dim"])
def test_a_reduction_that_is_taken_for_another_is_caught(name, monkeypatch):
    monkeypatch.setattr(reductions, "_is_known", lambda _: True)
    monkeypatch.setattr(reductions, "_WINDOW", 8)
    with pytest.raises(AssertionError):
        assert_reduction_as_compiled(name)


RESULTS = {  # temporaries that lie where a result will, or do not
    "written over": lambda x: jnp.conj(jnp.fft.fft(x)) * 2,
    "ahead of it": lambda x: jnp.sort(jnp.sort(x, 0), 1)[:, ::-1],
    "returned twice": lambda x: (lambda y: (y, y))(jnp.sin(x)),
    "an argument": lambda x: (x, jnp.sort(x)),
    "what a loop hands on": lambda x: jax.lax.while_loop(lambda x: jnp.abs(x).max() > 1, lambda x: x * 0.5, x),
    "multiplied by one": lambda x: jnp.sort(x * jnp.ones((64, 64))),
    "of columns": lambda x: jnp.linalg.cholesky(x) * 2,
    "of columns, between": lambda x: jax.lax.linalg.lu(x * 3)[0] * 2,
    "of columns, two": lambda x: jax.lax.linalg.qr(jax.lax.linalg.eigh(x, symmetrize_input=False)[0])[0] * 2,
    "of columns, solved": lambda x: jax.lax.linalg.triangular_solve(x, x * 2, left_side=True) * 2,
    "of other dims": lambda x: jnp.sort(jnp.sort(x * 2).reshape(512, 16, 256), 1),
}


def assert_result_as_compiled(name):
    assert_peak_as_compiled(RESULTS[name], f32(512, 64, 64), rel=0.06, fixed={"*": P("x")})


@pytest.mark.parametrize("name", RESULTS)
def test_temporaries_lie_where_results_will(name):
    assert_result_as_compiled(name)


@pytest.mark.parametrize("name", ["written over", "ahead of it"])
def test_a_result_whose_buffer_holds_nothing_before_is_caught(name, monkeypatch):
    monkeypatch.setattr(RoomInResults, "lying", lambda *_: [])
    with pytest.raises(AssertionError):
        assert_result_as_compiled(name)


@pytest.mark.parametrize("name", ["of columns", "of columns, between"])
def test_a_result_that_is_written_over_columns_is_caught(name, monkeypatch):
    monkeypatch.setattr(formulating, "lies_in_columns", lambda *_: False)
    with pytest.raises(AssertionError):
        assert_result_as_compiled(name)


def test_a_sum_that_is_a_result_stands_in_its_buffer_once_it_is_reduced():
    def gradients(w, x):
        return jax.grad(lambda w: ((x @ w) ** 2).sum())(w)

    fixed = {"w": P(), "x": P("x")}
    found = plan(gradients, f32(512, 512), f32(64, 512), mesh=mesh_of({"x": 8}), fixed=fixed).verify()
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.1)


def checked(x):
    checkify.debug_check(x[0, 0] < 100, "x is large")
    return x + 1


IDLE = {  # on the devices of a batch: nothing is moved for these
    "sums without elements": lambda x: (x + 1, (x.T @ x[:, :0]).sum(0), (x.T @ x[:, :0]).sum()),
    "a check": checked,
    "a layout": lambda x: with_layout_constraint(x + 1, Layout((0, 1))),
    "a branch": lambda x: jax.lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos),
}


@pytest.mark.parametrize("name", IDLE)
def test_what_compiled_programs_do_not_do_is_not_counted(name):
    found = plan(IDLE[name], f32(512, 512), mesh=mesh_of({"x": 8}), fixed={"*": P("x")}).verify()
    assert not found.predicted and not found.actual
    assert found.predicted_peak == pytest.approx(found.actual_peak, rel=0.01)


MANY_KEYS = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 2**13))
ENCRYPTED = {
    "two keys of each": lambda key: jax.random.key_data(jax.random.split(key, 2)),
    "eight keys of each": lambda key: jax.random.key_data(jax.random.split(key, 8)),
    "another key": lambda key: jax.random.key_data(jax.random.fold_in(key, 3)),
    "bits": lambda key: jax.random.bits(key),
}


@pytest.mark.parametrize("name", ENCRYPTED)
def test_ciphers_of_many_keys_hold_their_words(name):
    assert_peak_as_compiled(jax.vmap(ENCRYPTED[name]), MANY_KEYS, rel=0.06, fixed={"*": P("x")})


def test_a_cipher_whose_keys_hold_nothing_is_caught(monkeypatch):
    monkeypatch.setattr(workspaces, "_KEYS_APART", 0)
    with pytest.raises(AssertionError):
        assert_peak_as_compiled(jax.vmap(ENCRYPTED["bits"]), MANY_KEYS, rel=0.06, fixed={"*": P("x")})


EMPTY = {
    "sort": lambda x: jnp.sort(x, 1),
    "product": lambda x: x @ x.T,
    "triangular_solve": lambda x: jax.lax.linalg.triangular_solve(x[:, :0].T @ x[:, :0], x[:, :0].T, left_side=True),
    "top_k": lambda x: jax.lax.top_k(x, min(2, x.shape[1])),
    "lu": lambda x: jax.lax.linalg.lu(x)[0],
    "cholesky": lambda x: jax.lax.linalg.cholesky(x.T @ x),
    "random_bits": lambda x: jax.random.bits(jax.random.key(0), x.shape),
    "scatter": lambda x: x.at[jnp.zeros(3, int) % 8].set(1.0, mode="drop"),
    "fft": lambda x: jnp.fft.fft(x, axis=0) if x.shape[0] else x,
}


@pytest.mark.parametrize("backend", [CPU, H100, V5E], ids=["cpu", "gpu", "tpu"])
@pytest.mark.parametrize("shape", [(8, 0), (0, 8)], ids=str)
@pytest.mark.parametrize("name", EMPTY)
def test_operations_of_empty_arrays_hold_nothing(name, shape, backend):
    program = trace(EMPTY[name], (f32(*shape),), {})
    found = formulating.formulate(program, rules_for(program), {"x": 4}, topology("v5e:2x2"), backend=backend)
    assert all(np.isfinite(costs).all() for costs in found.problem.costs)
