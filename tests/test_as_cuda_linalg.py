"""A metered program decomposes matrices as it does unmetered: values alone where nothing asks for vectors."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from as_cuda_stream import Stream, f32
from torch import Tensor
from torch.autograd import forward_ad

from flopmeter import FlopMeter
from flopmeter.as_cuda import CudaTarget, emulate_cuda

A100 = CudaTarget((8, 0))
PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "eigvalsh": torch.linalg.eigvalsh,
    "eigvalsh of the upper triangle": lambda x: torch.linalg.eigvalsh(x, UPLO="U"),
    "svdvals": torch.linalg.svdvals,
    "eigvals": torch.linalg.eigvals,
    "matrix_norm(2)": lambda x: torch.linalg.matrix_norm(x, 2),
    "matrix_norm(nuc)": lambda x: torch.linalg.matrix_norm(x, "nuc"),
    "cond": torch.linalg.cond,
    "matrix_rank": torch.linalg.matrix_rank,
    "matrix_rank of a symmetric matrix": lambda x: torch.linalg.matrix_rank(x, hermitian=True),
}


def symmetric(n: int) -> Tensor:
    matrix = torch.randn(n, n, generator=torch.Generator().manual_seed(0))
    return matrix + matrix.T


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_metering_changes_no_bit_of_a_decomposition_on_the_cpu(name: str, mode: Callable[[], torch.no_grad]) -> None:
    matrix = symmetric(40)
    with mode():
        unmetered = PROGRAMS[name](matrix)
        with FlopMeter("h100-sxm5-80gb"):
            metered = PROGRAMS[name](matrix)
    assert torch.equal(metered, unmetered)


def arguments(program: Callable[[], Tensor], name: str) -> list[bool]:
    """Of each call of aten.`name`: whether it asks for vectors."""
    asks = []

    class Asked(Stream):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.name().partition(".")[0] == f"aten::{name}":
                asks.append(args[2] if len(args) > 2 else True)
            return super().__torch_dispatch__(func, types, args, kwargs)

    with emulate_cuda(A100), Asked():
        program()
    return asks


def test_vectors_are_computed_where_a_gradient_needs_them_and_only_there() -> None:
    weight = f32(64, 64)
    assert arguments(lambda: torch.linalg.svdvals(weight), "_linalg_svd") == [True]
    assert arguments(lambda: torch.linalg.eigvalsh(weight), "_linalg_eigh") == [True]
    with torch.no_grad():
        assert arguments(lambda: torch.linalg.svdvals(weight), "_linalg_svd") == [False]
        assert arguments(lambda: torch.linalg.cond(weight), "_linalg_svd") == [False]
        assert arguments(lambda: torch.linalg.eigvalsh(weight), "_linalg_eigh") == [False]
    with emulate_cuda(A100):
        torch.linalg.svdvals(weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.shape == weight.shape


def test_a_forward_gradient_needs_vectors_too() -> None:
    matrix = symmetric(8)
    expected = _derivative_of_the_eigenvalues(matrix)
    with emulate_cuda(A100), Stream() as stream:
        assert torch.equal(_derivative_of_the_eigenvalues(matrix), expected)
    assert "_linalg_eigh" in stream.names


def _derivative_of_the_eigenvalues(matrix: Tensor) -> Tensor:
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(matrix, torch.ones_like(matrix))
        tangent = forward_ad.unpack_dual(torch.linalg.eigvalsh(dual)).tangent
    assert tangent is not None
    return tangent


def test_values_alone_cost_what_the_textbook_says() -> None:
    """Golub and Van Loan, 4th edition: eigenvalues 4/3 n^3 (8.3.1), singular values 8/3 n^3 for a square (8.6)."""
    matrix = f32(300, 300, grad=False)
    assert flops(lambda: torch.linalg.eigvalsh(matrix)) == pytest.approx(4 / 3 * 300**3, rel=0.01)
    assert flops(lambda: torch.linalg.svdvals(matrix)) == pytest.approx(8 / 3 * 300**3, rel=0.01)


def flops(program: Callable[[], Tensor]) -> int:
    with FlopMeter("h100-sxm5-80gb") as meter:
        program()
    return meter.report().flops


def test_standing_before_these_ops_warns_of_nothing_and_leaves_nothing() -> None:
    matrix = symmetric(8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with emulate_cuda(A100):
            torch.linalg.eigvalsh(matrix)
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("aten::linalg_eigvalsh", "AutogradCPU")


@pytest.mark.parametrize(
    ("matrix", "right"),
    [((9, 6), (9, 2)), ((5, 9, 6), (5, 9, 2)), ((5, 9, 6), (5, 9)), ((9, 6), (9,)), ((6, 6), (6, 1)), ((4, 6), (4, 2))],
)
def test_least_squares_has_the_shapes_of_the_driver_that_cuda_has(matrix, right):
    def solved(device, **driver):
        results = torch.linalg.lstsq(torch.randn(matrix, device=device), torch.randn(right, device=device), **driver)
        return [(tuple(result.shape), result.dtype) for result in results]

    with FlopMeter("a100-sxm4-80gb"):
        assert solved("meta") == solved("cpu", driver="gels")
        with pytest.raises(RuntimeError, match="should be one of \\(gels\\)"):
            solved("meta", driver="gelsd")
