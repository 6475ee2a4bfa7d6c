"""Sparse tensors: coordinates (COO), or compressed by rows or columns (CSR and CSC; BSR and BSC of blocks)."""

from __future__ import annotations

import torch
from torch import Tensor

COMPRESSED = (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc)


def pointers_and_indices(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Where each row or column of a compressed tensor begins, and the columns or rows of its values."""
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()


def held_values(tensor: Tensor) -> int | None:
    """How many values a sparse tensor holds; None for tensors of other layouts."""
    if tensor.layout is torch.sparse_coo:
        return tensor._values().numel()
    return tensor.values().numel() if tensor.layout in COMPRESSED else None
