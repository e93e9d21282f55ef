"""Every collective of a compiled step has the user's line, those of arguments, loops and results included."""

import contextlib
import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from oracles import SMALL, mesh_of, slow_chips

import autoshard
from autoshard.compiled.collectives import read_collectives

SHAPE = {"x": 8}
HERE = "test_attribution.py:"


def layers(state, x):
    """Layers over which a loop goes; the gradient of their weights is summed, and momentum is moved for its result."""
    weights, momentum = state

    def loss(weights):
        out, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)
        return jnp.mean(lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[1] @ weights[0]), (0, out))[1] ** 2)

    gradient = lax.stop_gradient(loss(weights)) * weights
    return (weights - gradient, momentum + gradient), momentum.sum(-1)


STATE = (jax.ShapeDtypeStruct((2, 64, 64), jnp.float32),) * 2
BATCH = jax.ShapeDtypeStruct((64, 64), jnp.float32)
SHARDINGS = {  # of weights, momentum and batch
    "weights and batch split": (P(None, "x"), P(None, "x"), P("x")),
    "weights split otherwise": (P(None, None, "x"), P(None, "x"), P("x")),
    "batch split by features": (P(None, "x"), P(None, None, "x"), P(None, "x")),
}


def assert_named(step, *args, **options):
    made = autoshard.plan(step, *args, mesh=mesh_of(SHAPE), topology=slow_chips(SHAPE), **options)
    found = made.verify().collectives
    assert found
    assert {one.source for one in found if not one.source.startswith(HERE)} == set()
    return found


@pytest.mark.parametrize("case", SHARDINGS)
def test_collectives_have_the_users_lines(case):
    weights, momentum, batch = SHARDINGS[case]
    assert_named(layers, STATE, BATCH, donate_argnums=0, fixed={"state/0": weights, "state/1": momentum, "x": batch})


def product(w, x):
    return jnp.tanh(x @ w)


def assert_gather_is_named():
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    (found,) = assert_named(product, w, BATCH, fixed={"w": P("x"), "x": P("x")})
    assert (found.kind, found.why) == ("all_gather", "w for dot_general")


def test_gathered_arguments_are_named():
    assert_gather_is_named()


def assert_border_is_named():
    """What a scan makes by rows and hands on whole: the border of the loop gathers."""
    turn = lambda h, _: (jnp.tanh(h), None)  # noqa: E731
    step = lambda state, x: (state + lax.scan(turn, x, length=3)[0],)  # noqa: E731
    assert_named(step, BATCH, BATCH, donate_argnums=0, fixed={"state": P(), "x": P("x")})


def test_what_crosses_the_border_of_a_loop_is_named():
    assert_border_is_named()


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="XLA itself names such a gather after the loop")
def test_borders_without_names_are_caught(monkeypatch):
    monkeypatch.setattr("autoshard.lower.emitter.named_after", lambda equation: contextlib.nullcontext())
    with pytest.raises(AssertionError):
        assert_border_is_named()


def test_arguments_without_names_are_caught(monkeypatch):
    monkeypatch.setattr("autoshard.compiled.verification._argument_of", lambda name, program: None)
    with pytest.raises(AssertionError):
        assert_gather_is_named()


def unnamed_constraints(model: str) -> list[str]:
    """The constraints of a lowered step that say no line, though every inner value has one."""
    made = SMALL[model]()
    options = {"mesh": mesh_of({"x": 4, "y": 2}), "topology": slow_chips("xy"), "donate_argnums": 0, "time_limit": 2}
    plan = autoshard.plan(made.step, made.state, made.batches(0), **options)
    told = dataclasses.replace(plan, annotations=dataclasses.replace(plan.annotations, implied=()))
    text = dataclasses.replace(plan.lowering, plan=told)().as_text(debug_info=True)
    names = dict(re.findall(r"^(#loc\d+) = loc\((.*)\)$", text, re.MULTILINE))
    constraints = re.findall(r"sdy\.sharding_constraint.*loc\((#loc\d+)\)", text)
    assert len(constraints) > 20
    return [names[one] for one in constraints if not re.search(r"\.py:\d+#|arguments\[", names[one])]


def test_every_constraint_has_a_line():
    assert unnamed_constraints("gpt remat") == []


def test_constraints_behind_barriers_without_lines_are_caught(monkeypatch):
    monkeypatch.setattr("autoshard.lower.emitter.reader_in", lambda *of: None)
    assert unnamed_constraints("gpt remat")


JOINED = """HloModule step, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %both = f32[] add(%a, %b)
}

ENTRY %main (p: f32[8], q: f32[]) -> (f32[8], f32[]) {
  %p = f32[8] parameter(0)
  %q = f32[] parameter(1)
  %copied = f32[8] copy(%p)
  %total = f32[] negate(%q)METADATA
  ROOT %joined = (f32[8], f32[]) all-reduce(%copied, %total), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""


@pytest.mark.parametrize(
    "metadata, line", [(', metadata={op_name="jit(run)/train.py:9#4/reduce_sum"}', "train.py:9"), ("", "unknown line")]
)
def test_all_reduces_that_xla_joins_have_the_line_of_what_they_sum(metadata, line):
    (found,) = read_collectives(JOINED.replace("METADATA", metadata), SHAPE)
    assert (found.source, found.bytes) == (line, 36)
