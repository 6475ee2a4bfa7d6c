"""Llama 2 and 3 (Touvron et al. 2023, arXiv 2307.09288; Llama team 2024, arXiv 2407.21783).

Pre-norm decoder without biases: RMSNorm, rotary positions (halves rotated, as in Hugging Face's weights), grouped
queries, SwiGLU. Sizes: Llama-2-7B 6,738,415,616 parameters; Llama-3-8B 8,030,261,248; 70B 70,553,706,496;
405B 405,853,388,800.
Llama 3.1's rescaling of the rotary frequencies changes values, not work, and is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.models.layers import next_token_loss


@dataclass(frozen=True)
class LlamaConfig:
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int = 128256
    rotary_base: float = 500_000.0
    norm_epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        return self.width // self.heads


LLAMA_2_7B = LlamaConfig(32, 4096, heads=32, kv_heads=32, hidden=11008, vocabulary=32000, rotary_base=10_000.0)
LLAMA_3_8B = LlamaConfig(32, 4096, heads=32, kv_heads=8, hidden=14336)
LLAMA_3_70B = LlamaConfig(80, 8192, heads=64, kv_heads=8, hidden=28672)
LLAMA_3_405B = LlamaConfig(126, 16384, heads=128, kv_heads=8, hidden=53248)
LLAMAS = {"llama-2-7b": LLAMA_2_7B, "llama-3-8b": LLAMA_3_8B, "llama-3-70b": LLAMA_3_70B, "llama-3-405b": LLAMA_3_405B}


def rotary_table(length: int, width: int, base: float, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, width] of position * base^(-2i/width): fp32, then cast to `like`'s dtype."""
    frequencies = base ** (-torch.arange(0, width, 2, device=like.device, dtype=torch.float32) / width)
    angles = torch.outer(torch.arange(length, device=like.device, dtype=torch.float32), frequencies).repeat(1, 2)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + width/2) of x [..., length, width] by its angle."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention in which `heads / kv_heads` query heads share a key and a value head. The number of heads
    follows from the widths of the matmuls, so that a rank of tensor parallelism has its part of them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.heads, config.kv_heads, config.head_width
        self.query = nn.Linear(config.width, config.heads * config.head_width, bias=False)
        self.key = nn.Linear(config.width, config.kv_heads * config.head_width, bias=False)
        self.value = nn.Linear(config.width, config.kv_heads * config.head_width, bias=False)
        self.out = nn.Linear(config.heads * config.head_width, config.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        v = self.value(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.heads != self.kv_heads
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(context.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.norm1 = nn.RMSNorm(config.width, config.norm_epsilon)
        self.attention = Attention(config)
        self.norm2 = nn.RMSNorm(config.width, config.norm_epsilon)
        self.mlp = SwiGLU(config.width, config.hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x), cos, sin)
        return x + self.mlp(self.norm2(x))


class Llama(nn.Module):
    """tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, config.norm_epsilon)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens)
        cos, sin = rotary_table(tokens.shape[1], self.config.head_width, self.config.rotary_base, like=x)
        for block in self.blocks:
            x = block(x, cos, sin)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self(tokens), tokens)

    def tensor_parallel(self) -> dict[str, Any]:
        """For torch's `parallelize_module`: products by columns, then by rows; between them the sequence is split, as
        in torchtitan and Megatron-LM (arXiv 2205.05198). The loss runs in `loss_parallel()`."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as tp

        whole, split = Replicate(), Shard(1)
        products: dict[str, Any] = {f"attention.{name}": tp.ColwiseParallel() for name in ("query", "key", "value")}
        products |= {f"mlp.{name}": tp.ColwiseParallel() for name in ("gate", "up")}
        products |= {name: tp.RowwiseParallel(output_layouts=split) for name in ("attention.out", "mlp.down")}
        inputs = tp.PrepareModuleInput(input_layouts=(split, None, None), desired_input_layouts=(whole, None, None))
        block = {
            "norm1": tp.SequenceParallel(),
            "attention": inputs,
            "norm2": tp.SequenceParallel(),
            "mlp": tp.PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,)),
            **products,
        }
        return {
            "token": tp.RowwiseParallel(input_layouts=whole, output_layouts=split),
            **{f"blocks.*.{name}": style for name, style in block.items()},
            "norm": tp.SequenceParallel(),
            "head": tp.ColwiseParallel(input_layouts=split, use_local_output=False),
        }
