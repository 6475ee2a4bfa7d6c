"""GEMMs of language models, one by one, in bf16 and fp8 (aiconfigurator)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from validate_kernels import LEAST_SECONDS, Program, kernel_rows
from validation_rows import Line, Row

from flopmeter import load_hardware, register_cost
from flopmeter.costs import make_cost
from flopmeter.records import ELEMENTWISE, Call, Cost

LAYERS = 6  # that the benchmark replays in turn
BY_DATASHEET = "GEMM, bf16, the GPU left out"


@torch.library.custom_op("validate::quantise", mutates_args=())
def quantise(x: torch.Tensor) -> torch.Tensor:
    """To fp8 by a kernel of a framework, which converts in hardware: memory traffic, and a product with the scale."""
    raise NotImplementedError("it runs on meta only")


@quantise.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)


@register_cost(quantise)
def _quantise_cost(call: Call) -> Cost:
    return make_cost(call, ELEMENTWISE, call.outputs[0].numel)


def gemms(lines: list[Line]) -> dict[str, list[Row]]:
    """[m, k] @ [k, n], the weight as [n, k]. Of fp8 the scales are known beforehand (`fp8_static`), or the activations
    are quantised by a kernel of their own (`fp8`). In bf16 also as if nobody had measured anything on the device, which
    is then priced by its datasheet and the laws of power and memory."""
    rows: dict[str, list[Row]] = {"GEMM, bf16": [], BY_DATASHEET: [], "GEMM, fp8": []}
    for line in lines:
        if float(line["ms"]) * 1e-3 >= LEAST_SECONDS:
            m, n, k = (int(line[size]) for size in "mnk")
            layers = [_layer(m, n, k, line["kind"]) for _ in range(LAYERS)]
            device, tables = load_hardware(line["gpu"]), [f"GEMM, {line['dtype']}"]
            devices = [device]
            if line["dtype"] == "bf16":
                tables.append(BY_DATASHEET)
                devices.append(replace(device, achieved=None))
            priced = kernel_rows(line["kind"], line, layers[0], (m, n, k), devices, before=_in_turn(layers))
            for table, row in zip(tables, priced, strict=True):
                rows[table].append(row)
    return rows


def _in_turn(layers: Sequence[Program]) -> Program:
    return lambda: [layer() for layer in layers]


def _layer(m: int, n: int, k: int, kind: str) -> Program:
    """One of the layers that the benchmark replays in turn, each with weights of its own."""
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float8_e4m3fn
    weight = torch.empty(n, k, dtype=dtype, device="meta").t()
    x, out = _shared(m, n, k)
    if kind == "bfloat16":
        return lambda: torch.mm(x, weight, out=out)
    one = torch.ones((), dtype=torch.float32, device="meta")

    def run() -> object:
        if kind == "fp8":
            torch.linalg.vector_norm(x, float("inf"))
        return torch._scaled_mm(quantise(x), weight, one, one, out_dtype=torch.bfloat16)

    return run


@functools.lru_cache(1)
def _shared(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The activations that all layers read, and the memory that all write to."""
    x, out = (torch.empty(m, columns, dtype=torch.bfloat16, device="meta") for columns in (k, n))
    return x, out
