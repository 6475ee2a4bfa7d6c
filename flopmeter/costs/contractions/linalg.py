"""Factorizations, solves and Fourier transforms: the leading order of the textbook algorithm.

Sources: L41 is LAPACK Working Note 41 (Blackford and Dongarra, 'Quick Installation Guide for LAPACK', operation
counts); GvL is Golub and Van Loan, 'Matrix Computations', 4th ed. Iterative methods (eigenvalues, singular values) are
counted as these sources count them. They are matmuls of blocks, so their class is contraction, but no library runs them
on the matrix units at reduced precision: they carry no MACs and are timed as multiply-adds of the vector units.

Time is hardly arithmetic: a column's reflector or pivot has to be there before the next column can begin. So kernels
wait for each other, as many as LAPACK's own routines make calls of BLAS where a column is as long as the matrix
(`chain_notes` says so in reports, since no GPU's was measured).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from math import ceil, log2, prod
from typing import NamedTuple

from torch._ops import OpOverloadPacket

from flopmeter.costs.rules import make_cost, rule
from flopmeter.records import CONTRACTION, Call, Cost, Kernel
from flopmeter.records.work import VectorWork
from flopmeter.torch_names.operators import aten


def cholesky_flops(n: int) -> int:
    """L41 potrf. LDL^T takes as many (sytrf)."""
    return n**3 // 3


def lu_flops(m: int, n: int) -> int:
    """L41 getrf: 2n³/3 for a square."""
    long, short = max(m, n), min(m, n)
    return long * short**2 - short**3 // 3


def qr_flops(m: int, n: int) -> int:
    """L41 geqrf, R alone: 4n³/3 for a square."""
    long, short = max(m, n), min(m, n)
    return 2 * long * short**2 - 2 * short**3 // 3


def form_q_flops(m: int, columns: int, reflectors: int) -> int:
    """L41 orgqr: the first columns of the product of the reflectors."""
    return 4 * m * columns * reflectors - 2 * (m + columns) * reflectors**2 + 4 * reflectors**3 // 3


def svd_flops(m: int, n: int, *, vectors: bool, full: bool = False) -> int:
    """GvL figure 8.6.1, Golub-Reinsch: singular values; with V and the first columns of U; with all of U."""
    m, n = max(m, n), min(m, n)
    if not vectors:
        return 4 * m * n**2 - 4 * n**3 // 3
    return 4 * m**2 * n + 8 * m * n**2 + 9 * n**3 if full else 14 * m * n**2 + 8 * n**3


def eigh_flops(n: int, *, vectors: bool) -> int:
    """GvL section 8.3, symmetric QR."""
    return 9 * n**3 if vectors else 4 * n**3 // 3


BLOCK = 64  # columns that getrf, potrf and trsm take at a time (LAPACK's ilaenv)
BLOCK_CALLS = 3  # potrf's for each: factor the block, solve with it, update what is left
REFLECTOR_CALLS = 4  # a column's in geqr2 and org2r: a norm, a scaling, a matrix-vector product, a rank-1 update
PIVOT_CALLS = 2  # a column's in getf2: the largest element; scaling and update
TRIDIAGONAL_CALLS = 11  # a column's in latrd: seven products of matrix and vector, four of vectors
BIDIAGONAL_CALLS = 16  # a column's in labrd, which has a reflector for the column and one for the row
HESSENBERG_CALLS = 6  # a column's in gehd2: a reflector, applied from both sides
SMALL = 32  # up to this size cuSOLVER's Jacobi methods take all matrices of a batch in one kernel


class Factored(NamedTuple):
    """What the factorization of one matrix takes."""

    flops: int
    calls: int  # of BLAS, one after another
    runs_batched: bool = False  # torch has the matrices of a batch factored side by side, else one after another


def factor_cholesky(_: int, n: int) -> Factored:
    return Factored(cholesky_flops(n), BLOCK_CALLS * ceil(n / BLOCK), runs_batched=True)


def factor_lu(m: int, n: int) -> Factored:
    return Factored(lu_flops(m, n), PIVOT_CALLS * min(m, n), runs_batched=True)


def factor_qr(m: int, n: int) -> Factored:
    return Factored(qr_flops(m, n), REFLECTOR_CALLS * min(m, n))


def factor_eigh(_: int, n: int, *, vectors: bool = True) -> Factored:
    return Factored(eigh_flops(n, vectors=vectors), TRIDIAGONAL_CALLS * n, runs_batched=n <= SMALL)


def factor_svd(m: int, n: int, *, vectors: bool = True, full: bool = False) -> Factored:
    """By bidiagonal form. torch first tries Jacobi's method, which takes longer."""
    calls = BIDIAGONAL_CALLS * min(m, n)
    return Factored(svd_flops(m, n, vectors=vectors, full=full), calls, runs_batched=max(m, n) <= SMALL)


def solve_calls(n: int) -> int:
    """Kernels of a triangular solve: for each block one that solves it, and one that updates what is left."""
    return 2 * ceil(n / BLOCK)


def _and(factored: Factored, flops: int, calls: int = 0) -> Factored:
    return factored._replace(flops=factored.flops + flops, calls=factored.calls + calls)


_PER_MATRIX: dict[OpOverloadPacket, Callable[[int, int], Factored]] = {
    aten.linalg_cholesky_ex: factor_cholesky,
    aten.cholesky: factor_cholesky,
    aten.linalg_ldl_factor_ex: lambda m, n: factor_lu(m, n)._replace(flops=cholesky_flops(n)),  # it pivots
    aten.cholesky_inverse: lambda _, n: Factored(2 * n**3 // 3, 2 * solve_calls(n), runs_batched=True),  # L41 potri
    aten.linalg_lu: factor_lu,
    aten.linalg_lu_factor_ex: factor_lu,
    aten._linalg_det: lambda _, n: _and(factor_lu(n, n), n),  # and the product of the diagonal
    aten._linalg_slogdet: lambda _, n: _and(factor_lu(n, n), n),
    # L41 getrf + getri: 2n³ in all
    aten.linalg_inv_ex: lambda _, n: factor_lu(n, n)._replace(
        flops=2 * n**3, calls=PIVOT_CALLS * n + 2 * solve_calls(n)
    ),
    aten.geqrf: factor_qr,
    aten._linalg_eigvals: lambda _, n: Factored(10 * n**3, HESSENBERG_CALLS * n),  # GvL section 7.5.6
    aten.linalg_eig: lambda _, n: Factored(25 * n**3, HESSENBERG_CALLS * n),
    # V sqrt(L) V^T from the eigenvalues and vectors; U = W V^T and H = V S V^T from the reduced SVD W S V^T.
    aten.linalg_matrix_sqrth: lambda m, n: _and(factor_eigh(m, n), 2 * n**3),
    aten.linalg_polar: lambda m, n: _and(factor_svd(m, n), 2 * n**3 + 2 * m * n**2),
    # Taylor of degree 18 in five matmuls (Bader, Blanes and Casas, 2019); the squarings depend on the norm.
    aten.linalg_matrix_exp: lambda _, n: Factored(5 * 2 * n**3, 5, runs_batched=True),
}


@rule(*_PER_MATRIX)
def factorization(call: Call) -> Cost:
    """The table's operations for each matrix of the batch."""
    return _batched(call, _PER_MATRIX[call.func.overloadpacket])


@rule(aten._linalg_eigh)
def eigh(call: Call) -> Cost:
    """Eigenvalues of symmetric matrices, with the vectors where they are asked for."""
    return _batched(call, functools.partial(factor_eigh, vectors=call.argument("compute_v")))


@rule(aten._linalg_svd)
def svd(call: Call) -> Cost:
    """Singular values; with vectors, the reduced or the full U."""
    vectors, full = call.argument("compute_uv"), call.argument("full_matrices")
    return _batched(call, functools.partial(factor_svd, vectors=vectors, full=full))


@rule(aten.linalg_pinv)
def pinv(call: Call) -> Cost:
    """The reduced SVD (symmetric: eigenvalues and vectors), then V @ (U / s)^T."""
    decomposed = factor_eigh if call.argument("hermitian") else factor_svd
    return _batched(call, lambda m, n: _and(decomposed(m, n), 2 * m * n * min(m, n)))


@rule(aten.linalg_qr)
def qr(call: Call) -> Cost:
    """R, then Q by its columns: as many as the short side (reduced), as rows (complete), or none (r)."""
    mode = call.argument("mode")

    def factored(m: int, n: int) -> Factored:
        short = min(m, n)
        columns = {"reduced": short, "complete": m, "r": 0}[mode]
        r = factor_qr(m, n)
        return _and(r, form_q_flops(m, columns, short), REFLECTOR_CALLS * short) if columns else r

    return _batched(call, factored)


@rule(aten.linalg_householder_product)
def householder_product(call: Call) -> Cost:
    """Q from its reflectors (L41 orgqr)."""
    reflectors = call.inputs[1].shape[-1]
    return _batched(call, lambda m, n: Factored(form_q_flops(m, n, reflectors), REFLECTOR_CALLS * reflectors))


@rule(aten.ormqr)
def ormqr(call: Call) -> Cost:
    """Q @ C or C @ Q from the reflectors of Q (L41 ormqr): 4mnk - 2k²·(m on the left, n on the right gives n, m)."""
    k, is_left = call.inputs[1].shape[-1], call.argument("left")

    def factored(m: int, n: int) -> Factored:  # blocks of reflectors are products
        return Factored(4 * m * n * k - 2 * k**2 * (n if is_left else m), BLOCK_CALLS * ceil(k / BLOCK))

    return _batched(call, factored, position=2)


@rule(aten.linalg_lstsq)
def lstsq(call: Call) -> Cost:
    """By QR: factor, apply Q^T to each right side (4mn - 2n²) and substitute back (n²)."""
    *batch, m, n = call.inputs[0].shape
    right_sides = call.inputs[1].numel // max(m * prod(batch), 1)
    each = 4 * m * n - 2 * min(m, n) ** 2 + min(m, n) ** 2
    return _batched(call, lambda m, n: _and(factor_qr(m, n), each * right_sides, solve_calls(min(m, n))))


# Where the solution comes back as the first output: (position of the matrix, triangular passes).
_SOLVES: dict[OpOverloadPacket, tuple[int, int]] = {
    aten.linalg_solve_triangular: (0, 1),
    aten.triangular_solve: (1, 1),
    aten.linalg_lu_solve: (0, 2),
    aten.linalg_ldl_solve: (0, 2),
    aten.cholesky_solve: (1, 2),
}


@rule(*_SOLVES)
def solve(call: Call) -> Cost:
    """n² for each right side and triangular pass (L41 trtrs, getrs, potrs, sytrs)."""
    position, passes = _SOLVES[call.func.overloadpacket]
    n = call.inputs[position].shape[-1]
    return _library(call, passes * n * call.outputs[0].numel, passes * solve_calls(n))


@rule(aten._linalg_solve_ex)
def solve_ex(call: Call) -> Cost:
    """Factor each matrix, then two triangular passes for each right side."""
    *batch, n, _ = call.argument("A").shape
    factored = factor_lu(n, n)
    flops = prod(batch) * factored.flops + 2 * n * call.outputs[0].numel
    return _library(call, flops, factored.calls + 2 * solve_calls(n))


@rule(aten._fft_c2c, aten._fft_r2c, aten._fft_c2r)
def fourier_transform(call: Call) -> Cost:
    """5·N·log2 N for N complex points (radix-2 Cooley-Tukey, FFTW's convention for rates), half of that for
    real ones; a normalized transform multiplies each real number of its output once more."""
    (x,), (out,) = call.inputs, call.outputs
    is_complex = call.func.overloadpacket is aten._fft_c2c
    points = out if call.func.overloadpacket is aten._fft_c2r else x  # all of them, not half a spectrum
    length = prod(points.shape[dim] for dim in call.argument("dim"))
    transforms = points.numel // length
    flops = transforms * round((5.0 if is_complex else 2.5) * length * log2(length))
    scaled = out.numel * (2 if out.dtype.is_complex else 1) if call.argument("normalization") else 0
    return make_cost(call, CONTRACTION, flops + scaled, fused_multiply_add=True, complex_factor=1)


def chain_notes(kernels: Iterable[Kernel]) -> list[str]:
    """What a reader must know of the time of factorizations."""
    costs = (kernel.cost for kernel in kernels)
    calls = [c.work.kernels for c in costs if c.op_class == CONTRACTION and isinstance(c.work, VectorWork)]
    if all(each == 1 for each in calls):
        return []
    return [
        f"factorizations and solves: {sum(calls):,} kernels one after another, as many as LAPACK's routines make column"
        " by column; no GPU's were measured, and Jacobi's method, which torch tries first for an SVD, takes longer"
    ]


def _batched(call: Call, factored: Callable[[int, int], Factored], *, position: int = 0) -> Cost:
    """What each m x n matrix of the operand at that position takes."""
    *batch, m, n = call.inputs[position].shape
    each = factored(m, n)
    return _library(call, prod(batch) * each.flops, each.calls * (1 if each.runs_batched else prod(batch)))


def _library(call: Call, flops: int, calls: int) -> Cost:
    return make_cost(call, CONTRACTION, flops, fused_multiply_add=True, kernels=max(1, calls))
