"""What the meter costs: the same programs bare, under a mode that does nothing, FlopCounterMode, and FlopMeter.

    python scripts/bench_overhead.py                      # all programs, ten minutes
    python scripts/bench_overhead.py --rounds 21 bert-large-train op-loop

FlopCounterMode counts contractions. FlopMeter counts every op with its bytes, modules, memory and known values,
dispatches as CUDA would, and works out the report's totals; `raw` is the same without the dispatch of CUDA
(as_cuda=False), on the op stream that FlopCounterMode sees. Each round runs all of them one after another on the same
program; a column is the median over rounds of the ratio of CPU times to the bare program, the last two to
FlopCounterMode. The last line is JSON. Exit status 1 if FlopMeter takes more than 0.75x FlopCounterMode's time
anywhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch
from tabulate import tabulate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from flopmeter import FlopMeter
from flopmeter.models import BUILTINS, training_step

GOAL = 0.75  # FlopMeter's CPU time over FlopCounterMode's
LOOP_OPS = 60_000
TOTALS = ("flops", "bytes_read", "bytes_written", "seconds", "peak_memory_bytes")

Program = Callable[[], object]


class NoOp(TorchDispatchMode):
    """What any dispatch mode costs."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


OBSERVERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bare": nullcontext,
    "no-op": NoOp,
    "FlopCounterMode": lambda: FlopCounterMode(display=False),
    "FlopMeter raw": lambda: FlopMeter(as_cuda=False),
    "FlopMeter": FlopMeter,
}


def forward(name: str) -> Program:
    model, inputs = BUILTINS[name]()

    def run() -> None:
        with torch.no_grad():
            model(*inputs)

    return run


def train(name: str) -> Program:
    """Forward, backward and AdamW's first step, which makes its state."""
    model, inputs = BUILTINS[name]()
    return lambda: training_step(model, inputs, torch.optim.AdamW(model.parameters()))


def op_loop() -> Program:
    x = torch.empty(64, 64, device="meta")

    def run() -> None:
        y = x
        for _ in range(LOOP_OPS // 3):
            y = (y * x).sin() + x

    return run


PROGRAMS: dict[str, Callable[[], Program]] = {
    "bert-large-forward": lambda: forward("bert-large"),
    "bert-large-train": lambda: train("bert-large"),
    "llama-3-405b-forward": lambda: forward("llama-3-405b"),
    "llama-3-405b-train": lambda: train("llama-3-405b"),
    "resnet-50-train": lambda: train("resnet-50"),
    "op-loop": op_loop,
}


def cpu_seconds(program: Program, observer: AbstractContextManager[Any]) -> float:
    """CPU time of the program under the observer, with the report's totals where that is a meter."""
    gc.collect()
    start = time.process_time()
    with observer:
        program()
    if isinstance(observer, FlopMeter):
        report = observer.report()
        for total in TOTALS:
            getattr(report, total)
    return time.process_time() - start


def measure(program: Program, rounds: int) -> dict[str, float]:
    """Median ratios of CPU time; the first round fills caches and does not count."""
    runs = [{name: cpu_seconds(program, make()) for name, make in OBSERVERS.items()} for _ in range(rounds + 1)][1:]

    def ratio(name: str, to: str) -> float:
        return median(run[name] / run[to] for run in runs)

    return {
        "bare s": median(run["bare"] for run in runs),
        **{name: ratio(name, "bare") for name in OBSERVERS if name != "bare"},
        "raw / counter": ratio("FlopMeter raw", "FlopCounterMode"),
        "meter / counter": ratio("FlopMeter", "FlopCounterMode"),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("programs", nargs="*", metavar="PROGRAM", help=f"of {', '.join(PROGRAMS)}; default: all")
    parser.add_argument("--rounds", type=int, default=9, help="how often each is run under each (default 9)")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.programs if name not in PROGRAMS]
    if unknown or chosen.rounds < 1:
        parser.error(f"unknown program {unknown[0]!r}" if unknown else "--rounds must be at least 1")
    results = {}
    for name in chosen.programs or PROGRAMS:
        results[name] = measure(PROGRAMS[name](), chosen.rounds)
        print(f"{name} done", file=sys.stderr)
    first = next(iter(results.values()))
    rows = [(name, *figures.values()) for name, figures in results.items()]
    print(tabulate(rows, headers=("program", *first), floatfmt=".2f"))
    print(json.dumps(results))
    return int(any(figures["meter / counter"] > GOAL for figures in results.values()))


if __name__ == "__main__":
    sys.exit(main())
