"""What every primitive's programs need is known of every machine: none ends in an error that is not ours."""

import jax
import jax.numpy as jnp
import pytest
from cases import CASES
from executed import gradient_of
from jax.sharding import AbstractMesh
from oracles import mesh_of

from autoshard import autoshard, plan
from autoshard.errors import AutoshardError
from autoshard.model.xla import sums

MACHINES = ("v5e:2x4", "v5p:2x2x2", "h100:1x8")
PARTS = 2  # into which programs are dealt, so that they are planned side by side
TOGETHER = 8  # programs that are planned as one step


def programs_for(machine):
    """The first case of each primitive for a TPU and for the GPU; its other cases and its gradient for one machine.

    Both TPUs have one compiler, so primitives are dealt out between them.
    """
    number, seen, found, first = MACHINES.index(machine), set(), [], []
    for k, case in enumerate(CASES):
        is_first = case.primitive not in seen
        seen.add(case.primitive)
        first += [case] * is_first
        on_tpu = MACHINES[len(seen) % 2]
        if machine in (on_tpu, "h100:1x8") if is_first else k % len(MACHINES) == number:
            found.append(case)
    return [*found, *filter(None, map(gradient_of, first[number :: len(MACHINES)]))]


def faults(machine, programs):
    """The programs that no plan is found of, by an error that is not ours."""
    found = []
    for case in programs:
        try:
            planned_together([case], machine)
        except AutoshardError:
            continue
        except Exception as error:
            found.append((case.name, repr(error)))
    return found


def planned_together(programs, machine):
    """The plan of the step that runs all of these programs, each on arguments of its own."""
    shapes = [[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in case.args] for case in programs]

    def every(given):
        return [case.fn(*args) for case, args in zip(programs, given, strict=True)]

    return plan(every, shapes, mesh=AbstractMesh((4, 2), ("x", "y")), topology=machine)


def faults_of_many(machine, programs):
    """The same, a few programs at a time; where there is no plan of these, each by itself."""
    found = []
    for start in range(0, len(programs), TOGETHER):
        some = programs[start : start + TOGETHER]
        try:
            planned_together(some, machine)
        except Exception:
            found += faults(machine, some)
    return found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("machine", MACHINES)
def test_every_program_is_planned(machine, part):
    assert not faults_of_many(machine, programs_for(machine)[part::PARTS])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("machine", MACHINES)
def test_all_programs_are_planned(machine):
    assert not faults(machine, [*CASES, *filter(None, map(gradient_of, CASES))])


def test_equations_without_results_are_caught(monkeypatch):
    """Prints had no plan on TPU and GPU once, since a question about equations took them all to make something."""
    (printed,) = (case for case in CASES if case.name == "debug_print")
    several = [*CASES[:3], printed]
    assert not faults_of_many("v5e:2x4", several)
    monkeypatch.setattr(sums, "_only_reorders", lambda equation: equation.outputs[0].shape == ())
    assert [name for name, _ in faults_of_many("v5e:2x4", several)] == ["debug_print"]


def by_number_and_integer(x, n):
    """The gradient, and the derivative by integers, which is of a dtype that has no values."""
    return jax.vjp(lambda x, n: jnp.where(n > 2, x, 0.0).sum(), x, n)[1](jnp.float32(1))


@pytest.mark.parametrize("machine", MACHINES)
def test_derivatives_by_integers_are_planned(machine):
    shapes = jax.ShapeDtypeStruct((64,), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    made = plan(by_number_and_integer, *shapes, mesh=AbstractMesh((8,), ("x",)), topology=machine)
    assert made.status == "optimal" and made.predicted.step_seconds > 0


def test_derivatives_by_integers_are_those_of_one_device():
    args = jnp.ones(64), jnp.arange(64)
    found, expected = autoshard(by_number_and_integer, mesh=mesh_of({"x": 8}))(*args), by_number_and_integer(*args)
    assert found[1].dtype == expected[1].dtype == jax.dtypes.float0 and found[1].shape == (64,)
    assert (found[0] == expected[0]).all()
