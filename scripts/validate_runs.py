"""Published end-to-end runs, one a line (id, model, gpu, n_gpus, dtype, mode, workload, batch, measured, unit, ...).

Predicted are the lines that one GPU ran on a model defined here: Llama-2-7B of Hugging Face (prefill, decoding and
training) and of gpt-fast (decoding), the steps of build-nanogpt's GPT-2 124M, image models of transformers' docs,
NVIDIA's ResNet-50, and the UNet of diffusers' Stable Diffusion 1.5.
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import llama_of_transformers
import torch
import torch._inductor.config as inductor
from llama_of_transformers import tokens
from measured_programs import GptFastLlama, Int4Linear, Int8Linear, NanoGPT, next_token, quantise
from torch.nn.attention import SDPBackend, sdpa_kernel
from validation_rows import Line, Row, roofline_seconds

from flopmeter import FlopMeter, Hardware, Report, load_hardware, on_meta
from flopmeter.costs.data_movement.concatenation import (
    SINGLE_BLOCKS_PER_SM,
    SINGLE_THREADS,
    CatKernel,
    work_of,
)
from flopmeter.launch.fusion import layout
from flopmeter.launch.modes import Mode
from flopmeter.models import BUILTINS
from flopmeter.records import Cost, Kernel, VectorWork
from flopmeter.timing import Host, PowerLaws, RankRun, time_run, uncertainty

PROFILES = {"A100": "a100-sxm4-80gb", "V100": "v100-sxm2-16gb", "T4": "t4", "MI250X (1 GCD)": "mi250x-gcd"}
# Watts, where a line's GPU does not say them. optimum-benchmark's machine, hf-dgx-01, is taken to be a DGX Station
# A100, whose four SXM4 modules are limited to 275 W (nvidia-smi): Hugging Face's scripts of the time skip a 'NVIDIA DGX
# Display', which only that machine has.
LIMITS_W = {"HF optimum-benchmark": 275.0}
# As many times the limit is what a device feels that multiplies no numbers but one: an A100 reaches 295 TFLOP/s on
# zeros and 257 on random data, and rates go with the root of the watts (docs/limits.md). So it is where all weights
# are trained in pure fp16, in which AdamW's epsilon of 1e-8 is zero: from the second step on all weights and
# activations are NaN (seen with a small Llama on a CPU). LoRA's activations are NaN too, but its frozen weights are
# not.
LIMIT_WITHOUT_NUMBERS = (295 / 257) ** 2
# Of transformers' docs: T4, V100 and A100 in a cloud, whose virtual Xeons are slower than a DGX's CPU; torch 2.0.1.
CLOUD_WITH_TORCH_2_0 = Host(relative_time=1.4, triton_launch_seconds=14e-6, source="a cloud's Xeon, torch 2.0")
QUANTISED: dict[str, type[Int8Linear | Int4Linear]] = {"int8": Int8Linear, "int4": Int4Linear}  # gpt-fast's layers
GPT_FAST_TOKENS = 200  # the default of gpt-fast's generate.py
Metered = tuple[FlopMeter, float]  # and how many tokens or samples a run makes; 1 where the line has a time


def runs(path: Path) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each model and workload, in the order of the file."""
    tables: dict[str, list[Row]] = {}
    for line in csv.DictReader(path.open()):
        meter = _meter(line)
        if meter is not None:
            tables.setdefault(_title(line), []).append(_row(line, meter))
    yield from tables.items()


def _title(line: Line) -> str:
    attention = _attention(line["other_config"])
    return ", ".join((line["model"], line["workload"].partition(" (")[0], *filter(None, [attention])))


def _attention(config: str) -> str:
    """How attention ran, where the line says it."""
    return next((name for name in ("eager attention", "BetterTransformer", "FlashAttention-2") if name in config), "")


def uses_transformers(path: Path) -> bool:
    """Whether a run in the file is of a model that transformers defines."""
    return any(line["model"].startswith(FROM_TRANSFORMERS) for line in csv.DictReader(path.open()))


def _row(line: Line, metered: Metered) -> Row:
    meter, units = metered
    device = _device(line)
    mode = _mode(line)
    # Channels-last by inductor's own choice is in torch since 2.1 (layout_optimization in torch/_inductor/config.py).
    chooses_layout = "torch 2.0" not in line["other_config"]
    with mock.patch.dict(os.environ, {layout.SWITCH: str(int(chooses_layout))}):
        report = meter.report(hardware=device, mode=mode)
    if "torch 2.1" in line["other_config"]:
        report = as_in_torch_2_1(report)
    bounds = uncertainty(report.timings, report.seconds, device)
    figure = float(line["measured"])
    return Row(
        group=line["mode"],
        gpu=line["gpu"],
        measured=units / figure if line["unit"].partition(" (")[0].endswith("/s") else figure * 1e-3,
        predicted=report.seconds,
        low=bounds.low,
        high=bounds.high,
        roofline=roofline_seconds(report, device),
        name=f"{line['id']}: {line['dtype'].partition('(')[0]}, {line['mode']}, batch {line['batch']}",
        mode=mode,
    )


def as_in_torch_2_1(report: Report) -> Report:
    """The same run where `cat` looks up each element."""
    kernels = [
        kernel._replace(cost=_cat_of_torch_2_1(kernel)) if kernel.cost.name == "cat" else kernel
        for kernel in report.kernels
    ]
    launches = report.launches._replace(kernels=kernels)
    run = RankRun(launches, report.hardware, report.switches, report.hardware.host, None)
    timed = time_run(run, "sustained", PowerLaws())
    return replace(report, launches=launches, **timed._asdict())


def _cat_of_torch_2_1(kernel: Kernel) -> Cost:
    """Onto an empty cache there was none: transformers kept what it had."""
    (op,) = kernel.ops
    (out,) = op.call.outputs
    is_first = not all(spec.numel for spec in op.call.inputs)
    if is_first:
        return replace(kernel.cost, work=VectorWork())
    single = CatKernel(1, SINGLE_THREADS, SINGLE_BLOCKS_PER_SM, len(out.shape) - 1)
    return replace(kernel.cost, work=work_of(single, op.call.inputs))


def _mode(line: Line) -> Mode:
    if line["mode"].startswith("compiled (reduce-overhead"):
        return "cudagraph"
    return "compiled" if line["mode"].startswith("compiled") else "eager"


def _device(line: Line) -> Hardware:
    """The GPU of the line, under the power limit that it ran with."""
    device = load_hardware(next(name for start, name in PROFILES.items() if line["gpu"].startswith(start)))
    said = re.search(r"\((\d+)W", line["gpu"])
    limit_w = float(said[1]) if said else LIMITS_W.get(line["source"])
    if limit_w and "full fine-tune" in line["workload"]:
        limit_w *= LIMIT_WITHOUT_NUMBERS
    return replace(device, power_limit_w=limit_w) if limit_w else device


def _meter(line: Line) -> Metered | None:
    """The metered run of the line; None where it is of a kind that is not predicted here."""
    is_known_gpu = any(line["gpu"].startswith(start) for start in PROFILES)
    if not is_known_gpu or line["n_gpus"] != "1":
        return None
    program = next((make for start, make in PROGRAMS.items() if line["model"].startswith(start)), None)
    return program(line) if program else None


def _llama(line: Line) -> Metered:
    batch, workload = int(line["batch"]), line["workload"]
    if workload.startswith("train"):
        return llama_of_transformers.training_step(_device(line), batch, lora="LoRA" in workload), batch
    decodes = workload.startswith("decode")
    cached = 2 * llama_of_transformers.PROMPT if decodes else 0  # half-way to the last token
    meter = llama_of_transformers.inference(_device(line), _attention(line["other_config"]), batch, cached)
    return meter, batch if decodes else 1


def _gpt_fast(line: Line) -> Metered | None:
    """Tokens a second as generate.py counts them: 200 after a prompt of five, which runs eagerly before. Attention is
    written out, and the step is compiled with coordinate descent tuning."""
    if not line["unit"].startswith("tokens"):
        return None
    with torch.device("meta"):
        model = GptFastLlama(cached=208).to(torch.bfloat16).eval()
    layer = QUANTISED.get(line["dtype"].partition(" ")[0])
    if layer is not None:
        quantise(model, layer)
    step = partial(next_token, model)
    decode = step if _mode(line) == "eager" else torch.compile(step, mode="reduce-overhead", fullgraph=True)
    tuned = inductor.patch(coordinate_descent_tuning=True)
    with torch.inference_mode(), tuned, FlopMeter(_device(line)) as meter:
        token = step(tokens(1, 5), torch.empty(5, dtype=torch.int32, device="meta"))[0]
        position = torch.empty(1, dtype=torch.int32, device="meta")
        for _ in range(GPT_FAST_TOKENS - 1):
            with sdpa_kernel(SDPBackend.MATH):
                token, probabilities = decode(token.view(1, 1), position)
            position += 1
            for each in (token, probabilities, token):  # what it keeps, and the next input
                each.clone()
    return meter, GPT_FAST_TOKENS


def _gpt2(line: Line) -> Metered | None:
    """Later steps keep what earlier ones brought: fused attention, the padded vocabulary, fused AdamW and clipping."""
    step = float(line["measured"])
    is_bf16 = "bf16" in line["dtype"]
    with torch.device("meta"):
        model = NanoGPT(50304 if step <= 93 else 50257, is_fused=step <= 96)
        tokens = torch.zeros(int(line["batch"]), int(line["seq"]), dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=step <= 90)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = "TF32" in line["dtype"]
    try:
        with FlopMeter(_device(line)) as meter:
            with torch.autocast("cuda", torch.bfloat16, enabled=is_bf16):
                loss = model(on_meta(tokens), on_meta(tokens))
            loss.backward()
            if step <= 90:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    return meter, 1


def _vision(line: Line) -> Metered:
    """An image model of transformers, as its configuration class has it or with the changes of IMAGE_MODELS."""
    name, config, size, changes = IMAGE_MODELS[line["model"].partition("/")[2].partition("-")[0]]
    transformers = import_module("transformers")
    with torch.device("meta"):
        model = getattr(transformers, name)(getattr(transformers, config)(**changes)).eval()
        images = torch.empty(int(line["batch"]), 3, size, size)
    with torch.inference_mode(), FlopMeter(_device(line), host=CLOUD_WITH_TORCH_2_0) as meter:
        model(pixel_values=images)
    return meter, 1


def _resnet(line: Line) -> Metered:
    model, inputs = BUILTINS["resnet-50"](batch=int(line["batch"]), dtype=torch.float32)
    with torch.inference_mode(), FlopMeter(_device(line)) as meter:
        with torch.autocast("cuda", torch.float16, enabled="AMP" in line["dtype"]):
            model.eval()(*inputs)
    return meter, 1


def _stable_diffusion(line: Line) -> Metered:
    """The UNet of a denoising step, on each latent with its prompt and without; the scheduler's few small ops are left
    out. torch 2.0 and 2.1 had FlashAttention-1, about half as fast as -2 (arXiv 2307.08691), whose curves there are
    those of CUTLASS's memory-efficient kernels; a V100 has only these."""
    model, inputs = BUILTINS["unet"](batch=2 * int(line["batch"]), dtype=torch.float16)
    model.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    efficient = sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    with torch.inference_mode(), efficient, FlopMeter(_device(line), host=CLOUD_WITH_TORCH_2_0) as meter:
        model(*inputs)
    return meter, 1


# Of transformers' docs, by the first word of the model: class, configuration, side of the image, what differs.
IMAGE_MODELS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "vit": ("ViTForImageClassification", "ViTConfig", 224, {"attn_implementation": "eager"}),
    "beit": (
        "BeitForImageClassification",
        "BeitConfig",
        224,
        {"attn_implementation": "eager", "use_relative_position_bias": True},
    ),
    "convnext": (
        "ConvNextForImageClassification",
        "ConvNextConfig",
        224,
        {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536]},
    ),
    "resnet": ("ResNetForImageClassification", "ResNetConfig", 224, {}),
    "deeplabv3_mobilenet_v2_1.0_513": (
        "MobileNetV2ForSemanticSegmentation",
        "MobileNetV2Config",
        513,
        {"output_stride": 8},
    ),
    "segformer": ("SegformerForSemanticSegmentation", "SegformerConfig", 512, {"attn_implementation": "eager"}),
}
FROM_TRANSFORMERS = ("Llama-2-7b-hf", "Llama-2-7B", "google/vit", "microsoft", "facebook/convnext", "google/deeplab")
PROGRAMS: dict[str, Callable[[Line], Metered | None]] = {
    "Llama-2-7b-hf": _llama,
    "Llama-2-7B": _gpt_fast,
    "GPT-2 124M": _gpt2,
    "google/vit-base-patch16-224": _vision,
    "microsoft/": _vision,
    "facebook/convnext": _vision,
    "google/deeplab": _vision,
    "nvidia/segformer": _vision,
    "ResNet-50": _resnet,
    "SD1.5 txt2img": _stable_diffusion,
}
