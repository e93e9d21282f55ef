"""A program that stands for those of like stages is written as each of them would be."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from one_device import cuttable
from pipeline_steps import ROWS, STEPS, WIDTH, layer, numbers, weights_of_layer

from autoshard.jaxprs import Literal
from autoshard.microbatches import canonical_forms, proof
from autoshard.microbatches.canonical_forms import form_of
from autoshard.stages.building import Builder
from autoshard.stages.cutting import cut
from autoshard.stages.stacks import taken_apart


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


number_of = canonical_forms.VariableNumbers.__call__
FAULTS = {
    "with other numbers": (
        canonical_forms.VariableNumbers,
        "__call__",
        lambda self, atom: "a number" if isinstance(atom, Literal) else number_of(self, atom),
    ),
    "at other lines": (canonical_forms, "_line", lambda eqn: ()),
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
    assert len({canonical_forms._same(one) for one in (1, True, 1.0, np.float32(1), (1,), -0.0, 0.0)}) == 7


def scan_with_dropout():
    def loss(weights, batch):
        def body(x, one):
            weight, key = one
            x = layer(weight, x)
            return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0), None

        x, _ = jax.lax.scan(body, batch["x"], (weights, jax.random.split(jax.random.key(0), 4)))
        return jnp.mean((x - batch["y"]) ** 2)

    def step(weights, batch):
        value, gradients = jax.value_and_grad(loss)(weights, batch)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value

    weights = jax.tree.map(lambda *leaves: np.stack(leaves), *(weights_of_layer(10 * i) for i in range(4)))
    return step, (weights, {"x": numbers(50, ROWS, WIDTH), "y": numbers(51, ROWS, WIDTH)})


def walked_and_proven(monkeypatch, step, *, by_object):
    """The bodies of loops that are walked, and the proof of a step whose loops are taken apart."""
    units, walked, body = step.units(4), [], proof._ProofWalk.body
    starts = [boundary.trip for boundary in units.boundaries(units.balanced(4))]
    bounds = dict.fromkeys(step.roles.stacks, (0, *starts, 4))
    whole, part = (taken_apart(one, bounds).closed for one in (step.whole, step.part))
    with monkeypatch.context() as patched:
        patched.setattr(proof._ProofWalk, "body", lambda *args: walked.append(args[-1]) or body(*args))
        if not by_object:
            count = itertools.count()
            patched.setattr(proof, "id", lambda _: next(count), raising=False)
        found = proof.proof(whole, part, step.split)
    variables = {
        var: i for i, var in enumerate((*whole.jaxpr.invars, *(v for e in whole.jaxpr.eqns for v in e.outvars)))
    }
    relations = {variables[var]: relation for var, relation in found.relations.items()}
    return len(walked), (relations, found.places, found.drawn, found.touched, found.counted)


def test_scans_of_one_body_are_proven_once(monkeypatch):
    step = cuttable(*scan_with_dropout(), 2)
    once, found = walked_and_proven(monkeypatch, step, by_object=True)
    often, expected = walked_and_proven(monkeypatch, step, by_object=False)
    assert found == expected and len({path[0] for path in found[2]}) >= 4, "each part of the loop draws"
    assert once < often / 2
