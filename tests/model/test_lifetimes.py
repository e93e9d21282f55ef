"""When values hold memory: stretches worked out by hand, and what must hold for every read of every model."""

import jax
import jax.numpy as jnp
import pytest
from oracles import SMALL
from programs import f32, model_program, traced
from sweeps import some

from autoshard.model import lifetimes
from autoshard.model.grouping import groups_of
from autoshard.model.groups import Group
from autoshard.model.heap import result_places
from autoshard.model.heap.result_places import aliased, copied_when_donated
from autoshard.model.lifetimes import holding, repeats, use_span
from autoshard.model.xla.products import transposes
from autoshard.program import Program, Value
from autoshard.propagation import rules_for

X, W, SQUARE = f32(8, 4), f32(4, 6), f32(4, 4)


def grouping(fn, *args, donate=()) -> tuple[Program, list[Group]]:
    program = traced(fn, *args, donate=donate)
    return program, groups_of(program, rules_for(program))


def holdings(groups: list[Group]) -> list[tuple]:
    """Per made value: the primitive that makes it, and its Holding as a tuple."""
    found = []
    for group in groups:
        for made in group.outputs:
            (primitive,) = (e.primitive for e in group.equations if made.value in e.outputs)
            users = [(user, use) for user in groups for use in user.uses if use.value is made.value]
            held = holding(made.value, group, users)
            found.append((primitive, held.made, held.used, held.stored))
    return found


def kept_for_later(x, w, v):
    a = x @ w
    return a @ v @ w @ a.T


def layers(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), jnp.exp(x)), x, ws)


def either(p, x):
    return jax.lax.cond(p, lambda x: jnp.sin(x), lambda x: x.sum(0, keepdims=True) + x, x)


# Points are indices of equations. Columns: while it lies as it was made, while it is used, whether it is stored.
HOLDINGS = {
    "one after the other": (
        lambda x, w, v: jnp.sin(x @ w) @ v,
        [X, W, f32(6, 4)],
        [("dot_general", (0, 1), (1, 2), True), ("sin", (1, 2), (2, 3), True), ("dot_general", (2, 3), None, True)],
    ),
    "used again at the end": (
        kept_for_later,
        [X, W, f32(6, 4)],
        [
            ("dot_general", (0, 1), (1, 5), True),  # by the second product, and transposed by the last
            ("dot_general", (1, 2), (2, 3), True),
            ("dot_general", (2, 4), (4, 5), True),
            ("transpose", None, (4, 5), False),  # a view
            ("dot_general", (4, 5), None, True),
        ],
    ),
    # 0 carry, 1 slice, 2 product, 3 sin, 4 exp, 5 stack
    "a loop": (
        layers,
        [X, f32(3, 4, 4)],
        [
            ("scan_carry", (0, 6), (1, 3), False),  # the loop's own buffer
            ("scan_carry", (6, 7), None, True),  # after the loop
            ("scan_slice", (1, 2), (2, 3), True),
            ("dot_general", (2, 3), (3, 4), True),
            ("sin", (3, 5), (5, 6), True),  # handed on when the body ends
            ("exp", None, (2, 3), False),  # computed where it is stacked, as soon as it can be
            ("scan_stack", (0, 1), None, True),  # written into from the loop's start on
        ],
    ),
    "branches": (
        either,
        [jax.ShapeDtypeStruct((), bool), X],
        [
            ("convert_element_type", (0, 1), None, True),  # what decides
            ("branch_const", None, (2, 5), False),  # the operand itself, read by the sum and by what adds the sum
            ("reduce_sum", (2, 4), (4, 5), True),
            ("add", (4, 7), (7, 8), True),
            ("branch_const", None, (6, 7), False),
            ("sin", (6, 7), (7, 8), True),
            ("branch_join", (7, 8), None, True),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", HOLDINGS)
def test_holdings_by_hand(case):
    fn, args, expected = HOLDINGS[case]
    assert holdings(grouping(fn, *args)[1]) == expected


LOOP = lambda c, x, ws: jax.lax.scan(lambda x, w: (jnp.sin(x @ w) + c, x * 2), x * 3, ws)  # noqa: E731


def test_uses_of_a_loop():
    """What enters a loop is held while it runs; the carry's first value until it has been taken over."""
    _, groups = grouping(LOOP, X, X, f32(3, 4, 4))
    spans = {(use.equation.primitive, use.operand): use_span(group, use) for group in groups for use in group.uses}
    ((start, end),) = {equation.loop for group in groups for equation in group.equations if equation.loop}
    assert (start, end) == (1, 9)  # after `x * 3`: const, carry, slice, product, sin, add, mul, stack
    assert spans["scan_const", 0] == spans["scan_slice", 0] == (start, end)
    assert spans["scan_carry", 0] == (start, start) and spans["scan_carry", 1] == (end - 1, end)


# Operands that XLA transposes, worked out from what it wants: batch, kept, contracted; or batch, contracted, kept.
TRANSPOSES = {
    "b i k, b k j": (((2,), (1,)), ((0,), (0,)), (2, 8, 4), (2, 4, 6), [False, False]),
    "b i k, b j k": (((2,), (2,)), ((0,), (0,)), (2, 8, 4), (2, 6, 4), [False, True]),
    "b k i, b k j": (((1,), (1,)), ((0,), (0,)), (2, 4, 8), (2, 4, 6), [True, False]),
    "k i, j k": (((0,), (1,)), ((), ()), (4, 8), (6, 4), [False, False]),  # matrices are read either way round
    "b s k, k j": (((2,), (0,)), ((), ()), (2, 8, 4), (4, 6), [False, False]),
    "b s i, b s j": (((0, 1), (0, 1)), ((), ()), (2, 8, 4), (2, 8, 6), [True, False]),
    "b t h k, b s h k": (((3,), (3,)), ((0, 2), (0, 2)), (2, 8, 4, 6), (2, 8, 4, 6), [True, True]),
}


@pytest.mark.parametrize("case", TRANSPOSES)
def test_transposed_operands(case):
    contracted, batched, left, right, expected = TRANSPOSES[case]
    _, (group,) = grouping(lambda x, y: jax.lax.dot_general(x, y, (contracted, batched)), f32(*left), f32(*right))
    assert [transposes(use) for use in group.uses] == expected


def convolved(x, kernel):
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_the_gradient_of_a_kernel_transposes_the_images():
    images, kernel = f32(2, 8, 8, 3), f32(3, 3, 3, 4)
    _, (forward,) = grouping(convolved, images, kernel)
    assert not any(map(transposes, forward.uses))
    _, groups = grouping(jax.grad(lambda k, x: convolved(x, k).sum()), kernel, images)
    (backward,) = (group for group in groups if group.equations[0].primitive == "conv_general_dilated")
    assert [use.operand for use in backward.uses if transposes(use)] == [0]


REPEATS = {  # what XLA writes out in full before it is summed
    "smaller factors": (lambda x, s: (x * s).sum(), [X, f32(4)], ["s"]),
    "not equal ones": (lambda x, s: (x * s).sum(), [X, X], []),
    "nor scalars": (lambda x, s: (x * s).sum(), [X, f32()], []),
    "nor where it is no product": (lambda x, s: (x + s).sum(), [X, f32(4)], []),
    "nor where it is no sum": (lambda x, s: (x * s).max(), [X, f32(4)], []),
}


@pytest.mark.parametrize("case", REPEATS)
def test_repeated_operands(case):
    fn, args, expected = REPEATS[case]
    groups = grouping(fn, *args)[1]
    assert [use.value.name for group in groups for use in repeats(group)] == expected


# Donated arguments.


def beside(w, x, g):
    return w - x.T @ g, x @ w


def before(w, x):
    return w - x.T @ jnp.sin(x @ w)


def in_a_loop(w, x):
    return w - jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]


def two_loops(w, x):
    def body(x, _):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0], None

    return w - jax.lax.scan(body, x, None, length=3)[0]


# Function, arguments, the results that are aliased, and the donated arguments of which XLA makes a copy, each with
# the primitive whose all_reduce would make it wait.
DONATED = {
    "every use before its update": (before, [W, X], {0}, {}),
    "a use beside its update": (beside, [W, X, f32(8, 6)], {0}, {0: "dot_general"}),
    "a use beside, without a gradient": (lambda w, x: (w - 1, x @ w), [W, X], {0}, {0: None}),
    "swapped": (lambda a, b: (b + 1, a * 2), [X, X], {0, 1}, {0: None, 1: None}),
    "every use in a loop": (in_a_loop, [SQUARE, SQUARE], {0}, {}),
    "every use in a loop of a loop": (two_loops, [SQUARE, SQUARE], {0}, {}),
    "untouched": (lambda w, x: (w, x @ w), [W, X], {0}, {}),
}


@pytest.mark.parametrize("case", DONATED)
def test_donated_by_hand(case):
    fn, args, alias, copied = DONATED[case]
    program, groups = grouping(fn, *args, donate=(0, 1) if case == "swapped" else (0,))
    found = copied_when_donated(program, groups)
    assert aliased(program) == alias
    assert {i: gradient and gradient.equations[0].primitive for i, gradient in found.items()} == copied


def assert_copied(program: Program, groups: list[Group], copied: set[int]) -> None:
    """Exactly those donated arguments are copied that some group reads from which no path leads to the update."""
    home = {equation.index: group for group in groups for equation in group.equations}
    maker = {output.id: equation for equation in program.equations for output in equation.outputs}
    expected = set()
    for argument, result in program.carried.items():
        update = program.results[result]
        reading = {home[e.index] for e in program.equations if any(x is program.arguments[argument] for x in e.inputs)}
        if update is program.arguments[argument]:
            continue  # nothing is written over it
        queue, ahead = [maker[update.id]] if update.id in maker else [], set()
        while queue:
            equation = queue.pop()
            if equation not in ahead:
                ahead.add(equation)
                queue += [maker[x.id] for x in equation.inputs if isinstance(x, Value) and x.id in maker]
        if argument in program.donated and reading - {home[equation.index] for equation in ahead}:
            expected.add(argument)
    assert copied == expected


@pytest.mark.parametrize("name", some(SMALL, "cnn", "gpt remat", "mlp", "moe", "tied"))
def test_donated_arguments_of_models(name):
    program = model_program(name)
    groups = groups_of(program, rules_for(program))
    found = copied_when_donated(program, groups)
    assert_copied(program, groups, set(found))
    with pytest.raises(AssertionError):
        assert_copied(program, groups, set(found) ^ {0})


# What loops write in place: a total, or a state that is updated after its last use.


def total(x, ws):
    return jax.lax.scan(lambda t, w: (t + w.T @ x, None), jnp.zeros((4, 4)), ws)[0]


def total_that_is_read(x, ws):
    return jax.lax.scan(lambda t, w: (t + w.T @ x, t.sum()), jnp.zeros((4, 4)), ws)


def steps(w, xs):
    return jax.lax.scan(lambda w, x: (w - x.T @ jnp.sin(x @ w), None), w, xs)[0]


def steps_and_more(w, xs):
    return steps(w, xs), jnp.sin(w)


IN_LOOPS = {  # function, arguments, donated; whether the loop carries on the argument, and updates it, in place
    "a total": (total, [f32(4, 4), f32(3, 4, 4)], (), False, True),
    "a total that is read as well": (total_that_is_read, [f32(4, 4), f32(3, 4, 4)], (), False, False),
    "no update": (layers, [X, f32(3, 4, 4)], (), False, False),
    "steps": (steps, [f32(4, 4), f32(3, 8, 4)], (0,), True, True),
    "steps on what is kept": (steps, [f32(4, 4), f32(3, 8, 4)], (), False, True),
    "steps on what is read later": (steps_and_more, [f32(4, 4), f32(3, 8, 4)], (0,), False, True),
}


@pytest.mark.parametrize("case", IN_LOOPS)
def test_what_loops_write_in_place(case):
    fn, args, donate, carried_on, updated = IN_LOOPS[case]
    program, groups = grouping(fn, *args, donate=donate)
    (carry,) = (e for e in program.equations if e.primitive == "scan_carry")
    assert result_places.looped(program) == ({carry.outputs[0].id: 0} if carried_on else {})
    assert result_places.updated_in_loops(program, groups) == ({carry.inputs[1].id} if updated else set())


def test_a_gradient_is_added_at_once():
    program, groups = grouping(lambda x, ws: total(jnp.sin(x), ws), f32(4, 4), f32(3, 4, 4))
    by_primitive = {group.equations[-1].primitive: group for group in groups}
    product, add, carry = (by_primitive[name] for name in ("dot_general", "add", "scan_carry"))
    assert product.handed_on_at == add.handed_on_at == carry.equations[0].loop[1]
    assert carry.handed_on_at == len(program.equations)
    assert add.point == product.point + 1


def test_a_fill_is_made_as_it_is_wanted():
    _, groups = grouping(total, f32(4, 4), f32(3, 4, 4))
    fill = next(group for group in groups if group.equations[0].primitive == "broadcast_in_dim")
    zeros = fill.outputs[0].value
    ((carry, use),) = ((group, use) for group in groups for use in group.uses if use.value is zeros)
    start, _ = use.equation.loop
    assert holding(zeros, fill, [(carry, use)]) == lifetimes.Lifetime(None, (start, start), stored=True)


# What must hold whatever the program.


def assert_held(groups: list[Group]) -> None:
    """Whoever runs finds what it reads in memory."""
    maker = {made.value.id: group for group in groups for made in group.outputs}
    runs: dict[int, set[int]] = {group.index: {group.point} for group in groups}
    for group in reversed(groups):  # a repeated group runs where its readers run
        for use in group.uses:
            before = maker.get(use.value.id)
            if before is not None and before.is_recomputed:
                runs[before.index] |= runs[group.index]
    for group in groups:
        for made in group.outputs:
            users = [(user, use) for user in groups for use in user.uses if use.value is made.value]
            held = holding(made.value, group, users)
            assert (held.used is None) == (not users)
            points = [t for user, use in users if use.equation.loop is None for t in runs[user.index]]
            assert all(held.used[0] <= t < held.used[1] for t in points)
            if held.stored:
                start, end = held.made or (held.used[0], held.used[0])
                assert held.used[0] <= end if users else start < end  # never away in between
                late = group.is_fill or group.equations[0].primitive == "scan_carry"
                assert start <= group.point or late


@pytest.mark.parametrize("name", some(SMALL, "cnn", "gpt remat", "mlp", "moe", "tied"))
def test_reads_of_models(name):
    program = model_program(name)
    assert_held(groups_of(program, rules_for(program)))


def test_a_read_that_is_forgotten_is_caught(monkeypatch):
    """As if a group that is computed again ran only once."""
    monkeypatch.setattr(lifetimes, "use_span", lambda group, use: (group.point, group.point + 1))
    with pytest.raises(AssertionError):
        assert_held(grouping(kept_for_later, X, W, f32(6, 4))[1])
