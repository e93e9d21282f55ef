"""What `jax.jit` makes of a step: its products beside compiled ones, and the choice that leaves values as given."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax.sharding import PartitionSpec as P
from oracles import mesh_of
from programs import f32, formulated, random_choices, round_topology

import autoshard
from autoshard.mesh.targets import target_mesh
from autoshard.model.formulation import Formulation
from autoshard.model.partitioner import products, reshards
from autoshard.model.partitioner.choosing import GivenLayouts, as_given
from autoshard.solver import solve
from autoshard.solver.verify import verify

LINE, PLANE = {"x": 2}, {"x": 4, "y": 2}
TOPOLOGY = round_topology("x", "y", "one")
X, W, V = f32(8, 4), f32(4, 6), f32(6, 4)
WHOLE, ROWS, COLUMNS = ((), ()), (("x",), ()), ((), ("x",))


def forward(x, w, v):
    return jnp.sin(x @ w) @ v


def left(formulation: Formulation, choice) -> dict:
    """Value id -> how its group leaves it."""
    found = {}
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        strategy = priced.strategies[choice[formulation.group_node(group)]]
        found |= {made.value.id: layout for made, layout in zip(group.outputs, strategy.output_layouts, strict=True)}
    return found


def assert_followed(formulation: Formulation, layouts) -> None:
    """Every group that can leave its results as given does; the choice is allowed, and claims no bound."""
    solution = as_given(formulation, layouts, {})
    cost, _ = verify(formulation.problem, solution.choice)
    assert np.isfinite(cost) and cost == pytest.approx(solution.cost)
    assert (solution.bound, solution.status) == (0.0, "feasible")
    found = left(formulation, solution.choice)
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        given = [layouts.get(made.value.id) for made in group.outputs]
        can = any(
            all(want in (None, got) for want, got in zip(given, strategy.output_layouts, strict=True))
            for strategy in priced.strategies
        )
        for made, want in zip(group.outputs, given, strict=True):
            assert not can or want is None or found[made.value.id] == want, (str(group.equations[-1]), want)


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
def test_what_choices_leave_is_left_so(mesh):
    formulation = formulated(forward, X, W, V, mesh=mesh, topology=TOPOLOGY)
    for choice in random_choices(formulation, 10):
        layouts = left(formulation, choice)
        assert_followed(formulation, layouts)
        # the same choice leaves values so; the cheapest that does costs no more
        assert as_given(formulation, layouts, {}).cost <= verify(formulation.problem, choice)[0] * (1 + 1e-6)


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
def test_what_is_given_is_chosen_alike_where_nothing_else_is_priced(mesh):
    formulation = formulated(forward, X, W, V, mesh=mesh, topology=TOPOLOGY)
    for choice in random_choices(formulation, 5):
        layouts = left(formulation, choice)
        alone = formulated(forward, X, W, V, mesh=mesh, topology=TOPOLOGY, offered=GivenLayouts(layouts=layouts))
        among_all, among_few = as_given(formulation, layouts, {}), as_given(alone, layouts, {})
        assert among_few.cost == pytest.approx(among_all.cost, rel=1e-12)
        assert left(alone, among_few.choice) == left(formulation, among_all.choice) == layouts
        assert sum(len(one.strategies) for one in alone.priced) < sum(len(one.strategies) for one in formulation.priced)


def test_nothing_given_is_the_cheapest_without_a_limit():
    formulation = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY, memory=1.0)
    free = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY)
    assert as_given(formulation, {}, {}).cost == pytest.approx(solve(free.problem).cost)


def test_what_no_strategy_leaves_is_free():
    """8 rows are not split by x and y over columns of 6: the group does its best."""
    formulation = formulated(forward, X, W, V, mesh=PLANE, topology=TOPOLOGY)
    product = formulation.groups[0].outputs[0].value.id
    assert_followed(formulation, {product: ((), ("x", "y"))})
    free = as_given(formulation, {}, {})
    assert as_given(formulation, {product: ((), ("x", "y"))}, {}).cost == pytest.approx(free.cost)


def test_operands_are_read_as_said():
    formulation = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY, fixed={0: ROWS, 1: WHOLE, 2: WHOLE})
    product = formulation.groups[0]
    layouts = {product.outputs[0].value.id: COLUMNS}
    wants = {(product.equations[0].index, 0): WHOLE, (product.equations[0].index, 1): COLUMNS}
    choice = as_given(formulation, layouts, wants).choice
    strategy = formulation.priced[0].strategies[choice[formulation.group_node(product)]]
    assert strategy.operand_layouts == (WHOLE, COLUMNS)


def test_a_layout_that_is_not_followed_is_caught(monkeypatch):
    monkeypatch.setattr("autoshard.model.partitioner.choosing._agreeing", lambda given, found: len(given))
    formulation = formulated(forward, X, W, V, mesh=LINE, topology=TOPOLOGY, fixed={0: ROWS})
    with pytest.raises(AssertionError):
        assert_followed(formulation, {formulation.groups[0].outputs[0].value.id: COLUMNS})


# Batches of products, as XLA for CPU compiles them: left [8, 32, 64], right [8, 64, 16], result [8, 32, 16].
PRODUCTS = {
    "one batch": (P("x"), P("x"), P("x")),
    "weights gathered": (P(("x", "y")), P(None, ("x", "y")), P(("x", "y"))),
    "columns, then rows": (P("x", None, "y"), P(None, "y"), P("x")),
    "contracted in part": (P(None, None, ("x", "y")), P(None, "x"), P()),
    "contracted, result whole": (P(), P(None, ("x", "y")), P()),
    "the larger operand stays": (P(None, "x"), P(None, None, "x"), P(None, "x")),
    "result sliced": (P(), P(), P("y", "x")),
    "to the result's batch": (P(None, None, ("x", "y")), P(None, "y"), P(("x", "y"))),
    "two kinds at once": (P(None, "x"), P("y", "x"), P("x", None, "y")),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_as_compiled(name):
    assert_as_compiled(*PRODUCTS[name])


def assert_as_compiled(left, right, result):
    arrays = jax.ShapeDtypeStruct((8, 32, 64), np.float32), jax.ShapeDtypeStruct((8, 64, 16), np.float32)
    shardings = {"in_shardings": (left, right), "out_shardings": result}
    found = autoshard.evaluate(jnp.matmul, *arrays, mesh=mesh_of(PLANE), **shardings).verify()
    assert found.collectives_agree, str(found)


# Gradients of weights that lie in pieces over some axes of the batch, as in hybrid sharded data parallel.
KERNELS = {"rows": P(None, None, "x"), "columns": P(None, None, None, "y"), "over all": P(None, None, ("x", "y"))}


BOTH = P(("x", "y"))


def kernel_gradient(images, cotangent):
    def convolved(kernel):
        return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    return jax.vjp(convolved, jnp.zeros((3, 3, images.shape[-1], cotangent.shape[-1])))[1](cotangent)[0]


def assert_gradient_as_compiled(kernel, mesh, channels=16, batch=BOTH):
    arguments = f32(16, 8, 8, channels), f32(16, 8, 8, 2 * channels)
    found = autoshard.evaluate(
        kernel_gradient, *arguments, mesh=mesh, in_shardings=(batch, batch), out_shardings=kernel
    ).verify()
    assert found.collectives_agree and found.actual, str(found)


@pytest.mark.parametrize("name", KERNELS)
def test_gradients_of_weights_that_some_of_the_axes_split(name):
    assert_gradient_as_compiled(KERNELS[name], mesh_of(PLANE))


@pytest.mark.parametrize("machine, library", [("v5e:2x4", "libtpu"), ("h100:1x8", "jax_cuda13_plugin")])
def test_gradients_of_weights_that_some_of_the_axes_split_on_other_machines(machine, library):
    pytest.importorskip(library)
    for kernel in KERNELS["rows"], KERNELS["columns"]:
        assert_gradient_as_compiled(kernel, target_mesh(machine, PLANE), channels=256)


# Of batches that lie in pieces over one of two axes: mesh, batch, kernel.
ONE_AXIS = {
    "the other one splits the result": (PLANE, P("x"), P(None, None, "y")),
    "both split one dim": (PLANE, P("x"), P(None, None, None, ("x", "y"))),
    "both split a dim of the left operand": (PLANE, P("y"), P(None, None, ("x", "y"))),
    "both split two dims": (PLANE, P("y"), P(None, None, "x", "y")),
    "more devices than are idle": (PLANE, P("x"), P(None, None, "x")),
    "as many devices as are idle": ({"x": 2, "y": 2}, P("x"), P(None, None, None, "x")),
}


@pytest.mark.parametrize("name", ONE_AXIS)
def test_gradients_of_batches_that_one_axis_splits(name):
    mesh, batch, kernel = ONE_AXIS[name]
    assert_gradient_as_compiled(kernel, mesh_of(mesh), batch=batch)


def test_sums_in_pieces_of_what_is_made_whole_are_caught(monkeypatch):
    def without(product, splits, first):
        return [products._without(split, first) for split in splits]

    monkeypatch.setattr(products, "_rest_of_splits", without)
    with pytest.raises(AssertionError):
        test_gradients_of_batches_that_one_axis_splits("both split one dim")


def test_idle_devices_that_compute_the_same_are_caught(monkeypatch):
    monkeypatch.setattr(products, "_over_idle_axes", lambda product, used: None)
    with pytest.raises(AssertionError):
        test_gradients_of_batches_that_one_axis_splits("as many devices as are idle")


def test_a_gradient_that_is_added_up_whole_is_caught(monkeypatch):
    monkeypatch.setattr(reshards, "contracts", lambda equation: False)
    with pytest.raises(AssertionError):
        assert_gradient_as_compiled(KERNELS["rows"], mesh_of(PLANE))


def test_products_split_otherwise_are_caught(monkeypatch):
    monkeypatch.setattr(products, "_matches", lambda product, splits: iter(()))
    with pytest.raises(AssertionError):
        assert_as_compiled(*PRODUCTS["columns, then rows"])


# The gradient of a product reads an operand that its forward pass has gathered. XLA gathers it again if one of the two
# gathers it for pieces of the batch and the other for all of it: sizes decide which.
LAYERS = {  # features in and out -> how often the features are gathered
    "narrowing": (32, 16, 2),
    "widening": (16, 64, 1),
}


def assert_gathered_as_compiled(name):
    features, made, times = LAYERS[name]

    def step(w, x, out):
        return jax.grad(lambda w: jnp.sum(jnp.sin(jnp.cos(x) @ w) * out))(w)

    arguments = f32(features, made), f32(16, 17, features), f32(16, 17, made)
    specs = P(None, "y"), P("x", None, "y"), P("x", None, "y")
    found = autoshard.evaluate(
        step, *arguments, mesh=mesh_of(PLANE), in_shardings=specs, out_shardings=specs[0]
    ).verify()
    gathered = sum(size for (kind, _), size in found.actual.items() if kind == "all_gather")
    assert found.collectives_agree and gathered == times * 4 * 17 * features * 4, str(found)


@pytest.mark.parametrize("name", LAYERS)
def test_what_is_gathered_within_pieces_is_gathered_again(name):
    assert_gathered_as_compiled(name)


def test_a_copy_that_is_shared_too_far_is_caught(monkeypatch):
    monkeypatch.setattr(reshards, "_moved_axes", lambda layout, other: set())
    with pytest.raises(AssertionError):
        assert_gathered_as_compiled("narrowing")


# Steps in which reshardings stand elsewhere than operations of one group or of our own plans would have them.


def test_a_view_is_moved_by_itself_as_in_a_compiled_program():
    """XLA does not see that the gathered transpose is the transpose of what is gathered."""

    def tied(table, x):
        return x @ table @ table.T

    arguments = f32(16, 16), f32(32, 16)
    plan = autoshard.evaluate(tied, *arguments, mesh=mesh_of(PLANE), in_shardings=(P(("x", "y")), P(("x", "y"))))
    found = plan.verify()
    assert found.collectives_agree and sum(found.actual.values()) == 2 * 16 * 16 * 4, str(found)


def test_a_recomputation_gathers_again_behind_its_barrier():
    def step(w, x):
        return jax.grad(lambda w: jnp.sum(jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))(x)))(w)

    arguments = f32(16, 16), f32(32, 16)
    plan = autoshard.evaluate(step, *arguments, mesh=mesh_of(PLANE), in_shardings=(P(("x", "y")), P(("x", "y"))))
    found = plan.verify()
    assert found.collectives_agree, str(found)


def recurrent(w, x):
    """Both loops, forward and backward, read one matrix in every turn."""
    return jax.grad(lambda w: jnp.sum(jax.lax.scan(lambda h, _: (jnp.tanh(h @ w), None), x, length=3)[0]))(w)


def assert_gathered_before_loops():
    rows = P(("x", "y"))
    plan = autoshard.evaluate(recurrent, f32(32, 32), f32(16, 32), mesh=mesh_of(PLANE), in_shardings=(rows, rows))
    found = plan.verify()
    gathered = sum(size for (kind, _), size in found.actual.items() if kind == "all_gather")
    assert found.collectives_agree and gathered == 2 * 32 * 32 * 4, str(found)


def test_what_no_turn_changes_is_gathered_once_before_each_loop():
    assert_gathered_before_loops()


def test_a_gather_in_every_turn_is_caught(monkeypatch):
    monkeypatch.setattr("autoshard.model.partitioner.as_jitted._HOISTING", frozenset())
    with pytest.raises(AssertionError):
        assert_gathered_before_loops()


def test_what_is_joined_along_a_split_dim_goes_aside():
    def joined(a, b):
        return jnp.concatenate([a, b], axis=1)

    arguments = f32(32, 16), f32(32, 16)
    shardings = {"in_shardings": (P(None, "y"), P(None, "y")), "out_shardings": P(None, "y")}
    found = autoshard.evaluate(joined, *arguments, mesh=mesh_of(PLANE), **shardings).verify()
    assert found.collectives_agree and {kind for kind, _ in found.actual} == {"all_to_all"}, str(found)


def test_what_is_merged_behind_another_dim_is_computed_whole_and_sliced():
    """Rows of the batch behind those of the length have no layout: the way back from them is a slice."""

    def head(w, x):
        flat = x.swapaxes(0, 1).reshape(-1, 16)  # length before batch
        return jnp.sum(jnp.sin(jnp.cos(flat) @ w))

    arguments = f32(16, 64), f32(32, 8, 16)
    plan = autoshard.evaluate(
        jax.grad(head, argnums=(0, 1)), *arguments, mesh=mesh_of(LINE), in_shardings=(P(), P("x"))
    )
    found = plan.verify()
    assert found.collectives_agree and {kind for kind, _ in found.actual} == {"all_gather"}, str(found)


# Slices and pads of a split dim: rows of 32, into so many.
SHIFTS = {
    "second half": (lambda x: jax.lax.slice(x, (16, 0), (32, 3)), 8),
    "every other row": (lambda x: jax.lax.slice(x, (8, 0), (32, 3), (2, 1)), 4),
    "rows from far away": (lambda x: jax.lax.slice(x, (24, 0), (32, 3)), 8),
    "nearly everything": (lambda x: jnp.pad(x, ((31, 33), (0, 0))), 4),
    "padded before": (lambda x: jnp.pad(x, ((16, 0), (0, 0))), 8),
    "gates of an LSTM": (lambda x: sum(jnp.split(x, 4)), 8),
}


def assert_shifts_as_compiled(name):
    function, pieces = SHIFTS[name]
    rows, mesh = P("x"), mesh_of({"x": pieces})
    found = autoshard.evaluate(function, f32(32, 3), mesh=mesh, in_shardings=(rows,), out_shardings=rows).verify()
    assert found.collectives_agree and found.actual, str(found)


@pytest.mark.parametrize("name", SHIFTS)
def test_slices_and_pads_of_a_split_dim_send_rows(name):
    assert_shifts_as_compiled(name)


def test_rows_that_are_not_sent_are_caught(monkeypatch):
    monkeypatch.setattr(reshards, "with_shifts", lambda equation, rule, *_: rule)
    with pytest.raises(AssertionError):
        assert_shifts_as_compiled("second half")


def test_muon_under_fsdp_moves_what_jit_moves():
    """Newton-Schulz multiplies matrices with themselves: propagation splits what our own layouts would gather once."""
    optimizer = optax.contrib.muon(1e-3)
    params = {"up": f32(16, 64), "down": f32(64, 16)}

    def step(state, gradients):
        params, moments = state
        updates, moments = optimizer.update(gradients, moments, params)
        return optax.apply_updates(params, updates), moments

    def largest(x):
        dim = max(range(x.ndim), key=lambda dim: x.shape[dim], default=0)
        return P(*(("x", "y") if i == dim and x.shape[dim] % 8 == 0 else None for i in range(x.ndim)))

    arguments = (params, jax.eval_shape(optimizer.init, params)), params
    specs = jax.tree.map(largest, arguments)
    plan = autoshard.evaluate(step, *arguments, mesh=mesh_of(PLANE), in_shardings=specs, donate_argnums=0)
    found = plan.verify()
    assert sum(found.predicted.values()) == pytest.approx(sum(found.actual.values()), rel=0.1), str(found)
