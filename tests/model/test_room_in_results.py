"""Temporaries in the buffers of results: no row that is made for them forbids a choice that fits."""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import f32, formulated, random_choices, round_topology

from autoshard.model import memory_limit
from autoshard.model.formulation import Formulation
from autoshard.model.heap.room_in_results import RoomCut, RoomInResults
from autoshard.model.memory_limit import solve_within
from autoshard.model.xla.backends import CPU
from autoshard.solver.problem import InfeasibleError
from autoshard.solver.verify import fits, verify

SECONDS, FREE_SHARE = 10.0, 0.7


def heads(w, x):
    hidden = jnp.tanh(x @ w)
    return [jnp.sin(hidden) @ w, jnp.cos(jnp.sin(x) @ w), hidden.sum()]


def gradients(w, x):
    return jax.grad(lambda w: (jnp.tanh(x @ w["a"]) @ w["b"] ** 2).sum())(w)


def updated(w, x):
    return jax.tree.map(lambda w, g: w - 0.1 * g, w, gradients(w, x))


WEIGHTS = {"a": f32(32, 32), "b": f32(32, 32)}
STEPS = {
    "results": (heads, (f32(32, 32), f32(64, 32))),
    "gradients": (gradients, (WEIGHTS, f32(64, 32))),
    "updated": (updated, (WEIGHTS, f32(64, 32))),
}


@functools.cache
def formulation_of(name: str) -> Formulation:
    """A step that donates nothing."""
    step, args = STEPS[name]
    plane = {"x": 4, "y": 2}
    return formulated(step, *args, mesh=plane, topology=round_topology("x", "y"), memory=1e9, donate=(), backend=CPU)


def within(formulation: Formulation, limit: float) -> Formulation:
    """The same with so many bytes allowed to be in use."""
    return replace(formulation, problem=replace(formulation.problem, limit=limit / CPU.usable))


def held_by(formulation: Formulation, choice) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of all lives, and of those that do not lie in results, per program point."""
    held = formulation._sum(formulation.problem.lives, choice)
    return held, held - formulation._sum(formulation.heap.room_in_results.lying(choice), choice)


def assert_no_choice_is_forbidden(name: str) -> None:
    """Whatever the cuts, a choice that fits is within the limit of the relaxed problem."""
    formulation, rng = formulation_of(name), np.random.default_rng(0)
    room, points = formulation.heap.room_in_results, len(formulation.program.equations)
    sizes = np.unique(np.concatenate([live.usage for live in room.temporaries]))
    for choice in random_choices(formulation, 40):
        held, accepted = held_by(formulation, choice)
        problem = replace(formulation.problem, limit=float(accepted.max()))
        cuts = [
            RoomCut(int(rng.integers(points)), *sorted(rng.choice(sizes, 2).tolist()), int(rng.integers(1 << points)))
            for _ in range(6)
        ]
        cuts += room.cuts(choice, held, accepted, 0.0)
        _, peak = verify(room.relaxed(problem, cuts), choice)
        assert fits(peak, problem.limit)


@pytest.mark.parametrize("name", STEPS)
def test_no_cut_forbids_what_fits(name):
    assert_no_choice_is_forbidden(name)


@pytest.mark.parametrize("part", ["relaxed", "_row"])
def test_results_without_room_are_caught(part, monkeypatch):
    real = getattr(RoomInResults, part)
    monkeypatch.setattr(RoomInResults, part, lambda self, *given: real(replace(self, results=[]), *given))
    with pytest.raises(AssertionError):
        assert_no_choice_is_forbidden("results")


def test_cuts_forbid_most_of_what_does_not_fit():
    formulation, cut, allowed = formulation_of("results"), 0, 0
    room = formulation.heap.room_in_results
    for choice in random_choices(formulation, 100):
        held, accepted = held_by(formulation, choice)
        problem = replace(formulation.problem, limit=0.98 * float(accepted.max()))
        if fits(verify(room.relaxed(problem, ()), choice)[1], problem.limit):
            cuts = room.cuts(choice, held, accepted, problem.limit)
            allowed += 1
            cut += not fits(verify(room.relaxed(problem, cuts), choice)[1], problem.limit)
    assert allowed > 20 and cut > 0.8 * allowed


@functools.cache
def few_options(name: str) -> Formulation:
    """Up to three options for most nodes, and one for the others, so that every choice can be tried."""
    formulation, rng = formulation_of(name), np.random.default_rng(0)
    drawn = zip(*random_choices(formulation, 3), strict=True)
    allowed = {node: options if rng.random() < FREE_SHARE else options[:1] for node, options in enumerate(drawn)}
    return replace(formulation, problem=formulation.problem.restrict(allowed))


@functools.cache
def every_choice(name: str) -> list[tuple[float, int]]:
    """Cost and accepted peak of every choice that is allowed."""
    formulation = within(few_options(name), 1.0)  # results are large beside it
    problem = replace(formulation.problem, lives=(), limit=None)
    choices = itertools.product(*(np.flatnonzero(np.isfinite(costs)).tolist() for costs in problem.costs))
    found = ((verify(problem, choice)[0], choice) for choice in choices)
    return [(cost, formulation.accepted_peak(choice)) for cost, choice in found if np.isfinite(cost)]


def assert_best_is_found(name: str) -> None:
    every = every_choice(name)
    peaks = [peak for _, peak in every]
    for limit in np.geomspace(1.001 * min(peaks), max(peaks), 6):
        best = min(cost for cost, peak in every if peak <= limit)
        try:
            found = solve_within(within(few_options(name), limit), SECONDS)
        except InfeasibleError:
            raise AssertionError(f"nothing was found within {limit}") from None
        assert found.bound <= best * (1 + 1e-9)
        assert best * (1 - 1e-9) <= found.cost <= best * (1 + 2 * memory_limit.CLOSE_COUNTED_GAP)


@pytest.mark.parametrize("name", STEPS)
def test_what_is_found_is_the_best_that_fits(name):
    assert_best_is_found(name)
