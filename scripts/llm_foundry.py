"""MPT as llm-foundry trained it for its tables: the programs that its published throughput was measured on.

Facts are from github.com/mosaicml/llm-foundry (scripts/train/benchmarking, its yamls, llmfoundry/models) and
github.com/mosaicml/composer (core/precision.py, trainer, metrics/nlp.py) at the time of each table: April 2023 with
torch 1.13 for A100s of 40 GB, October 2023 with torch 2.1 for A100s of 80 GB and H100.

All have learned positions, biases, exact GELU, norms in bf16, flash-attn's cross entropy, and FlashAttention-1 written
in Triton. They run under autocast to bf16 (`bf16` meant this too), with parameters in bf16 from FSDP, so that there is
little to cast. After each micro-batch Composer updates two metrics, cross entropy and perplexity. Each of them is a
cross entropy of torch over all logits: a log softmax in bf16 and, for the loss under autocast, a cast of it to fp32.

Before torch 2.1 recomputation of a block went on to its end; now it stops at the last tensor that is needed.

FSDP1's traffic is that of the FSDP2 that is metered here. The optimizer steps on an eighth of the parameters once in 2
to 21 micro-batches, which is less than 1 % of the time; it is left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import set_checkpoint_early_stop

from flopmeter import register_cost
from flopmeter.costs import make_cost
from flopmeter.models.gpt2 import GPT2, GPT2Config
from flopmeter.records import ELEMENTWISE, REDUCTION, Call, Cost
from flopmeter.timing import attention_kernels

# Speed of FlashAttention-1 in Triton as a share of FlashAttention-2's. Causal, forward and backward, at head dimension
# 128 it reaches 104 to 112 TFLOP/s on A100 and 170 on H100 (issue 15 of this project), where FlashAttention-2 is priced
# at 157 to 173 and 285 to 307 (lengths of 4,096 to 16,384).
TRITON_SPEED = {"a100_40gb": 0.65, "a100_80gb": 0.65, "h100_80gb": 0.55}

METRICS = 2  # cross entropy and perplexity


@contextmanager
def triton_attention(gpu: str) -> Iterator[None]:
    """Flash attention is priced as Triton's kernel for reports made in here."""
    names = "FLASH_2", "FLASH_2_BACKWARD"
    kernels = {name: getattr(attention_kernels, name)._replace(speed=TRITON_SPEED[gpu]) for name in names}
    with mock.patch.multiple(attention_kernels, **kernels):
        yield


def mpt(sizes: str, length: int) -> GPT2:
    """The model on meta; `sizes` holds `d_model 768 heads 12 layers 12 vocab 50368`."""
    of = {name: int(size) for name, size in re.findall(r"(d_model|heads|layers|vocab) (\d+)", sizes)}
    with torch.device("meta"):
        model = GPT2(GPT2Config(of["layers"], of["d_model"], of["heads"], of["vocab"], positions=length))
    for module in model.modules():
        if isinstance(module, nn.GELU):
            module.approximate = "none"
        if isinstance(module, nn.LayerNorm):
            module.__class__ = LowPrecisionLayerNorm
    return model


class LowPrecisionLayerNorm(nn.LayerNorm):
    """In the type of its input, where autocast would have it in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", enabled=False):
            return super().forward(x)


def training_step(model: nn.Module, batch: int, length: int, *, stops_early: bool) -> Callable[[], None]:
    """One micro-batch: forward, backward, metrics. `stops_early`: recomputation, see above."""
    with torch.device("meta"):
        tokens, targets = (torch.zeros(batch, length, dtype=torch.long) for _ in range(2))

    def step() -> None:
        with set_checkpoint_early_stop(stops_early), sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            with torch.autocast("cuda", torch.bfloat16):
                logits = model(tokens).flatten(0, 1)
                loss = fused_cross_entropy(logits, targets.flatten())[0].sum() / targets.numel()
            loss.backward()
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            for _ in range(METRICS):
                F.cross_entropy(logits, targets.flatten(), reduction="sum")

    return step


@torch.library.custom_op("llm_foundry::fused_cross_entropy", mutates_args=())
def fused_cross_entropy(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """flash-attn's: losses and log-sum-exp of each row [rows], in fp32, from logits [rows, vocabulary]."""
    raise NotImplementedError("it runs on meta only")


@fused_cross_entropy.register_fake
def _(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return logits.new_empty(len(logits), dtype=torch.float32), logits.new_empty(len(logits), dtype=torch.float32)


@torch.library.custom_op("llm_foundry::fused_cross_entropy_backward", mutates_args=())
def fused_cross_entropy_backward(gradient: Tensor, logits: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the logits, in one pass over them."""
    raise NotImplementedError("it runs on meta only")


@fused_cross_entropy_backward.register_fake
def _(gradient: Tensor, logits: Tensor, sums: Tensor, targets: Tensor) -> Tensor:
    return torch.empty_like(logits)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, output[1])


def _gradient(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:
    logits, targets, sums = ctx.saved_tensors
    return fused_cross_entropy_backward(gradient, logits, sums, targets), None


fused_cross_entropy.register_autograd(_gradient, setup_context=_keep)


@register_cost(fused_cross_entropy)
def _cost(call: Call) -> Cost:
    """Maximum, difference, exp and sum of each logit."""
    numel = call.inputs[0].numel
    return make_cost(call, REDUCTION, 4 * numel, transcendentals=numel)


@register_cost(fused_cross_entropy_backward)
def _backward_cost(call: Call) -> Cost:
    """Difference, exp, and the product with the gradient."""
    numel = call.outputs[0].numel
    return make_cost(call, ELEMENTWISE, 3 * numel, transcendentals=numel)
