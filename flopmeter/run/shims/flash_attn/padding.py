"""Rows that a mask names, and their places again (flash_attn/bert_padding.py, operators of torch)."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows that varlen attention takes, and what it needs to know of them."""
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices = kept.flatten().nonzero().flatten()
    lengths = kept.sum(-1, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, int(lengths.max().item()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:]).index_copy(0, indices, hidden_states)
    return padded.unflatten(0, (batch, seqlen))


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    return rows.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    return values.new_zeros(first_axis_dim, *values.shape[1:]).index_copy(0, indices, values)


def rearrange(tensor: Tensor, pattern: str, **sizes: int) -> Any:
    """einops' function, which flash-attn needs and imports here; OpenRLHF and verl take it from here."""
    return importlib.import_module("einops").rearrange(tensor, pattern, **sizes)


def repeat(tensor: Tensor, pattern: str, **sizes: int) -> Any:
    return importlib.import_module("einops").repeat(tensor, pattern, **sizes)
