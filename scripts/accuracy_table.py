"""The README's table of accuracy, as markdown, from the tables of validate.py."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tabulate import tabulate
from validation_rows import Row


class Claim(NamedTuple):
    """A line of the README: the rows that it is about, and whether each GPU has a figure of its own."""

    what: str
    titles: str  # of the tables with the rows: a regular expression for the whole title
    by_gpu: bool = True
    is_kept: Callable[[Row], bool] = lambda row: True


def _is_long(row: Row) -> bool:
    return row.measured >= 100e-6


CLAIMS = (
    Claim("GEMMs of language models in bf16 from 2 µs on, shapes that set no constant (aiconfigurator)",
          r"GEMM, bf16, held out, by GPU"),
    Claim("GEMMs in fp8 with the quantisation before them, at least 100 µs",
          r"GEMM, fp8, held out, by GPU", by_gpu=False, is_kept=_is_long),
    Claim("fused attention in 16 bits: prefill from 100 µs",
          r"attention, prefill, at least 100 µs, held out, by GPU", by_gpu=False),
    Claim("prefill with the kernel that writes the cache",
          r"attention, prefill, at least 100 µs, with cache and plan, held out, by GPU", by_gpu=False),
    Claim("decoding from 50 µs", r"attention, decoding, at least 50 µs, held out, by GPU", by_gpu=False),
    Claim("norms in fp16: A100, A40 (vidur)", r"norms, held out, by GPU", by_gpu=False),
    Claim("rotary embeddings", r"rotary embeddings, held out, by GPU", by_gpu=False),
    Claim("activations", r"activations, held out, by GPU", by_gpu=False),
    Claim("additions", r"additions, held out, by GPU", by_gpu=False),
    Claim("layers of experts on one GPU", r"experts, held out, by GPU", by_gpu=False),
    Claim("NCCL within a node", r"NCCL, held out, by GPU", by_gpu=False),
    Claim("watts of an H200 in GEMMs of at least 50 µs", r"power, W, kernels of at least 50 µs, held out, by GPU"),
    Claim("the ratio of sustained to burst time", r"sustained over burst, held out, by GPU"),
    Claim("fp32 operators (NeuSight): linear", r"linear", by_gpu=False),
    Claim("batched matmuls", r"bmm", by_gpu=False),
    Claim("element-wise", r"elementwise", by_gpu=False),
    Claim("softmax", r"softmax", by_gpu=False),
    Claim("layer norm", r"layernorm", by_gpu=False),
    Claim("convolutions", r"conv2d", by_gpu=False),
    Claim("whole networks: inference", r"networks, inf, by GPU", by_gpu=False),
    Claim("training", r"networks, train, by GPU", by_gpu=False),
    Claim("image models under AMP (timm), eager", r"image models, eager, by GPU"),
    Claim("the same in channels-last", r"image models, eager_nhwc, by GPU"),
    Claim("the same compiled", r"image models, dynamo, by GPU"),
    Claim("the speed-up of compiling", r"image models, compiled over eager, by GPU"),
    Claim("the same with torch 2.9, whose runs set no constant: eager", r"image models, torch 2.9, eager, by GPU"),
    Claim("compiled", r"image models, torch 2.9, dynamo, by GPU"),
    Claim("the speed-up", r"image models, torch 2.9, compiled over eager, by GPU"),
    Claim("the same on an RTX 5090, norms in fp32", r"image models, eager, norms in fp32, by GPU", by_gpu=False),
    Claim("training of image models, RTX 3090", r"image models, training, by GPU", by_gpu=False),
    Claim("GPT-2 124M training on A100, fp32 to fused and compiled (build-nanogpt)", r"GPT-2 124M, .*", by_gpu=False),
    Claim("Llama-2-7B decoding in eager mode on A100, batch 1 to 64, attention of three kinds",
          r"Llama-2-7b-hf, decode.*", by_gpu=False),
    Claim("the same, prefill of 256 tokens", r"Llama-2-7b-hf, prefill.*", by_gpu=False),
    Claim("the same, training of all weights by Trainer, batch 1 to 16", r"Llama-2-7b-hf, train full.*", by_gpu=False),
    Claim("by LoRA", r"Llama-2-7b-hf, train LoRA.*", by_gpu=False),
    Claim("ViT-B/16 inference, eager and compiled", r"google/vit-base-patch16-224, .*", by_gpu=False),
    Claim("MPT training on 8 A100 (llm-foundry)", r"llm-foundry, 8 a100, tokens/s", by_gpu=False),
    Claim("on 8 H100", r"llm-foundry, 8 h100, tokens/s", by_gpu=False),
    Claim("Llama-3.1-8B training on 8 H100 (torchtitan)", r"torchtitan.*, 8 h100, tokens/s", by_gpu=False),
    Claim("kernels of `flopmeter measure`", r"measured kernels, .*"),
    Claim("its programs, wall-clock", r"measured programs, .*", is_kept=lambda row: row.group == "programs"),
)  # fmt: skip


def markdown(tables: Mapping[str, Sequence[Row]]) -> str:
    """A line for each claim whose tables are there, by their titles."""
    lines = []
    for claim in CLAIMS:
        rows = [
            row
            for title, rows in tables.items()
            if re.fullmatch(claim.titles, title)
            for row in rows
            if claim.is_kept(row)
        ]
        if rows:
            lines.append([claim.what, f"{len(rows):,}", _errors(rows, by_gpu=claim.by_gpu), _percent(_roofline(rows))])
    return tabulate(
        lines, headers=["what", "rows", "mean error", "plain roofline"], tablefmt="github", disable_numparse=True
    )


def _errors(rows: Sequence[Row], *, by_gpu: bool) -> str:
    groups: dict[str, list[float]] = {}
    for row in rows:
        groups.setdefault(row.gpu if by_gpu else "", []).append(row.error)
    return ", ".join(f"{gpu} {_percent(statistics.fmean(errors))}".strip() for gpu, errors in sorted(groups.items()))


def _roofline(rows: Sequence[Row]) -> float:
    return statistics.fmean(abs(row.roofline / row.measured - 1) for row in rows)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
