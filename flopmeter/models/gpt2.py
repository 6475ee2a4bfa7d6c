"""GPT-2 (Radford et al. 2019; github.com/openai/gpt-2) as in github.com/karpathy/nanoGPT, without dropout.

Pre-norm decoder, tanh GELU, learned positions, output weights tied to the token embedding.
Sizes: 124M, 355M, 774M and 1.5B parameters (124,439,808; 354,823,168; 774,030,080; 1,557,611,200).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flopmeter.models.layers import PreNormBlock, next_token_loss, positions_of


@dataclass(frozen=True)
class GPT2Config:
    layers: int
    width: int
    heads: int
    vocabulary: int = 50257
    positions: int = 1024


GPT2_124M = GPT2Config(layers=12, width=768, heads=12)
GPT2_355M = GPT2Config(layers=24, width=1024, heads=16)
GPT2_774M = GPT2Config(layers=36, width=1280, heads=20)
GPT2_1558M = GPT2Config(layers=48, width=1600, heads=25)


class GPT2(nn.Module):
    """tokens [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(
            PreNormBlock(config.width, config.heads, causal=True, approximate="tanh") for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        positions = positions_of(tokens, self.position.num_embeddings)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def loss(self, tokens: Tensor) -> Tensor:
        return next_token_loss(self(tokens), tokens)

    def tensor_parallel(self) -> dict[str, Any]:
        """For torch's `parallelize_module`: as Llama's. The columns of the one matmul for queries, keys and values are
        assumed to be ordered by rank, as in Megatron-LM. The head's weights are then no longer those of the
        embedding."""
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor import parallel as tp

        whole, split = Replicate(), Shard(1)
        gathered = tp.PrepareModuleInput(input_layouts=(split,), desired_input_layouts=(whole,))
        scattered = tp.RowwiseParallel(output_layouts=split)
        block = {
            "norm1": tp.SequenceParallel(),
            "attention": gathered,
            "attention.qkv": tp.ColwiseParallel(),
            "attention.out": scattered,
            "norm2": tp.SequenceParallel(),
            "mlp": gathered,
            "mlp.0": tp.ColwiseParallel(),
            "mlp.2": scattered,
        }
        return {
            "token": tp.RowwiseParallel(input_layouts=whole, output_layouts=split),
            "position": tp.RowwiseParallel(input_layouts=whole, output_layouts=Shard(0)),
            **{f"blocks.*.{name}": style for name, style in block.items()},
            "norm": tp.SequenceParallel(),
            "head": tp.ColwiseParallel(input_layouts=split, use_local_output=False),
        }
