"""A head for language models that transformers has without one, such as those of Qwen2.5-VL and GLM-4.1V."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Headed(nn.Module):
    """The base model with the projection to the vocabulary that the whole model of images or sound puts on it."""

    def __init__(self, language: Any):
        super().__init__()
        self.language = language
        self.config = config = language.config
        with torch.device("meta"):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False, dtype=language.dtype)
        if config.tie_word_embeddings:
            self.lm_head.weight = language.get_input_embeddings().weight

    @property
    def dtype(self) -> torch.dtype:
        return self.language.dtype

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def forward(self, input_ids: Tensor, use_cache: bool, logits_to_keep: int, **cache: Any) -> SimpleNamespace:
        """`logits` [batch, logits_to_keep, vocabulary] of token ids [batch, new]."""
        out = self.language(input_ids=input_ids, use_cache=use_cache, **cache)
        return SimpleNamespace(logits=self.lm_head(out.last_hidden_state[:, -logits_to_keep:]))
