"""Factorisations, solvers and transforms: leading dims are batch dims, the matrices themselves stay whole."""

from __future__ import annotations

from autoshard.program import Equation
from autoshard.propagation.registry import rule
from autoshard.propagation.rule import Rule, RuleBuilder, dimwise
from autoshard.propagation.rules.elementwise import shapes_of


def _batched(equation: Equation, own_dims: int) -> Rule:
    """The rule of an operation on the last `own_dims` dims of its first operand, batched over those before."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    batch = len(operands[0]) - own_dims
    for dim in range(batch):
        sources = [(tensor, dim) for tensor in range(len(operands)) if operands[tensor]]
        builder.factor(operands[0][dim], sources, [(tensor, dim) for tensor in range(len(results))])
    for tensor, shape in enumerate(operands):
        for dim in range(batch, len(shape)):
            builder.factor(shape[dim], [(tensor, dim)], [], "need_replication")
    for tensor, shape in enumerate(results):
        for dim in range(batch, len(shape)):
            builder.factor(shape[dim], [], [(tensor, dim)], "need_replication")
    return builder.build()


@rule("cholesky")
def cholesky(equation: Equation) -> Rule:
    """`b i j -> b i j`, i and j whole."""
    operands, results = shapes_of(equation)
    dims = len(operands[0])
    return dimwise(operands, results, {dims - 2: "need_replication", dims - 1: "need_replication"})


@rule(
    "cholesky_update",
    "eig",
    "eigh",
    "geqp3",
    "geqrf",
    "hessenberg",
    "householder_product",
    "lu",
    "ormqr",
    "qr",
    "schur",
    "svd",
    "symmetric_product",
    "tridiagonal",
)
def of_matrices(equation: Equation) -> Rule:
    """`b i j -> b k l, b m`, only b may be split."""
    return _batched(equation, 2)


@rule("fft")
def fft(equation: Equation) -> Rule:
    """`b i -> b i`, i whole."""
    operands, results = shapes_of(equation)
    transformed = range(len(operands[0]) - len(equation.params["fft_lengths"]), len(operands[0]))
    return dimwise(operands, results, dict.fromkeys(transformed, "need_replication"), sizes=_smaller(operands, results))


def _smaller(operands: tuple[tuple[int, ...], ...], results: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """The sizes that both sides of a real transform have, of which one keeps only half of the last dim."""
    return tuple(map(min, operands[0], results[0]))


@rule("lu_pivots_to_permutation", "tridiagonal_solve")
def of_vectors(equation: Equation) -> Rule:
    """`b i -> b j`, only b may be split."""
    return _batched(equation, 1)


@rule("triangular_solve")
def triangular_solve(equation: Equation) -> Rule:
    """`b i j, b i k -> b j k`, only b may be split; from the right it is `b i j, b k j -> b k i`."""
    operands, results = shapes_of(equation)
    builder = RuleBuilder(operands, results)
    rows = len(operands[0]) - 2
    columns = rows + 1
    for dim in range(rows):
        builder.factor(operands[0][dim], [(0, dim), (1, dim)], [(0, dim)])
    solved, free = (rows, columns) if equation.params["left_side"] else (columns, rows)
    met, left = (free, solved) if equation.params["transpose_a"] else (solved, free)
    builder.factor(operands[0][rows], [(0, met), (1, solved)], [], "need_replication")
    builder.factor(operands[0][rows], [(0, left)], [(0, solved)], "need_replication")
    builder.factor(operands[1][free], [(1, free)], [(0, free)], "need_replication")
    return builder.build()
