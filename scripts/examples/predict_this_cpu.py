"""BERT-base, GPT-2 and ResNet-50 on this very CPU: calibrate, predict, then run them and compare.

    python scripts/examples/predict_this_cpu.py [--cpu-time]

Weights are random, type and batch are fp32 and 1. What the prediction knows of a run are its ops, not their times.
On a machine with other work each op on several threads waits for the slowest: --cpu-time measures one thread.
"""

from __future__ import annotations

import argparse
import statistics

import torch
from tabulate import tabulate

from flopmeter import FlopMeter
from flopmeter.measured import CLOCKS, Clock, calibrate
from flopmeter.models import BUILTINS


def on_this_cpu(name: str, **sizes: int) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    model, inputs = BUILTINS[name](batch=1, dtype=torch.float32, **sizes)
    model = model.to_empty(device="cpu").eval()
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.normal_(std=0.02) if tensor.ndim > 1 and tensor.is_floating_point() else tensor.fill_(1)
    return model, [torch.ones_like(x, device="cpu") for x in inputs]


parser = argparse.ArgumentParser()
parser.add_argument("--seconds", type=float, default=20, help="of calibration")
parser.add_argument("--repeats", type=int, default=7)
parser.add_argument("--cpu-time", action="store_true", help="of one thread, by which other programs do not count")
parser.add_argument("--models", default="bert-base,gpt2-124m,resnet-50")
options = parser.parse_args()

clock: Clock = "cpu" if options.cpu_time else "wall"
if options.cpu_time:
    torch.set_num_threads(1)
now = CLOCKS[clock]
cpu = calibrate(budget_seconds=options.seconds, clock=clock)
rows = []
with torch.inference_mode():
    for name in options.models.split(","):
        model, inputs = on_this_cpu(name, **({"image_size": 224} if name == "resnet-50" else {"seq": 128}))
        with FlopMeter(cpu, as_cuda=False) as meter:
            model(*inputs)
        predicted, seconds = meter.report().seconds, []
        for _ in range(options.repeats):
            start = now()
            model(*inputs)
            seconds.append(now() - start)
        measured = statistics.median(seconds)
        rows.append((name, measured * 1e3, min(seconds) * 1e3, predicted * 1e3, 100 * (predicted / measured - 1)))
print(f"{cpu.title}: {cpu.sources['default']}. {cpu.notes or ''}\n")
headers = ("model", "measured, ms", "best, ms", "predicted, ms", "error, %")
print(tabulate(rows, headers, floatfmt=("", ".1f", ".1f", ".1f", "+.0f")))
