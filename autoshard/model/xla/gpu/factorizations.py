"""Factorizations and solves on GPU: seconds of libraries' routines, which go column by column, and often one by one.

A routine takes so long per column however few numbers a column has, and does FLOPs at a rate far below that of
products. Many matrices go to a routine for batches, if the library has one and XLA takes it for their size; else they
follow each other. Source: `python benchmarks/kernels.py --factorizations` on an H100.
`tests/model/xla/test_factorizations.py` holds what that measured against prices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.mesh.compute import matrix_flops


@dataclass(frozen=True)
class Routine:
    """What a library takes: ``base + column * columns**power + FLOPs / flops``."""

    flops: float  # per second
    column: float = 0.0  # seconds
    power: float = 1.0
    base: float = 0.0  # seconds
    most_rows: float = math.inf  # of a matrix that XLA hands it
    most_rows_each: float = math.inf  # of a matrix, for each matrix that there is

    def takes(self, rows: int, count: np.ndarray) -> np.ndarray:
        """Whether XLA hands it so many matrices."""
        return (rows <= self.most_rows) & (rows <= self.most_rows_each * count)

    def chain_seconds(self, columns: int) -> float:
        """What it takes however few FLOPs there are."""
        return self.base + self.column * columns**self.power


@dataclass(frozen=True)
class Library:
    """What one primitive becomes."""

    one: Routine  # for a single matrix, or for one after another
    many: Routine | None = None  # for all of several matrices

    def seconds(
        self, primitive: str, shapes: Sequence[tuple[int, ...]], pieces: np.ndarray | float = 1.0
    ) -> np.ndarray | float:
        """On one device.

        Args:
            shapes: of the operands.
            pieces: into how many parts the matrices are split.
        """
        *batch, rows, columns = _matrices(primitive, shapes)
        work = matrix_flops(primitive, shapes) / pieces
        count = np.ceil(np.maximum(1.0, math.prod(batch) / pieces))
        in_turn = count * self.one.chain_seconds(columns) + work / self.one.flops
        if self.many is None:
            return in_turn
        together = self.many.chain_seconds(columns) + work / self.many.flops
        return np.where((count > 1) & self.many.takes(max(rows, columns), count), together, in_turn)


def _matrices(primitive: str, shapes: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of what a routine goes through column by column: of a tridiagonal system its right sides."""
    if primitive == "tridiagonal_solve":
        *batch, _, sides = shapes[-1]
        return (*(batch if sides > 1 else ()), sides, sides)  # with single sides all systems are solved at once
    *batch, rows, columns = shapes[0]
    return (*batch, rows, min(rows, columns))


# jaxlib/gpu/solver_kernels_ffi.cc says for which sizes batches are one call.
LIBRARIES: Mapping[str, Library] = {
    "cholesky": Library(Routine(1e13, 0.4e-6), Routine(1e13, 1.5e-6)),
    "eigh": Library(Routine(1.1e13, 9e-6, base=3e-4), Routine(6e12, 7e-8, 2.0)),
    "lu": Library(Routine(1.3e13, 2.3e-6), Routine(2e12, 4e-8, 2.0, most_rows_each=128)),
    "qr": Library(Routine(1.6e13, 4.5e-6), Routine(1.2e11, 5e-8, 2.5, most_rows_each=128)),
    "svd": Library(Routine(1.5e12, 2e-5, base=2e-4), Routine(1.2e12, base=2.5e-4, most_rows=32)),
    "triangular_solve": Library(Routine(1.2e13, 0.35e-6), Routine(1.2e13, 0.35e-6)),
    "tridiagonal_solve": Library(Routine(1e13, 8e-6)),
}
# What XLA calls -> the primitive whose library it is. `orgqr` is counted with `geqrf`.
CALLS: Mapping[str, str] = {
    "__cublas$triangularSolve": "triangular_solve",
    "cusolver_geqrf_ffi": "qr",
    "cusolver_gesvd_ffi": "svd",
    "cusolver_gesvdj_ffi": "svd",
    "cusolver_gesvdp_ffi": "svd",
    "cusolver_getrf_ffi": "lu",
    "cusolver_potrf_ffi": "cholesky",
    "cusolver_syevd_ffi": "eigh",
    "cusparse_gtsv2_ffi": "tridiagonal_solve",
}
