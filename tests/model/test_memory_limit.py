"""Plans within a limit: none fills more than its usable share, and every limit that an error names can be kept."""

import contextlib
import functools
import itertools
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from programs import f32, formulated, random_choices, round_topology

import autoshard
from autoshard.errors import SolverError
from autoshard.model import memory_limit
from autoshard.model.formulation import Formulation
from autoshard.model.heap.room_in_results import EVERY
from autoshard.model.memory_limit import solve_within
from autoshard.model.xla.backends import CPU, V5E
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.problem import ForbiddenError, InfeasibleError, Problem, Solution, UndecidedError
from autoshard.solver.runtime.budget import QUIET_SHARE, Budget
from autoshard.solver.verify import fits, verify

SECONDS = 10.0  # far more than any of these takes
PLANE = {"x": 4, "y": 2}
TOPOLOGY = round_topology("x", "y")


def two_layers(w, v, x):
    h = jnp.tanh(x @ w)
    return w - x.T @ ((h @ v) @ v.T), v - h.T @ (h @ v)


def one_layer(w, x):
    return w - x.T @ jnp.sin(x @ w)


PROGRAMS = {  # function, arguments, donated
    "one layer": (one_layer, [f32(16, 32), f32(64, 16)], (0,)),
    "two layers": (two_layers, [f32(16, 32), f32(32, 16), f32(64, 16)], (0, 1)),
}


def formulation_of(name: str, memory: float, **options) -> Formulation:
    fn, args, donate = PROGRAMS[name]
    options = {"donate": donate} | options
    return formulated(fn, *args, mesh=PLANE, topology=TOPOLOGY, memory=memory, **options)


@functools.cache
def on_chip() -> Formulation:
    """One whose limit is small beside the chip's own memory."""
    return formulation_of("one layer", 10_000.0, donate=(), backend=V5E)


def assert_within(formulation: Formulation, solution: Solution) -> None:
    """The choice is allowed, what it costs and holds is so, and nothing better than its bound is claimed."""
    cost, _ = verify(formulation.problem, solution.choice)
    assert np.isfinite(cost) and cost == pytest.approx(solution.cost)
    assert formulation.peak_bytes(solution.choice) <= formulation.problem.limit
    assert solution.bound <= cost
    assert solution.status == ("optimal" if solution.gap <= 1e-6 else "feasible")


@functools.cache
def least(name: str) -> float:
    with pytest.raises(InfeasibleError) as error:
        solve_within(formulation_of(name, 1.0), SECONDS)
    assert error.value.limit == 1.0
    return error.value.needed


@pytest.mark.parametrize("name", PROGRAMS)
def test_limits_from_what_is_needed_to_all_there_is(name):
    needed = least(name)
    free = formulation_of(name, 1e9)
    best = solve_within(free, SECONDS)
    most = 1.01 * free.peak_bytes(best.choice) / CPU.usable  # lives alone hold more than with what reshardings free
    assert needed < most
    costs = []
    for share in (0.0, 0.25, 0.5, 1.0):
        formulation = formulation_of(name, needed + share * (most - needed))
        solution = solve_within(formulation, SECONDS)
        assert_within(formulation, solution)
        costs.append(solution.cost)
    assert costs == sorted(costs, reverse=True)  # more memory never costs more
    assert costs[0] > costs[-1] == pytest.approx(best.cost)


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_negligible(name):
    """Counted at its most no choice holds less than it does, nor more than is said."""
    formulation = formulation_of(name, 1e9)
    exact = formulation.problem
    coarse, spared = memory_limit._coarse(exact, 1e4)
    assert coupled(coarse) < coupled(exact) and 0 < spared <= 1e4
    for choice in random_choices(formulation, 5):
        held, counted = (verify(problem, choice)[1] for problem in (exact, coarse))
        assert held <= counted <= held + spared


def coupled(problem: Problem) -> int:
    """How many lives depend on a choice."""
    return sum(np.ptp(live.usage) > 0 for live in problem.lives)


def test_what_is_negligible_forbids_nothing(monkeypatch):
    """Under a limit that the cheapest choice just keeps, it is found; not without the room for what is counted more."""

    def product(w, b):
        return w @ w + b

    def assert_found():
        tight = replace(planned(memory=peak / CPU.usable), reshardings=[])  # which hold nothing here
        found = solve_within(tight, SECONDS)
        assert (found.cost, found.status) == (pytest.approx(best.cost), "optimal")

    planned = functools.partial(
        formulated, product, f32(32, 32), f32(32), mesh={"x": 4}, topology=TOPOLOGY, donate=(0,)
    )
    problem = planned(memory=1e9).problem
    free = exhaustive(problem)
    best = exhaustive(replace(problem, limit=0.9 * verify(problem, free.choice)[1]))
    assert best.cost > 1.1 * free.cost
    _, peak = verify(problem, best.choice)
    monkeypatch.setattr(memory_limit, "NEGLIGIBLE_SHARE", 0.02)  # as much as the vector
    assert_found()
    real = memory_limit._coarse
    monkeypatch.setattr(memory_limit, "_coarse", lambda *args: (real(*args)[0], 0.0))
    with pytest.raises(AssertionError):
        assert_found()


def test_what_is_needed_does_not_depend_on_what_there_is():
    needed = least("two layers")
    with pytest.raises(InfeasibleError) as error:
        solve_within(formulation_of("two layers", needed * 0.8), SECONDS)
    assert error.value.needed == pytest.approx(needed)


def test_what_is_needed_is_sought_once_it_is_asked_for(monkeypatch):
    """It is the same, however late: the time limit of the search begins then."""
    needed, asked = least("one layer"), []
    real, clock = memory_limit._lean_solutions, memory_limit.time.monotonic
    monkeypatch.setattr(memory_limit, "_lean_solutions", lambda *args: (asked.append(args), real(*args))[1])
    for limit in (1.0, 0.8 * needed):
        with pytest.raises(InfeasibleError) as error:
            solve_within(formulation_of("one layer", limit), SECONDS)
        assert not asked and limit < error.value.least
        with monkeypatch.context() as later:
            later.setattr(memory_limit.time, "monotonic", lambda: clock() + 2 * SECONDS)
            assert error.value.least <= error.value.needed == pytest.approx(needed)
        assert error.value.needed and len(asked) == 1
        asked.clear()


def test_what_is_not_found_to_be_needed_is_infinite(monkeypatch):
    with pytest.raises(InfeasibleError) as error:
        solve_within(formulation_of("two layers", 1.0), SECONDS)

    def slow(problem, **keywords):
        raise SolverError("not found in time")

    monkeypatch.setattr(memory_limit, "solve_for_plan", slow)
    assert error.value.needed == np.inf


def test_what_is_needed_is_little():
    """No choice at random is leaner."""
    formulation = formulation_of("two layers", 1.0)
    assert CPU.usable * least("two layers") <= min(map(formulation.peak_bytes, random_choices(formulation, 20))) * 1.01


def test_reshardings_count(monkeypatch):
    """As if what reshardings hold were no matter: some plan is over its limit."""
    needed = least("two layers")
    real = Formulation.peak_bytes
    monkeypatch.setattr(Formulation, "accepted_peak", lambda self, choice: int(verify(self.problem, choice)[1]))
    with pytest.raises(AssertionError):
        for share in np.linspace(0.8, 1.6, 9):
            formulation = formulation_of("two layers", share * needed)
            try:
                solution = solve_within(formulation, SECONDS)
            except InfeasibleError:
                continue
            assert real(formulation, solution.choice) <= CPU.usable * formulation.problem.limit


def test_what_searches_are_told(monkeypatch):
    """Whether a choice fits with all that it holds, reshardings too; and how long lean ones may take."""
    needed, said, real = least("two layers"), [], memory_limit.solve_for_plan

    def told(problem, *, accepts=None, **keywords):
        assert keywords["time_limit"] <= SECONDS
        solution = real(problem, accepts=accepts or (lambda choice: True), **keywords)
        if accepts:
            peak = formulation.peak_bytes(solution.choice[: len(formulation.problem.costs)])
            said.append(accepts(solution.choice))
            assert said[-1] == (peak <= CPU.usable * formulation.problem.limit)
        return solution

    monkeypatch.setattr(memory_limit, "solve_for_plan", told)
    for share in (0.9, 1.0, 1.2, 1.4, 1.6):
        formulation = formulation_of("two layers", share * needed)
        with contextlib.suppress(InfeasibleError):
            solve_within(formulation, SECONDS)
    assert {True, False} == set(said)


def test_a_choice_over_the_limit_is_caught():
    formulation = formulation_of("two layers", 1e9)
    solution = solve_within(formulation, SECONDS)
    peak = formulation.peak_bytes(solution.choice)
    tight = replace(formulation, problem=replace(formulation.problem, limit=peak - 1))
    with pytest.raises(AssertionError):
        assert_within(tight, solution)


def test_any_number_of_rounds(monkeypatch):
    """However few rounds there are, what comes out is within the limit."""
    needed = least("one layer")
    for rounds in (0, 1, 2):
        monkeypatch.setattr(memory_limit, "MAX_ROUNDS", rounds)
        formulation = formulation_of("one layer", 1.2 * needed)
        assert_within(formulation, solve_within(formulation, SECONDS))


def test_lean_choices_where_what_is_found_is_far_from_its_bound(monkeypatch):
    """The cheapest comes back, with a bound that is not above it, whichever way it was found; and without lean ones."""
    formulation = formulation_of("two layers", 1e9)
    best = solve_within(formulation, SECONDS)
    dear = max((verify(formulation.problem, choice)[0], choice) for choice in random_choices(formulation, 20))
    assert dear[0] > 1.1 * best.cost

    def solve_badly(problem, **keywords):
        """As if the problem did not allow the best choice: its bound is above that."""
        return Solution(tuple(dear[1]), dear[0], 1.01 * best.cost, "feasible")

    def lean(*args):
        yield replace(best, bound=0.5 * best.cost), formulation.peak_bytes(best.choice)
        raise SolverError("not found in time")

    monkeypatch.setattr(memory_limit, "solve_for_plan", solve_badly)
    monkeypatch.setattr(memory_limit, "_lean_solutions", lean)
    found = solve_within(formulation, SECONDS)
    assert (found.choice, found.bound, found.status) == (best.choice, 0.5 * best.cost, "feasible")
    monkeypatch.setattr(memory_limit, "_lean_solutions", lambda *args: itertools.islice(lean(), 1, None))
    found = solve_within(formulation, SECONDS)
    assert (found.choice, found.bound) == (tuple(dear[1]), 1.01 * best.cost)


def test_no_lean_choice_in_time_says_what_to_do(monkeypatch):
    def slow(problem, **keywords):
        raise SolverError("not found in time")

    monkeypatch.setattr(memory_limit, "solve_for_plan", slow)
    with pytest.raises(SolverError, match="how much memory it takes was not found in 3 s; raise time_limit"):
        solve_within(formulation_of("two layers", 1e9), 3.0)


def test_what_is_not_decided_in_time_has_the_bound_of_the_first_search(monkeypatch):
    """That search counts no more than is held; those with more counted prove nothing."""
    bounds = iter((0.5, 0.7, 0.9))

    def slow(problem, **keywords):
        raise UndecidedError("not found in time", bound=next(bounds, 1.1))

    monkeypatch.setattr(memory_limit, "solve_for_plan", slow)
    with pytest.raises(UndecidedError) as error:
        solve_within(formulation_of("two layers", 1e9), SECONDS)
    assert error.value.bound == 0.5


def test_what_is_wholly_forbidden_says_so():
    formulation = formulation_of("one layer", 1e9)
    nothing = replace(formulation, problem=formulation.problem.restrict({0: []}))
    with pytest.raises(ForbiddenError, match="every choice is forbidden: node 0 has no option left"):
        solve_within(nothing, SECONDS)


def test_all_rounds_share_one_budget(monkeypatch):
    """However much each of them does, nothing is over the limit for longer than the time that was given."""
    needed, done, real = least("two layers"), [], memory_limit.solve_for_plan

    def greedy(problem, *, budget, **keywords):
        try:
            return real(problem, budget=budget, **keywords)
        finally:
            done.append(budget.left)
            budget.spend(budget.left)

    monkeypatch.setattr(memory_limit, "solve_for_plan", greedy)
    with contextlib.suppress(SolverError):
        solve_within(formulation_of("two layers", 0.8 * needed), SECONDS)
    assert len(done) > 2 and sum(done) <= QUIET_SHARE * SECONDS * 1.001


def test_ctrl_c_ends_all_rounds(monkeypatch):
    """A choice that is within the limit comes back, if it is far from its bound, too; nothing else is begun."""
    formulation = formulation_of("two layers", 1e9)
    best, asked = solve_within(formulation, SECONDS), []

    def pressed(problem, *, budget, **keywords):
        asked.append(problem)
        budget.interrupt()
        return replace(best, bound=0.5 * best.cost, status="feasible")

    monkeypatch.setattr(memory_limit, "solve_for_plan", pressed)
    assert solve_within(formulation, SECONDS).choice == best.choice and len(asked) == 1
    with pytest.raises(KeyboardInterrupt):
        solve_within(formulation_of("two layers", 1.0), SECONDS)
    assert len(asked) == 2


def test_ctrl_c_keeps_the_choice_whose_bound_is_raised(monkeypatch):
    def pressed(*args, **keywords):
        raise KeyboardInterrupt

    monkeypatch.setattr(memory_limit, "_solved", pressed)
    best, formulation = Solution((0,), 2.0, 1.0, "feasible"), formulation_of("one layer", 1e9)
    budget = Budget.of(SECONDS)
    assert memory_limit._bounded(formulation, formulation.problem, (), best, bool, budget, None) == best


def test_what_lies_on_the_chip_does_not_count_where_the_limit_is_small():
    formulation = on_chip()
    solution, limit = solve_within(formulation, SECONDS), 10_000 * V5E.usable
    assert fits(formulation.accepted_peak(solution.choice), limit)
    assert not fits(formulation.peak_bytes(solution.choice), limit)
    large = replace(formulation, problem=replace(formulation.problem, limit=1e12))
    assert large.accepted_peak(solution.choice) == formulation.peak_bytes(solution.choice)
    assert large.accepted_bytes_in_use(solution.choice).max() > formulation.accepted_bytes_in_use(solution.choice).max()


def first_search(monkeypatch, instead) -> None:
    """Has the first search of `solve_within` do something else."""
    real, asked = memory_limit._solved, []

    def solved(*args, **keywords):
        asked.append(args)
        return (instead if len(asked) == 1 else real)(*args, **keywords)

    monkeypatch.setattr(memory_limit, "_solved", solved)


def test_a_late_search_outside_the_chip_proves_nothing(monkeypatch):
    """The rounds that follow count what the chip may hold, so their bound is not one of the step."""

    def late(*args, **keywords):
        raise SolverError("none was found in time")

    first_search(monkeypatch, late)
    assert solve_within(on_chip(), 1.0).bound == 0.0


def test_ctrl_c_in_the_search_outside_the_chip_begins_no_other(monkeypatch):
    def pressed(formulation, problem, reshardings, budget, **keywords):
        budget.interrupt()
        return Solution(random_choices(formulation, 1)[0], 1.0, 0.0, "feasible")

    first_search(monkeypatch, pressed)
    tight = replace(on_chip(), problem=replace(on_chip().problem, limit=1.0))
    with pytest.raises(KeyboardInterrupt):
        solve_within(tight, SECONDS)


def test_what_proves_a_bound_counts_nothing_that_may_lie_in_results(monkeypatch):
    formulation, seen = on_chip(), []

    def spied(problem, **keywords):
        seen.append(problem)
        raise KeyboardInterrupt

    heap = replace(formulation.heap, on_chip=formulation.heap.on_chip[:1])
    monkeypatch.setattr(memory_limit, "solve_for_plan", spied)
    with pytest.raises(KeyboardInterrupt):
        solve_within(replace(formulation, heap=heap), SECONDS)
    room = heap.room_in_results
    kept = room.guests(EVERY)
    guests = [live for live in room.temporaries if id(live) in kept and not kept[id(live)].any()]
    counted = Counter((live.node, live.start, live.end) for live in seen[0].lives)
    others = [live for live in formulation.problem.lives if not any(live is guest for guest in guests)]
    assert len(guests) > 1 and counted <= Counter((live.node, live.start, live.end) for live in others)


def newton_schulz(weights, x):
    """A step of one large matrix, whose update has temporaries of more bytes than a TPU's own memory has."""

    def orthogonal(matrix):
        matrix = matrix / jnp.sqrt((matrix * matrix).sum())
        for _ in range(3):
            matrix = 1.5 * matrix - 0.5 * (matrix @ matrix.T) @ matrix
        return matrix

    value, gradient = jax.value_and_grad(lambda weights: (jnp.tanh(x @ weights) ** 2).mean())(weights)
    return weights - 0.1 * orthogonal(gradient), value


def planned_newton_schulz(**options):
    arrays = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((4096, 8192), (2048, 4096)))
    mesh = AbstractMesh((4, 2), ("data", "model"))
    return autoshard.plan(newton_schulz, *arrays, mesh=mesh, topology="v5e:2x4", donate_argnums=0, **options)


def test_temporaries_fill_the_chip_and_no_more(monkeypatch):
    """Within a limit that the free plan does not keep, though much of what it holds could lie on the chip."""
    free = planned_newton_schulz()
    within = planned_newton_schulz(memory=free.predicted.peak_bytes)
    assert within.status == "optimal" and within.predicted.peak_bytes <= 0.85 * free.predicted.peak_bytes
    assert within.cost > free.cost
    monkeypatch.setattr(memory_limit._LimitSearch, "_with_chip_filled", lambda search: None)
    lean = planned_newton_schulz(memory=free.predicted.peak_bytes)  # one of those that are looked at last
    assert lean.predicted.peak_bytes <= 0.85 * free.predicted.peak_bytes and lean.cost >= within.cost
    choices = memory_limit._lean_solutions
    monkeypatch.setattr(
        memory_limit, "_lean_solutions", lambda of, lean, *how: () if lean[1] else choices(of, lean, *how)
    )
    with pytest.raises(autoshard.MemoryLimitError, match=r"^no sharding was found that fits"):
        planned_newton_schulz(memory=free.predicted.peak_bytes)


def test_any_lean_choice_that_fits_is_enough_where_any_does(monkeypatch):
    formulation, asked = formulation_of("two layers", 1e9), []
    best = solve_within(formulation, SECONDS)

    def slow(problem, **keywords):
        raise SolverError("not found in time")

    def lean(*args):
        for cost in (3.0, 2.0):
            asked.append(cost)
            yield replace(best, cost=cost * best.cost), formulation.peak_bytes(best.choice)

    monkeypatch.setattr(memory_limit, "solve_for_plan", slow)
    monkeypatch.setattr(memory_limit, "_lean_solutions", lean)
    assert solve_within(formulation, SECONDS, gap=memory_limit.ANY_GAP).cost == 3 * best.cost and asked == [3.0]
    assert solve_within(formulation, SECONDS).cost == 2 * best.cost and asked == [3.0, 3.0, 2.0]


def test_what_is_known_to_be_needed_is_said_though_time_is_up(monkeypatch):
    """A second kind of lean choices was not found in time: the first says what would do."""

    def lean(formulation, one, *how):
        if one[1]:
            raise SolverError("not found in time")
        yield Solution(random_choices(formulation, 1)[0], 1.0, 0.0, "feasible"), 5_000

    formulation = replace(on_chip(), problem=replace(on_chip().problem, limit=1.0))
    monkeypatch.setattr(memory_limit, "_solved", lambda *args, **keywords: lean(None, (None, 1.0)).__next__())
    monkeypatch.setattr(memory_limit, "_lean_solutions", lean)
    with pytest.raises(InfeasibleError) as error:
        solve_within(formulation, SECONDS)
    assert error.value.needed == 5_000 / V5E.usable
