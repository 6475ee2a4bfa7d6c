"""Decompositions from which a program uses only the values (eigenvalues, singular values).

Torch does not compute the vectors if no gradient needs them. Under a dispatch mode it cannot tell, since every tensor
might be a subclass (`_may_require_fw_or_bw_grad` in aten/src/ATen/TensorSubclassLikeUtils.h), and computes them anyway.
Those are other kernels than the program runs without a meter, and on CPU tensors the last bits differ. Here the tensors
themselves decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flopmeter.as_cuda.emulation import Emulation
from flopmeter.torch_names import dispatcher
from flopmeter.torch_names.around import around
from flopmeter.torch_names.operators import aten_overloads


def install(scope: Emulation) -> None:
    """Installs it for tensors on meta and on the CPU (a program may use the values of the latter). matrix_norm, cond
    and matrix_rank call these ops. Under vmap and torch.func.grad torch computes the vectors without a mode too."""
    for name, values in VALUES_ONLY.items():
        op = dispatcher.overload(name)
        if op is None:
            continue
        kernel = scope.overrides[op] = _where_no_gradient_is_needed(op, values)
        for key in ("AutogradMeta", "AutogradCPU"):
            scope.kernel(op.name(), kernel, key)
    scope.meta_kernel("aten::linalg_lstsq", least_squares)


def least_squares(
    matrix: Tensor, right: Tensor, rcond: float | None = None, *, driver: str | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """By CUDA's only driver, gels, which takes every rank to be full: no rank and no singular values come back, and
    squared residuals where there are more rows than columns (torch.linalg.lstsq)."""
    if driver not in (None, "gels"):
        raise RuntimeError(f"torch.linalg.lstsq: parameter `driver` should be one of (gels) on CUDA, not {driver}")
    *batch, rows, columns = matrix.shape
    sides = list(right.shape[len(batch) + 1 :])  # none if each right side is a vector
    residuals = [*batch, *(sides or [1])] if rows > columns else [0]
    solution = right.new_empty([*batch, columns, *sides])
    return solution, right.new_empty(residuals), matrix.new_empty([0], dtype=torch.int64), matrix.new_empty([0])


@around
def _where_no_gradient_is_needed(
    op: Any, values: Callable[..., Tensor], matrix: Tensor, *args: Any, **kwargs: Any
) -> Any:
    if _may_need_a_gradient(matrix):
        return dispatcher.decompose(op, matrix, *args, **kwargs)
    return values(matrix, *args, **kwargs)


def _may_need_a_gradient(matrix: Tensor) -> bool:
    """Whether a gradient may be needed, backward or forward; a subclass may need one."""
    if type(matrix) not in (torch.Tensor, torch.nn.Parameter):
        return True
    return (torch.is_grad_enabled() and matrix.requires_grad) or forward_ad.unpack_dual(matrix).tangent is not None


VALUES_ONLY: dict[str, Callable[..., Tensor]] = {
    "linalg_eigvalsh": lambda matrix, UPLO="L": aten_overloads._linalg_eigh.default(matrix, UPLO, False)[0],  # noqa: N803
    "linalg_svdvals": lambda matrix, **driver: aten_overloads._linalg_svd.default(matrix, False, False, **driver)[1],
    "linalg_eigvals": aten_overloads._linalg_eigvals.default,
}
