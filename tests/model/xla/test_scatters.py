"""What libtpu makes of a sum over all devices of which each gets a slice."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, NamedSharding
from jax.sharding import PartitionSpec as P
from programs import f32

from autoshard import plan
from autoshard.compiled.collectives import read_collectives
from autoshard.mesh.targets import target_mesh
from autoshard.model.groups import Group
from autoshard.model.xla import scatters
from autoshard.model.xla.backends import backend_of
from autoshard.model.xla.scatters import merges_slices, sent_slices
from autoshard.operations import reduce_scatter as form
from autoshard.operations.sums import scattered_sum
from autoshard.plans import chosen_options

MESHES = [("v5e:2x4", {"x": 8}), ("v5e:2x4", {"x": 2, "y": 4}), ("v5e:4x4", {"x": 16}), ("v5p:2x2x1", {"x": 4})]
MESHES += [("v5p:2x2x2", {"x": 8})]


@pytest.mark.parametrize("machine, axes", MESHES)
def test_sums_over_all_devices(machine, axes):
    pytest.importorskip("libtpu")
    mesh = target_mesh(machine, axes)
    split, whole = NamedSharding(mesh, P(tuple(axes))), NamedSharding(mesh, P())

    def sliced(x, y):
        return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x.T @ y, whole), split)

    shapes = [jax.ShapeDtypeStruct((64 * mesh.size, 256), jnp.float32)] * 2
    hlo = jax.jit(sliced, in_shardings=split, out_shardings=split).lower(*shapes).compile().as_text()
    found = {one.kind for one in read_collectives(hlo, axes, device_ids=[one.id for one in mesh.devices.flat])}
    abstract = AbstractMesh(tuple(axes.values()), tuple(axes))
    assert math.prod(axes.values()) == mesh.size
    merged = merges_slices(tuple(axes), jnp.float32, axes, backend_of(abstract, machine))
    assert found == {"reduce_scatter" if merged else "all_reduce"}


def test_what_shards_scatter_is_predicted():
    """A part of a matrix over some devices, over all of them, of narrow rows, and over all in the form that is ours."""
    pytest.importorskip("libtpu")
    machine, axes = "v5p:2x2x2", {"x": 4, "y": 2}
    mesh = target_mesh(machine, axes)

    def local(wide, narrow, cube, experts):
        scattered = functools.partial(jax.lax.psum_scatter, scatter_dimension=0, tiled=True)
        ours = scattered_sum(experts, ("x", "y"), 1, axes)
        return scattered(wide, "x"), scattered(narrow, "x"), scattered(cube, ("x", "y")), ours

    shapes = (64, 256), (64, 32), (128, 256), (4, 64, 256)
    everywhere = P(("x", "y"))
    region = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=everywhere,
        out_specs=(everywhere, everywhere, everywhere, P(None, ("x", "y"))),
        check_vma=False,
    )
    arrays = [jax.ShapeDtypeStruct((8 * rows, *rest), jnp.float32) for rows, *rest in shapes]
    found = plan(region, *arrays, mesh=mesh, topology=machine).verify()
    assert found.predicted == found.actual, str(found)
    kinds = {kind for kind, _ in found.actual}
    assert kinds == {"all_reduce", "reduce_scatter"}


# One device's part of a sum, and the dim that is cut: few rows, few columns, one dim, and whole matrices.
PARTS = [
    ((1, 8192), 1),
    ((2, 8192), 1),
    ((16, 1024), 1),
    ((16, 128), 0),
    ((8, 4096), 0),
    ((4, 1664), 1),
]
PARTS += [
    ((4096, 64), 1),
    ((16384,), 0),
    ((1024,), 0),
    ((128, 256), 0),
    ((80, 256), 0),
    ((2, 64, 128), 1),
    ((1024, 8), 0),
    ((1024, 4), 0),
]
PADDED = [  # slices whose rows do not fill the tiles of equal parts, of wide matrices
    ((1600, 50257), 0),
    ((1600, 4800), 0),
    ((4800, 1600), 1),
    ((1600, 1600), 0),
    ((14336, 4096), 0),
    ((4160, 4864), 0),
    ((320, 50257), 0),
    ((72, 1600), 0),
]


CUT = [  # wide matrices whose columns fit in fast memory in equal pieces, or do not, the last one turned
    ((1024, 239 * 128), 0),
    ((1024, 235 * 128), 0),
    ((1024, 437 * 128), 0),
    ((1024, 50265), 0),
]


def scattered(mesh, shape: tuple[int, ...], dim: int, dtype=jnp.float32):
    """The sum over a mesh axis of what its devices have, each with a slice of it."""
    local = jax.shard_map(
        lambda x: form.reduce_scatter(x[0], dim, ((("x",), None),), ()),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P(*(("x",) if at == dim else None for at in range(len(shape)))),
        check_vma=False,
    )
    sharding = NamedSharding(mesh, P("x"))
    return jax.jit(local), jax.ShapeDtypeStruct((mesh.shape["x"], *shape), dtype, sharding=sharding)


def disagreements(
    machine: str, axes: dict[str, int], parts=PARTS, dtypes=(jnp.float32, jnp.bfloat16, jnp.complex64)
) -> list:
    mesh, found = target_mesh(machine, axes), []
    ids, backend = [one.id for one in mesh.devices.flat], backend_of(mesh, machine)
    for shape, dim in parts:
        for dtype in dtypes:
            summed, array = scattered(mesh, shape, dim, dtype)
            hlo = summed.lower(array).compile().as_text()
            compiled = collections.Counter()
            for one in read_collectives(hlo, axes, device_ids=ids):
                compiled[one.kind] += one.bytes
            if compiled != predicted_bytes(shape, dim, axes["x"], dtype, backend):
                found.append((shape, dim, dtype.__name__, compiled))
    return found


def predicted_bytes(shape, dim, devices, dtype, backend) -> dict[str, int]:
    """Bytes of each kind of collective that a sum becomes."""
    itemsize = jnp.dtype(dtype).itemsize
    sent = sent_slices(shape, dim, [devices], dtype, backend)
    if sent is None:
        return {"all_reduce": math.prod(shape) * itemsize}
    ((elements, exchanged),) = sent
    return collections.Counter(reduce_scatter=elements * itemsize, collective_permute=exchanged * itemsize)


@pytest.mark.parametrize(
    "machine, axes", [("v5e:2x4", {"x": 8}), ("v5e:2x4", {"x": 4, "y": 2}), ("v5p:2x2x2", {"x": 4, "y": 2})]
)
def test_the_least_slices(machine, axes):
    pytest.importorskip("libtpu")
    assert not disagreements(machine, axes)


def test_numbers_that_are_summed_whole(monkeypatch):
    pytest.importorskip("libtpu")
    machine, axes, dtypes = "v5e:2x4", {"x": 8}, (jnp.float16, jnp.int32)
    assert not disagreements(machine, axes, [((128, 256), 0)], dtypes)
    monkeypatch.setattr(scatters, "is_scattered", lambda dtype, backend: True)
    assert len(disagreements(machine, axes, [((128, 256), 0)], dtypes)) == len(dtypes)


@pytest.mark.parametrize("machine, axes", [("v5e:2x4", {"x": 8}), ("v5e:2x4", {"x": 4, "y": 2})])
def test_slices_that_are_padded(machine, axes):
    pytest.importorskip("libtpu")
    assert not disagreements(machine, axes, PADDED)


@pytest.mark.parametrize("machine, axes", [("v5e:2x4", {"x": 8}), ("v5e:2x2", {"x": 4}), ("v5p:2x2x1", {"x": 4})])
def test_columns_that_are_cut(machine, axes):
    pytest.importorskip("libtpu")
    assert not disagreements(machine, axes, CUT, (jnp.bfloat16,))


@pytest.mark.parametrize("fault", ["_MOST_PIECES", "_LEAST_TURNED"])
def test_columns_that_cannot_be_cut_are_caught(fault, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setattr(form, fault, {"_MOST_PIECES": 500, "_LEAST_TURNED": 1}[fault])
    cut = CUT[0] if fault == "_MOST_PIECES" else CUT[3]
    assert disagreements("v5e:2x4", {"x": 8}, [cut], (jnp.float32,))


def test_a_slice_that_fills_no_tiles_is_caught(monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setattr("autoshard.model.xla.scatters.fills_tiles", lambda *_: True)
    assert disagreements("v5e:2x4", {"x": 8})


def test_padding_that_is_forgotten_is_caught(monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setattr("autoshard.model.xla.scatters.scattered_rows", lambda rows, *_: rows)
    assert disagreements("v5e:2x4", {"x": 8}, PADDED[3:4], (jnp.float32,))


def with_rows_added(sizes: dict[str, int], machine: str, words: int, width: int) -> set[str]:
    """The kinds of collectives of a table's sum, split by columns, to which rows are added at computed positions."""
    mesh = target_mesh(machine, sizes)
    split = NamedSharding(mesh, P(None, tuple(sizes)))

    def local(rows, ids, scores, inputs):
        summed = scattered_sum(jnp.einsum("nw,nd->wd", scores, inputs), tuple(sizes), 1, sizes)
        return summed + jnp.zeros_like(summed).at[ids].add(rows)

    parts = P(None, tuple(sizes)), P(), P(tuple(sizes)), P(tuple(sizes))
    table = jax.shard_map(local, mesh=mesh, in_specs=parts, out_specs=split.spec, check_vma=False)
    shapes = (1024, width), (1024,), (1024, words), (1024, width)
    dtypes = jnp.float32, jnp.int32, jnp.float32, jnp.float32
    put = [NamedSharding(mesh, spec) for spec in parts]
    arrays = [jax.ShapeDtypeStruct(*one, sharding=at) for *one, at in zip(shapes, dtypes, put, strict=True)]
    hlo = jax.jit(table, out_shardings=split).lower(*arrays).compile().as_text()
    return {one.kind for one in read_collectives(hlo, sizes, device_ids=[one.id for one in mesh.devices.flat])}


@pytest.mark.parametrize("words, width", [(4096, 256), (6272, 768)])
def test_a_tied_table_whose_columns_fill_no_lanes(words, width, monkeypatch):
    """The gradient of a tied embedding: rows are added to what is scattered, which libtpu then turns."""
    pytest.importorskip("libtpu")
    assert with_rows_added({"x": 4, "y": 2}, "v5e:2x4", words, width) == {"reduce_scatter"}
    monkeypatch.setattr(form, "tiled_width", lambda *_, **__: 0)
    assert "all_reduce" in with_rows_added({"x": 4, "y": 2}, "v5e:2x4", words, width)


@pytest.mark.parametrize("shape, dim", PARTS)
def test_any_form_sums_up(shape, dim):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    summed, array = scattered(mesh, shape, dim)
    parts = np.random.default_rng(0).integers(-9, 9, array.shape).astype(np.float32)
    np.testing.assert_array_equal(summed(parts), parts.sum(axis=0))


def test_sums_that_updates_slice_are_scattered(monkeypatch):
    """XLA combines the gradients' all_reduces, and scatters them, as every update reads a slice."""
    pytest.importorskip("libtpu")
    optimizer, axes, array = optax.adam(1e-3), ("data", "model"), jax.ShapeDtypeStruct
    weights = [{"up": array((64, 512), jnp.float32), "down": array((512, 64), jnp.float32)}] * 4

    def step(state, x):
        def loss(weights):
            h = x
            for layer in weights:
                up, down = (layer[name].astype(jnp.bfloat16) for name in ("up", "down"))
                h = h + jax.nn.gelu(h @ up) @ down
            return jnp.mean(h.astype(jnp.float32) ** 2)

        updates, moments = optimizer.update(jax.grad(loss)(state[0]), state[1], state[0])
        return optax.apply_updates(state[0], updates), moments

    state, batch = (weights, jax.eval_shape(optimizer.init, weights)), array((1024, 64), jnp.bfloat16)
    fixed = {"state/0/*/up": P(axes), "state/0/*/down": P(None, axes)}
    how = {"mesh": AbstractMesh((2, 4), axes), "topology": "v5e:2x4", "donate_argnums": 0, "fixed": fixed}
    made = plan(step, state, batch, **how)
    assert made.verify().collectives_agree
    assert {one.kind for one in made.predicted.collectives} == {"all_gather", "reduce_scatter"}
    monkeypatch.setattr(chosen_options, "merged_with_slice", lambda made, finish, *_: [finish])
    assert not plan(step, state, batch, **how).verify().collectives_agree


def test_totals_of_loops_are_scattered(monkeypatch):
    """What a loop adds up is reduced after it, in the bits of the total, and scattered if all want a slice of it."""
    pytest.importorskip("libtpu")

    def step(weight, batches):
        def turn(total, x):
            def loss(weight):
                return jnp.mean(jnp.tanh(x @ weight.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

            return total + jax.grad(loss)(weight), None

        return weight - jax.lax.scan(turn, jnp.zeros_like(weight), batches)[0]

    axes = "data", "model"
    fixed = {"weight": P(axes), "batches": P(None, axes)}
    how = {"mesh": AbstractMesh((2, 4), axes), "topology": "v5e:2x4", "donate_argnums": 0, "fixed": fixed}
    shapes = f32(512, 512), jax.ShapeDtypeStruct((4, 2048, 512), jnp.bfloat16)
    made = plan(step, *shapes, **how)
    found = made.verify()
    assert found.collectives_agree
    (scattered,) = (one for one in made.predicted.collectives if one.kind == "reduce_scatter")
    assert (scattered.count, scattered.bytes) == (1, 4 * 512 * 512 // 8)
    assert "emitter.py" not in str(found)
    faults = (
        (Group, "reduced", lambda group, output, **_: group.outputs[output].value),
        (chosen_options.ChosenOptions, "stays", lambda *_: False),
    )
    for fault in faults:
        with monkeypatch.context() as patch:
            patch.setattr(*fault)
            assert plan(step, *shapes, **how).predicted.collectives != made.predicted.collectives
