"""A program that stands for those of like stages is written as each of them would be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import cuttable
from pipeline_steps import ROWS, STEPS, WIDTH, layer, numbers, weights_of_layer

from autoshard.jaxprs import Literal
from autoshard.microbatches import forms
from autoshard.microbatches.forms import form_of
from autoshard.stages.building import Builder
from autoshard.stages.cutting import cut


def chain(layers):
    """A step of gradient descent on these layers, of one shape each, which the stages get one of."""

    def loss(weights, batch):
        x = batch["x"]
        for weight, one in zip(weights, layers, strict=True):
            x = one(weight, x)
        return jnp.mean((x - batch["y"]) ** 2)

    def step(weights, batch):
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    weights = [weights_of_layer(10 * i) for i in range(len(layers))]
    return step, (weights, {"x": numbers(50, ROWS, WIDTH), "y": numbers(51, ROWS, WIDTH)})


def scaled(factor):
    return lambda weight, x: layer(weight, x) * factor


def with_other_numbers():
    return chain([scaled(factor) for factor in (1.5, 2.0, 2.5, 3.0)])


def at_other_lines():
    def double(weight, x):
        return layer(weight, x) * 2.0

    return chain([scaled(2.0), scaled(2.0), double, double])


MADE = {name: STEPS[name] for name in ("masked with dropout", "scanned")} | {
    "with other numbers": with_other_numbers,
    "at other lines": at_other_lines,
}


def programs_of(step):
    units = step.units(4)
    return cut(step, units.boundaries(units.balanced(4)), weight_programs=True).programs


def unlike(monkeypatch, step):
    """Programs that are written otherwise where each is traced by itself; and how many stand for others."""
    shared, alone = programs_of(step), Builder.program
    with monkeypatch.context() as patched:
        own = lambda self, kind, stage, run, form, *ends: alone(self, kind, stage, run, (object(),), *ends)  # noqa: E731
        patched.setattr(Builder, "program", own)
        apart = programs_of(step)
    written = [
        [(one.name, one.inputs, one.outputs, one.jaxpr.pretty_print(source_info=True)) for one in some]
        for some in (shared, apart)
    ]
    differ = [first[0] for first, second in zip(*written, strict=True) if first != second]
    return differ, len(shared) - len({id(one.jaxpr) for one in shared})


@pytest.mark.parametrize("name", MADE)
def test_programs_that_stand_for_others_are_what_these_would_be(name, monkeypatch):
    step, args = MADE[name]()
    differ, others = unlike(monkeypatch, cuttable(step, args, 2))
    assert not differ
    if name == "scanned":
        assert others >= 4, "of the stages between the first and the last one stands for both"


number_of = forms.VariableNumbers.__call__
FAULTS = {
    "with other numbers": (
        forms.VariableNumbers,
        "__call__",
        lambda self, atom: "a number" if isinstance(atom, Literal) else number_of(self, atom),
    ),
    "at other lines": (forms, "_line", lambda eqn: ()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name, monkeypatch):
    step, args = MADE[name]()
    with monkeypatch.context() as patched:
        patched.setattr(*FAULTS[name])
        assert unlike(monkeypatch, cuttable(step, args, 2))[0]


def test_forms_tell_numbers_and_bodies_of_loops_apart():
    def looped(times, number):
        return jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c * number, None), x, length=times)[0])(1.0)

    assert form_of(looped(3, 2.0)) == form_of(looped(3, 2.0))
    assert len({form_of(one) for one in (looped(3, 2.0), looped(4, 2.0), looped(3, 2.5))}) == 3


def test_parameters_that_only_compare_equal_have_forms_of_their_own():
    assert len({forms._same(one) for one in (1, True, 1.0, np.float32(1), (1,), -0.0, 0.0)}) == 7
