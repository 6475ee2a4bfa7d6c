"""BERT with its masked-language-model head (Devlin et al. 2018, arXiv 1810.04805).

Post-norm encoder, exact GELU, learned positions, segment embeddings, output weights tied to the token embedding,
as in github.com/google-research/bert. Sizes: base 12 layers of 768, 12 heads (109,514,298 parameters);
large 24 layers of 1024, 16 heads (335,174,458).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from flopmeter.models.layers import positions_of


@dataclass(frozen=True)
class BertConfig:
    layers: int
    width: int
    heads: int
    vocabulary: int = 30522
    positions: int = 512
    dropout: float = 0.1

    @property
    def hidden(self) -> int:
        return 4 * self.width


BERT_BASE = BertConfig(layers=12, width=768, heads=12)
BERT_LARGE = BertConfig(layers=24, width=1024, heads=16)
NORM_EPSILON = 1e-12


class Embeddings(nn.Module):
    """Token + position + segment, normalized."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.positions, config.width)
        self.segment = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width, NORM_EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        positions = positions_of(tokens, self.position.num_embeddings)
        x = self.token(tokens) + self.position(positions) + self.segment(segments)
        return self.dropout(self.norm(x))


class Attention(nn.Module):
    """Bidirectional self-attention with three matmuls for queries, keys and values, as in the original code."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.heads, config.dropout
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            linear(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.query, self.key, self.value)
        )
        context = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout if self.training else 0.0)
        return self.out(context.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Post-norm: the sum of residual and branch is normalized."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.width, NORM_EPSILON)
        self.up = nn.Linear(config.width, config.hidden)
        self.down = nn.Linear(config.hidden, config.width)
        self.norm2 = nn.LayerNorm(config.width, NORM_EPSILON)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(self.attention(x)))
        return self.norm2(x + self.dropout(self.down(F.gelu(self.up(x)))))


class Bert(nn.Module):
    """tokens, segments [batch, length] -> logits [batch, length, vocabulary]."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.transform = nn.Linear(config.width, config.width)
        self.norm = nn.LayerNorm(config.width, NORM_EPSILON)
        self.decoder = nn.Linear(config.width, config.vocabulary)
        self.decoder.weight = self.embeddings.token.weight

    def forward(self, tokens: Tensor, segments: Tensor) -> Tensor:
        x = self.embeddings(tokens, segments)
        for block in self.blocks:
            x = block(x)
        return self.decoder(self.norm(F.gelu(self.transform(x))))

    def loss(self, tokens: Tensor, segments: Tensor) -> Tensor:
        """Cross-entropy at every position: unmasked positions are ignored by index and cost the same."""
        return F.cross_entropy(self(tokens, segments).flatten(0, 1).float(), tokens.flatten())
