"""Llama-2-7B of transformers as optimum-benchmark ran it: prefill, decoding, and steps of Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flopmeter import FlopMeter, Hardware

PROMPT = 256
RANK = 8  # of LoRA's matrices, peft's default, on the projections of queries and values


class LoRALinear(nn.Module):
    """peft's, in the type of the frozen weight, without dropout."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False, dtype=base.weight.dtype, device="meta")
        self.up = nn.Linear(RANK, base.out_features, bias=False, dtype=base.weight.dtype, device="meta")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base(x) + self.up(self.down(x)) * 1.0
        return out


def inference(device: Hardware, attention: str, batch: int, cached: int) -> FlopMeter:
    """A forward pass of a prompt, or of one token after `cached` ones.

    `attention` is 'eager attention', 'BetterTransformer' (SDPA, with a mask unless there is one sequence: optimum's
    bettertransformer/models/attention.py of November 2023) or 'FlashAttention-2'.
    """
    model = _model("eager" if attention == "eager attention" else "sdpa").eval()
    length = 1 if cached else PROMPT
    mask = None
    if attention == "BetterTransformer" and batch > 1:
        mask = torch.zeros(batch, 1, length, cached + length, dtype=torch.float16, device="meta")
    with torch.inference_mode():
        cache = model(input_ids=tokens(batch, cached), use_cache=True).past_key_values if cached else None
        with _kernel(attention), FlopMeter(device) as meter:
            options = {"past_key_values": cache, "use_cache": True} if cached else {"use_cache": False}
            logits = model(input_ids=tokens(batch, length), attention_mask=mask, **options).logits
            if not cached:
                logits.float()  # 4.35 did
    return meter


def _kernel(attention: str) -> AbstractContextManager[None]:
    return sdpa_kernel(SDPBackend.FLASH_ATTENTION) if attention == "FlashAttention-2" else nullcontext()


def training_step(device: Hardware, batch: int, *, lora: bool) -> FlopMeter:
    """A step of Trainer in pure fp16, with AdamW, clipping, and its look for NaN in the loss."""
    model = _model("eager").train()
    if lora:
        model.requires_grad_(False)
        for layer in model.model.layers:  # type: ignore[union-attr]
            projections = layer.self_attn
            projections.q_proj, projections.v_proj = LoRALinear(projections.q_proj), LoRALinear(projections.v_proj)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trained if (parameter.dim() > 1) == decays], "weight_decay": 0.0}
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]])
    step = _step(model, optimizer, trained, batch)
    for _ in range(2):  # the first one makes the optimizer's state
        with FlopMeter(device, checks="hold") as meter:
            step()
    return meter


def _step(
    model: nn.Module, optimizer: torch.optim.Optimizer, trained: list[nn.Parameter], batch: int
) -> Callable[[], None]:
    def step() -> None:
        ids = tokens(batch, PROMPT)
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad()

    return step


def tokens(batch: int, length: int) -> Tensor:
    return torch.zeros(batch, length, dtype=torch.long, device="meta")


def _model(attention: str) -> nn.Module:
    transformers = import_module("transformers")
    config = transformers.LlamaConfig(attn_implementation=attention, dtype=torch.float16)  # its defaults are the 7B's
    with torch.device("meta"):
        model: nn.Module = transformers.LlamaForCausalLM(config).to(torch.float16)
    return model
