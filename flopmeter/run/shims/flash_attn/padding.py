"""Rows that a mask names, and their places again (flash_attn/bert_padding.py, operators of torch)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def unpad_input(
    hidden: Tensor, mask: Tensor, unused: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows that varlen attention takes, and what it needs to know of them."""
    kept = mask if unused is None else mask + unused
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(-1, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden.flatten(0, 1), indices), indices, ends, int(lengths.max().item()), used


def pad_input(rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    padded = rows.new_zeros(batch * length, *rows.shape[1:]).index_copy(0, indices, rows)
    return padded.unflatten(0, (batch, length))


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    return rows.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def rearrange(tensor: Tensor, pattern: str, **sizes: int) -> Any:
    """einops' function, which flash-attn needs and imports here; OpenRLHF and verl take it from here."""
    return importlib.import_module("einops").rearrange(tensor, pattern, **sizes)


def repeat(tensor: Tensor, pattern: str, **sizes: int) -> Any:
    return importlib.import_module("einops").repeat(tensor, pattern, **sizes)
