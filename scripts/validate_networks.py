"""NeuSight's whole networks: fp32 transformers, forward, or forward and backward without the optimizer."""

from __future__ import annotations

import csv
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from measured_programs import attention_of_2023
from validate_neusight import PROFILES, kernels_of_torch_2_1
from validation_rows import Line, Row, roofline_seconds

from flopmeter import FlopMeter, load_hardware, on_meta
from flopmeter.timing import uncertainty

FAMILIES = ("bert", "gpt", "opt")
PREDICTORS = ("habitat", "neusight", "micro")  # with a column of their own


def networks(folder: Path) -> list[Row]:
    """The consistent rows of e2e.csv and e2e_more.csv: the others differ by over 15 % from the sum of their own
    operators. Mixtures of experts (switch) are left out: the file does not say how many tokens each expert got."""
    lines = [
        line
        for path in network_files(folder)
        for line in csv.DictReader(path.open())
        if line["consistent"] == "True" and line["model"].startswith(FAMILIES)
    ]
    meters: dict[tuple[str, ...], FlopMeter] = {}
    return [_row(line, meters) for line in lines]


def network_files(folder: Path) -> list[Path]:
    return [path for path in (folder / "e2e.csv", folder / "e2e_more.csv") if path.is_file()]


def _row(line: Line, meters: dict[tuple[str, ...], FlopMeter]) -> Row:
    device = load_hardware(PROFILES[line["gpu"]])
    program = (line["model"], line["config"], line["mode"], line["seq"], line["batch"])
    if program not in meters:  # fp32 eager programs dispatch alike on all of these devices
        meters[program] = _meter(line)
    with kernels_of_torch_2_1():
        report = meters[program].report(hardware=device)
    bounds = uncertainty(report.timings, report.seconds, device)
    return Row(
        group=line["model"],
        gpu=line["gpu"],
        measured=float(line["measured_ms"]) * 1e-3,
        predicted=report.seconds,
        low=bounds.low,
        high=bounds.high,
        roofline=roofline_seconds(report, device),
        name=f"{line['model']} {line['mode']} {line['seq']}x{line['batch']}",
        published=tuple((name, float(line[f"{name}_ms"]) * 1e-3) for name in PREDICTORS if line[f"{name}_ms"]),
        mode=line["mode"],
    )


def _meter(line: Line) -> FlopMeter:
    sizes = {name: int(value) for name, value in (part.split("=") for part in line["config"].split(";"))}
    with torch.device("meta"):
        model = _model(line["model"], sizes, int(line["seq"]), is_training=line["mode"] == "train")
        tokens = torch.zeros(int(line["batch"]), int(line["seq"]), dtype=torch.long)
    is_training = line["mode"] == "train"
    model.train(is_training)
    no_cache = {} if line["model"].startswith("bert") else {"use_cache": False}
    with FlopMeter(PROFILES[line["gpu"]]) as meter, attention_of_2023():
        with torch.set_grad_enabled(is_training):
            logits = model(input_ids=on_meta(tokens), **no_cache).logits
        if is_training:
            logits.backward(torch.empty_like(logits))
    return meter


def _model(name: str, sizes: dict[str, int], seq: int, *, is_training: bool) -> Any:
    """One of FAMILIES by the first part of its name; BERT has no language head in inference."""
    transformers = import_module("transformers")
    eager = {"attn_implementation": "eager", "vocab_size": sizes["vocab"]}
    layers, hidden, heads, ffn = (sizes[key] for key in ("layers", "hidden", "heads", "ffn"))
    if name.startswith("bert"):
        bert = transformers.BertConfig(
            hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=ffn, **eager
        )
        return (transformers.BertForMaskedLM if is_training else transformers.BertForSequenceClassification)(bert)
    if name.startswith("gpt"):
        gpt = transformers.GPT2Config(
            n_positions=seq, n_embd=hidden, n_layer=layers, n_head=heads, n_inner=ffn, **eager
        )
        return transformers.GPT2LMHeadModel(gpt)
    opt = transformers.OPTConfig(
        hidden_size=hidden, word_embed_proj_dim=hidden, num_hidden_layers=layers, num_attention_heads=heads,
        ffn_dim=ffn, max_position_embeddings=seq, **eager,
    )  # fmt: skip
    return transformers.OPTForCausalLM(opt)
