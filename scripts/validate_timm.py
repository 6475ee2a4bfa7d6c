"""Image models under AMP: the step times that pytorch-image-models publishes (results/*.csv).

Its benchmark of inference ran fp32 weights under autocast(float16) with inference_mode and fast norms (layer norm in
fp16); weights are cast again in every step. `eager` is NCHW, `eager_nhwc` channels-last, `dynamo` torch.compile with
its defaults. Its runs with torch 2.4 set constants, those with 2.9 set none. Two files beside it have tables of their
own: the RTX 5090, with norms in fp32, and training on an RTX
3090 (forward, backward, SGD) in NCHW with torch 1.12, which had no fused attention.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from importlib import import_module
from math import isclose
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from validation_rows import Line, Row, roofline_seconds

from flopmeter import FlopMeter, load_hardware
from flopmeter.launch.modes import Mode

PROFILES = {"rtx3090": "rtx-3090", "rtx4090": "rtx-4090"}
VERSIONS = {"2.4": "", "2.9": ", torch 2.9"}  # of torch, and what the titles say of it
MODES: dict[str, Mode] = {
    "eager": "eager",
    "eager_nhwc": "eager",
    "dynamo": "compiled",
}  # the file's name of a run, and the report's
BESIDE = {  # files beside the first one: the title of their table, the profile
    "rtx5090_eager.csv": ("image models, eager, norms in fp32", "rtx-5090"),
    "rtx3090_train.csv": ("image models, training", "rtx-3090"),
}
SAME_PARAMETERS = 0.02  # in which the model that this timm builds may differ from the one that was measured
Key = tuple[str, ...]


def image_models(path: Path, count: int) -> Iterator[tuple[str, list[Row]]]:
    """A row for each run of `count` models, by version of torch and mode, and what compiling brings."""
    lines = [line for line in csv.DictReader(path.open()) if line["mode"] in MODES]
    for version, title in VERSIONS.items():
        yield from _of_version([line for line in lines if line["torch"].startswith(version)], title, count)
    yield from _beside(path, count)


def _of_version(lines: list[Line], version: str, count: int) -> Iterator[tuple[str, list[Row]]]:
    """The models are spread over the families. Those whose attention takes the math path have a table of their own:
    torch 2.5 began to compute it in fp32, and most of the measurements are older."""
    chosen = spread({line["model"] for line in lines}, count)
    meters: dict[Key, FlopMeter | None] = {}
    tables: dict[str, list[tuple[Line, Row]]] = {}
    for line in sorted(lines, key=lambda line: list(MODES).index(line["mode"])):
        key = (line["model"], line["img_size"], line["batch"], "nhwc" * line["mode"].endswith("nhwc"), line["reparam"])
        if line["model"] not in chosen:
            continue
        if key not in meters:
            meters[key] = trace(*key[:4], merges_branches=line["reparam"] == "1", params_m=line["params_m"])
        meter = meters[key]
        if meter is not None:
            math = ", with math attention" if _multiplies_in_fp32(meter) else ""
            tables.setdefault(f"image models{version}, {line['mode']}{math}", []).append((line, _row(line, meter)))
    for title, rows in tables.items():
        yield title, [row for _, row in rows]
    both = speed_ups(*(tables.get(f"image models{version}, {mode}", ()) for mode in ("eager", "dynamo")))
    if both:
        yield f"image models{version}, compiled over eager", both


def _beside(path: Path, count: int) -> Iterator[tuple[str, list[Row]]]:
    for name, (title, profile) in BESIDE.items():
        file = path.with_name(name)
        lines = list(csv.DictReader(file.open())) if file.is_file() else []
        chosen = spread({line["model"] for line in lines}, count)
        rows = []
        for line in lines:
            if line["model"] in chosen and line["mode"] in ("eager", "train"):
                size = line["model"], line["img_size"], line["batch"]
                meter = trace(
                    *size,
                    profile=profile,
                    trains=line["mode"] == "train",
                    has_fast_norms=False,
                    merges_branches=line.get("reparam") == "1",
                    params_m=line["params_m"],
                )
                rows += [] if meter is None else [_row(line, meter, profile, "eager")]
        if rows:
            yield title, rows


def speed_ups(eager: Iterable[tuple[Line, Row]], compiled: Iterable[tuple[Line, Row]]) -> list[Row]:
    """Images a second compiled over those eager, of the models that a card ran in both."""
    by_run = {(line["gpu"], line["model"]): (line, row) for line, row in eager}
    rows = []
    for line, after in compiled:
        if (line["gpu"], line["model"]) not in by_run:
            continue
        first, before = by_run[line["gpu"], line["model"]]
        images = int(line["batch"]) / int(first["batch"])
        rows.append(
            after._replace(
                measured=images * before.measured / after.measured,
                predicted=images * before.predicted / after.predicted,
                low=images * before.predicted / after.high,
                high=images * before.predicted / after.low,
                roofline=images * before.roofline / after.roofline,
            )
        )
    return rows


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


def trace(
    model_name: str,
    img_size: str,
    batch: str,
    layout: str = "",
    *,
    profile: str = "rtx-4090",
    trains: bool = False,
    has_fast_norms: bool = True,
    merges_branches: bool = False,
    params_m: str = "",
) -> FlopMeter | None:
    """The metered forward pass or training step; None for a model that does not run on meta. `merges_branches`: into
    one convolution, as for inference (benchmark.py --reparam), which computes with the weights. `params_m`: millions of
    parameters of the model that was measured. Some names mean another model in newer releases of timm."""
    declare_torchvision_ops()
    timm = import_module("timm")
    timm.layers.set_fast_norm(has_fast_norms)
    timm.layers.set_fused_attn(not trains)
    order = torch.channels_last if layout == "nhwc" else torch.contiguous_format
    try:
        with torch.device("cpu" if merges_branches else "meta"):
            model = timm.create_model(model_name)
        if merges_branches:
            model = import_module("timm.utils.model").reparameterize_model(model).to("meta")
        has_m = sum(weights.numel() for weights in model.parameters()) / 1e6
        if params_m and not isclose(has_m, float(params_m), rel_tol=SAME_PARAMETERS, abs_tol=0.01):
            raise ValueError(f"timm builds {has_m:.2f} million parameters, measured were {params_m}")
        model = model.train(trains).to(memory_format=order)
        with torch.device("meta"):
            images = torch.empty(int(batch), 3, int(img_size), int(img_size)).to(memory_format=order)
        with FlopMeter(profile) as meter:
            if trains:
                _training_step(model, images)
            else:
                with torch.inference_mode(), torch.autocast("cuda", torch.float16):
                    model(images)
    except Exception as error:
        print(f"left out: {model_name}: {type(error).__name__}: {str(error)[:120]}")
        return None
    return meter


def _training_step(model: nn.Module, images: Tensor) -> None:
    with torch.autocast("cuda", torch.float16):
        scores: Any = model(images)
        scores = scores[0] if isinstance(scores, tuple | list) else scores
        loss = F.cross_entropy(scores, torch.zeros(len(images), dtype=torch.long, device="meta"))
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=1e-4).step()


def _row(line: Line, meter: FlopMeter, profile: str = "", mode: Mode | None = None) -> Row:
    device = load_hardware(profile or PROFILES[line["gpu"]])
    report = meter.report(hardware=device, mode=mode or MODES[line["mode"]])
    return Row(
        group=family(line["model"]),
        gpu=line["gpu"],
        measured=float(line["step_time_ms"]) * 1e-3,
        predicted=report.seconds,
        low=report.seconds_low,
        high=report.seconds_high,
        roofline=roofline_seconds(report, device),
        name=line["model"],
        mode=line["mode"],
    )


_TORCHVISION: list[torch.library.Library] = []


def declare_torchvision_ops() -> None:
    """A CPU build of torch cannot load torchvision's extension, but its Python part asks for these schemas."""
    if not _TORCHVISION:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _TORCHVISION.append(library)
