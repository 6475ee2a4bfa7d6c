"""The experiments of 'Making Deep Learning Go Brrrr From First Principles' (Horace He, 2022), predicted.

    python scripts/article.py repeat     a fused chain of multiplies: flat while memory-bound, then compute-bound
    python scripts/article.py doubling   double the batch: overhead, and the exception that only looks like it
    python scripts/article.py devices    which ops change regime from one generation to the next

The first two run on the article's A100-40GB. No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

import torch
from tabulate import tabulate
from torch import Tensor

from flopmeter import FlopMeter, Report, Row, load_hardware, sweep
from flopmeter.cli.targets import load_target
from flopmeter.timing import Host

A100 = "a100-sxm4-40gb"
GENERATIONS = ("a100-sxm4-80gb", "h100-sxm5-80gb", "b200-sxm-180gb")
NO_HOST = Host(launch_seconds=0.0, view_seconds=0.0, module_call_seconds=0.0)
ELEMENTS = 2**24  # fp32
# µs, read off the article's plot for an A100-40GB.
ARTICLE_MICROSECONDS = {
    1: 101.3, 2: 101.5, 4: 101.5, 8: 101.5, 16: 101.5, 32: 104.5, 64: 137.1, 128: 247.3, 256: 463.0,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    summary, _, usage = (__doc__ or "").partition("\n\n")
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=summary, epilog=usage, formatter_class=formatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    print(EXPERIMENTS[parser.parse_args(arguments).experiment]())
    return 0


def repeat() -> str:
    """`for _ in range(repeat): x = x * 2`, fused into one kernel."""
    rows = []
    for times, measured in ARTICLE_MICROSECONDS.items():
        report = multiplied(times)
        (timing,) = report.timings
        moved = report.bytes_read + report.bytes_written
        rows.append((
            times, timing.seconds * 1e6, measured, f"{timing.seconds * 1e6 / measured - 1:+.0%}",
            "compute" if timing.compute_seconds > timing.memory_seconds else "memory",
            report.flops / timing.seconds / 1e12, moved / timing.seconds / 1e12,
        ))  # fmt: skip
    headers = ("multiplies", "µs", "article", "error", "bound by", "TFLOP/s", "TB/s")
    return tabulate(rows, headers, floatfmt=("", ".1f", ".1f", "", "", ".2f", ".2f"), colalign=("right",))


def multiplied(times: int) -> Report:
    """The compiled chain of so many multiplies of 2^24 floats."""

    def chain(x: Tensor) -> Tensor:
        for _ in range(times):
            x = x * 2
        return x

    with FlopMeter(A100) as meter:
        chain(torch.empty(ELEMENTS, device="meta"))
    return meter.report(mode="compiled")


def doubling() -> str:
    """Three programs whose time hardly grows with the batch, or does, for three reasons."""
    weight = _half(16384, 16384)

    def small_ops(batch: int) -> None:
        x = _half(batch, 256)
        for _ in range(50):
            x = x.relu()

    def product(batch: int) -> None:
        _half(batch, 16384) @ weight

    def activation(batch: int) -> None:
        _half(batch, 2**22).relu()

    programs = {
        "50 activations of [batch, 256]": small_ops,
        "[batch, D] @ [D, D], D = 16384": product,
        "one activation of [batch, 2^22]": activation,
    }
    sizes = [2**power for power in range(11)]
    return "\n\n\n".join(f"{name}\n{sweep(program, sizes, A100)}" for name, program in programs.items())


def _half(*shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float16, device="meta")


def devices() -> str:
    """The kernels of Llama-3-8B reading a prompt of 256 tokens that are bound by something else on a later device."""
    program = load_target("llama-3-8b").program(seq=256)
    by_kernel: dict[str, list[Row]] = {}
    for device in GENERATIONS:
        with FlopMeter(device, host=NO_HOST) as meter:
            program.run()
        for row in meter.report().rows("kernel"):
            by_kernel.setdefault(row.name, []).append(row)
    everywhere = {name: rows for name, rows in by_kernel.items() if len(rows) == len(GENERATIONS)}
    changed = {name: rows for name, rows in everywhere.items() if len({row.regime for row in rows}) > 1}
    body = [
        (
            name,
            rows[0].calls,
            f"{rows[0].intensity:.0f}",
            *(f"{row.regime}, {row.seconds / row.calls * 1e6:.0f} µs" for row in rows),
        )
        for name, rows in changed.items()
    ]
    headers = (
        "kernel",
        "calls",
        "FLOP/B",
        *(f"{name} ({load_hardware(name).ridge_point('bf16'):.0f})" for name in GENERATIONS),
    )
    table = tabulate(body, headers, colalign=("left", "right", "right", *["left"] * len(GENERATIONS)))
    return (
        f"{len(changed)} of {len(everywhere)} kernels of Llama-3-8B reading 256 tokens change regime; in brackets"
        f" the ridge point in FLOP/B\n\n{table}\n\noverhead: the kernel's own ramp and drain take longer than its work;"
        " no host is waited for"
    )


EXPERIMENTS: dict[str, Callable[[], str]] = {"repeat": repeat, "doubling": doubling, "devices": devices}

if __name__ == "__main__":
    sys.exit(main())
