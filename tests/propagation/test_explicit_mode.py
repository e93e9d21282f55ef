"""Propagation against JAX's explicit-sharding mode, which has the sharding of every value in its type.

One way only: what explicit mode puts on a result, propagation has to put there too. It passes from operands to results
and refuses what is ambiguous to it; the specs that it refuses are left out, and counted.
"""

import functools
from dataclasses import replace

import jax
import numpy as np
import pytest
import shardy
from cases import CASES
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from sweeps import by_primitive

from autoshard.layout import layout_of
from autoshard.program import trace
from autoshard.propagation import propagate_layouts, rules_for

pytestmark = pytest.mark.filterwarnings("ignore::autoshard.propagation.UnknownPrimitiveWarning")

MESH = {"x": 4, "y": 2}
EXPLICIT = AbstractMesh(tuple(MESH.values()), tuple(MESH), axis_types=(AxisType.Explicit,) * len(MESH))
TRIES = 6

# Why propagation leaves out what explicit mode has: reason -> cases.
FEWER = {
    "the gradient has the type of its argument, as if by a constraint": (
        "dot_general, gradient", "remat2, gradient", "remat2, gradient with a policy", "scan, gradient",
        "scan, gradient over weights",
    ),
    "ones_like(x) has the type of x, as if by a constraint": ("while, forward derivative",),
    "one generator makes the numbers one after the other, so that its key stays whole": ("rng_bit_generator",),
    "the result has the type of one operand, whatever the others': propagation weighs them": (
        "clamp", "reduce, of several", "select_and_scatter", "shard_alike", "spsolve",
    ),
    "dims are merged though a minor one is split and the major one not to its end: every element would move": (
        "reshape, flat", "reshape, merge", "threefry2x32",
    ),
    "what is left of a sliced dim is split again, which moves elements": (
        "dynamic_slice", "dynamic_slice, two dims", "dynamic_slice, gradient",
    ),
    "the rows of the matrix are those of the result, but no device can solve for some rows alone": (
        "triangular_solve", "triangular_solve, from the right", "triangular_solve, transposed",
    ),
    "kept whole, as what nobody looks into; in new releases a custom_root too": (
        "compute_on", "core_map", "custom_fusion", "einshape_lo", "fusible", "pallas_call, vmapped", "program_order",
        "run_state", "sin, custom_root", "sin, fusible", "sin, gradient of custom_root",
    ),
    "a reference is kept whole: a layout belongs to a value, and a reference has many": ("get", "new_ref", "swap"),
    "of the windows and the taps of a dim, Shardy lets the more numerous follow the images": (
        "conv_general_dilated, patches", "conv_general_dilated, gradients of patches",
    ),
    "the major part of the batch is a group of channels of the result, and a split stays with it": (
        "conv_general_dilated, batch groups",
    ),
}  # fmt: skip

# Why propagation has more than explicit mode.
MORE = {
    "what splits one operand, or a result, goes on to the other operands and so to results": (
        "custom_linear_solve, conjugate gradients", "dot_general, attention", "dot_general, batch",
        "dot_general, batch of transposed operands", "dot_general, einsum", "dot_general, gradient",
        "dot_general, grouped attention", "reduce, of several", "scan", "scan, gradient", "scan, gradient over weights",
        "scan, over weights", "scan, vmapped", "scatter-add, gradient", "select_and_scatter", "shard_alike",
        "while, with constants",
    ),
    "explicit mode knows nothing of this primitive and has its results whole": ("random_gamma",),
    "both are split, but not alike, for the reason in FEWER": (
        "clamp", "conv_general_dilated, batch groups", "conv_general_dilated, gradients of patches",
    ),
}  # fmt: skip

NAMED = {case.name: case for case in CASES}
IN_FEWER = {name for names in FEWER.values() for name in names}
IN_MORE = {name for names in MORE.values() for name in names}

# Where the two differ, Shardy has what propagation has, but for:
UNLIKE_SHARDY = {
    "what is kept whole is lowered to operations that Shardy sees": (
        "compute_on", "core_map", "custom_fusion", "einshape_lo", "fusible", "get", "new_ref", "program_order",
        "run_state", "sin, custom_root", "sin, fusible", "sin, gradient of custom_root", "swap",
    ),
    "Shardy cannot be asked": ("random_gamma", "spsolve"),
    "which of two conflicting operands wins": ("select_and_scatter", "shard_alike"),
    "Shardy leaves the carry of the backward loop whole": ("scan, gradient",),
}  # fmt: skip


def spec_for(shape, rng):
    """Any spec whose axes divide the dims."""
    left, dims = list(shape), [()] * len(shape)
    for axis in rng.permutation(list(MESH)).tolist():
        fitting = [dim for dim, size in enumerate(left) if size and size % MESH[axis] == 0]
        if fitting and rng.random() < 0.7:
            dim = rng.choice(fitting)
            left[dim] //= MESH[axis]
            dims[dim] += (axis,)
    return P(*dims)


def tries(args):
    """Specs for the arguments: in turn of all and of one alone, which explicit mode seldom refuses."""
    rng = np.random.default_rng(0)
    found = {}
    for turn in range(TRIES):
        specs = [spec_for(x.shape, rng) for x in args]
        if args and turn % 2:
            alone = rng.integers(len(args))
            specs = [spec if i == alone else P(*[None] * len(spec)) for i, spec in enumerate(specs)]
        if any(map(any, specs)):
            found[tuple(specs)] = None
    return list(found)


def explicit_results(case, specs):
    """By their types in explicit mode, the layouts of the results: None for one without a sharding in its type.

    Nothing where explicit mode refuses the program.
    """
    with jax.sharding.use_abstract_mesh(EXPLICIT):
        args = [
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, weak_type=jax.typeof(x).weak_type, sharding=NamedSharding(EXPLICIT, spec)
            )
            for x, spec in zip(case.args, specs, strict=True)
        ]
        try:
            results = jax.tree.leaves(jax.eval_shape(case.fn, *args))
        except Exception:  # of many kinds
            return []
    return [layout_of(x.sharding.spec, len(x.shape)) if x.sharding else None for x in results]


def compared(case, changed=None):
    """(specs, explicit mode's layouts of the results, ours) for every try that it takes and that has a dim to compare.

    Args:
        changed: alters our rules, to see the check fail.
    """
    taken = [(specs, theirs) for specs in tries(case.args) if any(theirs := explicit_results(case, specs))]
    if not taken:
        return []
    program = trace(case.fn, case.args, {})
    rules = [changed(rule) if changed else rule for rule in rules_for(program)]
    found = []
    for specs, theirs in taken:
        fixed = shardy.fixed_layouts(program, specs)
        found.append((specs, theirs, list(propagate_layouts(program, rules, MESH, fixed).results)))
    return found


compared_of = functools.cache(lambda name: compared(NAMED[name]))


def check(name, found):
    for specs, theirs, ours in found:
        said = f"{name}, {specs}: explicit mode has {theirs}, propagation {ours}"
        assert len(theirs) == len(ours), said
        typed = [pair for pair in zip(theirs, ours, strict=True) if pair[0] is not None]
        dims = [pair for layouts in typed for pair in zip(*layouts, strict=True)]
        if name not in IN_FEWER:
            assert all(our[: len(their)] == their for their, our in dims), said
        if name not in IN_MORE:
            assert all(their[: len(our)] == our for their, our in dims), said


@pytest.mark.parametrize("case", by_primitive(NAMED.values()))
def test_as_explicit_mode(case):
    check(case.name, compared_of(case.name))


LIKE_SHARDY = (IN_FEWER | IN_MORE) & NAMED.keys() - {name for names in UNLIKE_SHARDY.values() for name in names}


@pytest.mark.parametrize("name", sorted(LIKE_SHARDY))
def test_where_they_differ_shardy_decides(name):
    for specs, theirs, ours in compared_of(name):
        if theirs != ours:
            assert ours == shardy.propagated(NAMED[name].fn, NAMED[name].args, specs, MESH).results
            return  # one is enough, and in some releases there is none


def test_enough_was_compared():
    """Explicit mode takes some specs of most cases, and nearly all of those are compared without an exception."""
    counts = {name: len(compared_of(name)) for name in NAMED}
    assert sum(counts.values()) > 1000
    assert sum(map(bool, counts.values())) > 0.75 * len(CASES)
    assert len(IN_FEWER | IN_MORE) < 0.1 * len(CASES)


@pytest.mark.parametrize(
    "changed",
    [
        lambda rule: replace(rule, results=tuple(((),) * len(dims) for dims in rule.results)),
        lambda rule: replace(rule, results=tuple(dims[::-1] for dims in rule.results)),
    ],
    ids=["nothing passes", "to other dims"],
)
@pytest.mark.parametrize("name", ["sin", "transpose", "scan, of nothing but a length"])
def test_the_check_sees_a_wrong_rule(name, changed):
    with pytest.raises(AssertionError, match="explicit mode has"):
        check(name, compared(NAMED[name], changed))
