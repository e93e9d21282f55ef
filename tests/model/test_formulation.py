"""Problems of small programs: seconds and bytes by hand, costs against what plans report, and what is forbidden."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from oracles import adjusted
from problems import answer, assert_same
from programs import f32, formulated, model_program, random_choices, round_topology

from autoshard.errors import ConflictError
from autoshard.layout import layouts_of
from autoshard.model import formulating as module
from autoshard.model.formulating import formulate
from autoshard.model.formulation import Formulation
from autoshard.model.pricing.prices import PriceList
from autoshard.model.resharding_memory import Resharding
from autoshard.model.xla.backends import CPU, H100, V5E
from autoshard.plans.chosen_options import prediction_of
from autoshard.propagation import rules_for
from autoshard.solver import solve
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.problem import Live
from autoshard.solver.verify import verify

LINE, PLANE = {"x": 2}, {"x": 4, "y": 2}
TOPOLOGY = round_topology("x", "y")
X, W, SQUARE = f32(8, 4), f32(4, 6), f32(4, 4)
HEAP = 1.05


def forward(x, w, v):
    return jnp.sin(x @ w) @ v


def update(w, x):
    return w - x.T @ jnp.sin(x @ w)


def beside(w, x, g):
    return w - x.T @ g, x @ w


def layers(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.sin(x @ w), jnp.exp(x)), x, ws)


def fan(x, w):
    h = jnp.sin(x)
    return h.sum(0), jnp.exp(h).sum(1), h @ w, h.T @ h


def replaced(w, x):
    return x.T @ x


PROGRAMS = {  # function, arguments, donated
    "forward": (forward, [X, W, f32(6, 4)], ()),
    "update": (update, [W, X], (0,)),
    "beside": (beside, [W, X, f32(8, 6)], (0,)),
    "loop": (layers, [X, f32(3, 4, 4)], ()),
    "fan": (fan, [X, W], ()),
    "folded": (lambda x, s: (x * s).sum(), [X, f32(4)], ()),
    "replaced": (replaced, [SQUARE, X], (0,)),
}


def formulation_of(name: str, mesh=LINE, **options) -> Formulation:
    fn, args, donate = PROGRAMS[name]
    return formulated(fn, *args, mesh=mesh, topology=TOPOLOGY, **{"donate": donate} | options)


def zeros(formulation: Formulation) -> list[int]:
    return [0] * len(formulation.problem.costs)


# With everything whole. Arguments and results are there all the time, the rest is in a heap with gaps.
PEAKS = {  # program, options, bytes
    # point 1: the sine is written over the product
    "forward": ("forward", {}, 4 * (32 + 24 + 24 + 32) + HEAP * 4 * 48),
    # point 2: the sine is read, the gradient is written
    "update in place": ("update", {}, 4 * (24 + 32) + HEAP * 4 * (48 + 24)),
    "update beside": ("update", {"donate": ()}, 4 * (24 + 32 + 24) + HEAP * 4 * (48 + 24)),
    # point 2: w is written over the gradient, while x @ w still needs the w that was donated
    "a copy of what is donated": ("beside", {}, 4 * (24 + 32 + 48 + 48) + HEAP * 4 * 24),
    # nothing is written over w; point 1 makes the gradient, point 2 reads it
    "no copy of what is not": ("beside", {"donate": ()}, 4 * (24 + 32 + 48 + 24 + 48) + HEAP * 4 * 24),
    # point 3: the slice of w and the product; results are three rows and the carry, which the loop keeps there
    "a loop": ("loop", {}, 4 * (32 + 48 + 32 + 96) + HEAP * 4 * (16 + 32)),
    "what a sum repeats": ("folded", {}, 4 * (32 + 4 + 1) + HEAP * 4 * 32),
}


@pytest.mark.parametrize("case", PEAKS)
def test_peak_by_hand(case):
    name, options, expected = PEAKS[case]
    formulation = formulation_of(name, **options)
    assert formulation.peak_bytes(zeros(formulation)) == int(expected)


def test_the_best_choice_by_hand():
    """Data parallelism: rows of x, all of w and v. Bytes at 1 GB/s are nanoseconds, and here they outweigh FLOPs."""
    formulation = formulation_of("forward")
    best = exhaustive(formulation.problem)
    arrive = 4 * (32 / 2 + 24 + 24)
    products = 4 * (32 / 2 + 24 + 48 / 2) + 4 * (48 / 2 + 24 + 32 / 2)
    sine = 4 * (48 / 2 + 48 / 2)
    assert best.cost == pytest.approx((arrive + products + sine) * 1e-9)
    assert [formulation.arguments[i][best.choice[i]].home for i in range(3)] == [(("x",), ()), ((), ()), ((), ())]
    assert formulation.peak_bytes(best.choice) == int(4 * (16 + 24 + 24 + 16) + HEAP * 4 * 24)


@pytest.mark.parametrize("first, second", ["ab", "ba"])
def test_arguments_alike_that_are_read_otherwise_cost_otherwise(first, second):
    """One is read by a loop, which waits for it; the other is not, and half of its gather runs behind compute."""

    def step(state, x):
        layers, other = state[first], state[second]
        x = jax.lax.fori_loop(0, 4, lambda i, x: jnp.tanh(jnp.tanh(x @ layers[0]) @ layers[1]), x)
        return jax.tree.map(lambda w: 0.9 * w, state), jnp.tanh(x @ other[1])

    state = {name: f32(2, 1024, 1024) for name in "ab"}
    topology = round_topology("x")
    made = formulated(step, state, f32(4096, 1024), mesh={"x": 8}, topology=topology, donate=(0,), backend=H100)
    shares = {}
    for index, value in enumerate(made.program.arguments[:2]):
        hops = [(k, (value, k.home, k.copy)) for k in made.arguments[index]]
        priced = [(made.prices.resharding(*hop) - made.prices.hidden(*hop), k) for k, hop in hops]
        np.testing.assert_allclose(made.problem.costs[index], [seconds for seconds, _ in priced])
        exposed, gathered = max(priced, key=lambda pair: pair[0])
        shares[value.name] = exposed / made.prices.resharding(value, gathered.home, gathered.copy)
    assert shares == pytest.approx({f"state/{first}": 1.0, f"state/{second}": 1 - H100.overlap.of("all_gather")})


def test_what_a_resharding_holds():
    """x arrives by rows, gathered for a product that is left whole: the copy stands beside its home."""
    formulation = formulation_of("forward", fixed={0: (("x",), ()), 1: ((), ()), 2: ((), ())})
    kept = [option for option, kept in enumerate(formulation.arguments[0]) if kept.copy == ((), ())]
    assert len(kept) == 1
    choice = [kept[0], 0, 0, 0, 0, 0]
    # point 0: the copy, and the product
    assert formulation.peak_bytes(choice) == int(4 * (16 + 24 + 24 + 32) + HEAP * 4 * (32 + 48))
    gather = 1e-6 + 1.2 * (1e-3 + 64e-6)
    arrive = 4e-9 * (16 + 24 + 24)
    rest = 4e-9 * (32 + 24 + 48 + 48 + 48 + 48 + 24 + 32)
    assert verify(formulation.problem, choice)[0] == pytest.approx(gather + arrive + rest)


def chosen(formulation: Formulation, group: int, leaves, finish: str | None = None) -> tuple[int, int]:
    """The node of a group, and its first option that leaves its result so, finished by this kind of collective."""
    node = formulation.group_node(formulation.groups[group])
    for option, strategy in enumerate(formulation.priced[group].strategies):
        kinds = {f.kind for f in strategy.finishes}
        if strategy.output_layouts == (leaves,) and kinds == ({finish} if finish else set()):
            return node, option
    raise LookupError(f"group {group} has no such strategy")


def test_reductions_wait_for_each_other():
    """None of three unreduced products is read before all are made: XLA's CPU backend reduces them together."""

    def three(x, a, b, c):
        return (jnp.sin(x @ a) * (x @ b) + x @ c).sum(0)

    fixed = {0: ((), ("x",)), 1: (("x",), ()), 2: (("x",), ()), 3: (("x",), ())}
    formulation = formulated(three, X, W, W, W, mesh=LINE, topology=TOPOLOGY, fixed=fixed, backend=CPU)
    choice = zeros(formulation)
    for group in range(4):  # three products and what reads them, all whole
        node, option = chosen(formulation, group, ((), ()), *["all_reduce"] * (group < 3))
        choice[node] = option
    # point 2: each product before and after its reduction, both whole
    assert formulation.peak_bytes(choice) == int(4 * (16 + 3 * 12 + 6) + HEAP * 4 * 3 * (48 + 48))


@pytest.mark.parametrize("below, waits", [(4 * 24, False), (4 * 24 + 1, True)])
def test_a_large_gradient_is_reduced_alone(below, waits):
    def update(w, v, x):
        return w - x.T @ jnp.sin(x @ w), v - x.T @ jnp.sin(x @ v)

    fixed = {2: (("x",), ())}
    backend = adjusted(CPU, "combining", below_bytes=below)
    formulation = formulated(update, W, W, X, mesh=LINE, topology=TOPOLOGY, fixed=fixed, backend=backend)
    gradient = next(
        i for i, group in enumerate(formulation.groups) if group.handed_on_at is not None and group.contracts
    )
    node, option = chosen(formulation, gradient, ((), ()), "all_reduce")
    ends = max(live.end for live in formulation.problem.lives if live.node == node and live.usage[option])
    assert (ends == formulation.groups[gradient].handed_on_at) == waits


@pytest.mark.parametrize("backend", [CPU, H100], ids=lambda backend: backend.name)
def test_gradients_that_wait_hold_what_they_read(backend):
    def two_layers(w, v, x):
        h = x @ w
        g = jnp.sin(h @ v)
        new = v - h.T @ g
        return w - x.T @ (g @ v.T), new

    fixed = {0: ((), ()), 1: ((), ()), 2: (("x",), ())}
    args = W, f32(6, 4), X
    formulation = formulated(
        two_layers, *args, donate=(0, 1), mesh=LINE, topology=TOPOLOGY, fixed=fixed, backend=backend
    )
    group = next(g for g in formulation.groups if g.can_wait and g.outputs[0].value.shape == (6, 4))
    for finish, waits in [("all_reduce", backend is H100), (None, False)]:
        node, option = chosen(formulation, group.index, ((), ()), finish)
        held = [live for live in formulation.problem.lives if live.node == node and live.end == group.handed_on_at - 1]
        read = sum(live.usage[option] for live in held if live.start > group.point)
        assert read == pytest.approx(HEAP * 4 * (48 + 32) / 2 * waits)  # half of h, the other way round, and of g


def test_elementwise_work_overwrites_what_nobody_else_reads():
    """The sine goes where the product was on CPU and GPU, unless the product is read again."""

    def read_again(x, w, v):
        h = x @ w
        return (jnp.sin(h) @ v) @ (v.T @ h.T)

    temporaries = [
        (forward, CPU, 48),
        (forward, H100, 48),
        (read_again, CPU, 48 + 48),
        (read_again, H100, 48 + 48),
    ]
    for fn, backend, size in temporaries:
        fixed = dict.fromkeys(range(3), ((), ()))
        formulation = formulated(fn, X, W, f32(6, 4), mesh=LINE, topology=TOPOLOGY, fixed=fixed, backend=backend)
        held = [live for live in formulation.problem.lives if live.start <= 1 < live.end]
        whole = len(formulation.program.equations)
        at_sine = sum(live.usage[0] for live in held if live.end - live.start < whole)
        assert at_sine == pytest.approx(HEAP * 4 * size), (fn.__name__, backend.name)


PLAIN = {"fused": False, "users": (), "copied_for": None, "made": None}  # of a `Resharding`


def holding(formulation: Formulation, changes: list[Resharding], *lives: Live) -> Formulation:
    """The formulation with these alone holding memory."""
    return replace(formulation, reshardings=changes, problem=replace(formulation.problem, lives=lives, checked=True))


def test_a_gather_of_an_inner_dim_is_transposed():
    formulation = formulated(jnp.sin, f32(4, 6, 8), mesh=LINE, topology=TOPOLOGY)
    value = formulation.program.results[0]
    whole, inside, ahead = ((), (), ()), ((), (), ("x",)), (("x",), (), ())
    hop = (0, [inside, ahead]), (1, [whole])
    change = Resharding(value, (0, 2), *hop, counts_left=False, counts_wanted=True, **PLAIN)
    formulation = holding(formulation, [change])
    # beside the gathered copy: the half that was gathered, and once the whole with its dims the other way round
    assert formulation.peak_bytes([0, 0]) == int(HEAP * 4 * (96 + 192))
    assert formulation.peak_bytes([1, 0]) == int(HEAP * 4 * 96)


@pytest.mark.parametrize(
    "source, made, together",
    [
        ((("x",), ()), None, False),
        ((("x",), ()), 1, True),  # not stored until it is used, and resharded as soon as it is there
        (((), ("x",)), 1, True),
        ((("x",), ()), 5, False),
    ],
)
def test_what_is_not_stored_is_resharded_when_it_is_made(source, made, together):
    formulation = formulated(lambda x: jnp.sin(jnp.cos(x)), f32(8, 6), mesh=LINE, topology=TOPOLOGY)
    target = source[::-1]
    hop = (0, [source]), (1, [target])
    flags = PLAIN | {"made": made}
    change = Resharding(formulation.program.results[0], (4, 5), *hop, counts_left=True, counts_wanted=False, **flags)
    other = Live(0, 3, 4, np.array([1000]))
    formulation = holding(formulation, [change], other)
    program = formulation.program
    formulation = replace(formulation, program=replace(program, equations=program.equations * 3))
    shard = HEAP * 4 * 48 / 2
    assert formulation.peak_bytes([0, 0]) == int(1000 + shard * together)


@pytest.mark.parametrize("last_wants_rows", [True, False])
def test_who_wants_a_value_as_it_is_left_reads_that(last_wants_rows):
    """Of a sine that lies by rows and is done again in its readers, the gathered copy goes with the last to want it."""

    def fn(x, w, v):
        sine = jnp.sin(x)
        return sine @ w, sine @ v

    formulation = formulated(fn, X, W, W, mesh=LINE, topology=TOPOLOGY, backend=V5E)
    rows, whole = (("x",), ()), ((), ())
    sine = formulation.groups[0].outputs[0].value
    shared, (first, last) = formulation.shared[sine.id], formulation.readers[sine.id]
    choice = [*zeros(formulation), 0]
    choice[shared.node] = shared.layouts.index(whole)
    choice[first.node] = first.wants.index(whole)
    choice[last.node] = last.wants.index(rows if last_wants_rows else whole)
    hop = (len(choice) - 1, [rows]), (shared.node, shared.layouts)
    end = last.group.point
    flags = PLAIN | {"users": formulation.readers[sine.id]}
    change = Resharding(sine, (0, end + 1), *hop, counts_left=False, counts_wanted=False, **flags)
    other = Live(0, end, end + 1, np.full(99, 10**6))
    formulation = holding(formulation, [change], other)
    copy = HEAP * formulation.prices.arrays.copy_bytes(sine, whole)
    assert formulation.peak_bytes(choice) == int(10**6 + copy * (not last_wants_rows))


@pytest.mark.parametrize("rows, still_there", [(True, True), (False, False)])
def test_what_is_moved_at_once_is_not_made_again(rows, still_there):
    """A sine, by rows, that one product reads at the end: by columns, it is moved when it is made, and x can go."""

    def fn(x, w):
        y = x @ w
        sine = jnp.sin(y)
        return sine @ (jnp.cos(w @ w) @ w), y

    formulation = formulated(fn, f32(8, 8), f32(8, 8), mesh=LINE, topology=TOPOLOGY, backend=V5E)
    by_rows, by_columns = (("x",), ()), ((), ("x",))
    sine = next(group for group in formulation.groups if group.equations[-1].primitive == "sin")
    made, product = sine.outputs[0].value, formulation.readers[sine.outputs[0].value.id][0]
    assert sine.is_recomputed and sine.last_point == product.group.point > sine.point + 1
    choice = zeros(formulation)
    node, option = chosen(formulation, sine.index, by_rows)
    choice[node] = option
    choice[product.node] = product.wants.index(by_rows if rows else by_columns)
    moved = [one for one in formulation.reshardings if one.extra(*one.layouts(choice), formulation.prices).at_once]
    assert [one.value for one in moved] == [made] * (not rows)
    readers = {(one.value.id, reader.node) for one in moved for reader in one.copied_to(choice)}
    last = formulation._last_runs(readers)[sine.index]
    assert last == (product.group.point if still_there else sine.point)


def test_a_slice_that_a_loop_reads_holds_the_whole():
    """The sine of half a product: XLA reads the half inside the loop that makes the sine."""
    formulation = formulation_of("forward", fixed=dict.fromkeys(range(3), ((), ())))
    choice = zeros(formulation)
    node, option = chosen(formulation, 1, (("x",), ()))
    choice[node] = option
    assert formulation.peak_bytes(choice) == int(4 * (32 + 24 + 24 + 32) + HEAP * 4 * (48 + 24))


# Costs against what a plan reports, on choices of all kinds.


def counted_too_often(formulation: Formulation, choice) -> float:
    """Seconds that the problem counts too many, since what is right depends on three nodes.

    It has a reader that wants a value as it is left, while others share a copy, read the copy, as if it were resharded
    back. And it has readers that want the same, but not what is shared, each reshard it, where XLA does so once.
    Slices, which XLA may cut in each reader, are counted alike.
    """
    seconds, prices = 0.0, formulation.prices

    def sent(*hop) -> float:
        return prices.resharding(*hop) if prices.steps(*hop) else 0.0

    def moved(*hop) -> float:
        return sent(*hop) + prices.memory_seconds(*hop)

    kept = [options[option] for options, option in zip(formulation.arguments, choice, strict=False)]
    lying = [(x, one.home, one.copy) for x, one in zip(formulation.program.arguments, kept, strict=True)]
    for group, priced in zip(formulation.groups, formulation.priced, strict=True):
        leaves = priced.strategies[choice[formulation.group_node(group)]].output_layouts
        for made, left in zip(group.outputs, leaves, strict=True):
            shared = formulation.shared.get(made.value.id)
            seen = left if shared is None else shared.layouts[choice[shared.node]]
            lying.append((made.value, left, seen))
    for value, home, seen in lying:
        wants = Counter(reader.wants[choice[reader.node]] for reader in formulation.readers.get(value.id, ()))
        back = 0 if value in formulation.program.arguments else wants[home]
        again = sum((count - 1) * sent(value, seen, want) for want, count in wants.items() if want not in (home, seen))
        seconds += (back * moved(value, seen, home) + again) * value.trips
    return seconds


def assert_priced(formulation: Formulation, count: int = 10) -> None:
    for choice in [*random_choices(formulation, count), zeros(formulation)]:
        cost, peak = verify(formulation.problem, choice)
        predicted = prediction_of(formulation, choice)
        np.testing.assert_allclose(predicted.step_seconds + counted_too_often(formulation, choice), cost, rtol=1e-9)
        assert formulation.peak_bytes(choice) >= int(peak)
        assert predicted.peak_bytes == formulation.peak_outside_chip(choice) <= formulation.peak_bytes(choice)
        if not predicted.communication_seconds:
            assert predicted.collectives == ()


@pytest.mark.parametrize("mesh", [LINE, PLANE], ids=["line", "plane"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_costs_are_what_plans_report(name, mesh):
    assert_priced(formulation_of(name, mesh))


@pytest.mark.parametrize("name", ["mlp", "moe"])
def test_costs_of_models(name):
    program = model_program(name)
    assert_priced(formulate(program, rules_for(program), LINE, TOPOLOGY), count=3)


def test_free_reshardings_are_caught(monkeypatch):
    def free(self, value, sources, targets, readers=None):
        return np.zeros((len(sources), len(targets)))

    monkeypatch.setattr(PriceList, "table", free)
    with pytest.raises(AssertionError):
        assert_priced(formulation_of("forward"))


def test_forgotten_buffers_are_caught(monkeypatch):
    """As if a value were gone as soon as it is made."""
    real = module.holding
    monkeypatch.setattr(module, "holding", lambda *args: replace(real(*args), made=None))
    with pytest.raises(AssertionError):
        test_peak_by_hand("update in place")


# Solvers agree on it, with and without a limit.


WHOLE = ((), ())


@pytest.mark.parametrize(
    "name, options", [("forward", {}), ("fan", {"fixed": {0: WHOLE, 1: WHOLE}}), ("replaced", {}), ("folded", {})]
)
def test_solve_against_all_choices(name, options):
    free = formulation_of(name, **options)
    assert_same(answer(solve, free.problem), answer(exhaustive, free.problem))
    most = free.peak_bytes(exhaustive(free.problem).choice)
    kinds = set()
    for share in (1.01, 0.8, 0.6, 0.3):  # of bytes, of which `peak_bytes` says whole ones
        problem = formulation_of(name, memory=share * most, **options).problem
        expected = answer(exhaustive, problem)
        assert_same(answer(solve, problem), expected)
        kinds.add(expected[0])
    assert kinds == {"costs", "needs"}


# What is forbidden, and what is fixed.


def test_a_fixed_argument_has_its_layout_whatever_is_chosen():
    for layout in layouts_of((8, 4), PLANE):
        formulation = formulation_of("update", PLANE, fixed={1: layout})
        assert {kept.home for kept in formulation.arguments[1]} == {layout}
        assert {kept.home for kept in formulation.arguments[0]} == set(layouts_of((4, 6), PLANE))
        assert np.isfinite(solve(formulation.problem).cost)


def test_axes_of_one_device_are_left_out():
    formulation = formulation_of("update", {"one": 1, "x": 2}, fixed={1: (("one", "x"), ())})
    assert dict(formulation.mesh) == LINE
    assert {kept.home for kept in formulation.arguments[1]} == {(("x",), ())}


@pytest.mark.parametrize("layout", [((), ("x", "y")), (("y", "x"), ())])
def test_a_layout_that_cannot_be_fixed(layout):
    with pytest.raises(ConflictError, match="a fixed sharding must split every dim evenly"):
        formulation_of("update", PLANE, fixed={1: layout})


def edges_between(formulation: Formulation, i: int, j: int) -> np.ndarray:
    found = [edge.costs if (edge.i, edge.j) == (i, j) else edge.costs.T
             for edge in formulation.problem.edges if {edge.i, edge.j} == {i, j}]  # fmt: skip
    return sum(found, np.zeros((len(formulation.problem.costs[i]), len(formulation.problem.costs[j]))))


def test_a_result_ends_in_the_home_of_the_argument_that_it_replaces():
    """`w` is not read, so all that ties it to the product is where the product has to end."""
    formulation = formulation_of("replaced", PLANE)
    (product,) = (group for group in formulation.groups if group.contracts)
    table = edges_between(formulation, formulation.group_node(product), 0)
    value, homes = product.outputs[0].value, [kept.home for kept in formulation.arguments[0]]
    assert homes == layouts_of((4, 4), PLANE)
    assert table.any()
    for row, strategy in zip(table, formulation.priced[product.index].strategies, strict=True):
        (left,) = strategy.output_layouts
        assert row.tolist() == [formulation.prices.resharding(value, left, home) for home in homes]
        assert row[homes.index(left)] == 0
    other = formulation_of("replaced", PLANE, donate=())
    assert not edges_between(other, other.group_node(product), 0).any()


def test_a_view_is_never_resharded():
    """What it views can be, and is counted."""
    formulation = formulation_of("update")
    (view,) = (group for group in formulation.groups if group.is_view)
    node = formulation.group_node(view)
    readers = [reader.node for reader in formulation.readers[view.outputs[0].value.id]]
    for reader in readers:
        assert set(np.unique(edges_between(formulation, node, reader))) == {0.0, np.inf}


@pytest.mark.parametrize("name", PROGRAMS)
def test_arguments_are_resharded_into_a_copy_only(name):
    """Without a copy its readers take slices of an argument, which are free; what is not is forbidden."""
    formulation = formulation_of(name, PLANE, donate=())
    for index, (value, kepts) in enumerate(zip(formulation.program.arguments, formulation.arguments, strict=True)):
        assert len(set(kepts)) == len(kepts) and {kept.home for kept in kepts} == set(layouts_of(value.shape, PLANE))
        bare = [kept.home == kept.copy for kept in kepts]
        for reader in formulation.readers[value.id]:
            if reader.use is not None:
                table = edges_between(formulation, index, reader.node)[bare]
                assert set(np.unique(table)) <= {0.0, np.inf}
                assert (table == 0).any()


def two(x, w, v):
    h = jnp.sin(x)
    return h @ w, h @ v


def two_readers(leaves):
    """sin(x), split by columns, and its two products, unsplit where they sum up: (formulation, options per node)."""
    fixed = {0: ((), ("x",)), 1: ((), ("x",)), 2: ((), ("x",))}
    formulation = formulated(two, X, W, W, mesh=LINE, topology=TOPOLOGY, fixed=fixed)
    made = [((), ("x",)), leaves, leaves]
    return formulation, {
        formulation.group_node(group): [
            i for i, strategy in enumerate(formulation.priced[group.index].strategies)
            if strategy.output_layouts == (layout,) and not strategy.finishes
        ]
        for group, layout in zip(formulation.groups, made, strict=True)
    }  # fmt: skip


def test_a_value_is_resharded_once_for_all_its_readers():
    """x @ w and x @ v gather sin(x) once: one node decides, and both read what it decides."""
    formulation, allowed = two_readers(((), ("x",)))
    (shared,) = formulation.shared.values()
    solution = solve(formulation.problem.restrict(allowed))
    assert shared.layouts[solution.choice[shared.node]] == ((), ())
    predicted = prediction_of(formulation, solution.choice)
    (gather,) = predicted.collectives
    assert (gather.kind, gather.axes, gather.bytes, gather.count) == ("all_gather", ("x",), 128, 1)
    assert predicted.step_seconds == pytest.approx(solution.cost)


ROWS, COLUMNS, WHOLE = (("x",), ()), ((), ("x",)), ((), ())


def a_product_and_a_sum(axis: int):
    """On TPU x @ u, left in columns, is read in bfloat16 by a product, whole, and in float32 by a sum."""
    formulation = formulated(
        lambda x, u, w: (lambda h: (h @ w, h.sum(axis)))(x @ u),
        f32(64, 512), f32(512, 512), f32(512, 6),
        mesh=LINE, topology=TOPOLOGY, backend=V5E, fixed={0: WHOLE, 1: COLUMNS, 2: WHOLE},
    )  # fmt: skip
    first, product, total = formulation.groups

    def options(group, leaves=None, want=None) -> dict[int, list[int]]:
        strategies = enumerate(formulation.priced[group.index].strategies)
        found = [
            i
            for i, one in strategies
            if leaves in (None, one.output_layouts[0]) and want in (None, one.operand_layouts[0])
        ]
        return {formulation.group_node(group): found}

    allowed = options(first, leaves=COLUMNS) | options(product, leaves=WHOLE, want=WHOLE)
    ((_, shared),) = formulation.shared.items()
    return formulation, allowed, shared, lambda want: options(total, want=want)


@pytest.mark.parametrize(
    "axis, want, bytes", [(0, COLUMNS, 2), (0, WHOLE, 4), (0, ROWS, 4), (1, COLUMNS, 2), (1, WHOLE, 4), (1, ROWS, 4)]
)
def test_a_copy_for_those_who_read_fewer_bits(axis, want, bytes):
    """Half as much is gathered if the sum reads its own columns."""
    formulation, allowed, shared, sums = a_product_and_a_sum(axis)
    problem = formulation.problem.restrict(allowed | sums(want))
    best = solve(problem)
    predicted = prediction_of(formulation, best.choice)
    assert [one.bytes for one in predicted.collectives if one.kind == "all_gather"] == [bytes * 64 * 512]
    assert predicted.step_seconds == pytest.approx(best.cost)
    copies = [option for option, layout in enumerate(shared.layouts) if layout == WHOLE]
    for copy in copies:  # none is priced in fewer bits than it is predicted to move
        choice = list(best.choice)
        choice[shared.node] = copy
        assert verify(formulation.problem, choice)[0] >= predicted.step_seconds * (1 - 1e-9)


def test_equal_reshardings_are_one():
    """As if each product brought sin(x) from columns to rows for itself: the problem counts two, XLA merges them."""
    columns, rows = ((), ("x",)), (("x",), ())
    formulation, allowed = two_readers(rows)
    ((value, shared),) = formulation.shared.items()
    allowed[shared.node] = [shared.layouts.index(columns)]
    solution = solve(formulation.problem.restrict(allowed))
    predicted = prediction_of(formulation, solution.choice)
    moved = [one for one in predicted.collectives if one.why.startswith(str(formulation.program.values[value]))]
    assert [(one.kind, one.bytes, one.count) for one in moved] == [("all_to_all", 64, 1)]
    assert moved[0].why.endswith('from P(None, "x") to P("x")')
    assert predicted.step_seconds == pytest.approx(solution.cost - (1e-6 + 1e-3 + 32e-6))


def test_what_readers_make_again_is_written_to_be_resharded():
    """Even by a slice, which is but an operation of its own where there is an array to take it from."""
    formulation = formulated(
        lambda x, w, v: (lambda sine: (sine @ w, sine @ v))(jnp.sin(x)),
        X, W, W, mesh=LINE, topology=TOPOLOGY, backend=V5E,
    )  # fmt: skip
    rows, whole = (("x",), ()), ((), ())
    prices, (sine, *_) = formulation.prices, formulation.groups
    value = sine.outputs[0].value
    assert sine.is_recomputed and prices.writing(value, whole) > 0
    sliced = V5E.operations.least_seconds
    assert prices.table(value, (whole,), (whole, rows)).tolist() == [[0.0, sliced + prices.writing(value, whole)]]
    argument = formulation.program.arguments[0]
    assert prices.table(argument, (whole,), (whole, rows)).tolist() == [[0.0, sliced]]


def test_what_a_loop_makes_again_is_charged_once():
    def fn(x, mask):
        outside = jnp.broadcast_to(mask, x.shape)
        return jax.lax.scan(lambda x, _: (jnp.where(x > 0, x, outside) * 2, None), x, None, length=3)[0]

    formulation = formulated(fn, X, f32(4), mesh=LINE, topology=TOPOLOGY, backend=V5E)
    (maker,) = (group for group in formulation.groups if group.is_sunk)
    written = formulation.prices.writing(maker.outputs[0].value, ((), ()))
    strategies = formulation.priced[maker.index].strategies
    whole = [strategy.output_layouts == (((), ()),) for strategy in strategies].index(True)
    assert formulation.priced[maker.index].seconds[whole].compute >= written > 0
