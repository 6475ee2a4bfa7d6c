"""Factorizations wait for themselves: a column needs what the columns before it have become."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from costs_support import meta
from torch import Tensor

from flopmeter import FlopMeter, Report, load_hardware

H100 = "h100-sxm5-80gb"


def metered(run: Callable[[], object], hardware: str = H100) -> Report:
    with torch.inference_mode(), FlopMeter(hardware) as meter:
        run()
    return meter.report()


def square(*batch: int, size: int = 1024) -> Tensor:
    return torch.empty(*batch, size, size, device="meta")


# By LAPACK's own loops. A reflector: the norm and the scaling of larfg, gemv and ger of larf; geqr2 makes one for each
# column, org2r applies them in turn. getf2: a pivot, then scaling and update. potrf: 16 blocks of 64, each factored,
# solved with and taken off the rest; so are those of reflectors that ormqr applies. gehd2: a reflector, applied from
# either side. trsm and each of trtri and lauum in passes: a block, and the rest. latrd has seven matrix-vector products
# a column and four calls on vectors.
@pytest.mark.parametrize(
    ("run", "kernels"),
    [
        (lambda: torch.linalg.qr(square()), 8 * 1024),
        (lambda: torch.linalg.qr(square(), mode="r"), 4 * 1024),
        (lambda: torch.linalg.qr(torch.empty(4096, 128, device="meta")), 8 * 128),
        (lambda: torch.linalg.eigh(square()), 11 * 1024),
        (lambda: torch.linalg.lu_factor_ex(square()), 2 * 1024),
        (lambda: torch.linalg.cholesky_ex(square()), 3 * 16),
        (lambda: torch.linalg.solve_triangular(square(), square(), upper=True), 2 * 16),
        (lambda: torch.linalg.solve_ex(square(), square()), 2 * 1024 + 4 * 16),
        (lambda: torch.linalg.eigh(square(6, size=100)), 6 * 11 * 100),
        (lambda: torch.linalg.eigh(square(6, size=32)), 11 * 32),
        (lambda: torch.linalg.lu_factor_ex(square(6, size=100)), 2 * 100),
        (lambda: torch.linalg.eigvals(square(2, size=100)), 2 * 6 * 100),
        (lambda: torch.linalg.householder_product(square(), torch.empty(512, device="meta")), 4 * 512),
        (lambda: torch.ormqr(square(), torch.empty(512, device="meta"), square()), 3 * 8),
        (lambda: torch.linalg.lstsq(square(), square()), 4 * 1024 + 2 * 16),
        (lambda: torch.linalg.inv_ex(square()), 2 * 1024 + 4 * 16),
        (lambda: torch.cholesky_inverse(square()), 4 * 16),
    ],
)
def test_as_many_kernels_wait_for_each_other_as_lapack_makes_calls(run: Callable[[], object], kernels: int) -> None:
    """Matrices of a batch one after another where torch loops over them (QR, symmetric eigenvalues), together where it
    calls a batched routine."""
    report = metered(run)
    told = [note for note in report.notes if note.startswith(f"factorizations and solves: {kernels:,} kernels")]
    assert len(told) == 1
    assert report.seconds > kernels * 1.3e-6, "what a kernel of an H100 takes to start and end"


def test_a_taller_matrix_has_as_long_a_chain_and_a_wider_one_a_longer_one() -> None:
    base, taller, wider = (
        metered(lambda rows=rows, columns=columns: torch.linalg.qr(torch.empty(rows, columns, device="meta"), mode="r"))
        for rows, columns in ((2048, 256), (4096, 256), (2048, 512))
    )
    assert taller.seconds < 1.1 * base.seconds
    assert wider.seconds == pytest.approx(2 * base.seconds, rel=0.1)


def test_many_small_matrices_take_as_long_as_one_after_another() -> None:
    one, many = (metered(lambda n=n: torch.linalg.eigh(square(n, size=100))).kernel_seconds for n in (1, 500))
    assert many == pytest.approx(500 * one, rel=0.05)


@pytest.mark.parametrize("run", [lambda: square() @ square(), lambda: torch.fft.fft(square())])
def test_products_and_transforms_wait_for_nothing(run: Callable[[], object]) -> None:
    assert not any("one after another" in note for note in metered(run).notes)


def test_a_report_says_that_the_chain_is_what_takes_long() -> None:
    report = on_host(0.1, lambda: torch.linalg.qr(square()))
    assert report.regime == "overhead"
    assert "8,192 kernels one after another, which take longer to start than to work" in str(report)


def test_a_slow_host_keeps_the_device_waiting_in_a_chain() -> None:
    """8,191 further launches of 3.3 µs; the device needs 12.7 ms for them, in which it is not idle."""
    report = metered(lambda: torch.linalg.qr(square()))
    assert report.seconds == pytest.approx(8191 * 3.3e-6, rel=0.01)
    assert report.idle_seconds == pytest.approx(report.seconds - report.kernel_seconds)
    assert "the device waits for the host" in str(report)


def on_host(relative_time: float, run: Callable[[], object]) -> Report:
    hardware = load_hardware(H100)
    host = dataclasses.replace(hardware.host, relative_time=relative_time)
    with torch.inference_mode(), FlopMeter(dataclasses.replace(hardware, host=host)) as meter:
        run()
    return meter.report()


def test_the_host_launches_each_kernel_of_a_chain_and_the_device_waits_for_a_slow_one() -> None:
    """By hand: a launch adds 6.5 - 3.2 µs to an op that launches none; QR of 1,024 columns launches 8,192 kernels.
    The device begins with the first of them, so that the longer of the two chains counts, not their sum."""
    quick, slow = (on_host(relative, lambda: torch.linalg.qr(square())) for relative in (0.01, 4.0))
    for report, relative in ((quick, 0.01), (slow, 4.0)):
        assert report.launch_seconds == pytest.approx(relative * (8191 * 3.3e-6 + 6.5e-6), rel=0.01)
    assert quick.seconds < 1.01 * quick.kernel_seconds
    assert slow.seconds == pytest.approx(slow.launch_seconds, rel=0.01)


def test_what_follows_a_chain_is_sent_when_all_of_it_is() -> None:
    x = torch.empty(8, device="meta")
    alone, followed = (on_host(4.0, run) for run in (
        lambda: torch.linalg.qr(square()),
        lambda: (torch.linalg.qr(square()), x + 1),
    ))  # fmt: skip
    assert followed.launch_seconds - alone.launch_seconds == pytest.approx(4 * 6.5e-6, rel=0.01)
    assert followed.seconds > alone.seconds


@pytest.mark.parametrize(
    ("program", "count"),
    [
        (lambda: torch.linalg.svdvals(meta(6, 4)), 4 * 6 * 4**2 - 4 * 4**3 // 3),
        (lambda: torch.linalg.svdvals(meta(4, 6)), 4 * 6 * 4**2 - 4 * 4**3 // 3),
        (lambda: torch.linalg.svd(meta(6, 4), full_matrices=False), 14 * 6 * 4**2 + 8 * 4**3),
        (lambda: torch.linalg.svd(meta(4, 6), full_matrices=True), 4 * 6**2 * 4 + 8 * 6 * 4**2 + 9 * 4**3),
        (lambda: torch.linalg.eigvalsh(meta(3, 5, 5)), 3 * (4 * 5**3 // 3)),
        (lambda: torch.linalg.eigh(meta(5, 5)), 9 * 5**3),
        (lambda: torch.linalg.lu_factor(meta(6, 4)), 6 * 4**2 - 4**3 // 3),
        (lambda: torch.linalg.lu_factor(meta(4, 6)), 6 * 4**2 - 4**3 // 3),
        (lambda: torch.linalg.qr(meta(6, 4), mode="r"), 2 * 6 * 4**2 - 2 * 4**3 // 3),
    ],
)
def test_factorizations_take_the_flops_of_their_textbooks_and_the_longer_side_may_be_either(program, count):
    """Golub and Van Loan, 'Matrix Computations', figure 8.6.1 and section 8.3; LAPACK Working Note 41."""
    assert sum(kernel.cost.flops for kernel in metered(program).kernels) == count
