"""Print the BERT table of 'Data Movement Is All You Need' (Ivanov et al., MLSys 2021, arXiv 2007.00072).

    python scripts/bert_table.py                              Table 1: shares of FLOPs and time by class
    python scripts/bert_table.py --per-op                     Table A.1: the forward operators one by one
    python scripts/bert_table.py --hardware a100-sxm4-80gb    the same layer on another device

The paper's encoder layer (BERT-large, batch 8, 512 tokens, fp16, attention materialised, biases as kernels
of their own) runs forward and backward on meta tensors; no GPU is needed. Times are the device's, without
launch overhead, as the paper measured them, and layer norms are priced as the kernels that torch had in 2020.

The paper groups by what an operator is for, and so does this script: 'scaled softmax' is scale, softmax and
attention dropout, and bias gradients count as statistical normalization. (`flopmeter`'s own report classes
each op by itself.) Copies count as element-wise here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from tabulate import tabulate

from flopmeter import FlopMeter, HardwareError, Report, load_hardware
from flopmeter.costs.traffic import regions
from flopmeter.models import BUILTINS, backward
from flopmeter.records import CONTRACTION, ELEMENTWISE, NORMALIZATION, REDUCTION, Cost, Kernel, Reread, VectorWork
from flopmeter.report.formats import SYMBOLS
from flopmeter.timing.kernels import price

PAPER_TABLE_1 = {CONTRACTION: (99.80, 61.0), NORMALIZATION: (0.17, 25.5), ELEMENTWISE: (0.03, 13.5)}  # %
PAPER_LAYER_SECONDS = 9.14e-3  # forward + backward, PyTorch, V100-SXM2-16GB


class PaperRow(NamedTuple):
    """A forward row of Table A.1, figures as printed: GFLOP, input and output in 1e6 words, PyTorch's µs."""

    name: str
    gflop: str
    words_in: str
    words_out: str
    microseconds: float
    kernels: int = 1  # how many PyTorch launches
    remark: str = ""


MASK = "the mask is a byte an element; the paper counts a word"
PAPER_TABLE_A1 = (
    PaperRow("Q, K, V", "25.77", "7.34", "12.58", 333),
    PaperRow("Input bias", "0.013", "12.59", "12.58", 90),
    PaperRow("QK^T", "4.295", "8.39", "33.55", 189),
    PaperRow("Scaled softmax", "0.201", "33.55", "100.66", 453, 3, "three kernels hand over through memory; " + MASK),
    PaperRow("Gamma", "4.295", "37.75", "4.19", 142),
    PaperRow("Out", "8.59", "5.24", "4.19", 136),
    PaperRow("Output bias", "0.004", "4.20", "4.19", 34),
    PaperRow("Dropout", "0.004", "4.19", "8.39", 37, 1, MASK),
    PaperRow("Residual", "0.004", "8.39", "4.19", 36),
    PaperRow("LayerNorm", "0.029", "4.20", "4.19", 63),
    PaperRow("Linear (1)", "34.36", "8.39", "16.78", 451),
    PaperRow("Bias (1)", "0.017", "16.78", "16.78", 116),
    PaperRow("ReLU", "0", "16.78", "16.78", 112),
    PaperRow("Dropout (FF)", "0.017", "16.78", "33.55", 120, 1, MASK),
    PaperRow("Linear (2)", "34.36", "20.97", "4.19", 449),
    PaperRow("Bias (2)", "0.004", "4.20", "4.19", 35),
    PaperRow("Dropout (2)", "0.004", "4.19", "8.39", 37, 1, MASK),
    PaperRow("Residual (2)", "0.004", "8.39", "4.19", 37),
    PaperRow("LayerNorm (2)", "0.029", "8.39", "4.19", 63, 1, "same op as LayerNorm; the paper prints twice its input"),
)

# Threads that worked on a row in torch's layer_norm_kernel.cu until 1.10 (June 2020: 1.5): one kernel for the sums of
# each row (kCUDABlockReduceNumThreads), one that applied them (kCUDANumThreads). Since then one kernel does both.
SUM_THREADS, APPLY_THREADS = 512, 256
# Instructions of a thread to sum twice over a block, by the same source: ten for each of two levels of shuffles and as
# many for shared memory between them, two sums, and forty for its share of the row.
SUM_OPERATIONS = 2 * (2 * 10 + 20) + 40

Timed = tuple[Kernel, float]  # and its seconds


def main(arguments: list[str] | None = None) -> int:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=usage, formatter_class=formatter)
    parser.add_argument("--hardware", default="v100-sxm2-16gb", metavar="NAME", help="a profile (default: %(default)s)")
    parser.add_argument("--per-op", action="store_true", help="the 19 forward operators instead of the classes")
    options = parser.parse_args(arguments)
    try:
        report = meter_encoder_layer(options.hardware)
    except HardwareError as error:
        print(f"bert_table: {error}", file=sys.stderr)
        return 2
    print(per_op_table(report) if options.per_op else class_table(report))
    return 0


def meter_encoder_layer(hardware: str) -> Report:
    """Forward and backward of the paper's layer, seeded with a gradient tensor."""
    load_hardware(hardware).contraction_peak("fp16")  # complain before any work
    layer, inputs = BUILTINS["encoder-layer"]()
    with FlopMeter(hardware) as meter:
        backward(layer, inputs)
    return meter.report()


def class_table(report: Report) -> str:
    """Table 1 beside the paper's."""
    groups: dict[str, list[Timed]] = {name: [] for name in PAPER_TABLE_1}
    flops = dict.fromkeys(PAPER_TABLE_1, 0)
    timed = as_in_2020(report)
    for kernel, seconds in timed:
        group = paper_class(kernel)
        groups[group].append((kernel, seconds))
        flops[group] += kernel.cost.flops
    rows = [
        (
            f"{SYMBOLS[name]} {name}",
            len(groups[name]),
            100 * flops[name] / report.flops,
            printed_flops,
            100 * _seconds(groups[name]) / _seconds(timed),
            printed_time,
        )
        for name, (printed_flops, printed_time) in PAPER_TABLE_1.items()
    ]
    headers = ("class (the paper's grouping)", "calls", "% FLOPs", "paper", "% time", "paper")
    body = tabulate(rows, headers, floatfmt=("", "", ".3f", ".2f", ".1f", ".1f"))
    return (
        "BERT-large encoder layer, forward + backward, batch 8, 512 tokens"
        f" · {report.hardware.title} · fp16\n\n{body}\n\n"
        f"whole layer {_seconds(timed) * 1e3:.2f} ms on the device; the paper measured"
        f" {PAPER_LAYER_SECONDS * 1e3:.2f} ms (PyTorch on a V100-SXM2-16GB)\n"
        "grouped as in the paper: scaled softmax = scale + softmax + attention dropout; bias gradients are"
        " normalization;\ncopies are element-wise. Multiply-add = 2 FLOP."
    )


def paper_class(kernel: Kernel) -> str:
    """The paper's class of a kernel of the layer."""
    if kernel.cost.op_class == CONTRACTION:
        return CONTRACTION
    if kernel.cost.op_class in (NORMALIZATION, REDUCTION) or is_scaled_softmax(kernel):
        return NORMALIZATION
    return ELEMENTWISE


def as_in_2020(report: Report) -> list[Timed]:
    """The kernels and their seconds, those of layer norms as torch had them when the paper was written."""
    return [
        (kernel, _layer_norm_seconds(kernel.cost, report) if "layer_norm" in kernel.cost.name else timing.seconds)
        for kernel, timing in zip(report.kernels, report.timings, strict=True)
    ]


def _layer_norm_seconds(cost: Cost, report: Report) -> float:
    return sum(
        price(part, report.hardware, report.switches).busy.seconds + report.hardware.kernel_floor_seconds
        for part in layer_norm_of_2020(cost)
    )


def layer_norm_of_2020(cost: Cost) -> list[Cost]:
    """Two kernels, and backward a third that sums over the rows for weight and bias."""
    work = cost.work
    assert isinstance(work, VectorWork)

    def by(threads: int, operations: int) -> VectorWork:
        today = work.rereads[0]
        rows = Reread(0, today.rows, today.row_bytes, threads, operations, today.accesses)
        return work._replace(rereads=(rows,))

    sums = replace(cost, writes=(), work=by(SUM_THREADS, SUM_OPERATIONS))
    applied = replace(cost, work=by(APPLY_THREADS, 0))
    over_rows = [replace(cost, writes=(), work=work._replace(rereads=()))] if cost.name.endswith("backward") else []
    return [sums, applied, *over_rows]


def is_scaled_softmax(kernel: Kernel) -> bool:
    """Scale and dropout of the attention weights are the only multiplies of the attention module itself."""
    (op,) = kernel.ops
    shape = op.call.outputs[0].shape
    return op.module == "EncoderLayer.attention" and len(shape) == 3 and shape[-1] == shape[-2]


def per_op_table(report: Report) -> str:
    """The forward rows of Table A.1 beside the paper's."""
    headers = ("operator", "GFLOP", "paper", "in", "paper", "out", "paper", "µs", "paper", "differs because")
    rows = []
    for paper, kernels in forward_rows(report):
        gflop = _rounded(sum(kernel.cost.flops for kernel, _ in kernels) / 1e9, paper.gflop)
        words_in, words_out = (_rounded(words / 1e6, paper.words_in) for words in moved_words(kernels))
        microseconds = _seconds(kernels) * 1e6
        rows.append((paper.name, gflop, paper.gflop, words_in, paper.words_in, words_out, paper.words_out,
                     f"{microseconds:.0f}", f"{paper.microseconds:.0f}", paper.remark))  # fmt: skip
    body = tabulate(rows, headers, disable_numparse=True, colalign=("left", *["right"] * 8, "left"))
    return (
        f"forward operators · {report.hardware.title} · fp16 · in and out in 1e6 words of 2 bytes\n\n{body}\n\n"
        "The paper's table lists neither the layer norms' fp32 statistics nor the copy that merges the heads;"
        " both are left out here."
    )


def forward_rows(report: Report) -> Iterator[tuple[PaperRow, list[Timed]]]:
    """Each row of the paper's table with the kernels that make it up."""
    pairs = as_in_2020(report)
    merge_of_heads = "clone"
    forward = iter([p for p in pairs if p[0].ops[0].phase == "forward" and p[0].cost.name != merge_of_heads])
    for paper in PAPER_TABLE_A1:
        yield paper, [next(forward) for _ in range(paper.kernels)]
    if (left_over := next(forward, None)) is not None:
        raise RuntimeError(f"the layer ran a kernel that the paper's table does not list: {left_over[0].cost.name}")


def moved_words(kernels: list[Timed]) -> tuple[float, float]:
    """Words read and written, without fp32 statistics."""
    read = written = 0.0
    for kernel, _ in kernels:
        regions_read, regions_written = regions(kernel.ops[0].call)
        read += sum(spec.nbytes for spec in regions_read if spec.dtype.itemsize <= 2) / 2
        written += sum(spec.nbytes for spec in regions_written if spec.dtype.itemsize <= 2) / 2
    return read, written


def _seconds(kernels: list[Timed]) -> float:
    return sum(seconds for _, seconds in kernels)


def _rounded(value: float, like: str) -> str:
    """To as many digits as the paper prints."""
    return f"{value:.{len(like.partition('.')[2])}f}"


if __name__ == "__main__":
    sys.exit(main())
