"""What XLA's partitioner computes wrongly or refuses, and that no strategy of ours falls for it.

Each row is the smallest program known, with shardings under which a plain `jax.jit` goes wrong on CPU devices. A row
that no longer fails there has been mended in XLA: what we do instead can go. `docs/xla_faults.md` lists the same rows.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import Case, integers, normal
from equality import assert_equal
from executed import mismatches, operations_of
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips
from sweeps import some

from autoshard import ConflictError, autoshard, plan
from autoshard.lower.on_shards import _halved
from autoshard.lower.xla_faults import _upper_halves

PAGE = Path(__file__).parents[2] / "docs" / "xla_faults.md"
GROUPED = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "feature_group_count": 3}


def kernel_gradient(images, cotangent):
    """Of a grouped convolution, by its kernel."""

    def convolved(kernel):
        return lax.conv_general_dilated(images, kernel, (1, 1), "SAME", **GROUPED)

    return jax.linear_transpose(convolved, jax.ShapeDtypeStruct((3, 3, 1, 3), jnp.float32))(cotangent)[0]


def wide_window(image, kernel):
    """The gradient of the gradient of a depthwise convolution: a window of 8 x 16 over a padded image of 3 x 3."""
    numbers = lax.ConvDimensionNumbers(lhs_spec=(2, 3, 0, 1), rhs_spec=(0, 3, 1, 2), out_spec=(3, 0, 1, 2))
    pads = ((6, 6), (14, 14))
    return lax.conv_general_dilated(image, kernel, (1, 1), pads, dimension_numbers=numbers, feature_group_count=8)


def log_sum(x):
    return lax.reduce(x, np.array(-jnp.inf, x.dtype), jnp.logaddexp, (0,))


@dataclass(frozen=True)
class Fault:
    """A program that a plain `jax.jit` with these shardings gets wrong."""

    name: str
    fn: Callable
    args: tuple
    specs: tuple[P, ...]  # of the arguments
    out: P
    mesh: str = "x=8"
    raises: str = ""  # the error, if it is one
    mended: tuple[int, ...] = (10**6,)  # the first release of JAX seen to be right

    def under_jit(self):
        mesh = devices(self.mesh)
        shardings = tuple(NamedSharding(mesh, spec) for spec in self.specs)
        jitted = jax.jit(self.fn, in_shardings=shardings, out_shardings=NamedSharding(mesh, self.out))
        return jax.block_until_ready(jitted(*self.args))

    def show(self) -> None:
        """Fails where XLA is right, or where it is wrong again."""
        if jax.__version_info__ >= self.mended:
            assert_equal(self.under_jit(), self.fn(*self.args))
        elif self.raises:
            with pytest.raises(jax.errors.JaxRuntimeError, match=self.raises):
                self.under_jit()
        else:
            with pytest.raises(AssertionError):
                assert_equal(self.under_jit(), self.fn(*self.args))


def devices(mesh: str):
    return mesh_of({axis: int(size) for axis, size in (part.split("=") for part in mesh.split(", "))})


UNSUPPORTED = "Unsupported reduction computation"
INTEGERS, ROW = integers(3, 8), P("x")
BITS = np.uint32(2654435761) * np.arange(8, dtype=np.uint32)  # of all sizes
FAULTS = (
    Fault("kernel gradient of a grouped convolution", kernel_gradient, (normal(2, 2, 2, 3), normal(2, 2, 2, 3, seed=1)),
          (ROW, ROW), P(), mesh="x=2, y=4"),
    Fault("window larger than a grouped image", wide_window, (normal(3, 3, 1, 8), normal(32, 8, 16, 1)),
          (P(None, None, None, "x"), ROW), ROW),
    Fault("initial value", lambda x: lax.reduce(x, np.float32(3), lambda a, b: a + b, (0,)), (normal(8),), (ROW,), P()),
    Fault("update out of bounds", lambda x, i: lax.dynamic_update_slice(x, jnp.ones(1), (i,)), (normal(8), np.int32(9)),
          (ROW, P()), ROW),
    Fault("one update of a slice", lambda x, i: jnp.sort(x).at[i].set(0.0), (normal(16), np.int32(5)), (P(), P()), ROW,
          mended=(0, 12)),
    Fault("one update of each row", lambda x, i: jax.vmap(lambda row, i: row.at[i].set(0.0))(jnp.sort(x), i),
          (normal(2, 16), np.int32([5, 9])), (P("y", "x"), P()), P("y", "x"), mesh="x=4, y=2", mended=(0, 12)),
    Fault("and of integers", lambda x: lax.reduce_and(x, (0,)), (INTEGERS,), (ROW,), P(), raises=UNSUPPORTED),
    Fault("or of integers", lambda x: lax.reduce_or(x, (0,)), (INTEGERS,), (ROW,), P(), raises=UNSUPPORTED),
    Fault("xor", lambda x: lax.reduce_xor(x, (0,)), (INTEGERS > 0,), (ROW,), P(), raises=UNSUPPORTED),
    Fault("maximum of complex numbers", lambda x: jnp.max(x), (INTEGERS.astype(jnp.complex64),), (ROW,), P(),
          raises=UNSUPPORTED),
    Fault("transform after a transpose", lambda x: jnp.fft.fft(x.transpose(0, 2, 1)),
          (normal(8, 3, 4).astype(jnp.complex64),), (ROW,), P(), raises="RET_CHECK"),
    Fault("reduction of one's own", log_sum, (normal(8),), (ROW,), P(), raises=UNSUPPORTED),
    Fault("upper halves of products", lax.mulhi, (BITS, BITS[::-1]), (ROW, ROW), ROW, raises="Unable to convert MHLO"),
)  # fmt: skip
IDS = [fault.name for fault in FAULTS]

# What ends the process, or overwrites its memory: scripts that end in an error.
SPLIT = """
import jax; jax.config.update('jax_num_cpu_devices', 8); import jax.numpy as jnp
mesh = jax.make_mesh((8,), ('x',), axis_types=(jax.sharding.AxisType.Auto,))
split, whole = jax.NamedSharding(mesh, jax.P('x')), jax.NamedSharding(mesh, jax.P())
"""
LOG_SUM = """
log_sum = lambda x: jax.lax.reduce(x, jnp.bfloat16(-jnp.inf), jnp.logaddexp, (0,))
jax.jit(log_sum, in_shardings=split)(jnp.ones(8, jnp.bfloat16))
"""
TWO_BITS = """
ones = jnp.ones(8, jnp.uint2)
assert (jax.jit(lambda x: x, out_shardings=whole)(jax.device_put(ones, split)).astype(jnp.int32) == 1).all()
"""
UNLIKE_AXES = """
import numpy as np
six = jax.sharding.Mesh(np.array(jax.devices()[:6]).reshape(3, 2), ('x', 'y'))
before, after = jax.NamedSharding(six, jax.P('x')), jax.NamedSharding(six, jax.P(None, ('x', 'y')))
jax.jit(lambda x: 2 * x, in_shardings=before, out_shardings=after)(jnp.ones((6, 6)))
"""
SCRIPTS = {"reduction of one's own in bfloat16": LOG_SUM, "integers of two bits": TWO_BITS}
SINCE = {"axes of unlike sizes": UNLIKE_AXES}  # JAX 0.11.1


@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_xla_still_gets_it_wrong(fault):
    fault.show()


@pytest.mark.parametrize("mesh", some(["x=8", "x=4, y=2", "x=2, y=2, z=2"], "x=4, y=2"))
@pytest.mark.parametrize("fault", FAULTS, ids=IDS)
def test_no_strategy_of_ours_does(fault, mesh):
    assert_right(Case(fault.name, "", fault.fn, tuple(map(jnp.asarray, fault.args))), mesh)


def assert_right(case: Case, mesh: str) -> None:
    """Every strategy of every operation of the program is right."""
    found = [pair for operation in operations_of(case).values() for pair in mismatches(operation, devices(mesh))]
    assert found and not [pair for pair in found if pair[1]]


@pytest.mark.parametrize("name", SCRIPTS)
def test_xla_still_ends_the_process(name):
    ended = subprocess.run([sys.executable, "-c", SPLIT + SCRIPTS[name]], capture_output=True, text=True)
    assert ended.returncode, "XLA has mended this"


@pytest.mark.parametrize("name", SINCE)
def test_xla_ends_the_process_since_a_release(name):
    ended = subprocess.run([sys.executable, "-c", SPLIT + SINCE[name]], capture_output=True, text=True)
    assert bool(ended.returncode) == (jax.__version_info__ >= (0, 11, 1)), "XLA has mended this"


def test_such_a_script_can_pass():
    subprocess.run([sys.executable, "-c", SPLIT + TWO_BITS.replace("uint2", "uint4")], check=True)


def test_a_reduction_of_ones_own_in_bfloat16():
    assert_right(Case("own", "", log_sum, (normal(8).astype(jnp.bfloat16),)), "x=8")


@pytest.mark.parametrize(
    "fn", [lambda x: x, lambda x: x + x, lambda x: lax.reduce_max(x, (0,)), lambda x: x.astype(jnp.float32).T]
)
def test_integers_of_two_bits_stay_whole(fn):
    mesh, x = devices("x=4, y=2"), integers(2, 8, 16).astype(jnp.uint2)
    step = autoshard(fn, mesh=mesh, topology=slow_chips(mesh.shape))
    assert_equal(step(x), jax.jit(fn)(x))
    assert step.plan(x).in_shardings[0].spec == P()
    with pytest.raises(ConflictError, match="two bits"):
        autoshard(fn, mesh=mesh, fixed={"x": P("x")}).plan(x)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32"])
def test_upper_halves_of_products(dtype):
    least, most = np.iinfo(dtype).min, np.iinfo(dtype).max
    some = np.array([least, least + 1, most // 3, most - 1, most, 0, 1, 77], dtype)
    a, b = np.repeat(some, len(some)), np.tile(some, len(some))
    expected = (a.astype(object) * b.astype(object)) >> np.iinfo(dtype).bits
    assert (np.asarray(_upper_halves(jnp.asarray(a), jnp.asarray(b))) == expected).all()


def test_xla_still_loses_nan_in_maxima():
    x = jnp.array([0, 1, jnp.nan, 3, 4, 5, 6, 7])
    assert Fault("", jnp.max, (x,), (ROW,), P()).under_jit() == 7, "XLA has mended this"
    assert jnp.isnan(jnp.max(x))


def test_own_reductions_of_two_arrays_start_once():
    """The sums and the products of eight pairs, from values that are not neutral."""

    def fold(x, y):
        start = np.float32(3), np.float32(2)
        return lax.reduce((x, y), start, lambda one, other: (one[0] + other[0], one[1] * other[1]), (0, 2))

    assert_right(Case("sums and products", "", fold, (normal(4, 3, 8), normal(4, 3, 8, seed=1))), "x=4, y=2")


def test_transforms_gather_no_batch():
    mesh, x = devices("x=4, y=2"), normal(8, 4, 8)
    step = autoshard(lambda x: jnp.fft.fft(x.transpose(0, 2, 1)), mesh=mesh, topology=slow_chips(mesh.shape))
    assert step.plan(x).in_shardings[0].spec != P()
    assert not step.plan(x).verify().actual


def test_gradients_of_pools_gather_no_batch():
    def pooled(x):
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2), (1, 1, 1), "VALID").astype(jnp.float32).sum()

    mesh, x = devices("x=8"), normal(4096, 4, 6).astype(jnp.float16)
    made = plan(jax.grad(pooled), x, mesh=mesh, topology=slow_chips(mesh.shape))
    assert made.in_shardings[0].spec != P()
    found = made.verify()
    assert not found.actual and found.predicted_peak > 0.8 * found.actual_peak


@pytest.mark.parametrize("dims", ["x y", "y x"])
def test_one_update_of_a_slice(dims):
    """Two rows are updated, which stay whole, and then one element, both of whose dims are split."""

    def updated(x, i):
        return lax.dynamic_update_slice_in_dim(x, 2 * x[:2], i - 1, axis=0).at[i, i - 1].set(0.0)

    mesh, x = devices("x=4, y=2"), normal(4, 4)
    step = autoshard(updated, mesh=mesh, topology=slow_chips(mesh.shape), fixed={"x": P(*dims.split())})
    for i in range(1, 4):
        assert_equal(step(x, i), jax.jit(updated)(x, i))


@pytest.mark.parametrize("update", ["set", "add", "max"])
@pytest.mark.parametrize("rows, dims", [(2, "y x"), (2, "y _"), (4, "x y"), (4, "_ x")])
def test_one_update_of_each_row(rows, dims, update):
    """Devices have a row each, or a part of it."""

    def updated(x, i):
        return jax.vmap(lambda row, i: getattr(row.at[i], update)(9.0))(jnp.sort(x), i)

    mesh, x = devices("x=4, y=2"), normal(rows, 16)
    spec = P(*(None if dim == "_" else dim for dim in dims.split()))
    step = autoshard(updated, mesh=mesh, fixed={"x": spec})
    i = jnp.arange(rows) * 3 + 4
    assert_equal(step(x, i), jax.jit(updated)(x, i))


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 13])
def test_halving_folds_each_element_once(count):
    (total,) = _halved(lambda some, others: [some[0] + others[0]], [2 ** jnp.arange(count)], 1)
    assert total == 2**count - 1


def test_the_page_lists_the_faults():
    assert set(re.findall(r"^\| ([^|]+?) \|", PAGE.read_text(), re.M)) >= {*IDS, *SCRIPTS, *SINCE}


def test_a_right_program_is_no_fault():
    """The oracle sees where XLA is right: sums of real numbers."""
    with pytest.raises(pytest.fail.Exception):
        Fault("sum", lambda x: x.sum(), (normal(8),), (ROW,), P()).show()
