"""Operations: the numbers of the plain function, derivatives, batches, and what plans say of their calls."""

import jax
import jax.numpy as jnp
import pytest
from cases import normal
from equality import assert_equal
from jax import lax
from jax.sharding import PartitionSpec as P
from oracles import mesh_of, slow_chips, tally

from autoshard import ArgumentError, Plan, PlanError, RuleError, autoshard, operation

SHAPES = ({"x": 8}, {"x": 4, "y": 2}, {"x": 2, "y": 2, "z": 2})
X = normal(8, 64)


def _softmax(x, *, scale=1.0):
    z = jnp.exp(x * scale - (x * scale).max(-1, keepdims=True))
    return z / z.sum(-1, keepdims=True)


def _by_parts(split, x, *, scale=1.0):
    axes = split.axes("part")
    z = jnp.exp(x * scale - lax.stop_gradient(lax.pmax(lax.stop_gradient((x * scale).max(-1, keepdims=True)), axes)))
    return z / lax.psum(z.sum(-1, keepdims=True), axes)


softmax = operation("b n -> b n", need_replication="n", name="softmax")(_softmax)
softmax.implementation(splits={"part": "n"}, name="by_parts")(_by_parts)


@operation("b i, i j -> b j", reduction="i")
def project(x, w):
    return jnp.tanh(x) @ w


def loss(x):
    return (softmax(x, scale=2.0) ** 2 @ jnp.arange(x.shape[-1], dtype=x.dtype)).sum()


def plain_loss(x):
    return (_softmax(x, scale=2.0) ** 2 @ jnp.arange(x.shape[-1], dtype=x.dtype)).sum()


TRANSFORMED = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "tangent": lambda f: lambda x: jax.jvp(f, (x,), (x + 1,)),
    "gradient of a batch": lambda f: jax.grad(lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])).sum()),
    "batch of gradients": lambda f: lambda x: jax.vmap(jax.grad(f))(jnp.stack([x, 2 * x])),
    "second derivative": lambda f: lambda x: jax.jvp(jax.grad(f), (x,), (x,)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "loop": lambda f: jax.grad(lambda x: lax.scan(lambda c, _: (c - jax.grad(f)(c), f(c)), x, length=2)[1].sum()),
}


@pytest.mark.parametrize("how", TRANSFORMED)
def test_transformed_it_is_the_plain_function(how):
    transformed = TRANSFORMED[how]
    found, expected = jax.jit(lambda x: (transformed(loss)(x), transformed(plain_loss)(x)))(X)
    assert_equal(found, expected)


PLANNED_ROW = [
    "gradient",
    "checkpoint",
    *(pytest.param(how, marks=pytest.mark.slow) for how in ("gradient of a batch", "loop")),
]


@pytest.mark.parametrize("how", PLANNED_ROW)
def test_planned_it_computes_the_same_numbers(how):
    step, shape = TRANSFORMED[how](loss), SHAPES[1]
    sharded = autoshard(step, mesh=mesh_of(shape), topology=slow_chips(shape), fixed={"x": P(None, "x")})
    plan = sharded.plan(X)
    assert how == "loop" or any(run.name == "by_parts" for run in plan.annotations.runs.values())
    assert_equal(sharded(X), jax.jit(TRANSFORMED[how](plain_loss))(X))


@pytest.mark.parametrize("shape", [*(pytest.param(shape, marks=pytest.mark.slow) for shape in SHAPES[:2]), SHAPES[2]])
def test_every_split_computes_the_same_numbers(shape):
    """All that plans may choose, forward and backward, of an implementation and of a rule with partial sums."""
    from autoshard.operations.call import Call
    from autoshard.propagation.registry import rule_of

    mesh, w = mesh_of(shape), normal(64, 16, seed=1)
    step = lambda x, w: (jax.vjp(softmax, x)[1](X), jax.vjp(project, x, w)[1](normal(8, 16)))  # noqa: E731
    program = autoshard(step, mesh=mesh).trace(X, w)
    calls = [one for one in program.equations if one.primitive == "operation"]
    assert len(calls) == 4
    for equation in calls:
        arrays = [normal(*x.shape, seed=i) for i, x in enumerate(equation.inputs)]
        call = Call.of(equation, rule_of(equation))
        runs = list(call.runs(shape))
        assert len({run.name for run in runs}) == 1 + len(call.operation.implementations)
        runs = runs[-1 : 0 : -max(1, len(runs) // 4)]
        expected = call.operation.function(*arrays)
        for run in runs:
            assert_equal(jax.jit(call.on_mesh(run, mesh))(*arrays), jax.tree.leaves(expected))


def test_collectives_are_those_of_the_compiled_program():
    shape, x = {"x": 8}, normal(3, 4096)
    fixed = {"x": P(None, "x")}
    plan = autoshard(jax.value_and_grad(loss), mesh=mesh_of(shape), topology=slow_chips(shape), fixed=fixed).plan(x)
    assert {run.name for run in plan.annotations.runs.values()} == {"by_parts"}
    found = plan.verify()
    assert tally(plan.predicted.collectives) == tally(found.collectives)


def test_formulas_take_the_place_of_the_traced_function():
    other = operation("b n -> b n", need_replication="n", name="dear")(_softmax)
    other.implementation(splits={"part": "n"}, seconds=lambda split, topology, x, **_: 1e3)(_by_parts)
    shape = {"x": 8}
    plan = autoshard(lambda x: other(x), mesh=mesh_of(shape), topology=slow_chips(shape)).plan(X)
    assert {run.name for run in plan.annotations.runs.values()} == {""}
    fixed = {"x": P(None, "x")}
    dear = autoshard(lambda x: other(x), mesh=mesh_of(shape), topology=slow_chips(shape), fixed=fixed).plan(X[:3])
    assert not dear.annotations.runs  # gathered instead


def test_an_implementation_that_cannot_run_is_not_chosen():
    other = operation("b n -> b n", need_replication="n", name="never")(_softmax)
    other.implementation(splits={"part": "n"}, where=lambda split, **_: split.count("part") > 8)(_by_parts)
    shape, x = {"x": 8}, X[:3]
    plan = autoshard(other, mesh=mesh_of(shape), topology=slow_chips(shape), fixed={"x": P(None, "x")}).plan(x)
    assert not plan.annotations.runs


def test_a_call_that_is_kept_whole_runs_by_hand_too():
    """A compiler of TPU refuses a kernel whose partitioning is left to it."""
    other = operation("b n -> b n", need_replication="b n", name="whole")(_softmax)
    sharded = autoshard(lambda x: other(x), mesh=mesh_of({"x": 8}), topology=slow_chips({"x": 8}))
    assert not sharded.plan(X).annotations.runs
    assert "manual_computation" in sharded.lower(X).as_text()
    assert_equal(sharded(X), _softmax(X))


def test_a_plan_file_keeps_what_runs_calls():
    shape, fixed = {"x": 4, "y": 2}, {"x": P(None, "x")}
    mesh = mesh_of(shape)
    plan = autoshard(loss, mesh=mesh, topology=slow_chips(shape), fixed=fixed).plan(X[:3])
    again = Plan.loads(plan.dumps(), mesh)
    assert again.annotations.runs == plan.annotations.runs != {}
    assert_equal(autoshard(loss, mesh=mesh, plan=again)(X[:3]), loss(X[:3]))
    changed = plan.dumps().replace('"by_parts"', '"by_magic"')
    changed = changed[: changed.rindex(',\n "digest"')] + "\n}\n"
    with pytest.raises(PlanError, match="by_magic"):
        autoshard(loss, mesh=mesh, plan=Plan.loads(changed, mesh))(X[:3])


def test_a_plan_is_not_that_of_another_operation_of_the_same_text():
    """Operations of a factory close over what no fingerprint reads, as here which splits can run."""

    def scaled(most):
        made = operation("b n -> b n", need_replication="n", name="scaled")(lambda x: _softmax(x) * most)

        @made.implementation(splits={"part": "n"}, where=lambda split: split.count("part") <= most)
        def by_parts(split, x):
            return _by_parts(split, x) * most

        return made

    shape, made = {"x": 8}, {most: scaled(most) for most in (8, 2)}

    def step(x, most):
        return made[most](x)

    fixed = {"x": P(None, "x")}
    sharded = autoshard(step, mesh=mesh_of(shape), topology=slow_chips(shape), fixed=fixed, static_argnames=("most",))
    for most, names in ((8, {"by_parts"}), (2, set())):
        assert {run.name for run in sharded.plan(X[:3], most=most).annotations.runs.values()} == names
        assert_equal(sharded(X[:3], most=most), _softmax(X[:3]) * most)


def test_a_backward_function_may_come_after_the_first_gradient():
    other = operation("b n -> b n", need_replication="n", name="late")(_softmax)
    by_parts = other.implementation(splits={"part": "n"})(_by_parts)
    first = other.backward_of((0,), (True,))
    by_parts.backward(lambda split, x, y, cotangent: cotangent)
    second = other.backward_of((0,), (True,))
    other.backward(lambda x, y, cotangent: 2 * cotangent)
    assert first.is_derived("_by_parts") is second.is_derived("_by_parts") is False
    assert second.implementations[0].local is not by_parts.local
    assert_equal(jax.vjp(other, X)[1](X)[0], 2 * X)
    assert other.backward_of((0,), (True,)) is other.backward_of((0,), (True,)) is not second


def test_what_is_wrong_is_said():
    with pytest.raises(ArgumentError, match="operand 1 of project is a str"):
        project(X, "w")
    with pytest.raises(ArgumentError, match="scale= of softmax is a list"):
        softmax(X, scale=[1])
    with pytest.raises(RuleError, match="already has an implementation"):
        softmax.implementation(splits={"part": "n"}, name="by_parts")(_by_parts)
    with pytest.raises(RuleError, match="splits some factor"):
        softmax.implementation(splits={})(_by_parts)
    other = operation("b n -> b n", need_replication="n", name="other")(_softmax)
    other.implementation(splits={"part": "k"}, name="by_parts")(_by_parts)
    with pytest.raises(RuleError, match="'by_parts' of other splits 'k'"):
        autoshard(other, mesh=mesh_of(SHAPES[0])).plan(X)


def test_a_wrong_implementation_is_caught():
    """The oracle of this file can fail."""
    from equality import are_equal

    wrong = operation("b n -> b n", need_replication="n", name="wrong")(_softmax)
    wrong.implementation(splits={"part": "n"})(lambda split, x: _softmax(x))
    shape, fixed = {"x": 8}, {"x": P(None, "x")}
    assert not are_equal(
        autoshard(wrong, mesh=mesh_of(shape), topology=slow_chips(shape), fixed=fixed)(X[:3]), _softmax(X[:3])
    )


def test_operations_of_one_factory_have_fingerprints_of_their_own():
    """They differ in what they close over alone, and so does what another process would find in a cache."""

    def made(times):
        @operation("b -> b", name="times")
        def scaled(x):
            return times * x

        @scaled.implementation(splits={"ring": "b"}, where=lambda split: split.count("ring") == times)
        def ring(split, x):
            return times * x

        return scaled

    mesh, x = jax.make_mesh((8,), ("x",)), jnp.ones(8)
    first, again, other = (autoshard(made(times), mesh=mesh).trace(x).fingerprint for times in (2, 2, 4))
    assert first == again != other
