"""The whole core: against trying everything, against the clock, against Ctrl-C, and in two processes."""

import contextlib
import functools
import itertools
import os
import pickle
import subprocess
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from problems import answer, assert_same, binding_problem, hard_problem, random_problem, some_of

from autoshard.errors import SolverError
from autoshard.solver import Problem, infeasibility, least_memory, progress, run, solve
from autoshard.solver.bounds.forbid_options import OptionBounds
from autoshard.solver.bounds.message_passing import Relaxation
from autoshard.solver.bounds.settings import RELAXATION
from autoshard.solver.exact import highs, integer_program
from autoshard.solver.exact.exhaustive import exhaustive
from autoshard.solver.exact.narrow_parts import Elimination
from autoshard.solver.exact.programs import IntegerProgram
from autoshard.solver.incumbent import least_sum, most_sum
from autoshard.solver.local_search import neighbourhoods
from autoshard.solver.local_search.compiled_search import CompiledSearch
from autoshard.solver.local_search.forest_moves import ForestMoves
from autoshard.solver.local_search.settings import RoundSettings
from autoshard.solver.method import ALGORITHMS, Method
from autoshard.solver.problem import Edge, InfeasibleError, Live
from autoshard.solver.run import SolverRun
from autoshard.solver.runtime import clock
from autoshard.solver.runtime.clock import Clock
from autoshard.solver.settings import Goal, Sizes
from autoshard.solver.verify import verify

TESTS = Path(__file__).parents[1]


@pytest.mark.parametrize("seeds", some_of(range(20_000, 21_500), 250))
def test_random_problems(seeds):
    counts = {"costs": 0, "needs": 0, "forbidden": 0}
    for seed in seeds:
        problem = random_problem(seed)
        expected = answer(exhaustive, problem)
        assert_same(answer(solve, problem), expected)
        counts[expected[0]] += 1
    assert min(counts.values()) > len(seeds) / 15, counts


@pytest.mark.parametrize("seeds", some_of(range(200), 80))
def test_larger_random_problems(seeds):
    for seed in seeds:
        problem = random_problem(seed, nodes=9, options=3)
        assert_same(answer(solve, problem), answer(exhaustive, problem))


def bounds_always(*, rounds: int) -> Method:
    """Bounds, and all that follows from them, however few options there are; without moves, and not for long."""
    moves = ForestMoves(visits=0, attempts=0)
    program = IntegerProgram(elimination=Elimination(most_options=0))
    at_once = {"unpriced_rounds": 1, "worth_before_prices": np.inf}  # memory has prices at once
    relaxation = replace(RELAXATION, rounds=rounds, last_rounds=0, **at_once)
    bounds = OptionBounds(relaxation=relaxation, moves=moves, program=program)
    return Method(
        (bounds, CompiledSearch(program=program), moves, program), sizes=Sizes(few_options=0, bounded_options=0)
    )


@pytest.mark.parametrize("seeds", some_of(range(500), 150))
@pytest.mark.parametrize("rounds", [1, 1000])
def test_with_bounds_first(rounds, seeds):
    with_bounds = functools.partial(solve, method=bounds_always(rounds=rounds))
    for seed in seeds:
        problem = random_problem(seed)
        assert_same(answer(with_bounds, problem), answer(exhaustive, problem))
    for seed in seeds[: len(seeds) * 2 // 5]:
        problem = random_problem(seed, nodes=9, options=3)
        assert_same(answer(with_bounds, problem), answer(exhaustive, problem))


COMPILED = Method(sizes=Sizes(compiled_options=0))


@pytest.mark.parametrize("seeds", some_of(range(300), 30))
def test_with_compiled_code(compiled, seeds):
    with_compiled = functools.partial(solve, method=COMPILED)
    for seed in seeds:
        problem = random_problem(seed)
        assert_same(answer(with_compiled, problem), answer(exhaustive, problem))
    for seed in seeds[: len(seeds) // 3]:
        problem = binding_problem(seed)
        assert_same(answer(with_compiled, problem), answer(exhaustive, problem))


def test_compiled_code_stops_in_time_and_tells_what_it_does(compiled):
    told = []
    start = time.monotonic()
    solution = solve(hard_problem(), method=COMPILED, time_limit=2, threads=2, progress=told.append)
    assert time.monotonic() - start < 60
    assert solution.status == "feasible" and 0 < solution.bound < solution.cost
    assert {"load compiled code", "simplify", "search"} <= {progress.stage for progress in told}
    assert set(solution.seconds) >= {"load compiled code", "simplify", "search"}


def test_ctrl_c_in_compiled_code_returns_the_best_so_far(compiled):
    def press(progress):
        if progress.stage == "search" and progress.cost < np.inf:
            raise KeyboardInterrupt

    assert solve(hard_problem(), method=COMPILED, time_limit=100, progress=press).status == "feasible"


def test_small_problems_never_wait_for_numba():
    code = (
        "import sys\n"
        "from problems import hard_problem\n"
        "from autoshard.solver import solve\n"
        "print(solve(hard_problem(nodes=25, options=4)).status, 'numba' in sys.modules)\n"
    )
    assert run_python(code).communicate(timeout=300)[0] == "optimal False\n"


def test_unsound_bounds_are_caught(monkeypatch):
    """Options whose least cost is said to be too high are left out."""

    def more(self, *, forward=True, original=Relaxation.least):
        return [costs * 2 for costs in original(self, forward=forward)]

    with_bounds = functools.partial(solve, method=bounds_always(rounds=1))
    monkeypatch.setattr(Relaxation, "least", more)
    with pytest.raises((AssertionError, SolverError)):
        for seed in range(20_000, 22_000):
            problem = random_problem(seed)
            assert_same(answer(with_bounds, problem), answer(exhaustive, problem))


def test_sums_enclose_every_choice():
    for seed in range(300):
        problem = random_problem(seed)
        kind, cost = answer(exhaustive, problem)
        if kind == "costs":
            slack = 1e-9 * abs(cost)
            assert least_sum(problem) - slack <= cost <= most_sum(problem) + slack


def test_more_memory_never_costs_more():
    problem = replace(hard_problem(nodes=12, options=4), limit=None)
    costs = []
    for limit in (300, 400, 500, 600, None):
        kind, cost = answer(solve, replace(problem, limit=limit))
        costs.append(cost if kind == "costs" else np.inf)
    assert costs == sorted(costs, reverse=True)
    assert costs[0] > costs[-1]


def test_memory_error_says_what_would_do():
    lives = Live(0, 0, 2, np.array([8, 6])), Live(1, 1, 3, np.array([5, 7]))
    crossed = Edge(0, 1, np.array([[np.inf, 0.0], [0.0, np.inf]]))
    problem = Problem((np.zeros(2), np.zeros(2)), (crossed,), lives, limit=10)
    with pytest.raises(InfeasibleError) as error:
        solve(problem)
    assert (error.value.limit, error.value.needed) == (10, 11)
    assert str(error.value) == "no choice fits in 10 bytes; the least that one holds is 11, at point 1"
    assert solve(replace(problem, limit=error.value.needed)).status == "optimal"


def test_memory_error_of_a_large_problem_says_what_it_needs_at_least(monkeypatch, compiled):
    """Too large to prove the least that a choice holds: a choice that holds little is found, and a bound is proven."""
    monkeypatch.setattr(least_memory, "LEAST_MEMORY", replace(least_memory.LEAST_MEMORY, most_options=0))
    lives = tuple(Live(node, node, node + 2, np.array([8, 6, 9])) for node in range(4))
    crossed = tuple(Edge(k, k + 1, np.where(np.eye(3, dtype=bool), np.inf, 0.0)) for k in range(3))
    problem = Problem((np.zeros(3),) * 4, crossed, lives, limit=11)
    said = r"no choice fits in 11 bytes; one was found that holds 14, at point \d; none holds less than 14"
    with pytest.raises(InfeasibleError, match=said) as error:
        solve(problem, method=COMPILED)
    assert error.value.needed == 14
    assert solve(replace(problem, limit=14), method=COMPILED).status == "optimal"


@pytest.mark.parametrize("is_allowed", [True, False])
def test_what_would_do_is_sought_once_it_is_asked_for(monkeypatch, is_allowed):
    """Unless nobody knows a choice that is allowed: all may be forbidden, which is another error."""
    sought, leanest = [], infeasibility.leanest
    monkeypatch.setattr(infeasibility, "leanest", lambda *args: sought.append(args) or leanest(*args))
    problem = replace(hard_problem(nodes=12, options=4), limit=1)
    first, *rest = problem.costs
    problem = replace(problem, costs=(np.append(0.0 if is_allowed else np.inf, first[1:]), *rest))
    with pytest.raises(InfeasibleError) as error:
        solve(problem, time_limit=2)
    assert len(sought) == (not is_allowed)
    monkeypatch.setattr(
        time, "monotonic", lambda real=time.monotonic: real() + 10
    )  # its time is not that of the search
    assert verify(problem, error.value.choice)[1] == error.value.needed == error.value.least > 1
    assert len(sought) == 1
    same = pickle.loads(pickle.dumps(error.value))
    assert (str(same), same.needed, same.least) == (str(error.value), error.value.needed, error.value.least)


def test_forbidden_is_not_called_memory():
    never = Edge(0, 1, np.full((2, 2), np.inf))
    with pytest.raises(SolverError, match="every choice is forbidden") as error:
        solve(Problem((np.zeros(2), np.zeros(2)), (never,), (Live(0, 0, 1, np.array([5, 5])),), limit=1))
    assert not isinstance(error.value, InfeasibleError)


def test_time_limit():
    start = time.monotonic()
    solution = solve(hard_problem(), time_limit=2)
    assert solution.status == "feasible" and 0 < solution.bound < solution.cost
    assert time.monotonic() - start < 20


@pytest.mark.parametrize("time_limit", [0.0, 0.5])
def test_no_time_at_all(time_limit):
    start = time.monotonic()
    solution = solve(hard_problem(), time_limit=time_limit)
    assert solution.status == "feasible" and solution.bound > 0
    assert time.monotonic() - start < 10


def first_options_fit(problem: Problem) -> Problem:
    """The same problem, in which the first options hold nothing."""
    nothing = tuple(replace(live, usage=np.append(0, live.usage[1:])) for live in problem.lives)
    return replace(problem, lives=nothing)


def test_never_worse_than_first_options():
    problem = first_options_fit(hard_problem())
    simple, _ = verify(problem, [0] * len(problem.costs))
    assert solve(problem, time_limit=0).cost <= simple
    assert solve(problem, time_limit=1).cost < simple


@pytest.mark.parametrize("check", [0, 1, 2, 50, 1000, 3000])
def test_ctrl_c_at_any_check_of_the_clock(monkeypatch, check):
    """Simplifying, bounding, moving: whatever runs, the first options are known from the start."""
    problem, count = first_options_fit(hard_problem(nodes=60)), itertools.count()

    def press(self, original=Clock.check):
        if next(count) == check:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(Clock, "check", press)
    monkeypatch.setattr(integer_program, "cheapest", interrupted)
    solution = solve(problem, time_limit=100, method=bounds_first())
    assert solution.status == "feasible" and solution.cost <= verify(problem, [0] * len(problem.costs))[0]


def bounds_first() -> Method:
    """Bounds and what follows from them, however few options there are."""
    program = IntegerProgram(elimination=Elimination(most_options=0))
    algorithms = OptionBounds(program=program), CompiledSearch(program=program), ForestMoves(), program
    return Method(algorithms, sizes=Sizes(few_options=0, bounded_options=0))


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_ctrl_c_before_any_choice_passes(monkeypatch):
    monkeypatch.setattr(Clock, "check", interrupted)
    with pytest.raises(KeyboardInterrupt):
        solve(hard_problem())


def run_python(code: str) -> subprocess.Popen:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)


PRESS_IN_MOVES = """
def choices(self, *arguments, original=ForestMoves.choices):
    for choice in original(self, *arguments):
        yield choice
        if choice is not None:
            os.kill(os.getpid(), signal.SIGINT)
ForestMoves.choices = choices
"""
PRESS_IN_HIGHS = """
def cheapest(*args, original=integer_program.cheapest, **keywords):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    return original(*args, **keywords)
integer_program.cheapest = cheapest
"""
PRESS_IN_SEARCH = """
def press(progress):
    if progress.stage == "search" and progress.cost < float("inf"):
        os.kill(os.getpid(), signal.SIGINT)
"""
SOLVE = """
start = time.monotonic()
solution = solve({problem}, time_limit=300, progress=press, method=Method(sizes=Sizes({sizes})))
print(solution.status, 0 < solution.bound < solution.cost, time.monotonic() - start < 60, flush=True)
"""


@pytest.mark.parametrize(
    "press, problem, sizes",
    [
        (PRESS_IN_MOVES, "hard_problem(nodes=50)", ""),
        (PRESS_IN_HIGHS, "hard_problem(nodes=50)", ""),
        (PRESS_IN_SEARCH, "large_problem(nodes=1_000)", "compiled_options=0"),
    ],
    ids=["in moves", "in HiGHS", "in compiled code"],
)
def test_ctrl_c_returns_the_best_so_far(press, problem, sizes, compiled):
    imports = (
        "import os, signal, threading, time\n"
        "from problems import hard_problem, large_problem\n"
        "from autoshard.solver import solve\n"
        "from autoshard.solver.exact import integer_program\n"
        "from autoshard.solver.local_search.forest_moves import ForestMoves\n"
        "from autoshard.solver.method import Method\n"
        "from autoshard.solver.settings import Sizes\n"
        "press = None\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # jobs in the background ignore it
    )
    process = run_python(imports + press + SOLVE.format(problem=problem, sizes=sizes))
    assert process.communicate(timeout=300)[0] == "feasible True True\n"
    assert process.returncode == 0


@contextlib.contextmanager
def busy_cores(count: int):
    """Other processes that keep so many cores busy."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.parametrize("nodes, iterations, size", [(40, 40, "large"), (40, 3, "small")])
def test_iterations_do_not_look_at_the_clock(monkeypatch, compiled, nodes, iterations, size):
    """Once at leisure, and once on a busy machine with other threads and a clock that goes a thousand times as fast."""
    short = CompiledSearch(rounds=RoundSettings(entries=3e5, long_entries=6e5))
    algorithms = tuple(short if isinstance(row, CompiledSearch) else row for row in ALGORITHMS)
    method = Method(algorithms, sizes=COMPILED.sizes if size == "large" else Sizes())
    problem = hard_problem(nodes=nodes)
    first = solve(problem, iterations=iterations, seed=1, threads=2, method=method)
    hasty = types.SimpleNamespace(monotonic=lambda: 1000 * time.monotonic())
    for user in (clock, progress, run, highs, integer_program, neighbourhoods):
        monkeypatch.setattr(user, "time", hasty)
    with busy_cores(2):
        assert solve(problem, iterations=iterations, seed=1, threads=3, method=method) == first
    assert first.status == "feasible" and 0 < first.bound < first.cost
    assert ("search" in first.seconds) == (size == "large")
    fewer = solve(problem, iterations=1, seed=1, method=method)
    assert fewer.cost >= first.cost and fewer.bound <= first.bound


ROUGH = 0.05  # the gap with which a choice that is not accepted is left alone


# What labels would solve goes to the integer program.
PROGRAM = Method(algorithms=(ForestMoves(), IntegerProgram(elimination=Elimination(most_options=0))))


def rough_goal(accepts: Callable[[Sequence[int]], bool]) -> Goal:
    return Goal(accepts=accepts, rejected_gap=ROUGH, rejected_share=0.5)


def test_a_choice_that_is_not_accepted_is_left_alone():
    problem = hard_problem(nodes=25, options=4)
    best = solve(problem)
    rough = solve(problem, method=PROGRAM, goal=rough_goal(lambda choice: False))
    assert best.status == "optimal" and 1e-3 < rough.gap <= ROUGH
    goal = rough_goal(lambda choice: verify(problem, choice)[0] < 1.05 * best.cost)
    near = solve(problem, method=PROGRAM, goal=goal)
    assert near.cost == best.cost and near.status == "optimal"


def test_choices_that_are_not_accepted_get_half_of_the_search(monkeypatch):
    count, spent = Clock.count, {True: 0.0, False: 0.0}
    for accepted in spent:

        def counting(self, iterations: float, accepted: bool = accepted) -> None:
            spent[accepted] += iterations
            count(self, iterations)

        monkeypatch.setattr(Clock, "count", counting)
        goal = rough_goal(lambda _, it=accepted: it)
        assert solve(hard_problem(nodes=40), iterations=12, goal=goal).gap > ROUGH
    assert spent[True] >= 12 and 6 <= spent[False] <= spent[True] - 4


def test_how_much_memory_would_do_is_found_when_time_is_up():
    with pytest.raises(InfeasibleError):
        solve(replace(hard_problem(nodes=25, options=4), limit=1), time_limit=0)


def test_a_program_goes_on_from_a_choice_that_is_accepted(monkeypatch):
    """Held to five percent while the best one is not, it ends with one that is."""
    monkeypatch.setattr(ForestMoves, "improve", lambda self, part, run: False)
    problem = hard_problem(nodes=25, options=4)
    problem = replace(
        problem,
        costs=tuple(np.insert(costs, 0, costs.sum() * 100) for costs in problem.costs),
        edges=tuple(replace(edge, costs=np.pad(edge.costs, ((1, 0), (1, 0)))) for edge in problem.edges),
        lives=tuple(replace(live, usage=np.insert(live.usage, 0, 0.0)) for live in problem.lives),
    )
    first = tuple(0 for _ in problem.costs)  # fits, as it holds nothing, and is dear
    goal = rough_goal(lambda choice: choice != first)
    assert solve(problem, method=PROGRAM, goal=goal).status == "optimal"


def test_iterations_end_by_a_time_limit(monkeypatch):
    """As those do of which the first takes HiGHS longer than there is."""
    asked = []

    def endless(problem, first, *, time_limit, look, **keywords):
        asked.append(time_limit)
        return integer_program.Outcome(None, -np.inf, interrupted=False)

    monkeypatch.setattr(integer_program, "cheapest", endless)
    solve(hard_problem(nodes=25, options=4), iterations=1000, time_limit=5, method=PROGRAM)
    assert asked and all(0 <= time_limit <= 5 for time_limit in asked)


def test_two_processes_agree_bit_for_bit():
    code = (
        "from problems import hard_problem, random_problem\n"
        "from autoshard.solver import solve\n"
        "print(solve(hard_problem(nodes=25, options=4)))\n"
        "print(solve(random_problem(20)))\n"
    )
    processes = [run_python(code), run_python(code)]
    first, second = (process.communicate(timeout=300)[0] for process in processes)
    assert first == second and first.count("status='optimal'") == 2


def test_no_choice_in_time_says_what_to_do(monkeypatch):
    monkeypatch.setattr(SolverRun, "solve", lambda *_, **__: None)
    for problem in (hard_problem(), replace(hard_problem(), limit=None).restrict({0: [1]})):
        with pytest.raises(SolverError, match="raise time_limit"):
            solve(problem, time_limit=0.5)
