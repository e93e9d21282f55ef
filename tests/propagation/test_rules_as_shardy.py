"""Every rule against what Shardy does with the operations that JAX makes of the primitive.

Each dim of each argument of each case is split alone; then all arguments and results must lie as Shardy has them.
`docs/propagation.md` holds the same tables.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cases
import pytest
import shardy
from jax.sharding import PartitionSpec as P
from oracles import mesh_of
from sweeps import by_primitive

from autoshard.program import trace
from autoshard.propagation import Rule, propagate_layouts, registry, rules_for
from autoshard.propagation.rule import RuleBuilder, whole
from autoshard.propagation.rules.elementwise import shapes_of
from autoshard.propagation.rules.primitives_without_rules import WITHOUT_RULE

MESH = {"x": 2}

MATRICES = "matrices stay whole here; what Shardy joins depends on the library call or loop that a TPU gets"
PLAIN = "kept whole here; to Shardy it is the plain operations of its interpreted, fused or discharged form"
SPARSE = "kept whole here; to Shardy it is the gathers and scatters of its generic form"
UNLIKE_SHARDY = {  # primitive, or case -> why we differ
    "addupdate": PLAIN,
    "bcoo_dot_general": SPARSE,
    "bcsr_dot_general": SPARSE,
    "call_hi_primitive": PLAIN,
    "cholesky_update": MATRICES,
    "composite": "opened here; Shardy has no rule for a composite",
    "compute_on": PLAIN,
    "coo_matmat": SPARSE,
    "csr_matmat": SPARSE,
    "custom_fusion": PLAIN,
    "custom_linear_solve, jnp.linalg.solve": MATRICES,
    "eigh": MATRICES,
    "einshape_lo": PLAIN,
    "fusible": PLAIN,
    "geqrf": MATRICES,
    "get": PLAIN,
    "householder_product": MATRICES,
    "lu": MATRICES,
    "new_ref": PLAIN,
    "ormqr": MATRICES,
    "pallas_call": PLAIN,
    "qr": MATRICES,
    "random_wrap": "the words of a key stay together here; Shardy sees no keys",
    "roll": "a permutation here; to Shardy it is a generic loop",
    "run_state": PLAIN,
    "scaled_dot": "a product here; Shardy has no rule for a composite",
    "scan, of no steps": "JAX lowers nothing of it",
    "sin, einshape": PLAIN,
    "sin, fusible": PLAIN,
    "svd": MATRICES,
    "swap": PLAIN,
    "symmetric_product": MATRICES,
    "tridiagonal_solve": MATRICES,
}
IN_SOME_RELEASES = frozenset({"einshape_lo", "sin, einshape", "sin, fusible"})
NOT_FOR_TPUS = frozenset({  # Shardy is asked about TPU programs
    "buffer_callback", "call_exported", "core_map", "debug_callback", "debug_print", "eig", "geqp3", "hessenberg",
    "io_callback", "mpmd_map", "pure_callback", "qr, pivoting", "random_gamma", "run_scoped", "schur", "spsolve",
    "tridiagonal",
})  # fmt: skip


def unlike(case: cases.Case) -> bool:
    return bool(UNLIKE_SHARDY.keys() & {case.primitive, case.name})


ASKED = [case for case in cases.CASES if not NOT_FOR_TPUS & {case.primitive, case.name}]
NAMED = {case.name: case for case in ASKED}
assert len(NAMED) == len(ASKED)


def specs_of(case: cases.Case) -> Iterator[list[P | None]]:
    """One dim of one argument split, for all that two devices divide."""
    for position, argument in enumerate(case.args):
        for dim, size in enumerate(argument.shape):
            if size and size % 2 == 0:
                spec = P(*[None] * dim, "x")
                yield [spec if i == position else None for i in range(len(case.args))]


@functools.lru_cache(maxsize=32)  # tests of one primitive follow each other
def by_shardy(name: str) -> tuple[shardy.Propagated, ...]:
    """What Shardy makes of a case under each of the specs."""
    case = NAMED[name]
    every = [*specs_of(case)]
    lowered = shardy.LoweredFunction(case.fn, case.args, MESH) if every else None
    return tuple(lowered.propagated(specs) for specs in every)


def differences(case: cases.Case) -> list[str]:
    """Where we and Shardy differ on a case."""
    program = trace(case.fn, case.args, {}, has_rule=registry.has_rule)
    rules, found = rules_for(program), []
    for specs, theirs in zip(specs_of(case), by_shardy(case.name), strict=True):
        ours = propagate_layouts(program, rules, MESH, shardy.fixed_layouts(program, specs))
        both = ([ours.values[value.id] for value in program.arguments], list(ours.results))
        if both != (theirs.arguments, theirs.results):
            found.append(f"{specs}: {both}, Shardy {theirs.arguments, theirs.results}")
    return found


@pytest.mark.filterwarnings("error::autoshard.propagation.UnknownPrimitiveWarning")
@pytest.mark.parametrize("case", by_primitive(case for case in ASKED if not unlike(case)))
def test_as_shardy(case):
    found = differences(case)
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", UNLIKE_SHARDY)
def test_the_table_has_no_more_than_it_needs(name):
    of_that_name = [case for case in ASKED if name in (case.primitive, case.name)]
    assert not of_that_name or name in IN_SOME_RELEASES or any(map(differences, of_that_name))


MISTAKES = [  # primitive, wrong rule
    ("tanh", lambda e: whole(*shapes_of(e))),
    ("transpose", lambda e: _joined_in_order(e)),
    ("dot_general", lambda e: _joined_in_order(e)),
    ("reduce_sum", lambda e: _joined_in_order(e)),
    ("sort", lambda e: whole(*shapes_of(e))),
    ("concatenate", lambda e: whole(*shapes_of(e))),
    ("reshape", lambda e: _joined_in_order(e)),
    ("gather", lambda e: _joined_in_order(e)),
    ("conv_general_dilated", lambda e: whole(*shapes_of(e))),
]


def _joined_in_order(equation) -> Rule:
    """Every dim of the first operand passes to the result's dim of the same number."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    for dim in range(max(map(len, (*operands, *results)))):
        places = ([(0, dim)] if dim < len(shapes[0]) else [] for shapes in (operands, results))
        sizes = [shapes[0][dim] for shapes in (operands, results) if shapes and dim < len(shapes[0])]
        if sizes:
            builder.factor(min(sizes), *places)
    return builder.build()


@pytest.mark.parametrize("primitive, mistake", MISTAKES, ids=[row[0] for row in MISTAKES])
def test_the_oracle_catches_a_planted_mistake(monkeypatch, primitive, mistake):
    planted = [case for case in ASKED if case.primitive == primitive and not differences(case)]
    assert planted
    monkeypatch.setitem(registry._RULES, primitive, mistake)
    assert any(map(differences, planted))


@functools.cache
def lowered_primitives() -> frozenset[str]:
    """Every primitive that JAX has some lowering for; asked in a process of its own, as other libraries add theirs."""
    code = (
        "import cases; from jax._src.interpreters import mlir; "
        "print(*(p.name for t in (mlir._lowerings, *mlir._platform_specific_lowerings.values()) for p in t))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(cases.__file__).parent
    )
    return frozenset(done.stdout.split())


def test_every_primitive_has_a_rule_or_a_reason():
    known = lowered_primitives()
    assert len(known) > 290
    ruled = {name for name in known if registry.has_rule(name)}
    assert known - ruled - WITHOUT_RULE.keys() == set(), "give each a rule, or a reason in rules/without.py"
    assert not {name for name in WITHOUT_RULE if registry.has_rule(name)}
    assert all(WITHOUT_RULE.values())


def test_nearly_every_rule_has_a_case():
    tried = {case.primitive for case in (*cases.CASES, *cases.mesh_cases(mesh_of({"x": 4, "y": 2})))}
    untried = {name for name in lowered_primitives() if registry.has_rule(name)} - tried - UNTRIED
    assert untried == set()


UNTRIED = frozenset({  # no program for CPUs holds these
    "coo_spmm", "coo_spmv", "create_linear", "csr_spmm", "csr_spmv", "cudnn_fusion", "custom_lin", "dim_as_value",
    "dimension_size", "dot_product_attention_bwd", "dot_product_attention_bwd_wrapper",
    "dot_product_attention_fp8_bwd", "dot_product_attention_fp8_bwd_wrapper", "dot_product_attention_fp8_fwd",
    "dot_product_attention_fp8_fwd_wrapper", "dot_product_attention_fwd", "dot_product_attention_fwd_wrapper",
    "from_edtype", "fused_call", "mosaic_gpu_p", "pin", "rnn_bwd", "rnn_fwd", "scaled_matmul",
    "scaled_matmul_wrapper", "shape_assertion", "stage", "to_edtype", "tpu_custom_call", "unpin", "unreachable",
})  # fmt: skip
