"""The time limit holds for all programs of a pipeline together."""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from autoshard import autoshard
from autoshard import options as deadlines
from autoshard.stages import planning

LIMIT = 60.0
ARGUMENTS = [jax.ShapeDtypeStruct((rows, 8), "float32") for rows in (8, 8, 16)]


def step(up, down, x):
    return jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2))((up, down))


@pytest.mark.parametrize("search", ["flexflow", None])
def test_programs_share_the_time_limit(monkeypatch, search):
    """On a clock that only planning moves: each program takes all of the seconds that it is given."""
    now, given, made = [0.0], [], planning.planned

    def planned(program, options, *rest):
        given.append(options.time_limit)
        now[0] += options.time_limit
        return made(program, replace(options, search=None), *rest)

    monkeypatch.setattr(planning, "planned", planned)
    for one in (planning, deadlines):
        monkeypatch.setattr(one, "time", SimpleNamespace(monotonic=lambda: now[0]))
    mesh = AbstractMesh((2, 2), ("stage", "data"))
    options = {"pipeline": {"stages": 2, "microbatches": 2}, "search": search, "time_limit": LIMIT}
    autoshard(step, mesh=mesh, topology="v5e:2x2", **options).plan(*ARGUMENTS)
    assert math.fsum(given) <= LIMIT + 1e-6
    assert min(given) > 0 and (search is None or max(given) < 3 * min(given))
