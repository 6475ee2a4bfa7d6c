"""Factorizations, solves and Fourier transforms: the leading order of the textbook algorithm.

Sources: L41 is LAPACK Working Note 41 (Blackford and Dongarra, 'Quick Installation Guide for LAPACK', operation
counts); GvL is Golub and Van Loan, 'Matrix Computations', 4th ed. Iterative methods (eigenvalues, singular values) are
counted as these sources count them. They are matmuls of blocks, so their class is contraction, but no library runs them
on the matrix units at reduced precision: they carry no MACs and are timed as multiply-adds of the vector units.
"""

from __future__ import annotations

from collections.abc import Callable
from math import log2, prod

from torch._ops import OpOverloadPacket

from flopmeter.costs.rules import make_cost, rule
from flopmeter.records import CONTRACTION, MOVEMENT, Call, Cost, Region
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


_PER_MATRIX: dict[OpOverloadPacket, Callable[[int, int], int]] = {
    aten.linalg_cholesky_ex: lambda _, n: cholesky_flops(n),
    aten.cholesky: lambda _, n: cholesky_flops(n),
    aten.linalg_ldl_factor_ex: lambda _, n: cholesky_flops(n),
    aten.cholesky_inverse: lambda _, n: 2 * n**3 // 3,  # L41 potri
    aten.linalg_lu: lu_flops,
    aten.linalg_lu_factor_ex: lu_flops,
    aten._linalg_det: lambda _, n: lu_flops(n, n) + n,  # and the product of the diagonal
    aten._linalg_slogdet: lambda _, n: lu_flops(n, n) + n,
    aten.linalg_inv_ex: lambda _, n: 2 * n**3,  # L41 getrf + getri
    aten.geqrf: qr_flops,
    aten._linalg_eigvals: lambda _, n: 10 * n**3,  # GvL section 7.5.6
    aten.linalg_eig: lambda _, n: 25 * n**3,
    # V sqrt(L) V^T from the eigenvalues and vectors; U = W V^T and H = V S V^T from the reduced SVD W S V^T.
    aten.linalg_matrix_sqrth: lambda _, n: eigh_flops(n, vectors=True) + 2 * n**3,
    aten.linalg_polar: lambda m, n: svd_flops(m, n, vectors=True) + 2 * n**3 + 2 * m * n**2,
    # Taylor of degree 18 in five matmuls (Bader, Blanes and Casas, 2019); the squarings depend on the norm.
    aten.linalg_matrix_exp: lambda _, n: 5 * 2 * n**3,
}


@rule(*_PER_MATRIX)
def factorization(call: Call) -> Cost:
    """The table's operations for each matrix of the batch."""
    return _batched(call, _PER_MATRIX[call.func.overloadpacket])


@rule(aten._linalg_eigh)
def eigh(call: Call) -> Cost:
    """Eigenvalues of symmetric matrices, with the vectors where they are asked for."""
    return _batched(call, lambda _, n: eigh_flops(n, vectors=call.argument("compute_v")))


@rule(aten._linalg_svd)
def svd(call: Call) -> Cost:
    """Singular values; with vectors, the reduced or the full U."""
    vectors, full = call.argument("compute_uv"), call.argument("full_matrices")
    return _batched(call, lambda m, n: svd_flops(m, n, vectors=vectors, full=full))


@rule(aten.linalg_pinv)
def pinv(call: Call) -> Cost:
    """The reduced SVD (symmetric: eigenvalues and vectors), then V @ (U / s)^T."""
    symmetric = call.argument("hermitian")

    def flops(m: int, n: int) -> int:
        decomposed = eigh_flops(n, vectors=True) if symmetric else svd_flops(m, n, vectors=True)
        return decomposed + 2 * m * n * min(m, n)

    return _batched(call, flops)


@rule(aten.linalg_qr)
def qr(call: Call) -> Cost:
    """R, then Q by its columns: as many as the short side (reduced), as rows (complete), or none (r)."""
    mode = call.argument("mode")

    def flops(m: int, n: int) -> int:
        short = min(m, n)
        columns = {"reduced": short, "complete": m, "r": 0}[mode]
        return qr_flops(m, n) + (form_q_flops(m, columns, short) if columns else 0)

    return _batched(call, flops)


@rule(aten.linalg_householder_product)
def householder_product(call: Call) -> Cost:
    """Q from its reflectors (L41 orgqr)."""
    reflectors = call.inputs[1].shape[-1]
    return _batched(call, lambda m, n: form_q_flops(m, n, reflectors))


@rule(aten.ormqr)
def ormqr(call: Call) -> Cost:
    """Q @ C or C @ Q from the reflectors of Q (L41 ormqr): 4mnk - 2k²·(m on the left, n on the right gives n, m)."""
    k, is_left = call.inputs[1].shape[-1], call.argument("left")
    return _batched(call, lambda m, n: 4 * m * n * k - 2 * k**2 * (n if is_left else m), position=2)


@rule(aten.linalg_lstsq)
def lstsq(call: Call) -> Cost:
    """By QR: factor, apply Q^T to each right side (4mn - 2n²) and substitute back (n²)."""
    *batch, m, n = call.inputs[0].shape
    right_sides = call.inputs[1].numel // max(m * prod(batch), 1)
    each = 4 * m * n - 2 * min(m, n) ** 2 + min(m, n) ** 2
    return _batched(call, lambda m, n: qr_flops(m, n) + each * right_sides)


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
    return _library(call, passes * call.inputs[position].shape[-1] * call.outputs[0].numel)


@rule(aten._linalg_solve_ex)
def solve_ex(call: Call) -> Cost:
    """Factor each matrix, then two triangular passes for each right side."""
    *batch, n, _ = call.argument("A").shape
    return _library(call, prod(batch) * lu_flops(n, n) + 2 * n * call.outputs[0].numel)


@rule(aten._linalg_check_errors)
def check_errors(call: Call) -> Cost:
    """One status per matrix copied to the host, which waits for it."""
    (info,) = call.inputs
    return make_cost(call, MOVEMENT, written=(Region(None, info.nbytes),))


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


def _batched(call: Call, flops: Callable[[int, int], int], *, position: int = 0) -> Cost:
    """The given operations for each m x n matrix of the operand at that position."""
    *batch, m, n = call.inputs[position].shape
    return _library(call, prod(batch) * flops(m, n))


def _library(call: Call, flops: int) -> Cost:
    return make_cost(call, CONTRACTION, flops, fused_multiply_add=True)
