"""Steps that change nnx modules in place, as flax's documentation writes them: what nnx.jit does, autoshard does."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips

import autoshard
from autoshard import ArgumentError, MeshError, Plan

SHAPE = {"x": 4, "y": 2}
sharded = functools.partial(autoshard.autoshard, mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE), time_limit=10)
X = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
LABELS = np.arange(16) % 8


class Layer(nnx.Module):
    """What is scanned over: its own stream of random numbers is stacked, too."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)

    def __call__(self, x):
        return self.dropout(jnp.tanh(self.linear(x)))


class Net(nnx.Module):
    """Batch statistics, layers with dropout under scan and remat, and an embedding that is tied to the head."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.layers = nnx.vmap(Layer)(rngs.split(2))
        self.embed = nnx.Embed(8, 8, rngs=rngs)
        self.head = self.embed

    def __call__(self, x):
        run = nnx.scan(nnx.remat(lambda layer, x: layer(x)), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.head.attend(run(self.layers, self.dropout(self.norm(x))))


def linear(seed=0):
    return nnx.Linear(8, 8, rngs=nnx.Rngs(seed))


def loss_of(model, x):
    return jnp.mean(model(x) ** 2)


def sgd(model, x):
    loss, gradients = nnx.value_and_grad(loss_of)(model, x)
    nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), gradients))
    return loss


def numbers(tree):
    """Every number that modules hold, and every other array, by its path."""
    found = {}
    for i, node in enumerate(jax.tree.leaves(tree, is_leaf=nnx.graph.is_graph_node)):
        state = nnx.to_flat_state(nnx.state({"": node})) if nnx.graph.is_graph_node(node) else [((), node)]
        for path, leaf in state:
            value = leaf.get_raw_value() if isinstance(leaf, nnx.Variable) else leaf
            is_key = jnp.issubdtype(jnp.asarray(value).dtype, jax.dtypes.prng_key)
            found[i, path] = np.asarray(jax.random.key_data(value) if is_key else value)
    return found


def assert_same(ours, theirs):
    ours, theirs = numbers(ours), numbers(theirs)
    assert ours.keys() == theirs.keys()
    for path, array in theirs.items():
        np.testing.assert_allclose(ours[path], array, rtol=2e-4, atol=1e-5, err_msg=str(path))


def variables(tree):
    """The variables of modules, by identity."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, nnx.Variable))
    return [id(leaf) for leaf in leaves if isinstance(leaf, nnx.Variable)]


def documented():
    """The train step of the flax documentation: only metrics tell of it."""

    def step(model, optimizer, metrics, batch):
        def loss_of(model):
            logits = model(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

        (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        optimizer.update(model, gradients)

    model = Net(nnx.Rngs(0))
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    return step, (model, optimizer, metrics, {"x": X, "label": LABELS})


def model_in_optimizer():
    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(gradients)
        return loss

    model = linear()
    return step, (model, nnx.ModelAndOptimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param), X)


def nested():
    def step(models, counter, x):
        counter["steps"][0][...] += 1
        return sgd(models["net"][0], x) + models["same"](x).sum()

    net = linear()
    return step, ({"net": (net,), "same": net}, {"steps": [nnx.Variable(jnp.zeros((), jnp.int32))]}, X)


def returned():
    """One module comes back as it is, another is made anew, a third is left alone."""

    def step(model, frozen, x):
        new = nnx.clone(frozen)
        loss = sgd(new, x) + sgd(model, x)
        return model, new, loss

    return step, (linear(), linear(1), X)


def graph_changes():
    def step(model, x):
        if hasattr(model, "bias"):
            del model.bias
        model.extra = nnx.Variable(x.mean(0))
        return x @ model.kernel

    return step, (linear(), X)


def random_numbers():
    return lambda dropout, rngs, x: dropout(x, rngs=rngs).sum(), (nnx.Dropout(0.5), nnx.Rngs(3), X)


STEPS = [documented, model_in_optimizer, nested, returned, graph_changes, random_numbers]
CASES = [*((make, True) for make in STEPS), *((make, False) for make in (nested, returned, graph_changes))]


@pytest.mark.parametrize(
    "make, donated", CASES, ids=[f"{make.__name__}, {'donated' if donated else 'kept'}" for make, donated in CASES]
)
def test_modules_are_changed_as_nnx_jit_changes_them(make, donated):
    step, ours = make()
    _, theirs = make()
    argnums = tuple(range(len(ours) - 1)) if donated else ()
    ran, expected = sharded(step, donate_argnums=argnums), nnx.jit(step)
    before = set(variables(ours))
    for _ in range(2):
        assert_same(ran(*ours), expected(*theirs))
    assert_same(ours, theirs)
    after = set(variables(ours))
    assert after == before or (make is graph_changes and len(after & before) == 1)


def test_the_comparison_sees_a_change_that_got_lost():
    ours, theirs = linear(), linear()
    sgd(theirs, X)
    with pytest.raises(AssertionError):
        assert_same(ours, theirs)


def test_returned_modules_are_those_of_the_caller():
    step, (model, frozen, x) = returned()
    kernel = np.asarray(frozen.kernel[...])
    same, new, _ = sharded(step)(model, frozen, x)
    assert same is model and new is not frozen
    np.testing.assert_array_equal(frozen.kernel[...], kernel)
    assert np.abs(np.asarray(new.kernel[...]) - kernel).max() > 0


def test_what_a_step_leaves_alone_is_no_result_and_stays_alive():
    decorated = sharded(lambda model, frozen, x: sgd(model, x) + loss_of(frozen, x), donate_argnums=(0, 1))
    model, frozen = linear(), linear(1)
    decorated(model, frozen, X)
    decorated(model, frozen, X)
    plan = decorated.plan(model, frozen, X)
    assert [result.name for result in plan.results] == ["model/bias", "model/kernel", ""]
    assert {plan.arguments[i].name: plan.results[j].name for i, j in plan.carried.items()} == {
        "model/bias": "model/bias",
        "model/kernel": "model/kernel",
    }
    assert isinstance(frozen.kernel[...].sharding, NamedSharding), "an array that had to be moved is moved once"


def test_a_functional_step_returns_a_new_module():
    def step(model, x):
        graph, weights, rest = nnx.split(model, nnx.Param, ...)
        gradients = jax.grad(lambda weights: loss_of(nnx.merge(graph, weights, rest), x))(weights)
        return nnx.merge(graph, jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), rest)

    decorated = sharded(step, donate_argnums=0)
    first = linear()
    model = decorated(decorated(first, X), X)
    assert decorated.plan(model, X).carried == {0: 0, 1: 1}
    assert loss_of(model, X) < loss_of(first, X)
    assert_same(first, linear())


def test_split_modules():
    def step(graph, state, x):
        model = nnx.merge(graph, state)
        loss = sgd(model, x)
        return nnx.state(model), loss

    decorated = sharded(step, static_argnums=0, donate_argnums=1)
    model = linear()
    graph, state = nnx.split(model)
    state, first = decorated(graph, state, X)
    state, second = decorated(graph, state, X)
    assert second < first and isinstance(state, nnx.State)
    plan = decorated.plan(graph, state, X)
    assert [argument.name for argument in plan.arguments] == ["state/bias", "state/kernel", "x"]
    assert plan.carried == {0: 0, 1: 1}
    nnx.update(model, state)  # split before, it goes on in either form
    assert sharded(sgd)(model, X) < second


def test_states_are_values_as_under_jit():
    def step(graph, state, x):
        model, optimizer = nnx.merge(graph, state)
        gradients = nnx.grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), {"before": state, "norm": optax.tree.norm(gradients)}

    model = linear()
    graph, state = nnx.split((model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)))
    before = jax.tree.map(jnp.copy, state)
    found = {}
    for name, run in (("jit", jax.jit(step, static_argnums=0)), ("ours", sharded(step, static_argnums=0))):
        states = [state]
        for _ in range(3):
            after, other = run(graph, states[-1], X)
            states.append(after)
            assert other["before"] is not states[-2]
        found[name] = [*states, other]
    assert_same(found["jit"], found["ours"])
    assert_same(model, linear())
    assert_same(state, before)
    assert found["ours"][1] is not found["ours"][2]
    plan = sharded(step, static_argnums=0).plan(graph, state, X)
    assert [argument.name for argument in plan.arguments][:2] == ["state/0/bias", "state/0/kernel"]


def test_a_module_beside_its_own_state():
    def step(model, state, x):
        loss = sgd(model, x)
        distance = optax.tree.norm(jax.tree.map(jnp.subtract, nnx.state(model), state))
        return loss, distance, state

    model = linear()
    start = nnx.state(model)  # its variables are those of the model
    _, first, _ = sharded(step)(model, start, X)
    assert first > 0
    state = nnx.state(nnx.clone(model))
    _, distance, returned = sharded(step)(model, state, X)
    assert distance > 0 and returned is not state
    assert_same(returned, state)


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = (nnx.Linear(8, 8, rngs=rngs) for _ in range(2))
        self.down.kernel, self.again, self.own = self.up.kernel, self.up, nnx.data(self)

    def __call__(self, x):
        return self.down(self.again(self.up(x)))


def made(key):
    model = Tied(nnx.Rngs(key))
    return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param), {"key": key}


@pytest.mark.parametrize("options", [{}, {"remat": "auto"}], ids=["plain", "rewritten"])
def test_modules_that_a_step_makes_share_what_they_shared(options):
    ours, *others = sharded(made, **options)(jax.random.key(0))
    theirs, *expected = nnx.jit(made)(jax.random.key(0))
    assert ours.down.kernel is ours.up.kernel and ours.again is ours.up and ours.own is ours
    assert_same([ours, *others], [theirs, *expected])
    assert isinstance(sharded(lambda key: nnx.state(made(key)[0]))(jax.random.key(0)), nnx.State)


def test_a_state_that_shares_is_born_as_planned():
    def step(model, optimizer, x):
        optimizer.update(model, nnx.grad(loss_of)(model, x))

    def start():
        return made(jax.random.key(0))[:2]

    decorated = sharded(step)
    plan = decorated.plan(*nnx.eval_shape(start), X)
    model, optimizer = plan.init(start)
    assert model.down.kernel is model.up.kernel and model.own is model
    assert model.up.kernel[...].sharding == plan.in_shardings[0].up.kernel.get_value()
    expected = start()
    decorated(model, optimizer, X)
    step(*expected, X)
    assert_same(model, expected[0])


def test_containers_in_variables_that_a_step_fills():
    class Counting(nnx.Module):
        def __init__(self):
            self.seen = nnx.BatchStat({"steps": jnp.zeros(())})

        def __call__(self, x):
            value = self.seen.get_raw_value()
            value["steps"] = value["steps"] + 1
            value["last"] = jnp.sum(x)
            return x

    def found(decorate):
        model = Counting()
        results = [decorate(lambda model, x: model(x))(model, X) for _ in range(2)]
        return results, model.seen.get_raw_value()

    assert_same(found(nnx.jit), found(sharded))


def test_a_hijax_variable_is_refused():
    with pytest.warns(DeprecationWarning):
        model = nnx.vars_as(linear(), hijax=True)
    with pytest.raises(ArgumentError, match=r"hijax=True.*with_vars\(module, hijax=False\)"):
        sharded(loss_of)(model, X)


@pytest.mark.parametrize("donated", [0, (0, 1)], ids=["one", "both"])
def test_a_clone_shares_arrays_that_are_donated(donated):
    def step(model, target, x):
        return sgd(model, x) + sgd(target, x)

    decorated, model = sharded(step, donate_argnums=donated), linear()
    losses = []
    for _ in range(3):
        target = nnx.clone(model)
        losses.append(decorated(model, target, X))
        assert_same(model, target)
    assert losses == sorted(losses, reverse=True)


def test_a_variable_that_is_an_argument_keeps_its_array():
    """Donated or not, unless the step gives it another one, as under `nnx.jit`; it is no state."""

    def step(scale, offset, x):
        offset[...] += 1
        return scale[...] * x

    scale, offset = nnx.Param(jnp.ones(X.shape)), nnx.Param(jnp.zeros(8))
    decorated = sharded(step, donate_argnums=(0, 1))
    for _ in range(2):
        np.testing.assert_allclose(decorated(scale, offset, X), X)
    np.testing.assert_allclose(scale[...], 1)
    np.testing.assert_allclose(offset[...], 2)


def test_a_step_that_raises_leaves_its_module():
    def step(model, x):
        model.kernel[...] = model.kernel[...] * 2
        raise KeyError("mine")

    model = linear()
    with pytest.raises(KeyError, match="mine"):
        sharded(step, donate_argnums=0)(model, X)
    assert_same(model, linear())


def test_beside_the_transformations_of_nnx_and_jax():
    decorated = sharded(sgd)
    model = linear()
    losses = [sharded(nnx.jit(sgd))(model, X), nnx.jit(decorated)(model, X), nnx.cached_partial(decorated, model)(X)]

    def merged(state, x):
        model = nnx.merge(graph, state)
        return nnx.state(model), decorated(model, x)

    graph, state = nnx.split(model)
    state, loss = jax.jit(merged)(state, X)
    nnx.update(model, state)
    losses += [loss, decorated(model, X)]
    assert losses == sorted(losses, reverse=True) and len(set(map(float, losses))) == 5
    forward = sharded(loss_of)
    assert_same(nnx.grad(lambda model: forward(model, X))(model), nnx.grad(lambda model: loss_of(model, X))(model))
    batched = jax.vmap(lambda x: forward(model, x))(np.stack([X, 2 * X]))
    np.testing.assert_allclose(batched, [loss_of(model, X), loss_of(model, 2 * X)], rtol=1e-5)


class Trainer(nnx.Module):
    def __init__(self):
        self.model = linear()

    @sharded
    def step(self, x):
        return sgd(self.model, x)


def test_methods_of_modules():
    trainer = Trainer()
    assert trainer.step(X) > trainer.step(X)


def test_plans_are_read_fixed_and_kept_as_any(tmp_path):
    decorated = sharded(
        lambda *, model, x: sgd(model, x), fixed={"model/kernel": P(None, "y")}, donate_argnames="model"
    )
    abstract = {"model": nnx.eval_shape(linear), "x": jax.ShapeDtypeStruct(X.shape, X.dtype)}
    plan = decorated.plan(**abstract)
    assert [argument.name for argument in plan.arguments] == ["model/bias", "model/kernel", "x"]
    assert "model/kernel" in str(plan)
    assert isinstance(plan.keyword_shardings["model"], nnx.Linear)
    assert plan.keyword_shardings["model"].kernel.get_value().spec == P(None, "y")
    plan.save(tmp_path / "plan")
    assert Plan.load(tmp_path / "plan", mesh_of(SHAPE)).keyword_shardings["model"]["kernel"].spec == P(None, "y")
    model = linear()
    sharded(lambda *, model, x: sgd(model, x), donate_argnames="model", plan=tmp_path / "plan")(model=model, x=X)
    assert model.kernel[...].sharding.spec == P(None, "y")


def test_what_plans_say_fits_what_users_hold():
    decorated = sharded(sgd, fixed={"kernel": P(None, "y")})
    model = linear()
    plan = decorated.plan(model, X)
    placed = jax.device_put(model, plan.in_shardings[0])
    assert placed.kernel[...].sharding.spec == P(None, "y")
    graph, state = nnx.split(plan.abstract(0))
    assert state["kernel"].get_value().sharding == plan.in_shardings[0].kernel.get_value()
    assert nnx.merge(graph, state).kernel.get_value().shape == (8, 8)
    assert decorated.trace(model, X).result_names == ("model/bias", "model/kernel", "")
    decorated.lower(model, X).compile()
    given = autoshard.evaluate(sgd, model, X, mesh=mesh_of(SHAPE), in_shardings=plan.in_shardings)
    assert given.in_shardings[0].kernel.get_value().spec == P(None, "y")


def test_shared_variables_stand_in_every_module_that_has_them():
    step, arguments = nested()
    plan = autoshard.plan(step, *arguments, mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE))
    names = [argument.name for argument in plan.arguments]
    assert names == ["models/net/0/bias", "models/net/0/kernel", "counter/steps/0", "x"]
    first, second = plan.in_shardings[0]["net"][0], plan.in_shardings[0]["same"]
    assert first.kernel.get_value() == second.kernel.get_value() == plan.arguments[1].sharding(plan.mesh)


def test_a_module_that_is_no_argument_is_named():
    model = linear()

    def step(x):
        return sgd(model, x)

    line = sgd.__code__.co_firstlineno + 1
    with pytest.raises(ArgumentError, match=rf"step changes .* at test_nnx.py:{line} .*\nPass the module"):
        sharded(step)(X)


def test_references_to_arrays_are_refused():
    with pytest.raises(ArgumentError, match=r"counter is .*Ref.*\n.*write it back"):
        sharded(lambda counter: counter[...] + 1)(nnx.Variable(jnp.zeros(8), ref=True))


def test_verify_reads_what_nnx_jit_compiles():
    found = autoshard.verify(nnx.jit(sgd), linear(), X, mesh=mesh_of(SHAPE))
    assert found.actual_peak > 0 and "Give verify autoshard(fn, ...) instead" in str(found)


@pytest.mark.parametrize("pad, remark", [("batch", "11 rows has 16"), ("auto", "from 257 to 264")])
def test_dims_that_do_not_divide_are_padded(pad, remark):
    """Modules among the arguments stay the caller's, with what the step changes in them."""
    mesh, rows = {"x": 8}, {"batch": 11, "auto": 4}[pad]
    how = {"mesh": mesh_of(mesh), "topology": slow_chips(mesh)}

    def step(model, metrics, batch):
        def loss_of(model):
            logits = model(batch["x"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), logits

        (loss, logits), gradients = nnx.value_and_grad(loss_of, has_aux=True)(model)
        metrics.update(loss=loss, logits=logits, labels=batch["label"])
        nnx.update(model, jax.tree.map(lambda w, g: w - 0.1 * g, nnx.state(model, nnx.Param), gradients))
        return logits

    def arguments():
        metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
        return nnx.Linear(8, 257, rngs=nnx.Rngs(0)), metrics, {"x": X[:rows], "label": LABELS[:rows]}

    whole = {"batch/**": P()} if pad == "auto" else None  # so that classes are the dim that is worth splitting
    padded, plain = autoshard.autoshard(step, pad=pad, fixed=whole, **how), nnx.jit(step)
    ours, theirs = arguments(), arguments()
    for _ in range(2):
        np.testing.assert_allclose(padded(*ours), plain(*theirs), rtol=2e-4, atol=1e-5)
    assert_same(ours, theirs)
    assert any(remark in one for one in padded.plan(*ours).warnings)


def test_shardings_of_modules_are_told_by_keys():
    """Written as a state, or taken from another instance of the module, whose optimizer is another one."""

    def arguments():
        model = linear()
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param), X

    def step(model, optimizer, x):
        loss, gradients = nnx.value_and_grad(loss_of)(model, x)
        optimizer.update(model, gradients)
        return loss

    def kernels(shardings):
        plan = autoshard.evaluate(step, *arguments(), mesh=mesh_of(SHAPE), in_shardings=shardings)
        return {one.name: one.spec for one in plan.arguments if one.name.endswith("kernel")}

    planned = sharded(step, fixed={"*kernel": P("x", "y")}).plan(*arguments())
    expected = dict.fromkeys(
        ("model/kernel", *(f"optimizer/opt_state/0/{name}/kernel" for name in ("mu", "nu"))), P("x", "y")
    )
    assert kernels(planned.in_shardings) == expected
    state = nnx.state(linear())
    state["kernel"], state["bias"] = P("x", "y"), None
    assert kernels((state, None, P("x"))) == expected | dict.fromkeys(list(expected)[1:], P())
    with pytest.raises(MeshError, match=r"under '0/weight', where there is no array\. There are arrays under '0/bias'"):
        kernels(({"weight": P("x")}, None, None))


def test_metadata_of_variables_is_a_wish():
    class Pair(nnx.Module):
        def __init__(self, rngs):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "y"))
            self.up = nnx.Linear(8, 16, kernel_init=init, rngs=rngs)
            self.down = nnx.Linear(16, 8, kernel_metadata={"out_sharding": ("hidden", None)}, rngs=rngs)

        def __call__(self, x):
            return self.down(self.up(x))

    with jax.set_mesh(mesh_of(SHAPE)), nnx.logical_axis_rules([("hidden", "x")]):
        model = Pair(nnx.Rngs(0))
        kept, ignored = (sharded(sgd, ignore_constraints=ignore).plan(model, X) for ignore in (False, True))
    specs = {argument.name: argument.spec for argument in kept.arguments}
    assert (specs["model/up/kernel"], specs["model/down/kernel"]) == (P(None, "y"), P("x"))
    assert [a.spec for a in ignored.arguments if "kernel" in a.name] != [P("x"), P(None, "y")]
