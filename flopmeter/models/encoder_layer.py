"""The encoder layer of 'Data Movement Is All You Need' (Ivanov et al., MLSys 2021, arXiv 2007.00072).

It is nn.TransformerEncoderLayer(1024, 16, dim_feedforward=4096, dropout=0.1, activation="relu"), post-norm, which the
paper ran in fp16 with batch 8 and length 512: 12,596,224 parameters. Each of the 19 forward rows of its Table A.1 is
one CUDA kernel here, except the scaled softmax (scale, softmax, dropout): attention is not fused, queries, keys and
values come from one matmul, and a bias is a kernel of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class MatmulThenBias(nn.Module):
    """x @ weight + bias as two kernels, where nn.Linear would be one."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_in, width_out) / math.sqrt(width_in))
        self.bias = nn.Parameter(torch.zeros(width_out))

    def forward(self, x: Tensor) -> Tensor:
        result = x @ self.weight
        return result + self.bias


class MaterialisedAttention(nn.Module):
    """Multi-head self-attention that writes every intermediate to memory.

    The matmul for queries, keys and values has tokens as columns: its rows are [3, head width, heads], its columns
    [batch, length] (the paper's layout, 'phbj'). So heads and batch are adjacent dimensions, and the batched matmuls
    read q, k and v without a copy. Only the merge of the heads copies, since bmm's output is contiguous.
    """

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.scale = 1 / math.sqrt(width // heads)
        self.qkv_weight = nn.Parameter(torch.randn(3 * width, width) / math.sqrt(width))
        self.qkv_bias = nn.Parameter(torch.zeros(3 * width, 1))
        self.out = MatmulThenBias(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv_weight @ x.flatten(0, 1).T
        qkv = qkv + self.qkv_bias
        q, k, v = qkv.view(3, -1, self.heads * batch, length).unbind()  # each [head width, heads * batch, length]
        scores = torch.bmm(q.permute(1, 2, 0), k.transpose(0, 1))
        weights = F.softmax(scores * self.scale, dim=-1)
        weights = F.dropout(weights, self.dropout, self.training)
        context = torch.bmm(weights, v.permute(1, 2, 0))
        merged = context.view(self.heads, batch, length, -1).permute(1, 2, 0, 3).reshape(x.shape)
        return self.out(merged)


class EncoderLayer(nn.Module):
    """Post-norm transformer encoder layer, [batch, length, width] -> same."""

    def __init__(self, width: int = 1024, heads: int = 16, hidden: int = 4096, dropout: float = 0.1) -> None:
        super().__init__()
        self.dropout = dropout
        self.attention = MaterialisedAttention(width, heads, dropout)
        self.norm1 = nn.LayerNorm(width)
        self.linear1 = MatmulThenBias(width, hidden)
        self.linear2 = MatmulThenBias(hidden, width)
        self.norm2 = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + F.dropout(self.attention(x), self.dropout, self.training))
        hidden = F.relu(self.linear1(x))
        hidden = F.dropout(hidden, self.dropout, self.training)
        return self.norm2(x + F.dropout(self.linear2(hidden), self.dropout, self.training))
