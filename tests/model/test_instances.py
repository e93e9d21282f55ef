"""The planner's problems as contest files: they say the same as the problems do, and the page says what they are."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from programs import f32, formulated, round_topology
from sweeps import some

from autoshard.model.search_policy import CLOSE_GAP, solve_for_plan
from autoshard.solver import Problem, solve

FOLDER = Path(__file__).parents[2] / "benchmarks" / "instances"
PAGE = (FOLDER / "README.md").read_text()
ROW = r"^\| (\S+\.json\.gz) \|.*?\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (.*) \|$"
ROWS = re.findall(ROW, PAGE, re.M)
LARGEST = "moe-slices-tight.json.gz"


def step(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return [w + x.sum() for w in weights], x.sum()


@pytest.mark.parametrize("share", [2.0, 0.5, 0.3])
def test_a_problem_and_its_file_have_one_optimum(tmp_path, share):
    arguments = [f32(64, 64)] * 3, f32(32, 64)
    free = formulated(step, *arguments, mesh={"x": 2, "y": 2}, topology=round_topology("x", "y"), donate=(0,)).problem
    held = sum(live.usage.max() for live in free.lives if live.start == 0)
    problem = replace(free, limit=share * held)
    problem.write(tmp_path / "step.json.gz")
    again = Problem.read(tmp_path / "step.json.gz")
    expected, found = solve(problem), solve(again)
    assert expected.status == found.status == "optimal"
    assert found.cost == pytest.approx(expected.cost, rel=2e-6)
    assert problem.names == again.names[: len(problem.names)]


def test_the_page_lists_the_files():
    assert sorted(name for name, *_ in ROWS) == sorted(path.name for path in FOLDER.glob("*.json*"))


@pytest.mark.parametrize(
    "name, nodes, options, edges, limit, cost, bound", some(ROWS, *(row for row in ROWS if row[0] != LARGEST))
)
def test_what_the_page_says(name, nodes, options, edges, limit, cost, bound):
    problem = Problem.read(FOLDER / name)
    sizes = len(problem.costs), sum(map(len, problem.costs)), len(problem.edges), problem.limit
    assert sizes == (int(nodes), int(options), int(edges), int(limit))
    assert bound == "the same" or int(bound) < int(cost)
    numbers = [*problem.costs, *(edge.costs for edge in problem.edges), *(live.usage for live in problem.lives)]
    assert all((np.isinf(table) | (table == np.floor(table))).all() for table in numbers)


def test_the_smallest_is_solved_as_the_page_says():
    name, *_, cost, bound = min((row for row in ROWS if row[-1] == "the same"), key=lambda row: int(row[2]))
    solution = solve(Problem.read(FOLDER / name))
    assert (solution.status, f"{solution.cost:.0f}", bound) == ("optimal", cost, "the same")


WITHIN = ["gpt-scan-remat-gpu", "lstm-tpu", "moe-tpu-tight", "unet-gpu", "vit-gpu-tight"]


@pytest.mark.parametrize("name", some(WITHIN, *(name for name in WITHIN if name != "moe-tpu-tight")))
def test_the_planner_is_within_a_percent_of_what_the_page_says(name):
    cost, bound = next((float(row[5]), row[6]) for row in ROWS if row[0] == f"{name}.json.gz")
    solution = solve_for_plan(Problem.read(FOLDER / f"{name}.json.gz"))
    least = cost if bound == "the same" else float(bound)
    assert solution.gap <= CLOSE_GAP
    assert solution.bound <= cost * (1 + 1e-6)
    assert least * (1 - 1e-6) <= solution.cost <= cost * (1 + CLOSE_GAP)
