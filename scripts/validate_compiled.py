"""Kernels that inductor wrote, one by one, beside those of a profile of the same program:

    python scripts/validate_compiled.py [NAME ...]

runs compiled programs of validation/programs.py with the torch that is installed, and sets their Triton kernels beside
those of validation/traces/h100_NAME.json.gz in the order of their launch. The profiles are of torch 2.11; where another
torch or transformers fuses otherwise, only the sums are compared. flopmeter/costs/instructions.py says what of these
profiles set a constant.
"""

from __future__ import annotations

import gzip
import json
import runpy
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from tabulate import tabulate

import flopmeter

VALIDATION = Path(__file__).parents[1] / "validation"
PROGRAMS = (
    "nanogpt_train_compiled", "gpt_medium_train_compiled", "bert_train_compiled", "bert_mask_train_compiled",
    "llama_train_compiled", "deit_small_train_compiled", "resnet50_infer_compiled",
)  # fmt: skip
DEVICE = "h100-sxm5-80gb"
LARGEST_MISSES = 5


class Launched(NamedTuple):
    name: str
    seconds: float


def measured(program: str) -> list[Launched]:
    with gzip.open(VALIDATION / "traces" / f"h100_{program}.json.gz") as file:
        events = json.load(file)["traceEvents"]
    kernels = sorted((event for event in events if event.get("cat") == "kernel"), key=lambda event: event["ts"])
    return [Launched(event["name"], 1e-6 * event["dur"]) for event in kernels if event["name"].startswith("triton_")]


def predicted(program: str) -> list[Launched]:
    """Of the third step, at burst clocks, as a profile of one step is measured."""
    with flopmeter.cuda(DEVICE):
        torch.manual_seed(0)
        step = runpy.run_path(str(VALIDATION / "programs.py"))["P"][program]()
        for _ in range(2):
            step()
        with flopmeter.FlopMeter(DEVICE, clocks="burst") as meter:
            step()
    report = meter.report()
    return [
        Launched(kernel.cost.name, timing.seconds)
        for kernel, timing in zip(report.kernels, report.timings, strict=True)
        if getattr(kernel.op.call.kwargs.get("kernel"), "kind", None) == "triton"
    ]


def main(programs: list[str]) -> None:
    rows = []
    for program in programs:
        real, told = measured(program), predicted(program)
        total, sum_told = (sum(each.seconds for each in kernels) for kernels in (real, told))
        line = [program, len(real), len(told), 1e3 * total, sum_told / total]
        if len(real) == len(told):
            pairs = sorted(zip(real, told, strict=True), key=lambda pair: -abs(pair[0].seconds - pair[1].seconds))
            line.append(100 * sum(abs(one.seconds - other.seconds) for one, other in pairs) / total)
            misses = [[one.name, other.name, 1e6 * one.seconds, 1e6 * other.seconds] for one, other in pairs]
            headers = [program, "predicted as", "measured µs", "predicted µs"]
            print(tabulate(misses[:LARGEST_MISSES], headers=headers, floatfmt=".1f", maxcolwidths=60), "\n")
        rows.append(line)
    headers = ["Triton kernels", "measured", "predicted", "measured ms", "pred./meas.", "weighted error %"]
    print(f"torch {torch.__version__}\n{tabulate(rows, headers=headers, floatfmt='.3g')}")


if __name__ == "__main__":
    main(sys.argv[1:] or list(PROGRAMS))
