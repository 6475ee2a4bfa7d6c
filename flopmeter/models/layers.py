"""Parts that several built-in models share: attention, MLP, the block of both, positions, the next-token loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # the target index that F.cross_entropy leaves out


class SelfAttention(nn.Module):
    """Multi-head self-attention, [batch, length, width] -> same; one matmul for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.heads, self.head_width, self.causal = heads, width // heads, causal
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4).unbind()
        context = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(context.transpose(1, 2).flatten(2))


class MLP(nn.Sequential):
    """Linear, GELU, Linear. `approximate` is F.gelu's: "none" (erf) or "tanh"."""

    def __init__(self, width: int, hidden: int, approximate: str = "none") -> None:
        super().__init__(nn.Linear(width, hidden), nn.GELU(approximate), nn.Linear(hidden, width))


class PreNormBlock(nn.Module):
    """Attention, then an MLP of four times the width, each behind a LayerNorm and beside a residual connection."""

    def __init__(
        self, width: int, heads: int, *, epsilon: float = 1e-5, causal: bool = False, approximate: str = "none"
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, epsilon)
        self.attention = SelfAttention(width, heads, causal)
        self.norm2 = nn.LayerNorm(width, epsilon)
        self.mlp = MLP(width, 4 * width, approximate)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def positions_of(tokens: Tensor, limit: int) -> Tensor:
    """0, 1, .. for tokens [batch, length]; an error past the last position, since on meta no look-up fails."""
    length = tokens.shape[1]
    if length > limit:
        raise ValueError(f"the model has {limit} positions, the input {length} tokens")
    return torch.arange(length, device=tokens.device)


def next_token_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy of each token given those before it; the last position has no target.

    The targets are shifted, not the logits: a slice of [batch, length, vocabulary] would be copied whole.
    """
    targets = F.pad(tokens, (0, 1), value=IGNORED)[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED)
