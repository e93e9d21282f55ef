"""Which equations are planned as one: by hand for small functions, and what holds for every group of every model."""

import functools
import math
from collections import Counter, defaultdict
from dataclasses import replace

import jax
import jax.numpy as jnp
import optax
import pytest
from oracles import SMALL
from programs import f32, grouped, model_program, traced
from sweeps import some

from autoshard.model import grouping as module
from autoshard.model.grouping import groups_of
from autoshard.model.groups import Group
from autoshard.model.weights import made_of_state, waited_for
from autoshard.model.xla.backends import CPU, H100, V5E
from autoshard.model.xla.loop_memory import LoopMemory, kept_on_chip_in_loops, rounded_for_loops, turns_that_read
from autoshard.model.xla.operations import bytes_stacked_by_loop
from autoshard.model.xla.rounding import itemsizes_of
from autoshard.program import Program, Value, trace
from autoshard.program.trip_counts import UNKNOWN_TURNS
from autoshard.propagation import rules_for


def adamw(w, m, v, g):
    m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
    return w - 0.1 * (m / (jnp.sqrt(v) + 1e-8) + 0.01 * w), m, v


def layers(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), jnp.exp(x)), x, ws)


def sgd(w, x):
    return w - 0.1 * (x.T @ jnp.sin(x @ w))


def either(p, x):
    return jax.lax.cond(p, lambda x: jnp.exp(jnp.sin(x)), lambda x: -x, x)


X, W, SQUARE = f32(8, 4), f32(4, 6), f32(4, 4)

# What each group is made of, in order, and what is said of it: `fuses` and `late` are left out where a chain of
# elementwise equations is both, since that is what every chain before a result is.
TABLE = {
    "a chain": (lambda x: jnp.tanh(jnp.exp(x) + 1) * x, [X], ["exp add tanh mul"]),
    "adamw": (adamw, [X] * 4, ["mul mul add mul mul mul add sqrt add div mul add mul sub"]),
    "not through a product": (
        lambda x, w: jnp.tanh(jnp.exp(x) @ w) * 2,
        [X, W],
        ["exp: early", "dot_general: late", "tanh mul"],
    ),
    "two readers that are two groups": (
        lambda x, w, v: (lambda h: (h @ w, h @ v))(-x),
        [X, W, W],
        ["neg: early", "dot_general: late", "dot_general: late"],
    ),
    "two readers that are one group": (lambda x: (lambda h: jnp.sin(h) + jnp.cos(h))(x * x), [X], ["mul sin cos add"]),
    "a broadcast bias": (lambda x, b: jnp.tanh(x + b), [X, f32(4)], ["broadcast_in_dim add tanh"]),
    "both ways round": (lambda x: jnp.exp(x).T + jnp.sin(x), [SQUARE], ["exp transpose sin add"]),
    "not the same value both ways round": (
        lambda x: (lambda h: h.T + h)(jnp.exp(x)),
        [SQUARE],
        ["exp: recomputed", "transpose add"],
    ),
    "a dim in two": (
        lambda x, y: jnp.exp(x).reshape(4, 2, 4) * y, [X, f32(4, 2, 4)], ["exp: recomputed", "reshape mul"],
    ),
    "products are folded into sums": (
        lambda x: jnp.sum(x * x, axis=1),
        [X],
        ["mul: early folded recomputed", "reduce_sum: late"],
    ),
    "all work is, where sums are short": (
        lambda x: jnp.sum(jnp.exp(x), axis=1),
        [X],
        ["exp: early recomputed", "reduce_sum: late"],
    ),
    "others are not": (lambda x: jnp.prod(x * x, axis=1), [f32(8, 64)], ["mul: early", "reduce_prod: late"]),
    "a view of a product's operand": (
        lambda x, w: x.T @ w,
        [X, X],
        ["transpose: early recomputed view", "dot_general: late"],
    ),
    "a view that is a result": (
        lambda x, w: (lambda t: (t, t @ w))(x.T),
        [X, X],
        ["transpose: early view", "dot_general: late"],
    ),
    "an update": (
        sgd,
        [W, X],
        ["transpose: early recomputed view", "dot_general: early", "sin: early", "dot_general: late", "mul sub"],
    ),
    "cheap ones are repeated in many groups": (
        lambda x: (lambda h: (h.reshape(4, 2, 4) * 2, h.reshape(2, 4, 4) * 3))(x + 1),
        [X],
        ["add: recomputed", "reshape mul", "reshape mul"],
    ),
    "dear ones are not": (
        lambda x: (lambda h: (h.reshape(4, 2, 4) * 2, h.reshape(2, 4, 4) * 3))(jnp.exp(x)),
        [X],
        ["exp", "reshape mul", "reshape mul"],
    ),
    "a scan": (
        layers,
        [X, f32(3, 4, 4)],
        [
            "scan_carry: early", "scan_slice: early", "dot_general: early", "sin: early", "exp: early recomputed",
            "scan_stack: late stacks",
        ],
    ),
    "branches": (
        either,
        [jax.ShapeDtypeStruct((), bool), X],
        [
            "convert_element_type", "branch_const: early", "neg: early", "branch_const: early", "sin exp: early",
            "branch_join: late",
        ],
    ),
}  # fmt: skip


def described(group: Group) -> str:
    said = [] if group.feeds_only_results and group.fuses else ["late" if group.feeds_only_results else "early"]
    flags = {"folded": group.is_folded, "recomputed": group.is_recomputed, "stacks": group.is_stack}
    said += [name for name, holds in flags.items() if holds]
    said += ["view"] if group.is_view and group.equations[0].primitive != "reshape" else []
    primitives = " ".join(equation.primitive for equation in group.equations)
    return f"{primitives}: {' '.join(sorted(said))}" if said else primitives


@pytest.mark.parametrize("case", TABLE)
def test_by_hand(case):
    fn, args, expected = TABLE[case]
    assert [described(group) for group in grouped(fn, *args)] == expected


def assert_grouped(program: Program, groups: list[Group]) -> None:
    """What makes groups a program of its own: each equation in one, all that crosses them named, no dim in doubt."""
    home = {equation.index: group for group in groups for equation in group.equations}
    assert sum(len(group.equations) for group in groups) == len(home) == len(program.equations)
    assert [group.index for group in groups] == list(range(len(groups)))
    maker = {output.id: home[equation.index] for equation in program.equations for output in equation.outputs}
    readers: dict[int, set[Group]] = defaultdict(set)
    for equation in program.equations:
        for value in equation.inputs:
            if isinstance(value, Value):
                readers[value.id].add(home[equation.index])
    results = {value.id for value in program.results if isinstance(value, Value)}
    dims: dict[tuple[Group, int], set] = defaultdict(set)
    for group in groups:
        for equation in group.equations:
            assert equation.trips == group.trips
            operands, outputs = group.operands[equation.index], group.results[equation.index]
            values = *equation.inputs, *equation.outputs
            for value, of in zip(values, operands + outputs, strict=True):
                assert len(of) == len(value.shape)
                if isinstance(value, Value):
                    dims[group, value.id].add(of)
                for size, factors in zip(value.shape, of, strict=True):
                    assert all(group.sizes[factor] > 1 for factor in factors)
                    if factors and (group.splittable - group.windows).issuperset(factors):
                        assert math.prod(group.sizes[factor] for factor in factors) == size
    for group in groups:
        inside = {output.id for equation in group.equations for output in equation.outputs}
        read = {value.id for e in group.equations for value in e.inputs if isinstance(value, Value)} - inside
        if group.equations[0].primitive == "scan_carry" and group.equations[0].inputs[1] in group.equations[0].outputs:
            read.add(group.equations[0].inputs[1].id)  # a carry that the body hands on untouched
        assert {use.value.id for use in group.uses} == read
        assert len({(use.value.id, use.dims) for use in group.uses}) == len(group.uses)
        assert all({use.dims for use in group.uses if use.value.id == value} == dims[group, value] for value in read)
        crossing = {value for value in inside if value in results or readers[value] - {group}}
        named = {made.value.id for made in group.outputs}
        assert crossing == named or (len(group.equations) == 1 and crossing <= named)
        assert all({made.dims} == dims[group, made.value.id] for made in group.outputs)
        # nothing moves inside: whoever makes or reads a value in here sees its dims alike
        assert all(len(dims[group, value]) == 1 for value in inside)
        for use in group.uses:
            if use.value.id in maker and not (use.equation.primitive == "scan_carry" and use.operand == 1):
                assert maker[use.value.id].index < group.index
    for group in groups:
        assert group.feeds_only_results == all(
            after.fuses for after in _downstream(group, groups, readers, lambda _: True)
        )
        expected = len(program.equations) if group.feeds_only_results else _handed_on(group, groups, results)
        assert group.handed_on_at == expected
        if group.is_recomputed:
            runs = _downstream(group, groups, readers, lambda after: after.is_recomputed)
            assert group.last_point == max(after.point for after in runs)
            assert not any(made.value.id in results for made in group.outputs)
        else:
            assert group.last_point == group.point
        path = group.equations[-1].path
        is_again = any(path[:end] in program.backward for end in range(len(path)))  # XLA for CPU computes it early
        if not (group.is_stack or (group.handed_on_at is not None and group.fuses) or not group.uses or is_again):
            assert group.point == group.equations[-1].index
        if group.equations[0].primitive == "scan_stack" or group.fuses or is_again:
            made = (maker[use.value.id] for use in group.uses if use.value.id in maker)
            assert all(before.point <= group.point for before in made)


def _downstream(group: Group, groups: list[Group], readers: dict[int, set[Group]], passes) -> set[Group]:
    """All that `group` flows into, through groups that `passes` allows; a carry handed on untouched flows nowhere."""
    found, queue = set(), [group]
    while queue:
        now = queue.pop()
        if now is group or passes(now):
            ahead = {reader for made in now.outputs for reader in readers[made.value.id]} - found - {now}
            found |= ahead
            queue += ahead
    return found


def _handed_on(group: Group, groups: list[Group], results: set[int]) -> int | None:
    """The end of the loop that stacks or carries on all that `group` flows into through elementwise groups."""
    ends, queue = set(), [group]
    while queue:
        made = {one.value.id for one in queue.pop().outputs}
        ends.update([None] * bool(made & results))
        for after in groups:
            for use in after.uses:
                if use.value.id in made and (
                    after.is_stack or (use.equation.primitive == "scan_carry" and use.operand)
                ):
                    ends.add(use.equation.loop[1])
                elif use.value.id in made:
                    ends.update([] if after.fuses else [None])
                    queue += [after] * after.fuses
    return ends.pop() if len(ends) == 1 else None


SMALL_STEPS = {name: lambda fn=fn, args=args: trace(fn, tuple(args), {}) for name, (fn, args, _) in TABLE.items()}


@pytest.mark.parametrize("name", some(SMALL, "cnn", "gpt remat", "mlp", "moe", "tied"))
def test_groups_of_models(name):
    program = model_program(name)
    groups = groups_of(program, rules_for(program))
    assert_grouped(program, groups)
    assert len(groups) < len(program.equations) * 0.9


@pytest.mark.parametrize("name", TABLE)
def test_groups_of_small_functions(name):
    program = SMALL_STEPS[name]()
    assert_grouped(program, groups_of(program, rules_for(program)))


@pytest.mark.parametrize("case", ["both ways round", "not the same value both ways round"])
def test_factors_matched_by_position_are_caught(case, monkeypatch):
    """As if a transpose were no move: its factors are the host's in the order in which they stand."""

    def by_position(rule, read_as):
        return {factor: n for n, factor in enumerate(f for f in rule.factors if rule.sizes[f] > 1)}

    monkeypatch.setattr(module, "_mapping", by_position)
    program = SMALL_STEPS[case]()
    with pytest.raises(AssertionError):
        assert_grouped(program, groups_of(program, rules_for(program)))


def test_a_group_that_forgets_a_value_is_caught():
    program = SMALL_STEPS["adamw"]()
    for forget in ("uses", "outputs"):
        first, *others = groups_of(program, rules_for(program))
        groups = [replace(first, **{forget: getattr(first, forget)[:-1]}), *others]
        with pytest.raises(AssertionError):
            assert_grouped(program, groups)


def test_an_update_of_each_parameter_is_one_group():
    """Adam in optax, on a model of flax: three results per parameter come from one late group."""
    program = model_program("gpt")
    groups = groups_of(program, rules_for(program))
    maker = {made.value.id: group for group in groups for made in group.outputs}
    homes = Counter(maker[program.results[result].id].index for result in program.carried.values())
    updates = [index for index, results in homes.items() if results == 3]
    assert all(groups[index].feeds_only_results and groups[index].fuses for index in updates)
    assert len(updates) * 3 >= len(program.carried) - 5  # and a few counters


# What compilers for TPU and GPU do otherwise.


def groups_for(backend, fn, *args) -> list[Group]:
    program = traced(fn, *args)
    return groups_of(program, rules_for(program), backend)


SUMS = {  # products and sums of them, and how many are reduced together with each product
    "two": (lambda x, a, b: x @ a + x @ b, [2, 2]),
    "three": (lambda x, a, b: (x @ a + x @ b) + x @ (a * b), [3, 3, 3]),
    "with something else": (lambda x, a, b: x @ a + jnp.sin(x @ b), [1, 1]),
    "a product that is read besides": (lambda x, a, b: (lambda h: (h + x @ b, jnp.exp(h)))(x @ a), [1, 1]),
    "a sum that is a result": (lambda x, a, b: (lambda s: (s, jnp.exp(s)))(x @ a + x @ b), [2, 2]),
    "a sum that is read besides": (
        lambda x, a, b: (lambda s: (s + x @ (a * b), jnp.exp(s)))(x @ a + x @ b), [2, 2, 1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend, sums_first", [(CPU, False), (H100, True), (V5E, True)])
@pytest.mark.parametrize("case", SUMS)
def test_products_that_are_added_up_before_they_are_reduced(case, backend, sums_first):
    fn, expected = SUMS[case]
    products = [group for group in groups_for(backend, fn, SQUARE, SQUARE, SQUARE) if group.contracts]
    assert [group.summands for group in products] == (expected if sums_first else [1] * len(expected))
    assert [group.accumulator is not None for group in products] == [group.summands > 1 for group in products]
    together = Counter(group.accumulator for group in products if group.accumulator is not None)
    assert all(together[group.accumulator] == group.summands for group in products if group.accumulator is not None)


def test_a_product_that_is_a_result_is_reduced_alone():
    fn = lambda x, a, b: (lambda h: (h + x @ b, h))(x @ a)  # noqa: E731
    assert [group.summands for group in groups_for(V5E, fn, SQUARE, SQUARE, SQUARE) if group.contracts] == [1, 1]


def loop_of(body):
    """Adds up something for each of five."""
    return lambda total, xs: jax.lax.scan(body, total, xs)


def nested(total, xs):
    return jax.lax.scan(lambda t, x: (loop_of(lambda t, y: (t + y.T @ y, None))(t, x)[0], None), total, xs)


def in_parts(every_part):
    """A loop that adds up the halves of a product apart, or hands on the last second half as it is."""

    def turn(totals, x):
        product = x.T @ x
        return (totals[0] + product[:2], (totals[1] if every_part else 0) + product[2:]), None

    return lambda total, xs: jax.lax.scan(turn, (total[:2], total[2:]), xs)[0]


HOISTED = {  # a loop, what it loops over, how often its product is all_reduced; it is made as often as it runs
    "added up": (loop_of(lambda t, x: (t + x.T @ x, None)), f32(5, 8, 4), 1),
    "by way of a transpose": (loop_of(lambda t, x: (t + (x.T @ x).T, None)), f32(5, 8, 4), 1),
    "in another dtype": (
        loop_of(lambda t, x: (t + (x.T @ x).astype(jnp.float32), None)),
        jax.ShapeDtypeStruct((5, 8, 4), jnp.float16),
        1,
    ),
    "by way of a sine": (loop_of(lambda t, x: (t + jnp.sin(x.T @ x), None)), f32(5, 8, 4), None),
    "given out each time": (loop_of(lambda t, x: (lambda p: (t + p, p))(x.T @ x)), f32(5, 8, 4), None),
    "a sum so far that is read": (loop_of(lambda t, x: (t + x.T @ x, t * 2)), f32(5, 8, 4), None),
    "replaced": (loop_of(lambda t, x: (x.T @ x, None)), f32(5, 8, 4), None),
    "added up in parts": (in_parts(True), f32(5, 8, 4), 1),
    "a part that is not added up": (in_parts(False), f32(5, 8, 4), None),
    "a loop in a loop": (nested, f32(3, 5, 8, 4), 3),
}  # fmt: skip


@pytest.mark.parametrize("case", HOISTED)
def test_sums_in_loops_that_are_reduced_after_them(case):
    fn, xs, expected = HOISTED[case]
    for backend in (CPU, H100, V5E):
        (product,) = [group for group in groups_for(backend, fn, SQUARE, xs) if group.contracts]
        hoisted = expected if backend.sums.hoists else None
        assert product.hoisted_all_reduces == hoisted
        assert product.trips == math.prod(xs.shape[:-2])
        assert product.finish_trips("reduce_scatter") == product.trips
        assert product.finish_trips("all_reduce") == (hoisted or product.trips)
    assert not CPU.sums.hoists and V5E.sums.hoists


SPLIT = loop_of(lambda t, x: (tuple(a + b for a, b in zip(t, jnp.split(x.T @ x, 2), strict=True)), None))
TWO = loop_of(lambda t, x: ((t[0] + x.T @ x, t[1] + x.T @ jnp.sin(x)), None))
ADDED = {  # a loop, its sums, how many values stay, bytes of the loop's products
    "the product and its sum": (HOISTED["added up"][0], SQUARE, 3, 64),
    "and what it goes through": (HOISTED["by way of a transpose"][0], SQUARE, 4, 64),
    "two": (TWO, (SQUARE, SQUARE), 6, 128),
    "the product alone if it is split": (SPLIT, (f32(2, 4), f32(2, 4)), 1, 64),
    "no sine": (HOISTED["by way of a sine"][0], SQUARE, 0, 0),
    "no sum that is read": (HOISTED["a sum so far that is read"][0], SQUARE, 0, 0),
    "none of no elements": (loop_of(lambda t, x: (t + x[:, :0].T @ x[:, :0], None)), f32(0, 0), 0, 0),
    "nor what is no product": (loop_of(lambda t, x: (t + jnp.sin(x[:4]), None)), SQUARE, 0, 0),
}


@pytest.mark.parametrize("case", ADDED)
def test_products_that_a_loop_adds_up(case):
    fn, totals, count, together = ADDED[case]
    program = traced(fn, totals, f32(5, 8, 4))
    assert list(kept(program, sums=True).values()) == [together] * count
    assert not kept(program, sums=False)


def kept(program, sums):
    return kept_on_chip_in_loops(
        program,
        itemsizes_of(program, groups_of(program, rules_for(program), V5E), V5E.rounding),
        LoopMemory(keeps_sums=sums),
    )


def turning(body, *, length=3):
    """A loop over what it carries, whose body reads what stands outside of it, too."""
    return lambda x, *read: jax.lax.scan(lambda h, _: (body(h, *read), None), x, length=length)[0]


CONSTANTS = {  # a step, what its loops only read -> bytes of all that the loop does, turns that read it
    "a weight": (turning(lambda h, w, v: h @ w), [64], [3]),
    "two": (turning(lambda h, w, v: h @ w @ v), [128, 128], [3, 3]),
    "read by two loops": (lambda x, w, v: turning(jnp.matmul)(turning(jnp.matmul)(x, w), w), [64, 64], [6]),
    "in a loop of a loop": (turning(turning(lambda h, w, v: h @ w, length=5)), [64, 64], [3, 5]),
    "as a view in another dtype": (turning(lambda h, w, v: (h @ w.T.astype("float16")).astype(h.dtype)), [64], [3]),
    "nothing that is added": (turning(lambda h, w, v: h @ h + w), [], []),
    "nothing in a single turn": (turning(lambda h, w, v: h @ w, length=1), [], []),
    "in an unknown number of turns": (
        lambda x, w, v: jax.lax.while_loop(lambda h: h[0, 0] > 0, lambda h: h @ w, x),
        [64],
        [UNKNOWN_TURNS],
    ),
    "nor a number": (turning(lambda h, w, v: h * 2.0), [], []),
}


@pytest.mark.parametrize("case", CONSTANTS)
def test_what_loops_only_read(case):
    fn, sizes, turns = CONSTANTS[case]
    program = traced(fn, SQUARE, SQUARE, SQUARE)
    assert list(kept(program, sums=True).values()) == sizes
    assert list(turns_that_read(program).values()) == turns


@pytest.mark.parametrize("dtype, sizes", [("float32", [64]), ("bfloat16", [])])
def test_an_argument_that_a_loop_reads_as_it_is_stays_in_memory(dtype, sizes):
    """What is rounded before the loop is kept in the chip: something writes it there."""
    matrix = jax.ShapeDtypeStruct((4, 4), dtype)
    program = traced(turning(jnp.matmul), matrix, matrix)
    assert list(kept(program, sums=True).values()) == sizes
    itemsizes = itemsizes_of(program, groups_of(program, rules_for(program), V5E), V5E.rounding)
    assert rounded_for_loops(program, itemsizes) == {program.arguments[1].id for _ in sizes}


DONE_AGAIN = [  # what reads a sine, whose compilers compute the sine once more as they read it
    (lambda x: jnp.sin(x).sum(1), (CPU, H100, V5E)),
    (lambda x: jnp.argmax(jnp.sin(x), 1), (CPU, H100, V5E)),
    (lambda x: jnp.sin(x)[:2], (CPU, H100, V5E)),
    (lambda x: (lambda h: (h[:2], h[2:]))(jnp.sin(x)), (CPU, H100, V5E)),
    (lambda x: jnp.sin(x).at[jnp.arange(2)].get(mode="promise_in_bounds"), (CPU, H100)),
    (lambda x: jnp.sin(x) @ x, (V5E,)),
    (lambda x: jnp.sort(jnp.sin(x)), (H100,)),
    (lambda x: (lambda h: (h.reshape(2, 2, 4) * 2, h))(jnp.sin(x)), ()),  # a result, which is stored
]


@pytest.mark.parametrize(
    "make, sunk",
    [
        (lambda: jnp.full(SQUARE.shape, 3.0), True),
        (lambda: jnp.broadcast_to(jnp.arange(4.0), SQUARE.shape), True),
        (lambda: jnp.arange(16.0).reshape(SQUARE.shape), False),
        (lambda: jax.random.normal(jax.random.key(0), SQUARE.shape), False),
    ],
)
def test_what_a_loop_repeats(make, sunk):
    """What is made before a loop and used inside it."""

    def fn(x):
        outside = make()
        return jax.lax.scan(lambda x, _: (jnp.where(x > 0, x, outside), None), x, None, length=3)[0]

    for backend in (H100, V5E):
        groups = groups_for(backend, fn, SQUARE)
        (const,) = (g for g in groups if g.equations[0].primitive == "scan_const" and g.outputs[0].value.shape)
        maker = next(g for g in groups if any(one.value is const.uses[0].value for one in g.outputs))
        assert maker.is_recomputed == (sunk and backend is V5E)


@pytest.mark.parametrize("fn, takers", DONE_AGAIN)
def test_elementwise_work_that_readers_take_in(fn, takers):
    for backend in (CPU, H100, V5E):
        sine = next(group for group in groups_for(backend, fn, SQUARE) if group.equations[0].primitive == "sin")
        assert sine.is_recomputed == (backend in takers), backend.name
        assert not sine.is_folded or backend is CPU


def rounded_product(count, readers):
    """Of so many arrays, in bfloat16, made wider, and reduced by so many readers."""

    def fn(ys):
        h = functools.reduce(jnp.multiply, map(jnp.sort, ys)).astype(jnp.bfloat16).astype(jnp.float32)
        return [h.sum(0), h.max(1)][:readers]

    return fn, [SQUARE] * count


@pytest.mark.parametrize("count, readers, stored", [(5, 2, ["bfloat16"]), (3, 2, []), (5, 1, [])])
def test_what_is_widened_for_several_is_stored_as_it_was(count, readers, stored):
    """One reader takes in all that it reads, and several what they can all compute again."""
    for backend in (H100, V5E):
        groups = [g for g in groups_for(backend, *rounded_product(count, readers)) if g.fuses]
        assert [str(g.outputs[0].value.dtype) for g in groups if not g.is_recomputed] == stored
    groups = groups_for(CPU, *rounded_product(count, readers))  # CPU computes all again for a short reduction
    assert [str(g.outputs[0].value.dtype) for g in groups if g.fuses and not g.is_recomputed] == ["float32"] * len(
        stored
    )


@pytest.mark.parametrize("fn, takers", [
    (lambda x: jnp.sin(jax.lax.slice(x, (0, 0), (2, 4))), (CPU, H100, V5E)),
    (lambda x: jnp.sin(jax.lax.pad(x, 0.0, [(1, 0, 1), (0, 0, 0)])), (CPU, H100)),
])  # fmt: skip
def test_parts_and_pads_that_elementwise_work_reads(fn, takers):
    """An associative scan is made of these: GPU stores no pad of it, CPU none that one sum reads."""
    for backend in (CPU, H100, V5E):
        groups = groups_for(backend, fn, SQUARE)
        part = next(group for group in groups if group.equations[0].primitive in ("slice", "pad"))
        assert part.is_recomputed == (backend in takers), backend.name


def row_gradient(x):
    """Of a loss, rounded."""
    labels = jnp.arange(4)
    loss = lambda x: optax.losses.softmax_cross_entropy_with_integer_labels(x, labels).sum()  # noqa: E731
    return jax.grad(loss)(x).astype(jnp.bfloat16)


def test_what_is_scattered_is_stored():
    """XLA scatters into the array that the scattered one is added to, and GPU fuses no reader into that."""
    for backend in (CPU, H100, V5E):
        groups = groups_for(backend, row_gradient, SQUARE)
        last = [e for group in groups for e in group.equations if e.primitive == "scatter-add"][-1]
        (scatter,) = (group for group in groups if last in group.equations)
        together = any(equation.primitive == "convert_element_type" for equation in scatter.equations)
        assert together == (backend is not H100), backend.name
        assert not scatter.is_recomputed
        if backend is H100:
            assert scatter.equations[-1].primitive == "add_any"


def test_what_can_wait():
    """The gradient of a weight, and what only the loss is made of; not what other gradients are made of."""

    def step(w, v, x):
        h = x @ w
        y = jnp.sin(h) @ v
        g = jnp.cos(y) @ v.T
        return w - x.T @ g, v - h.T @ y, (y * y).sum()

    groups = groups_for(H100, step, SQUARE, SQUARE, SQUARE)
    reducing = [group for group in groups if group.contracts or group.reduction]
    assert [group.can_wait for group in reducing] == [False, False, False, True, True, True]


NORMALISED = [
    (jax.nn.softmax, True),
    (lambda x: (lambda h: h / h.sum(1, keepdims=True) @ x)(jnp.exp(x)), True),
    (lambda x: (lambda h: (h.sum(1), 2 * h))(jnp.exp(x)), False),
    (lambda x: (lambda h: h / h.sum(1, keepdims=True))(x / 3), False),  # dear to nobody
]


@pytest.mark.parametrize("fn, stored", NORMALISED)
def test_what_is_divided_by_its_sum_is_stored(fn, stored):
    for backend in (H100, V5E):
        first = next(group for group in groups_for(backend, fn, SQUARE) if len(group.outputs[0].value.shape) == 2)
        if fn is jax.nn.softmax:  # the largest number is subtracted in the same group
            first = next(g for g in groups_for(backend, fn, SQUARE) if g.equations[-1].primitive == "exp")
        assert first.is_recomputed != (stored and backend is V5E)  # on GPU it is one kernel, which stores its result


@pytest.mark.parametrize("window, dtype, stored", [(3, "float32", True), (3, "bfloat16", False), (1, "float32", False)])
def test_what_a_convolution_reads_several_times_is_rounded_once(window, dtype, stored):
    image = jax.ShapeDtypeStruct((2, 4, 8, 8), dtype)
    kernel = jax.ShapeDtypeStruct((4, 4, window, window), dtype)

    def fn(x, w):
        return jax.lax.conv(jnp.sort(x) * 2, w, (1, 1), "SAME")

    for backend in (H100, V5E):
        _, scaled, _ = groups_for(backend, fn, image, kernel)
        assert scaled.is_recomputed == (backend is V5E and not stored)


def test_what_a_convolution_reads_of_an_argument_is_stored():
    """Arguments do not lie as images do. So TPU stores what is made of one; GPU stores whatever a convolution reads."""
    image = jax.ShapeDtypeStruct((2, 4, 8, 8), "float32")
    kernel = jax.ShapeDtypeStruct((4, 4, 1, 1), jnp.bfloat16)

    def fn(x, w):
        return jax.lax.conv(x.astype(jnp.bfloat16), w, (1, 1), "SAME")

    for backend in (H100, V5E):
        rounded, _ = groups_for(backend, fn, image, kernel)
        assert not rounded.is_recomputed


def test_of_a_long_chain_of_sums_every_third_is_stored():
    def residual(x, ws):
        for w in ws:
            x = x + x @ w
        return x @ ws[0]

    for backend in (CPU, H100, V5E):
        sums = [g for g in groups_for(backend, residual, SQUARE, [SQUARE] * 7) if g.equations[-1].primitive == "add"]
        assert [group.is_recomputed for group in sums] == [backend is V5E and n not in (2, 5) for n in range(7)]


@pytest.mark.parametrize("shapes, summed", [((4, 5), False), ((4, 1, 5), False), ((4, 3, 5), True)])
def test_products_that_sum_nothing_are_elementwise(shapes, summed):
    n, *inner, m = shapes
    left, right = f32(n, *inner), f32(*inner, m)
    product = (lambda a, b: jnp.tensordot(a, b, 1)) if inner else (lambda a, b: jnp.tensordot(a, b, 0))
    (group,) = grouped(lambda a, b: jnp.exp(product(a, b)), left, right)[-1 - summed : None if not summed else -1]
    assert group.contracts == summed
    assert ("exp" in [equation.primitive for equation in group.equations]) != summed


FILLS = [  # of one equation each, whether it is made wherever it is wanted
    (lambda: jnp.zeros((8, 4)), True),
    (lambda: jnp.arange(8), True),
    (lambda x: jnp.broadcast_to(x[0, 0], (8, 4)), True),
    (lambda x: jnp.broadcast_to(x[0], (8, 4)), False),
    (lambda x: x.T, False),
    (lambda x: jnp.sin(x), False),
]


@pytest.mark.parametrize("fn, fills", FILLS)
def test_fills(fn, fills):
    groups = grouped(fn, *[SQUARE] * fn.__code__.co_argcount)
    assert groups[-1].is_fill == fills


def test_the_tables_of_compilers_can_fail(monkeypatch):
    for name, test, case in (
        ("added_sums", test_products_that_are_added_up_before_they_are_reduced, ("two", V5E, True)),
        ("hoisted_sums", test_sums_in_loops_that_are_reduced_after_them, ("added up",)),
    ):
        monkeypatch.setattr(module, name, lambda *_: {})
        with pytest.raises(AssertionError):
            test(*case)


def test_what_is_stacked_beside():
    """The inner loop stacks 3 x 8 floats beside what it makes, the outer one twice that, and nothing lies outside."""

    def inner(x, w):
        return jnp.sin(x @ w), x.sum(1)

    def outer(ws):
        return lambda x, _: jax.lax.scan(inner, jnp.cos(x), ws)

    program = traced(lambda x, ws: jax.lax.scan(outer(ws), jnp.exp(x), length=2), X, f32(3, 4, 4))
    beside = bytes_stacked_by_loop(program)
    of = {equation.primitive: beside.get(equation.outputs[0].id) for equation in program.equations}
    assert (of["sin"], of["scan_slice"], of["cos"], of["exp"]) == (96, 96, 192, None)
    assert beside.keys().isdisjoint(x.id for x in program.results)


def test_what_a_guarded_view_shows_is_stored():
    """A recomputation reads the squeeze of a slice of stacked weights, which lies where that slice is stored."""
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))
    program = traced(jax.grad(lambda ws, x: layer(jnp.sin(x), ws[1]).sum()), f32(3, 4, 4), X)
    views = [e for e in program.equations if e.primitive == "squeeze" and e.outputs[0].id in program.guarded]
    found = {group.equations[0].index: group for group in groups_of(program, rules_for(program), V5E)}
    (shown,) = [group for group in found.values() if group.outputs[0].value is views[0].inputs[0]]
    assert found[views[0].index].is_recomputed and not shown.is_recomputed


def test_loops_wait_for_what_weights_are_made_of_that_they_read():
    def step(ws, w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.concatenate([ws[1:], w[None]]))[0] @ w.T, ws, w

    program = traced(step, f32(3, 4, 4), f32(4, 4), X, donate=(0, 1))
    groups = groups_of(program, rules_for(program), V5E)
    found = waited_for(groups, made_of_state(program, groups))
    assert {value.name for value in program.arguments if value.id in found} == {"ws", "w"}
    assert waited_for(groups, frozenset()).isdisjoint(value.id for value in program.arguments)


def test_a_loop_waits_for_its_flag():
    """What decides whether a loop goes on is read by no equation, and still is no sum that can end late."""
    program = traced(lambda x: jax.lax.while_loop(lambda c: c.max() > 0, lambda c: c - 1, x), f32(8, 16))
    groups = groups_of(program, rules_for(program), V5E)
    late = {group.equations[-1].primitive: group.feeds_only_results for group in groups}
    assert late["reduce_max"] is False and late["gt"] is False


def test_what_runs_on_shards_is_a_group_of_its_own():
    """Solving with a batch of numbers looks elementwise, but each of its operands has to be told how it lies."""

    def solved(a):
        return jax.lax.linalg.triangular_solve(a, jnp.zeros(a.shape), left_side=False, lower=False, transpose_a=True)

    groups = grouped(solved, f32(64, 1, 1))
    assert [[one.primitive for one in group.equations] for group in groups] == [
        ["broadcast_in_dim"],
        ["triangular_solve"],
    ]
