"""Programs of explicit mode: the numbers of `jax.jit`, and its shardings wherever a type orders one."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from equality import are_equal, assert_equal
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, reshard
from jax.sharding import PartitionSpec as P
from oracles import slow_chips

from autoshard import Plan, autoshard, evaluate, plan, propagate
from autoshard.errors import ArgumentError, ConflictError, MeshError
from autoshard.layout import layout_of


def mesh_of(shape, *types):
    names = ("data", "model", "other")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=types or (AxisType.Explicit,) * len(shape))


MESHES = {shape: mesh_of(shape) for shape in [(8,), (4, 2), (2, 2, 2)]}
MESH = MESHES[4, 2]
AUTO = mesh_of((4, 2), AxisType.Auto, AxisType.Auto)


def numbers(*shape, seed=0):
    return np.random.default_rng(seed + sum(shape)).normal(size=shape).astype(np.float32)


def model():
    """The second axis, or the first where there is no second."""
    names = jax.sharding.get_abstract_mesh().axis_names
    return names[min(1, len(names) - 1)]


def spec(*entries):
    """A PartitionSpec in which an axis that the mesh does not have splits nothing, nor one that is taken."""
    names, taken, kept = jax.sharding.get_abstract_mesh().axis_names, set(), []
    for entry in entries:
        kept.append(entry if entry in names and entry not in taken else None)
        taken.add(entry)
    return P(*kept)


def on(x, *entries):
    return jax.device_put(x, spec(*entries))


# Each returns a function and its arguments; it is called with the mesh set.


def product():
    def step(w, x):
        return jnp.einsum("bd,df->bf", x, w, out_sharding=spec("data", "model"))

    return step, on(numbers(16, 32), None, "model"), on(numbers(8, 16), "data")


def whole_product():
    """What is summed over split dims has to be ordered."""

    def step(w, x):
        h = jnp.dot(x, w, out_sharding=spec("data", None))
        return reshard(h, P()), h.sum(0)

    return step, on(numbers(16, 32), "model"), on(numbers(8, 16), None, "model")


def training():
    def step(w, x):
        def loss(w):
            h = jnp.einsum("bd,df->bf", x, w, out_sharding=spec("data", "model"))
            return (reshard(jnp.tanh(h), spec("data", None)) ** 2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 0.1 * reshard(gradient, jax.typeof(w).sharding), value

    return step, on(numbers(16, 32), None, "model"), on(numbers(8, 16), "data")


def two_layers():
    def step(weights, x):
        def loss(weights):
            h = jax.nn.relu(x @ weights[0])
            return ((jnp.dot(h, weights[1], out_sharding=spec("data", None)) + weights[2]) ** 2).mean()

        value, gradients = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    weights = on(numbers(16, 32), None, "model"), on(numbers(32, 16), "model", None), on(numbers(16))
    if len(jax.sharding.get_abstract_mesh().axis_names) == 1:
        weights = tuple(map(on, weights))
    return step, weights, on(numbers(8, 16), "data")


def lookup():
    def step(table, tokens):
        embedded = table.at[tokens].get(out_sharding=spec("data", None, None))
        return embedded.sum(-1), jax.grad(lambda t: (t.at[tokens].get(out_sharding=spec("data")) ** 2).sum())(table)

    return step, on(numbers(32, 16), None, "model"), on(np.arange(32, dtype=np.int32).reshape(8, 4) % 32, "data")


def constants():
    def step(x):
        zeros = jnp.zeros((8, 16), out_sharding=spec("data"))
        ones = jnp.ones_like(x) + jnp.full((16,), 2.0, out_sharding=P())
        return x + zeros + ones, jnp.arange(16, out_sharding=spec("data")), jnp.zeros((8, 8), out_sharding=P())

    return step, on(numbers(8, 16), "data")


def reshapes():
    def step(x):
        parts = x.reshape(4, 4, 16, out_sharding=spec(None, "data"))
        return parts, jnp.reshape(parts, (16, 16), out_sharding=spec("data")), x.reshape(16, 4, 4)

    if jax.sharding.get_abstract_mesh().shape["data"] == 8:
        return (lambda x: jnp.reshape(x, (2, 8, 16), out_sharding=P(None, "data"))), on(numbers(16, 16), "data")
    return step, on(numbers(16, 16), "data")


def looped():
    def step(w, x):
        def layer(h, w):
            h = jnp.dot(h, w, out_sharding=spec("data", None))
            return reshard(reshard(jnp.tanh(h), spec("data", "model")), spec("data", None)), h.mean()

        return lax.scan(layer, x, w)

    return step, on(numbers(3, 16, 16), None, None, "model"), on(numbers(8, 16), "data")


def looped_gradient():
    step, *args = looped()
    return jax.grad(lambda w, x: step(w, x)[0].sum(), argnums=(0, 1)), *args


def branches():
    def step(x, flag):
        y = lax.cond(flag[0] > 0, lambda x: reshard(x * 2, P("data")), lambda x: reshard(x.T, P("data")).T.T, x)
        return lax.while_loop(lambda c: c[1] < 3, lambda c: (reshard(c[0] + 1, P("data")), c[1] + 1), (y, 0))[0]

    return step, on(numbers(16, 16), "data"), np.ones(1, np.int32)


def rematerialised():
    def step(w, x):
        @jax.checkpoint
        def block(w, x):
            return jnp.tanh(jnp.dot(x, w, out_sharding=spec("data", "model")))

        return jax.value_and_grad(lambda w: block(w, x).sum())(w)

    return step, on(numbers(16, 32), None, "model"), on(numbers(8, 16), "data")


@jax.custom_vjp
def _clipped(x):
    return reshard(x, P("data"))


_clipped.defvjp(lambda x: (_clipped(x), x), lambda x, g: (reshard(jnp.clip(g, -0.5, 0.5) + 0 * x, P("data")),))


@jax.custom_jvp
def _squared(x):
    return x * x


_squared.defjvp(lambda primals, tangents: (_squared(primals[0]), 2 * primals[0] * tangents[0]))


def custom_derivatives():
    def step(x):
        return _clipped(_squared(x)), jax.grad(lambda x: _clipped(_squared(x)).sum())(x)

    return step, on(numbers(8, 16), "data")


def random_numbers():
    def step(x, key):
        keep = jax.random.bernoulli(key, 0.5, x.shape, out_sharding=P("data"))
        noise = jax.random.normal(jax.random.fold_in(key, 1), (16,), out_sharding=spec("model"))
        return x * keep + noise, jax.random.uniform(key, (8, 8), out_sharding=P("data"))

    return step, on(numbers(8, 16), "data"), jax.random.key(0)


def batched():
    def step(w, x):
        return jax.vmap(lambda row: jnp.tanh(row @ w).sum())(x), jax.vmap(jnp.sort)(x)

    return step, on(numbers(16, 8)), on(numbers(8, 16), "data")


def by_hand():
    def step(x):
        inside = jax.shard_map(lambda x: lax.psum(x * 2, "data"), in_specs=P("data"), out_specs=P())
        return inside(x), reshard(x, P()).sum(0)

    return step, on(numbers(8, 16), "data")


def partly_by_hand():
    def step(x):
        inside = jax.shard_map(
            lambda x: lax.psum(jnp.tanh(x), "data"), in_specs=P("data"), out_specs=P(), axis_names={"data"}
        )
        return inside(x).sum(-1)

    return step, on(numbers(8, 16), "data", "model")


def on_auto_axes_inside():
    def step(w, x):
        @jax.sharding.auto_axes
        def inside(w, x):
            return lax.with_sharding_constraint(x @ w, spec("data"))

        return inside(w, x, out_sharding=spec("data", "model"))

    return step, on(numbers(16, 32), "model"), on(numbers(8, 16), "data", "model")


def adam():
    optimizer = optax.adam(1e-2)

    def step(state, x):
        weights, moments = state
        value, gradients = jax.value_and_grad(lambda w: (jnp.tanh(x @ w["in"]) ** 2).mean() + w["bias"].sum())(weights)
        updates, moments = optimizer.update(gradients, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    weights = {"in": on(numbers(16, 32), None, "model"), "bias": on(numbers(32))}
    if len(jax.sharding.get_abstract_mesh().axis_names) == 1:
        weights["in"] = on(numbers(16, 32))
    return step, (weights, optimizer.init(weights)), on(numbers(8, 16), "data")


class Block(nnx.Module):
    """As the documents of Flax and JAX write a module for explicit mode."""

    def __init__(self, rngs):
        self.into = nnx.Param(jax.random.normal(rngs.params(), (16, 32), out_sharding=spec(None, "model")))
        self.out = nnx.Param(jax.random.normal(rngs.params(), (32, 16), out_sharding=spec("model", None)))

    def __call__(self, x):
        h = jax.nn.gelu(jnp.dot(x, self.into[...], out_sharding=spec("data", "model")))
        return jnp.dot(h, self.out[...], out_sharding=spec("data", None))


def module():
    graph, state = nnx.split(Block(nnx.Rngs(0)))

    def step(state, x):
        value, gradients = jax.value_and_grad(lambda state: (nnx.merge(graph, state)(x) ** 2).mean())(state)
        return jax.tree.map(lambda w, g: w - 0.01 * g, state, gradients), value

    return step, state, on(numbers(8, 16), "data")


def open_arguments():
    """What has no type is open, whatever is set."""

    def step(w, x):
        value, gradient = jax.value_and_grad(lambda w: (jnp.tanh(x @ w) ** 2).mean())(w)
        return w - 0.1 * gradient, value

    return step, numbers(16, 32), numbers(8, 16)


def open_batch():
    step, w, _ = training()
    return step, w, numbers(8, 16)


def sorted_and_split():
    def step(x):
        first, rest = jnp.split(x, [4], axis=1)
        wide = jnp.concatenate([x, jnp.pad(x, ((0, 0), (1, 1)))], axis=1)
        return jnp.sort(x, axis=1), first, lax.top_k(rest, 2), wide

    return step, on(numbers(8, 16), "data")


def typed_constant():
    """A step that closes over an array with a type."""
    scale = on(numbers(16), "model")
    return (lambda x: x * scale), on(numbers(8, 16), "data")


PROGRAMS = [
    adam, batched, branches, by_hand, constants, custom_derivatives, looped, looped_gradient, lookup, module,
    on_auto_axes_inside, open_arguments, open_batch, partly_by_hand, product, random_numbers, rematerialised, reshapes,
    sorted_and_split, training, two_layers, typed_constant, whole_product,
]  # fmt: skip


def is_typed(x):
    sharding = jax.typeof(x).sharding
    return AxisType.Explicit in (sharding.mesh.axis_types or ())


# Each on a mesh, in turn; the rest under the slow marker.
CASES = [
    pytest.param(
        program,
        shape,
        marks=[] if (i + j) % 3 == 0 else [pytest.mark.slow],
        id=f"{program.__name__}-{shape}",
    )
    for i, program in enumerate(PROGRAMS)
    for j, shape in enumerate(MESHES)
]


@pytest.mark.parametrize("program, shape", CASES)
def test_explicit_programs_are_as_under_jit(program, shape):
    mesh = MESHES[shape]
    with jax.set_mesh(mesh):
        step, *args = program()
        expected = jax.jit(step)(*args)
        decorated = autoshard(step, mesh=mesh)
        found = decorated(*args)
        assert_equal(found, expected)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            if is_typed(one):
                assert one.sharding.is_equivalent_to(other.sharding, one.ndim), (one.sharding, other.sharding)
        made = decorated.plan(*args)
        for x, sharding in zip(jax.tree.leaves(args), made.flat_in_shardings, strict=True):
            if jnp.ndim(x) and is_typed(x):
                assert sharding.is_equivalent_to(x.sharding, x.ndim)
        assert str(made)


# What is an order, and what is open.


def in_specs(made):
    return [sharding.spec for sharding in made.flat_in_shardings]


def layouts(made):
    return {home for home in made.annotations.homes.values() if any(home)}


def test_what_is_ordered_inside_lies_so():
    with jax.set_mesh(MESH):
        x = on(numbers(8, 16), "data")

        def step(x):
            return reshard(jnp.tanh(x), P("model", "data")).sum()

        assert (("model",), ("data",)) in layouts(plan(step, x, mesh=MESH))
        assert (("model",), ("data",)) not in layouts(plan(step, x, mesh=MESH, ignore_constraints=True))


def test_a_reshard_replicates_on_explicit_axes_alone():
    def step(x):
        return reshard(jnp.tanh(x), P(None, None)) * 2

    for mesh, is_whole in [(MESH, True), (AUTO, False)]:
        with jax.set_mesh(mesh):
            x = jax.device_put(numbers(64, 64), NamedSharding(mesh, P("data")))
            made = plan(step, x, mesh=mesh, topology="v5e:8")
            assert (layout_of(made.out_shardings.spec, 2) == ((), ())) == is_whole


def test_types_of_arguments_are_kept_and_others_are_open():
    with jax.set_mesh(MESH):
        step, w, x = training()
        made = plan(step, w, x, mesh=MESH)
        assert in_specs(made) == [P(None, "model"), P("data", None)]
        assert made.out_shardings[0] == NamedSharding(MESH, P(None, "model"))
        large = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 1024), (4096, 1024)))
        free = plan(open_arguments()[0], *large, mesh=MESH, topology="v5e:8")
        assert any(any(layout_of(s, 2)) for s in in_specs(free))
        ignored = plan(step, w, x, mesh=MESH, ignore_constraints=True)
        assert not any(e.primitive == "sharding_constraint" for e in ignored.lowering.program.equations)


def test_fixed_that_contradicts_a_type_is_named():
    with jax.set_mesh(MESH):
        step, w, x = training()
        with pytest.raises(ConflictError, match=re.escape("its type says P(None, 'model')")):
            plan(step, w, x, mesh=MESH, fixed={"w": P("data")})
        assert in_specs(plan(step, w, x, mesh=MESH, fixed={"w": P(None, "model")}))[0] == P(None, "model")


@pytest.mark.parametrize("mesh", [AUTO, None], ids=["Auto", "AbstractMesh"])
def test_constraints_are_ignored_on_auto_axes_too(mesh):
    mesh = mesh or AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(w, x):
        return lax.with_sharding_constraint(x @ w, NamedSharding(AUTO, P())).sum()

    options = {"mesh": mesh, "topology": "v5e:8"}
    forced = plan(step, numbers(512, 512), numbers(2048, 512), **options)
    free = plan(step, numbers(512, 512), numbers(2048, 512), **options, ignore_constraints=True)
    plain = plan(lambda w, x: (x @ w).sum(), numbers(512, 512), numbers(2048, 512), **options)
    assert free.cost == plain.cost < forced.cost
    assert free.fingerprint == plain.fingerprint
    judged = {"in_shardings": (P(), P("data")), **options}
    bound, loose = (
        evaluate(step, numbers(512, 512), numbers(2048, 512), **judged, ignore_constraints=one) for one in (False, True)
    )
    assert loose.cost < bound.cost


@pytest.mark.parametrize("program", [looped, by_hand, custom_derivatives, training], ids=lambda one: one.__name__)
def test_types_are_ignored(program):
    with jax.set_mesh(MESH):
        step, *args = program()
        decorated = autoshard(step, mesh=MESH, ignore_constraints=True)
        assert_equal(decorated(*args), jax.jit(step)(*args))


def test_a_step_whose_types_are_ignored_goes_on_with_its_own_results():
    with jax.set_mesh(MESH):
        step, w, x = training()
        decorated, expected = autoshard(step, mesh=MESH, ignore_constraints=True), w
        for _ in range(3):
            (w, loss), (expected, _) = decorated(w, x), jax.jit(step)(expected, x)
            assert_equal(w, expected)
        assert len(decorated._compiled) == 1 and float(loss + 1) > 1


def test_ignoring_keeps_what_moves_to_the_host():
    host = NamedSharding(AUTO, P(), memory_kind="pinned_host")
    decorated = autoshard(lambda x: jax.device_put(x * 2, host), mesh=AUTO, ignore_constraints=True)
    assert decorated.plan(numbers(8, 8)).results[0].on_host


def test_the_option_is_checked():
    with pytest.raises(ArgumentError, match="ignore_constraints='yes'; True or False is needed"):
        autoshard(lambda x: x, mesh=AUTO, ignore_constraints="yes")


@pytest.mark.parametrize("types", ["EA", "AE", "EAE"])
def test_meshes_of_several_kinds_of_axes(types):
    kinds = {"E": AxisType.Explicit, "A": AxisType.Auto}
    mesh = mesh_of({2: (4, 2), 3: (2, 2, 2)}[len(types)], *(kinds[one] for one in types))
    explicit = [name for name, one in zip(mesh.axis_names, types, strict=True) if one == "E"]
    (auto,) = {*mesh.axis_names} - {*explicit}

    def step(w, x):
        def loss(w):
            h = lax.with_sharding_constraint(jnp.tanh(x @ w), P(P.UNCONSTRAINED, auto))
            return (h**2).mean()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - gradient, value, reshard(x * 2, P(None, explicit[0]))

    with jax.set_mesh(mesh):
        w, x = jax.device_put(numbers(16, 32), P()), jax.device_put(numbers(8, 16), P(explicit[0]))
        decorated = autoshard(step, mesh=mesh)
        found, expected = decorated(w, x), jax.jit(step)(w, x)
        assert_equal(found, expected)
        assert [jax.typeof(a) for a in found] == [jax.typeof(a) for a in expected]
        assert_equal(decorated(found[0], x), jax.jit(step)(expected[0], x))
        assert len(decorated._compiled) == 1  # Auto axes are no part of the type


# Calls.


def test_a_step_goes_on_with_its_own_results():
    with jax.set_mesh(MESH):
        step, w, x = training()
        traces = []
        counted = autoshard(lambda w, x: (traces.append(0), step(w, x))[1], mesh=MESH)
        found = expected = w
        for _ in range(4):
            found, expected = counted(found, x)[0], jax.jit(step)(expected, x)[0]
        assert_equal(found, expected)
        assert len(traces) == 1 and counted._last is not None


def test_open_state_goes_on_as_state():
    with jax.set_mesh(MESH):
        step, w, x = open_arguments()
        decorated, expected = autoshard(step, mesh=MESH), w
        for _ in range(3):
            w, loss = decorated(w, x)
            expected, expected_loss = jax.jit(step)(expected, x)
            assert_equal((w, loss), (expected, expected_loss))
        assert len(decorated._compiled) == 1
        assert float(loss + 1) > 1  # what is no state can be computed with where the mesh is set


def test_a_donated_state_is_gone_after_the_call():
    with jax.set_mesh(MESH):
        step, w, x = training()
        kept = np.asarray(w)
        found, _ = autoshard(step, mesh=MESH, donate_argnums=0)(w, x)
        assert w.is_deleted()
        assert_equal(found, jax.jit(step)(on(kept, None, "model"), x)[0])


@pytest.mark.parametrize(
    "transformed",
    [
        lambda f, w, x: jax.grad(lambda w: f(w, x)[1])(w),
        lambda f, w, x: jax.jit(jax.grad(lambda w: f(w, x)[1]))(w),
        lambda f, w, x: jax.vmap(lambda s: f(w * s, x)[1])(jnp.arange(3.0)),
        lambda f, w, x: jax.jvp(lambda w: f(w, x), (w,), (w,)),
        lambda f, w, x: lax.scan(lambda w, _: f(w, x), w, length=2),
    ],
    ids=["grad", "jit of grad", "vmap", "jvp", "scan"],
)
def test_transformations_are_as_with_jit(transformed):
    with jax.set_mesh(MESH):
        step, w, x = training()
        found, expected = (transformed(one, w, x) for one in (autoshard(step, mesh=MESH), jax.jit(step)))
        assert_equal(found, expected)
        assert [jax.typeof(a) for a in jax.tree.leaves(found)] == [jax.typeof(a) for a in jax.tree.leaves(expected)]


def test_numbers_batched_under_an_explicit_mesh_are_as_with_jit():
    with jax.set_mesh(MESH):

        def square(x):
            return (x**2).sum()

        assert_equal(jax.vmap(autoshard(square, mesh=MESH))(numbers(8, 16)), jax.vmap(square)(numbers(8, 16)))
        assert_equal(jax.grad(autoshard(square, mesh=MESH))(numbers(8, 16)), jax.grad(square)(numbers(8, 16)))


def test_a_plan_of_typed_arguments_without_a_mesh_set():
    with jax.set_mesh(MESH):
        step, w, x = training()
        expected = jax.jit(step)(w, x)
    assert_equal(autoshard(step, mesh=MESH)(w, x), expected)
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for a in (w, x)]
    assert in_specs(plan(step, *shapes, mesh=MESH)) == [P(None, "model"), P("data", None)]


def test_without_a_mesh_set_arrays_may_lie_on_explicit_axes_by_chance():
    """JAX would refuse the step: both operands are split along what is summed."""
    w, x = (jax.device_put(numbers(16, 16), NamedSharding(MESH, spec)) for spec in (P("data"), P(None, "data")))
    step = refused_by_types
    decorated = autoshard(step, mesh=MESH)
    assert_equal(decorated(w, x), jax.jit(step)(np.asarray(w), np.asarray(x)))
    assert_equal(decorated(np.asarray(w), np.asarray(x)), decorated(w, x))
    assert len({id(one) for one in decorated._compiled.values()}) == 1


# Plans.


def test_a_saved_plan_and_the_cache(tmp_path):
    with jax.set_mesh(MESH):
        step, w, x = training()
        made = plan(step, w, x, mesh=MESH, cache=tmp_path)
        again = plan(step, w, x, mesh=MESH, cache=tmp_path)
        assert again.in_shardings == made.in_shardings and len(list(tmp_path.iterdir())) == 1
        plan(step, w, x, mesh=MESH, cache=tmp_path, ignore_constraints=True)
        assert len(list(tmp_path.iterdir())) == 2
        loaded = Plan.loads(made.dumps(), MESH)
        assert loaded.out_shardings == made.out_shardings
        assert_equal(autoshard(step, mesh=MESH, plan=loaded)(w, x), jax.jit(step)(w, x))
        with pytest.raises(Exception, match="made for another program"):
            autoshard(step, mesh=MESH, plan=loaded)(on(np.asarray(w), "model"), x)


def test_reports_of_explicit_programs():
    with jax.set_mesh(MESH):
        step, w, x = training()
        made = plan(step, w, x, mesh=MESH)
        assert 'P(None, "model")' in str(made)
        verified = made.verify()
        assert "all_gather" in str(verified)
        judged = evaluate(step, w, x, mesh=MESH, in_shardings=(None, P("data")))
        assert in_specs(judged)[0] == P(None, "model")
        assert propagate(step, w, x, mesh=MESH, in_specs=(P(None, "model"), P("data"))).outputs[0] == P(None, "model")
    assert str(made.verify())  # without the mesh set


def test_a_plan_for_an_abstract_mesh():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)

    def step(w, x):
        h = jnp.einsum("bd,df->bf", x, w, out_sharding=P("data", "model"))
        return reshard(h, P("data", None)).sum()

    w, x = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in [((16, 32), P(None, "model")), ((8, 16), P("data", None))]
    )
    made = plan(step, w, x, mesh=mesh, topology="v5e:8")
    assert in_specs(made) == [P(None, "model"), P("data", None)]
    assert made.lowering().as_text()


# Errors.


def refused_by_types(w, x):
    return x @ w  # ambiguous


def test_what_jax_refuses_has_a_name_and_a_line():
    with jax.set_mesh(MESH):
        w, x = on(numbers(16, 16), "data"), on(numbers(8, 16), None, "data")
        with pytest.raises(MeshError, match=r"refuses refused_by_types .* at test_explicit.py:\d+: Contracting"):
            plan(refused_by_types, w, x, mesh=MESH)
        with pytest.raises(ConflictError, match="a sum of which each device has or had a part"):
            unreduced = P(unreduced={"data"})
            plan(lambda w, x: jnp.einsum("ab,bc->ac", x, w, out_sharding=unreduced), w, x, mesh=MESH)

        def own(x):
            raise ValueError("no sharding of mine")

        with pytest.raises(ValueError, match="no sharding of mine"):
            plan(own, x, mesh=MESH)
    with pytest.raises(MeshError, match="Set a mesh with Explicit axes"):
        plan(lambda x: reshard(x, P("data")), numbers(8, 8), mesh=AUTO)


def test_partial_sums_inside_a_step_are_sums():
    def step(w, x):
        parts = jnp.einsum("ab,bc->ac", x, w, out_sharding=P(unreduced={"data"}))
        return reshard(parts + parts, P(None, "data"))

    with jax.set_mesh(MESH):
        w, x = on(numbers(16, 16), "data"), on(numbers(8, 16), None, "data")
        assert_equal(autoshard(step, mesh=MESH)(w, x), jax.jit(step)(w, x))


def elsewhere(x):
    return x + jnp.fft.fftfreq(16, device=jax.devices()[1])  # the line that names it


def test_other_devices_have_a_name_and_a_line():
    with pytest.raises(MeshError, match=r"at test_explicit.py:\d+ puts arrays on devices \[1\]"):
        autoshard(elsewhere, mesh=AUTO)(numbers(8, 16))
    few = jax.make_mesh((4,), ("few",), devices=jax.devices()[:4])
    with jax.set_mesh(few), pytest.raises(MeshError, match="the mesh that is set has other ones"):
        autoshard(lambda x: x + 1, mesh=AUTO)(numbers(8, 16))


def test_a_call_with_a_shape_alone_has_a_name_and_the_path():
    decorated = autoshard(lambda params: params["w"] * 2, mesh=AUTO)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"params/w is ShapeDtypeStruct.* has no numbers"):
            decorated({"w": jax.ShapeDtypeStruct((8,), jnp.float32)})
        decorated({"w": numbers(8)})


def test_the_comparison_can_fail():
    with jax.set_mesh(MESH):
        step, *args = training()
        assert not are_equal(autoshard(step, mesh=MESH)(*args), jax.jit(lambda w, x: (w, 0.0))(*args))


def test_without_a_mesh_that_is_set_arguments_are_open():
    """`jax.make_mesh` makes Explicit axes: arrays that were put on them whole are not ordered to stay so."""
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    w, x = (jax.device_put(array, NamedSharding(mesh, P())) for array in (jnp.ones((64, 32)), jnp.ones((64, 64))))

    def step(w, x):
        loss, gradient = jax.value_and_grad(lambda w: (x @ w).mean())(w)
        return w - gradient, loss

    decorated = autoshard(step, mesh=mesh, topology=slow_chips(mesh.shape))
    assert all(any(sharding.spec) for sharding in decorated.plan(w, x).in_shardings)
    assert_equal(decorated(*decorated(w, x)[:1], x), jax.jit(step)(*jax.jit(step)(w, x)[:1], x))


def test_without_a_mesh_that_is_set_a_step_that_reads_types_has_them():
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    w, x = jnp.ones((64, 32)), jax.device_put(jnp.ones((64, 64)), NamedSharding(mesh, P("data")))

    def step(w, x):
        return jax.sharding.reshard(x @ w, jax.typeof(x).sharding)

    decorated = autoshard(step, mesh=mesh, topology=slow_chips(mesh.shape))
    assert decorated(w, x).sharding.spec == jax.jit(step)(w, x).sharding.spec == P("data", None)
