"""The published searches against every choice of small problems; their shared parts against `verify`."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from problems import answer_of_every_choice, binding_problem, hard_problem, random_problem
from sweeps import spread

from autoshard.errors import SolverError
from autoshard.solver import SEARCHES, Edge, ForbiddenError, InfeasibleError, Live, Problem, solve
from autoshard.solver.method import Method
from autoshard.solver.run import NoChoice, ProblemPart, SolverRun, count_options
from autoshard.solver.runtime.budget import Budget
from autoshard.solver.searches.exact import optcnn
from autoshard.solver.searches.exact.mini_buckets import MiniBuckets, smallest_tables_first
from autoshard.solver.searches.exact.pase import SETTINGS, DynamicProgramSettings, depth_first, search_by_tables
from autoshard.solver.searches.learning.network import Network
from autoshard.solver.searches.many_choices import ManyChoices
from autoshard.solver.searches.nearest_allowed import NearestProblem
from autoshard.solver.searches.position import Position
from autoshard.solver.searches.search_run import PartSearch, SearchRun
from autoshard.solver.searches.table import algorithm_of
from autoshard.solver.settings import PROVEN, USUAL_SIZES
from autoshard.solver.verify import fits, verify

FEW = 50  # problems of each kind
EXACT = ("alpa", "optcnn", "pase", "tensoropt")  # what proves the optimum of any small problem


def part_of(problem: Problem, *, work: float = 4.0, seed: int = 0) -> tuple[ProblemPart, SolverRun]:
    """A whole problem as one part, as it is: presolve would solve most small ones."""
    how = {"iterations": None, "counts_work": True, "goal": PROVEN, "sizes": USUAL_SIZES, "algorithms": ()}
    run = SolverRun(problem, seed=seed, threads=1, budget=Budget(work, np.inf), progress=None, **how)
    options = count_options(problem)
    part = ProblemPart(run.incumbent, is_large=False, bounds_pay=False, of_whole=True, share=1.0, options_left=options)
    return part, run


def running(problem: Problem) -> SearchRun:
    return SearchRun(*part_of(problem))


@functools.cache
def solvable() -> tuple[tuple[Problem, float], ...]:
    """A hundred small problems with what their cheapest choices cost; memory binds in half of them."""
    kinds = [(make(seed), 0) for make in (random_problem, binding_problem) for seed in range(3 * FEW)]
    found = [(problem, answer_of_every_choice(problem)) for problem, _ in kinds]
    costs = [[one for one in half if one[1][0] == "costs"][:FEW] for half in (found[: 3 * FEW], found[3 * FEW :])]
    return tuple((problem, cost) for half in costs for problem, (_, cost) in half)


def assert_finds(search: PartSearch, which: slice = slice(None)) -> None:
    """The search finds the optimum of these problems; it is told what that costs, and so ends once it has it."""
    for problem, cost in solvable()[which]:
        part, run = part_of(problem)
        part.incumbent.prove(cost)
        search.improve(part, run)
        assert part.incumbent.choice is not None, problem
        np.testing.assert_allclose(part.incumbent.cost, cost, rtol=1e-6)


@pytest.mark.parametrize("which", spread([slice(k, None, 4) for k in range(4)], 4), ids=str)
@pytest.mark.parametrize("name", SEARCHES)
def test_finds_the_optimum_of_a_hundred_small_problems(name, which):
    assert_finds(algorithm_of(name), which)


def on(change):
    """A search that gets another problem than it is asked to solve."""

    def faulty(problem: Problem, run: SearchRun) -> None:
        SEARCHES["pase"](change(problem), run)

    return PartSearch(faulty, "faulty")


@pytest.mark.parametrize(
    "change",
    [
        lambda problem: replace(problem, limit=None),
        lambda problem: replace(problem, limit=problem.limit and problem.limit - 1),
        lambda problem: replace(problem, edges=problem.edges[:-1]),
        lambda problem: problem.restrict({0: [int(problem.costs[0].argmin())]}),
    ],
    ids=["no memory", "a byte less", "an edge less", "greedy"],
)
def test_a_faulty_search_is_caught(change):
    with pytest.raises((AssertionError, NoChoice)):
        assert_finds(on(change))


@pytest.mark.parametrize("name", EXACT)
def test_exact_searches_prove_what_they_find(name):
    for problem, cost in solvable()[30:70]:
        part, run = part_of(problem)
        algorithm_of(name).improve(part, run)
        assert part.incumbent.is_solved
        np.testing.assert_allclose(part.incumbent.cost, cost, rtol=1e-6)


@pytest.mark.parametrize("name", EXACT)
def test_exact_searches_prove_that_nothing_fits(name):
    seen = 0
    for seed in range(60):
        problem = binding_problem(seed)
        if answer_of_every_choice(problem)[0] == "needs":
            seen += 1
            with pytest.raises(NoChoice):
                algorithm_of(name).improve(*part_of(problem))
    assert seen > 3


def tight_problem(seed: int) -> Problem:
    """Six nodes whose options hold a sixth of the limit, but for a few bytes; every two have an edge."""
    rng, nodes, limit = np.random.default_rng(seed), 6, 10**10
    costs = tuple(rng.integers(0, 20, 3).astype(float) for _ in range(nodes))
    edges = tuple(Edge(i, j, rng.integers(0, 20, (3, 3)).astype(float)) for i in range(nodes) for j in range(i))
    lives = tuple(Live(i, 0, 1, limit // nodes + rng.integers(-3, 5, 3) + seed % 4) for i in range(nodes))
    return Problem(costs, edges, lives, limit)


@pytest.mark.parametrize("name", EXACT)
def test_exact_searches_count_each_byte_of_a_large_limit(name):
    kinds = set()
    for seed in range(12):
        problem = tight_problem(seed)
        kind, expected = answer_of_every_choice(problem)
        kinds.add(kind)
        if kind == "costs":
            found = solve(problem, search=name, time_limit=3)
            assert (found.cost, found.bound) == (pytest.approx(expected), pytest.approx(expected)), seed
        else:
            with pytest.raises(InfeasibleError):
                solve(problem, search=name, time_limit=3)
    assert kinds == {"costs", "needs"}


def test_tables_of_wide_nodes_are_capped(monkeypatch):
    seen = []
    monkeypatch.setattr(optcnn, "search_by_tables", lambda problem, run, settings, explore: seen.append(settings))
    for options in (4, 400):
        optcnn.optcnn(Problem((np.zeros(options),), (), (), None), None)
    assert [one.entries for one in seen] == [one.most_entries for one in seen] == [4**3, SETTINGS.most_entries]


@pytest.mark.parametrize("name", sorted(SEARCHES.keys() - {"alpa"}))  # HiGHS takes what it takes
def test_is_deterministic_and_keeps_to_its_budget(name):
    found = []
    for seed in (0, 0, 1):
        budget = Budget(0.02, np.inf)
        found.append(solve(HARD, search=name, seed=seed, budget=budget))
        assert budget.done < 0.12
        assert name in found[-1].seconds
        assert fits(verify(HARD, found[-1].choice)[1], HARD.limit)
    assert found[0] == found[1]
    assert found[0].bound <= found[0].cost


HARD = hard_problem(nodes=30, options=5)


@pytest.mark.parametrize("name", ["flexflow", "pase"])
def test_says_what_the_solver_says_where_nothing_is_allowed(name):
    lean = Problem((np.zeros(2), np.zeros(2)), HARD.edges[:0], (), None)
    forbidden = replace(lean, edges=(Edge(0, 1, np.full((2, 2), np.inf)),))
    with pytest.raises(ForbiddenError):
        solve(forbidden, search=name)
    with pytest.raises(InfeasibleError) as error:
        solve(replace(HARD, limit=10.0), search=name, budget=Budget(0.05, np.inf))
    with pytest.raises(InfeasibleError) as expected:
        solve(replace(HARD, limit=10.0), time_limit=5)
    np.testing.assert_allclose(error.value.needed, expected.value.needed)


def test_what_finds_nothing_that_fits_returns_what_holds_the_least():
    tight = replace(HARD, limit=min_peak(HARD))
    solution = solve(tight, search=lambda problem, run: None, time_limit=5)
    assert solution.status == "feasible" and fits(verify(tight, solution.choice)[1], tight.limit)


def min_peak(problem: Problem) -> float:
    with pytest.raises(InfeasibleError) as error:
        solve(replace(problem, limit=0.0), time_limit=5)
    return error.value.needed


def test_a_search_of_ones_own():
    def cheapest_options(problem: Problem, run: SearchRun) -> None:
        at = Position(problem, run)
        at.repair()
        at.offer()

    solution = solve(HARD, search=cheapest_options)
    assert "cheapest_options" in solution.seconds
    assert solution.cost < verify(HARD, [0] * len(HARD.costs))[0]


@pytest.mark.parametrize("search", ["alpha", 3])
def test_an_unknown_search_is_an_error_that_names_those_there_are(search):
    with pytest.raises(SolverError, match=rf"no search {search!r}; the searches are aceso, alpa, .*toast, tofu\."):
        solve(HARD, search=search)


def assert_position(at: Position, problem: Problem) -> None:
    """Cost and bytes over the limit are those of the choice."""
    cost, peak = verify(problem, at.choice)
    assert (cost == np.inf) == (at.cost >= at.never)
    if cost < np.inf:
        np.testing.assert_allclose(at.cost, cost, rtol=1e-9, atol=1e-12 * at.never)
    assert (at.excess == 0) == fits(peak, problem.limit)


def test_a_position_keeps_cost_and_bytes_up_to_date():
    for problem, _ in solvable()[::3]:
        at = Position(problem, running(problem))
        for _ in range(10 if at.decided else 0):
            node = int(at.rng.choice(at.decided))
            option = int(at.rng.integers(at.sizes[node]))
            costs = at.option_costs(node)
            added = at.added_cost(node, option)
            np.testing.assert_allclose(added, costs[option] - costs[at.choice[node]], atol=1e-12 * at.never)
            at.change(node, option, added)
            assert_position(at, problem)


def test_a_position_that_is_not_kept_up_to_date_is_caught():
    problem, _ = solvable()[-1]
    at = Position(problem, running(problem))
    with pytest.raises(AssertionError):
        for node in at.decided:
            at.change(node, 1, 0.5 * at.added_cost(node, 1))
            assert_position(at, problem)


def test_many_choices_cost_and_hold_what_single_ones_do():
    for problem, _ in solvable()[::5]:
        many = ManyChoices(problem, running(problem))
        choices = many.random(20)
        for choice, cost, excess in zip(choices, many.costs(choices), many.excess(choices), strict=True):
            expected, peak = verify(problem, choice)
            if expected < np.inf:
                np.testing.assert_allclose(cost, expected, rtol=1e-9, atol=1e-12 * many.at.never)
            assert (cost >= many.at.never) == (expected == np.inf)
            assert (excess == 0) == fits(peak, problem.limit)


def test_a_repair_is_allowed_fits_and_keeps_what_is_allowed():
    found = 0
    for problem, _ in solvable():
        run = running(problem)
        nearest = NearestProblem(problem, run.rng, run.spend)
        choice = [int(option) for option in run.rng.integers([len(costs) for costs in problem.costs])]
        repaired = nearest.find(choice)
        cost, peak = verify(problem, choice)
        if cost < np.inf and fits(peak, problem.limit):
            assert repaired == choice
        if repaired is not None:
            cost, peak = verify(problem, repaired)
            assert cost < np.inf and fits(peak, problem.limit)
            found += 1
    assert found > 0.9 * len(solvable())


@pytest.mark.parametrize("entries", [4, 64, 1 << 12])
def test_split_buckets_leave_a_bound_and_whole_ones_the_optimum(entries):
    for problem, _ in solvable()[:FEW]:
        free = replace(problem, limit=None)
        cost = answer_of_every_choice(free)[1]
        order = smallest_tables_first(free, np.zeros(len(free.costs)), entries)
        tables = MiniBuckets(free, free.costs, order, entries, running(free))
        assert tables.bound <= cost + 1e-9 * abs(cost)
        if tables.is_exact:
            np.testing.assert_allclose(tables.bound, cost, rtol=1e-9)
            np.testing.assert_allclose(verify(free, tables.first_choice())[0], cost, rtol=1e-9)


def test_small_tables_and_few_branches_still_end_in_the_optimum():
    settings = DynamicProgramSettings(entries=4, most_entries=4, size=1.0)

    def small(problem: Problem, run: SearchRun) -> None:
        search_by_tables(problem, run, settings, depth_first)

    assert_finds(PartSearch(small, "small"))


def test_gradients_of_a_network_are_those_of_differences():
    rng = np.random.default_rng(0)
    network, rows, weights = Network(3, 4, rng), rng.random((5, 3)), rng.random(5)
    for array, gradient in zip(network.arrays, network.gradients(rows, weights), strict=True):
        for place in np.ndindex(array.shape):
            values = []
            for step in (1e-6, -2e-6, 1e-6):
                array[place] += step
                values.append(weights @ network.values(rows))
            np.testing.assert_allclose(gradient[place], (values[0] - values[1]) / 2e-6, atol=1e-6)


def test_presolve_comes_before_a_search():
    chain = Problem((np.array([0.0, 1.0]),) * 3, (Edge(0, 1, np.eye(2)), Edge(1, 2, np.eye(2))), (), None)
    solution = solve(chain, search="flexflow")
    assert solution.status == "optimal" and "flexflow" not in solution.seconds
    assert solve(chain, method=Method()) == solution
