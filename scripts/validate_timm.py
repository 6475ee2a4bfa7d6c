"""Inference of image models under AMP: the step times that pytorch-image-models publishes (results/*.csv).

Its benchmark ran fp32 weights under autocast(float16) with inference_mode, NCHW, and fast norms (layer norm in
fp16); weights are cast again in every step.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import torch
from validate import Line, Row, roofline_seconds

from flopmeter import FlopMeter, load_hardware
from flopmeter.timing import uncertainty

PROFILES = {"rtx3090": "rtx-3090", "rtx4090": "rtx-4090"}
EAGER = ("eager", "2.4")  # mode and version of torch that both cards were measured with


def image_models(path: Path, count: int) -> Iterator[tuple[str, list[Row]]]:
    """A row for each card that ran one of `count` models, spread over the families. Models whose attention takes the
    math path have a table of their own: torch 2.5 began to compute it in fp32, the measurements are older."""
    mode, version = EAGER
    lines = [line for line in csv.DictReader(path.open()) if line["mode"] == mode and line["torch"].startswith(version)]
    chosen = spread({line["model"] for line in lines}, count)
    meters: dict[str, tuple[Line, FlopMeter | None]] = {}
    tables: dict[bool, list[Row]] = {False: [], True: []}
    for line in lines:
        if line["model"] not in chosen:
            continue
        if line["model"] not in meters:
            meters[line["model"]] = line, trace(line["model"], line["img_size"], line["batch"])
        first, meter = meters[line["model"]]
        if meter is not None and (line["img_size"], line["batch"]) == (first["img_size"], first["batch"]):
            tables[_multiplies_in_fp32(meter)].append(_row(line, meter))
    yield "image models, eager", tables[False]
    if tables[True]:
        yield "image models, eager, with math attention", tables[True]


def _multiplies_in_fp32(meter: FlopMeter) -> bool:
    """Under autocast no product does, but those that torch's own kernels ask for."""
    costs = (kernel.cost for kernel in meter.report().kernels)
    return any(cost.macs and cost.dtype == "fp32" for cost in costs)


def family(model: str) -> str:
    return model.partition("_")[0].rstrip("0123456789")


def spread(models: set[str], count: int) -> set[str]:
    """`count` of the models: one of each family in turn, the middle one of those left."""
    families: dict[str, list[str]] = {}
    for model in sorted(models):
        families.setdefault(family(model), []).append(model)
    chosen: list[str] = []
    while len(chosen) < count and families:
        for name in list(families):
            chosen.append(families[name].pop(len(families[name]) // 2))
            if not families[name]:
                del families[name]
    return set(chosen[:count])


def trace(model_name: str, img_size: str, batch: str) -> FlopMeter | None:
    """The metered forward pass; None for a model that does not run on meta."""
    _declare_torchvision_ops()
    timm = import_module("timm")
    timm.layers.set_fast_norm(True)
    try:
        with torch.device("meta"):
            model = timm.create_model(model_name).eval()
            images = torch.empty(int(batch), 3, int(img_size), int(img_size))
        with FlopMeter("rtx-4090") as meter, torch.inference_mode(), torch.autocast("cuda", torch.float16):
            model(images)
    except Exception as error:
        print(f"left out: {model_name}: {type(error).__name__}: {str(error)[:120]}")
        return None
    return meter


def _row(line: Line, meter: FlopMeter) -> Row:
    device = load_hardware(PROFILES[line["gpu"]])
    report = meter.report(hardware=device)
    bounds = uncertainty(report.timings, report.seconds, device)
    return Row(
        group=family(line["model"]),
        gpu=line["gpu"],
        measured=float(line["step_time_ms"]) * 1e-3,
        predicted=report.seconds,
        low=bounds.low,
        high=bounds.high,
        roofline=roofline_seconds(report, device),
        name=line["model"],
    )


_TORCHVISION: list[torch.library.Library] = []


def _declare_torchvision_ops() -> None:
    """A CPU build of torch cannot load torchvision's extension, but its Python part asks for these schemas."""
    if not _TORCHVISION:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _TORCHVISION.append(library)
