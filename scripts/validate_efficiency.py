"""GEMMs on devices of which only the spread was published: predicted shares of the peak beside measured ones.

    python scripts/validate_efficiency.py hardware_gemm_efficiency.csv gemm.csv

The first file has the 10th, 50th and 90th percentile of what bf16 GEMMs of a size class reach on a device, in
aiconfigurator's database: the share of the matrix peak, of the bandwidth (few rows, weights that no cache holds), or
microseconds. The second has single GEMMs of the same database; the shapes of its device REFERENCE are predicted on each
device. Only the medians for the largest class, the burst and the smallest kernels were read into the profiles.
"""

from __future__ import annotations

import argparse
import csv
import random
import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tabulate import tabulate
from validate_gemm import gemms
from validation_rows import Line

from flopmeter import Hardware, load_hardware

REFERENCE = "h200-sxm-141gb"
# Devices as the first file names them. Those that gave constants of GEMM kernels are for comparison.
DEVICES = {
    "b200_sxm": "b200-sxm-180gb", "gb200": "gb200-per-gpu", "b300_sxm": "b300-sxm-288gb", "gb300": "gb300-per-gpu",
    "rtx_pro_6000_server": "rtx-pro-6000-blackwell", "h100_sxm": "h100-sxm5-80gb", "h200_sxm": "h200-sxm-141gb",
}  # fmt: skip
COMPUTE, MEMORY, LATENCY = "compute-bound", "memory-bound", "latency"
SMALL_FLOP = 5e7  # GEMMs below measure latency
LEAST_SHAPES = 8  # of a size class, for its percentiles


def predicted(shapes: Sequence[tuple[int, int, int]], device: Hardware) -> Iterator[tuple[tuple[str, str], float]]:
    """The size class of each GEMM, and what it reaches there."""
    peak = device.contraction_peak("bf16").flop_per_s
    lines = [{"gpu": device.name, "dtype": "bf16", "kind": "bfloat16", "ms": "1", **_sizes(shape)} for shape in shapes]
    for (m, n, k), row in zip(shapes, gemms(lines)["GEMM, bf16"], strict=True):
        flops, nbytes, weights = 2 * m * n * k, 2 * (m * k + k * n + m * n), 2 * n * k
        if flops < SMALL_FLOP:
            yield (LATENCY, "<5e7 FLOP"), row.predicted * 1e6
        if m <= 16 and weights >= 4 * (device.l2_cache_bytes or 0):
            yield (MEMORY, "m<=16 and weights>=4xL2"), nbytes / row.predicted / device.bandwidth_bytes_per_s
        if flops / nbytes > 2 * device.ridge_point("bf16"):
            yield (COMPUTE, _size_class(flops)), flops / row.predicted / peak


def _sizes(shape: tuple[int, int, int]) -> Line:
    return dict(zip("mnk", map(str, shape), strict=True))


def _size_class(flops: float) -> str:
    decade = len(str(int(flops))) - 1
    return f"1e+{decade:02}-1e+{16 if decade > 12 else decade + 1:02} FLOP"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("spread", type=Path, metavar="SPREAD.csv")
    parser.add_argument("gemms", type=Path, metavar="GEMMS.csv")
    parser.add_argument("--shapes", type=int, default=400, help="how many to draw (default: %(default)s)")
    arguments = parser.parse_args()
    lines = list(csv.DictReader(arguments.gemms.open()))
    shapes = sorted({(int(line["m"]), int(line["n"]), int(line["k"])) for line in lines if _is_reference(line)})
    random.Random(0).shuffle(shapes)
    measured = {
        (line["device"], line["regime"].split(" ")[0], line["bin"]): line
        for line in csv.DictReader(arguments.spread.open())
        if line["dtype"] == "bfloat16"
    }
    table = []
    for short, name in DEVICES.items():
        classes: dict[tuple[str, str], list[float]] = defaultdict(list)
        for key, value in predicted(shapes[: arguments.shapes], load_hardware(name)):
            classes[key].append(value)
        for (regime, size_class), values in sorted(classes.items()):
            line = measured.get((short, regime, size_class))
            if line is not None and len(values) >= LEAST_SHAPES:
                tenths = [statistics.quantiles(values, n=10)[place] for place in (0, 4, 8)]
                ratio = tenths[1] / float(line["p50"])
                table.append([name, regime, size_class, len(values), *tenths, *_measured(line), ratio])
    headers = ["", "", "size class", "shapes", "p10", "p50", "p90", "measured", "p50", "p90", "median / measured"]
    print(tabulate(table, headers=headers, floatfmt=".2f"))


def _is_reference(line: Line) -> bool:
    return line["gpu"] == REFERENCE and line["dtype"] == "bf16"


def _measured(line: Line) -> list[float]:
    return [float(line[percentile]) for percentile in ("p10", "p50", "p90")]


if __name__ == "__main__":
    main()
