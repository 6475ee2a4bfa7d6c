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
from flopmeter.records import ELEMENTWISE, Call, Cost, Reread

LAYERS = 6  # that the benchmark replays in turn
BY_DATASHEET = "GEMM, bf16, the GPU left out"


# TensorRT-LLM's kernels for a scale of the whole tensor (cpp/tensorrt_llm/common/cudaFp8Utils.cu): so many blocks and
# threads whatever its size, which walk it one element at a time. Beside an element's arithmetic there are its index,
# the test for the end and its address, in 64 bits two instructions each, the branch and a shift to fp32. A division is
# eight more.
BLOCKS, SCALE_THREADS = 1024, 1024
WALK_INTEGERS, DIVISION_INTEGERS = 8, 8
MAXIMUM_OPERATIONS = 60  # of a block: over 32 lanes, and over 32 warps


@torch.library.custom_op("tensorrt_llm::find_scale", mutates_args=())
def find_scale(x: torch.Tensor) -> torch.Tensor:
    """The largest value; each block adds its own to the result by a trip to the L2 cache."""
    raise NotImplementedError("it runs on meta only")


@torch.library.custom_op("tensorrt_llm::quantise", mutates_args=())
def quantise(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """To fp8, by a conversion in hardware."""
    raise NotImplementedError("it runs on meta only")


@find_scale.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(())


@quantise.register_fake
def _(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, dtype=torch.float8_e4m3fn)


@register_cost(find_scale)
def _find_scale_cost(call: Call) -> Cost:
    numel = call.inputs[0].numel
    block = Reread(0, BLOCKS, 2 * numel // BLOCKS, SCALE_THREADS, MAXIMUM_OPERATIONS, 2)
    return make_cost(call, ELEMENTWISE, numel, rereads=(block,), index_operations=WALK_INTEGERS * numel)


@register_cost(quantise)
def _quantise_cost(call: Call) -> Cost:
    numel = call.outputs[0].numel
    return make_cost(call, ELEMENTWISE, numel, index_operations=(WALK_INTEGERS + DIVISION_INTEGERS) * numel)


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
        scale = one
        if kind == "fp8":
            x.new_empty(()).zero_()  # where the blocks add up; it is bf16, and cast
            scale = find_scale(x).float()
        return torch._scaled_mm(quantise(x, scale), weight, scale, one, out_dtype=torch.bfloat16)

    return run


@functools.lru_cache(1)
def _shared(m: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The activations that all layers read, and the memory that all write to."""
    x, out = (torch.empty(m, columns, dtype=torch.bfloat16, device="meta") for columns in (k, n))
    return x, out
