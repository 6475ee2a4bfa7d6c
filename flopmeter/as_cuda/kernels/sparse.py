"""Sparse tensors on meta, as gradients and as the adjacency of a graph. Torch's own kernels lose indices and values,
read memory that does not exist, or are missing. `_COMPRESSED` is the key of CSR, CSC, BSR and BSC."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flopmeter.as_cuda.emulation import DispatcherKernel, Emulation
from flopmeter.records.sparse_layouts import held_values

aten = torch.ops.aten
_KEY, _COMPRESSED = "SparseMeta", "SparseCsrMeta"
MADE_OF_PARTS = ("aten::_to_sparse",)  # recorded as the ops that their kernel on meta runs
_DISTINCT = "sparse gradients: the rows that coalesce() joins are not known, so as many are left as came in"
_NO_ELEMENTS = (
    "a sparse tensor without elements is multiplied: torch's own copy to meta drops them; copy it inside of the meter"
)


def install(scope: Emulation) -> None:
    """Replace the ops that embeddings with sparse=True and optimizers for sparse gradients call."""

    def coalesce(tensor: Tensor) -> Tensor:
        scope.note(_DISTINCT)
        return _sparse(tensor, tensor._indices().clone(), tensor._values().clone(), is_coalesced=True)

    def mm(left: Tensor, right: Tensor) -> Tensor:
        if not all(held_values(sparse) for sparse in (left, right) if sparse.layout is not torch.strided):
            scope.note(_NO_ELEMENTS)
        return product(left, right)

    def addmm(added: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
        return mm(left, right)

    kernels: dict[str, DispatcherKernel] = {
        "clone": clone, "_coalesce": coalesce, "sparse_mask": sparse_mask, "add.Tensor": add, "add_.Tensor": add_,
        "mm": mm, "addmm": addmm, "_to_dense": to_dense, "_to_sparse_csr": to_csr,
    }  # fmt: skip
    for name, kernel in kernels.items():
        scope.kernel(f"aten::{name}", kernel, _KEY)
    for name, kernel in (("mm", mm), ("addmm", addmm), ("mv", mm), ("addmv", addmm)):
        scope.kernel(f"aten::{name}", kernel, _COMPRESSED)
    for name, kernel in (("_to_sparse", of_dense), ("_to_sparse.sparse_dim", of_dense_with_sparse_dim)):
        scope.meta_kernel(f"aten::{name}", kernel)
    setattr(torch.Tensor, "new", _new)  # noqa: B010 (it is inherited)
    scope.on_close(delattr, torch.Tensor, "new")


def clone(tensor: Tensor, *, memory_format: torch.memory_format | None = None) -> Tensor:
    indices, values = tensor._indices().clone(), tensor._values().clone()
    return _sparse(tensor, indices, values, is_coalesced=tensor.is_coalesced())


def sparse_mask(tensor: Tensor, mask: Tensor) -> Tensor:
    """The elements of a tensor, dense or sparse itself, at the indices of `mask`."""
    values = torch.empty(mask._values().shape, dtype=tensor.dtype, device="meta")
    return _sparse(mask, mask._indices(), values, is_coalesced=mask.is_coalesced())


def add(tensor: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """Dense plus sparse is dense. The sum of two sparse tensors has the elements of both (SparseCUDATensorMath.cu)."""
    if not tensor.is_sparse:
        return torch.empty_like(tensor)
    indices = torch.cat([tensor._indices(), other._indices()], 1)
    values = torch.cat([tensor._values(), other._values()])
    return _sparse(tensor, indices, values, is_coalesced=False)


def add_(tensor: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    if tensor.is_sparse:
        aten.copy_sparse_to_sparse_(tensor, add(tensor, other))
    return tensor


def product(left: Tensor, right: Tensor) -> Tensor:
    """Sparse times dense is dense. A compressed tensor may stand on the right of a dense one (SparseBlasImpl.cpp)."""
    if right.is_sparse or torch.strided not in (left.layout, right.layout):
        raise NotImplementedError(
            "a matmul with a sparse tensor on its right has a result whose size depends on values, or needs another "
            "kernel: make that tensor dense (to_dense()), or transpose the matmul"
        )
    return torch.empty((left.size(0), *right.shape[1:]), dtype=right.dtype, device="meta")


def of_dense(
    tensor: Tensor,
    *,
    layout: torch.layout | None = None,
    blocksize: tuple[int, ...] | None = None,
    dense_dim: int | None = None,
) -> Tensor:
    """The elements of a dense tensor that are not zero, found and gathered as CUDA does (TensorConversions.cpp). What
    asks for their number has to know the values, or what share of them is taken to be true."""
    if layout not in (None, torch.sparse_coo) or dense_dim or not tensor.dim():
        raise NotImplementedError(
            "a dense tensor is made sparse in another layout than by all of its coordinates: make it so on the CPU, "
            "and move it, or call to_sparse() first"
        )
    places = tensor.nonzero().t().clone()
    values = tensor[tuple(places.chunk(len(places)))].squeeze(0).clone()
    return torch.sparse_coo_tensor(places, values, tensor.shape, is_coalesced=True, check_invariants=False)


def of_dense_with_sparse_dim(tensor: Tensor, sparse_dim: int) -> Tensor:
    return of_dense(tensor, dense_dim=tensor.dim() - sparse_dim)


def to_csr(tensor: Tensor, dense_dim: int | None = None) -> Tensor:
    """A pointer for each row, and the columns and values as they were."""
    rows = torch.empty(tensor.size(0) + 1, dtype=torch.int64, device="meta")
    return torch.sparse_csr_tensor(
        rows, tensor._indices()[1].clone(), tensor._values().clone(), tensor.shape, check_invariants=False
    )


def to_dense(tensor: Tensor, dtype: torch.dtype | None = None, masked_grad: bool | None = None) -> Tensor:
    return torch.empty(tensor.shape, dtype=dtype or tensor.dtype, device="meta")


def _sparse(like: Tensor, indices: Tensor, values: Tensor, *, is_coalesced: bool) -> Tensor:
    return aten._sparse_coo_tensor_with_dims_and_tensors(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )


_inherited_new = torch.Tensor.new


def _new(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """SparseAdam makes its updates by this old constructor, which does not support sparse tensors on meta."""
    if self.layout is torch.sparse_coo and self.is_meta and len(args) == 3:
        indices, values, size = args
        return torch.sparse_coo_tensor(indices, values, size, device=self.device, check_invariants=False)
    return _inherited_new(self, *args, **kwargs)
