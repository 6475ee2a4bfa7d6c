"""Published training runs on many GPUs, with tensor, pipeline and sequence parallelism: steps put together by `plan`.

What a row does not say is taken as `plan` finds it fastest of what fits, or as its entry here says; both are printed.
Runs of llm-foundry are in validate_distributed.py.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import parallel as tp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint
from validate_distributed import titan
from validation_rows import Line, Row

from flopmeter import SplitRow, plan
from flopmeter.device.hardware import load_hardware
from flopmeter.models.gpt2 import GPT2, GPT2Config
from flopmeter.models.layers import PreNormBlock, SelfAttention, next_token_loss
from flopmeter.models.llama import LLAMA_2_7B, LLAMA_3_8B, LLAMA_3_70B, LLAMA_3_405B, Block, Llama, LlamaConfig

H100_500W = Path(__file__).parent / "h100-96gb-500w.yaml"
ANY_MEMORY = 1e13  # a run that was published did fit


class Run(NamedTuple):
    """One row as `plan` takes it."""

    model: Any
    hardware: str | Path
    batch: int  # sequences of a step, of all GPUs
    length: int
    only: dict[str, Any]
    mode: Any
    assumed: str
    memory: float | None = ANY_MEMORY
    styles: Any = None
    loss: Any = None
    compile: Any = False
    async_tp: bool = False
    fp8: bool = False
    is_titan: bool = False  # FlashAttention before Blackwell
    expandable_segments: bool = False


def planned_runs(path: Path) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each source, tokens/s or FLOP/s of a GPU in place of seconds."""
    rows: dict[str, list[Row]] = {}
    for line in csv.DictReader(path.open()):
        express = SOURCES.get(line["source"])
        if express is None:
            continue
        run = express(line)
        allocator = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"} if run.expandable_segments else {}
        flash = sdpa_kernel(SDPBackend.FLASH_ATTENTION) if run.is_titan else nullcontext()
        with flash, patch.dict(os.environ, allocator):
            (found,) = plan(
                run.model, int(line["n_gpus"]), run.hardware, run.memory, batch=run.batch, length=run.length,
                only={"cp": 1, **run.only}, mode=run.mode, rows=1, tensor_parallel=run.styles, loss=run.loss,
                compile=run.compile, async_tp=run.async_tp, fp8=run.fp8,
            ).rows  # fmt: skip
        row = _row(line, run, found)
        print(
            f"{row.name}: {row.predicted:.4g} for {row.measured:.4g} {line['unit']}; {found.split}, "
            f"{found.microbatches} microbatches; assumed: {run.assumed}",
            flush=True,
        )
        rows.setdefault(f"{line['source']}, {line['unit']}, planned", []).append(row)
        if stated := re.search(r"memory ([\d.]+) GiB", line["other_config"]):
            kept = float(found.reserved_memory_bytes)  # torchtitan prints what its allocator reserves
            of_memory = row._replace(
                measured=float(stated[1]) * 2**30, predicted=kept, low=kept, high=kept, roofline=kept
            )
            rows.setdefault(f"{line['source']}, bytes of memory, planned", []).append(of_memory)
    yield from rows.items()


def _row(line: Line, run: Run, found: SplitRow) -> Row:
    peak = load_hardware(run.hardware).contraction_peak("bf16").flop_per_s
    predicted = found.tokens_per_s_per_gpu
    if line["unit"].startswith("model TFLOP/s"):
        predicted = found.mfu * peak / 1e12
    elif line["unit"].startswith("achieved TFLOP/s"):
        predicted = _megatron_flops(run) / found.seconds / found.gpus / 1e12
    roofline = predicted / found.mfu  # at the peak of the products, with nothing to wait for
    name = f"{line['id']}: {line['model']} on {line['n_gpus']}, {found.split.name}"
    return Row(line["model"], line["gpu"], float(line["measured"]), predicted, predicted, predicted, roofline, name)


# --- torchtitan ------------------------------------------------------------------------------------------------------


def _titan(line: Line) -> Run:
    text = f"{line['mode']} {line['other_config']}"
    sizes = {name.lower(): int(ranks) for name, ranks in re.findall(r"\b(FSDP|TP|PP|CP)(\d+)", text)}
    replicas = int(line["n_gpus"]) // prod(sizes.get(name, 1) for name in ("tp", "pp", "cp"))
    only: dict[str, Any] = {"tp": 1, "pp": 1, "dp": 1, "cp": 1, "microbatch": int(line["batch"])} | sizes
    only |= {"fsdp": replicas, "recompute": "full" if "full AC" in text else "selective"}
    model: Callable[[], nn.Module] = partial(titan, LLAMAS[line["model"]])
    assumed = [] if line["seq"] else ["8,192 tokens a sequence"]
    if "layer AC" in text:
        model, only["recompute"] = partial(_every_second_recomputed, LLAMAS[line["model"]]), "none"
    if sizes.get("pp", 1) > 1:
        only["microbatch"] //= sizes["pp"]
        only |= {"schedule": "interleaved", "chunks": 2} if "interleaved" in text else {"schedule": "1f1b"}
        assumed.append("as many microbatches as ranks of the pipeline, torchtitan's default, and two stages a rank")
    if "fp8" in line["dtype"]:
        assumed.append("FSDP gathers in fp8; what tensor parallelism gathers is as large as in bf16, where it is fp8")
    hardware = "a100-sxm4-80gb" if line["gpu"].startswith("A100") else H100_500W
    is_compiled = re.search("compile(?!=false)", line["mode"]) is not None
    run = Run(
        partial(_compiled_layers, model) if is_compiled else model, hardware, replicas * int(line["batch"]),
        int(line["seq"] or 8192), only, "compiled" if is_compiled else "eager", "; ".join(assumed) or "nothing",
        compile="rules" if is_compiled else False,
    )  # fmt: skip
    if (
        is_compiled and line["source"] == "torchtitan 2025-06"
    ):  # the loss, too: torchtitan/components/loss.py of 820504e
        run = run._replace(loss=compiled_loss)
    # Of the launchers of 9dec370 run_llama_train.sh, for one node, asks for them; multinode_trainer.slurm does not.
    is_one_node = int(line["n_gpus"]) <= 8
    return run._replace(
        async_tp="async" in text.lower(), is_titan=True, expandable_segments=is_one_node, fp8="fp8" in line["dtype"]
    )


LLAMAS = {
    "Llama-13B": LlamaConfig(40, 5120, heads=40, kv_heads=40, hidden=13824, vocabulary=32000),
    "Llama-3-8B": LLAMA_3_8B, "Llama-3.1-8B": LLAMA_3_8B, "Llama-3-70B": LLAMA_3_70B, "Llama-3.1-70B": LLAMA_3_70B,
    "Llama-3.1-405B": LLAMA_3_405B, "LLAMA3_8B": LLAMA_3_8B, "LLAMA3_70B": LLAMA_3_70B, "LLAMA2-7B": LLAMA_2_7B,
}  # fmt: skip


class RecomputedBlock(Block):
    def forward(self, *args: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, *args, use_reentrant=False)
        return out


class CompiledBlock(Block):
    """torchtitan compiles each layer, its recomputation inside (parallelize_llama.py of f6a9daa)."""

    def __call__(self, *args: Tensor) -> Tensor:
        return _compiled_call(self, *args)


@torch.compile
def _compiled_call(block: nn.Module, *args: Tensor) -> Tensor:
    out: Tensor = nn.Module.__call__(block, *args)
    return out


def _compiled_layers(build: Callable[[], nn.Module]) -> nn.Module:
    model = build()
    for block in model.get_submodule("blocks").children():
        block.__class__ = CompiledBlock
    return model


def compiled_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return _compiled_loss(model(tokens), tokens)


_compiled_loss = torch.compile(next_token_loss)


def _every_second_recomputed(config: LlamaConfig) -> nn.Module:
    model = titan(config)
    for block in list(model.blocks)[1::2]:
        block.__class__ = RecomputedBlock
    return model


# --- Megatron-LM -----------------------------------------------------------------------------------------------------


def _sizes(line: Line) -> dict[str, int]:
    found = re.findall(r"(heads|hidden|layers|vocab|model-parallel|TP|PP|DP) ?(\d+)", line["other_config"])
    return {name: int(size) for name, size in found}


NOT_DEFERRED = ["none", "1f1b", "interleaved"]  # schedules of Megatron-LM


def _megatron(line: Line) -> Run:
    """Megatron-Core: the distributed optimizer shards states over data ranks, gradients and parameters are whole."""
    of = _sizes(line)
    config = GPT2Config(of["layers"], of["hidden"], of["heads"], of["vocab"], positions=int(line["seq"]))
    only = {"tp": of["TP"], "pp": of["PP"], "dp": 1, "fsdp": of["DP"], "gather": "step", "schedule": NOT_DEFERRED}
    assumed = (
        "microbatch, recomputation and chunks as plan finds them fastest; no dropout; products hide the collectives "
        "of tensor parallelism"
    )
    model = partial(_megatron_gpt, config, SelfAttention, 0.0)
    run = Run(model, "h100-sxm5-80gb", int(line["batch"]), int(line["seq"]), only, "compiled", assumed, memory=None)
    return run._replace(loss=megatron_loss, compile="rules", async_tp=True)


def _nemo(line: Line) -> Run:
    """Megatron-Core below NeMo: products in fp8 by Transformer Engine, with casts in the kernels around them."""
    of = {name: int(size) for name, size in re.findall(r"(GBS|TP|PP|VP) ?(\d+)", line["other_config"])}
    only: dict[str, Any] = {"tp": of["TP"], "pp": of["PP"], "dp": 1, "microbatch": int(line["batch"]), "gather": "step"}
    only |= {"schedule": "interleaved", "chunks": of["VP"]} if "VP" in of else {"schedule": NOT_DEFERRED}
    only["recompute"] = "none"
    model = partial(Llama, LLAMAS[line["model"]])
    assumed = "nothing recomputed; Transformer Engine's kernels as inductor's; parameters gathered in fp8"
    run = Run(model, "h100-sxm5-80gb", of["GBS"], int(line["seq"]), only, "compiled", assumed)
    return run._replace(async_tp=True, fp8=True)


# Heads, tensor and pipeline parallel sizes: arXiv 2104.04473, table 1.
SIZES_2021 = {"GPT 1.7B": (24, 1, 1), "GPT 18B": (48, 8, 1), "GPT 145B": (96, 8, 8), "GPT 1T": (160, 8, 64)}


def _megatron_2021(line: Line) -> Run:
    """Without sequence parallelism and fused attention; every layer recomputed; parameters whole on each replica."""
    of, (heads, tensor, stages) = _sizes(line), SIZES_2021[line["model"]]
    config = GPT2Config(of["layers"], of["hidden"], heads, of["vocab"], positions=int(line["seq"]))
    only = {"tp": tensor, "pp": stages, "fsdp": 1, "recompute": "full", "schedule": NOT_DEFERRED}
    assumed = "microbatch and chunks as plan finds them fastest; bf16's rates for fp16"
    model = partial(_megatron_gpt, config, UnfusedAttention, 0.1)
    run = Run(model, "a100-sxm4-80gb", int(line["batch"]), int(line["seq"]), only, "compiled", assumed)
    styles = _whole_between_products() if tensor > 1 else None
    return run._replace(memory=None, styles=styles, loss=megatron_loss, compile="rules")


@torch.compile
def dropped_and_added(x: Tensor, residual: Tensor, dropout: float) -> Tensor:
    """One kernel in Megatron-LM, which torch.jit makes; nothing else is compiled."""
    return residual + (F.dropout(x, dropout) if dropout else x)


class UnfusedAttention(SelfAttention):
    """Scores go to memory, through one softmax kernel, which masks and scales; dropout on probabilities."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        # Megatron's tokens lie [length, batch, heads, query and key and value], so that a view is a batch of products.
        q, k, v = self.qkv(x).view(length, -1, 3 * self.head_width).transpose(0, 1).chunk(3, -1)
        scores = torch.bmm(q, k.transpose(1, 2))
        context = torch.bmm(F.dropout(scores.softmax(-1), 0.1), v)
        out: Tensor = self.out(context.transpose(0, 1).reshape(batch, length, -1))
        return out


class MegatronBlock(PreNormBlock):
    dropout = 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = dropped_and_added(self.attention(self.norm1(x)), x, self.dropout)
        out: Tensor = dropped_and_added(self.mlp(self.norm2(x)), x, self.dropout)
        return out


def _megatron_gpt(config: GPT2Config, attention: type[SelfAttention], dropout: float) -> nn.Module:
    model: nn.Module = GPT2(config)
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        block.__class__, block.attention.__class__, block.dropout = MegatronBlock, attention, dropout
    return model


class VocabParallelCrossEntropy(torch.autograd.Function):
    """The passes over logits in fp32 that Megatron-LM makes, each a kernel. Their columns may lie on several ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: Any) -> Tensor:
        peak = logits.max(-1).values
        logits = logits - _reduced(peak, group, dist.ReduceOp.MAX)[:, None]
        predicted = _reduced(logits.gather(-1, targets[:, None])[:, 0], group)
        exponents = logits.exp_()
        total = _reduced(exponents.sum(-1), group)
        ctx.save_for_backward(exponents.div_(total[:, None]), targets)
        return total.log() - predicted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        softmax, targets = ctx.saved_tensors
        softmax.scatter_add_(-1, targets[:, None], -torch.ones_like(softmax[:, :1]))
        return softmax.mul_(gradient[:, None]), None, None


def _reduced(x: Tensor, group: Any, by: Any = dist.ReduceOp.SUM) -> Tensor:
    if group is not None:
        dist.all_reduce(x, by, group)
    return x


def megatron_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    logits: Any = model(tokens)
    group = None
    if isinstance(logits, DTensor):
        group, logits = logits.device_mesh.get_group(), logits.to_local()
    cross_entropy: Any = VocabParallelCrossEntropy.apply
    losses: Tensor = cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten(), group)
    return losses.mean()


def _whole_between_products() -> dict[str, Any]:
    whole = Replicate()
    return {
        "token": tp.RowwiseParallel(input_layouts=whole),
        "blocks.*.attention.qkv": tp.ColwiseParallel(),
        "blocks.*.attention.out": tp.RowwiseParallel(),
        "blocks.*.mlp.0": tp.ColwiseParallel(),
        "blocks.*.mlp.2": tp.RowwiseParallel(),
        "head": tp.ColwiseParallel(use_local_output=False),
    }


def _megatron_flops(run: Run) -> float:
    """Of a step, recomputation included: arXiv 2104.04473, equation 3."""
    config: GPT2Config = run.model.args[0]
    layers, width, length = config.layers, config.width, run.length
    share: float = 1 + length / (6 * width) + config.vocabulary / (16 * layers * width)
    return 96.0 * run.batch * length * layers * width**2 * share


SOURCES: dict[str, Callable[[Line], Run]] = {
    "torchtitan 2024-04": _titan,
    "torchtitan 2024-12": _titan,
    "torchtitan 2025-06": _titan,
    "Megatron-LM 2021": _megatron_2021,
    "Megatron-LM 2024": _megatron,
    "NVIDIA Megatron-Bridge": _nemo,
    "NVIDIA NeMo 24.12": _nemo,
}
