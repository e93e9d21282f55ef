"""`Plan.to_code`: code that runs without autoshard shards a step as its plan does."""

import collections
import json
import os
import subprocess
import sys
from pathlib import Path

import carried_steps
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from oracles import slow_chips
from written_code import defined

import autoshard
from autoshard.compiled.collectives import read_collectives
from autoshard.export.containers import ANY, Line, UnwritableError, expression_of, literal
from autoshard.export.standalone import Inner, Table, constrain

TESTS = Path(__file__).parents[1]


def mesh_of(axis_type=AxisType.Auto):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)


def collectives(hlo):
    """Kind and axes of each collective -> bytes."""
    found = collections.Counter()
    for one in read_collectives(hlo, {"data": 4, "model": 2}):
        found[one.kind, one.axes] += one.bytes
    return found


# What runs the code: a process in which importing autoshard fails.
ALONE = """
import sys
class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "autoshard":
            raise ImportError("autoshard is not here")
sys.meta_path.insert(0, Forbidden())
try:
    import autoshard
except ImportError:
    pass
else:
    raise AssertionError("autoshard can be imported")
import jax, json
import carried, carried_steps
mesh = jax.make_mesh((4, 2), ("data", "model"))
arguments = carried_steps.arguments()
step = carried.constrained(carried_steps.train_step, mesh)
shardings = {"in_shardings": carried.in_shardings(mesh), "out_shardings": carried.out_shardings(mesh)}
texts = [
    jax.jit(one, donate_argnums=(0, 1), **shardings).lower(*arguments).compile().as_text()
    for one in (step, carried_steps.train_step)
]
assert "autoshard" not in sys.modules
json.dump(texts, open("texts.json", "w"))
"""


@pytest.fixture(scope="module")
def plan():
    mesh = mesh_of()
    machine = slow_chips(mesh.axis_names)
    return autoshard.plan(
        carried_steps.train_step, *carried_steps.arguments(), mesh=mesh, donate_argnums=(0, 1), topology=machine
    )


def test_the_code_runs_alone_with_the_collectives_of_the_plan(plan, tmp_path):
    (tmp_path / "carried.py").write_text(plan.to_code())
    (tmp_path / "alone.py").write_text(ALONE)
    path = os.pathsep.join([str(tmp_path), str(TESTS)])
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    subprocess.run([sys.executable, "alone.py"], cwd=tmp_path, env=environment, check=True, timeout=200)
    constrained, plain = map(collectives, json.loads((tmp_path / "texts.json").read_text()))
    planned = collectives(plan.lowering().compile().as_text())
    assert planned
    assert constrained == planned
    assert plain != planned  # that it can fail: inner layouts matter here


def test_trees_are_those_of_the_step(plan):
    found, mesh = defined(plan.to_code()), mesh_of()
    for tree, expected in (
        (found["in_shardings"](mesh), plan.in_shardings),
        (found["out_shardings"](mesh), plan.out_shardings),
    ):
        assert jax.tree.leaves(tree) == jax.tree.leaves(expected)
        assert jax.tree.structure(tree) == jax.tree.structure(expected)
    state, average, _ = found["in_shardings"](mesh)
    assert type(state.params) is carried_steps.Pair and type(average) is carried_steps.Average
    explicit = found["in_shardings"](mesh_of(AxisType.Explicit))
    assert jax.tree.leaves(explicit) == jax.tree.leaves(plan.in_shardings)
    without = found["in_shardings"](mesh.abstract_mesh)
    assert [one.spec for one in jax.tree.leaves(without)] == [one.spec for one in jax.tree.leaves(plan.in_shardings)]


def test_loops_branches_and_recomputations_are_those_of_the_plan():
    weights, x = 0.2 * np.random.default_rng(0).normal(size=(2, 16, 32)), np.ones((8, 16))
    mesh, arguments = mesh_of(), (np.float32(weights), np.float32(x), np.int32(3))
    machine = slow_chips(mesh.axis_names)
    step = autoshard.autoshard(carried_steps.looping_step, mesh=mesh, topology=machine, trips=3)
    plan = step.plan(*arguments)
    found = defined(plan.to_code())
    shardings = {"in_shardings": found["in_shardings"](mesh), "out_shardings": found["out_shardings"](mesh)}
    jitted = jax.jit(found["constrained"](carried_steps.looping_step, mesh), **shardings)
    compiled = jitted.lower(*arguments).compile()
    assert collectives(compiled.as_text()) == collectives(plan.lowering().compile().as_text())
    placed = jax.device_put(arguments, shardings["in_shardings"])
    for one, other in zip(compiled(*placed), jax.jit(carried_steps.looping_step)(*arguments), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_what_a_step_closes_over_lies_as_planned():
    """Large arrays are constants in the code's jaxpr, beside small ones; each has its own place among them."""
    small, large = np.ones(4, np.float32), np.random.default_rng(0).normal(size=(256, 128)).astype(np.float32)

    def step(x):
        return jnp.tanh(x @ jnp.asarray(large)).sum(-1) + small.sum()

    mesh, x = mesh_of(), jnp.ones((8, 256))
    plan = autoshard.plan(step, x, mesh=mesh, fixed={"large": P("data", "model"), "x": P(None, "data")})
    found = defined(plan.to_code())
    shardings = {"in_shardings": found["in_shardings"](mesh), "out_shardings": found["out_shardings"](mesh)}
    compiled, plain = (jax.jit(one, **shardings).lower(x).compile() for one in (found["constrained"](step, mesh), step))
    assert collectives(compiled.as_text()) == collectives(plan.lowering().compile().as_text())
    assert collectives(plain.as_text()) != collectives(compiled.as_text())  # that it can fail
    np.testing.assert_allclose(compiled(jax.device_put(x, shardings["in_shardings"][0])), step(x), rtol=1e-5)
    whole = autoshard.plan(step, x, mesh=mesh, fixed={"large": P()})
    assert "pass it as an argument" in plan.to_code() and "pass it as an argument" not in whole.to_code()


def test_a_step_takes_its_own_results():
    """These have types with a mesh, for which JAX writes other derivatives."""

    def step(state, x):
        return {"w": state["w"] - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])}

    mesh, x = mesh_of(), jnp.ones((8, 16))
    plan = autoshard.plan(step, {"w": jnp.ones((16, 8))}, x, mesh=mesh, fixed={"state/w": P(None, "data")})
    found = defined(plan.to_code())
    shardings = {"in_shardings": found["in_shardings"](mesh), "out_shardings": found["out_shardings"](mesh)}
    jitted, ours, theirs = jax.jit(found["constrained"](step, mesh), **shardings), *[{"w": jnp.ones((16, 8))}] * 2
    for _ in range(2):
        ours, theirs = jitted(ours, x), step(theirs, x)
    np.testing.assert_allclose(ours["w"], theirs["w"], rtol=1e-5)


def test_another_step_is_refused():
    table = Table(1, {(0,): Inner("sin", makes={0: [P("data")]})})
    made = jax.jit(constrain(jnp.sin, mesh_of(), table))(jnp.ones(8))
    assert made.sharding.spec == P("data")
    with pytest.raises(ValueError, match=r"operation \(0,\) of the step is cos, it was sin"):
        jax.jit(constrain(jnp.cos, mesh_of(), table))(jnp.ones(8))
    with pytest.raises(ValueError, match="has 2 operations, it had 1 when it was planned"):
        jax.jit(constrain(lambda x: jnp.sin(jnp.sin(x)), mesh_of(), table))(jnp.ones(8))


def test_explicit_style_takes_and_returns_types(plan):
    found, mesh = defined(plan.to_code("explicit")), mesh_of()
    arguments = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), carried_steps.arguments())
    with jax.set_mesh(found["typed_mesh"](mesh)):
        placed = jax.device_put(arguments, found["in_shardings"](mesh))
        step = jax.jit(found["explicit"](carried_steps.train_step, mesh))
        made = jax.eval_shape(step, *placed)
        compiled = step.lower(*placed).compile()
    for one, planned in ((placed[0], plan.in_shardings[0]), (made[0], plan.out_shardings[0])):
        specs = [jax.typeof(leaf).sharding.spec if isinstance(leaf, jax.Array) else leaf.sharding.spec
                 for leaf in jax.tree.leaves(one)]  # fmt: skip
        assert [P(*spec) for spec in specs] == [
            P(*sharding.spec, *[None] * (len(spec) - len(sharding.spec)))
            for spec, sharding in zip(specs, jax.tree.leaves(planned), strict=True)
        ]
    assert collectives(compiled.as_text()) == collectives(plan.lowering().compile().as_text())


class Given(carried_steps.NamedTuple):
    w: object


def step_by_turns(state, x, turns, act="tanh"):
    """On Explicit axes JAX adds operations to `where`; a class made here cannot be written."""

    class Made(carried_steps.NamedTuple):
        w: object

    found = step_by_turns.__dict__.setdefault("made", Made)
    for _ in range(turns):
        x = getattr(jnp, act)(x @ state.w)
    x = jax.lax.with_sharding_constraint(jnp.where(x > 0, x[:, ::-1], x), P("data"))
    return found(state.w - x.T @ x), jnp.sum(x)


def test_explicit_style_takes_static_arguments_and_classes_that_no_module_names():
    mesh, arguments = mesh_of(), (Given(jnp.full((16, 16), 0.1)), jnp.ones((16, 16)), 2)
    plan = autoshard.plan(
        step_by_turns, *arguments, mesh=mesh, static_argnums=2, fixed={"state/w": P("model"), "x": P("data")}
    )
    found = defined(plan.to_code("explicit"))
    with jax.set_mesh(found["typed_mesh"](mesh)):
        made, total = jax.jit(found["explicit"](step_by_turns, mesh, static_argnums=2), static_argnums=2)(*arguments)
    with jax.set_mesh(mesh):
        wanted, wanted_total = jax.jit(step_by_turns, static_argnums=2)(*arguments)
    assert jax.typeof(made.w).sharding.mesh.axis_types == (AxisType.Explicit,) * 2
    np.testing.assert_allclose(made.w, wanted.w, rtol=1e-5)
    np.testing.assert_allclose(total, wanted_total, rtol=1e-5)


def test_explicit_style_takes_equinox_modules_of_classes_that_no_module_names():
    class Local(eqx.Module):
        linear: eqx.nn.Linear
        drop: eqx.nn.Dropout
        activation: object = jax.nn.relu

    def step(model, x):
        def loss(model):
            found = jax.vmap(lambda row: model.activation(model.drop(model.linear(row), inference=True)))(x)
            return jnp.mean(jnp.where(found > 0, found[:, ::-1], found))

        value, gradient = eqx.filter_value_and_grad(loss)(model)
        return eqx.apply_updates(model, gradient), value

    arguments = Local(eqx.nn.Linear(8, 8, key=jax.random.key(0)), eqx.nn.Dropout(0.5)), jnp.ones((16, 8))
    mesh = mesh_of()
    found = defined(autoshard.plan(step, *arguments, mesh=mesh, fixed={"x": P("data")}).to_code("explicit"))
    shardings = found["in_shardings"](mesh, arguments)
    assert shardings[1].spec == P("data", None) and shardings[0].activation is None and shardings[0].drop.p is None
    with jax.set_mesh(found["typed_mesh"](mesh)):
        model, value = eqx.filter_jit(found["explicit"](step, mesh))(*arguments)
    wanted, wanted_value = eqx.filter_jit(step)(*arguments)
    assert model.activation is jax.nn.relu and model.drop.p == 0.5
    np.testing.assert_allclose(value, wanted_value, rtol=1e-5)
    np.testing.assert_allclose(model.linear.weight, wanted.linear.weight, rtol=1e-5)


def test_arguments_may_be_weak_at_first_and_not_later():
    """As a temperature that began as a number: its first update is strong, and JAX has other operations for it."""

    def step(temperature, w, x):
        def loss(t, w):
            return jnp.mean((x.astype(jnp.bfloat16) * jnp.exp(t)) @ w)

        one, other = jax.grad(loss, (0, 1))(temperature, w)
        return temperature - one.astype(jnp.float32), w - other

    arguments = jnp.asarray(0.07), jnp.ones((16, 8), jnp.bfloat16), jnp.ones((8, 16))
    assert arguments[0].weak_type and not jnp.float32(0.07).weak_type
    plan = autoshard.plan(step, *arguments, mesh=mesh_of(), fixed={"w": P("data"), "x": P("model")})
    constrained = jax.jit(defined(plan.to_code())["constrained"](step, mesh_of()))
    first = constrained(*arguments)
    assert not first[0].weak_type
    second = constrained(first[0], *arguments[1:])
    assert jax.tree.map(jnp.shape, second) == jax.tree.map(jnp.shape, first) and second[1].dtype == jnp.bfloat16


def test_a_step_of_explicit_mode_keeps_its_types():
    mesh = mesh_of(AxisType.Explicit)

    def step(w, x):
        return jax.sharding.reshard(w, P("data", None)) * 2.0, jnp.sum(x)

    with jax.set_mesh(mesh):
        w = jax.device_put(jnp.ones((16, 8)), P("data", None))
        plan = autoshard.plan(step, w, jnp.ones((8, 16)), mesh=mesh)
        found = defined(plan.to_code())
        assert found["in_shardings"](mesh)[0] == plan.in_shardings[0]
        made, _ = jax.jit(step, in_shardings=found["in_shardings"](mesh))(w, jnp.ones((8, 16)))
    assert jax.typeof(made).sharding.spec == P("data", None)
    assert "explicit mode" in plan.to_code()


def test_classes_that_no_module_names_are_taken_from_the_arguments():
    class Local(carried_steps.NamedTuple):
        w: object

    def step(state, x):
        return Local(state.w - jax.grad(lambda w: jnp.mean((x @ w) ** 2))(state.w))

    arguments = Local(jnp.ones((16, 8))), jnp.ones((8, 16))
    mesh = mesh_of()
    plan = autoshard.plan(step, *arguments, mesh=mesh, fixed={"state/w": P("data")})
    found = defined(plan.to_code())
    with pytest.raises(TypeError, match=r"in_shardings\(mesh, args\): its classes are needed"):
        found["in_shardings"](mesh)
    shardings = {
        "in_shardings": found["in_shardings"](mesh, arguments),
        "out_shardings": found["out_shardings"](mesh, jax.eval_shape(step, *arguments)),
    }
    made = jax.jit(step, **shardings)(*arguments)
    assert made.w.sharding.spec == P("data")


def test_a_plan_of_a_file_says_that_it_knows_no_step(plan):
    loaded = autoshard.Plan.loads(plan.dumps(), plan.mesh)
    code = loaded.to_code()
    assert "comes from a file" in code and "constrained" not in code
    assert [one.spec for one in jax.tree.leaves(defined(code)["in_shardings"](plan.mesh))] == [
        one.spec for one in jax.tree.leaves(loaded.in_shardings)
    ]
    with pytest.raises(autoshard.ArgumentError, match="style='yaml'"):
        plan.to_code("yaml")


TREES = [  # a pytree, the code of it
    (None, "None"),
    ((1, [2], {}), "(0, [1,],{},)"),
    ({"a b": 1, "c": (2,)}, '{"a b": 0, "c": (1,),}'),
    (collections.OrderedDict(b=1, a=2), 'collections.OrderedDict([("b", 0,), ("a", 1,),])'),
    (carried_steps.Pair(1, {2: 3}), "carried_steps.Pair(up=0, down={2: 1,},)"),
    (carried_steps.Counter(1, {"loss": 2}), 'node(carried_steps.Counter, ("names", {"loss": 2}), [0,])'),
    (carried_steps.Average(1), "node(carried_steps.Average, (ANY, 0.9), [0,])"),
]


@pytest.mark.parametrize("tree, code", TREES, ids=[code for _, code in TREES])
def test_containers(tree, code):
    structure = jax.tree.structure(tree)
    found = expression_of(structure, [Line(str(i)) for i in range(structure.num_leaves)])
    text = found.text(0).replace("\n", " ")
    assert text.replace(" ", "") == code.replace(" ", "")


def test_static_data_that_is_no_literal_stands_for_anything():
    assert literal((1.5, float("nan"), "it's", b"x", {1, 2})) == f"(1.5, float('nan'), \"it's\", b'x', {ANY})"
    with pytest.raises(UnwritableError):
        expression_of(jax.tree.structure(type("Local", (carried_steps.Pair,), {})(1, 2)), [Line("0")] * 2)


class Linear(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(16, 8, rngs=rngs)

    def __call__(self, x):
        return self.inner(x)


def eqx_step(model, x):
    return eqx.apply_updates(model, eqx.filter_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model))


def nnx_step(model, x):
    gradient = nnx.grad(lambda model: jnp.mean(model(x) ** 2))(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model), gradient))
    return model


def arrays_of(module):
    return eqx.filter(module, eqx.is_array)


MODULES = [
    (eqx_step, lambda: eqx.nn.MLP(16, 16, 8, 1, key=jax.random.key(0)), "weight", arrays_of),
    (nnx_step, lambda: Linear(nnx.Rngs(0)), "kernel", lambda made: made),
]


@pytest.mark.parametrize("step, make, largest, arrays", MODULES, ids=["equinox", "nnx"])
def test_modules(step, make, largest, arrays):
    mesh = jax.make_mesh((8,), ("data",))
    plan = autoshard.plan(step, make(), jnp.ones((8, 16)), mesh=mesh, fixed={largest: P("data")})
    found = defined(plan.to_code())
    pairs = zip(("in_shardings", "out_shardings"), (plan.in_shardings, plan.out_shardings), strict=True)
    for name, planned in pairs:
        tree, planned = (made[0] if name == "in_shardings" else made for made in (found[name](mesh), planned))
        assert jax.tree.structure(tree) == jax.tree.structure(arrays(make()))
        assert jax.tree.leaves(tree) == jax.tree.leaves(planned)
    placed = jax.device_put(arrays(make()), found["in_shardings"](mesh)[0])
    assert not all(leaf.sharding.is_fully_replicated for leaf in jax.tree.leaves(placed))


def tied_step(model, tied, metrics, batch):
    """Changes modules that share a variable, and returns one of them beside an array."""

    def loss_of(model):
        return jnp.mean((model(batch["x"]) @ tied.kernel.T) ** 2)

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    nnx.update(model, jax.tree.map(lambda w, g: w - g, nnx.state(model, nnx.Param), gradients))
    metrics.update(loss=loss)
    return loss, model


def test_steps_that_change_modules_have_their_inner_layouts():
    """Under `nnx.jit`, the collectives and numbers of the plan, wherever the modules lie at first."""
    mesh = mesh_of()

    def arguments():
        model = Linear(nnx.Rngs(0))
        rows = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
        return model, model.inner, nnx.MultiMetric(loss=nnx.metrics.Average("loss")), {"x": rows}

    ours, theirs = arguments(), arguments()
    machine = slow_chips(mesh.axis_names)
    fixed = {"model/inner/kernel": P(None, ("data", "model"))}
    plan = autoshard.plan(tied_step, *ours, mesh=mesh, topology=machine, fixed=fixed)
    code = plan.to_code()
    assert "step = nnx.jit(constrained(step, mesh)" in code
    step, plain = nnx.jit(defined(code)["constrained"](tied_step, mesh)), nnx.jit(tied_step)
    for _ in range(2):
        (loss, model), (expected, _) = step(*ours), plain(*theirs)
        assert model is ours[0]
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert ours[0].inner.kernel[...].sharding.spec == P(None, ("data", "model"))
    np.testing.assert_allclose(ours[0].inner.kernel[...], theirs[0].inner.kernel[...], rtol=1e-4, atol=1e-6)
    assert float(ours[2].compute()["loss"]) == pytest.approx(float(theirs[2].compute()["loss"]), rel=1e-5)
    compiled = step.lower(*ours).compile().as_text()
    assert collectives(compiled) == collectives(plan.lowering().compile().as_text())
    assert "explicit(" not in plan.to_code()
    explicit, theirs = plan.to_code("explicit"), arguments()
    assert "step = nnx.jit(explicit(step, mesh)" in explicit and "jax.jit(" not in explicit.partition("import")[0]
    with jax.set_mesh(mesh_of(AxisType.Explicit)):
        loss, model = nnx.jit(defined(explicit)["explicit"](tied_step, mesh))(*theirs)
    assert jax.typeof(model.inner.kernel[...]).sharding.spec == P(None, ("data", "model"))
    np.testing.assert_allclose(loss, step(*arguments())[0], rtol=1e-5)
    np.testing.assert_allclose(model.inner.kernel[...], step(*arguments())[1].inner.kernel[...], rtol=1e-5, atol=1e-6)


def test_modules_whose_variables_change_have_no_inner_layouts():
    def step(model, x):
        model.seen = nnx.Variable(x.mean(0))
        return model(x)

    model = Linear(nnx.Rngs(0))
    code = autoshard.plan(step, model, jnp.ones((8, 16)), mesh=mesh_of()).to_code()
    assert "left out: the step adds variables" in code and "def constrained" not in code
    assert "step = nnx.jit(step)" in code  # under `jax.jit` its changes would be lost
