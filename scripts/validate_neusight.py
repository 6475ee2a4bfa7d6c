"""NeuSight's measurements: operators one by one, and whole networks in fp32."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from validation_rows import Line, Row, roofline_seconds, sampled

from flopmeter import FlopMeter, Hardware, Report, load_hardware
from flopmeter.costs.arithmetic import normalization, softmax
from flopmeter.timing import uncertainty

PROFILES = {
    "P4": "p4",
    "P100": "p100-pcie-16gb",
    "V100": "v100-pcie-32gb",
    "T4": "t4",
    "A100-40": "a100-pcie-40gb",
    "A100-80": "a100-pcie-80gb",
    "L4": "l4",
    "H100": "h100-sxm5-80gb",
    "MI100": "mi100",
    "MI210": "mi210",
    "MI250": "mi250-gcd",
}

Program = Callable[[Line], Callable[[], object]]

# Rows below this measure the host's dispatch, not the device. Longer ones contain the part of it until the launch, as
# each call meets an idle device: what is left at no rows, on a straight line of time over rows at equal columns (median
# of the five cards). Products have none, tiles are steps; they stand beside what has shortest calls as long as theirs.
LEAST_SECONDS = 1e-4
DISPATCH_SECONDS = {
    "elementwise": 10e-6,
    **dict.fromkeys(("softmax", "bmm", "conv2d"), 26e-6),
    **dict.fromkeys(("layernorm", "linear"), 38e-6),
}


def operators(folder: Path, most: int | None = None) -> Iterator[tuple[str, list[Row]]]:
    """The rows of each operator file that there is, with its title; at most so many of a file."""
    for name, program in PROGRAMS.items():
        lines = sampled(operator_lines(folder, name), most)
        kept = [line for line in lines if not is_anomalous(line)]
        if lines:
            dispatch = DISPATCH_SECONDS[name]
            yield name, [_operator_row(line, program, dispatch) for line in kept]
            if len(kept) < len(lines):
                anomalous = [line for line in lines if is_anomalous(line)]
                yield f"{name}, Pascal's anomalous rows", [_operator_row(line, program, dispatch) for line in anomalous]


def operator_lines(folder: Path, name: str) -> list[Line]:
    """The lines that are long enough to tell of the device; none where both files are missing."""
    paths = (folder / f"{name}.csv", folder / f"{name}_more.csv")
    lines = (line for path in paths if path.is_file() for line in csv.DictReader(path.open()))
    return [line for line in lines if float(line["latency_ms"]) >= LEAST_SECONDS * 1e3]


def is_anomalous(line: Line) -> bool:
    """Pascal's linear layers of odd sizes ran at a third of the rate of others, and long ones at half."""
    is_pascal_linear = line["op"] == "linear" and line["gpu"] in ("P4", "P100")
    return is_pascal_linear and (line["source"] == "micro_train" or int(line["k"]) > 8192)


def _operator_row(line: Line, program: Program, dispatch_seconds: float) -> Row:
    device = load_hardware(PROFILES[line["gpu"]])
    report = operator_report(line, program, device)
    busy = uncertainty(report.timings, report.kernel_seconds, device)  # the host's part is left out
    return Row(
        group=line["op"],
        gpu=line["gpu"],
        measured=float(line["latency_ms"]) * 1e-3,
        predicted=report.kernel_seconds + dispatch_seconds,
        low=busy.low + dispatch_seconds,
        high=busy.high + dispatch_seconds,
        roofline=roofline_seconds(report, device),
    )


def operator_report(line: Line, program: Program, device: Hardware) -> Report:
    with torch.device("meta"):
        run = program(line)
    with torch.inference_mode(), FlopMeter(device) as meter:
        run()
    with kernels_of_torch_2_1():
        return meter.report()


@contextmanager
def kernels_of_torch_2_1() -> Iterator[None]:
    """What NeuSight measured has no kernels of softmax that keep rows of over 1,024 elements in registers, others for
    longer rows, and more registers in those of layer norm (as the library of torch 2.1 for CUDA 12.1 states them)."""
    newer = softmax.FORWARD, softmax.FORWARD_LOG
    older = (each._replace(longest_in_warp=1024, longest_in_block=0, loop_instructions=0) for each in newer)
    layer_norm = normalization.LAYER_NORM_FP32
    softmax.FORWARD, softmax.FORWARD_LOG = older
    normalization.LAYER_NORM_FP32 = layer_norm._replace(registers=((60, 44), (70, 40), (80, 38)))
    try:
        yield
    finally:
        softmax.FORWARD, softmax.FORWARD_LOG = newer
        normalization.LAYER_NORM_FP32 = layer_norm


def _linear(line: Line) -> Callable[[], object]:
    m, n, k = (int(line[size]) for size in "mnk")
    x, weight, bias = torch.empty(m, k), torch.empty(n, k), torch.empty(n)
    return lambda: F.linear(x, weight, bias)


def _bmm(line: Line) -> Callable[[], object]:
    b, m, n, k = (int(line[size]) for size in "bmnk")
    x, y = torch.empty(b, m, k), torch.empty(b, k, n)
    return lambda: torch.bmm(x, y)


_ELEMENTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "addu": lambda x, _: x + 2.0,
    "mul": lambda x, y: x * y,
    "mulu": lambda x, _: x * 2.0,
    "div": lambda x, y: x / y,
    "divu": lambda x, _: x / 2.0,
    "pow": lambda x, y: x**y,
    "powu": lambda x, _: x**1.7,  # measured with a random exponent
    "relu": lambda x, _: F.relu(x),
    "gelu": lambda x, _: F.gelu(x),
    "tanh": lambda x, _: torch.tanh(x),
}


def _elementwise(line: Line) -> Callable[[], object]:
    x, y = (torch.empty(int(line["rows"]), int(line["cols"])) for _ in range(2))
    return lambda: _ELEMENTWISE[line["op"]](x, y)


def _softmax(line: Line) -> Callable[[], object]:
    x = torch.empty(int(line["rows"]), int(line["cols"]))
    return lambda: torch.softmax(x, -1)


def _layernorm(line: Line) -> Callable[[], object]:
    columns = int(line["cols"])
    x, weight, bias = torch.empty(int(line["rows"]), columns), torch.empty(columns), torch.empty(columns)
    return lambda: F.layer_norm(x, (columns,), weight, bias)


def _conv2d(line: Line) -> Callable[[], object]:
    batch, c_in, c_out, kernel, size = (int(line[key]) for key in ("batch", "c_in", "c_out", "kernel", "size"))
    x, weight = torch.empty(batch, c_in, size, size), torch.empty(c_out, c_in, kernel, kernel)
    return lambda: F.conv2d(x, weight, stride=int(line["stride"]), padding=int(line["padding"]))


PROGRAMS: dict[str, Program] = {
    "linear": _linear,
    "bmm": _bmm,
    "elementwise": _elementwise,
    "softmax": _softmax,
    "layernorm": _layernorm,
    "conv2d": _conv2d,
}
