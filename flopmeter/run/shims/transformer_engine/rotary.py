"""Rotary embeddings (transformer_engine/pytorch/attention/rope.py, common/fused_rope): one kernel each way, which takes
sin and cos of the angles itself."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, Call, Cost
from flopmeter.run.shims.flash_attn.rotary import Rotation
from flopmeter.run.shims.kernel import kernel
from flopmeter.run.shims.transformer_engine.base import refuse


def _cost(call: Call) -> Cost:
    """Two products and a sum for each element that is rotated."""
    x, angles = call.inputs[:2]
    rotated = x.numel // x.shape[-1] * angles.shape[-1]
    used = min(angles.numel, x.numel // x.shape[-2])
    return make_cost(call, ELEMENTWISE, 3 * rotated, transcendentals=2 * used)


@kernel("te_rotary", _cost)
def _rotate(x: Tensor, angles: Tensor, starts: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def apply_rotary_pos_emb(
    t: Tensor,
    freqs: Tensor,
    tensor_format: str = "sbhd",
    start_positions: Tensor | None = None,
    interleaved: bool = False,
    fused: bool = False,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
) -> Tensor:
    """`t` ends in heads and head size; `freqs` are [length, 1, 1, what is rotated]. (The way that is not fused has the
    kernel's shapes too.)"""
    refuse({"start_positions": start_positions is not None})
    return Rotation.apply(_rotate, t, freqs, cu_seqlens)


class RotaryPositionEmbedding(nn.Module):
    """The angles."""

    inv_freq: Tensor

    def __init__(
        self,
        dim: int,
        rotary_percent: float = 1.0,
        seq_len_interpolation_factor: int | None = None,
        pretrained_max_position_embeddings: int | None = None,
        rotary_base: float = 10000.0,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        dim = int(dim * rotary_percent) if rotary_percent < 1 else dim
        steps = torch.arange(0, dim, 2, dtype=torch.float32, device=torch.cuda.current_device())
        self.register_buffer("inv_freq", 1.0 / rotary_base ** (steps / dim))

    def forward(self, max_seq_len: int, offset: int = 0) -> Tensor:
        positions = torch.arange(max_seq_len, device=self.inv_freq.device, dtype=torch.float32) + offset
        angles = torch.outer(positions, self.inv_freq)
        return torch.cat((angles, angles), dim=-1)[:, None, None, :]
