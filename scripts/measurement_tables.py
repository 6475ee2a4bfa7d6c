"""How each table of measurements is made from the files of its repository. fetch_measurements.py says which files.

A table is a list of rows, or the bytes of a file that is taken as it is; its name is the path below the folder of all
tables. The columns are those that validate.py reads.
"""

from __future__ import annotations

import csv
import json
import re
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
Tables = dict[str, Any]  # Rows or bytes, by path

DIGITS = 5  # of NeuSight's latencies, whose repeats agree on fewer


class TableError(ValueError):
    """A source that is missing, is another version, or has another layout."""


# --- NeuSight: fp32 operators and networks ------------------------------------------------------------------------

NEUSIGHT_GPUS = {
    "NVIDIA A100-PCIE-40GB": "A100-40",
    "NVIDIA A100 80GB PCIe": "A100-80",
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA L4": "L4",
    "Tesla P4": "P4",
    "Tesla P100-PCIE-16GB": "P100",
    "Tesla T4": "T4",
    "Tesla V100-PCIE-32GB": "V100",
    "AMD Instinct MI100": "MI100",
    "AMD Instinct MI210": "MI210",
    "AMD Instinct MI250": "MI250",
}
ELEMENTWISE = ("add", "addu", "mul", "mulu", "div", "divu", "pow", "powu", "relu", "gelu", "tanh")
VECTOR_FOLDERS = ("softmax", "ln", *ELEMENTWISE)  # those that AMD's training sizes are taken from
_ROWS = {"rows": "B", "cols": "H"}
_PRODUCT = {"m": "M", "n": "K", "k": "N"}  # what NeuSight calls N is contracted
# By table: the folders of the collected sizes, the file of the test sizes, and the columns that name the sizes.
OPERATORS: dict[str, tuple[tuple[str, ...], str | None, dict[str, str]]] = {
    "linear": (("linear",), "linear", _PRODUCT),
    "bmm": (("bmm",), "bmm", {"b": "B", **_PRODUCT}),
    "softmax": (("softmax",), "softmax", _ROWS),
    "layernorm": (("ln",), "ln", _ROWS),
    "elementwise": (ELEMENTWISE, "elem", _ROWS),
    "conv2d": (
        ("conv",),
        None,
        {
            "batch": "B", "c_in": "Input_Channel", "c_out": "Output_Channel", "kernel": "Kernel_Szie",
            "size": "Input_Size", "stride": "Stride", "padding": "Padding",
        },
    ),
}  # fmt: skip
_OP_NAMES = {"ln": "layernorm", "conv": "conv2d"}
# The first and the last node of the layer that was measured; the network has `num_layer` of it.
LAYERS = {
    "bert": ("bert_encoder_layer_0_attention_self_query", "bert_encoder_layer_0_output_layer_norm"),
    "gpt": ("transformer_h_0_ln_1", "add_15"),
    "opt": ("model_decoder_layers_0_self_attn_layer_norm", "view_11"),
}
PREDICTORS = ("roofline", "habitat", "neusight", "micro")
MOST_DISAGREEMENT = 0.15  # of a network's time and the sum of its operators', in a row that agrees with itself


def neusight(root: Path) -> Tables:
    top = root / "scripts/asplos"
    tables = {f"neusight/{name}.csv": _operator_rows(top / "data", name) for name in OPERATORS}
    return {**tables, "neusight/e2e.csv": list(_network_rows(top))}


def _operator_rows(data: Path, name: str) -> Rows:
    folders, test, sizes = OPERATORS[name]
    collected = [path for folder in folders for path in sorted(data.glob(f"dataset/train/collect/{folder}/*/*.csv"))]
    for folder in (folder for folder in folders if folder in VECTOR_FOLDERS):
        collected += sorted(data.glob(f"dataset_amd/train/collect/{folder}/*/*.csv"))
    tested = [path for folder in folders for path in sorted(data.glob(f"dataset_amd/test/collect/{folder}/*/*.csv"))]
    tested += [path for path in [data / f"dataset/test/{test}.csv"] if path.is_file()]
    files = [(path, "micro_train") for path in collected] + [(path, "micro_test") for path in tested]
    if not files:
        raise TableError(f"{data} has no measurements of {name}")
    return [row for path, source in files for row in _of_file(path, source, sizes)]


def _of_file(path: Path, source: str, sizes: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    for line in _lines(path):
        if line["Device"] in NEUSIGHT_GPUS:
            yield {
                "gpu": NEUSIGHT_GPUS[line["Device"]],
                "op": _OP_NAMES.get(line["OPName"], line["OPName"]),
                **{name: int(float(line[column])) for name, column in sizes.items()},
                "dtype": "float32",
                "latency_ms": float(f"{float(line['Latency']):.{DIGITS}g}"),
                "source": source,
            }


def _network_rows(top: Path) -> Iterator[dict[str, Any]]:
    """Measured networks of one GPU, with what other predictors say, and whether the row agrees with itself."""
    for path in sorted(top.glob("label/*/*.json")):
        found = re.fullmatch(r"([a-z0-9_]+)-(inf|train)-(\d+)-(\d+)", path.stem)
        gpu = _gpu_of_folder(path.parent.name)
        operators = path.with_suffix(".csv")
        if found is None or gpu is None or not operators.is_file() or not operators.stat().st_size:
            continue
        model, mode, seq, batch = found.groups()
        markers = next((LAYERS[family] for family in LAYERS if model.startswith(family)), None)
        if markers is None:
            continue
        label = json.loads(path.read_text(encoding="utf-8"))
        measured, total = label["e2e_latency"], _operators_ms(operators, markers, int(label["num_layer"]))
        yield {
            "model": model, "config": _config(top / f"data/DLmodel_configs/{model}.json"), "gpu": gpu, "mode": mode,
            "seq": seq, "batch": batch, "measured_ms": round(measured, 3),
            **{f"{name}_ms": _predicted_ms(top, path, name) for name in PREDICTORS},
            "sum_measured_ops_ms": round(total, 3),
            "consistent": abs(total / measured - 1) <= MOST_DISAGREEMENT,
        }  # fmt: skip


def _gpu_of_folder(name: str) -> str | None:
    return next((gpu for title, gpu in NEUSIGHT_GPUS.items() if title.replace(" ", "_") == name), None)


def _operators_ms(path: Path, markers: tuple[str, str], layers: int) -> float:
    """Forward and backward; the networks were measured without adding to earlier gradients, `acc_latency`."""
    lines = list(_lines(path))
    names = [line["Name"] for line in lines]
    latencies = [float(line["fw_latency"] or 0) + float(line["bw_latency"] or 0) for line in lines]
    start, end = names.index(markers[0]), names.index(markers[1]) + 1
    return sum(latencies) + (layers - 1) * sum(latencies[start:end])


def _config(path: Path) -> str:
    """Sizes by the names of validate_networks.py; each family has its own."""
    config = json.loads(path.read_text(encoding="utf-8"))

    def first(*names: str) -> Any:
        return next((config[name] for name in names if config.get(name) is not None), None)

    hidden = first("hidden_size", "n_embd")
    sizes = {
        "layers": first("num_hidden_layers", "n_layer"),
        "hidden": hidden,
        "heads": first("num_attention_heads", "n_head"),
        "ffn": first("intermediate_size", "ffn_dim", "n_inner") or 4 * hidden,
        "vocab": config["vocab_size"],
    }
    return ";".join(f"{name}={value}" for name, value in sizes.items())


def _predicted_ms(top: Path, label: Path, predictor: str) -> float | str:
    path = top / "results/prediction" / label.parent.name / predictor / label.name
    return round(json.loads(path.read_text(encoding="utf-8"))["e2e_latency"], 3) if path.is_file() else ""


# --- pytorch-image-models: image models under AMP ------------------------------------------------------------------

_BENCHMARK = re.compile(
    r"benchmark-(infer|train)-amp-(nchw|nhwc)-pt(1\d\d|2\d\d)-cu(\d+)-(?:rtx)?(\d{4})(-dynamo)?\.csv"
)


def timm(root: Path) -> Tables:
    """dev.csv: inference on RTX 3090 and 4090 in torch 2.4 and 2.9; the 5090 and training have files of their own."""
    tables: dict[str, Rows] = {name: [] for name in ("dev", "rtx5090_eager", "rtx3090_train")}
    for path in sorted((root / "results").glob("benchmark-*.csv")):
        found = _BENCHMARK.fullmatch(path.name)
        if found:
            table, rows = _benchmark(path, found)
            if table in tables:
                tables[table] += rows
    if not any(tables.values()):
        raise TableError(f"{root} has no results/benchmark-*.csv")
    return {f"timm/{name}.csv": rows for name, rows in tables.items() if rows}


def _benchmark(path: Path, found: re.Match[str]) -> tuple[str, Rows]:
    kind, layout, digits, cuda, card, dynamo = found.groups()
    # pt112 is torch 1.12, pt291 torch 2.9.1
    torch = f"1.{digits[1:]}" if digits[0] == "1" else ".".join(digits)
    mode = "train" if kind == "train" else "dynamo" if dynamo else "eager" + "_nhwc" * (layout == "nhwc")
    table = _timm_table(kind, layout, torch, f"rtx{card}", mode)
    return table, [_timm_row(line, kind, f"rtx{card}", mode, f"{torch}+cu{cuda}") for line in _lines(path)]


def _timm_table(kind: str, layout: str, torch: str, gpu: str, mode: str) -> str:
    """The table that the file belongs to; '' for none."""
    if kind == "train":
        return "rtx3090_train" if (torch, layout) == ("1.12", "nchw") else ""
    if not torch.startswith(("2.4.", "2.9.")):
        return ""
    return "dev" if gpu != "rtx5090" else f"rtx5090_{mode}"


def _timm_row(line: Mapping[str, str], kind: str, gpu: str, mode: str, torch: str) -> dict[str, Any]:
    row = {
        "model": line["model"], "gpu": gpu, "mode": mode, "torch": torch,
        "img_size": line[f"{kind}_img_size"], "batch": line[f"{kind}_batch_size"],
        "step_time_ms": line[f"{kind}_step_time"], "samples_per_s": line[f"{kind}_samples_per_sec"],
    }  # fmt: skip
    if kind == "infer":
        row |= {"gmacs": line["infer_gmacs"], "macts": line["infer_macts"]}
    return {**row, "params_m": line["param_count"]}


# --- aiconfigurator: kernels of language models --------------------------------------------------------------------

NVIDIA_SYSTEMS = {
    "a100_sxm": "a100-sxm4-80gb",
    "h100_sxm": "h100-sxm5-80gb",
    "h200_sxm": "h200-sxm-141gb",
    "l40s": "l40s",
}
GEMM_KINDS = {"bfloat16": "bf16", "fp8": "fp8", "fp8_static": "fp8"}
PHASES = {"context": "context_attention", "generation": "generation_attention", "encoder": "encoder_attention"}
_16_BITS = ("bfloat16", "float16")
Record = dict[str, Any]


def aiconfigurator(root: Path) -> Tables:
    data = root / "aic-core/src/aiconfigurator_core/systems/data"
    gemms = list(_gemm_records(data))
    return {
        "kernels/gemm.csv": _gemm_rows(gemms),
        "kernels/power.csv": _power_rows(gemms),
        "kernels/attention.csv": _attention_rows(data),
        "kernels/moe.csv": _moe_rows(data),
        "kernels/collectives.csv": _collective_rows(data),
    }


def _gemm_records(data: Path) -> Iterator[Record]:
    """Of fp8 with scales that are made at run time, only TensorRT-LLM's kernels are alike."""
    for path, record in _records(data, "gemm/*/*/gemm_perf.parquet"):
        kind = record["gemm_dtype"]
        if kind in GEMM_KINDS and (kind != "fp8" or path.parts[-3] == "trtllm"):
            yield {**record, "dtype": GEMM_KINDS[kind], "kind": kind}


def _gemm_rows(gemms: Iterable[Record]) -> Rows:
    def watts(same: Sequence[Record]) -> Record:
        powers = [record["power"] for record in same if record.get("power")]
        return {"watts": round(statistics.median(powers), 1) if powers else ""}

    return _merged(gemms, ("gpu", "dtype", "kind", "m", "n", "k"), watts)


def _power_rows(gemms: Iterable[Record]) -> Rows:
    """The same product in a run that was long enough for its power to be logged, and in others."""
    names = ("gpu", "dtype", "m", "n", "k")
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in gemms:
        if record["kind"] == "bfloat16":
            groups[tuple(record[name] for name in names)].append(record)
    rows = []
    for key, same in sorted(groups.items()):
        logged = [record for record in same if record.get("power")]
        bursts = [record["latency"] for record in same if not record.get("power")]
        if logged and bursts:
            rows.append(
                {
                    **dict(zip(names, key, strict=True)),
                    "sustained_ms": _milliseconds(record["latency"] for record in logged),
                    "watts": round(statistics.median(record["power"] for record in logged), 1),
                    "limit_watts": statistics.median(record["power_limit"] for record in logged),
                    "burst_ms": _milliseconds(bursts),
                }
            )
    return rows


def _attention_rows(data: Path) -> Rows:
    names = ("phase", "gpu", "kernel_source", "batch_size", "isl", "step", "num_heads", "num_key_value_heads")
    records = (
        {
            "step": 0,
            "num_key_value_heads": 0,
            **record,
            "phase": phase,
            "window_size": float(record.get("window_size", 0)),
        }
        for phase, table in PHASES.items()
        for _, record in _records(data, f"*attention/*/*/{table}_perf.parquet")
        if record["attn_dtype"] in _16_BITS and record.get("kv_cache_dtype", record["attn_dtype"]) in _16_BITS
    )
    return _merged(records, (*names, "head_dim", "window_size"))


def _moe_rows(data: Path) -> Rows:
    names = ("gpu", "kernel_source", "num_tokens", "hidden_size", "inter_size", "topk", "num_experts")
    records = (record for _, record in _records(data, "moe/*/*/moe_perf.parquet") if record["moe_dtype"] in _16_BITS)
    return _merged(records, (*names, "moe_tp_size", "moe_ep_size", "distribution"))


def _collective_rows(data: Path) -> Rows:
    records = (record for _, record in _records(data, "comm/nccl/*/nccl_perf.parquet"))
    return _merged(records, ("gpu", "op_name", "nccl_dtype", "num_gpus", "message_size"))


def _records(data: Path, pattern: str) -> Iterator[tuple[Path, Record]]:
    """The rows of all frameworks and versions, each with its GPU."""
    for system, gpu in NVIDIA_SYSTEMS.items():
        for path in sorted((data / system).glob(pattern)):
            columns = _parquet(path)
            for values in zip(*columns.values(), strict=True):
                yield path, {**dict(zip(columns, values, strict=True)), "gpu": gpu}


def _parquet(path: Path) -> dict[str, list[Any]]:
    try:
        columns: dict[str, list[Any]] = import_module("pyarrow.parquet").read_table(path).to_pydict()
    except ImportError:
        raise TableError("aiconfigurator's tables are parquet files: pip install pyarrow") from None
    return columns


def _merged(
    records: Iterable[Record], names: Sequence[str], more: Callable[[Sequence[Record]], Record] = lambda same: {}
) -> Rows:
    """One row for equal values of `names`: the median over frameworks and versions, and their extremes."""
    groups: dict[tuple[Any, ...], list[Record]] = defaultdict(list)
    for record in records:
        groups[tuple(record[name] for name in names)].append(record)
    return [
        {
            **dict(zip(names, key, strict=True)),
            "ms": _milliseconds(record["latency"] for record in same),
            "ms_low": round(min(record["latency"] for record in same), 6),
            "ms_high": round(max(record["latency"] for record in same), 6),
            "sources": len(same),
            **more(same),
        }
        for key, same in sorted(groups.items())
    ]


def _milliseconds(latencies: Iterable[float]) -> float:
    return round(statistics.median(latencies), 6)


# --- vidur: operators of transformer layers ------------------------------------------------------------------------

VIDUR_GPUS = {"a100": "a100-sxm4-80gb", "a40": "a40"}
_OF_A_MODEL = ("n_embd", "n_expanded_embd", "n_head", "n_kv_head", "vocab_size", "use_gated_mlp")
_OF_A_ROW = ("num_tokens", "num_tensor_parallel_workers")
VIDUR_OPERATORS = (
    "emb", "input_layernorm", "attn_pre_proj", "attn_rope", "attn_post_proj", "mlp_up_proj", "mlp_act",
    "mlp_down_proj", "add", "post_attention_layernorm",
)  # fmt: skip


def vidur(root: Path) -> Tables:
    """Medians of each operator; '' where a model has none."""
    rows = [
        {
            "gpu": gpu, "model": path.parent.name,
            **{name: line[name] for name in (*_OF_A_MODEL, *_OF_A_ROW)},
            **{f"{name}_ms": line.get(f"time_stats.{name}.median", "") for name in VIDUR_OPERATORS},
        }
        for folder, gpu in VIDUR_GPUS.items()
        for path in sorted((root / f"data/profiling/compute/{folder}").glob("*/*/mlp.csv"))
        for line in _lines(path)
    ]  # fmt: skip
    if not rows:
        raise TableError(f"{root} has no data/profiling/compute/*/*/*/mlp.csv")
    return {"kernels/transformer_ops.csv": rows}


# --- traces of torch.profiler --------------------------------------------------------------------------------------

TRACES = {
    "h100_bert-small": "tests/traces/h100/gaunernst_bert-small-uncased__1016001.json.gz",
    "h100_vit": "tests/traces/h100/Falconsai_nsfw_image_detection__1016002.json.gz",
    "h100_qwen1.5-0.5b": "tests/traces/h100/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "mi300x_qwen1.5-0.5b": "tests/traces/mi300/Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz",
    "mi300x_timesformer": "tests/traces/mi300/facebook_timesformer-base-finetuned-k400__1016002.json.gz",
    "mi300x_resnet_training": "tests/traces/mi300/resnet_act_checkpoint.json.gz",
    "mi300x_normalizations": "tests/traces/perf_model/normalization/normalization_layer_test.json.gz",
    "v100_old_format": "tests/data/trace_diff/test/test.json.gz",  # of HolisticTraceAnalysis
}


def traces(root: Path) -> Tables:
    """The files themselves, under names that say what ran where."""
    found = {
        f"traces/{name}.json.gz": (root / path).read_bytes() for name, path in TRACES.items() if (root / path).is_file()
    }
    if not found:
        raise TableError(f"{root} has none of the traces")
    return found


def _lines(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)
