"""The decorated function under JAX's transformations and contexts: it computes what the jit-ed one does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import io_callback
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips
from sweeps import spread

import autoshard
from autoshard import MeshError

SHAPE = {"x": 4, "y": 2}
MESH = mesh_of(SHAPE)
sharded = functools.partial(autoshard.autoshard, mesh=MESH, topology=slow_chips(SHAPE))

W = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(6, 16, 8)).astype(np.float32)


def assert_same(found, expected):
    """Two results agree in structure, types and numbers."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(ours).str_short() == jax.typeof(theirs).str_short()
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def step(w, x):
    value, gradient = jax.value_and_grad(loss)(w, x)
    return w - 0.1 * gradient, value


# Transformations: from a decorated or jit-ed function to one of W and X.

TRANSFORMED = {
    "vmap": lambda f: jax.vmap(f, (None, 0)),
    "vmap of the first": lambda f: lambda w, x: jax.vmap(f, (0, None))(jnp.stack([w, 2 * w, w.T]), x[0]),
    "vmap, axis named": lambda f: jax.vmap(f, (None, 0), axis_name="rows"),
    "vmap of vmap": lambda f: lambda w, x: jax.vmap(jax.vmap(f, (None, 0)), (None, 0))(w, x.reshape(2, 3, 16, 8)),
    "grad": lambda f: lambda w, x: jax.grad(lambda w: total(f(w, x[0])))(w),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda w, x: total(f(w, x))), (None, 0)),
    "grad of vmap": lambda f: jax.grad(lambda w, x: total(jax.vmap(f, (None, 0))(w, x))),
    "jit of vmap of grad": lambda f: jax.jit(jax.vmap(jax.grad(lambda w, x: total(f(w, x))), (None, 0))),
    "hessian": lambda f: lambda w, x: jax.hessian(lambda w: total(f(w, x[0])))(w),
    "jvp": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x[0]), (w,), (2 * w,)),
    "linearize": lambda f: lambda w, x: jax.linearize(lambda w: f(w, x[0]), w)[1](w),
    "checkpoint": lambda f: lambda w, x: jax.grad(jax.checkpoint(lambda w: total(f(w, x[0]))))(w),
    "scan": lambda f: lambda w, x: lax.scan(lambda w, row: (w, f(w, row)), w, x),
    "jit of scan": lambda f: jax.jit(lambda w, x: lax.scan(lambda w, row: (w, f(w, row)), w, x)),
    "while": lambda f: (
        lambda w, x: lax.fori_loop(0, 3, lambda i, w: w - jax.grad(lambda w: total(f(w, jnp.asarray(x)[i])))(w), w)
    ),
    "cond": lambda f: lambda w, x: lax.cond(w[0, 0] > 0, lambda: f(w, x[0]), lambda: f(w, x[1])),
    "pmap": lambda f: jax.pmap(f, in_axes=(None, 0), devices=jax.devices()[:6]),
    "shard_map": lambda f: jax.shard_map(f, mesh=MESH, in_specs=(P(), P()), out_specs=P(), check_vma=False),
}


def total(results):
    return sum(map(jnp.sum, jax.tree.leaves(results)))


TRANSFORMED_OF = [*((name, loss) for name in TRANSFORMED), *((name, step) for name in TRANSFORMED)]


@pytest.mark.parametrize("name, fn", spread(TRANSFORMED_OF, 2), ids=lambda one: getattr(one, "__name__", one))
def test_transformations_of_the_decorated_function(name, fn):
    transform = TRANSFORMED[name]
    assert_same(transform(sharded(fn))(W, X), transform(jax.jit(fn))(W, X))


PLACES = {
    "one device": lambda x: jax.device_put(x, jax.devices()[3]),
    "the mesh": lambda x: jax.device_put(x, NamedSharding(MESH, P(None, "x"))),
    "Explicit axes": lambda x: jax.device_put(x, NamedSharding(mesh_of(SHAPE, AxisType.Explicit), P(None, "x"))),
}


@pytest.mark.parametrize("name", ["vmap", "grad", "vmap of grad", "hessian"])
@pytest.mark.parametrize("place", ["one device", "the mesh"])
def test_arrays_may_lie_anywhere_when_they_are_transformed(place, name):
    transform = TRANSFORMED[name]
    assert_same(transform(sharded(loss))(W, PLACES[place](X)), transform(jax.jit(loss))(W, X))


def test_calls_and_transformations_take_turns():
    decorated, jitted = sharded(loss), jax.jit(loss)
    placed = jax.device_put((W, X[0]), decorated.plan(W, X[0]).in_shardings)
    for _ in range(3):
        assert_same(decorated(*placed), jitted(W, X[0]))
        assert decorated._last is not None  # the next call asks jax.jit first
        for name in ("vmap", "grad", "hessian", "scan", "pmap"):
            assert_same(TRANSFORMED[name](decorated)(W, X), TRANSFORMED[name](jitted)(W, X))


# Tracers from outside.


def closing_over(decorate):
    def outer(w, x):
        inner = decorate(lambda row: loss(w, row))
        return inner(x[0]) + inner(x[1])

    return outer


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))], ids=["jit", "grad", "both"])
def test_a_tracer_may_be_closed_over(transform):
    assert_same(transform(closing_over(sharded))(W, X), transform(closing_over(jax.jit))(W, X))


# Around a call whose own arguments are no tracers.
AROUND = {
    "jit": lambda f: jax.jit(f)(),
    "scan": lambda f: lax.scan(lambda carry, _: (carry, f()), 0, None, length=2)[1],
    "cond": lambda f: lax.cond(jnp.bool_(True), f, f),
    "checkpoint": lambda f: jax.checkpoint(f)(),
    "vmap": lambda f: jax.vmap(lambda _: f())(jnp.ones(2)),
    "grad": lambda f: jax.grad(lambda s: s * f().sum())(1.0),
}


@pytest.mark.parametrize("name", AROUND)
def test_concrete_arrays_may_be_donated_while_another_function_is_traced(name):
    w = jnp.asarray(W)
    decorated = sharded(lambda w, n: w * n, donate_argnums=0, static_argnums=1)
    for _ in range(2):  # the second call finds it planned
        assert_same(AROUND[name](lambda: decorated(w, 2)), AROUND[name](lambda: jax.jit(lambda w: w * 2)(w)))
    np.testing.assert_array_equal(w, W)


def test_a_tracer_that_was_closed_over_is_not_kept():
    seen, held = [], {}
    decorated = sharded(lambda x: loss(held["w"], x))

    def outer(w, x):
        held["w"] = w
        return decorated(x)

    for n in range(3):
        seen.append(jax.jit(lambda w, x: outer(w, x))(n * W, X[0]))  # another function, so that it is traced
    assert_same(seen, [jax.jit(loss)(n * W, X[0]) for n in range(3)])


def test_a_leaked_tracer_is_the_error_of_jit():
    leaked = []
    jax.jit(lambda x: (leaked.append(x), x)[1])(1.0)
    for call in (lambda: sharded(lambda x: x + leaked[0])(X), lambda: sharded(jnp.add)(X, leaked[0])):
        with pytest.raises(jax.errors.UnexpectedTracerError, match="intermediate value with type float32"):
            call()


@jax.custom_jvp
def steep(x):
    return jnp.tanh(x)


steep.defjvp(lambda primals, tangents: (steep(*primals), 7 * tangents[0]))


def with_odd_gradient(**options):
    @jax.custom_vjp
    def odd(x, w):
        return jnp.sin(x @ w)

    def forward(x, w):  # another number, so that one sees which of the two is run
        return odd(x, w) + 100 * bool(options), (x, w)

    odd.defvjp(forward, lambda kept, g: (2 * g @ kept[1].T, 3 * kept[0].T @ g), **options)
    return odd


odd, remat_odd = with_odd_gradient(), with_odd_gradient(optimize_remat=True)
layer = lambda x, w: (odd(steep(x), w), None)  # noqa: E731

CUSTOM = {
    "plain": lambda w, x: layer(x, w)[0].sum(),
    "scan": lambda w, x: lax.scan(lambda c, _: layer(c, w), x, length=3)[0].sum(),
    "scan of checkpoint": lambda w, x: lax.scan(jax.checkpoint(lambda c, _: layer(c, w)), x, length=3)[0].sum(),
    "cond": lambda w, x: lax.cond(x[0, 0] > 9, lambda: layer(x, w)[0], lambda: steep(x)).sum(),
    "checkpoint": lambda w, x: jax.checkpoint(lambda x: layer(x, w)[0])(x).sum(),
}


@pytest.mark.usefixtures("few_objects")  # JAX looks through all that the collector knows, again and again
def test_nothing_leaks_of_custom_derivatives():
    """Custom derivatives in loops, branches and checkpoints leave no tracer behind, differentiated outside or in."""
    for fn in map(CUSTOM.get, ("scan of checkpoint", "cond")):
        with jax.checking_leaks():
            assert_same(sharded(fn)(W, X[0]), jax.jit(fn)(W, X[0]))
            assert_same(sharded(jax.grad(fn))(W, X[0]), jax.jit(jax.grad(fn))(W, X[0]))
            assert_same(jax.grad(sharded(fn))(W, X[0]), jax.grad(jax.jit(fn))(W, X[0]))


@pytest.mark.usefixtures("few_objects")
def test_the_check_finds_leaks():
    kept = []

    def leaking(w, x):
        kept.append(w @ x.T)
        return kept[-1].sum()

    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked trace"):
        sharded(leaking)(W, X[0])


OPTIMIZED = {
    "called": lambda w, x: remat_odd(x, w).sum(),
    "gradient that reads nothing of it": jax.value_and_grad(lambda w, x: remat_odd(x, w).sum()),
    "recomputed": jax.value_and_grad(lambda w, x: jax.checkpoint(lambda x: steep(remat_odd(x, w)))(x).sum()),
    "value of a vjp": lambda w, x: jax.vjp(lambda w: remat_odd(x, w), w)[0].sum(),
    "batched": jax.value_and_grad(lambda w, x: jax.vmap(lambda row: remat_odd(row[None], w).sum())(x).sum()),
    "in a scan": jax.value_and_grad(lambda w, x: lax.scan(lambda c, _: (remat_odd(c, w), None), x, length=3)[0].sum()),
}


@pytest.mark.parametrize("name", OPTIMIZED)
def test_a_function_whose_recomputation_is_optimized(name):
    assert_same(sharded(OPTIMIZED[name])(W, X[0]), jax.jit(OPTIMIZED[name])(W, X[0]))


# Tokens and effects.


def test_tokens_are_arguments_and_results():
    decorated = sharded(lambda token, x: (lax.after_all(token), x * 2))
    token, x = lax.create_token(), X
    for _ in range(3):
        token, x = decorated(token, x)
    assert_same(x, jnp.asarray(8 * X))
    assert jax.typeof(token) == jax.typeof(lax.create_token())
    assert "token" in str(decorated.plan(token, X)) and decorated.lower(token, X).compile()


def shown_in_order(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x + 1


def called_in_order(x):
    return x + io_callback(lambda total: total, jax.ShapeDtypeStruct((), jnp.float32), x.sum(), ordered=True)


def test_effects_in_order_need_one_device(capsys):
    one = autoshard.autoshard(shown_in_order, mesh=mesh_of({"x": 1}))
    for _ in range(2):
        assert_same(one(X), X + 1)
    jax.effects_barrier()
    assert len(capsys.readouterr().out.splitlines()) == 2
    line = shown_in_order.__code__.co_firstlineno + 1
    several = sharded(shown_in_order)
    for call in (lambda: several(X), lambda: several.lower(X)):
        with pytest.raises(MeshError, match=rf"8 devices keep none: test_transformations.py:{line}.\nDrop ordered="):
            call()
    assert_same(sharded(called_in_order)(X), jax.jit(called_in_order)(X))  # JAX keeps the order of these


# What makes `jax.jit` trace anew.


def number_of_bits(x):
    return x + jnp.arange(4)[0].astype(float) + jnp.zeros(4).dtype.itemsize


def product(x):
    return x @ x


CONTEXTS = {
    "x64": (lambda: jax.enable_x64(True), number_of_bits, np.ones(8, np.int32)),
    "precision": (lambda: jax.default_matmul_precision("float32"), product, np.ones((8, 8), np.float32)),
    "bits of random numbers": (lambda: jax.threefry_partitionable(False), lambda x: jax.random.bits(x, (8,)),
        jax.random.key(0)),
    "PRNG implementation": (lambda: jax.default_prng_impl("rbg"), lambda x: x + jax.random.uniform(jax.random.key(1)),
        np.ones(8, np.float32)),
    "a mesh": (lambda: jax.set_mesh(MESH), lambda x: x + (not jax.sharding.get_abstract_mesh().empty), np.ones(8)),
}  # fmt: skip


@pytest.mark.parametrize("placed", [False, True])
@pytest.mark.parametrize("name", CONTEXTS)
def test_what_makes_jit_trace_anew_makes_autoshard_trace_anew(name, placed):
    context, fn, x = CONTEXTS[name]
    decorated, jitted = sharded(fn), jax.jit(fn)
    if placed:
        x = jax.device_put(x, decorated.plan(x).in_shardings[0])

    def check():
        for _ in range(3):  # the second and third may be quick calls
            assert_same(decorated(x), jitted(x))

    check()
    for _ in range(2):
        with context():
            check()
        check()


def test_rank_promotion_is_refused_where_jit_refuses_it():
    decorated = sharded(lambda x: x + jnp.ones((8, 8)))
    assert_same(decorated(np.ones(8, np.float32)), jnp.full((8, 8), 2.0))
    with jax.numpy_rank_promotion("raise"), pytest.raises(ValueError, match=r"rank promotion|rank_promotion"):
        decorated(np.ones(8, np.float32))
    assert_same(decorated(np.ones(8, np.float32)), jnp.full((8, 8), 2.0))


@pytest.mark.parametrize("placed", [False, True])
def test_numbers_that_are_none_are_found(placed):
    decorated = sharded(jnp.log)
    lie = decorated.plan(np.ones(8, np.float32)).in_shardings[0]
    bad, good = np.full(8, -1, np.float32), np.ones(8, np.float32)
    if placed:
        bad, good = jax.device_put((bad, good), lie)
    for _ in range(2):
        decorated(good)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="invalid value"):
        decorated(bad)
    assert np.isnan(decorated(bad)).all()


def test_jit_disabled_computes_the_same():
    with jax.disable_jit():
        assert_same(sharded(CUSTOM["scan"])(W, X[0]), CUSTOM["scan"](W, X[0]))


def test_an_equal_program_is_not_planned_twice(monkeypatch):
    searches = []
    solve = autoshard.planning.solve_within
    noted = lambda *args, **options: (searches.append(1), solve(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(autoshard.planning, "solve_within", noted)
    decorated = sharded(step)
    expected = decorated(W, X[0])
    with jax.threefry_partitionable(False):  # which the step does not ask
        assert_same(decorated(W, X[0]), expected)
    jax.clear_caches()
    assert_same(decorated(W, X[0]), expected)
    assert len(decorated._compiled) == 3 and len(searches) == 1
    with jax.default_matmul_precision("float32"):  # another program
        decorated(W, X[0])
    assert len(searches) == 2
