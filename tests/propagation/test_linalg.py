"""Rules of factorisations, solvers and transforms, held against their own numbers."""

import jax.numpy as jnp
import pytest
from jax import lax
from rule_oracles import check_by_pieces, normal

from autoshard.propagation import Rule

A = normal(4, 6, 6)
POSITIVE = A @ A.swapaxes(1, 2) + 6 * jnp.eye(6)
B = normal(4, 6, 2)
BANDS = normal(4, 6), normal(4, 6) + 5, normal(4, 6)

LINALG = [
    (lambda a: lax.linalg.cholesky_p.bind(a), (POSITIVE,)),
    (lambda a: lax.linalg.qr(a), (A,)),
    (lambda a: lax.linalg.lu(a), (A,)),
    (lambda a: lax.linalg.svd(a), (A,)),
    (lambda a, b: lax.linalg.triangular_solve(a, b, left_side=True, lower=True), (POSITIVE, B)),
    (lax.linalg.tridiagonal_solve, (*BANDS, B)),
    (lambda a: lax.fft(a.astype(jnp.complex64), lax.FftType.FFT, (6,)), (B.swapaxes(1, 2) * (1 + 0j),)),
    (lambda a: lax.fft(a, lax.FftType.RFFT, (6,)), (B.swapaxes(1, 2),)),
]  # fmt: skip


@pytest.mark.parametrize("fn, operands", LINALG)
def test_batches_by_pieces(fn, operands):
    check_by_pieces(fn, *operands)


def test_the_oracle_sees_a_wrong_rule():
    free = Rule.parse("b i j -> b i j", A.shape, A.shape, need_replication="i")

    def fn(a):
        return lax.fft(a * (1 + 0j), lax.FftType.FFT, (a.shape[-1],))

    with pytest.raises(AssertionError):
        check_by_pieces(fn, A, rule=free)
