"""Published training runs on 8 GPUs: MPT of llm-foundry and Llama-3.1-8B of torchtitan, both sharded by FSDP."""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from delayed_scaling import in_fp8
from llm_foundry import mpt, training_step, triton_attention
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from validation_rows import Line, Row, roofline_seconds

from flopmeter import FlopMeter
from flopmeter.distributed import world
from flopmeter.models.llama import LLAMA_3_8B, Attention, Llama, LlamaConfig
from flopmeter.report.report import Report

GPUS = 8
PROFILES: dict[str, str | Path] = {
    "a100_40gb": "a100-sxm4-40gb",
    "a100_80gb": "a100-sxm4-80gb",
    "h100_80gb": "h100-sxm5-80gb",
    "H100 96GB HBM2e (500W)": Path(__file__).parent / "h100-96gb-500w.yaml",
}
DTYPES = ("bf16", "amp_bf16", "amp_fp8")
# Of the launchers: run_llama_train.sh of torchtitan at 9dec370.
ALLOCATORS = {"torchtitan 2024-12": {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}}
Step = Callable[[], None]


def sharded_runs(path: Path) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each source and GPU, tokens/s in place of seconds, and once more for the memory that was stated, in
    bytes.

    Left out are torchtitan's lines with fp8 and those of more than 8 GPUs (see validate_parallel.py), and those without
    a batch size.
    """
    reports: dict[str, list[tuple[Line, Report]]] = {}
    for line in csv.DictReader(path.open()):
        program = PROGRAMS.get(line["source"])
        if program is not None and line["n_gpus"] == str(GPUS) and line["dtype"] in DTYPES:
            title = f"{line['source']}, {GPUS} {line['gpu'].partition(' ')[0].lower()}"
            reports.setdefault(title, []).append((line, _report(line, program)))
    for title, runs in reports.items():
        yield f"{title}, tokens/s", [_throughput(line, report) for line, report in runs]
        stated = [(line, report) for line, report in runs if "memory" in line["other_config"]]
        if stated:
            yield f"{title}, bytes of memory", [_memory(line, report) for line, report in stated]


def _report(line: Line, program: Callable[[Line, DeviceMesh], Step]) -> Report:
    with world(GPUS, {"dp": GPUS}) as mesh:
        step = program(line, mesh)
        with FlopMeter(PROFILES[line["gpu"]], compile="rules"):
            step()  # the first one makes the optimizer's state; outside of a meter torch warns of autocast without CUDA
        with FlopMeter(PROFILES[line["gpu"]], compile="rules") as meter:
            step()
        with triton_attention(line["gpu"]) if line["source"] == "llm-foundry" else nullcontext():
            return meter.report(mode="compiled" if "compile" in line["mode"] else "eager")


def _throughput(line: Line, report: Report) -> Row:
    """Tokens/s of each GPU."""
    tokens = int(line["batch"]) * int(line["seq"])
    return Row(
        group=line["model"],
        gpu=line["gpu"],
        name=_named(line),
        measured=float(line["measured"]),
        predicted=tokens / report.seconds,
        low=tokens / report.seconds_high,
        high=tokens / report.seconds_low,
        roofline=tokens / roofline_seconds(report, report.hardware),
    )


def _memory(line: Line, report: Report) -> Row:
    """What the allocator reserves, which is what torchtitan prints; the roofline is what tensors ask for."""
    (gib,) = re.findall(r"memory ([\d.]+) GiB", line["other_config"])
    with patch.dict(os.environ, ALLOCATORS.get(line["source"], {})):
        reserved = float(report.memory.reserved_bytes)
    return Row(
        group=line["model"],
        gpu=line["gpu"],
        name=_named(line),
        measured=float(gib) * 2**30,
        predicted=reserved,
        low=reserved,
        high=reserved,
        roofline=float(report.memory.peak_bytes),
    )


def _named(line: Line) -> str:
    how = f"{line['dtype']}, {line['mode'].partition(' (')[0]}"
    return f"{line['id']}: {line['model']}, {how}, {line['batch']} x {line['seq']}"


def _shard(model: Any, mesh: DeviceMesh, reduced_in: torch.dtype, kept: nn.Module | None = None) -> None:
    """Each block on its own, then what is left, as both libraries do. `kept`: stays whole until its backward pass."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced_in)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=block is not kept)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def _recompute(blocks: Iterable[nn.Module], **options: Any) -> None:
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)


# --- llm-foundry -----------------------------------------------------------------------------------------------------


def _mpt(line: Line, mesh: DeviceMesh) -> Step:
    length = int(line["seq"])
    model = mpt(line["other_config"], length)
    if line["dtype"] == "amp_fp8":
        in_fp8(model.blocks)
    if "AC=True" in line["other_config"]:
        _recompute(model.blocks)
    _shard(model, mesh, reduced_in=torch.bfloat16)
    return training_step(model, int(line["batch"]), length, stops_early=line["gpu"] != "a100_40gb")


# --- torchtitan ------------------------------------------------------------------------------------------------------


class TitanAttention(Attention):
    """Rotary positions as products of complex numbers in fp32; keys and values repeated for each query head."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turns = torch.complex(cos[:, ::2].float(), sin[:, ::2].float())[:, None]
        q, k, v = (part(x).unflatten(-1, (-1, self.head_width)) for part in (self.query, self.key, self.value))
        q, k = _turned(q, turns), _turned(k, turns)
        repeats = self.heads // self.kv_heads
        k, v = (part[:, :, :, None].expand(-1, -1, -1, repeats, -1).flatten(2, 3) for part in (k, v))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.out(context.transpose(1, 2).flatten(2))
        return out


class TitanNorm(nn.RMSNorm):
    """The ops of torch before 2.9, which had no kernel for it."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + (self.eps or 1e-5))
        out: Tensor = (wide * scale).type_as(x) * self.weight
        return out


def _turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).type_as(x)


def titan(config: LlamaConfig) -> Llama:
    """torchtitan's Llama of 2024 and of June 2025."""
    model = Llama(config)
    for module in model.modules():
        if isinstance(module, Attention):
            module.__class__ = TitanAttention
        elif isinstance(module, nn.RMSNorm):
            module.__class__ = TitanNorm
    return model


def _llama(line: Line, mesh: DeviceMesh) -> Step:
    """Selective recomputation; gradients are reduced in fp32, and AdamW steps on an eighth of the parameters.

    What is compiled is each block, its recomputation inside, and not the loss (torchtitan's train.py and
    parallelize_llama.py at 9dec370; e8977b0 switched the loss off).
    """
    shape = int(line["batch"]), int(line["seq"])
    with torch.device("meta"):
        model = titan(LLAMA_3_8B)
        tokens, labels = (torch.zeros(shape, dtype=torch.long) for _ in range(2))
    _recompute(model.blocks, context_fn=_selective)
    if "compile" in line["mode"]:
        for block in model.blocks:
            block.forward = torch.compile(block.forward)
    _shard(model, mesh, reduced_in=torch.float32, kept=model.blocks[-1])  # torchtitan's choice: it is needed at once
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)

    def step() -> None:
        optimizer.zero_grad()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # what torch of then preferred, and what is saved
            F.cross_entropy(model(tokens).flatten(0, 1).float(), labels.flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    return step


SAVED = (
    torch.ops.aten.mm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
)


def _selective() -> Any:
    """torchtitan's `selective_ac_option = "op"`: attention and every second product are saved."""
    products: Counter[bool] = Counter()

    def policy(context: Any, func: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = func is torch.ops.aten.mm.default
        products[context.is_recompute] += is_product
        is_saved = func in SAVED and not (is_product and products[context.is_recompute] % 2 == 0)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


PROGRAMS: dict[str, Callable[[Line, DeviceMesh], Step]] = {"llm-foundry": _mpt, "torchtitan 2024-12": _llama}
