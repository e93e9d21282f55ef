"""Traced steps: names, source lines, what goes round, how often things run, and the boundaries of loops."""

import inspect
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from oracles import SMALL, mesh_of
from sweeps import some

import autoshard
from autoshard.program import Program, Value, trace

W = np.ones((8, 8), np.float32)
X = np.ones((4, 8), np.float32)


def traced(fn, *args, kwargs=None, **jit_keywords) -> Program:
    program = trace(fn, args, kwargs or {}, **jit_keywords)
    assert_well_formed(program)
    return program


def assert_well_formed(program: Program) -> None:
    """Every value is defined once and before it is read, save the second operand of a carry; indices are positions."""
    defined = {value.id for value in (*program.arguments, *program.constants)}
    assert len(defined) == len(program.arguments) + len(program.constants)
    handed_on = []
    for i, equation in enumerate(program.equations):
        assert equation.index == i
        early = equation.inputs[:1] if equation.primitive == "scan_carry" else equation.inputs
        handed_on += equation.inputs[len(early) :]
        assert defined.issuperset(x.id for x in early if isinstance(x, Value)), equation
        outputs = {value.id for value in equation.outputs}
        assert defined.isdisjoint(outputs), equation
        defined |= outputs
        if equation.loop:
            start, end = equation.loop
            assert start <= i < end <= len(program.equations)
    assert defined.issuperset(x.id for x in (*handed_on, *program.results) if isinstance(x, Value))
    assert all(program.values[value.id] is value for value in program.arguments)


def test_the_oracle_sees_a_use_before_its_definition():
    program = traced(lambda x: jnp.sin(jnp.cos(x)), X)
    object.__setattr__(program, "equations", program.equations[::-1])
    with pytest.raises(AssertionError):
        assert_well_formed(program)


def count(program: Program) -> Counter:
    return Counter(equation.primitive for equation in program.equations)


@pytest.mark.parametrize("name", some(SMALL, "cnn", "gpt remat", "mlp", "moe", "tied"))
def test_every_model_is_well_formed(name):
    model = SMALL[name]()
    program = traced(model.step, model.state, model.batches(0), donate_argnums=0)
    state = jax.tree.leaves(model.state)
    assert program.donated == frozenset(range(len(state)))
    assert set(program.carried) == set(range(len(state))), "all of the state goes round"
    for argument, result in program.carried.items():
        assert program.arguments[argument].shape == program.results[result].shape


# Names.


def named(params, *batch, rate, **rest):
    return params, [x * rate for x in batch], rest


def test_arguments_have_the_users_names():
    args = ({"layers": [{"w": W}, {"w": W}]}, X, X)
    program = traced(named, *args, kwargs={"rate": 0.1, "scale": X})
    assert [value.name for value in program.arguments] == [
        "params/layers/0/w", "params/layers/1/w", "batch/0", "batch/1", "rate", "rest/scale",
    ]  # fmt: skip
    assert program.result_names == ("0/layers/0/w", "0/layers/1/w", "1/0", "1/1", "2/scale")


def test_static_arguments_do_not_shift_names():
    program = traced(lambda n, state, mode, x: x * n + state["w"], 2, {"w": X}, "a", X, static_argnums=(0, 2))
    assert [value.name for value in program.arguments] == ["state/w", "x"]


def test_names_in_flax_modules_leave_out_the_variables_value():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    program = traced(lambda model, optimizer: (model, optimizer), model, optimizer)
    names = [value.name for value in program.arguments]
    assert names[:2] == ["model/bias", "model/kernel"]
    assert {"optimizer/step", "optimizer/opt_state/0/trace/kernel"} <= set(names)
    assert not any("value" in name for name in names)


def test_closed_over_arrays_are_constants():
    table = jnp.arange(32.0).reshape(4, 8)
    program = traced(lambda x: x + table, X)
    assert [value.shape for value in program.constants] == [(4, 8)]
    assert program.equations[0].inputs == (program.arguments[0], program.constants[0])


def test_results_that_are_python_numbers_have_the_type_that_jit_gives_them():
    def fn(x):
        return x, 0.0, 1, True, 1j

    types = [jax.typeof(result).dtype for result in jax.jit(fn)(X)]
    assert [result.dtype for result in traced(fn, X).results] == types
    with jax.enable_x64(True):
        assert [str(result.dtype) for result in traced(fn, X).results[1:3]] == ["float64", "int64"]


def test_a_step_is_traced_without_a_mesh_unless_it_names_axes():
    """Libraries ask whether one is set, and constrain what they make if so."""
    seen = []

    def fn(x):
        seen.append(jax.sharding.get_abstract_mesh().empty)
        return x

    mesh = mesh_of({"x": 8})
    autoshard.autoshard(fn, mesh=mesh).trace(X)
    assert seen == [True]
    with jax.set_mesh(mesh):
        autoshard.autoshard(fn, mesh=mesh).trace(X)
    assert seen == [True, False]
    named = autoshard.autoshard(lambda x: jax.lax.with_sharding_constraint(fn(x), P("x")), mesh=mesh).trace(X)
    assert seen == [True, False, True, False]
    assert [equation.primitive for equation in named.equations] == ["sharding_constraint"]


# Source lines.


def helper(x):
    return jnp.tanh(x)  # the line of tanh


def with_lines(w, x):
    y = x @ w  # the line of dot_general
    return helper(y)


def line_of(fn, text: str) -> int:
    lines, first = inspect.getsourcelines(fn)
    return first + next(i for i, line in enumerate(lines) if text in line)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_equations_know_the_users_line(wrap):
    program = traced(lambda w, x: wrap(with_lines)(w, x), W, X)
    lines = {equation.primitive: equation.source for equation in program.equations}
    for primitive, fn in (("dot_general", with_lines), ("tanh", helper)):
        assert lines[primitive].line == line_of(fn, f"the line of {primitive}")
        assert lines[primitive].file == __file__
        assert lines[primitive].function == fn.__name__
        assert str(lines[primitive]) == f"test_program.py:{lines[primitive].line}"


def test_lines_inside_flax_are_those_of_the_caller():
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    program = traced(lambda model, x: model(x), model, X)
    assert {equation.source.file for equation in program.equations} == {__file__}
    assert {value.source for value in program.arguments} == {None}


# What goes round.


def test_what_takes_an_arguments_place():
    def step(state, batch):
        return {"w": state["w"] + 1, "count": state["count"] + 1}, batch["w"], state["w"].sum()

    state, batch = {"count": np.int32(0), "w": W}, {"w": W}
    program = traced(step, state, batch)
    names = {program.arguments[a].name: program.result_names[r] for a, r in program.carried.items()}
    assert names == {"state/count": "0/count", "state/w": "0/w"}


CARRIED = [  # function, arguments, donated, argument -> result
    (lambda w, x: w + x.sum(), (W, X), (), {}),  # a bare array is state only if the user says so
    (lambda w, x: w + x.sum(), (W, X), 0, {0: 0}),
    (lambda w, x: (x.sum(), w + 1), (W, X), 0, {0: 1}),
    (lambda w, m: (w + m, m * 2), (W, W), (0, 1), {0: 0, 1: 1}),
    (lambda s: {"a": s["b"], "b": s["a"]}, ({"a": W, "b": W},), (), {0: 0, 1: 1}),
    (lambda s: {"a": s["a"].astype(jnp.bfloat16)}, ({"a": W},), (), {}),  # another type is another array
    (lambda w, x: (x.sum(), 1.0), (W, X), 0, {}),
]


@pytest.mark.parametrize("fn, args, donated, carried", CARRIED)
def test_carried(fn, args, donated, carried):
    assert traced(fn, *args, donate_argnums=donated).carried == carried


# Calls, loops, branches.


def test_calls_are_opened_and_the_dead_left_out():
    def fn(x):
        jnp.cos(x)  # nobody reads it
        return jax.jit(jax.checkpoint(jax.nn.relu))(x) + jax.nn.logsumexp(x)

    primitives = count(traced(fn, X))
    assert not {"jit", "pjit", "checkpoint", "custom_jvp_call", "cos"} & set(primitives)
    assert {"max", "log", "add"} <= set(primitives)


def test_a_scan_is_planned_once_and_weighed_by_its_trips():
    def layer(x, w):
        return jnp.tanh(x @ w), x.sum(1)

    def fn(ws, x):
        def outer(x, _):
            return jax.lax.scan(layer, x, ws)

        return jax.lax.scan(outer, x, length=3)

    program = traced(fn, np.ones((5, 8, 8), np.float32), X)
    trips = {equation.primitive: equation.trips for equation in program.equations}
    assert trips["dot_general"] == trips["tanh"] == 15
    boundaries = {"scan_carry": 2, "scan_const": 1, "scan_slice": 1, "scan_stack": 2}
    assert count(program) == {"dot_general": 1, "reduce_sum": 1, "tanh": 1} | boundaries
    boundary = {equation.primitive: equation for equation in program.equations}
    (stacked,), (piece,) = boundary["scan_slice"].inputs, boundary["scan_slice"].outputs
    assert stacked.shape == (5, 8, 8) and piece.shape == (8, 8) and piece.trips == 15
    assert [value.shape for value in program.results] == [(4, 8), (3, 5, 4)]


def are_merged(first, second) -> bool:
    """Whether a program that computes both of its argument computes one value."""
    program = traced(lambda x: (first(x), second(x)), X)
    same = program.results[0] is program.results[1]
    assert bool(program.merged) or not same
    return same


def noisy(x):
    return x + jax.lax.rng_uniform(x[0, 0], x[0, 1], (8,))


REPEATED = {  # function, others that it is not merged with
    "rounded": (lambda x: x.astype(jnp.bfloat16), [lambda x: x.astype(jnp.float16)]),
    "scaled": (lambda x: 2.0 * x, [lambda x: 3.0 * x, lambda x: x * 2.0]),
    "zero": (lambda x: jnp.maximum(x, 0.0), [lambda x: jnp.maximum(x, -0.0)]),
    "summed": (lambda x: x.sum(0), [lambda x: x.max(0)]),
}


@pytest.mark.parametrize("name", REPEATED)
def test_what_is_computed_twice_is_merged(name):
    fn, others = REPEATED[name]
    assert are_merged(fn, fn)
    assert not any(are_merged(fn, other) for other in others)


@pytest.mark.parametrize("fn", [
    noisy,
    jax.lax.optimization_barrier,
    lambda x: jnp.zeros((4, 8)),  # reads no array
    lambda x: jax.lax.scan(lambda c, _: (c + 1, None), x, length=2)[0],
    lambda x: jax.pure_callback(lambda y: y, x, x, vmap_method="sequential"),  # calls a function made anew
])  # fmt: skip
def test_what_is_not_merged(fn):
    assert not are_merged(fn, fn)


def test_a_recomputation_is_not_merged_with_what_it_computes_again():
    layer = jax.checkpoint(lambda x: jnp.sin(jnp.cos(x)))
    program = traced(jax.value_and_grad(lambda x: layer(x).sum()), X)
    assert count(program)["cos"] == 3  # the value, again, and the derivative of the sine


@pytest.mark.parametrize("prevent_cse, guarded", [(True, 3), (False, 0)])
def test_a_recomputation_reads_from_behind_a_barrier(prevent_cse, guarded):
    """The weight, the layer's input and the cotangent; nothing that the forward pass reads."""
    layer = jax.checkpoint(lambda x, w: jnp.tanh(jnp.sin(x @ w)), prevent_cse=prevent_cse)
    program = traced(jax.grad(lambda w, x: layer(x, w).sum()), np.ones((8, 8), np.float32), X)
    assert len(program.guarded) == guarded
    read = {x.id for e in program.equations if e.primitive == "sin" for x in e.inputs}
    assert read.isdisjoint(program.guarded)


def test_a_carry_ties_its_four_values():
    program = traced(lambda w, x: jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, length=3)[0], W, X)
    (carry,) = (equation for equation in program.equations if equation.primitive == "scan_carry")
    initial, handed_on = carry.inputs
    seen, final = carry.outputs
    (tanh,) = (equation for equation in program.equations if equation.primitive == "tanh")
    (dot,) = (equation for equation in program.equations if equation.primitive == "dot_general")
    assert initial is program.arguments[1] and final is program.results[0]
    assert handed_on is tanh.outputs[0] and seen is dot.inputs[0]
    assert carry.loop == (0, len(program.equations))


def test_a_while_loop_has_consts_and_carries():
    def fn(w, x):
        return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]

    program = traced(fn, W, X)
    assert count(program) == {"scan_const": 1, "scan_carry": 2, "lt": 1, "add": 1, "dot_general": 1, "tanh": 1}
    assert {equation.trips for equation in program.equations} == {1, 3}


def test_branches_join_and_keep_what_decides_between_them():
    program = traced(lambda w, x: jax.lax.cond(x.max() > 0, lambda: x @ w, lambda: x * 2), W, X)
    assert {"reduce_max", "gt"} <= set(count(program))
    (join,) = (equation for equation in program.equations if equation.primitive == "branch_join")
    makers = {output.id: equation.primitive for equation in program.equations for output in equation.outputs}
    assert {makers[value.id] for value in join.inputs} == {"dot_general", "mul"}
    assert join.outputs == program.results


# Fingerprints.


def fingerprint(fn, *args, **keywords):
    return traced(fn, *args, **keywords).fingerprint


def test_fingerprints_differ_where_programs_do():
    same = [fingerprint(lambda w, x: x @ w, W, X), fingerprint(lambda w, x: jnp.matmul(x, w), W, X * 2)]
    assert len(set(same)) == 1
    others = {
        fingerprint(lambda w, x: x @ w, W, X[:2]),
        fingerprint(lambda w, x: x @ w, W, X.astype(np.float16)),
        fingerprint(lambda v, x: x @ v, W, X),
        fingerprint(lambda w, x: x @ w.T, W, X),
        fingerprint(lambda w, x: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))), W, X),
        fingerprint(lambda w, x: (x @ w).T, W, X),
        fingerprint(lambda w, x: x @ w, W, X, donate_argnums=1),
        fingerprint(lambda w, x: (x @ w, x), W, X),
    }
    assert len(others) == 8 and same[0] not in others
    again = [jax.checkpoint(lambda w, x: jnp.sin(x @ w).sum(), prevent_cse=prevented) for prevented in (True, False)]
    assert len({fingerprint(jax.grad(loss), W, X) for loss in again}) == 2


@pytest.mark.parametrize("returns", [True, False], ids=["returned", "lost"])
def test_changes_in_place_that_get_lost_are_named(returns, recwarn):
    def step(statistics, x):
        statistics["mean"] = statistics["mean"] + x.mean(0)
        return (statistics, x) if returns else x

    trace(step, ({"mean": jnp.zeros(4)}, jnp.ones((8, 4))), {})
    messages = [str(warning.message) for warning in recwarn if "in place" in str(warning.message)]
    assert len(messages) == (0 if returns else 1)
    assert returns or ("step changes 1 arrays" in messages[0] and "'mean'" in messages[0])
