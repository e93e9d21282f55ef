"""What is passed to public functions is checked: each argument of the wrong kind is an error of autoshard's own."""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

import autoshard
from autoshard import ArgumentError, AutoshardError, Link, Plan, Topology, operation, ops, pipeline, rewrites, solver
from autoshard.errors.kinds import checks_kinds, is_of_kind
from autoshard.solver import Edge, Live, Problem

KINDS = [  # annotation, what is of this kind, what is not
    (float, [1, 1.5, np.float32(2), np.int64(3), float("nan")], [True, "1", None, 1j, np.zeros(2), [1.0]]),
    (int, [1, np.int64(3)], [1.5, True, "1", None]),
    (bool, [True, np.bool_(False)], [0, None, "yes", np.zeros(1)]),
    (str | None, ["a", None], [b"a", 1, Path("a")]),
    (str | Path, ["a", Path("a")], [None, 3]),
    (Literal["auto"] | None, ["auto", None], ["automatic", 1, np.zeros(2), []]),
    (Mapping[str, float], [{}, {"a": 1}], [{1: 2}, {"a": "b"}, [("a", 1)], None]),
    (Sequence[float], [[], (1, 2.0), np.ones(2), range(3)], ["ab", b"ab", {1.0}, ["a"], np.array(1.0), 1.0]),
    (tuple[str, float], [("a", 1)], [("a",), ("a", "b"), "ab", None]),
    (tuple[int, ...], [(1, 2), []], [(1, "a"), 1]),
    (str | Iterable[str], ["a", ["a"], {"a"}, iter("ab")], [1, [1], None]),
    (Callable[..., Any], [print, int], ["print", None]),
    (np.ndarray, [np.ones(2)], [[1.0], 1.0]),
    (Any, [None, object()], []),
]


@pytest.mark.parametrize(
    ("kind", "like", "unlike"), KINDS, ids=lambda one: str(one) if not isinstance(one, list) else ""
)
def test_values_are_of_the_kinds_that_annotations_say(kind, like, unlike):
    assert [is_of_kind(value, kind) for value in like] == [True] * len(like)
    assert [is_of_kind(value, kind) for value in unlike] == [False] * len(unlike)


def test_python_names_arguments_that_are_missing_or_one_too_many():
    @checks_kinds()
    def scaled(*factors: float, by: float = 1.0):
        return [by * factor for factor in factors]

    assert scaled(1, 2, by=3) == [3, 6]
    with pytest.raises(ArgumentError, match="factors='2'; a number is needed"):
        scaled(1, "2")
    with pytest.raises(TypeError, match="unexpected keyword argument 'times'"):
        scaled(1, times=2)


# Every public function, with each of its arguments wrong.

MESH = AbstractMesh((4, 2), ("data", "model"))
W, X = jnp.ones((8, 8)), jnp.ones((16, 8))


def step(w, x):
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    return w - 0.1 * gradient, loss


def loss_of(w, x):
    return jnp.mean(x @ w)


def on_arrays(public):
    """A public function of a step, which gets the step's arrays, too."""
    return lambda fn, **options: public(fn, W, X, **options)


def in_problem(where, kind):
    """A part of a problem, which is checked with the problem."""
    return lambda **fields: Problem(**PROBLEM | {where: (kind(**fields),)})


def in_schedule(**fields):
    """A schedule by hand, which is checked before it runs."""
    given = {name: value for name, value in fields.items() if value is not None}
    pipeline.validate(replace(SCHEDULE["schedule"], **given))


def defaults_of(public, *left_out):
    """Its keywords as they are by default."""
    keywords = [one for one in inspect.signature(public).parameters.values() if one.kind is one.KEYWORD_ONLY]
    return {one.name: one.default for one in keywords if one.name not in left_out}


JIT = {"static_argnums": (), "donate_argnames": (), "keep_unused": False, "compiler_options": None}
STEP = {"fn": step, "mesh": MESH, "kwargs": None}
SCHEDULE = {"schedule": pipeline.schedule("1f1b", 2, 4)}
SECONDS = SCHEDULE | {"forward": 1.0, "backward": 2.0, "weight": 0.0, "transfer": 0.0}
HELD = {"memory": 0.0, "weight_memory": None}
PROBLEM = {"costs": (np.zeros(2), np.ones(2)), "edges": (), "lives": (), "limit": None, "names": ()}
TABLES = ops.EmbeddingTables.of((8, 16), 2)
TOKENS, IMAGES, KERNEL = jnp.ones((1, 4, 2, 4)), jnp.ones((1, 3, 5, 5)), jnp.ones((4, 3, 3, 3))
MACHINE = autoshard.topology("v5e:4x2", {"data": 4, "model": 2})
LINK = {"latency": 1e-6, "bandwidth": 1e9, "torus": False, "ring": False, "shared": False, "wires": None, "parts": ()}
CHIP = {"links": {"x": Link(1e-6, 1e9)}, "memory_bytes": 1e9, "memory_bandwidth": 1e9, "flops": {"float32": 1e12}}
RULE = {"notation": "b i -> b i", "reduction": "", "need_replication": "", "sizes": None}
CALLS = {  # name -> a public function, and arguments that it takes
    "Edge": (in_problem("edges", Edge), {"i": 0, "j": 1, "costs": np.zeros((2, 2))}),
    "EmbeddingTables.apart": (TABLES.apart, {"parts": jnp.ones((2, 16, 4))}),
    "EmbeddingTables.lookup": (TABLES.lookup, {"parts": jnp.ones((2, 16, 4)), "indices": jnp.zeros((3, 2, 1), int)}),
    "EmbeddingTables.of": (ops.EmbeddingTables.of, {"rows": (8, 16), "devices": 2, "costs": None, "most_rows": None}),
    "EmbeddingTables.together": (TABLES.together, {"tables": [jnp.ones((8, 4)), jnp.ones((16, 4))]}),
    "Link": (Link, LINK),
    "Live": (in_problem("lives", Live), {"node": 0, "start": 0, "end": 1, "usage": np.zeros(2)}),
    "Operation.implementation": (
        operation("b i -> b i")(jnp.tanh).implementation,
        {"splits": {"rows": "b"}, "name": None, "where": None, "seconds": None, "bytes": None, "turns": None},
    ),
    "Problem": (Problem, PROBLEM),
    "Problem.read": (Problem.read, {"path": "problem.json"}),
    "Problem.restrict": (Problem(**PROBLEM).restrict, {"allowed": {0: [1]}}),
    "Problem.write": (Problem(**PROBLEM).write, {"path": "problem.json"}),
    "Schedule": (in_schedule, {name: None for name in vars(SCHEDULE["schedule"]) if name not in ("name", "updates")}),
    "Topology": (Topology, CHIP | {"host_bandwidth": None, "cache": None, "uneven": (), "machine": None}),
    "Topology.check": (MACHINE.check, {"mesh_shape": {"data": 4}}),
    "Topology.load": (Topology.load, {"path": "topology.json"}),
    "Topology.measure": (Topology.measure, {"mesh": None, "path": None, "progress": False}),
    "Topology.of": (Topology.of, {"mesh": MESH}),
    "Topology.save": (MACHINE.save, {"path": "topology.json"}),
    "Topology.with_positions": (MACHINE.with_positions, {"axis": "data", "speeds": (1, 1, 1, 0.5), "memories": ()}),
    "attention": (
        ops.attention,
        dict.fromkeys(("query", "key", "value"), TOKENS) | defaults_of(ops.attention) | {"bias": None, "mask": None},
    ),
    "autoshard": (autoshard.autoshard, {**STEP, **defaults_of(autoshard.autoshard), **JIT, "mesh": MESH, "fn": step}),
    "conv": (ops.conv, {"lhs": IMAGES, "rhs": KERNEL, "window_strides": None, "padding": "SAME", "lhs_dilation": None}),
    "evaluate": (
        on_arrays(autoshard.evaluate),
        {**defaults_of(autoshard.evaluate), **STEP, "in_shardings": (None, None)},
    ),
    "fewest_devices": (
        on_arrays(autoshard.fewest_devices),
        {"fn": step, **defaults_of(autoshard.fewest_devices), "chip": "v5e", "most": 1},
    ),
    "fft": (ops.fft, {"x": X, "axes": -1, "inverse": False, "real": False, "length": None}),
    "frontier": (on_arrays(autoshard.frontier), {**defaults_of(autoshard.frontier), **STEP, "points": 2}),
    "largest_batch": (on_arrays(autoshard.largest_batch), {**defaults_of(autoshard.largest_batch), **STEP, "most": 16}),
    "makespan_bound": (pipeline.makespan_bound, SECONDS),
    "matmul": (ops.matmul, {"lhs": X, "rhs": W}),
    "operation": (operation, RULE | {"name": None, "seconds": None}),
    "plan": (on_arrays(autoshard.plan), {**defaults_of(autoshard.plan), **STEP, **JIT}),
    "plan_together": (
        autoshard.plan_together,
        {"functions": {"a": (step, (W, X)), "b": (loss_of, (W, X))}, "mesh": MESH, "weights": None},
    ),
    "propagate": (on_arrays(autoshard.propagate), {**STEP, "in_specs": (None, None)}),
    "ragged_dot": (ops.ragged_dot, {"lhs": X, "rhs": jnp.ones((2, 8, 8)), "group_sizes": jnp.array([8, 8])}),
    "register": (rewrites.register, {"name": "mine", "law": "a + b = b + a"}),
    "register_rule": (autoshard.register_rule, RULE | {"primitive": "test_kinds", "permutation": ""}),
    "schedule": (pipeline.schedule, {"name": "1f1b", "stages": 2, "microbatches": 4, **defaults_of(pipeline.schedule)}),
    "search": (pipeline.search, SECONDS | HELD | {"peak_limit": None, "moves": 0, "time_limit": 1.0, "seed": 0}),
    "simulate": (pipeline.simulate, SECONDS | HELD | {"overlap": None}),
    "solve": (
        solver.solve,
        {"problem": Problem(**PROBLEM), **dict.fromkeys(("time_limit", "iterations", "threads", "progress", "search"))},
    ),
    "staleness": (pipeline.staleness, SCHEDULE),
    "topology": (autoshard.topology, {"name": "v5e:4x2", "axes": None, "speeds": None, "memories": None}),
    "validate": (pipeline.validate, SCHEDULE),
    "verify": (on_arrays(autoshard.verify), {"fn": jax.jit(step), "mesh": None, "kwargs": None}),
}
PLAN_CALLS = {  # of a method of a plan
    "abstract": {"argnum": 0},
    "assert_same": {"path": "plan.json"},
    "diff": {"other": None},
    "explain": {"path": "w"},
    "init": {"init_fn": None},
    "load": {"path": "plan.json", "mesh": MESH},
    "loads": {"text": "{}", "mesh": MESH},
    "on": {"mesh": MESH},
    "save": {"path": "plan.json"},
    "shard_batch": {"batch": None},
    "show": {"path": None},
    "to_code": {"style": "specs"},
    "verify": {"target": None},
    "what_if": defaults_of(Plan.what_if),
}
WRONG = object()


@pytest.fixture(scope="module")
def plan():
    return autoshard.plan(step, W, X, mesh=MESH)


def assert_refused(call, arguments):
    """Each argument that is wrong is an error of autoshard's own, which says more than a word."""
    for name in arguments:
        with pytest.raises(AutoshardError) as refused:
            call(**arguments | {name: WRONG})
        assert len(str(refused.value)) > 20, (name, refused.value)


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_public_functions_are_checked(name):
    assert_refused(*CALLS[name])


@pytest.mark.parametrize("name", PLAN_CALLS)
def test_arguments_of_plans_are_checked(name, plan):
    assert_refused(getattr(plan, name), PLAN_CALLS[name])


def test_the_oracle_sees_what_is_taken_silently_and_other_errors():
    for loose in (lambda path: None, lambda path: Path(path)):
        with pytest.raises((pytest.fail.Exception, TypeError)):
            assert_refused(loose, {"path": "a"})


# What users read, and do not make.
RESULTS = {"CacheWarning", "Collective", "Difference", "Explanation", "Frontier", "MemoryWarning", "Plan"}
RESULTS |= {"BodyGraph", "ForbiddenError", "InfeasibleError", "Match", "Operand", "Product", "Rewrite", "contracted"}
RESULTS |= {"EmbeddingTables", "Prediction", "Propagation", "UnknownPrimitiveWarning"}
RESULTS |= {"Eviction", "Schedule", "SearchResult", "Staleness", "Task", "Timeline", "WeightUpdates"}
RESULTS |= {"Progress", "SearchRun", "Solution"}


def test_every_public_function_is_among_these():
    public = {
        name: getattr(room, name) for room in (autoshard, ops, pipeline, rewrites, solver) for name in room.__all__
    }
    made = {name for name, one in public.items() if callable(one) and not is_error(one)}
    assert made - CALLS.keys() - RESULTS == set()


def is_error(one):
    return isinstance(one, type) and issubclass(one, AutoshardError)
