"""Stencils and windows over split grids: numbers of one device, and permutes as predicted."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from equality import assert_equal
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips
from stencil_programs import program
from sweeps import spread

from autoshard import autoshard, verify
from autoshard.lower import halos as lowered_halos
from autoshard.propagation.rules import windows

SEEDS = [(0, (8,)), (8, (8,)), (11, (8,)), (3, (4, 2)), (13, (4, 2)), (33, (4, 2))]
KERNEL = jnp.array([[0, 1.0, 0], [1, -4, 1], [0, 1, 0]])[None, None]


def totals(collectives):
    found = Counter()
    for one in collectives:
        found[one.kind] += one.bytes
    return found


def compiled(plan_or_jitted, *args):
    checked = verify(plan_or_jitted, *args) if args else plan_or_jitted.verify()
    found = Counter()
    for (kind, _), size in checked.actual.items():
        found[kind] += size
    return found


def on(mesh, spec, fn, shape):
    """A step on a grid that is split so, and the grid."""
    u = jax.random.normal(jax.random.key(len(shape)), shape)
    step = autoshard(fn, mesh=mesh, topology=slow_chips(mesh.axis_names), fixed={"*": spec})
    return step, jax.device_put(u, NamedSharding(mesh, spec)), u


@pytest.mark.parametrize("seed, shape", spread(SEEDS, 2))
def test_random_stencils(seed, shape):
    _, run, grid = program(seed)
    mesh = mesh_of(dict(zip("xy", shape, strict=False)))
    spec = P(*mesh.axis_names) if len(grid) >= len(shape) else P(mesh.axis_names)
    step, placed, u = on(mesh, spec, run, grid)
    assert_equal([jax.device_get(step(placed))], [jax.device_get(jax.jit(run)(u))])
    plan = step.plan(placed)
    assert totals(plan.predicted.collectives) == compiled(plan)


def written(u):
    return jnp.roll(jnp.pad(u, ((0, 0), (1, 1))).at[63, 3].set(7.0), 1, 0)[:, 1:-1] + u


def added(u):
    return jnp.roll(jnp.pad(u, ((0, 0), (1, 1))).at[0, 3].add(7.0), -2, 0)[:, 2:] + u


@pytest.mark.parametrize("move", [written, added])
def test_an_element_that_was_updated_wraps_round_the_end(move):
    step, placed, u = on(mesh_of({"data": 8}), P("data"), move, (64, 16))
    assert_equal([jax.device_get(step(placed))], [jax.device_get(jax.jit(move)(u))])


def by_roll(u):
    return jnp.roll(u, 1, 0) + jnp.roll(u, -1, 0) + jnp.roll(u, 1, 1) + jnp.roll(u, -1, 1) - 4 * u


def by_convolution(u):
    return jax.lax.conv_general_dilated(u[None, None], KERNEL, (1, 1), "SAME")[0, 0]


def by_slices(u):
    p = jnp.pad(u, 1)
    return p[2:, 1:-1] + p[:-2, 1:-1] + p[1:-1, 2:] + p[1:-1, :-2] - 4 * u


def by_far_slices(u):
    """Of fourth order: neighbours at distance two come with those at distance one."""
    p, n = jnp.pad(u, 2), len(u)
    rows = [p[2 + i : 2 + i + n, 2:-2] for i in (-2, -1, 1, 2)]
    columns = [p[2:-2, 2 + i : 2 + i + n] for i in (-1, 1)]
    return (16 * (rows[1] + rows[2]) - rows[0] - rows[3]) / 12 + sum(columns) - 4.5 * u


@pytest.mark.parametrize("laplacian, reach", [(by_roll, 1), (by_convolution, 1), (by_slices, 1), (by_far_slices, 2)])
def test_a_simulation_exchanges_rims_alone(laplacian, reach):
    """A wave equation of four turns on 256 x 256: two rims a turn, of 1 KiB a row, as plain jit on a split grid has."""

    def simulate(u):
        def turn(_, uv):
            u, v = uv
            v = v + 0.1 * laplacian(u)
            return u + 0.1 * v, v

        return jax.lax.fori_loop(0, 4, turn, (u, jnp.zeros_like(u)))[0]

    mesh = mesh_of({"data": 8})
    step, placed, u = on(mesh, P("data"), simulate, (256, 256))
    plan = step.plan(placed)
    rims = Counter(collective_permute=4 * 2 * 256 * 4 * reach)
    assert totals(plan.predicted.collectives) == compiled(plan) == rims
    sharding = NamedSharding(mesh, P("data"))
    plain = jax.jit(simulate, in_shardings=sharding, out_shardings=sharding)
    assert compiled(plain, placed).total() >= rims.total()
    assert_equal([jax.device_get(step(placed))], [jax.device_get(jax.jit(simulate)(u))])


def test_a_torus_is_split_along_both_dims():
    """Pads that wrap, one dim after the other: along each, rows come from the other end."""

    def turn(u):
        p = jnp.pad(u, 2, mode="wrap")
        near = p[1:-3, 2:-2] + p[3:-1, 2:-2] + p[2:-2, 1:-3] + p[2:-2, 3:-1] - 4 * u
        return u + near / 5 + p[:-4, 2:-2] / 9 + p[2:-2, 4:] / 7

    mesh = mesh_of({"x": 4, "y": 2})
    step, placed, u = on(mesh, P("x", "y"), turn, (512, 256))
    plan = step.plan(placed)
    assert totals(plan.predicted.collectives) == compiled(plan)
    assert totals(plan.predicted.collectives) == Counter(collective_permute=4 * 2 * 128 * 3)
    assert_equal([jax.device_get(step(placed))], [jax.device_get(jax.jit(turn)(u))])


def convolved(pads, strides=(1, 1), groups=1):
    """A convolution without padding of an array that is padded: of each dim, rows before and after, and how."""

    def convolution(u, w):
        for dim, (before, after, mode) in enumerate(pads, start=2):
            width = [(0, 0)] * u.ndim
            width[dim] = before, after
            u = jnp.pad(u, width, mode=mode)
        return jax.lax.conv_general_dilated(u, w, strides, "VALID", feature_group_count=groups)

    return convolution


TORUS = [(1, 1, "wrap"), (1, 1, "wrap")]
PADDED_CONVOLUTIONS = {  # function of images and kernel, channels of images, shape of the kernel but for its rows
    "a torus": (convolved(TORUS), 4, (8, 4)),
    "zeros": (convolved([(2, 0, "constant"), (1, 1, "constant")]), 4, (8, 4)),
    "a cylinder": (convolved([(1, 1, "constant"), (0, 2, "wrap")]), 4, (8, 4)),
    "every other place": (convolved([(1, 0, "wrap"), (1, 1, "wrap")], strides=(2, 1)), 4, (8, 4)),
    "channel by channel": (convolved(TORUS, groups=4), 4, (4, 1)),
}


def assert_rims_alone(fn, u, w, mesh, spec):
    """Whether a step on a grid that is split so exchanges halos, sums up no more than a kernel, and is right."""
    step = autoshard(fn, mesh=mesh, topology=slow_chips(mesh.axis_names), fixed={"u": spec})
    placed = jax.device_put(u, NamedSharding(mesh, spec))
    plan = step.plan(placed, w)
    found = totals(plan.predicted.collectives)
    assert found == compiled(plan)
    assert found.keys() <= {"collective_permute", "all_reduce"} and found["all_reduce"] <= w.nbytes
    assert_equal([jax.device_get(step(placed, w))], [jax.device_get(jax.jit(fn)(u, w))])


@pytest.mark.parametrize("name", PADDED_CONVOLUTIONS)
def test_a_convolution_over_a_padded_array_exchanges_rims(name):
    """The rows that a pad adds are no rows of the grid: 130 of them are not divided, but 128 are."""
    fn, channels, features = PADDED_CONVOLUTIONS[name]
    u = jax.random.normal(jax.random.key(0), (1, channels, 128, 64))
    w = jax.random.normal(jax.random.key(1), (*features, 3, 3))
    assert_rims_alone(fn, u, w, mesh_of({"x": 4, "y": 2}), P(None, None, "x", "y"))


@pytest.mark.parametrize("mesh, axes", [({"data": 8}, "data"), ({"x": 4, "y": 2}, ("x", "y"))])
def test_the_gradient_of_a_kernel_over_a_padded_array_exchanges_rims(mesh, axes):
    def fn(u, w):
        return jax.grad(lambda w: jnp.sin(convolved(TORUS)(u, w)).sum())(w)

    u, w = jax.random.normal(jax.random.key(0), (1, 1, 256, 64)), jnp.arange(9.0).reshape(1, 1, 3, 3) - 4
    assert_rims_alone(fn, u, w, mesh_of(mesh), P(None, None, axes))


def test_a_copy_that_all_readers_slice_names_their_line():
    """The image is gathered along one axis, and each reader takes its rows of that."""

    def fn(u, w):
        return jax.grad(lambda w: jnp.sin(convolved(TORUS)(u, w)).sum())(w)

    u, w = jax.ShapeDtypeStruct((1, 1, 128, 64), jnp.float32), jax.ShapeDtypeStruct((1, 1, 3, 3), jnp.float32)
    mesh = mesh_of({"x": 4, "y": 2})
    plan = autoshard(fn, mesh=mesh, topology=slow_chips("xy"), fixed={"u": P(None, None, "x", "y")}).plan(u, w)
    lines = {one.kind: one.source for one in plan.predicted.collectives}
    assert "all_gather" in lines and all(line.startswith("test_halos.py") for line in lines.values())


def test_rims_that_do_not_wrap_are_caught(monkeypatch):
    """Where devices at the ends get zeros, numbers differ."""
    monkeypatch.setattr(windows, "WRAPS", "never")
    fn, channels, features = PADDED_CONVOLUTIONS["a torus"]
    mesh, spec = mesh_of({"x": 4, "y": 2}), P(None, None, "x", "y")
    u = jax.random.normal(jax.random.key(0), (1, channels, 128, 64))
    w = jax.random.normal(jax.random.key(1), (*features, 3, 3))
    step = autoshard(fn, mesh=mesh, topology=slow_chips("xy"), fixed={"u": spec})
    with pytest.raises(AssertionError):
        assert_equal([jax.device_get(step(u, w))], [jax.device_get(jax.jit(fn)(u, w))])


def test_what_else_reads_a_padded_array_keeps_it():
    def fn(u, w):
        p = jnp.pad(u, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="wrap")
        return jax.lax.conv_general_dilated(p, w, (1, 1), "VALID"), p.sum(axis=(0, 1))

    u, w = jnp.arange(4.0 * 64 * 32).reshape(1, 4, 64, 32), jnp.ones((4, 4, 3, 3))
    step = autoshard(fn, mesh=mesh_of({"data": 8}), topology=slow_chips(["data"]))
    assert_equal(jax.device_get(step(u, w)), jax.device_get(jax.jit(fn)(u, w)))


def test_a_deep_net_on_one_large_image_is_split_along_its_rows():
    """Convolutions, pools and their gradients; of the batch there is one."""

    def loss(weights, x):
        for w in weights:
            x = jax.nn.relu(jax.lax.conv_general_dilated(x, w, (1, 1), "SAME"))
            x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "VALID")
        return (x**2).mean()

    mesh = mesh_of({"data": 4})
    weights = [jax.random.normal(jax.random.key(i), (3, 3, 3, 3)) for i in range(2)]
    image = jax.random.normal(jax.random.key(9), (1, 3, 128, 128))
    step = autoshard(
        jax.grad(loss), mesh=mesh, topology=slow_chips(mesh.axis_names), fixed={"x": P(None, None, "data")}
    )
    plan = step.plan(weights, image)
    assert totals(plan.predicted.collectives) == compiled(plan)
    assert totals(plan.predicted.collectives).keys() == {"all_reduce", "collective_permute"}
    assert_equal(jax.device_get(step(weights, image)), jax.device_get(jax.jit(jax.grad(loss))(weights, image)))


def test_a_rim_from_the_wrong_side_is_caught(monkeypatch):
    right = lowered_halos.hops

    def turned(rows, size, pieces):
        return [
            replace(hop, pairs=tuple((to, sender) for sender, to in hop.pairs)) for hop in right(rows, size, pieces)
        ]

    monkeypatch.setattr(lowered_halos, "hops", turned)
    step, placed, u = on(mesh_of({"data": 8}), P("data"), by_roll, (64, 64))
    with pytest.raises(AssertionError):
        assert_equal([jax.device_get(step(placed))], [jax.device_get(jax.jit(by_roll)(u))])


@jax.custom_jvp
def same(x):
    return x


same.defjvp(lambda primals, tangents: (*primals, *tangents))
same_backward = jax.custom_vjp(lambda x: x)
same_backward.defvjp(lambda x: (x, None), lambda _, ct: (ct,))
HANDED_ON = {
    "custom_jvp": same,
    "custom_vjp": same_backward,
    "checkpoint": jax.checkpoint(lambda x: (x, jnp.sin(x))[0]),
    "all": lambda x: same(jax.checkpoint(same_backward)(x)),
}


@pytest.mark.parametrize("handed_on", HANDED_ON.values(), ids=HANDED_ON)
def test_what_a_function_hands_on_is_inside_a_stencil_all_the_same(handed_on):
    def rolled(x):
        return jnp.concatenate([handed_on(x[3:]), handed_on(x[:3])])

    def smoothed(x):
        padded = handed_on(jnp.pad(x, ((1, 1), (0, 0))))
        return padded[2:] + padded[:-2] - 2 * x

    def step(x):
        loss = jax.checkpoint(lambda x: jnp.sum(jnp.sin(rolled(x)) ** 3) + jnp.sum(smoothed(x) ** 2))
        return rolled(x), smoothed(x), jax.grad(loss)(x)

    split, placed, u = on(mesh_of({"data": 8}), P("data"), step, (1024, 64))
    assert_equal(list(split(placed)), list(jax.jit(step)(u)))
    assert {one.kind for one in split.plan(placed).predicted.collectives} == {"collective_permute"}
